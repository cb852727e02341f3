"""The public functions: plan, apply, verify, report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.apply import apply_with_undo, replaced_parameters, roll_back
from normswap.capture import Capture, capture
from normswap.copying import copy_model
from normswap.drift import site_drift
from normswap.equivalence import EXACT
from normswap.errors import NormswapError, RefusedError, VerificationError
from normswap.find import NormSite, NormSites, Where, find_modules
from normswap.forms import refuse_unsupported, unwrap
from normswap.functional import functional_norms
from normswap.inputs import Inputs, resolve_inputs
from normswap.optimizers import require_own_parameters, update_optimizer
from normswap.plan import Plan
from normswap.report import Report
from normswap.rewrites.fold_batchnorm import plan_fold_batchnorm as _plan_fold_batchnorm
from normswap.rewrites.swap import plan_swap_norms as _plan_swap_norms
from normswap.targets import Key, Value
from normswap.undo import remember
from normswap.verification import Verification, verify

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | None


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


def plan_fold_batchnorm(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    where: Where = None,
) -> Plan:
    """What :func:`fold_batchnorm` would do, without doing it; works on the meta device.

    Raises:
        CaptureError: the model cannot be run on the inputs.
        RefusedError: a form of model that cannot be changed.
    """
    model = unwrap(model)
    refuse_unsupported(model)
    inputs = resolve_inputs(model, example_inputs, example_kwargs)
    return _plan_fold_batchnorm(model, inputs, where=where)


def fold_batchnorm(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
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
    inner = unwrap(model)
    refuse_unsupported(inner)
    inputs = resolve_inputs(inner, example_inputs, example_kwargs)
    plan = _plan_fold_batchnorm(inner, inputs, where=where)
    return carry_out(plan, model, inputs, inplace=inplace, check=verify, strict=strict)


def plan_swap_norms(
    model: nn.Module,
    mapping: Mapping[Key, Value],
    *,
    where: Where = None,
    method: str = "auto",
) -> Plan:
    """What :func:`swap_norms` would do, without doing it; works on the meta device.

    Raises:
        NormswapError: a key, value or method that is not known.
        RefusedError: a form of model that cannot be changed.
    """
    model = unwrap(model)
    refuse_unsupported(model)
    return _plan_swap_norms(model, mapping, where=where, method=method)


def swap_norms(
    model: nn.Module,
    mapping: Mapping[Key, Value],
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    method: str = "auto",
    optimizer: torch.optim.Optimizer | None = None,
    inplace: bool = False,
    where: Where = None,
    verify: bool = True,
    strict: bool = False,
) -> tuple[nn.Module, Report]:
    """Swap norms for other norms, their trained parameters carried over as far as they can be.

    ``g * n(x) + b``: the new norm gets ``g`` and ``b`` in its own convention. Exact where both
    normalisers ``n`` are the same function (measured at each site in float64), else approximate.

    Args:
        model: the model.
        mapping: from what to what. A class of torch.nn or normswap, or a name such as ``"rms"``,
            stands for every norm that behaves so; any other class stands for itself. Values may
            also be a callable ``NormSite -> nn.Module``.
        example_inputs: to run old and new model and measure the difference of their outputs;
            without them each site is checked alone.
        example_kwargs: keywords in addition.
        method: ``"auto"`` or ``"copy"``: carry the parameters over; ``"exact"``: refuse what is
            not the same function; ``"init"``: leave the new norms as they are built.
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
    inputs, calls, functional, bypassed = None, None, list[NormSite](), set[str]()
    if example_inputs is not None or example_kwargs is not None:
        inputs = resolve_inputs(inner, example_inputs, example_kwargs)
        recorded = capture(inner, inputs)
        calls = _observed_calls(recorded)
        modules = {site.name for site in find_modules(inner)}
        functional = list(functional_norms(recorded, modules))
        called = {call.path for call in recorded.calls}
        read = {tensor.owner for tensor in recorded.tensors.values() if tensor.node is not None}
        bypassed = (modules & read) - called
    plan = _plan_swap_norms(
        inner,
        mapping,
        where=where,
        method=method,
        calls=calls,
        functional=functional,
        bypassed=bypassed,
    )
    if optimizer is not None:
        require_own_parameters(optimizer, inner)
    before = dict(inner.named_modules(remove_duplicate=False))
    new, report = carry_out(plan, model, inputs, inplace=inplace, check=verify, strict=strict)
    if optimizer is not None:
        update_optimizer(optimizer, replaced_parameters(plan, before, unwrap(new)))
    return new, report


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
    report = _report(plan, inner, verification)
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
    refused = [s for s in plan.sites if s.status == "refused" and s.reason != "where"]
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
    "fold_batchnorm",
    "plan_fold_batchnorm",
    "plan_swap_norms",
    "swap_norms",
    "verify",
]
