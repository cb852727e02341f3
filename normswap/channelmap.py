"""Push a map along the dataflow, against or with it, until parameters absorb it: all or nothing.

:func:`push` starts from maps on some values and visits every op next to a touched value, except
the ones that the push starts at. The table of :mod:`normswap.dataflow` says what each op asks of
its other values; a parameter or buffer absorbs its map as an edit. The push ends when no op is
left to visit, or is :class:`~normswap.maps.Blocked` by the first op, reader or tensor that cannot
take its map. Since weights are values too, a value with two readers, a weight used by two calls
and a branch that must take the same map are one question: do all asked maps agree?
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from normswap.capture import Capture, ModuleCall
from normswap.dataflow import RULES, Later, Side, Step, Value, made, norm_call, op_name, rule_for
from normswap.forms import StoredTensor
from normswap.maps import Blocked, Centre, Map, Scale, Shift
from normswap.program import Program

LEAST_VISITS, VISITS_PER_OP = 1000, 4


@dataclass
class Pushed:
    """A push that was absorbed: the map of every touched value, and the ops it visited."""

    maps: dict[Value, Map] = field(default_factory=dict[Value, Map])
    ops: set[fx.Node] = field(default_factory=set[fx.Node])

    def tensors(self) -> Iterable[tuple[StoredTensor, Map]]:
        """The stored tensors that absorb a map."""
        for value, m in self.maps.items():
            node = node_of(value)
            if node.meta.get("kind") == "tensor":
                yield node.meta["tensor"], m


_Visit = tuple[Value, fx.Node]  # a touched value, and an op next to it


@dataclass
class _State:
    """A partial push: maps set so far, how each visited op was settled, and what is to visit."""

    maps: dict[Value, Map]
    settled: dict[Any, dict[Value, Map]]
    queue: list[_Visit]
    detours: dict[Value, str]  # values reached through another reader, and the reason's code
    starts: list[tuple[Value, list[_Visit]]]  # yet to visit once the queue is empty, last first
    region: list[Value]  # the values reached from the present start
    origin: dict[Value, Value]  # what asked a value for its map; a start has none

    @classmethod
    def empty(cls) -> _State:
        return cls({}, {}, [], {}, [], [], {})

    def copy(self) -> _State:
        return _State(
            dict(self.maps),
            dict(self.settled),
            list(self.queue),
            dict(self.detours),
            list(self.starts),
            list(self.region),
            dict(self.origin),
        )

    def next_visit(self) -> _Visit | None:
        while not self.queue and self.starts:
            value, visits = self.starts.pop()
            self.queue, self.region = list(visits), [value]
        return self.queue.pop() if self.queue else None


def _way(origin: Mapping[Value, Value], value: Value) -> list[Value]:
    """A value, what asked it for its map, and so on back to a start."""
    way = [value]
    while way[-1] in origin:
        way.append(origin[way[-1]])
    return way


@dataclass
class _DeadEnd:
    """A map on a value that leads to an obstacle, and how."""

    value: Value
    m: Map
    blocked: Blocked
    way: frozenset[Value]
    origin: Mapping[Value, Value]

    @cached_property
    def between(self) -> frozenset[Value]:
        """The values from this one to the obstacle."""
        own = _way(self.origin, self.value)
        fork = next((n for n, v in enumerate(own) if v in self.way), len(own))
        return (self.way - set(own[fork + 1 :])) | set(own[: fork + 1])


MOST_DEAD_ENDS = 8


@dataclass
class DeadEnds:
    """What failed pushes found out: maps of values that lead to an obstacle.

    Whatever asks a value for such a map ends at the same obstacle, unless an op that is put in
    writes one of the values in between. That is taken for granted; where an op leaves a choice on
    the way back it need not be so, and a way may be missed.
    """

    known: dict[Value, list[_DeadEnd]] = field(default_factory=dict[Value, list[_DeadEnd]])
    visits: int = 0  # what it took

    def note(self, state: _State, values: Iterable[Value], blocked: Blocked) -> None:
        """Add that the maps of ``values`` led to an obstacle."""
        for value in values:
            m, known = state.maps[value], self.known.setdefault(value, [])
            if isinstance(m, Centre) and len(known) < MOST_DEAD_ENDS:
                known.append(_DeadEnd(value, m, blocked, blocked.way, state.origin))

    def recall(
        self, value: Value, m: Map, written: Collection[Value]
    ) -> tuple[Blocked, frozenset[Value]] | None:
        """The obstacle that a map leads to although the values ``written`` are, and the way."""
        for end in self.known.get(value, ()):
            if end.between.isdisjoint(written) and end.m.same(m):
                return end.blocked, end.between
        return None


@dataclass
class _Choice:
    """An op that left a choice: the state before it, what is yet to try, and why the first failed.

    A list of these, not recursion: a model may have more choices than Python has frames.
    """

    state: _State
    value: Value
    op: fx.Node
    steps: Iterator[Step | Later]
    first: Blocked | None = None
    conflict: bool = False  # whether some step failed for what the push holds elsewhere
    way: frozenset[Value] = frozenset()  # to where the steps failed


class _Push:
    def __init__(
        self,
        program: Program,
        starts: set[fx.Node],
        fixed: set[fx.Node],
        written: set[fx.Node],
        left: Mapping[Value, Map],
        fold: Callable[[fx.Node, Blocked], None] | None,
        dead_ends: DeadEnds | None,
        *,
        against: bool,
    ) -> None:
        self.program = program
        self.fold = fold
        self.dead_ends = dead_ends
        self.written = written
        self.left = left
        self.starts = starts
        self.fixed = fixed
        self.against = against
        self.visits = 0
        self.limit = LEAST_VISITS

    def solve(self, state: _State) -> _State:
        """Visit ops until none is left; where an op leaves a choice, try each in turn."""
        choices: list[_Choice] = []
        while (visit := state.next_visit()) is not None:
            value, op = visit
            try:
                steps = self._visit(state, value, op)
                if len(steps) == 1:
                    self._take(state, value, op, made(steps[0]))
                    continue
                choices.append(_Choice(state, value, op, iter(steps)))
                state = self._next(choices)
            except Blocked as blocked:
                blocked.way = blocked.way or frozenset(_way(state.origin, value))
                state = self._next(choices, state, blocked)
        return state

    def _next(
        self, choices: list[_Choice], ended: _State | None = None, blocked: Blocked | None = None
    ) -> _State:
        """The state after the next step that is left to try; ``blocked`` has ended the last one.

        Raises:
            Blocked: none is left; the reason is that of the first.
        """
        while choices:
            choice = choices[-1]
            if blocked is not None and ended is not None:
                self._note(choice, ended, blocked)
            for step in choice.steps:
                trial = choice.state.copy()
                try:
                    self._take(trial, choice.value, choice.op, made(step))
                    return trial
                except Blocked as inner:
                    self._note(choice, trial, inner)
            choices.pop()
            ended, blocked = choice.state, choice.first
            assert blocked is not None
            blocked.conflict, blocked.way = choice.conflict, choice.way
        assert ended is not None
        assert blocked is not None
        self._remember(ended, 0, blocked)
        raise blocked

    def _note(self, choice: _Choice, ended: _State, blocked: Blocked) -> None:
        """Remember why a step of a choice failed."""
        choice.first = choice.first or blocked
        here = len(ended.starts) == len(choice.state.starts)
        blocked.way = blocked.way or frozenset(_way(choice.state.origin, choice.value))
        choice.conflict |= blocked.conflict or not here
        choice.way |= blocked.way
        self._remember(ended, len(choice.state.region) if here else 0, blocked)

    def _remember(self, ended: _State, begin: int, blocked: Blocked) -> None:
        if self.dead_ends is not None and not blocked.conflict:
            self.dead_ends.note(ended, ended.region[begin:], blocked)

    def _require_possible(self, state: _State, target: Value, m: Map, source: Value) -> None:
        # Without ops put in, a push finds its own obstacle: the way there is part of the reason.
        if self.dead_ends is None or not self.written:
            return
        known = self.dead_ends.recall(target, m, self.written)
        if known is not None:
            blocked = Blocked(known[0].code, known[0].detail)
            blocked.root, blocked.place = known[0].root, known[0].place
            blocked.maps = {**known[0].maps, **state.maps, target: m}
            blocked.way = known[1] | frozenset(_way(state.origin, source))
            raise blocked

    def _visit(self, state: _State, value: Value, op: fx.Node) -> Sequence[Step | Later]:
        self.visits += 1
        if self.dead_ends is not None:
            self.dead_ends.visits += 1
        if self.visits > self.limit:
            raise _conflict("op", f"no way was found in {self.limit} steps")
        m = state.maps[value]
        settled = state.settled.get(_constraint(op, value, m))
        if settled is not None:
            if value in settled and settled[value].same(m):
                return [[]]
            raise self._on_detour(
                self._detour(state, value, op) or "other-reader",
                _conflict("other-reader", f"{describe(op)} would have to take two maps at once"),
            )
        try:
            return self._asked(op, value, m)
        except Blocked as blocked:
            explained = self._explained(state, blocked, value, op)
            explained.scale, explained.root = blocked.scale, blocked.root
            explained.place, explained.maps = (value, op), dict(state.maps)
            explained.way = frozenset(_way(state.origin, value))
            raise explained from None

    def _asked(self, op: fx.Node, value: Value, m: Map) -> Sequence[Step | Later]:
        """What an op says, once more if a factor that was in its way could be folded."""
        try:
            return self._relate(op, value, m)
        except Blocked as blocked:
            if blocked.scale is None or self.fold is None:
                raise
            self.fold(blocked.scale, blocked)
        return self._relate(op, value, m)

    def _relate(self, op: fx.Node, value: Value, m: Map) -> Sequence[Step | Later]:
        if isinstance(value, Side):
            return rule_for(op).relate_side(op, value, m, self.program)
        return rule_for(op).relate(op, value, m, self.program)

    def _explained(self, state: _State, blocked: Blocked, value: Value, op: fx.Node) -> Blocked:
        """The reason with its place and, off the straight way, how the push got there."""
        weight = not isinstance(state.maps[value], Centre) and op in _producers(value)
        if weight and not op.meta.get("from_input", True):
            return Blocked(
                "parametrised",
                f"a weight is computed ({describe(op)}), not stored: {blocked.detail}",
            )
        detail = f"{describe(op)}: {blocked.detail}"
        direct = value not in state.detours and node_of(value).op != "placeholder"
        if direct and blocked.code in {"output", "hook", "stale-alias"}:
            return Blocked(blocked.code, detail)
        return self._on_detour(self._detour(state, value, op), Blocked(blocked.code, detail))

    def _detour(self, state: _State, value: Value, op: fx.Node) -> str | None:
        """Why going from ``value`` to ``op`` leaves the straight way, if it does."""
        if value in state.detours:
            return state.detours[value]
        if op is value or op in _producers(value):
            return None
        if node_of(value).op == "placeholder":
            return "shared"
        return "other-reader" if self.against else None

    def _on_detour(self, detour: str | None, blocked: Blocked) -> Blocked:
        where = {
            "shared": "a weight is used by another call too",
            "other-reader": "a value is read elsewhere too",
        }.get(detour or "")
        if where is None or detour is None:
            return blocked
        explained = Blocked(detour, f"{where}; there, {blocked.detail}")
        explained.conflict = blocked.conflict
        return explained

    def _take(self, state: _State, value: Value, op: fx.Node, step: Step) -> None:
        if step:
            state.settled[_constraint(op, value, state.maps[value])] = {
                value: state.maps[value],
                **dict(step),
            }
        detour = self._detour(state, value, op)
        for target, m in step:
            try:
                self.set(state, target, m, op, detour, value)
            except Blocked as blocked:
                if blocked.place is not None:  # found by an earlier push
                    raise
                explained = self._on_detour(detour, blocked)
                explained.place, explained.maps = (target, op), dict(state.maps)
                explained.way = frozenset(_way(state.origin, value))
                raise explained from None

    def set(
        self,
        state: _State,
        target: Value,
        m: Map,
        origin: fx.Node | None,
        detour: str | None = None,
        source: Value | None = None,
    ) -> None:
        """Give ``target`` the map that ``origin`` asks for, and queue the ops next to it."""
        if self._has_already(target, m):
            return
        if target in self.fixed:
            raise Blocked("other-reader", f"{describe(node_of(target))} must stay as it is")
        known = state.maps.get(target)
        if known is not None:
            if known.same(m):
                return
            raise _conflict(
                "other-reader", f"{describe(node_of(target))} would have to take two different maps"
            )
        if source is not None:
            self._require_possible(state, target, m, source)
        node = node_of(target)
        if node.op == "placeholder":
            _require_absorbing(node, m)
        state.maps[target] = m
        state.region.append(target)
        if source is not None:
            state.origin[target] = source
        if detour is not None:
            state.detours[target] = detour
        producers = [] if target in self.written else _producers(target)
        # The last one is visited first. What writes a value to be centred tells more about why it
        # cannot be than one of its many readers.
        around = [*node.users, *producers] if isinstance(m, Centre) else [*producers, *node.users]
        state.queue += [
            (target, op)
            for op in dict.fromkeys(around)
            if op is not origin and not op.meta.get("unread") and self._is_asked(op, producers)
        ]

    def _is_asked(self, op: fx.Node, producers: list[fx.Node]) -> bool:
        """What a push starts from is not asked as a reader; it may write the value as well."""
        return op not in self.starts or (self.against and op in producers)

    def _has_already(self, target: Value, m: Map) -> bool:
        """Whether a value needs nothing more to have a map."""
        if 0 in node_of(target).meta.get("shape", ()):
            return True
        done = self.left.get(target)
        if done is not None and done.same(m):
            return True
        if not isinstance(m, Centre) or isinstance(target, Side) or target in self.written:
            return False
        rule = RULES.get(op_name(_op_of(target))) if target.op == "call_function" else None
        return rule is not None and rule.already_centred(_op_of(target), m, self.program)


def push(
    program: Program,
    maps: Iterable[tuple[Value, Map]],
    starts: Iterable[fx.Node],
    fixed: Iterable[fx.Node],
    *,
    against: bool,
    written: Iterable[fx.Node] = (),
    left: Mapping[Value, Map] | None = None,
    fold: Callable[[fx.Node, Blocked], None] | None = None,
    dead_ends: DeadEnds | None = None,
) -> Pushed:
    """Push ``maps`` from the ops ``starts`` until parameters absorb them.

    Args:
        program: where vectors are computed; no tensor of the model is assigned.
        maps: the maps that the push begins with, on values next to ``starts``.
        starts: ops that are not asked (they are what the maps are taken from).
        fixed: values that the push must leave as they are (on the far side of ``starts``).
        against: whether the push goes against the flow (for the wording of a refusal).
        written: values that get their map from an op put behind them, so that what writes them is
            not asked.
        left: maps that values have already, from an earlier push.
        fold: folds a stored factor that is in the way of a centring, or raises the reason. Weights
            change under the push then, so it must be made again to be valid.
        dead_ends: what earlier pushes found out, with the same ``left``; this one adds to it.

    Raises:
        Blocked: some path ends at something that cannot take its map.
    """
    starts = list(starts)
    pushing = _Push(
        program, set(starts), set(fixed), set(written), left or {}, fold, dead_ends, against=against
    )
    if starts:  # each op is visited from each of its values once, unless choices are tried
        pushing.limit = LEAST_VISITS + VISITS_PER_OP * len(starts[0].graph.nodes)
    state = _State.empty()
    for node, m in maps:
        pushing.set(state, node, m, None)
        state.starts.append((node, state.queue))
        state.queue = []
    state = pushing.solve(state)
    return Pushed(state.maps, _ops_next_to(state.maps))


def _conflict(code: str, detail: str) -> Blocked:
    """A reason that hangs on what else the push holds."""
    blocked = Blocked(code, detail)
    blocked.conflict = True
    return blocked


def _ops_next_to(values: Iterable[Value]) -> set[fx.Node]:
    return {op for value in values for op in (*node_of(value).users, node_of(value))}


def node_of(value: Value) -> fx.Node:
    """The node of a value, or of a weight of which a value is one side."""
    return value.node if isinstance(value, Side) else value


def _constraint(op: fx.Node, value: Value, m: Map) -> Any:
    """What a visit from ``value`` settles; an op without a rule settles nothing else either."""
    try:
        return rule_for(op).constraint(op, value, m)
    except Blocked:
        return op


def commit(program: Program, pushed: Pushed) -> None:
    """Assign what the stored tensors become."""
    for tensor, m in pushed.tensors():
        current = program.current(tensor.name)
        virtual = "virtual" in tensor.node.meta if tensor.node is not None else False
        if virtual and current[1] == 0:
            if isinstance(m, (Scale, Centre)):
                continue  # a bias that does not exist yet is zero
            program.assign(tensor.name, "constant", value=0.0, shape=list(tensor.shape))
            current = program.current(tensor.name)
        if isinstance(m, Scale):
            program.assign(tensor.name, "scale", current, m.vector.ref, inverse=m.inverse)
        elif isinstance(m, Shift):
            program.assign(tensor.name, "shift", current, m.vector.ref, negative=m.negative)
        elif isinstance(m, Centre):
            program.assign(tensor.name, "centre", current, m.vector.ref)


def require_one_path(capture: Capture, pushes: Iterable[Pushed]) -> None:
    """Raise unless the recorded run proves the push for every input.

    With reads of data one run shows one path. A push is sound if the innermost module call that
    holds all of its ops reads no data inside (that call is then a fixed function of its inputs),
    is not steered by flags, and is the only place where the touched tensors belong.
    """
    if not capture.data_reads:
        return
    pushes = list(pushes)
    calls = [op.meta["call"] for p in pushes for op in p.ops if op.meta.get("call") is not None]
    inner = _innermost(calls)
    if inner is None or inner.reads_data:
        where = "the model" if inner is None or not inner.path else repr(inner.path)
        raise Blocked(
            "data-dependent", f"{where} reads data, so one recorded run does not show every path"
        )
    if inner.flags:
        raise Blocked(
            "data-dependent", f"{inner.path!r} is steered by an argument that may hang on data"
        )
    prefix = f"{inner.path}." if inner.path else ""
    called = {call.path for call in capture.calls}
    for tensor in capture.tensors.values():  # what a called module did not read, another path may
        unread = tensor.node is None and tensor.dtype.is_floating_point
        if unread and tensor.owner in called and tensor.name.startswith(prefix):
            raise Blocked("data-dependent", f"{tensor.name!r} was not read in the recorded run")
    for p in pushes:
        for tensor, _ in p.tensors():
            outside = [n for n in tensor.names if not n.startswith(prefix)]
            if outside and len(tensor.names) > 1:
                raise Blocked("data-dependent", f"{outside[0]!r} may be read on another path")


def _innermost(calls: list[ModuleCall]) -> ModuleCall | None:
    """The innermost call that is around all of ``calls``."""
    if not calls:
        return None
    common = list(calls[0].ancestors())
    for call in calls[1:]:
        around = set(map(id, call.ancestors()))
        common = [c for c in common if id(c) in around]
    return common[0] if common else None


def _op_of(node: fx.Node) -> fx.Node:
    """The op behind a node: an item of a tuple belongs to the op that made the tuple."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return node.args[0]
    return node


