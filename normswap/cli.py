"""The `normswap` command: arguments to the library's functions, and their report to the terminal.

Data goes to standard output, everything else to standard error. Exit codes: 0 done (refused sites
are in the report); 1 nothing could be done, something was refused under ``--strict``, or a
verification failed (nothing is written); 2 usage; 3 unreadable or damaged input.
"""

from __future__ import annotations

import functools
import json
import math
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, ParamSpec, cast, get_type_hints

import typer

from normswap.errors import (
    CaptureError,
    CheckpointError,
    NormswapError,
    RefusedError,
    VerificationError,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from normswap.find import NormSite
    from normswap.plan import Plan
    from normswap.report import Report
    from normswap.structure import ResidualStructure
    from normswap.verification import Verification

P = ParamSpec("P")

DONE, FAILED, USAGE, DAMAGED, INTERRUPTED = 0, 1, 2, 3, 130

app = typer.Typer(
    name="normswap",
    help="Verified model surgery on the normalisation layers of PyTorch models.",
    epilog="Exit codes: 0 done; 1 nothing could be done or verification failed (nothing written); "
    "2 usage; 3 unreadable or damaged input.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SRC",
        help="Hugging Face directory, sharded directory, .safetensors, or .pt/.pth/.bin/.ckpt.",
    ),
]
Destination = Annotated[Path, typer.Argument(metavar="DST", help="Directory to write.")]
Arch = Annotated[
    str | None,
    typer.Option(
        help="Architecture, where SRC does not say it: timm:NAME, torchvision:NAME or "
        "package.module:callable."
    ),
]
ArchKwargs = Annotated[
    str | None, typer.Option(metavar="JSON", help="Keywords for the architecture's builder.")
]
InputShape = Annotated[
    list[str] | None,
    typer.Option(
        metavar="SHAPE",
        help="Example input of random values, like 1,3,224,224; once per positional argument; "
        "[3,320,320] is a list of one such tensor.",
    ),
]
InputFile = Annotated[
    Path | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        help="Example inputs: a .safetensors of tensors named like the model's keywords, or 0, 1, "
        "… for positional arguments.",
    ),
]
Outputs = Annotated[
    list[str] | None,
    typer.Option(
        metavar="GLOB",
        help="Only these outputs must stay as they are, like logits*; may be repeated.",
    ),
]
Dtype = Annotated[
    str | None, typer.Option(help="Convert to float32, bfloat16, float16 or float64 on loading.")
]
Where = Annotated[
    list[str] | None,
    typer.Option(metavar="GLOB", help="Only norms whose name matches; may be repeated."),
]
ShardSize = Annotated[
    str, typer.Option(metavar="SIZE", help="Largest weights file, like 500MB or 5GB.")
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace DST if it exists.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Export = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE",
        help="Also export to model.onnx or model.pt2: a bare name in DST, else a path; may be "
        "repeated.",
    ),
]


def _command(name: str) -> Callable[[Callable[P, int]], Callable[P, None]]:
    """Register a command: its result is the exit code, its errors are one line each."""

    def register(function: Callable[P, int]) -> Callable[P, None]:
        @functools.wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                code = function(*args, **kwargs)
            except (typer.Exit, typer.Abort):
                raise
            except Exception as error:
                if os.environ.get("NORMSWAP_DEBUG"):
                    traceback.print_exc()
                code = _fail(error)
            raise typer.Exit(code)

        app.command(name)(run)
        return run

    return register


def _fail(error: Exception) -> int:
    from normswap.checkpoint import DestinationError

    text = " ".join(str(error).split())
    if not isinstance(error, NormswapError):
        text = f"unexpected {type(error).__name__}: {text} (NORMSWAP_DEBUG=1 shows where)"
    typer.echo(f"error: {text}", err=True)
    if isinstance(error, CheckpointError) and not isinstance(error, DestinationError):
        return DAMAGED
    if isinstance(error, NormswapError) and not isinstance(
        error, (CaptureError, RefusedError, VerificationError)
    ):
        return USAGE
    return FAILED


