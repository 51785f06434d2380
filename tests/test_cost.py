"""What a schedule costs, and the least any could cost, against values worked out by hand or by exact methods."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ir_builder as build
import numpy as np
import pytest
from collectives import main_case, shipped

from commdsl import compiler
from commdsl.cost import report as cost
from commdsl.cost.bounds import limit
from commdsl.ir import interpret
from commdsl.ir.contracts import Contract
from commdsl.ir.resolve import resolve
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import Severity
from commdsl.language.kinds import BufferKind, LinkScope, MoveKind
from commdsl.machine.dtypes import FLOAT32
from commdsl.machine.topology import Link, Topology, switch


def directed(num_ranks: int, pairs: list[tuple[int, int]]) -> Topology:
    table = np.array(pairs, dtype=np.int32)
    return Topology("drawn", 1, num_ranks, 100, (Link("wire", LinkScope.PAIRS, np.inf, 1.0, 1.0, table),))


def both_ways(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return pairs + [(b, a) for a, b in pairs]


def grid(side: int) -> Topology:
    across = [(side * i + j, side * i + j + 1) for i in range(side) for j in range(side - 1)]
    down = [(side * i + j, side * i + side + j) for i in range(side - 1) for j in range(side)]
    return directed(side * side, both_ways(across + down))


def ring(ranks: int, two_way: bool) -> Topology:
    pairs = [(r, (r + 1) % ranks) for r in range(ranks)]
    return directed(ranks, both_ways(pairs) if two_way else pairs)


def line(ranks: int) -> Topology:
    return directed(ranks, both_ways([(r, r + 1) for r in range(ranks - 1)]))


def mesh(ranks: int) -> Topology:
    return directed(ranks, [(a, b) for a in range(ranks) for b in range(ranks) if a != b])


def one_port(ranks: int) -> Topology:
    return Topology("port", 1, ranks, 100, (Link("switch", LinkScope.IN_NODE, 1.0, np.inf, 1.0),))


def boxes(gpus: int) -> Topology:
    inside = Link("inside", LinkScope.IN_NODE, 18.0, np.inf, 1.0)
    nic = Link("nic", LinkScope.ACROSS_NODES, 2.0, np.inf, 1.0)
    return Topology("boxes", 2, gpus, 100, (inside, nic))


def empty(topology: Topology, contract: Contract, blocks_in: int = 1) -> Schedule:
    ranks = topology.num_ranks
    x = build.buffer(BufferKind.INPUT, "x", blocks=blocks_in)
    y = build.buffer(BufferKind.OUTPUT, "y", blocks=ranks)
    return build.schedule(ranks, (x, y), (contract,), (), topology)


def alltoall(ranks: int) -> Contract:
    return build.copies_contract("alltoall", 0, 1, [(r, q, q, r) for r in range(ranks) for q in range(ranks)])


@pytest.mark.parametrize(
    ("topology", "gather", "exchange", "steps"),
    [
        (ring(4, True), 3 / 2, 2, 2),
        (ring(4, False), 3, 6, 3),
        (ring(8, False), 7, 28, 7),
        (line(4), 3, 4, 3),
        (line(8), 7, 16, 7),
        (mesh(4), 1, 1, 1),
        (mesh(8), 1, 1, 1),
        (one_port(4), 3, 3, 1),
        (one_port(8), 7, 7, 1),
        (grid(3), 4, 6, 4),
        (grid(4), 15 / 2, 16, 6),
        (boxes(4), 1 / 2, 2, 1),
        (boxes(8), 3 / 4, 4, 1),
    ],
)
def test_known_limits(topology: Topology, gather: float, exchange: float, steps: int) -> None:
    """The bounds are those of exact cut enumeration, a flow program and breadth-first search on small machines."""
    ranks = topology.num_ranks
    all_gather = limit(empty(topology, build.allgather_contract(ranks)))
    all_to_all = limit(empty(topology, alltoall(ranks), blocks_in=ranks))
    assert all_gather.seconds_per_byte == pytest.approx(gather)
    assert all_to_all.seconds_per_byte == pytest.approx(exchange)
    assert all_gather.latency == all_to_all.latency == pytest.approx(steps)


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_ring_allreduce_meets_the_bandwidth_bound(ranks: int) -> None:
    """2 (P - 1) / P of the tensor through every port is the least, and the ring takes it, in 2 (P - 1) steps."""
    report = cost.report(build.ring_allreduce(ranks))
    assert report.num_steps == 2 * (ranks - 1)
    assert report.num_transfers == 2 * (ranks - 1) * ranks
    assert report.busiest_port is not None
    assert report.busiest_port.blocks == pytest.approx(2 * (ranks - 1) / ranks)
    assert report.bandwidth_ratio == pytest.approx(1)
    assert report.latency_ratio == pytest.approx(2 * (ranks - 1))
    assert report.same_bits
    assert not list(cost.far_from_bound(build.ring_allreduce(ranks), report))


def oneshot(ranks: int) -> Schedule:
    me = np.arange(ranks)
    x, y = build.buffer(BufferKind.INPUT, "x"), build.buffer(BufferKind.OUTPUT, "y")
    every = np.tile(np.arange(ranks), (ranks, 1))
    move = build.move(MoveKind.REDUCE, (0, every, 0), (1, me, 0), me, is_list=True)
    return build.schedule(ranks, (x, y), (build.allreduce_contract(ranks, 1, 0, 1),), (build.step(move),))


def test_oneshot_is_the_fastest_for_small_tensors_only() -> None:
    """One step is the least latency; it moves (P - 1) n into every port where 2 (P - 1) / P n would do."""
    report = cost.report(oneshot(8))
    assert report.latency_ratio == pytest.approx(1)
    assert report.bandwidth_ratio == pytest.approx(4)
    assert report.num_copies == 8
    assert report.same_bits


def test_order_of_reduction_decides_the_bits() -> None:
    """Two ranks adding in either order agree; three ranks that start with their own do not."""
    for ranks, agree in ((2, True), (3, False)):
        me = np.arange(ranks)
        x, y = build.buffer(BufferKind.INPUT, "x"), build.buffer(BufferKind.OUTPUT, "y")
        rotated = (me[:, None] + me[None, :]) % ranks
        move = build.move(MoveKind.REDUCE, (0, rotated, 0), (1, me, 0), me, is_list=True)
        contract = build.allreduce_contract(ranks, 1, 0, 1)
        report = cost.report(build.schedule(ranks, (x, y), (contract,), (build.step(move),)))
        assert report.same_bits is agree


def test_a_step_lasts_its_longest_latency_and_its_busiest_port() -> None:
    """Two nodes: a step that uses both link classes pays the slow one's latency and the slower of the two loads."""
    topology = build.two_nodes(2)
    x, y = build.buffer(BufferKind.INPUT, "x"), build.buffer(BufferKind.OUTPUT, "y", blocks=2)
    to_neighbour = build.move(MoveKind.PUT, (0, [0, 1, 2, 3], 0), (1, [1, 0, 3, 2], 0), np.arange(4))
    across = build.move(MoveKind.PUT, (0, [0, 1, 2, 3], 0), (1, [2, 3, 0, 1], 1), np.arange(4))
    rows = [(r, 0, r ^ 1, 0) for r in range(4)] + [(r, 1, r ^ 2, 0) for r in range(4)]
    contract = build.copies_contract("general", 0, 1, rows)
    schedule = build.schedule(4, (x, y), (contract,), (build.step(to_neighbour, across),), topology)
    report = cost.report(schedule, block_bytes=1000)
    (step,) = report.steps
    assert step.latency == 4e-6
    assert step.seconds_per_byte == pytest.approx(1 / 50e9)
    assert step.port.link == "rail"
    assert step.port.blocks == 1
    assert report.seconds == pytest.approx(4e-6 + 1000 / 50e9)
    assert report.ratio == pytest.approx(1)


