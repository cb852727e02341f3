"""Folding the affine part of layer and RMS norms into what reads them: each rule as a small model.

``W (g * n + b) + c``: the reader's bias becomes ``c + W b``, its weight ``W diag(g)``. All
parameters are random, with negative and zero scales, and results are compared in true float64.
"""

from __future__ import annotations

import copy
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
    EXPERTS,
    LIBRARY,
    MLP,
    VOCABULARY,
    WIDTH,
    Attention,
    Conv1D,
    Language,
    LogitsOnly,
    PostNorm,
    assert_all,
    assert_equal_outputs,
    assert_neutral,
    call64,
    fill_all,
    fold,
    library_inputs,
    library_model,
    statuses,
    token_ids,
)
from swapping import LlamaNorm, OffsetLayerNorm, OffsetNorm, PlainLayerNorm
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import normswap as ns
from normswap import norms
from normswap.hub import apply_to_directory

IDS = token_ids(2, 5)
OTHER_IDS = ((token_ids(3, 7, seed=5),),)
TOKENS = random_input(2, 5, WIDTH)
OTHER_TOKENS = ((random_input(3, 5, WIDTH, seed=5) * 2 + 1,),)


def norm_then(reader: Any, norm: Any = nn.LayerNorm, **children: nn.Module) -> Any:
    """``reader(m, norm(x))`` with the reader's parts as children, all random."""
    return fill_all(
        Net(lambda m, x: reader(m, m.norm(x)), norm=norm(WIDTH), **copy.deepcopy(children))
    )


def shift_stays(norm: Any) -> bool:
    """Whether the norm still has a shift, and its scale is 1 or 0."""
    assert set(norm.weight.tolist()) <= {0.0, 1.0}
    return bool(norm.bias.any())


def fold_tokens(model: nn.Module, **options: Any) -> tuple[Any, Any]:
    return fold(model, TOKENS, others=OTHER_TOKENS, **options)


# The formula


@pytest.mark.parametrize("norm", [nn.LayerNorm, PlainLayerNorm])
@pytest.mark.parametrize("bias", [True, False])
def test_scale_and_shift_go_into_the_reader(norm: Any, bias: bool) -> None:
    model = norm_then(lambda m, y: m.lin(y), norm, lin=nn.Linear(WIDTH, 5, bias=bias))
    new, report = fold_tokens(model)
    assert_all(report, 1)
    old = dict(model.norm.named_parameters())
    gamma, beta = old.get("weight", old.get("scale")), old.get("bias", old.get("offset"))
    shift = model.lin.weight @ beta + (model.lin.bias if bias else 0)
    assert relative_error(model.lin.weight * gamma, new.lin.weight) < 1e-15
    assert relative_error(shift, new.lin.bias) < 1e-14
    left = dict(new.norm.named_parameters())
    assert bool((left.get("weight", left.get("scale")) == 1).all())
    assert bool((left.get("bias", left.get("offset")) == 0).all())


@pytest.mark.parametrize("norm", [nn.RMSNorm, norms.RMSNorm, LlamaNorm])
def test_scale_of_an_rms_norm_needs_no_bias(norm: Any) -> None:
    model = norm_then(lambda m, y: m.lin(y), norm, lin=nn.Linear(WIDTH, 5, bias=False))
    new, report = fold_tokens(model)
    assert_all(report, 1)
    assert_neutral(new.norm)
    assert new.lin.bias is None


@pytest.mark.parametrize("norm", [OffsetNorm, OffsetLayerNorm, norms.OffsetRMSNorm])
def test_stored_weight_of_a_norm_with_an_offset_becomes_zero(norm: Any) -> None:
    model = norm_then(lambda m, y: m.lin(y), norm, lin=nn.Linear(WIDTH, 5))
    assert bool((model.norm.weight == -1).any())
    new, report = fold_tokens(model)
    assert_all(report, 1)
    assert_neutral(new.norm, offset=True)
    assert relative_error(model.lin.weight * (1 + model.norm.weight), new.lin.weight) < 1e-15


@pytest.mark.parametrize("square", [False, True])
def test_conv1d_is_scaled_along_its_inputs(square: bool) -> None:
    model = norm_then(lambda m, y: m.lin(y), lin=Conv1D(WIDTH, WIDTH if square else 5))
    new, report = fold_tokens(model)
    assert_all(report, 1)
    expected = model.lin.weight * model.norm.weight[:, None]
    assert relative_error(expected, new.lin.weight) < 1e-15


def test_conv1d_beside_a_linear() -> None:
    model = norm_then(
        lambda m, y: m.a(y) + m.b(y), a=Conv1D(WIDTH, WIDTH), b=nn.Linear(WIDTH, WIDTH)
    )
    new, report = fold_tokens(model)
    assert_all(report, 1)
    gamma = model.norm.weight
    assert relative_error(model.a.weight * gamma[:, None], new.a.weight) < 1e-15
    assert relative_error(model.b.weight * gamma, new.b.weight) < 1e-15


def test_norm_without_affine_has_nothing_to_fold() -> None:
    model = norm_then(
        lambda m, y: m.lin(y),
        lambda size: nn.LayerNorm(size, elementwise_affine=False),
        lin=nn.Linear(WIDTH, 5),
    )
    new, _ = fold_tokens(model)
    assert_state_equal(new, model.state_dict())


def test_folding_twice_is_a_no_op() -> None:
    once, _ = fold(fill_all(Language()), IDS)
    twice, report = fold(once, IDS)
    assert_state_equal(twice, once.state_dict())
    assert {s.status for s in report.sites} <= {"exact", "refused"}


# Scale only


def test_scale_only_keeps_the_shift_in_the_norm() -> None:
    model = norm_then(lambda m, y: m.lin(y), lin=nn.Linear(WIDTH, 5, bias=False))
    new, report = fold_tokens(model, scale_only=True)
    assert_all(report, 1)
    gamma, beta = model.norm.weight, model.norm.bias
    zero = gamma == 0
    assert bool(zero.any())
    assert list(new.state_dict()) == list(model.state_dict())
    assert relative_error((beta / gamma)[~zero], new.norm.bias[~zero]) < 1e-15
    assert bool((new.norm.weight[~zero] == 1).all())


