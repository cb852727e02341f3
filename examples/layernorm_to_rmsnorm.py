"""Turn the LayerNorms of a trained GPT-2 into RMSNorms without changing what it computes.

    python examples/layernorm_to_rmsnorm.py

Its head is tied to the embedding. The tie is kept: one parameter-free centring op stands behind the
embedding, and everything else that writes to the residual stream is centred in its weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

import normswap as ns

CHECKPOINT = Path(__file__).resolve().parent / "checkpoints" / "tiny_gpt2"


def held_out_windows(context: int) -> Tensor:
    """Token ids [N, context] of text that the network was not trained on; a token is a byte."""
    ids = torch.tensor(list((CHECKPOINT / "held_out.txt").read_bytes()))
    return ids[: len(ids) // context * context].view(-1, context)


def loss(network: nn.Module, ids: Tensor) -> float:
    """Nats a byte."""
    with torch.inference_mode():
        logits = network(ids).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()


def norm_classes(network: nn.Module) -> list[str]:
    """The classes of the network's norms, with the package that each is from."""
    classes = {type(site.module) for site in ns.find_norms(network)}
    return sorted(f"{cls.__module__.split('.')[0]}: {cls.__name__}" for cls in classes)


def main() -> None:
    """Convert, and compare the losses; then the same with gamma and beta folded away as well."""
    network = GPT2LMHeadModel.from_pretrained(CHECKPOINT).eval()
    ids = held_out_windows(network.config.n_positions)
    example = {"input_ids": ids[:2]}

    mapping = {nn.LayerNorm: nn.RMSNorm}
    new, report = ns.swap_norms(network, mapping, example, method="exact")
    plain, _ = ns.swap_norms(
        network, mapping, example, method="exact", fold_affine=True, untie=True
    )
    print(report, end="\n\n")

    recorded = json.loads((CHECKPOINT / "training.json").read_text("utf-8"))["held_out_loss"]
    print(f"Held-out loss, nats a byte (recorded after training: {recorded:.6f})")
    rows = {"original": network, "RMSNorm": new, "RMSNorm, affine folded, untied": plain}
    for name, each in rows.items():
        print(f"  {name:32}{loss(each, ids):.6f}  {', '.join(norm_classes(each))}")
        assert abs(loss(each, ids) - recorded) < 1e-4


if __name__ == "__main__":
    main()
