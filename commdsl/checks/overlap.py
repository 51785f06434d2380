"""C302: no two writes of one step touch one chunk.

Assumes indices in bounds. Does not look at reads: all reads of a step come before its writes, so that reading and
writing one chunk in one step is legal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, Locations, statement_key
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.language.kinds import MoveKind


def overlapping_writes(located: Located) -> Iterator[Diagnostic]:
    """Each write stamps its location with its number; a stamp that did not stay was overwritten in the same step."""
    stamp = np.zeros(located.nowhere + 1, dtype=np.int64)
    told: set[tuple[tuple[str, int, int], tuple[str, int, int]]] = set()
    for step in located.steps:
        if not isinstance(step, LocatedStep) or not step.moves:
            continue
        dests = [moves.dest for moves in step.moves]
        dest = dests[0] if len(dests) == 1 else np.concatenate(dests)
        number = np.arange(len(dest))
        stamp[dest] = number
        lost = np.flatnonzero(stamp[dest] != number)
        for write in _first_per_statement(step, lost):
            first, second = _statement(step, write), _statement(step, int(stamp[dest[write]]))
            pair = (statement_key(first[0].moves.span), statement_key(second[0].moves.span))
            if pair not in told:
                told.add(pair)
                yield _overlap(located, step, first, second, len(lost))


def _first_per_statement(step: LocatedStep, lost: Locations) -> Iterator[int]:
    """The first overwritten write of every statement: the others of it are the same mistake."""
    if len(lost):
        ends = np.cumsum([len(moves.dest) for moves in step.moves])
        _, first = np.unique(np.searchsorted(ends, lost, side="right"), return_index=True)
        yield from (int(lost[index]) for index in first)


def _statement(step: LocatedStep, write: int) -> tuple[LocatedMoves, int]:
    """The statement and the row of the step's n-th write."""
    for moves in step.moves:
        if write < len(moves.dest):
            return moves, write
        write -= len(moves.dest)
    raise IndexError(write)


def _overlap(
    located: Located,
    step: LocatedStep,
    first: tuple[LocatedMoves, int],
    second: tuple[LocatedMoves, int],
    num_lost: int,
) -> Diagnostic:
    (first_moves, first_row), (second_moves, second_row) = first, second
    where = located.name(int(second_moves.dest[second_row]))
    in_step = bindings_text(step.step.bindings)
    actors = int(first_moves.moves.actor[first_row]), int(second_moves.moves.actor[second_row])
    secondary: tuple[Label, ...] = ()
    if statement_key(first_moves.moves.span) == statement_key(second_moves.moves.span):
        who = f"rank {actors[0]}, twice" if actors[0] == actors[1] else f"rank {actors[0]} and rank {actors[1]}"
        label = f"{who}{in_step}: both write {where}"
    else:
        label = f"rank {actors[1]}{in_step}: writes {where} too"
        secondary = (Label(first_moves.moves.span, f"rank {actors[0]} writes {where}"),)
    notes = (f"{num_lost} writes of this step are lost in this way",) if num_lost > 1 else ()
    reduces = any(moves.moves.kind is MoveKind.REDUCE for moves, _ in (first, second))
    return Diagnostic(
        "C302",
        f"two writes of one step to {located.chunk_name(int(second_moves.dest[second_row]))}",
        Label(second_moves.moves.span, label),
        secondary,
        notes,
        help="reduce a list of sources into it, as in `reduce x @ q for q in 0 ..< P -> y`"
        if reduces
        else "write to different chunks, or put one of the writes in a step of its own",
    )
