"""Where the norms of known models stand, read by hand off the source code of the models.

One row a family: a tiny random model, its inputs, and its expected stacks. Run this file to print
the table as Markdown (``placement_families.md``).

How a row was read:

* A norm belongs to the embedding of a stack, or is final, if the *stream itself* comes out of it or
  goes into it, token by token. Behind a linear map (the factorised embeddings of ALBERT) it is
  within the embedding; over four concatenated tokens (patch merging of Swin) or the mean of all, it
  is no norm of the stream. These are listed as ``inner``.
* Behind the last add of a stack, the norm that the same sublayer of the layer before has too is a
  stream norm; one that only stands there is final.
* ``inner`` also has the norms of queries and keys, and whatever else runs deeper inside a branch.
  With it each row accounts for every norm that runs, which is tested.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from placement_rows import (
    BLOOM,
    BOTH,
    DEEPSEEK,
    GEMMA,
    GPT2,
    GROUPED,
    SOUND,
    SPECIAL,
    SWIN,
    T5,
    TEXT,
    TIMM_VIT,
    VISION,
    VOCABULARY,
    WIDTH,
    A,
    C,
    ExpectedStack,
    ExpectedSublayer,
    F,
    Family,
    O,
    branch_output,
    causal_ids,
    ids,
    image,
    library,
    markdown,
    parallel,
    pixels,
    post,
    pre,
    sandwich,
    sequence,
    sound,
    spectrogram,
    stack,
    text_and_states,
    timm_block,
    timm_model,
    timm_rms,
    timm_vit,
    torch_encoder,
    torch_transformer,
    two_sequences,
    two_texts,
)
from torch import nn

FAMILIES: list[Family] = []


def family(
    name: str,
    build: Callable[[], nn.Module],
    inputs: Callable[[], Any],
    *stacks: ExpectedStack,
    source: str,
    inner: tuple[str, ...] = (),
) -> None:
    FAMILIES.append(Family(name, build, inputs, stacks, source, inner))


# Decoders, pre

# post_attention_layernorm stands behind the add of the attention, and the skip of the MLP goes
# past it: it is the input norm of the MLP. All the models of this loop are written like that.
# Qwen 3: the norms of queries and keys stand behind q_proj and k_proj: inner. DeepSeek: one layer
# is dense, one has experts. Routed and shared experts read the same normed values and are added
# within the branch, and no skip goes past them: no stream of its own.
QK_NORMS = ("*.q_norm", "*.k_norm")
LATENT_NORMS = ("*.q_a_layernorm", "*.kv_a_layernorm")
LLAMA_LIKE: tuple[tuple[str, str, dict[str, Any], tuple[str, ...]], ...] = (
    ("llama", "Llama", GROUPED, ()),
    ("mistral", "Mistral", GROUPED, ()),
    ("mixtral", "Mixtral", {**GROUPED, "num_local_experts": 4}, ()),
    ("qwen2", "Qwen2", GROUPED, ()),
    ("qwen3", "Qwen3", GEMMA, QK_NORMS),
    ("deepseek_v2", "DeepseekV2", DEEPSEEK, LATENT_NORMS),
    ("deepseek_v3", "DeepseekV3", DEEPSEEK, LATENT_NORMS),
    ("phi3", "Phi3", GROUPED, ()),
    ("starcoder2", "Starcoder2", GROUPED, ()),
    ("nemotron", "Nemotron", GEMMA, ()),
    ("olmo", "Olmo", GROUPED, ()),  # its norms have no weights
    ("glm", "Glm", GEMMA, ()),
    ("stablelm", "StableLm", GROUPED, ()),
)
for _name, _title, _settings, _inner in LLAMA_LIKE:
    family(
        _name,
        partial(library, f"{_title}ForCausalLM", **_settings),
        causal_ids,
        stack(
            "model.layers.{}.",
            pre(A, "input_layernorm"),
            pre(F, "post_attention_layernorm"),
            final_norms=("model.norm",),
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_title}DecoderLayer.forward",
        inner=_inner,
    )

# The branch is multiplied by residual_multiplier, the embedding by embedding_multiplier.
family(
    "granite",
    partial(library, "GraniteForCausalLM", **GROUPED, residual_multiplier=0.25),
    causal_ids,
    stack(
        "model.layers.{}.",
        pre(A, "input_layernorm", scale=0.25),
        pre(F, "post_attention_layernorm", scale=0.25),
        final_norms=("model.norm",),
    ),
    source="models/granite/modeling_granite.py, GraniteDecoderLayer.forward",
)
# residual_scale = scale_depth / sqrt(layers)
family(
    "minicpm3",
    partial(library, "MiniCPM3ForCausalLM", **DEEPSEEK, scale_depth=1.4),
    causal_ids,
    stack(
        "model.layers.{}.",
        pre(A, "input_layernorm", scale=1.4 / 2**0.5),
        pre(F, "post_attention_layernorm", scale=1.4 / 2**0.5),
        final_norms=("model.norm",),
    ),
    source="models/minicpm3/modeling_minicpm3.py, MiniCPM3DecoderLayer.forward",
    inner=LATENT_NORMS,
)

# One module holds the attention and the norms of both sublayers. It gives out the stream and,
# beside that, what norm_2 makes of it for the experts.
family(
    "dbrx",
    partial(
        library,
        "DbrxForCausalLM",
        **SPECIAL,
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        n_heads=4,
        n_layers=2,
        max_seq_len=32,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    ),
    causal_ids,
    stack(
        "transformer.blocks.{}.",
        pre(A, "norm_attn_norm.norm_1"),
        pre(F, "norm_attn_norm.norm_2"),
        final_norms=("transformer.norm_f",),
    ),
    source="models/dbrx/modeling_dbrx.py, DbrxNormAttentionNorm.forward, DbrxBlock.forward",
)
GPT2_LIKE: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
    ("gpt2", "GPT2LMHeadModel", "models/gpt2/modeling_gpt2.py, GPT2Block", GPT2),
    (
        "gpt_bigcode",
        "GPTBigCodeForCausalLM",
        "models/gpt_bigcode/modeling_gpt_bigcode.py, GPTBigCodeBlock",
        GPT2,
    ),
    (
        "gpt_neo",
        "GPTNeoForCausalLM",
        "models/gpt_neo/modeling_gpt_neo.py, GPTNeoBlock",
        {**TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global"], 2]]},
    ),
)
for _name, _model, _source, _settings in GPT2_LIKE:
    family(
        _name,
        partial(library, _model, **_settings),
        causal_ids,
        stack(
            "transformer.h.{}.", pre(A, "ln_1"), pre(F, "ln_2"), final_norms=("transformer.ln_f",)
        ),
        source=f"{_source}.forward",
    )

# Cross-attention with states given from outside: its keys and values come from no stream.
family(
    "gpt2_cross",
    partial(library, "GPT2LMHeadModel", **GPT2, add_cross_attention=True),
    text_and_states,
    stack(
        "transformer.h.{}.",
        pre(A, "ln_1"),
        pre(C, "ln_cross_attn"),
        pre(F, "ln_2"),
        final_norms=("transformer.ln_f",),
    ),
    source="models/gpt2/modeling_gpt2.py, GPT2Block.forward",
)
family(
    "ctrl",
    partial(library, "CTRLLMHeadModel", **GPT2, dff=48),
    causal_ids,
    stack(
        "transformer.h.{}.",
        pre(A, "layernorm1"),
        pre(F, "layernorm2"),
        final_norms=("transformer.layernorm",),
    ),
    source="models/ctrl/modeling_ctrl.py, EncoderLayer.forward",
)
# Attention and MLP are handed the residual and add it themselves: the same dataflow.
family(
    "bloom",
    partial(library, "BloomForCausalLM", **BLOOM),
    causal_ids,
    stack(
        "transformer.h.{}.",
        pre(A, "input_layernorm"),
        pre(F, "post_attention_layernorm"),
        embedding_norms=("transformer.word_embeddings_layernorm",),
        final_norms=("transformer.ln_f",),
    ),
    source="models/bloom/modeling_bloom.py, BloomBlock.forward",
)
# With the flag the skip starts behind the norm, so that each norm stands on the stream: the norm
# behind the attention's add is post_attention_layernorm, behind the MLP's the next layer's
# input_layernorm, and ln_f behind the last. The first input_layernorm is an embedding norm.
family(
    "bloom_post",
    partial(library, "BloomForCausalLM", **BLOOM, apply_residual_connection_post_layernorm=True),
    causal_ids,
    stack(
        "transformer.h.{}.",
        post(A, "post_attention_layernorm"),
        post(F, "/transformer.h.{next}.input_layernorm"),
        exceptions=((3, post(F, "/transformer.ln_f")),),
        embedding_norms=(
            "transformer.word_embeddings_layernorm",
            "transformer.h.0.input_layernorm",
        ),
    ),
    source="models/bloom/modeling_bloom.py, BloomBlock.forward and BloomModel.forward",
)
family(
    "mpt",
    partial(
        library,
        "MptForCausalLM",
        **SPECIAL,
        vocab_size=40,
        d_model=32,
        n_layers=2,
        n_heads=4,
        max_seq_len=32,
        expansion_ratio=2,
    ),
    causal_ids,
    stack(
        "transformer.blocks.{}.",
        pre(A, "norm_1"),
        pre(F, "norm_2"),
        final_norms=("transformer.norm_f",),
    ),
    source="models/mpt/modeling_mpt.py, MptBlock.forward",
)
OPT = {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": WIDTH}
family(
    "opt",
    partial(library, "OPTForCausalLM", **OPT),
    causal_ids,
    stack(
        "model.decoder.layers.{}.",
        pre(A, "self_attn_layer_norm"),
        pre(F, "final_layer_norm"),  # final for the layer, not for the stack
        final_norms=("model.decoder.final_layer_norm",),
    ),
    source="models/opt/modeling_opt.py, OPTDecoderLayer.forward",
)
# OPT-350m: do_layer_norm_before false, the embedding narrower than the stream.
family(
    "opt_post",
    partial(
        library, "OPTForCausalLM", **{**OPT, "word_embed_proj_dim": 16}, do_layer_norm_before=False
    ),
    causal_ids,
    stack("model.decoder.layers.{}.", post(A, "self_attn_layer_norm"), post(F, "final_layer_norm")),
    source="models/opt/modeling_opt.py, OPTDecoderLayer.forward and OPTDecoder.__init__",
)
family(
    "xglm",
    partial(
        library,
        "XGLMForCausalLM",
        **SPECIAL,
        vocab_size=40,
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=4,
        max_position_embeddings=64,
    ),
    causal_ids,
    stack(  # no embedding norm
        "model.layers.{}.",
        pre(A, "self_attn_layer_norm"),
        pre(F, "final_layer_norm"),
        final_norms=("model.layer_norm",),
    ),
    source="models/xglm/modeling_xglm.py, XGLMDecoderLayer.forward and XGLMModel.forward",
)
family(
    "biogpt",
    partial(library, "BioGptForCausalLM", **TEXT),
    causal_ids,
    stack(  # no embedding norm
        "biogpt.layers.{}.",
        pre(A, "self_attn_layer_norm"),
        pre(F, "final_layer_norm"),
        final_norms=("biogpt.layer_norm",),
    ),
    source="models/biogpt/modeling_biogpt.py, BioGptDecoderLayer.forward",
)

# Decoders, sandwich and branch-output

# Four norms a layer. By the same name as in Llama, post_attention_layernorm stands elsewhere:
# behind the attention, before the add. Gemma 3 has norms of queries and keys too: inner.
for _name, _title, _inner in (("gemma2", "Gemma2", ()), ("gemma3", "Gemma3", QK_NORMS)):
    family(
        _name,
        partial(library, f"{_title}ForCausalLM", **GEMMA),
        causal_ids,
        stack(
            "model.layers.{}.",
            sandwich(A, "input_layernorm", "post_attention_layernorm"),
            sandwich(F, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
            final_norms=("model.norm",),
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_title}DecoderLayer.forward",
        inner=_inner,
    )
# The norm before the MLP is again called post_attention_layernorm, the one behind the attention
# post_self_attn_layernorm.
family(
    "glm4",
    partial(library, "Glm4ForCausalLM", **GEMMA),
    causal_ids,
    stack(
        "model.layers.{}.",
        sandwich(A, "input_layernorm", "post_self_attn_layernorm"),
        sandwich(F, "post_attention_layernorm", "post_mlp_layernorm"),
        final_norms=("model.norm",),
    ),
    source="models/glm4/modeling_glm4.py, Glm4DecoderLayer.forward",
)
for _name, _title in (("olmo2", "Olmo2"), ("exaone4", "Exaone4")):
    family(
        _name,
        partial(library, f"{_title}ForCausalLM", **GEMMA),
        causal_ids,
        stack(
            "model.layers.{}.",
            branch_output(A, "post_attention_layernorm"),
            branch_output(F, "post_feedforward_layernorm"),
            final_norms=("model.norm",),
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_title}DecoderLayer.forward",
        inner=QK_NORMS,
    )
# swin_norm: input_layernorm is behind the attention, post_attention_layernorm behind the MLP.
CHAMELEON = {
    **GROUPED,
    "vq_config": {"base_channels": 32, "channel_multiplier": [1], "num_res_blocks": 1},
    "vocabulary_map": {"<image>": 3},
}
family(
    "chameleon_swin_norm",
    partial(library, "ChameleonForConditionalGeneration", **CHAMELEON, swin_norm=True),
    causal_ids,
    stack(
        "model.layers.{}.",
        branch_output(A, "input_layernorm"),
        branch_output(F, "post_attention_layernorm"),
        final_norms=("model.norm",),
    ),
    source="models/chameleon/modeling_chameleon.py, ChameleonSwinDecoderLayer.forward",
    inner=QK_NORMS,
)

# Decoders, parallel

for _name, _title in (("cohere", "Cohere"), ("cohere2", "Cohere2")):
    family(
        _name,
        partial(library, f"{_title}ForCausalLM", **GROUPED),
        causal_ids,
        stack(  # one norm feeds both branches
            "model.layers.{}.", parallel("input_layernorm"), final_norms=("model.norm",)
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_title}DecoderLayer.forward",
    )
for _name, _title in (("gptj", "GPTJ"), ("codegen", "CodeGen")):
    family(
        _name,
        partial(library, f"{_title}ForCausalLM", **GPT2, rotary_dim=4),
        causal_ids,
        stack("transformer.h.{}.", parallel("ln_1"), final_norms=("transformer.ln_f",)),
        source=f"models/{_name}/modeling_{_name}.py, {_title}Block.forward",
    )
family(
    "phi",
    partial(library, "PhiForCausalLM", **TEXT),
    causal_ids,
    stack("model.layers.{}.", parallel("input_layernorm"), final_norms=("model.final_layernorm",)),
    source="models/phi/modeling_phi.py, PhiDecoderLayer.forward",
)
family(
    "gpt_neox",
    partial(library, "GPTNeoXForCausalLM", **TEXT, use_parallel_residual=True),
    causal_ids,
    stack(  # each branch has a norm of its own, both read the same fork
        "gpt_neox.layers.{}.",
        parallel("input_layernorm", "post_attention_layernorm"),
        final_norms=("gpt_neox.final_layer_norm",),
    ),
    source="models/gpt_neox/modeling_gpt_neox.py, GPTNeoXLayer.forward",
)
family(
    "gpt_neox_sequential",
    partial(library, "GPTNeoXForCausalLM", **TEXT, use_parallel_residual=False),
    causal_ids,
    stack(
        "gpt_neox.layers.{}.",
        pre(A, "input_layernorm"),
        pre(F, "post_attention_layernorm"),
        final_norms=("gpt_neox.final_layer_norm",),
    ),
    source="models/gpt_neox/modeling_gpt_neox.py, GPTNeoXLayer.forward",
)
family(
    "stablelm_parallel",
    partial(library, "StableLmForCausalLM", **GROUPED, use_parallel_residual=True),
    causal_ids,
    stack("model.layers.{}.", parallel("input_layernorm"), final_norms=("model.norm",)),
    source="models/stablelm/modeling_stablelm.py, StableLmDecoderLayer.forward",
)
# Falcon-7b: one norm; the attention's output is added to the MLP's first, then both to the stream.
family(
    "falcon",
    partial(library, "FalconForCausalLM", **TEXT),
    causal_ids,
    stack("transformer.h.{}.", parallel("input_layernorm"), final_norms=("transformer.ln_f",)),
    source="models/falcon/modeling_falcon.py, FalconDecoderLayer.forward",
)
family(
    "falcon_new",
    partial(library, "FalconForCausalLM", **TEXT, num_kv_heads=2, new_decoder_architecture=True),
    causal_ids,
    stack("transformer.h.{}.", parallel("ln_attn", "ln_mlp"), final_norms=("transformer.ln_f",)),
    source="models/falcon/modeling_falcon.py, FalconDecoderLayer.forward",
)
family(  # Falcon-RW
    "falcon_sequential",
    partial(library, "FalconForCausalLM", **TEXT, parallel_attn=False, alibi=True),
    causal_ids,
    stack(
        "transformer.h.{}.",
        pre(A, "input_layernorm"),
        pre(F, "post_attention_layernorm"),
        final_norms=("transformer.ln_f",),
    ),
    source="models/falcon/modeling_falcon.py, FalconDecoderLayer.forward",
)

# Decoders, post

family(
    "openai_gpt",
    partial(library, "OpenAIGPTLMHeadModel", **GPT2),
    ids,
    stack("transformer.h.{}.", post(A, "ln_1"), post(F, "ln_2")),  # no embedding norm
    source="models/openai/modeling_openai.py, Block.forward",
)
# Only the content stream runs without target_mapping.
family(
    "xlnet",
    partial(
        library, "XLNetModel", **SPECIAL, vocab_size=40, d_model=32, n_layer=2, n_head=4, d_inner=48
    ),
    ids,
    stack("layer.{}.", post(A, "rel_attn.layer_norm"), post(F, "ff.layer_norm")),
    source="models/xlnet/modeling_xlnet.py, XLNetRelativeAttention.post_attention, "
    "XLNetFeedForward.forward",
)

# No attention

family(
    "mamba",
    partial(
        library,
        "MambaForCausalLM",
        **SPECIAL,
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=4,
        time_step_rank=4,
    ),
    causal_ids,
    stack("backbone.layers.{}.", pre(O, "norm"), final_norms=("backbone.norm_f",)),
    source="models/mamba/modeling_mamba.py, MambaBlock.forward",
)
# A layer with Mamba and one with attention: the forms are the same, the kinds differ. The norms
# of dt, B and C stand behind x_proj: inner.
family(
    "jamba",
    partial(
        library,
        "JambaForCausalLM",
        **GROUPED,
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=1,
        num_experts_per_tok=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    causal_ids,
    stack(
        "model.layers.{}.",
        pre(A, "input_layernorm"),
        pre(F, "pre_ff_layernorm"),
        exceptions=((0, pre(O, "input_layernorm")),),
        final_norms=("model.final_layernorm",),
    ),
    source="models/jamba/modeling_jamba.py, JambaMambaDecoderLayer.forward and "
    "JambaAttentionDecoderLayer.forward",
    inner=("*.mamba.*_layernorm",),
)
# Attention and Mamba read one norm of the same fork and are added together; then an MLP: a layer
# with two forms.
family(
    "falcon_h1",
    partial(
        library,
        "FalconH1ForCausalLM",
        **GROUPED,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_n_groups=1,
        mamba_d_state=8,
        mamba_chunk_size=4,
    ),
    causal_ids,
    stack(
        "model.layers.{}.",
        parallel("input_layernorm", kind=f"{A} + {O}"),
        pre(F, "pre_ff_layernorm"),
        form="mixed",
        final_norms=("model.final_layernorm",),
    ),
    source="models/falcon_h1/modeling_falcon_h1.py, FalconH1DecoderLayer.forward",
)
# The Fourier transform has no parameters. A linear map stands behind the embedding's norm.
family(
    "fnet",
    partial(library, "FNetModel", **{k: v for k, v in TEXT.items() if k != "num_attention_heads"}),
    ids,
    stack("encoder.layer.{}.", post(O, "fourier.output.LayerNorm"), post(F, "output.LayerNorm")),
    source="models/fnet/modeling_fnet.py, FNetBasicOutput.forward, FNetOutput.forward, "
    "FNetEmbeddings.forward",
    inner=("embeddings.LayerNorm",),
)

# Encoders, post

for _name, _model, _settings in (
    ("bert", "BertModel", TEXT),
    ("roberta", "RobertaModel", TEXT),
    ("electra", "ElectraModel", {**TEXT, "embedding_size": WIDTH}),
):
    _title = _model.removesuffix("Model")
    family(
        _name,
        partial(library, _model, **_settings),
        ids,
        stack(
            "encoder.layer.{}.",
            post(A, "attention.output.LayerNorm"),
            post(F, "output.LayerNorm"),
            embedding_norms=("embeddings.LayerNorm",),
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_title}SelfOutput.forward, "
        f"{_title}Output.forward",
    )
family(
    "bert_cross",
    partial(library, "BertModel", **TEXT, is_decoder=True, add_cross_attention=True),
    text_and_states,
    stack(
        "encoder.layer.{}.",
        post(A, "attention.output.LayerNorm"),
        post(C, "crossattention.output.LayerNorm"),
        post(F, "output.LayerNorm"),
        embedding_norms=("embeddings.LayerNorm",),
    ),
    source="models/bert/modeling_bert.py, BertLayer.forward",
)
# As in ELECTRA small: embeddings_project stands between the norm and the stream.
family(
    "electra_projected",
    partial(library, "ElectraModel", **TEXT, embedding_size=16),
    ids,
    stack("encoder.layer.{}.", post(A, "attention.output.LayerNorm"), post(F, "output.LayerNorm")),
    source="models/electra/modeling_electra.py, ElectraModel.forward",
    inner=("embeddings.LayerNorm",),
)
# One layer that is called three times: the same norms again and again. The stream starts behind
# embedding_hidden_mapping_in, a linear map.
family(
    "albert",
    partial(library, "AlbertModel", **{**TEXT, "num_hidden_layers": 3}, embedding_size=16),
    ids,
    stack(
        "encoder.albert_layer_groups.0.albert_layers.0.",
        post(A, "attention.LayerNorm"),
        post(F, "full_layer_layer_norm"),
        layers=3,
    ),
    source="models/albert/modeling_albert.py, AlbertAttention.forward, AlbertLayer.forward, "
    "AlbertTransformer.forward",
    inner=("embeddings.LayerNorm",),
)
family(
    "distilbert",
    partial(
        library,
        "DistilBertModel",
        **SPECIAL,
        vocab_size=40,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        max_position_embeddings=32,
    ),
    ids,
    stack(
        "transformer.layer.{}.",
        post(A, "sa_layer_norm"),
        post(F, "output_layer_norm"),
        embedding_norms=("embeddings.LayerNorm",),
    ),
    source="models/distilbert/modeling_distilbert.py, TransformerBlock.forward",
)
# encoder.LayerNorm is for the relative positions, which every attention reads: not on the stream.
family(
    "deberta_v2",
    partial(
        library,
        "DebertaV2Model",
        **TEXT,
        relative_attention=True,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
    ),
    ids,
    stack(
        "encoder.layer.{}.",
        post(A, "attention.output.LayerNorm"),
        post(F, "output.LayerNorm"),
        embedding_norms=("embeddings.LayerNorm",),
    ),
    source="models/deberta_v2/modeling_deberta_v2.py, DebertaV2SelfOutput.forward, "
    "DebertaV2Output.forward, DebertaV2Encoder.get_rel_embedding",
    inner=("encoder.LayerNorm",),
)
family(
    "mpnet",
    partial(library, "MPNetModel", **TEXT),
    ids,
    stack(
        "encoder.layer.{}.",
        post(A, "attention.LayerNorm"),
        post(F, "output.LayerNorm"),
        embedding_norms=("embeddings.LayerNorm",),
    ),
    source="models/mpnet/modeling_mpnet.py, MPNetAttention.forward, MPNetOutput.forward",
)
# Between a stream norm and the next fork the stream is multiplied by the mask of the padding.
XLM = {
    "vocab_size": VOCABULARY,
    "n_words": VOCABULARY,
    "emb_dim": WIDTH,
    "n_layers": 2,
    "n_heads": 4,
    "max_position_embeddings": 32,
    "pad_index": 0,
}
for _name, _model in (("xlm", "XLMModel"), ("flaubert", "FlaubertModel")):
    family(
        _name,
        partial(library, _model, **XLM),
        ids,
        stack(
            "",
            post(A, "layer_norm1.{}"),
            post(F, "layer_norm2.{}"),
            embedding_norms=("layer_norm_emb",),
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_model}.forward",
    )

# Encoders, pre

family(
    "roberta_prelayernorm",
    partial(library, "RobertaPreLayerNormModel", **TEXT),
    ids,
    stack(
        "encoder.layer.{}.",
        pre(A, "attention.LayerNorm"),
        pre(F, "intermediate.LayerNorm"),
        embedding_norms=("embeddings.LayerNorm",),
        final_norms=("LayerNorm",),
    ),
    source="models/roberta_prelayernorm/modeling_roberta_prelayernorm.py, "
    "RobertaPreLayerNormAttention.forward, RobertaPreLayerNormModel.forward",
)
family(
    "xlm_roberta_xl",
    partial(library, "XLMRobertaXLModel", **TEXT),
    ids,
    stack(
        "encoder.layer.{}.",
        pre(A, "attention.self_attn_layer_norm"),
        pre(F, "LayerNorm"),
        final_norms=("encoder.LayerNorm",),
    ),
    source="models/xlm_roberta_xl/modeling_xlm_roberta_xl.py, XLMRobertaXLAttention.forward, "
    "XLMRobertaXLLayer.feed_forward_chunk",
)
family(
    "megatron_bert",
    partial(library, "MegatronBertModel", **TEXT),
    ids,
    stack("encoder.layer.{}.", pre(A, "attention.ln"), pre(F, "ln"), final_norms=("encoder.ln",)),
    source="models/megatron_bert/modeling_megatron_bert.py, MegatronBertAttention.forward, "
    "MegatronBertLayer.feed_forward_chunk",
)
# Its emb_layer_norm_after stands behind the layers: final, whatever the name.
family(
    "esm",
    partial(
        library,
        "EsmModel",
        **TEXT,
        mask_token_id=3,
        position_embedding_type="rotary",
        emb_layer_norm_before=True,
    ),
    ids,
    stack(
        "encoder.layer.{}.",
        pre(A, "attention.LayerNorm"),
        pre(F, "LayerNorm"),
        embedding_norms=("embeddings.layer_norm",),
        final_norms=("encoder.emb_layer_norm_after",),
    ),
    source="models/esm/modeling_esm.py, EsmAttention.forward, EsmLayer.feed_forward_chunk",
)
# The first attention norm is an nn.Identity: the embedding's norm stands before the fork, so the
# skip is normed too, and no norm belongs to that sublayer.
family(
    "modernbert",
    partial(library, "ModernBertModel", **TEXT, cls_token_id=1, sep_token_id=2),
    ids,
    stack(
        "layers.{}.",
        pre(A, "attn_norm"),
        pre(F, "mlp_norm"),
        # What the first attention reads is the embeddings' norm: it has none of its own.
        exceptions=((0, ExpectedSublayer(A, "none")),),
        embedding_norms=("embeddings.norm",),
        final_norms=("final_norm",),
    ),
    source="models/modernbert/modeling_modernbert.py, ModernBertEncoderLayer",
)

# Encoder and decoder


def seq2seq(
    form: Callable[..., ExpectedSublayer], embedding: str = "", final: str = ""
) -> tuple[ExpectedStack, ExpectedStack]:
    """The layers of BART and its relatives; `{}` in the names is the stack."""
    layer = (
        form(A, "self_attn_layer_norm"),
        form(C, "encoder_attn_layer_norm"),
        form(F, "final_layer_norm"),
    )

    def one(name: str, rows: tuple[ExpectedSublayer, ...]) -> ExpectedStack:
        return stack(
            name + ".layers.{}.",
            *rows,
            embedding_norms=(f"{name}.{embedding}",) if embedding else (),
            final_norms=(f"{name}.{final}",) if final else (),
            label=name,
        )

    return one("encoder", (layer[0], layer[2])), one("decoder", layer)


for _name, _model, _settings, _stacks in (
    ("bart", "BartModel", {}, seq2seq(post, embedding="layernorm_embedding")),
    ("mbart", "MBartModel", {}, seq2seq(pre, embedding="layernorm_embedding", final="layer_norm")),
    ("pegasus", "PegasusModel", {}, seq2seq(pre, final="layer_norm")),
    ("blenderbot", "BlenderbotModel", {}, seq2seq(pre, final="layer_norm")),
    ("marian", "MarianModel", {}, seq2seq(post)),
    ("m2m_100", "M2M100Model", {}, seq2seq(pre, final="layer_norm")),
):
    _title = _model.removesuffix("Model")
    family(
        _name,
        partial(library, _model, **BOTH, **_settings),
        two_texts,
        *_stacks,
        source=f"models/{_name}/modeling_{_name}.py, {_title}EncoderLayer.forward, "
        f"{_title}DecoderLayer.forward, {_title}Encoder.forward, {_title}Decoder.forward",
    )
# The encoder norms the sum of tokens and positions; the decoder norms the tokens and adds positions
# behind the norm, so that no norm makes its stream.
family(
    "blenderbot_small",
    partial(library, "BlenderbotSmallModel", **BOTH),
    two_texts,
    seq2seq(post, embedding="layernorm_embedding")[0],
    seq2seq(post)[1],
    source="models/blenderbot_small/modeling_blenderbot_small.py, "
    "BlenderbotSmallEncoder.forward, BlenderbotSmallDecoder.forward",
    inner=("decoder.layernorm_embedding",),
)
family(
    "whisper",
    partial(
        library,
        "WhisperModel",
        **{k: v for k, v in BOTH.items() if k != "max_position_embeddings"},
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=16,
    ),
    spectrogram,
    *seq2seq(pre, final="layer_norm"),
    source="models/whisper/modeling_whisper.py, WhisperEncoderLayer.forward, "
    "WhisperDecoderLayer.forward",
)
for _name, _model, _settings in (
    ("t5", "T5Model", {}),
    ("mt5", "MT5Model", {"feed_forward_proj": "gated-gelu"}),
):
    _title = _model.removesuffix("Model")
    family(
        _name,
        partial(library, _model, **T5, **_settings),
        two_texts,
        stack(
            "encoder.block.{}.",
            pre(A, "layer.0.layer_norm"),
            pre(F, "layer.1.layer_norm"),
            final_norms=("encoder.final_layer_norm",),
            label="encoder",
        ),
        stack(
            "decoder.block.{}.",
            pre(A, "layer.0.layer_norm"),
            pre(C, "layer.1.layer_norm"),
            pre(F, "layer.2.layer_norm"),
            final_norms=("decoder.final_layer_norm",),
            label="decoder",
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_title}LayerSelfAttention.forward, "
        f"{_title}LayerCrossAttention.forward, {_title}LayerFF.forward, {_title}Block.forward",
    )
# Attention within windows. The bias for relative positions is made once, in the first layer, and is
# added to the scores of each layer: no stream.
family(
    "longt5",
    partial(library, "LongT5Model", **T5),
    two_texts,
    stack(
        "encoder.block.{}.",
        pre(A, "layer.0.layer_norm"),
        pre(F, "layer.1.layer_norm"),
        final_norms=("encoder.final_layer_norm",),
        label="encoder",
    ),
    stack(
        "decoder.block.{}.",
        pre(A, "layer.0.layer_norm"),
        pre(C, "layer.1.layer_norm"),
        pre(F, "layer.2.layer_norm"),
        final_norms=("decoder.final_layer_norm",),
        label="decoder",
    ),
    source="models/longt5/modeling_longt5.py, LongT5LayerLocalSelfAttention.forward, "
    "LongT5Block.forward",
)
_SELF = sandwich(A, "pre_self_attn_layernorm", "post_self_attn_layernorm")
_CROSS = sandwich(C, "pre_cross_attn_layernorm", "post_cross_attn_layernorm")
_MLP = sandwich(F, "pre_feedforward_layernorm", "post_feedforward_layernorm")
family(
    "t5gemma",
    partial(
        library,
        "T5GemmaModel",
        encoder=GEMMA,
        decoder={**GEMMA, "cross_attention_hidden_size": WIDTH},
        **SPECIAL,
    ),
    two_texts,
    stack("encoder.layers.{}.", _SELF, _MLP, final_norms=("encoder.norm",), label="encoder"),
    stack(
        "decoder.layers.{}.", _SELF, _CROSS, _MLP, final_norms=("decoder.norm",), label="decoder"
    ),
    source="models/t5gemma/modeling_t5gemma.py, T5GemmaEncoderLayer.forward, "
    "T5GemmaDecoderLayer.forward",
)

# Sound

# The positional convolution reads the stream and is added to it before the first layer, without
# a norm of its own: part of the embedding. encoder.layer_norm stands behind that add (an
# embedding norm), or with do_stable_layer_norm behind the layers (final).
_SOUND_INNER = ("feature_extractor.*", "feature_projection.layer_norm")
for _name, _model in (("wav2vec2", "Wav2Vec2Model"), ("hubert", "HubertModel")):
    _title = _model.removesuffix("Model")
    family(
        _name,
        partial(library, _model, **SOUND),
        sound,
        stack(
            "encoder.layers.{}.",
            post(A, "layer_norm"),
            post(F, "final_layer_norm"),
            embedding_norms=("encoder.layer_norm",),
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_title}Encoder.forward",
        inner=_SOUND_INNER,
    )
# Several positional convolutions with norms of their own between them: inner, since an activation
# stands behind the last.
family(
    "data2vec_audio",
    partial(
        library,
        "Data2VecAudioModel",
        **{**SOUND, "num_conv_pos_embeddings": 2},
        conv_pos_kernel_size=3,
    ),
    sound,
    stack(
        "encoder.layers.{}.",
        post(A, "layer_norm"),
        post(F, "final_layer_norm"),
        embedding_norms=("encoder.layer_norm",),
    ),
    source="models/data2vec/modeling_data2vec_audio.py, Data2VecAudioEncoder.forward, "
    "Data2VecAudioPositionalConvLayer.forward",
    inner=(*_SOUND_INNER, "encoder.pos_conv_embed.layers.*"),
)
family(
    "wav2vec2_stable",
    partial(
        library, "Wav2Vec2Model", **SOUND, do_stable_layer_norm=True, feat_extract_norm="layer"
    ),
    sound,
    stack(
        "encoder.layers.{}.",
        pre(A, "layer_norm"),
        pre(F, "final_layer_norm"),
        final_norms=("encoder.layer_norm",),
    ),
    source="models/wav2vec2/modeling_wav2vec2.py, Wav2Vec2EncoderStableLayerNorm.forward",
    inner=_SOUND_INNER,
)
# Four sublayers a layer; the MLPs are added by halves. final_layer_norm stands on the stream behind
# the second MLP, which has an input norm too: mixed. In the last layer as in every other it is a
# stream norm; encoder.layer_norm behind it is final. pos_conv_embed is made, but never called. The
# convolution's input norm is within its module; its BatchNorm is behind a convolution, inner.
family(
    "wav2vec2_conformer",
    partial(library, "Wav2Vec2ConformerModel", **SOUND, conv_depthwise_kernel_size=3),
    sound,
    stack(
        "encoder.layers.{}.",
        pre(F, "ffn1_layer_norm", scale=0.5),
        pre(A, "self_attn_layer_norm"),
        pre(O, "conv_module.layer_norm"),
        ExpectedSublayer(
            F,
            "mixed",
            input_norms=("ffn2_layer_norm",),
            stream_norms=("final_layer_norm",),
            branch_scale=0.5,
        ),
        form="mixed",
        final_norms=("encoder.layer_norm",),
    ),
    source="models/wav2vec2_conformer/modeling_wav2vec2_conformer.py, "
    "Wav2Vec2ConformerEncoderLayer.forward, Wav2Vec2ConformerEncoder.forward",
    inner=(*_SOUND_INNER, "*.conv_module.batch_norm"),
)

# Vision

for _name, _model in (("vit", "ViTModel"), ("deit", "DeiTModel")):
    _title = _model.removesuffix("Model")
    family(
        _name,
        partial(library, _model, **VISION),
        pixels,
        stack(
            "layers.{}.",
            pre(A, "layernorm_before"),
            pre(F, "layernorm_after"),  # behind the attention's add, before the MLP
            final_norms=("layernorm",),
        ),
        source=f"models/{_name}/modeling_{_name}.py, {_title}Layer.forward",
    )
# lambda_1 and lambda_2 scale each channel of a branch: a part of the branch, still pre.
family(
    "beit",
    partial(library, "BeitModel", **VISION, use_mean_pooling=False, layer_scale_init_value=0.1),
    pixels,
    stack(
        "layers.{}.",
        pre(A, "layernorm_before"),
        pre(F, "layernorm_after"),
        final_norms=("layernorm",),
    ),
    source="models/beit/modeling_beit.py, BeitLayer.forward",
)
# The pooler's norm is over the mean of the tokens, and the norm of a mean is not the mean of the
# normed tokens: the stream has no final norm.
family(
    "beit_mean_pooling",
    partial(library, "BeitModel", **VISION, use_mean_pooling=True, layer_scale_init_value=0.1),
    pixels,
    stack("layers.{}.", pre(A, "layernorm_before"), pre(F, "layernorm_after")),
    source="models/beit/modeling_beit.py, BeitLayer.forward, BeitPooler.forward",
    inner=("pooler.layernorm",),
)
family(
    "dinov2",
    partial(library, "Dinov2Model", **VISION),
    pixels,
    stack("encoder.layer.{}.", pre(A, "norm1"), pre(F, "norm2"), final_norms=("layernorm",)),
    source="models/dinov2/modeling_dinov2.py, Dinov2Layer.forward",
)
family(
    "clip_text",
    partial(library, "CLIPTextModel", **TEXT),
    ids,
    stack(
        "encoder.layers.{}.",
        pre(A, "layer_norm1"),
        pre(F, "layer_norm2"),
        final_norms=("final_layer_norm",),
    ),
    source="models/clip/modeling_clip.py, CLIPEncoderLayer.forward, CLIPTextModel.forward",
)
# post_layernorm reads one token of the stream, which is also given out as it is.
family(
    "clip_vision",
    partial(library, "CLIPVisionModel", **VISION),
    pixels,
    stack(
        "encoder.layers.{}.",
        pre(A, "layer_norm1"),
        pre(F, "layer_norm2"),
        embedding_norms=("pre_layrnorm",),
        final_norms=("post_layernorm",),
    ),
    source="models/clip/modeling_clip.py, CLIPEncoderLayer.forward, CLIPVisionModel.forward",
)
# The head: one learned query attends to the stream, without a skip, and its answer goes through one
# more sublayer. That is a stream of its own.
family(
    "siglip_vision",
    partial(library, "SiglipVisionModel", **VISION),
    pixels,
    stack(
        "encoder.layers.{}.",
        pre(A, "layer_norm1"),
        pre(F, "layer_norm2"),
        final_norms=("post_layernorm",),
        label="encoder",
    ),
    stack("head.", pre(F, "layernorm"), layers=1, label="head"),
    source="models/siglip/modeling_siglip.py, SiglipEncoderLayer.forward, "
    "SiglipMultiheadAttentionPoolingHead.forward",
)
# Each stage is a stack of its own. Patch merging: the norm is over four tokens side by side, and a
# linear map follows. It is neither a final norm of one stage nor an embedding norm of the next.
_SWIN_LAYER = (pre(A, "layernorm_before"), pre(F, "layernorm_after"))
family(
    "swin",
    partial(library, "SwinModel", **SWIN),
    pixels,
    stack(
        "encoder.layers.0.blocks.{}.",
        *_SWIN_LAYER,
        embedding_norms=("embeddings.norm",),
        label="encoder.layers.0",
    ),
    stack(
        "encoder.layers.1.blocks.{}.",
        *_SWIN_LAYER,
        final_norms=("layernorm",),
        label="encoder.layers.1",
    ),
    source="models/swin/modeling_swin.py, SwinLayer.forward, SwinPatchMerging.forward",
    inner=("encoder.layers.*.downsample.norm",),
)
# Branch-output, though the norm behind the attention is called layernorm_before. Patch merging has
# its norm behind the linear map: the next stage starts with it, an embedding norm.
_SWINV2_LAYER = (branch_output(A, "layernorm_before"), branch_output(F, "layernorm_after"))
family(
    "swinv2",
    partial(library, "Swinv2Model", **SWIN),
    pixels,
    stack(
        "encoder.layers.0.blocks.{}.",
        *_SWINV2_LAYER,
        embedding_norms=("embeddings.norm",),
        label="encoder.layers.0",
    ),
    stack(
        "encoder.layers.1.blocks.{}.",
        *_SWINV2_LAYER,
        embedding_norms=("encoder.layers.0.downsample.norm",),
        final_norms=("layernorm",),
        label="encoder.layers.1",
    ),
    source="models/swinv2/modeling_swinv2.py, Swinv2Layer.forward, Swinv2PatchMerging.forward",
)


# timm


_VIT_FILE = "timm/models/vision_transformer.py"
_VIT_LAYER = (pre(A, "norm1"), pre(F, "norm2"))
family(
    "timm_vit",
    partial(timm_vit, init_values=0.1),
    image,
    stack("blocks.{}.", *_VIT_LAYER, final_norms=("norm",)),
    source=f"{_VIT_FILE}, Block.forward",
)
# norm_pre is before the blocks: `pre_norm` makes an embedding norm and says nothing of the form.
family(
    "timm_vit_pre_norm",
    partial(timm_vit, pre_norm=True),
    image,
    stack("blocks.{}.", *_VIT_LAYER, embedding_norms=("norm_pre",), final_norms=("norm",)),
    source=f"{_VIT_FILE}, VisionTransformer.forward_features",
)
family(  # fc_norm is over the mean of the tokens, as in BEiT above
    "timm_vit_avg",
    partial(timm_vit, global_pool="avg", class_token=False),
    image,
    stack("blocks.{}.", *_VIT_LAYER),
    source=f"{_VIT_FILE}, VisionTransformer.forward_head",
    inner=("fc_norm",),
)
family(
    "timm_vit_rmsnorm",
    timm_rms,
    image,
    stack("blocks.{}.", *_VIT_LAYER, final_norms=("norm",)),
    source=f"{_VIT_FILE}, Block.forward",
    inner=QK_NORMS,
)
family(
    "timm_vit_res_post",
    partial(timm_block, "ResPostBlock"),
    image,
    stack(
        "blocks.{}.", branch_output(A, "norm1"), branch_output(F, "norm2"), final_norms=("norm",)
    ),
    source=f"{_VIT_FILE}, ResPostBlock.forward",
)
# ViT-22B: one norm and one fused input projection for both branches.
family(
    "timm_vit_parallel_scaling",
    partial(timm_block, "ParallelScalingBlock"),
    image,
    stack("blocks.{}.", parallel("in_norm"), final_norms=("norm",)),
    source=f"{_VIT_FILE}, ParallelScalingBlock.forward",
)
# Two attentions side by side, then two MLPs; a sum of stacked tensors adds the branches.
family(
    "timm_vit_parallel_things",
    partial(timm_block, "ParallelThingsBlock"),
    image,
    stack(
        "blocks.{}.",
        parallel("attns.0.norm", "attns.1.norm", kind=f"{A} + {A}"),
        parallel("ffns.0.norm", "ffns.1.norm", kind=f"{F} + {F}"),
        final_norms=("norm",),
    ),
    source=f"{_VIT_FILE}, ParallelThingsBlock.forward",
)
family(
    "timm_eva_post_norm",
    partial(timm_model, "eva", "Eva", **TIMM_VIT, use_post_norm=True, global_pool="token"),
    image,
    stack(
        "blocks.{}.", branch_output(A, "norm1"), branch_output(F, "norm2"), final_norms=("norm",)
    ),
    source="timm/models/eva.py, EvaBlockPostNorm.forward",
)
# Patch merging as in Swin above, at the start of the second stage.
family(
    "timm_swin",
    partial(
        timm_model,
        "swin_transformer",
        "SwinTransformer",
        img_size=16,
        patch_size=2,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 4),
        window_size=2,
        num_classes=5,
    ),
    image,
    stack(
        "layers.0.blocks.{}.", *_VIT_LAYER, embedding_norms=("patch_embed.norm",), label="layers.0"
    ),
    stack("layers.1.blocks.{}.", *_VIT_LAYER, final_norms=("norm",), label="layers.1"),
    source="timm/models/swin_transformer.py, SwinTransformerBlock.forward, PatchMerging.forward",
    inner=("layers.*.downsample.norm",),
)

# The first MLP of a block works along the tokens: it mixes positions, without attention.
family(
    "timm_mixer",
    partial(
        timm_model,
        "mlp_mixer",
        "MlpMixer",
        img_size=16,
        patch_size=8,
        embed_dim=WIDTH,
        num_blocks=2,
        num_classes=5,
    ),
    image,
    stack("blocks.{}.", pre(O, "norm1"), pre(F, "norm2"), final_norms=("norm",)),
    source="timm/models/mlp_mixer.py, MixerBlock.forward",
)

# torch


_TORCH_FILE = "torch/nn/modules/transformer.py"
family(
    "torch_encoder_post",
    partial(torch_encoder, norm_first=False, norm=False),
    sequence,
    stack("layers.{}.", post(A, "norm1"), post(F, "norm2")),
    source=f"{_TORCH_FILE}, TransformerEncoderLayer.forward",
)
# The extra norm stands behind the last layer's norm2, which is a stream norm as in every layer.
family(
    "torch_encoder_post_and_norm",
    partial(torch_encoder, norm_first=False, norm=True),
    sequence,
    stack("layers.{}.", post(A, "norm1"), post(F, "norm2"), final_norms=("norm",)),
    source=f"{_TORCH_FILE}, TransformerEncoderLayer.forward, TransformerEncoder.forward",
)
family(
    "torch_encoder_pre",
    partial(torch_encoder, norm_first=True, norm=True),
    sequence,
    stack("layers.{}.", pre(A, "norm1"), pre(F, "norm2"), final_norms=("norm",)),
    source=f"{_TORCH_FILE}, TransformerEncoderLayer.forward, TransformerEncoder.forward",
)
# Without a final norm the stream leaves as it is.
family(
    "torch_encoder_pre_without_norm",
    partial(torch_encoder, norm_first=True, norm=False),
    sequence,
    stack("layers.{}.", pre(A, "norm1"), pre(F, "norm2")),
    source=f"{_TORCH_FILE}, TransformerEncoderLayer.forward",
)
# nn.Transformer always makes encoder.norm and decoder.norm.
family(
    "torch_transformer_post",
    partial(torch_transformer, norm_first=False),
    two_sequences,
    stack(
        "encoder.layers.{}.",
        post(A, "norm1"),
        post(F, "norm2"),
        final_norms=("encoder.norm",),
        label="encoder",
    ),
    stack(
        "decoder.layers.{}.",
        post(A, "norm1"),
        post(C, "norm2"),
        post(F, "norm3"),
        final_norms=("decoder.norm",),
        label="decoder",
    ),
    source=f"{_TORCH_FILE}, Transformer.__init__, TransformerDecoderLayer.forward",
)
family(
    "torch_transformer_pre",
    partial(torch_transformer, norm_first=True),
    two_sequences,
    stack(
        "encoder.layers.{}.",
        pre(A, "norm1"),
        pre(F, "norm2"),
        final_norms=("encoder.norm",),
        label="encoder",
    ),
    stack(
        "decoder.layers.{}.",
        pre(A, "norm1"),
        pre(C, "norm2"),
        pre(F, "norm3"),
        final_norms=("decoder.norm",),
        label="decoder",
    ),
    source=f"{_TORCH_FILE}, Transformer.__init__, TransformerDecoderLayer.forward",
)


if __name__ == "__main__":
    sys.stdout.write(markdown(FAMILIES))
