"""What a norm is swapped for: which sites a key stands for, and the module to build at a site.

A key or value is a class of ``torch.nn`` or ``normswap.norms``, or a name (``"layer"`` or
``"layernorm"``). As a key it stands for every norm that behaves so, whatever its class; as a value
what it needs (width, groups, eps) is derived from the site. Any other class stands for itself.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from normswap.errors import NormswapError
from normswap.find import NormSite
from normswap.spec import NormSpec

_RANKED = {
    "batch": {1: "torch.nn.BatchNorm1d", 2: "torch.nn.BatchNorm2d", 3: "torch.nn.BatchNorm3d"},
    "instance": {
        1: "torch.nn.InstanceNorm1d",
        2: "torch.nn.InstanceNorm2d",
        3: "torch.nn.InstanceNorm3d",
    },
}
# The class that a kind is built as; kinds of PyTorch that come in ranks are in _RANKED.
_CLASSES = {
    "layer": "torch.nn.LayerNorm",
    "rms": "normswap.norms.RMSNorm",
    "group": "torch.nn.GroupNorm",
    "frozen_batch": "normswap.norms.FrozenBatchNorm",
    "scale": "normswap.norms.ScaleNorm",
    "dyt": "normswap.norms.DyT",
    "derf": "normswap.norms.Derf",
    "lp": "normswap.norms.LpNorm",
}
# Classes of PyTorch that stand for a kind, with their rank where they have one.
_KINDS: dict[type[nn.Module], tuple[str, int | None]] = {
    nn.LayerNorm: ("layer", None),
    nn.RMSNorm: ("rms", None),
    nn.GroupNorm: ("group", None),
    nn.BatchNorm1d: ("batch", 1),
    nn.BatchNorm2d: ("batch", 2),
    nn.BatchNorm3d: ("batch", 3),
    nn.SyncBatchNorm: ("batch", None),
    nn.InstanceNorm1d: ("instance", 1),
    nn.InstanceNorm2d: ("instance", 2),
    nn.InstanceNorm3d: ("instance", 3),
}
DEFAULT_GROUPS = 32


class UnknownWidthError(NormswapError):
    """A norm without parameters does not say how wide it is."""


Key = type[nn.Module] | str
Value = type[nn.Module] | str | Callable[[NormSite], nn.Module]


@dataclass(frozen=True)
class Construction:
    """A module as data: ``class_name`` (dotted) called with ``kwargs``."""

    class_name: str
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    note: str = ""

    @property
    def is_public(self) -> bool:
        """Whether it is a class of PyTorch or ours, which a plan may build."""
        return self.class_name.rpartition(".")[0] in ("torch.nn", "normswap.norms")

    def build(self, **options: Any) -> nn.Module:
        """The module, with ``device`` and ``dtype`` in ``options``.

        Raises:
            NormswapError: the class is not one of ``torch.nn`` or ``normswap.norms``.
        """
        if not self.is_public:
            raise NormswapError(
                f"{self.class_name} is built by code of yours, which a plan does not run: make "
                "the swap again with the class at hand"
            )
        return self._class()(**self.kwargs, **options)

    def options(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """``device`` and ``dtype``, as far as the class takes them."""
        taken = inspect.signature(self._class()).parameters
        return {k: v for k, v in (("device", device), ("dtype", dtype)) if k in taken}

    def _class(self) -> Any:
        home, _, name = self.class_name.rpartition(".")
        return getattr(importlib.import_module(home), name)


def kind_of(key: Key) -> tuple[str, int | None] | None:
    """The kind (and rank) that a key stands for, or ``None`` for a class that stands for itself.

    Raises:
        NormswapError: a name that is no kind of norm.
    """
    if isinstance(key, str):
        name = key.lower().replace("_", "").removesuffix("norm")
        kinds = {kind.replace("_", ""): kind for kind in (*_CLASSES, *_RANKED)}
        if name not in kinds:
            raise NormswapError(f"{key!r} is no kind of norm: use one of {', '.join(kinds)}")
        return kinds[name], None
    if key in _KINDS:
        return _KINDS[key]
    for kind, path in _CLASSES.items():
        if path == f"normswap.norms.{key.__name__}" and key.__module__.startswith("normswap."):
            return kind, None
    return None


def matches(key: Key, site: NormSite) -> bool:
    """Whether a key of a mapping stands for a site."""
    meant = kind_of(key)
    if meant is None:
        return isinstance(key, type) and type(site.module) is key
    kind, rank = meant
    if site.spec is None or site.spec.kind != kind:
        return False
    return rank is None or rank == _rank(site)


def _rank(site: NormSite) -> int:
    """How many spatial axes a norm over channels has."""
    assert site.spec is not None
    digits = [c for c in type(site.module).__name__ if c in "123"]
    known = digits[-1:] if type(site.module).__name__.lower().endswith("d") else []
    if known:
        return int(known[0])
    return max(1, len([axis for axis in site.spec.axes if axis >= 2]))


def width_of(site: NormSite) -> int:
    """How many channels a norm has: the size of its parameters, or what its attributes say.

    Raises:
        UnknownWidthError: neither tells.
    """
    module, spec = site.module, site.spec
    assert module is not None
    assert spec is not None
    if spec.normalized_shape is not None:
        return math.prod(spec.normalized_shape)
    for name in ("num_features", "num_channels", "dim", "hidden_size"):
        value = getattr(module, name, None)
        if isinstance(value, int):
            return value
    raise UnknownWidthError(
        f"{site.name!r} ({type(module).__name__}) does not say how wide it is: pass example "
        "inputs, or a callable NormSite -> nn.Module as the value"
    )


def with_width(site: NormSite, shape: tuple[int, ...] | None) -> NormSite:
    """The site with the width of its input in a recorded run, where it takes any."""
    spec = site.spec
    if shape is None or spec is None or spec.normalized_shape is not None or len(shape) < 2:
        return site
    axes = [a for a in (spec.affine_axes or spec.axes) if a < 0] or [1]
    width = tuple(shape[axis] for axis in axes)
    return replace(site, spec=replace(spec, normalized_shape=width))


def construct(value: Key, site: NormSite, shape: tuple[int, ...] | None = None) -> Construction:
    """The module that a value of a mapping becomes at a site.

    ``shape`` is that of the site's input in a recorded run, where there was one.

    Raises:
        NormswapError: the site does not say what the module needs.
    """
    meant = kind_of(value)
    if meant is None:
        assert isinstance(value, type)
        return _own_class(value, site)
    kind, rank = meant
    if rank is None and shape is not None:
        rank = max(1, len(shape) - 2)
    ours = isinstance(value, type) and value.__module__.startswith("normswap.")
    return _BUILDERS.get(kind, _plain)(_Wish(site, kind, rank, ours))


@dataclass(frozen=True)
class _Wish:
    """A kind of norm at a site; ``ours``: as the class of normswap.norms, by the user's word."""

    site: NormSite
    kind: str
    rank: int | None
    ours: bool


