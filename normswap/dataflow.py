"""One table: what each op does to a map on one of its values.

Every op is described once, for every kind of map and for both directions, by a :class:`Rule`:
given a map on one endpoint of the op (its output or an operand), which maps must its other
endpoints take so that the op still computes the right thing? A rule answers with alternatives, in
order of preference, each a list of (value, map); an empty list means that the op does not care.
Where there is no alternative it raises :class:`~normswap.maps.Blocked` with the reason.

Weights and biases are operands like any other: a convolution that must scale its output asks its
weight and bias to take the scale, and that a weight is read by another call as well is the same
question as an activation with two readers.

Notation of the comments: ``x`` input, ``y`` output, ``W`` weight, ``b`` bias; axes count from 0.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from normswap.capture import hook_read, stale_read
from normswap.maps import Blocked, Centre, Map, Scale, Shift
from normswap.program import Program, Vector


@dataclass(frozen=True)
class Side:
    """The output or input channels of a stored weight.

    A scale of its rows and one of its columns are independent of each other, so a weight takes
    one map for each side: a depthwise convolution between two scaled values, for example.
    """

    node: fx.Node
    inputs: bool


Value = fx.Node | Side
"""What a map can be on."""

Step = list[tuple[Value, Map]]
"""Maps that other endpoints of an op must take."""

PASS = "pass"
NONNEGATIVE = "nonnegative"
BLOCK = "block"

_activation = "activation-between"


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of the value of ``node`` in the recorded run."""
    return node.meta["shape"]


def op_name(node: fx.Node) -> str:
    """The op's name without overload and without the underscore of in-place forms."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = target.overloadpacket.__name__
        return name[:-1] if name.endswith("_") and not name.endswith("__") else name
    return getattr(target, "__name__", str(target))


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of an op by position or keyword."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def is_stored(node: Any) -> bool:
    """Whether ``node`` is a parameter or buffer of the model."""
    return isinstance(node, fx.Node) and node.meta.get("kind") == "tensor"


def named_value(program: Program, node: fx.Node) -> Vector:
    """A stored tensor, or a view or cast of one, as a value of the program.

    Raises:
        Blocked: the tensor is computed (a parametrised weight).
    """
    if is_stored(node):
        return Vector.of(program, node.meta["tensor"].name, shape_of(node))
    name = op_name(node)
    if node.op == "call_function" and name in CASTS:
        return named_value(program, node.args[0])  # type: ignore[arg-type]
    if node.op == "call_function" and name in PERMUTATIONS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return named_value(program, source).permute(_permutation(node))
    if node.op == "call_function" and name in RESHAPES:
        return named_value(program, node.args[0]).reshape(shape_of(node))  # type: ignore[arg-type]
    raise Blocked("parametrised", f"the tensor is computed ({name}), not stored")


def describe_tensor(node: fx.Node) -> str:
    """The name of a stored tensor, quoted."""
    return repr(node.meta["tensor"].name)


class Rule:
    """What one op does to maps."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """Alternatives for the other endpoints of ``node`` when ``source`` takes ``m``.

        ``source`` is ``node`` itself for its output.
        """
        raise NotImplementedError

    def relate_side(self, node: fx.Node, side: Side, m: Map, program: Program) -> list[Step]:
        """The same for one side of a weight; most ops know a weight as a whole only."""
        return self.relate(node, side.node, m, program)

    def constraint(self, node: fx.Node, source: Value, m: Map) -> Any:
        """What ``source`` takes part in: an op may hold several independent constraints."""
        return node


def _only_on(m: Map, axes: Sequence[int], what: str) -> None:
    """Raise unless the map varies on ``axes`` only."""
    if not m.axes <= set(axes):
        raise Blocked(
            "axis-mismatch",
            f"{what} works along axis {sorted(axes)}, the {m.kind} along {sorted(m.axes)}",
        )


def _down(m: Map, shape: Sequence[int]) -> Map:
    """A map on an output, on an operand of ``shape`` that is broadcast to it."""
    try:
        moved = m.at(lambda v: v.with_rank(len(shape)))
    except ValueError:
        raise Blocked("axis-mismatch", "an operand is broadcast along the mapped axis") from None
    if any(moved.vector.shape[axis] != shape[axis] for axis in moved.axes):
        raise Blocked("axis-mismatch", "an operand is broadcast along the mapped axis")
    return moved


def _up(m: Map, shape: Sequence[int]) -> Map:
    """A map on an operand, on the output of ``shape`` that it is broadcast to."""
    return m.at(lambda v: v.with_rank(len(shape)))


def _operands(node: fx.Node, count: int = 2) -> list[Any]:
    return [argument(node, i, ("self", "other")[i]) for i in range(count)]


# -- one value in, one out ------------------------------------------------------------------------


@dataclass(frozen=True)
class Passing(Rule):
    """``y = f(x)`` that acts alike on every position of the mapped axis.

    ``axes`` gives the axes of ``x`` that the op mixes or resamples, on which a map may not vary.
    ``scale``, ``shift`` and ``centre`` say what passes; ``check`` adds conditions.
    """

    scale: str = PASS
    shift: str = PASS
    centre: str = PASS
    axes: Callable[[fx.Node], Sequence[int]] = lambda node: ()
    check: Callable[[fx.Node, Map], None] = lambda node, m: None
    code: str = "op"

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The same map on the other side."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if source not in (node, x) or sum(a is x for a in node.all_input_nodes) != 1:
            raise Blocked("op", "a value that it computes with")
        condition = {"scale": self.scale, "shift": self.shift}.get(m.kind, self.centre)
        if condition == BLOCK:
            raise Blocked(self.code, f"a {m.kind} does not pass")
        if condition == NONNEGATIVE:
            assert isinstance(m, Scale)
            _require_nonnegative(m, self.code)
        mixed = {axis % len(shape_of(x)) for axis in self.axes(node)} if shape_of(x) else set[int]()
        if m.axes & mixed:
            raise Blocked("axis-mismatch", f"mixes axis {sorted(m.axes & mixed)}")
        self.check(node, m)
        return [[(x if source is node else node, m)]]


def _require_nonnegative(m: Scale, code: str) -> None:
    try:
        m.require_nonnegative()
    except Blocked as blocked:  # an activation is what to name: a shift would not pass it anyway
        named = _activation if code == _activation else blocked.code
        raise Blocked(named, blocked.detail) from None


def _last(count: int) -> Callable[[fx.Node], Sequence[int]]:
    return lambda node: range(-count, 0)


def _check_average(node: fx.Node, m: Map) -> None:
    """Averaging keeps a shift only if every window averages true values, with weights of sum 1."""
    if m.kind != "shift" or m.is_identity:
        return
    padding = argument(node, 3, "padding", 0)
    padded = any(padding) if isinstance(padding, (list, tuple)) else bool(padding)
    if padded and argument(node, 5, "count_include_pad", True):
        raise Blocked("zero-padding", "averages zero padding in, where the shift is missing")
    if argument(node, 6, "divisor_override") is not None:
        raise Blocked("op", "divides by a fixed number, which scales the shift")


def _check_cast(node: fx.Node, m: Map) -> None:
    if not node.meta["dtype"].is_floating_point:
        raise Blocked("op", f"casts to {node.meta['dtype']}")


def _check_dropout(node: fx.Node, m: Map) -> None:
    """In training an elementwise dropout zeroes what a shift or a mean was added to."""
    if argument(node, 2, "train", True) and m.kind != "scale":
        raise Blocked("training-mode", f"in training a {m.kind} does not pass")


@dataclass(frozen=True)
class Reshaping(Rule):
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


def _permutation(node: fx.Node) -> list[int]:
    rank = len(shape_of(node))
    dims = list(range(rank))
    name = op_name(node)
    if name == "permute":
        return [d % rank for d in argument(node, 1, "dims")]
    if name in {"t", "numpy_T", "adjoint", "mT"}:
        if name in {"mT", "adjoint"}:
            dims[-2], dims[-1] = dims[-1], dims[-2]
            return dims
        return dims[::-1]
    first, second = argument(node, 1, "dim0"), argument(node, 2, "dim1")
    if name == "movedim" or isinstance(first, (list, tuple)):
        origin = [first] if isinstance(first, int) else list(first)
        target = [second] if isinstance(second, int) else list(second)
        moved = [d for d in dims if d not in {o % rank for o in origin}]
        for to, source in sorted(zip((t % rank for t in target), origin, strict=True)):
            moved.insert(to, source % rank)
        return moved
    a, b = first % rank, second % rank
    dims[a], dims[b] = dims[b], dims[a]
    return dims


@dataclass(frozen=True)
class Permuting(Rule):
    """``y`` is ``x`` with its axes in another order."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map's vector takes the same permutation."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        dims = _permutation(node)
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


