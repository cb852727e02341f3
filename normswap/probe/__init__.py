"""Recognise a norm by what it computes, whatever its class is called.

The module is copied by itself in float64, with random values in place of its parameters and
buffers (so this works on the meta device, and nothing of the user's is touched), and run:

1. which shapes of one tensor does it take, and return? (`layouts`)
2. one entry changed: which outputs change? The axes. (`dependence`)
3. does the result keep its size when the input grows? (`normaliser`)
4. which statistic explains the results, with which gain and shift, and which of its tensors are
   these? (`normaliser`, `affine`; `pointwise` for stored statistics, DyT and Derf; `response`)
5. inputs as small as its eps: how large is it, and where? (`epsilon`)
6. does the formula of the description give its results, for other tensors, scales and shapes?
   Only then it is called recognised. (`confirm`, `form`)
7. bfloat16 runs: where is the result cast back? (`dtype`)
"""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from normswap.caches import forget_cached
from normswap.probe.candidates import MATRIX, Signature, configuration, signature, why_not
from normswap.probe.conditional import with_projection
from normswap.probe.outcome import Nothing, Outcome
from normswap.probe.recognise import by_name, recognise
from normswap.probe.stock import stock_spec
from normswap.spec import NormSpec, Unknown

__all__ = ["Nothing", "configuration", "examine", "probe", "probe_fixed_affine"]

_cache: dict[object, Outcome] = {}


def probe(module: nn.Module) -> NormSpec | Unknown | None:
    """What a norm computes; `Unknown` if it is one that cannot be told; ``None`` if it is none.

    A NoNorm, ``x * w + b``, is described too, as kind ``"affine"``; it is no norm. A module whose
    child is a norm is ``None``: the child is the norm.

    The module is not run, only a copy of it, and no state of the process is changed. Each class
    and configuration is probed once per process; values of parameters and buffers do not matter.
    """
    outcome = examine(module)
    return None if isinstance(outcome, Nothing) else outcome


def probe_fixed_affine(module: nn.Module) -> NormSpec | None:
    """The spec of a module that computes a BatchNorm in eval from stored statistics, or ``None``.

    Its kind is ``"frozen_batch"``, whatever the module does in training mode; channels are axis 1.
    """
    spec = probe(module)
    if not isinstance(spec, NormSpec) or spec.mean is None or spec.affine_axes != (1,):
        return None
    return replace(spec, kind="frozen_batch")


def examine(module: nn.Module) -> Outcome:
    """Like :func:`probe`, with how it was seen that a module is no norm."""
    if "forward" in module.__dict__ and not hasattr(module, "_hf_hook"):
        return _of_its_class(module)
    if any(p is not None and is_lazy(p) for p in module._parameters.values()):
        return _lazy(module)
    spec = stock_spec(module)
    if spec is not None:
        return spec
    if is_parametrized(module):
        return _parametrised(module)
    reason = why_not(module)
    taken = signature(type(module))
    conditional = reason == MATRIX and taken is not None and len(taken.required) == 2
    if reason is not None and not conditional:
        return by_name(module, Nothing(reason))
    key = configuration(module)
    if key is None:
        return _probed(module, taken, conditional)
    if key not in _cache:
        _cache[key] = _probed(module, taken, conditional)
    return _cache[key]


def _probed(module: nn.Module, taken: Signature | None, conditional: bool) -> Outcome:
    if taken is None:
        return Nothing("what its forward takes is not known")
    norms = {n: m for n, m in module.named_modules() if m is not module and _is_norm(m)}
    with _no_trace(module):
        if conditional:
            found = with_projection(module, taken.required, {id(m) for m in norms.values()})
            return found or Nothing(MATRIX)
        if norms:
            return Nothing(f"{next(iter(norms))!r} inside it is the norm")
        return recognise(module, taken)


def _is_norm(module: nn.Module) -> bool:
    outcome = examine(module)
    return not isinstance(outcome, Nothing) and getattr(outcome, "kind", "") != "affine"


def _of_its_class(module: nn.Module) -> Outcome:
    """A forward that was set on the instance is not looked into; its class may be a norm."""
    plain = copy.copy(module)
    del plain.__dict__["forward"]
    if isinstance(examine(plain), Nothing):
        return Nothing("its forward was replaced, and its class is no norm")
    return Unknown("replaced-forward", "its forward was replaced on the instance")


def _lazy(module: nn.Module) -> Outcome:
    if isinstance(module, _NormBase) or "norm" in type(module).__name__.lower():
        return Unknown("lazy", "it has not seen an input yet: run the model once")
    return Nothing("it has not seen an input yet")


def _parametrised(module: nn.Module) -> Outcome:
    """The tensors of a parametrised norm are computed, so they have no names."""
    bases = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
    if isinstance(module, bases) or "norm" in type(module).__name__.lower():
        return Unknown("parametrised", "one of its tensors is computed from others")
    return Nothing("it is parametrised")


@contextmanager
def _no_trace(module: nn.Module) -> Generator[None]:
    """Random states, warnings and function caches are afterwards as before."""
    state = random.getstate()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch.device("cpu"))  # whatever device new tensors go to outside
        stack.enter_context(forget_cached(module))
        if "torch._dynamo" in sys.modules:  # a compiled forward runs as it is written
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(state)
