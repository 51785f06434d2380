"""Schedules that call each other: what `do` means is what would stand there written out, and both places are shown."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import numpy as np
import pytest

from commdsl import compiler
from commdsl.compiler import CheckedSchedule
from commdsl.ir import interpret
from commdsl.ir.schedules import Schedule, Step
from commdsl.language.diagnostics import CommError
from commdsl.machine import dtypes
from commdsl.program.lower import problem

USES = """use "collectives/reducescatter_direct.comm"
use "collectives/reducescatter_ring.comm"
use "collectives/allreduce_twoshot.comm"
use "collectives/allreduce_ring.comm"
use "collectives/allgather_direct.comm"
use "collectives/allreduce_two_level.comm"
use "collectives/allreduce_hamilton.comm"
use "collectives/alltoall_direct.comm"
use "collectives/alltoall_rotated.comm"
use "collectives/reduce_tree.comm"
use "collectives/broadcast_tree.comm"
use "collectives/broadcast_chain.comm"
"""

WRITTEN_OUT = """schedule allreduce_two_level(G = gpus) for P ranks where P >= 2 and P % G == 0 {
  let N = P / G
  inout x[G, N]
  ensure allreduce(x)

  if G > 1 {
    each r, i in 0 ..< N {
      reduce x[r % G, i] @ q for q in r / G * G ..< r / G * G + G -> x[r % G, i]
    }
  }
  if N > 1 {
    each r { reduce x[r % G, r / G] @ (k * G + r % G) for k in 0 ..< N -> x[r % G, r / G] }
    each r, i in 1 ..< N { put x[r % G, r / G] -> x[r % G, r / G] @ (r + i * G) % P }
  }
  if G > 1 {
    each r, i in 1 ..< G { put x[r % G] -> x[r % G] @ (r / G * G + (r + i) % G) }
  }
}
"""


def check(text: str, ranks: int, **params: int) -> Schedule:
    checked = compiler.check(compiler.read_text(text, "test.comm", Path()), ranks=ranks, params=params)
    assert isinstance(checked, CheckedSchedule)
    return checked.schedule


def moves(schedule: Schedule) -> list[list[tuple[object, ...]]]:
    """Every number of every statement, step by step."""
    return [
        [
            (
                one.kind, one.accumulate, one.is_list, one.source_buffer, one.dest_buffer,
                *(getattr(one, name).tolist() for name in ARRAYS),
            )
            for one in step.moves
        ]
        for step in schedule.steps
        if isinstance(step, Step)
    ]  # fmt: skip


ARRAYS = ("actor", "source_rank", "source_chunk", "dest_rank", "dest_chunk")


@pytest.mark.parametrize(("ranks", "gpus"), [(4, 2), (6, 3), (8, 1), (8, 8), (12, 4)])
def test_as_if_written_out(ranks: int, gpus: int) -> None:
    """The shipped two-level all-reduce, of three calls, has the moves of the one that calls nothing, row by row."""
    shipped = compiler.check("schedules/collectives/allreduce_two_level.comm", ranks=ranks, params={"G": gpus})
    assert isinstance(shipped, CheckedSchedule)

    assert moves(shipped.schedule) == moves(check(WRITTEN_OUT, ranks, G=gpus))


TORUS = """schedule allreduce_torus(X = 2, Y = 2) for P ranks where P % (X * Y) == 0 {
  let Z = P / (X * Y)
  inout x[X, Y, Z]
  ensure allreduce(x)
  group row = ranks in runs of X
  group column = ranks in runs of X * Y by stride X
  group tower = ranks by stride X * Y

  each r do reducescatter_direct(x -> x[r % X]) over row
  each r do reducescatter_direct(x[r % X] -> x[r % X, r / X % Y]) over column
  each r do allreduce_ring(x[r % X, r / X % Y]) over tower
  each r do allgather_direct(x[r % X, r / X % Y] -> x[r % X]) over column
  each r do allgather_direct(x[r % X] -> x) over row
}
"""

ALLTOALL = """schedule alltoall_levels(G = 2) for P ranks where P % G == 0 {
  let N = P / G
  input x[N blocks, G blocks]
  scratch t[N, G]
  output y[N blocks, G blocks]
  ensure alltoall(x -> y)
  group node = ranks in runs of G
  group rail = ranks by stride G

  do alltoall_direct((x[k, g] for g in 0 ..< G, k in 0 ..< N) -> (t[k, g] for g in 0 ..< G, k in 0 ..< N)) over node
  do alltoall_rotated(t -> y) over rail
}
"""

ALLGATHER = """schedule allgather_levels(G = 2) for P ranks where P % G == 0 {
  let N = P / G
  input x
  output y[N blocks, G blocks]
  ensure allgather(x -> y)
  group node = ranks in runs of G
  group rail = ranks by stride G

  each r do allgather_direct(x -> (y[k, r % G] for k in 0 ..< N)) over rail
  each r do allgather_direct((y[k, r % G] for k in 0 ..< N) -> (y[k, g] for g in 0 ..< G, k in 0 ..< N)) over node
}
"""


BOX = """topology box {
  nodes 2   gpus x = 2, y = 3 per node   sms 100
  link wire in node        50 GB/s per pair   1 us
  link rail across nodes   50 GB/s per pair   4 us
}
"""

PLANE = """schedule plane for P ranks where P == 12 {
  group row = ranks along y
  group column = ranks along x
  input a
  output b[len(row) blocks]
  output c[len(column) blocks]
  ensure each r, i in 0 ..< 3 { b[i] == a @ r / 3 * 3 + i }
  ensure each r, i in 0 ..< 2 { c[i] == a @ r / 6 * 6 + i * 3 + r % 3 }
  do allgather_direct(a -> b) over row
  do allgather_direct(a -> c) over column
}
"""

AROUND = """schedule around for P ranks where P == 12 {
  group row = ranks in runs of 6 by stride 2
  input a
  output b[len(row) blocks]
  output c
  ensure each r { b[POSITION] == a @ PREV }
  ensure each r { c == a @ NEXT }
  each r { get a @ PREV -> b[POSITION] }
  each r { put a -> c @ PREV }
}
"""
ASKED = {"NEXT": "row.next(r)", "PREV": "row.prev(r)", "POSITION": "row.position(r)"}
COUNTED = {"NEXT": "r / 6 * 6 + (r + 2) % 6", "PREV": "r / 6 * 6 + (r - 2) % 6", "POSITION": "r % 6 / 2"}

PODS = """schedule pods for P ranks where P % 8 == 0 {
  inout x[2, 4]
  ensure each r, i in 0 ..< 2, j in 0 ..< 4 { x[i, j] == sum(x[i, j] @ q for q in r / 8 * 8 ..< r / 8 * 8 + 8) }
  group pod = ranks in runs of 8
  do allreduce_two_level(x) over pod with G = 2
}
"""

MESHES = """schedule meshes(S = 2) for P ranks where P % S == 0 {
  inout x[P / S, P / S - 1]
  ensure each r, i in 0 ..< P / S { x[i] == sum(x[i] @ q for q in 0 ..< P if q % S == r % S) }
  group mesh = ranks by stride S
  do allreduce_hamilton(x) over mesh
}
"""


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        *((TORUS, 8), (TORUS, 12), (ALLTOALL, 6), (ALLTOALL, 8), (ALLGATHER, 8), (ALLGATHER, 6)),
        *((PODS, 16), (MESHES, 10)),
    ],
)
def test_composed(text: str, ranks: int) -> None:
    """A torus, two levels on listed chunks, calls within calls, and cycles of the ranks of a group are proved."""
    assert check(USES + text, ranks).num_ranks == ranks


def test_groups_along_the_axes_of_a_machine() -> None:
    """Those that differ in their place on one axis: on a node of two by three, rows of three and columns of two."""
    files = compiler.read_text(USES + BOX + PLANE, "plane.comm", Path())
    assert isinstance(compiler.check(files, ranks=12, on="box"), CheckedSchedule)


def test_who_is_beside_a_rank_in_its_group() -> None:
    """`next` and `prev` go around the rank's group, and `position` counts in it: as formulas have it."""
    asked, counted = AROUND, AROUND
    for word in ASKED:
        asked, counted = asked.replace(word, ASKED[word]), counted.replace(word, COUNTED[word])

    assert moves(check(asked, 12)) == moves(check(counted, 12))


