"""Schedules that multiply, called by others: what `do` means is what would stand there written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_task_programs import OVERLAP, mlp, numbers  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402

import commdsl  # noqa: E402
from commdsl import compiler  # noqa: E402
from commdsl.compiler import CheckedSchedule  # noqa: E402
from commdsl.ir.products import added  # noqa: E402
from commdsl.language.diagnostics import CommError  # noqa: E402

CALLED = Path(__file__).parent / "called_products.comm"
SHAPES = {"x": (24, 16), "up": (48, 16), "down": (16, 24)}
USES = """use "overlap/allgather_matmul.comm"
use "overlap/matmul_reducescatter.comm"
use "overlap/matmul_allreduce.comm"
"""
TUNE = "tune { protocol engine   landing place }"

Given = list[dict[str, Any]]


def check(text: str, name: str | None = None, ranks: int = 4, **params: int) -> CheckedSchedule:
    checked = compiler.check(compiler.read_text(USES + text, "test.comm", Path()), name, ranks, params=params)
    assert isinstance(checked, CheckedSchedule)
    return checked


def called(path: Path, given: Given, name: str | None = None, **params: int) -> list[Any]:
    """The result of every rank, on host ranks."""
    op = commdsl.load(path, name, ranks=len(given), params=params)
    return in_group(len(given), lambda rank, group: op(*given[rank].values(), group=group))


def near(found: Any, due: Any) -> None:
    torch.testing.assert_close(found, due, rtol=1e-12, atol=1e-12 * float(due.abs().max()))


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_an_mlp_of_two_calls(ranks: int, pieces: int) -> None:
    """It is proved, and its numbers are those of float64, and of the shipped schedule that calls nothing."""
    given = [numbers(SHAPES, rank) for rank in range(ranks)]
    found = called(CALLED, given, C=pieces)
    written_out = called(OVERLAP / "mlp.comm", given, C=pieces)
    for rank, (made, other) in enumerate(zip(found, written_out, strict=True)):
        near(made, mlp(given, rank))
        near(made, other)


def test_the_products_are_those_written_out() -> None:
    """By what they multiply, with which activation, and what they leave, by the names of buffers."""
    checked = compiler.check(CALLED, ranks=4)
    assert isinstance(checked, CheckedSchedule)
    schedule = checked.schedule
    names = [buffer.name for buffer in schedule.buffers]
    found = {(names[of], names[factor], names[to], ends.activation) for of, factor, to, ends in schedule.multiplied}
    assert found == {
        ("x", "up", "h", "swiglu"),
        ("allgather_matmul_a", "up", "h", "swiglu"),
        ("h", "down", "matmul_reducescatter_c", None),
        ("h", "down", "y", None),
    }


BIASED = """schedule biased for P ranks where P >= 2 {
  input x   input up   input b   input down   input t
  scratch h[P blocks]
  output y
  ensure each r {
    y == sum(matmul((matmul(x @ r, up @ q) with bias b @ q, gelu), down @ q) for q in 0 ..< P) with residual t
  }
  do allgather_matmul(x, up, b -> h) with B = 1, A = 1
  do matmul_reducescatter(h, down, t -> y) with R = 1
  tune { protocol engine   landing place }
}
"""


@pytest.mark.parametrize("ranks", [2, 3])
def test_buffers_under_conditions(ranks: int, tmp_path: Path) -> None:
    """A bias and a residual are given where the parameters make them exist."""
    path = tmp_path / "biased.comm"
    path.write_text(USES + BIASED, "utf-8")
    shapes = {"x": (8, 16), "up": (24, 16), "b": (24,), "down": (16, 24), "t": (8, 16)}
    given = [numbers(shapes, rank) for rank in range(ranks)]
    for rank, made in enumerate(called(path, given)):
        due = given[rank]["t"]
        for one in given:
            inner = given[rank]["x"] @ one["up"].t() + one["b"]
            due = due + inner * torch.special.ndtr(inner) @ one["down"].t()
        near(made, due)


GROUPS = """schedule node_rows(G = 2) for P ranks where P % G == 0 and G >= 2 {
  input x   input w
  output c[G blocks]
  ensure each r, i in 0 ..< G { c[i] == matmul(x @ r / G * G + i, w) }
  group node = ranks in runs of G
  do allgather_matmul(x, w -> c) over node
  tune { protocol engine   landing place }
}
"""


def test_within_groups(tmp_path: Path) -> None:
    """Each group multiplies its own rows, all groups at once."""
    path = tmp_path / "groups.comm"
    path.write_text(USES + GROUPS, "utf-8")
    given = [numbers({"x": (24, 16), "w": (8, 16)}, rank) for rank in range(4)]
    for rank, made in enumerate(called(path, given)):
        first = rank // 2 * 2
        rows = torch.cat([given[first]["x"], given[first + 1]["x"]])
        near(made, rows @ given[rank]["w"].t())


NESTED = """schedule block for P ranks where P >= 2 {
  input x   input up   input down
  scratch h[P blocks]
  output y
  ensure each r { y == sum(matmul((matmul(x @ r, up @ q) with swiglu), down @ q) for q in 0 ..< P) }
  do allgather_matmul(x, up -> h) with A = 2
  do matmul_reducescatter(h, down -> y)
}

