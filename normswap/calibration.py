"""Sizes of activations, measured on calibration batches: what a constant in a model stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normswap.attempt import attempt
from normswap.errors import NormswapError
from normswap.inputs import Inputs
from normswap.spec import NormSpec


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


class _Fit:
    """The least-squares factor ``r`` of ``y ≈ r z``, over all positions."""

    def __init__(self) -> None:
        self.across, self.square, self.squared_y = 0.0, 0.0, 0.0

    def add(self, y: Tensor, z: Tensor, axes: tuple[int, ...], *, centred: bool) -> None:
        y, z = y.detach().to(torch.float64), z.detach().to(torch.float64)
        if centred:
            y, z = y - y.mean(axes, keepdim=True), z - z.mean(axes, keepdim=True)
        self.across += float((y * z).sum())
        self.square += float(z.square().sum())
        self.squared_y += float(y.square().sum())

    @property
    def value(self) -> float:
        """The factor; where scales of both signs leave none above 0, the ratio of the sizes."""
        ratio = self.across / self.square
        return ratio if ratio > 0 else math.sqrt(self.squared_y / self.square)


def measure_ratios(
    model: nn.Module, batches: Iterable[Inputs], norms: Mapping[str, NormSpec]
) -> dict[str, float]:
    """For each norm ``y → g n(y) + b`` the factor ``r`` of ``y ≈ r g n(y)``, by least squares.

    Raises:
        NormswapError: there is no batch, the model fails on one, or a norm is never called.
    """
    fits = {name: _Fit() for name in norms}
    handles: list[Any] = []
    for name, spec in norms.items():
        norm = model.get_submodule(name)
        shift = None if spec.bias is None else getattr(norm, spec.bias)
        hook = _of_norm(fits[name], spec, shift)
        handles.append(norm.register_forward_hook(hook))
    _run(model, batches, handles)
    missing = next((name for name, fit in fits.items() if fit.square == 0.0), None)
    if missing is not None:
        raise NormswapError(f"calibration: no batch reached {missing!r}; give batches that do")
    return {name: fit.value for name, fit in fits.items()}


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
    _run(model, batches, handles)
    missing = next((name for name, mean in means.items() if not mean.count), None)
    if missing is not None:
        raise NormswapError(f"calibration: no batch reached {missing!r}; give batches that do")
    return {name: mean.value for name, mean in means.items()}


@dataclass
class _Moments:
    """Sums over positions, a number a channel: of ``n``, ``y``, ``n²`` and ``n y``."""

    count: int = 0
    n: Tensor | float = 0.0
    y: Tensor | float = 0.0
    nn: Tensor | float = 0.0
    ny: Tensor | float = 0.0

    def add(self, y: Tensor, spec: NormSpec) -> None:
        y = y.detach().to(torch.float64)
        x = y - y.mean(spec.axes, keepdim=True) if spec.centred else y
        n = x / (x.square().mean(spec.axes, keepdim=True) + spec.eps).sqrt()
        y, n = y.flatten(0, -2), n.flatten(0, -2)
        self.count += len(y)
        self.n, self.y = self.n + n.sum(0), self.y + y.sum(0)
        self.nn, self.ny = self.nn + n.square().sum(0), self.ny + (n * y).sum(0)


@torch.no_grad()
def fit_identity(
    model: nn.Module, batches: Iterable[Inputs], norms: Mapping[str, NormSpec]
) -> None:
    """Set scale and shift of norms over the last axis so that they change what they get least.

    For each channel the least-squares line of ``y`` over ``n(y)``; without a shift, through 0.

    Raises:
        NormswapError: there is no batch, the model fails on one, or a norm is never called.
    """
    moments = {name: _Moments() for name in norms}
    handles: list[Any] = []
    for name, spec in norms.items():

        def hook(_m: nn.Module, args: Any, seen: Any = moments[name], spec: Any = spec) -> None:
            seen.add(args[0], spec)

        handles.append(model.get_submodule(name).register_forward_pre_hook(hook))
    _run(model, batches, handles)
    for name, spec in norms.items():
        seen, norm = moments[name], model.get_submodule(name)
        if not seen.count:
            raise NormswapError(f"calibration: no batch reached {name!r}; give batches that do")
        middle = seen.n / seen.count if spec.bias is not None else 0.0 * seen.n
        slope = (seen.ny - middle * seen.y) / (seen.nn - middle * seen.n).clamp_min(1e-12)  # type: ignore[union-attr]
        if spec.weight is not None:
            getattr(norm, spec.weight).copy_(slope - float(spec.unit_offset))
        if spec.bias is not None:
            getattr(norm, spec.bias).copy_((seen.y - slope * seen.n) / seen.count)


def _run(model: nn.Module, batches: Iterable[Inputs], handles: Sequence[Any]) -> None:
    """Run the model on each batch, and remove the hooks."""
    try:
        for number, batch in enumerate(batches):
            outcome = attempt(model, batch)
            if outcome.error:
                raise NormswapError(f"calibration batch {number} does not run: {outcome.error}")
    finally:
        for handle in handles:
            handle.remove()


def _of_norm(fit: _Fit, spec: NormSpec, shift: Tensor | None) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        z = output if shift is None else output - shift
        fit.add(args[0], z, spec.axes, centred=spec.centred)

    return hook


def _of_input(mean: _Mean, axes: tuple[int, ...], *, centred: bool) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
        mean.add(args[0], axes, centred=centred)

    return hook


def _of_result(mean: _Mean) -> Callable[..., None]:
    def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
        mean.add(output, (-1,), centred=False)

    return hook
