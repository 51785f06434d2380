"""Turns the routes of one call into the table of one rank's kernel: which runs of rows it pushes, which it finishes.

Assumes routes that `route_laws` accepts, equal on all ranks. Does not know addresses: a table names tensors by number,
places by row. The layout of a table is that of `TableHead`, `Send` and `Finish` in templates/include/commdsl/types.cuh.

With `packed` all rows wait at their destination in one stretch per sender, and the destination copies them to their
places; otherwise they go straight there, and only what is summed waits. `runs` has found out which rows those are.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import accumulate, pairwise
from operator import add, xor
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.routes import Longs, Routes
from commdsl.machine.topology import Floats
from commdsl.program.runs import MOST_TILES, WAITS, Part, Runs, Shipment, Tiling, Words, joined, parts_of

HEAD_WORDS = 12
WARP = 32  # threads


class _Columns(NamedTuple):
    """Words of a send, or of what is finished."""

    tensor: int  # that names the tensor
    shift: int  # from that bit on
    rows: int  # that says how many rows; those that say where they begin are the two before it


SENDS, FINISHES = _Columns(tensor=3, shift=16, rows=2), _Columns(tensor=1, shift=0, rows=4)


class RowTable(NamedTuple):
    """What one rank's kernel reads, as 32-bit words, and what the host has to know beside it."""

    words: Words
    num_sends: int
    num_finishes: int
    waiting_rows: tuple[int, ...]  # by tensor: the most rows that wait on any rank
    most_words: int  # no rank's table of these flows has more; the same number on all ranks
    digest: int  # of what all ranks send, in 32 bits
    route: Longs  # (num_sends,): the first of the run that each send is part of, counted through the flows' routes


@lru_cache(64)
def _turns(rank: int, num_ranks: int) -> tuple[Floats, Floats]:
    """When the rows for each rank begin to go, and how long they last, as shares of the whole."""
    distance = (np.arange(num_ranks) - rank) % num_ranks
    lasts = np.where(distance == 0, 1.0, 1 / max(num_ranks - 1, 1))
    return np.maximum(distance - 1, 0) * lasts, lasts


class Tables:
    """The tables of one rank. What several have in common is made once: values go as keys do, and queries by themselves
    as beside them. Routes have one number of rows each.
    """

    def __init__(self, rank: int, num_ranks: int, about: int = 0) -> None:
        """`about`: a digest of what ranks agree on besides the routes; it becomes part of that of each table."""
        self._rank, self._num_ranks, self._about = rank, num_ranks, about
        self._parts: dict[tuple[Routes, int, bool, Tiling], Part] = {}

    def tables(self, calls: Sequence[Sequence[Shipment]], tiling: Tiling) -> list[RowTable]:
        """One for each of several calls, made together: see `runs`."""
        known = self._known([flow for flows in calls for flow in flows], tiling)
        parts = [[known.pop(0) for _ in flows] for flows in calls]
        sends = _cut([[part.sends for part in mine] for mine in parts], SENDS)
        finishes = _cut([[part.finishes for part in mine] for mine in parts], FINISHES)
        waits = sends.runs.words[:, SENDS.tensor].astype(np.int64) >> WAITS
        order, waiting = self._order(sends, waits), waits * sends.pieces
        first = [accumulate((flow.routes.num for flow in flows), initial=0) for flows in calls]
        pairs = [pair for mine, begins in zip(parts, first, strict=True) for pair in zip(mine, begins, strict=False)]
        route = np.concatenate([part.route + begin for part, begin in pairs]).repeat(sends.pieces)[order]
        sent, found = sends.words.take(order, axis=0), []
        for at, mine in enumerate(parts):
            here, there = sends.of(at), finishes.words[finishes.of(at)]
            how = tiling.tile_bytes, sends.tiles[at], finishes.tiles[at], int(waiting[sends.runs_of(at)].sum())
            found.append(self._table(mine, tiling, sent[here], there, route[here], how))
        return found

    def _table(
        self, parts: Sequence[Part], tiling: Tiling, sends: Words, finishes: Words, route: Longs, how: tuple[int, ...]
    ) -> RowTable:
        said = tiling.packed, tiling.tile_bytes, [part.digest for part in parts], self._about
        digest, waiting = zlib.crc32(repr(said).encode()), tuple([part.waiting_rows for part in parts])
        more = digest, _threads(max(part.longest for part in parts)), *how, int(any(waiting))
        expected, most = (reduce(add, of) for of in ([p.expected for p in parts], [p.most_words for p in parts]))
        return RowTable(
            _words(sends, finishes, expected, more),
            len(sends),
            len(finishes),
            waiting,
            HEAD_WORDS + 2 * self._num_ranks + int(most.max()),
            digest,
            route,
        )

    def _order(self, sends: _Pieces, waits: Longs) -> Longs:
        """Pieces of each table as they are due. What is due at once goes in the order of the tensors."""
        straight = (1 - waits).astype(np.uint16) << 15
        due = self._due(sends) | straight.repeat(sends.pieces)
        # 16 bits, which numpy sorts in linear time.
        return np.concatenate([begin + due[begin:end].argsort(kind="stable") for begin, end in pairwise(sends.cuts)])

    def _due(self, sends: _Pieces) -> NDArray[np.uint16]:
        """When pieces of runs, by tensor and destination, are due. Those that wait first, as they are finished while
        the others come; of both peer after peer, every rank beginning with the next, so that no port takes from several
        at a time. Tensors go side by side, and what stays on the rank all along.
        """
        begins, lasts = _turns(self._rank, self._num_ranks)
        dest, pieces = sends.runs.words[:, SENDS.tensor] & 0xFFFF, sends.pieces
        flow = sends.tensor * self._num_ranks + dest
        of_flow = np.bincount(flow, pieces)
        # A piece is due when its half is gone.
        half = 0.5 - (of_flow.cumsum() - of_flow)[flow]
        when = np.arange(len(sends.words), dtype=np.float64)
        when += half.repeat(pieces)
        when *= (lasts[dest] / of_flow[flow]).repeat(pieces)
        when += begins[dest].repeat(pieces)
        when *= 2**15 - 1
        return when.astype(np.uint16)

    def _known(self, flows: Sequence[Shipment], tiling: Tiling) -> list[Part]:
        keys = [(flow.routes, flow.width, flow.is_sum, tiling) for flow in flows]
        new = {key: flow for key, flow in zip(keys, flows, strict=True) if key not in self._parts}
        if new:
            self._parts.update(zip(new, parts_of([*new.values()], self._rank, tiling), strict=True))
        return [self._parts[key] for key in keys]