def test_scale_only_leaves_channels_of_scale_zero_alone() -> None:
    model = norm_then(lambda m, y: m.lin(y), lin=nn.Linear(WIDTH, 5, bias=False))
    new, _ = fold_tokens(model, scale_only=True)
    zero = model.norm.weight == 0
    assert bool((new.norm.weight[zero] == 0).all())
    assert torch.equal(new.norm.bias[zero], model.norm.bias[zero])
    assert torch.equal(new.lin.weight[:, zero], model.lin.weight[:, zero])


def test_scale_only_of_a_norm_with_an_offset() -> None:
    model = norm_then(lambda m, y: m.lin(y), OffsetLayerNorm, lin=nn.Linear(WIDTH, 5))
    new, report = fold_tokens(model, scale_only=True)
    assert_all(report, 1)
    zero = model.norm.weight == -1
    assert bool(zero.any())
    assert bool((new.norm.weight[~zero] == 0).all())
    assert bool((new.norm.weight[zero] == -1).all())


def test_scale_only_of_an_rms_norm_is_the_whole_fold_but_for_zeros() -> None:
    model = norm_then(lambda m, y: m.lin(y), nn.RMSNorm, lin=nn.Linear(WIDTH, 5))
    _, report = fold_tokens(model, scale_only=True)
    assert_all(report, 1)


def test_scale_only_makes_no_tensor() -> None:
    model = fill_all(Language(bias=False))
    new, report = fold(model, IDS, others=OTHER_IDS, scale_only=True)
    assert_all(report, 5)
    assert list(new.state_dict()) == list(model.state_dict())
    fresh = Language(bias=False).double().eval()
    fresh.load_state_dict(new.state_dict(), strict=True)
    assert_equal_outputs(model, fresh, IDS)


@pytest.mark.parametrize("scale_only", [False, True])
def test_scale_goes_where_the_shift_cannot(scale_only: bool) -> None:
    conv = nn.Conv1d(WIDTH, 4, 3, padding=1)
    model = norm_then(lambda m, y: m.conv(y.mT), conv=conv)
    new, report = fold_tokens(model, scale_only=scale_only)
    assert_all(report, 1)
    assert shift_stays(new.norm)
    assert torch.equal(new.conv.bias, model.conv.bias)
    scale = model.norm.weight + (model.norm.weight == 0).double()
    assert relative_error(model.conv.weight * scale[:, None], new.conv.weight) < 1e-15


# What passes the map on to the reader


PASSING: dict[str, Any] = {
    "two linears": lambda: (
        lambda m, y: m.a(y) * m.b(y).sigmoid(),
        {"a": nn.Linear(WIDTH, 5), "b": nn.Linear(WIDTH, 5, bias=False)},
    ),
    "gate and up": lambda: (lambda m, y: m.mlp(y), {"mlp": MLP(gated=True)}),
    "fused qkv": lambda: (lambda m, y: m.a(y), {"a": Attention(fused=True)}),
    "q, k and v": lambda: (lambda m, y: m.a(y), {"a": Attention()}),
    "pointwise conv": lambda: (lambda m, y: m.c(y.mT), {"c": nn.Conv1d(WIDTH, 4, 1)}),
    "grouped conv": lambda: (lambda m, y: m.c(y.mT), {"c": nn.Conv1d(WIDTH, 4, 3, groups=2)}),
    "reflecting conv": lambda: (
        lambda m, y: m.c(y.mT),
        {"c": nn.Conv1d(WIDTH, 4, 3, padding=1, padding_mode="reflect")},
    ),
    "replicating conv": lambda: (
        lambda m, y: m.c(y.mT),
        {"c": nn.Conv1d(WIDTH, 4, 3, padding="same", padding_mode="replicate")},
    ),
    "first token": lambda: (lambda m, y: m.lin(y[:, 0]), {"lin": nn.Linear(WIDTH, 3)}),
    "mean over tokens": lambda: (lambda m, y: m.lin(y.mean(1)), {"lin": nn.Linear(WIDTH, 3)}),
    "average pool": lambda: (
        lambda m, y: m.lin(F.adaptive_avg_pool1d(y.mT, 2).mT),
        {"lin": nn.Linear(WIDTH, 3)},
    ),
    "flatten": lambda: (lambda m, y: m.lin(y.flatten(1)), {"lin": nn.Linear(5 * WIDTH, 3)}),
    "halves": lambda: (
        lambda m, y: m.a(y[..., :4]) + m.b(y[..., 4:]),
        {"a": nn.Linear(4, 3), "b": nn.Linear(4, 3)},
    ),
    "dropout in eval": lambda: (
        lambda m, y: m.lin(F.dropout(y, 0.5, False)),
        {"lin": nn.Linear(8, 3)},
    ),
    "factor": lambda: (lambda m, y: m.lin(y * 2.5), {"lin": nn.Linear(WIDTH, 3)}),
    "einsum": lambda: (
        lambda m, y: torch.einsum("btd,od->bto", y, m.lin.weight),
        {"lin": nn.Linear(8, 3)},
    ),
    "cast": lambda: (lambda m, y: m.lin(y.to(torch.float64)), {"lin": nn.Linear(WIDTH, 3)}),
}


@pytest.mark.parametrize("name", PASSING)
def test_reader_behind_these_ops_takes_the_affine(name: str) -> None:
    reader, children = PASSING[name]()
    model = norm_then(reader, **children)
    if name == "einsum":
        model.lin.bias = None
    new, report = fold_tokens(model)
    assert_all(report, 1)
    if name == "einsum":  # there is no bias
        assert shift_stays(new.norm)
    else:
        assert_neutral(new.norm)


def test_only_the_scale_passes_where_tokens_are_masked() -> None:
    def masked(m: Any, x: Tensor) -> Tensor:
        return m.lin(m.norm(x).masked_fill(x[..., :1] > 0, 0.0))

    model = fill_all(Net(masked, norm=nn.LayerNorm(WIDTH), lin=nn.Linear(WIDTH, 3)))
    new, report = fold_tokens(model)
    assert_all(report, 1)
    assert shift_stays(new.norm)
    assert torch.equal(new.lin.bias, model.lin.bias)


