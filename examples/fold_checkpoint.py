"""Fold a checkpoint file without a model in memory: plan on the meta device, apply on disk.

    python examples/fold_checkpoint.py

The plan needs shapes only. The file is then rewritten tensor by tensor.
"""

from __future__ import annotations

import tempfile
from importlib.resources import as_file, files
from pathlib import Path

import torch
from safetensors import safe_open

import normswap as ns
from normswap.demo import DigitsResNet, load_heldout, load_network


def keys(path: Path) -> list[str]:
    """The names of the tensors in a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


def main() -> None:
    """Fold the shipped checkpoint into a new directory and check the result in memory."""
    with torch.device("meta"):
        skeleton = DigitsResNet().eval()
    plan = ns.plan_fold_batchnorm(skeleton, torch.empty(2, 1, 8, 8, device="meta"))
    print(f"{len(plan.sites)} norms, {len(plan.removed)} tensors go, {len(plan.created)} are new")

    source = files("normswap") / "data" / "resnet_digits.safetensors"
    with as_file(source) as src, tempfile.TemporaryDirectory() as folder:
        dst = Path(folder) / "folded"
        plan.apply_to_checkpoint(src, dst)
        (written,) = dst.glob("*.safetensors")
        print(f"{len(keys(src))} tensors before, {len(keys(written))} after, in {written.name}")
        folded = ns.load(dst, arch=DigitsResNet).eval()

    check = ns.verify(load_network(), folded, load_heldout().images)
    print(f"relative difference from the original: {check.max_rel:.0e} in {check.dtype}")
    assert check.passed


if __name__ == "__main__":
    main()
