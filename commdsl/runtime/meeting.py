"""Turns a Bootstrap into where the ranks of a group meet outside of kernels, unless one of them is gone or gives up.

Assumes that somebody watches (`watch`) and says what became of peers and of this process. Does not know what ranks meet
for.
"""

from __future__ import annotations

import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

from commdsl.runtime.bootstrap import Judge, Life, Reports, exchange
from commdsl.runtime.desk import Notice
from commdsl.runtime.said import Said

POLLS_A_LOOK = 32
"""Whoever waits looks so seldom whether another has given up: that the one it waits for has come is more likely."""

LONG_SECONDS = 0.05
"""After so long a wait has the watch threads of all ranks look where their ranks are."""


class Meeting(ABC):
    """One rank's end. What is said is said of a generation: until the next reset of the group."""

    def __init__(self, bootstrap: Life, reports: Reports, timeout: float, notice: Notice) -> None:
        """`reports`: where ranks report what they are about to set up, and why they raise. `timeout`: seconds that a
        wait may take. `notice`: where this rank's kernels look.
        """
        self.bootstrap = bootstrap
        self.reports = reports
        self.said = Said(reports, reports.alarm)
        self.timeout = timeout
        self.notice = notice
        self.gone: set[int] = set()
        self.awaited = ""  # what this rank waits for peers to do, outside of kernels
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

    def exchange(
        self,
        key: str,
        value: bytes,
        what: str,
        seconds: float | None = None,
        judge: Judge | None = None,
    ) -> tuple[bytes, ...]:
        """Every rank's value; `what` they come for, in words, if one does not within `seconds`, or the group's
        time-out. With a `judge`, who sees each value as it comes, values lie among the reports, where ranks that wait
        in kernels see them. Raises RendezvousError, PeerError, AgreementError.
        """
        began, is_short = time.monotonic(), True
        elsewhere: set[int] = set()

        def ended(absent: Sequence[int]) -> Mapping[int, str]:
            nonlocal is_short
            if is_short and time.monotonic() - began > LONG_SECONDS:
                is_short = False
                self.reports.alarm()
            return self.ended(absent, elsewhere)

        key = f"{self.generation}/{key}"
        patience, self.awaited = seconds or self.timeout, what
        try:
            if judge is None:
                return exchange(self.bootstrap, key, value, patience, what, ended)
            return exchange(self.reports, key, value, patience, what, ended, judge)
        finally:
            self.awaited = ""

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

    def ended(self, ranks: Sequence[int], elsewhere: set[int]) -> dict[int, str]:
        """Of these ranks those that are gone. Raises as `look` and `absent` do."""
        found = self.absent(ranks)
        if self._polls() % POLLS_A_LOOK == 0:
            self.look(ranks, elsewhere)
        return found

    def absent(self, ranks: Sequence[int]) -> dict[int, str]:
        """Of these ranks those that are gone. Raises KeyboardInterrupt where Python does not: it does in the main
        thread.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main and time.monotonic() < self._interrupted_until:
            raise KeyboardInterrupt
        return {rank: "is gone" for rank in ranks if rank in self.gone}

    @abstractmethod
    def look(self, absent: Sequence[int], elsewhere: set[int]) -> None:
        """Raise PeerError or AgreementError where any rank of the group has given up, or one of the `absent` was and is
        `elsewhere`, which this notes.
        """

    def asked(self, ranks: Sequence[int]) -> dict[int, str]:
        """Of these ranks, for which this one waited in vain, those that say soon that they gave up, and why."""
        told = self.said.ask([rank for rank in ranks if rank not in self.gone])
        return {rank: line.why for rank, line in told.items()}
