"""Fold the scale and shift of a norm into the layers that read it.

A norm computes ``y = g * n(x) + b`` with its normaliser ``n``. Whatever reads ``y`` may read
``n(x)`` if it makes up for the difference. For a linear layer ``W y + c`` that is

    c' = c + W b  (with the old W),    W' = W diag(g),

and the norm keeps a scale of 1 and a shift of 0. Both are pushed with the flow through everything
between the norm and its readers, the shift first; *every* reader must take them. Where the shift
finds no bias to go into, the scale may go alone: the norm keeps ``b / g`` then, and a channel whose
``g`` is 0 keeps its own ``g`` and ``b``.

Source: Ashkboos et al. 2024, *SliceGPT*, section 3 (for linear readers).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from normswap.channelmap import Pushed, node_of, owners_in_words, push, require_one_path
from normswap.dataflow import affine_axes
from normswap.find import GraphSite
from normswap.maps import Blocked, Map, Scale, Shift
from normswap.plan import Plan, SiteOutcome, fingerprint
from normswap.program import Ref, Vector
from normswap.rewrites.sites import kept_outcome, require_own_tensors
from normswap.surgery import Surgery

NOTHING = "nothing to fold"


def plan_fold_affine(
    surgery: Surgery, chosen: Callable[[Any], bool], *, scale_only: bool = False
) -> Plan:
    """Decide for every layer and RMS norm whether its scale and shift are folded.

    Args:
        surgery: the recorded model.
        chosen: which norms.
        scale_only: leave the shifts in the norms, so that no layer needs a new bias.
    """
    folding = AffineFolding(surgery, scale_only=scale_only)
    plan = Plan("fold_affine", fingerprint(surgery.model))
    for site in surgery.sites:
        plan.sites.append(folding.answer(site, selected=chosen(site.site)))
    surgery.finish(plan)
    return plan


class AffineFolding:
    """Folds one norm after the other; what is folded is not written to again."""

    def __init__(self, surgery: Surgery, *, scale_only: bool = False) -> None:
        self.surgery = surgery
        self.program = surgery.program
        self.scale_only = scale_only
        self.folded: set[fx.Node] = set()

    def answer(self, site: GraphSite, *, selected: bool = True) -> SiteOutcome:
        """Fold a norm if it can be; the row of the report."""
        try:
            if not selected:
                raise Blocked("where", "not selected by where=")
            action = self.fold(site)
        except Blocked as blocked:
            return kept_outcome(site, blocked)
        return SiteOutcome(site.site.name, site.kind, action, "exact", names=site.site.names)

    def fold(self, site: GraphSite) -> str:
        """Fold a norm; what was done, in words. On failure the program is as before.

        Raises:
            Blocked: a reader takes neither scale nor shift, or nothing but a shift was to fold.
        """
        if site.blocked is not None:
            raise site.blocked
        if not site.tensors:
            return f"{NOTHING}: it has no scale or shift"
        self._require_editable(site)
        mark = self.program.mark()
        try:
            return self._fold(site)
        except Blocked as blocked:
            self.program.rollback(mark)
            touched = {node_of(value) for value in blocked.maps}
            if touched & self.surgery.tied and not self.surgery.ties:
                blocked.detail += "; it is tied to the embedding table, untie=True separates them"
            raise

    def _fold(self, site: GraphSite) -> str:
        scale, shift = self._scale(site), self._shift(site)
        if scale is None and shift is None:
            return f"{NOTHING}: its scale is 1 and its shift 0"
        kept = self._push_shift(site, shift)
        if scale is None and kept is not None:
            raise kept
        pushes: list[Pushed] = list(self.last)
        divisor: Vector | None = None
        if scale is not None:
            if kept is not None:  # a channel with scale 0 keeps its own: only its shift is seen
                scale = scale.op("nonzero", scale.shape)
            divisor = scale
            pushes.append(self._push(site, Scale(scale, inverse=True)))
        require_one_path(self.surgery.capture, pushes)
        self._neutralise(site, divisor, keeps_shift=kept is not None)
        words = _into(pushes)
        if kept is not None and shift is not None:
            words = f"scale {words}; its shift stays"
            if not self.surgery.new_biases:
                words += " (no layer gets a new bias)"
            else:
                words += f" ({kept.detail})"
        return words

    def is_zero(self, name: str) -> bool:
        """Whether a tensor is zero by now, whatever it was."""
        return bool((self.program.value(self.program.current(name))[0] == 0).all())

    # -- the maps -----------------------------------------------------------------------------

    def _scale(self, site: GraphSite) -> Vector | None:
        """``g``, or ``None`` if it is known to be 1."""
        if "weight" not in site.tensors:
            return None
        tensor = site.tensors["weight"]
        ref = self.program.current(tensor.name)
        if site.site.spec is not None and site.site.spec.unit_offset:
            ref = self.program.emit("plus", ref, number=1.0)
        vector = Vector(self.program, ref, tensor.shape)
        return None if vector.known and bool((vector.value == 1).all()) else vector

    def _shift(self, site: GraphSite) -> Vector | None:
        """``b``, or ``None`` if it is known to be 0."""
        if "bias" not in site.tensors:
            return None
        tensor = site.tensors["bias"]
        vector = Vector.of(self.program, tensor.name, tensor.shape)
        return None if vector.known and bool((vector.value == 0).all()) else vector

    def _push_shift(self, site: GraphSite, shift: Vector | None) -> Blocked | None:
        """Push the shift; why it stays in the norm, if so."""
        self.last: list[Pushed] = []
        if shift is None:
            return None
        if self.scale_only:
            return Blocked("no-bias", "only scales are folded")
        mark = self.program.mark()
        try:
            self.last.append(self._push(site, Shift(shift, negative=True)))
            require_one_path(self.surgery.capture, self.last)
        except Blocked as blocked:
            self.program.rollback(mark)
            self.last = []
            return blocked
        return None

    def _push(self, site: GraphSite, m: Map) -> Pushed:
        starts = {node for instance in site.instances for node in instance.nodes}
        begin = [(i.y, _on_value(m, i.y)) for i in site.instances]
        fixed = {i.x for i in site.instances} | self.folded
        pushed = push(self.program, begin, starts, fixed, against=False)
        self.surgery.take(pushed, "fold")
        return pushed

    # -- the norm's own tensors -----------------------------------------------------------------

    def _require_editable(self, site: GraphSite) -> None:
        require_own_tensors(site)
        for tensor in site.tensors.values():
            if tensor.overlaps is not None:
                detail = f"{tensor.name!r} shares its memory with {tensor.overlaps!r}"
                raise Blocked("shared", detail)
            if not tensor.persistent:
                raise Blocked("op", f"{tensor.name!r} is a buffer that is not saved")

    def _neutralise(self, site: GraphSite, divisor: Vector | None, *, keeps_shift: bool) -> None:
        """Scale 1 and shift 0, or what is left of them when the shift stays."""
        weight, bias = site.tensors.get("weight"), site.tensors.get("bias")
        offset = 1.0 if site.site.spec is not None and site.site.spec.unit_offset else 0.0
        if weight is not None and divisor is not None:
            self._assign_weight(weight.name, divisor, offset, keeps_shift=keeps_shift)
        if bias is not None and not keeps_shift:
            self.program.assign(bias.name, "like", self.program.current(bias.name), value=0.0)
        elif bias is not None and divisor is not None:
            ref = self.program.emit("reshape", divisor.ref, shape=list(divisor.shape))
            self.program.assign(bias.name, "divide", self.program.current(bias.name), ref)
        for tensor in site.tensors.values():
            self.surgery.ops[tensor.name] = "neutral" if not keeps_shift else "scale"
            if tensor.node is not None:
                self.folded.add(tensor.node)

    def _assign_weight(
        self, name: str, divisor: Vector, offset: float, *, keeps_shift: bool
    ) -> None:
        current = self.program.current(name)
        if not keeps_shift:
            self.program.assign(name, "like", current, value=1.0 - offset)
            return
        scale: Ref = self.program.emit("plus", current, number=offset) if offset else current
        left = self.program.emit("divide", scale, divisor.ref)  # 1, or 0 where it was 0
        self.program.assign(name, "plus", left, number=-offset)


def _on_value(m: Map, value: fx.Node) -> Map:
    """A map on gamma's shape as a map on the axes of a value that gamma runs along."""
    shape = [1] * len(value.meta["shape"])
    if len(m.vector.shape) > 1 or m.vector.shape not in ((), (1,)):
        for axis, size in zip(affine_axes(value), m.vector.shape, strict=True):
            shape[axis] = size
    return m.reshape(*shape)


def _into(pushes: list[Pushed]) -> str:
    owners = owners_in_words(pushes)
    return f"folded into {owners}" if owners else "folded: nothing that reads it sees it"
