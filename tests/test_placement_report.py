"""What a report says of moved norms."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import stacks
from hypothesis import given
from hypothesis import strategies as st
from test_drawing import any_stack

from normswap.placement_report import Placement, advice, drift, evaluation, structure
from normswap.plan import MappingRow, SiteOutcome
from normswap.report import Report
from normswap.structure import ResidualStructure, Stack

BERT = stacks.bert_post(4)


def placed(before: Stack = BERT, after: Stack | None = None, **changes: Any) -> Placement:
    after = stacks.rotated(before) if after is None else after
    placement = Placement(ResidualStructure((before,)), ResidualStructure((after,)), "clean")
    return replace(placement, **changes)


def rotation() -> Report:
    """BERT with four layers, post-norm to true pre-norm."""
    after = stacks.rotated(BERT)
    norms = [(s.input_norms[0], f"moved in front of {s.name}") for s in after.sublayers]
    norms.append((after.final_norms[0], "moved behind the stack"))
    sites = tuple(SiteOutcome(name, "layer", action, "approximate") for name, action in norms)
    mapping = tuple(
        MappingRow(f"{name}.{tensor}", (f"{name}.{tensor}",), "rotate", "exact")
        for name, _ in norms
        for tensor in ("weight", "bias")
    )
    names = [sublayer.name for sublayer in BERT.sublayers]
    layer_drift = tuple((name, 0.1 * n) for n, name in enumerate(names, 1))
    placement = placed(layer_drift=layer_drift, evaluation=(0.9533, 0.9412))
    return Report("convert_placement", "BertModel", sites, mapping, placement=placement)


TEXT_80 = """\
convert_placement: BertModel
post → pre · 9 LayerNorms: 9 moved · approximate · not verified

Structure
  - encoder: post → pre, 8 sublayers, embedding norms 1 → 0, final norms 0 → 1
  - skip: clean (it reads the stream in front of the norm)

Changed
  norm                            n  action                          status
  ------------------------------------------------------------------------------
  embeddings.LayerNorm            1  moved in front of               approximate
                                     encoder.layer.0.attention
  encoder.layer.{0..3}.           4  moved in front of               approximate
  attention.output.LayerNorm         encoder.layer.{0..3}
  encoder.layer.{0..2}.output.    3  moved in front of               approximate
  LayerNorm                          encoder.layer.{1..3}.attention
  encoder.layer.3.output.         1  moved behind the stack          approximate
  LayerNorm

Drift by sublayer
  sublayer                   what          difference
  ---------------------------------------------------
  encoder.layer.0.attention  attention            0.1
  encoder.layer.0            feed-forward         0.2
  encoder.layer.1.attention  attention            0.3
  encoder.layer.1            feed-forward         0.4
  encoder.layer.2.attention  attention            0.5
  encoder.layer.2            feed-forward         0.6
  encoder.layer.3.attention  attention            0.7
  encoder.layer.3            feed-forward         0.8

Evaluation
  before   after   change
  -----------------------
  0.9533  0.9412  -0.0121

What to do next
  - The outputs are not the original's: fine-tune before use, and evaluate
    again.
  - Pre-norm can be trained without learning-rate warm-up: its gradients are
    well-behaved at initialisation (Xiong et al. 2020, On Layer Normalization in
    the Transformer Architecture).
  - From the start, smaller initial weights help: SmallInit, with the standard
    deviation sqrt(2 / (5 d)) for width d (Nguyen and Salazar 2019, Transformers
    without Tears).
  - These are results on training from the start. For converted weights take the
    learning rate of a fine-tuning, and choose it on held-out data.
