"""What each rank knows of the others' progress while flags are being derived: vector clocks over operation numbers.

Assumes events are reported in an order in which they can happen. Does not decide which flags are needed; `ordering` does.

While every batch of events is the same on all ranks up to rotation, so are the clocks: entry a of rank b depends on
(a - b) mod P alone, and one row serves all ranks. The first batch that is not makes the clocks a full matrix.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.ir import Ints


class Clocks:
    """Numbers count a rank's operations from 0 through all rounds; -1 is nothing yet."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._row = np.full(num_ranks, -1, np.int32)  # rotational form: entry d speaks of the rank d further on
        self._rows: list[Ints] = []  # by operation number
        self._matrix: Ints | None = None
        self._history: list[list[Ints]] = []  # full form: by rank, then operation number

    def copy(self) -> Clocks:
        """A twin that goes its own way; rows are shared, as they are never written again."""
        twin = Clocks(self._num_ranks)
        twin._row, twin._rows = self._row.copy(), list(self._rows)
        twin._matrix = None if self._matrix is None else self._matrix.copy()
        twin._history = [list(rows) for rows in self._history]
        return twin

    def knows(self, rank: Ints, peer: Ints, number: Ints) -> NDArray[np.bool_]:
        """Whether each `rank` knows that `peer` has finished its operation `number`."""
        if self._matrix is None:
            return self._row[(peer - rank) % self._num_ranks] >= number
        return self._matrix[rank, peer] >= number

    def join(self, rank: Ints, peer: Ints, number: Ints) -> None:
        """Each `rank` (no rank twice) has seen the flag that `peer` raised after its operation `number`."""
        if not len(rank):
            return
        if self._matrix is None:
            distance = (peer - rank) % self._num_ranks
            if len(rank) == self._num_ranks and (distance == distance[0]).all() and (number == number[0]).all():
                far = np.roll(self._rows[number[0]], distance[0])
                np.maximum(self._row, far, out=self._row)
                return
            self._expand()
        assert self._matrix is not None
        seen = np.stack([self._history[a][i] for a, i in zip(peer.tolist(), number.tolist(), strict=True)])
        self._matrix[rank] = np.maximum(self._matrix[rank], seen)

    def finish(self, rank: Ints, number: Ints) -> None:
        """Each `rank` has finished its operation `number`, the next one of that rank."""
        if self._matrix is None:
            if len(rank) == self._num_ranks and (number == len(self._rows)).all():
                self._row[0] = len(self._rows)
                self._rows.append(self._row.copy())
                return
            self._expand()
        assert self._matrix is not None
        self._matrix[rank, rank] = number
        for b in rank.tolist():
            self._history[b].append(self._matrix[b].copy())

    def _expand(self) -> None:
        ranks = np.arange(self._num_ranks)
        turn = (ranks[None, :] - ranks[:, None]) % self._num_ranks
        self._matrix = self._row[turn]
        self._history = [[row[turn[b]] for row in self._rows] for b in range(self._num_ranks)]
        self._rows = []
