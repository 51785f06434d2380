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
from functools import cached_property
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import rms_norm_report
from benchmarks.contests import Contests, parsed, parser_of
from benchmarks.rms_norm_report import (
    APART,
    CALLS,
    CONTENDERS,
    NCCL,
    ONE_SHOT,
    OURS,
    Case,
    Row,
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
        from benchmarks.turns import kept

        call, times = self.call(name)

        def is_wrong(z: Any, y: Any) -> Any:
            wanted, total = self.wanted(times)
            near = 2.0**-6 * wanted.abs() + 2.0**-6  # bfloat16 has 8 bits, and torch's norms round twice
            return (y.double() != total).any() | ((z.double() - wanted).abs() > near).any()

        return kept(name, CONTENDERS[name], call, is_wrong)


def run(options: argparse.Namespace, output: Contests) -> int:
    """The exit code."""
    bench = output.begin()
    output.title = f"bfloat16, {output.title}, {CALLS} calls a graph"
    kinds = {OURS: CONTENDERS[OURS]} if options.dry_run else CONTENDERS
    for rows in options.rows:
        case = Case(rows, options.columns, bench.ranks)
        output.contest(bench, Row(case), kinds, Stage(bench, case).made)
    return output.exit_code(bench)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, batches=15, seconds=40.0)
    add = parser.add_argument
    add("--rows", nargs="+", type=int, default=(1, 8, 32, 128))
    add("--columns", type=int, default=8192)
    return parsed(parser, arguments)


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "10")
    options = options_of(sys.argv[1:])
    output = Contests(options, rms_norm_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
