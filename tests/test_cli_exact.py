"""The command line: LayerNorm to RMSNorm exactly and affine folding, on a directory of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import relative_error
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

import normswap as ns
from normswap.cli import main
from normswap.precision import true_float64

IDS = torch.arange(10)[None]
EXACT = ("--map", "layernorm=rmsnorm", "--method", "exact")


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    return int(stopped.value.code or 0)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 with a tied head, every parameter random, stored in float64."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    special = {"bos_token_id": 1, "eos_token_id": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **special)).double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype) + 0.05)
    path = tmp_path_factory.mktemp("source") / "gpt2"
    model.save_pretrained(path)
    return path


def logits(model: Any) -> Tensor:
    with true_float64():
        return model(input_ids=IDS).logits


def assert_same(source: Path, made: nn.Module) -> None:
    original = AutoModelForCausalLM.from_pretrained(source).eval()
    assert relative_error(logits(original), logits(made)) < 1e-12


@pytest.mark.parametrize("options", [(), ("--fold-affine",), ("--untie", "--fold-affine")], ids=str)
def test_exact_swap_of_a_directory_loads_again(
    source: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert run("swap", source, tmp_path / "out", *EXACT, *options) == 0
    made = ns.load(tmp_path / "out")
    assert not any(isinstance(m, nn.LayerNorm) for m in made.modules())
    assert_same(source, made)
    tied = made.lm_head.weight is made.transformer.wte.weight
    assert tied is ("--untie" not in options)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("tie_word_embeddings", True) is tied
    with pytest.raises(RuntimeError):  # not by accident into the unchanged class
        GPT2LMHeadModel.from_pretrained(tmp_path / "out")


@pytest.mark.parametrize("options", [(), ("--untie",)], ids=str)
def test_kept_class_loads_without_normswap(
    source: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert run("swap", source, tmp_path / "out", *EXACT, "--keep-class", *options) == 0
    made = GPT2LMHeadModel.from_pretrained(tmp_path / "out").eval()
    norms = [m for m in made.modules() if isinstance(m, nn.LayerNorm)]
    assert len(norms) == 5
    assert sum(bool((m.weight == 1).all()) for m in norms) >= 4
    assert_same(source, made)


@pytest.mark.parametrize("options", [(), ("--scale-only",), ("--untie",)], ids=str)
def test_fold_affine_of_a_directory(source: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    assert run("fold-affine", source, tmp_path / "out", *options) == 0
    made = ns.load(tmp_path / "out")
    norms = [m for m in made.modules() if isinstance(m, nn.LayerNorm)]
    folded = sum(bool((m.weight == 1).all()) for m in norms)
    assert folded == (5 if "--untie" in options else 4)
    assert_same(source, made)


@pytest.mark.parametrize(
    "arguments",
    [
        ("swap", *EXACT),
        ("swap", *EXACT, "--fold-affine", "--untie"),
        ("swap", *EXACT, "--keep-class", "--untie"),
        ("fold-affine", "--untie"),
    ],
    ids=str,
)
def test_plan_carried_out_on_files_gives_the_same_tensors(
    source: Path, tmp_path: Path, arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = arguments
    assert run(command, source, tmp_path / "memory", *options) == 0
    capsys.readouterr()
    assert run(command, source, *options, "--dry-run", "--json") == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert run("apply", tmp_path / "plan.json", source, tmp_path / "files") == 0
    a, b = (ns.load(tmp_path / name) for name in ("memory", "files"))
    assert list(a.state_dict()) == list(b.state_dict())
    assert all(torch.equal(t, b.state_dict()[n]) for n, t in a.state_dict().items())
    assert_same(source, b)


def test_strict_fails_where_a_norm_is_refused_and_writes_nothing(
    source: Path, tmp_path: Path
) -> None:
    assert run("fold-affine", source, tmp_path / "out", "--strict") == 1
    assert list(tmp_path.iterdir()) == []


def test_outputs_that_do_not_exist_are_an_error(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("fold-affine", source, tmp_path / "out", "--output", "lagits") == 2
    assert "logits" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
