"""Turns a plan and a topology into loads: each rank's rows and attention, what crosses each class of links.

Assumes a plan without a fault. Counts one dispatch there: queries, keys and values; the way back carries the same rows.
Attention is counted in pairs of a query token and a key token that the mask lets see each other, exactly; its FLOPs are
4 x heads x head size for a pair forward. Does not measure anything, and does not move anything; `planner` does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.plans import DispatchPlan, routing
from commdsl.ir.routes import Longs, Mask, totals
from commdsl.machine.topology import NO_LINK, Link, Topology, link_of, pair_bandwidth, users_text


@dataclass(frozen=True, slots=True)
class Widths:
    """Bytes of one row of queries, keys and values: 4096, 1024 and 1024 elements of 2 bytes unless said."""

    query: int = 8192
    key: int = 2048
    value: int = 2048

    @property
    def pair(self) -> int:
        """Of a key and its value, which travel together."""
        return self.key + self.value


@dataclass(frozen=True, slots=True)
class Port:
    """What goes out of a port, or into it, over links of one class. It is that of so many ranks from `rank` on."""

    rank: int
    sends: bool
    bytes: int
    sharing: int = 1

    @property
    def who(self) -> str:
        """`rank 3 sends`, `ranks 4 to 7 receive`."""
        return users_text(self.rank, self.sharing, sends=self.sends)


@dataclass(frozen=True, slots=True)
class LinkLoad:
    """What one dispatch sends over the links of one class; `name` is None for ranks without a link."""

    name: str | None
    query_rows: int
    key_rows: int
    bytes: int
    port: Port  # the busiest
    seconds: float  # of the busiest port or pair; inf without a link


@dataclass(frozen=True, eq=False)
class Balance:
    """The loads of a plan on a topology; P is its number of ranks."""

    topology: Topology
    widths: Widths
    attention: Longs  # (P,): pairs of tokens; 0 for a plan of rows only
    home_rows: Longs  # (P,): rows before the dispatch
    query_rows: Longs  # (P,): received, from the rank itself, too
    key_rows: Longs  # (P,)
    query_counts: Longs  # (P, P): rows that rank r receives from rank s, at [r, s]
    key_counts: Longs  # (P, P)
    links: tuple[LinkLoad, ...]  # of every class in use, in the topology's order; None last

    @property
    def bytes(self) -> Longs:
        """(P, P): what rank r receives from rank s, at [r, s]; 0 from itself."""
        found = self.query_counts * self.widths.query + self.key_counts * self.widths.pair
        np.fill_diagonal(found, 0)
        return found

    @property
    def sent_bytes(self) -> Longs:
        """(P,), to other ranks."""
        found: Longs = self.bytes.sum(axis=0)
        return found

    @property
    def received_bytes(self) -> Longs:
        """(P,), from other ranks."""
        found: Longs = self.bytes.sum(axis=1)
        return found

    @property
    def seconds(self) -> float:
        """The least time of the dispatch: that of the slowest port or pair."""
        return max((link.seconds for link in self.links), default=0.0)


def imbalance(loads: Longs) -> float:
    """By how much the most loaded is above the mean: 0.05 is 5 %; 0 where there is no load."""
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total - 1 if total else 0.0


def attention(plan: DispatchPlan) -> Longs:
    """(n,): the pairs of tokens that each shard's queries attend to, 0 for a shard that stays unsent."""
    length = plan.shards.length
    sent = plan.dest[:, 0] >= 0
    match plan.mask:
        case None:
            return np.zeros_like(length)
        case Mask.CAUSAL:
            return np.where(sent, length * plan.context + length * (length + 1) // 2, 0)
        case Mask.FULL:
            of_document = totals(plan.document, length, int(plan.document.max(initial=-1)) + 1)
            return np.where(sent, length * of_document[plan.document], 0)


def balance(plan: DispatchPlan, topology: Topology, widths: Widths) -> Balance:
    """The loads of a plan. Raises ValueError if the topology has another number of ranks."""
    ranks = plan.num_ranks
    if topology.num_ranks != ranks:
        raise ValueError(f"`{plan.name}` is for {ranks} ranks, `{topology.name}` has {topology.num_ranks}")
    made = routing(plan)
    query_counts = made.queries.counts
    key_counts = made.keys.counts if made.keys else np.zeros_like(query_counts)
    pairs = attention(plan)
    sent = plan.dest[:, 0] >= 0
    return Balance(
        topology=topology,
        widths=widths,
        attention=totals(plan.dest[sent, 0], pairs[sent], ranks),
        home_rows=plan.shards.rows,
        query_rows=query_counts.sum(axis=1),
        key_rows=key_counts.sum(axis=1),
        query_counts=query_counts,
        key_counts=key_counts,
        links=_links(topology, widths, query_counts, key_counts),
    )


def byte_links(topology: Topology, sizes: Longs) -> tuple[LinkLoad, ...]:
    """What so many bytes load the links with: rank r receives those at [r, s] from rank s."""
    return _links(topology, Widths(1, 0, 0), sizes, np.zeros_like(sizes))


def _links(topology: Topology, widths: Widths, query_counts: Longs, key_counts: Longs) -> tuple[LinkLoad, ...]:
    dest, source = np.nonzero((query_counts + key_counts) * (1 - np.eye(topology.num_ranks, dtype=np.int64)))
    link = link_of(topology, source, dest)
    queries, keys = query_counts[dest, source], key_counts[dest, source]
    size = queries * widths.query + keys * widths.pair
    found: list[LinkLoad] = []
    for index in [*range(len(topology.links)), NO_LINK]:
        there = link == index
        if there.any():
            rows = int(queries[there].sum()), int(keys[there].sum())
            over = None if index == NO_LINK else topology.links[index]
            name = None if over is None else over.name
            port = _busiest(over, source[there], dest[there], size[there], topology.num_ranks)
            seconds = _seconds(topology, index, port, source[there], dest[there], size[there])
            found.append(LinkLoad(name, *rows, int(size[there].sum()), port, seconds))
    return tuple(found)


def _busiest(over: Link | None, source: Longs, dest: Longs, size: Longs, ranks: int) -> Port:
    """The port of a class that takes longest; the fullest where ports have no limit, or ranks no link."""
    ends = (source, dest) if over is None else (over.port(source), over.port(dest))
    loads = zip((totals(end, size, ranks) for end in ends), (True, False), strict=True)
    sharing = 1 if over is None else over.sharing
    found: list[tuple[float, Port]] = []
    for load, sends in loads:
        times = load if over is None or not over.has_ports else over.port_seconds(load)
        at = int(times.argmax())
        found.append((float(times[at]), Port(at, sends, int(load[at]), sharing)))
    return max(found, key=lambda one: one[0])[1]


def _seconds(
    topology: Topology, index: int, port: Port, source: NDArray[np.int64], dest: NDArray[np.int64], size: Longs
) -> float:
    """The time of a class's busiest port or slowest pair."""
    if index == NO_LINK:
        return float("inf")
    alone = size / pair_bandwidth(topology, source, dest, np.full(len(size), index, np.int32))
    rate = float(topology.links[index].port_rate(np.array(port.rank)))
    return max(port.bytes / rate, float(alone.max()))
