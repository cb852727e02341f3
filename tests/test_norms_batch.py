"""Batch norms against torch, torchvision and the formulas in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from normswap import norms

SHAPES = [(8, 6), (8, 6, 5), (8, 6, 4, 3), (8, 6, 2, 3, 2)]


def stock(shape: tuple[int, ...], **options: object) -> nn.Module:
    """A random BatchNorm of the rank of an input, in float64."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    return randomised(kind[len(shape)](shape[1], **options).double())


def channels(x: Tensor) -> np.ndarray:
    """Values as [C, everything else]."""
    return x.detach().numpy().swapaxes(0, 1).reshape(x.shape[1], -1)


def shaped(values: object, x: Tensor) -> np.ndarray:
    """A vector over the channels, along axis 1 of an input."""
    return np.asarray(values).reshape(1, -1, *[1] * (x.dim() - 2))


def array(tensor: Tensor | None) -> np.ndarray:
    assert tensor is not None
    return tensor.detach().numpy().copy()


# FrozenBatchNorm


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("affine", [True, False])
def test_frozen_equals_an_eval_batch_norm_of_any_rank(shape: tuple[int, ...], affine: bool) -> None:
    bn, x = stock(shape, affine=affine, eps=1e-3).eval(), random_input(*shape)
    frozen = norms.FrozenBatchNorm.from_batch_norm(bn)
    assert relative_error(bn(x), frozen(x)) < 1e-14
    assert torch.equal(frozen.train()(x), frozen.eval()(x))
    assert not list(frozen.parameters())


def test_frozen_equals_torchvision() -> None:
    ours = randomised(norms.FrozenBatchNorm(6, eps=0.0))
    theirs = FrozenBatchNorm2d(6, eps=0.0)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = random_input(2, 6, 4, 4, dtype=torch.float32)
    assert torch.equal(ours(x), theirs(x))


def test_a_batch_norms_state_loads_strictly_into_nested_frozen_ones() -> None:
    bns = nn.Sequential(nn.Sequential(nn.BatchNorm2d(6)), nn.BatchNorm2d(6))
    randomised(bns).double().eval()
    frozen = nn.Sequential(
        nn.Sequential(norms.FrozenBatchNorm(6)), norms.FrozenBatchNorm(6)
    ).double()
    state = bns.state_dict()
    frozen.load_state_dict(state, strict=True)
    assert "1.num_batches_tracked" in state  # the caller's dictionary is left as it was
    assert relative_error(bns(random_input(2, 6, 4, 4)), frozen(random_input(2, 6, 4, 4))) < 1e-14
    with pytest.raises(RuntimeError, match="running_std"):
        frozen.load_state_dict(state | {"1.running_std": torch.ones(6)}, strict=True)


def test_without_running_statistics_there_is_nothing_to_freeze() -> None:
    bn = nn.BatchNorm2d(6, track_running_stats=False)
    for kind in (norms.FrozenBatchNorm, norms.MixingBatchNorm):
        with pytest.raises(ValueError, match="no running statistics"):
            kind.from_batch_norm(bn)


# GhostBatchNorm


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_ghost_is_a_batch_norm(shape: tuple[int, ...]) -> None:
    bn = stock(shape, momentum=0.3)
    ghost = norms.GhostBatchNorm(6, ghost_size=8, momentum=0.3).double()
    ghost.load_state_dict(bn.state_dict(), strict=True)
    for step in range(3):
        x = random_input(*shape, seed=step)
        assert relative_error(bn(x), ghost(x)) < 1e-13
    assert relative_error(bn.state_dict(), ghost.state_dict()) < 1e-13
    x = random_input(2, *shape[1:], seed=9)
    assert relative_error(bn.eval()(x), ghost.eval()(x)) < 1e-13


