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

from commdsl.ir.routes import Longs, Routes, first_equal, running_sum, stable_order, totals

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
    order: Longs  # (num_sends,): which of its parts' sends each is
    pieces: Longs  # of each run, part after part, into how many sends it is cut
    route: Longs  # the route that each run begins, counted through the flows' routes

    def route_of(self, send: int) -> int:
        """Which route a send is part of."""
        run = np.searchsorted(self.pieces.cumsum(), self.order[send], side="right")
        return int(self.route[run])


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

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._parts: dict[tuple[Routes, int, bool, bool, int], _Part] = {}

    def table(self, flows: Sequence[Shipment], *, packed: bool, tile_bytes: int) -> RowTable:
        """`tile_bytes` is the most that a warp moves at once, a row at least."""
        parts = self._all(flows, packed, tile_bytes)
        num_ranks = flows[0].routes.num_ranks
        sends = _numbered([part.sends for part in parts], _WHERE, 16)
        finishes = _numbered([part.finishes for part in parts], _TENSOR, 0)
        tiles = _tiles(sends), _tiles(finishes)
        sent, finished = _cut(sends, tiles[0], _ROWS_SENT), _cut(finishes, tiles[1], _ROWS_FINISHED)
        # 16 bits, which numpy sorts in linear time. What is due at once goes in the order of the tensors.
        order = _due(sends, sent, self._rank, num_ranks).argsort(kind="stable")
        digest = zlib.crc32(repr((packed, tile_bytes, [part.digest for part in parts])).encode())
        waiting = int((sent.words[:, _WHERE] >> _WAITS).sum()), int(any(part.waiting_rows for part in parts))
        how = digest, _threads(max(part.longest for part in parts)), tile_bytes, *tiles, *waiting
        first = accumulate((flow.routes.num for flow in flows), initial=0)
        return RowTable(
            _words(sent.words.take(order, axis=0), finished.words, reduce(add, (part.expected for part in parts)), how),
            len(sent.words),
            len(finished.words),
            tuple(part.waiting_rows for part in parts),
            HEAD_WORDS + 2 * num_ranks + int(reduce(add, (part.most_words for part in parts)).max()),
            digest,
            order,
            sent.pieces,
            np.concatenate([part.route + begin for part, begin in zip(parts, first, strict=False)]),
        )

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
    return Tables(rank).table(flows, packed=packed, tile_bytes=tile_bytes)


