"""Cycles: Hamiltonian, arc-disjoint, all there are, and the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from commdsl.machine.cycles import NoDecompositionError, hamilton, paths, ring


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