@_command("inspect")
def inspect_model(
    src: Source,
    arch: Arch = None,
    arch_kwargs: ArchKwargs = None,
    input_shape: InputShape = None,
    inputs: InputFile = None,
    where: Where = None,
    as_json: AsJson = False,
) -> int:
    """List the norms of a model, and where they stand in its residual stacks.

    Functional norms are listed only with example inputs.
    """
    import normswap as ns

    model = _load(src, arch, arch_kwargs)
    examples = _example_inputs(input_shape, inputs)
    sites = ns.find_norms(model, examples)
    if where:
        sites = sites.where(where)
    structure = _structure(model, examples)
    if as_json:
        stacks = [] if structure is None else asdict(structure)["stacks"]
        typer.echo(_json({"norms": [_site(site) for site in sites], "stacks": stacks}))
        return DONE
    typer.echo(str(sites))
    if structure is not None and structure.stacks and not where:
        typer.echo(f"\n{structure}")
    return DONE


def _structure(model: nn.Module, examples: Any) -> ResidualStructure | None:
    """The residual structure; ``None`` where the model cannot be run, with a note if it should."""
    import normswap as ns

    try:
        return ns.residual_structure(model, examples)
    except NormswapError as error:
        if examples is not None:
            typer.echo(f"note: no residual structure: {error}", err=True)
        return None


@dataclass(frozen=True)
class _Options:
    """What every command that changes a model takes, with the texts of ``--help``."""

    arch: Arch = None
    arch_kwargs: ArchKwargs = None
    input_shape: InputShape = None
    inputs: InputFile = None
    output: Outputs = None
    where: Where = None
    dtype: Dtype = None
    max_shard_size: ShardSize = "5GB"
    export: Export = None
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan and report; change and write nothing.")
    ] = False
    verify: Annotated[
        bool, typer.Option(help="Compare the outputs with the original's before writing.")
    ] = True
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail if any norm cannot be changed.")
    ] = False
    overwrite: Overwrite = False
    as_json: AsJson = False

    @property
    def outputs(self) -> list[str] | None:
        """The outputs that count."""
        return self.output or None

    @property
    def globs(self) -> list[str] | None:
        """The norms that were chosen by name."""
        return self.where or None

    def model(self, src: Path) -> nn.Module:
        """Load the source."""
        return _load(src, self.arch, self.arch_kwargs, _dtype(self.dtype))


def _changes(name: str) -> Callable[[Callable[..., int]], Callable[..., None]]:
    """Register a command that changes a model: its own options, and those of :class:`_Options`."""

    def register(function: Callable[..., int]) -> Callable[..., None]:
        # Typer reads the signature, whose annotations must be evaluated by now.
        hints = get_type_hints(function, include_extras=True)
        shared = get_type_hints(_Options, include_extras=True)
        own = [
            p.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[p.name])
            for p in signature(function).parameters.values()
            if p.name != "options"
        ]
        common = [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=shared[f.name])
            for f in fields(_Options)
        ]

        def run(**given: Any) -> int:
            options = _Options(**{f.name: given.pop(f.name) for f in fields(_Options)})
            return function(**given, options=options)

        run.__doc__ = function.__doc__
        run.__signature__ = Signature([*own, *common])  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in (*own, *common)}
        return _command(name)(run)

    return register


Target = Annotated[
    Path | None,
    typer.Argument(metavar="DST", help="Directory to write; not needed with --dry-run."),
]
Untie = Annotated[
    bool,
    typer.Option(
        "--untie", help="Separate an output layer from the embedding table where the tie blocks."
    ),
]


@_changes("fold-bn")
def fold_bn(src: Source, dst: Target = None, *, options: _Options) -> int:
    """Fold the BatchNorms of a model into the layers beside them."""
    import normswap as ns

    wish: dict[str, Any] = {"where": options.globs, "outputs": options.outputs}
    return _rewrite(
        src,
        dst,
        options,
        plan=lambda model, examples: ns.plan_fold_batchnorm(model, examples, **wish),
        change=lambda model, examples: ns.fold_batchnorm(
            model,
            examples,
            inplace=True,
            verify=options.verify,
            strict=options.strict,
            **wish,
        ),
        nothing="no BatchNorm could be folded",
    )


