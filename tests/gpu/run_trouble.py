"""A rank in trouble, on GPUs: killed, interrupted, asleep; and calls of experts that go on without it. Starts its ranks
itself, as torchrun would end them all:

    python tests/gpu/run_trouble.py --ranks 4

More ranks than GPUs share them (COMMDSL_SHARE_GPUS=1). Each line says of a job whom the others named, after how long,
how long `shutdown` took, and what was left; a line that is not as it has to be ends in FAILED.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import trouble
from trouble import Said, Table

SETTLED = 1.0
"""Seconds after which a rank that waits is in its wait."""


def struck(
    job: trouble.Job, victim: int, strike: signal.Signals, moment: float, table: Table
) -> tuple[float, list[Said]]:
    """When the victim was struck, and what the ranks say that can."""
    with (
        tempfile.TemporaryDirectory() as folder,
        trouble.running(job, Path(folder), table) as ranks,
    ):
        time.sleep(moment)
        process, _ = ranks[victim]
        assert process.pid is not None
        at = time.monotonic()
        os.kill(process.pid, strike)
        silent = {1, victim} if strike == signal.SIGKILL else {1}
        return at, [trouble.heard(pipe, 60) for rank, (_, pipe) in enumerate(ranks) if rank not in silent]


def killed(job: trouble.Job, moment: float, table: Table) -> bool:
    """Rank 1 is killed: the others name it within 2 s, and are done at once."""
    at, found = struck(job, 1, signal.SIGKILL, moment, table)
    fine = all((said.error, said.peer) == ("PeerError", 1) and said.at - at < 2 for said in found)
    return told(f"{job.__name__}, rank 1 killed after {moment:.2f} s", at, found, fine)


def interrupted(job: trouble.Job, table: Table) -> bool:
    """Ctrl-C on rank 0: it raises within a second, the others learn of it."""
    at, (first, *others) = struck(job, 0, signal.SIGINT, SETTLED, table)
    fine = first.error == "KeyboardInterrupt" and first.at - at < 1
    fine = fine and all((said.error, said.peer) == ("PeerError", 0) for said in others)
    return told(f"{job.__name__}, Ctrl-C on rank 0", at, [first, *others], fine)


def went_on(moment: float, table: Table) -> bool:
    """Rank 1 is killed within calls of experts: the others make a group of those that live, whose calls are exact."""
    at, found = struck(trouble.GoesOn(1), 1, signal.SIGKILL, moment, table)
    ours = [replace(said, left=[one for one in said.left if "commdsl" in one]) for said in found]  # torch has a group
    what = f"goes on without rank 1, killed after {moment:.2f} s"
    return told(what, at, ours, not any(said.error for said in found))


def asleep(table: Table) -> bool:
    """Rank 1 comes after the time-out: all ranks raise, and after a reset all go on."""
    at = time.monotonic()
    with (
        tempfile.TemporaryDirectory() as folder,
        trouble.running(trouble.oversleeps, Path(folder), table) as ranks,
    ):
        found = [trouble.heard(pipe, 60) for _, pipe in ranks]
    fine = found[1].error == "PeerError" and any(said.error == "CommTimeout" for said in found)
    return told("oversleeps, rank 1", at, found, fine and all(said.error for said in found))


def told(what: str, at: float, found: list[Said], fine: bool) -> bool:
    """Prints the line of a job."""
    fine = fine and all(said.shutdown_seconds < 1 and not said.left for said in found)
    says = ", ".join(f"{said.rank}: {named(said)}" for said in found)
    latest = max(said.at - at for said in found)
    longest = max(said.shutdown_seconds for said in found)
    left = sorted({one for said in found for one in said.left})
    end = "ok" if fine else "FAILED"
    print(f"{what:50} {says}; {latest:.2f} s, shutdown {longest:.2f} s, left {left or 'nothing'}: {end}", flush=True)
    for said in found if not fine else ():
        print(f"--- rank {said.rank}\n{said.text}", flush=True)
    return fine


def named(said: Said) -> str:
    """The error of a rank, and whom it names."""
    return f"{said.error or 'nothing'}{f' {said.peer}' if said.peer >= 0 else ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--moments", type=int, default=20, help="of random kills")
    chosen = parser.parse_args()
    table = Table(chosen.ranks, chosen.device)
    jobs: list[Callable[[], bool]] = [
        *(lambda job=job: killed(job, SETTLED, table) for job in WAITS),
        *(
            lambda seed=seed: killed(trouble.calls, random.Random(seed).uniform(0.0, 1.5), table)
            for seed in range(chosen.moments)
        ),
        *(lambda job=job: interrupted(job, table) for job in WAITS),
        *(lambda seed=seed: went_on(random.Random(seed).uniform(0.0, 1.5), table) for seed in range(3)),
        lambda: asleep(Table(chosen.ranks, chosen.device, trouble.NAP / 2)),
    ]
    failed = sum(not job() for job in jobs)
    print(f"{len(jobs) - failed} passed, {failed} failed: {chosen.ranks} ranks on {chosen.device}", flush=True)
    sys.exit(failed > 0)


WAITS = (trouble.waits_in_setup, trouble.waits_in_call, trouble.waits_for_work)

if __name__ == "__main__":
    main()
