"""What a reader of a report sees, and that it survives JSON."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normswap.errors import NormswapError
from normswap.plan import Edit, MappingRow, ModuleEdit, Plan, SiteOutcome
from normswap.report import Report
from normswap.verification import Run, Verification

RUNS = (
    Run("1x3x224x224", "float64", 2e-14, 1.2e-15, 1e-7, True),
    Run("1x3x224x224", "float32", 4e-6, 2.0e-7, 5e-6, True),
    Run("2x3x256x224", "float64", 1e-14, 1.0e-15, 1e-7, True),
    Run("2x3x256x224", "float32", 5e-6, 3.14e-7, 5e-6, True),
)
PASSED = Verification(True, "model", 2e-14, 1.2e-15, 1e-7, "float64", RUNS, {"bn1": 1e-16})


def resnet_sites(refused: tuple[str, ...] = ()) -> tuple[SiteOutcome, ...]:
    """The 53 BatchNorms of a ResNet-50."""
    names = ["bn1"]
    for layer, blocks in enumerate((3, 4, 6, 3), start=1):
        names += [f"layer{layer}.{b}.bn{n}" for b in range(blocks) for n in (1, 2, 3)]
        names.append(f"layer{layer}.0.downsample.1")
    return tuple(
        SiteOutcome(
            name,
            "batch",
            "kept",
            "refused",
            "other-reader",
            f"aten.add reads the output of the conv of {name} too, so that the conv cannot take "
            "the scale without changing what the addition sees",
        )
        if name in refused
        else SiteOutcome(
            name,
            "batch",
            f"folded into {name.replace('bn', 'conv').replace('downsample.1', 'downsample.0')}",
            "exact",
            error=1e-15,
        )
        for name in names
    )


def resnet_report(**changes: Any) -> Report:
    sites = resnet_sites()
    mapping = tuple(
        MappingRow(
            f"{site.action.removeprefix('folded into ')}.weight",
            (f"{site.action.removeprefix('folded into ')}.weight", f"{site.name}.running_var"),
            "scale out axis",
            "exact",
        )
        for site in sites
    )
    report = Report("fold_batchnorm", "ResNet", sites, mapping, PASSED)
    return replace(report, **changes)


# -- counting -------------------------------------------------------------------------------------


def test_counts_and_reasons() -> None:
    report = resnet_report(sites=resnet_sites(refused=("bn1", "layer2.0.bn2")))
    assert report.counts == {"refused": 2, "exact": 51}
    assert report.reasons == {"other-reader": 2}
    assert resnet_report().reasons == {}


# -- the summary line -----------------------------------------------------------------------------


def test_summary_of_a_full_fold() -> None:
    assert resnet_report().summary() == (
        "53 of 53 BatchNorms folded · exact · "
        "verified on 2 input shapes: float64 1.2e-15, float32 3.1e-7"
    )


def test_summary_with_refusals() -> None:
    report = resnet_report(sites=resnet_sites(refused=("bn1",)), verification=None)
    assert report.summary() == (
        "52 of 53 BatchNorms folded · exact · 1 refused (other-reader) · not verified"
    )


def test_summary_counts_kinds_statuses_and_reasons() -> None:
    sites = (
        SiteOutcome("a", "layer", "swapped", "exact"),
        SiteOutcome("b", "layer", "swapped", "approximate"),
        SiteOutcome("c", "rms", "kept", "refused", "hook", "x"),
        SiteOutcome("d", "rms", "kept", "refused", "op", "x"),
        SiteOutcome("e", "rms", "kept", "refused", "hook", "x"),
    )
    assert Report("swap_norms", "Net", sites).summary() == (
        "2 of 5 norms swapped · 1 exact, 1 approximate · 3 refused (2 hook, 1 op) · not verified"
    )
    assert Report("fold_affine", "Net", sites[:1]).summary().startswith("1 of 1 LayerNorm folded")
    assert Report("fold_affine", "Net", ()).summary() == "no norms found · not verified"


def test_summary_of_a_failed_verification_says_where() -> None:
    run = Run("1x3x8x8", "float64", 0.5, 0.25, 1e-7, False, detail="output 'logits' differs")
    failed = Verification(False, "model", 0.5, 0.25, 1e-7, "float64", (run,))
    assert (
        resnet_report(verification=failed)
        .summary()
        .endswith(
            "VERIFICATION FAILED: float64 on 1x3x8x8: output 'logits' differs by 0.25, "
            "tolerance 1.0e-7"
        )
    )
    broken = replace(run, max_rel=math.inf, detail="the changed model does not run: TypeError: x")
    failed = replace(failed, runs=(broken,))
    assert (
        resnet_report(verification=failed)
        .summary()
        .endswith(
            "VERIFICATION FAILED: float64 on 1x3x8x8: the changed model does not run: TypeError: x"
        )
    )


def test_summary_of_what_could_not_be_run() -> None:
    run = Run("2x3", "float32", math.inf, math.inf, 0.0, False, skipped="'a' is on the meta device")
    none = Verification(False, "none", math.inf, math.inf, 0.0, "float32", (run,))
    assert (
        resnet_report(verification=none)
        .summary()
        .endswith("not verified ('a' is on the meta device)")
    )


# -- text -----------------------------------------------------------------------------------------

TEXT_80 = """\
fold_batchnorm: ResNet
51 of 53 BatchNorms folded · exact · 2 refused (other-reader)
verified on 2 input shapes: float64 1.2e-15, float32 3.1e-7

