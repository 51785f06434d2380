"""Everything that a README quotes of GPUs, measured on the GPUs of this machine, one run after another:

    python benchmarks/all.py [--seconds 480] [--only collectives,dispatch] [--logs FOLDER] [--commit HASH]

On 4 GPUs what READMEs say of 4 and of 2, on 2 what they say of 2; runs on 2 of 4 GPUs go two at a time, on GPUs of
their own. Each writes its file under measured/, named after the kind of GPU; afterwards benchmarks/tables.py writes the
READMEs. A run that has no time left is not begun, and one that takes too long is ended. The last lines are a short
table: what ran, how long, how it ended. Exit code 1: something failed or was left out. Does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.record import MEASURED, ROOT, RecordError, commit_here
from benchmarks.report import grid

START_UP = 20.0
"""Seconds that a run takes beside its own budget: processes, torch, what is built."""


@dataclass(frozen=True)
class Run:
    """One file: the benchmark that writes it, on how many GPUs, and the seconds that it is given."""

    name: str
    ranks: int
    words: tuple[str, ...]
    seconds: float
    takes_budget: bool = True

    def file(self, gpu: str) -> str:
        return f"{self.name}_{gpu}_x{self.ranks}"

    def command(self, gpu: str, commit: str, seconds: float) -> list[str]:
        """`seconds` is what is left: a run that gets less than it wants leaves rows out, and says which."""
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.ranks)]
        budget = ["--time-budget", f"{min(self.seconds, seconds):.0f}"] if self.takes_budget else []
        script, *more = self.words
        return [*launch, f"benchmarks/{script}", *more, *budget, "--save", self.file(gpu), "--commit", commit]


ONE_SIZE = ("--collectives", "all_reduce", "--sizes", "1K")
RUNS = (
    Run("collectives", 4, ("collectives.py",), 100),
    Run("dispatch", 4, ("dispatch.py",), 70),
    Run("attention", 4, ("attention.py",), 150),
    Run("experts", 4, ("experts.py",), 120),
    Run("sms", 4, ("collectives.py", "--sms", "16,32,64", "--no-peers", "--no-limit"), 25),
    Run("host", 4, ("collectives.py", "--host"), 10),
    Run("lengths", 4, ("collectives.py", *ONE_SIZE, "--calls", "6,12,24,48,96"), 10),
    Run("dispatch_documents", 4, ("dispatch.py", "--rows", "8K,32K", "--shards", "128", "--documents", "8"), 15),
    Run("documents", 4, ("documents.py",), 70),
    Run("collectives", 2, ("collectives.py",), 70),
    Run("attention", 2, ("attention.py",), 120),
    Run("overlap", 2, ("overlap.py",), 60),
    Run("products", 2, ("products.py",), 75),
    Run("transformer", 2, ("transformer.py", "--tokens", "8192", "2048"), 70),
    Run("rms_norm", 2, ("rms_norm.py",), 25),
    Run("compressed", 2, ("compressed.py", "--batches", "8"), 25),
    Run("uneven", 2, ("uneven.py", "--batches", "8"), 25),
    Run("visits", 2, ("visits.py",), 60),
    Run("dispatch", 2, ("dispatch.py",), 50),
    Run("documents", 2, ("documents.py", "--seeds", "7,29,58"), 60),  # batches that lie unevenly on two ranks
)


@dataclass(frozen=True)
class Outcome:
    run: Run
    seconds: float
    status: str

    def cells(self, gpu: str) -> list[str]:
        return [self.run.file(gpu), f"{self.seconds:.0f}", self.status]


def gpus() -> tuple[int, str]:
    """How many this machine has, and of which kind in one word: `h200`."""
    try:
        told = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        sys.exit("no GPU that nvidia-smi tells of; benchmarks/planner.py needs none")
    names = re.findall(r"^GPU \d+: (.*?) \(UUID", told, re.MULTILINE)
    word = re.sub(r"\W+", "_", names[0].removeprefix("NVIDIA ").split()[0].lower()) if names else ""
    return len(names), word


def execute(run: Run, gpu: str, lane: Lane, options: argparse.Namespace) -> Outcome:
    """One run; an older file of the same name does not stand in for its own."""
    left = lane.deadline - time.monotonic()
    if left < run.seconds / 2 + START_UP:  # half of what it wants gives half of its rows
        return Outcome(run, 0.0, "no time left")
    path, log = MEASURED / f"{run.file(gpu)}.csv", options.logs / f"{run.file(gpu)}.log"
    before = path.stat().st_mtime_ns if path.is_file() else 0
    begin = time.monotonic()
    print(f"{run.file(gpu)}: {left:.0f} s left, what it says is in {log}", flush=True)
    with log.open("w", encoding="utf-8") as file:
        status = _ended(run.command(gpu, options.commit, left - START_UP), lane, left, file)
    if not path.is_file() or path.stat().st_mtime_ns == before:
        status += ", no file"
    if status != "ok":
        print(f"{run.file(gpu)}: {status}\n{log.read_text(encoding='utf-8')[-2000:]}", flush=True)
    return Outcome(run, time.monotonic() - begin, status)


def _ended(command: list[str], lane: Lane, seconds: float, log: TextIO) -> str:
    """How a command ended; its processes are ended with it."""
    environment = os.environ | ({"CUDA_VISIBLE_DEVICES": lane.devices} if lane.devices else {})
    process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        code = process.wait(seconds)
        return "ok" if code == 0 else f"exit code {code}"
    except subprocess.TimeoutExpired:
        return "ended: too long"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Lane:
    """GPUs that are used side by side with others, as CUDA numbers them; all where there are none named."""

    deadline: float
    devices: str = ""


def measured(runs: Sequence[Run], have: int, gpu: str, options: argparse.Namespace) -> list[Outcome]:
    """Wide runs one after the other, then narrow ones, as many side by side as there are pairs of GPUs."""
    deadline = time.monotonic() + options.seconds
    found = [execute(run, gpu, Lane(deadline), options) for run in runs if run.ranks > have // 2]
    narrow = [run for run in runs if run.ranks <= have // 2]
    if narrow:
        width = max(run.ranks for run in narrow)
        free: queue.SimpleQueue[str] = queue.SimpleQueue()
        for first in range(0, have - width + 1, width):
            free.put(",".join(map(str, range(first, first + width))))

        def work(run: Run) -> Outcome:
            devices = free.get()
            try:
                return execute(run, gpu, Lane(deadline, devices), options)
            finally:
                free.put(devices)

        with ThreadPoolExecutor(free.qsize()) as pool:
            found += pool.map(work, narrow)
    return found


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = sorted({run.name for run in RUNS})
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything")
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, help=", ".join(names))
    parser.add_argument("--logs", type=Path, help="a folder for what the runs say; default: a temporary one")
    parser.add_argument("--commit", help="the commit of these sources, where git is not there to say so")
    options = parser.parse_args()
    if unknown := sorted(set(options.only) - set(names)):
        parser.error(f"`{unknown[0]}`: expected some of {', '.join(names)}")
    options.logs = options.logs or Path(tempfile.mkdtemp(prefix="commdsl-benchmarks-"))
    options.logs.mkdir(parents=True, exist_ok=True)
    try:
        options.commit = options.commit or commit_here()
    except RecordError as error:
        parser.error(str(error))
    return options


def main() -> int:
    options = options_of()
    have, gpu = gpus()
    outcomes = measured([run for run in RUNS if run.name in options.only and run.ranks <= have], have, gpu, options)
    print(f"\n{have} x {gpu}, commit {options.commit}")
    print(grid(("file", "seconds", "how it ended"), [outcome.cells(gpu) for outcome in outcomes]), flush=True)
    return int(any(outcome.status != "ok" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
