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
from commdsl.program.torus import Torus, alike_along

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
    """The waits of rank 0, of which every other rank's are the turn: role by role, then by operation."""

    torus: Torus
    role: Ints  # (m,)
    local: Ints  # (m,): the operation that waits
    peer_role: Ints
    distance: Ints  # (m,): the turn that leads to the rank awaited
    signal: Ints
    rounds_back: Ints
    since: Ints  # meaningless if the Timeline has none
    wait: Ints  # (num_ranks, m): which wait of the Timeline it is on each rank


def pattern(events: Timeline) -> Pattern | None:
    """The one rank that stands for all, if every rank waits as rank 0 does, turned around a ring or along a torus."""
    roles = [_waits(events, role) for role in range(events.num_roles)]
    waits = [one for one in roles if one is not None]
    if len(waits) < len(roles):
        return None

    def seen(torus: Torus, ranks: Ints) -> list[Pattern] | None:
        found = [one for one in (one.alike(torus, ranks) for one in waits) if one is not None]
        return found if len(found) == len(waits) else None

    found = next(alike_along(events.num_ranks, seen), None)
    return None if found is None else _side_by_side(found)


def _side_by_side(roles: list[Pattern]) -> Pattern:
    names = [name for name in Pattern.__dataclass_fields__ if name != "torus"]
    columns = {name: np.concatenate([getattr(one, name) for one in roles], axis=-1) for name in names}
    return Pattern(torus=roles[0].torus, **columns)


def _waits(events: Timeline, role: int) -> _Waits | None:
    """None if not all ranks have as many operations and waits."""
    num_ranks, first = events.num_ranks, role * events.num_ranks
    begin = events.begin[first : first + num_ranks + 1]
    every = (0, len(events.wait_op))
    waits = slice(*(every if events.num_roles == 1 else np.searchsorted(events.wait_op, begin[[0, -1]]).tolist()))
    ops = events.wait_op[waits]
    lengths, counts = np.diff(begin), np.bincount(events.actor[ops] - np.int32(first), minlength=num_ranks)
    if (lengths != lengths[0]).any() or (counts != counts[0]).any():
        return None
    shape = (num_ranks, int(counts[0]))
    peer_role, peer = np.divmod(events.wait_peer[waits].reshape(shape), np.int32(num_ranks))
    since = events.wait_signal if events.since is None else events.since  # meaningless, and the same on every rank
    tables = (events.wait_signal, events.wait_rounds_back, since)
    of = (events.local[ops].reshape(shape), peer_role, *(table[waits].reshape(shape) for table in tables))
    return _Waits(role, waits.start, peer, of)


@dataclass(frozen=True, eq=False)
class _Waits:
    """The waits of a role, a row a rank."""

    role: int
    first: int  # in the Timeline
    peer: Ints  # (num_ranks, m): the rank awaited
    others: tuple[Ints, ...]  # (num_ranks, m) each: local, peer_role, signal, rounds_back, since

    def alike(self, torus: Torus, ranks: Ints) -> Pattern | None:
        """The waits of the first of these ranks, if all of them wait alike; those of one operation in any order."""
        distance = torus.distance(self.peer[ranks], ranks[:, None])
        tables = [*(table[ranks] for table in self.others), distance]
        place = np.broadcast_to(np.arange(distance.shape[1], dtype=np.int32), distance.shape)
        if not _same(tables):  # perhaps only the order of one operation's waits differs
            local, peer_role = tables[:2]
            words = (local * (peer_role.max(initial=0) + np.int64(1)) + peer_role) * torus.num_ranks + distance
            place = np.argsort(words, axis=1, kind="stable").astype(np.int32)
            entry = place + np.arange(len(place))[:, None] * place.shape[1]
            tables = [table.take(entry) for table in tables]
            if not _same(tables):
                return None
        local, peer_role, signal, rounds_back, since, distance = (table[0].copy() for table in tables)
        return Pattern(
            torus=torus,
            role=np.full_like(local, self.role),
            local=local,
            peer_role=peer_role,
            distance=distance,
            signal=signal,
            rounds_back=rounds_back,
            since=since,
            wait=np.int32(self.first) + ranks[:, None] * np.int32(distance.shape[0]) + place,
        )


def _same(tables: list[Ints]) -> bool:
    """Whether all ranks have what the first has."""
    return all(bool((table == table[0]).all()) for table in tables)
