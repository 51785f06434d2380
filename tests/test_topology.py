"""Topologies: what a declaration means, which links there are, and the machines that are shipped."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from commdsl import compiler
from commdsl.checks.topology import MOST_SYNTHESISED, SYNTHESISED
from commdsl.commands import synth
from commdsl.ir import resolve
from commdsl.language import parser
from commdsl.language.diagnostics import CommError
from commdsl.language.kinds import LinkScope
from commdsl.language.source import Source
from commdsl.machine import resources
from commdsl.machine.topology import NO_LINK, Topology, link_of, pair_bandwidth, switch, wire_bandwidth
from commdsl.planner.synthesis.collectives import Collective

SHIPPED = sorted((resources.data_dir("schedules") / "topologies").glob("*.comm"))
RANKS = {
    "a100_1x8": 8, "barbell": 8, "dgx1": 8, "dgx1_dead_link": 8, "h100_1x8": 8, "h100_2x8": 16, "h100_4x8": 32,
    "h200_1x8": 8, "h200_2x8": 16, "h200_2x8_spine": 16, "h200_4x8": 32, "h200_4x8_spine": 32, "mi300x_1x8": 8,
    "ring_8": 8, "torus_4x4": 16,
}  # fmt: skip


def _topology(entries: str) -> Topology:
    text = f"topology m {{\n{entries}\n}}\n"
    return resolve.topologies((parser.parse(Source("m.comm", text)),))["m"]


def _codes(text: str) -> list[tuple[str, int]]:
    with pytest.raises(CommError) as caught:
        resolve.topologies((parser.parse(Source("m.comm", text)),))
    return [(found.code, found.primary.span.position[0]) for found in caught.value.diagnostics]


def _links(topology: Topology) -> np.ndarray:
    ranks = np.arange(topology.num_ranks)
    return link_of(topology, ranks[:, None], ranks[None, :])


COUNTS = "nodes 2\ngpus 4 per node\nsms 100\n"


def test_a_declaration_is_what_it_says() -> None:
    """Counts, capped by what they say per: port or pair; base units."""
    machine = _topology(COUNTS + "link a in node 450 GB/s per gpu 0.7 us\nlink b across nodes 50 GB/s per pair 4 us")
    assert (machine.num_nodes, machine.gpus_per_node, machine.num_sms, machine.num_ranks) == (2, 4, 100, 8)
    first, second = machine.links
    assert (first.port_bandwidth, first.pair_bandwidth) == (450e9, np.inf)
    assert (second.port_bandwidth, second.pair_bandwidth) == (np.inf, 50e9)
    assert first.latency == pytest.approx(0.7e-6)
    assert (first.scope, second.scope) == (LinkScope.IN_NODE, LinkScope.ACROSS_NODES)


def test_links_join_the_pairs_of_their_scope() -> None:
    """In a node, across nodes of one index, across nodes; a rank has none to itself, and the first declared wins."""
    rails = _links(
        _topology(COUNTS + "link a in node 4 GB/s per gpu 1 us\nlink b across nodes same gpu 1 GB/s per gpu 2 us")
    )
    for source in range(8):
        for dest in range(8):
            same_node, same_gpu = source // 4 == dest // 4, source % 4 == dest % 4
            expected = NO_LINK if source == dest else 0 if same_node else 1 if same_gpu else NO_LINK
            assert rails[source, dest] == expected
    every = _topology(
        COUNTS + "link b across nodes same gpu 1 GB/s per gpu 2 us\nlink c across nodes 1 GB/s per gpu 3 us"
    )
    assert _links(every)[0].tolist() == [NO_LINK] * 4 + [0, 1, 1, 1]


def test_listed_pairs_hold_both_ways_in_every_node() -> None:
    """Pairs are GPUs of a node; a binder makes many."""
    machine = _topology(COUNTS + "link a pairs (i, (i + 1) % gpus) for i in 0 ..< gpus 4 GB/s per pair 1 us")
    found = {(int(a), int(b)) for a, b in np.argwhere(_links(machine) != NO_LINK)}
    one = {(i, (i + 1) % 4) for i in range(4)} | {((i + 1) % 4, i) for i in range(4)}
    assert found == {(4 * node + a, 4 * node + b) for node in range(2) for a, b in one}


def test_arcs_hold_one_way() -> None:
    """From the first to the second; the way back may be of another class."""
    machine = _topology(
        COUNTS + "link a arcs (0, 1) (1, 2) 4 GB/s per pair 1 us\nlink b arcs (1, 0) 4 GB/s per gpu 1 us"
    )
    links = _links(machine)
    assert {(int(a), int(b)): int(links[a, b]) for a, b in np.argwhere(links != NO_LINK)} == {
        (0, 1): 0, (1, 2): 0, (1, 0): 1, (4, 5): 0, (5, 6): 0, (5, 4): 1,
    }  # fmt: skip


def test_axes_are_counted_the_last_one_fastest() -> None:
    """Neighbours on an axis are joined, the last and the first, too, unless it is open; arcs go one way."""
    counts = "nodes 2\ngpus x = 2, y = 3 per node\nsms 100\n"
    machine = _topology(
        counts
        + "link a pairs along x 4 GB/s per pair 1 us\nlink b arcs along y 4 GB/s if x == 1 else 2 GB/s per pair 1 us"
    )
    assert [(axis.name, axis.length, axis.stride) for axis in machine.axes] == [("x", 2, 3), ("y", 3, 1)]
    assert machine.gpus_per_node == 6
    links = _links(machine)
    assert {(int(a), int(b)): int(links[a, b]) for a, b in np.argwhere(links != NO_LINK)} == {
        (g + a, g + b): link
        for g in (0, 6)
        for link, pairs in enumerate([[(0, 3), (1, 4), (2, 5), (3, 0), (4, 1), (5, 2)],
                                      [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]])
        for a, b in pairs
    }  # fmt: skip
    ends = np.array([0, 3, 6, 9]), np.array([1, 4, 7, 10])
    assert pair_bandwidth(machine, *ends, links[ends]).tolist() == [2e9, 4e9, 2e9, 4e9]
    grid = _links(_topology(counts + "link a pairs along open x, y 4 GB/s per pair 1 us")) != NO_LINK
    assert np.argwhere(grid[:6, :6] & (np.arange(6)[:, None] < np.arange(6))).tolist() == [
        [0, 1], [0, 3], [1, 2], [1, 4], [2, 5], [3, 4], [4, 5],
    ]  # fmt: skip
    assert (grid == grid.T).all()


def test_several_gpus_share_a_port() -> None:
    """So many side by side, or all of a node; each has one of its own unless that is said."""
    machine = _topology(
        COUNTS + "link a pairs (0, 2) 4 GB/s per gpu 1 us\nlink b in node 5 GB/s per 2 gpus 1 us\n"
        "link c across nodes 6 GB/s per node 1 us"
    )
    assert [(link.port_bandwidth, link.pair_bandwidth, link.sharing) for link in machine.links] == [
        (4e9, np.inf, 1), (5e9, np.inf, 2), (6e9, np.inf, 4),
    ]  # fmt: skip
    assert [link.port(np.arange(8)).tolist() for link in machine.links[1:]] == [
        [0, 0, 2, 2, 4, 4, 6, 6],
        [0] * 4 + [4] * 4,
    ]


def test_rates_are_those_of_ports_and_senders() -> None:
    """By node and GPU, the first condition that holds; of a shared port its first GPU's; of a pair the sender's."""
    machine = _topology(
        COUNTS + "link a pairs (0, 2) 4 GB/s if node == 0 else 2 GB/s if gpu < 2 else 1 GB/s per gpu 1 us\n"
        "link b in node 6 GB/s if gpu > 1 else 5 GB/s per 2 gpus 1 us\n"
        "link c across nodes 3 GB/s if node == 1 else 9 GB/s per pair 1 us"
    )
    assert [link.port_rate(np.arange(8)).tolist() for link in machine.links[:2]] == [
        [4e9] * 4 + [2e9] * 2 + [1e9] * 2,
        [5e9, 5e9, 6e9, 6e9] * 2,
    ]
    pairs = np.array([(0, 4), (4, 0), (0, 2), (6, 4), (1, 3)])
    links = _links(machine)[pairs[:, 0], pairs[:, 1]]
    assert pair_bandwidth(machine, *pairs.T, links).tolist() == [9e9, 3e9, np.inf, np.inf, np.inf]
    assert wire_bandwidth(machine, *pairs.T, links).tolist() == [9e9, 3e9, 4e9, 1e9, 5e9]


def test_missing_and_degraded_links() -> None:
    """A missing pair has no link in that direction, a degraded one less bandwidth."""
    machine = _topology(COUNTS + "link a in node 4 GB/s per pair 1 us\nmissing (0, 1)\ndegraded (1, 0) (2, 3) 1 GB/s")
    links = _links(machine)
    assert links[0, 1] == NO_LINK
    assert links[1, 0] == 0
    pairs = np.array([(1, 0), (2, 3), (3, 2)])
    left = pair_bandwidth(machine, pairs[:, 0], pairs[:, 1], links[pairs[:, 0], pairs[:, 1]])
    assert left.tolist() == [1e9, 1e9, 4e9]


def test_the_switch_joins_any_number_of_ranks() -> None:
    """Without a machine: one port each, every pair linked, and it says that it is made up."""
    machine = switch(5)
    assert machine.idealised
    assert (_links(machine) == np.where(np.eye(5, dtype=bool), NO_LINK, 0)).all()


def test_all_faults_of_a_topology() -> None:
    """Every mistake of the files' topologies in one run."""
    text = """topology a {
  nodes 1
  gpus 4 per node
  gpus 4 per node
  link l pairs (0, 4) 4 GB/s per pair 1 us
  link m pairs (1, 1) 4 GB/s per pair 1 us
  link n pairs (i, nods) for i in 0 ..< gpus 4 GB/s per pair 1 us
}
topology a { nodes 1  gpus 2 per node  sms 0
  missing (0, 1)
}
topology b { nodes 1  gpus 2 per node  sms 1
  missing (0, 1)
  degraded (0, 2) 1 GB/s
}
"""
    assert _codes(text) == [
        ("C120", 1), ("C102", 4), ("C120", 5), ("C120", 6), ("C101", 7), ("C102", 9), ("C120", 9), ("C120", 13),
        ("C120", 14),
    ]  # fmt: skip


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_machines(path) -> None:
    """A file declares the one machine it is named after; its links are the same both ways, and join all its ranks."""
    found = resolve.topologies(compiler.read(path))
    assert list(found) == [path.stem]
    machine = found[path.stem]
    assert machine.num_ranks == RANKS[path.stem]
    joined = _links(machine) != NO_LINK
    assert (joined == joined.T).all()
    reach = np.linalg.matrix_power(joined.astype(np.int64) + np.eye(machine.num_ranks, dtype=np.int64), 8)
    assert (reach > 0).all()


