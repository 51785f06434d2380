"""Runs drawn cases on processes: the ranks of a gloo group, each of which serves cases until one of them ends.

A rank ends as scripts do: it is killed before its first call, between two, at any step of one or while it waits in one;
it exits; or its script raises, in commdsl or not. Then the others have to name it, and new processes serve the next
case. In a case of a subgroup all ranks make a call of the default group afterwards, whose result has to be right.

Assumes Linux. Does not draw or judge: disagreement_cases.py does.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import forked
import torch
from disagreement_cases import (
    ENDS,
    NAMES,
    SECONDS,
    Call,
    Case,
    EndedError,
    Injection,
    Result,
    drawn_of_processes,
    fault,
    loaded,
)

import commdsl

STORES = ("file", "of another process", "of rank 0")
"""Where the store of the default group lives: it outlives any rank, or ends with rank 0."""

CALL = Call(NAMES[0], size=7)
"""The call of the default group, of a case in a subgroup."""

WAITING_SECONDS = 0.1
"""So long a rank that is killed while it waits has waited."""


class Ranks:
    """The processes of one default group."""

    def __init__(self, count: int, store: str, folder: str) -> None:
        self.store = store
        self._server = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        pipes = [forked.context().Pipe() for _ in range(count)]
        self.pipes = [here for here, _ in pipes]
        self.processes = [
            forked.process(_serve, rank, count, store, folder, there) for rank, (_, there) in enumerate(pipes)
        ]
        for _, there in pipes:
            there.close()  # so that the end of a process is the end of its pipe
        port = self._server.port if store != "of rank 0" else self.pipes[0].recv()
        for pipe in self.pipes[store == "of rank 0" :]:
            pipe.send(port)

    def run(self, case: Case) -> Result:
        """Run a case, which is over when all ranks have said how it ended for them, or ended themselves."""
        for pipe in self.pipes:
            pipe.send(case)
        errors, at, waited = dict[int, BaseException | None](), dict[int, float](), list(self.pipes)
        end, left = time.monotonic() + 3 * SECONDS, ""
        while waited and (told := wait(waited, max(0.0, end - time.monotonic()))):
            for pipe in told:
                assert isinstance(pipe, Connection)
                waited.remove(pipe)
                rank = self.pipes.index(pipe)
                try:
                    errors[rank], at[rank], more = pipe.recv()
                    left = left or more
                except EOFError:
                    errors[rank], at[rank] = EndedError(f"rank {rank} ended"), time.monotonic()
        if waited:
            left = "a rank hangs"
        members = case.members or tuple(range(len(self.pipes)))
        found = tuple(errors.get(rank) for rank in members)
        times = [at[rank] for rank in members if rank in at]
        return Result(case, found, max(times) - min(times), left or fault(case, found))

    def end(self) -> None:
        """End those that have not ended."""
        for process in self.processes:
            process.kill()
            process.join()


@contextmanager
def serving(ranks: int, store: str) -> Iterator[Ranks]:
    with tempfile.TemporaryDirectory(prefix="commdsl-ranks-") as folder:
        found = Ranks(ranks, store, folder)
        try:
            yield found
        finally:
            found.end()


def series(count: int, ranks: int, seed: int, budget: float = float("inf")) -> list[Result]:
    """Run so many cases on processes, or as many as there is time for."""
    from disagreements import patient, warm

    with patient():
        length, end = warm(ranks), time.monotonic() + budget
        warm(2)  # of subgroups
        cases = (drawn_of_processes(random.Random(f"{seed}/{number}"), ranks, length) for number in range(count))
        found: list[Result] = []
        while len(found) < count and time.monotonic() < end:
            with serving(ranks, random.Random(f"{seed}/{len(found)}/store").choice(STORES)) as serve:
                for case in cases:
                    found.append(serve.run(case))
                    if case.kind in ENDS or found[-1].fault or time.monotonic() > end:
                        break
        return found


# --- a rank -----------------------------------------------------------------------------------------------------------


def _serve(rank: int, ranks: int, store: str, folder: str, pipe: Connection) -> None:
    with open(f"{folder}/{rank}", "wb") as file:  # of ranks that are meant to end, and of torch, whose store ends
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    distributed, patience = torch.distributed, timedelta(seconds=2 * SECONDS)
    if store == "file":
        pipe.recv()
        found: Any = distributed.FileStore(f"{folder}/store", ranks)
    elif store == "of rank 0" and rank == 0:
        found = distributed.TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        pipe.send(found.port)
    else:
        found = distributed.TCPStore("127.0.0.1", pipe.recv(), is_master=False)
    distributed.init_process_group("gloo", store=found, rank=rank, world_size=ranks, timeout=patience)
    for name in NAMES:
        for size in (2, ranks):
            loaded(name, size)
    group: Any = None
    try:
        while True:
            case = pipe.recv()
            if isinstance(group, torch.distributed.ProcessGroup):  # only now are all ranks done with it
                commdsl.release(group)
                distributed.destroy_process_group(group)
            group = distributed.new_group(list(case.members or range(ranks)))
            pipe.send(_run(case, rank, ranks, group))
    except EOFError:
        pass  # the one that draws the cases has ended
    finally:
        atexit._run_exitfuncs()  # as an interpreter that ends; a forked process would leave it out


def _run(case: Case, rank: int, ranks: int, group: Any) -> tuple[BaseException | None, float, str]:
    """Return what a rank raised, when, and what else is wrong."""
    members = case.members or tuple(range(ranks))
    error: BaseException | None = None
    more, at = "", time.monotonic()
    if rank in members:
        own = members.index(rank)
        if own == case.debug:
            os.environ["COMMDSL_DEBUG"] = "1"
        try:
            _calls(case, own, group)
        except BaseException as found:
            if own == case.odd and case.kind in ENDS:
                raise  # the end of the script
            error = found
        finally:
            sys.setprofile(None)
            os.environ.pop("COMMDSL_DEBUG", None)
        at = time.monotonic()
    if case.scene == "subgroup":  # which is nothing to the default group
        try:
            CALL(None, ranks)
        except Exception as found:
            more = f"the default group fails, too: {type(found).__name__}: {found}"
    return error, at, more


def _calls(case: Case, own: int, group: Any) -> None:
    for call in case.before:
        call(group, case.ranks)
    time.sleep(case.naps[own])
    kill = partial(os.kill, os.getpid(), signal.SIGKILL)
    is_odd = own == case.odd
    if is_odd:
        match case.kind:
            case "exits":
                sys.exit(3)
            case "raises":
                raise ValueError("in the user's script")
            case "load raises":
                sys.setprofile(Injection(case.step))
                commdsl.load(NAMES[2], ranks=case.ranks, tune={"lanes": 3})
                sys.setprofile(None)
                raise ValueError("in the user's script")
            case "killed" if case.is_waiting:
                threading.Timer(WAITING_SECONDS, kill).start()
            case "killed" if case.step:
                sys.setprofile(Injection(case.step, kill))
            case "killed":
                kill()
            case "injected":
                sys.setprofile(Injection(case.step))
    for call in case.calls[own]:
        call(group, case.ranks)
    sys.setprofile(None)
    if is_odd and case.kind == "killed":
        kill()
    call(group, case.ranks)  # a rank that waits for nobody learns it in its next call
