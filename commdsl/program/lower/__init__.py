"""Turns a checked schedule into a Plan: operations placed, ordered by flags, laid out as tables.

Assumes the checks on the schedule have passed. Does not print text (`emit`) and does not prove the flags
(`program.proof.synchronization` does, on the Plan it returns).

    homes         where the current version of every chunk lies, step by step
    rows          the statements of all phases -> operations, a row each
    placement     steps -> phases of operations on tensors and cells
    fuse          copies of what was just made -> further destinations of what made it
    cells         cells written once -> as few as are used in turn
    problem       what has to be ordered
    hazards       accesses to one cell -> which operation follows which
    clocks        what each rank knows of the others' progress
    ordering      edges -> as few flags as order them all
    tables        rows and flags -> the tables of the Plan
    routed        a dispatch -> its Plan: the phases of a call, in order
    by_key        a dispatch by keys -> its two Plans, there and back
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from commdsl.ir.schedules import Schedule, Step
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.program.lower.ordering import order
from commdsl.program.lower.placement import Placed, place
from commdsl.program.lower.tables import tables
from commdsl.program.memory import Access, Tensor, Transport
from commdsl.program.moves import MOST_THREADS, Moves, Protocol
from commdsl.program.plan import Plan, Role

# Measured on 4 H200s over ten schedules at 16 and 64 MB: fewer lanes leave links idle while a lane awaits a flag, more
# threads a block or larger tiles gain nothing. The tuner's tables choose by size.
LANES = 128
THREADS = {
    Protocol.BULK: 256,
    Protocol.PACKET: 512,
    Protocol.LINE: 512,
    Protocol.TMA: 256,
    Protocol.ENGINE: 32,
}
TILE_BYTES = {  # where data carries its flag, a word for each thread
    Protocol.BULK: 128 * 1024,
    Protocol.PACKET: 4096,
    Protocol.LINE: 7680,
    Protocol.TMA: 128 * 1024,
    Protocol.ENGINE: 32 * 1024 * 1024,  # a copy pays its start, and a round its flags
}
LANES_PER_SM, SHARED_THREADS = 8, 128  # where SMs are given, and no lanes: as many as hide each other's waits
SYMMETRIC_BYTES = 256 * 1024 * 1024  # what the cells may take when `tune` does not set the tile
SMALLEST_TILE = 4 * 1024


def lower(schedule: Schedule, transport: Transport = Transport.PEER) -> Plan:
    """The Plan of one schedule for its rank count.

    NVSHMEM moves whole tiles and flags, so its Plans are `bulk` whatever the schedule's tuning says, and no reduction
    stores to a peer. Which peers it is for is known at the launch: the bits are the same.
    """
    protocol = Protocol(schedule.tuning.protocol or "bulk") if transport is Transport.PEER else Protocol.BULK
    placed = place(schedule, transport, protocol)
    ordered = order(placed, schedule.num_ranks, protocol)
    ops, signals = tables(placed.rows, ordered.waits, schedule.num_ranks, barriers=not protocol.carries_flags)
    shape = _shape(schedule, protocol, placed.num_cells * ordered.rotation, transport)
    moves = Moves(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        has_reduction=_has_reduction(schedule),
        tensors=placed.tensors,
        num_cells=placed.num_cells,
        rotation=ordered.rotation,
        lanes=shape.lanes,
        sms=shape.sms,
        threads=shape.threads,
        tile_bytes=shape.tile_bytes,
        protocol=protocol,
        ops=ops,
        signals_per_round=signals,
        origins=placed.origins,
        alias_safe=tuple(_alias_safe(placed, schedule)),
    )
    return Plan(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        params=schedule.params,
        topology=schedule.topology.name,
        contract=schedule.contracts[0].name,
        roles=(Role(schedule.role or "comm", shape.lanes, shape.sms, shape.threads, (moves,)),),
        tile_bytes=shape.tile_bytes,
        span=schedule.span,
        transport=transport,
    )


def _has_reduction(schedule: Schedule) -> bool:
    steps = (step for step in schedule.steps if isinstance(step, Step))
    return any(moves.kind is MoveKind.REDUCE for step in steps for moves in step.moves)


@dataclass(frozen=True, slots=True)
class _Shape:
    lanes: int
    sms: int
    threads: int
    tile_bytes: int


def _shape(schedule: Schedule, protocol: Protocol, cells: int, transport: Transport) -> _Shape:
    """What `tune` or a role sets stays; the rest, the tile first, shrinks to the cells' budget."""
    tuning, data, wire = schedule.tuning, *protocol.wire
    sms = _role_sms(schedule) or tuning.sms
    if sms is None:
        lanes = tuning.lanes or min(LANES, schedule.topology.num_sms)
    else:
        lanes = tuning.lanes or sms * min(LANES_PER_SM, MOST_THREADS // (tuning.threads or SHARED_THREADS))
    if protocol is Protocol.ENGINE:
        lanes = sms = 1
    share = -(-lanes // (sms or min(lanes, schedule.topology.num_sms)))
    threads = tuning.threads or min(THREADS[protocol], MOST_THREADS // share // 32 * 32)
    if transport is Transport.NVSHMEM:
        lanes = min(lanes, sms or schedule.topology.num_sms)  # its puts take whole blocks
    tile = tuning.tile_bytes or TILE_BYTES[protocol]

    def size() -> int:
        return -(-tile // data) * wire * lanes * cells

    while tuning.tile_bytes is None and tile > SMALLEST_TILE and size() > SYMMETRIC_BYTES:
        tile = max(tile // 32 * 16, SMALLEST_TILE)
    while tuning.lanes is None and sms is None and lanes > 1 and size() > SYMMETRIC_BYTES:
        lanes //= 2
    return _Shape(lanes, min(lanes, sms or schedule.topology.num_sms), threads, tile)


def _role_sms(schedule: Schedule) -> int | None:
    """The SMs of the role a schedule is `on`."""
    for roles in schedule.roles:
        for name, first, last in roles.roles:
            if name == schedule.role:
                return last - first
    return None


def _alias_safe(placed: Placed, schedule: Schedule) -> list[str]:
    """Inout buffers none of whose chunks is read as it came in after it was written as it goes out."""
    safe = []
    rows, of_source = placed.rows, placed.rows.of_source
    phase = np.append(rows.phase, rows.phase.max(initial=-1) + 1)
    group = np.append(rows.group, -1)
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
        # The same group may read and write an element: the thread that reads it is the one that writes it.
        # Different groups must lie in different phases, as only between phases there is a block barrier.
        same = group[last_read] == group[first_write]
        if (same | (last_read < 0) | (phase[last_read] < phase[first_write])).all():
            safe.append(buffer.name)
    return safe


def _tensor(tensors: tuple[Tensor, ...], name: str, access: Access) -> int:
    return next(i for i, tensor in enumerate(tensors) if tensor.name == name and tensor.access is access)