def test_rounding_of_what_is_called() -> None:
    """Only what crosses nodes travels as float8, and the whole says how often that rounds."""
    text = """use "compressed/allreduce_float8.comm"

schedule allreduce_levels_float8(G = 4) for P ranks where P % G == 0 and P > G {
  inout x[G, P / G]
  ensure allreduce(x) rounded(float8, TIMES)
  group node = ranks in runs of G
  group rail = ranks by stride G

  each r do reducescatter_direct(x -> x[r % G]) over node
  each r do allreduce_float8(x[r % G]) over rail
  each r do allgather_direct(x[r % G] -> x) over node
}
"""
    assert check(USES + text.replace("TIMES", "2"), 8).num_steps == 4
    with pytest.raises(CommError, match="rounded twice"):
        check(USES + text.replace("TIMES", "1"), 8)


def test_scratch_of_what_is_called() -> None:
    """A schedule's own scratch is made for each call, and is as long as the chunks given for one of its own."""
    text = """schedule twice for P ranks where P == 4 {
  inout x[2]
  ensure each r { x == sum(x @ q for q in r / 2 * 2 ..< r / 2 * 2 + 2) }
  group two = ranks in runs of 2
  do through(x) over two
}

schedule through for P ranks where P == 2 {
  inout x
  scratch t
  ensure allreduce(x)
  each r { put x -> t @ 1 - r }
  each r { reduce t -> x }
}
"""
    schedule = check_named(text, "twice", 4)
    given = [np.arange(64, dtype=np.int32) * (rank + 1) for rank in range(4)]
    outputs = interpret.run(schedule, {"x": given}, dtypes.INT32, "sum").outputs

    assert [(one.name, one.dims) for one in schedule.buffers] == [("x", (2,)), ("through_t", (2,))]
    for rank, array in enumerate(outputs["x"]):
        assert np.array_equal(array, np.arange(64) * (3 if rank < 2 else 7))


