"""Norms with a style, a condition or a map, against transformers and the formulas in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from torch import nn
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5_OmniAdaLayerNormZero,
    Qwen2_5_OmniAdaLayerNormZero_Final,
)

from normswap import norms


@pytest.mark.parametrize(
    ("content", "style"),
    [((2, 3, 4, 5), (2, 3, 6, 2)), ((2, 3, 7), (1, 3, 4)), ((2, 3, 2, 2, 3), (2, 3, 9))],
)
def test_adain_gives_the_content_the_statistics_of_the_style(
    content: tuple[int, ...], style: tuple[int, ...]
) -> None:
    x, y = random_input(*content), 3 * random_input(*style, seed=2) + 1
    c, s = (t.numpy().reshape(*t.shape[:2], -1) for t in (x, y))
    unit = (c - c.mean(2, keepdims=True)) / np.sqrt(c.var(2, keepdims=True) + 1e-5)
    want = unit * np.sqrt(s.var(2, keepdims=True) + 1e-5) + s.mean(2, keepdims=True)
    got = norms.AdaIN()(x, y)
    assert relative_error(torch.from_numpy(want.reshape(content)), got) < 1e-13
    mean, std = got.flatten(2).mean(-1), got.flatten(2).std(-1, correction=0)
    assert relative_error(y.flatten(2).mean(-1).expand_as(mean), mean) < 1e-13
    assert relative_error(y.flatten(2).std(-1, correction=0).expand_as(std), std) < 1e-4  # eps


def test_adaptive_layer_norm_equals_transformers() -> None:
    ours, theirs = randomised(norms.AdaLN(8, 8)), Qwen2_5_OmniAdaLayerNormZero_Final(8)
    # Scale and shift are the other way round there.
    rows = torch.cat([torch.arange(8, 16), torch.arange(8)])
    theirs.linear.weight.data.copy_(ours.modulation.weight[rows])
    theirs.linear.bias.data.copy_(ours.modulation.bias[rows])
    x, c = random_input(2, 5, 8, dtype=torch.float32), random_input(2, 8, dtype=torch.float32)
    assert relative_error(theirs(x, c), ours(x, c)) < 1e-6


def test_adaptive_layer_norm_zero_equals_transformers() -> None:
    ours, theirs = randomised(norms.AdaLNZero(8, 8)), Qwen2_5_OmniAdaLayerNormZero(8)
    theirs.linear.weight.data[:24] = ours.modulation.weight
    theirs.linear.bias.data[:24] = ours.modulation.bias
    x, c = random_input(2, 5, 8, dtype=torch.float32), random_input(2, 8, dtype=torch.float32)
    (want, want_gate), (got, gate) = theirs(x, c)[:2], ours(x, c)
    assert relative_error(want, got) < 1e-6
    assert relative_error(want_gate[:, None], gate) < 1e-6


def test_one_condition_for_all_tokens_or_one_each() -> None:
    module = randomised(norms.AdaLNZero(8, 5)).double()
    x, c = random_input(2, 3, 8), random_input(2, 5, seed=2)
    each = c[:, None].expand(2, 3, 5)
    assert relative_error(module(x, each)[0], module(x, c)[0]) < 1e-14
    single = module(x[:, 0], c)  # no token axis at all
    assert relative_error(module(x, c)[0][:, 0], single[0]) < 1e-14
    assert single[1].shape == (2, 8)


def test_adaptive_layer_norms_start_plain_with_a_closed_gate() -> None:
    x, c = random_input(2, 3, 8), random_input(2, 5, seed=2)
    plain = nn.functional.layer_norm(x, (8,), eps=1e-6)
    assert relative_error(plain, norms.AdaLN(8, 5).double()(x, c)) < 1e-15
    got, gate = norms.AdaLNZero(8, 5).double()(x, c)
    assert relative_error(plain, got) < 1e-15
    assert torch.equal(gate, torch.zeros(2, 1, 8, dtype=torch.float64))


@pytest.mark.parametrize("axis", [1, 2, -1])
def test_film_scales_and_shifts_the_channels(axis: int) -> None:
    module = randomised(norms.FiLM(6, 5, axis)).double()
    x, c = random_input(2, 6, 6, 6), random_input(2, 5, seed=2)
    w, b = (p.detach().numpy() for p in (module.modulation.weight, module.modulation.bias))
    gamma, beta = np.split(c.numpy() @ w.T + b, 2, axis=1)
    last = x.movedim(axis, -1).numpy()
    want = gamma[:, None, None] * last + beta[:, None, None]
    assert relative_error(torch.from_numpy(want).movedim(-1, axis), module(x, c)) < 1e-13
    fresh = norms.FiLM(6, 5, axis).double()
    assert torch.equal(fresh(x, torch.zeros_like(c)), x)


def nearest(mask: np.ndarray, height: int, width: int) -> np.ndarray:
    rows = np.arange(height) * mask.shape[2] // height
    columns = np.arange(width) * mask.shape[3] // width
    return mask[:, :, rows][:, :, :, columns]


def convolved(x: np.ndarray, conv: nn.Conv2d) -> np.ndarray:
    """A 3 × 3 convolution with zero padding, tap by tap."""
    w, b = (p.detach().numpy() for p in (conv.weight, conv.bias))
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
    out = np.zeros((len(x), len(w), *x.shape[2:])) + b[:, None, None]
    for i in range(3):
        for j in range(3):
            part = padded[:, :, i : i + x.shape[2], j : j + x.shape[3]]
            out += np.einsum("oc,nchw->nohw", w[:, :, i, j], part)
    return out


@pytest.mark.parametrize("size", [(4, 4), (2, 3), (8, 6)])
def test_spade_follows_its_formula(size: tuple[int, int]) -> None:
    module = randomised(norms.SPADE(6, 2, hidden=4)).double().train()
    x, mask = random_input(2, 6, 4, 4), random_input(2, 2, *size, seed=2)
    hidden = np.maximum(convolved(nearest(mask.numpy(), 4, 4), module.shared), 0)
    n = x.numpy()
    mean, var = n.mean((0, 2, 3), keepdims=True), n.var((0, 2, 3), keepdims=True)
    unit = (n - mean) / np.sqrt(var + 1e-5)
    want = unit * (1 + convolved(hidden, module.gamma)) + convolved(hidden, module.beta)
    assert relative_error(torch.from_numpy(want), module(x, mask)) < 1e-12


def test_spade_takes_another_norm() -> None:
    module = norms.SPADE(6, 2, hidden=4, norm=nn.InstanceNorm2d(6)).double()
    for conv in (module.gamma, module.beta):
        nn.init.zeros_(conv.weight), nn.init.zeros_(conv.bias)
    x, mask = random_input(2, 6, 4, 4), random_input(2, 2, 4, 4, seed=2)
    assert relative_error(nn.InstanceNorm2d(6)(x), module(x, mask)) < 1e-14


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: norms.AdaIN()(torch.ones(2, 3, 4), torch.ones(2, 4, 4)), "3 channels on axis 1"),
        (lambda: norms.AdaIN()(torch.ones(4, 3, 4), torch.ones(2, 3, 4)), "2 styles for 4"),
        (lambda: norms.AdaIN()(torch.ones(2, 3), torch.ones(2, 3)), "at least 3 axes"),
        (lambda: norms.AdaLN(8, 5)(torch.ones(2, 7), torch.ones(2, 5)), r"must be \[8\]"),
        (lambda: norms.AdaLN(8, 5)(torch.ones(2, 8), torch.ones(2, 4)), r"condition.*\[5\]"),
        (lambda: norms.FiLM(6, 5)(torch.ones(2, 5), torch.ones(2, 5)), "6 channels"),
        (lambda: norms.FiLM(6, 5)(torch.ones(2, 6), torch.ones(2, 6)), r"condition.*\[5\]"),
        (lambda: norms.FiLM(6, 5, channel_dim=0), "axis 0 holds the examples"),
        (lambda: norms.SPADE(6, 2, kernel_size=2), "must be odd"),
        (lambda: norms.AdaLN(8, 0), "condition_size is 0"),
    ],
)
def test_bad_arguments_are_refused(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
