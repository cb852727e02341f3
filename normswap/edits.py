"""Edits of structure: each kind on a module tree or on a `torch.fx.GraphModule`, with its undo."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx, nn

from normswap.errors import NormswapError
from normswap.plan import ModuleEdit
from normswap.program import run_edits

__all__ = ["MODULE_EDITS", "Undo", "apply_module_edits", "run_edits"]

Undo = list[Callable[[], None]]
"""What puts the model back, to be called in reverse order."""


def apply_module_edits(model: nn.Module, edits: Iterable[ModuleEdit], undo: Undo) -> None:
    """Carry out edits of structure on ``model``, each noting in ``undo`` how to take it back.

    Raises:
        NormswapError: the model lacks a module or node that an edit names.
    """
    for edit in edits:
        try:
            MODULE_EDITS[edit.kind](model, edit, undo)
        except (AttributeError, KeyError) as error:
            raise NormswapError(
                f"cannot {edit.kind} {edit.module!r}: {error}; the plan was made for another model"
            ) from error


def _replace(model: nn.Module, edit: ModuleEdit, new: nn.Module, undo: Undo) -> None:
    """Put ``new`` in the place of a module at all of its names."""
    for name in edit.params["names"]:
        path, _, leaf = name.rpartition(".")
        slots = model.get_submodule(path)._modules
        old = slots[leaf]
        assert old is not None
        new.training = old.training
        slots[leaf] = new
        undo.append(lambda slots=slots, leaf=leaf, old=old: slots.update({leaf: old}))


def _identity(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    if edit.module == "":
        raise NormswapError("the model itself is the norm: it cannot be taken out in place")
    _replace(model, edit, nn.Identity(), undo)


def _keep_children(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    old = model.get_submodule(edit.module)
    children = OrderedDict((name, old.get_submodule(name)) for name in edit.params["children"])
    _replace(model, edit, nn.Sequential(children), undo)


def _add_bias(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    owner = model.get_submodule(edit.module)
    _register_bias(owner, model.get_parameter(edit.params["weight"]), undo)


def _register_bias(owner: nn.Module, weight: torch.Tensor, undo: Undo) -> None:
    size = _out_channels(owner, weight)
    bias = torch.zeros(size, dtype=weight.dtype, device=weight.device)
    before = "bias" in owner._parameters
    if "bias" in owner.__dict__:
        del owner.__dict__["bias"]
    owner.register_parameter("bias", nn.Parameter(bias, requires_grad=weight.requires_grad))

    def restore() -> None:
        owner._parameters.pop("bias")
        if before:
            owner._parameters["bias"] = None

    undo.append(restore)


def _out_channels(owner: nn.Module, weight: torch.Tensor) -> int:
    if getattr(owner, "transposed", False):
        return weight.shape[1] * int(getattr(owner, "groups", 1))
    return weight.shape[0]


def _neutralise(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """A norm that is only called, not a module of its own: mean 0, variance ``1 - eps``."""
    values = {"weight": 1.0, "bias": 0.0, "mean": 0.0, "var": 1.0 - edit.params["eps"]}
    for role, name in edit.params["tensors"].items():
        path, _, leaf = name.rpartition(".")
        tensor = getattr(model.get_submodule(path), leaf)
        if tensor.is_meta:
            continue
        old = tensor.detach().clone()
        with torch.no_grad():
            tensor.fill_(values[role])

        def restore(tensor: torch.Tensor = tensor, old: torch.Tensor = old) -> None:
            with torch.no_grad():
                tensor.copy_(old)

        undo.append(restore)


def _graph_of(model: nn.Module, edit: ModuleEdit, undo: Undo) -> tuple[Any, dict[str, fx.Node]]:
    """A ``GraphModule`` whose graph is about to be edited, and its nodes by name."""
    module = model.get_submodule(edit.module)
    if not isinstance(module, fx.GraphModule):
        raise NormswapError(f"{edit.module!r} is no GraphModule: the plan was made for another model")
    old = module.graph
    memo: dict[fx.Node, fx.Node] = {}
    copied = fx.Graph(tracer_cls=getattr(old, "_tracer_cls", None))
    output = copied.graph_copy(old, memo, return_output_node=True)
    assert output is not None
    result, old_output = output
    new_output = copied.output(result)
    new_output.meta = dict(old_output.meta)
    copied.set_codegen(old._codegen)
    for before, after in memo.items():
        after.name = before.name
    names = {before.name: after for before, after in memo.items()}
    module.graph = copied

    def restore() -> None:
        module.graph = old
        module.recompile()

    undo.append(restore)
    return module, names


def _erase_node(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    module, nodes = _graph_of(model, edit, undo)
    output, op = nodes[edit.params["output"]], nodes[edit.params["input_of"]]
    value = op.args[0] if op.args else op.kwargs["input"]
    output.replace_all_uses_with(value)
    graph = module.graph
    sources = [node for node in op.all_input_nodes if node.op == "get_attr"]
    for node in (output, op, *sources):
        if node in graph.nodes and not node.users:
            graph.erase_node(node)
    for node in sources:
        if not any(n.op == "get_attr" and n.target == node.target for n in graph.nodes):
            _delete_tensor(module, str(node.target), undo)
    module.recompile()


def _delete_tensor(module: nn.Module, name: str, undo: Undo) -> None:
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    for slots in (owner._parameters, owner._buffers):
        if leaf in slots:
            old: Any = slots.pop(leaf)
            undo.append(lambda slots=slots, old=old: slots.update({leaf: old}))


def _bias_node(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """A bias for ops of a ``GraphModule`` that have none."""
    module, nodes = _graph_of(model, edit, undo)
    path = edit.params["owner"]
    inner = path.removeprefix(f"{edit.module}.") if edit.module else path
    ops = [nodes[name] for name in edit.params["nodes"]]
    owner = model.get_submodule(path)
    weight = model.get_parameter(edit.params["weight"])
    size = _op_out_channels(ops[0], weight)
    owner.register_parameter("bias", nn.Parameter(weight.detach().new_zeros(size)))
    undo.append(lambda: owner._parameters.pop("bias") and None)
    for op in ops:
        with module.graph.inserting_before(op):
            bias = module.graph.get_attr(f"{inner}.bias" if inner else "bias")
        op.args = (*op.args[:2], bias, *op.args[3:])
    module.recompile()


def _op_out_channels(op: fx.Node, weight: torch.Tensor) -> int:
    value = op.meta.get("val")
    rank = weight.dim()
    if value is not None:
        return int(value.shape[-1] if rank == 2 else value.shape[-(rank - 1)])
    return weight.shape[0]


MODULE_EDITS: dict[str, Callable[[nn.Module, ModuleEdit, Undo], None]] = {
    "identity": _identity,
    "keep_children": _keep_children,
    "add_bias": _add_bias,
    "neutralise": _neutralise,
    "erase_node": _erase_node,
    "bias_node": _bias_node,
}
"""Every kind of structural edit."""
