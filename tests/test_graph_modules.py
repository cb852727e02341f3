"""Models that are graphs: traced, exported, exported and decomposed."""

from __future__ import annotations

import copy
import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    FunctionalBatchNorm,
    assert_refused,
    assert_same,
    assert_state_equal,
    double,
    find_site,
    random_input,
    relative_error,
    run,
    state_copy,
)
from torch import Tensor, fx, nn

import normswap as ns

IMAGE = random_input(2, 3, 8, 8)


class Residual(nn.Module):
    """A block with norms that fold back, forward, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.bn2 = nn.BatchNorm2d(4)
        self.bn3 = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)) + x)
        return self.fc(self.bn3(x).mean((2, 3)))


class Raw(nn.Module):
    """One norm that folds and one on the raw input of a skip, which does not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        self.bn = nn.BatchNorm2d(3)
        self.stay = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.bn(self.conv(x))) * F.gelu(self.stay(x))


def traced(model: nn.Module, x: Tensor) -> nn.Module:
    return fx.symbolic_trace(model)


def exported(model: nn.Module, x: Tensor) -> nn.Module:
    return torch.export.export(model, (x,)).module()


def decomposed(model: nn.Module, x: Tensor) -> nn.Module:
    return torch.export.export(model, (x,)).run_decompositions().module()


def strict_export(model: nn.Module, x: Tensor) -> nn.Module:
    return torch.export.export(model, (x,), strict=True).module()


FORMS = [traced, exported, decomposed, strict_export]


def norm_nodes(graph_module: Any) -> list[fx.Node]:
    """The nodes that compute a batch norm, as calls of a function or of a module."""
    found = []
    for node in graph_module.graph.nodes:
        if node.op == "call_module":
            if isinstance(graph_module.get_submodule(node.target), nn.BatchNorm2d):
                found.append(node)
        elif node.op == "call_function" and "batch_norm" in str(node.target):
            found.append(node)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_norms_are_erased_from_the_graph(form: Any) -> None:
    model = double(Residual())
    graph_module = form(model, IMAGE)
    assert len(norm_nodes(graph_module)) == 3
    state = state_copy(graph_module)
    new, report = ns.fold_batchnorm(graph_module, IMAGE)
    assert [s.status for s in report.sites] == ["exact"] * 3
    assert isinstance(new, fx.GraphModule)
    assert norm_nodes(new) == []
    new.graph.lint()
    assert_same(model, new, IMAGE)
    # The graph that was given is as it was.
    assert len(norm_nodes(graph_module)) == 3
    assert_state_equal(graph_module, state)


@pytest.mark.parametrize("form", FORMS)
def test_norms_that_stay_are_answered(form: Any) -> None:
    model = double(Raw())
    graph_module = form(model, IMAGE)
    new, report = ns.fold_batchnorm(graph_module, IMAGE)
    assert sorted(s.status for s in report.sites) == ["exact", "refused"]
    assert len(norm_nodes(new)) == 1
    assert_same(model, new, IMAGE)


@pytest.mark.parametrize("form", FORMS)
def test_no_dead_nodes_or_getitems_of_a_norm_are_left(form: Any) -> None:
    graph_module = form(double(Residual()), IMAGE)
    new, _ = ns.fold_batchnorm(graph_module, IMAGE)
    for node in new.graph.nodes:
        if node.op == "call_function" and node.target is operator.getitem:
            assert "batch_norm" not in str(node.args[0])
    tensors = {n.target for n in new.graph.nodes if n.op == "get_attr"}
    assert not [t for t in tensors if "running" in t]


@pytest.mark.parametrize("form", FORMS)
def test_folding_a_graph_in_place(form: Any) -> None:
    model = double(Residual())
    # A traced module shares its parameters with the model: in place changes both.
    graph_module = form(copy.deepcopy(model), IMAGE)
    new, _ = ns.fold_batchnorm(graph_module, IMAGE, inplace=True)
    assert new is graph_module
    assert norm_nodes(graph_module) == []
    assert_same(model, graph_module, IMAGE)


@pytest.mark.parametrize("form", FORMS)
def test_folding_a_graph_twice(form: Any) -> None:
    once, _ = ns.fold_batchnorm(form(double(Residual()), IMAGE), IMAGE)
    twice, report = ns.fold_batchnorm(once, IMAGE)
    assert not [s for s in report.sites if s.status == "exact"]
    assert_state_equal(twice, state_copy(once))


@pytest.mark.parametrize("form", [traced, exported, decomposed])
def test_functional_norm_in_a_graph(form: Any) -> None:
    model = double(nn.Sequential(nn.Conv2d(3, 4, 3), FunctionalBatchNorm(4), nn.ReLU()))
    new, report = ns.fold_batchnorm(form(model, IMAGE), IMAGE)
    assert [s.status for s in report.sites] == ["exact"]
    assert norm_nodes(new) == []
    assert_same(model, new, IMAGE)


@pytest.mark.parametrize("form", [traced, exported, decomposed])
def test_shared_conv_in_a_graph_is_not_folded_twice(form: Any) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(3, 4, 3)
            self.bn1, self.bn2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn1(self.c(x)) + self.bn2(self.c(x))

    model = double(Shared())
    new, report = ns.fold_batchnorm(form(model, IMAGE), IMAGE)
    assert len(report.sites) == 2
    assert_same(model, new, IMAGE)


def test_traced_names_are_those_of_the_modules() -> None:
    _, report = ns.fold_batchnorm(traced(double(Residual()), IMAGE), IMAGE)
    assert {s.name for s in report.sites} == {"bn1", "bn2", "bn3"}


@pytest.mark.parametrize("form", [exported, decomposed])
def test_exported_batch_size_stays_dynamic(form: Any) -> None:
    model = double(Residual())
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (IMAGE,), dynamic_shapes=({0: batch},))
    if form is decomposed:
        program = program.run_decompositions()
    new, report = ns.fold_batchnorm(program.module(), IMAGE)
    assert [s.status for s in report.sites] == ["exact"] * 3
    assert_same(model, new, random_input(5, 3, 8, 8, seed=4))


def test_graph_inside_an_ordinary_model() -> None:
    backbone = fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    model = double(nn.Sequential(backbone, nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)))
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert find_site(report, "2").status == "exact"
    assert len(report.sites) == 2
    assert_same(model, new, IMAGE)


def test_intermediate_output_of_a_feature_extractor() -> None:
    class Extractor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Any:
            y = self.conv(x)
            return {"raw": y, "norm": self.bn(y)}

    model = traced(double(Extractor()), IMAGE)
    new, report = ns.fold_batchnorm(model, IMAGE)
    assert_refused(report, "bn", "output", "other-reader")
    assert_same(model, new, IMAGE)


def test_torchvision_feature_extractor() -> None:
    torchvision = pytest.importorskip("torchvision")
    from torchvision.models.feature_extraction import create_feature_extractor

    torch.manual_seed(0)
    net = double(torchvision.models.resnet18(weights=None), sign="positive")
    model = create_feature_extractor(net, {"layer1.0.bn1": "early", "layer2": "late"})
    x = random_input(1, 3, 32, 32)
    new, report = ns.fold_batchnorm(model, x)
    assert relative_error(run(model, x), run(new, x)) < 1e-10
    assert report.counts["exact"] >= 8


def test_exported_program_itself_is_refused_with_what_to_do() -> None:
    program = torch.export.export(double(Residual()), (IMAGE,))
    with pytest.raises((ns.NormswapError, TypeError), match=r"module\(\)"):
        ns.fold_batchnorm(program, IMAGE)
