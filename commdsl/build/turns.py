"""Turns what the products of one launch are, in order, into the tables that the kernel has of them.

Assumes the structures of matmul_worker.cuh. Does not know sizes, nor which of its pieces a block takes (`matmul`).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

_SOURCE = struct.Struct("<3Hh")
_TURN = struct.Struct("<5H3h")
_PUSH = struct.Struct("<3Hh")
_RESIDUAL, _BIAS = 0x80, 0x100  # beside how many sums are added


@dataclass(frozen=True, slots=True)
class Source:
    """Rows, matrix `rows[1]` of tensor `rows[0]`, that are multiplied by matrix `factor` of B. `there`: the word of the
    call that says that they are, -1 for none.
    """

    rows: tuple[int, int] = (0, 0)
    factor: int = 0
    there: int = -1


@dataclass(frozen=True, slots=True)
class Push:
    """Where the result of a turn goes besides: matrix `at` of those at `count` places that are pushed to, from `first`
    on. `there`: the word of the call that says that these may be written, -1 for none.
    """

    first: int = 0
    count: int = 0
    at: int = 0
    there: int = -1


ELSEWHERE = (0xFFFF, 0)
"""The result of a turn that is pushed alone."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One of the products of a launch, or a sum of several; `result` as rows are, or ELSEWHERE. `count` matrices of the
    sums, from `first` on, are added. Words of the call: the one that says that they are there, and the one in which
    stored tiles are counted, `stores` in all. `copied`: the matrix for the rows; `bias`: the row of it. -1: none. With
    `residual` the matrix of that is added which is the result's among results.
    """

    sources: tuple[Source, ...] = (Source(),)
    result: tuple[int, int] = (0, 0)
    first: int = 0
    count: int = 0
    sums_there: int = -1
    stored: int = -1
    copied: int = -1
    push: Push = Push()
    bias: int = -1
    residual: bool = False

    @property
    def added(self) -> int:
        """As the kernel has it in one number."""
        return self.count + self.residual * _RESIDUAL + (self.bias + 1) * _BIAS


def packed_pushes(turns: Sequence[Turn]) -> bytes:
    """The kernel's table of what is pushed, by turn."""
    return b"".join(_PUSH.pack(one.push.first, one.push.count, one.push.at, one.push.there) for one in turns)


def packed_turns(turns: Sequence[Turn]) -> tuple[bytes, bytes]:
    """The kernel's tables of turns and of all their sources."""
    sources = [source for turn in turns for source in turn.sources]
    firsts = accumulate((len(turn.sources) for turn in turns), initial=0)
    return b"".join(
        _TURN.pack(first, *turn.result, turn.first, turn.added, turn.sums_there, turn.stored, turn.copied)
        for first, turn in zip(firsts, turns, strict=False)
    ), b"".join(_SOURCE.pack(*one.rows, one.factor, one.there) for one in sources)
