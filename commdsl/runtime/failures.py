"""Turns the record that a kernel of this rank left into the exception that says so.

Assumes a record of a kernel of that Plan. Does not decide what becomes of the group, and does not know rows: what is
wrong with them is explained by whoever has their tables.
"""

from __future__ import annotations

from collections.abc import Callable

from commdsl.program.desk import Stop, stop_of
from commdsl.program.plan import Plan
from commdsl.program.timeouts import (
    BAD_LENGTH,
    DISAGREES,
    GONE,
    INTERRUPTED,
    STOPPED,
    TIMED_OUT,
    ErrorRecord,
    origin_of,
    timeout_of,
)
from commdsl.runtime.errors import AgreementError, OpError, PeerError
from commdsl.runtime.said import WAITS, Line, Said, Words
from commdsl.runtime.setups import Raised, Setup

WHY = {TIMED_OUT: "its wait for rank {} took too long", INTERRUPTED: "it was interrupted"}
"""Of a rank that gave up and reports nothing, where it is not that a rank is gone."""

UNKNOWN = Words("something else")

SOON_SECONDS = 0.2
"""So long a rank whose kernel a peer stopped waits for that peer's report, which comes when its call returns."""

ALIKE = "all ranks of a group make the same calls, in the same order"


def failure_of(
    plan: Plan, record: ErrorRecord, seconds: float, explain: Callable[[ErrorRecord], Exception] | None, said: Said
) -> BaseException | None:
    """What a report means, after a time-out of so many seconds; None where nobody is left to explain it."""
    if record.code == DISAGREES:
        sides = said.known(record.expected), said.known(record.seen)
        return different_calls(record.rank, record.peer, record.rank, sides, said)
    if record.code == BAD_LENGTH:
        return different_lengths(record, said)
    if record.code == STOPPED:
        return stopped_by(stop_of(record.seen), record, said)
    if record.code == TIMED_OUT:
        found: BaseException | None = timeout_of(plan, [record], seconds)
    elif record.code == GONE:
        why = f"is gone: rank {record.rank} waited for it at {origin_of(plan, record)}"
        found = PeerError(record.peer, why, _clause(record.rank, Words(f"`{plan.name}`")))
    elif record.code == INTERRUPTED:
        found = KeyboardInterrupt(f"rank {record.rank} waited for rank {record.peer} at {origin_of(plan, record)}")
    else:
        found = None if explain is None else explain(record)
    if found is not None:
        said.say(f"`{plan.name}`", found, found.gone if isinstance(found, PeerError) else None)
    return found


def stopped_by(stop: Stop, record: ErrorRecord, said: Said) -> Exception:
    """What a rank is told by a peer that gave up."""
    own = said.known(record.expected) or UNKNOWN
    if stop.code == DISAGREES:
        return different_calls(stop.rank, stop.peer, record.rank, (own, None), said)
    if stop.code == BAD_LENGTH:
        why = f"what rank {stop.peer} sends to rank {stop.rank} is not as long as that one expects"
        found: OpError = AgreementError(with_own(why, record.rank, own))
        said.say(own, found)
        return found
    line = said.ask([stop.rank], SOON_SECONDS).get(stop.rank)
    if line is not None:
        return told(stop.rank, line, own, record.rank, said)
    if stop.code == GONE:
        found = PeerError(stop.peer, f"is gone: rank {stop.rank} waited for it", _clause(record.rank, own))
        said.say(own, found, stop.peer)
    else:
        why = WHY.get(stop.code, "what it was to move was wrong").format(stop.peer)
        found = PeerError(stop.rank, f"gave up: {why}", _clause(record.rank, own))
        said.say(own, why, by=stop.rank)
    return found


def told(peer: int, line: Line, own: Words, rank: int, said: Said) -> OpError:
    """Return what rank `rank`, whose last call is `own`, raises because a peer has reported this, and report it."""
    if line.one >= 0:
        return different_calls(line.one, line.other, rank, (own, None), said)
    if line.gone is not None:
        found: OpError = PeerError(line.gone, f"is gone: rank {peer} waited for it", _clause(rank, own))
    elif line.differs:
        found = AgreementError(with_own(line.why, rank, own))
    else:
        first = line if line.by == peer else said.ask([line.by], 0.0).get(line.by)  # of the rank that knew first
        clauses = (_clause(line.by, first.words) if first else "", _clause(rank, own))
        found = PeerError(line.by, f"gave up: {line.why}", "; ".join(filter(None, clauses)))
    said.say(own, line.why, line.gone, by=line.by, differs=line.differs)
    return found


def apart(group: str, peer: int, step: Setup | Raised, rank: int, own: Words) -> OpError:
    """Return what rank `rank`, whose last call is `own`, raises because a peer has this step instead of that call."""
    if isinstance(step, Raised):
        if step.differs:
            return AgreementError(with_own(step.why, rank, own))
        return PeerError(peer, f"gave up: {step.what} raised {step.why}", _clause(rank, own))
    is_same = own.call.startswith(step.what)  # of two versions of a file
    there = f"rank {peer} of group `{group}` sets up {step.what}{f' ({step.detail})' if is_same else ''}"
    return AgreementError(f"{there} where {own.of(rank, is_same)}: {ALIKE}")


def with_own(why: str, rank: int, own: Words) -> str:
    """Return a disagreement of two other ranks, in words, with the call of this rank behind it, unless it is theirs."""
    clause = "" if own.call in why else _clause(rank, own)
    return f"{why}; {clause}" if clause else why


def _clause(rank: int, own: Words) -> str:
    """Return what a rank waits to do, or the call that it made last, which may be over."""
    if own == UNKNOWN:
        return ""
    return own.of(rank) if own.verb == WAITS else f"the last call of rank {rank}: {own.call}"


def different_lengths(record: ErrorRecord, said: Said) -> AgreementError:
    """As the rank raises it to which a block comes."""
    found = AgreementError(
        f"rank {record.peer} sends {record.seen} bytes to rank {record.rank}, which expects {record.expected}: what "
        "one rank has for another in input_split_sizes, that one has for it in output_split_sizes"
    )
    said.say(f"blocks from rank {record.peer}", found)
    return found


def different_calls(
    one: int, other: int, rank: int, known: tuple[Words | None, Words | None], said: Said
) -> AgreementError:
    """Return the error of ranks `one` and `other`, as `rank` raises it. `known`: its own call, the other's if known."""
    mine, theirs = known[0] or UNKNOWN, known[1]
    said.say(mine, f"ranks {one} and {other} make different calls", one=one, other=other, differs=True)
    sides = []
    for side in (other, one):
        if side == rank:
            sides.append(mine)
            continue
        line = None if theirs else said.ask([side]).get(side)
        sides.append(theirs or (line.words if line else UNKNOWN))
    there, here = sides
    is_same = there.call == here.call  # of two versions of a file
    why = f"{there.of(other, is_same)} where {here.of(one, is_same)}: {ALIKE}"
    return AgreementError(with_own(why, rank, mine))
