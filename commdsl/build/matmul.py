"""Turns a product of matrices into the text of its kernel, the table of who makes what, and the packed argument.

Assumes Hopper's tensor cores. Does not launch (`runtime.matmul`), nor choose: a `Tiling` says how (`build.tilings`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache as memoize
from typing import NamedTuple

import numpy as np

from commdsl.build.emit import Emitted, environment
from commdsl.build.task_table import NOWHERE, Place, SourceRow, TaskRow, biases_of, maps_of
from commdsl.ir.functions import GATED
from commdsl.machine.shortage import explained

ARCH = "sm_90a"
"""The architecture with its own instructions: no other runs what is built for it."""

THREADS = 384
MULTIPLIERS = 2
FLOAT8 = "float8_e4m3fn"
"""Its two factors are deep, and each has a scale."""

HELD = {1: 132, 2: 66, 3: 38, 4: 28}
"""By their blocks, how many clusters an H200 was seen to hold at once: its SMs form groups of several sizes."""

# Bytes, as matmul_worker.cuh lays them out: behind the marks lies what is taken, with its number in a stamped kernel.
_LINE, _PANEL, _MARKS = 128, 64 * 128, 256 + 4 * 48
_SHARED = 227 * 1024
_PIECE = np.dtype([("tile", "<u2", 2), ("depth", "<u2", 2), ("slot", "<i4"), ("parts", "<i2"), ("turn", "<u2")])
_TAKEN, _NO_TURN = 2, 0xFFFF
_ARGUMENTS = struct.Struct("<13QI4x")
_ENOUGH = 4  # stages: what is read comes in time
_LEAST = 4  # stages of a part: what it costs to add two parts up takes as long
_BAND = 2048  # rows whose columns are made together: what they read stays in the L2 cache


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut. A tile has 128 or 256 rows and 64 to 256 `columns`, a multiple of 16; where B is not deep,
    128 or 256; of float8, whose sums are held twice, 128 rows and at most 160. `cluster` blocks, 1 or 2, share
    what they read of B; a tile that is left over when all blocks have had as many is cut into up to `parts`. Or `split`
    blocks share the depth of each tile, and add their sums up.
    """

    columns: int = 256
    cluster: int = 2
    parts: int = 1
    rows: int = 128
    split: int = 1

    def __post_init__(self) -> None:
        assert self.split == 1 or (self.cluster, self.parts, self.rows) == (1, 1, 128), "one way to share a tile"

    @property
    def blocks(self) -> int:
        """Of a cluster."""
        return self.cluster * self.split

    def workers(self, sms: int) -> int:
        """Clusters that so many SMs hold at once, wherever on the others a block of another kernel is."""
        return min(sms // self.blocks, HELD[self.blocks] - (sms < HELD[1]))

    def fits(self, product: Product) -> bool:
        """Whether the kernel has this tiling of this product."""
        is_shared = not product.gated and self.split <= product.tiles(self)[2]
        if product.dtype == FLOAT8 and (self.rows > 128 or self.columns > 160):
            return False
        return (product.b_deep or self.columns in (128, 256)) and (self.split == 1 or is_shared)

    def line(self, product: Product) -> int:
        """Bytes of a line of the panels that are stored, as matmul_worker.cuh has them."""
        wide = self.columns // (2 if product.gated else 1) // self.split * product.result_bytes
        return 128 if wide >= 128 else 64 if wide >= 64 else 32

    @property
    def panels(self) -> int:
        """Of what each multiplier stores: the next is made while one is stored, where that does not take a stage."""
        return 2 if self._stages(2) >= min(self._stages(1), _ENOUGH) else 1

    @property
    def stages(self) -> int:
        return self._stages(self.panels)

    @property
    def shared_bytes(self) -> int:
        return self._beside(self.panels) + self.stages * self._stage_bytes

    @property
    def _stage_bytes(self) -> int:
        return (self.rows + self.columns) * _LINE

    def _stages(self, panels: int) -> int:
        return (_SHARED - self._beside(panels)) // self._stage_bytes

    def _beside(self, panels: int) -> int:
        return 1024 + panels * MULTIPLIERS * _PANEL + _MARKS


@dataclass(frozen=True, slots=True)
class Product:
    """C [rows, columns] = A x B in `dtype`, C in `result`; `turns` such products, each by one of the matrices of B, or
    the sum of as many as there are `sources`, which share the depth. A lies as [rows, depth] where it is `a_deep`, else
    as [depth, rows]; B as [columns, depth] where it is `b_deep`. On the float32 sum: bias, then an activation, then
    what it `adds`. Gated, B has twice the columns, and silu(first half) * second half is what comes of them. Of float8
    the sum is multiplied with two scales first. It `copies` A, too, and `pushes` what it makes to peers.
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
    adds: bool = False
    copies: bool = False
    pushes: bool = False
    turns: int = 1
    sources: int = 1

    def __post_init__(self) -> None:
        assert self.dtype != FLOAT8 or (self.a_deep and self.b_deep), "float8 is multiplied where it is deep"
        is_plain = self.a_deep and not self.adds and self.sources == 1
        assert not self.copies or is_plain, "rows are copied as they lie, of one source, and nothing is added"

    @property
    def activation(self) -> str:
        return GATED if self.gated else "gelu" if self.gelu else ""

    def defines(self) -> tuple[str, ...]:
        return f"COMMDSL_DTYPE={self.dtype}", f"COMMDSL_RESULT={self.result}"

    @property
    def itemsize(self) -> int:
        """Bytes of an element of A and B."""
        return 1 if self.dtype == FLOAT8 else 2

    @property
    def stage_depth(self) -> int:
        return _LINE // self.itemsize

    @property
    def source_stages(self) -> int:
        """Of the depth of one source."""
        return -(-self.depth // self.sources // self.stage_depth)

    @property
    def result_bytes(self) -> int:
        """Of an element of C."""
        return 4 if self.result == "float32" else 2

    def tiles(self, tiling: Tiling) -> tuple[int, int, int]:
        """Rows of tiles, in clusters, columns of them, and the depth in stages."""
        wide = tiling.columns // 2 if self.gated else tiling.columns
        return (
            -(-self.rows // (tiling.rows * tiling.cluster)),
            -(-self.columns // wide),
            self.sources * self.source_stages,
        )


def alone(product: Product, addends: int = 0) -> TaskRow:
    """Return the row of a product that is the one task of its launch: maps of A, B, C, then of what is added."""
    added = tuple(Place(3 + number) for number in range(addends))
    bias = (0, 0) if product.bias else None
    source = SourceRow(Place(0), Place(1))
    return TaskRow((source,), Place(2), added, bias=bias, activation=product.activation or None)


MIXED = "mixed"
"""The activation of tasks that differ in it: each tile looks its own up."""

_LINES = 64  # of a panel
_MAPS = 4  # in multiples of so many, so that launches of about as many share a kernel


@dataclass(frozen=True, slots=True)
class Form:
    """The features that the tasks of a launch share, as far as the kernel's text depends on them: the layout of
    operands, and what some tasks end with. `maps`: the number of tensors that TMA moves; `biases`: of biases given.
    `rows_map`, `factor_map`, `result_map`: the one map that all tasks have, -1 where they differ.
    """

    a_deep: bool
    b_deep: bool
    bias: bool
    activation: str
    adds: bool
    copies: bool
    pushes: bool
    maps: int
    biases: int
    rows_map: int
    factor_map: int
    result_map: int

    def factor_lines(self, tiling: Tiling) -> int:
        """Return the number of rows of a factor that one load brings, as in matmul_worker.cuh."""
        if not self.b_deep:
            return _LINES
        return tiling.columns if tiling.cluster == 1 and self.activation not in (GATED, MIXED) else tiling.columns // 2

    def fits(self, tiling: Tiling) -> bool:
        """Return whether the kernel has this tiling: half of a tile of a gated task has whole panels."""
        return self.activation != MIXED or (tiling.columns in (128, 256) and tiling.split == 1)


def form_of(products: Sequence[Product], rows: Sequence[TaskRow]) -> Form:
    """Return the form of a launch of these tasks, and of their rows in the table."""
    first = products[0]
    assert len({(one.dtype, one.result, one.a_deep, one.b_deep) for one in products}) == 1, "one kernel, one type"
    activations = {one.activation for one in products}
    return Form(
        first.a_deep,
        first.b_deep,
        any(one.bias for one in products),
        activations.pop() if len(activations) == 1 else MIXED,
        any(one.adds for one in products),
        any(one.copies for one in products),
        any(one.pushes for one in products),
        -(-maps_of(rows) // _MAPS) * _MAPS,
        biases_of(rows),
        _only(source.rows.map for row in rows for source in row.sources),
        _only(source.factor.map for row in rows for source in row.sources),
        _only(NOWHERE if row.result is None else row.result.map for row in rows),
    )


def _only(maps: Iterable[int]) -> int:
    """Return the one map that there is, -1 where there are several, or none."""
    found = {*maps}
    return found.pop() if len(found) == 1 and NOWHERE not in found else -1


@memoize
@explained("write the text of a kernel")
def emitted(form: Form, tiling: Tiling, *, is_stamped: bool = False) -> Emitted:
    """Return the kernel's text, the same for any size and element type. `is_stamped`: it records when each piece began
    and ended.
    """
    entry = "commdsl_matmul"
    text = (
        environment()
        .get_template("matmul.cu.j2")
        .render(threads=THREADS, entry=entry, form=form, tiling=tiling, is_stamped=is_stamped)
    )
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Emitted(entry, text, digest, digest)


class Table(NamedTuple):
    """The order of work: rows of pieces that are taken at once, and an end row; and the number of partial sums that
    wait in memory.
    """

    pieces: np.ndarray
    slots: int


def table(products: Sequence[Product], tiling: Tiling, workers: int) -> Table:
    """Task after task as many whole tiles for each of so many workers, clusters of blocks, as for any other; those that
    are left over (`cut_tiles`) are cut along their depth into equal parts, which come first in the task, but of several
    sources last: the later ones are to have come. A worker takes a tile, or one or two parts, whenever it has made what
    it took.

    Whoever has a first part adds up what the others leave. The later parts are taken before it, each before a first
    part that is taken with it: however few workers there are, what waits waits for what was taken before.
    """
    lists: list[list[tuple[int, ...]]] = []
    slots = 0
    for task, (product, left) in enumerate(zip(products, cut_tiles(products, tiling, workers), strict=True)):
        assert tiling.fits(product), (product, tiling)
        high, wide, depth = product.tiles(tiling)
        tiles = [
            (row, column)
            for rows in _bands(high, _BAND // (tiling.rows * tiling.cluster))
            for column in range(wide)
            for row in rows
        ]
        cut, slots = _cut(tiles[:left], depth, tiling.parts, workers, task, slots)
        uncut: list[list[tuple[int, ...]]] = [[(row, column, 0, depth, 0, 0, task)] for row, column in tiles[left:]]
        lists += [*reversed(cut), *uncut] if product.sources == 1 else [*uncut, *reversed(cut)]
    found = np.zeros((len(lists) + 1, _TAKEN), _PIECE)
    found[-1]["turn"] = _NO_TURN
    for at, pieces in enumerate(lists):
        for number, (row, column, first, last, slot, parts, task) in enumerate(pieces):
            found[at, number] = ((row, column), (first, last), slot, parts, task)
    return Table(found, slots)


def cut_tiles(products: Sequence[Product], tiling: Tiling, workers: int) -> list[int]:
    """Return the number of tiles of each task that are cut: of the first, which waits for nothing, those that whole
    waves of all tasks do not take; where it has fewer, of every task those that whole waves of it do not.
    """
    tiles = [high * wide for high, wide, _ in (one.tiles(tiling) for one in products)]
    if tiling.parts == 1:
        return [0] * len(tiles)
    left = sum(tiles) % workers
    return [left] + [0] * (len(tiles) - 1) if left <= tiles[0] else [count % workers for count in tiles]


def shares(tiles: int, depth: int, most: int, workers: int) -> int:
    """Return the number of workers that these tiles are dealt out to: as many for each tile, where there are enough of
    them.
    """
    each = min(most, workers // tiles, max(depth // _LEAST, 1))
    return tiles * each if each > 1 else max(tiles, min(workers, most * tiles, tiles * depth // _LEAST))


def _bands(high: int, band: int) -> list[range]:
    return [range(first, min(first + band, high)) for first in range(0, high, band)]


def _cut(
    tiles: Sequence[tuple[int, int]], depth: int, most: int, workers: int, turn: int, slots: int
) -> tuple[list[list[tuple[int, ...]]], int]:
    """Return lists of the stages of these tiles, as even as possible, for up to `most` of these workers a tile: the
    parts left for others, then, in later lists, the parts that add them up. `slots` are taken before, and returned
    after.
    """
    if not tiles:
        return [], slots
    stages = len(tiles) * depth
    dealt = shares(len(tiles), depth, most, workers)
    bounds = [share * stages // dealt for share in range(dealt + 1)]
    lists: list[list[tuple[int, ...]]] = [[] for _ in range(dealt)]
    for at, (row, column) in enumerate(tiles):
        cuts = [bound - at * depth for bound in bounds if at * depth < bound < (at + 1) * depth]
        edges = [0, *cuts, depth]
        first = next(i for i in range(dealt) if bounds[i] <= at * depth < bounds[i + 1])
        lists[first].append((row, column, 0, edges[1], slots, len(cuts), turn))
        for part in range(len(cuts)):
            piece = (row, column, edges[part + 1], edges[part + 2], slots + part, -1, turn)
            lists[first + 1 + part].append(piece)
        slots += len(cuts)
    return lists, slots


def slot_bytes(tiling: Tiling) -> int:
    """Return the bytes of a slot: the float32 sums of the tiles of a cluster."""
    return 4 * tiling.rows * tiling.columns * tiling.cluster


def stores(product: Product, tiling: Tiling) -> int:
    """Return the level of a task whose tiles are all stored: each multiplier of a block counts its own."""
    high, wide, _ = product.tiles(tiling)
    return high * wide * tiling.blocks * MULTIPLIERS


def packed(
    maps: Sequence[bytes],
    addresses: Sequence[int],
    timeout_ns: int,
    entries: int,
    stamps: int,
    biases: Sequence[int],
) -> bytes:
    """Return the kernel's one argument: the maps of tensors, the addresses of pieces, claims, tasks, sources, places,
    waits, words, partials, flags and two scales, the time-out of a wait, the address of time stamps, the number of
    entries, and the addresses of biases.
    """
    own = struct.pack(f"<{len(biases)}Q", *biases)
    every = b"".join((*maps, _ARGUMENTS.pack(*addresses, timeout_ns, stamps, entries), own))
    return every.ljust(-(-len(every) // 64) * 64, b"\0")
