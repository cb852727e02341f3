"""What form a model has: wrappers, unchangeable forms, its modules and tensors by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from normswap.errors import RefusedError


@dataclass(eq=False)
class StoredTensor:
    """A parameter or buffer: canonical ``name``, all its ``names``, and its placeholder."""

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_parameter: bool
    persistent: bool
    node: fx.Node | None = None
    overlaps: str | None = None  # another tensor, not the same one, that shares its memory

    @property
    def owner(self) -> str:
        """The canonical name of the module that holds it."""
        return self.name.rpartition(".")[0]


def unwrap(model: nn.Module) -> nn.Module:
    """Look through ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel``.

    Raises:
        RefusedError: ``model`` is no ``nn.Module``.
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        hint = " (for a torch.export program, its module())" if hasattr(model, "module") else ""
        raise RefusedError(
            f"expected a torch.nn.Module, got {type(model).__name__}: pass one{hint}"
        )
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:  # OptimizedModule, without importing torch._dynamo
            inner = model._modules["_orig_mod"]
            assert inner is not None
            model = inner
        else:
            return model


def refuse_unsupported(model: nn.Module) -> None:
    """Tell apart the forms of a model that cannot be changed.

    Raises:
        RefusedError: ScriptModules, lazy modules before their first run, sharded or quantised
            models; names the module or tensor and says what to do.
    """
    for name, module in model.named_modules():
        where = repr(name) if name else "the model"
        kind = type(module)
        if isinstance(module, torch.jit.ScriptModule):
            raise RefusedError(
                f"{where} is a ScriptModule, whose code cannot be changed: pass the eager module "
                "that it was scripted from"
            )
        if hasattr(kind, "has_uninitialized_params") and module.has_uninitialized_params():  # type: ignore[operator]
            raise RefusedError(
                f"{where} ({kind.__name__}) is lazy and has no parameters yet: run the model once "
                "on example inputs first"
            )
        if kind.__name__ in {"FullyShardedDataParallel", "FSDPModule"}:
            raise RefusedError(f"{where} is sharded (FSDP): change the model before it is wrapped")
        if ".quantized" in kind.__module__ and kind.__module__.startswith("torch."):
            raise RefusedError(
                f"{where} ({kind.__name__}) is quantised: change the model before quantisation"
            )
    for name, tensor in named_tensors(model):
        kind = type(tensor).__name__
        if kind == "DTensor":
            raise RefusedError(f"{name!r} is a sharded DTensor: change the model before sharding")
        if tensor.is_quantized or kind not in {"Parameter", "Tensor", "Buffer", "FakeTensor"}:
            raise RefusedError(
                f"{name!r} is a {kind} of dtype {tensor.dtype}, quantised or of a class whose "
                "arithmetic is not known: change the model before quantisation"
            )


def module_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Canonical (first) name of each module → all its names."""
    first: dict[int, str] = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        canonical = first.setdefault(id(module), name)
        names[canonical] = (*names.get(canonical, ()), name)
    return names


def stored_tensors(model: nn.Module) -> dict[str, StoredTensor]:
    """Canonical (first) name of each parameter and buffer → :class:`StoredTensor`."""
    unsaved = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    by_id: dict[int, StoredTensor] = {}
    for name, tensor in named_tensors(model):
        known = by_id.get(id(tensor))
        if known is not None:
            known.names = (*known.names, name)
            known.persistent = known.persistent and name not in unsaved
            continue
        by_id[id(tensor)] = StoredTensor(
            name,
            (name,),
            tuple(tensor.shape),
            tensor.dtype,
            isinstance(tensor, nn.Parameter),
            name not in unsaved,
        )
    _mark_overlaps(model, by_id)
    return {stored.name: stored for stored in by_id.values()}


def _mark_overlaps(model: nn.Module, by_id: dict[int, StoredTensor]) -> None:
    """Distinct tensors in one storage (views of each other): an edit of one would hit the other."""
    first: dict[int, StoredTensor] = {}
    for _, tensor in named_tensors(model):
        stored = by_id[id(tensor)]
        pointer = 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()
        other = first.setdefault(pointer, stored)
        if pointer and other is not stored:
            stored.overlaps, other.overlaps = other.name, stored.name


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, a shared one at each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def stored_value(model: nn.Module, name: str) -> Tensor | None:
    """A parameter or buffer by name; ``None`` on the meta device, where it has no value."""
    owner, _, leaf = name.rpartition(".")
    tensor: Tensor = getattr(model.get_submodule(owner), leaf)
    return None if tensor.is_meta else tensor
