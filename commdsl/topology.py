"""A machine: which rank can send to which, how fast, through which shared ports.

Assumes ranks are GPUs in order: rank = node * gpus + gpu. Does not read `.comm` text; `resolve` builds these.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from commdsl.source import Span
from commdsl.syntax import LinkScope


@dataclass(frozen=True)
class Link:
    """A class of links. `port_bandwidth` caps what one GPU sends (and, apart, receives) over it; `pair_bandwidth` each ordered pair.

    Bandwidths in bytes per second (inf: not capped), latency in seconds. `pairs` is None unless scope is PAIRS: then an
    int32 array (n, 2) of directed pairs of node-local GPU indices.
    """

    name: str
    scope: LinkScope
    port_bandwidth: float
    pair_bandwidth: float
    latency: float
    pairs: NDArray[np.int32] | None = None


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
    idealised: bool = False  # made up for a rank count no shipped machine has: one flat switch
    span: Span | None = field(default=None, compare=False, repr=False)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.gpus_per_node
