"""Initialisations that go with a placement: what is drawn, how wide, and what stays."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_state_equal, state_copy
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import normswap as ns
from normswap.init import deepnorm_scales

IDS = {"input_ids": torch.arange(2, 12)[None]}
BETA = deepnorm_scales(encoder_layers=2)[0]
WIDTH = 128


def bert() -> BertModel:
    sizes: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 256, "vocab_size": 50}
    return BertModel(BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=4)).eval()


def xavier(weight: Tensor, gain: float) -> float:
    return gain * math.sqrt(2 / sum(weight.shape))


def assert_spread(weight: Tensor, expected: float) -> None:
    assert float(weight.std()) == pytest.approx(expected, rel=0.05)
    assert abs(float(weight.mean())) < 0.05 * expected


def branches(model: nn.Module) -> dict[str, Tensor]:
    """The matrices of the layers."""
    named = model.named_parameters()
    return {n: p.detach() for n, p in named if p.ndim == 2 and ("layer." in n or ".h." in n)}


def test_small_draws_every_matrix_of_a_branch_and_nothing_else() -> None:
    torch.manual_seed(0)
    model = bert()
    state = state_copy(model)
    new, report = ns.convert_placement(model, "deepnorm", IDS, reinit="small")
    assert_state_equal(model, state)
    drawn = branches(new)
    assert len(drawn) == 12
    for weight in drawn.values():
        assert_spread(weight, math.sqrt(2 / (5 * WIDTH)))
    for name, tensor in new.state_dict().items():
        if name not in drawn:
            assert torch.equal(tensor, state[name]), name
    assert "12 matrices were drawn anew (small)" in report.notes[0]


def test_deepnorm_scales_all_but_query_and_key() -> None:
    torch.manual_seed(0)
    new, report = ns.convert_placement(bert(), "deepnorm", IDS, reinit="deepnorm")
    assert BETA is not None
    for name, weight in branches(new).items():
        gain = 1.0 if "query" in name or "key" in name else BETA.beta
        assert_spread(weight, xavier(weight, gain))
    assert report.verification.passed  # DeepNorm of the post-norm model that was drawn


@pytest.mark.parametrize("transposed", [True, False])
def test_packed_projections_are_drawn_in_parts(transposed: bool) -> None:
    torch.manual_seed(0)
    if transposed:  # Conv1D holds [in, out]
        config = GPT2Config(n_embd=WIDTH, n_layer=2, n_head=4, vocab_size=50)
        new, _ = ns.convert_placement(
            GPT2LMHeadModel(config).eval(), "post", IDS, reinit="deepnorm"
        )
        parts = new.transformer.h[0].attn.c_attn.weight.detach().chunk(3, 1)
    else:
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).eval()
        new, _ = ns.convert_placement(
            model, "deepnorm", torch.randn(1, 5, WIDTH), reinit="deepnorm"
        )
        parts = new.layers[0].self_attn.in_proj_weight.detach().chunk(3)
    assert BETA is not None
    for part, gain in zip(parts, (1.0, 1.0, BETA.beta), strict=True):
        assert_spread(part, xavier(part, gain))


def test_trained_weights_are_kept_unless_asked_for() -> None:
    model = bert()
    new, _ = ns.convert_placement(model, "deepnorm", IDS)
    before = branches(model)
    assert all(torch.equal(weight, before[name]) for name, weight in branches(new).items())


def test_failure_puts_the_old_weights_back() -> None:
    model = bert()
    state = state_copy(model)
    with pytest.raises(ns.RefusedError, match="already"):
        ns.convert_placement(model, "post", IDS, reinit="small", inplace=True)
    assert_state_equal(model, state)
    with pytest.raises(ns.NormswapError, match="reinit='large' is not known"):
        ns.convert_placement(model, "deepnorm", IDS, reinit="large")
