"""Turns wires that carry whole numbers of pieces into spanning trees, one for every piece, that use no wire more often.

Assumes that every rank can get all pieces: then there are such trees (Edmonds 1973), and one that is not whole yet can
always be grown by some wire (Bérczi and Frank 2010; ForestColl grows many alike at once). Does not make
them flat. Needs scipy.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from commdsl.cost.flows import flow_value
from commdsl.cost.graph import Longs
from commdsl.language.records import dataclass

OUTSIDE = -1
"""The parent of a rank that a tree has not reached."""


@dataclass(frozen=True, eq=False)
class Tree:
    """`parent[r]`: from whom rank r gets a piece of `root`, which is its own parent."""

    root: int
    parent: Longs

    @cached_property
    def depth(self) -> Longs:
        """How many wires each rank is from the root."""
        return _depth(self.parent)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Of each rank."""
        found: list[list[int]] = [[] for _ in self.parent]
        for rank, parent in enumerate(self.parent.tolist()):
            if rank != parent:
                found[parent].append(rank)
        return tuple(map(tuple, found))

    @cached_property
    def height(self) -> Longs:
        """How many wires the farthest rank is from each on the way away from the root."""
        found = np.zeros_like(self.parent)
        for rank in np.argsort(-self.depth).tolist():
            found[self.parent[rank]] = max(found[self.parent[rank]], found[rank] + (rank != self.root))
        return found


def packed(pieces: Longs, given: Longs) -> tuple[Tree, ...]:
    """`given[r]` trees of each rank; `pieces[a, b]` of all of them go from a to b at most."""
    left, waiting = pieces.copy(), given.copy()
    found: list[Tree] = []
    for root in np.flatnonzero(given).tolist():
        parent = np.full(len(given), OUTSIDE, np.int64)
        parent[root] = root
        waiting[root] = 0
        growing = [_Growing(parent, int(given[root]), left > 0)]
        while growing:
            trees = growing.pop()
            if (trees.parent != OUTSIDE).all():
                found += [Tree(root, trees.parent)] * trees.count
            else:
                growing += _grown(trees, left, waiting, growing)
    return tuple(found)


@dataclass(frozen=True, eq=False)
class _Growing:
    """So many trees alike. `open_wires[a, b]`: whether a wire may yet grow them; one that cannot never will, as what
    keeps it from it is a set of ranks that has no more wires into it than are needed.
    """

    parent: Longs
    count: int
    open_wires: NDArray[np.bool_]


def _grown(trees: _Growing, left: Longs, waiting: Longs, others: list[_Growing]) -> list[_Growing]:
    """As many of the trees as can be, grown by one rank, and the others: from the rank nearest to the root, over the
    wire with most left. What it carries is taken from `left`.
    """
    depth, inside = _depth(trees.parent), trees.parent != OUTSIDE
    source, dest = np.nonzero(left * trees.open_wires * inside[:, None] * ~inside[None, :])
    for at in np.lexsort((-left[source, dest], depth[source])).tolist():
        start, end = int(source[at]), int(dest[at])
        most = min(trees.count, int(left[start, end]))
        taken = min(most, _spare(start, end, left, waiting, others))
        if taken > 0:
            left[start, end] -= taken
            parent = trees.parent.copy()
            parent[end] = start
            rest = [] if taken == trees.count else [_Growing(trees.parent, trees.count - taken, trees.open_wires)]
            return [*rest, _Growing(parent, taken, trees.open_wires.copy())]
        trees.open_wires[start, end] = False
    raise AssertionError("no tree can be grown: some rank cannot get all pieces")


def _spare(start: int, end: int, left: Longs, waiting: Longs, others: list[_Growing]) -> int:
    """How many pieces may go over a wire such that what is left suffices for all trees that are not whole."""
    count = len(left)
    network = np.zeros((count + len(others),) * 2, np.int64)
    network[:count, :count] = left
    network[start, :count] += waiting
    for number, trees in enumerate(others, count):
        network[start, number] = trees.count
        network[number, :count] = np.where(trees.parent != OUTSIDE, trees.count, 0)
    needed = int(waiting.sum()) + sum(trees.count for trees in others)
    network[start, start] = 0
    return flow_value(network, start, end) - needed


def _depth(parent: Longs) -> Longs:
    """How many wires each rank of a tree is from its root; those outside have none."""
    depth = np.zeros(len(parent), np.int64)
    at = np.where(parent == OUTSIDE, np.arange(len(parent)), parent)
    reached = np.arange(len(parent))
    for _ in range(len(parent)):
        step = at[reached]
        depth += step != reached
        reached = step
    return depth
