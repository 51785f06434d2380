"""Turns a collective on a machine into the ways that it goes: blocks out, sums in, or sums in and then blocks out.

Assumes a topology. Does not write or prove anything.
"""

from __future__ import annotations

from enum import Enum

import numpy as np

from commdsl.cost.graph import Graph, graph_of
from commdsl.machine.topology import Topology
from commdsl.planner.synthesis.schedule import spreads
from commdsl.planner.synthesis.shares import shares
from commdsl.planner.synthesis.text import Way


class Collective(Enum):
    ALLGATHER = "allgather"
    REDUCESCATTER = "reducescatter"
    ALLREDUCE = "allreduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"

    @property
    def is_rooted(self) -> bool:
        return self in (Collective.BROADCAST, Collective.REDUCE)

    @property
    def adds(self) -> tuple[bool, ...]:
        """Of each way that it goes, whether sums come in or blocks go out."""
        match self:
            case Collective.ALLGATHER | Collective.BROADCAST:
                return (False,)
            case Collective.REDUCESCATTER | Collective.REDUCE:
                return (True,)
            case Collective.ALLREDUCE:
                return True, False


def ways(collective: Collective, topology: Topology, root: int) -> tuple[Way, ...]:
    """What `text` writes; where a machine is the same both ways, sums come in as blocks go out.

    Raises UnreachedError.
    """
    graph = graph_of(topology, topology.num_ranks)
    kinds = (False,) if _is_two_way(graph) else tuple(dict.fromkeys(collective.adds))
    machines = [graph.reversed if adds else graph for adds in kinds]
    given = np.ones(graph.num_ranks, np.int64)
    if collective.is_rooted:
        given = np.eye(graph.num_ranks, dtype=np.int64)[root]
    elif collective is Collective.ALLREDUCE:
        given = shares(machines)
    made = dict(zip(kinds, spreads(machines, given, root if collective.is_rooted else None), strict=True))
    return tuple(
        Way(made.get(adds, made[kinds[0]]), adds, "sum_" if adds and len(kinds) > 1 else "") for adds in collective.adds
    )


def _is_two_way(graph: Graph) -> bool:
    """Whether every wire has one back, as fast, in the same class of links."""
    there, back = (
        np.array(sorted(zip(one.source, one.dest, one.capacity, one.link, strict=True)))
        for one in (graph.wires, graph.reversed.wires)
    )
    return bool(np.array_equal(there, back))
