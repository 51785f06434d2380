"""Turns memory into what all kernels of a group share: the desk, on which ranks tell of themselves, and the notice.

Assumes the layout that `program.desk` states. Does not watch anybody: who finds out that a rank has ended, or that the
user wants to interrupt, tells the notice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import numpy as np

from commdsl.program.arguments import heaps
from commdsl.program.desk import LINE, notice_bytes
from commdsl.runtime.error_page import Bytes
from commdsl.runtime.heap import Heap
from commdsl.runtime.said import Said


class Notice:
    """Words of this host that kernels of one rank look at where they wait long: writing one takes no lock and no call
    of the driver, so any thread may at any time.
    """

    def __init__(self, data: Bytes, owner: object = None) -> None:
        """`data`: memory that kernels can read, for as many ranks as it has bits for. `owner` keeps it."""
        data[:] = 0
        self.address = int(data.ctypes.data)
        self._owner = owner
        self._words = (ctypes.c_uint64 * (len(data) // 8)).from_address(self.address)

    def mark_gone(self, rank: int) -> None:
        """The process of that rank of the group has ended: a wait for it looks once more, and then gives up."""
        self._words[1 + rank // 64] |= 1 << rank % 64

    def stop(self, own: int, num_ranks: int) -> None:
        """End all waits for other ranks, as if they were gone, until `go_on`."""
        for rank in range(num_ranks):
            if rank != own:
                self.mark_gone(rank)

    def go_on(self, gone: Iterable[int]) -> None:
        """Have kernels wait again, but for ranks whose processes have ended."""
        for at in range(1, len(self._words)):
            self._words[at] = 0
        for rank in gone:
            self.mark_gone(rank)

    def interrupt(self) -> None:
        """Waits that last longer than half a second give up, until `clear_interrupt`."""
        self._words[0] = 1

    def clear_interrupt(self) -> None:
        self._words[0] = 0


def ordinary_notice(num_ranks: int) -> Notice:
    """A notice in memory of the processor, in cache lines of its own."""
    data = np.zeros(notice_bytes(num_ranks) + LINE, np.uint8)
    first = -data.ctypes.data % LINE
    return Notice(data[first : first + notice_bytes(num_ranks)], data)


class Desk:
    """The desks of a group as this rank sees them, and its own notice."""

    def __init__(self, heap: Heap, nodes: Sequence[int], rank: int, notice: Notice, said: Said) -> None:
        self._heap = heap
        self.said = said
        self.address = heap.addresses[rank]  # of this rank's own
        self.arguments: dict[str, int | Sequence[int]] = {
            "desk": heaps(heap.addresses, nodes, rank),
            "notice": notice.address,
        }

    @property
    def reserved_bytes(self) -> int:
        return self._heap.reserved_bytes

    def reset(self) -> None:
        """Back to the state before the first call; no rank's kernel may be running."""
        self._heap.zero()

    def free(self) -> None:
        """This rank lets go."""
        self._heap.free()
