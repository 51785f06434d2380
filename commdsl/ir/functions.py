"""The functions that a `compute` task may name: element by element, so that any cut into tiles gives the same bits.

Assumes nothing. Does not compute; the oracle and the kernels do: floats in float32, rounded once, integers as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
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
