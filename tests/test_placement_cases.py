"""Placement of norms and its checkpoints: faults reported of other tools, as small models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import random_input, relative_error
from placement_models import FAMILIES, build, call, converted, original, place
from safetensors import safe_open
from safetensors.torch import load_file
from small_transformers import (
    EXACT,
    MLP,
    VOCABULARY,
    WIDTH,
    Attention,
    fill_all,
    library_inputs,
    library_model,
    token_ids,
)
from torch import Tensor, nn

import normswap as ns
from normswap.errors import CheckpointError

IDS = token_ids(2, 6)
X = random_input(2, 5, WIDTH)


def encoder(*, norm_first: bool, norm: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True, norm_first=norm_first)
    final = nn.LayerNorm(WIDTH) if norm else None
    return fill_all(nn.TransformerEncoder(layer, 2, final, enable_nested_tensor=False))


# An encoder trained with `norm_first=True` and run with `norm_first=False`


def test_flag_of_the_placement_is_told_apart_though_the_tensors_fit_both_ways() -> None:
    trained, run = encoder(norm_first=True, norm=True), encoder(norm_first=False, norm=True)
    run.load_state_dict(trained.state_dict(), strict=True)  # nobody objects
    assert relative_error(call(trained, X), call(run, X)) > 0.1
    assert ns.residual_structure(trained, X).form == "pre"
    assert ns.residual_structure(run, X).form == "post"
    (stack,) = ns.residual_structure(trained, X).stacks
    assert [s.input_norms for s in stack.sublayers] == [
        (f"layers.{i}.norm{k}",) for i in range(2) for k in (1, 2)
    ]
    (stack,) = ns.residual_structure(run, X).stacks
    assert [s.stream_norms for s in stack.sublayers] == [
        (f"layers.{i}.norm{k}",) for i in range(2) for k in (1, 2)
    ]


def test_encoder_trained_with_norm_first_is_converted_to_the_other_placement() -> None:
    trained = encoder(norm_first=True, norm=True)
    new, report = ns.convert_placement(trained, "post", X)
    assert relative_error(call(trained, X), call(new, X)) < EXACT
    assert report.placement.before.form == "pre"
    assert report.placement.after.form == "post"
    targets = {row.target for row in report.mapping}
    assert targets >= {n for n in trained.state_dict() if "norm" in n}


# Two final norms, and a missing one


def test_both_final_norms_are_kept_and_reported() -> None:
    model = encoder(norm_first=False, norm=True)
    new, report = place(model, "pre", X)
    (stack,) = ns.residual_structure(new, X).stacks
    assert stack.final_norms == ("layers.1.norm2", "norm")
    for name in stack.final_norms:
        assert torch.equal(new.get_submodule(name).weight, model.get_submodule(name).weight)
        assert {f"{name}.weight", f"{name}.bias"} <= {row.target for row in report.mapping}
    assert any("two norms at its end" in note for note in report.notes)
    assert "two norms at its end" in report.to_markdown()


def test_pre_norm_always_gets_its_final_norm() -> None:
    """The last norm on the stream of a post-norm stack that has no other behind it."""
    model = encoder(norm_first=False, norm=False)
    new, report = place(model, "pre", X)
    (stack,) = ns.residual_structure(new, X).stacks
    assert stack.final_norms == ("layers.1.norm2",)
    assert torch.equal(new.layers[1].norm2.weight, model.layers[1].norm2.weight)
    assert next(s for s in report.sites if s.name == "layers.1.norm2").action == (
        "kept as the final norm"
    )
    y = call(new, X)
    with torch.no_grad():
        centred = (y - model.layers[1].norm2.bias) / model.layers[1].norm2.weight
    finite = model.layers[1].norm2.weight != 0
    size = centred[..., finite].square().mean(-1)
    assert float(size.max()) < 1 / float(finite.double().mean()) + 1e-6


def test_pre_norm_stack_without_a_final_norm_does_not_become_post_norm() -> None:
    with pytest.raises(ns.RefusedError, match="without a final norm"):
        ns.convert_placement(encoder(norm_first=True, norm=False), "post", X)


# Norms added and dropped


def test_added_norms_are_listed_in_the_report() -> None:
    result = converted("gpt2", "sandwich")
    made = {
        name.rpartition(".")[0]
        for name in set(result.new.state_dict()) - set(result.old.state_dict())
    }
    assert len(made) == 4
    rows = {row.target: row for row in result.report.mapping}
    for name in made:
        assert rows[f"{name}.weight"].op == "new"
        assert rows[f"{name}.bias"].op == "new"
    text = result.report.to_markdown()
    assert "new" in text
    again = ns.Report.from_json(result.report.to_json())
    assert {row.target for row in again.mapping if row.op == "new"} == {
        f"{name}.{leaf}" for name in made for leaf in ("weight", "bias")
    }


@pytest.mark.parametrize("name", ["bert", "bart", "opt post", "encoder post"])
def test_every_norm_that_a_native_class_adds_or_drops_is_listed(name: str) -> None:
    old, inputs = original(name), FAMILIES[name].inputs()
    new, report = ns.convert_placement(old, "pre", inputs)
    ops = {row.target: row.op for row in report.mapping}
    sources = {source for row in report.mapping for source in row.sources}
    norms = [n for n, m in new.named_modules() if isinstance(m, nn.LayerNorm)]
    assert all(f"{norm}.weight" in ops for norm in norms)
    before = [n for n, m in old.named_modules() if isinstance(m, nn.LayerNorm)]
    assert all(f"{norm}.weight" in sources for norm in before)
    for row in report.mapping:
        if row.op == "new":
            assert not row.sources, row
        elif row.op == "dropped":
            assert row.sources, row
            assert row.target in row.sources, row
        elif len(row.sources) == 1 and "norm" in row.target.lower() and row.op != "fold":
            source = old.state_dict()[row.sources[0]]
            assert torch.equal(new.state_dict()[row.target], source), row


# A norm's place is read off the dataflow, never off its name


class Block(nn.Module):
    """A Llama-like block, whose norms are named at will."""

    def __init__(self, attention_norm: str, mlp_norm: str) -> None:
        super().__init__()
        self.names = attention_norm, mlp_norm
        self.self_attn, self.mlp = Attention(bias=False), MLP(bias=False, gated=True)
        for name in sorted(self.names):
            self.add_module(name, nn.RMSNorm(WIDTH, eps=1e-6))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        x = x + self.self_attn(first(x))
        return x + self.mlp(second(x))


class Sandwiched(Block):
    """The same norms behind the branches."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = (getattr(self, name) for name in self.names)
        x = x + first(self.self_attn(x))
        return x + second(self.mlp(x))


