"""Turns a machine into how many pieces each of its wires carries, so that every rank can have all pieces.

Assumes that every rank wants what is given. Blocks are cut into equal pieces, of which a wire carries a whole number in
a time; the least time is sought in which every cut lets through what has to cross it (ForestColl, Zhao et al. 2024).
What several wires share, a GPU's port, is shared out first, as the best flows use it: what is left are wires that carry
by themselves, on which spanning trees can be packed (Edmonds 1973). Does not pack them. Needs scipy.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from commdsl.cost.flows import copied, flow_value, limits, strongest
from commdsl.cost.graph import Floats, Graph, Longs
from commdsl.language.records import dataclass

SLACK = 1.5
"""Whole numbers are sought up to so many times the least time."""

TRIES = 40
"""So many next times are tried where rounding took from a wire what a cut needs."""


class UnreachedError(ValueError):
    """Some rank cannot be reached from one that gives something."""


@dataclass(frozen=True, eq=False)
class Carried:
    """`pieces[a, b]`: how many pieces go from rank a to rank b at most, in `seconds` for each byte of a block."""

    pieces: Longs
    seconds: float


class Network:
    """A machine on which rank r gives `given[r]` blocks to all others."""

    def __init__(self, graph: Graph, given: Longs) -> None:
        """Raises UnreachedError."""
        self.wires, self.given, self.num_ranks = graph.wires, given, graph.num_ranks
        uses, self.most = limits(graph.wires, graph.num_ranks)
        self.limits_of = np.split(uses.tocsc().indices, uses.tocsc().indptr[1:-1])
        is_shared = np.asarray(uses.sum(axis=1)).ravel() > 1
        self.shares = np.array([bool(is_shared[some].any()) for some in self.limits_of], np.bool_)
        blocks, everyone = given.astype(np.float64), np.ones(graph.num_ranks, np.bool_)
        self.least, reason = strongest(blocks, everyone, graph, "out of", "into")
        if not np.isfinite(self.least):
            raise UnreachedError(reason)
        self.speeds = np.array([self.most[some].min() for some in self.limits_of])
        if self.shares.any():
            self.least, amounts = copied(blocks, everyone, graph.wires)
            self.speeds = np.where(self.shares, amounts / self.least, self.speeds)

    def carried(self, pieces: int) -> Carried | None:
        """For blocks cut into so many pieces; None where whole numbers take too long."""
        times = self.times(pieces).tolist()
        # As if of a longer time no wire carried less.
        first = bisect_left(times, True, key=lambda time: self.suffices(self.edges(time, pieces), pieces))
        for time in times[first : first + TRIES]:
            found = self.edges(time, pieces)
            if self.suffices(found, pieces):
                return Carried(found, time)
        return None

    def times(self, pieces: int) -> Floats:
        """When one more piece fits over a wire or through a port; the first is the least itself."""
        found = [np.array([self.least])]
        for speed in np.unique([*self.speeds[self.speeds > 0], *self.most]):
            begin, end = (np.floor(slack * self.least * pieces * speed) + 1 for slack in (1.0, SLACK))
            found.append(np.arange(begin, end) / (pieces * speed))
        return np.unique(np.concatenate(found))

    def edges(self, time: float, pieces: int) -> Longs:
        """(P, P): how many pieces a wire carries, for so many seconds a byte of a block. What rounding leaves of what
        is shared goes, one piece at a time, to the wires that lost most.
        """
        wanted = np.minimum(self.speeds * time * pieces, self.given.sum() * pieces)
        found = np.floor(wanted + 1e-6).astype(np.int64)
        left = np.floor(self.most * time * pieces + 1e-6).astype(np.int64)
        for at, some in enumerate(self.limits_of):
            left[some] -= found[at]
        active = [at for at in np.argsort(found - wanted, kind="stable").tolist() if self.shares[at]]
        while active:
            active = [at for at in active if left[self.limits_of[at]].min() > 0]
            for at in active:
                if left[self.limits_of[at]].min() > 0:
                    found[at] += 1
                    left[self.limits_of[at]] -= 1
        edges = np.zeros((self.num_ranks, self.num_ranks), np.int64)
        edges[self.wires.source, self.wires.dest] = found
        return edges

    def suffices(self, edges: Longs, pieces: int) -> bool:
        """Whether every rank can get all pieces."""
        start, total = self.num_ranks, int(self.given.sum()) * pieces
        network = np.pad(edges, (0, 1))
        network[start, :start] = self.given * pieces
        return all(flow_value(network, start, rank) >= total for rank in range(start))