def test_token_mixing_without_bias_passes_the_affine() -> None:
    model = norm_then(
        lambda m, y: m.lin(m.mix(y.mT).mT),
        mix=nn.Linear(5, 4, bias=False),
        lin=nn.Linear(WIDTH, 3),
    )
    _, report = fold(model, TOKENS)
    assert find_site(report, "norm").status in ("exact", "refused")


# Readers that cannot take it


REFUSING: dict[str, Any] = {
    "output": lambda: (lambda m, y: y, {}),
    "output beside a linear": lambda: (lambda m, y: (m.lin(y), y), {"lin": nn.Linear(WIDTH, 3)}),
    "activation": lambda: (lambda m, y: m.lin(F.gelu(y)), {"lin": nn.Linear(WIDTH, 3)}),
    "activation beside a linear": lambda: (
        lambda m, y: m.lin(y).sum() + y.tanh(),
        {"lin": nn.Linear(WIDTH, 3)},
    ),
    "skip": lambda: (lambda m, y: y + m.lin(y), {"lin": nn.Linear(WIDTH, WIDTH)}),
    "square": lambda: (lambda m, y: m.lin(y * y), {"lin": nn.Linear(WIDTH, WIDTH)}),
    "softmax": lambda: (lambda m, y: m.lin(y.softmax(-1)), {"lin": nn.Linear(WIDTH, 3)}),
    "layer norm": lambda: (
        lambda m, y: m.lin(m.second(y)),
        {"second": nn.LayerNorm(WIDTH, elementwise_affine=False), "lin": nn.Linear(WIDTH, 3)},
    ),
    "group norm": lambda: (
        lambda m, y: m.second(y.mT),
        {"second": nn.GroupNorm(1, WIDTH)},
    ),
    "max over tokens": lambda: (lambda m, y: m.lin(y.amax(1)), {"lin": nn.Linear(WIDTH, 3)}),
    "sum over channels": lambda: (
        lambda m, y: m.lin(y) + y.sum(-1, keepdim=True),
        {"lin": nn.Linear(WIDTH, 3)},
    ),
    "weight norm": lambda: (
        lambda m, y: m.lin(y),
        {"lin": parametrizations.weight_norm(nn.Linear(WIDTH, 3))},
    ),
}


@pytest.mark.parametrize("name", REFUSING)
def test_reader_that_is_not_linear_keeps_the_affine(name: str) -> None:
    reader, children = REFUSING[name]()
    model = fill_all(Net(lambda m, x: reader(m, m.norm(x)), norm=nn.LayerNorm(WIDTH), **children))
    new, report = fold_tokens(model)
    assert find_site(report, "norm").status == "refused", statuses(report)
    assert_state_equal(new, model.state_dict())
    expected = {
        "output": ("output",),
        "output beside a linear": ("output",),
        "weight norm": ("parametrised",),
        "layer norm": ("norm-reader", "op", "other-reader"),
    }
    assert_refused(report, "norm", *expected.get(name, ()))


def test_pruned_reader_is_refused() -> None:
    model = norm_then(lambda m, y: m.lin(y), lin=nn.Linear(WIDTH, 3))
    with torch.no_grad():  # a weight with a graph cannot be copied
        prune.random_unstructured(model.lin, "weight", 0.5)
    _, report = fold_tokens(model)
    assert_refused(report, "norm", "parametrised", "hook", "op")


def test_reader_used_for_something_else_too_is_refused() -> None:
    model = norm_then(lambda m, y: m.lin(y) + m.lin(y * 0 + 1), lin=nn.Linear(WIDTH, 3))
    _, report = fold_tokens(model)
    assert find_site(report, "norm").status == "refused"
    other = fill_all(
        Net(
            lambda m, x: m.lin(m.norm(x)) + m.lin(x),
            norm=nn.LayerNorm(WIDTH),
            lin=nn.Linear(WIDTH, 3),
        )
    )
    _, report = fold_tokens(other)
    assert_refused(report, "norm", "shared", "input")


def test_reader_called_twice_with_the_same_norm_is_folded_once() -> None:
    model = norm_then(lambda m, y: m.lin(y) + 2 * m.lin(y.flip(1)), lin=nn.Linear(WIDTH, 3))
    new, report = fold_tokens(model)
    assert_all(report, 1)
    used = model.norm.weight != 0
    expected = (model.lin.weight * model.norm.weight)[:, used]
    assert relative_error(expected, new.lin.weight[:, used]) < 1e-15


