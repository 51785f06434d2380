"""Turns a file into the text of one stage: what was written, what it means, what is launched, what is compiled.

Assumes nothing of the file; a fault found on the way is shown instead. Does not fold; `run` has the timeline. What a
dispatch plan means is a table and a picture (`plan_view`), and it has no later stage; nor has a topology.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from pathlib import Path

from commdsl import compiler
from commdsl.commands import dump_plans, dumps, output
from commdsl.commands.arguments import Target, UsageError
from commdsl.commands.jobs import Job, Outcome, jobs_of, merge, prove_all, read, some, topology_of
from commdsl.commands.output import Exit
from commdsl.compiler import (
    CheckedDispatch,
    CheckedPlan,
    CheckedSchedule,
    CompiledDispatch,
    CompiledSchedule,
    Declaration,
)
from commdsl.ir import resolve
from commdsl.language import diagnostics
from commdsl.language.diagnostics import CommError
from commdsl.language.records import dataclass
from commdsl.language.syntax import File, PlanDecl, TopologyDecl
from commdsl.machine.topology import Topology
from commdsl.program.plan import Plan


class Stage(StrEnum):
    SYNTAX = "syntax"
    IR = "ir"
    PLAN = "plan"
    CUDA = "cuda"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Page:
    """One declaration in one stage, as text and as JSON."""

    text: str
    json: dict[str, object]


def show(path: Path, target: Target, name: str | None, stage: Stage, *, svg: Path | None = None, as_json: bool) -> Exit:
    """Prints one stage of every declaration of a file, for every number of ranks asked for."""
    try:
        files = read(path)
        topologies = resolve.topologies(files[:1])
        named = {key: found for key, found in topologies.items() if name in (None, key)}
        if stage is Stage.SYNTAX:
            if svg is not None:
                raise UsageError("--svg draws what a dispatch plan means; --stage syntax is text alone")
            topology_of(files, target.on, compiler.DEFAULT_RANKS)
            kept = files if name is None else (of_name(files, name, named),)
            text, facts = _facts(path, stage, {}, dumps.syntax_text(kept))
            output.say_json(facts) if as_json else output.say_text(f"{text}\n")
            return Exit.FINE
        jobs = () if name in topologies else jobs_of(path, files, target, name)
    except CommError as error:
        return fail(error.diagnostics, as_json=as_json)
    if not jobs and named:
        refuse_given(target, svg, "a topology is shown")
        if stage is not Stage.IR:
            raise UsageError(f"a topology has the stages syntax and ir, not {stage.value}")
        machines = [(key, dumps.topology_text(found)) for key, found in named.items()]
        return tell([Page(*_facts(path, stage, {"topology": key}, text)) for key, text in machines], as_json=as_json)
    some(jobs, "show")
    jobs = with_stage(jobs, stage, svg)
    outcomes = tuple(prove_all(jobs, target, emit=stage is not Stage.IR))
    failed = [outcome for outcome in outcomes if outcome.checked is None]
    if failed:
        return fail(merge(failed), as_json=as_json)
    plans = sum(outcome.job.kind == "plan" for outcome in outcomes)
    tell([page(outcome, target, stage, svg_of(outcome.job, svg, plans)) for outcome in outcomes], as_json=as_json)
    if not as_json:
        output.show_diagnostics(merge(outcomes))
    return Exit.FINE


def tell(pages: list[Page], *, as_json: bool) -> Exit:
    """Print pages."""
    if as_json:
        output.say_json([shown.json for shown in pages])
    else:
        output.say_text("".join(f"{shown.text.rstrip(chr(10))}\n" for shown in pages), styled=True)
    return Exit.FINE


def refuse_given(target: Target, svg: Path | None, why: str) -> None:
    """Raise UsageError where an option is given that changes nothing in what is shown."""
    given = {"--ranks": target.ranks, "--on": target.on, "--tune": target.tune, "--svg": svg}
    found = [*(option for option, value in given.items() if value), *(f"{key}={value}" for key, value in target.params)]
    if found:
        raise UsageError(f"{why}: leave out {found[0]}")


def of_name(files: tuple[File, ...], name: str, topologies: Mapping[str, Topology]) -> File:
    """Return the file with its declarations of that name alone. Raises CommError where there is none."""
    if name not in topologies:
        compiler.choose(files, name)
    kept = (item for item in files[0].items if isinstance(item, Declaration | TopologyDecl) and item.name.text == name)
    return replace(files[0], items=tuple(kept))


def with_stage(jobs: tuple[Job, ...], stage: Stage, svg: Path | None) -> tuple[Job, ...]:
    """The jobs that have the stage: a plan is data and has none beyond `ir`; but there alone is a picture."""
    others = tuple(job for job in jobs if not isinstance(job.decl, PlanDecl))
    if svg is not None and (stage is not Stage.IR or len(others) == len(jobs)):
        raise UsageError("--svg draws dispatch plans, and none is shown; `commdsl run --svg` draws a schedule")
    if stage is not Stage.IR and not others:
        raise UsageError(f"a dispatch plan has the stages syntax and ir, not {stage.value}")
    return jobs if stage is Stage.IR else others


def svg_of(job: Job, svg: Path | None, plans: int) -> Path | None:
    """Where the picture of a plan goes; with several, the name carries the plan's."""
    return svg if svg is None or plans == 1 else svg.with_stem(f"{svg.stem}-{job.name}")


