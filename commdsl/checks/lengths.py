"""C325: whoever moves a block knows how long it is.

Assumes a schedule whose chunks fit each other (C305). Of a table with an entry for each pair of ranks a rank knows
those in whose pair it is: nobody tells the others. Does not know numbers.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from commdsl.checks.locations import Located, statement_key
from commdsl.checks.size_classes import classes_of_moves, split
from commdsl.ir.lengths import knows
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label


def unknown_lengths(located: Located) -> Iterator[Diagnostic]:
    """One message per statement."""
    schedule = located.schedule
    lengths = schedule.lengths
    if lengths is None:
        return
    told: set[tuple[str, int, int]] = set()
    for one in classes_of_moves(located):
        moves, length = one.located.moves, split(located, one.moved)[0].astype(np.int32)
        ranks = np.column_stack((moves.dest_rank, moves.source_rank)).astype(np.int32)
        known = knows(schedule.num_ranks, len(lengths.axes), ranks, np.broadcast_to(length[:, None], ranks.shape))
        if moves.source_valid is not None:
            known[:, 1:] |= ~moves.source_valid
        row, column = (int(at) for at in np.argwhere(~known)[0]) if not known.all() else (-1, -1)
        if row < 0 or statement_key(moves.span) in told:
            continue
        told.add(statement_key(moves.span))
        name = lengths.entry_name(schedule.num_ranks, int(length[row]))
        where = bindings_text(one.step.step.bindings)
        yield Diagnostic(
            "C325",
            f"rank {ranks[row, column]} does not know `{name}`",
            Label(moves.span, f"{where.removeprefix(', ') + ': ' if where else ''}moves a block of `{name}`"),
            help="a rank knows what it sends and what comes to it: send blocks straight to the ranks that they are for",
        )
