"""Plans made by hand. Turns a list of operations per rank into the tables of a Plan.

Assumes a signal and the waits for it carry the same tag. Uses nothing of the compiler but the Plan itself, so that what
the proof accepts does not depend on what `lower` makes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from commdsl.language.source import Source, Span
from commdsl.machine.carriers import BULK
from commdsl.program.agree import none_heard
from commdsl.program.memory import Rights, Tensor
from commdsl.program.moves import CELL, Moves, OpKind, Ops, Origin
from commdsl.program.plan import Plan, Role

SPAN = Span(Source("by_hand.comm", "each r { put x -> y[r] @ q }\n"), 0, 28)


@dataclass(frozen=True)
class Op:
    """A location is (space, rank, index). `waits`: (peer, tag, rounds back). `signals`: (peer, tag)."""

    kind: OpKind
    dest: tuple[int, int, int]
    sources: tuple[tuple[int, int, int], ...]
    waits: tuple[tuple[int, object, int], ...] = ()
    signals: tuple[tuple[int, object], ...] = ()
    barrier: int = 0
    size_class: tuple[int, int] = (1, 0)
    joined: int = 0
    weights: tuple[int, ...] = ()  # of the sources; (): 1 each
    whole: int = 1


Programs = list[list[Op]]


def build(
    programs: Programs,
    tensors: tuple[Tensor, ...],
    num_cells: int,
    rotation: int,
    alias_safe: tuple[str, ...] = (),
) -> Plan:
    """The Plan of these programs, one per rank; ordinals counted from the tags."""
    num_ranks = len(programs)
    ops = [op for program in programs for op in program]
    ordinal: dict[tuple[int, int, object], int] = {}
    per_round = np.zeros((num_ranks, num_ranks), np.int32)
    for rank, program in enumerate(programs):
        for op in program:
            for peer, tag in op.signals:
                per_round[rank, peer] += 1
                ordinal[rank, peer, tag] = int(per_round[rank, peer])
    waits = [
        (peer, ordinal.get((peer, rank, tag), int(per_round[peer, rank]) + 1), back, 0)
        for rank, program in enumerate(programs)
        for op in program
        for peer, tag, back in op.waits
    ]
    sources = [source for op in ops for source in op.sources]
    tables = Ops(
        rank_begin=begins([len(program) for program in programs]),
        kind=column([op.kind for op in ops]),
        cut=column([op.size_class[0] for op in ops]),
        piece=column([op.size_class[1] for op in ops]),
        length=column([0] * len(ops)),
        barrier=column([op.barrier for op in ops]),
        whole=column([op.whole for op in ops]),
        joined=column([op.joined for op in ops]),
        dest_space=column([op.dest[0] for op in ops]),
        dest_rank=column([op.dest[1] for op in ops]),
        dest_index=column([op.dest[2] for op in ops]),
        source_begin=begins([len(op.sources) for op in ops]),
        source_space=column([source[0] for source in sources]),
        source_rank=column([source[1] for source in sources]),
        source_index=column([source[2] for source in sources]),
        source_weight=column([weight for op in ops for weight in op.weights or [1] * len(op.sources)]),
        wait_begin=begins([len(op.waits) for op in ops]),
        wait_peer=column([wait[0] for wait in waits]),
        wait_ordinal=column([wait[1] for wait in waits]),
        wait_rounds_back=column([wait[2] for wait in waits]),
        wait_reason=column([wait[3] for wait in waits]),
        signal_begin=begins([len(op.signals) for op in ops]),
        signal_peer=column([peer for op in ops for peer, _ in op.signals]),
        origin=column([0] * len(ops)),
    )
    return plan_of(tables, num_ranks, tensors, num_cells, rotation, per_round, alias_safe)


def plan_of(
    ops: Ops,
    num_ranks: int,
    tensors: tuple[Tensor, ...],
    num_cells: int,
    rotation: int,
    per_round: np.ndarray,
    alias_safe: tuple[str, ...] = (),
) -> Plan:
    moves = Moves(
        name="by_hand",
        num_ranks=num_ranks,
        has_reduction=True,
        tensors=tensors,
        num_cells=num_cells,
        rotation=rotation,
        lanes=2,
        sms=2,
        threads=128,
        tile_bytes=4096,
        carrier=BULK,
        ops=ops,
        signals_per_round=per_round,
        heard=none_heard(num_ranks).heard,
        origins=(Origin(SPAN, (("s", 3),), 0),),
        alias_safe=alias_safe,
    )
    return Plan(
        "by_hand", num_ranks, (), "switch", "general", (role_of(moves),), 4096, SPAN, agree=none_heard(num_ranks)
    )


def role_of(moves: Moves) -> Role:
    """The role whose lanes make these moves alone."""
    return Role("comm", moves.lanes, moves.sms, moves.threads, (moves,))


def changed(plan: Plan, **columns: object) -> Plan:
    """A Plan with other moves, and a role of as many lanes."""
    moves = replace(plan.moves, **columns)
    return replace(plan, num_ranks=moves.num_ranks, roles=(role_of(moves),), tile_bytes=moves.tile_bytes)


def column(values: list[int]) -> np.ndarray:
    return np.array(values, np.int32)


def begins(counts: list[int]) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def gathered(num_ranks: int) -> tuple[Tensor, ...]:
    return Tensor("x", Rights.READ, 1, 1), Tensor("y", Rights.WRITE, num_ranks, 1)


def ring_allgather(num_ranks: int, rotation: int, credits: bool) -> tuple[Programs, tuple[Tensor, ...], int]:
    """Cell s of a rank receives in step s; it is forwarded, then copied out. Credits say that it was read."""
    programs = []
    for rank in range(num_ranks):
        after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        program = [Op(OpKind.COPY, (1, rank, rank), ((0, rank, 0),))]
        for step in range(num_ranks - 1):
            source = (CELL, rank, step - 1) if step else (0, rank, 0)
            waits = ((after, ("credit", step), rotation),) if credits else ()
            program.append(
                Op(OpKind.COPY, (CELL, after, step), (source,), waits=waits, signals=((after, ("data", step)),))
            )
            program.append(
                Op(
                    OpKind.COPY,
                    (1, rank, (rank - step - 1) % num_ranks),
                    ((CELL, rank, step),),
                    waits=((before, ("data", step), 0),),
                )
            )
        if credits:  # a cell is read for the last time when it is forwarded, the last one when it is copied out
            for step in range(num_ranks - 1):
                reader = 2 * step + 3 if step < num_ranks - 2 else 2 * step + 2
                op = program[reader]
                program[reader] = replace(op, signals=(*op.signals, (before, ("credit", step))))
        programs.append(program)
    return programs, gathered(num_ranks), num_ranks - 1


def forwarding_allgather(num_ranks: int, rotation: int, credits: bool) -> tuple[Programs, tuple[Tensor, ...], int]:
    """`ring_allgather` in groups: what a rank has read goes to its own tensor and, joined, on to the next rank."""
    programs = []
    for rank in range(num_ranks):
        after, before = (rank + 1) % num_ranks, (rank - 1) % num_ranks
        program = []
        for step in range(num_ranks):
            source = (CELL, rank, step - 1) if step else (0, rank, 0)
            waits = ((before, ("data", step - 1), 0),) if step else ()
            signals = ((before, ("credit", step - 1)),) if step and credits else ()
            home = (1, rank, (rank - step) % num_ranks)
            if step == num_ranks - 1:
                program.append(Op(OpKind.COPY, home, (source,), waits=waits, signals=signals))
                continue
            waits += ((after, ("credit", step), rotation),) if credits else ()
            program.append(Op(OpKind.COPY, (CELL, after, step), (source,), waits=waits))
            program.append(Op(OpKind.COPY, home, (), signals=(*signals, (after, ("data", step))), joined=1))
        programs.append(program)
    return programs, gathered(num_ranks), num_ranks - 1


def chain_broadcast(num_ranks: int, rotation: int, credits: bool) -> tuple[Programs, tuple[Tensor, ...], int]:
    """Rank 0's tensor goes down the chain through cell 0 of each rank: nobody hears of the rank it sends to."""
    programs = []
    for rank in range(num_ranks):
        after, before = rank + 1, rank - 1
        waits = ((before, "data", 0),) if rank else ()
        signals = ((before, "credit"),) if rank and credits else ()
        source = (CELL, rank, 0) if rank else (0, rank, 0)
        home = Op(OpKind.COPY, (1, rank, 0), (source,), waits=waits, signals=signals)
        if rank == num_ranks - 1:
            programs.append([home])
            continue
        waits += ((after, "credit", rotation),) if credits else ()
        put = Op(OpKind.COPY, (CELL, after, 0), (source,), waits=waits)
        programs.append([put, replace(home, sources=(), waits=(), signals=(*signals, (after, "data")), joined=1)])
    return programs, (Tensor("x", Rights.READ, 1, 1), Tensor("y", Rights.WRITE, 1, 1)), 1


