"""Find the norms of a model: modules by type or by probe, and norm ops in a recorded graph."""

from __future__ import annotations

import fnmatch
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.modules.instancenorm import _InstanceNorm  # pyright: ignore[reportPrivateUsage]

from normswap.capture import Capture
from normswap.collapse import collapse_names
from normswap.dataflow import CASTS, batch_norm_operands, op_name
from normswap.errors import NormswapError
from normswap.forms import StoredTensor, module_names
from normswap.maps import Blocked
from normswap.probe import probe, probe_fixed_affine
from normswap.rendering import Document, Section, Table, to_text
from normswap.spec import NormSpec, Unknown

BATCH_NORM_OPS = {"batch_norm", "native_batch_norm", "_native_batch_norm_legit_no_training"}
Where = str | Iterable[str] | Callable[["NormSite"], bool] | None


@dataclass(frozen=True)
class NormSite:
    """One norm of a model.

    Attributes:
        name: canonical module name, or ``module:batch_norm#0`` for a call without a module.
        names: all names of a shared module.
        module: the module, or ``None`` for a call without one.
        spec: what it computes, or ``None`` if that could not be told.
        calls: how often it was called in the recorded run; ``None`` without one.
        reason: why ``spec`` is ``None``.
    """

    name: str
    names: tuple[str, ...]
    module: nn.Module | None
    spec: NormSpec | None
    calls: int | None = None
    reason: str | None = None


class NormSites(Sequence[NormSite]):
    """The norms that were found: a value that can be filtered, counted and shown."""

    def __init__(self, sites: Iterable[NormSite]) -> None:
        self._sites = tuple(sites)

    def __getitem__(self, index: int) -> NormSite:  # type: ignore[override]
        return self._sites[index]

    def __len__(self) -> int:
        return len(self._sites)

    def __iter__(self) -> Iterator[NormSite]:
        return iter(self._sites)

    def where(self, name: Where = None, *, kind: str | None = None) -> NormSites:
        """The sites that match a glob (or several, or a predicate) and a kind."""
        chosen = matcher(name)
        return NormSites(
            s
            for s in self._sites
            if chosen(s) and (kind is None or (s.spec is not None and s.spec.kind == kind))
        )

    def expect_count(self, count: int) -> NormSites:
        """The same sites, if there are ``count``.

        Raises:
            NormswapError: there are more or fewer.
        """
        if len(self) != count:
            raise NormswapError(f"expected {count} norms, found {len(self)}:\n{self}")
        return self

    def __str__(self) -> str:
        rows = [_columns(site) for site in self._sites]
        shown = [(c.columns[0], str(c.count), *c.columns[1:]) for c in collapse_names(rows)]
        width = shutil.get_terminal_size((100, 24)).columns
        table = Table(("norm", "n", "kind", "class", "eps", "calls"), tuple(shown))
        kinds = Counter(row[1] for row in rows)
        summary = tuple(f"{count} {kind}" for kind, count in kinds.most_common())
        sections = (Section("", table),) if rows else ()
        title = f"{len(rows)} norm{'' if len(rows) == 1 else 's'}"
        text = to_text(Document(title, summary, None, sections), width)
        return text.replace("\n\n\n", "\n\n")  # the one section needs no heading

    __repr__ = __str__


def _columns(site: NormSite) -> tuple[str, ...]:
    kind = "unknown" if site.spec is None else site.spec.kind
    eps = "" if site.spec is None else f"{site.spec.eps:g}"
    calls = "" if site.calls is None else str(site.calls)
    module = "(function)" if site.module is None else type(site.module).__name__
    name = site.name or "(the model)"
    return name + "".join(f", {n}" for n in site.names[1:]), kind, module, eps, calls


def matcher(where: Where) -> Callable[[NormSite], bool]:
    """``where=`` as a predicate: a glob, a list of globs, or a predicate on a site."""
    if where is None:
        return lambda _: True
    if callable(where):
        return where
    globs = [where] if isinstance(where, str) else list(where)
    return lambda site: any(fnmatch.fnmatchcase(n, g) for n in site.names for g in globs)


def batch_spec(module: nn.Module) -> NormSpec | None:
    """The spec of a BatchNorm in any form, or ``None`` if the module is none."""
    if isinstance(module, _BatchNorm):
        rank = {"1d": 1, "2d": 2, "3d": 3}.get(type(module).__name__[-2:].lower(), 2)
        return NormSpec(
            "batch",
            (0, *range(2, 2 + rank)),
            module.eps,
            **_present(module, ("weight", "bias", "running_mean", "running_var")),
        )
    if isinstance(module, _InstanceNorm):
        return _instance_spec(module)
    return probe_fixed_affine(module)


