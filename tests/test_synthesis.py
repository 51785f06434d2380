"""`commdsl synth`: trees packed to what a machine's links leave, as a schedule that is proved and runs right.

Assumes scipy. That the least time is the true one is `test_bounds.py`'s; all of the random machines and their seconds
are `benchmarks/synthesis.py`'s.
"""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import numpy as np
import pytest

from benchmarks.synthesis import MOST_RATIO, machine
from commdsl import compiler
from commdsl.commands import synth
from commdsl.commands.arguments import UsageError
from commdsl.commands.cli import run_command
from commdsl.cost.graph import graph_of
from commdsl.planner.synthesis.schedule import GOAL, Network, spreads
from commdsl.planner.synthesis.shares import shares
from commdsl.planner.synthesis.shorter import shorter
from commdsl.planner.synthesis.trees import Tree, packed

Capture = pytest.CaptureFixture[str]

ONE_WAY = """topology one_way {
  nodes 1   gpus 4 per node   sms 80
  link hop pairs (i, (i + 1) % gpus) for i in 0 ..< gpus   50 GB/s per pair   1 us
  missing (0, 1)
  degraded (2, 3)   25 GB/s
}
"""

SHARED = """topology shared {
  nodes 2   gpus 4 per node   sms 100
  link up   arcs (0, 1) (1, 2) (2, 3) (3, 0)   100 GB/s per pair   1 us
  link host in node   50 GB/s per 2 gpus   1 us
  link net  across nodes   25 GB/s per node   4 us
}
"""


def made(collective: str, on: str, root: int | None = None) -> synth.Made:
    return synth.make(synth.parse(collective, on, None, root))


@pytest.fixture
def one_way(tmp_path: Path) -> str:
    path = tmp_path / "one_way.comm"
    path.write_text(ONE_WAY)
    return str(path)


# --- how good it is ---------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(32))
def test_random_machines(seed: int, tmp_path: Path) -> None:
    """On machines of 4 to 16 GPUs with links of any kinds, links take at most 1.15 of the least time."""
    path = tmp_path / "machine.comm"
    path.write_text(machine(seed))

    assert made(("allgather", "reduce_scatter")[seed % 2], str(path)).costs.bandwidth_ratio <= MOST_RATIO


@pytest.mark.parametrize("collective", ["allgather", "reduce-scatter", "all_reduce", "broadcast", "reduce"])
def test_a_barbell(collective: str) -> None:
    """The two bridges between two boards are what takes time, and are both used all the time."""
    costs = made(collective, "barbell").costs
    blocks = 4 if collective in ("allgather", "reduce-scatter") else 1

    assert costs.limit.seconds_per_byte == pytest.approx(blocks / 50e9)
    assert costs.bandwidth_ratio <= MOST_RATIO


def test_shared_ports_and_one_way_links(tmp_path: Path) -> None:
    """Four blocks go through the adapter of a node: that is the time, and nothing is kept waiting for long."""
    path = tmp_path / "shared.comm"
    path.write_text(SHARED)
    costs = made("allgather", str(path)).costs

    assert costs.limit.seconds_per_byte == pytest.approx(4 / 25e9)
    assert costs.bandwidth_ratio <= MOST_RATIO


def test_shares_of_a_sum() -> None:
    """Of a DGX-1 with a dead link two GPUs have 100 GB/s, six 150. A rank that adds up a of a tensor sends the rest as
    parts, and hears as much: (1 - a) / 100 = (1 - b) / 150 and 2 a + 6 b = 1 say a = 8 / 22 for the two, b = 1 / 22 for
    the others, and both ways take 14 / 11 of a tensor at 100 GB/s, the least of any schedule. As 7 and 1 of 20 blocks
    they take 13 / 10; as one of 8 each, 14 / 8.
    """
    graph = graph_of(compiler.find_topology((), "dgx1_dead_link", 8), 8)
    alike = graph_of(compiler.find_topology((), "dgx1", 8), 8)
    costs = made("allreduce", "dgx1_dead_link").costs

    assert shares([graph]).tolist() == [7, 1, 1, 1, 7, 1, 1, 1]
    assert shares([alike]).tolist() == [1] * 8
    assert costs.limit.seconds_per_byte == pytest.approx(14 / 11 / 100e9)
    assert costs.seconds_per_byte <= GOAL * 13 / 10 / 100e9 * 1.001
    assert costs.bandwidth_ratio <= MOST_RATIO


# --- trees ------------------------------------------------------------------------------------------------------------


def used(trees: tuple[Tree, ...], num_ranks: int) -> np.ndarray:
    """How often each wire is used, by tree and child: from whom to whom."""
    found = np.zeros((num_ranks, num_ranks), np.int64)
    for tree in trees:
        for rank, parent in enumerate(tree.parent.tolist()):
            found[parent, rank] += parent != rank
    return found


def reaches_all(tree: Tree) -> bool:
    at = np.arange(len(tree.parent))
    for _ in at:
        at = tree.parent[at]
    return bool((at == tree.root).all())


def test_trees_of_a_hybrid_cube_mesh() -> None:
    """Six trees a GPU use every brick of a DGX-1 to the last byte, and swap parents until they are flat."""
    graph = graph_of(compiler.find_topology((), "dgx1", 8), 8)
    network = Network(graph, np.ones(8, np.int64))
    found = network.carried(6)
    assert found is not None
    trees = packed(found.pieces, network.given * 6)
    flat = shorter(trees)

    assert found.seconds == pytest.approx(7 / 150e9)
    assert used(trees, 8).sum() == 7 * 48
    for some in (trees, flat):
        assert np.array_equal(used(some, 8), found.pieces)
        assert all(map(reaches_all, some))
        assert [tree.root for tree in some] == np.repeat(np.arange(8), 6).tolist()
    assert max(int(tree.depth.max()) for tree in flat) <= 3


