"""The public functions: plan, apply, verify, report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.apply import apply_with_undo, roll_back
from normswap.capture import capture, refuse_unsupported, unwrap
from normswap.copying import copy_model
from normswap.errors import NormswapError, RefusedError, VerificationError
from normswap.find import NormSite, NormSites, Where, batch_norms_in_graph, find_batch_norms
from normswap.inputs import Inputs, resolve_inputs
from normswap.plan import Plan
from normswap.report import Report
from normswap.rewrites.fold_batchnorm import plan_fold_batchnorm as _plan_fold_batchnorm
from normswap.verification import Verification, verify

Example = Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | None


def find_norms(
    model: nn.Module,
    example_inputs: Example = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
) -> NormSites:
    """The BatchNorms of a model, in all their forms, each with what it computes.

    Without example inputs the modules are found; with them also the calls of functional norms,
    and how often each is called.

    Raises:
        CaptureError: with inputs: the model cannot be run on them.
    """
    model = unwrap(model)
    if example_inputs is None and example_kwargs is None:
        return NormSites(find_batch_norms(model))
    refuse_unsupported(model)
    inputs = resolve_inputs(model, example_inputs, example_kwargs)
    found = batch_norms_in_graph(model, capture(model, inputs))
    return NormSites(replace(s.site, calls=len(s.instances)) for s in found)


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


def carry_out(
    plan: Plan,
    model: nn.Module,
    inputs: Inputs,
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
    if inplace and any(edit.module == "" and edit.kind == "identity" for edit in plan.module_edits):
        raise NormswapError("the model itself is the norm: inplace=True cannot replace it")
    verifiable = check and plan.changed and not any(t.is_meta for t in inner.parameters())
    original = copy_model(inner) if inplace and verifiable else inner
    changed, undo = apply_with_undo(plan, inner, inplace=inplace)
    verification = None
    if verifiable:
        try:
            verification = _verified(plan, original, changed, inputs)
        except BaseException:
            roll_back(undo)
            raise
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
    return verify(
        original,
        changed,
        inputs,
        sites=plan.comparable,
        float64_pair=(exact, exact_changed),
    )


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
    "verify",
]
