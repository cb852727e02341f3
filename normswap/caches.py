"""Keep the tensors of our runs out of the caches that modelling code holds in functions.

A function under ``functools.lru_cache`` that makes a table of positions keeps what it made during
a run on fake tensors or in float64, and hands it to the user's own next run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import nn

__all__ = ["forget_cached"]

_Cache = functools._lru_cache_wrapper
_FOREIGN = {"torch", "numpy", "builtins", *sys.stdlib_module_names} - {"__main__"}


@contextmanager
def forget_cached(model: nn.Module) -> Generator[None]:
    """Empty every function cache of the model's code that the block added to.

    Looked at are the packages that the model's classes come from and those that they use; what
    such a cache held before is then computed again when it is next needed.
    """
    before = {cache: cache.cache_info().misses for cache in _caches(model)}
    try:
        yield
    finally:
        for cache in set(_caches(model)):
            if cache.cache_info().misses != before.get(cache, 0):
                cache.cache_clear()


def _caches(model: nn.Module) -> Iterator[_Cache[Any]]:
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    for module in model.modules():
        yield from _caches_in(vars(module).values())
    packages: set[str] = set()
    for name in {cls.__module__ for cls in classes}:
        packages.add(name)
        for value in _namespace(sys.modules.get(name)).values():
            used = value.__name__ if isinstance(value, ModuleType) else _module_of(value)
            packages.add(used)
    roots = {package.partition(".")[0] for package in packages} - _FOREIGN
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in roots:
            for value in list(_namespace(module).values()):
                yield from _caches_in([value])
                if isinstance(value, type) and value.__module__ == name:
                    yield from _caches_in(list(vars(value).values()))
    # Classes made inside functions are in no namespace.
    for cls in classes:
        if cls.__module__.partition(".")[0] not in _FOREIGN:
            yield from _caches_in(list(vars(cls).values()))


def _namespace(module: Any) -> dict[str, Any]:
    return getattr(module, "__dict__", {})


def _module_of(value: Any) -> str:
    if not isinstance(value, (FunctionType, type, _Cache)):
        return ""
    return getattr(value, "__module__", None) or ""


def _caches_in(values: Any) -> Iterator[_Cache[Any]]:
    """Caches among the values, also wrapped in a method, a decorator or a partial."""
    for value in values:
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        if isinstance(value, _Cache):
            yield value
        elif isinstance(value, FunctionType) and value.__closure__:
            for cell in value.__closure__:
                try:
                    held = cell.cell_contents
                except ValueError:  # the cell is still empty
                    continue
                if isinstance(held, _Cache):
                    yield held
