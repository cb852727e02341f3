"""Finding and swapping norms: faults that users of other tools reported, as small models.

Parameters and statistics are random, scales have negative and zero entries, and results are
compared in float64 with the norms written out by hand.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    BatchNormAct,
    Net,
    assert_refused,
    assert_same,
    assert_state_equal,
    find_site,
    random_input,
    randomise,
    relative_error,
    run,
    signed,
    state_copy,
)
from swapping import (
    EXACT,
    IMAGE,
    TOKENS,
    ChannelsFirst,
    GatedNorm,
    LlamaNorm,
    OffsetLayerNorm,
    OffsetNorm,
    PlainLayerNorm,
    assert_close,
    assert_status,
    channels,
    fill,
    fixed,
    group,
    layer,
    rms,
    run64,
    swap,
)
from torch import Tensor, nn

import normswap as ns
from normswap import norms


def name_of(value: Any) -> str:
    """A class or a text as the name of a test."""
    return value if isinstance(value, str) else f"{value.__module__.split('.')[0]}-{value.__name__}"


def tiny(name: str, **settings: Any) -> Any:
    """A small transformers model with random norms, in float64."""
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 40,
        "pad_token_id": 0,
        **settings,
    }
    config = getattr(transformers, f"{name}Config")(**sizes)
    return fill(getattr(transformers, f"{name}Model")(config))


IDS = torch.randint(1, 40, (2, 6), generator=torch.Generator().manual_seed(3))


# Replaced where it stands (vision#2391, pytorch#78744)


def test_norm_in_nested_sequentials_is_replaced_under_its_own_key() -> None:
    inner = nn.Sequential(nn.Sequential(nn.BatchNorm2d(8)), nn.ReLU())
    model = fill(nn.Sequential(nn.Conv2d(3, 8, 3), inner, nn.Sequential(nn.BatchNorm2d(8))))
    x = random_input(2, 3, 8, 8)
    new, report = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, x)
    assert_status(report, "approximate", "1.0.0", "2.0")
    assert [n for n, _ in new.named_modules()] == [n for n, _ in model.named_modules()]
    assert type(new[1][0][0]) is nn.GroupNorm
    old = model[1][0][0], model[2][0]
    y = F.relu(group(model[0](x), 4, old[0].weight, old[0].bias))
    assert_close(run(new, x), group(y, 4, old[1].weight, old[1].bias))


def test_container_of_one_norm_is_not_a_second_norm() -> None:
    model = fill(nn.Sequential(nn.Sequential(nn.LayerNorm(8))))
    ns.find_norms(model).expect_count(1)
    new, report = swap(model, {nn.LayerNorm: "rms"}, TOKENS, method="copy")
    assert [s.name for s in report.sites] == ["0.0"]
    old = model[0][0]
    assert_close(run(new, TOKENS), rms(TOKENS, old.weight, old.bias, 1e-5))


# What is not equivalent says so (GroupNorm-reproduce#2, lerobot#1887)


def test_pretrained_resnet_with_group_norms_is_reported_as_another_model() -> None:
    from normswap.demo import accuracy, load_heldout, load_network

    model, digits = load_network(), load_heldout()
    names = [n for n, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)]
    images = digits.images[:8]
    new, report = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, images, method="copy")
    assert [s.name for s in report.sites] == names
    assert report.counts == {"approximate": len(names)}
    assert all(s.error > 1e-3 for s in report.sites)
    drift = relative_error(run64(model, images), run64(new, images))
    assert drift > 0.05
    assert report.verification.level == "model"
    assert report.verification.max_rel == pytest.approx(drift, rel=1e-3)
    before, after = accuracy(model, digits), accuracy(new, digits)
    assert before > 0.95
    assert after < before - 0.05
    for name in names:
        old, norm = model.get_submodule(name), new.get_submodule(name)
        x = random_input(2, old.num_features, 4, 4)
        expected = group(x, norm.num_groups, old.weight.double(), old.bias.double())
        assert_close(run(copy.deepcopy(norm).double(), x), expected)


def test_swap_that_is_not_equivalent_is_refused_when_exactness_is_asked_for() -> None:
    model = fill(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    x = random_input(2, 3, 8, 8)
    new, report = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, x, method="exact")
    assert find_site(report, "1").reason == "not-equivalent"
    assert type(new[1]) is nn.BatchNorm2d
    assert_same(model, new, x, tol=1e-300)


def test_calibration_is_named_as_not_available() -> None:
    with pytest.raises(ns.NormswapError, match="calibrate"):
        ns.swap_norms(nn.Sequential(nn.LayerNorm(8)), {"layer": "rms"}, method="calibrate")


# The number of groups (opacus#390)


@pytest.mark.parametrize(
    ("width", "groups"),
    [(72, 36), (64, 32), (48, 24), (30, 15), (37, 1), (40, 20), (100, 25), (8, 4)],
)
def test_number_of_groups_is_the_nearest_divisor_and_is_reported(width: int, groups: int) -> None:
    """With two channels or more in a group: one alone is an InstanceNorm."""
    model = fill(nn.Sequential(nn.BatchNorm2d(width)))
    x = random_input(2, width, 3, 3)
    new, report = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, x)
    assert new[0].num_groups == groups
    assert f"{groups} groups" in find_site(report, "0").action
    assert_close(run(new, x), group(x, groups, model[0].weight, model[0].bias))


# An optimizer that was made before (opacus#432); more in test_optimizers.py


def test_optimizer_made_before_the_swap_trains_the_new_norms() -> None:
    model = fill(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ns.swap_norms(model, {nn.BatchNorm2d: nn.GroupNorm}, optimizer=optimizer, inplace=True)
    held = [p for g in optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in held} == {id(p) for p in model.parameters()}
    before = model[1].weight.detach().clone()
    model(random_input(2, 3, 8, 8)).square().sum().backward()
    optimizer.step()
    assert_close(model[1].weight, before - 0.1 * model[1].weight.grad)
    assert not torch.equal(model[1].weight, before)


# One module at several names (diffusion_policy#151)


def test_module_at_two_names_of_one_parent_stays_shared() -> None:
    norm = nn.BatchNorm2d(8)
    model = fill(Net(lambda m, x: m.a(x) + F.relu(m.b(x)), a=norm, b=norm))
    new, report = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, IMAGE)
    assert new.a is new.b
    assert type(new.a) is nn.GroupNorm
    (site,) = report.sites
    assert site.names == ("a", "b")
    y = group(IMAGE, 4, model.a.weight, model.a.bias)
    assert_close(run(new, IMAGE), y + F.relu(y))
    assert list(new.state_dict()) == ["a.weight", "a.bias", "b.weight", "b.bias"]


def test_module_at_two_names_across_parents_stays_shared() -> None:
    norm, outer = nn.LayerNorm(8), nn.Linear(8, 8)
    model = fill(nn.Sequential(nn.Sequential(norm, outer), nn.Sequential(nn.Sequential(norm))))
    new, report = swap(model, {nn.LayerNorm: "rms"}, TOKENS, method="copy")
    assert new[0][0] is new[1][0][0]
    assert report.sites[0].names == ("0.0", "1.0.0")
    y = rms(TOKENS, model[0][0].weight, model[0][0].bias, 1e-5)
    assert_close(run(new, TOKENS), rms(outer(y), model[0][0].weight, model[0][0].bias, 1e-5))


def test_shared_parent_of_a_norm_stays_shared() -> None:
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    model = fill(nn.Sequential(block, nn.GELU(), block))
    new, report = swap(model, {nn.LayerNorm: "rms"}, TOKENS, method="copy")
    assert new[0] is new[2]
    assert len(report.sites) == 1

    def by_hand(x: Tensor) -> Tensor:
        return block[1](rms(x, block[0].weight, block[0].bias, 1e-5))

    assert_close(run(new, TOKENS), by_hand(F.gelu(by_hand(TOKENS))))


# Modes (timm#2422, mmengine#1624)


def test_each_module_keeps_its_own_mode() -> None:
    model = fill(
        nn.Sequential(nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Sequential(nn.BatchNorm2d(8)))
    )
    model[0].train()
    model[1].train()
    new, _ = ns.swap_norms(model, {nn.BatchNorm2d: nn.GroupNorm})
    modes = [m.training for m in model.modules()]
    assert modes == [False, True, True, False, False]
    assert [m.training for m in new.modules()] == modes


def test_norm_in_training_mode_is_not_called_equal_to_its_frozen_form() -> None:
    """It normalises with the statistics of its batch now, which the frozen form never does."""
    model = fill(nn.Sequential(nn.BatchNorm2d(8)))
    model[0].train()
    expected = run(copy.deepcopy(model), IMAGE)
    new, report = ns.swap_norms(model, {nn.BatchNorm2d: "frozenbatch"})
    (site,) = report.sites
    assert site.status == "refused" or relative_error(expected, run(new, IMAGE)) > 1e-3
    assert site.status != "exact"


# Attributes that modelling code reads off a norm (Liger-Kernel#392, #764, #990)


@pytest.mark.parametrize("target", [nn.RMSNorm, norms.RMSNorm, "rms"], ids=name_of)
def test_attributes_that_the_model_reads_are_there_afterwards(target: Any) -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        scale = 1 + m.norm.variance_epsilon + m.norm.weight.shape[0] + len(m.norm.custom)
        return m.norm(x) * scale

    model = Net(forward, norm=LlamaNorm(8, 1e-3))
    model.norm.custom = "abc"
    model = fill(model)
    new, report = swap(model, {"rms": target}, TOKENS)
    assert_status(report, "exact", "norm")
    expected = rms(TOKENS, model.norm.weight, eps=1e-3) * (1 + 1e-3 + 8 + 3)
    assert_close(run(new, TOKENS), expected)


def test_attributes_of_a_layer_norm_are_there_afterwards() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        n = m.norm
        return n(x) * n.normalized_shape[0] + n.eps + n.bias.sum() + n.elementwise_affine

    model = fill(Net(forward, norm=nn.LayerNorm(8, eps=1e-3)))
    new, _ = swap(model, {nn.LayerNorm: "rms"}, TOKENS, method="copy")
    norm = model.norm
    expected = rms(TOKENS, norm.weight, norm.bias, 1e-3) * 8 + 1e-3 + norm.bias.sum() + 1
    assert_close(run(new, TOKENS), expected)


def test_attributes_of_a_batch_norm_are_there_afterwards() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.bn(x) * m.bn.num_features + m.bn.momentum + m.bn.affine

    model = fill(Net(forward, bn=nn.BatchNorm2d(8, momentum=0.25)))
    new, _ = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, IMAGE)
    expected = group(IMAGE, 4, model.bn.weight, model.bn.bias) * 8 + 0.25 + 1
    assert_close(run(new, IMAGE), expected)


# Norms of queries and keys (Liger-Kernel#1470)


def test_norms_of_queries_and_keys_are_found_and_swapped() -> None:
    model = tiny("Qwen3")
    sites = ns.find_norms(model)
    names = {s.name for s in sites.where("*.self_attn.[qk]_norm")}
    assert names == {f"layers.{i}.self_attn.{w}_norm" for i in (0, 1) for w in "qk"}
    sites.where(kind="rms").expect_count(9)
    new, report = swap(model, {"rms": nn.RMSNorm}, IDS)
    assert report.counts == {"exact": 9}
    assert sum(type(m) is nn.RMSNorm for m in new.modules()) == 9
    assert type(new.layers[1].self_attn.q_norm) is nn.RMSNorm
    before, after = run64(model, IDS), run64(new, IDS)
    assert_close(after.last_hidden_state, before.last_hidden_state, EXACT)


def test_norm_with_a_scale_for_each_head_is_right_or_refused() -> None:
    """Cohere: statistics over the last axis, a scale of two axes."""
    model = tiny("Cohere", use_qk_norm=True, eos_token_id=1)
    new, report = swap(model, {"layer": nn.LayerNorm}, IDS)
    assert_status(report, "exact", "norm")
    assert find_site(report, "layers.0.self_attn.q_norm").status in ("exact", "refused")
    before, after = run64(model, IDS), run64(new, IDS)
    assert_close(after.last_hidden_state, before.last_hidden_state, EXACT)


# A scale of 1 + w (Liger-Kernel#74, mlx-lm#1623, vllm#29810)


def test_offset_scale_becomes_a_plain_one() -> None:
    model = fill(nn.Sequential(nn.Linear(8, 8), OffsetNorm(8)))
    new, report = swap(model, {"rms": nn.RMSNorm}, TOKENS)
    assert_status(report, "exact", "1")
    assert_close(new[1].weight, 1 + model[1].weight)
    assert_close(run(new, TOKENS), rms(model[0](TOKENS), 1 + model[1].weight))


def test_plain_scale_becomes_an_offset_one() -> None:
    model = fill(nn.Sequential(nn.Linear(8, 8), LlamaNorm(8)))
    new, report = swap(model, {"rms": norms.OffsetRMSNorm}, TOKENS)
    assert_status(report, "exact", "1")
    assert_close(new[1].weight, model[1].weight - 1)
    assert_close(run(new, TOKENS), rms(model[0](TOKENS), model[1].weight))


def test_offset_scale_of_a_layer_norm_subclass_is_seen() -> None:
    model = fill(nn.Sequential(OffsetLayerNorm(8)))
    (site,) = ns.find_norms(model)
    assert site.spec.unit_offset
    new, report = swap(model, {nn.LayerNorm: nn.LayerNorm}, TOKENS)
    assert_status(report, "exact", "0")
    assert type(new[0]) is nn.LayerNorm
    assert_close(run(new, TOKENS), layer(TOKENS, 1 + model[0].weight, model[0].bias))


def test_swapping_twice_adds_the_one_once() -> None:
    model = fill(nn.Sequential(OffsetNorm(8)))
    once, _ = swap(model, {"rms": nn.RMSNorm}, TOKENS)
    twice, report = swap(once, {"rms": nn.RMSNorm}, TOKENS)
    assert_status(report, "exact", "0")
    assert torch.equal(twice[0].weight, once[0].weight)
    assert_close(run(twice, TOKENS), rms(TOKENS, 1 + model[0].weight))


def test_offset_to_offset_keeps_the_stored_scale() -> None:
    model = fill(nn.Sequential(OffsetNorm(8)))
    new, report = swap(model, {"rms": norms.OffsetRMSNorm}, TOKENS)
    assert_status(report, "exact", "0")
    assert torch.equal(new[0].weight, model[0].weight)
    assert_close(run(new, TOKENS), run(model, TOKENS))


def test_there_and_back_again_is_the_same_model() -> None:
    model = fill(nn.Sequential(OffsetNorm(8)))
    plain, _ = swap(model, {"rms": nn.RMSNorm}, TOKENS)
    again, _ = swap(plain, {"rms": OffsetNorm}, TOKENS)
    assert type(again[0]) is OffsetNorm
    assert_close(again[0].weight, model[0].weight)
    assert_close(run(again, TOKENS), run(model, TOKENS))


@pytest.mark.parametrize(("name", "offset"), [("Gemma", True), ("Llama", False), ("Gemma2", True)])
def test_offset_of_published_families_is_told_by_behaviour(name: str, offset: bool) -> None:
    model = tiny(name)
    sites = ns.find_norms(model)
    assert {(s.spec.kind, s.spec.unit_offset) for s in sites} == {("rms", offset)}
    new, report = swap(model, {"rms": nn.RMSNorm}, IDS)
    assert report.counts == {"exact": len(sites)}
    assert_close(new.norm.weight, float(offset) + model.norm.weight)
    before, after = run64(model, IDS), run64(new, IDS)
    assert_close(after.last_hidden_state, before.last_hidden_state, EXACT)


def test_nemotron_layer_norm_has_an_offset() -> None:
    model = tiny("Nemotron")
    sites = ns.find_norms(model)
    assert {(s.spec.kind, s.spec.unit_offset) for s in sites} == {("layer", True)}
    new, report = swap(model, {nn.LayerNorm: nn.LayerNorm}, IDS)
    assert report.counts == {"exact": len(sites)}
    assert_close(new.norm.weight, 1 + model.norm.weight)
    before, after = run64(model, IDS), run64(new, IDS)
    assert_close(after.last_hidden_state, before.last_hidden_state, EXACT)


BIG = [15.8125, -0.9921875, 0.0029296875, 3.140625, -1.0, 0.0, 100.0, -2.015625]


def test_offset_of_a_float32_norm_is_added_in_float32() -> None:
    model = nn.Sequential(OffsetNorm(8)).eval()
    model[0].weight.data.copy_(torch.tensor(BIG))
    new, _ = ns.swap_norms(model, {"rms": nn.RMSNorm})
    assert new[0].weight.dtype == torch.float32
    assert torch.equal(new[0].weight, 1 + torch.tensor(BIG))
    assert new[0].weight[0] == 16.8125


def test_offset_of_a_bfloat16_norm_is_added_wide_and_rounded_once() -> None:
    model = nn.Sequential(OffsetNorm(8)).bfloat16().eval()
    model[0].weight.data.copy_(torch.tensor(BIG))
    new, _ = ns.swap_norms(model, {"rms": nn.RMSNorm})
    assert new[0].weight.dtype == torch.bfloat16
    assert torch.equal(new[0].weight, (1 + torch.tensor(BIG, dtype=torch.float64)).bfloat16())


def test_offset_norm_of_the_catalogue_adds_in_float32_as_the_original_does() -> None:
    model = nn.Sequential(OffsetNorm(8)).bfloat16().eval()
    model[0].weight.data.copy_(torch.tensor(BIG))
    new, report = ns.swap_norms(model, {"rms": norms.OffsetRMSNorm})
    assert_status(report, "exact", "0")
    x = TOKENS.bfloat16()
    wide = rms(x.float(), 1 + torch.tensor(BIG))
    assert torch.equal(run(model, x), wide.bfloat16())
    assert torch.equal(run(new, x), wide.bfloat16())
    narrow = (rms(x.float()).bfloat16() * (1 + torch.tensor(BIG).bfloat16())).float()
    assert not torch.equal(narrow.bfloat16(), wide.bfloat16())


# eps (llama#771, transformers#38025, vision#2169)


class NamedEps(nn.Module):
    """An RMSNorm or LayerNorm whose eps has any name."""

    def __init__(self, kind: Any, name: str, eps: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))
        self.kind, self.name = kind, name
        setattr(self, name, eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.kind(x, self.weight, self.bias, getattr(self, self.name))


class HiddenEps(nn.Module):
    """A norm whose eps is no attribute at all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return rms(x, self.weight, self.bias, 3e-4)


