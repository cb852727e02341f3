"""The demo: a ResNet trained on handwritten digits, folded, checked and timed.

The network and its held-out images are package data, written by
`examples/training/train_resnet_digits.py`; nothing is downloaded.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass
from importlib.resources import as_file, files
from json import dumps, loads
from typing import Any, TextIO

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

WIDTHS = (16, 32, 48)
BLOCKS_PER_STAGE = 2
CLASSES = 10


class ResidualBlock(nn.Module):
    """conv-bn-relu-conv-bn plus a shortcut, which is a conv-bn where the shape changes."""

    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        """[N, width_in, H, W] to [N, width, H / stride, W / stride]."""
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class DigitsResNet(nn.Module):
    """A ResNet in the small: stem, three stages of residual blocks, pooling, classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, WIDTHS[0], 3, padding=1, bias=False), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU()
        )
        stages: list[nn.Module] = []
        width_in = WIDTHS[0]
        for number, width in enumerate(WIDTHS):
            blocks: list[nn.Module] = []
            for block in range(BLOCKS_PER_STAGE):
                stride = 2 if number > 0 and block == 0 else 1
                blocks.append(ResidualBlock(width_in, width, stride))
                width_in = width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(WIDTHS[-1], CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Images [N, 1, 8, 8] with values in 0..1 to class scores [N, 10]."""
        return self.head(self.pool(self.stages(self.stem(images))).flatten(1))


@dataclass(frozen=True)
class Digits:
    """Images as the network takes them ([N, 1, 8, 8], values in 0..1) and their labels [N]."""

    images: Tensor
    labels: Tensor


def prepare(images: Tensor) -> Tensor:
    """Grey levels 0..16, [N, 8, 8] in any integer dtype, to what the network takes."""
    return images.unsqueeze(1).float() / 16


def load_network() -> DigitsResNet:
    """The trained network, in eval mode."""
    network = DigitsResNet()
    network.load_state_dict(_load_tensors("resnet_digits.safetensors"))
    return network.eval()


def load_heldout() -> Digits:
    """The images that the network was not trained on."""
    tensors = _load_tensors("digits_heldout.safetensors")
    return Digits(prepare(tensors["images"]), tensors["labels"].long())


def load_record() -> dict[str, Any]:
    """How the network was trained and how well it did: the contents of resnet_digits.json."""
    return loads((files("normswap") / "data" / "resnet_digits.json").read_text(encoding="utf-8"))


def accuracy(network: nn.Module, digits: Digits) -> float:
    """Share of the images that get their own label, 0..1."""
    with torch.inference_mode():
        guesses = network(digits.images).argmax(1)
    return (guesses == digits.labels).double().mean().item()


def _load_tensors(name: str) -> dict[str, Tensor]:
    with as_file(files("normswap") / "data" / name) as path:
        return load_file(path)


def run(stream: TextIO | None = None, *, json: bool = False, repeats: int = 30) -> dict[str, Any]:
    """Fold the trained network, compare it with the original, and say what came of it.

    Args:
        stream: Where to write; standard output if None.
        json: Write one JSON object instead of the text.
        repeats: Timed runs of each network for every batch size; the two take turns.

    Returns:
        What the JSON holds: `network`, `report`, `accuracy`, `parameters`, `largest_difference`,
        `same_label`, `timings`.

    Raises:
        VerificationError: The folded network does not compute what the original does.
    """
    from normswap.api import fold_batchnorm

    out: TextIO = sys.stdout if stream is None else stream
    original, digits = load_network(), load_heldout()
    folded, report = fold_batchnorm(original, digits.images[:2])
    with torch.inference_mode():
        before, after = original(digits.images), folded(digits.images)
    result: dict[str, Any] = {
        "network": load_record(),
        "report": report.to_dict(),
        "accuracy": [accuracy(original, digits), accuracy(folded, digits)],
        "parameters": [_parameter_count(original), _parameter_count(folded)],
        "images": len(digits.labels),
        "same_label": int((before.argmax(1) == after.argmax(1)).sum()),
        "largest_score": before.abs().max().item(),
        "largest_difference": (before - after).abs().max().item(),
        "timings": [
            _time_pair(original, folded, digits.images[:size], repeats)
            for size in (1, len(digits.labels))
        ],
    }
    out.write(dumps(result, indent=2) + "\n" if json else _as_text(result, str(report)))
    return result


def _parameter_count(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def _time_pair(a: nn.Module, b: nn.Module, images: Tensor, repeats: int) -> dict[str, Any]:
    """Median seconds of both networks on one batch, and the median over the turns of their ratio.

    The two take turns, so that a busy machine slows both, and use one thread, for on such a
    machine several threads mostly wait for each other.
    """

    def seconds(network: nn.Module) -> float:
        start = time.perf_counter()
        network(images)
        return time.perf_counter() - start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for network in (a, b) * 3:  # the first runs are slower than the rest
                network(images)
            turns = [(seconds(a), seconds(b)) for _ in range(repeats)]
    finally:
        torch.set_num_threads(threads)
    return {
        "batch": len(images),
        "seconds": [statistics.median(turn[side] for turn in turns) for side in (0, 1)],
        "speedup": statistics.median(before / after for before, after in turns),
    }


def _as_text(result: dict[str, Any], report: str) -> str:
    network, images = result["network"], result["images"]
    rows = [
        ("", "before", "after", ""),
        ("parameters", *(f"{count:,}" for count in result["parameters"]), ""),
        (
            "held-out accuracy",
            *(f"{share:.2%}" for share in result["accuracy"]),
            f"same label on {result['same_label']} of {images} images",
        ),
        *(
            (
                f"time, batch of {timing['batch']}",
                *(f"{1000 * seconds:.2f} ms" for seconds in timing["seconds"]),
                f"{timing['speedup']:.2f} times as fast",
            )
            for timing in result["timings"]
        ),
    ]
    table = [f"  {name:<20}{a:>12}{b:>12}   {note}".rstrip() for name, a, b, note in rows]
    return "\n".join(
        [
            "A ResNet trained on handwritten digits, before and after folding its BatchNorms.",
            f"Trained on {network['trained_on']:,} images, tried on {images} others.",
            "",
            report.rstrip(),
            "",
            *table,
            "",
            f"Largest difference of any class score: {result['largest_difference']:.1e} "
            f"(scores go up to {result['largest_score']:.1f}).",
            "",
        ]
    )
