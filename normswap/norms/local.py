"""Norms over a neighbourhood or over all positions: local contrast, divisive, global response."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap.norms.arithmetic import (
    Device,
    channel_affine,
    check_channels,
    check_positive,
    fill,
    on_axis,
    parameter,
    scale_and_shift,
    widen,
    without_autocast,
)
from normswap.norms.base import ChannelNorm


def _odd(where: str, kernel_size: int) -> int:
    if kernel_size < 1 or kernel_size % 2 == 0:
        raise ValueError(f"{where}: kernel_size is {kernel_size}; it must be odd and positive")
    return kernel_size


class LocalContrastNorm(nn.Module):
    """Subtract a Gaussian-weighted mean, divide by the local standard deviation or its mean.

    ``v = x - Σ w x`` and ``y = v / max(mean σ, σ)`` with ``σ = sqrt(Σ w v²)``. The sums run over
    the window *and all channels*; the weights of a window sum to one, and at the border those
    inside the image do. ``mean σ`` is over the positions of one example. No parameters.

    Shapes: ``[N, C, H, W]`` to the same.

    Args:
        kernel_size: of the window, odd (9 in the paper).
        sigma: of the Gaussian in pixels; ``None``: a quarter of ``kernel_size``.
        eps: the least standard deviation (a constant image gives 0).
        device: where the kernel is made.
        dtype: of the kernel.

    Raises:
        ValueError: for an even kernel, a sigma that is not positive, or inputs of another rank.

    Source: Jarrett et al. 2009, *What is the Best Multi-Stage Architecture for Object
    Recognition?*, section 2 (the border, sigma and eps are as in Torch 7).
    """

    kernel: Tensor

    def __init__(
        self,
        kernel_size: int = 9,
        sigma: float | None = None,
        eps: float = 1e-4,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.kernel_size = _odd(type(self).__name__, kernel_size)
        self.sigma = kernel_size / 4 if sigma is None else sigma
        if not self.sigma > 0:
            raise ValueError(f"LocalContrastNorm: sigma is {sigma}; it must be positive")
        self.eps = eps
        kernel = torch.empty(kernel_size, device=device, dtype=dtype)
        self.register_buffer("kernel", kernel, persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The Gaussian along one axis, with sum one."""
        offset = torch.arange(self.kernel_size, dtype=torch.float64) - self.kernel_size // 2
        gaussian = torch.exp(-0.5 * (offset / self.sigma) ** 2)
        self.kernel.copy_(gaussian / gaussian.sum())

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() != 4:
            raise ValueError(f"LocalContrastNorm: the input is {list(x.shape)}, not [N, C, H, W]")
        wide = widen(x)
        with without_autocast(x):
            inside = self._blurred(torch.ones_like(wide[:1, :1]))
            v = wide - self._blurred(wide.mean(1, keepdim=True)) / inside
            square = self._blurred(v.square().mean(1, keepdim=True)) / inside
        std = torch.sqrt(square.clamp_min(self.eps**2))
        return (v / torch.maximum(std, std.mean((2, 3), keepdim=True))).to(x.dtype)

    def _blurred(self, x: Tensor) -> Tensor:
        kernel, half = self.kernel.to(x.dtype), self.kernel_size // 2
        x = F.conv2d(x, kernel.reshape(1, 1, -1, 1), padding=(half, 0))
        return F.conv2d(x, kernel.reshape(1, 1, 1, -1), padding=(0, half))

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, sigma={self.sigma}, eps={self.eps}"


class DivisiveNorm(nn.Module):
    """``y = x / sqrt(sigma² + Σ weight² x²)``, the sum over a window and all channels.

    Both parameters enter squared, so that what is under the root stays positive. The window is
    padded with zeros. (Heeger's own response is the square of it, ``x² / (σ² + Σ w x²)``.)

    Shapes: ``[N, C, *]`` with ``rank`` axes behind C, to the same; ``weight`` ``[C, C, k…]`` (to,
    from), ``sigma`` ``[C]``.

    Args:
        num_channels: the number of channels.
        kernel_size: of the window, odd; 1: only the channels of the same position.
        sigma: its initial value; the initial weights² are equal and sum to one.
        rank: 1, 2 or 3 axes of positions.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an even kernel, another rank, or inputs of other channels or rank.

    Source: Heeger 1992, *Normalization of cell responses in cat striate cortex*; in this form Ballé
    et al. 2016, *Density Modeling of Images using a Generalized Normalization Transformation*.
    """

    weight: nn.Parameter
    sigma: nn.Parameter

    def __init__(
        self,
        num_channels: int,
        kernel_size: int = 1,
        sigma: float = 1.0,
        rank: int = 2,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        check_positive(where, num_channels=num_channels)
        if rank not in (1, 2, 3):
            raise ValueError(f"{where}: rank is {rank}; it must be 1, 2 or 3")
        self.num_channels = num_channels
        self.kernel_size = _odd(where, kernel_size)
        self.rank = rank
        self.sigma_init = sigma
        shape = (num_channels, num_channels, *[kernel_size] * rank)
        self.register_parameter("weight", parameter(shape, device=device, dtype=dtype))
        self.register_parameter("sigma", parameter([num_channels], device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Equal weights: the mean square of the window is added to sigma²."""
        fill(self.weight, (self.num_channels * self.kernel_size**self.rank) ** -0.5)
        fill(self.sigma, self.sigma_init)

    def forward(self, x: Tensor) -> Tensor:
        check_channels("DivisiveNorm", x, self.num_channels, least=self.rank + 2)
        if x.dim() != self.rank + 2:
            raise ValueError(
                f"DivisiveNorm(rank={self.rank}): the input {list(x.shape)} has "
                f"{x.dim() - 2} axes behind its channels; build it with that rank"
            )
        wide = widen(x)
        convolve = (F.conv1d, F.conv2d, F.conv3d)[self.rank - 1]
        with without_autocast(x):
            weight = self.weight.to(wide.dtype).square()
            pooled = convolve(wide.square(), weight, padding=self.kernel_size // 2)
        sigma = on_axis(widen(self.sigma).square(), x.dim())
        return (wide * torch.rsqrt(sigma + pooled)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_channels}, kernel_size={self.kernel_size}, rank={self.rank}"


class GRN(ChannelNorm):
    """Global response normalisation: ``y = weight * x * G / (mean_C G + eps) + bias + x``.

    ``G = ||x||`` over all positions of one channel of one example. Scale and shift start at 0, so
    that the layer starts as the identity.

    Shapes: ``[N, *, C]`` to the same, or ``[N, C, *]`` with ``channels_last=False``; at least one
    axis of positions; parameters ``[C]``.

    Args:
        num_channels: the number of channels.
        eps: added to the mean over the channels.
        channels_last: where the channels are.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for other channels, or no positions.

    Source: Woo et al. 2023, *ConvNeXt V2*, section 4 and algorithm 1.
    """

    least = 3

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        channels_last: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, eps, device=device, dtype=dtype)
        self.channels_last = channels_last
        self.axis = -1 if channels_last else 1
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale and shift 0: the identity."""
        fill(self.weight, 0.0)
        fill(self.bias, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        axes = range(1, x.dim() - 1) if self.channels_last else range(2, x.dim())
        size = torch.linalg.vector_norm(wide, dim=list(axes), keepdim=True)
        relative = size / (size.mean(self.axis, keepdim=True) + self.eps)
        affine = scale_and_shift if self.channels_last else channel_affine
        return (affine(wide * relative, self.weight, self.bias) + wide).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, channels_last={self.channels_last}"
