"""Batch norms over sequences and the recurrent layers, step by step in NumPy."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from torch import Tensor, nn

from normswap import norms

LENGTHS = [5, 2, 4, 1]


def mask_of(lengths: list[int], steps: int) -> Tensor:
    return torch.arange(steps)[None] < torch.tensor(lengths)[:, None]


def array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().numpy().copy()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


# The norms


def test_pooled_statistics_equal_a_batch_norm_where_nothing_is_masked() -> None:
    bn = randomised(nn.BatchNorm1d(6)).double()
    ours = norms.SequenceBatchNorm(6).double()
    ours.load_state_dict({k: v for k, v in bn.state_dict().items() if "num_batches" not in k})
    x = random_input(4, 5, 6)
    assert relative_error(bn(x.movedim(2, 1)).movedim(1, 2), ours(x)) < 1e-13
    assert relative_error(bn.running_var, ours.running_var) < 1e-13
    assert relative_error(bn.running_mean, ours.running_mean) < 1e-13
    assert relative_error(bn.eval()(x.movedim(2, 1)).movedim(1, 2), ours.eval()(x)) < 1e-13


def test_pooled_statistics_are_those_of_the_unmasked_steps() -> None:
    ours = randomised(norms.SequenceBatchNorm(6)).double()
    before, x, mask = copy.deepcopy(ours), random_input(4, 5, 6), mask_of(LENGTHS, 5)
    valid = x[mask].numpy()  # [12, 6]
    want = np.zeros(x.shape)
    unit = (valid - valid.mean(0)) / np.sqrt(valid.var(0) + 1e-5)
    want[mask.numpy()] = unit * array(ours.weight) + array(ours.bias)
    x[~mask] = torch.nan  # what is masked is not read
    assert relative_error(torch.from_numpy(want), ours(x, mask)) < 1e-13
    for name, batch in (("running_mean", valid.mean(0)), ("running_var", valid.var(0, ddof=1))):
        moved = 0.9 * array(before.get_buffer(name)) + 0.1 * batch
        assert np.allclose(array(ours.get_buffer(name)), moved, rtol=1e-12)


def test_frame_wise_statistics_are_those_of_each_step() -> None:
    ours = randomised(norms.FrameBatchNorm(6, max_length=7)).double()
    before, x, mask = copy.deepcopy(ours), random_input(4, 5, 6), mask_of(LENGTHS, 5)
    want = np.zeros(x.shape)
    mean, var = array(before.running_mean), array(before.running_var)
    for t in range(5):
        rows = mask[:, t].numpy()
        valid = x[:, t].numpy()[rows]
        unit = (valid - valid.mean(0)) / np.sqrt(valid.var(0) + 1e-5)
        want[rows, t] = unit * array(ours.weight) + array(ours.bias)
        if len(valid) > 1:  # the last step has one sequence left
            mean[t] = 0.9 * mean[t] + 0.1 * valid.mean(0)
            var[t] = 0.9 * var[t] + 0.1 * valid.var(0, ddof=1)
    x[~mask] = torch.inf
    assert relative_error(torch.from_numpy(want), ours(x, mask)) < 1e-13
    assert np.allclose(array(ours.running_mean), mean, rtol=1e-12)
    assert np.allclose(array(ours.running_var), var, rtol=1e-12)


def test_frame_wise_eval_uses_the_last_statistics_for_longer_sequences() -> None:
    ours = randomised(norms.FrameBatchNorm(6, max_length=3)).double().eval()
    x = random_input(4, 5, 6)
    steps = [0, 1, 2, 2, 2]
    mean, var = array(ours.running_mean)[steps], array(ours.running_var)[steps]
    want = (x.numpy() - mean) / np.sqrt(var + 1e-5) * array(ours.weight) + array(ours.bias)
    assert relative_error(torch.from_numpy(want), ours(x)) < 1e-13
    assert relative_error(ours(x)[:, 3:], ours(x[:, 3:], start=3)) == 0.0
    with pytest.raises(ValueError, match="5 steps in training, statistics for 3"):
        ours.train()(x)


@pytest.mark.parametrize("norm", [norms.SequenceBatchNorm(6), norms.FrameBatchNorm(6, 5)])
def test_gradients_do_not_come_from_masked_steps(norm: nn.Module) -> None:
    ours, mask = randomised(copy.deepcopy(norm)).double(), mask_of(LENGTHS, 5)
    inputs = [p.detach().clone().requires_grad_() for p in ours.parameters()]

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(
            copy.deepcopy(ours), {"weight": weight, "bias": bias}, (x, mask)
        )

    x = random_input(4, 5, 6).requires_grad_()
    assert torch.autograd.gradcheck(call, (x, *inputs), fast_mode=True)
    want = torch.autograd.grad(call(x, *inputs).square().sum(), [x, *inputs])
    padded = torch.where(mask[..., None], x.detach(), torch.nan).requires_grad_()
    got = torch.autograd.grad(call(padded, *inputs).square().sum(), [padded, *inputs])
    assert relative_error(want, got) == 0.0
    assert not got[0][~mask].any()


# The layers


def normalised(norm: nn.Module, x: np.ndarray) -> np.ndarray:
    """Training statistics over the batch (one step), with the norm's affine."""
    unit = (x - x.mean(0)) / np.sqrt(x.var(0) + norm.eps)
    return unit * array(norm.weight) + (0 if norm.bias is None else array(norm.bias))


