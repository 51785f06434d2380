"""Turns files and a target into jobs, one per declaration and number of ranks, and a job into its outcome.

Assumes `compiler` for all stages. Does not print; diagnostics are part of the outcome.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from commdsl import compiler
from commdsl.commands.arguments import STDIN, Target, UsageError
from commdsl.commands.budget import refuse_many
from commdsl.compiler import Checked, Declaration, Given
from commdsl.ir import resolve
from commdsl.language.diagnostics import CommError, Diagnostic, Severity
from commdsl.language.records import dataclass
from commdsl.language.syntax import File, PlanDecl, ScheduleDecl
from commdsl.language.text import standard_input, text_of
from commdsl.machine import resources
from commdsl.machine.topology import Topology, switch

NOT_ADMITTED = "C501"
"""The code of a rank count that a declaration's `where` leaves out."""

UNKNOWN_TOPOLOGY = "C192"
"""The code of a topology's name that nothing declares."""


MOST_NEAR = 64
"""Ranks that are tried where nobody says how many, and a schedule is not for 8."""


@dataclass(frozen=True, slots=True)
class Job:
    """One declaration of one file, for one number of ranks; a plan says itself for how many."""

    path: Path
    files: tuple[File, ...]
    decl: Declaration
    ranks: int

    @property
    def name(self) -> str:
        return self.decl.name.text

    @property
    def kind(self) -> str:
        return compiler.KINDS[type(self.decl)]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a job. `checked` is None where the proof failed; then `diagnostics` has an error."""

    job: Job
    checked: Checked | None
    diagnostics: tuple[Diagnostic, ...]
    seconds: float

    @property
    def is_left_out(self) -> bool:
        """The declaration says itself that it is not for this number of ranks; what else is wrong is so for others."""
        own = (found for found in self.diagnostics if found.primary.span.is_in(self.job.decl.span))
        return self.checked is None and NOT_ADMITTED in {found.code for found in own}


def read_jobs(paths: Iterable[Path], target: Target, name: str | None = None) -> tuple[Job, ...]:
    """The jobs in the order of files, declarations, ranks. Raises CommError for a file that cannot be read."""
    return tuple(job for path in paths for job in jobs_of(path, read(path), target, name))


def read(path: Path) -> tuple[File, ...]:
    """As `compiler.read`; a shipped file that is given by its name is shown under that of a checkout. What comes over
    standard input is not kept, as it may be one of very many.
    """
    if path == STDIN:
        from commdsl.language import parser  # 60 ms, most of it lark

        return compiler.with_used(parser.parse(standard_input()), Path())
    shown = resources.shipped_name(path)
    return compiler.read(path) if shown is None else compiler.read_text(text_of(path), shown, path.parent)


def jobs_of(path: Path, files: tuple[File, ...], target: Target, name: str | None = None) -> tuple[Job, ...]:
    """Return the jobs of one file that was read already. Its topologies, and that of --on, are read in any case."""
    resolve.topologies(files)
    topology_of(files, target.on, compiler.DEFAULT_RANKS)
    first = {(type(decl), decl.name.text): decl for decl in reversed(compiler.declarations(files))}
    if name is not None:
        compiler.choose(files, name)
    wanted = [decl for decl in reversed(first.values()) if name in (None, decl.name.text)]
    counts = {decl.name.text: rank_counts(files, decl, target) for decl in wanted}
    for decl in wanted:
        refuse_many(files, decl, counts[decl.name.text], target)
    return tuple(Job(path, files, decl, ranks) for decl in wanted for ranks in counts[decl.name.text])


def topology_of(files: tuple[File, ...], on: str | None, ranks: int) -> Topology:
    """Return the topology that --on names, of the files or shipped; without a name one flat switch.

    Raises UsageError where there is none of that name: the option is at fault, and no place in a file.
    """
    try:
        return compiler.find_topology(files or compiler.read_text("", "--on", Path()), on, ranks)
    except CommError as error:
        fault = error.diagnostics[0]
        if fault.code != UNKNOWN_TOPOLOGY:
            raise
        raise UsageError(f"--on {on}: {fault.headline}; {fault.help or fault.primary.text}") from error


def rank_counts(files: tuple[File, ...], decl: Declaration, target: Target) -> tuple[int, ...]:
    """A plan's own number; else what --ranks says, else every rank of the topology that --on names, else 8, or the
    nearest number that a schedule is for, the smaller of two.
    """
    if isinstance(decl, PlanDecl):
        return (decl.ranks.value,)
    if target.ranks is not None:
        return target.ranks
    if target.on is not None:
        return (compiler.find_topology(files, target.on, compiler.DEFAULT_RANKS).num_ranks,)
    near = sorted(range(2, MOST_NEAR + 1), key=lambda ranks: (abs(ranks - compiler.DEFAULT_RANKS), ranks))
    is_for = (ranks for ranks in near if _admits(files, decl, ranks, target))
    return (next(is_for, compiler.DEFAULT_RANKS),)


def _admits(files: tuple[File, ...], decl: Declaration, ranks: int, target: Target) -> bool:
    if not isinstance(decl, ScheduleDecl):
        return True
    return resolve.admits(files, decl, ranks, switch(ranks), dict(target.params))


def prove(job: Job, target: Target, *, emit: bool = False) -> Outcome:
    """Checks one job, and emits its kernel's text when asked."""
    given = Given(job.ranks, target.on, dict(target.params), tune=dict(target.tune))
    start = time.perf_counter()
    try:
        checked = compiler.check_declared(job.files, job.decl, given)
        if emit:
            checked = compiler.printed(checked)
    except CommError as error:
        return Outcome(job, None, error.diagnostics, time.perf_counter() - start)
    return Outcome(job, checked, checked.warnings, time.perf_counter() - start)


