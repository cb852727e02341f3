"""Convert many random transformers: ``python tests/sweeps/fuzz_transformers.py --count 5000``.

Prints and writes ``fuzz_transformers.md``. A network is named by its seed: ``--seed N`` converts
that one, shrinks it if something is wrong, and shows it with its report.
"""

from __future__ import annotations

import argparse
import collections
import multiprocessing
import sys
import time
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from random_transformers import Network, seeded_transformer, shrink  # noqa: E402
from transformer_checks import Options, conversion_faults, seeded_options  # noqa: E402

from normswap.errors import RefusedError  # noqa: E402


def convert_seed(seed: int) -> list[dict[str, Any]]:
    """Counts and faults of one network, converted in two ways."""
    torch.set_num_threads(1)
    network = seeded_transformer(seed)
    return [{"seed": seed, **record_of(network, options)} for options in seeded_options(seed)]


def record_of(network: Network, options: Options) -> dict[str, Any]:
    """Counts and faults of one conversion."""
    record: dict[str, Any] = {"options": str(options), "faults": [], "crash": "", "refused": ""}
    try:
        record["faults"], report = conversion_faults(network, options)
    except RefusedError as error:
        return {**record, "refused": " ".join(str(error).split())[:300]}
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {**record, "crash": text[:300]}
    record["exact"] = sum(s.status == "exact" for s in report.sites)
    record["sites"] = len(report.sites)
    record["reasons"] = [s.reason for s in report.sites if s.status == "refused"]
    return record


def summary(records: list[dict[str, Any]], seconds: float, first: int, count: int) -> str:
    """The counts, as Markdown."""
    lines = [
        "# Exact conversions of random transformers",
        "",
        f"`python tests/sweeps/fuzz_transformers.py --count {count} --first {first}`",
        "",
        f"{count} networks, {seconds:.0f} s. Outputs are compared in float64 on three input "
        "shapes.",
        "",
        "| conversion | networks | with an exact norm | norms | exact | wrong | crashed |",
        "|---|---|---|---|---|---|---|",
    ]
    names = sorted({r["options"] for r in records})
    lines += [_row(name, [r for r in records if r["options"] == name]) for name in names]
    reasons = collections.Counter(
        (r["options"].split()[0], reason) for r in records for reason in r.get("reasons", ())
    )
    lines += ["", "| refused because of | swap | fold |", "|---|---|---|"]
    for reason in sorted({reason for _, reason in reasons}):
        lines.append(f"| {reason} | {reasons['swap', reason]} | {reasons['fold', reason]} |")
    lines += ["", *_troubles(records)]
    return "\n".join(lines).rstrip()


def _row(options: str, records: list[dict[str, Any]]) -> str:
    sites = sum(r.get("sites", 0) for r in records)
    exact = sum(r.get("exact", 0) for r in records)
    some = sum(r.get("exact", 0) > 0 for r in records)
    wrong, crashed = (sum(bool(r[key]) for r in records) for key in ("faults", "crash"))
    return f"| {options} | {len(records)} | {some} | {sites} | {exact} | {wrong} | {crashed} |"


def _troubles(records: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for r in records:
        name = f"seed {r['seed']} ({r['options']})"
        if r["faults"]:
            lines.append(f"- {name}: wrong: {'; '.join(r['faults'])}")
        lines += [f"- {name}: {key}: {r[key]}" for key in ("crash", "refused") if r[key]]
    return lines


def show(seed: int) -> None:
    """One network, shrunk if it fails, with its reports."""
    for options in seeded_options(seed):
        network = shrunk(seeded_transformer(seed), options)
        record = record_of(network, options)
        print(f"{options}\n{network}\n{record['faults'] or record['crash'] or 'no faults'}")
        if not record["crash"]:
            for site in conversion_faults(network, options)[1].sites:
                print(f"{site.name}: {site.status} {site.action} {site.reason} {site.detail}")


def shrunk(network: Network, options: Options) -> Network:
    """The simplest network that fails in the same way; the network itself if it does not fail."""
    kind = _first_fault(record_of(network, options))
    if not kind:
        return network

    def fails(other: Network) -> bool:
        other.model()(**other.inputs())  # a network has to run
        return _first_fault(record_of(other, options)) == kind

    return shrink(network, fails)


def _first_fault(record: dict[str, Any]) -> str:
    """What went wrong, without the numbers and names."""
    fault = record["crash"] or next(iter(record["faults"]), "")
    return " ".join(w for w in fault.split()[:8] if w.isalpha() or w.endswith("Error:"))


def main() -> None:
    """Run the seeds in a few processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="convert this one and show it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "fuzz_transformers.md")
    options = parser.parse_args()
    if options.seed is not None:
        show(options.seed)
        return
    start = time.perf_counter()
    seeds = range(options.first, options.first + options.count)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        records = [r for found in pool.imap(convert_seed, seeds, chunksize=8) for r in found]
    text = summary(records, time.perf_counter() - start, options.first, options.count)
    options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
