"""Turns a checked schedule into a Plan: operations placed, ordered by flags, laid out as tables.

Assumes the checks on the schedule have passed. Does not print text (`emit`) and does not prove the flags
(`program.proof.synchronization` does, on the Plan it returns).

    task_waits    what tasks and launches touch -> the counters that each task waits for
    homes         where the current version of every chunk lies, step by step
    rows          the statements of all phases -> operations, a row each
    placement     steps -> phases of operations on tensors and cells
    fuse          copies of what was just made -> further destinations of what made it
    alike         more than fits if each rank is followed -> an order in which one stands for all, where there is one
    cells         cells written once -> as few as are used in turn
    problem       what has to be ordered
    hazards       accesses to one cell -> which operation follows which
    clocks        what each rank knows of the others' progress
    ordering      edges -> as few flags as order them all
    tables        rows and flags -> the tables of the Plan
    routed        a dispatch -> its Plan: the phases of a call, in order
    by_key        a dispatch by keys -> its two Plans, there and back
    segments      a schedule with yields -> the steps between them, as schedules of their own
    visits        a schedule with yields -> a Plan of launches, with the caller's visits beside them

A row-wise function behind the moves (`ir.rowwise`) becomes a phase of the role that moves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from commdsl.ir.rowwise import Behind, ending
from commdsl.ir.schedules import Schedule, Task, Tuning
from commdsl.language.diagnostics import CommError, too_much
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.machine import carriers
from commdsl.machine.carriers import Carrier
from commdsl.program.agree import Agree
from commdsl.program.by_row import ByRow
from commdsl.program.lower.ordering import order
from commdsl.program.lower.placement import Placed, num_actors, place
from commdsl.program.lower.problem import Problem, most_groups, pose
from commdsl.program.lower.tables import apart, tables
from commdsl.program.memory import Rights, Tensor, Transport
from commdsl.program.moves import MOST_THREADS, Casts, Moves, Ops, Origin
from commdsl.program.plan import Plan, Role
from commdsl.program.tile_tasks import Tiles

# Measured on 4 H200s over ten schedules at 16 and 64 MB: fewer lanes leave links idle while a lane awaits a flag, more
# threads a block or larger tiles gain nothing. The tuner's tables choose by size.
LANES = 128
WHOLE_TILE = 1024 * 1024 * 1024  # where nothing is in cells: a share in one round; TMA counts its bytes in 32 bits
TASK_TILE = 32 * 1024  # what is computed leaves when its tile is done: small ones leave sooner
LANES_PER_SM, SHARED_THREADS = 8, 128  # where SMs are given, and no lanes: as many as hide each other's waits
SYMMETRIC_BYTES = 128 * 1024 * 1024  # what the cells may take when `tune` does not set the tile
SMALLEST_TILE = 4 * 1024


def lower(schedule: Schedule, transport: Transport = Transport.PEER) -> Plan:
    """The Plan of one schedule for its rank count.

    NVSHMEM moves whole tiles and flags, so its Plans have the default carrier whatever the schedule's tuning says, and
    no reduction stores to a peer. Which peers it is for is known at the launch: the bits are the same.
    """
    schedule, behind = ending(schedule)
    moves, computed = _moves(schedule, transport, SYMMETRIC_BYTES)
    phases = (moves,) if behind is None else (moves, _by_row(schedule, moves, behind))
    roles = [Role(schedule.role or "comm", moves.lanes, moves.sms, moves.threads, phases)]
    if computed is not None:
        roles.append(_tiles_role(schedule, moves, computed))
    return Plan(
        name=schedule.name,
        num_ranks=schedule.num_ranks,
        params=schedule.params,
        topology=schedule.topology.name,
        contract=schedule.contracts[0].name,
        roles=tuple(roles),
        tile_bytes=moves.tile_bytes,
        span=schedule.span,
        transport=transport,
        agree=Agree(moves.heard),
    )


def lower_moves(
    schedule: Schedule,
    transport: Transport,
    most_bytes: int = SYMMETRIC_BYTES,
    landing: frozenset[str] = frozenset(),
    sums: frozenset[str] = frozenset(),
) -> Moves:
    """The operations of a schedule without tasks, in `most_bytes` of symmetric memory, but for a tile that is set.

    `landing`: buffers that peers may put to themselves; what flags travel in takes cells all the same. `sums`: those in
    float32 to which others are added.
    """
    moves = _moves(schedule, transport, most_bytes, landing)[0]
    return replace(moves, tensors=tuple(replace(one, is_sum=one.name in sums) for one in moves.tensors))


def _moves(
    schedule: Schedule, transport: Transport, most_bytes: int, landing: frozenset[str] = frozenset()
) -> tuple[Moves, Ops | None]:
    """The operations that move, and those of tasks."""
    carrier = schedule.tuning.carrier if transport is Transport.PEER else carriers.DEFAULT
    placed = place(schedule, transport, carrier, frozenset() if carrier.has_flags_in_data else landing)
    problem = pose(placed.rows, num_actors(schedule), placed.num_cells, placed.tensors)
    _refuse_too_much(schedule, problem)
    ordered = order(problem, num_actors(schedule), carrier)
    ops, signals = tables(placed.rows, ordered.waits, num_actors(schedule), barriers=not carrier.has_flags_in_data)
    computed = None
    if num_actors(schedule) > schedule.num_ranks:
        ops, computed, signals = apart(ops, signals, schedule.num_ranks)
    shape = _shape(schedule, carrier, placed.num_cells * ordered.rotation, transport, most_bytes)
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
        carrier=carrier,
        ops=ops,
        signals_per_round=signals,
        heard=ordered.heard[: schedule.num_ranks, : schedule.num_ranks],
        origins=placed.origins,
        alias_safe=tuple(_alias_safe(placed, schedule)),
        casts=None if schedule.cast is None else Casts(schedule.cast, placed.rows.dest_form, placed.rows.source_form),
    )
    return moves, computed


def _refuse_too_much(schedule: Schedule, problem: Problem) -> None:
    """What is alike on all ranks, up to rotation, is little: one stands for all. Raises CommError."""
    count, most = len(problem.program.rank), most_groups(problem.clocks.num_ranks)
    if count <= most:
        return
    ranks = schedule.num_ranks
    label = f"{count:,} operations on {ranks:,} ranks that do not all do the same, up to rotation"
    fit = f"{most:,} operations would fit, in fewer steps or on fewer ranks"
    raise CommError((too_much(schedule.span, label, fit),))


def _has_reduction(schedule: Schedule) -> bool:
    """Whether the kernel has an element type."""
    return bool(_tasks(schedule)) or any(moves.kind is MoveKind.REDUCE for moves in schedule.statements)


def _tasks(schedule: Schedule) -> list[Task]:
    return [step for step in schedule.steps if isinstance(step, Task)]


def _tiles_role(schedule: Schedule, moves: Moves, computed: Ops) -> Role:
    """One lane a block, which has as many threads as a block of the moves: they are of one launch."""
    sms, threads = _compute_sms(schedule), moves.threads * moves.lanes_per_block
    tiles = Tiles(schedule.num_ranks, sms, threads, moves.tensors, computed, moves.origins)
    return Role(_tasks(schedule)[0].role or "compute", sms, sms, threads, (tiles,))


@dataclass(frozen=True, slots=True)
class _Shape:
    lanes: int
    sms: int
    threads: int
    tile_bytes: int


def _shape(schedule: Schedule, carrier: Carrier, cells: int, transport: Transport, most_bytes: int) -> _Shape:
    """What `tune` or a role sets stays; the rest, the tile first, shrinks to the cells' budget."""
    tuning = schedule.tuning
    sms = _role_sms(schedule, schedule.role) or tuning.sms
    if sms is None and _tasks(schedule):
        sms = schedule.topology.num_sms - _compute_sms(schedule)
    if sms is None:
        lanes = tuning.lanes or min(LANES, schedule.topology.num_sms)
    elif _tasks(schedule):
        lanes = tuning.lanes or _even_lanes(sms, _compute_sms(schedule), _lanes_of_block(tuning))
    else:
        lanes = tuning.lanes or sms * _lanes_of_block(tuning)
    if not carrier.runs_on_sms:
        lanes = sms = 1
        most_bytes *= 2  # a smaller tile is more copies, each of which pays its start
    share = -(-lanes // (sms or min(lanes, schedule.topology.num_sms)))
    threads = tuning.threads or min(carrier.threads, MOST_THREADS // share // 32 * 32)
    if transport is Transport.NVSHMEM:
        lanes = min(lanes, sms or schedule.topology.num_sms)  # its puts take whole blocks
    tile = tuning.tile_bytes or (TASK_TILE if _tasks(schedule) else carrier.tile_bytes)
    if not cells and tuning.tile_bytes is None:
        tile = WHOLE_TILE

    def size() -> int:
        return -(-tile // carrier.payload_bytes) * carrier.word_bytes * lanes * cells

    while tuning.tile_bytes is None and tile > SMALLEST_TILE and size() > most_bytes:
        tile = max(tile // 32 * 16, SMALLEST_TILE)
    while tuning.lanes is None and sms is None and lanes > 1 and size() > most_bytes:
        lanes //= 2
    return _Shape(lanes, min(lanes, sms or schedule.topology.num_sms), threads, tile)


def _role_sms(schedule: Schedule, role: str | None) -> int | None:
    """The SMs of a role."""
    found = (last - first for roles in schedule.roles for name, first, last in roles.roles if name == role)
    return next(found, None)


def _compute_sms(schedule: Schedule) -> int:
    """The SMs of the tasks' role; without roles what `tune` leaves, or three of four."""
    found = _role_sms(schedule, _tasks(schedule)[0].role)
    every = schedule.topology.num_sms
    return found or max(every - (schedule.tuning.sms or every // 4), 1)


def _lanes_of_block(tuning: Tuning) -> int:
    """The most that there are in a block, unless said."""
    return min(LANES_PER_SM, MOST_THREADS // (tuning.threads or SHARED_THREADS))


def _even_lanes(sms: int, blocks: int, most: int) -> int:
    """Lanes, the same number an SM, that give the blocks that compute as equal work as can be."""
    choices = range(1, most + 1)
    return sms * max(choices, key=lambda number: (number * sms / (-(-number * sms // blocks) * blocks), number))


def _by_row(schedule: Schedule, moves: Moves, behind: Behind) -> ByRow:
    """Of the tensors in which a rank has its buffers."""

    def tensor(buffer: int, access: Rights) -> int:
        return _tensor(moves.tensors, schedule.buffers[buffer].name, access)

    return ByRow(
        behind.function,
        tensor(behind.rows, Rights.WRITE),
        tuple(tensor(one, Rights.READ) for one in behind.given),
        tuple(tensor(one, Rights.WRITE) for one in behind.results),
        Origin(behind.span, (), behind.step),
    )


def _alias_safe(placed: Placed, schedule: Schedule) -> list[str]:
    """Inout buffers none of whose chunks is read as it came in after it was written as it goes out."""
    safe = []
    rows, of_source = placed.rows, placed.rows.of_source
    phase = np.append(rows.phase, rows.phase.max(initial=-1) + 1)
    group = np.append(rows.group, -1)
    computed_from = {number for task in _tasks(schedule) for number in task.reads}  # side by side with what moves
    for number, buffer in enumerate(schedule.buffers):
        if buffer.kind is not BufferKind.INOUT or number in computed_from:
            continue
        read, write = (_tensor(placed.tensors, buffer.name, access) for access in (Rights.READ, Rights.WRITE))
        if placed.tensors[write].lands:
            continue
        place = (schedule.num_ranks, buffer.num_chunks)
        last_read, first_write = np.full(place, -1, np.int32), np.full(place, len(rows.rank), np.int32)
        writes = np.nonzero(rows.dest_space == write)[0][::-1]
        first_write[rows.dest_rank[writes], rows.dest_index[writes]] = writes
        # The same group may read and write an element: the thread that reads it is the one that writes it.
        reads = np.nonzero(rows.source_space == read)[0]
        over = first_write[rows.source_rank[reads], rows.source_index[reads]]
        reads = reads[group[of_source[reads]] != group[over]]
        last_read[rows.source_rank[reads], rows.source_index[reads]] = of_source[reads]  # the last assignment stays
        # Different groups must lie in different phases, as only between phases there is a block barrier.
        if ((last_read < 0) | (phase[last_read] < phase[first_write])).all():
            safe.append(buffer.name)
    return safe


def _tensor(tensors: tuple[Tensor, ...], name: str, access: Rights) -> int:
    return next(i for i, tensor in enumerate(tensors) if tensor.name == name and tensor.access is access)
