"""No weight decay on the parameters of norms, whatever their class; every parameter once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from normswap import norms
from normswap.param_groups import no_decay_groups


def names(model: nn.Module, weight_decay: float = 0.1) -> tuple[set[str], set[str]]:
    """Names of the parameters with and without decay."""
    known = {id(p): n for n, p in model.named_parameters()}
    decayed, kept = no_decay_groups(model, weight_decay)
    assert decayed["weight_decay"] == weight_decay
    assert kept["weight_decay"] == 0.0
    sets = [{known[id(p)] for p in group["params"]} for group in (decayed, kept)]
    assert len(sets[0]) + len(sets[1]) == len(decayed["params"]) + len(kept["params"])
    assert not sets[0] & sets[1]
    return sets[0], sets[1]


def test_norms_of_torch_and_of_the_catalogue() -> None:
    parts: dict[str, nn.Module] = {
        "conv": nn.Conv2d(4, 4, 3),
        "batch": nn.BatchNorm2d(4),
        "group": nn.GroupNorm(2, 4),
        "instance": nn.InstanceNorm2d(4, affine=True),
        "whole": nn.LayerNorm([4, 3, 3]),  # three axes, a norm all the same
        "rms": nn.RMSNorm(4),
        "ours": norms.RMSNorm(4, bias=True),
        "scale": norms.ScaleNorm(4),
        "dyt": norms.DyT(4),
        "film": norms.FiLM(4, 3),
        "scaled": norms.scaled_standardise_weight(nn.Conv2d(4, 4, 3)),
    }
    decayed, kept = names(nn.ModuleDict(parts))
    assert decayed == {
        "conv.weight",
        "conv.bias",
        "film.modulation.weight",
        "film.modulation.bias",
        "scaled.bias",
        "scaled.parametrizations.weight.original",
    }
    assert kept == {
        "scaled.parametrizations.weight.0.gain",
        "dyt.alpha",
        *(f"{name}.weight" for name in parts if name not in ("conv", "film", "scaled")),
        *(f"{name}.bias" for name in ("batch", "group", "instance", "whole", "ours", "dyt")),
    }


def test_norms_of_other_libraries_are_told_by_name() -> None:
    llama = LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    decayed, kept = names(AutoModelForCausalLM.from_config(llama))
    assert kept == {
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.norm.weight",
    }
    assert {"lm_head.weight", "model.embed_tokens.weight"} < decayed

    gpt2 = GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=2)
    decayed, kept = names(AutoModelForCausalLM.from_config(gpt2))
    assert kept == {
        f"transformer.{n}.{p}" for n in ("h.0.ln_1", "h.0.ln_2", "ln_f") for p in ("weight", "bias")
    }
    assert "transformer.h.0.attn.c_attn.bias" in decayed


class Gain(nn.Module):
    """A norm whose class does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(4))
        self.mix = nn.Parameter(torch.ones(4, 4))


def test_a_name_in_the_model_counts_for_vectors_of_other_classes_only() -> None:
    parts = {"ln_1": Gain(), "bn": Gain(), "plan_1": Gain(), "norm_proj": nn.Linear(4, 4)}
    decayed, kept = names(nn.ModuleDict(parts))
    assert kept == {"ln_1.g", "bn.g"}
    assert {"norm_proj.bias", "ln_1.mix", "plan_1.g"} < decayed


def test_shared_and_frozen_parameters() -> None:
    model = nn.ModuleDict(
        {"linear": nn.Linear(4, 4), "norm": nn.LayerNorm(4), "other": nn.LayerNorm(4)}
    )
    model["linear"].bias = model["norm"].bias  # one parameter, two owners: the norm decides
    model["other"] = model["norm"]
    model["norm"].weight.requires_grad_(False)
    decayed, kept = names(model)
    assert decayed == {"linear.weight"}
    assert kept == {"linear.bias"}  # its first name


def test_an_optimizer_takes_the_groups_and_leaves_norms_undecayed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    optimizer = torch.optim.SGD(no_decay_groups(model, 0.5), lr=1.0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert torch.equal(model[0].weight, 0.5 * before["0.weight"])
    assert torch.equal(model[1].weight, before["1.weight"])
    bare = torch.optim.AdamW(no_decay_groups(nn.Linear(4, 4), 0.5))
    assert bare.param_groups[1]["params"] == []
    with pytest.raises(ValueError, match="must not be negative"):
        no_decay_groups(model, -0.1)
