"""Turns calls into digests that kernels compare, digests back into words, and reports to peers why this rank raises.

Assumes that ranks which make the same call describe it in the same words. Does not compare anything. A rank reports
when it raises, where all processes look: nothing is reported of a call that goes well.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import TypeVar

from commdsl.machine.errors import Error
from commdsl.runtime.bootstrap import Bootstrap
from commdsl.runtime.errors import AgreementError, PeerError

ANSWER_SECONDS = 2.0
"""So long who raises waits for what peers say: they raise, too, but not at the same moment."""

WAITS = "was to"
"""The verb of a rank that waits for peers to do the same: `rank 1 was to set up ...`."""

Kept = TypeVar("Kept")

POLL_SECONDS = 0.005
MOST_KNOWN = 1 << 14
"""Calls whose words are kept."""


@dataclass(frozen=True, slots=True)
class Words:
    """A call in words. `detail`: the file and the digest of its kernel, shown where two calls have the same words.
    `verb`: what a rank does with it; `WAITS` for a step outside of kernels.
    """

    call: str
    detail: str = ""
    verb: str = "calls"

    def of(self, rank: int, detailed: bool = False) -> str:
        """Return the clause that says this of a rank, `detailed` with file and digest where they are known."""
        return f"rank {rank} {self.verb} {self.call}{f' ({self.detail})' if detailed and self.detail else ''}"


@dataclass(frozen=True, slots=True)
class Line:
    """A rank's report: the call it was in, why it raises, and `by`, the rank that knew first. `gone`: the rank whose
    process has ended, if that is why. `one`, `other`: the ranks that make different calls, if that is why, and -1
    otherwise. `differs`: whether ranks disagree; then `why` has both sides, unless `one` and `other` are named.
    """

    call: str
    detail: str
    why: str
    gone: int | None
    by: int
    differs: bool = False
    one: int = -1
    other: int = -1
    verb: str = "calls"

    @property
    def words(self) -> Words:
        """The call that the rank was in."""
        return Words(self.call, self.detail, self.verb)


class Said:
    """One rank's end of what the ranks of a group report. `generation`: how often the group was reset."""

    def __init__(self, bootstrap: Bootstrap, alarm: Callable[[], None] = lambda: None) -> None:
        """`alarm`: has all ranks look at what was reported."""
        self._bootstrap = bootstrap
        self._alarm = alarm
        self.generation = 0
        self._has_spoken = False
        self._calls: dict[int, Words] = {}
        self._plans: dict[int, str] = {}

    def digest(self, words: str, identity: str, source: str = "") -> int:
        """Of a call in these words, of the kernel of this identity: 32 bits, the same on every rank that makes it.
        `source`: the file of the kernel.
        """
        found = int.from_bytes(hashlib.blake2b(f"{words}\0{identity}".encode(), digest_size=4).digest(), "little")
        _keep(self._calls, found, Words(words, f"{source}, digest {identity[:8]}".removeprefix(", ")))
        return found

    def know_plan(self, digest: int, words: str) -> None:
        """The words of what a table of rows says: its digest is combined with that of the call."""
        _keep(self._plans, digest, words)

    def known(self, digest: int) -> Words | None:
        """Return the call with this digest, if this rank knows it."""
        if digest in self._calls:
            return self._calls[digest]
        for base, words in self._calls.copy().items():
            if digest ^ base in self._plans:
                return Words(f"{words.call}, {self._plans[digest ^ base]}", words.detail)
        return None

    def words(self, digest: int) -> str | None:
        """Return the words of the call with this digest, if this rank knows it."""
        found = self.known(digest)
        return None if found is None else found.call

    def say(self, call: str | Words, why: str | BaseException, gone: int | None = None, **more: int) -> None:
        """Report to all peers, until the group is reset, why this rank raises. The first report of a rank stands; what
        follows from that is not reported. `more`: as in a Line.
        """
        if self._has_spoken:
            return
        self._has_spoken = True
        words = call if isinstance(call, Words) else Words(call)
        text = why if isinstance(why, str) else text_of(why)
        if isinstance(why, PeerError) and why.gone is None:
            more["by"] = why.rank
        by, differs = more.pop("by", self._bootstrap.rank), more.pop("differs", isinstance(why, AgreementError))
        line = Line(words.call, words.detail, text, gone, by, bool(differs), verb=words.verb, **more)
        with suppress(RuntimeError):  # of a store whose server has ended
            self._bootstrap.put(self._key(self._bootstrap.rank), json.dumps(astuple(line)).encode())
            self._alarm()

    def heard(self, rank: int, bootstrap: Bootstrap | None = None) -> Line | None:
        """Return what a peer has reported. `bootstrap`: where to look, if not at this rank's own end."""
        got = (bootstrap or self._bootstrap).get(self._key(rank))
        return None if got is None else Line(*json.loads(got))

    def ask(self, ranks: Collection[int], seconds: float | None = None) -> dict[int, Line]:
        """What these peers say; nothing of those that say nothing within `seconds`, if not ANSWER_SECONDS."""
        found: dict[int, Line] = {}
        deadline = time.monotonic() + (ANSWER_SECONDS if seconds is None else seconds)
        with suppress(RuntimeError):  # of a store whose server has ended
            while True:
                found = {rank: line for rank in ranks if (line := self.heard(rank))}
                if len(found) == len(ranks) or time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
        return found

    def reset(self) -> None:
        """What was said before is not heard again."""
        self.generation += 1
        self._has_spoken = False

    def _key(self, rank: int) -> str:
        return f"said/{self.generation}/{rank}"


def text_of(error: BaseException) -> str:
    """Return an exception in words, with its type where it is none of ours, which have codes."""
    text = str(error)
    if isinstance(error, PeerError) and error.gone is None:
        return error.reason.removeprefix("gave up: ")
    if isinstance(error, AgreementError):
        return text.removeprefix(f"error[{error.code}]: ")
    return text if isinstance(error, Error) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _keep(known: dict[int, Kept], digest: int, words: Kept) -> None:
    if len(known) >= MOST_KNOWN:
        known.pop(next(iter(known)))
    known[digest] = words
