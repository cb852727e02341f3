"""Models from and to directories: load what others wrote, save what normswap made, load it again.

A directory written here holds the weights (`model.safetensors`, or shards with an index), the
plans with the architecture that they start from (`normswap.json`), the report, and for a
transformers model its config, tokenizer and processor files. The weights fit only the changed
architecture; a guard tensor makes every other load raise (:func:`normswap.checkpoint.guard_for`).
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from normswap import architecture, checkpoint
from normswap.architecture import ArchSpec
from normswap.checkpoint import (
    DEFAULT_SHARD_SIZE,
    ShardWriter,
    guard_for,
    guarded,
    staged_directory,
)
from normswap.errors import CheckpointError, NormswapError, VerificationError
from normswap.manifest import MANIFEST_NAME, Manifest, read_plan
from normswap.plain import check_plain, save_plain
from normswap.plan import Plan, fingerprint
from normswap.tensorstore import (
    TensorInfo,
    TensorStore,
    first_line,
    open_store,
    read_json,
    require_finite,
    storage_key,
)

if TYPE_CHECKING:
    from normswap.report import Report

__all__ = ["Origin", "apply_to_directory", "load", "load_model", "save", "save_with_exports"]

# Files beside the weights that a transformers directory may need: tokenizer, processor, licence.
_CARRIED = (".json", ".txt", ".model", ".jinja", ".tiktoken")
_CARRIED_NAMES = ("LICENSE", "LICENCE", "NOTICE", "COPYING")
_REWRITTEN = (MANIFEST_NAME, "config.json", "report.json", "README.md")
_Arch: TypeAlias = str | ArchSpec | nn.Module | Callable[[], nn.Module]
_ORIGIN = "_normswap_origin"


@dataclass(frozen=True)
class Origin:
    """Where a model came from, kept on it so that :func:`save` can note it.

    Attributes:
        source: the file or directory.
        arch: the architecture before any plan, or None if the caller built it.
        plans: what normswap has done to it already.
        notes: what loading passed over.
    """

    source: Path
    arch: ArchSpec | None
    plans: tuple[Plan, ...] = ()
    notes: tuple[str, ...] = ()


def load_model(
    src: str | Path,
    arch: str | None = None,
    arch_kwargs: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, Origin]:
    """Build an architecture and load a checkpoint into it, strictly, in eval mode.

    Args:
        src: a directory or file (:func:`normswap.tensorstore.open_store`), or what :func:`save`
            wrote.
        arch: ``timm:NAME``, ``torchvision:NAME`` or ``package.module:callable``; not needed for
            a directory whose `config.json` or `normswap.json` says it.
        arch_kwargs: keywords for the architecture's builder.
        dtype: convert floating-point tensors to it; None keeps the stored dtypes.

    Raises:
        NormswapError: the architecture is unknown or cannot be built.
        CheckpointError: the checkpoint is damaged, holds NaN or infinity, or does not fit.
    """
    path = Path(src)
    if (path / MANIFEST_NAME).is_file():
        model = load(path, None if arch is None else ArchSpec.parse(arch, arch_kwargs))
        origin = cast("Origin", getattr(model, _ORIGIN))
    else:
        model, origin = _load_original(path, arch, arch_kwargs)
        setattr(model, _ORIGIN, origin)
    return (model if dtype is None else model.to(dtype)), origin


def load(
    directory: str | Path, arch: str | ArchSpec | nn.Module | Callable[[], nn.Module] | None = None
) -> nn.Module:
    """Load what :func:`save` wrote: the original architecture, changed as its plans say.

    Args:
        directory: the directory.
        arch: the original architecture: a text as for ``--arch``, a callable that builds it, or
            an instance (which is not changed). Needed if it is not one of transformers, timm or
            torchvision: what a file says never decides which other code runs.

    Returns:
        The model in eval mode on the CPU, in the stored dtypes.

    Raises:
        CheckpointError: the directory is damaged or was not written by normswap, or the
            architecture is not the one that was changed.
        NormswapError: ``arch`` is needed, or cannot be built.
    """
    from normswap.apply import restructure

    path = Path(directory)
    manifest = Manifest.read(path)
    store = open_store(path)
    model, spec = _original(path, manifest, arch)
    for plan in manifest.plans:
        if fingerprint(model) != plan.fingerprint:
            raise CheckpointError(
                f"{path}: {plan.rewrite} was made for another model than "
                f"{spec or type(model).__name__} ({manifest.model_class or 'unknown'}): names, "
                "shapes or module classes differ; pass arch= and its keywords as they were then"
            )
        model = restructure(model, plan)
    _fill(model, store, str(spec or type(model).__name__))
    setattr(model, _ORIGIN, Origin(path, spec, manifest.plans))
    return model.eval()


def save(
    model: nn.Module,
    directory: str | Path,
    report: Report,
    *,
    overwrite: bool = False,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    arch: str | ArchSpec | None = None,
    arch_kwargs: Mapping[str, Any] | None = None,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write a changed model to a directory that :func:`load` reads.

    Args:
        model: what a rewrite returned.
        directory: where to; it appears complete or not at all.
        report: what the same rewrite returned.
        overwrite: replace a model directory that is there already.
        max_shard_size: bytes, or a text such as ``"5GB"``.
        arch: the original architecture, as for ``--arch``; None tells it from the model where
            that is possible (transformers, most of timm and torchvision).
        arch_kwargs: keywords for its builder.
        complete: called with the directory before it appears, to add files.

    Raises:
        CheckpointError: the directory exists or cannot be written, or a tensor holds NaN or
            infinity.
        NormswapError: the report holds no plan or belongs to another model.
    """
    if report.plan is None and report.placement is not None:
        _save_plain(model, directory, report, overwrite, max_shard_size, complete)
        return
    if report.plan is None:
        raise NormswapError("the report holds no plan, so the directory could not be loaded again")
    inner = _unwrap(model)
    origin = cast("Origin | None", getattr(inner, _ORIGIN, None))
    plans = (*(origin.plans if origin else ()), report.plan)
    tensors, aliases = _tensors(inner, report.plan)
    spec = _spec(inner, plans, arch, arch_kwargs, origin)
    manifest = Manifest(
        plans,
        None if spec is None else spec.to_dict(),
        f"{type(inner).__module__}.{type(inner).__qualname__}",
        guard_for(plans, config_unties=architecture.is_transformers_model(inner)),
    )
    with staged_directory(directory, overwrite=overwrite) as stage:
        _write_weights(stage, tensors, aliases, manifest, max_shard_size)
        manifest.write(stage)
        (stage / "report.json").write_text(report.to_json() + "\n", encoding="utf-8")
        (stage / "report.md").write_text(report.to_markdown() + "\n", encoding="utf-8")
        source = _source_directory(inner, origin)
        if architecture.is_transformers_model(inner):
            _write_config(inner, stage, manifest)
        if source is not None:
            carry_files(source, stage)
        (stage / "README.md").write_text(_card(report, manifest, source), encoding="utf-8")
        if complete is not None:
            complete(stage)


