"""Processes for tests, forked from a server that has imported torch and the runtime once: each begins in an instant.

Assumes Linux. What a process is given is its own: environment, arguments, streams. Does not say what ranks do.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing as mp
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

KNOWN = ["torch.distributed", "torch._dynamo", "torch._inductor.compile_fx", "numpy.ma", "commdsl.runtime.load"]
"""What the server imports, none of which starts a thread: `torch._dynamo` is what optimizers and traces begin with, and
Inductor what torch's checks of an op and its compiler go on with.
"""

ROOT = Path(__file__).parent.parent


def context() -> ForkServerContext:
    """Whose processes are forked; the first one of a worker waits for the server."""
    found = mp.get_context("forkserver")
    found.set_forkserver_preload(KNOWN)
    return found


def process(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Starts it with the environment of now: the server's is that of the test that came first."""
    started = context().Process(target=_run, args=(dict(os.environ), target, args), daemon=True)
    started.start()
    return started


def _run(environment: Mapping[str, str], target: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # what the server imported stays: a collection of garbage need not look at it again
    target(*args)


# --- programs on several ranks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """How a program ended, on the rank that ended worst, and what all ranks wrote."""

    returncode: int
    stdout: str
    stderr: str


def launched(ranks: int, program: str, *arguments: str, seconds: float = 240.0) -> Done:
    """Runs a file, or a module by its name, on so many ranks, which know of each other what torchrun would tell them.

    A rank that fails ends the others.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory(prefix="commdsl-ranks-") as folder:
        processes = [process(_rank, rank, ranks, store.port, Path(folder), program, arguments) for rank in range(ranks)]
        code = _ended(processes, time.monotonic() + seconds)
        out, err = ("".join(Path(folder, f"{rank}.{end}").read_text() for rank in range(ranks)) for end in (1, 2))
    return Done(code, out, err)


def _ended(processes: list[BaseProcess], end: float) -> int:
    waited = {one.sentinel: one for one in processes}
    code = 0
    while waited and code == 0:
        over = wait(list(waited), max(0.0, end - time.monotonic()))
        ended = [waited.pop(sentinel) for sentinel in over if isinstance(sentinel, int)]
        for one in ended:
            one.join()
        code = next((one.exitcode for one in ended if one.exitcode), 0) if ended else -1
    for one in waited.values():
        one.kill()
        one.join()
    return code


def _rank(rank: int, ranks: int, port: int, folder: Path, program: str, arguments: tuple[str, ...]) -> None:
    number, count = str(rank), str(ranks)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=count, LOCAL_WORLD_SIZE=count, GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    os.environ["TORCHELASTIC_RUN_ID"] = "tests"
    for stream in (1, 2):
        file = os.open(folder / f"{rank}.{stream}", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(file, stream)
        os.close(file)
    sys.argv[1:] = arguments
    try:
        if program.endswith(".py"):
            sys.argv[0] = program
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # as an interpreter that ends; a forked process would leave it out
