"""A straight-line program on named tensors in float64: built while planning, run while applying.

While a rewrite is planned, :class:`Program` keeps every assignment in single-static-assignment
form: a tensor of the model has versions, a temporary has one. Equal expressions get the same
temporary, and any expression can be evaluated on the values that are known (a model on the meta
device knows none: then random surrogates stand in, so that *equal* and *constant* can still be
told, and what depends on a sign is marked as unknown).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Ref = tuple[str, int]
"""A tensor of the model at a version, or a temporary (``"%3", 0``)."""


@dataclass(frozen=True)
class Edit:
    """One assignment ``target = op(*sources, **params)``.

    ``target`` is a state-dict name or, starting with ``%``, a temporary. ``sources`` are read at
    their current values, so the order of edits matters.
    """

    target: str
    op: str
    sources: tuple[str, ...]
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])


# -- the ops ------------------------------------------------------------------------------------


def batch_norm_scale(var: Tensor, weight: Tensor | None = None, *, eps: float) -> Tensor:
    """``s = gamma / sqrt(var + eps)``."""
    scale = torch.rsqrt(var + eps)
    return scale if weight is None else weight * scale


def batch_norm_shift(scale: Tensor, mean: Tensor, bias: Tensor | None = None) -> Tensor:
    """``t = beta - mean * s``."""
    shift = -mean * scale
    return shift if bias is None else bias + shift


def _slice(x: Tensor, *, axis: int, start: int, stop: int, step: int = 1) -> Tensor:
    index = [slice(None)] * x.dim()
    index[axis] = slice(start, stop, step)
    return x[tuple(index)]


def _embed(
    x: Tensor, *, axis: int, start: int, stop: int, size: int, fill: float, step: int = 1
) -> Tensor:
    shape = list(x.shape)
    shape[axis] = size
    out = x.new_full(shape, fill)
    index = [slice(None)] * x.dim()
    index[axis] = slice(start, stop, step)
    out[tuple(index)] = x
    return out


def _taken_by_linear(weight: Tensor, x: Tensor) -> Tensor:
    """``W x``: what a constant input ``x`` ``[in]`` adds to the output of ``W`` ``[out, in]``."""
    return weight @ x


def _taken_by_convolution(weight: Tensor, x: Tensor, *, groups: int, transposed: bool) -> Tensor:
    """What a constant input ``x`` ``[in]`` adds away from the border: all taps summed.

    ``weight`` is ``[out, in/groups, k…]``, or transposed ``[in, out/groups, k…]``.
    """
    taps = weight.flatten(2).sum(-1)
    if transposed:
        grouped = taps.reshape(groups, taps.shape[0] // groups, taps.shape[1])
        return torch.einsum("gio,gi->go", grouped, x.reshape(groups, -1)).reshape(-1)
    grouped = taps.reshape(groups, taps.shape[0] // groups, taps.shape[1])
    return torch.einsum("goi,gi->go", grouped, x.reshape(groups, -1)).reshape(-1)


def _centre(x: Tensor, labels: Tensor) -> Tensor:
    """Subtract the mean over all positions of the labelled axes that share a label (``-1``: none).

    ``labels`` broadcasts against ``x``; its axes of size above 1 are the centred ones.
    """
    axes = [axis for axis, size in enumerate(labels.shape) if size > 1]
    if bool((labels == 0).all()):
        return x - x.mean(axes, keepdim=True) if axes else torch.zeros_like(x)
    order = [*axes, *(axis for axis in range(x.dim()) if axis not in axes)]
    moved = x.permute(order)
    rows = moved.reshape(labels.numel(), -1)
    label = labels.reshape(-1).long()
    count = int(label.max()) + 2  # the last row takes what is left alone
    label = torch.where(label < 0, count - 1, label)
    sums = rows.new_zeros(count, rows.shape[1]).index_add_(0, label, rows)
    sums /= torch.bincount(label, minlength=count).clamp_min(1)[:, None]
    sums[count - 1] = 0
    back = [order.index(axis) for axis in range(x.dim())]
    return (rows - sums[label]).reshape(moved.shape).permute(back)


TENSOR_OPS: dict[str, Callable[..., Tensor]] = {
    "batch_norm_scale": batch_norm_scale,
    "batch_norm_shift": batch_norm_shift,
    "constant": lambda *, value, shape: torch.full(shape, value, dtype=torch.float64),
    "table": lambda *, values: torch.tensor(values, dtype=torch.float64),
    "blocks": lambda *, size, block: torch.arange(size, dtype=torch.float64) // block,
    "like": lambda x, *, value: torch.full_like(x, value),
    "nonzero": lambda x: torch.where(x == 0, 1.0, x),
    "reshape": lambda x, *, shape: x.reshape(shape),
    "expand": lambda x, *, shape: x.expand(shape),
    "permute": lambda x, *, dims: x.permute(dims),
    "flip": lambda x, *, axes: x.flip(axes),
    "slice": _slice,
    "embed": _embed,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "negate": lambda x: -x,
    "plus": lambda x, *, number: x + number,
    "times": lambda x, *, factor: x * factor,
    "power": lambda x, *, exponent: x**exponent,
    "linear": _taken_by_linear,
    "convolution": _taken_by_convolution,
    "scale": lambda x, v, *, inverse=False: x / v if inverse else x * v,
    "shift": lambda x, v, *, negative=False: x - v if negative else x + v,
    "centre": _centre,
}
"""Every op of a plan: pure functions of float64 tensors and JSON-able parameters."""


# Scaling a weight is most of the work; its old value is not needed, so no second one is allocated.
_IN_PLACE: dict[str, Callable[..., Tensor]] = {
    "scale": lambda x, v, *, inverse=False: x.div_(v) if inverse else x.mul_(v),
    "shift": lambda x, v, *, negative=False: x.sub_(v) if negative else x.add_(v),
}


def run_edits(
    edits: Sequence[Edit],
    read: Callable[[str], Tensor],
    write: Callable[[str, Tensor], None],
) -> None:
    """Run the program: each named tensor is read once, computed in float64 and written once.

    Args:
        edits: the assignments, in order.
        read: gives the stored tensor of a state-dict name, in any dtype.
        write: takes the name and the float64 result after the name's last assignment; the caller
            casts, once.
    """
    last_use: dict[str, int] = {}
    assigned: set[str] = set()
    for number, edit in enumerate(edits):
        for name in (edit.target, *edit.sources):
            last_use[name] = number
        assigned.add(edit.target)
    expiring: dict[int, list[str]] = {}
    for name, number in last_use.items():
        expiring.setdefault(number, []).append(name)
    live: dict[str, Tensor] = {}
    for number, edit in enumerate(edits):
        for name in edit.sources:
            if name not in live:
                live[name] = read(name).detach().to(torch.float64, copy=True)
        sources = [live[name] for name in edit.sources]
        if edit.op in _IN_PLACE and edit.target == edit.sources[0]:
            live[edit.target] = _IN_PLACE[edit.op](*sources, **edit.params)
        else:
            live[edit.target] = TENSOR_OPS[edit.op](*sources, **edit.params)
        for name in expiring.get(number, ()):
            value = live.pop(name)
            if name in assigned and not name.startswith("%"):
                write(name, value)


def without_unread(edits: Sequence[Edit], gone: Collection[str]) -> list[Edit]:
    """The edits without what only writes to a tensor in ``gone``, which the result lacks."""
    kept: list[Edit] = []
    read: set[str] = set()
    for edit in reversed(edits):
        if edit.target not in gone or edit.target in read:
            read.update(edit.sources)
            kept.append(edit)
    return kept[::-1]


# -- building -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Assignment:
    target: Ref
    op: str
    sources: tuple[Ref, ...]
    params: Mapping[str, Any]


class Program:
    """The assignments made so far, with the values that are known.

    Args:
        read: a stored tensor by name, or ``None`` where its values are not known.
        shape: the shape of a stored tensor by name.
    """

    def __init__(
        self, read: Callable[[str], Tensor | None], shape: Callable[[str], Sequence[int]]
    ) -> None:
        self._read = read
        self._shape = shape
        self._assignments: list[_Assignment] = []
        self._by_target: dict[Ref, _Assignment] = {}
        self._temporaries: dict[Any, Ref] = {}
        self._versions: dict[str, int] = {}
        self._values: dict[Ref, tuple[Tensor, bool]] = {}
        self._next = 0  # number of the next temporary, never used twice
        self.centres: dict[tuple[tuple[int, ...], bytes], Vector] = {}
        """The labels of each centring met so far, by shape and value, in their one form."""

    def current(self, name: str) -> Ref:
        """The newest version of the tensor ``name``."""
        return name, self._versions.get(name, 0)

    def emit(self, op: str, /, *sources: Ref, **params: Any) -> Ref:
        """The temporary that holds ``op(*sources, **params)``."""
        key = (op, sources, _frozen(params))
        if key not in self._temporaries:
            ref = (f"%{self._next}", 0)
            self._next += 1
            self._temporaries[key] = ref
            self._append(_Assignment(ref, op, sources, params))
        return self._temporaries[key]

    def assign(self, name: str, op: str, *sources: Ref, **params: Any) -> None:
        """A new version of the tensor ``name``."""
        self._versions[name] = self._versions.get(name, 0) + 1
        self._append(_Assignment((name, self._versions[name]), op, sources, params))

    def _append(self, assignment: _Assignment) -> None:
        self._assignments.append(assignment)
        self._by_target[assignment.target] = assignment

    def mark(self) -> tuple[int, dict[str, int]]:
        """A state to go back to with :meth:`rollback`."""
        return len(self._assignments), dict(self._versions)

    def rollback(self, mark: tuple[int, dict[str, int]]) -> None:
        """Forget every tensor assigned since ``mark``, and the temporaries that hang on one."""
        count, versions = mark
        if versions == self._versions:
            return
        kept: list[_Assignment] = []
        dropped: set[Ref] = set()
        for a in self._assignments[count:]:
            if a.target[0].startswith("%") and dropped.isdisjoint(a.sources):
                kept.append(a)
            else:
                dropped.add(a.target)
        self._assignments[count:] = kept
        self._versions = versions
        for target in dropped:
            del self._by_target[target]
            self._values.pop(target, None)
        self._temporaries = {k: r for k, r in self._temporaries.items() if r not in dropped}

    def value(self, ref: Ref) -> tuple[Tensor, bool]:
        """The float64 value, and whether it is known (``False``: built on surrogates)."""
        if ref not in self._values:
            assignment = self._by_target.get(ref)
            if assignment is None:
                self._values[ref] = self._stored(ref[0])
            else:
                sources = [self.value(source) for source in assignment.sources]
                value = TENSOR_OPS[assignment.op](*(v for v, _ in sources), **assignment.params)
                self._values[ref] = value, all(known for _, known in sources)
        return self._values[ref]

    def _stored(self, name: str) -> tuple[Tensor, bool]:
        tensor = self._read(name)
        if tensor is not None:
            return tensor.detach().to("cpu", torch.float64), True
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        shape = tuple(self._shape(name))
        return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5, False

    def edits(self) -> list[Edit]:
        """The assignments that some tensor of the model depends on, in order."""
        needed: set[Ref] = set()
        kept: list[Edit] = []
        for a in reversed(self._assignments):
            if a.target in needed or not a.target[0].startswith("%"):
                needed.update(a.sources)
                kept.append(Edit(a.target[0], a.op, tuple(n for n, _ in a.sources), a.params))
        return kept[::-1]

    def stored_sources(self, edits: Iterable[Edit]) -> dict[str, tuple[str, ...]]:
        """For each edited tensor the tensors of the model that it is computed from."""
        reach: dict[str, dict[str, None]] = {}
        for edit in edits:
            found: dict[str, None] = {}
            for name in edit.sources:
                found.update(reach.get(name, {}) if name in reach else {name: None})
            reach[edit.target] = found
        return {n: tuple(found) for n, found in reach.items() if not n.startswith("%")}


def _frozen(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(sorted((k, _frozen(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return tuple(value) if value and isinstance(value[0], (int, float)) else _each(value)
    return value


def _each(value: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(_frozen(v) for v in value)


@dataclass(frozen=True)
class Vector:
    """A named tensor that broadcasts against an activation: size 1 on every axis but a few."""

    program: Program
    ref: Ref
    shape: tuple[int, ...]

    @classmethod
    def of(cls, program: Program, name: str, shape: Sequence[int]) -> Vector:
        """The current value of a tensor of the model."""
        return cls(program, program.current(name), tuple(shape))

    @property
    def axes(self) -> frozenset[int]:
        """The axes on which it varies."""
        return frozenset(axis for axis, size in enumerate(self.shape) if size != 1)

    @property
    def value(self) -> Tensor:
        """Its float64 value (built on surrogates where values are unknown)."""
        return self.program.value(self.ref)[0]

    @property
    def known(self) -> bool:
        """Whether :attr:`value` is the real one."""
        return self.program.value(self.ref)[1]

    def same(self, other: Vector) -> bool:
        """Whether both hold the same numbers."""
        if self.ref == other.ref and self.shape == other.shape:
            return True
        return self.shape == other.shape and torch.equal(
            self.value.reshape(self.shape), other.value.reshape(other.shape)
        )

    def op(self, op: str, result: Sequence[int], /, **params: Any) -> Vector:
        """The result of a unary op, of the shape ``result``."""
        return Vector(self.program, self.program.emit(op, self.ref, **params), tuple(result))

    def reshape(self, shape: Sequence[int]) -> Vector:
        """The same numbers in another shape of the same size."""
        if tuple(shape) == self.shape:
            return self
        return self.op("reshape", shape, shape=list(shape))

    def expand(self, shape: Sequence[int]) -> Vector:
        """Repeated along axes of size 1."""
        if tuple(shape) == self.shape:
            return self
        return self.op("expand", shape, shape=list(shape))

    def permute(self, dims: Sequence[int]) -> Vector:
        """Axes in another order."""
        return self.op("permute", [self.shape[d] for d in dims], dims=list(dims))

    def slice(self, axis: int, start: int, stop: int, step: int = 1) -> Vector:
        """Positions ``start:stop:step`` of one axis."""
        shape = list(self.shape)
        shape[axis] = len(range(start, stop, step))
        return self.op("slice", shape, axis=axis, start=start, stop=stop, step=step)

    def embed(
        self, axis: int, start: int, stop: int, size: int, fill: float, step: int = 1
    ) -> Vector:
        """Placed at ``start:stop:step`` of an axis of ``size`` positions; ``fill`` elsewhere."""
        shape = list(self.shape)
        shape[axis] = size
        return self.op(
            "embed", shape, axis=axis, start=start, stop=stop, size=size, fill=fill, step=step
        )

    def with_rank(self, rank: int) -> Vector:
        """Leading axes of size 1 added, or dropped (they must be of size 1)."""
        extra = rank - len(self.shape)
        if extra >= 0:
            return self.reshape((1,) * extra + self.shape)
        if any(size != 1 for size in self.shape[:-extra]):
            raise ValueError("a leading axis varies")
        return self.reshape(self.shape[-extra:])

    def squashed(self, axes: Iterable[int]) -> Vector:
        """Size 1 on those of ``axes`` along which the numbers do not vary."""
        vector = self
        for axis in axes:
            if vector.shape[axis] > 1:
                value = vector.value.reshape(vector.shape)
                first = value.narrow(axis, 0, 1)
                if torch.equal(value, first.expand_as(value)):
                    vector = vector.slice(axis, 0, 1)
        return vector

    def carried(self, shape: Sequence[int], to: Sequence[int], *, squash: bool = True) -> Vector:
        """What it becomes when a value of ``shape`` is reshaped to ``to``.

        Axes that are merged or split together are first expanded to their full sizes, and axes
        along which the result does not vary shrink to 1 again (unless ``squash=False``).
        """
        full = list(self.shape)
        result: list[int] = []
        regrouped: list[int] = []
        for before, after in groups_of(shape, to):
            if all(self.shape[axis] == 1 for axis in before):
                result += [1] * len(after)
                continue
            for axis in before:
                full[axis] = shape[axis]
            if sum(shape[a] > 1 for a in before) > 1 or sum(to[a] > 1 for a in after) > 1:
                regrouped += after
            result += [to[axis] for axis in after]
        moved = self.expand(full).reshape(result)
        return moved.squashed(regrouped) if squash else moved


def groups_of(shape: Sequence[int], to: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest split of two shapes of the same size into runs of axes of equal product."""
    if math.prod(shape) == 0:
        return [(list(range(len(shape))), list(range(len(to))))]
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) and j < len(to):
        before, after = [i], [j]
        left, right = shape[i], to[j]
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                before.append(i)
                left, i = left * shape[i], i + 1
            else:
                after.append(j)
                right, j = right * to[j], j + 1
        groups.append((before, after))
    # What is left over on either side has size 1.
    groups += [(list(range(i, len(shape))), [])] if i < len(shape) else []
    groups += [([], list(range(j, len(to))))] if j < len(to) else []
    return groups
