"""Programs of tasks that depend on one another: proved, right on host ranks and on the emulated Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_hopper import FakeHopper  # noqa: E402 - after the check for torch
from task_orders import hangs, wrong_orders  # noqa: E402
from task_programs import Made, Program, drawn, value  # noqa: E402
from test_product_order import in_both_ways  # noqa: E402
from test_products import with_task, without_waits  # noqa: E402
from thread_ranks import in_group  # noqa: E402

import commdsl  # noqa: E402
from commdsl import compiler  # noqa: E402
from commdsl.build.headers import include_dir  # noqa: E402
from commdsl.checks import check_plan  # noqa: E402
from commdsl.ir.products import stopping  # noqa: E402
from commdsl.language.diagnostics import CommError  # noqa: E402
from commdsl.machine.resources import data_dir  # noqa: E402
from commdsl.program.visited import launches, tasks  # noqa: E402
from commdsl.runtime import tensors  # noqa: E402
from commdsl.runtime.products import Cut  # noqa: E402
from commdsl.runtime.program import Port  # noqa: E402

OVERLAP = data_dir("schedules") / "overlap"
CHAIN = Path(__file__).parent / "chained_products.comm"


def numbers(shapes: dict[str, tuple[int, ...]], rank: int, seed: int = 0) -> dict[str, Any]:
    """Inputs of a rank: whole numbers from -2 to 2, of which every position and rank has its own."""
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    return {name: torch.randint(-2, 3, shape, generator=draw).double() for name, shape in shapes.items()}


def at(path: Path, program: Program) -> str:
    path.write_text(program.text, "utf-8")
    return str(path)


# --- random programs --------------------------------------------------------------------------------------------------


def test_drawn_programs_are_proved(turns: Callable[..., int], tmp_path: Path) -> None:
    """Each keeps its contract; a second opinion finds no order open and no wait without end."""
    for seed in range(turns(120)):
        program = drawn(seed)
        found = compiler.check(compiler.read_text(program.text, "drawn.comm", tmp_path), ranks=3)
        assert found.visits is not None
        assert not [*wrong_orders(found.visits)], seed
        assert not hangs(found.visits), seed


def test_a_dropped_wait_is_refused(turns: Callable[..., int], tmp_path: Path) -> None:
    """Without any wait of a task two accesses have no order, by the proof and by the second opinion."""
    dropped = 0
    for seed in range(turns(200)):
        found = compiler.check(compiler.read_text(drawn(seed).text, "drawn.comm", tmp_path), ranks=2)
        assert found.visits is not None
        stopped = stopping(found.schedule).schedule
        for task in tasks(found.visits):
            for words, mutant in without_waits(task):
                changed = with_task(found.visits, task, mutant)
                codes = [one.code for one in check_plan(stopped, changed)]
                assert codes == ["C640"] or (not codes and not [*wrong_orders(changed)]), (seed, words)
                dropped += 1
    assert dropped


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_calls(ranks: int, turns: Callable[..., int], tmp_path: Path) -> None:
    """On host ranks, call after call with other numbers, as float64 has it from the words of the program."""
    for seed in range(turns(16)):
        program = drawn(100 * ranks + seed)
        op = commdsl.load(at(tmp_path / f"drawn_{seed}.comm", program), ranks=ranks)
        given = [[numbers(program.shapes, rank, call) for rank in range(ranks)] for call in range(2)]

        def work(rank: int, group: str, op: Any = op, given: Any = given) -> list[Any]:
            found = [op(*call[rank].values(), group=group) for call in given]
            return [one if isinstance(one, tuple) else (one,) for one in found]

        for rank, calls in enumerate(in_group(ranks, work)):
            for call, found in enumerate(calls):
                for made, node in zip(found, program.results.values(), strict=True):
                    due = value(node, rank, given[call])
                    torch.testing.assert_close(made, due, rtol=1e-11, atol=1e-11 * float(due.abs().max()))


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeHopper]:
    made = FakeHopper(tmp_path_factory.mktemp("hopper"), include_dir())
    made.stores_again = True
    with pytest.MonkeyPatch.context() as patch:
        made.install(patch)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        found = SimpleNamespace(multi_processor_count=12)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: found, raising=False)
        yield made


def by_the_kernel(hopper: FakeHopper, path: str, given: list[Any], seed: int, *, is_exact: bool) -> None:
    """A call of a program: all tasks in one kernel, beside its launches, and one after another by torch."""
    program = commdsl.load(path, ranks=2).program(2)
    assert program.visits is not None
    visits, cut = program.visits, Cut(program.signature, program.visits, 0)
    if any(one.moves.has_reduction for one in launches(visits.plan)):
        return
    inputs = cut.given(given)

    def shape(kept: Any) -> tuple[int, ...]:
        return tuple(tensors.shapes(visits.signature, inputs, [Port(kept.name, 1, 0, kept.unit)])[0])

    hopper.seed = seed
    made, due = in_both_ways(hopper, visits.plan, seed, shape)
    for one, other in zip(made, due, strict=True):
        near = 0.0 if is_exact else 2.0**-5 * float(other.abs().max())
        torch.testing.assert_close(one.double(), other.double(), rtol=0, atol=near)


@pytest.mark.parametrize("seed", range(6))
def test_the_kernel(hopper: FakeHopper, seed: int, turns: Callable[..., int], tmp_path: Path) -> None:
    """Tasks of different sizes and endings are one launch, in whatever order the machine goes on."""
    for number in range(turns(2)):
        program = drawn(1000 * seed + number)
        given = [one.to(torch.bfloat16) for one in numbers(program.shapes, 0).values()]
        path = at(tmp_path / f"drawn_{number}.comm", program)
        by_the_kernel(hopper, path, given, number, is_exact=program.is_exact)


# --- programs that people write ---------------------------------------------------------------------------------------


def swiglu(x: Any) -> Any:
    gate, up = x.chunk(2, 1)
    return gate * torch.sigmoid(gate) * up


def mlp(given: list[dict[str, Any]], rank: int) -> Any:
    """The tokens of a rank through the hidden columns of all ranks."""
    x = given[rank]["x"]
    return sum(swiglu(x @ one["up"].t()) @ one["down"].t() for one in given)


def chain(given: list[dict[str, Any]], rank: int) -> Any:
    own, x = given[rank], given[rank - 1]["x"]
    found = x @ own["u"].t()
    return found * torch.special.ndtr(found) @ own["v"].t() @ own["w"].t()


def summa(given: list[dict[str, Any]], rank: int) -> Any:
    ranks = len(given)
    return torch.cat([given[(rank + q) % ranks]["x"] @ given[q]["w"].t() for q in range(ranks)])


PROGRAMS = {
    "mlp": (OVERLAP / "mlp.comm", mlp, {"x": (24, 16), "up": (48, 16), "down": (16, 24)}),
    "chain": (CHAIN, chain, {"x": (24, 16), "u": (40, 16), "v": (8, 40), "w": (32, 8)}),
    "summa": (OVERLAP / "summa.comm", summa, {"x": (24, 16), "w": (40, 16)}),
}


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str, ranks: int) -> None:
    """On host ranks, in one piece and where it can be in three, as float64 has it."""
    path, meaning, shapes = PROGRAMS[name]
    given = [numbers(shapes, rank) for rank in range(ranks)]
    for params in ({}, {"C": 3}) if name == "mlp" else ({},):
        op = commdsl.load(path, ranks=ranks, params=params)
        found = in_group(ranks, lambda rank, group, op=op: op(*given[rank].values(), group=group))
        for rank, made in enumerate(found):
            due = meaning(given, rank)
            torch.testing.assert_close(made, due, rtol=1e-12, atol=1e-12 * float(due.abs().max()))


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_one_kernel(hopper: FakeHopper, name: str) -> None:
    """Tasks whose sizes, factors and activations differ run as one launch."""
    path, _, shapes = PROGRAMS[name]
    given = [one.to(torch.bfloat16) for one in numbers(shapes, 0).values()]
    for seed in range(2):
        by_the_kernel(hopper, str(path), given, seed, is_exact=name == "summa")


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"x": (24, 16), "up": (48, 15), "down": (16, 24)}, "a row of `up` has 15, a row of `x` 16"),
        ({"x": (24, 16), "up": (47, 16), "down": (16, 23)}, "a gate and as many columns"),
        ({"x": (24, 16), "up": (48, 16), "down": (16, 25)}, "a row of `down` has 25, a column of `up` 24"),
    ],
)
def test_sizes_that_differ(shapes: dict[str, tuple[int, ...]], words: str) -> None:
    """A size is the same wherever the schedule has it; the caller is told where it is not."""
    op = commdsl.load(OVERLAP / "mlp.comm", ranks=2)

    def work(rank: int, group: str) -> None:
        with pytest.raises(commdsl.TensorError, match=words):
            op(*numbers(shapes, rank).values(), group=group)

    in_group(2, work)


def test_a_size_that_is_twice_itself(tmp_path: Path) -> None:
    """A gated product has half as many columns as one without a gate: the sum of both is no matrix."""
    text = """schedule twice for P ranks where P >= 2 {
  input x   input w   scratch g   output y
  ensure each r { y == sum((matmul(x, w) with swiglu), matmul(x @ (r - 1) % P, w @ (r - 1) % P)) }
  each r { compute matmul(x, w -> y) with swiglu }
  each r { compute matmul(x, w -> g) }
  each r { reduce g @ (r - 1) % P -> y }
}
"""
    with pytest.raises(CommError, match="C322"):
        compiler.check(compiler.read_text(text, "twice.comm", tmp_path), ranks=2)


def test_results_are_trees() -> None:
    """Some drawn programs have products of products."""
    found = [node for seed in range(60) for node in drawn(seed).results.values() if isinstance(node, Made)]
    assert any(isinstance(rows, Made) for node in found for rows, _ in node.terms)
