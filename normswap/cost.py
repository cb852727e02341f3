"""What a change costs or saves: parameters, floating-point operations, and time on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from normswap.attempt import attempt
from normswap.find import find_modules
from normswap.hooks import MeanCentring
from normswap.inputs import Inputs

RUNS = 5
MOST_SECONDS = 3.0
# Operations for each number: sums, differences, squares and products; the roots are per vector.
_NORMALISERS = {"layer": 5, "rms": 3, "group": 5, "instance": 5, "scale": 3, "lp": 4}
_CENTRING = 2


@dataclass(frozen=True)
class Cost:
    """Before and after, for one call on the example inputs.

    Attributes:
        parameters: how many numbers the model stores as parameters.
        norm_operations: of norms, and of ops that were added to remove a mean.
        operations: those and the ones of matrix products, convolutions and attention.
        seconds: median of several calls in the model's own dtype, interleaved.
    """

    parameters: tuple[int, int]
    norm_operations: tuple[int, int]
    operations: tuple[int, int]
    seconds: tuple[float, float]


def measure(original: nn.Module, changed: nn.Module, inputs: Inputs) -> Cost | None:
    """Compare two models on the same inputs; ``None`` if one does not run in its own dtype."""
    counted = [_count(model, inputs) for model in (original, changed)]
    if None in counted:
        return None
    times: tuple[list[float], list[float]] = ([], [])
    start = time.perf_counter()
    for _ in range(RUNS):
        for model, taken in zip((original, changed), times, strict=True):
            taken.append(_timed(model, inputs))
        if time.perf_counter() - start > MOST_SECONDS:
            break
    sizes = [sum(p.numel() for p in model.parameters()) for model in (original, changed)]
    (norms, products), (new_norms, new_products) = [c for c in counted if c is not None]
    return Cost(
        (sizes[0], sizes[1]),
        (norms, new_norms),
        (norms + products, new_norms + new_products),
        (median(times[0]), median(times[1])),
    )


def _count(model: nn.Module, inputs: Inputs) -> tuple[int, int] | None:
    """Operations of norms and of everything that `FlopCounterMode` counts."""
    norms = 0

    def counter(each: int) -> Callable[..., None]:
        def add(_module: nn.Module, _args: Any, output: Any) -> None:
            nonlocal norms
            norms += each * (output.numel() if isinstance(output, Tensor) else 0)

        return add

    with ExitStack() as stack:
        for site in find_modules(model):
            if site.spec is None or site.module is None:
                continue
            affine = (site.spec.weight is not None) + (site.spec.bias is not None)
            each = _NORMALISERS.get(site.spec.kind, 2) + affine
            handle = site.module.register_forward_hook(counter(each))
            stack.callback(handle.remove)
        for module in model.modules():
            for hook in [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]:
                if isinstance(hook, MeanCentring):  # what it centres is as large as its output
                    stack.callback(module.register_forward_hook(counter(_CENTRING)).remove)
        products = stack.enter_context(FlopCounterMode(display=False))
        outcome = attempt(model, inputs)
    return None if outcome.error else (norms, products.get_total_flops())


def _timed(model: nn.Module, inputs: Inputs) -> float:
    """Seconds of one call."""
    marks: list[float] = []
    first = model.register_forward_pre_hook(lambda *_: marks.append(time.perf_counter()))
    last = model.register_forward_hook(lambda *_: marks.append(time.perf_counter()))
    try:
        attempt(model, inputs)
    finally:
        first.remove()
        last.remove()
    return marks[-1] - marks[0] if len(marks) > 1 else 0.0
