"""Turns document lengths into a packing, where every token lies before a dispatch, and a packing with cuts into a plan.

Assumes lengths in tokens. Packs as trainers do: consecutive documents, as many tokens on one rank as on any other.
Does not balance attention; `planner` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import NOWHERE, Longs, Mask, Shards, Sharing, running_count, running_sum, totals
from commdsl.language.source import Source, Span
from commdsl.machine.topology import NO_LINK, Topology, link_of

NOT_WRITTEN = Span(Source("planner", ""), 0, 0)
"""Where a plan stands that no text declares."""


class PackingError(ValueError):
    """Lengths or ranks that no packing can have; says which document, and what is expected."""


@dataclass(frozen=True, eq=False)
class Packing:
    """m parts of documents in global order: by rank, then as they lie there. A document's parts follow each other."""

    num_ranks: int
    rank: Longs  # (m,), never decreasing
    document: Longs  # (m,), numbered by first appearance
    begin: Longs  # (m,): tokens of the document before the part
    length: Longs  # (m,)
    names: tuple[str, ...]  # of each document, "" where it needs none

    @property
    def num_documents(self) -> int:
        return len(self.names)

    @cached_property
    def document_length(self) -> Longs:
        """(num_documents,)."""
        return totals(self.document, self.length, self.num_documents)

    @cached_property
    def num_parts(self) -> Longs:
        """(num_documents,): on so many ranks, or in so many places, a document lies."""
        return np.bincount(self.document, minlength=self.num_documents).astype(np.int64)


