"""All-reduce, residual and RMSNorm in one launch, beside NCCL and torch.compile's norm. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/rms_norm.py [--rows 1 8 32 128 --columns 8192 --time-budget 40 --save NAME]

A row of the table is so many rows of bfloat16. Columns, medians in microseconds of the slowest rank, all contenders
taking turns in CUDA graphs of as many calls: NCCL's all-reduce, then torch's addition and norm, or both compiled into
one kernel; symmetric memory's one-shot all-reduce, then that kernel; ours, and our all-reduce with that kernel behind
it. Every result is checked before anything is timed, and in its graph. Exit code 1: a wrong result, or a call of ours
that failed. `*` marks where ours takes more than 0.6 of the better of NCCL's.

`--dry-run` does all but time, on processors, without what needs a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record, rms_norm_report
from benchmarks.contests import Contests
from benchmarks.report import NO_TIME, Result
from benchmarks.rms_norm_report import (
    APART,
    CALLS,
    CONTENDERS,
    NCCL,
    ONE_SHOT,
    OURS,
    Case,
    Row,
    overview,
)

EPS = 1e-5
GRACE = 20.0


@dataclass
class Stage:
    """One case on this rank. What every rank adds is the same, so a mean is as good as a sum, and may be repeated."""

    bench: Any
    case: Case

    def drawn(self, rows: int, seed: int) -> Any:
        import torch

        dice = torch.Generator(self.bench.device).manual_seed(seed)
        shape = (rows, self.case.columns)
        return torch.randint(-2, 3, shape, generator=dice, device=self.bench.device).to(torch.bfloat16)

    @cached_property
    def x(self) -> Any:
        return self.drawn(self.case.rows, 1)

    @cached_property
    def residual(self) -> Any:
        return self.drawn(self.case.rows, 2)

    @cached_property
    def weight(self) -> Any:
        return self.drawn(1, 3)[0]

    def wanted(self, times: int) -> tuple[Any, Any]:
        y = times * self.x.double() + self.residual.double()
        return y / (y.square().mean(-1, keepdim=True) + EPS).sqrt() * self.weight.double(), y

    def call(self, name: str) -> tuple[Callable[[], tuple[Any, Any]], int]:
        """And how many times x is in its sum."""
        import torch
        import torch.distributed as dist

        import commdsl
        from commdsl.overlap import all_reduce_rms_norm

        x, ranks = self.x, self.case.ranks
        if name == OURS:
            return lambda: all_reduce_rms_norm(x, self.residual, self.weight, EPS), ranks
        residual, weight = self.residual, self.weight

        def plain(total: Any, residual: Any, weight: Any) -> tuple[Any, Any]:
            y = total + residual
            return torch.nn.functional.rms_norm(y, weight.shape, weight, EPS), y

        norm = plain if name == NCCL else torch.compile(plain, dynamic=False)
        if name == APART:
            return lambda: norm(commdsl.all_reduce(x), residual, weight), ranks
        if name == ONE_SHOT:
            shared = self._shared(x)
            group = self.bench.group.group_name
            return lambda: norm(torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group), residual, weight), ranks
        own = x.clone()

        def reduced() -> tuple[Any, Any]:
            dist.all_reduce(own, op=dist.ReduceOp.AVG, group=self.bench.group)
            return norm(own, residual, weight)

        return reduced, 1

    def _shared(self, x: Any) -> Any:
        from torch.distributed import _symmetric_memory as symmetric_memory

        made = symmetric_memory.empty(x.shape, dtype=x.dtype, device=x.device)
        symmetric_memory.rendezvous(made, self.bench.group.group_name)
        return made.copy_(x)

    def made(self, name: str) -> Any:
        """The contender, and whether its last results are wrong."""
        from benchmarks.measure import Contender

        (call, times), last = self.call(name), list[Any]()

        def called(_: int) -> Any:
            last[:] = call()
            return last[0]

        def is_wrong() -> Any:
            z, y = self.wanted(times)
            near = 2.0**-6 * z.abs() + 2.0**-6  # bfloat16 has 8 bits, and torch's norms round twice
            return (last[1].double() != y).any() | ((last[0].double() - z).abs() > near).any()

        return Contender(name, CONTENDERS[name], called, release=last.clear), is_wrong


def run(options: argparse.Namespace, output: Contests) -> int:
    """The exit code."""
    import torch

    from benchmarks.measure import started
    from benchmarks.turns import timed

    bench = started(options.time_budget, options.batches, on_gpus=not options.dry_run)
    what = "processors" if options.dry_run else torch.cuda.get_device_name()
    output.title = f"bfloat16, {bench.ranks} x {what}, torch {torch.__version__}; microseconds, {CALLS} calls a graph"
    for rows in options.rows:
        case = Case(rows, options.columns, bench.ranks)
        row = Row(case)
        output.rows.append(row)
        if bench.time_is_up():
            row.results = [Result(name, kind, None, NO_TIME) for name, kind in CONTENDERS.items()]
            continue
        stage, names = Stage(bench, case), [OURS] if options.dry_run else list(CONTENDERS)
        row.results += timed(bench, case, [(one, CONTENDERS[one], partial(stage.made, one)) for one in names])
        if bench.rank == 0:
            print("  ".join(overview([row])[1][0]), flush=True)
    output.is_whole = True
    return int(any(bench.everyone(output.failed)))


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", nargs="+", type=int, default=(1, 8, 32, 128))
    add("--columns", type=int, default=8192)
    add("--batches", type=int, default=15, help="timed batches a contender")
    add("--time-budget", type=float, default=40.0, help="seconds after which no row is begun")
    add("--dry-run", action="store_true", help="on processors: checks, and times nothing")
    record.add_options(parser)
    found = parser.parse_args(arguments)
    record.check_options(parser, found)
    return found


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "10")
    options = options_of(sys.argv[1:])
    output = Contests(options, rms_norm_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
