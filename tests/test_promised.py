"""Runs are held to the words of `ensure`: right ones keep every contract, and a wrong interpreter is found out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from commdsl import compiler
from commdsl.build import host
from commdsl.checks import check_schedule
from commdsl.commands import trial
from commdsl.commands.cli import run_command
from commdsl.compiler import CompiledSchedule
from commdsl.ir import interpret
from commdsl.ir.schedules import Schedule, Statement, Step
from commdsl.language.diagnostics import Severity
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine import resources
from commdsl.machine.dtypes import REDUCED

COLLECTIVES = sorted(path.stem for path in (resources.data_dir("schedules") / "collectives").glob("*.comm"))
ROTATIONS = sorted(path.stem for path in (resources.data_dir("schedules") / "attention").glob("*.comm"))
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter alone: what it leaves is held to `ensure`, and no kernel is built."""

    def none(*_: object, **__: object) -> None:
        raise host.NoHostCompilerError("none here")

    monkeypatch.setattr(host, "find_compiler", none)
    monkeypatch.setattr(trial.host_run, "run", none)
    monkeypatch.setattr(trial.host_run, "run_calls", none)


def tried(schedule: CompiledSchedule, dtype: str = "float32", op: str | None = None, size: int = 2000) -> trial.Trial:
    return trial.trial(schedule, trial.Settings(size, dtype, op, sanitize=False, processes=False))


def compiled(text: str, ranks: int, **params: int) -> CompiledSchedule:
    made = compiler.compile(compiler.read_text(text, "s.comm", Path()), ranks=ranks, params=params)
    assert isinstance(made, CompiledSchedule)
    return made


def shipped(name: str) -> CompiledSchedule:
    """For the first number of ranks, from five up, that it is for."""
    path = resources.shipped_file(name)
    assert path is not None
    files = compiler.read(path)
    (decl,) = (one for one in compiler.declarations(files) if isinstance(one, ScheduleDecl) and one.name.text == name)
    for ranks in (5, 6, 8, 4, 2):
        try:
            made = compiler.compile(files, name, ranks)
        except compiler.CommError as error:
            if {one.code for one in error.diagnostics} <= {"C501", "C404"}:
                continue
            raise
        assert isinstance(made, CompiledSchedule)
        return made
    raise AssertionError(f"{decl.name.text} is for none of these ranks")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_are_what_their_words_say(name: str) -> None:
    """Every contract of every shipped collective is evaluated, on every rank that it speaks of."""
    found = tried(shipped(name))
    assert (found.fault, found.promised.unknown) == ("", ())
    assert found.promised.compared_bytes > 0


@pytest.mark.parametrize("dtype", [one.name for one in REDUCED])
@pytest.mark.parametrize("name", ["allreduce_ring", "allreduce_oneshot", "reducescatter_ring"])
def test_every_type_and_operation(name: str, dtype: str) -> None:
    """Whatever is combined, by whichever operation, is within what rounding may change, integers exactly."""
    schedule = shipped(name)
    for op in next(one for one in REDUCED if one.name == dtype).ops:
        found = tried(schedule, dtype, op)
        assert (op, found.fault) == (op, "")
        assert found.promised.compared_bytes > 0


@pytest.mark.parametrize("name", ROTATIONS)
def test_rotations_are_told_apart_by_what_they_hold(name: str) -> None:
    """Every rank is handed what the contract says; of what comes back nobody but the functions knows."""
    found = tried(shipped(name))
    assert found.fault == ""
    assert found.promised.compared_bytes > 0
    assert all("of the caller" in why for why in found.promised.unknown)


@pytest.mark.parametrize("name", ["allreduce_statistics", "add_reduce_scatter", "allgather_float8", "allreduce_float8",
                                  "allgather_uneven", "alltoall_uneven", "reducescatter_uneven"])  # fmt: skip
def test_other_contracts_are_evaluated(name: str) -> None:
    """Written equalities, casts, tasks of ours, and blocks that have lengths of their own."""
    found = tried(shipped(name))
    assert (found.fault, found.promised.unknown) == ("", ())
    assert found.promised.compared_bytes > 0


