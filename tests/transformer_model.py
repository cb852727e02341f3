"""The module that a random transformer is: a small description, interpreted.

The description is a frozen dataclass whose defaults are the simplest choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformer_parts import (
    LONGEST,
    Attention,
    AttentionLayer,
    Mlp,
    Norm,
    apply_norm,
    make_embedding,
    make_linear,
    make_mlp,
    make_norm,
)

FEATURES = 5
NORM, ATTENTION, MLP = Norm(), Attention(), Mlp()


# The description


@dataclass(frozen=True)
class Front:
    """What makes the stream from the inputs."""

    kind: str = "tokens"  # features, images
    positions: str = "none"  # table, parameter, buffer, temporary_buffer, computed
    types: bool = False
    scale: bool = False
    padding: bool = False
    bias: bool = True
    norm: Norm | None = None
    dropout: bool = False
    class_token: bool = False
    registers: bool = False
    second: str = ""  # another modality, projected: cat, add, assign, where


FRONT = Front()


@dataclass(frozen=True)
class Block:
    """Two sublayers (three with a memory) on the stream."""

    placement: str = "pre"  # post, sandwich, branch, normed_skip, parallel, parallel_two
    norms: tuple[Norm, ...] = (NORM,)  # used in turn
    same_norm: bool = False  # one module for all places
    attention: Attention | None = ATTENTION
    mlp: Mlp | None = MLP
    residual: str = "add"  # see `add_branch`
    layer_scale: bool = False
    dropout: bool = False


BLOCK = Block()


@dataclass(frozen=True)
class Step:
    """Something else on the stream, behind the block of this number (-1: in front of all)."""

    kind: str
    behind: int = -1
    norm: Norm = NORM


@dataclass(frozen=True)
class Encoder:
    """A second stack, whose output the decoder's blocks attend to."""

    blocks: tuple[Block, ...] = (BLOCK,)
    norm: Norm | None = NORM
    shared_table: bool = False


@dataclass(frozen=True)
class Recipe:
    """A transformer."""

    front: Front = FRONT
    blocks: tuple[Block, ...] = (BLOCK,)
    order: tuple[int, ...] = (0,)  # which block is called when
    steps: tuple[Step, ...] = ()
    encoder: Encoder | None = None
    norm: Norm | None = NORM
    shared_mlp: bool = False  # all blocks have the first one's
    reused_norm: bool = False  # the final norm is the first norm of the first block
    pool: str = "none"  # mean, first, last
    head: str = "linear"  # none, no_bias, tied, tied_functional, scaled
    width: int = 8
    vocabulary: int = 11
    length: int = 5
    outputs: str = "tuple"  # dict
    seed: int = 0


# The module


def add_branch(block: BlockLayer, x: Tensor, f: Tensor) -> Tensor:
    """The residual connection."""
    form = block.spec.residual
    if block.spec.dropout:
        f = block.dropout(f)
    if form == "add_":
        x += f
        return x
    if form == "swapped":
        return f + x
    if form == "scaled_branch":
        return x + 0.4 * f
    if form == "scaled_stream":
        return torch.add(f, x, alpha=1.5)
    if form == "scalar_parameter":
        return x * block.alpha + f
    if form == "constant":
        return x + f + 0.5
    if form == "shift_parameter":
        return x + (f + block.alpha)
    if form == "tanh_gate":
        return x + torch.tanh(block.alpha) * f
    if form == "vector_gate":
        return x + torch.sigmoid(block.vector) * f
    if form == "wide":
        return (x.float() + f.float()).to(x.dtype)
    return x + f


