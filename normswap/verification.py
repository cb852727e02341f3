"""Run the original and the changed model side by side and decide whether they agree.

Two questions, on two sets of inputs:

* *Is the algebra right?* Both run in true float64 (:mod:`normswap.precision`), where a right
  rewrite differs by 1e-12 or so, and a wrong one by far more than 1e-7.
* *Does it hold in the model's own dtype?* Rounding alone moves the outputs of a model, those of a
  deep one a lot. So no fixed bound: the changed model may differ from the original by a few times
  as much as the original differs from its own float64 result.

A model in training mode is verified in evaluation mode, which is what a rewrite is exact for; in a
model in evaluation mode, parts that are in training mode stay so. Modes, buffers, attributes and
random states are put back.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.attempt import Outcome, attempt
from normswap.experts import computed_in_batch
from normswap.inputs import Inputs, concrete, resolve_inputs, vary_inputs
from normswap.outputs import Difference, difference, flatten
from normswap.precision import rounding_noise, true_float64

__all__ = ["Run", "Verification", "verify"]

# Float64 against float64: between the 1e-9 to which deep nets amplify rounding and the smallest
# error of a wrong rewrite (an eps of 1e-6 in place of 1e-5 shows as some 1e-6).
FLOAT64_TOLERANCE = 1e-7
# Two right roundings of one computation differ by up to twice the larger error; 8 leaves room
# for an original that happened to round well.
ROUNDING_FACTOR = 8.0
# In units of roundoff, and added: small nets may round without any error.
ROUNDING_FLOOR = 8.0
# Where rounding in float64 moves the outputs by more than this, agreement would prove nothing.
AMPLIFICATION_LIMIT = 1e-3
NEGLIGIBLE = 1e-9  # ... except in values this small, which are left of a cancellation
# Where the original itself is so far from its float64 result, its own dtype tells nothing.
ROUNDING_LIMIT = 0.1
NOTHING_RETURNED = "the model returned nothing to compare"
NOISE_SAMPLES = 3
SITE_BYTES = 2**30  # outputs of sites that are kept to be compared


@dataclass(frozen=True)
class Run:
    """Both models on one set of inputs in one dtype.

    ``dtype`` is ``"float64"`` for true float64, else the model's own (``"float32"``, or
    ``"bfloat16/float32"``). ``max_rel`` is ``max|a - b| / max(max|a|, 1e-12)`` of the worst output
    tensor. A run that was not possible is ``skipped`` with the reason, and ``passed`` is false.
    ``detail`` says why a run failed, or what else was seen.
    """

    inputs: str
    dtype: str
    max_abs: float
    max_rel: float
    tolerance: float
    passed: bool
    skipped: str | None = None
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """The verdict over all runs, with the numbers of the worst one (of float64 if it ran).

    ``level``: ``"model"`` if whole models were compared, ``"site"`` if only single layers were,
    ``"none"`` if nothing could be run. ``site_errors``: relative difference of the outputs of
    each requested module that was called in both models; infinite where they cannot be compared.
    """

    passed: bool
    level: str
    max_abs: float
    max_rel: float
    tolerance: float
    dtype: str
    runs: tuple[Run, ...] = ()
    site_errors: Mapping[str, float] = field(default_factory=dict[str, float])


def verify(
    original: nn.Module,
    changed: nn.Module,
    example_inputs: Any = None,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    outputs: str | Iterable[str] | None = None,
    sites: Collection[str] = (),
    tolerance: float | None = None,
    float64_pair: tuple[nn.Module, nn.Module] | None = None,
) -> Verification:
    """Compare two models on the given inputs and on a variation of them, without touching either.

    Args:
        original: the model that is right by definition.
        changed: the model to check.
        example_inputs: see :func:`normswap.inputs.normalise_inputs`; ``None`` to build them from
            what ``original`` says of itself.
        example_kwargs: further keyword arguments.
        outputs: globs of the outputs to compare; ``None``: all.
        sites: names of modules of both models whose outputs are compared too, in float64. They
            decide where the models themselves return nothing (no object detected).
        tolerance: the largest relative difference to accept in every run, for changes that are
            not exact.
        float64_pair: the two models with weights held in float64, to be used for the float64
            runs: weights that were computed in float64 and then stored in float32 do not agree to
            1e-12. Without it the float64 runs allow for that one rounding.

    Raises:
        NormswapError: there are no inputs and none can be derived, or they are malformed.
    """
    inputs = concrete(resolve_inputs(original, example_inputs, example_kwargs, outputs))
    pair = _Pair(original, changed, float64_pair, tolerance)
    watch = _SiteWatch(sites)
    blocked = pair.cannot_run()
    if blocked:
        return _verdict([_skipped(inputs, pair.own_dtype, blocked)], watch, None)
    first = _run_all(pair, inputs, watch)
    if first is not None and first.original64.error and pair.hold_in_float64():
        first = _run_all(pair, inputs, watch)
    assert first is not None
    runs = _judge(pair, inputs, first)
    if not (first.original.error and first.original64.error):
        for candidate in vary_inputs(inputs, seed=0):
            second = _run_all(pair, candidate, None, as_before=first)
            if second is not None:
                runs += _judge(pair, candidate, second)
                break
    return _verdict(runs, watch, _judge_sites(pair, inputs, watch))


class _Pair:
    """The two models and how they are to be compared."""

    def __init__(
        self,
        original: nn.Module,
        changed: nn.Module,
        float64_pair: tuple[nn.Module, nn.Module] | None,
        tolerance: float | None,
    ) -> None:
        self.original, self.changed = original, changed
        self.original64, self.changed64 = float64_pair or (original, changed)
        # `stored`: no weight of the float64 runs was ever rounded to a lower precision.
        self.holds_float64 = self.stored_in_float64 = float64_pair is not None
        self.tolerance = tolerance
        dtypes = {p.dtype for model in (original, changed) for p in model.parameters()}
        dtypes = {d for d in dtypes if d.is_floating_point or d.is_complex} or {torch.float32}
        self.own_dtype = "/".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        self.roundoff = max(torch.finfo(dtype).eps for dtype in dtypes) / 2
        # The true float64 run is then the run in the model's own dtype too.
        self.is_float64 = dtypes <= {torch.float64, torch.complex128}
        self.stored_in_float64 = self.stored_in_float64 or self.is_float64

    def hold_in_float64(self) -> bool:
        """Use copies in float64, for models that compare dtypes themselves (``nn.LSTM`` does)."""
        if self.holds_float64 or self.is_float64:
            return False
        try:
            self.original64 = copy.deepcopy(self.original).to(torch.float64)
            self.changed64 = copy.deepcopy(self.changed).to(torch.float64)
        except Exception:  # a model that cannot be copied is judged in its own dtype alone
            return False
        self.holds_float64 = True
        return True

    def wide(self, inputs: Inputs) -> Inputs:
        """The inputs of the float64 runs."""
        if not self.holds_float64:
            return inputs
        return inputs.map(lambda t: t.double() if t.is_floating_point() else t)

    def cannot_run(self) -> str | None:
        """Why nothing can be computed, if so."""
        for model in (self.original, self.changed):
            for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                if tensor.is_meta:
                    return f"{name!r} is on the meta device and has no values to compute with"
        return None


# -- running --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcomes:
    """Both models on the same inputs, in their own dtype and in float64."""

    original: Outcome
    changed: Outcome
    original64: Outcome
    changed64: Outcome


def _run_all(
    pair: _Pair, inputs: Inputs, watch: _SiteWatch | None, as_before: _Outcomes | None = None
) -> _Outcomes | None:
    """Run both models in both ways; ``None`` if the original does not run ``as_before``."""
    original = Outcome(error="float64 is its own dtype")
    changed = original
    if not pair.is_float64:
        original = attempt(pair.original, inputs)
        if as_before is not None and original.error and not as_before.original.error:
            return None
    double = pair.wide(inputs)
    with watch.recording(pair.original64) if watch else nullcontext():
        original64 = _in_float64(pair.original64, double)
    if as_before is not None and original64.error and not as_before.original64.error:
        return None
    if not original.error:
        changed = attempt(pair.changed, inputs)
    changed64 = original64
    if not original64.error:
        with watch.comparing(pair.changed64) if watch else nullcontext():
            changed64 = _in_float64(pair.changed64, double)
    return _Outcomes(original, changed, original64, changed64)


def _in_float64(model: nn.Module, inputs: Inputs) -> Outcome:
    with computed_in_batch(model):  # other forms of experts have no float64 kernel
        return attempt(model, inputs, true_float64())


class _SiteWatch:
    """Compares the outputs of modules by temporary hooks: first one model runs, then the other."""

    def __init__(self, names: Collection[str]) -> None:
        self.errors: dict[str, float] = {}
        self.worst = Difference()
        self._names = names
        self._stored: dict[str, list[dict[str, Tensor]]] = {}
        self._room = SITE_BYTES

    @contextmanager
    def recording(self, model: nn.Module) -> Generator[None]:
        """Store what each site of ``model`` returns, as long as there is room."""

        def store(name: str, output: Any) -> None:
            outputs = flatten(output)
            self._room -= sum(tensor.nbytes for tensor in outputs.values())
            if self._room >= 0:
                self._stored.setdefault(name, []).append(outputs)

        with self._hooks(model, store):
            yield

    @contextmanager
    def comparing(self, model: nn.Module) -> Generator[None]:
        """Compare what each site of ``model`` returns with what was stored, call by call."""

        def measure(name: str, output: Any) -> None:
            calls = self._stored.get(name)
            if calls:
                found = difference(calls.pop(0), flatten(output), exact_integers=False)
                self.errors[name] = max(self.errors.get(name, 0.0), found.max_rel)
                # What is left of a cancellation has no relative error that means anything.
                if found.max_abs <= NEGLIGIBLE:
                    found = Difference(compared=found.compared)
                if found.max_rel > self.worst.max_rel or not self.worst.compared:
                    self.worst = replace(found, where=name)

        with self._hooks(model, measure):
            yield

    @contextmanager
    def _hooks(self, model: nn.Module, fn: Callable[[str, Any], None]) -> Generator[None]:
        modules = dict(model.named_modules(remove_duplicate=False))

        def hook_for(name: str) -> Callable[..., None]:
            return lambda _module, _args, output: fn(name, output)

        handles = [
            modules[name].register_forward_hook(hook_for(name))
            for name in self._names
            if name in modules
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


# -- judging --------------------------------------------------------------------------------------


def _judge(pair: _Pair, inputs: Inputs, outcomes: _Outcomes) -> list[Run]:
    in_float64 = _judge_float64(pair, inputs, outcomes)
    if pair.is_float64:
        return [in_float64]
    return [in_float64, _judge_own(pair, inputs, outcomes, in_float64.passed)]


def _judge_float64(pair: _Pair, inputs: Inputs, outcomes: _Outcomes) -> Run:
    a, b = outcomes.original64, outcomes.changed64
    if a.error:
        return _skipped(inputs, "float64", f"the original does not run in float64: {a.error}")
    if b.error:
        return _failed(inputs, "float64", f"the changed model does not run: {b.error}")
    # Weights that were rounded to half precision decide some argmax the other way.
    exact = pair.stored_in_float64 or pair.roundoff <= torch.finfo(torch.float32).eps
    found = difference(a.outputs, b.outputs, exact_integers=exact)
    if pair.tolerance is not None:
        return _measured(inputs, "float64", found, pair.tolerance)
    if pair.stored_in_float64:
        bound = _Bound(FLOAT64_TOLERANCE, torch.finfo(torch.float64).eps / 2, AMPLIFICATION_LIMIT)
        return _bounded(pair, inputs, "float64", found, outcomes, bound)
    # The weights of the changed model were rounded once. Each op of the original in its own dtype
    # rounds likewise, so the error that this makes says how much one may expect.
    return _bounded(pair, inputs, "float64", found, outcomes, _rounding(pair, outcomes))


def _judge_own(pair: _Pair, inputs: Inputs, outcomes: _Outcomes, right_in_float64: bool) -> Run:
    a, b = outcomes.original, outcomes.changed
    dtype = pair.own_dtype
    if a.error:
        return _skipped(inputs, dtype, f"the original does not run in {dtype}: {a.error}")
    if b.error:
        return _failed(inputs, dtype, f"the changed model does not run: {b.error}")
    found = difference(a.outputs, b.outputs, exact_integers=False)
    if pair.tolerance is not None:
        return _measured(inputs, dtype, found, pair.tolerance)
    if found.kind == "shape" and right_in_float64:
        reason = f"the sizes of outputs depend on rounding: {found.problem}"
        return _skipped(inputs, dtype, reason)
    return _bounded(pair, inputs, dtype, found, outcomes, _rounding(pair, outcomes))


@dataclass(frozen=True)
class _Bound:
    """A largest relative difference, the roundoff that it stands for, and the most it may be."""

    tolerance: float
    roundoff: float
    limit: float


def _rounding(pair: _Pair, outcomes: _Outcomes) -> _Bound:
    """What rounding in the model's own dtype may do, from what it does to the original."""
    exact, rounded = outcomes.original64, outcomes.original
    if exact.error or rounded.error:  # half of the digits: all that can be said then
        return _Bound(math.sqrt(pair.roundoff), pair.roundoff, ROUNDING_LIMIT)
    error = difference(exact.outputs, rounded.outputs, exact_integers=False).max_rel
    tolerance = ROUNDING_FACTOR * error + ROUNDING_FLOOR * pair.roundoff
    return _Bound(tolerance, pair.roundoff, ROUNDING_LIMIT)


