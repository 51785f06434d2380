"""Turns a checked schedule into a Plan: operations placed, ordered by flags, laid out as tables.

Assumes the checks on the schedule have passed. Does not print text (`emit`) and does not prove the flags
(`checks.synchronization` does, on the Plan it returns).
"""

from __future__ import annotations

import numpy as np

from commdsl.ir import Ints, Schedule, Step
from commdsl.ordering import Ordered, Program, order, program
from commdsl.placement import Placed, place
from commdsl.plan import Access, Ops, Plan, Protocol, Tensor, Transport
from commdsl.syntax import BufferKind, MoveKind

# Measured on 4 H200s over ten schedules at 16 and 64 MB: fewer lanes leave links idle while a lane awaits a flag, more
# threads a block or larger tiles gain nothing. The tuner's table will choose by size.
LANES = 128
THREADS = 256
TILE_BYTES = 128 * 1024
SYMMETRIC_BYTES = 256 * 1024 * 1024  # what the cells may take when `tune` does not set the tile
SMALLEST_TILE = 4 * 1024


def lower(schedule: Schedule, transport: Transport = Transport.PEER) -> Plan:
    """The Plan of one schedule for its rank count; one for NVSHMEM also runs through peer pointers, with the same bits."""
    placed = place(schedule, transport)
    steps = program(placed.rows.rank, placed.rows.phase, schedule.num_ranks)
    ordered = order(placed, steps, schedule.num_ranks)
    ops, signals = _tables(placed, steps, ordered, schedule.num_ranks)
    lanes = _lanes(schedule)
    return Plan(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        params=schedule.params,
        topology=schedule.topology.name,
        contract=schedule.contracts[0].name,
        has_reduction=_has_reduction(schedule),
        tensors=placed.tensors,
        num_cells=placed.num_cells,
        rotation=ordered.rotation,
        lanes=lanes,
        threads=schedule.tuning.threads or THREADS,
        tile_bytes=schedule.tuning.tile_bytes or _tile_bytes(placed.num_cells * ordered.rotation * lanes),
        protocol=Protocol(schedule.tuning.protocol or "bulk"),
        ops=ops,
        signals_per_round=signals,
        origins=placed.origins,
        alias_safe=tuple(_alias_safe(placed, steps, schedule)),
    )


def _has_reduction(schedule: Schedule) -> bool:
    steps = (step for step in schedule.steps if isinstance(step, Step))
    return any(moves.kind is MoveKind.REDUCE for step in steps for moves in step.moves)


def _lanes(schedule: Schedule) -> int:
    """A role of k SMs runs k lanes, one block an SM; otherwise what `tune` says, or the default where the SMs allow it."""
    for roles in schedule.roles:
        for name, first, last in roles.roles:
            if name == schedule.role:
                return last - first
    return schedule.tuning.lanes or min(LANES, schedule.topology.num_sms)


def _tile_bytes(tiles: int) -> int:
    """The largest power of two that keeps the cells within their budget."""
    tile = TILE_BYTES
    while tile > SMALLEST_TILE and tile * tiles > SYMMETRIC_BYTES:
        tile //= 2
    return tile


def _tables(placed: Placed, steps: Program, ordered: Ordered, num_ranks: int) -> tuple[Ops, Ints]:
    rows, rank_begin, place = placed.rows, steps.begin, steps.place

    def laid_out(values: Ints) -> Ints:
        """A column with the ranks end to end."""
        column = np.empty(len(place), np.int32)
        column[place] = values
        return column

    counts = np.diff(rows.source_begin)
    source_begin = _begins(laid_out(counts))
    to = np.repeat(source_begin[place] - rows.source_begin[:-1], counts) + np.arange(source_begin[-1], dtype=np.int32)

    def sources_laid_out(values: Ints) -> Ints:
        column = np.empty(len(to), np.int32)
        column[to] = values
        return column

    waits, signal_begin, signal_peer, per_round = _flags(ordered, rank_begin, num_ranks)
    ops = Ops(
        rank_begin=rank_begin,
        kind=laid_out(rows.kind),
        cut=laid_out(rows.cut),
        piece=laid_out(rows.piece),
        barrier=laid_out(steps.turn == 0),
        dest_space=laid_out(rows.dest_space),
        dest_rank=laid_out(rows.dest_rank),
        dest_index=laid_out(rows.dest_index),
        source_begin=source_begin,
        source_space=sources_laid_out(rows.source_space),
        source_rank=sources_laid_out(rows.source_rank),
        source_index=sources_laid_out(rows.source_index),
        **waits,
        signal_begin=signal_begin,
        signal_peer=signal_peer,
        origin=laid_out(rows.origin),
    )
    return ops, per_round


