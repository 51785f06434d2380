"""What products end with, a bias and an activation: the oracle, host ranks, the kernel's tables, beside float64 written
from the language's README."""

from __future__ import annotations

from dataclasses import replace
from itertools import product as pairs
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_products import EXCHANGE, GATHER, REDUCE, RETURN, SCATTER, WITH_ROWS, given, wanted, with_task
from test_visits import codes

from commdsl import compiler
from commdsl.commands.trial import Settings, trial
from commdsl.ir import interpret
from commdsl.ir.functions import PLAIN
from commdsl.ir.products import stopping
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir

torch = pytest.importorskip("torch")

from fake_hopper import FakeHopper  # noqa: E402
from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402
from commdsl.build.headers import include_dir  # noqa: E402
from commdsl.program.visited import launches, tasks  # noqa: E402
from commdsl.runtime import fused, tensors  # noqa: E402
from commdsl.runtime.errors import TensorError  # noqa: E402
from commdsl.runtime.products import ByLibrary, Cut  # noqa: E402
from commdsl.runtime.program import Port, Program  # noqa: E402

FOLDER = data_dir("schedules") / "overlap"
ROWS, DEPTH, COLUMNS = 4, 16, 12
BIASED = (GATHER, WITH_ROWS, SCATTER, REDUCE, EXCHANGE, RETURN, "alltoall_matmul_rows")
CASES = [(name, {"B": 1}) for name in BIASED]
CASES += [(GATHER, {"B": biased, "A": activation}) for biased, activation in ((0, 1), (1, 1), (0, 2), (1, 2))]
CASES += [(name, {"B": biased, "R": 1}) for name in (SCATTER, REDUCE, RETURN) for biased in (0, 1)]
NAMES = [" ".join((name, *(f"{key}={value}" for key, value in params.items()))) for name, params in CASES]


Of = dict[str, list[Any]]
"""By input, of every rank."""


def numbers(name: str, ranks: int, params: dict[str, int]) -> Of:
    """Rows, weights, a bias (one row, or of weights for the columns of all ranks one for each) and a residual."""
    wide = COLUMNS * (2 if params.get("A") == 2 else 1)
    x, w = given("alltoall_matmul" if name.startswith(RETURN) else name, ranks, ROWS, DEPTH, wide)
    sizes = {"b": (wide * (ranks if name == EXCHANGE else 1),), "t": (ROWS * (ranks if name == REDUCE else 1), COLUMNS)}
    found = {"x": x, "w": w}
    for number, (key, asked) in enumerate((("b", "B"), ("t", "R"))):
        if params.get(asked):
            seeds = [200 + 10 * number + rank for rank in range(ranks)]
            found[key] = [np.random.default_rng(seed).integers(-3, 4, sizes[key]).astype(np.float32) for seed in seeds]
    return found


def due(name: str, params: dict[str, int], of: Of) -> list[Any]:
    """By rank, in float64."""
    x, w, bias = of["x"], of["w"], of.get("b")
    found = [torch.tensor(one) for one in wanted(RETURN if name.startswith(RETURN) else name, x, w)]
    if bias is not None and name == REDUCE:  # who adds up a row adds its bias
        found = [one + torch.tensor(np.stack(bias)).repeat_interleave(ROWS, 0) for one in found]
    elif bias is not None and name == EXCHANGE:  # who multiplies a row has its bias
        blocks = [np.stack([one.reshape(len(x), -1)[rank] for one in bias]) for rank in range(len(x))]
        found = [one + torch.tensor(block).repeat_interleave(ROWS, 0) for one, block in zip(found, blocks, strict=True)]
    elif bias is not None:
        found = [one + torch.tensor(own) for one, own in zip(found, bias, strict=True)]
    match params.get("A", 0):
        case 1:
            found = [one * torch.special.ndtr(one) for one in found]
        case 2:
            found = [one[:, :COLUMNS] * torch.sigmoid(one[:, :COLUMNS]) * one[:, COLUMNS:] for one in found]
    residual = of.get("t", [np.zeros(())] * len(x))
    if residual[0].ndim and name == REDUCE:  # and its own part of the residual
        residual = [np.concatenate([np.split(one, len(x))[rank] for rank, one in enumerate(residual)])] * len(x)
    return [one + torch.tensor(own) for one, own in zip(found, residual, strict=True)]