def direct_alltoall(num_ranks: int, rotation: int, credits: bool) -> tuple[Programs, tuple[Tensor, ...], int]:
    """Cell d - 1 of a rank receives from the rank at distance d."""
    programs = []
    for rank in range(num_ranks):
        program = [Op(OpKind.COPY, (1, rank, rank), ((0, rank, rank),))]
        for distance in range(1, num_ranks):
            peer = (rank + distance) % num_ranks
            waits = ((peer, "credit", rotation),) if credits else ()
            cell = (CELL, peer, num_ranks - distance - 1)
            program.append(Op(OpKind.COPY, cell, ((0, rank, peer),), waits=waits, signals=((peer, "data"),)))
        for distance in range(1, num_ranks):
            peer = (rank + distance) % num_ranks
            signals = ((peer, "credit"),) if credits else ()
            cell = (CELL, rank, distance - 1)
            program.append(Op(OpKind.COPY, (1, rank, peer), (cell,), waits=((peer, "data", 0),), signals=signals))
        programs.append(program)
    tensors = Tensor("x", Rights.READ, num_ranks, 1), Tensor("y", Rights.WRITE, num_ranks, 1)
    return programs, tensors, num_ranks - 1


def pull_allreduce(num_ranks: int, rotation: int, credits: bool) -> tuple[Programs, tuple[Tensor, ...], int]:
    """Every rank lays its tensor into its cell and reads the cells of all, itself included."""
    programs = []
    for rank in range(num_ranks):
        peers = [peer for peer in range(num_ranks) if peer != rank]
        free = tuple((peer, "read", rotation) for peer in peers) if credits else ()
        stage = Op(OpKind.COPY, (CELL, rank, 0), ((0, rank, 0),), waits=free, barrier=1)
        stage = replace(stage, signals=tuple((peer, "staged") for peer in peers))
        combine = Op(
            OpKind.REDUCE,
            (1, rank, 0),
            tuple((CELL, source, 0) for source in range(num_ranks)),
            waits=tuple((peer, "staged", 0) for peer in peers),
            signals=tuple((peer, "read") for peer in peers) if credits else (),
        )
        programs.append([stage, combine])
    return programs, (Tensor("x", Rights.READ, 1, 1), Tensor("y", Rights.WRITE, 1, 1)), 1


