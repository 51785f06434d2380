"""Turns rows and the edges that need a flag into the tables of a Plan.

Assumes rows sorted by rank, as a Plan has them. Does not add or drop anything.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from commdsl.ir.schedules import Ints
from commdsl.program.lower.hazards import Edges
from commdsl.program.lower.rows import Rows, begins, nth_of_equals
from commdsl.program.moves import Ops


def tables(rows: Rows, waits: Edges, num_ranks: int, *, barriers: bool) -> tuple[Ops, Ints]:
    """The operations of all ranks, and how many signals each rank sends each other one per round.

    `waits` speaks of groups: their first row waits, their last row signals. `barriers`: threads share what they touch.
    """
    wait_columns, signal_begin, signal_peer, per_round = _flags(_by_row(waits, rows), rows.begin, num_ranks)
    ops = Ops(
        rank_begin=rows.begin,
        kind=rows.kind,
        cut=rows.cut,
        piece=rows.piece,
        length=rows.length,
        barrier=((rows.turn == 0) & (rows.joined == 0) & barriers).astype(np.int32),
        whole=rows.whole,
        joined=rows.joined,
        dest_space=rows.dest_space,
        dest_rank=rows.dest_rank,
        dest_index=rows.dest_index,
        source_begin=rows.source_begin,
        source_space=rows.source_space,
        source_rank=rows.source_rank,
        source_index=rows.source_index,
        source_weight=rows.source_weight,
        **wait_columns,
        signal_begin=signal_begin,
        signal_peer=signal_peer,
        origin=rows.origin,
    )
    return ops, per_round


_BEGINS = ("source_begin", "wait_begin", "signal_begin")
_PER_OP = (
    *("kind", "cut", "piece", "length", "barrier", "whole", "joined"),
    *("dest_space", "dest_rank", "dest_index", "origin"),
)


def apart(ops: Ops, per_round: Ints, num_ranks: int) -> tuple[Ops, Ops, Ints]:
    """The moves and the tiles of every rank, which call each other `num_ranks`; and what moves hear in a round, with a
    row more for the tiles.
    """
    moves, tiles = _part(ops, 0, num_ranks), _part(ops, num_ranks, 2 * num_ranks)
    waits, signals = moves.wait_peer, np.full_like(tiles.signal_peer, num_ranks)
    moves = replace(moves, wait_peer=np.where(waits < num_ranks, waits, num_ranks).astype(np.int32))
    own = np.diagonal(per_round[num_ranks:, :num_ranks])
    return moves, replace(tiles, signal_peer=signals), np.vstack((per_round[:num_ranks, :num_ranks], own))


def _part(ops: Ops, first: int, last: int) -> Ops:
    """The programs first ..< last alone."""
    lo, hi = int(ops.rank_begin[first]), int(ops.rank_begin[last])
    columns: dict[str, Ints] = {"rank_begin": ops.rank_begin[first : last + 1] - np.int32(lo)}
    columns |= {name: getattr(ops, name)[lo:hi] for name in _PER_OP}
    for name in _BEGINS:
        begin = getattr(ops, name)
        columns[name] = begin[lo : hi + 1] - begin[lo]
        kind = name.removesuffix("begin")
        for column in (field.name for field in fields(ops) if field.name.startswith(kind) and field.name != name):
            columns[column] = getattr(ops, column)[begin[lo] : begin[hi]]
    return Ops(**columns)


def _by_row(waits: Edges, rows: Rows) -> Edges:
    leaders = rows.leaders
    last = np.append(leaders[1:], len(rows.rank)).astype(np.int32) - 1
    begin = np.searchsorted(leaders, rows.begin[:-1]).astype(np.int32)  # each rank's first group
    table = waits.table.copy()
    table[0] = leaders[waits.op]
    table[3] = last[begin[waits.peer] + waits.number] - rows.begin[waits.peer]
    return Edges(table)


def _flags(waits: Edges, rank_begin: Ints, num_ranks: int) -> tuple[dict[str, Ints], Ints, Ints, Ints]:
    """Waits and signals as tables: each awaited (operation, waiting rank) is a signal, numbered per pair of ranks."""
    raised_after = rank_begin[waits.peer] + waits.number
    key = raised_after.astype(np.int64) * num_ranks + waits.rank
    signals, signal_of_wait = np.unique(key, return_inverse=True)
    after, to = signals // num_ranks, signals % num_ranks
    sender = np.searchsorted(rank_begin, after, side="right") - 1
    pairs = sender * num_ranks + to
    by_pair = np.argsort(pairs, kind="stable")  # within a pair in program order, as `signals` is sorted
    ordinal = np.empty(len(signals), np.int32)
    ordinal[by_pair] = nth_of_equals(pairs[by_pair]) + 1
    per_round = np.bincount(pairs, minlength=num_ranks * num_ranks).astype(np.int32).reshape(num_ranks, num_ranks)
    in_order = np.argsort(waits.op.astype(np.int64) * num_ranks + waits.peer, kind="stable")
    num_ops = int(rank_begin[-1])
    tables = {
        "wait_begin": begins(np.bincount(waits.op, minlength=num_ops)),
        "wait_peer": waits.peer[in_order],
        "wait_ordinal": ordinal[signal_of_wait][in_order],
        "wait_rounds_back": waits.back[in_order],
        "wait_reason": waits.reason[in_order],
    }
    return tables, begins(np.bincount(after, minlength=num_ops)), to.astype(np.int32), per_round
