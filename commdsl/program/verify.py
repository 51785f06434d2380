"""What a legal Plan is: table shapes, ranges, access rights, counts. Raises InternalError at the first law broken.

Assumes nothing, not even that the begin tables are monotone. Does not judge the synchronization (an ordinal no signal
reaches, a cycle, a race): those are proved by `proof.synchronization`, which may assume that this passed.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.functions import ROWWISE
from commdsl.ir.schedules import Ints
from commdsl.machine.carriers import Carrier
from commdsl.program.by_row import ByRow
from commdsl.program.legal import each as _each
from commdsl.program.legal import law as _law
from commdsl.program.legal import within as _within
from commdsl.program.memory import Rights, Transport
from commdsl.program.moves import (
    CELL,
    KIND_OF,
    MOST_CONTRIBUTIONS,
    MOST_DESTS,
    MOST_THREADS,
    Moves,
    OpKind,
    Ops,
    Reason,
)
from commdsl.program.phases import Push
from commdsl.program.plan import Plan
from commdsl.program.tile_tasks import FUNCTION_OF, Tiles
from commdsl.program.verify_calls import verify_calls
from commdsl.program.verify_casts import verify_casts
from commdsl.program.verify_keys import verify_keys
from commdsl.program.verify_lengths import verify_lengths
from commdsl.program.verify_visited import verify_visited
from commdsl.program.visited import plan_of, segments

Mask = NDArray[np.bool_]

MOST_PIECES = 1 << 16
"""Pieces of a block, so that a kernel finds one with 32-bit divisions."""

MOST_BARRIERS = 16
"""Named barriers of a block on the GPU; the first is the block's own."""

_PER_OP = (
    *("kind", "cut", "piece", "length", "barrier", "whole", "joined"),
    *("dest_space", "dest_rank", "dest_index", "origin"),
)
_PER_SOURCE = ("source_space", "source_rank", "source_index", "source_weight")
_PER_WAIT = ("wait_peer", "wait_ordinal", "wait_rounds_back", "wait_reason")


def verify(plan: Plan) -> None:
    """Raises InternalError unless the Plan is one that `emit` can print and the proofs can read."""
    if plan.is_visited:
        verify_visited(plan)
        for moves in segments(plan):
            verify(plan_of(plan, moves))
        return
    for role in plan.roles:
        for phase in role.phases:
            if isinstance(phase, Moves):
                shape = phase.num_ranks, phase.lanes, phase.sms, phase.threads
                _law(
                    shape == (plan.num_ranks, role.lanes, role.sms, role.threads),
                    f"a role has {role.lanes} lanes of {role.threads} threads on {role.sms} SMs, its moves other ones",
                )
                verify_moves(phase, has_tiles=plan.tiles is not None)
            if isinstance(phase, ByRow):
                _law(role.phases[-2:] == (plan.moves, phase), "a row-wise function is not behind the moves of its role")
                verify_by_row(phase, plan.moves)
            if isinstance(phase, Tiles):
                shape = phase.num_ranks, phase.sms, phase.sms, phase.threads
                _law(
                    shape == (plan.num_ranks, role.lanes, role.sms, role.threads),
                    f"a role has {role.lanes} lanes of {role.threads} threads on {role.sms} SMs, its tiles other ones",
                )
                verify_tiles(phase, plan.moves)
    _law(any(not role.is_caller and not role.computes for role in plan.roles), "nobody moves data")
    verify_keys(plan)
    verify_calls(plan)
    if plan.transport is Transport.NVSHMEM:
        _put_whole(plan)


def _put_whole(plan: Plan) -> None:
    """To ranks that are far go tiles, each by a block of its own, and rows in runs as long as can be."""
    for role in plan.roles:
        for phase in role.phases:
            match phase:
                case Moves():
                    _law(phase.carrier.goes_by_nvshmem, f"NVSHMEM moves no words of `{phase.carrier.name}`")
                    _law(phase.lanes_per_block == 1, f"a block has {phase.lanes_per_block} lanes, and puts as one")
                case Push():
                    _law(phase.packed, "rows of tables go to far ranks in as many runs as places, not packed")
                case _:
                    pass


