"""What is left of a norm without statistics: a scale and a shift, or nothing."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
from torch import Tensor

from normswap.norms.arithmetic import Device, Shape, channel_affine, scale_and_shift, widen
from normswap.norms.base import ChannelNorm, LastAxesNorm


class Affine(ChannelNorm):
    """``y = x * weight + bias`` per channel: what a BatchNorm in eval amounts to.

    Shapes: ``[N, C, *]`` to the same (with another ``channel_dim``: any with C on that axis);
    parameters ``[C]``.

    Args:
        num_features: the number of channels.
        bias: whether there is a shift.
        channel_dim: the axis of the channels.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for another number of channels.

    Source: Ioffe and Szegedy 2015, *Batch Normalization*, algorithm 2, last line.
    """

    least = 1

    def __init__(
        self,
        num_features: int,
        bias: bool = True,
        channel_dim: int = 1,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, 0.0, True, bias, device=device, dtype=dtype)
        self.axis = channel_dim
        self.least = channel_dim + 1 if channel_dim >= 0 else -channel_dim
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        return channel_affine(widen(x), self.weight, self.bias, self.axis).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, bias={self.bias is not None}, channel_dim={self.axis}"


class NoNorm(LastAxesNorm):
    """Stands where a LayerNorm would, without statistics: ``y = x``, or ``x * weight + bias``.

    Shapes: ``[*, *normalized_shape]`` to the same.

    Args:
        normalized_shape: sizes of the last axes.
        eps: not used; taken so that it can replace a LayerNorm.
        elementwise_affine: whether there is a scale (and a shift), as in MobileBERT.
        bias: whether there is a shift.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an input with other last axes.

    Source: Sun et al. 2020, *MobileBERT*, section 3.3 (with the affine).
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 0.0,
        elementwise_affine: bool = False,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        if self.weight is None:
            return x
        return scale_and_shift(widen(x), self.weight, self.bias).to(x.dtype)