COMPUTED = sorted(path.stem for path in (resources.data_dir("schedules") / "overlap").glob("*.comm"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", COMPUTED)
def test_functions_are_evaluated(name: str, dtype: str) -> None:
    """Every contract of every shipped schedule that computes is evaluated, with each of its endings."""
    compared = 0
    for params in ({}, {"B": 1}, {"B": 1, "R": 1}, {"B": 1, "A": 1}, {"B": 1, "A": 2}):
        known = compiler.read(resources.shipped_file(name) or Path())
        (decl,) = (one for one in compiler.declarations(known) if one.name.text == name)
        if params.keys() <= {one.name.text for one in getattr(decl, "params", ())}:
            made = compiler.compile(known, name, 3, params=params)
            assert isinstance(made, CompiledSchedule)
            found = tried(made, dtype)
            assert (found.fault, found.promised.unknown) == ("", ())
            compared += found.promised.compared_bytes
    assert compared > 0


@pytest.mark.parametrize(("dtype", "op"), [("int32", "sum"), ("int32", "max"), ("bool", "sum"), ("float32", "avg")])
def test_functions_of_other_types(dtype: str, op: str) -> None:
    """Integers as they wrap, truth values, and whatever the call combines by."""
    found = tried(shipped("add_reduce_scatter"), dtype, op)
    assert (found.fault, found.promised.unknown) == ("", ())
    assert found.promised.compared_bytes > 0


FINISHED = """schedule finished for P ranks where P >= 2 {
  input x
  input w
  input b
  input t
  output y
  ensure each r { y == matmul(x, w) with bias b, gelu, residual t }
  each r { compute matmul(x, w -> y) with bias b, gelu, residual t }
}
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("change", ["bias", "activation", "residual", "factor", "last bits"])
def test_a_wrong_function_is_found_out(change: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter without an ending, or with another factor, or off by more than rounding, breaks the contract."""
    product = interpret.product

    def wrong(
        activation: str | None,
        operands: list[np.ndarray],
        factor: np.ndarray,
        beside: tuple[np.ndarray | None, np.ndarray | None],
        *more: object,
    ) -> np.ndarray:
        bias, residual = beside
        activation = None if change == "activation" else activation
        bias, residual = (None if change == "bias" else bias), (None if change == "residual" else residual)
        made = product(activation, operands, factor[::-1] if change == "factor" else factor, (bias, residual), *more)
        return made + (made.dtype.type(2) if made.dtype.kind == "u" else made * 1e-6) if change == "last bits" else made

    schedule = compiled(FINISHED, 2)
    assert tried(schedule, dtype).fault == ""
    monkeypatch.setattr(interpret, "product", wrong)
    assert "is not what `general` promises" in tried(schedule, dtype).fault


VISITED = """schedule visited for P ranks where P >= 2 {
  input x
  scratch t like x
  output y
  ensure permutation(t -> y) r -> (r + 1) % P
  yield change(x -> t)
  each r { put t -> y @ (r + 1) % P }
}
"""


def test_what_cannot_be_evaluated_is_said(tmp_path: Path, capsys: Capture) -> None:
    """A contract about what a function of the caller makes is named, and claimed by nobody."""
    found = tried(compiled(VISITED, 3))
    assert found.promised.compared_bytes == 0
    assert found.promised.unknown
    path = tmp_path / "visited.comm"
    path.write_text(VISITED)
    assert run_command(["run", str(path), "--ranks", "3", "--bytes", "2000"]) == 0
    out = capsys.readouterr().out
    assert "not evaluated: `" in out
    assert "evaluated by its words" not in out


# --- a wrong interpreter ----------------------------------------------------------------------------------------------


def mutants(schedule: Schedule) -> Iterator[Schedule]:
    """Without a step that moves, with one twice, and with a statement that takes or puts other chunks."""
    steps = schedule.steps
    for at, step in enumerate(steps):
        if isinstance(step, Step):
            yield replace(schedule, steps=(*steps[:at], *steps[at + 1 :]))
            yield replace(schedule, steps=(*steps[: at + 1], *steps[at:]))
            for number, moves in enumerate(step.moves):
                for changed in _changed(schedule, moves):
                    others = (*step.moves[:number], changed, *step.moves[number + 1 :])
                    yield replace(schedule, steps=(*steps[:at], replace(step, moves=others), *steps[at + 1 :]))


def _changed(schedule: Schedule, moves: Statement) -> Iterator[Statement]:
    source, dest = schedule.buffers[moves.source_buffer], schedule.buffers[moves.dest_buffer]
    yield replace(moves, source_rank=(moves.source_rank + 1) % schedule.num_ranks)
    if source.num_chunks > 1:
        yield replace(moves, source_chunk=(moves.source_chunk + 1) % source.num_chunks)
    if dest.num_chunks > 1 and len(np.unique(moves.dest_rank)) == len(moves.dest_rank):
        yield replace(moves, dest_chunk=(moves.dest_chunk + 1) % dest.num_chunks)


@pytest.mark.parametrize("name", COLLECTIVES + [one for one in ROTATIONS if one.startswith("rotation")])
def test_a_wrong_interpreter_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an interpreter that moves something else, every result that the checker calls wrong is seen, and no other."""
    right = shipped(name)
    run, seen = interpret.run, 0
    for mutant in mutants(right.schedule):
        found = {one.code for one in check_schedule(mutant) if one.severity is Severity.ERROR}
        if not found <= {"C306", "C307", "C308", "C309", "C310", "C311"}:
            continue  # it reads what is not there, or writes one place twice
        monkeypatch.setattr(interpret, "run", lambda _, *given, of=mutant: run(of, *given))
        fault = tried(right, size=400).fault
        assert bool(fault) == bool(found & {"C306", "C307", "C308", "C309"}), (found, fault)
        seen += bool(fault)
    assert seen > 0


def test_a_wrong_element_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The command exits 3 and says which element is wrong, what it is and what was expected."""
    run = interpret.run

    def wrong(*given: object) -> interpret.Result:
        result = run(*given)
        result.outputs["x"][1][7] += 1
        return result

    monkeypatch.setattr(interpret, "run", wrong)
    assert run_command(["run", "allreduce_ring", "--ranks", "2", "--bytes", "64"]) == 3
    out = capsys.readouterr().out
    assert "`x` on rank 1 is not what `allreduce` promises: element 7 is " in out
    assert "1 of 8 are wrong" in out


GENERAL = """schedule general for P ranks where P >= 3 {
  input x[P blocks]
  output y[P blocks]
  output z
  ensure each r, i in 0 ..< P where i != r {
    y[i] == x[r] @ i
  }
  ensure each r { z == sum(x[r] @ q for q in 0 ..< P if q != r) }
  each r, i in 0 ..< P where i != r { put x[i] -> y[r] @ i }
  each r { reduce x[r] @ q for q in 0 ..< P if q != r -> z }
}
"""


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "avg"])
def test_written_equalities(op: str) -> None:
    """Equalities are evaluated with their conditions; what no contract mentions is free."""
    found = tried(compiled(GENERAL, 4), op=op, size=256)
    assert (found.fault, found.promised.unknown) == ("", ())
    assert found.promised.compared_bytes == 4 * 3 * 64 + 4 * 64


UNLIKE = """schedule unlike for P ranks where P >= 2 {
  input a
  input b
  input c
  output y
  ensure each r { y == sum(a, b @ (r - 1) % P, c) }
  each r { copy a -> y }
  each r { reduce b -> y @ (r + 1) % P }
  each r { reduce c -> y }
}
"""


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod", "avg"])
def test_sums_of_unlike_terms(op: str) -> None:
    """Chunks of several buffers are combined as the call says; a mean divides by the number of terms."""
    found = tried(compiled(UNLIKE, 3), op=op, size=400)
    assert (found.fault, found.promised.unknown) == ("", ())
    assert found.promised.compared_bytes == 3 * 400


def test_chunks_that_look_alike_are_not_claimed() -> None:
    """Truth values of one byte are not told apart, and it is said."""
    found = tried(shipped("rotation_ring"), dtype="bool", size=1)
    assert found.fault == ""
    assert found.promised.unknown == ("`rotation` of `kv`: some of its chunks hold the same bytes",)
