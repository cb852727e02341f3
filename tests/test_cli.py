"""The command line: what it prints, what it writes, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_input, randomise, relative_error
from safetensors.torch import save_file
from torch import Tensor, nn

import normswap as ns
from normswap import cli

NETWORKS = '''
import torch
from torch import nn

def plain(width=4):
    return nn.Sequential(
        nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(1), nn.Linear(width, 2),
    )

def half_foldable():
    """The second norm stands between two activations and in front of the output."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4), nn.ReLU()
    )

def unfoldable():
    return nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3), nn.ReLU())

class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, image, scale):
        return torch.relu(self.bn(self.conv(image))) * scale

class Listed(Two):
    def forward(self, images):
        return [torch.relu(self.bn(self.conv(image[None]))) for image in images]
'''


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Run]:
    """The command line in a directory that holds `networks.py`."""
    (tmp_path / "networks.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "networks", raising=False)

    def call(*arguments: str | Path) -> Done:
        capfd.readouterr()
        with pytest.raises(SystemExit) as stopped:
            cli.main([str(argument) for argument in arguments])
        return Done(int(stopped.value.code or 0), *capfd.readouterr())

    handler = signal.getsignal(signal.SIGTERM)
    yield call
    signal.signal(signal.SIGTERM, handler)


def write(name: str, file: str = "m.safetensors") -> nn.Module:
    """Random weights of a network of `networks.py`, in the current directory."""
    import networks

    model = randomise(getattr(networks, name)()).eval()
    save_file(model.state_dict(), file)
    return model


def written(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


PLAIN = ("--arch", "networks:plain", "--input-shape", "2,3,8,8")


def test_help_is_printed_by_the_installed_module() -> None:
    command = [sys.executable, "-m", "normswap", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    for name in ("inspect", "fold-bn", "place", "apply", "verify", "demo"):
        assert name in done.stdout
    assert done.stderr == ""


def test_help_does_not_import_what_only_the_work_needs() -> None:
    code = (
        "import sys, normswap.cli\n"
        "print([m for m in ('transformers', 'timm', 'torchvision', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# inspect


def test_inspect_lists_norms_without_inputs(run: Run) -> None:
    write("plain")
    done = run("inspect", "m.safetensors", "--arch", "networks:plain")
    assert (done.code, done.err) == (0, "")
    assert "batch" in done.out


def test_inspect_collapses_repeated_layers(run: Run, tmp_path: Path) -> None:
    import timm

    save_file(timm.create_model("resnet10t").state_dict(), tmp_path / "m.safetensors")
    done = run("inspect", "m.safetensors", "--arch", "timm:resnet10t")
    assert done.code == 0
    assert "layer{1..4}.0.bn{1,2}" in done.out


def test_inspect_gives_json(run: Run) -> None:
    write("plain")
    done = run("inspect", "m.safetensors", "--arch", "networks:plain", "--json")
    found = json.loads(done.out)
    sites = found["norms"]
    assert found["stacks"] == []
    assert [site["name"] for site in sites] == ["1", "4"]
    assert {site["spec"]["kind"] for site in sites} == {"batch"}
    done = run("inspect", "m.safetensors", "--arch", "networks:plain", "--json", "--where", "4")
    assert [site["name"] for site in json.loads(done.out)["norms"]] == ["4"]


# fold-bn


def test_fold_writes_weights_plan_and_report(run: Run, tmp_path: Path) -> None:
    model = write("plain")
    done = run("fold-bn", "m.safetensors", "out", *PLAIN)
    assert (done.code, done.err) == (0, "")
    assert "2 of 2" in done.out
    assert written(tmp_path / "out") == [
        "README.md",
        "model.safetensors",
        "normswap.json",
        "report.json",
        "report.md",
    ]
    import networks

    again = ns.load(tmp_path / "out", arch=networks.plain)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in again.modules())
    x = random_input(2, 3, 8, 8, dtype=torch.float32)
    assert relative_error(model(x), again(x)) < 1e-5


def test_fold_prints_the_report_as_json(run: Run, tmp_path: Path) -> None:
    write("plain")
    done = run("fold-bn", "m.safetensors", "out", *PLAIN, "--json")
    report = json.loads(done.out)
    assert report["counts"] == {"exact": 2}
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())


def test_dry_run_writes_nothing_and_its_plan_can_be_applied(run: Run, tmp_path: Path) -> None:
    write("plain")
    done = run("fold-bn", "m.safetensors", *PLAIN, "--dry-run", "--json")
    assert (done.code, done.err) == (0, "")
    assert set(written(tmp_path)) <= {"m.safetensors", "networks.py", "__pycache__"}
    (tmp_path / "plan.json").write_text(done.out)
    done = run("apply", "plan.json", "m.safetensors", "out", "--arch", "networks:plain")
    assert (done.code, done.err) == (0, "")
    assert run("fold-bn", "m.safetensors", "folded", *PLAIN).code == 0
    done = run("verify", "folded", "out", *PLAIN)
    assert (done.code, done.err) == (0, "")


def test_plan_of_a_written_directory_is_applied_to_other_weights(run: Run, tmp_path: Path) -> None:
    write("plain")
    assert run("fold-bn", "m.safetensors", "out", *PLAIN).code == 0
    import networks

    torch.save({"state_dict": randomise(networks.plain(), seed=7).state_dict()}, "other.pt")
    assert run("apply", "out", "other.pt", "other", "--max-shard-size", "1KB").code == 0
    assert (tmp_path / "other" / "model.safetensors.index.json").exists()
    assert run("verify", "other.pt", "other", *PLAIN).code == 0
    assert run("verify", "m.safetensors", "other", *PLAIN).code == 1


def test_strict_fails_on_a_refused_norm_and_writes_nothing(run: Run, tmp_path: Path) -> None:
    write("half_foldable")
    options = ("--arch", "networks:half_foldable", "--input-shape", "1,3,8,8")
    done = run("fold-bn", "m.safetensors", "out", *options, "--strict")
    assert done.code == 1
    assert done.err.startswith("error: 1 of 2 norms")
    assert not (tmp_path / "out").exists()
    assert run("fold-bn", "m.safetensors", *options, "--strict", "--dry-run").code == 1
    assert run("fold-bn", "m.safetensors", "out", *options).code == 0
    assert run("verify", "m.safetensors", "out", *options).code == 0


def test_nothing_to_fold_is_an_error_and_nothing_is_written(run: Run, tmp_path: Path) -> None:
    write("unfoldable")
    options = ("--arch", "networks:unfoldable", "--input-shape", "1,3,8,8")
    done = run("fold-bn", "m.safetensors", "out", *options)
    assert done.code == 1
    assert "refused" in done.out
    assert done.err == "error: m.safetensors: no BatchNorm could be folded; nothing is written\n"
    assert not (tmp_path / "out").exists()


def test_folding_a_folded_directory_is_nothing_to_do(run: Run, tmp_path: Path) -> None:
    write("plain")
    assert run("fold-bn", "m.safetensors", "out", *PLAIN).code == 0
    assert run("fold-bn", "out", "again", *PLAIN).code == 1
    assert not (tmp_path / "again").exists()


def test_only_norms_that_match_are_folded(run: Run, tmp_path: Path) -> None:
    write("plain")
    done = run("fold-bn", "m.safetensors", "out", *PLAIN, "--where", "1", "--json")
    assert done.code == 0
    statuses = {site["name"]: site["status"] for site in json.loads(done.out)["sites"]}
    assert statuses["1"] == "exact"
    assert statuses.get("4") != "exact"


def test_dtype_is_converted_on_loading(run: Run, tmp_path: Path) -> None:
    write("plain")
    assert run("fold-bn", "m.safetensors", "out", *PLAIN, "--dtype", "float64").code == 0
    import networks

    model = ns.load(tmp_path / "out", arch=networks.plain)
    assert {p.dtype for p in model.parameters()} == {torch.float64}


def test_existing_directory_is_replaced_when_asked(run: Run, tmp_path: Path) -> None:
    write("plain")
    assert run("fold-bn", "m.safetensors", "out", *PLAIN).code == 0
    assert run("fold-bn", "m.safetensors", "out", *PLAIN).code == 2
    assert run("fold-bn", "m.safetensors", "out", *PLAIN, "--overwrite").code == 0


def test_transformers_directory_needs_no_options(run: Run, tmp_path: Path) -> None:
    from test_hub import small_transformers

    small_transformers().save_pretrained(tmp_path / "src")
    done = run("fold-bn", "src", "out")
    assert (done.code, done.err) == (0, "")
    assert run("verify", "src", "out").code == 0
    (tmp_path / "plan.json").write_text(run("fold-bn", "src", "--dry-run", "--json").out)
    assert run("apply", "plan.json", "src", "applied").code == 0
    assert run("verify", "src", "applied").code == 0


# Inputs


def test_one_shape_per_positional_argument(run: Run) -> None:
    write("Two")
    options = ("--input-shape", "1,3,8,8", "--input-shape", "1,1,6,6")
    done = run("fold-bn", "m.safetensors", "out", "--arch", "networks:Two", *options)
    assert (done.code, done.err) == (0, "")


@pytest.mark.parametrize("names", [("image", "scale"), ("0", "1")])
def test_inputs_come_from_a_file(run: Run, names: tuple[str, str]) -> None:
    write("Two")
    tensors: list[Tensor] = [torch.randn(1, 3, 8, 8), torch.randn(1, 1, 6, 6)]
    save_file(dict(zip(names, tensors, strict=True)), "inputs.safetensors")
    done = run(
        *("fold-bn", "m.safetensors", "out", "--arch", "networks:Two"),
        *("--inputs", "inputs.safetensors"),
    )
    assert (done.code, done.err) == (0, "")


def test_shape_in_brackets_is_a_list_of_one_tensor(run: Run) -> None:
    write("Listed")
    options = ("--arch", "networks:Listed", "--input-shape", "[3,8,8]")
    done = run("fold-bn", "m.safetensors", "out", *options)
    assert (done.code, done.err) == (0, "")


# Exports


def test_exports_lie_in_the_directory_or_where_the_path_says(run: Run, tmp_path: Path) -> None:
    model = write("plain")
    (tmp_path / "elsewhere").mkdir()
    exports = ("--export", "model.pt2", "--export", "elsewhere/other.pt2")
    done = run("fold-bn", "m.safetensors", "out", *PLAIN, *exports)
    assert (done.code, done.err) == (0, "")
    assert written(tmp_path / "elsewhere") == ["other.pt2"]
    x = random_input(2, 3, 8, 8, dtype=torch.float32)
    for file in ("out/model.pt2", "elsewhere/other.pt2"):
        program = torch.export.load(file)
        assert not [n for n in program.graph.nodes if "batch_norm" in str(n.target)]
        assert relative_error(model(x), program.module()(x)) < 1e-5


@pytest.mark.filterwarnings("ignore")
def test_onnx_file_has_no_batch_norm_and_computes_the_same(run: Run, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    runtime = pytest.importorskip("onnxruntime")
    model = write("plain")
    done = run("fold-bn", "m.safetensors", "out", *PLAIN, "--export", "model.onnx", "--json")
    assert done.code == 0
    assert json.loads(done.out)["counts"] == {"exact": 2}
    file = tmp_path / "out" / "model.onnx"
    assert "BatchNormalization" not in {node.op_type for node in onnx.load(file).graph.node}
    x = random_input(2, 3, 8, 8, dtype=torch.float32)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert relative_error(model(x), torch.from_numpy(got)) < 1e-5


# verify


def test_verify_fails_on_another_function(run: Run) -> None:
    write("plain")
    import networks

    save_file(randomise(networks.plain(), seed=5).state_dict(), "other.safetensors")
    done = run("verify", "m.safetensors", "other.safetensors", *PLAIN)
    assert done.code == 1
    assert "FAILED" in done.out
    assert done.err == "error: other.safetensors does not compute what m.safetensors computes\n"
    done = run("verify", "m.safetensors", "m.safetensors", *PLAIN, "--json")
    assert done.code == 0
    assert json.loads(done.out)["passed"] is True


def test_failed_verification_writes_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("plain")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ns.VerificationError("the changed model differs")

    monkeypatch.setattr(ns, "fold_batchnorm", fail)
    done = run("fold-bn", "m.safetensors", "out", *PLAIN)
    assert (done.code, done.err) == (1, "error: the changed model differs\n")
    assert not (tmp_path / "out").exists()


def test_killed_run_leaves_nothing_behind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("plain")

    def kill(*args: Any) -> None:
        assert any(name.startswith(".out.") for name in written(tmp_path))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("normswap.export.export_model", kill)
    done = run("fold-bn", "m.safetensors", "out", *PLAIN, "--export", "model.pt2")
    assert done.code == 128 + signal.SIGTERM
    assert set(written(tmp_path)) <= {"m.safetensors", "networks.py", "__pycache__"}


def test_demo_runs(run: Run) -> None:
    done = run("demo", "--json")
    assert done.code == 0
    assert json.loads(done.out)["images"]