Changed
  norm                         n  action                         status    error
  ------------------------------------------------------------------------------
  bn1                          1  folded into conv1              exact   1.0e-15
  layer{1,4}.{0..2}.bn{1..3}  18  folded into                    exact   1.0e-15
                                  layer{1,4}.{0..2}.conv{1..3}
  layer{1..4}.0.downsample.1   4  folded into                    exact   1.0e-15
                                  layer{1..4}.0.downsample.0
  layer2.{0..3}.bn{1..3}      12  folded into                    exact   1.0e-15
                                  layer2.{0..3}.conv{1..3}
  layer3.{0..4}.bn{1..3}      15  folded into                    exact   1.0e-15
                                  layer3.{0..4}.conv{1..3}
  layer3.5.bn3                 1  folded into layer3.5.conv3     exact   1.0e-15

Refused
  norm              n  reason
  ---------------------------------
  layer3.5.bn{1,2}  2  other-reader
      aten.add reads the output of the conv of layer3.5.bn{1,2} too, so that the
      conv cannot take the scale without changing what the addition sees

Notes
  - The running statistics of nothing in particular were looked at for this note
    to be long enough to be wrapped.
"""


def test_text_at_80_columns() -> None:
    report = resnet_report(
        sites=resnet_sites(refused=("layer3.5.bn1", "layer3.5.bn2")),
        notes=(
            "The running statistics of nothing in particular were looked at for this note to be "
            "long enough to be wrapped.",
        ),
    )
    assert report.to_text(80) + "\n" == TEXT_80


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    long = SiteOutcome(
        "backbone." * 12 + "norm", "batch", "folded into " + "backbone." * 12 + "conv", "exact"
    )
    report = resnet_report(sites=(*resnet_sites(refused=("bn1",)), long))
    lines = report.to_text(width).splitlines()
    assert max(map(len, lines)) <= width
    assert "".join(report.to_text(width).split()).count("backbone.") == 24


def test_str_follows_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert str(resnet_report()) == resnet_report().to_text(80)
    monkeypatch.setenv("COLUMNS", "100")
    assert str(resnet_report()) == resnet_report().to_text(100)


def test_runs_are_listed_in_text_only_where_something_is_odd() -> None:
    assert "Verification" not in resnet_report().to_text(100)
    skipped = replace(RUNS[1], skipped="RuntimeError: not implemented for 'Half'", passed=False)
    check = replace(PASSED, runs=(RUNS[0], skipped))
    text = resnet_report(verification=check).to_text(100)
    assert "not implemented for 'Half'" in text
    assert "skipped" in text
    assert "verified on 1 input shape: float64 1.2e-15" in text


def test_a_refused_site_is_never_hidden_among_changed_ones() -> None:
    report = resnet_report(sites=resnet_sites(refused=("layer2.1.bn2",)))
    text = report.to_text(100)
    assert "  layer2.1.bn2  1  other-reader" in text
    assert "layer2.{0..3}.bn{1..3}" not in text


def test_the_error_of_a_collapsed_row_is_its_largest() -> None:
    sites = tuple(
        SiteOutcome(f"bn{n}", "batch", f"folded into conv{n}", "exact", error=n * 1e-9)
        for n in range(4)
    )
    assert "bn{0..3}  4  folded into conv{0..3}  exact   3.0e-9" in Report(
        "fold_batchnorm", "Net", sites
    ).to_text(80)


def test_constants_are_a_column_of_their_own_where_there_are_any() -> None:
    rows = tuple(
        MappingRow(f"layer.{n}.weight", (f"layer.{n}.weight",), "scale", "exact", constant)
        for n, constant in enumerate((None, 1.5, 1.5, 2.25, None))
    )
    text = resnet_report(mapping=rows).to_markdown()
    assert text.split("## Weights\n\n")[1].splitlines() == [
        "| tensor | operation | made from | constant | status |",
        "| --- | --- | --- | ---: | --- |",
        "| `layer.{0,4}.weight` | scale | `layer.{0,4}.weight` |  | exact |",
        "| `layer.{1,2}.weight` | scale | `layer.{1,2}.weight` | 1.5 | exact |",
        "| `layer.3.weight` | scale | `layer.3.weight` | 2.25 | exact |",
    ]
    assert "constant" not in resnet_report().to_markdown()


def test_runs_without_a_tolerance_are_measured_and_not_called_equal() -> None:
    run = Run("1x16", "float64", 0.9, 0.83, math.inf, True)
    text = resnet_report(verification=replace(PASSED, runs=(run,))).to_markdown()
    assert "| `1x16` | float64 | 0.83 | measured |" in text


# -- Markdown and HTML ----------------------------------------------------------------------------


def test_markdown_has_everything() -> None:
    sites = (*resnet_sites(), SiteOutcome("a|b", "batch", "kept", "refused", "op", "<x> | *y*"))
    text = resnet_report(sites=sites, notes=("a_b",)).to_markdown()
    assert text.startswith("# fold\\_batchnorm: ResNet\n")
    assert "| `layer{1,4}.{0..2}.bn{1..3}` | 18 | folded into layer{1,4}" in text
    assert "| `a\\|b` | 1 | op | \\<x\\> \\| \\*y\\* |" in text
    assert "| `1x3x224x224` | float32 | 2.0e-7 | 5.0e-6 | equal |" in text
    weights = "`layer2.{0..3}.conv{1..3}.weight, layer2.{0..3}.bn{1..3}.running_var`"
    assert f"| `layer2.{{0..3}}.conv{{1..3}}.weight` | scale out axis | {weights} | exact |" in text
    assert text.endswith("- a\\_b\n")
    for block in text.split("\n\n"):  # every row of a table has as many cells as its header
        rows = [line for line in block.splitlines() if line.startswith("|")]
        assert len({row.replace("\\|", "").count("|") for row in rows}) <= 1


class _Checker(HTMLParser):
    """Collects the text, and checks that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.attributes: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [name for name, _ in attrs]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_html_is_escaped_whole_and_needs_nothing_else() -> None:
    evil = "<script>alert('x')</script> & \"more\""
    sites = (*resnet_sites(), SiteOutcome(evil, "batch", "kept", "refused", "op", evil))
    report = resnet_report(sites=sites, notes=(evil,), model=evil)
    for text in (report.to_html(), report._repr_html_()):
        assert "<script" not in text
        checker = _Checker()
        checker.feed(text)
        assert not checker.open
        assert not {"src", "href", "onload"} & set(checker.attributes)
        assert sum(evil in part for part in checker.text) >= 4
        assert any("53 of 54 BatchNorms folded" in part for part in checker.text)
    assert report.to_html().startswith("<!DOCTYPE html>")


