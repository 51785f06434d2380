"""Turns shards of rows and their destinations into routes: which rows of which rank go to which rows of which other.

Assumes shards in global order: by rank, then by their order there. Does not know bytes, tensors or kernels: every
offset and length is in rows (tokens). Nothing here loops over shards: a million of them take about a second.
"""

from __future__ import annotations

from enum import Enum
from functools import cached_property
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.language.records import dataclass

Longs: TypeAlias = NDArray[np.int64]

NOWHERE = -1
"""The destination of what is not sent."""


class Mask(Enum):
    """Which key/value shards of its document a query shard attends to."""

    CAUSAL = "causal"  # its own and all before it
    FULL = "full"  # all


class Sharing(Enum):
    """How often a key/value shard travels to one rank."""

    QUERY = "query"  # once for every query shard there that needs it: each finds its keys in one stretch of its own
    RANK = "rank"  # once: the queries of a document on one rank share one stretch, of which each reads the beginning


@dataclass(frozen=True, eq=False)
class Shards:
    """Runs of rows, shard after shard in the tensor of their rank: n shards, int64."""

    num_ranks: int
    rank: Longs  # (n,), never decreasing
    length: Longs  # (n,), rows; 0 is legal

    @property
    def num(self) -> int:
        return len(self.rank)

    @cached_property
    def begin(self) -> Longs:
        """(num_ranks + 1,): the shards of rank r are begin[r] ..< begin[r + 1]."""
        return np.searchsorted(self.rank, np.arange(self.num_ranks + 1)).astype(np.int64)

    @cached_property
    def local(self) -> Longs:
        """(n,): the number of a shard on its rank."""
        return np.arange(self.num) - self.begin[self.rank]

    @cached_property
    def row(self) -> Longs:
        """(n,): the first row of a shard in the tensor of its rank."""
        return sorted_sum(self.rank, self.length)

    @cached_property
    def rows(self) -> Longs:
        """(num_ranks,): the rows of each rank's tensor."""
        return totals(self.rank, self.length, self.num_ranks)


@dataclass(frozen=True, eq=False)
class Needs:
    """Which query shards attend to which key/value shards: m pairs, by key/value shard, then by the query's place in
    the document.
    """

    key: Longs  # (m,): a shard
    query: Longs  # (m,): a shard
    position: Longs  # (m,): which of the query's key/value shards this is, from 0


@dataclass(frozen=True, eq=False)
class Routes:
    """m runs of rows on their way, by source rank, shard and copy: rows [source_row, source_row + length) of rank
    `source` become rows [dest_row, dest_row + length) of rank `dest`.
    """

    num_ranks: int
    source: Longs  # (m,)
    source_row: Longs
    dest: Longs
    dest_row: Longs
    length: Longs
    shard: Longs  # the shard that travels, in global order
    copy: Longs  # which copy of the shard it is, from 0
    place: Longs  # its number among the runs that arrive at `dest`, in the order in which they lie there

    @property
    def num(self) -> int:
        return len(self.source)

    @cached_property
    def counts(self) -> Longs:
        """(num_ranks, num_ranks): rows that rank r receives from rank s, at [r, s]; the true sources."""
        pair = self.dest * self.num_ranks + self.source
        return totals(pair, self.length, self.num_ranks**2).reshape(self.num_ranks, self.num_ranks)

    @cached_property
    def received(self) -> Longs:
        """(num_ranks,): rows that each rank receives."""
        found: Longs = self.counts.sum(axis=1)
        return found


@dataclass(frozen=True, eq=False)
class KeyStretches:
    """Where each query shard finds its keys and values on its destination; (n,) each, by query shard."""

    row: Longs  # the first, NOWHERE for a query that is not sent
    length: Longs  # rows
    shards: Longs  # key/value shards


FEW = 1000
"""So few entries are sorted as they are: to look at them first takes longer."""


def totals(key: Longs, value: Longs, size: int) -> Longs:
    """(size,): the sum of `value` by `key`, exact."""
    found = np.zeros(size, np.int64)
    np.add.at(found, key, value)
    return found


