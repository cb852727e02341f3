"""How large the eps of a normaliser is, and where it stands: from inputs as small as it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normswap.probe.alone import Alone
from normswap.probe.form import Form, divisor

__all__ = ["Epsilon", "measure_epsilon", "rounded"]

_SMALLEST = -25.0  # log10 of the smallest input that is tried: an eps below is none
_LARGEST = 4.0
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Epsilon:
    """An eps, where it stands, and whether it is the machine epsilon of the input's dtype."""

    value: float
    place: str = "inside"
    machine: bool = False


def measure_epsilon(
    alone: Alone, form: Form, shape: tuple[int, ...], gain: Tensor, shift: Tensor
) -> Epsilon | None:
    """The eps under which ``y = gain * t * u / D(t) + shift`` holds for small ``t``.

    ``u`` is an input of size 1 in every group, so that ``D`` is one number:
    ``sqrt(t² + eps)``, ``t + eps`` or ``max(t, eps)``. It is measured where it is about ``2 t``.
    """
    unit = form.normalised(alone.random(shape))
    direction = gain * unit
    power = float((direction * direction).sum())

    def ratio(t: float) -> float | None:
        """``t / D(t)``; ``None`` if the result is not in the direction of the input."""
        y = alone(t * unit)
        if y is None:
            return None
        rest = y - shift
        value = float((rest * direction).sum()) / power
        off = float((rest - value * direction).abs().max())
        return value if off <= 1e-8 * (float(y.abs().max()) + 1e-300) else None

    at_smallest = ratio(10**_SMALLEST)
    if at_smallest is None or math.isnan(at_smallest):
        return None
    if abs(at_smallest - 1) < _TOLERANCE:
        return Epsilon(0.0)
    t = _halfway(ratio)
    return None if t is None else _explained(ratio, t, form.p)


def _halfway(ratio: Callable[[float], float | None]) -> float | None:
    """An input scale at which the divisor is about twice the scale."""
    low, high = _SMALLEST, _LARGEST
    for _ in range(40):
        middle = (low + high) / 2
        value = ratio(10**middle)
        if value is None:
            return None
        if 0.3 < value < 0.7:
            return 10**middle
        low, high = (middle, high) if value < 0.5 else (low, middle)
    return None


def _explained(ratio: Callable[[float], float | None], t: float, p: float) -> Epsilon | None:
    """The place of an eps under which the divisor comes out at several scales."""
    scales = (t / 7, t / 2, t, 3 * t, 20 * t)
    measured = [ratio(s) for s in scales]
    if any(m is None or not m > 0 for m in measured):
        return None
    divisors = [s / m for s, m in zip(scales, measured, strict=True) if m is not None]
    inside = divisors[2] ** p - t**p if math.isfinite(p) else math.nan
    guesses = {"inside": inside, "outside": divisors[2] - t, "clamp": divisors[0]}
    for place, guess in guesses.items():
        eps = rounded(guess)
        expected = [divisor(_scalar(s), eps, place, p) for s in scales]
        pairs = zip(divisors, expected, strict=True)
        if eps > 0 and all(abs(d - float(e)) <= _TOLERANCE * d for d, e in pairs):
            return _named(eps, place)
    return None


def _named(eps: float, place: str) -> Epsilon:
    machine = abs(eps / torch.finfo(torch.float64).eps - 1) < 1e-6
    return Epsilon(torch.finfo(torch.float32).eps if machine else eps, place, machine)


def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


def rounded(eps: float) -> float:
    """The short decimal that was meant, as far as the measurement can tell."""
    for digits in range(1, 13):
        short = float(f"{eps:.{digits - 1}e}")
        if abs(short - eps) <= 1e-11 * abs(eps):
            return short
    return eps
