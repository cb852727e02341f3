"""Example inputs: normalise what a user passes, move it to the model, vary its values and shapes.

Everything here works on the containers that models take (tensors in tuples, lists, mappings and
dataclasses), draws from generators of its own and leaves the global random state alone.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from normswap.errors import NormswapError

__all__ = [
    "Inputs",
    "concrete",
    "default_inputs",
    "normalise_inputs",
    "resolve_inputs",
    "vary_inputs",
]

_SIZE_STEP = 32  # keeps sizes multiples of the strides and patch sizes that models use
_LENGTH_STEP = 5
_MASK_FLOOR = -1e4  # additive masks hold 0 and a number below this, or -inf


@dataclass(frozen=True, eq=False)  # tensors have no equality that is true or false
class Inputs:
    """One call of a model, ``model(*args, **kwargs)``, and which of its ``outputs`` count.

    ``outputs`` holds globs of paths (:func:`normswap.outputs.flatten`); ``None``: all count.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    outputs: tuple[str, ...] | None = None

    def map(self, fn: Callable[[Tensor], Any]) -> Inputs:
        """The same arguments with ``fn`` applied to every tensor, also in nested containers."""
        args = tuple(_map_tensors(fn, value) for value in self.args)
        kwargs = {name: _map_tensors(fn, value) for name, value in self.kwargs.items()}
        return Inputs(args, kwargs, self.outputs)

    def to(self, device: torch.device | str) -> Inputs:
        """The same arguments with every tensor on ``device``."""
        return self.map(lambda tensor: tensor.to(device))

    def tensors(self) -> list[Tensor]:
        """Every tensor, in the order of the arguments."""
        found: list[Tensor] = []
        self.map(found.append)
        return found

    def describe(self) -> str:
        """The shapes in short: ``1x3x224x224``, or ``input_ids 2x16, attention_mask 2x16``."""
        parts = [_describe(value) for value in self.args]
        parts += [f"{name} {_describe(value)}" for name, value in self.kwargs.items()]
        return ", ".join(parts) or "no inputs"


def normalise_inputs(
    example_inputs: Any, example_kwargs: Mapping[str, Any] | None = None
) -> Inputs:
    """The call that a user's ``example_inputs`` stand for.

    A tensor is the only positional argument, a tuple or list holds the positional arguments (so
    a detection model takes ``([image],)``), a mapping holds the keywords. ``example_kwargs`` adds
    keywords.

    Raises:
        NormswapError: anything else was given, a key is no string, or a keyword is given twice.
    """
    extra = dict(example_kwargs or {})
    if isinstance(example_inputs, Inputs):
        args, kwargs = example_inputs.args, example_inputs.kwargs
    elif isinstance(example_inputs, Tensor):
        args, kwargs = (example_inputs,), {}
    elif isinstance(example_inputs, Mapping):
        args, kwargs = (), dict(cast("Mapping[Any, Any]", example_inputs))
    elif isinstance(example_inputs, (tuple, list)):
        args, kwargs = tuple(cast("tuple[Any, ...]", example_inputs)), {}
    else:
        hint = ""
        if type(example_inputs).__module__ == "numpy":
            hint = " (for a NumPy array: torch.from_numpy(array))"
        raise NormswapError(
            "example_inputs must be a tensor, a tuple of positional arguments or a mapping of "
            f"keyword arguments, and is a {type(example_inputs).__name__}{hint}"
        )
    for name in (*kwargs, *extra):
        if not isinstance(name, str):
            raise NormswapError(
                f"example_inputs is a mapping, so its keys name arguments of the model, and "
                f"{name!r} is no string; pass a mapping that is itself an argument as (mapping,)"
            )
    twice = sorted(kwargs.keys() & extra.keys())
    if twice:
        raise NormswapError(
            f"argument {twice[0]!r} is both in example_inputs and in example_kwargs: give it once"
        )
    outputs = example_inputs.outputs if isinstance(example_inputs, Inputs) else None
    return Inputs(args, {**kwargs, **extra}, outputs)


