"""What is won by computing beside a reduce-scatter instead of before it. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/overlap.py [--sizes 64MB 256MB --time-budget 85 --save NAME]

A row is a size of the tensors and a number of tasks: one adds two tensors, two multiply the sum by one of them as well,
which takes about as long as the reduce-scatter of what they make. Its columns, all in CUDA graphs, medians of batches
of the slowest rank, all contenders taking turns: the tasks alone (torch, on all SMs), the reduce-scatter alone (what
commdsl.reduce_scatter chooses), both in sequence, and both in one launch for several ways to share the SMs and sizes of
tiles. `gain` is the sequence over the best of these; `even` how the shorter part compares with the longer one. The
results are checked before anything is timed. The table comes last, also when time is up.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")

import torch
import torch.distributed as dist

import commdsl
from benchmarks import record
from benchmarks.ahead import Job, build_ahead
from benchmarks.cases import parse_size, size_name
from benchmarks.ending import end_of
from benchmarks.measure import captured
from benchmarks.report import grid

SMS = 132
SHARES = (24, 32, 48)  # SMs that move
TILES = (16 << 10, 32 << 10, 128 << 10)
SIZES = ("64MB", "256MB")
CALLS, BATCHES = 8, 9
BUILDING = 40.0
"""Seconds after which no further way is built."""

TEXT = """roles overlap {{ compute sms 0 ..< {rest}   comm sms {rest} ..< {all} }}

