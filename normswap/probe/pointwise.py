"""Maps of each entry by itself: fixed affine maps, with stored statistics or not; DyT and Derf."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normswap.probe.affine import TOLERANCE, Laid, laid, match_gain, match_shift, near
from normswap.probe.alone import Alone
from normswap.probe.epsilon import rounded
from normswap.spec import NormSpec

__all__ = ["Affine", "fit_affine", "fit_saturating", "plain_affine", "stored_statistics"]


@dataclass(frozen=True)
class Affine:
    """``y = slope * x + shift``, the same for every input."""

    slope: Laid
    shift: Laid


def fit_affine(alone: Alone, shape: tuple[int, ...]) -> Affine | None:
    """Slope and shift, if the module maps every entry by itself and affinely."""
    a, b = alone.random(shape), alone.random(shape)
    results = [alone(x) for x in (torch.zeros_like(a), a, b, 1e4 * b)]
    if any(y is None or not bool(y.isfinite().all()) for y in results):
        return None
    at_zero, at_a, at_b, at_large = (y for y in results if y is not None)
    slope = (at_a - at_zero) / a
    predicted, predicted_large = slope * b + at_zero, slope * 1e4 * b + at_zero
    if not near(predicted, at_b) or not near(predicted_large, at_large):
        return None
    found = Affine(laid(slope), laid(at_zero))
    return None if 0 in (*found.slope.axes, *found.shift.axes) else found


def stored_statistics(found: Affine, tensors: Mapping[str, Tensor]) -> NormSpec | None:
    """The roles of the tensors and the eps under which slope and shift come out.

    ``y = (x - m) / sqrt(v + eps) * w + b`` with the one assignment of ``m, v, w, b`` to the
    module's tensors under which the same eps explains every channel.
    """
    axes = found.slope.axes or found.shift.axes
    scale, shift = found.slope.values.reshape(-1), found.shift.values.reshape(-1)
    size = max(scale.numel(), shift.numel())
    scale, shift = scale.expand(size), shift.expand(size)
    vectors = {n: t.reshape(-1) for n, t in tensors.items() if t.numel() == size and t.dim()}
    for roles in _assignments(list(vectors)):
        value = {role: vectors[name] for role, name in roles.items()}
        weight = value.get("weight", torch.ones_like(scale))
        bias = value.get("bias", torch.zeros_like(scale))
        eps = (weight / scale) ** 2 - value["var"]
        constant = float((eps - eps.mean()).abs().max()) < TOLERANCE
        fits = near(bias - value["mean"] * scale, shift) and bool((weight * scale > 0).all())
        if fits and constant and float(eps.mean()) > -TOLERANCE:
            spec = NormSpec("frozen_batch", (), _measured(float(eps.mean())), affine_axes=axes)
            return replace(spec, **roles)
    return None


def plain_affine(found: Affine, tensors: Mapping[str, Tensor]) -> NormSpec | None:
    """``x * w + b`` with both stored; a scale or a shift alone is not looked for."""
    weight, bias = match_gain(found.slope, tensors), match_shift(found.shift, tensors)
    if weight is None or bias is None or weight.name is None or bias.name is None:
        return None
    if abs(weight.factor - 1) > TOLERANCE or found.slope.axes != found.shift.axes:
        return None
    if not found.slope.axes:  # one number for all
        return None
    return NormSpec(
        "affine",
        (),
        0.0,
        weight=weight.name,
        bias=bias.name,
        unit_offset=weight.unit_offset,
        affine_axes=found.slope.axes,
    )


def _measured(eps: float) -> float:
    """The eps; it is the small difference of numbers near 1, so only so many digits count."""
    if eps < 1e-12:
        return 0.0
    short = float(f"{eps:.3g}")
    return short if abs(short - eps) < 1e-13 else rounded(eps)


def _assignments(names: list[str]) -> Iterator[dict[str, str]]:
    for extra in (("weight", "bias"), ("weight",), ("bias",), ()):
        roles = ("mean", "var", *extra)
        for order in itertools.permutations(names, len(roles)):
            yield dict(zip(roles, order, strict=True))


def fit_saturating(alone: Alone, shape: tuple[int, ...]) -> NormSpec | None:
    """``g * tanh(a * x) + b`` or ``g * erf(a * x + c) + b`` with stored ``g`` and ``a``."""
    x = 0.3 * alone.random(shape, 0.0)
    high, low, middle = (alone(v) for v in (1e10 * x.abs(), -1e10 * x.abs(), x))
    if high is None or low is None or middle is None:
        return None
    gain, shift = (high - low) / 2, (high + low) / 2
    inner = (middle - shift) / gain
    if not bool((inner.abs() < 1).all()):
        return None
    found: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        ("dyt", torch.atanh),
        ("derf", torch.erfinv),
    ]
    for kind, inverse in found:
        spec = _saturating(alone, kind, inverse(inner), x, laid(gain), laid(shift))
        if spec is not None:
            return spec
    return None


def _saturating(
    alone: Alone, kind: str, argument: Tensor, x: Tensor, gain: Laid, shift: Laid
) -> NormSpec | None:
    mean = x.mean()
    slope = ((x - mean) * argument).sum() / ((x - mean) ** 2).sum()
    offset = argument.mean() - slope * mean
    if not near(slope * x + offset, argument, 1e-8):
        return None
    numbers = {n: t for n, t in alone.tensors.items() if t.numel() == 1}
    alpha, shifted = _named(slope, numbers), _named(offset, numbers)
    weight, bias = match_gain(gain, alone.tensors), match_shift(shift, alone.tensors)
    if alpha is None or weight is None or bias is None:
        return None
    if (shifted is None) != (abs(float(offset)) < 1e-8) or abs(weight.factor - 1) > TOLERANCE:
        return None
    return NormSpec(
        kind,
        (),
        0.0,
        weight=weight.name,
        bias=bias.name,
        unit_offset=weight.unit_offset,
        alpha=alpha,
        shift=shifted,
        affine_axes=gain.axes or shift.axes,
    )


def _named(value: Tensor, numbers: Mapping[str, Tensor]) -> str | None:
    for name, number in numbers.items():
        if abs(float(number) - float(value)) < 1e-8:
            return name
    return None