def _begins(counts: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _flags(ordered: Ordered, rank_begin: Ints, num_ranks: int) -> tuple[dict[str, Ints], Ints, Ints, Ints]:
    """Waits and signals as tables: every awaited (operation, waiting rank) is one signal, numbered per pair of ranks."""
    waits = ordered.waits
    raised_after = rank_begin[waits.peer] + waits.number
    key = raised_after.astype(np.int64) * num_ranks + waits.rank
    signals, signal_of_wait = np.unique(key, return_inverse=True)
    after, to = signals // num_ranks, signals % num_ranks
    sender = np.searchsorted(rank_begin, after, side="right") - 1
    pair = np.lexsort((after, to, sender))
    ordinal = np.empty(len(signals), np.int32)
    same = sender[pair] * num_ranks + to[pair]
    starts = np.concatenate([[True], same[1:] != same[:-1]]) if len(same) else np.zeros(0, np.bool_)
    place = np.arange(len(same))
    ordinal[pair] = place - np.maximum.accumulate(np.where(starts, place, 0)) + 1 if len(same) else place
    per_round = np.zeros((num_ranks, num_ranks), np.int32)
    np.add.at(per_round, (sender, to), 1)
    in_order = np.argsort(waits.op.astype(np.int64) * num_ranks + waits.peer, kind="stable")
    num_ops = int(rank_begin[-1])
    tables = {
        "wait_begin": _begins(np.bincount(waits.op, minlength=num_ops)),
        "wait_peer": waits.peer[in_order],
        "wait_ordinal": ordinal[signal_of_wait][in_order],
        "wait_rounds_back": waits.back[in_order],
        "wait_reason": waits.reason[in_order],
    }
    return tables, _begins(np.bincount(after, minlength=num_ops)), to.astype(np.int32), per_round


def _alias_safe(placed: Placed, steps: Program, schedule: Schedule) -> list[str]:
    """Inout buffers none of whose chunks is read as it came in after it was written as it goes out."""
    safe = []
    for buffer in schedule.buffers:
        if buffer.kind is not BufferKind.INOUT:
            continue
        read, write = (_tensor(placed.tensors, buffer.name, access) for access in (Access.READ, Access.WRITE))
        last_read = np.full((schedule.num_ranks, buffer.num_chunks), -1)
        first_write = np.full((schedule.num_ranks, buffer.num_chunks), len(steps.rank))
        rows, row = placed.rows, np.repeat(np.arange(len(placed.rows.rank)), np.diff(placed.rows.source_begin))
        reads = np.nonzero(rows.source_space == read)[0]
        np.maximum.at(last_read, (rows.source_rank[reads], rows.source_index[reads]), row[reads])
        writes = np.nonzero(rows.dest_space == write)[0]
        np.minimum.at(first_write, (rows.dest_rank[writes], rows.dest_index[writes]), writes)
        # The same operation may read and write an element: the thread that reads it is the one that writes it.
        # Different operations must lie in different phases, as only between phases there is a block barrier.
        phase = np.append(steps.phase, len(steps.phase))
        if ((last_read == first_write) | (last_read < 0) | (phase[last_read] < phase[first_write])).all():
            safe.append(buffer.name)
    return safe


def _tensor(tensors: tuple[Tensor, ...], name: str, access: Access) -> int:
    return next(i for i, tensor in enumerate(tensors) if tensor.name == name and tensor.access is access)

