"""Turns times of collectives on blocks of unequal length into a table and lines of a file, and such lines into rows.

Assumes microseconds, of the slowest rank. Does not measure and does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.report import TIMES, Contest, Result, SizedCase, number

NCCL, OURS = "NCCL", "commdsl"
SMALL = 16 << 20
MOST, MOST_ABOVE = 0.85, 0.97
COLUMNS = ("collective", "bytes", "ranks", "calls", "contender", "kind", *TIMES, "status")
ROW_BYTES = 128
"""Of the rows that are counted: 64 of bfloat16."""


@dataclass(frozen=True)
class Case(SizedCase):
    """Odd ranks have, or get, three times what even ones do."""

    @property
    def lengths(self) -> list[int]:
        """Rows of each rank: of an all-to-all, that every rank sends it."""
        weights = [1 + 2 * (rank % 2) for rank in range(self.ranks)]
        rows = self.nbytes // ROW_BYTES
        found = [rows * weight // sum(weights) for weight in weights]
        return [*found[:-1], rows - sum(found[:-1])]


@dataclass
class Row(Contest):
    """Everything measured side by side."""

    case: Case
    results: list[Result] = field(default_factory=list)

    @property
    def over(self) -> float | None:
        return self.ratio(OURS, NCCL)


def overview(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a row: every contender's microseconds; `*` where the figure is missed."""
    found = list(rows)
    names = list(dict.fromkeys(one.name for row in found for one in row.results))
    return ["", *names, "of NCCL"], [_line(row, names) for row in found]


def _line(row: Row, names: Iterable[str]) -> list[str]:
    over, most = row.over, MOST if row.case.nbytes <= SMALL else MOST_ABOVE
    mark = "*" if over is not None and over > most else ""
    return [row.case.name, *(number(row.time_of(name), 1) for name in names), mark + number(over, 2)]


def lines_of(rows: Iterable[Row]) -> list[list[object]]:
    """As COLUMNS: one a contender and row."""
    found: list[list[object]] = []
    for row in rows:
        case = row.case
        start = [case.collective, case.nbytes, case.ranks, case.calls]
        found += [[*start, one.name, one.kind, *one.told, one.status] for one in row.results]
    return found


def rows_of(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """The rows that `lines_of` told of, in their order."""
    found: dict[Case, Row] = {}
    for line in lines:
        case = Case(line["collective"], int(line["bytes"]), int(line["ranks"]))
        found.setdefault(case, Row(case)).results.append(Result.read(line))
    return list(found.values())
