"""What all kernels of a group share, beside a Plan's own memory: a desk on every rank, and a notice of the host's.

Assumes the layout in types.cuh and `stop_of` in waiting.cuh. Does not allocate either; `runtime.desk` and `host_ranks`
do.

A **desk** is symmetric memory: what a rank counts, and what its peers tell it of themselves. A **notice** is memory of
the rank's host, which the host writes while kernels run: they look at it where they wait long.
"""

from __future__ import annotations

from dataclasses import dataclass

LINE = 64

SLOTS = 8
"""Words of a rank on a desk: its calls take them in turn."""


def desk_bytes(num_ranks: int) -> int:
    """Of one rank's desk: how many calls it made and which, who gave up, and what every rank tells of its calls."""
    return 2 * LINE + 8 * SLOTS * num_ranks


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
