"""Swaps in tests: norms written out by hand, and what must hold whenever norms are swapped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from helpers import (
    REFUSALS,
    STATUSES,
    assert_state_equal,
    find_site,
    random_input,
    randomise,
    relative_error,
    signed,
    state_copy,
)
from torch import Tensor, nn

import normswap as ns
from normswap.precision import true_float64

TOKENS = random_input(2, 5, 8)
IMAGE = random_input(2, 8, 6, 6)
EXACT = 1e-10
CODES = REFUSALS | {"bypassed", "dtype-mismatch", "functional", "not-equivalent", "unknown"}


# Norms by hand


def rms(
    x: Tensor, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-6, axes: Sequence[int] = (-1,)
) -> Tensor:
    """``x / sqrt(mean x² + eps) * weight + bias``."""
    return x / (x.square().mean(axes, keepdim=True) + eps).sqrt() * weight + bias


def layer(
    x: Tensor, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5, axes: Sequence[int] = (-1,)
) -> Tensor:
    """``(x - mean) / sqrt(var + eps) * weight + bias``."""
    return rms(x - x.mean(axes, keepdim=True), weight, bias, eps, axes)


def group(x: Tensor, groups: int, weight: Any = 1.0, bias: Any = 0.0, eps: float = 1e-5) -> Tensor:
    """GroupNorm of ``[N, C, *]``."""
    parts = x.reshape(x.shape[0], groups, -1)
    return layer(parts, eps=eps).reshape(x.shape) * channels(weight, x) + channels(bias, x)


def fixed(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    """BatchNorm in eval mode."""
    mean, var = channels(norm.running_mean, x), channels(norm.running_var, x)
    scaled = (x - mean) / (var + norm.eps).sqrt()
    return scaled * channels(norm.weight, x) + channels(norm.bias, x)


def channels(value: Any, x: Tensor) -> Any:
    """A vector over axis 1 of ``x``."""
    return value.reshape(1, -1, *(1,) * (x.dim() - 2)) if isinstance(value, Tensor) else value


class LlamaNorm(nn.Module):
    """RMSNorm as modelling files write it: another name for eps, the cast before gamma."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.variance_epsilon = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        wide = hidden_states.to(torch.float32) if dtype.itemsize < 4 else hidden_states
        variance = wide.pow(2).mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * wide.to(dtype)


class OffsetNorm(nn.Module):
    """RMSNorm with scale ``1 + weight``, added in float32, the cast after gamma."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() if x.dtype.itemsize < 4 else x
        out = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (out * (1.0 + self.weight.to(out.dtype))).type_as(x)


class OffsetLayerNorm(nn.LayerNorm):
    """A LayerNorm subclass that stores its scale less one."""

    def forward(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        return nn.functional.layer_norm(input, shape, self.weight + 1, self.bias, self.eps)


class PlainLayerNorm(nn.Module):
    """A LayerNorm that is no ``nn.LayerNorm`` and does not say so by its name."""

    def __init__(self, size: int, e: float = 1e-5) -> None:
        super().__init__()
        self.scale, self.offset = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.e = e

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        root = (centred.square().mean(-1, keepdim=True) + self.e).sqrt()
        return centred / root * self.scale + self.offset


class ChannelsFirst(nn.Module):
    """LayerNorm over the channels of ``[N, C, H, W]`` at each position."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return layer(x, channels(self.weight, x), channels(self.bias, x), self.eps, (1,))


class GatedNorm(nn.Module):
    """RMSNorm of a product: it behaves like a norm and takes two inputs."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return rms(x * nn.functional.silu(gate), self.weight, eps=self.eps)


# Swaps


@torch.no_grad()
def fill(model: nn.Module, seed: int = 0) -> Any:
    """A random model in double precision and eval mode; scales with negative and zero entries.

    As :func:`helpers.double`, for scales of any name and shape too, and for slopes.
    """
    randomise(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            plain = isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd))
            if plain or (name == "weight" and parameter.ndim == 1) or name == "bias":
                continue
            if name in ("weight", "scale"):
                parameter.copy_(signed(generator, parameter.numel()).reshape(parameter.shape))
            elif name == "alpha":
                parameter.copy_(signed(generator, parameter.numel(), "positive"))
            elif name == "offset":
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values)
    return model.double().eval()


def run64(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The model's output in true float64, whatever it casts to inside."""
    args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    with true_float64():
        return model(*args, **kwargs)


def swap(model: nn.Module, mapping: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
    """Swap on a copy, and require what always holds: the input untouched, a sound report.

    Where every site is exact the outputs are equal.
    """
    state = state_copy(model)
    inputs = (args if len(args) > 1 else args[0]) if args else None
    new, report = ns.swap_norms(model, mapping, inputs, **options)
    assert_state_equal(model, state)
    check_swap_report(report)
    changed = [s for s in report.sites if s.status != "refused"]
    if args and all(s.status == "exact" for s in changed):
        assert relative_error(run64(model, *args), run64(new, *args)) < EXACT
    return new, report


def check_swap_report(report: Any) -> None:
    """Known statuses and codes, one row a site, and the numbers that go with a status."""
    for site in report.sites:
        assert site.status in STATUSES, site
        if site.status == "refused":
            assert site.reason in CODES, site
            assert site.detail, site
        else:
            assert site.reason is None, site
        if site.status == "exact":
            assert site.error is not None, site
            assert site.error < EXACT, site
        if site.status == "approximate":
            assert site.error is not None, site
            assert 0 < site.error < float("inf"), site
    names = [s.name for s in report.sites]
    assert len(names) == len(set(names)), f"a site appears twice: {names}"
    assert sum(report.counts.values()) == len(report.sites)


def assert_status(report: Any, status: str, *names: str) -> None:
    """These sites have this status."""
    for name in names:
        site = find_site(report, name)
        assert site.status == status, f"{name}: {site.status} {site.reason}: {site.detail}"


def assert_close(actual: Any, expected: Any, tol: float = 1e-12) -> None:
    """Equal up to rounding in float64."""
    error = relative_error(expected, actual)
    assert error < tol, f"differs by {error:.2e} (allowed {tol:.0e})"
