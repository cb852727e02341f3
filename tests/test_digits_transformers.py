"""The shipped digits transformers, and the post-norm one with its norms moved by hand."""

from __future__ import annotations

from pathlib import Path

import place_norms
import pytest
import torch
from digits_transformer import (
    POST_NORM,
    PRE_NORM,
    DigitsTransformer,
    load_record,
    load_training_digits,
    load_transformer,
)
from helpers import relative_error
from swapping import run64
from torch import Tensor, nn

import normswap as ns
from normswap.demo import accuracy, load_heldout

BOTH = pytest.mark.parametrize("directory", [POST_NORM, PRE_NORM], ids=lambda path: path.name)
EXACT = 1e-12


def layer_norms(network: DigitsTransformer) -> list[nn.LayerNorm]:
    """Those of the layers, in the order in which the data meets them."""
    return [norm for layer in network.encoder.layers for norm in (layer.norm1, layer.norm2)]


def rotated(post: DigitsTransformer) -> DigitsTransformer:
    """The pre-norm network whose norms are those of the post-norm one, each a sublayer later."""
    pre = DigitsTransformer(norm_first=True).to(post.head.weight.dtype)
    pre.load_state_dict(post.state_dict(), strict=False)
    first, *others = [*layer_norms(pre), pre.encoder.norm]
    nn.init.ones_(first.weight)
    nn.init.zeros_(first.bias)
    for target, source in zip(others, layer_norms(post), strict=True):
        target.load_state_dict(source.state_dict())
    return pre.eval()


def with_normalised_skips(pre: DigitsTransformer, images: Tensor) -> Tensor:
    """The scores where skips, too, read what a norm returns; the first fork has no norm."""
    patches = torch.nn.functional.pixel_unshuffle(images, 2).flatten(2).transpose(1, 2)
    x = pre.embed(patches) + pre.positions
    for number, layer in enumerate(pre.encoder.layers):
        x = layer.norm1(x) if number else x
        x = x + layer.self_attn(x, x, x)[0]
        x = layer.norm2(x)
        x = x + layer.linear2(layer.linear1(x).relu())
    return pre.head(pre.encoder.norm(x).mean(1))


def randomise_norms(network: DigitsTransformer) -> DigitsTransformer:
    """Scales of both signs, some of them zero."""
    for norm in layer_norms(network):
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        with torch.no_grad():
            norm.weight[::7] = 0
    return network


# The checkpoints


@BOTH
def test_recorded_accuracy_is_what_the_shipped_network_reaches(directory: Path) -> None:
    network, record = load_transformer(directory), load_record(directory)
    assert accuracy(network, load_heldout()) == pytest.approx(record["held_out_accuracy"])
    assert record["held_out_accuracy"] > 0.97
    assert sum(p.numel() for p in network.parameters()) == record["parameters"]


@BOTH
def test_checkpoint_is_small(directory: Path) -> None:
    assert sum(file.stat().st_size for file in directory.iterdir()) < 1_000_000


@BOTH
def test_every_norm_was_trained_away_from_neutral(directory: Path) -> None:
    network = load_transformer(directory)
    norms = [module for module in network.modules() if isinstance(module, nn.LayerNorm)]
    assert len(norms) == (13 if directory == PRE_NORM else 12)
    for norm in norms:
        assert norm.weight.std() > 0.02
        assert norm.bias.abs().mean() > 0.005


def test_the_two_differ_by_placement_and_the_final_norm_only() -> None:
    post, pre = load_transformer(POST_NORM), load_transformer(PRE_NORM)
    assert not any(layer.norm_first for layer in post.encoder.layers)
    assert all(layer.norm_first for layer in pre.encoder.layers)
    final = {"encoder.norm.weight", "encoder.norm.bias"}
    assert pre.state_dict().keys() - post.state_dict().keys() == final
    assert post.state_dict().keys() <= pre.state_dict().keys()
    posts, pres = load_record(POST_NORM), load_record(PRE_NORM)
    assert {key for key in posts if posts[key] != pres[key]} == {
        "norm_first",
        "held_out_accuracy",
        "parameters",
    }


def test_no_image_is_trained_on_and_chosen_by_or_held_out() -> None:
    parts = [*load_training_digits(), load_heldout()]
    images = [{image.numpy().tobytes() for image in part.images} for part in parts]
    assert sum(len(part.labels) for part in parts) == 1797
    assert len(set.union(*images)) == sum(map(len, images))
    record = load_record(POST_NORM)
    sizes = [record[key] for key in ("trained_on", "settings_chosen_by", "held_out")]
    assert sizes == [len(part.labels) for part in parts]


# Norms moved


def test_rotation_with_normalised_skips_is_the_post_norm_network() -> None:
    post = randomise_norms(load_transformer(POST_NORM)).double()
    images = load_heldout().images[:32].double()
    moved = with_normalised_skips(rotated(post), images)
    assert relative_error(run64(post, images), moved) < EXACT


def test_rotation_with_clean_skips_is_another_network() -> None:
    post = load_transformer(POST_NORM).double()
    images = load_heldout().images[:32].double()
    assert relative_error(run64(post, images), run64(rotated(post), images)) > 0.1


def test_conversion_to_pre_norm_is_the_rotation() -> None:
    post = load_transformer(POST_NORM)
    new, _ = ns.convert_placement(post, "pre", load_heldout().images[:2])
    expected = rotated(post).state_dict()
    assert new.state_dict().keys() == expected.keys()
    for name, tensor in new.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


# The experiment


def test_every_start_sees_the_same_images_in_the_same_order() -> None:
    train_set, _ = load_training_digits()
    first, again, other = (
        torch.cat(list(place_norms.batches(train_set, order))) for order in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(first.sort().values, torch.arange(len(train_set.labels)))


def test_from_scratch_is_the_same_network_for_the_same_seed() -> None:
    first, again = (place_norms.from_scratch(3).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_loading_by_name_leaves_a_neutral_final_norm() -> None:
    post = load_transformer(POST_NORM)
    named = place_norms.loaded_by_name(post)
    assert torch.equal(named.encoder.norm.weight, torch.ones(48))
    assert torch.equal(named.encoder.norm.bias, torch.zeros(48))
    assert torch.equal(named.encoder.layers[3].norm2.weight, post.encoder.layers[3].norm2.weight)


def test_labels_keep_their_order_and_distance() -> None:
    assert place_norms.apart([0.5, 0.99, 0.98, 0.97], 0.05) == pytest.approx(
        [0.5, 0.99, 0.94, 0.89]
    )
