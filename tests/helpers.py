"""What the tests share: random parameters, relative errors, questions asked of a report."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

STATUSES = {"exact", "approximate", "initialised", "refused"}
REFUSALS = {
    "output",
    "hook",
    "activation-between",
    "zero-padding",
    "other-reader",
    "axis-mismatch",
    "batch-statistics",
    "training-mode",
    "not-called",
    "no-bias",
    "shared",
    "data-dependent",
    "stale-alias",
    "negative-scale",
    "zero-scale",
    "op",
    "input",
    "quantised",
    "parametrised",
    "where",
    "value-unknown",
    "lazy",
    "norm-reader",
    "pooling",
}
BATCH_NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm,)


# Random parameters


def signed(generator: torch.Generator, size: int, sign: str = "mixed") -> Tensor:
    """Scales of size about one: all positive, or with some negative and (for mixed) zero."""
    values = 0.5 + torch.rand(size, generator=generator, dtype=torch.float64)
    if sign == "positive":
        return values
    if sign == "negative":
        values[: (size + 1) // 2] *= -1
        return values
    flips = torch.rand(size, generator=generator, dtype=torch.float64) < 0.4
    values = torch.where(flips, -values, values)
    # Small layers need one of each kind too, wherever there is room for it.
    if size > 1:
        values[0] = -values[0].abs()
    if size > 2:
        values[size // 2] = 0.0
    return values


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module holds a BatchNorm's buffers or is one of torch's own BatchNorms."""
    if isinstance(module, BATCH_NORMS):
        return True
    own = {name for name, _ in module.named_buffers(recurse=False)}
    return {"running_mean", "running_var"} <= own and not isinstance(
        module, nn.modules.instancenorm._InstanceNorm
    )


def batch_norm_names(model: nn.Module) -> list[str]:
    """The first name of every BatchNorm module of a model."""
    return [name for name, module in model.named_modules() if is_batch_norm(module)]


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0, sign: str = "mixed") -> nn.Module:
    """Fill every norm's gamma, beta, mean and variance, and every bias; returns the model.

    Default initialisation (gamma 1, beta 0, mean 0, variance 1) hides most faults.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator, dtype=torch.float64)

    for module in model.modules():
        tensors = {
            **dict(module.named_parameters(recurse=False)),
            **dict(module.named_buffers(recurse=False)),
        }
        for name, tensor in tensors.items():
            if name == "running_mean":
                tensor.copy_(normal(tensor))
            elif name == "running_var":
                tensor.copy_(torch.exp(0.7 * normal(tensor)))
            elif name == "bias":
                tensor.copy_(normal(tensor))
            elif name == "weight" and tensor.ndim == 1 and not isinstance(module, nn.PReLU):
                tensor.copy_(signed(generator, tensor.numel(), sign))
    return model


def double(model: nn.Module, seed: int = 0, sign: str = "mixed") -> nn.Module:
    """A random model in double precision and eval mode."""
    return randomise(model, seed, sign).double().eval()


def random_input(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal values from a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


# Comparison


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor of a nested output, in a fixed order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in value:
            yield from tensors_in(value[key])
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif hasattr(value, "__dict__"):
        yield from tensors_in(vars(value))


def relative_error(expected: Any, actual: Any) -> float:
    """``max|a - b| / max|a|`` in float64, the worst over all tensors of the outputs.

    Infinite where shapes, counts, dtypes, or the positions of NaN and infinity differ.
    """
    left, right = list(tensors_in(expected)), list(tensors_in(actual))
    if len(left) != len(right):
        return float("inf")
    return max((_tensor_error(a, b) for a, b in zip(left, right, strict=True)), default=0.0)


def _tensor_error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    a, b = a.detach().double(), b.detach().double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    finite = a.isfinite()
    if not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
        return float("inf")
    a, b = a[finite], b[finite]
    if a.numel() == 0:
        return 0.0
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-300))


@torch.no_grad()
def run(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The model's output without gradients, on copies of the inputs."""
    args = tuple(a.clone() if isinstance(a, Tensor) else a for a in args)
    return model(*args, **kwargs)


def assert_same(old: nn.Module, new: nn.Module, *args: Any, tol: float = 1e-12) -> None:
    """Both models give the same outputs on these inputs."""
    error = relative_error(run(old, *args), run(new, *args))
    assert error < tol, f"outputs differ by {error:.2e} (allowed {tol:.0e})"


# Questions asked of a report


