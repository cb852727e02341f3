from __future__ import annotations

import copy
import io
import json
from importlib.resources import files

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from normswap import demo


def batch_norms(network: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]


def test_recorded_accuracy_is_what_the_shipped_network_reaches() -> None:
    record, network = demo.load_record(), demo.load_network()
    assert demo.accuracy(network, demo.load_heldout()) == record["held_out_accuracy"] >= 0.98
    assert sum(p.numel() for p in network.parameters()) == record["parameters"]
    assert len(demo.load_heldout().labels) == record["held_out"]


def test_network_was_trained_so_that_its_batch_norms_are_far_from_neutral() -> None:
    norms = batch_norms(demo.load_network())
    assert len(norms) == 15
    for norm in norms:
        assert not norm.training
        scale = norm.weight / (norm.running_var + norm.eps).sqrt()
        assert scale.std() > 0.01
        assert norm.running_mean.abs().max() > 0.01


def test_heldout_images_are_the_real_digits() -> None:
    images, labels = load_digits(return_X_y=True)
    known = {
        (tuple(image.astype(int)), int(label)) for image, label in zip(images, labels, strict=True)
    }
    heldout = demo.load_heldout()
    assert heldout.images.shape == (450, 1, 8, 8)
    assert heldout.images.dtype == torch.float32
    for image, label in zip(heldout.images, heldout.labels, strict=True):
        assert (tuple((image * 16).int().flatten().tolist()), int(label)) in known


def test_package_data_is_small() -> None:
    data = files("normswap") / "data"
    assert sum(len(item.read_bytes()) for item in data.iterdir() if item.is_file()) < 1_000_000


def test_run_folds_every_batch_norm_and_changes_no_answer() -> None:
    stream = io.StringIO()
    result = demo.run(stream, repeats=2)
    assert result["report"]["counts"] == {"exact": 15}
    before, after = result["accuracy"]
    assert before == after == demo.load_record()["held_out_accuracy"]
    assert result["same_label"] == result["images"] == 450
    assert 0 < result["largest_difference"] < 1e-5 * result["largest_score"]
    assert [timing["batch"] for timing in result["timings"]] == [1, 450]
    text = stream.getvalue()
    assert "99.56%" in text
    assert "same label on 450 of 450 images" in text
    assert max(map(len, text.splitlines())) <= 120


def test_json_output_is_one_object_equal_to_the_result() -> None:
    stream = io.StringIO()
    result = demo.run(stream, json=True, repeats=2)
    assert json.loads(stream.getvalue()) == json.loads(json.dumps(result))


def test_run_writes_to_standard_output_by_default(capsys: pytest.CaptureFixture[str]) -> None:
    demo.run(repeats=1)
    written = capsys.readouterr()
    assert written.out.startswith("A ResNet trained on handwritten digits")
    assert written.err == ""


def test_a_wrong_fold_would_show() -> None:
    network, digits = demo.load_network(), demo.load_heldout()
    broken = copy.deepcopy(network)
    broken.stem[1] = nn.Identity()
    assert demo.accuracy(broken, digits) < demo.accuracy(network, digits) - 0.05
