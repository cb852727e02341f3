"""Converting random transformers: equal outputs, an answer per norm, the original untouched."""

from __future__ import annotations

from collections import Counter

from helpers import relative_error
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_transformers import Network, seeded_transformer, shrink, transformers
from transformer_checks import (
    FOLDS,
    SWAPS,
    Options,
    check_conversion,
    convert,
    outputs,
    seeded_options,
)

FUZZ = settings(
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@FUZZ
@given(transformers(), st.sampled_from(SWAPS))
def test_converting_a_random_transformer_changes_no_output(
    network: Network, options: Options
) -> None:
    check_conversion(network, options)


@FUZZ
@given(transformers(), st.sampled_from(FOLDS))
def test_folding_the_affines_of_a_random_transformer_changes_no_output(
    network: Network, options: Options
) -> None:
    check_conversion(network, options)


def test_many_norms_of_random_transformers_are_converted() -> None:
    """Otherwise the tests above would say nothing."""
    swapped, folded, networks = Counter[str](), Counter[str](), Counter[bool]()
    for seed in range(20):
        network = seeded_transformer(seed)
        swap, fold = seeded_options(seed)
        counts = convert(network.model(), network.inputs(), swap)[1].counts
        swapped.update(counts)
        networks[counts.get("exact", 0) > 0] += 1
        folded.update(convert(network.model(), network.inputs(), fold)[1].counts)
    assert networks[True] > 0.4 * networks.total()
    assert swapped["exact"] > 0.25 * swapped.total()
    assert folded["exact"] > 0.4 * folded.total()


def test_random_transformers_are_reproducible() -> None:
    for seed in range(10):
        network, same = seeded_transformer(seed), seeded_transformer(seed)
        assert repr(network) == repr(same)
        inputs = network.inputs()
        assert relative_error(outputs(network.model(), inputs), outputs(same.model(), inputs)) == 0


def test_shrinking_keeps_what_fails_and_leaves_out_the_rest() -> None:
    def has_rotary(network: Network) -> bool:
        return any(b.attention and b.attention.rotary for b in network.recipe.blocks)

    network = next(n for n in map(seeded_transformer, range(100)) if has_rotary(n))
    expected = "Recipe(blocks=(Block(attention=Attention(rotary='half')),))"
    assert repr(shrink(network, has_rotary)).replace("pairs", "half") == expected
