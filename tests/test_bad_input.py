"""Every kind of bad input: one line that says what and where, the right exit code, no files."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import test_cli
import torch
from helpers import randomise
from safetensors.torch import load_file, save_file
from test_cli import PLAIN, Run, write

run = test_cli.run  # the fixture
USAGE, DAMAGED, FAILED = 2, 3, 1


class Code:
    """Unpickling it would write a file."""

    def __reduce__(self) -> Any:
        return (os.system, ("touch it-ran",))


def cut(path: str, share: float = 0.5) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[: int(len(data) * share)])


def tree() -> list[str]:
    """All that there is, apart from Python's cache."""
    found = (path for path in Path().rglob("*") if "__pycache__" not in path.parts)
    return sorted(str(path) for path in found)


def assert_one_line(run: Run, code: int, message: str, *arguments: str) -> None:
    """The command fails so, says so in one line, and leaves everything as it was."""
    before = tree()
    done = run(*arguments)
    assert done.err.startswith("error: "), done.err
    assert done.err.count("\n") == 1, done.err
    assert "Traceback" not in done.err
    assert message in done.err
    assert done.code == code, done
    assert tree() == before


# Damaged checkpoints


def truncated_safetensors() -> str:
    cut("m.safetensors")
    return "m.safetensors"


def garbage_safetensors() -> str:
    Path("m.safetensors").write_bytes(b"hello world, I am no checkpoint at all")
    return "m.safetensors"


def empty_file() -> str:
    Path("m.safetensors").write_bytes(b"")
    return "m.safetensors"


def truncated_zip() -> str:
    torch.save(load_file("m.safetensors"), "m.pt")
    cut("m.pt")
    return "m.pt"


def truncated_legacy() -> str:
    torch.save(load_file("m.safetensors"), "m.pt", _use_new_zipfile_serialization=False)
    cut("m.pt", 0.8)
    return "m.pt"


def garbage_pickle() -> str:
    Path("m.pt").write_bytes(b"hello world, I am no checkpoint at all")
    return "m.pt"


def code_in_pickle() -> str:
    torch.save({"w": torch.ones(1), "x": Code()}, "m.pt")
    return "m.pt"


def code_in_plain_pickle() -> str:
    Path("m.bin").write_bytes(pickle.dumps({"x": Code()}, protocol=2))
    return "m.bin"


def code_in_new_pickle() -> str:
    Path("m.ckpt").write_bytes(pickle.dumps({"x": Code()}, protocol=4))
    return "m.ckpt"


def whole_model() -> str:
    torch.save(torch.nn.Linear(1, 1), "m.pth")
    return "m.pth"


def no_weights() -> str:
    torch.save({"epoch": 3, "optimizer": {}}, "m.pt")
    return "m.pt"


def list_in_pickle() -> str:
    torch.save([torch.ones(1)], "m.pt")
    return "m.pt"


def not_there() -> str:
    return "nowhere.pt"


def unknown_suffix() -> str:
    Path("m.h5").write_bytes(b"x")
    return "m.h5"


def empty_directory() -> str:
    Path("empty").mkdir()
    return "empty"


def nan_weights() -> str:
    state = load_file("m.safetensors")
    state["3.weight"][0] = torch.nan
    save_file(state, "m.safetensors")
    return "m.safetensors"


def infinite_variance() -> str:
    state = load_file("m.safetensors")
    state["4.running_var"][1] = torch.inf
    torch.save(state, "m.pt")
    return "m.pt"


def missing_tensor() -> str:
    state = load_file("m.safetensors")
    del state["4.running_var"]
    save_file(state, "m.safetensors")
    return "m.safetensors"


def shards(more: dict[str, str] | None = None) -> str:
    state = load_file("m.safetensors")
    Path("sharded").mkdir()
    save_file(state, "sharded/model-00001-of-00001.safetensors")
    where = dict.fromkeys(state, "model-00001-of-00001.safetensors") | (more or {})
    return index_of(json.dumps({"weight_map": where}))


def index_of(text: str) -> str:
    Path("sharded/model.safetensors.index.json").write_text(text)
    return "sharded"


def index_names_missing_tensor() -> str:
    return shards({"9.weight": "model-00001-of-00001.safetensors"})


def index_names_missing_file() -> str:
    return shards({"9.weight": "model-00002-of-00002.safetensors"})


def index_leaves_its_directory() -> str:
    return shards({"9.weight": "../m.safetensors"})


def index_without_map() -> str:
    shards()
    return index_of('{"weight_map": 3}')


def index_of_garbage() -> str:
    shards()
    return index_of("{garbage")


def truncated_shard() -> str:
    source = shards()
    cut("sharded/model-00001-of-00001.safetensors")
    return source