def test_every_machine_is_tested() -> None:
    """The list above and the shipped files agree."""
    assert {path.stem for path in SHIPPED} == set(RANKS)


def test_the_hybrid_cube_mesh_has_six_bricks_a_gpu() -> None:
    """DGX-1: each GPU spends its six NVLinks on four peers, two of them twice."""
    machine = compiler.find_topology((), "dgx1", 8)
    bricks = np.array([2, 1, 0])[_links(machine)]  # double, single, none
    assert (bricks.sum(axis=1) == 6).all()
    assert (np.count_nonzero(bricks, axis=1) == 4).all()


@pytest.mark.parametrize("name", ["h200_1x8", "h200_2x8_spine", "h200_4x8_spine", "mi300x_1x8"])
def test_machines_that_join_every_pair(name: str) -> None:
    """Behind a switch, on a full mesh and under a spine no schedule lacks a link."""
    links = _links(compiler.find_topology((), name, RANKS[name]))
    assert ((links == NO_LINK) == np.eye(RANKS[name], dtype=bool)).all()


@pytest.mark.parametrize(("contract", "root"), [("allreduce(x)", ""), ("broadcast(x, 3)", " --root 3")])
def test_a_missing_link_names_the_command_that_writes_a_schedule(tmp_path: Path, contract: str, root: str) -> None:
    """Where trees serve the contract, the help of C401 is a command that ends in a schedule for that machine."""
    text = f"schedule s for P ranks {{ inout x  ensure {contract}  each r where r == 0 {{ put x -> x @ 2 }} }}"
    path = tmp_path / "s.comm"
    path.write_text(text, encoding="utf-8")
    found = missing(path, 8, "ring_8")
    assert f"`commdsl synth {contract.partition('(')[0]} --on ring_8{root}` writes a schedule" in found
    assert "synth" not in missing(path, 4, "ring_8")  # of a part of the machine


