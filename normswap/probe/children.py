"""Children of a norm: an activation behind it is named, anything else is not guessed at."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from normswap.precision import true_float64
from normswap.probe.alone import Alone, isolated, nobody
from normswap.probe.outcome import Outcome
from normswap.spec import NormSpec, Unknown

__all__ = ["with_children"]


def with_children(
    module: nn.Module, alone: Alone, shape: tuple[int, ...], outcome: NormSpec | Unknown
) -> Outcome:
    """Its children: an activation behind the norm is named, anything else cannot be told."""
    x = alone.random(shape)
    y = alone(x)
    applied: list[str] = []
    for name, follower in alone.followers.items():
        if follower.seen is None:
            continue
        if y is None or follower.seen.shape != y.shape or not torch.equal(follower.seen, y):
            return Unknown("welded", f"its child {name!r} is not applied to its result")
        child = module._modules[name]
        assert child is not None
        action = _action(child, shape)
        if action is None:
            return Unknown("welded", f"its child {name!r} is no activation")
        applied += [name] if action == "pointwise" else []
    if len(applied) > 1:
        return Unknown("welded", f"several children are applied to its result: {applied}")
    if isinstance(outcome, NormSpec) and applied:
        return replace(outcome, activation=applied[0])
    return outcome


def _action(child: nn.Module, shape: tuple[int, ...]) -> str | None:
    """``"identity"``, ``"pointwise"``, or ``None`` for a child that mixes entries."""
    generator = torch.Generator().manual_seed(2)

    def draw(_: str, like: Tensor) -> Tensor:
        return 0.5 + torch.rand(like.shape, generator=generator, dtype=torch.float64)

    copy = isolated(child, draw, follow=nobody).eval()
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    moved = x.clone()
    moved[(0,) * len(shape)] += 1.5
    try:
        with true_float64():
            y, after = (type(copy).forward(copy, v.clone()) for v in (x, moved))
    except Exception:
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    if torch.equal(y, x):
        return "identity"
    return "pointwise" if int((y != after).sum()) <= 1 else None
