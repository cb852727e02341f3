"""Which outputs change when one input does: the axes that a statistic is over."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from normswap.probe.alone import Runnable

__all__ = ["Reach", "reach"]


@dataclass(frozen=True)
class Reach:
    """What one input entry has an effect on.

    Attributes:
        shape: of the input.
        axes: the axes along which its effect spreads.
        groups: into how many parts it splits the first of `axes`.
        partial: if only the first entries of the last axis spread: how many.
        ragged: the effect is no box of full axes and equal parts of one.
        holes: it is such a box, but some entries in it do not change.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    groups: int = 1
    partial: int | None = None
    ragged: bool = False
    holes: bool = False


def reach(alone: Runnable, shape: tuple[int, ...]) -> Reach | None:
    """The effect of single entries of an input of this shape, or ``None`` if it cannot be run."""
    found = _reach(alone, shape, 1)
    if found is None or found.partial is not None or not (found.ragged or found.holes):
        return found
    # An activation hides some of what changes, other parts of it for other inputs.
    more = _reach(alone, shape, 6)
    if more is None or more.ragged:
        return more
    return replace(more, holes=True)


def _reach(alone: Runnable, shape: tuple[int, ...], inputs: int) -> Reach | None:
    """The union of what entries have an effect on over several inputs."""
    places = [(0,) * len(shape), tuple(s // 2 for s in shape), tuple(s - 1 for s in shape)]
    changed: dict[tuple[int, ...], Tensor] = {}
    for _ in range(inputs):
        x = alone.random(shape)
        y = alone(x)
        if y is None or not bool(y.isfinite().all()):
            return None
        for place in places:
            now = _changed(alone, x, y, place)
            if now is None:
                return None
            changed[place] = changed[place] | now if place in changed else now
    boxes = [_box(mask, place) for place, mask in changed.items()]
    merged = _merged(shape, boxes)
    partial = _partial(alone, shape, boxes) if merged.ragged or merged.holes else None
    return partial or merged


def _changed(alone: Runnable, x: Tensor, y: Tensor, place: tuple[int, ...]) -> Tensor | None:
    """Where the output changes with the entry at ``place``."""
    moved = x.clone()
    moved[place] += 1.5
    after = alone(moved)
    if after is None:
        return None
    return (after - y).abs() > 1e-13 * (y.abs() + float(y.abs().mean()))


@dataclass(frozen=True)
class _Box:
    spans: tuple[tuple[int, int], ...]  # first and last index per axis
    place: tuple[int, ...]
    full: bool  # everything in it changed


def _box(changed: Tensor, place: tuple[int, ...]) -> _Box:
    spans: list[tuple[int, int]] = []
    for axis in range(changed.dim()):
        others = [a for a in range(changed.dim()) if a != axis]
        along = changed.amax(others) if others else changed
        found = along.nonzero().flatten().tolist()
        spans.append((found[0], found[-1]) if found else (place[axis], place[axis]))
    volume = math.prod(last - first + 1 for first, last in spans)
    return _Box(tuple(spans), place, int(changed.sum()) == volume)


def _merged(shape: tuple[int, ...], boxes: list[_Box]) -> Reach:
    """One description for all boxes; the union of what they reach where they differ."""
    axes: list[int] = []
    groups, ragged = 1, False
    for axis, size in enumerate(shape):
        lengths = {last - first + 1 for box in boxes for first, last in [box.spans[axis]]}
        length = max(lengths)
        if length == 1:
            continue
        axes.append(axis)
        aligned = all(box.spans[axis][0] % length == 0 for box in boxes)
        if len(lengths) > 1 or size % length or not aligned:
            ragged = True
        elif length < size:
            ragged = ragged or len(axes) > 1
            groups = size // length
    return Reach(shape, tuple(axes), groups, None, ragged, not all(box.full for box in boxes))


def _partial(alone: Runnable, shape: tuple[int, ...], boxes: list[_Box]) -> Reach | None:
    """Statistics over the first entries of the last axis: the last entry changes only itself."""
    last = len(shape) - 1
    first_full = boxes[0].spans[last] == (0, shape[last] - 1) and boxes[0].full
    points = [boxes[0].spans[axis] == (0, 0) for axis in range(last)]
    if not (first_full and all(points) and all(a == b for a, b in boxes[-1].spans)):
        return None

    x = alone.random(shape)
    y = alone(x)

    def spreads(index: int) -> bool:
        changed = None if y is None else _changed(alone, x, y, (*(0,) * last, index))
        return changed is not None and int(changed.sum()) > 1

    low, high = 0, shape[last] - 1  # the entry `low` spreads, `high` does not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spreads(middle) else (low, middle)
    return Reach(shape, (last,), 1, high)
