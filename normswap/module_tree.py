"""Small changes of a tree of modules, each noting how to take it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

Undo = list[Callable[[], None]]
"""What puts the model back, to be called in reverse order."""


def replace_module(model: nn.Module, names: Iterable[str], new: nn.Module, undo: Undo) -> None:
    """Put ``new`` in the place of a module at all of its names."""
    for name in names:
        path, _, leaf = name.rpartition(".")
        slots = model.get_submodule(path)._modules
        old = slots[leaf]
        assert old is not None
        new.training = old.training
        slots[leaf] = new
        undo.append(lambda slots=slots, leaf=leaf, old=old: slots.update({leaf: old}))


def switch_fast_path_off(model: nn.Module, parent: str, undo: Undo) -> None:
    """``nn.TransformerEncoderLayer`` computes its norms itself in eval, unless told not to.

    The encoder around it hands it nested tensors then, which only that path takes.
    """
    parts = parent.split(".") if parent else []
    layer = model.get_submodule(parent)
    if not hasattr(layer, "activation_relu_or_gelu"):
        return
    set_attribute(layer, "activation_relu_or_gelu", 0, undo)
    for count in range(len(parts)):
        encoder = model.get_submodule(".".join(parts[:count]))
        for name in ("use_nested_tensor", "enable_nested_tensor"):
            if hasattr(encoder, name):
                set_attribute(encoder, name, False, undo)


def set_attribute(module: Any, name: str, value: Any, undo: Undo) -> None:
    """Set an attribute that the module has."""
    before = getattr(module, name)
    setattr(module, name, value)
    undo.append(lambda: setattr(module, name, before))