schedule behind for P ranks where P >= 2 {
  input x   input up   input down   input w
  scratch y
  output z
  ensure each r {
    z == matmul(sum(matmul((matmul(x @ r, up @ q) with swiglu), down @ q) for q in 0 ..< P), w)
  }
  do block(x, up, down -> y)
  each r { compute matmul(y, w -> z) }
  tune { protocol engine   landing place }
}
"""


def test_calls_within_calls(tmp_path: Path) -> None:
    """A schedule that calls what multiplies is called, and its result is multiplied again."""
    path = tmp_path / "nested.comm"
    path.write_text(USES + NESTED, "utf-8")
    given = [numbers({**SHAPES, "w": (8, 16)}, rank) for rank in range(3)]
    for rank, made in enumerate(called(path, given, "behind")):
        near(made, mlp(given, rank) @ given[rank]["w"].t())


ROWS = """schedule two for P ranks where P >= 2 {
  input x   input up   input gate
  output u[P blocks]   output g[P blocks]
  ensure each r, q { u[q] == matmul(x @ q, up)   g[q] == matmul(x @ q, gate) with gelu }
  do allgather_matmul(x, up -> u)
  do allgather_matmul(x, gate -> g) with A = 1
  TUNE
}
"""


def test_what_is_called_does_not_tune() -> None:
    """The launch is as the schedule that calls says, or as if nothing were tuned anywhere."""
    tuned, plain = (check(ROWS.replace("TUNE", one), "two").schedule for one in (TUNE, ""))
    assert (tuned.tuning.carrier.name, tuned.tuning.landing) == ("engine", "place")
    assert plain.tuning == check(GROUPS.replace(TUNE, ""), "node_rows").schedule.tuning
    assert (plain.tuning.carrier.runs_on_sms, plain.tuning.landing) == (True, None)
    assert all(one.schedule.tuning == plain.tuning for one in tuned.called)


def test_two_calls_of_one_schedule() -> None:
    """Each has a scratch buffer of its own, and the parameters of its own."""
    schedule = check(ROWS.replace("TUNE", TUNE), "two").schedule
    scratch = [one.name for one in schedule.buffers if one.name.startswith("allgather")]
    assert scratch == ["allgather_matmul_a", "allgather_matmul_a1"]
    assert {ends.activation for *_, ends in schedule.multiplied} == {None, "gelu"}


SOME = """schedule halves for P ranks where P == 2 {
  input x   input w
  output y
  ensure each r { y == matmul(x, w) }
  each r where r == 0 { compute matmul(x, w -> y) }
  each r where r == 1 { compute matmul(x, w -> y) }
}

schedule whole for P ranks where P == 2 {
  input x   input w
  output y
  ensure each r { y == matmul(x, w) }
  do halves(x, w -> y)
  tune { protocol engine }
}
"""


def test_both_places() -> None:
    """A product that no kernel runs is shown where it stands, and where that is called."""
    with pytest.raises(CommError) as caught:
        check(SOME, "whole", 2)
    found = caught.value.diagnostics[0]
    assert (found.code, found.primary.span.text) == ("C592", "compute matmul(x, w -> y)")
    assert [label.span.text for label in found.secondary] == ["do halves(x, w -> y)"]


ADDS = """schedule adds(K = 0) for P ranks where P >= 2 {
  input x   input w   input t   input u
  output y   output z
  ensure each r { y == sum(matmul(x, w), t)   z == matmul(x, u) }
  if K == 1 { each r { compute matmul(x, w -> y) } }
  each r { compute matmul(x, u -> z) }
  if K == 0 { each r { compute matmul(x, w -> y) } }
  each r { reduce t -> y }
}

schedule twice for P ranks where P >= 2 {
  input x   input w   input t   input u
  output y   output z   output v   output s
  ensure each r { y == sum(matmul(x, w), t)   v == sum(matmul(x, w), t)   z == matmul(x, u)   s == matmul(x, u) }
  do adds(x, w, t, u -> y, z)
  do adds(x, w, t, u -> v, s) with K = LAST
}
"""


def test_sums_within_some_products_alone() -> None:
    """A sum is added within a product only where that holds each time its text is called."""
    within, once = (check(ADDS.replace("LAST", last), "twice").schedule for last in "01")
    assert [span.text for span in added(within)] == ["reduce t -> y"]
    assert not added(once)
