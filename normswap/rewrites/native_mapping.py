"""Where each tensor of a native pre- or post-norm model comes from.

Norms of the stacks go by their role, everything else by its name, or else by the order of use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from normswap.capture import Capture
from normswap.dataflow import op_name
from normswap.errors import RefusedError
from normswap.find import GraphSite
from normswap.forms import StoredTensor
from normswap.graphs import final_readers
from normswap.plan import MappingRow
from normswap.residual_graph import Chain
from normswap.rewrites.native_targets import Target

_FORCED = (
    "the native form normalises the embeddings, although the model's own norm of them now stands "
    "in front of the first sublayer"
)
_MISSING = "no norm of the model has this place, so it normalises what was not normalised before"


@dataclass(eq=False)
class TensorMapping:
    """Where each tensor of the target comes from."""

    model: nn.Module
    target: Target
    old: Capture
    new: Capture
    rows: dict[str, MappingRow] = field(default_factory=dict[str, MappingRow])
    dropped: dict[str, MappingRow] = field(default_factory=dict[str, MappingRow])
    eps: dict[str, float] = field(default_factory=dict[str, float])  # by norm of the target
    notes: list[str] = field(default_factory=list[str])

    def rotate(self, source: Chain, target: Chain, to: str) -> None:
        """Give each norm of a stack the tensors of the norm whose place it takes."""
        count = len(source.residuals)
        here, there = _on_stream(source, "post" if to == "pre" else "pre"), _on_stream(target, to)
        front, last = source.embedding_norms, target.embedding_norms
        sources: list[GraphSite | None]
        targets: list[GraphSite | None]
        if to == "pre":
            sources = [front[-1] if front else None, *here, *source.final_norms]
            targets = [*there, *target.final_norms]
            self._take(last, front[:-1], "copy", forced=True)
        else:
            # A final norm that stays where it is leaves nothing for the last sublayer's norm.
            stays = len(target.final_norms) >= len(source.final_norms)
            sources = [*here, *([None] if stays else []), *source.final_norms]
            targets = [last[-1] if last else None, *there, *target.final_norms]
            self._take(last[:-1], front, "copy")
        self._take(targets[: count + 1], sources[: count + 1], "rotate")
        self._take(targets[count + 1 :], sources[count + 1 :], "copy")
        if to == "pre" and len(target.final_norms) > 1:
            names = " and ".join(repr(n.site.name) for n in target.final_norms)
            self.notes.append(
                f"{names} both stand behind the last sublayer: the model had a "
                "final norm already, and the last stream norm comes before it"
            )

    def _take(
        self,
        targets: Sequence[GraphSite | None],
        sources: Sequence[GraphSite | None],
        op: str,
        *,
        forced: bool = False,
    ) -> None:
        """Fill each target from the source beside it; ``forced``: there should be no target."""
        for target, source in zip_longest(targets, sources):
            if target is None and source is not None:
                self._drop_norm(source)
            elif target is not None:
                self._fill_norm(target, source, op)
                if source is None:
                    self.notes.append(
                        f"{target.site.name!r} is new, with scale 1 and shift 0: "
                        + (_FORCED if forced else _MISSING)
                    )

    def _fill_norm(self, target: GraphSite, source: GraphSite | None, op: str) -> None:
        name = target.site.name
        if source is not None and source.kind != target.kind:
            raise RefusedError(
                f"{source.site.name!r} is a norm of kind {source.kind!r}, and its place in the "
                f"native form, {name!r}, is of kind {target.kind!r}"
            )
        if source is not None and not math.isclose(source.eps, target.eps, rel_tol=1e-6):
            self._carry_eps(target, source)
        given = {} if source is None else source.tensors
        for leaf, tensor in target.tensors.items():
            if leaf in given:
                self._add(MappingRow(tensor.name, (given[leaf].name,), op, "exact"))
            else:
                offset = target.site.spec is not None and target.site.spec.unit_offset
                value = 1.0 if leaf == "weight" and not offset else 0.0
                self._add(MappingRow(tensor.name, (), "new", "initialised", value))
        for leaf in given.keys() - target.tensors.keys():
            raise RefusedError(f"{given[leaf].name!r} has no counterpart in {name!r}")

    def _carry_eps(self, target: GraphSite, source: GraphSite) -> None:
        if not self.target.copied:
            raise RefusedError(
                f"{source.site.name!r} has eps {source.eps:g}, and its place in the native form "
                f"has {target.eps:g}, which its config sets for all norms"
            )
        self.eps[target.site.name] = source.eps
        self.notes.append(
            f"{target.site.name!r} has eps {source.eps:g} now, as the norm that it "
            "was: set it where the model is built, too"
        )

    def _drop_norm(self, source: GraphSite) -> None:
        for tensor in source.tensors.values():
            self._drop(tensor.name)
        if not self._is_neutral(source):
            self.notes.append(
                f"{source.site.name!r} is dropped: the native form has no norm at its place"
            )

    def _is_neutral(self, site: GraphSite) -> bool:
        """Whether a norm has scale 1 and shift 0."""
        offset = site.site.spec is not None and site.site.spec.unit_offset
        for leaf, tensor in site.tensors.items():
            value = tensor_at(self.model, tensor.name)
            wanted = 1.0 if leaf == "weight" and not offset else 0.0
            if value.is_meta or not bool((value == wanted).all()):
                return False
        return True

    def _add(self, row: MappingRow) -> None:
        known = self.rows.setdefault(row.target, row)
        if known != row:
            raise RefusedError(
                f"{row.target!r} is shared by several places, which would take different tensors: "
                f"{[*known.sources, *row.sources]}"
            )

    def _drop(self, name: str) -> None:
        self.dropped[name] = MappingRow("", (name,), "dropped", "approximate")

    # -- what is no norm of a stack ---------------------------------------------------------------

    def copy_the_rest(self) -> None:
        """Pair all other tensors by their names, else by the order in which the runs use them.

        Raises:
            RefusedError: a tensor of one side is left over.
        """
        taken = {name for row in self.rows.values() for name in row.sources} | set(self.dropped)
        sources = {t.name: t for t in saved(self.old) if t.name not in taken}
        left: list[StoredTensor] = []
        names = self._source_names()
        for tensor in saved(self.new):
            if tensor.name in self.rows:
                continue
            found = {names[n] for n in map(self._short, tensor.names) if n in names} & set(sources)
            if len(found) > 1:
                raise RefusedError(f"{sorted(found)} are one tensor in the native form")
            if found:
                self._copy(tensor, sources[found.pop()])
            else:
                left.append(tensor)
        taken = {name for row in self.rows.values() for name in row.sources}
        self._copy_in_order(left, [t for n, t in sources.items() if n not in taken])

    def _source_names(self) -> dict[str, str]:
        """All names of the source's tensors without the prefix of a base model → canonical name."""
        prefix = _prefix(self.model)
        return {n.removeprefix(prefix): t.name for t in saved(self.old) for n in t.names}

    def _short(self, name: str) -> str:
        return name.removeprefix(_prefix(self.target.model))

    def _copy(self, target: StoredTensor, source: StoredTensor) -> None:
        rows = self.new_rows(target.name)
        shape = (source.shape[0] + rows, *source.shape[1:]) if source.shape else ()
        if shape != target.shape:
            raise RefusedError(
                f"{source.name!r} of shape {source.shape} does not fit {target.name!r} of the "
                f"native form, of shape {target.shape}"
            )
        self._add(MappingRow(target.name, (source.name,), "copy", "exact"))

    def new_rows(self, name: str) -> int:
        """How many rows a tensor of the target has in front of its source's."""
        return next((n for end, n in self.target.new_rows.items() if name.endswith(end)), 0)

    def _copy_in_order(self, targets: list[StoredTensor], sources: list[StoredTensor]) -> None:
        used = _by_use(sources, self.old)
        for key, group in _by_use(targets, self.new).items():
            if key is None:
                raise RefusedError(
                    f"where {group[0].name!r} of the native form comes from cannot be told, as the "
                    "recorded run does not use it: pass example_inputs that do"
                )
            partners = used.pop(key, [])
            if len(partners) != len(group):
                raise RefusedError(
                    f"{group[0].name!r} of the native form has no counterpart in the model"
                )
            for target, source in zip(group, partners, strict=True):
                self._copy(target, source)
        for key, tensors in used.items():
            if key is not None:
                raise RefusedError(f"{tensors[0].name!r} has no counterpart in the native form")
            for tensor in tensors:
                self._drop(tensor.name)
                self.notes.append(f"{tensor.name!r} is dropped: the recorded run does not use it")

    def ordered_rows(self) -> Iterator[MappingRow]:
        """A row a tensor in the order of the target's, then the dropped ones."""
        for tensor in saved(self.new):
            yield self.rows[tensor.name]
        kept = {name for row in self.rows.values() for name in row.sources}
        yield from (row for name, row in self.dropped.items() if name not in kept)