SMALL = [random_input(2, 5, 8) * size for size in (1.0, 1e-2, 1e-4)]


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-3, 1e-12])
@pytest.mark.parametrize("name", ["eps", "variance_epsilon", "epsilon", "norm_eps", "_e"])
@pytest.mark.parametrize("kind", [rms, layer], ids=["rms", "layer"])
def test_eps_is_carried_over_under_any_name(kind: Any, name: str, eps: float) -> None:
    model = fill(nn.Sequential(NamedEps(kind, name, eps)))
    (site,) = ns.find_norms(model)
    assert site.spec.eps == pytest.approx(eps, rel=1e-6)
    target = norms.RMSNorm if kind is rms else nn.LayerNorm
    new, report = swap(model, {kind.__name__: target})
    assert_status(report, "exact", "0")
    assert new[0].eps == pytest.approx(eps, rel=1e-6)
    for x in SMALL:
        assert_close(run(new, x), kind(x, model[0].weight, model[0].bias, eps), 1e-9)


def test_eps_without_an_attribute_is_recovered_by_behaviour() -> None:
    model = fill(nn.Sequential(HiddenEps()))
    new, report = swap(model, {"rms": "rms"})
    assert_status(report, "exact", "0")
    for x in SMALL:
        assert_close(run(new, x), rms(x, model[0].weight, model[0].bias, 3e-4), 1e-9)


