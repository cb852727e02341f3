"""Placement of norms in random transformers: read as declared, exact or refused, never a crash."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placement_checks import (
    WAYS,
    Way,
    check_conversion,
    declared_forms,
    seeded_network,
    seeded_ways,
    structure_faults,
    tamed,
)
from random_transformers import Network, transformers

import normswap as ns

NETWORKS = transformers() | transformers().map(tamed)
FUZZ = settings(
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@FUZZ
@given(NETWORKS)
def test_structure_of_a_random_transformer_is_the_declared_one(network: Network) -> None:
    assert structure_faults(network) == []


@FUZZ
@given(NETWORKS, st.sampled_from(WAYS))
def test_moving_the_norms_of_a_random_transformer_is_right_or_refused(
    network: Network, way: Way
) -> None:
    check_conversion(network, way)


def test_many_random_transformers_are_read_and_converted() -> None:
    """Otherwise the tests above would say nothing."""
    declared, outcomes = 0, Counter[str]()
    for seed in range(24):
        network = seeded_network(seed)
        declared += declared_forms(network) is not None
        for way in seeded_ways(seed, 2):
            outcome = check_conversion(network, way)
            refused = isinstance(outcome, ns.NormswapError)
            outcomes["refused" if refused else "converted"] += 1
    assert declared >= 6
    assert outcomes["converted"] >= 12
