"""Models from and to directories: which architecture, strict loading, and round trips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from helpers import assert_same, random_input, randomise
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import normswap as ns
from normswap import hub
from normswap.architecture import ArchSpec
from normswap.errors import CheckpointError, NormswapError, RefusedError
from normswap.manifest import Manifest

NETWORK = '''
from torch import nn

class Net(nn.Sequential):
    """Two convolutions with BatchNorms, one of them without a bias."""
    def __init__(self, width=4, tied=False):
        super().__init__(
            nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, bias=False), nn.BatchNorm2d(width), nn.Flatten(1),
        )
        if tied:
            self[3].other = self[3].weight

def build(width=4, tied=False):
    return Net(width, tied)

def broken():
    raise ValueError("no such luck")

def number():
    return 3
'''
SHAPE = (2, 3, 8, 8)


@pytest.fixture
def mynet(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A package of the user's with the architecture `mynet:build`."""
    directory = tmp_path_factory.mktemp("code")
    (directory / "mynet.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(directory)
    monkeypatch.delitem(__import__("sys").modules, "mynet", raising=False)
    import mynet

    return mynet


def net(mynet: Any, **kwargs: Any) -> nn.Module:
    return randomise(mynet.build(**kwargs)).eval()


def small_timm(**kwargs: Any) -> nn.Module:
    import timm

    return randomise(timm.create_model("resnet10t", **kwargs)).eval()


def small_torchvision(**kwargs: Any) -> nn.Module:
    return randomise(torchvision.models.mobilenet_v3_small(**kwargs)).eval()


def small_transformers() -> Any:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic"
    )
    return randomise(ResNetForImageClassification(config)).eval()


def listed(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# Architectures


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("timm:resnet18", "timm", "resnet18"),
        ("torchvision:resnet18", "torchvision", "resnet18"),
        ("package.module:Class.method", "python", "package.module:Class.method"),
    ],
)
def test_architecture_is_parsed_and_shown_as_written(text: str, kind: str, name: str) -> None:
    spec = ArchSpec.parse(text, {"depth": 2})
    assert (spec.kind, spec.name, dict(spec.kwargs)) == (kind, name, {"depth": 2})
    assert str(spec) == text
    assert ArchSpec.from_dict(spec.to_dict()) == spec


@pytest.mark.parametrize(
    ("text", "kwargs", "message"),
    [
        ("resnet18", {}, "write timm:NAME"),
        ("timm:", {}, "write timm:NAME"),
        ("timm:resnet81", {}, "knows no model 'resnet81'; near to it: resnet18"),
        ("timm:hf-hub:timm/resnet18", {}, "knows no model"),
        ("timm:resnet10t", {"depht": 3}, "building timm:resnet10t .* failed: TypeError"),
        ("timm:resnet10t", {"pretrained": True}, "'pretrained' is not allowed"),
        ("timm:resnet10t", {"checkpoint_path": "x.pth"}, "'checkpoint_path' is not allowed"),
        ("torchvision:resnet81", {}, "knows no model 'resnet81'"),
        ("torchvision:resnet18", {"weights": "DEFAULT"}, "'weights' is not allowed"),
        ("no_such_package:build", {}, "cannot import no_such_package"),
        ("mynet:nothing", {}, "mynet has no nothing"),
        ("mynet:number", {}, "gave a int, not an nn.Module"),
        ("mynet:broken", {}, "failed: ValueError: no such luck"),
        ("mynet:NETS", {}, "mynet has no NETS"),
    ],
)
def test_architecture_that_cannot_be_built_is_one_clear_error(
    mynet: Any, text: str, kwargs: dict[str, Any], message: str
) -> None:
    with pytest.raises(NormswapError, match=message) as caught:
        ArchSpec.parse(text, kwargs).build()
    assert "\n" not in str(caught.value)


def test_building_leaves_the_random_state_alone(mynet: Any) -> None:
    before = torch.get_rng_state()
    model = ArchSpec.parse("mynet:build").build()
    assert torch.equal(torch.get_rng_state(), before)
    assert not model.training


def test_detection_models_are_built_without_a_download() -> None:
    spec = ArchSpec.parse("torchvision:lraspp_mobilenet_v3_large", {"num_classes": 2})
    assert any(isinstance(m, nn.BatchNorm2d) for m in spec.build().modules())


