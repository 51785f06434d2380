"""Turns a file into proofs, runs of its kernels on host ranks beside the oracle, cost reports and timelines.

Assumes nothing of the file. Does not need a GPU, torch or a C++ compiler; without the last the oracle runs alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias, assert_never

from commdsl.commands import output
from commdsl.commands.arguments import Place, Target, UsageError
from commdsl.commands.jobs import Job, Outcome, has_errors, merge, prove_all, read_jobs, some
from commdsl.commands.output import Exit
from commdsl.commands.report import cost_lines, laws, proof_lines, row_cost, row_cost_json, row_cost_lines
from commdsl.commands.show import fail
from commdsl.commands.summary import cost_json
from commdsl.commands.tables import Pairing, asked_for, pairing, with_ranks
from commdsl.commands.trial import Settings, Trial, trial
from commdsl.commands.trial_rows import RowTrial, trial_rows
from commdsl.compiler import CheckedPlan, CompiledDispatch, CompiledSchedule
from commdsl.cost.draw_routes import picture
from commdsl.cost.report import report
from commdsl.cost.timeline import timeline
from commdsl.cost.visitors import visitors
from commdsl.ir.dispatches import ByKey
from commdsl.ir.held import Held, held
from commdsl.language import diagnostics
from commdsl.language.diagnostics import CommError
from commdsl.language.records import dataclass
from commdsl.language.syntax import ScheduleDecl

NO_TERMINAL_WIDTH = 120


@dataclass(frozen=True, eq=False)
class RanSchedule:
    """A schedule, and what came out."""

    checked: CompiledSchedule
    trial: Trial


@dataclass(frozen=True, eq=False)
class RanRows:
    """A dispatch by a plan or by chance, and what came out; `job` says which of the two was asked for."""

    job: Job
    pairing: Pairing
    moved: RowTrial

    @property
    def trial(self) -> Trial:
        return self.moved.trial


Ran: TypeAlias = RanSchedule | RanRows


def run(
    path: Path,
    target: Target,
    name: str | None,
    settings: Settings,
    *,
    plan: Place | None = None,
    svg: Path | None,
    as_json: bool,
) -> Exit:
    """Runs every declaration of a file, for every number of ranks asked for."""
    outcomes: list[Outcome] = []
    done: list[Ran] = []
    try:
        jobs = read_jobs((path,), target, name)
        some(jobs, "run")
        if svg is not None and not any(isinstance(job.decl, ScheduleDecl) for job in jobs):
            raise UsageError("--svg draws schedules, and none is run; `commdsl show --svg` draws a plan")
        asked = asked_for(plan, jobs)
        jobs = tuple(with_ranks(job, target, asked) for job in jobs)
        with output.progress("proving", 2 * len(jobs)) as advance:
            for outcome in prove_all(jobs, target, emit=True):
                outcomes.append(outcome)
                advance(f"running {outcome.job.name} on {outcome.job.ranks} host ranks")
                done += [ran(outcome, target, settings, asked)] if outcome.checked is not None else []
                advance("proving")
    except CommError as error:
        return fail(error.diagnostics, as_json=as_json)
    found = merge(outcomes)
    if any(outcome.checked is None for outcome in outcomes):
        return fail(found, as_json=as_json)
    if as_json:
        listed = [diagnostics.to_json(d) for d in found]
        output.say_json({"runs": [to_json(one, settings) for one in done], "diagnostics": listed})
    else:
        for one in done:
            for line in lines(one, settings):
                output.say(line, styled=True)
        output.show_diagnostics(found)
    if svg is not None:
        write_svgs(svg, [one.checked for one in done if isinstance(one, RanSchedule)])
    if not all(one.trial.is_right for one in done):
        return Exit.WRONG_RESULT
    return Exit.DIAGNOSTICS if has_errors(found) else Exit.FINE


def ran(outcome: Outcome, target: Target, settings: Settings, asked: CheckedPlan | None) -> Ran:
    """Runs what was proved."""
    match outcome.checked:
        case CompiledSchedule():
            return RanSchedule(outcome.checked, trial(outcome.checked, settings))
        case CompiledDispatch() | CheckedPlan():
            pair = pairing(outcome, outcome.checked, target, asked)
            plan = None if pair.plan is None else pair.plan.plan
            if settings.profile:
                raise UsageError(f"--profile is of schedules; `{outcome.job.name}` is a {outcome.job.kind}")
            return RanRows(outcome.job, pair, trial_rows(pair.dispatch, plan, settings))
        case _:
            raise AssertionError(f"{outcome.job.name} was not compiled")


# --- the report -------------------------------------------------------------------------------------------------------


def lines(one: Ran, settings: Settings) -> Iterator[str]:
    """The whole report of one run."""
    match one:
        case RanSchedule(checked, made):
            schedule = checked.schedule
            yield output.style(f"{schedule.name}", "accent") + f" · {schedule.span}"
            yield ""
            yield from proof_lines(checked)
            yield ""
            op = f", {settings.operation}" if checked.plan.asks else ""
            data = f"{output.bytes_text(settings.buffer_bytes)} of {settings.dtype}{op}"
            yield from trial_lines(schedule.num_ranks, made, settings, data, "interpreter")
            yield ""
            yield from profile_lines(made)
            yield from cost_lines(report(schedule, made.block_bytes) if made.block_bytes else checked.report)
            yield ""
            yield output.style("timeline", "strong")
            columns = shutil.get_terminal_size((NO_TERMINAL_WIDTH, 24)).columns
            yield from indented(timeline(schedule, columns - 2))
            if seen := visitors(schedule, columns - 2):
                yield ""
                yield output.style("visits", "strong") + ": whose chunks each rank is handed"
                yield from indented(seen)
        case RanRows(job, pair, moved):
            dispatch = pair.dispatch.dispatch
            yield output.style(f"{job.name}", "accent") + f" · {job.decl.span}"
            yield ""
            yield from proof_lines(pair.dispatch)
            yield from () if pair.plan is None else proof_lines(pair.plan)
            yield ""
            yield from trial_lines(dispatch.num_ranks, moved.trial, settings, rows_text(one), "simulation")
            yield ""
            yield from row_cost_lines(row_cost(dispatch.topology, moved))
        case _:
            assert_never(one)
    yield ""


def profile_lines(made: Trial) -> Iterator[str]:
    """Of the rank that took longest."""
    if made.profiles:
        yield output.style("profile", "strong")
        yield from indented(str(max(made.profiles, key=lambda one: one.total)))
        yield ""


def indented(text: str) -> Iterator[str]:
    return (f"  {line}".rstrip() for line in text.split("\n"))


def rows_text(one: RanRows) -> str:
    """`rows of 64 B of float32 by `qkv`, there and back by 8 random tables`."""
    dispatch, moved = one.pairing.dispatch.dispatch, one.moved
    by_key = any(isinstance(route, ByKey) for route in dispatch.routes)
    chance = f"{len(moved.tables)} kinds of keys" if by_key else f"{len(moved.tables)} random tables"
    by = moved.tables[0] if one.pairing.plan is not None else chance
    put = "" if by_key else f" with put {dispatch.put.value}"
    ways = "there" if dispatch.back is None else "there and back"
    rows = f"{output.count(moved.rows, 'row')} of {output.bytes_text(moved.row_bytes)} of {moved.dtype}"
    return f"{rows}, {ways} by {by}, `{dispatch.name}`{put}"


def trial_lines(ranks: int, made: Trial, settings: Settings, data: str, oracle: str) -> Iterator[str]:
    """What ran and whether it was right."""
    yield output.style(f"ran on {ranks} host ranks ({settings.mode}), {data}", "strong")
    good, bad = output.style("✓", "good"), output.style("✗", "bad")
    if made.fault:
        yield f"  {bad} {made.fault}"
    elif made.compiler is None:
        yield f"  {good} the {oracle} alone, not the emitted kernel: {made.remark}"
    else:
        sanitized = ", no race seen by ThreadSanitizer" if settings.sanitize else ""
        name = "oracle" if oracle == "interpreter" else oracle
        compared = f"{made.compared_bytes:,} bytes equal to the {name}, bit for bit"
        yield f"  {good} the emitted kernel, built by {made.compiler}: {compared}{sanitized} ({made.seconds:.2f} s)"
    if made.promised is not None and not made.fault:
        size = made.promised.compared_bytes
        yield from [f"  {good} `ensure`, evaluated by its words: {size:,} bytes are what it promises"] if size else []
        yield from (f"  - not evaluated: {why}" for why in made.promised.unknown)


def to_json(one: Ran, settings: Settings) -> dict[str, object]:
    match one:
        case RanSchedule(checked, made):
            schedule = checked.schedule
            return {
                "schedule": schedule.name,
                "ranks": schedule.num_ranks,
                "topology": schedule.topology.name,
                "proved": list(laws(checked)),
                "kernel": kernel_json(made, settings, settings.buffer_bytes),
                "profiles": [one.sums for one in made.profiles],
                "cost": cost_json(report(schedule, made.block_bytes) if made.block_bytes else checked.report),
                "visits": [visit_json(one) for one in held(schedule)],
            }
        case RanRows(job, pair, moved):
            dispatch = pair.dispatch.dispatch
            names = {job.kind: job.name, "dispatch": dispatch.name}
            plans = {} if pair.plan is None else {"plan": pair.plan.plan.name}
            proved = [*laws(pair.dispatch), *(() if pair.plan is None else laws(pair.plan))]
            return {
                **names,
                **plans,
                "ranks": dispatch.num_ranks,
                "topology": dispatch.topology.name,
                "proved": proved,
                "kernel": kernel_json(moved.trial, settings, moved.row_bytes),
                "tables": list(moved.tables),
                "rows": moved.rows,
                "cost": row_cost_json(row_cost(dispatch.topology, moved)),
            }
        case _:
            assert_never(one)


def visit_json(one: Held) -> dict[str, object]:
    """By buffer and rank the [rank, chunk] that each chunk handed over came from; [-1, -1]: nothing that was given."""
    origin = {name: origin.tolist() for name, origin in zip(one.reads, one.origin, strict=True)}
    return {"function": one.name, "handed": origin}


def kernel_json(made: Trial, settings: Settings, size: int) -> dict[str, object]:
    return {
        "ran": made.compiler is not None,
        "compiler": made.compiler,
        "right": made.is_right,
        "fault": made.fault,
        "dtype": settings.dtype,
        "op": settings.operation,
        "bytes": size,
        "compared_bytes": made.compared_bytes,
        "promised_bytes": None if made.promised is None else made.promised.compared_bytes,
        "not_evaluated": [] if made.promised is None else list(made.promised.unknown),
        "seconds": round(made.seconds, 4),
    }


def write_svgs(target: Path, done: list[CompiledSchedule]) -> None:
    """One picture per run; with several, the name carries the schedule and its ranks."""
    for checked in done:
        label = f"{target.stem}-{checked.schedule.name}-{checked.schedule.num_ranks}{target.suffix or '.svg'}"
        path = target if len(done) == 1 else target.with_name(label)
        path.write_text(picture(checked.schedule, checked.report), encoding="utf-8")
        output.tell(f"drew {path}")