def test_reader_of_two_norms_is_not_folded_twice() -> None:
    """The scale of one may go into the reader, if the other's makes up for it."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(m.a(x)) + m.lin(m.b(x))

    model = Net(forward, a=nn.LayerNorm(WIDTH), b=nn.LayerNorm(WIDTH), lin=nn.Linear(WIDTH, 3))
    _, report = fold_tokens(fill_all(model))
    assert set(statuses(report).values()) != {"exact"}


def test_sum_of_two_norms_is_right() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(m.a(x) + m.b(x))

    model = Net(forward, a=nn.LayerNorm(WIDTH), b=nn.LayerNorm(WIDTH), lin=nn.Linear(WIDTH, 3))
    fold_tokens(fill_all(model))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norm_called_twice_is_folded_into_all_of_its_readers(norm: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(m.norm(x)) + m.b(m.norm(x * 2 + 1))

    model = Net(forward, norm=norm(WIDTH), a=nn.Linear(WIDTH, 3), b=nn.Linear(WIDTH, 3))
    new, report = fold_tokens(fill_all(model))
    assert_all(report, 1)
    assert_neutral(new.norm)


def test_norm_called_twice_stays_if_one_call_cannot_be_folded() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.a(m.norm(x)) + m.b(m.norm(x * 2 + 1).tanh())

    model = Net(forward, norm=nn.LayerNorm(WIDTH), a=nn.Linear(WIDTH, 3), b=nn.Linear(WIDTH, 3))
    _, report = fold_tokens(fill_all(model))
    assert find_site(report, "norm").status == "refused"


def test_two_norms_that_share_their_scale_are_folded_together_or_not_at_all() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(m.a(x)) + m.b(x)

    model = Net(forward, a=nn.LayerNorm(WIDTH), b=nn.LayerNorm(WIDTH), lin=nn.Linear(WIDTH, WIDTH))
    model.b.weight = model.a.weight
    new, report = fold_tokens(fill_all(model))
    assert find_site(report, "b").status == "refused"
    assert torch.equal(new.b.weight, model.b.weight)


@pytest.mark.parametrize("place", ["norm", "lin"])
@pytest.mark.parametrize("kind", ["forward", "pre"])
def test_hook_that_would_see_another_value_keeps_the_affine(place: str, kind: str) -> None:
    model = norm_then(lambda m, y: m.lin(y), lin=nn.Linear(WIDTH, 3))
    module = model.get_submodule(place)
    if kind == "forward":
        module.register_forward_hook(lambda m, a, out: None)
    else:
        module.register_forward_pre_hook(lambda m, a: None)
    _, report = fold_tokens(model)
    if (place, kind) != ("norm", "pre"):  # a forward hook sees the inputs too
        assert_refused(report, "norm", "hook")


def test_norm_that_is_never_called_is_refused() -> None:
    model = norm_then(lambda m, y: m.lin(y), lin=nn.Linear(WIDTH, 3), idle=nn.LayerNorm(WIDTH))
    _, report = fold_tokens(model)
    assert_refused(report, "idle", "not-called")
    assert find_site(report, "norm").status == "exact"


def test_functional_norm_has_a_row_or_is_left_alone() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.lin(F.layer_norm(x, (WIDTH,), m.gamma, m.beta))

    model = Net(forward, lin=nn.Linear(WIDTH, 3))
    model.gamma, model.beta = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
    _, report = fold_tokens(fill_all(model))
    assert [s.reason for s in report.sites] in ([], ["functional"], [None])


def test_branch_on_data_is_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return m.lin(y) if x.mean() > 0 else y[..., :3]

    model = fill_all(Net(forward, norm=nn.LayerNorm(WIDTH), lin=nn.Linear(WIDTH, 3)))
    _, report = fold(model, TOKENS.abs(), others=((-TOKENS.abs(),),))
    assert_refused(report, "norm", "data-dependent")


def test_value_that_is_written_to_is_right() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        y[:, :2].add_(1.0)
        return m.lin(y)

    model = fill_all(Net(forward, norm=nn.LayerNorm(WIDTH), lin=nn.Linear(WIDTH, 3)))
    _, report = fold_tokens(model)
    assert find_site(report, "norm").status == "refused"


class OwnLinear(nn.Linear):
    """A linear whose forward does not look for a bias that was not there at first."""

    def forward(self, input: Tensor) -> Tensor:
        return input @ self.weight.T


def test_bias_is_not_made_where_the_forward_would_not_use_it() -> None:
    model = norm_then(lambda m, y: m.lin(y), lin=OwnLinear(WIDTH, 3, bias=False))
    new, report = fold_tokens(model)
    assert_all(report, 1)
    assert shift_stays(new.norm)
    assert new.lin.bias is None


# Whole models by hand


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, OffsetNorm])
@pytest.mark.parametrize("bias", [True, False])
def test_pre_norm_transformer_is_folded_whole(norm: Any, bias: bool) -> None:
    model = fill_all(Language(norm, bias=bias))
    new, report = fold(model, IDS, others=OTHER_IDS)
    assert_all(report, 5)
    for site in report.sites:
        assert_neutral(new.get_submodule(site.name), offset=norm is OffsetNorm)
    assert torch.equal(new.tokens.weight, model.tokens.weight)


def test_post_norm_transformer_is_refused() -> None:
    model = fill_all(nn.Sequential(PostNorm(), PostNorm(), nn.Linear(WIDTH, 3)))
    _, report = fold_tokens(model)
    found = statuses(report)
    assert found.pop("1.norm2") == "exact"  # it is read by the head alone
    assert "exact" not in found.values()


def test_norms_on_the_outputs_of_branches_stay() -> None:
    class Sandwich(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.mlp, self.after = nn.RMSNorm(WIDTH), MLP(), nn.RMSNorm(WIDTH)
            self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.after(self.mlp(self.before(x)))
            return self.head(self.norm(x))

    new, report = fold_tokens(fill_all(Sandwich()))
    assert {n: s == "exact" for n, s in statuses(report).items()} == {
        "before": True,
        "after": False,
        "norm": True,
    }
    assert_neutral(new.before)


def test_one_norm_that_feeds_attention_and_mlp() -> None:
    model = norm_then(lambda m, y: m.a(y) + m.mlp(y), a=Attention(), mlp=MLP())
    new, report = fold_tokens(model)
    assert_all(report, 1)
    gamma = model.norm.weight
    for name in ("a.q", "a.k", "a.v", "mlp.up"):
        old, now = model.get_submodule(name), new.get_submodule(name)
        assert relative_error(old.weight * gamma, now.weight) < 1e-15


@pytest.mark.parametrize("bias", [True, False])
def test_torch_attention_takes_the_affine(bias: bool) -> None:
    model = norm_then(
        lambda m, y: m.a(y, y, y, need_weights=False)[0],
        a=nn.MultiheadAttention(WIDTH, 2, bias=bias, batch_first=True),
    )
    new, report = fold_tokens(model)
    assert_all(report, 1)
    assert shift_stays(new.norm) is not bias
    assert list(new.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_torch_attention_with_extra_keys_is_right(option: str) -> None:
    model = norm_then(
        lambda m, y: m.a(y, y, y, need_weights=False)[0],
        a=nn.MultiheadAttention(WIDTH, 2, batch_first=True, **{option: True}),
    )
    _, report = fold_tokens(model)
    assert_all(report, 1)


def test_encoder_norm_is_read_by_keys_and_values_of_every_decoder_layer() -> None:
    class Both(nn.Module):
        def __init__(self, expose: bool) -> None:
            super().__init__()
            self.norm, self.layers = nn.LayerNorm(WIDTH), nn.ModuleList()
            self.layers.extend(Attention(causal=False) for _ in range(3))
            self.expose = expose

        def forward(self, memory: Tensor, y: Tensor) -> Any:
            memory = self.norm(memory)
            for layer in self.layers:
                y = y + layer(y, memory)
            return (y, memory) if self.expose else y

    pair = (TOKENS, random_input(2, 4, WIDTH, seed=9))
    model = fill_all(Both(expose=False))
    new, report = fold(model, *pair)
    assert_all(report, 1)
    for old, now in zip(model.layers, new.layers, strict=True):
        assert torch.equal(old.q.weight, now.q.weight)
        for name in ("k", "v"):
            expected = old.get_submodule(name).weight * model.norm.weight
            assert relative_error(expected, now.get_submodule(name).weight) < 1e-15
    _, report = fold(fill_all(Both(expose=True)), *pair)
    assert_refused(report, "norm", "output")


class Mixture(nn.Module):
    """Experts with fused weights, a router that is no ``nn.Linear``, a shared expert and gate."""

    def __init__(self, *, bias: bool = True, raw_router: bool = False) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.zeros(4, WIDTH))
        self.router_bias = nn.Parameter(torch.zeros(4)) if bias else None
        self.up = nn.Parameter(torch.zeros(4, WIDTH, 6))
        self.up_bias = nn.Parameter(torch.zeros(4, 1, 6)) if bias else None
        self.down = nn.Parameter(torch.zeros(4, 6, WIDTH))
        self.shared, self.shared_gate = MLP(bias, gated=True), nn.Linear(WIDTH, 1, bias=bias)
        self.raw_router = raw_router

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        if self.raw_router:
            scores = flat.tanh() @ self.router.T
        else:
            scores = F.linear(flat, self.router, self.router_bias)
        weights, chosen = scores.softmax(-1).topk(2)
        weights = torch.zeros_like(scores).scatter(-1, chosen, weights)
        hidden = torch.bmm(flat.expand(4, -1, -1), self.up)
        hidden = F.silu(hidden if self.up_bias is None else hidden + self.up_bias)
        routed = (torch.bmm(hidden, self.down) * weights.T.unsqueeze(-1)).sum(0)
        out = routed + self.shared_gate(flat).sigmoid() * self.shared(flat)
        return out.view_as(x)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_router_and_every_expert_take_the_affine(norm: Any) -> None:
    model = norm_then(lambda m, y: m.experts(y), norm, experts=Mixture())
    new, report = fold_tokens(model)
    assert_all(report, 1)
    gamma = model.norm.weight
    old, now = model.experts, new.experts
    assert relative_error(old.router * gamma, now.router) < 1e-15
    assert relative_error(old.up * gamma[:, None], now.up) < 1e-15
    assert torch.equal(old.down, now.down)
    assert relative_error(old.shared_gate.weight * gamma, now.shared_gate.weight) < 1e-15


def test_experts_are_not_scaled_where_the_router_cannot_be() -> None:
    model = norm_then(lambda m, y: m.experts(y), nn.RMSNorm, experts=Mixture(raw_router=True))
    new, report = fold_tokens(model)
    assert find_site(report, "norm").status == "refused"
    assert_state_equal(new, model.state_dict())


def test_experts_without_biases_take_the_scale() -> None:
    model = norm_then(lambda m, y: m.experts(y), experts=Mixture(bias=False))
    _, report = fold_tokens(model)
    assert find_site(report, "norm").status in ("exact", "refused")
    _, report = fold_tokens(model, scale_only=True)
    assert_all(report, 1)


# A key without a bias: what a softmax over keys does not see


FORGIVING = ("plain", "alibi")
SEEING = ("rotary", "sink", "softcap", "sigmoid", "relative", "prefix")


@pytest.mark.parametrize("logits", FORGIVING)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_shift_of_the_keys_vanishes_in_a_softmax(logits: str, causal: bool, own: bool) -> None:
    """``own``: a projection whose class would not use a bias made for it."""
    attention = Attention(k_bias=False, logits=logits, causal=causal)
    if own:
        attention.k = OwnLinear(WIDTH, WIDTH, bias=False)
    model = norm_then(lambda m, y: m.a(y), a=attention)
    new, report = fold_tokens(model)
    assert_all(report, 1)
    assert new.a.k.bias is None
    assert list(new.state_dict()) == list(model.state_dict())


@pytest.mark.parametrize("logits", SEEING)
@pytest.mark.parametrize("own", [True, False])
def test_shift_of_the_keys_is_not_dropped_where_it_is_seen(logits: str, own: bool) -> None:
    causal = logits != "prefix"
    attention = Attention(k_bias=False, logits=logits, causal=causal)
    if own:
        attention.k = OwnLinear(WIDTH, WIDTH, bias=False)
    model = norm_then(lambda m, y: m.a(y), a=attention)
    new, report = fold_tokens(model)
    assert_all(report, 1)
    made = new.a.k.bias is not None
    assert not (made and own)
    if logits == "prefix":  # the stored keys may be shifted back instead
        made = made or not torch.equal(new.a.prefix, model.a.prefix)
    assert shift_stays(new.norm) or made


@pytest.mark.parametrize("width", ["per_head", "full_width"])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_shift_of_the_keys_is_not_dropped_in_front_of_a_norm(width: str, norm: Any) -> None:
    model = norm_then(lambda m, y: m.a(y), a=Attention(k_bias=False, **{width: norm}))
    new, report = fold_tokens(model)
    assert find_site(report, "norm").status == "exact"
    assert shift_stays(new.norm) or new.a.k.bias is not None


def test_shift_of_keys_that_are_returned_is_not_dropped() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.norm(x)
        return m.a(y), m.a.k(y)

    model = fill_all(Net(forward, norm=nn.LayerNorm(WIDTH), a=Attention(k_bias=False)))
    new, report = fold_tokens(model)
    assert find_site(report, "norm").status == "exact"
    assert shift_stays(new.norm) or new.a.k.bias is not None


def test_shift_of_keys_vanishes_in_fused_attention() -> None:
    class Fused(Attention):
        def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
            q, k, v = self.project(x, x)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(out.transpose(-2, -3).flatten(-2))

    model = norm_then(lambda m, y: m.a(y), a=Fused(k_bias=False))
    new, report = fold_tokens(model)
    assert_all(report, 1)
    assert new.a.k.bias is None


def test_keys_without_bias_that_are_values_too_are_right() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        k = m.k(y)
        return (m.q(y) @ k.mT).softmax(-1) @ k

    model = fill_all(
        Net(
            forward,
            norm=nn.LayerNorm(WIDTH),
            q=nn.Linear(WIDTH, WIDTH),
            k=nn.Linear(WIDTH, WIDTH, bias=False),
        )
    )
    new, report = fold_tokens(model)
    assert find_site(report, "norm").status == "exact"
    assert shift_stays(new.norm) or new.k.bias is not None


def test_softmax_over_queries_sees_the_shift_of_the_keys() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.norm(x)
        return (m.q(y) @ m.k(y).mT).softmax(-2) @ m.v(y)

    model = fill_all(
        Net(
            forward,
            norm=nn.LayerNorm(WIDTH),
            q=nn.Linear(WIDTH, WIDTH),
            k=nn.Linear(WIDTH, WIDTH, bias=False),
            v=nn.Linear(WIDTH, WIDTH),
        )
    )
    new, report = fold_tokens(model)
    assert find_site(report, "norm").status == "exact"
    assert shift_stays(new.norm) or new.k.bias is not None


# Norms of queries and keys


@pytest.mark.parametrize("width", ["per_head", "full_width"])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
@pytest.mark.parametrize("logits", ["plain", "rotary"])
def test_norms_of_queries_and_keys_are_right(width: str, norm: Any, logits: str) -> None:
    model = fill_all(Attention(logits=logits, **{width: norm}))
    _, report = fold_tokens(model)
    assert len(report.sites) == 2
    if logits == "rotary":
        assert "exact" not in statuses(report).values()


# Tied heads


def test_tied_head_keeps_the_final_norm_and_the_table() -> None:
    model = fill_all(Language(tied=True))
    new, report = fold(model, IDS, others=OTHER_IDS)
    found = statuses(report)
    assert found.pop("norm") == "shared"
    assert set(found.values()) == {"exact"}
    assert new.head.weight is new.tokens.weight
    assert torch.equal(new.tokens.weight, model.tokens.weight)
    assert torch.equal(new.norm.weight, model.norm.weight)


@pytest.mark.parametrize("scale_only", [False, True])
def test_untying_lets_the_head_take_the_final_norm(scale_only: bool) -> None:
    model = fill_all(Language(tied=True, head_bias=True))
    new, report = fold(model, IDS, others=OTHER_IDS, untie=True, scale_only=scale_only)
    assert_all(report, 5)
    assert new.head.weight is not new.tokens.weight
    assert torch.equal(new.tokens.weight, model.tokens.weight)
    if not scale_only:
        assert relative_error(model.head.weight * model.norm.weight, new.head.weight) < 1e-15
    assert model.head.weight is model.tokens.weight


def test_untie_where_no_table_is_shared_changes_nothing_more() -> None:
    model = fill_all(Language())
    assert_state_equal(fold(model, IDS, untie=True)[0], fold(model, IDS)[0].state_dict())


@pytest.mark.parametrize("family", ["gemma", "cohere"])
def test_flag_of_the_config_follows_the_untying(family: str, tmp_path: Any) -> None:
    model = library_model(family)
    inputs = library_inputs(family)
    new, report = fold(model, inputs, untie=True)
    assert_all(report)
    assert not new.config.tie_word_embeddings
    assert model.config.tie_word_embeddings
    assert torch.equal(new.get_input_embeddings().weight, model.get_input_embeddings().weight)
    new.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert not again.config.tie_word_embeddings
    assert_equal_outputs(model, again, inputs)


@pytest.mark.parametrize("on_disk", [False, True])
def test_table_that_goes_by_the_name_of_the_head_is_untied(on_disk: bool, tmp_path: Any) -> None:
    model, inputs = library_model("roberta"), library_inputs("roberta")
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert table.weight is head.weight
    assert next(n for n, p in model.named_parameters() if p is head.weight).startswith("lm_head")
    new, report = fold(model, inputs, untie=True)
    assert statuses(report)["lm_head.layer_norm"] == "exact"
    scaled = head.weight * model.lm_head.layer_norm.weight
    assert relative_error(scaled, new.get_output_embeddings().weight) < 1e-15
    assert torch.equal(new.get_input_embeddings().weight, table.weight)
    assert not new.config.tie_word_embeddings
    if on_disk:
        model.save_pretrained(tmp_path / "old")
        plan = ns.plan_fold_affine(model, inputs, untie=True)
        (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        apply_to_directory(tmp_path / "plan.json", tmp_path / "old", tmp_path / "new")
    else:
        ns.save(new, tmp_path / "new", report)
    again: Any = ns.load(tmp_path / "new")
    assert not again.config.tie_word_embeddings
    assert again.get_input_embeddings().weight is not again.get_output_embeddings().weight
    assert_equal_outputs(model, again, inputs)


def test_untied_head_that_comes_first_is_loaded_by_the_unchanged_class(tmp_path: Any) -> None:
    model, inputs = library_model("roberta"), library_inputs("roberta")
    new, report = fold(model, inputs, untie=True, scale_only=True)
    assert statuses(report)["lm_head.layer_norm"] == "exact"
    new.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float64)
    assert_equal_outputs(model, again, inputs)


class HeadFirst(nn.Module):
    """A tied language model whose output layer comes before both of its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.first = nn.Embedding(VOCABULARY, WIDTH)
        self.second = nn.Embedding(VOCABULARY, WIDTH)
        self.first.weight = self.second.weight = self.head.weight
        self.mlp, self.norm = MLP(), nn.LayerNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids) + self.second(ids.flip(-1))
        return self.head(self.norm(x + self.mlp(x)))


