"""Write a model that is a plain one of its class: the directory loads without normswap."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from normswap import architecture
from normswap.checkpoint import staged_directory
from normswap.errors import VerificationError
from normswap.report import Report


def save_plain(
    model: nn.Module,
    directory: str | Path,
    report: Report,
    *,
    overwrite: bool = False,
    max_shard_size: int | str,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write a plain model with its report; a transformers model as `from_pretrained` reads it.

    Of another model the weights are written as ``model.safetensors``.

    Raises:
        CheckpointError: the directory exists or cannot be written.
    """
    from safetensors.torch import save_model

    with staged_directory(directory, overwrite=overwrite) as stage:
        if architecture.is_transformers_model(model):
            model.save_pretrained(stage, max_shard_size=max_shard_size)  # type: ignore[operator]
        else:
            save_model(model, str(stage / "model.safetensors"))
        (stage / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
        (stage / "report.md").write_text(report.to_markdown() + "\n", encoding="utf-8")
        (stage / "README.md").write_text(_card(model, report), encoding="utf-8")
        if complete is not None:
            complete(stage)


def check_plain(directory: Path, model: nn.Module) -> None:
    """Read what :func:`save_plain` wrote and compare it bit by bit.

    Raises:
        VerificationError: something differs.
    """
    from safetensors.torch import load_file

    if architecture.is_transformers_model(model):
        again: nn.Module = type(model).from_pretrained(directory)  # type: ignore[attr-defined]
        state = again.state_dict()
    else:
        state = load_file(directory / "model.safetensors")
    known = model.state_dict()
    differing = [n for n, t in state.items() if n not in known or not torch.equal(t, known[n])]
    if differing:
        raise VerificationError(
            f"what was written does not load as what was saved ({differing[0]!r}); nothing was "
            "kept. This is a fault in normswap: please report it with the model"
        )


def _card(model: nn.Module, report: Report) -> str:
    name = type(model).__name__
    load = f"{type(model).__module__.partition('.')[0]}.{name}.from_pretrained(directory)"
    if not architecture.is_transformers_model(model):
        load = "model.load_state_dict(safetensors.torch.load_file('model.safetensors'))"
    counts = ", ".join(f"{n} norms {status}" for status, n in report.counts.items())
    return f"""---
tags:
- normswap
---

# {name}, {report.rewrite}

Made from a {report.model} by normswap: {counts}. Where every tensor comes from, and how far the
outputs moved, is in [report.md](report.md). It is a plain {name} and loads without normswap:
`{load}`.
"""
