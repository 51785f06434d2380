"""Turns a seed into a plan of documents, of any kind that the language has.

Assumes nothing of what the plan is for. Plans are legal in every way there is: ranks that have nothing, ranks that
receive nothing, shards of no rows, documents that span ranks in any order, queries that stay at home. Does not balance.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import NOWHERE, Longs, Mask, Shards, Sharing
from commdsl.language.source import Source, Span


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
    here = Span(Source("random", ""), 0, 0)
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
        names=tuple(f"d{number}" for number in range(document.max(initial=-1) + 1)),
        piece=np.arange(len(rank)),
        spans=(here,) * len(rank),
        span=here,
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
