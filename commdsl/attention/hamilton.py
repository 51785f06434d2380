"""Turns a number of ranks into Hamilton cycles and paths, and those into the tables that say who sends which piece.

The names, signatures and meanings are those of Hamilton Attention; the README of this folder lists where they differ.
A cycle is a list of ranks; piece c of every rank's keys and values goes along cycle c, one hop a step. Assumes every
pair of ranks is joined. Does not run anything: `machine.cycles` makes the cycles, and a schedule that follows them is
proved by the checker, whatever these tables say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.machine import cycles
from commdsl.machine.errors import ArgumentError
from commdsl.runtime import given

Looping: TypeAlias = Sequence[Sequence[int]]
"""Cycles, a row each: every rank once, in visiting order; no arc is in two of them."""

Table: TypeAlias = NDArray[np.int64]


def gen_hamilton_circle(n: int) -> list[list[int]]:
    """n - 1 directed Hamilton cycles over n ranks that share no arc: together all n (n - 1) links, each once.

    For every n from 2 on but 4 and 6, where there are none (the document: n >= 8 and n % 4 == 0). Any number of them is
    a set of cycles as well. Raises ArgumentError.
    """
    try:
        return _lists(cycles.hamilton(given.whole("n", n, 0)))
    except cycles.NoDecompositionError as error:
        raise ArgumentError(str(error)) from None


def gen_hamilton_path_local(m: int) -> list[list[int]]:
    """m Hamilton paths through the m ranks of a node that together use every link in it once; path i begins at rank i
    and ends at (i + m / 2) % m. For every even m (the document: 8). Raises ArgumentError.
    """
    try:
        return _lists(cycles.paths(given.whole("m", m, 0)))
    except cycles.NoDecompositionError as error:
        raise ArgumentError(str(error)) from None


def gen_hamilton_circle_two_nodes(n: int, m: int = 8) -> list[list[int]]:
    """m Hamilton cycles over n ranks, m to a node: cycle i is path i through node 0, the same through node 1, and so on
    back to node 0. Every link inside a node is in one of them, and so is every rank's one link to the next node.

    For every even m and from 2 nodes on, whatever the name says (the document: 2 or 4 nodes of 8). For one node, which
    the document lists, there is none: the hop back to the first rank is a link that another path uses; there
    `gen_hamilton_circle` is right. Raises ArgumentError.
    """
    n, path = given.whole("n", n, 0), np.array(gen_hamilton_path_local(m))
    if n % m or n < 2 * m:
        alone = ": in one node use gen_hamilton_circle" if n == m else ""
        raise ArgumentError(f"{n} ranks are not two or more nodes of {m}{alone}")
    return _lists(np.concatenate([path + first for first in range(0, n, m)], axis=1))


def calculate_out_mapping_circle(looping: Looping) -> list[list[int]]:
    """`[r][p]`: which piece rank r sends to rank p in every step; -1 where none, as to itself."""
    return _lists(_arcs(_checked(looping)))


def calculate_in_mapping_circle(looping: Looping) -> list[list[int]]:
    """`[r][p]`: which piece rank r receives from rank p in every step; -1 where none."""
    return _lists(_arcs(_checked(looping)).T)


def calculate_intra_node_out_mapping_two_nodes(path0: Looping) -> list[list[int]]:
    """`[l][k]`: which piece local rank l sends to local rank k of its node in every step, the same on every node; -1 to
    itself. Of the m pieces the one that is not in row l leaves for the next node.
    """
    return _lists(_arcs(_checked(path0, closed=False), closed=False))


def calculate_intra_node_in_mapping_two_nodes(path0: Looping) -> list[list[int]]:
    """`[l][k]`: which piece local rank l receives from local rank k of its node in every step; -1 from itself."""
    return _lists(_arcs(_checked(path0, closed=False), closed=False).T)


def calculate_inter_node_mapping(looping: Looping) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """By rank where it receives from and what, and by rank where it sends to and what: the global rank on the other
    node, and the piece. First the table of what comes in, as the forward takes them.

    Read off the cycles, m of them, as `gen_hamilton_circle_two_nodes` makes them for any even m and from 2 nodes on
    (the document tabulates two cases). Raises ArgumentError where a rank does not send exactly one piece to another
    node.
    """
    table = _checked(looping)
    m, n = table.shape
    incoming, outgoing = dict[int, tuple[int, int]](), dict[int, tuple[int, int]]()
    for piece, row in enumerate(table.tolist()):
        for here, there in zip(row, [*row[1:], row[0]], strict=True):
            if here // m != there // m:
                if here in outgoing or there in incoming:
                    raise ArgumentError(
                        f"rank {here if here in outgoing else there} has two links to other nodes of {m}"
                    )
                outgoing[here], incoming[there] = (there, piece), (here, piece)
    if n % m or len(outgoing) != n:
        raise ArgumentError(
            f"{m} cycles over {n} ranks are not those of nodes of {m}: some rank sends to no other node"
        )
    return [incoming[rank] for rank in range(n)], [outgoing[rank] for rank in range(n)]


def calculate_source_rank_per_iter(looping: Looping) -> list[list[list[bool]]]:
    """`[r][t][c]`: whether the piece c that rank r has in step t came from rank r or a lower one.

    The name says a rank, and the document's type a truth value; it is the truth value that the causal mask asks for:
    under zigzag placement all queries of r see the front half of such a piece, and of the others the back half of the
    queries sees all.
    """
    table = _checked(looping)
    count, n = table.shape
    at = np.argsort(table, axis=1)  # [c][r]: where rank r is in cycle c
    back = (at.T[:, None, :] - np.arange(n)[None, :, None]) % n
    origin = table[np.arange(count)[None, None, :], back]
    found: list[list[list[bool]]] = (origin <= np.arange(n)[:, None, None]).tolist()
    return found


def circles_of_nodes(intra_out: Looping, inter_out: Sequence[Sequence[int]]) -> list[list[int]]:
    """The cycles that the outgoing tables of nodes describe: `gen_hamilton_circle_two_nodes`, back from its tables.

    Raises ArgumentError where following them does not lead through every rank once.
    """
    m, n = len(intra_out), len(inter_out)
    if n % m or any(len(row) != m for row in intra_out):
        raise ArgumentError(
            f"`out_mapping` has a row and a column for each rank of a node; {n} ranks are no nodes of {m}"
        )
    if not all(0 <= there < n for there, _ in inter_out):
        raise ArgumentError(f"a mapping between nodes names ranks, 0 to {n - 1}")
    found = []
    for piece in range(m):
        cycle = [0]
        while len(cycle) < n:
            node, local = divmod(cycle[-1], m)
            there, leaving = inter_out[cycle[-1]]
            row = list(intra_out[local])
            if leaving != piece and piece not in row:
                raise ArgumentError(f"piece {piece} ends at rank {cycle[-1]}: neither mapping sends it on")
            cycle.append(int(there) if leaving == piece else node * m + row.index(piece))
        found.append(cycle)
    return _lists(_checked(found))


def _checked(looping: Looping, closed: bool = True) -> Table:
    """The rows as a table, once each has every rank once and no arc is in two. Raises ArgumentError."""
    what = "cycle" if closed else "path"
    if not isinstance(looping, Sequence | np.ndarray) or not all(
        isinstance(row, Sequence | np.ndarray) for row in looping
    ):
        raise ArgumentError(f"expected a list of {what}s, each a list of ranks, got {given.shown(looping)}")
    if not len(looping) or len({len(row) for row in looping}) != 1:
        raise ArgumentError(f"expected a list of {what}s, each a list of as many ranks")
    table = np.array(looping)
    if table.ndim != 2 or table.dtype.kind not in "iu" or (np.sort(table, axis=1) != np.arange(table.shape[1])).any():
        raise ArgumentError(f"a {what} visits each of the ranks from 0 on once")
    tails, heads = (table, np.roll(table, -1, axis=1)) if closed else (table[:, :-1], table[:, 1:])
    if len(np.unique(tails * table.shape[1] + heads)) != tails.size:
        raise ArgumentError(f"two of the {what}s use the same link")
    return table.astype(np.int64)


def _arcs(table: Table, closed: bool = True) -> Table:
    """`[a][b]`: the row that has the arc from a to b, -1 where none has."""
    n = table.shape[1]
    found = np.full((n, n), -1)
    for number, row in enumerate(table):
        found[row[:-1], row[1:]] = number
        if closed:
            found[row[-1], row[0]] = number
    return found


def _lists(table: NDArray[np.integer]) -> list[list[int]]:
    found: list[list[int]] = table.tolist()
    return found
