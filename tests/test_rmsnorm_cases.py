"""LayerNorm to RMSNorm by centring what writes the stream: each rule as a small model.

All parameters are random, with negative and zero scales and writers of non-zero mean, and results
are compared in true float64.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Net,
    assert_refused,
    assert_state_equal,
    find_site,
    random_input,
    relative_error,
    run,
    state_copy,
)
from small_transformers import (
    EXACT,
    LAYER_TO_RMS,
    MLP,
    RMS_CLASSES,
    TOWER,
    VOCABULARY,
    WIDTH,
    Attention,
    Conv1D,
    Language,
    LogitsOnly,
    PostNorm,
    PreNorm,
    Tower,
    assert_all,
    assert_centred,
    assert_equal_outputs,
    assert_neutral,
    call64,
    centring_ops,
    convert,
    fill_all,
    layer_norm_calls,
    library_inputs,
    library_model,
    statuses,
    token_ids,
)
from swapping import ChannelsFirst, OffsetLayerNorm, PlainLayerNorm
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import normswap as ns
from normswap import norms

IDS = token_ids(2, 5)
OTHER_IDS = ((token_ids(3, 7, seed=5),),)
FEATURES = random_input(2, 5, 6)
OTHER_FEATURES = ((random_input(3, 5, 6, seed=5) + 2,),)
IMAGE = random_input(2, 3, 8, 8)


def refused_everywhere(report: Any, *reasons: str) -> None:
    """No norm was changed; each for one of the reasons."""
    found = statuses(report)
    assert found
    assert set(found.values()) <= set(reasons), found


# The whole transformer


def test_pre_norm_transformer_is_converted_whole() -> None:
    model = fill_all(Language())
    new, report = convert(model, IDS, others=OTHER_IDS)
    assert_all(report, 5)
    assert layer_norm_calls(new, IDS) == 0
    assert not centring_ops(new)
    assert list(new.state_dict()) == list(model.state_dict())


def test_what_writes_the_stream_is_centred_and_nothing_else_changes() -> None:
    model = fill_all(Language())
    new, _ = convert(model, IDS)
    assert_centred(new.tokens.weight, new.places.weight)
    changed = ["tokens.weight", "places.weight"]
    for index in range(2):
        for name in (f"blocks.{index}.attention.out", f"blocks.{index}.mlp.down"):
            layer = new.get_submodule(name)
            assert_centred(layer.weight, layer.bias, axis=0)
            changed += [f"{name}.weight", f"{name}.bias"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, new.state_dict()[name]) == (name not in changed), name


def test_padding_row_of_an_embedding_is_centred_too() -> None:
    model = fill_all(Language())
    ids = IDS.clone()
    ids[:, 1:3] = 0
    new, report = convert(model, ids)
    assert_all(report)
    assert_centred(new.tokens.weight[0])
    assert new.tokens.padding_idx == 0


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 1e-1])
def test_eps_and_affine_are_carried_over(eps: float) -> None:
    model = fill_all(nn.Sequential(nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH, eps=eps)))
    new, report = convert(model, FEATURES, others=OTHER_FEATURES)
    assert_all(report, 1)
    assert new[1].eps == eps
    assert torch.equal(new[1].weight, model[1].weight)
    assert torch.equal(new[1].bias, model[1].bias)


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}])
def test_norm_without_a_shift_becomes_the_class_of_torch(options: dict[str, bool]) -> None:
    model = fill_all(nn.Sequential(nn.Linear(6, WIDTH), nn.LayerNorm(WIDTH, **options)))
    new, report = convert(model, FEATURES)
    assert_all(report, 1)
    assert type(new[1]) is nn.RMSNorm
    assert (new[1].weight is None) == (model[1].weight is None)


@pytest.mark.parametrize("size", [1, 2, 3, 31])
def test_every_width_is_exact(size: int) -> None:
    model = fill_all(nn.Sequential(nn.Linear(6, size), nn.LayerNorm(size), nn.Linear(size, 3)))
    convert(model, FEATURES, others=OTHER_FEATURES)


@pytest.mark.parametrize("norm", [PlainLayerNorm, OffsetLayerNorm])
def test_norms_of_any_class_are_converted(norm: Any) -> None:
    model = fill_all(Language(norm))
    _, report = convert(model, IDS, others=OTHER_IDS)
    assert_all(report, 5)


def test_norms_share_a_stream_with_a_functional_one() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.up(x)
        x = x + m.mlp(m.norm(x))
        return m.head(F.layer_norm(x, (WIDTH,), m.scale, None))

    model = Net(forward, up=nn.Linear(6, WIDTH), mlp=MLP(), norm=nn.LayerNorm(WIDTH))
    model.head, model.scale = nn.Linear(WIDTH, 3), nn.Parameter(torch.ones(WIDTH))
    _, report = convert(fill_all(model), FEATURES)
    assert find_site(report, "norm").status == "exact"
    functional = [s for s in report.sites if s.name != "norm"]
    assert [s.reason for s in functional] in ([], ["functional"])


def test_folding_the_affine_leaves_plain_rms_norms() -> None:
    model = fill_all(Language(head_bias=True))
    new, report = convert(model, IDS, others=OTHER_IDS, fold_affine=True)
    assert_all(report, 5)
    for site in report.sites:
        norm = new.get_submodule(site.name)
        assert type(norm) is nn.RMSNorm
        assert_neutral(norm)


def test_folding_the_affine_makes_the_biases_that_it_needs() -> None:
    model = fill_all(Language(bias=False))
    new, report = convert(model, IDS, fold_affine=True)
    assert_all(report, 5)
    assert new.head.bias is not None
    assert new.blocks[0].mlp.up.bias is not None


def test_torch_encoder_with_norm_first_is_converted() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, norm_first=True, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
    model = fill_all(nn.Sequential(nn.Linear(6, WIDTH), encoder))
    new, report = convert(model, FEATURES, others=OTHER_FEATURES)
    assert_all(report, 5)
    assert relative_error(run(model, FEATURES), run(new, FEATURES)) < EXACT  # no fast path


def test_torch_encoder_with_norm_last_is_refused() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = fill_all(nn.Sequential(nn.Linear(6, WIDTH), encoder))
    _, report = convert(model, FEATURES)
    assert "exact" not in statuses(report).values()


def test_encoder_and_decoder_are_converted() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Language(), Language(depth=1)
            self.encoder.head = nn.Identity()
            self.cross_norm, self.cross = nn.LayerNorm(WIDTH), Attention(causal=False)
            self.decoder.norm = nn.LayerNorm(WIDTH)

        def forward(self, source: Tensor, target: Tensor) -> Tensor:
            memory = self.encoder(source)
            y = self.decoder.blocks[0](self.decoder.tokens(target))
            y = y + self.cross(self.cross_norm(y), memory)
            return self.decoder.head(self.decoder.norm(y))

    _, report = convert(fill_all(Both()), IDS, token_ids(2, 4, seed=9))
    assert_all(report, 9)


# What writes the stream


def tower(writer: nn.Module, *args: Tensor, **options: Any) -> tuple[Any, Any]:
    """Convert a :class:`Tower`; the new model and the report."""
    return convert(fill_all(Tower(writer)), *args, **options)


def image_tokens(m: Any, x: Tensor) -> Tensor:
    return m.conv(x).flatten(2).transpose(1, 2)


def class_token(m: Any, x: Tensor) -> Tensor:
    tokens = torch.cat([m.token.expand(x.shape[0], -1, -1), m.lin(x)], 1)
    return tokens + m.places


def masked_token(m: Any, x: Tensor) -> Tensor:
    return torch.where(x[..., :1] > 0, m.token, m.lin(x))


def mixed(m: Any, x: Tensor) -> Tensor:
    return m.tokens(m.lin(x).transpose(1, 2)).transpose(1, 2)


def with_parameters(net: nn.Module, **shapes: tuple[int, ...]) -> nn.Module:
    for name, shape in shapes.items():
        net.register_parameter(name, nn.Parameter(torch.zeros(shape)))
    return net


def linear() -> nn.Linear:
    return nn.Linear(6, WIDTH)


ABSORBING: dict[str, Any] = {
    "linear": lambda: (linear(), FEATURES),
    "linear without bias": lambda: (nn.Linear(6, WIDTH, bias=False), FEATURES),
    "Conv1D": lambda: (Conv1D(6, WIDTH), FEATURES),
    "square Conv1D": lambda: (Conv1D(WIDTH, WIDTH), random_input(2, 5, WIDTH)),
    "patches": lambda: (Net(image_tokens, conv=nn.Conv2d(3, WIDTH, 4, stride=4)), IMAGE),
    "padded conv": lambda: (Net(image_tokens, conv=nn.Conv2d(3, WIDTH, 3, padding=1)), IMAGE),
    "reflecting conv": lambda: (
        Net(image_tokens, conv=nn.Conv2d(3, WIDTH, 3, padding=1, padding_mode="reflect")),
        IMAGE,
    ),
    "transposed conv": lambda: (
        Net(image_tokens, conv=nn.ConvTranspose2d(3, WIDTH, 3, stride=2)),
        IMAGE,
    ),
    "embedding": lambda: (nn.Embedding(VOCABULARY, WIDTH), IDS),
    "sum of embeddings": lambda: (
        Net(
            lambda m, i: m.words(i) + m.kinds(i % 2) + m.places(torch.arange(i.shape[1])),
            words=nn.Embedding(VOCABULARY, WIDTH, padding_idx=0),
            kinds=nn.Embedding(2, WIDTH),
            places=nn.Embedding(16, WIDTH),
        ),
        IDS,
    ),
    "class token and places": lambda: (
        with_parameters(Net(class_token, lin=linear()), token=(1, 1, WIDTH), places=(1, 6, WIDTH)),
        FEATURES,
    ),
    "mask token": lambda: (
        with_parameters(Net(masked_token, lin=linear()), token=(1, 1, WIDTH)),
        FEATURES,
    ),
    "zeroed tokens": lambda: (
        Net(lambda m, x: m.lin(x).masked_fill(x[..., :1] > 0, 0.0), lin=linear()),
        FEATURES,
    ),
    "learned queries": lambda: (
        with_parameters(
            Net(lambda m, x: m.queries.expand(x.shape[0], -1, -1) + m.lin(x), lin=linear()),
            queries=(1, 5, WIDTH),
        ),
        FEATURES,
    ),
    "scalar factor": lambda: (Net(lambda m, x: m.lin(x) * 2.5 / 3, lin=linear()), FEATURES),
    "factor of each token": lambda: (
        with_parameters(Net(lambda m, x: m.lin(x) * m.factor, lin=linear()), factor=(5, 1)),
        FEATURES,
    ),
    "gate of each token": lambda: (
        Net(lambda m, x: m.gate(x).sigmoid() * m.lin(x), lin=linear(), gate=nn.Linear(6, 1)),
        FEATURES,
    ),
    "linear over tokens": lambda: (Net(mixed, lin=linear(), tokens=nn.Linear(5, 5)), FEATURES),
    "chunk": lambda: (Net(lambda m, x: m.lin(x).chunk(2, -1)[1], lin=nn.Linear(6, 16)), FEATURES),
    "unflatten": lambda: (
        Net(lambda m, x: m.lin(x).unflatten(-1, (3, WIDTH)), lin=nn.Linear(6, 3 * WIDTH)),
        random_input(2, 6),
    ),
    "average over tokens": lambda: (
        Net(lambda m, x: F.avg_pool1d(m.lin(x).mT, 2).mT, lin=linear()),
        FEATURES,
    ),
    "mean over tokens": lambda: (Net(lambda m, x: m.lin(x).mean(1), lin=linear()), FEATURES),
    "first token": lambda: (Net(lambda m, x: m.lin(x)[:, 0], lin=linear()), FEATURES),
    "dropout in eval": lambda: (nn.Sequential(linear(), nn.Dropout(0.5)), FEATURES),
    "text and image": lambda: (
        Net(
            lambda m, x: torch.cat([m.image(x), m.text(x.argmax(-1))], 1),
            image=linear(),
            text=nn.Embedding(6, WIDTH),
        ),
        FEATURES,
    ),
}


@pytest.mark.parametrize("name", ABSORBING)
def test_writer_absorbs_the_centring(name: str) -> None:
    writer, x = ABSORBING[name]()
    other = x.roll(1, 0) if not x.is_floating_point() else x.roll(1, 0) * 3 + 1
    new, report = tower(writer, x, others=((other,),))
    assert_all(report, 3)
    assert not centring_ops(new)


def test_square_conv1d_is_centred_along_its_outputs() -> None:
    new, report = tower(Conv1D(WIDTH, WIDTH), random_input(2, 5, WIDTH))
    assert_all(report, 3)
    assert_centred(new.writer.weight, new.writer.bias)
    assert float(new.writer.weight.detach().mean(0).abs().max()) > 1e-3


def test_chunk_is_centred_alone() -> None:
    writer = Net(lambda m, x: m.lin(x).chunk(2, -1)[1], lin=nn.Linear(6, 16))
    model = fill_all(Tower(writer))
    new, _ = convert(model, FEATURES)
    assert torch.equal(new.writer.lin.weight[:WIDTH], model.writer.lin.weight[:WIDTH])
    assert_centred(new.writer.lin.weight[WIDTH:], axis=0)


BLOCKING: dict[str, Any] = {
    "grouped conv": lambda: (Net(image_tokens, conv=nn.Conv2d(4, WIDTH, 3, groups=2)), 4),
    "grouped transposed conv": lambda: (
        Net(image_tokens, conv=nn.ConvTranspose2d(4, WIDTH, 3, groups=2)),
        4,
    ),
    "depthwise conv": lambda: (Net(image_tokens, conv=nn.Conv2d(8, WIDTH, 3, groups=8)), 8),
    "activation": lambda: (Net(image_tokens, conv=nn.Sequential(nn.Conv2d(4, 8, 3), nn.GELU())), 4),
    "max pool": lambda: (
        Net(image_tokens, conv=nn.Sequential(nn.Conv2d(4, 8, 3), nn.MaxPool2d(2))),
        4,
    ),
    "group norm": lambda: (
        Net(image_tokens, conv=nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(1, 8))),
        4,
    ),
    "weight norm": lambda: (
        Net(image_tokens, conv=parametrizations.weight_norm(nn.Conv2d(4, WIDTH, 3))),
        4,
    ),
}


@pytest.mark.parametrize("name", BLOCKING)
def test_writer_that_cannot_absorb_gets_a_centring_op_where_it_frees_more(name: str) -> None:
    writer, channels = BLOCKING[name]()
    x = random_input(2, channels, 6, 6)
    new, report = tower(writer, x, others=((x * 2 + 1,),))
    assert_all(report, 3)
    assert len(centring_ops(new)) == 1


@pytest.mark.parametrize("name", BLOCKING)
def test_writer_that_cannot_absorb_keeps_a_single_norm(name: str) -> None:
    writer, channels = BLOCKING[name]()
    model = fill_all(nn.Sequential(writer, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)))
    new, report = convert(model, random_input(2, channels, 6, 6))
    assert not centring_ops(new)
    allowed = (
        "op",
        "pooling",
        "activation-between",
        "norm-writer",
        "parametrised",
        "axis-mismatch",
    )
    assert_refused(report, "1", *allowed)


@pytest.mark.parametrize("writer", ["max_norm", "fill", "literal", "table", "place"])
def test_constants_in_the_stream_do_not_keep_their_mean(writer: str) -> None:
    """``C(x + c) = C x``: a constant that stays in the code would be left in the stream."""
    emb = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0 if writer == "max_norm" else None)
    functions: dict[str, Any] = {
        "max_norm": lambda m, i: m.emb(i),
        "fill": lambda m, i: m.emb(i).masked_fill((i > 9)[..., None], 3.0),
        "literal": lambda m, i: m.emb(i) + 1.5,
        "table": lambda m, i: m.emb(i) + m.constant,
        "place": lambda m, i: m.emb(i) + torch.arange(i.shape[1])[:, None],
    }
    net = with_parameters(Net(functions[writer], emb=emb), constant=(5, 1))
    new, report = tower(net, IDS, others=((token_ids(3, 5, seed=4),),))
    if writer == "table":
        assert_all(report, 3)
        assert not centring_ops(new)
    elif "exact" in statuses(report).values():
        assert centring_ops(new)


def test_literal_added_between_the_norms_is_not_forgotten() -> None:
    convert(fill_all(Tower(linear(), lambda x: x + 1.5)), FEATURES, others=OTHER_FEATURES)


@pytest.mark.parametrize("place", ["branch", "both"])
def test_layer_scale_is_merged_into_its_branch(place: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm1, self.norm2 = linear(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.mlp1, self.mlp2 = MLP(), MLP(bias=False)
            self.scale1 = nn.Parameter(torch.ones(WIDTH))
            self.scale2 = nn.Parameter(torch.ones(WIDTH))
            self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            x = x + self.scale1 * self.mlp1(self.norm1(x))
            branch = self.mlp2(self.norm2(x))
            x = x + (branch * self.scale2 if place == "both" else branch)
            return self.head(self.norm(x))

    model = fill_all(Scaled())
    assert int((model.scale1 == 0).sum()) > 0
    new, report = convert(model, FEATURES, others=OTHER_FEATURES)
    assert_all(report, 3)
    assert not centring_ops(new)
    assert bool((new.scale1 == 1).all())
    expected = model.mlp1.down.weight * model.scale1[:, None]
    assert relative_error(expected - expected.mean(0), new.mlp1.down.weight) < 1e-14


def test_layer_scale_on_the_stream_itself_is_refused() -> None:
    net = with_parameters(Net(lambda m, x: m.lin(x), lin=linear()), scale=(WIDTH,))
    model = fill_all(Tower(net, lambda x: x * net.scale))
    _, report = convert(model, FEATURES)
    assert_refused(report, "norm1")


class Experts(nn.Module):
    """A dense mixture: every expert, weighted by a router; fused weights or a list of MLPs."""

    def __init__(self, fused: bool, shared: bool) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.zeros(3, WIDTH))
        self.fused = fused
        if fused:
            self.up, self.up_bias = (
                nn.Parameter(torch.zeros(3, WIDTH, 12)),
                nn.Parameter(torch.zeros(3, 1, 12)),
            )
            self.down, self.down_bias = (
                nn.Parameter(torch.zeros(3, 12, WIDTH)),
                nn.Parameter(torch.zeros(3, 1, WIDTH)),
            )
        else:
            self.experts = nn.ModuleList(MLP() for _ in range(3))
        self.shared = MLP(gated=True) if shared else None
        self.shared_gate = nn.Linear(WIDTH, 1) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        weights = F.linear(x, self.router).softmax(-1)
        if self.fused:
            flat = x.flatten(0, -2).expand(3, -1, -1)
            hidden = F.gelu(torch.bmm(flat, self.up) + self.up_bias)
            each = (torch.bmm(hidden, self.down) + self.down_bias).unflatten(1, x.shape[:-1])
        else:
            each = torch.stack([expert(x) for expert in self.experts])
        out = (each * weights.movedim(-1, 0).unsqueeze(-1)).sum(0)
        if self.shared is not None:
            out = out + self.shared_gate(x).sigmoid() * self.shared(x)
        return out


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_every_expert_writes_the_stream(fused: bool, shared: bool) -> None:
    model = Tower(linear())
    model.mlp1 = Experts(fused, shared)
    _, report = convert(fill_all(model), FEATURES, others=OTHER_FEATURES)
    assert_all(report, 3)


def test_routing_on_data_is_refused() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(MLP() for _ in range(4))
            self.router = nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            flat = x.flatten(0, -2)
            chosen, out = self.router(flat).argmax(-1), torch.zeros_like(flat)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero().flatten()
                if len(rows):
                    out = out.index_add(0, rows, expert(flat[rows]))
            return out.view_as(x)

    model = Tower(linear())
    model.mlp1 = Routed()
    others = tuple((random_input(1, 1, 6, seed=s),) for s in range(8))
    new, report = convert(fill_all(model), FEATURES[:1, :1], others=others)
    assert "data-dependent" in statuses(report).values() or centring_ops(new)


def test_branch_on_data_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        return m.head(m.norm(y)) if x.mean() > 0 else m.head(y)

    model = fill_all(Net(forward, lin=linear(), norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 3)))
    _, report = convert(model, FEATURES.abs(), others=((-FEATURES.abs(),),))
    assert_refused(report, "norm", "data-dependent")


def test_stream_written_in_place_is_right() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        y += m.mlp(m.norm1(y))
        return m.head(m.norm2(y))

    model = Net(forward, lin=linear(), mlp=MLP(), head=nn.Linear(WIDTH, 3))
    model.norm1, model.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
    convert(fill_all(model), FEATURES, others=OTHER_FEATURES)


def test_stream_whose_view_is_written_to_is_right() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.lin(x)
        y[:, :2].mul_(2.0)
        y[..., 0].add_(1.0)
        return m.head(m.norm(y))

    model = Net(forward, lin=linear(), norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 3))
    _, report = convert(fill_all(model), FEATURES)
    assert find_site(report, "norm").status == "refused"


def test_dropout_in_training_mode_is_refused() -> None:
    model = fill_all(nn.Sequential(linear(), nn.Dropout(0.5), nn.LayerNorm(WIDTH))).train()
    _, report = ns.swap_norms(model, LAYER_TO_RMS, FEATURES, method="exact", verify=False)
    assert "exact" not in statuses(report).values()


def test_layer_used_three_times_is_centred_once() -> None:
    block = PreNorm()
    model = fill_all(nn.Sequential(linear(), block, block, block, nn.LayerNorm(WIDTH)))
    new, report = convert(model, FEATURES, others=OTHER_FEATURES)
    assert_all(report, 3)
    assert new[1] is new[2] is new[3]


def test_writer_of_two_streams_is_centred_only_if_both_are() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        return m.head(m.norm(m.lin(x))), m.lin(x + 1)

    model = fill_all(Net(forward, lin=linear(), norm=nn.LayerNorm(WIDTH), head=nn.Linear(WIDTH, 3)))
    _, report = convert(model, FEATURES)
    assert_refused(report, "norm", "shared", "output")


def test_norm_called_on_two_streams_is_converted_only_if_both_are() -> None:
    model = fill_all(
        Net(
            lambda m, x: m.head(m.norm(m.lin(x)) + m.norm(F.gelu(m.other(x)))),
            lin=linear(),
            other=linear(),
            norm=nn.LayerNorm(WIDTH),
            head=nn.Linear(WIDTH, 3),
        )
    )
    _, report = convert(model, FEATURES)
    assert find_site(report, "norm").status == "refused"


# What reads the stream


def read_by(reader: Any, **children: nn.Module) -> nn.Module:
    """A stream read by two norms and by ``reader``, whose value is returned as well."""

    def forward(m: Any, x: Tensor) -> Any:
        y = m.lin(x)
        y = y + m.mlp(m.norm1(y))
        return m.head(m.norm2(y)), reader(m, y)

    return fill_all(
        Net(
            forward,
            lin=linear(),
            mlp=MLP(),
            norm1=nn.LayerNorm(WIDTH),
            norm2=nn.LayerNorm(WIDTH),
            head=nn.Linear(WIDTH, 3),
            **children,
        )
    )


RAW: dict[str, Any] = {
    "output": ({"output"}, lambda m, y: y, {}),
    "transposed output": ({"output"}, lambda m, y: y.mT, {}),
    "head": ({"raw-reader"}, lambda m, y: m.extra(y), {"extra": nn.Linear(WIDTH, 2)}),
    "activation": ({"raw-reader", "activation-between"}, lambda m, y: F.gelu(y), {}),
    "product": ({"raw-reader", "op"}, lambda m, y: y * y, {}),
    "mean": ({"raw-reader", "op"}, lambda m, y: y.mean(-1), {}),
    "norm of it": ({"raw-reader", "op"}, lambda m, y: y.norm(dim=-1), {}),
    "max over tokens": ({"raw-reader", "op", "output"}, lambda m, y: y.amax(1), {}),
    "argmax": ({"raw-reader", "op"}, lambda m, y: (y - 1).relu().argmax(-1), {}),
    "RMSNorm": ({"raw-reader"}, lambda m, y: m.extra(y), {"extra": nn.RMSNorm(WIDTH)}),
    "GroupNorm(1)": (
        {"raw-reader"},
        lambda m, y: m.extra(y.mT),
        {"extra": nn.GroupNorm(1, WIDTH)},
    ),
    "BatchNorm": (
        {"raw-reader", "output"},
        lambda m, y: m.extra(y.mT),
        {"extra": nn.BatchNorm1d(WIDTH)},
    ),
    "LayerNorm over two axes": (
        {"raw-reader", "op", "axis-mismatch"},
        lambda m, y: F.layer_norm(y, tuple(y.shape[-2:])),
        {},
    ),
    "norm over a concat": (
        {"raw-reader", "op", "axis-mismatch"},
        lambda m, y: m.extra(torch.cat([y, y.roll(1, 1)], -1)),
        {"extra": nn.LayerNorm(2 * WIDTH)},
    ),
    "norm over a half": (
        {"raw-reader", "op", "axis-mismatch"},
        lambda m, y: F.layer_norm(y[..., :4], (4,)),
        {},
    ),
    "grouped conv": (
        {"raw-reader"},
        lambda m, y: m.extra(y.mT),
        {"extra": nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)},
    ),
}


@pytest.mark.parametrize("name", RAW)
def test_reader_of_the_mean_keeps_the_stream(name: str) -> None:
    reasons, reader, children = RAW[name]
    _, report = convert(read_by(reader, **copy.deepcopy(children)), FEATURES)
    for site in ("norm1", "norm2"):
        assert_refused(report, site, *reasons, "other-reader")


@pytest.mark.parametrize("name", ["softmax", "LayerNorm", "plain LayerNorm", "difference"])
def test_reader_that_ignores_the_mean_does_not_keep_the_stream(name: str) -> None:
    readers: dict[str, Any] = {
        "softmax": (lambda m, y: y.softmax(-1), {}),
        "LayerNorm": (lambda m, y: m.extra(y), {"extra": nn.LayerNorm(WIDTH)}),
        "plain LayerNorm": (lambda m, y: m.extra(y), {"extra": PlainLayerNorm(WIDTH)}),
        "difference": (lambda m, y: m.extra(y), {"extra": nn.Linear(WIDTH, 2, bias=False)}),
    }
    reader, children = readers[name]
    model = read_by(reader, **children)
    if name == "difference":  # rows that sum to zero
        with torch.no_grad():
            model.extra.weight -= model.extra.weight.mean(1, keepdim=True)
    _, report = convert(model, FEATURES)
    if name != "difference":
        assert_all(report)


@pytest.mark.parametrize("place", ["lin", "norm1", "mlp", "mlp.down"])
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_hook_that_would_see_another_value_keeps_the_stream(place: str, kind: str) -> None:
    model = read_by(lambda m, y: y.softmax(-1))
    seen: list[Tensor] = []
    module = model.get_submodule(place)
    if kind == "forward":
        module.register_forward_hook(lambda m, a, out: seen.append(out))
    else:
        module.register_forward_pre_hook(lambda m, a: seen.append(a[0]))
    new, report = convert(model, FEATURES)
    seen.clear()
    run(model, FEATURES)
    expected = [value.clone() for value in seen]
    seen.clear()
    run(new, FEATURES)
    unchanged = relative_error(expected, seen) < EXACT
    assert unchanged, statuses(report)
    if (place, kind) in {("lin", "forward"), ("norm1", "pre"), ("mlp.down", "forward")}:
        assert_refused(report, "norm1", "hook", "other-reader")


def test_hook_on_what_stays_as_it_is_does_not_matter() -> None:
    model = fill_all(Language())
    model.head.register_forward_hook(lambda m, a, out: None)
    model.blocks[0].mlp.up.register_forward_pre_hook(lambda m, a: None)
    _, report = convert(model, IDS)
    assert_all(report, 5)


def test_one_stream_is_refused_and_another_converted() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = Tower(linear()), Tower(linear())

        def forward(self, x: Tensor) -> Any:
            y = self.bad.writer(x)
            return self.good(x), self.bad.norm1(y), y, self.bad.norm2(F.gelu(y))

    _, report = convert(fill_all(Two()), FEATURES)
    found = statuses(report)
    assert [found[f"good.{name}"] for name in TOWER] == ["exact"] * 3
    assert found["bad.norm1"] in ("output", "raw-reader", "other-reader")
    assert found["bad.norm2"] == "activation-between"
    assert found["bad.norm"] == "not-called"


def test_norm_of_the_input_is_refused() -> None:
    model = fill_all(nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)))
    _, report = convert(model, FEATURES)
    assert_refused(report, "0", "input")


def test_norm_over_two_axes_is_right() -> None:
    convert(fill_all(nn.Sequential(linear(), nn.LayerNorm([5, WIDTH]))), FEATURES)


# Norms that write the stream


def test_post_norm_is_refused() -> None:
    model = fill_all(nn.Sequential(linear(), PostNorm(), PostNorm(), nn.Linear(WIDTH, 3)))
    _, report = convert(model, FEATURES)
    refused_everywhere(report, "norm-writer", "raw-reader", "other-reader")


def skip_only(norm: Any, *, values: Any = None) -> nn.Module:
    """Post-norm whose stream is read by norms alone: ``norm2(norm1(u) + f(norm3(norm1(u))))``."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.norm1(m.lin(x))
        h = h + m.mlp(m.norm3(h))
        return m.head(m.norm2(h))

    model = Net(forward, lin=linear(), mlp=MLP(), head=nn.Linear(WIDTH, 3))
    model.norm1, model.norm2, model.norm3 = norm(WIDTH), norm(WIDTH), norm(WIDTH)
    model = fill_all(model)
    if values is not None:
        with torch.no_grad():
            model.norm1.weight.copy_(values[0])
            model.norm1.bias.copy_(values[1])
    return model