# Loading what others wrote


@pytest.mark.parametrize("name", ["m.safetensors", "m.pt", "m.ckpt"])
def test_file_is_loaded_into_the_named_architecture(tmp_path: Path, mynet: Any, name: str) -> None:
    model = net(mynet, width=6)
    save = save_file if name.endswith("safetensors") else torch.save
    save(model.state_dict(), tmp_path / name)
    loaded, origin = hub.load_model(tmp_path / name, "mynet:build", {"width": 6})
    assert not loaded.training
    assert str(origin.arch) == "mynet:build"
    assert_same(model, loaded, random_input(*SHAPE, dtype=torch.float32), tol=1e-7)


def test_stored_dtypes_are_kept_and_can_be_converted(tmp_path: Path, mynet: Any) -> None:
    model = net(mynet)
    model[0].to(torch.bfloat16)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    loaded, _ = hub.load_model(tmp_path / "m.safetensors", "mynet:build")
    assert loaded[0].weight.dtype == torch.bfloat16
    assert loaded[1].weight.dtype == torch.float32
    loaded, _ = hub.load_model(tmp_path / "m.safetensors", "mynet:build", dtype=torch.float64)
    assert {p.dtype for p in loaded.parameters()} == {torch.float64}
    assert loaded[1].num_batches_tracked.dtype == torch.int64


def test_tied_tensor_stored_once_is_not_missing(tmp_path: Path, mynet: Any) -> None:
    from safetensors.torch import save_model

    model = net(mynet, tied=True)
    save_model(model, str(tmp_path / "m.safetensors"))
    loaded, _ = hub.load_model(tmp_path / "m.safetensors", "mynet:build", {"tied": True})
    assert loaded[3].other is loaded[3].weight
    assert torch.equal(loaded[3].weight, model[3].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("0.weight"), r"1 tensor \(0.weight\) missing; is the architecture"),
        (lambda s: s.update(extra=torch.ones(1)), r"1 tensor \(extra\) unexpected"),
        (lambda s: s.update({"0.weight": torch.ones(9)}), r"0.weight\) of another shape"),
        (
            lambda s: s.update({"1.running_var": torch.full((4,), torch.nan)}),
            "'1.running_var'.*NaN",
        ),
    ],
)
def test_checkpoint_that_does_not_fit_is_one_clear_error(
    tmp_path: Path, mynet: Any, change: Any, message: str
) -> None:
    state = dict(net(mynet).state_dict())
    change(state)
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.load_model(tmp_path / "m.safetensors", "mynet:build")
    assert "\n" not in str(caught.value)


def test_file_alone_needs_an_architecture(tmp_path: Path, mynet: Any) -> None:
    save_file(net(mynet).state_dict(), tmp_path / "m.safetensors")
    with pytest.raises(NormswapError, match="pass --arch"):
        hub.load_model(tmp_path / "m.safetensors")


def test_transformers_directory_is_loaded(tmp_path: Path) -> None:
    model = small_transformers()
    model.save_pretrained(tmp_path)
    loaded, origin = hub.load_model(tmp_path)
    assert str(origin.arch) == "transformers:ResNetForImageClassification"
    assert type(loaded) is type(model)
    pixels = random_input(2, 3, 32, 32, dtype=torch.float32)
    assert torch.equal(loaded(pixels).logits, model(pixels).logits)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"architectures": None}, CheckpointError, "names no architecture"),
        ({"architectures": ["Nonsense"]}, CheckpointError, "no model class 'Nonsense'"),
        ({"architectures": ["AutoConfig"]}, CheckpointError, "no model class 'AutoConfig'"),
        ({"depths": [1, 2]}, CheckpointError, "missing; is the architecture"),
        ({"hidden_sizes": [8, 24]}, CheckpointError, "cannot load it"),
        ({"quantization_config": {"quant_method": "x"}}, RefusedError, "quantised"),
    ],
)
def test_transformers_directory_with_a_wrong_config_is_one_clear_error(
    tmp_path: Path, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    small_transformers().save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(error, match=message) as caught:
        hub.load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_code_in_a_directory_is_never_run(tmp_path: Path) -> None:
    small_transformers().save_pretrained(tmp_path)
    (tmp_path / "modeling.py").write_text("raise SystemExit('the code in the directory ran')")
    auto_map = {"AutoModelForImageClassification": "modeling.Mine"}
    edit_config(tmp_path, architectures=["Mine"], auto_map=auto_map)
    with pytest.raises(CheckpointError, match="never run"):
        hub.load_model(tmp_path)


def test_tensors_that_transformers_does_not_use_are_noted(tmp_path: Path) -> None:
    model = small_transformers()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors") | {"pooler.extra": torch.ones(1)}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    _, origin = hub.load_model(tmp_path)
    assert "pooler.extra" in origin.notes[0]


def test_nan_in_a_transformers_directory_is_named(tmp_path: Path) -> None:
    model = small_transformers()
    with torch.no_grad():
        model.resnet.embedder.embedder.normalization.running_var[0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"embedder.normalization.running_var'.*NaN"):
        hub.load_model(tmp_path)


def test_timm_directory_names_its_architecture(tmp_path: Path) -> None:
    model = small_timm(num_classes=5)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"architecture": "resnet10t", "num_classes": 5}')
    loaded, origin = hub.load_model(tmp_path)
    assert str(origin.arch) == "timm:resnet10t"
    assert_same(model, loaded, random_input(1, 3, 64, 64, dtype=torch.float32), tol=1e-6)


