"""C401: every transfer between two ranks has a link of the topology under it.

Assumes indices in bounds. Does not weigh the links; `cost` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located, LocatedMoves, LocatedStep, statement_key
from commdsl.ir.schedules import Schedule
from commdsl.ir.words import bindings_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.machine import resources
from commdsl.machine.topology import NO_LINK, Topology, link_of

SYNTHESISED = ("allgather", "allreduce", "broadcast", "reduce", "reducescatter")
"""The collectives for which `commdsl synth` packs trees, as its command line names them."""

MOST_SYNTHESISED = 32
"""Ranks of a machine for which it does."""


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
            yield _diagnostic(schedule, step, moves, np.argwhere(bad))


def _diagnostic(schedule: Schedule, step: LocatedStep, moves: LocatedMoves, bad: NDArray[np.int64]) -> Diagnostic:
    topology = schedule.topology
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
        help="send along links only, in several steps if need be, or choose a topology with `--on`"
        + _synthesis(schedule),
    )


def _synthesis(schedule: Schedule) -> str:
    """Name the command that writes a schedule for this machine, where it has one for the contract."""
    topology, contract = schedule.topology, schedule.contracts[0]
    collective, root = contract.name.replace("_", ""), "" if contract.root is None else f" --root {contract.root}"
    can = len(schedule.contracts) == 1 and collective in SYNTHESISED and topology.span is not None
    is_whole = schedule.num_ranks == topology.num_ranks <= MOST_SYNTHESISED
    if not can or not is_whole or not np.isfinite(topology.ways.distance).all():
        return ""
    assert topology.span is not None
    file = Path(topology.span.source.name)
    is_shipped = file.parent == resources.data_dir("schedules") / "topologies" and file.stem == topology.name
    machine = topology.name if is_shipped else f"{file}:{topology.name}"
    return f"; `commdsl synth {collective} --on {machine}{root}` writes a schedule that does"