def _save_plain(
    model: nn.Module,
    directory: str | Path,
    report: Report,
    overwrite: bool,
    max_shard_size: int | str,
    complete: Callable[[Path], None] | None,
) -> None:
    """A model whose class is the result; its tokenizer and licence files come along."""
    source = _source_directory(model, getattr(model, _ORIGIN, None))

    def carry(stage: Path) -> None:
        if source is not None:
            carry_files(source, stage)
        if complete is not None:
            complete(stage)

    save_plain(
        model,
        directory,
        report,
        overwrite=overwrite,
        max_shard_size=max_shard_size,
        complete=carry,
    )


def save_with_exports(
    model: nn.Module,
    directory: str | Path,
    report: Report,
    *,
    exports: Sequence[Path] = (),
    example_inputs: Any = None,
    check: bool = True,
    overwrite: bool = False,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
) -> None:
    """:func:`save`, with ONNX and `torch.export` files, all of it or nothing.

    Args:
        model: what a rewrite made of a model that :func:`load_model` loaded.
        directory: where to.
        report: what the same rewrite returned.
        exports: files to export to: a bare name lies in the directory, anything else is a path.
        example_inputs: what to export with; None builds them from what the model says of itself.
        check: load the directory again before it appears, and compare.
        overwrite: replace what is there already.
        max_shard_size: bytes, or a text such as ``"5GB"``.

    Raises:
        CheckpointError: as :func:`save`, or an exported file cannot be written.
        CaptureError: the model cannot be exported.
        VerificationError: what was written does not load as what was saved.
    """
    from normswap import export

    with export.outside_files(exports) as outside:

        def complete(stage: Path) -> None:
            if check and report.plan is None:
                check_plain(stage, model)
            elif check:
                _check_reload(stage, model)
            for target in exports:
                path = outside.get(target, stage / target.name)
                export.export_model(model, example_inputs, path)

        save(
            model,
            directory,
            report,
            overwrite=overwrite,
            max_shard_size=max_shard_size,
            complete=complete,
        )


