"""Layer norms over channels and examples, with an offset, and the bare affine."""

from __future__ import annotations

import pytest
import torch
from helpers import random_input, relative_error
from norm_cases import randomised
from timm.layers import LayerNorm2d
from torch import nn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.mobilebert.modeling_mobilebert import NoNorm
from transformers.models.nemotron.modeling_nemotron import NemotronLayerNorm1P

from normswap import norms

SHAPES = [(4, 6), (4, 6, 5), (4, 6, 4, 3), (4, 6, 2, 3, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_over_channels_is_a_layer_norm_with_the_channels_last(shape: tuple[int, ...]) -> None:
    ours = randomised(norms.ChannelLayerNorm(6)).double()
    theirs = nn.LayerNorm(6, eps=1e-6).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = random_input(*shape)
    assert relative_error(theirs(x.movedim(1, -1)).movedim(-1, 1), ours(x)) < 1e-14


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_over_channels_is_an_rms_norm_with_the_channels_last(
    shape: tuple[int, ...], bias: bool
) -> None:
    ours = randomised(norms.ChannelRMSNorm(6, bias=bias)).double()
    theirs = norms.RMSNorm(6, eps=1e-6, bias=bias).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = random_input(*shape)
    assert relative_error(theirs(x.movedim(1, -1)).movedim(-1, 1), ours(x)) < 1e-14
    centred = x - x.mean(1, keepdim=True)
    layer = randomised(norms.ChannelLayerNorm(6, bias=bias)).double()
    layer.load_state_dict(ours.state_dict(), strict=True)
    assert relative_error(layer(x), ours(centred)) < 1e-14


def test_over_channels_equals_timm_and_convnext() -> None:
    ours = randomised(norms.ChannelLayerNorm(6))
    x = random_input(2, 6, 5, 5, dtype=torch.float32)
    for theirs in (LayerNorm2d(6), ConvNextLayerNorm(6, data_format="channels_first")):
        assert theirs.eps == ours.eps
        theirs.load_state_dict(ours.state_dict(), strict=True)
        assert relative_error(theirs(x), ours(x)) < 1e-6
        assert theirs.normalized_shape == ours.normalized_shape


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_over_channels_keeps_the_memory_format(layout: torch.memory_format) -> None:
    x = random_input(2, 6, 5, 5).contiguous(memory_format=layout)
    y = norms.ChannelLayerNorm(6).double()(x)
    assert y.is_contiguous(memory_format=layout)
    assert y.stride() == x.stride()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_over_an_example_is_a_group_norm_with_one_group(shape: tuple[int, ...]) -> None:
    ours = randomised(norms.SampleLayerNorm(6)).double()
    theirs = nn.GroupNorm(1, 6).double()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = random_input(*shape)
    assert relative_error(theirs(x), ours(x)) < 1e-14
    n = x.numpy().reshape(4, -1)
    unit = ((n - n.mean(1, keepdims=True)) / (n.var(1, keepdims=True) + 1e-5) ** 0.5).reshape(shape)
    view = (1, 6, *[1] * (len(shape) - 2))
    w, b = (t.detach().numpy().reshape(view) for t in (ours.weight, ours.bias))
    assert relative_error(torch.from_numpy(unit * w + b), ours(x)) < 1e-13
    assert ours.num_groups == theirs.num_groups
    assert ours.num_channels == theirs.num_channels


def test_an_offset_scale_equals_nemotron() -> None:
    ours, theirs = randomised(norms.OffsetLayerNorm(8)), NemotronLayerNorm1P(8)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    x = random_input(3, 8, dtype=torch.float32)
    assert relative_error(theirs(x), ours(x)) < 1e-6
    fresh, plain = norms.OffsetLayerNorm([3, 8]).double(), nn.LayerNorm([3, 8]).double()
    assert relative_error(plain(x.double()), fresh(x.double())) < 1e-15


@pytest.mark.parametrize("kind", [norms.OffsetLayerNorm, norms.OffsetRMSNorm])
def test_the_one_of_a_bfloat16_offset_is_added_in_float32(kind: type[nn.Module]) -> None:
    ours = kind(64, eps=0.0, dtype=torch.bfloat16)
    nn.init.constant_(ours.weight, 15.8125)  # 16.8125 has no bfloat16
    x = torch.tensor([1.0, -1.0] * 32, dtype=torch.bfloat16)
    x[1] = -1.0 + 2**-7
    unit = kind(64, eps=0.0)(x.float())
    assert torch.equal(ours(x), (unit * 16.8125).bfloat16())
    assert not torch.equal(ours(x), (unit * (1 + ours.weight).float()).bfloat16())


def test_without_affine_or_bias() -> None:
    x = random_input(3, 8)
    for kind in (norms.OffsetLayerNorm, norms.RMSNorm, norms.LpNorm, norms.PartialRMSNorm):
        plain = kind(8, elementwise_affine=False).double()
        assert list(plain.parameters()) == []
        assert plain.weight is plain.bias is None
        assert relative_error(kind(8).double()(x), plain(x)) == 0.0
    shiftless = randomised(norms.OffsetLayerNorm(8, bias=False).double())
    want = nn.functional.layer_norm(x, (8,), 1 + shiftless.weight)
    assert relative_error(want, shiftless(x)) < 1e-15
    channel = randomised(norms.ChannelLayerNorm(8, bias=False).double())
    assert (
        relative_error(nn.functional.layer_norm(x, (8,), channel.weight, eps=1e-6), channel(x)) == 0
    )


def test_affine_is_what_an_eval_batch_norm_amounts_to() -> None:
    bn, affine = randomised(nn.BatchNorm2d(6)).double().eval(), norms.Affine(6).double()
    scale = bn.weight / torch.sqrt(bn.running_var + bn.eps)
    affine.weight.data.copy_(scale)
    affine.bias.data.copy_(bn.bias - bn.running_mean * scale)
    x = random_input(2, 6, 4, 4)
    assert relative_error(bn(x), affine(x)) < 1e-14
    last = norms.Affine(6, channel_dim=-1).double()
    last.load_state_dict(affine.state_dict())
    assert relative_error(affine(x), last(x.movedim(1, -1)).movedim(-1, 1)) == 0.0
    assert relative_error(x, norms.Affine(6, bias=False).double()(x)) == 0.0


def test_no_norm_is_the_identity_or_mobileberts() -> None:
    x = random_input(2, 3, 8, dtype=torch.float32)
    assert norms.NoNorm(8, eps=1e-12)(x) is x
    ours, theirs = randomised(norms.NoNorm(8, elementwise_affine=True)), NoNorm(8)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    assert relative_error(theirs(x), ours(x)) < 1e-6


def test_attributes_that_models_read() -> None:
    for norm in (norms.RMSNorm(8), norms.OffsetRMSNorm(8), norms.ChannelLayerNorm(8)):
        assert norm.variance_epsilon == norm.eps == 1e-6
        assert norm.normalized_shape == (8,)
        assert norm.weight is not None
    for norm in (norms.GhostBatchNorm(8), norms.FRN(8), norms.BatchGroupNorm(2, 8)):
        assert norm.num_features == norm.num_channels == 8
    assert norms.BatchGroupNorm(2, 8).num_groups == 2
    assert norms.EvoNormS0(8, 2).num_groups == 2


@pytest.mark.parametrize("shape", [0, (), (4, 0)])
def test_bad_shapes_are_refused(shape: int | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="give the sizes of the last axes"):
        norms.RMSNorm(shape)


@pytest.mark.parametrize(
    ("module", "shape", "message"),
    [
        (norms.OffsetLayerNorm([3, 8]), (2, 4, 8), r"its last axes must be \[3, 8\]"),
        (norms.NoNorm(8), (2, 7), r"NoNorm: the input is \[2, 7\]"),
        (norms.ChannelLayerNorm(6), (2, 5, 6), "6 channels on axis 1"),
        (norms.SampleLayerNorm(6), (6,), "at least 2 axes"),
        (norms.Affine(6, channel_dim=2), (6, 6), "6 channels on axis 2"),
        (norms.FRN(6), (2, 6), "at least 3 axes"),
        (norms.GRN(6), (2, 6), "at least 3 axes"),
        (norms.TLU(6), (2, 5), "6 channels on axis 1"),
        (norms.DyT(6), (2, 5), r"last axes must be \[6\]"),
        (norms.Derf(6, channels_last=False), (2, 5, 6), "6 channels on axis 1"),
        (norms.ScaleNorm(6), (2, 5), r"last axes must be \[6\]"),
        (norms.FrozenBatchNorm(6), (2, 5), "6 channels on axis 1"),
    ],
    ids=lambda v: type(v).__name__ if isinstance(v, nn.Module) else "",
)
def test_inputs_that_do_not_fit_are_refused(
    module: nn.Module, shape: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        module(torch.ones(shape))
