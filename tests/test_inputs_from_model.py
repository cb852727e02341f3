"""Inputs that are built from what a model says of itself, each tried on the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from normswap.errors import NormswapError
from normswap.inputs import default_inputs, resolve_inputs

TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
ENCODER_DECODER: dict[str, Any] = {
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
}
VISION: dict[str, Any] = {**TEXT, "image_size": 32, "patch_size": 8}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(vocab_size=60, **TEXT))


def roberta() -> nn.Module:  # numbers positions from an offset
    config = transformers.RobertaConfig(vocab_size=60, max_position_embeddings=18, **TEXT)
    return transformers.RobertaModel(config)


def gpt2_classifier() -> nn.Module:  # no padding token: no batch
    config = transformers.GPT2Config(vocab_size=60, n_embd=16, n_layer=1, n_head=2)
    return transformers.GPT2ForSequenceClassification(config)


def bart() -> nn.Module:
    config = transformers.BartConfig(vocab_size=60, max_position_embeddings=20, **ENCODER_DECODER)
    return transformers.BartModel(config)


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(num_channels=1, **VISION))


def resnet() -> nn.Module:  # its config names no image size
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"
    )
    return transformers.ResNetModel(config)


def clip() -> nn.Module:  # two towers
    config = transformers.CLIPConfig(
        text_config={**TEXT, "vocab_size": 60}, vision_config=VISION, projection_dim=8
    )
    return transformers.CLIPModel(config)


def video() -> nn.Module:
    config = transformers.VideoMAEConfig(num_frames=4, **VISION)
    return transformers.VideoMAEModel(config)


def whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=60, num_mel_bins=8, max_source_positions=20, pad_token_id=1, **ENCODER_DECODER
    )
    return transformers.WhisperModel(config)


def wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2,
        num_feat_extract_layers=2,
        **TEXT,
    )
    return transformers.Wav2Vec2Model(config)


def series() -> nn.Module:
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=32, d_model=16, num_hidden_layers=1, ffn_dim=16,
        num_attention_heads=2,
    )  # fmt: skip
    return transformers.PatchTSTModel(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "bert": (bert, "input_ids 2x16"),
    "roberta": (roberta, "input_ids 2x9"),
    "gpt2 classifier": (gpt2_classifier, "input_ids 1x16"),
    "bart": (bart, "input_ids 2x10, decoder_input_ids 2x10"),
    "vit": (vit, "pixel_values 2x1x32x32"),
    "resnet": (resnet, "pixel_values 2x3x224x224"),
    "clip": (clip, "input_ids 2x16, pixel_values 2x3x32x32"),
    "video": (video, "pixel_values 2x4x3x32x32"),
    "whisper": (whisper, "input_features 2x8x40, decoder_input_ids 2x16"),
    "wav2vec2": (wav2vec2, "input_values 2x160"),
    "series": (series, "past_values 2x32x3"),
    "timm": (lambda: timm.create_model("test_resnet"), "2x3x160x160"),
    "timm, grey": (lambda: timm.create_model("test_resnet", in_chans=1), "2x1x160x160"),
    "timm, sized": (lambda: timm.create_model("test_vit", img_size=(32, 64)), "2x3x32x64"),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_runs_on_the_inputs_that_it_describes(name: str) -> None:
    make, shapes = MODELS[name]
    model = make().eval()
    inputs = default_inputs(model)
    assert inputs.describe() == shapes
    with torch.no_grad():
        model(*inputs.args, **inputs.kwargs)


def test_token_ids_are_words_of_the_vocabulary() -> None:
    config = transformers.BertConfig(vocab_size=9, pad_token_id=0, bos_token_id=3, **TEXT)
    config.image_token_id = 4
    ids = default_inputs(transformers.BertModel(config)).kwargs["input_ids"]
    assert set(ids.flatten().tolist()) == {1, 2, 5, 6, 7, 8}


def test_a_model_on_the_meta_device_gets_real_inputs() -> None:
    with torch.device("meta"):
        model = bert()
    inputs = resolve_inputs(model, None)
    assert inputs.describe() == "input_ids 2x16"
    assert all(not tensor.is_meta for tensor in inputs.tensors())


def test_wrappers_are_looked_through() -> None:
    model = bert()
    assert default_inputs(torch.compile(model)).describe() == "input_ids 2x16"
    assert default_inputs(nn.DataParallel(model)).describe() == "input_ids 2x16"


def test_inputs_are_the_same_every_time_and_random_states_are_left_alone() -> None:
    model = clip()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first, second = default_inputs(model), default_inputs(model)
    assert torch.equal(torch.rand(3), expected)
    for a, b in zip(first.tensors(), second.tensors(), strict=True):
        assert torch.equal(a, b)
    assert abs(first.kwargs["pixel_values"].std() - 1) < 0.1


def test_keywords_are_added_to_what_is_derived() -> None:
    inputs = resolve_inputs(bert(), None, {"output_hidden_states": True})
    assert list(inputs.kwargs) == ["input_ids", "output_hidden_states"]


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(5, 4, 1)

    def forward(self, image: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return self.conv(image) * mask * scale


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (nn.Sequential(nn.Conv2d(5, 4, 1)), "example_inputs=torch.randn(2, 5, 224, 224)"),
        (nn.Sequential(nn.Linear(7, 4)), "example_inputs=torch.randn(2, 7)"),
        (nn.Sequential(nn.Embedding(9, 4)), "example_inputs=torch.randint(9, (2, 16))"),
        (TwoInputs(), "example_inputs=(torch.randn(2, 5, 224, 224), mask)"),
        (TwoInputs(), "forward(image, mask)"),
    ],
)
def test_a_model_that_says_nothing_raises_the_call_to_make(model: nn.Module, says: str) -> None:
    with pytest.raises(NormswapError) as error:
        default_inputs(model)
    assert says in str(error.value)
    assert type(model).__name__ in str(error.value)


@lru_cache
def table_of(size: int) -> Tensor:
    return torch.arange(size) / size


class Cached(nn.Module):
    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="cached", image_size=8)
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, pixel_values: Tensor, input_ids: Tensor | None = None) -> Tensor:
        return self.conv(pixel_values) + table_of(pixel_values.shape[-1])


def test_trying_inputs_on_fakes_leaves_none_in_the_caches_of_the_models_code() -> None:
    model = Cached()
    model.config.vocab_size = 5  # two ways to call it, so one is tried
    inputs = default_inputs(model)
    assert not isinstance(model(**inputs.kwargs), FakeTensor)
    assert type(table_of(8)) is Tensor
