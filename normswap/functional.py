"""Norms that are no modules: calls of functional norms, and norms written out in single ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import fx

from normswap.capture import Capture
from normswap.dataflow import CASTS, batch_norm_operands, op_name
from normswap.find import BATCH_NORM_OPS, NormSite
from normswap.graphs import calls_around
from normswap.spec import NormSpec

_KINDS = {"layer_norm": "layer", "rms_norm": "rms", "group_norm": "group"}


def functional_norms(capture: Capture, modules: set[str]) -> Iterator[NormSite]:
    """The norms that ran outside of every norm module, named ``module:op#number``.

    Args:
        capture: the recorded run.
        modules: canonical names of the norm modules, whose own ops are not counted again.
    """
    for site, _ in _with_nodes(capture, modules):
        yield site


def functional_nodes(
    capture: Capture, modules: set[str]
) -> Iterator[tuple[NormSite, fx.Node | None]]:
    """The same sites, each with its node where one op is the whole norm."""
    for site, node in _with_nodes(capture, modules):
        yield site, node if op_name(node) in _KINDS else None


def _with_nodes(capture: Capture, modules: set[str]) -> Iterator[tuple[NormSite, fx.Node]]:
    counts: Counter[str] = Counter()
    for node in capture.graph.nodes:
        if node.op != "call_function" or any(c.path in modules for c in calls_around(node)):
            continue
        spec = _spec_of_op(node) or _spec_of_steps(node)
        if spec is None:
            continue
        call = node.meta.get("call")
        where = "" if call is None else call.path
        op = op_name(node) if op_name(node) != "rsqrt" else spec.kind
        number = counts[f"{where}:{op}"]
        counts[f"{where}:{op}"] += 1
        name = f"{where}:{op}#{number}".lstrip(":")
        yield NormSite(name, (name,), None, spec, calls=1), node


def _argument(node: fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if position < len(node.args) else node.kwargs.get(name, default)


def _spec_of_op(node: fx.Node) -> NormSpec | None:
    """The spec of an op that is a norm."""
    name = op_name(node)
    if name in _KINDS:
        position = {"layer_norm": 4, "rms_norm": 3, "group_norm": 4}[name]
        eps = _argument(node, position, "eps", None)
        if name == "group_norm":
            groups = node.args[1]
            assert isinstance(groups, int)
            rank = len(node.meta["shape"])
            return NormSpec("group", tuple(range(1, rank)), float(eps or 1e-5), groups=groups)
        shape: Any = node.args[1]
        axes = tuple(range(-len(shape), 0))
        return NormSpec(_KINDS[name], axes, float(eps or 1e-5), normalized_shape=tuple(shape))
    if name == "instance_norm" or name in BATCH_NORM_OPS:
        x, *_, fixed = batch_norm_operands(node)
        kind = "instance" if name == "instance_norm" else "batch"
        rank = len(x.meta["shape"])
        axes = tuple(range(2, rank)) if kind == "instance" and not fixed else (0, *range(2, rank))
        eps = _argument(node, 6 if "no_training" in name else 7, "eps", 1e-5)
        return NormSpec(kind, axes, float(eps))
    return None


def _spec_of_steps(node: fx.Node) -> NormSpec | None:
    """``x * rsqrt(mean(x²) + eps)``, seen from its ``rsqrt``; ``x`` may be centred before."""
    if op_name(node) != "rsqrt":
        return None
    inside = _behind_casts(node.args[0])
    eps = 0.0
    if inside is not None and op_name(inside) == "add" and isinstance(inside.args[1], float):
        eps, inside = inside.args[1], _behind_casts(inside.args[0])
    if inside is None or op_name(inside) not in ("mean", "var"):
        return None
    dims = _argument(inside, 1, "dim", None)
    if dims is None or not _multiplies(node):
        return None
    rank = len(inside.all_input_nodes[0].meta["shape"])
    axes = tuple(sorted(d % rank - rank for d in ([dims] if isinstance(dims, int) else dims)))
    if op_name(inside) == "var":
        return NormSpec("layer", axes, eps)
    squared = _behind_casts(inside.args[0])
    if squared is None or not _is_square(squared):
        return None
    x = _behind_casts(squared.args[0])
    centred = x is not None and op_name(x) == "sub"
    return NormSpec("layer" if centred else "rms", axes, eps)


def _behind_casts(value: Any) -> fx.Node | None:
    while isinstance(value, fx.Node) and value.op == "call_function" and op_name(value) in CASTS:
        value = value.args[0]
    return value if isinstance(value, fx.Node) and value.op == "call_function" else None


def _is_square(node: fx.Node) -> bool:
    name = op_name(node)
    if name == "pow":
        return node.args[1] in (2, 2.0)
    return name == "square" or (name == "mul" and node.args[0] is node.args[1])


def _multiplies(node: fx.Node) -> bool:
    """Whether something is multiplied by the reciprocal root (it may be only returned)."""
    return any(user.op == "call_function" and op_name(user) == "mul" for user in node.users)
