"""Placement of norms in random transformers: what must hold whenever it is read or converted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from helpers import covers, relative_error, state_copy
from placement_models import place
from random_transformers import Network, seeded_transformer
from strategies import RandomChoices
from torch import nn
from transformer_checks import INPUTS, TOLERANCE, is_norm, outputs
from transformer_model import Block

import normswap as ns


@dataclass(frozen=True)
class Way:
    """A conversion with its options."""

    to: str
    skip: str = "clean"
    scale: str = "carried"
    calibrated: bool = False

    def __repr__(self) -> str:
        option = {"pre": self.skip, "post": self.scale}.get(self.to, "")
        return " ".join(filter(None, (self.to, option, "with batches" * self.calibrated)))

    @property
    def keeps_function(self) -> bool:
        """Whether everything that it changes is to be exact."""
        normalised = self.to == "pre" and self.skip == "normalised"
        carried = self.to == "post" and self.scale == "carried"
        return normalised or carried or self.to == "residual-dual"


WAYS = (
    Way("pre"),
    Way("pre", calibrated=True),
    Way("pre", skip="normalised"),
    Way("post"),
    Way("post", scale="calibrated", calibrated=True),
    Way("post", scale="none"),
    Way("sandwich"),
    Way("sandwich", calibrated=True),
    Way("deepnorm", calibrated=True),
    Way("residual-dual"),
)


def seeded_ways(seed: int, count: int = 4) -> list[Way]:
    """A few ways, other ones for each seed."""
    choices = RandomChoices(3 * 10**9 + seed)
    ways = list(WAYS)
    return [ways.pop(ways.index(choices.choose(ways))) for _ in range(count)]


def seeded_network(seed: int) -> Network:
    """The network of a seed; every other one is tamed."""
    network = seeded_transformer(seed)
    return tamed(network) if seed % 2 else network


TAMED = ("post", "pre", "post", "sandwich", "post", "parallel", "branch")


def tamed(network: Network) -> Network:
    """The network with blocks of one placement, called once, and nothing else on its stream.

    Otherwise few networks could be converted.
    """
    recipe = network.recipe
    first = recipe.blocks[0]
    placement = TAMED[recipe.seed % len(TAMED)]
    fine = first.residual in PLAIN_RESIDUALS
    norms = tuple(replace(norm, bypassed=False) for norm in first.norms)
    blocks = tuple(
        replace(
            block,
            placement=placement,
            norms=norms,
            same_norm=False,
            residual=first.residual if fine else "add",
            layer_scale=False,
        )
        for block in recipe.blocks
    )
    order = tuple(range(len(blocks)))
    final = recipe.norm and replace(recipe.norm, form=norms[-1].form)
    plain = replace(
        recipe,
        blocks=blocks,
        order=order,
        steps=(),
        norm=final,
        encoder=None,
        shared_mlp=False,
        reused_norm=False,
    )
    return Network(plain)


# What the recipe declares


FORMS = {
    "pre": "pre",
    "post": "post",
    "sandwich": "sandwich",
    "branch": "branch-output",
    "parallel": "parallel",
    "parallel_two": "parallel",
}
PLAIN_RESIDUALS = ("add", "add_", "swapped", "scaled_branch", "wide")


def declared_forms(network: Network) -> list[str] | None:
    """The form of each sublayer of a network that says it; else ``None``."""
    recipe = network.recipe
    blocks = [recipe.blocks[i] for i in recipe.order]
    unusual = recipe.steps or recipe.encoder or recipe.shared_mlp or recipe.reused_norm
    if unusual or not all(map(_is_plain, blocks)):
        return None
    return [form for block in blocks for form in _forms(block)]


def _is_plain(block: Block) -> bool:
    usual = not block.same_norm and block.residual in PLAIN_RESIDUALS
    return usual and block.placement in FORMS


def _forms(block: Block) -> list[str]:
    count = (block.attention is not None) + (block.mlp is not None)
    if block.placement.startswith("parallel"):
        return [FORMS[block.placement] if count == 2 else "pre"]
    return [FORMS[block.placement]] * count


def structure_faults(network: Network) -> list[str]:
    """What is wrong with the structure that is read."""
    structure = ns.residual_structure(network.model(), network.inputs())
    found = [s.form for stack in structure.stacks for s in stack.sublayers]
    declared = declared_forms(network)
    if declared is not None and found != declared:
        return [f"read as {found}, declared as {declared}"]
    norms = {name for name, module in network.model().named_modules() if is_norm(module)}
    named = {
        name
        for stack in structure.stacks
        for s in stack.sublayers
        for name in (*s.input_norms, *s.output_norms, *s.stream_norms)
    }
    unknown = {name for name in named if "#" not in name and ":" not in name} - norms
    return [f"no norms: {sorted(unknown)}"] if unknown else []


# Conversions


def conversion_faults(network: Network, way: Way) -> tuple[list[str], Any]:
    """What is wrong with a conversion (empty if nothing is), and its report.

    Raises:
        RefusedError: nothing can be converted.
    """
    model, inputs = network.model(), network.inputs()
    state, modules = state_copy(model), dict(model.named_modules(remove_duplicate=False))
    hooks = _hooks(model)
    options: dict[str, Any] = {"skip": way.skip, "scale": way.scale}
    if way.calibrated:
        options["calibration"] = [network.inputs(seed=5), network.inputs(seed=6, batch=1)]
    try:
        new, report = place(model, way.to, inputs, verify=False, **options)
    finally:
        assert relative_error(state, model.state_dict()) == 0, "the original's tensors changed"
        assert dict(model.named_modules(remove_duplicate=False)) == modules
        assert _hooks(model) == hooks, "a hook was left"
    faults = [*report_faults(model, new, report, way)]
    exact = {site.status for site in report.sites} <= {"exact", "refused"}
    for given in INPUTS:
        example = network.inputs(**given)
        expected, found = outputs(network.model(), example), outputs(new, example)
        error = relative_error(expected, found)
        if exact and not error < TOLERANCE:
            faults.append(f"outputs differ by {error:.1e} on {given}")
    again = type(report.plan).from_json(report.plan.to_json()).apply(network.model())
    if relative_error(outputs(new, inputs), outputs(again, inputs)) != 0:
        faults.append("the plan from JSON makes another model")
    return faults, report


def _hooks(model: nn.Module) -> list[tuple[int, int]]:
    return [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]


def report_faults(model: nn.Module, new: nn.Module, report: Any, way: Way) -> Iterator[str]:
    """Norms without an answer, wrong statuses, a mapping that is not complete."""
    for name, module in model.named_modules():
        if is_norm(module) and not covers(report, name):
            yield f"{name} has no answer"
    names = [site.name for site in report.sites]
    if len(names) != len(set(names)):
        yield f"a site appears twice: {names}"
    for site in report.sites:
        if site.status == "refused" and not (site.reason and site.detail):
            yield f"{site.name}: refused without a reason"
        if site.status == "approximate" and way.keeps_function:
            yield f"{site.name}: approximate though only exact was asked for"
    targets = [row.target for row in report.mapping]
    if len(targets) != len(set(targets)):
        yield f"a tensor is mapped twice: {sorted(t for t in targets if targets.count(t) > 1)}"
    before, after = model.state_dict(), new.state_dict()
    told = set(targets)
    for name, tensor in after.items():
        kept = name in before and torch.equal(before[name], tensor)
        aliases = next((a for a in report.plan.aliases.values() if name in a), [name])
        if not kept and not told & set(aliases):
            yield f"{name} is new or another and the mapping does not say so"
    sources = {source for row in report.mapping for source in row.sources}
    gone = set(before) - set(after)
    for name in gone:
        if name not in sources and name not in report.plan.removed:
            yield f"{name} is gone and the mapping does not say so"


@torch.no_grad()
def check_conversion(network: Network, way: Way) -> Any:
    """Convert and require everything; the report, or the refusal."""
    try:
        faults, report = conversion_faults(network, way)
    except ns.NormswapError as error:
        return error
    assert not faults, f"{way}: {faults}\n{network}\n{report}"
    return report