@pytest.mark.parametrize("eps", [1e-3, 1e-5, 1e-1])
def test_eps_of_a_batch_norm_is_carried_over(eps: float) -> None:
    model = fill(nn.Sequential(nn.BatchNorm2d(8, eps=eps)))
    new, report = swap(model, {nn.BatchNorm2d: "frozenbatch"}, IMAGE)
    assert_status(report, "exact", "0")
    assert_close(run(new, IMAGE), fixed(IMAGE, model[0]))
    other, _ = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, IMAGE * 1e-2)
    x = IMAGE * 1e-2
    assert_close(run(other, x), group(x, 4, model[0].weight, model[0].bias, eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_machine_eps_stays_that_of_the_dtype(dtype: torch.dtype) -> None:
    """``nn.RMSNorm(eps=None)`` adds the machine epsilon of what it computes in."""
    model = fill(nn.Sequential(nn.RMSNorm(8))).to(dtype)
    assert model[0].eps is None
    new, report = ns.swap_norms(model, {nn.RMSNorm: norms.RMSNorm})
    assert_status(report, "exact", "0")
    for size in (1.0, 1e-4):
        x = (TOKENS * size).to(dtype)
        assert_close(run(new, x), run(model, x), 8 * torch.finfo(dtype).eps)


def test_large_eps_changes_nothing_else() -> None:
    model = fill(nn.Sequential(PlainLayerNorm(8, e=0.5)))
    new, report = swap(model, {nn.LayerNorm: nn.LayerNorm}, TOKENS)
    assert_status(report, "exact", "0")
    assert_close(run(new, TOKENS), layer(TOKENS, model[0].scale, model[0].offset, 0.5))


# The model itself is a norm (ao#2241)


def test_model_that_is_a_norm_is_returned_as_the_new_one() -> None:
    model = fill(OffsetNorm(8))
    new, report = swap(model, {"rms": nn.RMSNorm}, TOKENS)
    assert type(new) is nn.RMSNorm
    assert report.counts == {"exact": 1}
    assert_close(run(new, TOKENS), rms(TOKENS, 1 + model.weight))


# The fast path of nn.TransformerEncoderLayer (pytorch#128413, #116385)


def encoder_layer_by_hand(block: nn.TransformerEncoderLayer, x: Tensor, mask: Any = None) -> Tensor:
    def new_norm(norm: nn.LayerNorm, y: Tensor) -> Tensor:
        return rms(y, norm.weight, norm.bias, norm.eps)

    def attend(y: Tensor) -> Tensor:
        out, _ = block.self_attn(y, y, y, key_padding_mask=mask, need_weights=True)
        return out

    def feed(y: Tensor) -> Tensor:
        return block.linear2(F.relu(block.linear1(y)))

    if block.norm_first:
        x = x + attend(new_norm(block.norm1, x))
        return x + feed(new_norm(block.norm2, x))
    x = new_norm(block.norm1, x + attend(x))
    return new_norm(block.norm2, x + feed(x))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("target", ["rms", norms.RMSNorm], ids=name_of)
@torch.no_grad()
def test_encoder_layer_computes_its_new_norms_in_eval(target: Any, norm_first: bool) -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first)
    model = fill(model)
    new, report = swap(model, {nn.LayerNorm: target}, TOKENS, method="copy")
    assert_status(report, "approximate", "norm1", "norm2")
    assert_close(run(new, TOKENS), encoder_layer_by_hand(model, TOKENS))
    assert_close(run(copy.deepcopy(new), TOKENS), encoder_layer_by_hand(model, TOKENS))


@torch.no_grad()
def test_encoder_layer_with_one_new_norm_computes_it() -> None:
    model = fill(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    new, _ = swap(model, {nn.LayerNorm: "rms"}, TOKENS, where="norm2", method="copy")
    x = model.norm1(TOKENS + model.self_attn(TOKENS, TOKENS, TOKENS)[0])
    y = x + model.linear2(F.relu(model.linear1(x)))
    assert_close(run(new, TOKENS), rms(y, model.norm2.weight, model.norm2.bias, 1e-5))


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.filterwarnings("ignore:.*[Nn]ested [Tt]ensor")
@pytest.mark.parametrize("where", ["layers.0.*", "layers.1.*", "layers.*"])
@torch.no_grad()
def test_encoder_with_padding_computes_its_new_norms_in_eval(where: str) -> None:
    """It packs padded batches into nested tensors for layers on the fast path."""
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = fill(nn.TransformerEncoder(block, 2))
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    new, _ = ns.swap_norms(
        model, {nn.LayerNorm: "rms"}, TOKENS, where=where, method="copy", verify=False
    )
    x = TOKENS
    for i, each in enumerate(model.layers):
        changed = where in ("layers.*", f"layers.{i}.*")
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            x = (
                encoder_layer_by_hand(each, x, mask)
                if changed
                else each(x, src_key_padding_mask=mask)
            )
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    found = new(TOKENS.clone(), src_key_padding_mask=mask)
    assert_close(found[~mask], x[~mask])


# Training after a swap (unsloth#4533)


CHANGES: list[Any] = [
    (lambda: OffsetNorm(4), {"rms": nn.RMSNorm}),
    (lambda: LlamaNorm(4), {"rms": norms.RMSNorm}),
    (lambda: nn.LayerNorm(4), {nn.LayerNorm: norms.RMSNorm}),
    (lambda: nn.LayerNorm(4), {nn.LayerNorm: "dyt"}),
    (lambda: PlainLayerNorm(4), {"layer": nn.LayerNorm}),
]


@pytest.mark.parametrize(("make", "mapping"), CHANGES)
def test_gradients_after_a_swap_are_right(make: Any, mapping: Any) -> None:
    model = fill(nn.Sequential(nn.Linear(4, 4), make(), nn.Linear(4, 2)))
    new, _ = ns.swap_norms(model, mapping, method="copy")
    new.train()
    names, values = zip(*new.named_parameters(), strict=True)
    assert all(v.requires_grad for v in values)

    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        return torch.func.functional_call(new, dict(zip(names, parameters, strict=True)), (x,))

    x = random_input(2, 4).requires_grad_()
    assert torch.autograd.gradcheck(loss, (x, *values))


def test_gradients_of_an_exact_swap_are_those_of_the_original() -> None:
    model = fill(nn.Sequential(nn.Linear(8, 8), OffsetNorm(8), nn.Linear(8, 2)))
    new, _ = swap(model, {"rms": nn.RMSNorm}, TOKENS)
    for each in (model, new):
        each(TOKENS).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), new.parameters(), strict=True):
        assert relative_error(a.grad, b.grad) < EXACT, name


