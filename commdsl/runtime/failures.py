"""Turns the record that a kernel of this rank left into the exception that says so.

Assumes a record of a kernel of that Plan. Does not decide what becomes of the group, and does not know rows: what is
wrong with them is explained by whoever has their tables.
"""

from __future__ import annotations

from collections.abc import Callable

from commdsl.program.desk import Stop, stop_of
from commdsl.program.plan import Plan
from commdsl.program.timeouts import GONE, INTERRUPTED, STOPPED, TIMED_OUT, ErrorRecord, origin_of, timeout_of
from commdsl.runtime.errors import PeerError

WHY = {TIMED_OUT: "its wait for rank {} took too long", INTERRUPTED: "it was interrupted"}
"""Of a rank that gave up, where it is not that a rank is gone."""


def failure_of(
    plan: Plan, record: ErrorRecord, seconds: float, explain: Callable[[ErrorRecord], Exception] | None
) -> BaseException | None:
    """What a report means, after a time-out of so many seconds; None where nobody is left to explain it."""
    if record.code == TIMED_OUT:
        return timeout_of(plan, [record], seconds)
    if record.code == STOPPED:
        return stopped_by(stop_of(record.seen))
    if record.code == GONE:
        return PeerError(record.peer, f"is gone: rank {record.rank} waited for it at {origin_of(plan, record)}")
    if record.code == INTERRUPTED:
        return KeyboardInterrupt(f"rank {record.rank} waited for rank {record.peer} at {origin_of(plan, record)}")
    return None if explain is None else explain(record)


def stopped_by(stop: Stop) -> PeerError:
    """What a rank is told by a peer that gave up."""
    if stop.code == GONE:
        return PeerError(stop.peer, f"is gone: rank {stop.rank} waited for it")
    why = WHY.get(stop.code, "what it was to move was wrong").format(stop.peer)
    return PeerError(stop.rank, f"gave up: {why}")
