"""True float64: run a model so that no step of it is computed in a lower precision.

``model.double()`` is not enough: many models cast to float32 inside (norms, rotary embeddings,
softmaxes), and two correct models then differ by 1e-7. `true_float64` rewrites the operations
themselves instead, so the weights may stay in whatever dtype they are stored in.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

__all__ = ["true_float64"]

_VIEW_AS_DTYPE = torch.ops.aten.view.dtype


@contextmanager
def true_float64() -> Generator[None]:
    """Compute everything in the block in float64 (complex128), without gradients.

    Inside the block every operation sees each floating tensor of a lower precision, and each
    ``dtype`` argument of a factory or a cast, as float64. Tensors from outside are not changed:
    what the block writes into one goes to a float64 shadow that later reads in the block see,
    and that is gone when the block ends. Integer tensors are written as usual. The default dtype
    is float64 meanwhile.

    The values of a tensor from outside that the block wrote to must be read inside the block.
    Reinterpreting the bits of a floating tensor (``x.view(torch.int32)``) is not supported.
    """
    with _float64_arithmetic(noise=0.0):
        yield


@contextmanager
def rounding_noise(size: float, seed: int) -> Generator[None]:
    """`true_float64`, but each value `v` that an op reads is ``v * (1 + size * u)``, u in [-1, 1].

    That goes for weights too. With `size` the unit roundoff of a dtype this shows how far rounding
    in that dtype can move the results of a model: an estimate that does not hang on one lucky
    rounding.
    """
    with _float64_arithmetic(noise=size, seed=seed):
        yield


@contextmanager
def _float64_arithmetic(noise: float, seed: int = 0) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode(), _Float64Mode(noise, seed):
            yield
    finally:
        torch.set_default_dtype(before)


def _raised(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def _is_lower(value: object) -> bool:
    return isinstance(value, Tensor) and _raised(value.dtype) != value.dtype


def _raise_result(value: Any) -> Any:
    return value.to(_raised(value.dtype)) if _is_lower(value) else value


def _map(fn: Callable[[Any], Any], value: Any) -> Any:
    """Apply `fn` to the leaves of nested lists and tuples, the containers that ops take."""
    if isinstance(value, (list, tuple)):
        mapped = [_map(fn, item) for item in cast("list[Any]", value)]
        return mapped if isinstance(value, list) else tuple(mapped)
    return fn(value)


class _Float64Mode(TorchDispatchMode):
    def __init__(self, noise: float, seed: int) -> None:
        super().__init__()
        self._noise = noise
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}
        # Keyed by storage, not by tensor: buffers may be views of one another. The source is
        # kept alive beside its shadow, so that its address cannot be given to another storage.
        self._shadows: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is _VIEW_AS_DTYPE and not _raised(args[0].dtype).is_floating_point:
            # The bits of an integer tensor: the target dtype says how wide they are.
            return _raise_result(func(*args, **(kwargs or {})))
        schema = func._schema
        kwargs = kwargs or {}
        originals: dict[int, Tensor] = {}
        new_args = [
            self._raise_argument(value, declared.alias_info, originals)
            for value, declared in zip(args, schema.arguments, strict=False)
        ]
        aliases = {declared.name: declared.alias_info for declared in schema.arguments}
        new_kwargs = {
            name: self._raise_argument(value, aliases.get(name), originals)
            for name, value in kwargs.items()
        }
        if self._noise and _computes(schema, new_args):
            new_args = _map(self._perturb, new_args)
        result = func(*new_args, **new_kwargs)
        # An in-place op hands its argument back: the caller must get the object it passed, or
        # `self.buffer += x` would put a shadow into the user's model.
        return _map(lambda value: originals.get(id(value), _raise_result(value)), result)

    def _raise_argument(self, value: Any, alias: Any, originals: dict[int, Tensor]) -> Any:
        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.dtype):
                return _raised(leaf)
            if not isinstance(leaf, Tensor) or not _is_lower(leaf):
                return leaf
            raised = self._read(leaf, shared=alias is not None)
            if alias is not None and alias.is_write:
                originals[id(raised)] = leaf
            return raised

        return _map(one, value)

    def _read(self, tensor: Tensor, *, shared: bool) -> Tensor:
        """`tensor` in float64; `shared`: the op may write to it or return a view of it."""
        target = _raised(tensor.dtype)
        if not _is_plain(tensor):
            return tensor.to(target)
        key = (tensor.untyped_storage()._cdata, tensor.dtype)
        if key not in self._shadows:
            if not shared:  # a copy for this op alone, so that not the whole model is held twice
                return tensor.to(target)
            # Outside inference mode: a view of a normal tensor has to be a normal tensor.
            with torch.inference_mode(False), torch.no_grad():
                self._shadows[key] = (tensor, _whole_storage(tensor).to(target))
        shadow = self._shadows[key][1]
        return shadow.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def _perturb(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float64:
            return value
        if value.device not in self._generators:
            generator = torch.Generator(value.device).manual_seed(self._seed)
            self._generators[value.device] = generator
        generator = self._generators[value.device]
        unit = torch.rand(value.shape, generator=generator, device=value.device)
        return value * (1 + self._noise * (2 * unit - 1))


def _is_plain(tensor: Tensor) -> bool:
    """Whether the tensor is a strided window on a storage of its own values."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_nested
        and not is_traceable_wrapper_subclass(tensor)
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _whole_storage(tensor: Tensor) -> Tensor:
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.as_strided((count,), (1,), 0)


def _computes(schema: Any, args: list[Any]) -> bool:
    """Whether an op makes new floating values out of others: no view, no factory, no write."""
    if any(returned.alias_info is not None for returned in schema.returns):
        return False
    return any(isinstance(arg, Tensor) and arg.is_floating_point() for arg in args)
