"""Fit ``y = gain * (x - mean)/D(size) + shift``: the statistic, the gain, the shift and the eps."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normswap.probe.affine import TOLERANCE, Laid, Match, laid, match_gain, match_shift, near
from normswap.probe.alone import Alone, Runnable
from normswap.probe.dependence import Reach
from normswap.probe.epsilon import Epsilon, measure_epsilon
from normswap.probe.form import Form
from normswap.spec import Unknown

__all__ = ["Fit", "fit_normaliser", "is_normaliser"]

_LARGE = 1e10  # input scale at which no eps shows
_TURN = 1e-5


@dataclass(frozen=True)
class Fit:
    """What a normaliser was found to be, for inputs of one shape."""

    form: Form
    shape: tuple[int, ...]
    gain: Laid
    shift: Laid
    weight: Match
    bias: Match
    eps: Epsilon


def is_normaliser(alone: Runnable, shape: tuple[int, ...]) -> bool:
    """Whether the result keeps its size when the input grows, and follows the input's direction.

    ``y(8x) = y(x)`` for large ``x`` alone would also fit a softmax or a gate that has become 0 or
    1: so a small turn of ``x`` has to turn ``y`` a little, and twice that twice as much; and
    ``-x`` has to give something else.
    """
    x, turn = alone.random(shape), alone.random(shape)
    inputs = (x, 8 * x, -x, x + _TURN * turn, x + 2 * _TURN * turn)
    results = [y for y in (alone(_LARGE * v) for v in inputs) if y is not None]
    if len(results) < len(inputs) or not bool(torch.stack(results).isfinite().all()):
        return False
    y, grown, opposite, turned, turned_twice = results
    size = float(y.abs().max())
    if size == 0 or not near(grown, y, 1e-8) or float((opposite - y).abs().max()) < 1e-3 * size:
        return False
    once, twice = (turned - y).abs() / size, (turned_twice - y).abs() / size
    follows = (once > 1e-4 * _TURN) & ((twice - 2 * once).abs() < 0.1 * once)
    return float(follows.double().mean()) > 0.25


def fit_normaliser(alone: Alone, found: Reach) -> Fit | Unknown:
    """The one statistic, gain and shift that explain the results, or what speaks against it."""
    fitted = _fit_form(alone, found)
    if fitted is None:
        return Unknown(
            "welded",
            "its result does not grow with its input, as a norm's, but is no input divided by one "
            "mean square, variance or power mean, times a gain, plus a shift",
        )
    form, full_gain, full_shift = fitted
    gain, shift = laid(full_gain), laid(full_shift)
    if 0 in gain.axes or 0 in shift.axes:
        return Unknown("welded", "its gain or shift is not the same for all examples of a batch")
    if form.spread:
        return Unknown(
            "uncentred-variance",
            "it divides by the standard deviation, but does not subtract the mean",
        )
    n = form.count(found.shape)
    factors = (1.0, math.sqrt((n - 1) / n), n ** (-1 / form.p))
    weight, bias = match_gain(gain, alone.tensors, factors), match_shift(shift, alone.tensors)
    if weight is None or bias is None:
        what = "gain" if weight is None else "shift"
        return Unknown("welded", f"its {what} is none of its tensors")
    named = _with_factor(form, weight, found.shape)
    if named is None:
        return Unknown("factor", f"its result has a constant factor of {weight.factor:.6g}")
    form, factor = named
    eps = measure_epsilon(alone, form, found.shape, full_gain / factor, full_shift)
    if eps is None:
        return Unknown("eps", "its eps is neither in the root, nor beside it, nor a lower limit")
    return Fit(form, found.shape, gain, shift, weight, bias, eps)


def _fit_form(alone: Alone, found: Reach) -> tuple[Form, Tensor, Tensor] | None:
    inputs = [alone.random(found.shape) for _ in range(3)]
    plus = [alone(_LARGE * x) for x in inputs]
    minus = alone(-_LARGE * inputs[0])
    if minus is None or plus[0] is None or plus[1] is None or plus[2] is None:
        return None
    shift = (plus[0] + minus) / 2
    outputs = [p - shift for p in plus if p is not None]
    for form in _forms(found, alone):
        normalised = [form.normalised(x) for x in inputs]
        power = sum(n * n for n in normalised[:2])
        gain = sum(n * y for n, y in zip(normalised[:2], outputs[:2], strict=True)) / power
        assert isinstance(gain, Tensor)
        fits = all(near(gain * n, y) for n, y in zip(normalised, outputs, strict=True))
        if fits and bool(gain.isfinite().all()):
            return form, gain, shift
    return None


def _forms(found: Reach, alone: Alone) -> Iterator[Form]:
    """The statistics that could be meant, the usual ones first."""
    if found.partial is not None:
        yield Form(found.axes, partial=found.partial)
        return
    base = Form(found.axes, groups=found.groups)
    yield dataclasses.replace(base, centred=True)
    yield base
    yield dataclasses.replace(base, spread=True)
    yield dataclasses.replace(base, reduced=True)
    for p in _powers(alone):
        yield dataclasses.replace(base, p=p)


def _powers(alone: Alone) -> list[float]:
    own = [float(v) for v in vars(alone.module).values() if type(v) in (int, float)]
    powers = [1.0, 3.0, 4.0, *(v for v in own if 0.5 <= v <= 16), math.inf]
    return list(dict.fromkeys(powers))


def _with_factor(form: Form, weight: Match, shape: tuple[int, ...]) -> tuple[Form, float] | None:
    """The statistic that has the constant factor in it: a sum, or a variance over ``n - 1``."""
    n = form.count(shape)
    if abs(weight.factor - 1) < TOLERANCE:
        return form, 1.0
    if form.centred and abs(weight.factor - math.sqrt((n - 1) / n)) < TOLERANCE:
        return dataclasses.replace(form, unbiased=True), weight.factor
    if not form.centred and abs(weight.factor * n ** (1 / form.p) - 1) < TOLERANCE:
        return dataclasses.replace(form, sums=True), weight.factor
    return None
