"""Raises an exception at every step of a call, between its entry and its end, and of `commdsl.load`.

A step is the entry of a function of commdsl; their number is measured. The first is the entry of the function that the
user calls: an exception there is raised before a line of it has run, so it is the caller's. From the second on every
other rank raises with the reason: in that call or, where it had all of its data, with the right result of it and in the
next one.

`commdsl.load` is no call of a group: an exception in it leaves the caller, and no peer hears of it. The case is judged
by what the rank does next. If it loads again and makes the call, as all other ranks do, which wait meanwhile, all have
the right result; if it makes another call, all ranks raise AgreementError; if its process ends, all others raise
PeerError (`load raises` of disagreement_processes.py). So a load that failed leaves nothing behind.

Assumes ranks that are threads. Does not draw anything.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from disagreement_cases import MENU, NAMES, SECONDS, Call, Case, InjectedError, Injection, Result, fault
from disagreements import patient, run, steps_of, warm
from thread_ranks import outcomes

import commdsl
from commdsl.runtime import groups

RING, ONESHOT, TWOSHOT = NAMES
CALLS: Mapping[str, tuple[tuple[Call, ...], Call]] = MappingProxyType(
    {
        "first call": ((), Call(RING)),
        "later call": ((Call(RING), Call(RING)), Call(RING)),
        "first call of a second op": ((Call(RING),), Call(ONESHOT)),
        "first call in place": ((), Call(MENU)),
        "later call in place": ((Call(MENU),), Call(MENU)),
        "later call with a Work": ((Call(RING),), Call(RING, is_async=True)),
    }
)
"""By its name a call, and those before it on a new group."""

TEXT = (Path(__file__).parents[1] / "schedules" / "collectives" / f"{RING}.comm").read_text(encoding="utf-8")
LATE = 0.02
"""Seconds that the rank which raises comes behind the others, in every second case."""


def series(ranks: int, most: int = 0) -> list[Result]:
    """Raise at every step of every call and of `load`; in `most` of each at most, where that is not 0."""
    with patient():
        warm(ranks)
        found: list[Result] = []
        for name, (before, call) in CALLS.items():
            steps_of(before, call, ranks)  # loads what the first one loads
            count = max(steps_of(before, call, ranks) for _ in range(3))
            for step in range(2, count + 1, _stride(count, most)):
                odd = step % ranks
                naps = tuple(LATE * (step // ranks % 2) * (rank == odd) for rank in range(ranks))
                result = run(Case("injected", ranks, before, ((call,),) * ranks, odd, naps, step, scene=name))
                found.append(result)
        return found + of_load(ranks, most)


def _stride(count: int, most: int) -> int:
    return 1 if most == 0 else max(1, -(-count // most))


def of_load(ranks: int, most: int = 0) -> list[Result]:
    """Raise at every step of `load` on one rank, while the others wait for it in a call."""
    counter = Injection(-1)
    for number in (1, 2):  # the first one imports and fills caches
        counter = Injection(-1)
        sys.setprofile(counter)
        try:
            commdsl.load(_new(number), ranks=ranks)
        finally:
            sys.setprofile(None)
    names, found = commdsl.threads(ranks), list[Result]()
    numbers = itertools.count()
    for step in range(1, counter.entered + 1, _stride(counter.entered, most)):
        odd, is_other = step % ranks, next(numbers) % 10 == 9
        result = _load(names, step, odd, is_other)
        found.append(result)
        if any(result.errors):
            for name in names:
                groups.release(name)
            names = commdsl.threads(ranks)
    return found


def _new(number: int) -> dict[str, str]:
    """Return the text of a ring that was not compiled yet, with the same kernel: no cache has any part of it."""
    return {f"{RING}.comm": TEXT.replace("(r - s) %", f"(r - s + 0 * {number}) %")}


def _load(names: tuple[str, ...], step: int, odd: int, is_other: bool) -> Result:
    """`is_other`: the rank whose load raises makes another call then."""
    ranks, at = len(names), [0.0] * len(names)
    call, raised = Call(RING), list[InjectedError]()
    strange = Call(TWOSHOT) if is_other else call
    calls = tuple((strange if rank == odd else call,) for rank in range(ranks))

    def load() -> object:
        return commdsl.load(_new(2 + step), ranks=ranks)

    def work(rank: int) -> None:
        try:
            if rank == odd:
                sys.setprofile(Injection(step))
                try:
                    load()
                except InjectedError as error:
                    raised.append(error)
                finally:
                    sys.setprofile(None)
                op = load()
                if not is_other:
                    x = torch.ones(call.size)
                    found = op(x, group=names[rank])  # type: ignore[operator]
                    assert torch.equal(found, ranks * x), f"a wrong result: {found}"
            if rank != odd or is_other:
                calls[rank][0](names[rank], ranks)
        finally:
            at[rank] = time.monotonic()

    errors = tuple(one if isinstance(one, BaseException) else None for one in outcomes(ranks, work, 3 * SECONDS))
    kind = "schedule" if is_other else "agree"
    case = Case(kind, ranks, (), calls, odd, (0.0,) * ranks, step, scene=f"load, then {kind}")
    return Result(case, errors, max(at) - min(at), fault(case, errors))
