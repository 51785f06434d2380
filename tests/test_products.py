"""Products in a schedule: what they mean, the Plan that stops at each, and calls on host ranks, beside float64."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product as pairs
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from task_orders import hangs, wrong_orders
from test_visits import behind, codes, mutants, with_phases

from commdsl import compiler
from commdsl.commands.cli import run_command
from commdsl.commands.trial import Settings, trial
from commdsl.ir import interpret
from commdsl.ir.products import MATMUL, stopping
from commdsl.ir.schedules import Schedule
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir
from commdsl.program.launches import Launch, Return
from commdsl.program.plan import Plan
from commdsl.program.pushed import destinations, is_kept, pushing
from commdsl.program.tasks import Over, Stored, Task, Tasks
from commdsl.program.visited import landing, launches, tasks

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402

import commdsl  # noqa: E402
from commdsl.build.task_table import TaskRow, WordWait  # noqa: E402
from commdsl.runtime import fused  # noqa: E402
from commdsl.runtime.host import HostCommunicator  # noqa: E402
from commdsl.runtime.products import ByLibrary, Cut  # noqa: E402
from commdsl.runtime.streams import OneStream  # noqa: E402
from commdsl.runtime.tensors import is_deep  # noqa: E402

FOLDER = data_dir("schedules") / "overlap"
GATHER, SCATTER, REDUCE = "allgather_matmul", "matmul_reducescatter", "matmul_allreduce"
WITH_ROWS, EXCHANGE, RETURN = "allgather_matmul_rows", "matmul_alltoall", "alltoall_matmul"
CASES = [(GATHER, 2, 1), (GATHER, 3, 2), (GATHER, 5, 1), (SCATTER, 2, 2), (SCATTER, 4, 1), (SCATTER, 3, 3)]
CASES += [(REDUCE, 3, 2), (REDUCE, 2, 4), (WITH_ROWS, 3, 2), (EXCHANGE, 2, 3), (EXCHANGE, 4, 1)]
CASES += [(RETURN, 2, 3), (RETURN, 4, 1)]
"""Schedules, each with ranks and pieces."""


def checked(name: str, ranks: int, pieces: int = 1) -> tuple[Schedule, Plan]:
    found = compiler.check(FOLDER / f"{name}.comm", ranks=ranks, params={"C": pieces})
    assert found.visits is not None
    return found.schedule, found.visits


def whole(shape: tuple[int, ...], seed: int) -> Any:
    """Small whole numbers, whose sums of products every type has."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(np.float32)


def given(name: str, ranks: int, rows: int, depth: int, columns: int) -> tuple[list[Any], list[Any]]:
    """Rows and weights of every rank; `rows` of a rank's own, `columns` of its results."""
    rows_of = rows * ranks if name in (SCATTER, REDUCE, RETURN) else rows
    columns_of = columns * ranks if name in (EXCHANGE, RETURN) else columns
    x = [whole((rows_of, depth), rank) for rank in range(ranks)]
    return x, [whole((columns_of, depth), 100 + rank) for rank in range(ranks)]


def wanted(name: str, x: list[Any], w: list[Any]) -> list[Any]:
    """What every rank has in the end."""
    if name in (GATHER, WITH_ROWS):
        return [np.concatenate(x).astype(np.float64) @ one.T.astype(np.float64) for one in w]
    if name == RETURN:
        blocks = [np.hstack(one).astype(np.float64) for one in zip(*(np.split(one, len(x)) for one in x), strict=True)]
        return [rows @ np.hstack(np.split(one, len(x))).T for rows, one in zip(blocks, w, strict=True)]
    made = [one.astype(np.float64) @ other.T.astype(np.float64) for one, other in zip(x, w, strict=True)]
    if name == EXCHANGE:
        return [np.concatenate(columns) for columns in zip(*(np.split(one, len(x), 1) for one in made), strict=True)]
    total = sum(made)
    return [total] * len(x) if name == REDUCE else list(np.split(total, len(x)))


