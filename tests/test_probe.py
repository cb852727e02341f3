"""The probe recovers what generated and real norms compute, and takes nothing else for a norm."""

from __future__ import annotations

import copy
import importlib
import math
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn

from normswap.probe import Nothing, examine, probe, probe_fixed_affine
from normswap.spec import NormSpec, Unknown

D = 24


# Generated norms


@dataclass(frozen=True)
class Recipe:
    """A norm to write down and to recover."""

    kind: str = "rms"
    layout: str = "last"
    width: int = D
    eps: float = 1e-6
    place: str = "inside"
    weight: str | None = "weight"
    bias: str | None = None
    unit_offset: bool = False
    cast: str | None = None
    groups: int = 1
    p: float = 2.0
    unbiased: bool = False
    partial: float | None = None


class Generated(nn.Module):
    """A norm written out step by step, under names of its own."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.recipe = recipe
        for name in (recipe.weight, recipe.bias):
            if name is not None:
                self.register_parameter(name, nn.Parameter(torch.ones(recipe.width)))

    def forward(self, hidden: Tensor) -> Tensor:
        r, dtype = self.recipe, hidden.dtype
        x = hidden if r.cast is None else hidden.float()
        axes = _axes(r, x.dim())
        if r.groups > 1:
            x = x.unflatten(axes[0], (r.groups, -1))
            axes = tuple(a + 1 for a in axes)
        x = _normalised(r, x, axes)
        x = x.flatten(axes[0] - 1, axes[0]) if r.groups > 1 else x
        x = x.to(dtype) if r.cast == "before" else x
        for name, add in ((r.weight, False), (r.bias, True)):
            if name is not None:
                tensor = getattr(self, name)
                tensor = tensor.float() if r.cast == "after" else tensor
                tensor = tensor + 1 if r.unit_offset and not add else tensor
                shape = [1] * x.dim()
                shape[-1 if r.layout == "last" else 1] = r.width
                x = x + tensor.view(shape) if add else x * tensor.view(shape)
        return x.to(dtype)


def _axes(r: Recipe, rank: int) -> tuple[int, ...]:
    if r.kind == "instance":
        return tuple(range(2, rank))
    if r.kind == "group":
        return tuple(range(1, rank))
    return (rank - 1,) if r.layout == "last" else (1,)


def _normalised(r: Recipe, x: Tensor, axes: tuple[int, ...]) -> Tensor:
    centred = r.kind in ("layer", "group", "instance")
    x = x - x.mean(axes, keepdim=True) if centred else x
    counted = x[..., : round(r.partial * r.width)] if r.partial else x
    power = counted.abs() ** r.p
    n = math.prod(power.shape[axis] for axis in axes)
    total = power.sum(axes, keepdim=True)
    mean = total if r.kind == "scale" else total / (n - r.unbiased)
    if r.place == "inside":
        return x / (mean + r.eps) ** (1 / r.p)
    size = mean ** (1 / r.p)
    return x / (size + r.eps if r.place == "outside" else size.clamp_min(r.eps))


def expected(r: Recipe) -> NormSpec:
    """What the probe has to say of a recipe."""
    channels = (-1,) if r.layout == "last" else (1,)
    affine = channels if r.weight or r.bias else ()
    axes = {"instance": (2, 3), "group": (1, 2, 3)}.get(r.kind, channels)
    return NormSpec(
        r.kind,
        axes,
        r.eps,
        weight=r.weight,
        bias=r.bias,
        unit_offset=r.unit_offset,
        cast_order=r.cast,
        eps_place="inside" if r.p == 1 and r.place == "outside" else r.place,
        groups=r.groups if r.groups > 1 or r.kind == "group" else None,
        affine_axes=affine,
        normalized_shape=(r.width,) if affine else None,
        unbiased=r.unbiased,
        p=None if r.p == 2 else r.p,
        partial=r.partial,
    )


def assert_recovered(r: Recipe) -> None:
    spec, wanted = probe(Generated(r)), expected(r)
    assert isinstance(spec, NormSpec), spec
    assert spec.eps == pytest.approx(wanted.eps, rel=1e-9)
    assert replace(spec, eps=wanted.eps) == wanted


@st.composite
def recipes(draw: Any) -> Recipe:
    kind = draw(st.sampled_from(["rms", "layer", "scale", "lp", "instance", "group"]))
    spatial = kind in ("instance", "group")
    weight = draw(st.sampled_from([None, "weight", "gamma", "g", "a_2", "scale"]))
    return Recipe(
        kind=kind,
        layout="first" if spatial else draw(st.sampled_from(["last", "first"])),
        width=draw(st.sampled_from([12, 16, 20, 48, 96])),
        eps=draw(st.sampled_from([1e-12, 1e-8, 1e-6, 1e-5, 3e-5, 1e-3, 0.1])),
        place=draw(st.sampled_from(["inside", "outside", "clamp"])),
        weight=weight or ("weight" if spatial else None),
        bias=draw(st.sampled_from([None, "bias", "beta", "b_2"])) if weight else None,
        unit_offset=draw(st.booleans()) if weight else False,
        cast=draw(st.sampled_from(["before", "after"])) if weight else None,
        groups=draw(st.sampled_from([2, 4])) if kind == "group" else 1,
        p=draw(st.sampled_from([1.0, 3.0, 4.0])) if kind == "lp" else 2.0,
        unbiased=draw(st.booleans()) if kind == "layer" else False,
    )


@given(recipes())
@hypothesis_settings(max_examples=80)
def test_a_generated_norm_is_recovered(recipe: Recipe) -> None:
    if recipe.cast and recipe.kind == "lp":
        recipe = replace(recipe, cast=None)
    spatial = recipe.kind in ("instance", "group")
    if spatial and recipe.weight is None:
        recipe = replace(recipe, weight="weight")
    assert_recovered(recipe)


@pytest.mark.parametrize("partial", [0.125, 0.5])
def test_a_partial_rms_norm_says_over_which_part(partial: float) -> None:
    assert_recovered(Recipe(partial=partial))


@pytest.mark.parametrize("width", [2, 3, 4, 5, 7, 768, 4096])
def test_any_width_is_recovered(width: int) -> None:
    assert_recovered(Recipe(width=width, bias="bias"))


def test_an_eps_of_zero_is_recovered() -> None:
    assert_recovered(Recipe(eps=0.0))


def test_groups_of_the_last_axis_are_recovered() -> None:
    assert_recovered(Recipe(groups=4, unit_offset=True))


# torch.nn


def subclassed(module: nn.Module) -> nn.Module:
    """The same module under a class of its own, so that it is probed and not read."""
    module.__class__ = type("Mine", (type(module),), {"__module__": "mine"})
    return module


STOCK = [
    nn.LayerNorm(D),
    nn.LayerNorm((4, 6), eps=1e-12),
    nn.LayerNorm((3, 7, 7)),
    nn.LayerNorm(D, elementwise_affine=False),
    nn.LayerNorm(D, bias=False),
    nn.RMSNorm(D),
    nn.RMSNorm(D, eps=1e-6),
    nn.RMSNorm((4, 6), eps=1e-6, elementwise_affine=False),
    nn.GroupNorm(4, D),
    nn.GroupNorm(D, D),
    nn.GroupNorm(1, D),
    nn.GroupNorm(4, D, affine=False),
    nn.BatchNorm1d(D, eps=1e-3),
    nn.BatchNorm2d(D, eps=1e-3),
    nn.BatchNorm3d(D),
    nn.BatchNorm2d(D, affine=False),
    nn.BatchNorm2d(D, track_running_stats=False),
    nn.InstanceNorm1d(D),
    nn.InstanceNorm2d(D, affine=True),
    nn.InstanceNorm3d(D),
    nn.InstanceNorm2d(D, affine=True, track_running_stats=True),
    nn.LocalResponseNorm(5, k=2.0),
    nn.LocalResponseNorm(4, alpha=1e-3, beta=0.5),
]


@pytest.mark.parametrize("module", STOCK, ids=str)
def test_what_is_read_off_a_stock_norm_is_what_the_probe_finds(module: nn.Module) -> None:
    read = probe(module)
    assert isinstance(read, NormSpec)
    found = probe(subclassed(copy.deepcopy(module)))
    assert isinstance(found, NormSpec)
    assert replace(found, eps=read.eps) == read
    assert found.eps == pytest.approx(read.eps, rel=1e-9)


def test_a_stock_norm_on_the_meta_device_or_in_half_precision_is_the_same() -> None:
    with torch.device("meta"):
        assert probe(subclassed(nn.LayerNorm(D))) == probe(nn.LayerNorm(D))
    assert probe(subclassed(nn.LayerNorm(D).half())) == probe(nn.LayerNorm(D))


def test_the_machine_epsilon_is_told_from_a_fixed_one() -> None:
    spec = probe(subclassed(nn.RMSNorm(D)))
    assert isinstance(spec, NormSpec)
    assert spec.machine_eps
    assert spec.eps == torch.finfo(torch.float32).eps


def test_a_lazy_norm_is_unknown() -> None:
    outcome = probe(nn.LazyBatchNorm2d())
    assert isinstance(outcome, Unknown)
    assert outcome.reason == "lazy"


def test_a_parametrised_norm_is_unknown() -> None:
    norm = nn.LayerNorm(D)
    nn.utils.parametrize.register_parametrization(norm, "weight", nn.Softplus())
    outcome = probe(norm)
    assert isinstance(outcome, Unknown)
    assert outcome.reason == "parametrised"


def test_a_forward_set_on_the_instance_is_not_trusted() -> None:
    norm = nn.LayerNorm(D)
    norm.forward = lambda x: 2 * x  # type: ignore[method-assign]
    outcome = probe(norm)
    assert isinstance(outcome, Unknown)
    assert outcome.reason == "replaced-forward"
    assert "forward" in vars(norm)


# transformers


def made(path: str, *args: Any, **kwargs: Any) -> nn.Module:
    """``"llama.LlamaRMSNorm"``: a class of a transformers model."""
    family, _, name = path.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, name)(*args, **kwargs)


RMS = NormSpec("rms", (-1,), 1e-6, weight="weight", affine_axes=(-1,), normalized_shape=(D,))
LAYER = replace(RMS, kind="layer", eps=1e-5)
FIRST = replace(LAYER, eps=1e-6, axes=(1,), affine_axes=(1,), bias="bias", cast_order="after")
TRANSFORMERS: list[tuple[str, tuple[Any, ...], dict[str, Any], NormSpec]] = [
    ("llama.LlamaRMSNorm", (D,), {}, replace(RMS, cast_order="before")),
    ("llama.LlamaRMSNorm", (D, 1e-5), {}, replace(RMS, eps=1e-5, cast_order="before")),
    ("t5.T5LayerNorm", (D,), {}, replace(RMS, cast_order="before")),
    ("gemma.GemmaRMSNorm", (D,), {}, replace(RMS, unit_offset=True, cast_order="after")),
    ("gemma3n.Gemma3nRMSNorm", (D,), {}, replace(RMS, cast_order="after")),
    (
        "qwen4_exp.Qwen4ExpTextRMSNorm",
        (D, 8),
        {},
        replace(RMS, unit_offset=True, cast_order="after", groups=3),
    ),
    ("cohere.CohereLayerNorm", (D,), {}, replace(LAYER, cast_order="after")),
    (
        "cohere.CohereLayerNorm",
        ((4, D),),
        {},
        replace(LAYER, cast_order="after", affine_axes=(-2, -1), normalized_shape=(4, D)),
    ),
    ("olmo.OlmoLayerNorm", (D,), {}, replace(LAYER, weight=None, affine_axes=())),
    (
        "nemotron.NemotronLayerNorm1P",
        (D,),
        {},
        replace(LAYER, bias="bias", unit_offset=True, cast_order="after"),
    ),
    (
        "cpmant.CpmAntLayerNorm",
        (SimpleNamespace(hidden_size=D, eps=1e-6),),
        {},
        replace(RMS, cast_order="before"),
    ),
    ("imagegpt.ImageGPTLayerNorm", (D,), {}, replace(RMS, eps=1e-5)),
    ("deberta.DebertaLayerNorm", (D,), {}, replace(LAYER, eps=1e-12, bias="bias")),
    (
        "squeezebert.SqueezeBertLayerNorm",
        (D,),
        {},
        replace(FIRST, eps=1e-12),
    ),
    ("sam.SamLayerNorm", (D,), {"data_format": "channels_first"}, FIRST),
    ("convnext.ConvNextLayerNorm", (D,), {"data_format": "channels_first"}, FIRST),
    (
        "convnext.ConvNextLayerNorm",
        (D,),
        {},
        replace(FIRST, axes=(-1,), affine_axes=(-1,)),
    ),
    ("vitdet.VitDetLayerNorm", (D,), {}, replace(FIRST, cast_order=None)),
    (
        "llama4.Llama4TextL2Norm",
        (),
        {},
        NormSpec("rms", (-1,), 1e-6),
    ),
    (
        "convnextv2.ConvNextV2GRN",
        (D,),
        {},
        NormSpec(
            "grn",
            (1, 2),
            1e-6,
            weight="weight",
            bias="bias",
            eps_place="outside",
            affine_axes=(-1,),
            normalized_shape=(D,),
        ),
    ),
    (
        "mobilebert.NoNorm",
        (D,),
        {},
        NormSpec("affine", (), 0.0, "weight", "bias", affine_axes=(-1,), normalized_shape=(D,)),
    ),
    (
        "poolformer.PoolFormerGroupNorm",
        (D,),
        {},
        replace(FIRST, kind="group", eps=1e-5, axes=(1, 2, 3), groups=1),
    ),
    (
        "detr.DetrFrozenBatchNorm2d",
        (D,),
        {},
        NormSpec(
            "frozen_batch",
            (0, 2, 3),
            1e-5,
            "weight",
            "bias",
            "running_mean",
            "running_var",
            affine_axes=(1,),
            normalized_shape=(D,),
        ),
    ),
]


@pytest.mark.parametrize(
    ("path", "args", "kwargs", "wanted"),
    TRANSFORMERS,
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_norm_of_transformers(
    path: str, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: NormSpec
) -> None:
    found = probe(made(path, *args, **kwargs))
    assert isinstance(found, NormSpec), found
    if wanted.cast_order is None and found.kind != "rms":
        found = replace(found, cast_order=None)
    assert found == wanted


UNKNOWN: list[tuple[str, tuple[Any, ...], str]] = [
    ("mamba2.MambaRMSNormGated", (D, 8), "second-input"),
    ("qwen3_next.Qwen3NextRMSNormGated", (D,), "second-input"),
    ("pe_audio.PeAudioMaskedGroupNorm", (4, D), "second-input"),
    ("gemma3n.Gemma3nAudioCumulativeGroupNorm", (D, (5,)), "pattern"),
    ("pocket_tts.PocketTTSTimestepNorm", (D,), "uncentred-variance"),
]


@pytest.mark.parametrize(("path", "args", "reason"), UNKNOWN)
def test_what_cannot_be_told_says_why(path: str, args: tuple[Any, ...], reason: str) -> None:
    outcome = probe(made(path, *args))
    assert isinstance(outcome, Unknown)
    assert outcome.reason == reason


def test_a_module_that_returns_only_the_reciprocal_root_is_no_norm() -> None:
    assert probe(made("hy_v4.HYV4UnweightedRMSNorm")) is None


def test_a_module_with_a_norm_inside_is_none_itself() -> None:
    outer = made("moonshine_streaming.MoonshineStreamingLayerNorm", D)
    assert probe(outer) is None
    inner = probe(outer.ln)  # type: ignore[arg-type]
    assert isinstance(inner, NormSpec)
    assert inner.kind == "layer"
    assert inner.weight is None


# timm and torchvision

BATCH = NormSpec(
    "batch",
    (0, 2, 3),
    1e-5,
    "weight",
    "bias",
    "running_mean",
    "running_var",
    affine_axes=(1,),
    normalized_shape=(D,),
)
GROUP = replace(FIRST, kind="group", eps=1e-5, axes=(1, 2, 3), groups=4)
TIMM: list[tuple[str, tuple[Any, ...], dict[str, Any], NormSpec]] = [
    ("BatchNormAct2d", (D,), {}, replace(BATCH, activation="act")),
    ("BatchNormAct2d", (D,), {"apply_act": False}, BATCH),
    ("BatchNormAct2d", (D,), {"drop_layer": nn.Dropout}, replace(BATCH, activation="act")),
    ("FrozenBatchNormAct2d", (D,), {}, replace(BATCH, kind="frozen_batch", activation="act")),
    ("GroupNormAct", (D,), {"num_groups": 4}, replace(GROUP, activation="act")),
    ("GroupNorm", (D, 4), {}, GROUP),
    (
        "LayerNormAct",
        (D,),
        {},
        replace(FIRST, eps=1e-5, axes=(-1,), affine_axes=(-1,), activation="act"),
    ),
    ("LayerNormAct2d", (D,), {}, replace(FIRST, eps=1e-5, activation="act")),
    ("LayerNorm2d", (D,), {}, FIRST),
    ("RmsNorm", (D,), {}, replace(RMS, cast_order="after")),
    ("RmsNorm2d", (D,), {}, replace(RMS, axes=(1,), affine_axes=(1,))),
    (
        "FilterResponseNormTlu2d",
        (D,),
        {"apply_act": False},
        replace(RMS, eps=1e-5, bias="bias", axes=(2, 3), affine_axes=(1,)),
    ),
]


@pytest.mark.parametrize(("name", "args", "kwargs", "wanted"), TIMM)
def test_a_norm_of_timm(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], wanted: NormSpec
) -> None:
    layers = pytest.importorskip("timm.layers")
    assert probe(getattr(layers, name)(*args, **kwargs)) == wanted


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("SimpleNorm", "uncentred-variance"),
        ("FilterResponseNormTlu2d", "welded"),
        ("EvoNorm2dS0", "welded"),
        ("EvoNorm2dB0", "unlike-any"),
    ],
)
def test_a_norm_of_timm_that_cannot_be_told(name: str, reason: str) -> None:
    layers = pytest.importorskip("timm.layers")
    outcome = probe(getattr(layers, name)(32))
    assert isinstance(outcome, Unknown)
    assert outcome.reason == reason


def test_the_frozen_batch_norm_of_torchvision() -> None:
    ops = pytest.importorskip("torchvision.ops")
    found = probe(ops.FrozenBatchNorm2d(D, eps=0.0))
    assert found == replace(BATCH, kind="frozen_batch", eps=0.0)


def test_layer_norms_called_bn_are_layer_norms() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn1 = subclassed(nn.LayerNorm(D))

    found = probe(Block().bn1)
    assert isinstance(found, NormSpec)
    assert found.kind == "layer"


# Norms as people write them


class Written(nn.Module):
    """A norm with one vector ``g`` and one ``b``, and whatever the forward is."""

    def __init__(self, forward: Any, shape: tuple[int, ...] = (D,), **more: Any) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(shape))
        self.b = nn.Parameter(torch.zeros(shape))
        self.compute = forward
        for name, value in more.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x)


def kind_of(forward: Any, shape: tuple[int, ...] = (D,), **more: Any) -> Any:
    """The kind, or the reason, or ``None``."""
    outcome = probe(Written(forward, shape, **more))
    return outcome and (outcome.kind if isinstance(outcome, NormSpec) else outcome.reason)


def std(x: Tensor, **kwargs: Any) -> Tensor:
    return x.std(-1, keepdim=True, **kwargs)


def mean(x: Tensor) -> Tensor:
    return x.mean(-1, keepdim=True)


def test_an_unbiased_standard_deviation_with_an_eps_beside_it() -> None:
    spec = probe(Written(lambda m, x: m.g * (x - mean(x)) / (std(x) + 1e-6) + m.b))
    assert isinstance(spec, NormSpec)
    assert (spec.kind, spec.unbiased, spec.eps_place, spec.eps) == ("layer", True, "outside", 1e-6)


def test_normalised_times_the_root_of_the_width_is_an_rms_norm() -> None:
    spec = probe(Written(lambda m, x: F.normalize(x, dim=-1) * D**0.5 * m.g))
    assert isinstance(spec, NormSpec)
    assert (spec.kind, spec.eps_place, spec.weight) == ("rms", "clamp", "g")
    assert spec.eps == pytest.approx(1e-12 / D**0.5, rel=1e-9)


def test_a_gain_that_broadcasts_along_space() -> None:
    shape = (1, D, 1, 1)
    spec = probe(Written(lambda m, x: F.normalize(x, dim=1) * D**0.5 * m.g + m.b, shape))
    assert isinstance(spec, NormSpec)
    assert (spec.kind, spec.axes, spec.affine_axes) == ("rms", (1,), (1,))


def test_one_gain_for_all_is_a_scale_norm() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)

    spec = probe(Written(forward, ()))
    assert isinstance(spec, NormSpec)
    assert (spec.kind, spec.weight, spec.eps, spec.eps_place) == ("scale", "g", 1e-5, "clamp")


def test_a_gain_for_every_head_and_entry() -> None:
    spec = probe(Written(lambda m, x: F.rms_norm(x, (16,), eps=1e-6) * m.g, (4, 16)))
    assert isinstance(spec, NormSpec)
    assert (spec.axes, spec.affine_axes, spec.normalized_shape) == ((-1,), (-2, -1), (4, 16))


@pytest.mark.parametrize(("kind", "function"), [("dyt", torch.tanh), ("derf", torch.erf)])
def test_saturating_replacements(kind: str, function: Any) -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.g * function(m.alpha * x) + m.b  # type: ignore[operator]

    spec = probe(Written(forward, alpha=nn.Parameter(torch.tensor([0.5]))))
    assert isinstance(spec, NormSpec)
    assert (spec.kind, spec.alpha, spec.weight, spec.bias) == (kind, "alpha", "g", "b")


def test_a_zero_mean_vector_without_its_last_entry() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        total = x.square().sum(-1, keepdim=True) + x.sum(-1, keepdim=True) ** 2
        return x * torch.rsqrt(total / (D + 1) + 1e-6) * m.g

    assert kind_of(forward) == "crms"


def test_alexnets_own_local_response() -> None:
    class Response(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            padded = F.pad(x.square(), (0, 0, 0, 0, 2, 2))
            total = sum(padded[:, i : i + x.shape[1]] for i in range(5))
            return x / (2 + 1e-4 * total) ** 0.75

    assert probe(Response()) == NormSpec("response", (1,), 2.0, window=(5, 5e-4, 0.75))


WELDED: dict[str, Any] = {
    "an activation in its forward": lambda m, x: F.relu(F.layer_norm(x, (D,), m.g, m.b)),
    "a scale in front": lambda m, x: F.rms_norm(x * m.g, (D,), None, 1e-6),
    "a residual": lambda m, x: F.layer_norm(x, (D,), m.g, m.b) + x.sign(),
    "a gate": lambda m, x: F.layer_norm(x, (D,), m.g, m.b) * torch.sigmoid(x),
    "a clamp": lambda m, x: F.layer_norm(x, (D,), m.g, m.b).clamp(-2, 2),
    "the gain's size": lambda m, x: F.layer_norm(x, (D,), m.g.abs(), m.b),
    "a gain that is no tensor": lambda m, x: F.layer_norm(x, (D,), m.g.exp(), m.b),
    "a constant": lambda m, x: 0.5 * F.layer_norm(x, (D,), m.g, m.b),
}


@pytest.mark.parametrize("name", WELDED)
def test_what_is_welded_on_is_not_guessed(name: str) -> None:
    assert isinstance(probe(Written(WELDED[name])), Unknown)


def test_two_places_for_an_eps_are_not_guessed() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        return m.g * (x - mean(x)) / ((x.var(-1, keepdim=True) + 1e-5).sqrt() + 1e-3)

    assert kind_of(forward) == "eps"


def test_a_conditional_norm_says_that_it_needs_a_second_tensor() -> None:
    class AdaIN(nn.Module):
        def forward(self, content: Tensor, style: Tensor) -> Tensor:
            spread = style.std((2, 3), keepdim=True)
            return F.instance_norm(content) * spread + style.mean((2, 3), keepdim=True)

    outcome = probe(AdaIN())
    assert outcome == Unknown("second-input", "a second tensor is required: 'style'")


def test_a_second_tensor_that_changes_nothing_is_no_condition() -> None:
    class Ignoring(nn.LayerNorm):
        def forward(self, x: Tensor, states: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return super().forward(x)

    assert isinstance(probe(Ignoring(D)), NormSpec)


def test_a_norm_over_past_steps_only_is_not_guessed() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        steps = torch.arange(1, x.shape[1] + 1, dtype=x.dtype)
        total = x.square().mean(-1).cumsum(1) / steps
        return x * torch.rsqrt(total.unsqueeze(-1) + 1e-6) * m.g

    class Past(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.g = nn.Parameter(torch.ones(D))

        def forward(self, x: Tensor) -> Tensor:
            return forward(self, x)  # type: ignore[arg-type]

    assert isinstance(probe(Past()), Unknown)


# Batch statistics


class MyBatchNorm(nn.Module):
    """A BatchNorm written out, with its own names."""

    def __init__(self, size: int = D, frozen: bool = False) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(size))
        self.beta = nn.Parameter(torch.zeros(size))
        self.register_buffer("moving_mean", torch.zeros(size))
        self.register_buffer("moving_var", torch.ones(size))
        self.frozen = frozen

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.moving_mean, self.moving_var
        if self.training and not self.frozen:
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
            self.moving_mean.lerp_(mean, 0.1)
            self.moving_var.lerp_(var, 0.1)
        shape = (1, -1, 1, 1)
        scale = (self.gamma / (var + 1e-3).sqrt()).view(shape)
        return (x - mean.view(shape)) * scale + self.beta.view(shape)


@pytest.mark.parametrize("training", [False, True])
def test_training_mode_tells_a_batch_norm_from_a_frozen_one(training: bool) -> None:
    named = ("gamma", "beta", "moving_mean", "moving_var")
    for frozen, kind in ((False, "batch"), (True, "frozen_batch")):
        module = MyBatchNorm(frozen=frozen).train(training)
        found = probe(module)
        assert isinstance(found, NormSpec)
        assert (found.kind, found.eps, found.axes) == (kind, 1e-3, (0, 2, 3))
        assert (found.weight, found.bias, found.mean, found.var) == named
        assert module.training is training
        assert probe_fixed_affine(module) == replace(found, kind="frozen_batch")


def test_statistics_that_change_in_training_under_an_activation_are_not_told() -> None:
    class Welded(MyBatchNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(super().forward(x))

    assert isinstance(probe(Welded()), Unknown)


def test_a_fixed_affine_of_other_channels_is_no_batch_norm() -> None:
    assert probe_fixed_affine(nn.LayerNorm(D)) is None
    assert probe_fixed_affine(made("mobilebert.NoNorm", D)) is None


# What is none


class Softmax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Shares(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.sum(-1, keepdim=True)


class Centre(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)


class Snake(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.alpha * x) ** 2 / self.alpha


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(7, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight


class SquareLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class ConvNormAct(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, D, 3), nn.BatchNorm2d(D), nn.ReLU())


class Sign(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sign()


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x + torch.randn_like(x), x.shape[-1:])


NONE = [
    *(nn.Linear(D, D), nn.Linear(D, D, bias=False), nn.Conv2d(D, D, 1), nn.Embedding(D, D)),
    *(nn.ReLU(), nn.GELU(), nn.PReLU(D), nn.Softmax(-1), nn.Dropout(), nn.Identity(), nn.Tanh()),
    *(nn.MultiheadAttention(D, 4), nn.LSTM(D, D), nn.MaxPool2d(2), nn.Flatten(), nn.Sequential()),
    *(nn.TransformerEncoderLayer(D, 4), nn.CosineSimilarity(), nn.ModuleList([nn.LayerNorm(D)])),
    *(Softmax(), Shares(), Centre(), Snake(), LayerScale(), Positions(), SquareLinear(), Sign()),
    *(ConvNormAct(), nn.Sequential(nn.LayerNorm(D)), nn.Sequential(nn.LayerNorm(D), nn.ReLU())),
]


@pytest.mark.parametrize("module", NONE, ids=lambda m: type(m).__name__)
def test_what_is_no_norm(module: nn.Module) -> None:
    assert probe(module) is None
    outcome = examine(subclassed(copy.deepcopy(module)))
    assert isinstance(outcome, Nothing)
    assert outcome.seen


def test_a_random_module_is_not_taken_for_a_norm() -> None:
    assert not isinstance(probe(Noise()), NormSpec)


def test_activations_rotary_embeddings_and_whole_models_are_none() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.activations import ACT2FN

    config = transformers.RobertaPreLayerNormConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        vocab_size=20,
    )
    model = transformers.RobertaPreLayerNormModel(config)
    found = [m for m in model.modules() if probe(m) is not None]
    assert {type(m) for m in found} == {nn.LayerNorm}
    names = [n for n in ACT2FN if isinstance(ACT2FN[n], nn.Module) and n != "xielu"]
    assert not [n for n in names if probe(ACT2FN[n]) is not None]
    assert probe(made("llama.LlamaRotaryEmbedding", transformers.LlamaConfig())) is None


# No trace


class Watched(nn.Module):
    """A norm that counts its runs, draws random numbers and has state and hooks."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((D,), 2.0))
        self.register_buffer("calls", torch.tensor(0))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        self.calls += 1
        self.seen.append(1)
        torch.rand(1), random.random()
        return F.rms_norm(x, (D,), self.weight, 1e-6)