def verify_moves(moves: Moves, *, has_tiles: bool = False) -> None:
    """`verify` for one phase of static operations."""
    _scalars(moves)
    _shapes(moves)
    _operations(moves, OpKind.COPY, OpKind.REDUCE, *KIND_OF.values(), OpKind.HOLD)
    _held(moves)
    verify_casts(moves)
    _operands(moves)
    _flags(moves, has_tiles)
    owned = any(tensor.access is Rights.OWN for tensor in moves.tensors)
    _law(owned == has_tiles, "there are tiles, or tensors of their own, without the other")


def verify_by_row(phase: ByRow, moves: Moves) -> None:
    """`verify` for what lanes make of the rows they moved: all of a row is theirs, and nobody else's."""
    function, of = ROWWISE[phase.function], moves.tensors
    _law(len(phase.given) == len(function.given), f"`{phase.function}` is given {len(phase.given)} tensors")
    _law(len(phase.results) == function.num_results, f"`{phase.function}` has {len(phase.results)} results")
    _law(moves.carrier.runs_on_sms, "no lane has the rows that the copy engine moves")
    for number in (phase.rows, *phase.given, *phase.results):
        whole = of[number].blocks == of[number].cut == 1 and not of[number].lands
        _law(whole, f"lanes share `{of[number].name}` in other slices than rows")
    wanted = {phase.rows: Rights.WRITE, **dict.fromkeys(phase.given, Rights.READ)}
    wanted |= dict.fromkeys(phase.results, Rights.WRITE)
    _law(len(wanted) == 1 + len(phase.given) + len(phase.results), "a row-wise function has a tensor twice")
    for number, access in wanted.items():
        _law(of[number].access is access, f"`{of[number].name}` is not there to {access.value}")
    _each(~np.isin(moves.ops.dest_space, phase.results), "destination", "what a function makes nothing moves to")
    made = moves.ops.actor[moves.ops.dest_space == phase.rows]
    _law({*made.tolist()} == {*range(moves.num_ranks)}, "on some rank nothing is moved to the rows")


def verify_tiles(tiles: Tiles, moves: Moves) -> None:
    """`verify` for what is computed beside the moves."""
    _law(tiles.tensors == moves.tensors, "tiles and moves have different tensors")
    _law(tiles.origins == moves.origins, "tiles and moves come from different statements")
    _law(tiles.sms >= 1, f"tiles have {tiles.sms} SMs, expected at least 1")
    threads = moves.threads * moves.lanes_per_block
    _law(tiles.threads == threads, f"a block of tiles has {tiles.threads} threads, one of the moves {threads}")
    _law(moves.carrier.waits_for_tasks, f"tiles beside moves of protocol {moves.carrier.name}")
    beside = replace(moves, ops=tiles.ops)
    _shapes(beside)
    _operations(beside, *FUNCTION_OF)
    ops = tiles.ops
    operands = np.array([FUNCTION_OF[OpKind(kind)].num_operands for kind in ops.kind.tolist()], np.int64)
    _each(np.diff(ops.source_begin) == operands, "operation", "it has the operands of its function")
    _each(ops.joined == 0, "operation", "it stands alone")
    _operands(beside)
    writes = np.array([tensor.access is Rights.OWN for tensor in moves.tensors] + [False])
    given = np.array([tensor.access is not Rights.WRITE for tensor in moves.tensors] + [False])
    _each(writes[ops.dest_space], "destination", "tiles write tensors of their own")
    _each(given[ops.source_space], "source", "tiles read tensors that are given, or their own")
    _law(not len(ops.wait_peer), "tiles wait")
    _each(ops.signal_peer == moves.num_ranks, "signal", "tiles signal the moves of their rank")
    raised = np.bincount(np.repeat(ops.actor, np.diff(ops.signal_begin)), minlength=tiles.num_ranks)
    _each(moves.signals_per_round[-1] == raised, "signals_per_round, rank", "its last row equals the signals of tiles")


