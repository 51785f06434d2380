"""Turns what a buffer says of its lengths into which length each block of each rank has.

Assumes that a buffer whose lengths are looked up by block has a block for each rank. Does not know numbers: a table of
lengths comes with a call.

A table has an entry for each rank, which all ranks know; or for each pair of ranks, of which a rank knows
those in whose pair it is. A schedule has one table. Without one all blocks are of the only length, entry 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from commdsl.language.kinds import Axis
from commdsl.language.records import dataclass

Ints = NDArray[np.int32]
Entry = TypeVar("Entry")


@dataclass(frozen=True, slots=True)
class Lengths:
    """`of n[rank]`: the table, and by what it is looked up."""

    table: str
    axes: tuple[Axis, ...]

    def of_blocks(self, num_ranks: int, blocks: int) -> Ints:
        """The entry of each block: (num_ranks, blocks)."""
        numbers = dict(zip(Axis, np.indices((num_ranks, blocks), np.int32), strict=True))
        shape = (num_ranks,) * len(self.axes)
        return np.ravel_multi_index([numbers[axis] for axis in self.axes], shape).astype(np.int32)

    def of_rank(self, num_ranks: int, blocks: int, rank: int, known: Sequence[Entry]) -> list[Entry]:
        """The entry of each block of a rank, of those that it knows, by place."""
        return [known[at] for at in _places(self, num_ranks, blocks, rank)]

    def entry_name(self, num_ranks: int, entry: int) -> str:
        """`n[2]`, `n[0, 2]`."""
        at = np.unravel_index(entry, (num_ranks,) * len(self.axes))
        return f"{self.table}[{', '.join(map(str, at))}]"

    def __str__(self) -> str:
        return f"{self.table}[{', '.join(axis.value for axis in self.axes)}]"


@cache
def _places(lengths: Lengths, num_ranks: int, blocks: int, rank: int) -> tuple[int, ...]:
    """Where among the entries that a rank knows those of its blocks are: kept, as other calls have other lengths."""
    entries = lengths.of_blocks(num_ranks, blocks)[rank]
    return tuple(place(num_ranks, len(lengths.axes), np.full_like(entries, rank), entries).tolist())


def num_entries(num_ranks: int, num_axes: int) -> int:
    """Of a table; of none, one."""
    return prod([num_ranks] * num_axes)


def knows(num_ranks: int, num_axes: int, rank: Ints, entry: Ints) -> NDArray[np.bool_]:
    """Whether ranks know entries."""
    pair = np.divmod(entry, num_ranks) if num_axes == 2 else (rank, rank)
    known: NDArray[np.bool_] = (pair[0] == rank) | (pair[1] == rank)
    return known


def place(num_ranks: int, num_axes: int, rank: Ints, entry: Ints) -> Ints:
    """Where among those that they know ranks have entries: of pairs first what they send, then what comes."""
    if num_axes < 2:
        return entry
    source, dest = np.divmod(entry, num_ranks)
    return np.where(source == rank, dest, num_ranks + source).astype(np.int32)


def num_places(num_ranks: int, num_axes: int) -> int:
    """How many entries a rank knows, one of them twice where there are pairs."""
    return (1, num_ranks, 2 * num_ranks)[num_axes]


def known_to(rank: int, num_ranks: int, table: Sequence[int]) -> tuple[int, ...]:
    """Of a whole table what a rank knows, by place."""
    if len(table) == num_ranks:
        return tuple(table)
    return (*table[rank * num_ranks : (rank + 1) * num_ranks], *table[rank::num_ranks])


def block_lengths(lengths: Lengths | None, num_ranks: int, blocks: int, table: Sequence[int] | int) -> list[list[int]]:
    """How long each block of each rank is, by a whole table; without one all are as long."""
    if lengths is None or isinstance(table, int):
        return [[table if isinstance(table, int) else max(table)] * blocks] * num_ranks
    return [[table[entry] for entry in row] for row in lengths.of_blocks(num_ranks, blocks).tolist()]
