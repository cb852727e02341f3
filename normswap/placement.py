"""The public functions on where norms stand in a residual stack: read it, and convert it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from normswap.api import Example, carry_out, ready
from normswap.boundaries import exit_of
from normswap.calibration import Step, fit_branch_factors, fit_identity, measure_sizes
from normswap.copying import copy_model
from normswap.drift import branch_drift
from normswap.errors import NormswapError, RefusedError
from normswap.find import find_modules
from normswap.forms import unwrap
from normswap.inputs import Inputs, resolve_inputs
from normswap.maps import Blocked
from normswap.placement_report import Placement
from normswap.plan import Plan, SiteOutcome, fingerprint
from normswap.reinitialise import INITIALISATIONS, reinitialise
from normswap.report import Report
from normswap.residual_graph import Chain
from normswap.rewrites.native_placement import NativeResult, native_placement
from normswap.rewrites.placement import SCALES, SKIPS, TARGETS, Wish
from normswap.rewrites.placement import plan_placement as _plan_placement
from normswap.structure import Reading, ResidualStructure, Stack, read_structure
from normswap.verification import verify as compare

__all__ = ["convert_placement", "plan_placement", "residual_structure"]


def residual_structure(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> ResidualStructure:
    """The sublayers of a transformer in order, and where their norms stand, read off the dataflow.

    Args:
        model: the model.
        example_inputs: a tensor, a tuple (positional) or a mapping (keywords); ``None``: built
            from what the model says of itself.
        example_kwargs: keywords in addition.

    Raises:
        CaptureError: the model cannot be run on the inputs.
        RefusedError: a form of model that is not supported.
    """
    model, inputs = ready(model, example_inputs, example_kwargs, None)
    return read_structure(model, inputs).structure


def plan_placement(
    model: nn.Module,
    to: str,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    skip: str = "clean",
    scale: str | None = None,
    calibration: Iterable[Example] | None = None,
) -> Plan:
    """What :func:`convert_placement` would do to a model that keeps its class, without doing it.

    Raises:
        CaptureError: the model cannot be run on the inputs.
        NormswapError: a target or an option that is not known.
        RefusedError: no stack of the model can be converted.
    """
    wish = _wish(to, skip, scale, calibration)
    model, inputs = ready(model, example_inputs, example_kwargs, None)
    return _decide(model, inputs, wish, _batches(model, calibration)).plan


def convert_placement(
    model: nn.Module,
    to: str,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    skip: str = "clean",
    scale: str | None = None,
    calibration: Iterable[Example] | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    native: bool = True,
    reinit: str | None = None,
    inplace: bool = False,
    verify: bool = True,
    strict: bool = False,
) -> tuple[nn.Module, Report]:
    """Move the norms of a transformer to where another residual form has them.

    The formulas, and which conversion is exact, are in :mod:`normswap.rewrites.placement`.

    Args:
        model: a transformer in eval mode.
        to: ``"pre"``, ``"post"``, ``"sandwich"``, ``"deepnorm"`` or ``"residual-dual"``.
        example_inputs: a tensor, a tuple (positional) or a mapping (keywords); ``None``: built
            from what the model says of itself.
        example_kwargs: keywords in addition.
        skip: post to pre: ``"clean"``, the skip reads the stream without a norm (not exact; with
            ``calibration`` the branches are scaled to the size that the skip keeps, see
            :mod:`normswap.rewrites.branch_scales`, which loses much less), or ``"normalised"``,
            the same function written the other way round.
        scale: pre to post: ``"carried"``, exact, with the size of the stream handed along;
            ``"calibrated"``, one measured constant a sublayer; ``"none"``, the rotation alone.
            ``None``: calibrated where there are calibration batches, else carried.
        calibration: batches, each as ``example_inputs``, on which constants are measured.
        evaluate: a metric of a model, measured before and after for the report.
        native: where transformers or torch has a class or a flag for the other placement and the
            conversion is the rotation alone (``"pre"`` with the clean skip, ``"post"`` with scale
            ``"none"``): return a plain model of that class, which loads without normswap. It is
            a new model, so not with ``inplace``.
        reinit: for an untrained model: draw the weights of its branches anew, ``"small"`` or
            ``"deepnorm"`` (:mod:`normswap.reinitialise`). Trained weights are lost.
        inplace: change ``model`` itself; a failure restores it.
        verify: run both models and compare; what is exact and differs is rolled back and raises.
        strict: a stack that cannot be converted is an error.

    Returns:
        The converted model and the report: an answer for every norm and the origin of every
        tensor.

    Raises:
        CaptureError: the model cannot be run on the inputs.
        NormswapError: a target or an option that is not known, or calibration that fails.
        RefusedError: no stack of the model can be converted, or ``strict`` and one cannot.
        VerificationError: an exact conversion changed the outputs; nothing was changed.
    """
    wish = _wish(to, skip, scale, calibration)
    inner, inputs = ready(model, example_inputs, example_kwargs, None)
    if reinit is not None:
        options = {"example_inputs": inputs, "skip": skip, "scale": scale, "native": native}
        options |= {"calibration": calibration, "evaluate": evaluate, "verify": verify}
        return _reinitialised(model, inner, to, reinit, inplace=inplace, strict=strict, **options)
    batches = _batches(inner, calibration)
    before = None if evaluate is None else float(evaluate(model))
    if native and not inplace and wish.is_rotation:
        found = _native(inner, inputs, wish, batches, check=verify)
        if found is not None:
            return _evaluated(*found, evaluate, before)
    decided = _decide(inner, inputs, wish, batches)
    original = copy_model(inner) if inplace else inner
    new, report = carry_out(
        decided.plan, model, inputs, inplace=inplace, check=verify, strict=strict
    )
    placement = decided.placement
    if verify and any(site.status == "approximate" for site in report.sites):
        pairs = _read_by_branches(placement.before, placement.after)
        drift = branch_drift(original, unwrap(new), pairs, inputs)
        placement = replace(placement, layer_drift=drift)
    return _evaluated(new, replace(report, placement=placement), evaluate, before)


def _reinitialised(
    model: nn.Module, inner: nn.Module, to: str, how: str, *, inplace: bool, **options: Any
) -> tuple[nn.Module, Report]:
    """Draw the weights anew and convert; a failure puts the old ones back."""
    if how not in INITIALISATIONS:
        known = ", ".join(INITIALISATIONS)
        raise NormswapError(f"reinit={how!r} is not known: it is one of {known}")
    target = model if inplace else copy_model(inner)
    changed = unwrap(target)
    before = {name: p.detach().clone() for name, p in changed.named_parameters()}
    try:
        reading = read_structure(changed, options["example_inputs"])
        drawn = reinitialise(changed, reading, how)
        new, report = convert_placement(target, to, inplace=inplace, **options)
    except BaseException:
        for name, parameter in changed.named_parameters():
            parameter.data.copy_(before[name])
        raise
    note = f"{len(drawn)} matrices were drawn anew ({how}); the differences are from the model then"
    return new, replace(report, notes=(note, *report.notes))


def _evaluated(
    new: nn.Module,
    report: Report,
    evaluate: Callable[[nn.Module], float] | None,
    before: float | None,
) -> tuple[nn.Module, Report]:
    """The report with the caller's metric, if there is one."""
    if evaluate is None or before is None or report.placement is None:
        return new, report
    evaluation = (before, float(evaluate(new)))
    return new, replace(report, placement=replace(report.placement, evaluation=evaluation))


