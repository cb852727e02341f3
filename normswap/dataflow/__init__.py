"""One table: what each op does to a map on one of its values.

Every op is described once, for every kind of map and for both directions, by a :class:`Rule`:
given a map on one endpoint of the op (its output or an operand), which maps must its other
endpoints take so that the op still computes the right thing? A rule answers with alternatives, in
order of preference, each a list of (value, map); an empty list means that the op does not care.
Where there is no alternative it raises :class:`~normswap.maps.Blocked` with the reason.

Weights and biases are operands like any other: a convolution that must scale its output asks its
weight and bias to take the scale, and that a weight is read by another call as well is the same
question as an activation with two readers.

Notation of the comments: ``x`` input, ``y`` output, ``W`` weight, ``b`` bias; axes count from 0.
"""

from normswap.dataflow.contractions import Contraction
from normswap.dataflow.norm_ops import affine_axes, batch_norm_operands, norm_axes, norm_call
from normswap.dataflow.rule import (
    CASTS,
    PERMUTATIONS,
    RESHAPES,
    Later,
    Rule,
    Side,
    Step,
    Value,
    argument,
    is_stored,
    made,
    op_name,
    permutation,
)
from normswap.dataflow.table import RULES, lends_shape, rule_for

__all__ = [
    "CASTS",
    "PERMUTATIONS",
    "RESHAPES",
    "RULES",
    "Contraction",
    "Later",
    "Rule",
    "Side",
    "Step",
    "Value",
    "affine_axes",
    "argument",
    "batch_norm_operands",
    "is_stored",
    "lends_shape",
    "made",
    "norm_axes",
    "norm_call",
    "op_name",
    "permutation",
    "rule_for",
]
