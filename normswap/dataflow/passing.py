"""Rules of ops with one value in and one out, on which the mapped axis stays as it is."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from normswap.dataflow.rule import (
    ACTIVATION,
    BLOCK,
    NONNEGATIVE,
    PASS,
    Rule,
    ShapeOfSecond,
    Step,
    argument,
    made,
    op_name,
    require_nonnegative,
    shape_of,
)
from normswap.maps import Blocked, Centre, Level, Map, Scale, Shift
from normswap.program import Program


@dataclass(frozen=True)
class Passing(ShapeOfSecond):
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
        if source not in (node, x) and op_name(node) == "type_as":
            return [[]]  # it lends its dtype
        if source not in (node, x) or sum(a is x for a in node.all_input_nodes) != 1:
            raise Blocked("op", "a value that it computes with")
        condition = {"scale": self.scale, "shift": self.shift}.get(m.kind, self.centre)
        if condition == BLOCK:
            raise Blocked(self.code, f"a {m.kind} does not pass")
        if condition == NONNEGATIVE:
            assert isinstance(m, Scale)
            require_nonnegative(m, self.code)
        mixed = {axis % len(shape_of(x)) for axis in self.axes(node)} if shape_of(x) else set[int]()
        if m.axes & mixed:
            raise Blocked("axis-mismatch", f"mixes axis {sorted(m.axes & mixed)}")
        self.check(node, m)
        return [[(x if source is node else node, m)]]


def last(count: int) -> Callable[[fx.Node], Sequence[int]]:
    """The last ``count`` axes, as the spatial ones of a pool."""
    return lambda node: range(-count, 0)


def check_average(node: fx.Node, m: Map) -> None:
    """Averaging keeps a shift only if every window averages true values, with weights of sum 1."""
    if m.kind != "shift" or m.is_identity:
        return
    padding = argument(node, 3, "padding", 0)
    padded = any(padding) if isinstance(padding, (list, tuple)) else bool(padding)
    if padded and argument(node, 5, "count_include_pad", True):
        raise Blocked("zero-padding", "averages zero padding in, where the shift is missing")
    if argument(node, 6, "divisor_override") is not None:
        raise Blocked("op", "divides by a fixed number, which scales the shift")


def check_cast(node: fx.Node, m: Map) -> None:
    """A cast to integers keeps no map."""
    if not node.meta["dtype"].is_floating_point:
        raise Blocked("op", f"casts to {node.meta['dtype']}")


def check_dropout(node: fx.Node, m: Map) -> None:
    """In training an elementwise dropout zeroes what a shift or a mean was added to."""
    if argument(node, 2, "train", True) and m.kind != "scale":
        raise Blocked("training-mode", f"in training a {m.kind} does not pass")


@dataclass(frozen=True)
class Softmax(Rule):
    """``softmax`` over one axis: what is added to all of its positions alike is not seen."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """Nothing to do for a constant or a mean on that axis."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        axis = argument(node, 1, "dim") % len(shape_of(x))
        if source is x and (
            (isinstance(m, Shift) and axis not in m.axes)
            or (isinstance(m, Level) and axis in m.axes)
            or (isinstance(m, Centre) and m.axes == frozenset({axis}) and m.is_whole)
        ):
            return [[]]
        raise Blocked(ACTIVATION, f"a {m.kind} does not pass")


@dataclass(frozen=True)
class Reducing(Rule):
    """A mean, maximum or sum over other axes than the mapped one."""

    scale: str = PASS
    shift: str = PASS
    centre: str = PASS

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map without the reduced axes."""
        x = node.args[0]
        assert isinstance(x, fx.Node)
        shape = shape_of(x)
        dims = argument(node, 1, "dim")
        dims = [dims] if isinstance(dims, int) else list(dims or range(len(shape)))
        reduced = {d % len(shape) for d in dims}
        kept = [1 if axis in reduced else size for axis, size in enumerate(shape)]
        passes = {"scale": self.scale, "shift": self.shift, "centring": self.centre}
        if passes.get(m.kind, BLOCK) == BLOCK:
            raise Blocked("op", f"a {m.kind} does not pass")
        if m.kind == "scale" and self.scale == NONNEGATIVE:
            assert isinstance(m, Scale)
            m.require_nonnegative()
        if source is node:
            return [[(x, m.carried(shape_of(node), tuple(kept)))]]
        if m.axes & reduced:
            code = "raw-reader" if isinstance(m, Centre) else "axis-mismatch"
            raise Blocked(code, "reduces over the mapped axis")
        return [[(node, m.carried(tuple(kept), shape_of(node)))]]


@dataclass(frozen=True)
class ShapeOnly(Rule):
    """Uses a tensor for its shape, dtype or device only."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """Nothing to do."""
        if source is node and not (m.kind in ("scale", "centring") and makes_zeros(node)):
            raise Blocked("op", "makes a new value")
        return [[]]


def makes_zeros(node: fx.Node) -> bool:
    """Whether an op makes a tensor of zeros, which a scale or centring leaves as they are."""
    name = op_name(node)
    if name in ("full_like", "full", "new_full"):
        return argument(node, 2 if name == "new_full" else 1, "fill_value") == 0
    return name in ("zeros", "zeros_like", "new_zeros")


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
        return [[(items[0] if v is node else v, m) for v, m in made(step)] for step in steps]


def one_axis(position: int, name: str = "dim") -> Callable[[fx.Node], Sequence[int]]:
    """The axis (or axes) that an argument names."""

    def axes(node: fx.Node) -> Sequence[int]:
        value = argument(node, position, name)
        return [value] if isinstance(value, int) else list(value or ())

    return axes
