"""Where the norms of every transformers model type that can be built stand, and moving them.

Each type is built small, with its most complete head and with a second one, all parameters random.
Its residual structure is read, and every conversion that keeps the function is made where some
stack has the form for it; outputs are compared in true float64. Post to pre with a clean skip is
another function: there the outputs need only be finite, and the stacks read as the plan says.

``python tests/sweeps/sweep_placement.py`` resumes from ``build/sweeps/placement.jsonl`` and writes
``placement.md``; ``--only gpt2`` runs one type again; ``--table`` only writes.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable
from typing import Any

import pool
import torch
from common import HERE, RESULTS, collapse, relative_error
from pool import Record
from small_inputs import Keywords
from small_models import build, heads, is_usable, outputs, randomise_all
from torch import nn

STORE = RESULTS / "placement.jsonl"
TABLE = HERE / "placement.md"
WRONG = 1e-10
ROLES = ("embedding", "P", "Q", "S", "final")
KINDS = ("layer", "rms")  # those that are counted; what other norms have a role is not

# By conversion: its target and options, and the forms of the stacks that it is for.
EXACT: dict[str, tuple[dict[str, str], tuple[str, ...]]] = {
    "to pre": ({"to": "pre", "skip": "normalised"}, ("post",)),
    "to dual": ({"to": "residual-dual"}, ("post",)),
    "to post": ({"to": "post", "scale": "carried"}, ("pre", "sandwich", "parallel")),
}
CLEAN: dict[str, str] = {"to": "pre", "skip": "clean"}


def names() -> list[str]:
    """Model type and class, all first heads before the second ones."""
    chosen = heads()
    return [f"{t} {c}" for n in (0, 1) for t in chosen for c in chosen[t][n : n + 1]]


def sweep(name: str) -> Record:
    """Build, randomise, read, convert, compare."""
    import normswap as ns
    from normswap.api import ready
    from normswap.structure import read_structure

    model, inputs = build(*name.split())
    sites = ns.find_norms(model)
    randomise_all(model, sites)
    calls, before = _outputs_and_calls(model, inputs, sites)
    start = time.perf_counter()
    # What ns.residual_structure and ns.convert_placement do, recording the model only once.
    reading = read_structure(*ready(model, inputs, None, None))
    seconds = time.perf_counter() - start
    structure = reading.structure
    record: Record = {
        "params": sum(p.numel() for p in model.parameters()),
        "usable": is_usable(before),
        "form": structure.form,
        "stacks": [[s.name, s.form, len(s.sublayers)] for s in structure.stacks],
        "forms": [_counts([s.form for s in stack.sublayers]) for stack in structure.stacks],
        "kinds": [_counts([s.kind for s in stack.sublayers]) for stack in structure.stacks],
        "read_seconds": round(seconds, 2),
        **_roles(structure, calls),
    }
    forms = {stack.form for stack in structure.stacks}
    for label, (options, wanted) in EXACT.items():
        if forms & set(wanted):
            record[label] = _converted(model, inputs, before, reading, options, exact=True)
    if "post" in forms:
        record["clean"] = _converted(model, inputs, before, reading, CLEAN, exact=False)
    record["changed_original"] = relative_error(before, outputs(model, inputs)) > 0
    return record


def _outputs_and_calls(
    model: nn.Module, inputs: Keywords, sites: Iterable[Any]
) -> tuple[collections.Counter[str], Any]:
    """What the model returns, and how often it calls each of its layer and RMS norms."""
    calls: collections.Counter[str] = collections.Counter()
    chosen = [s for s in sites if s.spec is not None and s.spec.kind in KINDS]
    hooks = [
        site.module.register_forward_hook(lambda *_, name=site.name: calls.update([name]))
        for site in chosen
    ]
    before = outputs(model, inputs)
    for hook in hooks:
        hook.remove()
    return calls, before


def _roles(structure: Any, calls: collections.Counter[str]) -> Record:
    """How many of the norms that are called have each role, and the names of the others."""
    roles: dict[str, set[str]] = {role: set() for role in ROLES}
    for stack in structure.stacks:
        roles["embedding"].update(stack.embedding_norms)
        roles["final"].update(stack.final_norms)
        for row in stack.sublayers:
            roles["P"].update(row.input_norms)
            roles["Q"].update(row.output_norms)
            roles["S"].update(row.stream_norms)
    known = set().union(*roles.values())
    elsewhere = collections.Counter(_ending(name) for name in calls if name not in known)
    return {
        "called": len(calls),
        "roles": {role: len(norms & set(calls)) for role, norms in roles.items()},
        "elsewhere": dict(elsewhere),
    }


def _ending(name: str) -> str:
    """The last parts of a module's name, without numbers."""
    return ".".join([part for part in name.split(".") if not part.isdigit()][-3:])


