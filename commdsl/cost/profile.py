"""Turns the time stamps of one call on one rank into a report: computation, communication, what of it is exposed, per
task and in all, and a picture.

Assumes intervals of one clock. Does not know how they came; `program.stamps` says what each of them is. What of a call
no interval has, before the first and behind the last, are rows of their own: `begin` and `join`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.cost.bars import Bar, drawn
from commdsl.ir.schedules import Ints
from commdsl.program.stamps import Layout, Task

Floats: TypeAlias = NDArray[np.float64]
Intervals: TypeAlias = NDArray[np.void]
"""Of the type INTERVAL."""

STAMPS = "begin", "ready", "end"


@dataclass(frozen=True, eq=False)
class Profile:
    """One call on one rank. `intervals`: those that were, from its first stamp on; `task`: which of `tasks` each is;
    `length`: nanoseconds from there to its last stamp.

    An interval waits until it is ready, and then works. Of one that moves, data is on its way then. The times below are
    in seconds. `exposed` is, of an SM, the time of the call in which it computes nothing; where nobody computes that is
    all of it. What is said of one SM is the median of all that computed.
    """

    name: str
    rank: int
    tasks: tuple[Task, ...]
    task: Ints
    intervals: Intervals
    length: int

    @staticmethod
    def of(name: str, rank: int, layout: Layout, written: Intervals, call: Sequence[int] = ()) -> Profile:
        """Of what the launches of a call wrote, which begins at 0 here: times since a machine began fill 64 bits.
        `call`: when it began and ended, where more is known of that than what they wrote.
        """
        made = written["end"] > 0
        found = written[made]
        begin = min((*call[:1], *found["begin"].tolist()), default=0)
        end = max((*call[1:], *found["end"].tolist()), default=0)
        for stamp in STAMPS:
            found[stamp] -= np.uint64(begin)
        return Profile(name, rank, layout.tasks, layout.task[made], found, end - begin)

    @property
    def total(self) -> float:
        """From the first stamp to the last."""
        return self.length / 1e9

    @property
    def resolution(self) -> int:
        """The least difference of two stamps, in nanoseconds: the steps of the clock, if there are many."""
        stamps = np.unique(np.concatenate([self.intervals[stamp] for stamp in STAMPS]))
        return int(np.diff(stamps).min(initial=2**63 - 1))

    @property
    def computation(self) -> float:
        return _median(self.computed)

    @cached_property
    def communication(self) -> float:
        """While something was on its way."""
        return _measure(self._travels) / 1e9

    @property
    def exposed(self) -> float:
        return _median(self.uncovered) if len(self.computed) else self.total

    @cached_property
    def computed(self) -> Floats:
        """By SM that computed, how long."""
        return np.array([_measure(spans) for spans in self._products]) / 1e9

    @cached_property
    def uncovered(self) -> Floats:
        """By SM that computed, how long it did not."""
        return np.array([self.length - _measure(spans) for spans in self._products]) / 1e9

    @property
    def sums(self) -> dict[str, float]:
        """In seconds, by their names."""
        names = "total", "computation", "communication", "exposed"
        return {name: getattr(self, name) for name in names}

    @property
    def _computes(self) -> NDArray[np.bool_]:
        return np.array([task.computes for task in self.tasks], bool)[self.task]

    @cached_property
    def _travels(self) -> Floats:
        return _spans(self.intervals[~self._computes])

    @cached_property
    def _products(self) -> list[Floats]:
        of = self.intervals[self._computes]
        return [_spans(of[of["sm"] == sm]) for sm in np.unique(of["sm"])]

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(profile: Profile) -> Iterator[str]:
    sms = len(profile.computed)
    yield f"{profile.name} on rank {profile.rank}: {_us(profile.total)} us from the first stamp to the last"
    yield f"  {'us':36} {'min':>9} {'median':>9} {'max':>9}"
    if sms:
        yield _row("computation", profile.computed, f"of {sms} that computed")
    yield _row("communication", np.array([profile.communication]), "while something is on its way")
    yield _row("exposed", profile.uncovered if sms else np.array([profile.total]), "of the call, nothing computed")
    yield f"  {'task':36} {'begin':>9} {'end':>9} {'work':>9} {'wait':>9}  us; work and wait: of an SM, the median"
    for what, *times in _tasks(profile):
        yield f"  {what[:36]:36} " + " ".join(f"{_us(one):>9}" for one in times)
    yield from drawn([_bars(profile, is_product) for is_product in (True, False)])


def _tasks(profile: Profile) -> Iterator[tuple[str, float, float, float, float]]:
    """Begin, end, work and wait of each; before them what the call took to begin, behind them to join its streams."""
    first = profile.intervals["begin"].min(initial=profile.length) / 1e9
    last = profile.intervals["end"].max(initial=0) / 1e9
    if first > 0:
        yield "begin", 0.0, first, first, 0.0
    for number, task in enumerate(profile.tasks):
        of = profile.intervals[profile.task == number]
        if len(of):
            ends = of["begin"].min() / 1e9, of["end"].max() / 1e9
            yield task.what, *ends, _by_sm(of, "ready", "end"), _by_sm(of, "begin", "ready")
    if last < profile.total:
        yield "join", last, profile.total, profile.total - last, 0.0


def _row(what: str, seconds: Floats, words: str) -> str:
    return f"  {what:36} " + " ".join(f"{_us(one):>9}" for one in _spread(seconds)) + f"  {words}"


def _spread(seconds: Floats) -> tuple[float, float, float]:
    return float(seconds.min()), _median(seconds), float(seconds.max())


def _bars(profile: Profile, is_product: bool) -> list[Bar]:
    """A task is as long as somebody works on it."""
    found = [(task, profile.intervals[profile.task == number]) for number, task in enumerate(profile.tasks)]
    return [
        Bar(of["ready"].min() / 1e9, of["end"].max() / 1e9)
        for task, of in found
        if len(of) and task.computes is is_product
    ]


def _by_sm(of: Intervals, first: str, last: str) -> float:
    """How long all intervals of an SM are together, from one stamp to the other: the median."""
    _, place = np.unique(of["sm"], return_inverse=True)
    return _median(np.bincount(place, (of[last] - of[first]).astype(np.float64)) / 1e9)


def _spans(intervals: Intervals) -> Floats:
    """(n, 2): when each worked, in nanoseconds."""
    return np.stack((intervals["ready"], intervals["end"]), axis=1).astype(np.float64)


def _measure(spans: Floats) -> float:
    """Nanoseconds that lie in any of them: whole, so that what is taken from them is no more than they are."""
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    if not len(ordered):
        return 0.0
    reached = np.maximum.accumulate(ordered[:, 1])
    before = np.concatenate(([ordered[0, 0]], reached[:-1]))
    return float(np.maximum(ordered[:, 1] - np.maximum(ordered[:, 0], before), 0).sum())


def _median(seconds: Sequence[float] | Floats) -> float:
    return float(np.median(seconds)) if len(seconds) else 0.0


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
