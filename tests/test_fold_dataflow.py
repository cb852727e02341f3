"""Folding BatchNorm through the ops between a norm and the weights that take it.

Every model has random statistics and affines with negative and zero gammas, and every result is
compared in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from folding import IMAGE, chain, fold, fold_all, unchanged
from helpers import (
    Net,
    assert_folded,
    assert_refused,
    assert_same,
    check_report,
    double,
    find_site,
    random_input,
    relative_error,
    run,
)
from torch import Tensor, nn

import normswap as ns

# Axes


@pytest.mark.parametrize(
    ("features", "shape"),
    [((3, 5), (2, 5, 3)), ((5, 5), (2, 5, 5)), ((3, 4), (2, 5, 3))],
)
def test_linear_on_another_axis_than_the_norm_is_refused(
    features: tuple[int, int], shape: tuple[int, ...]
) -> None:
    model = chain(nn.Linear(*features), nn.BatchNorm1d(5))
    new, report = fold(model, random_input(*shape))
    assert_refused(report, "1", "axis-mismatch", "input", "output")
    assert unchanged(model, new, "0")
    assert unchanged(model, new, "1")


def test_linear_before_a_2d_norm_on_another_axis_is_refused() -> None:
    model = chain(nn.Linear(10, 20), nn.BatchNorm2d(5))
    _, report = fold(model, random_input(1, 5, 3, 10))
    assert_refused(report, "1", "axis-mismatch", "input", "output")


def test_linear_on_another_axis_as_reader_is_refused() -> None:
    model = double(
        Net(
            lambda m, x: m.fc(m.bn(F.relu(m.c(x)))),
            c=nn.Conv1d(3, 5, 1),
            bn=nn.BatchNorm1d(5),
            fc=nn.Linear(5, 7),
        )
    )
    new, report = fold(model, random_input(2, 3, 5))
    assert_refused(report, "bn")
    assert unchanged(model, new, "fc")


def test_axis_is_followed_through_a_transpose() -> None:
    model = double(
        Net(
            lambda m, x: m.bn(m.fc(x).transpose(1, 2)),
            fc=nn.Linear(5, 5),
            bn=nn.BatchNorm1d(5),
        )
    )
    fold_all(model, random_input(2, 5, 5))


def test_embedding_table_takes_the_norm() -> None:
    model = double(
        Net(
            lambda m, ids: m.bn(m.table(ids).transpose(1, 2)),
            table=nn.Embedding(11, 6, padding_idx=0),
            bn=nn.BatchNorm1d(6),
        )
    )
    ids = torch.tensor([[0, 3, 10], [7, 0, 1]])
    fold_all(model, ids)


def test_permuted_image_takes_the_norm() -> None:
    model = double(
        Net(
            lambda m, x: m.bn(m.fc(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
            fc=nn.Linear(3, 8),
            bn=nn.BatchNorm2d(8),
        )
    )
    fold_all(model, IMAGE)


# An activation in front: into the reader, where the reader allows it


def activated(reader: nn.Module, channels: int = 4) -> nn.Module:
    """conv → ReLU → norm → reader."""
    return double(
        Net(
            lambda m, x: m.reader(m.bn(F.relu(m.c(x)))),
            c=nn.Conv2d(3, channels, 3),
            bn=nn.BatchNorm2d(channels),
            reader=reader,
        )
    )


@pytest.mark.parametrize("sign", ["mixed", "positive", "negative"])
def test_norm_behind_relu_goes_into_the_next_conv_only(sign: str) -> None:
    model = Net(
        lambda m, x: m.c2(m.bn(F.relu(m.c1(x)))),
        c1=nn.Conv2d(3, 4, 3),
        bn=nn.BatchNorm2d(4),
        c2=nn.Conv2d(4, 5, 1),
    )
    model = double(model, sign=sign)
    new = fold_all(model, IMAGE)
    assert unchanged(model, new, "c1")
    assert not unchanged(model, new, "c2")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_next_conv_without_padding_takes_scale_and_shift(groups: int, bias: bool) -> None:
    fold_all(activated(nn.Conv2d(4, 6, 3, groups=groups, bias=bias, dilation=2)), IMAGE)


@pytest.mark.parametrize("bias", [True, False])
def test_shift_does_not_go_into_a_zero_padded_conv(bias: bool) -> None:
    model = activated(nn.Conv2d(4, 5, 3, padding=1, bias=bias))
    new, report = fold(model, IMAGE)
    assert unchanged(model, new, "c")
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn", "zero-padding", "activation-between")


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_shift_goes_into_a_conv_that_repeats_its_border(mode: str) -> None:
    fold_all(activated(nn.Conv2d(4, 5, 3, padding=1, padding_mode=mode)), IMAGE)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_explicit_padding_in_front_of_the_reader(mode: str) -> None:
    model = double(
        Net(
            lambda m, x: m.c2(F.pad(m.bn(F.relu(m.c(x))), (1, 0, 2, 1), mode=mode)),
            c=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
            c2=nn.Conv2d(4, 5, 3),
        )
    )
    _, report = fold(model, IMAGE)
    site = find_site(report, "bn")
    if mode == "constant" and site.status != "exact":
        assert_refused(report, "bn", "zero-padding", "activation-between")
    else:
        assert_folded(report, "bn")


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_explicit_padding_between_conv_and_norm(mode: str) -> None:
    model = double(
        Net(
            lambda m, x: F.relu(m.bn(F.pad(m.c(x), (1, 1, 1, 1), mode=mode))),
            c=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
        )
    )
    _, report = fold(model, IMAGE)
    site = find_site(report, "bn")
    if mode == "constant" and site.status != "exact":
        assert_refused(report, "bn", "zero-padding", "activation-between")
    else:
        assert_folded(report, "bn")


@pytest.mark.parametrize(
    "reader",
    [
        nn.ConvTranspose2d(4, 5, 1),
        nn.ConvTranspose2d(4, 6, 3, padding=2, groups=2),
        nn.ConvTranspose2d(4, 5, 3, padding=1),
        nn.ConvTranspose2d(4, 5, 3, stride=2),
        nn.ConvTranspose2d(4, 5, 3, padding=2, stride=2, output_padding=1),
        nn.ConvTranspose2d(4, 6, 3, padding=4, dilation=2, groups=2, bias=False),
    ],
    ids=lambda c: f"k{c.kernel_size[0]}s{c.stride[0]}p{c.padding[0]}g{c.groups}",
)
def test_transposed_conv_as_reader(reader: nn.ConvTranspose2d) -> None:
    _, report = fold(activated(reader), IMAGE)
    enough = reader.padding[0] >= reader.dilation[0] * (reader.kernel_size[0] - 1)
    if reader.stride[0] == 1 and enough:
        assert_folded(report, "bn")


def test_norm_read_by_two_convs_goes_into_both() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.bn(F.relu(m.c(x)))
        return m.a(y) * m.b(y)

    model = double(
        Net(
            forward,
            c=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
            a=nn.Conv2d(4, 5, 1),
            b=nn.Conv2d(4, 5, 1, bias=False),
        )
    )
    fold_all(model, IMAGE)


def test_norm_read_by_a_conv_and_a_padded_conv_is_all_or_none() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.bn(F.relu(m.c(x)))
        return m.a(y) * m.b(y)

    model = double(
        Net(
            forward,
            c=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
            a=nn.Conv2d(4, 5, 1),
            b=nn.Conv2d(4, 5, 3, padding=1),
        )
    )
    new, report = fold(model, IMAGE)
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn", "zero-padding", "activation-between")
        assert unchanged(model, new, "a")
        assert unchanged(model, new, "b")


def test_reader_that_is_called_twice_is_not_changed_for_both() -> None:
    model = double(
        Net(
            lambda m, x: m.c2(m.bn(F.relu(m.c1(x)))) + m.c2(F.relu(m.c1(x))),
            c1=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
            c2=nn.Conv2d(4, 5, 1),
        )
    )
    _, report = fold(model, IMAGE)
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn")


def test_preactivation_norm_is_answered() -> None:
    model = chain(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 4, 3))
    _, report = fold(model, IMAGE)
    if find_site(report, "0").status != "exact":
        assert_refused(report, "0", "activation-between", "input")


def test_norm_on_the_input_goes_into_the_first_conv() -> None:
    fold_all(chain(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3)), IMAGE, names=("0",))


@pytest.mark.parametrize(
    "act",
    [
        nn.ReLU(),
        nn.ReLU(inplace=True),
        nn.LeakyReLU(0.1),
        nn.PReLU(4),
        nn.ReLU6(),
        nn.GELU(),
        nn.SiLU(inplace=True),
        nn.Tanh(),
        nn.Sigmoid(),
        nn.Hardswish(),
    ],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("sign", ["mixed", "positive"])
def test_norm_does_not_go_back_through_an_activation(act: nn.Module, sign: str) -> None:
    model = chain(nn.Conv2d(3, 4, 3), act, nn.BatchNorm2d(4), sign=sign)
    new, report = fold(model, IMAGE)
    assert_refused(report, "2", "activation-between", "output")
    assert unchanged(model, new, "0")


@pytest.mark.parametrize("sign", ["mixed", "positive"])
def test_scale_alone_goes_back_through_relu_where_positive(sign: str) -> None:
    norm = nn.BatchNorm2d(4, affine=True)
    model = chain(nn.Conv2d(3, 4, 3), nn.ReLU(), norm, sign=sign)
    with torch.no_grad():
        norm.running_mean.zero_()
        norm.bias.zero_()
    _, report = fold(model, IMAGE)
    if sign == "mixed" or find_site(report, "2").status != "exact":
        assert_refused(report, "2", "activation-between", "negative-scale", "output")


# Sums and concatenations


def test_sum_with_a_raw_skip_is_left_as_it_is() -> None:
    model = double(
        Net(
            lambda m, x: F.relu(m.bn(m.a(x) + m.b(x) + x)),
            a=nn.Conv2d(3, 3, 3, padding=1),
            b=nn.Conv2d(3, 3, 1),
            bn=nn.BatchNorm2d(3),
        )
    )
    new, report = fold(model, IMAGE)
    assert_refused(report, "bn", "input", "activation-between")
    assert unchanged(model, new, "bn")
    assert unchanged(model, new, "a")


def test_sum_with_an_activated_skip_is_left_as_it_is() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.stem(x))
        return F.relu(m.bn(m.a(y) + y))

    model = double(
        Net(
            forward,
            stem=nn.Conv2d(3, 4, 1),
            a=nn.Conv2d(4, 4, 3, padding=1),
            bn=nn.BatchNorm2d(4),
        )
    )
    new, report = fold(model, IMAGE)
    assert_refused(report, "bn")
    assert unchanged(model, new, "bn")


@pytest.mark.parametrize("bias", [True, False])
def test_sum_of_two_convs_takes_the_scale_twice_and_the_shift_once(bias: bool) -> None:
    model = double(
        Net(
            lambda m, x: m.bn(m.a(x) + m.b(x)),
            a=nn.Conv2d(3, 4, 3, padding=1, bias=bias),
            b=nn.Conv2d(3, 4, 1, bias=bias),
            bn=nn.BatchNorm2d(4),
        )
    )
    fold_all(model, IMAGE)


def test_weighted_sums_and_differences() -> None:
    model = double(
        Net(
            lambda m, x: m.bn(torch.add(m.a(x), m.b(x), alpha=-0.5) - m.d(x) * 3.0),
            a=nn.Conv2d(3, 4, 1),
            b=nn.Conv2d(3, 4, 1),
            d=nn.Conv2d(3, 4, 1, bias=False),
            bn=nn.BatchNorm2d(4),
        )
    )
    fold(model, IMAGE)


def test_sum_of_a_conv_with_itself() -> None:
    model = double(
        Net(
            lambda m, x, y: m.bn(m.c(x) + m.c(y)),
            c=nn.Conv2d(3, 4, 1),
            bn=nn.BatchNorm2d(4),
        )
    )
    _, report = fold(model, IMAGE, random_input(2, 3, 8, 8, seed=2))
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn")


def test_conv_read_twice_by_one_sum() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        return m.bn(y + y)

    fold(double(Net(forward, c=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4))), IMAGE)


def test_sum_with_a_constant() -> None:
    model = double(Net(lambda m, x: m.bn(m.c(x) + 0.7), c=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4)))
    fold(model, IMAGE)


def test_rep_vgg_block_with_three_norms() -> None:
    model = double(
        Net(
            lambda m, x: F.relu(m.bn3(m.c3(x)) + m.bn1(m.c1(x)) + m.bn0(x)),
            c3=nn.Conv2d(3, 3, 3, padding=1, bias=False),
            bn3=nn.BatchNorm2d(3),
            c1=nn.Conv2d(3, 3, 1, bias=False),
            bn1=nn.BatchNorm2d(3),
            bn0=nn.BatchNorm2d(3),
        )
    )
    _, report = fold(model, IMAGE)
    assert_folded(report, "bn3", "bn1")
    assert_refused(report, "bn0")


def test_concatenation_is_split_over_its_branches() -> None:
    model = double(
        Net(
            lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], dim=1)),
            a=nn.Conv2d(3, 4, 1),
            b=nn.Conv2d(3, 5, 1, bias=False),
            bn=nn.BatchNorm2d(9, eps=1e-3),
        )
    )
    new = fold_all(model, IMAGE)
    assert not unchanged(model, new, "a")
    assert not unchanged(model, new, "b")


def test_concatenation_with_a_raw_branch_is_refused() -> None:
    model = double(
        Net(
            lambda m, x: m.bn(torch.cat([m.a(x), x], dim=1)),
            a=nn.Conv2d(3, 4, 1),
            bn=nn.BatchNorm2d(7),
        )
    )
    new, report = fold(model, IMAGE)
    assert_refused(report, "bn", "input", "output")
    assert unchanged(model, new, "a")


def test_concatenation_of_one_conv_twice() -> None:
    model = double(
        Net(
            lambda m, x, y: m.bn(torch.cat([m.c(x), m.c(y)], dim=1)),
            c=nn.Conv2d(3, 4, 1),
            bn=nn.BatchNorm2d(8),
        )
    )
    _, report = fold(model, IMAGE, random_input(2, 3, 8, 8, seed=2))
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn")


def test_concatenation_on_another_axis_needs_every_branch() -> None:
    model = double(
        Net(
            lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], dim=2)),
            a=nn.Conv2d(3, 4, 1),
            b=nn.Conv2d(3, 4, 1),
            bn=nn.BatchNorm2d(4),
        )
    )
    fold_all(model, IMAGE)


def test_parts_of_one_conv_with_a_norm_each() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = m.c(x).split([3, 5], dim=1)
        return torch.cat([F.gelu(m.bn1(a)), F.gelu(m.bn2(b))], dim=1)

    model = double(Net(forward, c=nn.Conv2d(3, 8, 3), bn1=nn.BatchNorm2d(3), bn2=nn.BatchNorm2d(5)))
    fold(model, IMAGE)


def test_one_part_normalised_the_other_raw() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        a, b = m.c(x).chunk(2, dim=1)
        return m.bn(a) * b

    fold(double(Net(forward, c=nn.Conv2d(3, 8, 3), bn=nn.BatchNorm2d(4))), IMAGE)


def test_channel_shuffle_between_conv_and_norm() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        n, c, h, w = y.shape
        y = y.reshape(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return F.relu(m.bn(y))

    fold_all(double(Net(forward, c=nn.Conv2d(3, 6, 3), bn=nn.BatchNorm2d(6))), IMAGE)


def test_channel_shuffle_layer() -> None:
    model = chain(nn.Conv2d(3, 6, 3), nn.ChannelShuffle(3), nn.BatchNorm2d(6))
    fold(model, IMAGE)


def test_pixel_shuffle_between_conv_and_norm() -> None:
    model = chain(nn.Conv2d(3, 12, 3), nn.PixelShuffle(2), nn.BatchNorm2d(3))
    fold(model, IMAGE)


# Containers, dropout, other layers between


def test_dropout_in_eval_between_conv_and_norm() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.Dropout2d(0.5), nn.Identity(), nn.BatchNorm2d(4))
    fold_all(model, IMAGE, names=("3",))


def test_dropout_in_training_between_conv_and_norm_is_refused_or_right() -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.Dropout(0.5), nn.BatchNorm2d(4))
    model[1].train()
    new, report = ns.fold_batchnorm(model, IMAGE)
    check_report(model, report)
    torch.manual_seed(0)
    expected = run(model, IMAGE)
    torch.manual_seed(0)
    assert relative_error(expected, run(new, IMAGE)) < 1e-12


def test_conv_in_nested_containers() -> None:
    model = chain(
        nn.Sequential(nn.Sequential(nn.Conv2d(3, 4, 3)), nn.Sequential(nn.BatchNorm2d(4))),
        nn.Sequential(nn.ReLU(), nn.Sequential(nn.Conv2d(4, 5, 3))),
        nn.BatchNorm2d(5),
    )
    fold_all(model, IMAGE, names=("0.1.0", "2"))


def test_modules_kept_in_lists_and_dicts() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        for conv, norm in zip(m.convs, m.norms.values(), strict=True):
            x = F.relu(norm(conv(x)))
        return x

    model = double(
        Net(
            forward,
            convs=nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)]),
            norms=nn.ModuleDict({"first": nn.BatchNorm2d(4), "second": nn.BatchNorm2d(4)}),
        )
    )
    fold_all(model, IMAGE, names=("norms.first", "norms.second"))


def test_norm_that_the_forward_indexes_by_position() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.body[2](m.body[1](m.body[0](x)))

    body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    fold_all(double(Net(forward, body=body)), IMAGE, names=("body.1",))


def test_norm_then_flatten_then_linear() -> None:
    model = chain(nn.ReLU(), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 64, 5))
    fold_all(model, IMAGE, names=("1",))


@pytest.mark.parametrize("sign", ["mixed", "positive"])
def test_norm_then_max_pool_then_conv(sign: str) -> None:
    model = chain(nn.ReLU(), nn.BatchNorm2d(3), nn.MaxPool2d(2), nn.Conv2d(3, 4, 3), sign=sign)
    _, report = fold(model, IMAGE)
    if sign == "positive":
        assert_folded(report, "1")
    else:
        assert_refused(report, "1", "negative-scale", "activation-between", "input")


@pytest.mark.parametrize("sign", ["mixed", "positive"])
@pytest.mark.parametrize("padding", [0, 1])
def test_conv_then_max_pool_then_norm(sign: str, padding: int) -> None:
    model = chain(
        nn.Conv2d(3, 4, 3), nn.MaxPool2d(3, 2, padding=padding), nn.BatchNorm2d(4), sign=sign
    )
    new, report = fold(model, IMAGE)
    if sign == "positive":
        assert_folded(report, "2")
    else:
        assert_refused(report, "2", "negative-scale", "output")
        assert unchanged(model, new, "0")


def test_max_pool_that_returns_its_indices() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y, where = F.max_pool2d(m.c(x), 2, return_indices=True)
        return F.max_unpool2d(m.bn(y), where, 2)

    model = double(Net(forward, c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)), sign="positive")
    fold(model, IMAGE)


def test_norm_then_average_pool_then_linear() -> None:
    model = chain(
        nn.ReLU(), nn.BatchNorm2d(3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 5)
    )
    fold_all(model, IMAGE, names=("1",))


@pytest.mark.parametrize(
    ("pool", "folds"),
    [
        (nn.AvgPool2d(2), True),
        (nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), True),
        (nn.AvgPool2d(3, 2, padding=1), False),
        (nn.AvgPool2d(2, divisor_override=3), False),
        (nn.AvgPool2d(3, 2, ceil_mode=True), None),
        (nn.AdaptiveAvgPool2d(3), True),
        (nn.Upsample(scale_factor=2), True),
        (nn.Upsample(scale_factor=2, mode="bilinear"), True),
        (nn.LPPool2d(2, 2), False),
    ],
    ids=str,
)
def test_pools_between_conv_and_norm(pool: nn.Module, folds: bool | None) -> None:
    model = chain(nn.Conv2d(3, 4, 3), pool, nn.BatchNorm2d(4))
    _, report = fold(model, IMAGE)
    if folds:
        assert_folded(report, "2")
    elif folds is False and find_site(report, "2").status != "exact":
        assert_refused(report, "2")


def test_padded_average_pool_does_not_take_a_shift_forward() -> None:
    model = chain(nn.ReLU(), nn.BatchNorm2d(3), nn.AvgPool2d(3, 1, 1), nn.Conv2d(3, 4, 1))
    _, report = fold(model, IMAGE)
    if find_site(report, "1").status != "exact":
        assert_refused(report, "1", "zero-padding", "op", "input", "activation-between")


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum, torch.amax])
def test_reductions_over_space(reduce: Any) -> None:
    model = double(
        Net(
            lambda m, x: m.bn(reduce(m.c(x), dim=(2, 3))),
            c=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm1d(4),
        ),
        sign="positive",
    )
    fold(model, IMAGE)


def test_norm_behind_norm() -> None:
    fold_all(
        chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4, eps=1e-2)),
        IMAGE,
        names=("1", "2"),
    )


def test_norm_behind_norm_before_a_conv() -> None:
    model = chain(nn.ReLU(), nn.BatchNorm2d(3), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1))
    fold_all(model, IMAGE, names=("1", "2"))


def test_conv_between_two_norms() -> None:
    model = chain(nn.ReLU(), nn.BatchNorm2d(3), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    fold_all(model, IMAGE, names=("1", "3"))


def test_norm_behind_squeeze_and_excitation() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        gate = torch.sigmoid(m.up(F.relu(m.down(y.mean((2, 3), keepdim=True)))))
        return m.bn(y * gate)

    model = double(
        Net(
            forward,
            c=nn.Conv2d(3, 4, 3),
            down=nn.Conv2d(4, 2, 1),
            up=nn.Conv2d(2, 4, 1),
            bn=nn.BatchNorm2d(4),
        )
    )
    fold(model, IMAGE)


def test_norm_before_squeeze_and_excitation_goes_into_the_conv() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.bn(m.c(x))
        return y * torch.sigmoid(m.gate(y.mean((2, 3), keepdim=True)))

    model = double(
        Net(forward, c=nn.Conv2d(3, 4, 3), gate=nn.Conv2d(4, 4, 1), bn=nn.BatchNorm2d(4))
    )
    fold_all(model, IMAGE)


def test_layer_scale_between_conv_and_norm() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3)
            self.gamma = nn.Parameter(torch.randn(4, 1, 1))
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(self.c(x) * self.gamma)

    fold(double(Scaled()), IMAGE)


def test_attention_projection_without_a_bias_gets_none() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
            self.bn = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.attention(x, x, x, need_weights=False)[0]
            return self.bn(y.transpose(1, 2))

    _, report = fold(double(Attention()), random_input(2, 5, 8))
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn", "no-bias", "op", "output")


def test_conv_whose_forward_ignores_its_bias_gets_none() -> None:
    class Own(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:
            return F.conv2d(input, self.weight, None, self.stride, self.padding)

    model = chain(Own(3, 4, 3, bias=False), nn.BatchNorm2d(4))
    _, report = fold(model, IMAGE)
    if find_site(report, "1").status != "exact":
        assert_refused(report, "1", "no-bias", "output")


# Writes in place and branches on data


def test_value_written_through_another_view_is_not_trusted() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.c(x)
        y[:, :2].mul_(2.0).add_(1.0)
        return m.bn(y)

    model = double(Net(forward, c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4)))
    _, report = fold(model, IMAGE)
    if find_site(report, "bn").status != "exact":
        assert_refused(report, "bn", "stale-alias", "op", "output", "other-reader")


def test_stale_alias_behind_a_norm_is_not_trusted() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.bn(F.relu(m.c(x)))
        z = y[:, :2]
        z.mul_(2.0)
        return m.c2(y)

    model = double(Net(forward, c=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4), c2=nn.Conv2d(4, 4, 1)))
    fold(model, IMAGE)


def test_inplace_sum_of_two_convs() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        y += m.b(x)
        return m.bn(y)

    model = double(Net(forward, a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 4, 1), bn=nn.BatchNorm2d(4)))
    fold(model, IMAGE)


@pytest.mark.parametrize("shift", [-5.0, 5.0])
def test_branch_taken_on_data_is_refused(shift: float) -> None:
    model = double(
        Net(
            lambda m, x: m.bn(m.c(x)) if x.mean() > 0 else m.c(x),
            c=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
        )
    )
    new, report = ns.fold_batchnorm(model, IMAGE + shift)
    check_report(model, report)
    assert_refused(report, "bn", "data-dependent", "not-called")
    for x in (IMAGE - 5.0, IMAGE + 5.0):
        assert_same(model, new, x)


def test_branch_on_data_elsewhere_does_not_reach_into_a_whole_block() -> None:
    block = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model = double(Net(lambda m, x: m.block(x) if x.mean() > 0 else m.block(-x), block=block))
    new, _ = ns.fold_batchnorm(model, IMAGE)
    for x in (IMAGE - 5.0, IMAGE + 5.0):
        assert_same(model, new, x)


def test_norm_that_is_not_called_is_answered() -> None:
    model = double(
        Net(
            lambda m, x: m.bn(m.c(x)),
            c=nn.Conv2d(3, 4, 3),
            bn=nn.BatchNorm2d(4),
            spare=nn.BatchNorm2d(7),
        )
    )
    _, report = fold(model, IMAGE)
    assert_folded(report, "bn")
    assert_refused(report, "spare", "not-called")
