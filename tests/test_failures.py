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

import disagreement_processes  # noqa: E402 - after the check for torch
import every_step  # noqa: E402 - as above
from disagreement_cases import Case  # noqa: E402 - as above
from disagreements import series  # noqa: E402 - as above
from thread_ranks import outcomes  # noqa: E402 - as above

import commdsl  # noqa: E402 - as above
from commdsl import attention, ep, overlap  # noqa: E402 - as above
from commdsl.runtime import autograd, groups, heap  # noqa: E402 - as above
from commdsl.runtime.errors import BrokenGroupError, HeapError, PeerError, TensorError  # noqa: E402 - as above
from commdsl.runtime.joining import Joining  # noqa: E402 - as above
from commdsl.runtime.work import HostWork  # noqa: E402 - as above

RING = "allreduce_ring"
RING_TEXT = every_step.TEXT


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMDSL_TIMEOUT", "60")


def on_ranks(names: tuple[str, ...], work: Callable[[int], Any]) -> list[Any]:
    return outcomes(len(names), work, seconds=30)


def test_disagreements() -> None:
    """Of thirty drawn disagreements and injected errors none ends by a time-out: all ranks raise, with the reason."""
    faults = [f"{one.fault}: {one.case.kind}, {one.errors}" for one in series(30, 3, 11) if one.fault]
    assert faults == []


def test_disagreements_of_processes() -> None:
    """So do all ranks that live where ranks are processes, of which some are killed, exit or raise on their own."""
    faults = [one.line for one in disagreement_processes.series(8, 3, 4) if one.fault]
    assert faults == []


def test_a_store_that_ends_before_a_first_call() -> None:
    """Where it was that of rank 0, which is killed, ranks that come to their first call say that it does not answer."""
    call = disagreement_processes.CALL
    case = Case("killed", 3, (), ((call,),) * 3, 0, (0.0, 0.5, 0.5), is_waiting=True)
    with disagreement_processes.serving(3, "of rank 0") as ranks:
        found = ranks.run(case)
    assert found.fault == "", found.line
    assert all(isinstance(one, commdsl.RendezvousError) for one in found.errors[1:]), found.line


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # steps of destructors, too
def test_an_error_at_any_step() -> None:
    """A rank that raises at a step of a first call, a later one, one in place or `load` leaves no other rank waiting.

    A sample of the steps: `python tests/disagreements.py --every-step` goes through all of them.
    """
    found = every_step.series(3, 6)
    assert [one.line for one in found if one.fault] == []
    assert {one.case.scene for one in found if any(one.errors)} >= every_step.CALLS.keys()


@pytest.mark.parametrize("is_first", [True, False])
def test_an_argument_that_one_rank_has_wrong(is_first: bool) -> None:
    """What the collectives themselves refuse is told to peers as what their ops refuse."""
    names = commdsl.threads(2)

    def work(rank: int) -> Any:
        if not is_first:
            commdsl.all_reduce(torch.ones(24), group=names[rank])
        wrong: dict[str, Any] = {"async": True} if rank else {}
        return commdsl.all_reduce(torch.ones(24), group=names[rank], **wrong)

    found = on_ranks(names, work)
    assert isinstance(found[1], TypeError)
    assert isinstance(found[0], PeerError), found
    assert "rank 1 gave up: `all_reduce` raised" in str(found[0])
    assert "`async`" in found[0].reason
    own = "was to set up group" if is_first else "on 96 bytes of float32, sum"
    assert own in str(found[0])

    found = on_ranks(names, lambda rank: commdsl.all_reduce_([] if rank else torch.ones(24), group=names[rank]))
    assert isinstance(found[1], BrokenGroupError | TensorError)
    assert isinstance(found[0], BrokenGroupError), found


def test_an_end_of_a_group_that_is_never_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between the making of a rank's end of a group and its first step is told as one within it."""
    names, opened = commdsl.threads(2), Joining.open

    def interrupted(self: Joining) -> None:
        if self.rank == 1:
            raise KeyError("not opened")
        opened(self)

    monkeypatch.setattr(Joining, "open", interrupted)
    found = on_ranks(names, lambda rank: commdsl.load(RING, ranks=2)(torch.ones(24), group=names[rank]))
    assert isinstance(found[1], KeyError)
    assert isinstance(found[0], PeerError), found
    assert "not opened" in found[0].reason
    monkeypatch.undo()
    monkeypatch.setenv("COMMDSL_TIMEOUT", "60")
    on_ranks(names, lambda rank: commdsl.reset(names[rank]))
    total = on_ranks(names, lambda rank: commdsl.load(RING, ranks=2)(torch.ones(24), group=names[rank]))
    assert all(torch.equal(one, torch.full((24,), 2.0)) for one in total), total


