"""Small transformers for tests: written by hand, and models of transformers built from configs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from helpers import assert_state_equal, random_input, relative_error, signed, state_copy
from swapping import CODES, run64
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import normswap as ns
from normswap import norms

WIDTH = 8
VOCABULARY = 30
EXACT = 1e-10
PUSH_CODES = CODES | {"raw-reader", "norm-writer"}
RMS_CLASSES = (nn.RMSNorm, norms.RMSNorm, norms.ChannelRMSNorm)
LAYER_TO_RMS = {nn.LayerNorm: nn.RMSNorm}


# Random parameters


@torch.no_grad()
def fill_all(model: nn.Module, seed: int = 0) -> Any:
    """Every parameter random, in double precision and eval mode.

    Scales have negative and zero entries (of ``w`` and of ``1 + w``), biases are not small, and
    what writes a stream has a mean far from zero.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if not parameter.is_floating_point():
                continue
            if name.endswith("bias"):
                parameter.copy_(0.5 * normal(parameter))
            elif parameter.ndim >= 2:
                fan = parameter[0].numel() if parameter.shape[0] > 1 else 1
                spread = 1.0 if isinstance(module, nn.Embedding) else fan**-0.5
                parameter.copy_(spread * (normal(parameter) + 0.4))
            elif parameter.ndim == 1:
                parameter.copy_(signed(generator, parameter.numel()))
                if parameter.numel() > 3:
                    parameter[-1] = -1.0
        for name, buffer in module.named_buffers(recurse=False):
            if name == "running_var":
                buffer.copy_(torch.exp(0.5 * normal(buffer)))
            elif name == "running_mean":
                buffer.copy_(normal(buffer))
    return model.double().eval()


def token_ids(*shape: int, seed: int = 1, below: int = VOCABULARY) -> Tensor:
    """Random ids, none of them one of the first two (padding and the like)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, below, shape, generator=generator)


# Pieces written by hand


class Attention(nn.Module):
    """Softmax attention; each option is one thing that decides what may be done to q, k and v."""

    def __init__(
        self,
        *,
        heads: int = 2,
        bias: bool = True,
        k_bias: bool | None = None,
        causal: bool = True,
        fused: bool = False,
        logits: str = "plain",
        per_head: Any = None,
        full_width: Any = None,
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.logits = heads, causal, logits
        if fused:
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=bias)
        else:
            self.q = nn.Linear(WIDTH, WIDTH, bias=bias)
            self.k = nn.Linear(WIDTH, WIDTH, bias=bias if k_bias is None else k_bias)
            self.v = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.out = nn.Linear(WIDTH, WIDTH, bias=bias)
        if per_head or full_width:
            size = WIDTH // heads if per_head else WIDTH
            self.q_norm, self.k_norm = (
                (per_head or full_width)(size),
                (per_head or full_width)(size),
            )
        self.norm_width = "head" if per_head else "full" if full_width else ""
        if logits == "sink":
            self.sinks = nn.Parameter(torch.zeros(heads))
        if logits == "relative":
            self.relative = nn.Parameter(torch.zeros(heads, 1, WIDTH // heads))
        if logits == "prefix":
            self.prefix = nn.Parameter(torch.zeros(heads, 2, WIDTH // heads))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def project(self, x: Tensor, context: Tensor) -> list[Tensor]:
        if hasattr(self, "qkv"):
            q, k, v = self.qkv(x).unflatten(-1, (3, -1)).unbind(-2)
        else:
            q, k, v = self.q(x), self.k(context), self.v(context)
        if self.norm_width == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = self.split(q), self.split(k), self.split(v)
        if self.norm_width == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return [rotate(q), rotate(k), v] if self.logits == "rotary" else [q, k, v]

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x, x if context is None else context)
        if self.logits == "prefix":
            k = torch.cat([self.prefix.expand(k.shape[0], -1, -1, -1), k], -2)
            v = torch.cat([v[:, :, :2], v], -2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if self.logits == "alibi":
            places = torch.arange(k.shape[-2], device=x.device)
            slopes = torch.tensor([0.5, 0.25], device=x.device)[: self.heads, None, None]
            scores = scores + slopes * places
        if self.logits == "relative":  # a term that reads k at its own position
            scores = scores + (self.relative * torch.arange(q.shape[-2])[:, None]) @ k.mT
        if self.causal:
            future = torch.ones(scores.shape[-2:], device=x.device).triu(1).bool()
            scores = scores.masked_fill(future, -1e9)
        weights = self.weigh(scores)
        return self.out((weights @ v).transpose(-2, -3).flatten(-2))

    def weigh(self, scores: Tensor) -> Tensor:
        if self.logits == "softcap":
            return (scores.div(2).tanh() * 2).softmax(-1)
        if self.logits == "sigmoid":
            return scores.sigmoid()
        if self.logits == "sink":
            sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
            return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return scores.softmax(-1)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions."""
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * 0.7
    first, second = x.chunk(2, -1)
    turned = torch.cat([-second, first], -1)
    return x * angles.cos() + turned * angles.sin()


