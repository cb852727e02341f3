"""Fold the BatchNorms of a trained ResNet, save the result, load it again.

Run it with `python examples/fold_resnet.py`.
"""

from __future__ import annotations

import tempfile

import torch

import normswap as ns
from normswap.demo import DigitsResNet, accuracy, load_heldout, load_network


def main() -> None:
    """Fold, print the report, and show that nothing but the structure changed."""
    model, digits = load_network(), load_heldout()

    folded, report = ns.fold_batchnorm(model, digits.images[:2])
    print(report)
    assert report.verification is not None
    assert report.verification.passed

    print(f"\nheld-out accuracy: {accuracy(model, digits):.2%}, {accuracy(folded, digits):.2%}")

    with tempfile.TemporaryDirectory() as folder:
        ns.save(folded, f"{folder}/digits", report)
        loaded = ns.load(f"{folder}/digits", arch=DigitsResNet).eval()
    with torch.inference_mode():
        assert torch.equal(loaded(digits.images), folded(digits.images))
    print("saved and loaded again: equal outputs")


if __name__ == "__main__":
    main()
