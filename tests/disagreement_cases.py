"""Draws cases in which the ranks of a group disagree, raise or end, and judges how every rank ended.

Assumes ranks that run a case as it says. Does not run any: disagreements.py does on threads, disagreement_processes.py
on processes, and every_step.py goes through all steps of a call.
"""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import FrameType
from typing import Any

import torch

import commdsl
from commdsl.runtime import menu
from commdsl.runtime.errors import AgreementError, BrokenGroupError, OpError, PeerError

SECONDS = 30.0
"""The time-out, which no case may come to."""

SOON = 0.5
"""So long after the first rank that raises the others may raise."""

PACKAGE = os.path.dirname(commdsl.__file__)
NAMES = ("allreduce_ring", "allreduce_oneshot", "allreduce_twoshot")
MENU = "all_reduce_"
"""The name of a call of `commdsl.all_reduce_`, which chooses the schedule itself."""

KINDS = ("size", "dtype", "reduction", "schedule", "order", "first", "refused", "injected", "agree")
ENDS = ("killed", "exits", "raises", "load raises")
"""Kinds in which the process of a rank ends."""

SCENES = ("subgroup", "debug")
"""Cases of any of KINDS in a group of two of the ranks, or where one rank has COMMDSL_DEBUG=1."""


@cache
def loaded(name: str, ranks: int) -> Any:
    """The op, in which nothing is injected before it is called."""
    return commdsl.load(name, ranks=ranks)


class InjectedError(Exception):
    """An error that is injected into a step of a call."""


class EndedError(Exception):
    """The end of a rank's process, in place of an error."""


@dataclass(frozen=True)
class Call:
    """One call of a rank."""

    name: str
    size: int = 24
    dtype: torch.dtype = torch.float32
    op: str = "sum"
    is_async: bool = False

    def __call__(self, group: Any, ranks: int) -> None:
        """Make the call and check its result."""
        x = torch.ones(self.size, dtype=self.dtype)
        if self.name == MENU:
            found = x.clone()
            commdsl.all_reduce_(found, op=self.op, group=group)
        else:
            found = loaded(self.name, ranks)(x, group=group, op=self.op, async_op=self.is_async)
            if self.is_async:
                sys.setprofile(None)  # the call is launched by another thread; to wait for it is no step of it
                found = found.wait()
        assert torch.equal(found, ranks * x if self.op == "sum" else x), f"a wrong result: {found}"

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def schedule(self, ranks: int) -> str:
        """Return the name of the schedule that is called."""
        if self.name != MENU:
            return self.name
        return menu.menu("all_reduce", ranks, torch.device("cpu"), 0, False).op(self.nbytes).shown

    def is_named(self, text: str, ranks: int, whole: bool) -> bool:
        """Return whether a text names this call; `whole`: with size, dtype and reduction."""
        name, nbytes, dtype = self.schedule(ranks), self.nbytes, str(self.dtype).removeprefix("torch.")
        if not whole:
            return f"`{name}`" in text
        launched, compared = f"on {nbytes} bytes of {dtype}, {self.op}", f"of {dtype}[{self.size}] by {self.op}"
        return f"`{name}` {launched}" in text or f"`{name}` {compared}" in text


@dataclass(frozen=True)
class Case:
    """A drawn case: what every rank calls before and then, and where rank `odd` is made to raise or to end."""

    kind: str
    ranks: int
    before: tuple[Call, ...]
    calls: tuple[tuple[Call, ...], ...]
    odd: int
    naps: tuple[float, ...]
    step: int = 0  # of the odd rank's calls, at which it raises or is killed; 0: at none
    is_waiting: bool = False  # whether it is killed while it waits for another rank
    scene: str = ""
    members: tuple[int, ...] = ()  # the processes that are the group's ranks; all, unless said
    debug: int = -1  # the rank with COMMDSL_DEBUG=1

    @property
    def label(self) -> str:
        return self.scene or self.kind


@dataclass(frozen=True)
class Result:
    """How a case ended: what each rank raised, and the seconds between the first and the last."""

    case: Case
    errors: tuple[BaseException | None, ...]
    spread: float
    fault: str = field(default="")

    @property
    def is_late(self) -> bool:
        """True if the last rank raised more than `SOON` after the first, besides the time that ranks slept."""
        return any(self.errors) and self.late > SOON

    @property
    def late(self) -> float:
        """Seconds besides the time that ranks slept."""
        return self.spread - max(self.case.naps)

    @property
    def line(self) -> str:
        errors = " | ".join(f"{type(error).__name__}: {error}"[:400] for error in self.errors)
        how = self.fault or ("late" if self.is_late else "right")
        return f"{self.case.label}: {how}, {self.spread:.3f} s: {errors}\n  {self.case}"


