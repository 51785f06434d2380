"""Turns `compute` and a `yield` with a body into a Task and a Yield, and finds their mistakes that need no numbers.

Assumes the names in sight. Does not compute, and does not ask whether what they read is there; `checks` do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from commdsl.ir.contracts import Contract, sources_of
from commdsl.ir.functions import ELEMENTWISE, FUNCTIONS, MATMUL, ROWWISE, Function
from commdsl.ir.resolve.expressions import ExpressionRules
from commdsl.ir.resolve.faults import Faults, nearest
from commdsl.ir.schedules import AnyStep, Applied, Buffer, Statement, Step, Task, Yield
from commdsl.language import syntax as syn
from commdsl.language.kinds import BufferKind, MoveKind

MOST_TILE = 2**24
TILE_UNIT = 16  # elements: of every dtype whole 16-byte units


def check_task(rules: ExpressionRules, node: syn.Visit | syn.Compute, role_names: tuple[str, ...]) -> None:
    """Buffers, function and role are known, and each buffer is written once."""
    passing, seen = node.passing, set[str]()
    for buffer in (*passing.reads, *passing.writes):
        rules.buffer(buffer)
    for buffer in passing.writes:
        if buffer.text in seen:
            rules.faults.report("C102", f"`{buffer.text}` is written twice", buffer.span, "a second time here")
        seen.add(buffer.text)
    if isinstance(node, syn.Compute):
        _check_function(rules.faults, node)
        if node.role is not None:
            check_role(rules, node.role, role_names)


def check_role(rules: ExpressionRules, role: syn.Name, role_names: tuple[str, ...]) -> None:
    if role.text not in role_names:
        help = nearest(role.text, role_names) or "declare it: `roles NAME { ROLE sms 0 ..< 16 }`"
        rules.faults.report("C117", f"there is no role `{role.text}`", role.span, "not declared", help=help)


def _check_function(faults: Faults, node: syn.Compute) -> None:
    name, passing = node.function, node.passing
    if name.text in ROWWISE:
        _check_rowwise(faults, node, ROWWISE[name.text])
        return
    function = ELEMENTWISE.get(name.text)
    if function is None:
        known = ", ".join(f"`{one}`" for one in FUNCTIONS)
        faults.report("C122", f"no function of the name `{name.text}` is known yet", name.span, "not built in",
                      help=f"known: {known}; what the caller computes is a `yield {name.text}(...)`")  # fmt: skip
        return
    if (len(passing.reads), len(passing.writes)) != (function.num_operands, 1):
        label = f"{len(passing.reads)} read, {len(passing.writes)} written"
        faults.report(
            "C122", f"`{name.text}` reads {function.num_operands} buffers and writes one", passing.span, label
        )
    if len(node.tiles) > 1:
        faults.report("C122", f"`{name.text}` works element by element", node.tiles[1].span, "a second extent",
                      help=f"write `tiles {node.tiles[0].value}`: so many elements")  # fmt: skip
    for tile in node.tiles[:1]:
        if not TILE_UNIT <= tile.value <= MOST_TILE or tile.value % TILE_UNIT:
            faults.report("C505", "a tile is 16 to 2 ** 24 elements, a multiple of 16", tile.span,
                          f"this is {tile.value}")  # fmt: skip


def _check_rowwise(faults: Faults, node: syn.Compute, function: Function) -> None:
    passing, reads = node.passing, function.num_operands
    if (len(passing.reads), len(passing.writes)) != (reads, function.num_results):
        label = f"{len(passing.reads)} read, {len(passing.writes)} written"
        what = f"`{function.name}` reads {reads} buffers and writes {function.num_results}"
        faults.report("C122", what, passing.span, label)
    beside = "its rows are made where they arrive, by the lanes that moved them"
    for tile in node.tiles[:1]:
        faults.report("C122", f"`{function.name}` works row by row", tile.span, "tiles", help=beside)
    if node.role is not None:
        faults.report("C122", f"`{function.name}` has no role of its own", node.role.span, "a role", help=beside)


def has_visits(body: Iterable[syn.Stmt]) -> bool:
    """Whether a yield calls a function, however deep in loops it stands."""
    return any(isinstance(statement, syn.Visit) for statement in syn.walk(body))


def visit(node: syn.Visit, names: list[str], bindings: tuple[tuple[str, int], ...]) -> Yield:
    reads, writes = _indices(node.passing, names)
    return Yield(reads, bindings, node.span, writes, node.function.text)


def task(
    node: syn.Compute, buffers: Mapping[str, Buffer], bindings: tuple[tuple[str, int], ...], faults: Faults
) -> Task:
    """C116 where the buffers differ in shape."""
    shapes = {name.text: buffers[name.text] for name in (*node.passing.reads, *node.passing.writes)}
    first = next(iter(shapes.values()))
    for buffer in shapes.values():
        if (buffer.blocks, buffer.cut) != (first.blocks, first.cut):
            label = f"{_shape(buffer)}, {_shape(first)}"
            faults.fail("C116", f"the buffers of `{node.function.text}` are of different shapes", node.passing.span,
                        label, help="it works element by element: cut all of them alike")  # fmt: skip
    reads, writes = _indices(node.passing, list(buffers))
    tiles = tuple(tile.value for tile in node.tiles)
    role = None if node.role is None else node.role.text
    return Task(node.function.text, reads, writes, tiles, role, bindings, node.span)


def rowwise(
    node: syn.Compute,
    buffers: Mapping[str, Buffer],
    ranks: int,
    bindings: tuple[tuple[str, int], ...],
    faults: Faults,
) -> Step:
    """A statement for each result, of the rows that are read first. C116 where they are more than one whole block."""
    for name in (*node.passing.reads, *node.passing.writes):
        if buffers[name.text].num_chunks != 1:
            label = f"`{name.text}` is {buffers[name.text].num_chunks} chunks"
            faults.fail("C116", f"`{node.function.text}` takes whole buffers", name.span, label,
                        help="declare it without extents: its rows are those of one block")  # fmt: skip
    (rows, *given), results = _indices(node.passing, list(buffers))
    every, first = np.arange(ranks, dtype=np.int32), np.zeros(ranks, np.int32)
    moves = tuple(
        Statement(
            kind=MoveKind.ROWWISE,
            accumulate=False,
            is_list=False,
            actor=every,
            source_buffer=rows,
            source_rank=every[:, None],
            source_chunk=first[:, None],
            source_valid=None,
            dest_buffer=buffer,
            dest_rank=every,
            dest_chunk=first,
            span=node.span,
            applied=Applied(node.function.text, tuple(given), result),
        )
        for result, buffer in enumerate(results)
    )
    return Step(moves, bindings, node.span)


def check_yields(steps: Sequence[AnyStep], buffers: Sequence[Buffer], faults: Faults) -> None:
    """C116: the op returns what it hands over stacked, so that is of one shape."""
    yields = [step for step in steps if isinstance(step, Yield) and step.name is None]
    for step in yields[1:]:
        first, buffer = buffers[yields[0].buffer], buffers[step.buffer]
        if (first.blocks, first.cut) != (buffer.blocks, buffer.cut):
            faults.report("C116", "the yields are of different shapes", step.span, f"{_shape(buffer)}, {_shape(first)}",
                          help="the caller is handed them stacked: yield buffers of one shape")  # fmt: skip


def check_sources(
    contracts: Sequence[Contract], steps: Sequence[AnyStep], buffers: Sequence[Buffer], faults: Faults
) -> None:
    """Report C105 for a contract of a scratch buffer that no function of the caller wrote."""
    made = {buffer for step in steps if isinstance(step, Yield) for buffer in step.writes}
    for contract, number in ((one, number) for one in contracts for number in sources_of(one)):
        buffer = buffers[number]
        if buffer.kind is BufferKind.SCRATCH and number not in made:
            what = "the source of a contract is given by the caller, or computed"
            faults.report("C105", what, contract.span, f"nothing computes `{buffer.name}`")


def _indices(passing: syn.Passing, names: list[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    reads, writes = (tuple(names.index(name.text) for name in one) for one in (passing.reads, passing.writes))
    return reads, writes


def _shape(buffer: Buffer) -> str:
    return f"`{buffer.name}` is {buffer.blocks} x {buffer.cut}"


def made_in(body: Iterable[syn.Stmt]) -> frozenset[str]:
    """The buffers that functions of the caller write."""
    visits = (statement for statement in syn.walk(body) if isinstance(statement, syn.Visit))
    return frozenset(name.text for visit in visits for name in visit.passing.writes)


def computed_in(body: Iterable[syn.Stmt]) -> dict[str, str]:
    """By buffer that `compute` writes, the function and its operands as the text has them."""
    found = dict[str, str]()
    for statement in syn.walk(body):
        match statement:
            case syn.Compute(function, passing):
                text = f"{function.text}({', '.join(name.text for name in passing.reads)})"
                found |= {name.text: text for name in passing.writes}
            case syn.Move(source=source, dest=dest, factor=syn.Ref() as factor):
                found[dest.buffer.text] = f"{MATMUL}({source.span.text}, {factor.span.text})"
            case _:
                pass
    return found
