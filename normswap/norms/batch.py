"""Batch norms that PyTorch lacks: over sub-batches, renormalised, mixed at inference."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap.norms.arithmetic import (
    Device,
    channel_affine,
    check_positive,
    like,
    on_axis,
    widen,
)
from normswap.norms.base import RunningNorm
from normswap.norms.frozen import FrozenBatchNorm


def other_axes(x: Tensor) -> list[int]:
    """All axes of an input but its channels."""
    return [0, *range(2, x.dim())]


def unbiased(variance: Tensor, count: int) -> Tensor:
    """The estimate that BatchNorm keeps, from the mean squared deviation of ``count`` values."""
    return variance * (count / max(count - 1, 1))


class GhostBatchNorm(RunningNorm):
    """BatchNorm over sub-batches of about ``ghost_size`` examples.

    In training a batch is split into ``max(1, N // ghost_size)`` parts of almost equal size (none
    is smaller than ``ghost_size`` unless the batch is), and each part is normalised by its own mean
    and biased variance. The running statistics move once per batch, towards the parts' means and
    unbiased variances averaged over the examples; eval uses them as a BatchNorm does.

    Shapes: ``[N, C, *]`` to the same; parameters and buffers ``[C]``.

    Args:
        num_features: the number of channels.
        ghost_size: examples per part, 16 to 128 in the papers.
        eps: added to the variance, inside the root.
        momentum: of the running statistics; ``None``: a plain average.
        affine: whether there is a scale and a shift.
        track_running_stats: whether there are running statistics.
        shuffle: parts of random examples instead of consecutive ones, in training.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for other channels, or in training if a channel has a single value.

    Source: Hoffer et al. 2017, *Train longer, generalize better*, algorithm 1 (which moves the
    running statistics once per part); Summers and Dinneen 2020, section 3.2.
    """

    def __init__(
        self,
        num_features: int,
        ghost_size: int = 32,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        shuffle: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        check_positive(type(self).__name__, ghost_size=ghost_size)
        self.ghost_size = ghost_size
        self.shuffle = shuffle

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        if not self.uses_batch:
            return self.by_running(wide).to(x.dtype)
        if not (self.shuffle and self.training):
            return self._normalise_parts(wide).to(x.dtype)
        order = torch.randperm(x.shape[0], device=x.device)
        return self._normalise_parts(wide[order])[order.argsort()].to(x.dtype)

    def _normalise_parts(self, x: Tensor) -> Tensor:
        weight, bias = like(self.weight, x), like(self.bias, x)
        outputs: list[Tensor] = []
        mean, var = x.new_zeros(self.num_features), x.new_zeros(self.num_features)
        for part in x.tensor_split(max(1, x.shape[0] // self.ghost_size)):
            # With momentum 1 the "running" statistics are those of this part.
            m, v = torch.zeros_like(mean), torch.ones_like(var)
            outputs.append(F.batch_norm(part, m, v, weight, bias, True, 1.0, self.eps))
            mean, var = (
                mean + m * (part.shape[0] / x.shape[0]),
                var + v * (part.shape[0] / x.shape[0]),
            )
        if self.training:
            self.track(running_mean=mean, running_var=var)
        return torch.cat(outputs)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}, shuffle={self.shuffle}"


class BatchRenorm(RunningNorm):
    """BatchNorm whose training output follows the running statistics.

    In training ``y = (x̂ * r + d) * weight + bias`` with ``x̂ = (x - μ_B) / σ_B``,
    ``r = clip(σ_B / σ, 1 / r_max, r_max)`` and ``d = clip((μ_B - μ) / σ, -d_max, d_max)``; no
    gradient goes through ``r`` and ``d``. Where nothing is clipped this is the eval output
    ``(x - μ) / σ * weight + bias``. ``σ_B² = var_B + eps`` (biased), ``σ² = running_var + eps``.

    The limits start at ``r_max = 1, d_max = 0`` (a BatchNorm), stay there for ``warmup`` batches,
    then rise linearly to the values given here until batch ``r_steps`` and ``d_steps``; the count
    is ``num_batches_tracked``.

    Shapes: ``[N, C, *]`` to the same; parameters and buffers ``[C]``.

    Args:
        num_features: the number of channels.
        eps: added to the variances, inside the root.
        momentum: of the running statistics (0.01 in the paper); ``None``: a plain average.
        affine: whether there is a scale and a shift.
        r_max: the last limit of ``r``, at least 1.
        d_max: the last limit of ``d``, at least 0.
        warmup: batches before the limits rise.
        r_steps: the batch at which ``r_max`` is reached.
        d_steps: the batch at which ``d_max`` is reached.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for limits below those of a BatchNorm, for other channels, or in training if a
            channel has a single value.

    Source: Ioffe 2017, *Batch Renormalization*, algorithm 1 and section 4. The paper averages σ;
    here ``running_var`` is averaged, unbiased, as in ``nn.BatchNorm2d``, whose state loads.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.01,
        affine: bool = True,
        *,
        r_max: float = 3.0,
        d_max: float = 5.0,
        warmup: int = 5_000,
        r_steps: int = 40_000,
        d_steps: int = 25_000,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, device=device, dtype=dtype)
        if r_max < 1 or d_max < 0:
            raise ValueError(
                f"BatchRenorm: r_max is {r_max} and d_max {d_max}; they must be at least 1 and 0, "
                "where it is a BatchNorm"
            )
        self.r_max, self.d_max = r_max, d_max
        self.warmup, self.r_steps, self.d_steps = warmup, r_steps, d_steps

    def limits(self) -> tuple[Tensor, Tensor]:
        """``r_max`` and ``d_max`` of the next batch, as scalar tensors."""
        dtype = self.running("running_var").dtype
        seen = self.running("num_batches_tracked").to(dtype) - self.warmup

        def risen(steps: int) -> Tensor:
            return (seen / max(steps - self.warmup, 1e-9)).clamp(0.0, 1.0)

        return 1 + (self.r_max - 1) * risen(self.r_steps), self.d_max * risen(self.d_steps)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        if not self.training:
            return self.by_running(wide).to(x.dtype)
        mean, var = self.running("running_mean"), self.running("running_var")
        batch_var, batch_mean = torch.var_mean(wide, other_axes(x), correction=0)
        batch_std, std = torch.sqrt(batch_var + self.eps), torch.sqrt(var + self.eps)
        r_max, d_max = (limit.to(std.dtype) for limit in self.limits())
        r = (batch_std.detach() / std).clamp(1 / r_max, r_max)
        d = ((batch_mean.detach() - mean) / std).clamp(-d_max, d_max)
        out = (wide - on_axis(batch_mean, x.dim())) * on_axis(r / batch_std, x.dim())
        out = channel_affine(out + on_axis(d, x.dim()), self.weight, self.bias)
        count = x.numel() // self.num_features
        self.track(running_mean=batch_mean, running_var=unbiased(batch_var, count))
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"{super().extra_repr()}, r_max={self.r_max}, d_max={self.d_max}, "
            f"warmup={self.warmup}, r_steps={self.r_steps}, d_steps={self.d_steps}"
        )


