"""Turns what went wrong in a call on this rank into a broken group: peers are told why, and nothing is called in it.

Assumes that every rank of a broken group resets it (`Communicator.reset`). Does not look at what kernels report.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from commdsl.program.timeouts import CommTimeout
from commdsl.runtime.bootstrap import Life
from commdsl.runtime.desk import Notice
from commdsl.runtime.errors import BrokenGroupError, GroupError, PeerError, RendezvousError
from commdsl.runtime.meeting import Meeting


class Breaking(Meeting):
    """One rank's end of a group, as long as nothing broke it."""

    def __init__(self, name: str, bootstrap: Life, timeout: float, notice: Notice) -> None:
        super().__init__(bootstrap, timeout, notice)
        self.name = name
        self.broken: BaseException | None = None
        self._is_disowned = False

    @property
    def is_capturing(self) -> bool:
        """Whether a call that is made now is captured, and not under way."""
        return False

    def disown(self) -> None:
        """In a child that was forked."""
        self._is_disowned = True
        self.broken = GroupError("forked")  # looked at before every call

    def refuse_if_broken(self) -> None:
        if self._is_disowned:
            raise GroupError(
                f"this process was forked from a rank of group `{self.name}` and is none itself: call commdsl in the "
                "parent, or start processes by `spawn`"
            )
        if self.broken is not None:
            raise BrokenGroupError(
                f"group `{self.name}` cannot be used after `{type(self.broken).__name__}`: every rank has to call "
                f"commdsl.reset() first ({self.broken})"
            )

    def fail(self, error: BaseException, what: str = "a call") -> None:
        """After a time-out the heap holds half a call: nothing runs until all ranks have reset."""
        is_first, self.broken = self.broken is None, error
        gone = error.gone if isinstance(error, PeerError) else None
        self.said.say(what, str(error) or type(error).__name__, gone)
        if is_first and isinstance(error, CommTimeout | RendezvousError):
            for rank, why in self.asked(error.missing).items():
                error.add_note(f"rank {rank} gave up, too: {why}")

    def end_half_way(self, error: BaseException) -> None:
        """With this a call ended of which something was started, maybe: the others wait for the rest, and this rank's
        next call would run on half a round.
        """
        if self.broken is not None:
            return  # whoever broke it has said why
        self.fail(error if isinstance(error, Exception) else RuntimeError(repr(error)))
        error.add_note(
            "the other ranks wait for what this call did not come to: "
            f"group `{self.name}` is broken until every rank has called commdsl.reset()"
        )

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """A call from its first launch to its last. What is captured is not under way: it may end anywhere."""
        is_captured = self.is_capturing
        try:
            yield
        except BaseException as error:
            if not is_captured:
                self.end_half_way(error)
            raise
