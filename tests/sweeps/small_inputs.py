"""Inputs by trial for the models of transformers: token ids, images, sounds and what goes along."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Keywords = dict[str, Any]
TOKENS = re.compile(
    r"(?:tokens|features)[^\d]{1,12}(\d+)[^\d]{1,20}(?:features|length)[^\d]{1,5}(\d+)"
)
VOCABULARY_FROM, VOCABULARY_TO = 5, 90
MOST_STEPS = 3


def first_that_runs(
    model: nn.Module, run: Callable[[nn.Module, Keywords], Any], *, whole: bool = False
) -> tuple[Keywords | None, list[str]]:
    """The first inputs with which the model runs, and the errors of those before.

    ``whole``: only inputs of every kind that the model takes.
    """
    errors: list[str] = []
    for keywords in candidates(model, whole=whole):
        waiting = [(0, keywords)]
        while waiting:
            step, trial = waiting.pop(0)
            try:
                run(model, trial)
            except Exception as error:
                errors.append(short(error))
                if step < MOST_STEPS:
                    waiting += [(step + 1, more) for more in _mended(model, trial, str(error))]
            else:
                return trial, errors
    return None, errors


def _mended(model: nn.Module, keywords: Keywords, error: str) -> Iterator[Keywords]:
    """The inputs with what a model's error asks for."""
    if "input_ids" not in keywords:
        return
    yield from _with_placeholders(model, keywords, error)
    if "cache" in error.lower() and "use_cache" not in keywords:
        yield {**keywords, "use_cache": False}
    takes_mask = "attention_mask" in inspect.signature(model.forward).parameters
    if "NoneType" in error and takes_mask and "attention_mask" not in keywords:
        yield {**keywords, "attention_mask": torch.ones_like(keywords["input_ids"])}


