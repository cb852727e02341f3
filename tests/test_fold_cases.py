"""Folding BatchNorm: faults that users of other tools reported, as small models.

Every model has random statistics and affines with negative and zero gammas, and every result is
compared in float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding import IMAGE, chain, fold, fold_all, unchanged
from helpers import (
    BatchNormAct,
    FunctionalBatchNorm,
    Net,
    assert_folded,
    assert_no_norm_computes,
    assert_refused,
    assert_same,
    assert_state_equal,
    check_report,
    double,
    find_site,
    random_input,
    relative_error,
    run,
    state_copy,
)
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import normswap as ns

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


# The plain fold: every rank, form and option of the layer in front


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_conv_of_every_rank_takes_the_norm(rank: int, bias: bool, affine: bool) -> None:
    model = chain(CONVS[rank](3, 5, 3, bias=bias), NORMS[rank](5, affine=affine, eps=1e-3))
    new = fold_all(model, random_input(2, 3, *(6,) * rank), names=("1",))
    assert new.get_parameter("0.bias").dtype == torch.float64
    assert new.get_parameter("0.bias").device == model.get_parameter("0.weight").device


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_takes_the_norm(bias: bool, affine: bool) -> None:
    model = chain(nn.Linear(4, 6, bias=bias), nn.BatchNorm1d(6, affine=affine))
    fold_all(model, random_input(5, 4), names=("1",))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(
    ("inside", "outside", "groups"),
    [(4, 4, 2), (4, 6, 2), (6, 4, 2), (4, 4, 4), (4, 8, 4), (3, 5, 1), (4, 4, 1)],
)
def test_transposed_conv_scales_its_output_channels(
    rank: int, inside: int, outside: int, groups: int
) -> None:
    conv = TRANSPOSED[rank](inside, outside, 3, stride=2, groups=groups, output_padding=1)
    model = chain(conv, NORMS[rank](outside))
    fold_all(model, random_input(2, inside, *(4,) * rank), names=("1",))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("multiplier", [1, 2])
def test_depthwise_conv_has_its_bias_scaled_too(bias: bool, multiplier: int) -> None:
    conv = nn.Conv2d(4, 4 * multiplier, 3, groups=4, bias=bias)
    model = chain(conv, nn.BatchNorm2d(4 * multiplier))
    fold_all(model, random_input(2, 4, 6, 6), names=("1",))


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, "same", "valid", (0, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_options_of_the_conv_are_kept(mode: str, padding: Any, groups: int) -> None:
    conv = nn.Conv2d(4, 6, 3, padding=padding, padding_mode=mode, groups=groups, dilation=2)
    model = chain(conv, nn.BatchNorm2d(6))
    new = fold_all(model, random_input(2, 4, 9, 9), names=("1",))
    kept = new.get_submodule("0")
    for name in ("groups", "dilation", "padding", "padding_mode", "stride", "kernel_size"):
        assert getattr(kept, name) == getattr(conv, name)


@pytest.mark.parametrize("transposed", [False, True])
def test_channels_last_conv_keeps_its_memory_format(transposed: bool) -> None:
    conv = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 6, 3)
    model = chain(conv, nn.BatchNorm2d(6)).to(memory_format=torch.channels_last)
    x = random_input(2, 4, 5, 5).to(memory_format=torch.channels_last)
    new = fold_all(model, x, names=("1",))
    weight = new.get_parameter("0.weight")
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.stride() == model.get_parameter("0.weight").stride()
    assert run(new, x).stride() == run(model, x).stride()


def test_sync_batch_norm_in_eval_folds() -> None:
    fold_all(chain(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4)), IMAGE, names=("1",))


def test_frozen_batch_norm_folds() -> None:
    ops = pytest.importorskip("torchvision.ops")
    model = chain(nn.Conv2d(3, 4, 3), ops.FrozenBatchNorm2d(4, eps=1e-3))
    new, report = fold(model, IMAGE)
    assert_folded(report, "1")
    x = random_input(1, 4, 6, 6)
    assert relative_error(x, run(new.get_submodule("1"), x)) < 1e-12


def test_instance_norm_with_running_statistics_folds() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    new, report = fold(model, IMAGE)
    assert_folded(report, "1")
    x = random_input(1, 4, 6, 6)
    assert relative_error(x, run(new.get_submodule("1"), x)) < 1e-12


def test_instance_norm_without_running_statistics_is_left_alone() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True))
    new, report = fold(model, IMAGE)
    assert all(site.status == "refused" for site in report.sites)
    assert unchanged(model, new, "1")


def test_norm_without_a_beta_folds() -> None:
    norm = nn.BatchNorm2d(4)
    norm.bias = None
    fold_all(chain(nn.Conv2d(3, 4, 3), norm), IMAGE, names=("1",))


def test_eps_of_each_norm_is_its_own() -> None:
    layers: list[nn.Module] = []
    for eps in (1e-5, 1e-3, 0.1, 0.0):
        layers += [nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, eps=eps), nn.GELU()]
    fold_all(chain(*layers), IMAGE, names=("1", "4", "7", "10"))


# Fan-out and sharing


def test_shared_conv_with_one_norm_leaves_the_other_call_alone() -> None:
    model = double(
        Net(lambda m, x, y: m.bn(m.c(x)) + m.c(y), c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))
    )
    _, report = fold(model, IMAGE, random_input(2, 3, 8, 8, seed=2))
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn", "shared", "other-reader", "output")


def test_shared_conv_is_not_folded_twice() -> None:
    model = double(
        Net(
            lambda m, x: m.bn1(m.c(x)) + m.bn2(m.c(x)),
            c=nn.Conv2d(3, 4, 3),
            bn1=nn.BatchNorm2d(4),
            bn2=nn.BatchNorm2d(4),
        )
    )
    _, report = fold(model, IMAGE)
    for name in ("bn1", "bn2"):
        if find_site(report, name).status != "exact":
            assert_refused(report, name)


def test_one_value_read_by_two_norms_is_not_folded_twice() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        return m.bn1(y) * m.bn2(y)

    model = double(Net(forward, c=nn.Conv2d(3, 4, 3), bn1=nn.BatchNorm2d(4), bn2=nn.BatchNorm2d(4)))
    _, report = fold(model, IMAGE)
    for name in ("bn1", "bn2"):
        if find_site(report, name).status != "exact":
            assert_refused(report, name)


def test_conv_whose_output_is_returned_keeps_the_norm() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.c(x)
        return m.bn(y), y

    model = double(Net(forward, c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    new, report = fold(model, IMAGE)
    assert_refused(report, "bn", "output", "other-reader")
    assert unchanged(model, new, "c")
    assert unchanged(model, new, "bn")


def test_conv_read_by_a_norm_and_a_skip_keeps_the_norm() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        return F.relu(m.bn(y)) + y

    model = double(Net(forward, c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    _, report = fold(model, IMAGE)
    assert_refused(report, "bn")


def test_output_read_only_for_its_shape_is_no_second_reader() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        return m.bn(y).reshape(y.shape[0], -1) + torch.zeros_like(y).reshape(y.shape[0], -1)

    fold_all(double(Net(forward, c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))), IMAGE)


def test_one_norm_behind_two_convs_is_right() -> None:
    model = double(
        Net(
            lambda m, x: F.relu(m.bn(m.a(x))) + F.relu(m.bn(m.b(x))),
            a=nn.Conv2d(3, 4, 3),
            b=nn.Conv2d(3, 4, 3, padding=1, stride=1),
            bn=nn.BatchNorm2d(4),
        )
    )
    model.b.padding = (0, 0)
    _, report = fold(model, IMAGE)
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn", "shared")


def test_one_norm_of_which_only_one_call_can_fold_stays_for_the_other() -> None:
    model = double(
        Net(
            lambda m, x: F.relu(m.bn(m.a(x))) + F.relu(m.bn(F.relu(m.b(x)))),
            a=nn.Conv2d(3, 4, 3),
            b=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
        )
    )
    fold(model, IMAGE)


def test_norm_at_two_names_is_one_site_with_both() -> None:
    norm = nn.BatchNorm2d(4)
    model = double(
        Net(
            lambda m, x: F.relu(m.bn1(m.a(x))) - F.relu(m.bn2(m.b(x))),
            a=nn.Conv2d(3, 4, 3),
            b=nn.Conv2d(3, 4, 3),
            bn1=norm,
            bn2=norm,
        )
    )
    _, report = fold(model, IMAGE)
    assert {"bn1", "bn2"} <= {*find_site(report, "bn1").names, find_site(report, "bn1").name}


def test_tied_weights_are_not_corrupted() -> None:
    model = Net(
        lambda m, x: F.relu(m.bn(m.a(x))) + m.b(x),
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(3, 4, 3),
        bn=nn.BatchNorm2d(4),
    )
    model.b.weight = model.a.weight
    new, report = fold(double(model), IMAGE)
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn")
        assert new.b.weight is new.a.weight


def test_tied_bias_is_not_corrupted() -> None:
    model = Net(
        lambda m, x: F.relu(m.bn(m.a(x))) + m.b(x),
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(3, 4, 3),
        bn=nn.BatchNorm2d(4),
    )
    model.b.bias = model.a.bias
    fold(double(model), IMAGE)


def test_weight_read_a_second_time_is_not_changed() -> None:
    model = double(
        Net(
            lambda m, x: (F.relu(m.bn(m.c(x))), m.c.weight.square().sum()),
            c=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
        )
    )
    _, report = fold(model, IMAGE)
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn", "shared", "other-reader", "output")


# Statistics


@pytest.mark.parametrize("affine", [True, False])
def test_norm_without_running_statistics_is_refused(affine: bool) -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=affine, track_running_stats=False))
    new, report = ns.fold_batchnorm(model, IMAGE)
    check_report(model, report)
    assert_refused(report, "1", "batch-statistics")
    assert_same(model, new, IMAGE)
    assert unchanged(model, new, "0")


def test_flag_flipped_later_changes_nothing() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model[1].track_running_stats = False
    fold_all(model, IMAGE, names=("1",))


def test_norm_in_training_mode_is_refused() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4))
    model[1].train()
    state = state_copy(model)
    new, report = ns.fold_batchnorm(model, IMAGE)
    check_report(model, report)
    assert_refused(report, "1", "training-mode", "batch-statistics")
    assert_folded(report, "3")
    assert_state_equal(model, state)
    assert new.get_submodule("1").training
    assert relative_error(run(model, IMAGE), run(new, IMAGE)) < 1e-12


@pytest.mark.parametrize(("var", "eps"), [(1e-12, 1e-12), (0.0, 1e-5), (1e-30, 1e-3), (1e8, 1e-5)])
def test_extreme_variances_are_finite_and_right(var: float, eps: float) -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=eps))
    model[1].running_var.fill_(var)
    new = fold_all(model, IMAGE, names=("1",))
    assert new.get_parameter("0.weight").isfinite().all()


def test_gamma_zero_gives_beta() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    with torch.no_grad():
        model[1].weight.zero_()
    new = fold_all(model, IMAGE, names=("1",))
    assert torch.allclose(run(new, IMAGE)[0, :, 0, 0], model[1].bias.detach())


def test_never_updated_statistics_are_right() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double().eval()
    fold_all(model, IMAGE, names=("1",))


# Functional norms, subclasses


@pytest.mark.parametrize("keywords", [False, True])
def test_functional_norm_is_found_and_folded(keywords: bool) -> None:
    model = double(
        Net(
            lambda m, x: F.relu(m.bn(m.c(x))),
            c=nn.Conv2d(3, 4, 3),
            bn=FunctionalBatchNorm(4, keywords=keywords, eps=1e-3),
        )
    )
    new, report = fold(model, IMAGE)
    assert_folded(report, "bn")
    assert_no_norm_computes(new, IMAGE)


def test_functional_norm_of_the_root_with_raw_tensors() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3)
            self.mean = nn.Buffer(torch.randn(4))
            self.var = nn.Buffer(torch.rand(4) + 0.5)
            self.gamma = nn.Parameter(torch.randn(4))
            self.beta = nn.Parameter(torch.randn(4))

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.c(x), self.mean, self.var, self.gamma, self.beta)

    model = chain(Raw())
    new, report = fold(model, IMAGE)
    assert [(s.name, s.status) for s in report.sites] == [("0:batch_norm#0", "exact")]
    assert_no_norm_computes(new, IMAGE)
    new, report = fold(model[0], IMAGE)
    assert [s.status for s in report.sites] == ["exact"]
    assert_no_norm_computes(new, IMAGE)


def test_functional_norm_without_affine_folds_or_is_refused() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3)
            self.mean = nn.Buffer(torch.randn(4))
            self.var = nn.Buffer(torch.rand(4) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.c(x), self.mean, self.var)

    _, report = fold(Raw().double().eval(), IMAGE)
    assert len(report.sites) == 1


def test_functional_norm_in_training_is_refused() -> None:
    class Raw(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return F.batch_norm(self.c(x), None, None, training=True)

    _, report = fold(Raw().double().eval(), IMAGE)
    assert [s.reason for s in report.sites] == ["batch-statistics"]


def test_functional_norms_that_share_their_tensors_are_right() -> None:
    model = double(
        Net(
            lambda m, x: m.bn(m.a(x)) * m.bn(F.relu(m.b(x))),
            a=nn.Conv2d(3, 4, 3),
            b=nn.Conv2d(3, 4, 3),
            bn=FunctionalBatchNorm(4),
        )
    )
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert report.sites
    assert_same(model, new, IMAGE)


@pytest.mark.parametrize("act", [nn.ReLU(), nn.GELU(), nn.Identity()])
def test_norm_with_an_activation_inside_keeps_the_activation(act: nn.Module) -> None:
    model = chain(nn.Conv2d(3, 4, 3), BatchNormAct(4, act), nn.Conv2d(4, 4, 3), BatchNormAct(4))
    new, report = fold(model, IMAGE)
    assert_folded(report, "1", "3")
    assert_no_norm_computes(new, IMAGE)
    assert run(new, IMAGE).min() >= 0


def test_norm_with_an_activation_inside_is_not_pushed_forward() -> None:
    model = chain(nn.ReLU(), BatchNormAct(3), nn.Conv2d(3, 4, 1))
    _, report = fold(model, IMAGE)
    if find_site(report, "1").status != "exact":
        assert_refused(report, "1", "activation-between", "input")


def test_subclass_that_does_more_than_the_norm_is_right() -> None:
    class Doubling(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input) + input.mean()

    model = chain(nn.Conv2d(3, 4, 3), Doubling(4))
    fold(model, IMAGE)


def test_timm_norm_with_activation_folds() -> None:
    timm_layers = pytest.importorskip("timm.layers")
    model = chain(nn.Conv2d(3, 4, 3), timm_layers.BatchNormAct2d(4, act_layer=nn.SiLU))
    new, report = fold(model, IMAGE)
    assert_folded(report, "1")
    assert_no_norm_computes(new, IMAGE)


# Hooks


@pytest.mark.parametrize("where", ["c", "bn"])
def test_forward_hook_on_either_module_is_refused(where: str) -> None:
    model = double(Net(lambda m, x: m.bn(m.c(x)), c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    seen: list[Tensor] = []
    model.get_submodule(where).register_forward_hook(lambda m, i, o: seen.append(o))
    new, report = ns.fold_batchnorm(model, IMAGE)
    check_report(model, report)
    assert_refused(report, "bn", "hook")
    assert_same(model, new, IMAGE)
    assert len(new.get_submodule(where)._forward_hooks) == 1


def test_pre_hook_on_the_norm_is_refused() -> None:
    model = double(Net(lambda m, x: m.bn(m.c(x)), c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    model.bn.register_forward_pre_hook(lambda m, i: None)
    _, report = ns.fold_batchnorm(model, IMAGE)
    assert_refused(report, "bn", "hook")


def test_hook_that_changes_a_value_is_respected() -> None:
    model = double(Net(lambda m, x: m.bn(m.c(x)), c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    model.c.register_forward_hook(lambda m, i, o: o.abs())
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert_refused(report, "bn", "hook", "op", "activation-between")
    assert_same(model, new, IMAGE)


def test_hook_on_the_block_around_a_conv_is_refused() -> None:
    model = chain(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4))
    model[0].register_forward_hook(lambda m, i, o: None)
    _, report = ns.fold_batchnorm(model, IMAGE)
    assert_refused(report, "1", "hook")


def test_hook_on_a_module_that_sees_the_same_values_does_not_block() -> None:
    model = chain(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.ReLU())
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda m, i, o: seen.append(o))
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert_folded(report, "0.1")
    assert len(new.get_submodule("0")._forward_hooks) == 1
    seen.clear()
    run(model, IMAGE)
    run(new, IMAGE)
    assert relative_error(seen[0], seen[1]) < 1e-12


# Parameters that are not plain


def _weight_norm(c: nn.Conv2d) -> nn.Module:
    return parametrizations.weight_norm(c)


def _old_weight_norm(c: nn.Conv2d) -> nn.Module:
    return nn.utils.weight_norm(c)


def _pruned(c: nn.Conv2d) -> nn.Module:
    prune.l1_unstructured(c, "weight", amount=0.4)
    return c


def _parametrised(c: nn.Conv2d) -> nn.Module:
    class Absolute(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.abs()

    parametrize.register_parametrization(c, "weight", Absolute())
    return c


def _bias_parametrised(c: nn.Conv2d) -> nn.Module:
    parametrize.register_parametrization(c, "bias", nn.Softplus())
    return c


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change", [_weight_norm, _old_weight_norm, _pruned, _parametrised, _bias_parametrised]
)
def test_computed_parameters_are_refused(change: Any) -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    change(model[0])
    run(model, IMAGE)
    new, report = ns.fold_batchnorm(model, IMAGE)
    check_report(model, report)
    assert_refused(report, "1", "parametrised", "hook", "no-bias")
    assert_same(model, new, IMAGE)


def test_low_rank_adapter_in_front_of_a_norm_is_right() -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 8)
            self.down = nn.Linear(6, 2, bias=False)
            self.up = nn.Linear(2, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x) + self.up(self.down(x)) * 0.5

    model = chain(Adapted(), nn.BatchNorm1d(8))
    _, report = fold(model, random_input(4, 6))
    if find_site(report, "1").status != "exact":
        assert_refused(report, "1", "op", "parametrised", "shared", "output")


@pytest.mark.filterwarnings("ignore")
def test_quantised_layer_in_front_of_a_norm_is_refused() -> None:
    quantization = pytest.importorskip("torch.ao.quantization")
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)).eval()
    model = quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)
    x = torch.randn(4, 6)
    expected = run(model, x)
    try:
        new, report = ns.fold_batchnorm(model, x)
    except ns.RefusedError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert "quant" in message.lower()
        return
    assert_refused(report, "1", "quantised", "op")
    assert torch.equal(run(new, x), expected)


# Folding again, exporting, saving


def test_folding_twice_does_nothing_the_second_time() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    once, _ = fold(model, IMAGE)
    twice, report = ns.fold_batchnorm(once, IMAGE)
    assert not [s for s in report.sites if s.status == "exact"]
    assert_state_equal(twice, state_copy(once))


def test_model_whose_norm_is_already_an_identity() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.Identity(), nn.ReLU())
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert report.sites == ()
    assert_state_equal(new, state_copy(model))


def batch_norm_nodes(program: torch.export.ExportedProgram) -> list[str]:
    """The nodes of an exported program that compute a batch norm."""
    return [str(n.target) for n in program.graph.nodes if "batch_norm" in str(n.target)]


def exported_model() -> nn.Sequential:
    """Several forms of a norm, all of which fold."""
    return chain(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        BatchNormAct(6),
        nn.Conv2d(6, 4, 1, bias=False),
        nn.BatchNorm2d(4, affine=False),
        nn.Flatten(),
        nn.Linear(256, 5),
        nn.BatchNorm1d(5),
    )


def test_exported_graph_holds_no_batch_norm() -> None:
    model = exported_model()
    new, report = fold(model, IMAGE)
    assert_folded(report, "1", "4", "6", "9")
    program = torch.export.export(new, (IMAGE,))
    # The class with an activation keeps its own forward, whose norm is neutral.
    assert len(batch_norm_nodes(program)) <= 1
    assert len(batch_norm_nodes(program.run_decompositions())) <= 1
    assert relative_error(run(model, IMAGE), run(program.module(), IMAGE)) < 1e-12


@pytest.mark.filterwarnings("ignore")
def test_onnx_file_holds_no_batch_norm(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).float()
    new, _ = ns.fold_batchnorm(model, IMAGE.float())
    path = tmp_path / "folded.onnx"
    torch.onnx.export(new, (IMAGE.float(),), str(path), dynamo=True, verbose=False)
    operators = [node.op_type for node in onnx.load(str(path)).graph.node]
    assert "BatchNormalization" not in operators
    assert operators == ["Conv", "Relu"]


def test_folded_weights_do_not_load_into_the_unfolded_model() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    new, _ = fold(model, IMAGE)
    with pytest.raises(RuntimeError, match="running_mean"):
        chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).load_state_dict(new.state_dict())


def build_saved() -> nn.Module:
    """The architecture of the next test."""
    return chain(nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU())


def test_saved_directory_says_what_it_is(tmp_path: Path) -> None:
    model = build_saved()
    new, report = fold(model, IMAGE)
    ns.save(new, tmp_path / "folded", report)
    with pytest.raises(ns.NormswapError, match="arch"):
        ns.load(tmp_path / "folded")
    again = ns.load(tmp_path / "folded", arch=build_saved)
    assert_same(model, again, IMAGE)
