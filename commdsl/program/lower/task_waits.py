"""Derives the counters that a task waits for, from the memory that launches and tasks before it read and write.

Assumes phases in the order of their turns. Does not prove the result (`proof.hosted`, which shares nothing with this).

Launches end in their order, so the end of one covers those before it, and the tasks that they waited for. Tasks are in
no order: each is named. A counter that another awaited one covers is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from commdsl.program.memory import Kept
from commdsl.program.tasks import Counter, Over, Stored


@dataclass(frozen=True, slots=True)
class Known:
    """Launches and tasks that are certainly over: the first `launches`, and these tasks."""

    launches: int = 0
    tasks: frozenset[int] = frozenset()

    def joined(self, other: Known) -> Known:
        return Known(max(self.launches, other.launches), self.tasks | other.tasks)

    def covers(self, counter: Counter) -> bool:
        return counter.task in self.tasks if isinstance(counter, Stored) else counter.launch < self.launches


NOTHING = Known()


class TaskWaits:
    """The last accesses of each memory, and the phases that are over behind each launch and each task."""

    def __init__(self) -> None:
        self._over: list[Known] = []  # by launch
        self._stored: list[Known] = []  # by task
        self._launches: tuple[dict[Kept, int], dict[Kept, int]] = ({}, {})  # the last that read it, that wrote it
        self._maker: dict[Kept, int] = {}
        self._readers: dict[Kept, set[int]] = {}

    def launch(self, reads: Sequence[Kept], writes: Sequence[Kept], after: int) -> None:
        """Record the next launch, which waits for the first `after` tasks."""
        found = self._over[-1] if self._over else NOTHING
        for task in range(after):
            found = found.joined(self._stored[task])
        number = len(self._over)
        self._over.append(found.joined(Known(number + 1)))
        for kept in reads:
            self._launches[0][kept] = number
        for kept in writes:
            self._launches[1][kept] = number
            self._maker.pop(kept, None)
            self._readers.pop(kept, None)

    def is_read(self, kept: Kept) -> bool:
        """Return whether a task reads it for which no later launch has waited."""
        return bool(self._readers.get(kept))

    def touched(self, reads: Iterable[Kept], writes: Iterable[Kept] = ()) -> tuple[Counter, ...]:
        """Return the counters of all phases that must be over before a task reads and writes these."""
        found = dict[Counter, None]()
        for kept in reads:
            found |= dict.fromkeys(self._writers(kept))
        for kept in writes:
            found |= dict.fromkeys((*self._writers(kept), *map(Stored, sorted(self._readers.get(kept, ())))))
            found |= {Over(self._launches[0][kept]): None} if kept in self._launches[0] else {}
        return tuple(found)

    def needed(self, task: int, counters: Iterable[Counter], known: Known = NOTHING) -> tuple[Counter, ...]:
        """Return the counters that a task has to wait for: those that are neither known to be over nor covered by
        another.
        """
        needed = [one for one in dict.fromkeys(counters) if one != Stored(task) and not known.covers(one)]
        return tuple(
            one
            for at, one in enumerate(needed)
            if not any(self.behind(other).covers(one) for other in (*needed[:at], *needed[at + 1 :]))
        )

    def _writers(self, kept: Kept) -> Iterable[Counter]:
        if kept in self._launches[1]:
            yield Over(self._launches[1][kept])
        if kept in self._maker:
            yield Stored(self._maker[kept])

    def behind(self, *counters: Counter) -> Known:
        """Return the phases that are certainly over once these counters have come to their levels."""
        found = NOTHING
        for one in counters:
            found = found.joined(self._stored[one.task] if isinstance(one, Stored) else self._over[one.launch])
        return found

    def task(self, number: int, reads: Iterable[Kept], writes: Iterable[Kept], counters: Iterable[Counter]) -> None:
        """Record the memory that a task, or another product of it, touches, and the counters that it waits for."""
        if number == len(self._stored):
            self._stored.append(Known(0, frozenset((number,))))
        self._stored[number] = self._stored[number].joined(self.behind(*counters))
        for kept in reads:
            self._readers.setdefault(kept, set()).add(number)
        for kept in writes:
            self._maker[kept] = number
            self._readers[kept] = {number} & self._readers.get(kept, set())
