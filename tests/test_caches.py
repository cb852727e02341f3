"""Function caches of a model's code forget what one block made them keep."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap.caches import forget_cached


@lru_cache
def plain(size: int) -> Tensor:
    return torch.zeros(size)


def remembering(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    cached = lru_cache(fn)

    @wraps(fn)
    def wrapper(*args: Any) -> Tensor:
        return cached(*args)

    return wrapper


@remembering
def decorated(size: int) -> Tensor:
    return torch.zeros(size)


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = lru_cache(torch.zeros)

    @staticmethod
    @lru_cache
    def static(size: int) -> Tensor:
        return torch.zeros(size)

    @lru_cache  # noqa: B019
    def method(self, size: int) -> Tensor:
        return torch.zeros(size)

    __hash__ = nn.Module.__hash__


def inside_a_function() -> type[nn.Module]:
    class Local(nn.Module):
        @staticmethod
        @lru_cache
        def table(size: int) -> Tensor:
            return torch.zeros(size)

    return Local


MODEL = Uses()
LOCAL = inside_a_function()()
CACHED: dict[str, tuple[nn.Module, Callable[[int], Tensor]]] = {
    "function": (MODEL, plain),
    "decorated function": (MODEL, decorated),
    "attribute": (MODEL, MODEL.own),
    "static method": (MODEL, MODEL.static),
    "method": (MODEL, MODEL.method),
    "class in a function": (LOCAL, LOCAL.table),  # type: ignore[dict-item]
    "inside another module": (nn.Sequential(nn.ReLU(), MODEL), MODEL.own),
}


@pytest.mark.parametrize("name", CACHED)
def test_what_a_block_cached_is_forgotten(name: str) -> None:
    model, fn = CACHED[name]
    size = list(CACHED).index(name)  # not cached by another case
    with forget_cached(model):
        inside = fn(size)
        assert fn(size) is inside
    assert fn(size) is not inside
    kept = fn(size)
    with forget_cached(model):
        assert fn(size) is kept
    assert fn(size) is kept  # the block added nothing


def test_an_error_in_the_block_forgets_too() -> None:
    inside: list[Tensor] = []

    def fail() -> None:
        with forget_cached(MODEL):
            inside.append(plain(70))
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert plain(70) is not inside[0]
