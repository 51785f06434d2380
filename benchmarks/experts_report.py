"""Turns numbers of tokens and experts into keys and the least bytes that they need, and times of such calls into
ratios, a table and CSV.

Assumes microseconds, of the slowest rank. The least: a row crosses to a rank once, however many of its experts are
there, and once back. The share of the limit is the time that as many bytes take by stores or the copy engine, whichever
is sooner, over ours. Does not measure and does not import torch.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Contest, Kind, Result, number

Ints: TypeAlias = NDArray[np.int32]

HIDDEN, TOPK, EXPERTS_A_RANK = 7168, 8, 32
TOKENS = (4096, 128)
CALLS = 12
"""Calls in a CUDA graph, of every contender. Each keeps its results, so that more would not fit."""

HALVES = "index, halves"
"""A call of two launches, one behind the other: what they take together. Of few tokens, which is what they are for."""

NODES = "nodes"

NCCL, DEEPEP, DEEPEP_CACHED, DEEPEP_LOW = "all_to_all", "DeepEP", "DeepEP cached", "DeepEP low latency"
PEERS = (NCCL, DEEPEP, DEEPEP_CACHED, DEEPEP_LOW)

LEAST_OF_LIMIT = 0.85
MOST_OF_DEEPEP = 0.6
FEW_TOKENS = 512
FEW_US = {"there": {2: 25.0, 8: 35.0}, "back": {2: 30.0, 8: 45.0}}
"""Of 128 tokens, by ranks."""

COLUMNS = ("way", "tokens", "hidden", "topk", "experts", "ranks", "form", "calls", "least_bytes", "contender", "kind")
NUMBERS = (
    "median_us",
    "p10_us",
    "p90_us",
    "least_gb_per_s",
    "ratio_to_all_to_all",
    "ratio_to_deepep",
    "share_of_limit",
)


class Way(StrEnum):
    THERE = "there"
    BACK = "back"


class Form(StrEnum):
    """What tokens travel in on their way there; back it is bfloat16."""

    BF16 = "bf16"
    FP8 = "fp8"  # float8 with a float32 scale for each 128


@dataclass(frozen=True)
class Case:
    """`tokens` of a rank, each to `topk` different experts of all, by chance."""

    tokens: int
    ranks: int
    form: Form = Form.BF16
    hidden: int = HIDDEN
    topk: int = TOPK
    experts_a_rank: int = EXPERTS_A_RANK
    way: Way = Way.THERE

    @property
    def calls(self) -> int:
        return CALLS

    @property
    def experts(self) -> int:
        return self.ranks * self.experts_a_rank

    @property
    def widths(self) -> tuple[int, ...]:
        """Bytes of what travels there, by tensor."""
        return (2 * self.hidden,) if self.form is Form.BF16 else (self.hidden, 4 * -(-self.hidden // 128))

    @property
    def width_back(self) -> int:
        return 2 * self.hidden

    @cached_property
    def keys(self) -> Ints:
        """(ranks, tokens, topk), the same on every rank: the dice are thrown by the case."""
        dice = np.random.default_rng((self.tokens, self.ranks, self.topk, self.experts_a_rank))
        scores = dice.random((self.ranks, self.tokens, self.experts))
        return np.argsort(scores, axis=2)[:, :, : self.topk].astype(np.int32)

    @cached_property
    def received(self) -> int:
        """The most rows that come to a rank."""
        return int(np.bincount(self.keys.ravel() // self.experts_a_rank, minlength=self.ranks).max())

    @cached_property
    def crossing(self) -> NDArray[np.int64]:
        """(ranks, ranks): rows that a rank has for another, each once."""
        ranks = self.keys // self.experts_a_rank
        goes = np.stack([(ranks == to).any(axis=2).sum(axis=1) for to in range(self.ranks)], axis=1)
        return (goes * ~np.eye(self.ranks, dtype=bool)).astype(np.int64)

    @property
    def sent_bytes(self) -> int:
        """The least that the busiest port carries one way."""
        rows = max(self.crossing.sum(axis=0).max(), self.crossing.sum(axis=1).max())
        return int(rows) * (sum(self.widths) if self.way is Way.THERE else self.width_back)


@dataclass
class Row(Contest):
    """Everything measured side by side for one case, one way."""

    case: Case
    results: list[Result] = field(default_factory=list)

    def over(self, result: Result | None, name: str) -> float | None:
        """A result's time over that of another contender."""
        other = self.time_of(name)
        return result.timing.median / other if result and result.timing and other else None

    def share_of_limit(self, result: Result | None) -> float | None:
        limit = self.best(Kind.LIMIT)
        if result is None or result.timing is None or limit is None or limit.timing is None:
            return None
        return limit.timing.median / result.timing.median

    def rate(self, result: Result) -> float | None:
        return self.case.sent_bytes / result.timing.median / 1000 if result.timing else None

    def misses(self) -> list[str]:
        """The columns whose figure our best does not reach."""
        ours = self.best(Kind.OURS)
        if ours is None or ours.timing is None:
            return ["us"]
        found = []
        few = FEW_US[self.case.way].get(self.case.ranks)
        if self.case.tokens <= FEW_TOKENS:
            found += ["us"] if few is not None and ours.timing.median >= few else []
        elif (share := self.share_of_limit(ours)) is not None and share < LEAST_OF_LIMIT:
            found.append("of limit")
        for name, most in ((DEEPEP, MOST_OF_DEEPEP), (DEEPEP_CACHED, 1.0), (DEEPEP_LOW, 1.0), (NCCL, 1.0)):
            ratio = self.over(ours, name)
            if ratio is not None and ratio > most:
                found.append(f"/{name}")
        return found


