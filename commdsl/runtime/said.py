"""Turns calls into digests that kernels compare, digests back into words, and tells peers these words when it raises.

Assumes that ranks which make the same call describe it in the same words. Does not compare anything. What a rank says
it says when it raises, through the bootstrap: nothing is said of a call that goes well.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from commdsl.runtime.bootstrap import Bootstrap

ANSWER_SECONDS = 2.0
"""So long who raises waits for what peers say: they raise, too, but not at the same moment."""

POLL_SECONDS = 0.005
MOST_KNOWN = 1 << 14
"""Calls whose words are kept."""


@dataclass(frozen=True, slots=True)
class Line:
    """What a rank says when it raises: what it called, why it raises, and which rank is gone, if that is why."""

    call: str
    why: str
    gone: int | None


class Said:
    """One rank's end of what the ranks of a group say of their calls. `generation`: how often the group was reset."""

    def __init__(self, bootstrap: Bootstrap) -> None:
        self._bootstrap = bootstrap
        self.generation = 0
        self._has_spoken = False
        self._calls: dict[int, str] = {}
        self._plans: dict[int, str] = {}

    def digest(self, words: str, identity: str) -> int:
        """Of a call in these words, of the kernel of this identity: 32 bits, the same on every rank that makes it."""
        found = int.from_bytes(hashlib.blake2b(f"{words}\0{identity}".encode(), digest_size=4).digest(), "little")
        _keep(self._calls, found, words)
        return found

    def know_plan(self, digest: int, words: str) -> None:
        """The words of what a table of rows says: its digest is combined with that of the call."""
        _keep(self._plans, digest, words)

    def words(self, digest: int) -> str | None:
        """What this rank knows a digest to stand for."""
        if digest in self._calls:
            return self._calls[digest]
        for base, words in self._calls.items():
            if digest ^ base in self._plans:
                return f"{words}, {self._plans[digest ^ base]}"
        return None

    def say(self, call: str, why: str, gone: int | None = None) -> None:
        """To whoever asks, until the group is reset. The first that a rank says is why it raises; what follows from
        that is not said.
        """
        if self._has_spoken:
            return
        self._has_spoken = True
        key = f"said/{self.generation}/{self._bootstrap.rank}"
        with suppress(RuntimeError):  # of a store whose server has ended
            self._bootstrap.put(key, json.dumps([call, why, gone]).encode())

    def heard(self, rank: int) -> Line | None:
        """What a peer has said."""
        got = self._bootstrap.get(f"said/{self.generation}/{rank}")
        return None if got is None else Line(*json.loads(got))

    def ask(self, ranks: Collection[int]) -> dict[int, Line]:
        """What these peers say; nothing of those that say nothing soon."""
        found: dict[int, Line] = {}
        deadline = time.monotonic() + ANSWER_SECONDS
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


def _keep(known: dict[int, str], digest: int, words: str) -> None:
    if len(known) >= MOST_KNOWN:
        known.pop(next(iter(known)))
    known[digest] = words
