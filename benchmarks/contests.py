"""Turns rows of contenders, measured side by side, into what a benchmark tells last: a table, faults, a verdict, and a
file where one is asked for.

Assumes rows with a `case` and `results`, a report, which is a module whose `overview`, `COLUMNS` and `lines_of` tell of
them, and options with `dry_run` and those of `record`. Does not measure and does not import torch.
"""

from __future__ import annotations

import argparse
from types import ModuleType
from typing import Any

from benchmarks import record
from benchmarks.ending import Ending
from benchmarks.report import NO_TIME, Kind, Result, grid


class Contests(Ending):
    def __init__(self, options: argparse.Namespace, report: ModuleType) -> None:
        super().__init__(options)
        self.report = report

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
