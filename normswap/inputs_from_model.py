"""Example inputs built from what a model says of itself: a transformers config, timm's settings."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)

from normswap.caches import forget_cached
from normswap.errors import NormswapError
from normswap.inputs import Draw, Inputs

__all__ = ["default_inputs"]


def default_inputs(model: nn.Module) -> Inputs:
    """Inputs of batch 2 built from the model's transformers config or timm ``default_cfg``.

    Where the config leaves more than one way to call the model, the first one that runs on fake
    tensors is taken. Token ids lie in the vocabulary and are no special tokens.

    Raises:
        NormswapError: the model says nothing, or not enough; the message shows the call to make.
    """
    model = _unwrap(model)
    candidates = list(_candidates(model))
    if not candidates:
        raise NormswapError(_what_to_pass(model))
    if len(candidates) == 1:
        return candidates[0]
    return next((inputs for inputs in candidates if _runs_on_fakes(model, inputs)), candidates[0])


def _unwrap(model: nn.Module) -> nn.Module:
    """Look through ``torch.compile`` and data parallelism, whose forward says ``*args``."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and type(model).__name__.endswith("DataParallel"):
            inner = model._modules.get("module")
        if inner is None:
            return model
        model = inner


def _candidates(model: nn.Module) -> Iterator[Inputs]:
    config = getattr(model, "config", None)
    if isinstance(getattr(config, "model_type", None), str):
        yield from _from_config(model, config)
        return
    described: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = _get(described, "input_size")
    if isinstance(size, (tuple, list)):
        yield from _from_input_size(model, described, [int(n) for n in cast("list[Any]", size)])


def _get(described: Any, name: str) -> Any:
    if isinstance(described, Mapping):
        return cast("Mapping[str, Any]", described).get(name)
    return getattr(described, name, None)


def _from_input_size(model: nn.Module, described: Any, size: list[int]) -> Iterator[Inputs]:
    """The ``input_size`` of timm, which ignores ``in_chans=`` and ``img_size=`` at creation."""
    first_conv = _get(described, "first_conv")
    if isinstance(first_conv, str):
        try:
            channels = getattr(model.get_submodule(first_conv), "in_channels", size[0])
        except AttributeError:
            channels = size[0]
        size = [channels, *size[1:]]
    draw = Draw()
    built = [getattr(module, "img_size", None) for module in model.modules()]
    for img_size in built:
        if isinstance(img_size, (tuple, list)) and len(cast("list[Any]", img_size)) == 2:
            yield Inputs((draw.normal(2, size[0], *cast("list[int]", img_size)),))
            break
    yield Inputs((draw.normal(2, *size),))


_VISION = ("vision", "visual", "image", "backbone")
_PATCH_GRID = (1, 4, 4)  # frames, rows and columns of patches


