"""Turns a Bootstrap into where the ranks of a group meet outside of kernels, unless one of them is gone or gives up.

Assumes that somebody watches (`watch`) and says what became of peers and of this process. Does not know what ranks meet
for.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence

from commdsl.runtime.bootstrap import Life, exchange
from commdsl.runtime.desk import Notice
from commdsl.runtime.errors import PeerError
from commdsl.runtime.said import Line, Said

POLLS_A_LOOK = 32
"""Whoever waits looks so seldom whether another has given up: that the one it waits for has come is more likely."""


class Meeting:
    """One rank's end. What is said is said of a generation: until the next reset of the group."""

    def __init__(self, bootstrap: Life, timeout: float, notice: Notice) -> None:
        """`timeout`: seconds that a wait may take. `notice`: where this rank's kernels look."""
        self.bootstrap = bootstrap
        self.said = Said(bootstrap)
        self.timeout = timeout
        self.notice = notice
        self.gone: set[int] = set()
        self._interrupted_until = 0.0
        self._polls = itertools.count().__next__

    @property
    def rank(self) -> int:
        return self.bootstrap.rank

    @property
    def size(self) -> int:
        return self.bootstrap.size

    @property
    def generation(self) -> int:
        return self.said.generation

    def exchange(self, key: str, value: bytes, what: str, seconds: float | None = None) -> tuple[bytes, ...]:
        """Every rank's value; `what` they come for, in words, if one does not within `seconds`, or the group's
        time-out. Raises RendezvousError, PeerError.
        """
        key = f"{self.generation}/{key}"
        return exchange(self.bootstrap, key, value, seconds or self.timeout, what, self.ended)

    # --- what the watcher says ----------------------------------------------------------------------------------------

    def mark_gone(self, rank: int) -> None:
        """The process of that rank has ended: nobody waits for more than it said."""
        self.gone.add(rank)
        self.notice.mark_gone(rank)

    def interrupt(self, seconds: float) -> None:
        """Ctrl-C: for so many seconds, waits give up."""
        self._interrupted_until = time.monotonic() + seconds
        if seconds > 0:
            self.notice.interrupt()
        else:
            self.notice.clear_interrupt()

    def ended(self, ranks: Sequence[int]) -> dict[int, str]:
        """Of these ranks those that are gone. Raises PeerError where any rank of the group has given up, and
        KeyboardInterrupt where Python does not: it does in the main thread.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and time.monotonic() < self._interrupted_until:
            raise KeyboardInterrupt
        if self._polls() % POLLS_A_LOOK == 0:
            for rank in range(self.size):
                if rank != self.rank and (line := self.said.heard(rank)):
                    raise _told(rank, line)
        return {rank: "is gone" for rank in ranks if rank in self.gone}

    def asked(self, ranks: Sequence[int]) -> dict[int, str]:
        """Of these ranks, for which this one waited in vain, those that say soon that they gave up, and why."""
        told = self.said.ask([rank for rank in ranks if rank not in self.gone])
        return {rank: line.why for rank, line in told.items()}


def _told(rank: int, line: Line) -> PeerError:
    """What it means that a rank gave up: if for one that is gone, that one is to be named."""
    if line.gone is not None:
        return PeerError(line.gone, f"is gone: rank {rank} waited for it")
    return PeerError(rank, f"gave up: {line.why}")
