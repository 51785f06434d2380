"""Turns times of transformer layers into ratios, a table and lines of a file, and such lines into rows.

Assumes microseconds, of the slowest rank. Does not measure and does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.report import TIMES, Contest, Kind, Result, number

PLAIN, COMPILED, PASS = "plain", "plain, compiled", "compiled with the pass"
OURS, OURS_COMPILED = "commdsl", "commdsl, compiled"
_KINDS = {PLAIN: Kind.PEER, COMPILED: Kind.PEER, PASS: Kind.OURS, OURS: Kind.OURS, OURS_COMPILED: Kind.OURS}
GRAPH = "{}, in a graph"
CAPTURED = {GRAPH.format(name): name for name in _KINDS}
"""Both passes as one CUDA graph: what the host takes is in none of their times."""

CONTENDERS = _KINDS | {name: _KINDS[of] for name, of in CAPTURED.items()}
COLUMNS = ("tokens", "layers", "ranks", "contender", "kind", *TIMES, "status")

LEAST_GAIN, FROM_TOKENS = 1.2, 8192
"""The figure asked for: so many times faster, of so many tokens or more."""


@dataclass(frozen=True)
class Case:
    """A forward and a backward pass of so many tokens of all ranks."""

    tokens: int
    layers: int
    ranks: int
    hidden: int = 8192

    @property
    def calls(self) -> int:
        return 1

    @property
    def sent_bytes(self) -> int:
        """Of a rank: rows are gathered or scattered eight times a layer, of 16 bits each."""
        return 8 * self.layers * 2 * self.hidden * self.tokens // self.ranks * (self.ranks - 1)


@dataclass
class Row(Contest):
    """Everything measured side by side for one number of tokens."""

    case: Case
    results: list[Result] = field(default_factory=list)

    def gain(self, of: Iterable[str] = CONTENDERS) -> float | None:
        """How much faster our best of these is than the best of the plain ones."""
        right = [one for one in self.results if one.kind == Kind.OURS and one.name in of and not one.is_wrong]
        ours = [one.timing.median for one in right if one.timing]
        peer = self.best(Kind.PEER)
        return peer.timing.median / min(ours) if ours and peer and peer.timing else None

    @property
    def is_missed(self) -> bool:
        gain = self.gain()
        return self.case.tokens >= FROM_TOKENS and (gain is None or gain < LEAST_GAIN)


def overview(rows: Iterable[Row]) -> tuple[list[str], list[list[str]]]:
    """One line a contender; `*` where the figure is missed."""
    lines = []
    for row in rows:
        for name in _KINDS:
            both = (name, GRAPH.format(name))
            gain = row.gain(both)
            times = [number(row.time_of(one), 0) for one in both]
            faster = "" if gain is None else "*" * row.is_missed + number(gain, 2)
            lines.append([str(row.case.tokens), name, *times, faster])
    return ["tokens", "contender", "us", "in a graph", "faster"], lines


def lines_of(rows: Iterable[Row]) -> list[list[object]]:
    """As COLUMNS: one a contender and row; an empty field was not measured."""
    found: list[list[object]] = []
    for row in rows:
        start = [row.case.tokens, row.case.layers, row.case.ranks]
        found += [[*start, one.name, one.kind, *one.told, one.status] for one in row.results]
    return found


def rows_of(lines: Iterable[Mapping[str, str]]) -> list[Row]:
    """The rows that `lines_of` told of, in their order."""
    found: dict[Case, Row] = {}
    for line in lines:
        case = Case(*(int(line[name]) for name in ("tokens", "layers", "ranks")))
        found.setdefault(case, Row(case)).results.append(Result.read(line))
    return list(found.values())
