"""Hooks that move a norm along a residual stream: into a branch, behind it, or onto the stream.

A block computes ``y' = y + f(P(y))`` in code that nobody can edit from outside. But what its branch
returns can be changed, and so any other residual form can be reached without touching the block:
if the branch returns ``f + (z - y)`` in place of ``f``, the block computes ``z + f``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normswap.hooks import PartOfModel


class NormArguments(PartOfModel):
    """A pre-hook (with keywords) that applies a child of its module, a norm, to arguments.

    Args:
        child: the name of the norm.
        arguments: positions and keywords; the same tensor given twice stays the same.
    """

    def __init__(self, child: str, arguments: Sequence[int | str]) -> None:
        self.child = child
        self.arguments = tuple(arguments)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call, normed."""
        norm = getattr(module, self.child)
        given: dict[int | str, Any] = {**dict(enumerate(args)), **kwargs}
        done: dict[int, Any] = {}
        for key in self.arguments:
            if key in given:
                value = given[key]
                if id(value) not in done:
                    done[id(value)] = norm(value)
                given[key] = done[id(value)]
        return tuple(given[i] for i in range(len(args))), {key: given[key] for key in kwargs}


class NormOutput(PartOfModel):
    """A forward hook that applies a child of its module, a norm, to what the module returns."""

    def __init__(self, child: str) -> None:
        self.child = child

    def __call__(self, module: nn.Module, _args: object, output: Tensor) -> Tensor:
        """``norm(output)``."""
        return getattr(module, self.child)(output)


@dataclass
class _Slot:
    """What a sublayer knows of the stream: what its skip lacks, and the divisor of its branch."""

    difference: Tensor
    scale: Tensor | float

    def scale_for(self, y: Tensor) -> Tensor | float:
        """The divisor for a stream whose rows the block may have flattened or not."""
        if isinstance(self.scale, Tensor) and self.scale.dim() != y.dim():
            return self.scale.reshape(*y.shape[:-1], 1)
        return self.scale


class StreamState:
    """What the sublayers of one stream hand on beside it, a slot each; never saved or copied."""

    def __init__(self) -> None:
        self.slots: dict[int, Any] = {}

    def __reduce__(self) -> tuple[type[StreamState], tuple[()]]:
        return StreamState, ()


class UnitStream(PartOfModel):
    """A pre-hook on the norm ``P`` of a pre-norm sublayer, which makes its stream a post-norm one.

    The stream ``y`` is ``u / s`` for the stream ``u`` of the pre-norm model, up to the mean where
    ``P`` removes it, with the divisor ``s`` that the sublayer before handed on. ``P`` gets
    ``s * y``, so that it computes what it did, eps included. The skip gets ``z = n(s * y)``, the
    normed stream without scale and shift, and the next divisor is ``sqrt(var(s * y) + eps)``, or
    ``constant``. With ``deep`` the stream keeps its size instead: the skip gets ``constant * z``.

    Args:
        state: shared by the hooks of one stream.
        index: the number of the sublayer.
        leads: whether this norm hands on; others of the same sublayer only read.
        axes: the normalised axes, counted from the end.
        eps: of the norm.
        centred: whether the norm subtracts the mean.
        constant: a calibrated divisor in place of the carried one.
        deep: DeepNorm, ``n(constant * z + f)``.
    """

    def __init__(
        self,
        state: StreamState,
        index: int,
        *,
        leads: bool,
        axes: Sequence[int],
        eps: float,
        centred: bool,
        constant: float | None = None,
        deep: bool = False,
    ) -> None:
        self.state, self.index, self.leads = state, index, leads
        self.axes, self.eps, self.centred = tuple(axes), eps, centred
        self.constant, self.deep = constant, deep

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the norm, with the stream in its old size."""
        y: Tensor = args[0]
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        before = self.state.slots.get(self.index - 1)
        x = wide if before is None or self.deep else wide * before.scale_for(wide)
        if self.leads:
            self.state.slots[self.index] = self._slot(wide, x)
        return (x.to(y.dtype), *args[1:])

    def _slot(self, y: Tensor, x: Tensor) -> _Slot:
        centred = x - x.mean(self.axes, keepdim=True) if self.centred else x
        size = (centred.square().mean(self.axes, keepdim=True) + self.eps).sqrt()
        scale = size if self.constant is None else self.constant
        z = centred / size
        return _Slot(scale * z - y, 1.0) if self.deep else _Slot(z - y, scale)


class OwnSize(PartOfModel):
    """A pre-hook on the norm behind the last sublayer: it gets the stream in its old size."""

    def __init__(self, state: StreamState, index: int) -> None:
        self.state, self.index = state, index

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the norm."""
        y: Tensor = args[0]
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        slot: _Slot = self.state.slots[self.index]
        return ((wide * slot.scale_for(wide)).to(y.dtype), *args[1:])