def test_tables_stay_tied_to_each_other_when_the_head_before_them_is_untied() -> None:
    model = fill_all(HeadFirst())
    new, report = fold(model, IDS, others=OTHER_IDS, untie=True)
    assert_all(report, 1)
    assert new.first.weight is new.second.weight
    assert torch.equal(new.first.weight, model.first.weight)
    assert relative_error(model.head.weight * model.norm.weight, new.head.weight) < 1e-15


# Models of the transformers library

# Family: patterns of the norms that stay, and how many are folded.
EXPECTED: dict[str, tuple[int, tuple[str, ...]]] = {
    "gpt2": (4, ("ln_f",)),
    "bigcode": (4, ("ln_f",)),
    "opt": (5, ()),
    "llama": (5, ()),
    "gemma": (4, ("model.norm",)),
    "gemma2": (
        4,
        ("model.norm", "post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "mixtral": (5, ()),
    "qwen2_moe": (5, ()),
    "deepseek_v3": (9, ()),
    "cohere": (2, ("model.norm",)),
    "olmo2": (1, ("layernorm", "q_norm", "k_norm")),
    "bert": (1, ("embeddings", "attention.output", "layer.0.output", "transform")),
    "bert_base": (0, ("",)),
    "bloom": (4, ("word_embeddings_layernorm", "ln_f")),
    "falcon_bias": (2, ("ln_f",)),
    "mpt": (4, ("norm_f",)),
    "nemotron": (5, ()),
    "neox": (5, ()),
    "stablelm": (5, ()),
    "biogpt": (4, ("biogpt.layer_norm",)),
    "whisper": (10, ("encoder.layer_norm", "decoder.layer_norm")),
    "mbart": (10, ("layernorm_embedding", "encoder.layer_norm", "decoder.layer_norm")),
    "blenderbot": (10, ("encoder.layer_norm", "decoder.layer_norm")),
    "vit": (5, ()),
    "dinov2": (4, ("layernorm",)),
    "clip": (9, ("final_layer_norm", "pre_layrnorm")),
}


@pytest.mark.parametrize("family", EXPECTED)
def test_library_model_is_folded_but_for_these(family: str) -> None:
    count, stay = EXPECTED[family]
    model = library_model(family)
    others = ((library_inputs(family, seed=8, batch=1, length=4),),)
    new, report = fold(model, library_inputs(family), others=others)
    found = statuses(report)
    kept = {n: s for n, s in found.items() if s != "exact"}
    assert len(found) - len(kept) == count, found
    assert all(name.endswith(stay) or any(p in name for p in stay) for name in kept), kept
    offset = family in ("gemma", "gemma2", "nemotron")
    for name in set(found) - set(kept):
        assert_neutral(new.get_submodule(name), offset=offset)
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            assert torch.equal(module.weight, new.get_submodule(name).weight), name


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "mixtral", "qwen2_moe", "deepseek_v3", "mpt", "falcon", "gpt2"]
)
def test_scale_only_result_loads_into_the_unchanged_class(family: str) -> None:
    model = library_model(family)
    inputs = library_inputs(family)
    new, report = fold(model, inputs, scale_only=True)
    assert "exact" in statuses(report).values()
    fresh = type(model)(new.config).double().eval()
    if family in EXPERTS:
        fresh.set_experts_implementation("batched_mm")
    fresh.load_state_dict(new.state_dict(), strict=True)
    assert_equal_outputs(model, fresh, inputs)


