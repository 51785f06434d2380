"""Turns machines into how many blocks of a sum each rank adds up and hands out: more where its links are slow.

Assumes blocks that are equally long, sums that come in over one machine and go out over the other, one behind the
other; where there is one machine it is the same both ways. What a rank adds up itself leaves it as no part and comes to
it as no sum, so one with few links is best left with much. The least time over all shares is a linear program. Does not
pack trees. Needs scipy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from commdsl.cost.flows import best_shares, strongest
from commdsl.cost.graph import Floats, Graph, Longs

MOST_RANKS = 16
"""Of more ranks the linear program takes too long: shares are equal."""

MOST_BLOCKS = 32

NEAR = 1.03
"""So much longer than the least time is as good."""


def shares(graphs: Sequence[Graph]) -> Longs:
    """Blocks of each rank: one, where others gain next to nothing."""
    num_ranks = graphs[0].num_ranks
    equal = np.ones(num_ranks, np.int64)
    if num_ranks > MOST_RANKS or all(graph.is_symmetric for graph in graphs):
        return equal
    best = best_shares([graph.wires for graph in graphs], num_ranks)
    if best is None:
        return equal
    goal, found = NEAR * _seconds(graphs, best), equal
    for count in range(num_ranks, MOST_BLOCKS + 1):
        if _seconds(graphs, found) <= goal:
            break
        found = min(found, _whole(best, count), key=lambda given: _seconds(graphs, given))
    return found


def _seconds(graphs: Sequence[Graph], given: Floats | Longs) -> float:
    """For each byte of all blocks, as far as cuts tell."""
    weights, everyone = given / given.sum(), np.ones(len(given), np.bool_)
    return sum(strongest(weights, everyone, graph, "out of", "into")[0] for graph in graphs)


def _whole(best: Floats, count: int) -> Longs:
    """So many blocks, as near to these shares as can be."""
    found = np.floor(best * count + 1e-9).astype(np.int64)
    found[np.argsort(found - best * count, kind="stable")[: count - int(found.sum())]] += 1
    return found
