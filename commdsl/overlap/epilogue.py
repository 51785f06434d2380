"""Turns what follows the sums of an operator into what its schedule takes for that: parameters and tensors.

Assumes nothing of the tensors; `shapes` looks at them. Does not compute anything: `ir.functions.Epilogue` says what
schedules do.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from commdsl.ir.functions import ACTIVATIONS, GATED
from commdsl.planner.tuning.selection import Params

Tensor: TypeAlias = torch.Tensor

GATE = ("A", 1 + ACTIVATIONS.index(GATED))
"""What makes half as many columns as there are weights."""

WITH_RESIDUAL = ("matmul_reduce_scatter", "matmul_all_reduce", "all_to_all_matmul")
"""Operators whose sums stay where they are added up."""

WITH_ACTIVATION = ("all_gather_matmul",)
"""Operators whose sums are results as soon as they are made."""


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """Sums are multiplied by both `scales`, of float8, `bias` (N,) is added, `activation` applied, and `residual`, of
    the result's shape, added.
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    scales: tuple[Tensor, ...] = ()
    activation: str | None = None

    @property
    def is_plain(self) -> bool:
        """Sums are results."""
        return self.bias is None and self.residual is None and not self.scales and self.activation is None

    @property
    def of_products(self) -> Epilogue:
        """Without what is in the sum of several products once."""
        return replace(self, bias=None, residual=None)

    @property
    def matrix(self) -> Tensor | None:
        """The residual, as rows lie that are made."""
        return None if self.residual is None else self.residual.flatten(0, -2)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order in which schedules take them: numbers that lie side by side, and a matrix as what is made."""
        bias = () if self.bias is None else (self.bias.contiguous(),)
        residual = () if self.matrix is None else (self.matrix.contiguous(),)
        return (*bias, *residual, *self.scales)

    @property
    def params(self) -> Params:
        """What the schedules take as parameters. Where there is neither: nothing."""
        said = ("B", 1) if self.bias is not None else None, ("R", 1) if self.residual is not None else None
        applied = None if self.activation is None else ("A", 1 + ACTIVATIONS.index(self.activation))
        return tuple(one for one in (*said, applied) if one is not None)


NONE = Epilogue()
