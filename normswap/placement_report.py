"""What a report says of moved norms: the forms, the drift, the caller's metric, what to do next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

from normswap.collapse import collapse_names
from normswap.drawing import blocks_svg, layer_length
from normswap.init import deepnorm_scales
from normswap.rendering import Section, Table, short_number
from normswap.structure import ResidualStructure, Stack

__all__ = ["Placement", "advice", "drift", "evaluation", "structure"]

_LONGEST_DRIFT = 12  # rows of a short report


@dataclass(frozen=True)
class Placement:
    """Where the norms of a model stood before and after, and what that did.

    Attributes:
        before: the structure of the original.
        after: of the converted model.
        skip: what the skips read: ``"clean"`` (the stream) or ``"normalised"``; ``""`` where the
            target leaves no choice.
        layer_drift: for each sublayer, and the end, the relative difference of what is read there.
        evaluation: the caller's metric before and after.
        target: the placement asked for, where the form of ``after`` does not say it.
    """

    before: ResidualStructure
    after: ResidualStructure
    skip: str
    layer_drift: tuple[tuple[str, float], ...] = ()
    evaluation: tuple[float, float] | None = None
    target: str = ""

    @property
    def change(self) -> str:
        """``post → pre``, or nothing where the form stayed."""
        before, after = self.before.form, self.after.form
        return _change(before, after) if before != after else ""


def structure(placement: Placement) -> Section:
    """A line a stack, with a drawing of the first one that changed."""
    before, after = placement.before.stacks, placement.after.stacks
    lines = [_stack_line(old, new) for old, new in zip_longest(before, after)]
    skips = {
        "clean": "skip: clean (it reads the stream in front of the norm)",
        "normalised": "skip: normalised (it reads what the branch reads)",
    }
    if placement.skip:
        lines.append(skips.get(placement.skip, f"skip: {placement.skip}"))
    pairs = list(zip(before, after, strict=False))
    changed = [pair for pair in pairs if pair[0].form != pair[1].form]
    changed += [pair for pair in pairs if pair[0] != pair[1]]
    drawing = blocks_svg(*changed[0]) if changed else ""
    return Section("Structure", paragraphs=tuple(lines), drawing=drawing)


def _stack_line(old: Stack | None, new: Stack | None) -> str:
    either = old or new
    assert either is not None
    parts = [_change(old.form if old else "gone", new.form if new else "gone")]
    if old is None:
        parts = [f"new, {either.form}"]
    parts.append(_plural(len(either.sublayers), "sublayer"))
    for what in ("embedding", "final"):
        counts = [len(getattr(stack, f"{what}_norms")) if stack else 0 for stack in (old, new)]
        if counts[0] != counts[1]:
            parts.append(f"{what} norms {counts[0]} → {counts[1]}")
    return f"{either.name or '(model)'}: {', '.join(parts)}"


def drift(placement: Placement, *, short: bool) -> Section:
    """How far what each branch reads is from what it reads in the original."""
    names = [name for name, _ in placement.layer_drift]
    known = [s for stack in placement.before.stacks for s in stack.sublayers]
    kinds = [s.kind for s in known] if [s.name for s in known] == names else [""] * len(names)
    rows = list(zip(names, kinds, strict=True))
    if short and len(rows) > _LONGEST_DRIFT:
        header = ("sublayer", "what", "n", "largest difference")
        cells = [
            (*item.columns, str(item.count), short_number(_largest(placement, item.rows)))
            for item in collapse_names(rows)
        ]
    else:
        header = ("sublayer", "what", "difference")
        numbers = [short_number(value) for _, value in placement.layer_drift]
        cells = [(*row, number) for row, number in zip(rows, numbers, strict=True)]
    return Section("Drift by sublayer", Table(header, tuple(cells)).without_empty())


def _largest(placement: Placement, rows: tuple[int, ...]) -> float:
    return max(placement.layer_drift[row][1] for row in rows)


def evaluation(placement: Placement) -> Section:
    """The caller's metric before and after."""
    if placement.evaluation is None:
        return Section("Evaluation")
    before, after = placement.evaluation
    row = (f"{before:.6g}", f"{after:.6g}", f"{after - before:+.3g}")
    return Section("Evaluation", Table(("before", "after", "change"), (row,)))


