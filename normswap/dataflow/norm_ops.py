"""Rules of norms, which write through gamma and beta and read through their statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from normswap.dataflow.rule import (
    Rule,
    Step,
    argument,
    down,
    named_value,
    only_on,
    op_name,
    shape_of,
)
from normswap.maps import Blocked, Centre, Level, Map, Scale, Shift
from normswap.program import Program
from normswap.spec import NormSpec

ZERO_MEAN = 1e-15  # relative to the largest entry: what rounding leaves of a mean of zero


@dataclass(frozen=True)
class FixedNorm(Rule):
    """A BatchNorm in eval mode: ``y = (x - mean) / sqrt(var + eps) * gamma + beta``.

    It writes through gamma and beta, and reads through mean and gamma.
    """

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        x, weight, bias, mean, _, fixed = batch_norm_operands(node)
        if not fixed:
            return NORM_OF_BATCH.relate(node, source, m, program)
        axis = min(1, len(shape_of(node)) - 1)
        if isinstance(m, Centre):
            raise Blocked("op", "scales each channel on its own")
        if source not in (x, node):
            raise Blocked("shared", "another norm reads the same tensor")
        only_on(m, [axis], "the norm")
        size = m.vector.shape[axis]
        channels = m.reshape(size)
        if source is node:
            if isinstance(m, Shift):
                if bias is None:
                    raise Blocked("no-bias", "is a norm without bias")
                return [[(bias, channels)]]
            if weight is None or bias is None:
                raise Blocked("no-bias", "is a norm without affine parameters")
            return [[(weight, channels), (bias, channels)]]
        assert mean is not None
        if isinstance(m, Shift):
            return [[(mean, channels)]]
        assert isinstance(channels, Scale)
        if weight is None:
            raise Blocked("no-bias", "is a norm without affine parameters")
        return [[(mean, channels), (weight, channels.inverted())]]


def batch_norm_operands(
    node: fx.Node,
) -> tuple[fx.Node, fx.Node | None, fx.Node | None, fx.Node | None, fx.Node | None, bool]:
    """``x``, weight, bias, mean, var, and whether it is a fixed affine map (eval mode)."""
    name = op_name(node)
    x = argument(node, 0, "input")
    weight, bias = argument(node, 1, "weight"), argument(node, 2, "bias")
    mean, var = argument(node, 3, "running_mean"), argument(node, 4, "running_var")
    if name == "_native_batch_norm_legit_no_training":
        return x, weight, bias, mean, var, True
    position, keyword = (5, "training") if "batch" in name else (5, "use_input_stats")
    batch_statistics = bool(argument(node, position, keyword, True))
    return x, weight, bias, mean, var, mean is not None and not batch_statistics


@dataclass(frozen=True)
class NormWithAffine(Rule):
    """A norm whose gamma and beta (at ``weight``, ``bias``) act on ``channel`` of its output.

    It writes through gamma and beta; of its input only a mean it removes itself may change.
    """

    weight: int
    bias: int | None
    channel: bool = False  # gamma is [C] on axis 1 (else on the last axes)
    centres: bool = False  # its statistics are over the last axes and remove the mean

    def already_centred(self, node: fx.Node, m: Centre, program: Program) -> bool:
        """A LayerNorm with one number as gamma and a beta without mean."""
        if not self.centres or not m.is_whole:
            return False
        normalised = len(argument(node, 1, "normalized_shape"))
        weight, bias = argument(node, self.weight, "weight"), argument(node, self.bias or 0, "bias")
        axes = range(len(shape_of(node)) - normalised, len(shape_of(node)))
        return m.axes == frozenset(axes) and _keeps_mean_zero(program, weight, bias)

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        weight = argument(node, self.weight, "weight")
        bias = None if self.bias is None else argument(node, self.bias, "bias")
        if source is node:
            targets = [bias] if isinstance(m, Shift) else [weight, bias]
            if isinstance(m, Centre):
                raise Blocked("norm-writer", "its scale and shift come after its own centring")
            if targets[0] is None or (isinstance(m, Scale) and self.bias and bias is None):
                raise Blocked("no-bias", "is a norm without the parameter that would take it")
            step: Step = []
            for target in targets:
                if isinstance(target, fx.Node):
                    step.append((target, self._on_parameter(node, m, shape_of(target))))
            return [step]
        if source is argument(node, 0, "input") and self.centres:
            normalised = len(argument(node, 1, "normalized_shape"))
            rank = len(shape_of(node))
            if _is_unseen(m, frozenset(range(rank - normalised, rank))):
                return [[]]
        raise Blocked("norm-reader", "its statistics would change")

    def _on_parameter(self, node: fx.Node, m: Map, shape: tuple[int, ...]) -> Map:
        if not self.channel:
            return down(m, shape)
        only_on(m, [1], "the norm")
        return m.reshape(m.vector.shape[1])


def _is_unseen(m: Map, axes: frozenset[int]) -> bool:
    """Whether a norm that removes the mean over ``axes`` does not see the map."""
    if isinstance(m, Centre):
        return m.axes == axes and m.is_whole
    return isinstance(m, Shift) and not m.axes & axes


def _keeps_mean_zero(program: Program, weight: fx.Node | None, bias: fx.Node | None) -> bool:
    """Whether ``g * n + b`` has mean 0 because ``n`` has: gamma is one number, beta has no mean.

    A gamma that is not known (on the meta device) is taken for one that varies.
    """
    if weight is not None:
        value = named_value(program, weight).value
        if not bool((value == value.flatten()[0]).all()):
            return False
    if bias is None:
        return True
    value = named_value(program, bias).value
    return float(value.mean().abs()) <= ZERO_MEAN * float(value.abs().max())


def norm_call(x: Any, weight: Any = None, bias: Any = None) -> Any:
    """Stand-in op: a whole call of a norm module, whose spec is in ``meta["norm"]``."""
    return x, weight, bias


class NormCall(Rule):
    """A whole call of a norm module (``meta["norm"]``: its spec), whatever ops it runs.

    It writes through gamma and beta; of its input only what its normaliser removes may change.
    """

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        spec: NormSpec = node.meta["norm"]
        x, weight, bias = node.args
        if source is node:
            return [self._output(node, spec, weight, bias, m)]  # type: ignore[arg-type]
        if source is not x:
            raise Blocked("shared", "another norm reads the same tensor")
        axes = norm_axes(node)
        if spec.kind == "layer" and axes is not None and _is_unseen(m, axes):
            return [[]]
        raise Blocked("norm-reader", "its statistics would change")

    def _output(
        self, node: fx.Node, spec: NormSpec, weight: fx.Node | None, bias: fx.Node | None, m: Map
    ) -> Step:
        if isinstance(m, (Centre, Level)):
            raise Blocked("norm-writer", "its scale and shift come after its own centring")
        targets = [bias] if isinstance(m, Shift) else [weight, bias]
        lacking = targets[0] is None or (isinstance(m, Scale) and spec.bias and bias is None)
        if lacking or (isinstance(m, Scale) and spec.unit_offset):
            raise Blocked("no-bias", "is a norm without the parameter that would take it")
        axes = affine_axes(node)
        only_on(m, axes, "the norm")
        return [
            (t, m.reshape(*(m.vector.shape[a] for a in axes))) for t in targets if t is not None
        ]

    def already_centred(self, node: fx.Node, m: Centre, program: Program) -> bool:
        """A LayerNorm with one number as gamma and a beta without mean."""
        spec: NormSpec = node.meta["norm"]
        if spec.kind != "layer" or not m.is_whole or m.axes != norm_axes(node):
            return False
        _, weight, bias = node.args
        return _keeps_mean_zero(program, weight, bias)  # type: ignore[arg-type]


def norm_axes(node: fx.Node) -> frozenset[int] | None:
    """The axes of the value that a norm's statistics are over; ``None`` if they are groups."""
    spec: NormSpec = node.meta["norm"]
    if spec.groups is not None or spec.partial is not None:
        return None
    rank = len(shape_of(node))
    return frozenset(axis % rank for axis in spec.axes)


def affine_axes(node: fx.Node) -> list[int]:
    """The axes of the value that gamma and beta run along."""
    spec: NormSpec = node.meta["norm"]
    rank = len(shape_of(node))
    return sorted(axis % rank for axis in (spec.affine_axes or spec.axes))


NORM_OF_BATCH = NormWithAffine(weight=1, bias=2, channel=True)
