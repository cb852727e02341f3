"""Which flag or which other class is a model's pre- or post-norm form.

The one place that knows families. A target's weights are not filled in here, and whether its
norms really stand where they should is read off its graph afterwards.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from typing import Any

import torch
from torch import nn

from normswap.copying import copy_model

_TorchLayer = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_TorchStack = (nn.TransformerEncoder, nn.TransformerDecoder)

# Settings of a transformers config that are true for pre-norm; with what else pre-norm needs.
_FLAGS: dict[str, dict[str, Any]] = {
    "do_stable_layer_norm": {},  # wav2vec 2.0, HuBERT, WavLM, UniSpeech, UniSpeech-SAT
    "do_layer_norm_before": {"_remove_final_layer_norm": False},  # OPT
    "pre_norm": {},  # X-MOD, FlauBERT
}


@dataclass
class Target:
    """The model that a placement is carried out in, before it has its weights.

    Attributes:
        model: the model.
        copied: it is a copy of the source, so what has no new value is in place.
        new_rows: for a tensor, by the end of its name: how many rows stand in front of the old.
        notes: what differs beside the norms.
    """

    model: nn.Module
    copied: bool = False
    new_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    notes: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class _Counterpart:
    """Another class with the norms elsewhere: ``adapt`` changes the config, and returns notes."""

    to: str
    sources: tuple[str, ...]  # model types
    prefix: str  # of the target's classes
    adapt: Callable[[dict[str, Any]], tuple[list[str], dict[str, int]]] = lambda _: ([], {})


def native_target(model: nn.Module, to: str) -> Target | None:
    """The model of a native class or flag whose norms stand as ``to`` says; ``None``: not known."""
    if not type(model).__module__.startswith("transformers.models."):
        return _torch_layers(model, to)
    config: Any = getattr(model, "config", None)
    if getattr(config, "quantization_config", None) is not None:
        return None
    if len(set(getattr(model, "hf_device_map", None) or ())) > 1:
        return None  # spread over devices by hooks, which a new model would not have
    target = _with_flag(model, config, to) or _counterpart(model, config, to)
    if target is not None and any(getattr(m, "gradient_checkpointing", 0) for m in model.modules()):
        target.notes.append("gradient checkpointing is off in the new model: switch it on again")
    return target


# -- torch.nn -------------------------------------------------------------------------------------


def _torch_layers(model: nn.Module, to: str) -> Target | None:
    """A copy with ``norm_first`` of every torch layer as wanted, and its final norms."""
    first = to == "pre"
    new = copy_model(model)
    layers = [m for m in new.modules() if isinstance(m, _TorchLayer) and m.norm_first != first]
    if not layers or new in layers:
        return None
    for layer in layers:
        vars(layer)["norm_first"] = first
    held: set[nn.Module] = set()
    finals: list[str] = []
    for name, stack in [(n, m) for n, m in new.named_modules() if isinstance(m, _TorchStack)]:
        flipped = [layer for layer in stack.layers if layer in layers]
        if flipped:
            stack.norm = _with_final(stack.norm, flipped[-1]) if first else _without(stack.norm)
            _set_nesting(stack)
            finals.append(f"{name}.norm = {_classes(stack.norm)}".lstrip("."))
        held.update(flipped)
    if first and not held.issuperset(layers):
        return None  # nothing holds them that could hold the final norm
    note = f"a model that loads these weights has norm_first={first}, {', '.join(finals)}"
    return Target(new, copied=True, notes=[note.rstrip(", ")])


def _classes(norm: nn.Module | None) -> str:
    if type(norm) is nn.Sequential:
        return f"Sequential({', '.join(type(each).__name__ for each in norm)})"
    return "None" if norm is None else type(norm).__name__


def _with_final(norm: nn.Module | None, last: nn.Module) -> nn.Module:
    own = copy.deepcopy(last.norm3 if isinstance(last, nn.TransformerDecoderLayer) else last.norm2)
    assert isinstance(own, nn.Module)
    return own if norm is None else nn.Sequential(own, norm)


def _without(norm: nn.Module | None) -> nn.Module | None:
    """What is left of a final norm when the last layer takes it."""
    rest = list(norm)[1:] if type(norm) is nn.Sequential else []
    return nn.Sequential(*rest) if len(rest) > 1 else next(iter(rest), None)


def _set_nesting(stack: nn.Module) -> None:
    """Whether padded input becomes a nested tensor, as the constructor decides it."""
    if not isinstance(stack, nn.TransformerEncoder):
        return
    layer: Any = stack.layers[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fresh = nn.TransformerEncoder(layer, 0, enable_nested_tensor=stack.enable_nested_tensor)
    stack.use_nested_tensor = fresh.use_nested_tensor


# -- transformers ---------------------------------------------------------------------------------


def _with_flag(model: nn.Module, config: Any, to: str) -> Target | None:
    for flag, others in _FLAGS.items():
        if getattr(config, flag, to == "pre") == (to == "pre"):
            continue
        new = copy.deepcopy(config)
        for name, value in {flag: to == "pre", **others}.items():
            setattr(new, name, value)
        return Target(_build(type(model), new, model))
    return None


def _positions_from_zero(config: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    """RoBERTa's positions start behind the padding token's id, BERT's at 0."""
    first = config["pad_token_id"] + 1
    config["max_position_embeddings"] += first
    note = (
        f"positions are counted from {first}: the position table has that many new rows, of zeros, "
        "in front; padding tokens have no position of their own, so pad on the right"
    )
    return [note], {"position_embeddings.weight": first}


