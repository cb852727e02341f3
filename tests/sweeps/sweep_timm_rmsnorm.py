"""LayerNorm to RMSNorm in one member of every timm family that has a LayerNorm.

Members and input sizes are those of ``sweep_timm.py``, where that member has a LayerNorm. All
parameters are random, with negative and zero scales; only exact conversions are made
(``method="exact"``), and outputs are compared in true float64. Where they differ by more than
1e-10, they are wrong unless noise of 1e-16 on every value moves the outputs of the original as far.

``python tests/sweeps/sweep_timm_rmsnorm.py`` resumes from ``build/sweeps`` and writes
``timm_rmsnorm.md``; ``--only NAME`` runs one family again.
"""

from __future__ import annotations

import collections
import json
import time
from typing import Any

import pool
import torch
from common import HERE, RESULTS, Subject, collapse, randomise_around
from helpers import relative_error, tensors_in
from small_transformers import LAYER_TO_RMS, centring_ops, fill_all
from sweep_timm import SMALLEST, smallest_input
from torch import nn

WRONG = 1e-10
# Families whose smallest member has no LayerNorm: the smallest member that has one, if any has
# below 100 million parameters.
OTHERS = {
    "byobnet": "gcresnext26ts",
    "convnext": "convnext_atto",
    "efficientnet": "gc_efficientnetv2_rw_t",
}


def members() -> dict[str, str]:
    """Family to its member."""
    return {**json.loads(SMALLEST.read_text(encoding="utf-8")), **OTHERS}


def names() -> list[str]:
    """The families whose member has a LayerNorm of some class."""
    import timm

    found = []
    for family, member in members().items():
        with torch.device("meta"):
            model = timm.create_model(member, pretrained=False)
        if any(_is_layer_norm(module) for module in model.modules()):
            found.append(family)
    return found


def _is_layer_norm(module: nn.Module) -> bool:
    return any("LayerNorm" in cls.__name__ for cls in type(module).__mro__)


def build(family: str) -> Subject:
    """The member with random parameters on the smallest input that it accepts."""
    import timm

    member = members()[family]
    try:
        model = timm.create_model(member, pretrained=False).eval()
        shape = smallest_input(model)
    except Exception as error:
        raise pool.BuildError(f"{type(error).__name__}: {error}") from error
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    subject = Subject(fill_all(model), (x,), label=f"{member}, {shape[-1]}")
    with torch.no_grad():
        randomise_around(subject)
    return subject


def sweep(family: str) -> pool.Record:
    """Convert one family's member and compare: a record of counts."""
    import normswap as ns
    from normswap.precision import rounding_noise, true_float64

    subject = build(family)
    model, inputs = subject.model, subject.args
    start = time.perf_counter()
    new, report = ns.swap_norms(model, LAYER_TO_RMS, inputs, method="exact", verify=False)
    seconds = time.perf_counter() - start
    with true_float64():
        before, after = model(*inputs), new(*inputs)
    refused = [site for site in report.sites if site.status == "refused"]
    error, noise = relative_error(before, after), 0.0
    if not error < WRONG:
        with rounding_noise(1e-16, seed=0):
            noise = relative_error(before, model(*inputs))
    values = torch.cat([t.flatten() for t in tensors_in(before)])
    return {
        "label": subject.label,
        "params": sum(p.numel() for p in model.parameters()),
        "sites": len(report.sites),
        "converted": sum(site.status == "exact" for site in report.sites),
        "ops": len(centring_ops(new)),
        "idle": not any(site.status == "exact" for site in report.sites) and _edited(model, new),
        "refused": dict(collections.Counter(site.reason for site in refused)),
        "details": dict(
            collections.Counter(f"{site.reason}: {collapse(site.detail)}" for site in refused)
        ),
        "error": error,
        "noise": noise,
        "wrong": not error < max(WRONG, noise),
        "usable": bool(values.isfinite().all()) and float(values.std()) > 0,
        "convert_seconds": round(seconds, 2),
    }


def _edited(old: nn.Module, new: nn.Module) -> bool:
    """Whether weights or ops of a model were changed."""
    before = dict(old.named_parameters())
    changed = any(not torch.equal(before[n], p) for n, p in new.named_parameters())
    return changed or bool(centring_ops(new))


def line(r: pool.Record) -> str:
    """One record on one line."""
    if "failure" in r:
        return f"{r['name']}: FAILED {r['failure']}"
    mark = "WRONG" if r["wrong"] else "ok"
    return (
        f"{r['name']}: {mark} {r['error']:.1e}, {r['converted']}/{r['sites']} converted, "
        f"{r['ops']} ops {r['refused']}"
    )


def write(records: list[pool.Record]) -> list[str]:
    """A Markdown table: totals, refusals by reason, a row per model, refusals by kind."""
    records = sorted(records, key=lambda r: r["name"])
    done = [r for r in records if "sites" in r]
    failed = [r for r in records if "failure" in r]
    sites, converted = sum(r["sites"] for r in done), sum(r["converted"] for r in done)
    whole = sum(r["converted"] == r["sites"] for r in done)
    wrong = [r["name"] for r in done if r["wrong"]]
    idle = [r["name"] for r in done if r["idle"]]
    useless = [r["name"] for r in done if not r["usable"]]
    reasons, details = _sum(done, "refused"), _sum(done, "details")
    lines = [
        "# LayerNorm to RMSNorm over timm families",
        "",
        f"{len(records)} models with a LayerNorm: {sites} sites, {converted} converted exactly "
        f"({100 * converted / max(sites, 1):.1f} %) with {sum(r['ops'] for r in done)} centring "
        f"ops, {sites - converted} refused; {whole} models are converted whole. Wrong outputs "
        f"(relative difference in float64 of {WRONG:.0e} or more, and more than what rounding "
        f"explains): {', '.join(wrong) or 'none'}. Weights changed though no norm is: "
        f"{', '.join(idle) or 'none'}. Outputs that are constant or not finite: "
        f"{', '.join(useless) or 'none'}. Failures: {len(failed)}.",
        "",
        "| reason | sites |",
        "|---|---|",
        *(f"| {reason} | {count} |" for reason, count in reasons.most_common()),
        "",
        "| model | LayerNorms | converted | ops | refused | difference | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in done:
        why = ", ".join(f"{k} {v}" for k, v in sorted(r["refused"].items())) or "–"
        mark = " **wrong**" if r["wrong"] else f" (noise {r['noise']:.0e})" if r["noise"] else ""
        lines.append(
            f"| {r['name']} ({r['label']}) | {r['sites']} | {r['converted']} | {r['ops']} | {why} "
            f"| {r['error']:.0e}{mark} | {r['convert_seconds']:.1f} |"
        )
    lines += ["", "## Refusals by kind", "", "| sites | kind |", "|---|---|"]
    lines += [f"| {count} | {_cell(kind)} |" for kind, count in details.most_common()]
    if failed:
        lines += ["", "## Failures", "", "| model | |", "|---|---|"]
        lines += [f"| {r['name']} | {_cell(r['failure'])} |" for r in failed]
    return lines


def _sum(records: list[pool.Record], key: str) -> collections.Counter[Any]:
    total: collections.Counter[Any] = collections.Counter()
    for record in records:
        total.update(record[key])
    return total


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    pool.main(
        __doc__,
        RESULTS / "timm_rmsnorm.jsonl",
        HERE / "timm_rmsnorm.md",
        names=names,
        sweep=sweep,
        line=line,
        write=write,
        timeout=240.0,
    )
