"""Every norm of the catalogue once, small, with inputs: for what must hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap import norms


@dataclass(frozen=True)
class Case:
    """A norm, how to build it, and the shapes of its inputs.

    `linear` marks norms with a linear layer or convolution of their own, which takes inputs of its
    own dtype only and rounds as that layer does.
    """

    name: str
    build: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    repr: str
    linear: bool = False

    def make(self, seed: int = 0) -> nn.Module:
        return randomised(self.build(), seed)

    def inputs(self, dtype: torch.dtype = torch.float64, seed: int = 1) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(seed)
        return tuple(
            torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
            for shape in self.shapes
        )


@torch.no_grad()
def randomised(module: nn.Module, seed: int = 0) -> nn.Module:
    """Random parameters and buffers, with negative and zero scales; positive where they must be."""
    generator = torch.Generator().manual_seed(seed)
    named = [*module.named_parameters(), *module.named_buffers()]
    for name, tensor in named:
        if not tensor.is_floating_point() or name.endswith("kernel"):
            continue
        values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if name.rpartition(".")[2] in ("running_var", "alpha", "sigma", "learned_eps"):
            values = 0.3 + values.abs()
        elif name.rpartition(".")[2] == "running_square":
            values = 6.0 + values.abs()  # above the square of any mean that is drawn here
        elif tensor.dim() == 1 and tensor.numel() > 2 and name.endswith("weight"):
            values[0] = -values[0].abs()
            values[tensor.numel() // 2] = 0.0
        tensor.copy_(values)
    return module


NCHW = (4, 6, 3, 3)
TOKENS = (2, 3, 8)

CASES = [
    Case(
        "FrozenBatchNorm",
        lambda: norms.FrozenBatchNorm(6, eps=1e-3),
        (NCHW,),
        "FrozenBatchNorm(6, eps=0.001)",
    ),
    Case(
        "GhostBatchNorm",
        lambda: norms.GhostBatchNorm(6, ghost_size=2),
        (NCHW,),
        "GhostBatchNorm(6, eps=1e-05, affine=True, momentum=0.1, track_running_stats=True, "
        "ghost_size=2, shuffle=False)",
    ),
    Case(
        "BatchRenorm",
        lambda: norms.BatchRenorm(6, warmup=0, r_steps=1, d_steps=1),
        (NCHW,),
        "BatchRenorm(6, eps=1e-05, affine=True, momentum=0.01, track_running_stats=True, "
        "r_max=3.0, d_max=5.0, warmup=0, r_steps=1, d_steps=1)",
    ),
    Case(
        "MixingBatchNorm",
        lambda: norms.MixingBatchNorm(6, alpha=0.25),
        (NCHW,),
        "MixingBatchNorm(6, eps=1e-05, affine=True, momentum=0.1, track_running_stats=True, "
        "alpha=0.25)",
    ),
    Case(
        "BatchGroupNorm",
        lambda: norms.BatchGroupNorm(3, 6, num_examples=2),
        (NCHW,),
        "BatchGroupNorm(3, 6, eps=1e-05, affine=True, momentum=0.1, track_running_stats=True, "
        "num_examples=2)",
    ),
    Case(
        "ChannelLayerNorm",
        lambda: norms.ChannelLayerNorm(6),
        (NCHW,),
        "ChannelLayerNorm(6, eps=1e-06, affine=True, bias=True)",
    ),
    Case(
        "ChannelRMSNorm",
        lambda: norms.ChannelRMSNorm(6),
        (NCHW,),
        "ChannelRMSNorm(6, eps=1e-06, affine=True, bias=False)",
    ),
    Case(
        "SampleLayerNorm",
        lambda: norms.SampleLayerNorm(6, bias=False),
        (NCHW,),
        "SampleLayerNorm(6, eps=1e-05, affine=True, bias=False)",
    ),
    Case(
        "OffsetLayerNorm",
        lambda: norms.OffsetLayerNorm(8),
        (TOKENS,),
        "OffsetLayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True)",
    ),
    Case(
        "RMSNorm",
        lambda: norms.RMSNorm(8, bias=True),
        (TOKENS,),
        "RMSNorm((8,), eps=1e-06, elementwise_affine=True, bias=True)",
    ),
    Case(
        "PartialRMSNorm",
        lambda: norms.PartialRMSNorm(8, p=0.3),
        (TOKENS,),
        "PartialRMSNorm((8,), eps=1e-06, elementwise_affine=True, bias=False, p=0.3)",
    ),
    Case(
        "OffsetRMSNorm",
        lambda: norms.OffsetRMSNorm(8),
        (TOKENS,),
        "OffsetRMSNorm((8,), eps=1e-06, elementwise_affine=True, bias=False)",
    ),
    Case(
        "CRMSNorm",
        lambda: norms.CRMSNorm(8),
        (TOKENS,),
        "CRMSNorm((8,), eps=1e-06, elementwise_affine=False, bias=False)",
    ),
    Case("ScaleNorm", lambda: norms.ScaleNorm(8), (TOKENS,), "ScaleNorm((8,), eps=1e-05)"),
    Case(
        "LpNorm",
        lambda: norms.LpNorm(8, p=3.0),
        (TOKENS,),
        "LpNorm((8,), eps=1e-06, elementwise_affine=True, bias=True, p=3.0)",
    ),
    Case(
        "LpNorm (p = 1)",
        lambda: norms.LpNorm(8, p=1),
        (TOKENS,),
        "LpNorm((8,), eps=1e-06, elementwise_affine=True, bias=True, p=1)",
    ),
    Case(
        "LpNorm (p = inf)",
        lambda: norms.LpNorm(8, p=float("inf"), bias=False),
        (TOKENS,),
        "LpNorm((8,), eps=1e-06, elementwise_affine=True, bias=False, p=inf)",
    ),
    Case(
        "FixNorm",
        norms.FixNorm,
        ((5, 8),),
        "FixNorm(dim=-1, scale=1.0, eps=1e-12)",
    ),
    Case("AdaIN", norms.AdaIN, (NCHW, (4, 6, 2, 5)), "AdaIN(eps=1e-05)"),
    Case(
        "AdaLN",
        lambda: norms.AdaLN(8, 5),
        (TOKENS, (2, 5)),
        "AdaLN(\n  (8,), condition_size=5, eps=1e-06\n"
        "  (modulation): Linear(in_features=5, out_features=16, bias=True)\n)",
        linear=True,
    ),
    Case(
        "AdaLNZero",
        lambda: norms.AdaLNZero(8, 5),
        (TOKENS, (2, 5)),
        "AdaLNZero(\n  (8,), condition_size=5, eps=1e-06\n"
        "  (modulation): Linear(in_features=5, out_features=24, bias=True)\n)",
        linear=True,
    ),
    Case(
        "FiLM",
        lambda: norms.FiLM(6, 5),
        (NCHW, (4, 5)),
        "FiLM(\n  6, channel_dim=1\n"
        "  (modulation): Linear(in_features=5, out_features=12, bias=True)\n)",
        linear=True,
    ),
    Case(
        "SPADE",
        lambda: norms.SPADE(6, 2, hidden=4),
        (NCHW, (4, 2, 6, 6)),
        "SPADE(\n  6, mask_channels=2\n"
        f"  (norm): {nn.BatchNorm2d(6, affine=False)}\n"
        "  (shared): Conv2d(2, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))\n"
        "  (gamma): Conv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))\n"
        "  (beta): Conv2d(4, 6, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1))\n)",
        linear=True,
    ),
    Case(
        "LocalContrastNorm",
        lambda: norms.LocalContrastNorm(3),
        ((2, 2, 5, 4),),
        "LocalContrastNorm(kernel_size=3, sigma=0.75, eps=0.0001)",
    ),
    Case(
        "DivisiveNorm",
        lambda: norms.DivisiveNorm(6, kernel_size=3),
        (NCHW,),
        "DivisiveNorm(6, kernel_size=3, rank=2)",
    ),
    Case(
        "GRN",
        lambda: norms.GRN(6, channels_last=False),
        (NCHW,),
        "GRN(6, eps=1e-06, channels_last=False)",
    ),
    Case("CentredWeight", norms.CentredWeight, ((5, 8),), "CentredWeight(dim=0)"),
    Case(
        "WeightStandardisation",
        norms.WeightStandardisation,
        ((5, 2, 3, 3),),
        "WeightStandardisation(eps=1e-06)",
    ),
    Case(
        "ScaledWeightStandardisation",
        lambda: norms.ScaledWeightStandardisation(5, gamma=1.5),
        ((5, 2, 3, 3),),
        "ScaledWeightStandardisation(5, gamma=1.5, eps=1e-06)",
    ),
    Case(
        "DyT",
        lambda: norms.DyT(8),
        (TOKENS,),
        "DyT((8,), alpha_init=0.5, channels_last=True, elementwise_affine=True, bias=True)",
    ),
    Case(
        "Derf",
        lambda: norms.Derf(6, channels_last=False),
        (NCHW,),
        "Derf((6,), alpha_init=0.5, channels_last=False, elementwise_affine=True, bias=True, "
        "shift_init=0.0)",
    ),
    Case(
        "FRN",
        lambda: norms.FRN(6, learned_eps=True),
        (NCHW,),
        "FRN(6, eps=1e-06, learned_eps=True)",
    ),
    Case("TLU", lambda: norms.TLU(6), (NCHW,), "TLU(6)"),
    Case(
        "EvoNormB0",
        lambda: norms.EvoNormB0(6),
        (NCHW,),
        "EvoNormB0(6, eps=0.001, affine=True, momentum=0.1, track_running_stats=True)",
    ),
    Case(
        "EvoNormS0",
        lambda: norms.EvoNormS0(6, num_groups=3),
        (NCHW,),
        "EvoNormS0(6, num_groups=3, eps=1e-05)",
    ),
    Case("Affine", lambda: norms.Affine(6), (NCHW,), "Affine(6, bias=True, channel_dim=1)"),
    Case(
        "NoNorm",
        lambda: norms.NoNorm(8, elementwise_affine=True),
        (TOKENS,),
        "NoNorm((8,), eps=0.0, elementwise_affine=True, bias=True)",
    ),
    Case(
        "SequenceBatchNorm",
        lambda: norms.SequenceBatchNorm(8),
        ((3, 4, 8),),
        "SequenceBatchNorm(8, eps=1e-05, affine=True, momentum=0.1, gain=1.0)",
    ),
    Case(
        "FrameBatchNorm",
        lambda: norms.FrameBatchNorm(8, 4),
        ((3, 4, 8),),
        "FrameBatchNorm(8, eps=1e-05, affine=True, momentum=0.1, gain=1.0, max_length=4)",
    ),
    Case(
        "BatchNormRNN",
        lambda: norms.BatchNormRNN(4, 3),
        ((3, 4, 4),),
        "BatchNormRNN(\n  4, 3, nonlinearity='tanh'\n"
        "  (input): Linear(in_features=4, out_features=3, bias=False)\n"
        "  (recurrence): Linear(in_features=3, out_features=3, bias=False)\n"
        "  (norm): SequenceBatchNorm(3, eps=1e-05, affine=True, momentum=0.1, gain=1.0)\n)",
        linear=True,
    ),
    Case(
        "BatchNormLSTM",
        lambda: norms.BatchNormLSTM(4, 2, max_length=3, recurrent=True),
        ((3, 3, 4),),
        "BatchNormLSTM(\n  4, 2, recurrent=True\n"
        "  (input): Linear(in_features=4, out_features=8, bias=False)\n"
        "  (recurrence): Linear(in_features=2, out_features=8, bias=False)\n"
        "  (norm): FrameBatchNorm(8, eps=1e-05, affine=True, momentum=0.1, gain=0.1, "
        "max_length=3)\n"
        "  (recurrence_norm): FrameBatchNorm(8, eps=1e-05, affine=True, momentum=0.1, gain=0.1, "
        "max_length=3)\n"
        "  (cell_norm): FrameBatchNorm(2, eps=1e-05, affine=True, momentum=0.1, gain=0.1, "
        "max_length=3)\n)",
        linear=True,
    ),
]
