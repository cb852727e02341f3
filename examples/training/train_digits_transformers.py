"""Train the two small transformers of the examples on scikit-learn's handwritten digits.

    pip install '.[train]'
    OMP_NUM_THREADS=1 PYTHONPATH=examples python examples/training/train_digits_transformers.py

Takes about seven minutes on one core. One network is post-norm, the other pre-norm; everything
else about them and their training is the same. Each goes to a directory of `examples/checkpoints/`
with a record of the run. A quarter of the images is held out; it is looked at once, after the last
epoch. A fifth of the rest is not trained on either: settings were chosen by it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from digits_transformer import (
    CHECKPOINTS,
    POST_NORM,
    PRE_NORM,
    DigitsTransformer,
    load_training_digits,
)
from safetensors.torch import save
from torch import Tensor

from normswap.demo import Digits, accuracy, load_heldout
from normswap.param_groups import no_decay_groups

SEED = 0
EPOCHS = 200
BATCH = 64
LEARNING_RATE = 0.002
WARM_UP = 0.2  # share of the steps; without one, post-norm does not train


def shifted(images: Tensor) -> Tensor:
    """Each image moved by up to one pixel each way, with empty pixels coming in."""
    moves = torch.randint(0, 3, (2, len(images), 1))
    rows, columns = (move + torch.arange(8) for move in moves)
    padded = F.pad(images, (1, 1, 1, 1))
    numbers = torch.arange(len(images))[:, None, None]
    return padded[numbers, 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def train(train_set: Digits, choose_by: Digits, norm_first: bool) -> DigitsTransformer:
    """A network trained for a fixed number of epochs; returned in eval mode."""
    torch.manual_seed(SEED)
    network = DigitsTransformer(norm_first)
    optimizer = torch.optim.AdamW(no_decay_groups(network, 0.05), LEARNING_RATE)
    steps = EPOCHS * (len(train_set.labels) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, steps, pct_start=WARM_UP
    )
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train_set.labels))
        for batch in order.split(BATCH)[: len(order) // BATCH]:
            scores = network(shifted(train_set.images[batch]))
            loss = F.cross_entropy(scores, train_set.labels[batch], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        if epoch % 10 == 9:
            chosen_by = accuracy(network.eval(), choose_by)
            print(f"epoch {epoch + 1:3d}/{EPOCHS}  loss {loss.item():.3f}  {chosen_by:.2%}")
            network.train()
    return network.eval()


def main() -> None:
    """Train both, measure each once on the held-out part, write the two directories."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=CHECKPOINTS, help="folder to write to")
    out: Path = parser.parse_args().out
    torch.set_num_threads(1)

    train_set, choose_by = load_training_digits()
    held_out = load_heldout()
    for directory, norm_first in ((POST_NORM, False), (PRE_NORM, True)):
        network = train(train_set, choose_by, norm_first)
        record = {
            "data": "scikit-learn load_digits, 8x8 grey levels 0..16",
            "norm_first": norm_first,
            "seed": SEED,
            "trained_on": len(train_set.labels),
            "settings_chosen_by": len(choose_by.labels),
            "held_out": len(held_out.labels),
            "held_out_accuracy": accuracy(network, held_out),
            "epochs": EPOCHS,
            "batch": BATCH,
            "learning_rate": LEARNING_RATE,
            "warm_up": WARM_UP,
            "parameters": sum(p.numel() for p in network.parameters()),
        }
        target = out / directory.name
        target.mkdir(parents=True, exist_ok=True)
        weights = save(network.state_dict(), {"format": "pt"})
        (target / "model.safetensors").write_bytes(weights)
        (target / "training.json").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        print(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
