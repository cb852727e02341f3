"""Residual blocks: where the norm stands between a branch and the stream that it adds to.

With a branch ``f`` and norms ``P``, ``Q``:

    PreNorm          ``x + f(P(x))``
    PostNorm         ``P(x + f(x))``
    OutputNorm       ``x + Q(f(x))``
    SandwichNorm     ``x + Q(f(P(x)))``
    DeepNorm         ``P(alpha * x + f(x))``
    HyperConnection  ``n`` streams, mixed before and after ``f(P(·))``

Further arguments of a call go to ``f``. Branch and norm are the children ``function`` and ``norm``.
"""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from normswap.norms.arithmetic import Device, check_positive, fill, parameter


class PreNorm(nn.Module):
    """``y = x + f(norm(x))``.

    Shapes: whatever ``f`` and the norm take; ``f`` keeps the shape of ``x``.

    Args:
        function: the branch ``f``.
        norm: in front of it.

    Source: Xiong et al. 2020, *On Layer Normalization in the Transformer Architecture*, figure 1b.
    """

    def __init__(self, function: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.norm = norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x + self.function(self.norm(x), *args, **kwargs)


class PostNorm(nn.Module):
    """``y = norm(x + f(x))``.

    Shapes: whatever ``f`` and the norm take; ``f`` keeps the shape of ``x``.

    Args:
        function: the branch ``f``.
        norm: behind the sum.

    Source: Vaswani et al. 2017, *Attention Is All You Need*; Xiong et al. 2020, figure 1a.
    """

    def __init__(self, function: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.norm = norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.norm(x + self.function(x, *args, **kwargs))


class OutputNorm(nn.Module):
    """``y = x + norm(f(x))``: only what the branch adds is normalised.

    Shapes: whatever ``f`` and the norm take; ``f`` keeps the shape of ``x``.

    Args:
        function: the branch ``f``.
        norm: behind it.

    Source: Liu et al. 2022, *Swin Transformer V2*, section 3.2 (res-post-norm); also OLMo 2.
    """

    def __init__(self, function: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.norm = norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x + self.norm(self.function(x, *args, **kwargs))


class SandwichNorm(nn.Module):
    """``y = x + output_norm(f(norm(x)))``.

    Shapes: whatever ``f`` and the norms take; ``f`` keeps the shape of ``x``.

    Args:
        function: the branch ``f``.
        norm: in front of it.
        output_norm: behind it.

    Source: Ding et al. 2021, *CogView*, section 2.4 (Sandwich-LN); Kim et al. 2025, *Peri-LN*.
    """

    def __init__(self, function: nn.Module, norm: nn.Module, output_norm: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.norm = norm
        self.output_norm = output_norm

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x + self.output_norm(self.function(self.norm(x), *args, **kwargs))


class DeepNorm(nn.Module):
    """``y = norm(alpha * x + f(x))``.

    Shapes: whatever ``f`` and the norm take; ``f`` keeps the shape of ``x``.

    Args:
        function: the branch ``f``, initialised by ``normswap.init.deepnorm_init_``.
        norm: behind the sum.
        alpha: weight of the stream, by depth: ``normswap.init.deepnorm_scales``.

    Raises:
        ValueError: if alpha is not positive.

    Source: Wang et al. 2022, *DeepNet: Scaling Transformers to 1,000 Layers*, section 2.
    """

    def __init__(self, function: nn.Module, norm: nn.Module, alpha: float) -> None:
        super().__init__()
        if not alpha > 0:
            raise ValueError(f"DeepNorm: alpha is {alpha}; take it from deepnorm_scales(layers)")
        self.function = function
        self.norm = norm
        self.alpha = alpha

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.norm(x * self.alpha + self.function(x, *args, **kwargs))

    def extra_repr(self) -> str:
        return f"alpha={self.alpha}"


class HyperConnection(nn.Module):
    """A pre-norm block on ``n`` parallel streams instead of one.

    With the streams ``H`` ``[n, d]`` of a position:

        ``h = A_mᵀ H``, ``H' = A_rᵀ H + Bᵀ f(norm(h))``

    with ``A_m`` ``[n, 1]`` (what the branch reads), ``A_r`` ``[n, n]`` (how the streams mix) and
    ``B`` ``[1, n]`` (where the output goes). They start at ``e_{layer mod n}``, the identity and
    ones, which for equal streams is a pre-norm block. The dynamic form adds to each of them
    ``scale * tanh(LN(H) W)``, with ``W`` starting at 0 and the two scales (one for ``A_m`` and
    ``A_r``, one for ``B``) at 0.01. Streams come from :func:`expand_streams` and end in
    :func:`merge_streams`.

    Shapes: ``[*, n, d]`` to the same; ``function`` and ``norm`` see ``[*, d]``.

    Args:
        function: the branch ``f``.
        norm: in front of it.
        dim: the width ``d``.
        streams: ``n``.
        layer: the number of the block, which says what stream it reads at first.
        dynamic: whether the weights depend on the input.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for an input that does not end in ``[n, d]``.

    Source: Zhu et al. 2024, *Hyper-Connections*, equations 1 to 5 and 10 to 14.
    """

    stream_norm: nn.LayerNorm | None
    alpha: nn.Parameter  # (A_m A_r)
    beta: nn.Parameter
    alpha_weight: nn.Parameter
    beta_weight: nn.Parameter
    alpha_scale: nn.Parameter
    beta_scale: nn.Parameter

    def __init__(
        self,
        function: nn.Module,
        norm: nn.Module,
        dim: int,
        streams: int = 4,
        layer: int = 0,
        dynamic: bool = True,
        *,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, dim=dim, streams=streams)
        self.function = function
        self.norm = norm
        self.dim, self.streams, self.layer, self.dynamic = dim, streams, layer, dynamic
        self.stream_norm = nn.LayerNorm(dim, device=device, dtype=dtype) if dynamic else None
        shapes = {"alpha": (streams, streams + 1), "beta": (streams,)}
        extra = {
            "alpha_weight": (dim, streams + 1),
            "beta_weight": (dim,),
            "alpha_scale": (1,),
            "beta_scale": (1,),
        }
        for name, shape in {**shapes, **extra}.items():
            wanted = dynamic or name in shapes
            self.register_parameter(name, parameter(shape, wanted, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """A pre-norm block on equal streams; branch and norm keep their parameters."""
        self.alpha.zero_()
        self.alpha[self.layer % self.streams, 0] = 1.0
        self.alpha[:, 1:].fill_diagonal_(1.0)
        fill(self.beta, 1.0)
        for name, value in (("weight", 0.0), ("scale", 0.01)):
            fill(self._parameters[f"alpha_{name}"], value)
            fill(self._parameters[f"beta_{name}"], value)
        if self.stream_norm is not None:
            self.stream_norm.reset_parameters()

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if tuple(x.shape[-2:]) != (self.streams, self.dim):
            raise ValueError(
                f"HyperConnection: the input is {list(x.shape)}; it must end in "
                f"[{self.streams}, {self.dim}], see expand_streams"
            )
        alpha, beta = self._weights(x)
        mixed = alpha.transpose(-1, -2).to(x.dtype) @ x  # [*, 1 + n, d]
        out = self.function(self.norm(mixed[..., 0, :]), *args, **kwargs)
        return mixed[..., 1:, :] + beta.to(x.dtype).unsqueeze(-1) * out.unsqueeze(-2)

    def _weights(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.stream_norm is None:
            return self.alpha, self.beta
        normed = self.stream_norm(x)
        alpha = self.alpha + self.alpha_scale * torch.tanh(normed @ self.alpha_weight)
        return alpha, self.beta + self.beta_scale * torch.tanh(normed @ self.beta_weight)

    def extra_repr(self) -> str:
        return f"{self.dim}, streams={self.streams}, layer={self.layer}, dynamic={self.dynamic}"


def expand_streams(x: Tensor, streams: int) -> Tensor:
    """``[*, d]`` as equal streams ``[*, streams, d]``."""
    return x.unsqueeze(-2).expand(*x.shape[:-1], streams, x.shape[-1])


def merge_streams(x: Tensor, mean: bool = False) -> Tensor:
    """Streams ``[*, n, d]`` back to ``[*, d]``: their sum, as in the paper, or their mean.

    A network of untrained hyper-connections equals its pre-norm original up to this factor ``n``,
    which a norm behind the sum takes out if its eps grows by ``n²``; behind the mean it needs no
    change.
    """
    return x.mean(-2) if mean else x.sum(-2)
