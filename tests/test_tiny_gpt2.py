"""The shipped GPT-2: its held-out loss before and after LayerNorm → RMSNorm and affine folding."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import relative_error, run
from safetensors.torch import load_file
from swapping import run64
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import normswap as ns

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHECKPOINT = EXAMPLES / "checkpoints" / "tiny_gpt2"
RECORD = json.loads((CHECKPOINT / "training.json").read_text("utf-8"))
LOSS = 1e-9
LOGITS = 1e-10
NORMS = [f"transformer.h.{i}.ln_{k}" for i in range(3) for k in (1, 2)] + ["transformer.ln_f"]
TO_RMS = {nn.LayerNorm: nn.RMSNorm}


def exact_swap(**options: Any) -> Callable[[nn.Module, Tensor], tuple[Any, Any]]:
    return lambda model, ids: ns.swap_norms(model, TO_RMS, ids, method="exact", **options)


def affine_fold(**options: Any) -> Callable[[nn.Module, Tensor], tuple[Any, Any]]:
    return lambda model, ids: ns.fold_affine(model, ids, **options)


MODES = {
    "rms": exact_swap(),
    "rms-folded": exact_swap(fold_affine=True),
    "rms-untied": exact_swap(untie=True),
    "rms-folded-untied": exact_swap(fold_affine=True, untie=True),
    "kept-class": exact_swap(keep_class=True),
    "kept-class-untied": exact_swap(keep_class=True, untie=True),
    "affine": affine_fold(),
    "affine-untied": affine_fold(untie=True),
    "scale": affine_fold(scale_only=True),
    "scale-untied": affine_fold(scale_only=True, untie=True),
}
UNTIED = [mode for mode in MODES if mode.endswith("untied")]
TIED = [mode for mode in MODES if mode not in UNTIED]
RMS = [mode for mode in MODES if mode.startswith("rms")]
SAME_CLASS = [mode for mode in MODES if mode.startswith(("kept-class", "scale"))]


@cache
def original() -> Any:
    """In float64, where a right edit of the weights differs by rounding only."""
    return GPT2LMHeadModel.from_pretrained(CHECKPOINT).double().eval()


@cache
def windows() -> Tensor:
    """The held-out bytes [N, context]."""
    text = (CHECKPOINT / "held_out.txt").read_bytes()
    context = original().config.n_positions
    return torch.tensor(list(text)[: len(text) // context * context]).view(-1, context)


def few_windows() -> Tensor:
    """An eighth of them, from all over the text."""
    return windows()[::8].contiguous()


@cache
def converted(mode: str) -> tuple[Any, Any]:
    return MODES[mode](original(), windows()[:2])


def logits_and_loss(model: nn.Module) -> tuple[Tensor, float]:
    logits = run64(model, few_windows()).logits
    assert logits.dtype == torch.float64
    return logits, cross_entropy(logits, few_windows())


def cross_entropy(logits: Tensor, ids: Tensor) -> float:
    """Nats a byte, over every byte but the first of each window."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


@cache
def expected() -> tuple[Tensor, float]:
    return logits_and_loss(original())


def norms_of(model: nn.Module) -> dict[str, Any]:
    return {name: model.get_submodule(name) for name in NORMS}


# The checkpoint


def test_recorded_loss_is_what_the_shipped_network_reaches() -> None:
    network = GPT2LMHeadModel.from_pretrained(CHECKPOINT).eval()
    loss = cross_entropy(run(network, windows()).logits, windows())
    assert loss == pytest.approx(RECORD["held_out_loss"], rel=1e-5)
    assert loss < 0.5 * RECORD["unigram_loss"]
    assert sum(p.numel() for p in network.parameters()) == RECORD["parameters"]


def test_every_norm_of_the_network_was_trained_away_from_neutral() -> None:
    for name, norm in norms_of(original()).items():
        assert norm.weight.std() > 0.05, name
        assert norm.bias.abs().mean() > 0.02, name


def test_network_has_a_tied_head_and_is_small() -> None:
    network = original()
    assert network.config.tie_word_embeddings
    assert network.lm_head.weight is network.transformer.wte.weight
    assert (CHECKPOINT / "model.safetensors").stat().st_size < 1_000_000
    assert (CHECKPOINT / "held_out.txt").stat().st_size == RECORD["held_out"] < 100_000


def test_no_paragraph_is_both_trained_on_and_held_out() -> None:
    split_text = runpy.run_path(str(EXAMPLES / "training" / "train_gpt2_text.py"))["split_text"]
    trained_on, held_out = (set(text.split(b"\n\n")) for text in split_text())
    assert len(trained_on) > 5 * len(held_out) > 0
    assert not trained_on & held_out