def test_norm_without_affine_may_write_the_stream() -> None:
    model = skip_only(lambda size: nn.LayerNorm(size, elementwise_affine=False))
    new, report = convert(model, FEATURES, others=OTHER_FEATURES)
    assert_all(report, 3)
    assert not centring_ops(new)


@pytest.mark.parametrize("gamma", [1.0, -0.5])
def test_norm_with_equal_scales_may_write_the_stream(gamma: float) -> None:
    shift = torch.randn(WIDTH, dtype=torch.float64)
    model = skip_only(nn.LayerNorm, values=(torch.full((WIDTH,), gamma), shift))
    _, report = convert(model, FEATURES, others=OTHER_FEATURES)
    assert_all(report, 3)


def test_norm_with_unequal_scales_is_followed_by_a_centring_op() -> None:
    new, report = convert(skip_only(nn.LayerNorm), FEATURES, others=OTHER_FEATURES)
    assert_all(report, 3)
    assert len(centring_ops(new)) == 1


def test_embedding_norm_that_begins_the_stream_costs_one_op() -> None:
    class Embedded(Language):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LayerNorm(WIDTH)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.first(self.tokens(ids))
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    new, report = convert(fill_all(Embedded()), IDS, others=OTHER_IDS)
    assert_all(report, 6)
    assert len(centring_ops(new)) == 1


