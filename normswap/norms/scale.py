"""Norms by length: ScaleNorm, FixNorm, and RMSNorm with another power."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normswap.norms.arithmetic import (
    Device,
    Shape,
    as_shape,
    check_last_axes,
    fill,
    mean_square,
    parameter,
    scale_and_shift,
    widen,
)
from normswap.norms.base import LastAxesNorm


class ScaleNorm(nn.Module):
    """``y = g * x / max(||x||, eps)``: vectors of one learned length.

    ``g`` is the only parameter (``weight``, ``[1]``), initialised to ``sqrt(d)``, the length of a
    vector that an RMSNorm has normalised. A clamp, not an additive eps: above it, exact.

    Shapes: ``[*, *normalized_shape]`` to the same; the length is over all of these last axes.

    Args:
        normalized_shape: sizes of the last axes, ``d`` entries in all.
        eps: the least length that is divided by.
        scale: the initial ``g``; ``None``: ``sqrt(d)``.
        device: where the parameter is made.
        dtype: of the parameter.

    Raises:
        ValueError: for an input with other last axes.

    Source: Nguyen and Salazar 2019, *Transformers without Tears*, section 2 (ScaleNorm).
    """

    weight: nn.Parameter

    def __init__(
        self,
        normalized_shape: Shape,
        eps: float = 1e-5,
        scale: float | None = None,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.normalized_shape = as_shape(normalized_shape, type(self).__name__)
        self.eps = eps
        self.scale = math.sqrt(math.prod(self.normalized_shape)) if scale is None else scale
        self.register_parameter("weight", parameter([1], device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The initial length."""
        fill(self.weight, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        check_last_axes(type(self).__name__, x, self.normalized_shape)
        wide = widen(x)
        axes = list(range(-len(self.normalized_shape), 0))
        length = torch.linalg.vector_norm(wide, dim=axes, keepdim=True).clamp_min(self.eps)
        return (wide * (self.weight / length)).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class LpNorm(LastAxesNorm):
    """``y = x / (mean(|x|^p) + eps)^(1/p) * weight + bias`` over the last axes.

    ``p = 2`` is RMSNorm, ``p = 1`` divides by the mean absolute value, ``p = inf`` by the largest
    one plus eps.

    Shapes: ``[*, *normalized_shape]`` to the same.

    Args:
        normalized_shape: sizes of the last axes.
        p: the power, at least 1.
        eps: added to the mean, inside the root.
        elementwise_affine: whether there is a scale (and a shift).
        bias: whether there is a shift.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for a ``p`` below 1, or an input with other last axes.

    Source: the general form; Hoffer et al. 2018, *Norm matters*, section 4, uses 1 and inf.
    """

    def __init__(
        self,
        normalized_shape: Shape,
        p: float = 2.0,
        eps: float = 1e-6,
        elementwise_affine: bool = True,
        bias: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, elementwise_affine, bias, device=device, dtype=dtype
        )
        if not p >= 1:
            raise ValueError(f"LpNorm: p is {p}; it must be at least 1")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        self.check(x)
        wide = widen(x)
        return scale_and_shift(wide / self._size(wide), self.weight, self.bias).to(x.dtype)

    def _size(self, x: Tensor) -> Tensor:
        axes = list(range(-len(self.normalized_shape), 0))
        if self.p == 2:
            return torch.sqrt(mean_square(x, axes) + self.eps)
        if math.isinf(self.p):
            return x.abs().amax(axes, keepdim=True) + self.eps
        return (x.abs().pow(self.p).mean(axes, keepdim=True) + self.eps).pow(1 / self.p)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}"


class FixNorm(nn.Module):
    """Parametrisation of a table: every row (word) has the same fixed length.

    ``W ← scale * W / max(||W||, eps)`` along ``dim``. A row of zeros stays one. With a ScaleNorm
    in front of an output layer whose weight is such a table, the logits are cosines times one
    learned scale.

    Shapes: any tensor with that axis, to the same.

    Args:
        dim: the axis of the word vectors.
        scale: their length.
        eps: the least length that is divided by.

    Source: Nguyen and Chiang 2018, *Improving Lexical Choice in Neural Machine Translation*;
    Nguyen and Salazar 2019 (unit length). Embeddings start uniform in
    ±0.01, see ``normswap.init.fixnorm_init_``.
    """

    def __init__(self, dim: int = -1, scale: float = 1.0, eps: float = 1e-12) -> None:
        super().__init__()
        self.dim = dim
        self.scale = scale
        self.eps = eps

    def forward(self, weight: Tensor) -> Tensor:
        wide = widen(weight)
        return (F.normalize(wide, dim=self.dim, eps=self.eps) * self.scale).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored when a weight is assigned: the weight itself."""
        return weight

    def extra_repr(self) -> str:
        return f"dim={self.dim}, scale={self.scale}, eps={self.eps}"


def fix_norm(module: nn.Module, name: str = "weight", *, scale: float = 1.0) -> nn.Module:
    """Give every row of an embedding or output layer the same length; returns the module.

    Call it on both modules of a tied pair (embedding and head): they keep sharing what is stored.

    Raises:
        ValueError: if there is no such matrix, or the table rescales its own rows (``max_norm``).
    """
    weight = getattr(module, name, None)
    where = type(module).__name__
    if not isinstance(weight, Tensor) or weight.dim() != 2:
        raise ValueError(f"{where}.{name} is no matrix [words, width]; name the table's parameter")
    if getattr(module, "max_norm", None) is not None:
        raise ValueError(f"{where} has max_norm, which rescales its rows in place; set it to None")
    parametrize.register_parametrization(module, name, FixNorm(scale=scale))
    return module
