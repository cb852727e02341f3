"""The residual structure of known models, against a table read by hand off their source code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from placement_families import FAMILIES
from placement_rows import ExpectedStack, Family, markdown
from torch import nn

import normswap as ns

TABLE = Path(__file__).with_name("placement_families.md")


def run(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def looks_like_a_norm(module: nn.Module) -> bool:
    name = type(module).__name__
    is_weight_norm = name == "_WeightNorm"
    return "norm" in name.lower() and not is_weight_norm and not list(module.children())


def norms_that_run(model: nn.Module, inputs: Any) -> Counter[str]:
    """How often each norm is called."""
    calls: Counter[str] = Counter()
    for name, module in model.named_modules():
        if looks_like_a_norm(module):
            module.register_forward_hook(lambda *_, name=name: calls.update([name]))
    run(model, inputs)
    return calls


def norms_of_table(row: Family) -> Counter[str]:
    """How often each norm is called if the table is right."""
    found: Counter[str] = Counter()
    for part in row.stacks:
        found.update(part.embedding_norms + part.final_norms)
        for sub in part.sublayers():
            found.update(sub.input_norms + sub.output_norms + sub.stream_norms)
    return found


def described(part: Any) -> dict[str, Any]:
    """What is compared: everything but the names of the branches and of the stack."""
    rows = part.sublayers() if isinstance(part, ExpectedStack) else part.sublayers
    return {
        "form": part.form,
        "embedding_norms": tuple(part.embedding_norms),
        "final_norms": tuple(part.final_norms),
        "sublayers": [
            {
                "kind": row.kind,
                "form": row.form,
                "input_norms": tuple(row.input_norms),
                "output_norms": tuple(row.output_norms),
                "stream_norms": tuple(row.stream_norms),
                "skip_scale": round(row.skip_scale, 5),
                "branch_scale": round(row.branch_scale, 5),
            }
            for row in rows
        ],
    }


everywhere = pytest.mark.parametrize("row", FAMILIES, ids=lambda row: row.name)


@everywhere
def test_table_accounts_for_every_norm_that_runs(row: Family) -> None:
    calls = norms_that_run(row.build(), row.inputs())
    inner = {name for name in calls if any(fnmatch(name, pattern) for pattern in row.inner)}
    assert {n: c for n, c in calls.items() if n not in inner} == dict(norms_of_table(row))
    for pattern in row.inner:
        assert any(fnmatch(name, pattern) for name in calls), f"no norm is called {pattern}"


@everywhere
def test_structure_is_that_of_the_table(row: Family) -> None:
    model = row.build()
    found = ns.residual_structure(model, row.inputs())
    assert [described(part) for part in found.stacks] == [described(part) for part in row.stacks]
    forms = {part.form for part in row.stacks}
    assert found.form == (forms.pop() if len(forms) == 1 else "mixed")
    modules = dict(model.named_modules())
    assert {part.name for part in found.stacks} <= set(modules)
    assert {sub.name for part in found.stacks for sub in part.sublayers} <= set(modules)


def test_families_have_names_of_their_own() -> None:
    assert len({row.name for row in FAMILIES}) == len(FAMILIES) >= 45


def test_printed_table_is_up_to_date() -> None:
    assert TABLE.read_text(encoding="utf-8") == markdown(FAMILIES)


def test_models_are_small_and_the_same_each_time() -> None:
    row = FAMILIES[0]
    first, second = row.build().state_dict(), row.build().state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
