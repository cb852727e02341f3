"""Recurrent layers with batch norm on the input (and, for the LSTM, on the recurrence too)."""

# What forward and extra_repr do is said by the docstring of their class.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normswap.norms.arithmetic import Device, check_channels, check_positive
from normswap.norms.recurrent import FrameBatchNorm, SequenceBatchNorm, blanked, check_mask

State = tuple[Tensor, Tensor]
_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "relu": torch.relu}


def _norm(
    features: int,
    max_length: int | None,
    *,
    bias: bool = True,
    gain: float = 1.0,
    eps: float,
    momentum: float,
    device: Device,
    dtype: torch.dtype | None,
) -> FrameBatchNorm | SequenceBatchNorm:
    if max_length is None:
        return SequenceBatchNorm(
            features, eps, momentum, True, bias, gain, device=device, dtype=dtype
        )
    return FrameBatchNorm(
        features, max_length, eps, momentum, True, bias, gain, device=device, dtype=dtype
    )


def _normalise(norm: nn.Module, x: Tensor, mask: Tensor | None, start: int) -> Tensor:
    return norm(x, mask, start) if isinstance(norm, FrameBatchNorm) else norm(x, mask)


def _keep(old: Tensor, new: Tensor, mask: Tensor | None, step: int) -> Tensor:
    """The new state, or the old one for sequences without data at this step."""
    return new if mask is None else torch.where(mask[:, step, None], new, old)


