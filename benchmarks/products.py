"""Products beside what travels, beside the same by cuBLAS and NCCL, and by torch's async-TP. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/products.py [--rows 1024 4096 8192 16384 --time-budget 60 --save NAME]

A row is an all-gather of rows and a product, or a product and a reduce-scatter or all-reduce of its rows, or an
all-to-all of its columns, or an all-to-all of columns and a product of all of them: M rows in all, this rank's K x N,
in bfloat16, and with `--elements bfloat16 float8`, in float8 with two scales as well. Columns, medians in microseconds
of the slowest rank, all contenders taking turns: cuBLAS alone; NCCL and cuBLAS in sequence; both on streams of their
own, in 2 and 4 chunks; torch's async-TP, which has no all-to-all and which no graph can capture; ours in one launch,
with each rank's rows in 1, 2 or 4 pieces, in 4, 8 or 16 that products push, and in 2 by cuBLAS's products; our
collective and cuBLAS in sequence; and what `overlap` chooses. All but async-TP are in CUDA graphs of as many calls.
Every result is checked before anything is timed. Exit code 1: a wrong result, or a call of ours that failed. The table
comes last, whatever happened; `*` marks a figure that is missed.

`--host` gives the CPU time of eager calls alone: of NCCL and cuBLAS in sequence, of what `overlap` chooses, and of that
where there are gradients.

`--dry-run` does all but time, on processors, without what needs a GPU:

    torchrun --nproc-per-node 2 benchmarks/products.py --dry-run --rows 32 --shapes 16x24
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import products_report
from benchmarks.contests import Contests, parsed, parser_of
from benchmarks.products_report import ALONE, ASYNC, CONTENDERS, PUSHED, Case, Element, Row, Way

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
    parser = parser_of(__doc__, batches=9, seconds=60.0)
    add = parser.add_argument
    add("--rows", nargs="+", type=int, default=(8192, 1024, 4096, 16384), help="M, of all ranks")
    add("--shapes", nargs="+", type=shape_of, help="K x N as in 8192x3584, of every way")
    add("--ways", nargs="+", type=Way, choices=list(Way), default=list(Way))
    add("--elements", nargs="+", type=Element, choices=list(Element), default=[Element.BFLOAT16])
    add("--host", action="store_true", help="CPU time of an eager call")
    return parsed(parser, arguments)


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
    from benchmarks.host import held
    from benchmarks.products_calls import Stage

    bench = output.begin()
    if options.host:
        for case in cases_of(options, bench.ranks):
            output.notes += held(bench, Stage(bench, case).eager(), f"{case.way}, {case.name}")[1]
        return output.exit_code(bench)
    for case in cases_of(options, bench.ranks):
        missing = {ASYNC} if case.way in (Way.EXCHANGE, Way.RETURN) else set()
        missing |= {ALONE, ASYNC} if options.dry_run else set()
        missing |= set(PUSHED) if case.way in (Way.GATHER, Way.RETURN) else set()
        kinds = {name: kind for name, kind in CONTENDERS.items() if name not in missing}
        output.contest(bench, Row(case), kinds, Stage(bench, case).made, eager=(ASYNC,))
    return output.exit_code(bench)


def cases_of(options: argparse.Namespace, ranks: int) -> Iterator[Case]:
    for rows in options.rows:
        for way in options.ways:
            for depth, columns in options.shapes or SHAPES[way]:
                for element in options.elements:
                    yield Case(way, rows, depth, columns, ranks, element)


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "10")
    options = options_of(sys.argv[1:])
    output = Output(options, products_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
