"""Lowering: where versions live, how few flags order them, and how many copies of the cells calls need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commdsl import compiler
from commdsl.compiler import Checked
from commdsl.plan import CELL, Access, OpKind, Plan, Reason, Transport
from commdsl.resources import data_dir


def plan(name: str, ranks: int, transport: Transport = Transport.PEER) -> Plan:
    return compiler.check(next(data_dir("schedules").rglob(f"{name}.comm")), ranks=ranks, transport=transport).plan


def from_text(text: str, ranks: int) -> Checked:
    return compiler.check(compiler.read_text(text, "test.comm", Path()), ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_a_ring_needs_one_flag_a_hop(ranks: int) -> None:
    """Every hop of a ring all-reduce is one signal to the next rank; nothing is signalled back."""
    ring = plan("allreduce_ring", ranks)

    assert len(ring.ops.wait_peer) == ranks * 2 * (ranks - 1)
    assert np.array_equal(np.argwhere(ring.signals_per_round), [[r, (r + 1) % ranks] for r in range(ranks)])


@pytest.mark.parametrize(
    ("name", "rotation"),
    [
        ("allreduce_ring", 1),  # who sends again has heard of everybody in this very call
        ("allreduce_twoshot", 1),
        ("allreduce_oneshot", 2),  # a peer may still read this call's input when the next call begins
        ("alltoall_direct", 2),
    ],
)
def test_copies_of_the_cells(name: str, rotation: int) -> None:
    """Calls share the cells if the flags within a call keep them apart, and take turns between two copies if not."""
    lowered = plan(name, 8)

    assert lowered.rotation == rotation
    assert not lowered.ops.wait_rounds_back.any()


def test_one_way_traffic_is_acknowledged_two_rounds_later() -> None:
    """Who only sends would outrun its receivers: it waits until they are done with the round before the last."""
    chain = plan("broadcast_chain", 4).ops
    back = chain.wait_rounds_back > 0

    assert set(chain.wait_rounds_back[back]) == {2}
    assert set(chain.wait_reason[back]) == {Reason.WRITE_AFTER_READ}


def test_user_memory_is_read_in_place() -> None:
    """A ring reads the caller's tensor where it lies: nothing is staged in, and only what peers put is copied out."""
    ops = plan("allreduce_ring", 4).ops
    copies_from_user = (ops.kind == OpKind.COPY) & (ops.source_space[ops.source_begin[:-1]] >= 0)

    assert (ops.dest_rank[copies_from_user] != np.repeat(np.arange(4), np.diff(ops.rank_begin))[copies_from_user]).all()


def test_what_a_peer_pulls_is_staged() -> None:
    """A peer cannot read the caller's tensor: a one-shot all-reduce copies it to a cell first."""
    ops = plan("allreduce_oneshot", 4).ops

    assert (ops.kind[ops.rank_begin[:-1]] == OpKind.COPY).all()
    assert (ops.dest_space[ops.rank_begin[:-1]] == CELL).all()


def test_swapping_in_one_step() -> None:
    """All reads of a step come before its writes, so chunks can trade places; the tensors may then not be one."""
    checked = from_text(
        """
        schedule swap for P ranks {
          inout x[2 blocks]
          ensure each r { x[0] == x[1] @ r  x[1] == x[0] @ r }
          each r { copy x[0] -> x[1]  copy x[1] -> x[0] }
        }
        """,
        2,
    )

    assert checked.plan.alias_safe == ()


def test_reading_and_receiving_one_chunk_in_one_step() -> None:
    """A chunk that a step both sends on and receives gets another cell, and the caller's tensor stays readable."""
    rotation = plan("rotation_ring", 3)
    cells = rotation.ops.dest_index[rotation.ops.dest_space == CELL]

    assert rotation.num_cells > 1
    assert set(cells) == set(range(rotation.num_cells))


def test_nvshmem_touches_peers_by_copies_only() -> None:
    """NVSHMEM brings tiles, it cannot be read by the element: no reduction has an operand on a peer."""
    ops = plan("allreduce_twoshot", 4, Transport.NVSHMEM).ops
    rank = np.repeat(np.arange(4), np.diff(ops.rank_begin))
    row = np.repeat(np.arange(ops.num_ops), np.diff(ops.source_begin))
    far = (ops.source_space == CELL) & (ops.source_rank != rank[row])

    assert far.any()
    assert (ops.kind[row[far]] == OpKind.COPY).all()


@pytest.mark.parametrize("name", ["allreduce_ring", "allreduce_hamilton", "alltoall_two_level", "rotation_direct"])
def test_waits_look_back(name: str) -> None:
    """Every flag awaited is raised by an operation of an earlier phase, so no wait can be part of a cycle."""
    lowered = plan(name, 8)
    ops = lowered.ops
    signal_op = np.repeat(np.arange(ops.num_ops), np.diff(ops.signal_begin))
    sender = np.searchsorted(ops.rank_begin, signal_op, side="right") - 1
    wait_op = np.repeat(np.arange(ops.num_ops), np.diff(ops.wait_begin))
    waiter = np.searchsorted(ops.rank_begin, wait_op, side="right") - 1
    for op, b, a, ordinal in zip(wait_op, waiter, ops.wait_peer, ops.wait_ordinal, strict=True):
        raised = signal_op[(sender == a) & (ops.signal_peer == b)][ordinal - 1]
        assert lowered.origins[ops.origin[raised]].step <= lowered.origins[ops.origin[op]].step


def test_every_tensor_is_used() -> None:
    """Inputs are read and outputs written on every rank that has them to give or to get."""
    lowered = plan("allgather_hamilton", 5)
    read, written = lowered.ops.source_space, lowered.ops.dest_space

    assert [tensor.access for tensor in lowered.tensors] == [Access.READ, Access.WRITE]
    assert 0 in read
    assert 1 in written


def test_the_tile_keeps_the_cells_within_budget() -> None:
    """A schedule with many cells gets smaller tiles, unless `tune` sets the tile."""
    many, few = plan("allreduce_hamilton", 16), plan("allreduce_oneshot", 16)

    assert many.tile_bytes < few.tile_bytes
    assert many.symmetric_bytes < 300 << 20


def test_tune_sets_what_is_launched() -> None:
    """Lanes, threads and tile of a `tune` block are those of the Plan."""
    checked = from_text(
        """
        schedule tuned for P ranks {
          input x
          output y
          ensure permutation(x -> y) r -> (r + 1) % P
          tune { lanes 3 threads 128 tile 8 KB }
          each r { put x -> y @ (r + 1) % P }
        }
        """,
        2,
    )

    assert (checked.plan.lanes, checked.plan.threads, checked.plan.tile_bytes) == (3, 128, 8192)
