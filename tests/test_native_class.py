"""The transformers class that computes what a changed model computes is found, and no other."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from helpers import relative_error
from small_transformers import LAYER_TO_RMS, fill_all, token_ids
from swapping import run64

import normswap as ns
from normswap.inputs import normalise_inputs
from normswap.native_class import _candidates, native_class

EXACT = 1e-10
TEXT: dict[str, Any] = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = token_ids(2, 7)
HINT = re.compile(r"computes exactly this result .* into ((\w+)\((\w+)\((.*)\)\))$")


def convert(name: str, *, shift: float = 0.0, **options: Any) -> tuple[Any, Any]:
    """A small model, its LayerNorms converted; their shifts are ``shift`` times random."""
    swap = {k: options.pop(k) for k in ("fold_affine", "untie", "where", "verify") if k in options}
    config = getattr(transformers, f"{name}Config")(**TEXT, **options)
    model = fill_all(getattr(transformers, f"{name}ForCausalLM")(config))
    for module in model.modules():
        bias = getattr(module, "bias", None)
        if "LayerNorm" in type(module).__name__ and bias is not None:
            bias.data.mul_(shift)
    return ns.swap_norms(model, LAYER_TO_RMS, {"input_ids": IDS}, method="exact", **swap)


def hints(report: Any) -> list[re.Match[str]]:
    return [found for note in report.notes if (found := HINT.search(note))]


def follow(hint: re.Match[str], new: Any) -> Any:
    """Do what the note says."""
    names = {name: getattr(transformers, name) for name in hint.group(2, 3)}
    native = eval(hint[1], names).double().eval()
    native.load_state_dict(new.state_dict(), strict=False)
    return native


@pytest.mark.parametrize("fold_affine", [False, True])
def test_converted_olmo_is_a_llama(fold_affine: bool) -> None:
    options = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    new, report = convert("Olmo", fold_affine=fold_affine, **options)
    (hint,) = hints(report)
    assert hint[2] == "LlamaForCausalLM"
    native = follow(hint, new)
    assert not any("LayerNorm" in type(m).__name__ for m in native.modules())
    long = token_ids(3, 40)
    assert relative_error(run64(new, long).logits, run64(native, long).logits) < EXACT


def test_base_model_is_found_as_the_one_with_a_head() -> None:
    model = fill_all(transformers.OlmoModel(transformers.OlmoConfig(**TEXT)))
    _, report = ns.swap_norms(model, LAYER_TO_RMS, {"input_ids": IDS}, method="exact")
    assert [hint[2] for hint in hints(report)] == ["LlamaModel"]


@pytest.mark.parametrize("untie", [False, True])
def test_tied_head_is_a_llama_only_if_no_op_is_added(untie: bool) -> None:
    new, report = convert("Olmo", tie_word_embeddings=True, untie=untie)
    found = hints(report)
    assert len(found) == untie
    for hint in found:
        assert relative_error(run64(new, IDS).logits, run64(follow(hint, new), IDS).logits) < EXACT


def test_biases_are_switched_on_in_the_other_config() -> None:
    new, report = convert("Jais2")
    (hint,) = hints(report)
    assert "attention_bias=True" in hint[4]
    assert "mlp_bias=True" in hint[4]
    assert relative_error(run64(new, IDS).logits, run64(follow(hint, new), IDS).logits) < EXACT


def test_shift_of_a_norm_has_no_native_class() -> None:
    assert not hints(convert("Jais2", shift=1.0)[1])


@pytest.mark.parametrize("partial", [0.25, 1.0])
def test_same_names_are_not_enough(partial: float) -> None:
    """StableLM rotates a part of each head; a Llama has the same tensors and rotates all."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": partial}
    _, report = convert("StableLm", rope_parameters=rope)
    assert bool(hints(report)) == (partial == 1.0)


def test_clip_that_the_inputs_do_not_reach_is_not_overlooked() -> None:
    _, report = convert("Olmo", clip_qkv=1e6)
    assert not hints(report)


def test_window_that_only_the_other_class_has_is_off() -> None:
    new, _ = convert("Olmo")
    windows = {
        candidate.class_name: candidate.settings["sliding_window"]
        for candidate in _candidates(new, 1e-5)
        if "sliding_window" in candidate.settings
    }
    assert "MistralForCausalLM" in windows
    assert not any(windows.values())


@pytest.mark.parametrize("name", ["Cohere", "Phi", "Starcoder2"])
def test_models_without_a_native_class_get_no_note(name: str) -> None:
    assert not hints(convert(name)[1])


def test_gpt2_gets_no_note() -> None:
    config = transformers.GPT2Config(vocab_size=30, n_embd=16, n_layer=2, n_head=2)
    model = fill_all(transformers.GPT2LMHeadModel(config))
    _, report = ns.swap_norms(model, LAYER_TO_RMS, {"input_ids": IDS}, untie=True)
    assert report.counts == {"exact": 5}
    assert not hints(report)


def test_model_with_a_norm_left_gets_no_note() -> None:
    assert not hints(convert("Olmo", where=lambda site: site.name != "model.norm")[1])


def test_nothing_is_claimed_unchecked() -> None:
    assert not hints(convert("Olmo", verify=False)[1])


def test_search_leaves_model_and_random_state_alone() -> None:
    new, report = convert("Olmo")
    assert hints(report)
    assert all(p.requires_grad for p in new.parameters())
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    assert native_class(report.plan, new, normalise_inputs({"input_ids": IDS}))
    assert torch.equal(torch.rand(1), expected)
    assert all(p.requires_grad for p in new.parameters())


def test_other_models_do_not_import_transformers() -> None:
    code = """
import sys, torch, normswap as ns
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))
new, report = ns.swap_norms(model.eval(), {nn.LayerNorm: nn.RMSNorm}, torch.randn(2, 4))
assert report.counts == {"exact": 1}, report
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
