"""Run a model once and record a `torch.fx.Graph` of ATen ops, each with the module call it ran in.

The model is run as a *fake twin*: a deep copy whose parameters and buffers are fake tensors, so no
weight is copied or computed and a model on the meta device works. Ops are recorded by a dispatch
mode under ``torch.inference_mode``, where ``linear``, convolutions, norms and attention arrive
whole. What cannot run on fakes (it reads data) is run once more on a real copy; every such read is
recorded, because one run then proves only one path.

Three kinds of node stand for what plain ATen does not show:

* :func:`stale_read`: a tensor that was read after another view of its storage was written to;
* :func:`hook_read`: a value that a hook of the user's sees;
* ``output``: everything the caller gets, or that a module keeps.
"""

from __future__ import annotations

import operator
import traceback
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from normswap.caches import forget_cached
from normswap.copying import copy_model
from normswap.errors import CaptureError
from normswap.experts import compute_in_batch
from normswap.forms import StoredTensor, module_names, named_tensors, stored_tensors
from normswap.hooks import PartOfModel
from normswap.inputs import Inputs
from normswap.outputs import tensors_by_path

# Reads of data that carry no tag in PyTorch's own op table.
_DATA_READS = {"item", "_local_scalar_dense", "is_nonzero", "equal", "allclose", "tolist"}
_DATA_READ_METHODS = (Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__)
_HOOK_SLOTS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def stale_read(value: Any, *writers: Any) -> Any:
    """Stand-in op: ``value`` as it is read after ``writers`` wrote to its storage elsewhere."""
    return value, writers


def hook_read(value: Any, module: str) -> Any:
    """Stand-in op: a hook on ``module`` sees ``value``."""
    return value, module


@dataclass(eq=False)
class ModuleCall:
    """One call of one module: ``path`` is its canonical name, ``number`` counts its calls.

    ``arguments`` holds the tensors that it was called with, by position or keyword.
    """

    path: str
    number: int
    parent: ModuleCall | None
    module_type: type[nn.Module]
    shape: tuple[int, ...] | None = None  # of its first tensor argument
    dtype: torch.dtype | None = None
    arguments: dict[int | str, fx.Node] = field(default_factory=dict[int | str, fx.Node])
    output: fx.Node | None = None  # where it returns one tensor
    first: fx.Node | None = None  # where it returns a tuple: its first item
    flags: bool = False  # called with Python values that may hang on data read before
    reads_data: bool = False  # an input-dependent data read happened inside

    def ancestors(self) -> Iterator[ModuleCall]:
        """This call and the calls around it, innermost first."""
        call: ModuleCall | None = self
        while call is not None:
            yield call
            call = call.parent


@dataclass(eq=False)
class Capture:
    """What one run showed.

    Each node's ``meta`` holds ``shape``, ``dtype``, ``call`` (the :class:`ModuleCall`) and
    ``from_input`` (whether it depends on an input of the model), for a placeholder ``kind``
    (``"input"``, ``"tensor"`` with its :class:`StoredTensor` under ``tensor``, or
    ``"constant"``), ``unread`` for ops that nothing comes of, and for ops of a
    ``GraphModule`` its ``origin`` (module path, node name).
    """

    graph: fx.Graph
    tensors: dict[str, StoredTensor]
    calls: list[ModuleCall]
    module_names: dict[str, tuple[str, ...]]
    on_real_inputs: bool
    data_reads: list[fx.Node] = field(default_factory=list[fx.Node])

    def calls_of(self, path: str) -> list[ModuleCall]:
        """Every call of the module with the canonical name ``path``."""
        return [call for call in self.calls if call.path == path]


def capture(model: nn.Module, inputs: Inputs) -> Capture:
    """Record one run of ``model`` on ``inputs``; neither is changed.

    Raises:
        CaptureError: the model cannot be copied or does not run; names the module and the line.
    """
    hooks = {name for name, module in model.named_modules() if _has_hooks(module)}
    on_meta = any(t.is_meta for t in model.parameters())
    error: _RunError | None = None
    # Hooks may have side effects on the user's objects, so they are left out where the model
    # runs without them (some models record their own hidden states by hooks).
    for fake in (True,) if on_meta else (True, False):
        for with_hooks in (False, True) if hooks else (False,):
            try:
                return _record(model, inputs, hooks, fake=fake, with_hooks=with_hooks)
            except _RunError as failure:
                error = failure
    assert error is not None
    how = "on fake tensors (it is on the meta device)" if on_meta else "on the example inputs"
    raise error.as_capture_error(how) from error.__cause__


