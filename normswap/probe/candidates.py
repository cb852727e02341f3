"""Which modules are worth a probe: leaf modules with few, vector-like tensors of one size."""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normswap.probe.alone import own_tensors

__all__ = ["MATRIX", "Signature", "configuration", "signature", "why_not"]

_MOST_TENSORS = 6
_MOST_ENTRIES = 2**21
_MOST_CHILDREN = 4
_DEPTH = 6  # of nested containers and objects, such as a configuration, that are looked into
MATRIX = "a child has a matrix"


@dataclass(frozen=True)
class Signature:
    """The parameters of a forward without defaults, and the further ones that default to None."""

    required: tuple[str, ...]
    optional: tuple[str, ...]


def why_not(module: nn.Module) -> str | None:
    """Why a module cannot be a norm, by its structure alone; ``None`` if it may be one."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a script"
    if cls.__module__.startswith("torch.") and not _is_norm_file(cls.__module__):
        return "it is a module of PyTorch that is no norm"
    if cls.forward is nn.Module.forward:
        return "it has no forward"
    tensors = own_tensors(module)
    if len(tensors) > _MOST_TENSORS:
        return "it has too many tensors"
    large = {tuple(s for s in t.shape if s != 1) for t in tensors.values() if t.numel() > 1}
    if len({math.prod(shape) for shape in large}) > 1:
        return "its tensors are of different sizes"
    if len({shape for shape in large if len(shape) > 1}) > 1:
        return "its tensors are of different shapes"
    if any(math.prod(shape) > _MOST_ENTRIES for shape in large):
        return "its tensors are too large"
    return _why_not_children(module)


def _is_norm_file(module: str) -> bool:
    return module.endswith((".batchnorm", ".instancenorm", ".normalization"))


def _why_not_children(module: nn.Module) -> str | None:
    children = [c for c in module._modules.values() if c is not None]
    if len(children) > _MOST_CHILDREN or sum(1 for _ in module.modules()) > 2 * _MOST_CHILDREN + 1:
        return "it has too many children"
    for child in children:
        for inner in child.modules():
            if any(_is_matrix(t) for t in own_tensors(inner).values()):
                return MATRIX
    return None


def _is_matrix(tensor: Tensor) -> bool:
    return sum(size > 1 for size in tensor.shape) > 1


@functools.lru_cache(maxsize=1024)
def signature(cls: type[nn.Module]) -> Signature | None:
    """What the forward of a class takes; ``None`` if that cannot be told."""
    try:
        parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p.name for p in named if p.default is p.empty]
    if not named and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        required = ["input"]
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return None
    optional = [p.name for p in parameters if p.default is None]
    if not required and named:  # a first input that may be left out
        required = [named[0].name]
    return Signature(tuple(required), tuple(n for n in optional if n not in required))


# -- the key of the cache -------------------------------------------------------------------------


class _NoKey(Exception):  # noqa: N818
    """Something that the result may hang on cannot be compared."""


def configuration(module: nn.Module) -> object | None:
    """Equal for modules that compute the same up to their tensors; ``None`` if not known."""
    try:
        return type(module), _key(_settings(module), _DEPTH), tuple(_shapes(module))
    except _NoKey:
        return None


def _settings(module: nn.Module) -> dict[str, Any]:
    return {n: v for n, v in module.__dict__.items() if not _is_internal(n)}


# What is set beside a module's own settings: by torch.compile, transformers and accelerate.
_BESIDE = {"_compiled_call_impl", "_is_hf_initialized", "_hf_hook", "_old_forward", "forward"}
_INTERNAL = set(nn.Module().__dict__) | _BESIDE


def _is_internal(name: str) -> bool:
    return name in _INTERNAL


def _shapes(module: nn.Module) -> list[object]:
    rows: list[object] = []
    for kind, slots in (("p", module._parameters), ("b", module._buffers)):
        for name, tensor in slots.items():
            described = None if tensor is None else (tuple(tensor.shape), str(tensor.dtype))
            value = None
            if kind == "b" and tensor is not None and tensor.dim() == 0 and _is_constant(tensor):
                value = float(tensor)
            rows.append((kind, name, described, value))
    for name, child in module._modules.items():
        key = None if child is None else configuration(child)
        if child is not None and key is None:
            raise _NoKey
        rows.append((name, key))
    return rows


def _is_constant(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.is_floating_point()


_PLAIN = (int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type)
_CODE = (types.FunctionType, types.BuiltinFunctionType)


def _key(value: Any, depth: int) -> object:
    if isinstance(value, (*_PLAIN, *_CODE)):
        return type(value), value
    if depth == 0:
        raise _NoKey
    if isinstance(value, Mapping):
        return tuple((_key(k, depth), _key(v, depth - 1)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return type(value), tuple(_key(v, depth - 1) for v in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(_key(v, depth - 1) for v in value)
    if isinstance(value, (Tensor, nn.Module)) or not hasattr(value, "__dict__"):
        raise _NoKey
    return type(value), _key(vars(value), depth - 1)
