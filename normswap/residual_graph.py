"""The residual adds of a recorded graph: for each its fork, its skip, its branches and its norms.

A sum is residual where one operand, looked through ops that hand a value on, is a value ``X``
(the *fork*) that the other operand, the *branch*, is computed from with weights. What stands
between is read off the graph alone:

    ``X`` → input norm → branch → output norm → sum → stream norm → next fork
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import fx

from normswap.branches import (
    ATTENTION,
    CONTRACTIONS,
    MIXERS,
    MOVES,
    are_scores,
    attended,
    is_data,
    is_weight,
    mixes_tokens,
)
from normswap.capture import Capture, ModuleCall
from normswap.dataflow import (
    is_stored,
    lends_shape,
    op_name,
)
from normswap.find import GraphSite
from normswap.graphs import calls_around

_SCALES = {"mul", "div"}


@dataclass(eq=False)
class Branch:
    """One branch of a sublayer: what is computed from the fork and added to it.

    Attributes:
        value: the operand of the sum.
        inside: the ops from the fork to ``value``.
        exit: ``value`` without the ops that hand it on and without output norms.
        input_norms: sites between the fork and it.
        output_norms: sites between it and the sum.
        reads_fork: whether something in it reads the fork without a norm.
        scale: the constant that its result is multiplied by.
        kind: ``"attention"``, ``"cross-attention"``, ``"feed-forward"`` or ``"other"``.
        joins: of parallel branches that are added up first: the ops from there to the sum.
        outer_scale: the constant that these multiply by, a part of ``scale``.
    """

    value: fx.Node
    inside: set[fx.Node]
    exit: fx.Node
    input_norms: list[GraphSite] = field(default_factory=list[GraphSite])
    output_norms: list[GraphSite] = field(default_factory=list[GraphSite])
    reads_fork: bool = False
    scale: float = 1.0
    kind: str = "other"
    joins: set[fx.Node] = field(default_factory=set[fx.Node])
    outer_scale: float = 1.0


@dataclass(eq=False)
class Residual:
    """A sublayer in the graph.

    Attributes:
        fork: the value that branch and skip share.
        sums: the adds, in order: one for a single branch, or one a branch where they follow.
        branches: what is added.
        skip_scale: the constant that the fork is multiplied by on the skip.
        stream_norms: sites between the sum and the next fork.
    """

    fork: fx.Node
    sums: list[fx.Node]
    branches: list[Branch]
    skip_scale: float = 1.0
    stream_norms: list[GraphSite] = field(default_factory=list[GraphSite])

    @property
    def output(self) -> fx.Node:
        """The last sum."""
        return self.sums[-1]


@dataclass(eq=False)
class Chain:
    """Sublayers that follow each other on one stream."""

    residuals: list[Residual]
    embedding_norms: list[GraphSite] = field(default_factory=list[GraphSite])
    final_norms: list[GraphSite] = field(default_factory=list[GraphSite])


def residual_chains(capture: Capture, sites: Sequence[GraphSite]) -> list[Chain]:
    """The chains of sublayers in a graph whose norms are one node each (``norms_in_graph``)."""
    return _Reader(capture, sites).chains()


class _Reader:
    """Reads sublayers off one graph."""

    def __init__(self, capture: Capture, sites: Sequence[GraphSite]) -> None:
        self.nodes = [n for n in capture.graph.nodes if n.op in ("placeholder", "call_function")]
        self.index = {node: number for number, node in enumerate(self.nodes)}
        self.norms = {i.y: site for site in sites for i in site.instances}
        self.norm_inputs = {i.y: i.x for site in sites for i in site.instances}
        self.above = self._reach(self.nodes, lambda n: n.all_input_nodes)
        self.below = self._reach(self.nodes[::-1], lambda n: n.users)
        self.weights = sum(1 << n for node, n in self.index.items() if is_stored(node))
        self.found: dict[fx.Node, tuple[Residual, fx.Node]] = {}  # by sum, with its skip operand

    def _reach(
        self, order: list[fx.Node], neighbours: Callable[[fx.Node], object]
    ) -> dict[fx.Node, int]:
        """For each node, as bits, what it depends on (or what depends on it), itself included."""
        reach: dict[fx.Node, int] = {}
        for node in order:
            bits = 1 << self.index[node]
            for other in neighbours(node):  # type: ignore[attr-defined]
                bits |= reach.get(other, 0)
            reach[node] = bits
        return reach

    # -- sublayers ------------------------------------------------------------------------------

    def chains(self) -> list[Chain]:
        """See :func:`residual_chains`."""
        residuals: list[Residual] = []
        for node in self.nodes:
            residual = self._residual(node)
            if residual is not None and residual not in residuals:
                residuals.append(residual)
        return self._linked(self._outermost(residuals))

    def _residual(self, node: fx.Node) -> Residual | None:
        if op_name(node) != "add" or node.meta.get("unread") or "shape" not in node.meta:
            return None
        operands = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        if are_scores(node):
            return None
        shape = node.meta["shape"]
        if len(operands) != 2 or any(not _is_of_shape(o, shape) for o in operands):
            return None
        for skip, branch in (operands, operands[::-1]):
            if skip.meta["shape"] != shape:
                continue
            found = self._fork(skip, branch)
            if found is None:
                continue
            fork, scale, earlier = found
            alpha = node.kwargs.get("alpha", 1)
            factor = float(alpha) if isinstance(alpha, (int, float)) else 1.0
            branches = self._branches(fork, branch)
            if branch is node.args[1]:
                for each in branches:
                    each.scale *= factor
            else:
                scale *= factor
            if earlier is not None:
                earlier.sums.append(node)
                earlier.branches = sorted(earlier.branches + branches, key=lambda b: b.kind)
            residual = earlier or Residual(fork, [node], branches, scale)
            self.found[node] = residual, skip
            return residual
        return None

    def _fork(
        self, skip: fx.Node, branch: fx.Node
    ) -> tuple[fx.Node, float, Residual | None] | None:
        """The nearest value on the skip that the branch is computed from with weights.

        With it the constant on the way, and the sublayer whose sum the skip comes through: its
        branch and this one share a fork.
        """
        scale, earlier = 1.0, None
        value: fx.Node | None = skip
        while value is not None:
            if self._depends(branch, value) and self._computes(value, branch):
                return value, scale, earlier
            if value in self.found:
                before, operand = self.found[value]
                if before.output is not value:
                    return None
                earlier, value = before, operand
                continue
            value, factor = self._handed_on(value)
            scale *= factor
        return None

    def _depends(self, node: fx.Node, on: fx.Node) -> bool:
        return node is not on and bool(self.above[node] >> self.index[on] & 1)

    def _between(self, start: fx.Node, end: fx.Node) -> set[fx.Node]:
        """The ops on paths from ``start`` (not counted) to ``end`` (counted)."""
        bits = self.below[start] & self.above[end] & ~(1 << self.index[start])
        inside: set[fx.Node] = set()
        while bits:
            last = bits & -bits
            inside.add(self.nodes[last.bit_length() - 1])
            bits ^= last
        return inside

    def _computes(self, start: fx.Node, end: fx.Node) -> bool:
        """Whether there are weights, or a mixing of positions, between two values."""
        return any(
            op_name(n) in MIXERS | ATTENTION
            or (op_name(n) in CONTRACTIONS and any(is_weight(a) for a in n.all_input_nodes))
            for n in self._between(start, end)
        )

    def _handed_on(self, node: fx.Node) -> tuple[fx.Node | None, float]:
        """The value that an op hands on, and the constant that it multiplies it by."""
        if node.op != "call_function" or not node.all_input_nodes:
            return None, 1.0
        name, first = op_name(node), node.args[0] if node.args else None
        if name in MOVES:
            value = node.args[1] if name == "where" and not is_data(node.args[2]) else first
            if name == "where" and not is_data(node.args[1]):
                value = node.args[2]
            return (value, 1.0) if isinstance(value, fx.Node) else (None, 1.0)
        if name in _SCALES:
            return self._masked(node) or _scaled(node)
        return None, 1.0

    def _masked(self, node: fx.Node) -> tuple[fx.Node, float] | None:
        """A product with a mask, which is made of the inputs without weights: its other factor."""
        values = [a for a in node.args[:2] if isinstance(a, fx.Node)]
        masks = [v for v in values if is_data(v) and not self.above[v] & self.weights]
        if len(values) != 2 or len(masks) != 1:
            return None
        return values[0] if values[1] is masks[0] else values[1], 1.0

    # -- branches -------------------------------------------------------------------------------

    def _branches(self, fork: fx.Node, value: fx.Node) -> list[Branch]:
        """The branch that ends in ``value``, or those that it is the sum of."""
        whole = self._branch(fork, value)
        terms = [t for t in _terms(whole.exit) if self._depends(t, fork)]
        if whole.output_norms or len(terms) < 2 or whole.exit in self.found:
            return [whole]
        if not all(self._computes(fork, term) for term in terms):
            return [whole]
        split = [branch for term in terms for branch in self._branches(fork, term)]
        # Experts beside a shared expert are one feed-forward; attention beside an MLP is not.
        norms = {tuple(branch.input_norms) for branch in split}
        if len({branch.kind for branch in split}) == 1 and len(norms) == 1:
            return [whole]
        for branch in split:
            branch.scale *= whole.scale
            branch.outer_scale *= whole.scale
            branch.joins |= self._between(whole.exit, value) | {whole.exit}
        return sorted(split, key=lambda branch: branch.kind)

    def _branch(self, fork: fx.Node, value: fx.Node) -> Branch:
        branch = Branch(value, self._between(fork, value), value)
        here: fx.Node | None = value
        while here is not None and here in branch.inside:
            branch.exit = here
            if here in self.norms:
                branch.output_norms.append(self.norms[here])
                here = self.norm_inputs[here]
                continue
            here, factor = self._handed_on(here)
            branch.scale *= factor
        branch.output_norms.reverse()
        self._read_entries(branch, fork)
        branch.kind = self._kind(branch, fork)
        if set(branch.output_norms) <= set(branch.input_norms):  # a norm with nothing behind it
            branch.output_norms = []
        return branch

    def _read_entries(self, branch: Branch, fork: fx.Node) -> None:
        queue, seen = [fork], {fork}
        while queue:
            node = queue.pop()
            for user in node.users:
                if user not in branch.inside or user in seen or not reads_numbers(user, node):
                    continue
                seen.add(user)
                if user in self.norms:
                    branch.input_norms.append(self.norms[user])
                elif op_name(user) in MOVES | _SCALES and self._handed_on(user)[0] is node:
                    queue.append(user)
                else:
                    branch.reads_fork = True
        branch.input_norms = list(dict.fromkeys(branch.input_norms))

    def _kind(self, branch: Branch, fork: fx.Node) -> str:
        for node in branch.inside:
            values = attended(node)
            if values is not None:
                own = any(self._depends(v, fork) for v in values)
                return "attention" if own else "cross-attention"
        if any(mixes_tokens(node) for node in branch.inside):
            return "other"
        return "feed-forward"

    # -- order ----------------------------------------------------------------------------------

    def _outermost(self, residuals: list[Residual]) -> list[Residual]:
        """Without sums inside a branch, and without skips around whole sublayers."""
        insides = {r: set[fx.Node]().union(*(b.inside for b in r.branches)) for r in residuals}
        own = [
            r
            for r in residuals
            if not self._adds_to_normed_stream(r, residuals)
            and not any(self._feeds(r, o, insides[o]) for o in residuals)
        ]
        long = {r for r in own if self._is_around(r, [o for o in own if o.output in insides[r]])}
        kept = [r for r in own if r not in long]
        return [r for r in kept if not any(self._is_nested(r, o, insides[o]) for o in kept)]

    def _is_nested(self, residual: Residual, other: Residual, inside: set[fx.Node]) -> bool:
        """Whether a sum belongs to another one's branch; one on a stream of its own goes on."""
        if residual is other or not {residual.output, residual.fork} <= inside:
            return False
        queue, end = [residual.output], inside | set(other.sums)
        while queue:
            value = queue.pop()
            for user in value.users:
                if user.op != "call_function" or not reads_numbers(user, value):
                    continue
                if user not in end:
                    return False
                if user in inside and (user in self.norms or self._handed_on(user)[0] is value):
                    queue.append(user)
        return True

    def _is_around(self, residual: Residual, inner: list[Residual]) -> bool:
        """Whether a sum skips whole sublayers: on its own stream, or without a norm where they do.

        The second is a skip around a stack that has an embedding of its own, as in a U-Net.
        """
        inner = [other for other in inner if other is not residual]
        if any(self._same_stream(other.fork, residual.fork) for other in inner):
            return True
        return not self._is_normed(residual) and sum(map(self._is_normed, inner)) > 1

    def _is_normed(self, residual: Residual) -> bool:
        return _has_norms(residual) or any(user in self.norms for user in residual.output.users)

    def _feeds(self, residual: Residual, other: Residual, inside: set[fx.Node]) -> bool:
        """Whether a sum only feeds another one's branch: positions added to the stream, say.

        That branch reads the stream beside it, and the other sum goes on with the stream itself.
        """
        if residual is other or residual.output not in inside:
            return False
        if any(value is other.fork for b in residual.branches for value in self._moved(b.value)):
            return True
        if residual.fork is not other.fork:
            return False
        reached = {*residual.sums, *(n for b in residual.branches for n in b.inside)}
        readers = [n for n in other.fork.users if n in inside and reads_numbers(n, other.fork)]
        return any(reader not in reached for reader in readers)

    def _adds_to_normed_stream(self, residual: Residual, residuals: list[Residual]) -> bool:
        """Whether a branch is the stream of other sublayers behind a norm.

        Then something is added to what a block or a stack reads: positions that the stream has met
        before, or the stream of an earlier stage.
        """
        outputs = {other.output for other in residuals if other is not residual}
        return any(
            norms and value in outputs
            for branch in residual.branches
            for value, norms in self._origins(branch.value)
        )

    def _moved(self, value: fx.Node) -> Iterator[fx.Node]:
        """The values that ``value`` was handed on from."""
        here: fx.Node | None = value
        while here is not None:
            yield here
            here, _ = self._handed_on(here)

    def _same_stream(self, later: fx.Node, earlier: fx.Node) -> bool:
        return later is earlier or any(value is earlier for value, _ in self._origins(later))

    def _origins(self, value: fx.Node) -> Iterator[tuple[fx.Node, list[GraphSite]]]:
        """The values that ``value`` was handed on from, each with the norms met since."""
        norms: list[GraphSite] = []
        here: fx.Node | None = value
        while here is not None:
            yield here, norms
            if here in self.norms:
                norms = [self.norms[here], *norms]
                here = self.norm_inputs[here]
            else:
                here, _ = self._handed_on(here)

    def _linked(self, residuals: list[Residual]) -> list[Chain]:
        by_sum = {r.output: r for r in residuals}
        chain_of: dict[Residual, Chain] = {}
        chains: list[Chain] = []
        for residual in residuals:
            before, norms = self._before(residual, by_sum)
            chain = chain_of.get(before) if before is not None else None
            if before is None or chain is None or chain.residuals[-1] is not before:
                chain = Chain([], norms if before is None else [])
                chains.append(chain)
            else:
                before.stream_norms = norms
            chain.residuals.append(residual)
            chain_of[residual] = chain
        return [done for chain in chains for done in self._finished(chain)]

    def _before(
        self, residual: Residual, by_sum: dict[fx.Node, Residual]
    ) -> tuple[Residual | None, list[GraphSite]]:
        norms: list[GraphSite] = []
        for value, norms in self._origins(residual.fork):
            if value in by_sum:
                return by_sum[value], norms
        return None, norms

    def _finished(self, chain: Chain) -> list[Chain]:
        """The chain without its stem, and with what stands behind its last sum."""
        if _has_stem(chain):
            chain.embedding_norms = chain.residuals.pop(0).stream_norms
        if not chain.residuals:
            return []
        last = chain.residuals[-1]
        behind = self._norms_behind(last.output, _width(chain))
        post = _ends_in_norm(chain)
        last.stream_norms, chain.final_norms = (behind[:1], behind[1:]) if post else ([], behind)
        return [chain]

    def _norms_behind(self, value: fx.Node, width: int | None) -> list[GraphSite]:
        """The norms that read a value, one behind the other; not those of merged channels."""
        queue = [value]
        while queue:
            node = queue.pop(0)
            for user in node.users:
                if user in self.norms and self.norm_inputs[user] is node:
                    if width not in (None, _size(self.norms[user])):
                        return []
                    return [self.norms[user], *self._norms_behind(user, width)]
                if user.op == "call_function" and self._handed_on(user)[0] is node:
                    queue.append(user)
        return []


