"""C211: what the role that agrees tells and meets neither loses a call nor makes anybody wait.

Assumes a Plan that `verify` passed. Shares nothing with what says whom a rank hears: it goes by the signals and the
data that the proofs of the lanes have found to be awaited. Does not judge those.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.program.agree import Mask
from commdsl.program.desk import SLOTS
from commdsl.program.phases import Meet, Ranks
from commdsl.program.plan import Plan
from commdsl.program.proof.packets import heard_in_a_round
from commdsl.program.proof.rounds import Round

HELP = "this is a bug in commdsl: please report the file"


def agreement(plan: Plan, acting: Round) -> Iterator[Diagnostic]:
    """Of a launch of moves. `acting`: a round of all its actors."""
    return _judge(plan, heard_in_a_round(acting)[: plan.num_ranks, : plan.num_ranks])


def agreement_of_rows(plan: Plan) -> Iterator[Diagnostic]:
    """Of a Plan of rows: what every rank meets in every call, of whatever lanes it has in it."""
    meets = [phase for phase in plan.comm.phases if isinstance(phase, Meet) and not phase.is_spare]
    is_met = any(phase.of is not Ranks.OWN and not phase.calls_back for phase in meets)
    return _judge(plan, np.full((plan.num_ranks, plan.num_ranks), is_met))


def _judge(plan: Plan, awaited: Mask) -> Iterator[Diagnostic]:
    """`awaited`: by rank the peers without whom none of its calls ends."""
    one = plan.agree
    if one.tells is not Ranks.ALL:
        yield _broken(plan, "a rank does not tell every rank of its calls", f"it tells {one.tells.value}")
    if not 0 <= one.behind <= SLOTS - 2:
        yield _broken(
            plan,
            "a word of a call is written again before it is read",
            f"a rank may be {one.behind} calls behind, and there are {SLOTS} words",
        )
    vain = one.heard & ~awaited
    for rank, peer in np.argwhere(vain)[:1].tolist():
        yield _broken(
            plan,
            "a rank waits for the call of a peer that it does not wait for",
            f"rank {rank} meets the call of rank {peer}, and waits for nothing that it does in it",
        )


def _broken(plan: Plan, law: str, how: str) -> Diagnostic:
    return Diagnostic("C211", law, Label(plan.span, how), help=HELP)
