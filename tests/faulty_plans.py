"""One Plan for each law that no text can break: a right one, made by the compiler, with one thing changed.

Turns nothing into Plans; assumes the compiler's are right. Does not render: `test_plan_faults.py` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from brute_force import without_wait
from flag_mutants import taken
from plans import changed

from commdsl import compiler
from commdsl.ir.schedules import Schedule
from commdsl.program.launches import Launch
from commdsl.program.memory import Rights
from commdsl.program.moves import CELL
from commdsl.program.plan import Plan
from commdsl.program.visited import plan_of, segments

TEXT = """\
schedule allgather_ring for P ranks where P >= 2 {
  input x  output y[P blocks]
  ensure allgather(x -> y)
  each r { copy x -> y[r] }
  for s in 0 ..< P - 1 {
    each r { put y[(r - s) % P] -> y[(r - s) % P] @ (r + 1) % P }
  }
}
"""
SWAP = """\
schedule swap for P ranks {
  inout x[2 blocks]
  ensure each r { x[0] == x[1] @ r  x[1] == x[0] @ r }
  each r {
    copy x[0] -> x[1]
    copy x[1] -> x[0]
  }
}
"""
PACKETS = """\
schedule allreduce_ring for P ranks where P >= 2 {
  inout x[P]
  ensure allreduce(x)
  tune { protocol packet }
  for s in 0 ..< P - 1 {
    each r { reduce x[(r - s) % P] -> x[(r - s) % P] @ (r + 1) % P }
  }
  for s in 0 ..< P - 1 {
    each r { put x[(r + 1 - s) % P] -> x[(r + 1 - s) % P] @ (r + 1) % P }
  }
}
"""
BROADCAST = """\
schedule broadcast_direct(root = 0) for P ranks where P > 1 {
  inout x
  ensure broadcast(x, root)
  each r, q where r == root and q != root { put x -> x @ q }
}
"""


LANDS = """\
schedule rotation_ring for P ranks where P >= 2 {
  inout kv
  ensure rotation(kv)
  tune { landing place }
  yield attend(kv)
  for s in 1 ..< P {
    each r { put kv -> kv @ (r + 1) % P }
    yield attend(kv)
  }
}
"""


def right(text: str = TEXT) -> tuple[Schedule, Plan]:
    proved = compiler.check(compiler.read_text(text, "example.comm", Path()), ranks=3)
    return proved.schedule, proved.plan


def with_tables(plan: Plan, **tables: np.ndarray) -> Plan:
    return changed(plan, ops=replace(plan.moves.ops, **tables))


def with_wait(plan: Plan, op: int, peer: int, ordinal: int) -> Plan:
    """The Plan with one more wait, the last of its operation."""
    ops = plan.moves.ops
    at = ops.wait_begin[op + 1]
    row = {"wait_peer": peer, "wait_ordinal": ordinal, "wait_rounds_back": 0, "wait_reason": 0}
    columns = {name: np.insert(getattr(ops, name), at, value) for name, value in row.items()}
    return with_tables(plan, wait_begin=ops.wait_begin + (np.arange(ops.num_ops + 1) > op).astype(np.int32), **columns)


def circle(plan: Plan) -> Plan:
    """Every rank waits for its first signal before it does anything."""
    ops, begin = plan.moves.ops, plan.moves.ops.wait_begin.copy()
    for rank in range(plan.num_ranks):
        first = ops.rank_begin[rank]
        begin[first + 1 : np.flatnonzero(ops.wait_begin > ops.wait_begin[first])[0]] += 1
    return with_tables(plan, wait_begin=begin)


def never(plan: Plan) -> Plan:
    ordinal = plan.moves.ops.wait_ordinal.copy()
    ordinal[-1] += 1
    return with_tables(plan, wait_ordinal=ordinal)


def idle(plan: Plan) -> Plan:
    """Rank 2 asks once more, at its last operation, for what it has seen."""
    return with_wait(plan, plan.moves.ops.num_ops - 1, int(plan.moves.ops.wait_peer[-1]), 1)


def unwritten(plan: Plan) -> Plan:
    """The last read of a cell is of one that nobody writes."""
    index = plan.moves.ops.source_index.copy()
    index[np.flatnonzero(plan.moves.ops.source_space == CELL)[-1]] = plan.moves.num_cells
    return changed(with_tables(plan, source_index=index), num_cells=plan.moves.num_cells + 1)


def late_read(plan: Plan) -> Plan:
    """Rank 0 returns in the second chunk what came in as the first, which it has overwritten by then."""
    access = [tensor.access for tensor in plan.moves.tensors]
    copies_out = np.flatnonzero(plan.moves.ops.dest_space == access.index(Rights.WRITE))
    second = plan.moves.ops.source_begin[copies_out[1]]
    space, index = plan.moves.ops.source_space.copy(), plan.moves.ops.source_index.copy()
    space[second], index[second] = access.index(Rights.READ), 0
    return with_tables(plan, source_space=space, source_index=index)


def exchanged(plan: Plan) -> Plan:
    """The last two blocks that rank 2 returns stand in each other's place."""
    index = plan.moves.ops.dest_index.copy()
    index[[-1, -2]] = index[[-2, -1]]
    return with_tables(plan, dest_index=index)


def with_moves(plan: Plan, change: Callable[[Plan], Plan]) -> Plan:
    """A Plan that stops at yields, the moves of whose first segment are changed."""
    (first, *_) = segments(plan)
    other = change(plan_of(plan, first)).moves
    roles = []
    for role in plan.roles:
        phases = (replace(p, moves=other) if isinstance(p, Launch) and p.moves is first else p for p in role.phases)
        roles.append(replace(role, phases=tuple(phases)))
    return replace(plan, roles=tuple(roles))


def untaken(plan: Plan) -> Plan:
    """Rank 0 does not take what is put to it: its launch may be over before."""
    last = int(plan.moves.ops.rank_begin[1]) - 1
    return taken(plan, [op for op in range(plan.moves.ops.num_ops) if op != last])


def eager(plan: Plan) -> Plan:
    """The root meets the call of a rank that sends it nothing."""
    heard = plan.agree.heard.copy()
    heard[0, 1] = True
    return replace(plan, agree=replace(plan.agree, heard=heard))


FAULTS: dict[str, tuple[str, Callable[[Plan], Plan]]] = {
    "C201": (TEXT, circle),
    "C202": (TEXT, lambda plan: without_wait(plan, 0)),
    "C203": (TEXT, never),
    "C204": (TEXT, idle),
    "C205": (TEXT, lambda plan: changed(plan, rotation=1)),
    "C206": (SWAP, lambda plan: with_tables(plan, barrier=np.zeros_like(plan.moves.ops.barrier))),
    "C207": (TEXT, unwritten),
    "C208": (SWAP, late_read),
    "C209": (PACKETS, lambda plan: changed(plan, rotation=1)),
    "C210": (TEXT, exchanged),
    "C211": (BROADCAST, eager),
    "C212": (LANDS, lambda plan: with_moves(plan, untaken)),
    "C342": (TEXT, lambda plan: changed(plan, num_cells=plan.moves.num_cells + 1)),
}
