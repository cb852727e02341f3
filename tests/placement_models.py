"""Transformers whose norms are moved in tests, and the residual forms written out by hand.

A :class:`Family` names the branches and norms of a model. From these parts, called one after the
other as the original calls them, the formulas below compute what each conversion has to give.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import small_transformers
import torch
import torch.nn.functional as F
from helpers import random_input, relative_error
from small_transformers import VOCABULARY, fill_all, token_ids
from torch import Tensor, nn

import normswap as ns
from normswap.precision import true_float64

WIDTH = 8
OPS = {"copy", "rotate", "fold", "scale", "untie", "new", "dropped", "calibrated"}

# The parts of a model


@dataclass(frozen=True)
class Part:
    """A sublayer: its norm, and its parallel branches, each a chain of modules and functions."""

    norm: str
    branches: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class StackParts:
    """A stack: the module that gets the beginning of its stream, its sublayers, other norms."""

    first: str
    sublayers: tuple[Part, ...]
    embedding_norm: str = ""
    final_norms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """A small model of a kind."""

    form: str
    build: Callable[[], nn.Module]
    inputs: Callable[..., Any]
    stacks: tuple[StackParts, ...] = ()


def layers(
    pattern: str, count: int, *sublayers: tuple[str, tuple[Any, ...] | list[tuple[Any, ...]]]
) -> tuple[Part, ...]:
    """The sublayers of numbered layers; names are relative to the layer."""

    def full(number: int, item: Any) -> Any:
        return f"{pattern.format(number)}.{item}" if isinstance(item, str) else item

    return tuple(
        Part(
            full(number, norm),
            tuple(
                tuple(full(number, item) for item in chain)
                for chain in (branches if isinstance(branches, list) else [branches])
            ),
        )
        for number in range(count)
        for norm, branches in sublayers
    )


class Parts:
    """A model in pieces: every module can be called as the model called it on some inputs."""

    def __init__(self, model: nn.Module, family: Family, inputs: Any, within: Any = None) -> None:
        self.model, self.family, self.within = model, family, within or true_float64
        self.calls: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.constants: dict[str, float] = {}
        self.expected: dict[str, Tensor] = {}
        self.streams: dict[str, list[Tensor]] = {}
        self.results: dict[str, list[Tensor]] = {}
        handles = [
            module.register_forward_pre_hook(self._keep(name), with_kwargs=True)
            for name, module in model.named_modules()
        ]
        call(model, inputs, self.within)
        for handle in handles:
            handle.remove()

    def _keep(self, name: str) -> Any:
        def hook(_module: nn.Module, args: Any, kwargs: Any) -> None:
            self.calls.setdefault(name, (args, kwargs))

        return hook

    def start(self, stack: StackParts) -> Tensor:
        """The beginning of the stream, before any norm."""
        args, kwargs = self.calls[stack.first]
        return args[0] if args else next(v for v in kwargs.values() if isinstance(v, Tensor))

    def norm(self, name: str, x: Tensor) -> Tensor:
        """A norm of the model, or nothing where the name is empty."""
        return self.model.get_submodule(name)(x) if name else x

    def plain(self, name: str, x: Tensor) -> Tensor:
        """The norm without scale and shift, written out."""
        norm: Any = self.model.get_submodule(name)
        eps = getattr(norm, "eps", None) or norm.variance_epsilon
        if isinstance(norm, nn.LayerNorm):
            x = x - x.mean(-1, keepdim=True)
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def branch(self, part: Part, x: Tensor, memory: Tensor | None) -> Tensor:
        """What a sublayer adds: the sum of its branches."""
        total = sum(self._chain(chain, x, memory) for chain in part.branches)
        self.results.setdefault(part.norm, []).append(total)
        return total

    def _chain(self, chain: tuple[Any, ...], x: Tensor, memory: Tensor | None) -> Tensor:
        for item in chain:
            x = self._called(item, x, memory) if isinstance(item, str) else item(x)
        return x

    def _called(self, name: str, x: Tensor, memory: Tensor | None) -> Tensor:
        module = self.model.get_submodule(name)
        args, kwargs = self.calls[name]
        if isinstance(module, nn.MultiheadAttention):
            other = x if args[0] is args[1] else memory
            return module(x, other, other, **kwargs)[0]
        kwargs = {k: x if k == "hidden_states" else v for k, v in kwargs.items()}
        if kwargs.get("key_value_states") is not None:
            kwargs["key_value_states"] = memory
        result = module(x, *args[1:], **kwargs) if args else module(**kwargs)
        return result[0] if isinstance(result, tuple) else result


def call(model: nn.Module, inputs: Any, within: Any = true_float64) -> Any:
    """Run on a tensor, a tuple or a mapping, in true float64."""
    with within():
        if isinstance(inputs, Mapping):
            return model(**inputs)
        return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def last(output: Any) -> Tensor:
    """The end of the stream that a model returns."""
    return output if isinstance(output, Tensor) else output.last_hidden_state


# Residual forms, from the parts

Formula = Callable[[Parts, StackParts, "Tensor | None"], Tensor]


def compute(parts: Parts, formula: Formula) -> Tensor:
    """A formula on each stack in turn; later ones attend to the one before."""
    memory = None
    with parts.within():
        for stack in parts.family.stacks:
            memory = formula(parts, stack, memory)
    assert memory is not None
    return memory


def _ended(p: Parts, stack: StackParts, x: Tensor, skipped: int = 0) -> Tensor:
    for name in stack.final_norms[skipped:]:
        x = p.norm(name, x)
    return x


def post(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """``x' = N(x + f(x))``, the original of a post-norm model."""
    x = p.norm(stack.embedding_norm, p.start(stack))
    p.streams.setdefault(stack.embedding_norm, []).append(p.start(stack))
    for part in stack.sublayers:
        y = x + p.branch(part, x, memory)
        p.streams.setdefault(part.norm, []).append(y)
        x = p.norm(part.norm, y)
    return _ended(p, stack, x)


