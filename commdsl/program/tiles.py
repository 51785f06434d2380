"""Turns the routes of one call into the table of one rank's kernel: which runs of rows it pushes, which it finishes.

Assumes routes that `route_laws` accepts, equal on all ranks. Does not know addresses: a table names tensors by number,
places by row. The layout of a table is that of `TableHead`, `Send` and `Finish` in templates/include/commdsl/types.cuh.

With `packed` all rows wait at their destination in one stretch per sender, and the destination copies them to their
places; otherwise they go straight there, and only what is summed waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
from operator import add, xor
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.routes import Longs, Routes, running_sum, stable_order, totals

Words: TypeAlias = NDArray[np.uint32]

HEAD_WORDS = 12
WARP = 32  # threads
SEND_WORDS, FINISH_WORDS = 4, 8
COPY, SUM, ZERO = 0, 1, 2
_WHERE, _TENSOR = 3, 1  # the words of a send and of a finish that name the tensor
_WAITS = 24  # the bit of the former that says that rows wait
_ROWS_SENT, _ROWS_FINISHED = 2, 4  # those that say how many rows: behind the two that say where they begin
MOST_TILES = 32
"""Of a send or of what is finished at once: a warp takes a tile of it, so that as many are at it."""

SUM_PARTS = 4
"""A sum reads several runs: with smaller tiles more warps have a share in it."""


@dataclass(frozen=True, eq=False)
class Shipment:
    """One tensor's way in one call. If it is summed, the routes lead to one whole tensor per copy."""

    routes: Routes
    rows: Longs  # (num_ranks,): rows of the output of each rank, of one copy if it is summed
    width: int  # bytes of a row
    is_sum: bool = False


@dataclass(frozen=True, eq=False)
class RowTable:
    """What one rank's kernel reads, as 32-bit words, and what the host has to know beside it."""

    words: Words
    num_sends: int
    num_finishes: int
    waiting_rows: tuple[int, ...]  # by tensor: the most rows that wait on any rank
    most_words: int  # no rank's table of these flows has more; the same number on all ranks
    digest: int  # of what all ranks send, in 32 bits
    route: Longs  # (num_sends,): the first of the run that each send is part of, counted through the flows' routes


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of rows that are sent, or finished: as long ones as there are."""

    words: Words  # (n, SEND_WORDS or FINISH_WORDS), of the first tensor
    rows: Longs  # (n,)
    tile_rows: Longs  # (n,): what a warp does at once


@dataclass(frozen=True, eq=False)
class _Part:
    """What one flow adds to the tables of a rank, as if it were the first tensor."""

    sends: _Runs  # by destination
    route: Longs  # of each the route that it begins
    longest: int  # bytes of a tile
    finishes: _Runs
    expected: Longs  # (num_ranks,): rows that come from each rank
    waiting_rows: int  # the most on any rank
    most_words: Longs  # (num_ranks,): of sends and finishes, each rank's at most
    digest: int  # of the routes of all ranks


@dataclass(frozen=True, eq=False)
class _Placed:
    """A flow's routes, the empty ones left out, and where their rows wait."""

    index: Longs  # of the route among the flow's
    source: Longs
    source_row: Longs
    dest: Longs
    dest_row: Longs  # in the output
    length: Longs
    shard: Longs
    copy: Longs
    waits: NDArray[np.bool_]
    place: Longs  # where the rows wait; meaningless for those that do not
    room: Longs  # (num_ranks,): rows that wait on each rank


