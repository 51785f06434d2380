"""Tasks and yields with a body: what they write is theirs alone, in order with what moves, and the oracle runs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from commdsl import compiler
from commdsl.checks import check_schedule
from commdsl.checks.built import unbuilt_schedule
from commdsl.commands.dumps import ir_text
from commdsl.cost.draw import draw
from commdsl.cost.report import report
from commdsl.cost.timeline import timeline
from commdsl.ir import resolve
from commdsl.ir.interpret import Body, run
from commdsl.ir.schedules import Schedule, Step, Task, Yield
from commdsl.ir.words import step_words
from commdsl.language.diagnostics import CommError, Diagnostic
from commdsl.language.format import format_file
from commdsl.language.parser import parse
from commdsl.language.source import Source
from commdsl.machine.dtypes import BY_NAME, Array
from commdsl.machine.resources import data_dir
from commdsl.machine.topology import switch

ADD = (data_dir("schedules") / "overlap" / "add_reduce_scatter.comm").read_text(encoding="utf-8")
ATTEND = """schedule attend_ring for P ranks {
  inout kv[2]
  inout acc[2]
  ensure rotation(kv)

  yield attend(kv, acc -> acc)
  for s in 1 ..< P {
    each r { put kv -> kv @ (r + 1) % P }
    yield attend(kv, acc -> acc)
  }
}
"""


def meant(text: str, ranks: int = 4) -> Schedule:
    files = (parse(Source("tasks.comm", text)),)
    return resolve.resolve(files, compiler.choose(files, None), ranks, switch(ranks), {})


def faults(text: str, ranks: int = 4) -> tuple[Diagnostic, ...]:
    return check_schedule(meant(text, ranks))


def codes(text: str, ranks: int = 4) -> list[str]:
    return [diagnostic.code for diagnostic in faults(text, ranks)]


# --- what is meant ----------------------------------------------------------------------------------------------------


def test_task() -> None:
    """A task has buffers, tiles and a role, and stands among the steps; its schedule runs on another role."""
    schedule = meant(ADD)
    task, step = schedule.steps

    assert isinstance(step, Step)
    assert task == Task("add", (0, 1), (2,), (), "compute", (), task.span)
    assert schedule.role == "comm"
    assert (schedule.num_steps, schedule.num_yields) == (1, 0)
    assert step_words(schedule, task) == "compute add(a, b -> c)"


def test_yield_with_a_body() -> None:
    """A yield has a name, what it reads and what it writes, once for each turn of its loop; nothing is handed over."""
    schedule = meant(ATTEND, 3)
    visits = [step for step in schedule.steps if isinstance(step, Yield)]

    assert [(step.reads, step.writes, step.name, step.bindings) for step in visits] == [
        ((0, 1), (1,), "attend", ()),
        ((0, 1), (1,), "attend", (("s", 1),)),
        ((0, 1), (1,), "attend", (("s", 2),)),
    ]
    assert (schedule.num_steps, schedule.num_yields) == (2, 0)
    assert step_words(schedule, visits[0]) == "yield attend(kv, acc -> acc)"


@pytest.mark.parametrize(
    "line",
    [
        "compute add(a, b -> c)",
        "compute add(a, b -> c) on compute",
        "compute attend(a, b -> c, d) tiles 128 x 256 on compute",
        "yield attend(kv, acc -> acc, kv)",
    ],
)
def test_layout(line: str) -> None:
    """Both are statements of one line, also one after another; the word `compute` names a role all the same."""
    roles = "roles both { comm sms 0 ..< 4   compute sms 4 ..< 8 }\n\n"
    text = f"{roles}schedule s for P ranks {{\n  let half = P / 2\n  {line}\n  {line}\n  yield kv\n  on compute\n}}\n"

    assert format_file(parse(Source("layout.comm", text))) == text


def test_shown() -> None:
    """Dumps, timelines, costs and pictures name what computes."""
    for text, words in ((ADD, "add(a, b -> c)"), (ATTEND, "attend(kv, acc -> acc)")):
        schedule = meant(text)
        assert words in ir_text(schedule)
        assert words in timeline(schedule)
        assert words.replace(">", "&gt;") in draw(schedule, report(schedule))
    assert "compute add(a, b -> c) on compute" in ir_text(meant(ADD))


def test_not_built_yet() -> None:
    """A yield with a body is built, and so is a task; both in one schedule are refused."""
    files = (parse(Source("tasks.comm", ATTEND)),)
    compiler.check(files, ranks=4)
    both = ADD.replace("  each r { reduce", "  yield look(c -> c)\n  each r { reduce")
    both = both.replace("each r { y == sum(add(a[r], b[r]) @ all) }", "reduce_scatter(c -> y)")
    assert [diagnostic.code for diagnostic in unbuilt_schedule(meant(both))] == ["C590"]
    with pytest.raises(CommError, match="C590"):
        compiler.check((parse(Source("tasks.comm", both)),), ranks=4)


# --- what holds -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 16])
def test_right(ranks: int) -> None:
    """The sum of what tasks wrote is proved for any number of ranks, and so is a rotation seen by a body."""
    assert codes(ADD, ranks) == []
    assert codes(ATTEND, ranks) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("reduce c[r] @ all -> y", "reduce a[r] @ all -> y", ["C330"]),  # not what was computed
        ("reduce c[r] @ all -> y", "copy c[r] -> y", ["C330"]),
        ("each r { y == sum(add(a[r], b[r]) @ all) }", "reduce_scatter(a -> y)", ["C330"]),
        ("each r { y == sum(add(a[r], b[r]) @ all) }", "reduce_scatter(c -> y)", ["C105"]),
        ("reduce c[r] @ all -> y }", "reduce c[r] @ all -> y }\n  compute add(a, b -> c) on compute", ["C310"]),
        ("compute add(a, b -> c)", "compute add(c, b -> c)", ["C304"]),
        ("compute add(a, b -> c)", "compute add(a, b -> a)", ["C303", "C304"]),
        ("compute add(a, b -> c) on compute\n", "", ["C304"]),
    ],
)
def test_wrong(old: str, new: str, expected: list[str]) -> None:
    """What arrives is what the last task wrote: old data, other data and missing data are refused."""
    assert old in ADD
    text = ADD.replace(old, new)
    try:
        found = codes(text)
    except CommError as error:
        found = [diagnostic.code for diagnostic in error.diagnostics]

    assert found[:1] == expected[:1]
    assert set(found) <= set(expected)


def test_each_turn_makes_its_own() -> None:
    """A task that writes the same terms again is in vain, whichever turn of it is read."""
    loop = "for s in 0 ..< 2 {{ compute add(a, b -> c) on compute {} }}\n"
    before = "compute add(a, b -> c) on compute\n"
    each = "each r { reduce c[r] @ all -> y }"
    first_only = ADD.replace(before, loop.format(f"if s == 0 {{ {each} }}")).replace(f"  {each}", "  ")
    last_only = ADD.replace(before, loop.format(f"if s == 1 {{ {each} }}")).replace(f"  {each}", "  ")

    assert codes(first_only) == ["C310"]  # and so does the last one
    assert codes(last_only) == ["C310"]  # the first turn computes what nobody reads


def test_what_a_body_wrote_is_sent_on() -> None:
    """After a yield its buffers hold what the caller wrote: a contract about what was there before is broken."""
    text = """schedule forward for P ranks {
  inout x
  output y
  ensure permutation(x -> y) r -> (r + 1) % P
  yield change(x -> x)
  each r { put x -> y @ (r + 1) % P }
}
"""
    right = (
        text.replace("inout x\n", "input x\n  scratch t\n")
        .replace("(x -> x)", "(x -> t)")
        .replace("{ put x", "{ put t")
    )
    (fault,) = faults(text)

    assert fault.code == "C308"
    assert "`x` by `change`" in fault.primary.text
    assert codes(right) == ["C308"]
    assert codes(right.replace("(x -> y) r", "(t -> y) r")) == []


def test_a_rotation_through_a_body() -> None:
    """A visit too few, or one of what the body wrote, is no rotation."""
    assert codes(ATTEND.replace("1 ..< P", "1 ..< P - 1")) == ["C309"]
    assert codes(ATTEND.replace("acc -> acc)", "acc -> kv)")) == ["C309"]


def test_large() -> None:
    """Of many ranks, too, terms are told apart: one of 150 that is left out is named."""
    assert codes(ADD, 150) == []
    wrong = ADD.replace("reduce c[r] @ all -> y", "reduce c[r] @ q for q in 0 ..< P if q != 17 or r != 3 -> y")
    (fault,) = faults(wrong, 150)

    assert fault.code == "C330"
    assert "lacks `add(a[3], b[3]) @ 17`" in fault.primary.text


# --- the oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_oracle_of_a_task(dtype: str) -> None:
    """The sum is made in float32 and rounded once, then reduced as any other tensor."""
    kind, rng = BY_NAME[dtype], np.random.default_rng(2)
    drawn = [[rng.integers(-500, 500, 4 * 5).astype(np.float32) for _ in range(4)] for _ in "ab"]
    a, b = ([_stored(one, dtype) for one in ranks] for ranks in drawn)
    result = run(meant(ADD), {"a": a, "b": b}, kind, "sum").outputs["y"]

    for rank in range(4):
        sums = [_stored(_plain(x, dtype) + _plain(y, dtype), dtype) for x, y in zip(a, b, strict=True)]
        block = slice(5 * rank, 5 * rank + 5)
        wanted = _plain(sums[0][block], dtype)
        for one in sums[1:]:
            wanted = wanted + _plain(one[block], dtype)
        assert np.array_equal(result[rank], _stored(wanted, dtype))


def test_oracle_of_a_body() -> None:
    """The caller's function sees every rank's block once on every rank, and keeps what it wrote from visit to visit."""
    kv = [np.full(7, 10.0**rank, np.float32) for rank in range(4)]
    acc = [np.zeros(7, np.float32) for _ in range(4)]
    seen: list[tuple[int, float]] = []

    def attend(rank: int, given: Sequence[Array]) -> Sequence[Array]:
        seen.append((rank, float(given[0][0])))
        return [given[0] + given[1]]

    bodies: dict[str, Body] = {"attend": attend}
    result = run(meant(ATTEND), {"kv": kv, "acc": acc}, BY_NAME["float32"], "sum", bodies)

    assert result.yields == []
    assert all(np.array_equal(one, np.full(7, 1111.0, np.float32)) for one in result.outputs["acc"])
    assert sorted(seen) == [(rank, 10.0**other) for rank in range(4) for other in range(4)]


def _stored(values: Array, dtype: str) -> Array:
    kind = BY_NAME[dtype]
    return kind.from_float32(values.astype(np.float32)) if kind.is_float else values.astype(kind.storage)


def _plain(values: Array, dtype: str) -> Array:
    kind = BY_NAME[dtype]
    return kind.to_float32(values) if kind.is_float else values
