"""Turns sizes into a table of what planning takes and how even it comes out: 512 ranks, 100,000 documents unless said.

Assumes no GPU. Each row lays out, balances, proves and writes a plan in this process; `--read-back` reads its text and
proves that, too, which takes several times as long: text is for people. Does not draw lengths from a data set: heavy
tails are drawn from a Pareto and a log-normal distribution, both cut at `--longest`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import record
from commdsl import compiler
from commdsl.commands.plan import prove
from commdsl.ir.plans import DispatchPlan
from commdsl.language.kinds import LinkScope
from commdsl.machine.topology import Link, Topology, switch
from commdsl.planner.balance import Balance, Widths, balance, imbalance
from commdsl.planner.comm_text import comm_text
from commdsl.planner.documents import Goal, balanced
from commdsl.planner.packing import Terms, at_home, pack

T = TypeVar("T")
SECONDS = ("seconds", "balance_s", "read_back_s")
LOADS = ("above_mean_before", "above_mean_after", "gb_sent_before", "gb_sent_after")
COLUMNS = ("lengths", "machine", "ranks", "documents", *SECONDS, *LOADS)
Lengths = NDArray[np.int64]


def pareto(rng: np.random.Generator, count: int) -> Lengths:
    return ((rng.pareto(1.1, count) + 1) * 600).astype(np.int64)


def log_normal(rng: np.random.Generator, count: int) -> Lengths:
    return np.exp(rng.normal(7.0, 1.8, count)).astype(np.int64)


LENGTHS: dict[str, Callable[[np.random.Generator, int], Lengths]] = {"pareto": pareto, "log-normal": log_normal}


def machines(ranks: int) -> Iterator[Topology]:
    """One flat switch; nodes of eight, all joined; nodes of eight, only GPUs of one index joined across them."""
    yield switch(ranks)
    nvlink = Link("nvlink", LinkScope.IN_NODE, 450e9, np.inf, 0.7e-6)
    for name, scope in (("nodes", LinkScope.ACROSS_NODES), ("rails", LinkScope.ACROSS_SAME_GPU)):
        if ranks % 8 == 0:
            yield Topology(name, ranks // 8, 8, 132, (nvlink, Link("rail", scope, 50e9, np.inf, 4e-6)))


@dataclass(frozen=True)
class Row:
    """One plan: its loads before and after, and what each stage took in seconds."""

    plan: DispatchPlan
    before: Balance
    after: Balance
    seconds: dict[str, float]


def measure(lengths: Lengths, machine: Topology, goal: Goal, *, read_back: bool) -> Row:
    seconds: dict[str, float] = {}

    def timed(stage: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        found = work()
        seconds[stage] = time.perf_counter() - start
        return found

    home = timed("lay out", lambda: pack(lengths, machine, goal.shortest))
    plan = timed("balance", lambda: balanced(home, machine, goal, Terms("made")))
    timed("prove", lambda: prove(plan))
    before, after = timed("report", lambda: tuple(balance(one, machine, Widths()) for one in (at_home(plan), plan)))
    text = timed("write", lambda: comm_text(plan))
    if read_back:
        again = timed("read back", lambda: compiler.check(compiler.read_text(text, "made.comm", Path())).plan)
        assert np.array_equal(again.dest, plan.dest), "the text means another plan"
        assert np.array_equal(again.shards.length, plan.shards.length), "the text means another plan"
    return Row(plan, before, after, seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--documents", type=int, default=100_000)
    parser.add_argument("--longest", type=int, default=1 << 20, help="tokens")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--read-back", action="store_true")
    record.add_options(parser)
    chosen = parser.parse_args()
    record.check_options(parser, chosen)
    saved: list[list[object]] = []
    print("| lengths | machine | seconds | attention above the mean | GB sent | queries away |")
    print("|---|---|---|---|---|---|")
    worst = 0.0
    for name, draw in LENGTHS.items():
        lengths = np.clip(draw(np.random.default_rng(chosen.seed), chosen.documents), 1, chosen.longest)
        for machine in machines(chosen.ranks):
            row = measure(lengths, machine, Goal(tolerance=chosen.tolerance), read_back=chosen.read_back)
            print(line(name, row), flush=True)
            saved.append([name, row.after.topology.name, chosen.ranks, chosen.documents, *fields(row)])
            if machine.name != "rails":  # which cannot always be even: a document reaches few ranks
                worst = max(worst, imbalance(row.after.attention))
    if chosen.save:
        record.save_lines(chosen, COLUMNS, saved)
    print(f"\nat worst {worst * 100:.2f} % above the mean where all ranks are linked")
    return int(worst > chosen.tolerance)


def fields(row: Row) -> list[str]:
    """What is saved of a row after its name."""
    read_back = row.seconds.get("read back")
    total = sum(row.seconds.values()) - (read_back or 0.0)
    even = [f"{imbalance(loads.attention):.4g}" for loads in (row.before, row.after)]
    sent = [
        " + ".join(f"{link.bytes / 1e9:.0f} {link.name}" for link in loads.links) for loads in (row.before, row.after)
    ]
    back = "" if read_back is None else f"{read_back:.4g}"
    return [f"{total:.4g}", f"{row.seconds['balance']:.4g}", back, *even, *sent]


def line(name: str, row: Row) -> str:
    stages = ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in row.seconds.items())
    even = " → ".join(f"{imbalance(loads.attention) * 100:.1f} %" for loads in (row.before, row.after))
    sent = " → ".join(
        " + ".join(f"{link.bytes / 1e9:,.0f} {link.name}" for link in loads.links) for loads in (row.before, row.after)
    )
    away = int((row.plan.dest[:, 0] != row.plan.shards.rank).sum())
    return (
        f"| {name} | {row.after.topology.name} | {sum(row.seconds.values()):.1f}: {stages} | {even} | {sent} | {away} |"
    )


if __name__ == "__main__":
    sys.exit(main())
