"""Model surgery on normalisation layers: find, swap and fold norms, each with an answer."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normswap import init, norms, param_groups, residual
    from normswap.api import (
        find_norms,
        fold_affine,
        fold_batchnorm,
        plan_fold_affine,
        plan_fold_batchnorm,
        plan_swap_norms,
        residual_structure,
        swap_norms,
        verify,
    )
    from normswap.errors import (
        CaptureError,
        CheckpointError,
        NormswapError,
        RefusedError,
        VerificationError,
    )
    from normswap.find import NormSite, NormSites
    from normswap.hub import load, save
    from normswap.plan import Plan, SiteOutcome
    from normswap.report import Report
    from normswap.spec import NormSpec
    from normswap.structure import ResidualStructure, Stack, Sublayer
    from normswap.verification import Verification

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "NormSite",
    "NormSites",
    "NormSpec",
    "NormswapError",
    "Plan",
    "RefusedError",
    "Report",
    "ResidualStructure",
    "SiteOutcome",
    "Stack",
    "Sublayer",
    "Verification",
    "VerificationError",
    "find_norms",
    "fold_affine",
    "fold_batchnorm",
    "init",
    "load",
    "norms",
    "param_groups",
    "plan_fold_affine",
    "plan_fold_batchnorm",
    "plan_swap_norms",
    "residual",
    "residual_structure",
    "save",
    "swap_norms",
    "verify",
]

_HOMES = {
    "api": (
        "find_norms",
        "fold_affine",
        "fold_batchnorm",
        "plan_fold_affine",
        "plan_fold_batchnorm",
        "plan_swap_norms",
        "residual_structure",
        "swap_norms",
    ),
    "errors": (
        "CaptureError",
        "CheckpointError",
        "NormswapError",
        "RefusedError",
        "VerificationError",
    ),
    "find": ("NormSite", "NormSites"),
    "hub": ("load", "save"),
    "plan": ("Plan", "SiteOutcome"),
    "report": ("Report",),
    "spec": ("NormSpec",),
    "structure": ("ResidualStructure", "Stack", "Sublayer"),
    "verification": ("Verification", "verify"),
}
# Modules of the public surface, imported on first use as well.
_MODULES = ("init", "norms", "param_groups", "residual")


def __getattr__(name: str) -> Any:
    """Import the module of a public name on first use: ``normswap --help`` needs no torch."""
    if name in _MODULES:
        return importlib.import_module(f"normswap.{name}")
    for home, names in _HOMES.items():
        if name in names:
            module = importlib.import_module(f"normswap.{home}")
            for each in names:
                globals()[each] = getattr(module, each)
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
