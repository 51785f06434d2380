"""Turns what was proved into what a person wants to know of it: the laws that hold, and what it costs.

Assumes a checked declaration. Does not run it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from math import isfinite
from typing import assert_never

import numpy as np

from commdsl import checks
from commdsl.checks.cycles import broken_cycles
from commdsl.checks.roles import broken_roles
from commdsl.commands.output import bytes_text, count, finite, style
from commdsl.commands.trial_rows import RowTrial
from commdsl.compiler import Checked, CheckedDispatch, CheckedPlan, CheckedSchedule
from commdsl.cost.report import ClassLoad, PairLoad, Report
from commdsl.language.records import dataclass
from commdsl.machine.topology import Topology
from commdsl.planner.balance import LinkLoad, byte_links

PLAN_LAWS = (
    "every hazard within and across calls is ordered, no rank waits for ever, no flag is idle",
    "symmetric memory fits, and no slot is reused while a peer may read it",
)


ROUTED_LAWS = (
    "whatever tables or keys say: every hazard within and across calls is ordered, no wait is in vain, none is idle",
    "every tensor of a dispatch lies where its caller looks for it, copied, counted and weighted as it says",
)


def laws(checked: Checked) -> tuple[str, ...]:
    """What each check proved, in the words its module opens with; not of cycles and roles where there are none."""
    match checked:
        case CheckedSchedule(schedule=schedule):
            left_out = [*(() if schedule.cycles else [broken_cycles]), *(() if schedule.roles else [broken_roles])]
            rules = [rule for group in (*checks.BESIDE, *checks.RULES) for rule in group if rule not in left_out]
            return (*_heads(rule.__module__ for rule in rules), *PLAN_LAWS)
        case CheckedDispatch():
            return ROUTED_LAWS
        case CheckedPlan():
            groups = (*checks.DISPATCH_PLAN_RULES, *checks.ROUTING_RULES)
            return _heads(rule.__module__ for group in groups for rule in group)
        case _:
            assert_never(checked)


def _heads(modules: Iterable[str]) -> tuple[str, ...]:
    """The first line of each rule's module, without its codes, once."""
    heads = ((sys.modules[module].__doc__ or "").split("\n")[0] for module in modules)
    return tuple(dict.fromkeys(re.sub(r"^C\d{3}[^:]*: ", "", head).rstrip(".") for head in heads))


def proof_lines(checked: Checked) -> Iterator[str]:
    """A tick per law, under the number of ranks for which it was proved."""
    match checked:
        case CheckedSchedule(schedule=of) | CheckedDispatch(dispatch=of):
            params = "".join(f", {name} = {value}" for name, value in of.params)
            yield style(f"proved for {of.num_ranks} ranks on {of.topology.name}{params}", "strong")
        case CheckedPlan(plan=plan):
            yield style(f"`{plan.name}` proved for {plan.num_ranks} ranks", "strong")
        case _:
            assert_never(checked)
    for law in laws(checked):
        yield f"  {style('✓', 'good')} {law}"


def cost_lines(report: Report) -> Iterator[str]:
    """Steps, bytes and time beside the least there could be."""
    machine = f"{report.topology}, an idealised flat switch" if report.idealised else report.topology
    yield style(f"cost on {machine}", "strong")
    moves = f"{count(report.num_transfers, 'transfer')} between ranks"
    copies = f", {count(report.num_copies, 'copy').replace('copys', 'copies')} within" if report.num_copies else ""
    yield f"  {'steps':<10}{report.num_steps}, {moves}{copies}"
    yield f"  {'traffic':<10}{report.blocks:.4g} n in all, n the bytes of a block"
    if len(report.classes) > 1:
        yield f"  {'':<10}{', '.join(map(class_text, report.classes))}: blocks that may differ, counted as equally long"
    if report.busiest_port and report.busiest_pair:
        port = report.busiest_port
        yield f"  {'port':<10}{port.who} {port.blocks:.4g} n over {port.link}, the most of any"
        yield f"  {'pair':<10}{pair_text(report.busiest_pair)}, the most of any"
    yield f"  {'time':<10}{time_text(report.latency, report.seconds_per_byte)}"
    least = time_text(report.limit.latency, report.limit.seconds_per_byte)
    yield f"  {'least':<10}{least} for any schedule ({report.limit.reason})"
    yield f"  {'ratio':<10}{ratio_text(report)}"
    differ = "in the last bit" if report.rounded_to is None else f"by a rounding to {report.rounded_to}"
    bits = "the same bits on every rank" if report.same_bits else f"ranks may differ {differ}"
    yield f"  {'result':<10}{bits}"


