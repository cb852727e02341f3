"""What LayerNorm to RMSNorm costs or saves at inference on the CPU: the norms alone, and models.

    python tests/benchmarks/rmsnorm_inference.py

The contenders take turns in one process; in each round every one is timed beside the reference
(the best of a few timings, as other work on the machine only ever adds time), and the ratio of that
round is kept. The table shows the median ratio and the range of its middle 80 %, since ratios carry
over to other machines better than seconds do. It is printed and written beside this file.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import normswap as ns
from normswap import norms

TABLE = Path(__file__).with_suffix(".md")
SHAPES = ((512, 768), (2048, 768), (512, 4096), (1, 768))
REFERENCE = "nn.LayerNorm"
PARTS = 4  # timings of one contender in one round
Call = Callable[[], Any]


class PowMeanRsqrt(nn.Module):
    """RMSNorm as modelling files write it."""

    def __init__(self, size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        """``x * rsqrt(mean(x²) + eps) * weight``."""
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    REFERENCE: nn.LayerNorm,
    "nn.RMSNorm": nn.RMSNorm,
    "norms.RMSNorm": norms.RMSNorm,
    "norms.RMSNorm, bias": lambda size: norms.RMSNorm(size, bias=True),
    "pow-mean-rsqrt": PowMeanRsqrt,
}


# Ratios in one run


def ratios(
    calls: Mapping[str, Call], reference: str, rounds: int, seconds: float
) -> tuple[dict[str, list[float]], list[float]]:
    """Per contender its time over that of the reference in each round, and the latter's times.

    Each timing repeats the call for about ``seconds``, at least once.
    """
    repeats = {name: _repeats(call, seconds) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls if name != reference}
    base: list[float] = []
    names = list(calls)
    for number in range(rounds):
        # Each contender comes once at every place, so that none always follows the same one.
        turn = names[number % len(names) :] + names[: number % len(names)]
        taken = {
            name: min(_time(calls[name], repeats[name]) for _ in range(PARTS)) for name in turn
        }
        base.append(taken[reference])
        for name, values in found.items():
            values.append(taken[name] / taken[reference])
    return found, base


def _repeats(call: Call, seconds: float) -> int:
    for _ in range(3):
        call()
    return max(1, round(seconds / max(_time(call, 3), 1e-9)))


def _time(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def shown(values: list[float]) -> str:
    """``median (10 % – 90 %)``."""
    tenths = statistics.quantiles(values, n=10)
    return f"{statistics.median(values):.2f} ({tenths[0]:.2f} – {tenths[-1]:.2f})"


# The norms alone


def norm_rows(rounds: int) -> list[str]:
    """One table row for each shape."""
    rows = []
    for rows_count, size in SHAPES:
        x = torch.randn(rows_count, size)
        calls: dict[str, Call] = {}
        for name, make in NORMS.items():
            norm = random_affine(make(size))
            calls[name] = lambda norm=norm, x=x: norm(x)
        found, base = ratios(calls, REFERENCE, rounds, 5e-4)
        cells = " | ".join(shown(values) for values in found.values())
        micros = statistics.median(base) * 1e6
        rows.append(f"| {rows_count}×{size} | {micros:.0f} µs | {cells} |")
        print(rows[-1], file=sys.stderr)
    return rows


@torch.no_grad()
def random_affine(model: nn.Module) -> nn.Module:
    """Scales around one and shifts around zero, so that no norm is neutral."""
    for module in model.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm, norms.RMSNorm, PowMeanRsqrt)):
            module.weight.normal_(1.0, 0.2)
            if getattr(module, "bias", None) is not None:
                module.bias.normal_(0.0, 0.2)
    return model.eval()


# Models


class Gpt2(nn.Module):
    """GPT-2 small (12 layers of width 768) with random weights, returning its logits."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.model = GPT2LMHeadModel(GPT2Config())

    def forward(self, ids: Tensor) -> Tensor:
        """The logits."""
        return self.model(ids, use_cache=False).logits


def models() -> dict[str, tuple[nn.Module, Tensor]]:
    """The models, with one input each."""
    import timm

    torch.manual_seed(0)
    vit = timm.create_model("vit_base_patch16_224", pretrained=False)
    return {
        "GPT-2 small, 1×256 tokens": (Gpt2(), torch.randint(0, 50_000, (1, 256))),
        "ViT-B/16, 1×3×224×224": (vit, torch.randn(1, 3, 224, 224)),
    }


