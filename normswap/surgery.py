"""A recorded model on which edits are planned: its graph, the program of its weights, its norms."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import fx, nn

from normswap.biases import VirtualBiases, add_virtual_biases, made_biases
from normswap.capture import Capture, ModuleCall, capture
from normswap.channelmap import Pushed, commit, push
from normswap.dataflow import argument, is_stored, op_name
from normswap.find import GraphSite
from normswap.forms import StoredTensor, stored_value
from normswap.graph_norms import norms_in_graph
from normswap.graphs import final_readers
from normswap.inputs import Inputs
from normswap.maps import Blocked, Scale
from normswap.plan import MappingRow, ModuleEdit, Plan
from normswap.program import Edit, Program, Vector, without_unread


@dataclass
class Surgery:
    """What several rewrites share when they edit one model together.

    Attributes:
        model: the model; it is not changed.
        capture: its recorded run; each norm's call is one node of the graph.
        program: the weight edits so far.
        sites: layer and RMS norms, modules and functional.
        biases: biases that do not exist yet.
        new_biases: whether layers without a bias may get one.
        tied: tables that are also the weight of an output layer.
        ties: tensors that are separated from the one they are tied to, with the edit.
        ops: for the mapping: what was done to each edited tensor.
    """

    model: nn.Module
    capture: Capture
    program: Program
    sites: list[GraphSite]
    biases: VirtualBiases
    new_biases: bool = True
    tied: frozenset[fx.Node] = frozenset()
    ties: dict[str, tuple[StoredTensor, ModuleEdit]] = field(
        default_factory=dict[str, "tuple[StoredTensor, ModuleEdit]"]
    )
    ops: dict[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def on(
        cls,
        model: nn.Module,
        inputs: Inputs,
        *,
        new_biases: bool = True,
        untie: bool = False,
    ) -> Surgery:
        """Record ``model`` on ``inputs``.

        Args:
            model: the model.
            inputs: example inputs for the recorded run.
            new_biases: whether layers without a bias may get one.
            untie: whether a table that is also the output layer's weight may be separated from it.

        Raises:
            CaptureError: the model cannot be run on the inputs.
        """
        recorded = capture(model, inputs)
        sites = norms_in_graph(model, recorded)
        ties = _separate_tables(recorded) if untie else {}
        biases = add_virtual_biases(model, recorded) if new_biases else {}
        shapes = {t.name: t.shape for t in recorded.tensors.values()}
        shapes |= {name: tensor.shape for name, (tensor, _) in (biases | ties).items()}

        program = Program(lambda name: stored_value(model, name), shapes.__getitem__)
        for name, (tensor, edit) in ties.items():  # what it is before anything else changes
            source = program.current(edit.params["of"])
            program.assign(name, "reshape", source, shape=list(tensor.shape))
        tied = frozenset(
            t.node for t in recorded.tensors.values() if t.node is not None and _is_tied(t.node)
        )
        return cls(model, recorded, program, sites, biases, new_biases, tied, ties)

    def take(self, pushed: Pushed, op: str) -> None:
        """Assign what the tensors of a push become."""
        commit(self.program, pushed)
        for tensor, _ in pushed.tensors():
            self.ops.setdefault(tensor.name, op)

    def fold_scale(self, product: fx.Node) -> Pushed:
        """Put a stored vector that an activation is multiplied by into what writes the activation.

        The vector becomes ones: ``v * x`` is ``1 * (v * x)``.

        Raises:
            Blocked: the activation's writer cannot take it, or the vector is read elsewhere too.
        """
        operands = [a for a in product.args[:2] if isinstance(a, fx.Node)]
        vector = next(a for a in operands if is_stored(a))
        value = next((a for a in operands if a is not vector), vector)
        if op_name(product) != "mul" or is_stored(value):
            raise Blocked("op", "is no product of an activation with a stored vector")
        stored: StoredTensor = vector.meta["tensor"]
        if final_readers(vector) != [product]:
            raise Blocked("shared", f"{stored.name!r} is read elsewhere too")
        known = Vector.of(self.program, stored.name, stored.shape)
        scale = Scale(known.with_rank(len(value.meta["shape"])))
        pushed = push(self.program, [(value, scale)], [product], [], against=True)
        self.take(pushed, "fold")
        self.program.assign(stored.name, "like", self.program.current(stored.name), value=1.0)
        self.ops[stored.name] = "neutral"
        return pushed

    def finish(self, plan: Plan) -> None:
        """Add the program's edits, what they need in the model's structure, and the mapping."""
        edits = self._without_idle_ties(self.program.edits())
        used = {edit.target for edit in edits}
        gone = set(plan.removed)
        plan.edits += without_unread(edits, gone)
        structure: list[ModuleEdit] = []
        for name, (tensor, edit) in self.ties.items():
            if name in used:
                structure.append(edit)
                plan.created[name] = {"shape": list(tensor.shape), "like": edit.params["of"]}
                plan.notes.append(
                    f"{name!r} is not tied to {edit.params['of']!r} any more; a transformers "
                    "config says so (tie_word_embeddings is false)"
                )
        plan.module_edits[:0] = [*structure, *made_biases(plan, self.biases, used)]
        stored = {**self.capture.tensors, **{n: t for n, (t, _) in self.biases.items()}}
        told = {row.target for row in plan.mapping}
        for target, sources in self.program.stored_sources(edits).items():
            if target in told or (target not in stored and target not in self.ties):
                continue
            if target in gone:
                plan.mapping.append(MappingRow(target, (target,), "dropped", "exact"))
                continue
            op = "new" if target in self.biases else self.ops.get(target, "fold")
            plan.mapping.append(MappingRow(target, sources, op, "exact"))
            names = stored[target].names if target in stored else (target,)
            separated = set(self.ties) & used
            if target in separated and self.ops.get(target) is None:
                plan.mapping[-1] = MappingRow(target, sources, "untie", "exact")
            names = tuple(n for n in names if n == target or n not in separated)
            if len(names) > 1:
                plan.aliases[target] = list(names)

    def _without_idle_ties(self, edits: list[Edit]) -> list[Edit]:
        """The edits without the copies in layers that stay equal to what they are tied to."""
        count = Counter(edit.target for edit in edits)
        busy = {
            edit.module
            for name, (_, edit) in self.ties.items()
            if count[name] > 1 or count[edit.params["of"]]
        }
        idle = {name for name, (_, edit) in self.ties.items() if edit.module not in busy}
        return [edit for edit in edits if edit.target not in idle]


def _separate_tables(capture: Capture) -> dict[str, tuple[StoredTensor, ModuleEdit]]:
    """Give each layer that reads an embedding table under a name of its own a tensor of its own."""
    ties: dict[str, tuple[StoredTensor, ModuleEdit]] = {}
    for tensor in list(capture.tensors.values()):
        if tensor.node is None or len(tensor.names) < 2 or not _is_table(tensor.node):
            continue
        _name_as_table(capture, tensor)
        for reader in [u for u in tensor.node.users if op_name(u) == "linear"]:
            name = _own_name(tensor, reader)
            if name is None or name == tensor.name:
                continue
            _separate(capture, ties, tensor, name, reader)
            _separate_bias(capture, ties, reader)
    return ties


def _separate_bias(
    capture: Capture, ties: dict[str, tuple[StoredTensor, ModuleEdit]], reader: fx.Node
) -> None:
    """A bias that an output layer shares, too: one flag of a configuration ties both."""
    bias = argument(reader, 2, "bias")
    stored: StoredTensor | None = bias.meta["tensor"] if is_stored(bias) else None
    name = None if stored is None else _own_name(stored, reader, "bias")
    if stored is not None and name is not None and name != stored.name:
        _separate(capture, ties, stored, name, reader)


def _separate(
    capture: Capture,
    ties: dict[str, tuple[StoredTensor, ModuleEdit]],
    tensor: StoredTensor,
    name: str,
    reader: fx.Node,
) -> None:
    """Let ``reader`` read a tensor of its own in the place of ``tensor``."""
    if name not in ties:
        own = _placeholder(capture, tensor, name)
        edit = ModuleEdit("untie", name.rpartition(".")[0], {"name": name, "of": tensor.name})
        ties[name] = own, edit
    own = ties[name][0]
    assert own.node is not None
    assert tensor.node is not None
    reader.replace_input_with(tensor.node, own.node)


def _name_as_table(capture: Capture, tensor: StoredTensor) -> None:
    """Let a table go by the name under which an embedding reads it.

    Where the output layer comes first in the model, its name is the canonical one; but the output
    layer is what gets a tensor of its own.
    """
    assert tensor.node is not None
    lookups = [u for u in tensor.node.users if op_name(u) == "embedding"]
    name = next((n for u in lookups if (n := _own_name(tensor, u)) is not None), None)
    heads = [u for u in tensor.node.users if op_name(u) == "linear"]
    if name is None or all(_own_name(tensor, u) != tensor.name for u in heads):
        return
    del capture.tensors[tensor.name]
    tensor.name = name
    tensor.names = (name, *(n for n in tensor.names if n != name))
    capture.tensors[name] = tensor


def _own_name(tensor: StoredTensor, reader: fx.Node, leaf: str = "weight") -> str | None:
    """The name of a tensor in the module whose call reads it."""
    call: ModuleCall | None = reader.meta.get("call")
    name = None if call is None else f"{call.path}.{leaf}"
    return name if name in tensor.names else None


def _is_tied(node: fx.Node) -> bool:
    return _is_table(node) and any(op_name(user) == "linear" for user in node.users)


def _is_table(node: fx.Node) -> bool:
    return any(op_name(user) == "embedding" and user.args[0] is node for user in node.users)


def _placeholder(capture: Capture, tensor: StoredTensor, name: str) -> StoredTensor:
    assert tensor.node is not None
    with capture.graph.inserting_after(tensor.node):
        node = capture.graph.placeholder(name.replace(".", "_"))
    own = StoredTensor(name, (name,), tensor.shape, tensor.dtype, True, True, node)
    node.meta = {**tensor.node.meta, "tensor": own}
    return own
