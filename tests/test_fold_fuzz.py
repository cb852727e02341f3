"""Folding random networks: equal outputs, an answer per norm, nothing folded still computes."""

from __future__ import annotations

import copy
import pickle

import torch
from folding import check_fold, norm_calls
from helpers import relative_error, run
from hypothesis import HealthCheck, given, settings
from strategies import Network, networks, seeded_network

import normswap as ns

FUZZ = settings(
    max_examples=150,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@FUZZ
@given(networks())
def test_folding_a_random_network_changes_no_output(network: Network) -> None:
    check_fold(network)


@settings(FUZZ, max_examples=30)
@given(networks())
def test_a_plan_carried_through_json_gives_the_same_weights(network: Network) -> None:
    plan = ns.plan_fold_batchnorm(network.model, network.x)
    again = type(plan).from_json(plan.to_json())
    first, second = plan.apply(network.model), again.apply(network.model)
    assert relative_error(first.state_dict(), second.state_dict()) == 0.0
    assert relative_error(run(first, network.x), run(second, network.x)) == 0.0


@settings(FUZZ, max_examples=30)
@given(networks())
def test_folding_in_place_gives_the_same_weights(network: Network) -> None:
    new, _ = ns.fold_batchnorm(network.model, network.x, verify=False)
    model = copy.deepcopy(network.model)
    same, _ = ns.fold_batchnorm(model, network.x, inplace=True, verify=False)
    assert same is model
    assert relative_error(new.state_dict(), model.state_dict()) == 0.0


@settings(FUZZ, max_examples=30)
@given(networks())
def test_folding_again_changes_nothing(network: Network) -> None:
    once, _ = ns.fold_batchnorm(network.model, network.x, verify=False)
    twice, report = ns.fold_batchnorm(once, network.x, verify=False)
    assert relative_error(run(once, network.x), run(twice, network.x)) < 1e-10
    assert norm_calls(twice, network.x) == norm_calls(once, network.x), str(report)


def test_networks_are_reproducible_and_can_be_copied() -> None:
    for seed in range(20):
        network, same = seeded_network(seed), seeded_network(seed)
        assert repr(network) == repr(same)
        expected = run(network.model, network.x)
        for other in (
            same.model,
            copy.deepcopy(network.model),
            pickle.loads(pickle.dumps(network.model)),
        ):
            assert relative_error(expected, run(other, network.x)) == 0.0


def test_networks_hold_every_kind_of_step() -> None:
    ops = {step.op for seed in range(300) for step in seeded_network(seed).model.steps}
    assert len(ops) >= 20
    values = [run(n.model, n.x) for n in map(seeded_network, range(50))]
    assert all(torch.is_tensor(v) or len(v) == 2 for v in values)
