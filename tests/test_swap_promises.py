"""What `swap_norms` and `find_norms` promise besides right numbers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    Net,
    assert_same,
    assert_state_equal,
    find_site,
    random_input,
    randomise,
    relative_error,
    run,
    state_copy,
)
from safetensors.torch import load_file, save_file
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
    fill,
    group,
    layer,
    rms,
    run64,
    swap,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

import normswap as ns
from normswap import norms

RMS = {"rms": nn.RMSNorm}


class Block(nn.Module):
    """Norms of three kinds; what is swapped exactly, approximately, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.offset = OffsetNorm(8)
        self.stage = nn.Sequential(nn.Linear(8, 8), PlainLayerNorm(8), nn.GELU())
        self.layer = nn.LayerNorm(8, eps=1e-3)
        self.kept = nn.Sequential(nn.GroupNorm(5, 5), nn.Dropout(0.5))
        self.register_buffer("table", torch.arange(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.offset(self.first(x))
        return self.kept(self.layer(self.stage(y) + y))


BLOCK = {"rms": nn.RMSNorm, "layer": norms.RMSNorm}


def block_by_hand(m: Any, x: Tensor) -> Tensor:
    y = rms(m.first(x), 1 + m.offset.weight)
    inner = rms(m.stage[0](y), m.stage[1].scale, m.stage[1].offset, m.stage[1].e)
    z = rms(nn.functional.gelu(inner) + y, m.layer.weight, m.layer.bias, 1e-3)
    return m.kept(z)


def description(model: nn.Module) -> list[Any]:
    """Classes, modes, hooks, and for each tensor its identity, dtype, layout and flag."""
    modules = [
        (n, type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), id(m))
        for n, m in model.named_modules(remove_duplicate=False)
    ]
    tensors = [
        (n, id(t), t.dtype, t.stride(), t.requires_grad, t._version, t.data_ptr())
        for n, t in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    ]
    return [*modules, *tensors]


# The input model


def test_swap_of_several_kinds_is_right() -> None:
    model = fill(Block())
    new, report = swap(model, BLOCK, TOKENS, method="copy")
    assert_close(run(new, TOKENS), block_by_hand(model, TOKENS))
    assert {s.name: s.status for s in report.sites} == {
        "offset": "exact",
        "stage.1": "approximate",
        "layer": "approximate",
    }


@pytest.mark.parametrize("inputs", [True, False])
def test_input_model_is_untouched(inputs: bool) -> None:
    model = fill(Block())
    model.stage[1].train()
    model.layer.weight.requires_grad_(False)
    model.layer.register_forward_hook(lambda m, i, o: None)
    state, before = state_copy(model), description(model)
    x = TOKENS.clone()
    ns.swap_norms(model, BLOCK, x if inputs else None, method="copy")
    assert_state_equal(model, state)
    assert description(model) == before
    assert torch.equal(x, TOKENS)


def test_planning_and_finding_change_nothing() -> None:
    model = fill(Block())
    state, before = state_copy(model), description(model)
    ns.plan_swap_norms(model, BLOCK)
    ns.find_norms(model)
    ns.find_norms(model, TOKENS)
    assert_state_equal(model, state)
    assert description(model) == before


def test_result_shares_no_tensor_with_the_input_model() -> None:
    model = fill(Block())
    new, _ = ns.swap_norms(model, BLOCK, TOKENS, method="copy")
    state = state_copy(model)
    with torch.no_grad():
        for tensor in [*new.parameters(), *new.buffers()]:
            tensor.zero_()
    assert_state_equal(model, state)


def test_result_is_not_made_of_inference_tensors() -> None:
    new, _ = ns.swap_norms(fill(Block()), BLOCK, TOKENS, method="copy")
    assert not any(t.is_inference() for t in [*new.parameters(), *new.buffers()])
    new(TOKENS).square().mean().backward()
    assert new.layer.weight.grad is not None


def test_global_state_is_restored() -> None:
    before = torch.get_rng_state()
    with torch.enable_grad():
        ns.swap_norms(fill(Block()), BLOCK, TOKENS, method="copy")
        assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.get_default_dtype() == torch.float32
    assert not torch.nn.modules.module._global_forward_hooks
    model = fill(nn.Sequential(nn.LayerNorm(8), OffsetNorm(8)))
    before = torch.get_rng_state()
    ns.swap_norms(model, BLOCK, method="copy")
    assert torch.equal(torch.get_rng_state(), before)


def test_result_can_be_copied_and_pickled(tmp_path: Path) -> None:
    new, _ = ns.swap_norms(fill(Block()), BLOCK, TOKENS, method="copy")
    assert_same(new, copy.deepcopy(new), TOKENS, tol=1e-300)
    torch.save(new, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(new, again, TOKENS, tol=1e-300)


# In place, and what happens when something fails


def test_in_place_changes_the_model_itself_and_nothing_else_in_it() -> None:
    model = fill(Block())
    original = copy.deepcopy(model)
    kept = {n: m for n, m in model.named_modules() if n not in ("offset", "stage.1", "layer")}
    weight = model.first.weight
    same, _ = ns.swap_norms(model, BLOCK, TOKENS, method="copy", inplace=True)
    assert same is model
    assert model.first.weight is weight
    for name, module in kept.items():
        assert model.get_submodule(name) is module
    assert_close(run(model, TOKENS), block_by_hand(original, TOKENS))


class LooksAtItsNorm(nn.Module):
    """Computes something else when its norm is of another class."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = LlamaNorm(8), OffsetNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.first(x))
        return y if isinstance(self.norm, OffsetNorm) else y + 1


class ReadsTheScale(nn.Module):
    """Uses the stored scale of its norm, which is less by one, beside the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = LlamaNorm(8), OffsetNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) + self.norm.weight


@pytest.mark.parametrize("make", [LooksAtItsNorm, ReadsTheScale])
@pytest.mark.parametrize("inplace", [True, False])
def test_exact_swap_that_changes_the_outputs_is_rolled_back(make: Any, inplace: bool) -> None:
    model = fill(make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if inplace else None
    groups = None if optimizer is None else [id(p) for p in optimizer.param_groups[0]["params"]]
    state, before = state_copy(model), description(model)
    with pytest.raises(ns.VerificationError) as caught:
        ns.swap_norms(model, RMS, TOKENS, inplace=inplace, optimizer=optimizer)
    assert_state_equal(model, state)
    assert description(model) == before
    assert not caught.value.report.verification.passed
    if optimizer is not None:
        assert [id(p) for p in optimizer.param_groups[0]["params"]] == groups


class Failing(nn.Module):
    """Takes parameters like a norm and raises when it is run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such luck")


def raise_on_the_second(site: Any) -> nn.Module:
    if site.name == "0":
        return nn.RMSNorm(8)
    raise ValueError("no such luck")


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize(
    "value",
    [raise_on_the_second, lambda site: Failing()],
    ids=["raises when built", "raises when run"],
)
def test_callable_that_fails_leaves_the_model_alone(value: Any, inputs: bool) -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8)))
    state, before = state_copy(model), description(model)
    try:
        _, report = ns.swap_norms(
            model, {nn.LayerNorm: value}, TOKENS if inputs else None, inplace=True
        )
    except Exception:
        assert_state_equal(model, state)
        assert description(model) == before
    else:
        assert {s.status for s in report.sites} == {"refused"}
        assert_state_equal(model, state)


@pytest.mark.parametrize("value", [lambda site: None, lambda site: "rms", 3, None])
def test_value_that_makes_no_module_is_an_error_that_says_so(value: Any) -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8)))
    before = description(model)
    with pytest.raises((ns.NormswapError, TypeError), match=r"Module|value"):
        ns.swap_norms(model, {nn.LayerNorm: value}, inplace=True)
    assert description(model) == before


def test_inputs_that_the_model_does_not_take_leave_it_alone() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8)))
    before = description(model)
    with pytest.raises(ns.NormswapError):
        ns.swap_norms(model, {"layer": nn.LayerNorm}, random_input(2, 5, 7), inplace=True)
    assert description(model) == before


# The model itself is the norm


def test_root_that_is_a_norm_cannot_be_replaced_in_place() -> None:
    model = fill(OffsetNorm(8))
    state = state_copy(model)
    with pytest.raises(ns.NormswapError, match=r"itself.*inplace|inplace.*itself"):
        ns.swap_norms(model, RMS, inplace=True)
    assert_state_equal(model, state)
    assert type(model) is OffsetNorm


def test_root_that_is_a_norm_is_found_and_named() -> None:
    (site,) = ns.find_norms(fill(OffsetNorm(8)))
    assert site.name == ""
    assert "the model" in str(ns.find_norms(OffsetNorm(8)))
    new, report = ns.swap_norms(fill(OffsetNorm(8)).train(), RMS)
    assert new.training
    assert list(new.state_dict()) == ["weight"]
    assert "weight" in {row.target for row in report.mapping}


# Hooks


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_hooks_move_to_the_new_norm() -> None:
    model = fill(nn.Sequential(OffsetNorm(8), nn.Linear(8, 8)))
    seen: list[Any] = []
    model[0].register_forward_pre_hook(lambda m, args: seen.append(("pre", type(m))))
    model[0].register_forward_hook(
        lambda m, args, kwargs, out: seen.append(("post", type(m), kwargs)), with_kwargs=True
    )
    model[0].register_full_backward_hook(lambda m, i, o: seen.append(("back", type(m))))
    model[0].register_full_backward_pre_hook(lambda m, o: seen.append(("before", type(m))))
    new, report = ns.swap_norms(model, RMS)
    assert any("hook" in note for note in report.notes)
    new(TOKENS).sum().backward()
    kind = nn.RMSNorm
    assert seen == [("pre", kind), ("post", kind, {}), ("before", kind), ("back", kind)]


def test_hook_that_changes_the_output_still_does() -> None:
    model = fill(nn.Sequential(OffsetNorm(8), nn.Linear(8, 8)))
    model[0].register_forward_hook(lambda m, args, out: out * 3)
    new, _ = swap(model, RMS, TOKENS)
    assert_close(run(new, TOKENS), model[1](3 * rms(TOKENS, 1 + model[0].weight)))


def test_handle_of_a_hook_removes_it_after_a_swap_in_place() -> None:
    model = fill(nn.Sequential(OffsetNorm(8)))
    handle = model[0].register_forward_hook(lambda m, args, out: out * 3)
    expected = rms(TOKENS, 1 + model[0].weight)
    ns.swap_norms(model, RMS, inplace=True)
    assert_close(run(model, TOKENS), 3 * expected)
    handle.remove()
    assert_close(run(model, TOKENS), expected)


def test_hooks_of_a_copy_are_its_own() -> None:
    model = fill(nn.Sequential(OffsetNorm(8)))
    handle = model[0].register_forward_hook(lambda m, args, out: out * 3)
    new, _ = ns.swap_norms(model, RMS)
    handle.remove()
    assert_close(run(new, TOKENS), 3 * rms(TOKENS, 1 + model[0].weight))
    assert_close(run(model, TOKENS), rms(TOKENS, 1 + model[0].weight))


def test_hooks_elsewhere_stay() -> None:
    model = fill(nn.Sequential(OffsetNorm(8), nn.Linear(8, 8)))
    model.register_forward_hook(lambda m, args, out: -out)
    model[1].register_forward_pre_hook(lambda m, args: (args[0] + 1,))
    new, _ = swap(model, RMS, TOKENS)
    y = 1 + rms(TOKENS, 1 + model[0].weight)
    assert_close(run(new, TOKENS), -nn.functional.linear(y, model[1].weight, model[1].bias))


# What stays as it was


def test_everything_not_rewritten_stays() -> None:
    model = fill(Block())
    model.first.weight.requires_grad_(False)
    model.extra = nn.Linear(3, 3).double()
    model.extra_again = model.extra
    model.head = nn.Linear(8, 8, bias=False).double()
    model.head.weight = model.first.weight
    model.kept[1].train()
    model.note = {"any": "attribute"}
    new, _ = ns.swap_norms(model, BLOCK, method="copy")
    assert isinstance(new, Block)
    assert new.extra_again is new.extra
    assert new.head.weight is new.first.weight
    assert not new.first.weight.requires_grad
    assert new.kept[1].training
    assert not new.training
    assert torch.equal(new.table, model.table)
    assert "table" not in new.state_dict()
    assert new.note == model.note


def test_names_of_the_result() -> None:
    model = fill(Block())
    new, report = ns.swap_norms(model, BLOCK, method="copy")
    replaced = {"stage.1.scale", "stage.1.offset"}
    expected = (set(model.state_dict()) - replaced) | {"stage.1.weight", "stage.1.bias"}
    assert set(new.state_dict()) == expected
    assert set(report.plan.removed) == replaced
    assert set(report.plan.created) == {"stage.1.weight", "stage.1.bias"}


def test_two_norms_that_share_a_scale_still_share_it() -> None:
    model = fill(nn.Sequential(OffsetNorm(8), nn.Linear(8, 8), OffsetNorm(8)))
    model[2].weight = model[0].weight
    new, report = swap(model, RMS, TOKENS)
    assert report.counts == {"exact": 2}
    assert new[0].weight is new[2].weight
    y = rms(TOKENS, 1 + model[0].weight)
    assert_close(run(new, TOKENS), rms(model[1](y), 1 + model[0].weight))


def test_norms_that_share_a_tensor_and_read_it_differently_stay_right() -> None:
    """One adds 1 to the scale, the other does not."""
    model = fill(nn.Sequential(OffsetNorm(8), nn.Linear(8, 8), LlamaNorm(8)))
    model[2].weight = model[0].weight
    w = model[0].weight.detach().clone()
    y = model[1](rms(TOKENS, 1 + w))
    new, _ = swap(model, RMS, TOKENS)
    assert_close(run(new, TOKENS), rms(y, w))
    part, _ = swap(model, RMS, TOKENS, where="0")
    assert_close(run(part, TOKENS), rms(y, w))
    ns.swap_norms(model, RMS, TOKENS, where="0", inplace=True)
    assert_close(run(model, TOKENS), rms(y, w))


def test_scale_that_something_else_reads_keeps_its_value_there() -> None:
    model = Net(lambda m, x: m.norm(x) + m.scale, norm=OffsetNorm(8))
    model.scale = model.norm.weight
    model = fill(model)
    w = model.scale.detach().clone()
    new, _ = swap(model, RMS, TOKENS)
    assert_close(run(new, TOKENS), rms(TOKENS, 1 + w) + w)
    ns.swap_norms(model, RMS, TOKENS, inplace=True)
    assert_close(run(model, TOKENS), rms(TOKENS, 1 + w) + w)


def test_one_module_at_two_names_is_one_row() -> None:
    shared = OffsetNorm(8)
    model = fill(Net(lambda m, x: m.b(m.between(m.a(x))), a=shared, between=nn.GELU(), b=shared))
    new, report = swap(model, RMS, TOKENS)
    assert new.a is new.b
    assert find_site(report, "b").names == ("a", "b")
    assert report.counts == {"exact": 1}
    only, again = swap(model, RMS, TOKENS, where="b")
    assert again.counts == {"exact": 1}
    assert only.a is only.b


def test_parametrised_scale_is_refused_or_right() -> None:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return 2 * w

    model = fill(nn.Sequential(LlamaNorm(8), nn.Linear(8, 8)))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    expected = model[1](rms(TOKENS, model[0].weight.detach()))
    for inputs in ((TOKENS,), ()):
        new, report = swap(model, {**RMS, LlamaNorm: nn.RMSNorm}, *inputs)
        assert report.sites, "every norm has an answer"
        assert_close(run(new, TOKENS), expected)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_is_kept() -> None:
    model = fill(nn.Sequential(nn.Linear(8, 8), OffsetNorm(8).cuda()))
    model[1].cuda()
    new, report = ns.swap_norms(model, RMS)
    assert new[1].weight.device == model[1].weight.device
    assert new[0].weight.device.type == "cpu"
    assert report.counts == {"exact": 1}


# Keys of the mapping


KINDS: list[Any] = [
    nn.LayerNorm(8),
    PlainLayerNorm(8),
    OffsetLayerNorm(8),
    nn.RMSNorm(8, eps=1e-6),
    LlamaNorm(8),
    OffsetNorm(8),
    nn.GroupNorm(2, 8),
    nn.BatchNorm1d(8),
    nn.BatchNorm2d(8),
    nn.BatchNorm3d(8),
    nn.SyncBatchNorm(8),
    nn.InstanceNorm1d(8, affine=True),
    nn.InstanceNorm2d(8, affine=True),
    norms.FrozenBatchNorm(8),
    norms.ScaleNorm(8),
    norms.DyT(8),
]


class Derived(LlamaNorm):
    """A subclass that computes the same."""


def swapped_by(key: Any, modules: list[nn.Module]) -> set[str]:
    model = nn.ModuleList([copy.deepcopy(m) for m in modules])
    plan = ns.plan_swap_norms(model, {key: lambda site: copy.deepcopy(site.module)})
    return {type(model.get_submodule(s.name)).__name__ for s in plan.sites}


@pytest.mark.parametrize(
    ("key", "classes"),
    [
        (nn.LayerNorm, {"LayerNorm", "PlainLayerNorm", "OffsetLayerNorm"}),
        ("layer", {"LayerNorm", "PlainLayerNorm", "OffsetLayerNorm"}),
        ("layernorm", {"LayerNorm", "PlainLayerNorm", "OffsetLayerNorm"}),
        ("LayerNorm", {"LayerNorm", "PlainLayerNorm", "OffsetLayerNorm"}),
        (nn.RMSNorm, {"RMSNorm", "LlamaNorm", "OffsetNorm"}),
        (norms.RMSNorm, {"RMSNorm", "LlamaNorm", "OffsetNorm"}),
        ("rms", {"RMSNorm", "LlamaNorm", "OffsetNorm"}),
        ("rms_norm", {"RMSNorm", "LlamaNorm", "OffsetNorm"}),
        (nn.GroupNorm, {"GroupNorm"}),
        (nn.BatchNorm1d, {"BatchNorm1d"}),
        (nn.BatchNorm3d, {"BatchNorm3d"}),
        ("batch", {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}),
        (nn.InstanceNorm1d, {"InstanceNorm1d"}),
        ("instance", {"InstanceNorm1d", "InstanceNorm2d"}),
        ("frozenbatch", {"FrozenBatchNorm"}),
        ("frozen_batch", {"FrozenBatchNorm"}),
        (norms.FrozenBatchNorm, {"FrozenBatchNorm"}),
        (norms.ScaleNorm, {"ScaleNorm"}),
        ("dyt", {"DyT"}),
        (LlamaNorm, {"LlamaNorm"}),
        (OffsetLayerNorm, {"OffsetLayerNorm"}),
        (PlainLayerNorm, {"PlainLayerNorm"}),
    ],
    ids=lambda value: getattr(value, "__name__", value if isinstance(value, str) else ""),
)
def test_keys_by_behaviour_and_by_class(key: Any, classes: set[str]) -> None:
    assert swapped_by(key, KINDS) == classes


def test_batch_norm_with_rank_takes_the_synchronised_one_too_or_not_by_its_rank() -> None:
    """A SyncBatchNorm has no rank of its own."""
    assert {"BatchNorm2d"} <= swapped_by(nn.BatchNorm2d, KINDS) <= {"BatchNorm2d", "SyncBatchNorm"}


def test_any_other_class_stands_for_itself_alone() -> None:
    assert swapped_by(LlamaNorm, [LlamaNorm(8), Derived(8), OffsetNorm(8)]) == {"LlamaNorm"}
    assert swapped_by(Derived, [LlamaNorm(8), Derived(8), OffsetNorm(8)]) == {"Derived"}


def test_first_key_that_fits_counts() -> None:
    model = fill(nn.Sequential(LlamaNorm(8), OffsetNorm(8)))
    mapping = {LlamaNorm: norms.RMSNorm, "rms": nn.RMSNorm}
    new, _ = swap(model, mapping, TOKENS)
    assert [type(m) for m in new] == [norms.RMSNorm, nn.RMSNorm]
    new, _ = swap(model, dict(reversed(mapping.items())), TOKENS)
    assert [type(m) for m in new] == [nn.RMSNorm, nn.RMSNorm]


@pytest.mark.parametrize("side", ["key", "value"])
def test_name_that_is_no_kind_of_norm_is_an_error_that_lists_them(side: str) -> None:
    mapping: Any = {"no such": nn.RMSNorm} if side == "key" else {"layer": "no such"}
    model = fill(nn.Sequential(nn.LayerNorm(8)))
    with pytest.raises(ns.NormswapError, match=r"no such.*layer.*rms"):
        ns.swap_norms(model, mapping)


def test_unknown_method_is_an_error_that_lists_them() -> None:
    with pytest.raises(ns.NormswapError, match=r"sideways.*auto.*copy"):
        ns.swap_norms(fill(nn.Sequential(nn.LayerNorm(8))), RMS, method="sideways")


def test_calibrate_says_what_to_do() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8)))
    with pytest.raises(ns.NormswapError, match=r"calibrate.*copy"):
        ns.swap_norms(model, {"layer": "dyt"}, method="calibrate", inplace=True)
    assert type(model[0]) is nn.LayerNorm


def test_mapping_without_a_norm_in_the_model_changes_nothing() -> None:
    model = fill(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    new, report = swap(model, {nn.BatchNorm2d: nn.GroupNorm}, TOKENS)
    assert report.sites == ()
    assert_same(model, new, TOKENS, tol=1e-300)


# Values of the mapping


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (nn.RMSNorm, nn.RMSNorm),
        (norms.RMSNorm, norms.RMSNorm),
        (norms.OffsetRMSNorm, norms.OffsetRMSNorm),
        ("rms", nn.RMSNorm),
        ("rmsnorm", nn.RMSNorm),
        (LlamaNorm, LlamaNorm),
        (OffsetNorm, OffsetNorm),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_values_by_class_and_name(value: Any, kind: Any) -> None:
    model = fill(nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-3)))
    new, report = swap(model, {"rms": value}, TOKENS)
    assert_status(report, "exact", "1")
    assert isinstance(new[1], (kind, norms.RMSNorm) if value == "rms" else kind)
    assert_close(run(new, TOKENS), rms(model[0](TOKENS), model[1].weight, eps=1e-3))


def test_bias_is_kept_by_the_rms_norm_of_a_name() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8), nn.LayerNorm(8, bias=False)))
    new, _ = swap(model, {nn.LayerNorm: "rms"}, TOKENS, method="copy")
    y = rms(TOKENS, model[0].weight, model[0].bias, 1e-5)
    assert_close(run(new, TOKENS), rms(y, model[1].weight, eps=1e-5))


def test_class_without_a_bias_does_not_lose_one_silently() -> None:
    """``nn.RMSNorm`` has none; the report must say so, or a norm that has one is taken."""
    model = fill(nn.Sequential(nn.LayerNorm(8)))
    new, report = swap(model, {nn.LayerNorm: nn.RMSNorm}, TOKENS, method="copy")
    old = model[0]
    expected = rms(TOKENS, old.weight, old.bias, 1e-5)
    if report.sites[0].status != "refused" and relative_error(expected, run(new, TOKENS)) > 1e-12:
        assert "bias" in str(report)
        assert_close(run(new, TOKENS), rms(TOKENS, old.weight, eps=1e-5))


def test_callable_gets_the_site_and_its_module_the_parameters() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8, eps=1e-3), nn.Linear(8, 8), nn.LayerNorm(8)))
    sites: dict[str, Any] = {}

    def value(site: ns.NormSite) -> nn.Module:
        sites[site.name] = site
        return norms.RMSNorm(8, eps=site.spec.eps, bias=True)

    new, report = swap(model, {nn.LayerNorm: value}, TOKENS, method="copy")
    assert_status(report, "approximate", "0", "2")
    assert set(sites) == {"0", "2"}
    assert sites["0"].module is model[0]
    assert sites["0"].spec.kind == "layer"
    y = model[1](rms(TOKENS, model[0].weight, model[0].bias, 1e-3))
    assert_close(run(new, TOKENS), rms(y, model[2].weight, model[2].bias, 1e-5))


@pytest.mark.parametrize("value", [lambda site: norms.RMSNorm(8), LlamaNorm], ids=["call", "class"])
def test_plan_with_code_of_the_user_cannot_be_saved_and_says_so(value: Any) -> None:
    model = fill(nn.Sequential(OffsetNorm(8)))
    plan = ns.plan_swap_norms(model, {"rms": value})
    with pytest.raises(ns.NormswapError, match=r"cannot be saved.*'0'"):
        plan.to_json()
    assert_close(run(plan.apply(model), TOKENS), rms(TOKENS, 1 + model[0].weight))


def test_report_of_a_callable_can_be_shown(tmp_path: Path) -> None:
    model = fill(nn.Sequential(OffsetNorm(8)))
    new, report = ns.swap_norms(model, {"rms": lambda site: norms.RMSNorm(8)}, TOKENS)
    assert str(report)
    assert report.to_markdown()
    assert report._repr_html_()
    with pytest.raises(ns.NormswapError, match="cannot be saved"):
        ns.save(new, tmp_path / "out", report)
    assert not (tmp_path / "out").exists()


def test_module_of_a_callable_is_the_one_that_is_checked_and_returned() -> None:
    """It may be random: then the numbers in the report are those of the returned model."""

    def value(site: ns.NormSite) -> nn.Module:
        norm = nn.LayerNorm(8)
        nn.init.normal_(norm.weight)
        return norm

    model = fill(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    new, report = ns.swap_norms(model, {nn.LayerNorm: value}, TOKENS, method="init")
    drift = relative_error(run64(model, TOKENS), run64(new, TOKENS))
    assert report.verification.max_rel == pytest.approx(drift, rel=1e-4)


def test_class_with_an_argument_that_the_site_does_not_tell_is_an_error() -> None:
    class Needs(LlamaNorm):
        def __init__(self, size: int, temperature: float) -> None:
            super().__init__(size)

    with pytest.raises(ns.NormswapError, match=r"temperature.*callable"):
        ns.swap_norms(fill(nn.Sequential(LlamaNorm(8))), {"rms": Needs})


def test_unknown_norm_by_its_class_gets_an_answer() -> None:
    """The user names its class and says what to put there."""

    class Replacement(GatedNorm):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return 2 * super().forward(x, gate)

    model = fill(Net(lambda m, x: m.gated(x, x), gated=GatedNorm(8)))
    new, report = ns.swap_norms(model, {GatedNorm: lambda site: Replacement(8)}, TOKENS)
    (site,) = report.sites
    if site.status == "refused":
        assert site.reason == "unknown"
        assert_same(model, new, TOKENS, tol=1e-300)
    else:
        assert site.status in ("approximate", "initialised")
        assert type(new.gated) is Replacement


# method=


def test_auto_is_exact_where_it_can_be_and_copies_elsewhere() -> None:
    model = fill(nn.Sequential(nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.InstanceNorm2d(8)))
    new, report = swap(model, {"batch": "group", "instance": "group"}, IMAGE)
    assert [(s.name, s.status) for s in report.sites] == [("0", "approximate"), ("2", "exact")]
    y = model[1](group(IMAGE, 4, model[0].weight, model[0].bias))
    assert_close(run(new, IMAGE), group(y, 8))


def test_exact_refuses_what_is_not_and_keeps_it() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8), nn.Tanh(), OffsetNorm(8)))
    new, report = swap(
        model, {"layer": "dyt", "rms": nn.RMSNorm}, TOKENS, method="exact", where=None
    )
    assert find_site(report, "0").reason == "not-equivalent"
    assert_status(report, "exact", "2")
    assert type(new[0]) is nn.LayerNorm
    assert_same(model, new, TOKENS, tol=EXACT)


def test_exact_measures_a_difference_in_eps() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8, eps=1e-5)))
    value = lambda site: nn.LayerNorm(8, eps=1.1e-5)  # noqa: E731
    _, report = swap(model, {nn.LayerNorm: value}, TOKENS, method="exact")
    assert find_site(report, "0").reason == "not-equivalent"


def test_init_leaves_the_new_norms_fresh() -> None:
    model = fill(nn.Sequential(nn.BatchNorm2d(8), OffsetNorm(6)))
    x = random_input(2, 8, 6, 6)
    new, report = ns.swap_norms(model, {"batch": nn.GroupNorm, "rms": nn.RMSNorm}, x, method="init")
    assert report.counts == {"initialised": 2}
    assert_close(run(new, x), rms(group(x, 4)))
    assert {row.status for row in report.mapping} == {"initialised"}


def test_copy_fills_what_the_old_norm_does_not_have_with_what_changes_nothing() -> None:
    model = fill(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, elementwise_affine=False)))
    new, report = swap(model, {nn.LayerNorm: OffsetLayerNorm}, TOKENS)
    assert_status(report, "exact", "1")
    assert_close(run(new, TOKENS), layer(model[0](TOKENS)))
    frozen, _ = swap(fill(nn.Sequential(nn.BatchNorm2d(8, affine=False))), {"batch": "frozenbatch"})
    assert_close(frozen[0].weight, torch.ones(8).double())


def test_copy_to_dyt_carries_scale_and_shift() -> None:
    model = fill(nn.Sequential(nn.LayerNorm(8)))
    new, report = swap(model, {nn.LayerNorm: "dyt"}, TOKENS, method="copy")
    assert_status(report, "approximate", "0")
    rows = {row.target: (row.sources, row.status) for row in report.mapping}
    assert rows["0.weight"] == (("0.weight",), "approximate")
    assert rows["0.alpha"] == ((), "initialised")
    expected = torch.tanh(0.5 * TOKENS) * model[0].weight + model[0].bias
    assert_close(run(new, TOKENS), expected)


# where= and strict=


@pytest.mark.parametrize(
    "where",
    ["blocks.1.*", ["blocks.1.*", "no such"], lambda site: site.name.startswith("blocks.1")],
    ids=["glob", "globs", "predicate"],
)
def test_where_selects_norms(where: Any) -> None:
    blocks = [nn.Sequential(nn.Linear(8, 8), OffsetNorm(8)) for _ in range(3)]
    model = fill(Net(lambda m, x: m.blocks(x), blocks=nn.Sequential(*blocks)))
    new, report = swap(model, RMS, TOKENS, where=where)
    assert_status(report, "exact", "blocks.1.1")
    for name in ("blocks.0.1", "blocks.2.1"):
        assert find_site(report, name).reason == "where"
        assert type(new.get_submodule(name)) is OffsetNorm
    assert type(new.blocks[1][1]) is nn.RMSNorm


def test_predicate_sees_what_a_norm_computes() -> None:
    model = fill(nn.Sequential(OffsetNorm(8), LlamaNorm(8)))
    new, _ = swap(model, RMS, TOKENS, where=lambda site: site.spec.unit_offset)
    assert [type(m) for m in new] == [nn.RMSNorm, LlamaNorm]


def test_where_that_matches_nothing_swaps_nothing() -> None:
    model = fill(nn.Sequential(OffsetNorm(8)))
    new, report = swap(model, RMS, TOKENS, where="no such")
    assert report.reasons == {"where": 1}
    assert_same(model, new, TOKENS, tol=1e-300)


@pytest.mark.parametrize("inplace", [True, False])
def test_strict_raises_where_a_norm_is_refused(inplace: bool) -> None:
    model = fill(nn.Sequential(OffsetNorm(8), nn.LayerNorm(8)))
    before = description(model)
    with pytest.raises(ns.RefusedError, match=r"'1'.*not-equivalent"):
        ns.swap_norms(
            model,
            {"rms": nn.RMSNorm, "layer": "dyt"},
            method="exact",
            strict=True,
            inplace=inplace,
        )
    assert description(model) == before


def test_strict_is_content_with_approximate_swaps_and_with_where() -> None:
    model = fill(nn.Sequential(OffsetNorm(8), nn.LayerNorm(8), nn.LayerNorm(8)))
    _, report = ns.swap_norms(
        model, {"rms": "rms", "layer": "dyt"}, method="copy", strict=True, where=["0", "1"]
    )
    assert report.counts == {"exact": 1, "approximate": 1, "refused": 1}


def test_strict_raises_for_an_unknown_norm() -> None:
    model = fill(Net(lambda m, x: m.gated(m.norm(x), x), norm=LlamaNorm(8), gated=GatedNorm(8)))
    with pytest.raises(ns.RefusedError, match=r"gated.*unknown"):
        ns.swap_norms(model, RMS, strict=True)


# The report


def test_error_of_an_approximate_swap_is_measured_at_its_site() -> None:
    model = fill(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)))
    new, report = swap(model, {nn.LayerNorm: "rms"}, TOKENS, method="copy")
    x = model[0](TOKENS)
    error = relative_error(run(model[1], x), run(new[1], x))
    assert report.sites[0].error == pytest.approx(error, rel=1e-3)
    assert report.verification.max_rel == pytest.approx(error, rel=1e-3)
    assert report.verification.level == "model"


def test_without_inputs_sites_are_checked_alone() -> None:
    model = fill(Block())
    _, report = ns.swap_norms(model, BLOCK, method="copy")
    assert find_site(report, "offset").error < EXACT
    assert 1e-3 < find_site(report, "layer").error < 10
    assert report.verification is None or report.verification.level in ("site", "none")


def test_verification_can_be_left_out() -> None:
    model = fill(Block())
    new, report = ns.swap_norms(model, BLOCK, TOKENS, method="copy", verify=False)
    assert report.verification is None or report.verification.level == "none"
    assert_close(run(new, TOKENS), block_by_hand(model, TOKENS))


def test_mapping_names_where_each_tensor_comes_from() -> None:
    model = fill(nn.Sequential(PlainLayerNorm(8), nn.BatchNorm2d(8), OffsetNorm(8)))
    mapping = {"layer": nn.LayerNorm, "batch": "frozenbatch", "rms": nn.RMSNorm}
    _, report = ns.swap_norms(model, mapping)
    rows = {row.target: (row.sources, row.status) for row in report.mapping}
    assert rows == {
        "0.weight": (("0.scale",), "exact"),
        "0.bias": (("0.offset",), "exact"),
        "1.weight": (("1.weight",), "exact"),
        "1.bias": (("1.bias",), "exact"),
        "1.running_mean": (("1.running_mean",), "exact"),
        "1.running_var": (("1.running_var",), "exact"),
        "2.weight": (("2.weight",), "exact"),
    }


def test_mapping_tells_an_offset_from_a_copy() -> None:
    model = fill(nn.Sequential(OffsetNorm(8), LlamaNorm(8)))
    _, report = ns.swap_norms(model, RMS)
    ops = {row.target: row.op for row in report.mapping}
    assert ops["0.weight"] != ops["1.weight"]


def test_report_says_everything_in_every_form() -> None:
    model = fill(Block())
    _, report = ns.swap_norms(model, BLOCK, TOKENS, method="copy")
    assert report.counts == {"exact": 1, "approximate": 2}
    for text in (str(report), report.to_markdown(), report.to_json()):
        for site in report.sites:
            assert site.name in text
        assert "RMSNorm" in text
    again = type(report).from_json(report.to_json())
    assert again.to_json() == report.to_json()
    assert "<" in report._repr_html_()
    assert "approximate" in str(report)


# Plans, the meta device, and files


def test_plan_goes_through_json() -> None:
    model = fill(Block())
    plan = ns.plan_swap_norms(model, BLOCK, method="copy")
    text = plan.to_json()
    json.loads(text)
    again = ns.Plan.from_json(text)
    assert again.to_json() == text
    assert_same(plan.apply(model), again.apply(model), TOKENS, tol=1e-300)
    assert_close(run(again.apply(model), TOKENS), block_by_hand(model, TOKENS))


def test_plan_of_the_meta_device_holds_for_the_real_model() -> None:
    model = fill(Block())
    with torch.device("meta"):
        empty = Block().double().eval()
    plan = ns.plan_swap_norms(empty, BLOCK, method="copy")
    here = ns.plan_swap_norms(model, BLOCK, method="copy")
    assert [(s.name, s.status) for s in plan.sites] == [(s.name, s.status) for s in here.sites]
    assert_close(run(plan.apply(model), TOKENS), block_by_hand(model, TOKENS))
    moved = plan.apply(empty)
    assert all(t.is_meta for t in moved.parameters())
    assert set(moved.state_dict()) == set(plan.apply(model).state_dict())


def test_plan_of_another_model_is_rejected() -> None:
    plan = ns.plan_swap_norms(fill(Block()), BLOCK)
    other = fill(nn.Sequential(OffsetNorm(8)))
    before = description(other)
    with pytest.raises(ns.NormswapError, match="another model"):
        plan.apply(other, inplace=True)
    assert description(other) == before


class _LargestReal(TorchDispatchMode):
    """The largest tensor, in elements, that any op makes off the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(value, Tensor) and not value.is_meta:
                self.largest = max(self.largest, value.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("target", [nn.RMSNorm, norms.OffsetRMSNorm], ids=["plain", "offset"])
def test_70b_model_on_the_meta_device_is_planned_and_changed_without_memory(target: Any) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    with _LargestReal() as mode:
        sites = ns.find_norms(model).expect_count(161)
        plan = ns.plan_swap_norms(model, {"rms": target})
        new = plan.apply(model)
    assert {s.spec.kind for s in sites} == {"rms"}
    assert [s.status for s in plan.sites] == ["exact"] * 161
    assert sum(type(m) is target for m in new.modules()) == 161
    assert all(t.is_meta for t in new.parameters())
    assert set(new.state_dict()) == set(model.state_dict())
    assert mode.largest < 2**24, f"{mode.largest} bytes"
    again = ns.Plan.from_json(plan.to_json()).apply(model)
    assert sum(type(m) is target for m in again.modules()) == 161


def test_plan_is_carried_out_on_a_checkpoint_as_in_memory(tmp_path: Path) -> None:
    model = fill(Block())
    plan = ns.plan_swap_norms(model, BLOCK, method="copy")
    save_file(state_copy(model), tmp_path / "model.safetensors")
    plan.apply_to_checkpoint(tmp_path / "model.safetensors", tmp_path / "out")
    written: dict[str, Tensor] = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        written |= load_file(path)
    new = plan.apply(model)
    for name, tensor in new.state_dict().items():
        assert torch.equal(written[name], tensor), name
    left = set(plan.removed) & set(written)
    assert all(written[name].numel() == 0 for name in left)  # the guard against wrong loads


def test_plan_that_makes_new_tensors_is_carried_out_on_a_checkpoint(tmp_path: Path) -> None:
    """A norm without scale and shift becomes one that has them; a slope is new."""
    model = fill(nn.Sequential(nn.BatchNorm2d(8, affine=False), nn.BatchNorm2d(8), nn.LayerNorm(6)))
    mapping = {"batch": "frozenbatch", "layer": norms.DyT}
    plan = ns.plan_swap_norms(model, mapping, method="copy")
    save_file(state_copy(model), tmp_path / "model.safetensors")
    plan.apply_to_checkpoint(tmp_path / "model.safetensors", tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, tensor in plan.apply(model).state_dict().items():
        assert torch.equal(written[name].reshape(tensor.shape), tensor), name


def build() -> nn.Module:
    return Block().double()


@pytest.mark.parametrize("method", ["copy", "auto", "init"])
def test_swapped_model_is_saved_and_loaded(tmp_path: Path, method: str) -> None:
    model = fill(Block())
    new, report = ns.swap_norms(model, BLOCK, TOKENS, method=method)
    ns.save(new, tmp_path / "out", report)
    again = ns.load(tmp_path / "out", arch=build)
    assert [type(m) for m in again.modules()] == [type(m) for m in new.modules()]
    assert_state_equal(again, state_copy(new))
    assert_same(new, again, TOKENS, tol=1e-300)


def test_swapped_transformers_model_is_saved_and_loaded(tmp_path: Path) -> None:
    """An offset is added once: loading the changed weights does not add it again."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GemmaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=40,
    )
    model = randomise(transformers.GemmaForCausalLM(config)).eval()
    ids = torch.randint(1, 40, (2, 6))
    new, report = ns.swap_norms(model, RMS, ids)
    assert report.counts == {"exact": 5}
    assert report.verification.passed
    ns.save(new, tmp_path / "out", report)
    again = ns.load(tmp_path / "out")
    assert_state_equal(again, state_copy(new))
    before, after = run64(model, ids), run64(again, ids)
    assert relative_error(before.logits, after.logits) < 1e-5  # 1 + w was rounded to float32
    assert torch.equal(run(new, ids).logits, run(again, ids).logits)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    twice, second = ns.swap_norms(again, RMS, ids)
    ns.save(twice, tmp_path / "twice", second)
    assert_state_equal(ns.load(tmp_path / "twice"), state_copy(new))


@pytest.mark.filterwarnings("ignore")
def test_swapped_encoder_layer_is_saved_and_loaded(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double()

    model = fill(make())
    new, report = ns.swap_norms(model, {nn.LayerNorm: "rms"}, TOKENS, method="copy")
    ns.save(new, tmp_path / "out", report)
    again = ns.load(tmp_path / "out", arch=make)
    assert_same(new, again, TOKENS, tol=1e-300)


# Wrappers


@pytest.mark.filterwarnings("ignore")
def test_wrappers_are_looked_through() -> None:
    model = fill(Block())
    for wrapped in (nn.DataParallel(model), torch.compile(model, backend="eager")):
        assert [s.name for s in ns.find_norms(wrapped)] == [s.name for s in ns.find_norms(model)]
        new, report = ns.swap_norms(wrapped, BLOCK, TOKENS, method="copy")
        assert {s.name for s in report.sites} == {"offset", "stage.1", "layer"}
        assert_close(run(new, TOKENS), block_by_hand(model, TOKENS))
    assert type(model.offset) is OffsetNorm


@pytest.mark.filterwarnings("ignore")
def test_compiled_model_swapped_in_place_runs_its_new_norms() -> None:
    model = fill(Block())
    expected = block_by_hand(copy.deepcopy(model), TOKENS)
    compiled = torch.compile(model, backend="eager")
    run(compiled, TOKENS)
    same, _ = ns.swap_norms(compiled, BLOCK, TOKENS, method="copy", inplace=True)
    assert same is compiled
    assert_close(run(same, TOKENS), expected)


@pytest.mark.filterwarnings("ignore")
def test_script_module_is_refused_with_a_message() -> None:
    scripted = torch.jit.script(fill(nn.Sequential(nn.LayerNorm(8))))
    with pytest.raises(ns.RefusedError, match=r"(?i)script"):
        ns.swap_norms(scripted, {"layer": "rms"})


@pytest.mark.filterwarnings("ignore")
def test_lazy_norm_is_refused_with_a_message() -> None:
    with pytest.raises(ns.RefusedError, match=r"(?i)lazy.*run"):
        ns.swap_norms(nn.Sequential(nn.LazyBatchNorm2d()), {"batch": "group"})


# Finding


def zoo() -> nn.Module:
    """Norms of many kinds beside modules that are none, two layers of each."""
    layers = [
        nn.ModuleDict(
            {
                "layer": nn.LayerNorm(8),
                "plain": PlainLayerNorm(8),
                "first": ChannelsFirst(8),
                "rms": nn.RMSNorm(8),
                "llama": LlamaNorm(8),
                "offset": OffsetNorm(8),
                "group": nn.GroupNorm(2, 8),
                "instance": nn.InstanceNorm2d(8),
                "batch1": nn.BatchNorm1d(8),
                "batch2": nn.BatchNorm2d(8),
                "sync": nn.SyncBatchNorm(8),
                "frozen": norms.FrozenBatchNorm(8),
                "scale": norms.ScaleNorm(8),
                "dyt": norms.DyT(8),
                "response": nn.LocalResponseNorm(3),
                "linear": nn.Linear(8, 8),
                "attention": nn.MultiheadAttention(8, 2),
                "softmax": nn.Softmax(-1),
                "act": nn.ReLU(),
                "dropout": nn.Dropout(),
                "nothing": nn.Identity(),
                "affine": norms.NoNorm(8),
                "pool": nn.AvgPool2d(2),
                "rnn": nn.GRU(8, 8),
                "table": nn.Embedding(4, 8),
            }
        )
        for _ in range(2)
    ]
    return Net(lambda m, x: x, layers=nn.ModuleList(layers)).eval()


FOUND = {
    "layer": "layer",
    "plain": "layer",
    "first": "layer",
    "rms": "rms",
    "llama": "rms",
    "offset": "rms",
    "group": "group",
    "instance": "instance",
    "batch1": "batch",
    "batch2": "batch",
    "sync": "batch",
    "frozen": "frozen_batch",
    "scale": "scale",
    "dyt": "dyt",
    "response": "response",
}


def test_norms_of_every_kind_are_found_and_nothing_else() -> None:
    sites = ns.find_norms(zoo())
    kinds = {f"layers.{i}.{n}": kind for i in range(2) for n, kind in FOUND.items()}
    assert {s.name: s.spec.kind for s in sites} == kinds
    assert [s.name for s in sites] == list(kinds), "in the order of the model"


def test_found_norms_can_be_filtered_counted_and_shown() -> None:
    sites = ns.find_norms(zoo())
    assert [s.name for s in sites.where("layers.0.*", kind="rms")] == [
        "layers.0.rms",
        "layers.0.llama",
        "layers.0.offset",
    ]
    sites.where(["*.group", "*.layer"]).expect_count(4)
    sites.where(lambda s: s.spec.unit_offset).expect_count(2)
    sites.expect_count(30)
    with pytest.raises(ns.NormswapError, match=r"expected 31 norms, found 30(.|\n)*offset"):
        sites.expect_count(31)
    text = str(sites)
    assert "layers.{0..1}.offset" in text or "layers.{0,1}.offset" in text
    for word in ("30 norms", "layer", "rms", "frozen_batch", "LlamaNorm"):
        assert word in text
    assert len(sites) == len(list(sites)) == 30
    assert sites[0].module is not None


def test_spec_names_the_parameters() -> None:
    model = nn.Sequential(PlainLayerNorm(8, e=1e-4), nn.LayerNorm(8, bias=False), LlamaNorm(8))
    specs = [s.spec for s in ns.find_norms(model)]
    assert [(s.weight, s.bias) for s in specs] == [
        ("scale", "offset"),
        ("weight", None),
        ("weight", None),
    ]
    assert specs[0].eps == pytest.approx(1e-4)
    assert [s.axes for s in specs] == [(-1,)] * 3


def test_calls_are_counted_with_inputs() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.twice(m.once(m.twice(x)))

    model = fill(Net(forward, once=OffsetNorm(8), twice=nn.LayerNorm(8), never=nn.LayerNorm(8)))
    assert {s.name: s.calls for s in ns.find_norms(model, TOKENS)} == {
        "once": 1,
        "twice": 2,
        "never": 0,
    }
    assert {s.calls for s in ns.find_norms(model)} == {None}


def test_functional_norms_are_found_with_inputs_and_have_an_answer() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = nn.functional.layer_norm(m.norm(x), (8,), m.weight)
        return nn.functional.rms_norm(y, (8,), eps=1e-3)

    model = Net(forward, norm=nn.LayerNorm(8))
    model.weight = nn.Parameter(torch.ones(8))
    model = fill(model)
    sites = ns.find_norms(model, TOKENS)
    assert [(s.name, s.spec.kind) for s in sites] == [
        ("norm", "layer"),
        ("layer_norm#0", "layer"),
        ("rms_norm#0", "rms"),
    ]
    assert sites[2].spec.eps == 1e-3
    new, report = swap(model, {nn.LayerNorm: nn.LayerNorm}, TOKENS)
    assert_status(report, "exact", "norm")
    assert_status(report, "refused", "layer_norm#0")
    assert_same(model, new, TOKENS)


def test_unknown_norm_is_found_without_a_spec_and_with_a_reason() -> None:
    sites = ns.find_norms(nn.Sequential(GatedNorm(8), nn.LayerNorm(8)))
    assert [s.name for s in sites] == ["0", "1"]
    assert sites[0].spec is None
    assert "input" in sites[0].reason
    assert "unknown" in str(sites)
