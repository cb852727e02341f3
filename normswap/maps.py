"""The maps that are pushed through a network: scale, shift and centring, on the axes of one value.

A map is a relation between a value before (*old*) and after (*new*) the rewrite:

* :class:`Scale`: ``new = v * old``, or with ``inverse`` ``old = v * new`` (which allows zeros);
* :class:`Shift`: ``new = old + v``, or with ``negative`` ``new = old - v``;
* :class:`Centre`: ``new = old - mean(old)`` over the positions that share a label of ``v``.

``v`` is a :class:`~normswap.program.Vector`, so a map moves with reshapes, slices and
permutations by applying them to ``v``; ``fill`` stands where a value is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from normswap.errors import NormswapError
from normswap.program import Vector


class Blocked(NormswapError):  # noqa: N818 - an answer, not a fault
    """A map cannot pass: ``code`` names the kind of reason, the message tells it."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class Map:
    """A map on one value; ``vector`` broadcasts against the value."""

    vector: Vector
    kind: ClassVar[str]
    fill: ClassVar[float]

    @property
    def axes(self) -> frozenset[int]:
        """The axes on which it is not constant."""
        return self.vector.axes

    def at(self, move: Callable[[Vector], Vector]) -> Map:
        """The same map on the value that ``move`` makes of this one."""
        return replace(self, vector=move(self.vector))

    def reshape(self, *shape: int) -> Map:
        """The map with its vector in another shape of the same size."""
        return self.at(lambda v: v.reshape(shape))

    def carried(self, shape: tuple[int, ...], to: tuple[int, ...]) -> Map:
        """The map after a reshape of its value."""
        return self.at(lambda v: v.carried(shape, to))

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        raise NotImplementedError

    @property
    def is_identity(self) -> bool:
        """Whether it is known to change nothing."""
        return False


@dataclass(frozen=True)
class Scale(Map):
    """``new = v * old``, or ``old = v * new`` if ``inverse``."""

    inverse: bool = False
    kind: ClassVar[str] = "scale"
    fill: ClassVar[float] = 1.0

    def inverted(self) -> Scale:
        """The map that undoes this one."""
        return replace(self, inverse=not self.inverse)

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        return (
            isinstance(other, Scale)
            and self.inverse == other.inverse
            and self.vector.same(other.vector)
        )

    @property
    def is_identity(self) -> bool:
        """Whether every factor is 1."""
        return bool((self.vector.value == 1).all())

    def require_nonnegative(self) -> None:
        """Raise unless every factor is known to be >= 0 (> 0 where it is divided by)."""
        if not self.vector.known:
            raise Blocked(
                "value-unknown",
                "passes only a scale that is not negative, and the weights are not at hand "
                "(the model is on the meta device)",
            )
        value = self.vector.value
        if bool((value < 0).any()):
            negative = int((value < 0).sum())
            raise Blocked(
                "negative-scale",
                f"passes only a scale that is not negative ({negative} of {value.numel()} are)",
            )


@dataclass(frozen=True)
class Shift(Map):
    """``new = old + v``, or ``new = old - v`` if ``negative``."""

    negative: bool = False
    kind: ClassVar[str] = "shift"
    fill: ClassVar[float] = 0.0

    def negated(self) -> Shift:
        """The map that undoes this one."""
        return replace(self, negative=not self.negative)

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        return (
            isinstance(other, Shift)
            and self.negative == other.negative
            and self.vector.same(other.vector)
        )

    @property
    def is_identity(self) -> bool:
        """Whether every summand is 0."""
        return bool(self.vector.known and (self.vector.value == 0).all())


@dataclass(frozen=True)
class Centre(Map):
    """``new = old - mean(old)`` over the positions of the axes that share a label."""

    kind: ClassVar[str] = "centring"
    fill: ClassVar[float] = -1.0

    def carried(self, shape: tuple[int, ...], to: tuple[int, ...]) -> Map:
        """The map after a reshape, which must keep each centred axis whole or merge it alone."""
        axes = self.axes
        moved = self.at(lambda v: v.carried(shape, to, squash=False))
        if torch.Size(self.vector.shape).numel() != torch.Size(moved.vector.shape).numel():
            raise Blocked("axis-mismatch", f"reshapes the centred axis {sorted(axes)} with others")
        return moved

    def same(self, other: Map) -> bool:
        """Whether both do the same."""
        return isinstance(other, Centre) and self.vector.same(other.vector)
