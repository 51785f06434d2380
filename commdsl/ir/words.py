"""Turns ranks, the values of loops and what is computed into words of a message.

Assumes nothing. Does not know what the message is about.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from commdsl.ir.schedules import Schedule, Task, Yield


def bindings_text(bindings: tuple[tuple[str, int], ...]) -> str:
    """`, s = 3, k = 0`, to follow a rank; empty outside loops."""
    return "".join(f", {name} = {value}" for name, value in bindings)


def at_bindings(bindings: tuple[tuple[str, int], ...]) -> str:
    """` at s = 3, k = 0`, to follow what happens there; empty outside loops."""
    return bindings_text(bindings).replace(",", " at", 1)


def ranks_text(ranks: Iterable[int], limit: int = 8) -> str:
    """`rank 3`, `ranks 0 1 2`, `ranks 0 1 2 3 4 5 6 7 and 8 more`."""
    listed = [int(rank) for rank in ranks]
    shown = " ".join(str(rank) for rank in listed[:limit])
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return f"{'rank' if len(listed) == 1 else 'ranks'} {shown}{more}"


def step_words(schedule: Schedule, step: Yield | Task) -> str:
    """`yield kv`, `yield attend(kv, acc -> acc)`, `compute add(a, b -> c)`."""
    reads, writes = (", ".join(schedule.buffers[at].name for at in buffers) for buffers in (step.reads, step.writes))
    match step:
        case Yield(name=None):
            return f"yield {reads}"
        case Yield(name=name):
            return f"yield {name}({reads} -> {writes})" if writes else f"yield {name}({reads})"
        case Task(function):
            return f"compute {function}({reads} -> {writes})"
        case _:
            assert_never(step)
