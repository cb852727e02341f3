"""The last word: a description counts only if its formula gives the module's results."""

from __future__ import annotations

from dataclasses import replace

import torch

from normswap.probe.affine import near
from normswap.probe.alone import Alone
from normswap.probe.form import axes_for, compute
from normswap.spec import NormSpec, Unknown

__all__ = ["confirmed"]


def confirmed(
    alone: Alone, specs: list[NormSpec], accepted: list[tuple[int, ...]]
) -> NormSpec | Unknown:
    """The first description that gives the module's results on every shape that it takes.

    If none does, a norm over space may be left untried on shapes without space, where some modules
    compute something else.
    """
    for on_all in (True, False):
        for spec in specs:
            shapes = accepted if on_all else [s for s in accepted if axes_for(spec, len(s))]
            if shapes and all(_explains(alone, spec, shape) for shape in shapes):
                if _differs_in_training(alone, spec, shapes[0]):
                    return Unknown("training-mode", "in training mode it computes something else")
                return _with_sizes(alone, spec, accepted)
    return Unknown("welded", "no formula gives its results for inputs of all sizes and scales")


def _differs_in_training(alone: Alone, spec: NormSpec, shape: tuple[int, ...]) -> bool:
    """Whether a norm without stored statistics does something else, such as a dropout, there."""
    if spec.mean is not None:
        return False
    x = alone.random(shape)
    y = alone(x)
    alone.module.train()
    in_training = alone(x)
    alone.module.eval()
    return y is None or in_training is None or not near(in_training, y)


def _explains(alone: Alone, spec: NormSpec, shape: tuple[int, ...]) -> bool:
    """Whether the formula gives its results, with new tensors, for large and small inputs."""
    rank = len(shape)
    axes = axes_for(spec, rank)
    if bool(spec.axes) != bool(axes) or any(not -rank <= a < rank for a in spec.affine_axes):
        return False
    alone.redraw(signed=(spec.weight, spec.bias))
    eps = torch.finfo(torch.float64).eps if spec.machine_eps else spec.eps
    small = 1e-3 if spec.kind == "response" else max(eps**0.5, eps, 1e-9)
    fits = True
    for scale, offset in ((1.0, 0.3), (small, 0.0), (300.0, -0.2)):
        x = scale * alone.random(shape, offset)
        y = alone(x)
        try:
            if spec.window is not None and spec.window[0] < 1:
                return False  # it sees no neighbours
            expected = compute(spec, x, alone.tensors, eps)
        except (RuntimeError, ValueError):
            expected = None
        fits = fits and y is not None and expected is not None and near(y, expected)
    alone.redraw()
    return fits


def _with_sizes(alone: Alone, spec: NormSpec, accepted: list[tuple[int, ...]]) -> NormSpec:
    """The axes for images if it takes any, and the sizes, as far as it takes no others."""
    shape = max(accepted, key=lambda s: len(s) == 4)
    if spec.axes and spec.axes[0] >= 0 and len(shape) == 4:
        spec = replace(spec, axes=axes_for(spec, 4))
    if spec.affine_axes:
        sizes = tuple(shape[a] for a in spec.affine_axes)
        return replace(spec, normalized_shape=sizes)
    if not spec.axes or spec.axes[0] >= 0:
        return spec
    other = list(shape)
    for axis in spec.axes:
        other[axis] *= 2
    if alone(alone.random(tuple(other))) is not None:
        return spec
    return replace(spec, normalized_shape=tuple(shape[a] for a in spec.axes))
