"""Move the norms of a trained post-norm transformer, and fine-tune it for one epoch.

    pip install '.[train,plot]'
    OMP_NUM_THREADS=1 python examples/place_norms.py --orders 5 --plot examples/placement_digits.png

takes about four minutes on one core, and half a minute without options. Pre-norm networks are
trained for one epoch on the same images in the same order: the converted one (with branches scaled
on calibration images, and by the rotation of the norms alone), one whose weights were loaded by
their names, and one from scratch. Each gets the learning rate that does best on images that neither
they nor the original were trained on. The held-out images only measure.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from digits_transformer import (
    POST_NORM,
    DigitsTransformer,
    load_training_digits,
    load_transformer,
)
from torch import Tensor, nn

import normswap as ns
from normswap.demo import Digits, accuracy, load_heldout
from normswap.param_groups import no_decay_groups

BATCH = 16
LEARNING_RATES = (3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
STEPS_BETWEEN = 3  # measurements
FIRST_ORDER_TO_CHOOSE_BY = 1000  # not one that is measured
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#7f7f7f")

Start = Callable[[int], nn.Module]  # from a seed to a network to train


def converted(original: nn.Module, images: Tensor) -> nn.Module:
    """The original as a pre-norm network, its branches in the size that the clean skips keep."""
    new, report = ns.convert_placement(
        original,
        "pre",
        images[:2],
        calibration=[images],
        evaluate=lambda network: accuracy(network, load_heldout()),
    )
    print(report, end="\n\n")
    return new


def rotated(original: nn.Module, images: Tensor) -> nn.Module:
    """The original as a pre-norm network: every norm goes where the next branch reads it."""
    new, _ = ns.convert_placement(original, "pre", images[:2])
    return new


def loaded_by_name(original: nn.Module) -> nn.Module:
    """What flipping the flag gives: each norm keeps its name, and so gets another place."""
    new = DigitsTransformer(norm_first=True)
    missing, unexpected = new.load_state_dict(original.state_dict(), strict=False)
    assert not unexpected
    assert set(missing) == {"encoder.norm.weight", "encoder.norm.bias"}
    return new.eval()


def from_scratch(seed: int) -> nn.Module:
    """An untrained network."""
    torch.manual_seed(seed)
    return DigitsTransformer(norm_first=True).eval()


def batches(digits: Digits, order: int) -> Iterator[Tensor]:
    """The numbers of the images of each step of one epoch, in the order of a seed."""
    generator = torch.Generator().manual_seed(order)
    return iter(torch.randperm(len(digits.labels), generator=generator).split(BATCH))


def one_epoch(network: nn.Module, digits: Digits, order: int, rate: float) -> Iterator[int]:
    """Train a network in place; after each step, in eval mode, the number of steps so far."""
    optimizer = torch.optim.AdamW(no_decay_groups(network, 0.05), rate)
    steps = -(-len(digits.labels) // BATCH)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    torch.manual_seed(order)  # for dropout
    for step, batch in enumerate(batches(digits, order), 1):
        network.train()
        loss = F.cross_entropy(network(digits.images[batch]), digits.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        falling.step()
        network.eval()
        yield step


def choose_rate(start: Start, train_set: Digits, choose_by: Digits, orders: int) -> float:
    """The learning rate whose networks do best, after the epoch, on `choose_by`."""
    first = FIRST_ORDER_TO_CHOOSE_BY

    def score(rate: float) -> float:
        scores: list[float] = []
        for order in range(first, first + orders):
            network = start(order)
            for _ in one_epoch(network, train_set, order, rate):
                pass
            scores.append(accuracy(network, choose_by))
        return mean(scores)

    return max(LEARNING_RATES, key=score)


@dataclass(frozen=True)
class Curves:
    """Held-out accuracy during the epoch: one row an order, one column a measured step."""

    rate: float
    steps: list[int]
    accuracies: list[list[float]]

    @property
    def before(self) -> list[float]:
        """Accuracy without a step, for each order."""
        return [row[0] for row in self.accuracies]

    @property
    def after(self) -> list[float]:
        """Accuracy after the last step, for each order."""
        return [row[-1] for row in self.accuracies]


def measure(start: Start, train_set: Digits, held_out: Digits, rate: float, orders: int) -> Curves:
    """Train for one epoch in each order."""
    last = -(-len(train_set.labels) // BATCH)
    accuracies: list[list[float]] = []
    for order in range(orders):
        network = start(order)
        steps, row = [0], [accuracy(network, held_out)]
        for step in one_epoch(network, train_set, order, rate):
            if step % STEPS_BETWEEN == 0 or step == last:
                steps.append(step)
                row.append(accuracy(network, held_out))
        accuracies.append(row)
    return Curves(rate, steps, accuracies)


def spread(values: list[float]) -> str:
    """Mean and range, or the one value where all are equal."""
    if min(values) == max(values):
        return f"{values[0]:.2%}"
    return f"{mean(values):.2%} ({min(values):.2%} to {max(values):.2%})"


def table(curves: dict[str, Curves]) -> str:
    """One row a start: its learning rate, and the held-out accuracy before and after the epoch."""
    rows = [("start", "rate", "before", "after one epoch")]
    rows += [
        (name, f"{each.rate:g}", spread(each.before), spread(each.after))
        for name, each in curves.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def apart(heights: list[float], gap: float) -> list[float]:
    """Heights for labels: near the given ones, in their order, no two closer than the gap."""
    placed = list(heights)
    below = float("inf")
    for number in sorted(range(len(heights)), key=lambda i: -heights[i]):
        below = placed[number] = min(heights[number], below - gap)
    return placed


def plot(curves: dict[str, Curves], original: float, path: Path) -> None:
    """Mean over the orders, its range as a band, and the original as a line."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, axes = plt.subplots(figsize=(7.6, 4.0), layout="constrained")
    axes.axhline(original, color="black", linewidth=1, linestyle=(0, (4, 3)))
    labels = {"original, post-norm": original}
    labels |= {name: mean(each.after) for name, each in curves.items()}
    heights = apart(list(labels.values()), 0.065)
    colours = ["black", *COLOURS[: len(curves) - 1], COLOURS[-1]]
    for (name, value), height, colour in zip(labels.items(), heights, colours, strict=True):
        axes.annotate(
            f"{value:.1%}  {name}",
            (1.01, height),
            xycoords=("axes fraction", "data"),
            va="center",
            color=colour,
        )
    for each, colour in zip(curves.values(), colours[1:], strict=True):
        columns = list(zip(*each.accuracies, strict=True))
        lowest, highest = list(map(min, columns)), list(map(max, columns))
        axes.fill_between(each.steps, lowest, highest, color=colour, alpha=0.15, linewidth=0)
        axes.plot(each.steps, list(map(mean, columns)), color=colour, linewidth=2)
    steps = next(iter(curves.values())).steps[-1]
    axes.set(xlabel=f"steps of one epoch, {BATCH} images each", xlim=(0, steps), ylim=(0, 1.03))
    axes.set_title("Held-out accuracy of pre-norm networks from a post-norm one", loc="left")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    """Convert, choose the learning rates, train, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves into this file")
    parser.add_argument("--orders", type=int, default=1, help="orders of the images to average")
    options = parser.parse_args()
    torch.set_num_threads(1)

    original, held_out = load_transformer(POST_NORM), load_heldout()
    train_set, choose_by = load_training_digits()
    images = train_set.images[:64]
    moved, turned = converted(original, images), rotated(original, images)
    named = loaded_by_name(original)
    starts: dict[str, Start] = {
        "converted": lambda _: deepcopy(moved),
        "norms rotated": lambda _: deepcopy(turned),
        "loaded by name": lambda _: deepcopy(named),
        "from scratch": from_scratch,
    }
    curves: dict[str, Curves] = {}
    for name, start in starts.items():
        rate = choose_rate(start, train_set, choose_by, options.orders)
        curves[name] = measure(start, train_set, held_out, rate, options.orders)

    before = accuracy(original, held_out)
    print(f"Held-out accuracy of the post-norm original: {before:.2%}")
    print(f"Pre-norm networks, mean and range; orders of the images: {options.orders}\n")
    print(table(curves))
    if options.plot is not None:
        plot(curves, before, options.plot)


if __name__ == "__main__":
    main()
