"""Right rewrites pass, wrong ones fail, rounding is told from error, and models are left alone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import normswap.verification as verify_module
from normswap.errors import NormswapError
from normswap.verification import Verification, verify

X = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))


def random_norm(channels: int) -> nn.BatchNorm2d:
    bn = nn.BatchNorm2d(channels)
    nn.init.normal_(bn.weight)
    nn.init.normal_(bn.bias)
    bn.running_mean.normal_()
    bn.running_var.uniform_(0.1, 3)
    return bn


def fold(conv: nn.Conv2d, bn: nn.BatchNorm2d, *, eps: float | None = None) -> nn.Conv2d:
    """`s (W x + b - m) + beta` with `s = g / sqrt(v + eps)`, in float64, cast once."""
    folded = copy.deepcopy(conv)
    variance = bn.running_var.double() + (bn.eps if eps is None else eps)
    scale = bn.weight.detach().double() / variance.sqrt()
    bias = (conv.bias.double() - bn.running_mean.double()) * scale + bn.bias.double()
    with torch.no_grad():
        folded.weight.copy_(conv.weight.double() * scale[:, None, None, None])
        folded.bias.copy_(bias)
    return folded


def network(depth: int = 2, width: int = 6) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in [3] + [width] * (depth - 1):
        layers += [nn.Conv2d(channels, width, 3, padding=1), random_norm(width), nn.Tanh()]
    return nn.Sequential(*layers).eval()


def folded(model: nn.Sequential, *, eps: float | None = None) -> nn.Sequential:
    changed = copy.deepcopy(model)
    for index in range(0, len(model), 3):
        changed[index] = fold(model[index], model[index + 1], eps=eps)
        changed[index + 1] = nn.Identity()
    return changed


def float64_pair(model: nn.Sequential, **how: Any) -> tuple[nn.Module, nn.Module]:
    wide = copy.deepcopy(model).double()
    return wide, folded(wide, **how)


def run_of(check: Verification, dtype: str, number: int = 0) -> verify_module.Run:
    return [run for run in check.runs if run.dtype == dtype][number]


# -- right and wrong ------------------------------------------------------------------------------


def test_a_right_fold_passes_on_two_shapes_in_both_dtypes() -> None:
    model = network()
    check = verify(model, folded(model), X, float64_pair=float64_pair(model))
    assert check.passed
    assert (check.level, check.dtype, check.tolerance) == ("model", "float64", 1e-7)
    assert check.max_rel < 1e-13
    assert [(run.inputs, run.dtype) for run in check.runs] == [
        ("2x3x10x10", "float64"),
        ("2x3x10x10", "float32"),
        ("1x3x42x10", "float64"),
        ("1x3x42x10", "float32"),
    ]
    own = run_of(check, "float32")
    assert 0 < own.max_rel < own.tolerance < 1e-4


def test_the_numbers_are_those_of_the_outputs() -> None:
    model = network()
    changed = folded(model, eps=0.5)
    check = verify(model, changed, X, float64_pair=float64_pair(model, eps=0.5))
    wide, wide_changed = float64_pair(model, eps=0.5)
    a, b = wide(X.double()), wide_changed(X.double())
    expected = ((a - b).abs().max() / a.abs().max()).item()
    assert not check.passed
    assert run_of(check, "float64").max_rel == pytest.approx(expected, rel=1e-6)
    assert run_of(check, "float64").max_abs == pytest.approx((a - b).abs().max().item(), rel=1e-6)


def test_a_wrong_eps_is_told_from_rounding() -> None:
    model = network()
    check = verify(model, folded(model, eps=1e-6), X, float64_pair=float64_pair(model, eps=1e-6))
    assert not check.passed
    assert 1e-7 < run_of(check, "float64").max_rel < 1e-4


def test_without_a_float64_pair_one_rounding_of_the_weights_is_allowed_for() -> None:
    model = network()
    check = verify(model, folded(model), X)
    assert check.passed
    assert 1e-10 < check.max_rel < check.tolerance < 1e-4
    wrong = folded(model)
    with torch.no_grad():
        wrong[3].bias[1] += 1e-3
    assert not verify(model, wrong, X).passed


@settings(max_examples=60)
@given(
    depth=st.integers(1, 6),
    width=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    seed=st.integers(0, 10_000),
)
def test_right_folds_of_random_networks_pass(
    depth: int, width: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    model = network(depth, width).to(dtype)
    x = torch.randn(1, 3, 3, 3)
    check = verify(model, folded(model), x, float64_pair=float64_pair(model))
    assert check.passed, check
    unpaired = verify(model, folded(model), x)
    assert unpaired.passed, unpaired


@settings(max_examples=30)
@given(seed=st.integers(0, 10_000), site=st.integers(0, 2), size=st.sampled_from([1e-4, 1e-2, 1]))
def test_wrong_folds_of_random_networks_fail(seed: int, site: int, size: float) -> None:
    torch.manual_seed(seed)
    model = network(3, 4)
    wide, changed = float64_pair(model)
    with torch.no_grad():
        changed[3 * site].weight.mul_(1 + size)
        changed[3 * site].bias.add_(size)
    assert not verify(
        model, copy.deepcopy(changed).float(), X[:1], float64_pair=(wide, changed)
    ).passed


def test_amplified_rounding_does_not_fail_a_right_fold() -> None:
    """A net whose outputs are what is left of large numbers that cancel."""

    model = network(1)
    with torch.no_grad():
        model[0].bias.fill_(1000.3)
        model[1].running_mean.fill_(1000.3)
    check = verify(model, folded(model), X, float64_pair=float64_pair(model))
    assert check.passed
    own = run_of(check, "float32")
    assert 1e-5 < own.max_rel < own.tolerance < 1e-2


def test_few_outputs_that_rounded_well_by_luck_are_judged_by_noise() -> None:
    """One number, which the original rounds without any error at all."""
    original = nn.Linear(8, 1, bias=False)
    with torch.no_grad():
        original.weight.copy_(torch.tensor([[1024.0, -1024.0, 1, 0, 0, 0, 0, 0]]))
    changed = copy.deepcopy(original)
    with torch.no_grad():
        changed.weight[0, 0] = torch.nextafter(torch.tensor(1024.0), torch.tensor(2000.0))
    x = torch.tensor([[1.0, 1, 2**-6, 0, 0, 0, 0, 0]])
    check = verify(original, changed, x)
    assert run_of(check, "float32").max_rel > 64 * 2**-24
    assert run_of(check, "float32").passed


def test_a_tolerance_of_the_callers_replaces_every_bound() -> None:
    model = network()
    changed = folded(model, eps=0.05)
    loose = verify(model, changed, X, tolerance=0.5)
    assert loose.passed
    assert {run.tolerance for run in loose.runs} == {0.5}
    assert not verify(model, changed, X, tolerance=1e-9).passed


def test_the_wrong_path_of_a_replaced_fast_path_is_caught() -> None:
    """`nn.TransformerEncoderLayer` in eval reads `norm1.weight` and never calls `norm1`."""

    class Scaled(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    original = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    original.norm1 = Scaled(8)
    right = copy.deepcopy(original)
    right.norm1 = nn.LayerNorm(8)
    with torch.no_grad():
        right.norm1.weight.mul_(2)
    assert not verify(original, right, torch.randn(2, 5, 8)).passed


# -- outputs --------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fn = fn
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Any:
        return self.fn(x * self.weight)


def check_outputs(
    original: Callable[[Tensor], Any], changed: Callable[[Tensor], Any]
) -> Verification:
    return verify(Returns(original), Returns(changed), torch.linspace(-1, 1, 12).view(3, 4))


def test_every_output_counts() -> None:
    check = check_outputs(lambda x: {"a": [x, x]}, lambda x: {"a": [x, x * 1.01]})
    assert not check.passed
    assert run_of(check, "float32").detail == "output 'a[1]' differs"
    assert check.max_rel == pytest.approx(0.01)


def test_integers_are_exact() -> None:
    check = check_outputs(lambda x: (x, x > 0), lambda x: (x, x > 0.5))
    assert not check.passed
    assert "integers" in run_of(check, "float64").detail


def test_nan_and_infinity_must_be_at_the_same_places() -> None:
    assert check_outputs(torch.log, torch.log).passed
    assert not check_outputs(torch.log, lambda x: torch.log(x).nan_to_num(nan=0.0)).passed
    assert not check_outputs(lambda x: x / 0, lambda x: -x / 0).passed


def test_other_shapes_and_missing_outputs_fail() -> None:
    shape = check_outputs(lambda x: x, lambda x: x[:1])
    assert not shape.passed
    assert "shapes (3, 4) and (1, 4)" in shape.runs[0].detail
    missing = check_outputs(lambda x: {"a": x, "b": x}, lambda x: {"a": x})
    assert not missing.passed
    assert "'b' is there in only one" in missing.runs[0].detail


def test_a_changed_model_that_raises_fails() -> None:
    def broken(x: Tensor) -> Tensor:
        raise TypeError("no such layer")

    check = check_outputs(lambda x: x, broken)
    assert not check.passed
    assert check.level == "model"
    assert "TypeError: no such layer" in check.runs[0].detail


def test_models_that_return_nothing_are_judged_by_their_sites() -> None:
    class Detector(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            scores = self.body(x).flatten()
            return scores[scores > 1e6]

    model = network()
    pair = float64_pair(model)
    original, right = Detector(model), Detector(folded(model))
    nothing = verify(original, right, X)
    assert (nothing.passed, nothing.level) == (False, "none")
    assert nothing.runs[0].skipped == "the model returned nothing to compare"

    wide = Detector(pair[0]), Detector(pair[1])
    check = verify(original, right, X, sites=["body.1", "body.4"], float64_pair=wide)
    assert (check.passed, check.level) == (True, "site")
    assert check.max_rel < 1e-13
    wrong = Detector(pair[0]), Detector(float64_pair(model, eps=0.5)[1])
    check = verify(original, right, X, sites=["body.1", "body.4"], float64_pair=wrong)
    assert (check.passed, check.level) == (False, "site")
    assert "body." in check.runs[-1].detail


# -- sites ----------------------------------------------------------------------------------------


def test_sites_are_measured_each() -> None:
    model = network(3)
    wide, changed = float64_pair(model)
    with torch.no_grad():
        changed[3].weight.mul_(1.5)
    sites = ["1", "4", "7", "no such"]
    check = verify(model, model, X, sites=sites, float64_pair=(wide, changed))
    assert list(check.site_errors) == ["1", "4", "7"]
    assert check.site_errors["1"] < 1e-13
    a, b = wide[:5](X.double()), changed[:5](X.double())
    expected = ((a - b).abs().max() / a.abs().max()).item()
    assert check.site_errors["4"] == pytest.approx(expected)
    assert not any(module._forward_hooks for module in (*wide.modules(), *changed.modules()))


def test_a_site_is_compared_call_by_call_before_it_is_overwritten() -> None:
    class Twice(nn.Module):
        def __init__(self, second: float) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.second = second

        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x).zero_()
            return self.norm(x + y) + 0 * self.norm(x * self.second)

    check = verify(Twice(1.0), Twice(1.0), torch.randn(2, 4), sites=["norm"])
    assert check.site_errors == {"norm": 0.0}
    other = verify(Twice(1.0), Twice(0.001), torch.randn(2, 4), sites=["norm"])
    assert other.site_errors["norm"] > 1e-3


def test_sites_that_do_not_fit_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "SITE_BYTES", 2 * 6 * 100 * 8)
    model = network(3)
    check = verify(model, copy.deepcopy(model), X, sites=["1", "4"])
    assert check.site_errors == {"1": 0.0}


# -- inputs ---------------------------------------------------------------------------------------


def test_shapes_that_the_original_refuses_are_not_a_failure() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(300, 4))
    check = verify(model, copy.deepcopy(model), X)
    assert check.passed
    assert [run.inputs for run in check.runs[::2]] == ["2x3x10x10", "1x3x10x10"]


def test_a_fault_that_only_another_batch_shows_is_found() -> None:
    class Mixing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0, keepdim=True) * 0.1 + x * 0.1

    check = verify(nn.Identity(), Mixing(), torch.randn(1, 5))
    assert check.runs[0].passed
    assert not check.passed


def test_keyword_inputs_and_example_kwargs() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, *, scale: Tensor, flip: bool = False) -> Tensor:
            return -x * scale if flip else x * scale

    given = {"x": X, "scale": torch.tensor(2.0)}
    check = verify(Scaled(), Scaled(), given, example_kwargs={"flip": True})
    assert check.passed
    assert check.runs[0].inputs == "x 2x3x10x10, scale scalar, flip True"


def test_no_inputs_raise_the_call_to_make() -> None:
    with pytest.raises(NormswapError, match=r"example_inputs=torch\.randn\(2, 3, 224, 224\)"):
        verify(network(), network())


def test_a_model_that_does_not_run_is_not_verified() -> None:
    model = network()
    check = verify(model, model, torch.randn(2, 4, 8, 8))
    assert (check.passed, check.level) == (False, "none")
    assert all("RuntimeError" in (run.skipped or "") for run in check.runs)


def test_a_meta_model_is_not_verified() -> None:
    with torch.device("meta"):
        model = network()
    check = verify(model, model, X)
    assert (check.passed, check.level) == (False, "none")
    assert "'0.weight' is on the meta device" in (check.runs[0].skipped or "")


# -- dtypes ---------------------------------------------------------------------------------------


def test_an_op_that_is_missing_in_half_precision_is_skipped_with_the_reason() -> None:
    class NoHalf(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(3).half())

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.linalg.inv(self.weight)

    check = verify(NoHalf(), NoHalf(), torch.randn(2, 3))
    assert check.passed
    assert check.dtype == "float64"
    assert "does not run in float16: RuntimeError" in (run_of(check, "float16").skipped or "")


def test_layers_that_compare_dtypes_themselves_are_held_in_float64() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(self.scale(x))[0]

    model = Recurrent()
    check = verify(model, copy.deepcopy(model), torch.randn(2, 5, 4))
    assert check.passed
    assert check.dtype == "float64"
    assert not any(run.skipped for run in check.runs)
    assert model.lstm.weight_ih_l0.dtype == torch.float32
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.lstm.bias_hh_l0.add_(1e-3)
    assert not verify(model, wrong, torch.randn(2, 5, 4)).passed


def test_a_float64_model_needs_one_run_a_shape() -> None:
    model = network().double()
    check = verify(model, folded(model), X)
    assert check.passed
    assert check.max_rel < 1e-13
    assert [run.dtype for run in check.runs] == ["float64", "float64"]


def test_mixed_dtypes_are_named_and_bounded_by_the_coarsest() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1).bfloat16(), random_norm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x.bfloat16()).float())

    model = Mixed().eval()
    check = verify(model, copy.deepcopy(model), X)
    assert check.passed
    assert check.runs[1].dtype == "bfloat16/float32"
    assert check.runs[1].tolerance > 8 * 2**-9


def test_an_overflow_that_only_the_changed_model_has_fails() -> None:
    original = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).half()
    changed = copy.deepcopy(original)
    with torch.no_grad():  # the same function, by way of numbers that float16 does not hold
        original[0].weight.copy_(torch.eye(4))
        original[1].weight.copy_(torch.eye(4))
        changed[0].weight.copy_(torch.eye(4) * 60000)
        changed[1].weight.copy_(torch.eye(4) / 60000)
    check = verify(original, changed, torch.full((1, 4), 30.0))
    assert not check.passed
    assert "not finite" in run_of(check, "float16").detail


# -- the models are left alone --------------------------------------------------------------------


@lru_cache
def cached_table(size: int) -> Tensor:
    return torch.arange(size) / size


class Restless(nn.Module):
    """Changes itself in every call."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = random_norm(3)
        self.table = nn.Embedding(5, 10, max_norm=0.1)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("last", torch.zeros(10))
        self.history: list[Tensor] = []
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.last + x.mean()
        self.history.append(x)
        self.cache = x * 2
        x.mul_(1.5)
        noise = torch.rand(()) + random.random() + float(np.random.rand())
        y = self.drop(self.norm(x)) + self.table(torch.tensor(2)) + cached_table(10)
        return y + noise + len(self.history) + self.calls + self.last.sum()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("training", [True, False])
