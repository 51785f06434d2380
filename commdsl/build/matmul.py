"""Turns a product of matrices into the text of its kernel, the table of who makes what, and the packed argument.

Assumes Hopper's tensor cores. Does not launch (`runtime.matmul` does), and does not choose: a `Tiling` says how.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as memoize
from itertools import product as pairs
from typing import NamedTuple

import numpy as np

from commdsl.build.emit import Emitted, environment

ARCH = "sm_90a"
"""The architecture with its own instructions: no other runs what is built for it."""

THREADS = 384
MULTIPLIERS = 2
ROWS, DEPTH = 128, 64
"""Of the tile of a block: rows, and the depth of one stage."""

_LINE, _PANELS, _MARKS = 128, 4 * 64 * 128, 256  # bytes, as matmul.cuh lays them out
_SHARED = 227 * 1024
_PIECE = np.dtype([("tile", "<u2", 2), ("depth", "<u2", 2), ("slot", "<i4"), ("parts", "<i2"), ("turn", "<u2")])
_TURN = struct.Struct("<6H3h14x")
_ARGUMENTS = struct.Struct("<8Q2I56x")
_LEAST = 4  # stages of a part: what it costs to add two parts up takes as long
_BAND = 16  # rows of blocks' tiles whose columns are made together: what they read stays in the L2 cache


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut. `columns` of a tile are 128 or 256; `cluster` blocks, 1 or 2, share what they read of B;
    a tile that is left over when all blocks have had as many is cut into up to `parts`.
    """

    columns: int = 256
    cluster: int = 2
    parts: int = 1

    @property
    def stages(self) -> int:
        return (_SHARED - 1024 - _PANELS - _MARKS) // ((ROWS + self.columns) * _LINE)

    @property
    def shared_bytes(self) -> int:
        return 1024 + self.stages * (ROWS + self.columns) * _LINE + _PANELS + _MARKS