def _native(
    model: nn.Module,
    inputs: Inputs,
    wish: Wish,
    batches: Sequence[Inputs] | None,
    *,
    check: bool,
) -> tuple[nn.Module, Report] | None:
    """A plain model of the class or flag with the other placement, where there is one."""
    reading = read_structure(model, inputs)
    try:
        if batches is not None and wish.to == "pre":
            result = _calibrated(model, inputs, reading, wish, batches)
        else:
            result = native_placement(model, inputs, reading, wish.to)
    except RefusedError:  # the class kept, norms can be moved all the same
        return None
    if result is None:
        return None
    after = read_structure(result.model, inputs).structure
    placement = Placement(reading.structure, after, wish.skip if wish.to == "pre" else "")
    verification = None
    if check:
        verification = compare(model, result.model, inputs, tolerance=math.inf)
        pairs = _read_by_branches(reading.structure, after)
        drift = branch_drift(model, result.model, pairs, inputs)
        placement = replace(placement, layer_drift=drift)
    name = type(result.model).__name__
    words = "rotated" if name == type(model).__name__ else f"rotated, in a {name}"
    sites = [
        SiteOutcome(s.site.name, s.kind, words, "approximate", names=s.site.names)
        for s in reading.sites
    ]
    report = Report(
        "convert_placement",
        type(model).__name__,
        tuple(sites),
        result.mapping,
        verification,
        (f"the result is a plain {name}: it loads without normswap", *result.notes),
        placement=placement,
    )
    return result.model, report


