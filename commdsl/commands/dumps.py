"""Turns each form of a schedule into text: Syntax as a tree, IR as statements with their rows, Plan as operations.

Assumes the forms as their modules define them. Prints all of it, to be read and compared. Does not fold: `timeline`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import assert_never

import numpy as np

from commdsl.ir.schedules import AnyStep, Buffer, Contract, Moves, Schedule, Step, Task, Yield
from commdsl.language.source import Source, Span
from commdsl.language.syntax import File, Node
from commdsl.program.moves import CELL, OpKind, Reason
from commdsl.program.plan import Plan


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
        f"topology {topology.name}: {topology.num_nodes} × {topology.gpus_per_node} GPUs of {topology.num_sms} SMs",
    ]
    for link in topology.links:
        caps = f"{link.port_bandwidth / 1e9:g} GB/s per gpu, {link.pair_bandwidth / 1e9:g} GB/s per pair"
        lines.append(f"  link {link.name} {link.scope.value}: {caps}, {link.latency * 1e6:g} us")
    for buffer in schedule.buffers:
        lines.append(f"{buffer.kind.value} {buffer.name}: {buffer.blocks} blocks cut into {buffer.cut}")
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
    lines = [f"ensure {contract.name}({source.name} -> {dest.name})" + (" sum" if contract.is_sum else "")]
    for rank, chunk, value in zip(contract.dest_rank, contract.dest_chunk, contract.value, strict=True):
        valid = slice(None) if contract.source_valid is None else contract.source_valid[value]
        pairs = zip(contract.source_chunk[value][valid], contract.source_rank[value][valid], strict=True)
        terms = " + ".join(place(source, int(c), int(r)) for c, r in pairs)
        lines.append(f"  {place(dest, int(chunk), int(rank))} == {terms}")
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
        lines.append(f"  {moves.kind.value}{' list' if moves.is_list else ''}  # {moves.span}")
        lines += [f"    {row}" for row in move_lines(schedule, moves)]
    return lines


def move_lines(schedule: Schedule, moves: Moves) -> Iterator[str]:
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


def plan_text(plan: Plan) -> str:
    """The launch constants, then each rank's operations in the order it runs them."""
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
        )
    for rank in range(plan.num_ranks):
        first, last = int(plan.moves.ops.rank_begin[rank]), int(plan.moves.ops.rank_begin[rank + 1])
        lines.append(f"rank {rank}")
        lines += [f"  {index - first:>3} {op_text(plan, index)}" for index in range(first, last)]
    return "\n".join(lines)


def op_text(plan: Plan, index: int) -> str:
    """`copy cell 3 @ 2 <- x[1]  after rank 1 #2 (read after write)  signals 2  # ring.comm:8 (s = 0)`."""
    ops = plan.moves.ops
    sources = ", ".join(
        location(plan, int(ops.source_space[k]), int(ops.source_rank[k]), int(ops.source_index[k]))
        for k in range(int(ops.source_begin[index]), int(ops.source_begin[index + 1]))
    )
    dest = location(plan, int(ops.dest_space[index]), int(ops.dest_rank[index]), int(ops.dest_index[index]))
    verb = OpKind(int(ops.kind[index])).name.lower()
    text = f"     and {dest}" if ops.joined[index] else f"{verb} {dest} <- {sources}"
    text += f"  piece {ops.piece[index]}/{ops.cut[index]}" + ("  average" if ops.scale[index] else "")
    for k in range(int(ops.wait_begin[index]), int(ops.wait_begin[index + 1])):
        back = f", {ops.wait_rounds_back[k]} rounds back" if ops.wait_rounds_back[k] else ""
        reason = Reason(int(ops.wait_reason[k])).name.lower().replace("_", " ")
        text += f"  waits for rank {ops.wait_peer[k]} #{ops.wait_ordinal[k]}{back} ({reason})"
    if ops.barrier[index]:
        text += "  barrier"
    peers = ops.signal_peer[int(ops.signal_begin[index]) : int(ops.signal_begin[index + 1])]
    if len(peers):
        text += f"  signals {' '.join(map(str, peers))}"
    return f"{text}  # {plan.moves.origins[int(ops.origin[index])]}"


def location(plan: Plan, space: int, rank: int, index: int) -> str:
    return f"cell {index} @ {rank}" if space == CELL else f"{plan.moves.tensors[space].name}[{index}] @ {rank}"


def host_text(text: str) -> str:
    """A kernel's text under the line that says how it is built for the processor."""
    from commdsl.build import host  # 20 ms that the other stages do not need

    return f"// The same text as for CUDA; a host compiler builds it with: {' '.join(host.FLAGS)}\n{text}"
