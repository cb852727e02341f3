"""Rules of products of two activations, or of an activation and a tensor that no layer owns.

Each axis of an operand or of the result has a name. An axis that both operands have and the result
lacks is contracted, one that all three have is a batch axis.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from normswap.dataflow.rule import (
    CASTS,
    Rule,
    Step,
    argument,
    named_value,
    op_name,
    shape_of,
)
from normswap.maps import Blocked, Centre, Level, Map, Scale, Shift
from normswap.program import Program, Vector

Names = list[Hashable]


@dataclass(frozen=True)
class Operand:
    """A value with the names of its axes; ``None`` where it has one position for many."""

    node: fx.Node
    names: Names

    def has(self, names: Iterable[Hashable]) -> bool:
        """Whether it varies on all of these axes."""
        return set(names) <= set(self.names)


class Product(Rule):
    """``y = sum over contracted axes of A * B``."""

    def operands(self, node: fx.Node) -> tuple[Operand, Operand, Operand]:
        """``A``, ``B`` and ``y``."""
        raise NotImplementedError

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """A scale or centring goes to where its axis is, a shift to what can make up for it."""
        a, b, y = self.operands(node)
        if a.node is b.node:
            raise Blocked("op", "multiplies a value with itself")
        if isinstance(m, Level) or source not in (a.node, b.node, node):
            raise Blocked("op", f"a {m.kind} does not pass a product")
        own, other = (a, b) if source is a.node else (b, a)
        if source is node:
            return self._from_result(a, b, y, m)
        if isinstance(m, Shift):
            return self._shift(own, other, y, m, program)
        names = _names(m, own)
        if other.has(names) and not set(names) & set(y.names):
            if isinstance(m, Centre):
                raise Blocked("raw-reader", "reads the mean")
            assert isinstance(m, Scale)
            return [[(other.node, _renamed(m.inverted(), own, other))]]
        if not y.has(names) or (isinstance(m, Centre) and set(names) & set(other.names)):
            raise Blocked("axis-mismatch", "mixes the mapped axis with others")
        return [[(node, _renamed(m, own, y))]]

    def _from_result(self, a: Operand, b: Operand, y: Operand, m: Map) -> list[Step]:
        names = _names(m, y)
        if isinstance(m, Shift):
            if _rows_sum_to_one(a.node) and b.has(names):
                return [[(b.node, _renamed(m, y, b))]]
            raise Blocked("op", "a shift does not pass a product")
        takes = [o for o in (a, b) if o.has(names)]
        if isinstance(m, Centre):
            takes = [o for o in takes if not set(names) & set((b if o is a else a).names)]
        if not takes:
            raise Blocked("axis-mismatch", "no factor varies on the mapped axis alone")
        return [[(o.node, _renamed(m, y, o))] for o in takes[::-1]]

    def _shift(
        self, own: Operand, other: Operand, y: Operand, m: Shift, program: Program
    ) -> list[Step]:
        names = set(_names(m, own))
        contracted = (set(own.names) & set(other.names)) - set(y.names) - {None}
        if not names & contracted and _rows_sum_to_one(other.node) and y.has(names):
            return [[(y.node, _renamed(m, own, y))]]
        if names == contracted and len(names) == 1:
            stored = self._taken(own, other, y, m, program)
            if stored is not None:
                return [[(y.node, stored)]]
        alone = set(own.names) - set(other.names) - {None}
        if names & alone or not names & contracted:
            raise Blocked("op", "a shift does not pass a product")
        # The same number for all positions of its own axes: a key's shift in attention scores.
        shape = tuple(
            size if name in alone else 1
            for size, name in zip(shape_of(y.node), y.names, strict=True)
        )
        ref = program.emit("constant", value=0.0, shape=list(shape))
        return [[(y.node, Level(Vector(program, ref, shape)))]]

    def _taken(
        self, own: Operand, other: Operand, y: Operand, m: Shift, program: Program
    ) -> Shift | None:
        """What a stored tensor makes of a shift of the axis that it contracts, if it is one."""
        try:
            weight = named_value(program, other.node)
        except Blocked:
            return None
        axis = other.names.index(next(iter(_names(m, own))))
        kept = [a for a in range(len(other.names)) if a != axis]
        if [n for n in other.names if n not in (other.names[axis], None)] != [
            n for n in y.names if n in other.names
        ]:
            return None
        size = weight.shape[axis]
        moved = weight.permute([*kept, axis]).reshape((-1, size))
        ref = program.emit("linear", moved.ref, m.vector.reshape((size,)).ref)
        flat = Vector(program, ref, (moved.shape[0],))
        sizes = {n: weight.shape[a] for a, n in enumerate(other.names)}
        shape = tuple(sizes.get(n, 1) if n in other.names else 1 for n in y.names)
        return Shift(flat.reshape(shape), m.negative)


def _names(m: Map, operand: Operand) -> list[Hashable]:
    """The names of the axes that a map varies on."""
    names = [operand.names[axis] for axis in sorted(m.axes)]
    if None in names:
        raise Blocked("axis-mismatch", "an operand is broadcast along the mapped axis")
    return names


def _renamed(m: Map, source: Operand, target: Operand) -> Map:
    """A map on one value as a map on another that has the same axes at other places."""
    places = {axis: target.names.index(source.names[axis]) for axis in m.axes}
    varying = sorted(m.axes, key=lambda axis: places[axis])
    rest = [axis for axis in range(len(m.vector.shape)) if axis not in m.axes]
    shape = [1] * len(target.names)
    for axis in varying:
        shape[places[axis]] = m.vector.shape[axis]
    return m.at(lambda v: v.permute([*rest, *varying]).reshape(shape))


def _rows_sum_to_one(node: fx.Node) -> bool:
    while node.op == "call_function" and op_name(node) in (CASTS | {"dropout"}):
        if op_name(node) == "dropout" and argument(node, 2, "train", True):
            return False
        node = node.args[0]  # type: ignore[assignment]
    if node.op != "call_function" or op_name(node) not in {"softmax", "_softmax"}:
        return False
    return argument(node, 1, "dim") in (-1, len(shape_of(node)) - 1)


@dataclass(frozen=True)
class MatMul(Product):
    """``y = A B``, with ``added`` (``baddbmm``) beside a summand that takes no map."""

    added: bool = False

    def operands(self, node: fx.Node) -> tuple[Operand, Operand, Operand]:
        """Rows belong to ``A``, columns to ``B``, the contracted axis to both."""
        first = int(self.added)
        a, b = (argument(node, first + i, n) for i, n in ((0, "self"), (1, "other")))
        shapes = shape_of(a), shape_of(b)
        y = shape_of(node)
        lead = len(y) - (len(shapes[0]) > 1) - (len(shapes[1]) > 1)
        batch: Names = [("batch", axis) for axis in range(lead)]
        rows: Names = ["row"] if len(shapes[0]) > 1 else []
        columns: Names = ["column"] if len(shapes[1]) > 1 else []
        return (
            _broadcast(a, shapes[0], [*batch, *rows, "inner"], y),
            _broadcast(b, shapes[1], [*batch, "inner", *columns], y),
            Operand(node, [*batch, *rows, *columns]),
        )

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        steps = super().relate(node, source, m, program)
        if self.added and any(v is node and m.kind != "level" for s in steps for v, m in s):
            raise Blocked("op", "adds to the product")
        if self.added and source is node:
            raise Blocked("op", "adds to the product")
        return steps


def _broadcast(node: fx.Node, shape: Sequence[int], names: Names, y: Sequence[int]) -> Operand:
    """An operand whose leading axes may be missing or of size 1 where the result has more."""
    own = names[len(names) - len(shape) :]
    last = 2 if len(shape) > 1 else 1
    for axis in range(len(shape) - last):
        place = own[axis]
        assert isinstance(place, tuple)
        if shape[axis] == 1 and y[place[1]] > 1:
            own[axis] = None
    return Operand(node, own)


@dataclass(frozen=True)
class Einsum(Product):
    """``einsum`` of two operands."""

    def operands(self, node: fx.Node) -> tuple[Operand, Operand, Operand]:
        """The letters of the equation; an ellipsis stands for numbered axes from the right."""
        equation, values = node.args[0], list(node.args[1])  # type: ignore[arg-type]
        if not isinstance(equation, str) or len(values) != 2 or "->" not in equation:
            raise Blocked("op", "is no product of two values")
        left, right = equation.replace(" ", "").split("->")
        terms = [*left.split(","), right]
        found: list[Operand] = []
        for term, value in zip(terms, [*values, node], strict=True):
            assert isinstance(value, fx.Node)
            names = _letters(term, len(shape_of(value)))
            if len(set(names)) != len(names):
                raise Blocked("op", "takes a diagonal")
            found.append(Operand(value, names))
        return found[0], found[1], found[2]


def _letters(term: str, rank: int) -> Names:
    if "..." not in term:
        return list(term)
    before, after = term.split("...")
    count = rank - len(before) - len(after)
    return [*before, *(-i for i in range(count, 0, -1)), *after]


@dataclass(frozen=True)
class Attention(Rule):
    """``softmax(q kᵀ) v``: each row of weights sums to 1, and does not see a shift of all keys."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """Between ``q`` and ``k`` on their channels, between ``v`` and the result on theirs."""
        q, k, v = node.args[:3]
        assert isinstance(q, fx.Node)
        assert isinstance(k, fx.Node)
        assert isinstance(v, fx.Node)
        if len({q, k, v}) != 3 or source not in (node, q, k, v):
            raise Blocked("op", f"a {m.kind} does not pass attention")
        if isinstance(m, Level):
            raise Blocked("op", "a level does not pass attention")
        rank = len(shape_of(node))
        channels = {rank - 1} if isinstance(m, Centre) else {rank - 1, rank - 3}
        if not m.axes <= channels:
            raise Blocked("axis-mismatch", "mixes the mapped axis")
        if source in (q, k):
            return self._scores(node, source, k if source is q else q, m)
        if isinstance(m, Shift) and not _keeps_shift(node):
            raise Blocked("op", "its rows may not sum to 1: it has a mask, or drops out")
        if source is node:
            return [[(v, self._heads(m, v, node, v))]]
        return [[(node, self._heads(m, v, v, node))]]

    def _scores(self, node: fx.Node, source: fx.Node, other: fx.Node, m: Map) -> list[Step]:
        if isinstance(m, Scale):
            return [[(other, self._heads(m.inverted(), other, source, other))]]
        if isinstance(m, Shift) and source is node.args[1]:
            return [[]]
        raise Blocked("op", f"a {m.kind} does not pass attention")

    def _heads(self, m: Map, key: fx.Node, source: fx.Node, target: fx.Node) -> Map:
        """The map where several heads of queries share one of keys and values."""
        rank = len(m.vector.shape)
        axis = rank - 3
        if axis not in m.axes or shape_of(source)[axis] == shape_of(target)[axis]:
            return m
        few, many = shape_of(source)[axis], shape_of(target)[axis]
        if few > many or not isinstance(m, (Scale, Shift)):
            raise Blocked("axis-mismatch", "several heads share one of keys and values")

        def repeat(v: Vector) -> Vector:
            lead, tail = v.shape[: axis + 1], v.shape[axis + 1 :]
            wide = v.reshape((*lead, 1, *tail)).expand((*lead, many // few, *tail))
            return wide.reshape((*v.shape[:axis], many, *tail))

        return m.at(repeat)


def _keeps_shift(node: fx.Node) -> bool:
    """Whether every row of weights sums to 1."""
    mask = argument(node, 3, "attn_mask")
    return mask is None and not argument(node, 4, "dropout_p", 0.0)