@pytest.mark.parametrize("nonlinearity", ["tanh", "relu"])
def test_rnn_step_by_step(nonlinearity: str) -> None:
    rnn = randomised(norms.BatchNormRNN(4, 3, max_length=5, nonlinearity=nonlinearity)).double()
    x, h0 = random_input(6, 5, 4), random_input(6, 3, seed=2)
    w, u = array(rnn.input.weight), array(rnn.recurrence.weight)
    h, want = h0.numpy(), []
    for t in range(5):
        z = normalised(rnn.norm, x.numpy()[:, t] @ w.T) + h @ u.T
        h = np.tanh(z) if nonlinearity == "tanh" else np.maximum(z, 0)
        want.append(h)
    out, last = rnn(x, h0)
    assert relative_error(torch.from_numpy(np.stack(want, 1)), out) < 1e-12
    assert torch.equal(last, out[:, -1])


def test_lstm_with_batch_norm_on_the_input_is_torchs_lstm_in_eval() -> None:
    ours = randomised(norms.BatchNormLSTM(4, 3)).double().eval()
    theirs = nn.LSTM(4, 3, batch_first=True).double()
    scale = ours.norm.weight / torch.sqrt(ours.norm.running_var + ours.norm.eps)
    weight = scale[:, None] * ours.input.weight
    bias = ours.norm.bias - scale * ours.norm.running_mean
    # The gates there are i, f, g, o.
    rows = torch.cat([torch.arange(6), torch.arange(9, 12), torch.arange(6, 9)])
    theirs.weight_ih_l0.data.copy_(weight[rows])
    theirs.weight_hh_l0.data.copy_(ours.recurrence.weight[rows])
    theirs.bias_ih_l0.data.copy_(bias[rows])
    nn.init.zeros_(theirs.bias_hh_l0)
    x, h, c = random_input(6, 5, 4), random_input(6, 3, seed=2), random_input(6, 3, seed=3)
    want, (want_h, want_c) = theirs(x, (h[None], c[None]))
    out, state = ours(x, (h, c))
    assert relative_error([want, want_h[0], want_c[0]], [out, *state]) < 1e-12


def test_recurrent_lstm_step_by_step() -> None:
    lstm = randomised(norms.BatchNormLSTM(4, 3, max_length=5, recurrent=True)).double()
    x = random_input(6, 5, 4)
    w, u, b = (array(t) for t in (lstm.input.weight, lstm.recurrence.weight, lstm.bias))
    h, c, want = np.zeros((6, 3)), np.zeros((6, 3)), []
    for t in range(5):
        gates = normalised(lstm.norm, x.numpy()[:, t] @ w.T) + b
        gates = gates + normalised(lstm.recurrence_norm, h @ u.T)
        i, f, o, g = np.split(gates, 4, axis=1)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(normalised(lstm.cell_norm, c))
        want.append(h)
    out, (last, cell) = lstm(x)
    assert relative_error(torch.from_numpy(np.stack(want, 1)), out) < 1e-11
    assert relative_error(torch.from_numpy(c), cell) < 1e-11
    assert torch.equal(last, out[:, -1])
    assert lstm.norm.bias is lstm.recurrence_norm.bias is None


