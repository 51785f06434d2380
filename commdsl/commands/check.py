"""Turns files into a verdict: which schedules, dispatches and plans are proved for which ranks, or every fault in them.

Assumes nothing of the files. Does not build or run a kernel.
"""

from __future__ import annotations

from pathlib import Path

from commdsl.commands import output
from commdsl.commands.arguments import Target, UsageError
from commdsl.commands.jobs import Job, Outcome, has_errors, jobs_of, merge, prove_all, read
from commdsl.commands.output import Exit
from commdsl.commands.summary import summary, to_json
from commdsl.language import diagnostics
from commdsl.language.diagnostics import CommError


def check(paths: tuple[Path, ...], target: Target, name: str | None, *, as_json: bool, concise: bool) -> Exit:
    """Proves every declaration of every file, or the one that is named; with none in a file, its topologies and cycles
    are read all the same.
    """
    jobs, unread = list[Job](), list[diagnostics.Diagnostic]()
    for path in paths:
        try:
            files = read(path)
            if not files[0].items:
                raise UsageError(f"{path} declares nothing; `commdsl new allreduce` writes a file to start from")
            jobs += jobs_of(path, files, target, name)
        except CommError as error:
            unread += error.diagnostics
    outcomes: list[Outcome] = []
    with output.progress("reading", len(jobs)) as advance:
        for outcome in prove_all(jobs, target):
            outcomes.append(outcome)
            advance(f"{outcome.job.name} for {outcome.job.ranks} ranks")
    found = tuple(dict.fromkeys((*unread, *merge(outcomes))))
    return report(tuple(outcomes), found, as_json=as_json, concise=concise, paths=paths)


def report(
    outcomes: tuple[Outcome, ...],
    found: tuple[diagnostics.Diagnostic, ...],
    *,
    as_json: bool,
    concise: bool,
    paths: tuple[Path, ...] = (),
) -> Exit:
    """One line per proved declaration on standard output; the faults on standard error."""
    if as_json:
        proved = [to_json(outcome) for outcome in outcomes if outcome.checked]
        output.say_json({"proved": proved, "diagnostics": [diagnostics.to_json(d) for d in found]})
    else:
        for name, words in summary(outcomes):
            output.say(f"{output.style('✓', 'good')} {name}: {words}", styled=True)
        if concise:
            for diagnostic in found:
                output.tell(diagnostics.render_concise(diagnostic))
        else:
            output.show_diagnostics(found)
        if not outcomes and not found:
            names = ", ".join(map(str, paths))
            output.say(f"{names}: no schedule, dispatch or plan; the rest reads well")
    return Exit.DIAGNOSTICS if has_errors(found) else Exit.FINE
