"""Turns a device and the nodes of a group, or a topology, into what an estimate needs: links, carriers, speed.

Assumes that every rank says the same of its group. Rates that were measured say so; the others are data sheets', or
shares of them. Does not measure anything, and needs no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TypeAlias

import numpy as np

from commdsl import compiler
from commdsl.cost.visits import Carrier
from commdsl.language.kinds import LinkScope
from commdsl.machine import devices, resources
from commdsl.machine.topology import Link, Topology, gigabytes, slowest

Tune: TypeAlias = tuple[tuple[str, int | str], ...]

NIC = Link("nic", LinkScope.ACROSS_NODES, 50e9, np.inf, 4e-6)
"""To other nodes where only the device is known: one adapter of 400 Gb/s for each GPU (data sheet)."""

HOST = Topology("host", 1, 1, 1, (Link("memory", LinkScope.IN_NODE, 4e9, np.inf, 30e-6),))
"""Ranks on a processor, in shared memory: a rough figure, as what else runs there decides."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of device: a shipped topology with its links, the FLOP/s of an attention kernel on it and of a product of
    large matrices of 16 bits, and the bytes a second of its memory. `source`: a clause that says where these figures
    come from: a measurement, or an estimate and the data that it is made from.
    """

    topology: str
    flops: float
    product: float
    memory: float
    source: str


KINDS = {
    "H200": Kind("h200_1x8", 640e12, 720e12, 4.1e12, "speeds as measured on an H200"),
    "H100": Kind("h100_1x8", 640e12, 720e12, 2.9e12, "an estimate with the figures of an H200"),
    "A100": Kind("a100_1x8", 200e12, 250e12, 1.7e12, "an estimate from its data sheet"),
    "MI300X": Kind("mi300x_1x8", 500e12, 600e12, 4.5e12, "an estimate from its data sheet"),
}
"""By the names of `devices.GPUS`."""

DEFAULT = "H200"
"""The GPU whose figures stand in for those of one that is not known."""

STAND_IN = f"an estimate with the figures of an {DEFAULT}"

HOST_KIND = Kind("host", 20e9, 20e9, 5e9, "a rough estimate of a processor")


@dataclass(frozen=True, slots=True)
class Way:
    """How transfers are carried: what is tuned, the SMs that this takes from the visits, the rate as a share of what a
    GPU's links give, seconds a step, and seconds for each further copy.
    """

    name: str
    tune: Tune
    sms: int
    share: float
    latency: float
    per_copy: float
    is_far: bool  # whether it reaches other nodes
    combining: Way | None = None  # what carries that which it cannot: sums


PLACE = ("landing", "place")

SIXTEEN = Way("16 SMs", (("sms", 16),), 16, 0.64, 3e-6, 0.0, True)

SIXTEEN_IN_PLACE = Way("16 SMs, in place", (("sms", 16), PLACE), 16, 0.72, 3e-6, 0.0, False)

WAYS = (
    Way("the copy engine, in place", (("protocol", "engine"), PLACE), 0, 0.86, 8e-6, 6e-6, False, SIXTEEN_IN_PLACE),
    Way("8 SMs, in place", (("sms", 8), PLACE), 8, 0.60, 3e-6, 0.0, False),
    SIXTEEN_IN_PLACE,
    Way("8 SMs", (("sms", 8),), 8, 0.42, 3e-6, 0.0, True),
    SIXTEEN,
    Way("32 SMs", (("sms", 32),), 32, 0.70, 3e-6, 0.0, True),
)
"""Shares as measured on H200s, of 450 GB/s, copies out of cells and all: 387 by the copy engine, 22 to 24 for a block
that stores, 320 at most. In place by SMs: as fits forward passes of 2K tokens and 32 heads on four of them, 0.458 ms by
8 SMs and 0.429 by 16. Through cells the engine copies everything twice, and is never faster than in place.
"""

HOST_WAYS = (Way("the processor", (), 0, 1.0, 0.0, 0.0, True),)


@dataclass(frozen=True, eq=False)
class Machine:
    """Hardware that a group runs on; there is one for each topology, or device and nodes. `device`: the GPU's name."""

    topology: Topology
    kind: Kind
    ways: tuple[Way, ...]
    device: str

    @property
    def has_far(self) -> bool:
        return self.topology.num_nodes > 1

    @property
    def port(self) -> float:
        """Bytes a second that the slowest rank sends over its fastest links, to all peers of the node together."""
        peers = max(self.topology.gpus_per_node - 1, 1)
        return max(_slowest(link, peers) for link in self.topology.links)

    @property
    def is_mesh(self) -> bool:
        """Whether one peer in the node is sent to more slowly than all of them together."""
        return self.port > max(_slowest(link, 1) for link in self.topology.links)

    def carrier(self, way: Way) -> Carrier:
        return Carrier(way.share * self.port, way.latency, way.per_copy)

    def slowed(self, way: Way) -> float:
        """How much longer a visit takes where some SMs are busy with transfers."""
        return self.topology.num_sms / (self.topology.num_sms - way.sms)

    def __str__(self) -> str:
        nodes, gpus = self.topology.num_nodes, self.topology.gpus_per_node
        where = f"{nodes} nodes of {gpus}" if nodes > 1 else f"one node of {gpus}"
        rates = ", ".join(f"{link.name} {_rate(link)}" for link in self.topology.links)
        speed = f"{self.kind.flops / 1e12:.4g} TFLOP/s, {self.kind.source}"
        return f"{self.topology.name}, {where}: {rates}; attention {speed}"


