"""Fold scales and shifts of the norms of every causal language model of transformers.

Each type is built small, all parameters random, in double precision. Layer and RMS norms are
folded into the layers that read them; where the output layer is tied to the embedding table, a
second time with ``untie=True``. All outputs are compared in true float64; a table whose tie is
kept must be the same bit for bit.

``python tests/sweeps/sweep_fold_affine.py`` resumes from ``build/sweeps/fold_affine.jsonl`` and
writes ``fold_affine.md``; ``--only llama`` runs one type again; ``--table`` only writes.
"""

from __future__ import annotations

import collections
import time
from typing import Any

import pool
import torch
from common import HERE, RESULTS, collapse, relative_error
from pool import Record
from small_inputs import Keywords
from small_models import build_causal_lm, causal_lms, is_usable, outputs, randomise_all
from torch import nn

STORE = RESULTS / "fold_affine.jsonl"
TABLE = HERE / "fold_affine.md"
WRONG = 1e-10
FIRST = ("gpt2", "llama", "gemma2", "cohere", "opt", "qwen3_moe", "falcon", "mamba", "dbrx")


def names() -> list[str]:
    """Every model type with a causal language model, a few of different kinds first."""
    return sorted(causal_lms(), key=lambda t: t not in FIRST)


def sweep(name: str) -> Record:
    """Build, randomise, fold, compare: a record of counts."""
    import normswap as ns

    model, inputs = build_causal_lm(name, experts="batched_mm")
    sites = ns.find_norms(model)
    kinds = collections.Counter(s.spec.kind if s.spec else "unknown" for s in sites)
    record: Record = {
        "class": type(model).__name__,
        "params": sum(p.numel() for p in model.parameters()),
        "kinds": dict(kinds),
        "norms": kinds["layer"] + kinds["rms"],
    }
    randomise_all(model, sites)
    before = outputs(model, inputs)
    record["usable"] = is_usable(before)
    record |= _folded(model, inputs, before)
    if _is_tied(model):
        record["untied"] = _untied(model, inputs, before)
    record["changed_original"] = relative_error(before, outputs(model, inputs)) > 0
    return record


def _untied(model: nn.Module, inputs: Keywords, before: Any) -> Record:
    """The same with ``untie=True``; an error of it is part of the record."""
    try:
        return _folded(model, inputs, before, untie=True)
    except Exception as error:
        return {"failure": pool.failure(error)["failure"]}


def _folded(model: nn.Module, inputs: Keywords, before: Any, **options: bool) -> Record:
    """One fold: counts, refusals, the difference of the outputs, and what became of the ties."""
    import normswap as ns

    start = time.perf_counter()
    new, report = ns.fold_affine(model, inputs, verify=False, **options)
    seconds = time.perf_counter() - start
    exact = [s for s in report.sites if s.status == "exact"]
    refused = [s for s in report.sites if s.status == "refused"]
    error = relative_error(before, outputs(new, inputs))
    tied = _is_tied(new)
    return {
        "folded": len(exact),
        "neutral": sum(_is_neutral(model, new, s.name) for s in exact),
        "refused": dict(collections.Counter(s.reason for s in refused)),
        "details": dict(collections.Counter(f"{s.reason}: {collapse(s.detail)}" for s in refused)),
        "unanswered": _unanswered(model, report.sites),
        "error": error,
        "wrong": not error < WRONG,
        "tied": tied,
        "flag": bool(getattr(new.config, "tie_word_embeddings", False)),
        "embedding_changed": not _same_embedding(model, new),
        "fold_seconds": round(seconds, 2),
    }


def _is_tied(model: nn.Module) -> bool:
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    weights = [getattr(m, "weight", None) for m in (table, head)]
    return weights[0] is not None and weights[0] is weights[1]


def _same_embedding(model: nn.Module, new: nn.Module) -> bool:
    """Whether the input embeddings are the same bit for bit."""
    old, table = model.get_input_embeddings(), new.get_input_embeddings()
    if not isinstance(getattr(old, "weight", None), torch.Tensor):
        return True
    return torch.equal(old.weight, table.weight)


def _is_neutral(model: nn.Module, new: nn.Module, name: str) -> bool:
    """Whether a norm has a scale of one and a shift of zero left, or never had any."""
    from normswap.find import find_modules

    if ":" in name:
        return False
    module = new.get_submodule(name)
    site = next(iter(find_modules(module)), None)
    if site is None or site.spec is None:
        return False
    weight = getattr(module, site.spec.weight or "", None)
    bias = getattr(module, site.spec.bias or "", None)
    one = 1.0 - float(site.spec.unit_offset)
    return (weight is None or bool((weight == one).all())) and (
        bias is None or not bool(bias.any())
    )


def _unanswered(model: nn.Module, sites: Any) -> list[str]:
    """The layer and RMS norms of which the report says nothing."""
    import normswap as ns

    answered = {n for s in sites for n in (s.name.split(":")[0], *s.names)}
    return [
        s.name
        for s in ns.find_norms(model)
        if s.spec is not None and s.spec.kind in ("layer", "rms") and s.name not in answered
    ]


