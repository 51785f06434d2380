"""Turns each form of what a file declares into text: Syntax as a tree, IR as statements with their rows or as routes,
Plan as operations or phases.

Assumes the forms as their modules define them. Prints all of it, to be read and compared. Does not fold: `timeline`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from itertools import pairwise
from typing import assert_never

import numpy as np

from commdsl.ir.dispatches import ByKey, ByTable, Dispatch, Often, RowTensor, Sort
from commdsl.ir.schedules import AnyStep, Buffer, Contract, Rotation, Schedule, Statement, Step, Task, Yield
from commdsl.language.source import Source, Span
from commdsl.language.syntax import File, Node
from commdsl.program.actors import actors, name_of, num_ranks_of
from commdsl.program.launches import described as between
from commdsl.program.memory import words_for
from commdsl.program.moves import CELL, OpKind, Reason
from commdsl.program.moves import Moves as Operations
from commdsl.program.phases import AddUp, Each, FinishBack, Push, PushAgain, PushBack, PushByKey
from commdsl.program.plan import Plan
from commdsl.program.proof.events import Step as Act
from commdsl.program.proof.events import steps
from commdsl.program.visited import kept_by, landing, plan_of, segments, started
from commdsl.program.wording import form_words
from commdsl.program.wording import name_of as name_of_phase


def syntax_text(files: tuple[File, ...]) -> str:
    """Every item of every file, one node a line, children indented."""
    lines: list[str] = []
    for file in files:
        lines.append(f"file {file.source.name}")
        for item in file.items:
            lines += [f"  {line}" for line in tree("", item)]
    return "\n".join(lines)


def tree(name: str, value: object) -> Iterator[str]:
    """A node with its plain fields on its own line and its nodes and tuples below."""
    head = f"{name}: " if name else ""
    if isinstance(value, Node):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.name != "span"]
        plain = [
            f"{key}={atom(item)}" for key, item in fields if not isinstance(item, Node | tuple) and item is not None
        ]
        yield f"{head}{type(value).__name__}" + (f" {' '.join(plain)}" if plain else "")
        for key, item in fields:
            if isinstance(item, Node | tuple) and item != ():
                yield from (f"  {line}" for line in tree(key, item))
    elif isinstance(value, tuple):
        yield f"{head}{len(value)} items"
        for item in value:
            yield from (f"  {line}" for line in tree("", item))
    else:
        yield f"{head}{atom(value)}"


def atom(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, Source | Span):
        return str(value)
    return repr(value)


def ir_text(schedule: Schedule) -> str:
    """The resolved schedule: buffers, contracts, cycles, then every step with the rows of its statements."""
    params = "".join(f" {name}={value}" for name, value in schedule.params)
    topology = schedule.topology
    lines = [
        f"schedule {schedule.name} for {schedule.num_ranks} ranks{params}",
        f"topology {topology.words}",
    ]
    for link in topology.links:
        lines.append(f"  link {link.words}")
    for buffer in schedule.buffers:
        own = (f", {word} {name}" for word, name in (("of", buffer.element), ("like", buffer.like)) if name)
        shape = f"{buffer.blocks} blocks cut into {buffer.cut}"
        lines.append(f"{buffer.kind.value} {buffer.name}: {shape}{''.join(own)}")
    for cycles in schedule.cycles:
        for index, order in enumerate(cycles.orders):
            lines.append(f"cycle {cycles.name}[{index}]: {' '.join(map(str, order))}")
    for contract in schedule.contracts:
        lines += contract_lines(schedule, contract)
    lines.append(f"role {schedule.role}" if schedule.role else "no role")
    number = 0
    for step in schedule.steps:
        number += isinstance(step, Step)
        lines += step_lines(schedule, number, step)
    return "\n".join(lines)


def contract_lines(schedule: Schedule, contract: Contract) -> list[str]:
    source, dest = schedule.buffers[contract.source_buffer], schedule.buffers[contract.dest_buffer]
    if contract.rotation is not None:
        return rotation_lines(schedule, contract.rotation)
    said, how = "" if contract.rounding is None else f" {contract.rounding.words}", contract.operation
    lines = [f"ensure {contract.name}({source.name} -> {dest.name}){f' {how}' if how else ''}{said}"]
    for rank, chunk, value in zip(contract.dest_rank, contract.dest_chunk, contract.value, strict=True):
        valid = slice(None) if contract.source_valid is None else contract.source_valid[value]
        pairs = zip(contract.source_chunk[value][valid], contract.source_rank[value][valid], strict=True)
        terms = [place(source, int(c), int(r)) for c, r in pairs]
        words = " + ".join(terms) if how in (None, "sum") else f"{how}({', '.join(terms)})"
        lines.append(f"  {place(dest, int(chunk), int(rank))} == {words}")
    return lines


def rotation_lines(schedule: Schedule, rotation: Rotation) -> list[str]:
    """Whose pieces each rank is handed, where a condition leaves some out."""
    sources, dests, back = (
        [schedule.buffers[at].name for at in one] for one in (rotation.sources, rotation.dests, rotation.back)
    )
    pairs = ", ".join(f"{source} -> {dest}" for source, dest in zip(sources, dests, strict=True))
    lines = [f"ensure rotation({pairs})" + (f" back {', '.join(back)}" if back else "")]
    if rotation.visits is None:
        return lines
    source = schedule.buffers[rotation.sources[0]]
    for rank, owners in enumerate(rotation.visits):
        for owner, chunks in enumerate(owners):
            if chunks.any():
                pieces = " ".join(place(source, int(chunk), owner) for chunk in chunks.nonzero()[0])
                lines.append(f"  rank {rank} is handed {pieces}")
    return lines


def step_lines(schedule: Schedule, number: int, step: AnyStep) -> list[str]:
    bindings = "".join(f" {name}={value}" for name, value in step.bindings)
    match step:
        case Yield():
            return [f"{schedule.words(step)}{bindings}"]
        case Task(tiles=tiles, role=role):
            cut = f" tiles {' x '.join(map(str, tiles))}" if tiles else ""
            return [f"{schedule.words(step)}{cut}{f' on {role}' if role else ''}{bindings}"]
        case Step():
            pass
        case _:
            assert_never(step)
    lines = [f"step {number}{bindings}"]
    for moves in step.moves:
        how = f" by {moves.operation}" if moves.operation else ""
        how += "" if moves.cast is None else f" as {moves.cast.words}"
        lines.append(f"  {moves.kind.value}{' list' if moves.is_list else ''}{how}  # {moves.span}")
        lines += [f"    {row}" for row in move_lines(schedule, moves)]
    return lines


def move_lines(schedule: Schedule, moves: Statement) -> Iterator[str]:
    source, dest = schedule.buffers[moves.source_buffer], schedule.buffers[moves.dest_buffer]
    for row in range(len(moves.actor)):
        valid = slice(None) if moves.source_valid is None else moves.source_valid[row]
        pairs = zip(moves.source_chunk[row][valid], moves.source_rank[row][valid], strict=True)
        terms = ", ".join(place(source, int(c), int(r)) for c, r in pairs)
        target = place(dest, int(moves.dest_chunk[row]), int(moves.dest_rank[row]))
        yield f"rank {moves.actor[row]}: {terms} {'+->' if moves.accumulate else '->'} {target}"


def place(buffer: Buffer, chunk: int, rank: int) -> str:
    """`x[3] @ 2`."""
    indices = ", ".join(str(int(index)) for index in np.unravel_index(chunk, buffer.dims)) if buffer.dims else ""
    return f"{buffer.name}[{indices}] @ {rank}" if indices else f"{buffer.name} @ {rank}"


def dispatch_lines(dispatch: Dispatch) -> Iterator[str]:
    """Tensors, routes, how rows travel, and the way back."""
    topology = dispatch.topology
    params = "".join(f" {name}={value}" for name, value in dispatch.params)
    yield f"dispatch {dispatch.name}{params} for {dispatch.num_ranks} ranks"
    yield f"topology {topology.name}: {topology.num_nodes} × {topology.gpus_per_node} GPUs of {topology.num_sms} SMs"
    for route in dispatch.routes:
        tensors = ", ".join(_sent(tensor) for tensor in dispatch.tensors if dispatch.routes[tensor.route] is route)
        match route:
            case ByTable(name, many, order):
                goes = "to several ranks, a copy each" if many else "to one rank"
                placed = ", ".join(sort.value for sort in order)
                yield f"route {name} of {tensors}: a shard goes {goes}; placed by ({placed})"
            case ByKey(key, rank_of, order, often, aligned, value, node):
                placed = ", ".join(key if sort is Sort.KEY else sort.value for sort in order)
                to = "" if aligned == 1 else f", each {key}'s rows from a multiple of {aligned} on"
                goes = f"a row goes to the rank of each of its keys, {often.value}"
                goes += f", and to another node of {node} once" if node else ""
                yield f"route of {tensors}: {goes}; placed by ({placed}){to}"
                yield from () if value is None else (f"{value}: a float32 beside each row that arrives",)
                for rank in range(dispatch.num_ranks):
                    keys = [number for number, of in enumerate(rank_of) if of == rank]
                    yield f"rank {rank} has {key} {', '.join(_runs(keys))}"
            case _:
                assert_never(route)
    if not any(isinstance(route, ByKey) for route in dispatch.routes):
        yield f"put {dispatch.put.value}"
    if dispatch.back is None:
        yield "no way back"
    else:
        by = "" if dispatch.back.weight is None else f" times {dispatch.back.weight}"
        has_nodes = any(isinstance(route, ByKey) and route.node for route in dispatch.routes)
        then = "then those of a node, one row a node" if has_nodes else "one row a rank"
        once = f", those of a rank there, {then} crosses" if dispatch.back.once else ""
        yield f"back {', '.join(dispatch.back.names)}: copies added up{by}{once}"
    yield f"role {dispatch.role}" if dispatch.role else "no role"


def _sent(tensor: RowTensor) -> str:
    return tensor.name if tensor.stretch == 0 else f"{tensor.name} as float8 by {tensor.stretch}"


def _runs(keys: list[int]) -> Iterator[str]:
    """`0 ..< 32`, and a number that has no neighbour by itself."""
    starts = [at for at, key in enumerate(keys) if not at or keys[at - 1] != key - 1]
    for first, last in zip(starts, [*starts[1:], len(keys)], strict=True):
        yield f"{keys[first]}" if last - first == 1 else f"{keys[first]} ..< {keys[last - 1] + 1}"


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


def unit_lines(plan: Plan) -> Iterator[str]:
    """What buffers are made of, where that is not the same for all."""
    units = {kept.name: kept.unit for kept in kept_by(plan)}
    for name, unit in units.items() if len({*units.values()}) > 1 else ():
        long = f"as long as those of {unit.size}" if unit.factor is None else f"of {unit.size} times {unit.factor}"
        yield f"{name}: blocks {long}, {unit.element or f'of the type of {unit.typed}'}"


def static_lines(plan: Plan) -> list[str]:
    """Each rank's operations."""
    lines = [
        f"plan {plan.name} for {plan.num_ranks} ranks on {plan.topology}",
        f"lanes {plan.moves.lanes} on {plan.moves.sms} SMs  threads {plan.moves.threads}  tile {plan.tile_bytes} bytes"
        f"  protocol {plan.moves.protocol.value}",
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


def host_text(text: str) -> str:
    """A kernel's text under the line that says how it is built for the processor."""
    from commdsl.build import host  # 20 ms that the other stages do not need

    return f"// The same text as for CUDA; a host compiler builds it with: {' '.join(host.FLAGS)}\n{text}"
