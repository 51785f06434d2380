"""C310 and C311: no statement moves data that nobody uses, or data that is already there.

Assumes indices in bounds, no overlapping writes, no undefined reads, every contract kept. Judges a statement of one
step as a whole: a row of it may be useless (a rank that needs nothing, a copy to oneself), all rows may not. Where a
rotation has a condition, which says what is needed, no row to another rank may. Does not judge cost.

An error, unless the number of ranks is a degenerate one: with one rank every transfer is a copy to oneself, and where a
loop has no iteration the readers of a statement may be missing. A schedule for any number of ranks cannot avoid that,
and its results are right, so it is warned of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.determinism import idle_statements
from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, LocatedTask, Locations, statement_key
from commdsl.ir.held import handed
from commdsl.ir.schedules import Schedule, Task, Yield
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label, Severity
from commdsl.language.kinds import RETURNED
from commdsl.language.source import Span

Used: TypeAlias = tuple[LocatedStep, LocatedMoves, NDArray[np.bool_]] | LocatedTask


def useless_statements(located: Located) -> Iterator[Diagnostic]:
    """One message per statement, for the first step in which it does nothing; idle ones only if none is unused."""
    severity = Severity.WARNING if is_degenerate(located.schedule) else Severity.ERROR
    for found in _useless(located):
        yield replace(found, severity=severity)


def is_degenerate(schedule: Schedule) -> bool:
    """Whether a statement may be useless only because of the number of ranks: there is one, or a loop has no iteration,
    in this schedule or in one that it calls.
    """
    called = (one.schedule for one in schedule.called)
    return schedule.num_ranks == 1 or schedule.has_empty_loops or any(map(is_degenerate, called))


def _useless(located: Located) -> Iterator[Diagnostic]:
    told: set[tuple[str, int, int]] = set()
    used = list(used_rows(located))
    if any(rotation.visits is not None for rotation in located.schedule.rotations):
        for row in _unused_rows(located, used):
            told.add(statement_key(row.primary.span))
            yield row
    for one in reversed(used):
        if isinstance(one, LocatedTask) and statement_key(one.step.span) not in told:
            told.add(statement_key(one.step.span))
            yield _unused_task(located, one)
    unused = [(one[0], one[1]) for one in used if not isinstance(one, LocatedTask) and not one[2].any()]
    per_step = Counter(id(step) for step, _ in unused)
    for step, moves in reversed(unused):
        whole_step = per_step[id(step)] == len(step.moves)  # one mistake, however many statements the step has
        span = step.step.span if whole_step and len(step.moves) > 1 else moves.moves.span
        if statement_key(span) not in told:
            told.add(statement_key(span))
            yield _unused(located, step, moves, span)
    if told:
        return  # a doubled statement leaves one of the two unused, the other idle: one mistake
    for step, moves in idle_statements(located):
        if statement_key(moves.moves.span) not in told:
            told.add(statement_key(moves.moves.span))
            yield _idle(located, step, moves)


def used_rows(located: Located) -> Iterator[Used]:
    """Backwards over the statements: which rows write something a contract, a yield or a used row reads. A task stands
    there if nothing that it writes is used.
    """
    live = np.zeros(located.nowhere + 1, dtype=np.bool_)
    for contract in located.schedule.contracts:
        if len(contract.dest_rank):
            live[located.contract_dests(contract)] = True
    live[_results(located)] = True
    for buffer in (buffer for rotation in located.schedule.rotations for buffer in rotation.back):
        live[located.whole(buffer)] = True
    handed_over = _handed_over(located)
    for step in reversed(located.steps):
        if isinstance(step, LocatedTask):
            if isinstance(step.step, Task) and not live[step.writes].any():
                yield step
                continue
            live[step.writes] = False
            for places in handed_over.get(id(step), (step.reads,)):
                live[places] = True
            continue
        used = [live[moves.dest] for moves in step.moves]
        for moves in step.moves:
            if not moves.moves.accumulate:
                live[moves.dest] = False
        for moves, rows in zip(step.moves, used, strict=True):
            live[moves.reads if rows.all() else moves.reads[rows]] = True
        for moves, rows in zip(reversed(step.moves), reversed(used), strict=True):
            yield step, moves, rows


def _handed_over(located: Located) -> dict[int, tuple[Locations, ...]]:
    """By yield that hands over what is new in some of its buffers: that, and all of the others."""
    if not located.schedule.rotations:
        return {}
    found: dict[int, tuple[Locations, ...]] = {}
    for now in handed(located.schedule):
        visiting = located.schedule.visiting(now.step)
        pairs = zip(now.step.reads, now.fresh, strict=True)
        wholes = [(located.whole(buffer), fresh if buffer in visiting else None) for buffer, fresh in pairs]
        found[id(located.steps[now.index])] = tuple(
            whole.ravel() if fresh is None else whole[fresh] for whole, fresh in wholes
        )
    return found


def _results(located: Located) -> Locations:
    """Return the chunks that functions of the caller write for the caller: no contract can say what they are."""
    made = {
        buffer
        for task in located.tasks()
        for buffer in task.step.writes
        if isinstance(task.step, Yield) and located.schedule.buffers[buffer].kind in RETURNED
    }
    return np.concatenate([np.zeros(0, np.int64), *(located.whole(buffer).ravel() for buffer in sorted(made))])


def _unused_task(located: Located, task: LocatedTask) -> Diagnostic:
    bindings = bindings_text(task.step.bindings).removeprefix(", ")
    where = f"{bindings}: " if bindings else ""
    return Diagnostic(
        "C310",
        "nobody uses what this task writes",
        Label(task.step.span, f"{where}{located.name(int(task.writes[0, 0]))} is overwritten or left unread"),
        notes=("on every rank: no later step reads it, and no caller gets it",),
        help="drop the task, or the loop iteration in which it does nothing",
    )


def _unused_rows(located: Located, used: list[Used]) -> Iterator[Diagnostic]:
    """Where a contract says who is handed what, no rank is sent what it does not need: one message per statement, for
    the first step with a row to another rank that is useless, but not with every row.
    """
    told: set[tuple[str, int, int]] = set()
    for one in reversed(used):
        if isinstance(one, LocatedTask) or not one[2].any() or statement_key(one[1].moves.span) in told:
            continue
        step, moves, rows = one
        afar = (moves.moves.source_rank != moves.moves.dest_rank[:, None]).any(axis=1)
        useless = np.flatnonzero(~rows & afar)
        if len(useless):
            told.add(statement_key(moves.moves.span))
            yield _unused_row(located, step, moves, int(useless[0]))


def _unused_row(located: Located, step: LocatedStep, moves: LocatedMoves, row: int) -> Diagnostic:
    who = f"rank {int(moves.moves.actor[row])}{bindings_text(step.step.bindings)}"
    sent, place = located.name(int(moves.sources[row, 0])), located.name(int(moves.dest[row]))
    return Diagnostic(
        "C310",
        "a piece is sent to where it is not needed",
        Label(moves.moves.span, f"{who}: {sent} goes to {place}, where it is neither handed over nor sent on"),
        notes=("the condition of the rotation says what is needed where",),
        help="leave the rank or the piece out, with `where` or `if`",
    )


def _unused(located: Located, step: LocatedStep, moves: LocatedMoves, span: Span) -> Diagnostic:
    who = f"rank {int(moves.moves.actor[0])}{bindings_text(step.step.bindings)}"
    return Diagnostic(
        "C310",
        "nobody uses what this step writes",
        Label(span, f"{who}: {located.name(int(moves.dest[0]))} is overwritten or left unread"),
        notes=("on every rank: no later step reads it, no `yield` shows it, no `ensure` names it",),
        help="drop the statement, or the loop iteration in which it does nothing",
    )


def _idle(located: Located, step: LocatedStep, moves: LocatedMoves) -> Diagnostic:
    who = f"rank {int(moves.moves.actor[0])}{bindings_text(step.step.bindings)}"
    return Diagnostic(
        "C311",
        "this step writes what is already there",
        Label(moves.moves.span, f"{who}: {located.name(int(moves.dest[0]))} holds the same data before and after"),
        notes=("on every rank",),
        help="drop the statement, or the loop iteration in which it changes nothing",
    )
