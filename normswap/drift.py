"""How far each swapped norm is from the old one, on the inputs that the old one gets."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normswap.attempt import attempt
from normswap.inputs import Inputs
from normswap.plan import Plan
from normswap.precision import true_float64

_KEPT_BYTES = 2**30


def site_drift(
    original: nn.Module, changed: nn.Module, plan: Plan, inputs: Inputs
) -> dict[str, float]:
    """Relative difference ``max|a - b| / max|a|`` of each inexact site, in true float64.

    Each new norm gets the input that the old one gets in the original model, so that the number
    is its own and not that of the norms before it.
    """
    names = [s.name for s in plan.sites if s.status in ("approximate", "initialised") and s.name]
    seen = _first_calls(original, names, inputs)
    drift: dict[str, float] = {}
    for name, (x, expected) in seen.items():
        with true_float64():
            try:
                found = changed.get_submodule(name)(x)
            except Exception:
                continue
            if isinstance(found, Tensor) and found.shape == expected.shape:
                scale = float(expected.abs().max().clamp_min(1e-12))
                drift[name] = float((found - expected).abs().max()) / scale
    return drift


def _keeper(name: str, seen: dict[str, tuple[Tensor, Tensor]]) -> Any:
    """A forward hook that keeps the first input and output of a norm, within bounds."""

    def keep(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        used = sum(x.nbytes + y.nbytes for x, y in seen.values())
        tensors = bool(args) and isinstance(args[0], Tensor) and isinstance(output, Tensor)
        if name not in seen and tensors and used < _KEPT_BYTES:
            seen[name] = args[0].detach().to(torch.float64), output.detach().to(torch.float64)

    return keep


def branch_drift(
    original: nn.Module, changed: nn.Module, pairs: Sequence[tuple[str, str, str]], inputs: Inputs
) -> tuple[tuple[str, float], ...]:
    """How far what each branch reads is from what it read, in true float64.

    Args:
        original: the model as it was.
        changed: the model after a change.
        pairs: a label, and the modules that make what the branch reads in both models.
        inputs: what both are run on.

    Returns:
        By label, ``max|a - b| / max|a|``; what is not called or has another shape is left out.
    """
    before = _first_calls(original, {old for _, old, _ in pairs}, inputs)
    after = _first_calls(changed, {new for _, _, new in pairs}, inputs)
    rows: list[tuple[str, float]] = []
    for label, old, new in pairs:
        if old not in before or new not in after:
            continue
        a, b = before[old][1], after[new][1]
        if a.shape == b.shape:
            rows.append((label, float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))))
    return tuple(rows)


def _first_calls(
    model: nn.Module, names: Collection[str], inputs: Inputs
) -> dict[str, tuple[Tensor, Tensor]]:
    """By name, what modules get and return in their first call, in true float64."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    handles = [
        model.get_submodule(name).register_forward_hook(_keeper(name, seen)) for name in names
    ]
    try:
        attempt(model, inputs, true_float64())
    finally:
        for handle in handles:
            handle.remove()
    return seen
