"""Where a norm that computes in float32 casts half inputs back: before its gamma or after it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from normswap.probe.alone import everybody, isolated, own_tensors
from normswap.probe.form import compute
from normswap.spec import NormSpec

__all__ = ["cast_order"]

_ENTRIES = 2**12  # enough for the share of entries that differ to be told
_OTHERS = ("affine", "dyt", "derf", "grn", "response")


def cast_order(module: nn.Module, spec: NormSpec, shape: tuple[int, ...]) -> str | None:
    """``"before"`` or ``"after"`` gamma, by which of the two its bfloat16 results agree with.

    A few entries may round differently with the order of a sum in float32; one of the two orders
    has to explain nearly all entries and the other clearly fewer.
    """
    if spec.weight is None or spec.mean is not None or spec.kind in _OTHERS:
        return None
    generator = torch.Generator().manual_seed(1)

    def draw(_: str, like: Tensor) -> Tensor:
        return (0.5 + torch.rand(like.shape, generator=generator)).to(torch.bfloat16)

    rows = max(2, min(64, _ENTRIES * shape[0] // math.prod(shape)))
    shape = (rows, *shape[1:])
    alone = isolated(module, draw, follow=everybody).eval()
    x = (torch.randn(shape, generator=generator) + 0.3).to(torch.bfloat16)
    try:
        with torch.inference_mode():
            y = type(alone).forward(alone, x.clone())
    except Exception:
        return None
    if not isinstance(y, Tensor) or y.dtype != torch.bfloat16:
        return None
    wrong = {
        order: min(float((y != e).double().mean()) for e in expected)
        for order, expected in _expected(spec, x, own_tensors(alone)).items()
    }
    best, other = sorted(wrong, key=lambda order: wrong[order])
    return best if wrong[best] < 0.02 and wrong[other] > 2 * wrong[best] + 0.02 else None


def _expected(spec: NormSpec, x: Tensor, tensors: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """The results of both orders; with an offset also those where 1 is added in half precision."""
    results: dict[str, list[Tensor]] = {"after": [], "before": []}
    for added_in in (torch.float32, torch.bfloat16) if spec.unit_offset else (torch.float32,):
        plain, gamma = replace(spec, unit_offset=False), dict(tensors)
        if spec.unit_offset and spec.weight is not None:
            gamma[spec.weight] = gamma[spec.weight].to(added_in) + 1
        full = {n: t.float() for n, t in gamma.items()}
        results["after"].append(compute(plain, x.float(), full).to(torch.bfloat16))
        results["before"].append(_cast_before(plain, x, gamma))
    return results


def _cast_before(spec: NormSpec, x: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    bare = replace(spec, weight=None, bias=None)
    normalised = compute(bare, x.float(), {}).to(torch.bfloat16)
    only_affine = replace(spec, kind="affine")
    return compute(only_affine, normalised, tensors).to(torch.bfloat16)