def test_a_missing_link_names_no_command_where_none_helps(tmp_path: Path) -> None:
    """No tree serves a permutation, and none leads where no link leads."""
    path = tmp_path / "s.comm"
    machine = "topology half { nodes 1  gpus 2 per node  sms 1  link up arcs (0, 1) 1 GB/s per pair  1 us }\n"
    body = "each r where r == 1 { put x -> x @ 0 } }"
    path.write_text(f"{machine}schedule s for P ranks {{ inout x  ensure allreduce(x)  {body}", encoding="utf-8")
    assert "synth" not in missing(path, 2, "half")
    body = "ensure permutation(x) r -> (r + 2) % P  each r { put x -> x @ (r + 2) % P } }"
    path.write_text(f"schedule s for P ranks {{ inout x  {body}", encoding="utf-8")
    assert "synth" not in missing(path, 8, "ring_8")


def test_collectives_that_are_synthesised() -> None:
    """The check names those that the command has."""
    assert set(SYNTHESISED) == {one.value for one in Collective}
    assert MOST_SYNTHESISED == synth.MOST_RANKS


def missing(path: Path, ranks: int, on: str) -> str:
    """The help of the first C401."""
    with pytest.raises(CommError) as caught:
        compiler.check(path, ranks=ranks, on=on)
    return next(one.help for one in caught.value.diagnostics if one.code == "C401")
