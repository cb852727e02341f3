"""Bring an optimizer up to date with a model whose parameters were replaced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn, optim

from normswap.errors import NormswapError


def require_own_parameters(optimizer: optim.Optimizer, model: nn.Module) -> None:
    """Raise unless every parameter of the optimizer is one of the model's.

    Raises:
        NormswapError: the optimizer was made for another model, or for one of its copies.
    """
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise NormswapError(
            "the optimizer holds parameters that are not the model's: pass the one that was made "
            "for this model"
        )


def update_optimizer(
    optimizer: optim.Optimizer, replaced: Mapping[nn.Parameter, Sequence[nn.Parameter]]
) -> None:
    """Put each replaced parameter's successors in its place; order and group options stay.

    The state of replaced parameters (moments, step counts) is dropped: it belongs to other values.

    Args:
        optimizer: the optimizer of the changed model.
        replaced: old parameter → the new ones in its place (none: it is gone).
    """
    successors = {id(old): list(new) for old, new in replaced.items()}
    taken: set[int] = set()
    for group in optimizer.param_groups:
        old = list(group["params"])
        names = list(group.get("param_names", [""] * len(old)))
        kept: list[nn.Parameter] = []
        kept_names: list[str] = []
        for parameter, name in zip(old, names, strict=True):
            for each in successors.get(id(parameter), [parameter]):
                if id(each) not in taken:
                    taken.add(id(each))
                    kept.append(each)
                    kept_names.append(name)
        group["params"][:] = kept  # in place: some optimizers hold the list itself
        if "param_names" in group:
            group["param_names"] = kept_names
    for parameter in replaced:
        optimizer.state.pop(parameter, None)
