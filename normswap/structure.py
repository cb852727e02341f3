"""`ResidualStructure`: the sublayers of a transformer in order, and where their norms stand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from normswap.capture import Capture, capture
from normswap.collapse import collapse_names
from normswap.find import GraphSite
from normswap.graph_norms import norms_in_graph
from normswap.init import DeepNormScale, deepnorm_scales
from normswap.inputs import Inputs
from normswap.rendering import Document, Section, Table, to_text
from normswap.residual_graph import Branch, Chain, Residual, holder, residual_chains


@dataclass(frozen=True)
class Sublayer:
    """One branch (or parallel branches) with the sum that puts it on the stream.

    Attributes:
        name: the innermost module that computes the branch.
        kind: ``"attention"``, ``"cross-attention"``, ``"feed-forward"``, ``"other"``, or several
            joined by ``" + "`` where they are parallel.
        form: with branch ``f`` and norms ``P``, ``Q``, ``S``: ``"pre"`` ``x + f(P x)``,
            ``"post"`` ``S(x + f(x))``, ``"sandwich"`` ``x + Q(f(P x))``, ``"branch-output"``
            ``x + Q(f(x))``, ``"deepnorm"`` ``S(a x + f(x))``, ``"parallel"``
            ``x + f(P x) + g(P' x)``, ``"none"``, or ``"mixed"`` for anything else.
        input_norms: names of the norms between the fork and the branch (``P``).
        output_norms: between the branch and the sum (``Q``).
        stream_norms: between the sum and the next fork (``S``).
        skip_scale: the constant on the skip.
        branch_scale: the constant on the branch's result.
    """

    name: str
    kind: str
    form: str
    input_norms: tuple[str, ...] = ()
    output_norms: tuple[str, ...] = ()
    stream_norms: tuple[str, ...] = ()
    skip_scale: float = 1.0
    branch_scale: float = 1.0


@dataclass(frozen=True)
class Stack:
    """A chain of sublayers on one stream.

    Attributes:
        name: the innermost module that holds it.
        form: of its sublayers, or ``"mixed"`` where they differ; the first may have no norm.
        sublayers: in order.
        embedding_norms: in front of the first fork.
        final_norms: behind the last sublayer.
    """

    name: str
    form: str
    sublayers: tuple[Sublayer, ...]
    embedding_norms: tuple[str, ...] = ()
    final_norms: tuple[str, ...] = ()

    def norms_read(self) -> list[str | None]:
        """The norm that makes what each sublayer's branch reads, and what is read at the end."""
        before = [self.embedding_norms, *(s.stream_norms for s in self.sublayers)]
        inputs = [*(s.input_norms for s in self.sublayers), ()]
        found = [a[-1:] or b[-1:] for a, b in zip(inputs, before, strict=True)]
        found[-1] = self.final_norms[-1:] or found[-1]
        return [names[0] if names else None for names in found]


@dataclass(frozen=True)
class ResidualStructure:
    """The stacks of a model; prints as a table, one row a sublayer, repeated layers collapsed."""

    stacks: tuple[Stack, ...]

    @property
    def form(self) -> str:
        """The form of all stacks, ``"mixed"``, or ``"none"`` where there is no stack."""
        return _common([stack.form for stack in self.stacks])

    def __str__(self) -> str:
        columns = shutil.get_terminal_size((100, 24)).columns
        return to_text(self.document(), min(max(columns, 60), 140))

    def document(self) -> Document:
        """The tables to render: a section a stack."""
        count = len(self.stacks)
        summary = (f"form {self.form}", f"{count} stack{'s' * (count != 1)}")
        sections = tuple(_section(stack) for stack in self.stacks)
        return Document("Residual structure", summary, None, sections)


def _section(stack: Stack) -> Section:
    """One row a sublayer, repeated layers collapsed; in front and behind what stands there."""
    rows = [
        (s.name, s.kind, s.form, *map(" ".join, (s.input_norms, s.output_norms, s.stream_norms)))
        for s in stack.sublayers
    ]
    ends = [
        *((name, "embedding norm", "", "", "", "") for name in stack.embedding_norms),
        *(item.columns for item in collapse_names(rows)),
        *((name, "final norm", "", "", "", "") for name in stack.final_norms),
    ]
    used = [i for i in range(len(_COLUMNS)) if i < 3 or any(row[i] for row in ends)]
    table = Table(
        tuple(_COLUMNS[i] for i in used), tuple(tuple(row[i] for i in used) for row in ends)
    )
    return Section(f"{stack.name or '(model)'}: {stack.form}", table)


_COLUMNS = ("sublayer", "what", "form", "input norms", "output norms", "stream norms")


# Norms that transformers have; a BatchNorm makes no stack of a convolutional net.
_KINDS = ("layer", "rms", "crms", "lp", "scale", "group", "dyt", "derf")


@dataclass(eq=False)
class Reading:
    """A structure with the chains in the graph that it was read from."""

    capture: Capture
    sites: list[GraphSite]
    chains: list[Chain]
    structure: ResidualStructure


def read_structure(model: nn.Module, inputs: Inputs) -> Reading:
    """Record a model and read its residual structure.

    Raises:
        CaptureError: the model cannot be run on the inputs.
    """
    recorded = capture(model, inputs)
    sites = norms_in_graph(model, recorded, _KINDS)
    chains = [c for c in residual_chains(recorded, sites) if _is_transformer(c)]
    return Reading(recorded, sites, chains, ResidualStructure(tuple(map(_stack, chains))))


def _is_transformer(chain: Chain) -> bool:
    """Whether a chain has norms to move: a convolutional block with a skip is none."""
    norms = [*chain.embedding_norms, *chain.final_norms]
    return bool(norms) or any(
        r.stream_norms or any(b.input_norms or b.output_norms for b in r.branches)
        for r in chain.residuals
    )


def _stack(chain: Chain) -> Stack:
    sublayers = tuple(_sublayer(r) for r in chain.residuals)
    held = holder([r.output for r in chain.residuals])
    return Stack(
        held.path if held is not None else "",
        form_of_stack(sublayers),
        sublayers,
        _names(chain.embedding_norms),
        _names(chain.final_norms),
    )


def _sublayer(residual: Residual) -> Sublayer:
    branches = residual.branches
    inside = [n for b in branches for n in b.inside]
    held = holder([n for n in inside if _has_weight(n)] or inside)
    scales = {b.scale for b in branches}
    return Sublayer(
        held.path if held is not None else "",
        " + ".join(b.kind for b in branches),
        form_of(residual),
        _names([n for b in branches for n in b.input_norms]),
        _names([n for b in branches for n in b.output_norms]),
        _names(residual.stream_norms),
        residual.skip_scale,
        scales.pop() if len(scales) == 1 else 1.0,
    )


def deepnorm_scale(structure: ResidualStructure, stack: Stack) -> DeepNormScale:
    """DeepNorm's constants for the depth of a stack, and of the encoder or decoder beside it."""
    decoders = [s for s in structure.stacks if any("cross" in r.kind for r in s.sublayers)]
    if not decoders:
        alone, _ = deepnorm_scales(encoder_layers=max(_layers(stack), 1))
        assert alone is not None
        return alone
    encoders = [s for s in structure.stacks if s not in decoders]
    deepest = max(map(_layers, encoders), default=0)
    encoder, decoder = deepnorm_scales(deepest, max(1, *map(_layers, decoders)))
    chosen = decoder if stack in decoders or encoder is None else encoder
    assert chosen is not None
    return chosen


def _layers(stack: Stack) -> int:
    return sum(s.kind.startswith("attention") for s in stack.sublayers)


def form_of(residual: Residual) -> str:
    """The form of one sublayer, see :class:`Sublayer`."""
    branches, stream = residual.branches, bool(residual.stream_norms)
    before = {_normed(b) for b in branches}
    behind = {bool(b.output_norms) for b in branches}
    if len(branches) > 1:
        return "parallel"
    if None in before or len(before) > 1 or len(behind) > 1:
        return "mixed"
    known = {
        (False, False, False): "none",
        (True, False, False): "pre",
        (True, True, False): "sandwich",
        (False, True, False): "branch-output",
        (False, False, True): "post" if residual.skip_scale == 1.0 else "deepnorm",
    }
    return known.get((True in before, True in behind, stream), "mixed")


def _normed(branch: Branch) -> bool | None:
    """Whether a branch reads the stream through norms; ``None``: only in part."""
    if not branch.input_norms:
        return False
    return None if branch.reads_fork else True


def _has_weight(node: object) -> bool:
    nodes = getattr(node, "all_input_nodes", [])
    return any(n.meta.get("kind") == "tensor" for n in nodes)


def _names(sites: Sequence[GraphSite]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(site.site.name for site in sites))


def form_of_stack(sublayers: Sequence[Sublayer]) -> str:
    """The form that all sublayers have; a first one without a norm has none to differ by."""
    forms = [s.form for s in sublayers]
    bare = len(forms) > 1 and forms[0] == "none"
    return _common(forms[1:] if bare else forms)


def _common(forms: Sequence[str]) -> str:
    different = set(forms)
    if len(different) > 1:
        return "mixed"
    return next(iter(different), "none")
