"""Norms, attention and MLPs of random transformers, each built from a small description.

A description is a frozen dataclass whose defaults are the simplest choice. Modules fill their
parameters from torch's global generator as they are made: gammas of both signs with zeros,
biases and betas that are not zero, embeddings with a mean.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from transformers.pytorch_utils import Conv1D

HEADS = 2
LONGEST = 16  # tokens that position tables and mask tables have room for


def describe(value: Any) -> str:
    """A description with the fields that are not the default."""
    if not is_dataclass(value) or isinstance(value, type):
        if isinstance(value, tuple):
            return "(" + ", ".join(map(describe, value)) + ("," if len(value) == 1 else "") + ")"
        return repr(value)
    changed = [f for f in fields(value) if getattr(value, f.name) != f.default]
    inside = ", ".join(f"{f.name}={describe(getattr(value, f.name))}" for f in changed)
    return f"{type(value).__name__}({inside})"


# Norms


@dataclass(frozen=True)
class Norm:
    """A norm over the last axis."""

    form: str = "layer"
    gamma: str = "mixed"
    beta: str = "random"
    eps: float = 1e-5
    bypassed: bool = False  # its parent calls the function with its parameters

    @property
    def centres(self) -> bool:
        """Whether it is a LayerNorm of some form."""
        return self.form not in RMS_FORMS


RMS_FORMS = ("rms", "rms_plain", "rms_functional", "rms_steps", "rms_offset")
NORM_FORMS = (
    "layer",
    "layer_no_bias",
    "layer_plain",
    "layer_functional",
    "layer_steps",
    "layer_variance",
    "layer_offset",
    "layer_split",
    *RMS_FORMS,
)


class WrittenNorm(nn.Module):
    """A norm as modelling files write it."""

    def __init__(self, form: str, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = None if form in RMS_FORMS else nn.Parameter(torch.zeros(width))
        self.form, self.eps = form, eps

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self, self.form)(x)

    def extra_repr(self) -> str:
        return f"{self.form}, {tuple(self.weight.shape)}"

    def layer_functional(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)

    def layer_steps(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x / torch.sqrt(variance + self.eps)) + self.bias

    def layer_variance(self, x: Tensor) -> Tensor:
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias

    def layer_offset(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, 1 + self.weight, self.bias, self.eps)

    def layer_split(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, eps=self.eps) * self.weight + self.bias

    def rms_functional(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def rms_steps(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

    def rms_offset(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).type_as(x)


@torch.no_grad()
def make_norm(norm: Norm, width: int) -> nn.Module:
    """The module, with random gamma and beta of the kind asked for."""
    if norm.form.startswith("layer") and norm.form in ("layer", "layer_no_bias", "layer_plain"):
        affine, bias = norm.form != "layer_plain", norm.form == "layer"
        module = nn.LayerNorm(width, norm.eps, elementwise_affine=affine, bias=bias)
    elif norm.form in ("rms", "rms_plain"):
        module = nn.RMSNorm(width, norm.eps, elementwise_affine=norm.form == "rms")
    else:
        module = WrittenNorm(norm.form, width, norm.eps)
    if module.weight is not None:
        module.weight.copy_(random_gamma(norm.gamma, width))
        if norm.form.endswith("offset"):
            module.weight.sub_(1)
    if getattr(module, "bias", None) is not None:
        module.bias.copy_(random_beta(norm.beta, width))
    return module


def random_gamma(kind: str, width: int) -> Tensor:
    """Ones, a constant, or scales of both signs with a zero."""
    if kind == "ones":
        return torch.ones(width)
    if kind == "constant":
        return torch.full((width,), 1.5)
    values = (0.5 + torch.rand(width)) * (1 - 2 * (torch.rand(width) < 0.4).float())
    if kind == "mixed":
        values[width // 2] = 0.0
    return values


def random_beta(kind: str, width: int) -> Tensor:
    """Zeros, or random values, perhaps without a mean."""
    if kind == "zero":
        return torch.zeros(width)
    values = torch.randn(width) + 0.3
    if kind == "centred":  # exactly
        values[width // 2 :] = -values[: width // 2]
    return values


def apply_norm(norm: Norm, module: nn.Module, x: Tensor) -> Tensor:
    """Call the norm, or compute it with its parameters without calling it."""
    if norm.bypassed and isinstance(module, nn.LayerNorm):
        return F.layer_norm(x, module.normalized_shape, module.weight, module.bias, module.eps)
    return module(x)


# Linear layers


class Projection(nn.Module):
    """A linear map whose weight is stored or applied in an unusual way."""

    def __init__(self, form: str, inside: int, outside: int, *, bias: bool) -> None:
        super().__init__()
        shape = (outside, inside) if form in ("functional", "transposed") else (inside, outside)
        self.weight = nn.Parameter(torch.randn(shape) / inside**0.5)
        self.bias = nn.Parameter(torch.randn(outside)) if bias else None
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        if self.form == "functional":
            return F.linear(x, self.weight, self.bias)
        if self.form == "einsum":
            y = torch.einsum("bti,io->bto", x, self.weight)
        elif self.form == "transposed":
            y = torch.matmul(x, self.weight.transpose(0, 1))
        else:
            y = x @ self.weight
        return y if self.bias is None else y + self.bias


class PointwiseConv(nn.Conv1d):
    """A linear map over the last axis as a conv with a kernel of one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2).contiguous()