def test_each_ghost_is_normalised_alone() -> None:
    ghost = randomised(norms.GhostBatchNorm(6, ghost_size=2)).double()
    x = random_input(5, 6, 4, 3)
    before = copy.deepcopy(ghost)
    y, parts = ghost(x), (x[:3], x[3:])
    mean, var = np.zeros(6), np.zeros(6)
    for part, got in zip(parts, (y[:3], y[3:]), strict=True):
        c = channels(part)
        mean += c.mean(1) * len(part) / 5
        var += c.var(1, ddof=1) * len(part) / 5
        want = (part.numpy() - shaped(c.mean(1), x)) / np.sqrt(shaped(c.var(1), x) + 1e-5)
        want = want * shaped(array(ghost.weight), x) + shaped(array(ghost.bias), x)
        assert relative_error(torch.from_numpy(want), got) < 1e-13
    for name, batch in (("running_mean", mean), ("running_var", var)):
        want = 0.9 * array(before.get_buffer(name)) + 0.1 * batch
        assert np.allclose(array(ghost.get_buffer(name)), want, rtol=1e-12)
    assert int(ghost.num_batches_tracked) == int(before.num_batches_tracked) + 1


def test_shuffled_ghosts_are_random_sub_batches() -> None:
    ghost = randomised(norms.GhostBatchNorm(6, ghost_size=2, shuffle=True)).double()
    plain = copy.deepcopy(ghost)
    plain.shuffle = False
    x = random_input(6, 6, 3, 3)
    torch.manual_seed(5)
    got = ghost(x)
    torch.manual_seed(5)
    order = torch.randperm(6)
    want = torch.empty_like(x)
    want[order] = plain(x[order])
    assert not torch.equal(order, torch.arange(6))
    assert relative_error(want, got) < 1e-14
    assert relative_error(plain.state_dict(), ghost.state_dict()) < 1e-14


def test_plain_averages_and_no_running_statistics() -> None:
    bn = nn.BatchNorm2d(6, momentum=None).double()
    ghost = norms.GhostBatchNorm(6, momentum=None).double()
    for step in range(3):
        x = random_input(4, 6, 3, 3, seed=step) * (step + 1)
        bn(x), ghost(x)
    assert relative_error(bn.state_dict(), ghost.state_dict()) < 1e-13
    untracked = norms.GhostBatchNorm(6, ghost_size=2, track_running_stats=False).double()
    assert not list(untracked.buffers())
    x = random_input(4, 6, 3, 3)
    assert torch.equal(untracked.train()(x), untracked.eval()(x))


# BatchRenorm


def renorm(x: Tensor, module: nn.Module, r_max: float, d_max: float) -> np.ndarray:
    c = channels(x)
    mean, std = c.mean(1), np.sqrt(c.var(1) + module.eps)
    running, sigma = array(module.running_mean), np.sqrt(array(module.running_var) + module.eps)
    r = np.clip(std / sigma, 1 / r_max, r_max)
    d = np.clip((mean - running) / sigma, -d_max, d_max)
    out = (x.detach().numpy() - shaped(mean, x)) / shaped(std, x) * shaped(r, x) + shaped(d, x)
    return out * shaped(array(module.weight), x) + shaped(array(module.bias), x)


@pytest.mark.parametrize(("r_max", "d_max"), [(3.0, 5.0), (1.05, 0.1), (1.0, 0.0), (1e9, 1e9)])
def test_batch_renorm_follows_its_formula(r_max: float, d_max: float) -> None:
    module = norms.BatchRenorm(6, r_max=r_max, d_max=d_max, warmup=0, r_steps=0, d_steps=0)
    module = randomised(module).double()
    module.num_batches_tracked.fill_(1)
    x = random_input(4, 6, 3, 3)
    before = copy.deepcopy(module)
    got = module(x)
    assert relative_error(torch.from_numpy(renorm(x, before, r_max, d_max)), got) < 1e-13
    c = channels(x)
    for name, batch in (("running_mean", c.mean(1)), ("running_var", c.var(1, ddof=1))):
        want = 0.99 * array(before.get_buffer(name)) + 0.01 * batch
        assert np.allclose(array(module.get_buffer(name)), want, rtol=1e-12)
    if r_max == 1e9:  # unclipped, training computes the eval output
        assert relative_error(before.eval()(x), got) < 1e-12


