"""Fold one member of every timm family: the one with the fewest parameters.

``python tests/sweeps/sweep_timm.py`` resumes and writes ``timm.md``; ``--only NAME`` runs one
family again; ``--smallest`` looks for the smallest members again (minutes).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from common import HERE, Subject, main
from helpers import batch_norm_names

SMALLEST = HERE / "timm_smallest.json"
SIZES = (64, 96, 128, 160, 192, 224, 240, 256, 288, 299, 320, 384, 448, 512)


def find_smallest() -> dict[str, str]:
    """Family to its member with the fewest parameters, with BatchNorms if any member has them."""
    import timm

    found = {}
    for family in timm.list_modules():
        sizes = {}
        for name in timm.list_models(module=family, exclude_filters="test_*"):
            try:
                with torch.device("meta"):
                    model = timm.create_model(name, pretrained=False)
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            parameters = sum(p.numel() for p in model.parameters())
            sizes[name] = (not batch_norm_names(model), parameters, name)
        if sizes:
            found[family] = min(sizes, key=lambda n: sizes[n])
        print(family, found.get(family), file=sys.stderr, flush=True)
    return found


def names() -> list[str]:
    """The families."""
    return list(json.loads(SMALLEST.read_text(encoding="utf-8")))


def build(family: str) -> Subject:
    """The smallest member of a family on the smallest input that it accepts."""
    import timm

    member = json.loads(SMALLEST.read_text(encoding="utf-8"))[family]
    model = timm.create_model(member, pretrained=False).eval()
    shape = smallest_input(model)
    generator = torch.Generator().manual_seed(1)
    return Subject(
        model, (torch.randn(shape, generator=generator),), label=f"{member}, {shape[-1]}"
    )


def smallest_input(model: Any) -> tuple[int, ...]:
    """Two images of the smallest side with which the model runs."""
    config = model.pretrained_cfg
    channels, default = config["input_size"][0], config["input_size"][-1]
    sizes = [default] if config.get("fixed_input_size") else [*SIZES, default]
    error: Exception | None = None
    for size in sizes:
        try:
            with torch.inference_mode():
                model(torch.randn(2, channels, size, size))
            return (2, channels, size, size)
        except Exception as failed:
            error = failed
    raise RuntimeError(f"no input size runs: {error}")


if __name__ == "__main__":
    if "--smallest" in sys.argv:
        SMALLEST.write_text(json.dumps(find_smallest(), indent=1) + "\n", encoding="utf-8")
    else:
        main("BatchNorm folding over timm families", "timm", names, build)