def pre(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """``u' = u + f(P u)``, the original of a pre-norm model."""
    u = p.norm(stack.embedding_norm, p.start(stack))
    for part in stack.sublayers:
        p.streams.setdefault(part.norm, []).append(u)
        u = u + p.branch(part, p.norm(part.norm, u), memory)
    return _ended(p, stack, u)


def rotated_to_pre(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """The true pre-norm of a post-norm model: its norms one place earlier, onto the branches."""
    u = p.start(stack)
    norms = [stack.embedding_norm, *(part.norm for part in stack.sublayers)]
    for part, norm in zip(stack.sublayers, norms, strict=False):
        u = u + p.branch(part, p.norm(norm, u), memory)
    return _ended(p, stack, p.norm(norms[-1], u))


def scaled_to_pre(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """The true pre-norm with branches ``c (f + b)``: of the size that the clean skip has."""
    u = p.start(stack)
    norms = [stack.embedding_norm, *(part.norm for part in stack.sublayers)]
    for part, norm in zip(stack.sublayers, norms, strict=False):
        f = p.branch(part, p.norm(norm, u), memory)
        if norm:
            f = p.constants[f"{norm} factor"] * (f + p.model.get_submodule(norm).bias)
        u = u + f
    return _ended(p, stack, p.norm(norms[-1], u))


def fitted_to_pre(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """The same while the factors are fitted, each on the stream that those before it made."""
    for norm in (stack.embedding_norm, *(part.norm for part in stack.sublayers[:-1])):
        if norm:
            y, module = p.streams[norm][0], p.model.get_submodule(norm)
            p.constants[f"{norm} factor"] = 1.0
            p.expected[norm] = module(y) - module.bias
    u = p.start(stack)
    norms = [stack.embedding_norm, *(part.norm for part in stack.sublayers)]
    for part, norm in zip(stack.sublayers, norms, strict=False):
        f = p.branch(part, p.norm(norm, u), memory)
        if norm:
            factor = p.constants[f"{norm} factor"] = _factor(u, p.expected[norm])
            f = factor * (f + p.model.get_submodule(norm).bias)
        u = u + f
    return _ended(p, stack, p.norm(norms[-1], u))


def rotated_to_post(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """The norms of a pre-norm model one place later, onto the stream."""
    x = p.norm(stack.embedding_norm, p.start(stack))
    norms = [*(part.norm for part in stack.sublayers), stack.final_norms[0]]
    x = p.norm(norms[0], x)
    for part, norm in zip(stack.sublayers, norms[1:], strict=True):
        x = p.norm(norm, x + p.branch(part, x, memory))
    return _ended(p, stack, x, 1)


def calibrated_post(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """``y' = n(s y) + f(P(s y)) / s'``, with a constant ``s`` a sublayer."""
    y, before = p.norm(stack.embedding_norm, p.start(stack)), 1.0
    for part in stack.sublayers:
        x, size = before * y, p.constants[part.norm]
        y = p.plain(part.norm, x) + p.branch(part, p.norm(part.norm, x), memory) / size
        before = size
    return _ended(p, stack, before * y)


def deepnorm(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """``y' = a n(y) + f(P(y))``."""
    y = p.norm(stack.embedding_norm, p.start(stack))
    for part in stack.sublayers:
        skip = p.constants[part.norm] * p.plain(part.norm, y)
        y = skip + p.branch(part, p.norm(part.norm, y), memory)
    return _ended(p, stack, y)


def _closed(p: Parts, part: Part, like: str, f: Tensor) -> Tensor:
    return p.plain(like, f) * p.constants.get(f"{part.norm} result", 1.0)


def sandwich_of_pre(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """``u' = u + c n(f(P u))``."""
    u = p.norm(stack.embedding_norm, p.start(stack))
    for part in stack.sublayers:
        f = p.branch(part, p.norm(part.norm, u), memory)
        u = u + _closed(p, part, part.norm, f)
    return _ended(p, stack, u)


def sandwich_of_post(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
    """As :func:`rotated_to_pre`, with a norm behind each branch."""
    u = p.start(stack)
    norms = [stack.embedding_norm, *(part.norm for part in stack.sublayers)]
    for part, norm in zip(stack.sublayers, norms, strict=False):
        f = p.branch(part, p.norm(norm, u), memory)
        u = u + _closed(p, part, part.norm, f)
    return _ended(p, stack, p.norm(norms[-1], u))


def residual_dual(second: Mapping[str, nn.Module]) -> Formula:
    """Post-norm with ``N_d(x_0 + Σ f)`` added at the end of each stack."""

    def formula(p: Parts, stack: StackParts, memory: Tensor | None) -> Tensor:
        x = total = p.norm(stack.embedding_norm, p.start(stack))
        for part in stack.sublayers:
            f = p.branch(part, x, memory)
            total = total + f
            x = p.norm(part.norm, x + f)
        return _ended(p, stack, x + second[stack.sublayers[-1].norm](total))

    return formula


def calibrate(parts: Parts, batches: Sequence[Any]) -> None:
    """The geometric means of the sizes of streams and branches of the original over batches.

    In the arithmetic of the model itself, as they are measured: some cast to float32 inside.
    """
    streams: dict[str, list[Tensor]] = {}
    results: dict[str, list[Tensor]] = {}
    logs: dict[str, list[float]] = {}
    for batch in batches:
        p = Parts(parts.model, parts.family, batch, torch.no_grad)
        compute(p, post if parts.family.form == "post" else pre)
        if parts.family.form == "post":
            known = {k: list(v) for k, v in p.results.items()}
            compute(p, fitted_to_pre)
            p.results = known
            for name, factor in p.constants.items():
                logs.setdefault(name, []).append(math.log(factor))
        for name, values in p.streams.items():
            streams.setdefault(name, []).extend(values)
        for name, values in p.results.items():
            results.setdefault(name, []).extend(values)
    for name, values in streams.items():
        if not name:
            continue
        norm: Any = parts.model.get_submodule(name)
        layer = isinstance(norm, nn.LayerNorm)
        parts.constants[name] = _size(values, centred=layer)
    for name, values in results.items():
        parts.constants[f"{name} result"] = _size(values)
    for name, factors in logs.items():
        parts.constants[name] = math.exp(sum(factors) / len(factors))


def _factor(y: Tensor, z: Tensor) -> float:
    """Least squares ``y ≈ c z`` of centred rows, relative to each ``y``; or the sizes' ratio."""
    y, z = y.double().reshape(z.shape), z.double()
    y, z = y - y.mean(-1, keepdim=True), z - z.mean(-1, keepdim=True)
    size = y.norm(dim=-1, keepdim=True)
    y, z = y / size, z / size
    factor = float((y * z).sum() / z.square().sum())
    return factor if factor > 0 else float(y.norm() / z.norm())


def _size(values: Sequence[Tensor], *, centred: bool = False) -> float:
    rows = torch.cat([v.reshape(-1, v.shape[-1]) for v in values]).double()
    if centred:
        rows = rows - rows.mean(-1, keepdim=True)
    return math.exp(float(rows.square().mean(-1).sqrt().log().mean()))


# The models


def _library(config: str, model: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, config)(**settings)
        options = {"add_pooling_layer": False} if model in ("BertModel", "ViTModel") else {}
        return fill_all(getattr(transformers, model)(made, **options))

    return build


def _text(seed: int = 1, batch: int = 2, length: int = 6) -> dict[str, Any]:
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, -1] = 0
    return {"input_ids": token_ids(batch, length, seed=seed), "attention_mask": mask}


def _causal(seed: int = 1, batch: int = 2, length: int = 6) -> dict[str, Any]:
    return {"input_ids": token_ids(batch, length, seed=seed), "use_cache": False}


def _pair(seed: int = 1, batch: int = 2, length: int = 6) -> dict[str, Any]:
    return {
        **_text(seed, batch, length),
        "decoder_input_ids": token_ids(batch, length - 1, seed=seed + 7),
        "use_cache": False,
    }


def _pixels(seed: int = 1, batch: int = 2, length: int = 6) -> dict[str, Any]:
    return {"pixel_values": random_input(batch, 3, 16, 16, seed=seed)}


def _features(seed: int = 1, batch: int = 2, length: int = 5) -> Tensor:
    return random_input(batch, length, WIDTH, seed=seed)


def _two_features(seed: int = 1, batch: int = 2, length: int = 5) -> tuple[Tensor, Tensor]:
    return _features(seed, batch, length), _features(seed + 7, batch, length - 1)


def _encoder(*, norm_first: bool, norm: bool, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 12, batch_first=True, norm_first=norm_first, **options
        )
        final = nn.LayerNorm(WIDTH) if norm else None
        return fill_all(nn.TransformerEncoder(layer, 2, final, enable_nested_tensor=False))

    return build


def _full(*, norm_first: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pre-norm layers have no nested tensors
            made = nn.Transformer(WIDTH, 2, 2, 2, 12, batch_first=True, norm_first=norm_first)
        return fill_all(made)

    return build


_TEXT, _GPT2, _BOTH, _VISION = (
    getattr(small_transformers, name) for name in ("_TEXT", "_GPT2", "_BOTH", "_VISION")
)
_TORCH_MLP = ("linear1", F.relu, "linear2")
_ENCODER = (("norm1", ("self_attn",)), ("norm2", _TORCH_MLP))
_DECODER = (("norm1", ("self_attn",)), ("norm2", ("multihead_attn",)), ("norm3", _TORCH_MLP))
_FULL = (
    StackParts(
        "encoder.layers.0", layers("encoder.layers.{}", 2, *_ENCODER), "", ("encoder.norm",)
    ),
    StackParts(
        "decoder.layers.0", layers("decoder.layers.{}", 2, *_DECODER), "", ("decoder.norm",)
    ),
)
_FC = ("fc1", "activation_fn", "fc2")
_LLAMA_LIKE = {**_TEXT, "num_key_value_heads": 1, "head_dim": 8}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_OPT = {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}
_OPT_LAYERS = layers(
    "decoder.layers.{}", 2, ("self_attn_layer_norm", ("self_attn",)), ("final_layer_norm", _FC)
)
_DISTIL = {
    "vocab_size": VOCABULARY,
    "dim": 16,
    "hidden_dim": 24,
    "n_layers": 2,
    "n_heads": 2,
    "max_position_embeddings": 32,
}

FAMILIES: dict[str, Family] = {
    "bert": Family(
        "post",
        _library("BertConfig", "BertModel", **_TEXT),
        _text,
        (
            StackParts(
                "embeddings.LayerNorm",
                layers(
                    "encoder.layer.{}",
                    2,
                    ("attention.output.LayerNorm", ("attention.self", "attention.output.dense")),
                    ("output.LayerNorm", ("intermediate", "output.dense")),
                ),
                "embeddings.LayerNorm",
            ),
        ),
    ),
    "distilbert": Family(
        "post",
        _library("DistilBertConfig", "DistilBertModel", **_DISTIL),
        _text,
        (
            StackParts(
                "embeddings.LayerNorm",
                layers(
                    "transformer.layer.{}",
                    2,
                    ("sa_layer_norm", ("attention",)),
                    ("output_layer_norm", ("ffn",)),
                ),
                "embeddings.LayerNorm",
            ),
        ),
    ),
    "bart": Family(
        "post",
        _library("BartConfig", "BartModel", **_BOTH),
        _pair,
        (
            StackParts(
                "encoder.layernorm_embedding",
                layers(
                    "encoder.layers.{}",
                    2,
                    ("self_attn_layer_norm", ("self_attn",)),
                    ("final_layer_norm", _FC),
                ),
                "encoder.layernorm_embedding",
            ),
            StackParts(
                "decoder.layernorm_embedding",
                layers(
                    "decoder.layers.{}",
                    2,
                    ("self_attn_layer_norm", ("self_attn",)),
                    ("encoder_attn_layer_norm", ("encoder_attn",)),
                    ("final_layer_norm", _FC),
                ),
                "decoder.layernorm_embedding",
            ),
        ),
    ),
    "opt post": Family(
        "post",
        _library("OPTConfig", "OPTModel", **_OPT, do_layer_norm_before=False),
        _causal,
        (StackParts("decoder.layers.0", _OPT_LAYERS),),
    ),
    "encoder post": Family(
        "post",
        _encoder(norm_first=False, norm=False),
        _features,
        (StackParts("layers.0", layers("layers.{}", 2, *_ENCODER)),),
    ),
    "encoder post with a final norm": Family(
        "post",
        _encoder(norm_first=False, norm=True),
        _features,
        (StackParts("layers.0", layers("layers.{}", 2, *_ENCODER), "", ("norm",)),),
    ),
    "transformer post": Family("post", _full(norm_first=False), _two_features, _FULL),
    "gpt2": Family(
        "pre",
        _library("GPT2Config", "GPT2Model", **_GPT2),
        _causal,
        (
            StackParts(
                "h.0", layers("h.{}", 2, ("ln_1", ("attn",)), ("ln_2", ("mlp",))), "", ("ln_f",)
            ),
        ),
    ),
    "llama": Family(
        "pre",
        _library("LlamaConfig", "LlamaModel", **_LLAMA_LIKE),
        _causal,
        (
            StackParts(
                "layers.0",
                layers(
                    "layers.{}",
                    2,
                    ("input_layernorm", ("self_attn",)),
                    ("post_attention_layernorm", ("mlp",)),
                ),
                "",
                ("norm",),
            ),
        ),
    ),
    "vit": Family(
        "pre",
        _library("ViTConfig", "ViTModel", **_VISION),
        _pixels,
        (
            StackParts(
                "layers.0",
                layers(
                    "layers.{}",
                    2,
                    ("layernorm_before", ("attention",)),
                    ("layernorm_after", ("mlp",)),
                ),
                "",
                ("layernorm",),
            ),
        ),
    ),
    "opt pre": Family(
        "pre",
        _library("OPTConfig", "OPTModel", **_OPT),
        _causal,
        (StackParts("decoder.layers.0", _OPT_LAYERS, "", ("decoder.final_layer_norm",)),),
    ),
    "encoder pre": Family(
        "pre",
        _encoder(norm_first=True, norm=True),
        _features,
        (StackParts("layers.0", layers("layers.{}", 2, *_ENCODER), "", ("norm",)),),
    ),
    "transformer pre": Family("pre", _full(norm_first=True), _two_features, _FULL),
    "gptj": Family(
        "parallel",
        _library("GPTJConfig", "GPTJModel", **_GPT2, rotary_dim=4),
        _causal,
        (StackParts("h.0", layers("h.{}", 2, ("ln_1", [("attn",), ("mlp",)])), "", ("ln_f",)),),
    ),
    "gemma2": Family(
        "sandwich",
        _library("Gemma2Config", "Gemma2Model", **_LLAMA_LIKE),
        _causal,
        (
            StackParts(
                "layers.0",
                layers(
                    "layers.{}",
                    2,
                    ("input_layernorm", ("self_attn", "post_attention_layernorm")),
                    ("pre_feedforward_layernorm", ("mlp", "post_feedforward_layernorm")),
                ),
                "",
                ("norm",),
            ),
        ),
    ),
    "t5": Family(
        "pre",
        _library("T5Config", "T5Model", **_T5),
        _pair,
        (
            StackParts(
                "encoder.block.0",
                layers(
                    "encoder.block.{}.layer",
                    2,
                    ("0.layer_norm", ("0.SelfAttention",)),
                    ("1.layer_norm", ("1.DenseReluDense",)),
                ),
                "",
                ("encoder.final_layer_norm",),
            ),
            StackParts(
                "decoder.block.0",
                layers(
                    "decoder.block.{}.layer",
                    2,
                    ("0.layer_norm", ("0.SelfAttention",)),
                    ("1.layer_norm", ("1.EncDecAttention",)),
                    ("2.layer_norm", ("2.DenseReluDense",)),
                ),
                "",
                ("decoder.final_layer_norm",),
            ),
        ),
    ),
}
POST = tuple(name for name, family in FAMILIES.items() if family.form == "post")
PRE = tuple(name for name, family in FAMILIES.items() if family.form == "pre")
TO_POST = tuple(name for name, family in FAMILIES.items() if family.form != "post")


def build(name: str) -> Any:
    """A new model of a family, always the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return FAMILIES[name].build()


@cache
def original(name: str) -> Any:
    """The model of a family, shared by tests that do not change it."""
    return build(name)


def place(model: nn.Module, to: str, example_inputs: Any, **options: Any) -> tuple[Any, Any]:
    """Convert a model that keeps its class."""
    return ns.convert_placement(model, to, example_inputs, native=False, **options)


@dataclass(frozen=True)
class Converted:
    """A converted model with its report; shared by tests that do not change it."""

    old: Any
    new: Any
    report: Any
    inputs: Any = field(repr=False)


BATCHES = ({"seed": 11}, {"seed": 12, "batch": 3, "length": 4})


@cache
def converted(name: str, to: str, calibrated: bool = False, **options: Any) -> Converted:
    """A conversion without the check that compares the outputs: that is what the tests do."""
    family, old = FAMILIES[name], original(name)
    inputs = family.inputs()
    if calibrated:
        options["calibration"] = [family.inputs(**given) for given in BATCHES]
    new, report = place(old, to, inputs, verify=False, **options)
    return Converted(old, new, report, inputs)


OTHER_INPUTS = ({"seed": 1}, {"seed": 2, "batch": 3, "length": 9}, {"seed": 3, "length": 3})


def assert_same_function(name: str, old: nn.Module, new: nn.Module, tolerance: float) -> None:
    """Equal outputs on inputs of several shapes."""
    for given in OTHER_INPUTS:
        inputs = FAMILIES[name].inputs(**given)
        error = relative_error(call(old, inputs), call(new, inputs))
        assert error < tolerance, f"{name}: outputs differ by {error:.1e} on {given}"


def assert_computes(
    name: str, new: nn.Module, formula: Formula, tolerance: float, calibrated: bool = False
) -> None:
    """The outputs are what a formula gives from the parts of the original."""
    family, old = FAMILIES[name], original(name)
    for given in OTHER_INPUTS:
        inputs = family.inputs(**given)
        parts = Parts(old, family, inputs)
        if calibrated:
            calibrate(parts, [family.inputs(**batch) for batch in BATCHES])
        expected = compute(parts, formula)
        error = relative_error(expected, last(call(new, inputs)))
        assert error < tolerance, f"{name}: differs by {error:.1e} from the formula on {given}"
