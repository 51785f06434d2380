"""Turns times of products beside what travels into ratios, a table and lines of a file, and such lines into rows.

Assumes microseconds, of the slowest rank. The floor is the larger of cuBLAS alone and the bytes on the link. Does not
measure and does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from benchmarks.report import Contest, Kind, Result, number

LINK = 390e3
"""Bytes a microsecond: what the copy engine moves from one H200 to another."""

CALLS = 6
"""In a CUDA graph, of every contender but `ASYNC`."""

ALONE, ASYNC = "cuBLAS", "async-TP"
STREAMS = {"in sequence": 1, "two streams, 2": 2, "two streams, 4": 4}
OURS = {"commdsl, 1": 1, "commdsl, 2": 2, "commdsl, 4": 4}
"""With the pieces in which each rank's rows travel."""

PUSHED = {"commdsl, 4, pushed": 4, "commdsl, 8, pushed": 8, "commdsl, 16, pushed": 16}
"""The same where products put what they make for others there themselves, a rank's own between them: so that what goes
over the links is as much at any time.
"""

LIBRARY, IN_TURN, CHOSEN = "commdsl, 2, by cuBLAS", "commdsl, in sequence", "commdsl"
"""Of ours, products of torch's beside what travels, and one after the other; and what `overlap` chooses."""

CONTENDERS = {
    ALONE: Kind.LIMIT,
    **dict.fromkeys(STREAMS, Kind.PEER),
    ASYNC: Kind.PEER,
    **dict.fromkeys((*OURS, *PUSHED, LIBRARY, IN_TURN, CHOSEN), Kind.OURS),
}

COLUMNS = ("way", "rows", "depth", "columns", "element", "ranks", "calls", "contender", "kind", "median_us", "p10_us",
           "p90_us", "status")  # fmt: skip


class Way(StrEnum):
    GATHER = "all-gather + product"
    SCATTER = "product + reduce-scatter"
    REDUCE = "product + all-reduce"
    EXCHANGE = "product + all-to-all"
    RETURN = "all-to-all + product"


class Element(StrEnum):
    """Of what is multiplied; results are bfloat16."""

    BFLOAT16 = "bfloat16"
    FLOAT8 = "float8"


MOST_OF_FLOOR = {Way.GATHER: 1.10, Way.SCATTER: 1.15, Way.REDUCE: 1.25}
FROM_ROWS = 4096
"""The figures asked for are of so many rows in all, or more. None is asked of products beside an all-to-all."""

MOST_OF_PEER = 1.02


@dataclass(frozen=True)
class Case:
    """One product of every rank: `rows` in all of `depth`, and weights of `columns` times `depth` for each of them."""

    way: Way
    rows: int
    depth: int
    columns: int
    ranks: int
    element: Element = Element.BFLOAT16

    @property
    def calls(self) -> int:
        return CALLS

    @property
    def name(self) -> str:
        size = f"{self.rows} x {self.depth} x {self.columns}"
        return size if self.element is Element.BFLOAT16 else f"{size} {self.element}"

    @property
    def sent_bytes(self) -> int:
        """What a rank sends: rows as they are multiplied, results of 16 bits."""
        if self.way in (Way.GATHER, Way.RETURN):
            width = self.depth * (2 if self.element is Element.BFLOAT16 else 1)
        else:
            width = 2 * self.columns
        times = 2 if self.way is Way.REDUCE else 1
        return times * self.rows // self.ranks * width * (self.ranks - 1)


@dataclass
class Row(Contest):
    """Everything measured side by side for one product."""

    case: Case
    results: list[Result] = field(default_factory=list)

    @property
    def floor(self) -> float | None:
        alone = self.time_of(ALONE)
        return max(alone, self.case.sent_bytes / LINK) if alone else None

    def over_floor(self) -> float | None:
        ours, floor = self.time_of(CHOSEN), self.floor
        return ours / floor if ours and floor else None

    def over_peer(self) -> float | None:
        ours, peer = self.time_of(CHOSEN), self.best(Kind.PEER)
        return ours / peer.timing.median if ours and peer and peer.timing else None

    def misses(self) -> list[str]:
        """The columns whose figure is not reached by what is chosen."""
        floor, peer, found = self.over_floor(), self.over_peer(), []
        most = MOST_OF_FLOOR.get(self.case.way, inf)
        if floor is None or (self.case.rows >= FROM_ROWS and floor > most):
            found.append("of floor")
        if peer is not None and peer > MOST_OF_PEER:
            found.append("of peer")
        return found


def overview(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a row: every contender's microseconds, then what is chosen beside floor and best peer; `*` where a
    figure is missed. Who was never measured has no column.
    """
    rows = list(rows)
    names = [name for name in CONTENDERS if any(row.time_of(name) is not None for row in rows)]
    return ["", "M x K x N", *names, "floor", "of floor", "of peer", ""], [_line(row, names) for row in rows]


def _line(row: Row, names: Sequence[str]) -> list[str]:
    misses = row.misses()
    cells = {"of floor": number(row.over_floor(), 2), "of peer": number(row.over_peer(), 2)}
    faults = [f"{result.name}: {result.status}" for result in row.results if result.status != "ok"]
    return [
        str(row.case.way),
        row.case.name,
        *(number(row.time_of(name), 0) for name in names),
        number(row.floor, 0),
        *(("*" if name in misses else "") + text for name, text in cells.items()),
        "; ".join(faults)[:60],
    ]


def lines_of(rows: Iterable[Row]) -> list[list[object]]:
    """As COLUMNS: one a contender and row; an empty field was not measured."""
    found: list[list[object]] = []
    for row in rows:
        case = row.case
        start = [case.way, case.rows, case.depth, case.columns, case.element, case.ranks, case.calls]
        found += [[*start, one.name, one.kind, *one.told, one.status] for one in row.results]
    return found


def rows_of(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """The rows that `lines_of` told of, in their order."""
    found: dict[Case, Row] = {}
    for line in lines:
        sizes = (int(line[name]) for name in ("rows", "depth", "columns", "ranks"))
        case = Case(Way(line["way"]), *sizes, Element(line["element"]))
        found.setdefault(case, Row(case)).results.append(Result.read(line))
    return list(found.values())
