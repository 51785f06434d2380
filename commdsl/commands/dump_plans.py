"""Turns a Plan into text: operations as each rank does them, phases of routed calls, launches of what has visits.

Assumes verified Plans. Prints all of it, to be read and compared. Does not fold: `timeline`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from commdsl.ir.classes import Dim
from commdsl.program.actors import actors, name_of, num_ranks_of
from commdsl.program.launches import described as between
from commdsl.program.memory import words_for
from commdsl.program.moves import CELL, Form, OpKind, Reason
from commdsl.program.moves import Moves as Operations
from commdsl.program.plan import Plan
from commdsl.program.proof.events import Step as Act
from commdsl.program.proof.events import steps
from commdsl.program.visited import kept_by, landing, plan_of, segments, started, tasks


def plan_text(plan: Plan) -> str:
    """The launch constants, then what each rank does in the order in which it does it."""
    if plan.is_visited:
        return "\n".join(visited_lines(plan))
    return "\n".join(static_lines(plan) if plan.is_static else routed_lines(plan))


def visited_lines(plan: Plan) -> Iterator[str]:
    """What is started, in order, with what it waits for of the other stream; then each launch as a Plan of its own."""
    yield f"plan {plan.name} for {plan.num_ranks} ranks on {plan.topology}, with visits"
    yield f"symmetric {plan.symmetric_bytes} bytes per rank; copy 0 of a buffer is the caller's, others are of the call"
    lands = ", ".join(f"{kept.name} {kept.copy}" for kept in landing(plan))
    yield from (f"in symmetric memory besides: {lands}",) if lands else ()
    yield from unit_lines(plan)
    yield from order_lines(plan)
    for moves in segments(plan):
        yield from static_lines(plan_of(plan, moves))


def order_lines(plan: Plan) -> Iterator[str]:
    """What is started, in order."""
    yield from (between(phase, number, "task" if tasks(plan) else "visit") for number, phase in started(plan))


def pushing_lines(plan: Plan | None) -> Iterator[str]:
    """The order of the Plan whose tasks push, where there is one."""
    if plan is not None:
        yield "where a launch is one round of copies:"
        yield from order_lines(plan)


def unit_lines(plan: Plan) -> Iterator[str]:
    """What buffers are made of, where that is not the same for all."""
    units = {kept.name: kept.unit for kept in kept_by(plan)}
    for name, unit in units.items() if len({*units.values()}) > 1 else ():
        sides = " by ".join(map(side_text, unit.dims))
        long = f"of {sides}" if sides else f"as long as those of {unit.size}"
        yield f"{name}: blocks {long}, {unit.element or f'of the type of {unit.typed}'}"


def side_text(dim: Dim) -> str:
    """`half of the rows of w`."""
    scale = {-1: "half of the ", 0: "the ", 1: "twice the "}.get(dim.scale, f"2^{dim.scale} times the ")
    return f"{scale}{('rows', 'columns')[dim.side]} of {dim.size}"


def static_lines(plan: Plan) -> list[str]:
    """Each rank's operations."""
    lines = [
        f"plan {plan.name} for {plan.num_ranks} ranks on {plan.topology}",
        f"lanes {plan.moves.lanes} on {plan.moves.sms} SMs  threads {plan.moves.threads}  tile {plan.tile_bytes} bytes"
        f"  protocol {plan.moves.carrier.name}",
        f"cells {plan.moves.num_cells}  rotation {plan.moves.rotation}"
        f"  symmetric {plan.symmetric_bytes} bytes per rank",
        f"may be the same memory: {', '.join(plan.moves.alias_safe) or 'none'}",
    ]
    for index, tensor in enumerate(plan.moves.tensors):
        shape = f"{tensor.blocks} blocks cut into {tensor.cut}"
        lines.append(
            f"tensor {index} {tensor.name}: {tensor.access.value}, {shape}{', yields' if tensor.is_yield else ''}"
            f"{', lands' if tensor.lands else ''}{', sums in float32' if tensor.is_sum else ''}"
        )
    lines.append(f"agree: {plan.agreeing}")
    if plan.tiles is not None:
        lines.insert(2, f"tiles on {plan.tiles.sms} SMs  threads {plan.tiles.threads}")
    acting = actors(plan)
    begins = acting.ops.rank_begin.tolist()
    for actor, (first, last) in enumerate(pairwise(begins)):
        lines.append(name_of(acting, actor))
        lines += [f"  {index - first:>3} {op_text(acting, index)}" for index in range(first, last)]
    return lines