@pytest.mark.parametrize(("name", "ranks", "pieces"), CASES)
def test_meaning(name: str, ranks: int, pieces: int) -> None:
    """The oracle gathers rows and multiplies them, or multiplies them and sums them up, or deals their columns out."""
    schedule, _ = checked(name, ranks, pieces)
    x, w = given(name, ranks, 2 * pieces, 4, 3)
    found = interpret.run(schedule, {"x": x, "w": w}, BY_NAME["float32"], "sum")
    made = found.outputs["c" if name in (GATHER, WITH_ROWS) else "y"]
    for one, other in zip(made, wanted(name, x, w), strict=True):
        assert (one == other.ravel()).all()


@pytest.mark.parametrize(("name", "ranks", "pieces"), CASES)
def test_parts(name: str, ranks: int, pieces: int) -> None:
    """The schedule that stops at each product, on single chunks, leaves in every part what the chunk has."""
    schedule, _ = checked(name, ranks, pieces)
    stopped = stopping(schedule)
    x, w = given(name, ranks, 2 * pieces, 4, 3)
    before = interpret.run(schedule, {"x": x, "w": w}, BY_NAME["float32"], "sum").outputs
    blocks = {buffer.name: buffer.blocks for buffer in schedule.buffers}
    inputs = {"w": w} if blocks["w"] == 1 else {}
    for part in stopped.parts:
        for of, whole_inputs in (("x", x), ("w", w)):
            if part.of == of:
                cut = (np.split(one, blocks[of])[at] for one, at in zip(whole_inputs, part.chunks, strict=True))
                inputs[part.name] = list(cut)

    def matmul(rank: int, handed: Any) -> Any:
        rows, factor, *sums = handed
        made = (rows.reshape(-1, 4) @ factor.reshape(3, 4).T).ravel() + sum(sums)
        return [made, rows] if name == WITH_ROWS else [made]

    after = interpret.run(stopped.schedule, inputs, BY_NAME["float32"], "sum", {MATMUL: matmul}).outputs
    cut = {part.of for part in stopped.parts}
    assert len(after) == sum(blocks[name] if name in cut else 1 for name in before)
    assert all(np.array_equal(after[name], before[name]) for name in before if name not in cut)
    for part in stopped.parts:
        for rank, made in enumerate(after.get(part.name, ())):
            assert (made == np.split(before[part.of][rank], blocks[part.of])[part.chunks[rank]]).all()


@pytest.mark.parametrize("name", [GATHER, SCATTER, REDUCE, WITH_ROWS, EXCHANGE, RETURN])
def test_every_wait_is_needed(name: str) -> None:
    """Without a wait between what travels and a product the Plan is refused, but for one that leaves products all SMs:
    behind them a rank copies within its GPU.
    """
    schedule, plan = checked(name, 3, 2)
    stopped, dropped = stopping(schedule).schedule, 0
    for phase in (one for one in plan.phases if isinstance(one, Launch | Return) and one.after):
        mutant = with_phases(plan, lambda one, old=phase: behind(one, 0) if one is old else one)
        is_needed = not (isinstance(phase, Launch) and phase.moves.is_within)
        assert codes(stopped, mutant) == ["C640"] * is_needed
        dropped += is_needed
    for task in tasks(plan):
        for words, mutant in without_waits(task):
            assert codes(stopped, with_task(plan, task, mutant)) == ["C640"], words
            dropped += 1
    assert dropped >= 4


def with_task(plan: Plan, old: Task, new: Task) -> Plan:
    """The Plan with another task in place of one."""

    def changed(phase: Any) -> Any:
        if not isinstance(phase, Tasks):
            return phase
        return replace(phase, rows=tuple(new if task is old else task for task in phase.rows))

    return with_phases(plan, changed)


