"""Turns new batches of documents into what their routes cost the host: a plan, its proof, and tables.

Assumes no GPU; where there is one, tables are copied to it. No batch was planned before. `plan` is from lengths to a
Route whose plan is proved, `tables` from there to all of attention forward and backward: queries, keys and values there
and back, and queries by themselves. Medians of the milliseconds of one rank, in one process; `*` marks more than 3 for
8 ranks. Does not time a batch that is known: its Route is looked up.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch

from benchmarks import record
from benchmarks.cases import parse_size
from benchmarks.documents import DIM, HEADS, KEY_HEADS, MEDIAN, SHORTEST, SIGMA
from benchmarks.report import grid
from commdsl.dispatch.planning import Lengths, new_route
from commdsl.dispatch.route import Form, Route, Way
from commdsl.ir.routes import Mask, Sharing

WHOLE = 64 << 10
"""Tokens of a rank for which lengths are as documents.py draws them: of fewer they are as much shorter."""

WIDTHS = tuple(2 * heads * DIM for heads in (HEADS, KEY_HEADS, KEY_HEADS))
"""Bytes of a row, in 16 bits."""

TILE_BYTES = 8192  # as the Plan of the shipped `qkv` has it
UNTIMED = 20
MOST_MS = 3.0
COLUMNS = ("ranks", "tokens", "plan_ms", "tables_ms", "all_ms", "p90_ms")


class Row(NamedTuple):
    """What new routes took: of so many ranks, and tokens a rank."""

    ranks: int
    tokens: int
    plan_ms: float
    tables_ms: float
    all_ms: float
    p90_ms: float

    @property
    def is_missed(self) -> bool:
        return self.ranks <= 8 and self.all_ms > MOST_MS


class NoLimits:
    """Admits any Route."""

    def admit(self, route: Route, wanted: Form, waiting: tuple[int, ...]) -> None:
        return None


def batches(ranks: int, tokens: int, seed: int) -> Iterator[Lengths]:
    """Documents of each rank, the last of which is cut where its tokens end."""
    dice = np.random.default_rng(seed)
    middle = np.log(MEDIAN * min(tokens, WHOLE) / WHOLE)
    while True:
        every = []
        for _ in range(ranks):
            drawn = np.maximum(dice.lognormal(middle, SIGMA, tokens // SHORTEST + 1).astype(np.int64), SHORTEST)
            ends = np.minimum(drawn.cumsum(), tokens)
            documents = np.diff(ends, prepend=0)
            every.append(tuple(documents[documents > 0].tolist()))
        yield tuple(every)


def timed(batch: Lengths, device: torch.device) -> tuple[float, float]:
    """Milliseconds of the plan, and of the tables."""
    rank, nodes = len(batch) // 2, (0,) * len(batch)
    begin = time.perf_counter()
    route = new_route(batch, rank, Mask.CAUSAL, Sharing.RANK, device, nodes)
    planned = time.perf_counter()
    for way in (Way.ALL, Way.QUERIES_BACK, Way.QUERIES, Way.ALL_BACK):
        route.table(Form(way, WIDTHS if way.has_keys else WIDTHS[:1], False, TILE_BYTES), NoLimits())
    return 1e3 * (planned - begin), 1e3 * (time.perf_counter() - planned)


def measured(ranks: int, tokens: int, options: argparse.Namespace, device: torch.device) -> Row:
    drawn = batches(ranks, tokens, options.seed)
    took = [timed(next(drawn), device) for _ in range(UNTIMED + options.batches)][UNTIMED:]
    plan, tables = (median(column) for column in zip(*took, strict=True))
    both = [sum(one) for one in took]
    return Row(ranks, tokens, plan, tables, median(both), quantiles(both, n=10)[-1] if len(both) > 1 else both[0])


def line_of(row: Row) -> list[str]:
    times = [f"{one:.2f}" for one in row[2:]]
    return [str(row.ranks), str(row.tokens), *times[:2], "*" * row.is_missed + times[2], times[3]]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"type": lambda text: [parse_size(part) for part in text.split(",")]}
    parser.add_argument("--ranks", default=[8, 64], **sizes)
    parser.add_argument("--tokens", default=[8 << 10, 64 << 10], help="of a rank, such as 8K,64K", **sizes)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    record.add_options(parser)
    options = parser.parse_args(arguments)
    record.check_options(parser, options)
    device = torch.device(options.device)
    rows = [measured(ranks, tokens, options, device) for ranks in options.ranks for tokens in options.tokens]
    print(grid(["ranks", "tokens a rank", "plan", "tables", "both", "p90"], [line_of(row) for row in rows]))
    if options.save:
        record.save_lines(options, COLUMNS, [[*row[:2], *(f"{one:.3f}" for one in row[2:])] for row in rows])
    return int(any(row.is_missed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
