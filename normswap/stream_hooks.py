"""Hooks that move a norm along a residual stream: into a branch, behind it, or onto the stream.

A block computes ``y' = y + f(P(y))`` in code that nobody can edit from outside. But what its branch
returns can be changed, and so any other residual form can be reached without touching the block:
if the branch returns ``f + (z - y)`` in place of ``f``, the block computes ``z + f``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

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


def on_result(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What a module returns with its result changed: a tensor, or the first item of a tuple."""
    if isinstance(output, tuple):
        items = cast("tuple[Any, ...]", output)
        return (change(items[0]), *items[1:])
    return change(output)


class NormOutput(PartOfModel):
    """A forward hook that applies a child of its module, a norm, to what the module returns."""

    def __init__(self, child: str) -> None:
        self.child = child

    def __call__(self, module: nn.Module, _args: object, output: Any) -> Any:
        """``norm(output)``."""
        return on_result(output, getattr(module, self.child))


@dataclass
class _Slot:
    """What a sublayer knows of the stream.

    Attributes:
        difference: what its skip lacks.
        scale: the divisor of its branch, and of the stream behind it.
        before: the divisor of the stream that it got.
    """

    difference: Tensor
    scale: Tensor | float
    before: Tensor | float = 1.0


def _for_rows_of(scale: Tensor | float, y: Tensor) -> Tensor | float:
    """A divisor for a stream whose rows the block may have flattened or not."""
    if isinstance(scale, Tensor) and scale.dim() != y.dim():
        return scale.reshape(*y.shape[:-1], 1)
    return scale


class StreamState(threading.local):
    """What the sublayers of one stream hand on beside it, a slot each; never saved or copied.

    Each thread has its own, so that runs in several do not meet. A run in a thread that is new (a
    recomputation in the backward pass on a GPU) reads what the last run left.

    Args:
        last: what the last run left, by sublayer.
    """

    def __init__(self, last: dict[int, Any]) -> None:
        self.last = last
        self.slots: dict[int, Any] = {}
        self.divisor: Tensor | float = 1.0  # of the stream as the last sublayer left it
        self.known = WeakTensorKeyDictionary()  # by stream, the divisor that came with it

    def __reduce__(self) -> tuple[type[StreamState], tuple[dict[int, Any]]]:
        return StreamState, ({},)

    def __getitem__(self, index: int) -> Any:
        return self.slots[index] if index in self.slots else self.last[index]

    def __setitem__(self, index: int, slot: Any) -> None:
        self.slots[index] = self.last[index] = slot

    def arriving(self, index: int, y: Tensor) -> Tensor | float:
        """The divisor of the stream ``y`` that sublayer ``index`` gets.

        A sublayer that is computed again for the gradients gets the very tensor that it got
        before, perhaps after other runs: what came with it then counts.
        """
        again = torch.is_grad_enabled() and not torch.compiler.is_compiling()
        if again and y in self.known:
            return self.known[y]
        divisor = self.divisor if index else 1.0
        if again and y.requires_grad:
            kept = divisor
            if isinstance(divisor, Tensor):  # its graph would keep ``y`` alive
                kept = divisor.detach().requires_grad_(divisor.requires_grad)
            self.known[y] = kept
        return divisor

    def clear(self) -> None:
        """Forget the run: nothing keeps its graph alive."""
        self.slots.clear()
        self.last.clear()
        self.divisor = 1.0


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
        before = self.state.arriving(self.index, y) if self.leads else self.state[self.index].before
        x = wide * _for_rows_of(before, wide)
        if self.leads:
            slot = self.state[self.index] = self._slot(wide, x, before)
            self.state.divisor = slot.scale
        return (x.to(y.dtype), *args[1:])

    def _slot(self, y: Tensor, x: Tensor, before: Tensor | float) -> _Slot:
        centred = x - x.mean(self.axes, keepdim=True) if self.centred else x
        size = (centred.square().mean(self.axes, keepdim=True) + self.eps).sqrt()
        scale = size if self.constant is None else self.constant
        z = centred / size
        return _Slot(scale * z - y, 1.0) if self.deep else _Slot(z - y, scale, before)


class OwnSize(PartOfModel):
    """A pre-hook on the norm behind the last sublayer: it gets the stream in its old size."""

    def __init__(self, state: StreamState) -> None:
        self.state = state

    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of the norm."""
        y: Tensor = args[0]
        wide = y.to(torch.promote_types(y.dtype, torch.float32))
        x = wide * _for_rows_of(self.state.divisor, wide)
        self.state.clear()
        return (x.to(y.dtype), *args[1:])


class NormedSkip(PartOfModel):
    """A forward hook on the norm ``P`` of a pre-norm sublayer: the skip gets ``P(y)`` for ``y``."""

    def __init__(self, state: StreamState, index: int) -> None:
        self.state, self.index = state, index

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Note what the skip lacks."""
        self.state[self.index] = _Slot(output - args[0], 1.0)


class ScaledSkip(PartOfModel):
    """A forward hook on what makes the stream ``x`` of a sublayer: its skip gets ``alpha * x``.

    Its branch is multiplied by ``alpha`` too, so that the next norm sees ``alpha * (x + f)``.
    """

    def __init__(self, state: StreamState, index: int, alpha: float) -> None:
        self.state, self.index, self.alpha = state, index, alpha

    def __call__(self, _module: nn.Module, _args: object, output: Tensor) -> None:
        """Note what the skip lacks."""
        self.state[self.index] = _Slot((self.alpha - 1.0) * output, 1.0 / self.alpha)


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

    def __call__(self, _module: nn.Module, _args: object, output: Any) -> Any:
        """What the block adds to its stream."""
        return on_result(output, self._onto_stream)

    def _onto_stream(self, output: Tensor) -> Tensor:
        slot: _Slot = self.state[self.index]
        wide = output.to(slot.difference.dtype)
        wide = wide / _for_rows_of(slot.scale, wide)
        if self.leads:  # the block may reshape the rows of the result afterwards
            wide = wide + slot.difference.reshape(output.shape) / self.factor
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
            total, x = self.state[self.index - 1]
            y = total + (y - x)
        self.state[self.index] = y, output
        return output if self.child is None else output + getattr(module, self.child)(y)


def hooked_child(module: nn.Module, child: str) -> int | None:
    """The number of the pre-hook that applies a child of ``module`` to its arguments."""
    hooks: Mapping[int, Any] = module._forward_pre_hooks
    for number, hook in hooks.items():
        if isinstance(hook, NormArguments) and hook.child == child:
            return number
    return None
