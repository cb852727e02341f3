"""Weight norms: against timm, the formulas in NumPy, and a LayerNorm that they replace."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from timm.layers.std_conv import ScaledStdConv2d, StdConv2d
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from normswap import norms


class Stream(nn.Module):
    """Two writers of one stream, a norm, a reader."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.branch = nn.Linear(8, 8)
        self.norm = norm
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + self.branch(x)
        return self.head(self.norm(x))


def test_centred_writers_make_an_rms_norm_a_layer_norm_in_training_too() -> None:
    layer = randomised(Stream(nn.LayerNorm(8))).double()
    rms = Stream(norms.RMSNorm(8, 1e-5, bias=True)).double()
    rms.load_state_dict(layer.state_dict(), strict=True)
    with torch.no_grad():  # the branch reads the stream raw: give it what it read
        rows = layer.table.weight
        layer.table.weight.copy_(rows - rows.mean(1, keepdim=True))
    norms.centre_weights(rms.table), norms.centre_weights(rms.branch)
    ids = torch.tensor([[0, 3, 6], [1, 1, 5]])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (layer, rms)]
    for _ in range(3):
        assert relative_error(layer(ids), rms(ids)) < 1e-12
        for model, optimizer in zip((layer, rms), optimizers, strict=True):
            optimizer.zero_grad()
            model(ids).square().sum().backward()
            if model is layer:  # the same constraint there
                grad = model.table.weight.grad
                grad -= grad.mean(1, keepdim=True)
            optimizer.step()


@pytest.mark.parametrize(
    ("module", "shape", "axis"),
    [
        (nn.Linear(5, 6), (2, 5), -1),
        (nn.Conv1d(5, 6, 3), (2, 5, 7), 1),
        (nn.Conv2d(5, 6, 3, padding=1), (2, 5, 4, 4), 1),
        (nn.Conv3d(5, 6, 2, bias=False), (2, 5, 3, 3, 3), 1),
        (nn.ConvTranspose2d(5, 6, 3, stride=2), (2, 5, 4, 4), 1),
        (nn.Embedding(5, 6), (), -1),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_centred_outputs_have_mean_zero(
    module: nn.Module, shape: tuple[int, ...], axis: int
) -> None:
    module = randomised(module).double()
    x = random_input(*shape) if shape else torch.arange(5)
    before = module(x)
    want = before - before.mean(axis, keepdim=True)
    assert relative_error(want, norms.centre_weights(module)(x)) < 1e-13
    parametrize.remove_parametrizations(module, "weight")
    assert relative_error(want, module(x)) < 1e-13


def test_other_classes_say_where_their_outputs_are() -> None:
    module = randomised(Conv1D(6, 5)).double()
    x = random_input(2, 5)
    before = module(x)
    with pytest.raises(ValueError, match="give dim"):
        norms.centre_weights(module)
    want = before - before.mean(-1, keepdim=True)
    assert relative_error(want, norms.centre_weights(module, dim=1)(x)) < 1e-13


def test_what_cannot_be_centred_is_refused() -> None:
    for module, message in (
        (nn.Conv2d(4, 4, 3, groups=2), "2 groups"),
        (nn.Embedding(4, 4, max_norm=1.0), "max_norm"),
    ):
        with pytest.raises(ValueError, match=message):
            norms.centre_weights(module)
        assert not parametrize.is_parametrized(module)


@pytest.mark.parametrize("groups", [1, 2])
def test_standardised_equals_timm(groups: int) -> None:
    theirs = StdConv2d(4, 6, 3, groups=groups, bias=True)
    ours = nn.Conv2d(4, 6, 3, groups=groups, padding=1)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    norms.standardise_weight(ours)
    x = random_input(2, 4, 5, 5, dtype=torch.float32)
    assert relative_error(theirs(x), ours(x)) < 1e-5


@pytest.mark.parametrize("groups", [1, 2])
def test_scaled_standardised_equals_timm(groups: int) -> None:
    theirs = randomised(ScaledStdConv2d(4, 6, 3, groups=groups, gamma=1.7139))
    ours = nn.Conv2d(4, 6, 3, groups=groups, padding=1)
    ours.weight.data.copy_(theirs.weight), ours.bias.data.copy_(theirs.bias)
    norms.scaled_standardise_weight(ours, gamma=1.7139)
    assert torch.equal(ours.parametrizations.weight[0].gain, torch.ones(6))
    ours.parametrizations.weight[0].gain.data.copy_(theirs.gain.flatten())
    x = random_input(2, 4, 5, 5, dtype=torch.float32)
    assert relative_error(theirs(x), ours(x)) < 1e-5


@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 2), (5, 3, 2, 2)], ids=str)
def test_standardised_filters_follow_the_formula(shape: tuple[int, ...]) -> None:
    w = random_input(*shape) + 1
    flat = w.numpy().reshape(5, -1)
    unit = (flat - flat.mean(1, keepdims=True)) / np.sqrt(flat.var(1, keepdims=True) + 1e-3)
    got = norms.WeightStandardisation(1e-3)(w)
    assert relative_error(torch.from_numpy(unit.reshape(shape)), got) < 1e-13
    scaled = randomised(norms.ScaledWeightStandardisation(5, 1.5, 1e-3)).double()
    gain = scaled.gain.detach().numpy()[:, None]
    want = (unit * gain * 1.5 / np.sqrt(flat.shape[1])).reshape(shape)
    assert relative_error(torch.from_numpy(want), scaled(w)) < 1e-13


def test_the_stored_weight_is_assigned_and_trained() -> None:
    conv = norms.scaled_standardise_weight(nn.Conv2d(3, 4, 3).double())
    assert set(conv.state_dict()) == {
        "bias",
        "parametrizations.weight.original",
        "parametrizations.weight.0.gain",
    }
    value = random_input(4, 3, 3, 3)
    conv.weight = value
    assert torch.equal(conv.parametrizations.weight.original, value)
    conv(random_input(2, 3, 5, 5)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in conv.parameters())
    twin = copy.deepcopy(conv)
    assert relative_error(twin(random_input(2, 3, 5, 5)), conv(random_input(2, 3, 5, 5))) == 0.0
    # Standardised, a filter ignores its scale and its mean.
    before = conv(random_input(2, 3, 5, 5))
    conv.weight = 7.0 * value - 2.0
    assert relative_error(before, conv(random_input(2, 3, 5, 5))) < 1e-4


@pytest.mark.parametrize("function", [norms.standardise_weight, norms.scaled_standardise_weight])
def test_what_cannot_be_standardised_is_refused(function: object) -> None:
    for module, message in (
        (nn.ConvTranspose2d(4, 4, 3), "one filter per row"),
        (nn.Embedding(4, 4), "one filter per row"),
        (nn.Conv2d(4, 4, 1, groups=4), "single weight"),
    ):
        with pytest.raises(ValueError, match=message):
            function(module)  # type: ignore[operator]
    with pytest.raises(ValueError, match="has 5 filters, the gain 4"):
        norms.ScaledWeightStandardisation(4)(torch.ones(5, 3))
