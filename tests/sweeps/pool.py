"""A pool of worker processes with a time limit each, and records kept as JSON lines.

A sweep is a function of a name that returns a record; it can be stopped and resumed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]
Sweep = Callable[[str], Record]


def _work(pipe: Connection, sweep: Sweep) -> None:
    torch.set_num_threads(1)
    while True:
        name = pipe.recv()
        start = time.perf_counter()
        try:
            record = sweep(name)
        except BaseException as error:
            record = failure(error)
        pipe.send({"name": name, **record, "seconds": round(time.perf_counter() - start, 2)})


class BuildError(RuntimeError):
    """A model could not be built, or ran with none of the inputs."""


def failure(error: BaseException) -> Record:
    """What to record of an error: its text and where it was raised."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    text = re.sub(r"/\S*?/site-packages/", "", " ".join(str(error).split()))[:300]
    if isinstance(error, BuildError):
        return {"failure": text, "stage": "build"}
    place = "" if frame is None else f"{Path(frame.tb_frame.f_code.co_filename).name}"
    line = 0 if frame is None else frame.tb_lineno
    return {"failure": f"{type(error).__name__}: {text} ({place}:{line})", "stage": "sweep"}


class _Worker:
    """A process that sweeps one model after the other; it is ended when one takes too long."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.process: Any = None

    def ask(self, name: str, timeout: float) -> Record:
        if self.process is None:
            context = multiprocessing.get_context("spawn")
            self.pipe, other = context.Pipe()
            self.process = context.Process(target=_work, args=(other, self.sweep), daemon=True)
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
        return {"name": name, "failure": failure, "stage": "time"}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def run(
    sweep: Sweep,
    todo: Sequence[str],
    processes: int,
    timeout: float,
    done: Callable[[Record], None],
) -> None:
    """Sweep every name in one of the workers and hand each record to ``done``."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in todo:
        waiting.put(name)
    lock = threading.Lock()

    def serve() -> None:
        worker = _Worker(sweep)
        while True:
            try:
                name = waiting.get_nowait()
            except queue.Empty:
                break
            record = worker.ask(name, timeout)
            with lock:
                done(record)
        worker.stop()

    threads = [threading.Thread(target=serve) for _ in range(processes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def read(store: Path) -> dict[str, Record]:
    """The last record of every name."""
    if not store.exists():
        return {}
    rows = map(json.loads, store.read_text(encoding="utf-8").splitlines())
    return {r["name"]: r for r in rows}


def main(
    description: str | None,
    store: Path,
    table: Path,
    *,
    names: Callable[[], list[str]],
    sweep: Sweep,
    line: Callable[[Record], str],
    write: Callable[[list[Record]], list[str]],
    timeout: float = 60.0,
) -> None:
    """Parse the command line, run the sweep, write the table."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--only", action="append", help="run these models again (repeatable)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds per model")
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--failures", action="store_true", help="run those that failed again")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    store.parent.mkdir(parents=True, exist_ok=True)
    if options.restart:
        store.unlink(missing_ok=True)
    records = read(store)
    again = {n for n, r in records.items() if "failure" in r} if options.failures else set()
    todo = (
        _named(names(), options.only)
        if options.only
        else [n for n in names() if n not in records or n in again]
    )

    def done(record: Record) -> None:
        records[record["name"]] = record
        with store.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(line(record), file=sys.stderr, flush=True)

    run(sweep, [] if options.table else todo, options.processes, options.timeout, done)
    table.write_text("\n".join(write(list(records.values()))) + "\n", encoding="utf-8")


def _named(names: list[str], wanted: list[str]) -> list[str]:
    """The names that are wanted, in full or by their first word."""
    return [n for n in names if n in wanted or n.split()[0] in wanted]