def drawn(dice: random.Random, ranks: int, length: int, kinds: Sequence[str] = KINDS) -> Case:
    """Return a case of any of the kinds. `length`: the number of steps of a group's first call."""
    kind, odd = dice.choice(kinds), dice.randrange(ranks)
    is_async = dice.random() < 0.3
    before = [Call(dice.choice(NAMES[:2])) for _ in range(dice.randrange(3))]
    name, other = dice.sample(NAMES, 2)
    usual = [Call(name, is_async=is_async)]
    strange = usual
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
    calls = tuple(tuple(strange if rank == odd else usual) for rank in range(ranks))
    naps = tuple(dice.choice((0.0, 0.0, 0.02, 0.3)) for _ in range(ranks))
    has_step = kind in ("injected", "load raises") or (kind == "killed" and dice.random() < 0.5)
    step = max(2, int(length ** dice.random())) if has_step else 0  # few where all is set up, many in a first call
    return Case(kind, ranks, tuple(before), calls, odd, naps, step)


def drawn_of_processes(dice: random.Random, ranks: int, length: int) -> Case:
    """Return a case of any kind or scene for processes."""
    scene = dice.choice((*KINDS, *ENDS, *ENDS, *SCENES, *SCENES))
    if scene == "subgroup":
        members = tuple(sorted(dice.sample(range(ranks), 2)))
        return replace(drawn(dice, 2, length), scene=scene, members=members)
    if scene == "debug":
        return replace(drawn(dice, ranks, length), scene=scene, debug=dice.randrange(ranks))
    case = drawn(dice, ranks, length, (scene,))
    if scene != "killed" or case.step or dice.random() < 0.4:
        return case
    naps = tuple(0.0 if rank == case.odd else 0.4 for rank in range(ranks))
    return replace(case, is_waiting=True, naps=naps)


class Injection:
    """A profile function that acts once, when its thread has entered so many functions of commdsl."""

    def __init__(self, at: int, act: Callable[[], None] = lambda: None) -> None:
        """`act`: what is done there, before an InjectedError is raised."""
        self.entered = 0
        self.where = ""
        self._at, self._act = at, act

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        is_step = code.co_name != "<genexpr>"  # which is entered once more when it is let go of, wherever that is
        if event == "call" and is_step and code.co_filename.startswith(PACKAGE):
            self.entered += 1
            if self.entered == self._at:
                sys.setprofile(None)
                self._act()
                self.where = code.co_qualname
                raise InjectedError(f"in {self.where}")


def fault(case: Case, errors: Sequence[BaseException | None]) -> str:
    """Return what is wrong with the end of a case, empty if nothing is. `errors`: by rank of the group; in every case
    ranks that do not raise make one more call.
    """
    if any(isinstance(one, AssertionError) for one in errors):
        return "a wrong result"
    if case.kind == "agree" or (case.kind == "injected" and not any(errors)):
        return "ranks that agree raised" if any(errors) else ""
    unanswered = "store does not answer"  # of the default group: it ended with rank 0, before another knew whose it was
    late = commdsl.CommTimeout | commdsl.RendezvousError
    if any(isinstance(one, late) and unanswered not in str(one) for one in errors):
        return "a time-out"
    if any(one is None for one in errors):
        return "a rank did not raise"
    others = {rank: str(one) for rank, one in enumerate(errors) if rank != case.odd and isinstance(one, OpError)}
    if case.kind in (*ENDS, "injected", "refused"):
        if len(others) < case.ranks - 1:
            return "another error"
        reason, call = str(errors[case.odd]), case.calls[case.odd][0]
        theirs = [f"`{name}` raised" for name in (call.name, call.schedule(case.ranks))]
        theirs += [f"last call of rank {case.odd}:", f"rank {case.odd} was to "]
        if case.kind in ENDS:
            reason, theirs = f"rank {case.odd} is gone", [""]
        is_known = case.odd or case.kind not in ENDS
        if not all(reason in text or (not is_known and unanswered in text) for text in others.values()):
            return "the reason is not said"
        if not all(any(one in text for one in theirs) for text in others.values()):
            return "the other side is not named"
        if not all(_says_own(case, rank, text) for rank, text in others.items()):
            return "its own side is not named"
        return ""
    if not all(isinstance(one, AgreementError | PeerError | BrokenGroupError) for one in errors):
        return "another error"
    usual, strange = case.calls[(case.odd + 1) % case.ranks][0], case.calls[case.odd][0]
    both = all(
        call.is_named(str(one), case.ranks, usual.name == strange.name) for one in errors for call in (usual, strange)
    )
    return "" if both else "a side is not named"


def _says_own(case: Case, rank: int, text: str) -> bool:
    """Return whether the text of a rank's error says what that rank was to do, or did last: a call that it made."""
    made = {call.schedule(case.ranks) for call in (*case.before, *case.calls[rank])}
    last = re.findall(rf"(?:rank {rank} calls|last call of rank {rank}:) (?:`(\w+)`|nothing)", text)
    waits = re.findall(
        rf"rank {rank} (?:was|waited for it) to (?:set up group `|(?:set up|compare call \d+,) `(\w+))", text
    )
    return len(last) + len(waits) > 0 and all(name in made for name in (*last, *waits) if name)
