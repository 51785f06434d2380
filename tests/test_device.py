"""The GPU runtime over a fake GPU: what is set up, what is refused, what a time-out does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from fake_gpu import FakeGpu  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402
from commdsl.config import from_environment  # noqa: E402
from commdsl.plan import Transport  # noqa: E402
from commdsl.runtime import op as runtime_op  # noqa: E402
from commdsl.runtime.bootstrap import Board, ThreadBootstrap  # noqa: E402
from commdsl.runtime.device import DeviceCommunicator  # noqa: E402
from commdsl.runtime.errors import BrokenGroupError, CaptureError, DeviceError, GroupError  # noqa: E402

RANKS = 2


class Rank:
    """A thread with a communicator, and calls of an all-reduce on CPU memory that stands for the GPU's."""

    def __init__(self, gpu: FakeGpu, rank: int, board: Board, transport: str) -> None:
        self.gpu = gpu
        self.rank = rank
        config = replace(from_environment(), transport=transport, timeout=2.0)
        bootstrap = ThreadBootstrap(rank, RANKS, board)
        self.comm = DeviceCommunicator("group", bootstrap, config, torch.device("cuda", 0))
        self.program = commdsl.load("allreduce_ring", ranks=RANKS).program(RANKS, self.comm.transport)
        self.x = torch.full((1000,), float(rank + 1))

    def call(self, dtype: str = "float32") -> torch.Tensor:
        y = torch.full_like(self.x, -1)
        runtime_op._call(self.comm, self.program, [self.x.data_ptr(), y.data_ptr()], y.nbytes, dtype, "sum")
        self.comm.check()
        return y


def run(gpu: FakeGpu, body: Callable[[Rank], None], transport: str = "peer") -> None:
    """`body` on every rank at once; raises the first failure."""
    board, failures = Board(), []

    def serve(rank: int) -> None:
        gpu.here.rank = rank
        try:
            body(Rank(gpu, rank, board, transport))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if failures:
        raise failures[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu(RANKS)
    made.install(monkeypatch)
    return made


@pytest.mark.parametrize("transport", ["peer", "nvshmem"])
def test_calls(gpu: FakeGpu, transport: str) -> None:
    """Symmetric memory, arguments and kernel fit together; NVSHMEM's state is set up once for a module that uses it."""

    def body(rank: Rank) -> None:
        for _ in range(3):
            assert torch.equal(rank.call(), torch.full((1000,), 3.0))
        rank.comm.release()

    run(gpu, body, transport)
    assert gpu.freed == RANKS
    assert set(gpu.built) == {(Transport(transport), "sm_90")}
    assert len(gpu.initialised_modules) == (RANKS if transport == "nvshmem" else 0)


def test_capture_needs_a_first_call(gpu: FakeGpu) -> None:
    """Neither memory nor a kernel is set up inside a graph capture, and the refusal breaks nothing."""

    def body(rank: Rank) -> None:
        gpu.here.capturing = True
        with pytest.raises(CaptureError, match="no workspace yet"):
            rank.call()
        gpu.here.capturing = False
        rank.call()
        gpu.here.capturing = True
        with pytest.raises(CaptureError, match="for int32 and sum is not loaded"):
            rank.call("int32")
        gpu.here.capturing = False
        assert torch.equal(rank.call(), torch.full((1000,), 3.0))

    run(gpu, body)


def test_time_out_and_reset(gpu: FakeGpu) -> None:
    """A rank that stays away is named, the group is refused, and a reset on all ranks brings it back."""

    def body(rank: Rank) -> None:
        rank.call()
        if rank.rank == 0:
            with pytest.raises(commdsl.CommTimeout, match="rank 1 never entered"):
                rank.call()
            with pytest.raises(BrokenGroupError, match="C957"):
                rank.comm.workspace(rank.program)
        rank.comm.reset()
        assert torch.equal(rank.call(), torch.full((1000,), 3.0))

    run(gpu, body)


def test_lanes_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose lanes cannot all be resident is refused, not shrunk."""
    gpu = FakeGpu(RANKS, blocks_per_sm=0)
    gpu.install(monkeypatch)

    def body(rank: Rank) -> None:
        with pytest.raises(DeviceError, match=r"this GPU holds 0 at once \(132 SMs x 0\)"):
            rank.call()

    run(gpu, body)


def test_two_ranks_on_one_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that forgot to choose their device are told so before anything collective hangs."""
    same = torch.cuda.get_device_properties
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: replace_uuid(same(0)))
    with pytest.raises(GroupError, match="set_device"):
        run(gpu, lambda _: None)


def replace_uuid(properties: object) -> object:
    properties.uuid = "one and the same"  # type: ignore[attr-defined] # a namespace
    return properties
