"""C402, C403, C405: declared cycles visit every rank once, share no arc, and run along links.

Assumes nothing. An open set that lies in one node, as `paths` do, stands for the same paths in every node. Does not ask
whether a schedule uses its cycles.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from commdsl.checks.locations import Located
from commdsl.ir.schedules import CycleSet, Schedule
from commdsl.ir.words import ranks_text
from commdsl.language.diagnostics import Diagnostic, Label
from commdsl.machine.topology import NO_LINK, link_of


def broken_cycles(located: Located) -> Iterator[Diagnostic]:
    """One message per set of cycles: the first law it breaks."""
    for cycles in located.schedule.cycles:
        for law in (_not_hamiltonian, _shared_arc, _arc_without_link):
            fault = law(located.schedule, cycles)
            if fault is not None:
                yield fault
                break


def _kind(cycles: CycleSet) -> str:
    return "cycle" if cycles.closed else "path"


def _not_hamiltonian(schedule: Schedule, cycles: CycleSet) -> Diagnostic | None:
    of_a_node = cycles.orders.shape[1]
    width = schedule.num_ranks if cycles.closed or schedule.num_ranks % of_a_node else of_a_node
    for index, order in enumerate(cycles.orders):
        counts = np.bincount(order[(order >= 0) & (order < width)], minlength=width)
        if len(order) == width and (counts == 1).all():
            continue
        outside = sorted({int(rank) for rank in order if not 0 <= rank < width})
        parts = [
            f"visits {ranks_text(outside)}, which there {'is' if len(outside) == 1 else 'are'} not" if outside else "",
            f"misses {ranks_text(np.flatnonzero(counts == 0))}" if (counts == 0).any() else "",
            f"visits {ranks_text(np.flatnonzero(counts > 1))} more than once" if (counts > 1).any() else "",
        ]
        return Diagnostic(
            "C402",
            f"a {_kind(cycles)} of `{cycles.name}` does not visit every rank once",
            Label(cycles.span, f"{_kind(cycles)} {index} {', '.join(part for part in parts if part)}"),
            help=f"list each of the ranks 0 ..< {width} once",
        )
    return None


def arcs(cycles: CycleSet) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tails and heads of all arcs, (num_cycles, length)."""
    orders = cycles.orders.astype(np.int64)
    if cycles.closed:
        return orders, np.roll(orders, -1, axis=1)
    return orders[:, :-1], orders[:, 1:]


def _shared_arc(schedule: Schedule, cycles: CycleSet) -> Diagnostic | None:
    tails, heads = arcs(cycles)
    keys = (tails * max(schedule.num_ranks, 1 + int(cycles.orders.max(initial=0))) + heads).ravel()
    _, first, counts = np.unique(keys, return_index=True, return_counts=True)
    if (counts == 1).all():
        return None
    at = int(first[np.flatnonzero(counts > 1)].min())
    again = int(np.flatnonzero(keys == keys[at])[1])
    length = tails.shape[1]
    arc = f"{int(tails.ravel()[at])} -> {int(heads.ravel()[at])}"
    return Diagnostic(
        "C403",
        f"two {_kind(cycles)}s of `{cycles.name}` share an arc",
        Label(cycles.span, f"{_kind(cycles)}s {at // length} and {again // length} both go {arc}"),
        notes=(f"{int((counts > 1).sum())} arcs are shared",) if (counts > 1).sum() > 1 else (),
        help="each directed link can be on one of them only, or they wait for each other",
    )


def _arc_without_link(schedule: Schedule, cycles: CycleSet) -> Diagnostic | None:
    topology = schedule.topology
    tails, heads = (part.ravel() for part in arcs(cycles))
    length = max(1, len(tails) // max(1, len(cycles.orders)))
    num_copies = 1 if cycles.closed else max(1, schedule.num_ranks // cycles.orders.shape[1])
    for copy in range(num_copies):
        shift = copy * cycles.orders.shape[1]
        bad = np.flatnonzero((link_of(topology, tails + shift, heads + shift) == NO_LINK) & (tails != heads))
        if len(bad):
            at = int(bad[0])
            arc = f"{int(tails[at]) + shift} -> {int(heads[at]) + shift}"
            return Diagnostic(
                "C405",
                f"an arc of `{cycles.name}` has no link on `{topology.name}`",
                Label(cycles.span, f"{_kind(cycles)} {at // length} goes {arc}"),
                () if topology.span is None else (Label(topology.span, "the topology"),),
                (f"{len(bad)} arcs have no link",) if len(bad) > 1 else (),
                help="choose another order of the ranks, or a topology with `--on`",
            )
    return None
