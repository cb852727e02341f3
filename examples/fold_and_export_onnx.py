"""Fold, then export: an ONNX file without BatchNormalization nodes, run by ONNX Runtime.

    pip install '.[onnx]'
    python examples/fold_and_export_onnx.py

PyTorch's exporter folds a BatchNorm that stands right behind a convolution. The network here has
four kinds of place that it leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn

import normswap as ns


class Net(nn.Module):
    """BatchNorm over a concat, over a sum, in front of a convolution, and behind a pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3, dilation=1)
        self.over_concat = nn.BatchNorm2d(16)
        self.a, self.b = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1, groups=4)
        self.over_sum = nn.BatchNorm2d(16)
        self.before_conv = nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 24, 3)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.behind_pool = nn.BatchNorm2d(24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Images [N, 3, H, W] to scores [N, 10]."""
        x = torch.relu(self.over_concat(torch.cat([self.left(x), self.right(x)], 1)))
        x = torch.relu(self.over_sum(self.a(x) + self.b(x)))
        x = self.pool(self.last(self.before_conv(x)))
        return self.head(torch.relu(self.behind_pool(x)).flatten(1))


def randomise(model: nn.Module) -> nn.Module:
    """Statistics and affines as different from the defaults as training makes them."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.5)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


def export(model: nn.Module, x: Tensor) -> tuple[int, Callable[[Tensor], Tensor]]:
    """How many BatchNormalization nodes the ONNX model has, and a function that runs it."""
    program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
    assert program is not None
    norms = sum(node.op_type == "BatchNormalization" for node in program.model.graph)
    session = onnxruntime.InferenceSession(
        program.model_proto.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        (scores,) = session.run(None, {name: images.numpy()})
        return torch.from_numpy(np.asarray(scores))

    return norms, run


def main() -> None:
    """Export both models and compare what ONNX Runtime makes of them."""
    model, x = randomise(Net()), torch.randn(2, 3, 32, 32)
    folded, report = ns.fold_batchnorm(model, x)
    print(report)

    norms_before, run_before = export(model, x)
    norms_after, run_after = export(folded, x)
    expected = run_before(x)
    difference = (run_after(x) - expected).abs().max() / expected.abs().max()
    print(
        f"\nBatchNormalization nodes in the ONNX model: {norms_before} before, {norms_after} after"
    )
    print(f"largest relative difference in ONNX Runtime: {difference:.0e}")
    assert norms_after == 0
    assert difference < 1e-5


if __name__ == "__main__":
    main()