def test_models_are_left_as_they_were(training: bool) -> None:
    model = Restless().train(training)
    model.norm.train()  # also in an evaluating model
    changed = copy.deepcopy(model)
    before = state_of(model)
    modes = [module.training for module in model.modules()]
    x = X.clone()
    buffer, attributes = model.last, dict(vars(model))
    check = verify(model, changed, x)
    assert check.passed, check
    assert check.max_abs == 0  # the same randomness in both
    for name, tensor in state_of(model).items():
        assert torch.equal(tensor, before[name]), name
    assert [module.training for module in model.modules()] == modes
    assert model.last is buffer
    assert model.history == []
    assert model.cache is None
    assert vars(model) == attributes
    assert torch.equal(x, X)
    assert cached_table(10).dtype == torch.float32
    assert not cached_table(10).is_inference()


def test_a_model_in_training_mode_is_verified_in_evaluation_mode() -> None:
    model = network().train()
    with_pair = verify(model, folded(model), X, float64_pair=float64_pair(model))
    assert with_pair.passed
    assert model.training


def test_a_part_in_training_mode_stays_so_in_an_evaluating_model() -> None:
    model = network()
    model[4].train()
    frozen = copy.deepcopy(model)
    frozen[4].eval()
    assert not verify(model, frozen, X).passed


def test_random_states_are_put_back() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = torch.rand(2), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    verify(Restless(), Restless(), X)
    torch.manual_seed(3)  # building the two models drew numbers
    assert torch.equal(torch.rand(2), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


def test_an_error_in_forward_puts_everything_back_too() -> None:
    class Failing(Restless):
        def forward(self, x: Tensor) -> Tensor:
            super().forward(x)
            raise ValueError("after the writes")

    model = Failing()
    before = state_of(model)
    assert verify(model, model, X).level == "none"
    for name, tensor in state_of(model).items():
        assert torch.equal(tensor, before[name]), name
    assert model.history == []
    assert torch.get_default_dtype() == torch.float32