class BatchNormRNN(nn.Module):
    """``h_t = φ(BN(W x_t) + U h_{t-1})``: batch norm on the input-to-hidden transition only.

    ``BN`` is a :class:`SequenceBatchNorm`, or with ``max_length`` a :class:`FrameBatchNorm`; its
    shift is the only bias. ``U`` starts orthogonal. Steps that the mask leaves out keep the state
    and give 0. A cell is this layer on one step at a time: ``rnn(x[:, t:t+1], h, start=t)``.

    Shapes: ``x`` ``[N, T, input_size]``, mask ``[N, T]``, state ``[N, hidden_size]``; returns
    ``[N, T, hidden_size]`` and the last state.

    Args:
        input_size: the width of the inputs.
        hidden_size: the width of the state.
        max_length: statistics per step, for so many steps; ``None``: pooled over all steps.
        nonlinearity: ``"tanh"`` or ``"relu"``.
        eps: of the norm.
        momentum: of its running statistics.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for another nonlinearity, another width, or a mask of another shape or dtype.

    Source: Laurent et al. 2016, *Batch Normalized Recurrent Neural Networks*, section 4.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        max_length: int | None = None,
        nonlinearity: str = "tanh",
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, input_size=input_size, hidden_size=hidden_size)
        if nonlinearity not in _ACTIVATIONS:
            raise ValueError(f"BatchNormRNN: nonlinearity is {nonlinearity!r}, not tanh or relu")
        self.input_size, self.hidden_size = input_size, hidden_size
        self.nonlinearity = nonlinearity
        self.input = nn.Linear(input_size, hidden_size, False, device=device, dtype=dtype)
        self.recurrence = nn.Linear(hidden_size, hidden_size, False, device=device, dtype=dtype)
        self.norm = _norm(
            hidden_size, max_length, eps=eps, momentum=momentum, device=device, dtype=dtype
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """``W`` as in ``nn.Linear``, ``U`` orthogonal, the norm as new."""
        self.input.reset_parameters()
        nn.init.orthogonal_(self.recurrence.weight)
        self.norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        mask: Tensor | None = None,
        start: int = 0,
    ) -> tuple[Tensor, Tensor]:
        check_channels("BatchNormRNN", x, self.input_size, axis=2, least=3)
        check_mask("BatchNormRNN", x, mask)
        inputs = _normalise(self.norm, self.input(x), mask, start)
        h = x.new_zeros(x.shape[0], self.hidden_size) if state is None else state
        outputs: list[Tensor] = []
        for step in range(x.shape[1]):
            new = _ACTIVATIONS[self.nonlinearity](inputs[:, step] + self.recurrence(h))
            h = _keep(h, new, mask, step)
            outputs.append(h)
        return blanked(torch.stack(outputs, 1), mask).to(x.dtype), h.to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, nonlinearity={self.nonlinearity!r}"


class BatchNormLSTM(nn.Module):
    """An LSTM with batch norm on its input, or with ``recurrent`` also on ``U h`` and the cell.

    ``(i, f, o, g) = BN(W x_t) + U h_{t-1}``, ``c_t = σ(f) c_{t-1} + σ(i) tanh(g)``,
    ``h_t = σ(o) tanh(c_t)``; the norm's shift is the only bias. With ``recurrent=True``:
    ``BN_x(W x_t) + BN_h(U h_{t-1}) + b`` and ``h_t = σ(o) tanh(BN_c(c_t))``, where ``BN_x`` and
    ``BN_h`` have no shift, all gains start at 0.1 and statistics are per step (``max_length`` is
    needed). ``U`` starts orthogonal. Masks and single steps are as in :class:`BatchNormRNN`.

    Shapes: ``x`` ``[N, T, input_size]``, mask ``[N, T]``, state a pair (h, c) of
    ``[N, hidden_size]``; returns ``[N, T, hidden_size]`` and the last pair.

    Args:
        input_size: the width of the inputs.
        hidden_size: the width of the state.
        max_length: statistics per step, for so many steps; ``None``: pooled over all steps.
        recurrent: whether the recurrence and the cell are normalised too.
        eps: of the norms.
        momentum: of their running statistics.
        device: where the parameters are made.
        dtype: of the parameters.

    Raises:
        ValueError: for ``recurrent`` without ``max_length``, another width, or a mask of another
            shape or dtype.

    Source: Laurent et al. 2016, section 4 (input only, here without its peepholes); Cooijmans et
    al. 2016, equations 6 to 8 (``recurrent``).
    """

    bias: nn.Parameter | None
    recurrence_norm: FrameBatchNorm | SequenceBatchNorm | None
    cell_norm: FrameBatchNorm | SequenceBatchNorm | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        max_length: int | None = None,
        recurrent: bool = False,
        *,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_positive(type(self).__name__, input_size=input_size, hidden_size=hidden_size)
        if recurrent and max_length is None:
            raise ValueError(
                "BatchNormLSTM: recurrent=True normalises step by step; give max_length"
            )
        self.input_size, self.hidden_size, self.recurrent = input_size, hidden_size, recurrent
        gates, gain = 4 * hidden_size, 0.1 if recurrent else 1.0
        self.input = nn.Linear(input_size, gates, False, device=device, dtype=dtype)
        self.recurrence = nn.Linear(hidden_size, gates, False, device=device, dtype=dtype)

        def norm(features: int, bias: bool) -> FrameBatchNorm | SequenceBatchNorm:
            return _norm(
                features,
                max_length,
                bias=bias,
                gain=gain,
                eps=eps,
                momentum=momentum,
                device=device,
                dtype=dtype,
            )

        self.norm = norm(gates, bias=not recurrent)
        self.recurrence_norm = norm(gates, bias=False) if recurrent else None
        self.cell_norm = norm(hidden_size, bias=True) if recurrent else None
        bias = torch.empty(gates, device=device, dtype=dtype)
        self.register_parameter("bias", nn.Parameter(bias) if recurrent else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """``W`` as in ``nn.Linear``, ``U`` orthogonal per gate, biases 0, the norms as new."""
        self.input.reset_parameters()
        for gate in self.recurrence.weight.detach().chunk(4):
            nn.init.orthogonal_(gate)
        if self.bias is not None:
            nn.init.zeros_(self.bias)
        for norm in (self.norm, self.recurrence_norm, self.cell_norm):
            if norm is not None:
                norm.reset_parameters()

    def forward(
        self,
        x: Tensor,
        state: State | None = None,
        mask: Tensor | None = None,
        start: int = 0,
    ) -> tuple[Tensor, State]:
        check_channels("BatchNormLSTM", x, self.input_size, axis=2, least=3)
        check_mask("BatchNormLSTM", x, mask)
        inputs = _normalise(self.norm, self.input(x), mask, start)
        if self.bias is not None:
            inputs = inputs + self.bias
        zeros = x.new_zeros(x.shape[0], self.hidden_size)
        h, c = (zeros, zeros) if state is None else state
        outputs: list[Tensor] = []
        for step in range(x.shape[1]):
            now = None if mask is None else mask[:, step : step + 1]
            new_h, new_c = self._advance(inputs[:, step], h, c, now, start + step)
            h, c = _keep(h, new_h, mask, step), _keep(c, new_c, mask, step)
            outputs.append(h)
        return blanked(torch.stack(outputs, 1), mask).to(x.dtype), (h.to(x.dtype), c.to(x.dtype))

    def _advance(
        self, inputs: Tensor, h: Tensor, c: Tensor, mask: Tensor | None, step: int
    ) -> State:
        def normed(norm: nn.Module | None, t: Tensor) -> Tensor:
            return t if norm is None else _normalise(norm, t.unsqueeze(1), mask, step).squeeze(1)

        gates = inputs + normed(self.recurrence_norm, self.recurrence(h))
        i, f, o, g = gates.chunk(4, -1)
        c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(normed(self.cell_norm, c)), c

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}, recurrent={self.recurrent}"
