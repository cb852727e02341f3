"""Which shapes of input to try a module on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from torch import Tensor, nn

__all__ = ["layouts"]

BATCH = 2
_FREE = 24  # a width for modules that take any: it has many divisors
_EXTENTS = (3, 5, 4, 7, 6, 9)  # for the other axes: different, so that they can be told apart
_MOST_ENTRIES = 2**22
_MOST_WIDTHS = 6


def layouts(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    """The shapes to try, the most telling first; every axis has a size of its own."""
    shapes: dict[tuple[int, ...], None] = {}
    for shape in _candidates(module, tensors):
        if math.prod(shape) <= _MOST_ENTRIES:
            shapes[shape] = None
    return list(shapes)


def _candidates(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[int, ...]]:
    vectors = [t for t in tensors.values() if t.numel() > 1]
    if not vectors:
        for block in _widths(module):
            yield from _around(block)
        if any(t.dim() for t in tensors.values()):
            yield from _around((1,))
        return
    for tensor in vectors:
        if 1 in tensor.shape:
            yield from _filled(tuple(tensor.shape))
    largest = max(vectors, key=lambda t: t.numel())
    yield from _around(tuple(s for s in largest.shape if s != 1))


def _around(block: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Inputs with these sizes as last axes; a single one also as channels or heads."""
    a, b, c = [e for e in _EXTENTS if e not in block][:3]
    if len(block) == 1:
        yield (BATCH, a, *block)
        yield (BATCH, *block, a, b)
        yield (BATCH, a, b, *block)
        yield (BATCH, *block, a)
        yield (BATCH, *block, a, b, c)
        yield (BATCH, *block)
        yield (BATCH, a, *block, b)
    else:
        yield (BATCH, *block)
        if math.prod(block) <= _MOST_ENTRIES // 64:
            yield (BATCH, a, *block)


def _filled(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The shape of a tensor that broadcasts, its axes of size 1 filled up."""
    free = iter([e for e in _EXTENTS if e not in shape] * 2)
    filled = tuple(next(free) if s == 1 else s for s in shape)
    # A leading 1 is the batch: then the rank is given as well.
    yield (BATCH, *filled[1:]) if shape[0] == 1 else (BATCH, *filled)


def _widths(module: nn.Module) -> list[tuple[int, ...]]:
    """Sizes that a module without tensors might be made for, read off its attributes."""
    found: dict[tuple[int, ...], None] = {}
    numbers: list[int] = []
    for name, value in module.__dict__.items():
        if name.startswith("_") or isinstance(value, bool):
            continue
        if isinstance(value, (tuple, list)) and value and all(type(v) is int for v in value):
            if 1 <= len(value) <= 3 and all(v > 0 for v in value):
                found[tuple(value)] = None
        elif type(value) is int and 1 < value <= 2**18:
            numbers.append(value)
    found.update({(n,): None for n in sorted(set(numbers), reverse=True)})
    return [*list(found)[:_MOST_WIDTHS], (_FREE,)]
