"""Turns what each step moves into how long the longest chain of moves takes that wait for each other.

Assumes a checked schedule. A move waits until what it reads has come, and until nobody reads or writes any more what it
overwrites; what a function writes waits for all that it reads, and a yield for all that its rank takes part in. What
waits for nothing of another goes at once, wherever it stands in the file. Does not know how ranks are signalled.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedTask
from commdsl.ir.schedules import Yield
from commdsl.language.records import dataclass
from commdsl.machine.topology import Topology, pair_bandwidth

Floats = NDArray[np.float64]
Keys = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Moved:
    """What one step moves, a row for every source of every move: from location to location, and what is between ranks
    besides by its pair (source * num_ranks + destination), its link and its size in blocks.
    """

    reads: Keys
    writes: Keys
    crosses: NDArray[np.bool_]
    pair: Keys  # of those that cross, as the two below
    link: NDArray[np.int32]
    blocks: Floats

    def is_like(self, other: Moved) -> bool:
        """Whether as much goes between the same ranks."""
        return np.array_equal(self.pair, other.pair) and np.array_equal(self.blocks, other.blocks)


def longest_chain(located: Located, moved: dict[int, Moved]) -> tuple[float, float]:
    """Seconds of latency, and seconds per byte of a block, of the moves by the index of their step.

    The two are taken apart: the latency is that of tensors so small that links take no time, the other that of tensors
    so large that latency is nothing. A move between ranks takes its link's latency; a port, or a pair, carries what
    steps give it in their order, that of one step together and as soon as all of it can go, at its whole rate. What a
    rank copies, combines or computes takes no time.
    """
    small, large = _Clock(located), _Clock(located)
    latencies = np.array([link.latency for link in located.schedule.topology.links])
    lanes = _Lanes(located.schedule.topology, located.schedule.num_ranks)
    for index, step in enumerate(located.steps):
        if isinstance(step, LocatedTask):
            small.compute(step)
            large.compute(step)
        elif index in moved:
            one = moved[index]
            over = small.begin(one)
            over[one.crosses] += latencies[one.link]
            small.end(one, over)
            over = large.begin(one)
            if len(one.pair):
                over[one.crosses] = lanes.carry(one, over[one.crosses])
            large.end(one, over)
    return small.now, large.now


class _Clock:
    """When what lies at each location has come, and from when on it may be overwritten."""

    def __init__(self, located: Located) -> None:
        self._num_ranks = located.schedule.num_ranks
        self._there = np.zeros(located.nowhere)
        self._free = np.zeros(located.nowhere)

    @property
    def now(self) -> float:
        return float(self._free.max(initial=0.0))

    def begin(self, moved: Moved) -> Floats:
        found: Floats = np.maximum(self._there[moved.reads], self._free[moved.writes])
        return found

    def end(self, moved: Moved, over: Floats) -> None:
        np.maximum.at(self._there, moved.writes, over)
        np.maximum.at(self._free, moved.writes, over)
        np.maximum.at(self._free, moved.reads, over)

    def compute(self, task: LocatedTask) -> None:
        """The caller's functions end a launch: on a rank nothing goes on beside them."""
        if isinstance(task.step, Yield):
            of_rank = self._free.reshape(self._num_ranks, -1)
            over = of_rank.max(axis=1, initial=0.0)[:, None]
            of_rank[:] = over
            self._there.reshape(of_rank.shape)[:] = over
            return
        over = np.maximum(
            self._there[task.reads].max(axis=1, initial=0.0), self._free[task.writes].max(axis=1, initial=0.0)
        )[:, None]
        self._there[task.writes] = self._free[task.writes] = over
        self._free[task.reads] = np.maximum(self._free[task.reads], over)


class _Lanes:
    """From when on what carries is free: ports out and in, by link and rank, and pairs that have a cap of their own."""

    def __init__(self, topology: Topology, num_ranks: int) -> None:
        self._topology, self._num_ranks = topology, num_ranks
        ranks = np.arange(num_ranks)
        ports = [link.port(ranks) + index * num_ranks for index, link in enumerate(topology.links)]
        self._port = np.concatenate([np.zeros(0, np.int64), *ports])
        self._rate = np.concatenate([np.zeros(0), *(link.port_rate(ranks) for link in topology.links)])
        capped = bool(topology.degraded) or any(np.isfinite(link.pair_bandwidth).any() for link in topology.links)
        self._out, self._into = np.zeros(len(self._port)), np.zeros(len(self._port))
        self._pair = np.zeros(num_ranks**2) if capped else None
        self._last: tuple[Moved, list[_Lane]] | None = None

    def carry(self, moved: Moved, begin: Floats) -> Floats:
        """When each that may begin then is over; it waits for all its lanes, and takes as long as the slowest."""
        if self._last is None or not moved.is_like(self._last[0]):
            self._last = moved, self._lanes(moved)
        lanes = self._last[1]
        for lane in lanes:
            begin = np.maximum(begin, lane.free[lane.key])
        over = lanes[0].take(begin)
        for lane in lanes[1:]:
            over = np.maximum(over, lane.take(begin))
        return over

    def _lanes(self, moved: Moved) -> list[_Lane]:
        source, dest = np.divmod(moved.pair, self._num_ranks)
        first = moved.link * self._num_ranks
        out, into = self._port[first + source], self._port[first + dest]
        lanes = [
            _Lane.of(self._out, out, moved.blocks / self._rate[out]),
            _Lane.of(self._into, into, moved.blocks / self._rate[into]),
        ]
        if self._pair is not None:
            rate = pair_bandwidth(self._topology, source, dest, moved.link)
            lanes.append(_Lane.of(self._pair, moved.pair, moved.blocks / rate))
        return lanes


@dataclass(frozen=True, eq=False)
class _Lane:
    """What carries one side of a step: those of one lane stand side by side in `order`, each lane from its start on."""

    free: Floats
    key: Keys  # the lane of each
    order: Keys
    starts: Keys
    lengths: Keys
    seconds: Floats  # of each lane, for all that it carries

    @staticmethod
    def of(free: Floats, key: Keys, seconds: Floats) -> _Lane:
        order, starts = groups(key)
        total = np.add.reduceat(seconds[order], starts)
        return _Lane(free, key, order, starts, np.diff(starts, append=len(key)), total)

    def take(self, begin: Floats) -> Floats:
        """When each is over; those on one lane begin when all of them can."""
        over = np.maximum.reduceat(begin[self.order], self.starts) + self.seconds
        self.free[self.key[self.order[self.starts]]] = over
        found = np.empty(len(begin))
        found[self.order] = np.repeat(over, self.lengths)
        return found


def groups(keys: Keys) -> tuple[Keys, Keys]:
    """What puts equal keys side by side, and where each key then begins."""
    order = keys.argsort(kind="stable")
    found = keys[order]
    begins = np.ones(len(keys), np.bool_)
    np.not_equal(found[1:], found[:-1], out=begins[1:])
    return order, np.flatnonzero(begins)
