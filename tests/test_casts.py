"""What travels in another element type: rounded as often as a contract says, to the bit as the oracle has it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plans import changed

from commdsl import compiler
from commdsl.build import host_run, nvrtc
from commdsl.build.emit import defines, emit
from commdsl.checks import check_plan
from commdsl.checks.casts import roundings
from commdsl.checks.determinism import same_bits
from commdsl.checks.locations import Located
from commdsl.commands.dump_plans import plan_text
from commdsl.commands.dumps import ir_text
from commdsl.commands.report import cost_lines
from commdsl.commands.trial import Settings, trial
from commdsl.ir.interpret import run
from commdsl.ir.rounding import rounded
from commdsl.ir.schedules import Cast
from commdsl.language.diagnostics import InternalError
from commdsl.machine.config import from_environment
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir
from commdsl.program.moves import Form
from commdsl.program.plan import Plan
from commdsl.program.verify import verify

SHIPPED = {path.stem: path.read_text("utf-8") for path in (data_dir("schedules") / "compressed").glob("*.comm")}

RING = """schedule ring for P ranks where P >= 2 {
  input x
  output y[P blocks]
  ensure allgather(x -> y) rounded(CAST, 1)

  each r { copy x -> y[r] as CAST }
  for s in 0 ..< P - 1 {
    each r { put y[(r - s) % P] -> y[(r - s) % P] @ (r + 1) % P }
  }
}
"""
"""What is rounded at home, and goes on as it came."""

HOPS = """schedule hops for P ranks where P >= 2 {
  input x[P blocks]
  output y
  scratch t[P]
  ensure reduce_scatter(x -> y) rounded(CAST, P - 1)

  each r, c in 0 ..< P { copy x[c] -> t[c] }
  for s in 0 ..< P - 1 {
    each r { reduce t[(r - s - 1) % P] -> t[(r - s - 1) % P] @ (r + 1) % P as CAST }
  }
  each r { copy t[r] -> y }
}
"""
"""Sums that are rounded at every hop."""

OWN = """schedule own for P ranks where P >= 2 {
  inout x[P blocks]
  ensure allgather(x) rounded(CAST, 1)

  each r { copy x[r] -> x[r] as CAST }
  each r, q where q != r { put x[r] -> x[r] @ q }
}
"""
"""What is rounded where it lies, so that all have the same bits."""

CASTS = [Cast("float8", 16), Cast("float8", 128), Cast("float8", 512), Cast("bfloat16"), Cast("float16")]


def compiled(text: str, ranks: int, cast: Cast | None = None, **tune: int) -> compiler.CompiledSchedule:
    if cast is not None:
        text = text.replace("(CAST", f"({cast.element}").replace("CAST", cast.words)
    made = compiler.compile(compiler.read_text(text, "casts.comm", Path()), ranks=ranks, tune=tune)
    assert isinstance(made, compiler.CompiledSchedule)
    return made


def numbers(size: int, seed: int) -> np.ndarray:
    """Of many magnitudes, as gradients are."""
    random = np.random.default_rng(seed)
    return (random.standard_normal(size) * np.exp(4 * random.standard_normal(size))).astype(np.float32)


# --- how often --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "times"), [(RING, 1), (HOPS, 4), (SHIPPED["allreduce_float8"], 2)])
def test_counted(text: str, times: int) -> None:
    """The most rounded contribution is counted along the moves: a hop that goes on as it came adds nothing."""
    schedule = compiled(text, 5, CASTS[1]).schedule
    located = Located(schedule)
    assert int(roundings(located)[located.contract_dests(schedule.contracts[0])].max()) == times


def test_same_bits_on_every_rank() -> None:
    """An all-reduce whose owner keeps the sum as it was has other bits there than elsewhere, which the report knows."""
    text = SHIPPED["allreduce_float8"]
    assert same_bits(Located(compiled(text, 4).schedule))
    kept = compiled(text.replace("i in 0 ..< P", "i in 1 ..< P"), 4)
    assert not same_bits(Located(kept.schedule))
    assert "ranks may differ by a rounding to float8" in "\n".join(cost_lines(kept.report))


def test_other_bits_where_nothing_is_added_up() -> None:
    """So has an all-gather whose owner keeps its block as it was."""
    text = OWN.replace("  each r { copy x[r] -> x[r] as CAST }\n", "").replace("-> x[r] @ q", "-> x[r] @ q as CAST")
    assert not same_bits(Located(compiled(text, 4, CASTS[1]).schedule))
    assert same_bits(Located(compiled(OWN, 4, CASTS[1]).schedule))


# --- the oracle -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", CASTS, ids=lambda cast: cast.words)
def test_rounded_as_torch_does(cast: Cast) -> None:
    """A value over its scale, the least power of two that leaves none above 448, is rounded as torch rounds it."""
    torch = pytest.importorskip("torch")
    values = numbers(1300, 5)
    if not cast.stretch:
        wanted = torch.from_numpy(values).to(getattr(torch, cast.element)).float().numpy()
        assert np.array_equal(rounded(values, cast), wanted)
        return
    for first in range(0, len(values), cast.stretch):
        part = torch.from_numpy(values[first : first + cast.stretch])
        scale = 2.0 ** math.ceil(math.log2(float(part.abs().max()) / 448))
        wanted = (part / scale).to(torch.float8_e4m3fn).float() * scale
        assert np.array_equal(rounded(values, cast)[first : first + cast.stretch], wanted.numpy())


def test_edges() -> None:
    """Zeros stay zeros and keep their sign; an infinity is a NaN and no scale; what is tiny beside its neighbours is
    lost, alone it is not; what has no more digits than float8 stays, up to the largest that does.
    """
    cast = Cast("float8", 16)
    values = np.zeros(48, np.float32)
    whole = np.ldexp(np.float32(1.75), np.arange(112, 128)).astype(np.float32)
    assert np.array_equal(rounded(whole, cast), whole)
    values[:4] = [np.inf, 2.0, -0.0, np.nan]
    values[16:18] = [448.0, -1e-4]
    values[32] = 1e-38
    found = rounded(values, cast)
    assert np.isnan(found[[0, 3]]).all()
    assert found[1] == 2.0
    assert np.signbit(found[2])
    assert (found[16], found[17]) == (448.0, 0.0)
    assert np.isclose(found[32], 1e-38, rtol=1 / 16)
    assert not found[33:].any()


@pytest.mark.parametrize("ranks", [2, 5])
def test_error(ranks: int) -> None:
    """Against float64: each rounding is by at most 1/16 of a number or 2 ** -17 of the largest of its 128, so a sum of
    numbers is off by that much of their magnitudes, and once more of itself.
    """
    x = [numbers(5000, rank) for rank in range(ranks)]
    schedule = compiled(SHIPPED["allreduce_float8"], ranks).schedule
    found = run(schedule, {"x": x}, BY_NAME["float32"], "sum").outputs["x"]
    exact, magnitude = np.sum(x, axis=0, dtype=np.float64), np.sum(np.abs(x), axis=0, dtype=np.float64)
    floor = 2.0**-17 * magnitude.max()
    bound = magnitude / 16 + (np.abs(exact) + magnitude / 16) / 16 + 2 * ranks * floor
    assert all((np.abs(values - exact) <= bound).all() for values in found)
    assert all(np.array_equal(values, found[0]) for values in found)


def test_error_of_gaussians() -> None:
    """Of normal numbers a sum is off by 3.9 % of itself, root mean square, a gathered block by 2.6 %."""
    x = [np.random.default_rng(rank).standard_normal(20000).astype(np.float32) for rank in range(2)]
    for name, exact, percent in (
        ("allreduce_float8", np.sum(x, axis=0, dtype=np.float64), 3.9),
        ("allgather_float8", np.concatenate(x), 2.6),
    ):
        outputs = run(compiled(SHIPPED[name], 2).schedule, {"x": x}, BY_NAME["float32"], "sum").outputs
        (found, *_) = next(iter(outputs.values()))
        relative = np.linalg.norm(found - exact) / np.linalg.norm(exact)
        assert abs(100 * relative - percent) < 0.3


# --- Plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "dtype", "cast"),
    [
        (SHIPPED["allreduce_float8"], "bfloat16", None),
        (SHIPPED["allgather_float8"], "float16", None),
        (RING, "float32", CASTS[3]),
        (HOPS, "bfloat16", CASTS[0]),
        (OWN, "float32", CASTS[1]),
    ],
    ids=["allreduce", "allgather", "ring", "hops", "own"],
)
def test_run(text: str, dtype: str, cast: Cast | None) -> None:
    """Host ranks leave what the oracle does, bit for bit, in any length, in tiles of any number."""
    made = compiled(text, 3, cast, lanes=2, tile=8192)
    for size in (6 * 5003, 6):
        assert trial(made, Settings(size * BY_NAME[dtype].size, dtype, None, False, False)).fault == ""


def test_average_and_races() -> None:
    """An average is weighed as elsewhere; ThreadSanitizer sees no race."""
    made = compiled(SHIPPED["allreduce_float8"], 2, lanes=2)
    assert trial(made, Settings(6000, "float32", "avg", False, False)).fault == ""
    assert trial(made, Settings(6000, "float32", "sum", True, False)).fault == ""


def _forms(plan: Plan) -> Iterator[Plan]:
    """Every Plan with one other form."""
    casts = plan.moves.casts
    assert casts is not None
    for side in ("dest", "source"):
        table = getattr(casts, side)
        for at in range(len(table)):
            for form in set(Form) - {Form(int(table[at]))}:
                other = table.copy()
                other[at] = form
                yield changed(plan, casts=replace(casts, **{side: other}))


def test_every_other_form() -> None:
    """A form that is another one is refused, or it makes no difference."""
    made = compiled(SHIPPED["allreduce_float8"], 2)
    x = {"x": [numbers(500, rank) for rank in range(2)]}
    proved = [plan for plan in _forms(made.plan) if _accepted(made, plan)]
    wanted = run(made.schedule, x, BY_NAME["float32"], "sum").outputs
    assert len(proved) < 4
    for plan in proved[:1]:
        found = host_run.run(plan, emit(plan), x, BY_NAME["float32"], "sum").outputs
        assert all(np.array_equal(found[name][rank], wanted[name][rank]) for name in wanted for rank in range(2))


def _accepted(made: compiler.CompiledSchedule, plan: Plan) -> bool:
    try:
        verify(plan)
    except InternalError:
        return False
    return not check_plan(made.schedule, plan)


def test_what_it_takes() -> None:
    """A summing rank rounds what it has itself where it reads it, and stores its sum rounded, with no pass more."""
    made = compiled(SHIPPED["allreduce_float8"], 2)
    assert len(made.plan.moves.ops.leaders) == 2 * 3
    assert "x[0] @ 0 rounded, cell" in plan_text(made.plan)
    assert "as float8 by 128" in plan_text(made.plan)
    assert "reduce list as float8 by 128" in ir_text(made.schedule)


def test_cubin() -> None:
    """NVRTC takes it, built for one rank."""
    made = compiled(SHIPPED["allgather_float8"], 2)
    macros = defines(made.plan, "bfloat16", "sum", 1)
    assert macros == ("COMMDSL_DTYPE=bfloat16", "COMMDSL_RANK=1")
    assert nvrtc.build(made.emitted, macros, from_environment()).read_bytes().startswith(b"\x7fELF")


# --- calls on host ranks ----------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above
from commdsl.runtime import menu  # noqa: E402 - as above
from commdsl.runtime.errors import TensorError  # noqa: E402 - as above


def test_calls() -> None:
    """`wire="float8"` is the op with the oracle's bits; its gradient is compressed, too."""
    x = [torch.from_numpy(numbers(1000, rank)) for rank in range(2)]
    wanted = _outputs("allreduce_float8", x), _outputs("allgather_float8", x)

    def body(rank: int, group: str) -> None:
        given = x[rank].clone().requires_grad_()
        total = commdsl.all_reduce(given, group=group, wire="float8")
        assert torch.equal(total, wanted[0])
        total.backward(torch.full_like(total, 3.0))
        assert given.grad is not None
        assert torch.equal(given.grad, torch.full_like(given, 6.0))
        assert torch.equal(commdsl.all_gather(x[rank], group=group, wire="float8"), wanted[1])

    in_group(2, body)