def _counts(values: Iterable[str]) -> str:
    """How often each value occurs, in order of appearance."""
    return ", ".join(f"{v} {n}" for v, n in collections.Counter(values).items())


def _converted(
    model: nn.Module,
    inputs: Keywords,
    before: Any,
    reading: Any,
    options: dict[str, str],
    *,
    exact: bool,
) -> Record:
    """One conversion; an error that is no refusal is part of the record."""
    from normswap.rewrites.placement import Wish, plan_placement

    start = time.perf_counter()
    try:
        placed = plan_placement(model, reading, Wish(**options))
        stacks = zip(reading.structure.stacks, placed.stacks, strict=True)
        moved = [i for i, (old, new) in enumerate(stacks) if _is_converted(placed.plan, old, new)]
        edits = len(placed.plan.module_edits)
        record = {"stacks": len(moved), "edits": edits, **_refusals(placed.plan)}
        if moved and placed.plan.changed:
            new = placed.plan.apply(model)
            after = outputs(new, inputs)
            promised = {i: placed.stacks[i] for i in moved}
            record |= _compared(before, after) if exact else _clean(new, inputs, after, promised)
    except Exception as error:
        record = {"failure": pool.failure(error)["failure"]}
    return {**record, "seconds": round(time.perf_counter() - start, 2)}


def _is_converted(plan: Any, old: Any, new: Any) -> bool:
    """Whether the plan answers for a norm of the stack, and not with a refusal."""
    rows = [n for s in old.sublayers for n in (*s.input_norms, *s.output_norms, *s.stream_norms)]
    answered = {s.name for s in plan.sites if s.status != "refused"}
    return new is not old or bool(answered & set(rows))


def _refusals(plan: Any) -> Record:
    """By reason code and by kind of detail, the stacks that were refused."""
    refused = {
        (s.reason, s.detail)
        for s in plan.sites
        if s.status == "refused" and s.reason not in ("not-residual", "already")
    }
    return {
        "refused": dict(collections.Counter(reason for reason, _ in refused)),
        "details": dict(collections.Counter(f"{r}: {collapse(d)}" for r, d in refused)),
    }


def _compared(before: Any, after: Any) -> Record:
    error = relative_error(before, after)
    return {"error": error, "wrong": not error < WRONG}


def _clean(new: nn.Module, inputs: Keywords, after: Any, promised: dict[int, Any]) -> Record:
    """Whether the outputs are finite, and whether the stacks read as the conversion says."""
    import normswap as ns

    stacks = dict(enumerate(ns.residual_structure(new, inputs).stacks))
    unlike = [s.name for i, s in promised.items() if i not in stacks or not _alike(s, stacks[i])]
    forms = sorted({stacks[i].form for i in promised if i in stacks})
    return {"finite": _is_finite(after), "reads": forms, "unlike": unlike}


def _alike(promised: Any, read: Any) -> bool:
    """Whether two stacks have the same norms in the same places."""

    def placed(stack: Any) -> list[Any]:
        rows = [(s.input_norms, s.output_norms, s.stream_norms) for s in stack.sublayers]
        return [stack.form, stack.embedding_norms, stack.final_norms, *rows]

    return placed(promised) == placed(read)


def _is_finite(out: Any) -> bool:
    from helpers import tensors_in

    return all(bool(t.isfinite().any()) for t in tensors_in(out) if t.is_floating_point())


