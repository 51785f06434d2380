"""Turns a checked schedule into a Plan: operations placed, ordered by flags, laid out as tables.

Assumes the checks on the schedule have passed. Does not print text (`emit`) and does not prove the flags
(`checks.synchronization` does, on the Plan it returns).
"""

from __future__ import annotations

import numpy as np

from commdsl.ir import Schedule, Step
from commdsl.kinds import BufferKind, MoveKind
from commdsl.lower.ordering import order
from commdsl.lower.placement import Placed, place
from commdsl.lower.tables import tables
from commdsl.plan import Access, Plan, Protocol, Tensor, Transport

# Measured on 4 H200s over ten schedules at 16 and 64 MB: fewer lanes leave links idle while a lane awaits a flag, more
# threads a block or larger tiles gain nothing. The tuner's table will choose by size.
LANES = 128
THREADS = 256
TILE_BYTES = 128 * 1024
SYMMETRIC_BYTES = 256 * 1024 * 1024  # what the cells may take when `tune` does not set the tile
SMALLEST_TILE = 4 * 1024


def lower(schedule: Schedule, transport: Transport = Transport.PEER) -> Plan:
    """The Plan of one schedule for its rank count; one for NVSHMEM runs through peer pointers too, to the same bits."""
    placed = place(schedule, transport)
    ordered = order(placed, schedule.num_ranks)
    ops, signals = tables(placed.rows, ordered.waits, schedule.num_ranks)
    lanes, tile_bytes = _shape(schedule, placed.num_cells * ordered.rotation)
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
        tile_bytes=tile_bytes,
        protocol=Protocol(schedule.tuning.protocol or "bulk"),
        ops=ops,
        signals_per_round=signals,
        origins=placed.origins,
        alias_safe=tuple(_alias_safe(placed, schedule)),
    )


def _has_reduction(schedule: Schedule) -> bool:
    steps = (step for step in schedule.steps if isinstance(step, Step))
    return any(moves.kind is MoveKind.REDUCE for step in steps for moves in step.moves)


def _lanes(schedule: Schedule) -> int:
    """A role of k SMs runs k lanes, one block an SM; otherwise what `tune` says, or the default if the SMs allow it."""
    for roles in schedule.roles:
        for name, first, last in roles.roles:
            if name == schedule.role:
                return last - first
    return schedule.tuning.lanes or min(LANES, schedule.topology.num_sms)


def _shape(schedule: Schedule, cells: int) -> tuple[int, int]:
    """Lanes and tile: what `tune` or a role sets stays; the rest, the tile first, shrinks to the cells' budget."""
    lanes, tile = _lanes(schedule), schedule.tuning.tile_bytes or TILE_BYTES
    free_lanes = schedule.tuning.lanes is None and schedule.role is None
    while schedule.tuning.tile_bytes is None and tile > SMALLEST_TILE and tile * lanes * cells > SYMMETRIC_BYTES:
        tile //= 2
    while free_lanes and lanes > 1 and tile * lanes * cells > SYMMETRIC_BYTES:
        lanes //= 2
    return lanes, tile


def _alias_safe(placed: Placed, schedule: Schedule) -> list[str]:
    """Inout buffers none of whose chunks is read as it came in after it was written as it goes out."""
    safe = []
    rows, of_source = placed.rows, placed.rows.of_source
    phase = np.append(rows.phase, rows.phase.max(initial=-1) + 1)
    for buffer in schedule.buffers:
        if buffer.kind is not BufferKind.INOUT:
            continue
        read, write = (_tensor(placed.tensors, buffer.name, access) for access in (Access.READ, Access.WRITE))
        last_read = np.full((schedule.num_ranks, buffer.num_chunks), -1, np.int32)
        first_write = np.full((schedule.num_ranks, buffer.num_chunks), len(rows.rank), np.int32)
        reads = np.nonzero(rows.source_space == read)[0]
        last_read[rows.source_rank[reads], rows.source_index[reads]] = of_source[reads]  # the last assignment stays
        writes = np.nonzero(rows.dest_space == write)[0][::-1]
        first_write[rows.dest_rank[writes], rows.dest_index[writes]] = writes
        # The same operation may read and write an element: the thread that reads it is the one that writes it.
        # Different operations must lie in different phases, as only between phases there is a block barrier.
        if ((last_read == first_write) | (last_read < 0) | (phase[last_read] < phase[first_write])).all():
            safe.append(buffer.name)
    return safe


def _tensor(tensors: tuple[Tensor, ...], name: str, access: Access) -> int:
    return next(i for i, tensor in enumerate(tensors) if tensor.name == name and tensor.access is access)
