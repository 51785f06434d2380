"""Lowering: where versions live, how few flags order them, and how many copies of the cells calls need."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from collectives import main_case, shipped
from numpy.typing import NDArray

from commdsl import compiler
from commdsl.compiler import Checked
from commdsl.machine.resources import data_dir
from commdsl.program.memory import Rights, Transport
from commdsl.program.moves import CELL, MOST_THREADS, OpKind, Ops, Reason
from commdsl.program.plan import Plan


def plan(name: str, ranks: int, transport: Transport = Transport.PEER) -> Plan:
    return compiler.check(next(data_dir("schedules").rglob(f"{name}.comm")), ranks=ranks, transport=transport).plan


def from_text(text: str, ranks: int) -> Checked:
    return compiler.check(compiler.read_text(text, "test.comm", Path()), ranks=ranks)


@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_a_ring_needs_one_flag_a_hop(ranks: int) -> None:
    """Every hop of a ring all-reduce is one signal to the next rank; nothing is signalled back."""
    ring = plan("allreduce_ring", ranks)

    assert len(ring.moves.ops.wait_peer) == ranks * 2 * (ranks - 1)
    assert np.array_equal(np.argwhere(ring.moves.signals_per_round), [[r, (r + 1) % ranks] for r in range(ranks)])


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

    assert lowered.moves.rotation == rotation
    assert not lowered.moves.ops.wait_rounds_back.any()


def test_one_way_traffic_is_acknowledged_two_rounds_later() -> None:
    """Who only sends would outrun its receivers: it waits until they are done with the round before the last."""
    chain = plan("broadcast_chain", 4).moves.ops
    back = chain.wait_rounds_back > 0

    assert set(chain.wait_rounds_back[back]) == {2}
    assert set(chain.wait_reason[back]) == {Reason.WRITE_AFTER_READ}


def test_user_memory_is_read_in_place() -> None:
    """A ring reads the caller's tensor where it lies: the cells are for what peers put."""
    ops = plan("allreduce_ring", 4).moves.ops
    in_cell = ops.dest_space == CELL

    assert (ops.dest_rank[in_cell] != actors(ops)[in_cell]).all()


def actors(ops: Ops) -> NDArray[np.intp]:
    return np.repeat(np.arange(len(ops.rank_begin) - 1), np.diff(ops.rank_begin))


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_a_rank_reads_its_own_memory_only(path: Path) -> None:
    """What a schedule gets, or reduces from elsewhere, its owner puts there: links carry stores faster than loads."""
    for transport in Transport:
        case = main_case(path, 6) or main_case(path, 5) or main_case(path, 4)
        assert case is not None
        ops = compiler.check(path, ranks=case.ranks, params=dict(case.params), transport=transport).plan.moves.ops

        assert (ops.source_rank == np.repeat(actors(ops), np.diff(ops.source_begin))).all()


def test_swapping_in_one_step() -> None:
    """All reads of a step come before its writes, so chunks can trade places, in one memory too: by way of cells."""
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

    assert checked.plan.moves.alias_safe == ("x",)
    assert checked.plan.moves.num_cells == 2


def test_reading_and_receiving_one_chunk_in_one_step() -> None:
    """A chunk that a step both sends on and receives gets another cell, and the caller's tensor stays readable."""
    rotation = plan("rotation_ring", 3)
    cells = rotation.moves.ops.dest_index[rotation.moves.ops.dest_space == CELL]

    assert rotation.moves.num_cells > 1
    assert set(cells) == set(range(rotation.moves.num_cells))


@pytest.mark.parametrize("name", ["allreduce_twoshot", "allreduce_ring", "reducescatter_ring", "reduce_tree"])
def test_nvshmem_stores_to_peers_by_copies_only(name: str) -> None:
    """NVSHMEM puts whole tiles: a reduction leaves its result on its rank, and a copy sends it."""
    near, far = plan(name, 4, Transport.NVSHMEM).moves.ops, plan(name, 4).moves.ops

    assert (near.kind[near.dest_rank != actors(near)] == OpKind.COPY).all()
    assert (far.kind[far.dest_rank != actors(far)] == OpKind.REDUCE).any()


