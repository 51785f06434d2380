"""Tiles that feed a reduce-scatter in one launch, on real GPUs, every result checked. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_overlap.py [--calls 200 --time-budget 80 --seed 1]

Random sizes (0 to 16 MB a tensor, odd ones too) and dtypes, one task and two in a row, on two streams, with async_op,
eagerly and in replayed graphs; each rank held up at random, on the GPU and on the host. Each rank computes by itself
what every rank gives, adds it up in float64 and compares: sums of floats within a rounding a rank, whole numbers
exactly. Exit code 1: a wrong result, an exception, or fewer calls than asked for within the time. The verdict comes
last.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "2G")

import runner
import torch

import commdsl
from benchmarks.ahead import Job, build_ahead
from commdsl.machine.resources import data_dir

TWO = """roles overlap { compute sms 0 ..< 100   comm sms 100 ..< 132 }

schedule two_tasks for P ranks where P >= 2 {
  input a[P blocks]
  input b[P blocks]
  scratch c[P blocks]
  scratch d[P blocks]
  output y
  ensure each r { y == sum(multiply(add(a[r], b[r]), b[r]) @ all) }

  compute add(a, b -> c) on compute
  compute multiply(c, b -> d) on compute
  each r { reduce d[r] @ all -> y }
  on comm
}
"""
ROUNDING = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""What one rounding to a type is off by, relatively: a sum in float32 has one an addend, and its result one more."""

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32)
MOST = 21  # elements of a block, as a power of two
CYCLES = 1_000_000  # held up for at most so many
GRACE = 12.0


class WrongResultError(Exception):
    """A result that is not right."""


