"""Turns a seed into a random dispatch plan, and a plan into where every row comes from, by the simulation.

Assumes torch and `commdsl.dispatch`. The plans are legal in every way the language is: ranks that have nothing, ranks
that receive nothing, shards of no rows, documents that span ranks in any order, queries that stay at home. Does not
use a kernel, a group or a GPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from benchmarks.dispatch_plans import followed
from commdsl import dispatch
from commdsl.ir.plans import DispatchPlan, Piece, routing
from commdsl.ir.routes import NOWHERE, Longs, Mask, Shards, Sharing
from commdsl.language.source import Source, Span

NOT_WRITTEN = -1
"""In a map of rows: no row arrives here."""

Ids = torch.Tensor


# --- plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What a random plan is drawn from."""

    num_ranks: int
    most_rows: int  # of a rank
    most_shards: int = 6  # of a document, and so of a query's keys and a key's copies
    mask: Mask | None = Mask.CAUSAL
    sharing: Sharing = Sharing.QUERY
    stays: float = 0.1  # share of the query shards that are sent nowhere
    empty: float = 0.15  # share of the shards that have no rows, and of the ranks that have or get none
    spans: float = 0.4  # share of the documents that go on on the next rank
    is_full: bool = False  # every rank has `most_rows` rows
    is_fine: bool = False  # shards of 1/64 of the rows at most, everywhere equally likely: more runs than other plans


def random_plan(draw: Draw, seed: int) -> DispatchPlan:
    """The same plan for the same draw and seed, on every rank and machine."""
    dice = random.Random(f"{seed} {draw}")
    rank, document, length = _shards(draw, dice)
    position = _positions(document, dice)
    shards = Shards(draw.num_ranks, rank, length)
    return DispatchPlan(
        name=f"random_{seed}",
        num_ranks=draw.num_ranks,
        shards=shards,
        document=document,
        position=position,
        context=_context(document, position, length),
        dest=_destinations(draw, len(rank), dice)[:, None],
        mask=draw.mask,
        sharing=draw.sharing,
        copies=None,
        query_capacity=None,
        key_capacity=None,
        piece=np.arange(len(rank)),
        pieces=tuple(
            Piece(int(of), f"d{of}", at, 1, Span(Source("random", ""), 0, 0)) for at, of in enumerate(document)
        ),
        span=Span(Source("random", ""), 0, 0),
    )


