"""Turns times of sums over ranks that are normed into a table and lines of a file, and such lines into rows.

Assumes microseconds, of the slowest rank. Does not measure and does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.report import TIMES, Contest, Kind, Result, number

OURS, APART = "commdsl", "commdsl, compiled"
NCCL, COMPILED, ONE_SHOT = "NCCL, torch", "NCCL, compiled", "one-shot, compiled"
CONTENDERS = {NCCL: Kind.PEER, COMPILED: Kind.PEER, ONE_SHOT: Kind.PEER, APART: Kind.PEER, OURS: Kind.OURS}

MOST_OF_NCCL = 0.6
CALLS = 48
"""In a CUDA graph."""

COLUMNS = ("rows", "columns", "ranks", "calls", "contender", "kind", *TIMES, "status")


@dataclass(frozen=True)
class Case:
    """So many rows of bfloat16 that every rank has something to add to."""

    rows: int
    columns: int
    ranks: int

    @property
    def calls(self) -> int:
        return CALLS

    @property
    def name(self) -> str:
        return f"{self.rows} x {self.columns}"

    @property
    def sent_bytes(self) -> int:
        """What a rank sends in one step."""
        return 2 * self.rows * self.columns * (self.ranks - 1)


@dataclass
class Row(Contest):
    """Everything measured side by side for so many rows."""

    case: Case
    results: list[Result] = field(default_factory=list)

    def over_nccl(self) -> float | None:
        """Of ours over the better of NCCL's."""
        ours, peers = self.time_of(OURS), [time for name in (NCCL, COMPILED) if (time := self.time_of(name))]
        return ours / min(peers) if ours and peers else None


def overview(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a row: every contender's microseconds; `*` where the figure is missed."""
    return ["rows", *CONTENDERS, "of NCCL"], [_line(row) for row in rows]


def _line(row: Row) -> list[str]:
    over = row.over_nccl()
    mark = "*" if over is not None and over > MOST_OF_NCCL else ""
    return [row.case.name, *(number(row.time_of(name), 1) for name in CONTENDERS), mark + number(over, 2)]


def lines_of(rows: Iterable[Row]) -> list[list[object]]:
    """As COLUMNS: one a contender and row."""
    found: list[list[object]] = []
    for row in rows:
        case = row.case
        start = [case.rows, case.columns, case.ranks, case.calls]
        found += [[*start, one.name, one.kind, *one.told, one.status] for one in row.results]
    return found


def rows_of(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """The rows that `lines_of` told of, in their order."""
    found: dict[Case, Row] = {}
    for line in lines:
        case = Case(*(int(line[name]) for name in ("rows", "columns", "ranks")))
        found.setdefault(case, Row(case)).results.append(Result.read(line))
    return list(found.values())
