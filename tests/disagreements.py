"""Runs drawn cases in which ranks of a group disagree, raise or end: every other rank has to raise soon, and say why.

`python tests/disagreements.py --count 2000 --ranks 3 --seed 0 --time-budget 3600` runs a series on threads,
`--processes` one on processes, whose ranks are killed and leave, too, and `--every-step` raises at every step of a
call. With COMMDSL_DEBUG=1 all ranks compare their calls. Each prints a line for each kind of case, and ends with 1
where a case was judged wrong, or late: on a machine that is busy, try a late one again.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from disagreement_cases import NAMES, SECONDS, Call, Case, Injection, Result, drawn, fault
from thread_ranks import outcomes

import commdsl
from commdsl.runtime import groups


def run(case: Case) -> Result:
    """Run a case on threads."""
    import torch

    names = commdsl.threads(case.ranks)
    at: list[float] = [0.0] * case.ranks
    torch.set_num_threads(1)

    def work(rank: int) -> None:
        for call in case.before:
            call(names[rank], case.ranks)
        time.sleep(case.naps[rank])
        try:
            if case.step and rank == case.odd:
                sys.setprofile(Injection(case.step))
            for call in case.calls[rank]:
                call(names[rank], case.ranks)
            sys.setprofile(None)
            call(names[rank], case.ranks)  # a rank that waits for nobody learns it in its next call
        finally:
            sys.setprofile(None)
            at[rank] = time.monotonic()

    found = outcomes(case.ranks, work, 3 * SECONDS)
    errors = tuple(one if isinstance(one, BaseException) else None for one in found)
    for name in names:
        groups.release(name)
    return Result(case, errors, max(at) - min(at), fault(case, errors))


def steps_of(before: tuple[Call, ...], call: Call, ranks: int) -> int:
    """Return how many functions of commdsl a call goes through on a rank of a new group, behind others."""
    names, counts = commdsl.threads(ranks), [0] * ranks

    def work(rank: int) -> None:
        for one in before:
            one(names[rank], ranks)
        counter = Injection(-1)
        sys.setprofile(counter)
        try:
            call(names[rank], ranks)
        finally:
            sys.setprofile(None)
            counts[rank] = counter.entered

    outcomes(ranks, work, SECONDS)
    return max(counts)


@contextmanager
def patient() -> Iterator[None]:
    """Has groups that are made meanwhile wait for SECONDS."""
    before, os.environ["COMMDSL_TIMEOUT"] = os.environ.get("COMMDSL_TIMEOUT"), str(SECONDS)
    try:
        yield
    finally:
        os.environ.pop("COMMDSL_TIMEOUT")
        if before is not None:
            os.environ["COMMDSL_TIMEOUT"] = before


def warm(ranks: int) -> int:
    """Build all kernels that cases need, and return how many steps a group's first call has."""
    import torch

    names = commdsl.threads(ranks)
    for name in NAMES:
        for call in (Call(name), Call(name, dtype=torch.int32), Call(name, op="max")):
            outcomes(ranks, lambda rank, call=call: call(names[rank], ranks))
    steps_of((), Call(NAMES[0]), ranks)
    return steps_of((), Call(NAMES[0]), ranks)


def series(count: int, ranks: int, seed: int, budget: float = float("inf")) -> list[Result]:
    """Run so many cases on threads, or as many as there is time for."""
    with patient():
        length, end = warm(ranks), time.monotonic() + budget
        found: list[Result] = []
        for number in range(count):
            if time.monotonic() > end:
                break
            found.append(run(drawn(random.Random(f"{seed}/{number}"), ranks, length)))
        return found


def main() -> int:
    import disagreement_processes
    import every_step

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--processes", action="store_true", help="ranks are processes, and some of them end")
    kinds.add_argument("--every-step", action="store_true", help="raise at every step of a call, and of `load`")
    asked = parser.parse_args()
    if asked.every_step:
        found = every_step.series(asked.ranks)
    elif asked.processes:
        found = disagreement_processes.series(asked.count, asked.ranks, asked.seed, asked.time_budget)
    else:
        found = series(asked.count, asked.ranks, asked.seed, asked.time_budget)
    spreads = defaultdict[str, list[float]](list)
    for number, one in enumerate(found):
        if asked.verbose or one.fault or one.is_late:
            print(f"{number} {one.line}")
        spreads[one.case.label].append(one.late)
    for kind, times in sorted(spreads.items()):
        print(f"{kind}: {len(times)} cases, longest {max(times):.3f} s")
    faults, late = sum(bool(one.fault) for one in found), sum(one.is_late for one in found)
    raised = sum(any(one.errors) for one in found)
    print(f"{len(found)} cases, {raised} in which a rank raised: {faults} judged wrong, {late} late")
    return int(faults + late > 0)


if __name__ == "__main__":
    sys.exit(main())
