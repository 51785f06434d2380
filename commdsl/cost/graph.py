"""Turns a machine into what can flow between its ranks: a graph with vertices for ports and switches, and its wires.

Assumes the first ranks of a topology. What may flow without a limit has capacity `inf`. Does not know what is to flow.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.language.kinds import LinkScope
from commdsl.language.records import dataclass
from commdsl.machine.topology import NO_LINK, Link, Topology, link_of, pair_bandwidth

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Wires:
    """Every ordered pair of linked ranks, with its capacity, and the class of links that shares ports with it."""

    source: Longs
    dest: Longs
    capacity: Floats
    link: Longs
    ports: Floats  # what goes through one, by class of links and rank
    sharing: Longs  # how many ranks have one, by class of links

    @property
    def reversed(self) -> Wires:
        return Wires(self.dest, self.source, self.capacity, self.link, self.ports, self.sharing)


@dataclass(frozen=True, eq=False)
class Graph:
    """Directed edges with capacities in bytes per second; the first `num_ranks` vertices are the ranks.

    A port may hand one thing to several, which no GPU's does. That makes no difference where the ports of a class of
    links are those of a switch (`is_switched`): what comes in of them is what goes out.
    """

    num_ranks: int
    num_vertices: int
    source: Longs
    dest: Longs
    capacity: Floats
    wires: Wires
    is_switched: bool
    is_symmetric: bool  # every rank stands as every other

    @property
    def reversed(self) -> Graph:
        kinds = self.wires.reversed, self.is_switched, self.is_symmetric
        return Graph(self.num_ranks, self.num_vertices, self.dest, self.source, self.capacity, *kinds)

    def leaving(self, inside: NDArray[np.bool_]) -> float:
        """What can flow out of a set of vertices."""
        return float(self.capacity[inside[self.source] & ~inside[self.dest]].sum())


def graph_of(topology: Topology, num_ranks: int) -> Graph:
    made = _Maker(num_ranks)
    ranks = np.arange(num_ranks)
    links = link_of(topology, ranks[:, None], ranks[None, :])
    pairs = pair_bandwidth(topology, ranks[:, None], ranks[None, :], links)
    for index, link in enumerate(topology.links):
        made.link(link, links == index, pairs, ranks // topology.gpus_per_node, ranks % topology.gpus_per_node)
    source, dest = (np.concatenate([np.zeros(0, np.int64), *column]) for column in (made.source, made.dest))
    capacity = np.concatenate([np.zeros(0), *made.capacity])
    here, there = np.nonzero(links != NO_LINK)
    ports = np.array([link.port_rate(ranks) for link in topology.links]).reshape(-1, num_ranks)
    sharing = np.array([link.sharing for link in topology.links])
    wires = Wires(here, there, pairs[here, there], links[here, there].astype(np.int64), ports, sharing)
    kinds = made.is_switched, _is_symmetric(topology, num_ranks)
    return Graph(num_ranks, made.count, source, dest, capacity, wires, *kinds)


def is_plain(topology: Topology, num_ranks: int) -> bool:
    """One node whose ranks have one kind of link to each other: no cut is stronger than that of a single rank."""
    is_one = num_ranks <= topology.gpus_per_node and len(topology.links) == 1 and topology.links[0].sharing == 1
    return is_one and _is_symmetric(topology, num_ranks)


def _is_symmetric(topology: Topology, num_ranks: int) -> bool:
    are_alike = all(link.is_uniform and link.pairs is None and num_ranks % link.sharing == 0 for link in topology.links)
    are_whole = num_ranks <= topology.gpus_per_node or num_ranks % topology.gpus_per_node == 0
    return are_alike and are_whole and not topology.missing and not topology.degraded


class _Maker:
    def __init__(self, num_ranks: int) -> None:
        self.count = num_ranks
        self.is_switched = True
        self.ranks = np.arange(num_ranks)
        self.source: list[Longs] = []
        self.dest: list[Longs] = []
        self.capacity: list[Floats] = []

    def link(self, link: Link, has: NDArray[np.bool_], pairs: Floats, node: Longs, gpu: Longs) -> None:
        """A class of links: through ports, where a GPU has one for all of them."""
        if not has.any():
            return
        if not link.has_ports:
            source, dest = np.nonzero(has)
            self.edges(source, dest, pairs[source, dest])
            return
        if link.sharing > 1:
            self.shared(link, has, pairs)
            return
        out, into = self.vertices(len(has)), self.vertices(len(has))
        rates = link.port_rate(self.ranks)
        self.edges(self.ranks, out, rates)
        self.edges(into, self.ranks, rates)
        group = node if link.scope is LinkScope.IN_NODE else gpu
        is_free = bool(np.isinf(pairs[has]).all())
        if is_free and np.array_equal(has, (group[:, None] == group[None, :]) & ~np.eye(len(has), dtype=np.bool_)):
            switch = self.vertices(int(group.max()) + 1)[group]
            self.edges(out, switch, np.inf)
            self.edges(switch, into, np.inf)
        elif is_free and np.array_equal(has, node[:, None] != node[None, :]):
            self.spine(out, into, node)
            self.is_switched &= bool(np.ptp(np.bincount(node, rates)) == 0) and int(node.max()) == 1
        else:
            self.is_switched = False
            source, dest = np.nonzero(has)
            self.edges(out[source], into[dest], pairs[source, dest])

    def shared(self, link: Link, has: NDArray[np.bool_], pairs: Floats) -> None:
        """Through ports of several GPUs, of which this graph forgets who put in what."""
        self.is_switched = False
        port = self.ranks // link.sharing
        count = int(port.max()) + 1
        out, sent, come, into = (self.vertices(count) for _ in range(4))
        self.edges(self.ranks, out[port], np.inf)
        rates = link.port_rate(np.arange(count) * link.sharing)
        self.edges(out, sent, rates)
        source, dest = np.nonzero(has)
        between = np.zeros((count, count))
        np.add.at(between, (port[source], port[dest]), pairs[source, dest])
        here, there = np.nonzero(between)
        self.edges(sent[here], come[there], between[here, there])
        self.edges(come, into, rates)
        self.edges(into[port], self.ranks, np.inf)

    def spine(self, out: Longs, into: Longs, node: Longs) -> None:
        """From every node to all others, but not back to itself: one way through later nodes, one through earlier."""
        count = int(node.max()) + 1
        for up in (True, False):
            level = self.vertices(count)
            chain = (level[:-1], level[1:]) if up else (level[1:], level[:-1])
            self.edges(*chain, np.inf)
            beside = node + 1 if up else node - 1
            there = (beside >= 0) & (beside < count)
            self.edges(out[there], level[beside[there]], np.inf)
            self.edges(level[node], into, np.inf)

    def vertices(self, count: int) -> Longs:
        self.count += count
        return np.arange(self.count - count, self.count)

    def edges(self, source: Longs, dest: Longs, capacity: Floats | float) -> None:
        self.source.append(source)
        self.dest.append(dest)
        self.capacity.append(np.broadcast_to(np.asarray(capacity, np.float64), source.shape))
