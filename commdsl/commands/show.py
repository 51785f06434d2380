"""Turns a file into the text of one stage: what was written, what it means, what is launched, what is compiled.

Assumes nothing of the file; a fault found on the way is shown instead. Does not fold; `run` has the timeline. What a
dispatch plan means is a table and a picture; `show_plans` makes them, and `show_dispatches` the text of a dispatch.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Protocol, assert_never

from commdsl import compiler
from commdsl.commands import dumps, output
from commdsl.commands.arguments import Target, UsageError
from commdsl.commands.jobs import Job, Outcome, merge, only, plan_jobs, prove_all
from commdsl.commands.output import Exit
from commdsl.commands.show_dispatches import show_dispatches
from commdsl.language import diagnostics
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import File


class Stage(StrEnum):
    SYNTAX = "syntax"
    IR = "ir"
    PLAN = "plan"
    CUDA = "cuda"
    HOST = "host"


class Shown(Protocol):
    """A plan or a dispatch as text and as JSON."""

    @property
    def text(self) -> str: ...

    @property
    def json(self) -> dict[str, object]: ...

    @property
    def warnings(self) -> tuple[diagnostics.Diagnostic, ...]: ...


def show(
    path: Path, target: Target, schedule: str | None, stage: Stage, *, svg: Path | None = None, as_json: bool
) -> Exit:
    """Prints one stage of every schedule and dispatch of a file, for every number of ranks asked for, and its plans."""
    try:
        files = compiler.read(path)
        if stage is Stage.SYNTAX:
            text = dumps.syntax_text(files)
            output.say_json({"file": str(path), "stage": stage.value, "text": text}) if as_json else output.say(text)
            return Exit.FINE
        drawn = (*dispatches(files, path, target, schedule, stage), *plans(files, path, target, schedule, stage, svg))
        names_other = schedule is not None and bool(drawn)
        jobs = () if names_other else plan_jobs((path,), target, schedule)
    except CommError as error:
        return fail(error.diagnostics, as_json=as_json)
    if not drawn:
        only(jobs, "show")
    outcomes = tuple(prove_all(jobs, target, emit=stage in (Stage.CUDA, Stage.HOST)))
    failed = [outcome for outcome in outcomes if outcome.checked is None]
    if failed:
        return fail(merge(failed), as_json=as_json)
    texts = [(outcome.job, render(outcome, stage)) for outcome in outcomes]
    if as_json:
        output.say_json([*(to_json(job, stage, text) for job, text in texts), *(shown.json for shown in drawn)])
    else:
        output.say("\n".join([*(text.rstrip("\n") for _, text in texts), *(shown.text for shown in drawn)]))
        output.show_diagnostics((*merge(outcomes), *(warning for shown in drawn for warning in shown.warnings)))
    return Exit.FINE


def dispatches(
    files: tuple[File, ...], path: Path, target: Target, name: str | None, stage: Stage
) -> tuple[Shown, ...]:
    """The dispatches to show: that of the name, or all without one."""
    named = [decl.name.text for decl in compiler.dispatches(files) if name in (None, decl.name.text)]
    if not named:
        return ()
    return show_dispatches(files, path, target, named, stage.value)


def plans(
    files: tuple[File, ...], path: Path, target: Target, name: str | None, stage: Stage, svg: Path | None
) -> tuple[Shown, ...]:
    """The dispatch plans to show: that of the name, or all without one. They have no stage beyond `ir`."""
    named = [decl.name.text for decl in compiler.plans(files) if name in (None, decl.name.text)]
    if stage is Stage.IR and named:
        from commdsl.commands.show_plans import show_plans  # 25 ms that schedules do not need

        return show_plans(files, path, target, named, svg)
    if svg is not None:
        raise UsageError("--svg draws dispatch plans, and none is shown; `commdsl run --svg` draws a schedule")
    if named and (name is not None or not (compiler.schedules(files) or compiler.dispatches(files))):
        raise UsageError(f"a dispatch plan has the stages syntax and ir, not {stage.value}")
    return ()


def render(outcome: Outcome, stage: Stage) -> str:
    assert outcome.checked is not None
    match stage:
        case Stage.SYNTAX:
            return dumps.syntax_text(outcome.job.files)
        case Stage.IR:
            return dumps.ir_text(outcome.checked.schedule)
        case Stage.PLAN:
            return dumps.plan_text(outcome.checked.plan)
        case Stage.CUDA:
            return text_of(outcome)
        case Stage.HOST:
            return dumps.host_text(text_of(outcome))
        case _:
            assert_never(stage)


def text_of(outcome: Outcome) -> str:
    assert isinstance(outcome.checked, compiler.Compiled)
    return outcome.checked.emitted.text


def to_json(job: Job, stage: Stage, text: str) -> dict[str, object]:
    return {"file": str(job.path), "schedule": job.schedule, "ranks": job.ranks, "stage": stage.value, "text": text}


def fail(found: tuple[diagnostics.Diagnostic, ...], *, as_json: bool) -> Exit:
    """The faults, as text or as JSON."""
    if as_json:
        output.say_json({"diagnostics": [diagnostics.to_json(d) for d in found]})
    else:
        output.show_diagnostics(found)
    return Exit.DIAGNOSTICS
