"""Turns the routes of tensors into the runs of rows that one rank sends and finishes, as long ones as there are.

Assumes routes that `route_laws` accepts, equal on all ranks. Takes all tensors at once: of few routes, the time goes
by calls of numpy and not by entries. Does not cut runs into pieces, nor say when they are due; `tiles` does.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.routes import Longs, Routes, sorted_sum, stable_order, totals

Words: TypeAlias = NDArray[np.uint32]

SEND_WORDS, FINISH_WORDS = 4, 8
COPY, SUM, ZERO = 0, 1, 2
WAITS = 24  # the bit, of the word of a send that names the tensor, that says that rows wait
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


class Tiling(NamedTuple):
    """How rows are moved: `packed`, and so many bytes at once, a row at least."""

    packed: bool
    tile_bytes: int

    def sent(self, flow: Shipment) -> int:
        """Rows that a warp sends at once."""
        return max(1, self.tile_bytes // flow.width)

    def finished(self, flow: Shipment) -> int:
        """Rows of what waits, that a warp finishes at once. A sum reads several runs."""
        return max(1, self.tile_bytes // (flow.width * (SUM_PARTS if flow.is_sum else 1)))


class Runs(NamedTuple):
    """Runs of rows that are sent, or finished: as long ones as there are."""

    words: Words  # (n, SEND_WORDS or FINISH_WORDS), of the first tensor
    rows: Longs  # (n,)
    tile_rows: Longs  # (n,): what a warp does at once

    def at(self, chosen: slice) -> Runs:
        return Runs(self.words[chosen], self.rows[chosen], self.tile_rows[chosen])


class Part(NamedTuple):
    """What one flow adds to the tables of a rank, as if it were the first tensor."""

    sends: Runs  # by destination
    route: Longs  # of each the route that it begins
    longest: int  # bytes of a tile
    finishes: Runs
    expected: Longs  # (num_ranks,): rows that come from each rank
    waiting_rows: int  # the most on any rank
    most_words: Longs  # (num_ranks,): of sends and finishes, each rank's at most
    digest: int  # of the routes of all ranks


def parts_of(flows: Sequence[Shipment], rank: int, how: Tiling) -> list[Part]:
    """What each flow adds, made together."""
    every = _routes(flows, how)
    most, placed = _most_words(flows, every, how.packed), _placed(flows, every, how.packed)
    sends, chosen = _sends(every, placed, rank)
    finishes = _finishes(flows, every, placed, rank)
    route, room = placed.route[chosen], placed.room.tolist()
    found = []
    for at, (flow, mine) in enumerate(zip(flows, _cuts(placed.flow[chosen], len(flows)), strict=True)):
        sent, expected = sends.at(mine), flow.routes.counts[rank]
        longest = min(max(sent.rows.tolist(), default=0), every.sent[at]) * flow.width
        digest = _digest(flow, every, at)
        found.append(Part(sent, route[mine], longest, finishes[at], expected, max(room[at]), most[at], digest))
    return found


def _cuts(flow: Longs, number: int) -> list[slice]:
    """Where each of so many flows stands, flow after flow."""
    ends = flow.searchsorted(np.arange(number + 1)).tolist()
    return [slice(*pair) for pair in pairwise(ends)]


def _digest(flow: Shipment, every: _Routes, at: int) -> int:
    """Of the routes of all ranks, so that ranks that follow different plans are told apart."""
    mine, found = slice(*every.cuts[at : at + 2]), zlib.crc32(repr((flow.width, flow.is_sum)).encode())
    for column in (every.source, every.source_row, every.dest, every.dest_row, every.length, every.copy):
        found = zlib.crc32(column[mine].data, found)
    return zlib.crc32(np.ascontiguousarray(flow.rows).data, found)


def joined(several: Sequence[Runs]) -> Runs:
    """One behind the other, in memory of their own."""
    return Runs(
        np.concatenate([one.words for one in several]),
        np.concatenate([one.rows for one in several]),
        np.concatenate([one.tile_rows for one in several]),
    )


# --- all flows as one -------------------------------------------------------------------------------------------------


class _Routes(NamedTuple):
    """The routes of flows, flow after flow."""

    num_ranks: int
    cuts: list[int]  # where the routes of each flow begin, and the last end
    sent: list[int]  # by flow: rows that a warp sends at once
    finished: list[int]  # that it finishes
    flow: Longs
    route: Longs  # which of the flow's it is
    source: Longs
    source_row: Longs
    dest: Longs
    dest_row: Longs
    length: Longs
    shard: Longs
    copy: Longs


class _Placed(NamedTuple):
    """Those with rows, and where they wait."""

    flow: Longs
    route: Longs
    source: Longs
    source_row: Longs
    dest: Longs
    dest_row: Longs  # in the output
    length: Longs
    shard: Longs
    copy: Longs
    at: Longs  # a number for each flow and destination
    is_sum: NDArray[np.bool_]
    waits: NDArray[np.bool_]
    place: Longs  # where the rows wait; meaningless for those that do not
    room: Longs  # (flows, num_ranks): rows that wait on each rank


_ALIKE = ("source", "source_row", "dest", "dest_row", "length", "shard", "copy")


def _routes(flows: Sequence[Shipment], how: Tiling) -> _Routes:
    given = [flow.routes for flow in flows]
    numbers = [len(routes.source) for routes in given]
    columns = [np.concatenate([getattr(routes, name) for routes in given]) for name in _ALIKE]
    cuts, flow = [*accumulate(numbers, initial=0)], np.arange(len(flows)).repeat(numbers)
    tiles = [how.sent(one) for one in flows], [how.finished(one) for one in flows]
    return _Routes(given[0].num_ranks, cuts, *tiles, flow, np.arange(cuts[-1]) - np.array(cuts)[flow], *columns)


def _most_words(flows: Sequence[Shipment], every: _Routes, packed: bool) -> Longs:
    """(flows, num_ranks): sends, and what is finished: gaps, before each run and at the end, and runs that wait."""
    first = every.flow * every.num_ranks
    source, dest, size = first + every.source, first + every.dest, len(flows) * every.num_ranks
    sent = np.array(every.sent)
    sends = _most(source, totals(source, -(-every.length // sent[every.flow]), size))
    waiting = every.length * np.array([packed or flow.is_sum for flow in flows])[every.flow]
    finishes = 2 * _most(dest, totals(dest, -(-waiting // np.array(every.finished)[every.flow]), size)) + 6
    gaps = np.concatenate([flow.rows for flow in flows]) // (MOST_TILES * sent).repeat(every.num_ranks)
    found: Longs = SEND_WORDS * sends + FINISH_WORDS * (finishes + gaps)
    return found.reshape(len(flows), every.num_ranks)


def _most(at: Longs, tiles: Longs) -> Longs:
    """Pieces of the runs at each place, of so many tiles together, at most: see `tiles`."""
    return 5 * np.bincount(at, minlength=len(tiles)) + tiles // MOST_TILES + 1


# --- where rows wait --------------------------------------------------------------------------------------------------


def _placed(flows: Sequence[Shipment], every: _Routes, packed: bool) -> _Placed:
    some, size = every.length.nonzero()[0], len(flows) * every.num_ranks
    flow, source, dest, length = every.flow[some], every.source[some], every.dest[some], every.length[some]
    shard, copy, dest_row = every.shard[some], every.copy[some], every.dest_row[some]
    at = flow * every.num_ranks + dest
    is_sum = np.array([one.is_sum for one in flows])[flow]
    of_copy = np.concatenate([one.rows if one.is_sum else 0 * one.rows for one in flows])
    dest_row = dest_row - copy * of_copy[at]
    waits, place, room = np.full(len(some), packed), np.zeros(len(some), np.int64), np.zeros(size, np.int64)
    if not packed and any(one.is_sum for one in flows):
        named = flow * (1 + shard.max(initial=0)) + shard
        waits = is_sum & (np.bincount(named)[named] > 1)
    if np.count_nonzero(waits):
        # One stretch per sender, or where they are summed per shard, copy after copy.
        order = np.lexsort((copy * is_sum, np.where(is_sum, shard, source), at))
        rows = length * waits
        place[order] = sorted_sum(at[order], rows[order])
        room = totals(at, rows, size)
    where = source, every.source_row[some], dest, dest_row, length, shard, copy
    return _Placed(flow, every.route[some], *where, at, is_sum, waits, place, room.reshape(len(flows), -1))


# --- what is pushed ---------------------------------------------------------------------------------------------------


def _sends(every: _Routes, placed: _Placed, rank: int) -> tuple[Runs, Longs]:
    """By flow and destination, and which route each begins."""
    mine = (placed.source == rank).nonzero()[0]
    mine = mine[stable_order(placed.at[mine])]
    waits, row = placed.waits[mine], placed.source_row[mine]
    to = np.where(waits, placed.place[mine], placed.dest_row[mine])
    first, rows = _merged(row, to, placed.length[mine], 2 * placed.at[mine] + waits)
    chosen = mine[first]
    where = placed.dest[chosen] | waits[first].astype(np.int64) << WAITS
    tile_rows = np.array(every.sent)[placed.flow[chosen]]
    return Runs(_columns(len(first), row[first], to[first], 0, where), rows, tile_rows), chosen


def _merged(source: Longs, dest: Longs, length: Longs, key: Longs) -> tuple[Longs, Longs]:
    """The first of each chain of runs that adjoin at both ends and agree in `key`, and the rows of the chain."""
    if not len(length):
        return np.zeros(0, np.int64), length
    opens, end = np.ones(len(length), np.bool_), length[:-1]
    opens[1:] = (source[:-1] + end != source[1:]) | (dest[:-1] + end != dest[1:]) | (key[:-1] != key[1:])
    first = opens.nonzero()[0]
    return first, np.add.reduceat(length, first)


# --- what is finished -------------------------------------------------------------------------------------------------


def _finishes(flows: Sequence[Shipment], every: _Routes, placed: _Placed, rank: int) -> list[Runs]:
    """By flow: rows of the output that no route leads to, and what waits."""
    here, number, tile_rows = (placed.dest == rank).nonzero()[0], len(flows), np.array(every.finished)
    waiting = here[placed.waits[here]]
    summed = placed.is_sum[waiting]
    copies, copied = _copies(placed, waiting[~summed], tile_rows)
    sums, added = _sums(placed, waiting[summed], tile_rows)
    found, cuts = [], (_cuts(placed.flow[here], number), _cuts(copied, number), _cuts(added, number))
    for flow, sent, mine, copy, add in zip(flows, every.sent, *cuts, strict=True):
        made, size = sums.at(add) if flow.is_sum else copies.at(copy), int(flow.rows[rank])
        # What lies apart may fill it all.
        if flow.is_sum or sum(placed.length[here[mine]].tolist()) != size:
            made = joined([_zeros(placed, here[mine], size, sent), made])
        found.append(made)
    return found


def _finished(
    kind: Longs | int, tile_rows: Longs, source_row: Longs | int, row: Longs, rows: Longs, copies: Longs | int = 1
) -> Runs:
    """Of copies, each is as long as the sum, and they lie one behind the other."""
    return Runs(_columns(len(rows), kind, 0, source_row, row, rows, rows, copies, tile_rows), rows, tile_rows)


def _copies(placed: _Placed, waiting: Longs, tile_rows: Longs) -> tuple[Runs, Longs]:
    """Of several flows, and which each is of."""
    waiting = waiting[np.lexsort((placed.place[waiting], placed.flow[waiting]))]
    flow, place, row = placed.flow[waiting], placed.place[waiting], placed.dest_row[waiting]
    first, rows = _merged(place, row, placed.length[waiting], flow)
    flow = flow[first]
    return _finished(COPY, tile_rows[flow], place[first], row[first], rows), flow


def _sums(placed: _Placed, waiting: Longs, tile_rows: Longs) -> tuple[Runs, Longs]:
    """As `_copies`."""
    waiting = waiting[np.lexsort((placed.copy[waiting], placed.shard[waiting], placed.flow[waiting]))]
    flow, shard, opens = placed.flow[waiting], placed.shard[waiting], np.ones(len(waiting), np.bool_)
    opens[1:] = (flow[1:] != flow[:-1]) | (shard[1:] != shard[:-1])
    first = opens.nonzero()[0]
    copies = np.concatenate((first[1:], [len(waiting)])) - first if len(first) else first
    leader, flow = waiting[first], flow[first]
    kind, places, rows = np.where(copies == 1, COPY, SUM), placed.place[leader], placed.dest_row[leader]
    return _finished(kind, tile_rows[flow], places, rows, placed.length[leader], copies), flow


def _zeros(placed: _Placed, here: Longs, size: int, tile_rows: int) -> Runs:
    """Rows of one flow's output, of so many, that no route leads to."""
    here = here[placed.dest_row[here].argsort(kind="stable")]
    row = placed.dest_row[here]
    begins = np.concatenate(([0], row + placed.length[here]))
    gaps = np.concatenate((row, [size])) - begins
    # Copies of a shard lie at the same rows: between them the gap is negative.
    some = (gaps > 0).nonzero()[0]
    return _finished(ZERO, np.full(len(some), tile_rows), 0, begins[some], gaps[some])


def _columns(rows: int, *columns: Longs | int) -> Words:
    """(rows, number of columns)."""
    found = np.empty((rows, len(columns)), np.uint32)
    for at, column in enumerate(columns):
        found[:, at] = column
    return found
