"""Where a BatchNorm cannot be folded exactly, it is kept, and the report says why.

Run it with `python examples/refused_norms.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import normswap as ns


class Net(nn.Module):
    """One BatchNorm that folds and three that do not."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.folds = nn.BatchNorm2d(8)
        self.sums_a_raw_skip = nn.BatchNorm2d(8)
        self.between_activations = nn.BatchNorm2d(8)
        self.without_statistics = nn.BatchNorm2d(8, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        """[N, 3, H, W] to [N, 8, H, W]."""
        x = torch.relu(self.folds(self.conv(x)))
        x = self.sums_a_raw_skip(x + x.roll(1, -1)).sigmoid()
        x = self.between_activations(x).sigmoid()
        return self.without_statistics(x)


def main() -> None:
    """Fold what can be folded, and print the reasons for the rest."""
    torch.manual_seed(0)
    _, report = ns.fold_batchnorm(Net().eval(), torch.randn(2, 3, 16, 16))
    for site in report.sites:
        print(f"{site.name:22}{site.action:18}{site.reason or '':22}{site.detail}")
    assert report.counts == {"exact": 1, "refused": 3}


if __name__ == "__main__":
    main()
