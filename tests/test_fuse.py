"""Passes: what a rank makes or reads is stored wherever it is wanted at once, and no store comes too early."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from collectives import Case, main_case, shipped
from hypothesis import given, settings
from numpy.typing import NDArray
from proved import HOST_PROTOCOLS, proved
from strategies import Program, programs

from commdsl import compiler
from commdsl.compiler import Checked
from commdsl.language.kinds import BufferKind
from commdsl.program.memory import Transport
from commdsl.program.moves import CELL, MOST_DESTS, OpKind, Ops
from commdsl.program.plan import Plan

COLLECTIVES = Path(__file__).parent.parent / "schedules" / "collectives"


def plan(name: str, ranks: int) -> Plan:
    case = main_case(COLLECTIVES / f"{name}.comm", ranks)
    assert case is not None
    return proved(case).plan


def from_text(body: str, ranks: int) -> Checked:
    text = f"schedule drawn for P ranks {{\n{body}}}\n"
    return compiler.check(compiler.read_text(text, "drawn.comm", Path()), ranks=ranks)


def actors(ops: Ops) -> NDArray[np.intp]:
    return np.repeat(np.arange(len(ops.rank_begin) - 1), np.diff(ops.rank_begin))


def passes(ops: Ops, rank: int) -> list[tuple[OpKind, list[str]]]:
    """Each pass of a rank: what it does, and whether it stores to a peer, the rank's own cell or a tensor."""
    found: list[tuple[OpKind, list[str]]] = []
    for op in range(ops.rank_begin[rank], ops.rank_begin[rank + 1]):
        if not ops.joined[op]:
            found.append((OpKind(ops.kind[op]), []))
        place = "tensor" if ops.dest_space[op] != CELL else "own cell" if ops.dest_rank[op] == rank else "peer"
        found[-1][1].append(place)
    return found


COPY, REDUCE = OpKind.COPY, OpKind.REDUCE


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_step_of_a_ring_is_one_pass(ranks: int) -> None:
    """Sums are handed on as they are made, the last also returned; what is passed on is kept on the way."""
    hops = ranks - 2
    for rank in range(ranks):
        assert passes(plan("allreduce_ring", ranks).moves.ops, rank) == [
            (COPY, ["peer"]),
            *[(REDUCE, ["peer"])] * hops,
            (REDUCE, ["peer", "tensor"]),
            *[(COPY, ["peer", "tensor"])] * hops,
            (COPY, ["tensor"]),
        ]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_reduction_of_two_shots_stores_to_all(ranks: int) -> None:
    """A rank's share of the sum goes to every peer and to the tensor in the pass that makes it."""
    for rank in range(ranks):
        assert passes(plan("allreduce_twoshot", ranks).moves.ops, rank) == [
            *[(COPY, ["peer"])] * (ranks - 1),
            (REDUCE, [*["peer"] * (ranks - 1), "tensor"]),
            *[(COPY, ["tensor"])] * (ranks - 1),
        ]


def test_beyond_the_most_stores() -> None:
    """With more peers than one pass stores to, the result stays in a cell, and further passes take it from there."""
    for rank in range(16):
        reduction, *rest = passes(plan("allreduce_twoshot", 16).moves.ops, rank)[15:]
        assert reduction[0] is REDUCE
        assert len(reduction[1]) == MOST_DESTS
        assert "own cell" in reduction[1]
        stores = reduction[1] + [place for kind, places in rest[:2] for place in places]
        assert (stores.count("peer"), stores.count("tensor")) == (15, 1)


def test_one_source_is_read_once() -> None:
    """A root's tensor goes to all ranks in one pass; so does what a rank gives to all in an all-gather."""
    assert passes(plan("allgather_direct", 4).moves.ops, 0)[0] == (COPY, ["peer"] * 3)
    case = Case(COLLECTIVES / "broadcast_direct.comm", 4, (("root", 0),))
    assert passes(proved(case).plan.moves.ops, 0)[0] == (COPY, ["peer"] * 3)


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_every_pass(path: Path) -> None:
    """A pass stores to eight places at most, all different, and nothing is stored where nobody reads it."""
    for ranks in (3, 8):
        case = main_case(path, ranks)
        for protocol in HOST_PROTOCOLS if case is not None else ():
            every_pass_is_legal(proved(case, protocol).plan)


def every_pass_is_legal(lowered: Plan) -> None:
    ops = lowered.moves.ops
    place = np.stack((ops.leader_of, ops.dest_space, ops.dest_rank, ops.dest_index), axis=1)
    assert len(np.unique(place, axis=0)) == ops.num_ops
    assert np.bincount(ops.leader_of).max(initial=0) <= MOST_DESTS
    read = set(zip(ops.source_rank[ops.source_space == CELL], ops.source_index[ops.source_space == CELL], strict=True))
    written = ops.dest_space == CELL
    assert set(zip(ops.dest_rank[written], ops.dest_index[written], strict=True)) == read
    copies = ops.kind[ops.leaders] == OpKind.COPY
    own = (ops.dest_space == CELL) & (ops.dest_rank == actors(ops))
    assert not (own[ops.leaders] & copies & (ops.source_space[ops.source_begin[ops.leaders]] == CELL)).any()


@settings(max_examples=60)
@given(programs())
def test_every_pass_of_any_schedule(program: Program) -> None:
    """The same for schedules as they are drawn; and all inout buffers may be one memory, however they are used."""
    for transport in Transport:
        files = compiler.read_text(program.text, "drawn.comm", Path())
        checked = compiler.check(files, ranks=program.ranks, transport=transport)
        ops = checked.plan.moves.ops
        assert np.bincount(ops.leader_of).max(initial=0) <= MOST_DESTS
        if transport is Transport.NVSHMEM:
            assert (ops.kind[ops.dest_rank != actors(ops)] == OpKind.COPY).all()
        inout = {buffer.name for buffer in checked.schedule.buffers if buffer.kind is BufferKind.INOUT}
        assert set(checked.plan.moves.alias_safe) == inout


def test_who_combines_in_place_waits_for_other_readers() -> None:
    """What a rank adds to its own chunk goes over it once another operation of the same step has read it."""
    checked = from_text(
        """  inout x
  output y
  ensure each r where r == 1 { y == sum(x @ q for q in 0 ..< P)   x == sum(x @ q for q in 0 ..< P) }
  each r {
    if r == 1 { reduce x @ all -> y }
    if r == 0 { reduce x -> x @ 1 }
  }
""",
        2,
    )

    assert checked.plan.moves.alias_safe == ("x",)


def test_nothing_is_overwritten_before_it_is_read() -> None:
    """A result that replaces what another operation of the step still reads waits in a cell; without such a one not."""
    trade = from_text(
        """  inout x[2 blocks]
  ensure each r { x[0] == x[1] @ r  x[1] == x[0] @ r }
  each r { copy x[0] -> x[1]  copy x[1] -> x[0] }
""",
        2,
    )
    assert passes(trade.plan.moves.ops, 0) == [(COPY, ["own cell"])] * 2 + [(COPY, ["tensor"])] * 2

    overwrite = from_text(
        """  inout x[2 blocks]
  ensure each r { x[0] == x[0] @ r  x[1] == x[0] @ r }
  each r { copy x[0] -> x[1] }
""",
        2,
    )
    assert passes(overwrite.plan.moves.ops, 0) == [(COPY, ["tensor"])] * 2
    assert overwrite.plan.moves.num_cells == 0
