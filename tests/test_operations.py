"""Several operations in one schedule: a `reduce` that says how it combines does so, whatever the call asks for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from plans import changed

import commdsl
from commdsl import compiler
from commdsl.build import host_run, nvrtc
from commdsl.build.emit import defines
from commdsl.checks import check_plan
from commdsl.commands.arguments import UsageError
from commdsl.commands.trial import Settings, trial
from commdsl.ir.backward import backward
from commdsl.language.diagnostics import InternalError
from commdsl.machine.config import from_environment
from commdsl.machine.dtypes import BFLOAT16, FLOAT32, INT32, Array, DType
from commdsl.machine.resources import data_dir
from commdsl.program.moves import KIND_OF, OpKind
from commdsl.program.verify import verify

STATISTICS = data_dir("schedules") / "statistics" / "allreduce_statistics.comm"
RANKS = 3

NAMED = """schedule spread for P ranks where P >= 2 {
  inout least
  inout most
  scratch t[P]
  ensure allreduce(least) by min
  ensure each r { most == max(most @ all) }

  each r, q where q != r { put most -> t[r] @ q }
  each r { reduce least @ all -> least by min }
  each r { reduce t[q] for q in 0 ..< P if q != r -> t[r] by max }
  each r { reduce t[r] -> most by max }
}
"""
"""All by name: a list, part of a list, and what is there already."""

CALLED = """use "collectives/allreduce_twoshot.comm"
use "collectives/allreduce_ring.comm"

schedule both for P ranks where P >= 2 {
  inout x[P]
  inout most[P]
  inout product[P]
  ensure allreduce(x)
  ensure allreduce(most) by max
  ensure allreduce(product) by prod

  do allreduce_twoshot(x)
  do allreduce_ring(most) by max
  do allreduce_twoshot(product) by prod
}
"""

ROUNDED = """schedule rounded for P ranks where P >= 2 {
  inout total
  inout most
  ensure allreduce(total) rounded(bfloat16, 1)
  ensure allreduce(most) by max rounded(bfloat16, 1)

  each r { reduce total @ all -> total as bfloat16  reduce most @ all -> most by max as bfloat16 }
}
"""


INSTEAD = """schedule instead for P ranks where P >= 2 {
  input x
  output y
  output z
  ensure allreduce(x -> y)
  ensure allreduce(x -> z) by prod

  each r { reduce x @ all -> y by prod }
  each r { copy y -> z }
  each r { reduce x @ all -> y }
}
"""
"""Of the same chunks first the product, then what the call asks for."""


def compiled(text: str | Path, ranks: int = RANKS, **tune: str) -> compiler.CompiledSchedule:
    files = compiler.read(text) if isinstance(text, Path) else compiler.read_text(text, "drawn.comm", Path())
    made = compiler.compile(files, ranks=ranks, tune=tune)
    assert isinstance(made, compiler.CompiledSchedule)
    return made


def random(made: compiler.CompiledSchedule, dtype: DType) -> dict[str, list[Array]]:
    """Some numbers of every buffer, a NaN among those of one rank."""
    dice, found = np.random.default_rng(0), dict[str, list[Array]]()
    for buffer in made.schedule.buffers:
        if buffer.kind.value == "inout":
            found[buffer.name] = [
                dtype.from_float32(dice.normal(size=999).astype(np.float32) * 9) for _ in range(RANKS)
            ]
            if dtype.is_float:
                found[buffer.name][1][7] = dtype.from_float32(np.array([np.nan], np.float32))[0]
    return found


@pytest.mark.parametrize(
    ("protocol", "dtype", "op", "bound"),
    [("bulk", FLOAT32, "avg", 1e-6), ("packet", BFLOAT16, "sum", 2**-7), ("line", INT32, "max", 0)],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_statistics(protocol: str, dtype: DType, op: str, bound: float) -> None:
    """Beside what the call asks for stand minima and maxima, as numpy has them of float64; a NaN stays one."""
    made = compiled(STATISTICS, protocol=protocol)
    inputs = random(made, dtype)
    got = host_run.run(made.plan, made.emitted, inputs, dtype, op, calls=2).outputs
    for name, how in (
        ("total", {"sum": np.sum, "avg": np.mean, "max": np.max}[op]),
        ("least", np.min),
        ("most", np.max),
    ):
        wide = np.stack([dtype.widen(one).astype(np.float64) for one in inputs[name]])
        want = how(wide, axis=0)
        slack = bound * np.abs(wide).sum(axis=0) if name == "total" else 0
        for rank in range(RANKS):
            found = dtype.widen(got[name][rank]).astype(np.float64)
            assert np.array_equal(np.isnan(found), np.isnan(want))
            assert (np.nan_to_num(np.abs(found - want)) <= np.nan_to_num(slack)).all()


@pytest.mark.parametrize(
    ("text", "op"),
    [(NAMED, None), (CALLED, "avg"), (ROUNDED, "sum"), (INSTEAD, "max")],
    ids=["named", "called", "cast", "instead"],
)
def test_kernel_equals_oracle(text: str, op: str | None) -> None:
    """All named, named by who calls, and of what is rounded on its way: to the bit."""
    found = trial(compiled(text), Settings(1024, "float32", op, sanitize=False, processes=False))
    assert found.fault == ""


def test_no_operation_is_left_to_a_call() -> None:
    """Where all are named the kernel is built for no operation, and no call names one; nor has it a gradient."""
    made = compiled(NAMED)
    assert defines(made.plan, "float32", "sum") == ("COMMDSL_DTYPE=float32",)
    with pytest.raises(UsageError, match="says itself how it combines"):
        trial(made, Settings(1024, "float32", "max", sanitize=False, processes=False))
    assert backward(made.schedule) is None


def test_an_op_takes_none(tmp_path: Path) -> None:
    """Its torch op has no argument for it, and says why."""
    path = tmp_path / "spread.comm"
    path.write_text(NAMED, encoding="utf-8")
    op = commdsl.load(path, ranks=2)
    assert not op.has_reduction
    assert "op=" not in str(getattr(torch.ops.commdsl, op.name).default._schema)
    with pytest.raises(commdsl.ReductionError, match="says itself how it combines"):
        op._dispatch(op.name, (torch.ones(4), torch.ones(4)), None, commdsl.runtime.given.asked("max", None, None))


def test_every_other_kind_is_refused() -> None:
    """A Plan that combines by another operation than its schedule, or as the call asks, does not compute it."""
    made = compiled(STATISTICS, 2)
    kinds = made.plan.moves.ops.kind
    for at in np.flatnonzero(~np.isin(kinds, (OpKind.COPY, OpKind.HOLD))).tolist():
        for other in {OpKind.REDUCE, *KIND_OF.values()} - {OpKind(int(kinds[at]))}:
            changed_kinds = kinds.copy()
            changed_kinds[at] = other
            mutant = changed(made.plan, ops=replace(made.plan.moves.ops, kind=changed_kinds))
            try:
                verify(mutant)
            except InternalError:
                continue
            assert check_plan(made.schedule, mutant), (at, other)


@pytest.mark.sweep
@pytest.mark.parametrize(("text", "protocol"), [(STATISTICS, "packet"), (STATISTICS, "tma"), (ROUNDED, "bulk")])
def test_cubin(text: str | Path, protocol: str) -> None:
    """NVRTC takes it in the protocols whose reductions are code of their own."""
    made = compiled(text, protocol=protocol)
    built = nvrtc.build(made.emitted, defines(made.plan, "bfloat16", "avg"), from_environment())
    assert built.read_bytes().startswith(b"\x7fELF")