def _has_hooks(module: nn.Module) -> bool:
    hooks = [hook for slot in _HOOK_SLOTS for hook in getattr(module, slot, {}).values()]
    return not all(_is_part_of_model(hook) for hook in hooks)


def _is_part_of_model(hook: Any) -> bool:
    """Whether a hook belongs to the model: ours, and those by which transformers collects outputs.

    What transformers collects is an output where the caller asked for it, and else is dropped.
    """
    library = str(getattr(hook, "__module__", "")).partition(".")[0]
    return isinstance(hook, PartOfModel) or library == "transformers"


def _keep_own_hooks(module: nn.Module) -> None:
    """Leave only those hooks that are part of the model."""
    for slot in _HOOK_SLOTS:
        hooks = getattr(module, slot, {}).items()
        own = {number: hook for number, hook in hooks if _is_part_of_model(hook)}
        setattr(module, slot, OrderedDict(own))


class _RunError(Exception):
    """The recorded run failed inside ``call``."""

    def __init__(self, call: ModuleCall | None, error: BaseException) -> None:
        super().__init__(str(error))
        self.call = call
        self.error = error

    def as_capture_error(self, how: str) -> CaptureError:
        where = "the model"
        if self.call is not None and self.call.path:
            where = f"{self.call.path!r} ({self.call.module_type.__name__})"
        text = str(self.error).strip().splitlines() or [""]
        return CaptureError(
            f"the model does not run {how}: in {where}, {_line(self.error)}: "
            f"{type(self.error).__name__}: {text[0]}. Pass example_inputs with which "
            "`model(*example_inputs)` runs in eval mode"
        )


def _line(error: BaseException) -> str:
    """The last line of the user's own code in the traceback of ``error``."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = ("/torch/", "/normswap/")
    for frame in reversed(frames):
        if not any(part in frame.filename.replace("\\", "/") for part in ours):
            return f"{frame.filename}:{frame.lineno}"
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown line"


def _record(
    model: nn.Module, inputs: Inputs, hooked: set[str], *, fake: bool, with_hooks: bool
) -> Capture:
    """One recorded run on a twin of ``model``, fake or real."""
    stored = stored_tensors(model)
    names = module_names(model)
    mode = FakeTensorMode(allow_non_fake_inputs=True) if fake else None
    twin = _make_twin(model, mode, with_hooks=with_hooks)
    recorder = _Recorder(twin, stored, names, hooked, fake=fake)
    given = inputs.map(lambda t: _fake(mode, t)) if mode is not None else inputs
    recorder.add_inputs(given)
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(forget_cached(twin))
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode())
        if mode is not None:
            stack.enter_context(mode)
        stack.enter_context(recorder)
        if mode is None:
            stack.enter_context(_ReadWatcher(recorder))
        try:
            result = twin(*given.args, **given.kwargs)
        except Exception as error:
            raise _RunError(recorder.call, error) from error
    return recorder.finish(result, inputs.outputs)


@contextmanager
def _quiet() -> Generator[None]:
    """The attention fast path off (it bypasses modules), and no warnings from the extra run."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def _fake(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake tensor like ``tensor``; meta becomes cpu, so that code sees a real device."""
    if isinstance(tensor, FakeTensor):
        tensor = torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"
        )
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    meta = torch.empty_strided(
        tensor.shape,
        tensor.stride(),
        dtype=tensor.dtype,
        device="meta",
        requires_grad=tensor.requires_grad and tensor.is_leaf,
    )
    fake = FakeTensor(mode, meta, device)
    if isinstance(tensor, nn.Parameter):
        fake._is_param = True  # what isinstance(…, nn.Parameter) asks of a tensor subclass
    return fake


