"""Dispatches by keys whose rows travel in float8, on real GPUs beside torch's casts, bit for bit. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_keys_float8.py [--calls 300 --seed 1 --only storm] [--transport nvshmem]

exact     keys of every kind x rows of 2 to 7,168 elements x float16, bfloat16, float32 x stretches of 16 to 512,
          aligned or not: rows, scales and values there; magnitudes of every kind, infinities and NaNs among them
storm     calls of all kinds, GPU and host delays, no barrier in between, kernels that check
times     the call there in a graph, in float8 and as it is, in microseconds; no part of the verdict

Each rank computes by itself what it must hold. Exit code 1: a wrong result, an exception, or a part that did not end in
time. `--device cpu` runs all but times on host ranks.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run_keys
import run_keys_once
import runner
import torch
from run_keys import DTYPES, KINDS, Case, Shape, arriving, drawn, held
from runner import Part

from commdsl import ep

COLUMNS = (2, 130, 500, 2048, 7168)
STRETCHES = (16, 32, 64, 128, 512)
LARGEST = 448.0
LEAST = 2.0**-126
NAN = 0x7F


def quantised(rows: Any, stretch: int) -> tuple[Any, Any]:
    """Bits of float8, and scales, by torch's own division and cast."""
    wide, columns = rows.float(), rows.shape[1]
    padded = torch.nn.functional.pad(wide, (0, -columns % stretch)).unflatten(1, (-(-columns // stretch), stretch))
    finite = padded.isfinite()
    kept = torch.where(finite, padded, 0)
    largest = kept.abs().amax(2)
    # By a tensor: torch multiplies with the reciprocal of a number on GPUs, which rounds twice.
    scales = torch.where(largest == 0, 1, (largest / torch.full_like(largest, LARGEST)).clamp(min=LEAST))
    cast = (kept / scales[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = torch.where(finite, cast, NAN).flatten(1)[:, :columns]
    return codes.contiguous(), scales


def troubled(case: Case, seed: int) -> Case:
    """Magnitudes of every kind, and some values that are no numbers."""
    dice = torch.Generator().manual_seed(seed)
    x = []
    for one in case.x:
        scale = 10.0 ** torch.randint(-5, 4, (len(one), 1), generator=dice).to(one.device)
        rows = (one.float() * scale).to(one.dtype)
        odd = torch.rand(rows.shape, generator=dice).to(one.device)
        rows[odd < 0.02], rows[odd > 0.99] = 0, float("inf")
        rows[(odd > 0.97) & (odd < 0.975)] = float("nan")
        x.append(rows)
    return Case(case.keys, x, case.scale, case.weights)


class Judge(run_keys.Judge):
    """Of what arrives in float8."""

    def __init__(self, run: run_keys.Run, shape: Shape, aligned: int, stretch: int) -> None:
        super().__init__(run, shape)
        self.aligned, self.stretch = aligned, stretch

    def call(self, experts: Any, case: Case) -> None:
        rank = self.run.rank
        there = experts.dispatch(case.x[rank], case.keys[rank], case.weights[rank])
        self.wrong += ~self.is_right(case, there)

    def is_right(self, case: Case, there: Any) -> Any:
        rank, shape = self.run.rank, self.shape
        source, entry, counts = arriving(case, rank, shape.num_keys)
        ends = (counts.sum(1) + self.aligned - 1).div(self.aligned, rounding_mode="floor").cumsum(0) * self.aligned
        same, kind = self.run.same, str(shape.dtype).removeprefix("torch.")
        right = same("counts", there.counts, counts) & same("offsets", there.offsets, ends.int())
        total, a_row = int(ends[-1]), case.keys[rank].shape[1]
        at = there.handle.origins[:total] != run_keys_once.NONE
        rows, scales = there.rows[0].view(torch.uint8)[:total], there.rows[1][:total]
        law = zip(*(quantised(one, self.stretch) for one in case.x), strict=True)
        codes_due, scales_due = (held(part, source, entry, a_row) for part in law)
        values = held(case.x, source, entry, a_row)
        by = scales_due.repeat_interleave(self.stretch, 1)[:, : shape.columns]
        right &= same(f"scales of {kind}", scales[at], scales_due)
        right &= same(f"float8 of {kind}", rows[at], codes_due, value=values, scale=by)
        right &= same("padding of float8", rows[~at], 0) & same("padding of scales", scales[~at], 0)
        weights = [weight.flatten() for weight in case.weights]
        return right & same("values", there.values[:total][at], held(weights, source, entry, 1))


def made_of(run: run_keys.Run, shape: Shape, aligned: int, stretch: int, **options: Any) -> Any:
    received = run.ranks * shape.rows * shape.keys + shape.num_keys // run.ranks * (aligned - 1)
    limits = ep.Limits(shape.rows, shape.keys, received, (shape.columns,), 4 * shape.columns)
    params = {"E": shape.num_keys, "A": aligned, "B": stretch}
    return ep.Experts(limits, device=run.device, source="experts_float8", params=params, **options)


def exact(run: run_keys.Run) -> None:
    for number, columns in enumerate(COLUMNS if run.on_gpu else COLUMNS[:3]):
        stretch = STRETCHES[number]
        part = Part("exact", f"rows of {columns} elements, a scale for {stretch}", len(DTYPES) * len(KINDS))

        def work(columns: int = columns, stretch: int = stretch) -> int:
            wrong = 0
            for at, dtype in enumerate(DTYPES):
                shape = Shape(dtype, columns, 2, 200, (1, 8, 32)[at], 8 * run.ranks)
                aligned = (1, 128, 16)[at]
                experts, judge = made_of(run, shape, aligned, stretch), Judge(run, shape, aligned, stretch)
                for seed, kind in enumerate(KINDS):
                    case = drawn(kind, shape, run.ranks, 1000 * at + seed, run.device)
                    judge.call(experts, troubled(case, seed))
                wrong += judge.count
                experts.release()
            return wrong

        run.attempt(part, work)


def storm(run: run_keys.Run) -> None:
    shape = Shape(torch.bfloat16, 512, 2, 300, 4, 16 * run.ranks)
    run_keys.stormed(run, shape, lambda: (made_of(run, shape, 8, 128, check=True), Judge(run, shape, 8, 128)))


def times(run: run_keys.Run) -> None:
    if not run.on_gpu:
        return
    for rows in (128, 4096):
        shape = Shape(torch.bfloat16, 7168, 2, rows, 8, 32 * run.ranks)
        part = Part("times", f"{rows} rows of {shape.columns} bfloat16, 8 keys", 30)

        def work(part: Part = part, shape: Shape = shape, rows: int = rows) -> int:
            rank, case = run.rank, drawn("any", shape, run.ranks, 1, run.device, [rows] * run.ranks)
            x, scale, keys, weights = (part[rank] for part in (case.x, case.scale, case.keys, case.weights))
            cast, plain = made_of(run, shape, 128, 128), run_keys_once.made_of(run, shape, 128)
            in_float8 = run_keys_once.run_time(run, lambda: cast.dispatch(x, keys, weights))
            as_it_is = run_keys_once.run_time(run, lambda: plain.dispatch((x, scale), keys, weights))
            part.what += f"; float8 {in_float8:.0f} us, as it is {as_it_is:.0f} us"
            cast.release()
            plain.release()
            return 0

        run.attempt(part, work)


PARTS = {"exact": exact, "storm": storm, "times": times}


if __name__ == "__main__":
    runner.run_parts(run_keys.Run, PARTS, __doc__, calls=300, seconds=85.0, grace=run_keys.GRACE)