def with_flags_in_data(programs: Programs) -> Programs:
    """The programs without the flags that data brings itself where it carries its own: credits are left."""

    def is_credit(tag: object) -> bool:
        return tag == "credit" or (isinstance(tag, tuple) and tag[0] == "credit")

    return [
        [
            replace(
                op,
                waits=tuple(wait for wait in op.waits if is_credit(wait[1])),
                signals=tuple(signal for signal in op.signals if is_credit(signal[1])),
            )
            for op in program
        ]
        for program in programs
    ]


PUSHING = {
    "ring_allgather": ring_allgather,
    "forwarding_allgather": forwarding_allgather,
    "chain_broadcast": chain_broadcast,
    "direct_alltoall": direct_alltoall,
}
"""Families whose ranks read their own cells only."""

FAMILIES = {
    "ring_allgather": ring_allgather,
    "forwarding_allgather": forwarding_allgather,
    "direct_alltoall": direct_alltoall,
    "pull_allreduce": pull_allreduce,
}


def big_ring_allreduce(num_ranks: int, rotation: int) -> Plan:
    """A ring all-reduce of 4 * (num_ranks - 1) operations a rank, made as arrays.

    Step s < P - 1 puts a partial sum into cell s of the next rank, which combines it at once; step s from P - 1 on puts
    a sum into cell s, from where it is forwarded. At the end all sums are copied out. No credits are needed: before a
    rank writes a cell again, what it received has come all around the ring, past the reader of the cell.
    """
    hops = num_ranks - 1
    rank = np.arange(num_ranks, dtype=np.int32)[:, None]
    step = np.arange(hops, dtype=np.int32)
    after = (rank + 1) % num_ranks
    zero = np.zeros((num_ranks, hops), np.int32)

    def interleave(one: np.ndarray, two: np.ndarray) -> np.ndarray:
        return np.stack((one + zero, two + zero), axis=2).reshape(num_ranks, -1)

    def row(reduces: tuple, spreads: np.ndarray, copies: np.ndarray) -> np.ndarray:
        """Columns (put, combine) of the first half, forwards and copies of the second."""
        parts = interleave(*reduces), spreads + zero, copies + zero
        return np.ascontiguousarray(np.concatenate(parts, axis=1).astype(np.int32))

    sent, got = (rank - step) % num_ranks, (rank - step - 1) % num_ranks
    spread, kept = (rank + 1 - step) % num_ranks, (rank - step) % num_ranks
    first = step == 0
    space = row((np.where(first, 0, 1), 1), np.where(first, 1, CELL), np.full_like(step, CELL))
    index = row((sent, got), np.where(first, spread, hops + step - 1), hops + step)
    dest_space = row((CELL, 1), np.full_like(step, CELL), np.ones_like(step))
    dest_rank = row((after, rank), after, rank)
    dest_index = row((step, got), hops + step, kept)
    # The combining operation has a second source: the tensor as it came in, before the cell.
    kind = row((OpKind.COPY, OpKind.REDUCE), np.full_like(step, OpKind.COPY), np.full_like(step, OpKind.COPY))
    combines = (kind == OpKind.REDUCE).reshape(-1)
    source_begin = begins(combines + 1)
    sources = [np.empty(source_begin[-1], np.int32) for _ in range(4)]
    for table, values in zip(sources, (space, rank + 0 * space, index, np.ones_like(space)), strict=True):
        table[source_begin[:-1]] = values.reshape(-1)
    cell = source_begin[:-1][combines] + 1
    sources[0][source_begin[:-1][combines]] = 0
    sources[0][cell] = CELL
    sources[1][cell] = np.repeat(rank.reshape(-1), hops)
    sources[2][cell] = np.tile(step, num_ranks)
    sources[3][cell] = 1
    chunk = row((sent, got), spread, kept)
    waits, signals, per_round = _ring_flags(num_ranks, kind.shape[1])
    ops = Ops(
        rank_begin=begins(np.full(num_ranks, kind.shape[1])),
        kind=kind.reshape(-1),
        cut=np.full(kind.size, num_ranks, np.int32),
        piece=chunk.reshape(-1),
        length=np.zeros(kind.size, np.int32),
        # A put reads what the operation before it combined, without a wait between.
        barrier=row((1, 0), first, zero).reshape(-1),
        whole=np.ones(kind.size, np.int32),
        joined=np.zeros(kind.size, np.int32),
        dest_space=dest_space.reshape(-1),
        dest_rank=dest_rank.reshape(-1),
        dest_index=dest_index.reshape(-1),
        source_begin=source_begin,
        source_space=sources[0],
        source_rank=sources[1],
        source_index=sources[2],
        source_weight=sources[3],
        **waits,
        **signals,
        origin=np.zeros(kind.size, np.int32),
    )
    tensors = Tensor("x", Rights.READ, 1, num_ranks), Tensor("x", Rights.WRITE, 1, num_ranks)
    return plan_of(ops, num_ranks, tensors, 2 * hops, rotation, per_round)


