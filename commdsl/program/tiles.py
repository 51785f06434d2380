"""Turns the routes of one call into the table of one rank's kernel: which runs of rows it pushes, which it finishes.

Assumes routes that `route_laws` accepts, equal on all ranks. Does not know addresses: a table names tensors by number,
places by row. The layout of a table is that of `TableHead`, `Send` and `Finish` in templates/include/commdsl/types.cuh.

With `packed` all rows wait at their destination in one stretch per sender, and the destination copies them to their
places; otherwise they go straight there, and only what is summed waits.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.routes import Longs, Routes, running_sum, stable_order, totals

HEAD_WORDS = 8
WARP = 32  # threads
SEND_WORDS, FINISH_WORDS = 4, 8
COPY, SUM, ZERO = 0, 1, 2
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

    words: NDArray[np.uint32]
    num_sends: int
    num_finishes: int
    waiting_rows: tuple[int, ...]  # by tensor: the most rows that wait on any rank
    send_route: Longs  # (num_sends,): the route each send is part of, counted through the flows' routes
    digest: int  # of what all ranks send, in 32 bits


@dataclass(frozen=True, eq=False)
class _Runs:
    """Runs of rows of one tensor: m entries each."""

    tensor: Longs
    source_row: Longs
    dest_row: Longs
    rows: Longs
    dest: Longs
    waits: NDArray[np.bool_]
    route: Longs


@dataclass(frozen=True, eq=False)
class _Finishes:
    kind: Longs
    tensor: Longs
    source_row: Longs
    dest_row: Longs
    rows: Longs
    stride: Longs
    count: Longs


Rows = TypeVar("Rows", _Runs, _Finishes)


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


def table(flows: Sequence[Shipment], rank: int, *, packed: bool, tile_bytes: int) -> RowTable:
    """The table of one rank. `tile_bytes` is the most that a warp moves at once, a row at least."""
    sends, finishes, waiting, offset = [], [], [], 0
    expected = np.zeros(flows[0].routes.num_ranks, np.uint64)
    last: tuple[Shipment, _Placed] | None = None
    for tensor, flow in enumerate(flows):
        # Keys and values go the same way.
        alike = last is not None and last[0].routes is flow.routes and last[0].is_sum == flow.is_sum
        placed = last[1] if last is not None and alike else _placed(flow, packed)
        last = flow, placed
        waiting.append(int(placed.room.max(initial=0)))
        tile_rows = max(1, tile_bytes // flow.width)
        sends.append(_sends(placed, tensor, rank, offset, tile_rows))
        finishes.append(_finishes(flow, placed, tensor, rank, _finish_rows(flow, tile_bytes)))
        expected += totals(placed.source, np.where(placed.dest == rank, placed.length, 0), len(expected)).astype(
            np.uint64
        )
        offset += flow.routes.num
    runs, done = _joined(sends), _joined(finishes)
    order = _order(runs.dest * len(flows) + runs.tensor, len(flows), rank, len(expected))
    digest = _digest(flows, packed, tile_bytes)
    widths = np.array([flow.width for flow in flows])
    threads = _threads(int((runs.rows * widths[runs.tensor]).max(initial=0)))
    return RowTable(
        _words(runs, order, done, expected, digest, threads),
        len(runs.rows),
        len(done.rows),
        tuple(waiting),
        runs.route[order],
        digest,
    )


def _finish_rows(flow: Shipment, tile_bytes: int) -> int:
    """The most rows that a warp finishes at once."""
    return max(1, tile_bytes // (flow.width * (SUM_PARTS if flow.is_sum else 1)))


def most_words(flows: Sequence[Shipment], *, packed: bool, tile_bytes: int) -> int:
    """No rank's table has more words; the same number on all ranks."""
    num_ranks = flows[0].routes.num_ranks
    sends, finishes = np.zeros(num_ranks, np.int64), np.zeros(num_ranks, np.int64)
    for flow in flows:
        routes, tile_rows = flow.routes, _finish_rows(flow, tile_bytes)
        pieces = -(-routes.length // max(1, tile_bytes // flow.width))
        sends += totals(routes.source, pieces, num_ranks)
        if packed or flow.is_sum:
            finishes += totals(routes.dest, -(-routes.length // tile_rows), num_ranks)
        # Rows that nothing leads to: a gap before each run and one at the end, each with a last piece that is short.
        finishes += flow.rows // tile_rows + totals(routes.dest, np.ones_like(pieces), num_ranks) + 1
    return HEAD_WORDS + 2 * num_ranks + int((SEND_WORDS * sends + FINISH_WORDS * finishes).max())


# --- where rows wait --------------------------------------------------------------------------------------------------


def _placed(flow: Shipment, packed: bool) -> _Placed:
    routes = flow.routes
    some = np.flatnonzero(routes.length > 0)
    source, dest, length = routes.source[some], routes.dest[some], routes.length[some]
    shard, copy, dest_row = routes.shard[some], routes.copy[some], routes.dest_row[some]
    waits = np.full(len(some), packed)
    order = np.lexsort((source, dest))  # one stretch per sender
    if flow.is_sum:
        dest_row = dest_row - copy * flow.rows[dest]
        _, which, copies = np.unique(shard, return_inverse=True, return_counts=True)
        waits = waits | (copies[which] > 1)
        order = np.lexsort((copy, shard, dest))  # one stretch per shard, copy after copy
    place = np.empty(len(some), np.int64)
    place[order] = running_sum(dest[order], np.where(waits, length, 0)[order])
    room = totals(dest, np.where(waits, length, 0), routes.num_ranks)
    return _Placed(some, source, routes.source_row[some], dest, dest_row, length, shard, copy, waits, place, room)


# --- what is pushed ---------------------------------------------------------------------------------------------------


def _sends(placed: _Placed, tensor: int, rank: int, offset: int, tile_rows: int) -> _Runs:
    mine = np.flatnonzero(placed.source == rank)
    waits, dest = placed.waits[mine], placed.dest[mine]
    to = np.where(waits, placed.place[mine], placed.dest_row[mine])
    first, rows = _merged(placed.source_row[mine], to, placed.length[mine], dest * 2 + waits)
    mine, waits, dest, to = mine[first], waits[first], dest[first], to[first]
    pieces, skip, size = _cut(rows, tile_rows)
    return _Runs(
        np.full(len(size), tensor),
        placed.source_row[mine].repeat(pieces) + skip,
        to.repeat(pieces) + skip,
        size,
        dest.repeat(pieces),
        waits.repeat(pieces),
        (offset + placed.index[mine]).repeat(pieces),
    )


def _merged(source: Longs, dest: Longs, length: Longs, key: Longs) -> tuple[Longs, Longs]:
    """The first of each chain of runs that adjoin at both ends and agree in `key`, and the rows of the chain."""
    if not len(length):
        return np.zeros(0, np.int64), length
    end = length[:-1]
    adjoins = (source[:-1] + end == source[1:]) & (dest[:-1] + end == dest[1:]) & (key[:-1] == key[1:])
    first = np.flatnonzero(np.concatenate(([True], ~adjoins)))
    return first, np.add.reduceat(length, first)


def _cut(rows: Longs, most: int) -> tuple[Longs, Longs, Longs]:
    """Runs cut into pieces of at most `most` rows: how many each run is, and of each its first row there, its rows."""
    pieces = -(-rows // most)
    skip = (np.arange(int(pieces.sum())) - (np.cumsum(pieces) - pieces).repeat(pieces)) * most
    return pieces, skip, np.minimum(rows.repeat(pieces) - skip, most)


def _order(group: Longs, num_tensors: int, rank: int, num_ranks: int) -> Longs:
    """Of pieces by group, a destination and a tensor: peer after peer, every rank beginning with the next, so that no
    port takes from several at a time. Tensors go side by side, and what stays on the rank all along.
    """
    by_group = stable_order(group)
    count = np.bincount(group, minlength=num_ranks * num_tensors)
    distance = (np.arange(len(count)) // num_tensors - rank) % num_ranks
    # When a group begins and how long it lasts, as shares of the whole; a piece is due when its half is gone.
    last = np.where(distance == 0, 1.0, 1 / max(num_ranks - 1, 1))
    first = np.maximum(distance - 1, 0) * last
    step = last / np.maximum(count, 1)
    place = np.arange(len(group)) - np.repeat(np.cumsum(count) - count, count)
    when = np.repeat(first + step / 2, count) + place * np.repeat(step, count)
    # In 16 bits, which numpy sorts in linear time. What is due at once goes in the order of the groups.
    return by_group.take(np.argsort((when * (2**16 - 1)).astype(np.uint16), kind="stable"))


def _threads(longest: int) -> int:
    """Of a warp, that move a run: all, or where every run is short as many as it has words of 16 bytes, or more."""
    words = -(-longest // 16)
    return min(1 << max(words - 1, 0).bit_length(), WARP)


# --- what is finished -------------------------------------------------------------------------------------------------


def _finishes(flow: Shipment, placed: _Placed, tensor: int, rank: int, tile_rows: int) -> _Finishes:
    here = np.flatnonzero(placed.dest == rank)
    parts = [_zeros(flow, placed, tensor, rank, here, tile_rows)]
    waiting = here[placed.waits[here]]
    if len(waiting):
        cut = _sums if flow.is_sum else _copies
        parts.append(cut(placed, tensor, waiting, tile_rows))
    return _joined(parts)


def _copies(placed: _Placed, tensor: int, waiting: Longs, tile_rows: int) -> _Finishes:
    waiting = waiting[np.argsort(placed.place[waiting], kind="stable")]
    place, row = placed.place[waiting], placed.dest_row[waiting]
    first, rows = _merged(place, row, placed.length[waiting], np.zeros_like(row))
    pieces, skip, size = _cut(rows, tile_rows)
    source, row = (start[first].repeat(pieces) + skip for start in (place, row))
    zero = np.zeros_like(size)
    return _Finishes(zero + COPY, zero + tensor, source, row, size, zero, zero + 1)


def _sums(placed: _Placed, tensor: int, waiting: Longs, tile_rows: int) -> _Finishes:
    waiting = waiting[np.lexsort((placed.copy[waiting], placed.shard[waiting]))]
    _, first, copies = np.unique(placed.shard[waiting], return_index=True, return_counts=True)
    leader = waiting[first]
    stride = placed.length[leader]
    pieces, skip, size = _cut(stride, tile_rows)
    source, row = (start[leader].repeat(pieces) + skip for start in (placed.place, placed.dest_row))
    stride, count = stride.repeat(pieces), copies.repeat(pieces)
    zero = np.zeros_like(size)
    kind = np.where(count == 1, COPY, SUM)
    return _Finishes(kind, zero + tensor, source, row, size, stride, count)


def _zeros(flow: Shipment, placed: _Placed, tensor: int, rank: int, here: Longs, tile_rows: int) -> _Finishes:
    """Rows of the output that no route leads to."""
    row, first = np.unique(placed.dest_row[here], return_index=True)
    end = row + placed.length[here][first]
    begins = np.concatenate(([0], end))
    gaps = np.concatenate((row, [int(flow.rows[rank])])) - begins
    pieces, skip, size = _cut(np.maximum(gaps, 0), tile_rows)
    zero = np.zeros_like(size)
    return _Finishes(zero + ZERO, zero + tensor, zero, begins.repeat(pieces) + skip, size, zero, zero)


# --- words ------------------------------------------------------------------------------------------------------------


def _joined(parts: Sequence[Rows]) -> Rows:
    kind = type(parts[0])
    return kind(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(kind)))


def _digest(flows: Sequence[Shipment], packed: bool, tile_bytes: int) -> int:
    """Of the routes of all ranks, so that ranks that follow different plans are told apart."""
    found = zlib.crc32(repr((packed, tile_bytes, [(flow.width, flow.is_sum) for flow in flows])).encode())
    for flow in flows:
        for column in (*(getattr(flow.routes, name) for name in _ROUTE), flow.rows):
            found = zlib.crc32(np.ascontiguousarray(column, np.int64).data, found)
    return found


_ROUTE = ("source", "source_row", "dest", "dest_row", "length", "copy")


def _words(
    runs: _Runs, order: Longs, done: _Finishes, expected: NDArray[np.uint64], digest: int, threads: int
) -> NDArray[np.uint32]:
    where = runs.dest | runs.tensor << 16 | runs.waits.astype(np.int64) << 24
    sends = np.empty((len(where), SEND_WORDS), np.uint32)
    for word, column in enumerate((runs.source_row, runs.dest_row, runs.rows, where)):
        sends[:, word] = column
    sends = sends.take(order, axis=0)
    zero = np.zeros_like(done.rows)
    columns = (done.kind, done.tensor, done.source_row, done.dest_row, done.rows, done.stride, done.count, zero)
    finishes = np.stack(columns, axis=1).astype(np.uint32)
    at = 4 * (HEAD_WORDS + SEND_WORDS * len(sends))
    body = np.concatenate((sends.ravel(), finishes.ravel(), expected.view(np.uint32)))
    check = ~(len(sends) ^ len(finishes) ^ at ^ threads)
    total = int(body.sum(dtype=np.uint64))
    head = np.array([len(sends), len(finishes), at, check, total, digest, threads, 0]) & 0xFFFFFFFF
    return np.concatenate((head.astype(np.uint32), body))