def test_falcon_linear_gets_no_bias_that_it_would_not_use() -> None:
    model = library_model("falcon")
    new, report = fold(model, library_inputs("falcon"))
    assert statuses(report)["transformer.h.0.input_layernorm"] == "exact"
    assert shift_stays(new.transformer.h[0].input_layernorm)
    assert list(new.state_dict()) == list(model.state_dict())


def test_whisper_needs_no_bias_for_its_keys() -> None:
    model = library_model("whisper")
    new, report = fold(model, library_inputs("whisper"))
    assert list(new.state_dict()) == list(model.state_dict())
    assert statuses(report)["model.encoder.layers.0.self_attn_layer_norm"] == "exact"


@pytest.mark.parametrize("cached", [True, False])
def test_keys_in_a_cache_are_not_shifted(cached: bool) -> None:
    """Caches are part of the output where the call returns them."""
    inputs = {**library_inputs("whisper"), "use_cache": cached}
    fold(library_model("whisper"), inputs)


@pytest.mark.parametrize("family", ["whisper", "mbart", "blenderbot"])
def test_encoder_norm_goes_into_the_decoder_where_it_is_not_returned(family: str) -> None:
    model = LogitsOnly(library_model(family))
    new, report = fold(model, library_inputs(family))
    assert statuses(report)["model.model.encoder.layer_norm"] == "exact"
    layer, old = new.model.model.decoder.layers, model.model.model.decoder.layers
    gamma = model.model.model.encoder.layer_norm.weight
    for index in range(2):
        for name in ("k_proj", "v_proj"):
            before = getattr(old[index].encoder_attn, name).weight
            now = getattr(layer[index].encoder_attn, name).weight
            assert relative_error(before * gamma, now) < 1e-14
    assert_neutral(new.model.model.encoder.layer_norm)


