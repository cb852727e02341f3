"""Bases of the norms: parameters over the last axes, per channel, and with running statistics."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normswap.norms.arithmetic import (
    Device,
    Shape,
    as_shape,
    check_channels,
    check_last_axes,
    check_more_than_one,
    check_positive,
    fill,
    fixed_batch_norm,
    parameter,
    widen,
)


class LastAxesNorm(nn.Module):
    """A norm over its last axes, with a scale and a shift of their shape (either may be missing).

    Attributes:
        normalized_shape: sizes of the axes, as in ``nn.LayerNorm``.
        eps: what keeps the denominator away from zero; also read as ``variance_epsilon``.
        weight: the scale, or ``None``.
        bias: the shift, or ``None``.
    """

    eps: Any  # a float; RMSNorm may have None
    weight: nn.Parameter | None
    bias: nn.Parameter | None
    start = 1.0  # what the weight is initialised to

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float | None,
        elementwise_affine: bool,
        bias: bool,
        *,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        shape = as_shape(normalized_shape, type(self).__name__)
        self.normalized_shape = shape
        self.eps = eps
        self.elementwise_affine = elementwise_affine
        affine, shift = elementwise_affine, elementwise_affine and bias
        self.register_parameter("weight", parameter(shape, affine, device=device, dtype=dtype))
        self.register_parameter("bias", parameter(shape, shift, device=device, dtype=dtype))
        self.reset_parameters()

    @property
    def variance_epsilon(self) -> Any:
        """``eps`` under the name that transformers models read."""
        return self.eps

    def reset_parameters(self) -> None:
        """The scale that changes nothing, and no shift."""
        fill(self.weight, self.start)
        fill(self.bias, 0.0)

    def check(self, x: Tensor) -> None:
        """Raise ``ValueError`` if the last axes of the input are others."""
        check_last_axes(type(self).__name__, x, self.normalized_shape)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, eps={self.eps}, "
            f"elementwise_affine={self.elementwise_affine}, bias={self.bias is not None}"
        )


class ChannelNorm(nn.Module):
    """A norm with a scale and a shift per channel (either may be missing).

    Attributes:
        num_features: the number of channels; also read as ``num_channels``.
        eps: what keeps the denominator away from zero.
        weight: the scale ``[C]``, or ``None``.
        bias: the shift ``[C]``, or ``None``.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    axis = 1
    least = 2  # axes that an input must have

    def __init__(
        self,
        num_features: int,
        eps: float,
        affine: bool = True,
        bias: bool = True,
        *,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, num_features=num_features)
        self.num_features = num_features
        self.eps = eps
        self.affine = affine
        size, shift = (num_features,), affine and bias
        self.register_parameter("weight", parameter(size, affine, device=device, dtype=dtype))
        self.register_parameter("bias", parameter(size, shift, device=device, dtype=dtype))

    @property
    def num_channels(self) -> int:
        """``num_features`` under the name of ``nn.GroupNorm``."""
        return self.num_features

    def reset_parameters(self) -> None:
        """The scale that changes nothing, and no shift."""
        fill(self.weight, 1.0)
        fill(self.bias, 0.0)

    def check(self, x: Tensor) -> None:
        """Raise ``ValueError`` if the input has another number of channels, or too few axes."""
        check_channels(type(self).__name__, x, self.num_features, self.axis, self.least)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, affine={self.affine}"


class PositionNorm(ChannelNorm):
    """A norm over the channels of each position, built like a LayerNorm over the last axis.

    Attributes:
        normalized_shape: ``(num_channels,)``.
        elementwise_affine: whether there is a scale.
    """

    def __init__(
        self,
        num_channels: int,
        eps: float,
        elementwise_affine: bool,
        bias: bool,
        *,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(num_channels, eps, elementwise_affine, bias, device=device, dtype=dtype)
        self.normalized_shape = (num_channels,)
        self.elementwise_affine = elementwise_affine
        self.reset_parameters()

    @property
    def variance_epsilon(self) -> float:
        """``eps`` under the name that transformers models read."""
        return self.eps

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class RunningNorm(ChannelNorm):
    """A norm per channel with statistics of the batch in training and running ones in eval.

    Buffers are named as in ``nn.BatchNorm2d``: ``running_mean``, ``running_var`` ``[C]`` and
    ``num_batches_tracked``; the norm of a channel may use other ones (see the subclasses).

    Attributes:
        momentum: the weight of the new batch in the running statistics; ``None``: all batches
            weigh the same.
        track_running_stats: if false there are no buffers, and eval uses the batch as well.
    """

    num_batches_tracked: Tensor | None

    def __init__(
        self,
        num_features: int,
        eps: float,
        momentum: float | None,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        statistics: tuple[str, ...] = ("running_mean", "running_var"),
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(num_features, eps, affine, device=device, dtype=dtype)
        self.momentum = momentum
        self.track_running_stats = track_running_stats
        self.statistics = statistics
        tracked = track_running_stats
        for name in statistics:
            buffer = torch.empty(num_features, device=device, dtype=dtype) if tracked else None
            self.register_buffer(name, buffer)
        count = torch.tensor(0, dtype=torch.long, device=device) if tracked else None
        self.register_buffer("num_batches_tracked", count)
        self.reset_parameters()

    def running(self, name: str) -> Tensor:
        """A running statistic, in float32 at the least."""
        return widen(self.get_buffer(name))

    def by_running(self, x: Tensor) -> Tensor:
        """Normalised by the running mean and variance, scaled and shifted."""
        mean, var = self.running("running_mean"), self.running("running_var")
        return fixed_batch_norm(x, mean, var, self.weight, self.bias, self.eps)

    @property
    def uses_batch(self) -> bool:
        """Whether a call now normalises by the statistics of its own input."""
        return self.training or self.num_batches_tracked is None

    def reset_running_stats(self) -> None:
        """Mean 0, variance (or mean square) 1, no batches seen."""
        for name in self.statistics:
            fill(getattr(self, name), 0.0 if name == "running_mean" else 1.0)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.zero_()

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, and the running statistics as new."""
        super().reset_parameters()
        self.reset_running_stats()

    def check(self, x: Tensor) -> None:
        """Raise ``ValueError`` for another number of channels, or one value to train on."""
        super().check(x)
        if self.training:
            check_more_than_one(type(self).__name__, x, x.numel() // self.statistics_count)

    @property
    def statistics_count(self) -> int:
        """How many means a batch has, if it is not split."""
        return self.num_features

    @torch.no_grad()
    def track(self, **batch: Tensor) -> None:
        """Move each running statistic towards the one of this batch."""
        if self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        for name, value in batch.items():
            running = self.get_buffer(name)
            count = self.num_batches_tracked.to(value.dtype)
            step = 1.0 / count if self.momentum is None else self.momentum
            running.copy_(running + (value.detach() - running) * step)  # half buffers: in float32

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, momentum={self.momentum}, "
            f"track_running_stats={self.track_running_stats}"
        )