def ratio_text(report: Report) -> str:
    """`1.02 at n = 64 MB, 2.00 for tiny tensors, 1.00 for huge ones`; of nothing there is no multiple."""
    if not isfinite(report.ratio):
        return "none, as the least is nothing"
    ends = f"{report.latency_ratio:.2f} for tiny tensors, {report.bandwidth_ratio:.2f} for huge ones"
    return f"{report.ratio:.2f} at n = {bytes_text(report.block_bytes)}, {ends}"


def class_text(load: ClassLoad) -> str:
    """`2 n of `acc` (float32)`."""
    element = "" if load.element is None else f" ({load.element})"
    return f"{load.blocks:.4g} n of `{load.buffers[0]}`{element}"


def pair_text(pair: PairLoad) -> str:
    return f"{pair.source} → {pair.dest} carries {pair.blocks:.4g} n"


def time_text(latency: float, seconds_per_byte: float) -> str:
    """`9.8 us + n / 257 GB/s`."""
    if seconds_per_byte == 0:
        return f"{latency * 1e6:.3g} us"
    return f"{latency * 1e6:.3g} us + n / {1e-9 / seconds_per_byte:.4g} GB/s"


@dataclass(frozen=True, eq=False)
class RowCost:
    """What the way there costs that sends the most bytes to other ranks; the way back carries the same rows."""

    topology: Topology
    table: str
    bytes: int  # to other ranks
    links: tuple[LinkLoad, ...]

    @property
    def seconds(self) -> float:
        """The least: that of the busiest port or pair."""
        return max((link.seconds for link in self.links), default=0.0)


def row_cost(topology: Topology, moved: RowTrial) -> RowCost:
    """The ranks are the first of the topology's, which may have more."""
    away = [sent * (1 - np.eye(len(sent), dtype=np.int64)) for sent in moved.sent]
    most = max(range(len(away)), key=lambda index: int(away[index].sum()))
    whole = np.zeros((topology.num_ranks, topology.num_ranks), np.int64)
    whole[: len(away[most]), : len(away[most])] = away[most]
    return RowCost(topology, moved.tables[most], int(whole.sum()), byte_links(topology, whole))


def row_cost_lines(cost: RowCost) -> Iterator[str]:
    """Bytes, the busiest port of each class of links, and the least time."""
    machine = f"{cost.topology.name}, an idealised flat switch" if cost.topology.idealised else cost.topology.name
    yield style(f"cost on {machine}", "strong")
    yield f"  {'traffic':<10}{cost.bytes:,} B to other ranks, there by {cost.table}"
    for link in cost.links:
        over = f"over {link.name}" if link.name else "without a link"
        yield f"  {'port':<10}{link.port.who} {link.port.bytes:,} B {over}, the most of any"
    least = f"{cost.seconds * 1e6:.3g} us" if cost.seconds < float("inf") else "none"
    yield f"  {'least':<10}{least} for any way to send these rows: the busiest port or pair"


def row_cost_json(cost: RowCost) -> dict[str, object]:
    return {
        "table": cost.table,
        "bytes": cost.bytes,
        "links": [
            {
                "link": link.name,
                "bytes": link.bytes,
                "busiest": {"rank": link.port.rank, "sends": link.port.sends, "bytes": link.port.bytes},
                "seconds": finite(link.seconds),
            }
            for link in cost.links
        ],
        "least_seconds": finite(cost.seconds),
    }
