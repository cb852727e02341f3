"""Swap norms for other norms, their trained parameters carried over.

A norm computes ``g * n(x) + b`` with its normaliser ``n``. The new norm gets the *effective* scale
``g`` (``weight``, or ``1 + weight`` where the class stores an offset, added in float64) and ``b``
in its own convention, so the swap is exact if and only if both normalisers are the same function:
the same norm in another class, BatchNorm in eval mode and its frozen form, GroupNorm with one
group a channel and InstanceNorm. That is measured at each site in float64 on random inputs;
what differs is called approximate, with the relative difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.copying import copy_model
from normswap.equivalence import (
    EXACT,
    ROLES,
    NewNorm,
    Refused,
    difference,
    require_running,
    require_same_dtype,
    require_same_layout,
    scale_factor,
    tensors_of,
    why_not_equivalent,
)
from normswap.errors import NormswapError
from normswap.find import NormSite, Where, find_modules, matcher
from normswap.forms import stored_tensors
from normswap.plan import MappingRow, ModuleEdit, Plan, SiteOutcome, fingerprint
from normswap.probe import configuration, probe
from normswap.program import Program, Ref
from normswap.rewrites.to_rmsnorm import Conversion
from normswap.spec import NormSpec
from normswap.targets import (
    Construction,
    Key,
    UnknownWidthError,
    Value,
    construct,
    matches,
    with_width,
)

CallShape = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of what a norm got in a recorded run."""

METHODS = ("auto", "exact", "copy", "init")
COUNTER = "num_batches_tracked"


def plan_swap_norms(
    model: nn.Module,
    mapping: Mapping[Key, Value],
    *,
    where: Where = None,
    method: str = "auto",
    calls: Mapping[str, CallShape] | None = None,
    functional: Iterable[NormSite] = (),
    bypassed: Collection[str] = (),
    conversion: Conversion | None = None,
) -> Plan:
    """Decide for every norm that a key of ``mapping`` stands for what it becomes.

    Args:
        model: the model; it is not changed and may be on the meta device.
        mapping: keys and values as in :mod:`normswap.targets`; the first key that fits counts.
        where: which norms (a glob, several, or a predicate on a ``NormSite``).
        method: ``"auto"`` and ``"copy"`` carry the parameters over, ``"exact"`` refuses what is
            not the same function, ``"init"`` leaves the new norms as they are built.
        calls: shape and dtype of the input of each norm in a recorded run, by name.
        functional: norms of that run that are no modules; they are answered, not swapped.
        bypassed: names of norms whose tensors that run read without calling them.
        conversion: layer norms whose inputs were made zero-mean, by other edits.

    Raises:
        NormswapError: a key or method that is not known.
    """
    if method == "calibrate":
        raise NormswapError('method="calibrate" is not available yet: use "copy" and fine-tune')
    if method not in METHODS:
        raise NormswapError(f"method {method!r} is none of {', '.join(METHODS)}")
    swapping = _Swapping(
        model, mapping, where, method, calls or {}, functional, bypassed, conversion
    )
    return swapping.plan()


