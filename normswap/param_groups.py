"""Parameter groups for an optimizer: no weight decay on the scales and shifts of norms."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from normswap import norms

_TORCH_NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
)
_OUR_NORMS = tuple(
    kind for kind in (getattr(norms, name) for name in norms.__all__) if isinstance(kind, type)
)
# "input_layernorm", "norm1", "ln_f", "bn2", "LlamaRMSNorm"
_NORM_NAME = re.compile(r"norm|(^|_)(ln|bn)(_|\d|$)", re.IGNORECASE)


def no_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two parameter groups: all else with ``weight_decay``, those of norms with 0.

    A parameter belongs to a norm if the module that owns it is

    - a norm of ``torch.nn`` or of ``normswap.norms`` (also a gain of a weight norm; the linear
      layers and convolutions inside a conditional or recurrent one are decayed), or
    - of a class from elsewhere that is named like a norm, or bears such a name in the model
      (``LlamaRMSNorm``, ``ln_f``, ``bn1``), and the parameter is a vector.

    A parameter with several owners belongs to a norm if one of them is a norm. Frozen parameters
    are in neither group; every other parameter is in exactly one.

    Args:
        model: its ``parameters()`` are distributed.
        weight_decay: of the first group.

    Returns:
        ``[{"params": …, "weight_decay": weight_decay}, {"params": …, "weight_decay": 0.0}]``, in
        the order of ``model.parameters()``; pass it to an optimizer.

    Raises:
        ValueError: for a negative weight decay.
    """
    if weight_decay < 0:
        raise ValueError(
            f"no_decay_groups: weight_decay is {weight_decay}; it must not be negative"
        )
    of_norms: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            if _is_own(module) or (_is_named_norm(name, module) and parameter.dim() <= 1):
                of_norms.add(id(parameter))
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if id(p) not in of_norms]
    kept = [p for p in trained if id(p) in of_norms]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    ]


def _is_own(module: nn.Module) -> bool:
    return isinstance(module, (*_TORCH_NORMS, *_OUR_NORMS))


def _is_named_norm(name: str, module: nn.Module) -> bool:
    if type(module).__module__.startswith("torch.nn."):
        return False  # a linear layer stays one under any name
    names = (name.rpartition(".")[2], type(module).__name__)
    return any(_NORM_NAME.search(text) for text in names)