def test_batch_renorm_starts_as_a_batch_norm_and_shares_its_state() -> None:
    bn = stock((4, 6, 3, 3), momentum=0.01)
    module = norms.BatchRenorm(6).double()
    module.load_state_dict(bn.state_dict(), strict=True)
    x = random_input(4, 6, 3, 3)
    assert relative_error(bn(x), module(x)) < 1e-13
    assert relative_error(bn.state_dict(), module.state_dict()) < 1e-13
    assert relative_error(bn.eval()(x), module.eval()(x)) < 1e-13


@pytest.mark.parametrize(
    ("batches", "r_max", "d_max"),
    [
        (0, 1, 0),
        (5_000, 1, 0),
        (15_000, 1 + 2 * 10 / 35, 2.5),
        (25_000, 1 + 2 * 20 / 35, 5),
        (40_000, 3, 5),
        (90_000, 3, 5),
    ],
)
def test_the_limits_rise_as_in_the_paper(batches: int, r_max: float, d_max: float) -> None:
    module = norms.BatchRenorm(6)
    module.num_batches_tracked.fill_(batches)
    r, d = module.limits()
    assert float(r) == pytest.approx(r_max, rel=1e-6)
    assert float(d) == pytest.approx(d_max, rel=1e-6)


def test_no_gradient_goes_through_r_and_d() -> None:
    module = norms.BatchRenorm(6, warmup=0, r_steps=1, d_steps=1)
    module = randomised(module).double()
    module.num_batches_tracked.fill_(9)
    x = random_input(4, 6, 3, 3).requires_grad_()
    up = random_input(4, 6, 3, 3, seed=7)
    std = torch.sqrt(module.running_var + module.eps)
    (got,) = torch.autograd.grad(module(x), x, up)
    var, own = torch.var_mean(x, (0, 2, 3), correction=0)
    r = (torch.sqrt(var + module.eps) / std).clamp(1 / 3, 3).detach()
    # A BatchNorm with scale weight * r: d is a constant.
    scaled = nn.functional.batch_norm(
        x, None, None, module.weight * r, torch.zeros_like(own), training=True, eps=module.eps
    )
    (want,) = torch.autograd.grad(scaled, x, up)
    assert relative_error(want, got) < 1e-12


def test_limits_below_a_batch_norms_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 and 0"):
        norms.BatchRenorm(6, r_max=0.5)
    with pytest.raises(ValueError, match="at least 1 and 0"):
        norms.BatchRenorm(6, d_max=-1)


# MixingBatchNorm


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_mixing_follows_its_formula(shape: tuple[int, ...], alpha: float) -> None:
    module = randomised(norms.MixingBatchNorm(6, alpha=alpha)).double().eval()
    x = random_input(*shape)
    flat = x.numpy().reshape(*shape[:2], -1)
    mean = alpha * flat.mean(2) + (1 - alpha) * array(module.running_mean)
    square = alpha * (flat**2).mean(2) + (1 - alpha) * array(module.running_square)
    scale = array(module.weight) / np.sqrt(square - mean**2 + 1e-5)
    want = (flat - mean[..., None]) * scale[..., None] + array(module.bias)[:, None]
    if alpha == 1.0 and len(shape) == 2:
        want = np.broadcast_to(array(module.bias)[:, None], want.shape).copy()
    assert relative_error(torch.from_numpy(want.reshape(shape)), module(x)) < 1e-9


def test_mixing_trains_as_a_batch_norm_and_keeps_the_mean_of_squares() -> None:
    bn, module = nn.BatchNorm2d(6).double(), norms.MixingBatchNorm(6, alpha=0.5).double()
    square = np.ones(6)
    for step in range(3):
        x = random_input(4, 6, 3, 3, seed=step) * (step + 1) + step
        assert relative_error(bn(x), module(x)) < 1e-13
        square = 0.9 * square + 0.1 * (channels(x) ** 2).mean(1)
    assert np.allclose(array(module.running_square), square, rtol=1e-12)
    assert relative_error(bn.running_mean, module.running_mean) < 1e-13


