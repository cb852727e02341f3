"""Small models of transformers' model types with random parameters, and inputs that they take."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from pool import BuildError
from small_configs import configurations
from small_inputs import Keywords, first_that_runs, short
from torch import Tensor, nn

LARGEST = 160_000_000  # parameters
PATIENCE = 30.0  # seconds of trying configurations and inputs

# The auto mappings, the heads that reach most of a model first.
HEADS = (
    "SEQ_TO_SEQ_CAUSAL_LM",
    "SPEECH_SEQ_2_SEQ",
    "CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "CTC",
    "IMAGE_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "AUDIO_CLASSIFICATION",
    "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "INSTANCE_SEGMENTATION",
    "UNIVERSAL_SEGMENTATION",
    "SEMANTIC_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "MASK_GENERATION",
    "KEYPOINT_MATCHING",
    "POSE_ESTIMATION",
    "IMAGE_TO_IMAGE",
    "MASKED_IMAGE_MODELING",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "DOCUMENT_QUESTION_ANSWERING",
    "VISUAL_QUESTION_ANSWERING",
    "TIME_SERIES_PREDICTION",
    "TOKEN_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "PRETRAINING",
)


def heads() -> dict[str, list[str]]:
    """Model type to one or two of its classes: the first two heads, or one and the base model."""
    from transformers.models.auto import modeling_auto

    def mapping(name: str) -> dict[str, Any]:
        return getattr(modeling_auto, f"MODEL_FOR_{name}_MAPPING_NAMES")

    chosen: dict[str, list[str]] = {}
    for names in [*map(mapping, HEADS), modeling_auto.MODEL_MAPPING_NAMES, *_remaining()]:
        for model_type, entry in names.items():
            classes = chosen.setdefault(model_type, [])
            first = entry if isinstance(entry, str) else entry[0]
            if len(classes) < 2 and first not in classes:
                classes.append(first)
    return chosen


def _remaining() -> Iterator[dict[str, Any]]:
    from transformers.models.auto import modeling_auto

    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES"):
            yield mapping


def causal_lms() -> list[str]:
    """Every model type with a causal language model."""
    from transformers.models.auto import modeling_auto

    return list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# -- building -------------------------------------------------------------------------------------


def build_causal_lm(model_type: str, experts: str = "eager") -> tuple[nn.Module, Keywords]:
    """A small causal language model in double precision and the inputs with which it runs.

    ``experts``: how a mixture of experts is computed; not every implementation takes float64.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    make_model = transformers.AutoModelForCausalLM.from_config
    if model_type.startswith("musicgen"):  # its class takes the configuration of a part
        mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        make_model = getattr(transformers, mapping[model_type])
    errors: list[str] = []
    for make in configurations(model_type):
        try:
            config = make()
            config = config.decoder if model_type.startswith("musicgen") else config
            model = _double(make_model, config)
            _set_experts(model, experts)
            fill_zeros(model)
        except Exception as error:
            errors.append(short(error))
            continue
        for inputs in _token_ids(config):
            try:
                logits(model, inputs)
            except Exception as error:
                errors.append(short(error))
                continue
            return model, inputs
    raise BuildError("; ".join(dict.fromkeys(errors)))


def build(model_type: str, class_name: str) -> tuple[nn.Module, Keywords]:
    """A small model of this class in double precision and the inputs with which it runs.

    Where a model takes several kinds of input, the first configuration that runs with all of them.
    """
    import transformers

    start = time.perf_counter()
    cls = getattr(transformers, class_name)
    errors: list[str] = []
    try:
        for whole in (True, False):
            for make in configurations(model_type, stages=True):
                if time.perf_counter() - start > PATIENCE / (1 + whole):
                    errors.append("no more tried")
                    break
                model = _made(cls, make, errors)
                if model is None:
                    continue
                inputs, failed = first_that_runs(model, outputs, whole=whole)
                if inputs is not None:
                    return model, inputs
                if whole and not failed:  # it takes one kind only
                    break
                errors += failed
    except Exception as error:  # there is no default configuration
        errors.append(short(error))
    raise BuildError("; ".join(dict.fromkeys(errors)))


def _made(cls: Any, make: Callable[[], Any], errors: list[str]) -> nn.Module | None:
    try:
        model = _double(cls._from_config, _for_class(cls, make()))
        _set_experts(model, "batched_mm")
    except Exception as error:
        errors.append(short(error))
        return None
    return model


def _double(make_model: Callable[[Any], nn.Module], config: Any) -> nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in make_model(config).parameters())
    if size > LARGEST:
        raise BuildError(f"{size:,} parameters")
    torch.manual_seed(0)
    return make_model(config).eval().double()


def _set_experts(model: nn.Module, implementation: str) -> None:
    with contextlib.suppress(Exception):  # it has no experts
        model.set_experts_implementation(implementation)


def _for_class(cls: Any, config: Any) -> Any:
    """The configuration, or the part of it that the class takes."""
    wanted = getattr(cls, "config_class", None)
    if wanted is None or isinstance(config, wanted):
        return config
    parts = [v for v in vars(config).values() if isinstance(v, wanted)]
    return parts[0] if parts else config