def short(error: BaseException) -> str:
    """One line of an error."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def candidates(model: nn.Module, *, whole: bool = False) -> Iterator[Keywords]:
    """Keywords that may fit, those that reach most of the model first.

    ``whole``: only those, and for models that take more than one kind.
    """
    from normswap.errors import NormswapError
    from normswap.inputs import default_inputs

    maker = Maker(model)
    special = SPECIAL.get(type(model).__name__) or SPECIAL.get(model.config.model_type)
    if special is not None:
        yield special(maker)
    yield from maker.text_beside_others()
    if whole:
        return
    with contextlib.suppress(NormswapError):
        yield dict(default_inputs(model).kwargs)
    yield from maker.alone()


def _with_placeholders(model: nn.Module, keywords: Keywords, error: str) -> Iterator[Keywords]:
    """As many tokens that stand for an image or a sound as the model's error asks for."""
    found = TOKENS.search(error)
    if found is None or found[1] == found[2]:
        return
    maker = Maker(model)
    token = maker.placeholder(keywords)
    rows = len(keywords["input_ids"])
    count = int(found[2])
    width = maker.number("hidden_size", "d_model", near="text") or 1
    # Some errors count the values of the features, not the features.
    for number in (count, count // width):
        if token is None or number % rows or not number:
            continue
        filled = torch.full((rows, number // rows), token)
        text = maker.ids(rows, 4)
        new = {**keywords, "input_ids": torch.cat([text, filled, text], 1)}
        yield maker.about_tokens(new, token)


class Maker:
    """Tensors that fit what a model's configuration says."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.config = model, model.config
        self.generator = torch.Generator().manual_seed(1)
        self.parameters = dict(inspect.signature(model.forward).parameters)
        self.parts = list(_parts(model.config))

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def ids(self, *shape: int) -> Tensor:
        high = min(VOCABULARY_TO, max(self.number("vocab_size") or VOCABULARY_TO, 7))
        return torch.randint(VOCABULARY_FROM, high, shape, generator=self.generator)

    def setting(self, *names: str, near: str = "") -> Any:
        """The first of these settings in a part that is called like ``near``, else in any."""
        preferred = [c for n, c in self.parts if near and re.search(near, n)]
        for name, part in itertools.product(names, [*preferred, *(c for _, c in self.parts)]):
            value = getattr(part, name, None)
            if value is not None and not isinstance(value, bool):
                return value
        return None

    def number(self, *names: str, near: str = "") -> int | None:
        value = self.setting(*names, near=near)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        return value if isinstance(value, int) else None

    def placeholder(self, keywords: Keywords) -> int | None:
        """The token that stands for what is given beside the text."""
        pictures, sounds = ["image_token_id", "image_token_index"], ["audio_token_id"]
        if "pixel_values" in keywords:
            return self.number(*pictures)
        if "pixel_values_videos" in keywords:
            return self.number("video_token_id", *pictures)
        return self.number(*sounds, "audio_token_index")

    def takes(self, name: str) -> bool:
        return name in self.parameters

    # -- pictures

    def sides(self) -> tuple[int, int]:
        size = self.setting("image_size", "img_size", "crop_size", near="vision|backbone|image")
        if isinstance(size, dict):
            size = [size.get("height", 64), size.get("width", 64)]
        if isinstance(size, (list, tuple)):
            return int(size[0]), int(size[-1])
        return (int(size),) * 2 if isinstance(size, (int, float)) else (64, 64)

    def pictures(self, batch: int) -> Iterator[Tensor]:
        channels = self.number("num_channels", "in_channels", "in_chans", near="vision") or 3
        height, width = self.sides()
        frames = self.number("num_frames", "frames_per_clip") or 2
        yield self.random(batch, channels, height, width)
        yield self.random(batch, 1, channels, height, width)
        yield self.random(batch, frames, channels, height, width)
        if (height, width) != (64, 64):
            yield self.random(batch, channels, 64, 64)
        if (height, width) != (224, 224):
            yield self.random(batch, channels, 224, 224)

    def patches(self) -> Iterator[Keywords]:
        """Flattened patches of one image with the grid they come from."""
        patch = self.number("patch_size", near="vision") or 14
        channels = self.number("num_channels", "in_channels", "in_chans", near="vision") or 3
        frames = self.number("temporal_patch_size", near="vision")
        grid = torch.tensor([[1, 4, 4]])
        shapes = [(channels * n * patch * patch,) for n in ((frames,) if frames else (1, 2))]
        for shape in (*shapes, (channels, patch, patch)):
            pixels = self.random(16, *shape)
            if self.takes("image_grid_thw"):
                yield {"pixel_values": pixels, "image_grid_thw": grid}
            elif self.takes("grid_thw"):
                yield {next(iter(self.parameters)): pixels, "grid_thw": grid}

    def packed_patches(self) -> Iterator[Keywords]:
        """The patches of one picture in rows, with how many there are."""
        if self.takes("spatial_shapes"):
            patch = self.number("patch_size", near="vision") or 16
            yield {
                "pixel_values": self.random(1, 16, 3 * patch * patch),
                "pixel_attention_mask": torch.ones(1, 16).long(),
                "spatial_shapes": torch.tensor([[4, 4]]),
            }

    def beside_pictures(self, pixels: Tensor) -> Keywords:
        """What some models want to know of their pictures."""
        more: Keywords = {}
        height, width = pixels.shape[-2:]
        if self.takes("image_sizes"):
            more["image_sizes"] = torch.tensor([[height, width]] * len(pixels))
        if self.takes("high_res_pixel_values"):
            side = self.number("image_size", near="high_res") or 64
            more["high_res_pixel_values"] = self.random(len(pixels), 3, side, side)
        if self.takes("pixel_attention_mask"):
            more["pixel_attention_mask"] = torch.ones(*pixels.shape[:-3], height, width).long()
        return more

    def described_pictures(self) -> Iterator[Keywords]:
        """One picture, alone and with what some models want to know of it."""
        for pixels in self.pictures(1):
            yield {"pixel_values": pixels}
            more = self.beside_pictures(pixels)
            if more:
                yield {"pixel_values": pixels} | more

    # -- sounds

    def sounds(self, batch: int) -> Iterator[Keywords]:
        near = "audio|speech|encoder"
        bins = self.number(
            "num_mel_bins",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "mel_bins",
            "input_dim",
            "feature_size",
            near=near,
        )
        positions = self.number("max_source_positions", near=near)
        if self.takes("input_features"):
            for width in dict.fromkeys((bins or 80, 80, 128, 160)):
                for length in dict.fromkeys((2 * (positions or 64), 200)):
                    mask = self.beside_sounds(batch, length)
                    yield {"input_features": self.random(batch, width, length)} | mask
                    yield {"input_features": self.random(batch, length, width)} | mask
        if self.takes("input_values"):
            strides = self.setting("conv_stride", "upsampling_ratios", "downsampling_ratios")
            samples = 16 * math.prod(strides) if isinstance(strides, (list, tuple)) else 30720
            length = self.number("max_length", "spectrogram_length") or 64
            yield {"input_values": self.random(batch, samples)}
            yield {"input_values": self.random(batch, self.number("audio_channels") or 1, samples)}
            yield {"input_values": self.random(batch, length, bins or 128)}

    def beside_sounds(self, batch: int, length: int) -> Keywords:
        names = ("input_features_mask", "feature_attention_mask")
        return {n: torch.ones(batch, length).long() for n in names if self.takes(n)}

    # -- whole inputs

    def decoder(self, batch: int) -> Keywords:
        encodes = getattr(self.config, "is_encoder_decoder", False)
        return (
            {"decoder_input_ids": self.ids(batch, 6)}
            if (self.takes("decoder_input_ids") and encodes is not None)
            else {}
        )

    def text_beside_others(self) -> Iterator[Keywords]:
        """Token ids together with a picture or a sound, for the models that take both."""
        if not self.takes("input_ids"):
            return
        others: list[Iterator[Keywords]] = []
        if self.takes("pixel_values"):
            others += [self.packed_patches(), self.patches(), self.described_pictures()]
        if self.takes("input_features") or self.takes("input_values"):
            others.append(self.sounds(1))
        for more in itertools.chain(*others):
            text: Keywords = {"input_ids": self.ids(1, 8)} | self.decoder(1)
            token = self.placeholder(more)
            if token is not None and not self.decoder(1):
                text["input_ids"][0, 3] = token
            yield self.about_tokens(text | more, token)
            if self.takes("bbox"):
                boxes = torch.tensor([100, 200, 300, 400]).expand(1, 8, 4).clone()
                yield {**text, **more, "bbox": boxes}

    def about_tokens(self, keywords: Keywords, token: int | None) -> Keywords:
        """What some models want to know of the tokens that stand for something else."""
        ids = keywords["input_ids"]
        places = torch.zeros_like(ids) if token is None else (ids == token).long()
        more: Keywords = {}
        if self.takes("mm_token_type_ids"):
            more["mm_token_type_ids"] = places
        if self.takes("image_embeds_position_mask"):
            more["image_embeds_position_mask"] = torch.arange(ids.shape[1]).expand(ids.shape) < (
                self.number("latent_query_num") or 4
            )
        if self.takes("qformer_input_ids"):
            more["qformer_input_ids"] = self.ids(len(ids), 6)
        return keywords | more

    def alone(self) -> Iterator[Keywords]:
        """One kind of input."""
        for batch in (2, 1):
            decoder = self.decoder(batch)
            if self.takes("input_ids"):
                yield {"input_ids": self.ids(batch, 8)} | decoder
            if self.takes("pixel_values"):
                for pixels in self.pictures(batch):
                    yield {"pixel_values": pixels} | decoder
                    more = self.beside_pictures(pixels)
                    if more:
                        yield {"pixel_values": pixels} | more | decoder
                yield from self.patches()
            for sound in self.sounds(batch):
                yield sound | decoder
            first = next(iter(self.parameters))
            if first in ("hidden_states", "inputs_embeds", "inputs"):
                width = self.number("hidden_size", "d_model") or 8
                yield from self.patches()
                yield {first: self.random(batch, 8, width)}
                yield {first: self.random(8, width)}


def _parts(config: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The configuration and those in it, outermost first."""
    yield name, config
    for inner, value in vars(config).items():
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            yield from _parts(value, f"{name}.{inner}")


def _mask(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.long)


def _codebooks(m: Maker) -> Keywords:
    books = m.number("num_codebooks", near="decoder") or 1
    return {"input_ids": m.ids(2 * books, 6), "use_cache": False}


def _dia(m: Maker) -> Keywords:
    channels = m.number("num_channels") or 9
    return {"input_ids": m.ids(2, 8), "decoder_input_ids": m.ids(2, 6, channels)}


def _siglip2(m: Maker) -> Keywords:
    text: Keywords = {"input_ids": m.ids(1, 8)} if m.takes("input_ids") else {}
    return text | next(m.packed_patches())


def _omdet(m: Maker) -> Keywords:
    height, width = m.sides()
    return {
        "pixel_values": m.random(1, 3, height, width),
        "classes_input_ids": m.ids(2, 6),
        "classes_attention_mask": _mask(2, 6),
        "tasks_input_ids": m.ids(1, 6),
        "tasks_attention_mask": _mask(1, 6),
        "classes_structure": torch.tensor([2]),
    }


def _oneformer(m: Maker) -> Keywords:
    return {
        "pixel_values": m.random(1, 3, 64, 64),
        "task_inputs": m.ids(1, m.number("task_seq_len") or 77),
    }


def _idefics(m: Maker) -> Keywords:
    height, width = m.sides()
    return {
        "input_ids": m.ids(1, 8),
        "attention_mask": _mask(1, 8),
        "pixel_values": m.random(1, 1, 3, height, width),
        "image_attention_mask": _mask(1, 8, 1),
        "use_cache": False,
    }


def _mllama(m: Maker) -> Keywords:
    height, width = m.sides()
    tiles = m.number("max_num_tiles") or 4
    return {
        "input_ids": m.ids(1, 8),
        "pixel_values": m.random(1, 1, tiles, 3, height, width),
        "aspect_ratio_ids": torch.tensor([[1]]),
        "aspect_ratio_mask": _mask(1, 1, tiles),
        "cross_attention_mask": _mask(1, 8, 1, tiles),
    }


def _speecht5(m: Maker) -> Keywords:
    return {"input_ids": m.ids(2, 8), "decoder_input_values": m.random(2, 6, 80)}


def _flattened(m: Maker) -> Keywords:
    patch, channels = m.number("patch_size", near="vision") or 16, 3
    grid = torch.cartesian_prod(torch.arange(1, 3), torch.arange(1, 5)).double()
    return {
        "flattened_patches": torch.cat([grid, m.random(8, channels * patch * patch)], 1)[None],
        "attention_mask": _mask(1, 8),
        "decoder_input_ids": m.ids(1, 6),
    }


def _voxtral_realtime(m: Maker) -> Keywords:
    bins = m.number("num_mel_bins") or 128
    return {"input_ids": m.ids(1, 16), "input_features": m.random(1, bins, 128)}


def _clap(m: Maker) -> Keywords:
    side = m.number("spec_size") or 256
    more: Keywords = {"input_ids": m.ids(1, 8)} if m.takes("input_ids") else {}
    bins = m.number("num_mel_bins") or 64
    return more | {
        "input_features": m.random(1, 1, 4 * side - 23, bins),
        "is_longer": torch.tensor([[False]]),
    }


def _series(m: Maker) -> Keywords:
    """The past of a time series with the features of its days; its future too."""
    past = (m.number("context_length") or 16) + max(m.setting("lags_sequence") or [0])
    features, ahead = m.number("num_time_features") or 0, m.number("prediction_length") or 4
    return {
        "past_values": m.random(2, past),
        "past_time_features": m.random(2, past, features),
        "past_observed_mask": torch.ones(2, past),
        "future_values": m.random(2, ahead),
        "future_time_features": m.random(2, ahead, features),
    }


# By class or by model type.
SPECIAL: dict[str, Callable[[Maker], Keywords]] = {
    "MusicgenForCausalLM": _codebooks,
    "MusicgenMelodyForCausalLM": _codebooks,
    "dia": _dia,
    "siglip2": _siglip2,
    "siglip2_vision_model": _siglip2,
    "omdet-turbo": _omdet,
    "oneformer": _oneformer,
    "idefics": _idefics,
    "mllama": _mllama,
    "pix2struct": _flattened,
    "clap": _clap,
    "voxtral_realtime": _voxtral_realtime,
    "clap_audio_model": _clap,
    "autoformer": _series,
    "informer": _series,
    "time_series_transformer": _series,
    "SpeechT5ForTextToSpeech": _speecht5,
}
