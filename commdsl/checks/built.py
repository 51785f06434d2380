"""C590: no kernel runs this yet.

Assumes what `resolve` found legal. Does not judge: what the language has and its laws accept is still to be built.
"""

from __future__ import annotations

from collections.abc import Iterator

from commdsl.ir.dispatches import ByKey, Dispatch
from commdsl.ir.schedules import Schedule, Step, Task, Yield
from commdsl.language.diagnostics import Diagnostic, Label


def unbuilt_schedule(schedule: Schedule) -> Iterator[Diagnostic]:
    """One message, for the first task, or `yield` with a body."""
    for step in schedule.steps:
        match step:
            case Task(function):
                label = f"`{function}` runs in the interpreter only"
                yield Diagnostic("C590", "tasks are not built yet", Label(step.span, label))
                return
            case Yield(name=str(function)):
                label, help = f"`{function}` is called by the interpreter only", "`yield BUFFER` hands a buffer over"
                yield Diagnostic("C590", "yields with a body are not built yet", Label(step.span, label), help=help)
                return
            case Step() | Yield():
                pass


def unbuilt_dispatch(dispatch: Dispatch) -> Iterator[Diagnostic]:
    """One message for a route by keys."""
    for route in dispatch.routes:
        if isinstance(route, ByKey):
            label = Label(dispatch.span, f"rows go by `{route.key}`")
            yield Diagnostic("C590", f"`{dispatch.name}` is not built yet", label,
                             help="there is a kernel for routes by tables: `route home[S, C] for x`")  # fmt: skip
