"""What a model returned: the tensors in it by path, and how far two such results are apart."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from normswap.errors import NormswapError

__all__ = ["Difference", "difference", "flatten", "tensors_by_path"]

# Outputs below this size count as having it: what is left of a value that cancels to zero is
# rounding, and no relative error can be told for it.
_TINY = 1e-12


@dataclass(frozen=True)
class Difference:
    """How far a result is from a reference.

    ``max_rel`` is ``max|a - b| / max(max|a|, 1e-12)`` of the worst tensor, at the path ``where``.
    ``problem`` says what cannot be measured so: outputs that are missing, of another shape, or
    not finite at other places (``kind`` tells these apart); the numbers are infinite then.
    ``compared`` counts the values. ``note`` names integer outputs that differ where that was
    allowed.
    """

    max_abs: float = 0.0
    max_rel: float = 0.0
    where: str = ""
    compared: int = 0
    kind: str = ""  # "structure" | "shape" | "non-finite" | "integer"
    problem: str = ""
    note: str = ""


def flatten(value: Any, chosen: Collection[str] | None = None) -> dict[str, Tensor]:
    """Copies of the tensors and numbers in ``value`` by path, such as ``[0].logits``.

    ``chosen`` holds globs of the paths to return; ``None`` for all.

    Looks into lists, tuples, mappings, dataclasses and other objects with a ``__dict__``; modules,
    texts and ``None`` are left out. Numbers become tensors without axes.
    """
    leaves = {path.lstrip("."): leaf for path, leaf in _leaves(value, "", [])}
    return {path: _as_tensor(leaves[path]) for path in choose(leaves, chosen)}


def tensors_by_path(value: Any, chosen: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors themselves, by path.

    Raises:
        NormswapError: ``chosen`` names none of them.
    """
    leaves = {path.lstrip("."): leaf for path, leaf in _leaves(value, "", [])}
    found = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor)}
    kept = choose(found, chosen)
    if chosen is not None and not kept:
        raise NormswapError(
            f"outputs={list(chosen)} names none of what the model returns: {', '.join(found)}"
        )
    return {path: found[path] for path in kept}


def choose(paths: Iterable[str], chosen: Collection[str] | None) -> list[str]:
    """The paths that one of the globs fits; all of them for ``None``."""
    if chosen is None:
        return list(paths)
    return [p for p in paths if any(fnmatch.fnmatchcase(p, glob) for glob in chosen)]


def _leaves(value: Any, path: str, above: list[int]) -> Iterator[tuple[str, Any]]:
    is_array = type(value).__module__ == "numpy" and getattr(value, "dtype", "O") != "O"
    if isinstance(value, (Tensor, bool, int, float, complex)) or is_array:
        yield path, value
    elif id(value) not in above:  # an object may lead back to itself
        for name, item in _items(value):
            yield from _leaves(item, path + name, [*above, id(value)])


def _as_tensor(leaf: Any) -> Tensor:
    if isinstance(leaf, Tensor):
        return _plain(leaf)
    if isinstance(leaf, (bool, int, float, complex)):
        return torch.tensor(leaf, dtype=_dtype_of(leaf), device="cpu")
    return torch.as_tensor(leaf).clone()


def _plain(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    if tensor.is_quantized:
        return tensor.dequantize()
    if tensor.layout != torch.strided:
        return tensor.to_dense()
    return tensor.clone()


def _dtype_of(value: complex) -> torch.dtype:
    if isinstance(value, (bool, int)):
        return torch.bool if isinstance(value, bool) else torch.int64
    return torch.float64 if isinstance(value, float) else torch.complex128


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, item in cast("Mapping[Any, Any]", value).items():
            yield (f".{key}" if isinstance(key, str) else f"[{key!r}]"), item
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(cast("list[Any]", value)):
            yield f"[{index}]", item
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield f".{field.name}", getattr(value, field.name)
    elif not isinstance(value, (nn.Module, type)) and not callable(value):
        for name, item in getattr(value, "__dict__", {}).items():
            yield f".{name}", item


def difference(
    reference: Mapping[str, Tensor], other: Mapping[str, Tensor], *, exact_integers: bool
) -> Difference:
    """How far ``other`` is from ``reference``, both from `flatten`.

    With ``exact_integers`` integer and boolean outputs must be equal; else a difference is noted.
    """
    if reference.keys() != other.keys():
        odd = min(reference.keys() ^ other.keys())
        return _problem("structure", f"output {odd or 'itself'!r} is there in only one of the two")
    worst = Difference()
    notes: list[str] = []
    for path, a in reference.items():
        found = _leaf_difference(path, a, other[path])
        if found.kind == "integer" and not exact_integers:
            notes.append(found.problem)
            continue
        if found.problem:
            return found
        larger = found if found.max_rel >= worst.max_rel and found.compared else worst
        worst = dataclasses.replace(
            larger,
            max_abs=max(found.max_abs, worst.max_abs),
            compared=found.compared + worst.compared,
        )
    return dataclasses.replace(worst, note="; ".join(notes))


def _problem(kind: str, text: str, where: str = "") -> Difference:
    return Difference(float("inf"), float("inf"), where, 0, kind, text)


def _leaf_difference(path: str, a: Tensor, b: Tensor) -> Difference:
    name = f"output {path!r}" if path else "the output"
    if a.shape != b.shape:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        return _problem("shape", f"{name} has the shapes {shapes}", path)
    b = b.to(a.device)
    if not (_is_real(a) or _is_real(b)):
        wrong = int((a != b).sum())
        text = f"{name} differs in {wrong} of {a.numel()} integers"
        agree = Difference(where=path, compared=a.numel())
        return _problem("integer", text, path) if wrong else agree
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    if a.numel() == 0:
        return Difference(where=path)
    finite = a.isfinite()
    if not torch.equal(_kinds_of_infinite(a), _kinds_of_infinite(b)):
        counts = f"{int((~finite).sum())} and {int((~b.isfinite()).sum())} of {a.numel()}"
        return _problem("non-finite", f"{name} is not finite at {counts} places", path)
    gap = torch.where(finite, a - b, 0).abs().max().item()
    size = torch.where(finite, a, 0).abs().max().item()
    return Difference(gap, gap / max(size, _TINY), path, a.numel())


def _is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _kinds_of_infinite(tensor: Tensor) -> Tensor:
    """0 where finite, and a number each for NaN, infinity and minus infinity."""
    parts = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return parts.isnan() * 1 + parts.isposinf() * 2 + parts.isneginf() * 3
