"""Residual structures of well-known shape, written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from normswap.structure import Stack, Sublayer

ATTENTION, CROSS, FEED_FORWARD = "attention", "cross-attention", "feed-forward"
PARALLEL = f"{ATTENTION} + {FEED_FORWARD}"


def stack(
    name: str,
    layers: int,
    layer: Sequence[Sublayer],
    embedding_norms: tuple[str, ...] = (),
    final_norms: tuple[str, ...] = (),
) -> Stack:
    """``layer`` repeated, with ``#`` in names for its number."""
    sublayers = [_numbered(sublayer, n) for n in range(layers) for sublayer in layer]
    return Stack(name, layer[0].form, tuple(sublayers), embedding_norms, final_norms)


def _numbered(sublayer: Sublayer, number: int) -> Sublayer:
    def named(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(name.replace("#", str(number)) for name in names)

    return replace(
        sublayer,
        name=sublayer.name.replace("#", str(number)),
        input_norms=named(sublayer.input_norms),
        output_norms=named(sublayer.output_norms),
        stream_norms=named(sublayer.stream_norms),
    )


def bert_post(layers: int = 12) -> Stack:
    at = "encoder.layer.#"
    layer = (
        Sublayer(
            f"{at}.attention",
            ATTENTION,
            "post",
            stream_norms=(f"{at}.attention.output.LayerNorm",),
        ),
        Sublayer(at, FEED_FORWARD, "post", stream_norms=(f"{at}.output.LayerNorm",)),
    )
    return stack("encoder", layers, layer, embedding_norms=("embeddings.LayerNorm",))


def rotated(post: Stack) -> Stack:
    """The pre-norm stack with each norm in front of the branch that read it."""
    norms = [post.embedding_norms, *(s.stream_norms for s in post.sublayers)]
    sublayers = [
        replace(sublayer, form="pre", input_norms=norm, stream_norms=())
        for sublayer, norm in zip(post.sublayers, norms[:-1], strict=True)
    ]
    return Stack(post.name, "pre", tuple(sublayers), (), norms[-1])


def llama_pre(layers: int = 4) -> Stack:
    at = "model.layers.#"
    layer = (
        Sublayer(at, ATTENTION, "pre", input_norms=(f"{at}.input_layernorm",)),
        Sublayer(at, FEED_FORWARD, "pre", input_norms=(f"{at}.post_attention_layernorm",)),
    )
    return stack("model", layers, layer, final_norms=("model.norm",))


def llama_deepnorm(layers: int = 4, skip: float = 2.0, branch: float = 0.5) -> Stack:
    at = "model.layers.#"
    layer = [
        Sublayer(at, kind, "deepnorm", (), (), (f"{at}.{norm}",), skip, branch)
        for kind, norm in (
            (ATTENTION, "input_layernorm"),
            (FEED_FORWARD, "post_attention_layernorm"),
        )
    ]
    return stack("model", layers, layer)


def gemma2(layers: int = 26) -> Stack:
    at = "model.layers.#"
    layer = [
        Sublayer(at, kind, "sandwich", (f"{at}.{first}_layernorm",), (f"{at}.{last}_layernorm",))
        for kind, first, last in (
            (ATTENTION, "input", "post_attention"),
            (FEED_FORWARD, "pre_feedforward", "post_feedforward"),
        )
    ]
    return stack("model", layers, layer, final_norms=("model.norm",))


def bart_decoder(layers: int = 6) -> Stack:
    at = "decoder.layers.#"
    layer = [
        Sublayer(name, kind, "post", stream_norms=(f"{at}.{norm}_layer_norm",))
        for name, kind, norm in (
            (f"{at}.self_attn", ATTENTION, "self_attn"),
            (f"{at}.encoder_attn", CROSS, "encoder_attn"),
            (at, FEED_FORWARD, "final"),
        )
    ]
    return stack("decoder", layers, layer, embedding_norms=("decoder.layernorm_embedding",))


def bart_encoder(layers: int = 6) -> Stack:
    at = "encoder.layers.#"
    layer = [
        Sublayer(name, kind, "post", stream_norms=(f"{at}.{norm}_layer_norm",))
        for name, kind, norm in (
            (f"{at}.self_attn", ATTENTION, "self_attn"),
            (at, FEED_FORWARD, "final"),
        )
    ]
    return stack("encoder", layers, layer, embedding_norms=("encoder.layernorm_embedding",))


def gpt_j(layers: int = 28) -> Stack:
    at = "transformer.h.#"
    layer = [Sublayer(at, PARALLEL, "parallel", (f"{at}.ln_1",))]
    return stack("transformer", layers, layer, final_norms=("transformer.ln_f",))


def gpt_neox(layers: int = 6) -> Stack:
    at = "gpt_neox.layers.#"
    norms = (f"{at}.input_layernorm", f"{at}.post_attention_layernorm")
    layer = [Sublayer(at, PARALLEL, "parallel", norms)]
    return stack("gpt_neox", layers, layer, final_norms=("gpt_neox.final_layer_norm",))
