"""Reading checkpoints of every kind, writing them all or nothing, and plans on files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from normswap import checkpoint
from normswap.checkpoint import (
    DestinationError,
    ShardWriter,
    apply_plan,
    check_destination,
    staged_directory,
)
from normswap.errors import CheckpointError, NormswapError
from normswap.manifest import Manifest, read_plan
from normswap.plan import Plan
from normswap.program import Edit
from normswap.tensorstore import TensorInfo, open_store


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    return {
        "a.weight": torch.randn(4, 3),
        "a.bias": torch.randn(4, dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.zeros(0, 2),
    }


def assert_holds(store: Any, expected: dict[str, Tensor]) -> None:
    assert set(store) == set(expected)
    for name, tensor in expected.items():
        assert store.infos[name] == TensorInfo(tuple(tensor.shape), tensor.dtype)
        assert torch.equal(store.read(name), tensor)


def listed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Reading


def test_safetensors_file_is_read(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, tmp_path / "m.safetensors")
    assert_holds(open_store(tmp_path / "m.safetensors"), tensors)


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin", ".ckpt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_pickle_of_tensors_is_read(
    tmp_path: Path, tensors: dict[str, Tensor], suffix: str, zipped: bool
) -> None:
    path = tmp_path / f"m{suffix}"
    torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
    assert_holds(open_store(path), tensors)


@pytest.mark.parametrize("key", ["state_dict", "model", "model_state_dict"])
def test_wrapper_is_opened_and_the_rest_is_noted(
    tmp_path: Path, tensors: dict[str, Tensor], key: str
) -> None:
    ema = {name: tensor + 1 for name, tensor in tensors.items()}
    torch.save({"epoch": 3, key: tensors, "model_ema": ema}, tmp_path / "m.pt")
    store = open_store(tmp_path / "m.pt")
    assert_holds(store, tensors)
    assert set(store.ignored) == {"epoch", "model_ema"}


def test_prefixes_of_wrappers_are_taken_off(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    prefixed = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
    torch.save(prefixed, tmp_path / "m.pt")
    assert_holds(open_store(tmp_path / "m.pt"), tensors)


def test_prefix_of_some_names_only_stays(tmp_path: Path) -> None:
    names = {"module.a": torch.ones(1), "b": torch.ones(1)}
    torch.save(names, tmp_path / "m.pt")
    assert set(open_store(tmp_path / "m.pt")) == set(names)


def test_tied_tensors_of_a_pickle_are_aliases(tmp_path: Path) -> None:
    table = torch.randn(5, 2)
    torch.save({"emb": table, "head": table, "rows": table[:2]}, tmp_path / "m.pt")
    store = open_store(tmp_path / "m.pt")
    assert store.aliases == {"head": "emb"}
    loaded = store.read_all()
    assert loaded["head"] is loaded["emb"]
    assert torch.equal(loaded["rows"], table[:2])


def test_tied_tensors_noted_by_safetensors_are_aliases(tmp_path: Path) -> None:
    metadata = {"format": "pt", "head": "emb"}
    save_file({"emb": torch.ones(2)}, tmp_path / "m.safetensors", metadata=metadata)
    store = open_store(tmp_path / "m.safetensors")
    assert set(store) == {"emb", "head"}
    assert store.aliases == {"head": "emb"}


def write_shards(directory: Path, tensors: dict[str, Tensor], suffix: str) -> Path:
    """Two shards and their index, as transformers names them."""
    directory.mkdir()
    stem = "model" if suffix == ".safetensors" else "pytorch_model"
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[:2], names[2:]), 1):
        file = f"{stem}-0000{number}-of-00002{suffix}"
        weight_map |= dict.fromkeys(part, file)
        values = {name: tensors[name] for name in part}
        if suffix == ".safetensors":
            save_file(values, directory / file)
        else:
            torch.save(values, directory / file)
    index = directory / f"{stem}{suffix}.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return index


@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_sharded_directory_is_read(tmp_path: Path, tensors: dict[str, Tensor], suffix: str) -> None:
    index = write_shards(tmp_path / "m", tensors, suffix)
    assert_holds(open_store(index), tensors)
    assert_holds(open_store(tmp_path / "m"), tensors)


@pytest.mark.parametrize("name", ["model.safetensors", "other.safetensors", "pytorch_model.bin"])
def test_directory_with_one_file_is_read(
    tmp_path: Path, tensors: dict[str, Tensor], name: str
) -> None:
    save = save_file if name.endswith("safetensors") else torch.save
    save(tensors, tmp_path / name)
    assert_holds(open_store(tmp_path), tensors)


def test_masks_of_minus_infinity_are_no_damage(tmp_path: Path) -> None:
    mask = torch.full((3, 3), -torch.inf).triu(1)
    save_file({"mask": mask}, tmp_path / "m.safetensors")
    assert torch.equal(open_store(tmp_path / "m.safetensors").read("mask"), mask)


# Writing


def write(directory: Path, tensors: dict[str, Tensor], **options: Any) -> None:
    infos = {name: TensorInfo(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    ShardWriter(directory, infos, tensors.__getitem__, **options).finish()


def test_written_file_says_its_format(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write(tmp_path, tensors, marker='{"version": 1}')
    assert listed(tmp_path) == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt", "normswap": '{"version": 1}'}
    assert_holds(open_store(tmp_path), tensors)


def test_index_is_written_for_what_was_written(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(100) for i in range(5)}
    write(tmp_path, tensors, max_shard_size=900)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 2000
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert len(files) == 3
    assert set(index["weight_map"].values()) == set(files)
    for file in files:
        named = {name for name, where in index["weight_map"].items() if where == file}
        assert set(load_file(tmp_path / file)) == named
    assert_holds(open_store(tmp_path), tensors)


def test_shard_is_written_once_its_last_awaited_tensor_comes(tmp_path: Path) -> None:
    tensors = {f"w{i}": torch.randn(100) for i in range(4)}
    infos = {name: TensorInfo((100,), torch.float32) for name in tensors}
    writer = ShardWriter(
        tmp_path, infos, tensors.__getitem__, awaited=["w0", "w3"], max_shard_size=800
    )
    first, second = (tmp_path / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    writer.put("w0", tensors["w0"])
    assert first.exists()
    assert not second.exists()
    writer.put("w3", tensors["w3"])
    assert second.exists()
    assert not writer.held
    writer.finish()
    assert_holds(open_store(tmp_path), tensors)


def test_result_is_cast_once_to_the_stored_dtype(tmp_path: Path) -> None:
    infos = {"w": TensorInfo((3,), torch.bfloat16)}
    writer = ShardWriter(tmp_path, infos, {}.__getitem__, awaited=["w"])
    value = torch.tensor([1.003, 2.0, -3.14159], dtype=torch.float64)
    writer.put("w", value)
    writer.finish()
    assert torch.equal(open_store(tmp_path).read("w"), value.bfloat16())


def test_overflow_of_the_stored_dtype_is_an_error(tmp_path: Path) -> None:
    infos = {"w": TensorInfo((1,), torch.float16)}
    writer = ShardWriter(tmp_path, infos, {}.__getitem__, awaited=["w"])
    with pytest.raises(CheckpointError, match=r"'w'.*does not fit torch.float16"):
        writer.put("w", torch.tensor([1e6], dtype=torch.float64))


def test_tensor_of_another_shape_is_not_written(tmp_path: Path) -> None:
    infos = {"w": TensorInfo((1,), torch.float32)}
    writer = ShardWriter(tmp_path, infos, {}.__getitem__, awaited=["w"])
    with pytest.raises(CheckpointError, match=r"'w'.*\(2,\).*\(1,\)"):
        writer.put("w", torch.zeros(2))


def test_bad_shard_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(NormswapError, match="5 bananas"):
        write(tmp_path, {"w": torch.ones(1)}, max_shard_size="5 bananas")


def test_views_and_strided_tensors_are_written_as_they_look(tmp_path: Path) -> None:
    base = torch.randn(4, 6)
    tensors = {"t": base.t(), "rows": base[:2], "all": base, "nhwc": torch.randn(2, 3, 4, 4)}
    tensors["nhwc"] = tensors["nhwc"].to(memory_format=torch.channels_last)
    write(tmp_path, tensors)
    assert_holds(open_store(tmp_path), tensors)


# All or nothing


def test_directory_appears_when_the_block_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "new" / "dir"
    with staged_directory(target) as stage:
        (stage / "file").write_text("x")
        assert not target.exists()
    assert (target / "file").read_text() == "x"
    assert listed(tmp_path / "new") == ["dir"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError])
def test_nothing_is_left_behind_when_the_block_fails(
    tmp_path: Path, error: type[BaseException]
) -> None:
    expected = DestinationError if error is OSError else error

    def fail(stage: Path) -> None:
        (stage / "sub").mkdir()
        raise error("broken")

    with pytest.raises(expected), staged_directory(tmp_path / "new" / "dir") as stage:
        fail(stage)
    assert listed(tmp_path) == []


def test_existing_destination_is_kept(tmp_path: Path) -> None:
    target = tmp_path / "dir"
    target.mkdir()
    with pytest.raises(DestinationError, match="exists"), staged_directory(target):
        pytest.fail("entered")
    assert listed(tmp_path) == ["dir"]


def model_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


def test_overwriting_replaces_a_model_directory(tmp_path: Path) -> None:
    target = model_directory(tmp_path / "dir")
    with staged_directory(target, overwrite=True) as stage:
        (stage / "new").write_text("x")
    assert listed(target) == ["new"]
    assert listed(tmp_path) == ["dir"]


def test_failed_overwriting_keeps_what_was_there(tmp_path: Path) -> None:
    target = model_directory(tmp_path / "dir")
    with pytest.raises(ValueError, match="x"), staged_directory(target, overwrite=True):
        raise ValueError("x")
    assert listed(target) == ["config.json"]
    assert listed(tmp_path) == ["dir"]


def test_only_model_directories_are_overwritten(tmp_path: Path) -> None:
    (tmp_path / "holiday.jpg").write_text("")
    with pytest.raises(DestinationError, match="does not look like a model"):
        check_destination(tmp_path, overwrite=True)
    with pytest.raises(DestinationError, match="is a file"):
        check_destination(tmp_path / "holiday.jpg", overwrite=True)


def test_destination_below_a_file_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(DestinationError, match="cannot be written"),
        staged_directory(tmp_path / "file" / "sub" / "dir"),
    ):
        pytest.fail("entered")
    assert listed(tmp_path) == ["file"]


# Plans on files


def fold_edits(conv: str, bn: str, channels: int, temporary: str) -> list[Edit]:
    """conv without bias, then bn: W' = s W, b' = t."""
    scale, shift, column = (f"%{temporary}{i}" for i in range(3))
    statistics = (f"{bn}.running_var", f"{bn}.weight")
    return [
        Edit(scale, "batch_norm_scale", statistics, {"eps": 1e-5}),
        Edit(shift, "batch_norm_shift", (scale, f"{bn}.running_mean", f"{bn}.bias"), {}),
        Edit(column, "reshape", (scale,), {"shape": [-1, 1, 1, 1]}),
        Edit(f"{conv}.weight", "scale", (f"{conv}.weight", column), {}),
        Edit(f"{conv}.bias", "reshape", (shift,), {"shape": [channels]}),
    ]


BN_NAMES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def fold_plan(blocks: int, channels: int) -> Plan:
    edits: list[Edit] = []
    for i in range(blocks):
        edits += fold_edits(f"{i}.conv", f"{i}.bn", channels, f"t{i}_")
    return Plan(
        "fold_batchnorm",
        "fingerprint",
        edits=edits,
        removed=[f"{i}.bn.{name}" for i in range(blocks) for name in BN_NAMES],
        created={
            f"{i}.conv.bias": {"shape": [channels], "like": f"{i}.conv.weight"}
            for i in range(blocks)
        },
    )


def unfolded(blocks: int, channels: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for i in range(blocks):
        tensors[f"{i}.conv.weight"] = torch.randn(channels, channels, 3, 3).to(dtype)
        tensors[f"{i}.bn.weight"] = torch.randn(channels)
        tensors[f"{i}.bn.bias"] = torch.randn(channels)
        tensors[f"{i}.bn.running_mean"] = torch.randn(channels)
        tensors[f"{i}.bn.running_var"] = torch.rand(channels) + 0.1
        tensors[f"{i}.bn.num_batches_tracked"] = torch.tensor(3)
        tensors[f"{i}.other"] = torch.randn(channels)
    return tensors


def folded(tensors: dict[str, Tensor], blocks: int) -> dict[str, Tensor]:
    result = {name: tensor for name, tensor in tensors.items() if ".bn." not in name}
    for i in range(blocks):
        weight, bias, mean, var = (tensors[f"{i}.bn.{name}"].double() for name in BN_NAMES[:4])
        scale = weight / torch.sqrt(var + 1e-5)
        kernel = tensors[f"{i}.conv.weight"]
        result[f"{i}.conv.weight"] = (kernel * scale[:, None, None, None]).to(kernel.dtype)
        result[f"{i}.conv.bias"] = (bias - mean * scale).to(kernel.dtype)
    return result


def assert_same(store: Any, expected: dict[str, Tensor]) -> None:
    assert set(store) == set(expected)
    for name, tensor in expected.items():
        assert store.infos[name] == TensorInfo(tuple(tensor.shape), tensor.dtype)
        torch.testing.assert_close(store.read(name), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["safetensors", "pickle", "sharded"])
def test_plan_is_carried_out_on_files(tmp_path: Path, dtype: torch.dtype, kind: str) -> None:
    tensors = unfolded(2, 4, dtype)
    src = tmp_path / {"safetensors": "m.safetensors", "pickle": "m.pt", "sharded": "m"}[kind]
    if kind == "safetensors":
        save_file(tensors, src)
    elif kind == "pickle":
        torch.save({"state_dict": tensors}, src)
    else:
        write_shards(src, tensors, ".safetensors")
    fold_plan(2, 4).apply_to_checkpoint(src, tmp_path / "out")
    store = open_store(tmp_path / "out")
    assert_same(store, folded(tensors, 2))
    assert store.marker == {"version": 1, "rewrites": ["fold_batchnorm"], "guard": "0.bn.weight"}
    assert listed(tmp_path / "out") == ["model.safetensors", "normswap.json"]
    assert Manifest.read(tmp_path / "out").plans == (fold_plan(2, 4),)
    assert read_plan(tmp_path / "out")[0] == fold_plan(2, 4)


def test_memory_holds_a_shard_and_not_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two shards a shard's tensors are read, in whatever order the file has them."""
    blocks, channels = 12, 4
    tensors = unfolded(blocks, channels)
    order = sorted(tensors, key=lambda name: (int(name.split(".")[0]) * 5 % blocks, name))
    torch.save({name: tensors[name] for name in order}, tmp_path / "m.pt")
    events: list[str] = []

    def recording_store(src: Path) -> Any:
        store = open_store(src)
        read = store.reader
        object.__setattr__(store, "reader", lambda name: (events.append(name), read(name))[1])
        return store

    monkeypatch.setattr(checkpoint, "open_store", recording_store)
    apply_plan(
        fold_plan(blocks, channels),
        tmp_path / "m.pt",
        tmp_path / "out",
        max_shard_size=2 * 4 * channels * (9 * channels + 2),
        progress=lambda nbytes: events.append("shard"),
    )
    assert_same(open_store(tmp_path / "out"), folded(tensors, blocks))
    groups = " ".join(events).split("shard")
    assert len(groups) > blocks // 2
    # A block has six tensors to read, a shard holds two blocks.
    assert max(len(group.split()) for group in groups) <= 3 * 6
    assert len(events) == len(set(events)) + events.count("shard") - 1, "a tensor is read twice"