def _bounded(
    pair: _Pair,
    inputs: Inputs,
    dtype: str,
    found: Difference,
    outcomes: _Outcomes,
    bound: _Bound,
) -> Run:
    differs = bool(found.problem) or found.max_rel > 0
    if (
        differs
        and bound.tolerance > ROUNDING_FACTOR * bound.limit + ROUNDING_FLOOR * bound.roundoff
    ):
        reason = f"rounding in {pair.own_dtype} alone changes the outputs of the original"
        return _skipped(inputs, dtype, f"{reason}: it overflows, or it decides what is returned")
    tolerance = bound.tolerance
    if not found.problem and found.max_rel > tolerance:
        tolerance = max(tolerance, _noise_bound(pair, inputs, outcomes, found, bound))
    return _measured(inputs, dtype, found, tolerance)


def _noise_bound(
    pair: _Pair, inputs: Inputs, outcomes: _Outcomes, found: Difference, bound: _Bound
) -> float:
    """What random rounding of the original explains, asked before a run is called wrong.

    One rounding is one sample, and a lucky one for a model with few outputs. Noise above the
    limit explains nothing, unless it is about what is left of outputs that cancel to zero.
    """
    exact = outcomes.original64
    if exact.error:
        return 0.0
    double = pair.wide(inputs)
    worst = 0.0
    for seed in range(NOISE_SAMPLES):
        noisy = attempt(pair.original64, double, rounding_noise(bound.roundoff, seed))
        moved = difference(exact.outputs, noisy.outputs, exact_integers=False)
        worst = max(worst, 0.0 if noisy.error or moved.problem else moved.max_rel)
    explains = worst <= bound.limit or found.max_abs <= NEGLIGIBLE
    return ROUNDING_FACTOR * worst if explains else 0.0