def _pixel_shuffle(
    node: fx.Node, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    r = argument(node, 1, "upscale_factor")
    *lead, c, h, w = shape
    k = len(lead)
    order = (*range(k), k, k + 3, k + 1, k + 4, k + 2)
    return (*lead, c // (r * r), r, r, h, w), order


def _pixel_unshuffle(
    node: fx.Node, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    r = argument(node, 1, "downscale_factor")
    *lead, c, h, w = shape
    k = len(lead)
    order = (*range(k), k, k + 2, k + 4, k + 1, k + 3)
    return (*lead, c, h // r, r, w // r, r), order


def _channel_shuffle(
    node: fx.Node, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    groups = argument(node, 1, "groups")
    n, c, *space = shape
    order = (0, 2, 1, *range(3, 3 + len(space)))
    return (n, groups, c // groups, *space), order


@dataclass(frozen=True)
class Expanding(Rule):
    """``y`` repeats ``x`` along axes of size 1."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map, aligned at the last axis."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        if source is node:
            return [[(x, _down(m, shape_of(x)))]]
        return [[(node, _up(m, shape_of(node)))]] if source is x else [[]]


@dataclass(frozen=True)
class Reducing(Rule):
    """A mean, maximum or sum over other axes than the mapped one."""

    scale: str = PASS
    shift: str = PASS

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map without the reduced axes."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        shape = shape_of(x)
        dims = argument(node, 1, "dim")
        dims = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
        reduced = {d % len(shape) for d in dims}
        kept = [1 if axis in reduced else size for axis, size in enumerate(shape)]
        if {"scale": self.scale, "shift": self.shift}.get(m.kind, PASS) == BLOCK:
            raise Blocked("op", f"a {m.kind} does not pass")
        if m.kind == "scale" and self.scale == NONNEGATIVE:
            assert isinstance(m, Scale)
            m.require_nonnegative()
        if source is node:
            return [[(x, m.carried(shape_of(node), tuple(kept)))]]
        if m.axes & reduced:
            raise Blocked("axis-mismatch", "reduces over the mapped axis")
        return [[(node, m.carried(tuple(kept), shape_of(node)))]]


# -- pieces of an axis ---------------------------------------------------------------------------


def _piece(whole: Map, axis: int, start: int, stop: int, step: int = 1) -> Map:
    """A map on a value, on its positions ``start:stop:step`` of ``axis``."""
    if axis not in whole.axes:
        return whole
    return whole.at(lambda v: v.slice(axis, start, stop, step))


def _whole(piece: Map, axis: int, start: int, stop: int, size: int, step: int = 1) -> Map:
    """A map on a piece, on the whole value, whose other positions are left alone."""
    if isinstance(piece, Centre) and axis not in piece.axes:
        return piece
    full = len(range(start, stop, step))
    if full == size:
        return piece

    def embed(v: Vector) -> Vector:
        shape = list(v.shape)
        shape[axis] = full
        return v.expand(shape).embed(axis, start, stop, size, piece.fill, step)

    return piece.at(embed)


@dataclass(frozen=True)
class Slicing(Rule):
    """``y`` is a run of positions of one axis of ``x`` (or one position, its axis dropped)."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map's slice; back, the map with its other positions left alone."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        axis, start, stop, step = _range_of(node, shape_of(x))
        kept = list(shape_of(x))
        kept[axis] = len(range(start, stop, step))
        if source is node:
            back = m.carried(shape_of(node), tuple(kept))
            only: Step = [(x, _whole(back, axis, start, stop, shape_of(x)[axis], step))]
            return _either(back, axis, only, [(x, back)])
        piece = _piece(m, axis, start, stop, step)
        if piece is not m and piece.is_identity:
            return [[]]
        return [[(node, piece.carried(tuple(kept), shape_of(node)))]]


def _either(m: Map, axis: int, only: Step, alike: Step) -> list[Step]:
    """A map on one piece of ``axis``: on that piece only, or, if it is constant there, on all."""
    if axis in m.axes:
        return [only]
    if isinstance(m, Centre):
        return [alike]
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

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
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
                    for piece in [_piece(m, axis, start, stop)]
                    if piece is m or not piece.is_identity
                ]
            ]
        item, start, stop, kept = next(p for p in pieces if p[0] is source)
        back = m.carried(shape_of(item), kept)
        only: Step = [(x, _whole(back, axis, start, stop, shape_of(x)[axis]))]
        others: Step = [(other, back.carried(k, shape_of(other))) for other, _, _, k in pieces]
        return _either(back, axis, only, [(x, back), *others])

    def _pieces(self, node: fx.Node, axis: int) -> list[tuple[fx.Node, int, int, tuple[int, ...]]]:
        """Each piece with its range on the axis and its shape before an axis is dropped."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        shape = shape_of(x)
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if op_name(node) == "unbind":
            sizes = [1] * shape[axis]
        else:
            sizes = _sizes(node, shape[axis])
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
            return [[(x, _piece(m, axis, before, stop))]]
        return [[(node, _whole(m, axis, before, stop, shape_of(node)[axis]))]]


# -- several values ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adding(Rule):
    """``y = x1 + x2`` and ``x1 - x2``: a scale and ``C`` on every branch, a shift on one."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        operands = _operands(node)
        tensors = [v for v in operands if isinstance(v, fx.Node)]
        for value in operands:
            if not isinstance(value, fx.Node) and value and m.kind != "shift":
                raise Blocked("op", f"adds the number {value}")
        if m.kind == "shift":
            return self._shift(node, operands, source, m)
        on_output = m if source is node else _up(m, shape_of(node))
        step: Step = [(node, on_output)]
        step += [(v, _down(on_output, shape_of(v))) for v in dict.fromkeys(tensors)]
        return [step]

    def _shift(self, node: fx.Node, operands: list[Any], source: fx.Node, m: Map) -> list[Step]:
        assert isinstance(m, Shift)
        names = {"sub": (1, -1), "rsub": (-1, 1)}.get(op_name(node), (1, 1))
        if argument(node, 2, "alpha", 1) != 1:
            raise Blocked("op", "adds with a factor")
        if operands[0] is operands[1]:
            raise Blocked("op", "adds a value to itself")
        signs = dict(zip(operands, names, strict=True))
        if source is not node:
            moved = _up(m, shape_of(node))
            assert isinstance(moved, Shift)
            m = moved if signs[source] > 0 else moved.negated()
            # Onward, or made up for in the other summand.
            onward: list[Step] = [[(node, m)]]
            return onward + self._into_summands(operands, signs, source, m.negated())
        steps = self._into_summands(operands, signs, source, m)
        if not steps:
            raise Blocked("axis-mismatch", "no summand varies on the mapped axis")
        return steps

    def _into_summands(
        self, operands: list[Any], signs: dict[Any, int], source: fx.Node, m: Shift
    ) -> list[Step]:
        steps: list[Step] = []
        for value in operands:
            if isinstance(value, fx.Node) and value is not source:
                try:
                    taken = _down(m, shape_of(value))
                except Blocked:
                    continue
                assert isinstance(taken, Shift)
                steps.append([(value, taken if signs[value] > 0 else taken.negated())])
        return steps


@dataclass(frozen=True)
class Alike(Rule):
    """``where``, ``stack``, ``maximum`` …: every value operand and the output take the map.

    ``values`` gives the value operands; ``scale`` says which scales pass.
    """

    values: Callable[[fx.Node], list[Any]]
    scale: str = PASS

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The same map everywhere."""
        values = self.values(node)
        tensors = [v for v in values if isinstance(v, fx.Node)]
        if source is not node and source not in tensors:
            raise Blocked("op", "a value that decides between others")
        if isinstance(m, Scale) and self.scale == NONNEGATIVE:
            m.require_nonnegative()
        for value in values:
            if not isinstance(value, fx.Node) and (m.kind == "shift" or value not in (0, None)):
                raise Blocked("op", f"puts the number {value} in")
        on_output = m if source is node else _up(m, shape_of(node))
        step: Step = [(node, on_output)]
        return [step + [(v, _down(on_output, shape_of(v))) for v in dict.fromkeys(tensors)]]


@dataclass(frozen=True)
class Concatenating(Rule):
    """``cat`` and ``stack``: along the axis a slice for each branch, else every branch alike."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        parts: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        stacked = op_name(node) == "stack"
        rank = len(shape_of(node))
        axis = argument(node, 1, "dim", 0) % rank
        parts = [p for p in parts if stacked or len(shape_of(p)) == rank]  # legacy empty parts
        pieces: list[tuple[fx.Node, int, int, tuple[int, ...]]] = []
        start = 0
        for part in parts:
            kept = shape_of(part)
            kept = (*kept[:axis], 1, *kept[axis:]) if stacked else kept
            pieces.append((part, start, start + kept[axis], kept))
            start += kept[axis]
        if source is node:
            return [
                [
                    (part, piece.carried(kept, shape_of(part)))
                    for part, begin, end, kept in pieces
                    for piece in [_piece(m, axis, begin, end)]
                    if piece is m or not piece.is_identity
                ]
            ]
        mine = [p for p in pieces if p[0] is source]
        _, begin, end, kept = mine[0]
        lifted = m.carried(shape_of(source), kept)
        if isinstance(m, Centre) and axis in lifted.axes:
            raise Blocked("op", "concatenates along the centred axis")
        others: Step = [(p, lifted.carried(k, shape_of(p))) for p, _, _, k in pieces]
        only: Step = [(node, _whole(lifted, axis, begin, end, start))]
        steps = _either(lifted, axis, only, [(node, lifted), *others])
        if len(mine) > 1:  # the value stands at several places
            steps = [step for step in steps if step is not only]
        if not steps:
            raise Blocked("op", "concatenates a value with itself")
        return steps


@dataclass(frozen=True)
class Multiplying(Rule):
    """``y = x1 * x2`` and ``x1 / x2``: a scale goes into one factor."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """Back: into a stored factor, else into one of the two. Forward: likewise, or on."""
        operands = _operands(node)
        if operands[0] is operands[1]:
            raise Blocked("op", "multiplies a value with itself")
        if op_name(node) == "div" and argument(node, 2, "rounding_mode") is not None:
            raise Blocked("op", "rounds")
        if isinstance(m, Scale):
            return self._scale(node, operands, source, m)
        factor = next((v for v in operands if v is not source), None)
        if source is node:
            value, factor = operands
        else:
            value = source
        if (
            isinstance(m, Shift)
            and isinstance(factor, fx.Node)
            and is_stored(factor)
            and op_name(node) == "mul"
        ):
            return self._shift_by_vector(node, value, factor, source, m)
        if m.kind == "shift" and isinstance(factor, (int, float)) and factor:
            if op_name(node) == "div":
                if value is operands[1]:
                    raise Blocked("op", "divides by the value")
                factor = 1 / factor
            if not isinstance(value, fx.Node):
                raise Blocked("op", "a number times a value")
            ratio = 1 / factor if source is node else factor
            moved = m.at(lambda v: v.op("times", v.shape, factor=ratio))
            return [[(value if source is node else node, moved)]]
        if m.kind == "centring" and isinstance(value, fx.Node):
            return self._centre(node, value, factor, source, m)
        raise Blocked("op", f"a {m.kind} does not pass a product of values")

    def _scale(self, node: fx.Node, operands: list[Any], source: fx.Node, m: Scale) -> list[Step]:
        divides = op_name(node) == "div"
        on_output = m if source is node else _up(m, shape_of(node))
        assert isinstance(on_output, Scale)
        if source is not node and divides and source is operands[1]:
            on_output = on_output.inverted()
        steps: list[Step] = []
        stored_first = sorted(operands, key=lambda v: not is_stored(v))
        for value in stored_first:
            if not isinstance(value, fx.Node) or value is source:
                continue
            needed = on_output if source is node else on_output.inverted()
            if divides and value is operands[1]:
                needed = needed.inverted()
            try:
                steps.append([(value, _down(needed, shape_of(value)))])
            except Blocked:
                continue
        if source is not node:
            steps.append([(node, on_output)])
            if steps[0][0][0] is not node and not is_stored(steps[0][0][0]):
                steps = steps[::-1]  # on along the stream rather than into another activation
        if not steps:
            raise Blocked("axis-mismatch", "no factor varies on the mapped axis")
        return steps

    def _shift_by_vector(
        self, node: fx.Node, value: Any, factor: fx.Node, source: fx.Node, m: Shift
    ) -> list[Step]:
        """A stored factor ``v``: ``v * t`` forward, ``t / v`` back."""
        program = m.vector.program
        other = named_value(program, factor).with_rank(len(shape_of(node)))
        vector = m.vector.with_rank(len(shape_of(node)))
        if source is node and not (other.known and bool((other.value != 0).all())):
            raise Blocked("zero-scale", f"the shift would be divided by {describe_tensor(factor)}")
        shape = tuple(max(a, b) for a, b in zip(vector.shape, other.shape, strict=True))
        ref = program.emit("divide" if source is node else "multiply", vector.ref, other.ref)
        moved = m.at(lambda v: Vector(program, ref, shape))
        if source is node:
            return [[(value, _down(moved, shape_of(value)))]]
        return [[(node, moved)]]

    def _centre(
        self, node: fx.Node, value: fx.Node, factor: Any, source: fx.Node, m: Map
    ) -> list[Step]:
        if isinstance(factor, fx.Node):
            on_output = m if source is node else _up(m, shape_of(node))
            rank = len(shape_of(factor))
            lead = len(shape_of(node)) - rank
            if any(a >= lead and shape_of(factor)[a - lead] != 1 for a in on_output.axes):
                raise Blocked("op", "multiplies by a value that varies on the centred axis")
        other = _down(m, shape_of(value)) if source is node else _up(m, shape_of(node))
        return [[(value if source is node else node, other)]]


def _side(weight: fx.Node, *, inputs: bool) -> Value:
    return Side(weight, inputs) if is_stored(weight) else weight


# -- contractions with weights ----------------------------------------------------------------------


@dataclass(frozen=True)
class Contraction(Rule):
    """A linear map with weight and bias: linear layers and convolutions of every kind.

    On the output channels a map goes into ``W`` and ``b``; on the input channels its inverse goes
    into ``W``, and a shift into ``b`` by what ``W`` makes of it.
    """

    def operands(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """``x``, ``W`` and ``b``."""
        raise NotImplementedError

    def axes(self, node: fx.Node) -> tuple[int, int]:
        """The channel axis of ``x`` and of ``y``."""
        raise NotImplementedError

    def outputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """A map on the output channels ``[out]`` as a map on ``W``."""
        raise NotImplementedError

    def inputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """A map on the input channels ``[in]`` as a map on ``W``."""
        raise NotImplementedError

    def from_weight(self, node: fx.Node, m: Map) -> tuple[bool, Map] | None:
        """A map on ``W`` as ``(on the input channels?, map on the channels)``, if it is one."""
        raise NotImplementedError

    def taken(self, node: fx.Node, t: Vector, program: Program) -> Vector:
        """What a constant ``t`` on the input channels adds to the output channels."""
        raise NotImplementedError

    def check_shift(self, node: fx.Node) -> None:
        """Raise unless every output position sees all taps of a shift on the input."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        x, weight, bias = self.operands(node)
        if x is weight:
            raise Blocked("op", "its weight is its input")
        if source is x:
            return self._from_input(node, m, program)
        if source is weight:
            along = self.from_weight(node, m) if isinstance(m, Scale) else None
            if along is None:
                raise Blocked("shared", "another call reads the same weight")
            return [
                self._input_side(node, along[1]) if along[0] else self._output_side(node, along[1])
            ]
        if source is bias:
            if isinstance(m, Shift):
                return [[(node, self._spread(m, shape_of(node), self.axes(node)[1]))]]
            return [self._output_side(node, m)]
        return self._from_output(node, m)

    def relate_side(self, node: fx.Node, side: Side, m: Map, program: Program) -> list[Step]:
        """The other end of the same channels."""
        if side.node is not self.operands(node)[1]:
            return self.relate(node, side.node, m, program)
        channels = self.side_channels(node, m, inputs=side.inputs)
        if channels is None or not isinstance(m, Scale):
            raise Blocked("shared", "another call reads the same weight")
        return [
            self._input_side(node, channels) if side.inputs else self._output_side(node, channels)
        ]

    def constraint(self, node: fx.Node, source: Value, m: Map) -> Any:
        """Scales of the input channels and of the output channels are independent."""
        x, weight, _ = self.operands(node)
        if not isinstance(m, Scale):
            return node
        if source is x or (isinstance(source, Side) and source.inputs and source.node is weight):
            return node, "inputs"
        return node

    def side_channels(self, node: fx.Node, m: Map, *, inputs: bool) -> Map | None:
        """A map on one side of ``W``, as a map on those channels."""
        along = self.from_weight(node, m)
        return None if along is None or (m.axes and along[0] != inputs) else along[1]

    def _input_side(self, node: fx.Node, channels: Map) -> Step:
        x = self.operands(node)[0]
        assert isinstance(channels, Scale)
        return [(x, self._spread(channels.inverted(), shape_of(x), self.axes(node)[0]))]

    def _spread(self, channels: Map, shape: Sequence[int], axis: int) -> Map:
        """A map on ``[channels]`` as a map on a value of ``shape``."""
        full = [1] * len(shape)
        full[axis] = channels.vector.shape[-1]
        return channels.reshape(*full)

    def _channels(self, node: fx.Node, m: Map, axis: int) -> Map:
        """A map on a value, as a map on its channels ``[size]``."""
        return m.reshape(m.vector.shape[axis])

    def _output_side(self, node: fx.Node, channels: Map) -> Step:
        _, weight, bias = self.operands(node)
        step: Step = [(node, self._spread(channels, shape_of(node), self.axes(node)[1]))]
        if isinstance(channels, (Scale, Centre)):
            step.append((_side(weight, inputs=False), self.outputs_on_weight(node, channels)))
        if bias is not None:
            step.append((bias, channels))
        return step

    def _from_output(self, node: fx.Node, m: Map) -> list[Step]:
        x, _, bias = self.operands(node)
        axis = self.axes(node)[1]
        if m.axes and axis not in m.axes and self._passes_through(node, m):
            if bias is not None and m.kind != "centring":
                raise Blocked("axis-mismatch", f"adds a bias along axis {axis}")
            return [[(x, m)]]
        _only_on(m, [axis], "the layer writes and")
        channels = self._channels(node, m, axis)
        if isinstance(m, Shift):
            if bias is None:
                raise Blocked("no-bias", "has no bias, and none can be added where it is called")
            full = shape_of(bias)
            return [[(bias, channels.at(lambda v: v.expand(full)))]]
        return [[pair for pair in self._output_side(node, channels) if pair[0] is not node]]

    def _passes_through(self, node: fx.Node, m: Map) -> bool:
        """Whether the axes of the map are plain batch axes of the contraction."""
        return False

    def _from_input(self, node: fx.Node, m: Map, program: Program) -> list[Step]:
        _, weight, bias = self.operands(node)
        axis = self.axes(node)[0]
        if m.axes and axis not in m.axes and self._passes_through(node, m):
            if bias is not None:
                raise Blocked("axis-mismatch", "adds a bias along another axis")
            return [[(node, m)]]
        _only_on(m, [axis], "the layer reads and")
        channels = self._channels(node, m, axis)
        if isinstance(m, Scale):
            inverse = m.inverted().at(lambda v: channels.vector)
            return [[(_side(weight, inputs=True), self.inputs_on_weight(node, inverse))]]
        if isinstance(m, Centre):
            raise Blocked("raw-reader", "reads the mean")
        assert isinstance(m, Shift)
        if m.is_identity:
            return [[]]
        self.check_shift(node)
        size = shape_of(self.operands(node)[0])[axis]
        taken = self.taken(node, channels.vector.expand((size,)), program)
        moved = Shift(taken, m.negative)
        onward: Step = [(node, self._spread(moved, shape_of(node), self.axes(node)[1]))]
        return [[(bias, moved.negated())], onward] if bias is not None else [onward]


@dataclass(frozen=True)
class Linear(Contraction):
    """``y = x Wᵀ + b`` (``W`` ``[out, in]``), or ``addmm``: ``y = b + x W`` (``W`` ``[in, out]``)."""

    transposed: bool = False

    def operands(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """``x``, ``W`` and ``b``."""
        if self.transposed:
            if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
                raise Blocked("op", "is called with factors")
            bias, x, weight = node.args[:3]
            return x, weight, bias  # type: ignore[return-value]
        return (
            argument(node, 0, "input"),
            argument(node, 1, "weight"),
            argument(node, 2, "bias"),
        )

    def axes(self, node: fx.Node) -> tuple[int, int]:
        """The last axis of both."""
        return len(shape_of(self.operands(node)[0])) - 1, len(shape_of(node)) - 1

    def outputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """``[out]`` on ``W``."""
        size = m.vector.shape[-1]
        return m.reshape(1, size) if self.transposed else m.reshape(size, 1)

    def inputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """``[in]`` on ``W``."""
        size = m.vector.shape[-1]
        return m.reshape(size, 1) if self.transposed else m.reshape(1, size)

    def from_weight(self, node: fx.Node, m: Map) -> tuple[bool, Map] | None:
        """A map along one axis of ``W``."""
        if len(m.axes) > 1:
            return None
        axis = next(iter(m.axes), int(self.transposed))
        return (axis == 0) == self.transposed, m.reshape(m.vector.shape[axis])

    def taken(self, node: fx.Node, t: Vector, program: Program) -> Vector:
        """``W t``."""
        weight = named_value(program, self.operands(node)[1])
        weight = weight.permute((1, 0)) if self.transposed else weight
        ref = program.emit("linear", weight.ref, t.ref)
        return Vector(program, ref, (weight.shape[0],))

    def _passes_through(self, node: fx.Node, m: Map) -> bool:
        return True


_RANKS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}
_TRANSPOSED_RANKS = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}


@dataclass(frozen=True)
class Convolution(Contraction):
    """Convolutions of every rank; ``W`` is ``[out, in/groups, k…]``, transposed ``[in, out/groups, k…]``."""

    def _form(self, node: fx.Node) -> dict[str, Any]:
        """Stride, padding, dilation, groups, transposed, output padding of any of the ops."""
        name = op_name(node)
        if name in _TRANSPOSED_RANKS:
            keys = ("stride", "padding", "output_padding", "groups", "dilation")
            defaults: tuple[Any, ...] = (1, 0, 0, 1, 1)
            transposed = True
        elif name in _RANKS:
            keys = ("stride", "padding", "dilation", "groups")
            defaults = (1, 0, 1, 1)
            transposed = False
        else:  # aten.convolution
            keys = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
            defaults = (1, 0, 1, False, 0, 1)
            transposed = bool(argument(node, 6, "transposed", False))
        form = {
            k: argument(node, 3 + i, k, d)
            for i, (k, d) in enumerate(zip(keys, defaults, strict=True))
        }
        form["transposed"] = transposed
        return form

    def operands(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """``x``, ``W`` and ``b``."""
        return (
            argument(node, 0, "input"),
            argument(node, 1, "weight"),
            argument(node, 2, "bias"),
        )

    def axes(self, node: fx.Node) -> tuple[int, int]:
        """The axis in front of the spatial ones."""
        space = len(shape_of(self.operands(node)[1])) - 2
        axis = len(shape_of(node)) - space - 1
        return axis, axis

    def _on_weight(self, node: fx.Node, m: Map, *, inputs: bool) -> Map:
        form = self._form(node)
        weight = shape_of(self.operands(node)[1])
        ones = (1,) * (len(weight) - 2)
        size, groups = m.vector.shape[-1], form["groups"]
        along_first = inputs == form["transposed"]  # the side that W stores on axis 0
        if along_first or size == 1:
            return m.reshape(size, 1, *ones)
        if groups == 1:
            return m.reshape(1, size, *ones)
        first, second = weight[0] // groups, size // groups
        if isinstance(m, Centre):
            raise Blocked("op", "a grouped convolution mixes too little over channels")
        return m.at(
            lambda v: (
                v.reshape((groups, 1, second))
                .expand((groups, first, second))
                .reshape((groups * first, second, *ones))
            )
        )

    def outputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """``[out]`` on ``W``."""
        if isinstance(m, Centre) and self._form(node)["groups"] > 1:
            raise Blocked("op", "a grouped convolution mixes too little over channels")
        return self._on_weight(node, m, inputs=False)

    def inputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """``[in]`` on ``W``, for each group."""
        return self._on_weight(node, m, inputs=True)

    def from_weight(self, node: fx.Node, m: Map) -> tuple[bool, Map] | None:
        """A map along the axis of ``W`` that stands for all output or all input channels."""
        form = self._form(node)
        if not m.axes <= {0} and (form["groups"] > 1 or not m.axes <= {1}):
            return None
        axis = next(iter(m.axes), int(form["transposed"]))
        return (axis == 0) == form["transposed"], m.reshape(m.vector.shape[axis])

    def side_channels(self, node: fx.Node, m: Map, *, inputs: bool) -> Map | None:
        """As on any weight; the side that is stored for each group is regrouped."""
        groups, weight = self._form(node)["groups"], shape_of(self.operands(node)[1])
        if groups == 1 or inputs == self._form(node)["transposed"]:
            if not m.axes <= {0 if inputs == self._form(node)["transposed"] else 1}:
                return None
            axis = 0 if inputs == self._form(node)["transposed"] else 1
            return m.reshape(m.vector.shape[axis])
        first, second = weight[0] // groups, weight[1]
        if not m.axes <= {0, 1}:
            return None

        def regroup(v: Vector) -> Vector:
            full = v.reshape(v.shape[:2]).expand((weight[0], second))
            return full.reshape((groups, first, second)).slice(1, 0, 1).reshape((groups * second,))

        return m.at(regroup)

    def taken(self, node: fx.Node, t: Vector, program: Program) -> Vector:
        """All taps of ``W`` times ``t``."""
        form = self._form(node)
        weight = named_value(program, self.operands(node)[1])
        size = weight.shape[1] * form["groups"] if form["transposed"] else weight.shape[0]
        ref = program.emit(
            "convolution",
            weight.ref,
            t.ref,
            groups=form["groups"],
            transposed=form["transposed"],
        )
        return Vector(program, ref, (size,))

    def check_shift(self, node: fx.Node) -> None:
        """No zero padding; transposed: no border that is short of taps."""
        form = self._form(node)
        kernel = shape_of(self.operands(node)[1])[2:]
        space = len(kernel)

        def per_axis(value: Any) -> list[int]:
            values = [value] if isinstance(value, int) else list(value)
            return values * space if len(values) == 1 else values

        dilation = per_axis(form["dilation"])
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if form["padding"] == "valid":
            padding = [0] * space
        elif form["padding"] == "same":
            padding = reach
        else:
            padding = per_axis(form["padding"])
        if form["transposed"]:
            inside = all(p >= r for p, r in zip(padding, reach, strict=True))
            plain = all(s == 1 for s in per_axis(form["stride"]))
            if not (inside and plain) or any(per_axis(form["output_padding"])):
                raise Blocked("zero-padding", "its border (or its stride) is short of taps")
        elif any(padding):
            raise Blocked("zero-padding", "pads with zeros, where the shift is missing")


@dataclass(frozen=True)
class MatMul(Rule):
    """``y = A B``: rows belong to ``A``, columns to ``B``, the contracted axis to both."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """A scale goes to the operand that holds its axis."""
        a, b = (argument(node, i, n) for i, n in ((0, "self"), (1, "other")))
        if a is b or not isinstance(m, Scale) or min(len(shape_of(a)), len(shape_of(b))) < 2:
            return self._shift(node, a, b, source, m)
        if source is node:
            rank = len(shape_of(node))
            rows = rank - 2 in m.axes
            if rows and rank - 1 in m.axes:
                raise Blocked("axis-mismatch", "varies on rows and columns")
            target = a if rows else b
            return [[(target, _down(m, shape_of(target)))]]
        rank = len(shape_of(source))
        contracted = rank - 1 if source is a else rank - 2
        if contracted not in m.axes:
            return [[(node, _up(m, shape_of(node)))]]
        other = b if source is a else a
        dims = [*range(rank - 2), rank - 1, rank - 2]
        moved = m.inverted().at(lambda v: v.permute(dims))
        return [[(other, _down(moved, shape_of(other)))]]

    def _shift(self, node: fx.Node, a: fx.Node, b: fx.Node, source: fx.Node, m: Map) -> list[Step]:
        """A shift of ``B``'s columns passes if each row of ``A`` sums to 1 (a softmax)."""
        if a is b or not isinstance(m, Shift) or source is a or not _rows_sum_to_one(a):
            raise Blocked("op", f"a {m.kind} does not pass a matrix product")
        rank = len(shape_of(node))
        _only_on(_up(m, shape_of(node)), [rank - 1, *range(rank - 2)], "the product")
        if source is node:
            return [[(b, _down(m, shape_of(b)))]]
        return [[(node, _up(m, shape_of(node)))]]


def _rows_sum_to_one(node: fx.Node) -> bool:
    while node.op == "call_function" and op_name(node) in (CASTS | {"dropout"}):
        if op_name(node) == "dropout" and argument(node, 2, "train", True):
            return False
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "call_function" or op_name(node) not in {"softmax", "_softmax"}:
        return False
    return argument(node, 1, "dim") in (-1, len(shape_of(node)) - 1)


@dataclass(frozen=True)
class Lookup(Rule):
    """``embedding(W, ids)``: the table's columns are the output's last axis."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map between the table's rows and what is looked up."""
        table = node.args[0]
        assert isinstance(table, fx.Node)
        last = len(shape_of(node)) - 1
        size = m.vector.shape[-1]
        if source is node:
            _only_on(m, [last], "the table writes and")
            return [[(table, m.reshape(1, size))]]
        if source is not table:
            raise Blocked("op", "the ids of a lookup")
        _only_on(m, [1], "the table holds rows and")
        return [[(node, m.reshape(*[1] * last, size))]]


# -- norms ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FixedNorm(Rule):
    """A BatchNorm in eval mode: ``y = (x - mean) / sqrt(var + eps) * gamma + beta``.

    It writes through gamma and beta, and reads through mean and gamma.
    """

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        x, weight, bias, mean, _, fixed = batch_norm_operands(node)
        if not fixed:
            return NORM_OF_BATCH.relate(node, source, m, program)
        axis = min(1, len(shape_of(node)) - 1)
        if isinstance(m, Centre):
            raise Blocked("op", "scales each channel on its own")
        if source not in (x, node):
            raise Blocked("shared", "another norm reads the same tensor")
        _only_on(m, [axis], "the norm")
        size = m.vector.shape[axis]
        channels = m.reshape(size)
        if source is node:
            if isinstance(m, Shift):
                if bias is None:
                    raise Blocked("no-bias", "is a norm without bias")
                return [[(bias, channels)]]
            if weight is None or bias is None:
                raise Blocked("no-bias", "is a norm without affine parameters")
            return [[(weight, channels), (bias, channels)]]
        assert mean is not None
        if isinstance(m, Shift):
            return [[(mean, channels)]]
        assert isinstance(channels, Scale)
        if weight is None:
            raise Blocked("no-bias", "is a norm without affine parameters")
        return [[(mean, channels), (weight, channels.inverted())]]


def batch_norm_operands(
    node: fx.Node,
) -> tuple[fx.Node, fx.Node | None, fx.Node | None, fx.Node | None, fx.Node | None, bool]:
    """``x``, weight, bias, mean, var, and whether it is a fixed affine map (eval mode)."""
    name = op_name(node)
    x = argument(node, 0, "input")
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    mean, var = argument(node, 3, "running_mean"), argument(node, 4, "running_var")
    if name == "_native_batch_norm_legit_no_training":
        return x, weight, bias, mean, var, True
    position, keyword = (5, "training") if "batch" in name else (5, "use_input_stats")
    batch_statistics = bool(argument(node, position, keyword, True))
    return x, weight, bias, mean, var, mean is not None and not batch_statistics


@dataclass(frozen=True)
class NormWithAffine(Rule):
    """A norm whose gamma and beta (at ``weight``, ``bias``) act on ``channel`` of its output.

    It writes through gamma and beta; of its input only a mean it removes itself may change.
    """

    weight: int
    bias: int | None
    channel: bool = False  # gamma is [C] on axis 1 (else on the last axes)
    centres: bool = False  # its statistics are over the last axes and remove the mean

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        weight = argument(node, self.weight, "weight")
        bias = None if self.bias is None else argument(node, self.bias, "bias")
        if source is node:
            targets = [bias] if isinstance(m, Shift) else [weight, bias]
            if isinstance(m, Centre):
                raise Blocked("norm-writer", "scales each channel after its own centring")
            if targets[0] is None or (isinstance(m, Scale) and self.bias and bias is None):
                raise Blocked("no-bias", "is a norm without the parameter that would take it")
            step: Step = []
            for target in targets:
                if isinstance(target, fx.Node):
                    step.append((target, self._on_parameter(node, m, shape_of(target))))
            return [step]
        if source is argument(node, 0, "input") and self.centres and isinstance(m, Centre):
            normalised = len(argument(node, 1, "normalized_shape"))
            rank = len(shape_of(node))
            if m.axes == frozenset(range(rank - normalised, rank)) and bool(
                (m.vector.value == 0).all()
            ):
                return [[]]
        raise Blocked("norm-reader", "is a norm, whose statistics would change")

    def _on_parameter(self, node: fx.Node, m: Map, shape: tuple[int, ...]) -> Map:
        if not self.channel:
            return _down(m, shape)
        _only_on(m, [1], "the norm")
        return m.reshape(m.vector.shape[1])


# -- readers of no value --------------------------------------------------------------------------


@dataclass(frozen=True)
class ShapeOnly(Rule):
    """Uses a tensor for its shape, dtype or device only."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """Nothing to do."""
        if source is node:
            raise Blocked("op", "makes a new value")
        return [[]]


@dataclass(frozen=True)
class First(Rule):
    """The value is item 0 of several outputs (``max_pool2d_with_indices`` …)."""

    inner: Rule

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """As ``inner``, with the item in the place of the output."""
        items = {user.args[1]: user for user in node.users if user.target is operator.getitem}
        if 0 not in items:
            return [[]]
        if source in items.values() and source is not items[0]:
            raise Blocked("op", "a second output of the op")
        inside = node if source is items[0] else source
        node.meta.setdefault("shape", shape_of(items[0]))
        node.meta.setdefault("dtype", items[0].meta["dtype"])
        steps = self.inner.relate(node, inside, m, program)
        return [[(items[0] if v is node else v, m) for v, m in step] for step in steps]


NORM_OF_BATCH = NormWithAffine(weight=1, bias=2, channel=True)

CASTS = {
    "_to_copy", "to", "clone", "contiguous", "detach", "alias", "lift_fresh", "positive",
    "type_as", "cpu", "cuda", "float", "double", "half", "bfloat16", "lift", "view_dtype",
}  # fmt: skip
PERMUTATIONS = {
    "permute",
    "transpose",
    "t",
    "movedim",
    "swapaxes",
    "swapdims",
    "moveaxis",
    "numpy_T",
    "mT",
}
RESHAPES = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze",
    "reshape_as", "view_as", "_reshape_alias", "ravel", "_reshape_copy",
}  # fmt: skip
_SHAPE_ONLY = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "sym_size", "_assert_tensor_metadata",
    "_shape_as_tensor", "sym_numel", "sym_stride", "device", "dtype", "layout",
)  # fmt: skip
_NONLINEAR = (
    "gelu", "silu", "sigmoid", "tanh", "relu6", "hardtanh", "hardswish", "hardsigmoid", "mish",
    "elu", "celu", "selu", "softplus", "logsigmoid", "log_sigmoid", "exp", "log", "clamp",
    "clamp_min", "clamp_max", "erf", "sin", "cos", "sqrt", "rsqrt", "pow", "reciprocal",
    "softmax", "_softmax", "log_softmax", "threshold", "softsign", "square", "glu", "hardshrink",
    "softshrink", "round", "floor", "sign",
)  # fmt: skip

_block = Passing(scale=BLOCK, shift=BLOCK, centre=BLOCK, code=_activation)
_rectifier = Passing(scale=NONNEGATIVE, shift=BLOCK, centre=BLOCK, code=_activation)
_max_pool = {
    n: Passing(scale=NONNEGATIVE, centre=BLOCK, axes=_last(n), code="pooling") for n in (1, 2, 3)
}
_average = {n: Passing(axes=_last(n), check=_check_average) for n in (1, 2, 3)}


def _one_axis(position: int, name: str = "dim") -> Callable[[fx.Node], Sequence[int]]:
    def axes(node: fx.Node) -> Sequence[int]:
        value = argument(node, position, name)
        return [value] if isinstance(value, int) else list(value or ())

    return axes


RULES: dict[str, Rule] = {
    # pointwise
    **dict.fromkeys(_NONLINEAR, _block),
    **dict.fromkeys(("relu", "leaky_relu", "abs", "prelu", "rrelu"), _rectifier),
    "neg": Passing(scale=PASS, shift=BLOCK),
    **dict.fromkeys(CASTS, Passing(check=_check_cast)),
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
        Passing(check=_check_dropout),
    ),
    # other axes only
    **{f"max_pool{n}d": _max_pool[n] for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": First(_max_pool[n]) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": First(_max_pool[n]) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _average[n] for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": Passing(axes=_last(n)) for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d": Passing(axes=_last(n)) for n in (2, 3)},
    **{f"upsample_nearest{n}d": Passing(axes=_last(n)) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": Passing(axes=_last(n)) for n in (1, 2, 3)},
    "upsample_linear1d": Passing(axes=_last(1)),
    "upsample_bilinear2d": Passing(axes=_last(2)),
    "_upsample_bilinear2d_aa": Passing(axes=_last(2)),
    "upsample_bicubic2d": Passing(axes=_last(2)),
    "_upsample_bicubic2d_aa": Passing(axes=_last(2)),
    "upsample_trilinear3d": Passing(axes=_last(3)),
    "flip": Passing(axes=_one_axis(1, "dims")),
    "roll": Passing(axes=_one_axis(2, "dims")),
    "index_select": Passing(axes=_one_axis(1)),
    "cumsum": Passing(axes=_one_axis(1), shift=BLOCK),
    "mean": Reducing(),
    "amax": Reducing(scale=NONNEGATIVE),
    "amin": Reducing(scale=NONNEGATIVE),
    "sum": Reducing(shift=BLOCK),
    # moves
    **dict.fromkeys(RESHAPES, Reshaping()),
    **dict.fromkeys(PERMUTATIONS, Permuting()),
    "pixel_shuffle": Rearranging(_pixel_shuffle),
    "pixel_unshuffle": Rearranging(_pixel_unshuffle),
    "channel_shuffle": Rearranging(_channel_shuffle),
    "native_channel_shuffle": Rearranging(_channel_shuffle),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), Expanding()),
    **dict.fromkeys(("slice", "select", "narrow"), Slicing()),
    **dict.fromkeys(
        (
            "split",
            "split_with_sizes",
            "chunk",
            "unbind",
            "tensor_split",
            "unsafe_split",
            "unsafe_chunk",
            "unsafe_split_with_sizes",
        ),
        Splitting(),
    ),  # fmt: skip
    **dict.fromkeys(
        (
            "constant_pad_nd",
            "pad",
            "reflection_pad1d",
            "reflection_pad2d",
            "reflection_pad3d",
            "replication_pad1d",
            "replication_pad2d",
            "replication_pad3d",
            "_pad_circular",
            "_pad_enum",
        ),
        Padding(),
    ),  # fmt: skip
    # several values
    **dict.fromkeys(("add", "sub", "rsub"), Adding()),
    **dict.fromkeys(("mul", "div", "true_divide", "multiply"), Multiplying()),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), Concatenating()),
    "where": Alike(lambda node: list(node.args[1:3])),
    "masked_fill": Alike(lambda node: [node.args[0], node.args[2]]),
    **dict.fromkeys(
        ("maximum", "minimum"), Alike(lambda node: list(node.args[:2]), scale=NONNEGATIVE)
    ),
    # contractions
    "linear": Linear(),
    "addmm": Linear(transposed=True),
    **dict.fromkeys((*_RANKS, *_TRANSPOSED_RANKS, "convolution"), Convolution()),
    **dict.fromkeys(("matmul", "bmm", "mm"), MatMul()),
    "embedding": Lookup(),
    # norms
    **dict.fromkeys(("batch_norm", "instance_norm"), FixedNorm()),
    **dict.fromkeys(
        ("_native_batch_norm_legit_no_training", "native_batch_norm"), First(FixedNorm())
    ),
    "layer_norm": NormWithAffine(weight=2, bias=3, centres=True),
    "rms_norm": NormWithAffine(weight=2, bias=None),
    "group_norm": NormWithAffine(weight=2, bias=3, channel=True),
    # readers of no value
    **dict.fromkeys(_SHAPE_ONLY, ShapeOnly()),
}
"""The rule of each ATen op, by :func:`op_name`; an op that is not here blocks every map."""


def rule_for(node: fx.Node) -> Rule:
    """The rule of the op of ``node``.

    Raises:
        Blocked: the value leaves the model, a hook sees it, it is stale, or the op is not known.
    """
    if node.op == "output":
        raise Blocked("output", "the value is an output of the model")
    if node.target is hook_read:
        raise Blocked("hook", f"a hook on {node.args[1]!r} sees the value")
    if node.target is stale_read:
        raise Blocked("stale-alias", "the value is read after a write to another view of it")
    rule = RULES.get(op_name(node))
    if rule is None or not isinstance(node.target, torch._ops.OpOverload):
        raise Blocked("op", f"nothing is known of the op {op_name(node)}")
    return rule
