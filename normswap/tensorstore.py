"""`TensorStore`: the tensors of a checkpoint by name, each read only when it is asked for.

Understood are `.safetensors`, `.pt / .pth / .bin / .ckpt` (weights only: a pickle that would run
code is refused), and directories that hold one of these whole or in shards with an index.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from normswap.errors import CheckpointError

MARKER = "normswap"
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
# Keys under which training scripts keep the weights, beside optimizer state and the like.
_WRAPPERS = ("state_dict", "model_state_dict", "model")
# What DataParallel and torch.compile put in front of every name.
_PREFIXES = ("module.", "_orig_mod.")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class TensorInfo:
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def meta(self) -> Tensor:
        """A tensor like it, without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    @property
    def nbytes(self) -> int:
        """The bytes of its data."""
        return self.meta().nbytes


@dataclass(frozen=True)
class TensorStore:
    """The tensors of a checkpoint by name.

    Attributes:
        path: the file or directory.
        infos: shape and dtype of each tensor, aliases included, in stored order.
        reader: gives the data of a name that is no alias.
        aliases: names whose tensor is stored under another name (tied weights).
        marker: what normswap wrote about a file of its own (:func:`read_marker`), else empty.
        ignored: what else the file holds that is not a weight (optimizer state, epoch, …).
    """

    path: Path
    infos: Mapping[str, TensorInfo]
    reader: Callable[[str], Tensor]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    marker: Mapping[str, Any] = field(default_factory=dict[str, Any])
    ignored: tuple[str, ...] = ()

    def __contains__(self, name: object) -> bool:
        return name in self.infos

    def __iter__(self) -> Iterator[str]:
        return iter(self.infos)

    def __len__(self) -> int:
        return len(self.infos)

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors, each counted once."""
        return sum(info.nbytes for name, info in self.infos.items() if name not in self.aliases)

    def read(self, name: str) -> Tensor:
        """The tensor of that name.

        Raises:
            CheckpointError: there is none, its data cannot be read, or it holds NaN or infinity.
        """
        if name not in self.infos:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        try:
            tensor = self.reader(self.aliases.get(name, name))
        except Exception as error:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} cannot be read: {first_line(error)}"
            ) from error
        require_finite(name, tensor, self.path)
        return tensor

    def read_all(self) -> dict[str, Tensor]:
        """All tensors; an alias is the same tensor object as the name it stands for."""
        tensors = {name: self.read(name) for name in self.infos if name not in self.aliases}
        return {name: tensors[self.aliases.get(name, name)] for name in self.infos}


def require_finite(name: str, tensor: Tensor, where: Path | str) -> None:
    """Raise unless every value is finite.

    A mask of 0 and -inf alone (some models register one as a buffer) is no damage.

    Raises:
        CheckpointError: there is a NaN or an infinity.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return
    values = tensor.float() if tensor.element_size() == 1 else tensor
    finite = torch.isfinite(values)
    if finite.all():
        return
    if not tensor.is_complex() and bool(((values == 0) | (values == -torch.inf)).all()):
        return
    raise CheckpointError(
        f"{where}: tensor {name!r} holds NaN or infinity ({int((~finite).sum())} of "
        f"{finite.numel()} values): the weights are damaged or training diverged"
    )


