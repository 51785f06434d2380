"""Cycles: Hamiltonian, arc-disjoint, all there are, and the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from commdsl import checks, compiler
from commdsl.ir import resolve
from commdsl.language.kinds import LinkScope
from commdsl.machine.cycles import NoDecompositionError, hamilton, paths, ring, through_nodes
from commdsl.machine.topology import Link, Topology, switch

ROTATE = """schedule rotate(K, m = 1) for P ranks {
  cycles C = CYCLES
  inout kv[K]
  ensure rotation(kv)
  yield kv
  for s in 1 ..< P {
    each r, i in 0 ..< K { put kv[i] -> kv[i] @ C[i].next(r) }
    yield kv
  }
}
"""
SIZES = [n for n in range(3, 65) if n not in (4, 6)]
NODES = [(m, u) for m in range(2, 17, 2) for u in range(2, 9)]


def _arcs(orders: np.ndarray, closed: bool) -> list[tuple[int, int]]:
    tails = orders if closed else orders[:, :-1]
    heads = np.roll(orders, -1, axis=1) if closed else orders[:, 1:]
    return list(zip(tails.ravel().tolist(), heads.ravel().tolist(), strict=True))


@pytest.mark.parametrize("n", [n for n in range(2, 65) if n not in (4, 6)] + [98, 126, 128])
def test_hamilton_uses_every_arc_once(n: int) -> None:
    """n - 1 cycles, each through every rank, share no arc: together they are all n (n - 1) arcs."""
    orders = hamilton(n)
    assert orders.shape == (n - 1, n)
    assert orders.dtype == np.int32
    assert (np.sort(orders, axis=1) == np.arange(n)).all()
    arcs = _arcs(orders, closed=True)
    assert len(arcs) == len(set(arcs)) == n * (n - 1)


@pytest.mark.parametrize("n", [0, 1, 4, 6])
def test_hamilton_refuses_what_does_not_exist(n: int) -> None:
    """4 and 6 ranks have no decomposition, fewer than 2 no cycle."""
    with pytest.raises(NoDecompositionError):
        hamilton(n)


@pytest.mark.parametrize("m", [2, 4, 6, 8, 10, 16])
def test_paths_use_every_arc_of_a_node_once(m: int) -> None:
    """m Hamiltonian paths; path i starts at i and ends half a node on."""
    orders = paths(m)
    assert (np.sort(orders, axis=1) == np.arange(m)).all()
    arcs = _arcs(orders, closed=False)
    assert len(arcs) == len(set(arcs)) == m * (m - 1)
    assert (orders[:, 0] == np.arange(m)).all()
    assert (orders[:, -1] == (np.arange(m) + m // 2) % m).all()


@pytest.mark.parametrize("m", [0, 1, 3, 7])
def test_paths_refuse_odd_nodes(m: int) -> None:
    """The zigzag gives paths for even m only."""
    with pytest.raises(NoDecompositionError):
        paths(m)


@pytest.mark.parametrize(("m", "u"), NODES)
def test_cycles_through_nodes(m: int, u: int) -> None:
    """m cycles through all ranks share no arc, use every one within a node, and a single one out of and into each GPU
    between nodes, to the next node.
    """
    orders = through_nodes(m, u)
    assert orders.dtype == np.int32
    assert (np.sort(orders, axis=1) == np.arange(m * u)).all()
    arcs = _arcs(orders, closed=True)
    assert len(arcs) == len(set(arcs)) == m * m * u
    within = [(a, b) for a, b in arcs if a // m == b // m]
    assert len(within) == u * m * (m - 1)
    between = [(a, b) for a, b in arcs if a // m != b // m]
    assert all((a // m + 1) % u == b // m for a, b in between)
    for ends in zip(*between, strict=True):
        assert sorted(ends) == list(range(m * u))


@pytest.mark.parametrize(("m", "u"), NODES)
def test_cycles_keep_to_the_rails_where_they_can(m: int, u: int) -> None:
    """Between nodes a cycle goes to the GPU of the same index. Paths of a node swap pairs of GPUs, m / 2 swaps; where
    m / 2 and u are odd the swaps of all nodes are an odd permutation, which brings no cycle back to where it began.
    """
    orders = through_nodes(m, u)
    along = all(a % m == b % m for a, b in _arcs(orders, closed=True) if a // m != b // m)
    assert along is not (u % 2 == 1 and m % 4 == 2)


@pytest.mark.parametrize(("m", "u"), [(8, 1), (8, 0), (7, 2), (0, 2)])
def test_cycles_through_nodes_refuse_one_node_and_odd_nodes(m: int, u: int) -> None:
    """Within one node the way home would be an arc that another path has; odd nodes have no such paths."""
    with pytest.raises(NoDecompositionError):
        through_nodes(m, u)


def _prove(cycles: str, ranks: int, topology: Topology, count: int, m: int = 1) -> None:
    """That the cycles are Hamiltonian, disjoint and along links, and that the first `count` of them make a rotation."""
    files = compiler.read_text(ROTATE.replace("CYCLES", cycles), "rotate.comm", Path())
    found = resolve.resolve(files, compiler.choose(files, None), ranks, topology, {"K": count, "m": m})  # type: ignore[arg-type]
    assert not checks.check_schedule(found), (ranks, m, count)


def test_all_sizes_are_proved_in_time() -> None:
    """The checker proves the rotation along all cycles of every size from 3 to 64, and along those through 2 to 8 nodes
    of 2 to 16 GPUs, in less than 5 seconds in all.
    """
    begin = time.process_time()
    for n in SIZES:
        _prove("hamilton(P)", n, switch(n), n - 1)
    for m, u in NODES:
        _prove("paths(m, P / m)", m * u, switch(m * u), m, m)
    taken = time.process_time() - begin
    assert taken < 5, f"{len(SIZES)} sizes and {len(NODES)} numbers of nodes and GPUs took {taken:.1f} s to prove"


@pytest.mark.parametrize("ranks", [8, 10, 13])
def test_any_number_of_cycles_is_a_rotation(ranks: int) -> None:
    """One cycle, all of them, and every number between."""
    for count in range(1, ranks):
        _prove("hamilton(P)", ranks, switch(ranks), count)


@pytest.mark.parametrize(("m", "u"), [(8, 2), (8, 3), (8, 4), (6, 4), (4, 5)])
def test_cycles_through_nodes_run_along_rails(m: int, u: int) -> None:
    """They are proved on machines whose nodes are joined by a rail for each GPU, and by nothing else."""
    inside = Link("inside", LinkScope.IN_NODE, 450e9, np.inf, 1e-6)
    rail = Link("rail", LinkScope.ACROSS_SAME_GPU, 50e9, np.inf, 4e-6)
    _prove("paths(m, P / m)", m * u, Topology("rails", u, m, 132, (inside, rail)), m, m)


def test_ring_is_the_ranks_in_order() -> None:
    """One cycle, in rank order."""
    assert ring(5).tolist() == [[0, 1, 2, 3, 4]]


def test_hamilton_does_not_depend_on_the_hash_seed() -> None:
    """The searched cycles are the same in every process."""
    program = "from commdsl.machine.cycles import hamilton; print([hamilton(n).tolist() for n in (10, 14, 22, 30)])"
    answers = {
        subprocess.run(
            [sys.executable, "-c", program], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("0", "1", "77")
    }
    assert len(answers) == 1


LISTED = """schedule along(K = 2) for P ranks where P >= 3 {
  cycles C = OPEN((k * i % P) for k in 1 ..< 1 + K, i in 0 ..< P)
  cycles D = WRITTEN
  inout x[K]
  inout y[K]
  ensure broadcast(x, 0)
  ensure broadcast(y, 0)
  for s in 0 ..< P - 1 {
    each r, c in C where r == c.at(s) { put x[c] -> x[c] @ c.next(r) }
    each r, c in D where r == c.at(s) { put y[c] -> y[c] @ c.next(r) }
  }
}
"""


@pytest.mark.parametrize("word", ["", "open "])
def test_listed_by_a_range(word: str) -> None:
    """Cycles that a range lists are those written out; open ones end."""
    text = LISTED.replace("OPEN", word).replace("WRITTEN", f"{word}(0 1 2 3 4) (0 2 4 1 3)")
    checked = compiler.check(compiler.read_text(text, "test.comm", Path()), ranks=5)
    ranged, written = checked.schedule.cycles  # type: ignore[union-attr]

    assert np.array_equal(ranged.orders, written.orders)
    assert ranged.closed == written.closed == (word == "")
