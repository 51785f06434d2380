"""Turns the dispatch plans of a file into tables and pictures: who sends what to whom, and how even the loads are.

Assumes names of plans that the file declares. Raises CommError for a plan with a fault. Does not print.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from commdsl import compiler
from commdsl.commands import output, plan_view
from commdsl.commands.arguments import Target, UsageError
from commdsl.ir.plans import DispatchPlan
from commdsl.language.diagnostics import Diagnostic
from commdsl.language.syntax import File
from commdsl.machine.topology import Topology
from commdsl.planner.balance import Balance, Widths, balance
from commdsl.planner.packing import at_home


@dataclass(frozen=True, slots=True)
class ShownPlan:
    """A plan as text and as JSON."""

    text: str
    json: dict[str, object]
    warnings: tuple[Diagnostic, ...]


def show_plans(
    files: tuple[File, ...], path: Path, target: Target, names: list[str], svg: Path | None
) -> tuple[ShownPlan, ...]:
    """Proves each plan, weighs it beside its documents all at home, and draws it where asked."""
    shown: list[ShownPlan] = []
    for name in names:
        checked = compiler.check_plan(files, name)
        topology = machine(files, target, checked.plan)
        before, after = (balance(one, topology, Widths()) for one in (at_home(checked.plan), checked.plan))
        text = "\n".join(plan_view.view(checked.plan, before, after))
        shown.append(ShownPlan(text, to_json(path, checked.plan, before, after), checked.warnings))
        if svg is not None:
            draw(svg if len(names) == 1 else svg.with_stem(f"{svg.stem}-{name}"), checked.plan, before, after)
    return tuple(shown)


def machine(files: tuple[File, ...], target: Target, plan: DispatchPlan) -> Topology:
    """The topology asked for, which has the plan's ranks: a plan is for one number of them."""
    if target.ranks not in (None, (plan.num_ranks,)):
        raise UsageError(f"`{plan.name}` is for {plan.num_ranks} ranks: leave --ranks out")
    found = compiler.find_topology(files, target.on, plan.num_ranks)
    if found.num_ranks != plan.num_ranks:
        raise UsageError(f"`{plan.name}` is for {plan.num_ranks} ranks, `{found.name}` has {found.num_ranks}")
    return found


def draw(path: Path, plan: DispatchPlan, before: Balance, after: Balance) -> None:
    from commdsl.cost.draw_plan import draw_plan  # 20 ms that only a picture needs

    path.write_text(draw_plan(plan, before, after), encoding="utf-8")
    output.tell(f"drew {path}")


def to_json(path: Path, plan: DispatchPlan, before: Balance, after: Balance) -> dict[str, object]:
    shards = plan.shards
    columns = (
        shards.rank.tolist(),
        plan.document.tolist(),
        plan.context.tolist(),
        shards.length.tolist(),
        plan.dest.tolist(),
    )
    return {
        "file": str(path),
        "plan": plan.name,
        "ranks": plan.num_ranks,
        "topology": after.topology.name,
        "stage": "ir",
        "shards": [
            {
                "rank": rank,
                "document": document,
                "begin": begin,
                "length": length,
                "dest": [to for to in dest if to >= 0],
            }
            for rank, document, begin, length, dest in zip(*columns, strict=True)
        ],
        "before": plan_view.to_json(before),
        "after": plan_view.to_json(after),
    }
