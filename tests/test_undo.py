"""Undoing a swap, and swaps that need to know how a norm is called."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import assert_state_equal, relative_error, run, state_copy
from torch import nn

import normswap as ns

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class OffsetNorm(nn.Module):
    """RMS norm with a scale of ``1 + w``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.w)


def model() -> nn.Sequential:
    norm = nn.LayerNorm(8, dtype=torch.float64)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    return nn.Sequential(nn.Linear(8, 8, dtype=torch.float64), norm, OffsetNorm()).eval()


@pytest.mark.parametrize("inplace", [False, True])
def test_old_norms_come_back_bit_for_bit(inplace: bool) -> None:
    original = model()
    state, before = state_copy(original), run(original, X)
    mapping = {"layer": "rms", "rms": nn.RMSNorm}
    new, report = ns.swap_norms(original, mapping, X, method="copy", inplace=inplace)
    assert relative_error(before, run(new, X)) > 1e-3
    again = report.undo(new)
    assert again is new
    assert [type(m) for m in again] == [nn.Linear, nn.LayerNorm, OffsetNorm]
    assert_state_equal(again, state)
    assert torch.equal(run(again, X), before)


def test_trained_parameters_are_carried_back() -> None:
    original = model()
    new, report = ns.swap_norms(copy.deepcopy(original), {"rms": nn.RMSNorm}, X)
    with torch.no_grad():
        new[2].weight += 0.5
    expected = run(new, X)
    again = report.undo(new)
    assert type(again[2]) is OffsetNorm
    assert relative_error(original[2].w + 0.5, again[2].w) < 1e-15
    assert relative_error(expected, run(again, X)) < 1e-14


def test_undoing_an_exact_conversion_gives_the_same_outputs() -> None:
    original = model()
    before = run(original, X)
    new, report = ns.swap_norms(original, {"layer": "rms"}, X, method="exact")
    assert type(new[1]) is not nn.LayerNorm
    again = report.undo(new)
    assert type(again[1]) is nn.LayerNorm
    assert relative_error(before, run(again, X)) < 1e-14


def test_folded_scale_cannot_be_put_back() -> None:
    original = nn.Sequential(*list(model())[:2], nn.Linear(8, 4, dtype=torch.float64)).eval()
    new, report = ns.swap_norms(original, {"layer": "rms"}, X, fold_affine=True)
    expected = run(new, X)
    with pytest.raises(ns.NormswapError, match="original"):
        report.undo(new)
    assert torch.equal(expected, run(new, X))


def test_report_from_a_file_cannot_undo() -> None:
    new, report = ns.swap_norms(model(), {"layer": "rms"}, X)
    read = ns.Report.from_json(report.to_json())
    with pytest.raises(ns.NormswapError, match="session"):
        read.undo(new)


class Unweighted(nn.Module):
    """RMS norm without parameters, which takes any width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_norm_that_takes_any_width_is_swapped_where_its_input_was_seen() -> None:
    original = nn.Sequential(model(), Unweighted(), nn.LayerNorm(8, dtype=torch.float64)).eval()
    mapping = {"rms": nn.RMSNorm, nn.LayerNorm: nn.LayerNorm}
    _, report = ns.swap_norms(original, mapping, method="exact")
    by_name = {site.name: site for site in report.sites}
    assert (by_name["1"].status, by_name["1"].reason) == ("refused", "unknown")
    assert by_name["2"].status == "exact"
    new, report = ns.swap_norms(original, mapping, X, method="exact")
    assert report.counts == {"exact": 4}
    assert type(new[1]) is nn.RMSNorm
    assert relative_error(run(original, X), run(new, X)) < 1e-14


def test_norm_that_a_fused_forward_bypasses_is_refused() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.other = (nn.LayerNorm(8, dtype=torch.float64) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.norm
            return self.other(nn.functional.layer_norm(x, (8,), n.weight, n.bias, n.eps))

    original = Fused().eval()
    nn.init.normal_(original.norm.weight)
    new, report = ns.swap_norms(original, {nn.LayerNorm: "rms"}, X)
    by_name = {site.name: site for site in report.sites}
    assert by_name["norm"].reason == "bypassed"
    assert by_name["other"].status == "approximate"
    assert type(new.norm) is nn.LayerNorm
