"""Turns a plan of documents and the rows of every rank into what a dispatch leaves there, and what its way back does.

The oracle of the kernels that move rows: written from what the language says of `place`, `send once` and `back`, and
shared with nothing; `routes` says the same in arrays, and is compared with this. Assumes a plan without a fault, and
rows as bytes. Does not use routes or tables. Written to be read: it walks over shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import Mask, Sharing
from commdsl.language.records import dataclass

Bytes: TypeAlias = NDArray[np.uint8]
Floats: TypeAlias = NDArray[np.float32]
Rows: TypeAlias = Sequence[Bytes]
"""By rank: (rows, width)."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One copy of a shard: the rank and the first row where it is, and those where it goes."""

    shard: int
    rank: int
    row: int
    dest: int
    dest_row: int
    length: int


def by_source(plan: DispatchPlan) -> list[Copy]:
    """`place by (source rank, shard)`: on each rank what arrives lies in the order in which the shards are declared,
    copies of one shard in the order in which its destinations are written.
    """
    filled = [0] * plan.num_ranks
    found: list[Copy] = []
    for shard, rank, row, length in _shards(plan):
        for dest in plan.dest[shard].tolist():
            if dest >= 0:
                found.append(Copy(shard, rank, row, dest, filled[dest], length))
                filled[dest] += length
    return found


def by_query(plan: DispatchPlan) -> list[Copy]:
    """`place by (query, shard)`: on each rank a stretch for every query there, in the order in which the queries are
    declared, that holds what it attends to in the order of the document. With `send once per rank` the queries of one
    document share a stretch, which stands where the first of them opened it and is as long as the longest needs. Copies
    of a shard are in the order of the queries in the document.
    """
    needs = {query: list(_attended(plan, query)) for query in range(plan.shards.num)}
    length = {shard: rows for shard, _, _, rows in _shards(plan)}
    where = {shard: (rank, row) for shard, rank, row, _ in _shards(plan)}
    stretches: dict[tuple[int, int], list[int]] = {}  # shards, by what has the stretch and by rank; the longest
    asked: list[tuple[int, tuple[int, int]]] = []
    for query, dest in enumerate(plan.dest[:, 0].tolist()):
        if dest >= 0:
            owner = int(plan.document[query]) if plan.sharing is Sharing.RANK else query
            asked.append((query, (owner, dest)))
            held = stretches.setdefault((owner, dest), [])
            if len(needs[query]) > len(held):  # one is the beginning of the other: both are the document's
                stretches[owner, dest] = needs[query]
    begin: dict[tuple[int, int], int] = {}
    filled = [0] * plan.num_ranks
    for stretch, shards in stretches.items():
        begin[stretch] = filled[stretch[1]]
        filled[stretch[1]] += sum(length[shard] for shard in shards)
    found: dict[tuple[int, tuple[int, int]], Copy] = {}
    for query, stretch in sorted(asked, key=lambda one: int(plan.position[one[0]])):
        at = begin[stretch]
        for shard in needs[query]:
            found.setdefault((shard, stretch), Copy(shard, *where[shard], stretch[1], at, length[shard]))
            at += length[shard]
    return list(found.values())


def _shards(plan: DispatchPlan) -> Iterator[tuple[int, int, int, int]]:
    """Every shard in the order declared: its rank, its first row there, its rows."""
    filled = [0] * plan.num_ranks
    for shard, (rank, length) in enumerate(zip(plan.shards.rank.tolist(), plan.shards.length.tolist(), strict=True)):
        yield shard, rank, filled[rank], length
        filled[rank] += length


def _attended(plan: DispatchPlan, query: int) -> Iterator[int]:
    """The shards of its document that a query sees, in the order of the document."""
    members = np.flatnonzero(plan.document == plan.document[query])
    for shard in members[np.argsort(plan.position[members])].tolist():
        if plan.mask is Mask.FULL or plan.position[shard] <= plan.position[query]:
            yield shard


# --- rows -------------------------------------------------------------------------------------------------------------


def there(copies: Sequence[Copy], given: Rows) -> list[Bytes]:
    """What lies on each rank when every copy has gone where it goes."""
    ends = [0] * len(given)
    for copy in copies:
        ends[copy.dest] = max(ends[copy.dest], copy.dest_row + copy.length)
    found = [np.zeros((end, given[0].shape[1]), np.uint8) for end in ends]
    for copy in copies:
        rows = given[copy.rank][copy.row : copy.row + copy.length]
        found[copy.dest][copy.dest_row : copy.dest_row + copy.length] = rows
    return found


def back(
    copies: Sequence[Copy],
    given: Rows,
    rows: Sequence[int],
    widen: Callable[[Bytes], Floats] | None,
    narrow: Callable[[Floats], Bytes] | None,
) -> list[Bytes]:
    """What each rank, which has so many rows, gets back from where the copies went: the sum of a row's copies, in their
    order, in float32, rounded once; zero for a row that went nowhere. Without `widen` and `narrow` nothing is added up:
    a row has one copy.
    """
    width = given[0].shape[1]
    found = [np.zeros((size, width), np.uint8) for size in rows]
    sums: dict[int, tuple[Copy, Floats]] = {}
    for copy in copies:
        came = given[copy.dest][copy.dest_row : copy.dest_row + copy.length]
        if widen is None:
            found[copy.rank][copy.row : copy.row + copy.length] = came
        elif copy.shard in sums:
            sums[copy.shard] = copy, sums[copy.shard][1] + widen(came)
        else:
            sums[copy.shard] = copy, widen(came)
    for copy, total in sums.values():
        assert narrow is not None
        found[copy.rank][copy.row : copy.row + copy.length] = narrow(total)
    return found