"""


def test_text_of_a_rotation_at_80_columns() -> None:
    assert rotation().to_text(80) + "\n" == TEXT_80


def test_markdown_of_a_rotation() -> None:
    text = rotation().to_markdown()
    assert "| `encoder.layer.0.attention` | attention | 0.1 |" in text
    assert "| ---: | ---: | ---: |\n| 0.9533 | 0.9412 | -0.0121 |" in text
    assert "- encoder: post → pre, 8 sublayers, embedding norms 1 → 0, final norms 0 → 1" in text
    assert "<svg" not in text


def test_html_shows_the_first_stack_that_changed() -> None:
    encoder, decoder = stacks.bart_encoder(), stacks.bart_decoder()
    before = ResidualStructure((encoder, decoder))
    after = ResidualStructure((encoder, stacks.rotated(decoder)))
    placement = Placement(before, after, "clean")
    page = replace(rotation(), placement=placement).to_html()
    assert page.count("<figure><svg") == 1
    assert "<title>decoder: post before, pre after</title>" in page
    assert "<svg" not in replace(rotation(), placement=Placement(before, before, "")).to_html()


def test_summary_counts_what_was_done_to_the_norms() -> None:
    sites = (
        SiteOutcome("a", "rms", "moved behind the sum", "exact"),
        SiteOutcome("b", "rms", "moved behind the sum", "exact"),
        SiteOutcome("c", "rms", "dropped", "exact"),
        SiteOutcome("d", "rms", "kept", "refused", "shared", "x"),
    )
    assert replace(rotation(), sites=sites).summary() == (
        "post → pre · 4 RMSNorms: 2 moved, 1 dropped · exact · 1 refused (shared) · not verified"
    )


# -- sections -------------------------------------------------------------------------------------


def test_structure_has_a_line_for_each_stack() -> None:
    encoder, decoder = stacks.bart_encoder(), stacks.bart_decoder()
    after = ResidualStructure((stacks.rotated(encoder), decoder))
    placement = Placement(ResidualStructure((encoder, decoder)), after, "normalised")
    assert structure(placement).paragraphs == (
        "encoder: post → pre, 12 sublayers, embedding norms 1 → 0, final norms 0 → 1",
        "decoder: post, 18 sublayers",
        "skip: normalised (it reads what the branch reads)",
    )
    fewer = replace(placement, after=ResidualStructure(after.stacks[:1]), skip="")
    assert structure(fewer).paragraphs[1:] == (
        "decoder: post → gone, 18 sublayers, embedding norms 1 → 0",
    )


def test_a_long_drift_is_collapsed_in_short_reports_to_the_largest() -> None:
    before = stacks.llama_pre(8)
    numbers = tuple((sublayer.name, 0.01 * n) for n, sublayer in enumerate(before.sublayers))
    placement = placed(before, before, layer_drift=numbers)
    table = drift(placement, short=True).table
    assert table is not None
    assert table.rows == (
        ("model.layers.{0..7}", "attention", "8", "0.14"),
        ("model.layers.{0..7}", "feed-forward", "8", "0.15"),
    )
    whole = drift(placement, short=False).table
    assert whole is not None
    assert len(whole.rows) == 16


def test_drift_under_other_names_is_shown_without_kinds() -> None:
    table = drift(placed(layer_drift=(("a", 0.5),)), short=True).table
    assert table is not None
    assert (table.header, table.rows) == (("sublayer", "difference"), (("a", "0.5"),))


def test_nothing_measured_makes_no_section() -> None:
    assert drift(placed(), short=True).table is None
    assert evaluation(placed()).table is None


# -- advice ---------------------------------------------------------------------------------------


def said(placement: Placement, *, exact: bool = False) -> str:
    return " ".join(advice(placement, exact=exact).paragraphs)


@pytest.mark.parametrize(
    ("target", "sources"),
    [
        ("pre", ["Xiong et al. 2020", "Nguyen and Salazar 2019"]),
        ("post", ["Xiong et al. 2020", "Liu et al. 2020", "Wang et al. 2022"]),
        ("deepnorm", ["Wang et al. 2022"]),
        ("sandwich", ["Kim et al. 2025"]),
        ("residual-dual", ["Xie et al. 2023"]),
        ("mixed", []),
    ],
)
def test_advice_names_its_sources(target: str, sources: list[str]) -> None:
    text = said(placed(target=target))
    assert "fine-tune before use" in text
    assert [source for source in ALL_SOURCES if source in text] == sources


ALL_SOURCES = (
    "Xiong et al. 2020",
    "Nguyen and Salazar 2019",
    "Liu et al. 2020",
    "Wang et al. 2022",
    "Kim et al. 2025",
    "Xie et al. 2023",
)


def test_advice_follows_the_form_that_was_reached() -> None:
    after = stacks.llama_deepnorm()
    assert said(placed(stacks.llama_pre(), after)) == said(placed(target="deepnorm"))


def test_exact_conversions_need_no_training() -> None:
    text = said(placed(), exact=True)
    assert "nothing needs to be trained" in text
    assert "fine-tune" not in text
    assert "Xie et al. 2023" in said(placed(target="residual-dual"), exact=True)


@pytest.mark.parametrize(
    ("before", "constants"),
    [
        (
            (stacks.bert_post(12),),
            "alpha = (2N)^(1/4) = 2.21 and beta = (8N)^(-1/4) = 0.319 for N = 12 layers",
        ),
        (
            (stacks.gpt_j(8),),
            "alpha = (2N)^(1/4) = 2 and beta = (8N)^(-1/4) = 0.354 for N = 8 layers",
        ),
        (
            (stacks.bart_encoder(6), stacks.bart_decoder(6)),
            "encoder alpha = 0.81 (N⁴M)^(1/16) = 1.42 and beta = 0.87 (N⁴M)^(-1/16) = 0.497; "
            "decoder alpha = (3M)^(1/4) = 2.06 and beta = (12M)^(-1/4) = 0.343 "
            "for N = 6 and M = 6 layers",
        ),
    ],
)
def test_deepnet_constants_are_those_of_the_depth(
    before: tuple[Stack, ...], constants: str
) -> None:
    placement = replace(placed(target="deepnorm"), before=ResidualStructure(before))
    assert constants in said(placement)


def test_no_advice_where_nothing_was_done() -> None:
    refused = (SiteOutcome("a", "layer", "kept", "refused", "shared", "x"),)
    assert "What to do next" not in replace(rotation(), sites=refused).to_text(100)


# -- JSON -----------------------------------------------------------------------------------------

structures = st.lists(any_stack, max_size=2).map(lambda s: ResidualStructure(tuple(s)))
placements = st.builds(
    Placement,
    structures,
    structures,
    st.sampled_from(["", "clean", "normalised"]),
    st.lists(st.tuples(st.text(max_size=8), st.floats(allow_nan=False)), max_size=3).map(tuple),
    st.none() | st.tuples(st.floats(allow_nan=False), st.floats(allow_nan=False)),
    st.sampled_from(["", "pre", "residual-dual"]),
)


@given(placement=placements)
def test_placements_round_trip_through_json(placement: Placement) -> None:
    report = replace(rotation(), placement=placement)
    text = report.to_json()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    again = Report.from_json(text)
    assert again.to_json() == text
    assert repr(again.placement) == repr(placement)  # NaN is not equal to itself


@given(placement=placements, width=st.integers(60, 140))
def test_every_placement_can_be_shown(placement: Placement, width: int) -> None:
    report = replace(rotation(), placement=placement)
    assert all(len(line) <= width for line in report.to_text(width).split("\n")[1:])
    assert report.to_markdown().startswith("# ")
    assert report.to_html().count("<svg") <= 1


def test_reports_without_a_placement_are_read() -> None:
    data = replace(rotation(), placement=None).to_dict()
    del data["placement"]
    assert Report.from_dict(data) == replace(rotation(), placement=None)