def given(
    rank: int, call: int, blocks: int, block: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """The two tensors that a rank gives in a call: the same wherever they are computed."""
    generator = torch.Generator(device).manual_seed(1_000_003 * call + rank)
    shape = (2, blocks * block)
    if dtype.is_floating_point:
        return [*torch.randn(shape, generator=generator, device=device).to(dtype)]
    return [*torch.randint(-99, 100, shape, generator=generator, device=device, dtype=dtype)]


def computed(a: torch.Tensor, b: torch.Tensor, tasks: int) -> torch.Tensor:
    """What the tasks make: in float32, rounded once each."""
    wide = torch.float32 if a.dtype.is_floating_point else a.dtype
    c = (a.to(wide) + b.to(wide)).to(a.dtype)
    return c if tasks == 1 else (c.to(wide) * b.to(wide)).to(a.dtype)


class Run(runner.Run):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(*runner.joined(options))
        self.dice = random.Random(options.seed)  # the same on all ranks
        self.delays = random.Random(f"{options.seed} {self.rank}")
        self.streams = [torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)]
        self.made: Counter[str] = Counter()
        folder = Path(tempfile.mkdtemp(prefix="commdsl-overlap-"))
        (folder / "two_tasks.comm").write_text(TWO, encoding="utf-8")
        if self.on_gpu:
            self.build_ahead(folder / "two_tasks.comm")
        self.ops = {
            1: [commdsl.load("add_reduce_scatter"), commdsl.load("add_reduce_scatter", tune={"tile": 4096})],
            2: [commdsl.load(folder / "two_tasks.comm")],
        }

    def build_ahead(self, two: Path) -> None:
        """Every kernel of the run, or what takes no longer than a third of its time."""
        one = str(data_dir("schedules") / "overlap" / "add_reduce_scatter.comm")
        names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
        jobs = [Job(path, name, tile) for name in names for path, tile in ((one, None), (one, 4096), (str(two), None))]
        major, minor = torch.cuda.get_device_capability(self.device)
        build_ahead(jobs, self.rank, self.ranks, f"sm_{major}{minor}", 25)

    def given(self, call: int, block: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return given(self.rank, call, self.ranks, block, dtype, self.device)

    def hold_up(self) -> None:
        """Late on the GPU, on the host, or not at all."""
        match self.delays.randrange(4):
            case 0:
                torch.cuda._sleep(self.delays.randrange(CYCLES))
            case 1:
                time.sleep(self.delays.random() * 0.004)
            case _:
                pass

    def check(self, call: int, found: torch.Tensor, tasks: int, block: int) -> None:
        mine = slice(self.rank * block, (self.rank + 1) * block)
        made = [
            computed(*(one[mine] for one in given(rank, call, self.ranks, block, found.dtype, self.device)), tasks)
            for rank in range(self.ranks)
        ]
        exact = sum(one.double() for one in made)
        if found.dtype.is_floating_point:
            most = sum(one.double().abs() for one in made)
            off = ROUNDING[found.dtype] + (self.ranks - 1) * ROUNDING[torch.float32]
            wrong = (found.double() - exact).abs() > off * most
        else:
            wrong = found.double() != exact
        if found.shape != exact.shape or bool(wrong.any()):
            raise WrongResultError(
                f"call {call}, {tasks} tasks, {found.dtype}, blocks of {block}: {int(wrong.sum())} are wrong"
            )

    def call(self, number: int) -> None:
        dice = self.dice
        tasks, dtype, way = (
            dice.choice((1, 1, 2)),
            dice.choice(DTYPES),
            dice.choice(("eager", "eager", "async", "graph")),
        )
        block = 0 if dice.random() < 0.03 else int(2 ** dice.uniform(0, MOST))
        op, stream = dice.choice(self.ops[tasks]), self.streams[dice.randrange(2)]
        a, b = self.given(number, block, dtype)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.hold_up()
            if way == "graph" and block:
                found = self.replayed(op, a, b, number, tasks, block)
            elif way == "async":
                found = op(a, b, async_op=True).wait()
            else:
                found = op(a, b)
            self.check(number, found, tasks, block)
        for tensor in (a, b, found):
            tensor.record_stream(stream)
        op.synchronize()
        self.made[f"{tasks} {way}"] += 1
        self.made[str(dtype).removeprefix("torch.")] += 1

    def replayed(self, op: Any, a: torch.Tensor, b: torch.Tensor, number: int, tasks: int, block: int) -> torch.Tensor:
        """Once as it is, then three times as a graph of two calls, in which other numbers are put each time."""
        op(a, b)
        op.synchronize()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(torch.cuda.Stream(self.device)):
            graph.capture_begin(capture_error_mode="thread_local")
            op(a, b)
            found = op(a, b)
            graph.capture_end()
        torch.cuda.synchronize(self.device)
        for turn in (1, 2, 0):
            for old, new in zip((a, b), self.given(number + 7777 * turn, block, a.dtype), strict=True):
                old.copy_(new)
            self.hold_up()
            graph.replay()
            self.check(number + 7777 * turn, found, tasks, block)
        result = found.clone()
        torch.cuda.synchronize(self.device)
        graph.reset()
        return result


def table(run: Run) -> str:
    return "\n".join(f"{name:<10}{count:>6}" for name, count in sorted(run.made.items()))


def work(run: Run) -> tuple[bool, str]:
    start, done, wanted = time.monotonic(), 0, run.options.calls
    for done in range(wanted + 1):
        late = done % 10 == 0 and run.everyone(time.monotonic() - start > run.options.time_budget)[0]
        if done == wanted or late:  # rank 0's clock decides for all
            break
        run.place = f"call {done}"
        run.call(done)
    short = done < wanted
    why = f"{done} calls of {wanted} on {run.where} in {time.monotonic() - start:.0f} s"
    return not short, f"{why}{': fewer than asked for' if short else ', all right'}"


def main() -> None:
    options = runner.parser_of(__doc__, 200, "of all", seconds=80.0).parse_args()
    runner.end_of(lambda: Run(options), work, table, options.time_budget + GRACE, GRACE)


if __name__ == "__main__":
    main()