class Tables:
    """The tables of one rank. What several have in common is made once: values go as keys do, and queries by themselves
    as beside them. Routes have one number of rows each.
    """

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks
        distance = (np.arange(num_ranks) - rank) % num_ranks
        # When a peer's begin and how long they last, as shares of the whole.
        self._last = np.where(distance == 0, 1.0, 1 / max(num_ranks - 1, 1))
        self._begin = np.maximum(distance - 1, 0) * self._last
        self._parts: dict[tuple[Routes, int, bool, bool, int], _Part] = {}

    def table(self, flows: Sequence[Shipment], *, packed: bool, tile_bytes: int) -> RowTable:
        """`tile_bytes` is the most that a warp moves at once, a row at least."""
        parts = self._all(flows, packed, tile_bytes)
        sends = _cut(_numbered([part.sends for part in parts], _WHERE, 16))
        finishes = _cut(_numbered([part.finishes for part in parts], _TENSOR, 0))
        waits = (sends.runs.words[:, _WHERE] >> _WAITS > 0)[sends.run]
        # 16 bits, which numpy sorts in linear time. What is due at once goes in the order of the tensors.
        sends = sends.at(self._due(sends, waits).argsort(kind="stable"))
        digest = zlib.crc32(repr((packed, tile_bytes, [part.digest for part in parts])).encode())
        waiting = int(np.count_nonzero(waits)), int(any(part.waiting_rows for part in parts))
        how = digest, _threads(max(part.longest for part in parts)), tile_bytes, sends.tiles, finishes.tiles, *waiting
        expected = reduce(add, (part.expected for part in parts))
        first = accumulate((flow.routes.num for flow in flows), initial=0)
        route = np.concatenate([part.route + begin for part, begin in zip(parts, first, strict=False)])
        return RowTable(
            _words(sends.words(_ROWS_SENT), finishes.words(_ROWS_FINISHED), expected, how),
            len(sends.run),
            len(finishes.run),
            tuple(part.waiting_rows for part in parts),
            HEAD_WORDS + 2 * self._num_ranks + int(reduce(add, (part.most_words for part in parts)).max()),
            digest,
            route[sends.run],
        )

    def _due(self, sends: _Cut, waits: NDArray[np.bool_]) -> NDArray[np.uint16]:
        """When pieces of runs, by tensor and destination, are due. Those that wait first, as they are finished while
        the others come; of both peer after peer, every rank beginning with the next, so that no port takes from several
        at a time. Tensors go side by side, and what stays on the rank all along.
        """
        run, where = sends.run, sends.runs.words[:, _WHERE].astype(np.int64)
        dest = where & 0xFFFF
        flow = (where >> 16 & 0xFF) * self._num_ranks + dest
        pieces = np.bincount(flow[run])
        number = np.arange(len(run)) - (pieces.cumsum() - pieces)[flow][run]
        # A piece is due when its half is gone.
        when = self._begin[dest][run] + (number + 0.5) * (self._last[dest] / pieces[flow])[run]
        found: NDArray[np.uint16] = (when * (2**15 - 1)).astype(np.uint16) | (~waits).astype(np.uint16) << 15
        return found

    def _all(self, flows: Sequence[Shipment], packed: bool, tile_bytes: int) -> list[_Part]:
        found = []
        for flow in flows:
            key = flow.routes, flow.width, flow.is_sum, packed, tile_bytes
            if key not in self._parts:
                self._parts[key] = _part(flow, self._rank, packed, tile_bytes)
            found.append(self._parts[key])
        return found


def table(flows: Sequence[Shipment], rank: int, *, packed: bool, tile_bytes: int) -> RowTable:
    """One table of one rank."""
    return Tables(rank, flows[0].routes.num_ranks).table(flows, packed=packed, tile_bytes=tile_bytes)


