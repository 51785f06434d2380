"""Turns a schedule into a table a person can read: a row per step, a column per rank, in a cell what it sends to whom.

Assumes a checked schedule. Shows as many ranks as the width holds and the first and last of many equal steps, and says
what it left out. Does not know times; `cost` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod

import numpy as np

from commdsl.ir.schedules import AnyStep, Buffer, Schedule, Statement, Step
from commdsl.ir.words import step_words
from commdsl.language.kinds import MoveKind

MAX_RANKS = 16
"""Columns made, before the width decides how many are shown."""

MAX_LIKE_STEPS = 5
"""More steps in a row from the same statements are folded."""

MAX_CELL = 22


@dataclass(frozen=True, slots=True)
class Row:
    """One statement of one step; `head` is empty on all but the first row of a step."""

    head: str
    kind: str
    cells: tuple[str, ...]


def timeline(schedule: Schedule, width: int = 100) -> str:
    """The table, at most `width` columns wide where one rank fits."""
    rows: list[Row | str] = []
    for shown in fold(schedule):
        rows += [shown] if isinstance(shown, str) else step_rows(schedule, *shown)
    return "\n".join(aligned(rows, schedule.num_ranks, width))


def fold(schedule: Schedule) -> Iterator[tuple[int, AnyStep] | str]:
    """The steps to show, numbered from 1, and a word for those left out. A task counts with the step before it."""
    number = 0
    numbered: list[tuple[int, AnyStep]] = []
    for step in schedule.steps:
        number += isinstance(step, Step)
        numbered.append((number, step))
    for _, group in groupby(numbered_periods(numbered), key=lambda item: item[0]):
        run = [item[1] for item in group]
        if len(run) > MAX_LIKE_STEPS:
            yield from (shown for part in run[:2] for shown in part)
            hidden = sum(isinstance(step, Step) for part in run[2:-1] for _, step in part)
            yield f"… {hidden} more steps like these"
            yield from run[-1]
        else:
            yield from (shown for part in run for shown in part)


Numbered = list[tuple[int, AnyStep]]


def numbered_periods(steps: Numbered) -> Iterator[tuple[tuple[int, ...], Numbered]]:
    """Cuts the steps into parts, each with the statements it comes from; a task belongs to the step before it."""
    part: Numbered = []
    for number, step in steps:
        if isinstance(step, Step) and part:
            yield statements(part), part
            part = []
        part.append((number, step))
    if part:
        yield statements(part), part


def statements(part: Numbered) -> tuple[int, ...]:
    """Where the statements of a part stand in the text."""
    return tuple(step.span.start for _, step in part)


def step_rows(schedule: Schedule, number: int, step: AnyStep) -> list[Row]:
    """A step as rows, one per statement."""
    bindings = " ".join(f"{name}={value}" for name, value in step.bindings)
    ranks = min(schedule.num_ranks, MAX_RANKS)
    if not isinstance(step, Step):
        verb, _, what = step_words(schedule, step).partition(" ")
        return [Row("", verb, (what,) + ("",) * (ranks - 1))]
    rows: list[Row] = []
    for moves in step.moves:
        if len(moves.actor):
            head = f"{number:>3} {bindings}".rstrip() if not rows else ""
            cells = tuple(cell(schedule, moves, rank) for rank in range(ranks))
            rows.append(Row(head, moves.kind.value + moves.epilogue.words, cells))
    return rows or [Row(f"{number:>3} {bindings}".rstrip(), "nothing moves", ("",) * ranks)]


def cell(schedule: Schedule, moves: Statement, rank: int) -> str:
    """What one rank does in one statement, told where the data starts; a list of sources where it ends."""
    source, dest = schedule.buffers[moves.source_buffer], schedule.buffers[moves.dest_buffer]
    if moves.is_list or moves.source_rank.shape[1] > 1:
        return list_cell(schedule, moves, rank)
    rows = np.flatnonzero(moves.source_rank[:, 0] == rank)
    if not len(rows):
        return "·"
    chunks, ranks = moves.source_chunk[rows, 0], moves.dest_rank[rows]
    to = "" if (ranks == rank).all() else who(ranks, rank, schedule.num_ranks)
    is_same = source.name == dest.name and (chunks == moves.dest_chunk[rows]).all()
    arrow = "+→" if moves.kind is MoveKind.REDUCE else "→"
    target = "" if is_same and to else chunk_names(dest, moves.dest_chunk[rows])
    place = f"{target}@{to}" if target and to else target or to
    return f"{shares(source, chunks, ranks)} {arrow} {place}"


def leaving(schedule: Schedule, step: Step, rank: int) -> str:
    """The chunks of a rank that a step reads, by buffer: `x[3]`, `t y[0…3]`."""
    names: dict[str, None] = {}
    for moves in step.moves:
        taken = moves.source_rank == rank
        if moves.source_valid is not None:
            taken = taken & moves.source_valid
        if taken.any():
            targets = np.broadcast_to(moves.dest_rank[:, None], taken.shape)[taken]
            names[shares(schedule.buffers[moves.source_buffer], moves.source_chunk[taken], targets)] = None
    return " ".join(names)


def shares(
    buffer: Buffer,
    chunks: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    ranks: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
) -> str:
    """The chunks a rank sends; `kv/7` when the whole buffer goes out, another part to each of seven ranks."""
    targets = len(set(ranks.tolist()))
    if targets > 1 and len(chunks) == targets == buffer.num_chunks == len(set(chunks.tolist())):
        return f"{buffer.name}/{targets}"
    return chunk_names(buffer, chunks)


def list_cell(schedule: Schedule, moves: Statement, rank: int) -> str:
    """`y ← Σ x @ all`: the reduction of a list, on the rank where its result lands."""
    rows = np.flatnonzero(moves.dest_rank == rank)
    if not len(rows):
        return "·"
    source, dest = schedule.buffers[moves.source_buffer], schedule.buffers[moves.dest_buffer]
    valid = np.ones_like(moves.source_rank[rows], bool) if moves.source_valid is None else moves.source_valid[rows]
    ranks, chunks = moves.source_rank[rows][valid], moves.source_chunk[rows][valid]
    place = "" if (ranks == rank).all() else f"@{who(ranks, rank, schedule.num_ranks)}"
    target, operands = chunk_names(dest, moves.dest_chunk[rows]), chunk_names(source, chunks)
    return f"{target} ← Σ{place}" if place and target == operands else f"{target} ← Σ {operands}{place}"


def who(ranks: np.ndarray[tuple[int, ...], np.dtype[np.int32]], rank: int, num_ranks: int) -> str:
    """A set of ranks as seen from one of them."""
    found = sorted({int(other) for other in ranks})
    if num_ranks > 2 and found == list(range(num_ranks)):
        return "all"
    if num_ranks > 2 and found == [other for other in range(num_ranks) if other != rank]:
        return "others"
    return spans(found, "ranks")


def chunk_names(buffer: Buffer, chunks: np.ndarray[tuple[int, ...], np.dtype[np.int32]]) -> str:
    """`x`, `x[3]`, `y[2,1]`, `x[0…3]`."""
    found = sorted({int(chunk) for chunk in chunks})
    if not buffer.dims or len(found) == buffer.num_chunks:
        return buffer.name
    columns = [sorted({int(i) for i in column}) for column in np.unravel_index(found, buffer.dims)]
    indices = [spans(column, "") for column in columns]
    if prod(map(len, columns)) != len(found) or "" in indices:
        return f"{len(found)} of {buffer.name}"
    while len(columns[-1]) == buffer.dims[-1 - (len(buffer.dims) - len(columns))]:
        columns.pop()  # a whole trailing dimension goes without saying, as in the language
    return f"{buffer.name}[{','.join(indices[: len(columns)])}]"


def spans(values: list[int], noun: str) -> str:
    """`3`, `0…7`, `1 4`, or with a noun `5 ranks`; empty where there is no short way to say it."""
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}…{values[-1]}"
    if len(values) <= 2:
        return " ".join(map(str, values))
    return f"{len(values)} {noun}" if noun else ""


def aligned(rows: Iterable[Row | str], num_ranks: int, width: int) -> Iterator[str]:
    """The rows as lines, with as many ranks as fit; ranks left out are counted below."""
    rows = list(rows)
    table = [row for row in rows if isinstance(row, Row)]
    head = max((len(row.head) for row in table), default=0)
    kind = max((len(row.kind) for row in table), default=0)
    ranks = min(num_ranks, MAX_RANKS)
    sizes = [max([len(f"rank {rank}"), *(len(clip(row.cells[rank])) for row in table)]) for rank in range(ranks)]
    left = head + 2 + kind + 2
    shown = 1
    while shown < ranks and left + sum(sizes[: shown + 1]) + 2 * shown <= width:
        shown += 1
    yield (" " * left + "  ".join(f"rank {rank}".ljust(sizes[rank]) for rank in range(shown))).rstrip()
    for row in rows:
        if isinstance(row, str):
            yield f"{'':>4}{row}"
        else:
            cells = "  ".join(clip(row.cells[rank]).ljust(sizes[rank]) for rank in range(shown))
            yield f"{row.head:<{head}}  {row.kind:<{kind}}  {cells}".rstrip()
    if shown < num_ranks:
        yield f"{'':>4}… and {num_ranks - shown} more {'rank' if num_ranks - shown == 1 else 'ranks'}"


def clip(text: str) -> str:
    return text if len(text) <= MAX_CELL else text[: MAX_CELL - 1] + "…"
