"""Probe the modules of every transformers model type and every timm family, and check the result.

Each model is built on the meta device in its default configuration. Every distinct (class,
configuration) is probed; what is recognised is compared with what the class says of itself (the
attribute that holds its eps, ``1 + weight`` in its source) and its float64 results with a formula
written here, on random inputs with random tensors.

``python tests/sweeps/sweep_recognition.py`` resumes from ``build/sweeps/recognition.jsonl`` and
writes ``recognition.md``; ``--only transformers:llama`` runs one again; ``--table`` only writes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import inspect
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1])]

from normswap.precision import true_float64  # noqa: E402
from normswap.probe import configuration, examine  # noqa: E402
from normswap.spec import NormSpec, Unknown  # noqa: E402

STORE = HERE.parents[1] / "build" / "sweeps" / "recognition.jsonl"
TABLE = HERE / "recognition.md"
TOLERANCE = 1e-10
Record = dict[str, Any]


# -- models ---------------------------------------------------------------------------------------


def names() -> list[str]:
    """Every model type of transformers, and the smallest member of every timm family."""
    from transformers import CONFIG_MAPPING

    families = json.loads((HERE / "timm_smallest.json").read_text(encoding="utf-8"))
    return [*(f"transformers:{t}" for t in CONFIG_MAPPING), *(f"timm:{f}" for f in families)]


def build(name: str) -> nn.Module:
    """The model on the meta device."""
    library, _, which = name.partition(":")
    with torch.device("meta"):
        if library == "timm":
            import timm

            families = json.loads((HERE / "timm_smallest.json").read_text(encoding="utf-8"))
            return timm.create_model(families[which], pretrained=False)
        return _transformers_model(which)


def _transformers_model(model_type: str) -> nn.Module:
    """The first of the classes for this type that can be built."""
    from sweep_transformers import config_of

    config = config_of(model_type)
    failures: list[str] = []
    for prepared in (copy.deepcopy, _filled):
        for cls in _classes(type(config)):
            try:
                return cls(prepared(config))
            except Exception as error:
                failures.append(f"{cls.__name__}: {type(error).__name__}: {error}")
    raise RuntimeError(failures[-1] if failures else "no model class takes this configuration")


# What a type needs beside numbers, where its default configuration does not fit together.
SETTINGS: dict[str, dict[str, Any]] = {
    "autoformer": {"prediction_length": 4, "context_length": 16},
    "time_series_transformer": {"prediction_length": 4, "context_length": 16},
    "chameleon": {"vocabulary_map": {"<image>": 0}},
    "hunyuan_v1_dense": {"head_dim": 128},
}


def _filled(config: Any) -> Any:
    """The configuration with small numbers where a default is missing."""
    config = copy.deepcopy(config)
    for part in [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]:
        heads = getattr(part, "num_attention_heads", None) or 8
        for name, value in list(vars(part).items()):
            sized = re.search(r"num|^n_|size|dim|length|layers|experts$|topk|rank", name)
            if value is None and sized and not name.startswith("_"):
                number = heads if "heads" in name else 8
                with contextlib.suppress(Exception):  # it takes no number
                    setattr(part, name, number)
    for name, value in SETTINGS.get(config.model_type, {}).items():
        setattr(config, name, value)
    return config


def _classes(config_class: type) -> Iterator[type[nn.Module]]:
    """The base model and those with a head, then whatever else is in the modelling file."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    mappings = [m for n, m in vars(modeling_auto).items() if re.fullmatch(r"MODEL_\w*MAPPING", n)]
    for mapping in [modeling_auto.MODEL_MAPPING, *mappings]:
        try:
            found = mapping[config_class]
        except KeyError:
            continue
        yield from found if isinstance(found, (tuple, list)) else [found]
    package = config_class.__module__.replace("configuration_", "modeling_")
    module = __import__(package, fromlist=["*"])
    for _, cls in inspect.getmembers(module, inspect.isclass):
        takes_it = getattr(cls, "config_class", None) is config_class
        if issubclass(cls, PreTrainedModel) and takes_it and cls.forward is not nn.Module.forward:
            yield cls


# -- the independent reading ----------------------------------------------------------------------

EPS_ATTRIBUTES = ("eps", "variance_epsilon", "epsilon", "layer_norm_eps", "norm_eps")


def eps_attribute(module: nn.Module) -> float | None:
    """The eps that the module's attributes name."""
    for name in EPS_ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, float):
            return value
    return None


def says_unit_offset(module: nn.Module) -> bool:
    """Whether the source of the class adds one to its weight."""
    source = "".join(
        inspect.getsource(c.forward)
        for c in [type(module)]
        if not c.__module__.startswith("torch.")
    )
    return bool(re.search(r"1(\.0)? \+ self\.weight|self\.weight(\.\w+\(\))? \+ 1", source))


