"""Turns a collective and a size into what `commdsl.all_reduce` and its friends would run, and why.

Assumes the tables that this process sees; every rank of a program sees them alike. Does not load or run it.
"""

from __future__ import annotations

from commdsl.commands import output
from commdsl.commands.arguments import UsageError
from commdsl.commands.doctor import query_nvidia
from commdsl.commands.output import Exit
from commdsl.machine.config import from_environment
from commdsl.planner.tuning import selection


def choice(collective: str, nbytes: int, ranks: int, device: str | None, *, as_json: bool) -> Exit:
    """Prints the schedule with its tuning on one line, the reason on the next."""
    config = from_environment()
    where = device or this_device()
    plain = config.has_far
    try:
        tables = selection.known_tables(config.tables)
        found = selection.choose(tables, collective, nbytes, ranks, where, plain=plain)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if as_json:
        params, tune = dict(found.params), dict(found.tune)
        said = {"collective": collective, "bytes": nbytes, "ranks": ranks, "device": where}
        output.say_json({**said, "schedule": found.schedule, "params": params, "tune": tune, "reason": found.reason})
        return Exit.FINE
    output.say(str(selection.Candidate(found.schedule, found.params, found.tune)))
    output.say(found.reason)
    return Exit.FINE


def this_device() -> str:
    """The first GPU by the driver's own tool, else the processor."""
    names = query_nvidia("--query-gpu=name", "--format=csv,noheader")
    return names[0].strip() if names else selection.PLAIN_DEVICE
