"""Turns loads of ranks into flows of load between linked ranks, along the shortest ways from too much to too little.

Assumes that load is divisible. A way over several links becomes a flow over each: every rank on it passes on load of
its own, as a document goes from its home to its destination at once. Does not know documents.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf
from typing import NamedTuple

import numpy as np

from commdsl.machine.topology import Floats, Ways


class Flow(NamedTuple):
    """So much load goes from one rank to another, over a direct link."""

    source: int
    dest: int
    amount: float


def flows(load: Floats, most: float, found: Ways) -> tuple[Flow, ...]:
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
            left, near = float(over[source]), np.where(found.distance[source] <= level, room, 0.0)
            while left > 0:
                dest = int(near.argmax())
                amount = min(left, float(near[dest]))
                if amount <= 0:
                    break
                left -= amount
                near[dest] = room[dest] = room[dest] - amount
                for link in pairwise(found.way(source, dest)):
                    links[link] = links.get(link, 0.0) + amount
            over[source] = left
    return _net(links, found)


def _levels(found: Ways, over: Floats, room: Floats) -> list[float]:
    """The distances there are from too much to too little, nearest first, those alike to a thousandth as one."""
    apart = found.distance[(over > 0).nonzero()[0][:, None], (room > 0).nonzero()[0]]
    levels: list[float] = []
    for distance in sorted({*apart.ravel().tolist()} - {inf}):
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
