"""Biases that do not exist yet: every layer without bias gets one in the graph, at zero.

They are part of the result only if a shift is pushed into them, and are offered only where the
layer would use them: in a call of its own whose forward reads ``bias``, or as an op of a
``GraphModule``.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import fx, nn

from normswap.capture import Capture
from normswap.dataflow import RULES, Contraction, is_stored, op_name
from normswap.forms import StoredTensor
from normswap.plan import ModuleEdit, Plan

# A bias counts as used by these layers' own forward; other classes must name it in theirs.
_STOCK = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip

VirtualBiases = dict[str, tuple[StoredTensor, ModuleEdit]]
"""By name: the tensor that does not exist yet, and the edit that makes it."""


def add_virtual_biases(model: nn.Module, capture: Capture) -> VirtualBiases:
    """Add a bias at zero to every op of the graph that could have one."""
    created: VirtualBiases = {}
    for node in list(capture.graph.nodes):
        weight = _weight_without_bias(node)
        if weight is None:
            continue
        stored: StoredTensor = weight.meta["tensor"]
        edit = _edit(model, node, stored)
        if edit is None:
            continue
        name = _bias_name(stored.name)
        if name not in created:
            created[name] = _virtual(capture, name, weight, _channels(node)), edit
        elif edit.kind == "bias_node":
            tensor, known = created[name]
            nodes = [*known.params["nodes"], *edit.params["nodes"]]
            created[name] = (
                tensor,
                ModuleEdit(edit.kind, edit.module, {**edit.params, "nodes": nodes}),
            )
        node.args = (*node.args[:2], created[name][0].node, *node.args[3:])
    return created


def _weight_without_bias(node: fx.Node) -> fx.Node | None:
    """The stored weight of a linear layer or convolution that has no bias."""
    rule = RULES.get(op_name(node)) if node.op == "call_function" else None
    if not isinstance(rule, Contraction) or op_name(node) == "addmm" or len(node.args) < 2:
        return None
    _, weight, bias = rule.operands(node)
    return weight if is_stored(weight) and bias is None else None


def _channels(node: fx.Node) -> int:
    rule = RULES[op_name(node)]
    assert isinstance(rule, Contraction)
    return node.meta["shape"][rule.axes(node)[1]]


def _bias_name(weight: str) -> str:
    owner = weight.rpartition(".")[0]
    return f"{owner}.bias" if owner else "bias"


def _virtual(capture: Capture, name: str, weight: fx.Node, size: int) -> StoredTensor:
    like: StoredTensor = weight.meta["tensor"]
    with capture.graph.inserting_after(weight):
        node = capture.graph.placeholder(name.replace(".", "_"))
    names = tuple(dict.fromkeys(_bias_name(n) for n in like.names))
    tensor = StoredTensor(name, names, (size,), like.dtype, True, True, node)
    node.meta.update(kind="tensor", tensor=tensor, virtual=True, from_input=False)
    node.meta.update(shape=(size,), dtype=like.dtype, call=None)
    return tensor


def _edit(model: nn.Module, node: fx.Node, weight: StoredTensor) -> ModuleEdit | None:
    """How the bias would be added, or ``None`` where it would not be used."""
    call = node.meta.get("call")
    module = model.get_submodule(weight.owner)
    if call is not None and call.path == weight.owner and not isinstance(module, fx.GraphModule):
        if not _uses_bias(module):
            return None
        return ModuleEdit("add_bias", weight.owner, {"weight": weight.name})
    if "origin" not in node.meta or hasattr(module, "bias"):
        return None
    path, name = node.meta["origin"]
    parent = model.get_submodule(path)
    if not isinstance(parent, fx.GraphModule):
        return None
    if not any(n.name == name and n.op == "call_function" for n in parent.graph.nodes):
        return None
    params = {"nodes": [name], "owner": weight.owner, "weight": weight.name}
    return ModuleEdit("bias_node", path, params)


def _uses_bias(module: nn.Module) -> bool:
    """Whether the module has an empty place for a bias and its forward reads it."""
    if module._parameters.get("bias", module) is not None:
        return False
    forward = type(module).forward
    if any(forward is stock.forward for stock in _STOCK):
        return True
    code = getattr(forward, "__code__", None)
    return code is not None and "bias" in code.co_names


def made_biases(plan: Plan, biases: VirtualBiases, used: Collection[str]) -> list[ModuleEdit]:
    """The edits that make the biases in ``used``, whose names are noted as created in ``plan``."""
    made: list[ModuleEdit] = []
    for name, (tensor, edit) in biases.items():
        if name in used:
            made.append(edit)
            like = name.rpartition(".")[0] + ".weight"
            for alias in tensor.names:
                plan.created[alias] = {"shape": list(tensor.shape), "like": like}
    return made
