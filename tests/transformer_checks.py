"""Exact conversions in tests: what must hold whenever a random transformer is converted."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from helpers import covers, relative_error, state_copy
from random_transformers import Network
from strategies import Choices, RandomChoices
from swapping import CODES
from torch import Tensor, nn
from transformer_parts import WrittenNorm

import normswap as ns
from normswap.precision import true_float64

TOLERANCE = 1e-9
NEW_CODES = {"raw-reader", "norm-writer"}
INPUTS = ({"seed": 0}, {"seed": 1, "batch": 3, "length": 7}, {"seed": 2, "batch": 1, "length": 4})


@dataclass(frozen=True)
class Options:
    """How a network is converted."""

    rewrite: str = "swap"  # fold
    fold_affine: bool = False
    keep_class: bool = False
    scale_only: bool = False
    untie: bool = False

    def __repr__(self) -> str:
        chosen = [name for name, value in vars(self).items() if value is True]
        return " ".join([self.rewrite, *chosen])


SWAPS = tuple(
    Options("swap", affine, keep, untie=untie)
    for affine, keep in ((False, False), (True, False), (False, True))
    for untie in (False, True)
)
FOLDS = tuple(
    Options("fold", scale_only=scale, untie=untie)
    for scale in (False, True)
    for untie in (False, True)
)


def seeded_options(seed: int) -> tuple[Options, Options]:
    """A swap and a fold."""
    choices: Choices = RandomChoices(10**9 + seed)  # other choices than the network's
    return choices.choose(SWAPS), choices.choose(FOLDS)


def convert(model: nn.Module, inputs: Any, options: Options) -> tuple[nn.Module, Any]:
    """The rewrite of the options."""
    if options.rewrite == "fold":
        return ns.fold_affine(
            model, inputs, verify=False, scale_only=options.scale_only, untie=options.untie
        )
    some = any(map(is_layer_norm, model.modules()))  # without any, keep_class is an error
    return ns.swap_norms(
        model,
        {nn.LayerNorm: nn.RMSNorm},
        inputs,
        method="exact",
        verify=False,
        fold_affine=options.fold_affine,
        keep_class=options.keep_class and some,
        untie=options.untie,
    )


def is_norm(module: nn.Module) -> bool:
    """Whether a module is one of the norms of random transformers."""
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm, WrittenNorm))


def is_layer_norm(module: nn.Module) -> bool:
    """Whether it is one that subtracts the mean."""
    written = isinstance(module, WrittenNorm) and module.form.startswith("layer")
    return written or isinstance(module, nn.LayerNorm)


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> Any:
    """What the model returns and what its hooks keep, all computed in float64."""
    with true_float64():
        result = model(**{name: value.clone() for name, value in inputs.items()})
        seen = [m.seen.clone() for m in model.modules() if hasattr(m, "seen")]
    return result, seen


def conversion_faults(network: Network, options: Options) -> tuple[list[str], Any]:
    """What is wrong with a conversion (empty if nothing is), and its report."""
    model, inputs = network.model(), network.inputs()
    state, modules = state_copy(model), dict(model.named_modules(remove_duplicate=False))
    new, report = convert(model, inputs, options)
    faults = [
        *report_faults(model, report, options),
        *output_faults(network, new),
        *site_faults(model, new, report, options),
    ]
    if relative_error(state, model.state_dict()) != 0.0:
        faults.append("the original's parameters changed")
    if dict(model.named_modules(remove_duplicate=False)) != modules:
        faults.append("the original's modules changed")
    if any(output_faults(network, model)):
        faults.append("the original computes something else")
    if options.keep_class:
        faults.extend(kept_class_faults(network, new, options))
    return faults, report


def output_faults(network: Network, new: nn.Module) -> Iterator[str]:
    """Inputs on which the outputs differ from the original's."""
    for given in INPUTS:
        inputs = network.inputs(**given)
        error = relative_error(outputs(network.model(), inputs), outputs(new, inputs))
        if not error < TOLERANCE:
            yield f"outputs differ by {error:.1e} on {given}"


def report_faults(model: nn.Module, report: Any, options: Options) -> Iterator[str]:
    """Norms without an answer, answers that are not known."""
    for name, module in model.named_modules():
        asked = is_norm(module) if options.rewrite == "fold" else is_layer_norm(module)
        if asked and not covers(report, name):
            yield f"{name} has no answer"
    for site in report.sites:
        if site.status == "refused" and site.reason not in CODES | NEW_CODES:
            yield f"{site.name}: unknown reason {site.reason}"
        if site.status == "refused" and not site.detail:
            yield f"{site.name}: no detail"
        if site.status not in ("exact", "refused"):
            yield f"{site.name}: {site.status} though only exact was asked for"
    names = [site.name for site in report.sites]
    if len(names) != len(set(names)):
        yield f"a site appears twice: {names}"


def site_faults(model: nn.Module, new: nn.Module, report: Any, options: Options) -> Iterator[str]:
    """Converted norms that are not what they should be, refused ones of another class."""
    for site in report.sites:
        name = site.name.split(":")[0].split("#")[0]
        old = dict(model.named_modules()).get(name)
        if old is None or not is_norm(old):
            continue
        now = new.get_submodule(name)
        if site.status == "refused":
            if type(old) is not type(now):
                yield f"{name} was refused but is another class"
        elif options.rewrite == "swap" and not options.keep_class and is_layer_norm(now):
            yield f"{name} is still a LayerNorm"
        elif folds(options) and not any(w in site.action for w in ("kept", "nothing to fold")):
            shift_stays = "shift stays" in site.action
            if not has_unit_affine(now, shift_stays=shift_stays):
                yield f"{name} still has an affine"
            as_it_was = shift_stays or options.keep_class or options.rewrite == "fold"
            if not as_it_was and type(now) is not nn.RMSNorm:
                yield f"{name} is no plain RMSNorm"


def folds(options: Options) -> bool:
    """Whether converted norms lose their affine."""
    return options.rewrite == "fold" or options.fold_affine or options.keep_class


def has_unit_affine(module: nn.Module, *, shift_stays: bool) -> bool:
    """Whether gamma is one and beta zero; with its shift a channel may have a gamma of zero."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(module, WrittenNorm) and module.form.endswith("offset"):
        weight = 1 + weight
    ones = weight is None or bool(((weight == 1) | (shift_stays & (weight == 0))).all())
    return ones and (shift_stays or bias is None or not bias.any())


def kept_class_faults(network: Network, new: nn.Module, options: Options) -> Iterator[str]:
    """What stops the unchanged class from loading the result."""
    model = network.model()
    before, after = (
        {name: type(m).__qualname__ for name, m in each.named_modules(remove_duplicate=False)}
        for each in (model, new)
    )
    if before != after:
        yield f"classes changed: {[n for n in before if before[n] != after.get(n)]}"
    added = new.state_dict().keys() - model.state_dict().keys()
    if added:
        yield f"new keys: {sorted(added)}"
    if options.untie:
        return  # the tables are separate, as the flag in the config says
    loaded = copy.deepcopy(model)
    loaded.load_state_dict(new.state_dict(), strict=False)
    yield from (f"loaded by its class: {fault}" for fault in output_faults(network, loaded))


@torch.no_grad()
def check_conversion(network: Network, options: Options) -> Any:
    """Convert and require everything; the report."""
    faults, report = conversion_faults(network, options)
    assert not faults, f"{options}: {faults}\n{network}\n{report}"
    return report