def check_named(text: str, name: str, ranks: int) -> Schedule:
    checked = compiler.check(compiler.read_text(text, "test.comm", Path()), name, ranks)
    assert isinstance(checked, CheckedSchedule)
    return checked.schedule


def test_calls_in_loops() -> None:
    """What a call is given may change from turn to turn, and messages say in which."""
    text = """schedule piecewise for P ranks where P >= 2 {
  inout x[3]
  ensure broadcast(x, 0)
  for s in 0 ..< LAST {
    do broadcast_tree(x[s]) with root = s % 1
  }
}
"""
    steps = check(USES + text.replace("LAST", "3"), 4).steps
    assert [step.bindings for step in steps] == [(("s", s), ("wave", wave)) for s in range(3) for wave in (0, 1)]
    with pytest.raises(CommError, match=r"`x\[3\]` does not exist"):
        check(USES + text.replace("LAST", "4"), 4)


def test_both_places() -> None:
    """What breaks a law only where it is called shows the statement, in its file, and the call."""
    text = """schedule overwritten for P ranks where P == 4 {
  input x
  output y
  ensure each r { y == sum(x @ q for q in r / 2 * 2 ..< r / 2 * 2 + 2) }
  group two = ranks in runs of 2
  do reduce_tree(x) over two
  each r { copy x -> y }
}
"""
    with pytest.raises(CommError) as caught:
        check(USES + text, 4)
    (found,) = caught.value.diagnostics
    assert found.primary.span.source.name.endswith("reduce_tree.comm")
    assert [label.span.text for label in found.secondary] == ["input x", "do reduce_tree(x) over two"]


@pytest.mark.parametrize(
    ("given", "help"), [("x[r % G]", "`each r do level(...)`"), ("x[gpu]", "did you mean `gpus`?")]
)
def test_a_rank_without_a_name(given: str, help: str) -> None:
    """A name in what is given that is none, and resembles none, may be meant to be the acting rank."""
    text = (Path(__file__).parent / "faults" / "C101_unknown_rank_of_a_call.comm").read_text(encoding="utf-8")
    with pytest.raises(CommError) as caught:
        check_named(text.replace("x[r % G]", given), "levels", 4)
    assert help in caught.value.diagnostics[0].help


def test_what_is_called_keeps_its_own_promise() -> None:
    """A schedule that does not do what it says is refused where it is called, even if that would be enough here."""
    text = """schedule enough for P ranks where P >= 2 {
  inout x
  ensure reduce(x, 0)
  do less(x)
}

schedule less for P ranks where P >= 2 {
  inout x
  ensure allreduce(x)
  each r where r == 0 { reduce x @ all -> x }
}
"""
    with pytest.raises(CommError) as caught:
        check_named(text, "enough", 4)
    (found,) = caught.value.diagnostics
    assert (found.code, [label.span.text for label in found.secondary]) == ("C306", ["do less(x)"])


TREES = """schedule allreduce_trees(G = 8) for P ranks where P % G == 0 {
  inout x[G]
  ensure allreduce(x)
  group node = ranks in runs of G
  group rail = ranks by stride G

  each r do reducescatter_direct(x -> x[r % G]) over node
  each r do reduce_tree(x[r % G]) over rail
  each r do broadcast_tree(x[r % G]) over rail
  each r do allgather_direct(x[r % G] -> x) over node
}
"""


@pytest.mark.usefixtures("unswept")
def test_a_thousand_ranks() -> None:
    """A composed two-level all-reduce of 1,024 ranks is proved in 10 seconds and 2 GB."""
    start, before = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert check(USES + TREES, 1024).num_steps == 2 + 2 * 7
    assert time.thread_time() - start < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2e6


@pytest.mark.usefixtures("unswept")
def test_what_ranks_know_of_each_other_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks do not do the same up to rotation, as in two levels, each is followed, and what they know of each
    other has an end; a ring of as many ranks has none of it.
    """
    folder = Path(__file__).parent.parent / "schedules" / "collectives"
    monkeypatch.setattr(problem, "MOST_KNOWN", 4_000)
    with pytest.raises(CommError, match=r"C511.*operations on 16 ranks that do not all do the same, up to rotation"):
        compiler.check(folder / "allreduce_two_level.comm", ranks=16, params={"G": 4})
    assert compiler.check(folder / "allreduce_ring.comm", ranks=16)
