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

from benchmarks import compressed_report, record
from benchmarks.cases import parse_sizes
from benchmarks.compressed_report import FLOAT8, NCCL, OURS, Case, Row, overview
from benchmarks.contests import Contests
from benchmarks.report import NO_TIME, Kind, Result

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
    case: Case
    error: float = 0.0  # of what travelled as float8

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
        from benchmarks.measure import Contender

        call, last = self.call(name), list[Any]()

        def called(_: int) -> Any:
            last[:] = [call()]
            return last[0]

        def is_wrong() -> Any:
            times = 1 / self.case.ranks if name == NCCL and self.case.collective == "all_reduce" else 1
            wanted = times * self.wanted.double()
            off = (last[0].double() - wanted).norm() / wanted.norm()
            self.error = max(self.error, float(off))
            return off > (MOST_ERROR if name not in (NCCL, OURS) else 0.005)

        return Contender(name, kind_of(name), called, release=last.clear), is_wrong


def run(options: argparse.Namespace, output: Contests) -> int:
    """The exit code."""
    import torch

    from benchmarks.measure import started
    from benchmarks.turns import timed

    bench = started(options.time_budget, options.batches, on_gpus=not options.dry_run)
    what = "processors" if options.dry_run else torch.cuda.get_device_name()
    output.title = f"bfloat16, {bench.ranks} x {what}, torch {torch.__version__}; microseconds"
    names = [*([] if options.dry_run else [NCCL]), OURS, FLOAT8, *options.tunes]
    for collective in options.collectives:
        for nbytes in options.sizes:
            case = Case(collective, nbytes, bench.ranks)
            row, stage = Row(case), Stage(bench, case)
            output.rows.append(row)
            if bench.time_is_up():
                row.results = [Result(name, kind_of(name), None, NO_TIME) for name in names]
                continue
            row.results += timed(bench, case, [(one, kind_of(one), partial(stage.made, one)) for one in names])
            row.error = stage.error
            if bench.rank == 0:
                print("  ".join(overview([row])[1][0]), flush=True)
    output.is_whole = True
    return int(any(bench.everyone(output.failed)))


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--collectives", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    add("--sizes", type=parse_sizes, default=parse_sizes("64K,1M,4M,16M,64M,256M"))
    add("--tunes", nargs="+", default=[], metavar="LANES:THREADS:TILE:SMS")
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
    output = Contests(options, compressed_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
