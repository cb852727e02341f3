"""`NormSpec`: what a norm computes, independent of the class that computes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class NormSpec:
    """What a norm computes.

    Attributes:
        kind: ``"batch"``, ``"frozen_batch"``, ``"instance"`` …
        axes: the axes of its input that its statistics are over (``(0, 2, 3)`` for a BatchNorm2d
            in training; in eval it uses stored statistics for axis 1).
        eps: what is added to the variance.
        weight: name of the scale's parameter or buffer within the module, or ``None``.
        bias: name of the shift's parameter or buffer, or ``None``.
        mean: name of the running mean, or ``None``.
        var: name of the running variance, or ``None``.
        unit_offset: whether the scale is ``1 + weight``.
        cast_order: ``"before"`` or ``"after"`` gamma, where half inputs are cast back; ``None`` if
            it makes no difference or is not known.
    """

    kind: str
    axes: tuple[int, ...]
    eps: float
    weight: str | None = None
    bias: str | None = None
    mean: str | None = None
    var: str | None = None
    unit_offset: bool = False
    cast_order: str | None = None
