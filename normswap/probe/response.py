"""Local response normalisation over channels, and global response normalisation (GRN)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from normswap.probe.affine import laid, match_gain, match_shift
from normswap.probe.alone import Alone
from normswap.probe.dependence import Reach
from normswap.probe.epsilon import rounded
from normswap.spec import NormSpec

__all__ = ["fit_global_response", "fit_local_response"]


def fit_local_response(alone: Alone, shape: tuple[int, ...]) -> NormSpec | None:
    """``x / (k + alpha/size * Σ x²)^beta``, from the response to a single entry.

    Far from 0, ``y(t) ~ t^(1 - 2 beta)`` gives beta; then ``(t / y)^(1/beta)`` is linear in t².
    """
    if len(shape) < 3:
        return None
    place = (0, shape[1] // 2, *(0 for _ in shape[2:]))

    def single(t: float) -> float:
        x = torch.zeros(shape, dtype=torch.float64)
        x[place] = t
        y = alone(x)
        return math.nan if y is None else float(y[place])

    far = single(1e12), single(1e13)
    if not all(math.isfinite(y) and y > 0 for y in far):
        return None
    beta = (1 - math.log10(far[1] / far[0])) / 2
    if not 0.01 < beta < 10:
        return None
    beta = rounded(round(beta, 9))
    k, alpha = _line(single, beta)
    if not (math.isfinite(k) and math.isfinite(alpha) and alpha > 0):
        return None
    size = _window(alone, shape)
    if size is None:
        return None
    return NormSpec(
        "response", (1,), _short(k), window=(size, _short(alpha * size), beta), affine_axes=()
    )


def _line(single: Callable[[float], float], beta: float) -> tuple[float, float]:
    """``k`` and the factor of t² in ``(t / y)^(1/beta) = k + a t²``."""
    at_small, at_large = single(1e-6), single(1e8)
    if not (at_small > 0 and at_large > 0):
        return math.nan, math.nan
    k = (1e-6 / at_small) ** (1 / beta)
    return k, ((1e8 / at_large) ** (1 / beta) - k) / 1e16


def _short(value: float) -> float:
    short = float(f"{value:.4g}")
    return short if abs(short - value) < 1e-7 * abs(value) else value


def _window(alone: Alone, shape: tuple[int, ...]) -> int | None:
    """How many channels an entry has an effect on."""
    x = alone.random(shape)
    moved = x.clone()
    moved[(0, shape[1] // 2, *(0 for _ in shape[2:]))] += 1.5
    y, after = alone(x), alone(moved)
    if y is None or after is None:
        return None
    changed = (after - y).abs() > 1e-13
    if int(changed.sum()) != int(changed[(0, slice(None), *(0 for _ in shape[2:]))].sum()):
        return None
    return int(changed.sum())


def fit_global_response(alone: Alone, found: Reach) -> NormSpec | None:
    """``x + g * x * r / (mean r + eps) + b``, ``r = ||x||`` over the space of each channel."""
    axes = found.axes
    if len(axes) < 2 or 0 in axes or found.groups != 1:
        return None
    for channel in (axes[-1], axes[0]):
        spec = _global_response(alone, found.shape, channel, tuple(a for a in axes if a != channel))
        if spec is not None:
            return spec
    return None


def _global_response(
    alone: Alone, shape: tuple[int, ...], channel: int, space: tuple[int, ...]
) -> NormSpec | None:
    x = 1e10 * alone.random(shape)
    y, opposite, zero = alone(x), alone(-x), alone(torch.zeros_like(x))
    if y is None or opposite is None:
        return None
    shift = zero if zero is not None and bool(zero.isfinite().all()) else (y + opposite) / 2
    response = x.square().sum(space, keepdim=True).sqrt()
    relative = response / response.mean(channel, keepdim=True)
    gain = laid(((y - opposite) / 2 / x - 1) / relative)
    weight = match_gain(gain, alone.tensors)
    bias = match_shift(laid(shift), alone.tensors)
    if weight is None or bias is None or gain.axes != (channel,) or weight.name is None:
        return None
    eps = _global_eps(alone, shape, channel, space, alone.tensors[weight.name], shift)
    if eps is None:
        return None
    from_end = channel == len(shape) - 1
    return NormSpec(
        "grn",
        space,
        eps,
        weight=weight.name,
        bias=bias.name,
        unit_offset=weight.unit_offset,
        eps_place="outside",
        affine_axes=(-1,) if from_end else (channel,),
    )


def _global_eps(
    alone: Alone,
    shape: tuple[int, ...],
    channel: int,
    space: tuple[int, ...],
    weight: Tensor,
    shift: Tensor,
) -> float | None:
    """The eps, from inputs of its own size: ``mean r / (mean r + eps)`` is the response's loss."""
    x = alone.random(shape)
    response = x.square().sum(space, keepdim=True).sqrt()
    x = x / response.mean(channel, keepdim=True)
    view = [1] * len(shape)
    view[channel] = shape[channel]
    full = weight.reshape(view) * x * (response / response.mean(channel, keepdim=True))
    power = float((full * full).sum())
    for exponent in range(0, -16, -1):
        t = 10.0**exponent
        y = alone(t * x)
        if y is None:
            return None
        kept = float(((y - shift - t * x) / t * full).sum()) / power
        if kept < 0.9:
            return rounded(float(f"{t / kept - t:.6g}"))
    return 0.0
