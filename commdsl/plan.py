"""What is launched: per-rank tables of operations, where their operands lie, which flags they await and raise.

Assumes nothing of the schedule. Does not derive synchronization (`lower`) and does not prove it
(`checks.synchronization`).

**Who runs.** `lanes` lanes, a lane is one thread block that owns one slice of every chunk, with flags of its own. Each
lane of each rank runs its rank's operations in order, once per *round*; a round moves at most `tile_bytes` of every
slice, so a big tensor takes several rounds and the symmetric memory does not depend on the tensor. Rounds are numbered
on through all calls by a counter in device memory.

**Where data lies.** A *tensor* is user memory of the rank itself (an `inout` buffer is two tensors: the one read, the
one written; they may be the same memory). A *cell* is symmetric memory of one tile per lane, reachable from every rank;
round n uses copy n % rotation of all cells. Cell c of rank r, lane l: heap[r] + cells_offset + (((n % rotation) *
num_cells + c) * lanes + l) * tile_bytes.

**Size classes.** Every operation moves one chunk: piece `piece` of a block cut into `cut`. With u = ceil(block_bytes /
16), the piece is the bytes [16 * (u * piece // cut), min(16 * (u * (piece + 1) // cut), block_bytes)) of its block.
Lane l of L active lanes owns [min(l * q, n), min((l + 1) * q, n)) of a chunk of n bytes, q = 16 * ceil(ceil(n / 16) /
L).

**Synchronization.** flags[lane][a] on rank b is written by rank a only, and only grows: a's k-th signal to b in round n
stores n * signals_per_round[a, b] + k (k from 1). A wait by b on a with ordinal k and rounds_back d is over when the
flag is at least (n - d) * signals_per_round[a, b] + k, compared as a signed difference of 64-bit numbers. Every
operation: its waits, a block barrier if it has waits or `barrier`, its body, then if it has signals a block barrier and
the signals, released at system scope.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray

from commdsl.ir import Ints
from commdsl.source import Span

CELL = -1
"""The space of a location in symmetric memory; a space of 0 or more is a tensor."""


class OpKind(IntEnum):
    COPY = 0  # dest = source
    REDUCE = 1  # dest = sources combined in order, accumulated in float32 (integers: as they are), rounded once
    SCALE = 2  # dest = source, divided by num_ranks when the reduction is `avg`; source may be dest


class Protocol(Enum):
    """How data and flag travel. Packet and copy engine have their place here when the emitter speaks them."""

    BULK = "bulk"  # 16-byte vectors, then one release flag


class Transport(Enum):
    PEER = "peer"  # plain loads and stores through peer pointers
    NVSHMEM = "nvshmem"  # NVSHMEM puts, gets and signals for every peer, also those on NVLink


class Access(Enum):
    READ = "read"
    WRITE = "write"


class Reason(IntEnum):
    """Why a wait is there: the hazard it orders."""

    READ_AFTER_WRITE = 0
    WRITE_AFTER_READ = 1
    WRITE_AFTER_WRITE = 2


@dataclass(frozen=True, slots=True)
class Tensor:
    """User memory of a rank: `blocks` equal blocks, each cut into `cut` chunks. All yields are one WRITE tensor."""

    name: str
    access: Access
    blocks: int
    cut: int
    is_yield: bool = False


@dataclass(frozen=True, eq=False)
class Ops:
    """Struct of arrays, sorted by rank, then program order. int32 throughout.

    Operand tables are flat with `*_begin` of length num_ops + 1.
    """

    rank_begin: Ints  # (num_ranks + 1,): ops of rank r are rank_begin[r] .. rank_begin[r + 1]
    kind: Ints  # OpKind
    cut: Ints  # size class
    piece: Ints
    barrier: Ints  # 1: block barrier first, as it touches what an earlier op of this lane touched
    dest_space: Ints
    dest_rank: Ints
    dest_index: Ints  # tensor: flat chunk; cell: cell number
    source_begin: Ints  # into source_*
    source_space: Ints
    source_rank: Ints
    source_index: Ints
    wait_begin: Ints  # into wait_*
    wait_peer: Ints
    wait_ordinal: Ints  # from 1
    wait_rounds_back: Ints
    wait_reason: Ints  # Reason
    signal_begin: Ints  # into signal_peer
    signal_peer: Ints
    origin: Ints  # into Plan.origins

    @property
    def num_ops(self) -> int:
        return len(self.kind)


@dataclass(frozen=True, slots=True)
class Origin:
    """The statement an operation comes from and the loop around it; `note` is what the compiler added ("stage in")."""

    span: Span = field(compare=False, repr=False)
    bindings: tuple[tuple[str, int], ...]
    step: int
    note: str = ""

    def __str__(self) -> str:
        where = ", ".join(f"{name} = {value}" for name, value in self.bindings)
        return f"{self.span}" + (f" ({where})" if where else "") + (f" [{self.note}]" if self.note else "")


@dataclass(frozen=True, eq=False)
class Plan:
    name: str
    num_ranks: int
    params: tuple[tuple[str, int], ...]
    topology: str
    contract: str  # the first contract's name: "allreduce", ...
    has_reduction: bool  # False: the kernel moves bytes and has no element type
    tensors: tuple[Tensor, ...]
    num_cells: int
    rotation: int
    lanes: int
    threads: int
    tile_bytes: int
    protocol: Protocol
    ops: Ops
    signals_per_round: NDArray[np.int32]  # (num_ranks, num_ranks): [a, b] signals from a to b
    origins: tuple[Origin, ...]
    alias_safe: tuple[str, ...]  # inout buffers whose read and written tensor may be the same memory

    @property
    def flags_bytes(self) -> int:
        """Per lane: one 64-byte line per source rank."""
        return self.lanes * self.num_ranks * 64

    @property
    def state_bytes(self) -> int:
        """Per lane: one 64-byte line: rounds done, and the rounds entered (read by peers after a time-out)."""
        return self.lanes * 64

    @property
    def cells_offset(self) -> int:
        return -(-(self.flags_bytes + self.state_bytes) // 4096) * 4096

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory per rank."""
        return self.cells_offset + self.rotation * self.num_cells * self.lanes * self.tile_bytes
