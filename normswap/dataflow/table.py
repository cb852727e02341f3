"""The table: the rule of each ATen op; an op that is not here blocks every map."""

from __future__ import annotations

import torch
from torch import fx

from normswap.capture import hook_read, stale_read
from normswap.dataflow.contractions import (
    RANKS,
    TRANSPOSED_RANKS,
    Convolution,
    Linear,
    Lookup,
)
from normswap.dataflow.joins import (
    Adding,
    Alike,
    Concatenating,
    Filling,
    Multiplying,
    Written,
    index_put_parts,
    one_axis_parts,
)
from normswap.dataflow.moves import (
    Expanding,
    Gathering,
    Indexing,
    Padding,
    Permuting,
    Rearranging,
    Repeating,
    Reshaping,
    Slicing,
    Splitting,
    Unfolding,
    channel_shuffle,
    pixel_shuffle,
    pixel_unshuffle,
)
from normswap.dataflow.norm_ops import FixedNorm, NormCall, NormWithAffine, norm_call
from normswap.dataflow.passing import (
    First,
    Passing,
    Reducing,
    ShapeOnly,
    Softmax,
    check_average,
    check_cast,
    check_dropout,
    last,
    one_axis,
)
from normswap.dataflow.products import Attention, Einsum, MatMul
from normswap.dataflow.rule import (
    ACTIVATION,
    BLOCK,
    CASTS,
    EXPANDS,
    NONNEGATIVE,
    PASS,
    PERMUTATIONS,
    RESHAPES,
    Rule,
    ShapeOfSecond,
    argument,
    op_name,
)
from normswap.maps import Blocked

_SHAPE_ONLY = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros",
    "zeros", "ones", "full", "new_ones", "new_empty", "new_full", "sym_size",
    "_assert_tensor_metadata", "_shape_as_tensor", "sym_numel", "sym_stride", "device", "dtype",
    "layout",
)  # fmt: skip

_NONLINEAR = (
    "gelu", "silu", "sigmoid", "tanh", "relu6", "hardtanh", "hardswish", "hardsigmoid", "mish",
    "elu", "celu", "selu", "softplus", "logsigmoid", "log_sigmoid", "exp", "log", "clamp",
    "clamp_min", "clamp_max", "erf", "sin", "cos", "sqrt", "rsqrt", "pow", "reciprocal",
    "log_softmax", "threshold", "softsign", "square", "glu", "hardshrink",
    "softshrink", "round", "floor", "sign",
)  # fmt: skip

_SPLITS = (
    "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "unsafe_split",
    "unsafe_chunk", "unsafe_split_with_sizes",
)  # fmt: skip
_PADS = (
    "constant_pad_nd", "pad", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d",
    "replication_pad1d", "replication_pad2d", "replication_pad3d", "_pad_circular", "_pad_enum",
)  # fmt: skip
_block = Passing(scale=BLOCK, shift=BLOCK, centre=BLOCK, code=ACTIVATION)

_rectifier = Passing(scale=NONNEGATIVE, shift=BLOCK, centre=BLOCK, code=ACTIVATION)

_max_pool = {
    n: Passing(scale=NONNEGATIVE, centre=BLOCK, axes=last(n), code="pooling") for n in (1, 2, 3)
}

_average = {n: Passing(axes=last(n), check=check_average) for n in (1, 2, 3)}