def line(r: Record) -> str:
    """One record on one line."""
    if "failure" in r:
        return f"{r['name']}: FAILED {r['failure'][:200]} ({r.get('seconds', '-')} s)"
    untied = r.get("untied")
    more = "" if untied is None else f", untied {_cell_of(untied)}"
    return f"{r['name']}: {_cell_of(r)} of {r['norms']} {r['refused']}{more} ({r['seconds']} s)"


def _cell_of(r: Record) -> str:
    if "failure" in r:
        return f"**{r['failure'][:80]}**"
    mark = " **wrong**" if r["wrong"] else ""
    return f"{r['folded']} folded ({r['neutral']} neutral), {r['error']:.0e}{mark}"


# -- the table ------------------------------------------------------------------------------------


def write(records: list[Record]) -> list[str]:
    """A Markdown file: totals, a row per type, refusals by kind, failures."""
    records = sorted(records, key=lambda r: r["name"].lower())
    ran = [r for r in records if "failure" not in r]
    failed = [r for r in records if "failure" in r]
    return [
        "# Scales and shifts folded in the causal language models of transformers",
        "",
        *_summary(records, ran),
        "",
        "## By reason",
        "",
        "| reason | norms |",
        "|---|---|",
        *(f"| {reason} | {n} |" for reason, n in _sum(ran, "refused").most_common()),
        "",
        "| norms | reason and detail |",
        "|---|---|",
        *(f"| {n} | {_cell(kind)} |" for kind, n in _sum(ran, "details").most_common()),
        "",
        "## By type",
        "",
        "Neutral: a scale of one and no shift are left.",
        "",
        "| type | norms | folded | neutral | refused | difference | tied: with untie | seconds |",
        "|---|---|---|---|---|---|---|---|",
        *map(_row, ran),
        "",
        "## Not built, not run or not folded",
        "",
        "| type | stage | |",
        "|---|---|---|",
        *(f"| {r['name']} | {r.get('stage', '')} | {_cell(r['failure'][:160])} |" for r in failed),
    ]


def _summary(records: list[Record], ran: list[Record]) -> list[str]:
    norms, folded = sum(r["norms"] for r in ran), sum(r["folded"] for r in ran)
    passes = [(r["name"], p) for r in ran for p in (r, r.get("untied", {})) if "error" in p]
    errors = [p["error"] for _, p in passes if not p["wrong"]]
    untied = [r["untied"] for r in ran if "folded" in r.get("untied", {})]
    return [
        f"{len(records)} model types, {len(ran)} built and run: {norms} layer and RMS norms, "
        f"{folded} folded ({sum(r['neutral'] for r in ran)} of them neutral now), "
        f"{sum(sum(r['refused'].values()) for r in ran)} refused. {len(untied)} have a tied "
        f"output layer: with `untie=True` {sum(u['folded'] for u in untied)} norms are folded. "
        f"Largest relative difference of all outputs in float64: {max(errors, default=0.0):.0e}.",
        "",
        f"- Wrong ({WRONG:.0e} or more): {_list(n for n, p in passes if p['wrong'])}",
        f"- An error with `untie=True`: "
        f"{_list(r['name'] for r in ran if 'failure' in r.get('untied', {}))}",
        f"- Without an answer: {_list(n for n, p in passes if p['unanswered'])}",
        f"- Embeddings changed though the tie is kept: "
        f"{_list(n for n, p in passes if p['tied'] and p['embedding_changed'])}",
        f"- Embeddings changed at all: {_list(n for n, p in passes if p['embedding_changed'])}",
        f"- Still tied, or flagged so, with `untie=True`: "
        f"{_list(r['name'] for r in ran if _still_tied(r.get('untied')))}",
        f"- Original changed: {_list(r['name'] for r in ran if r['changed_original'])}",
        f"- Outputs that say nothing: {_list(r['name'] for r in ran if not r['usable'])}",
    ]


def _still_tied(untied: Record | None) -> bool:
    """Whether a tie is left, or the flag and the model do not say the same."""
    return bool(untied) and "tied" in untied and (untied["tied"] or untied["flag"])


def _row(r: Record) -> str:
    mark = " **wrong**" if r["wrong"] else "" if r["usable"] else " (says nothing)"
    why = ", ".join(f"{k} {n}" for k, n in sorted(r["refused"].items())) or "–"
    untied = _cell_of(r["untied"]) if "untied" in r else "–"
    return (
        f"| {r['name']} | {r['norms']} | {r['folded']} | {r['neutral']} | {why} "
        f"| {r['error']:.0e}{mark} | {untied} | {r['seconds']:.1f} |"
    )


def _sum(records: list[Record], key: str) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for record in records:
        total.update(record[key])
    return total


def _list(names: Any) -> str:
    return ", ".join(dict.fromkeys(names)) or "none"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    pool.main(
        __doc__,
        STORE,
        TABLE,
        names=names,
        sweep=sweep,
        line=line,
        write=write,
        timeout=120.0,
    )
