"""Dispatches by keys whose rows travel once per node, there and back, between two halves of one machine, bit for bit.
One process per GPU, an even number of them:

    torchrun --nproc-per-node 4 tests/gpu/run_keys_nodes.py [--calls 300 --seed 1 --only storm] [--transport mixed]

exact     keys of every kind x rows of 2 bytes to 14 KB x float16, bfloat16, float32 x aligned or not, by kernels that
          check: rows, values and origins there; sums back, rounded by rank, by node and at home; numbers back
storm     calls of all kinds, GPU and host delays, no barrier in between, kernels that check
times     there and back in a graph, in microseconds, beside once per rank; no part of the verdict

Kernels that check count the bytes that cross to each rank of the other half where they are sent, and report any that
are not one row for each token that has something there: then a call is wrong. `--transport mixed` has the halves far
from each other, so that what crosses does by NVSHMEM. `--device cpu` runs all but times on host ranks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import run_keys
import runner
import torch
from run_keys import DTYPES, KINDS, WIDTHS, Shape, drawn
from run_keys_once import Judge, made_of, run_time
from runner import Part

from benchmarks.experts_calls import two_nodes


def exact(run: run_keys.Run) -> None:
    for width, scale in WIDTHS if run.on_gpu else WIDTHS[1:3]:
        dtypes = [dtype for dtype in DTYPES if width % dtype.itemsize == 0]
        part = Part("exact", f"rows of {width} and {scale} B", len(dtypes) * len(KINDS))

        def work(width: int = width, scale: int = scale, dtypes: list[Any] = dtypes) -> int:
            wrong = 0
            for at, dtype in enumerate(dtypes):
                shape = Shape(dtype, width // dtype.itemsize, scale, 200, (1, 8, 32)[at], 8 * run.ranks)
                aligned = (1, 128, 16)[at]
                experts = made_of(run, shape, aligned, check=True, **two_nodes(run.ranks))
                judge = Judge(run, shape, aligned, run.ranks // 2)
                for number, kind in enumerate(KINDS):
                    judge.call(experts, drawn(kind, shape, run.ranks, 1000 * at + number, run.device))
                experts.synchronize()
                wrong += judge.count
                experts.release()
            return wrong

        run.attempt(part, work)


def storm(run: run_keys.Run) -> None:
    shape = Shape(torch.bfloat16, 512, 16, 300, 4, 16 * run.ranks)

    def made() -> tuple[Any, Judge]:
        return made_of(run, shape, 8, check=True, **two_nodes(run.ranks)), Judge(run, shape, 8, run.ranks // 2)

    run_keys.stormed(run, shape, made)


def times(run: run_keys.Run) -> None:
    if not run.on_gpu:
        return
    for rows, columns in ((128, 7168), (4096, 7168)):
        shape = Shape(torch.bfloat16, columns, 16, rows, 8, 32 * run.ranks)
        case = drawn("any", shape, run.ranks, 1, run.device, [rows] * run.ranks)
        for name, options in (("per node", two_nodes(run.ranks)), ("per rank", {})):
            part = Part("times", f"once {name}, {rows} rows of {2 * columns} B, 8 keys", 30)

            def work(part: Part = part, shape: Shape = shape, case: Any = case, options: Any = options) -> int:
                experts, rank = made_of(run, shape, 128, **options), run.rank
                given = (case.x[rank], case.scale[rank]), case.keys[rank], case.weights[rank]
                there = experts.dispatch(*given)
                part.what += f"; there {run_time(run, lambda: experts.dispatch(*given)):.0f} us"
                home = run_time(run, lambda: experts.combine(there.rows[0], there.handle))
                part.what += f"; back {home:.0f} us"
                experts.release()
                return 0

            run.attempt(part, work)


PARTS = {"exact": exact, "storm": storm, "times": times}


def options_of() -> argparse.Namespace:
    parser = runner.part_parser_of(__doc__, 300, 85.0, list(PARTS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser.parse_args()


def main() -> None:
    options = options_of()
    runner.end_of_parts(run_keys.Run, options, PARTS, run_keys.GRACE, on_gpu=options.device == "cuda")


if __name__ == "__main__":
    main()