@pytest.mark.parametrize("family", ["nemotron", "stablelm"])
def test_keys_in_front_of_rotary_get_a_bias(family: str) -> None:
    new, report = fold(library_model(family), library_inputs(family))
    assert_all(report, 5)
    assert new.model.layers[0].self_attn.k_proj.bias is not None


def test_offset_of_gemma_is_added_in_float64() -> None:
    model = library_model("gemma").to(torch.bfloat16)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] = 15.8125
    new, report = ns.fold_affine(model, library_inputs("gemma"), verify=False)
    site = find_site(report, "model.layers.0.input_layernorm")
    assert site.status == "exact"
    scale = 1 + model.model.layers[0].input_layernorm.weight.double()
    expected = (model.model.layers[0].self_attn.q_proj.weight.double() * scale).bfloat16()
    assert torch.equal(new.model.layers[0].self_attn.q_proj.weight, expected)


def test_every_family_has_its_expectation() -> None:
    assert set(EXPECTED) == set(LIBRARY) - {"falcon", "roberta"}


# Selection, errors, precision


def test_where_selects() -> None:
    model = fill_all(Language())
    new, report = fold(model, IDS, where=["blocks.0.*"])
    found = statuses(report)
    assert {n for n, s in found.items() if s == "exact"} == {"blocks.0.norm1", "blocks.0.norm2"}
    assert {s for n, s in found.items() if not n.startswith("blocks.0")} == {"where"}
    assert torch.equal(new.blocks[1].norm1.weight, model.blocks[1].norm1.weight)