def test_tied_tensors_are_edited_once_and_stay_tied(tmp_path: Path) -> None:
    tensors = unfolded(1, 4)
    tensors["tied.weight"] = tensors["0.conv.weight"]
    plan = fold_plan(1, 4)
    plan.aliases = {"0.conv.weight": ["0.conv.weight", "tied.weight"]}
    torch.save(tensors, tmp_path / "m.pt")
    apply_plan(plan, tmp_path / "m.pt", tmp_path / "out")
    store = open_store(tmp_path / "out")
    assert store.aliases == {"tied.weight": "0.conv.weight"}
    expected = folded(tensors, 1)
    expected["tied.weight"] = expected["0.conv.weight"]
    assert_same(store, expected)


def test_tensor_stored_under_another_of_its_names_is_found(tmp_path: Path) -> None:
    tensors = unfolded(1, 4)
    plan = fold_plan(1, 4)
    plan.aliases = {"0.conv.weight": ["0.conv.weight", "tied.weight"]}
    renamed = {name.replace("0.conv.weight", "tied.weight"): t for name, t in tensors.items()}
    save_file(renamed, tmp_path / "m.safetensors")
    apply_plan(plan, tmp_path / "m.safetensors", tmp_path / "out")
    expected = folded(tensors, 1)
    expected["tied.weight"] = expected.pop("0.conv.weight")
    assert_same(open_store(tmp_path / "out"), expected)


