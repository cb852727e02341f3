"""Norms whose scale and shift come from somewhere else: a style, a condition, a map."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap.norms.arithmetic import (
    Device,
    as_shape,
    check_channels,
    check_last_axes,
    check_positive,
    layer_norm,
    widen,
)


class AdaIN(nn.Module):
    """``y = σ(style) * (content - μ(content)) / σ(content) + μ(style)`` per example and channel.

    ``μ`` and ``σ = sqrt(var + eps)`` (biased) are over the positions. There are no parameters.

    Shapes: content ``[N, C, *]``, style ``[N, C, *]`` or ``[1, C, *]`` with other positions, to the
    shape of the content.

    Args:
        eps: added to both variances, inside the roots.

    Raises:
        ValueError: if the channels differ, or there are no positions.

    Source: Huang and Belongie 2017, *Arbitrary Style Transfer in Real-time*, equation 8.
    """

    def __init__(self, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, content: Tensor, style: Tensor) -> Tensor:
        check_channels("AdaIN (content)", content, content.shape[1], least=3)
        check_channels("AdaIN (style)", style, content.shape[1], least=3)
        if style.shape[0] not in (1, content.shape[0]):
            raise ValueError(
                f"AdaIN: {style.shape[0]} styles for {content.shape[0]} examples; "
                "give one for each, or one for all"
            )
        wide = widen(content)
        mean, std = self._statistics(wide, content.dim())
        style_mean, style_std = self._statistics(widen(style), content.dim())
        return ((wide - mean) / std * style_std + style_mean).to(content.dtype)

    def _statistics(self, x: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(x.flatten(2), -1, correction=0)
        shape = (*mean.shape, *[1] * (rank - 2))
        return mean.reshape(shape), torch.sqrt(var + self.eps).reshape(shape)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class _AdaptiveLayerNorm(nn.Module):
    """LayerNorm without parameters, and a linear layer that reads a condition."""

    parts: int  # how many vectors the linear layer gives

    def __init__(
        self,
        normalized_shape: int,
        condition_size: int,
        eps: float,
        *,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        where = type(self).__name__
        self.normalized_shape = as_shape(normalized_shape, where)
        check_positive(where, condition_size=condition_size)
        self.condition_size = condition_size
        self.eps = eps
        width = self.parts * normalized_shape
        self.modulation = nn.Linear(condition_size, width, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A plain LayerNorm (and a closed gate) whatever the condition."""
        nn.init.zeros_(self.modulation.weight)
        nn.init.zeros_(self.modulation.bias)

    def modulate(self, x: Tensor, condition: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The modulated input, and the vectors that follow shift and scale."""
        where = type(self).__name__
        check_last_axes(where, x, self.normalized_shape)
        check_last_axes(f"{where} (condition)", condition, (self.condition_size,))
        vectors = self.modulation(F.silu(condition))
        while vectors.dim() < x.dim():  # one condition for all tokens of an example
            vectors = vectors.unsqueeze(-2)
        shift, scale, *rest = vectors.chunk(self.parts, dim=-1)
        normed = layer_norm(widen(x), self.normalized_shape, None, None, self.eps)
        out = normed * (1 + widen(scale)) + widen(shift)
        return out.to(x.dtype), tuple(rest)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, condition_size={self.condition_size}, eps={self.eps}"


class AdaLN(_AdaptiveLayerNorm):
    """``y = LN(x) * (1 + s(c)) + b(c)`` with ``(b, s) = Linear(silu(c))``.

    LN has no parameters of its own. The linear layer, ``modulation``, starts at zero; its output is
    the shift and then the scale.

    Shapes: ``x`` ``[N, *, d]``, ``c`` ``[N, condition_size]`` (one for all tokens) or with the axes
    of ``x``, to the shape of ``x``.

    Args:
        normalized_shape: the width ``d``.
        condition_size: the width of the condition.
        eps: added to the variance, inside the root.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for another width of input or condition.

    Source: Peebles and Xie 2023, *Scalable Diffusion Models with Transformers*, section 3.2; their
    blocks and their last layer use eps 1e-6.
    """

    parts = 2

    def __init__(
        self,
        normalized_shape: int,
        condition_size: int,
        eps: float = 1e-6,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, condition_size, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.modulate(x, condition)[0]


class AdaLNZero(_AdaptiveLayerNorm):
    """:class:`AdaLN` with a gate for the branch behind it: returns ``(y, gate)``.

    Used as ``x + gate * f(y)``. ``(b, s, gate) = Linear(silu(c))`` starts at zero, so the block
    starts as the identity.

    Shapes: as :class:`AdaLN`; the gate broadcasts against ``x``.

    Args:
        normalized_shape: the width ``d``.
        condition_size: the width of the condition.
        eps: added to the variance, inside the root.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for another width of input or condition.

    Source: Peebles and Xie 2023, section 3.2.
    """

    parts = 3

    def __init__(
        self,
        normalized_shape: int,
        condition_size: int,
        eps: float = 1e-6,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(normalized_shape, condition_size, eps, device=device, dtype=dtype)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        out, (gate,) = self.modulate(x, condition)
        return out, gate.to(x.dtype)


class FiLM(nn.Module):
    """Feature-wise linear modulation: ``y = γ(c) * x + β(c)`` with ``(γ, β) = Linear(c)``.

    No statistics: it follows a norm without an affine, or stands alone. ``γ`` starts around 1 and
    ``β`` around 0 (the bias of the linear layer; its weight starts as in ``nn.Linear``).

    Shapes: ``x`` ``[N, C, *]`` (or C on another axis), ``c`` ``[N, condition_size]``, to the shape
    of ``x``.

    Args:
        num_features: the number of channels.
        condition_size: the width of the condition.
        channel_dim: the axis of the channels of ``x``, not the first.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for other channels, or another width of the condition.

    Source: Perez et al. 2018, *FiLM: Visual Reasoning with a General Conditioning Layer*, section
    2.1.
    """

    def __init__(
        self,
        num_features: int,
        condition_size: int,
        channel_dim: int = 1,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(
            type(self).__name__, num_features=num_features, condition_size=condition_size
        )
        if channel_dim == 0:
            raise ValueError("FiLM: axis 0 holds the examples; give another channel_dim")
        self.num_features = num_features
        self.condition_size = condition_size
        self.channel_dim = channel_dim
        self.modulation = nn.Linear(condition_size, 2 * num_features, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The weight as in ``nn.Linear``; the bias such that ``c = 0`` changes nothing."""
        self.modulation.reset_parameters()
        with torch.no_grad():
            self.modulation.bias[: self.num_features].fill_(1.0)
            self.modulation.bias[self.num_features :].fill_(0.0)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        check_channels("FiLM", x, self.num_features, self.channel_dim)
        check_last_axes("FiLM (condition)", condition, (self.condition_size,))
        view = [1] * x.dim()
        view[0], view[self.channel_dim] = condition.shape[0], self.num_features
        gamma, beta = (widen(t).reshape(view) for t in self.modulation(condition).chunk(2, -1))
        return (gamma * widen(x) + beta).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, channel_dim={self.channel_dim}"


class SPADE(nn.Module):
    """Spatially adaptive: ``y = N(x) * (1 + γ(m)) + β(m)`` with maps computed from a mask.

    ``N`` has no affine. The mask is resized to the positions of ``x`` (nearest), a convolution and
    a ReLU give ``hidden`` channels, and two convolutions ``γ`` and ``β``, all padded with zeros.

    Shapes: ``x`` ``[N, C, H, W]``, mask ``[N, mask_channels, H', W']``, to the shape of ``x``.

    Args:
        num_features: the number of channels of ``x``.
        mask_channels: the number of channels of the mask.
        hidden: channels in between.
        kernel_size: of the convolutions, odd.
        norm: ``N``; ``None``: ``nn.BatchNorm2d(num_features, affine=False)``.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an even kernel, or other channels of input or mask.

    Source: Park et al. 2019, *Semantic Image Synthesis with Spatially-Adaptive Normalization*,
    equation 1 (and the code for ``1 + γ``, 128 channels, 3 × 3 kernels).
    """

    def __init__(
        self,
        num_features: int,
        mask_channels: int,
        hidden: int = 128,
        kernel_size: int = 3,
        norm: nn.Module | None = None,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes = {"num_features": num_features, "mask_channels": mask_channels, "hidden": hidden}
        check_positive(type(self).__name__, **sizes)
        if kernel_size % 2 == 0:
            raise ValueError(f"SPADE: kernel_size is {kernel_size}; it must be odd to keep H and W")
        self.num_features = num_features
        self.mask_channels = mask_channels
        if norm is None:
            norm = nn.BatchNorm2d(num_features, affine=False, device=device, dtype=dtype)
        self.norm = norm

        def convolution(channels: int, filters: int) -> nn.Conv2d:
            half = kernel_size // 2
            return nn.Conv2d(
                channels, filters, kernel_size, padding=half, device=device, dtype=dtype
            )

        self.shared = convolution(mask_channels, hidden)
        self.gamma = convolution(hidden, num_features)
        self.beta = convolution(hidden, num_features)

    def reset_parameters(self) -> None:
        """The convolutions as in ``nn.Conv2d``; the norm's own reset, if it has one."""
        for module in (self.norm, self.shared, self.gamma, self.beta):
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        check_channels("SPADE", x, self.num_features, least=4)
        check_channels("SPADE (mask)", mask, self.mask_channels, least=4)
        resized = F.interpolate(mask, size=x.shape[2:], mode="nearest")
        hidden = F.relu(self.shared(resized.to(x.dtype)))
        gamma, beta = widen(self.gamma(hidden)), widen(self.beta(hidden))
        return (widen(self.norm(x)) * (1 + gamma) + beta).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.num_features}, mask_channels={self.mask_channels}"