def line(r: Record) -> str:
    """One record on one line."""
    if "failure" in r:
        return f"{r['name']}: FAILED {r['failure'][:200]} ({r.get('seconds', '-')} s)"
    stacks = "; ".join(f"{n or '(model)'} {form} {count}" for n, form, count in r["stacks"])
    roles = " ".join(f"{role} {n}" for role, n in r["roles"].items() if n)
    cells = ", ".join(f"{label}: {_cell_of(r[label])}" for label in (*EXACT, "clean") if label in r)
    return (
        f"{r['name']}: [{stacks}] norms {r['called']}: {roles}, elsewhere {r['elsewhere']}; "
        f"{cells} ({r['read_seconds']}, {r['seconds']} s)"
    )


def _cell_of(found: Record | None) -> str:
    """A conversion in a few words."""
    if found is None:
        return "–"
    if "failure" in found:
        return f"**{_cell(found['failure'][:80])}**"
    why = ", ".join(f"{reason} {n}" for reason, n in sorted(found["refused"].items()))
    if not found["stacks"]:
        return why or "nothing to move"
    mark = " **wrong**" if found.get("wrong") and "error" in found else ""
    mark += " (not as planned)" if found.get("unlike") else ""
    if "error" in found:
        result = f"{found['error']:.0e}, {found['edits']} edits"
    else:
        finite = "" if found.get("finite", True) else " **not finite**"
        result = " ".join(found.get("reads", ["as it was"])) + finite
    return f"{result}{mark}" + (f" ({why})" if why else "")


# -- the table ------------------------------------------------------------------------------------


def write(records: list[Record]) -> list[str]:
    """A Markdown file: totals, refusals, norms without a role, a row a type and head, failures."""
    records = sorted(records, key=lambda r: r["name"].lower())
    ran = [r for r in records if "failure" not in r]
    found = [r for r in ran if r["stacks"]]
    failed = [r for r in records if "failure" in r]
    return [
        "# Placement of norms in the models of transformers",
        "",
        *_summary(records, ran, found, failed),
        "",
        "## Conversions",
        "",
        *_conversions(found),
        "",
        "## Refused",
        "",
        "| conversion | stacks | reason and detail | types |",
        "|---|---|---|---|",
        *(row for label in (*EXACT, "clean") for row in _details(found, label)),
        "",
        "## Norms without a role",
        "",
        "Queries, keys and whatever else runs deeper inside a branch, norms of the embedding "
        "behind a linear map, of merged patches, of pooled values and of heads.",
        "",
        "| norms | names | types |",
        "|---|---|---|",
        *_tally(ran, lambda r: r["elsewhere"], least=4),
        "",
        "## By type",
        "",
        "Stacks with their form and number of sublayers (a mixed one with the forms of these); "
        "layer and RMS norms that are called, with a role, and elsewhere; conversions: the "
        "difference, or the codes of what is refused.",
        "",
        "| type and class | stacks | called | with a role | elsewhere | to pre | to dual "
        "| to post | clean pre reads | read in s |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *map(_row, found),
        "",
        "## Without a residual stack",
        "",
        _list(f"{r['name']} ({r['called']})" for r in ran if not r["stacks"]),
        "",
        "## Not built, not run or not read",
        "",
        "| type and class | stage | |",
        "|---|---|---|",
        *(f"| {r['name']} | {r.get('stage', '')} | {_cell(r['failure'][:160])} |" for r in failed),
    ]


