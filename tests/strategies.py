"""Random networks with BatchNorms in every form, for hypothesis and for plain seeds.

A network is a small program: a list of steps, each an op on earlier values and perhaps a layer,
interpreted by one module. It can be copied, pickled and printed. The generator asks a `Choices`
for every decision, so that hypothesis can shrink a failing network, and a sweep can name it by
its seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from helpers import BatchNormAct, FunctionalBatchNorm, is_batch_norm, randomise
from hypothesis import strategies as st
from torch import Tensor, nn

T = TypeVar("T")

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {0: nn.BatchNorm1d, 1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORMS = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOLS = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOLS = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE_POOLS = {
    1: (nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
    2: (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
    3: (nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d),
}
ACTIVATIONS: tuple[Callable[[int], nn.Module], ...] = (
    lambda c: nn.ReLU(),
    lambda c: nn.ReLU(inplace=True),
    lambda c: nn.LeakyReLU(0.2),
    lambda c: nn.PReLU(),
    nn.PReLU,
    lambda c: nn.ReLU6(),
    lambda c: nn.GELU(),
    lambda c: nn.SiLU(),
    lambda c: nn.Hardswish(),
    lambda c: nn.Tanh(),
    lambda c: nn.Sigmoid(),
)
CHANNELS = (2, 4, 6)
SIZES = {1: (8, 12), 2: (5, 8), 3: (3, 4)}


class Choices(Protocol):
    """Where the decisions come from."""

    def choose(self, options: Sequence[T]) -> T:
        """One of the options; the first is the simplest."""
        ...


class RandomChoices:
    """Decisions of a seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, options: Sequence[T]) -> T:
        return self._random.choice(options)


class DrawnChoices:
    """Decisions of hypothesis."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def choose(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))]


# The program


@dataclass(frozen=True)
class Step:
    """One op on earlier values (by index); an op may give several values."""

    op: str
    reads: tuple[int, ...]
    layer: str = ""
    options: tuple[Any, ...] = ()


class SqueezeExcite(nn.Module):
    """Channels gated by a small network on their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.Linear(channels, 2)
        self.up = nn.Linear(2, channels)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.up(F.relu(self.down(x.flatten(2).mean(2)))))
        return x * gate.reshape(*gate.shape, *[1] * (x.ndim - 2))


