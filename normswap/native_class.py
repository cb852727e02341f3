"""Which transformers class computes what a changed model computes.

A model whose LayerNorms all became RMSNorms may be one that transformers has a class for: an OLMo
becomes a Llama. No family is known here. Every class for the same task is asked, the cheap
questions first: does its source hold the names, can its config say the same, do names and shapes
of the tensors fit, and does it compute the same.

A run does not show what only long or extreme inputs reach (a window, a clip). So a setting that
only one of the two has must be off, and a model with a window is left alone.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from normswap.architecture import is_transformers_model, quiet_transformers
from normswap.attempt import Outcome, attempt
from normswap.find import NormSite, find_modules
from normswap.inputs import Inputs, vary_inputs
from normswap.outputs import difference
from normswap.plan import Plan
from normswap.precision import true_float64

__all__ = ["native_class"]

LIMIT = 1e-10
MOST = 5  # candidates that are run
_EPS = re.compile(r"eps(ilon)?$")
_WINDOW = re.compile("window|chunk")
# Without effect in evaluation mode, or to be seen in the names of the tensors.
_HARMLESS = re.compile("drop|bias|initializer|token_id|use_cache|2label")
_T = TypeVar("_T")
_OFF = (None, False, 0, 1, "", [], {})


def native_class(plan: Plan, model: nn.Module, inputs: Inputs) -> list[str]:
    """A sentence on the transformers class that computes what ``model`` does, if there is one.

    Args:
        plan: what was done; only a swap of every LayerNorm for an RMSNorm has an answer.
        model: the changed model.
        inputs: what both are run on.
    """
    eps = _common_eps(plan, model)
    if eps is None or not is_transformers_model(model):
        return []
    try:
        with warnings.catch_warnings(), quiet_transformers(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            return _search(model, inputs, eps)
    except Exception:  # what was asked for is done; this is only something to know
        return []


def _common_eps(plan: Plan, model: nn.Module) -> float | None:
    """Eps of the RMSNorms that every LayerNorm became; none where anything else is left or new."""
    edits = {edit.kind for edit in plan.module_edits}
    exact = all(site.status == "exact" for site in plan.sites)
    if plan.rewrite != "swap_norms" or not exact or "centre" in edits or "replace" not in edits:
        return None
    new = [model.get_submodule(e.module) for e in plan.module_edits if e.kind == "replace"]
    found = {getattr(norm, "eps", None) for norm in new if "RMSNorm" in type(norm).__name__}
    left = any("LayerNorm" in type(module).__name__ for module in model.modules())
    return found.pop() if len(found) == 1 and not left else None


def _search(model: nn.Module, inputs: Inputs, eps: float) -> list[str]:
    fitting = (c for c in _candidates(model, eps) if _quietly(c.fits, model))
    runs: list[tuple[Inputs, Outcome]] = []
    for candidate in itertools.islice(fitting, MOST):
        runs = runs or _runs(model, inputs)
        native = _quietly(candidate.loaded, model)
        if native is None:
            continue
        worst = _difference(native, runs)
        if worst <= LIMIT and all(_is_rms(site) for site in find_modules(native)):
            return [candidate.sentence(worst)]
    return []


def _quietly(ask: Callable[[nn.Module], _T], model: nn.Module) -> _T | None:
    """The answer, or none: not every config that can be written down goes with the class."""
    try:
        return ask(model)
    except Exception:
        return None


def _runs(model: nn.Module, inputs: Inputs) -> list[tuple[Inputs, Outcome]]:
    """What the changed model computes, on other shapes too where it takes them."""
    given = [inputs, *itertools.islice(vary_inputs(inputs, seed=0), 1)]
    outcomes = [(each, attempt(model, each, true_float64())) for each in given]
    return [(each, outcome) for each, outcome in outcomes if not outcome.error]


def _difference(native: nn.Module, runs: Iterable[tuple[Inputs, Outcome]]) -> float:
    """The largest; infinite as soon as there is more than rounding."""
    worst = math.inf
    for number, (inputs, reference) in enumerate(runs):
        found = attempt(native, inputs, true_float64())
        error = difference(reference.outputs, found.outputs, exact_integers=True)
        if found.error or not error.compared or error.max_rel > LIMIT:
            return math.inf
        worst = max(error.max_rel, worst if number else 0.0)
    return worst


def _is_rms(site: NormSite) -> bool:
    return site.spec is not None and site.spec.kind == "rms"


# -- candidates -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """A class, and the settings that its config would be built from."""

    class_name: str
    config_class: Any
    settings: Mapping[str, Any]

    def build(self, make: Callable[[Any, Any], Any]) -> Any:
        """``make`` of the class, which is imported only if its config can be built, and that."""
        import transformers

        config = self.config_class(**deepcopy(dict(self.settings)))
        return make(getattr(transformers, self.class_name), config)

    def fits(self, model: nn.Module) -> bool:
        """Whether the names and shapes are the same.

        A bias of zeros may be missing. Norms without a scale and layers without a bias may get
        one: it starts as ones or zeros, and if not, then that shows.
        """
        state = model.state_dict()
        with torch.device("meta"):
            wanted = self.build(lambda cls, config: cls(config)).state_dict()
        modules = {name for name, _ in model.named_modules()}
        missing = [t for name, t in state.items() if name not in wanted]
        new = [n for n in wanted if n not in state]
        return (
            all(wanted[name].shape == t.shape for name, t in state.items() if name in wanted)
            and all(t.ndim == 1 and not t.any() for t in missing)
            and all(wanted[n].ndim == 1 and n.rpartition(".")[0] in modules for n in new)
        )

    def loaded(self, model: Any) -> nn.Module:
        """The class with the model's own tensors, which are not copied."""
        native = self.build(
            lambda cls, config: cls.from_pretrained(
                None,
                config=config,
                state_dict=model.state_dict(),
                dtype=model.dtype,
                attn_implementation=model.config._attn_implementation,
            )
        )
        return native.to(model.device).eval()

    def sentence(self, error: float) -> str:
        usual = _own_fields(self.config_class) | {"id2label": self.config_class().id2label}
        told = {k: v for k, v in self.settings.items() if v != usual[k]}
        values = ", ".join(f"{name}={value!r}" for name, value in told.items())
        return (
            f"{self.class_name} computes exactly this result (float64 difference {error:.1e}): "
            f"load the new model's state_dict() with strict=False into {self.class_name}"
            f"({self.config_class.__name__}({values}))"
        )


