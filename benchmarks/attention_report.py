"""Turns times of attention into lines of a file, and such lines into tables that say how far from the floor they are.

Assumes microseconds. Does not measure and does not import torch. A row is heads, tokens a GPU and a pass; its floor is
the larger of two: the same kernel with nothing to wait for, and the bytes of keys and values on the link.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from benchmarks.dispatch_report import rows_name
from benchmarks.report import Timing, number

COLUMNS = (
    "heads",
    "tokens",
    "ranks",
    "pass",
    "calls",
    "contender",
    "kind",
    "kernel",
    "how",
    "median_us",
    "p10_us",
    "p90_us",
    "error",
    "status",
)


class Kind(StrEnum):
    LINK = "link"
    ALONE = "alone"
    STILL = "still"  # the loop with all it does, but nothing moves
    OURS = "ours"
    RING = "ring"  # zigzag over NCCL
    TORCH = "context_parallel"


class Pass(StrEnum):
    FORWARD = "forward"
    BOTH = "forward + backward"


@dataclass(frozen=True)
class Case:
    """One row: heads of queries and of keys, and tokens of a GPU."""

    heads: tuple[int, int]
    tokens: int
    ranks: int
    direction: Pass

    @property
    def name(self) -> str:
        return f"{self.heads[0]}:{self.heads[1]} {rows_name(self.tokens)} {self.direction}"

    @property
    def traffic(self) -> float:
        """What leaves the busiest port, in keys and values of a rank. The last rank's are needed whole by all others.
        On the way back the first rank, which needs all of theirs, sends as many gradients, in float32, beside the half
        of its own keys and values that others need.
        """
        return (self.ranks - 1) * (1.0 if self.direction is Pass.FORWARD else 1.0 + 2.5)


@dataclass(frozen=True)
class Result:
    """One contender in one row. `error`: the relative distance from the attention of one GPU."""

    case: Case
    name: str
    kind: Kind
    kernel: str = ""
    calls: int = 1
    how: str = ""  # graph or eager
    timing: Timing | None = None
    error: float | None = None
    status: str = "ok"

    @property
    def is_good(self) -> bool:
        return self.timing is not None and self.status == "ok"

    @property
    def us(self) -> float:
        assert self.timing is not None
        return self.timing.median

    def line(self) -> list[object]:
        """As COLUMNS."""
        times = ["", "", ""]
        if self.timing is not None:
            times = [f"{value:.5g}" for value in (self.timing.median, self.timing.low, self.timing.high)]
        case, error = self.case, "" if self.error is None else f"{self.error:.2g}"
        heads = f"{case.heads[0]}:{case.heads[1]}"
        row = [heads, case.tokens, case.ranks, case.direction, self.calls]
        return [*row, self.name, self.kind, self.kernel, self.how, *times, error, self.status]


def results_of(lines: Iterable[Mapping[str, str]]) -> list[Result]:
    """What `line` made."""
    found = []
    for line in lines:
        query, key = line["heads"].split(":")
        case = Case((int(query), int(key)), int(line["tokens"]), int(line["ranks"]), Pass(line["pass"]))
        timing = Timing.read(line)
        error = float(line["error"]) if line["error"] else None
        words = line["contender"], Kind(line["kind"]), line["kernel"], int(line["calls"]), line["how"]
        found.append(Result(case, *words, timing, error, line["status"]))
    return found


def best(results: Iterable[Result], *kinds: Kind) -> Result | None:
    """The fastest that is right."""
    return min((one for one in results if one.kind in kinds and one.is_good), key=lambda one: one.us, default=None)


def floor_of(result: Result, results: Sequence[Result]) -> float | None:
    """Of a result, in its row: its own kernel alone or the link, whichever takes longer."""
    alone = best((one for one in results if one.kernel == result.kernel), Kind.ALONE)
    link = best(results, Kind.LINK)
    return None if alone is None or link is None else max(alone.us, link.us)


def most_of_floor(case: Case) -> float:
    """What a row may take of its floor."""
    return 1.20 if case.tokens < 8192 else 1.05


def least_of_torch(case: Case) -> float:
    """How many times faster than torch's `context_parallel` a row has to be."""
    return 1.5 if case.tokens <= 8192 else 1.0


HEADER = (
    "heads",
    "tokens",
    "pass",
    "commdsl",
    "by",
    "alone",
    "link",
    "of the floor",
    "NCCL ring",
    "is longer",
    "context_parallel",
    "is longer",
)


def short(results: Sequence[Result]) -> tuple[Sequence[str], list[list[str]]]:
    """A line a row, in milliseconds; `*` where a figure is missed."""
    rows: dict[Case, list[Result]] = {}
    for one in results:
        rows.setdefault(one.case, []).append(one)
    return HEADER, [_line(case, row) for case, row in rows.items()]


def _line(case: Case, row: Sequence[Result]) -> list[str]:
    ours, link = best(row, Kind.OURS), best(row, Kind.LINK)
    alone = best((one for one in row if ours is None or one.kernel == ours.kernel), Kind.ALONE)
    floor = None if ours is None else floor_of(ours, row)
    share = ours.us / floor if ours and floor else None
    missed = "*" if share and share > most_of_floor(case) else ""
    cells = [f"{case.heads[0]}:{case.heads[1]}", rows_name(case.tokens), case.direction.value]
    cells += [_ms(ours), "" if ours is None else f"{ours.name}, {ours.kernel}"]
    cells += [_ms(alone), _ms(link), missed + number(share, 2)]
    for kind, least in ((Kind.RING, 1.0), (Kind.TORCH, least_of_torch(case))):
        peer = best(row, kind)
        times = peer.us / ours.us if ours and peer else None
        said = "failed" if peer is None and any(one.kind is kind for one in row) else _ms(peer)
        cells += [said, ("*" if times and times < least else "") + number(times, 2)]
    return cells


def _ms(result: Result | None) -> str:
    if result is None:
        return "-"
    return number(result.us / 1000, 3 if result.us < 1e4 else 1) + (" e" if result.how == "eager" else "")


def long(results: Sequence[Result]) -> tuple[Sequence[str], list[list[str]]]:
    """Every contender of every row."""
    lines = []
    for one in results:
        time = "" if one.timing is None else _ms(one)
        spread = "" if one.timing is None else f"{one.timing.low / 1000:.3g}-{one.timing.high / 1000:.3g}"
        error = "" if one.error is None else f"{one.error:.1e}"
        lines.append([one.case.name, one.name, one.kernel, time, spread, error, one.status])
    return ("row", "what", "kernel", "ms", "p10-p90", "error", ""), lines