def test_nothing_of_the_users_changes() -> None:
    module, called = Watched().train(), []
    module.register_forward_hook(lambda *_: called.append(1))
    before = copy.deepcopy(module.state_dict())
    states = torch.get_rng_state(), random.getstate(), torch.get_default_dtype()
    spec = probe(module)
    assert isinstance(spec, NormSpec)
    assert spec.kind == "rms"
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), torch.get_default_dtype()) == states[1:]
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert module.training
    assert not called
    assert not module.seen
    assert torch.is_grad_enabled()


def test_a_class_is_probed_once_for_each_configuration() -> None:
    probe(Watched())
    runs = Watched.runs
    probe(Watched())
    assert Watched.runs == runs
    other = Watched()
    other.mode = "another"
    probe(other)
    assert Watched.runs > runs


def test_a_configuration_object_tells_modules_apart() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        return F.rms_norm(x, (D,), m.g, m.config.eps)  # type: ignore[union-attr]

    found = [probe(Written(forward, config=SimpleNamespace(eps=e))) for e in (1e-5, 1e-6)]
    assert [s.eps for s in found if isinstance(s, NormSpec)] == [1e-5, 1e-6]


def test_a_constant_in_a_buffer_tells_modules_apart() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        square = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(square + m.eps) * m.g  # type: ignore[operator]

    found: list[Any] = []
    for eps in (1e-5, 1e-6):
        module = Written(forward)
        module.register_buffer("eps", torch.tensor(eps, dtype=torch.float64))
        found.append(probe(module))
    assert [s.eps for s in found] == [1e-5, 1e-6]


