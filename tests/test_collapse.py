"""Collapsed rows stand for exactly the rows that they came from."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normswap.collapse import collapse_names


def expand(text: str) -> list[str]:
    """Every name that a collapsed name stands for."""
    parts = re.split(r"(\{[^}]*\})", text)
    choices: list[list[str]] = []
    for part in parts:
        if not part.startswith("{"):
            choices.append([part])
            continue
        values: list[str] = []
        for piece in part[1:-1].split(","):
            bounds = [int(number) for number in piece.split("..")]
            first, last = bounds[0], bounds[1] if len(bounds) > 1 else bounds[0]
            values += map(str, range(first, last + 1, bounds[2] if len(bounds) > 2 else 1))
        choices.append(values)
    return ["".join(choice) for choice in itertools.product(*choices)]


def names_of(names: list[str]) -> list[tuple[str, int]]:
    return [(item.columns[0], item.count) for item in collapse_names([(n,) for n in names])]


@pytest.mark.parametrize(
    ("names", "collapsed"),
    [
        ([f"layers.{n}.norm1" for n in range(32)], [("layers.{0..31}.norm1", 32)]),
        (["a.0", "a.2"], [("a.{0,2}", 2)]),
        (["a.0", "a.1", "a.2", "a.5"], [("a.{0..2,5}", 4)]),
        ([f"f.{n}" for n in range(1, 47, 3)], [("f.{1..46..3}", 16)]),
        (["norm"], [("norm", 1)]),
        (["a.1", "b.1"], [("a.1", 1), ("b.1", 1)]),
        (["a.01", "a.02"], [("a.01", 1), ("a.02", 1)]),  # spellings, not numbers
        (["x.0.0", "x.1.1"], [("x.0.0", 1), ("x.1.1", 1)]),  # not x.{0,1}.{0,1}
        (["x.0.0", "x.0.1", "x.1.0", "x.1.1", "x.2.0"], [("x.{0,1}.{0,1}", 4), ("x.2.0", 1)]),
        (["layer1:batch_norm#0", "layer1:batch_norm#1"], [("layer1:batch_norm#{0,1}", 2)]),
        (["a.0", "a.0"], [("a.0", 1), ("a.0", 1)]),
        ([], []),
    ],
)
def test_names(names: list[str], collapsed: list[tuple[str, int]]) -> None:
    assert names_of(names) == collapsed


def test_other_columns_follow_the_name_at_a_fixed_distance() -> None:
    rows = [(f"net.{n + 1}", f"folded into net.{n}, 3x3", "exact") for n in range(0, 8, 2)]
    assert [item.columns for item in collapse_names(rows)] == [
        ("net.{1..7..2}", "folded into net.{0..6..2}, 3x3", "exact")
    ]


def test_columns_that_do_not_follow_keep_rows_apart() -> None:
    rows = [("a.0", "into b.0"), ("a.1", "into b.1"), ("a.2", "into b.7"), ("a.3", "kept")]
    assert [(item.columns, item.rows) for item in collapse_names(rows)] == [
        (("a.{0,1}", "into b.{0,1}"), (0, 1)),
        (("a.2", "into b.7"), (2,)),
        (("a.3", "kept"), (3,)),
    ]


def test_a_name_without_numbers_does_not_swallow_those_of_other_columns() -> None:
    rows = [("norm", "into 1"), ("norm", "into 2")]
    assert [item.columns for item in collapse_names(rows)] == [
        ("norm", "into 1"),
        ("norm", "into 2"),
    ]


def test_rows_stay_in_the_order_of_their_first_name() -> None:
    names = ["z.0", "a", "z.1", "b.3"]
    assert [name for name, _ in names_of(names)] == ["z.{0,1}", "a", "b.3"]


heads = st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.sampled_from(["", ".bn"]))
dotted = st.lists(st.tuples(heads, st.integers(0, 3)), max_size=40, unique=True).map(
    lambda rows: [f"{a}.{i}{middle}.c{j}" for (a, i, middle), j in rows]
)


@given(names=dotted)
def test_nothing_is_lost_and_nothing_is_added(names: list[str]) -> None:
    collapsed = collapse_names([(name,) for name in names])
    assert sorted(index for item in collapsed for index in item.rows) == list(range(len(names)))
    for item in collapsed:
        assert sorted(expand(item.columns[0])) == sorted(names[index] for index in item.rows)


@given(names=dotted, shift=st.integers(0, 3))
def test_second_columns_expand_beside_the_names(names: list[str], shift: int) -> None:
    def action(name: str) -> str:
        head, last = name.rsplit("c", 1)
        return f"into {head}d{int(last) + shift}"

    for item in collapse_names([(name, action(name)) for name in names]):
        pairs = zip(*(expand(column) for column in item.columns), strict=True)
        assert sorted(pairs) == sorted((names[i], action(names[i])) for i in item.rows)
