"""True float64: every op computes in float64, and nothing of the caller's is changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from normswap.precision import rounding_noise, true_float64

THIRD = 1 / 3


class Float32Norm(nn.Module):
    """A layer norm that casts to float32 inside, as most modelling files do."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, correction=0, keepdim=True))
        return self.weight * x.to(dtype)


def exact(module: nn.Module, *args: Tensor) -> Tensor:
    with true_float64():
        return module(*args)


def test_casts_inside_a_model_do_not_round() -> None:
    norm, x = Float32Norm(7), torch.randn(3, 7)
    wide = x.double()
    wide = (wide - wide.mean(-1, keepdim=True)) / wide.var(-1, correction=0, keepdim=True).sqrt()
    expected = norm.weight.double() * wide

    torch.testing.assert_close(exact(norm, x), expected, rtol=1e-14, atol=1e-14)
    rounded = norm.double()(x.double())  # what `.double()` alone gives
    assert (rounded - expected).abs().max() > 1e-9


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_lower_dtype_is_raised(dtype: torch.dtype) -> None:
    layer = nn.Linear(5, 4).to(dtype)
    x = torch.randn(3, 5).to(dtype)
    out = exact(layer, x)
    assert out.dtype == torch.float64
    expected = x.double() @ layer.weight.double().T + layer.bias.double()
    torch.testing.assert_close(out, expected.detach(), rtol=1e-15, atol=1e-15)


MAKERS = {
    "zeros": lambda: torch.zeros(2, dtype=torch.float16),
    "full": lambda: torch.full((2,), THIRD, dtype=torch.float32),
    "full, default": lambda: torch.full((2,), THIRD),
    "arange": lambda: torch.arange(0, 1, THIRD, dtype=torch.float32),
    "arange, default": lambda: torch.arange(0, 1, THIRD),
    "linspace": lambda: torch.linspace(0, 1, 4),
    "scalar": lambda: torch.tensor(THIRD),
    "empty_like": lambda: torch.empty_like(torch.zeros(2, dtype=torch.float32)),
    "new_full": lambda: torch.zeros(2).new_full((2,), THIRD, dtype=torch.bfloat16),
    "half()": lambda: torch.full((2,), THIRD).half(),
    "to": lambda: torch.full((2,), THIRD).to("cpu", torch.bfloat16),
    "type": lambda: torch.full((2,), THIRD).type(torch.float32),
    "sum": lambda: torch.full((2,), THIRD).sum(dtype=torch.float32),
    "cumsum": lambda: torch.full((2,), THIRD).cumsum(0, dtype=torch.float16),
    "softmax": lambda: torch.full((2,), THIRD).softmax(0, dtype=torch.float32),
    "integers": lambda: torch.arange(3).to(torch.float32),
    "mean of integers": lambda: torch.arange(2).mean(dtype=torch.float16),
    "einsum": lambda: torch.einsum("i,i->", torch.rand(3), torch.rand(3)),
    "stack": lambda: torch.stack([torch.rand(2).half(), torch.rand(2).half()]),
    "bits of integers": lambda: torch.tensor([1, 2], dtype=torch.int32).view(torch.float32),
}


@pytest.mark.parametrize("name", MAKERS)
def test_factories_and_casts_make_float64(name: str) -> None:
    with true_float64():
        made = MAKERS[name]()
        assert made.dtype == torch.float64
        if name in {"full", "full, default", "scalar", "new_full", "half()", "to", "type"}:
            assert (made - THIRD).abs().max() < 1e-16


def test_complex_becomes_complex128() -> None:
    x = torch.randn(4, dtype=torch.complex64)
    with true_float64():
        angle = torch.polar(torch.ones(3), torch.full((3,), THIRD))
        assert (x * 1j).dtype == torch.complex128
        assert torch.view_as_complex(torch.rand(2, 2)).dtype == torch.complex128
        assert torch.fft.rfft(torch.rand(4)).dtype == torch.complex128
        assert torch.zeros(2, dtype=torch.complex64).dtype == torch.complex128
    assert abs(angle[0].imag - torch.tensor(THIRD, dtype=torch.float64).sin()) < 1e-16


def test_the_bits_of_integers_keep_their_meaning() -> None:
    bits = torch.tensor([0.1, -2.0], dtype=torch.float32).view(torch.int32)
    with true_float64():
        read = bits.view(torch.float32)
    assert read.tolist() == torch.tensor([0.1, -2.0]).tolist()


