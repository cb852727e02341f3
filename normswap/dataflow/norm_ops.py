"""Rules of norms, which write through gamma and beta and read through their statistics."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from normswap.dataflow.rule import Rule, Step, argument, down, only_on, op_name, shape_of
from normswap.maps import Blocked, Centre, Map, Scale, Shift
from normswap.program import Program


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

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        weight = argument(node, self.weight, "weight")
        bias = None if self.bias is None else argument(node, self.bias, "bias")
        if source is node:
            targets = [bias] if isinstance(m, Shift) else [weight, bias]
            if isinstance(m, Centre):
                raise Blocked("norm-writer", "scales each channel after its own centring")
            if targets[0] is None or (isinstance(m, Scale) and self.bias and bias is None):
                raise Blocked("no-bias", "is a norm without the parameter that would take it")
            step: Step = []
            for target in targets:
                if isinstance(target, fx.Node):
                    step.append((target, self._on_parameter(node, m, shape_of(target))))
            return [step]
        if source is argument(node, 0, "input") and self.centres and isinstance(m, Centre):
            normalised = len(argument(node, 1, "normalized_shape"))
            rank = len(shape_of(node))
            if m.axes == frozenset(range(rank - normalised, rank)) and bool(
                (m.vector.value == 0).all()
            ):
                return [[]]
        raise Blocked("norm-reader", "is a norm, whose statistics would change")

    def _on_parameter(self, node: fx.Node, m: Map, shape: tuple[int, ...]) -> Map:
        if not self.channel:
            return down(m, shape)
        only_on(m, [1], "the norm")
        return m.reshape(m.vector.shape[1])


NORM_OF_BATCH = NormWithAffine(weight=1, bias=2, channel=True)