@pytest.mark.parametrize(("name", "params"), CASES, ids=NAMES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_oracle(name: str, params: dict[str, int], ranks: int) -> None:
    """The meaning of the schedule, and of the one that stops at each product, are the same."""
    schedule = compiler.check(FOLDER / f"{name}.comm", ranks=ranks, params=params).schedule
    inputs = numbers(name, ranks, params)
    found = interpret.run(schedule, inputs, BY_NAME["float64"], "sum").outputs
    for made, wanted_here in zip(
        found["c" if name in (GATHER, WITH_ROWS) else "y"], due(name, params, inputs), strict=True
    ):
        np.testing.assert_allclose(made, wanted_here.numpy().ravel(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize(("name", "params"), CASES, ids=NAMES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_calls(name: str, params: dict[str, int], dtype: str) -> None:
    """On host ranks, in two pieces; whole numbers to the bit, where nothing but a bias is added."""
    ranks, of = 3, getattr(torch, dtype)
    op = commdsl.load(name, params={"C": 2, **params}, ranks=ranks)
    inputs = numbers(name, ranks, params)

    def work(rank: int, group: str) -> Any:
        made = op(*(torch.tensor(one[rank]).to(of) for one in inputs.values()), group=group)
        return made[0] if isinstance(made, tuple) else made

    near = (0.0, 0.0) if not params.get("A") else (1e-13, 1e-13) if dtype == "float64" else (2.0**-7, 2.0**-7)
    for made, wanted_here in zip(in_group(ranks, work), due(name, params, inputs), strict=True):
        assert made.dtype == of
        torch.testing.assert_close(made.double(), wanted_here.to(of).double(), rtol=near[0], atol=near[1])


@pytest.mark.parametrize(("name", "params"), [CASES[4], CASES[10], CASES[-3]], ids=[NAMES[4], NAMES[10], NAMES[-3]])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_run(name: str, params: dict[str, int], dtype: str) -> None:
    """`commdsl run`: every launch on host ranks brings each product what the oracle has there, bit for bit."""
    compiled = compiler.compile(FOLDER / f"{name}.comm", ranks=3, params={"C": 2, **params})
    assert isinstance(compiled, compiler.CompiledSchedule)
    assert trial(compiled, Settings(5000, dtype, None, False, False)).fault == ""


def test_float8() -> None:
    """A bias is of the type of results, not of rows."""
    op = commdsl.load(GATHER, params={"B": 1, "A": 1}, ranks=2)
    x, w, bias = numbers(GATHER, 2, {"B": 1, "A": 1}).values()
    scales = [torch.tensor(one) for one in (0.5, 0.25)]

    def work(rank: int, group: str) -> Any:
        rows, factor = (torch.tensor(one[rank]).to(torch.float8_e4m3fn) for one in (x, w))
        return op(rows, factor, torch.tensor(bias[rank]).bfloat16(), *scales, group=group)

    for rank, made in enumerate(in_group(2, work)):
        total = torch.tensor(np.concatenate(x)).double() @ torch.tensor(w[rank]).double().t() * 0.125
        total += torch.tensor(bias[rank])
        torch.testing.assert_close(made.double(), total * torch.special.ndtr(total), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("name", BIASED)
def test_a_plan_that_ends_otherwise_is_refused(name: str) -> None:
    """One product without its bias: the Plan does not compute the schedule."""
    found = compiler.check(FOLDER / f"{name}.comm", ranks=3, params={"B": 1})
    plan, stopped = found.visits, stopping(found.schedule).schedule
    assert plan is not None
    ends = [(task, one) for task in tasks(plan) for one in task.products if one.step.epilogue != PLAIN]
    assert ends
    for task, old in ends:
        step = replace(old.step, reads=old.step.reads[:-1], epilogue=PLAIN)
        other = replace(old, step=step, reads=old.reads[:-1])
        products = tuple(other if one is old else one for one in task.products)
        assert codes(stopped, with_task(plan, task, replace(task, products=products)))


def test_what_is_no_residual() -> None:
    """It is as large as what is made."""
    op = commdsl.load(SCATTER, params={"R": 1}, ranks=2)

    def work(rank: int, group: str) -> None:
        with pytest.raises(TensorError, match=r"`t` is \(8, 12\), as what is made \(4, 12\)"):
            op(torch.zeros(2 * ROWS, DEPTH), torch.zeros(COLUMNS, DEPTH), torch.zeros(2 * ROWS, COLUMNS), group=group)

    in_group(2, work)


@pytest.mark.parametrize(
    ("what", "bias", "said"),
    [
        ("too short", torch.zeros(COLUMNS - 1), r"`b` is \(11,\), a number for each row of a factor \(12,\)"),
        ("a matrix", torch.zeros(1, COLUMNS), r"`b` is \(1, 12\)"),
        ("of another type", torch.zeros(COLUMNS).double(), "`b` is torch.float64, `w` torch.float32"),
    ],
)
def test_what_is_no_bias(what: str, bias: Any, said: str) -> None:
    """Refused, with what it is and what is wanted."""
    op = commdsl.load(GATHER, params={"B": 1}, ranks=2)

    def work(rank: int, group: str) -> None:
        with pytest.raises(TensorError, match=said):
            op(torch.zeros(ROWS, DEPTH), torch.zeros(COLUMNS, DEPTH), bias, group=group)

    in_group(2, work)


def test_a_gate_and_half_a_column() -> None:
    """Weights of a SwiGLU have a row for each gate, and as many more."""
    op = commdsl.load(GATHER, params={"A": 2}, ranks=2)

    def work(rank: int, group: str) -> None:
        with pytest.raises(TensorError, match="a gate and as many columns that it is multiplied with, not 7 in all"):
            op(torch.zeros(ROWS, DEPTH), torch.zeros(7, DEPTH), group=group)

    in_group(2, work)


@pytest.mark.parametrize(("biased", "activation"), [*pairs((0, 1), (0, 1, 2))])
def test_what_is_said(biased: int, activation: int) -> None:
    """Each visit says what its product ends with."""
    found = compiler.check(FOLDER / f"{GATHER}.comm", ranks=2, params={"B": biased, "A": activation})
    words = ["bias"] * biased + ["", "gelu", "swiglu"][activation : activation + 1] * (activation > 0)
    assert found.visits is not None
    said = {one.step.epilogue.words for task in tasks(found.visits) for one in task.products}
    assert said == {f" with {', '.join(words)}" if words else ""}


# --- the kernel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hopper(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of 12 SMs."""
    made = FakeHopper(tmp_path_factory.mktemp("hopper"), include_dir())
    with pytest.MonkeyPatch.context() as patch:
        made.install(patch)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=12))
        yield made


class Held:
    """What the products of a rank have in one call: given, come from elsewhere, or not made yet."""

    def __init__(self, program: Program, rank: int, inputs: list[Any]) -> None:
        assert program.visits is not None
        self.visits, self.cut = program.visits, Cut(program.signature, program.visits, rank)
        self.tasks = tasks(self.visits.plan)
        names = [port.name for port in self.visits.signature.inputs]
        given_here = self.cut.given(inputs)
        self.tensors: dict[Any, Any] = {}
        whole: dict[tuple[str, int], Any] = {}
        for kept in (kept for one in self.tasks for kept in (*one.operands, *one.writes)):
            if kept.name in names:
                self.tensors[kept] = given_here[names.index(kept.name)]
                continue
            name, at = self.cut.places[kept.name]
            of = name, kept.copy
            if of not in whole:
                count = 1 + max(place for other, place in self.cut.places.values() if other == name)
                shape = tensors.shapes(self.visits.signature, given_here, [Port(kept.name, 1, 0, kept.unit)])[0]
                draw = torch.Generator().manual_seed(len(whole))
                whole[of] = torch.randint(-2, 3, (count, *shape), generator=draw).to(torch.bfloat16)
            self.tensors[kept] = whole[of][at]

    @property
    def results(self) -> list[Any]:
        """What tasks write, each once."""
        return [self.tensors[kept] for kept in dict.fromkeys(kept for one in self.tasks for kept in one.writes)]

    def by_torch(self) -> list[Any]:
        """Copies of what all tasks write."""
        run = ByLibrary(self.tasks)
        for number, one in enumerate(self.tasks):
            out = [self.tensors[kept] for kept in one.writes]
            run(number, *map(self.tensors.get, one.operands), out=tuple(out) if len(out) > 1 else out[0])
        return [one.clone() for one in self.results]

    def by_the_kernel(self) -> list[Any]:
        """All in one launch, of which all that travels has come."""
        plan = self.visits.plan
        made = fused.Fused(plan, (), self.cut.places, 0, self.tensors.__getitem__, torch.device("cpu"))
        words = torch.zeros(64, dtype=torch.int64)
        words[: len(launches(plan))] = 1
        streams = SimpleNamespace(
            zeroed=lambda count, like: words.data_ptr(), launch=lambda kernel, launch, beside: kernel.launch(launch, 0)
        )
        for one in self.results:
            one.fill_(torch.nan)
        _, functions = made.over((), streams, self.tensors, ())  # type: ignore[arg-type]
        functions["matmul"](0, out=None)
        return self.results


@pytest.mark.parametrize(("name", "params"), CASES, ids=NAMES)
@pytest.mark.parametrize("rank", [0, 2])
def test_the_kernel(hopper: FakeHopper, name: str, params: dict[str, int], rank: int) -> None:
    """Whose table says of each product which row of a bias it adds, if any, and which is given where that lies."""
    program = commdsl.load(name, params={"C": 2, **params}, ranks=3).program(3)
    columns = 48 if params.get("A") == 2 else 24
    rows = 80 * (3 if name in (SCATTER, REDUCE) or name.startswith(RETURN) else 1)
    sizes = [(rows, 64), (columns * (3 if name == EXCHANGE or name.startswith(RETURN) else 1), 64)]
    sizes += [(columns * (3 if name == EXCHANGE else 1),)] if params.get("B") else []
    sizes += [(rows if name == REDUCE else rows // 3, columns)] if params.get("R") else []
    draw = torch.Generator().manual_seed(rank)
    inputs = [torch.randint(-2, 3, size, generator=draw).to(torch.bfloat16) for size in sizes]
    held = Held(program, rank, inputs)
    wanted_here = held.by_torch()
    near = 2.0**-7 if params.get("A") else 0.0
    for made, due_here in zip(held.by_the_kernel(), wanted_here, strict=True):
        torch.testing.assert_close(made, due_here, rtol=near, atol=near)