def _token_ids(config: Any) -> Iterator[Keywords]:
    generator = torch.Generator().manual_seed(1)
    books = getattr(getattr(config, "decoder", config), "num_codebooks", None) or 1
    ids = torch.randint(5, 90, (2, 8), generator=generator)
    yield {"input_ids": ids, "use_cache": False}
    yield {"input_ids": ids}
    many = torch.randint(5, 90, (2 * books, 8), generator=generator)
    yield {"input_ids": many, "use_cache": False}


def outputs(model: nn.Module, inputs: Keywords) -> Any:
    """What the model returns, in true float64."""
    from normswap.precision import true_float64

    torch.manual_seed(0)
    with true_float64():
        return model(**inputs)


def logits(model: nn.Module, inputs: Keywords) -> Tensor:
    """What the model predicts, in true float64."""
    from normswap.precision import true_float64

    torch.manual_seed(0)
    with true_float64():
        out = model(**inputs)
        return (out.logits if getattr(out, "logits", None) is not None else out[0]).clone()


def is_usable(out: Any) -> bool:
    """Whether every output is finite (where one may be) and some output varies."""
    from helpers import tensors_in

    values = [t for t in tensors_in(out) if t.is_floating_point() and t.numel()]
    return (
        bool(values)
        and all(bool(t.isfinite().any()) for t in values)
        and any(float(t[t.isfinite()].std()) > 0 for t in values if t.numel() > 1)
    )


# -- random parameters ----------------------------------------------------------------------------


@torch.no_grad()
def fill_zeros(model: nn.Module) -> None:
    """Random values where a parameter is all zero, so that nothing is hidden behind it."""
    generator = torch.Generator().manual_seed(2)
    for tensor in model.parameters():
        if tensor.is_floating_point() and not tensor.any():
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


@torch.no_grad()
def randomise_norms(sites: Sequence[Any]) -> None:
    """Random scales, some of them negative and one zero, and random shifts."""
    generator = torch.Generator().manual_seed(3)
    for site in sites:
        for name, tensor in site.module.named_parameters():
            value = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            if site.spec is not None and name == site.spec.weight and value.numel() > 2:
                value.view(-1)[0] = -float(site.spec.unit_offset)  # a scale of zero
                value.view(-1)[1] = -2.0
            tensor.copy_(value if value.dim() < 3 else 0.1 * value)


@torch.no_grad()
def randomise_all(model: nn.Module, sites: Sequence[Any]) -> None:
    """Random values in every parameter, of a size that keeps each layer's output near one.

    Scales of norms have both signs and one zero; embeddings, tokens and positions a mean that is
    not zero; every bias, shift and layer scale is drawn too. Decays and the like, which start out
    as a curve, only get noise.
    """
    generator = torch.Generator().manual_seed(4)
    done: set[int] = set()
    for site in sites:
        for name, tensor in site.module.named_parameters():
            if id(tensor) not in done and tensor.is_floating_point():
                done.add(id(tensor))
                is_scale = site.spec is not None and name == site.spec.weight
                offset = float(site.spec.unit_offset) if is_scale else 0.0
                _norm_tensor(tensor, generator, scale=is_scale, offset=offset)
    for module in model.modules():
        for name, tensor in module._parameters.items():
            if tensor is not None and tensor.is_floating_point() and id(tensor) not in done:
                done.add(id(tensor))
                _other_tensor(module, name, tensor, generator)
        for name, buffer in module._buffers.items():
            if name == "running_mean" and buffer is not None:
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name == "running_var" and buffer is not None:
                buffer.copy_(torch.exp(0.5 * torch.randn(buffer.shape, generator=generator)))


def _norm_tensor(tensor: Tensor, generator: torch.Generator, *, scale: bool, offset: float) -> None:
    values = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    if not scale:
        tensor.copy_(0.5 * values)
        return
    values = torch.sign(values) * (0.5 + values.abs() / 2)
    if values.numel() > 2:
        values.view(-1)[values.numel() // 2] = 0.0
    tensor.copy_(values - offset)


def _other_tensor(module: nn.Module, name: str, tensor: Tensor, generator: torch.Generator) -> None:
    normal = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
    if tensor.numel() <= 1:  # temperatures
        tensor.mul_(1.1)
    elif isinstance(module, nn.Embedding) or (tensor.dim() > 2 and tensor.shape[0] == 1):
        tensor.copy_(0.7 * normal + 0.4)
    elif tensor.dim() >= 2:
        tensor.copy_(normal / _fan_in(tensor) ** 0.5)
    elif "bias" in name:
        tensor.copy_(0.3 * normal)
    elif bool((tensor == tensor[0]).all()):  # scales and shifts
        tensor.copy_(torch.sign(normal) * (0.5 + normal.abs() / 2))
    else:
        tensor.add_(0.1 * normal)


def _fan_in(tensor: Tensor) -> float:
    """About how many values one output sums; a stack of matrices counts as one matrix."""
    if tensor.dim() >= 4:
        return tensor[0].numel()
    return sum(tensor.shape[-2:]) / 2
