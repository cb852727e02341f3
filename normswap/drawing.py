"""One layer of a stack before and after its norms were moved, drawn side by side as SVG."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence

from normswap.structure import Stack, Sublayer

__all__ = ["blocks_svg", "layer_length"]

_WIDTH = 720
_PANEL = 344  # one of the two halves
# From the left edge of a panel: norms on the stream, the stream itself, and the branches.
_NORM, _STREAM, _BRANCH, _RIGHT = 10, 34, 70, 334
_BRANCH_WIDTH = _RIGHT - _BRANCH
_BOX, _PILL, _GAP, _RADIUS = 26, 18, 12, 8
_SIDE_BY_SIDE = 3  # more branches than these would be too narrow to read
_LONGEST_LAYER = 4
_LONGEST_CONSTANT = 8
_PER_CHARACTER = {"norm": 6.4, "branch": 6.9, "scale": 6.4, "title": 7.4}  # at their font sizes

# Colours between black and white, so that light and dark pages both contrast with them.
_STYLES = {
    "norm": 'fill="#3f83c9" fill-opacity=".16" stroke="#3f83c9" stroke-width="1.5"',
    "branch": 'fill="#888" fill-opacity=".14" stroke="#888" stroke-width="1"',
    "scale": 'fill="#c98a1b" fill-opacity=".16" stroke="#c98a1b" stroke-width="1"',
    "layer": 'fill="none" stroke="#888" stroke-width="1" stroke-dasharray="4 4"',
}
_FONTS = {
    "norm": 'font-family="ui-monospace, monospace" font-size="10.5"',
    "branch": 'font-size="12"',
    "scale": 'font-family="ui-monospace, monospace" font-size="10.5"',
}
_NOT_IN_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def blocks_svg(before: Stack, after: Stack) -> str:
    """An SVG of the first layer of a stack, before and after its norms were moved.

    The stream runs down; its sublayers stand to the right, each norm where it acts. Names of norms
    are relative to the stack. The drawing needs nothing else and takes the page's text colour.
    """
    length = layer_length(before)
    alike = len(before.sublayers) == len(after.sublayers)
    panels = [
        _Panel(8, "before", before, length),
        _Panel(_WIDTH - _PANEL - 8, "after", after, length if alike else layer_length(after)),
    ]
    height = max(panel.tail for panel in panels) + 12
    title = f"{before.name or 'model'}: {before.form} before, {after.form} after"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_WIDTH}" '
            f'height="{height:g}" viewBox="0 0 {_WIDTH} {height:g}" fill="none" '
            'stroke-linecap="round" font-family="system-ui, sans-serif">',
            f"<title>{_escaped(title)}</title>",
            f"<desc>{_escaped(' '.join(panel.words() for panel in panels))}</desc>",
            *(part for panel in panels for part in panel.parts),
            "</svg>",
        ]
    )


def layer_length(stack: Stack) -> int:
    """How many sublayers make a layer: the shortest pattern that the stack repeats.

    Where nothing is repeated, those up to the first feed-forward.
    """
    keys = [(s.kind, re.sub(r"\d+", "#", s.name)) for s in stack.sublayers]
    for length in range(1, _LONGEST_LAYER + 1):
        if len(keys) % length == 0 and keys[length:] == keys[:-length]:
            return min(length, len(keys))
    ends = (n for n, (kind, _) in enumerate(keys, 1) if "feed-forward" in kind)
    return min(next(ends, _LONGEST_LAYER), _LONGEST_LAYER, len(keys))


class _Panel:
    """One stack, drawn from top to bottom; ``tail`` is where the stream has come to."""

    def __init__(self, left: float, label: str, stack: Stack, length: int) -> None:
        self.left, self.label, self.stack = left, label, stack
        self.shown = stack.sublayers[:length]
        self.stream = left + _STREAM
        self.middle = left + _BRANCH + _BRANCH_WIDTH / 2
        self.parts: list[str] = []
        self._title(f"{label}: {stack.form}")
        self.tail = 32.0
        self._stream_norms(stack.embedding_norms)
        if self.shown:
            self._layer()
        self._stream_norms(stack.final_norms)
        self._arrow_down(self.stream, self.tail, self.tail + 22)
        self.tail += 22

    def words(self) -> str:
        """What is drawn, for those who cannot see it."""
        said = [f"{self.label[:1].upper()}{self.label[1:]}, {self.stack.form}:"]
        said += [f"embedding norm {name};" for name in self.stack.embedding_norms]
        said += [f"{_in_words(sublayer)};" for sublayer in self.shown]
        said += [f"final norm {name};" for name in self.stack.final_norms]
        return " ".join(said).rstrip(":;") + "."

    # -- the stream -------------------------------------------------------------------------------

    def _layer(self) -> None:
        top = self.tail + _GAP
        self._stream_to(top + 14)
        place = len(self.parts)
        for sublayer in self.shown:
            self._sublayer(sublayer)
        self._stream_to(self.tail + 8)
        frame = _rect("layer", self.left, top, _PANEL, self.tail - top)
        count, length = len(self.stack.sublayers), len(self.shown)
        whole = count % length == 0
        caption = (
            f"layer 1 of {count // length}" if whole else f"sublayers 1 to {length} of {count}"
        )
        middle = f'x="{self.left + _PANEL - 8:g}" y="{top + 14:g}" text-anchor="end"'
        note = f'<text {middle} font-size="10.5" fill="currentColor" opacity=".7">{caption}</text>'
        self.parts[place:place] = [frame, note]

    def _sublayer(self, sublayer: Sublayer) -> None:
        self._stream_to(self.tail + _GAP)
        fork = self.tail
        plus = self._branches(sublayer, fork)
        if sublayer.skip_scale != 1.0:
            middle = (fork + plus) / 2
            self._stream_to(middle - _PILL / 2)
            self._scale(self.stream, middle - _PILL / 2, sublayer.skip_scale)
            self.tail = middle + _PILL / 2
        self._stream_to(plus - _RADIUS)
        self._plus(plus)
        self._stream_norms(sublayer.stream_norms)

    def _stream_norms(self, names: Sequence[str]) -> None:
        for name in names:
            self._arrow_down(self.stream, self.tail, self.tail + _GAP)
            self._box("norm", self.left + _NORM, self.tail + _GAP, _RIGHT - _NORM, name)
            self.tail += _GAP + _BOX

    def _stream_to(self, y: float) -> None:
        if y > self.tail:
            self._line((self.stream, self.tail), (self.stream, y))
            self.tail = y

    # -- branches ---------------------------------------------------------------------------------

    def _branches(self, sublayer: Sublayer, fork: float) -> float:
        """All but the stream itself; returns the height of the sum."""
        kinds = sublayer.kind.split(" + ")
        kinds = kinds if len(kinds) <= _SIDE_BY_SIDE else [sublayer.kind]
        own_inputs, inputs = _dealt(sublayer.input_norms, len(kinds))
        own_outputs, outputs = _dealt(sublayer.output_norms, len(kinds))
        each = (_BRANCH_WIDTH - (len(kinds) - 1) * _GAP) / len(kinds)
        lefts = [self.left + _BRANCH + n * (each + _GAP) for n in range(len(kinds))]
        centres = [left + each / 2 for left in lefts]
        top = bottom = self._fork(fork, centres, inputs)
        for left, kind, first, last in zip(lefts, kinds, own_inputs, own_outputs, strict=True):
            boxes = [*_norms(first), ("branch", kind), *_norms(last)]
            bottom = self._column(left, each, top, boxes)
        return self._sum(bottom, centres, outputs, sublayer.branch_scale)

    def _fork(self, y: float, centres: Sequence[float], norms: Sequence[str]) -> float:
        """From the stream, through norms that the branches share, to their tops."""
        if not norms:
            self._line((self.stream, y), (centres[-1], y))
            return y
        self._line((self.stream, y), (self.middle, y))
        y = self._column(self.left + _BRANCH, _BRANCH_WIDTH, y, _norms(norms))
        if len(centres) == 1:
            return y
        self._line((self.middle, y), (self.middle, y + _GAP / 2))
        self._line((centres[0], y + _GAP / 2), (centres[-1], y + _GAP / 2))
        return y + _GAP / 2

    def _sum(self, y: float, centres: Sequence[float], norms: Sequence[str], scale: float) -> float:
        """From the bottoms of the branches, through what they share, to the stream."""
        if len(centres) > 1 and (norms or scale != 1.0):
            for x in centres:
                self._line((x, y), (x, y + _GAP))
            y += _GAP
            self._line((centres[0], y), (centres[-1], y))
            centres = [self.middle]
        y = self._column(self.left + _BRANCH, _BRANCH_WIDTH, y, _norms(norms))
        if scale != 1.0:
            self._line((self.middle, y), (self.middle, y + _GAP / 2))
            self._scale(self.middle, y + _GAP / 2, scale)
            y += _GAP / 2 + _PILL
        plus = y + _GAP + _RADIUS
        for x in centres:
            self._line((x, y), (x, plus))
        self._arrow_left(centres[-1], self.stream + _RADIUS, plus)
        return plus

    def _column(
        self, left: float, width: float, y: float, boxes: Sequence[tuple[str, str]]
    ) -> float:
        """Boxes below each other, an arrow into each; where the last ends."""
        for kind, text in boxes:
            self._arrow_down(left + width / 2, y, y + _GAP)
            self._box(kind, left, y + _GAP, width, text)
            y += _GAP + _BOX
        return y

    # -- shapes -----------------------------------------------------------------------------------

    def _title(self, text: str) -> None:
        shown = _fitted(text, _PANEL / _PER_CHARACTER["title"])
        self.parts.append(
            f'<text x="{self.left:g}" y="18" font-size="13" font-weight="600" '
            f'fill="currentColor">{_escaped(shown)}</text>'
        )

    def _box(self, kind: str, left: float, top: float, width: float, text: str) -> None:
        relative = text.removeprefix(f"{self.stack.name}.") if kind == "norm" else text
        shown = _fitted(relative, (width - 10) / _PER_CHARACTER[kind])
        self.parts += [
            f'<g class="{kind}"><title>{_escaped(text)}</title>',
            _rect(kind, left, top, width, _BOX),
            _text(kind, left + width / 2, top + _BOX / 2, shown),
            "</g>",
        ]

    def _scale(self, x: float, top: float, value: float) -> None:
        text = f"×{_constant(value)}"
        width = len(text) * _PER_CHARACTER["scale"] + 4
        self.parts += [
            '<g class="scale">',
            _rect("scale", x - width / 2, top, width, _PILL),
            _text("scale", x, top + _PILL / 2, text),
            "</g>",
        ]

    def _plus(self, y: float) -> None:
        x, arm = self.stream, _RADIUS - 3
        self.parts.append(
            f'<circle cx="{x:g}" cy="{y:g}" r="{_RADIUS}" stroke="currentColor" '
            'stroke-width="1.2"/>'
        )
        self._line((x - arm, y), (x + arm, y))
        self._line((x, y - arm), (x, y + arm))
        self.tail = y + _RADIUS

    def _line(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        (a, b), (c, d) = start, end
        self.parts.append(
            f'<path d="M{a:g} {b:g}L{c:g} {d:g}" stroke="currentColor" stroke-width="1.2"/>'
        )

    def _arrow_down(self, x: float, y: float, end: float) -> None:
        self._line((x, y), (x, end - 4))
        self.parts.append(f'<path d="M{x:g} {end:g}l-3.5 -6h7z" fill="currentColor"/>')

    def _arrow_left(self, x: float, end: float, y: float) -> None:
        self._line((x, y), (end + 4, y))
        self.parts.append(f'<path d="M{end:g} {y:g}l6 -3.5v7z" fill="currentColor"/>')


def _dealt(names: Sequence[str], branches: int) -> tuple[list[Sequence[str]], Sequence[str]]:
    """Each branch's own norms and those of all: as many as branches are one each."""
    if len(names) == branches:
        return [(name,) for name in names], ()
    return [() for _ in range(branches)], names