def directory_with(text: str) -> str:
    Path("hf").mkdir()
    Path("m.safetensors").rename("hf/model.safetensors")
    Path("hf/config.json").write_text(text)
    return "hf"


DAMAGE = [
    (truncated_safetensors, "m.safetensors: damaged or truncated"),
    (garbage_safetensors, "m.safetensors: damaged or truncated"),
    (empty_file, "m.safetensors: damaged or truncated"),
    (truncated_zip, "m.pt"),
    (truncated_legacy, "m.pt: damaged or truncated"),
    (garbage_pickle, "m.pt: damaged or truncated"),
    (code_in_pickle, "would run code (posix.system)"),
    (code_in_plain_pickle, "would run code (posix.system)"),
    (code_in_new_pickle, "m.ckpt: damaged, or a pickle of something else"),
    (whole_model, "would run code (torch.nn.modules.linear.Linear)"),
    (no_weights, "no weights found"),
    (list_in_pickle, "no weights found"),
    (not_there, "nowhere.pt: no such file"),
    (unknown_suffix, "m.h5: unknown kind of file"),
    (empty_directory, "empty: no weights in this directory"),
    (nan_weights, "tensor '3.weight' holds NaN or infinity"),
    (infinite_variance, "tensor '4.running_var' holds NaN or infinity"),
    (missing_tensor, "1 tensor (4.running_var) missing"),
    (index_names_missing_tensor, "names the tensor '9.weight'"),
    (index_names_missing_file, "names the file 'model-00002-of-00002.safetensors'"),
    (index_leaves_its_directory, "'../m.safetensors' is no name of a file beside the index"),
    (index_without_map, "has no weight_map"),
    (index_of_garbage, "is not JSON"),
    (truncated_shard, "damaged or truncated"),
]


@pytest.mark.parametrize(("make", "message"), DAMAGE, ids=[make.__name__ for make, _ in DAMAGE])
def test_damaged_checkpoint(run: Run, make: Any, message: str) -> None:
    write("plain")
    source = make()
    assert_one_line(run, DAMAGED, message, "fold-bn", source, "out", *PLAIN)
    assert_one_line(run, DAMAGED, message, "verify", source, source, *PLAIN)
    assert not Path("it-ran").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [(make, message) for make, message in DAMAGE if make is not missing_tensor],
    ids=[make.__name__ for make, _ in DAMAGE if make is not missing_tensor],
)
def test_damaged_checkpoint_for_a_plan(run: Run, make: Any, message: str) -> None:
    write("plain")
    assert run("fold-bn", "m.safetensors", "good", *PLAIN).code == 0
    assert_one_line(run, DAMAGED, message, "apply", "good", make(), "out")


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("{garbage", DAMAGED, "config.json: is not JSON"),
        ("[]", DAMAGED, "config.json: holds no JSON object"),
        ("{}", DAMAGED, "config.json: names no architecture"),
        ('{"architectures": ["Nothing"]}', DAMAGED, "has no model class 'Nothing'"),
        ('{"architectures": ["ResNetModel"], "model_type": "nothing"}', DAMAGED, "hf"),
        ('{"architecture": "resnet81"}', USAGE, "timm knows no model 'resnet81'"),
        ('{"architecture": "resnet10t"}', DAMAGED, "does not fit timm:resnet10t"),
    ],
)
def test_directory_with_a_bad_config(run: Run, text: str, code: int, message: str) -> None:
    write("plain")
    assert_one_line(run, code, message, "fold-bn", directory_with(text), "out")


# Wrong use


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), USAGE, "pass --arch"),
        (("--arch", "plain"), USAGE, "'plain' is not understood"),
        (("--arch", "timm:resnet81"), USAGE, "timm knows no model 'resnet81'"),
        (("--arch", "torchvision:nothing"), USAGE, "torchvision knows no model 'nothing'"),
        (("--arch", "nothing:plain"), USAGE, "cannot import nothing"),
        (("--arch", "networks:nothing"), USAGE, "networks has no nothing"),
        (("--arch", "timm:resnet10t"), DAMAGED, "does not fit timm:resnet10t"),
        (("--arch", "networks:unfoldable"), DAMAGED, "does not fit networks:unfoldable"),
        ((*PLAIN, "--arch-kwargs", "{garbage"), USAGE, "--arch-kwargs is not JSON"),
        ((*PLAIN, "--arch-kwargs", "[1]"), USAGE, "must be a JSON object"),
        ((*PLAIN, "--arch-kwargs", '{"deep": 1}'), USAGE, "failed: TypeError"),
        ((*PLAIN, "--arch-kwargs", '{"width": 5}'), DAMAGED, "of another shape"),
        (("--arch", "networks:plain"), USAGE, "example_inputs"),
        (("--arch", "networks:plain", "--input-shape", "a,b"), USAGE, "--input-shape 'a,b'"),
        (("--arch", "networks:plain", "--input-shape", ""), USAGE, "--input-shape ''"),
        (("--arch", "networks:plain", "--input-shape", "1,0,8"), USAGE, "--input-shape '1,0,8'"),
        (("--arch", "networks:plain", "--input-shape", "1,5,8,8"), FAILED, ""),
        ((*PLAIN, "--inputs", "m.safetensors"), USAGE, "not both"),
        (("--arch", "networks:plain", "--inputs", "nowhere.pt"), DAMAGED, "nowhere.pt: no such"),
        ((*PLAIN, "--dtype", "float7"), USAGE, "--dtype 'float7'"),
        ((*PLAIN, "--max-shard-size", "5 bananas"), USAGE, "'5 bananas' is no shard size"),
        ((*PLAIN, "--export", "model.tflite"), USAGE, "cannot export to model.tflite"),
        ((*PLAIN, "--nonsense"), USAGE, "--nonsense"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, tuple) else None,
)
def test_wrong_options(run: Run, options: tuple[str, ...], code: int, message: str) -> None:
    write("plain")
    assert_one_line(run, code, message, "fold-bn", "m.safetensors", "out", *options)


