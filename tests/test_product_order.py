"""Programs of products that depend on one another: their waits order all, and the kernel keeps that order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_hopper import FakeHopper, Move  # noqa: E402 - after the check for torch
from task_orders import hangs, wrong_orders  # noqa: E402
from test_products import with_task, without_waits  # noqa: E402

from commdsl import compiler  # noqa: E402
from commdsl.build.headers import include_dir  # noqa: E402
from commdsl.checks import check_plan  # noqa: E402
from commdsl.ir import resolve  # noqa: E402
from commdsl.ir.products import stopping  # noqa: E402
from commdsl.ir.schedules import Schedule  # noqa: E402
from commdsl.language.diagnostics import CommError  # noqa: E402
from commdsl.language.syntax import ScheduleDecl  # noqa: E402
from commdsl.program.launches import Launch, described  # noqa: E402
from commdsl.program.lower.visits import lower_visits  # noqa: E402
from commdsl.program.memory import Kept  # noqa: E402
from commdsl.program.moves import OpKind  # noqa: E402
from commdsl.program.plan import Plan  # noqa: E402
from commdsl.program.pushed import pushing  # noqa: E402
from commdsl.program.tasks import Over, Stored, Task  # noqa: E402
from commdsl.program.verify import verify  # noqa: E402
from commdsl.program.visited import kept_by, launches, started, tasks  # noqa: E402
from commdsl.runtime import fused  # noqa: E402
from commdsl.runtime.matmul import Matmul  # noqa: E402
from commdsl.runtime.products import ByLibrary  # noqa: E402

EARLIER = Path(__file__).parent / "earlier_product.comm"

DRAWN = """schedule drawn for P ranks where P >= 2 {{
  input x[3 blocks]  input w  scratch c[2 blocks]  scratch s[2 blocks]  output y[2 blocks]
  ensure each r {{ y[0] == x[0] @ r }}
  tune {{ protocol engine   landing place }}
{steps}
}}
"""


def drawn(seed: int) -> str:
    """Return a schedule of random puts, products and sums over few buffers, each read only where it is defined."""
    dice, rows, made = random.Random(seed), [f"x[{i}]" for i in range(3)], list[str]()
    steps = list[str]()
    for _ in range(dice.randint(2, 9)):
        match dice.choice(("put", "matmul", "matmul", "matmul", "sum")):
            case "put":
                dest = f"s[{dice.randrange(2)}]"
                steps.append(f"put {dice.choice(rows)} -> {dest} @ (r + 1) % P")
                rows.append(dest)
            case "matmul":
                dest = dice.choice(("c[0]", "c[1]", "y[0]", "y[1]"))
                steps.append(f"compute matmul({dice.choice(rows)}, w -> {dest})")
                made.append(dest)
                if len(made) > 1 and dice.random() < 0.4:
                    steps.append(f"reduce {dice.choice(made[:-1])} -> {dest}")
            case "sum" if made:
                dest = f"y[{dice.randrange(2)}]"
                steps.append(f"put {dice.choice(made)} -> {dest} @ (r + 1) % P")
                made.append(dest)
    steps = steps if made else [*steps, "compute matmul(x[0], w -> c[0])"]
    return DRAWN.format(steps="\n".join(f"  each r {{ {step} }}" for step in steps))


def lowered(text: str, folder: Path) -> tuple[Schedule, Plan]:
    """Return the Plan of a schedule whose contract nobody checks, and the schedule that stops at products."""
    files = compiler.read_text(text, "drawn.comm", folder)
    decl = compiler.choose_kind(files, None, ScheduleDecl)
    stopped = stopping(resolve.resolve(files, decl, 2, compiler.find_topology(files, None, 2), {})).schedule
    return stopped, lower_visits(stopped)


def test_drawn_programs_are_in_order(turns: Callable[..., int], tmp_path: Path) -> None:
    """The waits of random programs of products leave no order open, whoever judges; and without any one they do."""
    dropped = 0
    for seed in range(turns(300)):
        try:
            stopped, plan = lowered(drawn(seed), tmp_path)
        except CommError:  # no Plan has these products
            continue
        verify(plan)
        for one in dict.fromkeys((plan, pushing(plan))):
            assert not check_plan(stopped, one), f"seed {seed}"
            assert not [*wrong_orders(one)], f"seed {seed}"
            assert not hangs(one), f"seed {seed}"
        for task in tasks(plan):
            for words, mutant in without_waits(task):
                changed = with_task(plan, task, mutant)
                assert [found.code for found in check_plan(stopped, changed)] == ["C640"], (seed, words)
                assert any(wrong_orders(changed)), (seed, words)
                dropped += 1
    assert dropped


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHopper]:
    made = FakeHopper(tmp_path_factory.mktemp("hopper"), include_dir())
    with pytest.MonkeyPatch.context() as patch:
        made.install(patch)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        found = SimpleNamespace(multi_processor_count=12)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: found, raising=False)
        yield made


@pytest.mark.parametrize("seed", range(24))
def test_the_kernel_keeps_the_order(hopper: FakeHopper, seed: int, tmp_path: Path) -> None:
    """Tasks that need one another, in whatever order the machine goes on: the same numbers as one after another."""
    path = tmp_path / "drawn.comm"
    path.write_text(drawn(seed) if seed else EARLIER.read_text("utf-8"), "utf-8")
    try:
        _, plan = lowered(path.read_text("utf-8"), tmp_path)
    except CommError:
        return
    if not tasks(plan) or any(one.moves.has_reduction for one in launches(plan)):
        return
    hopper.stores_again = True
    for number in range(2):
        hopper.seed = 100 * seed + number
        made, due = in_both_ways(hopper, plan, number, squares(plan))
        assert all(map(torch.equal, made, due)), seed


def squares(plan: Plan) -> Callable[[Kept], tuple[int, ...]]:
    """Return the shapes of operands: 64 by 64 for factors, 96 rows for everything else."""
    factors = {product.factor for task in tasks(plan) for product in task.products}
    return lambda kept: (64 if kept in factors else 96, 64)


def in_both_ways(
    hopper: FakeHopper, plan: Plan, seed: int, shape: Callable[[Kept], tuple[int, ...]]
) -> tuple[list[Any], list[Any]]:
    """Return all memory after a call by the kernel with launches beside it, and after the same phase by phase by torch.
    All ranks have the same numbers, so what peers bring is what this rank has.
    """
    draw = torch.Generator().manual_seed(seed)
    every = dict.fromkeys(kept_by(plan))
    held = {kept: torch.randint(-1, 2, shape(kept), generator=draw).to(torch.bfloat16) for kept in every}
    before = {kept: one.clone() for kept, one in held.items()}
    places = {kept.name: (kept.name, 0) for kept in every}
    made = fused.Fused(plan, (), places, 0, held.__getitem__, torch.device("cpu"))
    words, kernel = torch.zeros(512, dtype=torch.int64), next(iter(made._kernels.values()))
    hopper.beside = [*moves(plan, held, made, kernel, words.data_ptr())]
    streams = SimpleNamespace(
        zeroed=lambda count, like: words.data_ptr(), launch=lambda kernel, launch, beside: kernel.launch(launch, 0)
    )
    _, functions = made.over((), streams, held, ())  # type: ignore[arg-type]
    functions["matmul"](0, out=None)
    found = [one.clone() for one in held.values()]
    for kept, one in before.items():
        held[kept].copy_(one)
    run, numbers = ByLibrary(tasks(plan)), {task: number for number, task in enumerate(tasks(plan))}
    for _, phase in started(plan):
        match phase:
            case Launch():
                for source, dest in copies(phase):
                    held[dest].copy_(held[source])
            case Task():
                out = tuple(held[kept] for kept in phase.writes)
                run(numbers[phase], *(held[kept] for kept in phase.operands), out=out if len(out) > 1 else out[0])
    return found, list(held.values())


def copies(launch: Launch) -> list[tuple[Kept, Kept]]:
    """Return the copies of a launch, as if from this rank to itself."""
    ops = launch.moves.ops
    rows = [row for row in range(*ops.rank_begin[:2].tolist()) if ops.kind[row] != OpKind.HOLD]
    assert all(ops.kind[row] == OpKind.COPY for row in rows)
    leaders = ops.leader_of[rows].tolist()
    sources = [int(ops.source_space[ops.source_begin[leader]]) for leader in leaders]
    of = launch.operands
    return [(of[source], of[int(ops.dest_space[row])]) for source, row in zip(sources, rows, strict=True)]


def moves(plan: Plan, held: dict[Kept, Any], made: fused.Fused, kernel: Matmul, words: int) -> Iterator[Move]:
    """Yield the launches in order: each waits for the tasks before it, copies, and signals its end. Each wait raises a
    word that nobody reads, so that they come one after another.
    """
    nothing, unread = torch.zeros(0), iter(range(made._words, 512))
    for number, launch in enumerate(launches(plan)):
        for task in range(launch.after):
            word = words + 8 * made._word(Stored(task))
            yield Move(nothing, nothing, word, kernel.stores(task), words + 8 * next(unread))
        for source, dest in copies(launch):
            yield Move(held[source], held[dest], 0, 0, words + 8 * next(unread))
        yield Move(nothing, nothing, 0, 0, words + 8 * made._word(Over(number)))


def test_a_sum_of_an_earlier_product() -> None:
    """The sum waits for the task that makes its addend: the kernel once read that too early, and gave wrong numbers."""
    found = compiler.check(EARLIER, ranks=2)
    assert found.visits is not None
    assert [described(task, number) for number, task in enumerate(tasks(found.visits))][1:] == [
        "task 1 matmul: x.1 0 by w 0 + c.0 1 (after task 0) -> y.0 1",
        "task 2 matmul: s.0 1 by w 0 (after launch 0) -> y.1 1",
    ]
