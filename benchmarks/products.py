"""Products beside what travels, and in sequence with it. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/products.py [--rows 1024 4096 8192 16384 --time-budget 60 --save NAME]

A row is an all-gather of rows and a product, or a product and a reduce-scatter of its rows: M rows in all, this rank's
K x N. Columns, medians in microseconds of the slowest rank, all contenders taking turns: cuBLAS alone; NCCL and cuBLAS
in sequence; torch's async-TP, which no graph can capture; ours in one launch, with each rank's rows in 1, 2 or 4
pieces. All but async-TP are in CUDA graphs of equal length. The floor is the larger of cuBLAS alone and the bytes at
390 GB/s. Every result is checked before anything is timed. The table comes last, also when time is up.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product as pairs
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "10")

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

import commdsl
from benchmarks.ending import end_of
from benchmarks.measure import captured
from benchmarks.report import grid

GATHERED = ((8192, 3584), (8192, 1280), (5120, 3456))
SCATTERED = ((3584, 8192), (1024, 8192), (3456, 5120))
"""K and N: Llama-70B's and Qwen-32B's of an 8-way split."""

PIECES = (1, 2, 4)
LINK = 390e3  # bytes a microsecond
CALLS, TURNS = 6, 7
GRACE = 15.0

Call = Callable[[], torch.Tensor]


@dataclass
class Output:
    title: str = "nothing was measured"
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def say(self) -> None:
        heads = ["", "M x K x N", "cuBLAS", "in sequence", "async-TP", *(f"ours/{C}" for C in PIECES)]
        print(
            "\n".join([*self.notes, "", self.title, grid([*heads, "floor", "ours/floor", "peer/ours"], self.rows)]),
            flush=True,
        )


@dataclass(frozen=True)
class Case:
    """One product of this rank: `gathers` rows before, or scatters sums behind."""

    gathers: bool
    rows: int  # of all ranks
    depth: int
    columns: int
    ranks: int
    rank: int

    @property
    def name(self) -> str:
        return "gather" if self.gathers else "scatter"

    def given(self, whole: bool, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and weights; `whole`: small whole numbers, whose sums are exact."""
        rows = self.rows // self.ranks if self.gathers else self.rows
        generator = torch.Generator(device).manual_seed(self.rank)
        shapes = (rows, self.depth), (self.columns, self.depth)
        if whole:
            made = [torch.randint(-1, 2, shape, generator=generator, device=device) for shape in shapes]
        else:
            made = [torch.randn(shape, generator=generator, device=device) for shape in shapes]
        x, w = (one.to(torch.bfloat16) for one in made)
        return x, w

    def sequence(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """By NCCL and cuBLAS."""
        if self.gathers:
            rows = x.new_empty(self.rows, self.depth)
            dist.all_gather_into_tensor(rows, x)
            return torch.mm(rows, w.t())
        made = torch.mm(x, w.t())
        y = x.new_empty(self.rows // self.ranks, self.columns)
        dist.reduce_scatter_tensor(y, made)
        return y

    def asynchronous(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """By torch's async-TP."""
        name = dist.group.WORLD.group_name
        if self.gathers:
            _, (made,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, name)
            return made
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, name)

    @property
    def bytes_sent(self) -> float:
        width = self.depth if self.gathers else self.columns
        return 2.0 * self.rows * width * (self.ranks - 1) / self.ranks


class Bench:
    """This rank's end of the run."""

    def __init__(self, options: argparse.Namespace, output: Output, start: float) -> None:
        self.options, self.output, self.start = options, output, start
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device)
        self.control = dist.new_group(backend="gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.token = torch.zeros(1, device=self.device)
        symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        output.title = (
            f"bfloat16, {self.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, microseconds"
        )
        self.ops = {
            (name, number): commdsl.load(name, params={"C": number})
            for name, number in pairs(("allgather_matmul", "matmul_reducescatter"), PIECES)
        }

    def everyone(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def run(self) -> None:
        for rows, (gathers, (depth, columns)) in pairs(self.options.rows, self.shapes()):
            if float(self.everyone(time.monotonic() - self.start)[0]) > self.options.time_budget:
                self.output.notes.append("time was up: fewer rows than asked for")
                return
            self.row(Case(gathers, rows, depth, columns, self.ranks, self.rank))

    def shapes(self) -> list[tuple[bool, tuple[int, int]]]:
        return [*((True, shape) for shape in GATHERED), *((False, shape) for shape in SCATTERED)]

    def calls(self, case: Case, x: torch.Tensor, w: torch.Tensor) -> dict[str, Call]:
        name = "allgather_matmul" if case.gathers else "matmul_reducescatter"
        found: dict[str, Call] = {
            "in sequence": lambda: case.sequence(x, w),
            "async-TP": lambda: case.asynchronous(x, w),
        }
        for number in PIECES:
            op = self.ops[name, number]
            found[f"ours/{number}"] = lambda op=op: op(x, w)  # type: ignore[misc]
        return found

    def row(self, case: Case) -> None:
        what = f"{case.name} {case.rows}x{case.depth}x{case.columns}"
        calls = self.calls(case, *case.given(True, self.device))
        wanted = calls["in sequence"]()
        right = [
            name
            for name, call in calls.items()
            if name == "in sequence" or self.is_right(f"{what}, {name}", call, wanted)
        ]
        x, w = case.given(False, self.device)
        whole = torch.randn(case.rows, case.depth, device=self.device).to(torch.bfloat16)
        calls = {name: call for name, call in self.calls(case, x, w).items() if name in right}
        eager = {name: calls.pop(name) for name in ("async-TP",) if name in calls}
        calls["cuBLAS"] = lambda: torch.mm(whole, w.t())
        graphs = {}
        for name, call in calls.items():
            made = self.attempt(f"{what}, {name}", lambda call=call: captured(call, CALLS))  # type: ignore[misc]
            if made is not None:
                graphs[name] = made
        runs = {name: graph.replay for name, graph in graphs.items()}
        runs |= {name: lambda call=call: [call() for _ in range(CALLS)] for name, call in eager.items()}  # type: ignore[misc]
        found = self.timed(runs)
        for graph in graphs.values():
            graph.reset()
        commdsl.check()
        floor = max(found["cuBLAS"], case.bytes_sent / LINK)
        ours = [found[name] for name in (f"ours/{number}" for number in PIECES) if name in found]
        peers = [found[name] for name in ("in sequence", "async-TP") if name in found]
        shown = ["cuBLAS", "in sequence", "async-TP", *(f"ours/{number}" for number in PIECES)]
        line = [case.name, f"{case.rows}x{case.depth}x{case.columns}"]
        line += [f"{found[name]:.0f}" if name in found else "" for name in shown]
        line += [
            f"{floor:.0f}",
            f"{min(ours) / floor:.2f}" if ours else "",
            f"{min(peers) / min(ours):.2f}" if ours else "",
        ]
        self.output.rows.append(line)
        if self.rank == 0:
            print("  ".join(line), flush=True)

    def attempt(self, what: str, call: Callable[[], Any]) -> Any:
        """None, and a note, where it fails on any rank."""
        made, problem = None, ""
        try:
            made = call()
            torch.cuda.synchronize()
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"
        problems = [one for one in self.everyone(problem) if one]
        if problems:
            self.output.notes.append(f"{what}: {problems[0]}")
            return None
        return made

    def is_right(self, what: str, call: Call, wanted: torch.Tensor) -> bool:
        """Whole numbers: sums of products are exact, and rounded once; NCCL's more often, where they are large."""
        found = self.attempt(what, call)
        if found is None:
            return False
        wrong = (found.float() - wanted.float()).abs() > 2.0**-7 * wanted.float().abs() + 2
        counts = self.everyone(int(wrong.sum()))
        if any(counts):
            self.output.notes.append(f"{what}: WRONG, {counts} by rank of {wrong.numel()}")
        return not any(counts)

    def timed(self, runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """They take turns, in an order that shifts, so drift hits all alike."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        names, times = [*runs], {name: [] for name in runs}  # type: tuple[list[str], dict[str, list[float]]]
        for turn, place in pairs(range(TURNS), range(len(names))):
            name = names[(place + turn) % len(names)]
            torch.cuda.synchronize()
            dist.all_reduce(self.token)
            runs[name]()  # absorbs what skew the barrier left
            begin.record()
            runs[name]()
            end.record()
            end.synchronize()
            times[name].append(1000 * begin.elapsed_time(end) / CALLS)
        slowest = torch.tensor([times[name] for name in names], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.control)
        return {name: median(line) for name, line in zip(names, slowest.tolist(), strict=True)}


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", type=int, default=(8192, 1024, 4096, 16384))
    parser.add_argument("--time-budget", type=float, default=60.0, help="seconds after which no row is begun")
    return parser.parse_args(arguments)


def main() -> None:
    options, start, output = options_of(sys.argv[1:]), time.monotonic(), Output()

    def work() -> tuple[int, str]:
        bench = Bench(options, output, start)
        bench.run()
        return int(not output.rows or any("WRONG" in note for note in output.notes)), ""

    def tell(why: str) -> None:
        output.notes += [why] if why else []
        output.say()

    end_of(work, tell, options.time_budget, GRACE)


if __name__ == "__main__":
    main()
