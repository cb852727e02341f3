"""EvoNorm: normalisation and activation found together."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
from torch import Tensor, nn

from normswap.norms.arithmetic import (
    Device,
    channel_affine,
    check_divides,
    fill,
    on_axis,
    parameter,
    widen,
)
from normswap.norms.base import ChannelNorm, RunningNorm
from normswap.norms.batch import other_axes, unbiased


class EvoNormB0(RunningNorm):
    """``y = x / max(s_batch, v * x + s_instance) * weight + bias``.

    ``s_batch = sqrt(var + eps)`` over batch and positions (running in eval), and ``s_instance``
    the same over the positions of one example; both biased, the running variance unbiased. No
    activation follows.

    Shapes: ``[N, C, *]`` to the same, at least one axis behind C; ``weight``, ``bias``, ``v`` and
    ``running_var`` ``[C]``.

    Args:
        num_features: the number of channels.
        eps: added to the variances, inside the roots.
        momentum: of the running variance; ``None``: a plain average.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for other channels, no positions, or in training a single value per channel.

    Source: Liu et al. 2020, *Evolving Normalization-Activation Layers* (EvoNorm-B0).
    """

    least = 3
    v: nn.Parameter

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-3,
        momentum: float | None = 0.1,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, statistics=("running_var",), device=device, dtype=dtype
        )
        self.register_parameter("v", parameter([num_features], device=device, dtype=dtype))
        fill(self.v, 1.0)

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, ``v`` 1, running variance 1."""
        super().reset_parameters()
        if "v" in self._parameters:  # the base calls this first
            fill(self.v, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        var = self.running("running_var")
        if self.training:
            var = torch.var(wide, other_axes(x), correction=0)
            count = x.numel() // self.num_features
            self.track(running_var=unbiased(var, count))
        own = torch.var(wide, list(range(2, x.dim())), correction=0, keepdim=True)
        right = on_axis(widen(self.v), x.dim()) * wide + torch.sqrt(own + self.eps)
        left = on_axis(torch.sqrt(var + self.eps), x.dim())
        out = wide / torch.maximum(left, right)
        return channel_affine(out, self.weight, self.bias).to(x.dtype)


class EvoNormS0(ChannelNorm):
    """``y = x * sigmoid(v * x) / sqrt(var + eps) * weight + bias``, var over each group.

    The biased variance is over the channels of a group and all positions of one example, as in a
    GroupNorm; no mean is subtracted and no activation follows.

    Shapes: ``[N, C, *]`` to the same; ``weight``, ``bias`` and ``v`` ``[C]``.

    Args:
        num_features: the number of channels.
        num_groups: groups of consecutive channels; must divide ``num_features``.
        eps: added to the variance, inside the root.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for groups that do not divide the channels, or other channels.

    Source: Liu et al. 2020, *Evolving Normalization-Activation Layers* (EvoNorm-S0).
    """

    v: nn.Parameter

    def __init__(
        self,
        num_features: int,
        num_groups: int = 32,
        eps: float = 1e-5,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_divides(type(self).__name__, num_groups, num_features)
        super().__init__(num_features, eps, device=device, dtype=dtype)
        self.num_groups = num_groups
        self.register_parameter("v", parameter([num_features], device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, ``v`` 1."""
        super().reset_parameters()
        fill(self.v, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        gated = wide * torch.sigmoid(on_axis(widen(self.v), x.dim()) * wide)
        var = torch.var(
            wide.reshape(x.shape[0], self.num_groups, -1), -1, correction=0, keepdim=True
        )
        grouped = gated.reshape(x.shape[0], self.num_groups, -1) * torch.rsqrt(var + self.eps)
        return channel_affine(grouped.reshape(x.shape), self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, num_groups={self.num_groups}, eps={self.eps}"