def _shuffle(x: Tensor, groups: int) -> Tensor:
    n, c, *space = x.shape
    return x.reshape(n, groups, c // groups, *space).transpose(1, 2).reshape(n, c, *space)


def _channels_last(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x.movedim(1, -1)).movedim(-1, 1)


Op = Callable[["Program", Step, Any], Any]
OPS: dict[str, Op] = {
    "call": lambda m, s, v: m.layers[s.layer](*v),
    "channels_last": lambda m, s, v: _channels_last(m.layers[s.layer], *v),
    "add": lambda m, s, v: v[0] + v[1],
    "add_": lambda m, s, v: v[0].add_(v[1]),
    "sub": lambda m, s, v: v[0] - v[1],
    "mul": lambda m, s, v: v[0] * v[1],
    "cat": lambda m, s, v: torch.cat(v, dim=s.options[0]),
    "chunk": lambda m, s, v: v[0].chunk(2, dim=1),
    "split": lambda m, s, v: v[0].split(list(s.options), dim=1),
    "slice": lambda m, s, v: v[0][:, s.options[0] :: s.options[1]],
    "shuffle": lambda m, s, v: _shuffle(v[0], s.options[0]),
    "scale": lambda m, s, v: v[0] * s.options[0],
    "shift": lambda m, s, v: v[0] + s.options[0],
    "pad": lambda m, s, v: F.pad(v[0], s.options[1], mode=s.options[0]),
    "relu": lambda m, s, v: torch.relu(v[0]),
    "relu_": lambda m, s, v: torch.relu_(v[0]),
    "means": lambda m, s, v: v[0].flatten(2).mean(2),
    "maxima": lambda m, s, v: v[0].flatten(2).amax(2),
    "flatten": lambda m, s, v: v[0].flatten(1),
    "swap": lambda m, s, v: v[0].transpose(-1, -2),
    "gate": lambda m, s, v: v[0] * torch.sigmoid(v[1]),
    "resize": lambda m, s, v: F.interpolate(v[0], scale_factor=2),
}


class Program(nn.Module):
    """Interprets steps; the values are the inputs, then the results in order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict()
        self.steps: list[Step] = []
        self.outputs: tuple[int, ...] = ()

    def run_step(self, step: Step, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The values that a step adds."""
        result = OPS[step.op](self, step, [values[i] for i in step.reads])
        return result if isinstance(result, tuple) else (result,)

    def forward(self, x: Tensor) -> Any:
        values = [x]
        for step in self.steps:
            values.extend(self.run_step(step, values))
        results = tuple(values[i] for i in self.outputs)
        return results[0] if len(results) == 1 else results

    def extra_repr(self) -> str:
        steps = [f"{s.op}{s.reads} {s.layer} {s.options or ''}".rstrip() for s in self.steps]
        return "; ".join([*steps, f"return {self.outputs}"])


# The generator


class Builder:
    """Adds steps that fit, running each on the spot so that shapes are known."""

    def __init__(self, choices: Choices) -> None:
        self.pick = choices.choose
        self.program = Program()
        rank = self.pick((2, 2, 1, 3))
        size = self.pick(SIZES[rank])
        self.input = torch.zeros(2, self.pick((3, *CHANNELS)), *(size,) * rank)
        self.values = [self.input.clone()]

    def chance(self, one_in: int) -> bool:
        return self.pick(range(one_in)) == one_in - 1

    def add(self, op: str, *reads: int, layer: nn.Module | str = "", options: Any = ()) -> int:
        """Append a step; the index of its first value."""
        if isinstance(layer, nn.Module):
            key = f"l{len(self.program.layers)}"
            self.program.layers[key] = layer.eval()
            layer = key
        step = Step(op, reads, layer, tuple(options))
        first = len(self.values)
        with torch.no_grad():
            self.values.extend(self.program.run_step(step, self.values))
        self.program.steps.append(step)
        return first

    def value(self) -> int:
        """A value to go on from: mostly the last."""
        if self.chance(4):
            return self.pick(range(len(self.values)))
        return len(self.values) - 1

    def channels(self, i: int) -> int:
        return self.values[i].shape[1]

    def rank(self, i: int) -> int:
        return self.values[i].ndim - 2

    def space(self, i: int) -> tuple[int, ...]:
        return tuple(self.values[i].shape[2:])

    # Layers

    def norm_layer(self, channels: int, rank: int) -> nn.Module:
        """A norm in one of its forms."""
        forms = ["batch"] * 6 + ["no_affine", "sync", "functional", "no_statistics", "eps"]
        if rank > 0:
            forms.append("instance")
        if rank == 2:
            forms += ["frozen", "act", "act"]
        form = self.pick(forms)
        if form == "no_affine":
            return NORMS[rank](channels, affine=False)
        if form == "sync":
            return nn.SyncBatchNorm(channels)
        if form == "functional":
            return FunctionalBatchNorm(channels, keywords=self.chance(2))
        if form == "no_statistics":
            return NORMS[rank](channels, track_running_stats=False)
        if form == "eps":
            return NORMS[rank](channels, eps=0.01)
        if form == "instance":
            return INSTANCE_NORMS[rank](channels, affine=True, track_running_stats=True)
        if form == "frozen":
            from torchvision.ops import FrozenBatchNorm2d

            return FrozenBatchNorm2d(channels)
        if form == "act":
            return BatchNormAct(channels, self.pick((nn.ReLU(), nn.SiLU(), nn.ReLU6())))
        return NORMS[rank](channels)

    def conv_layer(self, i: int) -> nn.Module:
        """A conv (or a transposed one) that fits a value."""
        inside, space, rank = self.channels(i), self.space(i), self.rank(i)
        outside = self.pick(CHANNELS)
        groups = self.pick([g for g in (1, 1, 2, inside) if inside % g == 0 and outside % g == 0])
        bias = self.pick((True, False))
        kernel = self.pick((1, 3, 3, 2))
        small = max(space) <= 8
        if self.chance(5) and small:
            padding = self.pick((0, kernel - 1, 1)) if kernel > 1 else 0
            stride = self.pick((1, 1, 2))
            if min(space) + kernel > 2 * padding + 1:
                return TRANSPOSED[rank](
                    inside, outside, kernel, stride, padding, groups=groups, bias=bias
                )
        dilation = self.pick((1, 1, 2))
        reach = dilation * (kernel - 1)
        # An even kernel with "same" padding makes torch warn about a copy.
        fitting = [p for p in (1, 0, "same", reach) if p == "same" or p <= reach]
        padding = self.pick(fitting if reach % 2 == 0 else [p for p in fitting if p != "same"])
        mode = self.pick(("zeros", "zeros", "reflect", "replicate", "circular"))
        widest = reach if padding == "same" else int(padding)
        if widest >= min(space):
            mode = "zeros"
        added = reach if padding == "same" else 2 * int(padding)
        if min(space) + added < reach + 1:
            kernel, padding, mode = 1, 0, "zeros"
        stride = 1 if padding == "same" else self.pick((1, 1, 2))
        return CONVS[rank](
            inside,
            outside,
            kernel,
            stride=stride,
            padding=padding,
            dilation=dilation,
            groups=groups,
            bias=bias,
            padding_mode=mode,
        )

    # Steps

    def conv_or_linear(self, i: int) -> int:
        if self.rank(i) == 0:
            layer = nn.Linear(self.channels(i), self.pick(CHANNELS), bias=self.pick((True, False)))
            return self.add("call", i, layer=layer)
        return self.add("call", i, layer=self.conv_layer(i))

    def activation(self, i: int) -> int:
        if self.chance(4):
            # In place only on a value of our own: the input belongs to the caller.
            return self.add("relu_" if i > 0 and self.chance(3) else "relu", i)
        make = self.pick(ACTIVATIONS[:1] + ACTIVATIONS)
        layer = make(self.channels(i))
        if i == 0 and getattr(layer, "inplace", False):
            layer = nn.ReLU()
        return self.add("call", i, layer=layer)

    def norm(self, i: int) -> int:
        return self.add("call", i, layer=self.norm_layer(self.channels(i), self.rank(i)))

    def block(self, i: int) -> int:
        """conv → norm, with an activation behind, between or nowhere."""
        i = self.conv_or_linear(i)
        if self.chance(5):
            i = self.activation(i)
        if self.chance(6):
            i = self.add("call", i, layer=nn.Dropout(0.3))
        i = self.norm(i)
        return self.activation(i) if self.chance(2) else i

    def matching(self, i: int) -> int:
        """Another value of the same shape; made by a conv where there is none."""
        shape = self.values[i].shape
        others = [j for j, v in enumerate(self.values) if v.shape == shape and j != i]
        if others and not self.chance(2):
            return self.pick(others)
        channels, rank = self.channels(i), self.rank(i)
        if rank == 0:
            return self.add("call", i, layer=nn.Linear(channels, channels))
        return self.add("call", i, layer=CONVS[rank](channels, channels, 1, bias=self.chance(2)))

    def combine(self, i: int) -> int:
        other = self.matching(i)
        op = self.pick(("add", "add", "add", "sub", "mul", "gate", "add_"))
        if op == "add_" and (i == 0 or not self.writable(i, other)):
            op = "add"
        return self.add(op, i, other)

    def writable(self, i: int, other: int) -> bool:
        """Whether PyTorch adds in place: no repeated elements, no memory in common."""
        x, y = self.values[i], self.values[other]
        shared = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
        return 0 not in x.stride() and not shared

    def concatenate(self, i: int) -> int:
        other = self.matching(i)
        dim = 2 if self.rank(i) > 0 and self.chance(4) else 1
        if self.values[i].shape[dim] > 12:
            return i
        return self.add("cat", i, other, options=(dim,))

    def divide(self, i: int) -> int:
        channels = self.channels(i)
        if channels % 2 or channels < 4:
            return i
        op = self.pick(("chunk", "split", "slice"))
        if op == "split":
            return self.add("split", i, options=(channels // 2 - 1, channels // 2 + 1))
        if op == "slice":
            return self.add("slice", i, options=(self.pick((0, 1)), 2))
        first = self.add("chunk", i)
        return first + self.pick((0, 1))

    def shuffle(self, i: int) -> int:
        groups = [g for g in (2, 3) if self.channels(i) % g == 0]
        return self.add("shuffle", i, options=(self.pick(groups),)) if groups else i

    def pool(self, i: int) -> int:
        rank = self.rank(i)
        if rank == 0 or min(self.space(i)) < 2:
            return i
        if self.chance(3):
            return self.add("call", i, layer=self.pick(ADAPTIVE_POOLS[rank])(2))
        kernel, padding = self.pick(((2, 0), (2, 1)))
        if self.chance(2):
            return self.add("call", i, layer=MAX_POOLS[rank](kernel, 1, padding))
        layer = AVG_POOLS[rank](kernel, 1, padding, count_include_pad=self.chance(2))
        return self.add("call", i, layer=layer)

    def simple(self, i: int) -> int:
        """Ops without parameters."""
        ops = ["scale", "shift"] + (["pad", "swap", "resize"] if self.rank(i) > 0 else [])
        op = self.pick(ops)
        if op in ("scale", "shift"):
            return self.add(op, i, options=(self.pick((0.5, -1.5)),))
        if op == "swap" and self.rank(i) < 2:
            return i
        if op == "resize" and max(self.space(i)) > 6:
            return i
        if op == "pad":
            mode = self.pick(("constant", "replicate", "circular"))
            return self.add("pad", i, options=(mode, (1, 1) * self.rank(i)))
        return self.add(op, i)

    def dense(self, i: int) -> int:
        """A linear on the channels, wherever they are."""
        layer = nn.Linear(self.channels(i), self.pick(CHANNELS))
        return self.add("channels_last" if self.rank(i) > 0 else "call", i, layer=layer)

    def squeeze(self, i: int) -> int:
        return self.add("call", i, layer=SqueezeExcite(self.channels(i))) if self.rank(i) else i

    def to_vector(self, i: int) -> int:
        """Maps to vectors, then linear and norm."""
        if self.rank(i) == 0:
            return i
        i = self.add(self.pick(("flatten", "means", "maxima")), i)
        return self.norm(self.conv_or_linear(i))

    def reuse(self, i: int) -> int:
        """A layer that is there, called once more, perhaps by a second name."""
        fitting = [k for k, m in self.program.layers.items() if self._fits(m, i)]
        if not fitting:
            return self.block(i)
        key = self.pick(fitting)
        if self.chance(3):
            alias = f"l{len(self.program.layers)}"
            self.program.layers[alias] = self.program.layers[key]
            key = alias
        return self.add("call", i, layer=key)

    def _fits(self, module: nn.Module, i: int) -> bool:
        kinds = (nn.modules.conv._ConvNd, nn.Linear, FunctionalBatchNorm)
        if not (is_batch_norm(module) or isinstance(module, kinds)):
            return False
        try:
            with torch.no_grad():
                return module(self.values[i].clone()).numel() > 0
        except (RuntimeError, ValueError):
            return False

    STEPS = (
        "block",
        "block",
        "block",
        "norm",
        "conv_or_linear",
        "activation",
        "combine",
        "combine",
        "concatenate",
        "divide",
        "shuffle",
        "pool",
        "simple",
        "dense",
        "squeeze",
        "to_vector",
        "reuse",
        "reuse",
    )

    def build(self) -> Program:
        """Some blocks, some other steps, then the outputs."""
        i = self.block(0)
        for _ in range(self.pick((1, 2, 3, 4, 5, 6, 7, 8))):
            i = getattr(self, self.pick(self.STEPS))(i)
            if self.chance(3):
                i = self.value()
        outputs = {i}
        if self.chance(3):
            outputs.add(self.pick(range(1, len(self.values))))
        self.program.outputs = tuple(sorted(outputs))
        return self.program


@dataclass(frozen=True)
class Network:
    """A random network in double precision and eval mode, and an input for it."""

    model: Program
    x: Tensor

    def __repr__(self) -> str:
        return f"{self.model}\ninput {tuple(self.x.shape)}"


@torch.no_grad()
def _random_weights(program: Program, seed: int) -> None:
    """Weights of the layers that do not depend on the global generator."""
    generator = torch.Generator().manual_seed(seed)
    for module in program.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        if isinstance(module, nn.PReLU):
            weight.copy_(torch.rand(weight.shape, generator=generator) - 0.3)
        elif weight.ndim > 1:
            values = torch.randn(weight.shape, generator=generator)
            weight.copy_(values / weight[0].numel() ** 0.5)


def build_network(choices: Choices) -> Network:
    """A network of random shape, then random parameters."""
    builder = Builder(choices)
    program = builder.build()
    sign = choices.choose(("mixed", "positive", "mixed"))
    seed = choices.choose(range(1000))
    _random_weights(program, seed)
    randomise(program, seed, sign)
    norms = [m for m in program.modules() if is_batch_norm(m) and m.running_var is not None]
    if norms:
        # Tiny and large variances, in one norm at a time so that rounding stays small.
        norm = choices.choose(norms)
        norm.running_var.mul_(choices.choose((1.0, 1.0, 1e-3, 1e4)))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(builder.input.shape, generator=generator, dtype=torch.float64)
    return Network(program.double().eval(), x)


@st.composite
def networks(draw: Callable[[Any], Any]) -> Network:
    """Random networks for hypothesis."""
    return build_network(DrawnChoices(draw))


def seeded_network(seed: int) -> Network:
    """The network of a seed."""
    return build_network(RandomChoices(seed))
