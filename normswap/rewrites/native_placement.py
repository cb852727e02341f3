"""Pre-/post-norm placement carried out as a plain model of a native class or flag.

With sublayers ``k = 0..K-1``, the stream ``x`` of a post-norm stack and ``u`` of a pre-norm one:

    post   x₀ = E(e)     x_{k+1} = S_k(x_k + f_k(x_k))     output F(x_K)
    pre    u₀ = E'(e)    u_{k+1} = u_k + f_k(P_k(u_k))     output F'(P_K(u_K))

the norms in the order in which the stream meets them are one list against another,

    post   E    S_0  …  S_{K-1}  F
    pre    P_0  P_1  …  P_K      F'

so a placement is a *rotation*: each norm takes the tensors of the one at its place in the other
list. The skip is clean (``u_k``, not ``P_k(u_k)``), so the result is a true pre-norm model and not
the same function. Everything else keeps its tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from normswap.capture import Capture
from normswap.dataflow import op_name
from normswap.errors import CaptureError, RefusedError
from normswap.forms import StoredTensor
from normswap.inputs import Inputs
from normswap.plan import MappingRow
from normswap.residual_graph import Chain
from normswap.rewrites.native_mapping import TensorMapping, saved, tensor_at
from normswap.rewrites.native_targets import Target, native_target
from normswap.structure import Reading, read_structure

# Ops that tell one head or activation from another, with the numbers that they are given.
_TELLING = {
    "gelu", "tanh", "relu", "silu", "sigmoid", "softmax", "log_softmax", "leaky_relu", "elu",
    "hardtanh", "mish", "softplus", "exp", "pow", "erf", "glu", "mul", "div",
    "scaled_dot_product_attention",
}  # fmt: skip

_SKIP = {
    "pre": "the skips carry the stream itself, which was normalised after every sublayer before: "
    "a start for fine-tuning, not the same function",
    "post": "the stream is normalised after every sublayer, which the skips carried as it was "
    "before: a start for fine-tuning, not the same function",
}


@dataclass(frozen=True)
class NativeResult:
    """A placement carried out in a native class.

    Attributes:
        model: a new model, which needs no code of ours.
        mapping: a row for each of its tensors, and one without a target for each tensor of the
            source that has no place.
        notes: what is not the same as in the source and why.
    """

    model: nn.Module
    mapping: tuple[MappingRow, ...]
    notes: tuple[str, ...]


def native_placement(
    model: nn.Module, inputs: Inputs, reading: Reading, to: str
) -> NativeResult | None:
    """Carry a placement out as a plain model; ``None`` where no native form is known.

    Args:
        model: a post-norm model for ``to="pre"``, a pre-norm model for ``to="post"``; unchanged.
        inputs: example inputs.
        reading: the residual structure of ``model`` on them.
        to: ``"pre"`` or ``"post"``.

    Raises:
        RefusedError: a native form exists, and a tensor or an op of the model has no place in it.
    """
    target = native_target(model, to)
    if target is None:
        return None
    try:
        found = read_structure(target.model, inputs)
    except CaptureError:  # it takes other inputs, or its code is broken
        return None
    pairs = _changed_stacks(reading, found, to)
    if not pairs:
        return None
    _require_same_ops(reading.capture, found.capture)
    mapping = TensorMapping(model, target, reading.capture, found.capture)
    mapping.notes += [_SKIP[to], *target.notes]
    for source, destination in pairs:
        mapping.rotate(source, destination, to)
    mapping.copy_the_rest()
    mapping.notes += [
        f"{site.site.name!r} keeps its tensors, as the recorded run does not use it"
        for site in reading.sites
        if site.blocked is not None and site.blocked.code == "not-called"
    ]
    _carry_out(model, target, mapping)
    return NativeResult(target.model, tuple(mapping.ordered_rows()), tuple(mapping.notes))


# -- stacks ---------------------------------------------------------------------------------------


def _changed_stacks(old: Reading, new: Reading, to: str) -> list[tuple[Chain, Chain]]:
    """The stacks that changed place, in pairs; none if the target is not what was asked for."""
    before, after = old.structure.stacks, new.structure.stacks
    if len(before) != len(after) or any(s.form not in (to, "none") for s in after):
        return []
    if any(map(_differ, old.chains, new.chains)):
        return []
    other = {"pre": "post", "post": "pre"}[to]
    forms = [(a.form, b.form) for a, b in zip(before, after, strict=True)]
    if any(a != b and (a, b) != (other, to) for a, b in forms):
        return []
    chains = zip(old.chains, new.chains, forms, strict=True)
    return [(a, b) for a, b, form in chains if form == (other, to)]


def _differ(a: Chain, b: Chain) -> bool:
    kinds = [[[x.kind for x in r.branches] for r in chain.residuals] for chain in (a, b)]
    return kinds[0] != kinds[1]


def _require_same_ops(old: Capture, new: Capture) -> None:
    """Refuse a class that computes something else beside the norms, such as another head.

    Raises:
        RefusedError: names an op that only one of the two computes.
    """
    before, after = _telling_ops(old), _telling_ops(new)
    for name, numbers in [*(before - after), *(after - before)]:
        given = f" with {', '.join(map(str, numbers))}" if numbers else ""
        raise RefusedError(
            f"the native class computes {name!r}{given} {after[name, numbers]} times, the model "
            f"{before[name, numbers]} times: it is another architecture beside its norms"
        )


def _telling_ops(capture: Capture) -> Counter[tuple[str, tuple[Any, ...]]]:
    return Counter(
        (op_name(node), tuple(a for a in (*node.args, *node.kwargs.values()) if _is_number(a)))
        for node in capture.graph.nodes
        if node.op == "call_function" and op_name(node) in _TELLING and _is_live_float(node)
    )


def _is_live_float(node: fx.Node) -> bool:
    dtype = node.meta.get("dtype")
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    return floating and not node.meta.get("unread")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, str))


# -- carrying it out ------------------------------------------------------------------------------


def _carry_out(model: nn.Module, target: Target, mapping: TensorMapping) -> None:
    """Set every tensor of the target, and what else a model carries."""
    new = target.model
    fill = _like_the_norms(model, mapping)
    for tensor in saved(mapping.new):
        row = mapping.rows[tensor.name]
        if target.copied and row.op == "copy" and row.sources == (tensor.name,):
            continue
        _set(new, tensor, _value(model, row, tensor, mapping.new_rows(tensor.name), fill))
    for name, eps in mapping.eps.items():
        vars(new.get_submodule(name))["eps"] = eps
    for stack in new.modules() if mapping.eps else ():
        if isinstance(stack, nn.TransformerEncoder):
            stack.use_nested_tensor = False  # it is for layers whose norms have one eps
    if target.copied:
        return
    buffers = dict(model.named_buffers())
    for tensor in (t for t in mapping.new.tensors.values() if not t.persistent):
        old, value = buffers.get(tensor.name), tensor_at(new, tensor.name)
        same = old is not None and old.shape == value.shape
        _set(new, tensor, old.clone() if same else value.to(fill.device))  # type: ignore[union-attr]
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in new.named_modules():
        module.training = modes.get(name, module.training)


def _like_the_norms(model: nn.Module, mapping: TensorMapping) -> Tensor:
    """A tensor whose dtype and device new ones take."""
    rotated = [row.sources[0] for row in mapping.rows.values() if row.op == "rotate"]
    return tensor_at(model, rotated[0]) if rotated else next(model.parameters())


def _value(
    model: nn.Module, row: MappingRow, tensor: StoredTensor, new_rows: int, fill: Tensor
) -> Tensor:
    if not row.sources:
        assert row.constant is not None
        value = torch.full(tensor.shape, row.constant, dtype=fill.dtype, device=fill.device)
        return value.requires_grad_(fill.requires_grad)
    source = tensor_at(model, row.sources[0])
    value = source.detach().clone()
    if new_rows:
        value = torch.cat([value.new_zeros(new_rows, *value.shape[1:]), value])
    return value.requires_grad_(source.requires_grad)


def _set(model: nn.Module, tensor: StoredTensor, value: Tensor) -> None:
    """Put a tensor at all its names."""
    if tensor.is_parameter:
        value = nn.Parameter(value.detach(), requires_grad=value.requires_grad)
    for name in tensor.names:
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        stored: Any = module._parameters if tensor.is_parameter else module._buffers
        stored[leaf] = value
