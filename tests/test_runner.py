"""How a run on GPUs ends, whatever becomes of it: the verdict last, on rank 0 alone, and an exit code that says it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[1]

PROGRAM = """
import argparse, os, sys, time
import runner, torch

def run(rank, outcome):
    def make():
        if outcome == "no group":
            raise OSError("nobody there")
        return runner.Parts(rank, 2, torch.device("cpu"), None, argparse.Namespace(seed=1))

    def work(one):
        one.place = "part 3"
        if outcome == "failed":
            raise runner.PartFailedError("rank 1: late")
        if outcome == "raised":
            raise KeyError("mine")
        if outcome == "hung":
            time.sleep(60)
        return outcome == "right", "8 calls"

    runner.end_of(make, work, lambda one: "asked" if one.is_hung else "table", 1.0, 20.0)

time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds if seconds > 5 else 0)
for outcome in ("right", "wrong", "failed", "raised", "no group", "hung"):
    for rank in (0, 1):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            run(rank, outcome)
        print(f"{outcome}, rank {rank}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""

WANTED = """
table
8 calls
right, rank 0: 0
right, rank 1: 0

table
8 calls
wrong, rank 0: 1
wrong, rank 1: 1

table
FAILED on 2 x processors, torch VERSION, seed 1
rank 1: late
failed, rank 0: 1
failed, rank 1: 1

table
an exception ended the run, in: part 3
raised, rank 0: 1
raised, rank 1: 1
no group, rank 0: 1
no group, rank 1: 1

asked
not over after 1 s, in: part 3
hung, rank 0: 1
hung, rank 1: 1
"""


def test_every_end_is_told() -> None:
    """Right, wrong, failed, raised, without a group, hung: the last words of rank 0, and both ranks' exit codes."""
    import torch

    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "gpu")))
    environment = {**os.environ, "PYTHONPATH": path, "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=60, check=True
    )

    assert done.stdout == WANTED.replace("VERSION", torch.__version__)
    assert done.stderr.count("KeyError: 'mine'") == 2
    assert done.stderr.count("OSError: nobody there") == 2
    assert "rank 1: part 3" in done.stderr


def test_no_time_is_no_success() -> None:
    """A run that had no time for all of its parts says so last, and its exit code is that of a failure."""
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    words = ["--device", "cpu", "--only", "placement", "--time-budget", "15"]
    program = [sys.executable, ROOT / "tests" / "gpu" / "run_document.py", *words]
    done = subprocess.run(program, capture_output=True, text=True, env={**os.environ, **alone}, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stdout.rstrip().endswith("transport peer; no time left for 1 of 1 parts")


def test_what_differs_first_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each thing that is compared the first place that is not as it must be, with bits and what stands beside it."""
    import argparse

    import torch

    monkeypatch.syspath_prepend(ROOT / "tests" / "gpu")
    from runner import Parts

    run = Parts(0, 1, torch.device("cpu"), None, argparse.Namespace(seed=1))
    wanted = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float16)
    found = wanted.clone()
    assert run.same("rows", found, wanted)
    assert run.first_difference() == ""
    found[1] = 5
    assert not run.same("rows", found, wanted, scale=2 * wanted)
    assert run.same("sums", found, wanted, near=torch.tensor(2.0))
    assert not run.same("sums", found, wanted, near=torch.tensor(1.5))
    assert not run.same("sums", found / 0, wanted, near=torch.tensor(1.5))  # a later one is not told
    assert not run.same("padding", torch.tensor([0, 7]), 0)
    assert run.first_difference() == (
        "rows [1, 0]: is 5 (0x4500), must be 3 (0x4200), scale 6 (0x4600); "
        "sums [1, 0]: is 5 (0x4500), must be 3 (0x4200); padding [1]: is 7, must be 0"
    )


MEASURING = """
import os, sys, time
from benchmarks.ending import end_of

def run(rank, outcome):
    os.environ["RANK"] = str(rank)

    def work():
        if outcome == "raised":
            raise KeyError("mine")
        if outcome == "hung":
            time.sleep(60)
        return int(outcome == "wrong"), outcome

    end_of(work, lambda why: print(f"table: {why}"), 0.5, 0.5)

time.sleep = lambda seconds, sleep=time.sleep: sleep(seconds if seconds > 5 else 0)
for outcome in ("right", "wrong", "raised", "hung"):
    for rank in (0, 1):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            run(rank, outcome)
        print(f"{outcome}, rank {rank}: {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}")
"""

MEASURED = """
table: right
right, rank 0: 0
right, rank 1: 0
table: wrong
wrong, rank 0: 1
wrong, rank 1: 1
table: an exception ended the run
raised, rank 0: 1
raised, rank 1: 1
table: the run hung and was ended
hung, rank 0: 1
hung, rank 1: 1
"""


def test_every_end_of_a_benchmark_is_told() -> None:
    """As of runs: the last words of rank 0, once, and both ranks' exit codes."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURING],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.stdout.strip() == MEASURED.strip(), done.stderr
