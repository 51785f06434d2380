"""Turns a Plan into text: operations as each rank does them, phases of routed calls, launches of what has visits.

Assumes verified Plans. Prints all of it, to be read and compared. Does not fold: `timeline`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import assert_never

from commdsl.ir.dispatches import Often
from commdsl.ir.products import stopping
from commdsl.ir.schedules import Schedule
from commdsl.program.actors import actors, name_of, num_ranks_of
from commdsl.program.launches import described as between
from commdsl.program.memory import words_for
from commdsl.program.moves import CELL, OpKind, Reason
from commdsl.program.moves import Moves as Operations
from commdsl.program.phases import AddUp, Each, FinishBack, Push, PushAgain, PushBack, PushByKey
from commdsl.program.plan import Plan
from commdsl.program.proof.events import Step as Act
from commdsl.program.proof.events import steps
from commdsl.program.pushed import pushes
from commdsl.program.visited import kept_by, landing, plan_of, segments, started
from commdsl.program.wording import form_words
from commdsl.program.wording import name_of as name_of_phase


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
    yield from (between(phase, number) for number, phase in started(plan))
    for moves in segments(plan):
        yield from static_lines(plan_of(plan, moves))


def pushed_lines(schedule: Schedule, plan: Plan) -> Iterator[str]:
    """Which launches make no copies where our kernel multiplies, if products are to push."""
    if schedule.tuning.matmul == "push":
        found = pushes(plan, stopping(schedule).parts, 0).of.values()
        yield f"pushed by products: launches {', '.join(str(number) for number in sorted(one.launch for one in found))}"


def unit_lines(plan: Plan) -> Iterator[str]:
    """What buffers are made of, where that is not the same for all."""
    units = {kept.name: kept.unit for kept in kept_by(plan)}
    for name, unit in units.items() if len({*units.values()}) > 1 else ():
        long = f"as long as those of {unit.size}" if unit.factor is None else f"of {unit.size} times {unit.factor}"
        long += ", half as wide" if unit.is_gated else ""
        yield f"{name}: blocks {long}, {unit.element or f'of the type of {unit.typed}'}"


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
        + form_words(moves, "source", k)
        for k in range(int(ops.source_begin[index]), int(ops.source_begin[index + 1]))
    )
    dest = location(moves, int(ops.dest_space[index]), int(ops.dest_rank[index]), int(ops.dest_index[index]))
    dest += form_words(moves, "dest", index)
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


def routed_lines(plan: Plan) -> Iterator[str]:
    """The launch constants, then what every lane does in a call: where rows go is data that comes with it."""
    yield f"plan {plan.name} for {plan.num_ranks} ranks on {plan.topology}"
    lanes = f"lanes up to {plan.comm.lanes}, one an SM  threads {plan.comm.threads}"
    room = f"symmetric {plan.symmetric_bytes} bytes per rank, and what Limits say"
    if plan.key_positions:
        yield from (lanes, room, f"keys {len(plan.key_positions)}, on the device")
        yield from (_way_there(phase) for phase in plan.comm.phases if isinstance(phase, PushByKey | PushAgain))
        yield from (_way_back(phase) for phase in plan.comm.phases if isinstance(phase, PushBack | AddUp | FinishBack))
    else:
        put = "packed" if plan.push.packed else "rows"
        yield from (f"{lanes}  tile {plan.tile_bytes} bytes  put {put}", room, *_tensor_lines(plan.push))
    yield f"agree: {plan.agreeing}"
    yield "a call, on every rank"
    yield from (f"  {line}" for line in phase_lines(plan))
    yield from (f"  {line}" for line in _launch_lines(plan))


def _tensor_lines(push: Push) -> Iterator[str]:
    for index, (rows, copied) in enumerate(zip(push.given, push.copied, strict=True)):
        there = "unpacked from a message per peer" if push.packed else "straight to its place"
        back = "copies wait until they are summed" if copied else "so is its way back"
        yield f"tensor {index} {rows.name}: {there}; {back}"


def _way_there(phase: PushByKey | PushAgain) -> str:
    """How often a row travels, to where, and what arrives with it."""
    if isinstance(phase, PushAgain):
        names, beside = [phase.given.name], "nothing"
    else:
        cast = [f" as float8 by {stretch}" if stretch else "" for stretch in phase.stretches]
        names = [rows.name + how for rows, how in zip(phase.given, cast, strict=True)]
        beside = ", ".join(rows.name for rows in phase.to[len(phase.given) :])
    to = {
        Often.EACH: "to the places of its keys",
        Often.ONCE: "to the place of its first key there, from which the others are filled",
        Often.INDEX: "to the place of its first key there",
    }
    across = f"; to a node of {phase.node} once, and from there to its ranks" if phase.node else ""
    apart = "" if phase.aligned == 1 else f", each key's from a multiple of {phase.aligned} on"
    return f"{', '.join(names)}: {phase.often.value}, {to[phase.often]}{across}{apart}; beside it {beside}"


def _way_back(phase: PushBack | AddUp | FinishBack) -> str:
    """What is made of rows, where they are, and of what has come back."""
    times = "" if isinstance(phase, AddUp) or phase.weights is None else f" times {phase.weights.name}"
    match phase:
        case PushBack(each=Each.RANK | Each.NODE):
            return f"{phase.given.name}, where it is: a row's places of this rank, by key{times}, in float32, rounded"
        case AddUp():
            return f"{phase.to.name}, between: a row's sums of this node, by rank, in float32, rounded"
        case PushBack():
            return f"{phase.given.name}, where it is: as it is"
        case FinishBack(each=Each.WORD):
            return f"{phase.to.name}, come back: as it came"
        case FinishBack():
            order = {Each.RANK: "by rank", Each.NODE: "by node"}.get(phase.each, "by key")
            return f"{phase.to.name}, come back: {order}{times}, in float32, rounded"
        case _:
            assert_never(phase)


def phase_lines(plan: Plan) -> Iterator[str]:
    """`push: every lane; reads q of its rank; writes q of all ranks`."""
    for step in steps(plan):
        yield "; ".join([f"{step.name}: {step.by.value}", *_clauses(step)])


def _launch_lines(plan: Plan) -> Iterator[str]:
    """What each launch does of a call that is two."""
    for name, half in zip(("send", "receive"), plan.halves or (), strict=False):
        yield f"as a launch of its own, {name}: {', '.join(map(name_of_phase, half))}"


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