def _scalars(moves: Moves) -> None:
    _law(moves.num_ranks >= 1, f"num_ranks is {moves.num_ranks}, expected at least 1")
    _law(moves.rotation >= 1, f"rotation is {moves.rotation}, expected at least 1")
    _law(moves.num_cells >= 0, f"num_cells is {moves.num_cells}, expected at least 0")
    _law(moves.lanes >= 1, f"lanes is {moves.lanes}, expected at least 1")
    _law(
        32 <= moves.threads <= MOST_THREADS and moves.threads % 32 == 0,
        f"threads is {moves.threads}, expected whole warps of 32, up to {MOST_THREADS}",
    )
    _law(1 <= moves.sms <= moves.lanes, f"sms is {moves.sms}, expected 1 to {moves.lanes}, a lane each at least")
    _law(
        moves.lanes_per_block * moves.threads <= MOST_THREADS,
        f"{moves.lanes_per_block} lanes of {moves.threads} threads are more than a block of {MOST_THREADS}",
    )
    _law(
        moves.lanes_per_block < MOST_BARRIERS,
        f"{moves.lanes_per_block} lanes a block are more than it has barriers for",
    )
    _law(
        moves.tile_bytes >= 16 and moves.tile_bytes % 16 == 0,
        f"tile_bytes is {moves.tile_bytes}, expected a positive multiple of 16",
    )
    _law(isinstance(moves.carrier, Carrier), f"carrier is {moves.carrier!r}")
    _law(moves.carrier.runs_on_sms or moves.lanes == 1, f"the copy engine has one lane, not {moves.lanes}")
    combines = moves.carrier.combines or not moves.has_reduction
    _law(combines, f"`{moves.carrier.name}` moves bytes only, yet the Plan reduces")
    for tensor in moves.tensors:
        _law(tensor.blocks >= 1 and tensor.cut >= 1, f"tensor `{tensor.name}` has no chunk")
        _law(not tensor.lands or tensor.access is Rights.WRITE, f"`{tensor.name}` lands, and is not written")
        _law(not tensor.lands or not moves.carrier.has_flags_in_data, f"`{tensor.name}` lands, and no flag tells of it")
        _law(not tensor.is_yield or tensor.access is Rights.WRITE, f"yields `{tensor.name}` are not written")
    _law(sum(tensor.is_yield for tensor in moves.tensors) <= 1, "the yields are more than one tensor")
    if moves.adds_up:
        _law(moves.carrier.adds_to_sums and not moves.num_cells, "sums of another type are in cells")
        _law(not len(moves.ops.wait_peer), "sums of another type are added to by other ranks")
        _law(not moves.ops.joined.any(), "sums of another type go to several places")
    names = [(tensor.name, tensor.access) for tensor in moves.tensors]
    _law(len(set(names)) == len(names), "two tensors have one name and one access")
    for name in moves.alias_safe:
        pair = {access for other, access in names if other == name}
        _law(pair == {Rights.READ, Rights.WRITE}, f"alias_safe names `{name}`, which is not read and written")


def _shapes(moves: Moves) -> None:
    ops = moves.ops
    for field in Ops.__dataclass_fields__:
        table = getattr(ops, field)
        _law(table.ndim == 1 and table.dtype == np.int32, f"ops.{field} is not a vector of int32")
    sizes = (
        ("wait_begin", len(ops.wait_peer)),
        ("source_begin", len(ops.source_space)),
        ("signal_begin", len(ops.signal_peer)),
    )
    for field, size in sizes:
        _begins(field, getattr(ops, field), ops.num_ops, size)
    _begins("rank_begin", ops.rank_begin, moves.num_ranks, ops.num_ops)
    for fields, size in ((_PER_OP, ops.num_ops), (_PER_SOURCE, sizes[1][1]), (_PER_WAIT, sizes[0][1])):
        for field in fields:
            _law(len(getattr(ops, field)) == size, f"ops.{field} has {len(getattr(ops, field))} rows, expected {size}")