def without_waits(task: Task) -> Iterator[tuple[str, Task]]:
    """Each wait of a task gone."""
    for at, product in enumerate(task.products):
        for wait in product.waits:
            left = replace(product, waits=tuple(one for one in product.waits if one != wait))
            products = (*task.products[:at], left, *task.products[at + 1 :])
            yield f"{wait} of product {at} of {task.turn}", replace(task, products=products)
    for wait in task.waits:
        yield f"{wait} of {task.turn}", replace(task, waits=tuple(one for one in task.waits if one != wait))


def task_mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Each wait of a task gone, of another launch or task, or one more; each operand and result another copy; the rows
    in another order; pushed for another launch, or for none.
    """
    every, ahead = tasks(plan), launches(plan)
    counters = [*map(Over, range(len(ahead))), *map(Stored, range(len(every)))]
    for task in every:
        yield from ((words, with_task(plan, task, mutant)) for words, mutant in without_waits(task))
        for counter in counters:
            yield f"{task.turn} also {counter}", with_task(plan, task, replace(task, waits=(*task.waits, counter)))
            for at, product in enumerate(task.products):
                more = replace(product, waits=(*product.waits, counter))
                others = [more if number == at else one for number, one in enumerate(task.products)]
                yield f"{task.turn}, {at} also {counter}", with_task(plan, task, replace(task, products=tuple(others)))
        for push in {None, *range(len(ahead))} - {task.push}:
            yield f"{task.turn} pushes {push}", with_task(plan, task, replace(task, push=push))
        for at, product in enumerate(task.products):
            for column in ("reads", "writes"):
                for place, kept in enumerate(getattr(product, column)):
                    for copy in {0, 1, 2} - {kept.copy}:
                        kepts = list(getattr(product, column))
                        kepts[place] = replace(kept, copy=copy)
                        other = replace(product, **{column: tuple(kepts)})
                        others = [other if number == at else one for number, one in enumerate(task.products)]
                        yield (
                            f"{task.turn} {column} {kept}",
                            with_task(plan, task, replace(task, products=tuple(others))),
                        )


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("name", "ranks"), [(GATHER, 2), (GATHER, 3), (SCATTER, 2), (SCATTER, 3), (REDUCE, 2), (EXCHANGE, 2), (RETURN, 2)]
)
def test_mutants(name: str, ranks: int) -> None:
    """Every change of a wait, a copy, a phase or the order is refused, or the Plan is as right as it was."""
    schedule, plan = checked(name, ranks, 2)
    stopped = stopping(schedule).schedule
    for one in dict.fromkeys((plan, pushing(plan))):
        for words, mutant in (*mutants(one), *task_mutants(one)):
            found = codes(stopped, mutant)
            assert found or not (hangs(mutant) or [*wrong_orders(mutant)]), words


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*pairs((GATHER, SCATTER, REDUCE, EXCHANGE, RETURN), ("bfloat16", "float64")), (GATHER, "float8_e4m3fn")],
)
def test_run(name: str, dtype: str) -> None:
    """`commdsl run`: every launch on host ranks brings each product what the oracle has there, bit for bit."""
    compiled = compiler.compile(FOLDER / f"{name}.comm", ranks=3, params={"C": 2})
    assert isinstance(compiled, compiler.CompiledSchedule)
    found = trial(compiled, Settings(5000, dtype, None, False, False))
    assert (found.fault, bool(found.compiler)) == ("", True)
    assert found.compared_bytes > 10_000


def test_run_of_few_bytes() -> None:
    """A matrix has a row and a column at least."""
    compiled = compiler.compile(FOLDER / f"{EXCHANGE}.comm", ranks=3)
    assert isinstance(compiled, compiler.CompiledSchedule)
    assert trial(compiled, Settings(8, "float32", None, False, False)).fault == ""


@pytest.mark.parametrize("name", [SCATTER, EXCHANGE, RETURN])
def test_no_race(name: str) -> None:
    """Nor does ThreadSanitizer see a race."""
    compiled = compiler.compile(FOLDER / f"{name}.comm", ranks=2)
    assert isinstance(compiled, compiler.CompiledSchedule)
    assert trial(compiled, Settings(600, "float32", None, True, False)).fault == ""


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "ranks", "pieces"), CASES[:2] + CASES[3:5] + CASES[6:])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_calls(name: str, ranks: int, pieces: int, dtype: Any) -> None:
    """Call after call, each with other numbers, and with other shapes between them, some of nothing."""
    op = commdsl.load(name, params={"C": pieces}, ranks=ranks)
    shapes = ((2, 8, 3), (5, 16, 24), (2, 0, 3), (2, 8, 0), (0, 8, 3), (2, 8, 3))

    def work(rank: int, group: str) -> list[Any]:
        made = []
        for rows, depth, columns in shapes:
            x, w = given(name, ranks, rows * pieces, depth, columns)
            result = op(torch.tensor(x[rank]).to(dtype), torch.tensor(w[rank]).to(dtype), group=group)
            if name == WITH_ROWS:
                result, there = result
                assert (there.float().numpy() == np.concatenate(x)).all()
            made.append(result)
        return made

    found = in_group(ranks, work)
    for at, (rows, depth, columns) in enumerate(shapes):
        want = wanted(name, *given(name, ranks, rows * pieces, depth, columns))
        for rank in range(ranks):
            assert found[rank][at].dtype == dtype
            assert (found[rank][at].double().numpy() == want[rank]).all()


@pytest.mark.parametrize(("name", "ranks", "pieces"), [one for one in CASES if one[0] in (SCATTER, REDUCE, EXCHANGE)])
def test_what_tasks_push(name: str, ranks: int, pieces: int) -> None:
    """Whatever a task makes for others, each time to the peers and buffers that copies of its launch would go to."""
    schedule, plain = checked(name, ranks, pieces)
    plan = pushing(plain)
    assert not codes(stopping(schedule).schedule, plan)
    within = int(name == EXCHANGE)  # what comes of an exchange is laid in order, on the rank itself
    assert {one.push for one in tasks(plan)} - {None} == set(range(len(launches(plan)) - within))
    for task in (one for one in tasks(plan) if one.push is not None):
        launch = launches(plan)[task.push or 0]
        assert launch.reads == (task.result,)
        assert is_kept(plan, task) == (name == REDUCE and task.result.name.startswith("y"))
        for rank in range(ranks):
            peers, buffers = zip(*destinations(launch, rank), strict=True)
            assert {*buffers} == {*launch.writes}
            assert len({*peers} - {rank}) == len(peers)


def test_what_is_pushed_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    file, tune = str(FOLDER / f"{EXCHANGE}.comm"), ("--tune", "matmul=push")
    assert run_command(["show", file, "C=2", "--stage", "plan", "--ranks", "2", *tune]) == 0
    out = capsys.readouterr().out
    assert "in place of the copies of launch 0, when peers are ready\n" in out


@pytest.mark.parametrize("name", [GATHER, WITH_ROWS, RETURN])
def test_what_no_task_has_made_is_not_pushed(name: str) -> None:
    _, plan = checked(name, 3, 2)
    assert pushing(plan) is plan


LATE = """
schedule late for P ranks where P == 2 {
  input x[P blocks, 3 blocks]
  input w
  scratch c[3 blocks]
  scratch s
  output y[3 blocks]
  ensure each r, i in 0 ..< 3 { y[i] == sum(matmul(x[r, i], w) @ all) }
  each r { compute matmul(x[(r + 1) % P, 0], w -> c[0]) }
  each r { compute matmul(x[(r + 1) % P, 1], w -> c[1]) }
  each r { compute matmul(x[(r + 1) % P, 2], w -> c[2]) }
  for i in 0 ..< 3 {
    each r { put c[i] -> s @ (r + 1) % P }
    each r { compute matmul(x[r, i], w -> y[i]) }
    each r { reduce s -> y[i] }
  }
  tune { protocol engine   landing place }
}
"""


def test_what_peers_are_ready_for_too_late_is_not_pushed(tmp_path: Path) -> None:
    """There are two copies of `s`: the third product would wait for one that comes later, and reads what is there."""
    (tmp_path / "late.comm").write_text(LATE, "utf-8")
    found = compiler.check(tmp_path / "late.comm", ranks=2)
    assert found.visits is not None
    assert [one.push for one in tasks(pushing(found.visits))] == [0, 1, None, None, None, None]


@pytest.mark.parametrize("name", [SCATTER, REDUCE])
@pytest.mark.parametrize("later", [1, 2, 9])
def test_own_rows_come_later(name: str, later: int) -> None:
    """So many pieces, or when all of the others' are made; the sums are the same."""
    op = commdsl.load(name, params={"C": 3, "D": later}, ranks=2)
    plan = op.program(2).visits.plan
    own = [one.result.name.startswith("y") for one in tasks(plan)]
    assert own.index(True) == min(later + 1, 3)
    x, w = given(name, 2, 3, 8, 5)
    found = in_group(2, lambda rank, group: op(torch.tensor(x[rank]), torch.tensor(w[rank]), group=group))
    for made, want in zip(found, wanted(name, x, w), strict=True):
        assert (made.double().numpy() == want).all()


