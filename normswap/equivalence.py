"""Can one norm stand where another does, and are they the same function? Measured on copies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normswap.copying import copy_model
from normswap.errors import NormswapError
from normswap.find import NormSite
from normswap.precision import true_float64
from normswap.spec import NormSpec
from normswap.targets import Construction, on_channels, width_of

EXACT = 1e-10  # relative, in true float64: what rounding leaves of two writings of one function
ROLES = ("weight", "bias", "mean", "var")


@dataclass
class NewNorm:
    """What one site becomes."""

    construction: Construction | None
    builder: Callable[..., nn.Module] | None
    module: nn.Module  # as it is built, to read names, shapes and first values off
    spec: NormSpec | None


class Refused(NormswapError):  # noqa: N818 - an answer, not a fault
    """A site is left as it is: ``code`` names the kind of reason."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


def tensors_of(module: nn.Module | None) -> list[tuple[str, Tensor]]:
    """Parameters and buffers by name."""
    if module is None:
        return []
    return [*module.named_parameters(), *module.named_buffers()]


def scale_factor(site: NormSite, new: NewNorm) -> float:
    """What the scale takes from one normaliser to the other.

    ``x / sqrt(sum x²)`` is ``1 / sqrt(d)`` of ``x / sqrt(mean x²)``.
    """
    assert site.spec is not None
    assert new.spec is not None
    sums = (site.spec.kind == "scale", new.spec.kind == "scale")
    if sums[0] == sums[1] or {site.spec.p, new.spec.p} - {None, 2.0}:
        return 1.0
    return width_of(site) ** (-0.5 if sums[0] else 0.5)


def require_same_layout(site: NormSite, new: NewNorm, shape: tuple[int, ...] | None) -> None:
    """Raise unless both work on the same axes: the last ones, or the channels on axis 1."""
    spec = site.spec
    assert spec is not None
    last = spec.axes and all(axis < 0 for axis in spec.axes)
    if last and spec.affine_axes and set(spec.affine_axes) != set(spec.axes):
        raise Refused(
            "axis-mismatch",
            f"its scale runs along axes {list(spec.affine_axes)}, its statistics along "
            f"{list(spec.axes)}",
        )
    flat = shape is not None and len(shape) == 2  # axis 1 is the last axis
    if new.spec is None or flat or on_channels(spec) == on_channels(new.spec):
        return
    old, fresh = ("axis 1", "the last axes")[:: 1 if on_channels(spec) else -1]
    raise Refused(
        "axis-mismatch",
        f"it normalises along {old}, {type(new.module).__name__} along {fresh}: give a callable "
        "NormSite -> nn.Module that makes a norm of that layout",
    )


def require_running(site: NormSite, new: NewNorm, shape: tuple[int, ...] | None) -> None:
    """Raise if the new norm runs on none of the inputs that the old one takes."""
    assert site.module is not None
    generator = torch.Generator().manual_seed(0)
    old, fresh = _drawn(site.module, generator).eval(), _drawn(new.module, generator).eval()
    failure = ""
    for x in _inputs(site, shape, generator):
        with true_float64():
            try:
                old(x)
            except Exception:
                continue
            try:
                fresh(x)
            except Exception as error:
                failure = failure or f"{type(error).__name__}: {error}"
            else:
                return
    if failure:
        raise Refused("axis-mismatch", f"{type(new.module).__name__} does not run: {failure}")


def require_same_dtype(site: NormSite, new: NewNorm, dtype: torch.dtype) -> None:
    """Raise if the new norm returns another dtype for the inputs that the old one got."""
    assert site.module is not None
    found = [_returned_dtype(m, site, dtype) for m in (site.module, new.module)]
    if None not in found and found[0] != found[1]:
        raise Refused(
            "dtype-mismatch",
            f"for {dtype} inputs it returns {found[0]}, {type(new.module).__name__} {found[1]}",
        )


def _returned_dtype(module: nn.Module, site: NormSite, dtype: torch.dtype) -> torch.dtype | None:
    """The dtype of the result with tensors stored as the site's are; ``None`` if not run."""
    assert site.module is not None
    stored = next((t.dtype for _, t in tensors_of(site.module) if t.is_floating_point()), dtype)
    generator = torch.Generator().manual_seed(0)
    alone = _drawn(module, generator).to(stored).eval()
    for x in _inputs(site, None, generator):
        try:
            with torch.inference_mode():
                return alone(x.to(dtype)).dtype
        except Exception:
            continue
    return None


