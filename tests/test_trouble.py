"""A rank in trouble is named by the others at once, `shutdown` does not wait for it, and nothing is left of it."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import trouble


def killed(job: trouble.Job, seconds: float, folder: Path) -> list[trouble.Said]:
    """What the others say when rank 1 is killed so long after the job began: its name; and they are done. Neither they
    nor their `shutdown` wait for the time-out, which is longer than a test may take.
    """
    with trouble.running(job, folder) as ranks:
        time.sleep(seconds)
        process, _ = ranks[1]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        found = [trouble.heard(pipe) for rank, (_, pipe) in enumerate(ranks) if rank != 1]
        for said in found:
            assert (said.error, said.peer) == ("PeerError", 1), said.text
            assert said.left == []
        assert not [name for name in os.listdir("/dev/shm") if "commdsl" in name]
    return found


def test_killed_in_setup(tmp_path: Path) -> None:
    """Ranks that wait in a set-up for one that is killed do not wait for the time-out."""
    for said in killed(trouble.waits_in_setup, 0.3, tmp_path):
        assert "rank 1 is gone" in said.text
        told = said.text.rstrip().endswith("waited for it")  # another rank saw it first, and said so
        assert told or "to set up" in said.text


@pytest.mark.parametrize("job", [trouble.waits_in_call, trouble.waits_for_work], ids=lambda job: job.__name__)
def test_killed_before_a_call(job: trouble.Job, tmp_path: Path) -> None:
    """Nor do ranks that wait in a kernel, in their own thread or in another."""
    for said in killed(job, 0.3, tmp_path):
        assert "rank 1 is gone" in said.text


@pytest.mark.sweep
@pytest.mark.parametrize("moment", range(20))
def test_killed_at_any_moment(moment: int, tmp_path: Path) -> None:
    """In a call, between two, in a set-up, while a call runs on another thread: the others name it, and are done."""
    killed(trouble.calls, random.Random(moment).uniform(0.0, 1.5), tmp_path)


@pytest.mark.parametrize("where", ["between its halves", "before its way back"])
def test_the_living_go_on(where: str, tmp_path: Path) -> None:
    """Of four ranks two end, one after the other, each within calls of experts: those that live are told which, and
    their calls are exact; what went to experts of ranks that are gone is dropped, and counted.
    """
    with trouble.running(trouble.GoesOn(2, where), tmp_path, trouble.Table(ranks=4)) as ranks:
        for rank in (0, 2):
            said = trouble.heard(ranks[rank][1])
            assert said.error == "", said.text


def test_the_living_go_on_as_the_page_says(tmp_path: Path) -> None:
    """The lines of the README, where a rank is gone."""
    with trouble.running(trouble.reads_the_page, tmp_path) as ranks:
        for rank in (0, 2):
            said = trouble.heard(ranks[rank][1])
            assert said.error == "", said.text


@pytest.mark.sweep
@pytest.mark.parametrize("moment", range(2))
def test_the_living_go_on_at_any_moment(moment: int, tmp_path: Path) -> None:
    """A rank is killed, whatever it does, also while experts are set up."""
    with trouble.running(trouble.GoesOn(1), tmp_path) as ranks:
        time.sleep(random.Random(moment).uniform(0.0, 1.0))
        process, _ = ranks[1]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        for rank in (0, 2):
            said = trouble.heard(ranks[rank][1])
            assert said.error == "", said.text


def test_a_rank_that_is_done(tmp_path: Path) -> None:
    """A rank that made all its calls may go: no call of the others fails for it."""
    with trouble.running(trouble.leaves, tmp_path) as ranks:
        for rank in (0, 2):
            said = trouble.heard(ranks[rank][1])
            assert (said.error, said.left) == ("", []), said.text


def test_asleep(tmp_path: Path) -> None:
    """A rank that comes after the time-out finds no call that succeeds: it raises, too, and after a reset all go on."""
    table = trouble.Table(patience=trouble.NAP / 2)
    with trouble.running(trouble.oversleeps, tmp_path, table) as ranks:
        found = [trouble.heard(pipe) for _, pipe in ranks]
    errors = {said.rank: said.error for said in found}
    assert "CommTimeout" in (errors[0], errors[2]), found[0].text
    assert errors[1] == "PeerError", found[1].text
    assert all("never entered the call" in said.text for said in found if said.error == "CommTimeout")


@pytest.mark.parametrize("job", [trouble.waits_in_setup, trouble.waits_in_call, trouble.waits_for_work])
def test_interrupted(job: trouble.Job, tmp_path: Path) -> None:
    """Ctrl-C ends a rank's wait, wherever it waits, before the time-out; the others learn who gave up."""
    with trouble.running(job, tmp_path) as ranks:
        time.sleep(0.7)
        process, pipe = ranks[0]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGINT)
        first = trouble.heard(pipe)
        assert first.error == "KeyboardInterrupt", first.text
        other = trouble.heard(ranks[2][1])
        assert (other.error, other.peer) == ("PeerError", 0), other.text

        assert (first.left, other.left) == ([], [])
