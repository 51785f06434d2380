"""Turns files into jobs, one per plan of a dispatch and one per dispatch and number of ranks, and a job into its proof.

Assumes `compiler` for all stages. Does not print; what is said of a proof, as a line or as JSON, is part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path
from typing import TypeAlias, assert_never

from commdsl import compiler
from commdsl.commands.arguments import Target
from commdsl.commands.jobs import rank_counts
from commdsl.commands.output import count
from commdsl.compiler import CheckedDispatch, CheckedPlan
from commdsl.ir.dispatches import ByKey
from commdsl.language.diagnostics import CommError, Diagnostic
from commdsl.language.records import dataclass
from commdsl.language.syntax import File


@dataclass(frozen=True, slots=True)
class PlanJob:
    """One plan of one file; it says itself for how many ranks."""

    path: Path
    files: tuple[File, ...]
    name: str
    ranks: int


@dataclass(frozen=True, slots=True)
class DispatchJob:
    """One dispatch of one file, for one number of ranks."""

    path: Path
    files: tuple[File, ...]
    name: str
    ranks: int


AnyJob: TypeAlias = PlanJob | DispatchJob


@dataclass(frozen=True, eq=False)
class Proof:
    """What came of a job: `checked` is None where the proof failed; then `diagnostics` has an error."""

    job: AnyJob
    checked: CheckedPlan | CheckedDispatch | None
    diagnostics: tuple[Diagnostic, ...]
    seconds: float = field(compare=False)


def jobs_of(path: Path, files: tuple[File, ...], target: Target, wanted: str | None = None) -> tuple[AnyJob, ...]:
    """The jobs in the order of kinds, names, ranks, or only those of the name that is wanted."""
    plans = {decl.name.text: decl.ranks.value for decl in compiler.plans(files) if wanted in (None, decl.name.text)}
    names = dict.fromkeys(decl.name.text for decl in compiler.dispatches(files) if wanted in (None, decl.name.text))
    return (
        *(PlanJob(path, files, name, ranks) for name, ranks in plans.items()),
        *(DispatchJob(path, files, name, ranks) for name in names for ranks in rank_counts(files, target)),
    )


def prove(job: AnyJob, target: Target, *, emit: bool = False) -> Proof:
    """Checks one job; with `emit` a dispatch's kernel has its text as well."""
    work: Callable[..., CheckedDispatch] = compiler.compile_dispatch if emit else compiler.check_dispatch
    start = time.perf_counter()
    checked: CheckedPlan | CheckedDispatch
    try:
        match job:
            case PlanJob():
                checked = compiler.check_plan(job.files, job.name)
            case DispatchJob():
                checked = work(job.files, job.name, job.ranks, target.on, dict(target.params), dict(target.tune))
            case _:
                assert_never(job)
    except CommError as error:
        return Proof(job, None, error.diagnostics, time.perf_counter() - start)
    return Proof(job, checked, checked.warnings, time.perf_counter() - start)


def summary(proofs: Iterable[Proof]) -> list[tuple[str, str]]:
    """Name and `proved for ...`, one pair for each plan and dispatch."""
    groups: dict[tuple[Path, type, str], list[Proof]] = {}
    for proof in proofs:
        if proof.checked is not None:
            groups.setdefault((proof.job.path, type(proof.job), proof.job.name), []).append(proof)
    return [(name, _line(group)) for (_, _, name), group in groups.items()]


def _line(group: list[Proof]) -> str:
    seconds = f"{sum(proof.seconds for proof in group):.2f} s"
    ranks = ", ".join(str(proof.job.ranks) for proof in group)
    match group[0].checked:
        case CheckedPlan(plan, routing, _):
            rows = [count(int(routing.queries.length.sum()), "query row")]
            rows += [] if routing.keys is None else [count(int(routing.keys.length.sum()), "key row")]
            shards = f"{count(len(set(plan.document.tolist())), 'document')}, {count(plan.shards.num, 'shard')}"
            return f"proved for {ranks} ranks ({shards}, {', '.join(rows)}, {seconds})"
        case CheckedDispatch(dispatch=dispatch):
            back = "" if dispatch.back is None else f", {', '.join(dispatch.back.names)} back"
            tensors = count(len(dispatch.tensors), "tensor")
            by_key = any(isinstance(route, ByKey) for route in dispatch.routes)
            verdict = "held to its laws, not built yet," if by_key else "proved"
            return f"{verdict} for {ranks} ranks on {dispatch.topology.name} ({tensors}{back}, {seconds})"
        case _:
            raise AssertionError("only what was proved has a line")


def to_json(proof: Proof) -> dict[str, object]:
    facts: dict[str, object] = {"file": str(proof.job.path)}
    match proof.checked:
        case CheckedPlan(plan, routing, _):
            facts |= {
                "plan": plan.name,
                "ranks": plan.num_ranks,
                "documents": len(set(plan.document.tolist())),
                "shards": plan.shards.num,
                "query_rows": int(routing.queries.length.sum()),
                "key_rows": 0 if routing.keys is None else int(routing.keys.length.sum()),
            }
        case CheckedDispatch(dispatch=dispatch):
            facts |= {
                "dispatch": dispatch.name,
                "ranks": dispatch.num_ranks,
                "topology": dispatch.topology.name,
                "tensors": [tensor.name for tensor in dispatch.tensors],
                "parameters": dict(dispatch.params),
                "back": [] if dispatch.back is None else list(dispatch.back.names),
            }
        case _:
            raise AssertionError("only what was proved is listed")
    return facts | {"seconds": round(proof.seconds, 4)}
