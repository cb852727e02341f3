"""Swap the BatchNorms of a trained network for GroupNorms, see what it costs, and take it back."""

from __future__ import annotations

import torch
from torch import nn

import normswap as ns
from normswap.demo import load_heldout, load_network


def accuracy(model: nn.Module) -> float:
    data = load_heldout()
    with torch.inference_mode():
        return float((model(data.images).argmax(-1) == data.labels).float().mean())


def main() -> None:
    model, images = load_network(), load_heldout().images
    print(ns.find_norms(model))
    swapped, report = ns.swap_norms(model, {nn.BatchNorm2d: nn.GroupNorm}, images[:64])
    print(report)
    print(f"accuracy before {accuracy(model):.2%}, after {accuracy(swapped):.2%}")
    frozen, _ = ns.swap_norms(model, {"batch": "frozenbatch"}, images[:64], method="exact")
    print(f"with frozen BatchNorms {accuracy(frozen):.2%}")
    print(f"undone {accuracy(report.undo(swapped)):.2%}")


if __name__ == "__main__":
    main()