@_changes("fold-affine")
def fold_affine(
    src: Source,
    dst: Target = None,
    scale_only: Annotated[
        bool,
        typer.Option(
            "--scale-only",
            help="Leave shifts in the norms, so that no layer gets a new bias and the unchanged "
            "class loads the result.",
        ),
    ] = False,
    untie: Untie = False,
    *,
    options: _Options,
) -> int:
    """Fold scale and shift of layer and RMS norms into the layers that read them."""
    import normswap as ns

    wish: dict[str, Any] = {
        "where": options.globs,
        "outputs": options.outputs,
        "scale_only": scale_only,
        "untie": untie,
    }
    return _rewrite(
        src,
        dst,
        options,
        plan=lambda model, examples: ns.plan_fold_affine(model, examples, **wish),
        change=lambda model, examples: ns.fold_affine(
            model, examples, inplace=True, verify=options.verify, strict=options.strict, **wish
        ),
        nothing="nothing could be folded",
    )


@_changes("swap")
def swap(
    src: Source,
    dst: Target = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="OLD=NEW",
            help="Kinds of norms, like layernorm=rmsnorm or batchnorm=groupnorm; may be repeated.",
        ),
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="auto (exact where possible, with inputs), exact (refuse what is not equal), "
            "copy, or init."
        ),
    ] = "auto",
    fold_affine: Annotated[
        bool,
        typer.Option(
            "--fold-affine",
            help="Fold the scales and shifts of exact RMS norms into their readers.",
        ),
    ] = False,
    keep_class: Annotated[
        bool,
        typer.Option(
            "--keep-class",
            help="LayerNorm to RMSNorm: change weights only, so that the unchanged class loads "
            "the result.",
        ),
    ] = False,
    untie: Untie = False,
    *,
    options: _Options,
) -> int:
    """Swap norms for other norms, their trained parameters carried over."""
    import normswap as ns

    kinds = _mapping(mapping)
    wish: dict[str, Any] = {
        "where": options.globs,
        "outputs": options.outputs,
        "method": method,
        "fold_affine": fold_affine,
        "keep_class": keep_class,
        "untie": untie,
    }
    by_graph = method == "exact" or fold_affine or keep_class or untie

    def inputs(model: nn.Module, examples: Any) -> Any:
        return _own_inputs(model) if examples is None and by_graph else examples

    return _rewrite(
        src,
        dst,
        options,
        plan=lambda model, given: ns.plan_swap_norms(model, kinds, inputs(model, given), **wish),
        change=lambda model, given: ns.swap_norms(
            model,
            kinds,
            inputs(model, given),
            verify=options.verify,
            strict=options.strict,
            **wish,
        ),
        nothing="no norm could be swapped",
    )


@_changes("place")
def place(
    src: Source,
    dst: Target = None,
    to: Annotated[
        str, typer.Option(help="pre, post, sandwich, deepnorm or residual-dual.")
    ] = "pre",
    skip: Annotated[
        str,
        typer.Option(
            help="Post to pre: clean (the true pre-norm, not exact) or normalised (the same "
            "function written the other way round)."
        ),
    ] = "clean",
    scale: Annotated[
        str | None,
        typer.Option(
            help="Pre to post: carried (exact), calibrated (constants), or none (the rotation)."
        ),
    ] = None,
    calibration: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A batch to measure constants on, a .safetensors like --inputs; may be repeated.",
        ),
    ] = None,
    native: Annotated[
        bool,
        typer.Option(
            help="Write a plain model of the class or flag that has the other placement, where "
            "transformers or torch has one."
        ),
    ] = True,
    *,
    options: _Options,
) -> int:
    """Move the norms of a transformer to where another residual form has them."""
    import normswap as ns

    if options.globs or options.outputs:
        raise NormswapError("--where and --output mean nothing here: whole stacks are converted")
    batches = [_example_inputs(None, file) for file in calibration or ()]
    wish: dict[str, Any] = {"skip": skip, "scale": scale, "calibration": batches or None}
    return _rewrite(
        src,
        dst,
        options,
        plan=lambda model, examples: ns.plan_placement(model, to, examples, **wish),
        change=lambda model, examples: ns.convert_placement(
            model,
            to,
            examples,
            native=native,
            verify=options.verify,
            strict=options.strict,
            **wish,
        ),
        nothing="no norm was moved",
    )


def _own_inputs(model: nn.Module) -> Any:
    """What the model says of its own inputs."""
    from normswap.inputs import resolve_inputs

    inputs = resolve_inputs(model, None)
    return inputs.kwargs or inputs.args


def _mapping(texts: list[str] | None) -> dict[type[nn.Module] | str, Any]:
    pairs = [text.partition("=") for text in texts or ()]
    if not pairs or not all(old and new for old, _, new in pairs):
        raise NormswapError("--map is missing or not like layernorm=rmsnorm")
    return {old.strip(): new.strip() for old, _, new in pairs}


