"""Where a branch of a residual block can be reached from outside: arguments and results of modules.

A block's own code cannot be edited, what it hands to its modules and gets from them can.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import fx, nn

from normswap.capture import Capture, ModuleCall
from normswap.dataflow import CASTS, RESHAPES, op_name
from normswap.graphs import calls_around
from normswap.maps import Blocked
from normswap.residual_graph import Branch, Residual, reads_numbers

_SAME_VALUE = CASTS | {"dropout", "feature_dropout"}
_KEEPS_LAST_AXIS = _SAME_VALUE | RESHAPES


@dataclass(frozen=True)
class Entry:
    """Arguments of one module through which a branch reads the stream."""

    module: str
    arguments: tuple[int | str, ...]


@dataclass(frozen=True)
class Exit:
    """A module that returns what a branch adds, but for a constant ``factor``.

    It returns it alone, or first in a tuple, as attention does.
    """

    module: str
    factor: float


def entries(capture: Capture, fork: fx.Node, inside: Collection[fx.Node]) -> list[Entry]:
    """The module arguments through which all ops ``inside`` read ``fork``, and nobody else does.

    The outermost modules are taken that hold no other reader of the value.

    Raises:
        Blocked: an op reads it in code of a block, or a module is called more than once.
    """
    found: dict[str, set[int | str]] = {}
    queue = [fork]
    while queue:
        value = queue.pop()
        for reader in value.users:
            if reader not in inside or not reads_numbers(reader, value):
                continue
            call = _taking(value, reader, inside)
            if call is not None:
                keys = [key for key, node in call.arguments.items() if node is value]
                found.setdefault(call.path, set()).update(keys)
            elif _keeps_last_axis(reader, value):
                queue.append(reader)
            else:
                raise Blocked("boundary", f"{_place(reader)} reads the stream in its own code")
    for path in found:
        _require_one_call(capture, path)
    return [Entry(path, tuple(sorted(keys, key=str))) for path, keys in found.items()]


def _taking(value: fx.Node, reader: fx.Node, inside: Collection[fx.Node]) -> ModuleCall | None:
    """The outermost call around ``reader`` that takes ``value`` and holds no foreign reader."""
    readers = [user for user in value.users if reads_numbers(user, value)]
    taking: ModuleCall | None = None
    for call in calls_around(reader):
        if value not in call.arguments.values():
            continue
        if any(call in calls_around(r) for r in readers if r not in inside):
            break
        taking = call
    return taking


def exit_of(capture: Capture, residual: Residual, branch: Branch) -> Exit:
    """The outermost module that returns the branch, looked through a constant and what keeps rows.

    Raises:
        Blocked: the branch ends in code of the block, something else reads it, or the module is
            called more than once.
    """
    for join in branch.joins:
        if op_name(join) in ("mul", "div") and _without_constant(join)[0] is None:
            detail = f"the sum of parallel branches in {_place(join)} is scaled by no plain number"
            raise Blocked("op", detail)
    node, factor = branch.value, branch.outer_scale
    below: Collection[fx.Node] = {*residual.sums, *branch.joins}
    while True:
        if any(user not in below for user in node.users if reads_numbers(user, node)):
            detail = f"what the branch in {_place(node)} adds is read elsewhere too"
            raise Blocked("other-reader", detail)
        call = _returning(capture, node, residual)
        if call is not None:
            _require_one_call(capture, call.path)
            return Exit(call.path, factor)
        source, constant = _without_constant(node)
        if source is None:
            raise Blocked("boundary", f"the branch ends in the own code of {_place(node)}")
        node, factor, below = source, factor * constant, [node]


def _returning(capture: Capture, node: fx.Node, residual: Residual) -> ModuleCall | None:
    inner = {call for total in residual.sums for call in calls_around(total)}
    calls = [c for c in capture.calls if c.output is node and c not in inner]
    calls = calls or [c for c in capture.calls if c.first is node and c not in inner]
    made_here = [c for c in calls if c.arguments.get(0) is not node]  # an identity hands on
    return min(made_here or calls, key=lambda call: call.path.count("."), default=None)


def _without_constant(node: fx.Node) -> tuple[fx.Node | None, float]:
    """The value behind a cast, dropout, a reshape of its rows or a product with a number."""
    source = node.args[0] if node.op == "call_function" and node.args else None
    if not isinstance(source, fx.Node):
        return None, 1.0
    if _keeps_last_axis(node, source):
        return source, 1.0
    number = node.args[1] if op_name(node) in ("mul", "div") else None
    if isinstance(number, (int, float)) and number != 0:
        return source, float(number) if op_name(node) == "mul" else 1.0 / float(number)
    return None, 1.0


def identities(capture: Capture, value: fx.Node) -> Iterator[str]:
    """The modules that hand ``value`` on as it is: places where a norm stood or could stand."""
    for call in capture.calls:
        given = call.arguments.get(0)
        is_identity = given is not None and issubclass(call.module_type, nn.Identity)
        if is_identity and given is not None and is_read_as_it_is(value, given):
            yield call.path


def is_read_as_it_is(node: fx.Node, value: fx.Node) -> bool:
    """Whether ``node`` is ``value``, looked through casts, dropout and reshapes of its rows."""
    while node is not value and node.op == "call_function":
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or not _keeps_last_axis(node, source):
            return False
        node = source
    return node is value


def skips_as_it_is(residual: Residual) -> bool:
    """Whether the skip of a sublayer is its fork, looked through casts, dropout and reshapes."""
    added = {n for b in residual.branches for n in (b.value, *b.joins)}
    streams = [residual.fork, *residual.sums]
    skips = [a for s in residual.sums for a in s.args[:2] if a not in added]
    return all(
        isinstance(skip, fx.Node) and any(is_read_as_it_is(skip, value) for value in streams)
        for skip in skips
    )


def value_readers(value: fx.Node) -> list[fx.Node]:
    """The readers of a value, looking through casts, dropout and reshapes of its rows."""
    readers: list[fx.Node] = []
    for user in value.users:
        if not reads_numbers(user, value):
            continue
        passes = user.op == "call_function" and _keeps_last_axis(user, value) and user.users
        readers += value_readers(user) if passes else [user]
    return readers


def _keeps_last_axis(node: fx.Node, value: fx.Node) -> bool:
    if op_name(node) not in _KEEPS_LAST_AXIS or node.op != "call_function":
        return False
    return node.meta["shape"][-1:] == value.meta["shape"][-1:]


def _require_one_call(capture: Capture, path: str) -> None:
    if len(capture.calls_of(path)) > 1:
        raise Blocked("shared", f"{path!r} is called more than once: its sublayers share weights")


def _place(node: fx.Node) -> str:
    calls = calls_around(node)
    return repr(calls[0].path) if calls and calls[0].path else "the model"
