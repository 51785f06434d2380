"""The registry of the functions that `compute` runs and that contracts name.

`FUNCTIONS` has all of them: the shapes of their operands, how many results they have, and what they compute, in words.
`ACTIVATIONS` and `Epilogue` are what may follow a product, on its sums.

Assumes nothing. Does not compute; the reference interpreter, the contracts of `commdsl run` and the kernels do: floats
in float32 or wider, rounded once, integers as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType

from commdsl.language.records import dataclass


class Shape(Enum):
    """How the shapes of operands and results belong together."""

    ELEMENTWISE = "operands and results of one shape; any cut into tiles gives the same bits"
    ROWWISE = "the first operand and each result have the same rows; a result depends on its whole row"
    PRODUCT = "rows of the first operand, a column for each row of the second"


class Extent(Enum):
    """The length of an operand of a row-wise function."""

    ROWS = "as long as the rows"
    ROW = "one row"
    NUMBER = "one number"


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the registry. `meaning` names operands and results as the signature in the language reference."""

    name: str
    shape: Shape
    num_operands: int
    meaning: str
    num_results: int = 1
    operation: str = ""  # of an element-wise function: "sum" or "prod", as of a reduction
    commutes: bool = False  # the order of the operands does not matter
    given: tuple[Extent, ...] = ()  # of a row-wise function: its operands behind the rows
    inexact: tuple[int, ...] = ()  # results whose last bits depend on the order of a sum: kernels choose it

    @property
    def row(self) -> int:
        """The index in `given` of the operand that is as long as a row."""
        return self.given.index(Extent.ROW)


MATMUL = "matmul"

FUNCTIONS: Mapping[str, Function] = MappingProxyType(
    {
        one.name: one
        for one in (
            Function("add", Shape.ELEMENTWISE, 2, "c = a + b", operation="sum", commutes=True),
            Function("multiply", Shape.ELEMENTWISE, 2, "c = a * b", operation="prod", commutes=True),
            Function(
                "add_rms_norm",
                Shape.ROWWISE,
                4,
                "y = x + residual, rounded, and z = y with each row over the root of its mean square and eps, times w",
                num_results=2,
                given=(Extent.ROWS, Extent.ROW, Extent.NUMBER),
                inexact=(1,),
            ),
            Function(MATMUL, Shape.PRODUCT, 2, "c = a times w transposed; an epilogue may follow"),
        )
    }
)


def _of_shape(shape: Shape) -> Mapping[str, Function]:
    return MappingProxyType({name: one for name, one in FUNCTIONS.items() if one.shape is shape})


ELEMENTWISE = _of_shape(Shape.ELEMENTWISE)
"""The functions that work tile by tile."""

ROWWISE = _of_shape(Shape.ROWWISE)
"""The functions that work row by row."""

GATED = "swiglu"
"""An activation of columns in two halves: silu(first) times the second (Shazeer, GLU Variants Improve Transformer)."""

ACTIVATIONS = ("gelu", GATED)
"""Activations that may follow a product; gelu is x times the normal distribution up to x, by the error function."""


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The end of a product, on its float32 sums before they are rounded: a bias, one row for all or one for each block
    of the factor, is added, then an activation applied, then a residual added, which lies as the result does.
    """

    bias: int | None = None  # a buffer
    activation: str | None = None  # one of ACTIVATIONS
    residual: int | None = None  # a buffer

    @property
    def buffers(self) -> tuple[int, ...]:
        """The buffers that are read."""
        return tuple(one for one in (self.bias, self.residual) if one is not None)

    @property
    def words(self) -> str:
        """` with bias, gelu`, to follow a product; empty where it ends with nothing."""
        named = ("bias", self.bias), (self.activation, self.activation), ("residual", self.residual)
        said = [str(name) for name, value in named if value is not None]
        return f" with {', '.join(said)}" if said else ""


PLAIN = Epilogue()