def _part(flow: Shipment, rank: int, packed: bool, tile_bytes: int) -> _Part:
    routes, placed, tile_rows = flow.routes, _placed(flow, packed), max(1, tile_bytes // flow.width)
    sends, route = _sends(placed, rank, tile_rows)
    return _Part(
        sends,
        route,
        min(int(sends.rows.max(initial=0)), tile_rows) * flow.width,
        _finishes(flow, placed, rank, tile_bytes),
        routes.counts[rank],
        int(placed.room.max(initial=0)),
        SEND_WORDS * _most_sends(flow, tile_rows) + FINISH_WORDS * _most_finishes(flow, packed, tile_bytes),
        _digest(flow),
    )


def _most(rank: Longs, tiles: Longs) -> Longs:
    """Pieces of the runs of each rank, of so many tiles together, at most: see `_tiles`."""
    return 5 * np.bincount(rank, minlength=len(tiles)) + tiles // MOST_TILES + 1


def _most_sends(flow: Shipment, tile_rows: int) -> Longs:
    routes = flow.routes
    return _most(routes.source, totals(routes.source, -(-routes.length // tile_rows), routes.num_ranks))


def _most_finishes(flow: Shipment, packed: bool, tile_bytes: int) -> Longs:
    """Gaps, before each run and at the end, and the runs themselves, where they wait."""
    routes, tiles = flow.routes, np.zeros(flow.routes.num_ranks, np.int64)
    if packed or flow.is_sum:
        tiles = totals(routes.dest, -(-routes.length // _finished_rows(flow, tile_bytes)), routes.num_ranks)
    gaps = flow.rows // max(1, tile_bytes // flow.width) // MOST_TILES
    return 2 * _most(routes.dest, tiles) + gaps + 6


def _finished_rows(flow: Shipment, tile_bytes: int) -> int:
    """Of what waits, that a warp finishes at once. A sum reads several runs."""
    return max(1, tile_bytes // (flow.width * (SUM_PARTS if flow.is_sum else 1)))


# --- where rows wait --------------------------------------------------------------------------------------------------


def _placed(flow: Shipment, packed: bool) -> _Placed:
    routes = flow.routes
    some = (routes.length > 0).nonzero()[0]
    source, dest, length = routes.source[some], routes.dest[some], routes.length[some]
    shard, copy, dest_row = routes.shard[some], routes.copy[some], routes.dest_row[some]
    waits, place, room = np.full(len(some), packed), np.zeros(len(some), np.int64), np.zeros(routes.num_ranks, np.int64)
    if flow.is_sum:
        dest_row = dest_row - copy * flow.rows[dest]
        waits = waits | (np.bincount(shard)[shard] > 1)
    if waits.any():
        # One stretch per sender, or where they are summed per shard, copy after copy.
        order = np.lexsort((copy, shard, dest) if flow.is_sum else (source, dest))
        rows = np.where(waits, length, 0)
        place[order] = running_sum(dest[order], rows[order])
        room = totals(dest, rows, routes.num_ranks)
    return _Placed(some, source, routes.source_row[some], dest, dest_row, length, shard, copy, waits, place, room)


# --- what is pushed ---------------------------------------------------------------------------------------------------


def _sends(placed: _Placed, rank: int, tile_rows: int) -> tuple[_Runs, Longs]:
    """By destination, and which route each begins."""
    mine = (placed.source == rank).nonzero()[0]
    mine = mine[stable_order(placed.dest[mine])]
    waits, row = placed.waits[mine], placed.source_row[mine]
    to = np.where(waits, placed.place[mine], placed.dest_row[mine])
    where = placed.dest[mine] | waits.astype(np.int64) << _WAITS
    first, rows = _merged(row, to, placed.length[mine], where)
    words = _columns(len(first), row[first], to[first], 0, where[first])
    return _Runs(words, rows, np.full(len(rows), tile_rows)), placed.index[mine[first]]


def _merged(source: Longs, dest: Longs, length: Longs, key: Longs) -> tuple[Longs, Longs]:
    """The first of each chain of runs that adjoin at both ends and agree in `key`, and the rows of the chain."""
    if not len(length):
        return np.zeros(0, np.int64), length
    end = length[:-1]
    adjoins = (source[:-1] + end == source[1:]) & (dest[:-1] + end == dest[1:]) & (key[:-1] == key[1:])
    first = np.concatenate(([True], ~adjoins)).nonzero()[0]
    return first, np.add.reduceat(length, first)


def _threads(longest: int) -> int:
    """Of a warp, that move a run: all, or where every run is short as many as it has words of 16 bytes, or more."""
    words = -(-longest // 16)
    return min(1 << max(words - 1, 0).bit_length(), WARP)


# --- what is finished -------------------------------------------------------------------------------------------------


def _finishes(flow: Shipment, placed: _Placed, rank: int, tile_bytes: int) -> _Runs:
    here = (placed.dest == rank).nonzero()[0]
    zeros = _zeros(flow, placed, rank, here, max(1, tile_bytes // flow.width))
    waiting = here[placed.waits[here]]
    if not len(waiting):
        return zeros
    made = _sums if flow.is_sum else _copies
    return _joined([zeros, made(placed, waiting, _finished_rows(flow, tile_bytes))])


def _finished(
    kind: Longs | int, tile_rows: int, source_row: Longs | int, row: Longs, rows: Longs, copies: Longs | int = 1
) -> _Runs:
    """Of copies, each is as long as the sum, and they lie one behind the other."""
    words = _columns(len(rows), kind, 0, source_row, row, rows, rows, copies, tile_rows)
    return _Runs(words, rows, np.full(len(rows), tile_rows))


def _copies(placed: _Placed, waiting: Longs, tile_rows: int) -> _Runs:
    waiting = waiting[np.argsort(placed.place[waiting], kind="stable")]
    place, row = placed.place[waiting], placed.dest_row[waiting]
    first, rows = _merged(place, row, placed.length[waiting], np.zeros_like(row))
    return _finished(COPY, tile_rows, place[first], row[first], rows)


def _sums(placed: _Placed, waiting: Longs, tile_rows: int) -> _Runs:
    waiting = waiting[np.lexsort((placed.copy[waiting], placed.shard[waiting]))]
    _, first, copies = np.unique(placed.shard[waiting], return_index=True, return_counts=True)
    leader = waiting[first]
    kind, places, rows = np.where(copies == 1, COPY, SUM), placed.place[leader], placed.dest_row[leader]
    return _finished(kind, tile_rows, places, rows, placed.length[leader], copies)


def _zeros(flow: Shipment, placed: _Placed, rank: int, here: Longs, tile_rows: int) -> _Runs:
    """Rows of the output that no route leads to."""
    if not flow.is_sum and int(placed.length[here].sum()) == flow.rows[rank]:  # what lies apart fills it all
        return _Runs(np.empty((0, FINISH_WORDS), np.uint32), here[:0], here[:0])
    row, first = np.unique(placed.dest_row[here], return_index=True)
    begins = np.concatenate(([0], row + placed.length[here][first]))
    gaps = np.concatenate((row, [int(flow.rows[rank])])) - begins
    some = gaps > 0
    return _finished(ZERO, tile_rows, 0, begins[some], gaps[some])


# --- pieces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Cut:
    """Runs in pieces."""

    runs: _Runs
    tiles: int  # of a piece at most
    run: Longs  # of each piece
    skip: Longs  # rows of the run before it
    rows: Longs

    def at(self, chosen: Longs) -> _Cut:
        return _Cut(self.runs, self.tiles, self.run[chosen], self.skip[chosen], self.rows[chosen])

    def words(self, column: int) -> Words:
        """`column`: of the rows of a piece; before it are the rows where they begin."""
        found, skip = self.runs.words.take(self.run, axis=0), self.skip.astype(np.uint32)
        for begin in (column - 2, column - 1):
            found[:, begin] += skip
        found[:, column] = self.rows
        return found


def _cut(runs: _Runs) -> _Cut:
    if not len(runs.rows):
        return _Cut(runs, 1, runs.rows, runs.rows, runs.rows)
    tiles = _tiles(runs)
    most = runs.tile_rows * tiles
    pieces = -(-runs.rows // most)
    run = np.arange(len(pieces)).repeat(pieces)
    skip = (np.arange(len(run)) - (pieces.cumsum() - pieces)[run]) * most[run]
    return _Cut(runs, tiles, run, skip, np.minimum(runs.rows[run] - skip, most[run]))


def _tiles(runs: _Runs) -> int:
    """So many tiles are a piece: few words for long runs, and few tiles that are none at the end of short ones. No more
    than half of what a run has in the mean, and more than a quarter: so n runs are at most 5 n pieces and one for every
    MOST_TILES tiles.
    """
    tiles = int((-(-runs.rows // runs.tile_rows)).sum())
    return min(1 << max(tiles // (2 * len(runs.rows)), 1).bit_length() - 1, MOST_TILES)


# --- words ------------------------------------------------------------------------------------------------------------


def _joined(parts: Sequence[_Runs]) -> _Runs:
    words, rows, tile_rows = ([getattr(part, name) for part in parts] for name in ("words", "rows", "tile_rows"))
    return _Runs(np.concatenate(words), np.concatenate(rows), np.concatenate(tile_rows))


def _numbered(parts: Sequence[_Runs], column: int, shift: int) -> _Runs:
    """Those of all tensors, each with its number from that bit of that column on."""
    if len(parts) == 1 or not any(len(part.rows) for part in parts):
        return parts[0]
    found = _joined(parts)
    tensor = np.arange(len(parts), dtype=np.uint32).repeat([len(part.rows) for part in parts])
    found.words[:, column] |= tensor << shift
    return found


def _columns(rows: int, *columns: Longs | int) -> Words:
    """(rows, number of columns)."""
    found = np.empty((rows, len(columns)), np.uint32)
    for at, column in enumerate(columns):
        found[:, at] = column
    return found


def _digest(flow: Shipment) -> int:
    """Of the routes of all ranks, so that ranks that follow different plans are told apart."""
    columns = np.concatenate((*(getattr(flow.routes, name) for name in _ROUTE), flow.rows), dtype=np.int64)
    return zlib.crc32(columns.data, zlib.crc32(repr((flow.width, flow.is_sum)).encode()))


_ROUTE = ("source", "source_row", "dest", "dest_row", "length", "copy")


def _words(sends: Words, finishes: Words, expected: Longs, more: Sequence[int]) -> Words:
    """`more`: the digest, and how the kernel goes through it all."""
    head = np.zeros(HEAD_WORDS, np.uint32)
    found = np.concatenate((head, sends.ravel(), finishes.ravel(), expected.view(np.uint32)))
    meant = [len(sends), len(finishes), 4 * (HEAD_WORDS + sends.size), *more[1:]]
    check, content = ~reduce(xor, meant), int(found[HEAD_WORDS:].sum(dtype=np.uint64))
    found[: 5 + len(more)] = np.array([*meant[:3], check, content, *more]) & 0xFFFFFFFF
    return found