def materialised(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """A real copy with random tensors."""
    real = copy.deepcopy(module).to_empty(device="cpu").double().eval()
    for tensor in (*real.parameters(), *real.buffers()):
        if tensor.is_floating_point():
            value = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            tensor.data.copy_(value.abs() + 0.2 if "var" in _name_of(real, tensor) else value)
    return real


def _name_of(module: nn.Module, tensor: Tensor) -> str:
    return next(n for n, t in (*module.named_parameters(), *module.named_buffers()) if t is tensor)


def inputs_for(spec: NormSpec, generator: torch.Generator) -> Iterator[Tensor]:
    """Random inputs to try: sizes where the spec names them, else small ones."""
    sizes = spec.normalized_shape or ()
    placed = dict(zip(spec.affine_axes or spec.axes, sizes, strict=False))
    least = max([a + 1 if a >= 0 else -a for a in (*spec.axes, *spec.affine_axes)], default=2)
    for rank in (4, 3, 5, 2):
        shape = [2, 6, 8, 10, 4][:rank]
        if rank < least:
            continue
        for axis, size in placed.items():
            shape[axis] = size
        if spec.groups and not placed:
            shape[spec.axes[0]] = 2 * spec.groups
        yield torch.randn(shape, generator=generator, dtype=torch.float64) * 0.02 + 0.01


def reference(spec: NormSpec, x: Tensor, tensors: dict[str, Tensor], eps: float) -> Tensor:
    """The formula of the kind, by PyTorch's own functions where there are any."""
    weight = tensors[spec.weight] + spec.unit_offset if spec.weight else None
    bias = tensors[spec.bias] if spec.bias else None
    if spec.mean and spec.var:
        flat = [t if t is None else t.reshape(-1) for t in (weight, bias)]
        mean, var = tensors[spec.mean].reshape(-1), tensors[spec.var].reshape(-1)
        return F.batch_norm(x, mean, var, *flat, False, 0.0, eps)
    bare = _normalised(spec, x, eps)
    if spec.kind == "grn":
        channel = spec.affine_axes[0]
        size = torch.linalg.vector_norm(x, dim=spec.axes, keepdim=True)
        bare = x * (size / (size.mean(channel, keepdim=True) + eps))
    laid = [_broadcast(t, spec, x) for t in (weight, bias)]
    out = bare if laid[0] is None else bare * laid[0]
    out = out if laid[1] is None else out + laid[1]
    return out + x if spec.kind == "grn" else out


def _normalised(spec: NormSpec, x: Tensor, eps: float) -> Tensor:
    last = x
    if spec.kind in ("affine", "grn"):
        return x
    if spec.kind == "group":
        return F.group_norm(x, spec.groups or 1, None, None, eps)
    if spec.kind == "instance":
        return F.instance_norm(x, eps=eps)
    if spec.kind == "batch":
        return F.batch_norm(x, None, None, None, None, True, 0.0, eps)
    moved = [x.dim() + a if a < 0 else a for a in spec.axes]
    last = x.movedim(moved, list(range(-len(moved), 0)))
    shape = last.shape[-len(moved) :]
    if spec.groups:
        last = last.unflatten(-1, (spec.groups, -1))
        shape = last.shape[-1:]
    last = _over_last(spec, last, tuple(shape), eps)
    last = last.flatten(-2) if spec.groups else last
    return last.movedim(list(range(-len(moved), 0)), moved)


def _over_last(spec: NormSpec, x: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
    dims = tuple(range(-len(shape), 0))
    if spec.kind == "layer" and spec.eps_place == "inside" and not spec.unbiased:
        return F.layer_norm(x, shape, None, None, eps)
    if spec.kind == "layer":
        std = x.std(dims, keepdim=True, correction=int(spec.unbiased))
        return (x - x.mean(dims, keepdim=True)) / (std + eps)
    count = 1 if spec.kind == "scale" else math.prod(shape)
    total = (x * x).sum(dims, keepdim=True) / count
    if spec.eps_place == "inside":
        return x * torch.rsqrt(total + eps)
    if spec.eps_place == "clamp":
        return x / torch.maximum(total.sqrt(), torch.tensor(eps, dtype=x.dtype))
    return x / (total.sqrt() + eps)


def _broadcast(tensor: Tensor | None, spec: NormSpec, x: Tensor) -> Tensor | None:
    if tensor is None or tensor.numel() == 1:
        return tensor
    shape = [1] * x.dim()
    for axis in spec.affine_axes:
        shape[axis] = x.shape[axis]
    return tensor.reshape(shape)


def check(module: nn.Module, spec: NormSpec) -> tuple[float, list[str]]:
    """The relative difference from the reference, and what the class says otherwise of itself."""
    said: list[str] = []
    eps = eps_attribute(module)
    if eps is not None and eps != spec.eps and spec.eps_place == "inside":
        said.append(f"its eps is {eps:g}, found {spec.eps:g}")
    if says_unit_offset(module) != spec.unit_offset:
        said.append("1 + weight in its source, or not")
    generator = torch.Generator().manual_seed(3)
    real = materialised(module, generator)
    used = torch.finfo(torch.float64).eps if spec.machine_eps else spec.eps
    failures: list[str] = []
    for x in inputs_for(spec, generator):
        try:
            return _difference(real, spec, x, used), said
        except Exception as error:  # it takes no input of this rank
            failures.append(str(error))
    return math.inf, [*said, failures[0]]


def _difference(real: nn.Module, spec: NormSpec, x: Tensor, eps: float) -> float:
    with true_float64():
        y = real(x.clone())
        tensors = {**real._parameters, **real._buffers}
        expected = reference(spec, x, tensors, eps)
        if spec.activation is not None:
            expected = real.get_submodule(spec.activation)(expected)
    return float((y - expected).abs().max() / expected.abs().max())


# -- one model ------------------------------------------------------------------------------------


def survey(name: str) -> Record:
    """The distinct modules of one model: recognised, unknown, or missed by name."""
    model = build(name)
    rows: dict[object, Record] = {}
    for path, module in model.named_modules():
        key = configuration(module) or (type(module), path)
        if key in rows:
            rows[key]["count"] += 1
            continue
        row = _row(module)
        if row is not None:
            rows[key] = {**row, "path": path, "count": 1}
    modules = sum(1 for _ in model.modules())
    return {"model": type(model).__name__, "modules": modules, "rows": list(rows.values())}


def _row(module: nn.Module) -> Record | None:
    outcome = examine(module)
    cls = type(module)
    row: Record = {"class": cls.__name__, "file": cls.__module__}
    if isinstance(outcome, NormSpec):
        spec = {k: v for k, v in vars(outcome).items() if v is not None and v is not False}
        error, said = check(module, outcome)
        return {**row, "spec": spec, "error": error, "said": said}
    if isinstance(outcome, Unknown):
        return {**row, "unknown": outcome.reason, "seen": outcome.seen}
    if re.search("norm", cls.__name__, re.IGNORECASE) or _has_vectors(module):
        return {**row, "none": outcome.seen, "leaf": not list(module.children())}
    return None


def _has_vectors(module: nn.Module) -> bool:
    if list(module.children()):
        return False
    return any(t is not None and t.dim() == 1 for t in module._parameters.values()) and not any(
        t is not None and t.dim() > 1 for t in module._parameters.values()
    )


# -- the pool -------------------------------------------------------------------------------------


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        name = pipe.recv()
        start = time.perf_counter()
        try:
            record = survey(name)
        except BaseException as error:
            record = {"failure": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}
        pipe.send({"name": name, **record, "seconds": round(time.perf_counter() - start, 2)})


class _Worker:
    """A process that surveys one model after the other; it is ended when one takes too long."""

    def __init__(self) -> None:
        self.process: Any = None

    def ask(self, name: str, timeout: float) -> Record:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            self.process = context.Process(target=_work, args=(other,), daemon=True)
            self.process.start()
            other.close()
        self.pipe.send(name)
        try:
            if self.pipe.poll(timeout):
                return self.pipe.recv()
            failure = f"not done in {timeout:.0f} s"
        except EOFError:
            failure = "the worker process died"
        self.stop()
        return {"name": name, "failure": failure}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def main() -> None:
    """Parse the command line and run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="run these models again (repeatable)")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds per model")
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    STORE.parent.mkdir(parents=True, exist_ok=True)
    if options.restart:
        STORE.unlink(missing_ok=True)
    records = _read()
    todo = options.only or [n for n in names() if n not in records]
    worker = _Worker()
    for name in [] if options.table else todo:
        records[name] = worker.ask(name, options.timeout)
        with STORE.open("a", encoding="utf-8") as file:
            file.write(json.dumps(records[name]) + "\n")
        line = records[name].get("failure") or f"{len(records[name]['rows'])} kinds of module"
        print(f"{name}: {line}", file=sys.stderr, flush=True)
    worker.stop()
    TABLE.write_text("\n".join(table(list(records.values()))) + "\n", encoding="utf-8")


def _read() -> dict[str, Record]:
    if not STORE.exists():
        return {}
    rows = map(json.loads, STORE.read_text(encoding="utf-8").splitlines())
    return {r["name"]: r for r in rows}


# -- the table ------------------------------------------------------------------------------------


def table(records: list[Record]) -> list[str]:
    """A Markdown file: totals, then the classes by what became of them."""
    rows = [{**row, "model": r["name"]} for r in records for row in r.get("rows", ())]
    failed = sorted((r for r in records if "failure" in r), key=lambda r: r["name"])
    found = [r for r in rows if "spec" in r]
    unknown = [r for r in rows if "unknown" in r]
    missed = [r for r in rows if "none" in r and re.search("norm", r["class"], re.IGNORECASE)]
    wrong = [r for r in found if not r["error"] <= TOLERANCE or r["said"]]
    odd = sorted(
        {r["class"] for r in found if not re.search("norm|bn|ln", r["class"], re.IGNORECASE)}
    )
    return [
        "# Norms recognised by what they compute",
        "",
        f"{len(records)} models ({len(failed)} could not be built), "
        f"{sum(r.get('modules', 0) for r in records)} modules. "
        f"Recognised: {len(found)} (class, configuration) pairs of {_classes_in(found)} classes, "
        f"{sum(r['count'] for r in found)} modules; largest relative difference from the "
        f"reference formula in float64 {max((r['error'] for r in found), default=0):.0e}. "
        f"Unknown with a reason: {_classes_in(unknown)} classes. "
        f"Checked and found different (more than {TOLERANCE:.0e}, or the class says otherwise of "
        f"itself): {len(wrong)}. Recognised under a name without norm, bn or ln: {len(odd)}.",
        "",
        "## Recognised",
        "",
        "| class | kind | axes | eps | 1 + w | cast | models | modules | difference |",
        "|---|---|---|---|---|---|---|---|---|",
        *(_found_line(group) for group in _grouped(found, _kind)),
        "",
        "## Recognised under a name without norm, bn or ln",
        "",
        *(f"- {name}" for name in odd),
        "",
        "## Found different",
        "",
        *(f"- {r['class']} ({r['model']}): {r['error']:.0e} {r['said']}" for r in wrong),
        "",
        "## Unknown",
        "",
        *_reasons(unknown, "unknown"),
        "",
        "## Called a norm, and none",
        "",
        *_reasons(missed, "none"),
        "",
        "## Could not be built",
        "",
        "| model | |",
        "|---|---|",
        *(f"| {r['name']} | {_cell(r['failure'])} |" for r in failed),
    ]


def _kind(row: Record) -> tuple[Any, ...]:
    spec = row["spec"]
    return spec["kind"], tuple(spec["axes"]), spec.get("unit_offset", False)


def _grouped(rows: list[Record], by: Callable[[Record], Any]) -> list[list[Record]]:
    groups: dict[Any, list[Record]] = collections.defaultdict(list)
    for row in rows:
        groups[row["class"], by(row)].append(row)
    return [groups[key] for key in sorted(groups, key=str)]


def _classes_in(rows: list[Record]) -> int:
    return len({(r["class"], r["file"]) for r in rows})


def _found_line(group: list[Record]) -> str:
    spec = group[0]["spec"]
    eps = sorted({r["spec"]["eps"] for r in group})
    shown = ", ".join(f"{e:.4g}" for e in eps[:4]) + (" …" if len(eps) > 4 else "")
    shown += "" if spec["eps_place"] == "inside" else f" ({spec['eps_place']})"
    kind = spec["kind"] + (" + activation" if "activation" in spec else "")
    casts = ", ".join(sorted({r["spec"].get("cast_order", "–") for r in group}))
    axes = ", ".join(map(str, spec["axes"])) + (" in groups" if spec.get("groups") else "")
    return (
        f"| {group[0]['class']} | {kind} | {axes or '–'} | {shown} "
        f"| {'yes' if spec.get('unit_offset') else ''} | {casts} "
        f"| {len({r['model'] for r in group})} | {sum(r['count'] for r in group)} "
        f"| {max(r['error'] for r in group):.0e} |"
    )


def _reasons(rows: list[Record], key: str) -> list[str]:
    lines = ["| class | models | reason |", "|---|---|---|"]
    for group in _grouped(rows, lambda r: r[key]):
        models = sorted({r["model"] for r in group})
        shown = ", ".join(models[:3]) + (" …" if len(models) > 3 else "")
        reason = f"{group[0]['unknown']}: {group[0]['seen']}" if key == "unknown" else group[0][key]
        lines.append(f"| {group[0]['class']} | {shown} | {_cell(reason)} |")
    return lines


def _cell(text: str) -> str:
    text = re.sub(r"'?/[\w./+-]{8,}'?", "…", text)[:200]  # paths of one machine
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