class _Swapping:
    def __init__(
        self,
        model: nn.Module,
        mapping: Mapping[Key, Value],
        where: Where,
        method: str,
        calls: Mapping[str, CallShape],
        functional: Iterable[NormSite],
        bypassed: Collection[str],
        conversion: Conversion | None,
    ) -> None:
        self.conversion = conversion
        self.bypassed = bypassed
        self.functional = functional
        self.calls = calls
        self.model, self.mapping, self.method = model, mapping, method
        self.chosen = matcher(where)
        self.stored = stored_tensors(model)
        self.by_name = {n: t for t in self.stored.values() for n in t.names}
        self.fitting: set[object] = set()
        self.measured: dict[object, float | None] = {}
        self.assignments: list[tuple[str, Ref, list[int]]] = []
        self.result = Plan("swap_norms", fingerprint(model))
        self.program = Program(lambda _: None, lambda name: self.by_name[name].shape)
        if conversion is not None:
            self.program = conversion.surgery.program

    def plan(self) -> Plan:
        for site in find_modules(self.model):
            key = next((k for k in self.mapping if matches(k, site)), None)
            if key is None and site.spec is not None:
                continue
            try:
                if key is None or site.spec is None:
                    raise Refused("unknown", site.reason or "what it computes is not known")
                if not self.chosen(site):
                    raise Refused("where", "not selected by where=")
                if site.name in self.bypassed:
                    raise Refused(
                        "bypassed",
                        "its tensors are read without calling it (a fused forward), so a new norm "
                        "would not be computed",
                    )
                try:
                    self._swap(site, self.mapping[key])
                except UnknownWidthError as error:
                    raise Refused("unknown", str(error)) from error
            except Refused as refused:
                self._answer(site, "kept", "refused", refused.code, str(refused))
        for site in self.functional:
            if any(matches(key, site) for key in self.mapping):
                detail = "it is a call without a module: make it one, then swap"
                self._answer(site, "kept", "refused", "functional", detail)
        # All values are read before the first is assigned: norms may share their tensors.
        for target, ref, shape in self.assignments:
            self.program.assign(target, "reshape", ref, shape=shape)
        if self.conversion is None:
            self.result.edits = self.program.edits()
        else:
            self.conversion.finish(self.result)
        return self.result

    def _swap(self, site: NormSite, value: Value) -> None:
        assert site.module is not None
        assert site.spec is not None
        shape, dtype = self.calls.get(site.name, (None, None))
        site = with_width(site, shape)
        converted = self.conversion.done.get(site.name) if self.conversion else None
        zeroed = None
        if converted is not None and converted.without_shift:
            assert site.spec is not None
            zeroed = site.spec.bias
            site = replace(site, spec=replace(site.spec, bias=None))
        new = _new_norm(site, value, shape)
        self._require_fit(site, new, shape, dtype)
        centred = converted is not None
        error = None
        if self.method != "init":
            error = self._difference(site, new, centred=centred, zeroed=zeroed)
        exact = error is not None and error <= EXACT
        blocked = self.conversion.refused.get(site.name) if self.conversion else None
        if self.method == "exact" and not exact:
            if blocked is not None:
                raise Refused(blocked.code, blocked.detail)
            raise Refused("not-equivalent", why_not_equivalent(site, new, error))
        if site.module is not None and _has_hooks(site.module):
            self.result.notes.append(f"the hooks of {site.name!r} were moved to the new norm")
        self._carry(site, new, exact=exact)
        action = f"swapped for {type(new.module).__name__}"
        if new.construction is not None and new.construction.note:
            action += f" ({new.construction.note})"
        if converted is not None:
            action += converted.words
        status = "initialised" if self.method == "init" else "exact" if exact else "approximate"
        detail = f"not exact: {blocked.detail}" if blocked is not None and not exact else ""
        self._answer(site, action, status, None, detail, error)

    def _require_fit(
        self,
        site: NormSite,
        new: NewNorm,
        shape: tuple[int, ...] | None,
        dtype: torch.dtype | None,
    ) -> None:
        """Raise unless the new norm can stand where the old one does; tried once for all alike."""
        key = (_alike(site, new), shape, dtype)
        if key[0] is None or key not in self.fitting:
            require_same_layout(site, new, shape)
            require_running(site, new, shape)
            if dtype is not None:
                require_same_dtype(site, new, dtype)
            self.fitting.add(key)

    def _difference(
        self, site: NormSite, new: NewNorm, *, centred: bool, zeroed: str | None
    ) -> float | None:
        """As measured, once for all sites of one class and configuration."""
        shape = self.calls.get(site.name, (None, None))[0]
        key = (_alike(site, new), shape, centred, zeroed)
        if key[0] is not None and key in self.measured:
            return self.measured[key]
        self.measured[key] = difference(site, new, shape, centred=centred, zeroed=zeroed)
        return self.measured[key]

    def _carry(self, site: NormSite, new: NewNorm, *, exact: bool) -> None:
        """The edits that fill the new norm, and the one that puts it in place."""
        prefix = f"{site.name}." if site.name else ""
        roles = self._roles(site, new)
        status = "exact" if exact else "approximate"
        origins: dict[str, str] = {}
        for target, source in roles.items():
            op = self._assign(site, new, prefix, target, source)
            origins[target] = f"{self.by_name[prefix + source].name} {op}"
            row = MappingRow(prefix + target, (prefix + source,), op.split()[0], status)
            self.result.mapping.append(row)
        for name, tensor in tensors_of(new.module):
            if name not in roles:
                self._fill_fresh(new, prefix, name, tensor)
        self._names(site, new)
        params: dict[str, Any] = {"names": list(site.names), "parameters": roles}
        if self.conversion is not None and self.conversion.is_folded(site.name):
            params["folded"] = True
        params["origins"] = origins  # new name → old tensor and what was done to it
        if new.construction is not None:
            params["class"] = new.construction.class_name
            params["kwargs"] = dict(new.construction.kwargs)
        if new.builder is not None:
            self.result.builders[site.name] = new.builder
        self.result.module_edits.append(ModuleEdit("replace", site.name, params))

    def _roles(self, site: NormSite, new: NewNorm) -> dict[str, str]:
        """New tensor name → old tensor name, for what is carried over."""
        if self.method == "init" or new.spec is None:
            return {}
        assert site.spec is not None
        pairs: dict[str, str] = {}
        for role in ROLES:
            target, source = getattr(new.spec, role), getattr(site.spec, role)
            if target is not None and source is not None and _fits(site, new, target, source):
                pairs[target] = source
        counters = [getattr(m, COUNTER, None) for m in (site.module, new.module)]
        if None not in counters:
            pairs[COUNTER] = COUNTER
        return pairs

    def _fill_fresh(self, new: NewNorm, prefix: str, name: str, tensor: Tensor) -> None:
        """A tensor that the old norm lacks: neutral for a scale or shift, else as it is built."""
        self.result.mapping.append(MappingRow(prefix + name, (), "new", "initialised"))
        value = None if self.method == "init" else _neutral(new.spec, name)
        flat = tensor.detach().flatten()
        if value is None and flat.numel() and bool((flat == flat[0]).all()):
            value = float(flat[0])
        if value is not None:
            shape = list(tensor.shape)
            ref = self.program.emit("constant", value=value, shape=shape)
            self.assignments.append((prefix + name, ref, shape))

    def _assign(self, site: NormSite, new: NewNorm, prefix: str, target: str, source: str) -> str:
        """Note what a new tensor is computed from; the operation in words."""
        assert site.spec is not None
        assert new.spec is not None
        ref = self.program.current(self.by_name[prefix + source].name)
        shape = list(getattr(new.module, target).shape)
        op = "copy"
        if source == site.spec.weight:
            offset = float(site.spec.unit_offset) - float(new.spec.unit_offset)
            factor = scale_factor(site, new)
            if offset:
                ref, op = self.program.emit("plus", ref, number=offset), f"offset {offset:+g}"
            if factor != 1.0:
                ref, op = self.program.emit("times", ref, factor=factor), f"scale {factor:g}"
        if math.prod(self.by_name[prefix + source].shape) == 1 < math.prod(shape):
            ref = self.program.emit("reshape", ref, shape=[1] * len(shape))
            ref = self.program.emit("expand", ref, shape=shape)
        self.assignments.append(
            (prefix + target, self.program.emit("reshape", ref, shape=shape), shape)
        )
        return op

    def _names(self, site: NormSite, new: NewNorm) -> None:
        """The state-dict names that go and come."""
        old = {n for n, _ in tensors_of(site.module)}
        fresh = dict(tensors_of(new.module))
        for path in site.names:
            prefix = f"{path}." if path else ""
            self.result.removed += [prefix + n for n in sorted(old - set(fresh))]
            for name in sorted(set(fresh) - old):
                like = next(iter(sorted(old)), name)
                shape = list(fresh[name].shape)
                self.result.created[prefix + name] = {"shape": shape, "like": prefix + like}

    def _answer(
        self,
        site: NormSite,
        action: str,
        status: str,
        reason: str | None,
        detail: str,
        error: float | None = None,
    ) -> None:
        kind = "unknown" if site.spec is None else site.spec.kind
        self.result.sites.append(
            SiteOutcome(site.name, kind, action, status, reason, detail, error, site.names)
        )


