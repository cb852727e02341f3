"""Checkpoints written all or nothing, and plans carried out on files tensor by tensor.

A destination is built in a hidden directory beside it and renamed at the end, so that it exists
complete or not at all. A plan is streamed: at any time there are in memory one shard of the
result, the tensor at hand, and what the plan's program will still read.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normswap.errors import CheckpointError, NormswapError
from normswap.manifest import MANIFEST_NAME, Manifest
from normswap.plan import Plan
from normswap.tensorstore import (
    MARKER,
    TensorInfo,
    TensorStore,
    first_line,
    open_store,
)

__all__ = [
    "DEFAULT_SHARD_SIZE",
    "DestinationError",
    "ShardWriter",
    "apply_plan",
    "check_destination",
    "guard_for",
    "open_store",
    "staged_directory",
]

DEFAULT_SHARD_SIZE = "5GB"
WEIGHTS_PATTERN = "model{suffix}.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# A directory that holds one of these is a model, which `overwrite=True` may replace.
_MODEL_FILES = (MANIFEST_NAME, "config.json", "*.safetensors", "*.bin", "*.pt", "*.pth")


class DestinationError(CheckpointError):
    """The destination exists already or cannot be written."""


def check_destination(destination: str | Path, *, overwrite: bool = False) -> None:
    """Raise unless :func:`staged_directory` may write there.

    Raises:
        DestinationError: it exists and ``overwrite`` is false, or it is not a model directory.
    """
    path = Path(destination)
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise DestinationError(f"{path}: exists already; choose another name, or overwrite it")
    if not path.is_dir():
        raise DestinationError(f"{path}: is a file, not a directory that could be overwritten")
    inside = any(True for _ in path.iterdir())
    if inside and not any(any(path.glob(pattern)) for pattern in _MODEL_FILES):
        raise DestinationError(f"{path}: does not look like a model directory; remove it yourself")


@contextmanager
def staged_directory(destination: str | Path, *, overwrite: bool = False) -> Generator[Path]:
    """Give a new directory to write into; it becomes ``destination`` when the block succeeds.

    On any failure nothing is left behind, and an overwritten directory is as it was.

    Raises:
        DestinationError: see :func:`check_destination`, or the file system refuses.
    """
    path = Path(os.path.abspath(destination))  # noqa: PTH100 (resolve would follow a final link)
    made: list[Path] = []
    stage = path.parent / f".{path.name}.{secrets.token_hex(4)}.partial"
    try:
        check_destination(path, overwrite=overwrite)
        _make_parents(path.parent, made)
        stage.mkdir()
        yield stage
        _sync(stage)
        _publish(stage, path)
    except BaseException as error:
        shutil.rmtree(stage, ignore_errors=True)
        for directory in reversed(made):
            _remove_if_empty(directory)
        if isinstance(error, OSError):
            reason = error.strerror or str(error)
            raise DestinationError(f"{destination}: cannot be written: {reason}") from error
        raise


def _make_parents(directory: Path, made: list[Path]) -> None:
    missing = [d for d in (directory, *directory.parents) if not d.exists()]
    for parent in reversed(missing):
        parent.mkdir()
        made.append(parent)


def _remove_if_empty(directory: Path) -> None:
    try:
        directory.rmdir()
    except OSError:
        return  # another process has put something there meanwhile


def _sync(directory: Path) -> None:
    """Have the data on the disk before the rename is."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def _publish(stage: Path, path: Path) -> None:
    if not os.path.lexists(path):
        stage.rename(path)
        return
    old = stage.with_suffix(".replaced")
    path.rename(old)
    try:
        stage.rename(path)
    except BaseException:
        old.rename(path)
        raise
    if old.is_symlink():
        old.unlink()
    else:
        shutil.rmtree(old, ignore_errors=True)


