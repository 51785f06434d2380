"""What a legal Plan is: each table broken in one place is refused, with a message that names the table and the row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import ir_builder
import numpy as np
import pytest
from plans import FAMILIES, build

from commdsl.checks.memory import memory
from commdsl.diagnostics import InternalError
from commdsl.plan import Access, OpKind, Plan, Tensor
from commdsl.verify import verify


def plan() -> Plan:
    """Rank 0: stage (waits 0, 1), combine (waits 2, 3) and the same on ranks 1 and 2; cell 0, tensors x and y."""
    programs, tensors, num_cells = FAMILIES["pull_allreduce"](3, 1, credits=True)
    return build(programs, tensors, num_cells, 1)


def table(name: str, row: int, value: int) -> Callable[[Plan], Plan]:
    def change(legal: Plan) -> Plan:
        values = getattr(legal.ops, name).copy()
        values[row] = value
        return replace(legal, ops=replace(legal.ops, **{name: values}))

    return change


def field(**values: object) -> Callable[[Plan], Plan]:
    return lambda legal: replace(legal, **values)


BROKEN = [
    (table("rank_begin", 3, 5), "rank_begin does not span"),
    (table("rank_begin", 1, 5), "rank_begin, entry 1 of 3: begins never decrease"),
    (table("source_begin", 1, 9), "source_begin, entry 1 of 6"),
    (table("source_begin", 1, 0), "operation 0 of 6: it has a source"),
    (table("wait_begin", 0, 1), "wait_begin does not span"),
    (table("kind", 0, 3), "operation 0 of 6: kind is an OpKind"),
    (table("kind", 1, OpKind.COPY), "operation 1 of 6: only REDUCE"),
    (table("cut", 2, 0), "operation 2 of 6: cut is positive"),
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
    (field(protocol="bulk"), "protocol is 'bulk'"),
    (field(has_reduction=False), "only moves bytes"),
    (field(signals_per_round=np.zeros((3, 3))), "signals_per_round is not"),
    (field(alias_safe=("x",)), "alias_safe names `x`"),
    (field(tensors=(Tensor("x", Access.READ, 1, 1), Tensor("y", Access.WRITE, 1, 0))), "`y` has no chunk"),
    (field(tensors=(Tensor("x", Access.READ, 1, 1), Tensor("y", Access.WRITE, 1, 2))), "the size class moved"),
    (field(tensors=(Tensor("x", Access.READ, 1, 1), Tensor("x", Access.READ, 1, 1))), "one name and one access"),
    (field(tensors=(Tensor("x", Access.READ, 1, 1, is_yield=True),)), "yields `x` are not written"),
]


@pytest.mark.parametrize(("change", "message"), BROKEN, ids=[message for _, message in BROKEN])
def test_broken_tables(change: Callable[[Plan], Plan], message: str) -> None:
    """One wrong entry is one message that says where."""
    verify(plan())
    with pytest.raises(InternalError, match="the Plan is not legal") as refused:
        verify(change(plan()))
    assert message in str(refused.value)


def test_a_scale_stays_on_its_rank() -> None:
    """What divides by the number of ranks reads and writes memory of one rank."""
    programs, tensors, num_cells = FAMILIES["ring_allgather"](3, 1, True)
    legal = replace(build(programs, tensors, num_cells, 1), has_reduction=True)
    put = int(np.flatnonzero(legal.ops.dest_rank != legal.ops.source_rank[legal.ops.source_begin[:-1]])[0])
    kind = legal.ops.kind.copy()
    kind[put] = OpKind.SCALE

    verify(legal)
    with pytest.raises(InternalError, match="its source is on the rank of its destination"):
        verify(replace(legal, ops=replace(legal.ops, kind=kind)))


def test_tables_are_vectors_of_int32() -> None:
    """The kernel reads 32-bit tables, so nothing else will do."""
    legal = plan()
    wide = replace(legal, ops=replace(legal.ops, piece=legal.ops.piece.astype(np.int64)))
    short = replace(legal, ops=replace(legal.ops, piece=legal.ops.piece[:-1]))

    with pytest.raises(InternalError, match=r"ops\.piece is not a vector of int32"):
        verify(wide)
    with pytest.raises(InternalError, match=r"ops\.piece has 5 rows, expected 6"):
        verify(short)


def test_no_rank_does_anything() -> None:
    """A Plan without operations is legal."""
    verify(build([[], []], (Tensor("x", Access.READ, 1, 1),), 0, 1))


def test_memory() -> None:
    """Symmetric memory must fit in a device's heap, and every cell must have a writer."""
    schedule, legal = ir_builder.ring_allreduce(3), plan()

    assert list(memory(schedule, legal)) == []
    (large,) = memory(schedule, replace(legal, lanes=32, tile_bytes=64 << 20))
    assert (large.code, large.headline) == ("C341", "`by_hand` needs 2 GB of symmetric memory on every rank")
    assert large.notes == ("1 cell in 1 copy, for 32 lanes a tile of 64 MB each",)
    (unused,) = memory(schedule, replace(legal, num_cells=2))
    assert (unused.code, unused.headline) == ("C342", "cell 1 of `by_hand` is never written")
