"""LayerNorm → RMSNorm exactly: make the stream that a LayerNorm reads zero-mean at its source.

With ``C = I - 11ᵀ/d``, which removes the mean of a vector of width ``d``,

    LayerNorm(x) = g ⊙ RMS(C x) + b,

the same eps inside both roots. ``C`` is linear, so it can be pushed against the flow into whatever
writes ``x``: ``W' = C W`` and ``b' = C b`` for a layer that adds to it, ``E' = E C`` for a table.
Every writer must take it and every reader ignore it; then every LayerNorm on the way is an RMSNorm,
and not one of them before.

* A product with a stored vector ``v`` (LayerScale) does not commute with ``C``: ``v`` goes into
  the layer in front of it first.
* A writer that cannot take ``C`` may be followed by one op that removes the mean, at the boundary
  of a module. That is done where it frees more norms than it adds ops.
* A LayerNorm that stays (``keep_class``) removes the mean itself, so a table that is also the
  weight of a tied output layer, or is not saved, is left as it is.

Source: Ashkboos et al. 2024, *SliceGPT*, section 3.1; Jiang et al. 2023, *Pre-RMSNorm and
Pre-CRMSNorm Transformers*, section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from normswap.capture import ModuleCall
from normswap.channelmap import DeadEnds, Pushed, describe, node_of, push, require_one_path
from normswap.dataflow import RULES, Value, norm_axes, op_name
from normswap.find import GraphSite
from normswap.graphs import calls_around
from normswap.maps import Blocked, Centre, Map
from normswap.plan import ModuleEdit, Plan, SiteOutcome, fingerprint
from normswap.program import Program
from normswap.rewrites.fold_affine import NOTHING, AffineFolding
from normswap.rewrites.sites import kept_outcome
from normswap.surgery import Surgery

MAX_CUTS = 32
MAX_TRIES = 48
# Visits per op of the graph, in all tries since the last norm that could be freed.
MAX_VISITS_PER_OP = 16
# What no op on the way could get round, and so the better reason to give.
FINAL = ("output", "hook", "stale-alias", "data-dependent")


class _NotWorthItError(Blocked):
    """More ops would be added than norms freed; never the reason that is given."""

    def __init__(self, detail: str) -> None:
        super().__init__("op", detail)


@dataclass(frozen=True)
class Cut:
    """Values that are centred by an op of their own, one for each call of a module.

    ``edit`` says where the op goes; ``None`` where a value is only left as it is.
    """

    values: tuple[fx.Node, ...]
    axis: int  # counted from the end
    edit: ModuleEdit | None
    where: str = ""


@dataclass
class Centring:
    """Centres one stream after the other; ``centred`` holds the values that have no mean."""

    surgery: Surgery
    sites: Sequence[GraphSite]  # the norms for whose sake it is done
    keep_class: bool = False
    centred: dict[Value, Map] = field(default_factory=dict[Value, Map])
    cuts: list[Cut] = field(default_factory=list[Cut])
    uncentred: dict[Value, str] = field(default_factory=dict[Value, str])  # tables left in a stream
    tries: int = 0
    dead_ends: DeadEnds = field(default_factory=DeadEnds)
    boundaries: dict[tuple[fx.Node, int], list[Cut]] = field(
        default_factory=dict[tuple[fx.Node, int], list[Cut]]
    )
    tried: set[frozenset[fx.Node]] = field(default_factory=set[frozenset[fx.Node]])

    def centre(self, site: GraphSite) -> None:
        """Make the input of a LayerNorm zero-mean, with every stream that it is part of.

        Raises:
            Blocked: a writer or reader on the way cannot take it; nothing was changed.
        """
        if site.blocked is not None:
            raise site.blocked
        if self.is_centred(site):
            return
        self.tries = 0
        self.tried.clear()
        pushed, cuts = self._solve(site, [])
        self.dead_ends = DeadEnds()
        self.centred |= {v: m for v, m in pushed.maps.items() if isinstance(m, Centre)}
        self.cuts += cuts
        left = ", ".join(cut.where for cut in cuts if cut.edit is None)
        self.uncentred |= dict.fromkeys(pushed.maps, left) if left else {}

    def left_in(self, site: GraphSite) -> str:
        """The tables that still have a mean, in the stream that a norm reads."""
        return next((self.uncentred[i.x] for i in site.instances if i.x in self.uncentred), "")

    def is_centred(self, site: GraphSite) -> bool:
        """Whether every input of the norm has no mean."""
        return bool(site.instances) and all(self._has_no_mean(i.x, i.y) for i in site.instances)

    def _has_no_mean(self, x: fx.Node, y: fx.Node) -> bool:
        m = _whole(self.surgery.program, x, y)
        done = self.centred.get(x)
        if done is not None:
            return done.same(m)
        rule = RULES.get(op_name(x)) if x.op == "call_function" else None
        return rule is not None and rule.already_centred(x, m, self.surgery.program)

    def _solve(self, site: GraphSite, cuts: list[Cut]) -> tuple[Pushed, list[Cut]]:
        """Push with these cuts; where something is in the way, with one more."""
        program = self.surgery.program
        mark, ops = program.mark(), dict(self.surgery.ops)
        try:
            return self._push_through(site, cuts), cuts
        except Blocked as blocked:
            first = blocked
            possible = self._cuts_for(first, cuts) if len(cuts) < MAX_CUTS else iter(())
            program.rollback(mark)
            self.surgery.ops = ops
        limit = MAX_VISITS_PER_OP * len(self.surgery.capture.graph.nodes)
        for cut in possible:
            values = frozenset(value for c in (*cuts, cut) for value in c.values)
            if values in self.tried:  # in another order
                continue
            self.tried.add(values)
            self.tries += 1
            if self.tries > MAX_TRIES or self.dead_ends.visits > limit:
                break
            try:
                return self._solve(site, [*cuts, cut])
            except _NotWorthItError:
                break
            except Blocked as blocked:
                if blocked.root in FINAL:
                    first = blocked
        raise first

    def _push_through(self, site: GraphSite, cuts: list[Cut]) -> Pushed:
        """Push, with every stored factor in the way folded into what writes its product."""
        folded: list[Pushed] = []
        while True:
            count = len(folded)
            pushed = self._push(site, cuts, folded)
            if len(folded) == count:  # else weights changed under it: does all of it still hold?
                break
        self._require_worth(pushed, cuts)
        require_one_path(self.surgery.capture, [*folded, pushed])
        self.surgery.take(pushed, "centre")
        return pushed

    def _push(self, site: GraphSite, cuts: list[Cut], folded: list[Pushed]) -> Pushed:
        program = self.surgery.program
        starts = {node for instance in site.instances for node in instance.nodes}
        written = {value: cut.axis for cut in cuts for value in cut.values}
        begin = [
            (value, Centre.over(program, value.meta["shape"], [len(value.meta["shape"]) + axis]))
            for value, axis in written.items()
        ]
        begin += [(i.x, _whole(program, i.x, i.y)) for i in site.instances]
        rescaled = {value for pushed in folded for value in pushed.maps}
        left = {v: m for v, m in self.centred.items() if v not in rescaled}

        def fold(product: fx.Node, blocked: Blocked) -> None:
            folded.append(self._fold_scale(product, blocked))

        return push(
            program,
            begin,
            starts,
            [],
            against=True,
            written=written,
            left=left,
            fold=fold,
            dead_ends=self.dead_ends,
        )

    def _fold_scale(self, product: fx.Node, blocked: Blocked) -> Pushed:
        try:
            return self.surgery.fold_scale(product)
        except Blocked as inner:
            detail = f"{blocked.detail}, and its writer cannot take it: {inner.detail}"
            raise Blocked(blocked.code, detail) from None

    # -- ops that remove the mean -----------------------------------------------------------------

    def _cuts_for(self, blocked: Blocked, cuts: list[Cut]) -> Iterator[Cut]:
        """Where on the way from an obstacle to the norms the mean could be removed."""
        cut_already = {value for cut in cuts for value in cut.values}
        if blocked.place is None:
            return
        for value in _downstream(blocked):
            axis = _width_axis(value, blocked)
            if value in cut_already or axis is None:
                continue
            if self.keep_class:
                table = node_of(blocked.place[0])
                if table.op == "placeholder" and table.meta["kind"] != "input":
                    yield Cut((value,), axis, None, describe(table))
                return
            if (value, axis) not in self.boundaries:
                self.boundaries[value, axis] = list(self._boundaries(value, axis))
            for cut in self.boundaries[value, axis]:
                if not cut_already & set(cut.values):
                    yield cut

    def _boundaries(self, value: fx.Node, axis: int) -> Iterator[Cut]:
        """The module that a value leaves, and the one that it enters."""
        for call in calls_around(value):
            calls = self.surgery.capture.calls_of(call.path)
            if call.path and call.output is value and all(_leaves(c) for c in calls):
                outputs = tuple(c.output for c in calls if c.output is not None)
                edit = ModuleEdit("centre", call.path, {"axis": axis, "argument": None})
                yield Cut(outputs, axis, edit, f"the output of {call.path!r}")
                break
        for call in self.surgery.capture.calls:
            keys = [key for key, node in call.arguments.items() if node is value and call.path]
            calls = self.surgery.capture.calls_of(call.path) if keys else []
            for key in keys:
                if all(_enters(c, key) for c in calls):
                    inputs = tuple(c.arguments[key] for c in calls)
                    edit = ModuleEdit("centre", call.path, {"axis": axis, "argument": key})
                    yield Cut(inputs, axis, edit, f"the input of {call.path!r}")
                    return

    def _require_worth(self, pushed: Pushed, cuts: list[Cut]) -> None:
        """Raise unless the added ops are fewer than the norms that they free."""
        added = [cut for cut in cuts if cut.edit is not None]
        count = sum(len(cut.values) for cut in added)
        freed = sum(
            i.x in pushed.maps and i.x not in self.centred
            for site in self.sites
            for i in site.instances
        )
        if added and freed <= count:
            places = ", ".join(cut.where for cut in added)
            ops, norms = _count(count, "op"), _count(freed, "norm")
            raise _NotWorthItError(f"{ops} to remove the mean of {places} would free only {norms}")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _whole(program: Program, x: fx.Node, y: fx.Node) -> Centre:
    """The mean over all axes that a norm removes it over."""
    return Centre.over(program, x.meta["shape"], axes_of(y))


def axes_of(y: fx.Node) -> frozenset[int]:
    """The axes of a norm's input that its statistics are over.

    Raises:
        Blocked: they are parts of axes.
    """
    axes = norm_axes(y)
    if axes is None:
        raise Blocked("axis-mismatch", "its statistics are over parts of an axis")
    return axes


def _downstream(blocked: Blocked) -> Iterator[fx.Node]:
    """Touched values from an obstacle on towards the norms, nearest first."""
    assert blocked.place is not None
    start, op = blocked.place
    start = getattr(start, "node", start)
    touched = {v for v in blocked.maps if isinstance(v, fx.Node)}
    asked_as_writer = start.op == "call_function" and op in (start, *start.all_input_nodes)
    seen, queue = {start}, [start]
    while queue:
        value = queue.pop(0)
        if value is not start or asked_as_writer:
            yield value
        users = [u for u in value.users if u in touched and u not in seen]
        seen.update(users)
        queue += users


def _width_axis(value: fx.Node, blocked: Blocked) -> int | None:
    """The one axis that is centred, counted from the end."""
    m = blocked.maps.get(value)
    if not isinstance(m, Centre) or len(m.axes) != 1 or not m.is_whole:
        return None
    return next(iter(m.axes)) - len(m.vector.shape)


def _leaves(call: ModuleCall) -> bool:
    """Whether a call makes its output itself, and only others read it."""
    made = call.output
    if made is None or call not in calls_around(made):
        return False
    return all(call not in calls_around(user) or user.op == "output" for user in made.users)


def _enters(call: ModuleCall, key: int | str) -> bool:
    """Whether an argument of a call is read inside of it only."""
    given = call.arguments.get(key)
    if given is None or given.op != "call_function":
        return False
    return all(call in calls_around(user) for user in given.users)


@dataclass(frozen=True)
class Converted:
    """A LayerNorm whose input has no mean any more.

    ``without_shift``: its beta was folded away; ``folded``: its scale, or both.
    """

    without_shift: bool = False
    folded: bool = False
    words: str = ""


@dataclass
class Conversion:
    """Which LayerNorms are RMSNorms by now, and why the others are not."""

    surgery: Surgery
    cuts: list[Cut]
    done: dict[str, Converted] = field(default_factory=dict[str, Converted])
    refused: dict[str, Blocked] = field(default_factory=dict[str, Blocked])

    def is_folded(self, name: str) -> bool:
        """Whether a norm's scale is in other layers now."""
        return name in self.done and self.done[name].folded

    def finish(self, plan: Plan) -> None:
        """Add to a plan what was done outside of the norms."""
        self.surgery.finish(plan)
        plan.module_edits += [cut.edit for cut in self.cuts if cut.edit is not None]
        behind = {cut.edit.module for cut in self.cuts if cut.edit is not None}
        plan.comparable += [n for n, c in self.done.items() if not c.folded and n not in behind]
        if any(op == "centre" for op in self.surgery.ops.values()):
            plan.notes.append(
                "the streams between the layers have no mean any more: recorded hidden states and "
                "hooks on inner layers see them so"
            )
        places = [cut.where for cut in self.cuts if cut.edit is not None]
        if places:
            plan.notes.append(
                f"{_count(len(places), 'op')} without parameters added, to remove the mean of "
                f"{', '.join(places)}"
            )


