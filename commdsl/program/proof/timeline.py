"""What a proof of order looks at, whatever it is that is ordered: actors, what each does in a round, who awaits what.

Assumes nothing. Does not know what an operation touches (`hazards`, `regions`) nor what its flags are (`flags`,
`events`).

An actor is a thread that waits, acts and tells in one order: a role of a rank, or a lane of it where lanes are not
alike. It does the same in every round (a round of chunks, a call of rows). Actors are numbered role by role, within a
role by rank: so those of one role keep their numbers whatever runs beside them. A role is on every rank.

Only waits order two actors. A wait is ended by one operation of one actor, in this round or some rounds before, and
orders what that actor did up to there, and what it knew by then. Two things may make it less:
- an actor may tell its *own* alone: how far it is, and nothing that it knows of others;
- what it learns in a stretch of operations may be *forgotten* behind it: `row` says what an operation knows.
Both only take knowledge away: what is in order with them is in order without.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints

Bits = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Timeline:
    """One round of every actor: where each operation stands, and which operation of another actor ends each wait."""

    num_ranks: int
    begin: Ints  # (num_actors + 1,): operations of actor a are begin[a] ..< begin[a + 1]
    actor: Ints  # (num_ops,): role * num_ranks + rank
    local: Ints  # (num_ops,): its number in the actor's round
    row: Ints  # (num_ops,): which waiting operation of the actor's round told what is known there; see `rows_of`
    rows_per_round: Ints  # (num_actors,): its waiting operations
    wait_op: Ints  # (num_waits,): operation that waits, in order
    wait_peer: Ints  # actor that is awaited
    wait_signal: Ints  # (num_waits,): local number of the operation that ends the wait
    wait_rounds_back: Ints
    since: Ints | None = None  # (num_waits,): the row that its operation goes on from; None: the one before its own
    tells_own: Bits | None = None  # (num_actors,): None: nobody does
    given: Bits | None = None  # (num_waits,): orders that are no flags, and not to be judged; None: no wait is

    @property
    def num_roles(self) -> int:
        return (len(self.begin) - 1) // self.num_ranks

    @property
    def lengths(self) -> Ints:
        """Operations of each actor in a round."""
        return np.diff(self.begin)

    def rows_of(self, rows: Ints, actors: Ints, rounds: int | NDArray[np.integer]) -> NDArray[np.int64]:
        """Rows of a round among all of the actor's: zeros first, then one a waiting operation, round after round.

        A row of 0 or less is of a round before; before the first round nothing is known.
        """
        found: NDArray[np.int64] = rows + rounds * self.rows_per_round[actors].astype(np.int64)
        return found if self.since is None else np.maximum(found, 0)


@dataclass(frozen=True, eq=False)
class Pattern:
    """The waits of rank 0, of which every other rank's are the shift: role by role, then by operation."""

    role: Ints  # (m,)
    local: Ints  # (m,): the operation that waits
    peer_role: Ints
    distance: Ints  # (m,): (rank awaited - rank) % num_ranks
    signal: Ints
    rounds_back: Ints
    since: Ints  # meaningless if the Timeline has none
    wait: Ints  # (num_ranks, m): which wait of the Timeline it is on each rank


def pattern(events: Timeline) -> Pattern | None:
    """The one rank that stands for all, if every rank waits as rank 0 does with all ranks shifted."""
    found = []
    for role in range(events.num_roles):
        alike = _alike(events, role)
        if alike is None:
            return None
        found.append(alike)
    if len(found) == 1:
        return found[0]
    columns = [[getattr(part, name) for part in found] for name in Pattern.__dataclass_fields__]
    return Pattern(*(np.concatenate(parts, axis=-1) for parts in columns))


def _alike(events: Timeline, role: int) -> Pattern | None:
    """The Pattern of one role."""
    num_ranks, first = events.num_ranks, role * events.num_ranks
    begin = events.begin[first : first + num_ranks + 1]
    every = (0, len(events.wait_op))
    waits = slice(*(every if events.num_roles == 1 else np.searchsorted(events.wait_op, begin[[0, -1]]).tolist()))
    ops = events.wait_op[waits]
    lengths, counts = np.diff(begin), np.bincount(events.actor[ops] - np.int32(first), minlength=num_ranks)
    if (lengths != lengths[0]).any() or (counts != counts[0]).any():
        return None
    shape = (num_ranks, int(counts[0]))
    ranks = np.arange(num_ranks, dtype=np.int32)[:, None]
    local, peer = events.local[ops].reshape(shape), events.wait_peer[waits].reshape(shape)
    distance = (peer - ranks) % np.int32(num_ranks)
    tables = [local, distance, events.wait_signal[waits].reshape(shape), events.wait_rounds_back[waits].reshape(shape)]
    if events.num_roles > 1:
        tables.append(peer // np.int32(num_ranks))
    if events.since is not None:
        tables.append(events.since[waits].reshape(shape))
    place = np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape)
    if any((table != table[0]).any() for table in tables):  # perhaps only the order of one operation's waits differs
        far = (peer // np.int32(num_ranks)) * np.int32(num_ranks) + distance
        place = np.argsort(local * np.int64(len(events.begin)) + far, axis=1, kind="stable").astype(np.int32)
        tables = [np.take_along_axis(table, place, axis=1) for table in tables]
        if any((table != table[0]).any() for table in tables):
            return None
    none = np.zeros(shape[1], np.int32)
    own, distances, signal, rounds_back, *rest = (table[0].copy() for table in tables)
    return Pattern(
        role=none + np.int32(role),
        local=own,
        peer_role=rest.pop(0) if events.num_roles > 1 else none,
        distance=distances,
        signal=signal,
        rounds_back=rounds_back,
        since=rest.pop(0) if rest else none,
        wait=np.int32(waits.start) + ranks * np.int32(shape[1]) + place,
    )
