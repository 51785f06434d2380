"""Turns routes into what is wrong with them: one function per law, each of which returns the offending rows.

Assumes arrays of one length per form. Does not trust `routes`, whose results it judges, nor say where in a file a shard
was written: `checks` and `dispatch.validate` do, each in its own words. Vectorised; a million runs take about a second.
"""

from __future__ import annotations

import numpy as np

from commdsl.ir.routes import (
    FEW,
    NOWHERE,
    KeyStretches,
    Longs,
    Mask,
    Needs,
    Routes,
    Shards,
    stable_order,
    totals,
)
from commdsl.language.records import dataclass


@dataclass(frozen=True, eq=False)
class Offences:
    """k rows that break a law, and by how much; empty where the law holds."""

    row: Longs  # (k,): rows of the form that was judged
    expected: Longs  # (k,)
    got: Longs  # (k,)

    def __len__(self) -> int:
        return len(self.row)


NONE = Offences(*(np.empty(0, np.int64) for _ in range(3)))
"""The law holds."""


def out_of_bounds(routes: Routes, shards: Shards) -> Offences:
    """Runs that begin before the tensor of their rank, or end after it: expected is the nearest legal first row."""
    last = shards.rows[routes.source] - routes.length
    return _differ(np.maximum(np.minimum(routes.source_row, last), 0), routes.source_row)


def not_its_shard(routes: Routes, shards: Shards) -> Offences:
    """Runs that do not carry the rows of their shard: expected and got are its first row, or else its length."""
    rows = shards.row[routes.shard], shards.length[routes.shard]
    elsewhere = (rows[0] != routes.source_row) | (shards.rank[routes.shard] != routes.source)
    wrong = (elsewhere | (rows[1] != routes.length)).nonzero()[0]
    if not len(wrong):
        return NONE
    expected = np.where(elsewhere, *rows)[wrong]
    return Offences(wrong, expected, np.where(elsewhere, routes.source_row, routes.length)[wrong])


def nobody(routes: Routes) -> Offences:
    """Runs to a rank that does not exist: expected is the nearest that does."""
    return _differ(np.maximum(np.minimum(routes.dest, routes.num_ranks - 1), 0), routes.dest)


def in_order(rank: Longs, row: Longs, length: Longs) -> Longs:
    """The order in which runs lie on their ranks; a run without rows before the one that begins where it lies."""
    if len(rank) < FEW:
        return np.lexsort((length > 0, row, rank))
    order = np.argsort(2 * row + (length > 0), kind="stable")
    return order[stable_order(rank[order])]


def landed(routes: Routes) -> Longs:
    """The order in which runs lie on their destinations, as `in_order`; those at one row as they are numbered."""
    return np.lexsort((routes.place, routes.length > 0, routes.dest_row, routes.dest))


def not_tiling(routes: Routes, order: Longs) -> Offences:
    """Runs, `landed` in that order, that do not begin where the one before them on their destination ends: a gap or an
    overlap.
    """
    return _differ(_following(order, routes.dest, routes.dest_row + routes.length), routes.dest_row)


def not_placed(routes: Routes, order: Longs) -> Offences:
    """Runs whose number among those that arrive at their destination is not their place by first row."""
    return _differ(_following(order, routes.dest, routes.place + 1), routes.place)


def _following(order: Longs, group: Longs, end: Longs) -> Longs:
    """Where each entry begins if it follows the one before it, in that order, of its group; the first begins at 0."""
    names, found = group[order], np.zeros(len(order), np.int64)
    found[order[1:]] = end[order[:-1]] * (names[1:] == names[:-1])
    return found


def not_returned(routes: Routes, order: Longs, returning: Routes, shards: Shards) -> Offences:
    """Runs, `landed` in that order, that the way back does not bring to where they came from, a whole tensor of the
    source per copy: rows of `routes`. Expected is the first row there, got the row reached; NOWHERE if nothing, or
    another rank, comes back.
    """
    real = routes.length > 0
    there, home = order[real[order]], in_order(returning.source, returning.source_row, returning.length)
    home = home[returning.length[home] > 0]
    both = min(len(there), len(home))
    a, b = there[:both], home[:both]
    same = (
        (routes.dest[a] == returning.source[b])
        & (routes.dest_row[a] == returning.source_row[b])
        & (routes.length[a] == returning.length[b])
        & (routes.source[a] == returning.dest[b])
    )
    expected = routes.copy * shards.rows[routes.source] + routes.source_row
    got = np.full(routes.num, NOWHERE, np.int64)
    got[a] = np.where(same, returning.dest_row[b], NOWHERE)
    wrong = (real & (got != expected)).nonzero()[0]
    return Offences(wrong, expected[wrong], got[wrong]) if len(wrong) else NONE


