"""`Report`: what a rewrite did to every norm, as data, text, JSON, Markdown and HTML."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, cast

from torch import nn

from normswap import placement_report, rendering
from normswap.collapse import collapse_names
from normswap.cost import Cost
from normswap.errors import NormswapError
from normswap.placement_report import Placement
from normswap.plan import MappingRow, Plan, SiteOutcome
from normswap.rendering import Document, Section, Table, short_number
from normswap.structure import ResidualStructure, Stack, Sublayer
from normswap.verification import Run, Verification

__all__ = ["Report", "collapse_names"]

REPORT_VERSION = 1

_NOUNS = {
    "batch": "BatchNorm",
    "frozen_batch": "BatchNorm",
    "layer": "LayerNorm",
    "rms": "RMSNorm",
    "group": "GroupNorm",
    "instance": "InstanceNorm",
}
_VERBS = {
    "fold_batchnorm": "folded",
    "fold_affine": "folded",
    "swap_norms": "swapped",
    "to_rmsnorm": "converted",
    "convert_placement": "moved",
}


@dataclass(frozen=True)
class Report:
    """The outcome of one rewrite on one model.

    Attributes:
        rewrite: what was done, such as ``"fold_batchnorm"``.
        model: the class name of the model.
        sites: the answer for every norm.
        mapping: where each tensor that was edited or made comes from.
        verification: how the changed model was compared to the original; ``None`` if it was not.
        notes: anything else to know.
        plan: the plan, to be applied again.
        cost: parameters, operations and time before and after; ``None`` if not measured.
        placement: where norms stood before and after; ``None`` unless they were moved.
    """

    rewrite: str
    model: str
    sites: tuple[SiteOutcome, ...]
    mapping: tuple[MappingRow, ...] = ()
    verification: Verification | None = None
    notes: tuple[str, ...] = ()
    plan: Plan | None = None
    cost: Cost | None = None
    placement: Placement | None = None

    @property
    def counts(self) -> dict[str, int]:
        """How many norms have each status; statuses that no norm has are left out."""
        return dict(Counter(site.status for site in self.sites))

    @property
    def reasons(self) -> dict[str, int]:
        """How many norms were refused for each reason code."""
        return dict(Counter(site.reason for site in self.sites if site.reason is not None))

    # -- data -------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain data that :meth:`from_dict` reads; numbers that JSON lacks are texts."""
        plan = json.loads(self.plan.to_json()) if self.plan is not None else None
        return {
            "version": REPORT_VERSION,
            "rewrite": self.rewrite,
            "model": self.model,
            "counts": self.counts,
            "reasons": self.reasons,
            "sites": [_jsonable(asdict(site)) for site in self.sites],
            "mapping": [_jsonable(asdict(row)) for row in self.mapping],
            "verification": _jsonable(asdict(self.verification)) if self.verification else None,
            "notes": list(self.notes),
            "cost": asdict(self.cost) if self.cost else None,
            "placement": _jsonable(asdict(self.placement)) if self.placement else None,
            "plan": plan,
        }

    def to_json(self) -> str:
        """:meth:`to_dict` as a JSON text; :meth:`from_json` gives back an equal report."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """The report that :meth:`to_dict` described.

        Raises:
            NormswapError: the data is no report, or is of a version this release does not know.
        """
        try:
            version = data["version"]
            if version != REPORT_VERSION:
                raise NormswapError(
                    f"report version {version!r} is not known to this release (it knows "
                    f"{REPORT_VERSION}): use the release that wrote it"
                )
            plan, cost = data["plan"], data.get("cost")
            return cls(
                rewrite=data["rewrite"],
                model=data["model"],
                sites=tuple(_built(SiteOutcome, site) for site in data["sites"]),
                mapping=tuple(_built(MappingRow, row) for row in data["mapping"]),
                verification=_verification(data["verification"]),
                notes=tuple(data["notes"]),
                plan=Plan.from_json(json.dumps(plan)) if plan is not None else None,
                cost=_built(Cost, cost) if cost is not None else None,
                placement=_placement(data.get("placement")),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise NormswapError(f"not a normswap report: {error!r}") from error

    @classmethod
    def from_json(cls, text: str) -> Report:
        """Read a report written by :meth:`to_json`.

        Raises:
            NormswapError: see :meth:`from_dict`.
        """
        try:
            data = json.loads(text)
        except ValueError as error:
            raise NormswapError(f"not a normswap report: {error}") from error
        return cls.from_dict(data)

    # -- for people -------------------------------------------------------------------------------

    def summary(self) -> str:
        """One line: how many norms, which statuses, and whether the models were compared."""
        return " · ".join(self._parts())

    def to_text(self, width: int | None = None) -> str:
        """A plain text of at most ``width`` columns (the terminal's if ``None``)."""
        width = width or min(max(shutil.get_terminal_size((100, 24)).columns, 60), 140)
        return rendering.to_text(self._document(short=True), width)

    def to_markdown(self) -> str:
        """The whole report in Markdown, with the weight mapping."""
        return rendering.to_markdown(self._document(short=False))

    def to_html(self) -> str:
        """The whole report as a page of its own."""
        return rendering.to_html_page(self._document(short=False))

    def undo(self, model: nn.Module) -> nn.Module:
        """Put the old norms back into ``model`` (in place), which a swap of this session made.

        Raises:
            NormswapError: the report was read from a file, or ``model`` is another one.
        """
        from normswap.undo import undo

        if self.plan is None:
            raise NormswapError("the report has no plan, so nothing can be undone")
        return undo(self.plan, model)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        return rendering.to_html(self._document(short=False))

    def _parts(self) -> tuple[str, ...]:
        done, refused = self._what_was_done(), self._what_was_refused()
        moved = self.placement.change if self.placement is not None else ""
        return tuple(part for part in (moved, *done, refused, _check(self.verification)) if part)

    def _what_was_done(self) -> tuple[str, str]:
        done = [site for site in self.sites if site.status != "refused"]
        noun = _noun(self.sites)
        if not self.sites:
            return "no norms found", ""
        nouns = f"{noun}{'s' * (len(self.sites) != 1)}"
        counted = f"{len(done)} of {len(self.sites)} {nouns} {_VERBS.get(self.rewrite, 'changed')}"
        if self.placement is not None and done:
            actions = Counter(site.action.partition(" ")[0].strip(",") for site in done)
            listed = ", ".join(f"{count} {action}" for action, count in actions.items())
            counted = f"{len(self.sites)} {nouns}: {listed}"
        statuses = Counter(site.status for site in done)
        if len(statuses) == 1:
            return counted, next(iter(statuses))
        listed = ", ".join(f"{count} {status}" for status, count in statuses.items())
        return counted, listed

    def _what_was_refused(self) -> str:
        if not self.reasons:
            return ""
        listed = ", ".join(
            reason if len(self.reasons) == 1 else f"{count} {reason}"
            for reason, count in Counter(self.reasons).most_common()
        )
        return f"{sum(self.reasons.values())} refused ({listed})"

    def _document(self, *, short: bool) -> Document:
        sections = [self._changed(), self._refused(), _runs(self.verification, only_odd=short)]
        if self.placement is not None:
            sections.insert(0, placement_report.structure(self.placement))
            sections.append(placement_report.drift(self.placement, short=short))
            sections.append(placement_report.evaluation(self.placement))
        sections.append(_costs(self.cost))
        if not short:
            sections.append(self._weights())
        sections.append(Section("Notes", paragraphs=self.notes))
        done = {site.status for site in self.sites} - {"refused"}
        if self.placement is not None and done:
            sections.append(placement_report.advice(self.placement, exact=done == {"exact"}))
        return Document(
            title=f"{self.rewrite}: {self.model}",
            summary=self._parts(),
            good=self.verification.passed if self.verification is not None else None,
            sections=tuple(section for section in sections if section.table or section.paragraphs),
        )

    def _changed(self) -> Section:
        done = [site for site in self.sites if site.status != "refused"]
        rows: list[tuple[str, ...]] = []
        for item in collapse_names([(s.name, s.action, s.status) for s in done]):
            name, action, status = item.columns
            errors = [e for index in item.rows if (e := done[index].error) is not None]
            worst = short_number(max(errors)) if errors else ""
            rows.append((name, str(item.count), action, status, worst))
        return Section("Changed", _table(("norm", "n", "action", "status", "error"), rows))

    def _refused(self) -> Section:
        refused = [site for site in self.sites if site.status == "refused"]
        rows = [
            (item.columns[0], str(item.count), item.columns[1], item.columns[2])
            for item in collapse_names([(s.name, s.reason or "", s.detail) for s in refused])
        ]
        return Section("Refused", _table(("norm", "n", "reason", "detail"), rows))

    def _weights(self) -> Section:
        # Only rows with the same constant: collapsed rows would not show whose it is.
        alike: dict[float | None, list[MappingRow]] = {}
        for row in self.mapping:
            alike.setdefault(row.constant, []).append(row)
        rows: list[tuple[str, ...]] = []
        for constant, group in alike.items():
            shown = f"{constant:.6g}" if constant is not None else ""
            texts = [(row.target, row.op, ", ".join(row.sources), row.status) for row in group]
            rows += [(*item.columns[:3], shown, item.columns[3]) for item in collapse_names(texts)]
        header = ("tensor", "operation", "made from", "constant", "status")
        return Section("Weights", _table(header, rows))


def _noun(sites: tuple[SiteOutcome, ...]) -> str:
    nouns = {_NOUNS.get(site.kind, "norm") for site in sites}
    return nouns.pop() if len(nouns) == 1 else "norm"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table | None:
    """A table without the columns that are empty in every row."""
    return Table(header, tuple(rows)).without_empty()


def _check(check: Verification | None) -> str:
    """The verification in a few words."""
    if check is None:
        return "not verified"
    if check.level == "none":
        reasons = [run.skipped for run in check.runs if run.skipped]
        return "not verified" + (f" ({reasons[0]})" if reasons else "")
    failed = next((run for run in check.runs if not (run.passed or run.skipped)), None)
    if not check.passed or failed is not None:
        return "VERIFICATION FAILED: " + (_verdict(failed) if failed else "the outputs differ")
    done = [run for run in check.runs if not run.skipped]
    worst: dict[str, float] = {}
    for run in done:
        worst[run.dtype] = max(worst.get(run.dtype, 0.0), run.max_rel)
    numbers = ", ".join(f"{dtype} {short_number(error)}" for dtype, error in worst.items())
    if check.level == "site" and math.isinf(check.tolerance):
        return f"each site checked alone: up to {numbers or short_number(check.max_rel)}"
    if check.level == "site":
        return f"verified site by site: {numbers or short_number(check.max_rel)}"
    count = len({run.inputs for run in done})
    if math.isinf(check.tolerance):
        return f"outputs differ on {count} input shape{'s' * (count != 1)}: {numbers}"
    return f"verified on {count} input shape{'s' * (count != 1)}: {numbers}"


def _short_verdict(run: Run) -> str:
    if run.skipped:
        return "skipped"
    if not run.passed:
        return "DIFFERS"
    return "measured" if math.isinf(run.tolerance) and run.max_rel else "equal"


def _verdict(run: Run) -> str:
    if run.skipped:
        return f"skipped: {run.skipped}"
    if run.passed:
        return "equal" + (f"; {run.detail}" if run.detail else "")
    if math.isinf(run.max_rel):
        return f"{run.dtype} on {run.inputs}: {run.detail}"
    numbers = f"{short_number(run.max_rel)}, tolerance {short_number(run.tolerance)}"
    return f"{run.dtype} on {run.inputs}: {run.detail} by {numbers}"


def _runs(check: Verification | None, *, only_odd: bool) -> Section:
    runs = check.runs if check is not None else ()
    if only_odd:
        runs = tuple(run for run in runs if not run.passed or run.detail)
    rows = [
        (
            run.inputs,
            run.dtype,
            short_number(run.max_rel) if math.isfinite(run.max_rel) else "",
            short_number(run.tolerance) if run.tolerance and math.isfinite(run.tolerance) else "",
            _short_verdict(run),
            run.skipped or run.detail,
        )
        for run in runs
    ]
    header = ("inputs", "dtype", "difference", "tolerance", "verdict", "detail")
    return Section("Verification", _table(header, rows))


def _costs(cost: Cost | None) -> Section:
    """Before, after and their ratio."""
    if cost is None:
        return Section("Cost")
    pairs: list[tuple[str, tuple[float, float], str]] = [
        ("parameters", cost.parameters, "{:,}"),
        ("operations of norms", cost.norm_operations, "{:,}"),
        ("operations in all", cost.operations, "{:,}"),
        ("milliseconds a call", (cost.seconds[0] * 1e3, cost.seconds[1] * 1e3), "{:.3g}"),
    ]
    rows = [
        (what, form.format(a), form.format(b), f"{b / a:.3f}" if a else "")
        for what, (a, b), form in pairs
    ]
    return Section("Cost", _table(("one call", "before", "after", "ratio"), rows))


# -- reading JSON ---------------------------------------------------------------------------------


def _jsonable(value: Any) -> Any:
    """Infinities and NaN, which JSON lacks, as texts that `float` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _jsonable(item) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in cast("list[Any]", value)]
    return value


def _built(cls: Callable[..., Any], data: Mapping[str, Any]) -> Any:
    """A dataclass from its fields, with lists and numbers back in the types they had."""
    known = {field.name: str(field.type) for field in fields(cast("Any", cls))}
    values: dict[str, Any] = {}
    for name, value in data.items():
        if known[name].startswith("float") and value is not None:
            values[name] = float(value)
        else:
            values[name] = tuple(cast("list[Any]", value)) if "tuple" in known[name] else value
    return cls(**values)


def _verification(data: Mapping[str, Any] | None) -> Verification | None:
    if data is None:
        return None
    runs = tuple(_built(Run, run) for run in data["runs"])
    errors = {name: float(error) for name, error in data["site_errors"].items()}
    return _built(Verification, {**data, "runs": runs, "site_errors": errors})


def _placement(data: Mapping[str, Any] | None) -> Placement | None:
    if data is None:
        return None
    measured = data["evaluation"]
    return Placement(
        _structure(data["before"]),
        _structure(data["after"]),
        data["skip"],
        tuple((name, float(value)) for name, value in data["layer_drift"]),
        (float(measured[0]), float(measured[1])) if measured is not None else None,
        data["target"],
    )


def _structure(data: Mapping[str, Any]) -> ResidualStructure:
    return ResidualStructure(
        tuple(
            _built(Stack, {**stack, "sublayers": [_built(Sublayer, s) for s in stack["sublayers"]]})
            for stack in data["stacks"]
        )
    )
