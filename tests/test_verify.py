"""What a legal Plan is: each table broken in one place is refused, with a message that names the table and the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ir_builder
import numpy as np
import pytest
from plans import CELL, FAMILIES, Op, build, changed

from commdsl.language.diagnostics import InternalError
from commdsl.machine.carriers import PACKET
from commdsl.program.memory import Rights, Tensor
from commdsl.program.moves import MOST_DESTS, OpKind
from commdsl.program.plan import Plan
from commdsl.program.proof.memory import memory
from commdsl.program.proof.rounds import Round
from commdsl.program.verify import verify


def plan() -> Plan:
    """Rank 0: stage (waits 0, 1), combine (waits 2, 3) and the same on ranks 1 and 2; cell 0, tensors x and y."""
    programs, tensors, num_cells = FAMILIES["pull_allreduce"](3, 1, credits=True)
    return build(programs, tensors, num_cells, 1)


def table(name: str, row: int, value: int) -> Callable[[Plan], Plan]:
    def change(legal: Plan) -> Plan:
        values = getattr(legal.moves.ops, name).copy()
        values[row] = value
        return changed(legal, ops=replace(legal.moves.ops, **{name: values}))

    return change


def field(**values: object) -> Callable[[Plan], Plan]:
    return lambda legal: changed(legal, **values)


BROKEN = [
    (table("rank_begin", 3, 5), "rank_begin does not span"),
    (table("rank_begin", 1, 5), "rank_begin, entry 1 of 3: begins never decrease"),
    (table("source_begin", 1, 9), "source_begin, entry 1 of 6"),
    (table("source_begin", 1, 0), "operation 0 of 6: it has a source"),
    (table("wait_begin", 0, 1), "wait_begin does not span"),
    (table("kind", 0, len(OpKind)), "operation 0 of 6: kind is an OpKind"),
    (table("kind", 1, OpKind.COPY), "operation 1 of 6: only what combines"),
    (table("cut", 2, 0), "operation 2 of 6: cut lies within 1 ..< 65536"),
    (table("piece", 2, 1), "operation 2 of 6: piece is less than cut"),
    (table("barrier", 2, 2), "operation 2 of 6: barrier"),
    (table("origin", 2, 1), "operation 2 of 6: origin"),
    (table("dest_space", 0, -2), "destination 0 of 6: its space"),
    (table("dest_space", 0, 2), "destination 0 of 6: its space"),
    (table("dest_space", 0, 0), "destination 0 of 6: a tensor that is only read"),
    (table("dest_rank", 0, 3), "destination 0 of 6: its rank"),
    (table("dest_rank", 1, 1), "destination 1 of 6: a tensor belongs to the rank itself"),
    (table("dest_index", 0, 1), "destination 0 of 6: its index"),
    (table("dest_index", 1, -1), "destination 1 of 6: its index"),
    (table("source_rank", 0, 1), "source 0 of 12: a tensor belongs to the rank itself"),
    (table("source_index", 2, 1), "source 2 of 12: its index"),
    (table("whole", 2, 0), "operation 2 of 6: its whole lies within 1 ..< 16777217"),
    (table("source_weight", 2, 0), "source 2 of 12: its weight lies within 1 ..< 16777217"),
    (table("wait_peer", 0, 3), "wait 0 of 12: its peer"),
    (table("wait_peer", 0, 0), "wait 0 of 12: a rank does not wait for itself"),
    (table("wait_ordinal", 1, 0), "wait 1 of 12: its ordinal"),
    (table("wait_rounds_back", 1, -1), "wait 1 of 12: its rounds_back"),
    (table("wait_reason", 1, 3), "wait 1 of 12: its reason"),
    (table("signal_peer", 0, 0), "signal 0 of 12: a rank does not signal itself"),
    (table("signal_peer", 0, 2), "signals_per_round, pair 1 of 9"),
    (field(num_ranks=2), "rank_begin has 4 entries, expected 3"),
    (field(rotation=0), "rotation is 0"),
    (field(num_cells=-1), "num_cells is -1"),
    (field(lanes=0), "lanes is 0"),
    (field(threads=100), "threads is 100"),
    (field(tile_bytes=24), "tile_bytes is 24"),
    (field(carrier="bulk"), "carrier is 'bulk'"),
    (field(has_reduction=False), "only moves bytes"),
    (field(signals_per_round=np.zeros((3, 3))), "signals_per_round is not"),
    (field(alias_safe=("x",)), "alias_safe names `x`"),
    (field(tensors=(Tensor("x", Rights.READ, 1, 1), Tensor("y", Rights.WRITE, 1, 0))), "`y` has no chunk"),
    (field(tensors=(Tensor("x", Rights.READ, 1, 1), Tensor("y", Rights.WRITE, 1, 2))), "the size class moved"),
    (field(tensors=(Tensor("x", Rights.READ, 1, 1), Tensor("x", Rights.READ, 1, 1))), "one name and one access"),
    (field(tensors=(Tensor("x", Rights.READ, 1, 1, is_yield=True),)), "yields `x` are not written"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_tables(change: Callable[[Plan], Plan], message: str) -> None:
    """One wrong entry is one message that says where."""
    verify(plan())
    with pytest.raises(InternalError, match="the Plan is not legal") as refused:
        verify(change(plan()))
    assert message in str(refused.value)


def group() -> Plan:
    """Two ranks, each one group: `x` goes to the peer's cell and, joined, to `y`; then the cell to `y`."""
    programs, tensors, num_cells = FAMILIES["forwarding_allgather"](2, 2, credits=False)
    return build(programs, tensors, num_cells, 2)


