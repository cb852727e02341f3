"""Swap the norms of every causal language model of transformers for those of torch.nn.

Each model type is built in a small configuration on random weights, its norm parameters random
with negative and zero entries, in double precision. Its RMS norms become ``nn.RMSNorm`` and its
layer norms ``nn.LayerNorm`` where that is exact; the logits of both models are compared in true
float64.

``python tests/sweeps/sweep_swap.py`` resumes from ``build/sweeps/swap.jsonl`` and writes
``swap.md``; ``--only llama`` runs one again; ``--table`` only writes.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import json
import math
import multiprocessing
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import torch
from common import HERE, RESULTS, collapse, relative_error
from torch import Tensor, nn

STORE = RESULTS / "swap.jsonl"
TABLE = HERE / "swap.md"
WRONG = 1e-10
LARGEST = 80_000_000  # parameters
MAPPING = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}
Record = dict[str, Any]


def names() -> list[str]:
    """Every model type with a causal language model."""
    from transformers.models.auto import modeling_auto

    return list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


# -- small configurations -------------------------------------------------------------------------

VOCABULARY = 128
WIDTH = 128
DEPTH = re.compile(
    r"(num|n)_(hidden_|encoder_|decoder_|mtp_)?(layers?|blocks)"
    r"|num_\w*_layers|(encoder|decoder)_layers|n_layer|depth"
)
HEADS = re.compile(
    r"(num|n)_(\w*_)?heads?|\w*_heads|\w*_num_heads|num_attention_groups|mamba_n_groups"
    r"|n_groups|\w*attention_heads"
)
HEAD_WIDTH = re.compile(r"(\w*_)?head_dim|\w*headdim|d_kv|\w*_head_size|(q|kv)_channels|head_size")
# Where one number per head or head width is not meant.
KEPT = re.compile(
    r"\w*(kernel|patch|image|window|chunk|block|stride|group|conv|type_vocab|cache|position"
    r"|num_mel|spatial|tile|pool|sliding|max|min|num_channels|expand|state_size|d_state|d_conv"
    r"|batch|beam|return|seq|audio_frame)\w*"
)
WIDTHS = re.compile(
    r"\w*(hidden_size|intermediate_size|hidden_dim|_dim|rank|embd|d_model|n_inner|d_ff|ffn_dim"
    r"|hidden_size_per_layer_input|embedding_size|lru_width|d_inner|ffn_hidden_size|size)\w*"
    r"|dim|d_embed|hidden"
)
FIXED: dict[str, Any] = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "moe_top_k": 2,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_group": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "zero_expert_num": 1,
    "axial_pos_embds": False,
    "num_kv_shared_layers": 0,
    "num_nextn_predict_layers": 0,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
INDEXER = {
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 4,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "reformer": {"is_decoder": True, "attn_layers": ["local", "lsh"], "num_buckets": 2},
    "xlm": {"causal": True},
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {"text_config": INDEXER},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
    },
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "zaya": {"num_experts_per_tok": 1},
    "dory": {
        "num_hidden_layers": 6,
        "layer_types": [
            "sliding_attention",
            "mlp",
            "full_attention",
            "mlp",
            "full_attention",
            "mlp",
        ],
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
}


def shrink(values: dict[str, Any], heads: int, head_width: int) -> dict[str, Any]:
    """A configuration's values with two layers, a small vocabulary and widths divided."""
    values = copy.deepcopy(values)
    depth = next((v for k, v in values.items() if DEPTH.fullmatch(k) and _number(v)), None)
    kept = _one_of_each(values, depth)
    factor = heads * head_width
    for name, value in values.items():
        if name == "per_layer_config" and isinstance(value, dict):
            by_index = {int(k): v for k, v in value.items()}
            chosen = {new: by_index[old] for new, old in enumerate(kept) if old in by_index}
            values[name] = {k: shrink(v, heads, head_width) for k, v in chosen.items()}
        elif isinstance(value, dict):
            inner = re.search(r"config$|^(text|encoder|decoder|vision|audio)", name)
            values[name] = shrink(value, heads, head_width) if inner else _rope(value, head_width)
        elif isinstance(value, list):
            if depth and len(value) == depth and depth > 2:
                values[name] = [value[i] for i in kept]
        elif name in FIXED and value is not None:
            values[name] = FIXED[name]
        elif _number(value):
            values[name] = _smaller(name, value, heads, head_width, factor, len(kept))
    count = values.get("num_attention_heads")
    if values.get("head_dim", 0) is None and count and _number(values.get("hidden_size")):
        values["head_dim"] = values["hidden_size"] // count
    if values.get("num_key_value_heads", 0) is None and count:
        values["num_key_value_heads"] = count
    return values