# Norms of queries and keys


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("width", ["per_head", "full_width"])
@pytest.mark.parametrize("logits", ["plain", "rotary"])
def test_norms_of_queries_and_keys_are_converted(
    bias: bool, fused: bool, width: str, logits: str
) -> None:
    attention = Attention(bias=bias, fused=fused, logits=logits, **{width: nn.LayerNorm})
    model = fill_all(nn.Sequential(nn.Linear(6, WIDTH), attention))
    new, report = convert(model, FEATURES, others=OTHER_FEATURES)
    assert_all(report, 2)
    if fused:  # the rows of v stay
        assert torch.equal(new[1].qkv.weight[2 * WIDTH :], attention.qkv.weight[2 * WIDTH :])
    elif width == "per_head":
        assert_centred(new[1].q.weight.unflatten(0, (2, -1)), axis=1)
        if bias:
            assert_centred(new[1].k.bias.unflatten(0, (2, -1)))
    else:
        assert_centred(new[1].q.weight, new[1].k.weight, axis=0)


# Tied heads


def test_tied_head_keeps_its_table_bit_for_bit() -> None:
    model = fill_all(Language(tied=True))
    new, report = convert(model, IDS, others=OTHER_IDS)
    assert_all(report, 5)
    assert new.head.weight is new.tokens.weight
    assert torch.equal(new.tokens.weight, model.tokens.weight)
    assert centring_ops(new) == ["tokens"]


