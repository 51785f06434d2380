"""Turns a file into the text of one stage: what was written, what it means, what is launched, what is compiled.

Assumes nothing of the file; a fault found on the way is shown instead. Does not fold; `run` has the timeline.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import assert_never

from commdsl import compiler, diagnostics
from commdsl.commands import dumps, output
from commdsl.commands.arguments import Target
from commdsl.commands.jobs import Job, Outcome, merge, only, plan_jobs, prove_all
from commdsl.commands.output import Exit
from commdsl.diagnostics import CommError


class Stage(StrEnum):
    SYNTAX = "syntax"
    IR = "ir"
    PLAN = "plan"
    CUDA = "cuda"
    HOST = "host"


def show(path: Path, target: Target, schedule: str | None, stage: Stage, *, as_json: bool) -> Exit:
    """Prints one stage of every schedule of a file, for every number of ranks asked for."""
    try:
        if stage is Stage.SYNTAX:
            text = dumps.syntax_text(compiler.read(path))
            output.say_json({"file": str(path), "stage": stage.value, "text": text}) if as_json else output.say(text)
            return Exit.FINE
        jobs = plan_jobs((path,), target, schedule)
    except CommError as error:
        return fail(error.diagnostics, as_json=as_json)
    only(jobs, "show")
    outcomes = tuple(prove_all(jobs, target, emit=stage in (Stage.CUDA, Stage.HOST)))
    failed = [outcome for outcome in outcomes if outcome.checked is None]
    if failed:
        return fail(merge(failed), as_json=as_json)
    texts = [(outcome.job, render(outcome, stage)) for outcome in outcomes]
    if as_json:
        output.say_json([to_json(job, stage, text) for job, text in texts])
    else:
        output.say("\n".join(text.rstrip("\n") for _, text in texts))
        output.show_diagnostics(merge(outcomes))
    return Exit.FINE


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
            from commdsl.build import host

            flags = " ".join(host.FLAGS)
            return f"// The same text as for CUDA; a host compiler builds it with: {flags}\n{text_of(outcome)}"
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