def _norms(names: Sequence[str]) -> list[tuple[str, str]]:
    return [("norm", name) for name in names]


def _in_words(sublayer: Sublayer) -> str:
    said = [sublayer.kind]
    for where, names in (
        ("input", sublayer.input_norms),
        ("output", sublayer.output_norms),
        ("stream", sublayer.stream_norms),
    ):
        said += [f"{where} norm {name}" for name in names]
    for what, scale in (("skip", sublayer.skip_scale), ("branch", sublayer.branch_scale)):
        said += [f"{what} times {scale:.4g}"] if scale != 1.0 else []
    return ", ".join(said)


def _rect(kind: str, left: float, top: float, width: float, height: float) -> str:
    size = f'x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="5"'
    return f"<rect {size} {_STYLES[kind]}/>"


def _text(kind: str, x: float, y: float, text: str) -> str:
    # No `dominant-baseline`, which some renderers lack: a third of the font size centres a line.
    place = f'x="{x:g}" y="{y + 4:g}" text-anchor="middle"'
    return f'<text {place} {_FONTS[kind]} fill="currentColor">{_escaped(text)}</text>'


def _constant(value: float) -> str:
    """Short enough to stand between the branches and the panel's edge."""
    text = f"{value:.3g}"
    return text if len(text) <= _LONGEST_CONSTANT else f"{value:.0e}"


def _fitted(text: str, room: float) -> str:
    """At most ``room`` characters: the last parts of a name, or both ends of a long part."""
    most = max(int(room), 3)
    if len(text) <= most:
        return text
    parts = text.split(".")
    for first in range(1, len(parts)):
        rest = ".".join(parts[first:])
        if len(rest) < most:
            return f"…{rest}"
    head = (most - 1) // 2
    last = parts[-1]
    return f"{last[:head]}…{last[len(last) - (most - 1 - head) :]}"


def _escaped(text: str) -> str:
    return html.escape(_NOT_IN_XML.sub("?", text))
