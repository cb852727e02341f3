"""What the sweeps share: a pool of workers, random statistics, one fold, one table.

A sweep is a module with ``names() -> list[str]`` and ``build(name) -> Subject``. Every model runs
in a worker process with a time limit; each result is one JSON line, so that a sweep can be
stopped and resumed, and one model run again with ``--only NAME``.
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import multiprocessing
import re
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]

from helpers import batch_norm_names, covers, is_batch_norm, relative_error, signed  # noqa: E402

RESULTS = HERE.parents[1] / "build" / "sweeps"
WRONG = 1e-7


@dataclass
class Subject:
    """A model to fold and what to run it on."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    label: str = ""


# Random statistics that keep a deep network well conditioned


def as_double(value: Any) -> Any:
    """Floating tensors of a nested value in double precision."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {k: as_double(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(as_double(v) for v in value)
    return value


class _Around:
    """A pre-hook that takes a norm's statistics from its first input and randomises around them."""

    def __init__(self, generator: torch.Generator, sign: str) -> None:
        self.generator, self.sign = generator, sign
        self.done: set[int] = set()

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if id(module) in self.done or not args or not isinstance(args[0], Tensor):
            return
        mean, var = module.running_mean, module.running_var
        if mean is None or var is None:
            return
        self.done.add(id(module))
        x = args[0].detach().double()
        channel = 1 if x.ndim > 1 and x.shape[1] == mean.numel() else x.ndim - 1
        rows = x.movedim(channel, 0).reshape(mean.numel(), -1)
        spread = rows.var(1, unbiased=False)
        spread = spread.clamp_min(max(float(spread.mean()) * 0.05, 1e-3))
        noise = torch.randn(2, mean.numel(), generator=self.generator, dtype=torch.float64)
        mean.copy_(rows.mean(1) + 0.3 * spread.sqrt() * noise[0])
        var.copy_(spread * torch.exp(0.3 * noise[1]))


