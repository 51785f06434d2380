"""Turns a size into symmetric memory of every rank of a group, zeroed, and the addresses under which this rank sees it.

Assumes all ranks allocate in the same order. Does not know what lies in it; the Plan does.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from commdsl.machine import memory
from commdsl.runtime.bootstrap import Board, Exchange
from commdsl.runtime.descriptors import pass_round
from commdsl.runtime.errors import HeapError, OpError

PAGE = 4096

Reserved = TypeVar("Reserved")


class Heap(Protocol):
    """Memory of one workspace, on every rank."""

    @property
    def addresses(self) -> tuple[int, ...]: ...

    @property
    def reserved_bytes(self) -> int:
        """What this rank's own part takes of the machine's memory, or of the GPU's."""
        ...

    def zero(self) -> None:
        """Clears this rank's own part."""
        ...

    def free(self) -> None:
        """This rank lets go; a part is gone when all have."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """What is asked for: `used` are the stretches, first byte and length, that calls touch."""

    name: str  # of whose it is, for messages
    size: int
    used: tuple[tuple[int, int], ...]

    @classmethod
    def whole(cls, name: str, size: int) -> Extent:
        """All of it is touched."""
        return cls(name, size, ((0, size),))

    @property
    def pages(self) -> tuple[tuple[int, int], ...]:
        """The same in whole pages, each once."""
        found: list[tuple[int, int]] = []
        for first, length in sorted(self.used):
            begin, end = first // PAGE * PAGE, _pages(first + length)
            if found and begin <= sum(found[-1]):
                before = found.pop()
                begin, end = before[0], max(end, sum(before))
            found.append((begin, end - begin))
        return tuple(found)

    @property
    def reserved_bytes(self) -> int:
        return sum(length for _, length in self.pages)


def together(exchange: Exchange, reserve: Callable[[], Reserved]) -> Reserved:
    """What a rank reserves, once all have: where one cannot, all raise HeapError, and none waits for it."""
    try:
        found = reserve()
    except HeapError as error:
        with contextlib.suppress(OpError):  # a peer may give up for this before it has met the others: this is why
            exchange("reserved", str(error).encode())
        raise
    for peer, said in enumerate(exchange("reserved", b"")):
        if said:
            raise HeapError(f"rank {peer} of this group has no memory for it, and said: {said.decode()}")
    return found


class Part:
    """Memory of one rank, mapped here until nobody holds this; a descriptor of it may be closed.

    Not `mmap`'s, which keeps a descriptor of its own open for as long.
    """

    def __init__(self, size: int, descriptor: int = -1) -> None:
        """Zeros of this process, without a descriptor."""
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        libc.mmap.restype = ctypes.c_void_p
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        how = mmap.MAP_SHARED | (mmap.MAP_ANONYMOUS if descriptor < 0 else 0)
        found = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, how, descriptor, 0)
        if found is None or found == ctypes.c_size_t(-1).value:
            raise HeapError(f"{size} bytes of memory cannot be mapped: {os.strerror(ctypes.get_errno())}")
        self.address = int(found)
        # Not at exit: a thread may still run a call then.
        weakref.finalize(self, libc.munmap, found, size).atexit = False


class _MappedHeap:
    """Parts that are mapped here, each for as long as one rank has it."""

    def __init__(self, extent: Extent, rank: int, parts: Sequence[Part]) -> None:
        self.addresses = tuple(part.address for part in parts)
        self.reserved_bytes = extent.reserved_bytes
        self._parts = tuple(parts)
        self._extent = extent
        self._rank = rank

    def zero(self) -> None:
        for first, length in self._extent.pages:
            ctypes.memset(self.addresses[self._rank] + first, 0, length)

    def free(self) -> None:
        self.addresses = ()
        self._parts = ()


class ThreadHeap(_MappedHeap):
    """Ranks are threads: each allocates its own part, and the address is the same for all."""

    def __init__(self, extent: Extent, rank: int, exchange: Exchange, board: Board) -> None:
        own = Part(_pages(extent.size))
        name = str(own.address)
        with board.lock:
            board.kept[name] = own
        names = [value.decode() for value in exchange("heap", name.encode())]
        with board.lock:
            parts = [board.kept[one] for one in names]
        exchange("taken", b"")
        with board.lock:
            del board.kept[name]
        super().__init__(extent, rank, parts)


class SharedHeap(_MappedHeap):
    """Ranks are processes of one machine: memory without a name, whose descriptor each passes to the others.

    So nothing is left behind by ranks that are killed, and no folder has to be large enough.
    """

    def __init__(self, extent: Extent, rank: int, exchange: Exchange) -> None:
        descriptor = os.memfd_create("commdsl")
        try:
            together(exchange, lambda: _reserve(descriptor, extent))
            passed = pass_round(descriptor, rank, exchange)
        finally:
            os.close(descriptor)
        try:
            super().__init__(extent, rank, [Part(_pages(extent.size), one) for one in passed])
        finally:
            for one in passed:
                os.close(one)


def _reserve(descriptor: int, extent: Extent) -> None:
    """Memory for what is used; HeapError where there is not enough, rather than a signal when it is touched."""
    room = _room()
    try:
        if extent.reserved_bytes > room:  # asked first: a full control group kills
            raise OSError(0, "there is not enough memory")
        os.ftruncate(descriptor, _pages(extent.size))
        for first, length in extent.pages:
            os.posix_fallocate(descriptor, first, length)
    except OSError as error:
        raise HeapError(
            f"`{extent.name}` takes {extent.reserved_bytes} bytes of shared memory on every rank of this machine, and "
            f"{room} can be had: {error.strerror}"
        ) from error


def _room() -> int:
    """Bytes of memory that this process may still take, as the machine, its control group and its limits say."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return memory.room() if limit == resource.RLIM_INFINITY else min(memory.room(), limit)


def _pages(size: int) -> int:
    return -(-max(size, 1) // PAGE) * PAGE
