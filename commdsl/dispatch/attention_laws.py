"""Turns an `AttentionLayout` and the routes under it into nothing, or into a `MetadataError` with the place.

Assumes routes that tile their destinations. Does not know documents: that every query sees a prefix of its own (or all
of it) follows from laws about shards, since the document is what its queries agree on. Shards without rows, which
nobody can see, are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, assert_never

import numpy as np

from commdsl.checks.route_laws import in_order
from commdsl.dispatch import layout
from commdsl.dispatch.errors import MetadataError
from commdsl.dispatch.form import refuse
from commdsl.dispatch.metadata import AttentionLayout
from commdsl.ir.routes import NOWHERE, Longs, Mask, Routes, Shards


@dataclass(frozen=True, eq=False)
class _Runs:
    """m runs of keys with rows, by destination and row there; the rows of all ranks are counted through."""

    route: Longs  # (m,): which route
    shard: Longs  # (m,)
    begin: Longs  # (m + 1,): the first row of each; the last entry is where all end
    base: Longs  # (W + 1,): the first row of each rank


@dataclass(frozen=True, eq=False)
class _Seen:
    """n query shards that were sent, and the keys that each sees: runs first ..< last, rows begin ..< end."""

    rank: Longs  # (n,): where the query is
    slot: Longs  # (n,): its number there
    shard: Longs  # (n,)
    begin: Longs
    end: Longs
    first: Longs
    last: Longs


def judge(attention: AttentionLayout, queries: Routes, keys: Routes, shards: Shards, mask: Mask | None) -> None:
    """Raises MetadataError unless `attention` is a layout of `queries` and `keys` that the mask allows."""
    key_length = _sizes(attention, queries)
    runs = _runs(keys)
    seen = _seen(attention, key_length, queries, runs)
    _own(seen, runs, shards, mask)
    _one_order(seen, runs, keys, shards, mask)


def _sizes(attention: AttentionLayout, queries: Routes) -> Longs:
    """(W, R): the keys of each slot; raises MetadataError for all that does not depend on which keys they are."""
    ranks, wide = queries.num_ranks, attention.cu_seqlens_q.shape[-1]
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "kv_begin"), (ranks, wide))
    shapes |= dict.fromkeys(("max_seqlen_q", "max_seqlen_kv", "num_local_seqs_recv"), (ranks,))
    given = {}
    for name, shape in shapes.items():
        table = given[name] = layout.longs(getattr(attention, name), f"attention.{name}")
        if table.shape != shape:
            law = "the tables are of one shape"
            raise MetadataError(law, field=f"attention.{name}", expected=shape, got=table.shape)
    none = np.zeros_like(queries.length)
    expected = layout.attention(ranks, queries.dest, queries.place, queries.length, none, None)
    num = expected.num_local_seqs_recv.numpy()
    if wide < num.max(initial=0):
        law = "every query shard that a rank receives has its place"
        raise MetadataError(law, field="attention.cu_seqlens_q", expected=f"{num.max()} columns or more", got=wide)
    _equal(given, "num_local_seqs_recv", num, "a rank receives the query shards sent to it")
    sums = np.zeros((ranks, wide), np.int64)
    sums[:, : expected.cu_seqlens_q.shape[1]] = expected.cu_seqlens_q.numpy()
    sums[:, expected.cu_seqlens_q.shape[1] :] = sums.max(axis=1, initial=0)[:, None]
    _equal(given, "cu_seqlens_q", sums, "query shards lie one after another in the order received")
    _equal(given, "max_seqlen_q", expected.max_seqlen_q.numpy(), "it is the longest query shard")
    length = np.diff(given["cu_seqlens_kv"], axis=1, prepend=0)
    padding = np.arange(wide) >= num[:, None]
    refuse(length < 0, length, "attention.cu_seqlens_kv", "no less than before", "sums do not fall")
    refuse(padding & (length != 0), length, "attention.cu_seqlens_kv", 0, "padding adds nothing to the sum")
    refuse(padding & (given["kv_begin"] != 0), given["kv_begin"], "attention.kv_begin", 0, "padding is zero")
    _equal(given, "max_seqlen_kv", length.max(axis=1, initial=0), "it is the most keys that a query shard sees")
    return length


def _equal(given: dict[str, Longs], name: str, expected: Longs, law: str) -> None:
    refuse(given[name] != expected, given[name], f"attention.{name}", expected, law)


def _runs(keys: Routes) -> _Runs:
    real = np.flatnonzero(keys.length > 0)
    real = real[in_order(keys.dest[real], keys.dest_row[real], keys.length[real])]
    base = np.concatenate([[0], np.cumsum(keys.counts.sum(axis=1))])
    # The routes tile: every run begins where the one before it ends, on the next rank where that one was the last.
    begin = np.concatenate([[0], np.cumsum(keys.length[real])])
    return _Runs(real, keys.shard[real], begin, base)


def _seen(attention: AttentionLayout, key_length: Longs, queries: Routes, runs: _Runs) -> _Seen:
    """What each query sees; raises MetadataError unless it begins and ends where a shard does, on its own rank."""
    order = np.lexsort((queries.place, queries.dest))
    rank, slot, shard = queries.dest[order], queries.place[order], queries.shard[order]
    here = layout.longs(attention.kv_begin, "attention.kv_begin")[rank, slot]
    length = key_length[rank, slot]
    begin, end = runs.base[rank] + here, runs.base[rank] + here + length
    first, last = np.searchsorted(runs.begin, begin), np.searchsorted(runs.begin, end)
    found = _Seen(rank, slot, shard, begin, end, first, last)
    inside = (here >= 0) & (begin <= runs.base[rank + 1])
    for at in np.flatnonzero((length > 0) & ~(inside & (_at(runs.begin, first) == begin)))[:1]:
        _refuse(found, at, "kv_begin", "the first row of a shard that the rank received", int(here[at]))
    inside = end <= runs.base[rank + 1]
    for at in np.flatnonzero((length > 0) & ~(inside & (_at(runs.begin, last) == end)))[:1]:
        _refuse(found, at, "cu_seqlens_kv", "keys up to the end of a shard that the rank received", int(length[at]))
    return found


def _own(seen: _Seen, runs: _Runs, shards: Shards, mask: Mask | None) -> None:
    """Raises MetadataError unless every query with rows sees its own keys, and under CAUSAL none after them."""
    many = len(runs.shard) + 1
    by = np.argsort(runs.shard, kind="stable")
    ordered = runs.shard[by] * many + by
    at = np.searchsorted(ordered, seen.shard * many + seen.first)
    run = np.where(at < len(by), by[np.minimum(at, len(by) - 1)], NOWHERE) if len(by) else np.full_like(at, NOWHERE)
    rows = shards.length[seen.shard] > 0
    own = (run >= 0) & (run < seen.last) & (_at(runs.shard, run) == seen.shard)
    for place in np.flatnonzero(rows & ~own)[:1]:
        got = int(seen.end[place] - seen.begin[place])
        _refuse(seen, place, "cu_seqlens_kv", "keys with the query's own among them", got)
    if mask is Mask.CAUSAL:
        for place in np.flatnonzero(rows & (run != seen.last - 1))[:1]:
            expected = int(runs.begin[run[place] + 1] - seen.begin[place])
            _refuse(seen, place, "cu_seqlens_kv", expected, int(seen.end[place] - seen.begin[place]))


def _one_order(seen: _Seen, runs: _Runs, keys: Routes, shards: Shards, mask: Mask | None) -> None:
    """Raises MetadataError unless a shard has the same rows, and the same shard, before it wherever it is seen, every
    run is seen, and the queries of a document see as much of it as the mask says.
    """
    num = np.maximum(seen.last - seen.first, 0)
    which = np.repeat(np.arange(len(num)), num)
    run = seen.first[which] + np.arange(len(which)) - np.repeat(np.cumsum(num) - num, num)
    shard, before = runs.shard[run], runs.begin[run] - seen.begin[which]
    previous = np.where(run > seen.first[which], _at(runs.shard, run - 1), NOWHERE)
    _, first, same = np.unique(shard, return_index=True, return_inverse=True)
    for at in np.flatnonzero((before != before[first][same]) | (previous != previous[first][same]))[:1]:
        law = "the shards of a document follow each other in one order, for every query"
        _refuse_key(keys, runs.route[run[at]], shards, law)
    unseen = np.ones(len(runs.shard), np.bool_)
    unseen[run] = False
    for at in np.flatnonzero(unseen)[:1]:
        _refuse_key(keys, runs.route[at], shards, "some query sees every shard that arrives")
    if mask is None:
        return
    total = np.full(shards.num, NOWHERE, np.int64)  # what the query of a shard sees, where it was sent
    total[seen.shard] = seen.end - seen.begin
    match mask:
        case Mask.CAUSAL:
            expected = before + shards.length[shard]
        case Mask.FULL:
            expected = (seen.end - seen.begin)[which]
        case _:
            assert_never(mask)
    place = np.full(shards.num, NOWHERE, np.int64)
    place[seen.shard] = np.arange(len(seen.shard))
    for at in np.flatnonzero((total[shard] != NOWHERE) & (total[shard] != expected))[:1]:
        _refuse(seen, place[shard[at]], "cu_seqlens_kv", int(expected[at]), int(total[shard[at]]))


def _at(table: Longs, index: Longs) -> Longs:
    """`table[index]`, -1 where there is no such entry."""
    if not len(table):
        return np.full(len(index), NOWHERE, np.int64)
    return np.where((index >= 0) & (index < len(table)), table[np.clip(index, 0, len(table) - 1)], NOWHERE)


def _refuse(seen: _Seen, at: int, field: str, expected: object, got: int) -> NoReturn:
    """Raises MetadataError for what a query sees; numbers of cu_seqlens_kv are its own keys, not the sum."""
    raise MetadataError(
        "a query sees its document up to its own end, or all of it, in order",
        field=f"attention.{field}",
        rank=int(seen.rank[at]),
        shard=int(seen.slot[at]),
        expected=expected,
        got=got,
    )


def _refuse_key(keys: Routes, route: int, shards: Shards, law: str) -> NoReturn:
    raise MetadataError(
        law,
        field="fwd_k.dst_offset",
        rank=int(keys.source[route]),
        shard=int(shards.local[keys.shard[route]]),
        replica=int(keys.copy[route]),
        got=int(keys.dest_row[route]),
        expected="a place in its document",
    )