def _measured(inputs: Inputs, dtype: str, found: Difference, tolerance: float) -> Run:
    if not found.compared and not found.problem:
        return _skipped(inputs, dtype, NOTHING_RETURNED)
    passed = not found.problem and found.max_rel <= tolerance
    detail = found.problem or found.note
    if not passed and not found.problem:
        detail = f"output {found.where!r} differs" if found.where else "the output differs"
    return Run(
        inputs.describe(), dtype, found.max_abs, found.max_rel, tolerance, passed, detail=detail
    )


def _failed(inputs: Inputs, dtype: str, detail: str) -> Run:
    return Run(inputs.describe(), dtype, math.inf, math.inf, 0.0, False, detail=detail)


def _skipped(inputs: Inputs, dtype: str, reason: str) -> Run:
    return Run(inputs.describe(), dtype, math.inf, math.inf, 0.0, False, skipped=reason)


def _judge_sites(pair: _Pair, inputs: Inputs, watch: _SiteWatch) -> Run | None:
    """All sites together as one run, in which each site is an output."""
    if not (watch.worst.compared or watch.worst.problem):
        return None
    default = FLOAT64_TOLERANCE if pair.stored_in_float64 else math.sqrt(pair.roundoff)
    tolerance = default if pair.tolerance is None else pair.tolerance
    run = _measured(inputs, "float64", watch.worst, tolerance)
    return replace(run, detail=f"site {watch.worst.where!r}: {run.detail}") if run.detail else run


def _verdict(runs: list[Run], watch: _SiteWatch, at_sites: Run | None) -> Verification:
    done = [run for run in runs if not run.skipped]
    level = "model" if done else "none"
    if at_sites is not None and not done:  # nothing was returned (no object detected)
        level, done, runs = "site", [at_sites], [*runs, at_sites]
    telling = [run for run in done if not run.passed]
    telling = telling or [run for run in done if run.dtype == "float64"] or done or runs
    worst = max(telling, key=lambda run: run.max_rel / max(run.tolerance, sys.float_info.min))
    return Verification(
        bool(done) and all(run.passed for run in done),
        level,
        worst.max_abs,
        worst.max_rel,
        worst.tolerance,
        worst.dtype,
        tuple(runs),
        watch.errors,
    )
