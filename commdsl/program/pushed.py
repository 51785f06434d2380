"""Turns a Plan with tasks into one whose tasks push: they store their results where peers want them, tile by tile.

Assumes a Plan that is proved. Does not prove the new one (`proof.hosted`), nor store anything (`runtime.fused`).

A launch of the copy engine has three parts: ranks tell each other what may be written, copies are made, and ranks tell
each other that all is there. A task that makes what is copied can make the copies, once peers have told that they are
ready; the end of the launch then waits for the task. A task that peers could be ready for only after the task itself,
or a later one, does not push.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from commdsl.program.launches import Launch, Return
from commdsl.program.memory import Kept
from commdsl.program.moves import OpKind
from commdsl.program.plan import Plan
from commdsl.program.tasks import Task, Tasks
from commdsl.program.visited import ended, launches, started, tasks


def pushing(plan: Plan) -> Plan:
    """Return the Plan in which every task pushes that can; the same one where none can."""
    number = {task: launch for launch, task in _pushed(plan)}
    if not number:
        return plan
    roles = []
    for role in plan.roles:
        phases = []
        for phase in role.phases:
            if isinstance(phase, Tasks):
                rows = tuple(replace(task, push=number.get(at)) for at, task in enumerate(phase.rows))
                phase = Tasks(rows)
            phases.append(phase)
        roles.append(replace(role, phases=tuple(phases)))
    return replace(plan, roles=tuple(roles))


def _pushed(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield each launch whose copies a task can make, with that task: the first launch that copies its result."""
    over = [over for (_, phase), over in zip(started(plan), ended(plan), strict=True) if isinstance(phase, Launch)]
    ahead, found = launches(plan), set[Kept]()
    for number, launch in enumerate(ahead):
        ends = max((one.after for one in ahead[: over[number]]), default=0)
        sources = {source for rank in range(plan.num_ranks) for source in (_source(launch, rank),)}
        source = sources.pop() if len(sources) == 1 else None
        made = None if source is None else _maker(plan, source)
        if source is not None and source not in found and made is not None and max(launch.opens, ends) <= made:
            found.add(source)
            yield number, made


def _source(launch: Launch, rank: int) -> Kept | None:
    """Return the one buffer that a rank copies in a launch, whole, to peers alone; None for any other launch."""
    moves, ops = launch.moves, launch.moves.ops
    rows = _rows(launch, rank)
    leaders = ops.leader_of[rows]
    spaces: set[int] = {*ops.source_space[ops.source_begin[leaders]].tolist()}
    are_whole = (ops.kind[rows] == OpKind.COPY) & (ops.cut[leaders] == 1) & (ops.dest_rank[rows] != rank)
    lands = {space for space, tensor in enumerate(moves.tensors) if tensor.lands and tensor.blocks == 1}
    is_of_one = launch.is_split and len(launch.reads) == len(spaces) == 1
    if is_of_one and bool(are_whole.all()) and {*ops.dest_space[rows].tolist()} <= lands:
        (space,) = spaces
        return launch.operands[space]
    return None


def _rows(launch: Launch, rank: int) -> NDArray[np.int64]:
    """Return the operations of a rank that copy."""
    ops = launch.moves.ops
    rows = np.arange(*ops.rank_begin[rank : rank + 2].tolist())
    copying: NDArray[np.int64] = rows[ops.kind[rows] != OpKind.HOLD]
    return copying


def destinations(launch: Launch, rank: int) -> tuple[tuple[int, Kept], ...]:
    """Return the peers that a rank copies to in a launch that a task can stand for, and the buffer on each."""
    ops = launch.moves.ops
    return tuple((int(ops.dest_rank[row]), launch.operands[int(ops.dest_space[row])]) for row in _rows(launch, rank))


def _maker(plan: Plan, result: Kept) -> int | None:
    """Return the number of the one task that writes it, and nothing else; None where there is none."""
    making = [(number, task) for number, task in enumerate(tasks(plan)) if result in task.writes]
    alone = len(making) == 1 and making[0][1].writes == (result,) and result not in making[0][1].added
    return making[0][0] if alone else None


def is_kept(plan: Plan, task: Task) -> bool:
    """Return whether anything but the launch that the task pushes for reads its result, or returns it."""
    if task.push is None:
        return True
    pushed = launches(plan)[task.push]
    others = (one.reads for one in plan.phases if isinstance(one, Launch | Return) and one is not pushed)
    return any(task.result in read for read in (*others, *(one.operands for one in tasks(plan))))
