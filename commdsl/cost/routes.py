"""Turns the moves of a schedule into routes: who hands on to whom what travels together.

Assumes a schedule whose indices are checked. A route gives every rank at most one successor: a Hamiltonian cycle, the
shift by s ranks that a step makes, the rails between nodes. What a statement moves of one chunk index in one step is
one; statements of a step that share no rank's end are joined, and what is part of another route is none of its own.
Does not know which data travels when; `held` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.ir.schedules import Ints, Schedule, Statement, Step
from commdsl.language.records import dataclass

NOBODY = -1


@dataclass(frozen=True, eq=False)
class Route:
    """`after[r]`: whom rank r hands on to, NOBODY if to none; no two hand on to one."""

    after: Ints

    @property
    def chains(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in the order of the route; a chain that ends where it begins names that rank twice."""
        after, found = self.after.tolist(), list[tuple[int, ...]]()
        left = {rank for rank, other in enumerate(after) if other != NOBODY}
        for first in (*sorted(left - set(after)), *sorted(left & set(after))):
            if first in left:
                chain = [first]
                while chain[-1] in left:
                    left.discard(chain[-1])
                    chain.append(after[chain[-1]])
                found.append(tuple(chain))
        return tuple(found)

    @property
    def is_cycle(self) -> bool:
        """Whether it is one cycle through all ranks."""
        chain = self.chains[0]
        return len(chain) == len(self.after) + 1 and chain[0] == chain[-1]

    def contains(self, other: Route) -> bool:
        has = other.after != NOBODY
        return bool((self.after[has] == other.after[has]).all())


def routes(schedule: Schedule) -> tuple[Route, ...]:
    """Every route, in the order in which they are taken first; none where nothing crosses between ranks."""
    distinct: dict[bytes, Route] = {}
    for step in schedule.steps:
        if isinstance(step, Step):
            for route in _of_step(schedule.num_ranks, step):
                distinct.setdefault(route.after.tobytes(), route)
    found = list(distinct.values())
    largest = sorted(found, key=lambda route: -np.count_nonzero(route.after != NOBODY))
    whole: list[Route] = []
    for route in largest:
        if not any(one.contains(route) for one in whole):
            whole.append(route)
    return tuple(route for route in found if any(route is one for one in whole))


def _of_step(num_ranks: int, step: Step) -> Iterator[Route]:
    """Those of one step, chunk index by chunk index; what two statements move of one is joined where it can be. Where a
    chunk index goes to several ranks, or from several to one, what goes equally far is one.
    """
    made: dict[tuple[int, bool, int], list[Ints]] = {}
    for moves in step.moves:
        for chunk, source, dest in _by_chunk(moves):
            unique = len(set(source.tolist())) == len(source) == len(set(dest.tolist()))
            distance = (dest - source) % num_ranks
            for part in (np.full(len(source), True),) if unique else (distance == one for one in np.unique(distance)):
                after = np.full(num_ranks, NOBODY, np.int32)
                after[source[part]] = dest[part]
                number = chunk if unique else int(distance[part][0])
                _join(made.setdefault((moves.source_buffer, unique, number), []), after)
    for _, parts in sorted(made.items()):
        yield from map(Route, parts)


def _join(parts: list[Ints], after: Ints) -> None:
    """Adds to the first part with which no end of a rank is shared."""
    for at, part in enumerate(parts):
        if _apart(part, after):
            parts[at] = np.maximum(part, after)
            return
    parts.append(after)


def _by_chunk(moves: Statement) -> Iterator[tuple[int, Ints, Ints]]:
    """What crosses between ranks, for each chunk index of the source: from which ranks to which."""
    source, dest, chunk = crossing(moves)
    order = np.argsort(chunk, kind="stable")
    cuts = np.flatnonzero(np.diff(chunk[order])) + 1
    for part in np.split(order, cuts) if len(order) else ():
        yield int(chunk[part[0]]), source[part], dest[part]


def crossing(moves: Statement) -> tuple[Ints, Ints, Ints]:
    """Of every transfer between two ranks its source, its destination, and the chunk index of the source."""
    dest = np.broadcast_to(moves.dest_rank[:, None], moves.source_rank.shape)
    crosses = moves.source_rank != dest
    if moves.source_valid is not None:
        crosses &= moves.source_valid
    return moves.source_rank[crosses], dest[crosses], moves.source_chunk[crosses]


def _apart(one: Ints, other: Ints) -> bool:
    """Whether no rank sends in both, and none hears both."""
    sends = (one != NOBODY) & (other != NOBODY)
    return not sends.any() and not set(one[one != NOBODY].tolist()) & set(other[other != NOBODY].tolist())