def _begins(field: str, begins: Ints, rows: int, size: int) -> None:
    _law(len(begins) == rows + 1, f"ops.{field} has {len(begins)} entries, expected {rows + 1}")
    _law(begins[0] == 0 and begins[-1] == size, f"ops.{field} does not span 0 .. {size}")
    _each(begins[1:] >= begins[:-1], f"ops.{field}, entry", "begins never decrease")


def _operations(moves: Moves, *kinds: OpKind) -> None:
    ops = moves.ops
    _each(np.isin(ops.kind, kinds), "operation", "kind is an OpKind that is done there")
    _within(ops.barrier, 2, "operation", "barrier is a truth value,")
    _within(ops.origin, len(moves.origins), "operation", "origin lies")
    _within(ops.cut, MOST_PIECES, "operation", "cut lies", start=1)
    _each((ops.piece >= 0) & (ops.piece < ops.cut), "operation", "piece is less than cut")
    verify_lengths(moves)
    _within(ops.joined, 2, "operation", "joined is a truth value,")
    _within(ops.source_weight, MOST_CONTRIBUTIONS + 1, "source", "its weight lies", start=1)
    num_sources = np.diff(ops.source_begin)
    has_source = (num_sources >= 1) | (ops.kind == OpKind.HOLD)
    _each(has_source == (ops.joined == 0), "operation", "it has a source, or has joined one that does")
    _joined(moves)
    several = np.isin(ops.kind, (OpKind.COPY, OpKind.HOLD))
    _each(~several | (num_sources <= 1), "operation", "only what combines has several sources")
    _within(ops.whole, MOST_CONTRIBUTIONS + 1, "operation", "its whole lies", start=1)
    is_alone = np.repeat(num_sources == 1, num_sources)
    _each((ops.source_weight == 1) | ~is_alone, "source", "alone it has the weight 1")
    _each((ops.whole == 1) | (num_sources != 1), "operation", "the whole of one source is 1")
    computes = (~np.isin(ops.kind, (OpKind.COPY, OpKind.HOLD))).any()
    _law(moves.has_reduction or not computes, "it only moves bytes, yet an operation computes")


def _held(moves: Moves) -> None:
    """A rank holds a chunk of its own that lands: as it was found, or as it is."""
    ops = moves.ops
    actor = np.repeat(np.arange(moves.num_ranks, dtype=np.int32), np.diff(ops.rank_begin))
    lands = np.array([tensor.lands for tensor in moves.tensors] + [False])
    held = ops.kind == OpKind.HOLD
    _each(~held | (lands[ops.dest_space] & (ops.dest_rank == actor)), "operation", "what a rank holds lands there")
    at = np.flatnonzero(held & (np.diff(ops.source_begin) == 1))
    source = ops.source_begin[at]
    same = (ops.source_space[source] == ops.dest_space[at]) & (ops.source_index[source] == ops.dest_index[at])
    _each(same, "operation that holds", "its source is what it holds")


def _joined(moves: Moves) -> None:
    """A joined operation follows one of its rank, does as that one, waits for nothing; the last of a group signals."""
    ops = moves.ops
    row = np.flatnonzero(ops.joined == 1)
    starts = np.zeros(ops.num_ops + 1, np.bool_)
    starts[ops.rank_begin] = True
    _each(~starts[row], "joined operation", "it follows an operation of its rank")
    for field in ("kind", "cut", "piece", "length", "whole"):
        table = getattr(ops, field)
        _each(table[row] == table[row - 1], "joined operation", f"its {field} is that of the operation it joined")
    _each(np.diff(ops.wait_begin)[row] == 0, "joined operation", "the first of its group waits")
    _each(ops.barrier[row] == 0, "joined operation", "the first of its group has the barrier")
    _each(np.diff(ops.signal_begin)[row - 1] == 0, "operation before a joined one", "the last of its group signals")
    place = np.arange(ops.num_ops) - ops.leader_of
    _each(place < MOST_DESTS, "operation", f"a group has at most {MOST_DESTS}")


