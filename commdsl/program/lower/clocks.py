"""What each rank knows of the others' progress while flags are being derived: vector clocks over operation numbers.

Assumes events are reported in an order in which they can happen. Does not decide which flags are needed; `ordering`
does.
Numbers count a rank's operations from 0 through all rounds; -1 is nothing yet.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.schedules import Ints
from commdsl.program.torus import Torus


class Clocks(Protocol):
    num_ranks: int

    def knows(self, rank: Ints, peer: Ints, number: Ints) -> NDArray[np.bool_]:
        """Whether each `rank` knows that `peer` has finished its operation `number`."""

    def join(self, rank: Ints, peer: Ints, number: Ints) -> None:
        """Each `rank` (no rank twice) has seen the flag that `peer` raised after its operation `number`."""

    def finish(self, rank: Ints, number: Ints) -> None:
        """Each `rank` has finished its operation `number`, the next one of that rank."""

    def heard(self) -> NDArray[np.bool_]:
        """[a, b]: rank a knows of anything that rank b, another one, has finished."""

    def copy(self) -> Clocks:
        """A twin that goes its own way; rows are shared, as they are never written again."""


class FullClocks:
    """A row for every rank."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._now = np.full((num_ranks, num_ranks), -1, np.int32)
        self._then: list[list[Ints]] = [[] for _ in range(num_ranks)]  # by rank, then operation number

    def copy(self) -> FullClocks:
        twin = FullClocks(self.num_ranks)
        twin._now, twin._then = self._now.copy(), [list(rows) for rows in self._then]
        return twin

    def knows(self, rank: Ints, peer: Ints, number: Ints) -> NDArray[np.bool_]:
        return self._now[rank, peer] >= number

    def heard(self) -> NDArray[np.bool_]:
        return (self._now >= 0) & ~np.eye(self.num_ranks, dtype=np.bool_)

    def join(self, rank: Ints, peer: Ints, number: Ints) -> None:
        seen = np.stack([self._then[a][i] for a, i in zip(peer.tolist(), number.tolist(), strict=True)])
        self._now[rank] = np.maximum(self._now[rank], seen)

    def finish(self, rank: Ints, number: Ints) -> None:
        self._now[rank, rank] = number
        for b in rank.tolist():
            self._then[b].append(self._now[b].copy())


class TurningClocks:
    """The row of rank 0 for all ranks, where all do the same, turned; nobody else is asked for."""

    def __init__(self, torus: Torus) -> None:
        self.torus, self.num_ranks = torus, torus.num_ranks
        self._seen_from: dict[int, Ints] = {}  # by peer: in whose row what stands for each rank
        self._now = np.full(self.num_ranks, -1, np.int32)
        self._then: list[Ints] = []  # by operation number

    def copy(self) -> TurningClocks:
        twin = TurningClocks(self.torus)
        twin._now, twin._then = self._now.copy(), list(self._then)
        return twin

    def knows(self, rank: Ints, peer: Ints, number: Ints) -> NDArray[np.bool_]:
        known: NDArray[np.bool_] = self._now[peer] >= number
        return known

    def heard(self) -> NDArray[np.bool_]:
        ranks = np.arange(self.num_ranks, dtype=np.int32)
        known = self._now[self.torus.distance(ranks, ranks[:, None])] >= 0
        return known & ~np.eye(self.num_ranks, dtype=np.bool_)

    def join(self, rank: Ints, peer: Ints, number: Ints) -> None:
        of = int(peer[0])
        if of not in self._seen_from:
            self._seen_from[of] = self.torus.seen_from(of)
        np.maximum(self._now, self._then[number[0]][self._seen_from[of]], out=self._now)

    def finish(self, rank: Ints, number: Ints) -> None:
        self._now[0] = number[0]
        self._then.append(self._now.copy())
