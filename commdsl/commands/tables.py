"""Turns a job whose rows go by tables into what runs: a dispatch, and the plan that says where its rows go.

Assumes jobs that were read. A dispatch runs by the plan that is asked for, else by one of its own file, else by chance;
a plan runs by a dispatch of its own file, else by a shipped one. Does not run them (`trial_rows` does).
"""

from __future__ import annotations

from typing import TypeAlias

from commdsl import compiler
from commdsl.commands.arguments import Place, Target, UsageError
from commdsl.commands.jobs import Job, Outcome, read
from commdsl.commands.trial_rows import misfit
from commdsl.compiler import CheckedPlan, CompiledDispatch, Given
from commdsl.ir.plans import DispatchPlan
from commdsl.language.records import dataclass
from commdsl.language.syntax import DispatchDecl, File, PlanDecl
from commdsl.machine import resources

Tabled: TypeAlias = CompiledDispatch | CheckedPlan
"""What has rows that go by tables."""


@dataclass(frozen=True, eq=False)
class Pairing:
    """A dispatch and the plan it runs by; None: by random tables."""

    dispatch: CompiledDispatch
    plan: CheckedPlan | None


def asked_for(place: Place | None, jobs: tuple[Job, ...]) -> CheckedPlan | None:
    """The plan of --plan. Raises UsageError where no dispatch would run by it, CommError for a fault in it."""
    if place is None:
        return None
    if not any(isinstance(job.decl, DispatchDecl) for job in jobs):
        raise UsageError("--plan says where the rows of a dispatch go, and none is run")
    files = read(place.path)
    return compiler.check_plan(files, compiler.choose_kind(files, place.name, PlanDecl))


def with_ranks(job: Job, target: Target, asked: CheckedPlan | None) -> Job:
    """A dispatch runs on the ranks of its plan, where no number is asked for."""
    if not isinstance(job.decl, DispatchDecl) or target.ranks is not None or target.on is not None:
        return job
    own = compiler.declared(job.files, PlanDecl)
    ranks = asked.plan.num_ranks if asked is not None else own[0].ranks.value if own else job.ranks
    return Job(job.path, job.files, job.decl, ranks)


def pairing(outcome: Outcome, checked: Tabled, target: Target, asked: CheckedPlan | None) -> Pairing:
    """What runs. Raises UsageError where a plan is no table of the dispatch, CommError for a fault in either."""
    job = outcome.job
    match checked:
        case CompiledDispatch(dispatch=dispatch):
            if asked is not None:
                return Pairing(checked, asked)
            own = (compiler.check_plan(job.files, decl) for decl in compiler.declared(job.files, PlanDecl))
            return Pairing(checked, next((one for one in own if not misfit(dispatch, one.plan)), None))
        case CheckedPlan(plan=plan):
            return Pairing(mover(job.files, plan, target), checked)


def mover(files: tuple[File, ...], plan: DispatchPlan, target: Target) -> CompiledDispatch:
    """A dispatch of the file that the plan is a table of, else the shipped one."""
    if target.ranks not in (None, (plan.num_ranks,)):
        raise UsageError(f"`{plan.name}` is for {plan.num_ranks} ranks: leave --ranks out")
    given = Given(plan.num_ranks, target.on, dict(target.params), tune=dict(target.tune))
    for decl in compiler.declared(files, DispatchDecl):
        found = compiler.check_dispatch(files, decl, given)
        if not misfit(found.dispatch, plan):
            return compiler.printed(found)
    name = "rows" if plan.mask is None else "qkv"
    shipped = compiler.read(resources.data_dir("schedules") / "dispatch" / f"{name}.comm")
    decl = compiler.choose_kind(shipped, name, DispatchDecl)
    return compiler.printed(compiler.check_dispatch((shipped[0], *files), decl, given))