def _producers(value: Value) -> list[fx.Node]:
    if isinstance(value, Side) or value.op == "placeholder":
        return []
    return [_op_of(value)]


def _require_absorbing(node: fx.Node, m: Map) -> None:
    kind = node.meta["kind"]
    if kind == "input":
        raise Blocked("input", "the value is an input of the model")
    if kind == "constant":
        raise Blocked("op", "the value is a tensor that is no parameter or buffer of the model")
    tensor: StoredTensor = node.meta["tensor"]
    if tensor.overlaps is not None:
        raise Blocked("shared", f"{tensor.name!r} shares its memory with {tensor.overlaps!r}")
    if not tensor.dtype.is_floating_point:
        raise Blocked("quantised", f"{tensor.name!r} is of dtype {tensor.dtype}")
    if not tensor.persistent:
        raise Blocked("op", f"{tensor.name!r} is a buffer that is not saved")
    if isinstance(m, Scale) and m.inverse:
        if not m.vector.known:
            raise Blocked("value-unknown", f"{tensor.name!r} would be divided by unknown values")
        if bool((m.vector.value == 0).any()):
            raise Blocked("zero-scale", f"{tensor.name!r} would be divided by a scale of zero")


def describe(node: fx.Node) -> str:
    """An op or tensor in words: what it is, and the module call it ran in."""
    if node.op == "output":
        return "the output"
    if node.op == "placeholder":
        tensor = node.meta.get("tensor")
        return f"the {node.meta['kind']}" if tensor is None else repr(tensor.name)
    call = node.meta.get("call")
    if node.target is norm_call:
        return f"the norm {node.meta['site']!r}"
    name = op_name(_op_of(node))
    if call is None or not call.path:
        return name
    times = f" (call {call.number + 1})" if call.number else ""
    return f"{name} in {call.path!r}{times}"


def owners_in_words(pushes: Iterable[Pushed]) -> str:
    """The modules whose tensors absorbed something, the first of them by name."""
    names = sorted({tensor.owner for p in pushes for tensor, _ in p.tensors()})
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
