"""Turns memory that kernels can write to into error records, one per workspace, so that one look covers them all.

Assumes the record's layout (`timeouts`): 64 bytes, the code first and written last. Does not read a record; `timeouts`
does.
"""

from __future__ import annotations

import ctypes
import heapq
from typing import TypeAlias

import numpy as np

from commdsl.program.timeouts import RECORD_BYTES
from commdsl.runtime.errors import OpError

PAGE_BYTES = 1024 * RECORD_BYTES
"""Room for more workspaces than symmetric memory has."""

Bytes: TypeAlias = np.ndarray[tuple[int], np.dtype[np.uint8]]


class ErrorWord:
    """The 64 bytes in which the kernels of one workspace report, readable by this process at any time."""

    def __init__(self, page: ErrorPage, slot: int, data: Bytes) -> None:
        self.data = data
        self.address = int(data.ctypes.data)
        self._page = page
        self._slot = slot
        self._code = ctypes.c_uint64.from_address(self.address)

    @property
    def is_set(self) -> bool:
        return self._code.value != 0

    def clear(self) -> None:
        self.data[:] = 0

    def give_back(self) -> None:
        """For a later workspace; no kernel may report here any more."""
        self.clear()
        self._page.take_back(self._slot)


class ErrorPage:
    """The records of one communicator. Its lock is held to take one or to give one back; none is needed to look."""

    def __init__(self, data: Bytes, owner: object = None) -> None:
        data[:] = 0
        self._data = data
        self._owner = owner  # keeps the memory
        self._free = list(range(len(data) // RECORD_BYTES))
        self._taken = (data.data[:0], b"")  # the bytes up to the last record ever taken, and as many zeros

    def take(self) -> ErrorWord:
        if not self._free:
            raise OpError(f"{len(self._data) // RECORD_BYTES} ops have memory on this group: release some")
        slot = heapq.heappop(self._free)
        end = (slot + 1) * RECORD_BYTES
        if end > len(self._taken[1]):
            self._taken = (self._data.data[:end], bytes(end))
        return ErrorWord(self, slot, self._data[slot * RECORD_BYTES : end])

    def take_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)

    def is_blank(self) -> bool:
        """Whether nothing at all was written. A record in the making is not blank: its code says whether to raise."""
        bytes_now, zeros = self._taken
        return bytes_now.tobytes() == zeros


def ordinary_page() -> ErrorPage:
    """A page in memory of the processor, every record a cache line of its own."""
    data = np.zeros(PAGE_BYTES + RECORD_BYTES, np.uint8)
    first = -data.ctypes.data % RECORD_BYTES
    return ErrorPage(data[first : first + PAGE_BYTES], data)
