"""What travels as float8, on real GPUs, beside the oracle. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_casts.py [--replays 60 --only exact]

exact   both collectives bit for bit as the oracle has them: three types, sums and averages, lengths that stretches fit
        and do not fit, what is not aligned, infinities and NaNs
graphs  one graph of two calls, replayed with other numbers

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
from commdsl import compiler
from commdsl.ir.interpret import run as oracle
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir

GRACE = 6.0


@dataclass(frozen=True)
class Case:
    schedule: str
    numel: int
    dtype: str = "bfloat16"
    op: str = "sum"
    shift: int = 0  # elements by which what is given is off a line of 16 bytes

    def __str__(self) -> str:
        return f"{self.schedule}, {self.numel} of {self.dtype}, {self.op}, off by {self.shift}"

    def drawn(self, run: Parts, seed: int) -> list[Any]:
        """Of all ranks, the same wherever they are drawn; of many magnitudes, and some that are no numbers."""
        found = []
        for rank in range(run.ranks):
            dice = np.random.default_rng((seed, rank))
            values = dice.standard_normal(self.numel) * np.exp(4 * dice.standard_normal(self.numel))
            if self.numel > 1000:
                values[dice.integers(0, self.numel, 3)] = np.inf, -np.inf, np.nan
            found.append(torch.from_numpy(values).to(getattr(torch, self.dtype)))
        return found

    def wanted(self, run: Parts, given: list[Any]) -> Any:
        of = BY_NAME[self.dtype]
        path = data_dir("schedules") / "compressed" / f"{self.schedule}.comm"
        schedule = compiler.check(path, ranks=run.ranks).schedule  # type: ignore[union-attr]
        bits = [one.view(torch.int16).numpy().view(np.uint16) if one.itemsize == 2 else one.numpy() for one in given]
        (found,) = oracle(schedule, {"x": [one.view(of.storage) for one in bits]}, of, self.op).outputs.values()
        return torch.from_numpy(of.to_float32(found[run.rank]))

    def called(self, given: Any) -> Any:
        if self.schedule == "allreduce_float8":
            return commdsl.all_reduce(given, self.op, wire="float8")
        return commdsl.all_gather(given, wire="float8")

    def wrong(self, run: Parts, seed: int) -> bool:
        drawn = self.drawn(run, seed)
        room = torch.empty(self.numel + self.shift, dtype=drawn[0].dtype, device=run.device)
        room[self.shift :] = drawn[run.rank].to(run.device)
        return self.differs(run, self.called(room[self.shift :]), drawn)

    def differs(self, run: Parts, found: Any, drawn: list[Any]) -> bool:
        wanted = self.wanted(run, drawn)
        found = found.float().cpu()
        is_number = ~wanted.isnan()
        right = run.same(str(self), found.isnan(), wanted.isnan()) & run.same(
            str(self), found.where(is_number, torch.zeros(())), wanted.where(is_number, torch.zeros(()))
        )
        return not bool(right)


CASES = (
    Case("allreduce_float8", 1 << 18), Case("allreduce_float8", 100_003), Case("allreduce_float8", 1),
    Case("allreduce_float8", 70_000, op="avg"), Case("allreduce_float8", 30_000, op="max", shift=3),
    Case("allreduce_float8", 50_001, "float32"), Case("allreduce_float8", 50_001, "float16", shift=1),
    Case("allgather_float8", 1 << 17), Case("allgather_float8", 33_333, "float32", shift=1),
    Case("allgather_float8", 129),
)  # fmt: skip


def exact(run: Parts) -> None:
    for case in CASES:
        run.attempt_in_time(Part("exact", str(case), 2), lambda case=case: sum(case.wrong(run, at) for at in range(2)))


def replayed(run: Parts, case: Case, replays: int) -> int:
    given = case.drawn(run, 0)[run.rank].to(run.device)
    found: list[Any] = []
    graph = captured(lambda: found.append(case.called(given)), 2, before=1)
    wrong = 0
    for seed in range(1, replays + 1):
        drawn = case.drawn(run, seed)
        given.copy_(drawn[run.rank])
        graph.replay()
        wrong += any(case.differs(run, one, drawn) for one in found[1:])
    graph.reset()
    return wrong


def graphs(run: Parts) -> None:
    if not run.on_gpu:
        return
    for case in (Case("allreduce_float8", 20_000), Case("allgather_float8", 20_000)):
        part = Part("graphs", str(case), run.options.replays)
        run.attempt_in_time(part, partial(replayed, run, case, run.options.replays))


PARTS = {"exact": exact, "graphs": graphs}


if __name__ == "__main__":
    runner.run_parts(Parts, PARTS, __doc__, calls=0, seconds=60.0, grace=GRACE)
