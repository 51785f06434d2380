"""One rank's knowledge is every rank's, soon and in words: errors before a call, set-ups that fail, ranks that end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import pytest

torch = pytest.importorskip("torch")

from disagreements import series  # noqa: E402 - after the check for torch
from thread_ranks import outcomes  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl import ep  # noqa: E402 - as above
from commdsl.runtime import heap  # noqa: E402 - as above
from commdsl.runtime.errors import BrokenGroupError, HeapError, PeerError, TensorError  # noqa: E402 - as above

RING = "allreduce_ring"


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMDSL_TIMEOUT", "60")


def on_ranks(names: tuple[str, ...], work: Callable[[int], Any]) -> list[Any]:
    return outcomes(len(names), work, seconds=30)


def test_disagreements() -> None:
    """Of sixty drawn disagreements and injected errors none ends by a time-out: all ranks raise, with the reason."""
    faults = [f"{one.fault}: {one.case.kind}, {one.errors}" for one in series(60, 3, 11) if one.fault]
    assert faults == []


@pytest.mark.parametrize("calls_before", [0, 2])
def test_a_call_that_one_rank_refuses(calls_before: int) -> None:
    """Its peers hear why, also in a first call; what all ranks refuse breaks nothing."""
    names, op = commdsl.threads(3), commdsl.load(RING, ranks=3)
    wrong = torch.ones(24, dtype=torch.complex64)

    def work(rank: int) -> Any:
        for _ in range(calls_before):
            op(torch.ones(24), group=names[rank])
        with pytest.raises(TensorError):
            op(wrong, group=names[rank])
        op(torch.ones(24), group=names[rank])
        return op(wrong if rank == 1 else torch.ones(24), group=names[rank])

    found = on_ranks(names, work)
    assert isinstance(found[1], TensorError)
    for rank in (0, 2):
        assert isinstance(found[rank], PeerError)
        assert found[rank].rank == 1
        assert "complex64" in found[rank].reason
    on_ranks(names, lambda rank: commdsl.reset(names[rank]))
    total = on_ranks(names, lambda rank: op(torch.ones(24), group=names[rank]))
    assert all(torch.equal(one, torch.full((24,), 3.0)) for one in total)


def test_a_group_whose_set_up_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks hear why, with a code; the next call says at once that the group is broken, and a reset mends it."""
    names, op, made = commdsl.threads(2), commdsl.load(RING, ranks=2), heap.Part

    def full(size: int, descriptor: int = -1) -> heap.Part:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(heap, "Part", full)
    found = on_ranks(names, lambda rank: op(torch.ones(24), group=names[rank]))
    assert any(isinstance(one, HeapError) and "Too many open files" in str(one) for one in found)
    assert all("Too many open files" in str(one) for one in found)
    monkeypatch.setattr(heap, "Part", made)
    again = on_ranks(names, lambda rank: op(torch.ones(24), group=names[rank]))
    assert all(isinstance(one, BrokenGroupError) and "Too many open files" in str(one) for one in again)
    on_ranks(names, lambda rank: commdsl.reset(names[rank]))
    total = on_ranks(names, lambda rank: op(torch.ones(24), group=names[rank]))
    assert all(torch.equal(one, torch.full((24,), 2.0)) for one in total)


def test_debug_on_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """COMMDSL_DEBUG on any rank has all of them compare."""
    names, op = commdsl.threads(2), commdsl.load(RING, ranks=2)

    def work(rank: int) -> Any:
        if rank:
            time.sleep(0.5)
            monkeypatch.delenv("COMMDSL_DEBUG", raising=False)
        return op(torch.ones(24), group=names[rank])

    monkeypatch.setenv("COMMDSL_DEBUG", "1")
    assert all(torch.equal(one, torch.full((24,), 2.0)) for one in on_ranks(names, work))
    other = on_ranks(names, lambda rank: op(torch.ones(24 + rank), group=names[rank]))
    assert all(isinstance(one, commdsl.AgreementError) and "test_failures.py" in str(one) for one in other)


def test_slow_ranks_agree() -> None:
    """A rank that is slow is no failure, whether the others wait in a set-up or in a call."""
    names, ops = commdsl.threads(3), [commdsl.load(name, ranks=3) for name in (RING, "allreduce_oneshot")]

    def work(rank: int) -> Any:
        for number in range(6):
            time.sleep(0.4 * ((rank + number) % 3))
            ops[number // 3](torch.ones(24), group=names[rank])

    assert on_ranks(names, work) == [None] * 3


def _ends_early(rank: int, folder: str, pipe: Any) -> None:
    store = torch.distributed.FileStore(f"{folder}/store", 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    op = commdsl.load(RING)
    torch.distributed.barrier()
    if rank == 1:
        time.sleep(0.3)
        os._exit(1)
    try:
        op(torch.ones(24))
    except PeerError as error:
        pipe.send((error.rank, error.reason))
    os._exit(0)


def test_a_rank_that_ends_before_the_first_set_up(tmp_path: Path) -> None:
    """It is named at once by a rank that waits for it, though they have set up nothing."""
    here, there = forked.context().Pipe()
    for rank in range(2):
        forked.process(_ends_early, rank, str(tmp_path), there)
    assert here.poll(120)  # the group's own time-out is half an hour
    rank, reason = here.recv()
    assert (rank, reason.startswith("is gone")) == (1, True)


@pytest.mark.parametrize("is_first", [True, False])
def test_experts_that_one_rank_refuses(is_first: bool) -> None:
    """A rank whose keys are of another type does not begin; the others, which have begun, hear of it."""
    names = commdsl.threads(2)

    def work(rank: int) -> Any:
        limits = ep.Limits(6, 3, 36, (16, 2), 16)
        experts = ep.Experts(limits, names[rank], "cpu", params={"E": 4})
        rows, keys = torch.ones(6, 4), torch.zeros(6, 3, dtype=torch.int32)
        given = rows, torch.zeros(6, 1).half()
        if not is_first:
            experts.dispatch(given, keys)
        return experts.dispatch(given, keys.long() if rank else keys)

    found = on_ranks(names, work)
    assert isinstance(found[1], TensorError), found
    assert isinstance(found[0], PeerError), found
    assert (found[0].rank, "int64" in found[0].reason) == (1, True)


def test_an_async_call_that_one_rank_refuses() -> None:
    """Errors of a call that is submitted come to peers in call order, behind those submitted before it."""
    names, op = commdsl.threads(2), commdsl.load(RING, ranks=2)
    wrong = torch.ones(24, dtype=torch.complex64)

    def work(rank: int) -> Any:
        first = op(torch.ones(24), group=names[rank], async_op=True)
        try:
            second = op(wrong if rank else torch.ones(24), group=names[rank], async_op=True)
        finally:
            assert torch.equal(first.wait(), torch.full((24,), 2.0))
        return second.wait()

    found = on_ranks(names, work)
    assert isinstance(found[1], TensorError), found
    assert isinstance(found[0], PeerError), found
    assert "complex64" in found[0].reason