LINEAR_FORMS = (
    "linear",
    "conv1d",
    "conv",
    "matmul",
    "einsum",
    "functional",
    "transposed",
    "weight_norm",
)


@torch.no_grad()
def make_linear(form: str, inside: int, outside: int, *, bias: bool = True) -> nn.Module:
    """A linear layer with a bias of size about one."""
    if form in ("linear", "weight_norm"):
        module: Any = nn.Linear(inside, outside, bias=bias)
        if form == "weight_norm":
            parametrizations.weight_norm(module)
    elif form == "conv1d":
        module = Conv1D(outside, inside)  # always has a bias
        module.weight.copy_(torch.randn(inside, outside) / inside**0.5)
    elif form == "conv":
        module = PointwiseConv(inside, outside, 1, bias=bias)
    else:
        return Projection(form, inside, outside, bias=bias)
    if module.bias is not None:
        module.bias.copy_(torch.randn(outside))
    return module


@torch.no_grad()
def make_embedding(count: int, width: int, padding: int | None = None) -> nn.Embedding:
    """A table whose rows have a mean."""
    table = nn.Embedding(count, width, padding_idx=padding)
    table.weight.copy_(torch.randn(count, width) + 0.5)
    return table


# Attention


@dataclass(frozen=True)
class Attention:
    """Attention with all that models put into it."""

    projections: str = "separate"  # packed, interleaved, stacked, mha
    linear: str = "linear"
    biases: str = "all"  # no_key, none, inputs (none on the output)
    kernel: str = "eager"  # eager32, sdpa, einsum
    mask: str = "none"  # causal, table, distance, keys
    rotary: str = ""  # half, pairs
    shared_keys: bool = False  # one key-value head for all
    head_norm: Norm | None = None  # of queries and keys, per head
    full_norm: Norm | None = None  # of queries and keys before they are split into heads
    sinks: bool = False
    softcap: bool = False
    gate: bool = False
    inner_norm: Norm | None = None  # in front of the output projection
    same_query: bool = False  # one layer for queries and keys
    same_norm: bool = False  # one norm for queries and keys


