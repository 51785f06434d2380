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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
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
from benchmarks.ending import Ending
from benchmarks.measure import Bench, Contender, started
from benchmarks.report import Kind, grid
from benchmarks.turns import Entry, Made, timed

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
  ensure each r {{ y == sum({term} @ all) }}

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
        term="multiply(add(a[r], b[r]), b[r])" if tasks == 2 else "add(a[r], b[r])",
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


class Output(Ending):
    def say(self) -> None:
        print(f"\n{table(self)}", flush=True)
        if self.options.save and self.is_whole and self.rows:
            ranks = int(os.environ["WORLD_SIZE"])
            record.save_lines(self.options, COLUMNS, lines_of(self.rows, ranks))


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


Ways = dict[tuple[int, str], Any]
"""An op for every number of tasks and way."""


class Builder:
    """Every way to share the SMs, in a file of its own."""

    def __init__(self, bench: Bench, options: argparse.Namespace, notes: list[str]) -> None:
        self.bench, self.options, self.notes = bench, options, notes
        self.folder = Path(tempfile.mkdtemp(prefix="commdsl-overlap-"))

    def build_all(self) -> Ways:
        found: Ways = {}
        ways = [*product(self.options.shares, self.options.tiles, (2, 1))]
        for sms, _, tasks in ways:
            self.path(tasks, sms).write_text(text(tasks, sms), encoding="utf-8")
        major, minor = torch.cuda.get_device_capability(self.bench.device)
        jobs = [Job(str(self.path(tasks, sms)), "bfloat16", tile) for sms, tile, tasks in ways]
        build_ahead(jobs, self.bench.rank, self.bench.ranks, f"sm_{major}{minor}", BUILDING / 2)
        building = replace(self.bench, deadline=self.bench.deadline - self.options.time_budget + BUILDING)
        for sms, tile, tasks in ways:
            if building.time_is_up():
                self.notes.append("time to build was up: fewer ways than asked for")
                break
            made, problem = self.bench.attempt(lambda: self.build(tasks, sms, tile))  # noqa: B023 - called at once
            if problem:
                self.notes.append(f"{tasks} tasks, {sms} SMs, {tile >> 10} KB: {problem}")
            else:
                found[tasks, f"{sms} SMs, {tile >> 10} KB"] = made
        return found

    def path(self, tasks: int, sms: int) -> Path:
        return self.folder / f"overlap_{tasks}_{sms}.comm"

    def build(self, tasks: int, sms: int, tile: int) -> Any:
        found = commdsl.load(self.path(tasks, sms), tune={"tile": tile})
        x = torch.ones(self.bench.ranks * 64, dtype=torch.bfloat16, device=self.bench.device)
        found(x, x)
        found.synchronize()
        return found


@dataclass
class Case:
    """Tensors of one size on this rank, and so many tasks: of whole numbers, few enough that every order of summation
    gives the same bits.
    """

    bench: Bench
    nbytes: int
    tasks: int
    calls: int = CALLS

    @property
    def sent_bytes(self) -> int:
        return self.nbytes * (self.bench.ranks - 1) // self.bench.ranks

    @cached_property
    def given(self) -> torch.Tensor:
        """Both tensors, one above the other."""
        elements = self.nbytes // 2 // (8 * self.bench.ranks) * 8 * self.bench.ranks
        generator = torch.Generator(self.bench.device).manual_seed(self.bench.rank)
        numbers = torch.randint(-3, 4, (2, elements), generator=generator, device=self.bench.device, dtype=torch.int8)
        return numbers.to(torch.bfloat16)

    @cached_property
    def made(self) -> torch.Tensor:
        return computed(self.tasks, *self.given)

    @cached_property
    def wanted(self) -> torch.Tensor:
        wanted = torch.empty(len(self.made) // self.bench.ranks, dtype=torch.float32, device=self.bench.device)
        dist.reduce_scatter_tensor(wanted, self.made.float())
        return wanted

    def entries(self, ways: dict[str, Any]) -> list[Entry]:
        a, b = self.given
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "tasks": lambda: computed(self.tasks, a, b),
            "moves": lambda: commdsl.reduce_scatter(self.made),
            "sequence": lambda: commdsl.reduce_scatter(computed(self.tasks, a, b)),
        }
        calls |= {name: lambda op=op: op(a, b) for name, op in ways.items()}  # type: ignore[misc]
        return [
            (name, Kind.OURS, lambda name=name, call=call: self.contender(name, call))  # type: ignore[misc]
            for name, call in calls.items()
        ]

    def contender(self, name: str, call: Callable[[], torch.Tensor]) -> Made:
        last: list[torch.Tensor] = []

        def called(_: int) -> torch.Tensor:
            last[:] = [call()]
            return last[0]

        wanted = self.made.float() if name == "tasks" else self.wanted
        return Contender(name, Kind.OURS, called, release=last.clear), lambda: (last[0].float() != wanted).any()


def row_of(case: Case, ways: dict[str, Any], notes: list[str]) -> Row | None:
    """None where nothing of both in one launch is right."""
    results = timed(case.bench, case, case.entries(ways))
    notes += [f"{size_name(case.nbytes)}, {one.name}: {one.status}" for one in results if one.status != "ok"]
    found = {one.name: one.timing.median for one in results if one.timing and one.status == "ok"}
    fused = tuple(sorted(((name, found[name]) for name in ways if name in found), key=lambda one: one[1]))
    alone = [found.get(name) for name in ("tasks", "moves", "sequence")]
    return Row(case.nbytes, case.tasks, *alone, fused) if fused and None not in alone else None


def run(options: argparse.Namespace, output: Output) -> int:
    """The exit code."""
    bench = started(options.time_budget, BATCHES)
    output.title = f"bfloat16, {bench.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}"
    ways = Builder(bench, options, output.notes).build_all()
    for nbytes, tasks in product(options.sizes, (2, 1)):
        if bench.time_is_up():
            output.notes.append("time was up: fewer rows than asked for")
            break
        some = {name: op for (number, name), op in ways.items() if number == tasks}
        row = row_of(Case(bench, nbytes, tasks), some, output.notes)
        output.rows += [] if row is None else [row]
    commdsl.check()
    output.is_whole = True
    return int(not output.rows or any("wrong" in note for note in output.notes))


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
    options = options_of(sys.argv[1:])
    output = Output(options)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
