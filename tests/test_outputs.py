"""Results of models are found by path, copied, and compared value by value."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from normswap.outputs import difference, flatten

X = torch.tensor([1.0, -4.0])


@dataclass
class Result:
    logits: Tensor
    extra: Any = None


def test_every_container_is_looked_into() -> None:
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=X)], config=nn.Linear(1, 1))
    value = Result(X, {"a": (X, [X]), 0: X, "cache": cache, "text": "no", "none": None})
    assert list(flatten(value)) == [
        "logits",
        "extra.a[0]",
        "extra.a[1][0]",
        "extra[0]",
        "extra.cache.layers[0].keys",
    ]
    assert list(flatten(X)) == [""]
    assert list(flatten((X, X))) == ["[0]", "[1]"]


def test_numbers_and_arrays_become_tensors() -> None:
    found = flatten({"f": 0.5, "i": 3, "b": True, "c": 1j, "n": np.float32(2), "a": np.ones(2)})
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "f": torch.float64,
        "i": torch.int64,
        "b": torch.bool,
        "c": torch.complex128,
        "n": torch.float32,
        "a": torch.float64,
    }


def test_what_is_found_is_a_copy() -> None:
    x = X.clone()
    found = flatten([x])["[0]"]
    x.zero_()
    assert torch.equal(found, X)


def test_an_object_that_leads_back_to_itself_ends() -> None:
    loop = SimpleNamespace(x=X)
    loop.again = [loop]
    assert list(flatten(loop)) == ["x"]
    assert list(flatten([X, X])) == ["[0]", "[1]"]  # twice the same is no loop


def test_sparse_and_nested_tensors_are_compared_by_value() -> None:
    sparse = torch.tensor([[0.0, 2.0], [0.0, 0.0]]).to_sparse()
    assert flatten(sparse)[""].tolist() == [[0.0, 2.0], [0.0, 0.0]]
    nested = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    assert flatten(nested)[""].tolist() == [1, 1, 0, 0, 0]


@given(
    values=st.lists(st.floats(-100, 100), min_size=1, max_size=8),
    shifts=st.lists(st.floats(-1, 1), min_size=8, max_size=8),
)
def test_the_relative_error_is_that_of_the_largest_value(
    values: list[float], shifts: list[float]
) -> None:
    a = torch.tensor(values, dtype=torch.float64)
    b = a + torch.tensor(shifts[: len(values)], dtype=torch.float64)
    found = difference({"": a}, {"": b}, exact_integers=True)
    gap = max(abs(x - y) for x, y in zip(a.tolist(), b.tolist(), strict=True))
    assert found.max_abs == gap
    assert found.max_rel == gap / max(*map(abs, values), 1e-12)
    assert found.compared == len(values)
    assert not found.problem


def test_the_worst_output_is_named() -> None:
    a = {"x": X, "y": X, "z": X}
    b = {"x": X + 0.01, "y": X + 0.04, "z": X * 1}
    found = difference(a, b, exact_integers=True)
    assert found.where == "y"
    assert found.max_rel == pytest.approx(0.01, rel=1e-5)
    assert found.compared == 6


def test_the_largest_absolute_error_may_be_of_another_output() -> None:
    found = difference(
        {"small": X * 1e-3, "large": X * 1e3},
        {"small": X * 1e-3 + 1e-3, "large": X * 1e3 + 1},
        exact_integers=True,
    )
    assert found.where == "small"
    assert found.max_abs == pytest.approx(1, rel=1e-4)


def test_complex_values_count_by_magnitude() -> None:
    a = torch.tensor([3 + 4j])
    found = difference({"": a}, {"": a + 0.5j}, exact_integers=True)
    assert found.max_rel == pytest.approx(0.1)
    broken = torch.tensor([complex(3, float("nan"))])
    assert difference({"": a}, {"": broken}, exact_integers=True).kind == "non-finite"


@pytest.mark.parametrize(
    ("a", "b", "kind"),
    [
        ({"x": X}, {"y": X}, "structure"),
        ({"x": X}, {"x": X, "y": X}, "structure"),
        ({"x": X}, {"x": X[:1]}, "shape"),
        ({"x": X}, {"x": torch.tensor([1.0, float("nan")])}, "non-finite"),
        ({"x": X / 0}, {"x": -X / 0}, "non-finite"),
        ({"x": X.long()}, {"x": X.long() + 1}, "integer"),
        ({"x": X > 0}, {"x": X < 0}, "integer"),
    ],
)
def test_what_cannot_be_measured_is_a_problem(
    a: dict[str, Tensor], b: dict[str, Tensor], kind: str
) -> None:
    found = difference(a, b, exact_integers=True)
    assert found.kind == kind
    assert found.problem
    assert found.max_rel == float("inf")


def test_the_same_infinities_are_no_difference() -> None:
    a = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0])
    found = difference({"": a}, {"": a.clone()}, exact_integers=True)
    assert (found.problem, found.max_abs) == ("", 0.0)


def test_integers_may_be_allowed_to_differ_and_are_noted() -> None:
    a, b = {"i": X.long(), "x": X}, {"i": X.long() + 1, "x": X}
    found = difference(a, b, exact_integers=False)
    assert not found.problem
    assert found.note == "output 'i' differs in 2 of 2 integers"


def test_empty_outputs_compare_nothing() -> None:
    found = difference({"": X[:0]}, {"": X[:0]}, exact_integers=True)
    assert (found.problem, found.compared) == ("", 0)
