"""Swap every RMSNorm of a Gemma 3 language model, whose scale is ``1 + w``, for `nn.RMSNorm`."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Gemma3TextConfig

import normswap as ns


def main() -> None:
    config = Gemma3TextConfig(
        vocab_size=100,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.normal_(parameter)
    new, report = ns.swap_norms(model, {"rms": nn.RMSNorm}, {"input_ids": torch.arange(8)[None]})
    print(report)
    print(type(model.model.norm).__name__, "->", type(new.model.norm).__name__)


if __name__ == "__main__":
    main()