def _shards(draw: Draw, dice: random.Random) -> tuple[Longs, Longs, Longs]:
    """The rank, the document and the length of every shard, in global order."""
    found: list[tuple[int, int, int]] = []
    document, shards_left = 0, dice.randint(1, draw.most_shards)
    for rank in range(draw.num_ranks):
        rows_left = draw.most_rows if draw.is_full or dice.random() > draw.empty else 0
        if rows_left and not draw.is_full:
            rows_left = dice.randint(1, draw.most_rows)
        while rows_left > 0:
            rows = 0 if dice.random() < draw.empty else dice.randint(1, rows_left)
            rows = min(rows, 1 + draw.most_rows // (64 if draw.is_fine else dice.choice((1, 2, 4, 16))))
            found.append((rank, document, rows))
            rows_left -= rows
            shards_left -= 1
            if not shards_left or (not rows_left and dice.random() > draw.spans):
                document, shards_left = document + 1, dice.randint(1, draw.most_shards)
    columns = np.array(found, np.int64).reshape(-1, 3)
    return columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy()


def _positions(document: Longs, dice: random.Random) -> Longs:
    """Places in the document: mostly in the order of the ranks, sometimes in any."""
    position = np.zeros(len(document), np.int64)
    for one in np.unique(document):
        members = np.flatnonzero(document == one)
        places = list(range(len(members)))
        if dice.random() < 0.3:
            dice.shuffle(places)
        position[members] = places
    return position


def _context(document: Longs, position: Longs, length: Longs) -> Longs:
    context = np.zeros(len(document), np.int64)
    for one in np.unique(document):
        members = np.flatnonzero(document == one)
        ordered = members[np.argsort(position[members])]
        context[ordered] = np.cumsum(length[ordered]) - length[ordered]
    return context


def _destinations(draw: Draw, num: int, dice: random.Random) -> Longs:
    """Every destination rank has a weight of its own, which may be none."""
    weights = [0.0 if dice.random() < draw.empty else dice.random() for _ in range(draw.num_ranks)]
    if not any(weights):
        weights[dice.randrange(draw.num_ranks)] = 1.0
    if draw.is_fine:
        weights = [1.0] * draw.num_ranks
    homes = dice.choices(range(draw.num_ranks), weights, k=num)
    return np.array([NOWHERE if dice.random() < draw.stays else home for home in homes], np.int64)


# --- where rows come from ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Traced:
    """Per rank, the row that each of its rows is: a number among all ranks' rows, rank after rank; or NOT_WRITTEN.

    Queries and keys on the way there are numbered among the rows that were sent; on the way back among those received.
    """

    rows: tuple[int, ...]  # of each rank's tensors
    queries: tuple[Ids, ...]  # (received,) each
    queries_back: tuple[Ids, ...]  # (rows,)
    keys: tuple[Ids, ...]  # (received,); none where the plan has no keys
    keys_back: tuple[Ids, ...]  # (copies, rows)

    def to(self, device: torch.device | str) -> Traced:
        moved = (
            tuple(ids.to(device) for ids in part)
            for part in (self.queries, self.queries_back, self.keys, self.keys_back)
        )
        return Traced(self.rows, *moved)


@dataclass(frozen=True, eq=False)
class Case:
    """A plan with its metadata."""

    plan: DispatchPlan

    @cached_property
    def metadata(self) -> Any:
        """(fwd_q, rev_q, fwd_k | None, rev_k | None, attention | None) of all ranks."""
        return dispatch.from_plan(self.plan)

    @cached_property
    def traced(self) -> Traced:
        return simulated(self.metadata, self.rows)

    @cached_property
    def rows(self) -> tuple[int, ...]:
        return tuple(self.plan.shards.rows.tolist())

    @property
    def copies(self) -> int:
        fwd_k = self.metadata[2]
        return 1 if fwd_k is None else int(fwd_k.dst_rank.shape[2])

    def received(self, part: int) -> tuple[int, ...]:
        """Rows that each rank receives of queries (0) or of keys (1)."""
        metadata = self.metadata[2 * part]
        return (0,) * len(self.rows) if metadata is None else tuple(metadata.num_recv_tokens[:, -1].tolist())


def cases(draws: Iterable[Draw], seed: int) -> list[Case]:
    return [Case(random_plan(draw, seed + at)) for at, draw in enumerate(draws)]


def varied(num_ranks: int, most_rows: int, count: int) -> list[Draw]:
    """Draws of every kind, in turn: both masks and none, both sharings, many copies, rows that all stay at home."""
    kinds: list[dict[str, Any]] = [
        {},
        {"sharing": Sharing.RANK},
        {"mask": Mask.FULL, "empty": 0.4},
        {"mask": Mask.FULL, "sharing": Sharing.RANK, "most_shards": 3},
        {"most_shards": 16, "spans": 0.9},
        {"most_shards": 1, "empty": 0.0},
        {"mask": None, "empty": 0.6, "stays": 0.5},
        {"stays": 0.0, "empty": 0.0, "sharing": Sharing.RANK, "most_shards": 12},
    ]
    return [Draw(num_ranks, most_rows, **kinds[at % len(kinds)]) for at in range(count)]


def limits(found: Sequence[Case], widths: tuple[int, ...]) -> Any:
    """The least limits under which all of these run."""
    return dispatch.Limits(
        rows=max(max(case.rows) for case in found),
        queries=max(max(case.received(0)) for case in found),
        keys=max(max(case.received(1)) for case in found),
        copies=max(case.copies for case in found),
        widths=widths,
    )


def simulated(metadata: Any, rows: Sequence[int]) -> Traced:
    """By `orchestrate_simulate`, on tensors whose rows are their own numbers."""
    fwd_q, rev_q, fwd_k, rev_k, _ = metadata
    received = fwd_q.num_recv_tokens[:, -1].tolist()
    queries = _moved(fwd_q, rows, received)
    queries_back = _moved(rev_q, received, rows)
    if fwd_k is None:
        return Traced(tuple(rows), queries, queries_back, (), ())
    copies = fwd_k.dst_rank.shape[2]
    received = fwd_k.num_recv_tokens[:, -1].tolist()
    keys = _moved(fwd_k, rows, received)
    back = _moved(rev_k, received, [copies * length for length in rows])
    keys_back = tuple(ids.view(copies, length) for ids, length in zip(back, rows, strict=True))
    return Traced(tuple(rows), queries, queries_back, keys, keys_back)


def _moved(metadata: Any, rows_in: Sequence[int], rows_out: Sequence[int]) -> tuple[Ids, ...]:
    tensor = torch.full((len(rows_in), max(rows_in), 1), NOT_WRITTEN)
    for rank, ids in enumerate(_numbers(rows_in)):
        tensor[rank, : len(ids), 0] = ids
    output = torch.full((len(rows_out), max(rows_out), 1), NOT_WRITTEN)
    dispatch.orchestrate_simulate(tensor, output, metadata)
    return tuple(output[rank, :length, 0].clone() for rank, length in enumerate(rows_out))


def _numbers(rows: Sequence[int]) -> list[Ids]:
    bounds = np.concatenate([[0], np.cumsum(np.array(rows, np.int64))]).tolist()
    return [torch.arange(bounds[rank], bounds[rank + 1]) for rank in range(len(rows))]


def routed(plan: DispatchPlan) -> Traced:
    """By the plan's routes, without Metadata: the second opinion on `simulated`."""
    found, rows = routing(plan), plan.shards.rows
    received = found.queries.counts.sum(axis=1)
    queries = _tensors(followed(found.queries, rows, received))
    queries_back = _tensors(followed(found.queries_back, received, rows))
    if found.keys is None or found.keys_back is None:
        return Traced(tuple(rows.tolist()), queries, queries_back, (), ())
    copies = int(found.keys.copy.max(initial=0)) + 1
    received = found.keys.counts.sum(axis=1)
    keys = _tensors(followed(found.keys, rows, received))
    back = followed(found.keys_back, received, copies * rows)
    keys_back = _tensors([ids.reshape(copies, -1) for ids in back])
    return Traced(tuple(rows.tolist()), queries, queries_back, keys, keys_back)


def _tensors(maps: Iterable[Longs]) -> tuple[Ids, ...]:
    return tuple(torch.from_numpy(ids) for ids in maps)
