"""The GPU runtime over a fake GPU: what is set up, what a call does, what is refused, what a time-out does."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_gpu import ARENA_BYTES, FakeGpu  # noqa: E402 - after the check for torch
from thread_ranks import at_once, in_group  # noqa: E402

import commdsl  # noqa: E402
from commdsl.program.memory import Transport  # noqa: E402
from commdsl.runtime import calls, far, groups  # noqa: E402
from commdsl.runtime import op as runtime_op  # noqa: E402
from commdsl.runtime.bootstrap import Board, ThreadBootstrap  # noqa: E402
from commdsl.runtime.device import DeviceCommunicator  # noqa: E402
from commdsl.runtime.errors import BrokenGroupError, CaptureError, DeviceError, GroupError, HeapError  # noqa: E402
from commdsl.runtime.kept import keep  # noqa: E402
from commdsl.runtime.lasting import _Pools, lasting  # noqa: E402

RANKS = 2


class Rank:
    """A thread with a GPU, and calls of an all-reduce on CPU memory that stands for the GPU's."""

    def __init__(self, gpu: FakeGpu, rank: int, name: str) -> None:
        self.gpu = gpu
        self.rank = rank
        self.name = name
        self.op = commdsl.load("allreduce_ring", ranks=RANKS)
        self.x = torch.full((1000,), float(rank + 1))

    @property
    def comm(self) -> DeviceCommunicator:
        found = groups.of(self.name, self.x.device)
        assert isinstance(found, DeviceCommunicator)
        return found

    def call(self, numel: int = 1000) -> None:
        """One call and its check: the sum over both ranks."""
        found = self.op(self.x.new_full((numel,), float(self.rank + 1)), group=self.name)
        self.comm.check()
        assert torch.equal(found, torch.full((numel,), 3.0))


def run(gpu: FakeGpu, body: Callable[[Rank], None]) -> None:
    """`body` on every rank at once; raises the first failure."""

    def on_gpu(rank: int, name: str) -> None:
        gpu.here.rank = rank
        body(Rank(gpu, rank, name))

    in_group(RANKS, on_gpu)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu(RANKS)
    made.install(monkeypatch)
    return made


