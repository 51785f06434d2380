"""Draws disagreements of a group's ranks, and errors at any step of a call: every rank has to raise soon, and say why.

Ranks are threads. `python tests/disagreements.py --count 2000 --ranks 3 --seed 0 --time-budget 3600` runs a series and
prints a line for each kind of case; it ends with 1 where a case ended by a time-out, or late. Does not kill processes:
test_failures.py and test_trouble.py do.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any

import torch
from thread_ranks import outcomes

import commdsl
from commdsl.runtime import groups
from commdsl.runtime.errors import AgreementError, BrokenGroupError, OpError, PeerError

SECONDS = 30.0
"""The time-out, which no case may come to."""

SOON = 0.5
"""So long after the first rank that raises the others may raise."""

PACKAGE = os.path.dirname(commdsl.__file__)
KINDS = ("size", "dtype", "reduction", "schedule", "order", "first", "refused", "injected", "agree")
NAMES = ("allreduce_ring", "allreduce_oneshot", "allreduce_twoshot")


@cache
def loaded(name: str, ranks: int) -> Any:
    """The op, in which nothing is injected before it is called."""
    return commdsl.load(name, ranks=ranks)


class InjectedError(Exception):
    """An error that is injected into a step of a call."""


@dataclass(frozen=True)
class Call:
    """One call of a rank."""

    name: str
    size: int = 24
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    is_async: bool = False

    def __call__(self, group: str, ranks: int) -> Any:
        x = torch.ones(self.size, dtype=self.dtype)
        found: Any = loaded(self.name, ranks)(x, group=group, op=self.op, async_op=self.is_async)
        return found.wait() if self.is_async else found


@dataclass
class Case:
    """A drawn case: what every rank calls before and then, and where rank `odd` is made to raise."""

    kind: str
    ranks: int
    before: list[Call]
    calls: list[list[Call]]
    odd: int
    inject: float = -1.0  # which part of the functions that a call goes through has passed then
    naps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Result:
    """How a case ended: what each rank raised, and the seconds between the first and the last."""

    case: Case
    errors: tuple[BaseException | None, ...]
    spread: float
    fault: str

    @property
    def is_late(self) -> bool:
        """True if the last rank raised more than `SOON` after the first, besides the time that ranks slept."""
        return self.case.kind != "agree" and self.spread > SOON + max(self.case.naps)


def drawn(dice: random.Random, ranks: int) -> Case:
    """Return a case of any kind."""
    kind, odd = dice.choice(KINDS), dice.randrange(ranks)
    is_async = dice.random() < 0.3
    before = [Call(dice.choice(NAMES[:2])) for _ in range(dice.randrange(3))]
    name, other = dice.sample(NAMES, 2)
    usual = [Call(name, is_async=is_async)]
    match kind:
        case "size":
            strange = [Call(name, 48, is_async=is_async)]
        case "dtype":
            strange = [Call(name, dtype=torch.int32, is_async=is_async)]
        case "reduction":
            strange = [Call(name, op="max", is_async=is_async)]
        case "schedule":
            strange = [Call(other, is_async=is_async)]
        case "order":
            usual = [Call(name, is_async=is_async), Call(other)]
            strange = [Call(other, is_async=is_async), Call(name)]
        case "first":  # of a group whose other ranks have set the op up: a set-up where they call
            before, strange = [*before, Call(name)], [Call(other, is_async=is_async)]
        case "refused":
            strange = [Call(name, dtype=torch.complex64, is_async=is_async)]
        case _:
            strange = usual
    calls = [strange if rank == odd else usual for rank in range(ranks)]
    naps = [dice.choice((0.0, 0.0, 0.02, 0.3)) for _ in range(ranks)]
    return Case(kind, ranks, before, calls, odd, dice.random() if kind == "injected" else -1.0, naps)


class _Injection:
    """Raises once, when the thread that starts it has entered so many functions of commdsl."""

    def __init__(self, at: int) -> None:
        self.entered = 0
        self._at = at

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            self.entered += 1
            if self.entered == self._at:
                sys.setprofile(None)
                raise InjectedError(f"in {frame.f_code.co_qualname}")


def run(case: Case, length: int) -> Result:
    """Run a case. `length`: how many functions a call goes through."""
    names = commdsl.threads(case.ranks)
    at: list[float] = [0.0] * case.ranks

    def work(rank: int) -> None:
        for call in case.before:
            call(names[rank], case.ranks)
        time.sleep(case.naps[rank])
        try:
            if case.kind == "injected" and rank == case.odd:
                sys.setprofile(_Injection(1 + int(case.inject * length)))
            for call in case.calls[rank]:
                call(names[rank], case.ranks)
            sys.setprofile(None)
            if case.kind not in ("agree", "injected"):
                call(names[rank], case.ranks)  # a rank that waits for nobody learns it in its next call
        finally:
            sys.setprofile(None)
            at[rank] = time.monotonic()

    found = outcomes(case.ranks, work, 3 * SECONDS)
    errors = tuple(one if isinstance(one, BaseException) else None for one in found)
    spread = max(at) - max(min(at), *([0.0]))
    fault = _fault(case, errors)
    for name in names:
        groups.release(name)
    return Result(case, errors, spread, fault)


def _fault(case: Case, errors: Sequence[BaseException | None]) -> str:
    """Return what is wrong with the end of a case, empty if nothing is."""
    if case.kind == "agree" or (case.kind == "injected" and not any(errors)):
        return "" if not any(errors) else "ranks that agree raised"
    if any(isinstance(one, commdsl.CommTimeout | commdsl.RendezvousError) for one in errors):
        return "a time-out"
    if any(one is None for one in errors):
        return "a rank did not raise"
    if case.kind == "injected":
        others = [one for rank, one in enumerate(errors) if rank != case.odd]
        if not all(isinstance(one, OpError) and "in " in str(one) for one in others):
            return "the reason is not said"
    elif case.kind == "refused":
        others = [one for rank, one in enumerate(errors) if rank != case.odd]
        if not all(isinstance(one, PeerError) and "complex64" in str(one) for one in others):
            return "the reason is not said"
    elif not all(isinstance(one, AgreementError | PeerError | BrokenGroupError) for one in errors):
        return "another error"
    return ""


def length_of_a_call(ranks: int) -> int:
    """How many functions of commdsl the first call of a group goes through on a rank."""
    names, counts = commdsl.threads(ranks), [0] * ranks

    def work(rank: int) -> None:
        counter = _Injection(-1)
        sys.setprofile(counter)
        try:
            Call(NAMES[0])(names[rank], ranks)
        finally:
            sys.setprofile(None)
            counts[rank] = counter.entered

    outcomes(ranks, work, SECONDS)
    return min(counts)


def series(count: int, ranks: int, seed: int, budget: float = float("inf")) -> list[Result]:
    """Run so many cases, or as many as there is time for."""
    before, os.environ["COMMDSL_TIMEOUT"] = os.environ.get("COMMDSL_TIMEOUT"), str(SECONDS)
    try:
        warm = commdsl.threads(ranks)
        for name in NAMES:
            for call in (Call(name), Call(name, dtype=torch.int32), Call(name, op="max")):
                outcomes(ranks, lambda rank, call=call: call(warm[rank], ranks))
        length_of_a_call(ranks)
        length, end = length_of_a_call(ranks), time.monotonic() + budget
        found: list[Result] = []
        for number in range(count):
            if time.monotonic() > end:
                break
            found.append(run(drawn(random.Random(f"{seed}/{number}"), ranks), length))
        return found
    finally:
        os.environ.pop("COMMDSL_TIMEOUT")
        if before is not None:
            os.environ["COMMDSL_TIMEOUT"] = before


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--time-budget", type=float, default=3600.0, help="seconds")
    parser.add_argument("--verbose", action="store_true", help="a line for each case")
    asked = parser.parse_args()
    found = series(asked.count, asked.ranks, asked.seed, asked.time_budget)
    for number, one in enumerate(found):
        if asked.verbose or one.fault or one.is_late:
            errors = " | ".join(f"{type(error).__name__}: {error}"[:240] for error in one.errors)
            how = one.fault or ("late" if one.is_late else "right")
            print(f"{number} {one.case.kind}, rank {one.case.odd}: {how}, {one.spread:.3f} s: {errors}")
    for kind in KINDS:
        spreads = [one.spread - max(one.case.naps) for one in found if one.case.kind == kind]
        print(f"{kind}: {len(spreads)} cases, longest {max(spreads, default=0.0):.3f} s")
    faults = sum(bool(one.fault) or one.is_late for one in found)
    print(f"{len(found)} cases, {faults} faults")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
