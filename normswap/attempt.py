"""Run a model once and leave no trace of it: modes, attributes, buffers, caches, random states."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normswap.caches import forget_cached
from normswap.inputs import Inputs
from normswap.outputs import flatten

__all__ = ["Outcome", "attempt"]


@dataclass(frozen=True)
class Outcome:
    """What one run gave: outputs by path, or the error."""

    outputs: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    error: str | None = None


def attempt(
    model: nn.Module, inputs: Inputs, arithmetic: AbstractContextManager[None] | None = None
) -> Outcome:
    """One run in evaluation mode, in the model's own dtype unless ``arithmetic`` says otherwise.

    Random numbers are the same in every run. An error of the model is part of the outcome.
    """
    given = copy.deepcopy(inputs.map(Tensor.detach))  # models write to inputs, caches grow
    tensors = (*model.parameters(), *model.buffers(), *given.tensors())
    with _undisturbed(model), _fixed_randomness({t.device for t in tensors}), ExitStack() as stack:
        stack.enter_context(forget_cached(model))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(arithmetic or torch.no_grad())
        try:
            return Outcome(flatten(model(*given.args, **given.kwargs), inputs.outputs))
        except Exception as error:  # of any kind: the code is the user's
            first_line = (str(error).strip().splitlines() or [""])[0]
            return Outcome(error=f"{type(error).__name__}: {first_line}")


@contextmanager
def _undisturbed(model: nn.Module) -> Generator[None]:
    """Put back what a forward pass may change: modes, attributes, containers, buffers."""
    modules = list(model.modules())
    attributes = [dict(vars(module)) for module in modules]
    containers = [
        (value, copy.copy(value))
        for values in attributes
        for value in values.values()
        if isinstance(value, (dict, list, set))
    ]
    tensors = [(tensor, tensor.detach().clone()) for tensor in _written_in_forward(model)]
    try:
        if model.training:
            for module in modules:  # not `.eval()`, which classes override to merge weights
                module.training = False
        yield
    finally:
        for module, values in zip(modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(values)
        for container, before in containers:
            _restore(container, before)
        with torch.no_grad():
            for tensor, before in tensors:
                if not torch.equal(tensor, before):
                    tensor.copy_(before)


def _written_in_forward(model: nn.Module) -> list[Tensor]:
    """Buffers, and the embeddings that are renormalised in place when they are read."""
    renormalised = [m for m in model.modules() if getattr(m, "max_norm", None) is not None]
    weights = [p for module in renormalised for p in module.parameters(recurse=False)]
    return [*model.buffers(), *weights]


def _restore(container: Any, before: Any) -> None:
    if isinstance(container, list):
        container[:] = before
    else:
        container.clear()
        container.update(before)


@contextmanager
def _fixed_randomness(devices: set[torch.device]) -> Generator[None]:
    """The same random numbers in every run, and the caller's states afterwards."""
    cuda = sorted({device.index or 0 for device in devices if device.type == "cuda"})
    numpy_random: Any = getattr(sys.modules.get("numpy"), "random", None)
    states = random.getstate(), numpy_random.get_state() if numpy_random else None
    with torch.random.fork_rng(devices=cuda):
        # `torch.manual_seed` would seed accelerators that this run does not use.
        torch.default_generator.manual_seed(0)
        for index in cuda:
            torch.cuda.default_generators[index].manual_seed(0)
        random.seed(0)
        if numpy_random:
            numpy_random.seed(0)
        try:
            yield
        finally:
            random.setstate(states[0])
            if numpy_random:
                numpy_random.set_state(states[1])