def test_untying_separates_the_tables() -> None:
    model = fill_all(Language(tied=True))
    new, report = convert(model, IDS, others=OTHER_IDS, untie=True)
    assert_all(report, 5)
    assert new.head.weight is not new.tokens.weight
    assert torch.equal(new.head.weight, model.head.weight)
    assert_centred(new.tokens.weight)
    assert not centring_ops(new)
    assert model.head.weight is model.tokens.weight


def test_untying_with_the_affine_folded() -> None:
    model = fill_all(Language(tied=True))
    new, report = convert(model, IDS, others=OTHER_IDS, untie=True, fold_affine=True)
    assert_all(report, 5)
    assert all(type(new.get_submodule(s.name)) is nn.RMSNorm for s in report.sites)
    expected = model.head.weight * model.norm.weight
    assert relative_error(expected, new.head.weight) < 1e-14


def test_untying_nothing_changes_nothing() -> None:
    model = fill_all(Language())
    new, _ = convert(model, IDS, untie=True)
    plain, _ = convert(model, IDS)
    assert_state_equal(new, plain.state_dict())


@pytest.mark.parametrize("untie", [False, True])
def test_flag_of_the_config_says_whether_the_head_is_tied(untie: bool, tmp_path: Any) -> None:
    model = library_model("gpt2")
    new, report = convert(model, library_inputs("gpt2"), untie=untie, keep_class=True)
    assert report.sites
    assert new.config.tie_word_embeddings is not untie
    assert model.config.tie_word_embeddings
    new.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert again.config.tie_word_embeddings is not untie
    assert_equal_outputs(model, again, library_inputs("gpt2"))


