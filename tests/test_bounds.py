"""The least time on a machine is the true one: as linear programs have it that are written here, wire by wire."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import ir_builder as build
import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.sparse import csr_array

from commdsl import compiler
from commdsl.cost import flows
from commdsl.cost.bounds import limit
from commdsl.ir.contracts import Contract
from commdsl.ir.resolve import resolve, topologies
from commdsl.ir.schedules import Schedule
from commdsl.language.kinds import BufferKind, LinkScope
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.topology import Link, Rate, Topology

SEEDS = range(300)


@dataclass
class Wire:
    source: int
    dest: int
    capacity: float
    link: int


@dataclass
class Machine:
    """A topology, and the same by hand: its wires; by class of links what ports carry, and for how many GPUs."""

    topology: Topology
    wires: list[Wire]
    ports: list[tuple[Rate, int]]


FEW = ((1, 4), (1, 5), (1, 6), (2, 3), (3, 2))
MANY = ((1, 8), (2, 6), (3, 5), (2, 8), (4, 4))
"""Nodes, and GPUs of each."""


def machine(random: Random, sizes: Sequence[tuple[int, int]] = FEW) -> Machine:
    """Links of pairs with GPUs in any order, both ways or one, a rest behind them, links between nodes; some GPUs share
    a port; some links are missing, some slower.
    """
    nodes, gpus = random.choice(sizes)
    order = random.sample(range(gpus), gpus)
    ring = [(order[i - 1], order[i]) for i in range(gpus)] if gpus > 2 else [(0, 1)]
    links = [_link(random, "hop", LinkScope.PAIRS, random.sample(ring, random.randrange(1, len(ring) + 1)))]
    if random.random() < 0.7:
        links.append(_link(random, "rest", LinkScope.IN_NODE))
    if nodes > 1:
        links.append(_link(random, "out", random.choice([LinkScope.ACROSS_NODES, LinkScope.ACROSS_SAME_GPU])))
    links = links[1:] if len(links) > 1 and random.random() < 0.3 else links
    ranks = nodes * gpus
    links = [_mixed(random, _shared(random, link, gpus), ranks) for link in links]
    wires = [
        Wire(a, b, _of(links[at].pair_bandwidth, a), at)
        for a in range(ranks)
        for b in range(ranks)
        for at in [next((at for at, link in enumerate(links) if _joins(link, a, b, gpus)), None)]
        if at is not None
    ]
    missing = random.sample(wires, random.choice([0, 0, 1]))
    wires = [wire for wire in wires if wire not in missing]
    slow = random.sample(wires, min(random.choice([0, 0, 1]), len(wires)))
    for wire in slow:
        wire.capacity = min(wire.capacity, 3.0)
    topology = Topology(
        "random", nodes, gpus, 100, tuple(links),
        frozenset((wire.source, wire.dest) for wire in missing),
        tuple((wire.source, wire.dest, 3.0) for wire in slow),
    )  # fmt: skip
    return Machine(topology, wires, [(link.port_bandwidth, link.sharing) for link in links])


def _shared(random: Random, link: Link, gpus: int) -> Link:
    """Some links are one way, some ports those of several GPUs."""
    if link.pairs is not None and random.random() < 0.3:
        link = replace(link, scope=LinkScope.ARCS, pairs=link.pairs[: len(link.pairs) // 2])
    if link.has_ports and random.random() < 0.3:
        link = replace(link, sharing=random.choice([count for count in range(2, gpus + 1) if gpus % count == 0]))
    return link


def _mixed(random: Random, link: Link, ranks: int) -> Link:
    """Some ports, and what some ranks send to each other, are slower than others of their class."""
    if random.random() < 0.6:
        return link
    ports = [random.choice([1.0, 0.5]) for _ in range(ranks)]
    by_rank = tuple(ports[rank // link.sharing * link.sharing] for rank in range(ranks))
    if link.has_ports:
        return replace(link, port_bandwidth=tuple(share * link.port_bandwidth for share in by_rank))
    return replace(link, pair_bandwidth=tuple(share * link.pair_bandwidth for share in by_rank))


def _of(rate: Rate, rank: int) -> float:
    return rate if isinstance(rate, float) else rate[rank]


def _link(random: Random, name: str, scope: LinkScope, pairs: list[tuple[int, int]] | None = None) -> Link:
    speed = float(random.choice([4, 10, 25, 50]))
    port, pair = random.choice([(speed, np.inf), (np.inf, speed)])
    both = None if pairs is None else np.array(pairs + [pair[::-1] for pair in pairs], np.int32)
    return Link(name, scope, port, pair, 1.0, both)


def _joins(link: Link, a: int, b: int, gpus: int) -> bool:
    near, alike = a // gpus == b // gpus, a % gpus == b % gpus
    match link.scope:
        case LinkScope.PAIRS | LinkScope.ARCS:
            return near and [a % gpus, b % gpus] in link.pairs.tolist()  # type: ignore[union-attr]
        case LinkScope.IN_NODE:
            return near and a != b
        case LinkScope.ACROSS_NODES:
            return not near
        case LinkScope.ACROSS_SAME_GPU:
            return not near and alike


def least(given: Machine, wanted: np.ndarray, value: list[int], *, is_back: bool = False) -> float:
    """The time of the best flows; `wanted[f, r]`: what flow f leaves at rank r. Copies of a value share a wire."""
    wires, ranks = given.wires, given.topology.num_ranks
    flows, count, values = len(wanted), len(wires), max(value) + 1
    size = (flows + values) * count + 1  # what each flow puts on each wire, what each value takes of it, the time
    over, equal, right = list[Row](), list[Row](), list[float]()

    def taken(these: list[int], capacity: float) -> Row:
        """Of these wires together no more than what they carry in the time."""
        return {**{(flows + v) * count + at: 1 for v in range(values) for at in these}, size - 1: -capacity}

    for at, wire in enumerate(wires):
        over += [{f * count + at: 1, (flows + v) * count + at: -1} for f, v in enumerate(value)]
        if np.isfinite(wire.capacity):
            over.append(taken([at], wire.capacity))
    for link, (port, sharing) in enumerate(given.ports):
        for first in range(0, 0 if port == np.inf else ranks, sharing):
            for end in ("source", "dest"):
                users = range(first, first + sharing)
                mine = [at for at, wire in enumerate(wires) if wire.link == link and getattr(wire, end) in users]
                over.append(taken(mine, _of(port, first)))
    for flow in range(flows):
        for rank in range(ranks):
            signs = [(at, (wire.dest == rank) - (wire.source == rank)) for at, wire in enumerate(wires)]
            equal.append({flow * count + at: -sign if is_back else sign for at, sign in signs if sign})
            right.append(wanted[flow, rank])
    solved = linprog(_matrix(size, [{size - 1: 1}]).toarray()[0], _matrix(size, over), np.zeros(len(over)),
                     _matrix(size, equal), np.array(right))  # fmt: skip
    return float(solved.fun) if solved.status == 0 else float("inf")


Row = dict[int, float]
"""Coefficients of unknowns."""


def _matrix(size: int, rows: list[Row]) -> csr_array:
    at = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    unknown = np.array([one for row in rows for one in row], np.int64)
    values = np.array([value for row in rows for value in row.values()], float)
    return csr_array((values, (at, unknown)), shape=(len(rows), size))


def to_each(weights: np.ndarray) -> np.ndarray:
    """A flow for each rank, that brings it what all give."""
    return np.eye(len(weights)) * weights.sum() - weights


def sums(name: str, dests: list[int], chunks: list[int], ranks: int) -> Contract:
    """Chunk 0 of each of `dests` is the sum of a chunk of all ranks."""
    every = np.tile(np.arange(ranks, dtype=np.int32), (len(dests), 1))
    chunk = np.broadcast_to(np.array(chunks, np.int32)[:, None], every.shape)
    to, none = np.array(dests, np.int32), np.zeros(len(dests), np.int32)
    value = np.arange(len(dests), dtype=np.int32)
    return Contract(name, 0, 1, "sum", to, none, value, every, chunk, None, build.span(3))


def schedule(given: Machine, contract: Contract, blocks: tuple[int, int]) -> Schedule:
    kinds = zip((BufferKind.INPUT, BufferKind.OUTPUT), "xy", blocks, strict=True)
    buffers = tuple(build.buffer(kind, name, blocks=count) for kind, name, count in kinds)
    return build.schedule(given.topology.num_ranks, buffers, (contract,), (), given.topology)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bound_is_the_optimum(seed: int) -> None:
    """All-gather, reduce-scatter, broadcast, reduce and all-to-all, on machines of any links in any order."""
    judge(machine(Random(seed)), seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(30))
def test_the_bound_of_many_ranks_is_the_optimum(seed: int) -> None:
    """So it is from 8 to 16 ranks."""
    judge(machine(Random(seed), MANY), seed)


def judge(given: Machine, seed: int) -> None:
    """The bound of each of the five is that of the linear program."""
    ranks = given.topology.num_ranks
    root, ones, every = seed % ranks, np.ones(ranks), range(ranks)
    alone = np.eye(ranks)[root]
    copied, apart = [0] * ranks, list(every)
    cases = [
        (build.allgather_contract(ranks), (1, ranks), to_each(ones), copied, False),
        (sums("reduce_scatter", list(every), list(every), ranks), (ranks, 1), to_each(ones), copied, True),
        (build.copies_contract("broadcast", 0, 1, [(r, 0, root, 0) for r in every], root=root), (1, 1),
         to_each(alone), copied, False),
        (sums("reduce", [root], [0], ranks), (1, 1), to_each(alone), copied, True),
        (build.copies_contract("alltoall", 0, 1, [(r, q, q, r) for r in every for q in every]), (ranks, ranks),
         np.ones((ranks, ranks)) - np.eye(ranks) * ranks, apart, False),
    ]  # fmt: skip
    for contract, blocks, wanted, value, is_back in cases:
        best = least(given, wanted, value, is_back=is_back)
        found = limit(schedule(given, contract, blocks))
        assert found.seconds_per_byte == pytest.approx(best, rel=1e-6), (contract.name, found.reason)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(40))
def test_what_some_want_is_a_program_of_its_flows(seed: int) -> None:
    """Each rank's data is wanted by some others: what is copied crosses a wire once."""
    random = Random(1000 + seed)
    given = machine(random)
    ranks = given.topology.num_ranks
    wants = {
        r: sorted(random.sample([q for q in range(ranks) if q != r], random.randrange(1, 4))) for r in range(ranks)
    }
    rows = [(q, r, r, 0) for r, some in wants.items() for q in some]
    flows = np.array([np.eye(ranks)[q] - np.eye(ranks)[r] for q, _, r, _ in rows])
    found = limit(schedule(given, build.copies_contract("general", 0, 1, rows), (1, ranks)))
    best = least(given, flows, [r for _, _, r, _ in rows])
    assert found.seconds_per_byte == pytest.approx(best, rel=1e-6), found.reason