class BlockLayer(nn.Module):
    """A transformer block."""

    def __init__(self, spec: Block, width: int, *, cross: bool = False) -> None:
        super().__init__()
        self.spec = spec
        branches: dict[str, nn.Module] = {}
        if spec.attention:
            branches["attention"] = AttentionLayer(spec.attention, width)
        if spec.attention and cross:
            plain = replace(spec.attention, rotary="", mask="none")
            if plain.projections in ("interleaved", "stacked"):
                plain = replace(plain, projections="packed")
            branches["cross"] = AttentionLayer(plain, width, cross=True)
        if spec.mlp:
            branches["mlp"] = make_mlp(spec.mlp, width)
        self.branches = nn.ModuleDict(branches)
        places = len(branches) * (2 if spec.placement == "sandwich" else 1)
        places = 1 if spec.placement == "parallel" else places
        self.norm_specs = [spec.norms[i % len(spec.norms)] for i in range(places)]
        self.norms = nn.ModuleList(make_norm(norm, width) for norm in self.norm_specs)
        if spec.same_norm and places:
            self.norm_specs = self.norm_specs[:1] * places
            self.norms = nn.ModuleList([self.norms[0]] * places)
        if spec.layer_scale:
            scales = 0.5 + torch.rand(len(branches), width)
            scales[:, 0], scales[:, 1] = 0.0, -0.7
            self.layer_scales = nn.ParameterList(list(scales))
        if spec.dropout:
            self.dropout = nn.Dropout(0.5)
        if spec.residual in ("scalar_parameter", "shift_parameter", "tanh_gate"):
            self.alpha = nn.Parameter(torch.tensor(0.8))
        if spec.residual == "vector_gate":
            self.vector = nn.Parameter(torch.randn(width))

    def norm(self, place: int, x: Tensor) -> Tensor:
        return apply_norm(self.norm_specs[place], self.norms[place], x)

    def branch(self, i: int, x: Tensor, memory: Tensor | None, keys: Any) -> Tensor:
        name = list(self.branches)[i]
        inputs = {"mlp": (x,), "cross": (x, memory), "attention": (x, None, keys)}[name]
        f = self.branches[name](*inputs)
        return f * self.layer_scales[i] if self.spec.layer_scale else f

    def forward(self, x: Tensor, memory: Tensor | None = None, keys: Any = None) -> Tensor:
        placement = self.spec.placement
        if placement.startswith("parallel"):
            shared = placement == "parallel"
            h = self.norm(0, x) if shared else x
            parts = [
                self.branch(i, h if shared else self.norm(i, x), memory, keys)
                for i in range(len(self.branches))
            ]
            return add_branch(self, x, sum(parts[1:], parts[0]))
        for i in range(len(self.branches)):
            x = self._sublayer(i, x, memory, keys)
        return x

    def _sublayer(self, i: int, x: Tensor, memory: Tensor | None, keys: Any) -> Tensor:
        placement = self.spec.placement
        if placement == "pre":
            return add_branch(self, x, self.branch(i, self.norm(i, x), memory, keys))
        if placement == "post":
            return self.norm(i, add_branch(self, x, self.branch(i, x, memory, keys)))
        if placement == "branch":
            return add_branch(self, x, self.norm(i, self.branch(i, x, memory, keys)))
        if placement == "normed_skip":
            h = self.norm(i, x)
            return add_branch(self, h, self.branch(i, h, memory, keys))
        f = self.branch(i, self.norm(2 * i, x), memory, keys)
        return add_branch(self, x, self.norm(2 * i + 1, f))