def _summary(
    records: list[Record], ran: list[Record], found: list[Record], failed: list[Record]
) -> list[str]:
    built, stacks = _types(ran), [s for r in found for s in r["stacks"]]
    lost = sorted(_types(r for r in failed if r.get("stage") == "build") - built)
    called = sum(r["called"] for r in found)
    roles = {role: sum(r["roles"][role] for r in found) for role in ROLES}
    outside = sum(sum(r["elsewhere"].values()) for r in found)
    forms = collections.Counter(form for _, form, _ in stacks)
    crashed = [r["name"] for r in failed if r.get("stage") == "sweep"]
    return [
        f"{len(_types(records))} model types, {len(built)} built and read; {len(_types(found))} of "
        f"them have a residual stack with norms ({len(found)} classes, {len(stacks)} stacks, "
        f"{sum(n for _, _, n in stacks)} sublayers). Of their {called} layer and RMS norms that "
        f"are called, {called - outside} have a role ("
        f"{', '.join(f'{role} {n}' for role, n in roles.items())}; some have two), {outside} "
        f"none. Reading one takes {_median(r['read_seconds'] for r in found):.1f} s in the median, "
        f"{max((r['read_seconds'] for r in found), default=0.0):.1f} s at most.",
        "",
        f"- Stacks by form: {', '.join(f'{form} {n}' for form, n in forms.most_common())}",
        f"- Structure not read: {_list(crashed)}",
        f"- Original changed: {_list(r['name'] for r in ran if r['changed_original'])}",
        f"- Outputs that say nothing: {_list(r['name'] for r in ran if not r['usable'])}",
        f"- Reads otherwise than planned after post to pre: "
        f"{_list(r['name'] for r in found if r.get('clean', {}).get('unlike'))}",
        f"- Mixed stacks in: {_list(r['name'] for r in found if _has(r, 'mixed'))}",
        f"- No class of the type built: {_list(lost)}",
    ]


def _types(records: Iterable[Record]) -> set[str]:
    return {r["name"].split()[0] for r in records}


def _has(record: Record, form: str) -> bool:
    return any(f == form for _, f, _ in record["stacks"])


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _conversions(found: list[Record]) -> list[str]:
    titles = {
        "to pre": 'post to pre, `skip="normalised"`',
        "to dual": "post to residual-dual",
        "to post": "pre, sandwich or parallel to post, carried",
        "clean": 'post to pre, `skip="clean"`',
    }
    lines = [
        "| | classes | some stack converted | refused | largest difference | wrong | an error |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, title in titles.items():
        tried = {r["name"]: r[label] for r in found if label in r}
        good = {n: c for n, c in tried.items() if c.get("stacks")}
        errors = [c["error"] for c in good.values() if not c.get("wrong", True) and "error" in c]
        bad = [n for n, c in good.items() if _is_wrong(c)]
        failed = [n for n, c in tried.items() if "failure" in c]
        largest = f"{max(errors):.0e}" if errors else "–"
        lines.append(
            f"| {title} | {len(tried)} | {len(good)} | {len(tried) - len(good) - len(failed)} "
            f"| {largest} | {_list(bad)} | {_list(failed)} |"
        )
    return lines


def _is_wrong(found: Record) -> bool:
    return bool("error" in found and found["wrong"]) or not found.get("finite", True)


def _details(records: list[Record], label: str) -> list[str]:
    rows = _tally(records, lambda r: r.get(label, {}).get("details", {}))
    return [f"| {label} {row}" for row in rows]


def _tally(records: list[Record], counts: Any, least: int = 1) -> list[str]:
    total: collections.Counter[str] = collections.Counter()
    types: dict[str, list[str]] = collections.defaultdict(list)
    for record in records:
        total.update(counts(record))
        for kind in counts(record):
            types[kind].append(record["name"].split()[0])
    return [
        f"| {n} | {_cell(kind)} | {_shortened(types[kind])} |"
        for kind, n in total.most_common()
        if n >= least
    ]


def _shortened(names: list[str]) -> str:
    unique = list(dict.fromkeys(names))
    more = "" if len(unique) <= 6 else f" and {len(unique) - 6} more"
    return f"{', '.join(unique[:6])}{more}"


def _row(r: Record) -> str:
    stacks = collections.Counter(
        f"{form} {count}" + (f" ({forms})" if form == "mixed" else "")
        for (_, form, count), forms in zip(r["stacks"], r["forms"], strict=True)
    )
    shown = "; ".join(text if n == 1 else f"{n} × {text}" for text, n in stacks.items())
    outside = sum(r["elsewhere"].values())
    cells = [_cell_of(r.get(label)) for label in (*EXACT, "clean")]
    mark = "" if r["usable"] else " (says nothing)"
    return (
        f"| {r['name']}{mark} | {shown} | {r['called']} | {r['called'] - outside} "
        f"| {outside or '–'} | {' | '.join(cells)} | {r['read_seconds']:.1f} |"
    )


def _list(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    with torch.no_grad():
        pool.main(
            __doc__,
            STORE,
            TABLE,
            names=names,
            sweep=sweep,
            line=line,
            write=write,
        )
