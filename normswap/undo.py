"""Put the norms back that a swap replaced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normswap.copying import copy_model
from normswap.edits import put_back
from normswap.errors import NormswapError
from normswap.plan import ModuleEdit, Plan, Replaced


def remember(plan: Plan, before: Mapping[str, nn.Module], changed: nn.Module) -> None:
    """Keep in ``plan`` what undoing it takes: the old norms, and the new tensors as they are.

    ``before`` holds the modules of the original model by name.
    """
    for edit in _replacements(plan):
        new = changed.get_submodule(edit.module)
        tensors = {n: t.detach().clone() for n, t in new.state_dict().items()}
        plan.previous[edit.module] = Replaced(before[edit.module], tensors)


def undo(plan: Plan, model: nn.Module) -> nn.Module:
    """Put the old norms back into ``model``, in place; the old root where that was a norm.

    A parameter that was not trained since the swap is the old one again, bit for bit; one that
    was trained is carried back, the old way round. Layers whose weights were centred for an exact
    RMSNorm stay so, which the LayerNorm that comes back does not see.

    Raises:
        NormswapError: the plan was read from a file, or ``model`` is not what it made.
    """
    edits = _replacements(plan)
    if not edits or any(edit.module not in plan.previous for edit in edits):
        raise NormswapError(
            "there is nothing to undo: only a swap of this session can be, not one read from a file"
        )
    if any(edit.params.get("folded") for edit in edits):
        raise NormswapError(
            "the norms' scales were folded into other layers, so putting the old norms back would "
            "apply them twice: use the original model"
        )
    result = model
    for edit in edits:
        kept = plan.previous[edit.module]
        try:
            new = model.get_submodule(edit.module)
        except AttributeError as error:
            raise NormswapError(f"the model has no {edit.module!r}: {error}") from error
        old = copy_model(kept.module)
        for target, source in edit.params["parameters"].items():
            now, then = new.state_dict()[target], kept.tensors[target]
            if now.shape != then.shape:
                raise NormswapError(f"{edit.module}.{target} is not what the swap made")
            if not torch.equal(now, then):
                tensor: Tensor = getattr(old, source)
                tensor.data = _carried_back(edit, target, now, tensor)
        put_back(model, edit, old, new)
        result = old if edit.module == "" else result
    return result


def _replacements(plan: Plan) -> list[ModuleEdit]:
    return [edit for edit in plan.module_edits if edit.kind == "replace"]


def _carried_back(edit: ModuleEdit, target: str, value: Tensor, like: Tensor) -> Tensor:
    """The inverse of what the swap did to a tensor."""
    _, op, *number = str(edit.params["origins"][target]).split()
    value = value.to(torch.float64)
    if op == "offset":
        value = value - float(number[0])
    elif op == "scale":
        value = value / float(number[0])
    if like.numel() == 1:
        value = value.mean()
    return value.reshape(like.shape).to(like.dtype)
