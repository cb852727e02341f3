"""Point-wise stand-ins, filter response and EvoNorm, against timm and the formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from timm.layers.evo_norm import EvoNorm2dB0, EvoNorm2dS0
from timm.layers.filter_response_norm import FilterResponseNormTlu2d
from torch import nn

from normswap import norms

erf = np.vectorize(math.erf)


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("kind", [norms.DyT, norms.Derf])
def test_squashing_follows_its_formula(kind: type[nn.Module], channels_last: bool) -> None:
    module = randomised(kind(6, channels_last=channels_last)).double()
    x = 3 * random_input(2, 5, 4, 6)
    w, b, a = (t.detach().numpy() for t in (module.weight, module.bias, module.alpha))
    inner = a * x.numpy()
    y = np.tanh(inner) if kind is norms.DyT else erf(inner + module.shift.detach().numpy())
    want = torch.from_numpy(w * y + b)
    got = module(x) if channels_last else module(x.movedim(-1, 1)).movedim(1, -1)
    assert relative_error(want, got) < 1e-13


def test_squashing_starts_with_the_given_slope_and_shift() -> None:
    dyt, derf = norms.DyT(4, alpha=0.8), norms.Derf(4, alpha=0.7, shift=0.1)
    assert dyt.alpha.item() == pytest.approx(0.8)
    assert (derf.alpha.item(), derf.shift.item()) == pytest.approx((0.7, 0.1))
    assert norms.DyT(4).alpha.item() == norms.Derf(4).alpha.item() == 0.5
    assert norms.Derf(4).shift.item() == 0.0
    assert norms.DyT(4, bias=False).bias is None
    assert norms.DyT([3, 4], elementwise_affine=False).weight is None
    with pytest.raises(ValueError, match="need one size"):
        norms.DyT([3, 4], channels_last=False)


def test_filter_response_and_its_threshold_equal_timm() -> None:
    theirs = randomised(FilterResponseNormTlu2d(6))
    frn, tlu = norms.FRN(6, eps=theirs.eps), norms.TLU(6)
    frn.weight.data.copy_(theirs.weight), frn.bias.data.copy_(theirs.bias)
    tlu.tau.data.copy_(theirs.tau)
    x = random_input(2, 6, 4, 4, dtype=torch.float32)
    assert relative_error(theirs(x), tlu(frn(x))) < 1e-6
    assert torch.equal(norms.TLU(6)(x), torch.relu(x))


@pytest.mark.parametrize("shape", [(2, 6, 5), (2, 6, 4, 3), (2, 6, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("learned", [False, True])
def test_filter_response_follows_its_formula(shape: tuple[int, ...], learned: bool) -> None:
    module = randomised(norms.FRN(6, 1e-3, learned_eps=learned)).double()
    if learned:
        nn.init.constant_(module.learned_eps, -0.2)  # its absolute value counts
    x = random_input(*shape)
    flat = x.numpy().reshape(*shape[:2], -1)
    square = (flat**2).mean(2, keepdims=True) + 1e-3 + (0.2 if learned else 0.0)
    w, b = (t.detach().numpy()[:, None] for t in (module.weight, module.bias))
    want = (flat / np.sqrt(square) * w + b).reshape(shape)
    assert relative_error(torch.from_numpy(want), module(x)) < 1e-13
    assert norms.FRN(6).learned_eps is None


def test_evonorm_b0_equals_timm_in_training_and_eval() -> None:
    theirs = randomised(EvoNorm2dB0(6)).double()
    ours = norms.EvoNormB0(6).double()
    state = theirs.state_dict() | {"num_batches_tracked": torch.tensor(0)}
    ours.load_state_dict(state, strict=True)
    assert ours.eps == theirs.eps
    for step in range(3):
        x = random_input(4, 6, 3, 3, seed=step) * (step + 1)
        # timm takes its variances in float32
        assert relative_error(theirs(x), ours(x)) < 1e-6
    assert relative_error(theirs.running_var, ours.running_var) < 1e-6
    assert relative_error(theirs.eval()(x), ours.eval()(x)) < 1e-6


@pytest.mark.parametrize("training", [True, False])
def test_evonorm_b0_follows_its_formula(training: bool) -> None:
    module = randomised(norms.EvoNormB0(6)).double().train(training)
    x = random_input(4, 6, 5)
    n = x.numpy()
    var = n.var((0, 2)) if training else module.running_var.numpy().copy()
    own = np.sqrt(n.var(2, keepdims=True) + 1e-3)
    w, b, v = (t.detach().numpy()[:, None] for t in (module.weight, module.bias, module.v))
    want = n / np.maximum(np.sqrt(var + 1e-3)[:, None], v * n + own) * w + b
    assert relative_error(torch.from_numpy(want), module(x)) < 1e-13


@pytest.mark.parametrize("groups", [1, 3, 6])
def test_evonorm_s0_equals_timm(groups: int) -> None:
    theirs = randomised(EvoNorm2dS0(6, groups=groups))
    ours = norms.EvoNormS0(6, groups)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    x = random_input(2, 6, 4, 4, dtype=torch.float32)
    assert ours.eps == theirs.eps
    assert relative_error(theirs(x), ours(x)) < 1e-6


def test_evonorm_s0_follows_its_formula() -> None:
    module = randomised(norms.EvoNormS0(6, 2)).double()
    x = random_input(2, 6, 5)
    n = x.numpy()
    var = n.reshape(2, 2, -1).var(2).repeat(3, axis=1)[..., None]
    w, b, v = (t.detach().numpy()[:, None] for t in (module.weight, module.bias, module.v))
    want = n / (1 + np.exp(-v * n)) / np.sqrt(var + 1e-5) * w + b
    assert relative_error(torch.from_numpy(want), module(x)) < 1e-13


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="32 groups do not divide 6 channels; take 2, 3, 6"):
        norms.EvoNormS0(6)
    with pytest.raises(ValueError, match="at least 3 axes"):
        norms.EvoNormB0(6)(torch.ones(4, 6))
    with pytest.raises(ValueError, match="one value per channel"):
        norms.EvoNormB0(6)(torch.ones(1, 6, 1))
    with pytest.raises(ValueError, match="num_features is 0"):
        norms.TLU(0)