def test_missing_arguments(run: Run) -> None:
    write("plain")
    assert_one_line(run, USAGE, "DST is missing", "fold-bn", "m.safetensors", *PLAIN)
    assert_one_line(run, USAGE, "SRC", "fold-bn")
    assert_one_line(run, USAGE, "nonsense", "nonsense")


def test_destinations_that_cannot_be_written(run: Run) -> None:
    write("plain")
    Path("file").write_text("x")
    Path("there").mkdir()
    Path("there/photo.jpg").write_text("x")
    assert run("fold-bn", "m.safetensors", "good", *PLAIN).code == 0
    fold, apply = (
        ("fold-bn", "m.safetensors", "{}", *PLAIN),
        ("apply", "good", "m.safetensors", "{}"),
    )
    for command in (fold, apply):
        for target, message, options in (
            ("file", "exists already", ()),
            ("file", "is a file", ("--overwrite",)),
            ("file/out", "cannot be written", ()),
            ("file/deep/out", "cannot be written", ()),
            ("there", "exists already", ()),
            ("there", "does not look like a model directory", ("--overwrite",)),
        ):
            arguments = [part.format(target) for part in command]
            assert_one_line(run, USAGE, message, *arguments, *options)


def test_exported_file_that_exists_or_cannot_be_written(run: Run) -> None:
    write("plain")
    Path("there.pt2").write_text("x")
    for target, message in (("./there.pt2", "exists"), ("file/x.pt2", "no directory")):
        path = str(Path.cwd() / target)
        arguments = ("fold-bn", "m.safetensors", "out", *PLAIN, "--export", path)
        assert_one_line(run, USAGE, message, *arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{garbage", "plan.json: is not JSON"),
        ("[]", "plan.json: holds no JSON object"),
        ("{}", "plan.json: not a normswap plan"),
        ('{"version": 99}', "plan version 99"),
        ('{"format": "normswap", "plans": []}', "plan.json: holds no plan"),
    ],
)
def test_garbage_plan(run: Run, text: str, message: str) -> None:
    write("plain")
    Path("plan.json").write_text(text)
    assert_one_line(run, DAMAGED, message, "apply", "plan.json", "m.safetensors", "out")


def test_plan_for_another_checkpoint(run: Run) -> None:
    write("plain")
    assert run("fold-bn", "m.safetensors", "good", *PLAIN).code == 0
    import networks

    save_file(randomise(networks.plain(width=6)).state_dict(), "wide.safetensors")
    save_file({"w": torch.ones(1)}, "other.safetensors")
    assert_one_line(run, DAMAGED, "wide.safetensors", "apply", "good", "wide.safetensors", "out")
    assert_one_line(run, DAMAGED, "there is no tensor", "apply", "good", "other.safetensors", "out")
    assert_one_line(run, DAMAGED, "written by normswap", "apply", "good", "good", "out")


def test_directory_of_a_users_architecture_needs_its_name(run: Run) -> None:
    write("plain")
    assert run("fold-bn", "m.safetensors", "good", *PLAIN).code == 0
    shape = ("--input-shape", "1,3,8,8")
    assert_one_line(run, USAGE, "--arch", "verify", "good", "good", *shape)


def test_unexpected_errors_are_one_line_too(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    write("plain")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("division\nby zero")

    monkeypatch.setattr("normswap.fold_batchnorm", fail)
    message = "unexpected ZeroDivisionError: division by zero"
    assert_one_line(run, FAILED, message, "fold-bn", "m.safetensors", "out", *PLAIN)
