"""Turns a Plan and the tensors of some calls into one stretch of memory that every rank of a host run maps.

Assumes all ranks have tensors of the same block size in a call. Does not start ranks (`host_run` does).
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.language.diagnostics import InternalError
from commdsl.program.arguments import arguments
from commdsl.program.memory import Access
from commdsl.program.plan import Plan
from commdsl.program.sizes import Launch, tensor_bytes
from commdsl.program.timeouts import RECORD_BYTES, ErrorRecord, unpack

Array: TypeAlias = NDArray[np.generic]
Inputs: TypeAlias = Mapping[str, Sequence[Array]]
"""By buffer, then by rank: 1-D arrays of whole blocks in storage type."""

GUARD_BYTES = 64
GUARD = 0x5A
UNWRITTEN = 0xA5
"""What output tensors hold before a call: a NaN in no float type, and never what a test expects by accident."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Offsets of everything in an arena."""

    heaps: tuple[int, ...]
    errors: tuple[int, ...]
    tensors: tuple[tuple[tuple[int, ...], ...], ...]  # by call, rank, tensor
    size: int


def layout(plan: Plan, block_bytes: Sequence[int], *, shift: int, in_place: bool) -> Layout:
    """Heaps first, each on a page; tensors have `GUARD_BYTES` on both sides and start `shift` bytes off a 16-byte line.

    `block_bytes` is by call. `in_place` gives the written tensor of an alias-safe inout buffer the memory of its twin.
    """
    heap_stride = _round_up(plan.symmetric_bytes, 4096)
    heaps = tuple(rank * heap_stride for rank in range(plan.num_ranks))
    errors = tuple(plan.num_ranks * heap_stride + rank * RECORD_BYTES for rank in range(plan.num_ranks))
    at = errors[-1] + RECORD_BYTES
    tensors = []
    for size in block_bytes:
        ranks = []
        for _ in range(plan.num_ranks):
            offsets: list[int] = []
            read: dict[str, int] = {}
            for tensor in plan.moves.tensors:
                shared = in_place and tensor.access is Access.WRITE and tensor.name in plan.moves.alias_safe
                if shared and tensor.name in read:
                    offsets.append(read[tensor.name])
                    continue
                at = _round_up(at + GUARD_BYTES, 16) + shift
                read.setdefault(tensor.name, at)
                offsets.append(at)
                at += tensor_bytes(tensor, size)
            ranks.append(tuple(offsets))
        tensors.append(tuple(ranks))
    return Layout(heaps, errors, tuple(tensors), _round_up(at + GUARD_BYTES, 4096))


def _map_file(path: Path, size: int) -> mmap.mmap:
    """A file of zeros, mapped; pages that nobody touches take no room."""
    with path.open("w+b") as file:
        file.truncate(size)
        return mmap.mmap(file.fileno(), size)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


class Arena:
    """The memory itself: anonymous for ranks of this process, a file for ranks in others. A context manager."""

    def __init__(self, plan: Plan, where: Layout, block_bytes: Sequence[int], path: Path | None) -> None:
        self.plan = plan
        self.where = where
        self.block_bytes = block_bytes
        self._map = mmap.mmap(-1, where.size) if path is None else _map_file(path, where.size)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        del self._bytes
        self._map.close()

    @property
    def address(self) -> int:
        """Where this process sees the arena."""
        return int(self._bytes.ctypes.data)

    def fill(self, call: int, inputs: Inputs) -> None:
        """The tensors of one call: what is read, and a pattern where results go; the pattern of guards around both."""
        for rank, offsets in enumerate(self.where.tensors[call]):
            for tensor, at in zip(self.plan.moves.tensors, offsets, strict=True):
                size = tensor_bytes(tensor, self.block_bytes[call])
                self._bytes[at - GUARD_BYTES : at] = GUARD
                self._bytes[at + size : at + size + GUARD_BYTES] = GUARD
                if tensor.access is Access.READ:
                    self._bytes[at : at + size] = np.ascontiguousarray(inputs[tensor.name][rank]).view(np.uint8)
                elif offsets.count(at) == 1:
                    self._bytes[at : at + size] = UNWRITTEN

    def set_first_round(self, first: int) -> None:
        """Counters and flags as they stand after `first` rounds."""
        plan = self.plan
        for rank, heap in enumerate(self.where.heaps):
            flags = self._words(heap, plan.moves.lanes * plan.num_ranks).reshape(plan.moves.lanes, plan.num_ranks, 8)
            raised = [first * int(count) % 2**64 for count in plan.moves.signals_per_round[:, rank]]
            flags[:, :, 0] = np.array(raised, dtype=np.uint64)
            self._words(heap + plan.moves.flags_bytes, plan.moves.lanes).reshape(plan.moves.lanes, 8)[:, :2] = first

    def _words(self, at: int, lines: int) -> NDArray[np.uint64]:
        return self._bytes[at : at + lines * 64].view(np.uint64)

    def arguments(
        self, base: int, ranks: Sequence[int], launches: Sequence[Launch], timeout: float, average: bool
    ) -> bytes:
        """The packed Args of all calls of some ranks (calls x ranks), as seen from `base`."""
        heaps = [base + heap for heap in self.where.heaps]
        layout = arguments(self.plan)
        packed = [
            layout.pack(
                {
                    "heap": heaps,
                    "tensors": [base + at for at in offsets[rank]],
                    "timeout_ns": int(timeout * 1e9),
                    "error": base + self.where.errors[rank],
                    "rank": rank,
                    **launch.arguments(average),
                }
            )
            for offsets, launch in zip(self.where.tensors, launches, strict=True)
            for rank in ranks
        ]
        return b"".join(packed)

    def records(self) -> list[ErrorRecord | None]:
        """What the ranks reported, in rank order."""
        return [unpack(self._bytes[at : at + RECORD_BYTES].tobytes()) for at in self.where.errors]

    def output(self, call: int, rank: int, tensor: int, storage: np.dtype[np.generic]) -> Array:
        """A copy of one tensor after a run; InternalError if a guard beside it was overwritten."""
        at = self.where.tensors[call][rank][tensor]
        size = tensor_bytes(self.plan.moves.tensors[tensor], self.block_bytes[call])
        around = (self._bytes[at - GUARD_BYTES : at], self._bytes[at + size : at + size + GUARD_BYTES])
        if any((guard != GUARD).any() for guard in around):
            raise InternalError(f"the kernel wrote beside `{self.plan.moves.tensors[tensor].name}` of rank {rank}")
        return np.frombuffer(self._bytes[at : at + size].tobytes(), dtype=storage)