def packing(num_ranks: int, rank: Longs, given: Longs, length: Longs, *, name_all: bool = False) -> Packing:
    """A packing of parts in global order; `given` is the caller's number of each part's document.

    A document in several parts is named after its number, and every one if `name_all`.
    """
    _, first, which = np.unique(given, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    document = number[which]
    parts = np.bincount(document, minlength=len(order))
    numbers = given[first[order]].tolist()
    named = (parts > 1) | name_all
    names = tuple(f"d{mine}" if has else "" for mine, has in zip(numbers, named.tolist(), strict=True))
    return Packing(num_ranks, rank, document, running_sum(document, length), length, names)


def place(lengths: Sequence[Sequence[int]]) -> Packing:
    """The documents of each rank, as given. Raises PackingError for a negative length."""
    flat = np.array([length for mine in lengths for length in mine], np.int64)
    rank = np.arange(len(lengths)).repeat([len(mine) for mine in lengths])
    _refuse(flat, 0)
    return Packing(len(lengths), rank, np.arange(len(flat)), np.zeros_like(flat), flat, ("",) * len(flat))


def pack(lengths: Longs, topology: Topology, shortest: int, *, relay: bool = False) -> Packing:
    """Consecutive documents, cut where a rank is full: each within 2 * `shortest` tokens of its share.

    No part is shorter than `shortest` unless its document is. A document never lies on two ranks without a link: where
    a topology does not link all ranks, whole documents go to nodes (or ranks), tokens and attention even among those;
    unless `relay`, by which ranks without a link reach each other all the same.
    Raises PackingError for a length below 1.
    """
    _refuse(lengths, 1)
    islands = 1 if relay else _islands(topology)
    size = topology.num_ranks // islands
    if islands == 1:
        rank, given, length = _fill(np.arange(len(lengths)), lengths, size, shortest)
        return packing(size, rank, given, length)
    parts = [
        (island * size + rank, given, length)
        for island, mine in enumerate(_share(lengths, islands))
        for rank, given, length in (_fill(mine, lengths[mine], size, shortest),)
    ]
    rank, given, length = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    return packing(topology.num_ranks, rank, given, length, name_all=True)


def _refuse(lengths: Longs, least: int) -> None:
    for index in (lengths < least).nonzero()[0][:1].tolist():
        raise PackingError(f"document {index} has {lengths[index]} tokens, expected at least {least}")


def _linked(topology: Topology) -> NDArray[np.bool_]:
    """(num_ranks, num_ranks): whether rank r sends to rank s directly, or is it, at [r, s]."""
    ranks = np.arange(topology.num_ranks)
    has: NDArray[np.bool_] = link_of(topology, ranks[:, None], ranks[None, :]) != NO_LINK
    np.fill_diagonal(has, True)
    return has


def _islands(topology: Topology) -> int:
    """In how many equal runs of ranks every rank has a link to every other: 1, a run per node, or one per rank."""
    links = _linked(topology)
    nodes, gpus = topology.num_nodes, topology.gpus_per_node
    if links.all():
        return 1
    inside = links.reshape(nodes, gpus, nodes, gpus)[np.arange(nodes), :, np.arange(nodes), :]
    return nodes if inside.all() else topology.num_ranks


def _share(lengths: Longs, islands: int) -> list[Longs]:
    """The documents of each island, in the order given. The longest first to where attention is least, of those that
    still have fewer tokens than their share: what cannot cross between islands later is even from the beginning.
    """
    share = -(-int(lengths.sum()) // islands)
    tokens, pairs = np.zeros(islands, np.int64), np.zeros(islands)
    home = np.empty(len(lengths), np.int64)
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        has_room = tokens + length <= share
        island = int(np.where(has_room, pairs, np.inf).argmin()) if has_room.any() else int(tokens.argmin())
        tokens[island] += length
        pairs[island] += length * length
        home[index] = island
    return [np.flatnonzero(home == island) for island in range(islands)]


def _fill(given: Longs, lengths: Longs, ranks: int, shortest: int) -> tuple[Longs, Longs, Longs]:
    """Rank, document and length of the parts of documents laid end to end over ranks."""
    end = np.cumsum(lengths)
    total = int(end[-1]) if len(end) else 0
    cut = total * np.arange(1, ranks, dtype=np.int64) // ranks
    inside = np.minimum(np.searchsorted(end, cut, side="right"), max(len(end) - 1, 0))
    if len(end) and len(cut):
        before, after = cut - (end[inside] - lengths[inside]), end[inside] - cut
        to_end = np.where(before <= after, -before, after)
        to_grid = -(before % shortest)  # so that two cuts of one document leave no short part between them
        cut = cut + np.where(np.minimum(before, after) < shortest, to_end, to_grid)
    edges = np.unique(np.concatenate((end, cut, [0])))
    begin, length = edges[:-1], np.diff(edges)
    return (
        np.searchsorted(cut, begin, side="right").astype(np.int64),
        given[np.searchsorted(end, begin, "right")],
        length,
    )


def packing_of(plan: DispatchPlan) -> Packing:
    """Where a plan's documents lie before it is carried out."""
    first = np.array([piece.first_shard for piece in plan.pieces], np.int64)
    document = np.array([piece.document for piece in plan.pieces], np.int64)
    length = totals(plan.piece, plan.shards.length, len(plan.pieces))
    return Packing(
        plan.num_ranks,
        plan.shards.rank[first],
        document,
        running_sum(document, length),
        length,
        plan.names,
    )


@dataclass(frozen=True, eq=False)
class Cuts:
    """k shards: tokens [low, high) of the document of a part go to `dest`; in any order, together all of every part."""

    part: Longs
    low: Longs
    high: Longs
    dest: Longs


def whole(home: Packing) -> Cuts:
    """Every part stays, in one shard."""
    return Cuts(np.arange(len(home.rank)), home.begin, home.begin + home.length, home.rank)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a plan says beside its documents."""

    name: str
    mask: Mask = Mask.CAUSAL
    query_capacity: int | None = None  # rows
    key_capacity: int | None = None  # rows
    sharing: Sharing = Sharing.RANK


def to_plan(home: Packing, cuts: Cuts, terms: Terms) -> DispatchPlan:
    """The plan of a packing and its cuts; neighbours that go to one rank become one shard."""
    order = np.lexsort((cuts.high, cuts.low, cuts.part))
    part, low, high, dest = cuts.part[order], cuts.low[order], cuts.high[order], cuts.dest[order]
    opens = np.ones(len(part), bool)
    opens[1:] = (part[1:] != part[:-1]) | (dest[1:] != dest[:-1])
    closes = np.concatenate((opens[1:], opens[:1]))  # the last as the first, which opens
    part, low, high, dest = part[opens], low[opens], high[closes], dest[opens]
    document = home.document[part]
    return DispatchPlan(
        name=terms.name,
        num_ranks=home.num_ranks,
        shards=Shards(home.num_ranks, home.rank[part], high - low),
        document=document,
        position=running_count(document),
        context=low,
        dest=dest[:, None],
        mask=terms.mask,
        sharing=terms.sharing,
        copies=None,
        query_capacity=terms.query_capacity,
        key_capacity=terms.key_capacity,
        names=home.names,
        piece=part,
        spans=(NOT_WRITTEN,) * len(home.rank),
        span=NOT_WRITTEN,
    )


def at_home(plan: DispatchPlan) -> DispatchPlan:
    """The same documents and terms with every shard on the rank where it lies; what is sent nowhere stays unsent."""
    sent = plan.dest[:, :1] >= 0
    return replace(plan, dest=np.where(sent, plan.shards.rank[:, None], NOWHERE))
