"""Turns what went wrong in a call on any rank into a broken group: peers are told why, and nothing is called in it.

Every rank numbers its *steps*: set-ups, and calls that raised before anything was started. A step is reported with its
number and with how many calls were started before it. So a rank that started a call where a peer has a step knows that
they disagree, whoever waits: one that waits for peers outside of kernels looks itself (`look`), for one that waits in a
kernel, or does not wait, the watch thread does (`hear`), and ends the waits of kernels. Steps that all ranks have are
no disagreement, so what all refuse alike breaks nothing.

Assumes that every rank of a broken group resets it (`Communicator.reset`). Does not look at what kernels report.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

from commdsl.machine.errors import Error
from commdsl.program.timeouts import CommTimeout
from commdsl.runtime.bootstrap import Life, Reports, SharedBootstrap, StoreError, unanswered
from commdsl.runtime.desk import Notice
from commdsl.runtime.errors import (
    AgreementError,
    BrokenGroupError,
    GroupError,
    HeapError,
    OpError,
    PeerError,
    RendezvousError,
)
from commdsl.runtime.failures import apart, told
from commdsl.runtime.meeting import Meeting
from commdsl.runtime.said import WAITS, Words, text_of
from commdsl.runtime.setups import Raised, Setup, unpacked

NOTHING = Words("nothing")
"""Of a rank that has made no call."""


class Breaking(Meeting):
    """One rank's end of a group, as long as nothing broke it."""

    def __init__(self, name: str, bootstrap: Life, reports: Reports, timeout: float, notice: Notice) -> None:
        super().__init__(bootstrap, reports, timeout, notice)
        self.name = name
        self.broken: BaseException | None = None
        self.steps = 0  # of this generation
        self.hearing = threading.RLock()  # held while `broken` is decided on, or what `hear` looks at changes
        self._heard: BaseException | None = None  # what broke it, as long as nobody was told
        self.is_open = False  # whether it was set up, and not closed
        self.is_deaf = False  # in a reset
        self.is_stepping = False  # in an exchange that is a step
        self._is_disowned = False

    @property
    def is_capturing(self) -> bool:
        """Whether a call that is made now is captured, and not under way."""
        return False

    def calls(self) -> int:
        """Return how many calls this rank has started in this generation; never more than that."""
        return 0

    def last_call(self) -> Words:
        """Return the call that this rank started last."""
        return NOTHING

    def doing(self) -> Words:
        """Return what this rank waits to do with its peers, or else its last call."""
        awaited = self.awaited
        return Words(awaited, verb=WAITS) if awaited else self.last_call()

    def begin(self) -> None:
        """Count a call of several launches, where kernels do not count it."""

    def resume(self) -> None:
        """Count no call for the next launch, where kernels do not count: it is the second one of a call."""

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
        self._raise_heard()
        if self.broken is not None:
            raise BrokenGroupError(
                f"group `{self.name}` cannot be used after `{type(self.broken).__name__}`: every rank has to call "
                f"commdsl.reset() first ({self.broken})"
            )

    def fail(self, error: BaseException, what: Words | None = None) -> None:
        """Break the group: the heap holds half a call, so nothing runs until all ranks have reset. `what`: the call
        that ended with this error; default: the last one.
        """
        gone = error.gone if isinstance(error, PeerError) else None
        with self.hearing:
            is_first, self.broken = self.broken is None, error
            self.said.say(what or self.doing(), error, gone)
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
        self.begin()
        try:
            yield
        except BaseException as error:
            if not is_captured:
                self.end_half_way(error)
            raise

    # --- steps, and what peers report ---------------------------------------------------------------------------------

    def report(self, error: BaseException, what: str) -> None:
        """A call raised this before anything of it was started: a step, of which all peers hear."""
        with self.hearing:
            if self.broken is not None:
                return
            step, self.steps = self.steps, self.steps + 1
            made = raised(error, what, self.calls())
            with contextlib.suppress(RuntimeError):  # of a store whose server has ended
                self.reports.put(step_key(self.generation, step, self.rank), made.pack())
                self.reports.alarm()

    def look(self, absent: Sequence[int], elsewhere: set[int]) -> None:
        """Check, during a wait outside of kernels, for reports of peers; raise what they mean for this rank."""
        with self.hearing:
            self._raise_heard()
            found = self._told(self.reports)
            for peer in () if found is not None or self.is_stepping else absent:
                step = self._step_of(peer, self.reports)
                if step is not None and peer in elsewhere:  # when this was seen last; what it said before is heard now
                    found = apart(self.name, peer, step, self.rank, self.doing())
                    break
                if step is not None:
                    elsewhere.add(peer)
            if found is not None:
                self._break(found)
                self._raise_heard()

    def hear(self, world: SharedBootstrap) -> bool:
        """Look, in the watch thread, whether a peer has given up or does something else: then the waits of this rank's
        kernels end, and its next call raises. Return whether to look again soon: a peer may be ahead, or not.
        """
        with self.hearing:
            if self.broken is not None or self.is_deaf or not self.is_open:
                return False
            reports, is_ahead = replace(self.reports, world=world), False
            found = self._told(reports)
            for peer in range(self.size) if found is None else ():
                calls = self.calls()  # before the step is looked for, as this rank goes on meanwhile
                step = None if peer == self.rank else self._step_of(peer, reports)
                is_ahead |= step is not None
                if step is not None and calls > step.calls:
                    found = apart(self.name, peer, step, self.rank, self.last_call())
                    break
            if found is not None:
                self._break(found)
            return is_ahead and found is None

    def _step_of(self, peer: int, reports: Reports) -> Setup | Raised | None:
        """Return what a peer reports of this rank's next step."""
        found = reports.get(step_key(self.generation, self.steps, peer))
        return None if found is None else unpacked(found)

    def _told(self, reports: Reports) -> OpError | None:
        """Return what this rank raises because a peer has given up."""
        for peer in range(self.size):
            line = None if peer == self.rank else self.said.heard(peer, reports)
            if line is not None:
                return told(peer, line, self.doing(), self.rank, self.said)
        return None

    def _break(self, error: OpError) -> None:
        """Peers have given up, or this rank finds that they disagree."""
        self.broken = self._heard = error
        self.said.say(self.doing(), error, error.gone if isinstance(error, PeerError) else None)
        self.notice.stop(self.rank, self.size)

    def _raise_heard(self) -> None:
        """Once: after that the group is broken."""
        heard, self._heard = self._heard, None
        if heard is not None:
            try:
                raise heard
            finally:
                del heard  # it is in its own traceback, and with it what the caller's frames hold

    def _renew(self) -> None:
        """Forget what broke it."""
        self.steps, self.broken, self._heard = 0, None, None
        self.notice.go_on(self.gone)


