"""Layer norms that PyTorch lacks: over channels, over an example, with scale ``1 + weight``."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap.norms.arithmetic import Device, Shape, layer_norm, like, widen
from normswap.norms.base import ChannelNorm, LastAxesNorm, PositionNorm


class ChannelLayerNorm(PositionNorm):
    """LayerNorm over the channels of each position, for channels-first inputs of any rank.

    ``y = (x - mean) / sqrt(var + eps) * weight + bias`` with mean and biased variance over axis 1.
    The input's memory format is kept.

    Shapes: ``[N, C, *]`` to the same; parameters ``[C]``.

    Args:
        num_channels: the number of channels; ``normalized_shape`` is ``(num_channels,)``.
        eps: added to the variance, inside the root.
        elementwise_affine: whether there is a scale (and a shift).
        bias: whether there is a shift.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for another number of channels.

    Source: Liu et al. 2022, *A ConvNet for the 2020s* (ConvNeXt), whose blocks use eps 1e-6.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        last = x.movedim(1, -1)
        out = layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps)
        out = out.movedim(-1, 1)
        # The fast kernel wants the channels last; a reader that calls view() wants them as before.
        return out.contiguous() if x.is_contiguous() else out


class SampleLayerNorm(ChannelNorm):
    """LayerNorm over all of an example (C, H, W), with a scale and a shift per channel.

    ``y = (x - mean) / sqrt(var + eps) * weight + bias`` with mean and biased variance over all axes
    but the first: a GroupNorm with one group. (``nn.LayerNorm([C, H, W])`` has an entry of its
    affine for every element, and needs a fixed size.)

    Shapes: ``[N, C, *]`` to the same; parameters ``[C]``.

    Args:
        num_channels: the number of channels.
        eps: added to the variance, inside the root.
        affine: whether there is a scale (and a shift).
        bias: whether there is a shift.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for another number of channels.

    Source: Ba et al. 2016, *Layer Normalization*, section 6.7; Wu and He 2018, *Group
    Normalization*, section 3.1.
    """

    num_groups = 1

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, eps, affine, bias, device=device, dtype=dtype)
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        weight, bias = like(self.weight, wide), like(self.bias, wide)
        return F.group_norm(wide, 1, weight, bias, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class OffsetLayerNorm(LastAxesNorm):
    """LayerNorm that stores its scale as an offset from one.

    ``y = (x - mean) / sqrt(var + eps) * (1 + weight) + bias`` over the last axes. ``weight``
    starts at 0, so that weight decay pulls the scale to 1. The one is added in float32 (in a
    bfloat16 parameter it would round: ``1 + 15.8125`` needs ten bits).

    Shapes: ``[*, *normalized_shape]`` to the same.

    Args:
        normalized_shape: sizes of the last axes.
        eps: added to the variance, inside the root.
        elementwise_affine: whether there is a scale (and a shift).
        bias: whether there is a shift.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an input with other last axes.

    Source: NVIDIA's ``LayerNorm1P`` (Megatron-LM, Nemotron-4), which adds in the parameter's dtype.
    """

    start = 0.0

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
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
        scale = None if self.weight is None else 1 + widen(self.weight)
        bias = None if self.bias is None else widen(self.bias)
        return layer_norm(x, self.normalized_shape, scale, bias, self.eps)
