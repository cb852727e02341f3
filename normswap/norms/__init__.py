"""The catalogue of norms as modules; what ``torch.nn`` has is not repeated here."""

from normswap.norms.affine import Affine, NoNorm
from normswap.norms.batch import BatchRenorm, GhostBatchNorm, MixingBatchNorm
from normswap.norms.conditional import SPADE, AdaIN, AdaLN, AdaLNZero, FiLM
from normswap.norms.evonorm import EvoNormB0, EvoNormS0
from normswap.norms.frozen import FrozenBatchNorm
from normswap.norms.group import BatchGroupNorm
from normswap.norms.layer import ChannelLayerNorm, OffsetLayerNorm, SampleLayerNorm
from normswap.norms.local import GRN, DivisiveNorm, LocalContrastNorm
from normswap.norms.normfree import FRN, TLU, Derf, DyT
from normswap.norms.recurrent import FrameBatchNorm, SequenceBatchNorm
from normswap.norms.recurrent_layers import BatchNormLSTM, BatchNormRNN
from normswap.norms.rms import ChannelRMSNorm, CRMSNorm, OffsetRMSNorm, PartialRMSNorm, RMSNorm
from normswap.norms.scale import FixNorm, LpNorm, ScaleNorm, fix_norm
from normswap.norms.weight import (
    CentredWeight,
    ScaledWeightStandardisation,
    WeightStandardisation,
    centre_weights,
    scaled_standardise_weight,
    standardise_weight,
)

__all__ = [
    "FRN",
    "GRN",
    "SPADE",
    "TLU",
    "AdaIN",
    "AdaLN",
    "AdaLNZero",
    "Affine",
    "BatchGroupNorm",
    "BatchNormLSTM",
    "BatchNormRNN",
    "BatchRenorm",
    "CRMSNorm",
    "CentredWeight",
    "ChannelLayerNorm",
    "ChannelRMSNorm",
    "Derf",
    "DivisiveNorm",
    "DyT",
    "EvoNormB0",
    "EvoNormS0",
    "FiLM",
    "FixNorm",
    "FrameBatchNorm",
    "FrozenBatchNorm",
    "GhostBatchNorm",
    "LocalContrastNorm",
    "LpNorm",
    "MixingBatchNorm",
    "NoNorm",
    "OffsetLayerNorm",
    "OffsetRMSNorm",
    "PartialRMSNorm",
    "RMSNorm",
    "SampleLayerNorm",
    "ScaleNorm",
    "ScaledWeightStandardisation",
    "SequenceBatchNorm",
    "WeightStandardisation",
    "centre_weights",
    "fix_norm",
    "scaled_standardise_weight",
    "standardise_weight",
]
