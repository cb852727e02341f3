"""Hooks that are part of a changed model: what a module does to a value on its way in or out.

A hook adds an op at the boundary of a module without renaming a parameter. These are picklable and
copyable, and every later run of normswap records them as ops of the model, not as somebody who
looks on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class PartOfModel:
    """A hook that computes something the model's result depends on."""


class MeanCentring(PartOfModel):
    """``x - mean(x)`` over ``axis``, on the output of a module or on one of its arguments.

    Args:
        axis: the centred axis of the value.
        argument: position or keyword of the argument for a pre-hook; ``None`` for the output.
    """

    def __init__(self, axis: int = -1, argument: int | str | None = None) -> None:
        self.axis = axis
        self.argument = argument

    def __call__(self, _module: nn.Module, args: Any, *rest: Any) -> Any:
        """The centred output (forward hook), or the arguments (pre-hook with keywords)."""
        if self.argument is None:
            return self.centred(rest[-1])
        kwargs: dict[str, Any] = dict(rest[0])
        if isinstance(self.argument, str):
            kwargs[self.argument] = self.centred(kwargs[self.argument])
            return args, kwargs
        given = list(args)
        given[self.argument] = self.centred(given[self.argument])
        return tuple(given), kwargs

    def centred(self, x: Tensor) -> Tensor:
        """``x - mean(x)``, the mean in float32 at least."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide - wide.mean(self.axis, keepdim=True)).to(x.dtype)


class ApplyChildren(PartOfModel):
    """A forward hook that applies the children of a norm, one after the other, to its result."""

    def __call__(self, module: nn.Module, _args: object, output: Tensor) -> Tensor:
        """``children(…(output))``."""
        for child in module.children():
            output = child(output)
        return output
