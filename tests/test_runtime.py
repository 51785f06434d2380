"""Schedules as torch ops: four processes of a gloo group, threads of one process, and tracing with no group at all."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import gloo_ranks  # noqa: E402 - after the check for torch
import runtime_cases  # noqa: E402 - after the check for torch
from thread_ranks import at_once, in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402
from commdsl.runtime import communicator, groups, said  # noqa: E402
from commdsl.runtime.communicator import Communicator  # noqa: E402


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Connection]]:
    yield from gloo_ranks.started("runtime_cases", tmp_path_factory.mktemp("gloo"))


@pytest.mark.parametrize("name", [case.__name__ for case in runtime_cases.CASES])
def test_processes(ranks: list[Connection], name: str) -> None:
    """What the case states holds on every rank."""
    gloo_ranks.holds(ranks, name)


@pytest.mark.parametrize("nodes", ["", "0,0,1", "0,1,2"])
def test_threads_of_one_process(nodes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks may be threads: the same op, a group name for each; some or all of them far from each other."""
    monkeypatch.setenv("COMMDSL_NODES", nodes)
    op = commdsl.load("allreduce_ring", ranks=3)
    inputs = [torch.arange(50.0) * (rank + 1) for rank in range(3)]
    results = in_group(3, lambda rank, group: op(inputs[rank], group=group))
    assert all(isinstance(result, torch.Tensor) and torch.equal(result, sum(inputs)) for result in results)


def test_threads_of_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of every rank make a group's first call at once: one of them sets it up, and both have the sum."""
    make, made, names = groups._make, list[str](), commdsl.threads(2)

    def slow(name: str, member: groups._Member, device: torch.device) -> Communicator:
        made.append(name)
        time.sleep(0.05)  # the other thread comes meanwhile
        return make(name, member, device)

    monkeypatch.setattr(groups, "_make", slow)
    op = commdsl.load("allreduce_ring", ranks=2)
    sums = at_once(4, lambda number: op(torch.ones(50), group=names[number % 2]))
    assert sorted(made) == [*names]
    assert all(torch.equal(one, torch.full((50,), 2.0)) for one in sums)


def test_a_reset_waits_for_who_has_yet_to_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """However short the time-out: a rank that has waited in vain asks the others why before it raises, and resets."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", "0.3")
    for module in (said, communicator):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 1.0)
    op = commdsl.load("allreduce_ring", ranks=2)

    def work(rank: int, group: str) -> torch.Tensor:
        op(torch.ones(50), group=group)
        if rank == 0:
            with pytest.raises(commdsl.CommTimeout, match="rank 1 never entered"):
                op(torch.ones(50), group=group)
        commdsl.reset(group)
        return op(torch.ones(50), group=group)

    assert all(torch.equal(one, torch.full((50,), 2.0)) for one in in_group(2, work))


def test_shapes_without_a_group() -> None:
    """Tracing needs no process group: the number of ranks given to `load` stands in for it, symbolic sizes stay so."""
    commdsl.load("allgather_direct", ranks=6)
    from torch.fx.experimental.proxy_tensor import make_fx

    def gather(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.commdsl.allgather_direct(x, "no such group")

    traced = make_fx(gather, tracing_mode="symbolic")(torch.zeros(5, 2))
    node = next(node for node in traced.graph.nodes if "allgather" in str(node.target))
    shape = node.meta["val"].shape
    assert (shape[0].node.hint, shape[1].node.hint) == (30, 2)
    assert not isinstance(shape[0], int)


def test_no_group_is_an_error() -> None:
    """A call without a process group says what to do."""
    with pytest.raises(commdsl.runtime.errors.GroupError, match="init_process_group"):
        commdsl.load("allreduce_ring", ranks=2)(torch.zeros(3))


def test_other_text_under_one_name(tmp_path: Path) -> None:
    """A second schedule of a known name gets an op of its own."""
    text = (Path(__file__).parents[1] / "schedules/collectives/allgather_ring.comm").read_text()
    (tmp_path / "mine.comm").write_text(text + "# changed\n")
    first, second = commdsl.load("allgather_ring", ranks=2), commdsl.load(tmp_path / "mine.comm", ranks=2)
    assert first.name == "allgather_ring"
    assert second.name.startswith("allgather_ring_")
    assert commdsl.load("allgather_ring", ranks=2) is first


def test_warm_load_is_light() -> None:
    """A schedule that was compiled once is an op again without a parser, and in as many calls of ours as take 50 ms."""
    script = (
        "import sys, commdsl\n"
        "commdsl.load('allgather_ring', ranks=8)\n"
        "calls = []\n"
        "sys.setprofile(lambda frame, event, _: calls.append(frame.f_code.co_filename) if event == 'call' else None)\n"
        "commdsl.load('allreduce_ring', ranks=8)\n"
        "sys.setprofile(None)\n"
        "print('lark' in sys.modules, sum('commdsl' in name for name in calls))\n"
    )
    commdsl.load("allreduce_ring", ranks=8)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    parsed, calls = done.stdout.split()
    assert parsed == "False"
    assert int(calls) < 20_000


def test_import_is_light() -> None:
    """`import commdsl` imports none of what its parts need."""
    script = (
        "import sys, commdsl; print(sorted({'torch', 'cupy', 'nvshmem', 'lark', 'jinja2', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
