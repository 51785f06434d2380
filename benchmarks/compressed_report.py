"""Turns times of collectives in float8 into a table and lines of a file, and such lines into rows.

Assumes microseconds, of the slowest rank. Does not measure and does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.report import TIMES, Contest, Result, SizedCase, number

NCCL, OURS, FLOAT8 = "NCCL", "commdsl", "commdsl float8"
MOST_OF_OURS = 0.65
COLUMNS = ("collective", "bytes", "ranks", "calls", "contender", "kind", *TIMES, "error", "status")


@dataclass(frozen=True)
class Case(SizedCase):
    @property
    def numel(self) -> int:
        """Of what a rank gives."""
        return self.nbytes // 2 // (1 if self.collective == "all_reduce" else self.ranks)


@dataclass
class Row(Contest):
    """Everything measured side by side, and how far off what travelled as float8 was."""

    case: Case
    results: list[Result] = field(default_factory=list)
    error: float = 0.0

    def over(self, name: str) -> float | None:
        """Of ours in float8."""
        return self.ratio(FLOAT8, name)


def overview(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a row: every contender's microseconds; `*` where the figure is missed."""
    found = list(rows)
    names = list(dict.fromkeys(one.name for row in found for one in row.results))
    return ["", *names, "of ours", "of NCCL", "error"], [_line(row, names) for row in found]


def _line(row: Row, names: Iterable[str]) -> list[str]:
    over = row.over(OURS)
    mark = "*" if over is not None and over > MOST_OF_OURS else ""
    times = [number(row.time_of(name), 1) for name in names]
    return [row.case.name, *times, mark + number(over, 2), number(row.over(NCCL), 2), f"{100 * row.error:.2f} %"]


def lines_of(rows: Iterable[Row]) -> list[list[object]]:
    """As COLUMNS: one a contender and row."""
    found: list[list[object]] = []
    for row in rows:
        case = row.case
        start = [case.collective, case.nbytes, case.ranks, case.calls]
        found += [[*start, one.name, one.kind, *one.told, f"{row.error:.4g}", one.status] for one in row.results]
    return found


def rows_of(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """The rows that `lines_of` told of, in their order."""
    found: dict[Case, Row] = {}
    for line in lines:
        case = Case(line["collective"], int(line["bytes"]), int(line["ranks"]))
        found.setdefault(case, Row(case, error=float(line["error"]))).results.append(Result.read(line))
    return list(found.values())