RULES: dict[str, Rule] = {
    # pointwise
    **dict.fromkeys(_NONLINEAR, _block),
    **dict.fromkeys(("relu", "leaky_relu", "abs", "prelu", "rrelu"), _rectifier),
    "neg": Passing(scale=PASS, shift=BLOCK),
    **dict.fromkeys(CASTS, Passing(check=check_cast)),
    **dict.fromkeys(
        ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"),
        Passing(check=check_dropout),
    ),
    **dict.fromkeys(("softmax", "_softmax"), Softmax()),
    # other axes only
    **{f"max_pool{n}d": _max_pool[n] for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": First(_max_pool[n]) for n in (1, 2, 3)},
    **{f"adaptive_max_pool{n}d": First(_max_pool[n]) for n in (1, 2, 3)},
    **{f"avg_pool{n}d": _average[n] for n in (1, 2, 3)},
    **{f"adaptive_avg_pool{n}d": Passing(axes=last(n)) for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d": Passing(axes=last(n)) for n in (2, 3)},
    **{f"upsample_nearest{n}d": Passing(axes=last(n)) for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d": Passing(axes=last(n)) for n in (1, 2, 3)},
    "upsample_linear1d": Passing(axes=last(1)),
    "upsample_bilinear2d": Passing(axes=last(2)),
    "_upsample_bilinear2d_aa": Passing(axes=last(2)),
    "upsample_bicubic2d": Passing(axes=last(2)),
    "_upsample_bicubic2d_aa": Passing(axes=last(2)),
    "upsample_trilinear3d": Passing(axes=last(3)),
    "flip": Passing(axes=one_axis(1, "dims")),
    "roll": Passing(axes=one_axis(2, "dims")),
    "index_select": Passing(axes=one_axis(1)),
    "cumsum": Passing(axes=one_axis(1), shift=BLOCK),
    "mean": Reducing(),
    "amax": Reducing(scale=NONNEGATIVE, centre=BLOCK),
    "amin": Reducing(scale=NONNEGATIVE, centre=BLOCK),
    "sum": Reducing(shift=BLOCK),
    # moves
    **dict.fromkeys(RESHAPES, Reshaping()),
    **dict.fromkeys(PERMUTATIONS, Permuting()),
    "pixel_shuffle": Rearranging(pixel_shuffle),
    "pixel_unshuffle": Rearranging(pixel_unshuffle),
    "channel_shuffle": Rearranging(channel_shuffle),
    "native_channel_shuffle": Rearranging(channel_shuffle),
    **dict.fromkeys(EXPANDS, Expanding()),
    **dict.fromkeys(("repeat", "tile"), Repeating()),
    "repeat_interleave": Passing(axes=one_axis(2)),
    "index": Indexing(),
    "gather": Gathering(),
    **dict.fromkeys(("slice", "select", "narrow"), Slicing()),
    "unfold": Unfolding(),
    **dict.fromkeys(_SPLITS, Splitting()),
    **dict.fromkeys(_PADS, Padding()),
    # several values
    **dict.fromkeys(("add", "sub", "rsub"), Adding()),
    **dict.fromkeys(("mul", "div", "true_divide", "multiply"), Multiplying()),
    **dict.fromkeys(("cat", "concat", "concatenate", "stack"), Concatenating()),
    "where": Alike(lambda node: list(node.args[1:3]), mask=lambda node: node.args[0]),
    "masked_fill": Alike(lambda node: [node.args[0], node.args[2]], mask=lambda node: node.args[1]),
    **dict.fromkeys(
        ("maximum", "minimum"),
        Alike(lambda node: list(node.args[:2]), scale=NONNEGATIVE, elementwise=True),
    ),
    "index_put": Written(index_put_parts, adds=lambda node: bool(argument(node, 3, "accumulate"))),
    "index_add": Written(one_axis_parts(3), adds=lambda node: True),
    "index_copy": Written(one_axis_parts(3)),
    "masked_scatter": Filling(),
    # contractions
    "linear": Linear(),
    "addmm": Linear(transposed=True),
    **dict.fromkeys((*RANKS, *TRANSPOSED_RANKS, "convolution"), Convolution()),
    **dict.fromkeys(("matmul", "bmm", "mm"), MatMul()),
    "baddbmm": MatMul(added=True),
    "einsum": Einsum(),
    "scaled_dot_product_attention": Attention(),
    "embedding": Lookup(),
    # norms
    **dict.fromkeys(("batch_norm", "instance_norm"), FixedNorm()),
    **dict.fromkeys(
        ("_native_batch_norm_legit_no_training", "native_batch_norm"), First(FixedNorm())
    ),
    "norm_call": NormCall(),
    "layer_norm": NormWithAffine(weight=2, bias=3, centres=True),
    "rms_norm": NormWithAffine(weight=2, bias=None),
    "group_norm": NormWithAffine(weight=2, bias=3, channel=True),
    # readers of no value
    **dict.fromkeys(_SHAPE_ONLY, ShapeOnly()),
}
"""The rule of each ATen op, by :func:`op_name`; an op that is not here blocks every map."""


def rule_for(node: fx.Node) -> Rule:
    """The rule of the op of ``node``.

    Raises:
        Blocked: the value leaves the model, a hook sees it, it is stale, or the op is not known.
    """
    if node.op == "output":
        raise Blocked("output", "the value is an output of the model")
    if node.target is hook_read:
        raise Blocked("hook", f"a hook on {node.args[1]!r} sees the value")
    if node.target is stale_read:
        raise Blocked("stale-alias", "the value is read after a write to another view of it")
    rule = RULES.get(op_name(node))
    known = isinstance(node.target, torch._ops.OpOverload) or node.target is norm_call
    if rule is None or not known:
        raise Blocked("op", f"nothing is known of the op {op_name(node)}")
    return rule


def lends_shape(value: fx.Node, node: fx.Node) -> bool:
    """Whether ``node`` reads the shape (or dtype) of ``value`` and none of its numbers."""
    rule = RULES.get(op_name(node))
    if isinstance(rule, ShapeOnly):
        return True
    return isinstance(rule, ShapeOfSecond) and node.args[:1] != (value,)
