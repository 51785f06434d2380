"""A product of matrices: who makes what, and a kernel that Hopper's tensor cores take."""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from commdsl.build import nvrtc
from commdsl.build.matmul import ARCH, FLOAT8, HELD, Product, Table, Tiling, alone, emitted, form_of, table
from commdsl.build.tilings import WAYS, chosen
from commdsl.machine.config import from_environment

TILINGS = [
    *(Tiling(columns, cluster, parts) for columns in (80, 128, 256) for cluster in (1, 2) for parts in (1, 4, 8)),
    Tiling(160, 1, rows=256),
    *(Tiling(96, 1, split=split) for split in (2, 3, 4)),
]


def pieces(found: Table) -> list[list[tuple[int, ...]]]:
    """What is taken at once, in order: turn, row and column of the tile, first and last stage, slot, parts."""
    *entries, end = found.pieces.tolist()
    assert [turn for *_, turn in end] == [0xFFFF, 0xFFFF]
    return [
        [(turn, *tile, *depth, slot, parts) for tile, depth, slot, parts, turn in entry if depth[1] > 0]
        for entry in entries
    ]


def random_table(seed: int) -> tuple[tuple[int, int, int, int], Tiling, Table]:
    dice = random.Random(seed)
    product = Product(
        *(8 * 2 ** dice.randrange(8) * dice.choice((1, 3, 5)) for _ in range(3)),
        gated=dice.random() < 0.3,
        turns=dice.choice((1, 1, 2, 7)),
        sources=dice.choice((1, 1, 3)),
    )
    tiling = dice.choice([tiling for tiling in TILINGS if tiling.fits(product)])
    return (
        (product.turns, *product.tiles(tiling)),
        tiling,
        table([product] * product.turns, tiling, tiling.workers(dice.choice((132, 116, 7)))),
    )


@pytest.mark.parametrize("seed", range(40))
def test_every_stage_of_every_tile_is_made_once(seed: int) -> None:
    """Whatever the size and the tiling, the pieces are the whole product, in every turn."""
    (turns, high, wide, depth), _, found = random_table(seed)
    made = Counter(
        (turn, row, column, stage)
        for one in pieces(found)
        for turn, row, column, first, last, _, _ in one
        for stage in range(first, last)
    )
    assert len(made) == turns * high * wide * depth
    assert set(made.values()) == {1}


@pytest.mark.parametrize("seed", range(40))
def test_what_waits_comes_after_what_it_waits_for(seed: int) -> None:
    """The first part of a tile names the slots of the later ones, in the order of the depth; all of them are in lists
    before its own. So one worker alone makes everything, in the order of turns.
    """
    _, tiling, found = random_table(seed)
    left: dict[int, tuple[int, ...]] = {}
    turns = [turn for one in pieces(found) for turn, *_ in one]
    assert turns == sorted(turns)
    for one in pieces(found):
        assert {turn for turn, *_ in one} == {one[0][0]}
        before = dict(left)
        for turn, row, column, first, last, slot, parts in one:
            assert first == 0 or parts < 0
            assert parts < tiling.parts
            if parts < 0:
                left[slot] = turn, row, column, first, last
            for part in range(slot, slot + max(parts, 0)):
                assert before[part][:4] == (turn, row, column, last)
                last = left.pop(part)[4]
        assert [parts < 0 for *_, parts in one] == sorted((parts < 0 for *_, parts in one), reverse=True)
    assert not left


@pytest.mark.parametrize(("columns", "least", "most", "lists"), [(1280, 42, 43, 120), (2560, 77, 78, 132)])
def test_what_is_left_over_is_dealt_out_evenly(columns: int, least: int, most: int, lists: int) -> None:
    """Of 132 workers, 40 tiles have three each, and 80 tiles have all: they have as much to do, but for one stage."""
    product, tiling = Product(1024, columns, 8192), Tiling(256, 1, 4)
    lengths = [sum(last - first for *_, first, last, _, _ in one) for one in pieces(table([product], tiling, 132))]
    assert {*lengths} == {least, most}
    assert len(lengths) == lists


