"""Turns a file into a proof, a run of its kernel on host ranks beside the oracle, a cost report and a timeline.

Assumes nothing of the file. Does not need a GPU, torch or a C++ compiler; without the last the interpreter runs alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

from commdsl import compiler
from commdsl.commands import output
from commdsl.commands.arguments import Target
from commdsl.commands.jobs import Outcome, has_errors, merge, prove_all, read_jobs, some
from commdsl.commands.output import Exit
from commdsl.commands.report import cost_lines, laws, proof_lines, report_json
from commdsl.commands.show import fail
from commdsl.commands.trial import Settings, Trial, trial
from commdsl.cost.draw import draw
from commdsl.cost.report import report
from commdsl.cost.timeline import timeline
from commdsl.language import diagnostics
from commdsl.language.diagnostics import CommError
from commdsl.language.syntax import ScheduleDecl

NO_TERMINAL_WIDTH = 120


def run(
    path: Path, target: Target, schedule: str | None, settings: Settings, *, svg: Path | None, as_json: bool
) -> Exit:
    """Runs every schedule of a file, for every number of ranks asked for."""
    try:
        jobs = tuple(job for job in read_jobs((path,), target, schedule) if isinstance(job.decl, ScheduleDecl))
    except CommError as error:
        return fail(error.diagnostics, as_json=as_json)
    some(jobs, "run")
    outcomes: list[Outcome] = []
    trials: list[Trial] = []
    with output.progress("proving", 2 * len(jobs)) as advance:
        for outcome in prove_all(jobs, target, emit=True):
            outcomes.append(outcome)
            if not isinstance(outcome.checked, compiler.CompiledSchedule):
                continue
            advance(f"running {outcome.job.name} on {outcome.job.ranks} host ranks")
            trials.append(trial(outcome.checked, settings))
            advance("proving")
    if any(outcome.checked is None for outcome in outcomes):
        return fail(merge(outcomes), as_json=as_json)
    pairs = zip((outcome.checked for outcome in outcomes), trials, strict=True)
    done = [(checked, made) for checked, made in pairs if isinstance(checked, compiler.CheckedSchedule)]
    if as_json:
        found = [diagnostics.to_json(d) for d in merge(outcomes)]
        output.say_json({"runs": [to_json(*pair, settings) for pair in done], "diagnostics": found})
    else:
        for checked, made in done:
            for line in lines(checked, made, settings):
                output.say(line)
        output.show_diagnostics(merge(outcomes))
    if svg is not None:
        write_svgs(svg, [checked for checked, _ in done])
    if not all(made.is_right for made in trials):
        return Exit.WRONG_RESULT
    return Exit.DIAGNOSTICS if has_errors(merge(outcomes)) else Exit.FINE


def lines(checked: compiler.CheckedSchedule, made: Trial, settings: Settings) -> Iterator[str]:
    """The whole report of one run."""
    schedule = checked.schedule
    yield output.style(f"{schedule.name}", "accent") + f" · {schedule.span}"
    yield ""
    yield from proof_lines(checked)
    yield ""
    yield from trial_lines(schedule.num_ranks, made, settings, reduces=checked.plan.moves.has_reduction)
    yield ""
    yield from cost_lines(report(schedule, made.block_bytes) if made.block_bytes else checked.report)
    yield ""
    yield output.style("timeline", "strong")
    columns = shutil.get_terminal_size((NO_TERMINAL_WIDTH, 24)).columns
    for line in timeline(schedule, columns - 2).split("\n"):
        yield f"  {line}".rstrip()
    yield ""


def trial_lines(ranks: int, made: Trial, settings: Settings, *, reduces: bool) -> Iterator[str]:
    """What ran and whether it was right."""
    data = f"{output.bytes_text(settings.bytes)} of {settings.dtype}{', ' + settings.op if reduces else ''}"
    how = "processes" if settings.processes else "threads"
    title = f"ran on {ranks} host ranks ({how}), {data}"
    yield output.style(title, "strong")
    good, bad = output.style("✓", "good"), output.style("✗", "bad")
    if made.fault:
        yield f"  {bad} {made.fault}"
    elif made.compiler is None:
        yield f"  {good} the interpreter alone, not the emitted kernel: {made.remark}"
    else:
        sanitized = ", no race seen by ThreadSanitizer" if settings.sanitize else ""
        compared = f"{made.compared_bytes:,} bytes equal to the oracle, bit for bit"
        yield f"  {good} the emitted kernel, built by {made.compiler}: {compared}{sanitized} ({made.seconds:.2f} s)"


def to_json(checked: compiler.CheckedSchedule, made: Trial, settings: Settings) -> dict[str, object]:
    schedule = checked.schedule
    return {
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "topology": schedule.topology.name,
        "proved": list(laws(schedule)),
        "kernel": {
            "ran": made.compiler is not None,
            "compiler": made.compiler,
            "right": made.is_right,
            "fault": made.fault,
            "dtype": settings.dtype,
            "op": settings.op,
            "bytes": settings.bytes,
            "compared_bytes": made.compared_bytes,
            "seconds": round(made.seconds, 4),
        },
        "cost": report_json(report(schedule, made.block_bytes) if made.block_bytes else checked.report),
    }


def write_svgs(target: Path, done: list[compiler.CheckedSchedule]) -> None:
    """One picture per run; with several, the name carries the schedule and its ranks."""
    for checked in done:
        label = f"{target.stem}-{checked.schedule.name}-{checked.schedule.num_ranks}{target.suffix or '.svg'}"
        path = target if len(done) == 1 else target.with_name(label)
        path.write_text(draw(checked.schedule, checked.report), encoding="utf-8")
        output.tell(f"drew {path}")