def test_fresh_layers_are_initialised_as_in_the_papers() -> None:
    lstm = norms.BatchNormLSTM(4, 3, max_length=5, recurrent=True).double()
    for norm in (lstm.norm, lstm.recurrence_norm, lstm.cell_norm):
        assert torch.allclose(norm.weight, torch.full_like(norm.weight, 0.1))
    eye = torch.eye(3, dtype=torch.float64)
    for gate in lstm.recurrence.weight.chunk(4):
        assert torch.allclose(gate @ gate.T, eye, atol=1e-6)
    assert torch.equal(norms.BatchNormRNN(4, 3).norm.weight, torch.ones(3))
    with pytest.raises(ValueError, match="give max_length"):
        norms.BatchNormLSTM(4, 3, recurrent=True)
    with pytest.raises(ValueError, match="not tanh or relu"):
        norms.BatchNormRNN(4, 3, nonlinearity="gelu")


LAYERS = [
    lambda: norms.BatchNormRNN(4, 3),
    lambda: norms.BatchNormRNN(4, 3, max_length=3),
    lambda: norms.BatchNormLSTM(4, 3),
    lambda: norms.BatchNormLSTM(4, 3, max_length=3, recurrent=True),
]


@pytest.mark.parametrize("build", LAYERS)
def test_padding_changes_nothing_and_steps_can_be_taken_one_by_one(build: object) -> None:
    layer = randomised(build()).double().eval()  # type: ignore[operator]
    x, mask = random_input(4, 5, 4), mask_of(LENGTHS, 5)
    out, last = layer(x, None, mask)
    assert not out[~mask].any()
    for row, length in enumerate(LENGTHS):
        alone, state = layer(x[row : row + 1, :length])
        assert relative_error(alone[0], out[row, :length]) < 1e-13
        pairs = [(state, last)] if isinstance(last, Tensor) else zip(state, last, strict=True)
        for one, all_of_them in pairs:
            assert relative_error(one[0], all_of_them[row]) < 1e-13
    whole, state, parts = layer(x)[0], None, []
    for t in range(5):
        step, state = layer(x[:, t : t + 1], state, start=t)
        parts.append(step)
    assert relative_error(whole, torch.cat(parts, 1)) < 1e-13


@pytest.mark.parametrize("build", LAYERS)
def test_masked_training_does_not_read_the_padding(build: object) -> None:
    layer = randomised(build()).double()  # type: ignore[operator]
    twin, x, mask = copy.deepcopy(layer), random_input(4, 3, 4), mask_of([3, 2, 3, 2], 3)
    out, _ = layer(x, None, mask)
    x[~mask] = 1e6
    again, _ = twin(x, None, mask)
    assert relative_error(out, again) == 0.0
    assert relative_error(layer.state_dict(), twin.state_dict()) == 0.0


def test_masks_that_do_not_fit_are_refused() -> None:
    for layer, x in (
        (norms.SequenceBatchNorm(6), torch.ones(4, 5, 6)),
        (norms.FrameBatchNorm(6, 5), torch.ones(4, 5, 6)),
    ):
        for mask in (torch.ones(4, 4, dtype=torch.bool), torch.ones(4, 5)):
            with pytest.raises(ValueError, match=r"it must be torch.bool \[4, 5\]"):
                layer(x, mask)
        with pytest.raises(ValueError, match="6 channels on axis 2"):
            layer(torch.ones(4, 5, 7))
    with pytest.raises(ValueError, match="4 channels on axis 2"):
        norms.BatchNormRNN(4, 3)(torch.ones(2, 5, 3))
