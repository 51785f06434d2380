"""Collectives on blocks of unequal length, on real GPUs, beside torch. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_uneven.py [--replays 60 --only exact]

exact     every schedule in every protocol it has, of random lengths, none and all on one rank among them, of elements
          of 1 to 8 bytes, off a line of 16 bytes, and longer than a round
graphs    one graph of two calls of each, replayed with other numbers
unlike    a rank that expects what its peer does not send says so, and the group works again after a reset

Exit code 1: a wrong result, an exception, or a part that did not end in time. `--device cpu` runs all but graphs on
host ranks.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")

import numpy as np
import runner
import torch
from runner import Part, Parts

import commdsl
from benchmarks.measure import captured
from commdsl.runtime.errors import OpError

GRACE = 6.0
WAYS = {
    "allgather": ("bulk", "packet", "line", "tma"),
    "reducescatter": ("bulk", "packet", "line", "tma"),
    "alltoall": ("bulk", "tma"),
}
SIZES = (5, 3000, 300_000)
"""Rows of a block, at most."""


@dataclass(frozen=True)
class Case:
    name: str
    protocol: str
    most: int
    dtype: str = "bfloat16"
    shift: int = 0  # rows by which what is given is off a line of 16 bytes, where rows are not such lines

    def __str__(self) -> str:
        return f"{self.name} by {self.protocol}, up to {self.most} of {self.dtype}"

    def table(self, run: Parts, seed: int) -> list[list[int]]:
        """A row for each rank of what it sends to whom; the same rows, where all know all."""
        dice = np.random.default_rng((seed, self.most))
        found = dice.integers(0, self.most + 1, (run.ranks, run.ranks)) * (dice.random((run.ranks, run.ranks)) < 0.7)
        if seed % 4 == 3:
            found[:] = 0
            found[:, seed % run.ranks] = self.most
        return (found if self.name == "alltoall" else np.tile(found[0], (run.ranks, 1))).tolist()

    def lengths(self, run: Parts, table: list[list[int]]) -> list[int]:
        """What this rank is told."""
        came = [row[run.rank] for row in table] if self.name == "alltoall" else []
        return [*table[run.rank], *came]

    def drawn(self, run: Parts, table: list[list[int]], seed: int) -> list[Any]:
        """Of all ranks, on the processor: whole numbers so small that sums are exact."""
        found = []
        for rank, row in enumerate(table):
            dice = np.random.default_rng((seed, rank))
            rows = row[rank] if self.name == "allgather" else sum(row)
            found.append(torch.from_numpy(dice.integers(-4, 5, rows)).to(getattr(torch, self.dtype)))
        return found

    def wanted(self, run: Parts, table: list[list[int]], drawn: list[Any]) -> Any:
        if self.name == "allgather":
            return torch.cat(drawn)
        parts = [one.split(row)[run.rank] for one, row in zip(drawn, table, strict=True)]
        return torch.cat(parts) if self.name == "alltoall" else torch.stack(parts).sum(0).to(parts[0].dtype)

    def given(self, run: Parts, values: Any) -> Any:
        room = torch.empty(len(values) + self.shift, dtype=values.dtype, device=run.device)
        room[self.shift :] = values.to(run.device)
        return room[self.shift :]

    def op(self, run: Parts) -> Any:
        small = {"tile": 7680, "lanes": 8} if self.most == SIZES[1] else {}  # so that there are many rounds
        return commdsl.load(f"{self.name}_uneven", ranks=run.ranks, tune={"protocol": self.protocol, **small})

    def wrong(self, run: Parts, seed: int) -> bool:
        table = self.table(run, seed)
        drawn = self.drawn(run, table, seed)
        found = self.op(run)(self.given(run, drawn[run.rank]), lengths=self.lengths(run, table))
        return not run.same(str(self), found.cpu(), self.wanted(run, table, drawn))


def cases(most: int) -> list[Case]:
    found = [Case(name, way, most) for name, ways in WAYS.items() for way in ways]
    more = [Case(name, "bulk", most, dtype, 1) for name in WAYS for dtype in ("int8", "float32", "int64")]
    return found + (more if most == SIZES[1] else [])


def exact(run: Parts) -> None:
    for case in (one for most in SIZES for one in cases(most)):
        run.attempt_in_time(Part("exact", str(case), 4), lambda case=case: sum(case.wrong(run, at) for at in range(4)))


def replayed(run: Parts, case: Case, replays: int) -> int:
    table = case.table(run, 0)
    given = case.given(run, case.drawn(run, table, 0)[run.rank])
    op, lengths, found = case.op(run), case.lengths(run, table), list[Any]()
    graph = captured(lambda: found.append(op(given, lengths=lengths)), 2, before=1)
    wrong = 0
    for seed in range(1, replays + 1):
        drawn = case.drawn(run, table, seed)
        given.copy_(drawn[run.rank])
        graph.replay()
        wanted = case.wanted(run, table, drawn)
        wrong += any(not run.same(str(case), one.cpu(), wanted) for one in found[1:])
    graph.reset()
    return wrong


def graphs(run: Parts) -> None:
    if not run.on_gpu:
        return
    for case in (Case(name, way, SIZES[1]) for name, ways in WAYS.items() for way in ways[:2]):
        part = Part("graphs", str(case), run.options.replays)
        run.attempt_in_time(part, partial(replayed, run, case, run.options.replays))


def expecting(run: Parts) -> int:
    """Rank 1 expects three rows of rank 0, which sends two."""
    sent = [[4, 2] + [0] * (run.ranks - 2), *([0] * run.ranks for _ in range(run.ranks - 1))]
    came = [row[run.rank] for row in sent]
    if run.rank == 1:
        came[0] = 3
    x, missed = torch.ones(sum(sent[run.rank]), device=run.device), 0
    try:
        commdsl.all_to_all(x, came, sent[run.rank])
        commdsl.load("alltoall_uneven", ranks=run.ranks).synchronize()
    except OpError as error:
        missed = int(run.rank == 1 and "sends 8 bytes to rank 1, which expects 12" not in str(error))
    else:
        missed = int(run.rank == 1)
    commdsl.reset()
    return missed + Case("alltoall", "bulk", 50).wrong(run, 1)


def unlike(run: Parts) -> None:
    run.attempt_in_time(Part("unlike", "one length of two ranks", 2), lambda: expecting(run))


PARTS = {"exact": exact, "graphs": graphs, "unlike": unlike}


if __name__ == "__main__":
    runner.run_parts(Parts, PARTS, __doc__, calls=0, seconds=60.0, grace=GRACE)