class AttentionLayer(nn.Module):
    """Self-attention, or attention to a memory."""

    def __init__(self, spec: Attention, width: int, *, cross: bool = False) -> None:
        super().__init__()
        self.spec, self.cross = spec, cross
        self.size, self.kv_heads = width // HEADS, 1 if spec.shared_keys else HEADS
        if spec.projections == "mha":
            self.mha = nn.MultiheadAttention(
                width, HEADS, bias=spec.biases != "none", batch_first=True
            )
            if self.mha.in_proj_bias is not None:
                nn.init.normal_(self.mha.in_proj_bias)
                nn.init.normal_(self.mha.out_proj.bias)
            return
        self._make_projections(width)
        self._make_extras(width)

    def _make_projections(self, width: int) -> None:
        spec, kv = self.spec, self.size * self.kv_heads
        some = spec.biases != "none"
        self.out = make_linear(spec.linear, width, width, bias=spec.biases in ("all", "no_key"))
        if spec.projections in ("interleaved", "stacked"):
            self.packed: nn.Module = nn.Linear(width, 3 * width, bias=some)
        elif spec.projections == "packed" and self.cross:
            self.packed = nn.Linear(width, width + 2 * kv, bias=some)  # read in slices
        elif spec.projections == "packed":
            self.packed = make_linear(spec.linear, width, width + 2 * kv, bias=some)
        else:
            self.query = make_linear(spec.linear, width, width, bias=some)
            self.key = make_linear(spec.linear, width, kv, bias=some and spec.biases != "no_key")
            self.value = make_linear(spec.linear, width, kv, bias=some)
            if spec.same_query and kv == width:
                self.key = self.query

    def _make_extras(self, width: int) -> None:
        spec = self.spec
        if spec.head_norm:
            self.query_norm = make_norm(spec.head_norm, self.size)
            self.key_norm = make_norm(spec.head_norm, self.size)
        if spec.full_norm:
            self.query_norm = make_norm(spec.full_norm, width)
            self.key_norm = make_norm(spec.full_norm, self.size * self.kv_heads)
        if spec.same_norm and (spec.head_norm or (spec.full_norm and not spec.shared_keys)):
            self.key_norm = self.query_norm
        if spec.inner_norm:
            self.inner_norm = make_norm(spec.inner_norm, width)
        if spec.gate:
            self.gate = nn.Linear(width, width)
        if spec.sinks:
            self.sinks = nn.Parameter(torch.randn(HEADS))
        if spec.mask == "table":
            self.table = nn.Parameter(torch.randn(LONGEST, LONGEST))

    def forward(self, x: Tensor, memory: Tensor | None = None, keys: Any = None) -> Tensor:
        source = x if memory is None else memory
        if self.spec.projections == "mha":
            return self._torch_attention(x, source, keys)
        q, k, v = self._project(x, source)
        if self.spec.full_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (y.unflatten(-1, (-1, self.size)) for y in (q, k, v))
        if self.spec.head_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        if self.spec.rotary:
            q, k = rotate(q, self.spec.rotary), rotate(k, self.spec.rotary)
        mixed = self._mix(q, k, v, keys).transpose(1, 2).flatten(2)
        if self.spec.gate:
            mixed = mixed * torch.sigmoid(self.gate(x))
        if self.spec.inner_norm:
            mixed = self.inner_norm(mixed)
        return self.out(mixed)

    def _torch_attention(self, x: Tensor, source: Tensor, keys: Any) -> Tensor:
        mask = None
        if self.spec.mask == "causal":
            mask = torch.ones(x.shape[1], source.shape[1], dtype=torch.bool).triu(1)
        hidden = ~keys if self.spec.mask == "keys" and keys is not None else None
        out, _ = self.mha(
            x, source, source, need_weights=False, attn_mask=mask, key_padding_mask=hidden
        )
        return out.contiguous()  # Conv1D calls view

    def _project(self, x: Tensor, source: Tensor) -> list[Tensor]:
        width, kv = x.shape[-1], self.size * self.kv_heads
        if self.spec.projections == "separate":
            return [self.query(x), self.key(source), self.value(source)]
        if self.spec.projections == "interleaved":
            parts = self.packed(x).unflatten(-1, (HEADS, 3 * self.size)).chunk(3, -1)
            return [part.flatten(2) for part in parts]
        if self.spec.projections == "stacked":
            parts = self.packed(x).reshape(*x.shape[:2], 3, HEADS, self.size)
            return [part.flatten(2) for part in parts.permute(2, 0, 1, 3, 4).unbind(0)]
        if not self.cross:
            return list(self.packed(x).split((width, kv, kv), -1))
        weight, bias = self.packed.weight, self.packed.bias
        q = F.linear(x, weight[:width], None if bias is None else bias[:width])
        both = F.linear(source, weight[width:], None if bias is None else bias[width:])
        return [q, *both.chunk(2, -1)]

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, keys: Any) -> Tensor:
        mask = self._mask(q, k, keys)
        if self.spec.kernel == "sdpa":
            causal = self.spec.mask == "causal" and q.shape[2] == k.shape[2]
            return F.scaled_dot_product_attention(
                q, k, v, None if causal else mask, is_causal=causal, enable_gqa=k.shape[1] == 1
            )
        k, v = (y.repeat_interleave(HEADS // y.shape[1], 1) for y in (k, v))
        if self.spec.kernel == "einsum":
            logits = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.size**-0.5
        else:
            logits = q @ k.transpose(-1, -2) / self.size**0.5
        if self.spec.softcap:
            logits = torch.tanh(logits / 5.0) * 5.0
        if mask is not None:
            logits = logits + mask
        weights = self._softmax(logits)
        if self.spec.kernel == "einsum":
            return torch.einsum("bhqk,bhkd->bhqd", weights, v)
        return weights @ v

    def _softmax(self, logits: Tensor) -> Tensor:
        if self.spec.sinks:
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(*logits.shape[:3], 1)
            return torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
        if self.spec.kernel == "eager32":
            return F.softmax(logits, -1, dtype=torch.float32).to(logits.dtype)
        return logits.softmax(-1)

    def _mask(self, q: Tensor, k: Tensor, keys: Any) -> Tensor | None:
        """An additive mask; a query always sees its first key."""
        rows, columns = torch.arange(q.shape[2]), torch.arange(k.shape[2])
        distance = (rows[:, None] - columns[None, :]).to(q.dtype)
        if self.spec.mask == "causal":
            return torch.zeros_like(distance).masked_fill(distance < 0, float("-inf"))
        if self.spec.mask == "distance":
            return -0.3 * distance.abs()
        if self.spec.mask == "table":
            return self.table[: len(rows), : len(columns)]
        if self.spec.mask == "keys" and keys is not None:
            hidden = torch.zeros(keys.shape, dtype=q.dtype).masked_fill(~keys, float("-inf"))
            return hidden[:, None, None, :].expand(-1, 1, len(rows), -1)
        return None


def rotate(x: Tensor, form: str) -> Tensor:
    """Rotary position embedding of ``[B, H, T, size]``."""
    half = x.shape[-1] // 2
    rates = 100.0 ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * rates
    if form == "half":
        cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


# MLPs


@dataclass(frozen=True)
class Mlp:
    """An MLP, or a mixture of them."""

    form: str = "dense"  # gated, packed, experts
    linear: str = "linear"
    activation: str = "gelu"
    bias: bool = True
    hidden: int = 16
    inner_norm: Norm | None = None
    dispatch: str = "list"  # einsum, einsum_out, bmm, sparse: how experts are computed
    experts: int = 2
    top: bool = False  # only the two largest weights of the router count
    router: str = "linear"
    shared: bool = False  # one more expert, weighted by a sigmoid of its own
    tied: bool = False  # down is the transpose of up
    chunked: bool = False  # a few tokens at a time


def activate(name: str, x: Tensor) -> Tensor:
    """The nonlinearity, or none."""
    if name == "relu2":
        return torch.relu(x).square()
    if name == "relu_":
        return torch.relu_(x)
    return x if name == "none" else getattr(F, name)(x)


class MlpLayer(nn.Module):
    """Dense or gated."""

    def __init__(self, spec: Mlp, width: int) -> None:
        super().__init__()
        self.spec = spec
        wide = spec.hidden * (2 if spec.form == "packed" else 1)
        self.up = make_linear(spec.linear, width, wide, bias=spec.bias)
        if spec.form == "gated":
            self.gate = make_linear(spec.linear, width, spec.hidden, bias=spec.bias)
        if spec.inner_norm:
            self.inner_norm = make_norm(spec.inner_norm, spec.hidden)
        self.down = make_linear(spec.linear, spec.hidden, width, bias=spec.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.spec.chunked:
            return torch.cat([self.compute(p.contiguous()) for p in x.chunk(2, 1)], 1)
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if self.spec.form == "gated":
            h = activate(self.spec.activation, self.gate(x)) * h
        elif self.spec.form == "packed":
            gate, h = h.chunk(2, -1)
            h = activate(self.spec.activation, gate) * h
        else:
            h = activate(self.spec.activation, h)
        h = self.inner_norm(h) if self.spec.inner_norm else h
        if self.spec.tied and self.spec.linear == "linear" and self.spec.form != "packed":
            return F.linear(h, self.up.weight.t(), self.down.bias)
        return self.down(h)


class FusedExperts(nn.Module):
    """All experts in 3-D weights, every one computed for every token."""

    def __init__(self, spec: Mlp, width: int) -> None:
        super().__init__()
        self.spec = spec
        n, hidden = spec.experts, spec.hidden
        up, down = torch.randn(n, width, hidden) / width**0.5, torch.randn(n, hidden, width)
        if spec.dispatch == "einsum_out":
            up, down = up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        self.up, self.down = nn.Parameter(up), nn.Parameter(down / hidden**0.5)
        self.up_bias = nn.Parameter(torch.randn(n, hidden)) if spec.bias else None
        self.down_bias = nn.Parameter(torch.randn(n, width)) if spec.bias else None

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.spec.dispatch == "bmm":
            return self._batched(x, weights)
        out = self.spec.dispatch == "einsum_out"
        h = torch.einsum("btd,ehd->bteh" if out else "btd,edh->bteh", x, self.up)
        h = activate(self.spec.activation, h if self.up_bias is None else h + self.up_bias)
        y = torch.einsum("bteh,edh->bted" if out else "bteh,ehd->bted", h, self.down)
        y = y if self.down_bias is None else y + self.down_bias
        return torch.einsum("bted,bte->btd", y, weights)

    def _batched(self, x: Tensor, weights: Tensor) -> Tensor:
        tokens = x.flatten(0, 1).expand(self.spec.experts, -1, -1)
        h = torch.bmm(tokens, self.up)
        h = h if self.up_bias is None else h + self.up_bias[:, None]
        y = torch.bmm(activate(self.spec.activation, h), self.down)
        y = y if self.down_bias is None else y + self.down_bias[:, None]
        return (y * weights.flatten(0, 1).t()[..., None]).sum(0).reshape(x.shape)


class ExpertsLayer(nn.Module):
    """A mixture of experts."""

    def __init__(self, spec: Mlp, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.router = make_linear(spec.router, width, spec.experts, bias=spec.bias)
        dense = Mlp("dense", spec.linear, spec.activation, spec.bias, spec.hidden)
        if spec.dispatch in ("list", "sparse"):
            self.experts: Any = nn.ModuleList(MlpLayer(dense, width) for _ in range(spec.experts))
        else:
            self.experts = FusedExperts(spec, width)
        if spec.shared:
            self.shared = MlpLayer(dense, width)
            self.shared_gate = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        if self.spec.top:
            best, where = weights.topk(2, -1)
            weights = torch.zeros_like(weights).scatter(-1, where, best)
        y = self._experts(x, weights)
        if self.spec.shared:
            y = y + torch.sigmoid(self.shared_gate(x)) * self.shared(x)
        return y

    def _experts(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.spec.dispatch not in ("list", "sparse"):
            return self.experts(x, weights)
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            if self.spec.dispatch == "list":
                y = y + weights[..., i : i + 1] * expert(x)
                continue
            rows = weights[..., i].flatten().nonzero().squeeze(1)
            if len(rows) == 0:
                continue
            part = expert(x.flatten(0, 1)[rows][None])[0]
            part = part * weights[..., i].flatten()[rows, None]
            y = y.flatten(0, 1).index_add(0, rows, part).reshape(x.shape)
        return y


def make_mlp(spec: Mlp, width: int) -> nn.Module:
    """The module of a description."""
    return ExpertsLayer(spec, width) if spec.form == "experts" else MlpLayer(spec, width)
