"""Turns a machine and what is to spread over it into trees, and when each rank hands each piece on.

Assumes that every rank wants what is given. Sums go the other way: trees of the reversed machine, in the reverse order.
Does not know what is written of it; `text` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import numpy as np

from commdsl.cost.graph import Graph, Longs
from commdsl.language.records import dataclass
from commdsl.planner.synthesis.shorter import shorter
from commdsl.planner.synthesis.steps import Turns, best_turns
from commdsl.planner.synthesis.trees import Tree, packed
from commdsl.planner.synthesis.wires import Carried, Network

MOST_TREES = 128
"""Of all ranks together, twice as many where wires otherwise carry too little, and LEAST_PIECES of each."""

LEAST_PIECES = 8

ROUNDED = (1.02, 1.06)
"""So much longer than what cuts leave whole pieces may take: then no more are tried, and no more than MOST_TREES."""

GOAL = 1.1
"""So much longer all steps may take, where that can be had; of schedules that keep to it a short one is taken."""


@dataclass(frozen=True, eq=False)
class Spread:
    """`trees[i]` has piece i % pieces of block i // pieces. Every rank gives one, in their order, or `root` alone does,
    or each gives as many as it has a share of.
    """

    root: int | None
    pieces: int
    trees: tuple[Tree, ...]
    turns: Turns
    least: float  # seconds for each byte of a block that any trees take on links, of as many blocks of each rank

    @property
    def ratio(self) -> float:
        """Of its time on links to what cuts leave."""
        return self.turns.seconds / (self.least * self.pieces)

    @property
    def num_ranks(self) -> int:
        return len(self.trees[0].parent)

    @property
    def given(self) -> Longs:
        """Blocks of each rank."""
        found: Longs = np.bincount([tree.root for tree in self.trees], minlength=self.num_ranks) // self.pieces
        return found

    @property
    def length(self) -> int:
        """Into how many parts a block is cut, and how many steps they take: each part and each step costs time."""
        return self.pieces * self.turns.waves + self.turns.num_steps + self.turns.waves


def spreads(graphs: Sequence[Graph], given: Longs, root: int | None = None) -> tuple[Spread, ...]:
    """What all ranks get of so many blocks of each, or of `root` alone: on each machine, in as many pieces on all.

    Raises UnreachedError.
    """
    networks = [Network(graph, given) for graph in graphs]
    found = [
        tuple(_spread(network, root, pieces, carried) for network, carried in zip(networks, some, strict=True))
        for pieces, some in _whole(networks)
    ]
    return min(found, key=_rank)


def _rank(some: Sequence[Spread]) -> tuple[float, float]:
    """The less the better: not above the goal, then short."""
    ratio = max(spread.ratio for spread in some)
    return (0, max(spread.length for spread in some)) if ratio <= GOAL else (1, ratio)


def _spread(network: Network, root: int | None, pieces: int, carried: Carried) -> Spread:
    trees = shorter(packed(carried.pieces, network.given * pieces))
    least = network.least * pieces
    parts = max(pieces, len(trees) // network.num_ranks)  # of what a rank has
    turns = best_turns(trees, network.wires, parts, GOAL * least)
    return Spread(root, pieces, trees, turns, network.least)


def _whole(networks: Sequence[Network]) -> Iterator[tuple[int, tuple[Carried, ...]]]:
    """Numbers of pieces of which wires carry whole numbers in less time than of any fewer. With enough pieces any time
    will do.
    """
    best = np.inf
    most = max(LEAST_PIECES, MOST_TREES // int(networks[0].given.sum()))
    for pieces in count(1):
        found = [carried for network in networks if (carried := network.carried(pieces)) is not None]
        if len(found) == len(networks):
            ratio = max(carried.seconds / network.least for carried, network in zip(found, networks, strict=True))
            if ratio < best:
                best = ratio
                yield pieces, tuple(found)
        if best <= ROUNDED[pieces >= most] or (best < np.inf and pieces >= 2 * most):
            return
