"""The phase `Moves`: per-rank tables of operations, where their operands lie, which flags they await and raise.

Assumes nothing of the schedule. Does not derive synchronization (`lower`) and does not prove it
(`program.proof`).

**Who runs.** `lanes` lanes, a lane is `threads` threads that own one slice of every chunk, with flags of their own.
Lane l is part of thread block l % sms; a block has one SM, and its lanes hide each other's waits. Each
lane of each rank runs its rank's operations in order, once per *round*; a round moves at most `tile_bytes` of every
slice, so a big tensor takes several rounds and the symmetric memory does not depend on the tensor. Rounds are numbered
on through all calls by a counter in device memory.

**Where data lies.** A *tensor* is user memory of the rank itself (an `inout` buffer is two tensors: the one read, the
one written; they may be the same memory). A *cell* is symmetric memory of one tile per lane, reachable from every rank;
round n uses copy n % rotation of all cells. Cell c of rank r, lane l: heap[r] + cells_offset + (((n % rotation) *
num_cells + c) * lanes + l) * slot_bytes. A tensor that *lands* is of the rank, too, but in symmetric memory, on each
rank as far behind landing[rank]: peers copy chunks there, in each round between two operations of the owner that HOLD
the chunk, and do nothing: the first opens it, the second takes what came.

A tensor that *is a sum* has float32 where the others have what is moved, bfloat16 it may be. A rank adds what it has to
what it has there, whole blocks; between ranks nothing of it moves, and nothing of it is in cells. Bytes are those of
the others everywhere; a sum's are as many times more as its elements are wider.

**Casts.** Where values travel in another element type, an operand has a `Form`. A cell that is CAST holds a chunk as it
travels: of float8 first a byte for each element, in an order of the kernels' own, then a float32 scale for each stretch
of them. Whoever stores there rounds; whoever reads there widens; from one such cell to another bytes go as they are.
What is ROUNDED lies in the caller's type, in which it is read or stored, and is what it would be had it travelled.
Stretches are counted from the start of a chunk, so slices, and what a round moves of them, are whole units: a stretch
of the widest elements, not 16 bytes.

**Size classes.** Every operation moves one chunk: piece `piece` of a block cut into `cut`. With u = ceil(block_bytes /
16), the piece is the bytes [16 * (u * piece // cut), min(16 * (u * (piece + 1) // cut), block_bytes)) of its block.
Lane l of L active lanes owns [min(l * q, n), min((l + 1) * q, n)) of a chunk of n bytes; q = 16 * ceil(ceil(m / 16) /
L), where m is the largest chunk that any operation moves: one q for all, so that a lane's rounds are as long in every
operation.

**Lengths.** Where blocks have lengths of their own, an operation's block has one of those that its rank knows, and a
lane owns an equal share of each chunk. Ranks that all know all of them have as many rounds as the longest takes. A rank
that knows those of its pairs alone begins with as many as the longest of these takes, one at least: in the first round
of a call the data in every cell has a *head*, the length of the block, for the reader to hold against its own, and the
rounds that the sender knows of. Every rank reads a cell of every other one in a round, so behind the first they all
have as many as whoever needs most. A head is part of its cell: what orders the one orders the other.

**Groups.** An operation that is `joined` stores the value of the operation before it once more, somewhere else: both
are one pass over the sources. Its sources are those of the first of its group, which alone waits, and the last of a
group alone signals. All bodies of a group count as one.

**Averages.** In an `avg` a chunk that holds n contributions is their sum divided by d(n): by n where a contract sums n,
else by the least power of two that is not less. So a result is a mean, and what travels is the sum to the bit, scaled
to be no larger than what was given. An operation multiplies each source by its `weight`, d of the source, and divides
the sum by `whole`, d of the result; both in lowest terms.

**Protocols.** In `bulk` a cell holds a tile, and flags order every hazard. In `packet` and `line` the data of every
cell carries its flag (the round's number), so a read waits for the data itself; every cell is written at most once a
round; flags are left for what no data tells: that a cell is free again. `tma` is `bulk` in every table and every byte
of memory; on a GPU one thread of a lane moves what is aligned through the lane's part of shared memory. `engine` is
`bulk` with one lane and no reduction: a GPU's copy engine makes the copies, and only flags take a kernel
(`runtime.phases` says in which order).

**Synchronization.** flags[lane][a] on rank b is written by rank a only, and only grows: a's k-th signal to b in round n
stores n * signals_per_round[a, b] + k (k from 1). A wait by b on a with ordinal k and rounds_back d is over when the
flag is at least (n - d) * signals_per_round[a, b] + k, compared as a signed difference of 64-bit numbers. Every
operation: its waits, a block barrier if it has waits or `barrier`, its body, then if it has signals a block barrier and
the signals, released at system scope. Where the rank has `tasks.Tiles` beside its moves, they are peer `num_ranks`: one
more flag a lane, and one more row of signals_per_round, in which column b is what the tiles of rank b raise for it.
"""

