"""What is found in one type is added to sums in float32: the law, the Plan, the kernel on host ranks, and for GPUs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commdsl import compiler
from commdsl.build import host_run, nvrtc
from commdsl.build.emit import defines, emit
from commdsl.ir import resolve
from commdsl.ir.classes import Unit, sums, units
from commdsl.ir.interpret import run
from commdsl.language.diagnostics import CommError, InternalError
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.config import from_environment
from commdsl.machine.dtypes import BY_NAME, Array
from commdsl.machine.topology import switch
from commdsl.program.launches import Visit
from commdsl.program.plan import Plan
from commdsl.program.verify import verify
from commdsl.program.visited import landing, launches, plan_of, segments, visits

FOUND = """schedule found for P ranks where P >= 2 {
  input k
  output dk float32 like k
  scratch kc
  scratch pk like k
  scratch ak
  ensure rotation(k -> kc) back dk

  yield attend(k -> dk)
  for s in 1 ..< P {
    each r { put k -> kc @ (r + s) % P }
    yield attend(kc -> pk)
    each r { put pk -> ak @ (r - s) % P }
    each r { reduce ak -> dk }
  }
}
"""
"""What a rank finds about the keys of others travels as they are, and its owner adds it."""


def compiled(text: str = FOUND, ranks: int = 3) -> compiler.CompiledSchedule:
    made = compiler.compile(compiler.read_text(text, "found.comm", Path()), ranks=ranks)
    assert isinstance(made, compiler.CompiledSchedule)
    return made


def additions(made: compiler.CompiledSchedule) -> list[Plan]:
    assert made.visits is not None
    return [plan_of(made.visits, moves) for moves in segments(made.visits) if moves.adds_up]


# --- what is meant ----------------------------------------------------------------------------------------------------


def test_a_sum_has_a_type_of_its_own() -> None:
    """It is as long as what is added, which keeps the type that it has; what has none takes that of the sum."""
    found = units(compiled().schedule)
    assert found["pk"] == found["ak"] == Unit("k", None, "k")
    assert found["dk"] == Unit("k", "float32", "")

    plain = compiled(FOUND.replace("scratch pk like k", "scratch pk"))
    assert units(plain.schedule)["ak"] == Unit("k", "float32", "")
    assert not sums(plain.schedule)
    assert not additions(plain)


def elements(text: str) -> dict[str, str | None]:
    """By buffer the type that is known of it; nothing is checked."""
    files = compiler.read_text(text, "found.comm", Path())
    schedule = resolve.resolve(files, compiler.choose_kind(files, None, ScheduleDecl), 3, switch(3), {})
    return {name: unit and unit.element for name, unit in units(schedule).items()}


HOME = "each r { put pk -> ak @ (r - s) % P }\n    each r { reduce ak -> dk }"
"""How what was found comes to the sum."""


@pytest.mark.parametrize(
    "home",
    [
        HOME.replace("reduce ak", "copy ak"),
        "each r { reduce pk -> dk @ (r - s) % P }",
        HOME.replace("reduce ak -> dk", "reduce ak @ (r + 1) % P -> dk"),
    ],
    ids=["copied", "to another rank", "from another rank"],
)
def test_nothing_else_changes_a_type(home: str) -> None:
    """What is moved, and what is combined between ranks, is float32 at once where the sum is."""
    assert elements(FOUND)["pk"] is None
    assert elements(FOUND.replace(HOME, home))["pk"] == "float32"


def test_pieces_change_no_type() -> None:
    """Blocks of two types are cut at different elements: only whole ones are added."""
    text = re.sub(r"(input|output|scratch) (\w+)", r"\1 \2[2]", FOUND)
    assert elements(text)["pk"] == "float32"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            FOUND.replace("pk like k", "pk bfloat16 like k").replace(HOME, "each r { reduce pk -> dk @ (r - s) % P }"),
            "bfloat16",
        ),
        (FOUND.replace("pk like k", "pk int32 like k"), "int32"),
        (FOUND.replace("dk float32", "dk bfloat16").replace("pk like k", "pk float32 like k"), "float32"),
    ],
    ids=["between ranks", "integers", "a narrower sum"],
)
def test_refused(text: str, told: str) -> None:
    """Types that are declared and differ are refused but where a rank adds floating numbers to float32 (C320)."""
    with pytest.raises(CommError, match=f"C320.*a move from {told}"):
        compiled(text)


# --- the Plan ---------------------------------------------------------------------------------------------------------


def test_a_sum_is_a_launch_of_its_own() -> None:
    """Behind the launch that brings what is added: nothing of it is in cells, it is written where it is, and where no
    visit computes beside it has all SMs.
    """
    plan = compiled().visits
    assert plan is not None
    names = [([one.name for one in launch.reads], [one.name for one in launch.writes]) for launch in launches(plan)]
    assert names == [(["k"], ["kc"]), (["k"], ["kc"]), *[(["pk"], ["ak"]), (["dk", "ak"], ["dk"])] * 2]
    adding = [launch for launch in launches(plan) if launch.moves.adds_up]
    assert [launch.reads[0] for launch in adding] == [launch.writes[0] for launch in adding]
    assert [launch.moves.num_cells for launch in adding] == [0, 0]
    assert [launch.moves.sms for launch in adding] == [16, 132]
    assert {launch.moved.name for launch in adding} == {"ak"}


def test_no_other_plan_is_legal() -> None:
    """A sum in a cell, of the type of what is added, or as long as something else."""
    plan = compiled().visits
    assert plan is not None
    (launch, *_) = (one for one in launches(plan) if one.moves.adds_up)
    verify(plan_of(plan, launch.moves))
    with pytest.raises(InternalError, match="in cells"):
        verify(with_moves(plan_of(plan, launch.moves), num_cells=1))
    for unit in (Unit("k", None, "k"), Unit("v", "float32", "")):
        wrong = replace(launch, reads=(replace(launch.reads[0], unit=unit), *launch.reads[1:]))
        roles = tuple(
            replace(role, phases=tuple(wrong if one is launch else one for one in role.phases)) for role in plan.roles
        )
        with pytest.raises(InternalError, match="type"):
            verify(replace(plan, roles=roles))


@pytest.mark.parametrize(
    ("text", "lands"),
    [
        (FOUND, {"kc"}),
        (
            """schedule late for P ranks where P >= 2 {
  input k
  output dk float32 like k
  scratch kc
  scratch pk like k
  scratch ak
  ensure rotation(k -> kc) back dk

  yield attend(k -> dk)
  for s in 1 ..< P {
    each r { put k -> kc @ (r + s) % P }
    yield attend(kc -> pk)
    if s > 1 { each r { reduce ak -> dk } }
    each r { put pk -> ak @ (r - s) % P }
  }
  each r { reduce ak -> dk }
}
""",
            {"kc", "ak"},
        ),
    ],
    ids=["added at once", "added while the next visits"],
)
def test_what_returns_lands_where_a_visit_is_over(text: str, lands: set[str]) -> None:
    """In the copy of keys that has visited, which is free until the next keys but one are put there; elsewhere where
    these come before it is added.
    """
    files = compiler.read_text(text, "found.comm", Path())
    plan = compiler.check(files, ranks=4, tune={"landing": "place"}).visits
    assert plan is not None
    assert {kept.name for kept in landing(plan)} == lands
    home = [launch.writes[0] for launch in launches(plan) if launch.reads[0].name == "pk"]
    visited = [visit.reads[0] for visit in visits(plan) if isinstance(visit, Visit) and visit.writes[0].name == "pk"]
    assert (home[:-1] == visited[:-1]) == ("ak" not in lands)  # behind the last visit either is free


def with_moves(plan: Plan, **changes: Any) -> Plan:
    moves = replace(plan.moves, **changes)
    return replace(plan, roles=tuple(replace(role, phases=(moves,)) for role in plan.roles))


# --- what it computes -------------------------------------------------------------------------------------------------


def numbers(dtype: str, size: int, seed: int) -> Array:
    values = np.random.default_rng(seed).standard_normal(size) * 3
    return BY_NAME[dtype].narrow(values.astype(BY_NAME[dtype].accumulator))


@pytest.mark.parametrize("size", [1, 37, 4096])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_the_kernel(dtype: str, size: int) -> None:
    """On host ranks, of any length and wherever tensors begin: what is added is widened, exactly where float32 holds
    it, and added in float32; in place as well. ThreadSanitizer is silent.
    """
    (plan, _) = additions(compiled())
    before = [np.random.default_rng(rank).standard_normal(size).astype(np.float32) for rank in range(3)]
    found = [numbers(dtype, size, 10 + rank) for rank in range(3)]
    wanted = [sum_ + BY_NAME[dtype].to_float32(part) for sum_, part in zip(before, found, strict=True)]
    for shift, in_place in ((0, False), (0, True), (8, True)):
        options = host_run.Options(sanitize=True, shift=shift, in_place=in_place)
        given = {"dk": before, "ak": found}
        (made,) = host_run.run_calls(plan, emit(plan), [given], BY_NAME[dtype], options=options)
        assert all(np.array_equal(one, other) for one, other in zip(made.outputs["dk"], wanted, strict=True))


def test_the_oracle() -> None:
    """The schedule as a whole sums in the order of the steps, in float32, what each rank found in bfloat16."""
    of, ranks, size = BY_NAME["bfloat16"], 3, 50
    keys = [numbers("bfloat16", size, rank) for rank in range(ranks)]
    found: list[list[Array]] = []

    def attend(rank: int, given: Sequence[Array]) -> Sequence[Array]:
        made = numbers("bfloat16", size, 100 + len(found))
        found.append([made])
        return [of.to_float32(made)] if len(found) <= ranks else [made]

    result = run(compiled().schedule, {"k": keys}, of, "sum", {"attend": attend})
    for rank in range(ranks):
        by_step = [found[step * ranks + (rank + step) % ranks][0] for step in range(ranks)]
        total = of.to_float32(by_step[0])
        for part in by_step[1:]:
            total = total + of.to_float32(part)
        assert np.array_equal(result.outputs["dk"][rank], total)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_cubin(dtype: str) -> None:
    """NVRTC takes the text, built for a rank."""
    (plan, _) = additions(compiled())
    cubin = nvrtc.build(emit(plan), defines(plan, dtype, "sum", rank=1), from_environment()).read_bytes()
    assert cubin.startswith(b"\x7fELF")
