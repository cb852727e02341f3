"""Edits of structure that move norms along a residual stream (see `stream_hooks`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import nn

from normswap.copying import copy_model
from normswap.errors import NormswapError
from normswap.module_tree import Undo, replace_module, set_attribute, switch_fast_path_off
from normswap.plan import ModuleEdit
from normswap.stream_hooks import (
    NormArguments,
    NormedSkip,
    NormOutput,
    OntoStream,
    OwnSize,
    ScaledSkip,
    SecondStream,
    StreamState,
    UnitStream,
    hooked_child,
)

INPUT_NORM, OUTPUT_NORM, SECOND_NORM = "input_norm", "output_norm", "second_norm"


class StandIn(nn.Identity):
    """Hands its input on where a norm stood; what else it is asked for, the norm answers.

    Modelling code reads the dtype off the weight of a norm, for example.
    """

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.__dict__["moved"] = (norm,)  # no child of this module

    def __getattr__(self, name: str) -> Any:
        moved = self.__dict__.get("moved")
        if moved is None or name in ("_parameters", "_buffers", "_modules"):
            return super().__getattr__(name)
        return getattr(moved[0], name)


def free_name(module: nn.Module, name: str, taken: Collection[str] = ()) -> str:
    """``name``, or with a number where it is taken or an attribute of the module."""
    names = (name, *(f"{name}_{number}" for number in range(2, 100)))
    return next(n for n in names if n not in taken and not hasattr(module, n))


def _move_norm(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """A norm onto arguments of other modules, as their child; an identity takes its place."""
    norm = model.get_submodule(edit.module)
    for name in edit.params["names"]:
        _no_fast_path(model, name, undo)
    replace_module(model, edit.params["names"], StandIn(norm), undo)
    norm.train(model.training)
    for path, child, arguments in edit.params["to"]:
        module = model.get_submodule(path)
        _no_fast_path(model, path, undo)
        _adopt(module, child, norm, undo)
        hook = NormArguments(child, arguments)
        undo.append(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


def _return_norm(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """A norm that was moved onto arguments of modules, back onto the stream."""
    norm = model.get_submodule(edit.module)
    for path, child in edit.params["from"]:
        module = model.get_submodule(path)
        number = hooked_child(module, child)
        if number is None:
            raise NormswapError(f"{path!r} applies no norm {child!r} to its arguments")
        _drop_pre_hook(module, number, undo)
        slots = module._modules
        slots.pop(child)
        undo.append(lambda slots=slots, child=child: slots.update({child: norm}))
    replace_module(model, edit.params["names"], norm, undo)


def _drop_pre_hook(module: nn.Module, number: int, undo: Undo) -> None:
    hooks, with_kwargs = module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs
    hook = hooks.pop(number)
    with_kwargs.pop(number, None)

    def restore() -> None:
        hooks[number] = hook
        with_kwargs[number] = True

    undo.append(restore)


def _no_fast_path(model: nn.Module, path: str, undo: Undo) -> None:
    """What runs past the modules of a layer would run past a hook inside it."""
    parts = path.split(".")
    for count in range(len(parts)):
        switch_fast_path_off(model, ".".join(parts[:count]), undo)


def _adopt(module: nn.Module, child: str, norm: nn.Module, undo: Undo) -> None:
    if hasattr(module, child):
        raise AttributeError(f"it has an attribute {child!r} already")
    module.add_module(child, norm)

    def leave() -> None:
        del module._modules[child]

    undo.append(leave)


def _add_norm(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """A new norm on what a module returns, built like another norm of the model."""
    module = model.get_submodule(edit.module)
    _no_fast_path(model, edit.module, undo)
    child = edit.params["child"]
    _adopt(module, child, copy_model(model.get_submodule(edit.params["like"])), undo)
    undo.append(module.register_forward_hook(NormOutput(child)).remove)


def _unit_stream(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """A pre-norm stack as a post-norm one; see :class:`~normswap.stream_hooks.UnitStream`."""
    state = StreamState({})
    mode = edit.params["mode"]
    sublayers: list[dict[str, Any]] = edit.params["sublayers"]
    for index, sublayer in enumerate(sublayers):
        for number, path in enumerate(sublayer["norms"]):
            norm = model.get_submodule(path)
            _no_fast_path(model, path, undo)
            if mode in ("rotated", "deepened"):
                noting = NormedSkip(state, index)
                if mode == "deepened":
                    noting = ScaledSkip(state, index, sublayer["constant"])
                undo.append(norm.register_forward_hook(noting).remove)
                continue
            hook = UnitStream(
                state,
                index,
                leads=number == 0,
                axes=sublayer["axes"],
                eps=sublayer["eps"],
                centred=sublayer["centred"],
                constant=sublayer.get("constant"),
                deep=mode == "deep",
            )
            undo.append(norm.register_forward_pre_hook(hook).remove)
        for number, (path, factor) in enumerate(sublayer["exits"]):
            _no_fast_path(model, path, undo)
            hook = OntoStream(state, index, factor, leads=number == 0)
            undo.append(model.get_submodule(path).register_forward_hook(hook).remove)
    for path in edit.params["final"] if mode == "unit" else ():
        hook = OwnSize(state)
        undo.append(model.get_submodule(path).register_forward_pre_hook(hook).remove)


def _second_stream(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """ResiDual's second stream beside a post-norm one."""
    state = StreamState({})
    paths: list[str] = edit.params["norms"]
    child = edit.params["child"]
    last = model.get_submodule(paths[-1])
    _adopt(last, child, copy_model(last), undo)
    for index, path in enumerate(paths):
        _no_fast_path(model, path, undo)
        hook = SecondStream(state, index, child if index == len(paths) - 1 else None)
        undo.append(model.get_submodule(path).register_forward_hook(hook).remove)


def _set_eps(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """Another eps for a norm, which its class reads from an attribute."""
    norm = model.get_submodule(edit.module)
    _no_fast_path(model, edit.module, undo)
    set_attribute(norm, edit.params["attribute"], edit.params["value"], undo)


STREAM_EDITS: dict[str, Callable[[nn.Module, ModuleEdit, Undo], None]] = {
    "move_norm": _move_norm,
    "return_norm": _return_norm,
    "add_norm": _add_norm,
    "unit_stream": _unit_stream,
    "second_stream": _second_stream,
    "set_eps": _set_eps,
}
"""Every kind of edit here."""
