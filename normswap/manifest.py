"""`Manifest`: what `normswap.json` says of a directory, so that it can be loaded again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from normswap.errors import CheckpointError, NormswapError
from normswap.plan import Plan
from normswap.tensorstore import first_line, read_json

MANIFEST_NAME = "normswap.json"
MANIFEST_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The plans that were carried out, in order, and on which architecture.

    Attributes:
        plans: each applies to the model that the one before it left.
        architecture: ``{"kind", "name", "kwargs"}`` of the architecture before the first plan,
            or None if it could not be told from the model.
        model_class: its class, for people.
        guard: the tensor that keeps the file from being loaded into that architecture.
    """

    plans: tuple[Plan, ...]
    architecture: Mapping[str, Any] | None = None
    model_class: str = ""
    guard: str | None = None

    def marker(self) -> str:
        """What is written into the metadata of the safetensors files."""
        rewrites = [plan.rewrite for plan in self.plans]
        return json.dumps({"version": MANIFEST_VERSION, "rewrites": rewrites, "guard": self.guard})

    def write(self, directory: Path) -> None:
        """Write `normswap.json` into the directory."""
        data = {
            "format": "normswap",
            "version": MANIFEST_VERSION,
            "rewrites": [plan.rewrite for plan in self.plans],
            "model_class": self.model_class,
            "architecture": None if self.architecture is None else dict(self.architecture),
            "guard": self.guard,
            "plans": [json.loads(plan.to_json()) for plan in self.plans],
        }
        (directory / MANIFEST_NAME).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read the `normswap.json` of a directory.

        Raises:
            CheckpointError: there is none, it is damaged, or a later release wrote it.
        """
        path = directory / MANIFEST_NAME
        if not path.is_file():
            raise CheckpointError(
                f"{directory}: has no {MANIFEST_NAME}, so it was not written by normswap.save"
            )
        data = read_json(path)
        if data.get("format") != "normswap" or data.get("version") != MANIFEST_VERSION:
            raise CheckpointError(
                f"{path}: format {data.get('format')!r} version {data.get('version')!r} is not "
                f"known to this release (it knows 'normswap' version {MANIFEST_VERSION})"
            )
        return cls(
            plans=_plans(path, data.get("plans")),
            architecture=_architecture(path, data.get("architecture")),
            model_class=str(data.get("model_class", "")),
            guard=data.get("guard"),
        )


def read_plan(path: str | Path) -> tuple[Plan, Manifest | None]:
    """The plan in a file: a plan, a report that holds one, or what :func:`normswap.save` wrote.

    Raises:
        CheckpointError: the file cannot be read or holds no plan.
    """
    path = Path(path)
    if path.is_dir():
        path = path / MANIFEST_NAME
    data = read_json(path)
    if data.get("format") == "normswap":
        manifest = Manifest.read(path.parent) if path.name == MANIFEST_NAME else None
        plans = manifest.plans if manifest else _plans(path, data.get("plans"))
        if len(plans) != 1:
            raise CheckpointError(
                f"{path}: holds {len(plans)} plans, each made for what the one before it left; "
                "give one plan a file and apply them in turn"
            )
        return plans[0], manifest
    return _plan(path, data.get("plan", data)), None


def _plans(path: Path, data: Any) -> tuple[Plan, ...]:
    if not isinstance(data, list) or not data:
        raise CheckpointError(f"{path}: holds no plan")
    return tuple(_plan(path, item) for item in cast("list[Any]", data))


def _plan(path: Path, data: Any) -> Plan:
    try:
        return Plan.from_json(json.dumps(data))
    except NormswapError as error:
        raise CheckpointError(f"{path}: {first_line(error)}") from error


def _architecture(path: Path, data: Any) -> Mapping[str, Any] | None:
    if data is None:
        return None
    fields = cast("Mapping[str, Any]", data) if isinstance(data, Mapping) else {}
    if not isinstance(fields.get("name"), str) or not isinstance(fields.get("kwargs", {}), Mapping):
        raise CheckpointError(f"{path}: the architecture in it is damaged")
    return fields
