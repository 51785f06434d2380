"""The collectives that choose their schedule: four processes of a gloo group, and a call's way to its op."""

from __future__ import annotations

import multiprocessing as mp
import os
import timeit
import traceback
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

torch = pytest.importorskip("torch")

import collective_cases  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402
from commdsl.runtime import menu  # noqa: E402
from commdsl.runtime.errors import CaptureError  # noqa: E402

RANKS = 4
TIMEOUT = 60.0


def serve(rank: int, folder: str, pipe: Connection) -> None:
    """A rank: runs the cases it is told by name and answers with a traceback or nothing."""
    os.environ["COMMDSL_TIMEOUT"] = str(TIMEOUT)
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    while (name := pipe.recv()) is not None:
        try:
            getattr(collective_cases, name)()
            pipe.send("")
        except BaseException:
            pipe.send(traceback.format_exc(limit=-6))
    os._exit(0)  # gloo's teardown waits for ranks that may be gone


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    context = mp.get_context("spawn")
    folder = str(tmp_path_factory.mktemp("gloo"))
    pipes = [context.Pipe() for _ in range(RANKS)]
    processes = [context.Process(target=serve, args=(rank, folder, pipes[rank][1])) for rank in range(RANKS)]
    for process in processes:
        process.start()
    yield [here for here, _ in pipes]
    for here, _ in pipes:
        here.send(None)
    for process in processes:
        process.join(10)
        if process.is_alive():
            process.kill()


@pytest.mark.parametrize("name", [case.__name__ for case in collective_cases.CASES])
def test_processes(ranks: list[Connection], name: str) -> None:
    """What the case states holds on every rank."""
    for pipe in ranks:
        pipe.send(name)
    answers = []
    for rank, pipe in enumerate(ranks):
        answers.append(pipe.recv() if pipe.poll(90) else f"rank {rank} did not answer")
    failed = [f"rank {rank}:\n{answer}" for rank, answer in enumerate(answers) if answer]
    assert not failed, f"{len(failed)} of {RANKS} ranks failed\n{failed[0]}"


def test_choosing_is_quick() -> None:
    """The way from a call to its op takes a few microseconds at most, whatever there is to load before."""
    (name, _) = commdsl.threads(2)
    x = torch.zeros(1000)

    def choose() -> object:
        return menu.menu("all_reduce", menu.size(name), x.device, 0).op(x.nbytes)

    choose()
    assert min(timeit.repeat(choose, number=1000, repeat=5)) * 1000 < 5  # a busy machine is no fault


def test_capture_names_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """An op that a capture meets before it is set up is named, with the call that sets up what a size may choose."""

    class Captured:
        name = "allreduce_somehow"
        works_in_place = True

        def __call__(self, *_: object, **__: object) -> None:
            raise CaptureError("no workspace yet")

        in_place = __call__

        def op(self, nbytes: int) -> Captured:
            return self

    monkeypatch.setattr(menu, "menu", lambda *_: Captured())
    (name, _) = commdsl.threads(2)
    for call in (commdsl.all_reduce, commdsl.all_reduce_):
        with pytest.raises(CaptureError, match=r"4 KB runs `allreduce_somehow`.*prepare\(\['all_reduce'\], 4096"):
            call(torch.zeros(1024), group=name)


def test_choice_says_why() -> None:
    """A choice names its schedule, its tuning and the reason, and depends on nothing but what was said."""
    chosen = commdsl.choice("all_reduce", 2 << 20, 4, "NVIDIA Unheard-of")

    assert (chosen.schedule, dict(chosen.tune)) == ("allreduce_twoshot", {"protocol": "bulk"})
    assert str(chosen).endswith("no table for all_reduce on NVIDIA Unheard-of x4: the stated default up to 16 MB")
    assert chosen == commdsl.choice("all_reduce", 2 << 20, 4, "NVIDIA Unheard-of")