class Counter(nn.Module):
    """Writes to its buffers in every way that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("table", torch.zeros(2, 3))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        self.mean += x
        self.table[:, 1:].copy_(x[1:])
        self.table[0].mul_(THIRD)
        torch.add(self.mean, x, out=self.mean)
        self.calls += 1
        return self.mean.sum() + self.table.sum()


def test_writes_are_seen_in_float64_and_leave_buffers_alone() -> None:
    module = Counter()
    before = {name: (buffer, buffer.clone()) for name, buffer in module.named_buffers()}
    x = torch.full((3,), 0.1)
    out = exact(module, x)
    tenth = x.double()[0].item()
    assert abs(out.item() - (6 * tenth + 2 * tenth * (1 + THIRD))) < 1e-15
    for name, (buffer, value) in before.items():
        assert getattr(module, name) is buffer
        if name != "calls":
            assert torch.equal(buffer, value)
    assert module.calls == 1  # integers are written as usual


def test_views_made_before_the_block_share_what_is_written() -> None:
    base = torch.zeros(4)
    view, data = base[1:], base.data
    with true_float64():
        base[2:] = torch.tensor(THIRD)
        assert (view[1] - THIRD).abs() < 1e-16
        assert (data[3] - THIRD).abs() < 1e-16
        view.add_(THIRD)
        assert (base.sum() - 5 * THIRD).abs() < 1e-15
    assert not base.any()


def test_transposed_and_offset_tensors_are_read_right() -> None:
    base = torch.randn(4, 6)
    part = base.t()[1:5:2, 1:]
    with true_float64():
        assert torch.equal(part.reshape(-1), part.double().clone().reshape(-1))
        assert torch.equal(part.unsqueeze(0)[0], part.double())
    column = torch.randn(3, 1).expand(3, 4)
    with true_float64():
        assert torch.equal(column.view(3, 4) + 0, column.double())


def test_an_in_place_op_hands_back_the_same_object() -> None:
    x = torch.zeros(3)
    with true_float64():
        assert x.add_(1) is x
        torch._foreach_add_([x], [1.0])
        assert x.clone().tolist() == [2.0, 2.0, 2.0]


def test_batch_norm_in_training_mode_keeps_its_statistics() -> None:
    bn = nn.BatchNorm2d(3)
    exact(bn, torch.randn(4, 3, 5, 5))
    assert torch.equal(bn.running_mean, torch.zeros(3))


def test_the_default_dtype_comes_back() -> None:
    with true_float64():
        assert torch.get_default_dtype() == torch.float64
    assert torch.get_default_dtype() == torch.float32
    with pytest.raises(ZeroDivisionError), true_float64():
        _ = 1 / 0
    assert torch.get_default_dtype() == torch.float32
    assert not torch.is_inference_mode_enabled()


MODELS = {
    "lstm": (lambda: nn.LSTM(5, 4, 2, bidirectional=True, batch_first=True), (3, 6, 5)),
    "gru": (lambda: nn.GRU(5, 4), (6, 3, 5)),
    "attention layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu"),
        (2, 5, 8),
    ),
    "grouped conv": (lambda: nn.Conv2d(4, 4, 3, groups=2, padding_mode="reflect"), (2, 4, 6, 6)),
    "transposed conv": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), (2, 4, 7)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (2, 4, 5)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, track_running_stats=True), (2, 4, 5)),
    "prelu": (lambda: nn.PReLU(4), (2, 4, 5)),
    "bilinear": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (2, 3, 4, 4)),
    "adaptive pool": (lambda: nn.AdaptiveAvgPool2d(2), (2, 3, 5, 5)),
}


@pytest.mark.parametrize("name", MODELS)
def test_layers_give_what_their_double_gives(name: str) -> None:
    make, shape = MODELS[name]
    module = make().eval()
    x = torch.randn(shape)
    out = exact(module, x)
    expected = module.double()(x.double())
    out, expected = (y[0] if isinstance(y, tuple) else y for y in (out, expected))
    torch.testing.assert_close(out, expected.detach(), rtol=1e-13, atol=1e-13)


def test_attention_runs_on_half_weights() -> None:
    q, k, v = (torch.randn(2, 3, 5, 4).half() for _ in range(3))
    with true_float64():
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    expected = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(out, expected, rtol=1e-14, atol=1e-14)


def test_max_norm_does_not_renormalise_the_users_weights() -> None:
    table = nn.Embedding(6, 4, max_norm=0.5)
    before = table.weight.detach().clone()
    out = exact(table, torch.tensor([[0, 2]]))
    assert torch.equal(table.weight, before)
    assert out.norm(dim=-1).max() <= 0.5 + 1e-6


@given(size=st.sampled_from([2.0**-11, 2.0**-24, 2.0**-53]), seed=st.integers(0, 2**31))
def test_noise_moves_what_an_op_reads_by_at_most_its_size(size: float, seed: int) -> None:
    x = torch.rand(50, generator=torch.Generator().manual_seed(seed)) + 0.5
    with true_float64():
        clean = x * 3
    with rounding_noise(size, seed):
        noisy = x * 3
    moved = ((noisy - clean) / clean).abs().max().item()
    assert 0.5 * size < moved <= size + 2.0**-52


def test_noise_depends_on_the_seed_only() -> None:
    layer, x = nn.Linear(5, 4), torch.randn(3, 5)
    runs: list[Tensor] = []
    for seed in (1, 1, 2):
        with rounding_noise(1e-3, seed):
            runs.append(layer(x))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])