def test_results_of_peers_are_copied_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind all products, each when the launch that brings it is over, the last one alone when all is."""
    made: list[Order] = []

    class Order(OneStream):
        def __init__(self) -> None:
            self.caller: list[object] = []
            made.append(self)

        def wait(self, what: Hashable, *, beside: bool) -> None:
            if not beside:
                self.caller.append(what)

        def join(self) -> None:
            self.caller.append("all")

    monkeypatch.setattr(HostCommunicator, "streams", lambda communicator: Order())
    op = commdsl.load(REDUCE, params={"C": 3}, ranks=2)
    in_group(2, lambda rank, group: op(torch.ones(6, 8), torch.ones(4, 8), group=group))
    plan = checked(REDUCE, 2, 3)[1]
    brought = [number for number, launch in enumerate(launches(plan)) if launch.writes[0].name.startswith("y")]
    for one in made:
        assert one.caller[-4:] == [*((True, number) for number in brought), "all"]


def rows_of(name: str, ranks: int, pieces: int, rank: int) -> tuple[tuple[TaskRow, ...], list[str]]:
    """The kernel's table of tasks on a rank, and what each of its maps is of."""
    made = commdsl.load(name, params={"C": pieces}, ranks=ranks).program(ranks)
    assert made.visits is not None
    cut = Cut(made.signature, made.visits, rank)
    given = cut.given([torch.zeros(12 * ranks * pieces, 16), torch.zeros(12 * ranks, 16)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused.Fused, "_kernel", lambda *_: None)
        held = partial(cut.operand, given=given)
        found = fused.Fused(made.visits.plan, (), cut.places, rank, held, torch.device("cpu"))
    return found._rows, [buffer for _, buffer, *_ in found._maps]


def test_rows() -> None:
    """Of every task of a call the kernel is told which rows, which weights and which results are its own, and whether
    something beside waits for it.
    """
    ranks, pieces = 3, 2
    for rank in range(ranks):
        rows, maps = rows_of(EXCHANGE, ranks, pieces, rank)
        order = [(rank + d) % ranks for d in (1, 2, 3)]  # its own columns come last
        assert [row.sources[0].factor.at for row in rows] == [block for block in order for _ in range(pieces)]
        assert [row.sources[0].rows.at for row in rows] == [piece for _ in order for piece in range(pieces)]
        results = [(maps[row.result.map], row.result.at) for row in rows[-pieces:] if row.result]
        assert results == [("y", pieces * rank + piece) for piece in range(pieces)]
        assert all(row.stored is not None for row in rows)  # behind its own, too: then what came is copied


def test_rows_of_sums() -> None:
    """Products that are summed up are one task: of its sources the kernel is told which rows, which weights, and what
    each of them waits for.
    """
    ranks, pieces = 3, 2
    for rank in range(ranks):
        rows, maps = rows_of(RETURN, ranks, pieces, rank)
        assert [row.result and row.result.at for row in rows] == [*range(pieces)]
        assert {(row.added, row.waits, row.stored) for row in rows} == {((), (), None)}
        for piece, row in enumerate(rows):
            own, *others = row.sources
            assert (own.rows.at, own.factor.at, own.waits) == (pieces * rank + piece, rank, ())
            assert [one.factor.at for one in others] == [(rank - d) % ranks for d in (1, 2)]
            assert [maps[one.rows.map] for one in others] == ["s", "s"]
            assert [one.waits for one in others] == [(WordWait(2 * piece + at),) for at in (0, 1)]  # launches


def test_tasks_copy_what_they_read() -> None:
    """Rows of all ranks are a result without a launch of their own: of each task the kernel is told where its rows go,
    beside what it makes of them, and torch copies them.
    """
    ranks, pieces = 3, 2
    _, plan = checked(WITH_ROWS, ranks, pieces)
    assert len(launches(plan)) == (ranks - 1) * pieces
    for rank in range(ranks):
        rows, _ = rows_of(WITH_ROWS, ranks, pieces, rank)
        order = [(rank - s) % ranks for s in range(ranks)]  # its own come first
        assert [row.copy and row.copy.at for row in rows] == [
            pieces * of + piece for of in order for piece in range(pieces)
        ]
        assert [row.copy and row.copy.at for row in rows] == [row.result and row.result.at for row in rows]
    rows, copy, out = torch.randn(4, 8), torch.empty(4, 8), torch.empty(4, 3)
    ByLibrary(tasks(plan))(0, rows, torch.randn(3, 8), out=(out, copy))
    assert torch.equal(rows, copy)


SENT_ON = """
schedule sent_on for P ranks where P >= 2 {
  input x
  input w
  scratch a[P blocks]
  output c[P blocks]
  output g[P blocks]
  ensure each r, q { c[q] == matmul(x @ q, w) }
  ensure allgather(x -> g)

  each r { compute matmul(x, w -> c[r]) }
  each r { put x -> g[r] }
  for s in 1 ..< P {
    each r { put g[(r - s + 1) % P] -> a[(r - s + 1) % P] @ (r + 1) % P }
    each r { compute matmul(a[(r - s) % P], w -> c[(r - s) % P]) }
    each r { put a[(r - s) % P] -> g[(r - s) % P] }
  }
  tune { protocol engine   landing place }
}
"""


def test_copies_that_are_sent_on_are_launches(tmp_path: Path) -> None:
    """A counter tells of the tiles of a task, and not of the rows that it copies: nobody could wait for these."""
    (tmp_path / "sent_on.comm").write_text(SENT_ON, "utf-8")
    for schedule, copies in ((tmp_path / "sent_on.comm", [False, False, True]), (WITH_ROWS, [True] * 3)):
        made = commdsl.load(str(schedule), ranks=3).program(3)
        assert made.visits is not None
        assert [one.copy is not None for one in tasks(made.visits.plan)] == copies


def test_rounded_once() -> None:
    """What is added to a product is added before it is rounded: 256 + 1 + 1 in bfloat16 is 258."""
    rows, factor, one = (torch.tensor([[value]], dtype=torch.bfloat16) for value in (16.0, 16.0, 1.0))
    out = torch.empty(1, 1, dtype=torch.bfloat16)
    _, plan = checked(SCATTER, 3)
    number = next(number for number, task in enumerate(tasks(plan)) if len(task.added) == 2)
    ByLibrary(tasks(plan))(number, rows, factor, one, one, out=out)
    assert out.item() == 258.0
    assert (rows * factor + one + one).item() == 256.0


def test_sums_of_products_are_rounded_once() -> None:
    """Also those of several launches of torch's: 256 + 1 + 1 in bfloat16 is 258, whoever made the ones."""
    op = commdsl.load(RETURN, ranks=3)
    x = [torch.tensor([[value]] * 3, dtype=torch.bfloat16) for value in (256.0, 1.0, 1.0)]
    w = torch.ones(3, 1, dtype=torch.bfloat16)
    found = in_group(3, lambda rank, group: op(x[rank], w, group=group))
    assert [one.item() for one in found] == [258.0] * 3


def test_matrices() -> None:
    """What the kernel's maps say of matrices that lie by rows, and by columns: those are theirs transposed."""
    whole = torch.arange(48.0).view(6, 8)
    for laid, deep in ((whole, True), (whole.t().contiguous().t(), False)):
        chunks = laid.view(3, 2, 8)
        found = fused.matrices(dict(enumerate(chunks)))
        lines = (2, 8) if deep else (8, 2)
        assert [is_deep(one) for one in (laid, *chunks)] == [deep] * 4
        assert (found.address, found.count, found.rows, found.columns) == (laid.data_ptr(), 3, *lines)
        assert (found.row_bytes, found.step) == ((32, 64) if deep else (24, 8))


@pytest.mark.parametrize(("name", "ranks", "pieces"), [*CASES, (REDUCE, 3, 4), (EXCHANGE, 2, 4)])
def test_what_lands_lies_side_by_side(name: str, ranks: int, pieces: int) -> None:
    """Parts of one tensor that products read or write are equally far from one another in symmetric memory, too, in
    whatever order they come: the kernel has one map of them.
    """
    program = commdsl.load(name, params={"C": pieces}, ranks=ranks).program(ranks)
    assert program.visits is not None
    plan = program.visits.plan
    lying = [kept.name for kept in landing(plan, program.visits.parts)]
    products = [product for task in tasks(plan) for product in task.products]
    touched = {kept.name for one in products for kept in (one.rows, *one.reads[2:], *one.writes)}
    for rank in range(ranks):
        places = Cut(program.signature, program.visits, rank).places
        first = {(places[part][0], lying.index(part) - places[part][1]) for part in touched & {*lying}}
        assert len(first) == len({tensor for tensor, _ in first})


def test_shapes() -> None:
    """torch knows what a call returns without making it."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = commdsl.load(GATHER, params={"C": 2}, ranks=2)
    back = commdsl.load(SCATTER, params={"C": 2}, ranks=2)

    def work(rank: int, group: str) -> list[tuple[int, ...]]:
        x, w = torch.zeros(6, 8), torch.zeros(5, 8)
        return [tuple(op(x, w, group=group).shape), tuple(back(x[:4], w, group=group).shape)]

    real = in_group(2, work)[0]
    with FakeTensorMode():
        x, w = torch.zeros(6, 8), torch.zeros(5, 8)
        (group, _) = commdsl.threads(2)
        assert [tuple(op(x, w, group=group).shape), tuple(back(x[:4], w, group=group).shape)] == real


def test_refusals() -> None:
    """What is no product is refused before anything is sent."""
    op = commdsl.load(GATHER, ranks=2)
    (group, _) = commdsl.threads(2)
    for x, w, words in (
        (torch.zeros(4, 8), torch.zeros(4, 7), "has 7"),
        (torch.zeros(4, 8), torch.zeros(4, 8, dtype=torch.float64), "float64"),
        (torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32), "a matrix of floats"),
        (torch.zeros(32), torch.zeros(32), "a matrix of floats"),
        (torch.zeros(8, 4).t(), torch.zeros(4, 8), "`x` is not contiguous"),  # it travels
        (torch.zeros(4, 8), torch.zeros(8, 16)[::2, ::2], "`w` has neither rows nor columns that TMA reads"),
        (torch.zeros(4, 8), torch.zeros(4, 9)[:, :8], "`w` has neither"),
    ):
        with pytest.raises(commdsl.TensorError, match=words):
            op(x, w, group=group)
    with pytest.raises(commdsl.OpError, match="no `yield`"):
        op.visit(torch.zeros(4, 8), torch.zeros(4, 8), lambda *_: None, group=group)
