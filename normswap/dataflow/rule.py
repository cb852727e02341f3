"""`Rule`: what an op does to maps on its values, and what rules share.

A value is an activation, a stored tensor, or one side of a stored weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from normswap.maps import Blocked, Centre, Map, Scale
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


Later = Callable[[], Step]
"""A step that is made once the steps before it have failed; it may be blocked as well."""


PASS = "pass"


NONNEGATIVE = "nonnegative"


BLOCK = "block"


ACTIVATION = "activation-between"


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
        return named_value(program, source).permute(permutation(node))
    if node.op == "call_function" and name in RESHAPES:
        return named_value(program, node.args[0]).reshape(shape_of(node))  # type: ignore[arg-type]
    raise Blocked("parametrised", f"the tensor is computed ({name}), not stored")


def describe_tensor(node: fx.Node) -> str:
    """The name of a stored tensor, quoted."""
    return repr(node.meta["tensor"].name)


def made(step: Step | Later) -> Step:
    """A step, made now if it was put off."""
    return step() if callable(step) else step


class Rule:
    """What one op does to maps."""

    def relate(
        self, node: fx.Node, source: fx.Node, m: Map, program: Program
    ) -> Sequence[Step | Later]:
        """Alternatives for the other endpoints of ``node`` when ``source`` takes ``m``.

        ``source`` is ``node`` itself for its output.
        """
        raise NotImplementedError

    def relate_side(
        self, node: fx.Node, side: Side, m: Map, program: Program
    ) -> Sequence[Step | Later]:
        """The same for one side of a weight; most ops know a weight as a whole only."""
        return self.relate(node, side.node, m, program)

    def already_centred(self, node: fx.Node, m: Centre, program: Program) -> bool:
        """Whether the output is its own image under ``m``."""
        return False

    def constraint(self, node: fx.Node, source: Value, m: Map) -> Any:
        """What ``source`` takes part in: an op may hold several independent constraints."""
        return node


class ShapeOfSecond(Rule):
    """Base of rules of ops whose first argument is the value; others may lend a shape or dtype."""

    def constraint(self, node: fx.Node, source: Value, m: Map) -> Any:
        """A value that only lends its shape takes part in nothing."""
        return node if source is node or source is node.args[0] else (node, "shape")


def only_on(m: Map, axes: Sequence[int], what: str) -> None:
    """Raise unless the map varies on ``axes`` only."""
    if not m.axes <= set(axes):
        raise Blocked(
            "axis-mismatch",
            f"{what} works along axis {sorted(axes)}, the {m.kind} along {sorted(m.axes)}",
        )


def down(m: Map, shape: Sequence[int]) -> Map:
    """A map on an output, on an operand of ``shape`` that is broadcast to it.

    What is constant along a centred axis is all mean: nothing is left of it.
    """
    if isinstance(m, Centre) and m.is_whole and _is_broadcast(m.axes, len(m.vector.shape), shape):
        return zero(m.vector.program, len(shape))
    try:
        moved = m.at(lambda v: v.with_rank(len(shape)))
    except ValueError:
        raise Blocked("axis-mismatch", "an operand is broadcast along the mapped axis") from None
    if any(moved.vector.shape[axis] != shape[axis] for axis in moved.axes):
        raise Blocked("axis-mismatch", "an operand is broadcast along the mapped axis")
    return moved


def _is_broadcast(axes: Iterable[int], rank: int, shape: Sequence[int]) -> bool:
    """Whether an operand of ``shape`` has size 1 on all of ``axes`` of a value of ``rank``."""
    kept = [axis - (rank - len(shape)) for axis in axes]
    return all(axis < 0 or shape[axis] == 1 for axis in kept)


def zero(program: Program, rank: int) -> Scale:
    """The scale that leaves nothing."""
    shape = (1,) * rank
    return Scale(Vector(program, program.emit("constant", value=0.0, shape=list(shape)), shape))


def varies_on(value: Any, axes: Iterable[int], rank: int) -> bool:
    """Whether an operand has more than one position on any of ``axes`` of a value of ``rank``.

    A tensor that was expanded along the axis does not vary on it.
    """
    if not isinstance(value, fx.Node):
        return False
    while value.op == "call_function" and op_name(value) in EXPANDS | {"repeat"}:
        source = value.args[0]
        assert isinstance(source, fx.Node)
        value = source
    shape = shape_of(value)
    return not _is_broadcast(axes, rank, shape)


def up(m: Map, shape: Sequence[int]) -> Map:
    """A map on an operand, on the output of ``shape`` that it is broadcast to."""
    return m.at(lambda v: v.with_rank(len(shape)))


def two_operands(node: fx.Node) -> list[Any]:
    """The two arguments of a binary op, numbers or nodes."""
    return [argument(node, i, name) for i, name in enumerate(("self", "other"))]


def require_nonnegative(m: Scale, code: str) -> None:
    """Raise, with the reason's ``code`` of an activation, unless no factor is negative."""
    try:
        m.require_nonnegative()
    except Blocked as blocked:  # an activation is what to name: a shift would not pass it anyway
        named = ACTIVATION if code == ACTIVATION else blocked.code
        raise Blocked(named, blocked.detail) from None


def permutation(node: fx.Node) -> list[int]:
    """The axes of the input in the order of the output."""
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


EXPANDS = {"expand", "expand_as", "broadcast_to"}


RESHAPES = {
    "view", "reshape", "_unsafe_view", "flatten", "unflatten", "squeeze", "unsqueeze",
    "reshape_as", "view_as", "_reshape_alias", "ravel", "_reshape_copy",
}  # fmt: skip
