"""Turns a proved schedule into what a person wants to know of it: the laws that hold, and what it costs.

Assumes a checked schedule. Does not run it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

from commdsl import checks
from commdsl.checks.cycles import broken_cycles
from commdsl.checks.roles import broken_roles
from commdsl.commands.output import bytes_text, count, style
from commdsl.compiler import CheckedSchedule
from commdsl.cost.report import PairLoad, Report
from commdsl.ir.schedules import Schedule

PLAN_LAWS = (
    "every hazard within and across calls is ordered, no rank waits for ever, no flag is idle",
    "symmetric memory fits, and no slot is reused while a peer may read it",
)


def laws(schedule: Schedule) -> Iterator[str]:
    """What each check proved, in the words its module opens with; not of cycles and roles where there are none."""
    seen: dict[str, None] = {}
    for rule in (rule for group in checks.RULES for rule in group):
        if (rule is broken_cycles and not schedule.cycles) or (rule is broken_roles and not schedule.roles):
            continue
        head = (sys.modules[rule.__module__].__doc__ or "").split("\n")[0]
        seen[re.sub(r"^C\d{3}[^:]*: ", "", head).rstrip(".")] = None
    yield from seen
    yield from PLAN_LAWS


def proof_lines(checked: CheckedSchedule) -> Iterator[str]:
    """A tick per law, under the number of ranks for which it was proved."""
    schedule = checked.schedule
    params = "".join(f", {name} = {value}" for name, value in schedule.params)
    yield style(f"proved for {schedule.num_ranks} ranks on {schedule.topology.name}{params}", "strong")
    for law in laws(schedule):
        yield f"  {style('✓', 'good')} {law}"


def cost_lines(report: Report) -> Iterator[str]:
    """Steps, bytes and time beside the least there could be."""
    machine = f"{report.topology}, an idealised flat switch" if report.idealised else report.topology
    yield style(f"cost on {machine}", "strong")
    moves = f"{count(report.num_transfers, 'transfer')} between ranks"
    copies = f", {count(report.num_copies, 'copy').replace('copys', 'copies')} within" if report.num_copies else ""
    yield f"  {'steps':<10}{report.num_steps}, {moves}{copies}"
    yield f"  {'traffic':<10}{report.blocks:.4g} n in all, n the bytes of a block"
    if report.busiest_port and report.busiest_pair:
        port = report.busiest_port
        verb = "sends" if port.sends else "receives"
        yield f"  {'port':<10}rank {port.rank} {verb} {port.blocks:.4g} n over {port.link}, the most of any"
        yield f"  {'pair':<10}{pair_text(report.busiest_pair)}, the most of any"
    yield f"  {'time':<10}{time_text(report.latency, report.seconds_per_byte)}"
    least = time_text(report.limit.latency, report.limit.seconds_per_byte)
    yield f"  {'least':<10}{least} for any schedule ({report.limit.reason})"
    size = bytes_text(report.block_bytes)
    ends = f"{report.latency_ratio:.2f} for tiny tensors, {report.bandwidth_ratio:.2f} for huge ones"
    yield f"  {'ratio':<10}{report.ratio:.2f} at n = {size}, {ends}"
    bits = "the same bits on every rank" if report.same_bits else "ranks may differ in the last bit"
    yield f"  {'result':<10}{bits}"


def pair_text(pair: PairLoad) -> str:
    return f"{pair.source} → {pair.dest} carries {pair.blocks:.4g} n"


def time_text(latency: float, seconds_per_byte: float) -> str:
    """`9.8 us + n / 257 GB/s`."""
    if seconds_per_byte == 0:
        return f"{latency * 1e6:.3g} us"
    return f"{latency * 1e6:.3g} us + n / {1e-9 / seconds_per_byte:.4g} GB/s"


def report_json(report: Report) -> dict[str, object]:
    return {
        "steps": report.num_steps,
        "transfers": report.num_transfers,
        "copies": report.num_copies,
        "yields": report.num_yields,
        "blocks": report.blocks,
        "latency_seconds": report.latency,
        "seconds_per_byte": report.seconds_per_byte,
        "least_latency_seconds": report.limit.latency,
        "least_seconds_per_byte": report.limit.seconds_per_byte,
        "bound": report.limit.reason,
        "block_bytes": report.block_bytes,
        "ratio": report.ratio,
        "same_bits": report.same_bits,
    }
