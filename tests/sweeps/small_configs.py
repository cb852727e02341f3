"""Small configurations of transformers' model types: every kind of layer stays.

Depth, vocabulary, widths and images are divided; what has to stay in proportion is divided by the
same factor.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator
from typing import Any

VOCABULARY = 128
WIDTH = 128
DEPTH = re.compile(
    r"(num|n)_(hidden_|encoder_|decoder_|mtp_)?(layers?|blocks)"
    r"|num_\w*_layers|(encoder|decoder)_layers|n_layer|depth"
)
HEADS = re.compile(
    r"(num|n)_(\w*_)?heads?|\w*_heads|\w*_num_heads|num_attention_groups|mamba_n_groups"
    r"|n_groups|\w*attention_heads"
)
HEAD_WIDTH = re.compile(r"(\w*_)?head_dim|\w*headdim|d_kv|\w*_head_size|(q|kv)_channels|head_size")
# Where one number per head or head width is not meant.
KEPT = re.compile(
    r"\w*(kernel|patch|image|window|chunk|block|stride|group|conv|type_vocab|cache|position"
    r"|num_mel|spatial|tile|pool|sliding|max|min|num_channels|expand|state_size|d_state|d_conv"
    r"|batch|beam|return|seq|audio_frame|spec_size)\w*"
)
WIDTHS = re.compile(
    r"\w*(hidden_size|intermediate_size|hidden_dim|_dim|rank|embd|d_model|n_inner|d_ff|ffn_dim"
    r"|hidden_size_per_layer_input|embedding_size|lru_width|d_inner|ffn_hidden_size|size)\w*"
    r"|dim|d_embed|hidden"
)
# One entry a stage of a pyramid; the number of stages stays.
STAGE_DEPTHS = re.compile(
    r"(\w+_)?depths?|(num_|n_)?(blocks|layers)|layer_depths?|num_hidden_layers|block_repeats"
    r"|blocks_per_stage"
)
STAGE_HEADS = re.compile(r"(num_)?(\w*_)?heads(_per_stage)?")
STAGE_WIDTHS = re.compile(
    r"(\w*_)?(hidden_sizes?|embed_dims?|dims?|widths?|out_channels|channels|hidden_channels|planes"
    r"|embed_dim_per_stage|channel_list)"
)
LAYER_NUMBERS = re.compile(
    r"(\w+_)?(feature_layers?|select_layers?|layer_ind\w+|(attn|block)_indexes|deepstack\w*|layer_ids)"
)
IMAGE = ("image_size", "img_size", "crop_size", "input_size")
CHANNELS = re.compile(r"\w*(out\w*_channels|in_channels|_features|pos_feats)")
OUTPUTS = ("out_features", "out_indices", "backbone_out_indices")
SIDE = 64
SHORTER = {"max_source_positions": 64, "num_frames": 4, "num_queries": 10}
SHORTER |= {"num_self_attends_per_block": 2, "n_filters": 4, "num_filters": 4}
SHORTER |= {"layers": 2, "latent_query_num": 4, "mm_tokens_per_image": 4}
SERIES = {"prediction_length": 4, "context_length": 16}
FIXED: dict[str, Any] = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "moe_top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "zero_expert_num": 1,
    "axial_pos_embds": False,
    "num_kv_shared_layers": 0,
    "num_nextn_predict_layers": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
INDEXER = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
HIERA = {"model_type": "sam2_hiera_det_model", "global_attention_blocks": [4]}
QFORMER = {"model_type": "blip_2_qformer", "encoder_hidden_size": 1024}
MROPE = {"rope_parameters": ROPE | {"mrope_section": [16, 24, 24]}}
OPTIONS: dict[str, dict[str, Any]] = {
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "num_buckets": 2},
    "xlm": {"causal": True},
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {"text_config": INDEXER},
    "esm": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "perceiver": {"num_latents": 8, "d_latents": 64, "d_model": 48, "max_position_embeddings": 64},
    "wav2vec2-bert": {"vocab_size": 32},
    "wav2vec2-conformer": {"vocab_size": 32},
    "chameleon": {"vocabulary_map": {"<image>": 90, "IMGIMGA": 91}},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}, "text_config": MROPE},
    "sam2": {"vision_config": {"backbone_config": HIERA}},
    "sam2_video": {"vision_config": {"backbone_config": HIERA}},
    "sam2_vision_model": {"backbone_config": HIERA},
    "sam2_hiera_det_model": {"global_attention_blocks": [4]},
    "qwen2_5_omni_thinker": {"text_config": MROPE},
    "qwen3_asr": {"audio_config": {"output_dim": 2048}},
    "granite_speech": {"projector_config": QFORMER},
    "granite_speech_plus": {"projector_config": QFORMER},
    "voxtral": {"audio_token_id": 90},
    "blip-2": {"image_token_index": 90},
    "instructblip": {"image_token_index": 90},
    "instructblipvideo": {"video_token_index": 90},
    "autoformer": SERIES,
    "informer": SERIES | {"num_time_features": 1},
    "time_series_transformer": SERIES,
    "patchtst": {"num_input_channels": 2, "context_length": 32, "patch_length": 4},
    "patchtsmixer": {"num_input_channels": 2, "context_length": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zaya": {"num_experts_per_tok": 1},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": [
            "sliding_attention",
            "mlp",
            "full_attention",
            "mlp",
            "full_attention",
            "mlp",
        ],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
}


def shrink(values: dict[str, Any], heads: int, head_width: int) -> dict[str, Any]:
    """A configuration's values with two layers, a small vocabulary and widths divided."""
    values = copy.deepcopy(values)
    depth = next((v for k, v in values.items() if DEPTH.fullmatch(k) and _number(v)), None)
    kept = _one_of_each(values, depth)
    factor = heads * head_width
    for name, value in values.items():
        if name == "per_layer_config" and isinstance(value, dict):
            by_index = {int(k): v for k, v in value.items()}
            chosen = {new: by_index[old] for new, old in enumerate(kept) if old in by_index}
            values[name] = {k: shrink(v, heads, head_width) for k, v in chosen.items()}
        elif isinstance(value, dict):
            inner = re.search(r"config$|^(text|encoder|decoder|vision|audio)", name)
            values[name] = shrink(value, heads, head_width) if inner else _rope(value, head_width)
        elif isinstance(value, list):
            if depth and len(value) == depth and depth > 2:
                values[name] = [value[i] for i in kept]
        elif name in FIXED and value is not None:
            values[name] = FIXED[name]
        elif _number(value):
            values[name] = _smaller(name, value, heads, head_width, factor, len(kept))
    count = values.get("num_attention_heads")
    if values.get("head_dim", 0) is None and count and _number(values.get("hidden_size")):
        values["head_dim"] = values["hidden_size"] // count
    if values.get("num_key_value_heads", 0) is None and count:
        values["num_key_value_heads"] = count
    return values


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _smaller(name: str, value: int, heads: int, head_width: int, factor: int, depth: int) -> int:
    if name.endswith(("token_id", "token_index", "_idx")) or re.search(r"(bo|eo|pa|se)\w_id", name):
        return value if value < VOCABULARY else VOCABULARY - 2
    if "vocab" in name and "type" not in name:
        return min(value, VOCABULARY)
    if DEPTH.fullmatch(name):
        return min(value, depth)
    if HEAD_WIDTH.fullmatch(name):
        return max(1, value // head_width)
    if HEADS.fullmatch(name):
        return max(1, value // heads)
    if WIDTHS.fullmatch(name) and not KEPT.fullmatch(name) and value >= 16:
        return max(8, value // factor)
    return value


def _one_of_each(values: dict[str, Any], depth: int | None) -> list[int]:
    """The layers to keep: the first of each kind in the lists that have an entry a layer."""
    if not depth or depth <= 2:
        return list(range(depth or 2))
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == depth]
    kinds: dict[str, int] = {}
    for index in range(depth):
        kinds.setdefault(repr([entries[index] for entries in lists]), index)
    first = sorted(kinds.values())[:4]
    return first if len(first) > 1 else [0, 1]


def _rope(value: dict[str, Any], head_width: int) -> dict[str, Any]:
    """Rotary settings; sections of the head width shrink with it."""
    if isinstance(value.get("mrope_section"), list):
        value["mrope_section"] = [max(1, n // head_width) for n in value["mrope_section"]]
    return value


def _text_width(values: dict[str, Any]) -> int:
    for part in (values, *(v for v in values.values() if isinstance(v, dict))):
        for name in ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"):
            if _number(part.get(name)):
                return part[name]
    return 1024


def configurations(model_type: str, *, stages: bool = False) -> Iterator[Any]:
    """Small configurations to try, the best first; ``stages``: those of pyramids and images too."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    options = OPTIONS.get(model_type, {})
    default = cls(**options)
    values = default.to_dict()
    factor = 2 ** max(0, round(math.log2(_text_width(values) / WIDTH)))
    splits = [(max(1, factor // 4), 4), (max(1, factor // 2), 2), (factor, 1), (1, factor), (2, 2)]
    for heads, head_width in dict.fromkeys([*splits, (1, 1)]):
        for images in (True, False) if stages else (None,):

            def make(h: int = heads, w: int = head_width, images: bool | None = images) -> Any:
                small = shrink(values, h, w)
                if images is not None:
                    _shrink_stages(small, values, h, w, images=images)
                    _join_parts(small)
                return cls.from_dict(_with(small, options))

            yield make
    # A configuration that cannot be made of its own values.
    yield lambda: _in_place(copy.deepcopy(default), 1, 1)


def _shrink_stages(
    small: dict[str, Any], values: dict[str, Any], heads: int, head_width: int, *, images: bool
) -> None:
    """The lists with an entry a stage divided like numbers, and the images made smaller."""
    lists = {k: v for k, v in values.items() if isinstance(v, (list, tuple)) and _all_numbers(v)}
    staged = {k: v for k, v in lists.items() if STAGE_DEPTHS.fullmatch(k)}
    if staged:
        small.update({k: v for k, v in values.items() if DEPTH.fullmatch(k) or k in lists})
        small.update({k: [min(n, 2) for n in v] for k, v in staged.items()})
    lengths = {len(v) for k, v in lists.items() if STAGE_WIDTHS.fullmatch(k)}
    small.update({k: v for k, v in values.items() if "num_feat" in str(k) and v in lengths})
    for name, value in lists.items():
        if STAGE_HEADS.fullmatch(name):
            small[name] = [max(1, n // heads) for n in value]
        elif STAGE_WIDTHS.fullmatch(name):
            small[name] = [n if n < 16 else max(8, n // (heads * head_width)) for n in value]
    for name, value in values.items():
        if _number(value) and value >= 32 and CHANNELS.fullmatch(name):
            small[name] = max(8, value // (heads * head_width))
    if not staged:
        _choose_layers(small, values)
        for name, value in values.items():  # a part of one layer makes the others no shallower
            if _number(value) and DEPTH.fullmatch(name):
                small[name] = max(small[name], min(value, 2))
    if images:
        _shrink_images(small, values)
    for name, value in values.items():
        if _is_part(value) and isinstance(small.get(name), dict):
            _shrink_stages(small[name], value, heads, head_width, images=images)


def _is_part(value: Any) -> bool:
    """Whether a value is a dictionary of settings."""
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _join_parts(small: dict[str, Any]) -> None:
    """What a tower hands to the text model has its width; not every default has."""
    width = (small.get("text_config") or {}).get("hidden_size")
    for part in small.values():
        if isinstance(part, dict) and width and "out_hidden_size" in part:
            part["out_hidden_size"] = width


def _choose_layers(small: dict[str, Any], values: dict[str, Any]) -> None:
    """Numbers of layers lie within the depth; it is as large as a backbone has outputs."""
    for name, value in values.items():
        if LAYER_NUMBERS.fullmatch(name) and isinstance(value, (list, tuple)):
            small[name] = [min(n, 1) for n in value]
        elif LAYER_NUMBERS.fullmatch(name) and _number(value):
            small[name] = min(value, 1)
    for depth in ("num_hidden_layers", "num_layers"):
        outputs = max((len(values.get(n) or []) for n in OUTPUTS), default=0)
        if outputs and _number(values.get(depth)):
            small[depth] = max(2, outputs)
            numbers = range(small[depth] - outputs + 1, small[depth] + 1)
            small["out_features"] = [f"stage{n}" for n in numbers]
            small["out_indices"] = list(numbers)
            if "backbone_out_indices" in values:
                small["backbone_out_indices"] = [n - 1 for n in numbers]
            small.pop("stage_names", None)


def _shrink_images(small: dict[str, Any], values: dict[str, Any]) -> None:
    tower = values.get("vision_config") or {}
    patch = _first(values, "patch_size", "patch_sizes", "patch_stride", "encoder_stride")
    patch = patch or _first(tower, "patch_size") or 16
    side = 4 * patch if patch >= 8 else SIDE
    for name in IMAGE:
        value = values.get(name)
        if _number(value) and value >= 64:
            small[name] = min(value, side)
        elif isinstance(value, (list, tuple)) and _all_numbers(value):
            small[name] = [min(n, side) for n in value]
    size = _first(values, *IMAGE)
    if values.get("image_grid_pinpoints"):
        small["image_grid_pinpoints"] = [[side, side]]
    if size and _number(values.get("window_size")):
        small["window_size"] = 2
    if size and _number(values.get("image_embedding_size")):
        small["image_embedding_size"] = values["image_embedding_size"] * min(size, side) // size
    for name, most in SHORTER.items():
        if _number(values.get(name)):
            small[name] = min(values[name], most)


def _all_numbers(values: Any) -> bool:
    return bool(values) and all(map(_number, values))


def _first(values: dict[str, Any], *names: str) -> int | None:
    """The first of these numbers; of a list its first entry."""
    for name in names:
        value = values.get(name)
        value = value[0] if isinstance(value, (list, tuple)) and value else value
        if _number(value):
            return value
    return None


def _with(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The values with those options that are no part of their own; parts were made with theirs."""
    return values | {k: v for k, v in options.items() if not k.endswith("_config")}


def _in_place(config: Any, heads: int, head_width: int) -> Any:
    for name, value in shrink(config.to_dict(), heads, head_width).items():
        if _number(value) or isinstance(value, list):
            setattr(config, name, value)
    return config