class MixingBatchNorm(RunningNorm):
    """BatchNorm that mixes an example's own statistics into the running ones at inference.

    Training is a BatchNorm's. In eval ``y = (x - μ) / sqrt(σ² + eps) * weight + bias`` with

        ``μ  = alpha * E[x]  + (1 - alpha) * running_mean``
        ``σ² = alpha * E[x²] + (1 - alpha) * running_square - μ²``

    where E is over the positions of one example. ``running_square`` is a running mean of ``E[x²]``
    over training batches (no Bessel correction); ``running_var + running_mean²`` of a stock
    BatchNorm only approximates it, see :meth:`from_batch_norm`.

    Shapes: ``[N, C, *]`` to the same; parameters and buffers ``[C]``.

    Args:
        num_features: the number of channels.
        eps: added to the variance, inside the root.
        momentum: of the running statistics; ``None``: a plain average.
        affine: whether there is a scale and a shift.
        alpha: the share of the example, 0 to 1; to be tuned on held-out data after training.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an alpha outside 0 to 1, other channels, or in training if a channel has a
            single value.

    Source: Summers and Dinneen 2020, *Four Things Everyone Should Know to Improve Batch
    Normalization*, section 3.1.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        *,
        alpha: float = 0.0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        names = ("running_mean", "running_square")
        super().__init__(
            num_features, eps, momentum, affine, statistics=names, device=device, dtype=dtype
        )
        if not 0 <= alpha <= 1:
            raise ValueError(f"MixingBatchNorm: alpha is {alpha}; it must be from 0 to 1")
        self.alpha = alpha

    @classmethod
    def from_batch_norm(cls, norm: nn.Module, alpha: float = 0.0) -> MixingBatchNorm:
        """A trained BatchNorm with ``E[x²]`` taken as ``var + mean²``: an approximation.

        Raises:
            ValueError: if it has no running statistics.
        """
        frozen = FrozenBatchNorm.from_batch_norm(norm)
        mean, var = frozen.running_mean, frozen.running_var
        affine = getattr(norm, "weight", None) is not None
        mixing = cls(
            mean.numel(),
            frozen.eps,
            getattr(norm, "momentum", 0.1),
            affine,
            alpha=alpha,
            device=mean.device,
            dtype=mean.dtype,
        )
        mixing.get_buffer("running_mean").copy_(mean)
        mixing.get_buffer("running_square").copy_(widen(var) + widen(mean) ** 2)
        if mixing.weight is not None and mixing.bias is not None:
            mixing.weight.data.copy_(frozen.weight)
            mixing.bias.data.copy_(frozen.bias)
        return mixing.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        if self.training:
            var, mean = torch.var_mean(wide, other_axes(x), correction=0, keepdim=True)
            square = (var + mean**2).flatten()
            self.track(running_mean=mean.flatten(), running_square=square)
        else:
            mean, var = self._mixed(wide)
        out = (wide - mean) * torch.rsqrt(var + self.eps)
        return channel_affine(out, self.weight, self.bias).to(x.dtype)

    def _mixed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = on_axis(self.running("running_mean"), x.dim())
        square = on_axis(self.running("running_square"), x.dim())
        if self.alpha:
            flat = x.reshape(*x.shape[:2], -1)
            own = [t.reshape(*x.shape[:2], *[1] * (x.dim() - 2)) for t in _moments(flat)]
            mean = mean + self.alpha * (own[0] - mean)
            square = square + self.alpha * (own[1] - square)
        return mean, (square - mean**2).clamp_min(0.0)  # rounding may take it below zero

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}"


def _moments(flat: Tensor) -> tuple[Tensor, Tensor]:
    return flat.mean(-1), flat.square().mean(-1)