# -- what to do next ------------------------------------------------------------------------------

_XIONG = "Xiong et al. 2020, On Layer Normalization in the Transformer Architecture"
_NGUYEN = "Nguyen and Salazar 2019, Transformers without Tears"
_LIU = "Liu et al. 2020, Understanding the Difficulty of Training Transformers"
_WANG = "Wang et al. 2022, DeepNet: Scaling Transformers to 1,000 Layers"
_KIM = "Kim et al. 2025, Peri-LN: Revisiting Normalization Layer in the Transformer Architecture"
_XIE = "Xie et al. 2023, ResiDual: Transformer with Dual Residual Connections"


def advice(placement: Placement, *, exact: bool) -> Section:
    """What to do next, by the placement that was reached, with sources."""
    target = placement.target or placement.after.form
    return Section("What to do next", paragraphs=tuple(_advice(placement, target, exact)))


def _advice(placement: Placement, target: str, exact: bool) -> Iterator[str]:
    if exact:
        yield (
            "The function is the original's, so nothing needs to be trained. Trained further, it "
            "needs what the original needed."
        )
        if target == "residual-dual":
            yield from _FACTS[target]
        return
    yield "The outputs are not the original's: fine-tune before use, and evaluate again."
    yield from _FACTS.get(target, ())
    if target in ("post", "deepnorm"):
        yield _deepnet(placement.before)
    if target in _FACTS:
        yield (
            "These are results on training from the start. For converted weights take the learning "
            "rate of a fine-tuning, and choose it on held-out data."
        )


_FACTS = {
    "pre": (
        "Pre-norm can be trained without learning-rate warm-up: its gradients are well-behaved "
        f"at initialisation ({_XIONG}).",
        "From the start, smaller initial weights help: SmallInit, with the standard deviation "
        f"sqrt(2 / (5 d)) for width d ({_NGUYEN}).",
    ),
    "post": (
        "Post-norm needs learning-rate warm-up: at initialisation its gradients are large near "
        f"the output ({_XIONG}).",
        "Admin scales the skips by constants measured at initialisation, so that no branch weighs "
        f"too much at first ({_LIU}).",
    ),
    "deepnorm": (),
    "sandwich": (
        "Norms on both sides of a branch were found to balance the growth of the variance over "
        f"the layers and to steady the gradients ({_KIM}).",
    ),
    "residual-dual": (
        "ResiDual sums a second stream beside the post-norm one, against both the vanishing "
        f"gradients of post-norm and the collapse of representations in pre-norm ({_XIE}).",
        "A second norm that starts with scale and shift zero takes part once they are trained.",
    ),
}


def _deepnet(before: ResidualStructure) -> str:
    """DeepNet's constants for this depth."""
    decoders = [s for s in before.stacks if any("cross" in b.kind for b in s.sublayers)]
    n, m = (
        sum(len(s.sublayers) // max(layer_length(s), 1) for s in before.stacks if s in which)
        for which in ([s for s in before.stacks if s not in decoders], decoders)
    )
    encoder, decoder = deepnorm_scales(n, m) if n + m else (None, None)
    parts = {
        "encoder": (encoder, "0.81 (N⁴M)^(1/16)", "0.87 (N⁴M)^(-1/16)"),
        "decoder": (decoder, "(3M)^(1/4)", "(12M)^(-1/4)"),
    }
    both = encoder is not None and decoder is not None
    if not both:
        parts = {"": (encoder or decoder, "(2N)^(1/4)", "(8N)^(-1/4)")}
    said = [
        f"{where} alpha = {a} = {scale.alpha:.3g} and beta = {b} = {scale.beta:.3g}".strip()
        for where, (scale, a, b) in parts.items()
        if scale is not None
    ]
    depth = f"N = {n} and M = {m} layers" if both else f"N = {n + m} layers"
    return (
        "DeepNorm multiplies the skip by alpha, and the initial weights of feed-forward, value and "
        f"output projections by beta: {'; '.join(said)} for {depth} ({_WANG})."
    )


def _change(before: str, after: str) -> str:
    return before if before == after else f"{before} → {after}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
