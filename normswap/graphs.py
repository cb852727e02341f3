"""Questions about a recorded graph: who reads, who writes in place, what runs in a module call."""

from __future__ import annotations

import torch
from torch import fx

from normswap.capture import ModuleCall
from normswap.dataflow import CASTS, PERMUTATIONS, RESHAPES, op_name

# Ops whose output may share the storage of their input.
_VIEWS = CASTS | PERMUTATIONS | RESHAPES | {"slice", "select", "narrow", "split", "chunk", "expand"}
_ALIASES = CASTS | {"dropout", "getitem"}


def first_writer(value: fx.Node) -> fx.Node | None:
    """An op that writes in place to ``value`` or to a view of it."""
    seen, queue = {value}, [value]
    while queue:
        node = queue.pop()
        for user in node.users:
            if writes_to(user, node):
                return user
            view = user.op == "call_function" and (op_name(user) in _VIEWS | _ALIASES)
            if view and user not in seen:
                seen.add(user)
                queue.append(user)
    return None


def writes_to(op: fx.Node, value: fx.Node) -> bool:
    """Whether an op writes in place to ``value``."""
    if not isinstance(op.target, torch._ops.OpOverload) or not op.target._schema.is_mutable:
        return False
    return any(
        argument.alias_info is not None and argument.alias_info.is_write and given is value
        for argument, given in zip(op.target._schema.arguments, op.args, strict=False)
    )


def calls_around(node: fx.Node) -> list[ModuleCall]:
    """The module calls that a node ran in, innermost first."""
    call = node.meta.get("call")
    return [] if call is None else list(call.ancestors())


def is_alias(node: fx.Node) -> bool:
    """Whether an op hands its input on: a cast, or dropout in eval."""
    return op_name(node) in _ALIASES


def is_chain(value: fx.Node, calls: list[ModuleCall], inside: list[fx.Node]) -> bool:
    """Whether each call reads the one value that the call before it left."""
    for call in calls:
        body = [n for n in inside if call in calls_around(n)]
        if not body:
            continue  # an identity, which records nothing
        members = set(body)
        read = {s for n in body for s in n.all_input_nodes if s not in members}
        read = {s for s in read if s.meta.get("kind") not in ("tensor", "constant")}
        if read != {value}:
            return False
        value = body[-1]
    return True


def final_readers(node: fx.Node | None) -> list[fx.Node]:
    """The readers of a stored tensor, looking through casts."""
    if node is None:
        return []
    readers: list[fx.Node] = []
    for user in node.users:
        cast = user.op == "call_function" and op_name(user) in CASTS
        readers += final_readers(user) if cast and user.users else [user]
    return readers