def _rewrite(
    src: Path,
    dst: Path | None,
    options: _Options,
    *,
    plan: Callable[[nn.Module, Any], Plan],
    change: Callable[[nn.Module, Any], tuple[nn.Module, Report]],
    nothing: str,
) -> int:
    """Load, plan or change, write, and print the report."""
    from normswap import hub
    from normswap.checkpoint import check_destination
    from normswap.export import check_targets

    targets = [Path(target) for target in options.export or ()]
    if dst is None and not options.dry_run:
        raise NormswapError("DST is missing (only --dry-run goes without)")
    if dst is not None and not options.dry_run:
        check_destination(dst, overwrite=options.overwrite)
        check_targets(targets, overwrite=options.overwrite)
    examples = _example_inputs(options.input_shape, options.inputs)
    model = options.model(src)
    try:
        if options.dry_run:
            report = _planned(plan(model, examples), model, strict=options.strict)
        else:
            with _status("changing the model"):
                model, report = change(model, examples)
    except (RefusedError, VerificationError) as error:
        if error.report is not None:
            _print_report(error.report, options.as_json)
        raise
    plain = report.plan is None and report.placement is not None  # its class is the result
    if not plain and (report.plan is None or not report.plan.changed):
        _print_report(report, options.as_json)
        typer.echo(f"error: {src}: {nothing}; nothing is written", err=True)
        return FAILED
    if dst is not None and not options.dry_run:
        with _status(f"writing {dst}"):
            hub.save_with_exports(
                model,
                dst,
                report,
                exports=targets,
                example_inputs=examples,
                check=options.verify,
                overwrite=options.overwrite,
                max_shard_size=options.max_shard_size,
            )
    _print_report(report, options.as_json)
    return DONE


@_command("apply")
def apply_plan(
    plan: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN", help="A report of --dry-run --json, or a directory that normswap wrote."
        ),
    ],
    src: Source,
    dst: Destination,
    arch: Arch = None,
    arch_kwargs: ArchKwargs = None,
    max_shard_size: ShardSize = "5GB",
    overwrite: Overwrite = False,
) -> int:
    """Carry a plan out on files, tensor by tensor; the model is never in memory as a whole."""
    from normswap import hub

    written = hub.apply_to_directory(
        plan,
        src,
        dst,
        arch=arch,
        arch_kwargs=_arch_kwargs(arch_kwargs),
        max_shard_size=max_shard_size,
        overwrite=overwrite,
        progress=_progress_bar(),
    )
    typer.echo(f"{written.rewrite}: {len(written.mapping)} tensors rewritten, in {dst}")
    return DONE


