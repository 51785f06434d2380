"""Cells: versions of a chunk share memory when they are far apart, and never where data carries its flag."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from collectives import main_case, shipped
from proved import HOST_PROTOCOLS, proved

from commdsl.machine.carriers import PACKET
from commdsl.program.lower.cells import DEPTH, allocate
from commdsl.program.lower.rows import Rows
from commdsl.program.moves import CELL

COLLECTIVES = Path(__file__).parent.parent / "schedules" / "collectives"
SLOTS = 3
"""Chunks of the rows made here."""


def rows(*steps: tuple[int, int | None, int | None]) -> Rows:
    """Copies of one rank: the phase, the version of chunk 0 that each writes and the one it reads; None: a tensor."""
    phases, writes, reads = zip(*steps, strict=True)
    zero = np.zeros(len(steps), np.int32)

    def space(versions: tuple[int | None, ...], tensor: int) -> np.ndarray:
        return np.array([tensor if version is None else CELL for version in versions], np.int32)

    def cell(versions: tuple[int | None, ...]) -> np.ndarray:
        return np.array([SLOTS * (version or 0) for version in versions], np.int32)

    return Rows(
        begin=np.array([0, len(steps)], np.int32),
        rank=zero,
        phase=np.array(phases, np.int32),
        turn=zero,
        kind=zero,
        cut=zero + 1,
        piece=zero,
        length=zero,
        dest_space=space(writes, 1),
        dest_rank=zero,
        dest_index=cell(writes),
        dest_form=zero,
        whole=zero + 1,
        joined=zero,
        origin=zero,
        source_begin=np.arange(len(steps) + 1, dtype=np.int32),
        source_space=space(reads, 0),
        source_rank=zero,
        source_index=cell(reads),
        source_weight=zero + 1,
        source_form=zero,
    )


def cells(made: Rows, *, one_write_each: bool = False) -> tuple[list[int], int]:
    """The cell of each version, in the order they are written, and how many there are."""
    placed, number = allocate(made, SLOTS, one_write_each=one_write_each)
    assert set(placed.source_index[placed.source_space == CELL]) <= set(placed.dest_index[placed.dest_space == CELL])
    return placed.dest_index[placed.dest_space == CELL].tolist(), number


def test_versions_take_turns() -> None:
    """A chunk that is written in every phase and read in the next uses as many cells as the depth, in turn."""
    made = rows((0, 0, None), *[(phase, phase, phase - 1) for phase in range(1, 10)])

    assert cells(made) == ([version % DEPTH for version in range(10)], DEPTH)


def test_versions_that_live_long_have_cells_of_their_own() -> None:
    """A version that is read when the one that would take its cell is there, or just then, keeps it: more cells."""
    lasting = [(phase, phase, None) for phase in range(6)]

    assert cells(rows(*lasting, (6, None, 0)))[1] == 6
    assert cells(rows(*lasting[:5], (4, None, 0)))[1] == 5  # read in the very phase
    assert cells(rows(*lasting[:4], (3, None, 0), *lasting[4:]))[1] == DEPTH


def test_one_write_each() -> None:
    """Where data carries its flag no version shares, however far apart."""
    made = rows((0, 0, None), *[(phase, phase, phase - 1) for phase in range(1, 10)])

    assert cells(made, one_write_each=True) == (list(range(10)), 10)


def test_only_what_is_written_has_a_cell() -> None:
    """Versions without memory leave no gaps between the cells; what is read first comes first."""
    assert cells(rows((0, 2, None), (1, 7, None), (2, None, 7))) == ([1, 0], 2)
    assert cells(rows((0, None, None))) == ([], 0)


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_packets_are_written_once(path: Path) -> None:
    """In a shipped schedule every cell of a packet has one writer, and every cell of any protocol is numbered."""
    case = main_case(path, 8)
    assert case is not None
    for protocol in HOST_PROTOCOLS:
        plan = proved(case, protocol).plan
        written = plan.moves.ops.dest_space == CELL
        places = np.stack((plan.moves.ops.dest_rank[written], plan.moves.ops.dest_index[written]), axis=1)
        assert set(places[:, 1]) == set(range(plan.moves.num_cells))
        if protocol.has_flags_in_data:
            assert len(np.unique(places, axis=0)) == len(places)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_number_their_own_cells(ranks: int) -> None:
    """A rank has memory for what is sent to it: in two shots, a part and a sum from each of the others."""
    case = main_case(COLLECTIVES / "allreduce_twoshot.comm", ranks)
    assert case is not None

    assert proved(case).plan.moves.num_cells == 2 * (ranks - 1)


def test_memory_does_not_grow_with_the_steps() -> None:
    """A ring of sixteen ranks has a few cells a chunk in bulk; packets have one for every step."""
    case = main_case(COLLECTIVES.parent / "attention" / "rotation_ring.comm", 16)
    assert case is not None

    assert proved(case).plan.moves.num_cells == DEPTH
    assert proved(case, PACKET).plan.moves.num_cells == 15