class FrontLayer(nn.Module):
    """Tokens, features or images to a stream."""

    def __init__(self, spec: Front, width: int, vocabulary: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        if spec.kind == "tokens":
            self.tokens = make_embedding(vocabulary, width, 0 if spec.padding else None)
        elif spec.kind == "features":
            self.project = make_linear("linear", FEATURES, width, bias=spec.bias)
        else:
            self.patches = nn.Conv2d(3, width, 2, stride=2, bias=spec.bias)
        if spec.positions == "table":
            self.positions: Any = make_embedding(LONGEST, width)
        elif spec.positions == "parameter":
            self.positions = nn.Parameter(torch.randn(1, LONGEST, width) + 0.2)
        elif spec.positions in ("buffer", "temporary_buffer"):
            values = waves(LONGEST, width, torch.float64)
            self.register_buffer("positions", values, persistent=spec.positions == "buffer")
        if spec.types:
            self.types = make_embedding(2, width)
        if spec.norm:
            self.norm = make_norm(spec.norm, width)
        if spec.class_token:
            self.class_token = nn.Parameter(torch.randn(1, 1, width) + 0.5)
        if spec.registers:
            self.registers = nn.Parameter(torch.randn(2, width) - 0.5)
        if spec.second:
            self.projector = make_linear("linear", FEATURES, width)

    def forward(self, x: Tensor, second: Tensor | None = None) -> Tensor:
        x = self._values(x)
        if self.spec.scale:
            x = x * self.width**0.5
        if second is not None:
            x = self._joined(x, self.projector(second))
        if self.spec.class_token:
            x = torch.cat([self.class_token.expand(len(x), -1, -1), x], 1)
        x = self._placed(x)
        if self.spec.registers:
            x = torch.cat([x, self.registers.expand(len(x), -1, -1)], 1)
        if self.spec.norm:
            x = apply_norm(self.spec.norm, self.norm, x)
        return F.dropout(x, 0.3, self.training) if self.spec.dropout else x

    def _values(self, x: Tensor) -> Tensor:
        if self.spec.kind == "tokens":
            return self.tokens(x)
        if self.spec.kind == "features":
            return self.project(x)
        return self.patches(x).flatten(2).transpose(1, 2).contiguous()  # Conv1D calls view

    def _joined(self, x: Tensor, other: Tensor) -> Tensor:
        if self.spec.second == "cat":
            return torch.cat([other, x], 1)
        if self.spec.second == "add":
            return x + other.mean(1, keepdim=True)
        if self.spec.second == "assign":
            x = x.clone()
            x[:, : other.shape[1]] = other[:, : x.shape[1]]
            return x
        first = torch.arange(x.shape[1])[None, :, None] == 0
        return torch.where(first, other[:, :1], x)

    def _placed(self, x: Tensor) -> Tensor:
        length, form = x.shape[1], self.spec.positions
        if form == "table":
            x = x + self.positions(torch.arange(length))
        elif form == "parameter":
            x = x + self.positions[:, :length]
        elif form == "computed":
            x = x + waves(length, self.width, x.dtype)
        elif form != "none":
            x = x + self.positions[:length].to(x.dtype)
        if self.spec.types:
            x = x + self.types((torch.arange(length) % 2)[None])
        return x


def waves(length: int, width: int, dtype: torch.dtype) -> Tensor:
    """Sinusoidal positions, whose mean is not zero."""
    rates = 100.0 ** -(torch.arange(width // 2, dtype=dtype) / (width // 2))
    angles = torch.arange(length, dtype=dtype)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], -1)


class RandomTransformer(nn.Module):
    """Interprets a recipe."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        width = recipe.width
        self.recipe = recipe
        self.front = FrontLayer(recipe.front, width, recipe.vocabulary)
        cross = recipe.encoder is not None
        self.blocks = nn.ModuleList(BlockLayer(b, width, cross=cross) for b in recipe.blocks)
        if recipe.shared_mlp and recipe.blocks[0].mlp:
            for block in (b for b in self.blocks if "mlp" in b.branches):
                block.branches["mlp"] = self.blocks[0].branches["mlp"]
        self.steps = nn.ModuleList(StepLayer(step, width) for step in recipe.steps)
        if recipe.encoder is not None:
            self._make_encoder(recipe.encoder, width)
        if recipe.norm:
            self.norm = make_norm(recipe.norm, width)
            if recipe.reused_norm and len(self.blocks[0].norms):
                self.norm = self.blocks[0].norms[0]
        if recipe.head != "none":
            bias = recipe.head in ("linear", "scaled", "tied_bias")
            self.head = make_linear("linear", width, recipe.vocabulary, bias=bias)
        if recipe.head in ("tied", "tied_bias"):
            self.head.weight = self.front.tokens.weight
        for hook in (s for s in recipe.steps if s.kind in HOOKS):
            self.blocks[recipe.order[max(hook.behind, 0)]].register_forward_hook(HOOKS[hook.kind])

    def _make_encoder(self, spec: Encoder, width: int) -> None:
        self.encoder = nn.ModuleList(BlockLayer(b, width) for b in spec.blocks)
        if spec.shared_table:
            self.encoder_tokens = self.front.tokens
        else:
            self.encoder_tokens = make_embedding(self.recipe.vocabulary, width)
        if spec.norm:
            self.encoder_norm = make_norm(spec.norm, width)

    def _memory(self, ids: Tensor | None) -> Tensor | None:
        spec = self.recipe.encoder
        if spec is None or ids is None:
            return None
        x = self.encoder_tokens(ids)
        for block in self.encoder:
            x = block(x)
        return apply_norm(spec.norm, self.encoder_norm, x) if spec.norm else x

    def forward(self, x: Tensor, second: Tensor | None = None, source: Tensor | None = None) -> Any:
        keys = x != 1 if not x.is_floating_point() else None
        if keys is not None:
            keys[:, 0] = True
        memory = self._memory(source)
        x = self.front(x, second)
        stream = Stream(x, self.front)
        for i in range(-1, len(self.recipe.order)):
            if i >= 0:
                block = self.blocks[self.recipe.order[i]]
                fits = keys is not None and keys.shape[1] == stream.x.shape[1]
                stream.x = block(stream.x, memory, keys if fits else None)
            for module in self.steps:
                if module.spec.behind == i:
                    module(stream)
        return self._output(stream)

    def _output(self, stream: Stream) -> Any:
        x, recipe = stream.x, self.recipe
        if recipe.norm:
            x = apply_norm(recipe.norm, self.norm, x)
        if recipe.pool == "mean":
            x = x.mean(1)
        elif recipe.pool != "none":
            x = x[:, 0 if recipe.pool == "first" else -1]
        if recipe.head == "tied_functional":
            x = F.linear(x, self.front.tokens.weight)
        elif recipe.head == "scaled":
            x = torch.tanh(self.head(x) * 0.3 / 4.0) * 4.0
        elif recipe.head != "none":
            x = self.head(x)
        if recipe.outputs == "dict":
            return {"logits": x, **{f"extra_{i}": v for i, v in enumerate(stream.extra)}}
        return (x, *stream.extra) if stream.extra else x


# Steps on the stream


@dataclass
class Stream:
    """The value that blocks add to, what it was at first, and what else is returned."""

    x: Tensor
    front: nn.Module

    def __post_init__(self) -> None:
        self.alias, self.first = self.x, self.x.clone()
        self.extra: list[Tensor] = []


def scale_hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    """A hook that changes the stream."""
    return output * 1.25


def seen_hook(module: nn.Module, args: Any, output: Tensor) -> None:
    """A hook that keeps the stream."""
    module.seen = output.detach().clone()


HOOKS: dict[str, Callable[..., Any]] = {"hook_scale": scale_hook, "hook_seen": seen_hook}


class StepLayer(nn.Module):
    """A step that changes the stream or reads it."""

    def __init__(self, spec: Step, width: int) -> None:
        super().__init__()
        self.spec, self.width = spec, width
        kind = spec.kind
        if kind in NORMED:
            self.norm = make_norm(spec.norm, 2 * width if kind == "cat_norm" else width)
        if kind == "two_norms":
            self.other_norm = make_norm(spec.norm, width)
        if kind in ("cat_norm", "two_norms", "skip_cat"):
            self.linear = make_linear("linear", 2 * width, width)
        elif kind in ("read_head", "read_norm_head", "read_centred", "read_dead"):
            self.linear = make_linear("linear", width, 3)
        elif kind in ("branch", "write_norm"):
            self.linear = make_linear("linear", width, width)
        elif kind in ("token_gate", "raw_gate"):
            self.linear = make_linear("linear", width, 1)
        elif kind in ("conv", "grouped_conv", "raw_conv"):
            groups = 2 if kind == "grouped_conv" else 1
            self.kernel = nn.Conv1d(width, width, 3, padding=1, groups=groups)
        elif kind == "modulated":
            self.linear = make_linear("linear", width, 3 * width)
            self.other = make_linear("linear", width, width)
        if kind in ("vector_scale", "vector_shift", "assign_token", "write_norm"):
            self.vector = nn.Parameter(torch.randn(width) + 0.5)
        elif kind in ("token_mix", "raw_token_mix"):
            self.mixing = nn.Parameter(torch.randn(LONGEST, LONGEST) * 0.3)
        elif kind == "read_group":
            self.group = nn.GroupNorm(1, width)
        if kind == "read_centred":
            weight = self.linear.weight.data
            weight -= weight.mean(1, keepdim=True)

    def forward(self, stream: Stream) -> None:
        kind = self.spec.kind
        if kind in HOOKS:
            return
        result = getattr(self, kind)(stream.x, stream)
        if kind == "read_dead":
            return
        if kind.startswith("read_"):
            stream.extra.append(result)
        else:
            stream.x = result

    # Readers

    def read_head(self, x: Tensor, stream: Stream) -> Tensor:
        return self.linear(x)

    def read_norm_head(self, x: Tensor, stream: Stream) -> Tensor:
        return self.linear(self.norm(x))

    def read_centred(self, x: Tensor, stream: Stream) -> Tensor:
        return self.linear(x)

    def read_dead(self, x: Tensor, stream: Stream) -> Tensor:
        return self.linear(x)

    def read_stream(self, x: Tensor, stream: Stream) -> Tensor:
        return x

    def read_tokens_mean(self, x: Tensor, stream: Stream) -> Tensor:
        return x.mean(1)

    def read_mean(self, x: Tensor, stream: Stream) -> Tensor:
        return x.mean(-1)

    def read_variance(self, x: Tensor, stream: Stream) -> Tensor:
        return x.var(-1)

    def read_cosine(self, x: Tensor, stream: Stream) -> Tensor:
        return F.normalize(x, dim=-1)

    def read_softmax(self, x: Tensor, stream: Stream) -> Tensor:
        return x.softmax(-1)

    def read_group(self, x: Tensor, stream: Stream) -> Tensor:
        return self.group(x.transpose(1, 2))

    def read_difference(self, x: Tensor, stream: Stream) -> Tensor:
        return self.norm(x[:, 1:] - x[:, :-1])

    def read_value(self, x: Tensor, stream: Stream) -> Tensor:
        return x[:, :, 0] if float(x.detach().sum()) > 1e9 else torch.zeros(1, dtype=x.dtype)

    # Writers and moves

    def branch(self, x: Tensor, stream: Stream) -> Tensor:
        return x + self.linear(self.norm(x))

    def token_gate(self, x: Tensor, stream: Stream) -> Tensor:
        return x * torch.sigmoid(self.linear(self.norm(x)))

    def raw_gate(self, x: Tensor, stream: Stream) -> Tensor:
        return x * torch.sigmoid(self.linear(x))

    def conv(self, x: Tensor, stream: Stream) -> Tensor:
        return x + self.conv_over_tokens(self.norm(x))

    def grouped_conv(self, x: Tensor, stream: Stream) -> Tensor:
        return x + self.conv_over_tokens(self.norm(x))

    def raw_conv(self, x: Tensor, stream: Stream) -> Tensor:
        return x + self.conv_over_tokens(x)

    def conv_over_tokens(self, x: Tensor) -> Tensor:
        return self.kernel(x.transpose(1, 2)).transpose(1, 2).contiguous()

    def token_mix(self, x: Tensor, stream: Stream) -> Tensor:
        return x + self.mixing[: x.shape[1], : x.shape[1]] @ self.norm(x)

    def raw_token_mix(self, x: Tensor, stream: Stream) -> Tensor:
        return x + self.mixing[: x.shape[1], : x.shape[1]] @ x

    def scalar_scale(self, x: Tensor, stream: Stream) -> Tensor:
        return x * 0.7

    def scalar_shift(self, x: Tensor, stream: Stream) -> Tensor:
        return x + 0.5

    def vector_scale(self, x: Tensor, stream: Stream) -> Tensor:
        return x * self.vector

    def vector_shift(self, x: Tensor, stream: Stream) -> Tensor:
        return x + self.vector

    def cast(self, x: Tensor, stream: Stream) -> Tensor:
        return x.float().contiguous().to(x.dtype)

    def roll(self, x: Tensor, stream: Stream) -> Tensor:
        return x.roll(1, 1)

    def flat(self, x: Tensor, stream: Stream) -> Tensor:
        return self.norm(x.reshape(-1, self.width)).reshape(x.shape) + x

    def sequence_first(self, x: Tensor, stream: Stream) -> Tensor:
        y = x.transpose(0, 1)
        return (y + 0.2 * self.norm(y).cumsum(0)).transpose(0, 1).contiguous()

    def alias_skip(self, x: Tensor, stream: Stream) -> Tensor:
        return x + stream.alias[:, : x.shape[1]]

    def assign_token(self, x: Tensor, stream: Stream) -> Tensor:
        x = x.clone()
        x[:, 0] = self.vector
        return x

    def write_norm(self, x: Tensor, stream: Stream) -> Tensor:
        h = self.norm(x)
        h += self.vector
        h.mul_(0.5)
        return x + self.linear(h)

    def modulated(self, x: Tensor, stream: Stream) -> Tensor:
        scale, shift, gate = self.linear(stream.first.mean(1, keepdim=True)).chunk(3, -1)
        return x + gate * self.other(self.norm(x) * (1 + scale) + shift)

    def long_skip(self, x: Tensor, stream: Stream) -> Tensor:
        return x + 0.5 * stream.first

    def skip_cat(self, x: Tensor, stream: Stream) -> Tensor:
        return self.linear(torch.cat([x, stream.first], -1))

    def cat_norm(self, x: Tensor, stream: Stream) -> Tensor:
        return self.linear(self.norm(torch.cat([x, stream.first], -1)))

    def two_norms(self, x: Tensor, stream: Stream) -> Tensor:
        return self.linear(torch.cat([self.norm(x), self.other_norm(stream.first)], -1))

    def drop_last(self, x: Tensor, stream: Stream) -> Tensor:
        stream.first = stream.first[:, :-1]
        return x[:, :-1].contiguous()

    def mask_tokens(self, x: Tensor, stream: Stream) -> Tensor:
        even = torch.arange(x.shape[1]) % 2 == 0
        return x.masked_fill(even[None, :, None], 0.0)


NORMED = (
    "read_norm_head",
    "read_difference",
    "branch",
    "token_gate",
    "conv",
    "grouped_conv",
    "token_mix",
    "write_norm",
    "modulated",
    "flat",
    "sequence_first",
    "cat_norm",
    "two_norms",
)