# The unchanged class


KEPT = ("gpt2", "bigcode", "opt", "vit", "dinov2", "neox", "whisper", "bloom", "stablelm", "mbart")


@pytest.mark.parametrize("family", KEPT)
@pytest.mark.parametrize("untie", [False, True])
def test_kept_class_loads_the_result_strictly(family: str, untie: bool) -> None:
    model = library_model(family)
    inputs = library_inputs(family)
    new, report = convert(model, inputs, keep_class=True, untie=untie)
    assert "exact" in statuses(report).values()
    assert not centring_ops(new)
    assert list(new.state_dict()) == list(model.state_dict())
    fresh = type(model)(new.config).double().eval()
    if family == "whisper":
        fresh.load_state_dict(new.state_dict(), strict=True)
    fresh.load_state_dict(new.state_dict(), strict=True)
    assert_equal_outputs(model, fresh, inputs)
    assert_equal_outputs(model, fresh, library_inputs(family, seed=8, batch=1))


def test_kept_class_has_its_affine_folded() -> None:
    model = library_model("gpt2")
    new, _ = convert(model, library_inputs("gpt2"), keep_class=True)
    for block in new.transformer.h:
        assert_neutral(block.ln_1)
        assert_neutral(block.ln_2)
        assert_centred(block.mlp.c_proj.weight, block.attn.c_proj.bias)
    assert new.lm_head.weight is new.transformer.wte.weight


