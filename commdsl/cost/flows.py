"""Turns what is to move into the least time that the cuts of a machine, or the flows through it, leave for it.

Assumes values of one source each that the same ranks want (all-gather, broadcast, gather): the strongest cut is the
optimum, as trees packed into the machine reach it (ForestColl, Zhao et al. 2024); the other way about (reduce-scatter,
reduce, scatter) on the reversed machine; or what every rank contributes to and wants (all-reduce), of which every cut
is passed both ways; or values of one source and one destination each (all-to-all): the optimum is a linear program.
Needs scipy, without which there is no such bound. Does not know schedules, nor latency.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from commdsl.cost.demand import Demand, Floats, Longs
from commdsl.cost.graph import Graph, Wires
from commdsl.ir.words import ranks_text

MOST_RANKS = 512
"""Up to so many ranks maximum flows are computed: one for each rank that wants something, and few more."""

BOTH_WAYS_RANKS = 64
"""Up to so many ranks the least flow between any two is computed."""

COPIED_RANKS = 12
"""Up to so many ranks copies are a linear program, where cuts do not tell what ports share out."""

PROGRAM_RANKS = 16
"""Up to so many ranks the linear program of an all-to-all is solved."""

UNITS = 1 << 28
"""What is to move in all, in the whole numbers that maximum flows are computed in; cuts are judged by the true ones."""


def can_flow() -> bool:
    return find_spec("scipy") is not None


def flow_bounds(demand: Demand, graph: Graph) -> Iterator[tuple[float, str]]:
    """Seconds per byte of a block, and what binds."""
    if demand.num_ranks > MOST_RANKS or not can_flow():
        return
    if demand.spread is not None:
        yield from _spread(*demand.spread, graph, "out of", "into")
    elif demand.reversed.spread is not None:
        yield from _spread(*demand.reversed.spread, graph.reversed, "into", "out of")
    elif demand.is_of_all and demand.num_ranks <= BOTH_WAYS_RANKS:
        yield _both_ways(float(demand.size.sum()), graph)
    elif demand.exchanged is not None and demand.exchanged.any() and demand.num_ranks <= PROGRAM_RANKS:
        wanted = demand.exchanged - np.diag(demand.exchanged.sum(axis=1))
        yield _program(wanted, graph.wires, is_copied=False), "all that flows at once"


def _spread(
    weights: Floats, wants: NDArray[np.bool_], graph: Graph, out: str, into: str
) -> Iterator[tuple[float, str]]:
    yield _strongest(weights, wants, graph, out, into)
    if not graph.is_switched and graph.num_ranks <= COPIED_RANKS:
        wanted = -np.tile(weights, (int(wants.sum()), 1))
        sinks = np.flatnonzero(wants)
        wanted[np.arange(len(sinks)), sinks] += weights.sum()
        yield _program(wanted, graph.wires, is_copied=True), "all copies that flow at once"


# --- cuts -------------------------------------------------------------------------------------------------------------


def _strongest(weights: Floats, wants: NDArray[np.bool_], graph: Graph, out: str, into: str) -> tuple[float, str]:
    """The cut that takes longest, by maximum flows: one that is too small for the time so far shows a stronger cut."""
    best, inside = 0.0, np.zeros(graph.num_ranks, np.bool_)
    if not (weights > 0).any():
        return best, "nothing has to move"
    is_alike = graph.is_symmetric and bool(wants.all()) and float(np.ptp(weights)) == 0
    for sink in np.flatnonzero(wants).tolist()[: 1 if is_alike else None]:
        first = np.ones(graph.num_vertices, np.bool_)
        first[sink] = False
        side: NDArray[np.bool_] | None = first
        while side is not None:
            moved, capacity = float(weights[side[: graph.num_ranks]].sum()), graph.leaving(side)
            seconds = 0.0 if moved == 0 else np.inf if capacity == 0 else moved / capacity
            if seconds <= best * (1 + 1e-9):
                if side is not first:
                    break  # as strong, or told apart by rounding alone
            else:
                best, inside = seconds, side[: graph.num_ranks]
            side = _too_small(weights, sink, graph, best) if best < np.inf else None
    moved = float(weights[inside].sum())
    if inside.sum() <= graph.num_ranks // 2:
        return best, f"{moved:.4g} n {out} {ranks_text(np.flatnonzero(inside).tolist())}"
    return best, f"{moved:.4g} n {into} {ranks_text(np.flatnonzero(~inside).tolist())}"


def _too_small(weights: Floats, sink: int, graph: Graph, seconds: float) -> NDArray[np.bool_] | None:
    """The vertices before the cut that keeps what all ranks give from a rank in that time; None where there is none."""
    given = np.flatnonzero(weights)
    amounts = np.rint(weights[given] / weights.sum() * UNITS)
    is_free = np.isinf(graph.capacity)
    carried = np.where(is_free, 2 * UNITS, np.where(is_free, 0, graph.capacity) * (seconds / weights.sum() * UNITS))
    start = graph.num_vertices
    flow, before = _maximum_flow(
        start + 1,
        np.concatenate([graph.source, np.full(len(given), start)]),
        np.concatenate([graph.dest, given]),
        np.concatenate([carried, amounts]),
        start,
        sink,
    )
    return None if flow >= amounts.sum() else before[:start]


def _both_ways(moved: float, graph: Graph) -> tuple[float, str]:
    """The least that flows between any two ranks, either way: from the first to each, and back."""
    best, inside = 0.0, np.zeros(graph.num_ranks, np.bool_)
    scale = UNITS / float(graph.capacity[np.isfinite(graph.capacity)].max(initial=0.0) or 1.0) / 64
    for machine in (graph, graph.reversed):
        for sink in range(1, graph.num_ranks):
            _, side = _maximum_flow(
                machine.num_vertices, machine.source, machine.dest, np.minimum(machine.capacity, 1e30) * scale, 0, sink
            )
            capacity = machine.leaving(side)
            seconds = np.inf if capacity == 0 else moved / capacity
            if seconds > best * (1 + 1e-9):
                best, inside = seconds, side[: graph.num_ranks]
    some = inside if inside.sum() <= graph.num_ranks // 2 else ~inside
    return best, f"{moved:.4g} n in and out of {ranks_text(np.flatnonzero(some).tolist())}"


def _maximum_flow(
    count: int, source: Longs, dest: Longs, capacity: Floats, start: int, end: int
) -> tuple[int, NDArray[np.bool_]]:
    """The flow, and the vertices on the near side of the least cut."""
    from scipy.sparse import csr_array  # an extra, and 0.3 s
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    whole = np.rint(np.minimum(capacity, 2 * UNITS)).astype(np.int32)
    network = csr_array((whole, (source, dest)), shape=(count, count))
    found = maximum_flow(network, start, end)
    left = network - found.flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    side = np.zeros(count, np.bool_)
    side[breadth_first_order(left, start, return_predecessors=False)] = True
    return int(found.flow_value), side


# --- flows ------------------------------------------------------------------------------------------------------------


def _program(wanted: Floats, wires: Wires, *, is_copied: bool) -> float:
    """The least time in which flows reach what is wanted, by whatever ways: `wanted[f, r]` is what flow f leaves at
    rank r, negative where it starts. Flows share a wire, or with `is_copied` are copies of the same, which cross once.
    """
    from scipy.optimize import linprog  # as above
    from scipy.sparse import coo_array, csr_array, eye_array, hstack, kron, vstack

    flows, num_ranks = wanted.shape
    count = len(wires.source)
    every = np.arange(count)
    ends = np.concatenate([wires.source, wires.dest]), np.tile(every, 2)
    kept = coo_array((np.repeat([-1.0, 1.0], count), ends), shape=(num_ranks, count))
    limited = np.flatnonzero(np.isfinite(wires.capacity))
    sides = [np.concatenate([wires.link * num_ranks + rank]) for rank in (wires.source, wires.dest)]
    shared = [coo_array((np.ones(count), (side, every)), shape=(len(wires.ports) * num_ranks, count)) for side in sides]
    has_port = np.flatnonzero(np.isfinite(np.repeat(wires.ports, num_ranks)))
    rows = [eye_array(count).tocsr()[limited], *(side.tocsr()[has_port] for side in shared)]
    most = np.concatenate([wires.capacity[limited], *[np.repeat(wires.ports, num_ranks)[has_port]] * 2])
    scale = float(most.max(initial=1.0))
    carried = eye_array(count) if is_copied else kron(np.ones((1, flows)), eye_array(count))
    # Columns: every flow over every wire, what crosses the wires where flows are copies, the time.
    crossed = count if is_copied else 0
    own = [csr_array((len(most), flows * count)), vstack(rows)] if is_copied else [vstack(rows) @ carried]
    bounds = [hstack([*own, csr_array(-(most / scale)[:, None])])]
    if is_copied:
        over = kron(-np.ones((flows, 1)), eye_array(count))
        bounds.append(hstack([eye_array(flows * count), over, csr_array((flows * count, 1))]))
    under = vstack(bounds).tocsr()
    solved = linprog(
        np.append(np.zeros(flows * count + crossed), 1.0),
        A_ub=under,
        b_ub=np.zeros(under.shape[0]),
        A_eq=hstack([kron(eye_array(flows), kept), csr_array((flows * num_ranks, crossed + 1))]).tocsr(),
        b_eq=wanted.ravel(),
        method="highs",
    )
    return float(solved.fun) / scale if solved.status == 0 else float("inf")
