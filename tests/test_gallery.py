"""The gallery of shipped schedules says what they cost; its formulas are held to in `test_schedules.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from collectives import SCHEDULES, shipped
from gallery import GALLERY

from commdsl import compiler
from commdsl.language.diagnostics import CommError


def test_the_gallery_lists_every_schedule() -> None:
    """Every shipped schedule has a row, and every row a schedule."""
    assert {name for name in GALLERY if not name.startswith("attention_")} == {path.stem for path in shipped()}


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_one_node_of_eight(path: Path) -> None:
    """A node behind a switch runs every schedule, and all but the small-message ones at the bandwidth bound."""
    report = compiler.check(path, ranks=8, on="h200_1x8").report
    slower = {
        "allreduce_oneshot": 4,
        "broadcast_direct": 7,
        "broadcast_scatter": 13 / 7,
        "broadcast_tree": 3,
        "broadcast_chain": 14 / 8,
        "reduce_tree": 3,
    }
    assert report.bandwidth_ratio == pytest.approx(slower.get(path.stem, 1))


@pytest.mark.parametrize(("name", "block"), [("allreduce_two_level", 2 / 16), ("alltoall_two_level", 8)])
def test_two_nodes(name: str, block: float) -> None:
    """Between nodes with one rail per GPU, what crosses is the least that can: 2 (P / G - 1) / P n, and P - G n."""
    report = compiler.check(SCHEDULES / "collectives" / f"{name}.comm", ranks=16, on="h200_2x8").report
    source, dest = report.pair_source, report.pair_dest
    crosses = source // 8 != dest // 8
    assert (source[crosses] % 8 == dest[crosses] % 8).all()
    assert np.bincount(source[crosses], report.pair_blocks[crosses]) == pytest.approx(block)


def test_meshes() -> None:
    """On a mesh those that use every pair at once are at the bound, where a ring uses one link in seven."""
    ratios = {path.stem: compiler.check(path, ranks=8, on="mi300x_1x8").report.bandwidth_ratio for path in shipped()}
    for name in ("allgather_hamilton", "reducescatter_hamilton", "allreduce_hamilton", "rotation_hamilton"):
        assert ratios[name] == pytest.approx(1)
    for name in ("allgather_direct", "reducescatter_direct", "allreduce_twoshot", "rotation_direct", "alltoall_direct"):
        assert ratios[name] == pytest.approx(1)
    for name in ("allgather_ring", "reducescatter_ring", "allreduce_ring", "rotation_ring"):
        assert ratios[name] == pytest.approx(7)


TREES = {"broadcast_tree", "reduce_tree"}
POWERS_OF_TWO = {"allreduce_halving_doubling", "allgather_recursive_doubling"}
ADMITTED = {
    ("ring_8", 8): {path.stem for path in shipped() if path.stem.endswith(("ring", "chain", "shift"))},
    ("dgx1", 8): TREES | POWERS_OF_TWO,
    ("h200_2x8", 16): TREES | POWERS_OF_TWO | {"allreduce_two_level", "alltoall_two_level"},
    ("torus_4x4", 16): set(),
    ("dgx1_dead_link", 8): set(),
    ("barbell", 8): {"reduce_tree"},
}


@pytest.mark.parametrize(("machine", "ranks"), ADMITTED, ids=lambda value: str(value))
def test_machines_with_missing_links(machine: str, ranks: int) -> None:
    """A machine without a link for every pair admits the schedules that keep to its links, and refuses the others."""
    for path in shipped():
        if path.stem in ADMITTED[machine, ranks]:
            assert compiler.check(path, ranks=ranks, on=machine).report.num_transfers
        else:
            with pytest.raises(CommError, match=r"C40[15]"):
                compiler.check(path, ranks=ranks, on=machine)
