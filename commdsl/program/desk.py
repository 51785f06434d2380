"""What all kernels of a group share, beside a Plan's own memory: a desk on every rank, and a notice of the host's.

Assumes the layout in types.cuh and `stop_of` in waiting.cuh. Does not allocate either; `runtime.desk` and `host_ranks`
do.

A **desk** is symmetric memory: what a rank counts, and what its peers tell it of themselves. A **notice** is memory of
the rank's host, which the host writes while kernels run: they look at it where they wait long.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

LINE = 64

SLOTS = 8
"""Words of a rank on a desk: its calls take them in turn."""

TELLING, TOLD = 16, 128
"""Where a desk counts the calls that are told of, and where their words are (types.cuh)."""


def desk_bytes(num_ranks: int) -> int:
    """Of one rank's desk: how many calls it made and which, who gave up, and what every rank tells of its calls."""
    return TOLD + 8 * SLOTS * num_ranks


def notice_bytes(num_ranks: int) -> int:
    """Of one rank's notice: whether its long waits are to end, then a bit for every rank whose process has ended."""
    # A rank's own tiles are awaited as peer `num_ranks`, whose bit is looked at, too.
    return -(-8 * (2 + num_ranks // 64) // LINE) * LINE


@dataclass(frozen=True, slots=True)
class Stop:
    """What a rank that gives up writes on the desks of its peers."""

    rank: int
    peer: int  # for whom it waited
    code: int  # why, as in its ErrorRecord
    number: int  # of the call, its lower 24 bits


def stop_of(word: int) -> Stop:
    """Who gave up, from the word on a desk."""
    return Stop((word & 0xFFFF) - 1, word >> 16 & 0xFFFF, word >> 32 & 0xFF, word >> 40)


_UNCOUNTED = 1 << 33  # types.cuh


def calls_on(address: int) -> tuple[int, int]:
    """From a rank's own desk at this address: how many calls it has begun, never more, and the digest of the last one;
    0: there is none.
    """
    words = (ctypes.c_uint64 * 2).from_address(address)
    number = words[0]  # first: a call that ends meanwhile is counted there, and not marked any more
    call = words[1]
    return number + bool(call & _UNCOUNTED), call & 0xFFFFFFFF


def differing(desk: bytes, rank: int, num_ranks: int) -> tuple[int, int, int] | None:
    """From a copy of a rank's desk: the first peer that told of another call than the last that the rank told of
    itself, and the digests of both, its own first.
    """
    words = memoryview(desk).cast("Q")
    number = words[TELLING // 8]
    told = [words[TOLD // 8 + one * SLOTS + number % SLOTS] for one in range(num_ranks)]
    for peer, theirs in enumerate(told if number else ()):
        if theirs >> 32 == number & 0xFFFFFFFF and theirs != told[rank]:
            return peer, told[rank] & 0xFFFFFFFF, theirs & 0xFFFFFFFF
    return None