def op_text(moves: Operations, index: int) -> str:
    """`copy cell 3 @ 2 <- x[1]  after rank 1 #2 (read after write)  signals 2  # ring.comm:8 (s = 0)`."""
    ops = moves.ops
    sources = ", ".join(
        location(moves, int(ops.source_space[k]), int(ops.source_rank[k]), int(ops.source_index[k]))
        + _form_words(moves, "source", k)
        for k in range(int(ops.source_begin[index]), int(ops.source_begin[index + 1]))
    )
    dest = location(moves, int(ops.dest_space[index]), int(ops.dest_rank[index]), int(ops.dest_index[index]))
    dest += _form_words(moves, "dest", index)
    verb = OpKind(int(ops.kind[index])).name.lower()
    text = f"     and {dest}" if ops.joined[index] else f"{verb} {dest} <- {sources}"
    if ops.kind[index] == OpKind.HOLD:
        text = f"{verb} {dest}"
    text += f"  piece {ops.piece[index]}/{ops.cut[index]}"
    weights = ops.source_weight[int(ops.source_begin[index]) : int(ops.source_begin[index + 1])].tolist()
    if ops.kind[index] == OpKind.REDUCE and len(weights) > 1:
        text += f"  avg: by {' '.join(map(str, weights))} of {ops.whole[index]}"
    for k in range(int(ops.wait_begin[index]), int(ops.wait_begin[index + 1])):
        back = f", {ops.wait_rounds_back[k]} rounds back" if ops.wait_rounds_back[k] else ""
        reason = Reason(int(ops.wait_reason[k])).name.lower().replace("_", " ")
        text += f"  waits for {name_of(moves, int(ops.wait_peer[k]))} #{ops.wait_ordinal[k]}{back} ({reason})"
    if ops.barrier[index]:
        text += "  barrier"
    peers = ops.signal_peer[int(ops.signal_begin[index]) : int(ops.signal_begin[index + 1])]
    if len(peers):
        own = index >= int(ops.rank_begin[num_ranks_of(moves)])
        text += f"  signals {'its rank' if own else ' '.join(map(str, peers))}"
    return f"{text}  # {moves.origins[int(ops.origin[index])]}"


def location(moves: Operations, space: int, rank: int, index: int) -> str:
    return f"cell {index} @ {rank}" if space == CELL else f"{moves.tensors[space].name}[{index}] @ {rank}"


def _form_words(moves: Operations, side: str, at: int) -> str:
    """How an operand is, where values travel in another element type."""
    if moves.casts is None:
        return ""
    form = Form(int(getattr(moves.casts, side)[at]))
    return {Form.AS_IS: "", Form.CAST: f" as {moves.casts.cast.words}", Form.ROUNDED: " rounded"}[form]


def routed_lines(plan: Plan) -> Iterator[str]:
    """The launch constants, then what every lane does in a call: where rows go is data that comes with it."""
    yield f"plan {plan.name} for {plan.num_ranks} ranks on {plan.topology}"
    lanes = f"lanes up to {plan.comm.lanes}, one an SM  threads {plan.comm.threads}"
    room = f"symmetric {plan.symmetric_bytes} bytes per rank, and what Limits say"
    if plan.key_positions:
        yield from (lanes, room, f"keys {len(plan.key_positions)}, on the device")
    else:
        put = "packed" if plan.push.packed else "rows"
        yield from (f"{lanes}  tile {plan.tile_bytes} bytes  put {put}", room)
    yield from (line for phase in plan.comm.routed for line in phase.details)
    yield f"agree: {plan.agreeing}"
    yield "a call, on every rank"
    yield from (f"  {line}" for line in phase_lines(plan))
    yield from (f"  {line}" for line in _launch_lines(plan))


def phase_lines(plan: Plan) -> Iterator[str]:
    """`push: every lane; reads q of its rank; writes q of all ranks`."""
    for step in steps(plan):
        yield "; ".join([f"{step.name}: {step.by.value}", *_clauses(step)])


def _launch_lines(plan: Plan) -> Iterator[str]:
    """What each launch does of a call that is two."""
    for name, half in zip(("send", "receive"), plan.halves or (), strict=False):
        yield f"as a launch of its own, {name}: {', '.join(phase.name for phase in half)}"


def _clauses(step: Act) -> Iterator[str]:
    if step.wait is not None:
        yield f"waits until {step.wait.of.value} of {step.wait.ranks.value} did `{step.wait.step}`"
    for verb, writes in (("reads", False), ("writes", True)):
        places = [f"{words_for(one.memory)} of {one.on.value}" for one in step.touches if one.writes == writes]
        found = list(dict.fromkeys(places))
        if found:
            yield f"{verb} {', '.join(found)}"
    if step.tells is not None:
        yield f"tells {step.tells.value}"
