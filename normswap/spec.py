"""`NormSpec`: what a norm computes, independent of the class that computes it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NormSpec", "Unknown"]


@dataclass(frozen=True)
class NormSpec:
    """What a norm computes.

    With ``s`` the size of the input over `axes` (per group where there are `groups`), ``D(s)`` the
    divisor that `eps` and `eps_place` make of it and ``g = weight`` (``1 + weight`` with
    `unit_offset`; 1 without a weight), ``b = bias`` (0 without)::

        layer, group, instance, batch   (x - mean) / D(s) * g + b     s = sqrt(mean (x - mean)²)
        frozen_batch                    (x - m) / sqrt(v + eps) * g + b    m, v stored
        rms                             x / D(s) * g + b              s = sqrt(mean x²)
        crms                            x / D(s) * g + b              s² = (Σx² + (Σx)²) / (n + 1)
        lp                              x / D(s) * g + b              s = (mean |x|^p)^(1/p)
        scale                           x / D(s) * g + b              s = (Σ |x|^p)^(1/p)
        grn                             x + g * x * r / D(mean r) + b   r = sqrt(Σ x²) over `axes`
        response                        x / (k + alpha/size * Σ x²)^beta    over channels
        affine                          x * g + b                     no norm
        dyt, derf                       g * tanh(a * x) + b, g * erf(a * x + c) + b

    Attributes:
        kind: one of the names above. It says what the module computes in training mode too:
            ``"batch"`` uses the statistics of its batch there and stored ones in eval;
            ``"frozen_batch"`` always uses stored ones.
        axes: the axes of its input that its statistics are over; empty where it has none. They
            are negative where they count from the end: ``(-1,)`` for a LayerNorm, ``(1,)`` for
            one over the channels of ``[N, C, H, W]``. Else they belong to an input of rank 4, or
            of the rank that the module takes: ``(0, 2, 3)`` for a BatchNorm2d, ``(2, 3)`` for an
            InstanceNorm2d, ``(1, 2, 3)`` for a GroupNorm. With `groups` the first is split.
        eps: what keeps the division from failing, in the units of the formula; for
            ``"response"`` the constant ``k``.
        weight: name of the scale's parameter or buffer within the module, or ``None``.
        bias: name of the shift's parameter or buffer, or ``None``.
        mean: name of the running mean, or ``None``.
        var: name of the running variance, or ``None``.
        unit_offset: whether the scale is ``1 + weight``.
        cast_order: where half inputs that were normalised in float32 are cast back: ``"before"``
            gamma, ``(x̂.to(dtype) * w)``, or ``"after"`` it, ``(x̂ * w).to(dtype)``; ``None`` if it
            makes no difference or is not known.
        eps_place: ``"inside"`` the root, ``D(s) = sqrt(s² + eps)`` (``(s^p + eps)^(1/p)`` for the
            other powers), ``"outside"``, ``s + eps``, or ``"clamp"``, ``max(s, eps)``.
        machine_eps: eps is the machine epsilon of the input's dtype; `eps` holds float32's.
        groups: number of groups that the first of `axes` is split into, or ``None``.
        affine_axes: the axes that weight and bias (and stored statistics) run along.
        normalized_shape: the sizes along `affine_axes`, or along the channels or `axes` where
            there is no affine; ``None`` if it takes any size.
        unbiased: the variance divides by ``n - 1``.
        p: the power of ``"lp"`` and ``"scale"``.
        partial: the statistics are over this fraction of the axis, its first entries.
        activation: name of the child that is applied to the result.
        alpha: name of the factor ``a`` in ``"dyt"`` and ``"derf"``.
        shift: name of the shift ``c`` in ``"derf"``.
        window: ``(size, alpha, beta)`` of ``"response"``.
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
    eps_place: str = "inside"
    machine_eps: bool = False
    groups: int | None = None
    affine_axes: tuple[int, ...] = ()
    normalized_shape: tuple[int, ...] | None = None
    unbiased: bool = False
    p: float | None = None
    partial: float | None = None
    activation: str | None = None
    alpha: str | None = None
    shift: str | None = None
    window: tuple[int, float, float] | None = None

    @property
    def centred(self) -> bool:
        """Whether the mean is subtracted."""
        return self.kind in ("layer", "group", "instance", "batch", "frozen_batch")


@dataclass(frozen=True)
class Unknown:
    """A module that behaves like a norm, of which it could not be told what it computes.

    Attributes:
        reason: a code, such as ``"second-input"`` or ``"welded"``.
        seen: one sentence: what was observed.
    """

    reason: str
    seen: str