def step_key(generation: int, number: int, rank: int) -> str:
    """Return the key under which a rank reports a step: that of the exchange, if the step is one."""
    return f"{generation}/step/{number}/{rank}"


def raised(error: BaseException, what: str, calls: int) -> Raised:
    """Return the step of a rank whose call raised this, after so many calls."""
    return Raised(what, text_of(error), calls, isinstance(error, AgreementError))


def in_our_words(error: BaseException, what: str, rank: int) -> BaseException:
    """Return a HeapError where the system refused something that a set-up needs, a RendezvousError where the store did
    not answer this rank, and any other error as it is.
    """
    if isinstance(error, StoreError):
        return unanswered(rank, error, what)
    if not isinstance(error, OSError) or isinstance(error, Error):
        return error
    reason = error.strerror or str(error) or type(error).__name__
    return HeapError(f"cannot {what}: {reason}. It takes memory, file descriptors and threads: see `ulimit -a`")


_SETTLED = "_commdsl_is_settled"


def settle(error: BaseException, group: str) -> BaseException:
    """Mark an error as one that all peers in a group have, or know of: none of them has to be told of it any more."""
    setattr(error, _SETTLED, {*getattr(error, _SETTLED, ()), group})
    return error


def is_settled(error: BaseException, group: str) -> bool:
    """Return whether `settle` has marked an error, for the group of this name."""
    return group in getattr(error, _SETTLED, ())
