"""From a module to what it computes: the steps of the probe in order."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.nn.modules.instancenorm import _InstanceNorm

from normswap.probe.alone import Alone, FirstResult
from normswap.probe.candidates import Signature
from normswap.probe.children import with_children
from normswap.probe.conditional import optional_input, with_second_input
from normswap.probe.confirm import confirmed
from normswap.probe.dependence import reach
from normswap.probe.dtype import cast_order
from normswap.probe.layouts import layouts
from normswap.probe.naming import both_ends, named
from normswap.probe.normaliser import fit_normaliser, is_normaliser
from normswap.probe.outcome import Nothing, Outcome
from normswap.probe.pointwise import fit_affine, fit_saturating, plain_affine, stored_statistics
from normswap.probe.response import fit_global_response, fit_local_response
from normswap.spec import NormSpec, Unknown

__all__ = ["by_name", "recognise"]


_AFFINE = Nothing("it is a fixed affine map")


def recognise(module: nn.Module, taken: Signature) -> Outcome:
    """What a candidate computes whose forward takes this."""
    if len(taken.required) not in (1, 2):
        return Nothing("its forward does not take one tensor")
    try:
        alone = Alone(module)
    except Exception as error:  # it holds what cannot be copied
        return by_name(module, Nothing(f"it cannot be copied: {type(error).__name__}: {error}"))
    shapes = layouts(module, alone.tensors)
    if not shapes:
        return by_name(module, Nothing("it takes too large an input"))
    if len(taken.required) == 2:
        return with_second_input(alone, shapes, taken.required)
    accepted = [s for s in shapes if alone(alone.random(s)) is not None]
    if not accepted:
        return _not_run(module, alone, shapes, taken)
    shape, outcome = _first_told(alone, accepted)
    if isinstance(outcome, Nothing):
        return by_name(module, outcome)
    optional = optional_input(alone, accepted, taken.optional)
    if optional is not None:
        return optional
    outcome = with_children(module, alone, shape, outcome)
    if isinstance(outcome, NormSpec) and isinstance(module, _InstanceNorm):
        outcome = _as_instance(outcome)
    if isinstance(outcome, NormSpec):
        return replace(outcome, cast_order=cast_order(module, outcome, shape))
    return outcome


def _as_instance(spec: NormSpec) -> NormSpec:
    """Without an affine an InstanceNorm is a LayerNorm over the last axes: the class decides."""
    if spec.kind != "layer" or spec.affine_axes:
        return spec
    return replace(spec, kind="instance", axes=tuple(range(2, 2 + len(spec.axes))))


def _first_told(alone: Alone, accepted: list[tuple[int, ...]]) -> tuple[tuple[int, ...], Outcome]:
    """The first shape of input on which it can be told.

    If there is none, most shapes have to agree that it is a norm at all.
    """
    seen: dict[tuple[int, ...], Outcome] = {}
    for shape in accepted:
        outcome = _on(alone, shape, accepted)
        if isinstance(outcome, NormSpec):
            return shape, outcome
        seen[shape] = outcome
    unknown = [(s, o) for s, o in seen.items() if isinstance(o, Unknown)]
    nothing = [(s, o) for s, o in seen.items() if isinstance(o, Nothing)]
    return unknown[0] if len(unknown) > len(nothing) else nothing[0]


def _not_run(
    module: nn.Module, alone: Alone, shapes: list[tuple[int, ...]], taken: Signature
) -> Outcome:
    """No tensor of a fitting shape comes back: it may need a second one, or return several."""
    for shape in shapes:
        first = FirstResult(alone)
        found = reach(first, shape)
        if found is not None and found.axes and is_normaliser(first, shape):
            return Unknown("several-results", "it returns more than one tensor")
    for name in taken.optional:
        outcome = with_second_input(alone, shapes, (taken.required[0], name), by_name=True)
        if isinstance(outcome, Unknown):
            return outcome
    alone(alone.random(shapes[0]))
    seen = f"no tensor of a fitting shape runs through it alone: {alone.failure or 'other shape'}"
    return by_name(module, Nothing(seen), "cannot-run")


def by_name(module: nn.Module, outcome: Nothing, reason: str = "unlike-any") -> Outcome:
    """What calls itself a norm and has a gain for each channel gets an answer, though no spec."""
    gains = [p for p in module._parameters.values() if p is not None]
    vectors = any(p.numel() > 1 for p in gains) and all(
        p.numel() == max(p.shape, default=1) for p in gains
    )
    leaf = not any(module._modules.values())
    called_so = "norm" in type(module).__name__.lower()
    if leaf and vectors and called_so and outcome != _AFFINE:
        return Unknown(reason, outcome.seen)
    return outcome


# -- one input ------------------------------------------------------------------------------------


def _on(alone: Alone, shape: tuple[int, ...], accepted: list[tuple[int, ...]]) -> Outcome:
    """What it computes on inputs of this shape."""
    found = reach(alone, shape)
    if found is None:
        return Nothing("its result is not finite")
    if not found.axes:
        return _pointwise(alone, shape, accepted)
    normalises = is_normaliser(alone, shape)
    if found.ragged or not normalises:
        response = fit_local_response(alone, shape) or fit_global_response(alone, found)
        if response is None and not normalises:
            return Nothing("its result grows with its input, or is no function of its direction")
        if response is not None:
            alike = [s for s in accepted if len(s) > 2 and _same_channels(response, s, shape)]
            return confirmed(alone, [response], alike)
    if found.holes and not found.ragged:
        return Unknown("welded", "some of its results do not change with its statistics")
    if found.ragged:
        return Unknown(
            "pattern", "entries have an effect on others that are no full axes or equal groups"
        )
    fit = fit_normaliser(alone, found)
    if isinstance(fit, Unknown):
        return fit
    return confirmed(alone, list(named(fit)), accepted)


def _pointwise(alone: Alone, shape: tuple[int, ...], accepted: list[tuple[int, ...]]) -> Outcome:
    if not any(t.dim() for t in alone.tensors.values()):
        return Nothing("it maps every entry by itself and has no tensors")
    affine = fit_affine(alone, shape)
    if affine is None:
        saturating = fit_saturating(alone, shape)
        if saturating is not None:
            return confirmed(alone, list(both_ends(saturating, len(shape))), accepted)
        if _over_batch_in_training(alone, shape):
            return Unknown("welded", "in training it is a norm, in eval no affine map")
        return Nothing("it maps every entry by itself, not affinely")
    spec = stored_statistics(affine, alone.tensors)
    if spec is not None:
        spec = _with_training(alone, spec, shape)
        return confirmed(alone, [spec], [s for s in accepted if len(s) == len(shape)])
    spec = plain_affine(affine, alone.tensors)
    if spec is None:
        if _over_batch_in_training(alone, shape):
            return Unknown("stored-statistics", "how its eval result hangs on them is not known")
        return _AFFINE
    return confirmed(alone, list(both_ends(spec, len(shape))), accepted)


def _with_training(alone: Alone, spec: NormSpec, shape: tuple[int, ...]) -> NormSpec:
    """The kind by what it does in training mode, and the axes that its statistics are over."""
    channels = spec.affine_axes or (1,)
    alone.module.train()
    found = reach(alone, shape)
    alone.module.eval()
    alone.redraw()
    axes = tuple(a for a in range(len(shape)) if a not in channels)
    if found is None or not found.axes:
        return replace(spec, axes=axes, affine_axes=channels)
    kind = "batch" if 0 in found.axes else "instance"
    return replace(spec, kind=kind, axes=found.axes, affine_axes=channels)


def _over_batch_in_training(alone: Alone, shape: tuple[int, ...]) -> bool:
    alone.module.train()
    found = reach(alone, shape)
    is_norm = found is not None and 0 in found.axes and is_normaliser(alone, shape)
    alone.module.eval()
    alone.redraw()
    return is_norm


def _same_channels(spec: NormSpec, a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    axes = spec.affine_axes or (1,)
    return all(a[axis] == b[axis] for axis in axes)