def test_mixing_the_example_alone_is_an_instance_norm() -> None:
    module = norms.MixingBatchNorm(6, alpha=1.0).double().eval()
    x = random_input(4, 6, 5, 5)
    assert relative_error(nn.InstanceNorm2d(6)(x), module(x)) < 1e-12


def test_mixing_made_from_a_batch_norm_computes_it_at_alpha_zero() -> None:
    bn, x = stock((4, 6, 3, 3), eps=1e-3).eval(), random_input(4, 6, 3, 3)
    module = norms.MixingBatchNorm.from_batch_norm(bn)
    assert not module.training
    assert relative_error(bn(x), module(x)) < 1e-12
    with pytest.raises(ValueError, match="from 0 to 1"):
        norms.MixingBatchNorm(6, alpha=1.5)


# BatchGroupNorm


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_one_example_per_part_is_a_group_norm(shape: tuple[int, ...]) -> None:
    module = randomised(norms.BatchGroupNorm(3, 6, num_examples=1)).double()
    x = random_input(*shape)
    want = nn.functional.group_norm(x, 3, module.weight, module.bias, 1e-5)
    assert relative_error(want, module(x)) < 1e-13


def test_one_channel_per_group_is_a_ghost_batch_norm() -> None:
    ghost = randomised(norms.GhostBatchNorm(6, ghost_size=2)).double()
    module = norms.BatchGroupNorm(6, 6, num_examples=2).double()
    module.load_state_dict(ghost.state_dict(), strict=True)
    x = random_input(5, 6, 3, 3)
    assert relative_error(ghost(x), module(x)) < 1e-13
    assert relative_error(ghost.state_dict(), module.state_dict()) < 1e-13
    assert relative_error(ghost.eval()(x), module.eval()(x)) < 1e-13


def test_statistics_over_examples_and_channels_of_a_group() -> None:
    module = randomised(norms.BatchGroupNorm(2, 6, num_examples=2)).double()
    before = copy.deepcopy(module)
    x = random_input(4, 6, 3, 2)
    want, mean, var = np.empty(x.shape), np.zeros(6), np.zeros(6)
    for n in (0, 2):
        for c in (0, 3):
            part = x.numpy()[n : n + 2, c : c + 3]
            want[n : n + 2, c : c + 3] = (part - part.mean()) / np.sqrt(part.var() + 1e-5)
            mean[c : c + 3] += part.mean() / 2
            var[c : c + 3] += part.var(ddof=1) / 2
    want = want * shaped(array(module.weight), x) + shaped(array(module.bias), x)
    assert relative_error(torch.from_numpy(want), module(x)) < 1e-13
    for name, batch in (("running_mean", mean), ("running_var", var)):
        moved = 0.9 * array(before.get_buffer(name)) + 0.1 * batch
        assert np.allclose(array(module.get_buffer(name)), moved, rtol=1e-12)
    frozen = norms.FrozenBatchNorm.from_batch_norm(module.eval())
    assert relative_error(frozen(x), module(x)) < 1e-13


# Errors


@pytest.mark.parametrize(
    "module",
    [norms.GhostBatchNorm(6), norms.BatchRenorm(6), norms.MixingBatchNorm(6)],
    ids=lambda m: type(m).__name__,
)
def test_one_value_per_channel_cannot_be_trained_on(module: nn.Module) -> None:
    with pytest.raises(ValueError, match="one value per channel"):
        module(torch.ones(1, 6, 1, 1))
    module.eval()(torch.ones(1, 6, 1, 1))
    with pytest.raises(ValueError, match="6 channels on axis 1"):
        module(torch.ones(2, 5, 3, 3))


def test_groups_that_do_not_divide_the_channels_are_refused() -> None:
    with pytest.raises(ValueError, match="32 groups do not divide 72 channels; take 18, 24, 36"):
        norms.BatchGroupNorm(32, 72)
    with pytest.raises(ValueError, match="one value per channel"):
        norms.BatchGroupNorm(6, 6)(torch.ones(1, 6))
    assert norms.BatchGroupNorm(2, 6)(torch.randn(1, 6)).isfinite().all()
    with pytest.raises(ValueError, match="ghost_size is 0"):
        norms.GhostBatchNorm(6, ghost_size=0)
