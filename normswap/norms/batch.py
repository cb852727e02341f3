"""Batch norms that PyTorch lacks: frozen, over sub-batches, renormalised, mixed at inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap.norms.arithmetic import (
    Device,
    channel_affine,
    check_channels,
    check_positive,
    like,
    on_axis,
    widen,
)
from normswap.norms.base import RunningNorm


def other_axes(x: Tensor) -> list[int]:
    """All axes of an input but its channels."""
    return [0, *range(2, x.dim())]


def unbiased(variance: Tensor, count: int) -> Tensor:
    """The estimate that BatchNorm keeps, from the mean squared deviation of ``count`` values."""
    return variance * (count / max(count - 1, 1))


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
        frozen = cls(mean.numel(), float(norm.eps), device=mean.device, dtype=mean.dtype)
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
        wide = widen(x)
        scale = widen(self.weight) * torch.rsqrt(widen(self.running_var) + self.eps)
        shift = widen(self.bias) - widen(self.running_mean) * scale
        return channel_affine(wide, scale, shift).to(x.dtype)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        # A BatchNorm's state loads strictly: the counter means nothing here.
        kept = {k: v for k, v in state_dict.items() if k != prefix + "num_batches_tracked"}
        if isinstance(state_dict, dict):
            state_dict.pop(prefix + "num_batches_tracked", None)
        super()._load_from_state_dict(kept, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}"


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
            mean, var = like(self.running_mean, wide), like(self.running_var, wide)
            weight, bias = like(self.weight, wide), like(self.bias, wide)
            out = F.batch_norm(wide, mean, var, weight, bias, False, 0.0, self.eps)
            return out.to(x.dtype)
        if not (self.shuffle and self.training):
            return self._normalise_parts(wide).to(x.dtype)
        order = torch.randperm(len(x), device=x.device)
        return self._normalise_parts(wide[order])[order.argsort()].to(x.dtype)

    def _normalise_parts(self, x: Tensor) -> Tensor:
        weight, bias = like(self.weight, x), like(self.bias, x)
        outputs: list[Tensor] = []
        mean, var = x.new_zeros(self.num_features), x.new_zeros(self.num_features)
        for part in x.tensor_split(max(1, len(x) // self.ghost_size)):
            # With momentum 1 the "running" statistics are those of this part.
            m, v = torch.zeros_like(mean), torch.ones_like(var)
            outputs.append(F.batch_norm(part, m, v, weight, bias, True, 1.0, self.eps))
            mean, var = mean + m * (len(part) / len(x)), var + v * (len(part) / len(x))
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

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

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
        seen = self.num_batches_tracked.to(torch.float64) - self.warmup

        def risen(steps: int) -> Tensor:
            return (seen / max(steps - self.warmup, 1e-9)).clamp(0.0, 1.0)

        return 1 + (self.r_max - 1) * risen(self.r_steps), self.d_max * risen(self.d_steps)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        mean, var = widen(self.running_mean), widen(self.running_var)
        if not self.training:
            out = (wide - on_axis(mean, x.dim())) * on_axis(torch.rsqrt(var + self.eps), x.dim())
            return channel_affine(out, self.weight, self.bias).to(x.dtype)
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

    running_mean: Tensor
    running_square: Tensor

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
        mixing.running_mean.copy_(mean)
        mixing.running_square.copy_(widen(var) + widen(mean) ** 2)
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
        mean = on_axis(widen(self.running_mean), x.dim())
        square = on_axis(widen(self.running_square), x.dim())
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
