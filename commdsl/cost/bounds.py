"""Turns a contract into the least time any schedule needs for it on a topology: a latency bound and a bandwidth bound.

Assumes resolved contracts. The bounds hold for the model of `cost`: what goes over a link takes its latency, and no
port or pair carries more than its rate. Data may be cut as finely as one likes and combined on any rank, but not in a
switch. Does not look at the schedule.

A value that ranks S contribute to and ranks D want takes at least |S| + |D| - 2 transfers between ranks, one more if
S and D are disjoint: |S| - 1 until the first rank has all of it, then one into each other rank that wants it. With
groups of ranks (the nodes) for ranks the same count holds for what crosses between groups. Every rank must also take
in what it wants and has not, and give out what others want of it. Only values that share no contributions are
counted: from values that do, one may follow from the others. Where links differ, `flows` finds stronger cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commdsl.cost.demand import Demand, Floats, Longs, all_demands
from commdsl.cost.flows import flow_bounds
from commdsl.cost.graph import Graph, graph_of, is_plain
from commdsl.ir.schedules import Schedule
from commdsl.language.records import dataclass
from commdsl.machine.topology import NO_LINK, Topology, link_of, pair_bandwidth

EXACT_DISTANCE_RANKS = 256
"""Up to so many ranks, shortest paths over relays are computed; beyond, one hop of the right kind is the bound."""

CUT_RANKS = 32
"""Up to so many ranks, cuts into two runs of neighbours are tried where links are capped per pair."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The least time is at least latency + seconds_per_byte * block_bytes; `reason` says what binds the bandwidth."""

    latency: float
    seconds_per_byte: float
    reason: str


def limit(schedule: Schedule) -> Limit:
    """The strongest of the bounds of all contracts."""
    network = _Network.of(schedule.topology, schedule.num_ranks)
    best = Limit(0.0, 0.0, "nothing has to move")
    for demand in all_demands(schedule):
        seconds, reason = _bandwidth(demand, network)
        latency = max(best.latency, _latency(demand, network))
        if seconds > best.seconds_per_byte:
            best = Limit(latency, seconds, reason)
        else:
            best = Limit(latency, best.seconds_per_byte, best.reason)
    return best