class ShardWriter:
    """Writes tensors into safetensors shards, each as soon as all of its tensors are there.

    Args:
        directory: where the files go.
        infos: shape and dtype of every tensor of the result, in the order of the shards.
        fill: gives the tensors that nobody puts.
        awaited: the names that will be given to :meth:`put`.
        aliases: names that are not stored but noted as standing for a stored one.
        marker: normswap's entry in the metadata of each file.
        max_shard_size: bytes, or a text such as ``"5GB"``.
        progress: called with the bytes of each shard written.

    Raises:
        NormswapError: ``max_shard_size`` is no size.
    """

    def __init__(
        self,
        directory: Path,
        infos: Mapping[str, TensorInfo],
        fill: Callable[[str], Tensor],
        *,
        awaited: Iterable[str] = (),
        aliases: Mapping[str, str] | None = None,
        marker: str | None = None,
        max_shard_size: int | str = DEFAULT_SHARD_SIZE,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.directory = directory
        self.infos = infos
        self.fill = fill
        self.aliases = dict(aliases or {})
        self.marker = marker
        self.progress = progress
        self.shards, self.total_size = _split(infos, max_shard_size)
        self.file_of = {name: file for file, names in self.shards.items() for name in names}
        self.pending: dict[str, set[str]] = {file: set() for file in self.shards}
        for name in awaited:
            self.pending[self.file_of[name]].add(name)
        self.held: dict[str, Tensor] = {}
        self.done: set[str] = set()

    def put(self, name: str, tensor: Tensor) -> None:
        """Take an awaited tensor; cast it to its dtype; write the shard that it completes.

        Raises:
            CheckpointError: its shape is not the announced one, or it does not fit its dtype.
        """
        info = self.infos[name]
        if tuple(tensor.shape) != info.shape:
            raise CheckpointError(
                f"tensor {name!r}: the plan gives shape {tuple(tensor.shape)} where "
                f"{info.shape} is stored; it belongs to another checkpoint"
            )
        # A copy of its own: a view would keep alive whatever it looks into.
        stored = tensor.to(info.dtype, copy=True, memory_format=torch.contiguous_format)
        if info.dtype.is_floating_point and not torch.isfinite(stored.double()).all():
            raise CheckpointError(
                f"tensor {name!r}: the result does not fit {info.dtype}; convert the checkpoint to "
                "a wider dtype first"
            )
        self.held[name] = stored
        file = self.file_of[name]
        self.pending[file].discard(name)
        if not self.pending[file]:
            self._write(file)

    def finish(self) -> None:
        """Write the shards that waited for nothing, and the index if there are several.

        Raises:
            CheckpointError: an awaited tensor never came.
        """
        for file, missing in self.pending.items():
            if missing:
                raise CheckpointError(f"the plan never wrote the tensor {min(missing)!r}")
            if file not in self.done:
                self._write(file)
        if len(self.shards) > 1:
            index = {"metadata": {"total_size": self.total_size}, "weight_map": self.file_of}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.directory / INDEX_NAME).write_text(text, encoding="utf-8")

    def _write(self, file: str) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        names = self.shards[file]
        tensors = {n: self.held.pop(n) if n in self.held else self.fill(n) for n in names}
        metadata = {alias: name for alias, name in self.aliases.items() if name in tensors}
        metadata["format"] = "pt"
        if self.marker is not None:
            metadata[MARKER] = self.marker
        try:
            save_file(_storable(tensors), self.directory / file, metadata=metadata)
        except SafetensorError as error:  # how it reports a full disk
            raise OSError(first_line(error)) from error
        # safetensors writes for the owner alone; the directory was made with the user's umask.
        (self.directory / file).chmod(self.directory.stat().st_mode & 0o666)
        self.done.add(file)
        if self.progress is not None:
            self.progress(sum(self.infos[name].nbytes for name in names))