def _has_norms(residual: Residual) -> bool:
    return any(b.input_norms or b.output_norms for b in residual.branches)


def _has_stem(chain: Chain) -> bool:
    """Whether the first sublayer belongs to the embedding: positions by convolution, say.

    It is the only one of its kind: what each layer has is none.
    """
    bare = [r for r in chain.residuals if not _has_norms(r) and _kinds(r) == ["other"]]
    return bare == chain.residuals[:1]


def _ends_in_norm(chain: Chain) -> bool:
    """Whether the norm behind the last sum is its sublayer's: the layer before has one too."""
    kinds = [_kinds(r) for r in chain.residuals]
    count = len(kinds)
    periods = (p for p in range(1, count // 2 + 1) if kinds[p:] == kinds[:-p])
    if count == 1:
        return not _has_norms(chain.residuals[0])
    return bool(chain.residuals[-1 - next(periods, 1)].stream_norms)


def _kinds(residual: Residual) -> list[str]:
    return [branch.kind for branch in residual.branches]


def _width(chain: Chain) -> int | None:
    """The size of the chain's norms, where it is known."""
    for residual in chain.residuals:
        on_branch = [n for b in residual.branches for n in (*b.input_norms, *b.output_norms)]
        for norm in (*on_branch, *residual.stream_norms):
            if _size(norm) is not None:
                return _size(norm)
    return None


def _size(site: GraphSite) -> int | None:
    weight = site.tensors.get("weight")
    return None if weight is None else math.prod(weight.shape)


def _is_of_shape(value: fx.Node, shape: Sequence[int]) -> bool:
    """Whether a value has this shape, but for leading axes of size one that it may lack."""
    own = list(value.meta.get("shape", ()))
    missing = len(shape) - len(own)
    return missing >= 0 and [1] * missing + own == list(shape)


def _terms(node: fx.Node) -> list[fx.Node]:
    """The values that an op adds up."""
    terms: Sequence[object] = ()
    if op_name(node) == "add":
        terms = node.args[:2]
    elif op_name(node) == "sum" and isinstance(node.args[0], fx.Node):
        stacked = node.args[0]
        given = stacked.args[0] if op_name(stacked) == "stack" else ()
        terms = list(given) if isinstance(given, (list, tuple)) else ()
    return [term for term in terms if isinstance(term, fx.Node)]


def reads_numbers(reader: fx.Node, value: fx.Node) -> bool:
    """Whether an op reads more of a value than its shape, and something comes of it."""
    return not reader.meta.get("unread") and not lends_shape(value, reader)


def _scaled(node: fx.Node) -> tuple[fx.Node | None, float]:
    """A product with a number or a stored vector (LayerScale): its other factor, the number."""
    first, second = node.args[0], node.args[1]
    if isinstance(first, fx.Node) and isinstance(second, (int, float)):
        return first, float(second) if op_name(node) == "mul" else 1.0 / float(second)
    values = [a for a in (first, second) if isinstance(a, fx.Node)]
    data = [v for v in values if is_data(v)]
    if len(values) != 2 or len(data) != 1 or (op_name(node) == "div" and data[0] is second):
        return None, 1.0
    other = values[0] if values[1] is data[0] else values[1]
    number = other.meta.get("value")
    if isinstance(number, (int, float)):
        return data[0], float(number) if op_name(node) == "mul" else 1.0 / float(number)
    return data[0], 1.0


def holder(nodes: Sequence[fx.Node]) -> ModuleCall | None:
    """The innermost module call that all of ``nodes`` ran in."""
    common: list[ModuleCall] | None = None
    for node in nodes:
        calls = calls_around(node)
        common = calls if common is None else [c for c in common if c in calls]
    return common[0] if common else None
