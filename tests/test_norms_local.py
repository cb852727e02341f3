"""Norms over a neighbourhood, position by position in NumPy; GRN against timm and transformers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from timm.layers.grn import GlobalResponseNorm
from torch import nn
from transformers.models.convnextv2.modeling_convnextv2 import ConvNextV2GRN

from normswap import norms


def local_contrast(x: np.ndarray, size: int, sigma: float, eps: float) -> np.ndarray:
    """Position by position, each with its own window."""
    offsets = np.arange(size) - size // 2
    window = np.exp(-(offsets[:, None] ** 2 + offsets[None] ** 2) / (2 * sigma**2))

    def averaged(maps: np.ndarray) -> np.ndarray:
        _, channels, height, width = maps.shape
        out = np.zeros((len(maps), 1, height, width))
        for i in range(height):
            for j in range(width):
                total = 0.0
                for a, di in enumerate(offsets):
                    for b, dj in enumerate(offsets):
                        if 0 <= i + di < height and 0 <= j + dj < width:
                            out[:, 0, i, j] += window[a, b] * maps[:, :, i + di, j + dj].sum(1)
                            total += window[a, b] * channels
                out[:, 0, i, j] /= total
        return out

    v = x - averaged(x)
    std = np.maximum(np.sqrt(averaged(v**2)), eps)
    return v / np.maximum(std, std.mean((2, 3), keepdims=True))


@pytest.mark.parametrize(("size", "sigma"), [(3, None), (5, 2.0), (9, None)])
def test_local_contrast_follows_its_formula(size: int, sigma: float | None) -> None:
    module = norms.LocalContrastNorm(size, sigma).double()
    module.reset_parameters()  # the kernel in float64
    x = random_input(2, 3, 6, 5)
    x[:, :, :3] *= 0.1  # a part of low contrast: there the mean deviation divides
    want = local_contrast(x.numpy(), size, module.sigma, module.eps)
    assert relative_error(torch.from_numpy(want), module(x)) < 1e-12
    assert module.sigma == (sigma or size / 4)
    assert list(module.state_dict()) == []


def test_a_constant_image_has_no_contrast_and_no_gradient() -> None:
    x = torch.full((1, 2, 4, 4), 3.0, dtype=torch.float64, requires_grad=True)
    y = norms.LocalContrastNorm(3).double()(x)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert relative_error(torch.ones_like(y), 1 + y) < 1e-10
    assert float(grad.abs().max()) < 1e-6


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 3])
def test_divisive_follows_its_formula(rank: int, size: int) -> None:
    module = randomised(norms.DivisiveNorm(3, size, rank=rank)).double()
    x = random_input(2, 3, *(4, 5, 3)[:rank])
    weight = module.weight.detach().numpy() ** 2
    square = np.pad(x.numpy() ** 2, [(0, 0), (0, 0), *[(size // 2, size // 2)] * rank])
    pooled = np.zeros(x.shape)
    for tap in np.ndindex(*[size] * rank):
        place = tuple(slice(t, t + n) for t, n in zip(tap, x.shape[2:], strict=True))
        part = square[(slice(None), slice(None), *place)]
        pooled += np.einsum("oc,nc...->no...", weight[(slice(None), slice(None), *tap)], part)
    sigma = module.sigma.detach().numpy().reshape(-1, *[1] * rank)
    want = x.numpy() / np.sqrt(sigma**2 + pooled)
    assert relative_error(torch.from_numpy(want), module(x)) < 1e-13


def test_divisive_starts_with_the_mean_square_of_its_window() -> None:
    module = norms.DivisiveNorm(4, sigma=0.0).double()
    x = random_input(2, 4, 3, 3)
    want = nn.functional.rms_norm(x.movedim(1, -1), (4,), None, 0.0).movedim(-1, 1)
    assert relative_error(want, module(x)) < 1e-7  # the weight is a rounded root


def test_grn_equals_timm_and_convnext() -> None:
    x = random_input(2, 4, 5, 6, dtype=torch.float32)
    ours = randomised(norms.GRN(6))
    timm_last, timm_first = GlobalResponseNorm(6), GlobalResponseNorm(6, channels_last=False)
    hugging = ConvNextV2GRN(6)
    first = norms.GRN(6, channels_last=False)
    first.load_state_dict(ours.state_dict(), strict=True)
    for module in (timm_last, timm_first):
        module.load_state_dict(ours.state_dict(), strict=True)
    hugging.weight.data.copy_(ours.weight), hugging.bias.data.copy_(ours.bias)
    assert relative_error(timm_last(x), ours(x)) < 1e-6
    assert relative_error(hugging(x), ours(x)) < 1e-6
    assert relative_error(timm_first(x.movedim(-1, 1)), first(x.movedim(-1, 1))) < 1e-6


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 2, 3, 4, 6)], ids=str)
def test_grn_of_any_rank_follows_its_formula(shape: tuple[int, ...]) -> None:
    module = randomised(norms.GRN(6, eps=0.1)).double()
    x = random_input(*shape)
    flat = x.numpy().reshape(shape[0], -1, 6)
    size = np.sqrt((flat**2).sum(1, keepdims=True))
    relative = size / (size.mean(2, keepdims=True) + 0.1)
    w, b = (t.detach().numpy() for t in (module.weight, module.bias))
    want = w * flat * relative + b + flat
    assert relative_error(torch.from_numpy(want.reshape(shape)), module(x)) < 1e-13
    assert torch.equal(norms.GRN(6).double()(x), x)  # starts as the identity


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norms.LocalContrastNorm(4), "odd"),
        (lambda: norms.LocalContrastNorm(5, sigma=0.0), "sigma is 0.0"),
        (lambda: norms.LocalContrastNorm(5)(torch.ones(2, 3, 4)), "N, C, H, W"),
        (lambda: norms.DivisiveNorm(4, 2), "odd"),
        (lambda: norms.DivisiveNorm(4, rank=4), "rank is 4"),
        (lambda: norms.DivisiveNorm(4)(torch.ones(2, 4, 3, 3, 3)), "build it with that rank"),
        (lambda: norms.DivisiveNorm(4)(torch.ones(2, 3, 3, 3)), "4 channels"),
    ],
)
def test_bad_arguments_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