def convert(
    surgery: Surgery,
    chosen: Callable[[GraphSite], bool],
    *,
    fold_affine: bool = False,
    keep_class: bool = False,
) -> Conversion:
    """Centre the streams of the chosen layer norms, as far as that is exact.

    Args:
        surgery: the recorded model.
        chosen: which layer norms.
        fold_affine: fold their gamma and beta into the layers that read them, too.
        keep_class: the norms stay LayerNorms; no op is added, and affines are folded.
    """
    sites = [s for s in surgery.sites if s.kind == "layer" and s.path is not None and chosen(s)]
    centring = Centring(surgery, sites, keep_class=keep_class)
    conversion = Conversion(surgery, centring.cuts)
    folding = AffineFolding(surgery)
    for site in sites:
        try:
            centring.centre(site)
            left = centring.left_in(site)
            words = f" but for {left}" if left else ""
            conversion.done[site.site.name] = Converted(words=words)
        except Blocked as blocked:
            conversion.refused[site.site.name] = blocked
    for site in sites:
        name = site.site.name
        if name in conversion.done and (fold_affine or keep_class):
            before = conversion.done[name].words
            folded = _folded(folding, site)
            conversion.done[name] = replace(folded, words=before + folded.words)
    return conversion


def _folded(folding: AffineFolding, site: GraphSite) -> Converted:
    try:
        words = folding.fold(site)
    except Blocked as blocked:
        return Converted(words=f"; scale and shift kept ({blocked.detail})")
    bias = site.tensors.get("bias")
    gone = bias is None or folding.is_zero(bias.name)
    if words.startswith(NOTHING):
        return Converted(without_shift=gone)
    return Converted(without_shift=gone, folded=True, words=f"; {words}")


def plan_centring(conversion: Conversion, answered: Iterable[tuple[GraphSite, bool]]) -> Plan:
    """The plan of a conversion that keeps every class: weights only, for the unchanged model.

    Args:
        conversion: what :func:`convert` did with ``keep_class``.
        answered: each layer norm, and whether it was chosen.
    """
    plan = Plan("to_rmsnorm", fingerprint(conversion.surgery.model))
    for site, chosen in answered:
        blocked = conversion.refused.get(site.site.name)
        if not chosen:
            blocked = Blocked("where", "not selected by where=")
        elif site.path is None:
            blocked = Blocked("functional", "it is a call without a module")
        if blocked is not None:
            row = kept_outcome(site, blocked)
        else:
            action = f"class kept, input centred{conversion.done[site.site.name].words}"
            row = SiteOutcome(site.site.name, site.kind, action, "exact", names=site.site.names)
        plan.sites.append(row)
    conversion.finish(plan)
    return plan
