"""The public functions: plan, apply, verify, report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.apply import apply_with_undo, replaced_parameters, roll_back
from normswap.capture import Capture, capture
from normswap.copying import copy_model
from normswap.cost import Cost, measure
from normswap.drift import site_drift
from normswap.equivalence import EXACT
from normswap.errors import NormswapError, RefusedError, VerificationError
from normswap.find import NormSite, NormSites, Where, find_modules, matcher
from normswap.forms import refuse_unsupported, unwrap
from normswap.functional import functional_norms
from normswap.inputs import Inputs, resolve_inputs
from normswap.native_class import native_class
from normswap.optimizers import require_own_parameters, update_optimizer
from normswap.plan import Plan
from normswap.report import Report
from normswap.rewrites.fold_affine import plan_fold_affine as _plan_fold_affine
from normswap.rewrites.fold_batchnorm import plan_fold_batchnorm as _plan_fold_batchnorm
from normswap.rewrites.swap import becoming_rms
from normswap.rewrites.swap import plan_swap_norms as _plan_swap_norms
from normswap.rewrites.to_rmsnorm import convert, plan_centring
from normswap.surgery import Surgery
from normswap.targets import Key, Value, matches
from normswap.undo import remember
from normswap.verification import Verification, verify

Outputs = str | Iterable[str] | None
Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Inputs | None


def find_norms(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> NormSites:
    """Every norm of a model, recognised by what it computes, whatever its class is called.

    Without example inputs the modules are found; with them also the calls of functional norms
    and norms written out in single ops, and how often each is called.

    Raises:
        CaptureError: with inputs: the model cannot be run on them.
    """
    model = unwrap(model)
    sites = find_modules(model)
    if example_inputs is None and example_kwargs is None:
        return NormSites(sites)
    refuse_unsupported(model)
    inputs = resolve_inputs(model, example_inputs, example_kwargs)
    recorded = capture(model, inputs)
    modules = [replace(site, calls=len(recorded.calls_of(site.name))) for site in sites]
    return NormSites([*modules, *functional_norms(recorded, {site.name for site in sites})])


def ready(
    model: nn.Module,
    example_inputs: Example,
    example_kwargs: Mapping[str, Any] | None,
    outputs: Outputs,
) -> tuple[nn.Module, Inputs]:
    """The model itself, of a form that can be changed, and the call to record it on."""
    model = unwrap(model)
    refuse_unsupported(model)
    return model, resolve_inputs(model, example_inputs, example_kwargs, outputs)


def plan_fold_batchnorm(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    outputs: Outputs = None,
    where: Where = None,
) -> Plan:
    """What :func:`fold_batchnorm` would do, without doing it; works on the meta device.

    Raises:
        CaptureError: the model cannot be run on the inputs.
        RefusedError: a form of model that cannot be changed.
    """
    model, inputs = ready(model, example_inputs, example_kwargs, outputs)
    return _plan_fold_batchnorm(model, inputs, where=where)


def fold_batchnorm(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    outputs: Outputs = None,
    inplace: bool = False,
    where: Where = None,
    verify: bool = True,
    strict: bool = False,
) -> tuple[nn.Module, Report]:
    """Fold every BatchNorm in eval mode into the layers around it, exactly, or say why not.

    ``y = s * x + t`` with ``s = gamma / sqrt(var + eps)``, ``t = beta - mean * s`` goes into the
    weights and biases that write ``x``, or into those that read ``y``
    (Jacob et al. 2018, section 3.2); the norm becomes ``nn.Identity``.

    Args:
        model: a model in eval mode. ``torch.compile`` and data-parallel wrappers are looked
            through (the result is without them).
        example_inputs: a tensor, a tuple (positional) or a mapping (keywords); ``None``: built
            from what the model says of itself.
        example_kwargs: keywords in addition.
        outputs: the outputs that count, as globs such as ``"logits*"`` on their paths in the
            result; the others may change. ``None``: all count.
        inplace: change ``model`` itself; a failure restores it.
        where: which norms: a glob on names, a list of globs, or a predicate on ``NormSite``.
        verify: run both models and compare; a difference rolls back and raises.
        strict: a refused norm is an error.

    Returns:
        The changed model and the report, with one row for each BatchNorm.

    Raises:
        CaptureError: the model cannot be run on the inputs.
        RefusedError: a form of model that cannot be changed, or ``strict`` and a norm refused.
        VerificationError: the folded model computes something else; nothing was changed.
    """
    inner, inputs = ready(model, example_inputs, example_kwargs, outputs)
    plan = _plan_fold_batchnorm(inner, inputs, where=where)
    return carry_out(plan, model, inputs, inplace=inplace, check=verify, strict=strict)


def plan_swap_norms(
    model: nn.Module,
    mapping: Mapping[Key, Value],
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    outputs: Outputs = None,
    where: Where = None,
    method: str = "auto",
    fold_affine: bool = False,
    keep_class: bool = False,
    untie: bool = False,
) -> Plan:
    """What :func:`swap_norms` would do, without doing it; works on the meta device.

    Raises:
        NormswapError: a key, value or method that is not known.
        RefusedError: a form of model that cannot be changed.
    """
    model = unwrap(model)
    refuse_unsupported(model)
    inputs = None
    if example_inputs is not None or example_kwargs is not None:
        inputs = resolve_inputs(model, example_inputs, example_kwargs, outputs)
    wish = _Wish(where, method, fold_affine, keep_class, untie)
    return _plan_swap(model, mapping, inputs, wish)


def swap_norms(
    model: nn.Module,
    mapping: Mapping[Key, Value],
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    outputs: Outputs = None,
    method: str = "auto",
    fold_affine: bool = False,
    keep_class: bool = False,
    untie: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    inplace: bool = False,
    where: Where = None,
    verify: bool = True,
    strict: bool = False,
) -> tuple[nn.Module, Report]:
    """Swap norms for other norms, their trained parameters carried over as far as they can be.

    ``g * n(x) + b``: the new norm gets ``g`` and ``b`` in its own convention. Exact where both
    normalisers ``n`` are the same function (measured at each site in float64), else approximate.
    With example inputs a LayerNorm becomes an RMSNorm exactly wherever everything that writes its
    input can be made zero-mean (:mod:`normswap.rewrites.to_rmsnorm`).

    Args:
        model: the model.
        mapping: from what to what. A class of torch.nn or normswap, or a name such as ``"rms"``,
            stands for every norm that behaves so; any other class stands for itself. Values may
            also be a callable ``NormSite -> nn.Module``.
        example_inputs: to record the model, and to run old and new model and measure the
            difference of their outputs; without them each site is checked alone, and no other
            layer is edited.
        example_kwargs: keywords in addition.
        outputs: the outputs that count, as globs such as ``"logits*"`` on their paths in the
            result; the others may change. ``None``: all count.
        method: ``"auto"``: exact where it can be, else the parameters carried over; ``"exact"``:
            refuse what is not the same function; ``"copy"``: only carry the parameters over;
            ``"init"``: leave the new norms as they are built.
        fold_affine: also fold scale and shift of norms that became RMS norms exactly into the
            layers that read them; what is left is a plain ``nn.RMSNorm`` with weight 1.
        keep_class: LayerNorm to RMSNorm only: change the weights as for the swap, scales and
            shifts folded, but leave the LayerNorms in their places, so that the unchanged class
            loads the result.
        untie: where a tied output layer is in the way, separate it from the embedding table.
            Otherwise the tie stays, at the price of one op that removes a mean, or of a refusal.
        optimizer: the model's optimizer, whose groups are brought up to date (with ``inplace``).
        inplace: change ``model`` itself; a failure restores it.
        where: which norms: a glob on names, a list of globs, or a predicate on ``NormSite``.
        verify: run both models (if there are inputs) and compare.
        strict: a refused norm is an error.

    Returns:
        The changed model and the report. Where the model itself is a norm, the new one.

    Raises:
        NormswapError: a key, value or method that is not known; an optimizer without ``inplace``.
        RefusedError: a form of model that cannot be changed, or ``strict`` and a norm refused.
        VerificationError: an exact swap changed the outputs; nothing was changed.
    """
    inner = unwrap(model)
    refuse_unsupported(inner)
    if optimizer is not None and not inplace:
        raise NormswapError(
            "optimizer= goes with inplace=True: a copy has other parameters than the optimizer"
        )
    inputs = None
    if example_inputs is not None or example_kwargs is not None:
        inputs = resolve_inputs(inner, example_inputs, example_kwargs, outputs)
    plan = plan_swap_norms(
        inner,
        mapping,
        inputs,
        where=where,
        method=method,
        fold_affine=fold_affine,
        keep_class=keep_class,
        untie=untie,
    )
    if optimizer is not None:
        require_own_parameters(optimizer, inner)
    before = dict(inner.named_modules(remove_duplicate=False))
    new, report = carry_out(plan, model, inputs, inplace=inplace, check=verify, strict=strict)
    if optimizer is not None:
        update_optimizer(optimizer, replaced_parameters(plan, before, unwrap(new)))
    return new, report


@dataclass(frozen=True)
class _Wish:
    """How norms are to be swapped."""

    where: Where
    method: str
    fold_affine: bool
    keep_class: bool
    untie: bool


def _plan_swap(
    model: nn.Module, mapping: Mapping[Key, Value], inputs: Inputs | None, wish: _Wish
) -> Plan:
    """The plan of a swap; with inputs the model is recorded first."""
    if (wish.fold_affine or wish.keep_class or wish.untie) and inputs is None:
        raise NormswapError(
            "fold_affine, keep_class and untie edit other layers than the norms: pass "
            "example_inputs, so that the dataflow is known"
        )
    if inputs is None:
        return _plan_swap_norms(model, mapping, where=wish.where, method=wish.method)
    conversion, recorded = None, None
    if wish.method in ("auto", "exact") and _has_layer_norms(model, mapping):
        surgery = Surgery.on(model, inputs, new_biases=not wish.keep_class, untie=wish.untie)
        recorded, chosen = surgery.capture, matcher(wish.where)
        layers = [s for s in surgery.sites if s.kind == "layer"]
        if wish.keep_class:  # no new norm is built, so none has to fit
            able = {site.site.name for site in layers}
        else:
            calls = _observed_calls(recorded)
            able = becoming_rms(model, mapping, calls, fold_affine=wish.fold_affine)
        conversion = convert(
            surgery,
            lambda site: site.site.name in able and chosen(site.site),
            fold_affine=wish.fold_affine,
            keep_class=wish.keep_class,
        )
        if wish.keep_class:
            return plan_centring(conversion, [(s, chosen(s.site)) for s in layers])
    elif wish.keep_class:
        raise NormswapError("keep_class=True is for LayerNorms that would become RMS norms")
    recorded = recorded or capture(model, inputs)
    modules = {site.name for site in find_modules(model)}
    called = {call.path for call in recorded.calls}
    read = {tensor.owner for tensor in recorded.tensors.values() if tensor.node is not None}
    return _plan_swap_norms(
        model,
        mapping,
        where=wish.where,
        method=wish.method,
        calls=_observed_calls(recorded),
        functional=list(functional_norms(recorded, modules)),
        bypassed=(modules & read) - called,
        conversion=conversion,
    )


def _has_layer_norms(model: nn.Module, mapping: Mapping[Key, Value]) -> bool:
    """Whether the mapping asks for anything of a layer norm."""
    layers = [s for s in find_modules(model) if s.spec is not None and s.spec.kind == "layer"]
    return any(matches(key, site) for key in mapping for site in layers)


def plan_fold_affine(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    outputs: Outputs = None,
    where: Where = None,
    scale_only: bool = False,
    untie: bool = False,
) -> Plan:
    """What :func:`fold_affine` would do, without doing it; works on the meta device.

    Raises:
        CaptureError: the model cannot be run on the inputs.
        RefusedError: a form of model that cannot be changed.
    """
    model, inputs = ready(model, example_inputs, example_kwargs, outputs)
    surgery = Surgery.on(model, inputs, new_biases=not scale_only, untie=untie)
    return _plan_fold_affine(surgery, matcher(where), scale_only=scale_only)


def fold_affine(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    outputs: Outputs = None,
    scale_only: bool = False,
    untie: bool = False,
    inplace: bool = False,
    where: Where = None,
    verify: bool = True,
    strict: bool = False,
) -> tuple[nn.Module, Report]:
    """Fold scale and shift of layer and RMS norms into the layers that read them, exactly.

    For a reader ``W y + c`` of ``y = g * n(x) + b``: ``c' = c + W b`` with the old ``W``, then
    ``W' = W diag(g)``; the norm keeps a scale of 1 and a shift of 0, in its own class
    (:mod:`normswap.rewrites.fold_affine`). All readers take it, or none.

    Args:
        model: the model.
        example_inputs: a tensor, a tuple (positional) or a mapping (keywords); ``None``: built
            from what the model says of itself.
        example_kwargs: keywords in addition.
        outputs: the outputs that count, as globs such as ``"logits*"`` on their paths in the
            result; the others may change. ``None``: all count.
        scale_only: leave shifts in the norms, so that no layer gets a new bias and the unchanged
            class loads the result. Without it that is done only where a shift cannot go.
        untie: where the reader is an output layer tied to the embedding table, separate them (and
            say so in a transformers config). Otherwise that norm is refused.
        inplace: change ``model`` itself; a failure restores it.
        where: which norms: a glob on names, a list of globs, or a predicate on ``NormSite``.
        verify: run both models and compare; a difference rolls back and raises.
        strict: a refused norm is an error.

    Returns:
        The changed model and the report, with one row for each layer and RMS norm.

    Raises:
        CaptureError: the model cannot be run on the inputs.
        RefusedError: a form of model that cannot be changed, or ``strict`` and a norm refused.
        VerificationError: the changed model computes something else; nothing was changed.
    """
    inner, inputs = ready(model, example_inputs, example_kwargs, outputs)
    plan = plan_fold_affine(inner, inputs, where=where, scale_only=scale_only, untie=untie)
    return carry_out(plan, model, inputs, inplace=inplace, check=verify, strict=strict)


def _observed_calls(recorded: Capture) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the first tensor that each called module got."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for call in recorded.calls:
        if call.shape is not None and call.dtype is not None:
            found.setdefault(call.path, (call.shape, call.dtype))
    return found


def carry_out(
    plan: Plan,
    model: nn.Module,
    inputs: Inputs | None,
    *,
    inplace: bool,
    check: bool,
    strict: bool,
) -> tuple[nn.Module, Report]:
    """Apply a plan, verify, and report.

    Raises:
        RefusedError: ``strict`` and a site was refused.
        VerificationError: the changed model computes something else; nothing was changed.
    """
    inner = unwrap(model)
    _require_answers(plan, inner, strict=strict)
    root = [e for e in plan.module_edits if e.module == "" and e.kind in ("identity", "replace")]
    if inplace and root:
        raise NormswapError("the model itself is the norm: inplace=True cannot replace it")
    verifiable = check and plan.changed and not any(t.is_meta for t in inner.parameters())
    original = copy_model(inner) if inplace and verifiable else inner
    modules = dict(inner.named_modules(remove_duplicate=False))
    changed, undo = apply_with_undo(plan, inner, inplace=inplace)
    remember(plan, modules, changed)
    verification = None
    if verifiable and inputs is not None:
        try:
            verification = _verified(plan, original, changed, inputs)
        except BaseException:
            roll_back(undo)
            raise
    elif check and inputs is None:
        verification = _site_check(plan)
    if verifiable and inputs is not None and plan.rewrite == "swap_norms":
        plan = plan.with_errors(site_drift(original, changed, plan, inputs))
    if inputs is not None and inputs.outputs is not None:
        plan.notes.append(f"only these outputs were to stay as they are: {inputs.outputs}")
    report = _report(plan, inner, verification)
    if verification is not None and verification.passed and inputs is not None:
        notes = (*report.notes, *native_class(plan, changed, inputs))
        report = replace(report, cost=_cost(plan, original, changed, inputs), notes=notes)
    if verification is not None and not verification.passed:
        roll_back(undo)
        raise VerificationError(
            f"the changed model differs from the original by {verification.max_rel:.2g} relative "
            f"(allowed {verification.tolerance:.2g}, {verification.dtype}); nothing was changed. "
            "This is a fault in normswap: please report it with the model",
            report,
        )
    return (model if inplace else changed), report


def _require_answers(plan: Plan, model: nn.Module, *, strict: bool) -> None:
    asked = ("where", "not-residual")  # nothing was asked of these
    refused = [s for s in plan.sites if s.status == "refused" and s.reason not in asked]
    if strict and refused:
        first = refused[0]
        raise RefusedError(
            f"{len(refused)} of {len(plan.sites)} norms cannot be changed exactly; the first is "
            f"{first.name!r} ({first.reason}): {first.detail}",
            _report(plan, model, None),
        )


def _verified(plan: Plan, original: nn.Module, changed: nn.Module, inputs: Inputs) -> Verification:
    """Both models in their own dtype, and the same plan on float64 copies in true float64."""
    exact = copy_model(original).to(torch.float64)
    exact_changed, _ = apply_with_undo(plan, exact, inplace=False)
    approximate = any(s.status in ("approximate", "initialised") for s in plan.sites)
    return verify(
        original,
        changed,
        inputs,
        sites=plan.comparable,
        float64_pair=(exact, exact_changed),
        tolerance=math.inf if approximate else None,  # the drift is what is asked for
    )


def _cost(plan: Plan, original: nn.Module, changed: nn.Module, inputs: Inputs) -> Cost | None:
    """Of a change that is made to save something; a fold of BatchNorm has its own benchmark."""
    converts = any(e.kind == "replace" for e in plan.module_edits) and plan.edits
    return measure(original, changed, inputs) if converts or plan.rewrite != "swap_norms" else None


def _site_check(plan: Plan) -> Verification | None:
    """What was measured at each site alone, where the model itself was not run."""
    errors = {s.name: s.error for s in plan.sites if s.error is not None}
    if not errors:
        return None
    worst = max(errors.values())
    exact = all(s.status == "exact" for s in plan.sites if s.name in errors)
    limit = EXACT if exact else math.inf
    return Verification(worst <= limit, "site", math.nan, worst, limit, "float64", (), errors)


def _report(plan: Plan, model: nn.Module, verification: Verification | None) -> Report:
    errors = getattr(verification, "site_errors", {}) if verification is not None else {}
    plan = plan.with_errors(errors)
    return Report(
        plan.rewrite,
        type(model).__name__,
        tuple(plan.sites),
        tuple(plan.mapping),
        verification,
        tuple(plan.notes),
        plan,
    )


__all__ = [
    "NormSite",
    "NormSites",
    "carry_out",
    "find_norms",
    "fold_affine",
    "fold_batchnorm",
    "plan_fold_affine",
    "plan_fold_batchnorm",
    "plan_swap_norms",
    "ready",
    "swap_norms",
    "verify",
]