@pytest.mark.parametrize(("transport", "nodes"), [("peer", ()), ("nvshmem", ()), ("nvshmem", (0, 0)), ("peer", (0, 1))])
def test_calls(gpu: FakeGpu, transport: str, nodes: tuple[int, ...]) -> None:
    """Symmetric memory, arguments and kernel fit together; NVSHMEM's state is set up once for a module that uses it."""
    gpu.transport, gpu.nodes = transport, nodes
    used = Transport.NVSHMEM if transport == "nvshmem" or nodes else Transport.PEER

    def body(rank: Rank) -> None:
        for _ in range(3):
            rank.call()
        rank.comm.close()

    run(gpu, body)
    assert not gpu.driver.mapped
    for arena in far._Started.arenas.values():
        arena.take("all", ARENA_BYTES - ARENA_BYTES // far.KEPT)
    assert len(far._Started.arenas) == (RANKS if used is Transport.NVSHMEM else 0)
    assert set(gpu.built) == {(used, "sm_90")}
    assert len(gpu.initialised_modules) == (RANKS if used is Transport.NVSHMEM else 0)


def test_ranks_that_do_not_agree_who_is_far(gpu: FakeGpu) -> None:
    """One rank's peer is near to it and that rank far from its peer: both say so instead of waiting for each other."""
    gpu.nodes_of = {0: (0, 0), 1: (0, 1)}

    def body(rank: Rank) -> None:
        with pytest.raises(
            GroupError, match=r"ranks . and . of group `.*` reach each other by `.*` and `.*`: COMMDSL_"
        ):
            rank.call()

    run(gpu, body)


def test_nodes_of_another_number_of_ranks(gpu: FakeGpu) -> None:
    """COMMDSL_NODES that speaks of more ranks than the group has is refused when the group is set up."""
    gpu.nodes = (0, 0, 1)
    with pytest.raises(GroupError, match=r"says where 3 ranks are; there are 2 in all"):
        run(gpu, lambda rank: rank.call())


def test_capture_needs_a_first_call(gpu: FakeGpu) -> None:
    """Neither memory nor a kernel is set up inside a graph capture, and the refusal breaks nothing."""

    def body(rank: Rank) -> None:
        with gpu.capturing(), pytest.raises(CaptureError, match="has to be set up before a capture"):
            rank.call()
        assert rank.comm.broken is None
        with gpu.capturing(), pytest.raises(CaptureError, match="no workspace yet"):
            rank.call()
        rank.call()
        with gpu.capturing(), pytest.raises(CaptureError, match="for int32 and sum is not loaded"):
            rank.op(rank.x.int(), group=rank.name)
        rank.call()
        with gpu.capturing():
            rank.call(500)

    run(gpu, body)


def test_time_out_and_reset(gpu: FakeGpu) -> None:
    """A rank that stays away is named, the group is refused, and a reset on all ranks brings it back."""

    def body(rank: Rank) -> None:
        rank.call()
        if rank.rank == 0:
            with pytest.raises(commdsl.CommTimeout, match="rank 1 never entered"):
                rank.call()
            with pytest.raises(BrokenGroupError, match="C957"):
                rank.call()
            with pytest.raises(BrokenGroupError, match="C957"):
                rank.call(7)
        rank.comm.reset()
        rank.call()

    run(gpu, body)


def test_time_out_of_another_op(gpu: FakeGpu) -> None:
    """What one op's kernel reported, the next call of any op of the group raises, before it launches."""

    def body(rank: Rank) -> None:
        other = commdsl.load("allgather_ring", ranks=RANKS)
        other(rank.x, group=rank.name)
        rank.call()
        if rank.rank == 0:
            rank.op(rank.x, group=rank.name)
            launched = len(gpu.launches)
            with pytest.raises(commdsl.CommTimeout, match="rank 1 never entered"):
                other(rank.x, group=rank.name)
            assert len(gpu.launches) == launched
        rank.comm.reset()
        rank.call()

    run(gpu, body)


def test_what_is_kept_of_a_call(gpu: FakeGpu) -> None:
    """A second call of a shape prepares nothing; after a release, or a reset that drops the memory, it is made anew."""

    def body(rank: Rank) -> None:
        rank.call()
        made: list[tuple[Any, ...]] = []
        original = rank.comm.prepare

        def prepare(*given: Any) -> Any:
            made.append(given)
            return original(*given)

        rank.comm.prepare = prepare
        for _ in range(3):
            rank.call()
            rank.op.in_place(rank.x.clone(), group=rank.name)
        assert len(made) == 1
        rank.op.release(rank.name)
        rank.call()
        assert len(made) == 2
        (workspace,) = rank.comm.workspaces.values()
        rank.comm.reset()
        rank.call()
        assert len(made) == 2
        if rank.rank == 0:
            rank.comm.workspaces.pop(next(iter(rank.comm.workspaces)))
        rank.comm.reset()
        if rank.rank == 0:
            workspace.close()  # as a reset does where the workspace is known
        rank.call()
        assert len(made) == 3

    run(gpu, body)


def test_another_group_of_the_same_name(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name may come to stand for another group, as torch numbers groups anew: nothing kept under it is used then."""
    board = Board()

    def body(rank: Rank) -> None:
        rank.call()
        before, member = rank.comm, groups._THREADS[rank.name]
        bootstrap = ThreadBootstrap(rank.rank, RANKS, board)
        world = replace(member.world, bootstrap=bootstrap)  # where the group before reports nothing
        renamed = replace(member, bootstrap=bootstrap, board=board, owner=lambda: board, world=world)
        monkeypatch.setitem(groups._THREADS, rank.name, renamed)
        rank.call()
        assert rank.comm is not before
        assert [launch.rank for launch in gpu.launches].count(rank.rank) == 2
        assert (before.is_closed, before.workspaces, len(rank.comm.workspaces)) == (True, {}, 1)
        before.broken = GroupError("of a group that is gone")
        rank.call()

    run(gpu, body)


def test_a_gpu_by_either_name(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """`device="cuda"` is the current GPU: what is made for it has the end of the group that tensors there have."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def body(rank: Rank) -> None:
        assert groups.of(rank.name, torch.device("cuda")) is groups.of(rank.name, torch.device("cuda", 0))

    run(gpu, body)


def test_many_shapes(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept has an end, and a call that was forgotten is made again."""
    monkeypatch.setattr(runtime_op, "MAX_KEPT", 3)

    def body(rank: Rank) -> None:
        for numel in (1, 7, 1000, 7, 4096, 1, 5000, 1000):
            rank.call(numel)

    run(gpu, body)
    assert calls.MAX_KEPT > 3


def test_what_is_forgotten() -> None:
    """The oldest, and no more than there has to be room for."""
    known = dict[int, str]()
    for number in (1, 2, 3, 4, 5):
        keep(known, number, "made", most=3)
    assert [*known] == [3, 4, 5]


def test_a_table_that_changes_while_it_is_looked_through() -> None:
    """Another thread comes in wherever Python gives way, as where it collects garbage; there something comes in here:
    what was over goes, and nothing is raised.
    """
    known = {(number,): SimpleNamespace(is_over=number % 2 == 0) for number in range(2000)}
    others = itertools.count()

    def comes_in(*_: object) -> None:
        known["other", next(others)] = SimpleNamespace(is_over=False)

    threshold = gc.get_threshold()
    gc.callbacks.append(comes_in)
    try:
        gc.set_threshold(1)
        calls.keep_call(known, ("made",), SimpleNamespace(is_over=False), most=1 << 20)  # type: ignore[type-var] # calls
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(comes_in)
    assert next(others) > 0
    assert not any(one.is_over for one in known.values())
    assert ("made",) in known


@pytest.mark.parametrize(("sms", "is_behind"), [(4, True), (16, False)])
def test_kernels_that_fill_a_gpu(monkeypatch: pytest.MonkeyPatch, sms: int, is_behind: bool) -> None:
    """Two that do not fit beside each other follow one another over all groups: their blocks wait for those of peers,
    and two ranks could have begun with different ones. Others are in no order.
    """
    gpu = FakeGpu(RANKS, blocks_per_sm=1, sms=sms)
    gpu.install(monkeypatch)
    others, op = commdsl.threads(RANKS), commdsl.load("allreduce_ring", ranks=RANKS, tune={"lanes": 4})

    def body(rank: Rank) -> None:
        for name in (rank.name, others[rank.rank]):
            with rank.gpu.on(rank.gpu.stream()):
                op(torch.ones(1 << 16), group=name)

    run(gpu, body)
    for rank in range(RANKS):
        first, second = (one for one in gpu.launches if one.rank == rank)
        assert (first.number in second.before) is is_behind


def test_what_is_kept_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is CuPy's memory, as torch's may be of the pool of a graph; where there is none, torch lets go of what it has
    for nobody. Each stream has its own: what is let go of on one is given away behind what runs there.
    """
    memory, asked = (ctypes.c_uint8 * 64)(), list[int]()
    stream, pools = SimpleNamespace(cuda_stream=0), list[Any]()

    class OutOfMemoryError(MemoryError): ...

    def malloc(nbytes: int) -> Any:
        asked.append(nbytes)
        if len(asked) == 1:
            raise OutOfMemoryError
        return SimpleNamespace(ptr=ctypes.addressof(memory))

    def as_tensor(held: Any, device: Any) -> Any:
        where, size = held.__cuda_array_interface__["data"][0], held.__cuda_array_interface__["shape"][0]
        assert device == torch.device("cuda", 1)
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(where), dtype=torch.uint8)

    def pool() -> Any:
        pools.append(SimpleNamespace(malloc=malloc))
        return pools[-1]

    errors = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
    cuda = SimpleNamespace(Device=lambda _: contextlib.nullcontext(), memory=errors, MemoryPool=pool)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(_Pools, "of", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: asked.append(-1))
    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    given = torch.arange(6, dtype=torch.int64).view(2, 3)
    found = lasting(given, torch.device("cuda", 1))
    assert torch.equal(found, given)
    assert bytes(memory[:48]) == given.numpy().tobytes()
    assert asked == [48, -1, 48]
    assert lasting(given, torch.device("cpu")) is given
    for stream.cuda_stream, many in ((0, 1), (7, 2), (0, 2)):
        lasting(given, torch.device("cuda", 1))
        assert len(pools) == many


def test_threads_share_an_op(gpu: FakeGpu) -> None:
    """Threads of one rank may call the same op at the same time: each gets the sum, in tensors of its own."""

    def body(rank: Rank) -> None:
        rank.call()

        def repeat(_: int) -> None:
            gpu.here.rank = rank.rank
            for _ in range(40):
                rank.call()

        at_once(3, repeat)

    run(gpu, body)


@pytest.mark.parametrize("context", [0, 0xBAD])
def test_context(gpu: FakeGpu, context: int) -> None:
    """A thread new to CUDA, or one whose current device is another, launches in the context of the tensor's GPU."""

    def body(rank: Rank) -> None:
        rank.call()
        gpu.here.context = context
        rank.call()
        rank.call()
        assert gpu.here.context == (context or gpu.context)

    run(gpu, body)


def test_asynchronous(gpu: FakeGpu) -> None:
    """A call with `async_op` runs on a stream of its own, behind the current one, and waiting joins it again."""

    def body(rank: Rank) -> None:
        rank.call()
        work = rank.op(rank.x, group=rank.name, async_op=True)
        mine = [launch for launch in gpu.launches if launch.rank == rank.rank]
        assert mine[-1].stream is rank.comm.side_stream
        assert mine[0].number in mine[-1].before
        assert mine[-1].number not in gpu.current.before
        assert torch.equal(work.wait(), torch.full((1000,), 3.0))
        assert mine[-1].number in gpu.current.before
        rank.call()

    run(gpu, body)


@pytest.mark.parametrize("count", [1000, 40_000], ids=["within the tensor", "by a copy"])
def test_asynchronous_in_place(gpu: FakeGpu, count: int) -> None:
    """The tensor has its result when the stream of the call has come so far; waiting copies nothing."""

    def body(rank: Rank) -> None:
        x = torch.full((count,), rank.rank + 1.0)
        work = commdsl.all_reduce_(x, group=rank.name, async_op=True)
        (*_, last) = (launch for launch in gpu.launches if launch.rank == rank.rank)
        assert last.stream is rank.comm.side_stream
        assert last.number not in gpu.current.before
        assert torch.equal(x, torch.full((count,), 3.0))
        assert work.wait() is x
        assert last.number in gpu.current.before

    run(gpu, body)


def test_lanes_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel whose lanes cannot all be resident is refused, not shrunk."""
    gpu = FakeGpu(RANKS, blocks_per_sm=0)
    gpu.install(monkeypatch)

    def body(rank: Rank) -> None:
        with pytest.raises(DeviceError, match=r"this GPU holds 0 at once \(132 SMs x 0\)"):
            rank.call()

    run(gpu, body)


def test_shared_memory(gpu: FakeGpu) -> None:
    """A kernel is launched with the shared memory of its Plan, more than it would have unasked."""

    def body(rank: Rank) -> None:
        rank.op = commdsl.load("allreduce_ring", ranks=RANKS, tune={"protocol": "tma", "lanes": 32, "sms": 16})
        rank.call()

    run(gpu, body)
    assert gpu.launched_with == {2 * (128 + 8 * 14464)}


@pytest.mark.parametrize(
    ("shared_bytes", "major", "message"),
    [
        (128 << 10, 9, "takes 131200 bytes of shared memory a block, and this GPU has 131072"),
        (227 << 10, 8, "sm_80 does not have"),
    ],
)
def test_gpus_without_tma(monkeypatch: pytest.MonkeyPatch, shared_bytes: int, major: int, message: str) -> None:
    """A GPU that lacks bulk copies, or their shared memory, is refused before anything is launched."""
    gpu = FakeGpu(RANKS, shared_bytes=shared_bytes, major=major)
    gpu.install(monkeypatch)

    def body(rank: Rank) -> None:
        rank.op = commdsl.load("allreduce_ring", ranks=RANKS, tune={"protocol": "tma"})
        with pytest.raises(DeviceError, match=message):
            rank.call()

    run(gpu, body)
    assert not gpu.launches


def test_two_ranks_on_one_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that forgot to choose their device are told so before anything collective hangs."""
    same = torch.cuda.get_device_properties
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: replace_uuid(same(0)))
    with pytest.raises(GroupError, match="set_device"):
        run(gpu, lambda rank: rank.call())


def test_ranks_that_share_a_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With COMMDSL_SHARE_GPUS they are let."""
    same = torch.cuda.get_device_properties
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: replace_uuid(same(0)))
    gpu.share_gpus = True
    run(gpu, lambda rank: rank.call())


@pytest.mark.parametrize("nodes", [(0, 1), (0, 0)])
def test_places_of_their_own(gpu: FakeGpu, nodes: tuple[int, ...]) -> None:
    """Far or near, a rank's part of a heap is where that rank has room, and each knows where the others' are."""
    gpu.transport, gpu.nodes = "nvshmem", nodes

    def body(rank: Rank) -> None:
        first = rank.comm._arena().take("another's", 4096 * (1 + 5 * rank.rank))
        rank.call()
        other = commdsl.load("allgather_ring", ranks=RANKS)
        assert torch.equal(other(rank.x, group=rank.name), torch.tensor([1.0, 2.0]).repeat_interleave(1000))
        (heap, _) = (workspace.heap for workspace in rank.comm.workspaces.values())
        (own, peer) = (heap.addresses[one] - rank.comm._arena().own for one in (rank.rank, 1 - rank.rank))
        assert own - first == 4096 * (1 + 5 * rank.rank)
        if len(set(nodes)) > 1:
            assert peer - first == 4096 * (6 - 5 * rank.rank)

    run(gpu, body)


def test_memory_of_a_peer_that_let_go(gpu: FakeGpu) -> None:
    """What a rank has of NVSHMEM's memory is used again when its peers have let go of that heap, too."""
    gpu.transport = "nvshmem"
    met = threading.Barrier(RANKS)

    def body(rank: Rank) -> None:
        rank.call()
        (workspace,) = rank.comm.workspaces.values()
        arena = rank.comm._arena()
        place = workspace.heap.addresses[rank.rank] - arena.own
        met.wait()
        if rank.rank == 0:
            rank.comm.release()
            assert arena.take("next", 4096) > place
        met.wait()
        if rank.rank == 1:
            rank.comm.release()
        met.wait()
        assert arena.take("next", 4096) == place

    run(gpu, body)


@pytest.mark.parametrize("transport", ["peer", "nvshmem"])
def test_no_memory(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """A rank that has no room says how much it wanted and had; its peer says so, too, instead of waiting for it."""
    gpu.transport = transport
    create, room = gpu.driver.cuMemCreate, far.Room.take
    monkeypatch.setattr(gpu.driver, "cuMemCreate", lambda *given: create(*given) if gpu.here.rank else (2, 0))
    monkeypatch.setattr(far.Room, "take", lambda self, size: room(self, size) if gpu.here.rank else None)
    own = r"takes \d+ bytes .*of whose 5 bytes 3 are free" if transport == "peer" else "NVSHMEM_SYMMETRIC_SIZE sets"

    def body(rank: Rank) -> None:
        with pytest.raises(HeapError, match=own) as caught:
            rank.call()
        assert ("rank 0 of this group has no memory" in str(caught.value)) == (rank.rank == 1)

    run(gpu, body)
    assert not gpu.driver.mapped


def replace_uuid(properties: object) -> object:
    properties.uuid = "one and the same"  # type: ignore[attr-defined] # a namespace
    return properties


def test_blocks_that_compute(gpu: FakeGpu) -> None:
    """A kernel of two roles is one launch of the blocks of both, with memory of its own that the caller never sees."""

    def body(rank: Rank) -> None:
        op = commdsl.load("add_reduce_scatter", ranks=RANKS)
        a = torch.arange(60_000, dtype=torch.float32) * (rank.rank + 1)
        for _ in range(3):
            found = op(a, a, group=rank.name)
            rank.comm.check()
            assert torch.equal(found, a.chunk(RANKS)[rank.rank] / (rank.rank + 1) * 6)

    run(gpu, body)


def test_blocks_that_do_not_fit(gpu: FakeGpu) -> None:
    """The blocks of both roles count: 132 are refused where there is room for fewer."""
    gpu.blocks_per_sm = 0

    def body(rank: Rank) -> None:
        with pytest.raises(DeviceError, match="in 132 blocks"):
            commdsl.load("add_reduce_scatter", ranks=RANKS)(rank.x, rank.x, group=rank.name)

    run(gpu, body)


@pytest.mark.parametrize(
    ("name", "tune", "tasks"),
    [
        ("allreduce_ring", {}, {"line 8: copy", "line 11: reduce", "line 4: copy [copy out]"}),
        ("allgather_direct", {"protocol": "engine"}, {"copies"}),
        ("allgather_matmul", {}, {"x.0 -> a.0", "x.0, w -> c.0", "a.0, w -> c.1"}),
    ],
)
def test_time_stamps(gpu: FakeGpu, name: str, tune: dict[str, str], tasks: set[str]) -> None:
    """Lanes have an interval for each operation; a launch of the copy engine one, from its first kernel to its last."""

    def body(rank: Rank) -> None:
        op = commdsl.load(name, ranks=RANKS, tune=tune)
        given = [torch.ones(64, 64)] * op.num_inputs
        found, profile = op.profiled(*given, group=rank.name)
        assert torch.equal(found, op(*given, group=rank.name))
        assert {task.what for task in profile.tasks} == tasks
        stamps = profile.intervals
        assert ((stamps["begin"] <= stamps["ready"]) & (stamps["ready"] <= stamps["end"])).all()
        if tune:
            assert len(stamps) == 1
            assert stamps["begin"][0] < stamps["ready"][0] < stamps["end"][0]

    run(gpu, body)