def _shape(site: NormSite) -> int | list[int]:
    assert site.spec is not None
    shape = site.spec.normalized_shape
    return list(shape) if shape is not None and len(shape) > 1 else width_of(site)


def _plain(wish: _Wish) -> Construction:
    site = wish.site
    return Construction(_CLASSES[wish.kind], {_first_argument(_CLASSES[wish.kind]): width_of(site)})


def _first_argument(path: str) -> str:
    home, _, name = path.rpartition(".")
    return next(iter(inspect.signature(getattr(importlib.import_module(home), name)).parameters))


def on_channels(spec: NormSpec) -> bool:
    """Whether a norm works on axis 1 (``[N, C, …]``) rather than on the last axes."""
    return any(axis >= 0 for axis in (*spec.affine_axes, *spec.axes))


def _eps(site: NormSite) -> float | None:
    """``None`` where it is the machine epsilon of the dtype."""
    assert site.spec is not None
    return None if site.spec.machine_eps else site.spec.eps


def _layer(wish: _Wish) -> Construction:
    """``nn.LayerNorm`` over the last axes; a norm over channels stays one over channels."""
    site = wish.site
    assert site.spec is not None
    affine, bias = _affine(site)
    if on_channels(site.spec):
        channels = {"num_channels": width_of(site), "eps": site.spec.eps}
        return Construction(
            "normswap.norms.ChannelLayerNorm",
            {**channels, "elementwise_affine": affine, "bias": bias},
            "over the channels at each position",
        )
    kwargs = {"normalized_shape": _shape(site), "eps": site.spec.eps}
    return Construction(
        "torch.nn.LayerNorm", {**kwargs, "elementwise_affine": affine, "bias": bias}
    )


