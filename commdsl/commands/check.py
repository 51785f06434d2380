"""Turns files into a verdict: which schedules, plans and dispatches are proved for which ranks, or every fault in them.

Assumes nothing of the files. Does not build or run a kernel.
"""

from __future__ import annotations

from pathlib import Path

from commdsl import compiler
from commdsl.commands import dispatch_jobs, output
from commdsl.commands.arguments import Target
from commdsl.commands.dispatch_jobs import Proof
from commdsl.commands.jobs import Job, Outcome, has_errors, jobs_of, merge, prove_all
from commdsl.commands.output import Exit
from commdsl.language import diagnostics
from commdsl.language.diagnostics import CommError


def check(paths: tuple[Path, ...], target: Target, schedule: str | None, *, as_json: bool, concise: bool) -> Exit:
    """Proves every schedule, plan and dispatch of every file, or the one that is named; with none in a file, its
    topologies and cycles are read all the same.
    """
    try:
        read = [(path, compiler.read(path)) for path in paths]
        jobs: list[Job] = []
        further: list[dispatch_jobs.AnyJob] = []
        for path, files in read:
            others = dispatch_jobs.jobs_of(path, files, target, schedule)
            further += others
            jobs += [] if schedule and others else jobs_of(path, files, target, schedule)
    except CommError as error:
        return report((), error.diagnostics, as_json=as_json, concise=concise)
    outcomes: list[Outcome] = []
    proofs: list[Proof] = []
    with output.progress("reading", len(jobs) + len(further)) as advance:
        for outcome in prove_all(jobs, target, emit=False):
            outcomes.append(outcome)
            advance(f"{outcome.job.schedule} for {outcome.job.ranks} ranks")
        for job in further:
            proofs.append(dispatch_jobs.prove(job, target))
            advance(f"{job.name} for {job.ranks} ranks")
    found = merge((*outcomes, *proofs))
    return report(tuple(outcomes), found, tuple(proofs), as_json=as_json, concise=concise, paths=paths)


def report(
    outcomes: tuple[Outcome, ...],
    found: tuple[diagnostics.Diagnostic, ...],
    proofs: tuple[Proof, ...] = (),
    *,
    as_json: bool,
    concise: bool,
    paths: tuple[Path, ...] = (),
) -> Exit:
    """One line per proved schedule, plan and dispatch on standard output; the faults on standard error."""
    if as_json:
        proved = [to_json(outcome) for outcome in outcomes if outcome.checked]
        proved += [dispatch_jobs.to_json(proof) for proof in proofs if proof.checked]
        output.say_json({"proved": proved, "diagnostics": [diagnostics.to_json(d) for d in found]})
    else:
        for line in summary(outcomes):
            output.say(line)
        for name, words in dispatch_jobs.summary(proofs):
            output.say(f"{output.style('✓', 'good')} {name}: {words}")
        if concise:
            for diagnostic in found:
                output.tell(diagnostics.render_concise(diagnostic))
        else:
            output.show_diagnostics(found)
        if not outcomes and not proofs and not found:
            names = ", ".join(map(str, paths))
            output.say(f"{names}: no schedule; the rest reads well")
    return Exit.DIAGNOSTICS if has_errors(found) else Exit.FINE


def summary(outcomes: tuple[Outcome, ...]) -> list[str]:
    """`allreduce_ring: proved for 2, 4, 8 ranks on switch`, one line a schedule."""
    groups: dict[tuple[Path, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.job.path, outcome.job.schedule), []).append(outcome)
    lines: list[str] = []
    for (_, name), group in groups.items():
        proved = [outcome for outcome in group if outcome.checked]
        if not proved:
            continue
        checked = proved[0].checked
        assert checked is not None
        ranks = ", ".join(str(outcome.job.ranks) for outcome in proved)
        time = f"{sum(outcome.seconds for outcome in proved):.2f} s"
        tick = output.style("✓", "good")
        where = f"on {checked.schedule.topology.name}"
        steps = output.count(checked.schedule.num_steps, "step") + ", "
        lines.append(f"{tick} {name}: proved for {ranks} ranks {where} ({steps if len(proved) == 1 else ''}{time})")
    return lines


def to_json(outcome: Outcome) -> dict[str, object]:
    assert outcome.checked is not None
    schedule = outcome.checked.schedule
    return {
        "file": str(outcome.job.path),
        "schedule": schedule.name,
        "ranks": schedule.num_ranks,
        "topology": schedule.topology.name,
        "parameters": dict(schedule.params),
        "steps": schedule.num_steps,
        "symmetric_bytes": outcome.checked.plan.symmetric_bytes,
        "seconds": round(outcome.seconds, 4),
    }
