"""Sizes of activations, measured on calibration batches: what a constant in a model stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap.attempt import attempt
from normswap.errors import NormswapError
from normswap.inputs import Inputs


class _Mean:
    """The geometric mean of sizes per position: a few large positions hardly move it."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, x: Tensor, axes: tuple[int, ...], *, centred: bool) -> None:
        x = x.detach().to(torch.float64)
        if centred:
            x = x - x.mean(axes, keepdim=True)
        sizes = x.square().mean(axes).sqrt().clamp_min(1e-12).log()
        self.total += float(sizes.sum())
        self.count += sizes.numel()

    @property
    def value(self) -> float:
        return math.exp(self.total / self.count)


def measure_sizes(
    model: nn.Module,
    batches: Iterable[Inputs],
    inputs_of: Mapping[str, tuple[tuple[int, ...], bool]],
    results_of: Collection[str],
) -> dict[str, float]:
    """The size ``sqrt(mean x²)`` over the last axis of what modules get or return, as a mean.

    Args:
        model: the model; run in eval mode, unchanged.
        batches: what to run it on.
        inputs_of: names of norms, with the axes of their statistics and whether these are of the
            centred values; measured is their first argument.
        results_of: names of modules whose result is measured.

    Raises:
        NormswapError: there is no batch, the model fails on one, or a module is never called.
    """
    means = {name: _Mean() for name in (*inputs_of, *results_of)}
    handles: list[Any] = []
    for name, (axes, centred) in inputs_of.items():
        hook = _of_input(means[name], axes, centred=centred)
        handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
    for name in results_of:
        hook = _of_result(means[name])
        handles.append(model.get_submodule(name).register_forward_hook(hook))
    try:
        for number, batch in enumerate(batches):
            outcome = attempt(model, batch)
            if outcome.error:
                raise NormswapError(f"calibration batch {number} does not run: {outcome.error}")
    finally:
        for handle in handles:
            handle.remove()
    missing = next((name for name, mean in means.items() if not mean.count), None)
    if missing is not None:
        raise NormswapError(f"calibration: no batch reached {missing!r}; give batches that do")
    return {name: mean.value for name, mean in means.items()}


def _of_input(mean: _Mean, axes: tuple[int, ...], *, centred: bool) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
        mean.add(args[0], axes, centred=centred)

    return hook


def _of_result(mean: _Mean) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        mean.add(output, (-1,), centred=False)

    return hook
