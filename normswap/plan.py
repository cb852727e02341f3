"""`Plan`: what a rewrite decided, as data that can be applied to a model or to files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import Tensor, fx, nn

from normswap.errors import NormswapError
from normswap.program import Edit

PLAN_VERSION = 1


@dataclass(frozen=True)
class ModuleEdit:
    """One change of structure: ``kind`` is a key of :data:`normswap.edits.MODULE_EDITS`."""

    kind: str
    module: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class SiteOutcome:
    """The answer that one norm got.

    ``status`` is ``"exact"``, ``"approximate"``, ``"initialised"`` or ``"refused"``; a refused
    site carries a ``reason`` code and a sentence in ``detail``.
    """

    name: str
    kind: str
    action: str
    status: str
    reason: str | None = None
    detail: str = ""
    error: float | None = None
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class MappingRow:
    """Where one tensor of the result comes from.

    ``constant`` is what a new tensor is filled with.
    """

    target: str
    sources: tuple[str, ...]
    op: str
    status: str
    constant: float | None = None


@dataclass(frozen=True)
class Replaced:
    """An old module, and the tensors that its successor had at first."""

    module: nn.Module
    tensors: Mapping[str, Tensor]


@dataclass
class Plan:
    """An ordered list of weight edits and module edits, with the answer for every norm.

    A plan is made on one model and applies to any model with the same fingerprint (the names,
    shapes of its tensors and the classes of its modules): to a fresh instance, to one on the meta
    device (structure only), or to a checkpoint on disk.

    ``builders`` make what JSON cannot describe (modules from code of the caller's).
    ``previous`` holds the norms that a swap replaced in this session, for undoing it.
    ``removed`` and ``created`` are the state-dict names that go and come; ``comparable`` names
    the changed modules whose output is still what it was, for a check at each site.
    """

    rewrite: str
    fingerprint: str
    edits: list[Edit] = field(default_factory=list[Edit])
    module_edits: list[ModuleEdit] = field(default_factory=list[ModuleEdit])
    sites: list[SiteOutcome] = field(default_factory=list[SiteOutcome])
    mapping: list[MappingRow] = field(default_factory=list[MappingRow])
    removed: list[str] = field(default_factory=list[str])
    created: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    comparable: list[str] = field(default_factory=list[str])
    aliases: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    notes: list[str] = field(default_factory=list[str])
    builders: dict[str, Callable[[], nn.Module]] = field(
        default_factory=dict[str, Callable[[], nn.Module]], compare=False, repr=False
    )
    previous: dict[str, Replaced] = field(
        default_factory=dict[str, "Replaced"], compare=False, repr=False
    )
    version: int = PLAN_VERSION

    def to_json(self) -> str:
        """The plan as a JSON text; :meth:`from_json` gives back an equal plan.

        Raises:
            NormswapError: a new module is built by code of the caller's, which JSON cannot hold.
        """
        if self.builders:
            raise NormswapError(
                f"this plan cannot be saved: {next(iter(self.builders))!r} is built by a callable "
                "or a class of yours; use classes of torch.nn or normswap.norms"
            )
        live = ("builders", "previous")
        data = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in live}
        rows = ("edits", "module_edits", "sites", "mapping")
        return json.dumps({**data, **{k: [asdict(r) for r in data[k]] for k in rows}}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read a plan written by :meth:`to_json`.

        Raises:
            NormswapError: the text is no plan, or is of a version this release does not know.
        """
        try:
            data: dict[str, Any] = json.loads(text)
            version = data["version"]
            if version != PLAN_VERSION:
                raise NormswapError(
                    f"plan version {version!r} is not known to this release (it knows "
                    f"{PLAN_VERSION}): make the plan again, or use the release that wrote it"
                )
            data["edits"] = [_tupled(Edit, e, "sources") for e in data["edits"]]
            data["module_edits"] = [ModuleEdit(**e) for e in data["module_edits"]]
            data["sites"] = [_tupled(SiteOutcome, s, "names") for s in data["sites"]]
            data["mapping"] = [_tupled(MappingRow, m, "sources") for m in data["mapping"]]
            return cls(**data)
        except (ValueError, KeyError, TypeError) as error:
            raise NormswapError(f"not a normswap plan: {error!r}; make the plan again") from error

    def apply(self, model: nn.Module, *, inplace: bool = False) -> nn.Module:
        """Carry the plan out on ``model`` (a copy of it unless ``inplace``).

        Raises:
            NormswapError: the model is not the one that the plan was made for.
        """
        from normswap.apply import apply_plan

        return apply_plan(self, model, inplace=inplace)

    def apply_to_checkpoint(self, src: str | Path, dst: str | Path) -> None:
        """Carry the weight edits out on the tensors of ``src`` and write them to ``dst``.

        Raises:
            CheckpointError: ``src`` is damaged or lacks a tensor, or ``dst`` exists.
        """
        from normswap.checkpoint import apply_plan

        apply_plan(self, src, dst)

    @property
    def changed(self) -> bool:
        """Whether the plan does anything."""
        return bool(self.edits or self.module_edits)

    def with_errors(self, errors: Mapping[str, float]) -> Plan:
        """A copy whose sites carry the measured differences ``errors`` (by site name)."""
        sites = [replace(s, error=errors.get(s.name, s.error)) for s in self.sites]
        return replace(self, sites=sites)


def fingerprint(model: nn.Module) -> str:
    """A digest of the model's tensor names and shapes and of its modules' class names.

    Values, dtypes and devices do not enter: a plan made on the meta device or in float32 holds
    for the same architecture elsewhere.
    """
    rows = [f"{n}:{tuple(t.shape)}" for n, t in model.named_parameters(remove_duplicate=False)]
    rows += [f"{n}:{tuple(t.shape)}" for n, t in model.named_buffers(remove_duplicate=False)]
    rows += [f"{n}={_class_name(m)}" for n, m in model.named_modules(remove_duplicate=False)]
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


def _class_name(module: nn.Module) -> str:
    # Each GraphModule has a class of its own, whose name a copy does not keep.
    return "GraphModule" if isinstance(module, fx.GraphModule) else type(module).__name__


def _tupled(cls: Any, data: dict[str, Any], key: str) -> Any:
    return cls(**{**data, key: tuple(data[key])})
