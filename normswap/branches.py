"""What ops of a branch are: those that hand a value on, weights, attention, mixing of positions."""

from __future__ import annotations

from collections.abc import Collection

from torch import fx

from normswap.dataflow import CASTS, PERMUTATIONS, RESHAPES, is_stored, op_name, permutation
from normswap.forms import StoredTensor

# What hands a stream on: the same positions, rearranged, masked or cut out.
MOVES = CASTS | PERMUTATIONS | RESHAPES | {
    "dropout", "feature_dropout", "roll", "slice", "select", "narrow", "index_put", "masked_fill",
    "where", "clamp", "clone", "copy", "constant_pad_nd", "pad", "expand", "index_select", "flip",
}  # fmt: skip
CONTRACTIONS = {
    "linear", "addmm", "mm", "bmm", "baddbmm", "matmul", "einsum", "conv1d", "conv2d", "conv3d",
    "convolution", "conv_transpose1d", "conv_transpose2d", "embedding",
}  # fmt: skip
MIXERS = {"fft_fftn", "fft_fft2", "fft_fft", "_fft_c2c", "_fft_r2c", "avg_pool2d", "avg_pool1d"}
ATTENTION = {"scaled_dot_product_attention", "_native_multi_head_attention"}
_ALONG_TOKENS = MIXERS | {"conv1d", "conv2d", "conv3d", "convolution", "cumsum", "lstm", "gru"}
_ON_SCORES = {"add", "sub", "mul", "div", "linear", "tanh", "maximum", "max"}


def is_data(value: object) -> bool:
    """Whether a value depends on an input of the model."""
    return isinstance(value, fx.Node) and bool(value.meta.get("from_input"))


def is_weight(node: fx.Node) -> bool:
    """Whether a value is a stored tensor, a view, cast or selection of one, or made of such."""
    while node.op == "call_function" and node.args and isinstance(node.args[0], fx.Node):
        if op_name(node) not in MOVES | {"index", "stack", "getitem"}:
            return is_made_of_weights(node)
        node = node.args[0]
    return is_stored(node) and len(node.meta["shape"]) >= 2


def is_made_of_weights(node: fx.Node) -> bool:
    """Whether a value is computed from stored matrices alone, as under weight norm."""
    queue = [node]
    while queue:
        value = queue.pop()
        if is_data(value):
            continue
        if is_stored(value) and len(value.meta["shape"]) >= 2:
            return not is_data(node)
        queue += value.all_input_nodes
    return False


def are_scores(node: fx.Node) -> bool:
    """Whether a value goes into a softmax: attention scores, with a bias perhaps."""
    queue = [node]
    while queue:
        for user in queue.pop().users:
            if op_name(user) in ("softmax", "_softmax"):
                return True
            if op_name(user) in MOVES | {"add"} and user.meta.get("shape") == node.meta["shape"]:
                queue.append(user)
    return False


def ancestors(node: fx.Node, inside: Collection[fx.Node]) -> set[fx.Node]:
    """What a value is computed from within ``inside``, itself included."""
    found, queue = {node} & set(inside), [node]
    while queue:
        for source in queue.pop().all_input_nodes:
            if source in inside and source not in found:
                found.add(source)
                queue.append(source)
    return found


def weights_of(node: fx.Node) -> list[StoredTensor]:
    """The stored matrices that an op contracts with."""
    if op_name(node) not in CONTRACTIONS - {"embedding"}:
        return []
    stored = [n for n in node.all_input_nodes if is_stored(n) and len(n.meta["shape"]) >= 2]
    return [n.meta["tensor"] for n in stored]


def attention_operands(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Of an op that weighs values by attention: what makes the weights, and the values."""
    if op_name(node) in ATTENTION:
        operands = [a for a in node.args[:3] if isinstance(a, fx.Node)]
        return operands[:2], operands[2:]
    values = attended(node)
    if values is None:
        return None
    return [o for o in node.all_input_nodes if o not in values], values


def attended(node: fx.Node) -> list[fx.Node] | None:
    """Of an op that weighs values by attention: the values; else ``None``."""
    if op_name(node) in ATTENTION:
        return [a for a in node.args[1:3] if isinstance(a, fx.Node)]
    if op_name(node) not in ("bmm", "matmul", "einsum", "baddbmm"):
        return None
    operands = node.all_input_nodes
    weights = [o for o in operands if _is_from_softmax(o)]
    return [o for o in operands if o not in weights] if weights else None


def _is_from_softmax(node: fx.Node) -> bool:
    while node.op == "call_function":
        if op_name(node) in ("softmax", "_softmax"):
            return _compares(node.args[0])
        # Talking heads: a linear layer over the heads of the weights.
        if op_name(node) not in MOVES | {"mul", "linear"} or not isinstance(node.args[0], fx.Node):
            return False
        node = node.args[0]
    return False


def _compares(scores: object) -> bool:
    """Whether values are products of activations: scores of attention, and not of a router."""
    queue = [scores]
    while queue:
        node = queue.pop()
        if not is_data(node) or not isinstance(node, fx.Node) or node.op != "call_function":
            continue
        if op_name(node) in ("bmm", "matmul", "einsum", "baddbmm"):
            operands = [o for o in node.all_input_nodes if is_data(o) and not is_weight(o)]
            if len(operands) > 1:
                return True
        elif op_name(node) in MOVES | _ON_SCORES:
            queue += node.all_input_nodes
    return False


def mixes_tokens(node: fx.Node) -> bool:
    """Whether an op takes positions together: a convolution along them, a Fourier transform."""
    name = op_name(node)
    if name == "linear":
        return _is_transposed(node.args[0])
    if name not in _ALONG_TOKENS:
        return False
    if "conv" not in name:
        return True
    weight = node.args[1]
    return isinstance(weight, fx.Node) and any(s > 1 for s in weight.meta["shape"][2:])


def _is_transposed(value: object) -> bool:
    """Whether the last axis of a value was another one before it was handed on."""
    while isinstance(value, fx.Node) and value.op == "call_function":
        name = op_name(value)
        if name in PERMUTATIONS and permutation(value)[-1] != len(value.meta["shape"]) - 1:
            return True
        if name not in CASTS | PERMUTATIONS | {"dropout"}:
            return False
        value = value.args[0]
    return False
