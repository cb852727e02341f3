"""Gain and shift of a norm, and which of its tensors they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

__all__ = ["TOLERANCE", "Laid", "Match", "laid", "match_gain", "match_shift", "near"]

TOLERANCE = 1e-9  # true float64: what does not fit to this is something else


@dataclass(frozen=True)
class Laid:
    """A tensor that varies along some axes of the input only."""

    axes: tuple[int, ...]
    values: Tensor  # flat, in the order of the axes

    @property
    def zero(self) -> bool:
        """Whether there is nothing to add."""
        return not self.axes and abs(float(self.values)) < TOLERANCE


@dataclass(frozen=True)
class Match:
    """A tensor by name (``None``: a constant) and what makes the gain of it."""

    name: str | None
    unit_offset: bool = False
    factor: float = 1.0


def near(a: Tensor, b: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether two tensors agree, relative to the largest value."""
    size = max(float(b.abs().max()), 1e-300)
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * size).all())


def laid(full: Tensor) -> Laid:
    """The axes along which a tensor varies, and its values along them."""
    axes: list[int] = []
    for axis in range(full.dim()):
        first = full.narrow(axis, 0, 1)
        if near(first.expand_as(full), full):
            full = first
        else:
            axes.append(axis)
    return Laid(tuple(axes), full.reshape(-1) if axes else full.reshape(()))


def match_gain(
    gain: Laid, tensors: Mapping[str, Tensor], factors: tuple[float, ...] = (1.0,)
) -> Match | None:
    """The tensor that a gain is: ``w``, ``1 + w``, either times a constant, or a constant alone.

    A single number is some constant times any other: only the ``factors`` count there.
    """
    for name, tensor in tensors.items():
        values = (
            tensor.reshape(gain.values.shape) if tensor.numel() == gain.values.numel() else None
        )
        if values is None:
            continue
        for offset in (False, True):
            ratio = gain.values / (values + offset)
            factor = ratio.flatten()[0]
            meant = bool(gain.axes) or any(_is(float(factor), f) for f in factors)
            if meant and near(ratio, factor.expand_as(ratio)):
                return Match(name, offset, float(factor))
    return None if gain.axes else Match(None, False, float(gain.values))


def match_shift(shift: Laid, tensors: Mapping[str, Tensor]) -> Match | None:
    """The tensor that is added, if any."""
    if shift.zero:
        return Match(None)
    for name, tensor in tensors.items():
        same_size = tensor.numel() == shift.values.numel()
        if same_size and near(tensor.reshape(shift.values.shape), shift.values):
            return Match(name)
    return None


def _is(a: float, b: float) -> bool:
    return abs(a - b) <= TOLERANCE * abs(b)