# Round trips


def fold(model: nn.Module, *shape: int) -> tuple[nn.Module, Any]:
    new, report = ns.fold_batchnorm(model, random_input(*shape, dtype=torch.float32))
    assert report.counts["exact"] > 0
    return new, report


def assert_round_trip(
    directory: Path, new: nn.Module, shape: tuple[int, ...], **options: Any
) -> None:
    again = ns.load(directory, **options)
    assert not again.training
    assert set(again.state_dict()) == set(new.state_dict())
    for name, tensor in new.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
        assert again.state_dict()[name].dtype == tensor.dtype
    assert_same(new, again, random_input(*shape, dtype=torch.float32), tol=1e-7)


@pytest.mark.parametrize(
    ("build", "shape", "arch"),
    [
        (small_timm, (1, 3, 64, 64), "timm:resnet10t"),
        (lambda: small_timm(num_classes=5, in_chans=1), (1, 1, 64, 64), "timm:resnet10t"),
        (small_torchvision, (1, 3, 64, 64), "torchvision:mobilenet_v3_small"),
        (
            lambda: small_torchvision(num_classes=3),
            (1, 3, 64, 64),
            "torchvision:mobilenet_v3_small",
        ),
        (small_transformers, (1, 3, 64, 64), "transformers:ResNetForImageClassification"),
    ],
)
def test_architecture_is_told_from_the_model_and_loads_again(
    tmp_path: Path, build: Any, shape: tuple[int, ...], arch: str
) -> None:
    new, report = fold(build(), *shape)
    ns.save(new, tmp_path / "out", report)
    noted = Manifest.read(tmp_path / "out").architecture
    assert noted is not None
    assert str(ArchSpec.from_dict(noted)) == arch
    assert_round_trip(tmp_path / "out", new, shape)


def test_model_of_from_pretrained_is_recognised(tmp_path: Path) -> None:
    small_transformers().save_pretrained(tmp_path / "src")
    from transformers import AutoModelForImageClassification

    model = AutoModelForImageClassification.from_pretrained(tmp_path / "src")
    (tmp_path / "src" / "preprocessor_config.json").write_text("{}")
    new, report = fold(model, 1, 3, 64, 64)
    ns.save(new, tmp_path / "out", report)
    assert_round_trip(tmp_path / "out", new, (1, 3, 64, 64))
    assert "preprocessor_config.json" in listed(tmp_path / "out")


def test_architecture_with_another_dilation_is_not_taken_for_the_usual_one(
    tmp_path: Path,
) -> None:
    """All its names and shapes are those of the usual one, but it computes something else."""
    new, report = fold(small_torchvision(dilated=True), 1, 3, 64, 64)
    ns.save(new, tmp_path / "out", report)
    assert Manifest.read(tmp_path / "out").architecture is None
    with pytest.raises(NormswapError, match="pass arch="):
        ns.load(tmp_path / "out")
    arch, keywords = "torchvision:mobilenet_v3_small", {"dilated": True}
    ns.save(new, tmp_path / "told", report, arch=arch, arch_kwargs=keywords)
    assert_round_trip(tmp_path / "told", new, (1, 3, 64, 64))