def _operands(moves: Moves) -> None:
    ops = moves.ops
    _location(moves, "destination", ops.dest_space, ops.dest_rank, ops.dest_index, np.arange(ops.num_ops))
    readonly = np.array([tensor.access is Rights.READ for tensor in moves.tensors] + [False])
    _each(~readonly[ops.dest_space], "destination", "a tensor that is only read is not written")
    row = np.repeat(np.arange(ops.num_ops), np.diff(ops.source_begin))
    _location(moves, "source", ops.source_space, ops.source_rank, ops.source_index, row)


def _location(moves: Moves, what: str, space: Ints, rank: Ints, index: Ints, row: NDArray[np.intp]) -> None:
    """An operand of each of these operations lies in a tensor of the rank itself, cut as the operation is and as long,
    or in a cell of any rank; what is put to a tensor that lands, in that of any rank.
    """
    actor, cut, piece = moves.ops.actor[row], moves.ops.cut[row], moves.ops.piece[row]
    _within(space, len(moves.tensors), what, "its space lies", start=CELL)
    _within(rank, moves.num_ranks, what, "its rank lies")
    # The last entry stands for space -1, a cell.
    sizes = np.array([tensor.blocks * tensor.cut for tensor in moves.tensors] + [moves.num_cells], np.int32)
    cuts = np.array([tensor.cut for tensor in moves.tensors] + [0], np.int32)
    _each((index >= 0) & (index < sizes[space]), what, "its index lies within its tensor, or within the cells")
    is_cell = space == CELL
    lands = np.array([tensor.lands and what == "destination" for tensor in moves.tensors] + [False])
    _each(is_cell | (rank == actor) | lands[space], what, "a tensor belongs to the rank itself")
    if what == "source" and moves.carrier.has_flags_in_data:
        _each(rank == actor, what, "data with its flag is read by the rank that has it")
    _each(is_cell | ((cuts[space] == cut) & (index % cut == piece)), what, "a tensor's chunk has the size class moved")
    for number, tensor in enumerate(moves.tensors):
        if tensor.lengths is not None:
            here = np.flatnonzero(space == number)
            of = tensor.lengths.of_blocks(moves.num_ranks, tensor.blocks)[rank[here], index[here] // tensor.cut]
            _each(of == moves.ops.length[row[here]], what, "a tensor's block has the length moved")


def _flags(moves: Moves, has_tiles: bool) -> None:
    ops, num_ranks = moves.ops, moves.num_ranks
    waiter = np.repeat(ops.actor, np.diff(ops.wait_begin))
    raiser = np.repeat(ops.actor, np.diff(ops.signal_begin))
    most = np.iinfo(np.int32).max
    _within(ops.wait_peer, num_ranks + has_tiles, "wait", "its peer lies")
    _within(ops.signal_peer, num_ranks, "signal", "its peer lies")
    _each(ops.wait_peer != waiter, "wait", "a rank does not wait for itself")
    _each(ops.signal_peer != raiser, "signal", "a rank does not signal itself")
    _within(ops.wait_ordinal, most, "wait", "its ordinal lies", start=1)
    _within(ops.wait_rounds_back, most, "wait", "its rounds_back lies")
    _within(ops.wait_reason, len(Reason), "wait", "its reason is a Reason,")
    counts = moves.signals_per_round
    shape = num_ranks + has_tiles, num_ranks
    _law(
        counts.shape == shape and counts.dtype == np.int32, "signals_per_round is not P x P int32, and a row for tiles"
    )
    pairs = raiser.astype(np.int64) * num_ranks + ops.signal_peer
    raised = np.bincount(pairs, minlength=num_ranks * num_ranks)
    _each(counts[:num_ranks].reshape(-1) == raised, "signals_per_round, pair", "it equals the signals in the tables")