def _on_stream(chain: Chain, to: str) -> list[GraphSite]:
    """The norm of each sublayer, in order."""
    found: list[GraphSite] = []
    for residual in chain.residuals:
        [branch] = residual.branches
        norms = branch.input_norms if to == "pre" else residual.stream_norms
        if len(norms) != 1:
            raise RefusedError(
                f"a sublayer has {len(norms)} norms at one place "
                f"({', '.join(n.site.name for n in norms)}), where the native form has one"
            )
        found += norms
    return found


def saved(capture: Capture) -> list[StoredTensor]:
    """Parameters and the buffers of the state dict."""
    return [t for t in capture.tensors.values() if t.persistent]


def _prefix(model: nn.Module) -> str:
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and prefix in model._modules else ""


def _by_use(tensors: Iterable[StoredTensor], capture: Capture) -> dict[Any, list[StoredTensor]]:
    """Tensors in the order of their first use, those of a shape that one op reads together.

    Under ``None`` those that are not used.
    """
    order = {node: number for number, node in enumerate(capture.graph.nodes)}
    keyed: list[tuple[int, Any, StoredTensor]] = []
    for tensor in tensors:
        readers = [n for n in final_readers(tensor.node) if not n.meta.get("unread")]
        first = min(readers, key=order.__getitem__, default=None)
        key = None if first is None else (tensor.shape, op_name(first))
        keyed.append((-1 if first is None else order[first], key, tensor))
    groups: dict[Any, list[StoredTensor]] = {}
    for _, key, tensor in sorted(keyed, key=lambda item: item[0]):
        groups.setdefault(key, []).append(tensor)
    return groups


def tensor_at(model: nn.Module, name: str) -> Tensor:
    """A parameter or buffer by name."""
    owner, _, leaf = name.rpartition(".")
    return getattr(model.get_submodule(owner), leaf)