VARIANTS: dict[str, dict[str, bool]] = {
    "converted": {},
    "converted, affine folded": {"fold_affine": True},
}


def converted(model: nn.Module, x: Tensor) -> tuple[dict[str, nn.Module], str]:
    """The converted copies, and what they are in words."""
    made: dict[str, nn.Module] = {}
    words = []
    for name, options in VARIANTS.items():
        new, report = ns.swap_norms(
            model, {nn.LayerNorm: nn.RMSNorm}, x, method="exact", verify=False, **options
        )
        with torch.inference_mode():
            expected, got = model(x), new(x)
        error = float((expected - got).abs().max() / expected.abs().max())
        if not error < 1e-3:
            raise SystemExit(f"{name}: the outputs differ by {error:.1e}")
        made[name] = new
        classes = [type(new.get_submodule(s.name)) for s in report.sites if s.status == "exact"]
        kinds = Counter("norms" if "normswap" in c.__module__ else "nn" for c in classes)
        counted = ", ".join(f"{count} {kind}.RMSNorm" for kind, count in sorted(kinds.items()))
        words.append(
            f"{name}: {counted} of {len(report.sites)} norms, outputs differ by {error:.0e} in "
            "float32"
        )
    return made, "; ".join(words)


def model_rows(
    prepared: Mapping[str, tuple[nn.Module, Tensor, dict[str, nn.Module]]],
    rounds: int,
) -> list[str]:
    """One table row for each model."""
    rows = []
    for name, (model, x, variants) in prepared.items():
        calls: dict[str, Call] = {"original": lambda model=model, x=x: model(x)}
        for variant, new in variants.items():
            calls[variant] = lambda new=new, x=x: new(x)
        found, base = ratios(calls, "original", rounds, 0.0)
        cells = " | ".join(shown(values) for values in found.values())
        rows.append(f"| {name} | {statistics.median(base) * 1e3:.0f} ms | {cells} |")
        print(rows[-1], file=sys.stderr)
    return rows


# The table


def processor() -> str:
    """The name of the CPU, where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for row in info.read_text(encoding="utf-8").splitlines():
            if row.startswith("model name"):
                return row.partition(":")[2].strip()
    return platform.machine()


def header(threads: list[int]) -> list[str]:
    """What is needed to repeat the run and to judge it."""
    packages = ("torch", "transformers", "timm")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in packages)
    return [
        "# LayerNorm to RMSNorm: inference time on the CPU",
        "",
        f"`python tests/benchmarks/rmsnorm_inference.py`: {versions}, Python "
        f"{platform.python_version()}, {processor()}, float32, threads: "
        f"{', '.join(map(str, threads))}. Ratios of times: below 1 is faster than the reference. "
        f"Median over the rounds of one run in which all take turns, the best of {PARTS} timings "
        "in each round; in brackets the range of the middle 80 %.",
    ]


def main() -> None:
    """Measure everything and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=100, help="for the norms")
    parser.add_argument("--model-rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, nargs="+", default=[2, 1])
    options = parser.parse_args()
    lines = header(options.threads)
    prepared: dict[str, tuple[nn.Module, Tensor, dict[str, nn.Module]]] = {}
    notes = []
    for name, (model, x) in models().items():
        variants, words = converted(random_affine(model), x)
        prepared[name] = (model, x, variants)
        notes.append(f"- {name}: {words}.")
    with torch.inference_mode():
        for threads in options.threads:
            torch.set_num_threads(threads)
            contenders = [name for name in NORMS if name != REFERENCE]
            lines += ["", f"## {threads} thread{'s' * (threads > 1)}", ""]
            lines += [
                f"| shape | {REFERENCE} | {' | '.join(contenders)} |",
                "|---" * (2 + len(contenders)) + "|",
                *norm_rows(options.rounds),
                "",
                f"| model | original | {' | '.join(VARIANTS)} |",
                "|---" * (2 + len(VARIANTS)) + "|",
                *model_rows(prepared, options.model_rounds),
            ]
    text = "\n".join([*lines, "", "## The models", "", *notes]) + "\n"
    TABLE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
