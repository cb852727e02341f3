"""A module by itself: a copy with random float64 tensors that can be run without any trace."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from normswap.precision import true_float64

__all__ = [
    "Alone",
    "Conditioned",
    "FirstResult",
    "Follower",
    "Runnable",
    "everybody",
    "isolated",
    "nobody",
    "own_tensors",
]

Draw = Callable[[str, Tensor], Tensor]
Follow = Callable[[nn.Module], bool]


def everybody(_: nn.Module) -> bool:
    """Put a :class:`Follower` in place of every child."""
    return True


def nobody(_: nn.Module) -> bool:
    """Copy the children too."""
    return False


def own_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The module's own floating parameters and buffers, without those of its children."""
    own = [*module._parameters.items(), *module._buffers.items()]
    return {n: t for n, t in own if t is not None and t.is_floating_point()}


class Follower(nn.Module):
    """Stands for a child module: passes its input on and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """The input; hooks for all modules do not see it."""
        self.seen = x
        return x


class Alone:
    """A module by itself: a copy with random float64 tensors that can be run without any trace.

    Children are replaced by :class:`Follower` (all, or those that `follow` says). The tensors are
    drawn from ``[0.5, 1.5]``, all different, so that each can be told by its values.

    Attributes:
        tensors: the copy's own floating tensors by name.
        followers: what stands for its children.
        failure: what the last failed run said.
    """

    def __init__(self, module: nn.Module, follow: Follow | None = None) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self.tensors: dict[str, Tensor] = {}
        self.module = isolated(module, self._draw, follow=follow or everybody).eval()
        for slots in (self.module._parameters, self.module._buffers):
            own = {n: t for n, t in slots.items() if t is not None and t.is_floating_point()}
            self.tensors.update({n: t for n, t in own.items() if t.dim() or _is_parameter(t)})
        self.followers: dict[str, Follower] = {
            n: c for n, c in self.module._modules.items() if isinstance(c, Follower)
        }
        self.failure = ""

    def _draw(self, _: str, like: Tensor) -> Tensor:
        return 0.5 + torch.rand(like.shape, generator=self._generator, dtype=torch.float64)

    def redraw(self, signed: tuple[str | None, ...] = ()) -> None:
        """New values for every tensor; those named also negative and larger ones."""
        for name, tensor in self.tensors.items():
            value = self._draw(name, tensor)
            if name in signed:
                value = 6 * value - 6
            tensor.data.copy_(value)

    def random(self, shape: tuple[int, ...], offset: float = 0.3) -> Tensor:
        """A random input, normal around ``offset``."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float64) + offset

    def run(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """What the module returns, in true float64; ``None`` if it fails."""
        for follower in self.followers.values():
            follower.seen = None
        try:
            with true_float64():
                # The class's own forward: no hook runs, of this module or for all modules.
                return type(self.module).forward(
                    self.module,
                    *(a.clone() for a in args),
                    **{n: a.clone() for n, a in kwargs.items()},
                )
        except Exception as error:
            self.failure = f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]
            return None

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> Tensor | None:
        """The result if it is a tensor of the first input's shape, else ``None``."""
        result = self.run(*args, **kwargs)
        if not isinstance(result, Tensor) or result.shape != args[0].shape:
            return None
        return result.to(torch.float64).clone()


class Conditioned:
    """A module of two inputs with one of them fixed: run and drawn from as an :class:`Alone`.

    Args:
        alone: the module.
        other: the fixed input.
        first: whether the free input comes first.
        name: of the fixed input, if it is given by keyword.
    """

    def __init__(
        self, alone: Alone, other: Tensor, *, first: bool, name: str | None = None
    ) -> None:
        self._alone, self._other, self._first, self._name = alone, other, first, name
        self.random = alone.random

    def __call__(self, x: Tensor) -> Tensor | None:
        """The result, or the one of several that belongs to the free input."""
        if self._name is not None:
            result = self._alone.run(x, **{self._name: self._other})
        else:
            result = self._alone.run(*(x, self._other)[:: 1 if self._first else -1])
        return _of_shape(result, x, 0 if self._first else -1)


class FirstResult:
    """A module that returns several tensors, of which only the first is looked at."""

    def __init__(self, alone: Alone) -> None:
        self._alone = alone
        self.random = alone.random

    def __call__(self, x: Tensor) -> Tensor | None:
        """The first of the results."""
        return _of_shape(self._alone.run(x), x, 0)


def _of_shape(result: Any, x: Tensor, position: int) -> Tensor | None:
    """A tensor of the input's shape, or that one of several; else ``None``."""
    if isinstance(result, (tuple, list)) and result:
        result = result[position]
    if not isinstance(result, Tensor) or result.shape != x.shape:
        return None
    return result.to(torch.float64).clone()


class Runnable(Protocol):
    """What can be run on a tensor and draws inputs for itself."""

    def __call__(self, x: Tensor, /) -> Tensor | None:
        """The result, if it is a tensor of the input's shape."""
        ...

    def random(self, shape: tuple[int, ...], offset: float = 0.3) -> Tensor:
        """A random input."""
        ...


def isolated(module: nn.Module, draw: Draw, *, follow: Follow) -> nn.Module:
    """A copy that shares no tensor, hook or container with the module, on the CPU in float64.

    Args:
        module: what is copied; its tensors may be on the meta device.
        draw: gives the values of a floating parameter or buffer.
        follow: in place of which children to put a :class:`Follower`.
    """
    copy = module.__class__.__new__(module.__class__)
    state = {n: v for n, v in module.__dict__.items() if n not in _DROPPED}
    for name, value in state.items():
        is_hooks = name.startswith("_") and "hook" in name and isinstance(value, dict)
        copy.__dict__[name] = OrderedDict() if is_hooks else _detached(value)
    copy.__dict__["_parameters"] = {
        n: None if p is None else nn.Parameter(draw(n, p), requires_grad=False)
        for n, p in module._parameters.items()
    }
    copy.__dict__["_buffers"] = {n: _buffer(n, b, draw) for n, b in module._buffers.items()}
    copy.__dict__["_modules"] = {
        n: None if c is None else Follower() if follow(c) else isolated(c, draw, follow=follow)
        for n, c in module._modules.items()
    }
    return copy


# An instance's own forward is a wrapper bound to the original (see `candidates.why_not`).
_DROPPED = {"_parameters", "_buffers", "_modules", "forward", "_old_forward", "_compiled_call_impl"}


def _is_parameter(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def _buffer(name: str, buffer: Tensor | None, draw: Draw) -> Tensor | None:
    if buffer is None:
        return None
    if buffer.is_floating_point() and buffer.dim() > 0:
        return draw(name, buffer)
    if buffer.is_meta and not buffer.is_floating_point():  # a counter
        return torch.zeros(buffer.shape, dtype=buffer.dtype)
    return _detached(buffer)  # a constant, such as an eps


def _detached(value: Any) -> Any:
    """A copy of the containers and tensors in an attribute.

    Raises:
        ValueError: a tensor that is no parameter and no vector has no values: what is computed
            may hang on them.
    """
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ValueError("a constant of it is on the meta device")
        copy = value.detach().to("cpu", copy=True)
        return copy.to(torch.float64) if copy.is_floating_point() else copy
    if type(value) in (list, tuple, set):
        return type(value)(_detached(v) for v in value)
    if type(value) is dict:
        return {k: _detached(v) for k, v in value.items()}
    return value