def test_tied_table_is_not_centred_in_a_kept_class() -> None:
    model = fill_all(Language(tied=True))
    new, _ = convert(model, IDS, others=OTHER_IDS, keep_class=True)
    assert torch.equal(new.tokens.weight, model.tokens.weight)
    assert not centring_ops(new)


# Models of the transformers library: how many norms are converted, and how many ops that takes


WHOLE = {
    "gpt2": (5, 1),
    "bigcode": (5, 1),
    "opt": (5, 0),
    "cohere": (3, 1),
    "falcon": (3, 1),
    "mpt": (5, 1),
    "nemotron": (5, 0),
    "neox": (5, 0),
    "stablelm": (5, 0),
    "biogpt": (5, 1),
    "blenderbot": (12, 2),
    "vit": (5, 0),
    "dinov2": (5, 0),
}


@pytest.mark.parametrize("family", WHOLE)
def test_library_model_is_converted_whole(family: str) -> None:
    model, (count, ops) = library_model(family), WHOLE[family]
    others = ((library_inputs(family, seed=8, batch=1, length=4),),)
    new, report = convert(model, library_inputs(family), others=others)
    assert_all(report, count)
    assert len(centring_ops(new)) == ops
    assert layer_norm_calls(new.float(), _single(library_inputs(family))) == 0


def _single(inputs: dict[str, Any]) -> dict[str, Any]:
    floating = {k: v.float() for k, v in inputs.items() if _is_floating(v)}
    return {**inputs, **floating}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize("family", ["gpt2", "cohere", "falcon", "mpt", "biogpt", "bloom"])
def test_library_model_is_converted_whole_when_untied(family: str) -> None:
    model = library_model(family)
    new, report = convert(model, library_inputs(family), untie=True)
    assert_all(report)
    assert not new.config.tie_word_embeddings
    assert len(centring_ops(new)) == (family == "bloom")
    head, table = new.get_output_embeddings(), new.get_input_embeddings()
    assert torch.equal(head.weight, model.get_output_embeddings().weight)
    assert head.weight is not table.weight


def test_table_that_goes_by_the_name_of_the_head_is_centred_alone() -> None:
    model, inputs = library_model("roberta"), library_inputs("roberta")
    new, report = convert(model, inputs, untie=True)
    assert statuses(report)["roberta.embeddings.LayerNorm"] == "exact"
    assert not new.config.tie_word_embeddings
    assert torch.equal(new.get_output_embeddings().weight, model.get_output_embeddings().weight)
    assert_centred(new.get_input_embeddings().weight)


def test_opt_with_post_norm_is_refused() -> None:
    model = library_model("opt", do_layer_norm_before=False)
    _, report = convert(model, library_inputs("opt"))
    assert "exact" not in statuses(report).values()


def test_opt_with_a_tied_head_of_full_width_takes_an_op() -> None:
    model = library_model("opt", word_embed_proj_dim=16)
    new, report = convert(model, library_inputs("opt"))
    assert_all(report, 5)
    assert len(centring_ops(new)) == 1


def test_bert_keeps_all_norms_but_that_of_the_embeddings() -> None:
    _, report = convert(library_model("bert_base"), library_inputs("bert_base"))
    found = statuses(report)
    assert found.pop("embeddings.LayerNorm") == "exact"
    assert len(found) == 2
    assert set(found.values()) <= {"norm-writer", "raw-reader", "other-reader"}


def test_bert_with_a_tied_head_is_refused() -> None:
    model = library_model("bert")
    _, report = convert(model, library_inputs("bert"))
    found = statuses(report)
    assert len(found) == 6
    assert [n for n, s in found.items() if s == "exact" and ".layer." in n] == []
    _, report = convert(model, library_inputs("bert"), untie=True)
    assert statuses(report)["bert.embeddings.LayerNorm"] == "exact"


def test_bloom_begins_its_stream_with_a_norm() -> None:
    new, report = convert(library_model("bloom"), library_inputs("bloom"))
    found = statuses(report)
    assert found.pop("transformer.word_embeddings_layernorm") != "exact"
    assert set(found.values()) == {"exact"}
    assert len(found) == 5
    assert centring_ops(new) == ["transformer.word_embeddings_layernorm"]


def test_mbart_begins_both_streams_with_a_norm() -> None:
    new, report = convert(library_model("mbart"), library_inputs("mbart"))
    found = statuses(report)
    first = {n for n in found if n.endswith("layernorm_embedding")}
    assert {n for n, s in found.items() if s == "exact"} == set(found) - first
    assert len(found) == 14
    assert len(centring_ops(new)) == 2


def test_whisper_decoder_is_converted() -> None:
    _, report = convert(library_model("whisper"), library_inputs("whisper"))
    found = statuses(report)
    decoder = [s for n, s in found.items() if ".decoder." in n]
    assert decoder == ["exact"] * 7
    encoder = {s for n, s in found.items() if ".encoder." in n}
    assert len(encoder) == 1, "a stream is converted whole or not at all"
    assert encoder <= {"exact", "activation-between"}


def test_clip_converts_the_tower_whose_stream_is_not_returned() -> None:
    _, report = convert(library_model("clip"), library_inputs("clip"))
    found = statuses(report)
    text = [s for n, s in found.items() if n.startswith("text_model.")]
    assert text == ["exact"] * 5
    assert found["vision_model.pre_layrnorm"] == "exact"
    vision = {s for n, s in found.items() if n.startswith("vision_model.encoder")}
    assert vision <= {"output", "norm-writer", "raw-reader", "other-reader"}


@pytest.mark.parametrize("family", ["llama", "gemma", "gemma2", "olmo2", "mixtral"])
@pytest.mark.parametrize("untie", [False, True])
def test_model_of_rms_norms_is_not_touched(family: str, untie: bool) -> None:
    model = library_model(family)
    new, report = convert(model, library_inputs(family), untie=untie)
    assert not report.sites
    assert_state_equal(new, model.state_dict())
    assert not centring_ops(new)
    tied = model.config.tie_word_embeddings
    assert (new.get_output_embeddings().weight is new.get_input_embeddings().weight) == tied


