"""Convert where the norms of a residual stack stand, as a plan on the model's own class.

Sublayers ``k = 0 … K-1`` with branches ``f_k``:

    post          ``x_0 = N_0(E)``, ``x_{k+1} = N_{k+1}(x_k + f_k(x_k))``
    pre           ``u_0 = E``, ``u_{k+1} = u_k + f_k(P_k(u_k))``, output ``P_K(u_K)``

*Post to pre* rotates the norms, ``P_k ← N_k``: each norm moves past the fork behind it. Onto branch
and skip (``skip="normalised"``) it is the same function written the other way round; onto the
branch alone (``"clean"``) it is the true pre-norm and another function.

*Pre to post* with ``n`` the norm without scale and shift and ``s_k`` the size of ``u_k``: the unit
stream ``z_{k+1} = n(z_k + f_k(P_k(u_k)) / s_k)`` is ``n(u_{k+1})``. With ``s_k`` carried along per
token, eps included, that is exact; with one constant a sublayer it is not (``"calibrated"``).
``"none"`` rotates back, ``N_{k+1} ← P_{k+1}`` and the skip reads ``P_k(u_k)``: the inverse of the
rotation of a post-norm model, another function for a trained pre-norm one.

*Sandwich* adds a norm behind each branch, ``u + Q_k(f_k(P_k(u)))``. *DeepNorm* is
``n(a_k z_k + f_k)``, the calibrated post-norm with ``a_k = s_k``; of a post-norm stack it is
``N(a x + a f(x))`` with ``a² eps``, the same function, ``a`` by depth (Wang et al. 2022).
*ResiDual* adds ``N_d(E + Σ f_k)`` to a post-norm stack; with ``N_d`` zero it is the same function.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx, nn

from normswap.boundaries import (
    Entry,
    Exit,
    entries,
    exit_of,
    identities,
    is_read_as_it_is,
    skips_as_it_is,
    value_readers,
)
from normswap.find import GraphSite
from normswap.maps import Blocked
from normswap.plan import MappingRow, ModuleEdit, Plan, SiteOutcome, fingerprint
from normswap.program import Edit
from normswap.residual_graph import Chain, Residual
from normswap.rewrites.branch_scales import BranchScales
from normswap.rewrites.sites import kept_outcome
from normswap.spec import NormSpec
from normswap.stream_edits import INPUT_NORM, OUTPUT_NORM, SECOND_NORM, free_name
from normswap.stream_hooks import hooked_child
from normswap.structure import Reading, Stack, Sublayer, deepnorm_scale, form_of_stack

TARGETS = ("pre", "post", "sandwich", "deepnorm", "residual-dual")
SKIPS = ("clean", "normalised")
SCALES = ("carried", "calibrated", "none")

Constants = Mapping[str, float]
"""By name of a norm on a branch: the size of what it gets; by name of a module: of its result."""


@dataclass(frozen=True)
class Wish:
    """How placement is to be converted: see :func:`normswap.placement.convert_placement`."""

    to: str
    skip: str = "clean"
    scale: str = "carried"

    @property
    def is_rotation(self) -> bool:
        """Whether norms change places and nothing else happens."""
        clean = self.to == "pre" and self.skip == "clean"
        return clean or (self.to == "post" and self.scale == "none")


@dataclass
class Placed:
    """A plan, with the structure that it makes."""

    plan: Plan
    stacks: list[Stack] = field(default_factory=list[Stack])


def plan_placement(
    model: nn.Module,
    reading: Reading,
    wish: Wish,
    constants: Constants | None = None,
    factors: Constants | None = None,
) -> Placed:
    """Plan the conversion of each stack; one that cannot be converted is refused as a whole.

    Args:
        model: the model; it is not changed.
        reading: its structure.
        wish: what to convert to.
        constants: measured sizes, where calibrated ones are asked for.
        factors: for the clean skip: by norm on the stream, what the branch that reads it is
            multiplied by.
    """
    placed = Placed(Plan("convert_placement", fingerprint(model)))
    scales = BranchScales(model, reading.capture.tensors, factors) if factors is not None else None
    answered: set[str] = set()
    taken: dict[str, set[str]] = {}
    for chain, stack in zip(reading.chains, reading.structure.stacks, strict=True):
        part = _Conversion(model, reading, chain, stack, wish, constants, taken, scales)
        mark = scales.mark() if scales is not None else None
        try:
            after = part.convert()
        except Blocked as blocked:
            if scales is not None and mark is not None:
                scales.rollback(mark)
            part = _Conversion(model, reading, chain, stack, wish, constants, taken)
            part.refuse(blocked)
            after = stack
        part.add_to(placed.plan, answered)
        placed.stacks.append(after)
    if scales is not None:
        placed.plan.edits[:0] = scales.edits
        placed.plan.mapping += scales.rows()
        placed.plan.aliases.update(scales.aliases)
        placed.plan.notes += scales.notes
        if scales.constants:
            placed.plan.notes.append(
                "branches are multiplied by measured constants, as the clean skip keeps another "
                "size of the stream than they were trained beside"
            )
    for site in reading.sites:
        if site.site.name not in answered:
            why = Blocked("not-residual", "it stands on no residual stream, or inside a branch")
            placed.plan.sites.append(kept_outcome(site, why))
    return placed


class _Conversion:
    """The conversion of one stack."""

    def __init__(
        self,
        model: nn.Module,
        reading: Reading,
        chain: Chain,
        stack: Stack,
        wish: Wish,
        constants: Constants | None,
        taken: dict[str, set[str]],
        scales: BranchScales | None = None,
    ) -> None:
        self.taken = taken  # by module, the names of the children that it is to get
        self.model, self.reading, self.chain, self.stack = model, reading, chain, stack
        self.wish, self.constants, self.scales = wish, constants, scales
        self.edits: list[Edit] = []
        self.module_edits: list[ModuleEdit] = []
        self.outcomes: dict[str, SiteOutcome] = {}
        self.mapping: list[MappingRow] = []
        self.removed: list[str] = []
        self.created: dict[str, dict[str, object]] = {}
        self.aliases: dict[str, list[str]] = {}
        self.notes: list[str] = []

    # -- the answer -----------------------------------------------------------------------------

    def convert(self) -> Stack:
        """Convert the stack; the structure that it has then.

        Raises:
            Blocked: it cannot be converted.
        """
        form, to = self.stack.form, self.wish.to
        if to == "post" and form in ("post", "pre") and self._return_norms():
            return replace(self.stack, form="post")
        if form == to:
            raise Blocked("already", f"{self._where()} is {to}-norm already")
        way = {
            ("post", "pre"): self._rotate,
            ("post", "sandwich"): self._rotate_and_close,
            ("pre", "sandwich"): self._close_branches,
            ("pre", "post"): self._unit_stream,
            ("sandwich", "post"): self._unit_stream,
            ("parallel", "post"): self._unit_stream,
            ("pre", "deepnorm"): self._unit_stream,
            ("parallel", "deepnorm"): self._unit_stream,
            ("post", "deepnorm"): self._deepen,
            ("post", "residual-dual"): self._second_stream,
        }.get((form, to))
        if way is None:
            raise Blocked(
                "form", f"{self._where()} is {form}: {_NO_WAY.get((form, to), _NO_TARGET)}"
            )
        return way()

    def refuse(self, blocked: Blocked) -> None:
        """Leave every norm of the stack, with the reason."""
        for site in self._norms():
            self.outcomes[site.site.name] = kept_outcome(site, blocked)

    def add_to(self, plan: Plan, answered: set[str]) -> None:
        """Add what was decided to the plan of the whole model."""
        for site in self._norms():
            name = site.site.name
            if name not in self.outcomes:
                self._answer(site, "kept in its place", self._status())
        plan.edits += self.edits
        plan.module_edits += self.module_edits
        plan.sites += [o for name, o in self.outcomes.items() if name not in answered]
        known = {row.target for row in plan.mapping}  # of a norm that ends several stacks
        plan.mapping += [row for row in self.mapping if row.target not in known]
        plan.removed += self.removed
        plan.created.update(self.created)
        plan.aliases.update(self.aliases)
        plan.notes += self.notes
        answered.update(self.outcomes)

    def _norms(self) -> list[GraphSite]:
        chain = self.chain
        norms = [*chain.embedding_norms]
        for residual in chain.residuals:
            for branch in residual.branches:
                norms += [*branch.input_norms, *branch.output_norms]
            norms += residual.stream_norms
        return list(dict.fromkeys([*norms, *chain.final_norms]))

    def _where(self) -> str:
        return f"the stack in {self.stack.name or 'the model'!r}"

    def _free_name(self, path: str, name: str) -> str:
        """A name for a new child of a module, which no other stack gives it either."""
        taken = self.taken.setdefault(path, set())
        child = free_name(self.model.get_submodule(path), name, taken)
        taken.add(child)
        return child

    def _keeps_function(self) -> bool:
        """Whether norms move in front of the fork, onto branch and skip."""
        return self.wish.to == "pre" and self.wish.skip == "normalised"

    def _status(self) -> str:
        carried = self.wish.to == "post" and self.wish.scale == "carried"
        deepened = self.wish.to == "deepnorm" and self.stack.form == "post"
        exact = self._keeps_function() or carried or deepened or self.wish.to == "residual-dual"
        return "exact" if exact else "approximate"

    def _answer(self, site: GraphSite, action: str, status: str | None = None) -> None:
        status = status or self._status()
        self.outcomes[site.site.name] = SiteOutcome(
            site.site.name, site.kind, action, status, names=site.site.names
        )
        if not any(name.startswith(f"{site.site.name}.") for name in self.removed):
            known = {row.target for row in self.mapping}
            for name in _tensor_names(site):
                if name not in known:
                    self.mapping.append(MappingRow(name, (name,), "copy", "exact"))

    # -- post to pre ----------------------------------------------------------------------------

    def _rotate(self) -> Stack:
        """Each norm past the fork behind it."""
        if self.scales is not None:
            count = len(self.chain.residuals)
            self.scales.scale(self.chain, [self._in_front(k) for k in range(count)])
        sublayers = list(self.stack.sublayers)
        for index, residual in enumerate(self.chain.residuals):
            norm = self._in_front(index)
            if norm is None:
                if not self._keeps_function():
                    self.notes.append(
                        f"{self._where()} has no norm on its embeddings: the first sublayer reads "
                        "the stream as it is"
                    )
                sublayers[index] = replace(sublayers[index], form="none", stream_norms=())
                continue
            name = self._move(norm, residual)
            sublayers[index] = replace(
                sublayers[index], form="pre", input_norms=(name,), stream_norms=()
            )
        last = [n.site.name for n in self.chain.residuals[-1].stream_norms]
        for site in self.chain.residuals[-1].stream_norms:
            self._answer(site, "kept as the final norm")
        if self.chain.final_norms:
            self.notes.append(
                f"{self._where()} has two norms at its end now: the last sublayer's, and the "
                "final norm that was there before"
            )
        if self._keeps_function():
            return self.stack
        final = (*last, *self.stack.final_norms)
        before = self.stack.embedding_norms
        kept = before[:-1] if self._in_front(0) else before
        return Stack(self.stack.name, form_of_stack(sublayers), tuple(sublayers), kept, final)

    def _in_front(self, index: int) -> GraphSite | None:
        """The norm that makes what sublayer ``index`` reads."""
        before = self.chain.residuals[index - 1].stream_norms if index else self._embedding_norm()
        if not before and index == 0:
            return None
        if len(before) != 1:
            raise Blocked("form", f"sublayer {index} has {len(before)} norms in front of its fork")
        norm, residual = before[0], self.chain.residuals[index]
        _require_one_evaluation(norm)
        if not is_read_as_it_is(residual.fork, norm.instances[0].y):
            raise Blocked("op", f"what {norm.site.name!r} returns is rearranged before it is read")
        return norm

    def _embedding_norm(self) -> list[GraphSite]:
        norms, fork = self.chain.embedding_norms[-1:], self.chain.residuals[0].fork
        good = norms and norms[0].instances and is_read_as_it_is(fork, norms[0].instances[0].y)
        return norms if good else []

    def _move(self, norm: GraphSite, residual: Residual) -> str:
        """Move a norm onto what reads the fork: the branch, or everything; its new name."""
        assert norm.path is not None
        value = norm.instances[0].y
        inside = {n for branch in residual.branches for n in branch.inside}
        if self._keeps_function():
            try:
                where = entries(self.reading.capture, value, set(self.reading.capture.graph.nodes))
            except Blocked:
                where = []
            if len(where) != 1:
                self._answer(norm, "kept in front of the fork of the next sublayer")
                return norm.site.name
        else:
            where = entries(self.reading.capture, residual.fork, inside)
            self._note_other_readers(norm, residual, inside)
        return self._moved(norm, where)

    def _note_other_readers(
        self, norm: GraphSite, residual: Residual, inside: set[fx.Node]
    ) -> None:
        allowed = inside | set(residual.sums)
        others = [reader for reader in value_readers(norm.instances[0].y) if reader not in allowed]
        if others:
            self.notes.append(
                f"what {norm.site.name!r} returned is read outside of the next sublayer too, or "
                "is an output of the model: there it is the stream without a norm now"
            )

    def _moved(self, norm: GraphSite, where: Sequence[Entry]) -> str:
        to: list[list[object]] = []
        for entry in where:
            child = self._free_name(entry.module, INPUT_NORM)
            to.append([entry.module, child, list(entry.arguments)])
        names = [_joined(str(path), str(child)) for path, child, _ in to]
        edit = ModuleEdit("move_norm", str(norm.path), {"names": list(norm.site.names), "to": to})
        self.module_edits.append(edit)
        self._rename(norm, names)
        modules = ", ".join(repr(entry.module) for entry in where)
        self._answer(norm, f"moved onto the input of {modules}")
        return names[0]

    def _rename(self, norm: GraphSite, names: Sequence[str]) -> None:
        """The tensors of a norm under its new names."""
        assert norm.site.module is not None
        for leaf, tensor in norm.site.module.state_dict().items():
            old, (new, *others) = f"{norm.site.name}.{leaf}", [f"{n}.{leaf}" for n in names]
            shape = list(tensor.shape)
            self.edits.append(Edit(new, "reshape", (old,), {"shape": shape}))
            self.removed += [f"{name}.{leaf}" for name in norm.site.names]
            for name in (new, *others):
                self.created[name] = {"shape": shape, "like": old}
            if others:
                self.aliases[new] = [new, *others]
            self.mapping.append(MappingRow(new, (old,), "rotate", "exact"))

    # -- back onto the stream -------------------------------------------------------------------

    def _return_norms(self) -> bool:
        """Put norms that stand on arguments of modules back where an identity stands for them."""
        if self.stack.form == "pre" and self.wish.scale != "none":
            return False
        norms = [n for n in self._norms() if n not in self.chain.final_norms]
        found = [(norm, self._slot(norm)) for norm in norms]
        free = [(norm, slot) for norm, slot in found if slot is not None]
        if not free or (self.stack.form == "pre" and len(free) < len(norms)):
            return False
        for norm, slot in free:
            self._return_norm(norm, slot)
        return True

    def _slot(self, norm: GraphSite) -> str | None:
        """The identity in whose place a moved norm stood."""
        if norm.path is None or len(norm.instances) < 1:
            return None
        hooked = [_hooked(self.model, name) for name in norm.site.names]
        value = norm.instances[0].x
        return next(identities(self.reading.capture, value), None) if all(hooked) else None

    def _return_norm(self, norm: GraphSite, slot: str) -> None:
        places = [list(name.rpartition(".")[::2]) for name in norm.site.names]
        names = self.reading.capture.module_names[slot]
        params = {"from": places, "names": list(names)}
        self.module_edits.append(ModuleEdit("return_norm", str(norm.path), params))
        self._rename(norm, names)
        self._answer(norm, f"moved back onto the stream as {slot!r}")

    # -- norms behind the branches --------------------------------------------------------------

    def _rotate_and_close(self) -> Stack:
        closed = self._close_branches()  # while the norms are where they were
        after = self._rotate()
        forms = {"pre": "sandwich", "none": "branch-output"}
        sublayers = [
            replace(s, form=forms[s.form], output_norms=c.output_norms)
            for s, c in zip(after.sublayers, closed.sublayers, strict=True)
        ]
        return replace(after, form=form_of_stack(sublayers), sublayers=tuple(sublayers))

    def _close_branches(self) -> Stack:
        """A new norm behind each branch."""
        sublayers: list[Sublayer] = []
        for residual, sublayer in zip(self.chain.residuals, self.stack.sublayers, strict=True):
            like = next(iter([*residual.branches[0].input_norms, *residual.stream_norms]), None)
            if like is None or like.path is None:
                raise Blocked("form", f"{sublayer.name!r} has no norm to build another one like")
            name = self._add_norm(like, residual)
            sublayers.append(replace(sublayer, form="sandwich", output_norms=(name,)))
        return replace(self.stack, form="sandwich", sublayers=tuple(sublayers))

    def _add_norm(self, like: GraphSite, residual: Residual) -> str:
        where = exit_of(self.reading.capture, residual, residual.branches[0])
        child = self._free_name(where.module, OUTPUT_NORM)
        name = _joined(where.module, child)
        params = {"like": like.path, "child": child}
        self.module_edits.append(ModuleEdit("add_norm", where.module, params))
        size = (self.constants or {}).get(where.module)
        self._new_tensors(like, name, 1.0 if size is None else size, calibrated=size is not None)
        return name

    def _new_tensors(
        self, like: GraphSite, name: str, scale: float, *, calibrated: bool = False
    ) -> None:
        """A scale of one number and a shift of zero for a new norm."""
        assert like.site.module is not None
        assert like.site.spec is not None
        spec = like.site.spec
        values = {spec.weight: scale - float(spec.unit_offset), spec.bias: 0.0}
        for leaf, tensor in like.site.module.state_dict().items():
            target, old, shape = f"{name}.{leaf}", f"{like.site.name}.{leaf}", list(tensor.shape)
            self.created[target] = {"shape": shape, "like": old}
            if leaf not in values:
                self.edits.append(Edit(target, "reshape", (old,), {"shape": shape}))
                self.mapping.append(MappingRow(target, (old,), "copy", "exact"))
                continue
            params = {"value": values[leaf], "shape": shape}
            self.edits.append(Edit(target, "constant", (), params))
            op = "calibrated" if calibrated and leaf == spec.weight else "new"
            self.mapping.append(MappingRow(target, (), op, "initialised", values[leaf]))

    # -- pre to post ----------------------------------------------------------------------------

    def _unit_stream(self) -> Stack:
        """A stream that is normed after each sum."""
        to, last = self.wish.to, self.chain.residuals[-1]
        if not self.chain.final_norms:
            raise Blocked(
                "no-final-norm", f"{self._where()} hands its stream on without a final norm"
            )
        for index, residual in enumerate(self.chain.residuals):
            self._require_closed(index, residual)
        final = self.chain.final_norms[:1]
        _require_one_evaluation(final[0])
        self._require_readers(last.output, {i.y for n in final for i in n.instances}, "the last")
        mode = "deep" if to == "deepnorm" else {"none": "rotated"}.get(self.wish.scale, "unit")
        rows = [self._unit_sublayer(i, r, mode) for i, r in enumerate(self.chain.residuals)]
        if mode != "rotated":
            self._require_mean()
        params = {"mode": mode, "sublayers": rows, "final": [n.path for n in final]}
        self.module_edits.append(ModuleEdit("unit_stream", self.stack.name, params))
        words = {
            "unit": "which reads its result without scale and shift",
            "rotated": "which reads its result",
            "deep": "which reads its result without scale and shift, times a constant",
        }[mode]
        for site in self._norms():
            if site not in self.chain.final_norms and site not in _output_norms(self.chain):
                self._answer(site, f"kept for branch and skip, {words}")
        return self._post_structure()

    def _post_structure(self) -> Stack:
        """Each norm in front of a branch stands behind the sum before it."""
        form = self.wish.to if self.wish.to == "deepnorm" else "post"
        rows = list(self.stack.sublayers)
        behind = [*(s.input_norms for s in rows[1:]), self.stack.final_norms[:1]]
        sublayers = [
            replace(s, form=form, input_norms=(), stream_norms=norms)
            for s, norms in zip(rows, behind, strict=True)
        ]
        embedding = (*self.stack.embedding_norms, *rows[0].input_norms)
        return Stack(self.stack.name, form, tuple(sublayers), embedding, self.stack.final_norms[1:])

    def _require_closed(self, index: int, residual: Residual) -> None:
        """Nothing but branch and skip may read a stream that changes."""
        self._require_plain_skip(index, residual)
        if any(len(b.input_norms) != 1 or b.reads_fork for b in residual.branches):
            raise Blocked(
                "raw-reader", f"a branch of sublayer {index} reads the stream without norm"
            )
        if not skips_as_it_is(residual):
            raise Blocked("op", f"the skip of sublayer {index} is rearranged, scaled or masked")
        if index == 0:
            return
        before = self.chain.residuals[index - 1].output
        if not is_read_as_it_is(residual.fork, before):
            raise Blocked("op", f"the stream is rearranged or masked in front of sublayer {index}")
        inside = {n for branch in residual.branches for n in branch.inside}
        self._require_readers(before, inside | set(residual.sums), f"sublayer {index}")

    def _require_plain_skip(self, index: int, residual: Residual) -> None:
        """What a branch adds for the skip must not be scaled or masked on the skip's way."""
        inside = {n for branch in residual.branches for n in (*branch.inside, *branch.joins)}
        first = residual.sums[0]
        skips = [a for a in first.args[:2] if isinstance(a, fx.Node) and a not in inside]
        plain = all(is_read_as_it_is(skip, residual.fork) for skip in skips)
        if residual.skip_scale != 1.0 or not plain:
            raise Blocked("form", f"the skip of sublayer {index} is scaled or rearranged")

    def _require_mean(self) -> None:
        """A stream whose mean a norm removed must not meet a norm that reads the mean."""
        branches = [b for residual in self.chain.residuals for b in residual.branches]
        removed: GraphSite | None = None
        for norm in [n for b in branches for n in b.input_norms] + self.chain.final_norms[:1]:
            _require_one_evaluation(norm)
            if _spec(norm).centred:
                removed = norm
            elif removed is not None:
                raise Blocked(
                    "form",
                    f"{norm.site.name!r} reads the mean of the stream, which "
                    f"{removed.site.name!r} removes",
                )

    def _require_readers(self, value: fx.Node, allowed: set[fx.Node], where: str) -> None:
        for reader in value_readers(value):
            if reader not in allowed:
                raise Blocked(
                    "raw-reader",
                    f"the stream in front of {where} is read elsewhere too, or leaves the model",
                )

    def _unit_sublayer(self, index: int, residual: Residual, mode: str) -> dict[str, object]:
        norms = list(dict.fromkeys(n for b in residual.branches for n in b.input_norms))
        norms.sort(key=lambda n: list(self.reading.capture.graph.nodes).index(n.instances[0].y))
        for norm in norms:
            self._require_unit(norm, residual)
        if mode == "rotated" and len(norms) > 1:
            raise Blocked("form", f"sublayer {index} has several norms on its branches")
        specs = {_normaliser(_spec(norm)) for norm in norms}
        if len(specs) > 1:
            raise Blocked("form", f"the norms of sublayer {index} divide by different sizes")
        spec = _spec(norms[0])
        exits: list[Exit] = [exit_of(self.reading.capture, residual, b) for b in residual.branches]
        row: dict[str, object] = {
            "norms": [norm.path for norm in norms],
            "exits": [[e.module, e.factor] for e in exits],
            "axes": list(spec.axes),
            "eps": spec.eps,
            "centred": spec.centred,
        }
        if mode == "deep" or self.wish.scale == "calibrated":
            row["constant"] = size = (self.constants or {}).get(norms[0].site.name, math.nan)
            for e in exits:
                self.mapping.append(
                    MappingRow(f"{e.module} (result)", (), "calibrated", "approximate", size)
                )
        return row

    def _require_unit(self, norm: GraphSite, residual: Residual) -> None:
        _require_one_evaluation(norm)
        spec = _spec(norm)
        known = spec.kind in ("layer", "rms")
        good = (
            known and spec.eps_place == "inside" and spec.partial is None and not spec.machine_eps
        )
        if not good or any(axis >= 0 for axis in spec.axes):
            raise Blocked("op", f"{norm.site.name!r} is no plain norm over the last axes")
        if not is_read_as_it_is(norm.instances[0].x, residual.fork):
            raise Blocked("op", f"{norm.site.name!r} reads the stream rearranged")

    # -- post to DeepNorm -----------------------------------------------------------------------

    def _deepen(self) -> Stack:
        """Skip and branch times a constant by depth, and eps times its square."""
        alpha = deepnorm_scale(self.reading.structure, self.stack).alpha
        rows: list[dict[str, object]] = []
        sublayers = list(self.stack.sublayers)
        for index, residual in enumerate(self.chain.residuals):
            before = self._in_front(index)
            if before is None:
                self.notes.append(
                    f"{self._where()} has no norm on its embeddings, where the first skip could "
                    "be scaled: its first sublayer stays as it is"
                )
                rows.append({"norms": [], "exits": []})
                continue
            self._require_plain_skip(index, residual)
            where = [exit_of(self.reading.capture, residual, b) for b in residual.branches]
            exits = [[e.module, e.factor] for e in where]
            rows.append({"norms": [before.path], "exits": exits, "constant": alpha})
            for e in where:
                row = MappingRow(f"{e.module} (result)", (), "scale", "exact", alpha)
                self.mapping.append(row)
            for norm in residual.stream_norms:
                self._scale_eps(norm, alpha)
            sublayers[index] = replace(sublayers[index], form="deepnorm", skip_scale=alpha)
        params = {"mode": "deepened", "sublayers": rows, "final": []}
        self.module_edits.append(ModuleEdit("unit_stream", self.stack.name, params))
        form = "deepnorm" if len({s.form for s in sublayers}) == 1 else "mixed"
        return replace(self.stack, form=form, sublayers=tuple(sublayers))

    def _scale_eps(self, norm: GraphSite, alpha: float) -> None:
        _require_one_evaluation(norm)
        eps, module = _spec(norm).eps, norm.site.module
        held = [n for n, v in vars(module).items() if isinstance(v, float) and v == eps]
        if len(held) != 1:
            raise Blocked("op", f"{norm.site.name!r} has no attribute that holds its eps")
        params = {"attribute": held[0], "value": eps * alpha**2}
        self.module_edits.append(ModuleEdit("set_eps", str(norm.path), params))

    # -- ResiDual -------------------------------------------------------------------------------

    def _second_stream(self) -> Stack:
        norms: list[GraphSite] = []
        for index, residual in enumerate(self.chain.residuals):
            if len(residual.stream_norms) != 1:
                raise Blocked("form", f"sublayer {index} has no norm behind its sum")
            _require_one_evaluation(residual.stream_norms[0])
            if norms:
                _require_next(norms[-1], residual, residual.stream_norms[0])
            norms += residual.stream_norms
        last = norms[-1]
        assert last.path is not None
        if _spec(last).weight is None:
            raise Blocked("op", f"{last.site.name!r} has no scale that could be zero in a copy")
        child = self._free_name(last.path, SECOND_NORM)
        params = {"norms": [norm.path for norm in norms], "child": child}
        self.module_edits.append(ModuleEdit("second_stream", self.stack.name, params))
        self._new_tensors(last, _joined(last.path, child), 0.0)
        for norm in norms:
            self._answer(norm, "kept, with a second stream beside it")
        return replace(self.stack, form="residual-dual")


