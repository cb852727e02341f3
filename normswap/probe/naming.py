"""The names of a fitted normaliser: its kind, and its axes from the front or from the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from normswap.probe.form import Form
from normswap.probe.normaliser import Fit
from normswap.spec import NormSpec

__all__ = ["both_ends", "named"]


def named(fit: Fit) -> Iterator[NormSpec]:
    """The descriptions of one fit; for inputs of another rank they differ."""
    varying = fit.gain.axes or fit.shift.axes
    if fit.shift.axes and fit.shift.axes != varying:
        return
    form, rank = fit.form, len(fit.shape)
    spec = NormSpec(
        "rms",
        form.axes,
        fit.eps.value,
        weight=fit.weight.name,
        bias=fit.bias.name,
        unit_offset=fit.weight.unit_offset,
        eps_place=fit.eps.place,
        machine_eps=fit.eps.machine,
        groups=form.groups if form.groups > 1 else None,
        affine_axes=varying,
        unbiased=form.unbiased,
        partial=None if form.partial is None else form.partial / fit.shape[form.axes[-1]],
    )
    if not form.centred:
        yield from both_ends(_uncentred(spec, form), rank)
        return
    for kind in _centred_kinds(form, fit.shape, varying):
        if kind == "layer":
            yield from both_ends(replace(spec, kind=kind), rank)
        elif kind == "group":
            axes = tuple(range(1, rank))
            groups = fit.shape[1] if 1 not in form.axes else form.groups
            yield replace(spec, kind=kind, axes=axes, groups=groups)
        else:
            yield replace(spec, kind=kind)


def _uncentred(spec: NormSpec, form: Form) -> NormSpec:
    power = None if form.p == 2 else form.p
    if form.sums:
        return replace(spec, kind="scale", p=power)
    if power is not None:
        return replace(spec, kind="lp", p=power)
    return replace(spec, kind="crms" if form.reduced else "rms")


def _centred_kinds(form: Form, shape: tuple[int, ...], varying: tuple[int, ...]) -> tuple[str, ...]:
    """The likeliest kind first; the others describe the same for inputs of this rank."""
    rank = len(shape)
    if form.axes[0] == 0:
        return ("batch",)
    by_channel = varying in ((), (1,))
    if form.axes == tuple(range(1, rank)):
        if by_channel and (form.groups > 1 or (varying and rank > 2)):
            return ("group", "layer")
        return ("layer", "group") if by_channel else ("layer",)
    if form.axes == tuple(range(2, rank)) and by_channel and form.groups == 1:
        return ("instance", "group") if varying or rank > 3 else ("layer", "instance", "group")
    if varying and not set(varying) & set(form.axes):
        return ("instance",)
    return ("layer",)


def both_ends(spec: NormSpec, rank: int) -> Iterator[NormSpec]:
    """With the axes counted from the end, if they are the last ones; then as they are."""
    axes = tuple(sorted({*spec.axes, *spec.affine_axes}))
    over_space = bool(spec.axes and spec.affine_axes) and set(spec.axes).isdisjoint(
        spec.affine_axes
    )
    if axes == tuple(range(rank - len(axes), rank)) and not over_space:
        from_end = tuple(a - rank for a in spec.axes)
        yield replace(spec, axes=from_end, affine_axes=tuple(a - rank for a in spec.affine_axes))
    yield spec