def _rms(wish: _Wish) -> Construction:
    """``nn.RMSNorm`` over the last axes; ours where there is a bias to keep, or over channels."""
    site = wish.site
    assert site.spec is not None
    affine, bias = _affine(site)
    if on_channels(site.spec):
        channels = {"num_channels": width_of(site), "eps": site.spec.eps}
        return Construction(
            "normswap.norms.ChannelRMSNorm",
            {**channels, "elementwise_affine": affine, "bias": bias},
            "over the channels at each position",
        )
    kwargs: dict[str, Any] = {"normalized_shape": _shape(site), "eps": _eps(site)}
    kwargs["elementwise_affine"] = affine
    if not (bias or wish.ours):
        return Construction("torch.nn.RMSNorm", kwargs)
    return Construction("normswap.norms.RMSNorm", {**kwargs, "bias": bias})


def _ranked(wish: _Wish) -> Construction:
    site = wish.site
    assert site.spec is not None
    affine, _ = _affine(site)
    path = _RANKED[wish.kind][wish.rank or _rank(site)]
    kwargs = {"num_features": width_of(site), "eps": site.spec.eps, "affine": affine}
    if site.spec.kind == wish.kind == "batch":
        for name in ("momentum", "track_running_stats"):
            if hasattr(site.module, name):
                kwargs[name] = getattr(site.module, name)
    return Construction(path, kwargs)


def _group(wish: _Wish) -> Construction:
    """The number of groups nearest to 32 that divides the channels, two or more in each."""
    site = wish.site
    assert site.spec is not None
    channels = width_of(site)
    divisors = [d for d in range(1, channels + 1) if channels % d == 0]
    # One channel a group is an InstanceNorm, which is zero on values of one position.
    several = [d for d in divisors if channels // d > 1] or divisors
    groups = min(several, key=lambda d: (abs(d - DEFAULT_GROUPS), -d))
    if site.spec.kind == "instance":  # one group a channel is the same norm
        groups = channels
    note = (
        f"{groups} groups"
        if groups == DEFAULT_GROUPS
        else (f"{groups} groups, the divisor of {channels} channels nearest to {DEFAULT_GROUPS}")
    )
    affine, _ = _affine(site)
    kwargs = {"num_groups": groups, "num_channels": channels, "eps": site.spec.eps}
    return Construction("torch.nn.GroupNorm", {**kwargs, "affine": affine}, note)


def _frozen(wish: _Wish) -> Construction:
    site = wish.site
    assert site.spec is not None
    path = _CLASSES[wish.kind]
    return Construction(path, {_first_argument(path): width_of(site), "eps": site.spec.eps})


def _affine(site: NormSite) -> tuple[bool, bool]:
    """Whether the site has a scale or a shift, and whether it has a shift."""
    assert site.spec is not None
    return site.spec.weight is not None or site.spec.bias is not None, site.spec.bias is not None


_BUILDERS: dict[str, Callable[[_Wish], Construction]] = {
    "layer": _layer,
    "rms": _rms,
    "batch": _ranked,
    "instance": _ranked,
    "group": _group,
    "frozen_batch": _frozen,
}


def _own_class(cls: type[nn.Module], site: NormSite) -> Construction:
    """A class of the user's or of a package: its arguments are filled by their names."""
    assert site.spec is not None
    given: dict[str, Any] = {}
    parameters = inspect.signature(cls).parameters
    for position, (name, parameter) in enumerate(parameters.items()):
        if "eps" in name:
            given[name] = _eps(site) if parameter.default is None else site.spec.eps
        elif position == 0:
            given[name] = _shape(site)
        elif name in ("bias", "use_bias"):
            given[name] = site.spec.bias is not None
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise NormswapError(
                f"{cls.__name__} takes {name!r}, which {site.name!r} does not tell: give a "
                "callable NormSite -> nn.Module as the value"
            )
    return Construction(_public_name(cls), given)


def _public_name(cls: type[nn.Module]) -> str:
    """The dotted name that a plan can be built from, if the class is PyTorch's or ours."""
    for home in ("torch.nn", "normswap.norms"):
        public = cls.__module__.startswith(home + ".")
        if public and getattr(importlib.import_module(home), cls.__name__, None) is cls:
            return f"{home}.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
