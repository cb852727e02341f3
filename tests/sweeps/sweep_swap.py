"""Swap the norms of every causal language model of transformers for those of torch.nn.

Each model type is built in a small configuration on random weights, its norm parameters random
with negative and zero entries, in double precision. Its RMS norms become ``nn.RMSNorm`` and its
layer norms ``nn.LayerNorm`` where that is exact; the logits of both models are compared in true
float64.

``python tests/sweeps/sweep_swap.py`` resumes from ``build/sweeps/swap.jsonl`` and writes
``swap.md``; ``--only llama`` runs one again; ``--table`` only writes.
"""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Sequence
from typing import Any

import pool
import torch
from common import HERE, RESULTS, collapse, relative_error
from pool import Record
from small_models import build_causal_lm, causal_lms, logits, randomise_norms
from torch import Tensor, nn

STORE = RESULTS / "swap.jsonl"
TABLE = HERE / "swap.md"
WRONG = 1e-10
MAPPING = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


def sweep(model_type: str) -> Record:
    """Build, randomise, swap, compare: a record of counts."""
    import normswap as ns

    start = time.perf_counter()
    model, inputs = build_causal_lm(model_type)
    sites = ns.find_norms(model)
    randomise_norms(list(sites))
    record: Record = {
        "class": type(model).__name__,
        "params": sum(p.numel() for p in model.parameters()),
        "norms": len(sites),
        "kinds": dict(collections.Counter(s.spec.kind if s.spec else "unknown" for s in sites)),
        "unseen": _unseen(model, {s.name for s in sites}),
        "build_seconds": round(time.perf_counter() - start, 2),
    }
    called = _calls(model, inputs, [s.name for s in sites])
    before = logits(model, inputs)
    new, report = _swapped(model, inputs, record)
    after = logits(model, inputs)
    error = relative_error(before, logits(new, inputs))
    exact = [s for s in report.sites if s.status == "exact"]
    refused = [s for s in report.sites if s.status == "refused"]
    record.update(
        sites=len(report.sites),
        exact=len(exact),
        classes=dict(
            collections.Counter(type(model.get_submodule(s.name)).__name__ for s in exact)
        ),
        refused=dict(collections.Counter(s.reason for s in refused)),
        details=dict(
            collections.Counter(
                f"{type(model.get_submodule(s.name)).__name__}: {s.reason}: {collapse(s.detail)}"
                for s in refused
            )
        ),
        not_called=[s.name for s in exact if s.name not in called],
        error=error,
        usable=bool(before.isfinite().all()) and float(before.std()) > 0,
        changed_original=not torch.equal(before, after),
    )
    record["wrong"] = not error < WRONG
    record["misplaced"] = [
        s.name for s in exact if type(new.get_submodule(s.name)) not in (nn.RMSNorm, nn.LayerNorm)
    ]
    if record["wrong"]:
        record["alone"] = _alone(model, inputs, before, [s.name for s in exact])
    return record


def _swapped(model: nn.Module, inputs: dict[str, Any], record: Record) -> tuple[nn.Module, Any]:
    """The swap; where it is an error, with example inputs; else of the norms with tensors."""
    import normswap as ns

    try:
        return ns.swap_norms(model, MAPPING, method="exact", verify=False)
    except ns.NormswapError as error:  # the width of a norm without parameters
        record["raised"] = str(error)[:200]
    try:
        out = ns.swap_norms(model, MAPPING, method="exact", verify=False, example_kwargs=inputs)
    except ns.NormswapError as error:
        record["raised_with_inputs"] = str(error)[:200]
    else:
        return out
    return ns.swap_norms(
        model, MAPPING, method="exact", verify=False, where=lambda s: bool(s.module._parameters)
    )


def _unseen(model: nn.Module, found: set[str]) -> dict[str, int]:
    """Leaf modules named as norms that were not found, by class."""
    return dict(
        collections.Counter(
            type(m).__name__
            for n, m in model.named_modules()
            if re.search("norm", type(m).__name__, re.IGNORECASE)
            and n not in found
            and not list(m.children())
        )
    )


