"""Turns a Plan's moves and tiles into one table of operations, of all who act: what is printed, and what is proved.

Assumes tables of one Plan. Does not judge them. Actors are the moves of rank 0, 1, ..., then the tiles of rank 0, 1,
...: to the proofs the tiles of a rank are one rank more, that happens to touch the memory of another.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np

from commdsl.ir.schedules import Ints
from commdsl.language.diagnostics import InternalError
from commdsl.language.records import dataclass
from commdsl.program.moves import Moves, Ops
from commdsl.program.plan import Plan

_BEGINS = ("source_begin", "wait_begin", "signal_begin")


@dataclass(frozen=True, eq=False)
class Actors(Moves):
    """Moves and tiles as moves of twice as many ranks: `num_ranks` actors, of which the first `ranks` are the moves."""

    ranks: int

    @property
    def flags_per_lane(self) -> int:
        """As the moves have it: one more than there are ranks."""
        return self.ranks + 1


def num_ranks_of(moves: Moves) -> int:
    """On how many ranks they act."""
    return moves.ranks if isinstance(moves, Actors) else moves.num_ranks


def name_of(moves: Moves, actor: int) -> str:
    """An actor as a message calls it."""
    ranks = num_ranks_of(moves)
    return f"rank {actor}" if actor < ranks else f"the tiles of rank {actor - ranks}"


def together(first: Ops, second: Ops) -> Ops:
    """The programs of one table behind those of another."""
    columns: dict[str, Ints] = {}
    for field in fields(first):
        one, other = getattr(first, field.name), getattr(second, field.name)
        begins = field.name == "rank_begin" or field.name in _BEGINS
        columns[field.name] = np.concatenate((one, other[1:] + one[-1] if begins else other)).astype(np.int32)
    return Ops(**columns)


def printed(plan: Plan) -> Ops:
    """The tables as the kernel has them: tiles behind moves, in which each calls the other `num_ranks`."""
    moves, tiles = plan.moves, plan.tiles
    if tiles is None:
        return moves.ops
    if tiles.origins != moves.origins:
        raise InternalError(f"the moves and the tiles of `{plan.name}` come from different statements")
    return together(moves.ops, tiles.ops)


def actors(plan: Plan) -> Moves:
    """The moves, where there is nothing else; otherwise all actors, who call each other by their numbers."""
    moves, ranks = plan.moves, plan.num_ranks
    if plan.tiles is None:
        return moves
    ops = printed(plan)
    own = np.int32(ranks) + np.arange(ranks, dtype=np.int32)
    waiter = np.repeat(ops.actor, np.diff(ops.wait_begin)) % ranks
    raiser = np.repeat(ops.actor, np.diff(ops.signal_begin)) % ranks
    per_round = np.zeros((2 * ranks, 2 * ranks), np.int32)
    per_round[:ranks, :ranks] = moves.signals_per_round[:ranks]
    per_round[own, own - ranks] = moves.signals_per_round[ranks]
    every = {field.name: getattr(moves, field.name) for field in fields(moves)}
    every |= {
        "ops": replace(
            ops,
            wait_peer=np.where(ops.wait_peer == ranks, own[waiter], ops.wait_peer).astype(np.int32),
            signal_peer=np.where(ops.signal_peer == ranks, raiser, ops.signal_peer).astype(np.int32),
        ),
        "num_ranks": 2 * ranks,
        "signals_per_round": per_round,
        "ranks": ranks,
    }
    return Actors(**every)
