"""Norms that take a second tensor: a gate, a style, a condition. Seen, but not described."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normswap.probe.alone import Alone, Conditioned
from normswap.probe.dependence import reach
from normswap.probe.normaliser import is_normaliser
from normswap.probe.outcome import Nothing, Outcome
from normswap.spec import Unknown

__all__ = ["optional_input", "with_projection", "with_second_input"]

_MOST_SIZES = 6
_MOST_ENTRIES = 2**23
_MOST_MODULES = 8


def optional_input(
    alone: Alone, accepted: list[tuple[int, ...]], optional: tuple[str, ...]
) -> Unknown | None:
    """Whether one of the inputs that may be left out changes the result."""
    for name in optional:
        for shape in accepted:
            x = alone.random(shape)
            y = alone(x)
            for other in _others(alone, shape):
                result = alone.run(x, **{name: other})
                same = isinstance(result, Tensor) and y is not None and torch.equal(result, y)
                if result is not None and not same:
                    seen = f"an optional tensor, {name!r}, changes its result"
                    return Unknown("second-input", seen)
    return None


def _others(alone: Alone, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """What a second input might be: of the same shape, or one vector for each example."""
    for other in (shape, (shape[0], shape[-1]), (shape[0], 1, shape[-1]), (shape[0], shape[1])):
        yield alone.random(other)


def with_second_input(
    alone: Alone, shapes: list[tuple[int, ...]], names: tuple[str, ...], *, by_name: bool = False
) -> Outcome:
    """A norm of one of two inputs, whose gain, shift or gate comes from the other.

    Args:
        alone: the module.
        shapes: to try for the input that is normalised.
        names: of the two inputs.
        by_name: the second is an optional one.
    """
    for shape in (s for s in shapes if len(s) > 2):
        for other in _others(alone, shape):
            for first in (True,) if by_name else (True, False):
                name = names[1] if by_name else None
                if _normalises(Conditioned(alone, other, first=first, name=name), shape):
                    second = names[1 if first else 0]
                    return Unknown("second-input", f"a second tensor is required: {second!r}")
    return Nothing("it takes two tensors and does not normalise one of them")


def _normalises(conditioned: Conditioned, shape: tuple[int, ...]) -> bool:
    found = reach(conditioned, shape)
    usable = found is not None and bool(found.axes) and not found.ragged
    return usable and is_normaliser(conditioned, shape)


def with_projection(module: nn.Module, names: tuple[str, ...], norms: set[int]) -> Unknown | None:
    """A norm whose gain and shift a linear layer of its own makes of a second tensor (adaLN).

    Args:
        module: has children with matrices.
        names: of its two inputs.
        norms: ids of the modules inside that are norms themselves; they are passed by, so that
            only what the module normalises itself counts.
    """
    inside = list(module.modules())
    entries = sum(p.numel() for m in inside for p in m.parameters(recurse=False))
    if len(names) != 2 or len(inside) > _MOST_MODULES or entries > _MOST_ENTRIES:
        return None
    try:
        alone = Alone(module, follow=lambda m: id(m) in norms)
    except Exception:  # it holds what cannot be copied
        return None
    for shape, other in _pairs(inside):
        conditioned = Conditioned(alone, alone.random(other), first=True)
        if conditioned(alone.random(shape)) is not None:
            if not _normalises(conditioned, shape):
                return None
            return Unknown("second-input", f"a second tensor is required: {names[1]!r}")
    return None


def _pairs(inside: list[nn.Module]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of the input and of the condition, from the sizes that are named inside."""
    widths = _sizes(inside)
    for width in widths:
        for shape in ((2, 3, width), (2, width, 3, 5)):
            for condition in widths:
                for other in ((2, condition), (2, 1, condition), (2, 3, condition)):
                    yield shape, other


def _sizes(inside: list[nn.Module]) -> list[int]:
    """Numbers in attributes, sizes of parameters, and what several chunks of one would be."""
    named = [v for m in inside for v in vars(m).values()]
    numbers = [n for v in named for n in (v if isinstance(v, tuple) else (v,))]
    shaped = [s for m in inside for p in m.parameters(recurse=False) for s in p.shape]
    chunks = [s // n for s in shaped for n in (2, 3, 6) if s % n == 0]
    sizes = [n for n in (*numbers, *shaped, *chunks) if type(n) is int and 7 < n <= _MOST_ENTRIES]
    return list(dict.fromkeys(sizes))[:_MOST_SIZES]
