"""A machine: which rank can send to which, how fast, through which shared ports.

Assumes ranks are GPUs in order: rank = node * gpus + gpu. Does not read `.comm` text; `resolve` builds these.
"""

from __future__ import annotations

from dataclasses import field
from functools import cached_property
from typing import Any, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.language.kinds import LinkScope
from commdsl.language.records import dataclass
from commdsl.language.source import Span

Floats = NDArray[np.float64]

Rate: TypeAlias = float | tuple[float, ...]
"""Bytes per second (inf: not capped): the same for all, or by rank, of the whole topology."""


def by_rank(rate: Rate, rank: NDArray[np.integer]) -> Floats:
    return np.full(rank.shape, rate) if isinstance(rate, float) else np.array(rate)[rank]


def slowest(rate: Rate) -> float:
    return rate if isinstance(rate, float) else min(rate)


def gigabytes(rate: Rate) -> str:
    """A rate in GB/s: `450`, or `300 to 450` where it differs."""
    least, most = slowest(rate), rate if isinstance(rate, float) else max(rate)
    return f"{least / 1e9:g}" if least == most else f"{least / 1e9:g} to {most / 1e9:g}"


@dataclass(frozen=True)
class Link:
    """A class of links. `port_bandwidth` caps what goes out of a port (and, apart, into it), `pair_bandwidth` each
    ordered pair. A port is of one GPU, or of so many of a node, side by side, as `sharing` says. What differs from rank
    to rank is that of who has the port, or sends.

    Latency in seconds. `pairs` is None unless scope is PAIRS or ARCS:
    then an int32 array (n, 2) of directed pairs of node-local GPU indices.
    """

    name: str
    scope: LinkScope
    port_bandwidth: Rate
    pair_bandwidth: Rate
    latency: float
    pairs: NDArray[np.int32] | None = None
    sharing: int = 1

    def port(self, rank: NDArray[np.int64]) -> NDArray[np.int64]:
        """The first rank of each rank's port."""
        found: NDArray[np.int64] = rank // self.sharing * self.sharing
        return found

    @property
    def has_ports(self) -> bool:
        """Whether ports are what is capped."""
        return self.port_bandwidth != np.inf

    @property
    def is_uniform(self) -> bool:
        return isinstance(self.port_bandwidth, float) and isinstance(self.pair_bandwidth, float)

    @property
    def words(self) -> str:
        per = "gpu" if self.sharing == 1 else f"{self.sharing} gpus"
        caps = f"{gigabytes(self.port_bandwidth)} GB/s per {per}, {gigabytes(self.pair_bandwidth)} GB/s per pair"
        return f"{self.name} {self.scope.value}: {caps}, {self.latency * 1e6:g} us"

    def port_rate(self, rank: NDArray[np.integer]) -> Floats:
        """What the port of each rank carries."""
        return by_rank(self.port_bandwidth, rank)

    def port_seconds(self, load: NDArray[np.number[Any]]) -> Floats:
        """How long each rank's port takes for what it carries, by rank from 0 on."""
        return np.asarray(load / self.port_rate(np.arange(len(load))), np.float64)


@dataclass(frozen=True)
class Axis:
    """A direction in which the GPUs of a node are counted: the next GPU is `stride` further, of `length` in a row."""

    name: str
    length: int
    stride: int

    def place(self, gpu: NDArray[np.int32]) -> NDArray[np.int32]:
        """How far along each GPU is."""
        return gpu // self.stride % self.length


@dataclass(frozen=True, eq=False)
class Ways:
    """How far ranks are from each other: (P, P), in seconds per byte."""

    hop: Floats  # over a direct link, inf without one, 0 to itself

    @cached_property
    def linked(self) -> NDArray[np.bool_]:
        """Whether there is a direct link, or none is needed."""
        return np.isfinite(self.hop)

    @cached_property
    def distance(self) -> Floats:
        """Over the shortest way."""
        found = self.hop
        if self.linked.all():
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


@dataclass(frozen=True)
class Topology:
    """`num_nodes` nodes of `gpus_per_node`, each GPU with `num_sms` streaming multiprocessors."""

    name: str
    num_nodes: int
    gpus_per_node: int
    num_sms: int
    links: tuple[Link, ...]
    missing: frozenset[tuple[int, int]] = frozenset()  # directed pairs of ranks
    degraded: tuple[tuple[int, int, float], ...] = ()  # (source, destination, bytes per second)
    axes: tuple[Axis, ...] = ()  # of the GPUs of a node, the last counts fastest
    idealised: bool = False  # made up for a rank count no shipped machine has: one flat switch
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def words(self) -> str:
        axes = ", ".join(f"{axis.name} = {axis.length}" for axis in self.axes)
        gpus = f"{self.gpus_per_node} GPUs{f' ({axes})' if axes else ''}"
        return f"{self.name}: {self.num_nodes} × {gpus} of {self.num_sms} SMs"

    @cached_property
    def ways(self) -> Ways:
        """By bandwidth alone, as what is sent is large; a link without a cap still costs its latency for a MB."""
        ranks = np.arange(self.num_ranks)
        source, dest = np.broadcast_arrays(ranks[:, None], ranks[None, :])
        link = link_of(self, source, dest)
        if not self.links:
            return Ways(np.where(source == dest, 0.0, np.inf))
        latency = np.array([one.latency for one in self.links])[link] / (1 << 20)
        hop = 1 / wire_bandwidth(self, source, dest, link) + latency
        hop[link == NO_LINK] = np.inf
        np.fill_diagonal(hop, 0.0)
        return Ways(hop)


