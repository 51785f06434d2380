"""Turns the copies and flags that all ranks started into pairs of copies that touch the same bytes in no order.

Assumes commands from the first call on. Takes what a wait promises and no more: that the first signal it
is content with was raised. Does not look at the data.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import numpy as np

from commdsl.build.emit import signal_ordinals
from commdsl.program.plan import Plan

Raised = dict[tuple[int, int], list[tuple[int, int]]]
"""From a rank to a rank: values in the order in which they were raised, and the commands before each."""


@dataclass(frozen=True)
class Command:
    """A copy, or a kernel for flags, as it was started, and what it comes after."""

    rank: int
    number: int
    capture: int | None
    before: frozenset[int]
    run: Callable[[], object]
    copy: tuple[int, int, int] | None = None  # destination, source, bytes
    turn: tuple[int, ...] = ()  # the Turn struct


class Order:
    """What comes before what among the commands of all ranks, as bits: command n of the list is bit n."""

    def __init__(self, plan: Plan, commands: list[Command], without: Collection[int] = ()) -> None:
        """`without`: rows of the table of waits that are left out."""
        self.plan = plan
        self.commands = commands
        self.before: dict[int, int] = {}  # for each command that could run, by its place in the list
        self._without = without
        self._ordinals = signal_ordinals(plan.moves.ops)
        self._raised: Raised = {}
        self._has_raised: set[int] = set()
        self._rounds = [0] * plan.num_ranks
        self._run()

    @property
    def stuck(self) -> list[Command]:
        return [command for place, command in enumerate(self.commands) if place not in self.before]

    def races(self) -> Iterator[tuple[Command, Command]]:
        copies = [(place, command) for place, command in enumerate(self.commands) if command.copy]
        for at, other in _meeting([command.copy for _, command in copies]):
            (i, one), (j, two) = copies[at], copies[other]
            if not (self.before[i] >> j | self.before[j] >> i) & 1:
                yield one, two

    def _run(self) -> None:
        places = {command.number: place for place, command in enumerate(self.commands)}
        behind = [[places[number] for number in one.before & places.keys()] for one in self.commands]
        waiting = list(range(len(self.commands)))
        while waiting:
            still = [place for place in waiting if not self._start(place, behind[place])]
            if len(still) == len(waiting):
                return
            waiting = still

    def _start(self, place: int, behind: list[int]) -> bool:
        command = self.commands[place]
        if any(other not in self.before for other in behind):
            return False
        known = 1 << place
        for other in behind:
            known |= self.before[other] | 1 << other
        if command.turn:
            if place not in self._has_raised:  # which it does before it waits
                self._has_raised.add(place)
                self._raise(command, known)
            learned = self._await(command)
            if learned is None:
                return False
            known |= learned
            if command.turn[5]:
                self._rounds[command.rank] += command.turn[4]
        self.before[place] = known
        return True

    def _groups(self, rank: int, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Round, first and last row of each group at these positions."""
        ops = self.plan.moves.ops
        bounds = [*ops.leaders.tolist(), ops.num_ops]
        begin, end = np.searchsorted(ops.leaders, ops.rank_begin[rank : rank + 2]).tolist()
        for position in range(first, last):
            group = begin + position % (end - begin)
            yield self._rounds[rank] + position // (end - begin), bounds[group], bounds[group + 1]

    def _raise(self, command: Command, known: int) -> None:
        ops, counts = self.plan.moves.ops, self.plan.moves.signals_per_round
        for round, _, end in self._groups(command.rank, *command.turn[:2]):
            for row in range(ops.signal_begin[end - 1], ops.signal_begin[end]):
                to = int(ops.signal_peer[row])
                value = round * int(counts[command.rank, to]) + int(self._ordinals[row])
                self._raised.setdefault((command.rank, to), []).append((value, known))

    def _await(self, command: Command) -> int | None:
        """What all awaited signals tell, None if one of them was not raised yet."""
        ops, counts, learned = self.plan.moves.ops, self.plan.moves.signals_per_round, 0
        for round, leader, _ in self._groups(command.rank, *command.turn[2:4]):
            for row in range(ops.wait_begin[leader], ops.wait_begin[leader + 1]):
                peer = int(ops.wait_peer[row])
                back = round - int(ops.wait_rounds_back[row])
                expected = back * int(counts[peer, command.rank]) + int(ops.wait_ordinal[row])
                if back < 0 or row in self._without:
                    continue
                told = [known for value, known in self._raised.get((peer, command.rank), []) if value >= expected]
                if not told:
                    return None
                learned |= told[0]
        return learned


def _meeting(copies: list[tuple[int, int, int] | None]) -> list[list[int]]:
    """The pairs of copies of which one writes what the other reads or writes."""
    to, source, size = np.array(copies, np.int64).reshape(-1, 3).T

    def overlap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
        return (one[:, None] < other + size) & (other < (one + size)[:, None])

    crossed = overlap(to, source)
    found: list[list[int]] = np.argwhere(np.triu(overlap(to, to) | crossed | crossed.T, 1)).tolist()
    return found