def open_store(src: str | Path) -> TensorStore:
    """Open a checkpoint without reading its data.

    Raises:
        CheckpointError: it does not exist, is damaged, is of no known kind, needs code to be
            read, or its index names a file or tensor that is not there.
    """
    path = Path(src)
    try:
        return _without_prefix(_open(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error


def first_line(error: BaseException) -> str:
    """The first line that the error has to say, or its type."""
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        CheckpointError: the file cannot be read or holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is not JSON: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return cast("dict[str, Any]", data)


def _open(path: Path) -> TensorStore:
    if path.is_dir():
        inside = _weights_in(path)
        if inside is None:
            raise CheckpointError(
                f"{path}: no weights in this directory (looked for *.safetensors and "
                "pytorch_model.bin, whole or with an index)"
            )
        return replace(_open(inside), path=path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or directory")
    if path.name.endswith(".index.json"):
        return _open_sharded(path)
    if path.suffix == ".safetensors":
        return _open_safetensors(path)
    if path.suffix in PICKLE_SUFFIXES:
        return _open_pickle(path)
    raise CheckpointError(
        f"{path}: unknown kind of file; expected a directory, .safetensors or one of "
        f"{', '.join(PICKLE_SUFFIXES)}"
    )


def _weights_in(directory: Path) -> Path | None:
    """The file or index to open, in the order in which transformers looks."""
    for suffix, standard in ((".safetensors", "model"), (".bin", "pytorch_model")):
        for ending in (suffix, suffix + ".index.json"):
            if (directory / (standard + ending)).is_file():
                return directory / (standard + ending)
        for ending in (suffix + ".index.json", suffix):
            found = sorted(directory.glob("*" + ending))
            if len(found) == 1:
                return found[0]
    return None


def _open_safetensors(path: Path) -> TensorStore:
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(path, framework="pt")
        metadata: dict[str, str] = file.metadata() or {}
        infos: dict[str, TensorInfo] = {}
        for name in file.keys():  # noqa: SIM118 (the file is no mapping)
            view = file.get_slice(name)
            infos[name] = TensorInfo(tuple(view.get_shape()), _DTYPES[view.get_dtype()])
    except SafetensorError as error:
        raise CheckpointError(
            f"{path}: damaged or truncated safetensors file ({first_line(error)}); copy it again"
        ) from error
    except KeyError as error:
        raise CheckpointError(f"{path}: dtype {error} is not supported") from error
    marker = _read_marker(path, metadata)
    guard = marker.get("guard")
    reader = _without_guard(guard, infos, file.get_tensor)
    # `safetensors.torch.save_model` notes tied names so: {dropped name: stored name}.
    aliases = {k: v for k, v in metadata.items() if v in infos and k not in infos}
    infos |= {alias: infos[name] for alias, name in aliases.items()}
    return TensorStore(path, infos, reader, aliases, marker)


def _without_guard(
    guard: str | None, infos: dict[str, TensorInfo], read: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """Take the guard out of ``infos``, or its extra axis off; how tensors are read then."""
    if guard not in infos:
        return read
    assert guard is not None
    info = infos.pop(guard)
    if info.shape == (0,):
        return read
    infos[guard] = TensorInfo(info.shape[1:], info.dtype)
    return lambda name: read(name)[0] if name == guard else read(name)


def _read_marker(path: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    if MARKER not in metadata:
        return {}
    try:
        return dict(json.loads(metadata[MARKER]))
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: the metadata written by normswap is damaged") from error


def _open_sharded(index: Path) -> TensorStore:
    """All tensors of the files that the index names; each name in it must be in its file."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: has no weight_map")
    where = cast("dict[str, str]", weight_map)
    stores: dict[str, TensorStore] = {}
    for name in dict.fromkeys(where.values()):
        if Path(str(name)).name != name:
            raise CheckpointError(f"{index}: {name!r} is no name of a file beside the index")
        if not (index.parent / name).is_file():
            raise CheckpointError(f"{index}: names the file {name!r}, which is missing")
        stores[name] = _open(index.parent / name)
    guards = {store.marker.get("guard") for store in stores.values()}
    for name, file in where.items():
        if name not in stores[file] and name not in guards:
            raise CheckpointError(f"{index}: names the tensor {name!r}, which is not in {file!r}")
    return _merged(index, stores, where)


def _merged(
    index: Path, stores: Mapping[str, TensorStore], where: Mapping[str, str]
) -> TensorStore:
    owner = {name: store for store in stores.values() for name in store}
    owner |= {name: stores[file] for name, file in where.items() if name in stores[file]}
    marker: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for store in stores.values():
        marker |= store.marker
        aliases |= store.aliases
    return TensorStore(
        index,
        {name: store.infos[name] for name, store in owner.items()},
        lambda name: owner[name].reader(name),
        aliases,
        marker,
        tuple(name for store in stores.values() for name in store.ignored),
    )


def _open_pickle(path: Path) -> TensorStore:
    tensors, ignored = _state_dict(path, _load_pickle(path))
    first_name: dict[object, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CheckpointError(
                f"{path}: tensor {name!r} is sparse or quantised, which is not supported"
            )
        first = first_name.setdefault(storage_key(tensor) or name, name)
        if first != name:
            aliases[name] = first
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    return TensorStore(path, infos, tensors.__getitem__, aliases, ignored=ignored)


def storage_key(tensor: Tensor) -> object | None:
    """Equal for tensors that are the same view of the same memory; None if there is no memory."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return None
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _load_pickle(path: Path) -> object:
    """What `torch.load` makes of the file, its data mapped and not read where the format can."""
    with path.open("rb") as file:
        mappable = file.read(4) == b"PK\x03\x04"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mappable)
    except pickle.UnpicklingError as error:
        raise CheckpointError(_pickle_message(path, str(error))) from error
    except RuntimeError as error:
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path}: a TorchScript archive holds compiled code; save the state_dict of the "
                "Python model instead"
            ) from error
        raise CheckpointError(_damaged(path, error)) from error
    except Exception as error:  # a damaged pickle fails in whatever way its bytes ask for
        raise CheckpointError(_damaged(path, error)) from error


def _damaged(path: Path, error: Exception) -> str:
    reason = first_line(error).partition(". ")[0]
    return f"{path}: damaged or truncated, or no PyTorch checkpoint ({reason})"


def _pickle_message(path: Path, text: str) -> str:
    found = re.search(r"GLOBAL (\S+)", text)
    if found is None:
        return f"{path}: damaged, or a pickle of something else than weights (it was not run)"
    return (
        f"{path}: the pickle would run code ({found[1]}), which normswap never does; if you trust "
        "the file, load it in Python and save model.state_dict() alone"
    )


def _state_dict(path: Path, data: object) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """The weights in what was loaded, and the names of what else there was."""
    ignored: list[str] = []
    content = data
    while isinstance(content, Mapping):
        items = cast("Mapping[Any, Any]", content)
        wrapper = next((k for k in _WRAPPERS if isinstance(items.get(k), Mapping)), None)
        if wrapper is None:
            tensors = {str(k): v for k, v in items.items() if isinstance(v, Tensor)}
            ignored += [str(k) for k, v in items.items() if not isinstance(v, Tensor)]
            if tensors:
                return tensors, tuple(ignored)
            break
        ignored += [str(key) for key in items if key != wrapper]
        content = items[wrapper]
    found = f"it has {', '.join(ignored[:5])}" if ignored else f"it is a {type(data).__name__}"
    raise CheckpointError(
        f"{path}: no weights found, neither at the top nor under {', '.join(_WRAPPERS)} ({found})"
    )


def _without_prefix(store: TensorStore) -> TensorStore:
    """The store with a prefix that a wrapper put before every name taken off."""
    for prefix in _PREFIXES:
        if store.infos and all(name.startswith(prefix) for name in store.infos):
            cut, read = len(prefix), store.reader
            return _without_prefix(
                replace(
                    store,
                    infos={name[cut:]: info for name, info in store.infos.items()},
                    reader=lambda name, read=read, prefix=prefix: read(prefix + name),
                    aliases={k[cut:]: v[cut:] for k, v in store.aliases.items()},
                )
            )
    return store