def users_text(rank: int, sharing: int, *, sends: bool) -> str:
    """Whose port it is that so many ranks have from this one on, and what they do: `rank 3 sends`."""
    verb = "send" if sends else "receive"
    return f"rank {rank} {verb}s" if sharing == 1 else f"ranks {rank} to {rank + sharing - 1} {verb}"


def switch(num_ranks: int) -> Topology:
    """An idealised machine for any number of ranks: one flat switch of GPUs with the ports of an H200."""
    link = Link("switch", LinkScope.IN_NODE, port_bandwidth=450e9, pair_bandwidth=np.inf, latency=0.7e-6)
    return Topology("switch", 1, num_ranks, 132, (link,), idealised=True)


NO_LINK = -1


def link_of(topology: Topology, source: NDArray[np.integer], dest: NDArray[np.integer]) -> NDArray[np.int32]:
    """The index into `links` of the first declared link from each source to each destination, or NO_LINK.

    A rank has no link to itself: a copy needs none.
    """
    gpus = topology.gpus_per_node
    source_gpu, dest_gpu = source % gpus, dest % gpus
    same_node = source // gpus == dest // gpus
    found = np.full(np.broadcast_shapes(source.shape, dest.shape), NO_LINK, dtype=np.int32)
    for index in reversed(range(len(topology.links))):
        link = topology.links[index]
        match link.scope:
            case LinkScope.IN_NODE:
                has = same_node
            case LinkScope.ACROSS_SAME_GPU:
                has = ~same_node & (source_gpu == dest_gpu)
            case LinkScope.ACROSS_NODES:
                has = ~same_node
            case LinkScope.PAIRS | LinkScope.ARCS:
                has = same_node & _are_joined(link, gpus, source_gpu, dest_gpu)
            case _:
                assert_never(link.scope)
        found[has] = index
    for missing_source, missing_dest in sorted(topology.missing):
        found[(source == missing_source) & (dest == missing_dest)] = NO_LINK
    found[source == dest] = NO_LINK
    return found


def overlap(first: Link, second: Link) -> str:
    """Where the second link is declared for what the first is between already, in words; nothing where it is for the
    rest: a general link behind a special one.
    """
    listed = (LinkScope.PAIRS, LinkScope.ARCS)
    sides = [link.scope in (LinkScope.IN_NODE, *listed) for link in (first, second)]
    if sides[0] != sides[1]:
        return ""
    if first.pairs is not None and second.pairs is not None:
        both = {*map(tuple, first.pairs.tolist())} & {*map(tuple, second.pairs.tolist())}
        return "GPUs {} and {}".format(*min(both)) if both else ""
    is_special = first.scope in (LinkScope.ACROSS_SAME_GPU, *listed)
    return "" if is_special and first.scope is not second.scope else "all of them"


def _are_joined(link: Link, gpus: int, source: NDArray[np.integer], dest: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Whether a link of pairs of GPUs is from each source to each destination; no table, as a node may be large."""
    assert link.pairs is not None
    pairs = link.pairs.astype(np.int64)
    joined: NDArray[np.bool_] = np.isin(source.astype(np.int64) * gpus + dest, pairs[:, 0] * gpus + pairs[:, 1])
    return joined


def pair_bandwidth(
    topology: Topology, source: NDArray[np.integer], dest: NDArray[np.integer], link: NDArray[np.int32]
) -> Floats:
    """What each pair may carry, whatever its ports do, in bytes per second: its link's `per pair` cap, or what is left
    of it.
    """
    bandwidth: Floats = np.full(link.shape, np.inf)
    for index, one in enumerate(topology.links):
        has = link == index
        bandwidth[has] = by_rank(one.pair_bandwidth, np.broadcast_to(source, link.shape)[has])
    for degraded_source, degraded_dest, left in topology.degraded:
        slow = (source == degraded_source) & (dest == degraded_dest)
        bandwidth[slow] = np.minimum(bandwidth[slow], left)
    return bandwidth


def wire_bandwidth(
    topology: Topology, source: NDArray[np.integer], dest: NDArray[np.integer], link: NDArray[np.int32]
) -> Floats:
    """What each pair carries while no other does, in bytes per second: its own cap, or that of its slower port."""
    found = pair_bandwidth(topology, source, dest, link)
    for index, one in enumerate(topology.links):
        has = link == index
        for end in (source, dest):
            found[has] = np.minimum(found[has], one.port_rate(np.broadcast_to(end, link.shape)[has]))
    return found
