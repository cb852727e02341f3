"""`ArchSpec`: which architecture weights belong to, how to build it, and how to tell it of a model.

A specification comes from the user (``--arch``, ``arch=``) or from the `config.json` of a
directory. What a file says only ever selects a class of transformers, timm or torchvision.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from normswap.errors import CheckpointError, NormswapError, RefusedError
from normswap.plan import Plan, fingerprint
from normswap.tensorstore import first_line, read_json

# Attributes of a model that are no part of what it computes.
_NO_CONFIGURATION = ("training", "name_or_path")
_FORMS = "timm:NAME, torchvision:NAME or package.module:callable"


@dataclass(frozen=True)
class ArchSpec:
    """An architecture: ``kind`` and ``name``, and the keywords to build it with.

    Attributes:
        kind: ``"timm"``, ``"torchvision"``, ``"python"`` (a callable of the user's), or
            ``"transformers"`` (``name`` is the class, the rest is in `config.json`).
        name: what stands behind the colon, or the class.
        kwargs: keywords of the builder.
    """

    kind: str
    name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def parse(cls, text: str, kwargs: Mapping[str, Any] | None = None) -> ArchSpec:
        """Read ``timm:NAME``, ``torchvision:NAME`` or ``package.module:callable``.

        Raises:
            NormswapError: it is none of these.
        """
        kind, colon, name = text.partition(":")
        if not colon or not kind or not name:
            raise NormswapError(f"architecture {text!r} is not understood; write {_FORMS}")
        if kind in ("timm", "torchvision"):
            return cls(kind, name, dict(kwargs or {}))
        return cls("python", text, dict(kwargs or {}))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ArchSpec:
        """The inverse of :meth:`to_dict`."""
        return cls(str(data.get("kind")), str(data["name"]), dict(data.get("kwargs", {})))

    @classmethod
    def of_directory(cls, directory: Path) -> ArchSpec | None:
        """What the `config.json` of a directory names, or None if there is none.

        Raises:
            CheckpointError: it is damaged or names nothing that can be built.
        """
        path = directory / "config.json"
        if not path.is_file():
            return None
        config = read_json(path)
        if isinstance(config.get("architecture"), str):  # as timm writes it
            kwargs = dict(config.get("model_args") or {})
            if "num_classes" in config:
                kwargs.setdefault("num_classes", config["num_classes"])
            return cls("timm", config["architecture"], kwargs)
        names = config.get("architectures")
        if isinstance(names, list) and names:
            return cls("transformers", str(cast("list[Any]", names)[0]))
        raise CheckpointError(
            f'{path}: names no architecture; add "architectures": ["ClassName"] to it, or '
            f"pass an architecture (--arch): {_FORMS}"
        )

    def __str__(self) -> str:
        return self.name if self.kind == "python" else f"{self.kind}:{self.name}"

    def to_dict(self) -> dict[str, Any]:
        """The specification as JSON data.

        Raises:
            NormswapError: a keyword is no JSON value.
        """
        data = {"kind": self.kind, "name": self.name, "kwargs": dict(self.kwargs)}
        try:
            return json.loads(json.dumps(data))
        except (TypeError, ValueError) as error:
            raise NormswapError(f"{self}: its keywords cannot be written as JSON") from error

    def build(self, directory: Path | None = None) -> nn.Module:
        """Build the model with fresh weights, in eval mode; nothing is downloaded.

        Args:
            directory: where the `config.json` of a ``"transformers"`` architecture is.

        Raises:
            NormswapError: there is no such architecture, or its builder fails.
        """
        builders = {
            "timm": _build_timm,
            "torchvision": _build_torchvision,
            "python": _build_python,
        }
        # Initialisation draws random numbers that nobody will see; the user's state stays.
        with torch.random.fork_rng(devices=[]):
            if self.kind == "transformers":
                model = _build_transformers(self, directory)
            elif self.kind in builders:
                model = builders[self.kind](self)
            else:
                raise NormswapError(f"architectures of kind {self.kind!r} are not known")
        return model.eval()


def _build_timm(spec: ArchSpec) -> nn.Module:
    timm = _import("timm", "pip install 'normswap[timm]'")
    if ":" in spec.name or "/" in spec.name or not timm.is_model(spec.name):
        raise NormswapError(f"timm knows no model {spec.name!r}{_near(spec.name, timm)}")
    _refuse_weights(spec)
    return _call(spec, timm.create_model, spec.name, pretrained=False)


def _build_torchvision(spec: ArchSpec) -> nn.Module:
    models = _import("torchvision", "pip install torchvision").models
    if spec.name not in models.list_models():
        raise NormswapError(f"torchvision knows no model {spec.name!r}{_near(spec.name, models)}")
    _refuse_weights(spec)
    builder = models.get_model_builder(spec.name)
    # Detection and segmentation builders fetch a trained backbone unless told not to.
    names = inspect.signature(builder).parameters
    without = {name: None for name in ("weights", "weights_backbone") if name in names}
    return _call(spec, builder, **without)


def _refuse_weights(spec: ArchSpec) -> None:
    """Keywords that would make a builder fetch or unpickle weights, which a file might ask for."""
    for name in spec.kwargs:
        if name.startswith(("pretrained", "weights", "checkpoint")):
            raise NormswapError(
                f"{spec}: the keyword {name!r} is not allowed; the weights come from the checkpoint"
            )


def _build_python(spec: ArchSpec) -> nn.Module:
    module_name, _, path = spec.name.partition(":")
    target: Any = _import(module_name, "is it on PYTHONPATH?")
    for part in path.split("."):
        if not hasattr(target, part):
            raise NormswapError(f"architecture {spec}: {module_name} has no {path}")
        target = getattr(target, part)
    if not callable(target):
        raise NormswapError(f"architecture {spec}: {path} is not callable")
    return _call(spec, target)


def _build_transformers(spec: ArchSpec, directory: Path | None) -> nn.Module:
    if directory is None:
        raise NormswapError(f"{spec} needs the directory that holds its config.json")
    cls = transformers_class(spec, directory)
    return _call(spec, cls, read_config(directory))


def transformers_class(spec: ArchSpec, directory: Path) -> Any:
    """The model class of transformers that the specification names.

    Raises:
        CheckpointError: transformers has none of this name.
        RefusedError: the weights are quantised.
    """
    transformers = _import("transformers", "pip install transformers")
    cls = getattr(transformers, spec.name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise CheckpointError(
            f"{directory}: transformers {transformers.__version__} has no model class "
            f"{spec.name!r}, and code in a directory is never run; install what defines it and "
            "pass --arch package.module:callable"
        )
    if read_json(directory / "config.json").get("quantization_config"):
        raise RefusedError(
            f"{directory}: the weights are quantised; start from the original weights"
        )
    return cls


def read_config(directory: Path) -> Any:
    """The transformers config of a directory.

    Raises:
        CheckpointError: transformers cannot read it.
    """
    transformers = _import("transformers", "pip install transformers")
    try:
        return transformers.AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(
            f"{directory / 'config.json'}: transformers cannot read it: {first_line(error)}"
        ) from error


@contextmanager
def quiet_transformers() -> Generator[None]:
    """Without progress bars and load reports: what they say is checked and raised instead."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def is_transformers_model(model: nn.Module) -> bool:
    """Whether the model's class is one that transformers itself defines."""
    module = type(model).__module__
    if module.partition(".")[0] != "transformers":
        return False
    found = getattr(sys.modules.get("transformers"), type(model).__name__, None)
    return found is type(model) and hasattr(model, "config")


def build_with(builder: Callable[[], nn.Module]) -> nn.Module:
    """Call a builder of the caller's.

    Raises:
        NormswapError: it fails or gives something else than a module.
    """
    with torch.random.fork_rng(devices=[]):
        return _call(ArchSpec("python", getattr(builder, "__name__", "arch")), builder).eval()


def recognise(model: nn.Module, plans: Sequence[Plan]) -> ArchSpec | None:
    """The architecture that the plans turned into ``model``, or None if it cannot be told.

    A candidate counts only if, built anew and changed by the plans, it has the same modules with
    the same configuration: equal names and shapes are not enough, a stride has no tensor.
    """
    for spec in _candidates(model):
        built = _built_empty(spec, model)
        if built is not None and _turns_into(built, model, plans):
            return spec
    return None


def _candidates(model: nn.Module) -> Iterator[ArchSpec]:
    package = type(model).__module__.partition(".")[0]
    if is_transformers_model(model):
        yield ArchSpec("transformers", type(model).__name__)
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if package == "timm" and isinstance(config, Mapping):
        name = cast("Mapping[str, Any]", config).get("architecture")
        if isinstance(name, str):
            yield from (ArchSpec("timm", name, kwargs) for kwargs in _timm_kwargs(model))
    if package == "torchvision":
        yield from _torchvision_candidates(model)


def _timm_kwargs(model: nn.Module) -> Iterator[dict[str, Any]]:
    yield {}
    classes = {"num_classes": getattr(model, "num_classes", None)}
    yield classes
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            yield {**classes, "in_chans": module.in_channels}
            return


def _torchvision_candidates(model: nn.Module) -> Iterator[ArchSpec]:
    """A torchvision model does not know its name: all builders beside its class."""
    models = importlib.import_module("torchvision").models
    outputs = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    for name in models.list_models():
        if models.get_model_builder(name).__module__ == type(model).__module__:
            yield ArchSpec("torchvision", name)
            # Of the last layers one gives a number per class, another boxes perhaps.
            for classes in dict.fromkeys(outputs[-2:]):
                yield ArchSpec("torchvision", name, {"num_classes": classes})


def _built_empty(spec: ArchSpec, model: nn.Module) -> nn.Module | None:
    """A model of the architecture whose values do not matter, or None if it cannot be built."""
    for device in ("meta", "cpu"):  # some constructors compute with the values of tensors
        try:
            with torch.device(device):
                if spec.kind == "transformers":
                    builder: Any = type(model)
                    return builder(copy.deepcopy(cast("Any", model).config)).eval()
                return spec.build()
        except Exception:
            continue
    return None


def _turns_into(built: nn.Module, model: nn.Module, plans: Sequence[Plan]) -> bool:
    from normswap.apply import restructure

    for plan in plans:
        if fingerprint(built) != plan.fingerprint:
            return False
        built = restructure(built, plan)
    return configuration(built) == configuration(model)


def configuration(model: nn.Module) -> list[object]:
    """What the modules are, and their plain attributes: strides, eps, rates, flags."""
    return [
        (name, type(module), module.extra_repr(), _plain_attributes(module))
        for name, module in model.named_modules(remove_duplicate=False)
    ]


def _plain_attributes(module: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _NO_CONFIGURATION and _is_plain(value)
    }


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in cast("Iterable[object]", value))
    return value is None or isinstance(value, bool | int | float | str)


def _import(name: str, advice: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # an import runs a module of the user's, which may do anything
        raise NormswapError(f"cannot import {name}: {first_line(error)}; {advice}") from error


def _call(spec: ArchSpec, builder: Any, *args: Any, **kwargs: Any) -> nn.Module:
    try:
        model = builder(*args, **{**spec.kwargs, **kwargs})
    except NormswapError:
        raise
    except Exception as error:
        given = f" with {dict(spec.kwargs)}" if spec.kwargs else ""
        raise NormswapError(
            f"building {spec}{given} failed: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(model, nn.Module):
        raise NormswapError(f"architecture {spec} gave a {type(model).__name__}, not an nn.Module")
    return model


def _near(name: str, package: Any) -> str:
    near = difflib.get_close_matches(name, package.list_models(), n=3)
    return f"; near to it: {', '.join(near)}" if near else ""
