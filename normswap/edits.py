"""Edits of structure: each kind on a module tree or on a `torch.fx.GraphModule`, with its undo."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn

from normswap.errors import NormswapError
from normswap.hooks import ApplyChildren, MeanCentring
from normswap.module_tree import Undo, replace_module, set_attribute, switch_fast_path_off
from normswap.plan import ModuleEdit
from normswap.program import run_edits
from normswap.stream_edits import STREAM_EDITS
from normswap.targets import Construction

__all__ = ["MODULE_EDITS", "Undo", "apply_module_edits", "run_edits"]

Builders = Mapping[str, Callable[[], nn.Module]]
"""By module name: what builds a new module that a plan cannot describe as data."""


def apply_module_edits(
    model: nn.Module, edits: Iterable[ModuleEdit], undo: Undo, builders: Builders | None = None
) -> nn.Module:
    """Carry out edits of structure on ``model``, each noting in ``undo`` how to take it back.

    Returns ``model``, or what replaces it where the model itself is replaced.

    Raises:
        NormswapError: the model lacks a module or node that an edit names.
    """
    edits = list(edits)
    result = model
    for edit in edits:
        try:
            if edit.kind == "replace":
                new = _replace_norm(model, edit, undo, (builders or {}).get(edit.module))
                result = new if edit.module == "" else result
            else:
                MODULE_EDITS[edit.kind](model, edit, undo)
        except (AttributeError, KeyError) as error:
            raise NormswapError(
                f"cannot {edit.kind} {edit.module!r}: {error}; the plan was made for another model"
            ) from error
    for path in {edit.module for edit in edits if edit.kind.endswith("_node")}:
        module = model.get_submodule(path)
        assert isinstance(module, fx.GraphModule)
        module.recompile()
    return result


def _replace_norm(
    model: nn.Module, edit: ModuleEdit, undo: Undo, builder: Callable[[], nn.Module] | None
) -> nn.Module:
    """Another norm in the place of one; it takes over device, dtype, mode, hooks and attributes."""
    old = model.get_submodule(edit.module)
    like = next((t for _, t in _tensors(old) if t.is_floating_point()), None)
    if like is None:
        like = next((t for _, t in _tensors(model) if t.is_floating_point()), torch.empty(0))
    if builder is not None:
        new = builder().to(device=like.device, dtype=like.dtype)
    else:
        construction = Construction(edit.params["class"], edit.params["kwargs"])
        new = construction.build(**construction.options(like.device, like.dtype))
    for name, child in old.named_children():  # an activation that the old norm applied itself
        new.add_module(name, child)
    new.train(old.training)
    _keep_gradients(old, new, edit.params["parameters"])
    for target, source in edit.params["parameters"].items():
        tensor = getattr(new, target)
        tensor.data = tensor.data.to(getattr(old, source).dtype)
    for slot in _HOOKS:
        setattr(new, slot, getattr(old, slot))
    if any(True for _ in old.children()):
        new.register_forward_hook(ApplyChildren(), prepend=True)
    for name, value in old.__dict__.items():  # what modelling code may read off a norm
        plain = isinstance(value, (int, float, str, tuple)) and not name.startswith("_")
        if plain and not hasattr(new, name):
            setattr(new, name, value)
    if edit.module:
        replace_module(model, edit.params["names"], new, undo)
        for name in edit.params["names"]:
            switch_fast_path_off(model, name.rpartition(".")[0], undo)
    return new


_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)


def put_back(model: nn.Module, edit: ModuleEdit, old: nn.Module, new: nn.Module) -> None:
    """The old norm at all of its names again, in the mode that its successor is in."""
    old.train(new.training)
    if edit.module:
        replace_module(model, edit.params["names"], old, [])


def _keep_gradients(old: nn.Module, new: nn.Module, parameters: Mapping[str, str]) -> None:
    trained = [p.requires_grad for p in old.parameters()]
    for name, parameter in new.named_parameters():
        source = old._parameters.get(parameters.get(name, ""))
        wanted = source.requires_grad if source is not None else any(trained) or not trained
        parameter.requires_grad_(wanted)


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


class Clone(nn.Module):
    """Returns a copy of its input: stands for a folded norm whose input is still needed.

    Without it a later in-place op would write to the input of the norm.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x.clone()``."""
        return x.clone()


def _identity(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    if edit.module == "":
        raise NormswapError("the model itself is the norm: it cannot be taken out in place")
    new = Clone() if edit.params.get("clone") else nn.Identity()
    replace_module(model, edit.params["names"], new, undo)


def _keep_children(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    old = model.get_submodule(edit.module)
    children = OrderedDict[str, nn.Module]()
    if edit.params.get("clone"):
        children["clone"] = Clone()
    children.update((name, old.get_submodule(name)) for name in edit.params["children"])
    replace_module(model, edit.params["names"], nn.Sequential(children), undo)


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
        old = tensor.data
        tensor.data = torch.full_like(old, values[role])
        undo.append(lambda tensor=tensor, old=old: setattr(tensor, "data", old))


class _RestoreGraph:
    """Puts back the graph that a ``GraphModule`` had before its first edit."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.graph = copy.deepcopy(module.graph)

    def __call__(self) -> None:
        self.module.graph = self.graph


