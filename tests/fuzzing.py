"""What must hold when a random network is folded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from helpers import (
    FunctionalBatchNorm,
    active_batch_norms,
    check_report,
    covers,
    is_batch_norm,
    relative_error,
    run,
)
from strategies import Network
from torch import Tensor, nn

import normswap as ns

TOLERANCE = 1e-10


def norm_calls(model: nn.Module, x: Tensor) -> Counter[str]:
    """How often each norm that changes its input is called, by the module's first name."""
    counts: Counter[str] = Counter()
    handles = []
    for name, module in model.named_modules():
        if is_batch_norm(module) or isinstance(module, FunctionalBatchNorm):

            def count(m: nn.Module, args: Any, out: Any, name: str = name) -> None:
                if not torch.allclose(args[0], out, rtol=1e-6, atol=1e-6):
                    counts[name] += 1

            handles.append(module.register_forward_hook(count))
    try:
        run(model, x)
    finally:
        for handle in handles:
            handle.remove()
    return counts


def fold_faults(network: Network, new: nn.Module, report: Any) -> list[str]:
    """What is wrong with a fold; empty if nothing is."""
    model, x = network.model, network.x
    faults = []
    error = relative_error(run(model, x), run(new, x))
    if not error < TOLERANCE:
        faults.append(f"outputs differ by {error:.1e}")
    for name, module in model.named_modules():
        if isinstance(module, FunctionalBatchNorm) and not covers(report, name):
            faults.append(f"functional norm {name} has no answer")
    kept = {s.name.split(":")[0] for s in report.sites if s.status == "refused"}
    allowed = sum(n for name, n in norm_calls(model, x).items() if name in kept)
    active = active_batch_norms(new, x)
    if active > allowed:
        faults.append(f"{active} norms still compute, {allowed} calls were refused")
    return faults


def check_fold(network: Network) -> Any:
    """Fold and require everything; the report."""
    new, report = ns.fold_batchnorm(network.model, network.x, verify=False)
    check_report(network.model, report)
    faults = fold_faults(network, new, report)
    assert not faults, f"{faults}\n{report}"
    return report
