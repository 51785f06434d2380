"""The laws of blocks that have lengths of their own: one table, which whoever moves knows; heads that all ranks read.

Assumes tables of legal shapes and ranges. Raises InternalError at the first law broken. Does not know numbers.
"""

from __future__ import annotations

import numpy as np

from commdsl.ir.lengths import knows, num_entries
from commdsl.language.kinds import Axis
from commdsl.program.legal import each, law, within
from commdsl.program.moves import CELL, Moves


def verify_lengths(moves: Moves) -> None:
    """There is one table, and whoever moves a block knows how long it is."""
    ops, found = moves.ops, {one.lengths for one in moves.tensors}
    law(len({one and one.table for one in found}) == 1, "some blocks have lengths of their own, others have not")
    for tensor in moves.tensors:
        by_block = tensor.lengths is not None and Axis.BLOCK in tensor.lengths.axes
        law(not by_block or tensor.blocks == moves.num_ranks, f"`{tensor.name}` has blocks without a length")
    axes = {len(one.axes) for one in found if one is not None} or {0}
    law(len(axes) == 1, "a table of lengths is looked up by one rank, and by two")
    (num_axes,) = axes
    law(num_axes <= moves.carrier.length_axes, f"`{moves.carrier.name}` moves no lengths of {num_axes} axes")
    if moves.has_heads:
        _meet(moves)
    within(ops.length, num_entries(moves.num_ranks, num_axes), "operation", "its length lies")
    each(knows(moves.num_ranks, num_axes, ops.actor, ops.length), "operation", "its rank knows the length")


def _meet(moves: Moves) -> None:
    """Where data has heads, every rank reads one of every other rank in a round, in a cell that nobody else writes."""
    ops = moves.ops
    cells, reads = np.flatnonzero(ops.dest_space == CELL), ops.source_space == CELL
    read = {*zip(ops.source_rank[reads].tolist(), ops.source_index[reads].tolist(), strict=True)}
    places = zip(ops.dest_rank[cells].tolist(), ops.dest_index[cells].tolist(), ops.actor[cells].tolist(), strict=True)
    writers: dict[tuple[int, int], set[int]] = {}
    for rank, index, writer in places:
        writers.setdefault((rank, index), set()).add(writer)
    heard = {(place[0], *found) for place, found in writers.items() if place in read and len(found) == 1}
    pairs = {(one, other) for one in range(moves.num_ranks) for other in range(moves.num_ranks) if one != other}
    law(pairs <= heard, "a rank reads no head of another one")