def test_a_constant_without_a_value_is_not_guessed() -> None:
    class NormOfConstant(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias) + self.shift

    with torch.device("meta"):
        norm = NormOfConstant(D)
        norm.register_buffer("shift", torch.tensor(0.5))
    outcome = probe(norm)
    assert isinstance(outcome, Unknown)
    assert "meta device" in outcome.seen


def test_the_probe_runs_inside_inference_mode() -> None:
    class Another(nn.LayerNorm):
        pass

    with torch.inference_mode():
        assert isinstance(probe(Another(D)), NormSpec)


def test_a_probe_inside_a_device_context() -> None:
    class OnMeta(nn.LayerNorm):
        pass

    with torch.device("meta"):
        assert isinstance(probe(OnMeta(D)), NormSpec)


class Adaptive(nn.Module):
    """An adaptive LayerNorm: gain and shift come from a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (D,)
        self.project = nn.Linear(16, 2 * D)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.project(F.silu(condition)).unsqueeze(1).chunk(2, -1)
        return F.layer_norm(x, self.normalized_shape) * (1 + scale) + shift


class AfterResidual(nn.Module):
    """A post-norm block: the norm inside it is the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(D, D)
        self.norm = nn.LayerNorm(D)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return self.norm(self.dense(x) + residual)