def test_html_shows_whether_it_is_good() -> None:
    assert 'class="good"' in resnet_report().to_html()
    bad = replace(PASSED, passed=False)
    assert 'class="bad"' in resnet_report(verification=bad).to_html()
    assert 'class=""' in resnet_report(verification=None).to_html()


# -- JSON -----------------------------------------------------------------------------------------

PLAN = Plan(
    "fold_batchnorm",
    "abc",
    [Edit("conv.weight", "scale", ("conv.weight", "bn.weight"), {"axis": 0})],
    [ModuleEdit("identity", "bn")],
)

floats = st.floats(allow_nan=False)
runs = st.builds(
    Run,
    st.text(),
    st.sampled_from(["float64", "float32"]),
    floats,
    floats,
    floats,
    st.booleans(),
    st.none() | st.text(),
    st.text(),
)
verifications = st.builds(
    Verification,
    st.booleans(),
    st.sampled_from(["model", "site", "none"]),
    floats,
    floats,
    floats,
    st.text(),
    st.lists(runs, max_size=3).map(tuple),
    st.dictionaries(st.text(), floats, max_size=3),
)
names = st.text(max_size=8) | st.from_regex(r"\Alayer[0-9]{1,2}\.[0-9]\.bn[0-9]\Z")
sites = st.builds(
    SiteOutcome,
    names,
    st.sampled_from(["batch", "layer"]),
    names,
    st.sampled_from(["exact", "approximate", "initialised", "refused"]),
    st.none() | st.just("hook"),
    st.text(max_size=20),
    st.none() | floats,
    st.lists(names, max_size=2).map(tuple),
)
reports = st.builds(
    Report,
    st.sampled_from(["fold_batchnorm", "other"]),
    st.text(),
    st.lists(sites, max_size=6).map(tuple),
    st.lists(
        st.builds(
            MappingRow,
            names,
            st.lists(names, max_size=2).map(tuple),
            st.text(),
            st.just("exact"),
            st.none() | floats,
        ),
        max_size=3,
    ).map(tuple),
    st.none() | verifications,
    st.lists(st.text(), max_size=2).map(tuple),
    st.none() | st.just(PLAN),
)


