"""A document of short tables as plain text, Markdown and HTML."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = [
    "Document",
    "Section",
    "Table",
    "short_number",
    "to_html",
    "to_html_page",
    "to_markdown",
    "to_text",
]


@dataclass(frozen=True)
class Table:
    """A header and rows of the same length; columns of numbers are set to the right."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def without_empty(self) -> Table | None:
        """Without columns that are empty in every row; ``None`` without rows."""
        if not self.rows:
            return None
        used = [i for i in range(len(self.header)) if any(row[i] for row in self.rows)]
        rows = tuple(tuple(row[i] for i in used) for row in self.rows)
        return Table(tuple(self.header[i] for i in used), rows)


@dataclass(frozen=True)
class Section:
    """A heading with a table or paragraphs below it; ``drawing``: SVG that only HTML shows."""

    title: str
    table: Table | None = None
    paragraphs: tuple[str, ...] = ()
    drawing: str = ""


@dataclass(frozen=True)
class Document:
    """What is rendered: ``summary`` is a line of parts, coloured by ``good`` in HTML."""

    title: str
    summary: tuple[str, ...]
    good: bool | None
    sections: tuple[Section, ...]


def short_number(value: float) -> str:
    """``3.1e-7``; a plain number where that is as short."""
    if value == 0 or math.isinf(value) or math.isnan(value):
        return f"{value:g}"
    digits, _, exponent = f"{value:.1e}".partition("e")
    return f"{digits}e{int(exponent)}" if abs(int(exponent)) > 1 else f"{value:.2g}"


_NUMERIC = re.compile(r"[-+]?(\d+(\.\d+)?(e[-+]?\d+)?|inf|nan)?")


def _is_numeric(table: Table, column: int) -> bool:
    return all(_NUMERIC.fullmatch(row[column]) for row in table.rows)


# -- plain text -----------------------------------------------------------------------------------

_GAP = 2
_LEAST = 12  # columns are not squeezed below this


def to_text(document: Document, width: int) -> str:
    """At most ``width`` columns; long cells are wrapped, a last column of prose goes below."""
    lines = [document.title, *_joined(document.summary, width)]
    for section in document.sections:
        lines += ["", section.title]
        if section.table is not None:
            lines += _text_table(section.table, width)
        for paragraph in section.paragraphs:
            first, *rest = _wrap(paragraph, width - 4)
            lines += [f"  - {first}", *(f"    {line}" for line in rest)]
    return "\n".join(line.rstrip() for line in lines)


def _joined(parts: Sequence[str], width: int) -> list[str]:
    """The parts on as few lines as they need, broken between parts where that is possible."""
    lines = [""]
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines[-1] else part
        if len(longer) <= width:
            lines[-1] = longer
        else:
            lines += _wrap(part, width)
    return lines


def _text_table(table: Table, width: int) -> Iterator[str]:
    below = len(table.header) - 1 if table.header[-1] == "detail" else None
    shown = [i for i in range(len(table.header)) if i != below]
    cells = [[row[i] for i in shown] for row in (table.header, *table.rows)]
    widths = _widths(cells, width - _GAP)
    right = [_is_numeric(table, i) for i in shown]
    for number, row in enumerate(cells):
        yield from _text_row(row, widths, right)
        if number == 0:
            yield " " * _GAP + "-" * (sum(widths) + _GAP * (len(widths) - 1))
        elif below is not None:
            for line in _wrap(table.rows[number - 1][below], width - 3 * _GAP):
                yield " " * 3 * _GAP + line


def _widths(cells: list[list[str]], available: int) -> list[int]:
    """The natural widths, the widest column made narrower until all fit."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    while sum(widths) + _GAP * (len(widths) - 1) > available and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    return widths


def _text_row(row: Sequence[str], widths: list[int], right: list[bool]) -> Iterator[str]:
    wrapped = [_wrap(cell, width) for cell, width in zip(row, widths, strict=True)]
    for number in range(max(map(len, wrapped))):
        line = ""
        for cell, width, to_right in zip(wrapped, widths, right, strict=True):
            text = cell[number] if number < len(cell) else ""
            line += " " * _GAP + (text.rjust(width) if to_right else text.ljust(width))
        yield line


def _wrap(text: str, width: int) -> list[str]:
    """Lines of at most ``width``, broken after spaces and, in names, after dots."""
    lines = [""]
    for word in text.split():
        for piece in _pieces(f"{word} ", width):
            if len(lines[-1]) + len(piece.rstrip()) > width and lines[-1]:
                lines.append("")
            lines[-1] += piece
    return [line.rstrip() for line in lines]


def _pieces(word: str, width: int) -> list[str]:
    """A word that does not fit, cut after dots, and anywhere if that is not enough."""
    if len(word.rstrip()) <= width:
        return [word]
    parts = re.findall(r"[^.]*(?:\.(?!\.)|\.\.|$)", word)
    return [part[i : i + width] for part in parts for i in range(0, len(part), width)]


# -- Markdown -------------------------------------------------------------------------------------

_CODE_COLUMNS = {"norm", "sublayer", "tensor", "made from", "inputs"}


def to_markdown(document: Document) -> str:
    """GitHub's Markdown, with pipes and other signs in cells escaped."""
    lines = [f"# {_escaped(document.title)}", "", _escaped(" · ".join(document.summary))]
    for section in document.sections:
        lines += ["", f"## {section.title}", ""]
        if section.table is not None:
            lines += _markdown_table(section.table)
        lines += [f"- {_escaped(paragraph)}" for paragraph in section.paragraphs]
    return "\n".join(lines) + "\n"