class NormedSkip(PartOfModel):
    """A forward hook on the norm ``P`` of a pre-norm sublayer: the skip gets ``P(y)`` for ``y``."""

    def __init__(self, state: StreamState, index: int) -> None:
        self.state, self.index = state, index

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Note what the skip lacks."""
        self.state.slots[self.index] = _Slot(output - args[0], 1.0)


class ScaledSkip(PartOfModel):
    """A forward hook on what makes the stream ``x`` of a sublayer: its skip gets ``alpha * x``.

    Its branch is multiplied by ``alpha`` too, so that the next norm sees ``alpha * (x + f)``.
    """

    def __init__(self, state: StreamState, index: int, alpha: float) -> None:
        self.state, self.index, self.alpha = state, index, alpha

    def __call__(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        """Note what the skip lacks."""
        self.state.slots[self.index] = _Slot((self.alpha - 1.0) * output, 1.0 / self.alpha)


class OntoStream(PartOfModel):
    """A forward hook on what a branch ends in: ``f`` becomes ``f / s + (z - y)``.

    Args:
        state: shared by the hooks of one stream.
        index: the number of the sublayer.
        factor: what the block multiplies the branch by before it adds it.
        leads: whether it adds the difference; a parallel branch is only divided.
    """

    def __init__(self, state: StreamState, index: int, factor: float, *, leads: bool) -> None:
        self.state, self.index, self.factor, self.leads = state, index, factor, leads

    def __call__(self, _module: nn.Module, _args: object, output: Tensor) -> Tensor:
        """What the block adds to its stream."""
        slot: _Slot = self.state.slots[self.index]
        wide = output.to(slot.difference.dtype) / slot.scale
        if self.leads:
            wide = wide + slot.difference.reshape(wide.shape) / self.factor
        return wide.to(output.dtype)


class SecondStream(PartOfModel):
    """A forward hook on the norms of a post-norm stream that sums the branches beside it.

    The norm ``S_k`` maps ``y = x + f_k`` to the next ``x``, so the sum of all branches so far is
    ``d + (y - x)``, starting with ``d = y`` at the first: ResiDual's second stream. Behind the last
    sublayer its norm is added to the output.

    Args:
        state: shared by the hooks of one stream.
        index: the number of the sublayer.
        child: behind the last sublayer: the name of the second stream's norm.
    """

    def __init__(self, state: StreamState, index: int, child: str | None = None) -> None:
        self.state, self.index, self.child = state, index, child

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The output, at the end with the second stream."""
        y: Tensor = args[0]
        if self.index > 0:
            total, x = self.state.slots[self.index - 1]
            y = total + (y - x)
        self.state.slots[self.index] = y, output
        return output if self.child is None else output + getattr(module, self.child)(y)


def hooked_child(module: nn.Module, child: str) -> int | None:
    """The number of the pre-hook that applies a child of ``module`` to its arguments."""
    hooks: Mapping[int, Any] = module._forward_pre_hooks
    for number, hook in hooks.items():
        if isinstance(hook, NormArguments) and hook.child == child:
            return number
    return None
