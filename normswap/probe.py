"""Recognise a norm by what it computes: run it alone on random float64 parameters and inputs."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from normswap.precision import true_float64
from normswap.spec import NormSpec

_TOLERANCE = 1e-9  # true float64: what does not fit to this is something else
_cache: dict[object, NormSpec | None] = {}


def probe_fixed_affine(module: nn.Module) -> NormSpec | None:
    """The spec of a module that computes a BatchNorm in eval from stored statistics, or ``None``.

    The roles of its tensors are found by trying: ``y = (x - m) / sqrt(v + eps) * w + b`` with the
    one assignment of ``m, v, w, b`` to the module's tensors under which the same ``eps`` explains
    every channel. Children (an activation behind it) are taken out first. Values do not matter,
    so this works on the meta device; the result is cached by class and configuration.
    """
    tensors = _vectors(module)
    if not 2 <= len(tensors) <= 4:
        return None
    key = _configuration(module)
    if key not in _cache:
        _cache[key] = _probe(module, tensors)
    return _cache[key]


def _vectors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own floating tensors, if all are vectors of one size; else nothing."""
    own = [*module._parameters.items(), *module._buffers.items()]
    tensors = {n: t for n, t in own if t is not None and t.is_floating_point()}
    sizes = {max(t.shape, default=1) for t in tensors.values()}
    vectors = all(t.numel() == max(t.shape, default=1) for t in tensors.values())
    return tensors if len(sizes) == 1 and vectors else {}


def _configuration(module: nn.Module) -> object:
    numbers = {
        n: v
        for n, v in module.__dict__.items()
        if isinstance(v, (int, float, str, bool)) and not n.startswith("_")
    }
    shapes = {n: tuple(t.shape) for n, t in _vectors(module).items()}
    return type(module), tuple(sorted(numbers.items(), key=str)), tuple(sorted(shapes.items()))


def _probe(module: nn.Module, tensors: dict[str, Tensor]) -> NormSpec | None:
    generator = torch.Generator().manual_seed(0)
    drawn = {
        n: torch.rand(t.shape, generator=generator, dtype=torch.float64) + 0.5
        for n, t in tensors.items()
    }
    memo: dict[int, object] = {id(t): _like(t, drawn[n]) for n, t in tensors.items()}
    followers = [_Follower() for _ in module.children()]
    memo.update({id(c): f for c, f in zip(module.children(), followers, strict=True)})
    try:
        alone = copy.deepcopy(module, memo).eval()
    except Exception:
        return None
    for slots in ("_forward_hooks", "_forward_pre_hooks"):
        getattr(alone, slots).clear()
    size = next(iter(drawn.values())).numel()
    for shape in ((2, size, 3, 4), (2, size, 3), (2, size), (2, size, 3, 4, 2)):
        measured = _measure(alone, shape, generator)
        if measured is not None and all(f.follows for f in followers):
            return _fit(drawn, *measured)
    return None


class _Follower(nn.Module):
    """Stands for a child module: passes its input on, and sees whether that is the result."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.follows = True

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x


def _like(original: Tensor, value: Tensor) -> Tensor:
    value = value.clone()
    return nn.Parameter(value, requires_grad=False) if isinstance(original, nn.Parameter) else value


def _measure(
    alone: nn.Module, shape: tuple[int, ...], generator: torch.Generator
) -> tuple[Tensor, Tensor] | None:
    """Scale and shift for each channel, if ``y = s * x + t`` with both fixed; else ``None``."""
    a, b = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    try:
        with true_float64():
            at_zero, at_a, at_b = (alone(x) for x in (torch.zeros_like(a), a, b))
    except Exception:
        return None
    for child in alone.children():
        if isinstance(child, _Follower) and child.seen is not None:  # runs behind, not in front
            child.follows = child.seen.shape == at_b.shape and torch.equal(child.seen, at_b)
    if not isinstance(at_a, Tensor) or at_a.shape != a.shape:
        return None
    at_zero, at_a, at_b = (y.to(torch.float64) for y in (at_zero, at_a, at_b))
    slope = ((at_a - at_zero) / a).movedim(1, 0).flatten(1)
    shift = at_zero.movedim(1, 0).flatten(1)
    scale, offset = slope[:, 0], shift[:, 0]
    view = [1, -1] + [1] * (a.dim() - 2)
    predicted = b * scale.reshape(view) + offset.reshape(view)
    if not torch.allclose(predicted, at_b, rtol=_TOLERANCE, atol=_TOLERANCE):
        return None
    return scale, offset


def _fit(tensors: dict[str, Tensor], scale: Tensor, shift: Tensor) -> NormSpec | None:
    """The roles of the tensors and the eps under which scale and shift come out."""
    ones, zeros = torch.ones_like(scale), torch.zeros_like(scale)
    for roles in _assignments(list(tensors)):
        value = {role: tensors[name].reshape(-1) for role, name in roles.items()}
        weight, bias = value.get("weight", ones), value.get("bias", zeros)
        eps = (weight / scale) ** 2 - value["var"]
        spread = float((eps - eps.mean()).abs().max())
        expected = bias - value["mean"] * scale
        fits = torch.allclose(expected, shift, rtol=_TOLERANCE, atol=_TOLERANCE)
        same_sign = bool((weight * scale > 0).all())
        if fits and same_sign and spread < _TOLERANCE and float(eps.mean()) > -_TOLERANCE:
            return NormSpec(
                "frozen_batch",
                (0, 2, 3),
                _rounded(float(eps.mean())),
                weight=roles.get("weight"),
                bias=roles.get("bias"),
                mean=roles["mean"],
                var=roles["var"],
            )
    return None


def _assignments(names: list[str]) -> Iterator[dict[str, str]]:
    optional = {2: [()], 3: [("weight",), ("bias",)], 4: [("weight", "bias")]}
    for extra in optional[len(names)]:
        for order in itertools.permutations(names):
            yield dict(zip(("mean", "var", *extra), order, strict=True))


def _rounded(eps: float) -> float:
    """The short decimal that was meant, as far as the measurement can tell."""
    if eps < 10 * _TOLERANCE * 1e-3:
        return 0.0
    return float(f"{eps:.3g}")