def _rate(link: Link) -> str:
    each, what = (link.port_bandwidth, "GPU") if link.has_ports else (link.pair_bandwidth, "pair")
    return f"{gigabytes(each)} GB/s a {what}"


def _slowest(link: Link, peers: int) -> float:
    """What a rank sends to so many peers, where it sends least."""
    return min(slowest(link.port_bandwidth), peers * slowest(link.pair_bandwidth))


@lru_cache(maxsize=64)
def on_topology(name: str) -> Machine:
    """Return the machine of a topology, shipped or in a file. Raises CommError where there is none of that name."""
    return machine_on(_topology(name))


def machine_on(topology: Topology) -> Machine:
    """Return the machine of a topology, with the GPU that its name has (`h100_2x8`: an H100)."""
    device = devices.known(topology.name)
    kind = KINDS[device or DEFAULT]
    if device is None:
        kind = replace(kind, source=f"`{topology.name}` names no known GPU: {STAND_IN}")
    return Machine(topology, kind, WAYS, device or DEFAULT)


@lru_cache(maxsize=64)
def of_device(device: str, nodes: tuple[int, ...]) -> Machine:
    """Return the machine of a group: the device by torch's name, or `cpu`, and by rank the number of its node.

    A variant of a known GPU (`NVIDIA H200 NVL`) and a GPU that is not known have figures of another, and say so.
    """
    count, each = _shape(nodes)
    if device == devices.CPU:
        links = HOST.links if count == 1 else (*HOST.links, NIC)
        topology = replace(HOST, num_nodes=count, gpus_per_node=each, links=links)
        return Machine(topology, HOST_KIND, HOST_WAYS, device)
    known = devices.known(device)
    kind = KINDS[known or DEFAULT]
    if known is None:
        kind = replace(kind, source=f"{devices.doubt(device)}: {STAND_IN}")
    elif not devices.same(known, device):
        kind = replace(kind, source=f"a variant of the {known}: an estimate with the figures of an {known}")
    near = _topology(kind.topology)
    links = near.links if count == 1 else (*near.links, NIC)
    topology = replace(near, name=(known or "gpu").lower(), num_nodes=count, gpus_per_node=each, links=links)
    return Machine(topology, kind, WAYS, device)


def _shape(nodes: Sequence[int]) -> tuple[int, int]:
    """Nodes, and ranks on each; where ranks of a node are not neighbours, or not as many on each, all are far apart."""
    runs = [len(list(run)) for _, run in groupby(nodes)]
    if len(runs) == len(Counter(nodes)) and len(set(runs)) == 1:
        return len(runs), runs[0]
    return len(nodes), 1


def _topology(name: str) -> Topology:
    """A fault in the name is told where it would be used: in a shipped schedule."""
    shipped = resources.shipped_file("attention_ring")
    assert shipped is not None
    return compiler.find_topology(compiler.read(shipped), name, 0)
