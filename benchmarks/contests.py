"""Turns rows of contenders, measured side by side, into what a benchmark tells last: a table, faults, a verdict, and a
file where one is asked for.

Assumes rows with a `case` and `results`, a report, which is a module whose `overview`, `COLUMNS` and `lines_of` tell of
them, and options as `parser_of` has them. Does not measure itself, and imports torch where it starts.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

from benchmarks import record
from benchmarks.cases import parse_sizes
from benchmarks.ending import Ending
from benchmarks.report import NO_TIME, Kind, Result, grid


def parser_of(doc: str | None, *, batches: int, seconds: float) -> argparse.ArgumentParser:
    """What every benchmark of contests takes, with these defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--batches", type=int, default=batches, help="timed batches a contender")
    add("--time-budget", type=float, default=seconds, help="seconds after which no row is begun")
    add("--dry-run", action="store_true", help="on processors: checks, and times nothing")
    record.add_options(parser)
    return parser


def sized_parser(doc: str | None, collectives: Collection[str], tune: str) -> argparse.ArgumentParser:
    """Of contests of these collectives by size; `tune`: what a tune is written as."""
    parser = parser_of(doc, batches=15, seconds=40.0)
    add = parser.add_argument
    add("--collectives", nargs="+", choices=collectives, default=list(collectives))
    add("--sizes", type=parse_sizes, default=parse_sizes("64K,1M,4M,16M,64M,256M"))
    add("--tunes", nargs="+", default=[], metavar=tune)
    return parser


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    found = parser.parse_args(arguments)
    record.check_options(parser, found)
    return found


class Contests(Ending):
    def __init__(self, options: argparse.Namespace, report: ModuleType) -> None:
        super().__init__(options)
        self.report = report

    def begin(self) -> Any:
        """This process's Bench, of which the title tells."""
        import torch

        from benchmarks.measure import started

        is_dry = self.options.dry_run
        bench = started(self.options.time_budget, self.options.batches, on_gpus=not is_dry)
        what = "processors" if is_dry else torch.cuda.get_device_name()
        self.title = f"{bench.ranks} x {what}, torch {torch.__version__}; microseconds"
        return bench

    def contest(
        self, bench: Any, row: Any, kinds: Mapping[str, Kind], made: Callable[[str], Any], eager: Collection[str] = ()
    ) -> None:
        """Another row: contenders of these names, which `made` makes, in turns; none where no time is left. `eager`:
        those that no graph can capture.
        """
        from benchmarks.turns import timed

        self.rows.append(row)
        if bench.time_is_up():
            row.results = [Result(name, kind, None, NO_TIME) for name, kind in kinds.items()]
            return
        row.results += timed(
            bench, row.case, [(name, kind, partial(made, name)) for name, kind in kinds.items()], eager
        )
        if bench.rank == 0:
            print(self.line_of(row), f"({bench.deadline - time.monotonic():.0f} s left)", flush=True)

    def exit_code(self, bench: Any) -> int:
        """That of a run which came to its end."""
        self.is_whole = True
        return int(any(bench.everyone(self.failed)))

    @property
    def results(self) -> list[Result]:
        return [one for row in self.rows for one in row.results]

    def say(self) -> None:
        print(f"\n{self.title}\n{grid(*self.report.overview(self.rows))}")
        faults = [(row, one) for row in self.rows for one in row.results if one.status != "ok"]
        print("\n".join(f"{self.label(row)}: {one.name}: {one.status}" for row, one in faults))
        print("\n".join([*self.notes, self.verdict()]), flush=True)
        if self.options.save and self.is_whole and not self.options.dry_run:
            record.save_lines(self.options, self.report.COLUMNS, self.report.lines_of(self.rows))

    def line_of(self, row: Any) -> str:
        """What is said of a row as soon as it is measured."""
        _, (line,) = self.report.overview([row])
        return "  ".join(line)

    def label(self, row: Any) -> str:
        """What a fault is said to be of."""
        name: str = row.case.name
        return name

    def verdict(self) -> str:
        return f"{sum(one.status == 'ok' for one in self.results)} contenders right"

    @property
    def failed(self) -> bool:
        """A wrong result of anyone's, or no result of ours."""
        results = [one for one in self.results if one.status != NO_TIME]
        return any(one.is_wrong or (one.kind is Kind.OURS and one.status != "ok") for one in results)
