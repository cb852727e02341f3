"""An optimizer that was made before its model's norms were swapped."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import Net, random_input, state_copy
from swapping import TOKENS, OffsetNorm, assert_close, fill
from torch import Tensor, nn, optim

import normswap as ns
from normswap import norms
from normswap.optimizers import update_optimizer

RMS = {"rms": nn.RMSNorm}


def network() -> Any:
    layers = [nn.Linear(8, 8), OffsetNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)]
    return fill(nn.Sequential(*layers)).train()


def step(model: nn.Module, optimizer: optim.Optimizer, x: Tensor = TOKENS) -> None:
    optimizer.zero_grad()
    model(x).square().sum().backward()
    optimizer.step()


def held(optimizer: optim.Optimizer) -> list[list[int]]:
    return [[id(p) for p in group["params"]] for group in optimizer.param_groups]


def ids(*parameters: nn.Parameter) -> list[int]:
    return [id(p) for p in parameters]


# Groups: order and options


def test_new_parameters_take_the_places_of_the_old() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)
    assert held(optimizer) == [ids(*model.parameters())]


def test_each_group_keeps_its_options_and_order() -> None:
    model = network()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in reversed(list(model.parameters())) if p.ndim == 1]
    where = next(i for i, p in enumerate(rest) if p is model[1].weight)
    optimizer = optim.AdamW(
        [{"params": decay, "weight_decay": 0.1, "name": "decay"}, {"params": rest, "lr": 1e-4}],
        weight_decay=0.0,
    )
    before = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)
    rest[where] = model[1].weight
    assert held(optimizer) == [ids(*decay), ids(*rest)]
    after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    assert after == before


def test_parameters_that_go_leave_their_group_and_new_ones_join_it() -> None:
    model = network()
    norm = model[3]
    others = [p for p in model.parameters() if p is not norm.weight and p is not norm.bias]
    optimizer = optim.SGD(
        [{"params": others}, {"params": [norm.weight, norm.bias], "lr": 0.5}], lr=0.1
    )
    mapping = {nn.LayerNorm: norms.ScaleNorm}
    ns.swap_norms(model, mapping, optimizer=optimizer, inplace=True, method="init")
    assert held(optimizer) == [ids(*others), ids(*model[3].parameters())]


def test_new_kinds_of_parameters_join_the_group_of_the_old_ones() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ns.swap_norms(model, {nn.LayerNorm: norms.DyT}, optimizer=optimizer, inplace=True)
    assert set(held(optimizer)[0]) == set(ids(*model.parameters()))
    assert len(held(optimizer)[0]) == len(list(model.parameters()))


def test_groups_stay_when_nothing_is_swapped() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = held(optimizer)
    ns.swap_norms(model, {nn.BatchNorm2d: nn.GroupNorm}, optimizer=optimizer, inplace=True)
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True, where="no such")
    assert held(optimizer) == before


def test_names_of_the_parameters_stay_beside_them() -> None:
    """An optimizer made of named parameters keeps the names in a second list."""
    model = network()
    optimizer = optim.AdamW(model.named_parameters())
    step(model, optimizer)
    mapping = {"rms": nn.RMSNorm, "layer": norms.ScaleNorm}
    ns.swap_norms(model, mapping, optimizer=optimizer, inplace=True, method="init")
    (group,) = optimizer.param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert group["param_names"] == [names[id(p)] for p in group["params"]]
    optimizer.load_state_dict(optimizer.state_dict())


def test_shared_norm_is_held_once() -> None:
    shared = OffsetNorm(8)
    model = fill(Net(lambda m, x: m.b(m.between(m.a(x))), a=shared, between=nn.GELU(), b=shared))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)
    assert held(optimizer) == [ids(model.a.weight)]


def test_two_norms_with_one_scale_are_held_once() -> None:
    model = network()
    model[3] = OffsetNorm(8).double()
    model[3].weight = model[1].weight
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)
    assert sorted(held(optimizer)[0]) == sorted(ids(*model.parameters()))


# State


def test_state_of_replaced_parameters_is_dropped_and_the_rest_kept() -> None:
    model = network()
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    for _ in range(3):
        step(model, optimizer)
    old = model[1].weight
    kept = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)
    assert old not in optimizer.state
    assert model[1].weight not in optimizer.state
    remaining = [p for p in model.parameters() if p is not model[1].weight]
    assert {id(p) for p in optimizer.state} == {id(p) for p in remaining}
    for parameter in remaining:
        for name, value in optimizer.state[parameter].items():
            assert torch.equal(value, kept[id(parameter)][name])
    step(model, optimizer)
    assert optimizer.state[model[1].weight]["step"] == 1
    assert optimizer.state[model[0].weight]["step"] == 4


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True),
    "adam": lambda p: optim.Adam(p, lr=0.01),
    "foreach": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.0, foreach=True),
    "fused": lambda p: optim.AdamW(p, lr=0.01, weight_decay=0.0, fused=True),
    "amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
    "lbfgs": lambda p: optim.LBFGS(p, lr=0.01),
}
# It keeps one state for all parameters, so only a fresh one can go on.
RUNS = [(name, steps) for name in OPTIMIZERS for steps in (0, 2) if (name, steps) != ("lbfgs", 2)]


@pytest.mark.parametrize(("name", "steps"), RUNS)
def test_training_goes_on_as_with_parameters_of_the_same_state(name: str, steps: int) -> None:
    """The others move as without a swap; the new scale as one that the optimizer just met."""
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(steps):
        step(model, optimizer)
    twin = copy.deepcopy(model)
    reference = OPTIMIZERS[name](twin.parameters())
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    reference.state.pop(twin[1].weight, None)
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)

    def closure(net: nn.Module, opt: optim.Optimizer) -> Any:
        def call() -> Tensor:
            opt.zero_grad()
            loss = net(TOKENS).square().sum()
            loss.backward()
            return loss

        return call

    optimizer.step(closure(model, optimizer))
    reference.step(closure(twin, reference))
    for key in ("0.weight", "0.bias", "2.weight", "3.weight", "3.bias", "4.weight"):
        assert_close(model.get_parameter(key), twin.get_parameter(key), 1e-9)
    if name != "adafactor":  # its steps grow with the size of the scale, which is another now
        assert_close(model[1].weight, 1 + twin[1].weight, 1e-9)


def test_state_dict_goes_round_after_a_swap() -> None:
    model = network()
    optimizer = optim.AdamW(model.parameters(), lr=0.01)
    step(model, optimizer)
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)
    step(model, optimizer)
    other = copy.deepcopy(model)
    again = optim.AdamW(other.parameters(), lr=0.01)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(model, optimizer)
    step(other, again)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_scheduler_goes_on() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step(model, optimizer)
    scheduler.step()
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)
    before = model[1].weight.detach().clone()
    step(model, optimizer)
    assert_close(model[1].weight, before - 0.05 * model[1].weight.grad)


# What cannot be


def test_optimizer_needs_a_swap_in_place() -> None:
    model = network()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = held(optimizer)
    with pytest.raises(ns.NormswapError, match=r"inplace=True"):
        ns.swap_norms(model, RMS, optimizer=optimizer)
    assert held(optimizer) == before


@pytest.mark.parametrize("inputs", [True, False])
def test_optimizer_of_another_model_is_an_error_and_nothing_is_changed(inputs: bool) -> None:
    model, other = network(), network()
    optimizer = optim.SGD(other.parameters(), lr=0.1)
    before, state, modules = held(optimizer), state_copy(model), list(model)
    with pytest.raises(ns.NormswapError, match="optimizer"):
        ns.swap_norms(model, RMS, TOKENS if inputs else None, optimizer=optimizer, inplace=True)
    assert held(optimizer) == before
    assert list(model) == modules, "the model is as it was"
    assert list(model.state_dict()) == list(state)


def test_optimizer_of_a_part_of_the_model_without_its_norms_is_content() -> None:
    """A head that is trained alone, say, on frozen norms."""
    model = network()
    model[1].requires_grad_(False)
    optimizer = optim.SGD(model[4].parameters(), lr=0.1)
    before = held(optimizer)
    ns.swap_norms(model, RMS, optimizer=optimizer, inplace=True)
    assert type(model[1]) is nn.RMSNorm
    assert held(optimizer) == before


def test_failed_swap_leaves_the_optimizer_alone() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.norm(x) + isinstance(m.norm, nn.RMSNorm)

    model = fill(Net(forward, norm=OffsetNorm(8)))
    optimizer = optim.Adam(model.parameters())
    step(model, optimizer)
    before = held(optimizer)
    with pytest.raises(ns.VerificationError):
        ns.swap_norms(model, RMS, TOKENS, optimizer=optimizer, inplace=True)
    assert held(optimizer) == before == [ids(model.norm.weight)]
    assert model.norm.weight in optimizer.state


# The function itself


def test_update_replaces_removes_and_adds() -> None:
    a, b, c, d = (nn.Parameter(random_input(3, seed=i)) for i in range(4))
    new, extra = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(1))
    optimizer = optim.SGD([{"params": [a, b], "lr": 1.0}, {"params": [c, d]}], lr=0.1, momentum=0.9)
    for p in (a, b, c, d):
        p.grad = torch.ones_like(p)
    optimizer.step()
    update_optimizer(optimizer, {b: [new, extra], c: []})
    assert held(optimizer) == [ids(a, new, extra), ids(d)]
    assert set(map(id, optimizer.state)) == set(ids(a, d))
    assert [g["lr"] for g in optimizer.param_groups] == [1.0, 0.1]


def test_update_with_nothing_replaced_changes_nothing() -> None:
    a = nn.Parameter(torch.zeros(3))
    optimizer = optim.SGD([a], lr=0.1)
    update_optimizer(optimizer, {})
    assert held(optimizer) == [ids(a)]
