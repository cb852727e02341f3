"""A deep copy of a model that keeps what `copy.deepcopy` drops."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn


def copy_model(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """``copy.deepcopy`` with every module in the mode it was in (a ``GraphModule`` loses it)."""
    copied = copy.deepcopy(model, {} if memo is None else memo)
    modes = {name: module.training for name, module in model.named_modules()}
    for name, module in copied.named_modules():
        module.training = modes.get(name, module.training)
    return copied