def test_degraded_and_shared_pairs_count() -> None:
    """A pair with less bandwidth left than its port is the bottleneck."""
    whole = build.switch(4)
    slow = Topology(whole.name, 1, 4, 132, whole.links, degraded=((0, 1, 1e9),))
    report = cost.report(build.ring_allreduce(4, slow))
    assert report.steps[0].seconds_per_byte == pytest.approx(0.25 / 1e9)
    assert report.busiest_pair == cost.PairLoad(0, 1, 1.5)


def test_the_port_that_takes_longest_is_the_busiest() -> None:
    """What slows a step is a slow port, not a full one: rank 2 sends, and receives, a third as fast as the others."""
    whole = build.switch(4)
    (switch,) = whole.links
    slow = replace(whole, links=(replace(switch, port_bandwidth=(450e9, 450e9, 150e9, 450e9)),))
    report = cost.report(build.ring_allreduce(4, slow))
    assert report.steps[0].seconds_per_byte == pytest.approx(0.25 / 150e9)
    assert report.busiest_port == cost.PortLoad("nvlink", 2, True, 1.5)
    assert report.limit.reason == "1 n into rank 2"
    assert report.bandwidth_ratio == pytest.approx(1.5)


def test_what_shares_a_port_adds_up() -> None:
    """Two GPUs behind one adapter take twice as long as each with its own, and the report says whose it is."""
    near, rail = build.two_nodes(2).links
    topology = Topology("boxes", 2, 2, 132, (near, replace(rail, scope=LinkScope.ACROSS_NODES, sharing=2)))
    x, y = build.buffer(BufferKind.INPUT, "x"), build.buffer(BufferKind.OUTPUT, "y")
    move = build.move(MoveKind.PUT, (0, [0, 1, 2, 3], 0), (1, [2, 3, 0, 1], 0), np.arange(4))
    contract = build.copies_contract("permutation", 0, 1, [(r, 0, (r + 2) % 4, 0) for r in range(4)])
    report = cost.report(build.schedule(4, (x, y), (contract,), (build.step(move),), topology))
    (step,) = report.steps
    assert step.seconds_per_byte == pytest.approx(2 / 50e9)
    assert step.port == cost.PortLoad("rail", 0, True, 2.0, 2)
    assert step.port.who == "ranks 0 to 1 send"
    assert report.bandwidth_ratio == pytest.approx(1)


