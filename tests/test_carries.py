"""A Plan of rows is held to its dispatch: what is sent, finished, copied, counted or weighted otherwise is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from commdsl import compiler
from commdsl.checks import check_carried
from commdsl.compiler import CheckedDispatch
from commdsl.ir.dispatches import Often
from commdsl.language.diagnostics import InternalError
from commdsl.language.syntax import DispatchDecl
from commdsl.machine.resources import data_dir
from commdsl.program.memory import Transport
from commdsl.program.phases import Count, FillByKey, Finish, FinishBack, Push, PushAgain, PushBack, PushByKey
from commdsl.program.plan import Phase, Plan

FOLDERS = [data_dir("schedules") / name for name in ("dispatch", "ep")]
SHIPPED = sorted(path for one in FOLDERS for path in one.glob("*.comm") if "\ndispatch " in path.read_text("utf-8"))


def checked(path: Path, put: str = "rows", transport: Transport = Transport.PEER) -> Iterator[CheckedDispatch]:
    files = compiler.read(path)
    for decl in compiler.declared(files, DispatchDecl):
        tune = {} if path.parent.name == "ep" else {"put": put}
        found = compiler.check(files, decl.name.text, 4, tune=tune, transport=transport)
        assert isinstance(found, CheckedDispatch)
        yield found


def plans(held: CheckedDispatch) -> list[Plan]:
    return [plan for plan in (held.plan, held.back, held.values, held.again) if plan is not None]


@pytest.mark.parametrize("transport", Transport)
@pytest.mark.parametrize("put", ["rows", "packed"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped(path: Path, put: str, transport: Transport) -> None:
    """Every shipped dispatch is carried as it says, by either put and transport."""
    for held in checked(path, put, transport):
        assert [check_carried(held.dispatch, plan) for plan in plans(held)] == [()] * len(plans(held))


def changes(phase: Phase) -> Iterator[Phase | None]:
    """Each way in which one phase does something else with rows; None: it is not there."""
    match phase:
        case Push(given=given, to=to, copied=copied):
            yield replace(phase, copied=tuple(not one for one in copied))
            yield replace(phase, to=to[1:])
            if len(given) > 1:
                yield replace(phase, given=given[::-1])
            yield None
        case Finish(waiting, to):
            yield None
            yield replace(phase, waiting=waiting[1:])
            if len(to) > 1:
                yield replace(phase, to=to[::-1])
        case Count(positions=positions) | PushAgain(positions=positions) | FinishBack(positions=positions):
            yield replace(phase, positions=positions[::-1])
            yield replace(phase, positions=(positions[0],) * len(positions))
            yield replace(phase, keys=replace(phase.keys, name="other"))
            if isinstance(phase, PushAgain):
                left = (phase.places, phase.origins, phase.offsets, phase.counts)
                for at, name in enumerate(("places", "origins", "offsets", "counts")):
                    yield replace(phase, **{name: left[at - 1]})
                yield from goes_otherwise(phase)
            if isinstance(phase, FinishBack):
                yield None
                yield replace(phase, weights=phase.keys)
                yield replace(phase, weights=None if phase.weights is not None else phase.keys)
                yield replace(phase, waiting=phase.to)
        case PushByKey(to=to):
            yield replace(phase, to=to[::-1])
            yield replace(phase, keys=to[0])
            if phase.value is not None:
                yield replace(phase, value=None)
                yield replace(phase, value=phase.keys)
            yield replace(phase, stretches=tuple(32 if stretch == 0 else 0 for stretch in phase.stretches))
            yield replace(phase, stretches=tuple(2 * stretch or 16 for stretch in phase.stretches))
            yield from goes_otherwise(phase)
        case FillByKey(to=to):
            yield None
            yield replace(phase, to=to[1:])
            yield replace(phase, mates=phase.origins)
            yield replace(phase, origins=phase.mates)
        case PushBack():
            yield replace(phase, given=phase.origins)
            yield replace(phase, origins=phase.offsets)
            yield replace(phase, offsets=phase.origins)
            yield replace(phase, mates=phase.origins if phase.mates is None else None)
            yield replace(phase, weights=phase.origins if phase.weights is None else None)
            yield None
        case _:
            pass


def goes_otherwise(phase: PushByKey | PushAgain) -> Iterator[Phase | None]:
    """More often or less, or to other places; or not at all."""
    yield from (replace(phase, often=often) for often in Often if often is not phase.often)
    yield replace(phase, aligned=phase.aligned + 1)
    yield None


@pytest.mark.parametrize("put", ["rows", "packed"])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_change_is_refused(path: Path, put: str) -> None:
    """Whatever a phase does otherwise with rows, the Plan is not its dispatch's any more."""
    count = 0
    for held in checked(path, put):
        for plan in plans(held):
            for at, phase in enumerate(plan.comm.phases):
                for other in changes(phase):
                    phases = (*plan.comm.phases[:at], *(() if other is None else (other,)), *plan.comm.phases[at + 1 :])
                    roles = tuple(role if role.is_caller else replace(role, phases=phases) for role in plan.roles)
                    mutant = replace(plan, roles=roles)
                    assert is_refused(held, mutant), (phase, other)
                    count += 1

    assert count >= 4


def is_refused(held: CheckedDispatch, mutant: Plan) -> bool:
    try:
        return bool(check_carried(held.dispatch, mutant))
    except InternalError:  # a Plan without its push has none to ask
        return True
