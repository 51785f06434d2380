"""Four processes of a gloo group that run cases by name: what they state has to hold on every rank.

Assumes a module of cases that processes can import. Does not know what the cases are.
"""

from __future__ import annotations

import importlib
import os
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path

import forked

RANKS = 4
TIMEOUT = 60.0


def serve(cases: str, rank: int, folder: Path, pipe: Connection) -> None:
    """A rank: runs the cases of a module that it is told by name and answers with a traceback or nothing."""
    import torch

    os.environ["COMMDSL_TIMEOUT"] = str(TIMEOUT)
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    # A rank whose case has failed is waited for no longer than a call is.
    patience = timedelta(seconds=TIMEOUT)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=patience)
    module = importlib.import_module(cases)
    while (name := pipe.recv()) is not None:
        try:
            getattr(module, name)()
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc(limit=-6))
    os._exit(0)  # gloo's teardown waits for ranks that may be gone


def started(cases: str, folder: Path) -> Iterator[list[Connection]]:
    """The ranks' ends, for a fixture: they are told to end when it is over."""
    pipes = [forked.context().Pipe() for _ in range(RANKS)]
    processes = [forked.process(serve, cases, rank, folder, pipes[rank][1]) for rank in range(RANKS)]
    yield [here for here, _ in pipes]
    for here, _ in pipes:
        here.send(None)
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()


def holds(ranks: list[Connection], name: str, patience: float = 90.0) -> None:
    """What the case states holds on every rank.

    A rank that fails first is shown first: those that wait for it fail later, and say less.
    """
    for pipe in ranks:
        pipe.send(name)
    failed: list[str] = []
    end, waited = time.monotonic() + patience, list(ranks)
    while waited and (told := wait(waited, max(0.0, end - time.monotonic()))):
        for pipe in told:
            waited.remove(pipe)
            if answer := pipe.recv():
                failed.append(f"rank {ranks.index(pipe)}:\n{answer}")
    silent = [str(ranks.index(pipe)) for pipe in waited]
    if silent:
        failed.append(f"no answer in {patience:.0f} s: rank {', '.join(silent)}")
    assert not failed, f"{len(failed)} of {RANKS} ranks failed\n" + "\n".join(failed[:2])