@_command("verify")
def verify_models(
    a: Annotated[Path, typer.Argument(metavar="A", help="The original, as SRC elsewhere.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="The changed one, such as a DST.")],
    arch: Arch = None,
    arch_kwargs: ArchKwargs = None,
    input_shape: InputShape = None,
    inputs: InputFile = None,
    as_json: AsJson = False,
) -> int:
    """Run two models on the same inputs and compare what they compute."""
    import normswap as ns

    examples = _example_inputs(input_shape, inputs)
    original = _load(a, arch, arch_kwargs)
    changed = _load(b, arch, arch_kwargs)
    with _status("comparing"):
        check = ns.verify(original, changed, examples)
    typer.echo(_json(asdict(check)) if as_json else _verification_text(check))
    if not check.passed:
        typer.echo(f"error: {b} does not compute what {a} computes", err=True)
    return DONE if check.passed else FAILED


@_command("demo")
def demo(as_json: AsJson = False) -> int:
    """Fold a small trained network, check it and time it; nothing is downloaded."""
    from normswap import demo

    demo.run(json=as_json)
    return DONE


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """The entry point: run the command line and exit with its code."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    # A killed run cleans up its partial directory as a failed one does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A module of the user's in the current directory can be named by --arch.
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.insert(0, "")
    try:
        code = app(arguments, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        # Typer's own errors: an unknown option, a missing argument. Their class is not public.
        usage: Any = error
        if not hasattr(usage, "format_message"):
            raise
        text = " ".join(str(usage.format_message()).split())
        typer.echo(f"error: {text}", err=True)
        code = USAGE
    sys.exit(code)


def _load(
    src: Path, arch: str | None, arch_kwargs: str | None, dtype: torch.dtype | None = None
) -> nn.Module:
    keywords = _arch_kwargs(arch_kwargs)
    from normswap.hub import load_model

    with _status(f"reading {src}"):
        model, origin = load_model(src, arch, keywords, dtype)
    for note in origin.notes:
        typer.echo(f"note: {note}", err=True)
    return model


def _arch_kwargs(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        data = json.loads(text)
    except ValueError as error:
        raise NormswapError(f"--arch-kwargs is not JSON ({error}): {text}") from error
    if not isinstance(data, dict):
        raise NormswapError('--arch-kwargs must be a JSON object, like {"depth": 2}')
    return data


def _example_inputs(shapes: list[str] | None, file: Path | None) -> Any:
    """What the options say, as the library's ``example_inputs``; None if they say nothing."""
    if shapes and file is not None:
        raise NormswapError("give --input-shape or --inputs, not both")
    if file is not None:
        from normswap.tensorstore import open_store

        tensors = open_store(file).read_all()
        if all(name.isdecimal() for name in tensors):
            return tuple(tensors[name] for name in sorted(tensors, key=int))
        return tensors
    if not shapes:
        return None
    sizes = [_shape(text) for text in shapes]
    import torch

    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(size, generator=generator) for size in sizes]
    return tuple([t] if s.startswith("[") else t for s, t in zip(shapes, drawn, strict=True))


def _shape(text: str) -> tuple[int, ...]:
    inner = text[1:-1] if text.startswith("[") and text.endswith("]") else text
    try:
        sizes = tuple(int(part) for part in inner.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise NormswapError(f"--input-shape {text!r} is not like 1,3,224,224")
    return sizes


def _dtype(name: str | None) -> torch.dtype | None:
    if name is None:
        return None
    import torch

    names = {"float16": torch.float16, "bfloat16": torch.bfloat16}
    names |= {"float32": torch.float32, "float64": torch.float64}
    if name not in names:
        raise NormswapError(f"--dtype {name!r} is not one of {', '.join(names)}")
    return names[name]


def _planned(plan: Plan, model: nn.Module, *, strict: bool) -> Report:
    """The report of a plan that is not carried out."""
    import normswap as ns

    sites, mapping, notes = tuple(plan.sites), tuple(plan.mapping), tuple(plan.notes)
    report = ns.Report(plan.rewrite, type(model).__name__, sites, mapping, None, notes, plan)
    refused = [site for site in sites if site.status == "refused" and site.reason != "where"]
    if strict and refused:
        raise RefusedError(f"{len(refused)} of {len(sites)} norms are refused", report)
    return report


def _print_report(report: Report, as_json: bool) -> None:
    typer.echo(report.to_json() if as_json else str(report))


def _site(site: NormSite) -> dict[str, Any]:
    """A site as JSON data."""
    return {
        "name": site.name,
        "names": site.names,
        "class": type(site.module).__name__ if site.module is not None else None,
        "spec": asdict(site.spec) if site.spec is not None else None,
        "calls": site.calls,
        "reason": site.reason,
    }


def _json(data: Any) -> str:
    """A JSON text; infinity and NaN, which JSON lacks, become texts."""

    def plain(value: Any) -> Any:
        if isinstance(value, Mapping):
            items = cast("Mapping[Any, Any]", value).items()
            return {str(key): plain(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [plain(item) for item in cast("Sequence[Any]", value)]
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        return value

    return json.dumps(plain(data), indent=1)


def _verification_text(check: Verification) -> str:
    rows = [
        f"skipped  {run.inputs}, {run.dtype}: {run.skipped}"
        if run.skipped
        else f"{'passed' if run.passed else 'FAILED'}   {run.inputs}, {run.dtype}: largest "
        f"relative difference {run.max_rel:.2g}, tolerance {run.tolerance:.2g}"
        for run in check.runs
    ]
    verdict = "the two compute the same" if check.passed else "the two do NOT compute the same"
    return "\n".join([*rows, verdict])


@contextmanager
def _status(text: str) -> Generator[None]:
    """A spinner on a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


def _progress_bar() -> Callable[[int], None] | None:
    """A count of bytes on a terminal."""
    if not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    bar = tqdm(unit="B", unit_scale=True, desc="writing")

    def advance(nbytes: int) -> None:
        bar.update(nbytes)

    return advance