_NO_TARGET = "there is no conversion from it to what is asked for"
_NO_WAY = {
    ("branch-output", "pre"): "its branches read the stream without a norm, so its size matters",
    ("branch-output", "post"): "its branches read the stream without a norm, so its size matters",
    ("parallel", "pre"): "its branches read the stream through norms, which is pre-norm already",
    ("pre", "residual-dual"): "convert it to post-norm first",
    ("mixed", "pre"): "its sublayers differ in form",
    ("mixed", "post"): "its sublayers differ in form",
}


def _require_one_evaluation(norm: GraphSite) -> None:
    if norm.blocked is not None:
        raise norm.blocked
    if norm.path is None:
        raise Blocked("functional", f"{norm.site.name!r} is no module that could be moved")
    if len(norm.instances) != 1:
        raise Blocked("shared", f"{norm.site.name!r} is called more than once")


def _require_next(before: GraphSite, residual: Residual, behind: GraphSite) -> None:
    """The stream between the norms of two sublayers must be one value in one shape."""
    x, y = before.instances[0].y, behind.instances[0].x
    same_shape = x.meta["shape"] == y.meta["shape"]
    if not same_shape or not is_read_as_it_is(residual.fork, x):
        raise Blocked("op", f"what {before.site.name!r} returns is rearranged before it is read")


def _spec(norm: GraphSite) -> NormSpec:
    assert norm.site.spec is not None
    return norm.site.spec


def _normaliser(spec: NormSpec) -> tuple[object, ...]:
    return spec.kind, spec.axes, spec.eps


def _output_norms(chain: Chain) -> list[GraphSite]:
    return [n for r in chain.residuals for b in r.branches for n in b.output_norms]


def _tensor_names(site: GraphSite) -> list[str]:
    if site.site.module is None:
        return [tensor.name for tensor in site.tensors.values()]
    return [f"{site.site.name}.{leaf}" for leaf in site.site.module.state_dict()]


def _hooked(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    return hooked_child(model.get_submodule(path), leaf) is not None


def _joined(path: str, child: str) -> str:
    return f"{path}.{child}" if path else child
