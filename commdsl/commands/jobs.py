"""Turns files and a target into jobs, one per schedule and number of ranks, and a job into its outcome.

Assumes `compiler` for all stages. Does not print; diagnostics are part of the outcome.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from commdsl import compiler
from commdsl.commands.arguments import Target, UsageError
from commdsl.ir import resolve
from commdsl.language.diagnostics import CommError, Diagnostic, Severity
from commdsl.language.records import dataclass
from commdsl.language.syntax import File

NOT_ADMITTED = "C501"
"""The code of a rank count that the schedule's `where` leaves out."""


@dataclass(frozen=True, slots=True)
class Job:
    """One schedule of one file, for one number of ranks."""

    path: Path
    files: tuple[File, ...]
    schedule: str
    ranks: int


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a job. `checked` is None where the proof failed; then `diagnostics` has an error."""

    job: Job
    checked: compiler.Checked | None
    diagnostics: tuple[Diagnostic, ...]
    seconds: float

    @property
    def is_left_out(self) -> bool:
        """The schedule says itself that it is not for this number of ranks."""
        return self.checked is None and {d.code for d in self.diagnostics} == {NOT_ADMITTED}


def plan_jobs(paths: Iterable[Path], target: Target, schedule: str | None = None) -> tuple[Job, ...]:
    """The jobs in the order of files, schedules, ranks. Raises CommError for a file that cannot be read as syntax."""
    return tuple(job for path in paths for job in jobs_of(path, compiler.read(path), target, schedule))


def jobs_of(path: Path, files: tuple[File, ...], target: Target, schedule: str | None = None) -> tuple[Job, ...]:
    """As `plan_jobs`, for one file that was read already."""
    resolve.topologies(files)
    names = list(dict.fromkeys(decl.name.text for decl in compiler.schedules(files)))
    if schedule is not None:
        names = [compiler.choose(files, schedule).name.text]
    return tuple(Job(path, files, name, ranks) for name in names for ranks in rank_counts(files, target))


def rank_counts(files: tuple[File, ...], target: Target) -> tuple[int, ...]:
    """What --ranks says, else every rank of the topology that --on names, else 8."""
    if target.ranks is not None:
        return target.ranks
    if target.on is not None:
        return (compiler.find_topology(files, target.on, compiler.DEFAULT_RANKS).num_ranks,)
    return (compiler.DEFAULT_RANKS,)


def prove(job: Job, target: Target, *, emit: bool) -> Outcome:
    """Checks one job, and emits the kernel's text when asked."""
    work: Callable[..., compiler.Checked] = compiler.compile if emit else compiler.check
    start = time.perf_counter()
    try:
        params, tune = dict(target.params), dict(target.tune)
        checked = work(job.files, job.schedule, job.ranks, target.on, params, tune=tune)
    except CommError as error:
        return Outcome(job, None, error.diagnostics, time.perf_counter() - start)
    return Outcome(job, checked, checked.warnings, time.perf_counter() - start)


def prove_all(jobs: Iterable[Job], target: Target, *, emit: bool) -> Iterator[Outcome]:
    """The outcomes in order. In a sweep a schedule may leave numbers of ranks out, but not all of them."""
    last_left_out: dict[tuple[Path, str], Outcome] = {}
    admitted: set[tuple[Path, str]] = set()
    for job in jobs:
        outcome = prove(job, target, emit=emit)
        key = (job.path, job.schedule)
        if target.is_sweep and outcome.is_left_out:
            last_left_out[key] = outcome
        else:
            admitted.add(key)
            yield outcome
    for key, outcome in last_left_out.items():
        if key not in admitted:
            yield outcome


class HasRanks(Protocol):
    @property
    def ranks(self) -> int: ...


class Judged(Protocol):
    """What came of a job of any kind."""

    @property
    def job(self) -> HasRanks: ...

    @property
    def diagnostics(self) -> tuple[Diagnostic, ...]: ...


def merge(outcomes: Iterable[Judged]) -> tuple[Diagnostic, ...]:
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


def only(jobs: tuple[Job, ...], verb: str) -> None:
    """Raises UsageError when there is nothing to do."""
    if not jobs:
        raise UsageError(f"no schedule to {verb}: the files declare none")
