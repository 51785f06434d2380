"""Products beside what travels, beside the same by cuBLAS and NCCL, and by torch's async-TP. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/products.py [--rows 1024 4096 8192 16384 --time-budget 60 --save NAME]

A row is an all-gather of rows and a product, or a product and a reduce-scatter or all-reduce of its rows, or an
all-to-all of its columns, or an all-to-all of columns and a product of all of them: M rows in all, this rank's K x N,
in bfloat16, and with `--elements bfloat16 float8`, in float8 with two scales as well. Columns, medians in microseconds
of the slowest rank, all contenders taking turns: cuBLAS alone; NCCL and cuBLAS in sequence; both on streams of their
own, in 2 and 4 chunks; torch's async-TP, which has no all-to-all and which no graph can capture; ours in one launch,
with each rank's rows in 1, 2 or 4 pieces, and in 2 by cuBLAS's products; our collective and cuBLAS in sequence; and
what `overlap` chooses. All but async-TP are in CUDA graphs of as many calls. Every result is checked before anything is
timed. Exit code 1: a wrong result, or a call of ours that failed. The table comes last, whatever happened; `*` marks a
figure that is missed.

`--dry-run` does all but time, on processors, without what needs a GPU:

    torchrun --nproc-per-node 2 benchmarks/products.py --dry-run --rows 32 --shapes 16x24
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import products_report, record
from benchmarks.contests import Contests
from benchmarks.products_report import ALONE, ASYNC, CONTENDERS, Case, Element, Row, Way, overview
from benchmarks.report import NO_TIME, Result

SHAPES = {
    Way.GATHER: ((8192, 3584), (8192, 1280), (5120, 3456)),
    Way.SCATTER: ((3584, 8192), (1024, 8192), (3456, 5120)),
    Way.REDUCE: ((3584, 8192), (1024, 8192), (3456, 5120)),
    Way.EXCHANGE: ((8192, 5120), (8192, 1280), (5120, 896)),
    Way.RETURN: ((4096, 8192), (1024, 8192), (640, 5120)),
}
"""K and N: Llama-70B's and Qwen-32B's of an 8-way split; before an all-to-all those of queries, keys and values, behind
one that of the projection of heads, and Llama-70B's of two ranks as well.
"""

GRACE = 20.0
"""Seconds after the time budget at which a run that hangs prints what it has and ends."""


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", nargs="+", type=int, default=(8192, 1024, 4096, 16384), help="M, of all ranks")
    add("--shapes", nargs="+", type=shape_of, help="K x N as in 8192x3584, of every way")
    add("--ways", nargs="+", type=Way, choices=list(Way), default=list(Way))
    add("--elements", nargs="+", type=Element, choices=list(Element), default=[Element.BFLOAT16])
    add("--batches", type=int, default=9, help="timed batches a contender")
    add("--time-budget", type=float, default=60.0, help="seconds after which no row is begun")
    add("--dry-run", action="store_true", help="on processors: checks, and times nothing")
    record.add_options(parser)
    found = parser.parse_args(arguments)
    record.check_options(parser, found)
    return found


def shape_of(text: str) -> tuple[int, int]:
    depth, columns = text.split("x")
    return int(depth), int(columns)


class Output(Contests):
    def label(self, row: Row) -> str:
        return f"{row.case.way}, {row.case.name}"

    def verdict(self) -> str:
        if self.options.dry_run:
            return f"a dry run: {super().verdict()}, nothing timed"
        return f"{sum(bool(row.misses()) for row in self.rows)} of {len(self.rows)} rows miss a figure"


def run(options: argparse.Namespace, output: Output) -> int:
    """The exit code."""
    import torch

    from benchmarks.measure import started

    bench = started(options.time_budget, options.batches, on_gpus=not options.dry_run)
    what = "processors" if options.dry_run else torch.cuda.get_device_name()
    output.title = f"{bench.ranks} x {what}, torch {torch.__version__}; microseconds"
    for case in cases_of(options, bench.ranks):
        _measured(bench, options, case, output)
    output.is_whole = True
    return int(any(bench.everyone(output.failed)))


def cases_of(options: argparse.Namespace, ranks: int) -> Iterator[Case]:
    for rows in options.rows:
        for way in options.ways:
            for depth, columns in options.shapes or SHAPES[way]:
                for element in options.elements:
                    yield Case(way, rows, depth, columns, ranks, element)


def _measured(bench: Any, options: argparse.Namespace, case: Case, output: Output) -> None:
    from benchmarks.products_calls import Stage
    from benchmarks.turns import timed

    missing = {ASYNC} if case.way in (Way.EXCHANGE, Way.RETURN) else set()
    missing |= {ALONE, ASYNC} if options.dry_run else set()
    names = [name for name in CONTENDERS if name not in missing]
    row = Row(case)
    output.rows.append(row)
    if bench.time_is_up():
        row.results = [Result(name, CONTENDERS[name], None, NO_TIME) for name in names]
        return
    stage = Stage(bench, case)
    entries = [(name, CONTENDERS[name], lambda name=name: stage.made(name)) for name in names]
    row.results += timed(bench, case, entries, eager=(ASYNC,))
    if bench.rank == 0:
        _, (line,) = overview([row])
        print("  ".join(line), f"({bench.deadline - time.monotonic():.0f} s left)", flush=True)


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "10")
    options = options_of(sys.argv[1:])
    output = Output(options, products_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
