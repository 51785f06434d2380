"""Turns outcomes into what is said of a proof: one line a declaration, one JSON value an outcome.

Assumes outcomes of `jobs`. Does not show faults; diagnostics say those themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from commdsl.commands.jobs import Outcome
from commdsl.commands.output import count, finite
from commdsl.compiler import Checked, CheckedDispatch, CheckedPlan, CheckedSchedule
from commdsl.cost.report import Report
from commdsl.ir.plans import DispatchPlan


def summary(outcomes: Iterable[Outcome]) -> list[tuple[str, str]]:
    """Name and `proved for 2, 4, 8 ranks on switch (...)`, one pair a declaration."""
    groups: dict[tuple[object, ...], list[tuple[Outcome, Checked]]] = {}
    for outcome in outcomes:
        if outcome.checked is not None:
            key = (outcome.job.path, outcome.job.kind, outcome.job.name)
            groups.setdefault(key, []).append((outcome, outcome.checked))
    return [(group[0][0].job.name, _line(group)) for group in groups.values()]


def _line(group: list[tuple[Outcome, Checked]]) -> str:
    ranks = ", ".join(str(outcome.job.ranks) for outcome, _ in group)
    seconds = f"{sum(outcome.seconds for outcome, _ in group):.2f} s"
    where, sizes = "", []
    match group[0][1]:
        case CheckedSchedule(schedule=schedule):
            where = f" on {schedule.topology.name}"
            sizes = [count(schedule.num_steps, "step")] if len(group) == 1 else []
        case CheckedDispatch(dispatch=dispatch):
            where = f" on {dispatch.topology.name}"
            sizes = [count(len(dispatch.tensors), "tensor")]
            sizes += [] if dispatch.back is None else [f"{', '.join(dispatch.back.names)} back"]
        case CheckedPlan(plan=plan, routing=routing):
            sizes = [count(documents(plan), "document"), count(plan.shards.num, "shard")]
            sizes += [count(int(routing.queries.length.sum()), "query row")]
            sizes += [] if routing.keys is None else [count(int(routing.keys.length.sum()), "key row")]
        case _:
            assert_never(group[0][1])
    return f"proved for {ranks} ranks{where} ({', '.join([*sizes, seconds])})"


def documents(plan: DispatchPlan) -> int:
    return len(set(plan.document.tolist()))


def to_json(outcome: Outcome) -> dict[str, object]:
    """What was proved: the file, the kind and the name, the ranks, and the numbers of its kind."""
    job, checked = outcome.job, outcome.checked
    assert checked is not None, "only what was proved is listed"
    head = {"file": str(job.path), job.kind: job.name, "ranks": job.ranks}
    return {**head, **_numbers(checked), "seconds": round(outcome.seconds, 4)}


def cost_json(report: Report) -> dict[str, object]:
    """What a schedule costs, and the least that any could; null where there is no such number."""
    return {
        "steps": report.num_steps,
        "transfers": report.num_transfers,
        "copies": report.num_copies,
        "yields": report.num_yields,
        "blocks": report.blocks,
        "classes": [
            {"buffers": list(one.buffers), "element": one.element, "blocks": one.blocks} for one in report.classes
        ],
        "latency_seconds": finite(report.latency),
        "seconds_per_byte": finite(report.seconds_per_byte),
        "least_latency_seconds": finite(report.limit.latency),
        "least_seconds_per_byte": finite(report.limit.seconds_per_byte),
        "bound": report.limit.reason,
        "block_bytes": report.block_bytes,
        "ratio": finite(report.ratio),
        "same_bits": report.same_bits,
    }


def _numbers(checked: Checked) -> dict[str, object]:
    match checked:
        case CheckedSchedule(schedule=schedule, plan=plan, report=report):
            return {
                "topology": schedule.topology.name,
                "parameters": dict(schedule.params),
                "steps": schedule.num_steps,
                "symmetric_bytes": plan.symmetric_bytes,
                "cost": cost_json(report),
            }
        case CheckedDispatch(dispatch=dispatch):
            return {
                "topology": dispatch.topology.name,
                "tensors": [tensor.name for tensor in dispatch.tensors],
                "parameters": dict(dispatch.params),
                "back": [] if dispatch.back is None else list(dispatch.back.names),
            }
        case CheckedPlan(plan=plan, routing=routing):
            return {
                "documents": documents(plan),
                "shards": plan.shards.num,
                "query_rows": int(routing.queries.length.sum()),
                "key_rows": 0 if routing.keys is None else int(routing.keys.length.sum()),
            }
        case _:
            assert_never(checked)
