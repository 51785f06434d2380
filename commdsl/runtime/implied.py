"""Turns a list of calls of the driver into one that keeps the same order with fewer: without waits that others imply,
and without records that nobody waits for.

Assumes events that this list alone records, before it waits for them, and streams that others may have used before and
use after it. Does not move what runs: copies and kernels come behind the same ones, and so does what follows on any
stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from commdsl.runtime.driver import Asked, Driver

_Clock: TypeAlias = dict[int, int]
"""By stream, how much of what runs on it has come; 0 is all that ran on it before the list."""


def needed(driver: Driver, calls: Sequence[Asked]) -> list[Asked]:
    """`calls`: `driver`'s, with the arguments of CuPy's."""
    found = _once(driver, calls)  # what went may have kept more
    return found if len(found) == len(calls) else needed(driver, found)


def _once(driver: Driver, calls: Sequence[Asked]) -> list[Asked]:
    order = _Order()
    for asked in calls:
        what, *given = asked
        if what is driver.wait:
            order.wait(given[0], given[1], asked)
        elif what is driver.record:
            order.record(given[0], given[1], asked)
        else:
            stream = given[8] if what is driver.launch else given[4] if what is driver.copy else given[3]
            order.run(stream, asked)
    return order.end()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An event: what it comes behind, and its place in the list."""

    clock: _Clock
    place: int
    asked: Asked


_Waiting: TypeAlias = list[tuple[_Recorded, Asked]]
"""Waits that nothing has come behind yet."""


@dataclass
class _Order:
    """What has been put down so far, and what each stream has come behind."""

    _kept: list[Asked | None] = field(default_factory=list)  # None: a record that nobody waits for
    _events: dict[int, _Recorded] = field(default_factory=dict)
    _clocks: dict[int, _Clock] = field(default_factory=dict)  # by stream
    _waiting: dict[int, _Waiting] = field(default_factory=dict)  # by stream

    def run(self, stream: int, asked: Asked) -> None:
        clock = self._flushed(stream)
        clock[stream] += 1
        self._kept.append(asked)

    def record(self, event: int, stream: int, asked: Asked) -> None:
        last = self._events.get(event)
        for other, waiting in [*self._waiting.items()]:
            if any(one is last for one, _ in waiting):  # who waits for it means what was recorded before
                self._flushed(other)
        self._events[event] = _Recorded(dict(self._flushed(stream)), len(self._kept), asked)
        self._kept.append(None)

    def wait(self, stream: int, event: int, asked: Asked) -> None:
        """Where something comes behind it: what is waited for until then may imply it."""
        self._waiting.setdefault(stream, []).append((self._events[event], asked))

    def end(self) -> list[Asked]:
        for stream in [*self._waiting]:
            self._flushed(stream)
        return [one for one in self._kept if one is not None]

    def _flushed(self, stream: int) -> _Clock:
        """What the stream has come behind, with all that it waits for."""
        clock = self._clocks.setdefault(stream, {stream: 0})
        waiting = self._waiting.pop(stream, [])
        for at in reversed(range(len(waiting))):
            others = [one.clock for one, _ in (*waiting[:at], *waiting[at + 1 :])]
            if _implies((clock, *others), waiting[at][0].clock):
                del waiting[at]
        for event, asked in waiting:
            self._kept[event.place] = event.asked
            self._kept.append(asked)
            for other, count in event.clock.items():
                clock[other] = max(clock.get(other, -1), count)
        return clock


def _implies(clocks: Sequence[_Clock], one: _Clock) -> bool:
    """Whether who has come behind all of these has come behind that."""
    return all(any(clock.get(stream, -1) >= count for clock in clocks) for stream, count in one.items())