FORMS = {
    "plain": Product(8, 8, 8),
    "to float32": Product(8, 8, 8, dtype="float16", result="float32", a_deep=False, b_deep=False),
    "copies": Product(8, 8, 8, b_deep=False, copies=True),
    "gelu": Product(8, 8, 8, bias=True, gelu=True, adds=True),
    "gated": Product(8, 8, 8, gated=True),
    "float8": Product(8, 8, 16, dtype=FLOAT8, result="float16", adds=True),
}


@pytest.mark.parametrize(
    ("form", "tiling"),
    [
        *((form, Tiling(128, 1)) for form in FORMS),
        ("plain", Tiling(256, 2)),
        ("copies", Tiling(256, 2, 4)),
        ("plain", Tiling(160, 1, rows=256)),
        ("gelu", Tiling(96, 1, split=4)),
        ("float8", Tiling(160, 2)),
    ],
)
def test_cubin(form: str, tiling: Tiling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRTC takes the text for sm_90a, and nowhere makes each product wait for the one before (C7510 to C7520)."""
    read, logs = nvrtc._nvrtc_bytes, []

    def noted(library: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
        logs.append(read(library, program, "ProgramLog").decode())
        return read(library, program, what)

    monkeypatch.setattr(nvrtc, "_nvrtc_bytes", noted)
    product, config = FORMS[form], replace(from_environment(), cache_dir=tmp_path)
    cubin = nvrtc.build(
        emitted(form_of([product], [alone(product, int(product.adds))]), tiling), product.defines(), config, ARCH
    ).read_bytes()
    assert cubin.startswith(b"\x7fELF")
    assert b"commdsl_matmul" in cubin
    assert logs
    assert "serialized" not in "".join(logs)


# Microseconds on an H200 by M, N, K and SMs: of the fastest tiling, and of others near it.
MEASURED = {
    (8192, 1280, 8192, 132): ((256, Tiling(160, 1, rows=256)), (261, Tiling(256, 1, 4))),
    (8192, 7168, 8192, 132): (
        (1370.7, Tiling(256, 2, 4)),
        (1393.5, Tiling(256, 1)),
        (1400.5, Tiling(160, 1, rows=256)),
    ),
    (8192, 3584, 8192, 132): ((699.7, Tiling(256, 2, 4)), (711.1, Tiling(256, 1)), (726.0, Tiling(256, 1, 4))),
    (8192, 8192, 3584, 132): ((656.2, Tiling(256, 1, 4)), (665.7, Tiling(256, 2, 4)), (662.9, Tiling(224, 1))),
    (8192, 5120, 3456, 132): ((382.0, Tiling(256, 1)), (385.3, Tiling(256, 2)), (396.7, Tiling(160, 1, rows=256))),
    (8192, 8192, 1024, 132): ((192.2, Tiling(256, 1)), (198.9, Tiling(256, 1, 4)), (205.6, Tiling(224, 1))),
    (4096, 8192, 1024, 132): ((101.0, Tiling(256, 1)), (107.3, Tiling(224, 1))),
    (2048, 1280, 8192, 132): ((60.3, Tiling(160, 2)), (61.6, Tiling(160, 1)), (80.0, Tiling(256, 1, 4))),
    (2048, 8192, 1024, 132): ((55.0, Tiling(256, 1)), (55.9, Tiling(256, 2)), (61.0, Tiling(224, 1))),
    (1024, 3584, 8192, 132): ((86.7, Tiling(224, 1)), (97.3, Tiling(256, 1)), (98.5, Tiling(224, 1, split=2))),
    (1024, 3584, 8192, 116): ((97.5, Tiling(256, 1)), (98.8, Tiling(256, 2))),
    (1024, 1280, 8192, 132): ((36.8, Tiling(160, 1, split=2)), (39.8, Tiling(256, 1, 4)), (40.3, Tiling(256, 2, 4))),
    (1024, 3456, 5120, 132): ((53.3, Tiling(224, 1)), (60.2, Tiling(256, 1)), (61.9, Tiling(256, 2))),
    (1024, 8192, 3584, 132): ((90.0, Tiling(256, 2)), (90.1, Tiling(256, 1)), (96.8, Tiling(128, 1))),
    (1024, 8192, 1024, 132): ((28.1, Tiling(256, 1)), (28.5, Tiling(256, 2)), (30.6, Tiling(192, 1))),
    (1024, 5120, 3456, 132): ((53.9, Tiling(160, 1, rows=256)), (55.0, Tiling(160, 2)), (56.6, Tiling(160, 1))),
    (1024, 5120, 3456, 116): ((62.6, Tiling(192, 1)), (68.0, Tiling(128, 1))),
    (512, 1280, 8192, 132): ((21.2, Tiling(128, 2, 4)), (22.6, Tiling(128, 1, 4)), (24.9, Tiling(80, 1, split=2))),
    (512, 8192, 3584, 132): ((43.2, Tiling(256, 1)), (43.9, Tiling(256, 2)), (48.1, Tiling(128, 2))),
    (256, 1280, 8192, 132): ((16.3, Tiling(96, 1, split=4)), (17.0, Tiling(128, 1, split=4))),
    (256, 8192, 3584, 132): ((24.8, Tiling(128, 2)), (25.6, Tiling(128, 1))),
    (256, 8192, 1024, 132): ((8.2, Tiling(128, 1)), (9.6, Tiling(160, 1)), (9.9, Tiling(160, 2))),
    (128, 1280, 8192, 132): ((12.2, Tiling(64, 1, split=4)), (15.2, Tiling(96, 1, split=4))),
    (512, 3584, 8192, 132): ((44.7, Tiling(112, 1)), (50.6, Tiling(224, 1, 4)), (56.4, Tiling(144, 1))),
    (256, 1280, 8192, 116): ((16.8, Tiling(96, 1, 4)), (18.0, Tiling(128, 1, split=4)), (31.9, Tiling(96, 1))),
    (256, 5120, 3456, 132): ((17.3, Tiling(96, 1)), (18.5, Tiling(112, 1)), (19.0, Tiling(160, 1, split=2))),
    (128, 3584, 8192, 132): ((22.5, Tiling(96, 1, 4)), (22.6, Tiling(128, 1, split=4)), (34.8, Tiling(96, 1))),
    (128, 3456, 5120, 132): ((13.7, Tiling(128, 1, split=4)), (14.0, Tiling(96, 1, 4)), (21.6, Tiling(96, 1))),
    (128, 5120, 3456, 132): ((12.6, Tiling(96, 1, 4)), (13.6, Tiling(80, 1, split=2)), (15.7, Tiling(96, 1))),
    (1024, 1280, 8192, 116): ((37.7, Tiling(96, 1)), (40.0, Tiling(112, 1)), (44.5, Tiling(224, 1, 4))),
    (256, 5120, 3456, 116): ((17.3, Tiling(96, 1)), (18.4, Tiling(112, 1)), (20.2, Tiling(128, 1))),
    (128, 5120, 3456, 116): ((12.7, Tiling(96, 1, 4)), (14.2, Tiling(128, 1, 4)), (15.9, Tiling(96, 1))),
    (512, 3456, 5120, 132): ((28.7, Tiling(112, 1)), (33.5, Tiling(224, 1, 4)), (35.3, Tiling(144, 1))),
    (512, 8192, 8192, 116): ((117.6, Tiling(144, 1)), (126.2, Tiling(96, 1)), (128.7, Tiling(224, 1, 4))),
    (256, 8192, 8192, 116): ((62.3, Tiling(144, 1)), (67.0, Tiling(160, 1)), (70.6, Tiling(96, 1, 4))),
    (512, 8192, 3584, 116): ((53.5, Tiling(144, 1)), (57.3, Tiling(160, 1, rows=256)), (57.8, Tiling(96, 1))),
    (512, 8192, 1024, 116): ((16.1, Tiling(144, 1)), (17.4, Tiling(96, 1)), (17.6, Tiling(160, 1, rows=256))),
    (2048, 8192, 8192, 132): ((405.5, Tiling(256, 1)), (412.7, Tiling(144, 1))),
    (2048, 3456, 5120, 132): ((105.0, Tiling(144, 1)), (108.6, Tiling(224, 1)), (110.2, Tiling(112, 1))),
    (2048, 5120, 3456, 116): ((122.3, Tiling(144, 1)), (123.8, Tiling(256, 1)), (132.3, Tiling(112, 1))),
    (128, 8192, 3584, 132): ((18.4, Tiling(64, 1)), (20.2, Tiling(80, 1)), (22.0, Tiling(128, 1, 4))),
    (128, 8192, 1024, 132): ((6.1, Tiling(64, 1)), (6.8, Tiling(80, 1)), (7.4, Tiling(128, 1))),
    (128, 8192, 1024, 116): ((6.8, Tiling(80, 1)), (7.3, Tiling(128, 1))),
}


@pytest.mark.parametrize("size", MEASURED, ids=lambda size: "x".join(map(str, size)))
def test_the_tiling_chosen_is_as_fast_as_the_fastest(size: tuple[int, int, int, int]) -> None:
    """Within 4 % of what was measured, on as many SMs."""
    measured = {tiling: us for us, tiling in MEASURED[size]}
    *sides, sms = size
    assert measured[chosen(Product(*sides), sms)] <= 1.04 * min(measured.values())


def test_the_widest_tiles_make_large_products() -> None:
    """At 2048x8192x8192 they take 2 to 5 % less than those of 144 columns, which a count of waves would prefer."""
    assert chosen(Product(2048, 8192, 8192), 132) == Tiling(256, 1)


@pytest.mark.parametrize("seed", range(20))
def test_a_tiling_is_chosen_for_every_product(seed: int) -> None:
    """Whatever the size and the form: on any number of SMs, with clusters that a GPU holds."""
    dice = random.Random(seed)
    sides = [8 * dice.randrange(1, 2 ** dice.randrange(1, 12)) for _ in range(3)]
    dtype, deep = dice.choice((("bfloat16", dice.random() < 0.7), (FLOAT8, True)))
    product = Product(*sides, dtype, b_deep=deep, gated=dice.random() < 0.3, turns=dice.choice((1, 8)))
    tiling = chosen(product, dice.choice((132, 130, 116)))
    assert tiling.fits(product)
    assert tiling.workers(116) * tiling.blocks <= 116


def test_float8_is_cut_so_that_its_sums_are_held_twice() -> None:
    """Tiles of 128 rows and up to 160 columns, of half as many stages as 16 bits have; nothing lies by columns."""
    product = Product(512, 512, 1024, FLOAT8)
    fitting = [tiling for tiling in WAYS if tiling.fits(product)]
    assert {(tiling.rows, tiling.columns > 160) for tiling in fitting} == {(128, False)}
    assert product.tiles(fitting[0])[2] == 8
    assert Product(512, 512, 1024).tiles(fitting[0])[2] == 16
    for laid in ({"a_deep": False}, {"b_deep": False}):
        with pytest.raises(AssertionError, match="where it is deep"):
            Product(512, 512, 1024, FLOAT8, **laid)  # type: ignore[arg-type]


def test_few_stages_are_not_shared_by_more_blocks() -> None:
    """A block of a cluster that shares the depth has some of it: it has sums to add."""
    assert not Tiling(128, 1, split=4).fits(Product(128, 128, 192))
    assert Tiling(128, 1, split=3).fits(Product(128, 128, 192))
    with pytest.raises(AssertionError):
        table([Product(128, 128, 192)], Tiling(128, 1, split=4), 1)


def test_every_way_has_a_cubin_that_fits_the_shared_memory() -> None:
    """Each has three stages at least, so loads are ahead of products, and clusters of sizes that were tried."""
    for tiling in WAYS:
        assert tiling.stages >= 3
        assert tiling.shared_bytes <= 227 * 1024
        assert tiling.blocks in HELD


def test_what_waits_beside_leaves_room_for_all_clusters() -> None:
    """Blocks wait for each other, and for a kernel of one block on an SM that they leave: with that, one cluster less
    can be held. The GPU's whole are for who is alone.
    """
    most = HELD[1] - 2  # as many as products beside what travels have
    for tiling in WAYS:
        assert tiling.workers(HELD[1]) == HELD[tiling.blocks]
        assert tiling.workers(most) < HELD[tiling.blocks]
        assert tiling.workers(most) * tiling.blocks <= most


def test_who_waits_for_the_last_rows_makes_small_tiles_of_them() -> None:
    """Eight turns of 1024 rows that a narrow product takes: what is fastest when all are there keeps a few SMs busy for
    half the time when the last comes late.
    """
    product = Product(1024, 1280, 8192, turns=8)
    assert chosen(product, 130).rows == 256
    assert chosen(product, 130, there=200.0).columns * chosen(product, 130, there=200.0).rows <= 128 * 160
