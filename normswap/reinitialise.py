"""Initialise the branches of an untrained transformer as its placement of norms asks for."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn

from normswap.branches import ancestors, attention_operands, weights_of
from normswap.errors import NormswapError
from normswap.forms import StoredTensor
from normswap.init import small_init_
from normswap.residual_graph import Branch
from normswap.structure import Reading, deepnorm_scale

INITIALISATIONS = ("small", "deepnorm")


@torch.no_grad()
def reinitialise(model: nn.Module, reading: Reading, how: str) -> list[str]:
    """Draw the matrices of every branch anew, in place; the names of what was drawn.

    ``"small"``: normal values of standard deviation ``sqrt(2 / (5 d))`` for the width ``d``
    (Nguyen and Salazar 2019). ``"deepnorm"``: Xavier's normal values, with gain ``beta`` for the
    feed-forward, value and output projections and 1 for query and key (Wang et al. 2022). Biases,
    norms, embeddings and heads stay.

    Raises:
        NormswapError: query, key and value are packed in a way that is not known.
    """
    drawn: list[str] = []
    for chain, stack in zip(reading.chains, reading.structure.stacks, strict=True):
        beta = deepnorm_scale(reading.structure, stack).beta
        for residual in chain.residuals:
            width = residual.fork.meta["shape"][-1]
            for branch in residual.branches:
                for tensor, gain in _matrices(branch, beta):
                    if tensor.name in drawn:
                        continue
                    weight = _of(model, tensor.name)
                    if how == "small":
                        small_init_(weight, width)
                    else:
                        _draw(weight, gain, tensor.name)
                    drawn.append(tensor.name)
    return drawn


def _matrices(branch: Branch, beta: float) -> Iterator[tuple[StoredTensor, tuple[float, ...]]]:
    """Each matrix of a branch, with the gains of its parts."""
    asking: set[fx.Node] = set()  # what makes queries and keys
    valued: set[fx.Node] = set()
    for node in branch.inside:
        operands = attention_operands(node)
        if operands is not None:
            scores, values = operands
            asking |= {n for o in scores for n in ancestors(o, branch.inside)}
            valued |= {n for o in values for n in ancestors(o, branch.inside)}
    for node in branch.inside:
        for tensor in weights_of(node):
            if node in asking and node in valued:
                yield tensor, (1.0, 1.0, beta)
            else:
                yield tensor, (1.0 if node in asking else beta,)


def _draw(weight: Tensor, gains: tuple[float, ...], name: str) -> None:
    """Xavier's normal values, a gain for each part of a packed projection."""
    if len(gains) == 1:
        nn.init.xavier_normal_(weight, gains[0])
        return
    axis = next((a for a in range(2) if weight.shape[a] == 3 * weight.shape[1 - a]), None)
    if axis is None:
        raise NormswapError(
            f"{name!r} holds query, key and value in shapes that are not known: draw it with "
            "torch.nn.init.xavier_normal_, gain 1 for query and key"
        )
    for part, gain in zip(weight.chunk(3, axis), gains, strict=True):
        nn.init.xavier_normal_(part, gain)


def _of(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(path), leaf)
