"""Words and counters of a call, and what the caller does around it: nothing else orders two ranks.

Assumes that a word is told before it is met, which `verify_calls` checks. Does not move rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

from commdsl.language.diagnostics import InternalError
from commdsl.language.records import dataclass
from commdsl.program.memory import Counters, Rows, Words
from commdsl.program.phases.common import Actor, Phase
from commdsl.program.touches import Ranks, Touch


def _is_own(what: Words | Counters) -> bool:
    """A number of the rank's own is read where a call begins, and advanced where it ends."""
    return isinstance(what, Counters) and not what.is_shared


def _guard(by: Actor) -> str:
    return "if (lane == 0) " if by is Actor.FIRST else ""


def _waves(what: Words | Counters) -> int:
    return what.waves if isinstance(what, Counters) else 1


def _of_wave(what: Words | Counters, wave: int) -> Words | Counters:
    return replace(what, name=f"{what.name} {wave}", waves=1) if isinstance(what, Counters) else what


@dataclass(frozen=True, slots=True)
class Host(Phase):
    """What the caller does on its stream before the launch, or behind it: its tensors change, or are read."""

    name: str
    rows: tuple[Rows, ...]
    is_after: bool

    @property
    def by(self) -> Actor:
        return Actor.CALLER

    @property
    def description(self) -> str:
        return f"{self.name}, by {self.by.value}"

    @property
    def touches(self) -> tuple[Touch, ...]:
        return tuple(Touch(rows, Ranks.OWN, not self.is_after, 3 * self.is_after) for rows in self.rows)

    def call(self, number: int, wave: str) -> str:
        """Raise InternalError: no kernel does it."""
        raise InternalError(f"{self.name} is the caller's, not the lanes'")


@dataclass(frozen=True, slots=True)
class Tell(Phase):
    """Values to others, or that what came before is done."""

    by: Actor
    what: Words | Counters
    to: Ranks

    @property
    def name(self) -> str:
        return f"tell {self.what.name}"

    @property
    def description(self) -> str:
        return f"{self.name} to {self.to.value}, by {self.by.value}"

    @property
    def touches(self) -> tuple[Touch, ...]:
        return (Touch(self.what, self.to, True, 1 if _is_own(self.what) else 0),)

    def call(self, number: int, wave: str) -> str:
        guard, ranks = _guard(self.by), self.to.code
        if _is_own(self.what) and self.what.name == "calls":
            return f"{guard}commdsl::tell_calls(here);"
        if isinstance(self.what, Counters):
            given = f"here, peers, {wave}" if wave else "here"
            return f"{guard}commdsl::tell_{self.what.name}<{ranks}>({given});"
        told = f"{guard}commdsl::tell_{self.what.name}<{ranks}>(here, peers);"
        # A lane prepares what it knows of itself while its peers read where its results are.
        return told + ("\n  commdsl::prepare(here, peers);" if self.what.name == "addresses" else "")

    @property
    def waves(self) -> int:
        return _waves(self.what)

    @property
    def sends_wave(self) -> bool:
        return self.waves > 1 or (isinstance(self.what, Words) and self.what.name == "sent")

    def of_wave(self, wave: int) -> Self:
        return replace(self, what=_of_wave(self.what, wave))


@dataclass(frozen=True, slots=True)
class Meet(Phase):
    """Waits until all of them have told. A `spare` one is left out by lanes without rows to finish: by the first where
    rows wait on no rank.
    """

    by: Actor
    what: Words | Counters
    of: Ranks
    calls_back: int = 0
    is_spare: bool = False

    @property
    def name(self) -> str:
        return f"meet {self.what.name}"

    @property
    def description(self) -> str:
        back = f", {self.calls_back} calls before" if self.calls_back else ""
        return f"{self.name} of {self.of.value}{back}, by {self.by.value}"

    @property
    def touches(self) -> tuple[Touch, ...]:
        return (Touch(self.what, Ranks.OWN, False, 1),) if isinstance(self.what, Words) else ()

    @property
    def waits_for(self) -> tuple[Words | Counters, ...]:
        return (self.what,)

    def call(self, number: int, wave: str) -> str:
        given = f"here, peers, {wave}" if wave else "here, peers"
        told = f"commdsl::meet_{self.what.name}<{number}, {self.of.code}, {self.calls_back}>({given})"
        spare = "lane != 0 && here.is_busy() && " if self.is_spare else ""
        return f"if ({'lane == 0 && ' if self.by is Actor.FIRST else spare}!{told}) return;"

    @property
    def waves(self) -> int:
        return _waves(self.what)

    @property
    def ends_wave(self) -> bool:
        return self.waves > 1

    def of_wave(self, wave: int) -> Self:
        return replace(self, what=_of_wave(self.what, wave))


@dataclass(frozen=True, slots=True)
class Read(Phase):
    """Values that need no wait, or none any more."""

    by: Actor
    what: Words | Counters

    @property
    def name(self) -> str:
        return f"read {self.what.name}"

    @property
    def description(self) -> str:
        return f"{self.name}, by {self.by.value}"

    @property
    def touches(self) -> tuple[Touch, ...]:
        return (Touch(self.what, Ranks.OWN, False, 0 if _is_own(self.what) else 1),)

    def call(self, number: int, wave: str) -> str:
        if isinstance(self.what, Words):
            return f"{_guard(self.by)}commdsl::read_{self.what.name}(here, peers);"
        return (
            "const commdsl::Call<Plan> here = commdsl::read_calls<Plan>(args, lane);\n"
            "  if (!commdsl::begin(here)) return;"
        )
