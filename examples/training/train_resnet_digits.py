"""Train the demo's ResNet on scikit-learn's handwritten digits and write it as package data.

    pip install '.[train]'
    OMP_NUM_THREADS=1 python examples/training/train_resnet_digits.py

Takes about twenty seconds on one core. Three files are written to `normswap/data/`: the checkpoint,
the held-out images, and a record of the run. A quarter of the images is held out; it is looked at
once, after the last epoch.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from normswap.demo import Digits, DigitsResNet, accuracy, prepare

SEED = 0
HELD_OUT = 0.25
EPOCHS = 40
BATCH = 64
LEARNING_RATE = 0.01
DATA = Path(__file__).resolve().parents[2] / "normswap" / "data"


def split_digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Train images, held-out images, train labels, held-out labels; uint8, stratified by label."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(
        images.reshape(-1, 8, 8), labels, test_size=HELD_OUT, random_state=SEED, stratify=labels
    )
    train_images, held_images, train_labels, held_labels = (
        torch.from_numpy(part).to(torch.uint8) for part in parts
    )
    return train_images, held_images, train_labels, held_labels


def shifted(images: Tensor) -> Tensor:
    """The batch moved by up to one pixel each way, with empty pixels coming in."""
    down, right = torch.randint(0, 3, (2,)).tolist()
    return F.pad(images, (1, 1, 1, 1))[..., down : down + 8, right : right + 8]


def train(train_set: Digits) -> DigitsResNet:
    """A network trained for a fixed number of epochs; returned in eval mode."""
    torch.manual_seed(SEED)
    network = DigitsResNet()
    steps = EPOCHS * (len(train_set.labels) // BATCH)
    optimizer = torch.optim.AdamW(network.parameters(), LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train_set.labels))
        for step in range(len(order) // BATCH):
            batch = order[step * BATCH : (step + 1) * BATCH]
            scores = network(shifted(train_set.images[batch]))
            loss = F.cross_entropy(scores, train_set.labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        print(f"epoch {epoch + 1:2d}/{EPOCHS}  loss {loss.item():.3f}")
    return network.eval()


def main() -> None:
    """Train, measure once on the held-out part, write the three files."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=DATA, help="folder to write to")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)

    train_images, held_images, train_labels, held_labels = split_digits()
    network = train(Digits(prepare(train_images), train_labels.long()))
    held_out = Digits(prepare(held_images), held_labels.long())
    record = {
        "data": "scikit-learn load_digits, 8x8 grey levels 0..16",
        "seed": SEED,
        "trained_on": len(train_labels),
        "held_out": len(held_labels),
        "held_out_accuracy": accuracy(network, held_out),
        "epochs": EPOCHS,
        "parameters": sum(p.numel() for p in network.parameters()),
    }
    out.mkdir(parents=True, exist_ok=True)
    weights = save(network.state_dict(), {"format": "pt"})
    (out / "resnet_digits.safetensors").write_bytes(weights)
    held = save({"images": held_images, "labels": held_labels})
    (out / "digits_heldout.safetensors").write_bytes(held)
    (out / "resnet_digits.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