class Grouped(NamedTuple):
    """n entries by their keys, equal ones as they stand; (n,) each."""

    order: Longs
    first: Longs  # in that order, where the entries with the same key begin

    def sums(self, value: Longs) -> Longs:
        """For each entry the sum of `value` over the entries before it with the same key."""
        ordered, found = value[self.order], np.empty(len(value), np.int64)
        before = ordered.cumsum() - ordered
        found[self.order] = before - before[self.first]
        return found

    def counts(self) -> Longs:
        """For each entry how many before it have the same key."""
        found = np.empty(len(self.order), np.int64)
        found[self.order] = np.arange(len(self.order)) - self.first
        return found


def grouped(key: Longs) -> Grouped:
    order = stable_order(key)
    return Grouped(order, first_equal(key[order]))


def running_sum(key: Longs, value: Longs) -> Longs:
    """For each entry the sum of `value` over the entries before it with the same key."""
    return grouped(key).sums(value)


def sorted_sum(sorted_key: Longs, value: Longs) -> Longs:
    """As `running_sum`, where equal keys follow each other."""
    before = value.cumsum() - value
    return before - before[first_equal(sorted_key)]


def running_count(key: Longs) -> Longs:
    """For each entry how many before it have the same key."""
    return grouped(key).counts()


def sorted_count(sorted_key: Longs) -> Longs:
    """As `running_count`, where equal keys follow each other."""
    return np.arange(len(sorted_key)) - first_equal(sorted_key)


def stable_order(key: Longs) -> Longs:
    """The order of `key`, equal ones as they stand. Ranks and copies, a small range, are sorted in linear time."""
    if len(key) < FEW:
        return key.argsort(kind="stable")
    if bool((key[1:] >= key[:-1]).all()):
        return np.arange(len(key))
    low = key.min()
    if key.max() - low < 2**16:
        # numpy sorts 16 bits by radix.
        return np.argsort((key - low).astype(np.uint16), kind="stable")
    return np.argsort(key, kind="stable")


def first_like(key: Longs) -> Longs:
    """For each entry the index of the first that equals it."""
    order = stable_order(key)
    found = np.empty(len(key), np.int64)
    found[order] = order[first_equal(key[order])]
    return found


def first_equal(sorted_key: Longs) -> Longs:
    """As `first_like`, of a sorted array."""
    here = np.arange(len(sorted_key))
    here[1:][sorted_key[1:] == sorted_key[:-1]] = 0
    return np.maximum.accumulate(here)


def needs(document: Longs, position: Longs, mask: Mask) -> Needs:
    """Every pair of a key/value shard and a query shard of the same document that the mask lets see it.

    `document` names each shard's document, `position` is its place there (0, 1, ... without a gap); both (n,).
    """
    order = np.lexsort((position, document))
    names = document[order]
    first = first_equal(names)
    here = np.arange(len(order))
    last = first + np.bincount(first, minlength=len(order))[first]
    begin = here if mask is Mask.CAUSAL else first
    count = last - begin
    key = here.repeat(count)
    query = np.arange(len(key)) + (begin - (count.cumsum() - count)).repeat(count)
    keys, queries = order[key], order[query]
    by_key = np.lexsort((query, keys))
    return Needs(keys[by_key], queries[by_key], position[keys][by_key])


def query_routes(shards: Shards, dest: Longs) -> Routes:
    """Routes of shards to `dest` (n, copies), NOWHERE where there is none; packed at each destination in global order
    of shard and copy. The same destination twice is two copies.
    """
    sent = dest >= 0
    (shard, copy), to = sent.nonzero(), dest[sent]
    length, arriving = shards.length[shard], grouped(to)
    return Routes(
        shards.num_ranks,
        shards.rank[shard],
        shards.row[shard],
        to,
        arriving.sums(length),
        length,
        shard,
        copy,
        arriving.counts(),
    )


