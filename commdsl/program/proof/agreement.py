"""C211: what the role that agrees tells and meets neither loses a call nor makes anybody wait.

Assumes a Plan that `verify` passed. Shares nothing with what says whom a rank hears: it goes by the signals and the
data that the proofs of the lanes have found to be awaited. Does not judge those.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.program.actors import actors, num_ranks_of
from commdsl.program.agree import Mask
from commdsl.program.desk import SLOTS
from commdsl.program.phases import Meet, Ranks
from commdsl.program.plan import Plan
from commdsl.program.proof.packets import deliveries, flagged, heard_in_a_round
from commdsl.program.visited import plan_of, segments

HELP = "this is a bug in commdsl: please report the file"


def agreement(plan: Plan) -> Iterator[Diagnostic]:
    """Every launch of a Plan, each by itself."""
    if plan.is_visited:
        for moves in segments(plan):
            yield from _judge(plan_of(plan, moves))
    else:
        yield from _judge(plan)


def _judge(plan: Plan) -> Iterator[Diagnostic]:
    one = plan.agree
    if one.tells is not Ranks.ALL:
        yield _broken(plan, "a rank does not tell every rank of its calls", f"it tells {one.tells.value}")
    if not 0 <= one.behind <= SLOTS - 2:
        yield _broken(
            plan,
            "a word of a call is written again before it is read",
            f"a rank may be {one.behind} calls behind, and there are {SLOTS} words",
        )
    vain = one.heard & ~_awaited(plan)
    for rank, peer in np.argwhere(vain)[:1].tolist():
        yield _broken(
            plan,
            "a rank waits for the call of a peer that it does not wait for",
            f"rank {rank} meets the call of rank {peer}, and waits for nothing that it does in it",
        )


def _awaited(plan: Plan) -> Mask:
    """By rank the peers without whom none of its calls ends."""
    found = np.zeros((plan.num_ranks, plan.num_ranks), np.bool_)
    if not plan.is_static:
        # What every rank meets in every call, of whatever lanes it has in it.
        meets = [phase for phase in plan.comm.phases if isinstance(phase, Meet) and not phase.is_spare]
        found[:] = any(phase.of is not Ranks.OWN and not phase.calls_back for phase in meets)
        return found
    moves = actors(plan)
    ranks = num_ranks_of(moves)
    awaited = flagged(moves, deliveries(moves)) if moves.protocol.carries_flags else moves
    return heard_in_a_round(awaited)[:ranks, :ranks]


def _broken(plan: Plan, law: str, how: str) -> Diagnostic:
    return Diagnostic("C211", law, Label(plan.span, how), help=HELP)
