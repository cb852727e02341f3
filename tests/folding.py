"""Folds in tests: what must hold whenever a model is folded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from helpers import (
    FunctionalBatchNorm,
    active_batch_norms,
    assert_folded,
    assert_no_norm_computes,
    assert_same,
    assert_state_equal,
    check_report,
    covers,
    double,
    is_batch_norm,
    random_input,
    relative_error,
    run,
    state_copy,
)
from strategies import Network
from torch import Tensor, nn

import normswap as ns

IMAGE = random_input(2, 3, 8, 8)


def fold(model: nn.Module, *args: Tensor, **options: Any) -> tuple[nn.Module, Any]:
    """Fold, and require what always holds: equal outputs, one answer per norm, input untouched."""
    state = state_copy(model)
    new, report = ns.fold_batchnorm(model, args if len(args) > 1 else args[0], **options)
    check_report(model, report)
    assert_state_equal(model, state)
    assert_same(model, new, *args)
    others = [random_input(3, *a.shape[1:], seed=7 + i, dtype=a.dtype) for i, a in enumerate(args)]
    if all(a.is_floating_point() for a in args):
        assert_same(model, new, *others)
    return new, report


def fold_all(model: nn.Module, *args: Tensor, names: tuple[str, ...] = ("bn",)) -> nn.Module:
    """Fold where every norm must go."""
    new, report = fold(model, *args)
    assert_folded(report, *names)
    assert_no_norm_computes(new, *args)
    return new


def unchanged(old: nn.Module, new: nn.Module, name: str) -> bool:
    """Whether a submodule has the same tensors as before."""
    a, b = old.get_submodule(name).state_dict(), new.get_submodule(name).state_dict()
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) for k in a)


def chain(*modules: nn.Module, seed: int = 0, sign: str = "mixed") -> nn.Sequential:
    """A random sequential model in double precision."""
    model = double(nn.Sequential(*modules), seed, sign)
    assert isinstance(model, nn.Sequential)
    return model


# Random networks

TOLERANCE = 1e-10


def norm_calls(model: nn.Module, x: Tensor) -> Counter[str]:
    """How often each norm is called, by the module's first name."""
    counts: Counter[str] = Counter()
    handles = []
    for name, module in model.named_modules():
        if is_batch_norm(module) or isinstance(module, FunctionalBatchNorm):

            def count(m: nn.Module, args: Any, out: Any, name: str = name) -> None:
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
