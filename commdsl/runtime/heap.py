"""Turns a size into symmetric memory of every rank of a group, zeroed, and the addresses under which this rank sees it.

Assumes all ranks allocate in the same order. Does not know what lies in it; the Plan does.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from commdsl.runtime.bootstrap import Board, Exchange

PAGE = 4096


class Heap(Protocol):
    """Memory of one workspace, on every rank."""

    @property
    def addresses(self) -> tuple[int, ...]: ...

    def zero(self) -> None:
        """Clears this rank's own part."""
        ...

    def free(self) -> None:
        """Collective."""
        ...


class ThreadHeap:
    """Ranks are threads: each allocates its own part, and the address is the same for all."""

    def __init__(self, size: int, rank: int, exchange: Exchange, board: Board) -> None:
        self._own = mmap.mmap(-1, _pages(size))
        here = ctypes.addressof(ctypes.c_char.from_buffer(self._own))
        # The board keeps every part alive as long as the group: a slow rank may read it after its owner has let go.
        with board.lock:
            board.kept.append(self._own)
        self.addresses = tuple(
            int.from_bytes(value, "little") for value in exchange("heap", here.to_bytes(8, "little"))
        )
        self._size = size
        self._rank = rank

    def zero(self) -> None:
        ctypes.memset(self.addresses[self._rank], 0, self._size)

    def free(self) -> None:
        """The group's end frees it."""


class SharedHeap:
    """Ranks are processes of one machine: a file in memory each, mapped by all, its name gone once all have it."""

    def __init__(self, size: int, rank: int, exchange: Exchange) -> None:
        self._size = size
        self._rank = rank
        path = _folder() / f"commdsl-{uuid.uuid4().hex}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.ftruncate(descriptor, _pages(size))
            self._maps = [_mapped(Path(name.decode())) for name in exchange("names", str(path).encode())]
            exchange("mapped", b"")
        finally:
            os.close(descriptor)
            path.unlink()
        self.addresses = tuple(ctypes.addressof(ctypes.c_char.from_buffer(part)) for part in self._maps)

    def zero(self) -> None:
        ctypes.memset(self.addresses[self._rank], 0, self._size)

    def free(self) -> None:
        self.addresses = ()
        self._maps = []


def _folder() -> Path:
    """A folder in memory where the system has one."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _mapped(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)


def _pages(size: int) -> int:
    return -(-max(size, 1) // PAGE) * PAGE


class DeviceHeap:
    """NVSHMEM's symmetric memory; the part of a near peer is a pointer of ours, that of a far one is named by our own.

    `nvshmem` is the module nvshmem.core, initialised with the group's ranks as its PEs. `nodes`: by rank.
    """

    def __init__(self, size: int, rank: int, nodes: Sequence[int], nvshmem: Any, finish: Callable[[], None]) -> None:
        # Not freed by the garbage collector: freeing is collective, and an exit need not be.
        self._tensor = nvshmem.bytetensor((_pages(size),), except_on_del=False)
        self._nvshmem = nvshmem
        self._finish = finish
        self.zero()
        own = int(self._tensor.data_ptr())
        buffer, _, _ = nvshmem.tensor_get_buffer(self._tensor)
        self.addresses = tuple(
            own if peer == rank or node != nodes[rank] else int(nvshmem.get_peer_buffer(buffer, peer).handle)
            for peer, node in enumerate(nodes)
        )

    def zero(self) -> None:
        self._tensor.zero_()
        self._finish()

    def free(self) -> None:
        self._finish()
        self._nvshmem.free_tensor(self._tensor)