# In memory


@pytest.mark.parametrize("mode", MODES)
def test_held_out_loss_and_logits_stay(mode: str) -> None:
    new, report = converted(mode)
    assert {site.name for site in report.sites} == set(NORMS)
    assert all(site.status in ("exact", "refused") for site in report.sites)
    assert all(site.reason and site.detail for site in report.sites if site.status == "refused")
    assert report.verification.passed
    logits, loss = logits_and_loss(new)
    assert abs(loss - expected()[1]) < LOSS
    assert relative_error(expected()[0], logits) < LOGITS


@pytest.mark.parametrize("mode", MODES)
def test_original_is_untouched(mode: str) -> None:
    converted(mode)
    for name, tensor in GPT2LMHeadModel.from_pretrained(CHECKPOINT).state_dict().items():
        assert torch.equal(original().state_dict()[name], tensor.double()), name
    assert original().config.tie_word_embeddings


@pytest.mark.parametrize("mode", TIED)
def test_tied_table_is_unchanged_bit_for_bit(mode: str) -> None:
    new, _ = converted(mode)
    assert new.config.tie_word_embeddings
    assert new.lm_head.weight is new.transformer.wte.weight
    assert torch.equal(new.transformer.wte.weight, original().transformer.wte.weight)


@pytest.mark.parametrize("mode", UNTIED)
def test_untied_head_has_a_table_of_its_own_and_the_config_says_so(mode: str) -> None:
    new, _ = converted(mode)
    assert not new.config.tie_word_embeddings
    assert new.lm_head.weight.data_ptr() != new.transformer.wte.weight.data_ptr()
    new.tie_weights()
    assert new.lm_head.weight is not new.transformer.wte.weight


@pytest.mark.parametrize("mode", RMS)
def test_no_layer_norm_is_left(mode: str) -> None:
    new, report = converted(mode)
    assert report.counts == {"exact": len(NORMS)}
    assert not any(isinstance(module, nn.LayerNorm) for module in new.modules())


def test_one_centring_op_stands_in_for_the_tied_table() -> None:
    hooked = {
        mode: [name for name, module in converted(mode)[0].named_modules() if hooks_of(module)]
        for mode in RMS
    }
    assert len(hooked["rms"]) == len(hooked["rms-folded"]) == 1
    assert hooked["rms-untied"] == hooked["rms-folded-untied"] == []


def hooks_of(module: nn.Module) -> list[Any]:
    return [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]


def test_untied_table_of_the_stream_has_zero_mean_and_the_head_keeps_the_old_one() -> None:
    new, _ = converted("rms-untied")
    old = original().transformer.wte.weight
    table = new.transformer.wte.weight
    torch.testing.assert_close(table, old - old.mean(1, keepdim=True), rtol=0, atol=1e-14)
    assert table.mean(1).abs().max() < 1e-14
    assert torch.equal(new.lm_head.weight, old)


def test_folded_norms_are_plain_ones() -> None:
    for mode in ("rms-folded", "rms-folded-untied"):
        for name, norm in norms_of(converted(mode)[0]).items():
            if mode == "rms-folded" and name == "transformer.ln_f":
                # The tied head cannot take gamma without changing the embedding.
                assert torch.equal(norm.weight, original().transformer.ln_f.weight)
                continue
            assert type(norm) is nn.RMSNorm, name
            assert norm.weight is None or torch.equal(norm.weight, torch.ones_like(norm.weight))


def test_norms_of_the_kept_class_are_neutral() -> None:
    for name, norm in norms_of(converted("kept-class")[0]).items():
        assert type(norm) is nn.LayerNorm, name
        if name == "transformer.ln_f":
            continue
        assert torch.equal(norm.weight, torch.ones_like(norm.weight)), name
        assert not norm.bias.any(), name


@pytest.mark.parametrize("mode", ["kept-class", "kept-class-untied"])
def test_input_that_is_called_centred_has_no_mean(mode: str) -> None:
    new, report = converted(mode)
    for site in report.sites:
        if site.action.startswith("input centred"):
            x = input_of(new, site.name)
            assert x.mean(-1).abs().max() < 1e-12 * x.std(), site


def input_of(model: nn.Module, name: str) -> Tensor:
    """What a module of the model is given for two windows."""
    seen: list[Tensor] = []
    hook = model.get_submodule(name).register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    try:
        run64(model, windows()[:2])
    finally:
        hook.remove()
    return seen[0]