def _number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _smaller(name: str, value: int, heads: int, head_width: int, factor: int, depth: int) -> int:
    if name.endswith(("token_id", "token_index", "_idx")) or re.search(r"(bo|eo|pa|se)\w_id", name):
        return value if value < VOCABULARY else VOCABULARY - 2
    if "vocab" in name and "type" not in name:
        return min(value, VOCABULARY)
    if DEPTH.fullmatch(name):
        return min(value, depth)
    if HEAD_WIDTH.fullmatch(name):
        return max(1, value // head_width)
    if HEADS.fullmatch(name):
        return max(1, value // heads)
    if WIDTHS.fullmatch(name) and not KEPT.fullmatch(name) and value >= 16:
        return max(8, value // factor)
    return value


def _one_of_each(values: dict[str, Any], depth: int | None) -> list[int]:
    """The layers to keep: the first of each kind in the lists that have an entry a layer."""
    if not depth or depth <= 2:
        return list(range(depth or 2))
    lists = [v for v in values.values() if isinstance(v, list) and len(v) == depth]
    kinds: dict[str, int] = {}
    for index in range(depth):
        kinds.setdefault(repr([entries[index] for entries in lists]), index)
    first = sorted(kinds.values())[:4]
    return first if len(first) > 1 else [0, 1]


def _rope(value: dict[str, Any], head_width: int) -> dict[str, Any]:
    """Rotary settings; sections of the head width shrink with it."""
    if isinstance(value.get("mrope_section"), list):
        value["mrope_section"] = [max(1, n // head_width) for n in value["mrope_section"]]
    return value


def _text_width(values: dict[str, Any]) -> int:
    for part in (values, *(v for v in values.values() if isinstance(v, dict))):
        for name in ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"):
            if _number(part.get(name)):
                return part[name]
    return 1024


def configurations(model_type: str) -> Iterator[Any]:
    """Small configurations to try, the best first."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    default = cls(**OPTIONS.get(model_type, {}))
    values = default.to_dict()
    factor = 2 ** max(0, round(math.log2(_text_width(values) / WIDTH)))
    splits = [(max(1, factor // 4), 4), (max(1, factor // 2), 2), (factor, 1), (1, factor), (2, 2)]
    for heads, head_width in dict.fromkeys([*splits, (1, 1)]):
        yield lambda h=heads, w=head_width: cls.from_dict(
            _with(shrink(values, h, w), OPTIONS.get(model_type, {}))
        )
    for heads, head_width in ((1, 1),):  # a configuration that cannot be made of its own values
        yield lambda h=heads, w=head_width: _in_place(copy.deepcopy(default), h, w)


def _with(values: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The values with those options that are no part of their own; parts were made with theirs."""
    return values | {k: v for k, v in options.items() if not k.endswith("_config")}


def _in_place(config: Any, heads: int, head_width: int) -> Any:
    for name, value in shrink(config.to_dict(), heads, head_width).items():
        if _number(value) or isinstance(value, list):
            setattr(config, name, value)
    return config


def build(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A small model in double precision and the inputs with which it runs."""
    import transformers
    from transformers.models.auto import modeling_auto

    make_model = transformers.AutoModelForCausalLM.from_config
    if model_type.startswith("musicgen"):  # its class takes the configuration of a part
        mapping = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        make_model = getattr(transformers, mapping[model_type])

    errors: list[str] = []
    for make in configurations(model_type):
        try:
            config = make()
            config = config.decoder if model_type.startswith("musicgen") else config
            with torch.device("meta"):
                size = sum(p.numel() for p in make_model(config).parameters())
            if size > LARGEST:
                errors.append(f"{size:,} parameters")
                continue
            torch.manual_seed(0)
            model = make_model(config).eval().double()
            with contextlib.suppress(Exception):  # it has no experts
                model.set_experts_implementation("eager")  # the others take no float64
            randomise_others(model)
        except Exception as error:
            errors.append(_short(error))
            continue
        for inputs in _inputs(config):
            try:
                logits(model, inputs)
            except Exception as error:
                errors.append(_short(error))
                continue
            return model, inputs
    raise RuntimeError("; ".join(dict.fromkeys(errors)))


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"


def _inputs(config: Any) -> Iterator[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    books = getattr(getattr(config, "decoder", config), "num_codebooks", None) or 1
    ids = torch.randint(5, 90, (2, 8), generator=generator)
    yield {"input_ids": ids, "use_cache": False}
    yield {"input_ids": ids}
    many = torch.randint(5, 90, (2 * books, 8), generator=generator)
    yield {"input_ids": many, "use_cache": False}


def logits(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """What the model predicts, in true float64."""
    from normswap.precision import true_float64

    torch.manual_seed(0)
    with true_float64():
        out = model(**inputs)
        return (out.logits if getattr(out, "logits", None) is not None else out[0]).clone()


# -- random parameters ----------------------------------------------------------------------------


@torch.no_grad()
def randomise_others(model: nn.Module) -> None:
    """Random values where a parameter is all zero, so that nothing is hidden behind it."""
    generator = torch.Generator().manual_seed(2)
    for tensor in model.parameters():
        if tensor.is_floating_point() and not tensor.any():
            tensor.copy_(0.05 * torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))


@torch.no_grad()
def randomise_norms(sites: Sequence[Any]) -> None:
    """Random scales, some of them negative and one zero, and random shifts."""
    generator = torch.Generator().manual_seed(3)
    for site in sites:
        for name, tensor in site.module.named_parameters():
            value = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
            if site.spec is not None and name == site.spec.weight and value.numel() > 2:
                value.view(-1)[0] = -float(site.spec.unit_offset)  # a scale of zero
                value.view(-1)[1] = -2.0
            tensor.copy_(value if value.dim() < 3 else 0.1 * value)


# -- one model ------------------------------------------------------------------------------------


def sweep(model_type: str) -> Record:
    """Build, randomise, swap, compare: a record of counts."""
    import normswap as ns

    start = time.perf_counter()
    model, inputs = build(model_type)
    sites = ns.find_norms(model)
    randomise_norms(list(sites))
    record: Record = {
        "class": type(model).__name__,
        "params": sum(p.numel() for p in model.parameters()),
        "norms": len(sites),
        "kinds": dict(collections.Counter(s.spec.kind if s.spec else "unknown" for s in sites)),
        "unseen": _unseen(model, {s.name for s in sites}),
        "build_seconds": round(time.perf_counter() - start, 2),
    }
    called = _calls(model, inputs, [s.name for s in sites])
    before = logits(model, inputs)
    new, report = _swapped(model, inputs, record)
    after = logits(model, inputs)
    error = relative_error(before, logits(new, inputs))
    exact = [s for s in report.sites if s.status == "exact"]
    refused = [s for s in report.sites if s.status == "refused"]
    record.update(
        sites=len(report.sites),
        exact=len(exact),
        classes=dict(
            collections.Counter(type(model.get_submodule(s.name)).__name__ for s in exact)
        ),
        refused=dict(collections.Counter(s.reason for s in refused)),
        details=dict(
            collections.Counter(
                f"{type(model.get_submodule(s.name)).__name__}: {s.reason}: {collapse(s.detail)}"
                for s in refused
            )
        ),
        not_called=[s.name for s in exact if s.name not in called],
        error=error,
        usable=bool(before.isfinite().all()) and float(before.std()) > 0,
        changed_original=not torch.equal(before, after),
    )
    record["wrong"] = not error < WRONG
    record["misplaced"] = [
        s.name for s in exact if type(new.get_submodule(s.name)) not in (nn.RMSNorm, nn.LayerNorm)
    ]
    if record["wrong"]:
        record["alone"] = _alone(model, inputs, before, [s.name for s in exact])
    return record


def _swapped(model: nn.Module, inputs: dict[str, Any], record: Record) -> tuple[nn.Module, Any]:
    """The swap; where it is an error, with example inputs; else of the norms with tensors."""
    import normswap as ns

    try:
        return ns.swap_norms(model, MAPPING, method="exact", verify=False)
    except ns.NormswapError as error:  # the width of a norm without parameters
        record["raised"] = str(error)[:200]
    try:
        out = ns.swap_norms(model, MAPPING, method="exact", verify=False, example_kwargs=inputs)
    except ns.NormswapError as error:
        record["raised_with_inputs"] = str(error)[:200]
    else:
        return out
    return ns.swap_norms(
        model, MAPPING, method="exact", verify=False, where=lambda s: bool(s.module._parameters)
    )


def _unseen(model: nn.Module, found: set[str]) -> dict[str, int]:
    """Leaf modules named as norms that were not found, by class."""
    return dict(
        collections.Counter(
            type(m).__name__
            for n, m in model.named_modules()
            if re.search("norm", type(m).__name__, re.IGNORECASE)
            and n not in found
            and not list(m.children())
        )
    )


def _calls(model: nn.Module, inputs: dict[str, Any], sites: Sequence[str]) -> set[str]:
    called: set[str] = set()
    handles = [
        model.get_submodule(n).register_forward_pre_hook(lambda *_, n=n: called.add(n))
        for n in sites
    ]
    try:
        logits(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return called


def _alone(
    model: nn.Module, inputs: dict[str, Any], before: Tensor, sites: Sequence[str]
) -> dict[str, float]:
    """The norms whose swap alone changes the logits."""
    import normswap as ns

    found: dict[str, float] = {}
    for name in sites[:60]:
        new, _ = ns.swap_norms(model, MAPPING, method="exact", verify=False, where=name)
        error = relative_error(before, logits(new, inputs))
        if not error < WRONG:
            found[name] = error
    return found


# -- the workers ----------------------------------------------------------------------------------


def _work(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        name = pipe.recv()
        start = time.perf_counter()
        try:
            record = sweep(name)
        except BaseException as error:
            frame = error.__traceback__
            while frame is not None and frame.tb_next is not None:
                frame = frame.tb_next
            place = f"{Path(frame.tb_frame.f_code.co_filename).name}:{frame.tb_lineno}"
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
            own = isinstance(error, RuntimeError) and place.startswith(Path(__file__).name)
            record = {
                "failure": text.removeprefix("RuntimeError: ") if own else f"{text} ({place})"
            }
            record["stage"] = "build" if own else "sweep"
        pipe.send({"name": name, **record, "seconds": round(time.perf_counter() - start, 2)})


class _Worker:
    """A process that sweeps one model after the other; it is ended when one takes too long."""

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
        return {"name": name, "failure": failure, "stage": "time"}

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def run(
    todo: Sequence[str], processes: int, timeout: float, done: Callable[[Record], None]
) -> None:
    """Sweep every name in one of the workers and hand each record to ``done``."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in todo:
        waiting.put(name)
    lock = threading.Lock()

    def serve() -> None:
        worker = _Worker()
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


def main() -> None:
    """Parse the command line and run the sweep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", action="append", help="run these models again (repeatable)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds per model")
    parser.add_argument("--restart", action="store_true", help="forget earlier results")
    parser.add_argument("--failures", action="store_true", help="run those that failed again")
    parser.add_argument("--table", action="store_true", help="only write the table")
    options = parser.parse_args()
    STORE.parent.mkdir(parents=True, exist_ok=True)
    if options.restart:
        STORE.unlink(missing_ok=True)
    records = _read()
    again = {n for n, r in records.items() if "failure" in r} if options.failures else set()
    todo = options.only or [n for n in names() if n not in records or n in again]

    def done(record: Record) -> None:
        records[record["name"]] = record
        with STORE.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        print(_line(record), file=sys.stderr, flush=True)

    run([] if options.table else todo, options.processes, options.timeout, done)
    TABLE.write_text("\n".join(table(list(records.values()))) + "\n", encoding="utf-8")


def _read() -> dict[str, Record]:
    if not STORE.exists():
        return {}
    rows = map(json.loads, STORE.read_text(encoding="utf-8").splitlines())
    return {r["name"]: r for r in rows}


def _line(r: Record) -> str:
    if "failure" in r:
        return f"{r['name']}: FAILED {r['failure']} ({r.get('seconds', '-')} s)"
    mark = "WRONG" if r["wrong"] else "ok"
    return (
        f"{r['name']}: {mark} {r['error']:.0e}, {r['exact']}/{r['norms']} exact {r['refused']} "
        f"({r['seconds']} s)"
    )


# -- the table ------------------------------------------------------------------------------------


def table(records: list[Record]) -> list[str]:
    """A Markdown file: totals, a row per model, the refusals by kind, the failures."""
    records = sorted(records, key=lambda r: r["name"])
    ran = [r for r in records if "failure" not in r]
    failed = [r for r in records if "failure" in r]
    wrong = [r for r in ran if r["wrong"]]
    reasons = _sum(ran, "refused")
    classes = _sum(ran, "classes")
    worst = max((r["error"] for r in ran if not r["wrong"]), default=0.0)
    raised = [r["name"] for r in ran if "raised" in r]
    idle = sum(len(r["not_called"]) for r in ran)
    refusals = ", ".join(f"{k} {n}" for k, n in reasons.most_common()) or "none"
    return [
        "# Norms of causal language models swapped for those of torch.nn",
        "",
        f"{len(records)} model types, {len(ran)} built and run: "
        f"{sum(r['norms'] for r in ran)} norms ("
        + ", ".join(f"{n} {k}" for k, n in _sum(ran, "kinds").most_common())
        + f"). Swapped exactly: {sum(r['exact'] for r in ran)}, of {len(classes)} classes "
        f"({idle} of them are not called by the input ids used). Refused: {refusals}. "
        f"Largest relative difference of the logits in float64 {worst:.0e}. "
        f"Wrong ({WRONG:.0e} or more): {len(wrong)}"
        f"{' (' + ', '.join(r['name'] for r in wrong) + ')' if wrong else ''}. "
        f"Original changed: {sum(r['changed_original'] for r in ran)}. "
        f"An error without example inputs: {', '.join(raised) or 'none'}; also with them: "
        f"{', '.join(r['name'] for r in ran if 'raised_with_inputs' in r) or 'none'} "
        f"(then only the norms with parameters, the rest refused by `where`). "
        f"Not built or not run: {len(failed)}.",
        "",
        "| model type | norms | exact | refused | difference | seconds |",
        "|---|---|---|---|---|---|",
        *(_row(r) for r in ran),
        "",
        "## Wrong",
        "",
        *(f"- {r['name']}: {_named(r)}" for r in wrong),
        "",
        "## Refusals by class",
        "",
        "| norms | class and reason |",
        "|---|---|",
        *(f"| {n} | {_cell(kind)} |" for kind, n in _sum(ran, "details").most_common()),
        "",
        "## Named a norm and not taken for one",
        "",
        "| modules | class |",
        "|---|---|",
        *(f"| {n} | {name} |" for name, n in _sum(ran, "unseen").most_common()),
        "",
        "## Swapped, by class",
        "",
        "| norms | class |",
        "|---|---|",
        *(f"| {n} | {name} |" for name, n in classes.most_common()),
        "",
        "## Not built or not run",
        "",
        "| model type | |",
        "|---|---|",
        *(f"| {r['name']} | {_cell(r['failure'][:200])} |" for r in failed),
    ]


def _sum(records: list[Record], key: str) -> collections.Counter[str]:
    total: collections.Counter[str] = collections.Counter()
    for record in records:
        total.update(record[key])
    return total


def _row(r: Record) -> str:
    why = ", ".join(f"{k} {n}" for k, n in sorted(r["refused"].items())) or "–"
    mark = " **wrong**" if r["wrong"] else "" if r["usable"] else " (no finite logits)"
    return (
        f"| {r['name']} | {r['norms']} | {r['exact']} | {why} | {r['error']:.0e}{mark} "
        f"| {r['seconds']:.1f} |"
    )


def _named(r: Record) -> str:
    alone = r.get("alone", {})
    return ", ".join(f"`{n}` {e:.0e}" for n, e in alone.items()) or "no norm alone"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
