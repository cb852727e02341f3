"""Rules of ops that move numbers: reshapes, permutations, slices, splits and padding."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from normswap.dataflow.rule import (
    Later,
    Rule,
    ShapeOfSecond,
    Step,
    argument,
    down,
    op_name,
    permutation,
    shape_of,
    up,
    varies_on,
)
from normswap.maps import Blocked, Centre, Map
from normswap.program import Program, Vector


@dataclass(frozen=True)
class Reshaping(ShapeOfSecond):
    """``y`` holds the numbers of ``x`` in the same order in another shape."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map's vector takes the same reshape."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if source is node:
            return [[(x, m.carried(shape_of(node), shape_of(x)))]]
        if source is not x:
            return [[]]  # reshape_as and the like read a shape only
        return [[(node, m.carried(shape_of(x), shape_of(node)))]]


@dataclass(frozen=True)
class Permuting(Rule):
    """``y`` is ``x`` with its axes in another order."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map's vector takes the same permutation."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        dims = permutation(node)
        if source is node:
            back = [dims.index(axis) for axis in range(len(dims))]
            return [[(x, m.at(lambda v: v.permute(back)))]]
        return [[(node, m.at(lambda v: v.permute(dims)))]]


@dataclass(frozen=True)
class Rearranging(Rule):
    """A reshape, a permutation and a reshape: pixel shuffles and channel shuffle.

    ``parts`` gives the first target shape, the permutation and the last target shape.
    """

    parts: Callable[[fx.Node, tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map's vector takes the three steps, or their inverses."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        split, dims = self.parts(node, shape_of(x))
        mixed = tuple(split[d] for d in dims)
        if source is node:
            back = [dims.index(axis) for axis in range(len(dims))]
            m = m.carried(shape_of(node), mixed).at(lambda v: v.permute(back))
            return [[(x, m.carried(split, shape_of(x)))]]
        m = m.carried(shape_of(x), split).at(lambda v: v.permute(dims))
        return [[(node, m.carried(mixed, shape_of(node)))]]


def pixel_shuffle(node: fx.Node, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``[r * r * c, h, w]`` to ``[c, r * h, r * w]``."""
    r = argument(node, 1, "upscale_factor")
    *lead, c, h, w = shape
    k = len(lead)
    order = (*range(k), k, k + 3, k + 1, k + 4, k + 2)
    return (*lead, c // (r * r), r, r, h, w), order


def pixel_unshuffle(
    node: fx.Node, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``[c, r * h, r * w]`` to ``[r * r * c, h, w]``."""
    r = argument(node, 1, "downscale_factor")
    *lead, c, h, w = shape
    k = len(lead)
    order = (*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return (*lead, c, h // r, r, w // r, r), order


def channel_shuffle(
    node: fx.Node, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """``[groups * c]`` to ``[c * groups]``."""
    groups = argument(node, 1, "groups")
    n, c, *space = shape
    order = (0, 2, 1, *range(3, 3 + len(space)))
    return (n, groups, c // groups, *space), order


@dataclass(frozen=True)
class Expanding(ShapeOfSecond):
    """``y`` repeats ``x`` along axes of size 1."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map, aligned at the last axis."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if source is node:
            return [[(x, down(m, shape_of(x)))]]
        return [[(node, up(m, shape_of(node)))]] if source is x else [[]]


def piece_of(whole: Map, axis: int, start: int, stop: int, step: int = 1) -> Map:
    """A map on a value, on its positions ``start:stop:step`` of ``axis``."""
    if axis not in whole.axes:
        return whole
    if isinstance(whole, Centre) and not _is_apart(whole, axis, start, stop, step):
        raise Blocked("raw-reader", "takes a part of the centred axis, which has a mean of its own")
    return whole.at(lambda v: v.slice(axis, start, stop, step))


def _is_apart(m: Centre, axis: int, start: int, stop: int, step: int) -> bool:
    """Whether positions ``start:stop:step`` are averaged with none of the others."""
    labels = m.vector.value.reshape(m.vector.shape).movedim(axis, 0)
    inside = torch.zeros(labels.shape[0], dtype=torch.bool)
    inside[start:stop:step] = True
    parts = [set(labels[chosen].flatten().tolist()) - {-1} for chosen in (inside, ~inside)]
    return not parts[0] & parts[1]


def whole_of(piece: Map, axis: int, start: int, stop: int, size: int, step: int = 1) -> Map:
    """A map on a piece, on the whole value, whose other positions are left alone."""
    full = len(range(start, stop, step))
    if full == size:
        return piece
    if isinstance(piece, Centre) and axis not in piece.axes:
        piece = piece.repeated(axis, full)

    def embed(v: Vector) -> Vector:
        shape = list(v.shape)
        shape[axis] = full
        return v.expand(shape).embed(axis, start, stop, size, piece.fill, step)

    return piece.at(embed)


@dataclass(frozen=True)
class Repeating(Rule):
    """``repeat``: copies side by side; the map may not vary along an axis with several."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map, aligned at the last axis."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        times = list(argument(node, 1, "repeats", argument(node, 1, "dims")))
        rank = len(shape_of(node))
        times = [1] * (rank - len(times)) + times
        aligned = m if source is node else up(m, shape_of(node))
        if any(times[axis] != 1 for axis in aligned.axes):
            before = [1] * (rank - len(shape_of(x))) + list(shape_of(x))
            if source is node and all(before[axis] == 1 for axis in aligned.axes):
                return [[(x, down(m, shape_of(x)))]]  # repeated from one position
            raise Blocked("axis-mismatch", "repeats the mapped axis")
        return [[(x, down(m, shape_of(x)))]] if source is node else [[(node, aligned)]]


@dataclass(frozen=True)
class Indexing(Rule):
    """``x[:, ids]``: positions of some axes by tensors of indices; the map is on the others."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map with its axes where the op puts them."""
        x, indices = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        assert isinstance(x, fx.Node)
        if source is not node and source is not x:
            raise Blocked("op", "the positions of a lookup")
        places = kept_axes(indices, len(shape_of(x)), len(shape_of(node)))
        if source is node:
            back = {new: old for old, new in places.items()}
            return [[(x, moved_axes(m, back, len(shape_of(x))))]]
        if not m.axes <= set(places):
            raise Blocked("axis-mismatch", "picks positions of the mapped axis")
        return [[(node, moved_axes(m, places, len(shape_of(node))))]]


@dataclass(frozen=True)
class Gathering(Rule):
    """``gather(x, dim, index)`` of whole rows: the index is the same along the mapped axis."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The same map on the other side."""
        x, index = node.args[0], node.args[2]
        assert isinstance(x, fx.Node)
        rank = len(shape_of(x))
        axis = argument(node, 1, "dim") % rank
        if source not in (node, x) or axis in m.axes or varies_on(index, m.axes, rank):
            raise Blocked("op", "picks each position on its own")
        return [[(x if source is node else node, m)]]


def kept_axes(indices: Sequence[object], rank: int, result: int) -> dict[int, int]:
    """Axes of ``x`` that are not indexed → axes of ``x[indices]``, which has rank ``result``."""
    if any(isinstance(i, fx.Node) and i.meta["dtype"] == torch.bool for i in indices):
        raise Blocked("data-dependent", "picks positions by a mask")
    indexed = [axis for axis, index in enumerate(indices) if index is not None]
    others = [axis for axis in range(rank) if axis not in indexed]
    count = result - len(others)
    together = indexed == list(range(indexed[0], indexed[-1] + 1))
    first = indexed[0] if together else 0  # apart, the index's own axes come first
    return {a: a if a < first and together else i + count for i, a in enumerate(others)}


def moved_axes(m: Map, places: dict[int, int], rank: int) -> Map:
    """A map with its axes at other places of a value of ``rank``."""
    if not m.axes <= set(places):
        raise Blocked("axis-mismatch", "the mapped axis comes from the indices")
    varying = sorted(m.axes, key=lambda axis: places[axis])
    shape = [1] * rank
    for axis in varying:
        shape[places[axis]] = m.vector.shape[axis]
    rest = [axis for axis in range(len(m.vector.shape)) if axis not in m.axes]
    return m.at(lambda v: v.permute([*rest, *varying]).reshape(shape))


@dataclass(frozen=True)
class Unfolding(Rule):
    """``Tensor.unfold``: windows along one axis, their positions on a new last axis."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map, which must not vary along the unfolded axis."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        axis = argument(node, 1, "dimension") % len(shape_of(x))
        if m.axes & {axis, len(shape_of(x))}:
            raise Blocked("axis-mismatch", "takes windows along the mapped axis")
        if source is node:
            return [[(x, m.reshape(*m.vector.shape[:-1]))]]
        return [[(node, m.reshape(*m.vector.shape, 1))]]


@dataclass(frozen=True)
class Slicing(Rule):
    """``y`` is a run of positions of one axis of ``x`` (or one position, its axis dropped)."""

    def relate(
        self, node: fx.Node, source: fx.Node, m: Map, program: Program
    ) -> Sequence[Step | Later]:
        """The map's slice; back, the map with its other positions left alone."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        axis, start, stop, step = _range_of(node, shape_of(x))
        kept = list(shape_of(x))
        kept[axis] = len(range(start, stop, step))
        if source is node:
            back = m.carried(shape_of(node), tuple(kept))
            only = alone(x, back, axis, start, stop, shape_of(x)[axis], step)
            return either(back, axis, only, [(x, back)])
        piece = piece_of(m, axis, start, stop, step)
        if piece is not m and piece.is_identity:
            return [[]]
        return [[(node, piece.carried(tuple(kept), shape_of(node)))]]


def alone(
    value: fx.Node, piece: Map, axis: int, start: int, stop: int, size: int, step: int = 1
) -> Later:
    """A map on a piece as one on the whole ``value``, if there is such a map."""
    return lambda: [(value, whole_of(piece, axis, start, stop, size, step))]


def either(m: Map, axis: int, only: Later, alike: Step) -> list[Step | Later]:
    """A map on one piece of ``axis``: on that piece only, or, if it is constant there, on all."""
    if axis in m.axes:
        return [only]
    return [alike, only] if m.axes else [only, alike]


def _range_of(node: fx.Node, shape: Sequence[int]) -> tuple[int, int, int, int]:
    name = op_name(node)
    axis = argument(node, 1, "dim", 0) % len(shape)
    size = shape[axis]
    if name == "select":
        index = argument(node, 2, "index") % size
        return axis, index, index + 1, 1
    start = argument(node, 2, "start", 0) or 0
    if name == "narrow":
        if not isinstance(start, int):
            raise Blocked("data-dependent", "a slice at a computed position")
        return axis, start, start + argument(node, 3, "length"), 1
    stop = argument(node, 3, "end")
    step = argument(node, 4, "step", 1)
    start, stop, step = slice(start, stop, step).indices(size)
    return axis, start, stop, step


@dataclass(frozen=True)
class Splitting(Rule):
    """``split``, ``chunk``, ``unbind``: the pieces are the ``getitem`` nodes that read it."""

    def relate(
        self, node: fx.Node, source: fx.Node, m: Map, program: Program
    ) -> Sequence[Step | Later]:
        """Each piece takes its slice (``node`` is the split, ``source`` its input or a piece)."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        axis = argument(node, 2 if op_name(node) != "unbind" else 1, "dim", 0) % len(shape_of(x))
        pieces = self._pieces(node, axis)
        if source is x:
            return [
                [
                    (item, piece.carried(kept, shape_of(item)))
                    for item, start, stop, kept in pieces
                    for piece in [piece_of(m, axis, start, stop)]
                    if piece is m or not piece.is_identity
                ]
            ]
        item, start, stop, kept = next(p for p in pieces if p[0] is source)
        back = m.carried(shape_of(item), kept)
        only = alone(x, back, axis, start, stop, shape_of(x)[axis])
        others: Step = []
        if axis not in back.axes:
            others = [(other, back.carried(k, shape_of(other))) for other, _, _, k in pieces]
        return either(back, axis, only, [(x, back), *others])

    def _pieces(self, node: fx.Node, axis: int) -> list[tuple[fx.Node, int, int, tuple[int, ...]]]:
        """Each piece with its range on the axis and its shape before an axis is dropped."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        shape = shape_of(x)
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        count = shape[axis]
        sizes = [1] * count if op_name(node) == "unbind" else _sizes(node, count)
        pieces: list[tuple[fx.Node, int, int, tuple[int, ...]]] = []
        start = 0
        for index, size in enumerate(sizes):
            kept = (*shape[:axis], size, *shape[axis + 1 :])
            if index in items:
                pieces.append((items[index], start, start + size, kept))
            start += size
        return pieces


def _sizes(node: fx.Node, size: int) -> list[int]:
    given = argument(node, 1, "split_size")
    if given is None:
        given = argument(node, 1, "chunks", argument(node, 1, "split_sizes"))
    if isinstance(given, (list, tuple)):
        return list(given)
    name = op_name(node)
    if name == "tensor_split":
        big = size % given
        return [size // given + (i < big) for i in range(given)]
    step = -(-size // given) if name in {"chunk", "unsafe_chunk"} else given
    return [min(step, size - start) for start in range(0, size, step)]


@dataclass(frozen=True)
class Padding(Rule):
    """Padding: the scale of zeros is zero, but a shift is missing where zeros are padded."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The same map; along a padded axis itself, a scale is extended by ones."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        pads = list(argument(node, 1, "pad", argument(node, 1, "padding")))
        rank = len(shape_of(x))
        padded = {rank - 1 - i // 2 for i, p in enumerate(pads) if p}
        name = op_name(node)
        if name == "pad":
            constant = argument(node, 2, "mode", "constant") == "constant"
            value = argument(node, 3, "value", 0) or 0
        else:
            constant = name == "constant_pad_nd"
            value = argument(node, 2, "value", 0) if constant else 0
        if constant and value and not m.is_identity:
            raise Blocked("op", f"pads with {value}")
        if constant and m.kind == "shift" and padded and not m.is_identity:
            raise Blocked("zero-padding", "pads with zeros, where the shift is missing")
        along = m.axes & padded
        if not along:
            return [[(x if source is node else node, m)]]
        if len(along) > 1 or not constant or m.kind != "scale" or min(pads) < 0:
            raise Blocked("axis-mismatch", "pads along the mapped axis")
        axis = next(iter(along))
        before = pads[2 * (rank - 1 - axis)]
        stop = before + shape_of(x)[axis]
        if source is node:
            return [[(x, piece_of(m, axis, before, stop))]]
        return [[(node, whole_of(m, axis, before, stop, shape_of(node)[axis]))]]
