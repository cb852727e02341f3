"""What the public functions promise besides right numbers."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FunctionalBatchNorm,
    Net,
    assert_folded,
    assert_refused,
    assert_same,
    assert_state_equal,
    batch_norm_names,
    check_report,
    double,
    random_input,
    relative_error,
    run,
    state_copy,
)
from torch import Tensor, nn

import normswap as ns

IMAGE = random_input(2, 3, 8, 8)


class Block(nn.Module):
    """Two norms that fold back, one that folds forward, one that stays, one never called."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.stage = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.forward_norm = nn.BatchNorm2d(4)
        self.head = nn.Conv2d(4, 5, 1)
        self.kept = nn.BatchNorm2d(3)
        self.spare = nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.stage(y) + y
        skip = F.gelu(self.kept(x)).mean(1, keepdim=True)
        return self.head(self.forward_norm(y)) + skip


def block(seed: int = 0) -> Block:
    model = double(Block(), seed)
    assert isinstance(model, Block)
    return model


def plain(*layers: nn.Module) -> nn.Sequential:
    model = double(nn.Sequential(*layers))
    assert isinstance(model, nn.Sequential)
    return model


def description(model: nn.Module) -> list[Any]:
    """Classes, modes, hooks, and for each tensor its identity, dtype, layout and flag."""
    modules = [
        (n, type(m), m.training, len(m._forward_hooks), len(m._forward_pre_hooks), id(m))
        for n, m in model.named_modules(remove_duplicate=False)
    ]
    tensors = [
        (n, id(t), t.dtype, t.stride(), t.requires_grad, t._version)
        for n, t in [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    ]
    return [*modules, *tensors]


# The input model


def test_input_model_is_untouched() -> None:
    model = block()
    model.conv1.to(memory_format=torch.channels_last)
    model.head.weight.requires_grad_(False)
    model.spare.train()
    model.head.register_forward_hook(lambda m, i, o: None)
    state, before = state_copy(model), description(model)
    x = IMAGE.clone()
    _, report = ns.fold_batchnorm(model, x)
    check_report(model, report)
    assert_state_equal(model, state)
    assert description(model) == before
    assert torch.equal(x, IMAGE)


def test_input_that_the_model_writes_into_is_untouched() -> None:
    model = plain(nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    x = IMAGE.clone()
    _, report = ns.fold_batchnorm(model, x)
    assert_folded(report, "2")
    assert torch.equal(x, IMAGE)


def test_result_shares_no_tensor_with_the_input_model() -> None:
    model = block()
    new, _ = ns.fold_batchnorm(model, IMAGE)
    state = state_copy(model)
    with torch.no_grad():
        for tensor in [*new.parameters(), *new.buffers()]:
            tensor.zero_()
    assert_state_equal(model, state)


def test_model_in_training_mode_is_untouched_and_nothing_is_folded() -> None:
    model = block().train()
    state, before = state_copy(model), description(model)
    new, report = ns.fold_batchnorm(model, IMAGE)
    check_report(model, report)
    assert report.counts == {"refused": 5}
    assert set(report.reasons) <= {"training-mode", "batch-statistics", "not-called"}
    assert_state_equal(model, state)
    assert description(model) == before
    assert_state_equal(new, state)


def test_global_state_is_restored() -> None:
    modules = torch.nn.modules.module
    with torch.enable_grad():
        ns.fold_batchnorm(block(), IMAGE)
        with pytest.raises(Exception, match=r".*"):
            ns.fold_batchnorm(block(), torch.randn(2, 7, 8, 8, dtype=torch.float64))
        assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()
    assert not modules._global_forward_hooks
    assert not modules._global_forward_pre_hooks
    assert torch.get_default_dtype() == torch.float32


def test_result_is_not_made_of_inference_tensors() -> None:
    new, _ = ns.fold_batchnorm(block(), IMAGE)
    assert not any(t.is_inference() for t in [*new.parameters(), *new.buffers()])
    run_with_gradient = new(IMAGE).square().mean()
    run_with_gradient.backward()
    assert new.get_parameter("conv1.weight").grad is not None


@functools.lru_cache
def cached_grid(side: int) -> Tensor:
    return torch.linspace(0.0, 1.0, side, dtype=torch.float64)


def test_caches_outside_of_the_model_hold_no_tensor_of_the_capture() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return F.relu(m.bn(m.c(x))) + cached_grid(x.shape[-1] - 2)

    cached_grid.cache_clear()
    model = double(Net(forward, c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert_folded(report, "bn")
    assert type(run(model, IMAGE)) is Tensor
    assert type(cached_grid(6)) is Tensor
    assert_same(model, new, IMAGE)


def test_transformers_model_that_ran_before_is_captured_too() -> None:
    """It records hidden states by hooks that its first run installs."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        depths=[1] * 4, hidden_sizes=[8] * 4, num_attention_heads=[1] * 4, decoder_hidden_size=8
    )
    model = double(transformers.SegformerForSemanticSegmentation(config))
    x = random_input(1, 3, 64, 64)
    for _ in range(2):
        new, report = ns.fold_batchnorm(model, x)
        assert report.counts == {"exact": 1}
        assert relative_error(run(model, x).logits, run(new, x).logits) < 1e-12
        assert len(run(new, x, output_hidden_states=True).hidden_states) == 4


# What stays as it was in the result


def test_everything_not_rewritten_stays() -> None:
    model = block()
    model.head.weight.requires_grad_(False)
    model.conv1.weight.requires_grad_(False)
    model.spare.train()
    model.extra = nn.Linear(3, 3).double()
    model.extra_again = model.extra
    model.register_buffer("table", torch.arange(4), persistent=False)
    model.note = {"any": "attribute"}
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert_folded(report, "bn1", "stage.1", "forward_norm")
    assert isinstance(new, Block)
    assert new.extra_again is new.extra
    assert new.spare.training
    assert not new.training
    assert torch.equal(new.table, model.table)
    assert "table" not in new.state_dict()
    assert new.note == model.note
    assert not new.head.weight.requires_grad
    assert not new.conv1.weight.requires_grad
    assert not new.conv1.bias.requires_grad
    assert new.stage[0].weight.requires_grad
    assert type(new.kept) is nn.BatchNorm2d


def test_names_of_what_stays_are_the_same() -> None:
    model = block()
    new, _ = ns.fold_batchnorm(model, IMAGE)
    folded = ("bn1.", "stage.1.", "forward_norm.")
    before = [n for n in model.state_dict() if not n.startswith(folded)]
    created = {"conv1.bias"}
    assert set(new.state_dict()) - created == set(before)


def test_result_can_be_copied_and_pickled(tmp_path: Any) -> None:
    new, _ = ns.fold_batchnorm(block(), IMAGE)
    assert_same(new, copy.deepcopy(new), IMAGE, tol=1e-300)
    torch.save(new, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    assert_same(new, again, IMAGE, tol=1e-300)


# In place


def test_in_place_returns_the_same_model() -> None:
    model = block()
    expected = copy.deepcopy(model)
    same, report = ns.fold_batchnorm(model, IMAGE, inplace=True)
    assert same is model
    assert_folded(report, "bn1", "stage.1", "forward_norm")
    assert_same(expected, model, IMAGE)


class Spiteful(nn.Module):
    """Looks at its own modules, so that no fold of its norm can be right."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3)
        self.bn2 = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.bn(self.conv(x))))
        neutral = not isinstance(self.bn, nn.BatchNorm2d) or bool(
            torch.all(self.bn.running_mean == 0)
        )
        return y + 1 if neutral else y


class Attribute(nn.Module):
    """Reads an attribute of its norm that an identity does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) * self.bn.num_features


@pytest.mark.parametrize("make", [Spiteful, Attribute])
@pytest.mark.parametrize("inplace", [True, False])
def test_failed_verification_restores_the_model(
    make: Callable[[], nn.Module], inplace: bool
) -> None:
    model = double(make())
    state, before = state_copy(model), description(model)
    expected = run(model, IMAGE)
    try:
        new, report = ns.fold_batchnorm(model, IMAGE, inplace=inplace)
    except ns.NormswapError:
        assert_state_equal(model, state)
        now = [row[:2] for row in description(model)]
        assert now == [row[:2] for row in before]
    else:
        # Refusing such a norm, or keeping what the model reads of it, is right too.
        check_report(double(make()), report)
        assert relative_error(expected, run(new, IMAGE)) < 1e-12


def test_failed_capture_leaves_the_model_alone() -> None:
    model = block()
    state, before = state_copy(model), description(model)
    with pytest.raises(ns.NormswapError):
        ns.fold_batchnorm(model, torch.randn(2, 7, 8, 8, dtype=torch.float64), inplace=True)
    assert_state_equal(model, state)
    assert description(model) == before


def test_in_place_on_a_shared_parameter_keeps_the_sharing() -> None:
    model = block()
    model.other = nn.Conv2d(4, 5, 1).double()
    model.other.bias = model.head.bias
    ns.fold_batchnorm(model, IMAGE, inplace=True)
    assert model.other.bias is model.head.bias or not torch.equal(model.other.bias, model.head.bias)


def test_norm_as_the_model_itself() -> None:
    model = double(nn.BatchNorm2d(3))
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert len(report.sites) == 1
    assert report.sites[0].status == "refused"
    assert_same(model, new, IMAGE)


def test_model_without_norms() -> None:
    model = plain(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4))
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert report.sites == ()
    assert_same(model, new, IMAGE)


# Options


def test_strict_raises_where_a_norm_is_refused() -> None:
    model = block()
    state = state_copy(model)
    with pytest.raises(ns.RefusedError, match=r"kept|spare"):
        ns.fold_batchnorm(model, IMAGE, strict=True, inplace=True)
    assert_state_equal(model, state)


def test_strict_is_content_where_every_norm_folds() -> None:
    model = plain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    new, report = ns.fold_batchnorm(model, IMAGE, strict=True)
    assert_folded(report, "1")
    assert_same(model, new, IMAGE)


@pytest.mark.parametrize(
    "where",
    ["stage.*", ["bn?", "stage.1"], ["stage.1"], lambda site: site.name.startswith("stage")],
    ids=["glob", "globs", "name", "predicate"],
)
def test_where_selects_norms(where: Any) -> None:
    model = block()
    new, report = ns.fold_batchnorm(model, IMAGE, where=where)
    check_report(model, report)
    assert_folded(report, "stage.1")
    chosen = isinstance(where, list) and "bn?" in where
    assert type(new.bn1) is (nn.Identity if chosen else nn.BatchNorm2d)
    assert_refused(report, "forward_norm", "where")
    assert_same(model, new, IMAGE)


def test_where_that_matches_nothing_folds_nothing() -> None:
    model = block()
    new, report = ns.fold_batchnorm(model, IMAGE, where="no.such.*")
    assert set(report.counts) == {"refused"}
    assert_state_equal(new, state_copy(model))


def test_verification_can_be_left_out() -> None:
    model = block()
    new, report = ns.fold_batchnorm(model, IMAGE, verify=False)
    assert report.verification is None or report.verification.level == "none"
    assert_same(model, new, IMAGE)


# Example inputs


def with_keywords() -> nn.Module:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor, *, other: Tensor | None = None, flag: bool = False) -> Tensor:
            y = self.bn(self.c(x))
            y = y if other is None else y + self.bn(self.c(other))
            return y if flag else F.relu(y)

    return double(Two())


def test_inputs_in_every_form() -> None:
    model = with_keywords()
    for inputs, keywords in [
        (IMAGE, None),
        ((IMAGE,), None),
        ([IMAGE], None),
        ({"x": IMAGE}, None),
        ({"x": IMAGE, "flag": True}, None),
        (IMAGE, {"flag": True}),
        ((IMAGE,), {"flag": True}),
    ]:
        new, report = ns.fold_batchnorm(model, inputs, example_kwargs=keywords)
        assert_folded(report, "bn")
        assert_same(model, new, IMAGE)


def test_input_of_another_precision_is_made_to_fit() -> None:
    model = plain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    new, report = ns.fold_batchnorm(model, IMAGE.float())
    assert_folded(report, "1")
    assert_same(model, new, IMAGE)


def test_missing_inputs_are_asked_for() -> None:
    with pytest.raises(ns.NormswapError, match=r"example_inputs|fold_batchnorm"):
        ns.fold_batchnorm(block())


def test_nested_outputs_are_compared() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.bn(m.c(x))
        return {"a": [y, (F.relu(y), None)], "n": 3}

    model = double(Net(forward, c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert_folded(report, "bn")
    assert_same(model, new, IMAGE)


# Plans


def test_plan_is_the_same_on_the_meta_device() -> None:
    model = block()
    with torch.device("meta"):
        empty = Block().double().eval()
    plan = ns.plan_fold_batchnorm(empty, torch.empty(2, 3, 8, 8, device="meta"))
    here = ns.plan_fold_batchnorm(model, IMAGE)
    assert [(s.name, s.reason) for s in plan.sites] == [(s.name, s.reason) for s in here.sites]
    new = plan.apply(model)
    assert_same(model, new, IMAGE)
    assert set(new.state_dict()) == set(here.apply(model).state_dict())


def test_plan_goes_through_json() -> None:
    model = block()
    plan = ns.plan_fold_batchnorm(model, IMAGE)
    text = plan.to_json()
    json.loads(text)
    again = type(plan).from_json(text)
    assert again.to_json() == text
    assert_same(plan.apply(model), again.apply(model), IMAGE, tol=1e-300)


def test_planning_changes_nothing() -> None:
    model = block()
    state, before = state_copy(model), description(model)
    ns.plan_fold_batchnorm(model, IMAGE)
    assert_state_equal(model, state)
    assert description(model) == before


def test_plan_of_another_model_is_rejected() -> None:
    plan = ns.plan_fold_batchnorm(block(), IMAGE)
    other = plain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    state = state_copy(other)
    with pytest.raises(ns.NormswapError):
        plan.apply(other, inplace=True)
    assert_state_equal(other, state)


# Wrappers and forms that are not supported


@pytest.mark.filterwarnings("ignore")
def test_compiled_model_is_looked_through() -> None:
    model = block()
    compiled = torch.compile(model, backend="eager")
    new, report = ns.fold_batchnorm(compiled, IMAGE)
    assert_folded(report, "bn1", "stage.1", "forward_norm")
    assert_same(model, new, IMAGE)
    assert batch_norm_names(model) == ["bn1", "stage.1", "forward_norm", "kept", "spare"]


@pytest.mark.filterwarnings("ignore")
def test_data_parallel_is_looked_through() -> None:
    model = block()
    new, report = ns.fold_batchnorm(nn.DataParallel(model), IMAGE)
    assert_folded(report, "bn1", "stage.1", "forward_norm")
    assert_same(model, new, IMAGE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_script_module_is_refused_with_a_message(how: str) -> None:
    model = plain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    scripted = torch.jit.script(model) if how == "script" else torch.jit.trace(model, IMAGE)
    with pytest.raises(ns.RefusedError, match=r"(?i)script"):
        ns.fold_batchnorm(scripted, IMAGE)


@pytest.mark.filterwarnings("ignore")
def test_lazy_module_is_refused_with_a_message() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()).eval()
    try:
        _, report = ns.fold_batchnorm(model, torch.randn(2, 3, 8, 8))
    except ns.RefusedError as error:
        message = str(error)
    else:
        assert_refused(report, "1", "lazy")
        message = report.sites[0].detail
    assert "lazy" in message.lower() or "run" in message.lower()
    assert model[0].has_uninitialized_params()


@pytest.mark.filterwarnings("ignore")
def test_lazy_module_folds_after_its_first_run() -> None:
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d()).eval()
    model(torch.randn(2, 3, 8, 8))
    model = double(model)
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert_folded(report, "1")
    assert_same(model, new, IMAGE)


def test_something_that_is_no_module_is_an_error_that_says_so() -> None:
    with pytest.raises((ns.NormswapError, TypeError), match="Module"):
        ns.fold_batchnorm({"weight": torch.zeros(3)}, IMAGE)  # type: ignore[arg-type]


# Found norms and the report


def test_every_norm_is_found() -> None:
    model = block()
    sites = ns.find_norms(model, IMAGE)
    assert {s.name for s in sites} >= set(batch_norm_names(model))
    assert {s.spec.kind for s in sites} == {"batch"}


def test_functional_norms_are_found_with_inputs() -> None:
    class Inline(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            y, n = self.conv(x), self.norm
            y = F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias)
            return F.batch_norm(torch.relu(y), n.running_mean, n.running_var)

    model = plain(Inline(), FunctionalBatchNorm(4))
    names = {s.name.split(":")[0]: s.name for s in ns.find_norms(model, IMAGE)}
    assert names["0"].startswith("0:batch_norm#")
    assert names["1"] in ("1", "1:batch_norm#0")


def test_report_says_everything_in_every_form() -> None:
    _, report = ns.fold_batchnorm(block(), IMAGE)
    assert report.counts == {"exact": 3, "refused": 2}
    assert sum(report.reasons.values()) == 2
    assert report.reasons["not-called"] == 1
    assert report.verification.passed
    assert report.verification.level == "model"
    assert report.verification.max_rel < 1e-12
    for text in (str(report), report.to_markdown(), report.to_json()):
        for site in report.sites:
            assert site.name in text
    again = type(report).from_json(report.to_json())
    assert again.to_json() == report.to_json()
    assert json.loads(report.to_json())
    assert "conv1" in next(s.action for s in report.sites if s.name == "bn1")
    assert "<" in report._repr_html_()


def test_mapping_names_what_each_new_weight_is_made_of() -> None:
    _, report = ns.fold_batchnorm(block(), IMAGE)
    rows = {row.target: set(row.sources) for row in report.mapping}
    assert {"conv1.weight", "bn1.weight", "bn1.running_var"} <= rows["conv1.weight"]
    assert "bn1.running_mean" in rows["conv1.bias"]


def test_verify_tells_equal_models_from_different_ones() -> None:
    model, other = block(), block(seed=1)
    assert ns.verify(model, copy.deepcopy(model), IMAGE).passed
    assert not ns.verify(model, other, IMAGE).passed


def test_forward_fold_is_not_compared_at_its_site() -> None:
    """The output of a norm that was folded into its reader is another one, under any name."""
    model = double(
        Net(lambda m, x: m.backbone(m.bn(x)), bn=nn.BatchNorm2d(3), backbone=nn.Conv2d(3, 4, 1))
    )
    new, report = ns.fold_batchnorm(model, IMAGE)
    (site,) = report.sites
    assert (site.status, site.action) == ("exact", "folded forward into backbone")
    assert site.error is None
    assert_same(model, new, IMAGE)
