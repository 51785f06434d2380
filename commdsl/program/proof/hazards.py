"""Turns a Plan's operands into hazards: pairs of accesses to one place that must happen in one order.

Assumes a Plan that `verify` passed and a run that was not stuck. A chunk of a tensor is a place as a cell is, whoever
writes it. Does not judge whether a pair is ordered (`order` does), nor look at tensors that are only read: nobody
writes them. An `inout` buffer is two tensors; what follows if these are one memory is found by `clobbers`.

Sorted by place and then by the run, the accesses of a place are a sequence. Its hazards are each access with the last
write before it, and each read with the next write after it; across rounds, what follows the last write of a round with
the first write of the next round on the same copy. If these pairs are ordered, all pairs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.language.diagnostics import InternalError
from commdsl.program.memory import Rights
from commdsl.program.moves import CELL, Moves
from commdsl.program.proof.clocks import Run
from commdsl.program.proof.order import Hazards, Longs
from commdsl.program.proof.timeline import Timeline

SLICE = 1 << 20
"""Accesses looked at at once; it bounds memory."""


@dataclass(frozen=True, eq=False)
class Accesses:
    """Accesses, sorted by place, then as the run has them; an operation reads before it writes."""

    place: Longs  # rank * places per rank + cell, or further on a chunk of a tensor
    op: Ints  # the first of its group, as a group reads and writes as one
    write: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Reads:
    """Reads of a place, and the write whose data they see: -1 if there is none before in the round."""

    op: Ints
    writer: Ints
    place: Longs


def places_per_rank(moves: Moves) -> int:
    """Cells, then the chunks of the tensors that are written; at least 1."""
    return max(moves.num_cells + sum(t.blocks * t.cut for t in moves.tensors if t.access is not Rights.READ), 1)


def place_name(moves: Moves, place: int) -> str:
    """The place as a message calls it."""
    rank, index = divmod(place, places_per_rank(moves))
    if index < moves.num_cells:
        return f"cell {index} of rank {rank}"
    index -= moves.num_cells
    for tensor in moves.tensors:
        if tensor.access is not Rights.READ:
            if index < tensor.blocks * tensor.cut:
                return f"chunk {index} of `{tensor.name}` on rank {rank}"
            index -= tensor.blocks * tensor.cut
    raise InternalError(f"place {place} is beyond the last tensor of the Plan")


def _offsets(moves: Moves) -> Longs:
    """Per space, its first place within a rank; -1 if its accesses cannot conflict. The last entry is CELL."""
    offset = np.full(len(moves.tensors) + 1, -1, np.int64)
    offset[CELL] = 0
    size = moves.num_cells
    for number, tensor in enumerate(moves.tensors):
        if tensor.access is not Rights.READ:
            offset[number] = size
            size += tensor.blocks * tensor.cut
    return offset


def touched(moves: Moves, op: int) -> tuple[frozenset[int], frozenset[int]]:
    """The places the group that begins with an operation writes, and those it reads."""
    ops, offset, per_rank = moves.ops, _offsets(moves), places_per_rank(moves)
    group = np.flatnonzero(ops.leader_of == op)
    dest = ops.dest_rank[group] * np.int64(per_rank) + offset[ops.dest_space[group]] + ops.dest_index[group]
    row = slice(ops.source_begin[op], ops.source_begin[op + 1])
    offsets = offset[ops.source_space[row]]
    source = ops.source_rank[row] * np.int64(per_rank) + offsets + ops.source_index[row]
    return frozenset(dest.tolist()), frozenset(source[offsets >= 0].tolist())


def accesses(moves: Moves, events: Timeline, order: Run) -> Iterator[Accesses]:
    """Every access to a cell, and to a tensor that is written, in slices of whole places.

    An access is one word: place, batch, number in the program, actor, write. Sorting and taking words apart again needs
    a third of the time and memory of sorting an index.
    """
    batches = 1 if order.batch is events.local else int(order.batch.max(initial=0)) + 1
    length, actors = int(events.lengths.max(initial=1)) + 1, len(events.lengths)
    if moves.num_ranks * places_per_rank(moves) * batches * length * actors * 2 >= 1 << 63:
        raise InternalError(f"the Plan of `{moves.name}` is too large to be proved")
    words = _words(moves, events, order, batches, length)
    words.sort()
    start, size = 0, batches * length * actors * 2
    while start < len(words):
        stop = len(words)
        if start + SLICE < stop:  # up to the end of the place that the slice ends in
            stop = int(np.searchsorted(words, (words[start + SLICE] // size + 1) * size))
        rest, write = np.divmod(words[start:stop], 2)
        rest, actor = np.divmod(rest, actors)
        rest, local = np.divmod(rest, length)
        yield Accesses(rest // batches, (events.begin[actor] + local).astype(np.int32), write.astype(np.bool_))
        start = stop


def _words(moves: Moves, events: Timeline, order: Run, batches: int, length: int) -> Longs:
    ops, offset, per_rank = moves.ops, _offsets(moves), places_per_rank(moves)
    reader = np.repeat(np.arange(ops.num_ops, dtype=np.int32), np.diff(ops.source_begin))
    reads = np.flatnonzero(offset[ops.source_space] >= 0)
    leader = ops.leader_of
    words = np.empty(len(reads) + ops.num_ops, np.int64)
    halves: tuple[tuple[Longs, Ints, Ints, Ints, Ints], ...] = (
        (words[: len(reads)], reader[reads], ops.source_space[reads], ops.source_rank[reads], ops.source_index[reads]),
        (words[len(reads) :], leader, ops.dest_space, ops.dest_rank, ops.dest_index),
    )
    for write, (half, op, space, rank, index) in enumerate(halves):
        half[:] = rank
        half *= per_rank
        half += offset[space]
        half += index
        half *= batches
        if batches > 1:
            half += order.batch[op]
        half *= length
        half += events.local[op]
        half *= len(events.lengths)
        half += events.actor[op]
        half *= 2
        half += write
    return words


def hazards(found: Accesses, moves: Moves) -> tuple[Hazards, Reads]:
    """The pairs that must be ordered, of different operations; and which write every read sees."""
    size = len(found.op)
    place = np.arange(size, dtype=np.int32)
    opens = np.concatenate(([True], found.place[1:] != found.place[:-1]))[:size]
    closes = np.concatenate((opens[1:], [True]))[:size]
    begin = np.maximum.accumulate(np.where(opens, place, np.int32(0)))
    end = np.minimum.accumulate(np.where(closes, place, np.int32(size))[::-1])[::-1]
    none = np.array([-1], np.int32)
    before = np.concatenate((none, np.maximum.accumulate(np.where(found.write, place, np.int32(-1)))))[:size]
    before[before < begin] = -1
    upcoming = np.minimum.accumulate(np.where(found.write, place, np.int32(size))[::-1])[::-1]
    opening = upcoming[begin]  # the first write of the place; beyond its end if it has none
    after = np.concatenate((upcoming[1:], none + np.int32(size + 1)))[:size]
    final = after > end
    # Read or write after write; write after read; and what is last in a round with the first write of a later one.
    follows = np.flatnonzero(before >= 0)
    precedes = np.flatnonzero(~found.write & ~final)
    is_cell = found.place % places_per_rank(moves) < moves.num_cells
    trailing = np.flatnonzero(final & (opening <= end) & is_cell)
    first = found.op[np.concatenate((before[follows], precedes, trailing))]
    second = found.op[np.concatenate((follows, after[precedes], opening[trailing]))]
    across = np.arange(len(first)) >= len(follows) + len(precedes)
    keep = np.flatnonzero((first != second) | across)
    reads = np.flatnonzero(~found.write)
    writer = np.where(before[reads] >= 0, found.op[before[reads]], np.int32(-1))
    return Hazards(first[keep], second[keep], across[keep]), Reads(found.op[reads], writer, found.place[reads])


def clobbers(moves: Moves) -> tuple[Hazards, Ints]:
    """Where an `inout` buffer is one memory: every read of what came in, with the first write over it on that rank.

    Beside each the number of the buffer in `alias_safe`.
    """
    ops = moves.ops
    reader = np.repeat(np.arange(ops.num_ops, dtype=np.int32), np.diff(ops.source_begin))
    none = np.zeros(0, np.int32)
    first, second, which = [none], [none], [none]
    for number, name in enumerate(moves.alias_safe):
        tensors = {tensor.access: space for space, tensor in enumerate(moves.tensors) if tensor.name == name}
        tensor = moves.tensors[tensors[Rights.READ]]
        chunks = tensor.blocks * tensor.cut
        writes = np.flatnonzero(ops.dest_space == tensors[Rights.WRITE]).astype(np.int32)
        opening = np.full(moves.num_ranks * chunks, -1, np.int32)
        # Backwards, so that what is left is the first.
        place = ops.dest_rank[writes].astype(np.int64) * chunks + ops.dest_index[writes]
        opening[place[::-1]] = ops.leader_of[writes][::-1]
        reads = np.flatnonzero(ops.source_space == tensors[Rights.READ])
        writer = opening[ops.source_rank[reads].astype(np.int64) * chunks + ops.source_index[reads]]
        keep = (writer >= 0) & (writer != reader[reads])
        first.append(reader[reads[keep]])
        second.append(writer[keep])
        which.append(np.full(int(keep.sum()), number, np.int32))
    pairs = Hazards(np.concatenate(first), np.concatenate(second), np.zeros(sum(map(len, first)), np.bool_))
    return pairs, np.concatenate(which)