def test_own_architecture_loads_only_if_the_caller_names_it(tmp_path: Path, mynet: Any) -> None:
    model = net(mynet, width=6)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    loaded, _ = hub.load_model(tmp_path / "m.safetensors", "mynet:build", {"width": 6})
    new, report = fold(loaded, *SHAPE)
    ns.save(new, tmp_path / "out", report)
    with pytest.raises(NormswapError, match=r"mynet:build with {'width': 6}.*pass arch="):
        ns.load(tmp_path / "out")
    assert_round_trip(tmp_path / "out", new, SHAPE, arch="mynet:build")
    assert_round_trip(tmp_path / "out", new, SHAPE, arch=lambda: mynet.build(width=6))
    instance = mynet.build(width=6)
    assert_round_trip(tmp_path / "out", new, SHAPE, arch=instance)
    assert isinstance(instance[1], nn.BatchNorm2d)
    with pytest.raises(CheckpointError, match="made for another model"):
        ns.load(tmp_path / "out", arch=lambda: mynet.build(width=5))


def test_directory_says_what_it_is(tmp_path: Path, mynet: Any) -> None:
    model = net(mynet)
    new, report = fold(model, *SHAPE)
    ns.save(new, tmp_path / "out", report)
    assert listed(tmp_path / "out") == [
        "README.md",
        "model.safetensors",
        "normswap.json",
        "report.json",
        "report.md",
    ]
    manifest = Manifest.read(tmp_path / "out")
    assert [plan.rewrite for plan in manifest.plans] == ["fold_batchnorm"]
    assert manifest.model_class == "mynet.Net"
    assert "normswap.load" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "report.json").read_text())["counts"] == report.counts


def test_loading_it_wrongly_raises(tmp_path: Path, mynet: Any) -> None:
    """mmdetection#2924: such a load only warned, and the outputs were wrong."""
    new, report = fold(net(mynet), *SHAPE)
    ns.save(new, tmp_path / "out", report)
    file = tmp_path / "out" / "model.safetensors"
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="size mismatch"):
            mynet.build().load_state_dict(load_file(file), strict=strict)
        with pytest.raises(RuntimeError, match="size mismatch"):
            load_model(mynet.build(), file, strict=strict)
    with pytest.raises(CheckpointError, match="was written by normswap"):
        hub.load_model(file, "mynet:build")


@pytest.mark.filterwarnings("default")
def test_plain_from_pretrained_raises(tmp_path: Path) -> None:
    from transformers import AutoModel, AutoModelForImageClassification

    model = small_transformers()
    new, report = fold(model, 1, 3, 64, 64)
    ns.save(new, tmp_path / "out", report)
    for cls in (AutoModelForImageClassification, AutoModel, type(model)):
        with pytest.raises(RuntimeError, match="mismatch"):
            cls.from_pretrained(tmp_path / "out")


def test_files_of_a_transformers_directory_are_carried_over(tmp_path: Path) -> None:
    src, out = tmp_path / "src", tmp_path / "out"
    small_transformers().save_pretrained(src)
    carried = {"preprocessor_config.json", "tokenizer.json", "merges.txt", "LICENSE"}
    left = {"pytorch_model.bin", "modeling.py", "training.log", "x.index.json"}
    for name in carried | left:
        (src / name).write_text("{}")
    model, _ = hub.load_model(src)
    new, report = fold(model, 1, 3, 64, 64)
    ns.save(new, out, report)
    names = set(listed(out))
    assert carried | {"config.json", "normswap.json"} <= names
    assert not left & names
    assert json.loads((out / "config.json").read_text())["normswap"] == ["fold_batchnorm"]
    assert json.loads((out / "config.json").read_text())["architectures"] == [type(model).__name__]


def test_shards_are_loaded_again(tmp_path: Path) -> None:
    new, report = fold(small_timm(), 1, 3, 64, 64)
    ns.save(new, tmp_path / "out", report, max_shard_size="5MB")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()
    assert_round_trip(tmp_path / "out", new, (1, 3, 64, 64))