# --- the machine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Network:
    """What ranks and nodes can send and receive, in bytes per second, and the least latency between two ranks."""

    num_ranks: int
    node_of: Longs
    rank_bandwidth: tuple[Floats, Floats]  # out, in
    node_bandwidth: tuple[Floats, Floats]
    pair_latency: Floats  # (num_ranks, num_ranks), inf where one cannot reach the other
    hops: Floats  # likewise: the least number of links from one to the other
    pair_capacity: Floats | None  # (num_ranks, num_ranks) if every link is capped per pair
    graph: Graph | None  # None where it is so plain that no cut is stronger than that of one rank

    @staticmethod
    def of(topology: Topology, num_ranks: int) -> _Network:
        ranks = np.arange(num_ranks)
        source, dest = ranks[:, None], ranks[None, :]
        links = link_of(topology, source, dest)
        linked = links != NO_LINK
        pairs = np.where(linked, pair_bandwidth(topology, source, dest, links), 0.0)
        node_of = (ranks // topology.gpus_per_node).astype(np.int64)
        crosses = node_of[:, None] != node_of[None, :]
        latencies = np.array([link.latency for link in topology.links] or [np.inf])
        latency = np.where(linked, latencies[links], np.inf)
        np.fill_diagonal(latency, 0.0)
        shortest = _shortest if num_ranks <= EXACT_DISTANCE_RANKS else partial(_one_hop, crosses=crosses)
        capped = not any(link.has_ports for link in topology.links)
        return _Network(
            num_ranks,
            node_of,
            _port_bandwidth(topology, links, pairs, np.ones_like(crosses)),
            tuple(  # type: ignore[arg-type]
                np.bincount(node_of, side) for side in _port_bandwidth(topology, links, pairs, crosses)
            ),
            shortest(latency),
            shortest(np.where(linked, 1.0, latency)),
            pairs if capped else None,
            None if is_plain(topology, num_ranks) else graph_of(topology, num_ranks),
        )


def _port_bandwidth(
    topology: Topology, links: NDArray[np.int32], pairs: Floats, counted: NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """What each rank can send and receive to counted pairs, over all its links: the port's cap or its pairs' sum."""
    out = np.zeros(len(links))
    into = np.zeros(len(links))
    ranks = np.arange(len(links))
    for index, link in enumerate(topology.links):
        share = np.where((links == index) & counted, pairs, 0.0)
        out += np.minimum(link.port_rate(ranks), share.sum(axis=1))
        into += np.minimum(link.port_rate(ranks), share.sum(axis=0))
    return out, into


def _shortest(latency: Floats) -> Floats:
    """Least latency over any relays: min-plus squaring until nothing changes."""
    while True:
        relayed = np.stack([(latency[rank][:, None] + latency).min(axis=0) for rank in range(len(latency))])
        if np.array_equal(relayed, latency):
            return latency
        latency = relayed


def _one_hop(latency: Floats, crosses: NDArray[np.bool_]) -> Floats:
    """A bound without relays: no way between two ranks is shorter than the shortest link of its kind."""
    apart = ~np.eye(len(latency), dtype=np.bool_)
    least = np.zeros_like(latency)
    for kind in (crosses, ~crosses & apart):
        least[kind] = latency[kind].min(initial=np.inf)
    return least


# --- bounds -----------------------------------------------------------------------------------------------------------


def _latency(demand: Demand, network: _Network) -> float:
    """The farthest way a contribution has to go; for values with many sources the farthest of all their ranks."""
    table = np.zeros((network.num_ranks, network.num_ranks), dtype=np.bool_)
    single = np.bincount(demand.source_value, minlength=demand.num_values) == 1
    source_of = np.zeros(demand.num_values, dtype=np.int64)
    source_of[demand.source_value] = demand.source_rank
    alone = single[demand.dest_value]
    table[source_of[demand.dest_value[alone]], demand.dest_rank[alone]] = True
    seen: set[bytes] = set()
    starts = np.searchsorted(demand.source_value, np.arange(demand.num_values + 1))
    ends = np.searchsorted(demand.dest_value, np.arange(demand.num_values + 1))
    for value in np.flatnonzero(~single):
        sources = demand.source_rank[starts[value] : starts[value + 1]]
        dests = demand.dest_rank[ends[value] : ends[value + 1]]
        key = sources.tobytes() + b"|" + dests.tobytes()
        if key not in seen:
            seen.add(key)
            table[np.ix_(sources, dests)] = True
    needed = network.pair_latency[table]
    return float(needed.max(initial=0.0))


def _farthest(demand: Demand, network: _Network) -> Floats:
    """The links every value has to pass at least: the longest way from its only source, or to its only destination."""
    farthest = np.zeros(demand.num_values)
    for ends, fixed, others in (
        ((demand.source_value, demand.source_rank), (demand.dest_value, demand.dest_rank), network.hops),
        ((demand.dest_value, demand.dest_rank), (demand.source_value, demand.source_rank), network.hops.T),
    ):
        alone = np.bincount(ends[0], minlength=demand.num_values) == 1
        start = np.zeros(demand.num_values, dtype=np.int64)
        start[ends[0]] = ends[1]
        rows = alone[fixed[0]]
        np.maximum.at(farthest, fixed[0][rows], others[start[fixed[0][rows]], fixed[1][rows]])
    return farthest


def _bandwidth(demand: Demand, network: _Network) -> tuple[float, str]:
    """Seconds per byte of a block, and what binds."""
    bounds = [
        *_group_bounds(demand, network.rank_bandwidth, "between ranks", "rank {}".format, _farthest(demand, network)),
        *_group_bounds(demand.grouped(network.node_of), network.node_bandwidth, "between nodes", "node {}".format),
    ]
    if network.pair_capacity is not None and network.num_ranks <= CUT_RANKS:
        bounds += _cut_bounds(demand, network.pair_capacity)
    if network.graph is not None:
        bounds += flow_bounds(demand, network.graph)
    return max(bounds, key=lambda bound: bound[0], default=(0.0, "nothing has to move"))


def _group_bounds(
    demand: Demand,
    bandwidth: tuple[Floats, Floats],
    between: str,
    name: Callable[[int], str],
    least_transfers: NDArray[np.number[Any]] | int = 0,
) -> list[tuple[float, str]]:
    """All that crosses between groups against what they can send in all; what each takes in and gives out."""
    num_groups = len(bandwidth[0])
    if num_groups == 1:
        return []
    source_key = demand.source_value * num_groups + demand.source_rank  # sorted, as is the next
    dest_key = demand.dest_value * num_groups + demand.dest_rank
    is_source = _member(dest_key, source_key)
    sources = np.bincount(demand.source_value, minlength=demand.num_values)
    dests = np.bincount(demand.dest_value, minlength=demand.num_values)
    both = np.bincount(demand.dest_value[is_source], minlength=demand.num_values)
    transfers = np.where(dests > 0, np.maximum(sources + dests - 2 + (both == 0), least_transfers), 0)
    total = float((transfers * demand.size).sum())
    bounds = [(_seconds(total, float(bandwidth[0].sum())), f"{total:.4g} n {between}")]
    needs = ~(is_source & (sources[demand.dest_value] == 1))
    into = np.bincount(demand.dest_rank[needs], demand.size[demand.dest_value[needs]], minlength=num_groups)
    bounds.append(_busiest(into, bandwidth[1], "into", name))
    serves_itself = _member(source_key, dest_key)
    gives = (dests[demand.source_value] - serves_itself) > 0
    out = np.bincount(demand.source_rank[gives], demand.size[demand.source_value[gives]], minlength=num_groups)
    bounds.append(_busiest(out, bandwidth[0], "out of", name))
    return bounds


def _member(keys: Longs, among: Longs) -> NDArray[np.bool_]:
    """Which keys are among the others, which are sorted."""
    if len(among) == 0:
        return np.zeros(len(keys), dtype=np.bool_)
    found: NDArray[np.bool_] = among[np.minimum(np.searchsorted(among, keys), len(among) - 1)] == keys
    return found


def _busiest(
    blocks: NDArray[np.number[Any]], bandwidth: Floats, direction: str, name: Callable[[int], str]
) -> tuple[float, str]:
    seconds = np.array([_seconds(float(size), float(cap)) for size, cap in zip(blocks, bandwidth, strict=True)])
    at = int(seconds.argmax())
    return float(seconds[at]), f"{blocks[at]:.4g} n {direction} {name(at)}"


def _seconds(blocks: float, bandwidth: float) -> float:
    return 0.0 if blocks == 0 else float("inf") if bandwidth == 0 else blocks / bandwidth


def _cut_bounds(demand: Demand, capacity: Floats) -> Iterator[tuple[float, str]]:
    """Cuts a run of neighbouring ranks off: what each side wants of the other, against the pairs across."""
    num_ranks = len(capacity)
    ranks = np.arange(num_ranks)
    lengths = {num_ranks // 2, *(1 << power for power in range(1, num_ranks.bit_length() - 1))}
    for length in sorted(lengths & set(range(2, num_ranks))):
        for first in range(num_ranks):
            inside = (ranks - first) % num_ranks < length
            across = np.array([capacity[inside][:, ~inside].sum(), capacity[~inside][:, inside].sum()])
            names = ("the other ranks", f"ranks {first}..{(first + length - 1) % num_ranks}")
            bandwidth = across[::-1], across  # out of the others and out of the run; into each
            halves = demand.grouped(inside.astype(np.int64))
            yield from _group_bounds(halves, bandwidth, f"in and out of {names[1]}", names.__getitem__)