def _graph_of(
    model: nn.Module, edit: ModuleEdit, undo: Undo
) -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    """A ``GraphModule`` whose graph is about to be edited, and its nodes by name."""
    module = model.get_submodule(edit.module)
    if not isinstance(module, fx.GraphModule):
        raise NormswapError(
            f"{edit.module!r} is no GraphModule: the plan was made for another model"
        )
    if not any(isinstance(u, _RestoreGraph) and u.module is module for u in undo):
        undo.append(_RestoreGraph(module))
    return module, {node.name: node for node in module.graph.nodes}


def _erase_node(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """What read a norm's node reads the norm's input; its tensors go if nothing else reads them."""
    module, nodes = _graph_of(model, edit, undo)
    op = nodes[edit.params["node"]]
    value = op.args[0] if op.args else op.kwargs["input"]
    assert isinstance(value, fx.Node)
    if edit.params.get("clone"):
        with module.graph.inserting_before(op):
            value = module.graph.call_function(torch.ops.aten.clone.default, (value,))
    several = "native_batch_norm" in str(op.target)  # the result is item 0 of three
    items = list(op.users) if several else []
    for output in [item for item in items if item.args[1] == 0] if several else [op]:
        output.replace_all_uses_with(value)
    graph = module.graph
    for node in (*items, op):
        graph.erase_node(node)
    if op.op == "call_module":
        _delete_submodule(module, str(op.target), undo)
    gone = set(edit.params["tensors"])
    prefix = f"{edit.module}." if edit.module else ""
    for node in list(graph.nodes):
        if node.op == "get_attr" and f"{prefix}{node.target}" in gone and not node.users:
            graph.erase_node(node)
    read = {f"{prefix}{node.target}" for node in graph.nodes if node.op == "get_attr"}
    for name in sorted(gone - read):
        _delete_tensor(model, name, undo)


def _delete_submodule(module: fx.GraphModule, name: str, undo: Undo) -> None:
    if any(node.op == "call_module" and node.target == name for node in module.graph.nodes):
        return
    path, _, leaf = name.rpartition(".")
    slots = module.get_submodule(path)._modules
    old = slots.pop(leaf)
    undo.append(lambda: slots.update({leaf: old}))


def _delete_tensor(module: nn.Module, name: str, undo: Undo) -> None:
    path, _, leaf = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:  # its module went before it
        return
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

    def restore() -> None:
        del owner._parameters["bias"]

    undo.append(restore)
    for op in ops:
        with module.graph.inserting_before(op):
            bias = module.graph.get_attr(f"{inner}.bias" if inner else "bias")
        op.args = (*op.args[:2], bias, *op.args[3:])


def _op_out_channels(op: fx.Node, weight: torch.Tensor) -> int:
    value = op.meta.get("val")
    rank = weight.dim()
    if value is not None:
        return int(value.shape[-1] if rank == 2 else value.shape[-(rank - 1)])
    return weight.shape[0]


def _centre(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """An op that removes the mean of what a module returns, or of one of its arguments."""
    module = model.get_submodule(edit.module)
    hook = MeanCentring(edit.params["axis"], edit.params["argument"])
    if hook.argument is None:
        handle = module.register_forward_hook(hook)
    else:
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
    undo.append(handle.remove)


def _untie(model: nn.Module, edit: ModuleEdit, undo: Undo) -> None:
    """A parameter of its own where two modules shared one, and the config that says so."""
    slots = model.get_submodule(edit.module)._parameters
    leaf = edit.params["name"].rpartition(".")[2]
    shared = slots[leaf]
    assert shared is not None
    slots[leaf] = nn.Parameter(shared.detach().clone(), requires_grad=shared.requires_grad)
    undo.append(lambda: slots.update({leaf: shared}))
    for config in _configs(model):
        if getattr(config, "tie_word_embeddings", False):
            set_attribute(config, "tie_word_embeddings", False, undo)


def _configs(model: nn.Module) -> list[Any]:
    """The configurations of a transformers model that say whether its tables are tied."""
    config: Any = getattr(model, "config", None)
    text: Any = getattr(config, "get_text_config", None)
    return [c for c in (config, None if text is None else text(decoder=True)) if c is not None]


MODULE_EDITS: dict[str, Callable[[nn.Module, ModuleEdit, Undo], None]] = {
    "identity": _identity,
    "keep_children": _keep_children,
    "add_bias": _add_bias,
    "neutralise": _neutralise,
    "erase_node": _erase_node,
    "bias_node": _bias_node,
    "centre": _centre,
    "untie": _untie,
    **STREAM_EDITS,
}
"""Every kind of structural edit."""