def test_a_gain_projected_from_a_condition_is_seen() -> None:
    outcome = probe(Adaptive())
    assert outcome == Unknown("second-input", "a second tensor is required: 'condition'")


def test_a_block_with_a_norm_behind_a_residual_is_none() -> None:
    assert probe(AfterResidual()) is None


def test_several_results_are_not_described() -> None:
    class Pair(nn.LayerNorm):
        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x), None

    outcome = probe(Pair(D))
    assert isinstance(outcome, Unknown)
    assert outcome.reason == "several-results"


def test_a_dropout_inside_its_forward_is_not_overlooked() -> None:
    def forward(m: Written, x: Tensor) -> Tensor:
        return F.dropout(F.layer_norm(x, (D,), m.g, m.b), 0.5, m.training)

    assert kind_of(forward) == "training-mode"


def test_a_gate_of_saturated_values_is_no_norm() -> None:
    class Fusion(nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            share = gate.sigmoid()
            return x + share / share.sum(-1, keepdim=True).clamp(min=1.0)

    assert probe(Fusion()) is None


def test_a_module_that_cannot_be_copied_is_none() -> None:
    class Odd(nn.Module):
        def __new__(cls, *args: Any) -> Odd:
            if not args:
                raise TypeError("needs an argument")
            return super().__new__(cls)

        def __init__(self, _: int) -> None:
            super().__init__()

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(x, x.shape[-1:])

    assert probe(Odd(1)) is None


def test_a_norm_behind_the_hooks_of_accelerate_is_found() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    norm = made("llama.LlamaRMSNorm", D)
    hooks.add_hook_to_module(norm, hooks.ModelHook())
    assert probe(norm) == replace(RMS, cast_order="before")


def test_a_module_with_a_single_number_is_no_norm() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.logit_scale = nn.Parameter(torch.tensor(1.0))
            self.parts = nn.ModuleList(nn.Linear(D, D) for _ in range(9))

        def forward(self, x: Tensor) -> Tensor:
            return self.logit_scale * x

    assert probe(Whole()) is None
