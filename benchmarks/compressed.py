"""Collectives whose values travel as float8, beside ours and NCCL's in bfloat16. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/compressed.py [--sizes 64M,256M --tunes 128:512:131072 --save NAME]

bfloat16 is given and returned; sizes are bytes of the larger side on one rank. Medians in microseconds of the slowest
rank, all contenders taking turns in CUDA graphs of as many calls. `of ours` is what float8 takes of our choice in
bfloat16. The error is of normal numbers, root mean square, of the exact result, which float64 knows: every result of
ours is held to 4.5 % before it is timed, and in its graph. `--tunes` adds tunings of the float8 schedule, lanes:threads
with tile and sms behind. Exit code 1: a wrong result, or a call of ours that failed.

`--dry-run` does all but time, on processors, without NCCL.
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

from benchmarks import compressed_report
from benchmarks.compressed_report import FLOAT8, NCCL, OURS, Case, Row
from benchmarks.contests import Contests, parsed, sized_parser
from benchmarks.report import Kind

SCHEDULES = {"all_reduce": "allreduce_float8", "all_gather": "allgather_float8"}
TUNE_KEYS = ("lanes", "threads", "tile", "sms")
MOST_ERROR = 0.045
GRACE = 20.0


def kind_of(name: str) -> Kind:
    return Kind.PEER if name == NCCL else Kind.OURS


@dataclass
class Stage:
    """One case on this rank."""

    bench: Any
    row: Row

    @property
    def case(self) -> Case:
        return self.row.case

    @cached_property
    def drawn(self) -> list[Any]:
        """What every rank gives."""
        return [self._of(rank) for rank in range(self.case.ranks)]

    def _of(self, rank: int) -> Any:
        import torch

        dice = torch.Generator(self.bench.device).manual_seed(rank)
        return torch.randn(self.case.numel, generator=dice, device=self.bench.device, dtype=torch.bfloat16)

    @cached_property
    def wanted(self) -> Any:
        import torch

        if self.case.collective == "all_gather":
            return torch.cat(self.drawn)
        return sum((one.double() for one in self.drawn[1:]), self.drawn[0].double())

    def call(self, name: str) -> Callable[[], Any]:
        import torch
        import torch.distributed as dist

        import commdsl

        x, collective = self.drawn[self.bench.rank], self.case.collective
        if name == NCCL and collective == "all_reduce":
            own = x.clone()

            def reduced() -> Any:
                dist.all_reduce(own, op=dist.ReduceOp.AVG, group=self.bench.group)  # which may be repeated
                return own

            return reduced
        if name == NCCL:
            result = torch.empty(self.case.ranks * x.numel(), dtype=x.dtype, device=x.device)

            def gathered() -> Any:
                dist.all_gather_into_tensor(result, x, group=self.bench.group)
                return result

            return gathered
        if name in (OURS, FLOAT8):
            return partial(getattr(commdsl, collective), x, wire=None if name == OURS else "float8")
        tune = dict(zip(TUNE_KEYS, map(int, name.split(":")), strict=False))
        return partial(commdsl.load(SCHEDULES[collective], ranks=self.case.ranks, tune=tune), x)

    def made(self, name: str) -> Any:
        """The contender, and whether its last result is wrong."""
        from benchmarks.turns import kept

        times = 1 / self.case.ranks if name == NCCL and self.case.collective == "all_reduce" else 1
        most = MOST_ERROR if name not in (NCCL, OURS) else 0.005

        def is_wrong(found: Any) -> Any:
            wanted = times * self.wanted.double()
            off = (found.double() - wanted).norm() / wanted.norm()
            self.row.error = max(self.row.error, float(off))
            return off > most

        return kept(name, kind_of(name), self.call(name), is_wrong)


def run(options: argparse.Namespace, output: Contests) -> int:
    """The exit code."""
    bench = output.begin()
    output.title = f"bfloat16, {output.title}"
    names = [*([] if options.dry_run else [NCCL]), OURS, FLOAT8, *options.tunes]
    for collective in options.collectives:
        for nbytes in options.sizes:
            row = Row(Case(collective, nbytes, bench.ranks))
            output.contest(bench, row, {one: kind_of(one) for one in names}, Stage(bench, row).made)
    return output.exit_code(bench)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    return parsed(sized_parser(__doc__, SCHEDULES, "LANES:THREADS:TILE:SMS"), arguments)


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "10")
    options = options_of(sys.argv[1:])
    output = Contests(options, compressed_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