def _present(module: nn.Module, names: tuple[str, str, str, str]) -> _Names:
    """The names of those tensors that the module has, by role."""
    weight, bias, mean, var = (n if getattr(module, n, None) is not None else None for n in names)
    return {"weight": weight, "bias": bias, "mean": mean, "var": var}


class _Names(TypedDict):
    weight: str | None
    bias: str | None
    mean: str | None
    var: str | None


def _instance_spec(module: _InstanceNorm) -> NormSpec | None:
    """An InstanceNorm with running statistics is a fixed map in eval; others are none of ours."""
    if module.running_mean is None:
        return None
    weight, bias = ("weight", "bias") if module.affine else (None, None)
    return NormSpec("instance", (2,), module.eps, weight, bias, "running_mean", "running_var")


def find_batch_norms(model: nn.Module) -> list[NormSite]:
    """Every BatchNorm module of the model, a shared one once with all its names."""
    return [
        NormSite(name, names, module, spec)
        for name, names in module_names(model).items()
        for module in [model.get_submodule(name)]
        for spec in [batch_spec(module)]
        if spec is not None
    ]


def find_modules(model: nn.Module) -> list[NormSite]:
    """Every module that behaves as a norm, a shared one once with all its names.

    What behaves as a norm but cannot be told is there too, with the reason and without a spec.
    """
    sites: list[NormSite] = []
    for name, names in module_names(model).items():
        if "parametrizations" in name.split("."):
            continue  # it standardises a weight, not an activation
        module = model.get_submodule(name)
        found = probe(module)
        if isinstance(found, Unknown):
            reason = f"{found.reason} ({found.seen})" if found.seen else found.reason
            sites.append(NormSite(name, names, module, None, reason=reason))
        elif found is not None and found.kind != "affine":  # an affine alone normalises nothing
            sites.append(NormSite(name, names, module, found))
    return sites


# -- in a graph -----------------------------------------------------------------------------------


@dataclass(eq=False)
class Instance:
    """One evaluation of a norm in the graph: the ops between its input and its output."""

    nodes: set[fx.Node]
    x: fx.Node
    y: fx.Node


@dataclass(eq=False)
class GraphSite:
    """A norm with its evaluations in the graph and its tensors by role.

    ``path`` is the module whose own call evaluates it, or ``None`` for a call without a module.
    ``blocked`` says why nothing can be done with it.
    """

    site: NormSite
    path: str | None
    kind: str
    eps: float = 0.0
    tensors: dict[str, StoredTensor] = field(default_factory=dict[str, StoredTensor])
    instances: list[Instance] = field(default_factory=list[Instance])
    blocked: Blocked | None = None


def batch_norms_in_graph(model: nn.Module, capture: Capture) -> list[GraphSite]:
    """Every BatchNorm: called or not, module or function, in order of first evaluation."""
    modules = {site.name: site for site in find_batch_norms(model)}
    found: dict[object, GraphSite] = {}
    counts: dict[str, int] = {}
    for node in capture.graph.nodes:
        if node.op == "call_function" and _is_fixed_norm_op(node):
            _add_op(found, modules, counts, node)
    # What is a norm by behaviour but calls no norm op computes it in single steps.
    stepwise = {n for n, s in modules.items() if s.spec and s.spec.kind == "frozen_batch"}
    for name in stepwise - set(found):
        for call in capture.calls_of(name):
            site = found.setdefault(name, _frozen_site(modules[name], capture))
            if site.blocked is None:
                _add_frozen_instance(site, capture, call)
    order = {node: i for i, node in enumerate(capture.graph.nodes)}
    called = sorted(
        found.values(),
        key=lambda s: min((order[i.x] for i in s.instances), default=len(order)),
    )
    # A module that is only a place for tensors has its answer in the call that reads them.
    holders = {tensor.owner for site in called for tensor in site.tensors.values()}
    uncalled = [_uncalled(s) for name, s in modules.items() if name not in {*found, *holders}]
    return [*called, *uncalled]


def _is_fixed_norm_op(node: fx.Node) -> bool:
    name = op_name(node)
    if name == "instance_norm":  # with running statistics in eval it is a fixed affine map
        return batch_norm_operands(node)[3] is not None
    return name in BATCH_NORM_OPS


def _uncalled(site: NormSite) -> GraphSite:
    assert site.spec is not None
    blocked = Blocked("not-called", "the recorded run did not call it")
    return GraphSite(site, site.name, site.spec.kind, blocked=blocked)


def _stored(node: fx.Node | None) -> StoredTensor | None:
    """The stored tensor behind casts, if that is what ``node`` is."""
    while node is not None and node.op == "call_function" and op_name(node) in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    return None if node is None else node.meta.get("tensor")


