"""Ranks that all do the same, turned along a torus: one stands for all, in what is derived and in what is proved."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from random import Random

import numpy as np
import pytest
from flag_mutants import MUTATIONS, PER_WAIT
from plans import changed
from test_calls import TREES

from commdsl import compiler
from commdsl.compiler import CheckedSchedule
from commdsl.language.diagnostics import CommError, InternalError
from commdsl.program.lower import problem
from commdsl.program.plan import Plan
from commdsl.program.proof.flags import timeline
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.synchronization import prove
from commdsl.program.proof.timeline import pattern
from commdsl.program.torus import Torus, tori
from commdsl.program.verify import verify

ROUNDS = import_module("commdsl.program.proof.rounds")


@pytest.mark.parametrize("sizes", [(1,), (6,), (2, 3), (4, 4), (2, 3, 2)])
def test_turns(sizes: tuple[int, ...]) -> None:
    """A turn adds to a rank's place along each axis; the distance takes away, and leads there."""
    torus, ranks = Torus(sizes), np.arange(np.prod(sizes), dtype=np.int32)
    places = np.stack(np.unravel_index(ranks, sizes))
    there = (places[:, :, None] - places[:, None, :]) % np.array(sizes)[:, None, None]

    assert np.array_equal(torus.distance(ranks[:, None], ranks), np.ravel_multi_index(tuple(there), sizes))
    assert np.array_equal(torus.turned(ranks, torus.distance(ranks[:, None], ranks)), np.meshgrid(ranks, ranks)[1])
    assert np.array_equal(torus.seen_from(int(ranks[-1])), torus.distance(ranks, ranks[-1]))


def test_every_way_to_number_ranks() -> None:
    """A ring first, then every product of two factors or more, in every order."""
    assert [torus.sizes for torus in tori(8)] == [(8,), (2, 4), (4, 2), (2, 2, 2)]
    assert [torus.sizes for torus in tori(1)] == [(1,)]
    assert [torus.sizes for torus in tori(7)] == [(7,)]


USES = "".join(f'use "collectives/{name}.comm"\n' for name in (
    "reducescatter_ring", "reducescatter_direct", "allreduce_ring", "allgather_ring", "allgather_direct",
    "reduce_tree", "broadcast_tree",
))  # fmt: skip

RINGS = """schedule allreduce_rings(G = 8) for P ranks where P % G == 0 {
  inout x[G, P / G]
  scratch t[P / G]
  ensure allreduce(x)
  group node = ranks in runs of G
  group rail = ranks by stride G

  each r do reducescatter_ring(x -> t) over node
  each r do allreduce_ring(t) over rail
  each r do allgather_ring(t -> x) over node
}
"""

AXES = """schedule allreduce_axes(X = 2, Y = 2) for P ranks where P % (X * Y) == 0 {
  let Z = P / (X * Y)
  inout x[X, Y, Z]
  scratch s[Y, Z]
  scratch t[Z]
  ensure allreduce(x)
  group row = ranks in runs of X
  group column = ranks in runs of X * Y by stride X
  group tower = ranks by stride X * Y

  each r do reducescatter_ring(x -> s) over row
  each r do reducescatter_ring(s -> t) over column
  each r do allreduce_ring(t) over tower
  each r do allgather_ring(t -> s) over column
  each r do allgather_ring(s -> x) over row
}
"""

ONE_RING = """schedule one_ring for P ranks {
  inout x[P]
  ensure allreduce(x)
  do allreduce_ring(x)
}
"""


def planned(text: str, ranks: int, followed: int = 50, **params: int) -> Plan:
    """The Plan where no more than so many operations can be followed, each on its rank."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(problem, "MOST_KNOWN", followed * ranks)
        checked = compiler.check(compiler.read_text(USES + text, "test.comm", Path()), ranks=ranks, params=params)
    assert isinstance(checked, CheckedSchedule)
    return checked.plan


def codes(plan: Plan) -> list[str]:
    return [found.code for found in prove(Round(plan.moves))]


def followed_each(plan: Plan) -> list[str]:
    """What the proof says with a clock for every rank."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ROUNDS, "pattern", lambda _: None)
        return codes(plan)


COMPOSED = [
    (RINGS, 6, {"G": 3}, (2, 3)),
    (RINGS, 8, {"G": 4}, (2, 4)),
    (RINGS, 16, {"G": 4}, (4, 4)),
    (AXES, 8, {}, (2, 2, 2)),
    (AXES, 12, {"X": 3}, (2, 2, 3)),
]


@pytest.mark.parametrize(("text", "ranks", "params", "sizes"), COMPOSED)
def test_one_stands_for_all(text: str, ranks: int, params: dict[str, int], sizes: tuple[int, ...]) -> None:
    """Rings of rings are found to be a torus, whose proof says what it says with a clock for every rank."""
    plan = planned(text, ranks, **params)
    shape = pattern(timeline(plan.moves))

    assert shape is not None
    assert shape.torus.sizes == sizes
    assert codes(plan) == followed_each(plan) == []


@pytest.mark.parametrize(("text", "ranks", "params", "sizes"), COMPOSED[:4])
def test_a_wait_less_on_every_rank(text: str, ranks: int, params: dict[str, int], sizes: tuple[int, ...]) -> None:
    """What is wrong on all ranks alike is a race, whether one stands for all or each is followed."""
    plan = planned(text, ranks, **params)
    shape = pattern(timeline(plan.moves))
    assert shape is not None
    ops = plan.moves.ops

    for waits in shape.wait.T:
        counts = np.diff(ops.wait_begin) - np.bincount(timeline(plan.moves).wait_op[waits], minlength=ops.num_ops)
        columns = {name: np.delete(getattr(ops, name), waits) for name in PER_WAIT}
        less = changed(plan, ops=replace(ops, wait_begin=np.cumsum([0, *counts]).astype(np.int32), **columns))
        found = pattern(timeline(less.moves))
        assert found is not None
        assert found.torus.sizes == sizes
        assert codes(less) == followed_each(less)
        assert set(codes(less)) < {"C202", "C205"}


def test_ranks_that_are_not_alike() -> None:
    """A Plan with one flag changed on one rank is judged as if no two ranks were alike."""
    plan, random, seen = planned(RINGS, 6, G=3), Random(15), Counter[tuple[str, ...]]()
    for kind in ("wait dropped", "wait added", "signal dropped", "wait_peer", "wait_ordinal", "wait_rounds_back"):
        for _ in range(10):
            mutant = MUTATIONS[kind](random, plan)
            assert mutant is not None
            try:
                verify(mutant)
            except InternalError:
                continue
            assert codes(mutant) == followed_each(mutant)
            seen[tuple(codes(mutant))] += 1
    assert set(seen) >= {("C202",), ("C203",), ("C204",)}


def test_a_schedule_that_is_no_torus() -> None:
    """Trees have a root: its ranks are followed each, and refused where they are too many."""
    assert pattern(timeline(planned(TREES, 8, followed=64, G=4).moves)) is None
    with pytest.raises(CommError, match=r"C511.*64 operations on 8 ranks that do not all do the same"):
        planned(TREES, 8, G=4)


@pytest.mark.usefixtures("unswept")
def test_many_ranks() -> None:
    """Rings of rings on 256 ranks, whose clocks would have 40 million entries a round, take as long as one ring."""
    spent = []
    for text, params in ((RINGS, {"G": 8}), (ONE_RING, {})):
        start = time.thread_time()
        planned(text, 256, followed=1000, **params)
        spent.append(time.thread_time() - start)
    assert spent[0] < 3 * spent[1]