# --- by hand ----------------------------------------------------------------------------------------------------------

QUADS = """topology quads {
  nodes 1   gpus 8 per node   sms 100
  link fast pairs (a, b) (a + 4, b + 4) for a in 0 ..< 4, b in a + 1 ..< 4   300 GB/s per gpu   1 us
  link slow pairs (0, 4)   25 GB/s per gpu   1 us
}
schedule s for P ranks {
"""
THIN = 25e9


@pytest.mark.parametrize(
    ("body", "blocks"),
    [
        ("input x  output y[P blocks]  ensure allgather(x -> y)", 4),
        ("input x[P blocks]  output y  ensure reduce_scatter(x -> y)", 4),
        ("inout x[P]  ensure allreduce(x)", 1),
        ("inout x  ensure broadcast(x, 0)", 1),
        ("inout x  ensure reduce(x, 5)", 1),
        ("input x  output y[P blocks]  ensure gather(x -> y, 3)", 4),
        ("input x[P blocks]  output y[P blocks]  ensure alltoall(x -> y)", 16),
        ("inout x inout z  ensure broadcast(x, 0)  ensure broadcast(z, 1)", 2),
        ("input x output y output z  ensure permutation(x -> y) r -> (r + 4) % P", 4),
    ],
)
def test_two_quads_on_a_thin_link(body: str, blocks: int) -> None:
    """What crosses between them binds, though every other link is by the GPU; contracts of their own add up."""
    files = compiler.read_text(f"{QUADS}{body}\n}}\n", "quads.comm", Path())
    found = limit(resolve(files, compiler.choose_kind(files, None, ScheduleDecl), 8, topologies(files)["quads"], {}))
    assert found.seconds_per_byte * THIN == pytest.approx(blocks), found.reason