def _make_twin(model: nn.Module, mode: FakeTensorMode | None, *, with_hooks: bool) -> nn.Module:
    memo: dict[int, Any] = {}
    if mode is not None:
        for _, tensor in named_tensors(model):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(mode, tensor)
    try:
        twin = copy_model(model, memo)
    except Exception as error:
        raise CaptureError(
            f"the model cannot be copied ({type(error).__name__}: {error}), so it cannot be run "
            "without touching it: make copy.deepcopy(model) work"
        ) from error
    for module in twin.modules():
        module._compiled_call_impl = None
        if not with_hooks:
            _keep_own_hooks(module)
    compute_in_batch(twin)
    return twin


class _ReadWatcher(TorchFunctionMode):
    """Notes the reads of data that never reach the dispatcher."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _DATA_READ_METHODS and args and isinstance(args[0], Tensor):
            self.recorder.note_read([self.recorder.node_of(args[0])])
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """Appends each dispatched op to a graph."""

    def __init__(
        self,
        twin: nn.Module,
        stored: dict[str, StoredTensor],
        names: dict[str, tuple[str, ...]],
        hooked: set[str],
        *,
        fake: bool,
    ) -> None:
        super().__init__()
        self.graph = fx.Graph()
        self.stored = stored
        self.names = names
        self.fake = fake
        self.call: ModuleCall | None = None
        self.calls: list[ModuleCall] = []
        self.call_counts: dict[str, int] = {}
        self.origin: tuple[str, str] | None = None
        self.data_reads: list[fx.Node] = []
        self._keep: list[Any] = []  # fake tensors are kept alive, so that ids stay unique
        self._nodes: dict[int, tuple[Callable[[], Tensor | None], fx.Node]] = {}
        self._storages: dict[int, list[Callable[[], Tensor | None]]] = {}
        self._stale: dict[int, list[fx.Node]] = {}
        self._by_id = {id(t): n for n, t in named_tensors(twin) if n in stored}
        self._twin = twin
        self._seen_before = {id(v) for m in twin.modules() for v in m.__dict__.values()}
        for name, module in twin.named_modules():
            self._follow(name, module, observed=name in hooked)

    # -- module calls ---------------------------------------------------------------------------

    def _follow(self, name: str, module: nn.Module, *, observed: bool) -> None:
        if isinstance(module, fx.GraphModule):
            _interpret(module, name, self)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            number = self.call_counts.get(name, 0)
            self.call_counts[name] = number + 1
            self.call = ModuleCall(name, number, self.call, type(module))
            steered = any(isinstance(a, (bool, str)) for a in (*args, *kwargs.values()))
            self.call.flags = steered and bool(self.data_reads)
            first = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)), None)
            if first is not None:
                self.call.shape, self.call.dtype = tuple(first.shape), first.dtype
            for key, value in (*enumerate(args), *kwargs.items()):
                node = self._known(value)
                if node is not None:
                    self.call.arguments[key] = node
            self.calls.append(self.call)
            if observed:
                self._observe(name, (args, kwargs))

        def leave(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            if observed:
                self._observe(name, output)
            # Calls that raised and were caught inside the model are passed over.
            while self.call is not None and self.call.path != name:
                self.call = self.call.parent
            if self.call is not None:
                self.call.output = self._known(output)
                if isinstance(output, tuple) and output:
                    self.call.first = self._known(output[0])
                self.call = self.call.parent

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, with_kwargs=True)

    def _observe(self, name: str, values: Any) -> None:
        for tensor in tensors_in(values):
            node = self.graph.call_function(hook_read, (self.node_of(tensor), name))
            self._describe(node, tensor)
            self._taint(node)

    # -- values ---------------------------------------------------------------------------------

    def add_inputs(self, inputs: Inputs) -> None:
        for number, tensor in enumerate(tensors_in((inputs.args, inputs.kwargs))):
            self._bind(tensor, self._placeholder(f"input_{number}", tensor, "input"))

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that stands for ``tensor`` as it is now."""
        writers = self._stale.pop(id(tensor), None)
        found = self._nodes.get(id(tensor))
        if found is not None and found[0]() is tensor:
            node = found[1]
            if writers is None:
                return node
            stale = self.graph.call_function(stale_read, (node, *writers))
            self._describe(stale, tensor)
            self._taint(stale)
            self._bind(tensor, stale)
            return stale
        name = self._by_id.get(id(tensor))
        kind = "constant" if name is None else "tensor"
        node = self._placeholder((name or "constant").replace(".", "_"), tensor, kind)
        if name is not None:
            node.meta["tensor"] = self.stored[name]
            self.stored[name].node = node
        self._bind(tensor, node)
        return node

    def _known(self, value: Any) -> fx.Node | None:
        """The node of a tensor that was recorded and is not stale."""
        if not isinstance(value, Tensor) or not self._is_bound(value) or id(value) in self._stale:
            return None
        return self._nodes[id(value)][1]

    def _placeholder(self, name: str, tensor: Tensor, kind: str) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["kind"] = kind
        node.meta["from_input"] = kind == "input"
        self._describe(node, tensor)
        if kind == "constant" and not isinstance(tensor, FakeTensor) and tensor.numel() <= 1:
            node.meta["value"] = tensor.item() if tensor.numel() else None
        return node

    def _describe(self, node: fx.Node, tensor: Tensor) -> None:
        node.meta["shape"] = tuple(tensor.shape)
        node.meta["dtype"] = tensor.dtype
        node.meta["call"] = self.call
        if self.origin is not None:
            node.meta["origin"] = self.origin

    def _bind(self, tensor: Tensor, node: fx.Node) -> None:
        reference: Callable[[], Tensor | None]
        if self.fake:
            self._keep.append(tensor)
            reference = _Strong(tensor)
        else:
            reference = weakref.ref(tensor)
        known = self._is_bound(tensor)
        self._nodes[id(tensor)] = (reference, node)
        if not known:
            self._storages.setdefault(_storage(tensor), []).append(reference)

    def _is_bound(self, tensor: Tensor) -> bool:
        return id(tensor) in self._nodes and self._nodes[id(tensor)][0]() is tensor

    # -- ops ------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        operands = self._to_nodes(args)
        named = {key: self._to_nodes(value) for key, value in kwargs.items()}
        call = self.call
        if self.fake and func is torch.ops.aten.batch_norm.default and args[5] is False:
            result = torch.empty_like(args[0])  # its own fake form takes milliseconds
        else:
            result = func(*args, **kwargs)
        if isinstance(result, Tensor) and not func._schema.is_mutable and self._is_bound(result):
            return result  # a cast that had nothing to do gave its input back
        node = self.graph.call_function(func, operands, named)
        node.meta["call"] = call
        if self.origin is not None:
            node.meta["origin"] = self.origin
        self._taint(node)
        if _reads_data(func, args):
            self.note_read([node])
        self._bind_result(node, result)
        if func._schema.is_mutable:
            self._note_writes(func, args, kwargs, node)
        return result

    def _to_nodes(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.node_of(value)
        if isinstance(value, (list, tuple)):
            return type(value)(self._to_nodes(v) for v in value)
        return value

    def _bind_result(self, node: fx.Node, result: Any) -> None:
        if isinstance(result, Tensor):
            node.meta["shape"], node.meta["dtype"] = tuple(result.shape), result.dtype
            self._bind(result, node)
        elif isinstance(result, (list, tuple)):
            for index, value in enumerate(result):
                if isinstance(value, Tensor):
                    item = self.graph.call_function(operator.getitem, (node, index))
                    self._describe(item, value)
                    self._taint(item)
                    self._bind(value, item)

    def _note_writes(self, func: Any, args: Any, kwargs: Any, node: fx.Node) -> None:
        """The written tensor is ``node`` from now on; other views of its storage are stale."""
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in tensors_in(value):
                self._bind(tensor, node)
                if "shape" not in node.meta:
                    node.meta["shape"], node.meta["dtype"] = tuple(tensor.shape), tensor.dtype
                self._stale.pop(id(tensor), None)
                for reference in self._storages.get(_storage(tensor), ()):
                    other = reference()
                    if other is not None and other is not tensor:
                        self._stale.setdefault(id(other), []).append(node)

    def _taint(self, node: fx.Node) -> None:
        node.meta["from_input"] = any(n.meta["from_input"] for n in node.all_input_nodes)

    def note_read(self, nodes: list[fx.Node]) -> None:
        """Data was read; if it depends on an input, the calls around it prove one path only."""
        tainted = [node for node in nodes if node.meta["from_input"]]
        if not tainted:
            return
        self.data_reads += tainted
        for call in self.call.ancestors() if self.call is not None else ():
            call.reads_data = True

    def finish(self, result: Any, outputs: Collection[str] | None) -> Capture:
        kept = [t for m in self._twin.modules() for t in self._kept_by(m)]
        returned = tensors_in(result)
        if outputs is not None:
            returned = list(tensors_by_path(result, outputs).values())
        seen = {id(t): t for t in (*returned, *kept)}
        self.graph.output(tuple(self.node_of(t) for t in seen.values()))
        _mark_unread(self.graph, self.data_reads)
        return Capture(
            self.graph, self.stored, self.calls, self.names, not self.fake, self.data_reads
        )

    def _kept_by(self, module: nn.Module) -> Iterator[Tensor]:
        """Tensors that the run left in attributes of a module, where the user may read them."""
        slots = ("_modules", "_parameters", "_buffers")
        for key, value in module.__dict__.items():
            if key in slots or id(value) in self._seen_before:
                continue
            for tensor in tensors_in(value):
                if id(tensor) in self._nodes and id(tensor) not in self._by_id:
                    yield tensor
        for tensor in module._buffers.values():
            found = None if tensor is None else self._nodes.get(id(tensor))
            if tensor is not None and found is not None and found[1].op != "placeholder":
                yield tensor  # a buffer that the run wrote to


def _mark_unread(graph: fx.Graph, data_reads: list[fx.Node]) -> None:
    """Set ``meta["unread"]`` on ops that nothing comes of (code that only asks for a shape)."""
    counting = {stale_read, hook_read}
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        counts = node.op == "output" or node.target in counting or mutable or node in data_reads
        if counts or node in read:
            read.update(node.all_input_nodes)
        elif node.op == "call_function":
            node.meta["unread"] = True


class _Strong:
    """A reference with the interface of ``weakref.ref`` that keeps its target."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def __call__(self) -> Tensor:
        return self.target


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _reads_data(func: Any, args: tuple[Any, ...]) -> bool:
    name = func.overloadpacket.__name__
    if name in _DATA_READS or torch.Tag.data_dependent_output in func.tags:
        return True
    if name == "index" and len(args) > 1:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return torch.Tag.dynamic_output_shape in func.tags and name != "index"


def _interpret(module: fx.GraphModule, path: str, recorder: _Recorder) -> None:
    """Run a ``GraphModule`` node by node, so that each recorded op knows the node it came from."""
    import inspect

    signature = inspect.signature(module.forward)

    class Interpreter(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            before, recorder.origin = recorder.origin, (path, n.name)
            try:
                return super().run_node(n)
            finally:
                recorder.origin = before

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return Interpreter(module, garbage_collect_values=False).run(*bound.args)

    object.__setattr__(module, "forward", forward)


def tensors_in(value: Any) -> list[Tensor]:
    """Every tensor inside ``value``: containers, dataclasses and plain objects are walked."""
    found: list[Tensor] = []
    _walk(value, found, set())
    return found


def _walk(value: Any, found: list[Tensor], seen: set[int]) -> None:
    if isinstance(value, Tensor):
        found.append(value)
        return
    if value is None or isinstance(value, (int, float, str, bool, bytes, torch.dtype, type)):
        return
    if id(value) in seen or isinstance(value, nn.Module) or callable(value):
        return
    seen.add(id(value))
    if isinstance(value, dict):
        parts: Any = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        parts = list(value)
    elif is_dataclass(value):
        parts = [getattr(value, f.name, None) for f in fields(value)]
    else:
        parts = list(getattr(value, "__dict__", {}).values())
    for part in parts:
        _walk(part, found, seen)
