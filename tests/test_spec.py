"""`NormSpec` and `Unknown`: values that can be compared, stored and shown."""

from __future__ import annotations

import dataclasses
import json

import pytest

from normswap.spec import NormSpec, Unknown


def test_a_spec_is_a_value() -> None:
    assert NormSpec("layer", (-1,), 1e-5) == NormSpec("layer", (-1,), 1e-5)
    assert len({NormSpec("rms", (-1,), 1e-6), NormSpec("rms", (-1,), 1e-6)}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        NormSpec("rms", (-1,), 1e-6).eps = 1.0  # type: ignore[misc]


def test_a_spec_can_be_written_as_json() -> None:
    spec = NormSpec("response", (1,), 2.0, window=(5, 1e-4, 0.75))
    assert json.loads(json.dumps(dataclasses.asdict(spec)))["window"] == [5, 1e-4, 0.75]


@pytest.mark.parametrize("kind", ["layer", "group", "instance", "batch", "frozen_batch"])
def test_kinds_that_subtract_the_mean(kind: str) -> None:
    assert NormSpec(kind, (-1,), 1e-5).centred


@pytest.mark.parametrize("kind", ["rms", "crms", "scale", "lp", "grn", "response", "dyt", "affine"])
def test_kinds_that_do_not_subtract_the_mean(kind: str) -> None:
    assert not NormSpec(kind, (-1,), 1e-5).centred


def test_unknown_says_what_was_seen() -> None:
    unknown = Unknown("second-input", "a second tensor is required: 'gate'")
    assert (unknown.reason, unknown.seen) == (
        "second-input",
        "a second tensor is required: 'gate'",
    )