def test_strict_raises_and_changes_nothing() -> None:
    model = fill_all(Language(tied=True))
    state = state_copy(model)
    with pytest.raises(ns.RefusedError):
        ns.fold_affine(model, IDS, strict=True, inplace=True)
    assert_state_equal(model, state)


def test_in_place_changes_the_model_itself() -> None:
    model = fill_all(Language())
    expected = call64(model, IDS)
    new, report = ns.fold_affine(model, IDS, inplace=True)
    assert new is model
    assert_all(report, 5)
    assert report.verification is not None
    assert report.verification.passed
    assert relative_error(expected, call64(model, IDS)) < EXACT


@pytest.mark.parametrize("inplace", [False, True])
def test_weight_that_overflows_leaves_the_model_as_it_was(inplace: bool) -> None:
    model = fill_all(Language()).half()
    with torch.no_grad():
        model.blocks[1].norm2.weight[1] = 300.0
        model.blocks[1].mlp.up.weight[0, 1] = 300.0
    state = state_copy(model)
    with pytest.raises(ns.NormswapError, match="float16"):
        ns.fold_affine(model, IDS, inplace=inplace)
    assert_state_equal(model, state)
    assert all(isinstance(m, (nn.LayerNorm)) for n, m in model.named_modules() if "norm" in n)


@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_bf16_weights_are_computed_in_float64_and_cast_once(norm: Any) -> None:
    model = fill_all(Language(norm)).to(torch.bfloat16)
    new, report = ns.fold_affine(model, IDS)
    assert_all(report, 5)
    up, old = model.blocks[0].mlp.up, model.blocks[0].norm2
    expected = (up.weight.double() * old.weight.double()).bfloat16()
    assert torch.equal(new.blocks[0].mlp.up.weight, expected)
    if norm is nn.LayerNorm:
        shift = up.weight.double() @ old.bias.double() + up.bias.double()
        assert torch.equal(new.blocks[0].mlp.up.bias, shift.bfloat16())
    check = report.verification
    assert check is not None
    assert check.passed
    assert {r.dtype for r in check.runs if not r.skipped} >= {"bfloat16", "float64"}


def test_dtype_mode_and_gradients_stay_as_they_were() -> None:
    model = fill_all(Language(bias=False)).float()
    model.blocks[0].mlp.up.weight.requires_grad_(False)
    model.blocks[1].train()
    new, report = ns.fold_affine(model, IDS, verify=False)
    assert_all(report, 5)
    for name, parameter in model.named_parameters():
        now = new.get_parameter(name)
        assert (now.dtype, now.requires_grad) == (parameter.dtype, parameter.requires_grad), name
    assert {p.dtype for p in new.parameters()} == {torch.float32}
    assert [m.training for m in new.modules()] == [m.training for m in model.modules()]


def test_hooks_and_sharing_stay() -> None:
    model = norm_then(lambda m, y: m.a(y) + m.b(y), a=MLP(), b=MLP())
    model.a.down = model.b.down
    model.a.down.register_forward_hook(lambda m, a, out: None)
    new, report = fold_tokens(model)
    assert_all(report, 1)
    assert new.a.down is new.b.down
    assert len(new.b.down._forward_hooks) == 1


# Plans and results


def test_plan_on_the_meta_device_is_the_same() -> None:
    model = fill_all(Language(nn.RMSNorm))
    real = ns.plan_fold_affine(model, IDS)
    with torch.device("meta"):
        empty = Language(nn.RMSNorm).double().eval()
    plan = ns.plan_fold_affine(empty, IDS.to("meta"))
    assert [(s.name, s.status) for s in plan.sites] == [(s.name, s.status) for s in real.sites]
    assert_equal_outputs(model, plan.apply(model), IDS)


@pytest.mark.parametrize("bias", [True, False])
def test_plan_survives_json(bias: bool) -> None:
    model = fill_all(Language(bias=bias))
    plan = ns.plan_fold_affine(model, IDS)
    again = ns.Plan.from_json(plan.to_json()).apply(model)
    assert_state_equal(again, plan.apply(model).state_dict())
    assert_equal_outputs(model, again, IDS)


def test_result_can_be_copied_pickled_and_exported() -> None:
    model = fill_all(Language(bias=False))
    new, report = fold(model, IDS)
    assert_all(report, 5)
    for again in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert_equal_outputs(model, again, IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.export.export(new, (IDS,)).module()(IDS)
    assert relative_error(run(model, IDS), found) < EXACT


def test_report_names_what_was_folded_where() -> None:
    model = fill_all(Language())
    _, report = ns.fold_affine(model, IDS)
    assert report.rewrite == "fold_affine"
    rows = {row.target: row for row in report.mapping}
    assert "blocks.0.norm1.weight" in rows["blocks.0.attention.q.weight"].sources
    assert "blocks.0.norm1.bias" in rows["blocks.0.attention.q.bias"].sources
    assert ns.Report.from_json(report.to_json()).sites == report.sites
    assert "folded" in str(report)


def test_undo_brings_the_old_model_back_or_says_that_it_cannot() -> None:
    model = fill_all(Language())
    new, report = fold(model, IDS)
    state = state_copy(new)
    try:
        again = report.undo(new)
    except ns.NormswapError:
        assert_state_equal(new, state)
    else:
        assert_equal_outputs(model, again, IDS)


@pytest.mark.parametrize("tied", [False, True])
def test_other_batches_and_lengths_are_right(tied: bool) -> None:
    model = fill_all(Language(tied=tied))
    new, _ = fold(model, IDS)
    for shape in ((1, 1), (4, 2), (1, 12)):
        assert_equal_outputs(model, new, token_ids(*shape, seed=3, below=VOCABULARY))
