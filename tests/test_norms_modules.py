"""What holds for every module of the catalogue: gradients, dtypes, export, compile, state."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings

import pytest
import torch
from helpers import relative_error
from norm_cases import CASES, Case
from torch import Tensor, nn

from normswap import norms

PLAIN = [case for case in CASES if not case.linear]
# Its r and d are constants to the gradient, not to a finite difference: see test_norms_batch.py.
DIFFERENTIABLE = [
    (case, training)
    for case in CASES
    for training in (False, True)
    if (case.name, training) != ("BatchRenorm", True)
]
every = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
modes = pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])


def outputs(value: object) -> list[Tensor]:
    """All tensors of an output."""
    if isinstance(value, Tensor):
        return [value]
    return [t for part in value for t in outputs(part)]  # type: ignore[attr-defined]


def clone(module: nn.Module) -> nn.Module:
    """A copy, so that running statistics of one call do not reach the next."""
    return copy.deepcopy(module)


def test_every_module_has_a_case() -> None:
    classes = {n for n in norms.__all__ if inspect.isclass(getattr(norms, n))}
    assert classes == {type(case.build()).__name__ for case in CASES}


def test_the_package_imports_torch_only() -> None:
    for name in dir(norms):
        module = getattr(norms, name)
        if inspect.ismodule(module):
            source = inspect.getsource(module)
            lines = [n for n in source.splitlines() if n.startswith(("import ", "from "))]
            roots = {line.split()[1].split(".")[0] for line in lines}
            assert roots <= {
                "__future__",
                "collections",
                "contextlib",
                "math",
                "normswap",
                "torch",
                "typing",
            }
            assert all("normswap.norms" in n for n in lines if "normswap" in n)


@every
def test_repr(case: Case) -> None:
    assert repr(case.build()) == case.repr


@pytest.mark.parametrize(("case", "training"), DIFFERENTIABLE, ids=lambda v: getattr(v, "name", v))
def test_gradients(case: Case, training: bool) -> None:
    module = case.make().double().train(training)
    buffers = {n: b.clone() for n, b in module.named_buffers()}
    names = [n for n, _ in module.named_parameters()]
    inputs = [x.requires_grad_() for x in case.inputs()]
    weights = [p.detach().clone().requires_grad_() for p in module.parameters()]

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        state = dict(zip(names, tensors[len(inputs) :], strict=True))
        state |= {n: b.clone() for n, b in buffers.items()}
        result = torch.func.functional_call(module, state, tensors[: len(inputs)])
        return tuple(outputs(result))

    assert torch.autograd.gradcheck(call, (*inputs, *weights), fast_mode=True)


halves = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)


@halves
@every
def test_half_modules_compute_in_float32(case: Case, dtype: torch.dtype) -> None:
    module = case.make().to(dtype).train()
    inputs = case.inputs(dtype)
    expected = outputs(clone(module).float()(*[x.float() for x in inputs]))
    for got, want in zip(outputs(module(*inputs)), expected, strict=True):
        assert got.dtype == dtype
        if case.linear:  # its own rounding comes in
            assert relative_error(want, got.float()) < 0.05
        else:
            assert torch.equal(got, want.to(dtype))


@halves
@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_half_inputs_of_a_float32_module(case: Case, dtype: torch.dtype) -> None:
    module, inputs = case.make().train(), case.inputs(dtype)
    expected = outputs(clone(module)(*[x.float() for x in inputs]))
    for got, want in zip(outputs(module(*inputs)), expected, strict=True):
        assert torch.equal(got, want.to(dtype))


@every
def test_autocast_takes_no_statistics_in_half_precision(case: Case) -> None:
    module = case.make().train()
    inputs = case.inputs(torch.float32)
    expected = outputs(clone(module)(*inputs))
    with torch.autocast("cpu", torch.bfloat16):
        got = outputs(module(*inputs))
        half = outputs(case.make()(*[x.bfloat16() for x in inputs]))
    for want, have, low in zip(expected, got, half, strict=True):
        assert low.dtype == torch.bfloat16
        if case.linear:
            assert relative_error(want, have.float()) < 0.05
        else:
            assert torch.equal(want, have)


@every
@modes
def test_export(case: Case, training: bool) -> None:
    module = case.make().train(training)
    inputs = case.inputs(torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export itself
        exported = torch.export.export(clone(module), inputs).module()
    assert relative_error(outputs(clone(module)(*inputs)), outputs(exported(*inputs))) < 1e-6


# A weight has no batch.
BATCHED = [
    case for case in CASES if not case.name.startswith(("Fix", "Centred", "Weight", "Scaled"))
]


@pytest.mark.parametrize("case", BATCHED, ids=lambda case: case.name)
def test_export_with_a_batch_of_any_size(case: Case) -> None:
    module, inputs = case.make().eval(), case.inputs(torch.float32)
    batch = torch.export.Dim("batch", min=2, max=64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export itself
        shapes = tuple({0: batch} for _ in inputs)
        exported = torch.export.export(module, inputs, dynamic_shapes=shapes).module()
    larger = tuple(torch.cat([x, x[:1]]) for x in inputs)
    assert relative_error(outputs(module(*larger)), outputs(exported(*larger))) < 1e-6


@every
@modes
def test_compile(case: Case, training: bool) -> None:
    module = case.make().train(training)
    inputs = case.inputs(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(clone(module), backend="eager", fullgraph=True)
    assert relative_error(outputs(clone(module)(*inputs)), outputs(compiled(*inputs))) < 1e-6


@every
def test_state_survives_copies_and_files(case: Case) -> None:
    module = case.make().eval()
    inputs = case.inputs(torch.float32)
    expected = outputs(module(*inputs))
    loaded = case.build().eval()
    loaded.load_state_dict(module.state_dict(), strict=True)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module)), loaded):
        assert all(
            torch.equal(a, b) for a, b in zip(outputs(other(*inputs)), expected, strict=True)
        )
        assert repr(other) == repr(module)


@every
def test_made_on_meta_and_reset(case: Case) -> None:
    with torch.device("meta"):
        made = case.build().to_empty(device="cpu")
    torch.manual_seed(3)
    fresh = case.build()
    for module in (made, fresh):
        torch.manual_seed(3)
        for part in module.modules():
            if hasattr(part, "reset_parameters") and part is not module:
                part.reset_parameters()
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    expected = dict([*fresh.named_parameters(), *fresh.named_buffers()])
    for name, tensor in [*made.named_parameters(), *made.named_buffers()]:
        assert torch.equal(tensor, expected[name]), name


FACTORIES = [
    (norms.FrozenBatchNorm, (4,)),
    (norms.GhostBatchNorm, (4,)),
    (norms.BatchRenorm, (4,)),
    (norms.MixingBatchNorm, (4,)),
    (norms.BatchGroupNorm, (2, 4)),
    (norms.ChannelLayerNorm, (4,)),
    (norms.ChannelRMSNorm, (4,)),
    (norms.SampleLayerNorm, (4,)),
    (norms.OffsetLayerNorm, (4,)),
    (norms.RMSNorm, (4,)),
    (norms.PartialRMSNorm, (4,)),
    (norms.OffsetRMSNorm, (4,)),
    (norms.ScaleNorm, (4,)),
    (norms.LpNorm, (4,)),
    (norms.AdaLN, (4, 3)),
    (norms.AdaLNZero, (4, 3)),
    (norms.FiLM, (4, 3)),
    (norms.SPADE, (4, 3)),
    (norms.LocalContrastNorm, ()),
    (norms.DivisiveNorm, (4,)),
    (norms.GRN, (4,)),
    (norms.ScaledWeightStandardisation, (4,)),
    (norms.DyT, (4,)),
    (norms.Derf, (4,)),
    (norms.FRN, (4,)),
    (norms.TLU, (4,)),
    (norms.EvoNormB0, (4,)),
    (norms.EvoNormS0, (4, 2)),
    (norms.Affine, (4,)),
    (norms.NoNorm, (4,)),
    (norms.SequenceBatchNorm, (4,)),
    (norms.FrameBatchNorm, (4, 5)),
    (norms.BatchNormRNN, (4, 5)),
    (norms.BatchNormLSTM, (4, 5, 6, True)),
]


@pytest.mark.parametrize(("kind", "args"), FACTORIES, ids=lambda v: getattr(v, "__name__", ""))
def test_device_and_dtype_of_the_parameters(kind: type[nn.Module], args: tuple[int, ...]) -> None:
    module = kind(*args, device="meta", dtype=torch.float64)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.device.type == "meta", name
        assert tensor.dtype == torch.float64 or name.endswith("num_batches_tracked"), name


@pytest.mark.parametrize("case", PLAIN, ids=lambda case: case.name)
def test_float32_inputs_of_a_float64_module_stay_float32(case: Case) -> None:
    module = case.make().double().train()
    expected = outputs(clone(module)(*case.inputs()))
    for got, want in zip(outputs(module(*case.inputs(torch.float32))), expected, strict=True):
        assert got.dtype == torch.float32
        assert relative_error(want, got.double()) < 2e-6
