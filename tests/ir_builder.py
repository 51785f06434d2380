"""Builds IR by hand, as arrays, for tests of the proofs that should not depend on the front end.

Assumes nothing of the text: every statement gets a span of its own in a made-up source. Does not check what it builds.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from commdsl.ir.contracts import Contract, Rotation
from commdsl.ir.schedules import AnyStep, Buffer, CycleSet, RoleSet, Schedule, Statement, Step, Tuning, Yield
from commdsl.language.kinds import BufferKind, LinkScope, MoveKind
from commdsl.language.source import Source, Span
from commdsl.machine.topology import Link, Topology

SOURCE = Source("built.comm", "\n".join(f"statement {number}" for number in range(100)))


def span(line: int) -> Span:
    """The whole of a 1-based line of the made-up source."""
    start = SOURCE.line_starts[line - 1]
    return Span(SOURCE, start, start + len(SOURCE.line(line)))


def switch(ranks: int) -> Topology:
    return Topology("flat", 1, ranks, 132, (Link("nvlink", LinkScope.IN_NODE, 450e9, np.inf, 0.7e-6),), idealised=True)


def ring_machine(ranks: int) -> Topology:
    here = np.arange(ranks)
    there = (here + 1) % ranks
    pairs = np.concatenate([np.stack([here, there], 1), np.stack([there, here], 1)]).astype(np.int32)
    return Topology("ringlet", 1, ranks, 100, (Link("hop", LinkScope.PAIRS, np.inf, 50e9, 1e-6, pairs),))


def two_nodes(gpus: int) -> Topology:
    links = (
        Link("nvlink", LinkScope.IN_NODE, 400e9, np.inf, 1e-6),
        Link("rail", LinkScope.ACROSS_SAME_GPU, 50e9, np.inf, 4e-6),
    )
    return Topology("pairbox", 2, gpus, 132, links)


def buffer(kind: BufferKind, name: str, blocks: int = 1, cut: int = 1) -> Buffer:
    dims = tuple(size for size in (blocks, cut) if size > 1)
    return Buffer(name, kind, dims, blocks, cut, span=span(1))


def ints(values: ArrayLike, like: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.asarray(values, dtype=np.int32), like.shape).astype(np.int32)


def move(
    kind: MoveKind,
    source: tuple[int, ArrayLike, ArrayLike],
    dest: tuple[int, ArrayLike, ArrayLike],
    actor: np.ndarray,
    line: int = 5,
    is_list: bool = False,
    valid: np.ndarray | None = None,
) -> Statement:
    """`source` and `dest` are (buffer, ranks, chunks); with `is_list` the source arrays are (n, k)."""
    actor = np.asarray(actor, dtype=np.int32)
    wide = np.broadcast_arrays(np.asarray(source[1]), np.asarray(source[2]), actor[:, None] if is_list else actor)
    ranks, chunks = (np.asarray(part, dtype=np.int32).reshape(len(actor), -1) for part in wide[:2])
    accumulate = kind is MoveKind.REDUCE and not is_list
    places = ints(dest[1], actor), ints(dest[2], actor)
    return Statement(kind, accumulate, is_list, actor, source[0], ranks, chunks, valid, dest[0], *places, span(line))


def step(*moves: Statement, **bindings: int) -> Step:
    return Step(moves, tuple(bindings.items()), moves[0].span)


def allreduce_contract(ranks: int, chunks: int, source: int = 0, dest: int = 0) -> Contract:
    value = np.arange(chunks, dtype=np.int32)
    dest_rank = np.repeat(np.arange(ranks, dtype=np.int32), chunks)
    every = np.tile(np.arange(ranks, dtype=np.int32), (chunks, 1))
    return Contract(
        "allreduce", source, dest, "sum", dest_rank, np.tile(value, ranks), np.tile(value, ranks),
        every, np.broadcast_to(value[:, None], every.shape), None, span(3),
    )  # fmt: skip


def copies_contract(
    name: str, source: int, dest: int, rows: list[tuple[int, int, int, int]], root: int | None = None
) -> Contract:
    """Rows: (destination rank, destination chunk, source rank, source chunk)."""
    columns = np.array(rows, dtype=np.int32).reshape(-1, 4).T
    value = np.arange(columns.shape[1], dtype=np.int32)
    return Contract(
        name,
        source,
        dest,
        None,
        columns[0],
        columns[1],
        value,
        columns[2][:, None],
        columns[3][:, None],
        root,
        span(3),
    )


def allgather_contract(ranks: int, source: int = 0, dest: int = 1) -> Contract:
    return copies_contract("allgather", source, dest, [(r, q, q, 0) for r in range(ranks) for q in range(ranks)])


def schedule(
    ranks: int,
    buffers: tuple[Buffer, ...],
    contracts: tuple[Contract, ...],
    steps: tuple[AnyStep, ...],
    topology: Topology | None = None,
    cycles: tuple[CycleSet, ...] = (),
    roles: tuple[RoleSet, ...] = (),
    role: str | None = None,
    tuning: Tuning | None = None,
) -> Schedule:
    return Schedule(
        "built",
        ranks,
        topology or switch(ranks),
        (),
        buffers,
        contracts,
        cycles,
        steps,
        tuning or Tuning(),
        role,
        roles,
        span(2),
    )


def ring_allreduce(ranks: int, topology: Topology | None = None) -> Schedule:
    """The schedule of DESIGN.md section 1: statement 5 reduces, statement 6 puts."""
    me = np.arange(ranks, dtype=np.int32)
    there = (me + 1) % ranks
    steps: list[AnyStep] = []
    for s in range(ranks - 1):
        chunk = (me - s) % ranks
        steps.append(step(move(MoveKind.REDUCE, (0, me, chunk), (0, there, chunk), me, 5), s=s))
    for s in range(ranks - 1):
        chunk = (me + 1 - s) % ranks
        steps.append(step(move(MoveKind.PUT, (0, me, chunk), (0, there, chunk), me, 6), s=s))
    x = buffer(BufferKind.INOUT, "x", cut=ranks)
    return schedule(ranks, (x,), (allreduce_contract(ranks, ranks),), tuple(steps), topology)


def rotation_contract(source: int, dest: int) -> Contract:
    """Every rank's chunk of one buffer, handed over in it or in another."""
    return replace(copies_contract("rotation", source, dest, []), rotation=Rotation((source,), (dest,), None))


def ring_rotation(ranks: int, yields: int | None = None) -> Schedule:
    """kv travels the ring, shown before the first step and after each."""
    me = np.arange(ranks, dtype=np.int32)
    steps: list[AnyStep] = [Yield((0,), (), span(6))]
    for s in range(1, ranks):
        steps.append(step(move(MoveKind.PUT, (0, me, 0), (0, (me + 1) % ranks, 0), me, 5), s=s))
        steps.append(Yield((0,), (("s", s),), span(7)))
    rotation = rotation_contract(0, 0)
    kept = steps if yields is None else [*steps[: 2 * yields - 1]]
    return schedule(ranks, (buffer(BufferKind.INOUT, "kv"),), (rotation,), tuple(kept))