def test_a_rank_that_raises_when_its_peers_have_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """They return the right result, and their next call raises with the reason."""
    names, op = commdsl.threads(3), commdsl.load(RING, ranks=3)
    on_ranks(names, lambda rank: op(torch.ones(24), group=names[rank]))
    comm = groups.of(names[1], torch.device("cpu"))

    def failing() -> None:
        raise ArithmeticError("after the kernel")

    monkeypatch.setattr(comm, "check", failing)
    found = on_ranks(names, lambda rank: op(torch.ones(24), group=names[rank]))
    assert isinstance(found[1], ArithmeticError)
    assert all(torch.equal(found[rank], torch.full((24,), 3.0)) for rank in (0, 2))
    later = on_ranks(names, lambda rank: None if rank == 1 else op(torch.ones(24), group=names[rank]))
    for rank in (0, 2):
        assert isinstance(later[rank], PeerError)
        assert (later[rank].rank, "after the kernel" in later[rank].reason) == (1, True)
        assert f"the last call of rank {rank}: `{RING}` on 96 bytes of float32, sum" in str(later[rank])


def test_a_load_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays in torch's table of operators: the same load succeeds afterwards."""

    def failing(*arguments: Any) -> None:
        raise ArithmeticError

    text = {"half_way.comm": RING_TEXT.replace("schedule allreduce_ring", "schedule half_way")}
    monkeypatch.setattr(autograd, "register", failing)
    with pytest.raises(ArithmeticError):
        commdsl.load(text, ranks=2)
    monkeypatch.undo()
    monkeypatch.setenv("COMMDSL_TIMEOUT", "60")
    names, op = commdsl.threads(2), commdsl.load(text, ranks=2)
    found = on_ranks(names, lambda rank: torch.ops.commdsl.half_way(torch.ones(24), names[rank]))
    assert op.name == "half_way"
    assert all(torch.equal(one, torch.full((24,), 2.0)) for one in found)


def test_a_work_that_is_made_in_part() -> None:
    """An error in its constructor is not followed by another one in its destructor."""
    HostWork.__new__(HostWork).__del__()


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
        assert f"the last call of rank {rank}: `{RING}` on 96 bytes of float32, sum" in str(found[rank])
    on_ranks(names, lambda rank: commdsl.reset(names[rank]))
    total = on_ranks(names, lambda rank: op(torch.ones(24), group=names[rank]))
    assert all(torch.equal(one, torch.full((24,), 3.0)) for one in total)


def test_a_reset_after_a_first_call_that_one_rank_refuses() -> None:
    """It is over for that rank, too, which had set nothing up: the next call is of all ranks, and right."""
    names, op = commdsl.threads(2), commdsl.load(RING, ranks=2)
    wrong, x = torch.ones(24, dtype=torch.complex64), torch.ones(24)
    for _ in range(2):
        found = on_ranks(names, lambda rank: op(wrong if rank else x, group=names[rank]))
        assert [type(one) for one in found] == [PeerError, TensorError]
        on_ranks(names, lambda rank: commdsl.reset(names[rank]))
    total = on_ranks(names, lambda rank: op(x, group=names[rank]))
    assert all(torch.equal(one, torch.full((24,), 2.0)) for one in total), total


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


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("name", ["all_gather_matmul", "matmul_all_reduce", "all_reduce_rms_norm", "attention"])
def test_a_layer_that_one_rank_refuses(name: str, is_first: bool) -> None:
    """Peers hear why, as of a collective: in a first call of the group and in a later one."""
    names, x, rows = commdsl.threads(2), torch.ones(4, 8), torch.ones(1, 4, 2, 8)

    def call(group: str, is_wrong: bool) -> Any:
        match name:
            case "all_reduce_rms_norm":
                return overlap.all_reduce_rms_norm(x, x, torch.ones(7 if is_wrong else 8), group=group)
            case "attention":
                return attention.attention(torch.ones(1, 4, 3, 8) if is_wrong else rows, rows, rows, group=group)
        return getattr(overlap, name)(x, torch.ones(4, 7 if is_wrong else 8), group=group)

    def work(rank: int) -> Any:
        if not is_first:
            call(names[rank], is_wrong=False)
        return call(names[rank], is_wrong=rank == 1)

    found = on_ranks(names, work)
    assert isinstance(found[1], TensorError), found
    assert isinstance(found[0], PeerError), found
    assert f"rank 1 gave up: `{name}` raised" in str(found[0])


def test_a_preparation_that_one_rank_refuses() -> None:
    """`prepare` and a profile are calls as others are: peers hear why one of them was not made."""
    names, op = commdsl.threads(2), commdsl.load(RING, ranks=2)

    def prepared(rank: int) -> Any:
        dtype = "float32" if rank else torch.float32
        return commdsl.prepare(["all_reduce"], 64, (dtype,), group=names[rank])  # type: ignore[arg-type]

    def profiled(rank: int) -> Any:
        return op.profiled(torch.ones(24), group=names[rank], op="none" if rank else "sum")

    for what, work in (("prepare", prepared), (f"{RING}.profiled", profiled)):
        found = on_ranks(names, work)
        assert isinstance(found[1], commdsl.Error), found
        assert isinstance(found[0], PeerError), found
        assert f"rank 1 gave up: `{what}` raised" in str(found[0])
        on_ranks(names, lambda rank: commdsl.reset(names[rank]))
