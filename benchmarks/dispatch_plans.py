"""Turns a number of rows and the length of a shard into a plan, its traffic, and where every row comes from.

Assumes numpy and `commdsl.ir.plans`. A case is balanced: each rank sends every rank equally many shards, in random
order, so that a time is the links' and not that of one crowded port. Does not import torch, so all of it is tested
without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.plans import DispatchPlan, Routing, routing
from commdsl.ir.routes import NOWHERE, Mask, Routes, Shards, Sharing
from commdsl.language.source import Source, Span

Longs: TypeAlias = NDArray[np.int64]

ROWS = (1 << 10, 4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10)
SHARDS = (128, 1)
QUERY_BYTES, KEY_BYTES = 2 * 4096, 2 * 1024  # bfloat16: 4096 of queries, 1024 of keys and values together
CALLS = 12
"""Calls in a CUDA graph, of every contender at every size. Each keeps its results, so that more would not fit."""


@dataclass(frozen=True)
class Case:
    """`rows` rows a rank in shards of `shard` rows; documents of `document` shards, whose last needs all their keys."""

    rows: int
    shard: int
    ranks: int
    document: int = 1

    @property
    def calls(self) -> int:
        return CALLS

    @property
    def sent_bytes(self) -> int:
        """What the busiest port carries."""
        return self.traffic.port_bytes

    @cached_property
    def plan(self) -> DispatchPlan:
        return plan(self)

    @cached_property
    def routing(self) -> Routing:
        return routing(self.plan)

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic.of(self.routing)


def plan(case: Case) -> DispatchPlan:
    """The same on every rank: the dice are thrown by the case."""
    per_rank = -(-case.rows // case.shard)
    num = per_rank * case.ranks
    length = np.full(num, case.shard, np.int64)
    length[per_rank - 1 :: per_rank] = case.rows - (per_rank - 1) * case.shard
    rank = np.repeat(np.arange(case.ranks), per_rank)
    local = np.arange(num) - rank * per_rank
    dice = np.random.default_rng((case.rows, case.shard, case.ranks))
    equal = (np.arange(per_rank) + np.arange(case.ranks)[:, None]) % case.ranks  # the remainder goes elsewhere by rank
    home = dice.permuted(equal, axis=1).reshape(-1)
    position = local % case.document
    here = Span(Source("benchmark", ""), 0, 0)
    return DispatchPlan(
        name="benchmark",
        num_ranks=case.ranks,
        shards=Shards(case.ranks, rank, length),
        document=rank * per_rank + local // case.document,
        position=position,
        context=position * case.shard,
        dest=home[:, None],
        mask=Mask.CAUSAL,
        sharing=Sharing.QUERY,
        copies=None,
        query_capacity=None,
        key_capacity=None,
        names=("",) * num,
        piece=np.zeros(num, np.int64),
        spans=(here,),
        span=here,
    )


@dataclass(frozen=True, eq=False)
class Traffic:
    """Bytes from each rank to each, at [source, destination]."""

    sent: Longs  # (ranks, ranks)

    @staticmethod
    def of(found: Routing) -> Traffic:
        assert found.keys is not None
        return Traffic(QUERY_BYTES * found.queries.counts.T + KEY_BYTES * found.keys.counts.T)

    @property
    def port_bytes(self) -> int:
        """What the busiest port carries one way; what stays on a rank does not cross a link."""
        crossing = self.sent * ~np.eye(len(self.sent), dtype=bool)
        return int(max(crossing.sum(axis=0).max(), crossing.sum(axis=1).max()))


# --- where rows come from ---------------------------------------------------------------------------------------------


def followed(routes: Routes, rows_in: Longs, rows_out: Longs) -> list[Longs]:
    """Per rank, (rows_out[rank],): which row each of its rows is, counted over all ranks' rows; NOWHERE for none."""
    base_in, base_out = np.cumsum(rows_in) - rows_in, np.cumsum(rows_out) - rows_out
    output = np.full(int(rows_out.sum()), NOWHERE, np.int64)
    within = np.arange(int(routes.length.sum())) - np.repeat(np.cumsum(routes.length) - routes.length, routes.length)
    first = base_in[routes.source] + routes.source_row
    to = base_out[routes.dest] + routes.dest_row
    output[np.repeat(to, routes.length) + within] = np.repeat(first, routes.length) + within
    return np.split(output, np.cumsum(rows_out)[:-1])


@dataclass(frozen=True, eq=False)
class Sorted:
    """What `all_to_all_single` needs of one tensor on one rank, both ways."""

    rows: Longs  # this rank's rows by destination, as they lie there
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    arriving: Longs  # of all ranks' rows those that arrive, by source

    @staticmethod
    def of(routes: Routes, rows: Longs, rank: int) -> Sorted:
        received = routes.counts.sum(axis=1)
        maps = followed(routes, rows, received)
        base = int((np.cumsum(rows) - rows)[rank])
        leaving = [ids[(ids >= base) & (ids < base + rows[rank])] - base for ids in maps]
        return Sorted(
            np.concatenate(leaving),
            [len(ids) for ids in leaving],
            routes.counts[rank].tolist(),
            _by_source(maps[rank], rows),
        )


def _by_source(ids: Longs, rows: Longs) -> Longs:
    source = np.searchsorted(np.cumsum(rows), ids, side="right")
    return ids[np.argsort(source, kind="stable")]
