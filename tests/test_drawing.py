"""The drawing shows every norm where it stands, and nothing lies on anything else."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, replace
from xml.etree import ElementTree

import pytest
import stacks
from hypothesis import given
from hypothesis import strategies as st

from normswap.drawing import blocks_svg, layer_length
from normswap.structure import Stack, Sublayer

SVG = "{http://www.w3.org/2000/svg}"
WIDTH, STREAMS = 720, (42.0, 402.0)  # of the drawing, and where its two streams run
WIDEST = {"norm": 0.61 * 10.5, "branch": 0.56 * 12, "scale": 0.61 * 10.5}  # per character


@dataclass(frozen=True)
class Box:
    """A box with its full name; ``after`` says in which half it is."""

    kind: str
    name: str
    shown: str
    after: bool
    left: float
    top: float
    right: float
    bottom: float

    @property
    def on_stream(self) -> bool:
        return self.left < STREAMS[self.after] < self.right


def boxes(svg: str) -> list[Box]:
    found: list[Box] = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect is not None
        assert text is not None
        left, top, width, height = (float(rect.attrib[k]) for k in ("x", "y", "width", "height"))
        found.append(
            Box(
                group.attrib["class"],
                group.findtext(f"{SVG}title") or "",
                text.text or "",
                left >= WIDTH / 2,
                left,
                top,
                left + width,
                top + height,
            )
        )
    return found


def half(svg: str, *, after: bool) -> list[Box]:
    return sorted((b for b in boxes(svg) if b.after == after), key=lambda b: (b.top, b.left))


def circles(svg: str, *, after: bool) -> list[float]:
    found = ElementTree.fromstring(svg).iter(f"{SVG}circle")
    return [float(c.attrib["cy"]) for c in found if float(c.attrib["cx"]) == STREAMS[after]]


def shown_norms(stack: Stack) -> list[str]:
    drawn = stack.sublayers[: layer_length(stack)]
    inside = [(*s.input_norms, *s.output_norms, *s.stream_norms) for s in drawn]
    return [*stack.embedding_norms, *itertools.chain(*inside), *stack.final_norms]


CASES = {
    "BERT, post to pre": (stacks.bert_post(), stacks.rotated(stacks.bert_post())),
    "Llama, pre to deepnorm": (stacks.llama_pre(), stacks.llama_deepnorm()),
    "Gemma 2, sandwich to pre": (stacks.gemma2(), stacks.llama_pre(26)),
    "BART's decoder, post to pre": (stacks.bart_decoder(), stacks.rotated(stacks.bart_decoder())),
    "GPT-J and GPT-NeoX": (stacks.gpt_j(), stacks.gpt_neox()),
}


@pytest.mark.parametrize("name", CASES)
def test_each_norm_of_a_layer_is_drawn_once(name: str) -> None:
    before, after = CASES[name]
    svg = blocks_svg(before, after)
    for stack, behind in ((before, False), (after, True)):
        drawn = [box.name for box in half(svg, after=behind) if box.kind == "norm"]
        assert sorted(drawn) == sorted(shown_norms(stack))


def test_order_of_a_post_norm_layer() -> None:
    svg = blocks_svg(*CASES["BERT, post to pre"])
    drawn = half(svg, after=False)
    assert [(box.shown, box.on_stream) for box in drawn] == [
        ("embeddings.LayerNorm", True),
        ("attention", False),
        ("layer.0.attention.output.LayerNorm", True),
        ("feed-forward", False),
        ("layer.0.output.LayerNorm", True),
    ]
    first, second = circles(svg, after=False)
    assert drawn[1].bottom < first < drawn[2].top
    assert drawn[3].bottom < second < drawn[4].top


def test_order_of_a_pre_norm_layer() -> None:
    svg = blocks_svg(*CASES["BERT, post to pre"])
    drawn = half(svg, after=True)
    assert [(box.shown, box.on_stream) for box in drawn] == [
        ("embeddings.LayerNorm", False),
        ("attention", False),
        ("layer.0.attention.output.LayerNorm", False),
        ("feed-forward", False),
        ("layer.11.output.LayerNorm", True),
    ]
    first, second = circles(svg, after=True)
    assert drawn[1].bottom < first < drawn[2].top
    assert drawn[3].bottom < second < drawn[4].top


def test_sandwich_has_norms_on_both_sides_of_its_branch() -> None:
    svg = blocks_svg(*CASES["Gemma 2, sandwich to pre"])
    drawn = half(svg, after=False)
    assert [(box.shown, box.on_stream) for box in drawn] == [
        ("layers.0.input_layernorm", False),
        ("attention", False),
        ("layers.0.post_attention_layernorm", False),
        ("layers.0.pre_feedforward_layernorm", False),
        ("feed-forward", False),
        ("layers.0.post_feedforward_layernorm", False),
        ("norm", True),
    ]
    assert drawn[2].bottom < circles(svg, after=False)[0] < drawn[3].top


def test_a_decoder_layer_has_three_sublayers() -> None:
    svg = blocks_svg(*CASES["BART's decoder, post to pre"])
    branches = [box.shown for box in half(svg, after=False) if box.kind == "branch"]
    assert branches == ["attention", "cross-attention", "feed-forward"]
    assert len(circles(svg, after=False)) == 3
    assert svg.count(">layer 1 of 6<") == 2


def test_parallel_branches_stand_side_by_side_below_the_norm_that_they_share() -> None:
    norm, attention, feed_forward, final = half(
        blocks_svg(*CASES["GPT-J and GPT-NeoX"]), after=False
    )
    assert attention.top == feed_forward.top
    assert attention.right < feed_forward.left
    assert (norm.left, norm.right) == (attention.left, feed_forward.right)
    assert norm.bottom < attention.top
    assert final.on_stream


def test_parallel_branches_with_a_norm_each() -> None:
    drawn = half(blocks_svg(*CASES["GPT-J and GPT-NeoX"]), after=True)
    assert [box.shown for box in drawn] == [
        "…0.input_layernorm",
        "post_att…layernorm",
        "attention",
        "feed-forward",
        "final_layer_norm",
    ]
    assert drawn[0].left == drawn[2].left
    assert drawn[1].left == drawn[3].left


def test_constants_are_shown_on_skip_and_branch_where_they_are_not_one() -> None:
    drawn = half(blocks_svg(*CASES["Llama, pre to deepnorm"]), after=True)
    scales = [(box.shown, box.on_stream) for box in drawn if box.kind == "scale"]
    assert sorted(scales) == [("×0.5", False)] * 2 + [("×2", True)] * 2
    plain = half(blocks_svg(*CASES["Llama, pre to deepnorm"]), after=False)
    assert not [box for box in plain if box.kind == "scale"]


def test_drawing_says_in_words_what_it_shows() -> None:
    root = ElementTree.fromstring(blocks_svg(*CASES["Llama, pre to deepnorm"]))
    assert root.findtext(f"{SVG}title") == "model: pre before, deepnorm after"
    assert root.findtext(f"{SVG}desc") == (
        "Before, pre: attention, input norm model.layers.0.input_layernorm; feed-forward, input "
        "norm model.layers.0.post_attention_layernorm; final norm model.norm. After, deepnorm: "
        "attention, stream norm model.layers.0.input_layernorm, skip times 2, branch times 0.5; "
        "feed-forward, stream norm model.layers.0.post_attention_layernorm, skip times 2, branch "
        "times 0.5."
    )


def test_drawing_needs_nothing_else() -> None:
    svg = blocks_svg(*CASES["BERT, post to pre"])
    assert not re.search(r"href|url\(|<style|<script|<image|@import", svg)
    assert set(re.findall(r'(?:fill|stroke)="([^"]*)"', svg)) == {
        "none",
        "currentColor",
        "#3f83c9",
        "#888",
    }


def test_long_names_are_cut_and_stay_whole_in_the_tooltip() -> None:
    name = "encoder." + "very_long_component." * 9 + "norm_" * 12
    sublayer = Sublayer("encoder.0", stacks.PARALLEL, "parallel", (name, f"{name}2"), (), (name,))
    stack = Stack("encoder", "mixed", (sublayer,), (name,), (name,))
    drawn = boxes(blocks_svg(stack, stack))
    for box in drawn:
        assert len(box.shown) * WIDEST[box.kind] <= box.right - box.left
    assert sum(box.name == name for box in drawn) == 8
    assert any(box.shown.startswith("norm_") and "…" in box.shown for box in drawn)


def test_a_layer_is_the_shortest_pattern_that_repeats() -> None:
    assert layer_length(stacks.bert_post()) == 2
    assert layer_length(stacks.bart_decoder()) == 3
    assert layer_length(stacks.gpt_j()) == 1
    assert layer_length(Stack("", "none", ())) == 0
    uneven = stacks.bert_post(3)
    assert layer_length(replace(uneven, sublayers=uneven.sublayers[:-1])) == 2
    assert layer_length(replace(uneven, sublayers=uneven.sublayers[1:])) == 1


def test_what_does_not_repeat_is_called_the_first_of_all() -> None:
    stack = stacks.bert_post(3)
    stack = replace(stack, sublayers=stack.sublayers[:-1])
    assert blocks_svg(stack, stack).count(">sublayers 1 to 2 of 5<") == 2


# -- anything -------------------------------------------------------------------------------------

LONG = "model.backbone.encoder.stages.3.blocks.27.post_feedforward_layer_norm_of_the_second_branch"
names = st.text(max_size=8) | st.sampled_from(["", "norm", "layers.10.norm", LONG, "x" * 60])
norms = st.lists(names, max_size=3).map(tuple)
scales = st.just(1.0) | st.floats()
kinds = st.lists(
    st.sampled_from(["attention", "cross-attention", "feed-forward", "other"]),
    min_size=1,
    max_size=5,
).map(" + ".join)
forms = st.sampled_from(["pre", "post", "sandwich", "parallel", "mixed", "none"])
any_sublayer = st.builds(Sublayer, names, kinds | names, forms, norms, norms, norms, scales, scales)
any_stack = st.builds(
    Stack, names, forms, st.lists(any_sublayer, max_size=5).map(tuple), norms, norms
)


@given(before=any_stack, after=any_stack)
def test_no_box_lies_on_another_or_outside(before: Stack, after: Stack) -> None:
    svg = blocks_svg(before, after)
    height = float(ElementTree.fromstring(svg).attrib["height"])
    drawn = boxes(svg)
    for box in drawn:
        assert 0 <= box.left < box.right <= WIDTH
        assert 0 <= box.top < box.bottom <= height
        assert box.left >= WIDTH / 2 or box.right <= WIDTH / 2
        assert len(box.shown) * WIDEST[box.kind] <= box.right - box.left
    for a, b in itertools.combinations(drawn, 2):
        apart = a.right <= b.left or b.right <= a.left or a.bottom <= b.top or b.bottom <= a.top
        assert apart, (a, b)
    for after_half in (False, True):
        for y in circles(svg, after=after_half):
            stream = [b for b in drawn if b.after == after_half and b.on_stream]
            assert all(b.bottom <= y - 8 or b.top >= y + 8 for b in stream)


@given(stack=any_stack, scale=scales)
def test_every_norm_of_the_first_layer_is_drawn(stack: Stack, scale: float) -> None:
    svg = blocks_svg(stack, stack)
    expected = len(shown_norms(stack))
    drawn = [box for box in half(svg, after=True) if box.kind == "norm"]
    assert len(drawn) == expected
    assert svg.count("<circle") == 2 * layer_length(stack)
    assert not math.isnan(float(ElementTree.fromstring(svg).attrib["height"]))
