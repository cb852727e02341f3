"""Model surgery on normalisation layers: find norms, and fold BatchNorm into any model exactly."""

from normswap.api import find_norms, fold_batchnorm, plan_fold_batchnorm, verify
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
from normswap.verify import Verification

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
    "SiteOutcome",
    "Verification",
    "VerificationError",
    "find_norms",
    "fold_batchnorm",
    "load",
    "plan_fold_batchnorm",
    "save",
    "verify",
]
