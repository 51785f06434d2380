"""The arithmetic of chunks, slices, lanes and rounds."""

from __future__ import annotations

import struct
from dataclasses import replace
from itertools import pairwise

import plans
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import changed
from proved import HOST_PROTOCOLS

from commdsl.machine.carriers import Carrier
from commdsl.program import sizes
from commdsl.program.arguments import arguments
from commdsl.program.plan import Plan

BLOCKS = st.integers(0, 1 << 40) | st.integers(0, 4096)


def plan(cut: int, lanes: int = 4, tile_bytes: int = 4096) -> Plan:
    """A Plan whose operations have the classes (cut, 0) .. (cut, cut - 1)."""
    made = plans.build(*plans.ring_allgather(2, 2, False)[:3], rotation=2)
    pieces = plans.column(list(range(cut)))
    ops = replace(made.moves.ops, cut=pieces * 0 + cut, piece=pieces)
    return changed(made, ops=ops, lanes=lanes, sms=lanes, tile_bytes=tile_bytes)


@given(BLOCKS, st.integers(1, 64))
def test_chunks_tile_the_block(block_bytes: int, cut: int) -> None:
    """Pieces follow each other without gap, start on 16 bytes, and differ by one unit at most."""
    ranges = [sizes.piece_range(block_bytes, cut, piece) for piece in range(cut)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == block_bytes
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(first % 16 == 0 or first == block_bytes for first, _ in ranges)
    units = [-(-(last - first) // 16) for first, last in ranges]
    assert max(units) - min(units) <= 1


@given(BLOCKS, st.integers(1, 132))
def test_slices_tile_the_chunk(chunk_bytes: int, lanes: int) -> None:
    """Slices follow each other without gap, start on 16 bytes, and none exceeds the share that decides the rounds."""
    share = sizes.lane_share(chunk_bytes, lanes)
    ranges = [sizes.slice_range(chunk_bytes, share, lane) for lane in range(lanes)]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == chunk_bytes
    assert all(before[1] == after[0] for before, after in pairwise(ranges))
    assert all(first % 16 == 0 or first == chunk_bytes for first, _ in ranges)
    assert all(last - first <= share for first, last in ranges)


@given(
    st.integers(1, 1 << 28), st.integers(1, 9), st.integers(1, 32), st.sampled_from([64, 4096, 131072]),
    st.sampled_from(HOST_PROTOCOLS),
)  # fmt: skip
def test_rounds_cover_every_slice(block_bytes: int, cut: int, lanes: int, tile_bytes: int, protocol: Carrier) -> None:
    """Every lane's rounds follow each other without gap, none longer than a tile; one round less leaves a rest."""
    made = changed(plan(cut, lanes, tile_bytes), carrier=protocol)
    launch = sizes.launch(made.moves, block_bytes, min_slice_bytes=1024)
    largest = max(last - first for first, last in (sizes.piece_range(block_bytes, cut, i) for i in range(cut)))
    assert 1 <= launch.active_lanes <= lanes
    assert launch.active_lanes == 1 or (launch.active_lanes - 1) * 1024 < largest
    assert launch.share_bytes == sizes.lane_share(largest, launch.active_lanes)
    for lane in range(launch.active_lanes):
        ranges = [sizes.round_range(made.moves, launch, lane, number) for number in range(min(launch.rounds, 4))]
        ranges += [sizes.round_range(made.moves, launch, lane, max(launch.rounds - 1, 0))]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == launch.share_bytes
        assert all(before[1] == after[0] for before, after in pairwise(ranges[:-1]))
        assert all(0 <= last - first <= tile_bytes and first % 16 == 0 for first, last in ranges)
    late = [sizes.round_range(made.moves, launch, lane, launch.rounds - 1) for lane in range(sizes.STAGGERED)]
    assert any(first < last for first, last in late)


@pytest.mark.parametrize(
    ("lanes", "sms", "active", "blocks", "threads"),
    [
        (16, 16, 16, 16, 128),  # a block a lane
        (16, 4, 16, 4, 512),  # lanes spread over few SMs share their blocks
        (16, 4, 6, 4, 256),  # some blocks have one lane more than others: the threads are those of the fullest
        (16, 4, 3, 3, 128),  # fewer lanes than SMs: a block each
        (16, 1, 1, 1, 128),
    ],
)
def test_lanes_are_spread_over_blocks(lanes: int, sms: int, active: int, blocks: int, threads: int) -> None:
    """Lane l is part of block l % sms, so blocks and threads follow from the lanes at work."""
    made = changed(plan(1, lanes), sms=sms)
    launch = sizes.launch(made.moves, active * 1024, min_slice_bytes=1024)
    assert launch.active_lanes == active
    assert (launch.blocks(made.moves), launch.threads(made.moves)) == (blocks, threads)
    fullest = max(sum(lane % sms == block for lane in range(active)) for block in range(blocks))
    assert threads == fullest * made.moves.threads


def test_an_empty_tensor_launches_nothing() -> None:
    """Without a byte to move there are no lanes and no rounds."""
    assert sizes.launch(plan(3).moves, 0, min_slice_bytes=1024) == sizes.Launch(0, 0, 0, 0)


def test_host_lanes_are_capped() -> None:
    """The host build runs two lanes at most, whatever the Plan has."""
    assert sizes.host_launch(plan(1, lanes=32).moves, 1 << 20).active_lanes == 2
    assert sizes.host_launch(plan(1, lanes=1).moves, 1 << 20).active_lanes == 1


def test_arguments_are_one_struct() -> None:
    """Words of 8 bytes, then numbers of 4, each field where it is announced; short arrays end in zeros."""
    layout = arguments(plan(1))
    words = {"heap": [10], "tensors": [20, 21], "timeout_ns": 5, "error": 6, "desk": [30], "notice": 7, "rank": 1}
    words |= {"digest": 8}
    packed = layout.pack({**words, **sizes.Launch(1000, 3, 2, 336, 16).arguments()})
    ranks, tensors = plan(1).num_ranks, len(plan(1).moves.tensors)

    assert packed == struct.pack(
        f"<{ranks}Q2Q{ranks}QQ{tensors}Q3QQ3i4x",
        *[10, *[0] * (ranks - 1)],
        *(5, 6),
        *[30, *[0] * (ranks - 1)],
        7,
        *(20, 21)[:tensors],
        *(1000, 336, 16),
        8,
        *(1, 3, 2),
    )
    assert len(packed) == layout.size
    assert layout.offset("tensors") == 8 * (2 * ranks + 3)
    assert layout.address_words == (*range(ranks), *range(ranks + 1, 2 * ranks + 3 + tensors))
