"""How long launches and visits take beside each other, against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ir_builder as build
import numpy as np
import pytest

from commdsl import compiler
from commdsl.cost.visits import Carrier, Launched, UnlinkedError, Visited, beside, phases
from commdsl.ir import resolve
from commdsl.ir.schedules import Schedule
from commdsl.language.kinds import LinkScope
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.topology import Link, Topology

PLAIN = (Carrier(), Carrier())

ATTENTION = Path(__file__).parent.parent / "schedules" / "attention"


def port(ranks: int) -> Topology:
    """A switch whose ports carry one byte a second, without latency."""
    return Topology("port", 1, ranks, 100, (Link("switch", LinkScope.IN_NODE, 1.0, np.inf, 0.0),))


def mesh(ranks: int) -> Topology:
    """Every pair has a link of one byte a second."""
    return Topology("mesh", 1, ranks, 100, (Link("wire", LinkScope.IN_NODE, np.inf, 1.0, 0.0),))


def meant(path: Path, topology: Topology, ranks: int) -> Schedule:
    files = compiler.read(path)
    return resolve.resolve(files, compiler.choose_kind(files, None, ScheduleDecl), ranks, topology, {})


def seconds(name: str, topology: Topology, each: list[float], carrier: Carrier | None = None) -> float:
    """Of a shipped rotation of 84 bytes a rank, cut as it likes, with visits that take so long."""
    schedule = meant(ATTENTION / f"{name}.comm", topology, topology.num_ranks)
    found = phases(schedule, {"kv": 84 / schedule.buffers[0].num_chunks})
    return beside(found, each, (carrier or Carrier(),) * 2).seconds


@pytest.mark.parametrize(("visit", "total"), [(0, 3 * 84), (10, 3 * 84 + 10), (84, 4 * 84), (100, 400)])
def test_what_takes_longer_counts(visit: float, total: float) -> None:
    """Of a ring's three hops and four visits the longer kind adds up; one visit is beside no hop."""
    assert seconds("rotation_ring", port(4), [visit] * 4) == pytest.approx(total)


def test_a_launch_waits_for_who_reads_what_it_overwrites() -> None:
    """There are two copies: the third hop writes to the one that visit 1 reads, so it waits for that long visit."""
    assert seconds("rotation_ring", port(4), [1, 200, 0, 0]) == pytest.approx(84 + 200 + 84)


@pytest.mark.parametrize(("name", "on_port", "on_mesh"), [
    ("rotation_ring", 7 * 84, 7 * 84),
    ("rotation_direct", 7 * 84, 84),
    ("rotation_hamilton", 7 * 84, 84),
])  # fmt: skip
def test_pieces_fill_a_mesh(name: str, on_port: float, on_mesh: float) -> None:
    """A switch carries as much however it is cut; a mesh of 8 is seven times as fast for pieces."""
    assert seconds(name, port(8), [0] * 8) == pytest.approx(on_port)
    assert seconds(name, mesh(8), [0] * 8) == pytest.approx(on_mesh)


def test_carriers() -> None:
    """A carrier has a rate for all that a rank sends, a time for each step, and one for each copy behind the first."""
    assert seconds("rotation_ring", port(4), [0] * 4, Carrier(rate=0.5)) == pytest.approx(3 * 168)
    assert seconds("rotation_ring", port(4), [0] * 4, Carrier(rate=2.0)) == pytest.approx(3 * 84)
    assert seconds("rotation_ring", port(4), [0] * 4, Carrier(latency=2.0, per_copy=9.0)) == pytest.approx(3 * 86)
    assert seconds("rotation_direct", mesh(4), [0] * 4, Carrier(latency=2.0, per_copy=9.0)) == pytest.approx(3 * 48)


def test_latency_and_nodes() -> None:
    """A step has the longest latency and the busiest port of its links: a ring over two nodes waits for the adapter."""
    ring = meant(ATTENTION / "rotation_ring.comm", build.two_nodes(2), 4)
    with pytest.raises(UnlinkedError, match="no link from rank 1 to rank 2 on `pairbox`"):
        phases(ring, {"kv": 100e9})
    near, far = build.two_nodes(2).links
    topology = Topology("boxes", 2, 2, 132, (near, Link("nic", LinkScope.ACROSS_NODES, 50e9, np.inf, 4e-6)))
    found = phases(meant(ATTENTION / "rotation_ring.comm", topology, 4), {"kv": 100e9})

    assert beside(found, [0] * 4, PLAIN).seconds == pytest.approx(3 * (2 + 4e-6))
    assert far.port_bandwidth == 50e9
    uneven = replace(topology.links[1], port_bandwidth=(50e9, 50e9, 50e9, 25e9))
    slow = meant(ATTENTION / "rotation_ring.comm", replace(topology, links=(near, uneven)), 4)
    assert beside(phases(slow, {"kv": 100e9}), [0] * 4, PLAIN).seconds == pytest.approx(3 * (4 + 4e-6))
    shared = replace(topology, links=(near, replace(topology.links[1], sharing=2)))
    pairs = phases(meant(ATTENTION / "rotation_direct.comm", shared, 4), {"kv": 100e9 / 3})  # in three pieces
    assert beside(pairs, [0] * 4, PLAIN).seconds == pytest.approx(2 + 4 + 2 + 3 * 4e-6)


def test_what_is_written_travels() -> None:
    """What a visit writes is sent when it is written, what it only reads before; each knows its size."""
    found = phases(meant(ATTENTION / "rotation_carry.comm", port(2), 2), {"kv": 10.0, "acc": 100.0})
    launched = [phase for phase in found if isinstance(phase, Launched)]
    visited = [phase for phase in found if isinstance(phase, Visited)]

    assert [(one.writes, one.loads[0].most_bytes) for one in launched] == [
        (("kv",), 10),
        (("acc",), 100),
        (("acc",), 100),
    ]
    assert [(one.reads, one.writes) for one in visited] == 2 * [(("kv", "acc"), ("acc",))]
    assert beside(found, [50, 50], PLAIN).seconds == pytest.approx(50 + 100 + 50 + 100)
    assert beside(found, [5, 5], PLAIN).seconds == pytest.approx(10 + 100 + 5 + 100)


def test_sizes_follow_moves() -> None:
    """What is moved into a buffer is as long as where it came from, however far."""
    found = phases(meant(ATTENTION / "rotation_direct.comm", port(3), 3), {"kv": 42.0})

    assert [phase.loads[0].most_bytes for phase in found if isinstance(phase, Launched) and phase.loads] == [84, 84]


@pytest.mark.parametrize(("name", "travelling"), [("ring", 1), ("direct", 0)])
def test_what_combines_is_carried_apart(name: str, travelling: int) -> None:
    """Gradients that are added on their way have a carrier of their own, as the copy engine does not add; those that
    only their owner adds travel as keys do.
    """
    schedule = meant(ATTENTION / f"attention_{name}_backward.comm", port(3), 3)
    found = phases(schedule, dict.fromkeys(("k", "v", "dk", "dv"), 42.0 / 2))
    launched = [phase for phase in found if isinstance(phase, Launched)]
    sums = [one for one in launched if one.combines]

    assert {"dk", "dv"} <= {write for one in sums for write in one.writes}
    assert sum(len(one.loads) for one in sums) == travelling
    assert sum(one.time((Carrier(), Carrier(latency=5.0))) for one in launched) == pytest.approx(
        8 * 42 + travelling * 5
    )