def apply_to_directory(
    plan_file: str | Path,
    src: str | Path,
    dst: str | Path,
    *,
    arch: str | None = None,
    arch_kwargs: Mapping[str, Any] | None = None,
    max_shard_size: int | str = DEFAULT_SHARD_SIZE,
    overwrite: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Plan:
    """Carry out a plan on files (:func:`normswap.checkpoint.apply_plan`) so that `load` reads them.

    Args:
        plan_file: a plan, a report that holds one, or a directory that :func:`save` wrote.
        src: the checkpoint that the plan was made for.
        dst: the directory to write.
        arch: the architecture of ``src``; None takes it from its `config.json` or from where the
            plan comes from.
        arch_kwargs: keywords for its builder.
        max_shard_size: bytes, or a text such as ``"5GB"``.
        overwrite: replace a model directory that is there already.
        progress: called with the bytes of each shard written.

    Returns:
        The plan.

    Raises:
        CheckpointError: the plan or ``src`` is damaged, they do not fit, or ``dst`` cannot be
            written.
    """
    plan, manifest = read_plan(plan_file)
    source = Path(src)
    spec = ArchSpec.of_directory(source) if arch is None else ArchSpec.parse(arch, arch_kwargs)
    noted = manifest.architecture if manifest is not None else None

    def complete(stage: Path) -> None:
        if not source.is_dir():
            return
        if (source / "config.json").is_file():
            config = read_json(source / "config.json") | {"normswap": [plan.rewrite]}
            if any(edit.kind == "untie" for edit in plan.module_edits):
                _note_untied(config)
            text = json.dumps(config, indent=2, sort_keys=True) + "\n"
            (stage / "config.json").write_text(text, encoding="utf-8")
        carry_files(source, stage)

    checkpoint.apply_plan(
        plan,
        source,
        dst,
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        architecture=noted if spec is None else spec.to_dict(),
        complete=complete,
        progress=progress,
    )
    return plan


def _note_untied(config: dict[str, Any]) -> None:
    """Say in a configuration, and in that of its text model, that tables are not tied."""
    config["tie_word_embeddings"] = False
    for part in config.values():
        if isinstance(part, dict) and "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = False


# Loading


def _load_original(
    path: Path, arch: str | None, arch_kwargs: Mapping[str, Any] | None
) -> tuple[nn.Module, Origin]:
    spec = None if arch is None else ArchSpec.parse(arch, arch_kwargs)
    if spec is None and path.is_dir():
        spec = ArchSpec.of_directory(path)
    store = open_store(path)
    if store.marker:
        raise CheckpointError(
            f"{path}: was written by normswap ({', '.join(store.marker.get('rewrites', ()))}) and "
            f"fits no unchanged architecture; load the directory with its {MANIFEST_NAME}"
        )
    if spec is None:
        raise NormswapError(
            f"{path}: does not say which architecture it is of; pass --arch timm:NAME, "
            "torchvision:NAME or package.module:callable"
        )
    if spec.kind == "transformers":
        model, notes = _from_pretrained(path, spec, store)
    else:
        model, notes = spec.build(), ()
        _fill(model, store, str(spec))
    return model, Origin(path, spec, notes=notes)


def _from_pretrained(
    path: Path, spec: ArchSpec, store: TensorStore
) -> tuple[nn.Module, tuple[str, ...]]:
    """The library's own loading, for its renames of old keys, with what it only warns of raised."""
    cls = architecture.transformers_class(spec, path)
    try:
        with architecture.quiet_transformers():
            model, info = cls.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:
        raise CheckpointError(
            f"{path}: transformers cannot load it as {spec.name}: {first_line(error)}"
        ) from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(_misfit(path, str(spec), missing, ()))
    for name in store:
        store.read(name)  # raises for NaN and infinity
    unexpected = sorted(info["unexpected_keys"])
    if not unexpected:
        return model.eval(), ()
    return model.eval(), (f"{spec.name} does not use {_listed(unexpected)} of {path}",)


def _original(
    path: Path,
    manifest: Manifest,
    arch: str | ArchSpec | nn.Module | Callable[[], nn.Module] | None,
) -> tuple[nn.Module, ArchSpec | None]:
    """A fresh model of the architecture before the first plan."""
    noted = None if manifest.architecture is None else ArchSpec.from_dict(manifest.architecture)
    if isinstance(arch, nn.Module):
        return copy.deepcopy(arch).eval(), noted
    if isinstance(arch, str):
        arch = ArchSpec.parse(arch)
    if isinstance(arch, ArchSpec):
        if noted is not None and str(noted) == str(arch) and not arch.kwargs:
            arch = noted  # the same one: its keywords are only data
        return arch.build(path), arch
    if arch is not None:
        return architecture.build_with(arch), noted
    if noted is None or noted.kind == "python":
        name = f"{noted} with {dict(noted.kwargs)}" if noted else manifest.model_class
        raise NormswapError(
            f"{path}: is of the architecture {name}, whose code a file may not choose to run; pass "
            "arch= (--arch package.module:callable, or in Python also a callable or a model)"
        )
    return noted.build(path), noted


def _fill(model: nn.Module, store: TensorStore, arch: str) -> None:
    """Load all tensors, in their stored dtypes, and tie again what was stored as tied."""
    own = dict(model.state_dict(keep_vars=True))
    for name, tensor in own.items():
        if name in store and tensor.is_floating_point():
            tensor.data = tensor.data.to(store.infos[name].dtype)
    try:
        result = model.load_state_dict(store.read_all(), strict=False)
    except RuntimeError as error:
        shapes = {name: tuple(own[name].shape) for name in own if name in store}
        misshapen = [name for name, shape in shapes.items() if store.infos[name].shape != shape]
        if not misshapen:
            raise CheckpointError(f"{store.path}: {arch}: {first_line(error)}") from error
        missing = [name for name in own if name not in store]
        unexpected = [name for name in store if name not in own]
        message = _misfit(store.path, arch, missing, unexpected, misshapen)
        raise CheckpointError(message) from error
    # A tied tensor that is there under one of its names is not missing.
    present = {id(tensor) for name, tensor in own.items() if name in store}
    missing = [name for name in result.missing_keys if id(own.get(name)) not in present]
    if missing or result.unexpected_keys:
        raise CheckpointError(_misfit(store.path, arch, missing, result.unexpected_keys))
    for alias, name in store.aliases.items():
        _tie(model, alias, name)


def _tie(model: nn.Module, alias: str, name: str) -> None:
    owner, _, leaf = alias.rpartition(".")
    module = model.get_submodule(owner)
    first = model.get_submodule(name.rpartition(".")[0])
    for slots in ("_parameters", "_buffers"):
        tensor = getattr(first, slots).get(name.rpartition(".")[2])
        if tensor is not None and leaf in getattr(module, slots):
            getattr(module, slots)[leaf] = tensor


def _misfit(
    path: Path,
    arch: str,
    missing: Sequence[str],
    unexpected: Sequence[str],
    misshapen: Sequence[str] = (),
) -> str:
    faults = {"missing": missing, "unexpected": unexpected, "of another shape": misshapen}
    parts = [f"{_listed(names)} {fault}" for fault, names in faults.items() if names]
    return (
        f"{path}: does not fit {arch}: {', '.join(parts)}; is the architecture (--arch, "
        "--arch-kwargs) the right one?"
    )


def _listed(names: Sequence[str], at_most: int = 3) -> str:
    more = ", …" if len(names) > at_most else ""
    plural = "" if len(names) == 1 else "s"
    return f"{len(names)} tensor{plural} ({', '.join(names[:at_most])}{more})"


# Saving


def _check_reload(stage: Path, model: nn.Module) -> None:
    """Load what was written and compare bit by bit; equal parts compute equal outputs."""
    origin = cast("Origin | None", getattr(model, _ORIGIN, None))
    again = load(stage, None if origin is None else origin.arch)
    before, after = model.state_dict(), again.state_dict()
    differing = list(before.keys() ^ after.keys())
    differing += [n for n, t in before.items() if n in after and not torch.equal(t, after[n])]
    if differing or architecture.configuration(again) != architecture.configuration(model):
        raise VerificationError(
            f"what was written does not load as what was saved ({_listed(sorted(differing))}); "
            "nothing was kept. This is a fault in normswap: please report it with the model"
        )


def _unwrap(model: nn.Module) -> nn.Module:
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        model = cast("nn.Module", model.module)
    return cast("nn.Module", getattr(model, "_orig_mod", model))


def _tensors(model: nn.Module, plan: Plan) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict without aliases, and the aliases by name."""
    state: dict[str, Any] = model.state_dict()
    wrong = [name for name in plan.removed if name in state]
    wrong += [name for name in plan.created if name not in state]
    if wrong:
        raise NormswapError(
            f"the report is not of this model: its plan disagrees about {_listed(wrong)}; pass the "
            "model and the report that one call returned"
        )
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    names: dict[object, str] = {}
    for name, value in state.items():
        if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
            raise NormswapError(f"{name!r} is no plain tensor, and cannot be stored as safetensors")
        if value.is_meta:
            raise NormswapError(f"{name!r} is on the meta device and has no values to save")
        first = names.setdefault(storage_key(value) or name, name)
        if first != name:
            aliases[name] = first
        else:
            require_finite(name, value, type(model).__name__)
            tensors[name] = value
    return tensors, aliases


def _write_weights(
    stage: Path,
    tensors: Mapping[str, Tensor],
    aliases: Mapping[str, str],
    manifest: Manifest,
    max_shard_size: int | str,
) -> None:
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if manifest.guard is not None:
        guarded(manifest.guard, infos)

    def read(name: str) -> Tensor:
        if name != manifest.guard:
            return tensors[name]
        return tensors[name][None] if name in tensors else torch.zeros(0)

    ShardWriter(
        stage,
        infos,
        read,
        aliases=aliases,
        marker=manifest.marker(),
        max_shard_size=max_shard_size,
    ).finish()


def _spec(
    model: nn.Module,
    plans: Sequence[Plan],
    arch: str | ArchSpec | None,
    arch_kwargs: Mapping[str, Any] | None,
    origin: Origin | None,
) -> ArchSpec | None:
    """The architecture as the caller or the origin says, else as the model itself tells."""
    if isinstance(arch, str):
        return ArchSpec.parse(arch, arch_kwargs)
    if arch is not None:
        return arch if arch_kwargs is None else replace(arch, kwargs=dict(arch_kwargs))
    if origin is not None and origin.arch is not None:
        return origin.arch
    return architecture.recognise(model, plans)


def _source_directory(model: nn.Module, origin: Origin | None) -> Path | None:
    if origin is not None:
        return origin.source if origin.source.is_dir() else None
    if not architecture.is_transformers_model(model):
        return None
    name = getattr(model, "name_or_path", "")
    return Path(name) if name and Path(name).is_dir() else None


def _write_config(model: nn.Module, stage: Path, manifest: Manifest) -> None:
    config = copy.deepcopy(cast("Any", model).config)
    config.architectures = [type(model).__name__]
    config.dtype = str(cast("Any", model).dtype).removeprefix("torch.")
    config.normswap = [plan.rewrite for plan in manifest.plans]
    config.save_pretrained(stage)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.save_pretrained(stage)


def carry_files(source: Path, stage: Path) -> None:
    """Copy tokenizer, processor and licence files that are not there yet."""
    for path in sorted(source.iterdir()):
        known = path.suffix in _CARRIED or path.stem.upper() in _CARRIED_NAMES
        written = path.name in _REWRITTEN or (stage / path.name).exists()
        if known and path.is_file() and not written and not path.name.endswith(".index.json"):
            shutil.copyfile(path, stage / path.name)


def _card(report: Report, manifest: Manifest, source: Path | None) -> str:
    """A model card: what this is, how it was checked, how to load it."""
    from huggingface_hub import ModelCardData

    spec = manifest.architecture
    python_only = spec is None or spec.get("kind") == "python"
    arch = ', arch="package.module:callable"' if python_only else ""
    base = f" from `{source.name}`" if source is not None else ""
    counts = ", ".join(f"{n} norms {status}" for status, n in report.counts.items())
    data = ModelCardData(tags=["normswap"], library_name="normswap")
    return f"""---
{data.to_yaml()}
---
# {report.model}, {report.rewrite}

Made{base} by normswap: {counts or "no norms found"}. What happened to every norm is in
[report.md](report.md); the plan that did it is in [{MANIFEST_NAME}]({MANIFEST_NAME}).

{_checked(report)}

```python
import normswap

model = normswap.load("path/to/this/directory"{arch})
```

{_fit(manifest)}
"""


def _fit(manifest: Manifest) -> str:
    if manifest.guard is None:
        return "The unchanged architecture loads it too, and computes the same."
    return "The weights do not fit the unchanged architecture; loading them into it raises."


def _checked(report: Report) -> str:
    check = report.verification
    if check is None:
        return "The outputs were not compared with the original's."
    return (
        f"Compared with the original ({check.level} outputs, {check.dtype}): largest relative "
        f"difference {check.max_rel:.2g}, tolerance {check.tolerance:.2g}."
    )
