"""Residual stacks at the edge of what can be read and converted, each written out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import normswap as ns

WIDTH = 6


def random_norm() -> nn.LayerNorm:
    """A norm with scales of both signs, one of them zero, and shifts."""
    norm = nn.LayerNorm(WIDTH)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    with torch.no_grad():
        norm.weight[2] = 0.0
    return norm


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))


class PreNormStack(nn.Module):
    """Two pre-norm sublayers and a final norm; a subclass changes one thing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, WIDTH)
        self.first, self.second = mlp(), mlp()
        self.norms = nn.ModuleList([random_norm(), random_norm()])
        self.final = random_norm()
        self.head = nn.Linear(WIDTH, 3)
        self.double()
        self.eval()

    def start(self, x: Tensor) -> Tensor:
        return self.embed(x)

    def skip(self, x: Tensor) -> Tensor:
        return x

    def branch(self, x: Tensor) -> Tensor:
        return self.first(self.norms[0](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(x)
        x = self.skip(x) + self.branch(x)
        x = x + self.second(self.norms[1](x))
        return self.head(self.final(x))


class FinalNormTwice(PreNormStack):
    def start(self, x: Tensor) -> Tensor:
        return self.final(self.embed(x))


class ScaledSkip(PreNormStack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def skip(self, x: Tensor) -> Tensor:
        return x * self.scale


class BranchWithoutBatch(PreNormStack):
    def branch(self, x: Tensor) -> Tensor:
        return self.first(self.norms[0](x).squeeze(0))


class BorrowedShape(PreNormStack):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def branch(self, x: Tensor) -> Tensor:
        return self.first(self.norms[0](x) + self.shift.expand_as(x))


class FlattenedRows(PreNormStack):
    def branch(self, x: Tensor) -> Tensor:
        return self.first(self.norms[0](x).reshape(-1, WIDTH)).reshape(x.shape)


class PostNormStack(PreNormStack):
    """Two post-norm sublayers, with a second norm on a part of the stream in between."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = self.norms[0](x + self.first(x))[:, : self.rows]
        return self.head(self.norms[1](x + self.second(x)))


def example(batch: int = 2) -> Tensor:
    return torch.randn(batch, 5, 4, generator=torch.Generator().manual_seed(1)).double()


def assert_same_function(model: nn.Module, new: nn.Module, x: Tensor) -> None:
    before, after = model(x).detach(), new(x).detach()
    assert float((before - after).abs().max() / before.abs().max()) < 1e-12


@pytest.mark.parametrize("make", [PreNormStack, BranchWithoutBatch, BorrowedShape, FlattenedRows])
def test_stack_reads_as_pre_norm_and_converts_exactly(make: type[PreNormStack]) -> None:
    model, x = make(), example(1)
    assert ns.residual_structure(model, x).form == "pre"
    new, _ = ns.convert_placement(model, "post", x)
    assert_same_function(model, new, x)


@pytest.mark.parametrize(("make", "code"), [(FinalNormTwice, "shared"), (ScaledSkip, "form")])
def test_unit_stream_is_refused_where_it_would_be_wrong(
    make: type[PreNormStack], code: str
) -> None:
    model, x = make(), example()
    with pytest.raises(ns.RefusedError, match=f"{code}: "):
        ns.convert_placement(model, "post", x)


def test_second_stream_is_refused_where_rows_are_cut_off() -> None:
    with pytest.raises(ns.RefusedError, match="op: "):
        ns.convert_placement(PostNormStack(rows=3), "residual-dual", example())


def test_rotation_says_that_no_norm_stands_in_front_of_the_first_sublayer() -> None:
    model, x = PostNormStack(rows=5), example()
    new, report = ns.convert_placement(model, "pre", x)
    assert report.placement is not None
    promised = report.placement.after.stacks[0]
    read = ns.residual_structure(new, x).stacks[0]
    assert promised.form == read.form == "pre"
    assert [s.form for s in promised.sublayers] == [s.form for s in read.sublayers]
    assert [s.form for s in read.sublayers] == ["none", "pre"]


class PositionsInEachLayer(PreNormStack):
    """Positions are added to what attention compares, as in DETR; the memory is read with them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.place, self.query = nn.Linear(4, WIDTH).double(), nn.Linear(4, WIDTH).double()
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, 2, batch_first=True).double() for _ in range(3)
        )

    def attend(self, number: int, x: Tensor, memory: Tensor, places: Tensor) -> Tensor:
        attention = self.attention[number]
        return attention(x + places, memory + places, memory, need_weights=False)[0]

    def forward(self, x: Tensor) -> Tensor:
        places, h = self.place(x), self.embed(x)
        if self.kind == "of the stream":
            places = self.place(x[..., :4] + self.head(h)[..., :1])
        for number in range(2):
            h = self.norms[number](h + self.attend(number, h, h, places))
        y = self.query(x)
        return self.head(self.final(y + self.attend(2, y, h, places)))


@pytest.mark.parametrize("kind", ["of the input", "of the stream"])
def test_positions_added_in_each_layer_are_no_sublayers(kind: str) -> None:
    found = ns.residual_structure(PositionsInEachLayer(kind), example())
    assert [[s.form for s in stack.sublayers] for stack in found.stacks] == [["post"] * 2, ["post"]]
    assert [s.kind for s in found.stacks[0].sublayers] == ["attention"] * 2
    assert found.stacks[1].sublayers[0].kind == "cross-attention"


class SkipAroundAStack(PreNormStack):
    """The stream goes through another embedding into the sublayers and out again, as in a U-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()
        self.outer = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        h = self.inner(x)
        h = h + self.first(self.norms[0](h))
        h = h + self.second(self.norms[1](h))
        return self.head(x + self.outer(self.final(h)))


def test_skip_around_a_stack_is_no_sublayer() -> None:
    model, x = SkipAroundAStack(), example()
    found = ns.residual_structure(model, x)
    assert [[s.form for s in stack.sublayers] for stack in found.stacks] == [["pre", "pre"]]
    assert found.stacks[0].final_norms == ("final",)
    new, _ = ns.convert_placement(model, "post", x)
    assert_same_function(model, new, x)


class Joint(nn.Module):
    """One module with a branch for each of two streams, as in LiLT."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp(), mlp()

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(a), self.second(b)


class TwoStreams(PreNormStack):
    def __init__(self) -> None:
        super().__init__()
        self.joint, self.embed_other = Joint().double(), nn.Linear(4, WIDTH).double()
        self.inner = nn.ModuleList(random_norm().double() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.norms[0](self.embed(x)), self.norms[1](self.embed_other(x))
        f, g = self.joint(a, b)
        return self.head(self.inner[0](a + f) + self.inner[1](b + g))


def test_norms_of_two_streams_move_onto_one_module() -> None:
    model, x = TwoStreams(), example()
    new, _ = ns.convert_placement(model, "pre", x)
    assert [s.form for s in ns.residual_structure(new, x).stacks] == ["pre", "pre"]
    moved = {name for name, _ in new.named_modules() if name.startswith("joint.input_norm")}
    assert moved == {"joint.input_norm", "joint.input_norm_2"}


class TwoWayStreams(PreNormStack):
    """Two streams whose sublayers read each other, as in the mask decoder of SAM."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.cross = nn.Linear(4, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.back = nn.ModuleList(nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.inner = nn.ModuleList(random_norm().double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.embed(x), self.other(x)
        a = self.norms[0](a + self.cross(b).tanh())
        for number, block in enumerate((self.first, self.second)):
            a = self.inner[number](a + block(a + b))
            b = self.norms[1](b + self.back[number](a * b)) if number == 0 else b
        return self.head(self.final(a)) + self.head(b)


def test_sublayer_that_another_stream_reads_is_not_lost() -> None:
    model, x = TwoWayStreams(), example()
    stacks = ns.residual_structure(model, x).stacks
    norms = {n for stack in stacks for s in stack.sublayers for n in s.stream_norms}
    assert {"inner.0", "inner.1", "norms.1"} <= norms


class AttentionReturnsWeights(nn.Module):
    """A post-norm stack by hand: what the branch adds comes first in a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.start = nn.Linear(4, 8), nn.LayerNorm(8)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(8, 2, batch_first=True) for _ in range(2)
        )
        self.linear = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(4))
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        x = self.start(self.embed(x))
        for number in range(2):
            x = self.norms[2 * number](x + self.attention[number](x, x, x)[0])
            x = self.norms[2 * number + 1](x + self.linear[number](x))
        return x


def test_branch_that_comes_first_in_a_tuple_is_reached() -> None:
    torch.manual_seed(0)
    model, x = AttentionReturnsWeights(), example()
    deep, _ = ns.convert_placement(model, "deepnorm", x)
    assert_same_function(model, deep, x)
    closed, _ = ns.convert_placement(model, "sandwich", x, calibration=[x])
    assert ns.residual_structure(closed, x).form == "sandwich"

    pre, _ = ns.convert_placement(model, "pre", x, calibration=[x])
    assert ns.residual_structure(pre, x).form == "pre"
    again, _ = ns.convert_placement(pre, "post", x)
    assert_same_function(pre, again, x)
