"""Keep the tensors of our runs out of the caches that modelling code holds in functions.

A function under ``functools.lru_cache`` that makes a table of positions keeps what it made during
a run on fake tensors or in float64, and hands it to the user's own next run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, ModuleType
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
    imported = len(sys.modules)
    try:
        yield
    finally:
        # Only an import that the block made can have brought other caches.
        caches = before if len(sys.modules) == imported else {*before, *_caches(model)}
        for cache in caches:
            if cache.cache_info().misses != before.get(cache, 0):
                cache.cache_clear()


def _caches(model: nn.Module) -> Iterator[_Cache[Any]]:
    classes = {cls for module in model.modules() for cls in type(module).__mro__}
    classes = {cls for cls in classes if _root(cls.__module__) not in _FOREIGN}
    held = {v for m in model.modules() for v in vars(m).values() if isinstance(v, FunctionType)}
    for module in model.modules():
        yield from _caches_in(vars(module).values())
    for cls in classes:
        yield from _caches_in(list(vars(cls).values()))
    names = {code.__module__ for code in (*classes, *held)}
    roots = {_root(name) for name in names}
    for name in names:
        roots |= {_root(_origin(value)) for value in _namespace(name).values()}
    for name in list(sys.modules):
        if _root(name) in roots - _FOREIGN:
            yield from _caches_of_module(name)


def _caches_of_module(name: str) -> Iterator[_Cache[Any]]:
    values = list(_namespace(name).values())
    yield from _caches_in(values)
    for value in values:
        if isinstance(value, type) and value.__module__ == name:
            yield from _caches_in(list(vars(value).values()))


def _root(name: str) -> str:
    return name.partition(".")[0]


def _namespace(name: str) -> dict[str, Any]:
    return getattr(sys.modules.get(name), "__dict__", {})


def _origin(value: Any) -> str:
    """The module that a module, function or class in a namespace comes from."""
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, (FunctionType, type, _Cache)):
        return getattr(value, "__module__", None) or ""
    return ""


def _caches_in(values: Iterable[Any]) -> Iterator[_Cache[Any]]:
    """Caches among the values, also inside a static or class method or a decorated function."""
    for value in values:
        inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        cells = (inner.__closure__ or ()) if isinstance(inner, FunctionType) else ()
        for held in (inner, *map(_content, cells)):
            if isinstance(held, _Cache):
                yield held


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # still empty
        return None