def prove_all(jobs: Iterable[Job], target: Target, *, emit: bool = False) -> Iterator[Outcome]:
    """The outcomes in order. In a sweep a declaration may leave numbers of ranks out, but not all of them."""
    jobs = tuple(jobs)
    if all(isinstance(job.decl, PlanDecl) for job in jobs):
        refuse_tuned(jobs, target)
    last_left_out: dict[tuple[Path, str], Outcome] = {}
    admitted: set[tuple[Path, str]] = set()
    for job in jobs:
        outcome = prove(job, target, emit=emit)
        key = (job.path, job.name)
        if target.is_sweep and outcome.is_left_out:
            last_left_out[key] = outcome
        else:
            admitted.add(key)
            yield outcome
    for key, outcome in last_left_out.items():
        if key not in admitted:
            yield outcome


def refuse_tuned(plans: tuple[Job, ...], target: Target) -> None:
    """Raise UsageError for what says nothing of plans: parameters, --tune, and another number of ranks than theirs."""
    given = [f"{key}={value}" for key, value in target.params] + [f"--tune {key}={value}" for key, value in target.tune]
    if given:
        raise UsageError(f"no schedule or dispatch is here, and nothing else has parameters or is tuned: {given[0]}")
    if target.ranks is not None and not target.is_sweep:
        for plan in (plan for plan in plans if plan.ranks not in target.ranks):
            raise UsageError(f"`{plan.name}` is for {plan.ranks} ranks: leave --ranks out")


def merge(outcomes: Iterable[Outcome]) -> tuple[Diagnostic, ...]:
    """Every diagnostic once: a mistake found for several numbers of ranks is shown for the first of them."""
    first: dict[tuple[str, str, int], tuple[Diagnostic, list[int]]] = {}
    for outcome in outcomes:
        for diagnostic in outcome.diagnostics:
            span = diagnostic.primary.span
            key = (diagnostic.code, span.source.name, span.start)
            first.setdefault(key, (diagnostic, []))[1].append(outcome.job.ranks)
    return tuple(_also_for(diagnostic, ranks) for diagnostic, ranks in first.values())


def _also_for(diagnostic: Diagnostic, ranks: list[int]) -> Diagnostic:
    others = sorted(set(ranks[1:]) - {ranks[0]})
    if not others:
        return diagnostic
    text = f"shown for {ranks[0]} ranks; the same for {', '.join(map(str, others))}"
    return replace(diagnostic, notes=(*diagnostic.notes, text))


def has_errors(diagnostics: Iterable[Diagnostic]) -> bool:
    return any(diagnostic.severity is Severity.ERROR for diagnostic in diagnostics)


def some(jobs: tuple[Job, ...], verb: str) -> None:
    """Raises UsageError when there is nothing to do."""
    if not jobs:
        raise UsageError(f"nothing to {verb}: the files declare no schedule, dispatch or plan")