@pytest.mark.parametrize("name", ["allreduce_ring", "allreduce_hamilton", "alltoall_two_level", "rotation_direct"])
def test_waits_look_back(name: str) -> None:
    """Every flag awaited is raised by an operation of an earlier phase, so no wait can be part of a cycle."""
    lowered = plan(name, 8)
    ops = lowered.moves.ops
    signal_op = np.repeat(np.arange(ops.num_ops), np.diff(ops.signal_begin))
    sender = np.searchsorted(ops.rank_begin, signal_op, side="right") - 1
    wait_op = np.repeat(np.arange(ops.num_ops), np.diff(ops.wait_begin))
    waiter = np.searchsorted(ops.rank_begin, wait_op, side="right") - 1
    for op, b, a, ordinal in zip(wait_op, waiter, ops.wait_peer, ops.wait_ordinal, strict=True):
        raised = signal_op[(sender == a) & (ops.signal_peer == b)][ordinal - 1]
        raised = ops.leader_of[raised]
        assert lowered.moves.origins[ops.origin[raised]].step <= lowered.moves.origins[ops.origin[op]].step


def test_every_tensor_is_used() -> None:
    """Inputs are read and outputs written on every rank that has them to give or to get."""
    lowered = plan("allgather_hamilton", 5)
    read, written = lowered.moves.ops.source_space, lowered.moves.ops.dest_space

    assert [tensor.access for tensor in lowered.moves.tensors] == [Rights.READ, Rights.WRITE]
    assert 0 in read
    assert 1 in written


def test_the_tile_keeps_the_cells_within_budget() -> None:
    """A schedule with many cells gets smaller tiles, unless `tune` sets the tile."""
    many, few = plan("allreduce_hamilton", 16), plan("allreduce_oneshot", 16)

    assert many.tile_bytes < few.tile_bytes
    assert many.symmetric_bytes < 300 << 20


@pytest.mark.parametrize(
    ("tune", "lanes", "sms", "lanes_per_block"),
    [
        ("lanes 64 sms 16", 64, 16, 4),
        ("sms 4 threads 512", 8, 4, 2),  # as many lanes an SM as its threads allow
        ("lanes 264", 264, 132, 2),  # a block an SM, and lanes that share them
        ("lanes 5", 5, 5, 1),
    ],
)
def test_lanes_are_spread_over_sms(tune: str, lanes: int, sms: int, lanes_per_block: int) -> None:
    """Lanes share the SMs that are asked for, and take one each where none are."""
    moves = "input x\n output y\n ensure permutation(x -> y) r -> (r + 1) % P\n each r { put x -> y @ (r + 1) % P }"
    made = from_text(f"schedule tuned for P ranks {{\n tune {{ {tune} }}\n {moves}\n}}\n", 2).plan

    assert (made.moves.lanes, made.moves.sms, made.moves.lanes_per_block) == (lanes, sms, lanes_per_block)
    assert made.moves.lanes_per_block * made.moves.threads <= MOST_THREADS


def test_the_sms_of_a_role() -> None:
    """A schedule on a role runs on the role's SMs and no others."""
    made = from_text(
        """
        roles overlap { compute sms 0 ..< 124   comm sms 124 ..< 132 }
        schedule beside for P ranks {
          on comm
          input x
          output y
          ensure permutation(x -> y) r -> (r + 1) % P
          each r { put x -> y @ (r + 1) % P }
        }
        """,
        2,
    ).plan

    assert made.moves.sms == 8
    assert made.moves.lanes % 8 == 0


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

    assert (checked.plan.moves.lanes, checked.plan.moves.threads, checked.plan.moves.tile_bytes) == (3, 128, 8192)
