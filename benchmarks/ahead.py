"""Builds what a run on GPUs is going to load, on cores that are idle: programs, and the cubins of this rank.

Assumes the ranks share one cache. Does not say what fails: the run meets the same fault and does. The workers are
processes of this file, as they need no torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from commdsl.build import nvrtc
from commdsl.build.emit import defines
from commdsl.machine.config import from_environment
from commdsl.program.memory import Transport
from commdsl.runtime.program import Definition, program

MOST_WORKERS = 8


@dataclass(frozen=True)
class Job:
    """A schedule as it is loaded, and an element type it is called with."""

    path: str
    dtype: str
    tile: int | None = None


def build_ahead(jobs: Sequence[Job], rank: int, ranks: int, arch: str, seconds: float) -> None:
    """Returns when all is built, or the time is up."""
    workers = max(1, min((os.cpu_count() or 1) // ranks, MOST_WORKERS, len(jobs)))
    started = []
    for worker in range(workers):
        told = {"rank": rank, "ranks": ranks, "arch": arch, "jobs": [asdict(job) for job in jobs[worker::workers]]}
        command = [sys.executable, __file__, json.dumps(told)]
        started.append(subprocess.Popen(command, stderr=subprocess.DEVNULL))
    deadline = time.monotonic() + seconds
    for process in started:
        try:
            process.wait(max(deadline - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _work(told: dict[str, object]) -> None:
    config = from_environment()
    rank, ranks, arch, jobs = (told[name] for name in ("rank", "ranks", "arch", "jobs"))
    for job in (Job(**one) for one in jobs):  # type: ignore[attr-defined]
        tune = () if job.tile is None else (("tile", job.tile),)
        made = program(Definition(Path(job.path), None, (), None, tune), int(str(ranks)), Transport.PEER, config)
        nvrtc.build(made.emitted, defines(made.plan, job.dtype, "sum", int(str(rank))), config, str(arch))


if __name__ == "__main__":
    _work(json.loads(sys.argv[1]))
