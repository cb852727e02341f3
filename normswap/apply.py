"""Carry a plan out on a model: a copy, or in place with rollback."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from normswap.copying import copy_model
from normswap.edits import Undo, apply_module_edits
from normswap.errors import NormswapError
from normswap.plan import ModuleEdit, Plan, fingerprint
from normswap.program import run_edits


def apply_plan(plan: Plan, model: nn.Module, *, inplace: bool = False) -> nn.Module:
    """The changed model: a copy, or ``model`` itself if ``inplace``.

    Raises:
        NormswapError: the plan was made for another model; ``model`` is as it was.
    """
    changed, _ = apply_with_undo(plan, model, inplace=inplace)
    return changed


def apply_with_undo(plan: Plan, model: nn.Module, *, inplace: bool) -> tuple[nn.Module, Undo]:
    """As :func:`apply_plan`, with what takes an in-place change back."""
    _require_fit(plan, model)
    target = model if inplace else copy_model(model)
    undo: Undo = []
    try:
        _make_tensors(plan, target, undo)
        waiting = _edit_tensors(plan, target, undo if inplace else None)
        target = apply_module_edits(target, _late_edits(plan), undo, plan.builders)
        _fill_new_modules(target, waiting)
        _share_again(plan, target)
    except BaseException:
        roll_back(undo)
        raise
    return target, undo


def restructure(model: nn.Module, plan: Plan) -> nn.Module:
    """Only the structure of the changed model, in place and without arithmetic on weights.

    For a model whose weights are loaded afterwards; works on the meta device.

    Raises:
        NormswapError: the plan was made for another model.
    """
    _require_fit(plan, model)
    undo: Undo = []
    _make_tensors(plan, model, undo)
    result = apply_module_edits(model, _late_edits(plan), undo, plan.builders)
    _share_again(plan, result)
    return result


def replaced_parameters(
    plan: Plan, before: Mapping[str, nn.Module], model: nn.Module
) -> dict[nn.Parameter, list[nn.Parameter]]:
    """Old parameter → its successors, for every module that ``plan`` replaced.

    The first parameter of an old module is also followed by what is new in its successor.

    Args:
        plan: the plan that was applied.
        before: the modules by name as they were.
        model: the changed model.
    """
    result: dict[nn.Parameter, list[nn.Parameter]] = {}
    for edit in plan.module_edits:
        if edit.kind != "replace":
            continue
        old, new = before[edit.module], model.get_submodule(edit.module)
        sources = {source: target for target, source in edit.params["parameters"].items()}
        fresh = [p for n, p in new.named_parameters() if n not in edit.params["parameters"]]
        for name, parameter in old.named_parameters():
            successor = new._parameters.get(sources.get(name, ""))
            result[parameter] = [] if successor is None else [successor]
        first = next(iter(old.parameters()), None)
        if first is not None:
            result[first] += fresh
    return result


def roll_back(undo: Undo) -> None:
    """Take changes back, last first."""
    while undo:
        undo.pop()()


def _require_fit(plan: Plan, model: nn.Module) -> None:
    if fingerprint(model) != plan.fingerprint:
        raise NormswapError(
            f"the plan was made for another model than this {type(model).__name__} (names, shapes "
            "or classes differ): make the plan on this model"
        )


# What is edited as a tensor of its own must be one first; modules are taken out last.
_FIRST = ("add_bias", "bias_node", "untie")


def _make_tensors(plan: Plan, model: nn.Module, undo: Undo) -> None:
    apply_module_edits(model, [e for e in plan.module_edits if e.kind in _FIRST], undo)


def _late_edits(plan: Plan) -> list[ModuleEdit]:
    return [e for e in plan.module_edits if e.kind not in _FIRST]


def _is_finite(tensor: Tensor) -> bool:
    # The extremes say it in one fast pass: NaN propagates through them.
    return tensor.numel() == 0 or all(math.isfinite(float(v)) for v in tensor.detach().aminmax())


def _edit_tensors(plan: Plan, model: nn.Module, undo: Undo | None) -> dict[str, Tensor]:
    """Run the weight edits; what belongs to modules that are yet to come is given back."""
    replaced = tuple(
        f"{name}." if name else ""
        for edit in plan.module_edits
        if edit.kind == "replace"
        for name in edit.params["names"]
    )
    waiting: dict[str, Tensor] = {}
    gone = set(plan.removed)

    def read(name: str) -> Tensor:
        path, _, leaf = name.rpartition(".")
        return getattr(model.get_submodule(path), leaf)

    def write(name: str, value: Tensor) -> None:
        if name in gone:
            return
        if name.startswith(replaced) or (name in plan.created and not _exists(model, name)):
            waiting[name] = value
            return
        tensor = read(name)
        old = tensor.data
        if undo is not None:
            undo.append(lambda: setattr(tensor, "data", old))
        # New storage: another model may share the old one.
        tensor.data = torch.empty_like(old).copy_(value)
        if not _is_finite(tensor) and _is_finite(value):
            raise NormswapError(
                f"{name!r} does not fit into {tensor.dtype} after the fold (largest value "
                f"{float(value.abs().max()):.3g}): use a wider dtype"
            )

    run_edits(plan.edits, read, write)
    return waiting


def _exists(model: nn.Module, name: str) -> bool:
    path, _, leaf = name.rpartition(".")
    try:
        return hasattr(model.get_submodule(path), leaf)
    except AttributeError:
        return False


def _share_again(plan: Plan, model: nn.Module) -> None:
    """New norms whose tensors came from one tensor in the same way share theirs too."""
    first: dict[str, nn.Parameter] = {}
    for edit in plan.module_edits:
        for target, origin in edit.params.get("origins", {}).items():
            module = model.get_submodule(edit.module)
            parameter = module._parameters.get(target)
            if parameter is not None:
                module._parameters[target] = first.setdefault(origin, parameter)


def _fill_new_modules(model: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        path, _, leaf = name.rpartition(".")
        tensor: Tensor = getattr(model.get_submodule(path), leaf)
        if not tensor.is_meta:
            tensor.data = torch.empty_like(tensor.data).copy_(value)