def chain(ranks: int) -> Schedule:
    x = build.buffer(BufferKind.INOUT, "x")
    steps = tuple(build.step(build.move(MoveKind.PUT, (0, r, 0), (0, r + 1, 0), np.array([r])), s=r) for r in range(7))
    contract = build.copies_contract("broadcast", 0, 0, [(r, 0, 0, 0) for r in range(ranks)], root=0)
    return build.schedule(ranks, (x,), (contract,), steps)


def test_far_from_the_bound_is_a_warning() -> None:
    """A whole tensor handed along eight ranks takes seven times the least, whatever its size."""
    schedule = chain(8)
    (warning,) = cost.far_from_bound(schedule, cost.report(schedule))
    assert warning.code == "C406"
    assert warning.severity is Severity.WARNING
    assert "7.0 times" in warning.headline


def test_a_prefix_scan_takes_what_its_longest_sum_takes() -> None:
    """Rank r wants the sum of ranks 0 to r: what one follows from another is not counted, but something has to move."""
    text = """schedule scan for P ranks where P >= 2 {
      input x
      output y
      ensure each r { y == sum(x @ q for q in 0 ..< r + 1) }
      each r where r > 0 { reduce x @ q for q in 0 ..< r + 1 -> y }
      each r where r == 0 { copy x -> y }
    }"""
    files = compiler.read_text(text, "scan.comm", Path())
    costs = compiler.check(files, ranks=4).report
    assert costs.limit.seconds_per_byte == pytest.approx(1 / 450e9)
    assert costs.limit.reason != "nothing has to move"
    assert (costs.limit.latency, costs.bandwidth_ratio) == (0.7e-6, pytest.approx(3.0))


def test_values_that_follow_from_others_are_not_counted() -> None:
    """Who wants a, b and a + b needs two transfers, not three."""
    ids = [(1, 0, [0]), (1, 1, [1]), (1, 2, [0, 1])]
    sources = np.array([[chunks[0], chunks[-1]] for _, _, chunks in ids], dtype=np.int32)
    valid = np.array([[True, len(chunks) > 1] for _, _, chunks in ids])
    x, y = build.buffer(BufferKind.INPUT, "x", blocks=2), build.buffer(BufferKind.OUTPUT, "y", blocks=3)
    column = np.arange(3, dtype=np.int32)
    contract = Contract(
        "general", 0, 1, "sum", np.ones(3, np.int32), column, column, np.zeros_like(sources), sources, None,
        build.span(3), valid,
    )  # fmt: skip
    found = limit(build.schedule(2, (x, y), (contract,), (), one_port(2)))
    assert found.seconds_per_byte == pytest.approx(2)


@pytest.mark.parametrize(
    "path", [path for path in shipped() if path.stem.startswith("allreduce")], ids=lambda p: p.stem
)
def test_same_bits_are_the_same_bits(path: Path) -> None:
    """Where the report says that all ranks get the same bits, the interpreter hands all ranks the same bits."""
    case = main_case(path, 8)
    assert case is not None
    files = compiler.read(path)
    schedule = resolve(files, compiler.choose(files, None), case.ranks, switch(case.ranks), dict(case.params))
    (given,) = (found for found in schedule.buffers if found.kind in (BufferKind.INPUT, BufferKind.INOUT))
    random = np.random.default_rng(8)
    inputs = [random.standard_normal(240, np.float32) * 10.0 ** random.integers(-3, 4) for _ in range(case.ranks)]
    result = interpret.run(schedule, {given.name: inputs}, FLOAT32, "sum")
    first, *others = next(iter(result.outputs.values()))
    assert cost.report(schedule).same_bits
    assert all(np.array_equal(first, other) for other in others)
