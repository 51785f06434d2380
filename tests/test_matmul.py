"""A product of matrices: who makes what, and a kernel that Hopper's tensor cores take."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from commdsl.build import nvrtc
from commdsl.build.matmul import ARCH, Product, Table, Tiling, emitted, table
from commdsl.machine.config import from_environment

TILINGS = [Tiling(columns, cluster, parts) for columns in (128, 256) for cluster in (1, 2) for parts in (1, 4, 8)]


def pieces(found: Table) -> list[list[tuple[int, int, int, int, int, int]]]:
    """By worker, in order: row and column of the tile, first and last stage, slot, parts."""
    flat = [(*tile, *depth, slot, parts) for tile, depth, slot, parts in found.pieces.tolist()]
    return [flat[first:last] for first, last in zip(found.begin, found.begin[1:], strict=False)]


def random_table(seed: int) -> tuple[tuple[int, int, int], Tiling, Table]:
    dice = random.Random(seed)
    product = Product(
        *(8 * 2 ** dice.randrange(8) * dice.choice((1, 3, 5)) for _ in range(3)), gated=dice.random() < 0.3
    )
    tiling = dice.choice(TILINGS)
    return product.tiles(tiling), tiling, table(product, tiling, dice.choice((132, 116, 7)) // tiling.cluster)


@pytest.mark.parametrize("seed", range(40))
def test_every_stage_of_every_tile_is_made_once(seed: int) -> None:
    """Whatever the size and the tiling, the pieces are the whole product."""
    (high, wide, depth), _, found = random_table(seed)
    made = Counter(
        (row, column, stage)
        for worker in pieces(found)
        for row, column, first, last, _, _ in worker
        for stage in range(first, last)
    )
    assert len(made) == high * wide * depth
    assert set(made.values()) == {1}


@pytest.mark.parametrize("seed", range(40))
def test_who_adds_up_a_tile_waits_for_pieces_that_come_first(seed: int) -> None:
    """The first part names the slots of the later ones, in the order of the depth; in every worker's list what others
    wait for stands before what waits, so no two wait for each other.
    """
    _, tiling, found = random_table(seed)
    left = {
        slot: (row, column, first, last)
        for worker in pieces(found)
        for row, column, first, last, slot, parts in worker
        if parts < 0
    }
    assert len(left) == found.slots
    for worker in pieces(found):
        waits = [parts > 0 for *_, parts in worker if parts != 0]
        assert waits == sorted(waits)
        assert [parts == 0 for *_, parts in worker] == sorted(parts == 0 for *_, parts in worker)
        for row, column, first, last, slot, parts in worker:
            assert first == 0 or parts < 0
            for one in range(slot, slot + max(parts, 0)):
                assert left[one][:3] == (row, column, last)
                last = left.pop(one)[3]
            assert parts < tiling.parts
    assert not left


def test_what_is_left_over_is_dealt_out_evenly() -> None:
    """40 tiles for 132 workers, each cut into up to 4: all have as much to do, but for one stage."""
    product, tiling = Product(1024, 1280, 8192), Tiling(256, 1, 4)
    lengths = [
        sum(last - first for _, _, first, last, _, _ in worker) for worker in pieces(table(product, tiling, 132))
    ]
    assert min(lengths) == 38
    assert max(lengths) == 39


@pytest.mark.parametrize(
    "product",
    [
        Product(8, 8, 8),
        Product(8, 8, 8, dtype="float16", result="float32", a_deep=False, b_deep=False),
        Product(8, 8, 8, bias=True, gelu=True, residual=True),
        Product(8, 8, 8, gated=True),
    ],
    ids=["plain", "to float32", "gelu", "gated"],
)
@pytest.mark.parametrize("tiling", [Tiling(256, 2), Tiling(128, 1)], ids=["256", "128"])
def test_cubin(product: Product, tiling: Tiling) -> None:
    """NVRTC takes the text for sm_90a."""
    cubin = nvrtc.build(emitted(product, tiling), product.defines(), from_environment(), ARCH).read_bytes()
    assert cubin.startswith(b"\x7fELF")
    assert b"commdsl_matmul" in cubin
