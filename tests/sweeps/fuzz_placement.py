"""Move norms of many random transformers: ``python tests/sweeps/fuzz_placement.py --count 300``.

Prints and writes ``fuzz_placement.md``. A network is named by its seed: ``--seed N`` converts that
one, shrinks it if something is wrong, and shows it with its report.
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

from placement_checks import (  # noqa: E402
    Way,
    conversion_faults,
    declared_forms,
    seeded_network,
    seeded_ways,
    structure_faults,
)
from random_transformers import Network, shrink  # noqa: E402

from normswap.errors import NormswapError  # noqa: E402

READ = "structure"


def convert_seed(seed: int) -> list[dict[str, Any]]:
    """Outcomes of one network: its structure, and a few conversions."""
    torch.set_num_threads(1)
    network = seeded_network(seed)
    records = [record_of(network, None)]
    records += [record_of(network, way) for way in seeded_ways(seed)]
    return [{"seed": seed, **record} for record in records]


def record_of(network: Network, way: Way | None) -> dict[str, Any]:
    """The outcome of one conversion, or of reading the structure."""
    record: dict[str, Any] = {"way": str(way or READ), "faults": [], "crash": "", "refused": ""}
    try:
        with torch.no_grad():
            if way is None:
                record["faults"] = structure_faults(network)
                record["declared"] = declared_forms(network) is not None
                return record
            record["faults"], report = conversion_faults(network, way)
    except NormswapError as error:
        return {**record, "refused": " ".join(str(error).split())[:300]}
    except Exception as error:
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return {**record, "crash": text[:300]}
    return {**record, "counts": report.counts, "reasons": report.reasons}


def summary(records: list[dict[str, Any]], seconds: float, first: int, count: int) -> str:
    """The counts, as Markdown."""
    read = [r for r in records if r["way"] == READ]
    declared = [r for r in read if r.get("declared")]
    lines = [
        "# Placement of norms in random transformers",
        "",
        f"`python tests/sweeps/fuzz_placement.py --count {count} --first {first}`",
        "",
        f"{count} networks, {seconds:.0f} s. {len(declared)} of them declare the form of each "
        f"sublayer: {sum(not r['faults'] for r in declared)} are read so. Exact conversions are "
        "compared in float64 on three input shapes.",
        "",
        "| conversion | networks | converted | norms exact | approximate | refused as a whole "
        "| wrong | crashed |",
        "|---|---|---|---|---|---|---|---|",
    ]
    ways = sorted({r["way"] for r in records} - {READ})
    lines += [_row(way, [r for r in records if r["way"] == way]) for way in ways]
    reasons = collections.Counter(_reason(r["refused"]) for r in records if r["refused"])
    lines += ["", "| refused as a whole because of | networks |", "|---|---|"]
    lines += [f"| {reason} | {number} |" for reason, number in sorted(reasons.items())]
    lines += ["", *_troubles(records)]
    return "\n".join(lines).rstrip()


def _row(way: str, records: list[dict[str, Any]]) -> str:
    done = [r for r in records if "counts" in r]
    exact, approximate = (
        sum(r["counts"].get(status, 0) for r in done) for status in ("exact", "approximate")
    )
    refused, wrong, crashed = (
        sum(bool(r[key]) for r in records) for key in ("refused", "faults", "crash")
    )
    numbers = (len(records), len(done), exact, approximate, refused, wrong, crashed)
    return f"| {way} | " + " | ".join(map(str, numbers)) + " |"


def _reason(message: str) -> str:
    """The code of a refusal."""
    head, _, tail = message.partition(": ")
    return tail.partition(":")[0] if head.startswith("no stack") else "no residual stack"


def _troubles(records: list[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for r in records:
        name = f"seed {r['seed']} ({r['way']})"
        if r["faults"]:
            lines.append(f"- {name}: wrong: {'; '.join(r['faults'])}")
        if r["crash"]:
            lines.append(f"- {name}: crash: {r['crash']}")
    return lines


def show(seed: int) -> None:
    """One network, shrunk if it fails, with its reports."""
    for way in (None, *seeded_ways(seed)):
        network = shrunk(seeded_network(seed), way)
        record = record_of(network, way)
        print(f"{way or READ}\n{network}\n{record}\n")


def shrunk(network: Network, way: Way | None) -> Network:
    """The simplest network that fails in the same way; the network itself if it does not fail."""
    kind = _first_fault(record_of(network, way))
    if not kind:
        return network

    def fails(other: Network) -> bool:
        other.model()(**other.inputs())  # a network has to run
        return _first_fault(record_of(other, way)) == kind

    return shrink(network, fails)


def _first_fault(record: dict[str, Any]) -> str:
    """What went wrong, without the numbers and names."""
    fault = record["crash"] or next(iter(record["faults"]), "")
    return " ".join(w for w in fault.split()[:4] if w.isalpha() or w.endswith("Error:"))


def main() -> None:
    """Run the seeds in a few processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="convert this one and show it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "fuzz_placement.md")
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
