"""Turns what a run on host ranks needs room for into one stretch of memory that every rank maps.

Assumes offsets are handed out before the memory is made. Does not know a Plan, and does not start ranks (`host_ranks`
does). Everything lies between two guards, and what is only written holds a pattern before, never what is expected.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.machine import memory

Bytes: TypeAlias = NDArray[np.uint8]

LINE = 64
PAGE = 4096
GUARD_BYTES = 64
GUARD = 0x5A
_MAP_NORESERVE = 0x4000  # of Linux on x86 and Arm; Python names it since 3.13
_RANK = re.compile(r" (of|on) rank \d+$")
UNWRITTEN = 0xA5
"""What results hold before a call: a NaN in no float type, and never what a test expects by accident."""


@dataclass(frozen=True, slots=True)
class Place:
    """Some bytes between guards, and what they are to a person."""

    at: int
    size: int
    name: str

    @property
    def guards(self) -> tuple[slice, slice]:
        end = self.at + self.size
        return slice(self.at - GUARD_BYTES, self.at), slice(end, end + GUARD_BYTES)


@dataclass
class Ground:
    """Offsets are handed out first; then the memory is made and filled."""

    size: int = 0
    places: list[Place] = field(default_factory=list)
    contents: list[tuple[int, Bytes]] = field(default_factory=list)

    def take(self, size: int, name: str, *, align: int = LINE, shift: int = 0) -> int:
        """Room that holds zeros until something is put there; it begins `shift` bytes off its alignment."""
        at = -(-(self.size + GUARD_BYTES) // align) * align + shift
        self.places.append(Place(at, size, name))
        self.size = at + size + GUARD_BYTES
        return at

    def put(self, content: Bytes, name: str, *, align: int = LINE, shift: int = 0) -> int:
        """Room for what it holds from the beginning."""
        at = self.take(content.size, name, align=align, shift=shift)
        self.contents.append((at, content.reshape(-1)))
        return at

    def poisoned(self, size: int, name: str, *, align: int = LINE, shift: int = 0) -> int:
        """Room for what is only written."""
        return self.put(np.full(size, UNWRITTEN, np.uint8), name, align=align, shift=shift)

    def made(self, path: Path | None) -> Bytes:
        """The memory, filled: a file for ranks of other processes. It is given back when nobody refers to it. Raises
        MemoryError, which says what takes how much, where the machine does not give as much.
        """
        size = -(-self.size // PAGE) * PAGE
        try:
            data = np.frombuffer(_map(size) if path is None else _map_file(path, size), np.uint8)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise MemoryError(self._shortage()) from error
        for place in self.places:
            for guard in place.guards:
                data[guard] = GUARD
        for at, content in self.contents:
            data[at : at + content.size] = content
        return data

    def _shortage(self) -> str:
        """Say how much memory was asked for, for what, and how much there is."""
        sizes = Counter[str]()
        for place in self.places:
            sizes[_RANK.sub("", place.name)] += place.size
        parts = ", ".join(
            f"{_gigabytes(size)} for {name} of all ranks"
            for name, size in sizes.most_common(3)
            if size > self.size >> 6
        )
        there = memory.room()
        room = "" if there == memory.UNKNOWN else f"; {_gigabytes(there)} can be had, less where `ulimit -v` says so"
        return f"the host ranks need {_gigabytes(self.size)} of address space ({parts}){room}"

    def overwritten(self, data: Bytes) -> list[str]:
        """What somebody wrote beside."""
        return [place.name for place in self.places if any((data[guard] != GUARD).any() for guard in place.guards)]


def _gigabytes(size: int) -> str:
    return f"{size / (1 << 30):.2f} GB"


def _map(size: int) -> mmap.mmap:
    """Zeros; pages that nobody touches take no room, and most of a heap is never touched."""
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)


def _map_file(path: Path, size: int) -> mmap.mmap:
    """A file of zeros, mapped; pages that nobody touches take no room.

    Raises OSError where the folder has no room for all of them: to touch a page for which there is none is a signal.
    """
    folder = os.statvfs(path.parent)
    if size > folder.f_bavail * folder.f_frsize:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    with path.open("w+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)