class Tower(nn.Module):
    def __init__(self, block: Any, names: tuple[str, str]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(block(*names) for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


NAMES = [
    ("input_layernorm", "post_attention_layernorm"),
    ("post_attention_layernorm", "input_layernorm"),
    ("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("post_norm", "final_layernorm"),
]


@pytest.mark.parametrize("names", NAMES)
def test_norm_in_front_of_the_mlp_is_one_whatever_its_name(names: tuple[str, str]) -> None:
    model = fill_all(Tower(Block, names))
    (stack,) = ns.residual_structure(model, IDS).stacks
    assert stack.form == "pre"
    assert [(s.kind, s.input_norms) for s in stack.sublayers] == [
        (kind, (f"layers.{i}.{name}",))
        for i in range(2)
        for kind, name in zip(("attention", "feed-forward"), names, strict=True)
    ]
    new, report = ns.convert_placement(model, "post", IDS)
    assert report.counts == {"exact": 5}
    assert relative_error(call(model, IDS), call(new, IDS)) < EXACT


@pytest.mark.parametrize("names", NAMES)
def test_norm_behind_the_attention_is_one_whatever_its_name(names: tuple[str, str]) -> None:
    model = fill_all(Tower(Sandwiched, names))
    (stack,) = ns.residual_structure(model, IDS).stacks
    assert stack.form == "branch-output"
    assert [s.output_norms for s in stack.sublayers] == [
        (f"layers.{i}.{name}",) for i in range(2) for name in names
    ]
    with pytest.raises(ns.RefusedError, match="branch-output"):
        ns.convert_placement(model, "post", IDS)


def test_same_name_stands_elsewhere_in_llama_and_gemma() -> None:
    llama = ns.residual_structure(original("llama"), FAMILIES["llama"].inputs()).stacks[0]
    gemma = ns.residual_structure(original("gemma2"), FAMILIES["gemma2"].inputs()).stacks[0]
    assert llama.sublayers[1].input_norms == ("layers.0.post_attention_layernorm",)
    assert gemma.sublayers[0].output_norms == ("layers.0.post_attention_layernorm",)


# Files: a plan on a sharded checkpoint with tied tensors


TIED = [("bert", "pre", "cls.predictions.decoder.weight"), ("gpt2", "post", "lm_head.weight")]


def tied_model(family: str, to: str) -> tuple[Any, Any, Any]:
    """A model of the library whose head is tied to its table, converted, with the report."""
    model = library_model(family).float()
    new, report = place(model, to, library_inputs(family), verify=False)
    return model, new, report


def shards(directory: Path) -> dict[str, str]:
    return json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize(("family", "to", "head"), TIED)
def test_tensors_that_share_memory_are_saved_once_and_tied_after_a_reload(
    family: str, to: str, head: str, tmp_path: Path
) -> None:
    model, new, report = tied_model(family, to)
    table = model.get_input_embeddings().weight
    assert model.get_output_embeddings().weight is table
    ns.save(new, tmp_path / "out", report, max_shard_size="5KB")
    names = shards(tmp_path / "out")
    tied = [n for n in names if n == head or n.endswith(("word_embeddings.weight", "wte.weight"))]
    assert len(tied) == 1
    again = ns.load(tmp_path / "out")
    assert again.get_output_embeddings().weight is again.get_input_embeddings().weight
    assert torch.equal(again.get_input_embeddings().weight, table)
    inputs = library_inputs(family)
    assert relative_error(call(new, inputs), call(again, inputs)) < EXACT


@pytest.fixture
def source(tmp_path: Path) -> tuple[Path, Any, Any]:
    """A sharded checkpoint of a small BERT, its converted model and the report."""
    model, new, report = tied_model("bert", "pre")
    model.save_pretrained(tmp_path / "source", max_shard_size="6KB")
    assert len(set(shards(tmp_path / "source").values())) > 2
    return tmp_path / "source", new, report


def test_index_is_written_for_what_was_written(source: tuple[Path, Any, Any]) -> None:
    directory, _, report = source
    out = directory.parent / "out"
    report.plan.apply_to_checkpoint(directory, out)
    before = set(shards(directory))
    files = sorted(out.glob("*.safetensors"))
    written = {name: file.name for file in files for name in load_file(file)}
    index = out / "model.safetensors.index.json"
    if index.exists():
        assert shards(out) == written
        total = json.loads(index.read_text())["metadata"]["total_size"]
        tensors = [t for file in files for t in load_file(file).values()]
        assert total == sum(t.numel() * t.element_size() for t in tensors)
    else:
        assert len(files) == 1
    assert set(written) != before  # norms have other names
    moved = {row.target for row in report.mapping if row.op == "rotate"}
    assert moved <= set(written)


@pytest.mark.parametrize("size", ["5KB", "5GB"])
def test_plan_on_shards_gives_what_the_live_model_is(
    source: tuple[Path, Any, Any], size: str
) -> None:
    from normswap.checkpoint import apply_plan

    directory, new, report = source
    out = directory.parent / "out"
    apply_plan(report.plan, directory, out, max_shard_size=size)
    written = {k: t for file in out.glob("*.safetensors") for k, t in load_file(file).items()}
    live = new.state_dict()
    assert all(torch.equal(written[k], live[k]) for k in written if k in live)
    guards = set(written) - set(live)
    assert len(guards) <= 1
    assert guards <= set(report.plan.removed)
    missing = set(live) - set(written)
    kept = {live[k].data_ptr() for k in written if k in live}
    assert all(live[k].data_ptr() in kept for k in missing)  # the other name of a tied one


def test_index_that_names_a_missing_tensor_fails_before_anything_is_written(
    source: tuple[Path, Any, Any],
) -> None:
    directory, _, report = source
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["bert.encoder.layer.9.output.LayerNorm.weight"] = next(
        iter(index["weight_map"].values())
    )
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"layer\.9"):
        report.plan.apply_to_checkpoint(directory, directory.parent / "out")
    assert sorted(p.name for p in directory.parent.iterdir()) == ["source"]


def test_norm_that_the_checkpoint_lacks_fails_before_anything_is_written(
    source: tuple[Path, Any, Any],
) -> None:
    directory, _, report = source
    path = directory / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    name = "bert.encoder.layer.1.attention.output.LayerNorm.weight"
    file = directory / index["weight_map"].pop(name)
    from safetensors.torch import save_file

    tensors = {k: t for k, t in load_file(file).items() if k != name}
    save_file(tensors, file, metadata={"format": "pt"})
    path.write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"layer\.1\.attention\.output\.LayerNorm\.weight"):
        report.plan.apply_to_checkpoint(directory, directory.parent / "out")
    assert sorted(p.name for p in directory.parent.iterdir()) == ["source"]


def test_metadata_that_says_the_format_is_kept(source: tuple[Path, Any, Any]) -> None:
    directory, new, report = source
    report.plan.apply_to_checkpoint(directory, directory.parent / "out")
    ns.save(new, directory.parent / "saved", report)
    for out in ("out", "saved"):
        files = list((directory.parent / out).glob("*.safetensors"))
        assert files
        for file in files:
            with safe_open(file, "pt") as opened:
                assert opened.metadata()["format"] == "pt"


def test_renamed_norms_of_a_file_are_not_loaded_by_the_old_names(
    source: tuple[Path, Any, Any],
) -> None:
    """The old class would run with fresh norms and only warn."""
    from transformers import BertForMaskedLM

    directory, new, report = source
    ns.save(new, directory.parent / "out", report)
    with pytest.raises((RuntimeError, ValueError)):
        BertForMaskedLM.from_pretrained(directory.parent / "out")
    again = ns.load(directory.parent / "out")
    inputs = library_inputs("bert")
    assert relative_error(call(new, inputs), call(again, inputs)) < EXACT


def test_plain_result_of_a_native_class_loads_without_normswap(tmp_path: Path) -> None:
    model = build("bert").float()
    inputs = FAMILIES["bert"].inputs()
    new, _ = ns.convert_placement(model, "pre", inputs)
    assert type(new) is not type(model)
    new.save_pretrained(tmp_path / "out")
    again = type(new).from_pretrained(tmp_path / "out", add_pooling_layer=False).eval()
    assert relative_error(call(new, inputs), call(again, inputs)) < EXACT
