"""Half-precision models: arithmetic in higher precision, one cast, nothing overflows."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable

import pytest
import torch
from helpers import assert_folded, check_report, randomise, run
from torch import Tensor, nn

import normswap as ns

HALVES = [torch.bfloat16, torch.float16]
SHAPES = [(3, 16, 3), (16, 16, 3), (32, 64, 1)]


def rms(difference: Tensor) -> float:
    return float(difference.double().square().mean().sqrt())


@torch.no_grad()
def float_model(seed: int, shape: tuple[int, int, int] = SHAPES[0]) -> tuple[nn.Sequential, Tensor]:
    """conv → norm in float32 with statistics near those of its input, and that input."""
    torch.manual_seed(seed)
    inside, outside, kernel = shape
    conv = nn.Conv2d(inside, outside, kernel, padding=kernel // 2)
    model = nn.Sequential(conv, nn.BatchNorm2d(outside)).eval()
    randomise(model, seed)
    # Exact in either half type, so that rounding the input plays no part.
    x = torch.randn(4, inside, 12, 12).bfloat16().half().float()
    y = conv(x)
    noise = torch.randn(outside) * 0.3
    model[1].running_mean.copy_(y.mean((0, 2, 3)) + noise * y.std((0, 2, 3)))
    model[1].running_var.copy_(y.var((0, 2, 3)))
    return model, x


def to_half(model: nn.Sequential, dtype: torch.dtype, norm_dtype: torch.dtype) -> nn.Sequential:
    half = copy.deepcopy(model).to(dtype)
    half[1] = copy.deepcopy(model[1]).to(norm_dtype)
    return half


def error_ratios(
    fold: Callable[[nn.Sequential, Tensor], nn.Module],
    dtype: torch.dtype,
    norm_dtype: torch.dtype,
) -> list[float]:
    """Error of the folded model over that of the unfolded half model, over seeds and shapes."""
    ratios = []
    for seed in range(12):
        for shape in SHAPES:
            model, x = float_model(seed, shape)
            truth = run(copy.deepcopy(model).double(), x.double())
            plain = rms(run(to_half(model, dtype, norm_dtype), x.to(dtype)) - truth)
            ratios.append(rms(run(fold(model, x), x.to(dtype)) - truth) / plain)
    return ratios


def mean_and_bound(ratios: list[float]) -> tuple[float, float]:
    """The mean, and three standard errors of it."""
    return statistics.mean(ratios), 3 * statistics.stdev(ratios) / math.sqrt(len(ratios))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("norm", ["half", "float32"])
@pytest.mark.parametrize("bias", [True, False])
def test_weights_are_the_exact_ones_rounded_once(dtype: torch.dtype, norm: str, bias: bool) -> None:
    for seed in range(5):
        model, x = float_model(seed)
        half = to_half(model, dtype, dtype if norm == "half" else torch.float32)
        if not bias:
            half[0].bias = None
        new, report = ns.fold_batchnorm(half, x.to(dtype))
        check_report(half, report)
        assert_folded(report, "1")
        conv, bn = half[0], half[1].double()
        scale = bn.weight / (bn.running_var + bn.eps).sqrt()
        weight = (conv.weight.double() * scale[:, None, None, None]).to(dtype)
        before = conv.bias.double() if bias else 0.0
        shift = ((before - bn.running_mean) * scale + bn.bias).to(dtype)
        assert torch.equal(new.get_parameter("0.weight"), weight)
        assert torch.equal(new.get_parameter("0.bias"), shift)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("norm", ["half", "float32"])
def test_dtypes_are_kept(dtype: torch.dtype, norm: str) -> None:
    model, x = float_model(0)
    half = to_half(model, dtype, dtype if norm == "half" else torch.float32)
    new, _ = ns.fold_batchnorm(half, x.to(dtype))
    assert {p.dtype for p in new.parameters()} == {dtype}
    assert run(new, x.to(dtype)).dtype == run(half, x.to(dtype)).dtype


@pytest.mark.parametrize("dtype", HALVES)
def test_folding_then_rounding_is_more_accurate_than_rounding_alone(dtype: torch.dtype) -> None:
    def fold(model: nn.Sequential, x: Tensor) -> nn.Module:
        return ns.fold_batchnorm(model, x, verify=False)[0].to(dtype)

    mean, bound = mean_and_bound(error_ratios(fold, dtype, dtype))
    assert mean + bound < 1.0, f"{mean:.3f} ± {bound:.3f} times the error of the unfolded model"


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("norm", ["half", "float32"])
def test_folding_a_rounded_model_costs_one_more_rounding_at_most(
    dtype: torch.dtype, norm: str
) -> None:
    """The stored weights are rounded again, which two independent roundings bound by √2."""
    norm_dtype = dtype if norm == "half" else torch.float32

    def fold(model: nn.Sequential, x: Tensor) -> nn.Module:
        half = to_half(model, dtype, norm_dtype)
        return ns.fold_batchnorm(half, x.to(dtype), verify=False)[0]

    mean, bound = mean_and_bound(error_ratios(fold, dtype, norm_dtype))
    assert mean - bound < math.sqrt(2), f"{mean:.3f} ± {bound:.3f}"


@pytest.mark.parametrize("dtype", HALVES)
def test_arithmetic_in_the_stored_precision_would_be_worse(dtype: torch.dtype) -> None:
    ours, theirs = [], []
    for seed in range(12):
        model, x = float_model(seed)
        half = to_half(model, dtype, dtype)
        truth = run(copy.deepcopy(half).double(), x.double())
        new, _ = ns.fold_batchnorm(half, x.to(dtype), verify=False)
        conv, bn = copy.deepcopy(half)
        with torch.no_grad():
            scale = bn.weight * torch.rsqrt(bn.running_var + bn.eps)
            conv.weight.mul_(scale[:, None, None, None])
            conv.bias.copy_((conv.bias - bn.running_mean) * scale + bn.bias)
        ours.append(rms(run(new, x.to(dtype)) - truth))
        theirs.append(rms(run(conv, x.to(dtype)) - truth))
    assert statistics.mean(ours) < statistics.mean(theirs)


@pytest.mark.parametrize("norm", ["half", "float32"])
def test_variance_beyond_half_precision_is_finite_and_right(norm: str) -> None:
    model, x = float_model(0)
    model[1].running_var.fill_(1e5)
    half = to_half(model, torch.float16, torch.float16 if norm == "half" else torch.float32)
    if norm == "half":
        assert half[1].running_var.isinf().all()
    new, report = ns.fold_batchnorm(half, x.half())
    assert_folded(report, "1")
    for parameter in new.parameters():
        assert parameter.isfinite().all()
    expected = run(half, x.half()).float()
    assert torch.allclose(run(new, x.half()).float(), expected, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("dtype", HALVES)
def test_weights_that_would_overflow_are_never_written(dtype: torch.dtype) -> None:
    """Tiny variances scale float16 weights out of range: refuse, warn or fail, but never write."""
    model, x = float_model(0)
    with torch.no_grad():
        model[1].running_var.fill_(0.0)
        model[1].eps = 1e-12
        model[1].running_mean.zero_()
        model[0].weight.mul_(0.5)
    half = to_half(model, dtype, torch.float32)
    try:
        new, report = ns.fold_batchnorm(half, x.to(dtype))
    except ns.NormswapError:
        return
    folded = report.sites[0].status == "exact"
    finite = all(p.isfinite().all() for p in new.parameters())
    assert finite or report.notes or not folded


@pytest.mark.parametrize("dtype", HALVES)
def test_never_updated_statistics(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to(dtype).eval()
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    new, report = ns.fold_batchnorm(model, x)
    assert_folded(report, "1")
    expected = run(copy.deepcopy(model).double(), x.double())
    assert rms(run(new, x) - expected) < 2 * rms(run(model, x) - expected) + 1e-6


@pytest.mark.parametrize("dtype", HALVES)
def test_half_model_passes_its_verification(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(4):
        conv = nn.Conv2d(8 if i else 3, 8, 3, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(8), nn.ReLU()]
    model = randomise(nn.Sequential(*layers), 0, "positive").to(dtype).eval()
    _, report = ns.fold_batchnorm(model, torch.randn(2, 3, 16, 16, dtype=dtype))
    assert report.verification is not None
    assert report.verification.passed
