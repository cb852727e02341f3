"""Scale the branches of a post-norm stack so that a clean skip carries what they were trained with.

A post-norm sublayer adds ``f_k(x_k)`` to ``x_k = g n(y) + b``. After the rotation to pre-norm the
branch still reads ``x_k``, but the clean skip carries a stream ``u_k`` of another size, without
``b``. With ``c_k`` the least-squares factor of ``u_k ≈ c_k (x_k - b)`` (both without their mean
where the norm removes it), the branch becomes

    ``c_k (f_k + b)``

so that ``u_{k+1} ≈ c_k (x_k + f_k)``, whose factor the next norm does not see. Where all entries of
``g`` are equal and all tokens of one size this is exact up to eps. The factors are fitted in order
(:func:`normswap.calibration.fit_branch_factors`) and go into the weights that end each branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx, nn

from normswap.channelmap import commit, push
from normswap.find import GraphSite
from normswap.forms import StoredTensor, stored_value
from normswap.maps import Blocked, Scale, Shift
from normswap.plan import MappingRow
from normswap.program import Edit, Program, Vector
from normswap.residual_graph import Chain, Residual


class BranchScales:
    """The weight edits that scale the branches of post-norm stacks.

    Args:
        model: the model.
        tensors: its stored tensors by name.
        factors: ``c_k`` by the norm that makes ``x_k``.
    """

    def __init__(
        self, model: nn.Module, tensors: Mapping[str, StoredTensor], factors: Mapping[str, float]
    ) -> None:
        shapes = {t.name: t.shape for t in tensors.values()}
        self.tensors = {t.name: t for t in tensors.values()}
        self.program = Program(lambda name: stored_value(model, name), shapes.__getitem__)
        self.factors = factors
        self.constants: dict[str, float] = {}
        self.notes: list[str] = []

    def scale(self, chain: Chain, in_front: Sequence[GraphSite | None]) -> None:
        """Scale each branch of a stack; ``in_front`` are the norms that make what they read.

        Raises:
            Blocked: what ends a branch cannot take a factor.
        """
        for residual, norm in zip(chain.residuals, in_front, strict=True):
            if norm is None:
                continue
            if norm.site.name not in self.factors:
                raise Blocked("boundary", f"the branch behind {norm.site.name!r} cannot be reached")
            factor = self.factors[norm.site.name]
            self._scale_branches(residual, factor)
            self._add_shift(residual, norm, factor)

    def mark(self) -> object:
        """What :meth:`rollback` goes back to."""
        return self.program.mark(), dict(self.constants), list(self.notes)

    def rollback(self, mark: object) -> None:
        """Forget what was scaled since."""
        assert isinstance(mark, tuple)
        program, self.constants, self.notes = mark
        self.program.rollback(program)

    @property
    def aliases(self) -> dict[str, list[str]]:
        """The names of edited tensors that have several."""
        tensors = (self.tensors[name] for name in self.constants)
        return {t.name: list(t.names) for t in tensors if len(t.names) > 1}

    @property
    def edits(self) -> list[Edit]:
        """The edits so far."""
        return self.program.edits()

    def rows(self) -> list[MappingRow]:
        """A row for each tensor that was edited."""
        sources = self.program.stored_sources(self.edits)
        return [
            MappingRow(name, sources.get(name, (name,)), "calibrated", "approximate", factor)
            for name, factor in self.constants.items()
        ]

    def _scale_branches(self, residual: Residual, factor: float) -> None:
        values = [branch.value for branch in residual.branches]
        maps = [(value, Scale(self._constant(value, factor))) for value in values]
        joins = {n for branch in residual.branches for n in branch.joins}
        pushed = push(self.program, maps, {*residual.sums, *joins}, [], against=True)
        commit(self.program, pushed)
        for tensor, _ in pushed.tensors():
            self.constants[tensor.name] = factor

    def _add_shift(self, residual: Residual, norm: GraphSite, factor: float) -> None:
        """The norm's shift, which the skip does not carry any more, into one branch's bias."""
        shift = norm.tensors.get("bias")
        if shift is None:
            return
        value = residual.branches[0].value
        ref = self.program.emit("times", (shift.name, 0), factor=factor)
        shape = [1] * (len(value.meta["shape"]) - 1) + [shift.shape[-1]]
        vector = Vector(self.program, ref, shift.shape).reshape(tuple(shape))
        try:
            pushed = push(self.program, [(value, Shift(vector))], residual.sums, [], against=True)
        except Blocked as blocked:
            self.notes.append(
                f"the shift of {norm.site.name!r} is lost on the skip: {blocked.detail}"
            )
            return
        commit(self.program, pushed)
        for tensor, _ in pushed.tensors():
            self.constants.setdefault(tensor.name, factor)

    def _constant(self, value: fx.Node, number: float) -> Vector:
        shape = [1] * (len(value.meta["shape"]) - 1) + [value.meta["shape"][-1]]
        ref = self.program.emit("constant", value=number, shape=shape)
        return Vector(self.program, ref, tuple(shape))
