"""Residual blocks: the formulas, initial equalities, and what happens around a call."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from torch import Tensor, nn

from normswap import norms
from normswap.residual import (
    DeepNorm,
    HyperConnection,
    OutputNorm,
    PostNorm,
    PreNorm,
    SandwichNorm,
    expand_streams,
    merge_streams,
)


class Branch(nn.Module):
    """A linear layer with a scale that comes with the call."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor, scale: float = 1.0, *, shift: float = 0.0) -> Tensor:
        return self.linear(x) * scale + shift


def layer_norm(x: np.ndarray, norm: nn.LayerNorm) -> np.ndarray:
    unit = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    return unit * norm.weight.detach().numpy() + norm.bias.detach().numpy()


def blocks() -> dict[str, nn.Module]:
    built: dict[str, nn.Module] = {
        "pre": PreNorm(Branch(), nn.LayerNorm(6)),
        "post": PostNorm(Branch(), nn.LayerNorm(6)),
        "output": OutputNorm(Branch(), nn.LayerNorm(6)),
        "sandwich": SandwichNorm(Branch(), nn.LayerNorm(6), nn.LayerNorm(6)),
        "deep": DeepNorm(Branch(), nn.LayerNorm(6), alpha=1.7),
    }
    return {name: randomised(block).double() for name, block in built.items()}


@pytest.mark.parametrize("name", list(blocks()))
def test_blocks_follow_their_formulas(name: str) -> None:
    block, x = blocks()[name], random_input(2, 3, 6)
    w, b = (t.detach().numpy() for t in (block.function.linear.weight, block.function.linear.bias))

    def f(z: np.ndarray) -> np.ndarray:
        return (z @ w.T + b) * 2.0 + 0.5

    def p(z: np.ndarray) -> np.ndarray:
        return layer_norm(z, block.norm)

    n = x.numpy()
    want = {
        "pre": lambda: n + f(p(n)),
        "post": lambda: p(n + f(n)),
        "output": lambda: n + p(f(n)),
        "sandwich": lambda: n + layer_norm(f(p(n)), block.output_norm),
        "deep": lambda: p(1.7 * n + f(n)),
    }[name]()
    assert relative_error(torch.from_numpy(want), block(x, 2.0, shift=0.5)) < 1e-13


def test_rotated_norms_turn_post_into_pre_exactly() -> None:
    """`h = P(u)`, `u' = h + f(h)`: the same function written the other way round."""
    post = [blocks()["post"] for _ in range(3)]
    x = random_input(2, 3, 6)
    y, h = x, x
    for block in post:
        y = block(y)
    for block in post:
        h = block.norm(h + block.function(h))
    assert torch.equal(y, h)


@pytest.mark.parametrize("name", [*blocks(), "hyper"])
def test_blocks_copy_pickle_export_and_compile(name: str) -> None:
    hyper = HyperConnection(Branch(), norms.RMSNorm(6), 6, streams=3, layer=1)
    block = randomised(hyper).double() if name == "hyper" else blocks()[name]
    x = random_input(2, 3, 6)
    want = block(x)
    assert torch.equal(want, pickle.loads(pickle.dumps(block))(x))
    assert torch.equal(want, copy.deepcopy(block)(x))
    assert relative_error(want, torch.export.export(block, (x,)).module()(x)) < 1e-14
    assert relative_error(want, torch.compile(block, backend="eager", fullgraph=True)(x)) < 1e-14
    assert torch.autograd.gradcheck(block, (x.requires_grad_(),), fast_mode=True)


@pytest.mark.parametrize("name", list(blocks()))
def test_half_streams_stay_half(name: str) -> None:
    block = blocks()[name].bfloat16()
    assert block(random_input(2, 3, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


# Hyper-connections


def test_untrained_hyper_connections_are_pre_norm_blocks() -> None:
    pre = [randomised(PreNorm(Branch(), nn.LayerNorm(6)), seed).double() for seed in range(5)]
    for dynamic in (False, True):
        hyper = [
            HyperConnection(b.function, b.norm, 6, streams=3, layer=i, dynamic=dynamic).double()
            for i, b in enumerate(pre)
        ]
        x = random_input(2, 4, 6)
        y, streams = x, expand_streams(x, 3)
        for block, connection in zip(pre, hyper, strict=True):
            y, streams = block(y), connection(streams)
        assert streams.shape == (2, 4, 3, 6)
        assert relative_error(y, merge_streams(streams, mean=True)) < 1e-13
        assert relative_error(3 * y, merge_streams(streams)) < 1e-13
        # Behind the sum, a norm's eps grows with the square of the number of streams.
        norm, wide = norms.RMSNorm(6, 1e-2).double(), norms.RMSNorm(6, 9e-2).double()
        assert relative_error(norm(y), wide(merge_streams(streams))) < 1e-13


@pytest.mark.parametrize("dynamic", [False, True])
def test_hyper_connections_follow_the_paper(dynamic: bool) -> None:
    block = HyperConnection(Branch(), nn.LayerNorm(6), 6, streams=3, layer=4, dynamic=dynamic)
    fresh = block.alpha.detach().clone()
    want_alpha = torch.zeros(3, 4)
    want_alpha[1, 0] = 1.0  # 4 mod 3
    want_alpha[:, 1:] = torch.eye(3)
    assert torch.equal(fresh, want_alpha)
    block = randomised(block).double()
    h = random_input(3, 6)
    alpha, beta = (t.detach().numpy().copy() for t in (block.alpha, block.beta))
    if dynamic:
        unit = layer_norm(h.numpy(), block.stream_norm)
        for target, name in ((alpha, "alpha"), (beta, "beta")):
            weight = block.get_parameter(f"{name}_weight").detach().numpy()
            scale = block.get_parameter(f"{name}_scale").detach().numpy()
            target[...] = target + scale * np.tanh(unit @ weight)
    read = alpha[:, 0] @ h.numpy()
    w, b = (t.detach().numpy() for t in (block.function.linear.weight, block.function.linear.bias))
    out = layer_norm(read, block.norm) @ w.T + b
    want = alpha[:, 1:].T @ h.numpy() + beta[:, None] * out
    assert relative_error(torch.from_numpy(want), block(h)) < 1e-12


def test_hyper_connections_start_with_small_dynamic_weights() -> None:
    block = HyperConnection(Branch(), nn.LayerNorm(6), 6)
    assert torch.equal(block.alpha_scale, torch.tensor([0.01]))
    assert torch.equal(block.beta_scale, torch.tensor([0.01]))
    assert not block.alpha_weight.any()
    assert not block.beta_weight.any()
    static = HyperConnection(Branch(), nn.LayerNorm(6), 6, dynamic=False)
    own = [n for n, _ in static.named_parameters(recurse=False)]
    assert own == ["alpha", "beta"]
    assert repr(static).startswith("HyperConnection(\n  6, streams=4, layer=0, dynamic=False\n")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must end in \[4, 6\], see expand_streams"):
        HyperConnection(Branch(), nn.LayerNorm(6), 6)(torch.ones(2, 6))
    with pytest.raises(ValueError, match="streams is 0"):
        HyperConnection(Branch(), nn.LayerNorm(6), 6, streams=0)
    with pytest.raises(ValueError, match="alpha is 0"):
        DeepNorm(Branch(), nn.LayerNorm(6), alpha=0)