def test_plans_from_before_constants_are_read() -> None:
    row = MappingRow("a", ("b",), "copy", "exact")
    plan = replace(PLAN, mapping=[row, replace(row, constant=2.5)])
    data = json.loads(plan.to_json())
    assert Plan.from_json(json.dumps(data)) == plan
    del data["mapping"][0]["constant"]
    assert Plan.from_json(json.dumps(data)) == plan


@given(report=reports)
def test_json_round_trips(report: Report) -> None:
    text = report.to_json()
    json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is no JSON"))
    assert Report.from_json(text) == report


@given(report=reports, width=st.integers(60, 140))
def test_every_report_can_be_shown(report: Report, width: int) -> None:
    text = report.to_text(width)
    assert all(len(line) <= width for line in text.split("\n")[1:])
    checker = _Checker()
    checker.feed(report.to_html())
    assert not checker.open
    assert report.to_markdown().startswith("# ")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not a normswap report"),
        ("[]", "not a normswap report"),
        ('{"version": 1}', "not a normswap report"),
        ('{"version": 99}', "version 99 is not known"),
        ('{"version": 1, "rewrite": "x", "model": "y", "sites": [{"no": 1}]}', "not a normswap"),
    ],
)
def test_what_is_no_report_is_refused(text: str, says: str) -> None:
    with pytest.raises(NormswapError, match=says):
        Report.from_json(text)
