"""FrozenBatchNorm: the eval affine of a BatchNorm as buffers."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normswap.norms.arithmetic import (
    Device,
    check_channels,
    check_positive,
    fixed_batch_norm,
    widen,
)


class FrozenBatchNorm(nn.Module):
    """BatchNorm that is nothing but its eval affine, for inputs of any rank.

    ``y = (x - running_mean) / sqrt(running_var + eps) * weight + bias`` on axis 1. All four are
    buffers: nothing is trained, and ``train()`` changes nothing. The keys are those of
    ``nn.BatchNorm2d``; ``num_batches_tracked`` of a loaded state is dropped.

    Shapes: ``[N, C, *]`` to the same; buffers ``[C]``.

    Args:
        num_features: the number of channels.
        eps: added to the variance, inside the root. Detection models trained in the days of
            Caffe2 use 0.
        device: where the buffers are made.
        dtype: of the buffers.

    Raises:
        ValueError: on a call whose input has other channels.

    Source: Detectron's ``AffineChannel`` and its successors in detectron2 and torchvision.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, num_features=num_features)
        self.num_features = num_features
        self.eps = eps
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.empty(num_features, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_batch_norm(cls, norm: nn.Module) -> FrozenBatchNorm:
        """What an eval BatchNorm computes, with copies of its tensors.

        Raises:
            ValueError: if it has no running statistics, so that it computes something else.
        """
        mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
        if mean is None or var is None:
            raise ValueError(
                f"{type(norm).__name__} has no running statistics to freeze; "
                "run it in training mode with track_running_stats=True first"
            )
        weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
        eps = float(getattr(norm, "eps", 1e-5))
        frozen = cls(mean.numel(), eps, device=mean.device, dtype=mean.dtype)
        state = {"running_mean": mean, "running_var": var, "weight": weight, "bias": bias}
        for name, value in state.items():
            if value is not None:
                getattr(frozen, name).copy_(value.detach())
        return frozen.train(norm.training)

    def reset_parameters(self) -> None:
        """The identity, up to eps."""
        for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
            nn.init.constant_(getattr(self, name), value)

    def forward(self, x: Tensor) -> Tensor:
        check_channels(type(self).__name__, x, self.num_features)
        mean, var = widen(self.running_mean), widen(self.running_var)
        return fixed_batch_norm(widen(x), mean, var, self.weight, self.bias, self.eps).to(x.dtype)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A BatchNorm's state loads strictly: its counter means nothing here.
        kept = {k: v for k, v in state_dict.items() if k != prefix + "num_batches_tracked"}
        super()._load_from_state_dict(kept, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"
