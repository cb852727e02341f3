"""Time and memory of folding torchvision's resnet50, next to torch's own `fx` fusion.

    python tests/benchmarks/fold_resnet50.py

Each measurement is a fresh process; the contenders take turns, and the best of all rounds counts.
What matters is the ratios: one run gives all of them, on whatever machine it is. The table is
printed and written beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

# torch is imported in the measured processes only: a process starts with the peak memory of the
# one that started it.
if TYPE_CHECKING:
    from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".md")
BUILD_ONLY = "model only"
REFERENCE = "torch.fx fuse"
MEASURED = ("wall", "cpu", "first", "peak")
CONTENDERS = (BUILD_ONLY, REFERENCE, "normswap, verify=False", "normswap, verify=True")


def build() -> tuple[nn.Module, Tensor]:
    """A resnet50 in eval mode whose BatchNorms are not neutral, and one input for it."""
    import torch
    from torch import nn
    from torchvision.models import resnet50

    torch.manual_seed(0)
    model = resnet50().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.3, 0.9)
                module.bias.normal_(0, 0.1)
                module.running_mean.normal_(0, 0.1)
                module.running_var.uniform_(0.5, 1.5)
    return model, torch.randn(1, 3, 224, 224)


def fold(contender: str, model: nn.Module, x: Tensor) -> nn.Module:
    """The folded copy that the contender makes."""
    if contender == REFERENCE:
        from torch.fx.experimental.optimization import fuse

        return fuse(model)
    import normswap

    folded, _ = normswap.fold_batchnorm(model, x, verify=contender.endswith("verify=True"))
    return folded


def measure(contender: str, threads: int, repeats: int) -> dict[str, float]:
    """Wall and CPU seconds of folding in this process, its peak memory, and the error."""
    import torch
    from torch import nn

    for name in ("normswap", "torch.fx.experimental.optimization"):
        import_module(name)  # every process holds the same modules
    torch.set_num_threads(threads)
    model, x = build()
    if contender == BUILD_ONLY:
        return {"peak": _peak_mib(), "forward": _forward_seconds(model, x)}
    wall: list[float] = []
    cpu: list[float] = []
    peak = 0.0
    for _ in range(repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        folded = fold(contender, model, x)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - cpu_start)
        peak = peak or _peak_mib()
    left = sum(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    if left:
        raise SystemExit(f"{contender} left {left} BatchNorms")
    with torch.inference_mode():
        expected, got = model(x), folded(x)
    error = ((expected - got).abs().max() / expected.abs().max()).item()
    return {"first": wall[0], "wall": min(wall), "cpu": min(cpu), "peak": peak, "error": error}


def _forward_seconds(model: nn.Module, x: Tensor) -> float:
    import torch

    seconds: list[float] = []
    with torch.inference_mode():
        for _ in range(5):
            start = time.perf_counter()
            model(x)
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _peak_mib() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def run_fresh(contender: str, threads: int, repeats: int) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", contender]
    command += ["--threads", str(threads), "--repeats", str(repeats)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"measuring {contender!r} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def summary(results: dict[str, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """One row for each contender: the best of all rounds, as such and relative to `torch.fx`."""
    base = min(result["peak"] for result in results[BUILD_ONLY])
    rows = [
        {
            "name": name,
            **{key: min(result[key] for result in rounds) for key in MEASURED},
            "error": max(result["error"] for result in rounds),
        }
        for name, rounds in results.items()
        if name != BUILD_ONLY
    ]
    reference = next(row for row in rows if row["name"] == REFERENCE)
    for row in rows:
        row["added"] = row["peak"] - base
        row["relative"] = {key: row[key] / reference[key] for key in MEASURED}
    return rows


def table(rows: list[dict[str, Any]], forward: float, threads: int, rounds: int) -> str:
    """The rows as Markdown, with what is needed to repeat and to judge them."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "torchvision"))
    lines = [
        "# Folding resnet50",
        "",
        f"`python tests/benchmarks/fold_resnet50.py`: {versions}, Python "
        f"{platform.python_version()}, {threads} thread(s), best of {rounds} fresh processes each. "
        "In brackets: relative to the first row.",
        f"One forward pass of the model takes {forward:.2f} s here; verifying runs the old and the "
        "new model several times, half of these in float64.",
        "",
        "| | time | CPU time | first call | peak memory | added to the model's own "
        "| largest difference |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['name']} | {_both(row, 'wall', '.2f', 's')} | {_both(row, 'cpu', '.2f', 's')} "
        f"| {_both(row, 'first', '.2f', 's')} | {_both(row, 'peak', '.0f', 'MiB')} "
        f"| {row['added']:.0f} MiB | {row['error']:.0e} |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _both(row: dict[str, Any], key: str, form: str, unit: str) -> str:
    return f"{row[key]:{form}} {unit} (×{row['relative'][key]:.2f})"


def main() -> None:
    """Measure everything in turns, or, with `--measure`, one contender in this process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="folds in each process")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--measure", choices=CONTENDERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.threads, options.repeats)))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for number in range(options.rounds):
        for name in CONTENDERS:
            print(f"round {number + 1}/{options.rounds}: {name}", file=sys.stderr)
            results[name].append(run_fresh(name, options.threads, options.repeats))
    forward = min(result["forward"] for result in results[BUILD_ONLY])
    text = table(summary(results), forward, options.threads, options.rounds)
    TABLE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