def _outputs(name: str, x: list[Any]) -> Any:
    schedule = compiled(SHIPPED[name], 2).schedule
    outputs = run(schedule, {"x": [one.numpy() for one in x]}, BY_NAME["float32"], "sum").outputs
    return torch.from_numpy(next(iter(outputs.values()))[0])


def test_tuned_as_measured() -> None:
    """What `wire="float8"` runs is the shipped schedule, the sum of it on more threads than the file's own."""
    found = {}
    for collective in ("all_reduce", "all_gather"):
        moves = menu.compressed(collective, "float8", 2).program(2).plan.moves
        found[collective] = (moves.name, moves.lanes, moves.threads)

    assert found == {"all_reduce": ("allreduce_float8", 128, 512), "all_gather": ("allgather_float8", 128, 256)}


def test_refused() -> None:
    """What cannot travel so is said, and nothing is sent."""

    def body(rank: int, group: str) -> None:
        with pytest.raises(TensorError, match=r"rounds float32, float16, bfloat16 to float8 by 128, not torch\.int32"):
            commdsl.all_reduce(torch.ones(8, dtype=torch.int32), group=group, wire="float8")
        with pytest.raises(TensorError, match="travels as it is, or as `float8`, not as `float4`"):
            commdsl.all_reduce(torch.ones(8), group=group, wire="float4")

    in_group(2, body)