@dataclass(frozen=True, slots=True)
class Product:
    """C [rows, columns] = A x B in `dtype`, C in `result`; `turns` such products of one B. A lies as [rows, depth]
    where it is `a_deep`, else as [depth, rows]; B as [columns, depth] where it is `b_deep`. On the float32 sum: bias,
    then an activation, then the residual. Gated, B has twice the columns, and silu(first half) * second half is what
    comes of them.
    """

    rows: int
    columns: int
    depth: int
    dtype: str = "bfloat16"
    result: str = "bfloat16"
    a_deep: bool = True
    b_deep: bool = True
    bias: bool = False
    gelu: bool = False
    gated: bool = False
    residual: bool = False
    turns: int = 1

    def defines(self) -> tuple[str, ...]:
        return f"COMMDSL_DTYPE={self.dtype}", f"COMMDSL_RESULT={self.result}"

    def tiles(self, tiling: Tiling) -> tuple[int, int, int]:
        """Rows of tiles, in clusters, columns of them, and the depth in stages."""
        wide = tiling.columns // 2 if self.gated else tiling.columns
        return -(-self.rows // (ROWS * tiling.cluster)), -(-self.columns // wide), -(-self.depth // DEPTH)


def emitted(product: Product, tiling: Tiling) -> Emitted:
    """The kernel's text, as a Plan's is: the same for any size and element type."""
    return _emitted(
        tiling.columns,
        tiling.stages,
        tiling.cluster,
        product.a_deep,
        product.b_deep,
        product.bias,
        product.gelu,
        product.gated,
        product.residual,
    )


_FIELDS = ("columns", "stages", "cluster", "a_deep", "b_deep", "bias", "gelu", "gated", "adds")


@memoize
def _emitted(*values: int) -> Emitted:
    entry = "commdsl_matmul"
    shape = dict(zip(_FIELDS, values, strict=True))
    text = environment().get_template("matmul.cu.j2").render(threads=THREADS, entry=entry, shape=shape)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Emitted(entry, text, digest, digest)


class Table(NamedTuple):
    """Who makes what: pieces, worker by worker, where each worker's begin, and how many sums wait in memory."""

    pieces: np.ndarray
    begin: np.ndarray
    slots: int


def table(product: Product, tiling: Tiling, workers: int) -> Table:
    """Turn after turn every worker, a cluster of blocks, makes as many whole tiles as any other; those that are left
    over (`_cut_tiles`) are cut along their depth into equal parts, which come first in every worker's list of the turn.
    Whoever has a first part adds up what the others leave: they have it first, so nobody waits long, and no two wait
    for each other. Where nothing is cut, who comes last in one turn is followed by the next worker in the next one.
    """
    high, wide, depth = product.tiles(tiling)
    tiles = [(row, column) for rows in _bands(high, _BAND // tiling.cluster) for column in range(wide) for row in rows]
    lists: list[list[tuple[int, ...]]] = [[] for _ in range(workers)]
    slots = dealt = 0
    for turn, left in enumerate(_cut_tiles(product, tiling, workers)):
        slots = _cut(tiles[:left], depth, tiling.parts, lists, turn, slots)
        for row, column in tiles[left:]:
            lists[dealt % workers].append((row, column, 0, depth, 0, 0, turn))
            dealt += 1
    flat = [piece for pieces in lists for piece in pieces]
    found = np.zeros(len(flat), _PIECE)
    for at, (row, column, first, last, slot, parts, turn) in enumerate(flat):
        found[at] = ((row, column), (first, last), slot, parts, turn)
    begin = np.cumsum([0, *(len(pieces) for pieces in lists)], dtype=np.int32)
    return Table(found, begin, slots)


def _cut_tiles(product: Product, tiling: Tiling, workers: int) -> list[int]:
    """How many tiles of each turn are cut: of the first, which waits for nothing, those that whole waves of all turns
    do not take; where it has fewer, of every turn those that whole waves of it do not.
    """
    high, wide, _ = product.tiles(tiling)
    if tiling.parts == 1:
        return [0] * product.turns
    left = high * wide * product.turns % workers
    return [left] + [0] * (product.turns - 1) if left <= high * wide else [high * wide % workers] * product.turns


def _shares(tiles: int, depth: int, most: int, workers: int) -> int:
    """How many workers these tiles are dealt out to: as many for each tile, where there are enough of them."""
    each = min(most, workers // tiles, max(depth // _LEAST, 1))
    return tiles * each if each > 1 else max(tiles, min(workers, most * tiles, tiles * depth // _LEAST))


def _bands(high: int, band: int) -> list[range]:
    return [range(first, min(first + band, high)) for first in range(0, high, band)]


def _cut(
    tiles: Sequence[tuple[int, int]], depth: int, most: int, lists: list[list[tuple[int, ...]]], turn: int, slots: int
) -> int:
    """Deals the stages of these tiles out, as evenly as they go, to up to `most` workers a tile; `slots` are taken, and
    so many then.
    """
    if not tiles:
        return slots
    stages = len(tiles) * depth
    dealt = _shares(len(tiles), depth, most, len(lists))
    bounds = [share * stages // dealt for share in range(dealt + 1)]
    for at, (row, column) in enumerate(tiles):
        cuts = [bound - at * depth for bound in bounds if at * depth < bound < (at + 1) * depth]
        edges = [0, *cuts, depth]
        first = next(i for i in range(dealt) if bounds[i] <= at * depth < bounds[i + 1])
        lists[first].append((row, column, 0, edges[1], slots, len(cuts), turn))
        for part in range(len(cuts)):
            piece = (row, column, edges[part + 1], edges[part + 2], slots + part, -1, turn)
            lists[first + 1 + part].append(piece)
        slots += len(cuts)
    return slots


# Measured on an H200, microseconds: a stage of a tile of 256 and of 128 columns, what becomes of a tile's sums, what it
# takes to cut tiles, and each part more.
_STAGE, _EPILOGUE = {256: 0.65, 128: 0.36}, {256: 4.0, 128: 1.5}
_CUT, _UNEVEN, _PART = 2.0, 6.0, 1.0


def chosen(product: Product, sms: int) -> Tiling:
    """The tiling that takes the least time, by the figures above."""
    clusters = (1,) if product.rows <= ROWS else (2, 1)
    ways = [Tiling(*way) for way in pairs((256, 128), clusters, (1, 2, 3, 4, 6, 8))]
    return min(ways, key=lambda tiling: _time(product, tiling, sms // tiling.cluster))


def _time(product: Product, tiling: Tiling, workers: int) -> float:
    high, wide, depth = product.tiles(tiling)
    stage, epilogue = _STAGE[tiling.columns], _EPILOGUE[tiling.columns]
    cut = _cut_tiles(product, tiling, workers)
    time = -(-(high * wide * product.turns - sum(cut)) // workers) * (depth * stage + epilogue)
    for left in filter(None, cut):
        dealt = _shares(left, depth, tiling.parts, workers)
        uneven = _UNEVEN if dealt % left else 0.0
        time += left * depth / dealt * stage + epilogue + _CUT + uneven + _PART * (dealt / left - 1)
    return time


def slot_bytes(tiling: Tiling) -> int:
    """What one slot holds: the float32 sums of the tiles of a cluster."""
    return 4 * ROWS * tiling.columns * tiling.cluster


@dataclass(frozen=True, slots=True)
class Turn:
    """One of the products of a launch: its rows are matrix `rows[1]` of tensor `rows[0]`, its result likewise; `count`
    matrices of the sums, from `first` on, are added. Words of the call, -1 for none: that say that the rows are there,
    or the sums, and the one in which stored tiles are counted, `stores` in all.
    """

    rows: tuple[int, int] = (0, 0)
    result: tuple[int, int] = (0, 0)
    first: int = 0
    count: int = 0
    rows_there: int = -1
    sums_there: int = -1
    stored: int = -1

    def pack(self) -> bytes:
        words = self.rows_there, self.sums_there, self.stored
        return _TURN.pack(*self.rows, *self.result, self.first, self.count, *words)


def stores(product: Product, tiling: Tiling) -> int:
    """What is counted when all of a turn is stored: each multiplier of a block counts its own."""
    high, wide, _ = product.tiles(tiling)
    return high * wide * tiling.cluster * MULTIPLIERS


def packed(maps: Sequence[bytes], addresses: Sequence[int], timeout_ns: int, product: Product) -> bytes:
    """The kernel's one argument: two maps of A, one of B, two of C and one of sums, the addresses of pieces, begin,
    turns, words, bias, partials and flags, how long a block waits for what others do, and the size of C.
    """
    return b"".join(maps) + _ARGUMENTS.pack(*addresses, timeout_ns, product.rows, product.columns)
