"""When one rank gives up, all do: what waits look at beside what they wait for, and what is made of it."""

from __future__ import annotations

import pickle
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import commdsl
from commdsl.program.desk import SLOTS, TELLING, TOLD, Stop, desk_bytes, differing, notice_bytes, stop_of
from commdsl.program.timeouts import BAD_KEY, GONE, STOPPED, TIMED_OUT, ErrorRecord
from commdsl.runtime import groups
from commdsl.runtime.bootstrap import Board, ThreadBootstrap
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.desk import ordinary_notice
from commdsl.runtime.errors import BrokenGroupError, PeerError
from commdsl.runtime.failures import different_calls, stopped_by
from commdsl.runtime.said import Said

LONG = 1000.0
"""Seconds until a time-out: far more than a test may take, so a wait that ends has ended for another reason."""


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits that nobody ends take longer than a test may."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", str(LONG))


RECORD = ErrorRecord(STOPPED, 0, 0, 0, 5, 0, 0, 0, (), 0)


def nobody() -> Said:
    return Said(ThreadBootstrap(0, 1, Board()))


class Ranks:
    """Threads of this process as the ranks of a group that has called an op once."""

    def __init__(self, ranks: int, schedule: str = "allreduce_ring") -> None:
        self.names = commdsl.threads(ranks)
        self.op = commdsl.load(schedule, ranks=ranks)
        self.pool = ThreadPoolExecutor(ranks)
        for made in [self.start(rank) for rank in range(ranks)]:
            made.result()

    def start(self, rank: int, elements: int = 64) -> Future[Any]:
        return self.pool.submit(self.op, torch.ones(elements), group=self.names[rank])

    def of(self, rank: int) -> Communicator:
        (found,) = groups.every(self.names[rank])
        return found

    def everywhere(self, call: Callable[[str], object]) -> None:
        for done in [self.pool.submit(call, name) for name in self.names]:
            done.result()


def ends(call: Future[Any], kind: type[BaseException]) -> Any:
    """What a call raises."""
    with pytest.raises(kind) as caught:
        call.result()
    return caught.value


def test_a_rank_that_is_gone_is_waited_for_no_longer(patient: None) -> None:
    """Who waits for it raises; so does who waits for that one, and names the one that is gone; then the group is broken
    until it is reset, and right afterwards.
    """
    ranks = Ranks(3)
    first, second = ranks.start(0), ranks.start(1)
    threading.Timer(0.1, ranks.of(0).notice.mark_gone, (2,)).start()
    errors = ends(first, PeerError), ends(second, PeerError)

    assert [error.rank for error in errors] == [2, 2]
    assert "is gone" in errors[0].reason
    assert "rank 0 waited for it" in errors[1].reason
    ends(ranks.start(0), BrokenGroupError)


def test_what_was_told_before_the_end_is_heard(patient: None) -> None:
    """A rank that did its part of a call and ended is not missed in it."""
    ranks = Ranks(2, "broadcast_direct")
    ranks.start(0).result()
    ranks.of(1).notice.mark_gone(0)

    assert torch.equal(ranks.start(1).result(), torch.ones(64))
    assert ends(ranks.start(1), PeerError).rank == 0


def test_an_interrupt_ends_long_waits(patient: None) -> None:
    """A wait of more than half a second ends in KeyboardInterrupt; cleared, waits are as long as ever; the peer of one
    that was interrupted hears so; after a reset the group is right.
    """
    ranks = Ranks(3)
    notice = ranks.of(1).notice
    notice.interrupt()
    notice.clear_interrupt()
    waiting, beside = ranks.start(1), ranks.start(2)
    time.sleep(0.7)
    assert not waiting.done()
    notice.interrupt()
    ends(waiting, KeyboardInterrupt)
    error = ends(beside, PeerError)
    assert error.rank == 1
    assert re.fullmatch("gave up: KeyboardInterrupt: rank 1 waited for rank [02] at .*", error.reason)
    notice.clear_interrupt()

    ranks.everywhere(commdsl.reset)
    for call in [ranks.start(rank) for rank in range(3)]:
        assert torch.equal(call.result(), torch.full((64,), 3.0))


def test_a_time_out_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank is patient, the other is not: the patient one raises as soon as the other does."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", str(LONG))
    ranks = Ranks(3)
    ranks.of(0).workspaces.copy().popitem()[1]._timeout = 0.2
    ranks.op._calls.clear()
    first, second = ranks.start(0), ranks.start(1)

    assert ends(first, commdsl.CommTimeout).record.peer == 2
    error = ends(second, PeerError)
    assert error.rank == 0
    assert re.fullmatch(
        r"gave up: rank 0 waited 0.2 s for rank 2 at .*; ranks? .*2 never entered the call", error.reason
    )


def test_a_word_says_who_and_why() -> None:
    """The word on a desk is read back as it is written in waiting.cuh."""
    word = (5 + 1) | 7 << 16 | GONE << 32 | 0x123456 << 40

    assert stop_of(word) == Stop(5, 7, GONE, 0x123456)
    gone, late, wrong = (stopped_by(Stop(5, 7, code, 1), RECORD, nobody()) for code in (GONE, TIMED_OUT, BAD_KEY))
    assert [(error.rank, error.reason) for error in (gone, late, wrong) if isinstance(error, PeerError)] == [
        (7, "is gone: rank 5 waited for it"),
        (5, "gave up: its wait for rank 7 took too long"),
        (5, "gave up: what it was to move was wrong"),
    ]


def test_a_store_that_has_ended_says_nothing() -> None:
    """Ranks that make different calls raise so, also where the store in which they would say which has ended."""

    class Ended(ThreadBootstrap):
        def get(self, key: str) -> bytes | None:
            raise RuntimeError("the server has ended")

    said = Said(Ended(0, 2, Board()))
    mine = said.digest("`allreduce_ring` on 4 bytes of float32, sum", "")
    error = different_calls(0, 1, 0, (said.known(mine), None), said)
    assert "rank 1 calls something else where rank 0 calls `allreduce_ring` on 4 bytes of float32, sum" in str(error)


def test_every_rank_has_a_bit() -> None:
    """Up to the last rank of a group, and for the place behind it that stands for a rank's own tiles."""
    for ranks in (1, 63, 64, 65, 512):
        notice = ordinary_notice(ranks)
        notice.mark_gone(ranks - 1)

        assert notice._words[1 + (ranks - 1) // 64] == 1 << (ranks - 1) % 64
        assert notice_bytes(ranks) >= 8 * (1 + ranks // 64 + 1)


def test_ranks_pass_it_on() -> None:
    """The exception can be sent to another process."""
    again = pickle.loads(pickle.dumps(PeerError(3, "is gone")))

    assert (again.rank, again.reason, str(again)) == (3, "is gone", "error[C965]: rank 3 is gone")


def test_differing() -> None:
    """The host sees who told of another call than the last, of those that have told of it."""
    words = np.zeros(desk_bytes(3) // 8, np.uint64)
    words[TELLING // 8] = 9
    mine, theirs, old = 9 << 32 | 5, 9 << 32 | 6, 8 << 32 | 7
    slot = [TOLD // 8 + rank * SLOTS + 9 % SLOTS for rank in range(3)]
    words[slot] = mine, old, mine
    assert differing(words.tobytes(), 0, 3) is None
    words[slot[1]] = theirs
    assert differing(words.tobytes(), 0, 3) == (1, 5, 6)
    assert differing(words.tobytes(), 1, 3) == (0, 6, 5)
