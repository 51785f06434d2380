"""Turns trees into when each rank hands each piece on: in which step, where it hands it to all its children at once.

Assumes trees over the wires of a machine. Steps are as long as they take, and steps of several waves may overlap. A
step is given what its wires and ports carry in a chosen time, first what has the longest way to go. Does not
know latencies, only that fewer steps have less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

from commdsl.cost.flows import limits
from commdsl.cost.graph import Floats, Longs, Wires
from commdsl.language.records import dataclass
from commdsl.planner.synthesis.trees import Tree

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 1 << 20)
"""Steps that are tried: so many pieces of the busiest wire or port."""

WAVES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Into so many parts, which follow each other, a piece may be cut."""

MOST_PARTS = 160
"""Of a block: each is a transfer to every rank."""


@dataclass(frozen=True, eq=False)
class Turns:
    """`step[t, r]`: in which step, of 1 and more, rank r hands tree t's piece on; 0 where it has no child. Pieces are
    cut into `waves`, each a step behind the one before.
    """

    step: Longs
    waves: int
    seconds: float  # for each byte of a piece

    @property
    def num_steps(self) -> int:
        return int(self.step.max())


class Loads:
    """What trees put on the wires and ports of a machine."""

    def __init__(self, trees: Sequence[Tree], wires: Wires) -> None:
        num_ranks = len(trees[0].parent)
        uses, self.most = limits(wires, num_ranks)
        columns = uses.tocsc()
        shared = {
            (source, dest): columns.indices[columns.indptr[at] : columns.indptr[at + 1]]
            for at, (source, dest) in enumerate(zip(wires.source.tolist(), wires.dest.tolist(), strict=True))
        }
        self.trees = trees
        self.of: dict[tuple[int, int], tuple[Longs, Longs]] = {}  # of tree and rank: which limits, how many pieces
        for number, tree in enumerate(trees):
            for rank, children in enumerate(tree.children):
                if children:
                    pieces = np.concatenate([shared[rank, child] for child in children])
                    self.of[number, rank] = np.unique(pieces, return_counts=True)

    @cached_property
    def total(self) -> Longs:
        """Pieces, of each limit."""
        found = np.zeros(len(self.most), np.int64)
        for which, count in self.of.values():
            found[which] += count
        return found

    def by_step(self, step: Longs) -> Floats:
        """(steps + 1, limits): seconds for each byte of a piece, up to and with each step."""
        found = np.zeros((int(step.max()) + 1, len(self.most)))
        for (tree, rank), (which, count) in self.of.items():
            found[step[tree, rank], which] += count
        return np.cumsum(found / self.most, axis=0)


def best_turns(trees: Sequence[Tree], wires: Wires, pieces: int, goal: float) -> Turns:
    """For so many pieces of what a rank has. Those of fewest steps, of all waves, that take `goal` seconds a byte of a
    piece at most; else the fastest.
    """
    found = [turns for turns in _tried(Loads(trees, wires)) if pieces * turns.waves <= MOST_PARTS or turns.waves == 1]
    good = [turns for turns in found if turns.seconds <= goal]
    if good:
        return min(good, key=lambda turns: (turns.num_steps + turns.waves, turns.seconds))
    return min(found, key=lambda turns: turns.seconds)


def _tried(loads: Loads) -> Iterator[Turns]:
    busiest = int((loads.total / loads.most).argmax())
    for length in LENGTHS:
        step = _listed(loads, length / float(loads.most[busiest]))
        summed = loads.by_step(step)
        for waves in WAVES:
            yield Turns(step, waves, _seconds(summed, waves))


def _seconds(summed: Floats, waves: int) -> float:
    """Of all steps, each as long as its busiest wire or port, if so many parts go through them one behind the other."""
    last = len(summed) - 1
    ends = np.arange(1, last + waves)
    loads = summed[np.minimum(ends, last)] - summed[np.maximum(ends - waves, 0)]
    return float(loads.max(axis=1).sum()) / waves


def _listed(loads: Loads, seconds: float) -> Longs:
    """List scheduling: into each step goes what is ready and fits, and at least one piece a wire."""
    room = np.maximum(np.floor(seconds * loads.most + 1e-6), 1)
    waiting = loads.total.astype(np.float64)
    heights = [tree.height for tree in loads.trees]
    step = np.zeros((len(loads.trees), len(heights[0])), np.int64)
    ready = [(number, tree.root) for number, tree in enumerate(loads.trees)]

    def urgency(one: tuple[int, int]) -> float:
        which, _ = loads.of[one]
        return -float((waiting[which] / loads.most[which]).max()) - seconds * float(heights[one[0]][one[1]])

    now = 0
    while ready:
        now += 1
        left, later, taken = room.copy(), [], []
        for one in sorted(ready, key=urgency):
            which, count = loads.of[one]
            if ((left[which] >= count) | (left[which] == room[which])).all():
                left[which] -= count
                step[one] = now
                taken.append(one)
            else:
                later.append(one)
        for number, rank in taken:
            which, count = loads.of[number, rank]
            waiting[which] -= count
            later += [(number, child) for child in loads.trees[number].children[rank] if (number, child) in loads.of]
        ready = later
    return step