def test_numbers_of_ranks_need_not_be_neighbours() -> None:
    """The same machine with its GPUs shuffled has the same bound, and names those that are cut off."""
    order = [3, 7, 1, 4, 0, 2, 6, 5]
    quads = [order[:4], order[4:]]
    fast = [(a, b) for quad in quads for a in quad for b in quad if a != b]
    ends = np.array([(order[0], order[4]), (order[4], order[0])], np.int32)
    links = (
        Link("fast", LinkScope.PAIRS, 300e9, np.inf, 1e-6, np.array(fast, np.int32)),
        Link("slow", LinkScope.PAIRS, np.inf, THIN, 1e-6, ends),
    )
    given = Machine(Topology("shuffled", 1, 8, 100, links), [], [])
    found = limit(schedule(given, build.allgather_contract(8), (1, 8)))
    assert found.seconds_per_byte * THIN == pytest.approx(4)
    assert found.reason in ("4 n out of ranks 1 3 4 7", "4 n out of ranks 0 2 5 6")


def test_many_ranks_take_seconds() -> None:
    """A torus of 512 ranks with a link missing: as many maximum flows."""
    pairs = {(r, (r + step) % 512) for r in range(512) for step in (1, 32)}
    both = np.array(sorted(pairs | {(b, a) for a, b in pairs}), np.int32)
    link = Link("hop", LinkScope.PAIRS, np.inf, 50e9, 1e-6, both)
    given = Machine(Topology("torus", 1, 512, 100, (link,), frozenset([(0, 1)])), [], [])
    start = time.thread_time()
    found = limit(schedule(given, build.allgather_contract(512), (1, 512)))
    assert time.thread_time() - start < 10
    assert (found.seconds_per_byte, found.reason) == (pytest.approx(511 / 150e9), "511 n into rank 1")


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a weaker bound, by what single ranks and nodes can take; the reason says which."""
    monkeypatch.setattr(flows, "can_flow", lambda: False)
    files = compiler.read_text(f"{QUADS}input x output y[P blocks] ensure allgather(x -> y)\n}}\n", "q.comm", Path())
    found = limit(resolve(files, compiler.choose_kind(files, None, ScheduleDecl), 8, topologies(files)["quads"], {}))
    assert 0 < found.seconds_per_byte * THIN < 4
    assert found.reason == "7 n into rank 1"
