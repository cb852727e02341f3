"""Rules of linear layers, convolutions, matrix products and lookups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from normswap.dataflow.rule import (
    Rule,
    Side,
    Step,
    Value,
    argument,
    is_stored,
    named_value,
    only_on,
    op_name,
    shape_of,
    zero,
)
from normswap.maps import Blocked, Centre, Map, Scale, Shift
from normswap.program import Program, Vector


def _exists(bias: fx.Node | None, program: Program) -> bool:
    """Whether there is a bias, not only the place for one."""
    if bias is None:
        return False
    tensor = bias.meta.get("tensor")
    return "virtual" not in bias.meta or tensor is None or program.current(tensor.name)[1] > 0


def _side(weight: fx.Node, *, inputs: bool) -> Value:
    return Side(weight, inputs) if is_stored(weight) else weight


@dataclass(frozen=True)
class Contraction(Rule):
    """A linear map with weight and bias: linear layers and convolutions of every kind.

    On the output channels a map goes into ``W`` and ``b``; on the input channels its inverse goes
    into ``W``, and a shift into ``b`` by what ``W`` makes of it.
    """

    def operands(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """``x``, ``W`` and ``b``."""
        raise NotImplementedError

    def axes(self, node: fx.Node) -> tuple[int, int]:
        """The channel axis of ``x`` and of ``y``."""
        raise NotImplementedError

    def outputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """A map on the output channels ``[out]`` as a map on ``W``."""
        raise NotImplementedError

    def inputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """A map on the input channels ``[in]`` as a map on ``W``."""
        raise NotImplementedError

    def from_weight(self, node: fx.Node, m: Map) -> tuple[bool, Map] | None:
        """A map on ``W`` as ``(on the input channels?, map on the channels)``, if it is one."""
        raise NotImplementedError

    def taken(self, node: fx.Node, t: Vector, program: Program) -> Vector:
        """What a constant ``t`` on the input channels adds to the output channels."""
        raise NotImplementedError

    def check_shift(self, node: fx.Node) -> None:
        """Raise unless every output position sees all taps of a shift on the input."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """See the class."""
        x, weight, bias = self.operands(node)
        if x is weight:
            raise Blocked("op", "its weight is its input")
        if source is x:
            return self._from_input(node, m, program)
        if source is weight:
            along = None if isinstance(m, Shift) else self.from_weight(node, m)
            if along is None or (isinstance(m, Centre) and along[0]):
                raise Blocked("shared", "another call reads the same weight")
            return [
                self._input_side(node, along[1]) if along[0] else self._output_side(node, along[1])
            ]
        if source is bias:
            if isinstance(m, Shift):
                return [[(node, self._spread(m, shape_of(node), self.axes(node)[1]))]]
            return [self._output_side(node, m)]
        return self._from_output(node, m, program)

    def relate_side(self, node: fx.Node, side: Side, m: Map, program: Program) -> list[Step]:
        """The other end of the same channels."""
        if side.node is not self.operands(node)[1]:
            return self.relate(node, side.node, m, program)
        channels = self.side_channels(node, m, inputs=side.inputs)
        usable = isinstance(m, Scale) or (isinstance(m, Centre) and not side.inputs)
        if channels is None or not usable:
            raise Blocked("shared", "another call reads the same weight")
        return [
            self._input_side(node, channels) if side.inputs else self._output_side(node, channels)
        ]

    def constraint(self, node: fx.Node, source: Value, m: Map) -> Any:
        """Scales of the input channels and of the output channels are independent."""
        x, weight, _ = self.operands(node)
        if not isinstance(m, Scale):
            return node
        if source is x or (isinstance(source, Side) and source.inputs and source.node is weight):
            return node, "inputs"
        return node

    def side_channels(self, node: fx.Node, m: Map, *, inputs: bool) -> Map | None:
        """A map on one side of ``W``, as a map on those channels."""
        along = self.from_weight(node, m)
        return None if along is None or (m.axes and along[0] != inputs) else along[1]

    def _input_side(self, node: fx.Node, channels: Map) -> Step:
        x = self.operands(node)[0]
        assert isinstance(channels, Scale)
        return [(x, self._spread(channels.inverted(), shape_of(x), self.axes(node)[0]))]

    def _spread(self, channels: Map, shape: Sequence[int], axis: int) -> Map:
        """A map on ``[channels]`` as a map on a value of ``shape``."""
        full = [1] * len(shape)
        full[axis] = channels.vector.shape[-1]
        return channels.reshape(*full)

    def _channels(self, node: fx.Node, m: Map, axis: int) -> Map:
        """A map on a value, as a map on its channels ``[size]``."""
        return m.reshape(m.vector.shape[axis])

    def _output_side(self, node: fx.Node, channels: Map) -> Step:
        _, weight, bias = self.operands(node)
        step: Step = [(node, self._spread(channels, shape_of(node), self.axes(node)[1]))]
        if isinstance(channels, (Scale, Centre)):
            step.append((_side(weight, inputs=False), self.outputs_on_weight(node, channels)))
        if bias is not None:
            step.append((bias, channels))
        return step

    def _from_output(self, node: fx.Node, m: Map, program: Program) -> list[Step]:
        x, _, bias = self.operands(node)
        axis = self.axes(node)[1]
        if m.axes and axis not in m.axes and self._passes_through(node, m):
            if isinstance(m, Centre):
                return [[(x, m), *self._dropped(bias, program)]]
            if _exists(bias, program):
                raise Blocked("axis-mismatch", f"adds a bias along axis {axis}")
            if isinstance(m, Shift):
                raise Blocked("axis-mismatch", "multiplies the shift by the row sums of its weight")
            return [[(x, m)]]
        only_on(m, [axis], "the layer writes and")
        channels = self._channels(node, m, axis)
        if isinstance(m, Shift):
            if bias is None:
                raise Blocked("no-bias", "has no bias, and none can be added where it is called")
            full = shape_of(bias)
            return [[(bias, channels.at(lambda v: v.expand(full)))]]
        return [[pair for pair in self._output_side(node, channels) if pair[0] is not node]]

    def _mixed(self, node: fx.Node, m: Shift, program: Program) -> Map:
        """A shift that is constant along the contracted axis: times the row sums of ``W``."""
        x = self.operands(node)[0]
        size = shape_of(x)[self.axes(node)[0]]
        ones = Vector(program, program.emit("constant", value=1.0, shape=[size]), (size,))
        sums = self.taken(node, ones, program)
        axis, rank = self.axes(node)[1], len(shape_of(node))
        sums = sums.reshape([sums.shape[0] if a == axis else 1 for a in range(rank)])
        shape = [max(a, b) for a, b in zip(m.vector.shape, sums.shape, strict=True)]
        ref = program.emit("multiply", m.vector.ref, sums.ref)
        return m.at(lambda v: Vector(program, ref, tuple(shape)))

    def _dropped(self, bias: fx.Node | None, program: Program) -> Step:
        """A bias that is constant along a centred axis is all mean."""
        return [(bias, zero(program, 1))] if _exists(bias, program) and bias is not None else []

    def _passes_through(self, node: fx.Node, m: Map) -> bool:
        """Whether the axes of the map are plain batch axes of the contraction."""
        return False

    def _from_input(self, node: fx.Node, m: Map, program: Program) -> list[Step]:
        _, weight, bias = self.operands(node)
        axis = self.axes(node)[0]
        if m.axes and axis not in m.axes and self._passes_through(node, m):
            if isinstance(m, Shift):
                return [[(node, self._mixed(node, m, program))]]
            if isinstance(m, Centre):
                return [[(node, m), *self._dropped(bias, program)]]
            if _exists(bias, program):
                raise Blocked("axis-mismatch", "adds a bias along another axis")
            return [[(node, m)]]
        only_on(m, [axis], "the layer reads and")
        channels = self._channels(node, m, axis)
        if isinstance(m, Scale):
            inverse = m.inverted().at(lambda v: channels.vector)
            return [[(_side(weight, inputs=True), self.inputs_on_weight(node, inverse))]]
        if isinstance(m, Centre):
            raise Blocked("raw-reader", "reads the mean")
        assert isinstance(m, Shift)
        if m.is_identity:
            return [[]]
        self.check_shift(node)
        size = shape_of(self.operands(node)[0])[axis]
        taken = self.taken(node, channels.vector.expand((size,)), program)
        moved = Shift(taken, m.negative)
        onward: Step = [(node, self._spread(moved, shape_of(node), self.axes(node)[1]))]
        if bias is None:
            return [onward]
        taken_in: Step = [(bias, moved.negated())]
        # A bias is made only where nothing further on makes up for the shift.
        return [taken_in, onward] if _exists(bias, program) else [onward, taken_in]


@dataclass(frozen=True)
class Linear(Contraction):
    """``y = x Wᵀ + b`` (``W`` ``[out, in]``), or ``addmm``: ``b + x W`` (``W`` ``[in, out]``)."""

    transposed: bool = False

    def operands(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """``x``, ``W`` and ``b``."""
        if self.transposed:
            if argument(node, 3, "beta", 1) != 1 or argument(node, 4, "alpha", 1) != 1:
                raise Blocked("op", "is called with factors")
            bias, x, weight = node.args[:3]
            return x, weight, bias  # type: ignore[return-value]
        return (
            argument(node, 0, "input"),
            argument(node, 1, "weight"),
            argument(node, 2, "bias"),
        )

    def axes(self, node: fx.Node) -> tuple[int, int]:
        """The last axis of both."""
        return len(shape_of(self.operands(node)[0])) - 1, len(shape_of(node)) - 1

    def outputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """``[out]`` on ``W``."""
        size = m.vector.shape[-1]
        return m.reshape(1, size) if self.transposed else m.reshape(size, 1)

    def inputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """``[in]`` on ``W``."""
        size = m.vector.shape[-1]
        return m.reshape(size, 1) if self.transposed else m.reshape(1, size)

    def from_weight(self, node: fx.Node, m: Map) -> tuple[bool, Map] | None:
        """A map along one axis of ``W``."""
        if len(m.axes) > 1:
            return None
        axis = next(iter(m.axes), int(self.transposed))
        return (axis == 0) == self.transposed, m.reshape(m.vector.shape[axis])

    def taken(self, node: fx.Node, t: Vector, program: Program) -> Vector:
        """``W t``."""
        weight = named_value(program, self.operands(node)[1])
        weight = weight.permute((1, 0)) if self.transposed else weight
        ref = program.emit("linear", weight.ref, t.ref)
        return Vector(program, ref, (weight.shape[0],))

    def _passes_through(self, node: fx.Node, m: Map) -> bool:
        return True


RANKS = {"conv1d": 1, "conv2d": 2, "conv3d": 3}


TRANSPOSED_RANKS = {"conv_transpose1d": 1, "conv_transpose2d": 2, "conv_transpose3d": 3}


@dataclass(frozen=True)
class Convolution(Contraction):
    """Convolutions of every rank.

    ``W`` is ``[out, in/groups, k…]``, transposed ``[in, out/groups, k…]``.
    """

    def _form(self, node: fx.Node) -> dict[str, Any]:
        """Stride, padding, dilation, groups, transposed, output padding of any of the ops."""
        name = op_name(node)
        if name in TRANSPOSED_RANKS:
            keys = ("stride", "padding", "output_padding", "groups", "dilation")
            defaults: tuple[Any, ...] = (1, 0, 0, 1, 1)
            transposed = True
        elif name in RANKS:
            keys = ("stride", "padding", "dilation", "groups")
            defaults = (1, 0, 1, 1)
            transposed = False
        else:  # aten.convolution
            keys = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")
            defaults = (1, 0, 1, False, 0, 1)
            transposed = bool(argument(node, 6, "transposed", False))
        form = {
            k: argument(node, 3 + i, k, d)
            for i, (k, d) in enumerate(zip(keys, defaults, strict=True))
        }
        form["transposed"] = transposed
        return form

    def operands(self, node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
        """``x``, ``W`` and ``b``."""
        return (
            argument(node, 0, "input"),
            argument(node, 1, "weight"),
            argument(node, 2, "bias"),
        )

    def axes(self, node: fx.Node) -> tuple[int, int]:
        """The axis in front of the spatial ones."""
        space = len(shape_of(self.operands(node)[1])) - 2
        axis = len(shape_of(node)) - space - 1
        return axis, axis

    def _on_weight(self, node: fx.Node, m: Map, *, inputs: bool) -> Map:
        form = self._form(node)
        weight = shape_of(self.operands(node)[1])
        ones = (1,) * (len(weight) - 2)
        size, groups = m.vector.shape[-1], form["groups"]
        along_first = inputs == form["transposed"]  # the side that W stores on axis 0
        if along_first or size == 1:
            return m.reshape(size, 1, *ones)
        if groups == 1:
            return m.reshape(1, size, *ones)
        first, second = weight[0] // groups, size // groups
        if isinstance(m, Centre):
            raise Blocked("op", "a grouped convolution mixes too little over channels")
        return m.at(
            lambda v: (
                v.reshape((groups, 1, second))
                .expand((groups, first, second))
                .reshape((groups * first, second, *ones))
            )
        )

    def outputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """``[out]`` on ``W``."""
        if isinstance(m, Centre) and self._form(node)["groups"] > 1:
            raise Blocked("op", "a grouped convolution mixes too little over channels")
        return self._on_weight(node, m, inputs=False)

    def inputs_on_weight(self, node: fx.Node, m: Map) -> Map:
        """``[in]`` on ``W``, for each group."""
        return self._on_weight(node, m, inputs=True)

    def from_weight(self, node: fx.Node, m: Map) -> tuple[bool, Map] | None:
        """A map along the axis of ``W`` that stands for all output or all input channels."""
        form = self._form(node)
        if not m.axes <= {0} and (form["groups"] > 1 or not m.axes <= {1}):
            return None
        axis = next(iter(m.axes), int(form["transposed"]))
        return (axis == 0) == form["transposed"], m.reshape(m.vector.shape[axis])

    def side_channels(self, node: fx.Node, m: Map, *, inputs: bool) -> Map | None:
        """As on any weight; the side that is stored for each group is regrouped."""
        groups, weight = self._form(node)["groups"], shape_of(self.operands(node)[1])
        if groups == 1 or inputs == self._form(node)["transposed"]:
            if not m.axes <= {0 if inputs == self._form(node)["transposed"] else 1}:
                return None
            axis = 0 if inputs == self._form(node)["transposed"] else 1
            return m.reshape(m.vector.shape[axis])
        first, second = weight[0] // groups, weight[1]
        if not m.axes <= {0, 1}:
            return None

        def regroup(v: Vector) -> Vector:
            full = v.reshape(v.shape[:2]).expand((weight[0], second))
            return full.reshape((groups, first, second)).slice(1, 0, 1).reshape((groups * second,))

        return m.at(regroup)

    def taken(self, node: fx.Node, t: Vector, program: Program) -> Vector:
        """All taps of ``W`` times ``t``."""
        form = self._form(node)
        weight = named_value(program, self.operands(node)[1])
        size = weight.shape[1] * form["groups"] if form["transposed"] else weight.shape[0]
        ref = program.emit(
            "convolution",
            weight.ref,
            t.ref,
            groups=form["groups"],
            transposed=form["transposed"],
        )
        return Vector(program, ref, (size,))

    def check_shift(self, node: fx.Node) -> None:
        """No zero padding; transposed: no border that is short of taps."""
        form = self._form(node)
        kernel = shape_of(self.operands(node)[1])[2:]
        space = len(kernel)

        def per_axis(value: Any) -> list[int]:
            values = [value] if isinstance(value, int) else list(value)
            return values * space if len(values) == 1 else values

        dilation = per_axis(form["dilation"])
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if form["padding"] == "valid":
            padding = [0] * space
        elif form["padding"] == "same":
            padding = reach
        else:
            padding = per_axis(form["padding"])
        if form["transposed"]:
            inside = all(p >= r for p, r in zip(padding, reach, strict=True))
            plain = all(s == 1 for s in per_axis(form["stride"]))
            if not (inside and plain) or any(per_axis(form["output_padding"])):
                raise Blocked("zero-padding", "its border (or its stride) is short of taps")
        elif any(padding):
            raise Blocked("zero-padding", "pads with zeros, where the shift is missing")


@dataclass(frozen=True)
class Lookup(Rule):
    """``embedding(W, ids)``: the table's columns are the output's last axis."""

    def relate(self, node: fx.Node, source: fx.Node, m: Map, program: Program) -> list[Step]:
        """The map between the table's rows and what is looked up."""
        table = node.args[0]
        assert isinstance(table, fx.Node)
        last = len(shape_of(node)) - 1
        size = m.vector.shape[-1]
        if source is node:
            only_on(m, [last], "the table writes and")
            return [[(table, m.reshape(1, size))]]
        if source is not table:
            raise Blocked("op", "the ids of a lookup")
        only_on(m, [1], "the table holds rows and")
        return [[(node, m.reshape(*[1] * last, size))]]
