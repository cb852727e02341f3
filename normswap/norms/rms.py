"""RMS norms: with a bias, over channels, over a part of the vector, ``1 + weight``, compressed."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap.norms.arithmetic import (
    Device,
    Shape,
    channel_affine,
    like,
    mean_square,
    scale_and_shift,
    widen,
)
from normswap.norms.base import LastAxesNorm, PositionNorm


class RMSNorm(LastAxesNorm):
    """``y = x / sqrt(mean(x²) + eps) * weight + bias`` over the last axes.

    Computes what ``nn.RMSNorm`` does, and may have a bias, as the exact replacement of a LayerNorm
    needs one. Half inputs are computed in float32, gamma included, and cast once at the end.

    Shapes: ``[*, *normalized_shape]`` to the same.

    Args:
        normalized_shape: sizes of the last axes.
        eps: added to the mean square, inside the root. ``None``: as ``nn.RMSNorm``, the machine
            epsilon of the dtype that is computed in (float32's for half inputs).
        elementwise_affine: whether there is a scale.
        bias: whether there is a shift too.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an input with other last axes.

    Source: Zhang and Sennrich 2019, *Root Mean Square Layer Normalization*, section 4 (their code
    adds eps outside the root).
    """

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = False,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        # On a GPU torch's form is one kernel; on the CPU it is the slower one, see mean_square.
        return self._by_kernel(x) if x.is_cuda else self._by_length(x)

    def _eps(self, x: Tensor) -> float:
        return torch.finfo(x.dtype).eps if self.eps is None else self.eps

    def _by_length(self, x: Tensor) -> Tensor:
        wide = widen(x)
        axes = range(-len(self.normalized_shape), 0)
        out = wide * torch.rsqrt(mean_square(wide, axes) + self._eps(wide))
        return scale_and_shift(out, self.weight, self.bias).to(x.dtype)

    def _by_kernel(self, x: Tensor) -> Tensor:
        wide = widen(x)
        mixed = self.weight is not None and self.weight.dtype != x.dtype
        # The kernel rounds its result: what it cannot take, or what follows it, is computed wide.
        source = wide if mixed or self.bias is not None else x
        weight = like(self.weight, source)
        out = F.rms_norm(source, list(self.normalized_shape), weight, self._eps(wide))
        return scale_and_shift(out, None, self.bias).to(x.dtype)


class ChannelRMSNorm(PositionNorm):
    """RMSNorm over the channels of each position, for channels-first inputs of any rank.

    ``y = x / sqrt(mean(x²) + eps) * weight + bias`` with the mean over axis 1. It is the exact
    replacement of a :class:`ChannelLayerNorm` whose input has no mean over the channels.

    Shapes: ``[N, C, *]`` to the same; parameters ``[C]``.

    Args:
        num_channels: the number of channels; ``normalized_shape`` is ``(num_channels,)``.
        eps: added to the mean square, inside the root.
        elementwise_affine: whether there is a scale.
        bias: whether there is a shift too.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for another number of channels.

    Source: Zhang and Sennrich 2019, section 4, on another axis.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = False,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        out = wide * torch.rsqrt(mean_square(wide, (1,)) + self.eps)
        return channel_affine(out, self.weight, self.bias).to(x.dtype)


class PartialRMSNorm(LastAxesNorm):
    """RMSNorm that estimates the mean square from the first part of the vector.

    ``y = x / sqrt(mean(x[:k]²) + eps) * weight`` with ``k = ceil(p * d)``.

    Shapes: ``[*, d]`` to the same; ``weight`` ``[d]``.

    Args:
        normalized_shape: the width ``d``.
        p: the share of the entries, above 0 and up to 1 (a plain RMSNorm).
        eps: added to the mean square, inside the root.
        elementwise_affine: whether there is a scale.
        bias: whether there is a shift too.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for a ``p`` outside that range, several axes, or another width.

    Source: Zhang and Sennrich 2019, pRMSNorm (p = 6.25 %); their code rounds ``p * d`` down and
    adds eps outside the root.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        p: float = 0.0625,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = False,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype
        )
        if not 0 < p <= 1:
            raise ValueError(f"PartialRMSNorm: p is {p}; it must be above 0 and at most 1")
        if len(self.normalized_shape) != 1:
            raise ValueError("PartialRMSNorm: the first part of a vector needs one axis, not more")
        self.p = p
        # 0.07 * 100 is 7.000000000000001: rounding must not add an entry.
        self.partial_size = max(1, math.ceil(p * self.normalized_shape[0] - 1e-9))

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        out = wide * torch.rsqrt(mean_square(wide[..., : self.partial_size], [-1]) + self.eps)
        return scale_and_shift(out, self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class OffsetRMSNorm(LastAxesNorm):
    """RMSNorm that stores its scale as an offset from one.

    ``y = x / sqrt(mean(x²) + eps) * (1 + weight)`` over the last axes; ``weight`` starts at 0. The
    one is added, and the product taken, in float32; one cast at the end.

    Shapes: ``[*, *normalized_shape]`` to the same.

    Args:
        normalized_shape: sizes of the last axes.
        eps: added to the mean square, inside the root.
        elementwise_affine: whether there is a scale.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an input with other last axes.

    Source: Gemma (2024), as in its reference code; also RecurrentGemma and Qwen3-Next.
    """

    start = 0.0

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, False, device=device, dtype=dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        axes = range(-len(self.normalized_shape), 0)
        out = wide * torch.rsqrt(mean_square(wide, axes) + self.eps)
        return (out if self.weight is None else out * (1 + widen(self.weight))).to(x.dtype)


class CRMSNorm(LastAxesNorm):
    """RMSNorm of a zero-mean vector of which only the first ``d - 1`` entries are stored.

    The missing entry is ``-Σ x``, so ``y = x / sqrt((Σ x² + (Σ x)²) / d + eps)`` with ``d`` one
    more than the stored width. There is no scale: one would not keep the mean at zero (fold it
    into the readers, whose weight becomes ``W[:, :-1] - W[:, -1:]``).

    Shapes: ``[*, d - 1]`` to the same.

    Args:
        normalized_shape: the stored width ``d - 1``.
        eps: added to the mean square, inside the root.

    Raises:
        ValueError: for several axes, or another width.

    Source: Jiang et al. 2023, *Pre-RMSNorm and Pre-CRMSNorm Transformers*, section 3.
    """

    def __init__(self, normalized_shape: Shape, eps: float = 1e-6) -> None:
        super().__init__(normalized_shape, eps, False, False, device=None, dtype=None)
        if len(self.normalized_shape) != 1:
            raise ValueError("CRMSNorm: a compressed vector has one axis, not more")

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        stored = mean_square(wide, [-1]) * x.shape[-1]
        missing = wide.sum(-1, keepdim=True).square()
        return (wide * torch.rsqrt((stored + missing) / (x.shape[-1] + 1) + self.eps)).to(x.dtype)
