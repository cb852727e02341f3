"""Fold torchvision's classification, detection, segmentation, video and flow models.

One member per module of torchvision: the smallest that holds a BatchNorm (the smallest, where
none does); of the detectors and segmenters every one.
"""

from __future__ import annotations

from typing import Any

import torch
from common import Subject, main
from helpers import batch_norm_names

EVERY = ("detection", "segmentation", "video", "optical_flow")
# Thresholds at zero, so that untrained detectors find something to compare.
DETECTION = {
    "fasterrcnn": {"box_score_thresh": 0.0, "box_detections_per_img": 20},
    "maskrcnn": {"box_score_thresh": 0.0, "box_detections_per_img": 5},
    "keypointrcnn": {"box_score_thresh": 0.0, "box_detections_per_img": 5},
    "retinanet": {"score_thresh": 0.0, "detections_per_img": 20},
    "fcos": {"score_thresh": 0.0, "detections_per_img": 20},
    "ssd": {"score_thresh": 0.0, "detections_per_img": 20},
}


def make(name: str) -> Any:
    """A model on random weights."""
    from torchvision.models import get_model, get_model_builder

    module = get_model_builder(name).__module__
    options: dict[str, Any] = {"weights": None}
    if ".detection" in module or ".segmentation" in module:
        options["weights_backbone"] = None
    for prefix, thresholds in DETECTION.items():
        if name.startswith(prefix):
            options |= thresholds
    if name in ("googlenet", "inception_v3"):
        options |= {"init_weights": False, "aux_logits": False}
    return get_model(name, **options)


def names() -> list[str]:
    """The chosen members."""
    from torchvision.models import get_model_builder, list_models

    chosen: dict[str, tuple[bool, int, str]] = {}
    for name in list_models():
        module = get_model_builder(name).__module__
        if ".quantization" in module:
            continue
        family = name if any(part in module for part in EVERY) else module
        try:
            with torch.device("meta"):
                model = make(name)
        except NotImplementedError:  # some read a value while they are built
            model = make(name)
        size = sum(p.numel() for p in model.parameters())
        rank = (not batch_norm_names(model), size, name)
        chosen[family] = min(rank, chosen.get(family, rank))
    return sorted(name for _, _, name in chosen.values())


def build(name: str) -> Subject:
    """A model and a small input for it."""
    from torchvision.models import get_model_builder

    model = make(name).eval()
    module = get_model_builder(name).__module__
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    if ".detection" in module:
        return Subject(model, ([random(3, 96, 128)],))
    if ".optical_flow" in module:
        images = (random(1, 3, 128, 128), random(1, 3, 128, 128))
        return Subject(model, images, {"num_flow_updates": 2})
    if ".video" in module:
        side = 224 if name.startswith(("mvit", "swin", "s3d")) else 64
        return Subject(model, (random(1, 3, 16, side, side),))
    for side in (64, 96, 128, 224, 299):
        try:
            with torch.inference_mode():
                model(random(2, 3, side, side))
        except (RuntimeError, ValueError, AssertionError):
            continue
        return Subject(model, (random(2, 3, side, side),), label=str(side))
    raise RuntimeError("no input size runs")


if __name__ == "__main__":
    main("BatchNorm folding over torchvision models", "torchvision", names, build, timeout=300)
