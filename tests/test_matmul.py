"""A product of matrices: who makes what, and a kernel that Hopper's tensor cores take."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from commdsl.build import nvrtc
from commdsl.build.matmul import ARCH, Product, Table, Tiling, emitted, table
from commdsl.machine.config import from_environment

TILINGS = [Tiling(columns, cluster, parts) for columns in (128, 256) for cluster in (1, 2) for parts in (1, 4, 8)]


def pieces(found: Table) -> list[list[tuple[int, ...]]]:
    """By worker, in order: turn, row and column of the tile, first and last stage, slot, parts."""
    flat = [(turn, *tile, *depth, slot, parts) for tile, depth, slot, parts, turn in found.pieces.tolist()]
    return [flat[first:last] for first, last in zip(found.begin, found.begin[1:], strict=False)]


def random_table(seed: int) -> tuple[tuple[int, int, int, int], Tiling, Table]:
    dice = random.Random(seed)
    product = Product(
        *(8 * 2 ** dice.randrange(8) * dice.choice((1, 3, 5)) for _ in range(3)),
        gated=dice.random() < 0.3,
        turns=dice.choice((1, 1, 2, 7)),
    )
    tiling = dice.choice(TILINGS)
    return (
        (product.turns, *product.tiles(tiling)),
        tiling,
        table(product, tiling, dice.choice((132, 116, 7)) // tiling.cluster),
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_stage_of_every_tile_is_made_once(seed: int) -> None:
    """Whatever the size and the tiling, the pieces are the whole product, in every turn."""
    (turns, high, wide, depth), _, found = random_table(seed)
    made = Counter(
        (turn, row, column, stage)
        for worker in pieces(found)
        for turn, row, column, first, last, _, _ in worker
        for stage in range(first, last)
    )
    assert len(made) == turns * high * wide * depth
    assert set(made.values()) == {1}


@pytest.mark.parametrize("seed", range(40))
def test_who_adds_up_a_tile_waits_for_pieces_that_come_first(seed: int) -> None:
    """The first part names the slots of the later ones, in the order of the depth; in every worker's list what others
    wait for stands before what waits, so no two wait for each other.
    """
    _, tiling, found = random_table(seed)
    left = {
        slot: (turn, row, column, first, last)
        for worker in pieces(found)
        for turn, row, column, first, last, slot, parts in worker
        if parts < 0
    }
    assert len(left) == found.slots
    for worker in pieces(found):
        order = [(turn, parts == 0, parts > 0) for turn, *_, parts in worker]
        assert order == sorted(order)
        for turn, row, column, first, last, slot, parts in worker:
            assert first == 0 or parts < 0
            for one in range(slot, slot + max(parts, 0)):
                assert left[one][:4] == (turn, row, column, last)
                last = left.pop(one)[4]
            assert parts < tiling.parts
    assert not left


@pytest.mark.parametrize(("columns", "least", "most", "idle"), [(1280, 42, 43, 12), (2560, 77, 78, 0)])
def test_what_is_left_over_is_dealt_out_evenly(columns: int, least: int, most: int, idle: int) -> None:
    """Of 132 workers, 40 tiles have three each, and 80 tiles have all: they have as much to do, but for one stage."""
    product, tiling = Product(1024, columns, 8192), Tiling(256, 1, 4)
    lengths = [sum(last - first for *_, first, last, _, _ in worker) for worker in pieces(table(product, tiling, 132))]
    assert {*lengths} - {0} == {least, most}
    assert lengths.count(0) == idle


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
