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
from normswap.stream_hooks import on_result


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


@dataclass(frozen=True)
class Step:
    """A sublayer whose norm moved onto its branch.

    Attributes:
        norm: the norm that made what the branch reads, in the original.
        moved: the same norm in the converted model, where it gets the stream.
        exits: modules that return what the branches add, with what the block multiplies them by.
        spec: of the norm.
    """

    norm: str
    moved: str
    exits: tuple[tuple[str, float], ...]
    spec: NormSpec


class _Fitting:
    """Fits and applies the factors of one run, sublayer after sublayer."""

    def __init__(self, original: nn.Module, moved: nn.Module, steps: Sequence[Step]) -> None:
        self.original, self.moved, self.steps = original, moved, steps
        self.expected: dict[str, Tensor] = {}  # what the branch read, without the norm's shift
        self.factors: dict[str, float] = {}

    def keep(self, step: Step) -> Callable[..., None]:
        """Note what the branch reads in the original."""
        norm = self.original.get_submodule(step.norm)
        shift = None if step.spec.bias is None else getattr(norm, step.spec.bias)

        def hook(_module: nn.Module, _args: object, output: Tensor) -> None:
            value = output.detach() if shift is None else output.detach() - shift.detach()
            self.expected.setdefault(step.norm, value.to(torch.float64))

        return hook

    def fit(self, step: Step) -> Callable[..., None]:
        """The factor between the stream as it arrives and what the branch was trained beside."""

        def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
            if step.norm in self.expected and step.norm not in self.factors:
                y, z = args[0].detach().to(torch.float64), self.expected.pop(step.norm)
                self.factors[step.norm] = _factor(y, z, step.spec)

        return hook

    def scale(self, step: Step, times: float, *, leads: bool) -> Callable[..., Any]:
        """The branch in that size, with the shift that the skip lacks."""
        norm = self.original.get_submodule(step.norm)
        shift = None if step.spec.bias is None else getattr(norm, step.spec.bias).detach()

        def scaled(output: Tensor) -> Tensor:
            added = output if shift is None or not leads else output + shift / times
            return self.factors[step.norm] * added

        def hook(_module: nn.Module, _args: object, output: Any) -> Any:
            return on_result(output, scaled) if step.norm in self.factors else None

        return hook


def _factor(y: Tensor, z: Tensor, spec: NormSpec) -> float:
    """The least-squares factor of ``y`` over ``z``, relative to the size of ``y`` at each position.

    Without the weights a few large positions would decide. If it is not above 0, as with scales of
    both signs, the ratio of the sizes.
    """
    y = y.reshape(z.shape)
    if spec.centred:
        y, z = y - y.mean(spec.axes, keepdim=True), z - z.mean(spec.axes, keepdim=True)
    weight = 1.0 / y.square().mean(spec.axes, keepdim=True).clamp_min(1e-24)
    square = float((weight * z.square()).sum())
    ratio = float((weight * y * z).sum()) / square
    return ratio if ratio > 0 else math.sqrt(float((weight * y.square()).sum()) / square)


def fit_branch_factors(
    original: nn.Module, moved: nn.Module, batches: Iterable[Inputs], steps: Sequence[Step]
) -> dict[str, float]:
    """By norm of the original, the factor of the branch that reads it beside a clean skip.

    In each batch the sublayers are fitted in order, each on the stream that the scaled branches
    before it made; over batches the geometric mean is taken.

    Args:
        original: a post-norm model.
        moved: the same with its norms on the branches, nothing scaled.
        batches: what both are run on.
        steps: the sublayers.

    Raises:
        NormswapError: there is no batch, a model fails on one, or a norm is never called.
    """
    found: dict[str, list[float]] = {step.norm: [] for step in steps}
    for number, batch in enumerate(batches):
        fitting = _Fitting(original, moved, steps)
        handles: list[Any] = []
        for step in steps:
            norm = original.get_submodule(step.norm)
            handles.append(norm.register_forward_hook(fitting.keep(step)))
        _run(original, [batch], handles, number)
        handles = []
        for step in steps:
            norm = moved.get_submodule(step.moved)
            handles.append(norm.register_forward_pre_hook(fitting.fit(step)))
            for place, (path, times) in enumerate(step.exits):
                hook = fitting.scale(step, times, leads=place == 0)
                handles.append(moved.get_submodule(path).register_forward_hook(hook))
        _run(moved, [batch], handles, number)
        for name, factor in fitting.factors.items():
            found[name].append(factor)
    missing = next((name for name, factors in found.items() if not factors), None)
    if missing is not None:
        raise NormswapError(f"calibration: no batch reached {missing!r}; give batches that do")
    return {n: math.exp(sum(map(math.log, f)) / len(f)) for n, f in found.items()}


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


def _run(
    model: nn.Module, batches: Iterable[Inputs], handles: Sequence[Any], first: int = 0
) -> None:
    """Run the model on each batch, and remove the hooks."""
    try:
        for number, batch in enumerate(batches, first):
            outcome = attempt(model, batch)
            if outcome.error:
                raise NormswapError(f"calibration batch {number} does not run: {outcome.error}")
    finally:
        for handle in handles:
            handle.remove()


def _of_input(mean: _Mean, axes: tuple[int, ...], *, centred: bool) -> Callable[..., None]:
    def hook(_module: nn.Module, args: tuple[Any, ...]) -> None:
        mean.add(args[0], axes, centred=centred)

    return hook


def _of_result(mean: _Mean) -> Callable[..., None]:
    def measure(result: Tensor) -> Tensor:
        mean.add(result, (-1,), centred=False)
        return result

    def hook(_module: nn.Module, _args: object, output: Any) -> None:
        on_result(output, measure)

    return hook
