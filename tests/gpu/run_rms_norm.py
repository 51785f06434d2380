"""Sums over ranks that are normed row by row, on real GPUs. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_rms_norm.py [--calls 300 --replays 100 --seed 1 --only storm]

exact   sums of whole numbers bit for bit, norms beside float64, the same bits on all ranks: of rows that vectors fit
        and do not fit, longer than a lane keeps, more than there are lanes, in three types
graphs  graphs of two calls, replayed with other numbers
storm   calls of random shapes in random order, eagerly and replayed, GPU and host delays, no barrier in between

Exit code 1: a wrong result, an exception, or a part that did not end in time. `--device cpu` runs all but graphs on
host ranks.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")

import repeated
import runner
import torch
from repeated import Repeated, replayed
from runner import Part, Parts

from commdsl.overlap import all_reduce_rms_norm

EPS = 1e-5
CALLS = 4
GRACE = 15.0


@dataclass(frozen=True)
class Shape:
    rows: int
    columns: int
    dtype: Any = torch.bfloat16

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns} of {str(self.dtype).removeprefix('torch.')}"

    def drawn(self, run: Parts, seed: int) -> tuple[list[Any], Any, Any]:
        """Of all ranks, the same wherever they are drawn: whole numbers, whose sums every type has."""
        dice = torch.Generator(run.device).manual_seed(seed)
        draw = partial(torch.randint, -3, 4, generator=dice, device=run.device)
        x = [draw((self.rows, self.columns)).to(self.dtype) for _ in range(run.ranks)]
        return x, draw((self.rows, self.columns)).to(self.dtype), draw((self.columns,)).to(self.dtype)

    def wrong(self, run: Parts, found: tuple[Any, Any], seed: int) -> Any:
        """On the device: whether a result is wrong."""
        (z, y), (x, residual, weight) = found, self.drawn(run, seed)
        wanted = sum(one.double() for one in x) + residual.double()
        normed = wanted / (wanted.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
        near = 2 * torch.finfo(self.dtype).eps * normed.abs() + 1e-5
        return ~run.same(f"y of {self}", y, wanted) | ~run.same(f"z of {self}", z, normed, near)


SHAPES = (
    Shape(1, 8192), Shape(16, 8192), Shape(128, 8192), Shape(7, 5120), Shape(130, 1024), Shape(3, 33), Shape(2, 40_000),
    Shape(5, 7168, torch.float16), Shape(9, 100, torch.float32), Shape(2, 16_384, torch.float32),
)  # fmt: skip


class Norms(Repeated):
    """Calls of one shape."""

    def __init__(self, run: Parts, shape: Shape) -> None:
        super().__init__(run)
        self.shape = shape
        x, residual, weight = shape.drawn(run, 0)
        self.given = x[run.rank].clone(), residual, weight

    def made(self) -> tuple[Any, Any]:
        return all_reduce_rms_norm(*self.given, EPS)

    def is_wrong(self, seed: int, found: tuple[Any, Any]) -> Any:
        return self.shape.wrong(self.run, found, seed)

    def fill(self, seed: int) -> None:
        x, residual, weight = self.shape.drawn(self.run, seed)
        for to, values in zip(self.given, (x[self.run.rank], residual, weight), strict=True):
            to.copy_(values)


def each(name: str, calls: int, work: Callable[[Parts, Shape, int], int], run: Parts) -> None:
    for shape in SHAPES:
        run.attempt_in_time(Part(name, str(shape), calls), partial(work, run, shape, calls))


def called(run: Parts, shape: Shape, calls: int) -> int:
    made = Norms(run, shape)
    for seed in range(calls):
        made.call(seed)
    bits = torch.stack([one.double().nan_to_num().sum() for one in made.made()]).tolist()
    return int(made.wrong) + sum(one != bits for one in run.everyone(bits))


def graphs(run: Parts) -> None:
    if run.on_gpu:
        each("graphs", run.options.replays, lambda run, shape, times: replayed(Norms(run, shape), times), run)


def storm(run: Parts) -> None:
    dice = random.Random(run.options.seed)
    shapes = [Shape(dice.randrange(1, 200), dice.randrange(1, 9000)) for _ in range(6)]
    repeated.storm(run, dice, [partial(Norms, run, shape) for shape in shapes])


PARTS = {"exact": partial(each, "exact", CALLS, called), "graphs": graphs, "storm": storm}


if __name__ == "__main__":
    runner.run_parts(Parts, PARTS, __doc__, calls=300, seconds=60.0, grace=GRACE)
