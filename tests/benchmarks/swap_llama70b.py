"""Swap the 161 norms of a 70-billion-parameter Llama configuration on the meta device.

    python tests/benchmarks/swap_llama70b.py

Time and peak memory of finding and swapping, next to those of building the empty model, in one
process; no weights are allocated. The table is printed and written beside this file.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import normswap as ns

TABLE = Path(__file__).with_suffix(".md")
SIZES = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def peak() -> float:
    """The largest resident size so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    rows = [("imports", 0.0, peak())]
    start = time.perf_counter()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
    rows.append(("empty model", time.perf_counter() - start, peak()))
    start = time.perf_counter()
    sites = ns.find_norms(model).expect_count(161)
    rows.append(("find_norms", time.perf_counter() - start, peak()))
    start = time.perf_counter()
    new, report = ns.swap_norms(model, {"rms": nn.RMSNorm})
    rows.append(("swap_norms", time.perf_counter() - start, peak()))
    assert report.counts == {"exact": len(sites)}
    assert all(p.is_meta for p in new.parameters())
    size = sum(p.numel() for p in model.parameters())
    lines = [
        "# Swapping the norms of a 70-billion-parameter Llama on the meta device",
        "",
        f"`python tests/benchmarks/swap_llama70b.py`: {size / 1e9:.1f} billion parameters, "
        f"{len(sites)} norms, {report.counts['exact']} swapped exactly, torch {torch.__version__}.",
        "",
        "| step | time | peak memory so far |",
        "|---|---|---|",
        *(f"| {name} | {seconds:.2f} s | {memory:.0f} MiB |" for name, seconds, memory in rows),
    ]
    text = "\n".join(lines) + "\n"
    TABLE.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
