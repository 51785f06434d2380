"""Tells whether ranks that want the same reduction get the same bits.

Assumes a schedule that the laws accept. Every location carries a hash of the expression that made it: a chunk, the
combination of two (either order gives the same bits), or of a list in its order, rounded once. Equal hashes mean
equal expressions, hence equal bits; different ones may still happen to agree for some data. Does not report faults:
different bits are legal.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.casts import Mask, left, rounded
from commdsl.checks.contributions import mix
from commdsl.checks.locations import Located, LocatedMoves, LocatedTask

Hashes = NDArray[np.uint64]

UNROUNDED = np.uint64(0x5851F42D4C957F2D)
"""Sets the running sum of a list apart from one that was rounded and stored."""


CAST = np.uint64(0x2545F4914F6CDD1D)
"""Sets what was rounded to another element type on its way apart from what was not."""


def expressions(located: Located) -> Hashes:
    """A hash of the expression that every location holds at the end."""
    hashes, is_cast = mix(np.arange(located.size, dtype=np.uint64)), np.zeros(located.size, np.bool_)
    for step in located.steps:
        if isinstance(step, LocatedTask):
            hashes[step.writes], is_cast[step.writes] = hashes[step.origins], False
            continue
        results = [(m.dest, _expression(located, m, hashes, is_cast), left(m, is_cast)) for m in step.moves]
        for dest, result, cast in results:
            hashes[dest], is_cast[dest] = result, cast
    return hashes[: located.nowhere + 1]


def same_bits(located: Located) -> bool:
    """Whether each value a contract wants in several places is made by one expression everywhere."""
    hashes = expressions(located)
    for contract in located.schedule.contracts:
        if contract.operation is None or not len(contract.dest_rank):
            continue
        values, first = np.unique(contract.value, return_index=True)
        found = hashes[located.contract_dests(contract)]
        one = np.zeros(int(values[-1]) + 1, dtype=np.uint64)
        one[values] = found[first]
        if not np.array_equal(found, one[contract.value]):
            return False
    return True


def _pair(left: Hashes, right: Hashes) -> Hashes:
    """Commutative, not associative."""
    return mix(left + right)


def _expression(located: Located, moves: LocatedMoves, hashes: Hashes, is_cast: Mask) -> Hashes:
    rounds = None if moves.moves.cast is None else rounded(moves, is_cast)

    def taken(column: int) -> Hashes:
        found = hashes[moves.sources[:, column]]
        return found if rounds is None else np.where(rounds[:, column], mix(found ^ CAST), found)

    made = taken(0)
    if moves.moves.accumulate:
        return _pair(hashes[moves.dest], made)
    absent = moves.sources == located.nowhere
    terms = (~absent[:, 0]).astype(np.int64)
    for column in range(1, moves.sources.shape[1]):
        term = taken(column)
        more = np.where(terms == 0, term, np.where(terms == 1, _pair(made, term), _pair(mix(made ^ UNROUNDED), term)))
        made = np.where(absent[:, column], made, more)
        terms += ~absent[:, column]
    return made
