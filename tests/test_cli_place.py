"""The command line: norms moved in a directory of weights, and where they stand."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import relative_error
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, BertConfig, BertModel, LlamaConfig, LlamaModel

import normswap as ns
from normswap.cli import main
from normswap.precision import true_float64

IDS = torch.arange(3, 12)[None]


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(a) for a in arguments])
    return int(stopped.value.code or 0)


def written(model: Any, path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype) + 0.1)
    model.save_pretrained(path)
    return path


SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 40,
}


@pytest.fixture(scope="module")
def post(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT, every parameter random, stored in float64."""
    return written(
        BertModel(BertConfig(**SIZES)).double().eval(), tmp_path_factory.mktemp("post") / "bert"
    )


@pytest.fixture(scope="module")
def pre(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, every parameter random, stored in float64."""
    return written(
        LlamaModel(LlamaConfig(**SIZES)).double().eval(), tmp_path_factory.mktemp("pre") / "llama"
    )


def result(model: Any) -> Tensor:
    with true_float64():
        return model(input_ids=IDS).last_hidden_state


def test_inspect_shows_where_norms_stand(post: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", post) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "encoder: post" in lines
    assert "embeddings.LayerNorm embedding norm" in lines
    assert any(line.startswith("encoder.layer.{0,1} feed-forward post") for line in lines)
    assert run("inspect", post, "--json") == 0
    (stack,) = json.loads(capsys.readouterr().out)["stacks"]
    assert stack["form"] == "post"
    assert [s["kind"] for s in stack["sublayers"]] == 2 * ["attention", "feed-forward"]


def test_exact_conversion_of_a_directory_loads_again(pre: Path, tmp_path: Path) -> None:
    assert run("place", pre, tmp_path / "out", "--to", "post") == 0
    made = ns.load(tmp_path / "out")
    original = AutoModel.from_pretrained(pre).eval()
    assert relative_error(result(original), result(made)) < 1e-12
    calls = [type(h).__name__ for m in made.modules() for h in m._forward_hooks.values()]
    assert calls.count("OntoStream") == 4


def test_native_result_loads_without_normswap(post: Path, tmp_path: Path) -> None:
    assert run("place", post, tmp_path / "out", "--to", "pre") == 0
    code = (
        "import sys, torch, transformers\n"
        f"model = transformers.AutoModel.from_pretrained({str(tmp_path / 'out')!r})\n"
        "assert 'normswap' not in sys.modules\n"
        "print(type(model).__name__)\n"
        f"torch.save(model.state_dict(), {str(tmp_path / 'state.pt')!r})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "RobertaPreLayerNormModel"
    state = torch.load(tmp_path / "state.pt")
    old = load_file(post / "model.safetensors")
    rotated = {
        "encoder.layer.0.attention.LayerNorm": "embeddings.LayerNorm",
        "encoder.layer.0.intermediate.LayerNorm": "encoder.layer.0.attention.output.LayerNorm",
        "encoder.layer.1.attention.LayerNorm": "encoder.layer.0.output.LayerNorm",
        "LayerNorm": "encoder.layer.1.output.LayerNorm",
    }
    for target, source in rotated.items():
        for leaf in ("weight", "bias"):
            assert torch.equal(state[f"{target}.{leaf}"], old[f"{source}.{leaf}"])


def test_class_is_kept_when_asked(post: Path, tmp_path: Path) -> None:
    assert run("place", post, tmp_path / "out", "--to", "pre", "--no-native") == 0
    made = ns.load(tmp_path / "out")
    assert type(made).__name__ == "BertModel"
    assert ns.residual_structure(made, {"input_ids": IDS}).form == "pre"
    with pytest.raises(RuntimeError):  # not silently as a post-norm model
        AutoModel.from_pretrained(tmp_path / "out")


def test_constants_are_measured_on_calibration_files(pre: Path, tmp_path: Path) -> None:
    batch = tmp_path / "batch.safetensors"
    save_file({"input_ids": torch.randint(2, 40, (4, 12))}, batch)
    assert run("place", pre, tmp_path / "out", "--to", "deepnorm", "--calibration", batch) == 0
    made = ns.load(tmp_path / "out")
    original = AutoModel.from_pretrained(pre).eval()
    new, _ = ns.convert_placement(
        original, "deepnorm", {"input_ids": IDS}, calibration=[load_file(batch)]
    )
    assert relative_error(result(new), result(made)) < 1e-12
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    constants = [row["constant"] for row in report["mapping"] if row["op"] == "calibrated"]
    assert len(constants) == 4
    assert all(constant > 0 for constant in constants)


def test_plan_is_carried_out_on_files(post: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("typer.echo", lambda text="", err=False: None if err else lines.append(text))
        assert run("place", post, "--to", "pre", "--dry-run", "--json") == 0
    plan = tmp_path / "plan.json"
    plan.write_text(lines[0])
    assert run("apply", plan, post, tmp_path / "out") == 0
    made = ns.load(tmp_path / "out")
    original = AutoModel.from_pretrained(post).eval()
    new, _ = ns.convert_placement(original, "pre", {"input_ids": IDS}, native=False)
    assert relative_error(result(new), result(made)) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--to", "up"), 2, "to='up' is not known"),
        (("--to", "post"), 1, "post-norm already"),
        (("--to", "pre", "--where", "x"), 2, "whole stacks"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    post: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    assert run("place", post, tmp_path / "out", *arguments) == code
    (line,) = [n for n in capsys.readouterr().err.splitlines() if n.startswith("error")]
    assert said in line
    assert not (tmp_path / "out").exists()
