"""The norms of torch.nn, read off their attributes: only exact types, no subclass."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from normswap.spec import NormSpec

__all__ = ["stock_spec"]

_RANKS: dict[type[nn.Module], int] = {
    nn.BatchNorm1d: 3,
    nn.BatchNorm2d: 4,
    nn.BatchNorm3d: 5,
    nn.SyncBatchNorm: 4,
    nn.InstanceNorm1d: 3,
    nn.InstanceNorm2d: 4,
    nn.InstanceNorm3d: 5,
}


def stock_spec(module: nn.Module) -> NormSpec | None:
    """The spec of a module whose type is exactly a norm of torch.nn, else ``None``."""
    cls = type(module)
    if isinstance(module, nn.LayerNorm) and cls is nn.LayerNorm:
        return _over_last(module, "layer", module.eps, _name(module, "bias"))
    if isinstance(module, nn.RMSNorm) and cls is nn.RMSNorm:
        return _rms_norm(module)
    if isinstance(module, nn.GroupNorm) and cls is nn.GroupNorm:
        return _group_norm(module)
    if isinstance(module, nn.LocalResponseNorm) and cls is nn.LocalResponseNorm:
        window = (module.size, module.alpha, module.beta)
        return NormSpec("response", (1,), module.k, window=window)
    return _over_batch_or_space(module) if cls in _RANKS else None


def _name(module: nn.Module, name: str) -> str | None:
    return name if getattr(module, name, None) is not None else None


def _over_last(
    module: nn.LayerNorm | nn.RMSNorm, kind: str, eps: float, bias: str | None
) -> NormSpec:
    axes = tuple(range(-len(module.normalized_shape), 0))
    weight = _name(module, "weight")
    return NormSpec(
        kind,
        axes,
        eps,
        weight=weight,
        bias=bias,
        cast_order=None if weight is None else "after",
        affine_axes=axes if weight or bias else (),
        normalized_shape=tuple(module.normalized_shape),
    )


def _rms_norm(module: nn.RMSNorm) -> NormSpec:
    if module.eps is not None:
        return _over_last(module, "rms", module.eps, None)
    spec = _over_last(module, "rms", torch.finfo(torch.float32).eps, None)
    return replace(spec, machine_eps=True)


def _group_norm(module: nn.GroupNorm) -> NormSpec:
    weight = _name(module, "weight")
    return NormSpec(
        "group",
        (1, 2, 3),
        module.eps,
        weight=weight,
        bias=_name(module, "bias"),
        cast_order=None if weight is None else "after",
        groups=module.num_groups,
        affine_axes=(1,) if weight else (),
        normalized_shape=(module.num_channels,) if weight else None,
    )


def _over_batch_or_space(module: nn.Module) -> NormSpec:
    """BatchNorm and InstanceNorm; they have the same attributes."""
    rank = _RANKS[type(module)]
    kind, first = ("instance", []) if "Instance" in type(module).__name__ else ("batch", [0])
    named = {
        "weight": _name(module, "weight"),
        "bias": _name(module, "bias"),
        "mean": _name(module, "running_mean"),
        "var": _name(module, "running_var"),
    }
    channels = any(named.values())
    eps, features = module.eps, module.num_features
    assert isinstance(eps, float)
    assert isinstance(features, int)
    spec = NormSpec(
        kind,
        (*first, *range(2, rank)),
        eps,
        affine_axes=(1,) if channels else (),
        normalized_shape=(features,) if channels else None,
    )
    return replace(spec, **named)
