"""A rank in trouble is named by the others at once, `shutdown` does not wait for it, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

import trouble


def killed(job: trouble.Job, seconds: float, folder: Path) -> list[trouble.Said]:
    """What the others say when rank 1 is killed so long after the job began: its name, soon, and they are done."""
    memory = set(os.listdir("/dev/shm"))
    with trouble.running(job, folder) as ranks:
        time.sleep(seconds)
        process, _ = ranks[1]
        assert process.pid is not None
        at = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        found = [trouble.heard(pipe, 5) for rank, (_, pipe) in enumerate(ranks) if rank != 1]
        for said in found:
            assert (said.error, said.peer) == ("PeerError", 1), said.text
            assert said.at - at < 2
            assert said.shutdown_seconds < 0.5
            assert said.left == []
        assert set(os.listdir("/dev/shm")) <= memory
    return found


def test_killed_in_setup(tmp_path: Path) -> None:
    """Ranks that wait in a set-up for one that is killed do not wait for the time-out."""
    for said in killed(trouble.waits_in_setup, 0.3, tmp_path):
        assert "rank 1 is gone" in said.text
        assert "to set up" in said.text
