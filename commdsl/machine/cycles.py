"""Makes sets of cycles: the ring, Hamilton decompositions, the paths through a node, and cycles through several nodes.

Turns a rank count into int32 arrays, one row a cycle, in visiting order; the same on any machine. Assumes every pair of
ranks is joined. Does not prove them Hamiltonian and arc-disjoint; `checks` does, for these and for literal ones.

The complete directed graph on n ranks has n (n - 1) arcs, enough for n - 1 Hamiltonian cycles without a common arc.
They exist for every n but 4 and 6 (Tillson 1980). Odd n: turn one zigzag path through Z_{n-1}, and close each copy over
the last rank. Even n: take those cycles for n - 1, let the new rank in by cutting one arc of each, and choose the cuts
so that the arcs cut out join into one more Hamiltonian path.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from math import gcd, isqrt
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Ranks: TypeAlias = NDArray[np.int32]


MOST_DRAWS = 10_000
"""Enough for every n up to 254; beyond, a search that has not found cycles by now takes minutes."""


class NoDecompositionError(ValueError):
    """There are no such cycles for this number of ranks."""


def ring(n: int) -> Ranks:
    """The one cycle 0, 1, ..., n - 1."""
    return np.arange(n, dtype=np.int32)[None, :]


def paths(m: int) -> Ranks:
    """m Hamiltonian paths over m vertices (even m) that use every arc once; path i goes from i to (i + m / 2) % m."""
    if m < 2 or m % 2:
        raise NoDecompositionError(f"paths need an even number of GPUs, got {m}")
    return (_zigzag(m)[None, :] + np.arange(m, dtype=np.int32)[:, None]) % np.int32(m)


def through_nodes(m: int, u: int) -> Ranks:
    """m cycles through u nodes of m GPUs: each goes through all GPUs of a node by one of its `paths`, then on to the
    next. Together they use every arc within the nodes and, of each GPU, one arc out to the next node and one in from
    the one before.

    Between nodes they go from a GPU to that of the same index, along a rail; only for an odd number of nodes and
    m % 4 == 2, where that cannot be, they come home to another index.
    """
    if u < 2:
        raise NoDecompositionError(f"cycles through nodes need two nodes, got {u}: in one, `hamilton` has cycles")
    names = _namings(m, u)
    inside = paths(m)
    rows = np.empty((m, u, m), np.int32)
    start: Ranks = np.arange(m, dtype=np.int32)  # where each cycle comes into a node
    for node, name in enumerate(names):
        which = np.argsort(name)[start]
        rows[:, node] = name[inside[which]] + node * m
        start = rows[:, node, -1] % np.int32(m)
    return rows.reshape(m, u * m)


def _namings(m: int, u: int) -> list[Ranks]:
    """How each node names its GPUs for `paths`, which lead from a GPU to that with m / 2 added: so in a node all paths
    swap the GPUs of pairs. Two nodes of the same pairs undo each other; of three, the pairs are those of the three
    swaps that undo each other, as x ^ 1, x ^ 2 and x ^ 3 do.
    """
    own = np.arange(m, dtype=np.int32)
    if u % 2 == 0 or m % 4:
        return [own] * u
    half = m // 2
    neighbours = (own % half * 2 + own // half).astype(np.int32)  # pairs x, x ^ 1
    both = np.where(own < half, own, half + ((own - half) ^ 1)).astype(np.int32)  # pairs x, (x ^ 1) + m / 2
    return [own, neighbours, both, *[own] * (u - 3)]


def hamilton(n: int) -> Ranks:
    """n - 1 arc-disjoint directed Hamiltonian cycles over n ranks."""
    if n < 2 or n in (4, 6):
        raise NoDecompositionError(f"{n} ranks have no {n - 1} arc-disjoint Hamiltonian cycles")
    if n == 2:
        return ring(2)
    if n % 2:
        return _odd(n)
    cycles = _odd(n - 1)
    cuts = _cuts(n)
    # The new rank stands where the arc into position cuts[i] was.
    rows = [np.concatenate(([n - 1], np.roll(cycle, -cut))) for cycle, cut in zip(cycles, cuts, strict=True)]
    arcs = {int(cycle[cut - 1]): int(cycle[cut]) for cycle, cut in zip(cycles, cuts, strict=True)}
    rank = next(iter(arcs.keys() - arcs.values()))
    last = [n - 1, rank]
    while rank in arcs:
        rank = arcs[rank]
        last.append(rank)
    return np.array([*rows, last], np.int32)


def _zigzag(m: int) -> Ranks:
    """0, 1, -1, 2, -2, ... modulo m: the differences are all residues but 0, once each."""
    steps = np.arange(m, dtype=np.int32)
    return np.where(steps % 2, (steps + 1) // 2, -steps // 2).astype(np.int32) % np.int32(m)


def _odd(n: int) -> Ranks:
    """Walecki: the last rank, then the zigzag through the others, turned; n - 1 cycles for odd n."""
    turned = paths(n - 1)
    return np.concatenate((np.full((n - 1, 1), n - 1, np.int32), turned), axis=1)


def _cuts(n: int) -> list[int]:
    """For each cycle of n - 1 ranks the position whose incoming arc is cut."""
    if n % 4 == 0:
        k = n // 4 - 1
        cuts = [2 * k] * (n - 2)
        for cycle, position in ((0, 1), (k + 1, n - 2), (2 * k + 2, 3), (3 * k + 2, n - 4)):
            cuts[cycle] = position
        return cuts
    return _found_cuts(n)


# --- even n with n % 4 == 2: the cuts are searched for ----------------------------------------------------------------
#
# With M = n - 2, turning makes cycle i of the M from cycle 0, so for every difference d the M arcs a -> a + d lie in
# different cycles. For d prime to M they are one cycle through Z_M: a solution but for the rank M, which it leaves out.
# So take a few arcs out of it and join the pieces and rank M to a path again, by other arcs of the same cycles. Which
# few is drawn at random; about one draw in a hundred can be joined, and whether one can is soon known.


def _found_cuts(n: int) -> list[int]:
    m = n - 2
    generators = [d for d in range(1, m) if gcd(d, m) == 1]
    draws = _draws(n)
    size = min(m, isqrt(m) + 2)
    for attempt in range(MOST_DRAWS):
        step = generators[attempt % len(generators)]
        out = sorted(_sample(m, size, draws))
        arcs = _joined(m, step, out)
        if arcs is not None:
            return _positions(m, step, arcs)
    raise NoDecompositionError(f"no Hamilton cycles were found for {n} ranks in {MOST_DRAWS} draws")


def _joined(m: int, step: int, out: list[int]) -> list[tuple[int, int]] | None:
    """The arcs that join rank m and the pieces left when arcs `out` leave the cycle of `step` to one path, or None."""
    size = len(out)
    heads = [(place + 1) * step % m for place in out] + [m]
    tails = [out[(i + 1) % size] * step % m for i in range(size)] + [m]
    free = {_owner(m, place * step % m, (place + 1) * step % m) for place in out}
    after = [
        [(b, _owner(m, tails[a], heads[b])) for b in range(size + 1) if a != b and tails[a] != heads[b]]
        for a in range(size + 1)
    ]
    after = [[(b, owner) for b, owner in choices if owner in free] for choices in after]
    if sum(not choices for choices in after) > 1:  # only the last piece may be without
        return None
    for first in range(size + 1):
        order = _path(after, first)
        if order is not None:
            return [(tails[a], heads[b]) for a, b in pairwise(order)]
    return None


def _path(after: list[list[tuple[int, int]]], first: int, limit: int = 500) -> list[int] | None:
    """A path through all pieces whose arcs are of different cycles; gives up after `limit` pieces tried."""
    order, used, owners = [first], {first}, list[int]()
    choices = [iter(after[first])]
    while choices and limit:
        if len(order) == len(after):
            return order
        for piece, owner in choices[-1]:
            if piece not in used and owner not in owners:
                order.append(piece)
                used.add(piece)
                owners.append(owner)
                choices.append(iter(after[piece]))
                limit -= 1
                break
        else:
            choices.pop()
            used.discard(order.pop())
            if owners:
                owners.pop()
    return None


def _owner(m: int, a: int, b: int) -> int:
    """Which of the m cycles over Z_m and m has the arc a -> b."""
    if a == m:
        return b
    if b == m:
        return (a - m // 2) % m  # where the zigzag ends
    return (a - _tail(m, b - a)) % m


def _tail(m: int, difference: int) -> int:
    """Where the zigzag through Z_m goes on by `difference`: its j-th step is j for odd j, -j for even j."""
    difference %= m
    j = difference if difference % 2 else m - difference
    return -(j // 2) % m if j % 2 else j // 2


def _positions(m: int, step: int, arcs: list[tuple[int, int]]) -> list[int]:
    """The cut of each cycle: the arc of `step`, but in the cycles that gave their arc to join the pieces."""
    heads = {_owner(m, place * step % m, (place + 1) * step % m): (place + 1) * step % m for place in range(m)}
    heads.update({_owner(m, a, b): b for a, b in arcs})
    cycles = _odd(m + 1)
    return [int(np.flatnonzero(cycles[i] == heads[i])[0]) for i in range(m)]


def _draws(seed: int) -> Iterator[int]:
    """A linear congruential generator, so that the cycles are the same wherever they are made."""
    while True:
        seed = (seed * 6364136223846793005 + 1442695040888963407) % 2**64
        yield seed >> 33


def _sample(population: int, size: int, draws: Iterator[int]) -> list[int]:
    chosen = list(range(population))
    for i in range(size):
        j = i + next(draws) % (population - i)
        chosen[i], chosen[j] = chosen[j], chosen[i]
    return chosen[:size]
