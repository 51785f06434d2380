"""Turns calls into the CPU time of each: how long it holds the host, the GPU not waited for.

Assumes GPUs that are asked for no more between two barriers than their queues hold. Does not check results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

from benchmarks.measure import Bench
from benchmarks.report import Timing, number

ROUNDS = 50

Call = Callable[[], object]


def held(bench: Bench, calls: Mapping[str, tuple[Call, int]], what: str) -> tuple[list[list[object]], list[str]]:
    """Of each call, made so many times in a row, all of them taking turns.

    Returns lines (call, median, p10, p90 of rank 0, median of the slowest rank) in microseconds, and the same to be
    read; `what`: of which calls they are.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, (call, count) in calls.items():
            bench.barrier()
            begin = time.perf_counter()
            for _ in range(count):
                call()
            times[name].append(1e6 * (time.perf_counter() - begin) / count)
    bench.barrier()
    slowest = {name: max(bench.everyone(median(found))) for name, found in times.items()}
    here = {name: Timing.of(found) for name, found in times.items()}
    lines: list[list[object]] = [
        [name, *(f"{value:.4g}" for value in (found.median, found.low, found.high, slowest[name]))]
        for name, found in here.items()
    ]
    notes = [f"host microseconds of an eager call of {what}: median on the slowest rank, then rank 0"]
    return lines, notes + [f"{number(slowest[name], 2):>8}  {found!s:>22}  {name}" for name, found in here.items()]