def _ring_flags(num_ranks: int, length: int) -> tuple[dict, dict, np.ndarray]:
    """The flags of `big_ring_allreduce`: every put raises one to the next rank."""
    hops = num_ranks - 1
    step, rank = np.arange(hops), np.arange(num_ranks)
    signal_op = np.concatenate((2 * step, 2 * hops + step))
    wait_op = np.concatenate((2 * step + 1, 2 * hops + step[1:], [4 * hops - 1]))
    waits, signals = (np.bincount(op, minlength=length) for op in (wait_op, signal_op))
    per_round = np.zeros((num_ranks, num_ranks), np.int32)
    per_round[rank, (rank + 1) % num_ranks] = 2 * hops
    size = len(wait_op) * num_ranks
    return (
        {
            "wait_begin": begins(np.tile(waits, num_ranks)),
            "wait_peer": np.repeat((rank - 1) % num_ranks, len(wait_op)).astype(np.int32),
            "wait_ordinal": np.tile(np.arange(1, len(wait_op) + 1, dtype=np.int32), num_ranks),
            "wait_rounds_back": np.zeros(size, np.int32),
            "wait_reason": np.zeros(size, np.int32),
        },
        {
            "signal_begin": begins(np.tile(signals, num_ranks)),
            "signal_peer": np.repeat((rank + 1) % num_ranks, len(signal_op)).astype(np.int32),
        },
        per_round,
    )
