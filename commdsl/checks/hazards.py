"""Turns a Plan's operands into hazards: pairs of accesses to one place that must happen in one order.

Assumes a Plan that `verify` passed and a run that was not stuck. Does not judge whether a pair is ordered
(`checks.synchronization` does), nor look at tensors that are only read (nobody writes them; an `inout` buffer is two
tensors, and whether these may be one memory is judged by `clobbered`).

Sorted by place and then by the run, the accesses of a place are a sequence. Its hazards are each access with the last
write before it, and each read with the next write after it; across rounds, what follows the last write of a round with
the first write of the next round on the same copy. If these pairs are ordered, all pairs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.clocks import Run, Timeline
from commdsl.diagnostics import InternalError
from commdsl.ir import Ints
from commdsl.plan import CELL, Access, Plan

Longs: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Accesses:
    """Accesses, sorted by place, then as the run has them; an operation reads before it writes."""

    place: Longs  # rank * places per rank + cell, or further on a chunk of a tensor
    op: Ints
    write: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Hazards:
    """Row i: operation `second[i]` must come after operation `first[i]`."""

    first: Ints
    second: Ints
    across: NDArray[np.bool_]  # `second` is meant in the next round that uses the same copy of the cells
    place: Longs
    first_writes: NDArray[np.bool_]
    second_writes: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Reads:
    """Reads of a place, and the write whose data they see: -1 if there is none before in the round."""

    op: Ints
    writer: Ints
    place: Longs


def places_per_rank(plan: Plan) -> int:
    """Cells, then the chunks of the tensors that are written; at least 1."""
    return max(plan.num_cells + sum(t.blocks * t.cut for t in plan.tensors if t.access is Access.WRITE), 1)


def place_name(plan: Plan, place: int) -> str:
    """The place as a message calls it."""
    rank, index = divmod(place, places_per_rank(plan))
    if index < plan.num_cells:
        return f"cell {index} of rank {rank}"
    index -= plan.num_cells
    for tensor in plan.tensors:
        if tensor.access is Access.WRITE:
            if index < tensor.blocks * tensor.cut:
                return f"chunk {index} of `{tensor.name}` on rank {rank}"
            index -= tensor.blocks * tensor.cut
    raise InternalError(f"place {place} is beyond the last tensor of the Plan")


def accesses(plan: Plan, events: Timeline, order: Run) -> Accesses:
    """Every access to a cell, and to a tensor that is written."""
    ops = plan.ops
    # Per space, the first place of it within a rank; -1 if its accesses cannot conflict. The last entry is CELL.
    offset = np.full(len(plan.tensors) + 1, -1, np.int64)
    offset[CELL] = 0
    size = plan.num_cells
    for number, tensor in enumerate(plan.tensors):
        if tensor.access is Access.WRITE:
            offset[number] = size
            size += tensor.blocks * tensor.cut
    reads = np.flatnonzero(offset[ops.source_space] >= 0)
    reader = np.repeat(np.arange(ops.num_ops, dtype=np.int32), np.diff(ops.source_begin))
    op = np.concatenate((reader[reads], np.arange(ops.num_ops, dtype=np.int32)))
    place = np.concatenate((ops.source_rank[reads], ops.dest_rank)).astype(np.int64)
    place *= places_per_rank(plan)
    place += np.concatenate((ops.source_index[reads], ops.dest_index))
    place += offset[np.concatenate((ops.source_space[reads], ops.dest_space))]
    write = np.arange(len(op)) >= len(reads)
    sequence = _sequence(place, op, write, events, order)
    return Accesses(place[sequence], op[sequence], write[sequence])


def _sequence(place: Longs, op: Ints, write: NDArray[np.bool_], events: Timeline, order: Run) -> Longs:
    length = int(events.lengths.max(initial=1)) + 1
    batches = int(order.batch.max(initial=0)) + 1
    if order.batch is events.local:
        batches = 1  # the batch says no more than the place in the program
    last = int(place.max(initial=0)) + 1
    if last * batches * length * 2 >= 1 << 62:
        return np.lexsort((write, events.local[op], order.batch[op], place))
    key = place.copy()
    if batches > 1:
        key *= batches
        key += order.batch[op]
    key *= length * 2
    key += events.local[op].astype(np.int64) * 2 + write
    return np.argsort(key)


def hazards(found: Accesses, plan: Plan) -> tuple[Hazards, Reads]:
    """The pairs that must be ordered, of different operations; and which write every read sees."""
    size = len(found.op)
    place = np.arange(size, dtype=np.int32)
    opens = np.concatenate(([True], found.place[1:] != found.place[:-1]))[:size]
    begin = np.maximum.accumulate(np.where(opens, place, 0))
    closes = np.concatenate((opens[1:], [True]))[:size]
    end = np.minimum.accumulate(np.where(closes, place, size)[::-1])[::-1]
    last = np.maximum.accumulate(np.where(found.write, place, -1))
    before = np.concatenate(([-1], last[:-1])).astype(np.int32)[:size]
    before[before < begin] = -1
    upcoming = np.minimum.accumulate(np.where(found.write, place, size)[::-1])[::-1]
    after = np.concatenate((upcoming[1:], [size])).astype(np.int32)[:size]
    opening = upcoming[begin]  # the first write of the place; beyond its end if it has none
    final = after > end
    # Read or write after write; write after read; and what is last in a round with the first write of a later one.
    follows = np.flatnonzero(before >= 0)
    precedes = np.flatnonzero(~found.write & ~final)
    is_cell = found.place % places_per_rank(plan) < plan.num_cells
    trailing = np.flatnonzero(final & (opening <= end) & is_cell)
    earlier = np.concatenate((before[follows], precedes, trailing))
    later = np.concatenate((follows, after[precedes], opening[trailing]))
    first, second = found.op[earlier], found.op[later]
    across = np.arange(len(first)) >= len(follows) + len(precedes)
    keep = np.flatnonzero((first != second) | across)
    earlier, later = earlier[keep], later[keep]
    reads = np.flatnonzero(~found.write)
    writer = np.where(before[reads] >= 0, found.op[before[reads]], -1).astype(np.int32)
    pairs = Hazards(
        first[keep], second[keep], across[keep], found.place[earlier], found.write[earlier], found.write[later]
    )
    return pairs, Reads(found.op[reads], writer, found.place[reads])


def clobbers(plan: Plan) -> Hazards:
    """Where an `inout` buffer is one memory: every read of what came in, with the first write over it on that rank.

    `place` numbers the buffers in `alias_safe`.
    """
    ops = plan.ops
    reader = np.repeat(np.arange(ops.num_ops, dtype=np.int32), np.diff(ops.source_begin))
    first, second, which = [], [], []
    for number, name in enumerate(plan.alias_safe):
        tensors = {tensor.access: space for space, tensor in enumerate(plan.tensors) if tensor.name == name}
        tensor = plan.tensors[tensors[Access.READ]]
        chunks = tensor.blocks * tensor.cut
        writes = np.flatnonzero(ops.dest_space == tensors[Access.WRITE]).astype(np.int32)
        opening = np.full(plan.num_ranks * chunks, -1, np.int32)
        # Backwards, so that what is left is the first.
        opening[(ops.dest_rank[writes].astype(np.int64) * chunks + ops.dest_index[writes])[::-1]] = writes[::-1]
        reads = np.flatnonzero(ops.source_space == tensors[Access.READ])
        writer = opening[ops.source_rank[reads].astype(np.int64) * chunks + ops.source_index[reads]]
        keep = (writer >= 0) & (writer != reader[reads])
        first.append(reader[reads[keep]])
        second.append(writer[keep])
        which.append(np.full(int(keep.sum()), number, np.int64))
    none = np.zeros(0, np.int32)
    pairs = np.concatenate((none, *first)), np.concatenate((none, *second))
    never = np.zeros(len(pairs[0]), np.bool_)
    return Hazards(*pairs, never, np.concatenate((none, *which)), never, ~never)
