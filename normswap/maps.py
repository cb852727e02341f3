"""The maps that are pushed through a network: scale, shift and centring, on the axes of one value.

A map is a relation between a value before (*old*) and after (*new*) the rewrite:

* :class:`Scale`: ``new = v * old``, or with ``inverse`` ``old = v * new`` (which allows zeros);
* :class:`Shift`: ``new = old + v``, or with ``negative`` ``new = old - v``;
* :class:`Centre`: ``new = old - mean(old)`` over the positions that share a label of ``v``;
* :class:`Level`: ``new = old + c`` with any ``c`` that is constant along the axes of ``v``.

``v`` is a :class:`~normswap.program.Vector`, so a map moves with reshapes, slices and
permutations by applying them to ``v``; ``fill`` stands where a value is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from normswap.errors import NormswapError
from normswap.program import Program, Vector, groups_of


class Blocked(NormswapError):  # noqa: N818 - an answer, not a fault
    """A map cannot pass: ``code`` names the kind of reason, the message tells it."""

    def __init__(self, code: str, detail: str, scale: fx.Node | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.root = code
        """The code at the very place where it ended, whichever way led there."""
        self.scale = scale
        """A product with a stored vector that a centring could pass if the vector were 1."""
        self.place: tuple[Any, fx.Node] | None = None
        """The value that could not take its map, and the op that said so."""
        self.maps: dict[Any, Map] = {}
        """The values that had a map by then."""
        self.conflict = False
        """Whether it hangs on other maps of the same push, not on this one alone."""
        self.way: frozenset[Any] = frozenset()
        """The values on the way to it, from where the push began."""


@dataclass(frozen=True)
class Map:
    """A map on one value; ``vector`` broadcasts against the value."""

    vector: Vector
    kind: ClassVar[str]
    fill: ClassVar[float]

    @property
    def axes(self) -> frozenset[int]:
        """The axes on which it is not constant."""
        return self.vector.axes

    def at(self, move: Callable[[Vector], Vector]) -> Map:
        """The same map on the value that ``move`` makes of this one."""
        return replace(self, vector=move(self.vector))

    def reshape(self, *shape: int) -> Map:
        """The map with its vector in another shape of the same size."""
        return self.at(lambda v: v.reshape(shape))

    def carried(self, shape: tuple[int, ...], to: tuple[int, ...]) -> Map:
        """The map after a reshape of its value."""
        return self.at(lambda v: v.carried(shape, to))

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        raise NotImplementedError

    @property
    def is_identity(self) -> bool:
        """Whether it is known to change nothing."""
        return False


@dataclass(frozen=True)
class Scale(Map):
    """``new = v * old``, or ``old = v * new`` if ``inverse``."""

    inverse: bool = False
    kind: ClassVar[str] = "scale"
    fill: ClassVar[float] = 1.0

    def inverted(self) -> Scale:
        """The map that undoes this one."""
        return replace(self, inverse=not self.inverse)

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        return (
            isinstance(other, Scale)
            and self.inverse == other.inverse
            and self.vector.same(other.vector)
        )

    @property
    def is_identity(self) -> bool:
        """Whether every factor is 1."""
        return bool((self.vector.value == 1).all())

    def require_nonnegative(self) -> None:
        """Raise unless every factor is known to be >= 0 (> 0 where it is divided by)."""
        if not self.vector.known:
            raise Blocked(
                "value-unknown",
                "passes only a scale that is not negative, and the weights are not at hand "
                "(the model is on the meta device)",
            )
        value = self.vector.value
        if bool((value < 0).any()):
            negative = int((value < 0).sum())
            raise Blocked(
                "negative-scale",
                f"passes only a scale that is not negative ({negative} of {value.numel()} are)",
            )


@dataclass(frozen=True)
class Shift(Map):
    """``new = old + v``, or ``new = old - v`` if ``negative``."""

    negative: bool = False
    kind: ClassVar[str] = "shift"
    fill: ClassVar[float] = 0.0

    def negated(self) -> Shift:
        """The map that undoes this one."""
        return replace(self, negative=not self.negative)

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        return (
            isinstance(other, Shift)
            and self.negative == other.negative
            and self.vector.same(other.vector)
        )

    @property
    def is_identity(self) -> bool:
        """Whether every summand is 0."""
        return bool(self.vector.known and (self.vector.value == 0).all())


# Parts of a packed layer have fewer; parts of a sequence or of an image, which nothing could
# write one by one, have more.
MAX_LABELS = 1 << 14


@dataclass(frozen=True)
class Centre(Map):
    """``new = old - mean(old)`` over the positions of the axes that share a label.

    ``vector`` holds labels from 0 on, in order of first appearance; ``-1`` marks positions that
    are left alone. An axis along which positions never share a label has size 1.
    """

    kind: ClassVar[str] = "centring"
    fill: ClassVar[float] = -1.0

    @classmethod
    def over(cls, program: Program, shape: Sequence[int], axes: Iterable[int]) -> Centre:
        """The mean over whole ``axes`` of a value of ``shape``."""
        sizes = [size if axis in set(axes) else 1 for axis, size in enumerate(shape)]
        return cls(Vector(program, program.emit("constant", value=0.0, shape=sizes), tuple(sizes)))

    def carried(self, shape: tuple[int, ...], to: tuple[int, ...]) -> Map:
        """The map after a reshape of its value: each position keeps the others it is averaged with.

        Where a centred axis is merged with another, there is one mean for each position of that.
        """
        groups = groups_of(shape, to)
        involved = {a for before, _ in groups if set(before) & self.axes for a in before}
        sizes = [size if axis in involved else 1 for axis, size in enumerate(shape)]
        labels = self._labels().expand(sizes)
        others = [a for a in involved if self.vector.shape[a] == 1 and shape[a] > 1]
        if others and labels.numel():
            count = int(labels.max()) + 1
            index = torch.zeros(sizes, dtype=labels.dtype)
            for axis in others:
                along = [shape[axis] if a == axis else 1 for a in range(len(shape))]
                index = index * shape[axis] + torch.arange(shape[axis]).reshape(along)
            labels = torch.where(labels < 0, labels, labels + count * index)
        result: list[int] = []
        for before, after in groups:
            result += [to[axis] if set(before) & self.axes else 1 for axis in after]
        return self._of(labels.reshape(result))

    def _labels(self) -> Tensor:
        return self.vector.value.reshape(self.vector.shape).long()

    def _of(self, labels: Tensor) -> Centre:
        """The map with these labels, in the one form that equal maps have."""
        known = self.vector.program.centres
        key = tuple(labels.shape), labels.numpy().tobytes()
        if key not in known:
            known[key] = self._in_one_form(labels)
        return Centre(known[key])

    def _in_one_form(self, labels: Tensor) -> Vector:
        program = self.vector.program
        whole = bool((labels == 0).all())
        labels = labels if whole else _shrunk(labels)
        shape, flat = tuple(labels.shape), labels.reshape(-1)
        size = flat.numel()
        block = int((flat == flat[0]).sum()) if size else 1
        if whole or bool((flat == 0).all()):
            ref = program.emit("constant", value=0.0, shape=list(shape))
        elif torch.equal(flat, torch.arange(size) // block):
            ref = program.emit("blocks", size=size, block=block)
            ref = program.emit("reshape", ref, shape=list(shape))
        else:
            ref = program.emit("table", values=flat.double().tolist())
            ref = program.emit("reshape", ref, shape=list(shape))
        return Vector(program, ref, shape)

    def repeated(self, axis: int, count: int) -> Centre:
        """The same map with a mean of its own for each of ``count`` positions of ``axis``.

        In this form, unlike in the usual one, the axis is there to be cut or extended.
        """
        labels = self._labels()
        sizes = [count if a == axis else size for a, size in enumerate(labels.shape)]
        if math.prod(sizes) > MAX_LABELS:
            raise Blocked("axis-mismatch", "is a part of an axis, whose other parts stay")
        index = torch.arange(count).reshape([count if a == axis else 1 for a in range(len(sizes))])
        labels = labels.expand(sizes)
        labels = torch.where(labels < 0, labels, labels + (int(labels.max()) + 1) * index)
        program = self.vector.program
        ref = program.emit("table", values=labels.reshape(-1).double().tolist())
        ref = program.emit("reshape", ref, shape=sizes)
        return Centre(Vector(program, ref, tuple(sizes)))

    def at(self, move: Callable[[Vector], Vector]) -> Map:
        """The same map on the value that ``move`` makes of this one."""
        moved = move(self.vector)
        return self._of(moved.value.reshape(moved.shape).long())

    @property
    def is_identity(self) -> bool:
        """Whether every position is left alone."""
        return bool((self.vector.value < 0).all())

    @property
    def is_whole(self) -> bool:
        """Whether there is one mean, over all positions."""
        return bool((self.vector.value == 0).all())

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        return isinstance(other, Centre) and self.vector.same(other.vector)


def _shrunk(labels: Tensor) -> Tensor:
    """Labels in order of first appearance; axes that share no label between positions shrunk."""
    for axis, size in enumerate(labels.shape):
        if size == 1 or size == labels.numel():
            continue
        rows = labels.movedim(axis, 0).reshape(size, -1)
        if _are_alike_and_apart(rows):
            kept = [1 if a == axis else s for a, s in enumerate(labels.shape)]
            labels = rows[0].reshape(kept)
    return _in_order(labels.reshape(-1)).reshape(labels.shape)


def _are_alike_and_apart(rows: Tensor) -> bool:
    """Whether all rows are cut into parts in the same way, and no two share a part."""
    marked = rows + 1  # 0: left alone
    row, column = (torch.arange(size) for size in rows.shape)
    lowest = _first(marked, row[:, None].expand_as(rows), int(marked.max()) + 1)
    if not bool(((lowest[marked] == row[:, None]) | (marked == 0)).all()):
        return False
    start = _first(marked, column.expand_as(rows), len(lowest))
    start[0] = -1
    parts = start[marked]  # each position by the first column of its part
    return bool((parts == parts[0]).all())


def _in_order(labels: Tensor) -> Tensor:
    """The same partition, its parts numbered in order of first appearance."""
    marked = labels + 1  # 0: left alone
    count = int(marked.max()) + 1 if marked.numel() else 1
    first = _first(marked, torch.arange(labels.numel()), count)
    first[0] = -1
    numbers = torch.empty_like(first)
    numbers[first.argsort(stable=True)] = torch.arange(count)
    return numbers[marked] - 1


def _first(marked: Tensor, places: Tensor, count: int) -> Tensor:
    """For each of ``count`` marks the lowest of the places where it stands."""
    unmarked = torch.full((count,), places.numel() + 1)
    return unmarked.scatter_reduce(0, marked.reshape(-1), places.reshape(-1), "amin")


@dataclass(frozen=True)
class Level(Map):
    """``new = old + c`` with any ``c`` that is constant along the axes of ``vector`` of size > 1.

    What a shift of a key makes of attention scores: a softmax along those axes does not see it.
    """

    kind: ClassVar[str] = "level"
    fill: ClassVar[float] = 0.0

    def carried(self, shape: tuple[int, ...], to: tuple[int, ...]) -> Map:
        """The map after a reshape, which must leave its axes whole."""
        for before, after in groups_of(shape, to):
            wide = [a for a in before if shape[a] > 1], [a for a in after if to[a] > 1]
            if set(before) & self.axes and max(map(len, wide)) > 1:
                raise Blocked("axis-mismatch", "reshapes the axis of a softmax with others")
        return self.at(lambda v: v.carried(shape, to, squash=False))

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        return isinstance(other, Level) and self.vector.shape == other.vector.shape