def page(outcome: Outcome, target: Target, stage: Stage, svg: Path | None) -> Page:
    job = outcome.job
    if isinstance(outcome.checked, CheckedPlan):
        from commdsl.commands import plan_view  # 25 ms that schedules and dispatches do not need

        return Page(*plan_view.page(job, outcome.checked.plan, target, svg))
    return Page(*_facts(job.path, stage, {job.kind: job.name, "ranks": job.ranks}, render(outcome, stage)))


def _facts(path: Path, stage: Stage, what: dict[str, object], text: str) -> tuple[str, dict[str, object]]:
    return text, {"file": str(path), **what, "stage": stage.value, "text": text}


def render(outcome: Outcome, stage: Stage) -> str:
    """A schedule or a dispatch as it stands in a stage."""
    match outcome.checked, stage:
        case CheckedSchedule(schedule=schedule), Stage.IR:
            return dumps.ir_text(schedule)
        case CheckedDispatch(dispatch=dispatch), Stage.IR:
            return "\n".join(dumps.dispatch_lines(dispatch))
        case CompiledDispatch(again=Plan()) as made, _:
            # By keys there are several: the way there, once more without counts, the way back, and that of numbers.
            one = replace(made, back=None, values=None, again=None)
            one = replace(one, emitted_back=None, emitted_values=None, emitted_again=None)
            ways = (replace(one, plan=plan, emitted=text) for plan, text in made.ways)
            return "\n".join(render(replace(outcome, checked=way), stage) for way in ways)
        case CompiledSchedule(plan=plan, visits=visits, pushing=pushing), Stage.PLAN:
            text = "\n".join(dump_plans.plan_text(one) for one in dict.fromkeys((plan, visits)) if one is not None)
            return "\n".join((text, *dump_plans.pushing_lines(pushing)))
        case CompiledDispatch(plan=plan), Stage.PLAN:
            return dump_plans.plan_text(plan)
        case CompiledSchedule(emitted=emitted) | CompiledDispatch(emitted=emitted), Stage.CUDA:
            return emitted.text
        case CompiledSchedule(emitted=emitted) | CompiledDispatch(emitted=emitted), Stage.HOST:
            return dumps.host_text(emitted.text)
        case _:
            raise AssertionError(f"nothing of {outcome.job.name} to show in stage {stage.value}")


def fail(found: tuple[diagnostics.Diagnostic, ...], *, as_json: bool) -> Exit:
    """The faults, as text or as JSON."""
    if as_json:
        output.say_json({"diagnostics": [diagnostics.to_json(d) for d in found]})
    else:
        output.show_diagnostics(found)
    return Exit.DIAGNOSTICS
