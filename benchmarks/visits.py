"""How much of a rotation hides behind what its visits compute. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/visits.py [--bytes 16MB --compute 1000 --time-budget 75 --save NAME]

A row is a way to move (the copy engine, all SMs, 8 or 16 of them) and what each visit computes for about so many
microseconds: a kernel that waits on one SM (`sleep`), or products of bfloat16 matrices on all of them (`gemm`), both
calibrated in the run. Columns, medians of batches of the slowest rank, in CUDA graphs: the visits' compute alone, the
transfers alone (visits that do nothing), both together, the larger of both, and how far together is above it. `*` marks
5 % or more. Every way is checked before it is timed. The table comes last, also when time is up; exit code 1: something
wrong, or no way within 5 % for `sleep`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")

import torch
import torch.distributed as dist

import commdsl
from benchmarks import record
from benchmarks.cases import parse_size
from benchmarks.ending import end_of
from benchmarks.measure import captured
from benchmarks.report import grid

WAYS: dict[str, dict[str, Any] | None] = {
    "engine": {"protocol": "engine"},
    "bulk": None,
    "bulk, 8 SMs": {"sms": 8},
    "bulk, 16 SMs": {"sms": 16},
}
CALLS, BATCHES = 4, 9
TARGET = 0.05
GRACE = 12.0
GEMM = 4096
COLUMNS = ("compute", "way", "bytes", "ranks", "calls", "alone_us", "transfers_us", "together_us", "problem")
HEADER = ("compute", "by", "compute us", "transfers us", "together us", "larger us", "above", "")


@dataclass(frozen=True)
class Row:
    """Microseconds of one call."""

    compute: str
    way: str
    alone: float
    transfers: float
    together: float
    problem: str = ""

    @property
    def above(self) -> float:
        return self.together / max(self.alone, self.transfers, 1e-9) - 1

    def cells(self) -> list[str]:
        if self.problem:
            return [self.compute, self.way, "", "", "", "", "", self.problem]
        larger = max(self.alone, self.transfers)
        numbers = [f"{value:.0f}" for value in (self.alone, self.transfers, self.together, larger)]
        mark = "*" if self.above >= TARGET else ""
        return [self.compute, self.way, *numbers, f"{mark}{100 * self.above:.1f} %", "ok"]


@dataclass
class Bench:
    rank: int
    ranks: int
    deadline: float
    control: Any
    numel: int
    rows: list[Row] = field(default_factory=list)

    def everyone(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def time_is_up(self) -> bool:
        return bool(self.everyone(time.monotonic() > self.deadline)[0])


def timed(bench: Bench, call: Callable[[], object], calls: int = CALLS, batches: int = BATCHES) -> float:
    """Microseconds a call: the median batch of the slowest rank."""
    graph = captured(call, calls)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(batches):
        dist.barrier(group=bench.control)
        graph.replay()  # absorbs what skew the barrier left
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * start.elapsed_time(end) / calls)
    graph.reset()
    slowest = torch.tensor(times, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=bench.control)
    return float(median(slowest.tolist()))


def sleeping(bench: Bench, microseconds: float) -> Callable[[], None]:
    """A kernel that waits so long on one SM."""
    cycles = 1_000_000
    each = timed(bench, lambda: torch.cuda._sleep(cycles), batches=3)
    wanted = int(cycles * microseconds / each)
    return lambda: torch.cuda._sleep(wanted)


def multiplying(bench: Bench, microseconds: float) -> Callable[[], None]:
    """Products of matrices, as many as take about so long."""
    a, b = (torch.randn(GEMM, GEMM, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    made = torch.empty_like(a)
    each = timed(bench, lambda: torch.mm(a, b, out=made), batches=3)
    times = max(1, round(microseconds / each))

    def compute() -> None:
        for _ in range(times):
            torch.mm(a, b, out=made)

    return compute


def check(bench: Bench, op: Any, compute: Callable[[], None]) -> str:
    """A captured call on inputs that were not there when it was captured: what is wrong, or nothing."""
    kv = torch.empty(bench.numel, device="cuda", dtype=torch.bfloat16)
    seen: list[torch.Tensor] = []

    def look(number: int, visiting: torch.Tensor) -> None:
        compute()
        seen.append(visiting[:: max(1, bench.numel // 4096)].clone())

    graph_of = captured(lambda: (seen.clear(), op.visit(kv, look)), 1)
    wrong = 0
    for turn in range(3):
        kv.fill_(float(8 * turn + bench.rank))
        graph_of.replay()
        torch.cuda.synchronize()
        for number, one in enumerate(seen):
            wrong += int((one != float(8 * turn + (bench.rank - number) % bench.ranks)).any())
    graph_of.reset()
    op.synchronize()
    total = sum(bench.everyone(wrong))
    return f"{total} visits are wrong" if total else ""


def measure(bench: Bench, name: str, way: str, compute: Callable[[], None]) -> Row:
    op = commdsl.load("rotation_ring", tune=WAYS[way], ranks=bench.ranks)
    problem = check(bench, op, compute)
    if problem:
        return Row(name, way, 0, 0, 0, problem)
    kv = torch.randn(bench.numel, device="cuda", dtype=torch.bfloat16)

    def alone() -> None:
        for _ in range(bench.ranks):
            compute()

    alone_us = timed(bench, alone)
    transfers = timed(bench, lambda: op.visit(kv, lambda number, visiting: None))
    together = timed(bench, lambda: op.visit(kv, lambda number, visiting: compute()))
    op.synchronize()
    op.release()
    return Row(name, way, alone_us, transfers, together)


def attempt(bench: Bench, name: str, way: str, compute: Callable[[], None]) -> Row:
    """A row, or why there is none on some rank."""
    row, problem = None, ""
    try:
        row = measure(bench, name, way, compute)
    except Exception as error:
        traceback.print_exc()
        problem = f"{type(error).__name__}: {str(error).splitlines()[0][:90]}"
    found = [text for text in bench.everyone(problem) if text]
    if not found and row is not None:
        return row
    commdsl.reset()
    return Row(name, way, 0, 0, 0, found[0])


def set_up(options: argparse.Namespace) -> Bench:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo")
    return Bench(
        dist.get_rank(),
        dist.get_world_size(),
        options.deadline,
        dist.new_group(backend="gloo"),
        parse_size(options.bytes) // 2,
    )


def run(bench: Bench, microseconds: float) -> None:
    for name, make in (("sleep", sleeping), ("gemm", multiplying)):
        compute = make(bench, microseconds)
        for way in WAYS:
            if bench.time_is_up():
                bench.rows.append(Row(name, way, 0, 0, 0, "no time left"))
            else:
                bench.rows.append(attempt(bench, name, way, compute))


def lines_of(bench: Bench) -> list[list[object]]:
    """As they are saved."""
    return [
        [row.compute, row.way, 2 * bench.numel, bench.ranks, CALLS]
        + [f"{value:.4g}" for value in (row.alone, row.transfers, row.together)]
        + [row.problem]
        for row in bench.rows
    ]


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", default="16MB", help="that travel a hop")
    parser.add_argument("--compute", type=float, default=1000.0, help="microseconds a visit")
    parser.add_argument("--time-budget", type=float, default=75.0, help="seconds")
    record.add_options(parser)
    options = parser.parse_args(arguments)
    record.check_options(parser, options)
    options.deadline = time.monotonic() + options.time_budget - 15.0
    return options


def main() -> None:
    options = options_of(sys.argv[1:])
    benches: list[Bench] = []

    def work() -> tuple[int, str]:
        bench = set_up(options)
        benches.append(bench)
        run(bench, options.compute)
        wrong = [row for row in bench.rows if "wrong" in row.problem]
        hidden = any(not row.problem and row.above < TARGET for row in bench.rows if row.compute == "sleep")
        if options.save and bench.rank == 0:
            record.save_lines(options, COLUMNS, lines_of(bench))
        where = f"{options.bytes} a hop on {bench.ranks} x {torch.cuda.get_device_name()}"
        return int(bool(wrong) or not hidden), f"{where}, {options.compute:g} us a visit"

    def tell(why: str) -> None:
        for bench in benches:
            print(f"\n{why}\n{grid(HEADER, [row.cells() for row in bench.rows])}", flush=True)

    end_of(work, tell, options.time_budget, GRACE)


if __name__ == "__main__":
    main()
