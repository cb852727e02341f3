"""Random transformers, for hypothesis and for plain seeds.

The generator asks a `Choices` for every decision, so that hypothesis can shrink a failing network,
and a sweep can name it by its seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from strategies import Choices, DrawnChoices, RandomChoices
from torch import Tensor
from transformer_model import (
    FEATURES,
    Block,
    Encoder,
    Front,
    RandomTransformer,
    Recipe,
    Step,
)
from transformer_parts import (
    LINEAR_FORMS,
    NORM_FORMS,
    RMS_FORMS,
    Attention,
    Mlp,
    Norm,
    describe,
)

# The generator


class Chooser:
    """Draws descriptions."""

    def __init__(self, choices: Choices) -> None:
        self.pick = choices.choose
        self.family = self.pick(("layer", "layer", "layer", "mixed", "rms"))
        forms = {"layer": NORM_FORMS[: -len(RMS_FORMS)], "mixed": NORM_FORMS, "rms": RMS_FORMS}[
            self.family
        ]
        self.forms = forms
        self.house = self.pick(forms)

    def chance(self, one_in: int) -> bool:
        return self.pick(range(one_in)) == one_in - 1

    def norm(self) -> Norm:
        form = self.house if not self.chance(3) else self.pick(self.forms)
        return Norm(
            form,
            self.pick(("mixed", "mixed", "mixed", "nonzero", "ones", "constant")),
            self.pick(("random", "random", "random", "zero", "centred")),
            self.pick((1e-5, 1e-5, 1e-6, 1e-2)),
            form == "layer" and self.chance(12),
        )

    def any_norm(self) -> Norm:
        return replace(self.norm(), form=self.pick(NORM_FORMS))

    def attention(self) -> Attention:
        projections = self.pick(PROJECTIONS)
        if projections == "mha":
            return Attention(
                projections,
                biases=self.pick(("all", "none")),
                mask=self.pick(("none", "causal", "keys")),
            )
        kernel = self.pick(("eager", "sdpa", "eager32", "einsum"))
        eager = kernel != "sdpa"
        normed = self.pick(("", "", "", "head", "head", "full"))
        return Attention(
            projections,
            self.pick(("linear", "linear", *LINEAR_FORMS)),
            self.pick(("all", "all", "no_key", "none", "inputs")),
            kernel,
            self.pick(("none", "causal", "table", "distance", "keys")),
            self.pick(("", "", "half", "pairs")),
            projections in ("separate", "packed") and self.chance(3),
            self.any_norm() if normed == "head" else None,
            self.any_norm() if normed == "full" else None,
            eager and self.chance(5),
            eager and self.chance(6),
            self.chance(6),
            self.any_norm() if self.chance(8) else None,
            self.chance(8),
            self.chance(5),
        )

    def mlp(self) -> Mlp:
        form = self.pick(("dense", "dense", "gated", "packed", "experts"))
        linear = self.pick(("linear", "linear", "linear", *LINEAR_FORMS))
        activation = self.pick(("gelu", "relu", "relu_", "silu", "relu2", "none", "sigmoid"))
        bias, hidden = self.pick((True, True, False)), self.pick((16, 8))
        if form != "experts":
            inner = self.any_norm() if self.chance(10) else None
            ends = {"tied": self.chance(12), "chunked": self.chance(8)}
            return Mlp(form, linear, activation, bias, hidden, inner, **ends)
        dispatch = self.pick(("list", "list", "einsum", "einsum_out", "bmm", "sparse"))
        count = self.pick((2, 3, 8))
        router = self.pick(("linear", "linear", "matmul", "functional"))
        return Mlp(
            form,
            linear,
            activation,
            bias,
            hidden,
            None,
            dispatch,
            count,
            count > 2 and self.chance(3),
            router,
            self.chance(3),
        )

    def block(self) -> Block:
        placement = self.pick((*("pre",) * 8, "parallel", "parallel", *PLACEMENTS))
        attention = self.attention() if not self.chance(6) else None
        return Block(
            placement,
            tuple(self.norm() for _ in range(self.pick((1, 2)))),
            self.chance(12),
            attention,
            self.mlp() if attention is None or not self.chance(6) else None,
            self.pick(RARE_RESIDUALS if self.chance(10) else RESIDUALS),
            self.chance(4),
            self.chance(4),
        )

    def blocks(self) -> tuple[Block, ...]:
        """A few blocks, mostly alike."""
        first = self.block()
        return (first, *(self.block() if self.chance(3) else first for _ in self.pick(COUNTS)))

    def front(self) -> Front:
        kind = self.pick(("tokens", "tokens", "tokens", "features", "images"))
        return Front(
            kind,
            self.pick(("none", "table", "parameter", "buffer", "temporary_buffer", "computed")),
            self.chance(5),
            self.chance(4),
            kind == "tokens" and self.chance(5),
            not self.chance(4),
            self.norm() if self.chance(6) else None,
            self.chance(4),
            self.chance(6),
            self.chance(8),
            self.pick(("", "", "", "", "", "cat", "add", "assign", "where")),
        )

    def step(self, last: int) -> Step:
        kinds = MOVES if not self.chance(3) else READERS
        return Step(self.pick(kinds), self.pick(range(-1, last)), self.norm())

    def order(self, count: int) -> tuple[int, ...]:
        order = list(range(count))
        if self.chance(6):
            order.append(self.pick(order))
        return tuple(order)

    def head(self, front: Front) -> str:
        heads = ["linear", "none", "no_bias", "scaled"]
        tied = ["tied", "tied", "tied_bias", "tied_functional"]
        return self.pick(heads + tied if front.kind == "tokens" else heads)

    def encoder(self, front: Front) -> Encoder:
        shared = front.kind == "tokens" and self.chance(2)
        return Encoder(self.blocks()[:2], self.norm() if not self.chance(4) else None, shared)

    def recipe(self) -> Recipe:
        front, blocks = self.front(), self.blocks()
        order = self.order(len(blocks))
        counts = self.pick((0, 0, 0, 1, 1, 2))
        return Recipe(
            front,
            blocks,
            order,
            tuple(self.step(len(order)) for _ in range(counts)),
            self.encoder(front) if self.chance(6) else None,
            self.norm() if not self.chance(8) else None,
            self.chance(12),
            self.chance(16),
            self.pick(("none", "none", "none", "mean", "first", "last")),
            self.head(front),
            self.pick((8, 8, 12)),
            self.pick((11, 8)),
            self.pick((5, 5, 8)),
            self.pick(("tuple", "dict")),
            self.pick(range(1000)),
        )


PLACEMENTS = ("parallel_two", "sandwich", "post", "branch", "normed_skip")
COUNTS = ((), (0,), (0, 1))
PROJECTIONS = ("separate", "separate", "packed", "packed", "interleaved", "stacked", "mha")
RESIDUALS = (
    "add",
    "add",
    "add",
    "add_",
    "swapped",
    "scaled_branch",
    "scaled_stream",
    "scalar_parameter",
    "tanh_gate",
    "wide",
)
RARE_RESIDUALS = ("constant", "shift_parameter", "vector_gate")
READERS = (
    "read_norm_head",
    "read_variance",
    "read_softmax",
    "read_centred",
    "read_dead",
    "read_difference",
    "read_head",
    "read_stream",
    "read_tokens_mean",
    "read_mean",
    "read_cosine",
    "read_group",
    "read_value",
    "hook_seen",
)
MOVES = (
    "branch",
    "conv",
    "token_gate",
    "token_mix",
    "raw_token_mix",
    "scalar_scale",
    "scalar_shift",
    "vector_shift",
    "cast",
    "roll",
    "flat",
    "sequence_first",
    "long_skip",
    "skip_cat",
    "two_norms",
    "drop_last",
    "mask_tokens",
    "alias_skip",
    "assign_token",
    "write_norm",
    "modulated",
    "raw_gate",
    "raw_conv",
    "grouped_conv",
    "vector_scale",
    "cat_norm",
    "hook_scale",
)


# Networks


@dataclass(frozen=True)
class Network:
    """A random transformer in double precision and eval mode, made from its recipe."""

    recipe: Recipe

    def model(self) -> RandomTransformer:
        """A new copy of the model, always with the same parameters."""
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.seed)
            return RandomTransformer(self.recipe).double().eval()

    def inputs(self, seed: int = 0, batch: int = 2, length: int = 0) -> dict[str, Tensor]:
        """Random inputs; the length of images is fixed."""
        length = length or self.recipe.length
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        def ids(count: int) -> Tensor:
            return torch.randint(0, self.recipe.vocabulary, (batch, count), generator=generator)

        kind, inputs = self.recipe.front.kind, dict[str, Tensor]()
        if kind == "tokens":
            inputs["x"] = ids(length)
        elif kind == "features":
            inputs["x"] = normal(batch, length, FEATURES)
        else:
            inputs["x"] = normal(batch, 3, 4, 4)
        if self.recipe.front.second:
            inputs["second"] = normal(batch, 2, FEATURES)
        if self.recipe.encoder:
            inputs["source"] = ids(length + 1)
        return inputs

    def __repr__(self) -> str:
        return describe(self.recipe)


def build_transformer(choices: Choices) -> Network:
    """A network of random parts."""
    return Network(Chooser(choices).recipe())


@st.composite
def transformers(draw: Callable[[Any], Any]) -> Network:
    """Random transformers for hypothesis."""
    return build_transformer(DrawnChoices(draw))


def seeded_transformer(seed: int) -> Network:
    """The network of a seed."""
    return build_transformer(RandomChoices(seed))


def simpler(value: Any) -> Iterator[Any]:
    """Descriptions with one thing less: a field at its default, an item left out."""
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            if len(value) > 1 or is_dataclass(item):
                yield value[:i] + value[i + 1 :]
            for other in simpler(item):
                yield (*value[:i], other, *value[i + 1 :])
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            now = getattr(value, field.name)
            if now != field.default:
                yield replace(value, **{field.name: field.default})
            for other in simpler(now):
                yield replace(value, **{field.name: other})


def shrink(network: Network, fails: Callable[[Network], bool]) -> Network:
    """The simplest network found that still fails."""
    for recipe in simpler(network.recipe):
        smaller = Network(recipe)
        if len(repr(smaller)) >= len(repr(network)):
            continue
        try:
            failing = fails(smaller)
        except (
            ArithmeticError,
            AttributeError,
            IndexError,
            TypeError,
        ):  # a description that makes no network
            failing = False
        if failing:
            return shrink(smaller, fails)
    return network