def _candidates(model: Any, eps: float) -> list[_Candidate]:
    """Classes for the same task, those with the fewest settings of their own first."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    state = model.state_dict()
    biased = any(name.endswith("bias") and t.any() for name, t in state.items())
    words = {part for name in state for part in name.split(".") if not part.isdigit()}
    words -= {"weight", "bias", model.base_model_prefix}
    mine = {name: getattr(model.config, name) for name in _own_fields(type(model.config))}
    on = {name for name, value in mine.items() if _is_on(name, value)}
    if any(_WINDOW.search(name) for name in on):
        return []
    read = _source_text(model.config.model_type)
    used = {name for name in on if name in read}
    found: list[tuple[tuple[int, int], _Candidate]] = []
    for model_type, name in _same_task(type(model).__name__):
        text = _source_text(model_type)
        if "RMSNorm" not in text or not all(word in text for word in words | used):
            continue
        config_class = CONFIG_MAPPING[model_type]
        known = _own_fields(config_class)
        if config_class.sub_configs or used - known.keys():
            continue
        settings, rank = _settings(model.config, known, eps)
        if biased:
            settings |= {k: True for k, v in known.items() if "bias" in k and v is False}
        found.append((rank, _Candidate(name, config_class, settings)))
    return [candidate for _, candidate in sorted(found, key=lambda item: item[0])]


def _same_task(class_name: str) -> list[tuple[str, str]]:
    """Model types and classes in the auto mappings that hold this class too."""
    from transformers.models.auto import modeling_auto

    found: dict[tuple[str, str], None] = {}
    for name, mapping in vars(modeling_auto).items():
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            entries = {k: v if isinstance(v, str) else v[0] for k, v in mapping.items()}
            if class_name in entries.values():
                found |= dict.fromkeys(entries.items())
    return [entry for entry in found if entry[1] != class_name]


@cache
def _source_text(model_type: str) -> str:
    """The modelling code of a type, read and not imported: there are hundreds."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    files = sorted(folder.glob("modeling_*.py"))
    return "".join(file.read_text(encoding="utf-8") for file in files)


def _settings(
    source: Any, known: Mapping[str, Any], eps: float
) -> tuple[dict[str, Any], tuple[int, int]]:
    """What a config is built from; how many settings had to be turned off, and are only its."""
    settings: dict[str, Any] = {}
    off = own = 0
    for name, default in known.items():
        if _EPS.search(name):
            settings[name] = eps
        elif hasattr(source, name):
            settings[name] = getattr(source, name)
        else:
            own += 1
            if _is_on(name, default):
                off += 1
                settings[name] = False if default is True else None
    return settings, (off, own)


def _own_fields(config_class: Any) -> dict[str, Any]:
    """The settings of a config and their defaults; of those of every config, the labels."""
    from transformers import PreTrainedConfig

    general = {field.name for field in fields(PreTrainedConfig)} - {"id2label"}
    return {f.name: f.default for f in fields(config_class) if f.name not in general}


def _is_on(name: str, value: Any) -> bool:
    """Whether a setting of this name does anything that the tensors' names do not show."""
    if _EPS.search(name) or _HARMLESS.search(name):
        return False
    return value is True or value not in _OFF
