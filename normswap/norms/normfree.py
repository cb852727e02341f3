"""Point-wise stand-ins for a norm (DyT, Derf), and filter response normalisation with its TLU."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
from torch import Tensor, nn

from normswap.norms.arithmetic import (
    Device,
    Shape,
    as_shape,
    channel_affine,
    check_channels,
    check_last_axes,
    check_positive,
    fill,
    mean_square,
    on_axis,
    parameter,
    scale_and_shift,
    widen,
)
from normswap.norms.base import ChannelNorm


class _Squashing(nn.Module):
    """``y = weight * f(alpha * x + …) + bias`` on the last axes, or on axis 1."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    alpha: nn.Parameter

    def __init__(
        self,
        normalized_shape: Shape,
        alpha: float,
        channels_last: bool,
        elementwise_affine: bool,
        bias: bool,
        *,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        shape = as_shape(normalized_shape, type(self).__name__)
        if not channels_last and len(shape) != 1:
            raise ValueError(
                f"{type(self).__name__}: channels on axis 1 need one size, not {shape}; "
                "give the number of channels"
            )
        self.normalized_shape = shape
        self.channels_last = channels_last
        self.elementwise_affine = elementwise_affine
        self.alpha_init = alpha
        affine, shift = elementwise_affine, elementwise_affine and bias
        self.register_parameter("alpha", parameter([1], device=device, dtype=dtype))
        self.register_parameter("weight", parameter(shape, affine, device=device, dtype=dtype))
        self.register_parameter("bias", parameter(shape, shift, device=device, dtype=dtype))

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, and the initial slope."""
        fill(self.alpha, self.alpha_init)
        fill(self.weight, 1.0)
        fill(self.bias, 0.0)

    def squash(self, x: Tensor) -> Tensor:
        """The point-wise function, its own parameters included."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        where = type(self).__name__
        if self.channels_last:
            check_last_axes(where, x, self.normalized_shape)
            return scale_and_shift(self.squash(widen(x)), self.weight, self.bias).to(x.dtype)
        check_channels(where, x, self.normalized_shape[0])
        return channel_affine(self.squash(widen(x)), self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return (
            f"{self.normalized_shape}, alpha_init={self.alpha_init}, "
            f"channels_last={self.channels_last}, elementwise_affine={self.elementwise_affine}, "
            f"bias={self.bias is not None}"
        )


class DyT(_Squashing):
    """``y = weight * tanh(alpha * x) + bias`` with one learned ``alpha`` (``[1]``).

    Shapes: ``[*, *normalized_shape]`` to the same; with ``channels_last=False`` ``[N, C, *]``.

    Args:
        normalized_shape: sizes of the last axes, or the number of channels.
        alpha: the initial slope. The paper takes 0.5, and for the norms of LLMs a value by width.
        channels_last: whether the parameters lie along the last axes, or along axis 1.
        elementwise_affine: whether there is a scale (and a shift).
        bias: whether there is a shift.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an input of another width, or several sizes with ``channels_last=False``.

    Source: Zhu et al. 2025, *Transformers without Normalization*, section 4.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        alpha: float = 0.5,
        channels_last: bool = True,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            alpha,
            channels_last,
            elementwise_affine,
            bias,
            device=device,
            dtype=dtype,
        )
        self.reset_parameters()

    def squash(self, x: Tensor) -> Tensor:
        """``tanh(alpha * x)``."""
        return torch.tanh(self.alpha * x)


class Derf(_Squashing):
    """``y = weight * erf(alpha * x + shift) + bias``; ``alpha`` and ``shift`` are learned, ``[1]``.

    Shapes: ``[*, *normalized_shape]`` to the same; with ``channels_last=False`` ``[N, C, *]``.

    Args:
        normalized_shape: sizes of the last axes, or the number of channels.
        alpha: the initial slope.
        shift: the initial shift inside.
        channels_last: whether the parameters lie along the last axes, or along axis 1.
        elementwise_affine: whether there is a scale (and a shift).
        bias: whether there is a shift outside.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an input of another width, or several sizes with ``channels_last=False``.

    Source: Chen et al. 2025, *Stronger Normalization-Free Transformers*.
    """

    shift: nn.Parameter

    def __init__(
        self,
        normalized_shape: Shape,
        alpha: float = 0.5,
        shift: float = 0.0,
        channels_last: bool = True,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape,
            alpha,
            channels_last,
            elementwise_affine,
            bias,
            device=device,
            dtype=dtype,
        )
        self.shift_init = shift
        self.register_parameter("shift", parameter([1], device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, and the initial slope and inner shift."""
        super().reset_parameters()
        fill(self.shift, self.shift_init)

    def squash(self, x: Tensor) -> Tensor:
        """``erf(alpha * x + shift)``."""
        return torch.erf(self.alpha * x + self.shift)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shift_init={self.shift_init}"


class FRN(ChannelNorm):
    """Filter response normalisation: ``y = x / sqrt(ν² + eps) * weight + bias``.

    ``ν²`` is the mean of ``x²`` over the positions of one channel of one example; no mean is
    subtracted. A :class:`TLU` follows it. Where maps may be 1 × 1, eps is to be learned:
    ``eps + |learned_eps|`` then stands under the root.

    Shapes: ``[N, C, *]`` to the same, at least one axis behind C; parameters ``[C]``,
    ``learned_eps`` ``[1]``.

    Args:
        num_features: the number of channels.
        eps: added to the mean square, inside the root.
        learned_eps: whether a learned part (initially 1e-4) is added to it.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for other channels or no positions.

    Source: Singh and Krishnan 2020, *Filter Response Normalization Layer*, section 3.
    """

    least = 3
    learned_eps: nn.Parameter | None

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-6,
        learned_eps: bool = False,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, device=device, dtype=dtype)
        learned = parameter([1], learned_eps, device=device, dtype=dtype)
        self.register_parameter("learned_eps", learned)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Scale 1, shift 0, learned eps 1e-4."""
        super().reset_parameters()
        fill(self.learned_eps, 1e-4)

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        square = mean_square(wide, range(2, x.dim())) + self.eps
        if self.learned_eps is not None:
            square = square + widen(self.learned_eps).abs()
        return channel_affine(wide * torch.rsqrt(square), self.weight, self.bias).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, learned_eps={self.learned_eps is not None}"


class TLU(nn.Module):
    """Thresholded linear unit, ``y = max(x, tau)`` with one learned ``tau`` per channel.

    Shapes: ``[N, C, *]`` to the same; ``tau`` ``[C]``, initially 0 (a ReLU).

    Args:
        num_features: the number of channels.
        device: where the parameter is made.
        dtype: of the parameter.

    Raises:
        ValueError: for other channels.

    Source: Singh and Krishnan 2020, section 3.
    """

    tau: nn.Parameter

    def __init__(
        self, num_features: int, *, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, num_features=num_features)
        self.num_features = num_features
        self.register_parameter("tau", parameter([num_features], device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Threshold 0."""
        fill(self.tau, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        check_channels(type(self).__name__, x, self.num_features)
        return torch.maximum(x, on_axis(self.tau.to(x.dtype), x.dim()))

    def extra_repr(self) -> str:
        return f"{self.num_features}"