@torch.no_grad()
def randomise_around(subject: Subject, seed: int = 0, sign: str = "mixed") -> int:
    """Randomise affines and biases, and statistics around those of one forward pass.

    Returns how many of the BatchNorms that pass called; the others get plain random values.
    """
    generator = torch.Generator().manual_seed(seed)
    model = subject.model
    hook = _Around(generator, sign)
    handles = []
    norms = [m for m in model.modules() if is_batch_norm(m)]
    for module in model.modules():
        bias = getattr(module, "bias", None)
        if isinstance(bias, nn.Parameter) and bias.is_floating_point():
            bias.add_(0.1 * torch.randn(bias.shape, generator=generator, dtype=torch.float64))
    for module in norms:
        for name in ("weight", "bias"):
            tensor = getattr(module, name, None)
            if isinstance(tensor, Tensor) and name == "weight":
                tensor.copy_(signed(generator, tensor.numel(), sign))
            elif isinstance(tensor, Tensor):
                tensor.copy_(
                    0.5 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                )
        if isinstance(getattr(module, "running_mean", None), Tensor):
            size = module.running_mean.shape
            module.running_mean.copy_(torch.randn(size, generator=generator, dtype=torch.float64))
            module.running_var.copy_(
                torch.exp(0.5 * torch.randn(size, generator=generator, dtype=torch.float64))
            )
        handles.append(module.register_forward_pre_hook(hook))
    try:
        model(*subject.args, **subject.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return len(hook.done)


# One model


def _outputs(model: nn.Module, subject: Subject, true_float64: bool) -> Any:
    if true_float64:
        from normswap.precision import true_float64 as context

        with context():
            return model(*subject.args, **subject.kwargs)
    with torch.no_grad():
        return model(*subject.args, **subject.kwargs)


def compare(subject: Subject, new: nn.Module) -> tuple[float, str]:
    """Relative difference in plain double precision, in true float64 where that is not enough."""
    try:
        torch.manual_seed(0)
        expected = _outputs(subject.model, subject, False)
        torch.manual_seed(0)
        error = relative_error(expected, _outputs(new, subject, False))
        if error < WRONG:
            return error, "double"
    except Exception as failed:  # some models cast inside and cannot run in plain double
        print(f"plain double: {failed}", file=sys.stderr)
    torch.manual_seed(0)
    expected = _outputs(subject.model, subject, True)
    torch.manual_seed(0)
    return relative_error(expected, _outputs(new, subject, True)), "true float64"


def collapse(detail: str) -> str:
    """The kind of a detail: names and numbers taken out."""
    detail = re.sub(r"[`'\"][^`'\"]*[`'\"]", "*", detail)
    detail = re.sub(r"\b\w+(?:\.\w+)+(?:#\d+)?", "*", detail)
    detail = re.sub(r"[\w*]+:\w+#\d+", "*", detail)
    return re.sub(r"\d+", "N", detail)[:160]


def to_double(subject: Subject) -> bool:
    """Make model and inputs double; put back where the model cannot run so."""
    args, kwargs = subject.args, subject.kwargs
    subject.model.double()
    subject.args, subject.kwargs = as_double(args), as_double(kwargs)
    try:
        _outputs(subject.model, subject, False)
    except (RuntimeError, TypeError):  # makes or casts something to float32 inside
        subject.model.float()
        subject.args, subject.kwargs = args, kwargs
        return False
    return True


def fold_one(subject: Subject, sign: str) -> dict[str, Any]:
    """Randomise, fold in float64, compare; a record of counts."""
    import normswap as ns

    model = subject.model.eval()
    record: dict[str, Any] = {"label": subject.label, "params": _size(model)}
    names = batch_norm_names(model)
    record["bns"] = len(names)
    if not names:
        return record
    record["called"] = randomise_around(subject, sign=sign)
    runs_in_double = to_double(subject)
    start = time.perf_counter()
    kwargs = {"example_kwargs": subject.kwargs} if subject.kwargs else {}
    if subject.args:
        new, report = ns.fold_batchnorm(model, subject.args, verify=False, **kwargs)
    else:
        new, report = ns.fold_batchnorm(model, subject.kwargs, verify=False)
    record["seconds"] = round(time.perf_counter() - start, 2)
    reasons = collections.Counter(s.reason for s in report.sites if s.status == "refused")
    details = collections.Counter(
        f"{s.reason}: {collapse(s.detail)}" for s in report.sites if s.status == "refused"
    )
    record.update(
        sites=len(report.sites),
        folded=sum(s.status == "exact" for s in report.sites),
        refused=dict(reasons),
        details=dict(details),
        unanswered=[n for n in names if not covers(report, n)],
    )
    if not runs_in_double:  # the same plan on a float64 copy, compared in true float64
        assert report.plan is not None
        subject.model = copy.deepcopy(model).double()
        new = report.plan.apply(subject.model)
    record["error"], record["precision"] = compare(subject, new)
    record["wrong"] = not record["error"] < WRONG
    return record


def _size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def plan_inventory(subject: Subject, sign: str) -> dict[str, Any]:
    """What a model holds and whether it runs, without any fold."""
    model = subject.model.eval()
    record: dict[str, Any] = {"label": subject.label, "params": _size(model)}
    record["bns"] = len(batch_norm_names(model))
    if record["bns"]:
        record["called"] = randomise_around(subject, sign=sign)
        with torch.no_grad():
            out = model(*subject.args, **subject.kwargs)
        record["finite"] = relative_error(out, out) == 0.0
    return record


# The pool


def _worker(pipe: Connection, build: Callable[[str], Subject], job: str, sign: str) -> None:
    torch.set_num_threads(1)
    do = fold_one if job == "fold" else plan_inventory
    while True:
        name = pipe.recv()
        if name is None:
            return
        start = time.perf_counter()
        try:
            torch.manual_seed(0)
            subject = build(name)
            record = do(subject, sign)
        except BaseException as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            record = {"failure": f"{text} ({Path(last.filename).name}:{last.lineno})"}
        record["total_seconds"] = round(time.perf_counter() - start, 2)
        pipe.send({"name": name, **record})


class _Member:
    """One worker process and what it is doing."""

    def __init__(self, build: Callable[[str], Subject], job: str, sign: str) -> None:
        self._arguments = (build, job, sign)
        self.name: str | None = None
        self.deadline = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, other = context.Pipe()
        self.process = context.Process(target=_worker, args=(other, *self._arguments), daemon=True)
        self.process.start()
        other.close()

    def give(self, name: str, timeout: float) -> None:
        self.name, self.deadline = name, time.monotonic() + timeout
        self.pipe.send(name)

    def take(self) -> dict[str, Any]:
        """The result; a record of the failure if the process died."""
        name, self.name = self.name, None
        try:
            return self.pipe.recv()
        except EOFError:
            self.restart()
            return {"name": name, "failure": "the worker process died"}

    def restart(self) -> None:
        self.process.kill()
        self.process.join()
        self._start()

    def give_up(self, timeout: float) -> dict[str, Any]:
        name, self.name = self.name, None
        self.restart()
        return {"name": name, "failure": f"not done in {timeout:.0f} s"}


def run_pool(
    names: Sequence[str],
    build: Callable[[str], Subject],
    *,
    job: str,
    sign: str,
    timeout: float,
    processes: int,
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Run every name in one of the workers and hand each record to ``done``."""
    todo = list(reversed(names))
    members = [_Member(build, job, sign) for _ in range(min(processes, len(names)))]
    try:
        while todo or any(m.name for m in members):
            for member in members:
                if member.name is None and todo:
                    member.give(todo.pop(), timeout)
            busy = [m for m in members if m.name]
            ready = wait([m.pipe for m in busy], timeout=1.0)
            for member in busy:
                if member.pipe in ready:
                    done(member.take())
                elif time.monotonic() > member.deadline:
                    done(member.give_up(timeout))
    finally:
        for member in members:
            member.process.kill()


# The table


def write_table(records: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """A Markdown file: totals, a row per model, the refusals by reason and by kind."""
    path.write_text("\n".join(_table(records, title)) + "\n", encoding="utf-8")


def _table(records: Sequence[dict[str, Any]], title: str) -> list[str]:
    records = sorted(records, key=lambda r: r["name"])
    holding = [r for r in records if r.get("bns") and "folded" in r]
    failed = [r for r in records if "failure" in r]
    bns, sites = sum(r["bns"] for r in holding), sum(r["sites"] for r in holding)
    folded = sum(r["folded"] for r in holding)
    wrong = [r["name"] for r in holding if r["wrong"]]
    unanswered = sum(len(r["unanswered"]) for r in holding)
    lines = [
        f"# {title}",
        "",
        f"{len(records)} models, {len(holding)} with BatchNorms: {bns} modules, {sites} sites, "
        f"{folded} folded ({100 * folded / max(sites, 1):.1f} %), {sites - folded} refused, "
        f"{unanswered} without an answer. Wrong outputs (relative difference in float64 of "
        f"{WRONG:.0e} or more): {len(wrong)}{' (' + ', '.join(wrong) + ')' if wrong else ''}. "
        f"Failures: {len(failed)}.",
        "",
    ]
    reasons: collections.Counter[str] = collections.Counter()
    details: collections.Counter[str] = collections.Counter()
    for record in holding:
        reasons.update(record["refused"])
        details.update(record["details"])
    lines += ["| reason | sites |", "|---|---|"]
    lines += [f"| {reason} | {n} |" for reason, n in reasons.most_common()]
    lines += ["", "| model | BatchNorms | folded | refused | difference | seconds |"]
    lines += ["|---|---|---|---|---|---|"]
    for r in holding:
        why = ", ".join(f"{k} {v}" for k, v in sorted(r["refused"].items())) or "–"
        label = f" ({r['label']})" if r["label"] else ""
        mark = " **wrong**" if r["wrong"] else ""
        lines.append(
            f"| {r['name']}{label} | {r['bns']} | {r['folded']} | {why} "
            f"| {r['error']:.0e}{mark} | {r['seconds']:.1f} |"
        )
    lines += ["", "## Refusals by kind", "", "| sites | kind |", "|---|---|"]
    lines += [f"| {n} | {_cell(kind)} |" for kind, n in details.most_common()]
    if failed:
        lines += ["", "## Failures", "", "| model | |", "|---|---|"]
        lines += [f"| {r['name']} | {_cell(r['failure'])} |" for r in failed]
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# The command line


def main(
    title: str,
    stem: str,
    names: Callable[[], list[str]],
    build: Callable[[str], Subject],
    *,
    timeout: float = 180.0,
) -> None:
    """Parse the command line and run the sweep."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--only", action="append", help="run these models again (repeatable)")
    parser.add_argument("--limit", type=int, help="at most this many models")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds per model")
    parser.add_argument("--gammas", choices=("mixed", "positive"), default="mixed")
    parser.add_argument("--inventory", action="store_true", help="build and run, do not fold")
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    options = parser.parse_args()
    job = "inventory" if options.inventory else "fold"
    suffix = "" if options.gammas == "mixed" else f"_{options.gammas}"
    store = RESULTS / f"{stem}{suffix}_{job}.jsonl"
    store.parent.mkdir(parents=True, exist_ok=True)
    if options.restart:
        store.unlink(missing_ok=True)
    records = _read(store)
    todo = options.only or [n for n in names() if n not in records][: options.limit]

    def done(record: dict[str, Any]) -> None:
        records[record["name"]] = record
        with store.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(_line(record), file=sys.stderr, flush=True)

    run_pool(
        todo,
        build,
        job=job,
        sign=options.gammas,
        timeout=options.timeout,
        processes=options.processes,
        done=done,
    )
    if job == "fold":
        write_table(list(records.values()), HERE / f"{stem}{suffix}.md", title)
    print(f"{len(records)} models, {sum('failure' in r for r in records.values())} failures")


def _read(store: Path) -> dict[str, dict[str, Any]]:
    if not store.exists():
        return {}
    lines = store.read_text(encoding="utf-8").splitlines()
    return {r["name"]: r for r in map(json.loads, lines)}


def _line(r: dict[str, Any]) -> str:
    if "failure" in r:
        return f"{r['name']}: FAILED {r['failure']}"
    if "folded" not in r:
        return f"{r['name']}: {r['bns']} BatchNorms, {r['params']:,} parameters {r['label']}"
    mark = "WRONG" if r["wrong"] else "ok"
    return f"{r['name']}: {mark} {r['error']:.1e}, {r['folded']}/{r['sites']} folded {r['refused']}"