def test_frozen_parameters_stay_frozen_each_for_itself() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)))
    model[0].requires_grad_(False)
    model[1].bias.requires_grad_(False)
    new, _ = swap(model, {nn.LayerNorm: norms.RMSNorm}, TOKENS, method="copy")
    flags = [(n.weight.requires_grad, n.bias.requires_grad) for n in new]
    assert flags == [(False, False), (True, False), (True, True)]


# Dtypes (axolotl#3670, DeepSpeed#2667)


@pytest.mark.parametrize(
    ("make", "mapping"),
    [
        (lambda: LlamaNorm(8), {"rms": nn.RMSNorm}),
        (lambda: nn.LayerNorm(8), {nn.LayerNorm: "rms"}),
        (lambda: nn.LayerNorm(8, bias=False), {nn.LayerNorm: "rms"}),
        (lambda: OffsetNorm(8), {"rms": nn.RMSNorm}),
    ],
    ids=["llama", "layer", "layer without bias", "offset"],
)
def test_float32_norm_in_a_bfloat16_model_stays_float32(make: Any, mapping: Any) -> None:
    """Also what it returns for bfloat16 inputs stays of the dtype it was."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.norm(m.first(x))

    model = randomise(Net(forward, first=nn.Linear(8, 8).bfloat16(), norm=make())).eval()
    x = TOKENS.bfloat16()
    before = run(model, x)
    new, report = ns.swap_norms(model, mapping, x, method="copy")
    if report.sites[0].status == "refused":
        assert_same(model, new, x, tol=1e-300)
        return
    assert {p.dtype for p in new.norm.parameters()} == {torch.float32}
    assert new.first.weight.dtype == torch.bfloat16
    after = run(new, x)
    assert after.dtype == before.dtype
    norm, y = model.norm, run(model.first, x).float()
    weight = norm.weight + (1 if isinstance(norm, OffsetNorm) else 0)
    bias = getattr(norm, "bias", None)
    eps = getattr(norm, "eps", 1e-6)
    expected = rms(y, weight, 0.0 if bias is None else bias, eps)
    assert relative_error(expected, after.float()) < 2**-7


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_of_a_norm_is_kept(dtype: torch.dtype) -> None:
    model = randomise(nn.Sequential(nn.Linear(8, 8), OffsetNorm(8))).to(dtype).eval()
    new, _ = ns.swap_norms(model, {"rms": nn.RMSNorm})
    assert new[1].weight.dtype == dtype
    assert torch.equal(new[1].weight, (1 + model[1].weight.double()).to(dtype))


def test_dtype_of_each_tensor_is_kept() -> None:
    """bfloat16 parameters beside float32 statistics."""
    model = fill(nn.Sequential(nn.BatchNorm2d(8)))
    model[0].float()
    for parameter in model[0].parameters():
        parameter.data = parameter.data.bfloat16()
    new, _ = ns.swap_norms(model, {nn.BatchNorm2d: "frozenbatch"})
    for name in ("weight", "bias"):
        assert getattr(new[0], name).dtype == torch.bfloat16
    for name in ("running_mean", "running_var"):
        assert getattr(new[0], name).dtype == torch.float32
        assert torch.equal(getattr(new[0], name), getattr(model[0], name))


# Sharded models (Lightning#19989)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("inplace", [False, True])
def test_sharded_model_is_refused_with_what_to_do(inplace: bool) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist = torch.distributed
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = dist.init_device_mesh("cpu", (2,))
        model = fully_shard(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), mesh=mesh)
        with pytest.raises(ns.RefusedError, match=r"(?i)shard.*before"):
            ns.swap_norms(model, {nn.LayerNorm: nn.RMSNorm}, inplace=inplace)
        assert isinstance(model[1], nn.LayerNorm)
    finally:
        dist.destroy_process_group()


# InstanceNorm is no BatchNorm (pytorch#29187)


@pytest.mark.parametrize("tracked", [False, True])
def test_instance_norm_is_not_taken_for_a_batch_norm(tracked: bool) -> None:
    instance = nn.InstanceNorm2d(8, affine=True, track_running_stats=tracked)
    model = fill(nn.Sequential(instance, nn.BatchNorm2d(8)))
    kinds = {s.name: s.spec.kind for s in ns.find_norms(model)}
    assert kinds == {"0": "instance", "1": "batch"}
    new, report = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, IMAGE)
    assert [s.name for s in report.sites] == ["1"]
    assert type(new[0]) is nn.InstanceNorm2d
    y = run(model[0], IMAGE)
    assert_close(run(new, IMAGE), group(y, 4, model[1].weight, model[1].bias))


@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm_is_a_group_norm_of_single_channels(affine: bool) -> None:
    model = fill(nn.Sequential(nn.InstanceNorm2d(8, affine=affine), nn.BatchNorm2d(8)))
    new, report = swap(model, {nn.InstanceNorm2d: nn.GroupNorm}, IMAGE)
    assert [(s.name, s.status) for s in report.sites] == [("0", "exact")]
    assert new[0].num_groups == 8
    weight, bias = (model[0].weight, model[0].bias) if affine else (1.0, 0.0)
    assert_close(run(new[0], IMAGE), group(IMAGE, 8, weight, bias))
    assert type(new[1]) is nn.BatchNorm2d


def test_instance_norm_with_stored_statistics_is_no_group_norm() -> None:
    model = fill(nn.Sequential(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)))
    _, report = swap(model, {"instance": nn.GroupNorm}, IMAGE)
    assert all(s.status != "exact" for s in report.sites)


@pytest.mark.parametrize("shape", [(2, 8, 6, 6), (2, 8, 6)])
def test_group_norm_of_single_channels_is_an_instance_norm(shape: tuple[int, ...]) -> None:
    model = fill(nn.Sequential(nn.GroupNorm(8, 8)))
    target = nn.InstanceNorm2d if len(shape) == 4 else nn.InstanceNorm1d
    x = random_input(*shape)
    new, report = swap(model, {nn.GroupNorm: target}, x)
    assert_status(report, "exact", "0")
    assert_close(run(new, x), group(x, 8, model[0].weight, model[0].bias))


# Where half inputs are cast back (TransformerEngine#1132)


@pytest.mark.parametrize(("make", "order"), [(LlamaNorm, "before"), (OffsetNorm, "after")])
def test_spec_names_where_half_inputs_are_cast_back(make: Any, order: str) -> None:
    model = nn.Sequential(make(64)).bfloat16()
    weight = signed(torch.Generator().manual_seed(0), 64)
    model[0].weight.data.copy_(weight)
    (site,) = ns.find_norms(model)
    assert site.spec.cast_order == order
    x = random_input(4, 64).bfloat16()
    scale = float(site.spec.unit_offset) + model[0].weight.float()
    unit = rms(x.float())
    by_hand = {
        "before": (unit.bfloat16() * scale.bfloat16()),
        "after": (unit * scale).bfloat16(),
    }
    assert torch.equal(run(model, x), by_hand[order])
    if order == "before":
        assert not torch.equal(by_hand["before"], by_hand["after"])


@pytest.mark.parametrize(
    ("name", "order"), [("Llama", "before"), ("Gemma", "after"), ("Qwen2", "before")]
)
def test_spec_names_the_cast_of_published_families(name: str, order: str) -> None:
    assert {s.spec.cast_order for s in ns.find_norms(tiny(name))} == {order}


# Names mislead: what a norm is called says nothing of what it computes


@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [
        ("T5", {"d_model": 16, "d_ff": 24, "num_layers": 1, "num_heads": 2, "d_kv": 8}, "rms"),
        ("Cohere", {}, "layer"),
        ("Olmo", {}, "layer"),
        ("Bert", {"intermediate_size": 24}, "layer"),
    ],
)
def test_kind_of_published_families_is_told_by_behaviour(
    name: str, settings: Any, kind: str
) -> None:
    model = tiny(name, **settings)
    sites = ns.find_norms(model)
    assert {s.spec.kind for s in sites} == {kind}
    target = nn.RMSNorm if kind == "rms" else nn.LayerNorm
    keywords = {"decoder_input_ids": IDS} if name == "T5" else {}
    new, report = ns.swap_norms(model, {kind: target}, IDS, example_kwargs=keywords or None)
    assert report.counts == {"exact": len(sites)}
    assert report.verification.passed
    assert sum(type(m) is target for m in new.modules()) == len(sites)
    before, after = run64(model, IDS, **keywords), run64(new, IDS, **keywords)
    assert_close(after.last_hidden_state, before.last_hidden_state, EXACT)


def test_rms_norm_called_layer_norm_is_left_alone_by_the_key_of_layer_norms() -> None:
    LayerNorm = type("LayerNorm", (LlamaNorm,), {})
    model = fill(nn.Sequential(LayerNorm(8), nn.LayerNorm(8)))
    new, report = swap(model, {nn.LayerNorm: "rms"}, TOKENS, method="copy")
    assert [s.name for s in report.sites] == ["1"]
    assert type(new[0]) is LayerNorm


# Something welded on is never lost


def test_activation_of_a_batch_norm_subclass_is_kept() -> None:
    timm = pytest.importorskip("timm")
    for norm in (BatchNormAct(8), timm.layers.BatchNormAct2d(8), timm.layers.GroupNormAct(8, 2)):
        model = fill(nn.Sequential(nn.Conv2d(8, 8, 1), norm))
        new, report = swap(model, {"batch": nn.GroupNorm, "group": nn.GroupNorm}, IMAGE)
        (site,) = report.sites
        y = run(model[0], IMAGE)
        if site.status == "refused":
            assert_same(model, new, IMAGE, tol=1e-300)
        else:
            groups = next(m for m in new.modules() if isinstance(m, nn.GroupNorm)).num_groups
            expected = F.relu(group(y, groups, norm.weight, norm.bias))
            assert_close(run(new, IMAGE), expected)


def test_gated_norm_is_unknown_and_has_an_answer() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.gated(m.norm(x), x)

    model = fill(Net(forward, norm=nn.LayerNorm(8), gated=GatedNorm(8)))
    unknown = [s for s in ns.find_norms(model) if s.spec is None]
    assert [s.name for s in unknown] == ["gated"]
    assert unknown[0].reason
    new, report = swap(model, {"layer": nn.LayerNorm, "rms": nn.RMSNorm}, TOKENS)
    assert_status(report, "exact", "norm")
    assert find_site(report, "gated").reason == "unknown"
    assert type(new.gated) is GatedNorm


# The axis is the norm's, not the one that happens to be last


SQUARE = random_input(2, 8, 8, 8)


def assert_right_axis_or_refused(
    model: Any, mapping: Any, x: Tensor, expected: Any, **options: Any
) -> None:
    try:
        new, report = swap(model, mapping, x, **options)
    except ns.RefusedError:
        return
    if report.sites[0].status == "refused":
        assert_same(model, new, x, tol=1e-300)
    else:
        assert_close(run(new, x), expected)


@pytest.mark.parametrize("x", [SQUARE, IMAGE], ids=["square", "oblong"])
def test_layer_norm_over_channels_keeps_its_axis(x: Tensor) -> None:
    model = fill(nn.Sequential(ChannelsFirst(8)))
    (site,) = ns.find_norms(model)
    assert (site.spec.kind, site.spec.axes) == ("layer", (1,))
    weight, bias = channels(model[0].weight, x), channels(model[0].bias, x)
    right = rms(x, weight, bias, 1e-6, (1,))
    assert_right_axis_or_refused(model, {nn.LayerNorm: "rms"}, x, right, method="copy")
    same = layer(x, weight, bias, 1e-6, (1,))
    assert_right_axis_or_refused(model, {nn.LayerNorm: nn.LayerNorm}, x, same)


@pytest.mark.parametrize("x", [SQUARE, IMAGE], ids=["square", "oblong"])
@pytest.mark.parametrize("inputs", [True, False])
def test_batch_norm_of_images_does_not_become_a_layer_norm_of_columns(
    x: Tensor, inputs: bool
) -> None:
    model = fill(nn.Sequential(nn.BatchNorm2d(8)))
    options: dict[str, Any] = {"verify": inputs}
    weight, bias = channels(model[0].weight, x), channels(model[0].bias, x)
    right = layer(x, weight, bias, 1e-5, (1,))
    assert_right_axis_or_refused(model, {nn.BatchNorm2d: nn.LayerNorm}, x, right, **options)


@pytest.mark.parametrize("tokens", [5, 8])
@pytest.mark.parametrize("target", [nn.GroupNorm, nn.BatchNorm1d, nn.InstanceNorm1d], ids=name_of)
def test_layer_norm_of_tokens_does_not_become_a_norm_of_axis_one(tokens: int, target: Any) -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8)))
    new, report = swap(model, {nn.LayerNorm: target}, random_input(2, tokens, 8))
    assert report.sites[0].status == "refused"
    assert type(new[0]) is nn.LayerNorm


@pytest.mark.parametrize("inputs", [True, False])
def test_norms_of_vectors_may_be_swapped_either_way(inputs: bool) -> None:
    """The last axis of ``[N, C]`` is axis 1 too, so scale and shift mean the same."""
    x = random_input(5, 8)
    for old, target in ((nn.LayerNorm(8), nn.BatchNorm1d), (nn.BatchNorm1d(8), nn.LayerNorm)):
        model = fill(nn.Sequential(nn.Linear(8, 8), old))
        new, report = ns.swap_norms(model, {type(old): target}, x if inputs else None)
        if report.sites[0].status == "refused":
            assert_same(model, new, x, tol=1e-300)
            continue
        y = model[0](x)
        unit = layer(y) if target is nn.LayerNorm else y / (1 + 1e-5) ** 0.5
        assert_status(report, "approximate", "1")
        assert_close(run(new, x), unit * old.weight + old.bias)


def test_layer_norm_over_several_axes_keeps_its_shape() -> None:
    model = fill(nn.Sequential(nn.LayerNorm([8, 6, 6])))
    new, report = swap(model, {nn.LayerNorm: "rms"}, IMAGE, method="copy")
    assert_status(report, "approximate", "0")
    old = model[0]
    assert_close(run(new, IMAGE), rms(IMAGE, old.weight, old.bias, 1e-5, (1, 2, 3)))


# What is called exact is exact, and what is refused is not the same


SOURCES: list[Any] = [
    (lambda: nn.LayerNorm(8), TOKENS),
    (lambda: nn.LayerNorm(8, elementwise_affine=False), TOKENS),
    (lambda: nn.LayerNorm(8, bias=False), TOKENS),
    (lambda: nn.RMSNorm(8, eps=1e-6), TOKENS),
    (lambda: LlamaNorm(8), TOKENS),
    (lambda: OffsetNorm(8), TOKENS),
    (lambda: PlainLayerNorm(8), TOKENS),
    (lambda: norms.ScaleNorm(8), TOKENS),
    (lambda: norms.LpNorm(8, p=2.0), TOKENS),
    (lambda: norms.LpNorm(8, p=1.0), TOKENS),
    (lambda: norms.DyT(8), TOKENS),
    (lambda: nn.BatchNorm2d(8), IMAGE),
    (lambda: nn.BatchNorm2d(8, affine=False), IMAGE),
    (lambda: norms.FrozenBatchNorm(8), IMAGE),
    (lambda: nn.GroupNorm(2, 8), IMAGE),
    (lambda: nn.GroupNorm(1, 8), IMAGE),
    (lambda: nn.InstanceNorm2d(8), IMAGE),
]
TARGETS: list[Any] = [
    nn.LayerNorm,
    nn.RMSNorm,
    norms.RMSNorm,
    norms.OffsetRMSNorm,
    nn.GroupNorm,
    nn.BatchNorm2d,
    nn.InstanceNorm2d,
    norms.FrozenBatchNorm,
    norms.ScaleNorm,
    norms.DyT,
]


def fault_of(model: Any, kind: str, target: Any, x: Tensor) -> str | None:
    """What is wrong with the answer for one pair, if anything."""
    try:
        new, report = ns.swap_norms(model, {kind: target}, method="copy")
    except Exception as error:
        return f"no answer: {type(error).__name__}: {error}"
    (site,) = report.sites
    if site.status == "refused":
        same = type(new[0]) is type(model[0])
        return None if same else "refused and changed"
    try:
        drift = relative_error(run64(model, x), run64(new, x))
    except Exception as error:
        return f"{site.status}, but it cannot run: {error}"
    if (drift < EXACT) != (site.status == "exact"):
        return f"{site.status}, but it differs by {drift:.1e}"
    return None


@pytest.mark.parametrize("number", range(len(SOURCES)))
def test_status_of_every_pair_is_what_a_comparison_finds(number: int) -> None:
    make, x = SOURCES[number]
    model = fill(nn.Sequential(make()))
    kind = ns.find_norms(model)[0].spec.kind
    found = {str(target): fault_of(model, kind, target, x) for target in TARGETS}
    assert {name: fault for name, fault in found.items() if fault} == {}


def test_scale_norm_becomes_an_rms_norm_of_the_same_length() -> None:
    """``g * x / ||x||`` is an RMSNorm with scale ``g / sqrt(d)``; only eps stands elsewhere."""
    model = fill(nn.Sequential(norms.ScaleNorm(8)))
    model[0].weight.data.fill_(-2.5)
    new, _ = swap(model, {"scale": nn.RMSNorm}, TOKENS)
    assert_close(new[0].weight, torch.full((8,), -2.5 / 8**0.5, dtype=torch.float64))
    assert_close(run(new, TOKENS), run(model, TOKENS), 1e-4)


# BatchNorm for BatchNorm


@pytest.mark.parametrize("momentum", [0.3, None])
def test_synchronised_batch_norm_trains_on_as_a_plain_one(momentum: Any) -> None:
    model = fill(nn.Sequential(nn.SyncBatchNorm(8, momentum=momentum)))
    model[0].num_batches_tracked.fill_(3)
    new, report = swap(model, {nn.SyncBatchNorm: nn.BatchNorm2d}, IMAGE)
    assert_status(report, "exact", "0")
    assert type(new[0]) is nn.BatchNorm2d
    plain = nn.BatchNorm2d(8, momentum=momentum).double()
    plain.load_state_dict(model[0].state_dict())
    for each in (new[0], plain):
        each.train()
        each(IMAGE)
    for name, value in plain.state_dict().items():
        assert_close(new[0].state_dict()[name], value)


def test_batch_norm_without_statistics_stays_one() -> None:
    model = fill(nn.Sequential(nn.SyncBatchNorm(8, track_running_stats=False)))
    plain = nn.BatchNorm2d(8, track_running_stats=False).double().eval()
    plain.load_state_dict(model[0].state_dict())
    new, report = ns.swap_norms(model, {"batch": nn.BatchNorm2d})
    if report.sites[0].status == "refused":
        assert_refused(report, "0", "batch-statistics", "unknown", "not-equivalent")
    else:
        assert_close(run(new, IMAGE), run(plain, IMAGE))


def test_swap_leaves_the_original_of_a_failed_plan_alone() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8)))
    state = state_copy(model)
    with pytest.raises(ns.NormswapError, match=r"no such norm|is no kind of norm"):
        ns.swap_norms(model, {"no such norm": nn.LayerNorm}, inplace=True)
    assert_state_equal(model, state)