class MLP(nn.Module):
    """Two linears and a GELU, or a gated one."""

    def __init__(self, bias: bool = True, gated: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 12, bias=bias)
        self.gate = nn.Linear(WIDTH, 12, bias=bias) if gated else None
        self.down = nn.Linear(12, WIDTH, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up)


class PreNorm(nn.Module):
    """``h = x + f(norm(x))`` with attention, then with an MLP."""

    def __init__(self, norm: Any = nn.LayerNorm, *, bias: bool = True, **attention: Any) -> None:
        super().__init__()
        self.norm1, self.attention = norm(WIDTH), Attention(bias=bias, **attention)
        self.norm2, self.mlp = norm(WIDTH), MLP(bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PostNorm(nn.Module):
    """``norm(x + f(x))``."""

    def __init__(self, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.norm1, self.attention = norm(WIDTH), Attention()
        self.norm2, self.mlp = norm(WIDTH), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Language(nn.Module):
    """Token and position embeddings, pre-norm blocks, a final norm and a head (tied or not)."""

    def __init__(
        self,
        norm: Any = nn.LayerNorm,
        *,
        depth: int = 2,
        tied: bool = False,
        head_bias: bool = False,
        **block: Any,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.places = nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(PreNorm(norm, **block) for _ in range(depth))
        self.norm = norm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=head_bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Tower(nn.Module):
    """A writer, two pre-norm branches and a head: ``h = w(x); h += f(norm(h)); …``.

    The last writes to the stream may be changed by ``after``, the branches by ``scale``.
    """

    def __init__(self, writer: nn.Module, after: Any = None) -> None:
        super().__init__()
        self.writer = writer
        self.norm1, self.mlp1 = nn.LayerNorm(WIDTH, eps=1e-3), MLP()
        self.norm2, self.mlp2 = nn.LayerNorm(WIDTH, eps=1e-12), MLP()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.after = after

    def forward(self, *args: Tensor) -> Tensor:
        x = self.writer(*args)
        x = x + self.mlp1(self.norm1(x))
        x = x if self.after is None else self.after(x)
        x = x + self.mlp2(self.norm2(x))
        return self.head(self.norm(x))


TOWER = ("norm1", "norm2", "norm")


class Conv1D(nn.Module):
    """GPT-2's linear, which stores its weight ``[in, out]``."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(inside, outside))
        self.bias = nn.Parameter(torch.zeros(outside))
        self.nf = outside

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.reshape(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], self.nf)


# Models of the transformers library

_TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 32,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_BOTH = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 1,
    "decoder_start_token_id": 1,
}
_WHISPER = {
    **{k: v for k, v in _BOTH.items() if k != "max_position_embeddings"},
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
}
_VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 8,
}
_ONE_KV = {"num_key_value_heads": 1}
_GEMMA = {**_ONE_KV, "head_dim": 8}
_QWEN_MOE = {
    **_ONE_KV,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 12,
}
_DEEPSEEK = {
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}

# Family: class of the config, class of the model, settings.
_LIBRARY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
    "bigcode": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT2),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_TEXT, "ffn_dim": 24, "word_embed_proj_dim": 12}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_TEXT, **_ONE_KV}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**_TEXT, **_GEMMA}),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_TEXT, **_GEMMA}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_TEXT, **_ONE_KV, "num_local_experts": 4},
    ),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", {**_TEXT, **_QWEN_MOE}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**_TEXT, **_DEEPSEEK}),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**_TEXT, **_ONE_KV}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", _TEXT),
    "bert": ("BertConfig", "BertForMaskedLM", _TEXT),
    "roberta": (
        "XLMRobertaConfig",
        "XLMRobertaForMaskedLM",
        {**_TEXT, "tie_word_embeddings": True},
    ),
    "bert_base": ("BertConfig", "BertModel", {**_TEXT, "num_hidden_layers": 1}),
    "bloom": ("BloomConfig", "BloomForCausalLM", {**_TEXT, "n_layer": 2, "n_head": 2}),
    "falcon": ("FalconConfig", "FalconForCausalLM", _TEXT),
    "falcon_bias": ("FalconConfig", "FalconForCausalLM", {**_TEXT, "bias": True}),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "n_layers": 2,
            "n_heads": 2,
            "max_seq_len": 32,
            "expansion_ratio": 2,
        },
    ),
    "nemotron": ("NemotronConfig", "NemotronForCausalLM", {**_TEXT, **_GEMMA}),
    "neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _TEXT),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {**_TEXT, **_ONE_KV}),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", _TEXT),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", _WHISPER),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", _BOTH),
    "blenderbot": ("BlenderbotConfig", "BlenderbotForConditionalGeneration", _BOTH),
    "vit": ("ViTConfig", "ViTForImageClassification", _VISION),
    "dinov2": ("Dinov2Config", "Dinov2Model", _VISION),
    "clip": (
        "CLIPConfig",
        "CLIPModel",
        {
            "text_config": {**_TEXT, "eos_token_id": VOCABULARY - 1},
            "vision_config": _VISION,
            "projection_dim": 8,
        },
    ),
}
LIBRARY = tuple(_LIBRARY)
EXPERTS = ("mixtral", "qwen2_moe", "deepseek_v3")


def library_model(family: str, **settings: Any) -> Any:
    """A small random model of a family of the transformers library."""
    import transformers

    config, model, values = _LIBRARY[family]
    built = getattr(transformers, model)(getattr(transformers, config)(**{**values, **settings}))
    if family in EXPERTS:
        built.set_experts_implementation("batched_mm")
    return fill_all(built)


def library_inputs(family: str, seed: int = 1, batch: int = 2, length: int = 6) -> dict[str, Any]:
    """Keywords for :func:`library_model`."""
    ids = {"input_ids": token_ids(batch, length, seed=seed)}
    pixels = {"pixel_values": random_input(batch, 3, 16, 16, seed=seed)}
    if family == "whisper":
        sound = random_input(batch, 8, 32, seed=seed)
        return {"input_features": sound, "decoder_input_ids": ids["input_ids"], "use_cache": False}
    if family in ("mbart", "blenderbot"):
        other = token_ids(batch, length + 1, seed=seed + 1)
        return {**ids, "decoder_input_ids": other, "use_cache": False}
    if family in ("vit", "dinov2"):
        return pixels
    if family == "clip":
        ids["input_ids"][:, -1] = VOCABULARY - 1
        return {**ids, **pixels}
    return ids if family.startswith(("bert", "roberta")) else {**ids, "use_cache": False}


class LogitsOnly(nn.Module):
    """A model of the library that returns its logits and nothing else."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        return self.model(**inputs).logits


# What must hold whenever a model is changed


def convert(model: nn.Module, *args: Any, others: Any = (), **options: Any) -> tuple[Any, Any]:
    """LayerNorm to RMSNorm on a copy, and everything that holds whatever was refused.

    ``args``: tensors, or one mapping of keywords; ``others``: more such tuples to compare on.
    """
    options = {"method": "exact", "verify": False, **options}
    new, report = _change(ns.swap_norms, model, args, LAYER_TO_RMS, others=others, **options)
    for site in report.sites:
        old, now = _module(model, site.name), _module(new, site.name)
        if site.status == "exact" and options.get("keep_class"):
            assert type(now) is type(old), site
        elif site.status == "exact":
            assert type(now) in RMS_CLASSES, site
        elif old is not None:
            assert type(now) is type(old), site
    return new, report


def fold(model: nn.Module, *args: Any, others: Any = (), **options: Any) -> tuple[Any, Any]:
    """Fold the affine parts of norms, as :func:`convert`."""
    options = {"verify": False, **options}
    new, report = _change(ns.fold_affine, model, args, others=others, **options)
    for site in report.sites:
        old, now = _module(model, site.name), _module(new, site.name)
        if old is not None:
            assert type(now) is type(old), site
    return new, report


def _module(model: nn.Module, name: str) -> nn.Module | None:
    return None if "#" in name else model.get_submodule(name)  # a functional norm is no module


def _change(
    function: Any, model: nn.Module, args: Any, *mapping: Any, others: Any, **options: Any
) -> tuple[Any, Any]:
    state = state_copy(model)
    inputs = args[0] if len(args) == 1 else args
    new, report = function(model, *mapping, inputs, **options)
    assert_state_equal(model, state)
    check_rows(report)
    check_mapping(model, new, report)
    for given in ((args, *others)) if others else (args,):
        assert_equal_outputs(model, new, *given)
    return new, report


def assert_equal_outputs(old: nn.Module, new: nn.Module, *args: Any) -> None:
    """Both models compute the same, in true float64."""
    error = relative_error(call64(old, *args), call64(new, *args))
    assert error < EXACT, f"outputs differ by {error:.2e}"


def call64(model: nn.Module, *args: Any) -> Any:
    """The output in true float64; one mapping stands for keywords."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        return run64(model, **args[0])
    return run64(model, *args)


def check_rows(report: Any) -> None:
    """Known statuses and codes, a sentence for each refusal, one row a site."""
    for site in report.sites:
        assert site.status in {"exact", "refused"}, site
        if site.status == "refused":
            assert site.reason in PUSH_CODES, site
            assert site.detail, site
        else:
            assert site.reason is None, site
    names = [site.name for site in report.sites]
    assert len(names) == len(set(names)), f"a site appears twice: {names}"
    assert sum(report.counts.values()) == len(report.sites)


def check_mapping(old: nn.Module, new: nn.Module, report: Any) -> None:
    """Every tensor that is another one now is told in the report."""
    before, told = old.state_dict(), {row.target for row in report.mapping}
    for name, tensor in new.named_parameters():  # a shared one has one row
        kept = name in before and torch.equal(before[name], tensor)
        assert kept or name in told, f"{name} changed and the mapping does not say so"


def assert_all(report: Any, count: int | None = None) -> None:
    """Every norm was changed exactly."""
    refused = [(s.name, s.reason, s.detail) for s in report.sites if s.status != "exact"]
    assert not refused, refused
    assert report.sites
    assert count is None or len(report.sites) == count


def statuses(report: Any) -> dict[str, str]:
    """By site: ``exact``, or the reason of the refusal."""
    return {s.name: s.reason or s.status for s in report.sites}


def centring_ops(model: nn.Module) -> list[str]:
    """The modules behind which a centring op stands."""
    return [
        name
        for name, module in model.named_modules()
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if "MeanCentring" in (type(hook).__name__, getattr(hook, "__name__", ""))
    ]


def assert_centred(*tensors: Tensor, axis: int = -1) -> None:
    """The mean along the axis is zero, up to rounding."""
    for tensor in tensors:
        assert float(tensor.detach().double().mean(axis).abs().max()) < 1e-12


def assert_neutral(norm: Any, *, offset: bool = False) -> None:
    """The norm's scale is one and its shift zero."""
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    assert weight is None or bool((weight == (0 if offset else 1)).all())
    assert bias is None or bool((bias == 0).all())


class _NormCalls(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten.layer_norm
        return func(*args, **(kwargs or {}))


def layer_norm_calls(model: nn.Module, *args: Any) -> int:
    """How many calls of ``aten.layer_norm`` one run makes."""
    with torch.inference_mode(), _NormCalls() as calls:
        if len(args) == 1 and isinstance(args[0], Mapping):
            model(**args[0])
        else:
            model(*args)
    return calls.count
