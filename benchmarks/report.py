"""Turns times into ratios, tables, CSV and a plot; and such a CSV into rows again.

Assumes microseconds. Does not measure and does not import torch; matplotlib only where a plot is asked for. A ratio is
our time over another's: less than 1 is faster.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from benchmarks.cases import Case, Collective, size_name

NCCL, NCCL_WINDOW, ONE_SHOT, TWO_SHOT, CHOSEN = "NCCL", "NCCL windows", "symm one-shot", "symm two-shot", "commdsl"


NO_TIME = "no time"


class Kind(StrEnum):
    LIMIT = "limit"
    PEER = "peer"
    OURS = "ours"


COLUMNS = (
    "collective",
    "bytes",
    "ranks",
    "calls",
    "contender",
    "kind",
    "median_us",
    "p10_us",
    "p90_us",
    "bus_gb_per_s",
    "ratio_to_best_peer",
    "ratio_to_nccl",
    "fraction_of_limit",
    "status",
    "detail",
)


TIMES = ("median_us", "p10_us", "p90_us")


@dataclass(frozen=True, slots=True)
class Timing:
    """The median over batches, and the 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Timing:
        ordered = sorted(values)
        return Timing(_quantile(ordered, 0.5), _quantile(ordered, 0.1), _quantile(ordered, 0.9))

    @staticmethod
    def read(line: Mapping[str, str]) -> Timing | None:
        """Of a line of a file, in the columns of `TIMES`."""
        told = [line[name] for name in TIMES]
        return Timing(*map(float, told)) if all(told) else None

    def __str__(self) -> str:
        return f"{number(self.median)} ({number(self.low)}-{number(self.high)})"


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def number(value: float | None, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if digits and value >= 1000 else f"{value:.{digits}f}"


@dataclass(frozen=True, slots=True)
class Result:
    """One contender in one row. Without a timing, `status` says why."""

    name: str
    kind: Kind
    timing: Timing | None
    status: str = "ok"
    detail: str = ""

    @staticmethod
    def read(line: Mapping[str, str]) -> Result:
        """Of a line of a file, in the columns of contender, kind, `TIMES` and status."""
        return Result(line["contender"], Kind(line["kind"]), Timing.read(line), line["status"])

    @property
    def told(self) -> list[str]:
        """In the columns of `TIMES`."""
        if self.timing is None:
            return [""] * len(TIMES)
        return [f"{us:.5g}" for us in (self.timing.median, self.timing.low, self.timing.high)]

    def fields(self, *others: float | None) -> list[str]:
        """Its times and what else a row says of it, for a file; an empty field was not measured."""
        times = (None,) * 3 if self.timing is None else (self.timing.median, self.timing.low, self.timing.high)
        return ["" if value is None else f"{value:.4g}" for value in (*times, *others)]

    @property
    def is_wrong(self) -> bool:
        return self.status.startswith("wrong")

    @property
    def is_failure(self) -> bool:
        """It did not run, though nothing was wrong with asking for it."""
        refused = self.status.startswith("refused") and self.name != CHOSEN
        return self.timing is None and not refused and self.status != NO_TIME


@dataclass(frozen=True)
class SizedCase:
    """A collective of bfloat16, so many bytes of it on the larger side of one rank."""

    collective: str
    nbytes: int
    ranks: int

    @property
    def calls(self) -> int:
        """In a CUDA graph."""
        return 24 if self.nbytes < 1 << 24 else 8

    @property
    def name(self) -> str:
        return f"{self.collective} {size_name(self.nbytes)}"

    @property
    def sent_bytes(self) -> int:
        return self.nbytes


class Contest:
    """What was measured side by side."""

    results: list[Result]

    def of(self, name: str) -> Result | None:
        return next((result for result in self.results if result.name == name), None)

    def time_of(self, name: str) -> float | None:
        found = self.of(name)
        return found.timing.median if found and found.timing else None

    def ratio(self, name: str, other: str) -> float | None:
        """Of the times of two contenders."""
        one, over = self.time_of(name), self.time_of(other)
        return one / over if one and over else None

    def best(self, kind: Kind) -> Result | None:
        """The fastest of a kind among those that gave the right result."""
        timed = [
            (result.timing.median, index)
            for index, result in enumerate(self.results)
            if result.kind == kind and result.timing and not result.is_wrong
        ]
        return self.results[min(timed)[1]] if timed else None


@dataclass
class Row(Contest):
    """Everything measured side by side for one collective at one size."""

    case: Case
    results: list[Result] = field(default_factory=list)

    def ratio_to_best_peer(self, result: Result) -> float | None:
        return _ratio(result, self.best(Kind.PEER))

    def ratio_to_nccl(self, result: Result) -> float | None:
        return _ratio(result, self.of(NCCL))

    def bus(self, result: Result) -> float | None:
        return self.case.gigabytes_per_second(result.timing.median) if result.timing else None

    def fraction_of_limit(self, result: Result) -> float | None:
        """The time a plain copy takes to push as many bytes, over this one's."""
        inverse = _ratio(result, self.best(Kind.LIMIT))
        return 1 / inverse if inverse else None


def _ratio(result: Result, other: Result | None) -> float | None:
    if other is None or other.timing is None or result.timing is None:
        return None
    return result.timing.median / other.timing.median


# --- tables -----------------------------------------------------------------------------------------------------------


def grid(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    widths = [max(len(line[column]) for line in (header, *lines)) for column in range(len(header))]

    def text(line: Sequence[str]) -> str:
        cells = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([text(header), "  ".join("-" * width for width in widths), *(text(line) for line in lines)])


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def overview(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a row: our choice, or our fastest candidate, beside the peers and the limit. Losses are marked `*`."""
    header = [
        "collective",
        "size",
        "us (p10-p90)",
        NCCL,
        "windows",
        "one-shot",
        "two-shot",
        "/best peer",
        "/NCCL",
        "GB/s",
        "of limit",
        "what ran",
    ]
    return header, [_line(row) for row in rows]


def _line(row: Row) -> list[str]:
    ours = (
        row.of(CHOSEN)
        or row.best(Kind.OURS)
        or next((result for result in row.results if result.kind == Kind.OURS), None)
    )
    start = [row.case.collective.value, size_name(row.case.nbytes)]
    peers = [_time(row.of(name)) for name in (NCCL, NCCL_WINDOW, ONE_SHOT, TWO_SHOT)]
    if ours is None or ours.timing is None:
        return [*start, "-", *peers, "-", "-", "-", "-", ours.status if ours else "nothing ran"]
    to_best = row.ratio_to_best_peer(ours)
    loss = "*" if to_best is not None and to_best > 1 else ""
    what = (ours.detail or ours.name) + (f"  {ours.status}" if ours.status != "ok" else "")
    return [
        *start,
        str(ours.timing),
        *peers,
        loss + number(to_best, 2),
        number(row.ratio_to_nccl(ours), 2),
        number(row.bus(ours), 0),
        number(row.fraction_of_limit(ours), 2),
        what,
    ]


def _time(result: Result | None) -> str:
    """A dash where it was not measured, a word where it could not be."""
    if result is None:
        return "-"
    return number(result.timing.median) if result.timing else result.status.split(":")[0]


def matrix(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a contender of one collective, one column a size; `*` is our fastest, `+` the fastest peer."""
    names = list(dict.fromkeys(result.name for row in rows for result in row.results))
    kinds = {result.name: result.kind for row in rows for result in row.results}
    names.sort(key=lambda name: list(Kind).index(kinds[name]))
    header = ["us", *(size_name(row.case.nbytes) for row in rows)]
    return header, [[name, *(_cell(row, name) for row in rows)] for name in names]


def _cell(row: Row, name: str) -> str:
    result = row.of(name)
    if result is None:
        return ""
    if result.timing is None:
        return result.status.split(":")[0]
    mark = {Kind.OURS: "*", Kind.PEER: "+"}.get(result.kind, "") if result is row.best(result.kind) else ""
    return mark + number(result.timing.median) + (" WRONG" if result.is_wrong else "")


def by_collective(rows: Iterable[Row]) -> dict[Collective, list[Row]]:
    found: dict[Collective, list[Row]] = {}
    for row in rows:
        found.setdefault(row.case.collective, []).append(row)
    return found


def faults(rows: Iterable[Row]) -> list[str]:
    """Everything that did not run or ran wrong, in full; once for all the sizes where it is the same."""
    found: dict[tuple[Collective, str, str], list[str]] = {}
    for row in rows:
        for result in row.results:
            if result.status != "ok":
                key = (row.case.collective, result.name, result.status)
                found.setdefault(key, []).append(size_name(row.case.nbytes))
    return [f"{name} {who} at {', '.join(sizes)}: {status}" for (name, who, status), sizes in found.items()]


# --- files ------------------------------------------------------------------------------------------------------------


def text_of(rows: Iterable[Row]) -> str:
    """CSV: one line a contender and row; an empty field was not measured."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        for result in row.results:
            writer.writerow(_record(row, result))
    return file.getvalue()


def rows_of(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """The rows that `text_of` wrote, in their order."""
    found: dict[Case, Row] = {}
    for line in lines:
        ranks, calls = int(line["ranks"]), int(line["calls"])
        case = Case(Collective(line["collective"]), int(line["bytes"]), ranks, calls=calls)
        result = replace(Result.read(line), detail=line["detail"])
        found.setdefault(case, Row(case)).results.append(result)
    return list(found.values())


def _record(row: Row, result: Result) -> list[object]:
    case = row.case
    fields = result.fields(
        row.bus(result),
        row.ratio_to_best_peer(result),
        row.ratio_to_nccl(result),
        row.fraction_of_limit(result),
    )
    return [
        case.collective,
        case.nbytes,
        case.ranks,
        case.calls,
        result.name,
        result.kind,
        *fields,
        result.status,
        result.detail,
    ]


def plot(path: Path, rows: Sequence[Row], title: str) -> None:
    """A panel a collective: microseconds over bytes, both logarithmic, for our fastest, the peers and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = by_collective(rows)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(4.2 * len(panels), 4), squeeze=False)
    for axis, (collective, found) in zip(axes[0], panels.items(), strict=True):
        for name, points in _curves(found).items():
            axis.loglog(
                [x for x, _ in points], [y for _, y in points], marker=".", label=name, base=2, nonpositive="clip"
            )
        axis.set_yscale("log", base=10)
        axis.set_xticks([row.case.nbytes for row in found][::2])
        axis.set_xticklabels([size_name(row.case.nbytes) for row in found][::2], rotation=60)
        axis.set(title=collective.value, xlabel="bytes of the larger side", ylabel="microseconds")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def _curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        best = {"commdsl": row.of(CHOSEN) or row.best(Kind.OURS), "link limit": row.best(Kind.LIMIT)}
        best |= {name: row.of(name) for name in (NCCL, NCCL_WINDOW, ONE_SHOT, TWO_SHOT)}
        for name, result in best.items():
            if result is not None and result.timing is not None:
                found.setdefault(name, []).append((row.case.nbytes, result.timing.median))
    return found
