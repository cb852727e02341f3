"""Fold BatchNorm in eval mode into the layers around it.

A BatchNorm with stored statistics is a fixed affine map of each channel,

    y = s * x + t,    s = gamma / sqrt(var + eps),    t = beta - mean * s,

so it can become the identity if the map is absorbed elsewhere:

* *against the flow*: whatever writes ``x`` writes ``s * x + t`` instead. For a layer
  ``x = W u + b`` that is ``W' = diag(s) W`` and ``b' = s * b + t``. The scale is pushed first,
  then the shift.
* *with the flow*: whatever reads ``y`` gets ``x`` and makes up for it. For a layer ``W y + b`` that
  is ``b' = b + W t`` (with the old ``W``) and ``W' = W diag(s)``. The shift is pushed first.

Each is one push for all evaluations of the norm at once; if neither succeeds the norm stays. What
a norm blocks may be unblocked when its neighbour has been folded, so refused norms are tried again
as long as others succeed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import fx, nn

from normswap.biases import add_virtual_biases, made_biases
from normswap.capture import Capture, ModuleCall, capture, hook_read
from normswap.channelmap import (
    Pushed,
    commit,
    node_of,
    owners_in_words,
    push,
    require_one_path,
)
from normswap.find import GraphSite, Instance, Where, batch_norms_in_graph, matcher
from normswap.forms import stored_value
from normswap.graphs import calls_around, first_writer, is_alias, is_chain, writes_to
from normswap.inputs import Inputs
from normswap.maps import Blocked, Map, Scale, Shift
from normswap.plan import MappingRow, ModuleEdit, Plan, SiteOutcome, fingerprint
from normswap.program import Program, Vector, without_unread
from normswap.rewrites.sites import kept_outcome, require_own_tensors


def plan_fold_batchnorm(
    model: nn.Module,
    inputs: Inputs,
    *,
    where: Where = None,
) -> Plan:
    """Decide for every BatchNorm of ``model`` where it is folded, or why not.

    Args:
        model: the model, of a form that can be changed (:mod:`normswap.forms`); it is not
            changed itself and may be on the meta device.
        inputs: example inputs for the recorded run.
        where: which norms to fold (a glob, several, or a predicate on a ``NormSite``).

    Raises:
        CaptureError: the model cannot be run on the inputs.
    """
    recorded = capture(model, inputs)
    return _Folding(model, recorded, matcher(where)).plan()


@dataclass
class _Folded:
    """A norm that became the identity: how, and the edits of structure that make it so."""

    site: GraphSite
    action: str
    edits: list[ModuleEdit]
    removed: list[str]
    outputs: list[fx.Node]  # the values that stand for the norm's output from now on


@dataclass
class _Folding:
    model: nn.Module
    capture: Capture
    chosen: Callable[[Any], bool]
    folded: list[_Folded] = field(default_factory=list[_Folded])
    inside: dict[ModuleCall, list[fx.Node]] = field(default_factory=dict[ModuleCall, list[fx.Node]])
    children: dict[ModuleCall, list[ModuleCall]] = field(
        default_factory=dict[ModuleCall, list[ModuleCall]]
    )
    refused: dict[int, Blocked] = field(default_factory=dict[int, Blocked])

    def __post_init__(self) -> None:
        self.biases = add_virtual_biases(self.model, self.capture)
        shapes = {t.name: t.shape for t in self.capture.tensors.values()}
        shapes |= {name: tensor.shape for name, (tensor, _) in self.biases.items()}
        self.program = Program(lambda name: stored_value(self.model, name), shapes.__getitem__)
        self.sites = batch_norms_in_graph(self.model, self.capture)
        for node in self.capture.graph.nodes:
            if node.op == "call_function" and node.target is not hook_read:
                for call in calls_around(node):
                    self.inside.setdefault(call, []).append(node)
        for call in self.capture.calls:
            if call.parent is not None:
                self.children.setdefault(call.parent, []).append(call)

    def plan(self) -> Plan:
        waiting = list(self.sites)
        while waiting:
            left = [site for site in waiting if not self._fold(site)]
            # A fold may have unblocked a norm next to it; without one nothing has changed.
            retry = [s for s in left if s.blocked is None and self.chosen(s.site)]
            if len(left) == len(waiting) or not retry:
                break
            waiting = retry
        return self._collect()

    # -- one norm -----------------------------------------------------------------------------

    def _fold(self, site: GraphSite) -> bool:
        """Try to fold one norm; on failure the program is as before and the reason is kept."""
        try:
            if site.blocked is not None:
                raise site.blocked
            if not self.chosen(site.site):
                raise Blocked("where", "not selected by where=")
            for instance in site.instances:
                x, y = instance.x.meta["dtype"], instance.y.meta["dtype"]
                if x != y:
                    raise Blocked("op", f"it casts {x} to {y}")
            edits, removed = self._structure(site)
            pushes, against = self._absorb(site)
            if any(_shares_storage(instance) for instance in site.instances):
                edits = [ModuleEdit(e.kind, e.module, {**e.params, "clone": True}) for e in edits]
        except Blocked as blocked:
            self.refused[id(site)] = blocked
            return False
        self.refused.pop(id(site), None)
        touched = {node_of(value) for p in pushes for value in p.maps}
        for earlier in self.folded:  # outputs that this fold scales or shifts cannot be compared
            earlier.outputs = [] if touched & set(earlier.outputs) else earlier.outputs
        outputs = [i.x for i in site.instances] if against else []
        action = _describe_action(pushes, against=against)
        self.folded.append(_Folded(site, action, edits, removed, outputs))
        for instance in site.instances:
            _bypass(self.capture.graph, instance)
            for other in (i for s in self.sites for i in s.instances):
                other.x = instance.x if other.x is instance.y else other.x
        return True

    def _absorb(self, site: GraphSite) -> tuple[list[Pushed], bool]:
        """Push the norm's map one way, else the other; the pushes, and whether against the flow."""
        mark = self.program.mark()
        reasons: list[Blocked] = []
        for against in (True, False):
            try:
                pushes = self._push(site, against=against)
                require_one_path(self.capture, pushes)
                return pushes, against
            except Blocked as blocked:
                self.program.rollback(mark)
                reasons.append(blocked)
        back, forth = reasons
        # A norm behind an activation or the input can only go forward: that is what to explain.
        only_forward = back.code in {"input", "activation-between"} and forth.code != "output"
        code = forth.code if only_forward else back.code
        raise Blocked(
            code, f"into what writes it: {back.detail}; into what reads it: {forth.detail}"
        )

    def _push(self, site: GraphSite, *, against: bool) -> list[Pushed]:
        scale, shift = self._vectors(site)
        maps: list[Map]
        if against:
            maps = [Scale(scale), Shift(shift)]
        else:
            maps = [Shift(shift, negative=True), Scale(scale, inverse=True)]
        starts = {node for instance in site.instances for node in instance.nodes}
        fixed = {i.y if against else i.x for i in site.instances}
        pushes: list[Pushed] = []
        for m in maps:
            begin = [
                (value, _on_channels(m, value))
                for instance in site.instances
                for value in [instance.x if against else instance.y]
            ]
            pushes.append(push(self.program, begin, starts, fixed, against=against))
            commit(self.program, pushes[-1])
        return pushes

    def _vectors(self, site: GraphSite) -> tuple[Vector, Vector]:
        """``s`` and ``t``, ``[channels]``."""
        refs = {r: self.program.current(t.name) for r, t in site.tensors.items()}
        size = max(site.tensors["var"].shape, default=1)
        flat = {
            role: ref
            if len(site.tensors[role].shape) == 1
            else self.program.emit("reshape", ref, shape=[size])
            for role, ref in refs.items()
        }
        weight = [flat["weight"]] if "weight" in flat else []
        bias = [flat["bias"]] if "bias" in flat else []
        s = self.program.emit("batch_norm_scale", flat["var"], *weight, eps=site.eps)
        t = self.program.emit("batch_norm_shift", s, flat["mean"], *bias)
        return Vector(self.program, s, (size,)), Vector(self.program, t, (size,))

    # -- structure ----------------------------------------------------------------------------

    def _structure(self, site: GraphSite) -> tuple[list[ModuleEdit], list[str]]:
        """How the folded norm is taken out of the model, and the tensors that go with it."""
        origins = {i.y.meta["origin"] for i in site.instances if "origin" in i.y.meta}
        edits: list[ModuleEdit] = []
        require_own_tensors(site)
        if site.path is not None and not origins:
            emptying = self._emptying(site)
            return [emptying], self._tensors_below(site, keep=emptying.params.get("children", ()))
        if origins:
            removed = self._tensors_below(site, keep=()) or [t.name for t in site.tensors.values()]
            if site.site.module is not None and not self._is_called_by_graph(site):
                edits.append(self._emptying(site))
            else:
                edits = [self._erasing(i, removed) for i in site.instances]
            return edits, removed
        tensors = {role: t.name for role, t in site.tensors.items()}
        return [ModuleEdit("neutralise", "", {"tensors": tensors, "eps": site.eps})], []

    def _is_called_by_graph(self, site: GraphSite) -> bool:
        """Whether nodes of a ``GraphModule`` call the norm's ops or its plain module directly."""
        if self._emptying(site).kind != "identity":
            return False
        for instance in site.instances:
            path, name = instance.y.meta["origin"]
            graph_module = self.model.get_submodule(path)
            assert isinstance(graph_module, fx.GraphModule)
            node = next(n for n in graph_module.graph.nodes if n.name == name)
            target = f"{path}.{node.target}" if path else str(node.target)
            if node.op == "call_module" and target not in site.site.names:
                return False
        return True

    def _erasing(self, instance: Instance, tensors: list[str]) -> ModuleEdit:
        """The node of a ``GraphModule`` goes; its readers read its input."""
        path, node = instance.y.meta["origin"]
        return ModuleEdit("erase_node", path, {"node": node, "tensors": tensors})

    def _emptying(self, site: GraphSite) -> ModuleEdit:
        """The module becomes an identity, or keeps its children alone (a welded-on activation)."""
        assert site.path is not None
        names = list(site.site.names)
        calls = self.capture.calls_of(site.path)
        ran = [instance.y.meta["call"] for instance in site.instances]
        if set(ran) != set(calls) or len(ran) != len(calls):
            raise Blocked("shared", "some of its calls do something else")
        kept = {self._children_behind(i.y.meta["call"], i) for i in site.instances}
        if len(kept) != 1:
            raise Blocked("shared", "its calls do different things")
        children = list(kept.pop())
        if not children:
            return ModuleEdit("identity", site.path, {"names": names})
        return ModuleEdit("keep_children", site.path, {"names": names, "children": children})

    def _children_behind(self, call: ModuleCall, instance: Instance) -> tuple[str, ...]:
        """The child modules that the call runs one after the other behind the norm."""
        inside = self.inside.get(call, [])
        own = [n for n in inside if n.meta["call"] is call and n not in instance.nodes]
        computing = [n for n in own if n.meta["from_input"]]
        children = self.children.get(call, [])
        prefix = f"{call.path}." if call.path else ""
        names = [c.path.removeprefix(prefix) for c in children]
        direct = all("." not in n for n in names) and len(set(names)) == len(names)
        chained = is_chain(instance.y, children, inside)
        if not direct or not chained or any(not is_alias(n) for n in computing):
            raise Blocked("op", "its module does more than the norm and an activation behind it")
        return tuple(names)

    def _tensors_below(self, site: GraphSite, keep: tuple[str, ...]) -> list[str]:
        """All names of the tensors that go with the module."""
        found: list[str] = []
        names = site.site.names if site.path is None else (site.path, *site.site.names)
        for path in dict.fromkeys(names):
            module = self.model.get_submodule(path)
            for tensors in (module.named_parameters, module.named_buffers):
                names = [n for n, _ in tensors(remove_duplicate=False)]
                found += [f"{path}.{n}" for n in names if n.partition(".")[0] not in keep]
        return sorted(found)

    # -- the result ---------------------------------------------------------------------------

    def _collect(self) -> Plan:
        edits = self.program.edits()
        plan = Plan("fold_batchnorm", fingerprint(self.model), edits)
        used = {edit.target for edit in edits}
        plan.module_edits += made_biases(plan, self.biases, used)
        done = {id(f.site): f for f in self.folded}
        for site in self.sites:
            plan.sites.append(_outcome(site, done.get(id(site)), self.refused.get(id(site))))
        for folded in self.folded:
            plan.module_edits += folded.edits
            plan.removed += folded.removed
            plan.comparable += [folded.site.site.name] if folded.outputs else []
        plan.removed = list(dict.fromkeys(plan.removed))
        gone = set(plan.removed)
        all_tensors = {**self.capture.tensors, **{n: t for n, (t, _) in self.biases.items()}}
        for target, sources in self.program.stored_sources(edits).items():
            if target in gone:
                continue
            op = "new" if target in self.biases else "fold"
            plan.mapping.append(MappingRow(target, sources, op, "exact"))
            if len(all_tensors[target].names) > 1:
                plan.aliases[target] = list(all_tensors[target].names)
        # What was pushed into a norm that was folded itself later is needed by that fold only.
        plan.edits = without_unread(edits, gone)
        plan.mapping += [MappingRow(name, (name,), "dropped", "exact") for name in plan.removed]
        plan.notes += _notes(self)
        return plan


