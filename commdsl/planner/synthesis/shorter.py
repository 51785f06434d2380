"""Turns trees into trees of less depth that use every wire as often: two swap the parents of a rank.

Assumes spanning trees. A swap is made where it lowers the sum of 2 ** depth over all ranks of both, the best first, so
that long ways get shorter before short ones. Does not look for other trees.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from commdsl.cost.graph import Floats
from commdsl.planner.synthesis.trees import Tree


def shorter(trees: Sequence[Tree]) -> tuple[Tree, ...]:
    forest = _Forest(trees)
    ranks = range(len(trees[0].parent))
    while sum(forest.swap_all(rank) for rank in ranks):
        pass
    return tuple(Tree(tree.root, parent) for tree, parent in zip(trees, forest.parent, strict=True))


class _Forest:
    """By tree and rank: its parent, its depth, who is below it (itself, too), and the sum over these of 2 ** depth."""

    def __init__(self, trees: Sequence[Tree]) -> None:
        count, num_ranks = len(trees), len(trees[0].parent)
        self.root = np.array([tree.root for tree in trees])
        self.parent = np.array([tree.parent for tree in trees])
        self.depth = np.zeros((count, num_ranks))
        self.below = np.zeros((count, num_ranks, num_ranks), np.bool_)
        self.weight = np.zeros((count, num_ranks))
        for number in range(count):
            self.measure(number)

    def measure(self, number: int) -> None:
        tree = Tree(int(self.root[number]), self.parent[number])
        below = np.eye(len(tree.parent), dtype=np.bool_)
        for rank in np.argsort(-tree.depth, kind="stable").tolist():
            below[tree.parent[rank]] |= below[rank]
        self.depth[number], self.below[number] = tree.depth, below
        self.weight[number] = below @ 2.0**tree.depth

    def swap_all(self, rank: int) -> bool:
        """Whether any two trees swapped the parents of this rank."""
        swapped = False
        while True:
            gains = self.gains(rank)
            both = gains + gains.T
            first, second = divmod(int(both.argmin()), len(both))
            if not both[first, second] < -0.5:  # depths are whole
                return swapped
            self.parent[[first, second], rank] = self.parent[[second, first], rank]
            self.measure(first)
            self.measure(second)
            swapped = True

    def gains(self, rank: int) -> Floats:
        """(trees, trees): what a tree's sum grows by with the parent that the other has; inf where that is no tree."""
        parents = self.parent[:, rank]
        moved = self.depth[:, parents] + 1 - self.depth[:, rank, None]
        is_root = self.root == rank
        loops: NDArray[np.bool_] = self.below[:, rank][:, parents] | is_root[:, None] | is_root[None, :]
        return np.where(loops, np.inf, self.weight[:, rank, None] * (2.0**moved - 1))
