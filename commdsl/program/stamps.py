"""Turns a Plan into its stamped form, whose kernel says when what it does begins and ends, and a launch of that into
what each of the intervals is that it writes: the same order as in stamps.cuh and its users.

Assumes a proved Plan of chunks. Does not read what was written; `cost.profile` makes a report of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from commdsl.ir.schedules import Ints
from commdsl.language.diagnostics import InternalError
from commdsl.language.records import dataclass
from commdsl.program.launches import Launch, Visit
from commdsl.program.moves import Moves, OpKind, Origin
from commdsl.program.plan import Plan
from commdsl.program.sizes import Launch as Size
from commdsl.program.tasks import Task as Computed
from commdsl.program.tile_tasks import Tiles

INTERVAL = np.dtype([("begin", "<u8"), ("ready", "<u8"), ("end", "<u8"), ("sm", "<u8")])
"""Nanoseconds of one clock: when it began, when what it waited for was there, when it ended. `sm`: who worked, on a GPU
its SM, else the thread of the rank. All zero where nothing was done."""


@dataclass(frozen=True, slots=True)
class Task:
    """What several intervals have in common: a statement, a launch, a product."""

    what: str
    computes: bool  # or else it moves


@dataclass(frozen=True, eq=False)
class Layout:
    """Of the intervals that one launch writes on one rank, which of its tasks each is."""

    tasks: tuple[Task, ...]
    task: Ints

    @property
    def nbytes(self) -> int:
        return len(self.task) * INTERVAL.itemsize


def stamped(plan: Plan) -> Plan:
    """The same Plan, built another way."""
    if plan.is_static and not plan.is_visited and plan.moves.has_heads:
        raise InternalError(f"`{plan.name}` has as many rounds as peers say: its kernel has no time stamps")
    if not plan.is_static:
        raise InternalError(f"`{plan.name}` moves rows by a routing: its kernel has no time stamps")
    return replace(plan, stamped=True)


def layout(plan: Plan, rank: int, size: Size) -> Layout:
    """Every operation of every lane in every round; then, where lanes make rows, that of each lane; then, where there
    is a role that computes, its operations in the same order as those that move.
    """
    lanes, rounds = size.active_lanes, size.rounds
    parts = [_operations(plan.moves, rank, lanes * rounds)]
    if plan.by_row is not None:
        parts.append(alone(Task(plan.by_row.function, True), lanes))
    if plan.tiles is not None:
        parts.append(_operations(plan.tiles, rank, lanes * rounds))
    return together(parts)


def task_of(phase: Launch | Visit | Computed) -> Task:
    """What is launched, or multiplied, as a whole."""
    reads = phase.operands if isinstance(phase, Computed) else phase.reads
    read, written = (", ".join(kept.name for kept in some) for some in (reads, phase.writes))
    return Task(f"{read} -> {written}", not isinstance(phase, Launch))


def alone(task: Task, count: int = 1) -> Layout:
    """Intervals of one task."""
    return Layout((task,), np.zeros(count, np.int32))


def together(parts: Sequence[Layout]) -> Layout:
    """One behind another."""
    firsts = np.cumsum([0, *(len(part.tasks) for part in parts)])
    task = [part.task + np.int32(first) for part, first in zip(parts, firsts.tolist(), strict=False)]
    return Layout(tuple(task for part in parts for task in part.tasks), np.concatenate(task))


def _operations(phase: Moves | Tiles, rank: int, times: int) -> Layout:
    ops, is_computed = phase.ops, isinstance(phase, Tiles)
    first, last = np.searchsorted(ops.leaders, ops.rank_begin[rank : rank + 2])
    which = ops.leaders[first:last]
    words = [
        _task(phase.origins[origin], OpKind(kind), is_computed)
        for origin, kind in zip(ops.origin[which].tolist(), ops.kind[which].tolist(), strict=True)
    ]
    tasks = tuple(dict.fromkeys(words))
    return Layout(tasks, np.tile(np.array([tasks.index(one) for one in words], np.int32), times))


def _task(origin: Origin, kind: OpKind, is_computed: bool) -> Task:
    """A statement is one task, however often a loop runs it."""
    line, _ = origin.span.position
    words = f"line {line}: {kind.name.lower()}" + (f" [{origin.note}]" if origin.note else "")
    return Task(words, is_computed)