def _split(
    infos: Mapping[str, TensorInfo], max_shard_size: int | str
) -> tuple[dict[str, list[str]], int]:
    """Names per file, and the bytes of all."""
    from huggingface_hub import split_torch_state_dict_into_shards

    if not infos:
        raise CheckpointError("there are no tensors to write")
    try:
        split = split_torch_state_dict_into_shards(
            {name: info.meta() for name, info in infos.items()},
            filename_pattern=WEIGHTS_PATTERN,
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise NormswapError(
            f"{max_shard_size!r} is no shard size; write it like 500MB or 5GB"
        ) from error
    return split.filename_to_tensors, int(split.metadata["total_size"])


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, each contiguous on the CPU and sharing memory with no other one.

    That is what safetensors asks for; tensors that are one and the same are aliases already.
    """
    seen: set[int] = set()
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        memory = plain.untyped_storage().data_ptr()
        partial = plain.untyped_storage().nbytes() != plain.nbytes
        result[name] = plain.clone() if memory in seen or partial else plain
        seen.add(memory)
    return result


def guard_for(plans: Iterable[Plan], *, config_unties: bool = False) -> str | None:
    """The name of the tensor that is stored in a wrong shape, as a guard.

    It makes every load into the original architecture raise, also those that only warn of missing
    and unexpected names (`from_pretrained`, `strict=False`). First choice is a vector that the
    original architecture has and the changed one has not; it is stored empty. Where both have the
    same tensors, one of a changed module is stored with an axis of size 1 in front. None if the
    original architecture computes the same from the same tensors. ``config_unties``: a separated
    table is noted in the configuration, which the original architecture reads.
    """
    plans = list(plans)
    for plan in plans:
        read = {name for edit in plan.edits for name in edit.sources}
        for name in plan.removed:
            if name in read:
                return name
    for plan in plans:
        for edit in plan.module_edits:
            if edit.kind in ("add_bias", "bias_node"):
                return str(edit.params["weight"])
            if edit.kind == "untie" and not config_unties:
                return str(edit.params["name"])
        if any(edit.kind in _ADDED for edit in plan.module_edits):
            return next(r.target for r in plan.mapping if r.op != "dropped" and r.sources)
        plain = all(r.op == "copy" and r.sources == (r.target,) for r in plan.mapping)
        if plain and all(site.status == "exact" for site in plan.sites):
            continue
        for edit in plan.module_edits:
            for name in edit.params.get("parameters", ()) if edit.kind == "replace" else ():
                return f"{edit.module}.{name}" if edit.module else name
    return None


# Edits that add something which no name of a tensor shows.
_ADDED = ("centre", "add_norm", "second_stream", "unit_stream")


def guarded(guard: str, infos: dict[str, TensorInfo]) -> None:
    """Give the guard its wrong shape in ``infos``."""
    known = infos.get(guard)
    infos[guard] = GUARD if known is None else TensorInfo((1, *known.shape), known.dtype)


GUARD = TensorInfo((0,), torch.float32)


@dataclass(frozen=True)
class _Target:
    """A tensor that the plan writes: where it is stored, and the other names it has there."""

    stored: str
    info: TensorInfo
    aliases: tuple[str, ...]


def apply_plan(
    plan: Plan,
    src: str | Path,
    dst: str | Path,
    *,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    architecture: Mapping[str, Any] | None = None,
    complete: Callable[[Path], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Carry the plan out on the tensors of ``src`` and write them and the plan to ``dst``.

    Args:
        plan: made on the model that ``src`` holds the weights of.
        src: any checkpoint that :func:`normswap.tensorstore.open_store` reads.
        dst: a directory that does not exist yet (unless ``overwrite``).
        max_shard_size: bytes, or a text such as ``"5GB"``; bounds the memory needed as well.
        overwrite: replace ``dst`` if it is a model directory.
        architecture: what to note in `normswap.json` for :func:`normswap.load`.
        complete: called with the directory before it is renamed to ``dst``, to add files.
        progress: called with the bytes of each shard written.

    Raises:
        CheckpointError: ``src`` is damaged, holds NaN or infinity, lacks a tensor that the plan
            edits, or ``dst`` cannot be written. Nothing is left behind.
    """
    with staged_directory(dst, overwrite=overwrite) as stage:
        store = open_store(src)
        if store.marker:
            raise CheckpointError(
                f"{src}: was written by normswap ({store.marker.get('rewrites')}), so the plan "
                "was not made for it; apply the plan to the original"
            )
        config_unties = (architecture or {}).get("kind") == "transformers"
        guard = guard_for([plan], config_unties=config_unties)
        manifest = Manifest((plan,), architecture, guard=guard)
        _stream(plan, store, stage, manifest, max_shard_size, progress)
        manifest.write(stage)
        if complete is not None:
            complete(stage)


def _stream(
    plan: Plan,
    store: TensorStore,
    stage: Path,
    manifest: Manifest,
    max_shard_size: int | str,
    progress: Callable[[int], None] | None,
) -> None:
    from normswap.program import run_edits

    targets = _targets(plan, store)
    stored_at = {target.stored: target for target in targets.values()}
    infos, aliases = _layout(plan, store, targets)
    empty_guard = manifest.guard not in infos
    if manifest.guard is not None:
        guarded(manifest.guard, infos)

    def fill(name: str) -> Tensor:
        if name != manifest.guard:
            return store.read(name)
        return torch.zeros(0) if empty_guard else store.read(name)[None]

    writer = ShardWriter(
        stage,
        infos,
        fill,
        awaited=stored_at,
        aliases=aliases,
        marker=manifest.marker(),
        max_shard_size=max_shard_size,
        progress=progress,
    )

    def read(name: str) -> Tensor:
        return _read_agreeing(plan, store, name)

    def write(name: str, tensor: Tensor) -> None:
        if name in targets:
            stored = targets[name].stored
            writer.put(stored, tensor[None] if stored == manifest.guard else tensor)

    try:
        run_edits(plan.edits, read, write)
    except (RuntimeError, KeyError, ValueError, TypeError, IndexError) as error:
        raise CheckpointError(
            f"{store.path}: the plan does not fit this checkpoint: {first_line(error)}"
        ) from error
    writer.finish()


def _names_in(plan: Plan, store: TensorStore, name: str) -> list[str]:
    """The names that a tensor of the model has in the checkpoint, its own first."""
    every = dict.fromkeys((name, *plan.aliases.get(name, ())))
    return [n for n in every if n in store]


def _resolve(plan: Plan, store: TensorStore, name: str) -> str:
    names = _names_in(plan, store, name)
    if not names and name in plan.created:  # made by the plan itself, like another
        return _resolve(plan, store, plan.created[name]["like"])
    if not names:
        raise CheckpointError(
            f"{store.path}: there is no tensor {name!r}, which the plan needs; was the plan made "
            "for another checkpoint?"
        )
    return names[0]


def _read_agreeing(plan: Plan, store: TensorStore, name: str) -> Tensor:
    """The tensor; if the file stores one tied tensor several times, the copies must agree."""
    tensor = store.read(_resolve(plan, store, name))
    for other in _names_in(plan, store, name)[1:]:
        if other not in store.aliases and not torch.equal(store.read(other), tensor):
            raise CheckpointError(
                f"{store.path}: {name!r} and {other!r} are one tensor in the model but differ in "
                "the checkpoint"
            )
    return tensor


def _targets(plan: Plan, store: TensorStore) -> dict[str, _Target]:
    """What the plan writes, by the names that its edits use, in the order in which it does."""
    last_use: dict[str, int] = {}
    for number, edit in enumerate(plan.edits):
        last_use |= dict.fromkeys((edit.target, *edit.sources), number)
    assigned = {edit.target for edit in plan.edits if not edit.target.startswith("%")}
    result: dict[str, _Target] = {}
    for name in sorted(assigned - set(plan.removed), key=last_use.__getitem__):
        names = _names_in(plan, store, name)
        if names:
            result[name] = _Target(names[0], store.infos[names[0]], tuple(names[1:]))
        elif name in plan.created:
            made = plan.created[name]
            like = store.infos[_resolve(plan, store, made["like"])]
            info = TensorInfo(tuple(made["shape"]), like.dtype)
            others = tuple(n for n in plan.aliases.get(name, ()) if n != name)
            result[name] = _Target(name, info, others)
        else:
            _resolve(plan, store, name)
    return result


def _layout(
    plan: Plan, store: TensorStore, targets: Mapping[str, _Target]
) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Shape and dtype of each tensor of the result in the order to write them, and the aliases.

    The tensors that the plan writes take their slots in the order in which it finishes them, so
    that a shard is complete soon after it is begun.
    """
    edited = {target.stored: target for target in targets.values()}
    aliases = {alias: t.stored for t in edited.values() for alias in t.aliases}
    gone = set(plan.removed)
    created_at = Counter(_resolve(plan, store, made["like"]) for made in plan.created.values())
    untouched: dict[str, TensorInfo] = {}
    slots: list[str | None] = []
    for name, info in store.infos.items():
        first = store.aliases.get(name)
        slots += [None] * created_at[name]
        if name in gone or name in aliases:
            continue
        if name in edited:
            slots.append(None)
        elif first in untouched:
            aliases[name] = first
        else:
            untouched[name] = info
            slots.append(name)
    slots += [None] * (len(edited) - slots.count(None))
    order = iter(edited)
    result: dict[str, TensorInfo] = {}
    for slot in slots:
        name = next(order) if slot is None else slot
        result[name] = edited[name].info if slot is None else untouched[name]
    return result, aliases