_NEUTRAL = "is new, with scale 1 and shift 0"
_FITTED = "is new, with the scale and shift that change least on the calibration batches"

_WANTING = (
    "constants of a pre-norm model's sublayers are measured: pass calibration=, a list of batches"
)


@dataclass(frozen=True)
class _Decided:
    """A plan, and what the report says of the structure."""

    plan: Plan
    placement: Placement


def _calibrated(
    model: nn.Module, inputs: Inputs, reading: Reading, wish: Wish, batches: Sequence[Inputs]
) -> NativeResult | None:
    """The native form of the model with scaled branches; norms that it forces are fitted.

    Raises:
        RefusedError: no stack can be scaled, or it has no native form.
    """
    factors = _branch_factors(model, reading, wish, batches)
    scaled = Plan("convert_placement", fingerprint(model))
    planned = _plan_placement(model, reading, wish, None, factors).plan
    weights = {row.target: row for row in planned.mapping if row.op == "calibrated"}
    scaled.edits = [e for e in planned.edits if e.target in weights or e.target.startswith("%")]
    copied = scaled.apply(model)
    result = native_placement(copied, inputs, read_structure(copied, inputs), wish.to)
    if result is None:
        return None
    fitted = _fit_new_norms(result, batches)
    rows = [
        replace(row, op="calibrated", status="approximate", constant=None)
        if row.target.rpartition(".")[0] in fitted and row.op == "new"
        else replace(row, op="calibrated", constant=weights[row.sources[0]].constant)
        if row.sources and row.sources[0] in weights
        else row
        for row in result.mapping
    ]
    notes = [note.replace(_NEUTRAL, _FITTED) for note in result.notes]
    return replace(result, mapping=tuple(rows), notes=(*notes, *planned.notes))


def _fit_new_norms(result: NativeResult, batches: Sequence[Inputs]) -> set[str]:
    """Make norms that the native form forces change what they get as little as they can."""
    names = {r.target.rpartition(".")[0] for r in result.mapping if r.op == "new"}
    known = {site.name: site.spec for site in find_modules(result.model)}
    specs = {n: spec for n in names if (spec := known.get(n)) is not None}
    fit_identity(result.model, batches, specs)
    return set(specs)


def _batches(model: nn.Module, calibration: Iterable[Example] | None) -> Sequence[Inputs] | None:
    """The calibration batches as calls of the model."""
    if calibration is None:
        return None
    return [resolve_inputs(model, batch) for batch in calibration]


def _wish(to: str, skip: str, scale: str | None, calibration: Iterable[Example] | None) -> Wish:
    """The wish, checked.

    Raises:
        NormswapError: it is not known, or lacks calibration batches.
    """
    if scale is None:
        scale = "carried" if calibration is None else "calibrated"
    for name, value, known in (
        ("to", to, TARGETS),
        ("skip", skip, SKIPS),
        ("scale", scale, SCALES),
    ):
        if value not in known:
            raise NormswapError(f"{name}={value!r} is not known: it is one of {', '.join(known)}")
    if to == "post" and scale == "calibrated" and calibration is None:
        raise NormswapError(_WANTING)
    return Wish(to, skip, scale)


