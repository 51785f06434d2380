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
from commdsl.runtime.errors import AgreementError, PeerError
from commdsl.runtime.said import Said

WHY = {TIMED_OUT: "its wait for rank {} took too long", INTERRUPTED: "it was interrupted"}
"""Of a rank that gave up, where it is not that a rank is gone."""

UNKNOWN = "something else"


def failure_of(
    plan: Plan, record: ErrorRecord, seconds: float, explain: Callable[[ErrorRecord], Exception] | None, said: Said
) -> BaseException | None:
    """What a report means, after a time-out of so many seconds; None where nobody is left to explain it."""
    if record.code == DISAGREES:
        return different_calls(record.rank, record.peer, record.rank, (record.expected, record.seen), said)
    if record.code == BAD_LENGTH:
        return different_lengths(record, said)
    if record.code == STOPPED:
        return stopped_by(stop_of(record.seen), record, said)
    if record.code == TIMED_OUT:
        found: BaseException | None = timeout_of(plan, [record], seconds)
    elif record.code == GONE:
        found = PeerError(record.peer, f"is gone: rank {record.rank} waited for it at {origin_of(plan, record)}")
    elif record.code == INTERRUPTED:
        found = KeyboardInterrupt(f"rank {record.rank} waited for rank {record.peer} at {origin_of(plan, record)}")
    else:
        found = None if explain is None else explain(record)
    if found is not None:
        said.say(f"`{plan.name}`", str(found), found.gone if isinstance(found, PeerError) else None)
    return found


def stopped_by(stop: Stop, record: ErrorRecord, said: Said) -> Exception:
    """What a rank is told by a peer that gave up."""
    if stop.code == DISAGREES:
        return different_calls(stop.rank, stop.peer, record.rank, (record.expected, None), said)
    if stop.code == BAD_LENGTH:
        why = f"what rank {stop.peer} sends to rank {stop.rank} is not as long as that one expects"
        said.say(said.words(record.expected) or UNKNOWN, why)
        return AgreementError(why)
    if stop.code == GONE:
        found = PeerError(stop.peer, f"is gone: rank {stop.rank} waited for it")
    else:
        why = WHY.get(stop.code, "what it was to move was wrong").format(stop.peer)
        found = PeerError(stop.rank, f"gave up: {why}")
    said.say(said.words(record.expected) or UNKNOWN, str(found), found.gone)
    return found


def different_lengths(record: ErrorRecord, said: Said) -> AgreementError:
    """As the rank raises it to which a block comes."""
    found = AgreementError(
        f"rank {record.peer} sends {record.seen} bytes to rank {record.rank}, which expects {record.expected}: what "
        "one rank has for another in input_split_sizes, that one has for it in output_split_sizes"
    )
    said.say(f"blocks from rank {record.peer}", str(found))
    return found


def different_calls(one: int, other: int, rank: int, digests: tuple[int, int | None], said: Said) -> AgreementError:
    """Of ranks `one` and `other`, as `rank` raises it. `digests`: of its own call, and of the other's if it knows."""
    mine, theirs = digests
    call = said.words(mine) or UNKNOWN
    said.say(call, f"ranks {one} and {other} make different calls")
    sides = []
    for side in (other, one):
        if side == rank:
            sides.append(call)
            continue
        known = None if theirs is None else said.words(theirs)
        line = None if known else said.ask([side]).get(side)
        sides.append(known or (line.call if line else UNKNOWN))
    return AgreementError(
        f"rank {other} calls {sides[0]} where rank {one} calls {sides[1]}: all ranks of a group make the same "
        "calls, in the same order"
    )
