"""Turns loads of ranks into flows of load between linked ranks, along the shortest ways from too much to too little.

Assumes that load is divisible. A way over several links becomes a flow over each: every rank on it passes on load of
its own, as a document goes from its home to its destination at once. Does not know documents.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from commdsl.machine.topology import NO_LINK, Topology, link_of, wire_bandwidth

Doubles = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Ways:
    """How far ranks are from each other: (P, P), in seconds per byte."""

    hop: Doubles  # over a direct link, inf without one, 0 to itself

    @cached_property
    def distance(self) -> Doubles:
        """Over the shortest way."""
        found = self.hop
        if np.isfinite(found).all():
            return found
        for middle in range(len(found)):
            found = np.minimum(found, found[:, middle, None] + found[None, middle, :])
        return found

    def way(self, source: int, dest: int) -> list[int]:
        """The ranks on the shortest way, both ends with it: a direct link, or else that whose first links are fastest.

        So load leaves a crowded rank over a node's many fast links before it takes the slow ones between nodes.
        """
        if self.hop[source, dest] <= self.distance[source, dest] * (1 + 1e-9):
            return [source, dest]
        ranks = [source]
        while ranks[-1] != dest:
            here = ranks[-1]
            left = self.hop[here] + self.distance[:, dest]
            left[ranks] = np.inf
            nearest = np.flatnonzero(left <= left.min() * (1 + 1e-9))
            ranks.append(int(nearest[self.hop[here][nearest].argmin()]))
        return ranks


def ways(topology: Topology) -> Ways:
    """By bandwidth alone, as shards are large; a link without a cap still costs its latency for a MB."""
    ranks = np.arange(topology.num_ranks)
    source, dest = np.broadcast_arrays(ranks[:, None], ranks[None, :])
    link = link_of(topology, source, dest)
    if not topology.links:
        return Ways(np.where(source == dest, 0.0, np.inf))
    latency = np.array([one.latency for one in topology.links])[link] / (1 << 20)
    hop = 1 / wire_bandwidth(topology, source, dest, link) + latency
    hop[link == NO_LINK] = np.inf
    np.fill_diagonal(hop, 0.0)
    return Ways(hop)


@dataclass(frozen=True, slots=True)
class Flow:
    """So much load goes from one rank to another, over a direct link."""

    source: int
    dest: int
    amount: float


def flows(load: Doubles, most: float, found: Ways) -> tuple[Flow, ...]:
    """Flows after which no rank has more than `most`: near ways first, the largest gaps first, so that flows are few
    and large. What no way leads from stays.
    """
    over, room = np.maximum(load - most, 0.0), np.maximum(most - load, 0.0)
    over[over < 1.0] = 0.0  # a pair of tokens
    links: dict[tuple[int, int], float] = {}
    for level in _levels(found, over, room):
        for source in np.argsort(-over, kind="stable").tolist():
            if over[source] <= 0:
                break
            near = found.distance[source] <= level
            while over[source] > 0:
                dest = int(np.where(near, room, 0.0).argmax())
                amount = min(over[source], room[dest])
                if not near[dest] or amount <= 0:
                    break
                over[source] -= amount
                room[dest] -= amount
                way = found.way(source, dest)
                for link in pairwise(way):
                    links[link] = links.get(link, 0.0) + amount
    return _net(links, found)


def _levels(found: Ways, over: Doubles, room: Doubles) -> list[float]:
    """The distances there are from too much to too little, nearest first, those alike to a thousandth as one."""
    apart = found.distance[over > 0][:, room > 0]
    levels: list[float] = []
    for distance in np.unique(apart[np.isfinite(apart)]).tolist():
        if levels and distance <= levels[-1] * 1.001:
            levels[-1] = distance
        else:
            levels.append(distance)
    return levels


def _net(links: dict[tuple[int, int], float], found: Ways) -> tuple[Flow, ...]:
    """What is left where load goes both ways over a link; by source, those over slow links first, as they choose first
    what is sent.
    """
    net = {link: amount - links.get(link[::-1], 0.0) for link, amount in links.items()}
    kept = [Flow(source, dest, amount) for (source, dest), amount in net.items() if amount > 0]
    return tuple(
        sorted(kept, key=lambda flow: (flow.source, -found.hop[flow.source, flow.dest], -flow.amount, flow.dest))
    )