def test_qk_norms_of_the_library_are_converted() -> None:
    for family, settings in {
        "cohere": {"use_qk_norm": True},
        "stablelm": {"qk_layernorm": True},
    }.items():
        model = library_model(family, **settings)
        _, report = convert(model, library_inputs(family))
        found = statuses(report)
        assert {n: s for n, s in found.items() if "self_attn" not in n and s != "exact"} == {}
        assert any("self_attn" in name for name in found)


def test_hidden_states_that_are_recorded_keep_the_stream() -> None:
    model = library_model("neox")
    inputs = {**library_inputs("neox"), "output_hidden_states": True}
    _, report = convert(model, inputs)
    found = statuses(report)
    assert "exact" not in {s for n, s in found.items() if "input_layernorm" in n}


def test_report_says_that_recorded_hidden_states_change() -> None:
    _, report = convert(library_model("neox"), library_inputs("neox"))
    assert any("hidden" in note for note in report.notes), report.notes


def test_caches_are_compared_too() -> None:
    inputs = {"input_ids": IDS}
    model = library_model("gpt2")
    assert len(call64(model, inputs).past_key_values) == 2
    _, report = convert(model, inputs)
    assert_all(report, 5)


@pytest.mark.parametrize(("family", "exact"), [("gpt2", True), ("opt", True), ("bert", False)])
def test_auto_changes_every_norm_of_the_library_model(family: str, exact: bool) -> None:
    model = library_model(family)
    new, report = ns.swap_norms(model, LAYER_TO_RMS, library_inputs(family))
    assert all(type(new.get_submodule(s.name)) in RMS_CLASSES for s in report.sites)
    assert ({s.status for s in report.sites} == {"exact"}) is exact
    assert {s.status for s in report.sites} <= {"exact", "approximate"}


# Methods, selection, errors


def test_auto_converts_what_is_exact_and_copies_the_rest() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.good, self.bad = Tower(linear()), PostNorm()

        def forward(self, x: Tensor) -> Tensor:
            return self.bad(self.good.writer(x)).sum(-1, keepdim=True) + self.good(x)

    model = fill_all(Both())
    new, report = ns.swap_norms(model, LAYER_TO_RMS, FEATURES)
    assert all(type(new.get_submodule(s.name)) in RMS_CLASSES for s in report.sites)
    assert {s.status for s in report.sites if s.name.startswith("bad")} == {"approximate"}


def test_auto_without_inputs_edits_no_other_layer() -> None:
    model = fill_all(Language())
    new, report = ns.swap_norms(model, LAYER_TO_RMS)
    assert {s.status for s in report.sites} == {"approximate"}
    assert torch.equal(new.tokens.weight, model.tokens.weight)


def test_exact_without_inputs_changes_nothing() -> None:
    model = fill_all(Language())
    new, report = ns.swap_norms(model, LAYER_TO_RMS, method="exact")
    assert {s.status for s in report.sites} == {"refused"}
    assert_state_equal(new, model.state_dict())


def test_where_selects_and_the_others_stay_layer_norms() -> None:
    model = fill_all(Language())
    new, report = convert(model, IDS, others=OTHER_IDS, where="*norm1")
    found = statuses(report)
    assert {n: s for n, s in found.items() if n.endswith("norm1")} == {
        "blocks.0.norm1": "exact",
        "blocks.1.norm1": "exact",
    }
    assert {s for n, s in found.items() if not n.endswith("norm1")} == {"where"}
    assert layer_norm_calls(new, IDS) == 3


