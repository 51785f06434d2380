"""Turns phases that are proved by region into words: what each is called, who does it, and whom it is about.

Assumes nothing of their order. Does not say what they touch: `phases` does.
"""

from __future__ import annotations

from typing import assert_never

from commdsl.program.memory import Rows
from commdsl.program.moves import Form, Moves
from commdsl.program.phases import (
    AddUp,
    Count,
    Each,
    FillByKey,
    Finish,
    FinishBack,
    Forward,
    Host,
    Meet,
    Push,
    PushAgain,
    PushBack,
    PushByKey,
    PushStraight,
    Read,
    Routed,
    Tell,
)


def name_of(phase: Routed) -> str:
    """What a phase is, in two words at most."""
    match phase:
        case Host():
            return phase.name
        case Tell():
            return f"tell {phase.what.name}"
        case Meet():
            return f"meet {phase.what.name}"
        case Read():
            return f"read {phase.what.name}"
        case Count():
            return "count"
        case Push() | PushByKey() | PushAgain():
            return "push"
        case PushStraight():
            return "push straight"
        case PushBack():
            return f"push{_BACK[phase.each]}"
        case Forward():
            return "forward"
        case FillByKey():
            return "fill"
        case AddUp():
            return "add up"
        case Finish():
            return "finish"
        case FinishBack():
            return f"finish{_BACK[phase.each]}"
        case _:
            assert_never(phase)


_BACK = {Each.ENTRY: "", Each.RANK: " sums", Each.NODE: " sums", Each.WORD: " words"}


def described(phase: Routed) -> str:
    """What a phase is, who does it, and whom it is about."""
    name, by = name_of(phase), f", by {phase.by.value}"
    match phase:
        case Tell():
            return f"{name} to {phase.to.value}{by}"
        case Meet():
            back = f", {phase.calls_back} calls before" if phase.calls_back else ""
            return f"{name} of {phase.of.value}{back}{by}"
        case Push():
            why = f" ({phase.reason})" if phase.reason else ""
            return f"{name} {', '.join(rows.name for rows in phase.given)}{by}{why}"
        case PushStraight():
            return f"{name} {', '.join(rows.name for rows in phase.to)}{by}"
        case Finish():
            left = "" if phase.left is None else ", and push straight what is left"
            return f"{name} {', '.join(rows.name for rows in phase.to)}{left}{by}"
        case Count():
            return f"{name} {phase.keys.name}{by}"
        case PushByKey():
            rows = ", ".join(one.name for one in (*phase.given, *(() if phase.value is None else (phase.value,))))
            return f"{name} {rows} by {phase.keys.name}, {phase.often.value}{_nodes(phase.node)}{by}"
        case PushAgain():
            return f"{name} {phase.given.name} again, {phase.often.value}{_nodes(phase.node)}{by}"
        case Forward() | FillByKey():
            return f"{name} {', '.join(rows.name for rows in phase.to)}{by}"
        case PushBack():
            sums = ", the sums of this rank's" if phase.each.is_sum else ""
            sums += f", once to a node of {phase.node}" if phase.node else ""
            return f"{name} {phase.given.name} back{sums}{_times(phase.weights)}{by}"
        case AddUp():
            return f"{name} {phase.to.name}, the sums of this node's{by}"
        case FinishBack():
            return f"{name} {phase.to.name} of {phase.each.value}{_times(phase.weights)}{by}"
        case Host() | Read():
            return f"{name}{by}"
        case _:
            assert_never(phase)


def _nodes(node: int) -> str:
    return f", once to a node of {node}" if node else ""


def _times(weights: Rows | None) -> str:
    return "" if weights is None else f" times {weights.name}"


def form_words(moves: Moves, side: str, at: int) -> str:
    """How an operand is, where values travel in another element type."""
    if moves.casts is None:
        return ""
    form = Form(int(getattr(moves.casts, side)[at]))
    return {Form.AS_IS: "", Form.CAST: f" as {moves.casts.cast.words}", Form.ROUNDED: " rounded"}[form]
