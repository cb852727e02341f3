"""Batch norms over sequences: statistics per time step, or pooled over the unmasked ones."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
from torch import Tensor

from normswap.norms.arithmetic import (
    Device,
    check_positive,
    fill,
    scale_and_shift,
    widen,
)
from normswap.norms.base import ChannelNorm


def check_mask(where: str, x: Tensor, mask: Tensor | None) -> None:
    """Raise ``ValueError`` unless a mask is boolean, ``[N, T]``."""
    if mask is not None and (mask.shape != x.shape[:2] or mask.dtype != torch.bool):
        raise ValueError(
            f"{where}: the mask is {mask.dtype} {list(mask.shape)}; it must be torch.bool "
            f"{list(x.shape[:2])}, true where there is data"
        )


def blanked(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zeros where the mask is false (not a product: padding may hold NaN or infinity)."""
    return x if mask is None else torch.where(mask.unsqueeze(-1), x, torch.zeros_like(x))


def masked_statistics(
    x: Tensor, mask: Tensor | None, axes: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Count, mean and biased variance of blanked values over some axes, which are kept."""
    valid = torch.ones_like(x[..., :1]) if mask is None else mask.unsqueeze(-1).to(x.dtype)
    count = valid.sum(axes, keepdim=True)
    safe = count.clamp_min(1.0)
    mean = x.sum(axes, keepdim=True) / safe
    var = ((x - mean).square() * valid).sum(axes, keepdim=True) / safe
    return count, mean, var


class _SequenceNorm(ChannelNorm):
    """Running statistics, a scale and a shift for sequences ``[N, T, C]``."""

    axis = 2
    least = 3
    running_mean: Tensor
    running_var: Tensor

    def __init__(
        self,
        num_features: int,
        slots: tuple[int, ...],
        eps: float,
        momentum: float,
        affine: bool,
        bias: bool,
        gain: float,
        *,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__(num_features, eps, affine, bias, device=device, dtype=dtype)
        self.momentum = momentum
        self.gain = gain
        for name in ("running_mean", "running_var"):
            buffer = torch.empty(*slots, num_features, device=device, dtype=dtype)
            self.register_buffer(name, buffer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initial gain, shift 0, mean 0, variance 1."""
        fill(self.weight, self.gain)
        fill(self.bias, 0.0)
        fill(self.running_mean, 0.0)
        fill(self.running_var, 1.0)

    def finish(self, x: Tensor, mean: Tensor, var: Tensor, mask: Tensor | None) -> Tensor:
        """Normalise, scale and shift, and set what is masked to zero."""
        out = (x - mean) * torch.rsqrt(var + self.eps)
        return blanked(scale_and_shift(out, self.weight, self.bias), mask)

    def moved(self, running: Tensor, batch: Tensor, count: Tensor) -> Tensor:
        """The running statistic after this batch; unchanged where the batch has no spread."""
        step = self.momentum * (count > 1).to(batch.dtype)
        return running + (batch.detach() - running) * step

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, momentum={self.momentum}, gain={self.gain}"


class SequenceBatchNorm(_SequenceNorm):
    """BatchNorm over batch and time: only unmasked steps count.

    ``y = (x - μ) / sqrt(σ² + eps) * weight + bias``; in training mean and biased variance over all
    unmasked steps of all sequences, in eval running ones (unbiased). Masked steps come out as 0.
    It needs whole sequences: the future is in the statistics.

    Shapes: ``[N, T, C]`` with a boolean mask ``[N, T]`` (true: data), to the same; parameters and
    buffers ``[C]``.

    Args:
        num_features: the number of channels.
        eps: added to the variance, inside the root.
        momentum: of the running statistics.
        affine: whether there is a scale (and a shift).
        bias: whether there is a shift.
        gain: the initial scale.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for other channels, or a mask of another shape or dtype.

    Source: Laurent et al. 2016, *Batch Normalized Recurrent Neural Networks*, section 4.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        bias: bool = True,
        gain: float = 1.0,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, (), eps, momentum, affine, bias, gain, device=device, dtype=dtype
        )

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        self.check(x)
        check_mask("SequenceBatchNorm", x, mask)
        wide = blanked(widen(x), mask)
        if not self.training:
            mean, var = widen(self.running_mean), widen(self.running_var)
            return self.finish(wide, mean, var, mask).to(x.dtype)
        count, mean, var = masked_statistics(wide, mask, (0, 1))
        self._track(count.flatten(), mean.flatten(), var.flatten())
        return self.finish(wide, mean, var, mask).to(x.dtype)

    @torch.no_grad()
    def _track(self, count: Tensor, mean: Tensor, var: Tensor) -> None:
        unbiased = var * (count / (count - 1).clamp_min(1.0))
        self.running_mean.copy_(self.moved(self.running_mean, mean, count))
        self.running_var.copy_(self.moved(self.running_var, unbiased, count))


class FrameBatchNorm(_SequenceNorm):
    """BatchNorm over the batch at each time step on its own: no step sees the future.

    ``y_t = (x_t - μ_t) / sqrt(σ_t² + eps) * weight + bias``; in training mean and biased variance
    over the sequences that have data at ``t``, in eval running ones (unbiased), kept per step;
    later steps use the last one's. Scale and shift are shared by all steps. Masked steps come out
    as 0. In training a step at which one sequence is left gives the shift, and moves nothing.

    Shapes: ``[N, T, C]`` with a boolean mask ``[N, T]`` (true: data), to the same; parameters
    ``[C]``, buffers ``[max_length, C]``.

    Args:
        num_features: the number of channels.
        max_length: steps for which statistics are kept: the longest sequence in training.
        eps: added to the variance, inside the root.
        momentum: of the running statistics.
        affine: whether there is a scale (and a shift).
        bias: whether there is a shift.
        gain: the initial scale.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for other channels, a mask of another shape or dtype, or sequences longer than
            ``max_length`` in training.

    Source: Laurent et al. 2016, section 4; statistics per step as in Cooijmans et al. 2016,
    *Recurrent Batch Normalization*, section 3.
    """

    def __init__(
        self,
        num_features: int,
        max_length: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        bias: bool = True,
        gain: float = 1.0,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(type(self).__name__, max_length=max_length)
        super().__init__(
            num_features,
            (max_length,),
            eps,
            momentum,
            affine,
            bias,
            gain,
            device=device,
            dtype=dtype,
        )
        self.max_length = max_length

    def forward(self, x: Tensor, mask: Tensor | None = None, start: int = 0) -> Tensor:
        """Normalise ``[N, T, C]`` whose first step is step ``start`` of the sequences."""
        self.check(x)
        check_mask("FrameBatchNorm", x, mask)
        wide, stop = blanked(widen(x), mask), start + x.shape[1]
        if not self.training:
            steps = torch.arange(start, stop, device=x.device).clamp_max(self.max_length - 1)
            mean, var = widen(self.running_mean)[steps], widen(self.running_var)[steps]
            return self.finish(wide, mean, var, mask).to(x.dtype)
        if stop > self.max_length:
            raise ValueError(
                f"FrameBatchNorm: {stop} steps in training, statistics for {self.max_length}; "
                "build it with the length of the longest sequence"
            )
        count, mean, var = masked_statistics(wide, mask, (0,))
        self._track(slice(start, stop), count[0], mean[0], var[0])
        return self.finish(wide, mean, var, mask).to(x.dtype)

    @torch.no_grad()
    def _track(self, steps: slice, count: Tensor, mean: Tensor, var: Tensor) -> None:
        unbiased = var * (count / (count - 1).clamp_min(1.0))
        for running, batch in ((self.running_mean, mean), (self.running_var, unbiased)):
            running[steps] = self.moved(running[steps], batch, count).to(running.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, max_length={self.max_length}"