@pytest.mark.parametrize("blocks", [0, 2])
def test_norm_along_the_channels_is_converted(blocks: int) -> None:
    """It becomes an RMS norm along the channels."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = ChannelsFirst(WIDTH), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.conv(self.norm(x))

    layers = [nn.Conv2d(3, WIDTH, 1), *(Block() for _ in range(blocks))]
    model = fill_all(nn.Sequential(*layers, ChannelsFirst(WIDTH), nn.Conv2d(WIDTH, 4, 1)))
    new, report = convert(model, IMAGE)
    assert_all(report, blocks + 1)
    found = [type(m) for m in new.modules() if isinstance(m, RMS_CLASSES)]
    assert found == [norms.ChannelRMSNorm] * (blocks + 1)


def test_where_that_selects_nothing_changes_nothing() -> None:
    model = fill_all(Language())
    new, report = convert(model, IDS, where="nothing")
    refused_everywhere(report, "where")
    assert_state_equal(new, model.state_dict())


def test_norm_without_a_row_of_its_own_choice_costs_no_op() -> None:
    """An op is worth it only where it frees more norms *that were selected* than it adds."""
    model = fill_all(Language(tied=True))
    new, report = convert(model, IDS, where="norm")
    assert statuses(report)["norm"] != "exact"
    assert not centring_ops(new)


def test_strict_raises_and_changes_nothing() -> None:
    model = fill_all(nn.Sequential(linear(), PostNorm()))
    state = state_copy(model)
    with pytest.raises(ns.RefusedError):
        ns.swap_norms(model, LAYER_TO_RMS, FEATURES, method="exact", strict=True, inplace=True)
    assert_state_equal(model, state)


def test_converting_twice_is_a_no_op() -> None:
    once, _ = convert(fill_all(Language(tied=True)), IDS)
    twice, report = convert(once, IDS)
    assert not report.sites
    assert_state_equal(twice, once.state_dict())
    assert centring_ops(twice) == centring_ops(once)


@pytest.mark.parametrize("tied", [False, True])
def test_in_place_changes_the_model_itself(tied: bool) -> None:
    model = fill_all(Language(tied=tied))
    expected, kept = call64(model, IDS), copy.deepcopy(model)
    new, report = ns.swap_norms(model, LAYER_TO_RMS, IDS, method="exact", inplace=True)
    assert new is model
    assert_all(report, 5)
    assert relative_error(expected, call64(model, IDS)) < EXACT
    assert_equal_outputs(kept, model, IDS)


@pytest.mark.parametrize("inplace", [False, True])
def test_weight_that_overflows_when_centred_leaves_the_model_as_it_was(inplace: bool) -> None:
    model = fill_all(Language()).half()
    with torch.no_grad():
        model.blocks[1].mlp.down.weight[1:, 0] = -60000.0
        model.blocks[1].mlp.down.weight[0, 0] = 60000.0
    state, kinds = state_copy(model), [type(m) for m in model.modules()]
    with pytest.raises(ns.NormswapError, match="float16"):
        ns.swap_norms(model, LAYER_TO_RMS, IDS, method="exact", inplace=inplace)
    assert_state_equal(model, state)
    assert [type(m) for m in model.modules()] == kinds
    assert not centring_ops(model)


@pytest.mark.parametrize("inplace", [False, True])
def test_undo_brings_layer_norms_back_or_says_that_it_cannot(inplace: bool) -> None:
    model = fill_all(Language(tied=True))
    expected = call64(model, IDS)
    new, report = ns.swap_norms(model, LAYER_TO_RMS, IDS, method="exact", inplace=inplace)
    state, ops = state_copy(new), centring_ops(new)
    try:
        again = report.undo(new)
    except ns.NormswapError:
        assert_state_equal(new, state)
        assert centring_ops(new) == ops
        assert relative_error(expected, call64(new, IDS)) < EXACT
    else:
        assert relative_error(expected, call64(again, IDS)) < EXACT
        assert layer_norm_calls(again, IDS) == 5


# Precision


def test_bf16_weights_are_computed_in_float64_and_cast_once() -> None:
    model = fill_all(Language()).to(torch.bfloat16)
    new, report = ns.swap_norms(model, LAYER_TO_RMS, IDS, method="exact")
    assert_all(report, 5)
    for name in ("blocks.0.mlp.down.weight", "blocks.1.attention.out.bias"):
        wide = model.get_parameter(name).double()
        expected = (wide - wide.mean(0)).to(torch.bfloat16)
        assert torch.equal(new.get_parameter(name), expected), name
    table = model.tokens.weight.double()
    assert torch.equal(new.tokens.weight, (table - table.mean(1, keepdim=True)).bfloat16())
    assert {p.dtype for p in new.parameters()} == {torch.bfloat16}


def test_drift_of_a_bf16_model_is_reported() -> None:
    model = fill_all(Language()).to(torch.bfloat16)
    new, report = ns.swap_norms(model, LAYER_TO_RMS, IDS, method="exact")
    check = report.verification
    assert check is not None
    assert check.passed
    by_dtype = {r.dtype: r.max_rel for r in check.runs if not r.skipped}
    assert 0 < by_dtype["bfloat16"] < 0.2
    assert by_dtype["float64"] < EXACT
    exact = fill_all(Language()).to(torch.bfloat16).double()
    assert relative_error(call64(exact, IDS), call64(new.double(), IDS)) < 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_dtype_mode_and_gradients_stay_as_they_were(dtype: torch.dtype) -> None:
    model = fill_all(Language()).to(dtype)
    model.tokens.requires_grad_(False)
    model.blocks[0].norm1.weight.requires_grad_(False)
    model.blocks[1].train()
    new, report = ns.swap_norms(model, LAYER_TO_RMS, IDS, method="exact", verify=False)
    assert_all(report, 5)
    for name, parameter in model.named_parameters():
        now = new.get_parameter(name)
        assert (now.dtype, now.requires_grad) == (parameter.dtype, parameter.requires_grad), name
    assert [m.training for m in new.modules()] == [m.training for m in model.modules()]


def test_verification_runs_by_default() -> None:
    _, report = ns.swap_norms(fill_all(Language()), LAYER_TO_RMS, IDS, method="exact")
    assert report.verification is not None
    assert report.verification.passed
    assert report.verification.max_rel < EXACT


# What can be done with the result


@pytest.fixture(scope="module")
def converted() -> tuple[Any, Any, Any]:
    """A tied model, its converted copy with a centring op, and the report."""
    model = fill_all(Language(tied=True))
    return model, *convert(model, IDS)


def test_report_tells_where_an_op_was_added(converted: tuple[Any, Any, Any]) -> None:
    _, _, report = converted
    assert any("mean" in note and "'tokens'" in note for note in report.notes)
    assert "'tokens'" in str(report)


def test_report_counts_the_parameters() -> None:
    model = fill_all(Language())
    new, report = ns.swap_norms(model, LAYER_TO_RMS, IDS, method="exact", fold_affine=True)
    counts = tuple(sum(p.numel() for p in m.parameters()) for m in (model, new))
    assert report.cost is not None
    assert report.cost.parameters == counts
    assert "parameters" in str(report)


def test_report_survives_json(converted: tuple[Any, Any, Any]) -> None:
    _, _, report = converted
    again = ns.Report.from_json(report.to_json())
    assert again.sites == report.sites
    assert again.mapping == report.mapping


def test_plan_survives_json(converted: tuple[Any, Any, Any]) -> None:
    model, new, report = converted
    plan = ns.Plan.from_json(report.plan.to_json())
    again = plan.apply(model)
    assert_state_equal(again, new.state_dict())
    assert_equal_outputs(model, again, IDS)
    assert centring_ops(again) == centring_ops(new)
    assert again.head.weight is again.tokens.weight


def test_copies_and_pickles_compute_the_same(converted: tuple[Any, Any, Any]) -> None:
    model, new, _ = converted
    for again in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert_equal_outputs(model, again, IDS)
        assert centring_ops(again) == ["tokens"]


def test_saved_model_computes_the_same(converted: tuple[Any, Any, Any]) -> None:
    model, new, _ = converted
    file = io.BytesIO()
    torch.save(new, file)
    file.seek(0)
    assert_equal_outputs(model, torch.load(file, weights_only=False), IDS)


def test_state_dict_has_the_old_names_and_loads(converted: tuple[Any, Any, Any]) -> None:
    model, new, _ = converted
    assert list(new.state_dict()) == list(model.state_dict())
    again = copy.deepcopy(new)
    for parameter in again.parameters():
        parameter.data.zero_()
    again.load_state_dict(new.state_dict(), strict=True)
    assert_equal_outputs(model, again, IDS)


def test_exported_program_computes_the_same(converted: tuple[Any, Any, Any]) -> None:
    model, new, _ = converted
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(new, (IDS,))
        exported = program.module()
        found = exported(IDS)
    assert relative_error(run(model, IDS), found) < EXACT
    names = {str(node.target) for node in program.graph.nodes}
    assert not any("layer_norm" in name for name in names)


def test_gradients_pass_the_centring_op(converted: tuple[Any, Any, Any]) -> None:
    _, new, _ = converted
    again = copy.deepcopy(new)
    again(IDS).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in again.parameters())


def test_graph_module_is_right() -> None:
    model = fill_all(Language())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.export.export(model, (IDS,)).module()
        new, report = ns.swap_norms(graph, LAYER_TO_RMS, IDS, method="exact", verify=False)
    assert relative_error(run(graph, IDS), run(new, IDS)) < EXACT
    assert report is not None


def test_inputs_by_keyword_and_by_position_agree() -> None:
    model = LogitsOnly(library_model("neox"))
    new, report = convert(model, library_inputs("neox"))
    assert_all(report, 5)
    named, _ = ns.swap_norms(
        model.model,
        LAYER_TO_RMS,
        IDS,
        example_kwargs={"use_cache": False},
        method="exact",
        verify=False,
    )
    assert_state_equal(named, new.model.state_dict())


def test_norm_behind_a_norm_that_is_a_later_module_is_refused() -> None:
    """What a norm reads is looked up after every norm has become one node of the graph."""

    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.first = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.enter, self.leave = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.leave(self.last(self.first(self.enter(x))))

    model = fill_all(Behind())
    _, report = convert(model, torch.randn(2, 5, dtype=torch.float64))
    assert statuses(report) == {"last": "norm-writer", "first": "exact"}


def test_norm_whose_output_joins_the_stream_it_reads_is_asked_as_a_writer() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.leave = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3)
            self.inner, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.enter(x)
            return self.leave(self.last(y + self.inner(y)))

    convert(fill_all(Joined()), torch.randn(2, 5, dtype=torch.float64))