def _add_op(
    found: dict[object, GraphSite],
    modules: dict[str, NormSite],
    counts: dict[str, int],
    node: fx.Node,
) -> None:
    x, *operands, fixed = batch_norm_operands(node)
    roles: dict[str, fx.Node | None] = dict(
        zip(("weight", "bias", "mean", "var"), operands, strict=True)
    )
    stored = {role: _stored(n) for role, n in roles.items() if n is not None}
    path = _path_of(node, stored, modules)
    key = path if path is not None else tuple(sorted(roles.items(), key=str))
    if key not in found:
        kind = "instance" if op_name(node) == "instance_norm" else "batch"
        position = {"_native_batch_norm_legit_no_training": 6}.get(op_name(node), 7)
        eps = node.args[position] if position < len(node.args) else 1e-5
        assert isinstance(eps, float)
        site = modules.get(path or "") or _functional(node, kind, eps, path, counts)
        found[key] = GraphSite(site, path, kind, eps)
        found[key].tensors = {role: t for role, t in stored.items() if t is not None}
    group = found[key]
    group.blocked = group.blocked or _why_not_fixed(roles, stored, group, fixed)
    nodes, y = {node}, node
    if op_name(node).startswith(("native", "_native")):
        items = {user.args[1]: user for user in node.users}
        y = items[0]
        nodes |= set(items.values())
        if any(items[i].users for i in items if i != 0):
            group.blocked = group.blocked or Blocked("op", "its batch statistics are read")
    group.instances.append(Instance(nodes, x, y))


def _path_of(
    node: fx.Node, stored: dict[str, StoredTensor | None], modules: dict[str, NormSite]
) -> str | None:
    """The norm module whose own call (or whose exported op) this is."""
    call = node.meta.get("call")
    if call is not None and call.path in modules:
        return call.path
    mean = stored.get("mean")
    if "origin" in node.meta and mean is not None and mean.owner:
        return mean.owner
    return None


def _functional(
    node: fx.Node,
    kind: str,
    eps: float,
    path: str | None,
    counts: dict[str, int],
) -> NormSite:
    call = node.meta.get("call")
    where = "" if call is None else call.path
    if path is None:
        number = counts.get(where, 0)
        counts[where] = number + 1
        name = f"{where}:{op_name(node)}#{number}".lstrip(":")
    else:
        name = path
    rank = len(node.meta.get("shape", node.args[0].meta["shape"]))  # type: ignore[union-attr]
    spec = NormSpec(kind, (0, *range(2, rank)), eps)
    return NormSite(name, (name,), None, spec)


def _why_not_fixed(
    roles: dict[str, fx.Node | None],
    stored: dict[str, StoredTensor | None],
    group: GraphSite,
    fixed: bool,
) -> Blocked | None:
    if roles["mean"] is None or roles["var"] is None:
        return Blocked(
            "batch-statistics",
            "it has no running statistics: it normalises with those of its own input",
        )
    if not fixed:
        return Blocked(
            "training-mode", "it normalises with batch statistics: call model.eval() first"
        )
    for role, tensor in stored.items():
        if tensor is None:
            return Blocked("parametrised", f"its {role} is computed, not stored")
        if group.tensors.get(role) is not tensor:
            return Blocked("shared", "it is evaluated with different tensors")
    return None


def _frozen_site(site: NormSite, capture: Capture) -> GraphSite:
    assert site.spec is not None
    roles = {r: getattr(site.spec, r) for r in ("weight", "bias", "mean", "var")}
    by_name = {n: t for t in capture.tensors.values() for n in t.names}
    prefix = f"{site.name}." if site.name else ""
    tensors = {role: by_name[prefix + name] for role, name in roles.items() if name is not None}
    return GraphSite(site, site.name, site.spec.kind, site.spec.eps, tensors)


def _add_frozen_instance(group: GraphSite, capture: Capture, call: object) -> None:
    """The ops that ran in the module's own call; what they read from outside is ``x``."""
    own = {n for n in capture.graph.nodes if n.op == "call_function" and n.meta.get("call") is call}
    outside = dict.fromkeys(
        source
        for node in own
        for source in node.all_input_nodes
        if source not in own and source.meta.get("kind") not in ("tensor", "constant")
    )
    read = [node for node in own if any(user not in own for user in node.users)]
    if len(outside) != 1 or len(read) != 1:
        group.blocked = Blocked("op", "its ops are not one chain from one input to one output")
        return
    x, y = next(iter(outside)), read[0]
    shape, size = x.meta["shape"], max(group.tensors["var"].shape, default=1)
    if shape != y.meta["shape"] or len(shape) < 2 or shape[1] != size:
        group.blocked = Blocked("axis-mismatch", "it broadcasts its input to another shape")
        return
    group.instances.append(Instance(own, x, y))
