"""Parts of the table of norm placements: rows and their short forms, tiny models, their inputs."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

A, C, F, O = "attention", "cross-attention", "feed-forward", "other"  # noqa: E741
VOCABULARY = 40
WIDTH = 32


@dataclass(frozen=True)
class ExpectedSublayer:
    """Names of norms are patterns: `{}` is the number of the layer, `{next}` one more."""

    kind: str
    form: str
    input_norms: tuple[str, ...] = ()
    output_norms: tuple[str, ...] = ()
    stream_norms: tuple[str, ...] = ()
    skip_scale: float = 1.0
    branch_scale: float = 1.0

    def at(self, layer: int, prefix: str) -> ExpectedSublayer:
        def filled(patterns: tuple[str, ...]) -> tuple[str, ...]:
            # A leading slash is for a norm outside of the layers.
            full = (p[1:] if p.startswith("/") else prefix + p for p in patterns)
            return tuple(p.format(layer, next=layer + 1) for p in full)

        return replace(
            self,
            input_norms=filled(self.input_norms),
            output_norms=filled(self.output_norms),
            stream_norms=filled(self.stream_norms),
        )


@dataclass(frozen=True)
class ExpectedStack:
    """A chain of `layers` times `layer`, apart from the `exceptions` (number of sublayer, what)."""

    form: str
    prefix: str
    layer: tuple[ExpectedSublayer, ...]
    embedding_norms: tuple[str, ...] = ()
    final_norms: tuple[str, ...] = ()
    layers: int = 2
    exceptions: tuple[tuple[int, ExpectedSublayer], ...] = ()
    label: str = ""

    def sublayers(self) -> tuple[ExpectedSublayer, ...]:
        rows = [(i, row) for i in range(self.layers) for row in self.layer]
        for number, row in self.exceptions:
            rows[number] = (rows[number][0], row)
        return tuple(row.at(layer, self.prefix) for layer, row in rows)


@dataclass(frozen=True)
class Family:
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    stacks: tuple[ExpectedStack, ...]
    source: str
    inner: tuple[str, ...] = ()  # patterns of fnmatch


# Short forms of rows


def pre(kind: str, *norms: str, scale: float = 1.0) -> ExpectedSublayer:
    return ExpectedSublayer(kind, "pre", input_norms=norms, branch_scale=scale)


def post(kind: str, *norms: str) -> ExpectedSublayer:
    return ExpectedSublayer(kind, "post", stream_norms=norms)


def sandwich(kind: str, before: str, behind: str) -> ExpectedSublayer:
    return ExpectedSublayer(kind, "sandwich", input_norms=(before,), output_norms=(behind,))


def branch_output(kind: str, norm: str) -> ExpectedSublayer:
    return ExpectedSublayer(kind, "branch-output", output_norms=(norm,))


def parallel(*norms: str, kind: str = f"{A} + {F}") -> ExpectedSublayer:
    """One sublayer: its branches read one fork and go to the stream together."""
    return ExpectedSublayer(kind, "parallel", input_norms=norms)


def stack(prefix: str, *layer: ExpectedSublayer, **options: Any) -> ExpectedStack:
    """A stack whose sublayers are all of one form, unless `form` says otherwise."""
    form = options.pop("form", layer[0].form)
    return ExpectedStack(form, prefix, layer, **options)


# Models and inputs


def library(model: str, **settings: Any) -> nn.Module:
    """A model of the transformers library with random weights."""
    import transformers

    torch.manual_seed(0)
    cls = getattr(transformers, model)
    built = cls(cls.config_class(**settings)).eval()
    if any("Experts" in type(module).__name__ for module in built.modules()):
        built.set_experts_implementation("batched_mm")  # no shape depends on values
    return built


def timm_model(module: str, model: str, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    cls = getattr(importlib.import_module(f"timm.models.{module}"), model)
    return cls(**settings).eval()


def timm_vit(**settings: Any) -> nn.Module:
    return timm_model("vision_transformer", "VisionTransformer", **TIMM_VIT, **settings)


def timm_block(block: str, **settings: Any) -> nn.Module:
    from timm.models import vision_transformer

    return timm_vit(block_fn=getattr(vision_transformer, block), **settings)


def timm_rms() -> nn.Module:
    from timm.layers import RmsNorm

    return timm_vit(norm_layer=RmsNorm, qk_norm=True)


def torch_encoder(*, norm_first: bool, norm: bool) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(**LAYER, norm_first=norm_first)
    return nn.TransformerEncoder(
        layer, 2, norm=nn.LayerNorm(WIDTH) if norm else None, enable_nested_tensor=False
    ).eval()


def torch_transformer(*, norm_first: bool) -> nn.Module:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        # Its encoder says that norm_first does not go with nested tensors, and cannot be told so.
        warnings.filterwarnings("ignore", message="enable_nested_tensor is True")
        return nn.Transformer(
            **LAYER, num_encoder_layers=2, num_decoder_layers=2, norm_first=norm_first
        ).eval()


def token_ids(length: int = 6, seed: int = 1, below: int = VOCABULARY) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, below, (2, length), generator=generator)


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ids() -> Mapping[str, Any]:
    return {"input_ids": token_ids()}


def causal_ids() -> Mapping[str, Any]:
    return {"input_ids": token_ids(), "use_cache": False}


def two_texts() -> Mapping[str, Any]:
    return {"input_ids": token_ids(), "decoder_input_ids": token_ids(5, seed=2), "use_cache": False}


def pixels() -> Mapping[str, Any]:
    return {"pixel_values": noise(2, 3, 16, 16)}


def sound() -> Mapping[str, Any]:
    return {"input_values": noise(2, 400)}


def spectrogram() -> Mapping[str, Any]:
    return {
        "input_features": noise(2, 8, 32),
        "decoder_input_ids": token_ids(5),
        "use_cache": False,
    }


def text_and_states() -> Mapping[str, Any]:
    return {**causal_ids(), "encoder_hidden_states": noise(2, 5, WIDTH)}


def image() -> Tensor:
    return noise(2, 3, 16, 16)


def sequence() -> Tensor:
    return noise(2, 6, WIDTH)


def two_sequences() -> tuple[Tensor, Tensor]:
    return noise(2, 6, WIDTH), noise(2, 5, WIDTH, seed=2)


SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
GROUPED = {**TEXT, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 8}
GPT2 = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
}
BLOOM = {**SPECIAL, "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_layer": 2, "n_head": 4}
BOTH = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": 2,
}
T5 = {
    **SPECIAL,
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
VISION = {
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
}
SWIN = {
    "image_size": 16,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": 2,
}
SOUND = {
    **{k: v for k, v in TEXT.items() if k != "max_position_embeddings"},
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 2),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
EXPERTS = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}
DEEPSEEK = {
    **GROUPED,
    **EXPERTS,
    **LATENT,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
}
TIMM = {"img_size": 16, "patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 4}
TIMM_VIT = {**TIMM, "num_classes": 5}
LAYER = {"d_model": WIDTH, "nhead": 4, "dim_feedforward": 48, "batch_first": True}


# The table as Markdown


def markdown(families: Sequence[Family]) -> str:
    """One row a stack; a layer's sublayers once, with what differs behind them."""
    lines = [
        "# Where the norms of known models stand",
        "",
        f"Read by hand off the source code; {len(families)} families. Printed by "
        "`python tests/placement_families.py`. P: input norms, Q: output norms, "
        "S: stream norms; `{}` is the number of the layer.",
        "",
        "| family | source read | stack | form | sublayers of a layer | embedding | final |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in families:
        for part in row.stacks:
            label = part.label or "whole"
            cells = [
                row.name,
                row.source,
                f"{label}, {part.layers} × `{part.prefix}*`",
                part.form,
                _layer_text(part),
                _names(part.embedding_norms),
                _names(part.final_norms),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _layer_text(part: ExpectedStack) -> str:
    rows = [_sublayer_text(row) for row in part.layer]
    rows += [f"(sublayer {i}: {_sublayer_text(row)})" for i, row in part.exceptions]
    return "; ".join(rows)


def _sublayer_text(row: ExpectedSublayer) -> str:
    norms = (("P", row.input_norms), ("Q", row.output_norms), ("S", row.stream_norms))
    words = [f"{letter} {_names(names)}" for letter, names in norms if names]
    if row.branch_scale != 1.0:
        words.append(f"branch × {row.branch_scale:.4g}")
    if row.skip_scale != 1.0:
        words.append(f"skip × {row.skip_scale:.4g}")
    return f"{row.kind} {row.form} " + ", ".join(words or ["no norm"])


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name.removeprefix('/')}`" for name in names) or "–"