def _decide(
    model: nn.Module, inputs: Inputs, wish: Wish, batches: Sequence[Inputs] | None
) -> _Decided:
    """The plan of a conversion that keeps the class.

    Raises:
        RefusedError: no stack can be converted.
    """
    reading = read_structure(model, inputs)
    constants = factors = None
    forms = {stack.form for stack in reading.structure.stacks}
    if wish.to == "deepnorm" and batches is None and forms & {"pre", "parallel"}:
        raise NormswapError(_WANTING)
    if batches is not None and wish.to == "pre" and wish.skip == "clean":
        factors = _branch_factors(model, reading, wish, batches)
    elif batches is not None:
        constants = _constants(model, reading, batches)
    placed = _plan_placement(model, reading, wish, constants, factors)
    if not placed.plan.changed:
        _refuse(reading, placed.plan, wish)
    after = ResidualStructure(tuple(placed.stacks))
    skip = wish.skip if wish.to == "pre" else ""
    shown = Placement(reading.structure, after, skip, target=wish.to)
    return _Decided(placed.plan, shown)


def _read_by_branches(
    before: ResidualStructure, after: ResidualStructure
) -> list[tuple[str, str, str]]:
    """For each sublayer and the end: a label, and the norms that make what is read there."""
    pairs: list[tuple[str, str, str]] = []
    for old, new in zip(before.stacks, after.stacks, strict=True):
        names = [f"{s.name} ({s.kind})" for s in old.sublayers] + [f"{old.name} (end)"]
        norms = zip(names, old.norms_read(), new.norms_read(), strict=True)
        pairs += [(name, a, b) for name, a, b in norms if a is not None and b is not None]
    return pairs


def _refuse(reading: Reading, plan: Plan, wish: Wish) -> None:
    if any(site.status == "exact" for site in plan.sites):
        return  # every norm stands in front of a fork already
    refused = [s for s in plan.sites if s.status == "refused" and s.reason != "not-residual"]
    if not reading.chains:
        raise RefusedError(
            "the model has no residual stack with norms: there is nothing whose placement could "
            "be converted"
        )
    why = f"{refused[0].reason}: {refused[0].detail}" if refused else "it has no norms"
    raise RefusedError(f"no stack can be converted to {wish.to}: {why}")


def _branch_factors(
    model: nn.Module, reading: Reading, wish: Wish, batches: Sequence[Inputs]
) -> dict[str, float]:
    """What each branch is multiplied by beside a clean skip, by the norm that it reads."""
    placed = _plan_placement(model, reading, wish)
    steps: list[Step] = []
    for chain, old, new in zip(
        reading.chains, reading.structure.stacks, placed.stacks, strict=True
    ):
        if old.form != new.form:
            steps += _steps(reading, chain, old, new)
    return fit_branch_factors(model, placed.plan.apply(model), batches, steps)


def _steps(reading: Reading, chain: Chain, old: Stack, new: Stack) -> list[Step]:
    """The sublayers of a stack whose norms moved; none if a branch cannot be reached."""
    specs = {site.site.name: site.site.spec for site in reading.sites}
    steps: list[Step] = []
    names = zip(chain.residuals, old.norms_read(), new.norms_read(), strict=False)
    for residual, norm, moved in names:
        spec = specs.get(norm or "")
        if norm is None or moved is None or spec is None:
            continue
        try:
            exits = [exit_of(reading.capture, residual, branch) for branch in residual.branches]
        except Blocked:
            return []
        steps.append(Step(norm, moved, tuple((e.module, e.factor) for e in exits), spec))
    return steps


def _constants(model: nn.Module, reading: Reading, batches: Sequence[Inputs]) -> dict[str, float]:
    """Sizes of what norms on branches get and of what branches return."""
    norms: dict[str, tuple[tuple[int, ...], bool]] = {}
    results: set[str] = set()
    for residual in (r for chain in reading.chains for r in chain.residuals):
        for branch in residual.branches:
            for norm in branch.input_norms:
                if norm.path is not None and norm.site.spec is not None:
                    norms[norm.path] = norm.site.spec.axes, norm.site.spec.centred
            try:
                results.add(exit_of(reading.capture, residual, branch).module)
            except Blocked:
                continue
    return measure_sizes(model, batches, norms, results)
