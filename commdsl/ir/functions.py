"""The functions that `compute` may name, but products: what they read and write, and how a row is made.

Element by element (`FUNCTIONS`): any cut into tiles gives the same bits. Row-wise (`ROWWISE`): a result depends on its
whole row, so who makes a row has all of it. What follows a product (`ACTIVATIONS`, `Epilogue`) is of its sums.

Assumes nothing. Does not compute; the oracle and the kernels do: floats in float32, rounded once, integers as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from commdsl.language.records import dataclass


@dataclass(frozen=True, slots=True)
class Function:
    """`num_reads` buffers to one, each element by `operation` in order."""

    name: str
    num_reads: int
    operation: str  # "sum" or "prod", as a reduction's


FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {one.name: one for one in (Function("add", 2, "sum"), Function("multiply", 2, "prod"))}
)


class Extent(Enum):
    """How long an operand of a row-wise function is."""

    ROWS = "as long as the rows"
    ROW = "one row"
    NUMBER = "one number"


@dataclass(frozen=True, slots=True)
class Rowwise:
    """From the rows that moves leave in a buffer, and what the caller gives beside them, to as many of each result."""

    name: str
    given: tuple[Extent, ...]
    num_results: int

    @property
    def row(self) -> int:
        """Which of what is given says how long a row is."""
        return self.given.index(Extent.ROW)


ROWWISE: Mapping[str, Rowwise] = MappingProxyType(
    {
        # (x, residual, weight, eps): the sum x + residual, rounded; and of that sum, each row divided by its root of
        # the mean square and eps, and multiplied by the weight.
        "add_rms_norm": Rowwise("add_rms_norm", (Extent.ROWS, Extent.ROW, Extent.NUMBER), 2),
    }
)


GATED = "swiglu"
"""Of columns in two halves: silu(first) times the second (Shazeer, GLU Variants Improve Transformer, 2020)."""

ACTIVATIONS = ("gelu", GATED)
"""What may follow a product; gelu is x times the normal distribution up to x, by the error function."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What a product does with its float32 sums before they are rounded: a bias, one row for all or one for each block
    of the factor, is added, then an activation applied, then a residual added, which lies as the result does.
    """

    bias: int | None = None  # a buffer
    activation: str | None = None  # one of ACTIVATIONS
    residual: int | None = None  # a buffer

    @property
    def buffers(self) -> tuple[int, ...]:
        """What is read."""
        return tuple(one for one in (self.bias, self.residual) if one is not None)

    @property
    def words(self) -> str:
        """` with bias, gelu`, to follow a product; empty where it ends with nothing."""
        named = ("bias", self.bias), (self.activation, self.activation), ("residual", self.residual)
        said = [str(name) for name, value in named if value is not None]
        return f" with {', '.join(said)}" if said else ""


PLAIN = Epilogue()