def _outcome(site: GraphSite, folded: _Folded | None, blocked: Blocked | None) -> SiteOutcome:
    if folded is not None:
        return SiteOutcome(site.site.name, site.kind, folded.action, "exact", names=site.site.names)
    assert blocked is not None
    return kept_outcome(site, blocked)


def _notes(folding: _Folding) -> list[str]:
    notes: list[str] = []
    if folding.capture.on_real_inputs:
        notes.append(
            "the model reads data while it runs, so it was recorded on real inputs; norms that "
            "other inputs could reach on another path are refused"
        )
    untouched = [s for s in folding.folded if _never_updated(folding, s.site)]
    if untouched:
        notes.append(
            f"{len(untouched)} folded norms have statistics that were never updated "
            "(mean 0, variance 1), as after loading no checkpoint"
        )
    return notes


def _never_updated(folding: _Folding, site: GraphSite) -> bool:
    values = [folding.program.value((site.tensors[r].name, 0)) for r in ("mean", "var")]
    (mean, known), (var, _) = values
    return known and bool((mean == 0).all()) and bool((var == 1).all())


# -- one norm in the graph ----------------------------------------------------------------------


def _on_channels(m: Map, value: fx.Node) -> Map:
    """A map on ``[channels]`` as a map on axis 1 of a value."""
    rank = len(value.meta["shape"])
    size = m.vector.shape[-1]
    return m.reshape(*(size if axis == min(1, rank - 1) else 1 for axis in range(rank)))


def _describe_action(pushes: list[Pushed], *, against: bool) -> str:
    return f"folded {'back' if against else 'forward'} into {owners_in_words(pushes)}"


def _bypass(graph: fx.Graph, instance: Instance) -> None:
    """What read the norm's output reads its input from now on."""
    instance.y.replace_all_uses_with(instance.x)
    pending = set(instance.nodes)
    for node in reversed(list(graph.nodes)):
        if node in pending and not node.users:
            graph.erase_node(node)


def _shares_storage(instance: Instance) -> bool:
    """Without the norm its output *is* its input: could an in-place write then hit the other?"""
    x, y = instance.x, instance.y
    others = [u for u in x.users if u not in instance.nodes]
    still_read = x.op == "placeholder" or bool(others)
    written = still_read and first_writer(y) is not None
    return written or any(writes_to(user, x) for user in others)
