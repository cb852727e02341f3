"""Rules of ops with several values in: sums, products, choices and concatenations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from normswap.dataflow.moves import alone, either, kept_axes, moved_axes, piece_of
from normswap.dataflow.rule import (
    NONNEGATIVE,
    PASS,
    Later,
    Rule,
    Step,
    argument,
    describe_tensor,
    down,
    is_stored,
    named_value,
    only_on,
    op_name,
    shape_of,
    two_operands,
    up,
    varies_on,
)
from normswap.maps import Blocked, Centre, Level, Map, Scale, Shift
from normswap.program import Program, Vector

# A score this low has weight 0 in a softmax, whatever is added to the others.
HIDDEN_SCORE = -1e4


@dataclass(frozen=True)
class Adding(Rule):
    """``y = x1 + x2`` and ``x1 - x2``: a scale and ``C`` on every branch, a shift on one."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        operands = two_operands(node)
        tensors = [v for v in operands if isinstance(v, fx.Node)]
        for value in operands:
            if not isinstance(value, fx.Node) and value and m.kind not in ("shift", "level"):
                raise Blocked("op", f"adds the number {value}")
        if m.kind == "shift":
            return self._shift(node, operands, source, m)
        if isinstance(m, Level):
            return level_onward(node, source, m)
        on_output = m if source is node else up(m, shape_of(node))
        step: Step = [(node, on_output)]
        step += [(v, down(on_output, shape_of(v))) for v in dict.fromkeys(tensors)]
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
            moved = up(m, shape_of(node))
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
                    taken = down(m, shape_of(value))
                except Blocked:
                    continue
                assert isinstance(taken, Shift)
                steps.append([(value, taken if signs[value] > 0 else taken.negated())])
        return steps


def level_onward(node: fx.Node, source: fx.Node, m: Level) -> list[Step]:
    """A level goes with the flow only: it is there for the softmax that does not see it."""
    if source is node:
        raise Blocked("op", "a level does not go back")
    return [[(node, up(m, shape_of(node)))]]


@dataclass(frozen=True)
class Alike(Rule):
    """``where``, ``stack``, ``maximum`` …: every value operand and the output take the map.

    ``values`` gives the value operands; ``scale`` says which scales pass.
    """

    values: Callable[[fx.Node], list[Any]]
    scale: str = PASS
    mask: Callable[[fx.Node], Any] = lambda node: None  # what decides position by position
    elementwise: bool = False  # decides by the values themselves

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The same map everywhere."""
        values = self.values(node)
        tensors = [v for v in values if isinstance(v, fx.Node)]
        if source is not node and source not in tensors:
            raise Blocked("op", "a value that decides between others")
        if isinstance(m, Level):
            if any(not _hides(v) for v in values if v is not source):
                raise Blocked("op", "puts another value in")
            return level_onward(node, source, m)
        if isinstance(m, Centre):
            axes = m.axes if source is node else up(m, shape_of(node)).axes
            if self.elementwise or varies_on(self.mask(node), axes, len(shape_of(node))):
                raise Blocked("op", "decides for each position of the centred axis")
        if isinstance(m, Scale) and self.scale == NONNEGATIVE:
            m.require_nonnegative()
        for value in values:
            if not isinstance(value, fx.Node) and (m.kind == "shift" or value not in (0, None)):
                raise Blocked("op", f"puts the number {value} in")
        on_output = m if source is node else up(m, shape_of(node))
        step: Step = [(node, on_output)]
        return [step + [(v, down(on_output, shape_of(v))) for v in dict.fromkeys(tensors)]]


def _hides(value: Any) -> bool:
    """Whether a score of this value counts for nothing in a softmax."""
    if isinstance(value, fx.Node):
        value = value.meta.get("value")
    return isinstance(value, (int, float)) and value <= HIDDEN_SCORE


@dataclass(frozen=True)
class Written(Rule):
    """``index_put``, ``index_add`` …: some positions of ``x`` are replaced or added to.

    The value and what is written take the same map on the axes that are not indexed.
    ``parts`` gives what is written and, for each axis of ``x`` that is not indexed, its axis there.
    """

    parts: Callable[[fx.Node], tuple[fx.Node, dict[int, int]]]
    adds: Callable[[fx.Node], bool] = lambda node: False

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        written, places = self.parts(node)
        if source not in (node, x, written) or isinstance(m, Level):
            raise Blocked("op", "the positions that are written to")
        rank, inner = len(shape_of(x)), len(shape_of(written))
        if source is written:
            m = moved_axes(m, {new: old for old, new in places.items()}, rank)
        if isinstance(m, Shift) and self.adds(node):  # the sum's other part stays as it is
            if source is written:
                raise Blocked("op", "adds to some positions only")
            return [[(node, m), (x, m)]]
        return [[(node, m), (x, m), (written, moved_axes(m, places, inner))]]


def index_put_parts(node: fx.Node) -> tuple[fx.Node, dict[int, int]]:
    """``index_put(x, indices, values)``."""
    x, indices, values = node.args[:3]
    assert isinstance(x, fx.Node)
    assert isinstance(values, fx.Node)
    rank = len(shape_of(x))
    indexed = [i for i in indices if i is not None]  # type: ignore[union-attr]
    own = max(len(shape_of(i)) for i in indexed)  # type: ignore[arg-type]
    result = rank - len(indexed) + own
    places = kept_axes(list(indices), rank, result)  # type: ignore[arg-type]
    lead = result - len(shape_of(values))
    return values, {a: p - lead for a, p in places.items() if p >= lead}


def one_axis_parts(position: int) -> Callable[[fx.Node], tuple[fx.Node, dict[int, int]]]:
    """``index_add(x, dim, index, source)``: ``source`` has the axes of ``x``."""

    def parts(node: fx.Node) -> tuple[fx.Node, dict[int, int]]:
        x, axis, written = node.args[0], node.args[1], node.args[position]
        assert isinstance(x, fx.Node)
        assert isinstance(written, fx.Node)
        assert isinstance(axis, int)
        rank = len(shape_of(x))
        return written, {a: a for a in range(rank) if a != axis % rank}

    return parts


@dataclass(frozen=True)
class Filling(Rule):
    """``masked_scatter(x, mask, source)``: rows of ``source`` replace chosen rows of ``x``."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The same map on the last axis, whole rows of which are replaced."""
        x, mask, rows = node.args[:3]
        assert isinstance(x, fx.Node)
        assert isinstance(rows, fx.Node)
        if source not in (node, x, rows) or isinstance(m, Level):
            raise Blocked("op", "the positions that are written to")
        size, rank = shape_of(x)[-1], len(shape_of(x))
        if shape_of(rows)[-1:] != (size,) or varies_on(mask, [rank - 1], rank):
            raise Blocked("op", "does not replace whole rows")
        only_on(m, [len(m.vector.shape) - 1], "the op replaces rows and")
        return [
            [
                (value, m.reshape(*[1] * (len(shape_of(value)) - 1), m.vector.shape[-1]))
                for value in (node, x, rows)
            ]
        ]


