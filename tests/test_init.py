"""Initialisations: their standard deviations, and which matrices get which."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from normswap.init import (
    deepnorm_init_,
    deepnorm_scales,
    fixnorm_init_,
    gpt2_output_init_,
    small_init_,
)

WIDTH = 256


def deviation(weight: Tensor) -> float:
    assert abs(weight.mean().item()) < 0.02 * weight.std().item() + 1e-3
    return weight.std().item()


def test_small_init_is_xavier_of_a_matrix_four_times_as_wide() -> None:
    for shape in ((WIDTH, WIDTH), (WIDTH, 4 * WIDTH)):
        weight = small_init_(torch.empty(shape), WIDTH)
        assert deviation(weight) == pytest.approx(math.sqrt(2 / (5 * WIDTH)), rel=0.02)
    xavier = nn.init.xavier_normal_(torch.empty(4 * WIDTH, WIDTH))
    assert deviation(xavier) == pytest.approx(math.sqrt(2 / (5 * WIDTH)), rel=0.02)


def test_gpt2_output_projections_shrink_with_depth() -> None:
    weight = gpt2_output_init_(torch.empty(WIDTH, WIDTH), num_layers=12)
    assert deviation(weight) == pytest.approx(0.02 / math.sqrt(24), rel=0.02)


def test_fixnorm_tables_are_small_and_uniform() -> None:
    weight = fixnorm_init_(torch.empty(WIDTH, WIDTH), padding_idx=3)
    assert 0.0099 < weight.max().item() <= 0.01
    assert -0.01 <= weight.min().item() < -0.0099
    assert not weight[3].any()
    assert deviation(weight[4:]) == pytest.approx(0.01 / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize(
    ("layers", "encoder", "decoder"),
    [
        ((6, 0), (12**0.25, 48**-0.25), None),
        ((0, 6), None, (12**0.25, 48**-0.25)),
        # 6 and 6 layers: (6⁴·6)^(1/16) = 6^(5/16)
        ((6, 6), (0.81 * 6 ** (5 / 16), 0.87 * 6 ** (-5 / 16)), (18**0.25, 72**-0.25)),
        ((100, 100), (3.4156, 0.20631), (300**0.25, 1200**-0.25)),
    ],
)
def test_deepnorm_scales(
    layers: tuple[int, int],
    encoder: tuple[float, float] | None,
    decoder: tuple[float, float] | None,
) -> None:
    for scale, want in zip(deepnorm_scales(*layers), (encoder, decoder), strict=True):
        got = None if scale is None else (scale.alpha, scale.beta)
        assert got == (None if want is None else pytest.approx(want, rel=1e-4))


class Layer(nn.Module):
    def __init__(self, **options: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, **options)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.linear1 = nn.Linear(WIDTH, 4 * WIDTH)
        self.linear2 = nn.Linear(4 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


@pytest.mark.parametrize("options", [{}, {"kdim": 128, "vdim": 64}])
def test_deepnorm_gains_go_to_values_outputs_and_the_feed_forward(options: dict[str, int]) -> None:
    model = nn.Sequential(Layer(**options))
    biases = {n: p.clone() for n, p in model.named_parameters() if p.dim() == 1}
    beta = 0.25
    assert deepnorm_init_(model, beta, ["*.value", "*.linear?"]) is model
    layer = model[0]
    attention = layer.attention
    packed = attention.in_proj_weight
    q, k, v = (
        (attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight)
        if packed is None
        else packed.chunk(3)
    )
    gains = [(q, 1.0), (k, 1.0), (v, beta), (attention.out_proj.weight, beta)]
    gains += [(layer.query.weight, 1.0), (layer.value.weight, beta)]
    gains += [(layer.linear1.weight, beta), (layer.linear2.weight, beta)]
    for weight, gain in gains:
        want = gain * math.sqrt(2 / sum(weight.shape))
        assert deviation(weight) == pytest.approx(want, rel=0.03)
    for name, before in biases.items():
        assert torch.equal(model.get_parameter(name), before)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"no nn.Linear is named '\*.fc1'"):
        deepnorm_init_(nn.Sequential(Layer()), 0.5, ["*.fc1"])
    with pytest.raises(ValueError, match="give how many"):
        deepnorm_scales()
    with pytest.raises(ValueError, match="num_layers is 0"):
        gpt2_output_init_(torch.empty(2, 2), 0)
    with pytest.raises(ValueError, match="dim is 0"):
        small_init_(torch.empty(2, 2), 0)