def test_tied_parameters_are_tied_again(tmp_path: Path, mynet: Any) -> None:
    """Also if the builder does not tie them."""
    new, report = fold(net(mynet, tied=True), *SHAPE)
    assert new[3].other is new[3].weight
    ns.save(new, tmp_path / "out", report)
    again = ns.load(tmp_path / "out", arch=lambda: mynet.build(tied=True))
    assert again[3].other is again[3].weight


def test_bfloat16_round_trip(tmp_path: Path, mynet: Any) -> None:
    model = net(mynet).to(torch.bfloat16)
    new, report = ns.fold_batchnorm(model, random_input(*SHAPE, dtype=torch.bfloat16))
    ns.save(new, tmp_path / "out", report)
    again = ns.load(tmp_path / "out", arch=mynet.build)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}


def test_second_rewrite_of_a_loaded_directory_keeps_the_first(tmp_path: Path, mynet: Any) -> None:
    model = net(mynet)
    half, report = ns.fold_batchnorm(model, random_input(*SHAPE, dtype=torch.float32), where="1")
    ns.save(half, tmp_path / "half", report, arch="mynet:build")
    again, origin = hub.load_model(tmp_path / "half", "mynet:build")
    assert len(origin.plans) == 1
    new, report = fold(again, *SHAPE)
    ns.save(new, tmp_path / "whole", report)
    assert len(Manifest.read(tmp_path / "whole").plans) == 2
    assert_round_trip(tmp_path / "whole", new, SHAPE, arch="mynet:build")
    assert_same(model, new, random_input(*SHAPE, dtype=torch.float32), tol=1e-5)


def test_report_of_another_model_is_refused(tmp_path: Path, mynet: Any) -> None:
    model = net(mynet)
    _, report = fold(model, *SHAPE)
    with pytest.raises(NormswapError, match="not of this model"):
        ns.save(model, tmp_path / "out", report)
    assert listed(tmp_path) == []


def test_existing_directory_is_kept_unless_overwritten(tmp_path: Path, mynet: Any) -> None:
    new, report = fold(net(mynet), *SHAPE)
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointError, match="exists"):
        ns.save(new, tmp_path / "out", report)
    assert listed(tmp_path / "out") == []
    ns.save(new, tmp_path / "out", report, overwrite=True)
    ns.save(new, tmp_path / "out", report, overwrite=True)
    assert_round_trip(tmp_path / "out", new, SHAPE, arch=mynet.build)


def test_nothing_is_left_of_a_save_that_fails(tmp_path: Path, mynet: Any) -> None:
    new, report = fold(net(mynet), *SHAPE)

    def fail(directory: Path) -> None:
        assert (directory / "model.safetensors").exists()
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        ns.save(new, tmp_path / "out", report, complete=fail)
    with torch.no_grad():
        new[0].weight[0] = torch.nan
    with pytest.raises(CheckpointError, match=r"'0.weight'.*NaN"):
        ns.save(new, tmp_path / "out", report)
    assert listed(tmp_path) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "is not JSON"),
        ("[]", "no JSON object"),
        ('{"format": "normswap", "version": 99}', "version 99"),
        ('{"format": "normswap", "version": 1, "plans": []}', "holds no plan"),
        ('{"format": "normswap", "version": 1, "plans": [{"version": 1}]}', "not a normswap plan"),
    ],
)
def test_damaged_manifest_is_one_clear_error(
    tmp_path: Path, mynet: Any, text: str, message: str
) -> None:
    new, report = fold(net(mynet), *SHAPE)
    ns.save(new, tmp_path / "out", report)
    (tmp_path / "out" / "normswap.json").write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        ns.load(tmp_path / "out", arch=mynet.build)
    assert "\n" not in str(caught.value)


def test_plan_on_files_gives_what_the_plan_in_memory_gives(tmp_path: Path, mynet: Any) -> None:
    model = net(mynet)
    save_file(model.state_dict(), tmp_path / "m.safetensors")
    new, report = fold(model, *SHAPE)
    assert report.plan is not None
    report.plan.apply_to_checkpoint(tmp_path / "m.safetensors", tmp_path / "out")
    again: dict[str, Tensor] = ns.load(tmp_path / "out", arch=mynet.build).state_dict()
    for name, tensor in new.state_dict().items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=0)
