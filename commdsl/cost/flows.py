"""Turns what is to move into the least time that the cuts of a machine, or the flows through it, leave for it.

Assumes values of one source each that the same ranks want (all-gather, broadcast, gather): the strongest cut is the
optimum, as trees packed into the machine reach it (ForestColl, Zhao et al. 2024); the other way about (reduce-scatter,
reduce, scatter) on the reversed machine; or what every rank contributes to and wants (all-reduce), of which every cut
is passed both ways; or else values of one source each, or of one destination each (all-to-all, and what only some
want), whose flows are a linear program. Needs scipy, without which there is no such bound. Does not know schedules, nor
latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from commdsl.cost.demand import Demand, Floats, Flows, Longs
from commdsl.cost.graph import Graph, Wires
from commdsl.ir.words import ranks_text

MOST_RANKS = 512
"""Up to so many ranks maximum flows are computed: one for each rank that wants something, and few more."""

BOTH_WAYS_RANKS = 64
"""Up to so many ranks the least flow between any two is computed."""

COPIED_RANKS = 16
"""Up to so many ranks copies are a linear program, where cuts do not tell what ports share out."""

PROGRAM_RANKS = 16
"""Up to so many ranks linear programs are solved of what is not wanted by all alike, an all-to-all for one."""

MOST_COLUMNS = 20_000
"""Of such a program: a second."""

EVEN = 1e-3
"""What the largest share costs beside the time: of shares that are as fast, even ones are taken."""

UNITS = 1 << 28
"""What is to move in all, in the whole numbers that maximum flows are computed in; cuts are judged by the true ones."""


def can_flow() -> bool:
    return find_spec("scipy") is not None


def flow_bounds(demand: Demand, graph: Graph) -> Iterator[tuple[float, str]]:
    """Seconds per byte of a block, and what binds."""
    if demand.num_ranks > MOST_RANKS or not can_flow():
        return
    back = demand.reversed
    if demand.spread is not None:
        yield from _spread(*demand.spread, graph, "out of", "into")
    elif back.spread is not None:
        yield from _spread(*back.spread, graph.reversed, "into", "out of")
    elif demand.is_of_all and demand.num_ranks <= BOTH_WAYS_RANKS:
        yield _both_ways(float(demand.size.sum()), graph)
    elif demand.num_ranks <= PROGRAM_RANKS:
        for way, machine in ((demand, graph), (back, graph.reversed)):
            flows = way.flows
            if flows is not None and flows.size * len(graph.wires.source) <= MOST_COLUMNS:
                yield _program(flows, machine.wires)[0], "all that flows at once"
                break


def _spread(
    weights: Floats, wants: NDArray[np.bool_], graph: Graph, out: str, into: str
) -> Iterator[tuple[float, str]]:
    yield strongest(weights, wants, graph, out, into)
    if not graph.is_switched and graph.num_ranks <= COPIED_RANKS:
        yield copied(weights, wants, graph.wires)[0], "all copies that flow at once"


# --- cuts -------------------------------------------------------------------------------------------------------------


def strongest(weights: Floats, wants: NDArray[np.bool_], graph: Graph, out: str, into: str) -> tuple[float, str]:
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


def flow_value(capacity: Longs, start: int, end: int) -> int:
    """The maximum flow over edges in whole numbers, a matrix; without limit where it starts."""
    from scipy.sparse import csr_array  # as above
    from scipy.sparse.csgraph import maximum_flow

    if start == end:
        return 2 * UNITS
    source, dest = np.nonzero(capacity)
    first = np.searchsorted(source, np.arange(len(capacity) + 1))
    edges = capacity[source, dest].astype(np.int32), dest.astype(np.int32), first.astype(np.int32)
    return int(maximum_flow(csr_array(edges, shape=capacity.shape), start, end).flow_value)


# --- flows ------------------------------------------------------------------------------------------------------------


def copied(weights: Floats, wants: NDArray[np.bool_], wires: Wires) -> tuple[float, Floats]:
    """The least time in which what all ranks give reaches those that want it, and how much each wire carries."""
    sinks = np.flatnonzero(wants)
    left = -np.tile(weights, (len(sinks), 1))
    left[np.arange(len(sinks)), sinks] += weights.sum()
    return _program(Flows(left, np.zeros(len(sinks), np.int64)), wires)


def _program(flows: Flows, wires: Wires) -> tuple[float, Floats]:
    """The least time in which flows reach what is wanted, by whatever ways, and what each wire carries of it."""
    from scipy.optimize import linprog  # as above
    from scipy.sparse import coo_array, csr_array, eye_array, hstack, kron, vstack

    (number, num_ranks), count = flows.left.shape, len(wires.source)
    values = int(flows.value.max(initial=-1)) + 1
    ends = np.concatenate([wires.source, wires.dest]), np.tile(np.arange(count), 2)
    kept = coo_array((np.repeat([-1.0, 1.0], count), ends), shape=(num_ranks, count))
    uses, most = limits(wires, num_ranks)
    scale = float(most.max(initial=1.0))
    # Columns: every flow over every wire, every value over every wire, the time.
    one_of = coo_array((-np.ones(number), (np.arange(number), flows.value)), shape=(number, values))
    copies = [eye_array(number * count), kron(one_of, eye_array(count)), csr_array((number * count, 1))]
    crossing = [kron(np.ones((1, values)), uses), csr_array(-(most / scale)[:, None])]
    bounded = vstack([hstack(copies), hstack([csr_array((len(most), number * count)), *crossing])]).tocsr()
    solved = linprog(
        np.append(np.zeros((number + values) * count), 1.0),
        A_ub=bounded,
        b_ub=np.zeros(bounded.shape[0]),
        A_eq=hstack([kron(eye_array(number), kept), csr_array((number * num_ranks, values * count + 1))]).tocsr(),
        b_eq=flows.left.ravel(),
        method="highs",
    )
    if solved.status != 0:
        return float("inf"), np.zeros(count)
    carried: Floats = solved.x[number * count : -1].reshape(values, count).sum(axis=0)
    return float(solved.fun) / scale, carried


def best_shares(machines: Sequence[Wires], num_ranks: int) -> Floats | None:
    """Shares of 1 with the least time: on each machine they flow from all ranks to each, and cross a wire once. None
    where some rank cannot be reached.
    """
    from scipy.optimize import linprog  # as above
    from scipy.sparse import block_diag, csr_array, eye_array, hstack, kron, vstack

    scale = max(float(limits(wires, num_ranks)[1].max(initial=1.0)) for wires in machines)
    kept, bounded = zip(*(_flowing(wires, num_ranks, scale) for wires in machines), strict=True)
    # Columns: of every machine every flow over every wire, every wire, the time; then the shares, and the largest.
    each = kron(np.ones((num_ranks * len(machines), 1)), eye_array(num_ranks))
    into = hstack([block_diag(kept), each, csr_array((each.shape[0], 1))])
    flowing = block_diag(bounded)
    largest = hstack([csr_array((num_ranks, flowing.shape[1])), eye_array(num_ranks), -np.ones((num_ranks, 1))])
    costs = [np.append(np.zeros(one.shape[1] - 1), 1.0) for one in kept]
    solved = linprog(
        np.concatenate([*costs, np.zeros(num_ranks), [EVEN]]),
        A_ub=vstack([hstack([flowing, csr_array((flowing.shape[0], num_ranks + 1))]), largest]).tocsr(),
        b_ub=np.zeros(flowing.shape[0] + num_ranks),
        A_eq=into.tocsr(),
        b_eq=np.tile(np.eye(num_ranks).ravel(), len(machines)),
        method="highs",
    )
    if solved.status != 0:
        return None
    found: Floats = np.maximum(solved.x[-num_ranks - 1 : -1], 0.0)
    return found / float(found.sum())


def _flowing(wires: Wires, num_ranks: int, scale: float) -> tuple[Any, Any]:
    """Of one machine: what every flow leaves at every rank, a flow to each; and what wires and ports are over."""
    from scipy.sparse import coo_array, csr_array, eye_array, hstack, kron, vstack  # as above

    count = len(wires.source)
    ends = np.concatenate([wires.source, wires.dest]), np.tile(np.arange(count), 2)
    into = coo_array((np.repeat([-1.0, 1.0], count), ends), shape=(num_ranks, count))
    uses, most = limits(wires, num_ranks)
    kept = hstack([kron(eye_array(num_ranks), into), csr_array((num_ranks**2, count + 1))])
    copies = [eye_array(num_ranks * count), -kron(np.ones((num_ranks, 1)), eye_array(count))]
    crossing = [csr_array((len(most), num_ranks * count)), uses, csr_array(-(most / scale)[:, None])]
    return kept, vstack([hstack([*copies, csr_array((num_ranks * count, 1))]), hstack(crossing)])


def limits(wires: Wires, num_ranks: int) -> tuple[Any, Floats]:
    """Which wires (columns) share what can be carried, and how much that is: a wire by itself, ports out and in."""
    from scipy.sparse import coo_array, eye_array, vstack  # as above

    count, ports = len(wires.source), wires.ports.ravel()
    limited, has_port = np.flatnonzero(np.isfinite(wires.capacity)), np.flatnonzero(np.isfinite(ports))
    share = wires.sharing[wires.link]
    sides = [(wires.link * num_ranks + rank // share * share, np.arange(count)) for rank in (wires.source, wires.dest)]
    through = [coo_array((np.ones(count), side), shape=(len(ports), count)).tocsr()[has_port] for side in sides]
    uses = vstack([eye_array(count).tocsr()[limited], *through])
    return uses, np.concatenate([wires.capacity[limited], ports[has_port], ports[has_port]])