def resolve_inputs(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: Mapping[str, Any] | None = None,
    outputs: str | Iterable[str] | None = None,
) -> Inputs:
    """`normalise_inputs`, or `default_inputs` for ``None``, on the model's device and dtype.

    A floating tensor of a dtype that no parameter has takes that of the first floating parameter.
    With a model on the meta device the inputs stay where they are. ``outputs`` names the outputs
    that count.

    Raises:
        NormswapError: see `normalise_inputs` and `default_inputs`.
    """
    if example_inputs is None:
        inputs = default_inputs(model)
        inputs = Inputs(inputs.args, {**inputs.kwargs, **(example_kwargs or {})})
    else:
        inputs = normalise_inputs(example_inputs, example_kwargs)
    if outputs is not None:
        globs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        inputs = Inputs(inputs.args, inputs.kwargs, globs)
    first = next((t for t in (*model.parameters(), *model.buffers())), None)
    if first is not None and not first.is_meta:
        inputs = inputs.to(first.device)
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if not dtypes:
        return inputs

    def cast_floating(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or tensor.dtype in dtypes:
            return tensor
        return tensor.to(dtypes[0])

    return inputs.map(cast_floating)


def default_inputs(model: nn.Module) -> Inputs:
    """Inputs of batch 2 built from what the model says of itself, on the CPU.

    See :func:`normswap.inputs_from_model.default_inputs`.
    """
    from normswap.inputs_from_model import default_inputs

    return default_inputs(model)


class Draw:
    """Random tensors from a generator of its own."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, dtype=torch.float64, device="cpu")

    def below(self, high: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(max(high, 1), shape, generator=self._generator, device="cpu")


# -- varying inputs -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """How shapes change: the batch, the sizes of images, the length of sequences."""

    batch: tuple[int, int] | None = None  # old, new
    image: tuple[tuple[int, int], tuple[int, int]] | None = None  # (old h, w), (new h, w)
    length: tuple[int, int] | None = None  # old, new

    def shape(self, tensor: Tensor, *, listed: bool) -> list[int]:
        """The new shape of ``tensor``; ``listed``: one image of a list, without a batch axis."""
        shape = list(tensor.shape)
        axes = range(1, len(shape))
        if (
            self.image is not None
            and len(shape) >= 3
            and (listed or _is_image(tensor) or tuple(shape[-2:]) == self.image[0])
        ):
            # In proportion, so that inputs at several scales keep fitting together.
            (h, w), (new_h, new_w) = self.image
            shape[-2:] = [shape[-2] * new_h // h, shape[-1] * new_w // w]
            axes = range(1, len(shape) - 2)
        if self.length is not None:
            for axis in axes:
                if shape[axis] == self.length[0]:
                    shape[axis] = self.length[1]
        if self.batch is not None and shape and not listed and shape[0] == self.batch[0]:
            shape[0] = self.batch[1]
        return shape


def vary_inputs(inputs: Inputs, seed: int) -> Iterator[Inputs]:
    """Inputs of the same kind with other values and other shapes, the boldest change first.

    Changed are the batch size, the height and width of images (to a size that is not square) and
    the length of sequences; then less and less of it, for models that fix their sizes; the last
    candidate has the shapes of ``inputs``. Floating values are drawn from the distribution of the
    given ones (constant ones get unit noise), integers from the given ones, masks are stretched.
    A list of images gets one image more or less.
    """
    draw = Draw(seed)
    for change in dict.fromkeys(_changes(inputs)):
        args = tuple(_vary(value, change, draw) for value in inputs.args)
        kwargs = {name: _vary(value, change, draw) for name, value in inputs.kwargs.items()}
        yield Inputs(args, kwargs, inputs.outputs)


def _changes(inputs: Inputs) -> Iterator[_Change]:
    tensors = inputs.tensors()
    lists = [found for value in inputs.args if (found := _images(value))]
    listed = [image for found in lists for image in found]
    batched = [t.shape[0] for t in tensors if t.ndim >= 2 and not any(t is i for i in listed)]
    batch = None
    for size in (*batched, *map(len, lists))[:1]:
        batch = (size, 2 if size == 1 else size - 1)
    pictures = [t for t in tensors if _is_image(t)] or listed
    images: list[tuple[tuple[int, int], tuple[int, int]] | None] = [None]
    if pictures:
        h, w = pictures[0].shape[-2:]
        step = _SIZE_STEP if h + _SIZE_STEP != w else 2 * _SIZE_STEP
        images = [((h, w), (h + step, w)), ((h, w), (h + _SIZE_STEP, w + _SIZE_STEP)), None]
    lengths = [*((n, n + _LENGTH_STEP) for n in _sequence_lengths(tensors, listed)), None]
    for image, length in itertools.product(images, lengths):
        yield _Change(batch, image, length)
    for image, length in itertools.product(images, lengths):
        yield _Change(None, image, length)


def _is_image(tensor: Tensor) -> bool:
    """A batch of images or clips; additive attention masks have four axes too, and one is 1."""
    return tensor.ndim >= 4 and tensor.is_floating_point() and not _is_mask(tensor)


def _sequence_lengths(tensors: list[Tensor], listed: list[Tensor]) -> list[int]:
    """Sizes that may be the length of a sequence: token ids first, then features."""
    tokens = [t.shape[1] for t in tensors if t.ndim == 2 and not t.is_floating_point()]
    if tokens:
        return tokens[:1]
    floats = [t for t in tensors if t.is_floating_point() and t.ndim in {2, 3}]
    first = next((t for t in floats if not any(t is image for image in listed)), None)
    return list(dict.fromkeys(first.shape[1:])) if first is not None else []


def _images(value: Any) -> list[Tensor] | None:
    """The images of a list of images, as detection models take."""
    if not isinstance(value, (list, tuple)):
        return None
    items = cast("list[Any]", value)
    are_images = all(isinstance(t, Tensor) and t.ndim == 3 and t.is_floating_point() for t in items)
    return list(items) if items and are_images else None


def _vary(value: Any, change: _Change, draw: Draw) -> Any:
    if isinstance(value, Tensor):
        return _redraw(value, change.shape(value, listed=False), draw)
    images = _images(value)
    if images is None:
        return _rebuild(lambda item: _vary(item, change, draw), value)
    if change.batch is not None and change.batch[0] == len(images):
        images = [images[n % len(images)] for n in range(change.batch[1])]
    new = [_redraw(image, change.shape(image, listed=True), draw) for image in images]
    return new if isinstance(value, list) else tuple(new)


def _redraw(tensor: Tensor, shape: list[int], draw: Draw) -> Tensor:
    """Other values of the same kind in another shape, on the same device, dtype and layout."""
    if tensor.is_meta or tensor.numel() == 0:
        return tensor.new_zeros(shape)
    values = tensor.detach().cpu()
    if _is_mask(values) or _is_counting(values):
        new = _stretch(values, shape)
    elif values.is_floating_point():
        new = _redraw_floats(values.double().flatten(), shape, draw)
    else:
        new = values.flatten()[draw.below(values.numel(), tuple(shape))]
    new = new.to(tensor.dtype).to(tensor.device)
    channels_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if channels_last and not tensor.is_contiguous():
        return new.contiguous(memory_format=torch.channels_last)
    return new


def _redraw_floats(values: Tensor, shape: list[int], draw: Draw) -> Tensor:
    """Draws from the empirical distribution of ``values``, interpolated between neighbours."""
    low, high = values.min(), values.max()
    if low == high:
        return low + draw.normal(*shape)
    whole = bool((values == values.round()).all())
    if whole or not bool(values.isfinite().all()):  # counts and one-hot rows; NaN and infinities
        return values[draw.below(values.numel(), tuple(shape))]
    ordered = values.sort().values
    place = draw.uniform(*shape) * (ordered.numel() - 1)
    below = place.long()
    above = (below + 1).clamp(max=ordered.numel() - 1)
    return torch.lerp(ordered[below], ordered[above], place - below)


def _is_mask(values: Tensor) -> bool:
    """Booleans, integers 0 and 1, and the additive form: 0, or a number that silences."""
    if values.dtype == torch.bool:
        return True
    if values.is_meta or values.numel() == 0 or values.is_complex():
        return False
    if values.is_floating_point():
        silent = values <= _MASK_FLOOR
        return bool(silent.any()) and bool((silent | (values == 0)).all())
    return bool(((values == 0) | (values == 1)).all())


def _is_counting(values: Tensor) -> bool:
    """Integers that never fall along the last axis: positions, offsets, segment numbers."""
    if values.is_floating_point() or values.is_complex() or values.ndim == 0:
        return False
    return values.shape[-1] > 2 and bool((values.diff(dim=-1) >= 0).all())


def _stretch(values: Tensor, shape: list[int]) -> Tensor:
    """Nearest-neighbour resizing of every axis, which keeps padding and causal patterns."""
    for axis, size in enumerate(shape):
        old = values.shape[axis]
        values = values.index_select(axis, torch.arange(size) * old // size)
    return values


def concrete(inputs: Inputs, seed: int = 0) -> Inputs:
    """``inputs`` with each meta tensor replaced by one with values, on the CPU.

    Floating values are drawn from the unit normal distribution, integers are 0 or 1 (nothing is
    known of their range), booleans are true.
    """
    draw = Draw(seed)

    def fill(tensor: Tensor) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if tensor.dtype == torch.bool:
            return torch.ones(tensor.shape, dtype=torch.bool)
        if tensor.is_floating_point() or tensor.is_complex():
            return draw.normal(*tensor.shape).to(tensor.dtype)
        return draw.below(2, tuple(tensor.shape)).to(tensor.dtype)

    return inputs.map(fill)


# -- containers -----------------------------------------------------------------------------------


def _map_tensors(fn: Callable[[Tensor], Any], value: Any) -> Any:
    if isinstance(value, Tensor):
        return fn(value)
    return _rebuild(lambda item: _map_tensors(fn, item), value)


def _rebuild(fn: Callable[[Any], Any], value: Any) -> Any:
    """A container of the same kind with ``fn`` applied to its items; other values as they are."""
    if isinstance(value, MutableMapping):
        items = cast("MutableMapping[Any, Any]", value)
        new = copy.copy(items)
        for key in list(items):
            new[key] = fn(items[key])
        return new
    if isinstance(value, (list, tuple)):
        sequence = [fn(item) for item in cast("list[Any]", value)]
        if isinstance(value, list):
            return sequence
        return type(value)(*sequence) if hasattr(value, "_fields") else tuple(sequence)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: fn(getattr(value, name)) for name in names})
    return value


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return "{" + ", ".join(f"{key} {_describe(item)}" for key, item in items) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_describe, cast("list[Any]", value))) + "]"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return type(value).__name__
