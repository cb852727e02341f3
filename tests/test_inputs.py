"""What users pass as example inputs, and the variations that a second verification run takes."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from normswap.errors import NormswapError
from normswap.inputs import (
    Inputs,
    concrete,
    normalise_inputs,
    resolve_inputs,
    vary_inputs,
)

X = torch.randn(2, 3, 8, 8)


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Batch:
    image: Tensor
    name: str


# -- normalising ----------------------------------------------------------------------------------


def test_each_form_of_example_inputs_is_the_call_that_it_stands_for() -> None:
    def call(example: Any, kwargs: dict[str, Any] | None = None) -> tuple[Any, Any]:
        inputs = normalise_inputs(example, kwargs)
        return inputs.args, inputs.kwargs

    image = X[0]
    assert call(X) == ((X,), {})
    assert call((X, 3)) == ((X, 3), {})
    assert call([X, None]) == ((X, None), {})
    assert call(([image],)) == (([image],), {})
    assert call({"x": X}) == ((), {"x": X})
    assert call(UserDict(x=X)) == ((), {"x": X})  # what tokenizers return
    assert call(X, {"flag": True}) == ((X,), {"flag": True})
    assert call(Inputs((X,), {"a": 1}), {"b": 2}) == ((X,), {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("example", "kwargs", "says"),
    [
        ("text", None, "is a str"),
        (3.0, None, "is a float"),
        (X.numpy(), None, r"torch\.from_numpy"),
        ({1: X}, None, r"1 is no string.*\(mapping,\)"),
        ({"x": X}, {"x": X}, "'x' is both in example_inputs and in example_kwargs"),
    ],
)
def test_what_is_no_call_is_refused_with_the_way_out(
    example: Any, kwargs: dict[str, Any] | None, says: str
) -> None:
    with pytest.raises(NormswapError, match=says):
        normalise_inputs(example, kwargs)


def test_map_reaches_every_container_and_keeps_its_kind() -> None:
    inputs = Inputs(
        (X, [X, (X, "text")], Pair(X, X)), {"batch": Batch(X, "a"), "rest": UserDict(x=X)}
    )
    new = inputs.map(lambda t: t * 2)
    assert torch.equal(new.args[1][1][0], 2 * X)
    assert new.args[1][1][1] == "text"
    assert isinstance(new.args[2], Pair)
    assert torch.equal(new.args[2].right, 2 * X)
    assert torch.equal(new.kwargs["batch"].image, 2 * X)
    assert isinstance(new.kwargs["rest"], UserDict)
    assert torch.equal(inputs.kwargs["rest"]["x"], X)
    assert len(inputs.tensors()) == 7


@pytest.mark.parametrize(
    ("example", "text"),
    [
        (torch.zeros(1, 3, 224, 224), "1x3x224x224"),
        ((torch.zeros(2, 5), torch.tensor(1), None), "2x5, scalar, None"),
        (([torch.zeros(3, 4, 5), torch.zeros(3, 6, 7)],), "[3x4x5, 3x6x7]"),
        ({"input_ids": torch.zeros(2, 16), "use_cache": False}, "input_ids 2x16, use_cache False"),
        (({"image": torch.zeros(3, 4)},), "{image 3x4}"),
        ((), "no inputs"),
        ((object(),), "object"),
    ],
)
def test_describe(example: Any, text: str) -> None:
    assert normalise_inputs(example).describe() == text


# -- fitting to the model -------------------------------------------------------------------------


def test_floating_inputs_take_the_dtype_of_the_model() -> None:
    model = nn.Conv2d(3, 4, 1).bfloat16()
    ids = torch.arange(4)
    inputs = resolve_inputs(model, (X, ids, X.bfloat16()))
    assert [t.dtype for t in inputs.tensors()] == [torch.bfloat16, torch.int64, torch.bfloat16]
    torch.testing.assert_close(inputs.args[0], X.bfloat16())


def test_a_dtype_that_some_parameter_has_stays() -> None:
    mixed = nn.Sequential(nn.Conv2d(3, 4, 1).half(), nn.BatchNorm2d(4))
    assert resolve_inputs(mixed, X).args[0].dtype == torch.float32
    assert resolve_inputs(nn.ReLU(), X.double()).args[0].dtype == torch.float64


def test_a_meta_model_leaves_inputs_where_they_are() -> None:
    with torch.device("meta"):
        model = nn.Conv2d(3, 4, 1)
    assert torch.equal(resolve_inputs(model, X).args[0], X)


def test_meta_inputs_become_concrete() -> None:
    meta = Inputs(
        (
            torch.empty(500, device="meta"),
            torch.empty(500, device="meta", dtype=torch.int64),
            torch.empty(5, device="meta", dtype=torch.bool),
            X,
        )
    )
    floats, ints, mask, kept = concrete(meta, seed=1).tensors()
    assert abs(floats.std() - 1) < 0.2
    assert set(ints.tolist()) == {0, 1}
    assert mask.all()
    assert kept is X
    assert torch.equal(concrete(meta, seed=1).tensors()[0], floats)


# -- varying --------------------------------------------------------------------------------------


def shapes(example: Any) -> list[str]:
    return [inputs.describe() for inputs in vary_inputs(normalise_inputs(example), seed=0)]


def test_images_change_batch_and_become_oblong_before_anything_smaller_is_tried() -> None:
    assert shapes(torch.zeros(1, 3, 224, 224)) == [
        "2x3x256x224",
        "2x3x256x256",
        "2x3x224x224",
        "1x3x256x224",
        "1x3x256x256",
        "1x3x224x224",
    ]


def test_an_oblong_image_does_not_become_a_square_one() -> None:
    assert shapes(torch.zeros(4, 3, 32, 64))[0] == "3x3x96x64"


def test_tokens_and_their_masks_change_together() -> None:
    tokens = {
        "input_ids": torch.randint(5, 90, (2, 16)),
        "attention_mask": torch.ones(2, 16, dtype=torch.long),
        "additive": torch.zeros(2, 1, 16, 16).masked_fill(torch.ones(16, 16).triu(1) > 0, -1e9),
        "pixels": torch.rand(2, 3, 64, 64),
        "pixel_mask": torch.ones(2, 64, 64, dtype=torch.long),
    }
    first = shapes(tokens)[0]
    assert first == (
        "input_ids 1x21, attention_mask 1x21, additive 1x1x21x21, pixels 1x3x96x64, "
        "pixel_mask 1x96x64"
    )


def test_features_try_either_axis_as_the_length() -> None:
    assert shapes(torch.zeros(2, 7, 5))[:3] == ["1x12x5", "1x7x10", "1x7x5"]


def test_images_of_several_scales_keep_their_proportions() -> None:
    pyramid = (torch.rand(1, 8, 64, 64), torch.rand(1, 16, 32, 32))
    assert shapes(pyramid)[0] == "2x8x96x64, 2x16x48x32"


def test_a_list_of_images_grows_and_clips_keep_their_frames() -> None:
    assert shapes(([torch.rand(3, 64, 80)],))[0] == "[3x96x80, 3x96x80]"
    assert shapes(torch.rand(2, 3, 4, 32, 32))[0] == "1x3x4x64x32"


def test_the_last_variation_has_the_given_shapes() -> None:
    for example in (X, ([X[0]],), {"ids": torch.zeros(2, 5, dtype=torch.long)}, torch.rand(3)):
        assert shapes(example)[-1] == normalise_inputs(example).describe()


def vary(tensor: Tensor, seed: int = 0) -> Tensor:
    return next(vary_inputs(Inputs((tensor,)), seed)).args[0]


@given(mean=st.floats(-50, 50), std=st.floats(0.1, 20), seed=st.integers(0, 1000))
def test_floats_keep_their_distribution_and_range(mean: float, std: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 3, 32, 32, generator=generator) * std + mean
    new = vary(x, seed)
    assert abs(new.mean() - x.mean()) < 0.2 * std
    assert 0.9 < new.std() / x.std() < 1.1
    assert new.min() >= x.min()
    assert new.max() <= x.max()
    assert not torch.isin(new, x).all()


def test_a_constant_image_becomes_a_lively_one() -> None:
    for value in (0.0, 1.0):
        new = vary(torch.full((1, 3, 16, 16), value))
        assert abs(new.std() - 1) < 0.1
        assert abs(new.mean() - value) < 0.1


def test_what_is_not_finite_stays_in_kind() -> None:
    x = torch.tensor([[0.5, float("nan"), float("inf"), 0.25]])
    new = vary(x)
    assert torch.isin(new[new.isfinite()], x).all()


@given(high=st.integers(2, 1000), seed=st.integers(0, 1000))
def test_token_ids_stay_among_the_given_ones(high: int, seed: int) -> None:
    ids = torch.randint(high, (2, 16), generator=torch.Generator().manual_seed(seed))
    new = vary(ids, seed)
    assert new.dtype == torch.int64
    assert torch.isin(new, ids).all()


def test_masks_keep_their_pattern() -> None:
    left = torch.tensor([[0] * 4 + [1] * 12, [1] * 16])
    assert vary(left).tolist() == [[0] * 6 + [1] * 15]
    causal = torch.ones(4, 4).tril().bool()
    stretched = vary(causal[None, None])
    assert stretched.dtype == torch.bool
    assert stretched.any(-1).all()  # no row attends to nothing
    additive = torch.zeros(1, 1, 8, 8).masked_fill(~torch.ones(8, 8).tril().bool(), -torch.inf)
    new = vary(additive)
    assert set(new.unique().tolist()) == {0.0, -torch.inf}
    assert (new == 0).any(-1).all()


def test_positions_stay_in_order_and_in_range() -> None:
    positions = torch.arange(16).expand(2, 16)
    new = vary(positions)
    assert new.shape == (1, 21)
    assert (new.diff() >= 0).all()
    assert new.max() == 15


def test_memory_format_and_dtype_are_kept() -> None:
    x = torch.randn(2, 3, 8, 8).half().to(memory_format=torch.channels_last)
    new = vary(x)
    assert new.dtype == torch.float16
    assert new.is_contiguous(memory_format=torch.channels_last)
    assert not new.is_contiguous()


def test_what_is_no_tensor_is_passed_on() -> None:
    cache = object()
    new = next(vary_inputs(Inputs((X, 3, None), {"cache": cache}), 0))
    assert new.args[1:] == (3, None)
    assert new.kwargs["cache"] is cache


@pytest.mark.parametrize(
    "work",
    [
        lambda: list(vary_inputs(Inputs((X,)), 3)),
        lambda: concrete(Inputs((torch.empty(3, device="meta"),)), 3),
    ],
)
def test_the_global_random_state_is_left_alone(work: Callable[[], Any]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    work()
    assert torch.equal(torch.rand(3), expected)


def test_the_given_tensors_are_not_written_to() -> None:
    before = X.clone()
    for inputs in vary_inputs(Inputs((X,)), 0):
        inputs.args[0].zero_()
    assert torch.equal(X, before)