schedule overlap_{tasks}_{sms} for P ranks where P >= 2 {{
  input a[P blocks]
  input b[P blocks]
  scratch c[P blocks]
{more}  output y
  ensure reduce_scatter({made} -> y)

  compute add(a, b -> c) on compute
{second}  each r {{ reduce {made}[r] @ all -> y }}
  on comm
}}
"""


def text(tasks: int, sms: int) -> str:
    """The schedule in which so many SMs move."""
    return TEXT.format(
        rest=SMS - sms,
        all=SMS,
        tasks=tasks,
        sms=sms,
        more="  scratch d[P blocks]\n" if tasks == 2 else "",
        made="d" if tasks == 2 else "c",
        second="  compute multiply(c, b -> d) on compute\n" if tasks == 2 else "",
    )


@dataclass(frozen=True)
class Row:
    """Medians in microseconds of one size and number of tasks."""

    nbytes: int
    tasks: int
    compute: float
    move: float
    sequence: float
    fused: tuple[tuple[str, float], ...]  # by way, the best first

    @property
    def gain(self) -> float:
        return self.sequence / self.fused[0][1]

    @property
    def even(self) -> float:
        return min(self.compute, self.move) / max(self.compute, self.move)


COLUMNS = ("bytes", "tasks", "ranks", "calls", "part", "way", "median_us")


def lines_of(rows: Sequence[Row], ranks: int) -> list[list[object]]:
    """As they are saved: the parts alone, both in sequence, and every way to do both in one launch."""
    found: list[list[object]] = []
    for row in rows:
        parts = [("tasks", "", row.compute), ("moves", "", row.move), ("sequence", "", row.sequence)]
        parts += [("one launch", way, us) for way, us in row.fused]
        found += [[row.nbytes, row.tasks, ranks, CALLS, part, way, f"{us:.4g}"] for part, way, us in parts]
    return found


@dataclass
class Output:
    title: str = "nothing was measured"
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def say(self) -> None:
        print("\n" + table(self), flush=True)


def table(output: Output) -> str:
    """Every row, then every way of each."""
    heads = [
        "tensor",
        "tasks",
        "tasks us",
        "moves us",
        "even",
        "sequence us",
        "one launch us",
        "of the longer",
        "gain",
        "way",
    ]
    lines = [
        [
            size_name(row.nbytes),
            str(row.tasks),
            f"{row.compute:.1f}",
            f"{row.move:.1f}",
            f"{row.even:.2f}",
            f"{row.sequence:.1f}",
            f"{row.fused[0][1]:.1f}",
            f"{row.fused[0][1] / max(row.compute, row.move):.2f}",
            f"{row.gain:.2f}",
            row.fused[0][0],
        ]
        for row in output.rows
    ]
    ways = [
        f"{size_name(row.nbytes)}, {row.tasks} tasks: " + "  ".join(f"{way} {time:.1f}" for way, time in row.fused)
        for row in output.rows
    ]
    return "\n".join([*ways, *output.notes, "", output.title, grid(heads, lines)])


GRACE = 20.0


class Bench:
    """This rank's end of the run."""

    def __init__(self, options: argparse.Namespace, output: Output, start: float) -> None:
        self.options, self.output, self.start = options, output, start
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=self.device)
        self.control = dist.new_group(backend="gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.folder = Path(tempfile.mkdtemp(prefix="commdsl-overlap-"))
        self.token = torch.zeros(1, device=self.device)
        output.title = f"bfloat16, {self.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}"

    def everyone(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def spent(self) -> float:
        """Rank 0's clock decides for all."""
        return float(self.everyone(time.monotonic() - self.start)[0])

    def run(self) -> None:
        ways = self.build_all()
        for nbytes, tasks in product(self.options.sizes, (2, 1)):
            if self.spent() > self.options.time_budget:
                self.output.notes.append("time was up: fewer rows than asked for")
                return
            row = self.row(nbytes, tasks, {name: op for (number, name), op in ways.items() if number == tasks})
            if row is not None:
                self.output.rows.append(row)

    def build_all(self) -> dict[tuple[int, str], Any]:
        """An op for every number of tasks and way."""
        found: dict[tuple[int, str], Any] = {}
        ways = [*product(self.options.shares, self.options.tiles, (2, 1))]
        for sms, _, tasks in ways:
            self.path(tasks, sms).write_text(text(tasks, sms), encoding="utf-8")
        if self.device.type == "cuda":
            major, minor = torch.cuda.get_device_capability(self.device)
            jobs = [Job(str(self.path(tasks, sms)), "bfloat16", tile) for sms, tile, tasks in ways]
            build_ahead(jobs, self.rank, self.ranks, f"sm_{major}{minor}", BUILDING / 2)
        for sms, tile, tasks in ways:
            if self.spent() > BUILDING:
                self.output.notes.append("time to build was up: fewer ways than asked for")
                break
            made = self.build(tasks, sms, tile)
            if made is not None:
                found[tasks, f"{sms} SMs, {tile >> 10} KB"] = made
        return found

    def path(self, tasks: int, sms: int) -> Path:
        return self.folder / f"overlap_{tasks}_{sms}.comm"

    def build(self, tasks: int, sms: int, tile: int) -> Any:
        """None, and a note, where it cannot be."""
        found, problem = None, ""
        try:
            found = commdsl.load(self.path(tasks, sms), tune={"tile": tile})
            x = torch.ones(self.ranks * 64, dtype=torch.bfloat16, device=self.device)
            found(x, x)
            found.synchronize()
        except Exception as error:
            problem = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        problems = [one for one in self.everyone(problem) if one]
        if problems:
            self.output.notes.append(f"{tasks} tasks, {sms} SMs, {tile >> 10} KB: {problems[0]}")
            return None
        return found

    def row(self, nbytes: int, tasks: int, ways: dict[str, Any]) -> Row | None:
        elements = nbytes // 2 // (8 * self.ranks) * 8 * self.ranks
        generator = torch.Generator(self.device).manual_seed(self.rank)
        numbers = torch.randint(-3, 4, (2, elements), generator=generator, device=self.device, dtype=torch.int8)
        a, b = numbers.to(torch.bfloat16)
        c = computed(tasks, a, b)
        right = {name: op for name, op in ways.items() if self.is_right(f"{size_name(nbytes)}, {name}", op, a, b, c)}
        if not right:
            return None
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "tasks": lambda: computed(tasks, a, b),
            "moves": lambda: commdsl.reduce_scatter(c),
            "sequence": lambda: commdsl.reduce_scatter(computed(tasks, a, b)),
        }
        calls |= {name: partial(op, a, b) for name, op in right.items()}
        graphs = {name: captured(call, CALLS) for name, call in calls.items()}
        found = self.timed(graphs)
        for graph in graphs.values():
            graph.reset()
        commdsl.check()
        fused = tuple(sorted(((name, found[name]) for name in right), key=lambda one: one[1]))
        return Row(nbytes, tasks, found["tasks"], found["moves"], found["sequence"], fused)

    def is_right(self, what: str, op: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
        """Whole numbers, few enough that every order of summation gives the same bits."""
        wanted = torch.empty(len(c) // self.ranks, dtype=torch.float32, device=self.device)
        dist.reduce_scatter_tensor(wanted, c.float())
        found = torch.equal(op(a, b).float(), wanted)
        op.synchronize()
        if all(self.everyone(found)):
            return True
        self.output.notes.append(f"{what}: WRONG")
        return False

    def timed(self, graphs: dict[str, torch.cuda.CUDAGraph]) -> dict[str, float]:
        """They take turns, in an order that shifts, so drift hits all alike."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        names = [*graphs]
        times: dict[str, list[float]] = {name: [] for name in names}
        for turn, place in product(range(BATCHES), range(len(names))):
            name = names[(place + turn) % len(names)]
            torch.cuda.synchronize()
            dist.all_reduce(self.token)
            torch.cuda.synchronize()
            graphs[name].replay()  # absorbs what skew the barrier left
            begin.record()
            graphs[name].replay()
            end.record()
            end.synchronize()
            times[name].append(1000 * begin.elapsed_time(end) / CALLS)
        slowest = torch.tensor([times[name] for name in names], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.control)
        return {name: float(line.median()) for name, line in zip(names, slowest, strict=True)}


def computed(tasks: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c = a + b
    return c if tasks == 1 else c.mul_(b)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=[parse_size(size) for size in SIZES])
    parser.add_argument("--shares", nargs="+", type=int, default=SHARES, help="SMs that move, of 132")
    parser.add_argument("--tiles", nargs="+", type=int, default=TILES, help="bytes")
    parser.add_argument("--time-budget", type=float, default=75.0, help="seconds after which no row is begun")
    record.add_options(parser)
    options = parser.parse_args(arguments)
    record.check_options(parser, options)
    return options


def main() -> None:
    options, start, output = options_of(sys.argv[1:]), time.monotonic(), Output()

    def work() -> tuple[int, str]:
        bench = Bench(options, output, start)
        bench.run()
        if options.save and bench.rank == 0 and output.rows:
            record.save_lines(options, COLUMNS, lines_of(output.rows, bench.ranks))
        return int(not output.rows or any("WRONG" in note for note in output.notes)), ""

    def tell(why: str) -> None:
        output.notes += [why] if why else []
        output.say()

    end_of(work, tell, options.time_budget, GRACE)


if __name__ == "__main__":
    main()
