"""How transformers' mixtures of experts compute: routed by data, or all chosen experts in a batch.

The batched form has the same result, runs in float64 and on fake tensors, and takes one path
whatever the router says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn


def compute_in_batch(model: nn.Module) -> None:
    """Use the batched form of every mixture of experts for good (on a copy of a model)."""
    switch: Any = getattr(model, "set_experts_implementation", None)
    if switch is not None:
        with contextlib.suppress(Exception):  # it has no experts, or only one way to compute them
            switch("batched_mm")


@contextmanager
def computed_in_batch(model: nn.Module) -> Generator[None]:
    """Use the batched form for a while."""
    snapshot: Any = getattr(model, "get_experts_implementation", None)
    before: Any = None
    if snapshot is not None:
        with contextlib.suppress(Exception):
            before = snapshot()
    compute_in_batch(model)
    try:
        yield
    finally:
        if before:
            with contextlib.suppress(Exception):
                model.set_experts_implementation(before)  # type: ignore[operator]
