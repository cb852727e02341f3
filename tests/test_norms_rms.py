"""RMS norms, norms by length and by other powers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from normswap import norms

EPS = [None, 0.0, 1e-6, 1e-3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("eps", EPS, ids=str)
@pytest.mark.parametrize("shape", [(8,), (3, 8)], ids=str)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms_norm_equals_torch(
    shape: tuple[int, ...], eps: float | None, dtype: torch.dtype, size: float
) -> None:
    ours = randomised(norms.RMSNorm(shape, eps)).to(dtype)
    theirs = nn.RMSNorm(shape, eps).to(dtype)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = size * random_input(2, 3, 8, dtype=dtype)
    x.requires_grad_()
    assert relative_error(theirs(x), ours(x)) < (1e-6 if dtype == torch.float32 else 1e-14)
    grads = [torch.autograd.grad(m(x).square().sum(), [x, m.weight]) for m in (theirs, ours)]
    assert relative_error(grads[0], grads[1]) < (2e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("eps", [None, 1e-6], ids=str)
def test_rms_norm_of_halves_equals_torch(dtype: torch.dtype, eps: float | None) -> None:
    ours = randomised(norms.RMSNorm(8, eps)).to(dtype)
    theirs = nn.RMSNorm(8, eps).to(dtype)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = 1e-3 * random_input(2, 3, 8, dtype=dtype)
    unit = 2 ** -(10 if dtype == torch.float16 else 7)
    assert relative_error(theirs(x), ours(x)) <= unit


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("parameters", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_form_for_gpus_gives_the_same(
    dtype: torch.dtype, parameters: torch.dtype, bias: bool
) -> None:
    module = randomised(norms.RMSNorm((3, 8), None, bias=bias)).to(parameters)
    x = random_input(2, 3, 8, dtype=dtype)
    want, got = module._by_length(x), module._by_kernel(x)
    assert got.dtype == dtype
    assert relative_error(want, got) < (1e-6 if dtype == torch.float32 else 2**-8)


def test_rms_norm_equals_llama_and_t5() -> None:
    x = random_input(2, 3, 8, dtype=torch.float32)
    ours = randomised(norms.RMSNorm(8))
    for theirs in (LlamaRMSNorm(8), T5LayerNorm(8)):
        theirs.load_state_dict(ours.state_dict(), strict=True)
        assert theirs.variance_epsilon == ours.variance_epsilon
        assert relative_error(theirs(x), ours(x)) < 1e-6


def test_rms_norm_with_a_bias_is_the_layer_norm_of_a_centred_vector() -> None:
    ours, theirs = randomised(norms.RMSNorm(8, 1e-5, bias=True).double()), nn.LayerNorm(8).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = random_input(2, 3, 8)
    assert relative_error(theirs(x), ours(x - x.mean(-1, keepdim=True))) < 1e-14


@pytest.mark.parametrize(
    "kind", [norms.RMSNorm, norms.OffsetRMSNorm, norms.PartialRMSNorm, norms.CRMSNorm]
)
def test_a_zero_vector_has_a_finite_gradient(kind: type[nn.Module]) -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    y = kind(8)(x)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, torch.zeros(2, 8))
    assert torch.allclose(grad, torch.full((2, 8), 1e3))


@pytest.mark.parametrize(
    ("width", "p", "entries"),
    [(16, 0.0625, 1), (17, 0.0625, 2), (768, 0.0625, 48), (100, 0.07, 7), (8, 1.0, 8), (8, 0.3, 3)],
)
def test_partial_rms_norm_reads_the_first_entries(width: int, p: float, entries: int) -> None:
    module = randomised(norms.PartialRMSNorm(width, p, bias=True).double())
    x = random_input(2, 3, width)
    n = x.numpy()
    size = np.sqrt((n[..., :entries] ** 2).mean(-1, keepdims=True) + 1e-6)
    w, b = (t.detach().numpy() for t in (module.weight, module.bias))
    assert module.partial_size == entries
    assert relative_error(torch.from_numpy(n / size * w + b), module(x)) < 1e-13


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_offset_rms_norm_equals_gemma(dtype: torch.dtype) -> None:
    ours, theirs = randomised(norms.OffsetRMSNorm(64)).to(dtype), GemmaRMSNorm(64).to(dtype)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = random_input(2, 3, 64, dtype=dtype)
    limit = 1e-6 if dtype == torch.float32 else 2**-8
    assert relative_error(theirs(x), ours(x)) < limit
    fresh = norms.OffsetRMSNorm([3, 64])
    assert torch.equal(fresh.weight, torch.zeros(3, 64))


def test_compressed_rms_norm_is_that_of_the_whole_vector() -> None:
    u = random_input(4, 7)
    whole = torch.cat([u, -u.sum(-1, keepdim=True)], -1)
    want = nn.functional.rms_norm(whole, (8,), None, 1e-6)
    assert relative_error(want[:, :-1], norms.CRMSNorm(7)(u)) < 1e-14
    assert relative_error(nn.functional.layer_norm(whole, (8,), eps=1e-6), want) < 1e-13


# Length and powers


def test_scale_norm_has_one_learned_length() -> None:
    module = norms.ScaleNorm(8).double()
    assert module.weight.item() == pytest.approx(math.sqrt(8))
    nn.init.constant_(module.weight, -1.7)
    x = random_input(2, 3, 8)
    n = x.numpy()
    want = -1.7 * n / np.linalg.norm(n, axis=-1, keepdims=True)
    assert relative_error(torch.from_numpy(want), module(x)) < 1e-14
    tiny = 1e-7 * x  # shorter than eps: clamped, not added
    assert relative_error(-1.7e5 * tiny, module(tiny)) < 1e-14
    assert list(norms.ScaleNorm(8, scale=2.5).state_dict().values()) == [torch.tensor([2.5])]


def test_scale_norm_is_an_rms_norm_without_eps() -> None:
    scale, rms = norms.ScaleNorm(8).double(), norms.RMSNorm(8, 0.0).double()
    nn.init.constant_(scale.weight, 3.0)
    nn.init.constant_(rms.weight, 3.0 / math.sqrt(8))
    x = random_input(2, 3, 8)
    assert relative_error(rms(x), scale(x)) < 1e-14
    both = norms.ScaleNorm([3, 8], dtype=torch.float64)
    want = math.sqrt(24) * x / x.flatten(1).norm(dim=1)[:, None, None]
    assert relative_error(want, both(x)) < 1e-14


@pytest.mark.parametrize("p", [1, 1.5, 2, 3, 4.0, math.inf])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_lp_norm_follows_its_formula(p: float, size: float) -> None:
    module = randomised(norms.LpNorm(8, p).double())
    x = size * random_input(2, 3, 8)
    n = np.abs(x.numpy())
    length = n.max(-1, keepdims=True) + 1e-6
    if math.isfinite(p):
        length = ((n**p).mean(-1, keepdims=True) + 1e-6) ** (1 / p)
    w, b = (t.detach().numpy() for t in (module.weight, module.bias))
    assert relative_error(torch.from_numpy(x.numpy() / length * w + b), module(x)) < 1e-13
    if p == 2:
        rms = norms.RMSNorm(8, bias=True).double()
        rms.load_state_dict(module.state_dict(), strict=True)
        assert relative_error(rms(x), module(x)) < 1e-14


# FixNorm


def cosines(x: Tensor, table: Tensor) -> Tensor:
    return nn.functional.cosine_similarity(x[:, None], table[None], dim=-1)


def test_fix_norm_and_scale_norm_give_cosines() -> None:
    table = nn.Linear(8, 5, bias=False).double()
    stored = table.weight.detach().clone()
    norms.fix_norm(table)
    x = random_input(3, 8)
    logits = table(norms.ScaleNorm(8, scale=10.0).double()(x))
    assert relative_error(10 * cosines(x, stored), logits) < 1e-13
    assert torch.equal(table.parametrizations.weight.original, stored)


def test_fix_norm_keeps_padding_at_zero_and_ties_tied() -> None:
    embedding, head = nn.Embedding(5, 8, padding_idx=2), nn.Linear(8, 5, bias=False)
    head.weight = embedding.weight
    norms.fix_norm(embedding, scale=2.0)
    norms.fix_norm(head, scale=2.0)
    stored = embedding.parametrizations.weight.original
    assert head.parametrizations.weight.original is stored
    lengths = embedding(torch.arange(5)).norm(dim=-1)
    assert torch.allclose(lengths, torch.tensor([2.0, 2.0, 0.0, 2.0, 2.0]))
    assert torch.equal(head.weight, embedding.weight)
    head.weight = torch.ones(5, 8)
    assert torch.equal(stored, torch.ones(5, 8))


def test_tables_that_cannot_be_fixed_are_refused() -> None:
    with pytest.raises(ValueError, match="max_norm"):
        norms.fix_norm(nn.Embedding(5, 8, max_norm=1.0))
    with pytest.raises(ValueError, match="no matrix"):
        norms.fix_norm(nn.Conv2d(3, 4, 3))
    with pytest.raises(ValueError, match="no matrix"):
        norms.fix_norm(nn.Linear(3, 4), "table")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: norms.PartialRMSNorm(8, 0.0), "p is 0.0"),
        (lambda: norms.PartialRMSNorm(8, 1.5), "p is 1.5"),
        (lambda: norms.PartialRMSNorm([3, 8]), "needs one axis"),
        (lambda: norms.CRMSNorm([3, 8]), "has one axis"),
        (lambda: norms.LpNorm(8, 0.5), "at least 1"),
        (lambda: norms.LpNorm(8, math.nan), "at least 1"),
        (lambda: norms.RMSNorm(8)(torch.ones(2, 7)), r"its last axes must be \[8\]"),
        (lambda: norms.RMSNorm([3, 8])(torch.ones(8)), r"its last axes must be \[3, 8\]"),
    ],
)
def test_bad_arguments_are_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]