def find_site(report: Any, name: str) -> Any:
    """The one site of this name; also by an alias, and by module for a functional norm."""
    found = [
        s
        for s in report.sites
        if name in (s.name, *s.names)
        or s.name.split(":")[0] == name
        or fnmatch.fnmatch(s.name, name)
    ]
    assert len(found) == 1, f"{name}: {len(found)} sites among {[s.name for s in report.sites]}"
    return found[0]


def covers(report: Any, name: str) -> bool:
    """Whether some site of the report speaks about the module of this name."""
    return any(name in (s.name.split(":")[0], *s.names) for s in report.sites)


def assert_folded(report: Any, *names: str) -> None:
    """These sites are folded exactly."""
    for name in names:
        site = find_site(report, name)
        assert site.status == "exact", f"{name}: {site.status} {site.reason}: {site.detail}"
        assert site.reason is None


def assert_refused(report: Any, name: str, *reasons: str) -> None:
    """This site is refused, for one of these reasons (for any known one if none is given)."""
    site = find_site(report, name)
    assert site.status == "refused", f"{name}: {site.status}, {site.action}"
    allowed = reasons or tuple(REFUSALS)
    assert site.reason in allowed, f"{name}: refused for {site.reason!r}: {site.detail}"
    assert site.detail, f"{name}: a refusal says what blocks"


def check_report(model: nn.Module, report: Any) -> None:
    """What holds for every report: valid statuses and codes, one answer per BatchNorm."""
    for site in report.sites:
        assert site.status in STATUSES, site
        if site.status == "refused":
            assert site.reason in REFUSALS, site
            assert site.detail, site
        else:
            assert site.reason is None, site
    for name in batch_norm_names(model):
        assert covers(report, name), f"{name} has no answer in the report"
    names = [s.name for s in report.sites]
    assert len(names) == len(set(names)), f"a site appears twice: {names}"
    assert sum(report.counts.values()) == len(report.sites)


class _BatchNormCalls(TorchDispatchMode):
    """Counts the calls of ``aten.batch_norm`` whose output is not their input."""

    def __init__(self) -> None:
        super().__init__()
        self.active = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.batch_norm.default and not _close(args[0], out):
            self.active += 1
        return out


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.double(), b.double(), rtol=1e-6, atol=1e-6)


def active_batch_norms(model: nn.Module, *args: Any, **kwargs: Any) -> int:
    """How many calls of ``aten.batch_norm`` still change their input in one run of the model."""
    with torch.inference_mode(), _BatchNormCalls() as calls:
        model(*args, **kwargs)
    return calls.active


def assert_no_norm_computes(model: nn.Module, *args: Any) -> None:
    """No batch norm is left that changes anything."""
    active = active_batch_norms(model, *args)
    assert active == 0, f"{active} batch norms still compute"


def state_copy(model: nn.Module) -> dict[str, Tensor]:
    """A deep copy of the state dict."""
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_state_equal(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """The state dict is bitwise what it was."""
    now = model.state_dict()
    assert list(now) == list(state)
    for name, tensor in state.items():
        same = now[name].dtype == tensor.dtype and torch.equal(
            now[name].nan_to_num(), tensor.nan_to_num()
        )
        assert same, f"{name} changed"


# Small models of several tests


class FunctionalBatchNorm(nn.Module):
    """``F.batch_norm`` with tensors held by the module, positional or by keyword."""

    def __init__(self, channels: int, *, keywords: bool = False, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.keywords, self.eps = keywords, eps

    def forward(self, x: Tensor) -> Tensor:
        if self.keywords:
            return F.batch_norm(
                input=x,
                running_mean=self.running_mean,
                running_var=self.running_var,
                weight=self.weight,
                bias=self.bias,
                training=False,
                eps=self.eps,
            )
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.1, self.eps
        )


class BatchNormAct(nn.BatchNorm2d):
    """A BatchNorm subclass with an activation welded on."""

    def __init__(self, channels: int, act: nn.Module | None = None) -> None:
        super().__init__(channels)
        self.act = nn.ReLU() if act is None else act

    def forward(self, input: Tensor) -> Tensor:
        return self.act(super().forward(input))


class Net(nn.Module):
    """Named submodules and a plain function of ``(self, x)`` as the forward."""

    def __init__(self, function: Any, **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


def every(names: Iterable[str], pattern: str) -> list[str]:
    """The names that match a glob."""
    return [name for name in names if fnmatch.fnmatch(name, pattern)]