def key_routes(
    shards: Shards, pairs: Needs, query_dest: Longs, context: Longs, document: Longs, sharing: Sharing
) -> tuple[Routes, KeyStretches]:
    """Routes of key/value shards to the ranks of the queries that need them, and where each query finds its own.

    `query_dest` (n,) is where each query shard goes, `context` (n,) the rows of its document before each shard. On a
    destination the stretches lie in global order of the queries that open them, each in document order, without gaps.
    """
    sent = query_dest[pairs.query] >= 0
    key, query, position = pairs.key[sent], pairs.query[sent], pairs.position[sent]
    length = totals(query, shards.length[key], shards.num)
    shards_needed = np.bincount(query, minlength=shards.num)
    open_by = _openers(query_dest, document, shards.num_ranks, sharing)
    opened = (open_by == np.arange(shards.num)).nonzero()[0]  # a query in each stretch, the first in global order
    opening = grouped(query_dest[opened])
    stretch_length, stretch_shards = np.zeros(shards.num, np.int64), np.zeros(shards.num, np.int64)
    asks = (query_dest >= 0).nonzero()[0]
    np.maximum.at(stretch_length, open_by[asks], length[asks])
    np.maximum.at(stretch_shards, open_by[asks], shards_needed[asks])
    row, place = np.full(shards.num, NOWHERE, np.int64), np.zeros(shards.num, np.int64)
    row[opened], place[opened] = opening.sums(stretch_length[opened]), opening.sums(stretch_shards[opened])
    if sharing is Sharing.RANK:
        first = first_like(key * shards.num + open_by[query])
        once = (first == np.arange(len(first))).nonzero()[0]
        key, query, position = key[once], query[once], position[once]
    opener = open_by[query]
    routes = Routes(
        shards.num_ranks,
        shards.rank[key],
        shards.row[key],
        query_dest[query],
        row[opener] + context[key],
        shards.length[key],
        key,
        _copies(pairs, sent, key, sharing),
        place[opener] + position,
    )
    row[asks] = row[open_by[asks]]
    return routes, KeyStretches(row, length, shards_needed)


def _openers(query_dest: Longs, document: Longs, num_ranks: int, sharing: Sharing) -> Longs:
    """(n,): the first query of the stretch in which a query's keys lie; NOWHERE for a query that is not sent."""
    everyone = np.arange(len(query_dest))
    opener = np.where(query_dest >= 0, everyone, NOWHERE)
    if sharing is Sharing.QUERY or not len(opener):
        return opener
    asks = (query_dest >= 0).nonzero()[0]
    opener[asks] = asks[first_like(document[asks] * num_ranks + query_dest[asks])]
    return opener


def _copies(pairs: Needs, sent: NDArray[np.bool_], key: Longs, sharing: Sharing) -> Longs:
    """Which copy of its shard a route carries. Once per query a query that stays has a slot all the same."""
    if sharing is Sharing.RANK:
        return sorted_count(key)
    return sorted_count(pairs.key)[sent]


def back(routes: Routes, shards: Shards) -> Routes:
    """The way back: to where a run came from, one whole tensor of the source rank per copy, copy after copy.

    Runs are in the order in which they lie on their ranks.
    """
    arrived = np.bincount(routes.dest, minlength=routes.num_ranks)
    order = np.empty(routes.num, np.int64)
    order[(arrived.cumsum() - arrived)[routes.dest] + routes.place] = np.arange(routes.num)
    dest = routes.source[order]
    dest_row = routes.copy[order] * shards.rows[dest] + routes.source_row[order]
    # Runs stand by shard: an order by copy is, of each rank, one by copy and shard, that of the rows there.
    by_copy, place = np.lexsort((routes.copy, routes.source)), np.empty(routes.num, np.int64)
    place[by_copy] = sorted_count(routes.source[by_copy])
    return Routes(
        routes.num_ranks,
        routes.dest[order],
        routes.dest_row[order],
        dest,
        dest_row,
        routes.length[order],
        routes.shard[order],
        routes.copy[order],
        place[order],
    )
