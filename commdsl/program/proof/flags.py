"""Turns the tables of Moves into a Timeline: an actor a rank, as its lanes are alike and need nothing of each other;
and one more a rank where the Moves are `actors.Actors`, for its tiles.

Assumes Moves that `verify` passed. Does not judge: that every wait has a signal is for `synchronization` to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from commdsl.program.actors import num_ranks_of
from commdsl.program.moves import Moves
from commdsl.program.proof.timeline import Bits, Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class Flags(Timeline):
    """The Timeline of some Moves."""

    awaited: Bits  # (num_signals,): some wait is for it


def signal_owners(moves: Moves) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The signals sorted by (raiser, peer), then program order; and where each pair begins."""
    ops, num_ranks = moves.ops, moves.num_ranks
    raiser = np.repeat(ops.actor, np.diff(ops.signal_begin))
    pair = raiser.astype(np.int64) * num_ranks + ops.signal_peer
    begin = np.concatenate(([0], np.cumsum(np.bincount(pair, minlength=num_ranks * num_ranks))))
    if (pair[1:] >= pair[:-1]).all():  # as in a ring, where every rank has one peer to signal
        return np.arange(len(pair)), begin
    # They stand by raiser already. numpy sorts 16-bit keys in linear time.
    narrow = np.int16 if num_ranks < 2**15 else np.int32
    by_peer = np.argsort(ops.signal_peer.astype(narrow), kind="stable")
    return by_peer[np.argsort(raiser[by_peer].astype(narrow), kind="stable")], begin


def timeline(moves: Moves) -> Flags:
    ops, num_ranks = moves.ops, moves.num_ranks
    actor = ops.actor
    local = np.arange(ops.num_ops, dtype=np.int32) - ops.rank_begin[actor]
    signals, begin = signal_owners(moves)
    signal_op = np.repeat(np.arange(ops.num_ops, dtype=np.int32), np.diff(ops.signal_begin))
    num_waits = np.diff(ops.wait_begin)
    wait_op = np.repeat(np.arange(ops.num_ops, dtype=np.int32), num_waits)
    at = begin[ops.wait_peer.astype(np.int64) * num_ranks + actor[wait_op]] + (ops.wait_ordinal - 1)
    awaited = np.zeros(len(signal_op), np.bool_)
    awaited[signals[at]] = True
    total = np.concatenate(([0], np.cumsum(num_waits > 0, dtype=np.int32))).astype(np.int32)
    starts = total[ops.rank_begin]
    return Flags(
        num_ranks=num_ranks_of(moves),
        begin=ops.rank_begin,
        actor=actor,
        local=local,
        row=total[1:] - starts[actor],
        rows_per_round=np.diff(starts),
        wait_op=wait_op,
        wait_peer=ops.wait_peer,
        wait_signal=local[signal_op[signals[at]]],
        wait_rounds_back=ops.wait_rounds_back,
        awaited=awaited,
    )