def _part(flow: Shipment, rank: int, packed: bool, tile_bytes: int) -> _Part:
    routes, placed = flow.routes, _placed(flow, packed)
    num_ranks, tile_rows = routes.num_ranks, max(1, tile_bytes // flow.width)
    sends, route = _sends(placed, rank, tile_rows)
    most_sends = _most(routes.source, -(-routes.length // tile_rows), num_ranks)
    return _Part(
        sends,
        route,
        min(int(sends.rows.max(initial=0)), tile_rows) * flow.width,
        _finishes(flow, placed, rank, tile_bytes),
        totals(placed.source, np.where(placed.dest == rank, placed.length, 0), num_ranks),
        int(placed.room.max(initial=0)),
        SEND_WORDS * most_sends + FINISH_WORDS * _most_finishes(flow, packed, tile_bytes),
        _digest(flow),
    )


def _most(rank: Longs, tiles: Longs, num_ranks: int) -> Longs:
    """Pieces of runs of so many tiles, on each rank at most: see `_tiles`."""
    return 5 * np.bincount(rank, minlength=num_ranks) + totals(rank, tiles, num_ranks) // MOST_TILES + 1


def _most_finishes(flow: Shipment, packed: bool, tile_bytes: int) -> Longs:
    """Gaps, before each run and at the end, and the runs themselves, where they wait."""
    routes = flow.routes
    tiles = -(-routes.length // _finished_rows(flow, tile_bytes)) * int(packed or flow.is_sum)
    gaps = flow.rows // max(1, tile_bytes // flow.width) // MOST_TILES + 6
    return 2 * _most(routes.dest, tiles, routes.num_ranks) + gaps


def _finished_rows(flow: Shipment, tile_bytes: int) -> int:
    """Of what waits, that a warp finishes at once. A sum reads several runs."""
    return max(1, tile_bytes // (flow.width * (SUM_PARTS if flow.is_sum else 1)))


# --- where rows wait --------------------------------------------------------------------------------------------------


def _placed(flow: Shipment, packed: bool) -> _Placed:
    routes = flow.routes
    some = (routes.length > 0).nonzero()[0]
    source, dest, length = routes.source[some], routes.dest[some], routes.length[some]
    shard, copy, dest_row = routes.shard[some], routes.copy[some], routes.dest_row[some]
    waits, place, room = np.full(len(some), packed), np.zeros_like(length), np.zeros(routes.num_ranks, np.int64)
    if flow.is_sum:
        dest_row = dest_row - copy * flow.rows[dest]
        waits = waits | (np.bincount(shard)[shard] > 1)
    if waits.any():
        # One stretch per sender, or where they are summed per shard, copy after copy.
        order = np.lexsort((copy, shard, dest) if flow.is_sum else (source, dest))
        rows = np.where(waits, length, 0)
        place[order] = running_sum(dest[order], rows[order])
        room = totals(dest, rows, routes.num_ranks)
    row = routes.source_row[some]
    return _Placed(some, source, row, dest, dest_row, length, shard, copy, waits, place, room)


# --- what is pushed ---------------------------------------------------------------------------------------------------


def _sends(placed: _Placed, rank: int, tile_rows: int) -> tuple[_Runs, Longs]:
    """By destination, and which route each begins."""
    mine = (placed.source == rank).nonzero()[0]
    mine = mine[stable_order(placed.dest[mine])]
    waits, dest, row = placed.waits[mine], placed.dest[mine], placed.source_row[mine]
    to = np.where(waits, placed.place[mine], placed.dest_row[mine])
    first, rows = _merged(row, to, placed.length[mine], dest * 2 + waits)
    words = _columns(row, to, 0, dest | waits.astype(np.int64) << _WAITS)[first]
    return _Runs(words, rows, np.full_like(rows, tile_rows)), placed.index[mine[first]]


def _due(runs: _Runs, cut: _Cut, rank: int, num_ranks: int) -> NDArray[np.uint16]:
    """When pieces of runs, by tensor and destination, are due. Those that wait first, as they are finished while the
    others come; of both peer after peer, every rank beginning with the next, so that no port takes from several at a
    time. Tensors go side by side, and what stays on the rank all along.
    """
    where = runs.words[:, _WHERE].astype(np.int64)
    dest = where & 0xFFFF
    flow = (where >> 16 & 0xFF) * num_ranks + dest
    distance = (np.arange(num_ranks) - rank) % num_ranks
    # When a peer's begin and how long they last, as shares of the whole; a piece is due when its half is gone.
    last = np.where(distance == 0, 1.0, 1 / max(num_ranks - 1, 1))
    step = last[dest] / np.bincount(flow, cut.pieces)[flow]
    before = cut.pieces.cumsum() - cut.pieces
    begin = (np.maximum(distance - 1, 0) * last)[dest] + (before - before[first_equal(flow)] + 0.5) * step
    when = begin.repeat(cut.pieces) + cut.number * step.repeat(cut.pieces)
    is_straight = (cut.words[:, _WHERE] >> _WAITS == 0).astype(np.uint16)
    found: NDArray[np.uint16] = (when * (2**15 - 1)).astype(np.uint16) | is_straight << 15
    return found


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
    words = _columns(kind, 0, source_row, row, rows, rows, copies, tile_rows)
    return _Runs(words, rows, np.full_like(rows, tile_rows))


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
    """Runs in pieces, run after run."""

    pieces: Longs  # of each run
    number: Longs  # of each piece in its run
    words: Words  # of each piece


def _tiles(runs: _Runs) -> int:
    """So many tiles are a piece: few words for long runs, and few tiles that are none at the end of short ones. No more
    than half of what a run has in the mean, and more than a quarter: so n runs are at most 5 n pieces and one for every
    MOST_TILES tiles.
    """
    tiles = int((-(-runs.rows // runs.tile_rows)).sum())
    return min(1 << max(tiles // max(2 * len(runs.rows), 1), 1).bit_length() - 1, MOST_TILES)


def _cut(runs: _Runs, tiles: int, column: int) -> _Cut:
    """In pieces of at most so many tiles. `column`: of their rows; before it are the rows where they begin."""
    if not len(runs.rows):
        return _Cut(runs.rows, runs.rows, runs.words)
    most = runs.tile_rows * tiles
    pieces = -(-runs.rows // most)
    each = most.repeat(pieces)
    number = np.arange(int(pieces.sum())) - (pieces.cumsum() - pieces).repeat(pieces)
    skip = number * each
    words = runs.words.repeat(pieces, axis=0)
    words[:, column - 2 : column] += skip.astype(np.uint32)[:, None]
    words[:, column] = np.minimum(runs.rows.repeat(pieces) - skip, each)
    return _Cut(pieces, number, words)


# --- words ------------------------------------------------------------------------------------------------------------


def _joined(parts: Sequence[_Runs]) -> _Runs:
    words, rows, tile_rows = ([getattr(part, name) for part in parts] for name in ("words", "rows", "tile_rows"))
    return _Runs(np.concatenate(words), np.concatenate(rows), np.concatenate(tile_rows))


def _numbered(parts: Sequence[_Runs], column: int, shift: int) -> _Runs:
    """Those of all tensors, each with its number from that bit of that column on."""
    if len(parts) == 1:
        return parts[0]
    found, at = _joined(parts), 0
    for tensor, part in enumerate(parts):
        found.words[at : at + len(part.rows), column] |= np.uint32(tensor << shift)
        at += len(part.rows)
    return found


def _columns(*columns: Longs | int) -> Words:
    """(n, number of columns)."""
    rows = max(np.size(column) for column in columns if not isinstance(column, int))
    found = np.empty((rows, len(columns)), np.uint32)
    for at, column in enumerate(columns):
        found[:, at] = column
    return found


def _digest(flow: Shipment) -> int:
    """Of the routes of all ranks, so that ranks that follow different plans are told apart."""
    found = zlib.crc32(repr((flow.width, flow.is_sum)).encode())
    for column in (*(getattr(flow.routes, name) for name in _ROUTE), flow.rows):
        found = zlib.crc32(np.ascontiguousarray(column, np.int64).data, found)
    return found


_ROUTE = ("source", "source_row", "dest", "dest_row", "length", "copy")


def _words(sends: Words, finishes: Words, expected: Longs, more: Sequence[int]) -> Words:
    """`more`: the digest, and how the kernel goes through it all."""
    at = 4 * (HEAD_WORDS + sends.size)
    body = np.concatenate((sends.ravel(), finishes.ravel(), expected.view(np.uint32)))
    meant = [len(sends), len(finishes), at, *more[1:]]
    check = ~reduce(xor, meant)
    head = np.zeros(HEAD_WORDS, np.uint32)
    head[: 5 + len(more)] = np.array([*meant[:3], check, int(body.sum(dtype=np.uint64)), *more]) & 0xFFFFFFFF
    return np.concatenate((head, body))