def alone(legal: Plan) -> Plan:
    """The first operation of rank 0 joined to nothing, its sources gone."""
    ops = legal.moves.ops
    kept = {name: getattr(ops, name)[1:] for name in ("source_space", "source_rank", "source_index", "source_weight")}
    begin = np.maximum(ops.source_begin - 1, 0)
    joined = ops.joined.copy()
    joined[0] = 1
    return changed(legal, ops=replace(ops, joined=joined, source_begin=begin, **kept))


BROKEN_GROUPS = [
    (alone, "joined operation 0 of 3: it follows an operation of its rank"),
    (table("joined", 2, 2), "operation 2 of 6: joined is a truth value"),
    (table("joined", 2, 1), "operation 2 of 6: it has a source, or has joined one that does"),
    (table("joined", 1, 0), "operation 1 of 6: it has a source, or has joined one that does"),
    (table("kind", 1, OpKind.REDUCE), "joined operation 0 of 2: its kind is that of the operation it joined"),
    (table("cut", 1, 2), "joined operation 0 of 2: its cut is that of the operation it joined"),
    (table("barrier", 1, 1), "joined operation 0 of 2: the first of its group has the barrier"),
    (table("wait_begin", 2, 1), "joined operation 0 of 2: the first of its group waits"),
    (table("signal_begin", 1, 1), "operation before a joined one 0 of 2: the last of its group signals"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN_GROUPS, ids=[message for _, message in BROKEN_GROUPS])
def test_broken_groups(change: Callable[[Plan], Plan], message: str) -> None:
    """A group is one pass of one rank: its first operation reads and waits, its last signals, no other differs."""
    legal = changed(group(), has_reduction=False)
    verify(legal)
    with pytest.raises(InternalError, match="the Plan is not legal") as refused:
        verify(change(legal))
    assert message in str(refused.value)


def test_the_most_destinations() -> None:
    """A pass stores to eight places at most: the kernel has a register for each."""
    programs, tensors, _ = FAMILIES["forwarding_allgather"](2, 2, credits=False)
    leader = programs[0][0]
    joined = [Op(OpKind.COPY, (CELL, 1, cell), (), joined=1) for cell in range(1, MOST_DESTS + 1)]
    verify(build([[leader, *joined[:-1]], []], tensors, MOST_DESTS + 1, 2))
    with pytest.raises(InternalError, match="a group has at most 8"):
        verify(build([[leader, *joined], []], tensors, MOST_DESTS + 1, 2))


def test_lanes_fit_their_blocks() -> None:
    """Every block has a lane, its lanes are at most a block's threads, and each has a barrier of its own."""
    verify(changed(plan(), lanes=16, sms=2, threads=128))
    for fields, message in (
        ({"lanes": 4, "sms": 5}, "sms is 5, expected 1 to 4"),
        ({"lanes": 18, "sms": 2}, "9 lanes of 128 threads are more than a block of 1024"),
        ({"lanes": 32, "sms": 2, "threads": 32}, "16 lanes a block are more than it has barriers for"),
    ):
        with pytest.raises(InternalError) as refused:
            verify(changed(plan(), **fields))
        assert message in str(refused.value)


def test_data_with_its_flag_is_pushed() -> None:
    """A peer's cell is polled by the rank that has it only: nothing is read across the link."""
    with pytest.raises(InternalError, match="data with its flag is read by the rank that has it"):
        verify(changed(plan(), carrier=PACKET))


def test_tables_are_vectors_of_int32() -> None:
    """The kernel reads 32-bit tables, so nothing else will do."""
    legal = plan()
    wide = changed(legal, ops=replace(legal.moves.ops, piece=legal.moves.ops.piece.astype(np.int64)))
    short = changed(legal, ops=replace(legal.moves.ops, piece=legal.moves.ops.piece[:-1]))

    with pytest.raises(InternalError, match=r"ops\.piece is not a vector of int32"):
        verify(wide)
    with pytest.raises(InternalError, match=r"ops\.piece has 5 rows, expected 6"):
        verify(short)


def test_no_rank_does_anything() -> None:
    """A Plan without operations is legal."""
    verify(build([[], []], (Tensor("x", Rights.READ, 1, 1),), 0, 1))


def test_memory() -> None:
    """Symmetric memory must fit in a device's heap, and every cell must have a writer."""
    schedule, legal = ir_builder.ring_allreduce(3), plan()

    assert list(memory(schedule, Round(legal.moves))) == []
    (large,) = memory(schedule, Round(changed(legal, lanes=32, tile_bytes=64 << 20).moves))
    assert (large.code, large.headline) == ("C341", "`by_hand` needs 2 GB of symmetric memory on every rank")
    assert large.notes == ("1 cell in 1 copy, for 32 lanes a tile of 64 MB each",)
    (unused,) = memory(schedule, Round(changed(legal, num_cells=2).moves))
    assert (unused.code, unused.headline) == ("C342", "cell 1 of `by_hand` is never written")
