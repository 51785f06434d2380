"""Turns each form of what a file declares into text: Syntax as a tree, IR as statements with their rows or as routes.

Assumes the forms as their modules define them. Prints all of it, to be read and compared. Does not fold: `timeline`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import assert_never

import numpy as np

from commdsl.checks.locations import Located
from commdsl.checks.terms import Terms
from commdsl.ir.contracts import Contract, Rotation
from commdsl.ir.dispatches import ByKey, ByTable, Dispatch, RowTensor, Sort
from commdsl.ir.schedules import AnyStep, Buffer, Schedule, Statement, Step, Task, Yield
from commdsl.ir.words import step_words
from commdsl.language.source import Source, Span
from commdsl.language.syntax import File, Node
from commdsl.machine.printable import printable
from commdsl.machine.topology import Topology


def syntax_text(files: tuple[File, ...]) -> str:
    """Every item of every file, one node a line, children indented."""
    lines: list[str] = []
    for file in files:
        lines.append(f"file {printable(file.source.name, lines=False)}")
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
    lines = [f"schedule {schedule.name} for {schedule.num_ranks} ranks{params}", *machine_lines(schedule.topology)]
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


def machine_lines(topology: Topology) -> Iterator[str]:
    """A topology and its classes of links."""
    yield f"topology {topology.words}"
    for link in topology.links:
        yield f"  link {link.words}"


def topology_text(topology: Topology) -> str:
    """A topology with every pair of GPUs that a link is declared for, and every pair of ranks that is an exception."""
    lines = list(machine_lines(topology))
    for link in topology.links:
        if link.pairs is not None:
            joined = " ".join(f"{source}->{dest}" for source, dest in link.pairs.tolist())
            lines.append(f"  {link.name} joins GPUs of a node: {joined}")
    lines += [f"  missing: rank {source} -> {dest}" for source, dest in sorted(topology.missing)]
    lines += [f"  degraded: rank {source} -> {dest} {left / 1e9:g} GB/s" for source, dest, left in topology.degraded]
    lines.append(f"ranks {topology.num_ranks}: rank = node * {topology.gpus_per_node} + gpu")
    return "\n".join(lines)


def contract_lines(schedule: Schedule, contract: Contract) -> list[str]:
    source, dest = schedule.buffers[contract.source_buffer], schedule.buffers[contract.dest_buffer]
    if contract.rotation is not None:
        return rotation_lines(schedule, contract.rotation)
    said, how = "" if contract.rounding is None else f" {contract.rounding.words}", contract.operation
    if contract.term is not None:
        built = Terms(Located(schedule), whole=True)
        lines = [f"ensure {contract.name}({dest.name}){f' {how}' if how else ''}{said}"]
        places = zip(contract.dest_rank.tolist(), contract.dest_chunk.tolist(), strict=True)
        for row, (rank, chunk) in enumerate(places):
            lines.append(f"  {place(dest, chunk, rank)} == {built.text(built.wanted(contract, row), rank)}")
        return lines
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
            return [f"{step_words(schedule, step)}{bindings}"]
        case Task(tiles=tiles, role=role):
            cut = f" tiles {' x '.join(map(str, tiles))}" if tiles else ""
            return [f"{step_words(schedule, step)}{cut}{f' on {role}' if role else ''}{bindings}"]
        case Step():
            pass
        case _:
            assert_never(step)
    lines = [f"step {number}{bindings}"]
    for moves in step.moves:
        how = f" by {moves.operation}" if moves.operation else ""
        how += "" if moves.cast is None else f" as {moves.cast.words}"
        lines.append(
            f"  {moves.kind.value}{' list' if moves.is_list else ''}{how}{moves.epilogue.words}  # {moves.span}"
        )
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


def host_text(text: str) -> str:
    """A kernel's text under the line that says how it is built for the processor."""
    from commdsl.build import host  # 20 ms that the other stages do not need

    return f"// The same text as for CUDA; a host compiler builds it with: {' '.join(host.FLAGS)}\n{text}"