def test_copies_of_a_tied_tensor_that_differ_are_an_error(tmp_path: Path) -> None:
    tensors = unfolded(1, 4)
    tensors["tied.weight"] = tensors["0.conv.weight"] + 1
    plan = fold_plan(1, 4)
    plan.aliases = {"0.conv.weight": ["0.conv.weight", "tied.weight"]}
    save_file(tensors, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=r"'tied.weight'.*differ"):
        apply_plan(plan, tmp_path / "m.safetensors", tmp_path / "out")


def test_tied_tensors_that_the_plan_does_not_touch_stay_tied(tmp_path: Path) -> None:
    tensors = unfolded(1, 4)
    tensors["again"] = tensors["0.other"]
    torch.save(tensors, tmp_path / "m.pt")
    apply_plan(fold_plan(1, 4), tmp_path / "m.pt", tmp_path / "out")
    assert open_store(tmp_path / "out").aliases == {"again": "0.other"}


def test_name_that_shares_memory_with_an_edited_one_but_is_no_alias_keeps_its_value(
    tmp_path: Path,
) -> None:
    tensors = unfolded(1, 4)
    tensors["copy"] = tensors["0.conv.weight"]
    torch.save(tensors, tmp_path / "m.pt")
    apply_plan(fold_plan(1, 4), tmp_path / "m.pt", tmp_path / "out")
    assert_same(open_store(tmp_path / "out"), folded(tensors, 1))


