"""Fold many random networks: ``python tests/sweeps/fuzz_fold.py --count 5000``.

Prints and writes ``fuzz_fold.md``. A network is named by its seed: ``--seed N`` folds that one,
prints it and its report.
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

from folding import fold_faults  # noqa: E402
from helpers import check_report  # noqa: E402
from strategies import seeded_network  # noqa: E402

import normswap as ns  # noqa: E402


def fold_seed(seed: int) -> dict[str, Any]:
    """Counts and faults of one network."""
    torch.set_num_threads(1)
    network = seeded_network(seed)
    record: dict[str, Any] = {"seed": seed, "faults": [], "crash": ""}
    try:
        new, report = ns.fold_batchnorm(network.model, network.x, verify=False)
        check_report(network.model, report)
        record["faults"] = fold_faults(network, new, report)
    except Exception as error:
        record["crash"] = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        return record
    record["sites"] = len(report.sites)
    record["folded"] = sum(s.status == "exact" for s in report.sites)
    record["reasons"] = [s.reason for s in report.sites if s.status == "refused"]
    return record


def summary(records: list[dict[str, Any]], seconds: float, first: int) -> str:
    """The counts, as Markdown."""
    good = [r for r in records if not r["crash"]]
    wrong = [r for r in good if r["faults"]]
    crashed = [r for r in records if r["crash"]]
    sites, folded = sum(r["sites"] for r in good), sum(r["folded"] for r in good)
    reasons = collections.Counter(reason for r in good for reason in r["reasons"])
    lines = [
        "# BatchNorm folding over random networks",
        "",
        f"`python tests/sweeps/fuzz_fold.py --count {len(records)} --first {first}`",
        "",
        f"{len(records)} networks, {sites} norms: {folded} folded, {sites - folded} refused. "
        f"Wrong: {len(wrong)}. Crashes: {len(crashed)}. {seconds:.0f} s.",
        "",
        "| refused because of | norms |",
        "|---|---|",
        *[f"| {reason} | {n} |" for reason, n in reasons.most_common()],
    ]
    lines += [f"- seed {r['seed']}: wrong: {'; '.join(r['faults'])}" for r in wrong]
    lines += [f"- seed {r['seed']}: crash: {r['crash']}" for r in crashed]
    return "\n".join(lines)


def show(seed: int) -> None:
    """One network, its report and its faults."""
    network = seeded_network(seed)
    print(network)
    new, report = ns.fold_batchnorm(network.model, network.x, verify=False)
    print(report)
    for site in report.sites:
        print(f"{site.name}: {site.status} {site.action} {site.reason or ''} {site.detail}")
    print(fold_faults(network, new, report) or "no faults")


def main() -> None:
    """Run the seeds in a few processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="fold this one and show it")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--output", type=Path, default=HERE / "fuzz_fold.md")
    options = parser.parse_args()
    if options.seed is not None:
        show(options.seed)
        return
    start = time.perf_counter()
    seeds = range(options.first, options.first + options.count)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        records = list(pool.imap(fold_seed, seeds, chunksize=16))
    text = summary(records, time.perf_counter() - start, options.first)
    options.output.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