class _FromConfig:
    """Tensors for the argument names that transformers' models share, as far as a config tells."""

    def __init__(self, config: Any, batch: int) -> None:
        self._configs = list(_nested_configs(config))
        self._batch = batch
        self._draw = Draw()
        self._makers: dict[str, Callable[[], list[Tensor]]] = {
            "bbox": self._boxes,
            "grid_thw": lambda: [torch.tensor([_PATCH_GRID])],
            "hidden_states": self._patches,
            "input_features": self._features,
            "input_values": self._waveform,
            "inputs_embeds": self._embeds,
            "past_observed_mask": lambda: [torch.ones_like(t) for t in self._series()],
            "past_time_features": self._time_features,
            "past_values": self._series,
            "pixel_mask": lambda: [torch.ones_like(p[:, 0]).long() for p in self._images()],
            "pixel_values_videos": self._clips,
            "pixel_values": lambda: [*(self._clips() if self._frames() else []), *self._images()],
        }
        self._endings: dict[str, Callable[[], list[Tensor]]] = {
            "input_ids": self._ids,
            "attention_mask": lambda: [torch.ones(self._batch, self._length()).long()],
        }

    def options(self, name: str) -> list[Tensor]:
        """The tensors that argument ``name`` may want, likeliest first; empty if unknown."""
        if name in self._makers:
            return self._makers[name]()
        return next((make() for end, make in self._endings.items() if name.endswith(end)), [])

    def _find(self, *names: str, near: tuple[str, ...] = ()) -> Any:
        """The first setting of one of these names, in sub-configs called like ``near`` first."""
        preferred = [c for path, c in self._configs if any(word in path for word in near)]
        for config in (*preferred, *(c for _, c in self._configs)):
            for name in names:
                value = getattr(config, name, None)
                if value is not None and not isinstance(value, bool):
                    return value
        return None

    def _integer(self, *names: str, near: tuple[str, ...] = (), default: int = 0) -> int:
        value = self._find(*names, near=near)
        return value if isinstance(value, int) else default

    def _length(self) -> int:
        names = ("max_position_embeddings", "n_positions", "max_target_positions")
        limit = self._integer(*names, near=("text",), default=1024)
        return max(1, min(16, limit // 2))  # half: some models number positions from an offset

    def _ids(self) -> list[Tensor]:
        vocabulary = self._integer("vocab_size", near=("text", "decoder"))
        if vocabulary < 1:
            return []
        special = self._special_ids()
        allowed = [i for i in range(vocabulary) if i not in special] or list(range(vocabulary))
        index = self._draw.below(len(allowed), (self._batch, self._length()))
        return [torch.tensor(allowed)[index]]

    def _special_ids(self) -> set[int]:
        """Ids with a meaning: padding and end shift or cut a sequence, images need pixels."""
        found: set[int] = set()
        for _, config in self._configs:
            for name, value in vars(config).items():
                if name.endswith(("token_id", "token_ids", "token_index", "token")):
                    values = cast("list[Any]", value if isinstance(value, list) else [value])
                    found.update(v for v in values if isinstance(v, int))
        return found

    def _embeds(self) -> list[Tensor]:
        width = self._integer("hidden_size", "d_model", "n_embd", near=("text",))
        return [self._draw.normal(self._batch, self._length(), width)] if width else []

    def _boxes(self) -> list[Tensor]:
        """Boxes of words on a page, in thousandths or in parts of it."""
        corners = torch.tensor([100, 200, 300, 400]).expand(self._batch, self._length(), 4)
        return [corners.clone(), corners / 1000]

    def _patches(self) -> list[Tensor]:
        """Flattened patches of one image, or what a model without an embedding takes."""
        patch = self._integer("patch_size")
        frames = self._integer("temporal_patch_size")
        width = self._channels() * frames * patch * patch
        return [self._draw.normal(math.prod(_PATCH_GRID), width)] if width else self._embeds()

    def _channels(self) -> int:
        return self._integer("num_channels", "in_channels", "in_chans", near=_VISION, default=3)

    def _size(self) -> tuple[int, int]:
        return _height_and_width(self._find("image_size", "img_size", "crop_size", near=_VISION))

    def _frames(self) -> int:
        return self._integer("num_frames", "frames_per_clip", near=_VISION)

    def _images(self) -> list[Tensor]:
        return [self._draw.normal(self._batch, self._channels(), *self._size())]

    def _clips(self) -> list[Tensor]:
        shape = (self._batch, self._frames() or 8, self._channels(), *self._size())
        return [self._draw.normal(*shape)]

    def _features(self) -> list[Tensor]:
        near = ("audio", "speech", "encoder")
        names = ("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim")
        bins = self._integer(*names, "feature_size", near=near)
        if not bins:
            return []
        positions = self._integer("max_source_positions", near=near)
        channel_first = self._draw.normal(self._batch, bins, 2 * positions or 128)
        return [channel_first, self._draw.normal(self._batch, 128, bins)]

    def _waveform(self) -> list[Tensor]:
        bins, frames = self._integer("num_mel_bins"), self._integer("max_length")
        spectrogram = [self._draw.normal(self._batch, frames, bins)] if bins and frames else []
        strides: Any = self._find("conv_stride", "upsampling_ratios", "downsampling_ratios")
        # 30720 is a multiple of the usual hops between frames (160, 256, 320, 512, 1920).
        samples = 16 * math.prod(strides) if isinstance(strides, (list, tuple)) else 30720
        channels = self._integer("audio_channels", default=1)
        mono = self._draw.normal(self._batch, samples)
        return [*spectrogram, mono, self._draw.normal(self._batch, channels, samples)]

    def _series(self) -> list[Tensor]:
        length = self._past()
        channels = self._integer("num_input_channels", "input_size", default=1)
        one = [self._draw.normal(self._batch, length)] if channels == 1 else []
        return [*one, self._draw.normal(self._batch, length, channels)] if length else []

    def _time_features(self) -> list[Tensor]:
        return [self._draw.normal(self._batch, self._past(), self._integer("num_time_features"))]

    def _past(self) -> int:
        lags: Any = self._find("lags_sequence") or [0]
        return self._integer("context_length") + max(cast("list[int]", lags))


def _nested_configs(config: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The config and every config in it, outermost first, with the path of attribute names."""
    level = [(path, config)]
    seen: set[int] = set()
    while level:
        yield from level
        seen.update(id(c) for _, c in level)
        level = [
            (f"{outer}.{name}", inner)
            for outer, c in level
            for name, inner in vars(c).items()
            if isinstance(getattr(inner, "model_type", None), str) and id(inner) not in seen
        ]


def _height_and_width(size: Any) -> tuple[int, int]:
    if isinstance(size, int):
        return size, size
    if isinstance(size, Mapping):
        named = cast("Mapping[str, int]", size)
        return named.get("height", 224), named.get("width", 224)
    if isinstance(size, (tuple, list)) and len(cast("list[Any]", size)) >= 2:
        return tuple(cast("list[int]", size)[-2:])  # type: ignore[return-value]
    return 224, 224


def _from_config(model: nn.Module, config: Any) -> Iterator[Inputs]:
    accepted = inspect.signature(model.forward).parameters
    required = [n for n in accepted if n not in {"args", "kwargs"} and _is_required(accepted[n])]
    main: Any = getattr(model, "main_input_name", "input_ids")
    names = [main] if isinstance(main, str) else list(cast("list[str]", main))
    # The argument names that stand for a whole input; boxes go with the words of `input_ids`.
    common = ("input_ids", "pixel_values", "input_features", "input_values", "past_values")
    if not any(name in accepted for name in names):
        names = [next((n for n in common if n in accepted), "")]
    if getattr(config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    names = [n for n in dict.fromkeys((*names, *required)) if n in accepted]
    # Two towers (text beside images or sound) need both, though each argument has a default.
    both = list(dict.fromkeys((*names, *(n for n in (*common[:4], "bbox") if n in accepted))))
    for batch in (2, 1):  # 1: some heads take no batch without a padding token
        build = _FromConfig(config, batch)
        for wanted in (names, both) if both != names else (names,):
            options = [build.options(name) for name in wanted]
            for values in itertools.islice(itertools.product(*options), 8):
                yield Inputs((), dict(zip(wanted, values, strict=True)))


def _is_required(parameter: inspect.Parameter) -> bool:
    kinds = (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY, parameter.POSITIONAL_ONLY)
    return parameter.default is parameter.empty and parameter.kind in kinds


def _runs_on_fakes(model: nn.Module, inputs: Inputs) -> bool:
    """Whether the model runs, without computing: also true where only the data can tell."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Tensor) -> Tensor:
        device = "cpu" if tensor.is_meta else tensor.device
        with mode:
            return torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device
            )

    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        twin_tensor = fake(tensor)
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(twin_tensor, False) if is_parameter else twin_tensor
    with ExitStack() as stack:
        stack.enter_context(_silence())
        stack.enter_context(forget_cached(model))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode())
        stack.enter_context(mode)
        try:
            twin = copy.deepcopy(model, memo)
            for module in twin.modules():
                module.training = False
            given = inputs.map(fake)
            twin(*given.args, **given.kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return True
        except Exception:
            return False
    return True


@contextmanager
def _silence() -> Generator[None]:
    """No warnings, and none of the tracebacks that torch logs when an op fails on fakes."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, log.disabled = log.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.disabled = disabled


def _what_to_pass(model: nn.Module) -> str:
    """The error of a model whose inputs cannot be derived, with a call that is likely right."""
    parameters = inspect.signature(model.forward).parameters
    required = [name for name in parameters if _is_required(parameters[name])]
    first = _first_input(model)
    call = f"example_inputs={first}"
    if len(required) > 1:
        others = ", ".join(required[1:])
        call = f"example_inputs=({first}, {others})"
    wants = f"forward({', '.join(required)})" if required else "forward"
    return (
        f"the inputs of {type(model).__name__} cannot be derived from what it says of itself (a "
        f"transformers config or timm's default_cfg), so they have to be given. Its {wants} is "
        f"called as model(*example_inputs); pass for instance\n    {call}"
    )


def _first_input(model: nn.Module) -> str:
    """A tensor that the first layer with weights takes, as Python source."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            return f"torch.randn(2, {module.in_channels}, 1024)"
        if isinstance(module, nn.Conv2d):
            return f"torch.randn(2, {module.in_channels}, 224, 224)"
        if isinstance(module, nn.Conv3d):
            return f"torch.randn(2, {module.in_channels}, 16, 112, 112)"
        if isinstance(module, nn.Linear):
            return f"torch.randn(2, {module.in_features})"
        if isinstance(module, nn.Embedding):
            return f"torch.randint({module.num_embeddings}, (2, 16))"
    return "torch.randn(2, 3, 224, 224)"
