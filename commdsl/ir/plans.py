"""What a `plan` declaration means: its shards in global order, where each goes, and the routes that follow.

Assumes numbers that `resolve` found legal. Does not prove anything; `checks` does. All lengths are in rows (tokens).
"""

from __future__ import annotations

from dataclasses import field
from functools import cached_property

import numpy as np

from commdsl.ir.routes import (
    KeyStretches,
    Longs,
    Mask,
    Needs,
    Routes,
    Shards,
    Sharing,
    back,
    key_routes,
    needs,
    query_routes,
)
from commdsl.language.records import dataclass
from commdsl.language.source import Span


@dataclass(frozen=True, slots=True)
class Piece:
    """One `doc` as written: a document, or a part of a named one, on one rank. It has a shard at least."""

    document: int
    name: str  # "" for a document without a name
    first_shard: int  # of its shards, in global order, as the first
    num_shards: int
    span: Span = field(compare=False, repr=False)


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """n shards in global order. Without a mask rows are all there is; with one, keys and values follow the queries."""

    name: str
    num_ranks: int
    shards: Shards
    document: Longs  # (n,): which document a shard is of
    position: Longs  # (n,): its place there, from 0
    context: Longs  # (n,): rows of the document before it
    dest: Longs  # (n, most destinations): ranks, NOWHERE where there is none; one column where there is a mask
    mask: Mask | None
    sharing: Sharing
    copies: int | None  # the most copies of a shard, where the text says so
    query_capacity: int | None  # the most rows a rank may receive, where the text says so
    key_capacity: int | None
    names: tuple[str, ...]  # of each document, "" where it has none
    piece: Longs  # (n,): which of `pieces` a shard is of, never decreasing
    spans: tuple[Span, ...] = field(repr=False)  # of each of `pieces`
    span: Span = field(compare=False, repr=False)

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """What messages and texts are made of."""
        number = np.arange(len(self.spans))
        first, end = np.searchsorted(self.piece, number), np.searchsorted(self.piece, number, side="right")
        document = self.document[first].tolist()
        names = [self.names[one] for one in document]
        return tuple(map(Piece, document, names, first.tolist(), (end - first).tolist(), self.spans))

    @cached_property
    def needs(self) -> Needs:
        """Which query shards attend to which key/value shards, where there is a mask."""
        assert self.mask is not None
        return needs(self.document, self.position, self.mask)


@dataclass(frozen=True, eq=False)
class Routing:
    """Every route of a plan, there and back."""

    queries: Routes
    queries_back: Routes
    keys: Routes | None
    keys_back: Routes | None
    stretches: KeyStretches | None


def routing(plan: DispatchPlan) -> Routing:
    """What the plan's kernels do; keys and values where there is a mask."""
    queries = query_routes(plan.shards, plan.dest)
    there = back(queries, plan.shards)
    if plan.mask is None:
        return Routing(queries, there, None, None, None)
    home = plan.dest[:, 0]
    keys, stretches = key_routes(plan.shards, plan.needs, home, plan.context, plan.document, plan.sharing)
    return Routing(queries, there, keys, back(keys, plan.shards), stretches)
