"""Turns the tensors of a call, as arrays, into the lengths of blocks, and the sides of blocks that are matrices.

Assumes a schedule whose units are known, and arrays for all that the caller gives. Does not compute anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TypeAlias

from commdsl.ir.classes import Dim, Unit, units
from commdsl.ir.schedules import Buffer, Schedule
from commdsl.language.kinds import GIVEN
from commdsl.machine.dtypes import Array


def block_elements(schedule: Schedule, inputs: Mapping[str, Sequence[Array]]) -> tuple[int, ...]:
    """Return the number of elements of a block of each buffer, the same on every rank; 0 where it is not known. Raises
    ValueError for inputs of unequal or broken blocks.
    """
    if schedule.lengths is not None:
        return (0,) * len(schedule.buffers)  # each block has its own
    known = units(schedule)
    sizes: dict[str, set[float]] = {}
    for buffer in schedule.buffers:
        unit = known[buffer.name]
        if buffer.kind in GIVEN and unit is not None:
            sizes.setdefault(unit.size, set()).update(array.size / buffer.blocks for array in inputs[buffer.name])
    if not all(len(found) == 1 and min(found).is_integer() for found in sizes.values()):
        raise ValueError("inputs must be whole blocks of one size on every rank")
    sides = sides_of(schedule, inputs)
    return tuple(
        0
        if unit is None
        else prod(side_of(one, sides) for one in unit.dims)
        if unit.dims
        else int(min(sizes[unit.size]))
        for unit in known.values()
    )


Sides: TypeAlias = Mapping[tuple[str, int], int]
"""Lengths of sides of blocks, by the tensor that gives them and the number of the side."""


def side_of(dim: Dim, sides: Sides) -> int:
    """Return the length of a side, given those of the tensors that give sizes."""
    value = sides[dim.size, dim.side]
    return value << dim.scale if dim.scale >= 0 else value >> -dim.scale


def sides_of(schedule: Schedule, inputs: Mapping[str, Sequence[Array]]) -> dict[tuple[str, int], int]:
    """Return the lengths of sides of matrices that are multiplied: inputs of two dimensions give both, flat ones the
    second where the first is known. Raises ValueError where inputs disagree.
    """
    known, found = units(schedule), dict[tuple[str, int], int]()
    given = [(one, known[one.name]) for one in schedule.buffers if one.kind in GIVEN]
    for _ in range(2):
        for buffer, unit in given:
            for array in inputs[buffer.name] if unit is not None and unit.dims else ():
                assert unit is not None
                for dim, value in zip(unit.dims, _shape(buffer, unit, array, found), strict=False):
                    actual = value >> dim.scale if dim.scale >= 0 else value << -dim.scale
                    if found.setdefault((dim.size, dim.side), actual) != actual:
                        raise ValueError(f"`{buffer.name}` is a matrix, of the sides that the schedule says")
    return found


def _shape(buffer: Buffer, unit: Unit, array: Array, sides: Sides) -> tuple[int, ...]:
    """Return the sides of a block as far as they are known."""
    size = array.size // buffer.blocks
    if len(unit.dims) == 1:
        return (size,)
    if array.ndim == 2:
        return array.shape[0] // buffer.blocks, array.shape[1]
    rows, columns = (sides.get((dim.size, dim.side)) and side_of(dim, sides) for dim in unit.dims)
    if columns:
        return size // columns, columns
    return (rows, size // rows) if rows else ()


def depths(schedule: Schedule, inputs: Mapping[str, Sequence[Array]]) -> dict[int, int]:
    """Return by factor the number of columns of its rows, which is that of the rows that it multiplies. Raises
    ValueError where that is not known.
    """
    known, sides = units(schedule), sides_of(schedule, inputs)
    found = {}
    for _, factor, _ in schedule.products:
        unit = known[schedule.buffers[factor].name]
        if unit is None or any((dim.size, dim.side) not in sides for dim in unit.dims):
            raise ValueError(f"`{schedule.buffers[factor].name}` is a matrix, of one shape on every rank")
        found[factor] = side_of(unit.dims[1], sides)
    return found