def overview(rows: Iterable[Row], ours: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """One line a row: every contender's microseconds, then our best beside the others; `*` where a figure is missed."""
    ratios = [f"/{name}" for name in PEERS]
    header = ["way", "tokens", "form", "MB", *ours, *PEERS, "limit", "us", *ratios, "of limit", "GB/s", ""]
    return header, [_line(row, ours) for row in rows]


def _line(row: Row, ours: Sequence[str]) -> list[str]:
    best, limit, case = row.best(Kind.OURS), row.best(Kind.LIMIT), row.case
    misses = row.misses()
    cells = {
        "us": number(best.timing.median) if best and best.timing else "-",
        **{f"/{name}": number(row.over(best, name), 2) for name in PEERS},
        "of limit": number(row.share_of_limit(best), 2),
    }
    faults = [f"{result.name}: {result.status}" for result in row.results if result.status != "ok"]
    return [
        str(case.way),
        str(case.tokens),
        str(case.form) if case.way is Way.THERE else str(Form.BF16),
        number(case.sent_bytes / 1e6),
        *(number(row.time_of(name)) for name in (*ours, *PEERS)),
        number(limit.timing.median if limit and limit.timing else None),
        *(("*" if name in misses else "") + text for name, text in cells.items()),
        number(row.rate(best) if best else None, 0),
        "; ".join(faults)[:60],
    ]


def text_of(rows: Iterable[Row]) -> str:
    """CSV: one line a contender and row; an empty field was not measured."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*COLUMNS, *NUMBERS, "status"])
    for row in rows:
        case = row.case
        sizes = (case.tokens, case.hidden, case.topk, case.experts, case.ranks)
        start = [case.way, *sizes, case.form, case.calls, case.sent_bytes]
        for result in row.results:
            ratios = row.over(result, NCCL), row.over(result, DEEPEP), row.share_of_limit(result)
            fields = result.fields(row.rate(result), *ratios)
            writer.writerow([*start, result.name, result.kind, *fields, result.status])
    return file.getvalue()


def rows_of(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """The rows that `text_of` wrote, in their order."""
    found: dict[Case, Row] = {}
    for line in lines:
        tokens, hidden, topk, experts, ranks = (
            int(line[name]) for name in ("tokens", "hidden", "topk", "experts", "ranks")
        )
        case = Case(tokens, ranks, Form(line["form"]), hidden, topk, experts // ranks, Way(line["way"]))
        found.setdefault(case, Row(case)).results.append(Result.read(line))
    return list(found.values())