def _starts_from_input(_: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    note = (
        "decoder inputs that are made of labels or of input_ids start with the last token, not "
        "with decoder_start_token_id: pass decoder_input_ids; generate() starts as before"
    )
    return [note], {}


def _starts_from_config(_: dict[str, Any]) -> tuple[list[str], dict[str, int]]:
    note = (
        "decoder inputs that are made of labels or of input_ids start with "
        "decoder_start_token_id, not with the last token: pass decoder_input_ids"
    )
    return [note], {}


_ROBERTA = ("roberta", "xlm-roberta", "camembert", "data2vec-text")
_COUNTERPARTS = (
    _Counterpart("pre", ("bert", "electra"), "RobertaPreLayerNorm", _positions_from_zero),
    _Counterpart("pre", _ROBERTA, "RobertaPreLayerNorm"),
    _Counterpart("post", ("roberta-prelayernorm",), "Roberta"),
    _Counterpart("pre", ("bart",), "MBart", _starts_from_input),
    _Counterpart("pre", ("plbart",), "MBart"),
    _Counterpart("post", ("mbart",), "Bart", _starts_from_config),
    _Counterpart("pre", ("marian",), "Pegasus"),
    _Counterpart("post", ("pegasus",), "Marian"),
)
# Heads that are named otherwise there.
_HEADS = {"LMHeadModel": "ForCausalLM", "MTModel": "ForConditionalGeneration"}
_OWN = ("model_type", "architectures", "transformers_version", "tokenizer_class")


def _counterpart(model: nn.Module, config: Any, to: str) -> Target | None:
    import transformers

    row = next((r for r in _COUNTERPARTS if r.to == to and config.model_type in r.sources), None)
    if row is None or config.pad_token_id is None:
        return None
    head = type(model).__name__.removeprefix(type(config).__name__.removesuffix("Config"))
    heads = [head, _HEADS.get(head), *(h for h, known in _HEADS.items() if known == head)]
    classes = [getattr(transformers, row.prefix + h, None) for h in heads if h]
    cls: Any = next((c for c in classes if c is not None), None)
    if cls is None:
        return None
    settings: dict[str, Any] = {k: v for k, v in config.to_dict().items() if k not in _OWN}
    notes, new_rows = row.adapt(settings)
    if _is_unpooled(cls, model):
        notes.append("load it with add_pooling_layer=False: the model has no pooler")
    new = cls.config_class(**settings)
    new._attn_implementation = config._attn_implementation
    return Target(_build(cls, new, model), new_rows=new_rows, notes=notes)


def _is_unpooled(cls: Any, like: nn.Module) -> bool:
    """Whether a base model is to be built without the pooler that it has by default."""
    return "add_pooling_layer" in signature(cls).parameters and not like._modules.get("pooler")


def _build(cls: Any, config: Any, like: Any) -> nn.Module:
    """A model of ``cls`` with arbitrary weights, its tables tied where those of ``like`` are."""
    from transformers.initialization import no_init_weights

    output = like.get_output_embeddings()
    if output is not None:
        config.tie_word_embeddings = output.weight is like.get_input_embeddings().weight
    options = {"add_pooling_layer": False} if _is_unpooled(cls, like) else {}
    device = "meta" if like.device.type == "meta" else "cpu"
    with no_init_weights(), torch.device(device):
        new: Any = cls(config, **options)
    new.tie_weights()
    new.to(like.device, like.dtype).train(like.training)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.fill_(0.01)  # memory as it is may hold NaN; norms are probed by value
    if getattr(like, "generation_config", None) is not None:
        new.generation_config = copy.deepcopy(like.generation_config)
    return new