def damaged_sources(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    return {
        "missing": {k: v for k, v in tensors.items() if k != "1.bn.running_var"},
        "nan in an edited tensor": tensors | {"1.bn.bias": torch.full((4,), torch.nan)},
        "inf in another tensor": tensors | {"1.other": torch.full((4,), torch.inf)},
        "another shape": tensors
        | {"1.bn.weight": torch.ones(5), "1.bn.running_var": torch.ones(5)},
    }


@pytest.mark.parametrize("fault", damaged_sources(unfolded(2, 4)))
def test_damaged_checkpoint_is_named_and_nothing_is_written(tmp_path: Path, fault: str) -> None:
    save_file(damaged_sources(unfolded(2, 4))[fault], tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError) as caught:
        apply_plan(fold_plan(2, 4), tmp_path / "m.safetensors", tmp_path / "out")
    if fault != "another shape":
        assert "'1." in str(caught.value)
    assert "\n" not in str(caught.value)
    assert listed(tmp_path) == ["m.safetensors"]


def test_plan_is_not_applied_to_its_own_result(tmp_path: Path) -> None:
    save_file(unfolded(1, 4), tmp_path / "m.safetensors")
    apply_plan(fold_plan(1, 4), tmp_path / "m.safetensors", tmp_path / "out")
    with pytest.raises(CheckpointError, match="written by normswap"):
        apply_plan(fold_plan(1, 4), tmp_path / "out", tmp_path / "again")
    assert listed(tmp_path) == ["m.safetensors", "out"]


def test_written_file_cannot_be_loaded_into_the_original_even_unstrictly(tmp_path: Path) -> None:
    """mmdetection#2924: unstrict loading only warned, and the outputs were wrong."""
    block = torch.nn.ModuleDict(
        {"conv": torch.nn.Conv2d(4, 4, 3, bias=False), "bn": torch.nn.BatchNorm2d(4)}
    )
    model = torch.nn.ModuleDict({"0": block})
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    apply_plan(fold_plan(1, 4), tmp_path / "m.safetensors", tmp_path / "out")
    state = load_file(tmp_path / "out" / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.bn\.weight"):
        model.load_state_dict(state, strict=False)