def _new_norm(site: NormSite, value: Value, shape: tuple[int, ...] | None) -> NewNorm:
    construction: Construction | None = None
    builder: Callable[..., nn.Module] | None = None
    if isinstance(value, (type, str)):
        construction = construct(value, site, shape)
        if isinstance(value, type) and not construction.is_public:
            kwargs, cls = construction.kwargs, value
            builder = lambda: cls(**kwargs)  # noqa: E731
        module = _on_cpu(builder or construction.build)
    elif callable(value):
        module = value(site)
        # One module, built once: what is measured is what is put in place.
        builder = lambda: copy_model(module)  # noqa: E731
        if not isinstance(module, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise NormswapError(
                f"the value for {site.name!r} gave {type(module).__name__}, not an nn.Module"
            )
    else:
        raise NormswapError(
            f"a value of the mapping is a class, a name or a callable NormSite -> nn.Module, not "
            f"{value!r}"
        )
    found = probe(module)
    return NewNorm(construction, builder, module, found if isinstance(found, NormSpec) else None)


def becoming_rms(
    model: nn.Module,
    mapping: Mapping[Key, Value],
    calls: Mapping[str, CallShape],
    *,
    fold_affine: bool = False,
) -> set[str]:
    """The layer norms for which the mapping makes an RMS norm that could stand there.

    That is a module that runs on what the layer norm gets, returns the same dtype, and computes
    the same on inputs without a mean; with ``fold_affine`` it need not have a shift. A callable of
    a mapping is not called for it.
    """
    found: set[str] = set()
    known: dict[object, bool] = {}
    for site in find_modules(model):
        if site.spec is None or site.spec.kind != "layer":
            continue
        value = next((v for k, v in mapping.items() if matches(k, site)), None)
        if not isinstance(value, (type, str)):
            continue
        call = calls.get(site.name, (None, None))
        key = configuration(site.module) if site.module is not None else None
        asked = (key, value, call)
        if key is None or asked not in known:
            known[asked] = _equals_rms(site, value, *call, fold_affine=fold_affine)
        if known[asked]:
            found.add(site.name)
    return found


def _equals_rms(
    site: NormSite,
    value: Value,
    shape: tuple[int, ...] | None,
    dtype: torch.dtype | None,
    *,
    fold_affine: bool,
) -> bool:
    """Whether the value makes an RMS norm that equals a layer norm on inputs without a mean."""
    try:
        site = with_width(site, shape)
        new = _new_norm(site, value, shape)
        if new.spec is None or new.spec.kind != "rms":
            return False
        require_same_layout(site, new, shape)
        require_running(site, new, shape)
        if dtype is not None:
            require_same_dtype(site, new, dtype)
    except NormswapError:
        return False
    assert site.spec is not None
    zeroed = site.spec.bias if fold_affine and new.spec.bias is None else None
    error = difference(site, new, shape, centred=True, zeroed=zeroed)
    return error is not None and error <= EXACT


def _alike(site: NormSite, new: NewNorm) -> object | None:
    """Equal for sites that behave alike and get the same norm; ``None`` if that is not known."""
    assert site.module is not None
    known = configuration(site.module)
    if new.construction is None or known is None:
        return None
    made = (new.construction.class_name, repr(sorted(new.construction.kwargs.items())))
    return known, made, site.module.training


def _on_cpu(build: Callable[..., nn.Module]) -> nn.Module:
    with torch.device("cpu"):
        return build()


def _neutral(spec: NormSpec | None, name: str) -> float | None:
    """The value of a scale or shift that changes nothing; ``None`` for other tensors."""
    if spec is None:
        return None
    return {spec.weight: 1.0 - float(spec.unit_offset), spec.bias: 0.0}.get(name)


def _fits(site: NormSite, new: NewNorm, target: str, source: str) -> bool:
    """Whether an old tensor can fill a new one: as many elements, or one for all."""
    assert site.module is not None
    count = getattr(site.module, source).numel()
    return count in (1, getattr(new.module, target).numel())


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
