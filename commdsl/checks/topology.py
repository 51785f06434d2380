"""C401: every transfer between two ranks has a link of the topology under it.

Assumes indices in bounds. Does not weigh the links; `cost` does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, statement_key
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.machine.topology import NO_LINK, Topology, link_of


def link_table(topology: Topology, num_ranks: int) -> NDArray[np.int32]:
    """`link_of` for all pairs of the first ranks, (num_ranks, num_ranks)."""
    ranks = np.arange(num_ranks)
    return link_of(topology, ranks[:, None], ranks[None, :])


def missing_links(located: Located) -> Iterator[Diagnostic]:
    """One message per statement, for the first step that needs a link no message has named yet."""
    schedule = located.schedule
    legal = link_table(schedule.topology, schedule.num_ranks) != NO_LINK
    np.fill_diagonal(legal, True)
    if legal.all():
        return
    told: set[tuple[str, int, int]] = set()
    named = np.zeros_like(legal)
    for _, step, moves in located.statements():
        key = statement_key(moves.moves.span)
        if key in told:
            continue
        source, dest = np.broadcast_arrays(moves.moves.source_rank, moves.moves.dest_rank[:, None])
        bad = ~legal[source, dest]
        if moves.moves.source_valid is not None:
            bad &= moves.moves.source_valid
        if (bad & ~named[source, dest]).any():
            named[source[bad], dest[bad]] = True
            told.add(key)
            yield _diagnostic(schedule.topology, step, moves, np.argwhere(bad))


def _diagnostic(topology: Topology, step: LocatedStep, moves: LocatedMoves, bad: NDArray[np.int64]) -> Diagnostic:
    row, column = bad[0]
    source, dest = int(moves.moves.source_rank[row, column]), int(moves.moves.dest_rank[row])
    who = f"rank {int(moves.moves.actor[row])}{bindings_text(step.step.bindings)}"
    secondary = () if topology.span is None else (Label(topology.span, "the topology"),)
    return Diagnostic(
        "C401",
        f"a transfer without a link on `{topology.name}`",
        Label(moves.moves.span, f"{who}: no link from rank {source} to rank {dest}"),
        secondary,
        (f"{len(bad)} transfers of this step have no link",) if len(bad) > 1 else (),
        help="send along links only, in several steps if need be, or choose a topology with `--on`",
    )