def test_tied_head_blocks_the_fold_of_the_final_norm_alone() -> None:
    for mode in ("affine", "scale"):
        refused = {s.name: s.reason for s in converted(mode)[1].sites if s.status == "refused"}
        assert refused == {"transformer.ln_f": "shared"}
    for mode in ("affine-untied", "scale-untied"):
        assert converted(mode)[1].counts == {"exact": len(NORMS)}


@pytest.mark.parametrize("mode", SAME_CLASS)
def test_kept_class_has_the_tensors_of_the_original(mode: str) -> None:
    new, _ = converted(mode)
    assert type(new) is GPT2LMHeadModel
    shapes = {name: tensor.shape for name, tensor in original().state_dict().items()}
    assert {name: tensor.shape for name, tensor in new.state_dict().items()} == shapes
    assert not any(hooks_of(module) for module in new.modules())


def test_float32_weights_give_the_loss_too() -> None:
    network = GPT2LMHeadModel.from_pretrained(CHECKPOINT).eval()
    for convert in MODES.values():
        new, _ = convert(network, windows()[:2])
        assert {p.dtype for p in new.parameters()} == {torch.float32}
        loss = cross_entropy(run(new, few_windows()).logits, few_windows())
        assert loss == pytest.approx(expected()[1], abs=1e-5)


# From a directory, in a new process


READ_BY_NORMSWAP = """
import sys
from pathlib import Path
import normswap as ns
import torch
from normswap.precision import true_float64
from safetensors.torch import load_file, save_file

ids = load_file(sys.argv[1])["ids"]
for directory in map(Path, sys.argv[2:]):
    model = ns.load(directory)
    head, table = model.lm_head.weight, model.transformer.wte.weight
    with true_float64():
        logits = model(ids).logits
    tied = torch.tensor(head.data_ptr() == table.data_ptr())
    read = {"logits": logits.clone(), "table": table.detach().clone(), "tied": tied}
    save_file(read, directory.with_suffix(".normswap"))
"""

READ_BY_TRANSFORMERS = """
import sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ids = load_file(sys.argv[1])["ids"]
for directory in map(Path, sys.argv[2:]):
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()
    except Exception:
        continue
    with torch.inference_mode():
        logits = model(ids).logits
    tied = torch.tensor(model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr())
    save_file({"logits": logits.clone(), "tied": tied}, directory.with_suffix(".transformers"))
assert "normswap" not in sys.modules
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a directory for each mode, and beside it what a new process read from it."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("gpt2")
    for mode in MODES:
        new, report = converted(mode)
        ns.save(new, folder / mode, report)
    save_file({"ids": few_windows()}, folder / "ids.safetensors")
    for code in (READ_BY_NORMSWAP, READ_BY_TRANSFORMERS):
        arguments = [str(folder / "ids.safetensors"), *(str(folder / mode) for mode in MODES)]
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        assert done.returncode == 0, done.stderr
    return folder


def assert_read(read: dict[str, Tensor]) -> None:
    assert abs(cross_entropy(read["logits"], few_windows()) - expected()[1]) < LOSS
    assert relative_error(expected()[0], read["logits"]) < LOGITS


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_loss_stays_when_a_new_process_loads_the_directory(mode: str, saved: Path) -> None:
    read = load_file(saved / f"{mode}.normswap")
    assert_read(read)
    assert bool(read["tied"]) == (mode in TIED)
    if mode in TIED:
        assert torch.equal(read["table"], original().transformer.wte.weight)


@pytest.mark.slow
@pytest.mark.parametrize("mode", SAME_CLASS)
def test_loss_stays_when_transformers_alone_loads_the_kept_class(mode: str, saved: Path) -> None:
    read = load_file(saved / f"{mode}.transformers")
    assert_read(read)
    assert bool(read["tied"]) == (mode in TIED)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in SAME_CLASS])
def test_transformers_alone_raises_or_computes_the_same(mode: str, saved: Path) -> None:
    path = saved / f"{mode}.transformers"
    if path.exists():
        assert_read(load_file(path))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_saved_config_says_whether_the_head_is_tied(mode: str, saved: Path) -> None:
    config = json.loads((saved / mode / "config.json").read_text("utf-8"))
    assert config.get("tie_word_embeddings", True) == (mode in TIED)


@pytest.mark.parametrize("mode", SAME_CLASS)
def test_kept_class_goes_through_save_pretrained(mode: str, tmp_path: Path) -> None:
    new, _ = converted(mode)
    new.save_pretrained(tmp_path)
    again = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert relative_error(run64(new, few_windows()).logits, run64(again, few_windows()).logits) == 0
    assert (again.lm_head.weight is again.transformer.wte.weight) == (mode in TIED)
