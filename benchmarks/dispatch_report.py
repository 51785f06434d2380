"""Turns times of dispatches into ratios, a table and CSV.

Assumes microseconds, of the slowest rank. A ratio to NCCL is our time over its; the share of the limit is the time that
as many bytes take by stores or the copy engine, whichever is sooner, over ours. Does not measure and does not import
torch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.dispatch_plans import Case
from benchmarks.report import Contest, Kind, Result, number

OURS = ("rows kv", "rows k+v", "packed kv", "packed k+v")
"""How rows are put; and keys and values as one tensor, or as two of half the width."""

APART, TOGETHER = "NCCL 2 calls", "NCCL 1 call"
MOST_OF_NCCL = 0.85
LEAST_OF_LIMIT, LIMIT_FROM_ROWS = 0.90, 8 << 10
SMALL_ROWS, SMALL_US = 1 << 10, 25.0
COLUMNS = ("way", "rows", "shard", "document", "ranks", "calls", "port_bytes", "contender", "kind")
NUMBERS = ("median_us", "p10_us", "p90_us", "port_gb_per_s", "ratio_to_nccl", "share_of_limit")


class Way(StrEnum):
    THERE = "there"
    BACK = "back"


@dataclass
class Row(Contest):
    """Everything measured side by side for one case, one way."""

    case: Case
    way: Way
    results: list[Result] = field(default_factory=list)

    def over(self, result: Result | None, kind: Kind) -> float | None:
        """A result's time over the best of a kind."""
        other = self.best(kind)
        if result is None or result.timing is None or other is None or other.timing is None:
            return None
        return result.timing.median / other.timing.median

    def share_of_limit(self, result: Result | None) -> float | None:
        found = self.over(result, Kind.LIMIT)
        return 1 / found if found else None

    def rate(self, result: Result) -> float | None:
        return self.case.traffic.port_bytes / result.timing.median / 1000 if result.timing else None

    def misses(self) -> list[str]:
        """The columns whose figure is not reached by our best."""
        ours = self.best(Kind.OURS)
        if ours is None or ours.timing is None:
            return ["us"]
        to_nccl, share = self.over(ours, Kind.PEER), self.share_of_limit(ours)
        found = []
        if self.case.rows <= SMALL_ROWS and ours.timing.median >= SMALL_US:
            found.append("us")
        if to_nccl is not None and to_nccl > MOST_OF_NCCL:
            found.append("/NCCL")
        if share is not None and share < LEAST_OF_LIMIT and self.case.rows >= LIMIT_FROM_ROWS:
            found.append("of limit")
        return found


def overview(rows: Iterable[Row], ours: Sequence[str], peers: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """One line a row: every contender's microseconds, then our best beside the others; `*` where a figure is missed."""
    header = ["way", "rows", "shard", "MB", *ours, *peers, "limit", "us", "/NCCL", "of limit", "GB/s", ""]
    return header, [_line(row, ours, peers) for row in rows]


def _line(row: Row, ours: Sequence[str], peers: Sequence[str]) -> list[str]:
    best, limit = row.best(Kind.OURS), row.best(Kind.LIMIT)
    misses = row.misses()
    cells = {
        "us": number(best.timing.median) if best and best.timing else "-",
        "/NCCL": number(row.over(best, Kind.PEER), 2),
        "of limit": number(row.share_of_limit(best), 2),
    }
    faults = [f"{result.name}: {result.status}" for result in row.results if result.status != "ok"]
    return [
        str(row.way),
        rows_name(row.case.rows),
        str(row.case.shard),
        number(row.case.traffic.port_bytes / 1e6),
        *(number(row.time_of(name)) for name in (*ours, *peers)),
        number(limit.timing.median if limit and limit.timing else None),
        *(("*" if name in misses else "") + text for name, text in cells.items()),
        number(row.rate(best) if best else None, 0),
        "; ".join(faults)[:60],
    ]


def rows_name(rows: int) -> str:
    return f"{rows // 1024}K" if rows % 1024 == 0 else str(rows)


def text_of(rows: Iterable[Row]) -> str:
    """CSV: one line a contender and row; an empty field was not measured."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *NUMBERS, "status"])
    for row in rows:
        case = row.case
        start = [row.way, case.rows, case.shard, case.document, case.ranks, case.calls, case.traffic.port_bytes]
        for result in row.results:
            fields = result.fields(row.rate(result), row.over(result, Kind.PEER), row.share_of_limit(result))
            writer.writerow([*start, result.name, result.kind, *fields, result.status])
    return file.getvalue()
