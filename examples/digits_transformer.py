"""Two small vision transformers for handwritten digits: post-norm and pre-norm, otherwise equal.

    python examples/digits_transformer.py

prints how well the two trained checkpoints do. `examples/training/train_digits_transformers.py`
wrote them; on the command line the class is `--arch digits_transformer:DigitsTransformer`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from normswap.demo import CLASSES, Digits, accuracy, load_heldout, prepare

WIDTH = 48
LAYERS = 6
HEADS = 4
HIDDEN = 96
PATCH = 2
TOKENS = (8 // PATCH) ** 2
DROPOUT = 0.1
CHECKPOINTS = Path(__file__).resolve().parent / "checkpoints"
POST_NORM = CHECKPOINTS / "digits_post_norm"
PRE_NORM = CHECKPOINTS / "digits_pre_norm"


class DigitsTransformer(nn.Module):
    """Patches, an encoder of `torch.nn`, the mean over the patches, a linear classifier.

    Post-norm has no norm behind the encoder, for its last layer ends in one; pre-norm needs it.
    """

    def __init__(self, norm_first: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(PATCH * PATCH, WIDTH)
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.5)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, HIDDEN, DROPOUT, batch_first=True, norm_first=norm_first
        )
        final = nn.LayerNorm(WIDTH) if norm_first else None
        self.encoder = nn.TransformerEncoder(layer, LAYERS, final, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)
        for parameter in self.encoder.parameters():  # the encoder starts from copies of one layer
            if parameter.dim() > 1:
                nn.init.xavier_uniform_(parameter)

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 1, 8, 8] with values in 0..1 to class scores [N, 10]."""
        patches = F.pixel_unshuffle(images, PATCH).flatten(2).transpose(1, 2)
        tokens = self.embed(patches) + self.positions
        return self.head(self.encoder(tokens).mean(1))


def load_transformer(directory: Path) -> DigitsTransformer:
    """The trained network of a checkpoint directory, in eval mode."""
    record = load_record(directory)
    network = DigitsTransformer(norm_first=record["norm_first"])
    network.load_state_dict(load_file(directory / "model.safetensors"))
    return network.eval()


def load_record(directory: Path) -> dict[str, Any]:
    """How the network was trained and how well it did."""
    return json.loads((directory / "training.json").read_text("utf-8"))


def load_training_digits() -> tuple[Digits, Digits]:
    """The images to train on and those to choose settings by; none of them is held out.

    The split is that of `train_resnet_digits.py`, so what is held out is `load_heldout()`. A fifth
    of the rest is for choosing: no network here was trained on it.
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8)
    images, _, labels, _ = train_test_split(
        images, labels, test_size=0.25, random_state=0, stratify=labels
    )
    parts = train_test_split(images, labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, choose_images, train_labels, choose_labels = map(torch.from_numpy, parts)
    return (
        Digits(prepare(train_images), train_labels.long()),
        Digits(prepare(choose_images), choose_labels.long()),
    )


def main() -> None:
    """Print the held-out accuracy of both."""
    held_out = load_heldout()
    for directory in (POST_NORM, PRE_NORM):
        network = load_transformer(directory)
        print(f"{directory.name:18}{accuracy(network, held_out):.2%}")


if __name__ == "__main__":
    main()
