"""`normswap swap`: the written directory, what it refuses to be loaded as, and exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normswap as ns
from normswap import cli

transformers = pytest.importorskip("transformers")
IDS = torch.arange(6)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.GPT2Config(
        n_layer=2,
        n_head=2,
        n_embd=16,
        vocab_size=50,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    path = tmp_path_factory.mktemp("source") / "gpt2"
    model.save_pretrained(path)
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as done:
        cli.main([str(a) for a in arguments])
    return int(done.value.code or 0)


def logits(model: nn.Module) -> Tensor:
    with torch.inference_mode():
        return model.eval()(IDS).logits


def test_written_directory_holds_the_new_norms(source: Path, tmp_path: Path) -> None:
    assert run("swap", source, tmp_path / "out", "--map", "layernorm=rmsnorm") == 0
    again = ns.load(tmp_path / "out")
    original = transformers.GPT2LMHeadModel.from_pretrained(source).eval()
    expected, _ = ns.swap_norms(original, {nn.LayerNorm: "rms"})
    assert torch.equal(logits(again), logits(expected))
    ns.find_norms(again).where(kind="rms").expect_count(5)


def test_loading_it_as_the_original_raises(source: Path, tmp_path: Path) -> None:
    assert run("swap", source, tmp_path / "out", "--map", "layernorm=rmsnorm") == 0
    with pytest.raises(RuntimeError):
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")


def test_exact_swap_under_the_same_names_loads_as_the_original(
    source: Path, tmp_path: Path
) -> None:
    assert run("swap", source, tmp_path / "out", "--map", "layernorm=layernorm") == 0
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(plain), logits(ns.load(tmp_path / "out")))


def test_plan_of_a_dry_run_is_applied_on_files(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--map", "layernorm=rmsnorm")
    assert run("swap", source, "--dry-run", "--json", *arguments) == 0
    (tmp_path / "plan.json").write_text(capsys.readouterr().out)
    assert run("apply", tmp_path / "plan.json", source, tmp_path / "files") == 0
    assert run("swap", source, tmp_path / "memory", *arguments) == 0
    a, b = (ns.load(tmp_path / name).state_dict() for name in ("files", "memory"))
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ((), 2),
        (("--map", "layernorm"), 2),
        (("--map", "foo=rmsnorm"), 2),
        (("--map", "layernorm=rmsnorm", "--method", "calibrate"), 2),
        (("--map", "layernorm=dyt", "--method", "exact"), 1),
        (("--map", "batchnorm=groupnorm"), 1),
    ],
)
def test_what_cannot_be_done_writes_nothing(
    source: Path, tmp_path: Path, arguments: tuple[str, ...], code: int
) -> None:
    assert run("swap", source, tmp_path / "out", *arguments) == code
    assert list(tmp_path.iterdir()) == []


def test_report_beside_the_weights_tells_the_status(source: Path, tmp_path: Path) -> None:
    assert run("swap", source, tmp_path / "out", "--map", "layernorm=rmsnorm") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert {site["status"] for site in report["sites"]} == {"approximate"}
