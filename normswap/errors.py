"""The errors that normswap raises, each saying what went wrong, where, and what to do."""

from __future__ import annotations

from typing import Any


class NormswapError(Exception):
    """Base class of every error that normswap raises on purpose."""


class CaptureError(NormswapError):
    """The model could not be run and recorded: names the module call and the line."""


class RefusedError(NormswapError):
    """The request has no meaning for this model, or ``strict=True`` and a site was refused."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class VerificationError(NormswapError):
    """The changed model does not compute what the original computes; nothing was kept."""

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class CheckpointError(NormswapError):
    """A checkpoint is damaged, incomplete, or does not fit the architecture."""
