"""Rows of a table that differ only in counted-up integers, collapsed: ``layers.{0..31}.norm1``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Collapsed", "collapse_names"]

_INTEGER = re.compile(r"\d+")
_SHORTEST_RUN = 3


@dataclass(frozen=True)
class Collapsed:
    """Rows of the input that became one: the ``columns`` to show and the ``rows``' indices."""

    columns: tuple[str, ...]
    rows: tuple[int, ...]

    @property
    def count(self) -> int:
        """How many rows it stands for."""
        return len(self.rows)


@dataclass(frozen=True)
class _Row:
    """A row as its texts without their integers, the integers, and where it came from."""

    template: tuple[tuple[str, ...], ...]
    integers: tuple[int, ...]
    index: int

    @property
    def in_name(self) -> int:
        """How many of the integers stand in the first column."""
        return len(self.template[0]) - 1


def collapse_names(rows: Sequence[Sequence[str]]) -> list[Collapsed]:
    """Collapse rows whose first column, a name, differs only in integers.

    A collapsed row stands for exactly the product of the sets that it shows, never for more.
    Integers in the other columns must be the same in all rows or follow one of the name at a
    fixed distance: ``layer1.{0..2}.bn1 -> folded into layer1.{0..2}.conv1``.
    """
    alike: dict[tuple[tuple[str, ...], ...], list[_Row]] = {}
    for index, columns in enumerate(rows):
        row = _parse(columns, index)
        alike.setdefault(row.template, []).append(row)
    collapsed = [item for group in alike.values() for item in _collapse(group)]
    return sorted(collapsed, key=lambda item: item.rows[0])


def _parse(columns: Sequence[str], index: int) -> _Row:
    template: list[tuple[str, ...]] = []
    integers: list[int] = []
    for text in columns:
        parts, start = [], 0
        for match in _INTEGER.finditer(text):
            if match.group() == str(int(match.group())):  # 01 is no number but a spelling
                parts.append(text[start : match.start()])
                integers.append(int(match.group()))
                start = match.end()
        template.append((*parts, text[start:]))
    return _Row(tuple(template), tuple(integers), index)


def _collapse(group: list[_Row]) -> Iterator[Collapsed]:
    """Collapse rows with the same template."""
    links = _links(group)
    loose = next((p for p, link in enumerate(links) if link == p and p >= group[0].in_name), None)
    if loose is None:
        yield from _products(group, links)
        return
    # An integer of another column follows the name in parts of the group only: take them apart.
    parts: dict[int, list[_Row]] = {}
    partner = _partner(group[0], loose)
    for row in group:
        distance = row.integers[loose] - (row.integers[partner] if partner is not None else 0)
        parts.setdefault(distance, []).append(row)
    for part in parts.values():
        yield from _collapse(part)


def _partner(row: _Row, position: int) -> int | None:
    """The integer of the name that the one at ``position`` most likely follows."""
    if row.in_name == 0:
        return None
    start = 0
    for parts in row.template:
        if position < start + len(parts) - 1:
            return min(position - start, row.in_name - 1)
        start += len(parts) - 1
    return None


def _links(group: list[_Row]) -> list[int | None]:
    """For each integer: ``None`` if it never changes, the one it follows, or its own position."""
    columns = list(zip(*(row.integers for row in group), strict=True))
    in_name = group[0].in_name
    links: list[int | None] = []
    for position, values in enumerate(columns):
        # Not within a name: `a{0,1}.b{0,1}` would look like four names.
        leaders = [p for p in range(in_name) if position >= in_name and links[p] == p]
        followed = (p for p in leaders if _keeps_distance(values, columns[p]))
        links.append(None if len(set(values)) == 1 else next(followed, position))
    return links


def _keeps_distance(values: Sequence[int], others: Sequence[int]) -> bool:
    return len({v - w for v, w in zip(values, others, strict=True)}) == 1


def _products(group: list[_Row], links: list[int | None]) -> Iterator[Collapsed]:
    """Merge rows along one integer after the other until nothing merges."""
    free = [position for position, link in enumerate(links) if link == position]
    items = [([frozenset([row.integers[p]]) for p in free], [row]) for row in group]
    merged = -1
    while merged != len(items):
        merged = len(items)
        for axis in reversed(range(len(free))):
            items = _merge_along(items, axis)
    for sets, rows in items:
        yield _show(rows, dict(zip(free, sets, strict=True)), links)


_Item = tuple[list[frozenset[int]], list[_Row]]


def _merge_along(items: list[_Item], axis: int) -> list[_Item]:
    merged: dict[tuple[frozenset[int], ...], _Item] = {}
    kept: list[_Item] = []
    for sets, rows in items:
        rest = (*sets[:axis], *sets[axis + 1 :])
        if rest not in merged:
            merged[rest] = (list(sets), list(rows))
        elif merged[rest][0][axis] & sets[axis]:
            kept.append((sets, rows))  # the same name twice
        else:
            merged[rest][0][axis] |= sets[axis]
            merged[rest][1].extend(rows)
    return [*merged.values(), *kept]


def _show(rows: list[_Row], sets: dict[int, frozenset[int]], links: list[int | None]) -> Collapsed:
    first = rows[0]
    texts: list[str] = []
    for value, link in zip(first.integers, links, strict=True):
        distance = 0 if link is None else value - first.integers[link]
        shown = {value} if link is None else {n + distance for n in sets[link]}
        texts.append(_format(sorted(shown)))
    numbers = iter(texts)
    columns = tuple(
        parts[0] + "".join(next(numbers) + part for part in parts[1:]) for parts in first.template
    )
    return Collapsed(columns, tuple(sorted(row.index for row in rows)))


def _format(values: list[int]) -> str:
    """``3``, ``{0..31}``, ``{0,2}``, ``{0..2,5}`` or, for steps, ``{1..46..3}``."""
    if len(values) == 1:
        return str(values[0])
    step = values[1] - values[0]
    if len(values) > _SHORTEST_RUN and values == list(range(values[0], values[-1] + 1, step)):
        by = f"..{step}" if step > 1 else ""
        return f"{{{values[0]}..{values[-1]}{by}}}"
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    texts = [
        f"{run[0]}..{run[-1]}" if len(run) >= _SHORTEST_RUN else ",".join(map(str, run))
        for run in runs
    ]
    return "{" + ",".join(texts) + "}"
