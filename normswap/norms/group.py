"""Batch and group norm combined (GroupNorm and InstanceNorm themselves are in torch.nn)."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
from torch import Tensor

from normswap.norms.arithmetic import (
    Device,
    channel_affine,
    check_divides,
    check_positive,
    widen,
)
from normswap.norms.base import RunningNorm
from normswap.norms.batch import unbiased


class BatchGroupNorm(RunningNorm):
    """One set of statistics over (examples of a part × channels of a group × positions).

    In training a batch is split into ``max(1, N // num_examples)`` parts of almost equal size, and
    ``y = (x - μ) / sqrt(σ² + eps) * weight + bias`` with the mean and biased variance of each part
    and group. With one example per part this is a GroupNorm, with one channel per group a
    GhostBatchNorm. Eval uses running statistics, kept per channel (equal within a group), so that
    it is a fixed affine as a BatchNorm's.

    Shapes: ``[N, C, *]`` to the same; parameters and buffers ``[C]``.

    Args:
        num_groups: groups of consecutive channels; must divide ``num_channels``.
        num_channels: the number of channels.
        num_examples: examples per part.
        eps: added to the variance, inside the root.
        momentum: of the running statistics; ``None``: a plain average.
        affine: whether there is a scale and a shift per channel.
        track_running_stats: if false, eval normalises by the batch as well.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for groups that do not divide the channels, other channels, or in training if
            there is a single value to normalise over.

    Source: Summers and Dinneen 2020, *Four Things Everyone Should Know to Improve Batch
    Normalization*, section 3.4 (for very small batches).
    """

    def __init__(
        self,
        num_groups: int,
        num_channels: int,
        num_examples: int = 2,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_divides(type(self).__name__, num_groups, num_channels)
        super().__init__(
            num_channels, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        check_positive(type(self).__name__, num_examples=num_examples)
        self.num_groups = num_groups
        self.num_examples = num_examples

    @property
    def statistics_count(self) -> int:
        """One mean per group."""
        return self.num_groups

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        return (self._by_batch(wide) if self.uses_batch else self.by_running(wide)).to(x.dtype)

    def _by_batch(self, x: Tensor) -> Tensor:
        outputs: list[Tensor] = []
        mean, var = x.new_zeros(self.num_groups), x.new_zeros(self.num_groups)
        for part in x.tensor_split(max(1, x.shape[0] // self.num_examples)):
            grouped = part.reshape(part.shape[0], self.num_groups, -1)
            v, m = torch.var_mean(grouped, (0, 2), correction=0, keepdim=True)
            outputs.append(((grouped - m) * torch.rsqrt(v + self.eps)).reshape(part.shape))
            count = part.numel() // self.num_groups
            mean = mean + m.flatten() * (part.shape[0] / x.shape[0])
            var = var + unbiased(v, count).flatten() * (part.shape[0] / x.shape[0])
        if self.training:
            size = self.num_features // self.num_groups
            repeated = [t.repeat_interleave(size) for t in (mean, var)]
            self.track(running_mean=repeated[0], running_var=repeated[1])
        return channel_affine(torch.cat(outputs), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.num_groups}, {super().extra_repr()}, num_examples={self.num_examples}"
