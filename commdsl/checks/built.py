"""C590: no kernel runs this yet.

Assumes what `resolve` found legal. Does not judge: what the language has and its laws accept is still to be built.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.ir.schedules import Schedule, Step, Task, Yield
from commdsl.language.diagnostics import Diagnostic, Label


def unbuilt_schedule(schedule: Schedule) -> Iterator[Diagnostic]:
    """One message, for the first `yield` with a body in a schedule that has tasks, too."""
    if not any(isinstance(step, Task) for step in schedule.steps):
        return
    for step in schedule.steps:
        match step:
            case Yield(name=str(function)):
                label, help = (
                    f"`{function}` is called between launches",
                    "a task runs within one: leave one of them out",
                )
                what = "a yield with a body beside a task is not built yet"
                yield Diagnostic("C590", what, Label(step.span, label), help=help)
                return
            case Step() | Yield() | Task():
                pass