def table(flows: Sequence[Shipment], rank: int, *, packed: bool, tile_bytes: int) -> RowTable:
    """One table of one rank. `tile_bytes` is the most that a warp moves at once, a row at least."""
    return Tables(rank, flows[0].routes.num_ranks).tables([flows], Tiling(packed, tile_bytes))[0]


def _threads(longest: int) -> int:
    """Of a warp, that move a run: all, or where every run is short as many as it has words of 16 bytes, or more."""
    words = -(-longest // 16)
    return min(1 << max(words - 1, 0).bit_length(), WARP)


# --- pieces -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Pieces:
    """Runs of several tables in pieces, table after table."""

    runs: Runs
    tensor: Longs  # of each run, a number for each table and tensor
    pieces: Longs  # of each run
    ends: list[int]  # where the runs of each table begin, and the last end
    cuts: list[int]  # where its pieces do
    tiles: list[int]  # by table: of a piece at most
    words: Words  # of each piece

    def of(self, table: int) -> slice:
        return slice(self.cuts[table], self.cuts[table + 1])

    def runs_of(self, table: int) -> slice:
        return slice(self.ends[table], self.ends[table + 1])


def _cut(tables: Sequence[Sequence[Runs]], columns: _Columns) -> _Pieces:
    """The runs of all tensors of each table."""
    every = [runs for mine in tables for runs in mine]
    numbers, sizes = [at for mine in tables for at in range(len(mine))], [len(runs.rows) for runs in every]
    runs, tensor = joined(every), np.arange(len(every)).repeat(sizes)
    runs.words[:, columns.tensor] |= (np.array(numbers, np.uint32) << columns.shift)[tensor]
    each = [sum([len(runs.rows) for runs in mine]) for mine in tables]
    ends = [0, *accumulate(each)]
    needed = -(-runs.rows // runs.tile_rows)
    tiles = [_tiles(needed[begin:end]) for begin, end in pairwise(ends)]
    most = runs.tile_rows * np.array(tiles).repeat(each)
    pieces = -(-runs.rows // most)
    cuts = np.concatenate(([0], pieces.cumsum()))
    words = _pieces(runs, pieces, cuts[:-1], most, columns.rows)
    return _Pieces(runs, tensor, pieces, ends, cuts[ends].tolist(), tiles, words)


def _pieces(runs: Runs, pieces: Longs, first: Longs, most: Longs, column: int) -> Words:
    """What each piece is: its run, but for where it begins and how many rows it has."""
    size, found = most.astype(np.uint32).repeat(pieces), runs.words.repeat(pieces, axis=0)
    skip = np.arange(len(found), dtype=np.uint32)
    skip -= first.astype(np.uint32).repeat(pieces)
    skip *= size
    found[:, column - 2] += skip
    found[:, column - 1] += skip
    found[:, column] = np.minimum(runs.rows.astype(np.uint32).repeat(pieces) - skip, size)
    return found


def _tiles(needed: Longs) -> int:
    """So many tiles are a piece: few words for long runs, and few tiles that are none at the end of short ones. No more
    than half of what a run has in the mean, and more than a quarter: so n runs are at most 5 n pieces and one for every
    MOST_TILES tiles.
    """
    if not len(needed):
        return 1
    return min(1 << max(int(needed.sum()) // (2 * len(needed)), 1).bit_length() - 1, MOST_TILES)


# --- words ------------------------------------------------------------------------------------------------------------


def _words(sends: Words, finishes: Words, expected: Longs, more: Sequence[int]) -> Words:
    """`more`: the digest, and how the kernel goes through it all."""
    head = np.zeros(HEAD_WORDS, np.uint32)
    found = np.concatenate((head, sends.ravel(), finishes.ravel(), expected.view(np.uint32)))
    meant = [len(sends), len(finishes), 4 * (HEAD_WORDS + sends.size), *more[1:]]
    check, content = ~reduce(xor, meant), int(found[HEAD_WORDS:].sum(dtype=np.uint32))
    found[: 5 + len(more)] = [word & 0xFFFFFFFF for word in (*meant[:3], check, content, *more)]
    return found
