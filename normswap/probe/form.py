"""What a norm computes, as a formula: the size that it divides by, and all of a `NormSpec`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from normswap.spec import NormSpec

__all__ = ["Form", "axes_for", "compute", "divisor", "form_of"]


@dataclass(frozen=True)
class Form:
    """A statistic: over which axes, of which power, of the input with or without its mean.

    Attributes:
        axes: not negative, ascending.
        groups: the first of `axes` is split into so many.
        centred: the mean is subtracted first.
        p: the power.
        sums: sums instead of means.
        unbiased: the variance divides by ``n - 1``.
        partial: over so many first entries of the last of `axes`.
        reduced: ``(Σx² + (Σx)²) / (n + 1)``, the mean square of a zero-mean vector of which the
            last entry is not stored.
        spread: the size is the standard deviation, though the mean is not subtracted.
    """

    axes: tuple[int, ...]
    groups: int = 1
    centred: bool = False
    p: float = 2.0
    sums: bool = False
    unbiased: bool = False
    partial: int | None = None
    reduced: bool = False
    spread: bool = False

    def split(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The input with its groups as an axis of their own, and the axes to reduce then."""
        if self.groups == 1:
            return x, self.axes
        first = self.axes[0]
        shape = list(x.shape)
        shape[first : first + 1] = [self.groups, shape[first] // self.groups]
        return x.reshape(shape), tuple(a + 1 for a in self.axes)

    def count(self, shape: tuple[int, ...]) -> int:
        """How many entries of an input of ``shape`` share one statistic."""
        if self.partial is not None:
            return self.partial
        return math.prod(shape[a] for a in self.axes) // self.groups

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What is divided, and its size ``s``, both of the shape that :meth:`split` gives."""
        n = self.count(tuple(x.shape)) - self.unbiased + self.reduced
        x, axes = self.split(x)
        deviation = x - x.mean(axes, keepdim=True)
        above = deviation if self.centred else x
        measured = deviation if self.spread else above
        if self.partial is not None:
            measured = measured.narrow(axes[-1], 0, self.partial)
        if math.isinf(self.p):
            return above, measured.abs().amax(axes, keepdim=True)
        total = (measured.abs() ** self.p).sum(axes, keepdim=True)
        if self.reduced:
            total = total + measured.sum(axes, keepdim=True) ** 2
        return above, (total if self.sums else total / n) ** (1 / self.p)

    def normalised(self, x: Tensor) -> Tensor:
        """The input divided by its size, without an eps."""
        above, size = self.parts(x)
        return (above / size).reshape(x.shape)


def divisor(size: Tensor, eps: float, place: str, p: float = 2.0) -> Tensor:
    """``D(s)``: the size with its eps inside the root, outside it, or as a lower limit."""
    if place == "outside":
        return size + eps
    if place == "clamp":
        return size.clamp_min(eps)
    return (size**p + eps) ** (1 / p)


def axes_for(spec: NormSpec, rank: int) -> tuple[int, ...]:
    """The axes of an input of this rank that the statistics are over, none of them negative.

    All of space stays all of space: ``(2, 3)`` of an image is ``(2,)`` of a sequence. Empty if
    the norm takes no input of this rank.
    """
    if any(not -rank <= a < rank for a in spec.axes if a < 0) or not spec.axes:
        return ()
    if spec.axes[-1] < 0:
        return tuple(a + rank for a in spec.axes)
    first, last = int(spec.axes[0] == 0), rank - int(spec.affine_axes == (-1,))
    space = spec.axes[first:]
    channels_inside = spec.axes == (1,) and spec.kind not in _OVER_SPACE
    if channels_inside or (space and space != tuple(range(space[0], space[-1] + 1))):
        return spec.axes if spec.axes[-1] < rank else ()
    start = space[0] if space else 2
    return (*range(first), *range(start, last))


_OVER_SPACE = ("group", "instance", "batch", "frozen_batch", "grn")


def form_of(spec: NormSpec, shape: tuple[int, ...]) -> Form:
    """The statistic of a norm for an input of this shape."""
    axes = axes_for(spec, len(shape))
    partial = None if spec.partial is None else round(spec.partial * shape[axes[-1]])
    return Form(
        axes,
        groups=spec.groups or 1,
        centred=spec.centred,
        p=spec.p or 2.0,
        sums=spec.kind == "scale",
        unbiased=spec.unbiased,
        partial=partial,
        reduced=spec.kind == "crms",
    )


def compute(
    spec: NormSpec, x: Tensor, tensors: Mapping[str, Tensor], eps: float | None = None
) -> Tensor:
    """What a norm makes of an input, by the formula of its kind (see `NormSpec`).

    Args:
        spec: the norm; a ``"batch"`` with stored statistics is computed as in eval.
        x: any input that it takes, in float64.
        tensors: its tensors by name.
        eps: instead of the spec's, for one that depends on the dtype.

    Returns:
        The result before an activation, in float64.
    """
    eps = spec.eps if eps is None else eps

    def role(name: str | None) -> Tensor | None:
        return None if name is None else _along(tensors[name], spec.affine_axes, x)

    weight, bias = role(spec.weight), role(spec.bias)
    gain = torch.ones((), dtype=x.dtype) if weight is None else weight + spec.unit_offset
    shift = torch.zeros((), dtype=x.dtype) if bias is None else bias
    mean, var = role(spec.mean), role(spec.var)
    if mean is not None and var is not None:
        return (x - mean) / divisor(var.sqrt(), eps, spec.eps_place) * gain + shift
    if spec.kind == "affine":
        return x * gain + shift
    if spec.kind in ("dyt", "derf"):
        assert spec.alpha is not None
        inner = x * tensors[spec.alpha] + (tensors[spec.shift] if spec.shift else 0)
        return gain * (inner.tanh() if spec.kind == "dyt" else torch.erf(inner)) + shift
    if spec.kind == "grn":
        channels = tuple(a % x.dim() for a in spec.affine_axes)
        response = x.square().sum(axes_for(spec, x.dim()), keepdim=True).sqrt()
        average = divisor(response.mean(channels, keepdim=True), eps, spec.eps_place)
        return x + gain * x * response / average + shift
    if spec.kind == "response":
        return _local_response(spec, x)
    form = form_of(spec, tuple(x.shape))
    above, size = form.parts(x)
    return (above / divisor(size, eps, spec.eps_place, form.p)).reshape(x.shape) * gain + shift


def _local_response(spec: NormSpec, x: Tensor) -> Tensor:
    """``x / (k + alpha/size * Σ x²)^beta`` over ``size`` neighbouring channels of axis 1."""
    assert spec.window is not None
    size, alpha, beta = spec.window
    channels = x.shape[1]
    total = torch.zeros_like(x)
    for shift in range(-(size // 2), (size - 1) // 2 + 1):
        low, high = max(0, -shift), min(channels, channels - shift)
        if low < high:
            total[:, low:high] += x[:, low + shift : high + shift] ** 2
    return x / (spec.eps + alpha / size * total) ** beta


def _along(tensor: Tensor, axes: tuple[int, ...], x: Tensor) -> Tensor:
    """A tensor's entries laid along the axes of ``x``; a single one as it is."""
    if tensor.numel() == 1:
        return tensor.reshape(())
    shape = [1] * x.dim()
    for axis in axes:
        shape[axis] = x.shape[axis]
    return tensor.reshape(shape)