from __future__ import annotations

from dataclasses import field
from enum import IntEnum
from functools import cached_property
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.lengths import Lengths
from commdsl.ir.schedules import Cast, Ints
from commdsl.language.records import dataclass
from commdsl.language.source import Span
from commdsl.machine.carriers import Carrier
from commdsl.program.memory import Tensor

UNIT = 16
"""Bytes of a vector: chunks but the last of a block are multiples of it."""

HEAD_BYTES = 128
"""In front of data in a cell, where there are heads, as kHeadBytes in types.cuh: a line, so that data begins one."""

CELL = -1
"""The space of a location in symmetric memory; a space of 0 or more is a tensor."""


class OpKind(IntEnum):
    COPY = 0  # dest = source
    REDUCE = 1  # dest = sources combined in order (`avg`: weighed), in float32 (integers: as they are), rounded once
    ADD = 2  # as REDUCE, whatever the reduction of the call: the sum of the sources,
    MULTIPLY = 3  # their product,
    MAX = 4  # the largest of them,
    MIN = 5  # the least
    HOLD = 6  # nothing: a chunk of the rank's own that lands is in its hands, as it was found or, as a source, as put


KIND_OF = MappingProxyType({"sum": OpKind.ADD, "prod": OpKind.MULTIPLY, "max": OpKind.MAX, "min": OpKind.MIN})
"""The operations that a text may name."""


MOST_DESTS = 8
"""Operations in a group: places one pass stores its value to."""

MOST_CONTRIBUTIONS = 1 << 24
"""Of a chunk, as an `avg` counts them: float32 has every whole number up to it, and no contract so many ranks."""

MOST_THREADS = 1024
"""Threads of a block, whose lanes share them."""

STAGES = 8
"""Parts of a lane's shared memory that `tma` fills in turn: half of them may be on the way in, half on the way out."""

MOST_STAGE_BYTES = 16 * 1024
STAGE_MARKS_BYTES = 128
"""Of a lane's shared memory, in front of its stages: a word each that says whether it is full."""

BLOCK_SHARED_BYTES = 227 * 1024
"""What a block may have on an SM that knows `tma` (compute capability 9.0 and 10.0)."""


class Reason(IntEnum):
    """Why a wait is there: the hazard it orders."""

    READ_AFTER_WRITE = 0
    WRITE_AFTER_READ = 1
    WRITE_AFTER_WRITE = 2


class Form(IntEnum):
    """In what element type an operand is."""

    AS_IS = 0
    CAST = 1
    ROUNDED = 2


WIDEST = 4
"""Bytes of an element that travels in another type, at most."""


@dataclass(frozen=True, eq=False)
class Casts:
    """What values travel as, and of every operand its Form, in the order of the tables."""

    cast: Cast
    dest: Ints  # of each operation
    source: Ints  # of each source


@dataclass(frozen=True, eq=False)
class Ops:
    """Struct of arrays, sorted by rank, then program order. int32 throughout.

    Operand tables are flat with `*_begin` of length num_ops + 1.
    """

    rank_begin: Ints  # (num_ranks + 1,): ops of rank r are rank_begin[r] .. rank_begin[r + 1]
    kind: Ints  # OpKind
    cut: Ints  # size class
    piece: Ints
    length: Ints  # which length the block has; 0 where all are as long
    barrier: Ints  # 1: block barrier first, as it touches what an earlier op of this lane touched
    whole: Ints  # what an `avg` divides by after it has combined
    joined: Ints  # 1: stores the value of the operation before it once more; it has no sources of its own
    dest_space: Ints
    dest_rank: Ints
    dest_index: Ints  # tensor: flat chunk; cell: cell number
    source_begin: Ints  # into source_*
    source_space: Ints
    source_rank: Ints
    source_index: Ints
    source_weight: Ints  # what an `avg` multiplies it by before it combines
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

    @property
    def actor(self) -> Ints:
        """Of every operation the rank whose it is; behind the ranks come their tiles, where there are any."""
        return np.repeat(np.arange(len(self.rank_begin) - 1, dtype=np.int32), np.diff(self.rank_begin))

    @property
    def leaders(self) -> Ints:
        """The first operation of every group: what a lane executes as one."""
        return np.flatnonzero(self.joined == 0).astype(np.int32)

    @property
    def leader_of(self) -> Ints:
        """For each operation the first of its group."""
        own = np.where(self.joined == 0, np.arange(self.num_ops, dtype=np.int32), np.int32(0))
        return np.maximum.accumulate(own)


@dataclass(frozen=True, slots=True)
class Origin:
    """The statement an operation comes from and the loop around it; `note` is what the compiler added ("copy out")."""

    span: Span = field(compare=False, repr=False)
    bindings: tuple[tuple[str, int], ...]
    step: int
    note: str = ""

    def __str__(self) -> str:
        where = ", ".join(f"{name} = {value}" for name, value in self.bindings)
        return f"{self.span}" + (f" ({where})" if where else "") + (f" [{self.note}]" if self.note else "")