@pytest.mark.parametrize("seed", range(30))
def test_trees_of_any_wires(seed: int) -> None:
    """Wherever every rank can get all pieces there are trees, and no wire carries more than it can."""
    random = Random(seed)
    count = random.randrange(2, 7)
    given = np.array([random.randrange(3) for _ in range(count)])
    given[0] += 1
    pieces = np.zeros((count, count), np.int64)
    for root in np.repeat(np.arange(count), given).tolist():  # some trees, so that there are any
        order = [root, *random.sample([rank for rank in range(count) if rank != root], count - 1)]
        for at in range(1, count):
            pieces[random.choice(order[:at]), order[at]] += 1
    trees = packed(pieces, given)

    assert np.bincount([tree.root for tree in trees], minlength=count).tolist() == given.tolist()
    assert all(map(reaches_all, trees))
    assert (used(trees, count) <= pieces).all()
    assert np.array_equal(used(shorter(trees), count), used(trees, count))


def test_ports_are_shared_out() -> None:
    """Behind a switch no port carries more than it can, though any wire could carry all of it."""
    topology = compiler.find_topology((), "h200_2x8", 16)
    graph = graph_of(topology, 16)
    (found,) = spreads([graph], np.ones(16, np.int64))
    wires, ports = used(found.trees, 16), graph.wires.ports
    pieces = ports * found.ratio * Network(graph, np.ones(16, np.int64)).least * found.pieces
    near = np.arange(16)[:, None] // 8 == np.arange(16) // 8

    for link, among in enumerate((near, ~near)):
        for axis in (0, 1):
            assert (np.where(among, wires, 0).sum(axis=axis) <= pieces[link]).all()


# --- what is written --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", ["reduce_scatter", "allreduce", "broadcast"])
def test_it_runs_right(collective: str, one_way: str, tmp_path: Path, capsys: Capture) -> None:
    """What is written is canonical, and its kernel on host ranks has the oracle's bits; links may be one way."""
    out = str(tmp_path / "made.comm")
    assert run_command(["synth", collective, "--on", one_way, "--out", out]) == 0
    assert run_command(["fmt", "--check", out]) == 0
    assert run_command(["run", out, "--on", one_way, "--bytes", "4KB", "--dtype", "int32"]) == 0
    assert "equal to the oracle" in capsys.readouterr().out


def test_sums_come_in_as_blocks_go_out(one_way: str) -> None:
    """An all-reduce has one pair of tables where links are alike both ways, and two where they are not."""
    for on, tables in (("ring_8", ["parent", "turn"]), (one_way, ["sum_parent", "sum_turn", "parent", "turn"])):
        text = made("allreduce", on).text
        assert [line.split()[1] for line in text.splitlines() if line.strip().startswith("let")] == tables


def test_the_head_says_what_it_costs() -> None:
    """What the cost report says stands above the schedule."""
    found = made("allgather", "ring_8")
    head = " ".join(line.removeprefix("# ") for line in found.text.splitlines() if line.startswith("#"))

    assert head.startswith("All-gather on ring_8")
    assert f"{found.costs.num_steps} steps" in head
    assert f"{found.costs.bandwidth_ratio:.2f} times that" in head


# --- the command ------------------------------------------------------------------------------------------------------


def test_where_it_goes(one_way: str, tmp_path: Path, capsys: Capture) -> None:
    """To a file, with the costs on standard output, or to standard output; as JSON both are one value."""
    out, words = tmp_path / "tree.comm", ["synth", "broadcast", "--on", one_way, "--root", "3", "--name", "tree"]
    assert run_command([*words, "-o", str(out)]) == 0
    assert "time" in capsys.readouterr().out
    assert "ensure broadcast(x, 3)" in out.read_text()
    assert run_command(words) == 0
    shown = capsys.readouterr()
    assert shown.out == out.read_text()
    assert "time" in shown.err
    assert run_command([*words, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["text"] == out.read_text()
    assert value["schedule"] == "tree"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["alltoall", "--on", "dgx1"], "no tree serves it: see `alltoall_direct`"),
        (["gather", "--on", "dgx1"], "see `gather_direct`"),
        (["allgathr", "--on", "dgx1"], "did you mean `allgather`?"),
        (["allgather"], "--on TOPOLOGY"),
        (["allgather", "--on", "dgx1", "--root", "1"], "--root is for broadcast and reduce"),
        (["reduce", "--on", "dgx1", "--root", "8"], "the ranks of `dgx1` are 0 to 7"),
        (["reduce", "--on", "dgx1", "--name", "for"], "expected a name"),
    ],
)
def test_what_is_refused(words: list[str], said: str, capsys: Capture) -> None:
    """What has no trees, no machine, or no such root says so in one line."""
    assert run_command(["synth", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_machine_in_two_parts(tmp_path: Path) -> None:
    """A machine that does not join all ranks is told of, and so is one of too many."""
    for text, said in (
        (ONE_WAY.replace("(0, 1)\n", "(0, 1) (0, 3)\n"), "does not join all ranks: 1 n out of rank 0"),
        (ONE_WAY.replace("gpus 4 per", "gpus 40 per"), "has 40 ranks; 2 to 32 can be synthesised"),
    ):
        path = tmp_path / "machine.comm"
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            made("allgather", str(path))


def test_without_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says what to install."""
    monkeypatch.setattr(synth, "can_flow", lambda: False)
    with pytest.raises(UsageError, match=r"pip install 'commdsl\[bounds\]'"):
        made("allgather", "dgx1")
