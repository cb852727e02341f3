"""Initialisations that belong to a norm or its placement; for untrained weights only.

Functions that end in an underscore write in place, as in ``torch.nn.init``.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


def small_init_(weight: Tensor, dim: int) -> Tensor:
    """Normal values of standard deviation ``sqrt(2 / (5 * dim))``, for every matrix of a block.

    ``dim`` is the width of the model, also for matrices with a wider side: it is Xavier's normal
    initialisation of a ``dim × 4·dim`` matrix.

    Source: Nguyen and Salazar 2019, *Transformers without Tears*, section 2 (SmallInit).
    """
    if dim < 1:
        raise ValueError(f"small_init_: dim is {dim}; give the width of the model")
    return nn.init.normal_(weight, 0.0, math.sqrt(2 / (5 * dim)))


def fixnorm_init_(weight: Tensor, bound: float = 0.01, padding_idx: int | None = None) -> Tensor:
    """Uniform values in ``±bound`` for the table behind ``normswap.norms.FixNorm``.

    The row ``padding_idx`` is set to zero, which FixNorm keeps.

    Source: Nguyen and Chiang 2018, *Improving Lexical Choice in Neural Machine Translation*.
    """
    nn.init.uniform_(weight, -bound, bound)
    if padding_idx is not None:
        with torch.no_grad():
            weight[padding_idx].zero_()
    return weight


def gpt2_output_init_(weight: Tensor, num_layers: int, std: float = 0.02) -> Tensor:
    """Normal values of standard deviation ``std / sqrt(2 * num_layers)``.

    For the projections that write into the residual stream, two per layer (attention and MLP), so
    that their sum does not grow with depth.

    Source: Radford et al. 2019, *Language Models are Unsupervised Multitask Learners*, section 2.3.
    """
    if num_layers < 1:
        raise ValueError(f"gpt2_output_init_: num_layers is {num_layers}; it must be at least 1")
    return nn.init.normal_(weight, 0.0, std / math.sqrt(2 * num_layers))


@dataclass(frozen=True)
class DeepNormScale:
    """The two constants of DeepNorm for an encoder or a decoder.

    Attributes:
        alpha: weight of the stream in ``LN(alpha * x + f(x))``.
        beta: gain of the scaled projections at initialisation.
    """

    alpha: float
    beta: float


def deepnorm_scales(
    encoder_layers: int = 0, decoder_layers: int = 0
) -> tuple[DeepNormScale | None, DeepNormScale | None]:
    """The constants for an encoder of N layers and a decoder of M; ``None`` for what is not there.

    - encoder or decoder alone: ``alpha = (2N)^(1/4)``, ``beta = (8N)^(-1/4)``;
    - both: encoder ``alpha = 0.81 (N⁴M)^(1/16)``, ``beta = 0.87 (N⁴M)^(-1/16)``, decoder
      ``alpha = (3M)^(1/4)``, ``beta = (12M)^(-1/4)``.

    Raises:
        ValueError: if there are no layers.

    Source: Wang et al. 2022, *DeepNet*, figure 2.
    """
    n, m = encoder_layers, decoder_layers
    if n < 0 or m < 0 or n + m == 0:
        raise ValueError(f"deepnorm_scales: {n} encoder and {m} decoder layers; give how many")
    if n and m:
        both = (n**4 * m) ** (1 / 16)
        decoder = DeepNormScale((3 * m) ** 0.25, (12 * m) ** -0.25)
        return DeepNormScale(0.81 * both, 0.87 / both), decoder
    alone = DeepNormScale((2 * (n + m)) ** 0.25, (8 * (n + m)) ** -0.25)
    return (alone, None) if n else (None, alone)


def deepnorm_init_(model: nn.Module, beta: float, scaled: Sequence[str] = ()) -> nn.Module:
    """Xavier's normal initialisation of every linear layer, with gain ``beta`` for some.

    Gain ``beta`` is for the value projection, the output projection and both layers of the
    feed-forward network; gain 1 for query and key. ``nn.MultiheadAttention`` is known (also
    packed); of other ``nn.Linear`` modules, those whose name fits a pattern of ``scaled``
    (``"*.linear1"``) get gain ``beta``. Biases, embeddings and norms are left as they are.

    Returns:
        The model.

    Raises:
        ValueError: if a pattern fits no linear layer.

    Source: Wang et al. 2022, *DeepNet*, figure 2.
    """
    known = set(_attention_outputs(model))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for pattern in scaled:
        if not fnmatch.filter(linears, pattern):
            names = ", ".join(list(linears)[:5])
            raise ValueError(f"no nn.Linear is named {pattern!r}; there are {names} …")
    for name, linear in linears.items():
        fits = name in known or any(fnmatch.fnmatchcase(name, pattern) for pattern in scaled)
        nn.init.xavier_normal_(linear.weight, beta if fits else 1.0)
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            for weight, gain in zip(_query_key_value(module), (1.0, 1.0, beta), strict=True):
                nn.init.xavier_normal_(weight, gain)
    return model


def _attention_outputs(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            yield f"{name}.out_proj" if name else "out_proj"


def _query_key_value(attention: nn.MultiheadAttention) -> tuple[Tensor, ...]:
    if attention._qkv_same_embed_dim:
        return attention.in_proj_weight.detach().chunk(3)
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return tuple(attention.get_parameter(name).detach() for name in names)