def _calls(model: nn.Module, inputs: dict[str, Any], sites: Sequence[str]) -> set[str]:
    called: set[str] = set()
    handles = [
        model.get_submodule(n).register_forward_pre_hook(lambda *_, n=n: called.add(n))
        for n in sites
    ]
    try:
        logits(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return called


def _alone(
    model: nn.Module, inputs: dict[str, Any], before: Tensor, sites: Sequence[str]
) -> dict[str, float]:
    """The norms whose swap alone changes the logits."""
    import normswap as ns

    found: dict[str, float] = {}
    for name in sites[:60]:
        new, _ = ns.swap_norms(model, MAPPING, method="exact", verify=False, where=name)
        error = relative_error(before, logits(new, inputs))
        if not error < WRONG:
            found[name] = error
    return found


# -- the results ----------------------------------------------------------------------------------


def _line(r: Record) -> str:
    if "failure" in r:
        return f"{r['name']}: FAILED {r['failure']} ({r.get('seconds', '-')} s)"
    mark = "WRONG" if r["wrong"] else "ok"
    return (
        f"{r['name']}: {mark} {r['error']:.0e}, {r['exact']}/{r['norms']} exact {r['refused']} "
        f"({r['seconds']} s)"
    )


# -- the table ------------------------------------------------------------------------------------


def table(records: list[Record]) -> list[str]:
    """A Markdown file: totals, a row per model, the refusals by kind, the failures."""
    records = sorted(records, key=lambda r: r["name"])
    ran = [r for r in records if "failure" not in r]
    failed = [r for r in records if "failure" in r]
    wrong = [r for r in ran if r["wrong"]]
    reasons = _sum(ran, "refused")
    classes = _sum(ran, "classes")
    worst = max((r["error"] for r in ran if not r["wrong"]), default=0.0)
    raised = [r["name"] for r in ran if "raised" in r]
    idle = sum(len(r["not_called"]) for r in ran)
    refusals = ", ".join(f"{k} {n}" for k, n in reasons.most_common()) or "none"
    return [
        "# Norms of causal language models swapped for those of torch.nn",
        "",
        f"{len(records)} model types, {len(ran)} built and run: "
        f"{sum(r['norms'] for r in ran)} norms ("
        + ", ".join(f"{n} {k}" for k, n in _sum(ran, "kinds").most_common())
        + f"). Swapped exactly: {sum(r['exact'] for r in ran)}, of {len(classes)} classes "
        f"({idle} of them are not called by the input ids used). Refused: {refusals}. "
        f"Largest relative difference of the logits in float64 {worst:.0e}. "
        f"Wrong ({WRONG:.0e} or more): {len(wrong)}"
        f"{' (' + ', '.join(r['name'] for r in wrong) + ')' if wrong else ''}. "
        f"Original changed: {sum(r['changed_original'] for r in ran)}. "
        f"An error without example inputs: {', '.join(raised) or 'none'}; also with them: "
        f"{', '.join(r['name'] for r in ran if 'raised_with_inputs' in r) or 'none'} "
        f"(then only the norms with parameters, the rest refused by `where`). "
        f"Not built or not run: {len(failed)}.",
        "",
        "| model type | norms | exact | refused | difference | seconds |",
        "|---|---|---|---|---|---|",
        *(_row(r) for r in ran),
        "",
        "## Wrong",
        "",
        *(f"- {r['name']}: {_named(r)}" for r in wrong),
        "",
        "## Refusals by class",
        "",
        "| norms | class and reason |",
        "|---|---|",
        *(f"| {n} | {_cell(kind)} |" for kind, n in _sum(ran, "details").most_common()),
        "",
        "## Named a norm and not taken for one",
        "",
        "| modules | class |",
        "|---|---|",
        *(f"| {n} | {name} |" for name, n in _sum(ran, "unseen").most_common()),
        "",
        "## Swapped, by class",
        "",
        "| norms | class |",
        "|---|---|",
        *(f"| {n} | {name} |" for name, n in classes.most_common()),
        "",
        "## Not built or not run",
        "",
        "| model type | |",
        "|---|---|",
        *(f"| {r['name']} | {_cell(r['failure'][:200])} |" for r in failed),
    ]


def _sum(records: list[Record], key: str) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for record in records:
        total.update(record[key])
    return total


def _row(r: Record) -> str:
    why = ", ".join(f"{k} {n}" for k, n in sorted(r["refused"].items())) or "–"
    mark = " **wrong**" if r["wrong"] else "" if r["usable"] else " (no finite logits)"
    return (
        f"| {r['name']} | {r['norms']} | {r['exact']} | {why} | {r['error']:.0e}{mark} "
        f"| {r['seconds']:.1f} |"
    )


def _named(r: Record) -> str:
    alone = r.get("alone", {})
    return ", ".join(f"`{n}` {e:.0e}" for n, e in alone.items()) or "no norm alone"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    pool.main(__doc__, STORE, TABLE, names=causal_lms, sweep=sweep, line=_line, write=table)