def _markdown_table(table: Table) -> Iterator[str]:
    columns = range(len(table.header))
    yield f"| {' | '.join(table.header)} |"
    yield f"| {' | '.join('---:' if _is_numeric(table, i) else '---' for i in columns)} |"
    for row in table.rows:
        cells = [
            _as_code(cell) if name in _CODE_COLUMNS and cell else _escaped(cell)
            for name, cell in zip(table.header, row, strict=True)
        ]
        yield f"| {' | '.join(cells)} |"


def _as_code(text: str) -> str:
    return "`" + text.replace("|", "\\|").replace("`", "'").replace("\n", " ") + "`"


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text).replace("\n", " ")


# -- HTML -----------------------------------------------------------------------------------------

# Colours that work on light and on dark pages: notebooks have both.
_STYLE = """
.normswap { font: 14px/1.45 system-ui, sans-serif; max-width: 72em; }
.normswap h3 { margin: 0 0 .2em; font-size: 1.15em; }
.normswap h4 { margin: 1.2em 0 .3em; font-size: 1em; }
.normswap p { margin: 0; }
.normswap .good { border-left: 4px solid #2a9d5c; padding-left: .6em; }
.normswap .bad { border-left: 4px solid #d1383d; padding-left: .6em; }
.normswap table { border-collapse: collapse; }
.normswap th, .normswap td { text-align: left; padding: .2em .9em .2em 0; vertical-align: top;
  border-bottom: 1px solid rgba(128, 128, 128, .35); background: none; }
.normswap .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.normswap figure { margin: .6em 0 0; }
.normswap svg { max-width: 100%; height: auto; }
.normswap code { font: .92em ui-monospace, monospace; overflow-wrap: anywhere; }
"""


def to_html(document: Document) -> str:
    """A fragment with its style, for notebooks."""
    mood = {True: "good", False: "bad", None: ""}[document.good]
    parts = [
        f"<style>{_STYLE}</style>",
        '<div class="normswap">',
        f"<h3>{html.escape(document.title)}</h3>",
        f'<p class="{mood}">{html.escape(" · ".join(document.summary))}</p>',
    ]
    for section in document.sections:
        parts.append(f"<h4>{html.escape(section.title)}</h4>")
        if section.table is not None:
            parts += _html_table(section.table)
        if section.paragraphs:
            items = "".join(f"<li>{html.escape(text)}</li>" for text in section.paragraphs)
            parts.append(f"<ul>{items}</ul>")
        if section.drawing:
            parts.append(f"<figure>{section.drawing}</figure>")
    return "\n".join([*parts, "</div>"])


def to_html_page(document: Document) -> str:
    """A page that needs nothing else."""
    title = html.escape(document.title)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n</head>\n<body>\n{to_html(document)}\n</body>\n</html>\n"
    )


def _html_table(table: Table) -> Iterator[str]:
    classes = [' class="number"' * _is_numeric(table, i) for i in range(len(table.header))]
    yield "<table>"
    yield _html_row("th", table.header, classes)
    for row in table.rows:
        cells = [
            f"<code>{html.escape(cell)}</code>" if name in _CODE_COLUMNS else html.escape(cell)
            for name, cell in zip(table.header, row, strict=True)
        ]
        yield _html_row("td", cells, classes)
    yield "</table>"


def _html_row(tag: str, cells: Sequence[str], classes: list[str]) -> str:
    inner = "".join(f"<{tag}{c}>{cell}</{tag}>" for cell, c in zip(cells, classes, strict=True))
    return f"<tr>{inner}</tr>"
