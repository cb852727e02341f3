"""Fold every transformers model type that holds a BatchNorm, frozen ones and backbones included.

``--classes`` looks for them again: every model class of the modelling files that mention a
BatchNorm or a backbone is built on the meta device; per model type the class with most
BatchNorms is kept, of those a public one, of those the smallest.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from common import HERE, Subject, main
from helpers import batch_norm_names

CLASSES = HERE / "transformers_classes.json"
MENTIONS = re.compile(r"BatchNorm|batch_norm|load_backbone|AutoBackbone|timm")
SIDES = (64, 96, 128, 224, 256, 384, 512, 640)


# Which classes


# What a few types need to be set (the defaults of some do not fit together).
# Has no default configuration whose parts fit together.
LEFT_OUT = ("pp_ocrv6_small_det",)
REPVIT = {
    "model_type": "timm_wrapper",
    "architecture": "repvit_m1",
    "num_classes": 2,
    "model_args": {"in_chans": 3, "features_only": True, "out_indices": [0, 1, 2, 3]},
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "edgetam": {"vision_config": {"model_type": "edgetam_vision_model", "backbone_config": REPVIT}},
    "edgetam_vision_model": {"backbone_config": REPVIT},
    "seamless_m4t": {"vocab_size": 1000, "t2u_vocab_size": 1000},
    "tvp": {"num_frames": 2, "max_img_size": 128, "visual_prompt_size": 16},
    "uvdoc": {
        "backbone_config": {
            "model_type": "uvdoc_backbone",
            "out_features": [f"stage{i}" for i in range(1, 7)],
        }
    },
    "beit": {"out_indices": [3, 5, 7, 11]},
    "informer": {"prediction_length": 4, "context_length": 16, "num_time_features": 1},
    "timm_backbone": {"backbone": "resnet18", "use_pretrained_backbone": False},
    "patchtst": {"num_input_channels": 2, "context_length": 32, "patch_length": 4},
    "patchtsmixer": {"num_input_channels": 2, "norm_mlp": "BatchNorm", "context_length": 32},
}
SMALL_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "speech_encoder_layers",
    "t2u_encoder_layers",
    "t2u_decoder_layers",
)
LARGE = ("granite_speech", "omdet", "parakeet", "sam3_lite", "seamless", "emu3", "align", "lasr")


def config_of(model_type: str) -> Any:
    """The default configuration, with two layers where the model would be too large to run."""
    from transformers import CONFIG_MAPPING

    options = dict(OVERRIDES.get(model_type, {}))
    if model_type in ("granite_speech", "granite_speech_plus"):
        options["text_config"] = {"model_type": "granite", **SMALL_TEXT}
    config = CONFIG_MAPPING[model_type](**options)
    if model_type.startswith(LARGE):
        make_shallow(config)
    return config


def make_shallow(config: Any) -> None:
    """Two layers at most, in every part of a configuration."""
    for name in LAYERS:
        if isinstance(getattr(config, name, None), int):
            setattr(config, name, min(2, getattr(config, name)))
    for part in vars(config).values():
        if hasattr(part, "to_dict"):
            make_shallow(part)


def modelling_modules(model_type: str) -> Iterator[str]:
    """The modelling modules of a type that mention a BatchNorm or a backbone."""
    from transformers import CONFIG_MAPPING

    package = CONFIG_MAPPING[model_type].__module__.rpartition(".")[0]
    folder = Path(importlib.import_module(package).__file__ or "").parent
    for file in sorted(folder.glob("modeling_*.py")):
        if MENTIONS.search(file.read_text(encoding="utf-8")):
            yield f"{package}.{file.stem}"


def classes_of(model_type: str) -> Iterator[type]:
    """The model classes that take this type's configuration."""
    from transformers import CONFIG_MAPPING, PreTrainedModel

    config_class = CONFIG_MAPPING[model_type]
    for name in modelling_modules(model_type):
        module = importlib.import_module(name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            own = cls.__module__ == name and issubclass(cls, PreTrainedModel)
            if own and getattr(cls, "config_class", None) is config_class:
                yield cls


def find_classes() -> dict[str, dict[str, Any]]:
    """Model type to module, class and counts."""
    import transformers
    from transformers import CONFIG_MAPPING

    found = {}
    for model_type in CONFIG_MAPPING:
        if model_type in LEFT_OUT:
            continue
        best: tuple[Any, ...] | None = None
        for cls in classes_of(model_type):
            if cls.__name__.endswith("PreTrainedModel"):
                continue
            try:
                with torch.device("meta"):
                    model = cls(config_of(model_type))
            except Exception as error:
                text = f"{type(error).__name__}: {str(error)[:100]}"
                print(f"{model_type} {cls.__name__}: {text}", file=sys.stderr)
                continue
            bns, size = len(batch_norm_names(model)), sum(p.numel() for p in model.parameters())
            rank = (-bns, not hasattr(transformers, cls.__name__), size)
            if bns and (best is None or rank < best[:3]):
                best = (*rank, cls.__module__, cls.__name__)
        if best:
            found[model_type] = {"module": best[3], "class": best[4], "bns": -best[0]}
            found[model_type]["params"] = best[2]
            print(model_type, found[model_type], file=sys.stderr, flush=True)
    return found


def names() -> list[str]:
    """The model types."""
    return list(json.loads(CLASSES.read_text(encoding="utf-8")))


# Inputs


def attribute(config: Any, *names: str) -> Any:
    """The first of these attributes that the configuration or a part of it has."""
    parts = [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]
    for name, part in itertools.product(names, parts):
        value = getattr(part, name, None)
        if value is not None:
            return value
    return None


class Inputs:
    """Candidate inputs of a model, smallest first."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config
        self.generator = torch.Generator().manual_seed(1)
        self.parameters = set(inspect.signature(model.forward).parameters)

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def ids(self, *shape: int) -> torch.Tensor:
        return torch.randint(5, 50, shape, generator=self.generator)

    def images(self) -> Iterator[torch.Tensor]:
        channels = attribute(self.config, "num_channels", "in_channels") or 3
        own = attribute(self.config, "image_size") or 224
        height, width = own if isinstance(own, (list, tuple)) else (own, own)
        for batch, side in [(2, s) for s in SIDES]:
            yield self.random(batch, channels, side, side)
        yield self.random(1, channels, int(height), int(width))

    def candidates(self) -> Iterator[dict[str, Any]]:
        """Keyword arguments that may fit."""
        main_name = self.model.main_input_name
        makers: dict[str, Callable[[], Iterator[Any]]] = {
            "pixel_values": self.images,
            "input_ids": lambda: iter([self.ids(2, 8)]),
            "input_features": self.features,
            "input_values": lambda: iter([self.random(2, 4000), self.random(2, 16000)]),
            "past_values": self.series,
            "spectrogram": lambda: iter([self.random(2, 20, 80)]),
        }
        if main_name not in self.parameters:
            main_name = next(iter(self.parameters & set(makers)), main_name)
        first = next(iter(inspect.signature(self.model.forward).parameters))
        for value in itertools.chain(*[makers.get(main_name, makers["pixel_values"])()]):
            keywords = {main_name if main_name in self.parameters else first: value}
            yield keywords | self.others(keywords)

    def features(self) -> Iterator[torch.Tensor]:
        width = attribute(
            self.config, "num_mel_bins", "input_dim", "feature_projection_input_dim", "feature_size"
        )
        for size in (width or 80, 80, 128, 160):
            yield self.random(2, 64, size)

    def series(self) -> Iterator[torch.Tensor]:
        length = attribute(self.config, "context_length") or 32
        lags = max(attribute(self.config, "lags_sequence") or [0])
        channels = attribute(self.config, "num_input_channels") or 1
        yield self.random(2, length, channels)
        yield self.random(2, length + lags)

    def others(self, keywords: dict[str, Any]) -> dict[str, Any]:
        """Further inputs that the forward names and that cannot be left out."""
        more: dict[str, Any] = {}
        if "input_ids" in keywords and "attention_mask" in self.parameters:
            more["attention_mask"] = torch.ones(2, 8, dtype=torch.long)
        if "input_ids" in keywords and "pixel_values" in self.parameters:
            side = attribute(self.config, "image_size") or 224
            more["pixel_values"] = self.random(2, 3, side, side)
        if "pixel_values" in keywords and "input_ids" in self.parameters:
            more["input_ids"] = self.ids(len(keywords["pixel_values"]), 8)
        return more


def default_candidates(model: Any) -> Iterator[dict[str, Any]]:
    """What the library itself would try, where it has something."""
    from normswap.inputs import default_inputs

    inputs = default_inputs(model)
    yield dict(inputs.kwargs) | (
        {model.main_input_name: inputs.args[0]} if len(inputs.args) == 1 else {}
    )


SPECIAL: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "tvp": lambda i: {
        "input_ids": i.ids(1, 8),
        "attention_mask": torch.ones(1, 8, dtype=torch.long),
        "pixel_values": i.random(1, 2, 3, 128, 128),
    },
    "superglue": lambda i: {"pixel_values": i.random(1, 2, 3, 64, 64).sigmoid()},
    "speecht5": lambda i: {"input_ids": i.ids(2, 8), "decoder_input_values": i.random(2, 6, 80)},
    "efficientloftr": lambda i: {"pixel_values": i.random(1, 2, 1, 64, 64)},
    "clap": lambda i: {
        "input_ids": i.ids(1, 8),
        "input_features": i.random(1, 1, 1001, 64),
        "is_longer": torch.tensor([[False]]),
    },
    "informer": lambda i: {
        "past_values": i.random(2, 16 + 7),
        "past_time_features": i.random(2, 16 + 7, 1),
        "past_observed_mask": torch.ones(2, 16 + 7),
        "future_values": i.random(2, 4),
        "future_time_features": i.random(2, 4, 1),
    },
    "clap_audio_model": lambda i: {
        "input_features": i.random(1, 1, 1001, 64),
        "is_longer": torch.tensor([[False]]),
    },
    "granite_speech_encoder": lambda i: {"hidden_states": i.random(2, 64, 160)},
    "granite_speech_plus_encoder": lambda i: {"hidden_states": i.random(2, 64, 160)},
    "granite_speech5_encoder": lambda i: {"input_features": i.random(2, 64, 320)},
    "granite_speech5_ctc": lambda i: {"input_features": i.random(2, 64, 320)},
    "omdet-turbo": lambda i: {
        "pixel_values": i.random(1, 3, 640, 640),
        "classes_input_ids": i.ids(2, 6),
        "classes_attention_mask": torch.ones(2, 6, dtype=torch.long),
        "tasks_input_ids": i.ids(1, 6),
        "tasks_attention_mask": torch.ones(1, 6, dtype=torch.long),
        "classes_structure": torch.tensor([2]),
    },
    "edgetam": lambda i: {
        "pixel_values": i.random(1, 3, 1024, 1024),
        "input_points": torch.tensor([[[[10.0, 10.0]]]]),
        "input_labels": torch.tensor([[[1]]]),
    },
}


def build(model_type: str) -> Subject:
    """A model on random weights and the first inputs with which it runs."""
    import transformers

    transformers.logging.set_verbosity_error()
    entry = json.loads(CLASSES.read_text(encoding="utf-8"))[model_type]
    cls = getattr(importlib.import_module(entry["module"]), entry["class"])
    model = cls(config_of(model_type)).eval()
    if model_type == "emu3_vqgan":  # has no forward of its own
        return Subject(model.encoder, (torch.randn(1, 4, 3, 32, 32),), label="its encoder")
    inputs = Inputs(model)
    first = [SPECIAL[model_type](inputs)] if model_type in SPECIAL else []
    errors: list[str] = []
    for keywords in itertools.chain(first, inputs.candidates(), default_candidates(model)):
        try:
            with torch.inference_mode():
                model(**keywords)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {str(error)[:80]}")
            continue
        shapes = ", ".join(
            "x".join(map(str, v.shape)) for v in keywords.values() if torch.is_tensor(v)
        )
        return Subject(model, (), keywords, label=f"{entry['class']}, {shapes}")
    raise RuntimeError(f"no inputs run: {'; '.join(dict.fromkeys(errors))}")


if __name__ == "__main__":
    if "--classes" in sys.argv:
        CLASSES.write_text(json.dumps(find_classes(), indent=1) + "\n", encoding="utf-8")
    else:
        main(
            "BatchNorm folding over transformers model types",
            "transformers",
            names,
            build,
            timeout=300,
        )