@dataclass(frozen=True, eq=False)
class Moves:
    """Static operations of a role's lanes, with the tensors and cells that they touch and the flags that order them."""

    name: str
    num_ranks: int
    has_reduction: bool  # False: the kernel moves bytes and has no element type
    tensors: tuple[Tensor, ...]
    num_cells: int
    rotation: int
    lanes: int
    sms: int  # thread blocks, one an SM; the lanes are spread over them
    threads: int  # of a lane
    tile_bytes: int  # of data, per lane and round
    carrier: Carrier
    ops: Ops
    signals_per_round: NDArray[np.int32]  # (num_ranks, or one more, num_ranks): [a, b] signals from a to b
    heard: NDArray[np.bool_]  # (num_ranks, num_ranks): [a, b] in every round a hears of b, if only through others
    origins: tuple[Origin, ...]
    alias_safe: tuple[str, ...]  # inout buffers whose read and written tensor may be the same memory
    casts: Casts | None = field(default=None, kw_only=True)

    @property
    def lanes_per_block(self) -> int:
        return -(-self.lanes // self.sms)

    @property
    def lengths(self) -> Lengths | None:
        """By what blocks are of lengths of their own, if they are."""
        return next((tensor.lengths for tensor in self.tensors if tensor.lengths is not None), None)

    @cached_property
    def least_cut(self) -> int:
        """Into how many chunks the blocks of the largest chunks are cut."""
        return int(self.ops.cut.min(initial=1 << 30))

    @property
    def has_heads(self) -> bool:
        """Whether a rank knows the lengths of its pairs alone, so that data in cells says how long its block is."""
        return self.lengths is not None and len(self.lengths.axes) == 2

    @property
    def lands(self) -> bool:
        """Whether peers put to any of its tensors."""
        return any(tensor.lands for tensor in self.tensors)

    @property
    def is_within(self) -> bool:
        """Whether the copy engine moves it, and on every rank alone: then it is the SMs of the GPU that do."""
        rank = np.repeat(np.arange(self.num_ranks), np.diff(self.ops.rank_begin))
        return not self.carrier.runs_on_sms and bool((self.ops.dest_rank == rank).all())

    @property
    def has_elements(self) -> bool:
        """Whether the kernel has an element type: it combines, or rounds."""
        return self.has_reduction or self.casts is not None

    @property
    def unit(self) -> int:
        """Bytes of which a lane's slices are multiples, but the last of a chunk."""
        return UNIT if self.casts is None else max(UNIT, self.casts.cast.stretch * WIDEST)

    @property
    def named(self) -> tuple[str, ...]:
        """The operations that the text names, whatever the call asks for."""
        found = {*self.ops.kind.tolist()}
        return tuple(name for name, kind in KIND_OF.items() if kind in found)

    @property
    def asks(self) -> bool:
        """Whether the call says how it reduces: not where the text names all operations."""
        return self.has_reduction and (not self.named or bool((self.ops.kind == OpKind.REDUCE).any()))

    @property
    def adds_up(self) -> bool:
        """Whether it adds to sums of another type, and does nothing else."""
        return any(tensor.is_sum for tensor in self.tensors)

    @property
    def slot_bytes(self) -> int:
        """What a tile takes in a cell."""
        words = -(-self.tile_bytes // self.carrier.payload_bytes)
        return words * self.carrier.word_bytes + (HEAD_BYTES if self.has_heads else 0)

    @property
    def stage_bytes(self) -> int:
        """One of a lane's stages in shared memory, in whole lines of 128 bytes."""
        share = BLOCK_SHARED_BYTES // self.lanes_per_block - STAGE_MARKS_BYTES
        return min(MOST_STAGE_BYTES, share // STAGES // 128 * 128)

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block on a GPU, an equal part for each of its lanes."""
        if not self.carrier.stages_in_shared:
            return 0
        return self.lanes_per_block * (STAGE_MARKS_BYTES + STAGES * self.stage_bytes)

    @property
    def flags_bytes(self) -> int:
        """Per lane: one 64-byte line per source rank, and one for the rank's own tiles."""
        return self.lanes * self.flags_per_lane * 64

    @property
    def flags_per_lane(self) -> int:
        return len(self.signals_per_round)

    @property
    def state_bytes(self) -> int:
        """Per lane: one 64-byte line: rounds done, those entered (read by peers after a time-out), given up, and those
        whose tiles are done.
        """
        return self.lanes * 64

    @property
    def cells_offset(self) -> int:
        return -(-(self.flags_bytes + self.state_bytes) // 4096) * 4096

    @property
    def symmetric_bytes(self) -> int:
        """Symmetric memory per rank."""
        return self.cells_offset + self.rotation * self.num_cells * self.lanes * self.slot_bytes
