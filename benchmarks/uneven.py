"""Collectives on blocks of unequal length, beside NCCL's. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/uneven.py [--sizes 64K,16M --save NAME]

bfloat16; sizes are bytes of the larger side on one rank, of which odd ranks have, or get, three times what even ones
do. Medians in microseconds of the slowest rank, contenders taking turns in CUDA graphs of as many calls. NCCL's are
torch's `all_gather` and `reduce_scatter` of lists, which it makes of grouped broadcasts and reductions, and
`all_to_all_single` with split sizes, grouped sends and receives. Every result is held to what it must be before it is
timed, and in its graph. `--tunes` adds tunings of ours, protocol:lanes:threads:tile, the last ones where they are said.
Exit code 1: a wrong result, or a call of ours that failed.

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

from benchmarks import uneven_report
from benchmarks.contests import Contests, parsed, sized_parser
from benchmarks.report import Kind
from benchmarks.uneven_report import NCCL, OURS, ROW_BYTES, Case, Row

SCHEDULES = {
    "all_gather": "allgather_uneven",
    "reduce_scatter": "reducescatter_uneven",
    "all_to_all": "alltoall_uneven",
}
TUNE_KEYS = ("protocol", "lanes", "threads", "tile")
GRACE = 20.0


def kind_of(name: str) -> Kind:
    return Kind.PEER if name == NCCL else Kind.OURS


@dataclass
class Stage:
    """One case on this rank."""

    bench: Any
    case: Case

    @property
    def coming(self) -> list[int]:
        """Rows that this rank gets from each, of an all-to-all."""
        return [self.case.lengths[self.bench.rank]] * self.case.ranks

    @cached_property
    def drawn(self) -> list[Any]:
        """What every rank gives: whole numbers so small that sums are exact."""
        return [self._of(rank) for rank in range(self.case.ranks)]

    def _of(self, rank: int) -> Any:
        import torch

        dice = torch.Generator(self.bench.device).manual_seed(rank)
        own = self.case.lengths[rank] if self.case.collective == "all_gather" else sum(self.case.lengths)
        shape = (own, ROW_BYTES // 2)
        found = torch.randint(-4, 5, shape, generator=dice, device=self.bench.device, dtype=torch.int32)
        return found.to(torch.bfloat16)

    @cached_property
    def wanted(self) -> Any:
        import torch

        lengths, rank = self.case.lengths, self.bench.rank
        match self.case.collective:
            case "all_gather":
                return torch.cat(self.drawn)
            case "reduce_scatter":
                return sum((one.split(lengths)[rank] for one in self.drawn[1:]), self.drawn[0].split(lengths)[rank])
            case _:
                return torch.cat([one.split(lengths)[rank] for one in self.drawn])

    def call(self, name: str) -> Callable[[], Any]:
        x, lengths = self.drawn[self.bench.rank], self.case.lengths
        if name == NCCL:
            return self._nccl(x, lengths)
        import commdsl

        if name != OURS:
            said = zip(TUNE_KEYS, name.split(":"), strict=False)
            tune = {key: int(one) if one.isdigit() else one for key, one in said}
            given = [*lengths, *(self.coming if self.case.collective == "all_to_all" else [])]
            op = commdsl.load(SCHEDULES[self.case.collective], ranks=self.case.ranks, tune=tune)
            return partial(op, x, lengths=given)
        match self.case.collective:
            case "all_gather":
                return partial(commdsl.all_gather, x, output_split_sizes=lengths)
            case "reduce_scatter":
                return partial(commdsl.reduce_scatter, x, input_split_sizes=lengths)
            case _:
                return partial(commdsl.all_to_all, x, self.coming, lengths)

    def _nccl(self, x: Any, lengths: list[int]) -> Callable[[], Any]:
        import torch
        import torch.distributed as dist

        result, group = torch.empty_like(self.wanted), self.bench.group
        match self.case.collective:
            case "all_gather":
                call = partial(dist.all_gather, list(result.split(lengths)), x, group=group)
            case "reduce_scatter":
                call = partial(dist.reduce_scatter, result, list(x.split(lengths)), group=group)
            case _:
                call = partial(dist.all_to_all_single, result, x, self.coming, lengths, group=group)

        def called() -> Any:
            call()
            return result

        return called

    def made(self, name: str) -> Any:
        """The contender, and whether its last result is wrong."""
        import torch

        from benchmarks.turns import kept

        return kept(name, kind_of(name), self.call(name), lambda found: ~torch.eq(found, self.wanted).all())


def run(options: argparse.Namespace, output: Contests) -> int:
    """The exit code."""
    bench = output.begin()
    output.title = f"bfloat16, {output.title}"
    names = [*([] if options.dry_run else [NCCL]), OURS, *options.tunes]
    for nbytes in options.sizes:
        for collective in options.collectives:
            case = Case(collective, nbytes, bench.ranks)
            output.contest(bench, Row(case), {one: kind_of(one) for one in names}, Stage(bench, case).made)
    return output.exit_code(bench)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    return parsed(sized_parser(__doc__, SCHEDULES, "PROTOCOL:LANES:THREADS:TILE"), arguments)


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "10")
    options = options_of(sys.argv[1:])
    output = Contests(options, uneven_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