@dataclass(frozen=True)
class Concatenating(Rule):
    """``cat`` and ``stack``: along the axis a slice for each branch, else every branch alike."""

    def relate(
        self, node: fx.Node, source: fx.Node, m: Map, program: Program
    ) -> Sequence[Step | Later]:
        """See the class."""
        parts: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
        stacked = op_name(node) == "stack"
        rank = len(shape_of(node))
        axis = argument(node, 1, "dim", 0) % rank
        parts = [p for p in parts if stacked or len(shape_of(p)) == rank]  # legacy empty parts
        parts = [p for p in parts if p is source or 0 not in shape_of(p)]  # nothing is in there
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
                    for piece in [piece_of(m, axis, begin, end)]
                    if piece is m or not piece.is_identity
                ]
            ]
        mine = [p for p in pieces if p[0] is source]
        _, begin, end, kept = mine[0]
        lifted = m.carried(shape_of(source), kept)
        if isinstance(m, Centre) and axis in lifted.axes:
            raise Blocked("op", "concatenates along the centred axis")
        if isinstance(m, Level):
            raise Blocked("op", "puts another value beside it")
        others: Step = [(p, lifted.carried(k, shape_of(p))) for p, _, _, k in pieces]
        only = alone(node, lifted, axis, begin, end, start)
        steps = either(lifted, axis, only, [(node, lifted), *others])
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
        operands = two_operands(node)
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
        if isinstance(m, (Centre, Level)):
            return self._linear(node, operands, source, m)
        raise Blocked("op", f"a {m.kind} does not pass a product of values")

    def _scale(self, node: fx.Node, operands: list[Any], source: fx.Node, m: Scale) -> list[Step]:
        divides = op_name(node) == "div"
        on_output = m if source is node else up(m, shape_of(node))
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
                steps.append([(value, down(needed, shape_of(value)))])
            except Blocked:
                continue
        if source is not node:
            steps.append([(node, on_output)])
            if steps[0][0][0] is not node and not is_stored(steps[0][0][0]):
                steps.reverse()  # on along the stream rather than into another activation
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
            return [[(value, down(moved, shape_of(value)))]]
        return [[(node, moved)]]

    def _linear(
        self, node: fx.Node, operands: list[Any], source: fx.Node, m: Centre | Level
    ) -> list[Step]:
        """A map that commutes with what is constant along its axes."""
        rank = len(shape_of(node))
        on_output = m if source is node else up(m, shape_of(node))
        values = [v for v in operands if varies_on(v, on_output.axes, rank)]
        if source is not node and source not in values:
            values.append(source)
        factors = [v for v in values if v is not source]
        if source is node:
            factors = values[1:] if len(values) > 1 else []
            stored = [v for v in values if is_stored(v)]
            factors = stored[:1] if len(values) > 1 and stored else factors
            values = [v for v in values if v not in factors]
        for factor in factors:
            self._require_constant(node, factor, on_output)
        value = source if source is not node else next(iter(values), None)
        if value is None or (op_name(node) == "div" and value is operands[1]):
            raise Blocked("op", "divides by the value" if value else "has no factor on that axis")
        if isinstance(m, Level):
            return level_onward(node, source, m)
        return [[(value, down(m, shape_of(value)))] if source is node else [(node, on_output)]]

    def _require_constant(self, node: fx.Node, factor: fx.Node, m: Map) -> None:
        """Raise unless the factor's values are all alike along the axes of the map."""
        scale = None
        if is_stored(factor):
            value = named_value(m.vector.program, factor).value
            rank = len(shape_of(node))
            value = value.reshape([1] * (rank - value.dim()) + list(value.shape))
            if all(bool((value == value.narrow(a, 0, 1)).all()) for a in m.axes):
                return
            scale = node
        raise Blocked("op", f"multiplies by a value that varies on the axis of the {m.kind}", scale)
