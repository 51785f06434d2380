"""Turns a process into one of NVSHMEM's, and the one allocation it makes there into stretches for heaps.

Assumes that every process of the default group has a first group with far peers sooner or later: NVSHMEM joins all of
them, and only its start and its end are collective over all. Does not say who is far, nor what lies in a stretch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from commdsl.machine.config import Config
from commdsl.runtime.bootstrap import Bootstrap, Life, exchange, life
from commdsl.runtime.errors import DeviceError, GroupError, HeapError

ALIGNMENT = 4096

KEPT = 64
"""One part in so many of NVSHMEM_SYMMETRIC_SIZE is left to NVSHMEM."""


class Room:
    """Stretches of so many bytes, first fit."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]
        self._taken: dict[int, int] = {}

    @property
    def free_bytes(self) -> int:
        return sum(length for _, length in self._free)

    def take(self, size: int) -> int | None:
        """Where a stretch begins; None: there is none that long."""
        size = -(-max(size, 1) // ALIGNMENT) * ALIGNMENT
        for index, (first, length) in enumerate(self._free):
            if length >= size:
                self._free[index : index + 1] = [(first + size, length - size)] if length > size else []
                self._taken[first] = size
                return first
        return None

    def size_at(self, first: int) -> int:
        return self._taken[first]

    def give_back(self, first: int) -> None:
        """Joined to the free stretches beside it."""
        joined: list[tuple[int, int]] = []
        for begin, length in sorted([*self._free, (first, self._taken.pop(first))]):
            if joined and sum(joined[-1]) == begin:
                begin, length = joined[-1][0], joined.pop()[1] + length
            joined.append((begin, length))
        self._free = joined


class Arena:
    """This process's part of NVSHMEM's memory.

    A stretch that its rank has let go is used again when all ranks of its heap have: a peer's kernel may still write.
    """

    def __init__(self, nvshmem: Any, world: Life, size: int) -> None:
        self.nvshmem = nvshmem
        self._world = world
        self._room = Room(size)
        self._leaving: list[tuple[int, tuple[str, ...]]] = []
        self._lock = threading.Lock()
        # Not freed by the garbage collector: freeing is collective, and an exit need not be.
        self._tensor = nvshmem.core.bytetensor((size,), except_on_del=False)
        self._buffer, _, _ = nvshmem.core.tensor_get_buffer(self._tensor)
        self.own = int(self._tensor.data_ptr())

    def base(self, pe: int) -> int:
        """Where this process sees the arena of one that is near."""
        return self.own if pe == self._world.rank else int(self.nvshmem.core.get_peer_buffer(self._buffer, pe).handle)

    def take(self, name: str, size: int) -> int:
        """HeapError where there is no room, `name` being what wants it."""
        with self._lock:
            self._sweep()
            found = self._room.take(size)
            if found is None:
                raise HeapError(
                    f"`{name}` takes {size} bytes of symmetric memory in one stretch, and of NVSHMEM's "
                    f"{self._room.size} bytes {self._room.free_bytes} are free: NVSHMEM_SYMMETRIC_SIZE sets how many "
                    "there are, before the first group with far peers"
                )
            return found

    def size_at(self, first: int) -> int:
        return self._room.size_at(first)

    def let_go(self, first: int, heap: str, members: Sequence[int]) -> None:
        """This process's kernels write to no part of that heap any more; its own begins at `first`."""
        with self._lock:
            self._leaving.append((first, tuple(f"gone/{heap}/{pe}" for pe in members)))
            self._world.put(f"gone/{heap}/{self._world.rank}", b"")
            self._sweep()

    def _sweep(self) -> None:
        """Gives back what all have let go."""
        leaving, self._leaving = self._leaving, []
        for first, keys in leaving:
            if all(self._world.get(key) is not None for key in keys):
                self._room.give_back(first)
            else:
                self._leaving.append((first, keys))

    def end(self) -> None:
        """Collective over the world."""
        self.nvshmem.core.free_tensor(self._tensor)
        self.nvshmem.core.finalize()
        self._world.end()


class _Started:
    """What this process has of NVSHMEM, by its number there: at most one, but where ranks are threads."""

    arenas: ClassVar[dict[int, Arena]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()


def arena_of(world: Bootstrap, device: int, config: Config, timeout: float) -> Arena:
    """The arena of this process; the first time NVSHMEM is started, with all processes of the world."""
    found = _Started.arenas.get(world.rank)
    if found is None:
        found = _start(life(world, "nvshmem"), device, config, timeout)
        with _Started.lock:
            _Started.arenas[world.rank] = found
    return found


def stop() -> None:
    """Collective over the world, where NVSHMEM was started: after every heap was let go."""
    with _Started.lock:
        ending = tuple(_Started.arenas.values())
        _Started.arenas.clear()
    for one in ending:
        one.end()


def _start(world: Life, device: int, config: Config, timeout: float) -> Arena:
    try:
        import nvshmem.bindings  # where there is a GPU
        import nvshmem.core
        from cuda.core import Device
    except ImportError as error:
        raise DeviceError(f"groups with far peers need `pip install 'commdsl[cuda]'`: {error}") from error
    what = "start NVSHMEM, which joins all ranks of the default group"

    def tell(key: str, value: bytes) -> tuple[bytes, ...]:
        return exchange(world, key, value, timeout, what)

    sizes = [int(value) for value in tell("bytes", str(config.arena_bytes).encode())]
    if len(set(sizes)) > 1:
        raise GroupError(f"NVSHMEM_SYMMETRIC_SIZE is the same on all ranks; they have {sizes}")
    Device(device).set_current()
    first = world.rank == 0
    uid = nvshmem.core.get_unique_id(empty=not first)
    size = int(np.asarray(uid._data).nbytes)
    # Whoever comes late finds the others gone here, not inside a collective that cannot time out.
    told = tell("uid", ctypes.string_at(uid.ptr, size) if first else b"")[0]
    ctypes.memmove(uid.ptr, told, size)
    nvshmem.core.init(device=Device(device), uid=uid, rank=world.rank, nranks=world.size, initializer_method="uid")
    kept = config.arena_bytes // KEPT // ALIGNMENT * ALIGNMENT  # NVSHMEM's own
    return Arena(nvshmem, world, config.arena_bytes // ALIGNMENT * ALIGNMENT - kept)
