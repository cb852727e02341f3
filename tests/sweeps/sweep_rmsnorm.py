"""LayerNorm to RMSNorm in every transformers model type that holds a LayerNorm and can be built.

Each type is built small, with its most complete head and with a second one, all parameters
random. Only exact conversions are made (``method="exact"``), a second time with
``fold_affine=True``, and a third time with ``untie=True`` and only the main outputs where that
could free more; outputs are compared in true float64.

``python tests/sweeps/sweep_rmsnorm.py`` resumes from ``build/sweeps/rmsnorm.jsonl`` and writes
``rmsnorm.md``; ``--only gpt2`` runs one type again; ``--table`` only writes.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pool
import torch
from common import HERE, RESULTS, collapse, relative_error
from pool import Record
from small_inputs import Keywords
from small_models import build, heads, is_usable, outputs, randomise_all
from small_transformers import centring_ops
from torch import nn

from normswap.outputs import flatten

STORE = RESULTS / "rmsnorm.jsonl"
TABLE = HERE / "rmsnorm.md"
WRONG = 1e-10
MAPPING = {nn.LayerNorm: nn.RMSNorm}

# Pre-norm models: every LayerNorm of the whole model can be converted.
CONVERT_WHOLE = (
    "gpt2",
    "opt",
    "biogpt",
    "blenderbot",
    "gpt_neox",
    "gptj",
    "codegen",
    "falcon",
    "bloom",
    "mpt",
    "stablelm",
    "phi",
    "starcoder2",
    "cohere",
    "whisper",
    "mbart",
    "pegasus",
    "vit",
    "clip",
    "deit",
    "dinov2",
    "nemotron",
    "gpt_bigcode",
    "xglm",
)
# Post-norm models, merged patches, convolutions with channels in between.
REFUSED = ("bert", "roberta", "bart", "albert", "distilbert", "swin", "convnext")
# Its classifier reads the mean of the stream, which no norm stands behind.
REFUSED_CLASSES = ("CLIPForImageClassification",)


def names() -> list[str]:
    """Model type and class, all first heads before the second ones; the named types first."""
    chosen = heads()
    order = sorted(chosen, key=lambda t: t not in CONVERT_WHOLE + REFUSED)
    return [f"{t} {c}" for n in (0, 1) for t in order for c in chosen[t][n : n + 1]]


def sweep(name: str) -> Record:
    """Build, randomise, convert, compare: a record of counts."""
    import normswap as ns

    model, inputs = build(*name.split())
    sites = ns.find_norms(model)
    layers = sites.where(kind="layer")
    record: Record = {
        "params": sum(p.numel() for p in model.parameters()),
        "norms": len(sites),
        "layers": len(layers),
        "inputs": {k: list(v.shape) for k, v in inputs.items() if isinstance(v, torch.Tensor)},
    }
    if not layers:
        return record
    randomise_all(model, sites)
    before = outputs(model, inputs)
    record["usable"] = is_usable(before)
    record |= _converted(model, inputs, before)
    if record["converted"]:
        record["folded"] = _folded(model, inputs, before)
    if any("output:" in d or d.startswith("shared") for d in record["details"]):
        record["freer"] = _freer(model, inputs, before)
    record["changed_original"] = relative_error(before, outputs(model, inputs)) > 0
    return record


def _folded(model: nn.Module, inputs: Keywords, before: Any) -> Record:
    """The conversion with scales and shifts folded; an error of it is part of the record."""
    try:
        folded = _converted(model, inputs, before, fold_affine=True)
    except Exception as error:
        return {"failure": pool.failure(error)["failure"]}
    return {k: folded[k] for k in ("converted", "plain", "error", "wrong")}


def _freer(model: nn.Module, inputs: Keywords, before: Any) -> Record:
    """The conversion where tied tables may be separated and only the main outputs must stay."""
    main = [n for n in flatten(before) if n.startswith("logits") or n.endswith("_embeds")]
    options: dict[str, Any] = {"untie": True, "outputs": main or None}
    try:
        freer = _converted(model, inputs, before, **options)
    except Exception as error:
        return {"failure": pool.failure(error)["failure"]}
    return {k: freer[k] for k in ("converted", "ops", "error", "wrong")}


def _converted(model: nn.Module, inputs: Keywords, before: Any, **options: Any) -> Record:
    """One conversion: counts, refusals and the difference of the outputs that must stay."""
    import normswap as ns

    start = time.perf_counter()
    new, report = ns.swap_norms(model, MAPPING, inputs, method="exact", verify=False, **options)
    seconds = time.perf_counter() - start
    exact = [s for s in report.sites if s.status == "exact" and s.kind == "layer"]
    refused = [s for s in report.sites if s.status == "refused"]
    kept = options.get("outputs")
    error = relative_error(flatten(before, kept), flatten(outputs(new, inputs), kept))
    return {
        "converted": len(exact),
        "ops": len(centring_ops(new)),
        "plain": sum(_is_plain(new, s.name) for s in exact),
        "refused": dict(collections.Counter(s.reason for s in refused)),
        "details": dict(collections.Counter(f"{s.reason}: {collapse(s.detail)}" for s in refused)),
        "unanswered": _unanswered(model, report.sites),
        "error": error,
        "wrong": not error < WRONG,
        "convert_seconds": round(seconds, 2),
    }


def _is_plain(model: nn.Module, name: str) -> bool:
    """Whether a norm is an RMSNorm of torch.nn with a weight of ones."""
    module = model.get_submodule(name.split(":", maxsplit=1)[0])
    weight = getattr(module, "weight", None)
    return type(module) is nn.RMSNorm and (weight is None or bool((weight == 1).all()))


def _unanswered(model: nn.Module, sites: Sequence[Any]) -> list[str]:
    """The LayerNorms of torch.nn of which the report says nothing."""
    answered = {n for s in sites for n in (s.name.split(":")[0], *s.names)}
    return [n for n, m in model.named_modules() if type(m) is nn.LayerNorm and n not in answered]


def line(r: Record) -> str:
    """One record on one line."""
    if "failure" in r:
        return f"{r['name']}: FAILED {r['failure'][:200]} ({r.get('seconds', '-')} s)"
    if not r["layers"]:
        return f"{r['name']}: no LayerNorm"
    mark = "WRONG" if r["wrong"] else "ok"
    folded = r.get("folded")
    more = "" if folded is None else f", folded: {_folded_cell(folded)}"
    return (
        f"{r['name']}: {mark} {r['error']:.0e}, {r['converted']}/{r['layers']} converted, "
        f"{r['ops']} ops {r['refused']}{more} ({r['seconds']} s)"
    )


def _folded_cell(folded: Record | None) -> str:
    if folded is None:
        return "–"
    if "failure" in folded:
        return f"**{folded['failure'][:80]}**"
    return f"{folded['plain']} plain, {folded['error']:.0e}" + (
        " **wrong**" if folded["wrong"] else ""
    )


# -- the table ------------------------------------------------------------------------------------


def write(records: list[Record]) -> list[str]:
    """A Markdown file: totals, the two lists, a row per type and head, refusals, failures."""
    records = sorted(records, key=lambda r: r["name"].lower())
    ran = [r for r in records if r.get("layers") and "failure" not in r]
    failed = [r for r in records if "failure" in r]
    return [
        "# LayerNorm to RMSNorm in the models of transformers",
        "",
        *_summary(records, ran, failed),
        "",
        "## Named types",
        "",
        *_named_check(ran),
        "",
        "## By reason",
        "",
        "| reason | norms |",
        "|---|---|",
        *(f"| {reason} | {n} |" for reason, n in _sum(ran, "refused").most_common()),
        "",
        "| norms | reason and detail | types |",
        "|---|---|---|",
        *_details(ran),
        "",
        "## By type",
        "",
        "`C/N` of the LayerNorms converted; folded: norms that end as a plain `nn.RMSNorm` of ones "
        "with `fold_affine=True`, and the difference.",
        "",
        "| type and class | converted | ops | refused | difference | folded | seconds |",
        "|---|---|---|---|---|---|---|",
        *map(_row, ran),
        "",
        "## Not built, not run or not converted",
        "",
        "| type and class | stage | |",
        "|---|---|---|",
        *(f"| {r['name']} | {r.get('stage', '')} | {_cell(r['failure'][:160])} |" for r in failed),
    ]


def _summary(records: list[Record], ran: list[Record], failed: list[Record]) -> list[str]:
    types = {r["name"].split()[0] for r in ran}
    built = {r["name"].split()[0] for r in records if "failure" not in r}
    lost = sorted({r["name"].split()[0] for r in failed} - built)
    layers, converted = sum(r["layers"] for r in ran), sum(r["converted"] for r in ran)
    folded = [r["folded"] for r in ran if "folded" in r]
    freer = [r["freer"] for r in ran if "freer" in r]
    freed = sum(r["converted"] for r in ran if "freer" in r)
    errors = [r["error"] for r in ran if not r["wrong"]]
    return [
        f"{len({r['name'].split()[0] for r in records})} model types, {len(built)} built; "
        f"{len(types)} of them hold LayerNorms ({len(ran)} classes, {layers} norms). Converted "
        f"exactly: {converted} ({100 * converted / max(layers, 1):.0f} %), with "
        f"{sum(r['ops'] for r in ran)} centring ops; "
        f"{sum(r['converted'] == r['layers'] for r in ran)} classes whole, "
        f"{sum(r['converted'] == 0 for r in ran)} not at all. Largest relative difference of all "
        f"outputs in float64: {max(errors, default=0.0):.0e}.",
        "",
        f"- Wrong ({WRONG:.0e} or more): {_list(r['name'] for r in ran if r['wrong'])}",
        f"- With `fold_affine=True`: {len(folded)} classes, "
        f"{sum(f.get('plain', 0) for f in folded)} plain norms of "
        f"{sum(f.get('converted', 0) for f in folded)}; wrong: "
        f"{_list(r['name'] for r in ran if r.get('folded', {}).get('wrong'))}; an error: "
        f"{_list(r['name'] for r in ran if 'failure' in r.get('folded', {}))}",
        f"- Where a tied table or an output that is no logit or embedding is in the way, with "
        f"`untie=True` and `outputs=` (*freer*): {sum(f.get('converted', 0) for f in freer)} norms "
        f"of {len(freer)} classes instead of {freed}; wrong: "
        f"{_list(r['name'] for r in ran if r.get('freer', {}).get('wrong'))}; an error: "
        f"{_list(r['name'] for r in ran if 'failure' in r.get('freer', {}))}",
        f"- Original changed: {_list(r['name'] for r in ran if r['changed_original'])}",
        f"- Without an answer: {_list(r['name'] for r in ran if r['unanswered'])}",
        f"- Outputs that say nothing: {_list(r['name'] for r in ran if not r['usable'])}",
        f"- No class of the type built: {_list(lost)}",
    ]


def _named_check(ran: list[Record]) -> list[str]:
    by_type: dict[str, list[Record]] = {}
    for r in ran:
        by_type.setdefault(r["name"].split()[0], []).append(r)
    lines = ["| type | expected | found | |", "|---|---|---|---|"]
    for model_type in CONVERT_WHOLE + REFUSED:
        for r in by_type.get(model_type, []):
            whole = model_type in CONVERT_WHOLE and r["name"].split()[1] not in REFUSED_CLASSES
            called = r["layers"] - r["refused"].get("not-called", 0)
            most = max(r["converted"], r.get("freer", {}).get("converted", 0))
            ok = most == called if whole else r["converted"] < called
            expected = "whole" if whole else "refusals"
            found = f"{r['converted']}/{called}" + ("" if not r["refused"] else f", {_why(r)}")
            found += f"; freer: {most}/{called}" if "freer" in r else ""
            lines.append(f"| {r['name']} | {expected} | {found} | {'ok' if ok else '**no**'} |")
        if model_type not in by_type:
            lines.append(f"| {model_type} | | not built | **no** |")
    return lines


def _details(ran: list[Record]) -> list[str]:
    counts, types = _sum(ran, "details"), collections.defaultdict(list)
    for r in ran:
        for kind in r["details"]:
            types[kind].append(r["name"].split()[0])
    rows = []
    for kind, n in counts.most_common():
        names = list(dict.fromkeys(types[kind]))
        more = "" if len(names) <= 6 else f" and {len(names) - 6} more"
        rows.append(f"| {n} | {_cell(kind)} | {', '.join(names[:6])}{more} |")
    return rows


def _row(r: Record) -> str:
    mark = " **wrong**" if r["wrong"] else "" if r["usable"] else " (says nothing)"
    return (
        f"| {r['name']} | {r['converted']}/{r['layers']} | {r['ops']} | {_why(r)} "
        f"| {r['error']:.0e}{mark} | {_folded_cell(r.get('folded'))} | {r['seconds']:.1f} |"
    )


def _why(r: Record) -> str:
    return ", ".join(f"{k} {n}" for k, n in sorted(r["refused"].items())) or "–"


def _sum(records: list[Record], key: str) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for record in records:
        total.update(record[key])
    return total


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


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