def difference(
    site: NormSite,
    new: NewNorm,
    shape: tuple[int, ...] | None,
    *,
    centred: bool = False,
    zeroed: str | None = None,
) -> float | None:
    """Relative difference in true float64 on random parameters and inputs; ``None`` if not run.

    ``centred``: on inputs without a mean over the axes of the site's statistics. ``zeroed``: a
    tensor of the site that is zero by then.
    """
    assert site.module is not None
    assert site.spec is not None
    if new.spec is None:
        return None
    generator = torch.Generator().manual_seed(0)
    old = _drawn(site.module, generator)
    if zeroed is not None:
        getattr(old, zeroed).data.zero_()
    fresh = _drawn(new.module, generator)
    _fill(old, site.spec, fresh, new.spec, scale_factor(site, new))
    fresh.train(old.training)
    inputs = _inputs(site, shape, generator)
    if centred:
        inputs = [x - x.mean(site.spec.axes, keepdim=True) for x in inputs]
    errors = [_compare(old, fresh, x) for x in inputs]
    known = [e for e in errors if e is not None]
    return max(known) if known else None


def _drawn(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A float64 copy of one module with random parameters and statistics."""
    memo: dict[int, Any] = {}
    for _, tensor in tensors_of(module):
        value = torch.rand(tensor.shape, generator=generator, dtype=torch.float64) + 0.5
        if not tensor.is_floating_point():
            value = torch.zeros(tensor.shape, dtype=tensor.dtype)
        memo[id(tensor)] = nn.Parameter(value, False) if isinstance(tensor, nn.Parameter) else value
    copied = copy_model(module, memo)
    for slots in (copied._forward_hooks, copied._forward_pre_hooks):
        slots.clear()
    return copied


def _fill(old: nn.Module, spec: NormSpec, fresh: nn.Module, new: NormSpec, factor: float) -> None:
    for role in ROLES:
        target, source = getattr(new, role), getattr(spec, role)
        if target is None:
            continue
        tensor = getattr(fresh, target)
        if source is None:
            tensor.data.fill_(0.0 if role in ("bias", "mean") else 1.0 - float(new.unit_offset))
        elif getattr(old, source).numel() in (1, tensor.numel()):
            value = getattr(old, source).detach()
            value = value.reshape(tensor.shape) if value.numel() > 1 else value.reshape(())
            if role == "weight":
                value = (value + float(spec.unit_offset) - float(new.unit_offset)) * factor
            tensor.data.copy_(value)


def _inputs(
    site: NormSite, shape: tuple[int, ...] | None, generator: torch.Generator
) -> list[Tensor]:
    """Inputs as in the recorded run, else of the layouts that a norm of this width may take."""
    assert site.spec is not None
    last = site.spec.normalized_shape or (width_of(site),)
    width = last[0]
    layouts: list[tuple[int, ...]] = [(2, 3, *last), (2, width, 4, 4), (2, width, 6), (3, width)]
    layouts.append((2, width, 3, 4, 2))
    if shape is not None:
        layouts = [(2, *shape[1:]) if len(shape) > 1 else shape]
    return [torch.randn(s, generator=generator, dtype=torch.float64) * 2 + 0.3 for s in layouts]


def _compare(old: nn.Module, fresh: nn.Module, x: Tensor) -> float | None:
    """``None`` where one of the two does not take such inputs."""
    with true_float64():
        try:
            expected = old(x)
        except Exception:
            return None
        try:
            found = fresh(x)
            for child in old.children():  # an activation inside the old norm follows the new one
                found = child(found)
        except Exception:
            return None
    if not isinstance(expected, Tensor) or expected.shape != x.shape:
        return None
    if not isinstance(found, Tensor) or found.shape != x.shape:
        return float("inf")
    scale = float(expected.abs().max().clamp_min(1e-12))
    return float((expected - found).abs().max()) / scale


def why_not_equivalent(site: NormSite, new: NewNorm, error: float | None) -> str:
    """In words what the comparison found."""
    assert site.spec is not None
    kind = type(new.module).__name__
    if error is None:
        return f"{kind} could not be compared with it"
    return (
        f"{kind} is another function than this {site.spec.kind} norm (they differ by {error:.2g})"
    )
