"""Norms of the weights instead of the activations, as parametrisations of linears and convs."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normswap.norms.arithmetic import Device, check_positive, fill, parameter, widen

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class CentredWeight(nn.Module):
    """``W ← C W``: subtract the mean over the outputs, so that the output has mean zero.

    An RMSNorm that reads only such outputs (and their sums) computes what a LayerNorm would, in
    training too, as long as no dropout stands between.

    Shapes: any tensor with that axis, to the same.

    Args:
        dim: the axis of the outputs.

    Source: Guo et al. 2026, *Enjoy Your Layer Normalization with the Computational Efficiency of
    RMSNorm* (column-based weight centring).
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, weight: Tensor) -> Tensor:
        wide = widen(weight)
        return (wide - wide.mean(self.dim, keepdim=True)).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored when a weight is assigned: the weight itself."""
        return weight

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


def centre_weights(module: nn.Module, dim: int | None = None) -> nn.Module:
    """Parametrise a writer of the residual stream by :class:`CentredWeight`; returns the module.

    Weight and bias are centred over the outputs: of an ``nn.Linear``, a convolution or an
    ``nn.Embedding``. For other classes ``dim`` says which axis of their ``weight`` the outputs are
    (1 for GPT-2's ``Conv1D``).

    Raises:
        ValueError: for a convolution in groups (a LayerNorm's mean is over all of them), a table
            that rescales its rows (``max_norm``), or an unknown class without ``dim``.
    """
    axis = _output_axis(module) if dim is None else dim
    parametrize.register_parametrization(module, "weight", CentredWeight(axis))
    if isinstance(getattr(module, "bias", None), Tensor):
        parametrize.register_parametrization(module, "bias", CentredWeight(0))
    return module


def _output_axis(module: nn.Module) -> int:
    where = type(module).__name__
    if getattr(module, "groups", 1) != 1:
        raise ValueError(
            f"{where} has {module.groups} groups, whose outputs cannot be centred together; "
            "keep the LayerNorm behind it"
        )
    if isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise ValueError(f"{where} has max_norm, which rescales its rows; set it to None")
        return 1
    if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        return 0
    if isinstance(module, _TRANSPOSED):
        return 1
    raise ValueError(f"{where}: give dim, the axis of its weight that holds the outputs")


def _standardised(weight: Tensor, eps: float) -> Tensor:
    axes = list(range(1, weight.dim()))
    var, mean = torch.var_mean(weight, axes, correction=0, keepdim=True)
    return (weight - mean) * torch.rsqrt(var + eps)


class WeightStandardisation(nn.Module):
    """``W ← (W - μ) / sqrt(var + eps)`` with mean and biased variance of each filter.

    Shapes: ``[out, …]`` to the same; a filter is everything but the first axis.

    Args:
        eps: added to the variance, inside the root. timm has 1e-6; the authors' PyTorch code takes
            the unbiased deviation and adds 1e-5 to that.

    Source: Qiao et al. 2019, *Micro-Batch Training with Batch-Channel Normalization and Weight
    Standardization*.
    """

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, weight: Tensor) -> Tensor:
        return _standardised(widen(weight), self.eps).to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored when a weight is assigned: the weight itself."""
        return weight

    def extra_repr(self) -> str:
        return f"eps={self.eps}"


class ScaledWeightStandardisation(nn.Module):
    """``W ← gain * gamma * (W - μ) / sqrt(fan_in * (var + eps))`` for each filter.

    Keeps the variance of the signal at its own, without any activation norm: ``gain`` is learned,
    per filter, and starts at 1; ``gamma`` makes up for the activation (1.7139 for ReLU, that is
    ``sqrt(2 / (1 - 1/π))``).

    Shapes: ``[out, …]`` to the same; ``gain`` ``[out]``.

    Args:
        num_filters: ``out``.
        gamma: the constant of the activation.
        eps: added to the variance, inside the root, as in timm. (The authors' code divides by
            ``sqrt(max(fan_in * var, 1e-4))``.)
        device: where the gain is made.
        dtype: of the gain.

    Raises:
        ValueError: for a weight with another number of filters.

    Source: Brock et al. 2021, *Characterizing signal propagation to close the performance gap in
    unnormalized ResNets*, section 4.
    """

    gain: nn.Parameter

    def __init__(
        self,
        num_filters: int,
        gamma: float = 1.0,
        eps: float = 1e-6,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, num_filters=num_filters)
        self.num_filters = num_filters
        self.gamma = gamma
        self.eps = eps
        self.register_parameter("gain", parameter([num_filters], device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 1."""
        fill(self.gain, 1.0)

    def forward(self, weight: Tensor) -> Tensor:
        if len(weight) != self.num_filters:
            raise ValueError(
                f"ScaledWeightStandardisation: the weight {list(weight.shape)} has {len(weight)} "
                f"filters, the gain {self.num_filters}; build it for that many"
            )
        wide = widen(weight)
        gain = widen(self.gain).reshape(-1, *[1] * (weight.dim() - 1))
        fan_in = weight[0].numel()
        out = _standardised(wide, self.eps) * (gain * (self.gamma * fan_in**-0.5))
        return out.to(weight.dtype)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored when a weight is assigned: the weight itself."""
        return weight

    def extra_repr(self) -> str:
        return f"{self.num_filters}, gamma={self.gamma}, eps={self.eps}"


def standardise_weight(module: nn.Module, eps: float = 1e-6) -> nn.Module:
    """Parametrise a linear or convolution by :class:`WeightStandardisation`; returns the module.

    Raises:
        ValueError: for other classes, or filters of a single weight.
    """
    _check_filters(module)
    parametrize.register_parametrization(module, "weight", WeightStandardisation(eps))
    return module


def scaled_standardise_weight(
    module: nn.Module, gamma: float = 1.0, eps: float = 1e-6
) -> nn.Module:
    """Parametrise by :class:`ScaledWeightStandardisation`; returns the module.

    Raises:
        ValueError: for other classes, or filters of a single weight.
    """
    weight = _check_filters(module)
    scaled = ScaledWeightStandardisation(
        len(weight), gamma, eps, device=weight.device, dtype=weight.dtype
    )
    parametrize.register_parametrization(module, "weight", scaled)
    return module


def _check_filters(module: nn.Module) -> Tensor:
    where = type(module).__name__
    if not isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
        raise ValueError(
            f"{where}: only nn.Linear and nn.Conv1d/2d/3d keep one filter per row of their weight"
        )
    if module.weight[0].numel() < 2:
        raise ValueError(f"{where}: filters of a single weight have no deviation; leave it out")
    return module.weight
