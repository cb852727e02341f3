"""Norms that have a scale and shift of their own, each call of one as a single node of the graph.

Modelling code writes norms in many ways (one op, a chain of casts, powers and products, a
permutation before and after). What a norm module computes is known from its behaviour, so the ops
of each of its calls are replaced by one node, :func:`~normswap.dataflow.norm_call`. Functional
norms with stored weights are nodes already.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import fx, nn

from normswap.capture import Capture, ModuleCall, hook_read, stale_read
from normswap.dataflow import is_stored, norm_call
from normswap.find import GraphSite, Instance, NormSite, find_modules
from normswap.forms import StoredTensor
from normswap.functional import functional_nodes
from normswap.graphs import calls_around, writes_to
from normswap.maps import Blocked
from normswap.spec import NormSpec

KINDS = ("layer", "rms")


def norms_in_graph(
    model: nn.Module, capture: Capture, kinds: Collection[str] = KINDS
) -> list[GraphSite]:
    """Every layer and RMS norm, in the order of the modules, then the functional ones.

    The graph is changed: each call of a norm module becomes one node.
    """
    modules = {site.name: site for site in find_modules(model)}
    functional = list(functional_nodes(capture, set(modules)))
    inside = _nodes_inside(capture, set(modules))
    renamed: dict[fx.Node, fx.Node] = {}
    sites = [
        _of_module(site, site.spec, capture, inside, renamed)
        for site in modules.values()
        if site.spec is not None and site.spec.kind in kinds
    ]
    _rename(capture, renamed)
    sites += [_of_function(s, n) for s, n in functional if s.spec and s.spec.kind in kinds]
    for instance in (i for site in sites for i in site.instances):
        instance.x = instance.y.all_input_nodes[0]  # itself a norm that has a new node, perhaps
    return sites


def _nodes_inside(capture: Capture, modules: set[str]) -> dict[ModuleCall, list[fx.Node]]:
    """The ops of each call of a norm; one that holds another norm's call is left out."""
    inside: dict[ModuleCall, list[fx.Node]] = {}
    outer: set[ModuleCall] = set()
    for node in capture.graph.nodes:
        if node.op != "call_function" or node.target is hook_read:
            continue
        calls = [call for call in calls_around(node) if call.path in modules]
        outer.update(calls[1:])
        for call in calls[:1]:
            inside.setdefault(call, []).append(node)
    return {call: nodes for call, nodes in inside.items() if call not in outer}


def _of_module(
    site: NormSite,
    spec: NormSpec,
    capture: Capture,
    inside: dict[ModuleCall, list[fx.Node]],
    renamed: dict[fx.Node, fx.Node],
) -> GraphSite:
    found = GraphSite(site, site.name, spec.kind, spec.eps, _tensors(site, spec, capture))
    calls = capture.calls_of(site.name)
    if not calls:
        found.blocked = Blocked("not-called", "the recorded run did not call it")
    if spec.activation is not None:
        found.blocked = Blocked("op", f"{spec.activation!r} is applied to its result")
    for call in calls:
        instance = _collapsed(capture.graph, site, found, inside.get(call, []), call.output)
        if instance is None:
            found.blocked = Blocked("op", "its ops are not one chain from one input to one output")
            break
        renamed[instance[0]] = instance[1].y
        found.instances.append(instance[1])
    return found


def _tensors(site: NormSite, spec: NormSpec, capture: Capture) -> dict[str, StoredTensor]:
    by_name = {n: t for t in capture.tensors.values() for n in t.names}
    prefix = f"{site.name}." if site.name else ""
    roles = {"weight": spec.weight, "bias": spec.bias}
    return {role: by_name[prefix + name] for role, name in roles.items() if name is not None}


def _collapsed(
    graph: fx.Graph,
    site: NormSite,
    found: GraphSite,
    own: list[fx.Node],
    output: fx.Node | None,
) -> tuple[fx.Node, Instance] | None:
    """One node in the place of ``own``: the old output and the new evaluation."""
    members = set(own)
    tensors = [found.tensors.get(role) for role in ("weight", "bias")]
    nodes = [None if t is None else t.node for t in tensors]
    sources = {s for node in own for s in node.all_input_nodes if s not in members}
    sources = {s for s in sources if s.meta.get("kind") not in ("tensor", "constant")}
    read = [node for node in own if any(user not in members for user in node.users)]
    if not read and output in members:  # nobody reads its result
        read = [output]
    unread = any(t is not None and t.node is None for t in tensors)
    if len(sources) != 1 or len(read) != 1 or unread:
        return None
    x, y = next(iter(sources)), read[0]
    broken = any(node.target is stale_read or writes_to(node, x) for node in own)
    if broken or x.meta.get("shape") != y.meta.get("shape"):
        return None
    with graph.inserting_after(y):
        new = graph.call_function(norm_call, (x, *nodes))
    new.meta = {**y.meta, "norm": site.spec, "site": site.name}
    for user in list(y.users):
        if user not in members:
            user.replace_input_with(y, new)
    for node in reversed(own):
        graph.erase_node(node)
    return y, Instance({new}, x, new)


def _rename(capture: Capture, renamed: dict[fx.Node, fx.Node]) -> None:
    """Let what was noted of module calls name the new nodes."""
    for call in capture.calls:
        if call.output is not None:
            call.output = renamed.get(call.output, call.output)
        if call.first is not None:
            call.first = renamed.get(call.first, call.first)
        call.arguments = {key: renamed.get(n, n) for key, n in call.arguments.items()}
    for index, node in enumerate(capture.data_reads):
        capture.data_reads[index] = renamed.get(node, node)


def _of_function(site: NormSite, node: fx.Node | None) -> GraphSite:
    """A call of a functional norm; one written out in single ops has no node of its own."""
    spec = site.spec
    assert spec is not None
    found = GraphSite(site, None, spec.kind, spec.eps)
    if node is None:
        found.blocked = Blocked("functional", "it is written out in single ops, not a module")
        return found
    weight, bias = node.args[2] if len(node.args) > 2 else None, None
    if spec.kind == "layer" and len(node.args) > 3:
        bias = node.args[3]
    for role, tensor in (("weight", weight), ("bias", bias)):
        if is_stored(tensor):
            assert isinstance(tensor, fx.Node)
            found.tensors[role] = tensor.meta["tensor"]
        elif tensor is not None:
            found.blocked = Blocked("parametrised", f"its {role} is computed, not stored")
    node.meta["norm"] = replace(spec, weight="weight" if weight else None)
    x = node.all_input_nodes[0]
    found.instances.append(Instance({node}, x, node))
    return found