def wrong_context(length: Longs, document: Longs, position: Longs, context: Longs) -> Offences:
    """Shards whose context is not the rows of their document before them."""
    return _differ(_following(np.lexsort((position, document)), document, context + length), context)


def wrong_stretch(
    stretches: KeyStretches, length: Longs, document: Longs, context: Longs, query_dest: Longs, mask: Mask
) -> Offences:
    """Query shards whose stretch of keys has not the rows the mask demands: everything up to their end, or all."""
    seen = context + length if mask is Mask.CAUSAL else _whole(length, document)
    return _differ(np.where(query_dest >= 0, seen, 0), stretches.length)


def _whole(length: Longs, document: Longs) -> Longs:
    """By shard the rows of its document."""
    names, number = np.unique(document, return_inverse=True)
    return totals(number, length, len(names))[number]


@dataclass(frozen=True, eq=False)
class Asked:
    """What queries that are sent need, and what is sent: equal numbers for the same shard at the same row of a rank."""

    pair: Longs  # (k,): rows of the needs
    dest: Longs  # (k,)
    row: Longs  # (k,): where the key must begin
    wanted: Longs  # (k,): numbers
    sent: Longs  # (m,): numbers of the runs


def asked(keys: Routes, stretches: KeyStretches, pairs: Needs, query_dest: Longs, context: Longs) -> Asked:
    """A key/value shard must lie in the stretch of a query that needs it, as many rows after its first as its document
    has before the shard.
    """
    pair = (query_dest[pairs.query] >= 0).nonzero()[0]
    query, key = pairs.query[pair], pairs.key[pair]
    dest, row = query_dest[query], stretches.row[query] + context[key]
    return Asked(pair, dest, row, *_numbered((dest, key, row), (keys.dest, keys.shard, keys.dest_row)))


def missing_keys(keys: Routes, pairs: Needs, found: Asked) -> tuple[Longs, Offences]:
    """Needs that no run satisfies. Returns the rows of `pairs`, and by query shard where the key should begin on the
    destination and where another copy of it begins there (NOWHERE: there is none).
    """
    wrong = _not_among(found.wanted, found.sent)
    if not len(wrong):
        return wrong, NONE
    pair, dest = found.pair[wrong], found.dest[wrong]
    got = np.full(len(wrong), NOWHERE, np.int64)
    near, others = _numbered((dest, pairs.key[pair]), (keys.dest, keys.shard))
    known, first = np.unique(others, return_index=True)
    at = np.searchsorted(known, near)
    there = np.isin(near, known).nonzero()[0]
    got[there] = keys.dest_row[first[at[there]]]
    return pair, Offences(pairs.query[pair], found.row[wrong], got)


def unasked_keys(found: Asked) -> Longs:
    """Runs of keys that no query needs where they lie: rows of `keys`. With `missing_keys` empty and the runs tiling,
    every stretch is its queries' document prefix and nothing else travels.
    """
    return _not_among(found.sent, found.wanted)


def _not_among(numbers: Longs, others: Longs) -> Longs:
    """The entries that are none of the others, of numbers that `_numbered` gave to both."""
    new = np.ones(len(numbers) + len(others), np.bool_)
    new[others] = False
    return new[numbers].nonzero()[0]


def _numbered(left: tuple[Longs, ...], right: tuple[Longs, ...]) -> tuple[Longs, Longs]:
    """A number for every row of two tables, the same for equal rows. Sorts, so no product of columns can overflow."""
    columns = [np.concatenate(pair) for pair in zip(left, right, strict=True)]
    order = np.lexsort(columns[::-1])
    new = np.zeros(len(order), np.bool_)
    for column in columns:
        ordered = column[order]
        new[1:] |= ordered[1:] != ordered[:-1]
    number = np.empty(len(order), np.int64)
    number[order] = new.cumsum()
    return number[: len(left[0])], number[len(left[0]) :]


def _differ(expected: Longs, got: Longs) -> Offences:
    wrong = (expected != got).nonzero()[0]
    return Offences(wrong, expected[wrong], got[wrong]) if len(wrong) else NONE
