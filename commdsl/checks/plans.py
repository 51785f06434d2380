"""C604, C608 and C609: a dispatch plan fits in memory: its tensors, its routes, the copies and capacities it names.

Assumes a resolved plan and, for the laws on routes, those that `plans.routing` made of it. Does not prove the routes;
`routes` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.ir.plans import DispatchPlan, Routing
from commdsl.ir.routes import Longs, Mask, Routes, Sharing
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.source import Span

MOST_ROWS = 2**31 - 1
"""Rows are counted in 32 bits at run time."""

MOST_NEEDS = 2**24
"""Pairs of a query shard and a key/value shard that a proof holds in memory."""


def too_large(plan: DispatchPlan) -> Iterator[Diagnostic]:
    """C604: the tensor of a rank has a number of rows that 32 bits hold, and the pairs of shards fit in memory."""
    end = plan.shards.row + plan.shards.length
    over = (end > MOST_ROWS).nonzero()[0]
    if len(over):
        shard = int(over[0])
        yield Diagnostic(
            "C604",
            f"a rank has at most {MOST_ROWS} tokens",
            Label(piece_span(plan, shard), f"{name_of(plan, shard)} ends at token {end[shard]} of its rank"),
        )
    if plan.mask is None:
        return
    count = np.bincount(plan.document)
    pairs = count * (count + 1) // 2 if plan.mask is Mask.CAUSAL else count * count
    if int(pairs.sum()) > MOST_NEEDS:
        worst = int(np.flatnonzero(plan.document == int(pairs.argmax()))[0])
        yield Diagnostic(
            "C604",
            f"at most {MOST_NEEDS} pairs of a query shard and a key shard",
            Label(piece_span(plan, worst), f"this document has {count.max()} shards, {pairs.max()} pairs"),
            notes=(f"all documents have {pairs.sum()}",),
            help="cut documents into fewer shards",
        )


def too_many_copies(plan: DispatchPlan, routes: Routing) -> Iterator[Diagnostic]:
    """C608: no shard has more copies than `copies` says."""
    if plan.copies is None:
        return
    needed = copies_of(plan, routes)
    worst = int(needed.argmax()) if len(needed) else 0
    if len(needed) and int(needed[worst]) > plan.copies:
        kind = "the rows" if plan.mask is None else "the keys and values"
        help = f"write `copies {needed[worst]}`"
        if plan.mask is not None and plan.sharing is Sharing.QUERY:
            help += ", or `send once per rank`"
        yield Diagnostic(
            "C608",
            f"`copies {plan.copies}` is too few",
            Label(piece_span(plan, worst), f"{kind} of {name_of(plan, worst)} need {needed[worst]}"),
            help=help,
        )


def copies_of(plan: DispatchPlan, routes: Routing) -> Longs:
    """(n,): the replica slots that each shard needs; a query that stays has one all the same."""
    if plan.mask is None or routes.keys is None:
        return np.asarray((plan.dest >= 0).sum(axis=1), np.int64)
    if plan.sharing is Sharing.RANK:
        return np.bincount(routes.keys.shard, minlength=plan.shards.num)
    count = np.bincount(plan.document, minlength=1)[plan.document] if plan.shards.num else plan.document
    return count - plan.position if plan.mask is Mask.CAUSAL else count


def over_capacity(plan: DispatchPlan, routes: Routing) -> Iterator[Diagnostic]:
    """C609: no rank receives more rows than its capacity, or than 32 bits hold."""
    yield from _over(plan, routes.queries, plan.query_capacity, "queries")
    if routes.keys is not None:
        yield from _over(plan, routes.keys, plan.key_capacity, "keys")


def _over(plan: DispatchPlan, routes: Routes, said: int | None, of: str) -> Iterator[Diagnostic]:
    capacity = MOST_ROWS if said is None else said
    received = routes.received
    rank = int(received.argmax())
    if received[rank] <= capacity:
        return
    here = np.flatnonzero((routes.dest == rank) & (routes.dest_row + routes.length > capacity))
    first = int(here[routes.dest_row[here].argmin()])
    shard = int(routes.shard[first])
    last = routes.dest_row[first] + routes.length[first]
    become = f"rows {routes.dest_row[first]} ..< {last} of rank {rank}"
    name = name_of(plan, shard)
    what = f"{name} becomes {become}" if of == "queries" else f"the keys of {name} become {become}"
    yield Diagnostic(
        "C609",
        f"rank {rank} receives {received[rank]} {of}, its capacity is {capacity}",
        Label(piece_span(plan, shard), what),
        help=f"write `capacity {received[rank]} {of}`, or send some elsewhere" if said is not None else "",
    )


def piece_span(plan: DispatchPlan, shard: int) -> Span:
    """Where a shard was written."""
    return plan.spans[int(plan.piece[shard])]


def name_of(plan: DispatchPlan, shard: int) -> str:
    """A shard as a message names it."""
    piece = plan.pieces[int(plan.piece[shard])]
    document = f"`{piece.name}`" if piece.name else "this document"
    which = f"shard {shard - piece.first_shard} of {document}" if piece.num_shards > 1 else document
    return f"{which} on rank {plan.shards.rank[shard]}"
