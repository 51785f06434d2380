"""What the ranks of test_runtime.py and gpu/run_ops.py do: each function runs in every process of a group at once.

Assumes torch.distributed is initialised: with nccl the tensors are on GPUs. Does not draw at random: inputs follow from
(rank, seed), so every rank knows what every other one sent.
"""

from __future__ import annotations

import logging
import operator
import os
import time
from collections.abc import Callable
from datetime import timedelta
from functools import reduce
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import commdsl
from commdsl.runtime import groups
from commdsl.runtime.errors import (
    AgreementError,
    BrokenGroupError,
    GradientError,
    GroupError,
    ReductionError,
    RendezvousError,
    TensorError,
)

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
REDUCED = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
MOVED = (*REDUCED, torch.float8_e4m3fn, torch.float8_e5m2)
COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": operator.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": operator.mul,
}


def world() -> str:
    return str(dist.group.WORLD.group_name)


def home() -> str:
    return "cuda" if "nccl" in dist.get_backend() else "cpu"


def given(rank: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: every order of summation gives the same bits in every dtype."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-2, 3, shape, generator=generator).to(home(), dtype)


def everyone(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    return [given(rank, shape, dtype, seed) for rank in range(dist.get_world_size())]


def combined(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    if op == "avg":
        return (reduce(operator.add, (tensor.double() for tensor in tensors)) / len(tensors)).to(tensors[0].dtype)
    return reduce(COMBINE[op], tensors)


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == wanted.shape
    assert got.dtype == wanted.dtype
    assert torch.equal(got.contiguous().view(-1).view(torch.uint8), wanted.contiguous().view(-1).view(torch.uint8))


def every_dtype_and_size() -> None:
    op = commdsl.load("allreduce_ring")
    rank = dist.get_rank()
    others: dict[torch.dtype, tuple[str, ...]] = {
        torch.float64: ("avg",),
        torch.float32: ("max", "min", "prod", "avg"),
        torch.bfloat16: ("avg",),
        torch.int64: ("prod",),
        torch.uint8: ("max",),
        torch.bool: ("min",),
    }
    for dtype in REDUCED:
        for name in ("sum", *others.get(dtype, ())):
            for size in (0, 1, 7, 1003):
                tensors = everyone((size,), dtype, seed=size)
                before = tensors[rank].clone()
                same(op(tensors[rank], op=name), combined(tensors, name))
                same(tensors[rank], before)


def every_moved_dtype() -> None:
    commdsl.load("allgather_ring")
    rank = dist.get_rank()
    for dtype in MOVED:
        for shape in ((0,), (1,), (5, 3), ()):
            tensors = everyone(shape, dtype)
            wanted = torch.cat(tensors) if shape else torch.stack(tensors)
            same(torch.ops.commdsl.allgather_ring(tensors[rank], world()), wanted)


def collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    parts = everyone((size * 3, 5), torch.float32)
    total = combined(parts, "sum")
    same(commdsl.load("reducescatter_direct")(parts[rank]), total[3 * rank : 3 * rank + 3])
    wanted = torch.cat([part[3 * rank : 3 * rank + 3] for part in parts])
    same(commdsl.load("alltoall_direct")(parts[rank]), wanted)
    same(commdsl.load("broadcast_tree", params={"root": 1})(parts[rank]), parts[1])
    reduced = commdsl.load("reduce_tree")(parts[rank])
    gathered = commdsl.load("gather_direct")(parts[rank])
    same(gathered, torch.cat(parts) if rank == 0 else torch.zeros(size * size * 3, 5, device=home()))
    if rank == 0:
        same(reduced, total)
    same(commdsl.load("scatter_direct")(parts[rank]), parts[0][3 * rank : 3 * rank + 3])
    same(commdsl.load("permutation_shift")(parts[rank]), parts[(rank - 1) % size])
    stacked = commdsl.load("rotation_ring")(parts[rank])[-1]
    assert stacked.shape == (size, size * 3, 5)
    for step in range(size):
        same(stacked[step], parts[(rank - step) % size])


def in_place() -> None:
    op = commdsl.load("allreduce_ring")
    tensors = everyone((77,), torch.float32)
    mine = tensors[dist.get_rank()].clone()
    factor = torch.ones_like(mine).requires_grad_()
    product = (factor * mine).sum()  # saves what is about to be overwritten
    assert op.in_place(mine) is None
    same(mine, combined(tensors, "sum"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    with torch.inference_mode():
        op.in_place(torch.ones(5))
    with pytest.raises(TensorError, match="in place"):
        commdsl.load("allgather_ring").in_place(mine)
    with pytest.raises(GradientError, match="C958"):
        op.in_place(mine.requires_grad_())


def asynchronous() -> None:
    op = commdsl.load("allreduce_ring")
    first, second = everyone((501,), torch.float32), everyone((333,), torch.float32, seed=1)
    rank = dist.get_rank()
    works = [op(first[rank], async_op=True), op(second[rank], async_op=True, op="max")]
    same(op(first[rank], op="min"), combined(first, "min"))
    same(works[1].wait(), combined(second, "max"))
    same(works[0].wait(), combined(first, "sum"))
    assert works[0].is_completed()


def work_of_torch() -> None:
    """What an asynchronous call returns is one of torch's Works, with a future; in place, too."""
    rank, tensors = dist.get_rank(), everyone((501,), torch.float32)
    total = combined(tensors, "sum")
    work = commdsl.all_reduce(tensors[rank], async_op=True)
    assert isinstance(work, dist.Work)
    (found,) = work.get_future().wait()
    same(found, total)
    same(work.wait(timedelta(seconds=30)), total)
    same(work.result()[0], total)
    assert (work.is_completed(), work.is_success(), work.exception()) == (True, True, None)
    mine = tensors[rank].clone()
    work = commdsl.all_reduce_(mine, async_op=True)
    (kept,) = work.get_future().then(lambda done: done.value()).wait()  # torch orders streams by the tensors in a value
    assert kept is mine
    same(mine, total)
    same(work.wait(), total)


def work_as_torch_has_it() -> None:
    """The same program sees the same of a Work of ours and of one of torch's backend."""
    sees(commdsl.all_reduce_)
    sees(dist.all_reduce)


def sees(call: Callable[..., Any]) -> None:
    """`call`: an all-reduce in place, with async_op=True."""
    rank, tensors = dist.get_rank(), everyone((501,), torch.float32)
    total = combined(tensors, "sum")

    def start(**settings: Any) -> tuple[torch.Tensor, Any]:
        mine = tensors[rank].clone()
        return mine, call(mine, async_op=True, **settings)

    mine, work = start()
    end = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < end
    same(mine, total)  # without a wait
    same(start()[1].get_future().wait()[0], total)  # nobody else has the tensor

    mine, work = start()
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: [done.value()])
    work.wait()
    assert future.done()
    same(mine, total)
    same(future.value()[0], total)
    assert future.value()[0].data_ptr() == mine.data_ptr()
    same(doubled.wait()[0], total * 2)
    same(work.get_future().value()[0], total)

    pairs = [start() for _ in range(5)]
    for mine, work in reversed(pairs):
        work.wait(timedelta(seconds=60))
        same(mine, total)
    if home() != "cpu":
        return

    nested = start()[1].get_future().then(lambda _: start()[1].get_future().wait()[0])
    same(nested.wait(), total)
    with torch.inference_mode():
        mine, work = start()
        work.wait()
        same(mine, total)

    dist.barrier()
    if rank == 1:
        time.sleep(1)
    mine, work = start()
    future = work.get_future()
    if rank != 1:
        assert not work.is_completed()
        assert not future.done()
        with pytest.raises(RuntimeError, match=r"Operation timed out|not over after"):
            work.wait(timedelta(seconds=0.1))
    work.wait()
    assert future.done()
    same(mine, total)

    group = impatient()
    dist.barrier()
    if rank != 1:
        _, work = start(group=group)
        future = work.get_future()
        with pytest.raises(RuntimeError):
            work.wait()
        with pytest.raises(RuntimeError):
            future.wait()
        assert work.is_completed()
        assert not work.is_success()
    dist.barrier()


def data_parallel() -> None:
    """DistributedDataParallel trains to the same weights with a communication hook on these calls as without."""
    rank = dist.get_rank()

    def trained(hook: Any) -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)).to(home())
        parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
        if hook is not None:
            parallel.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(10):
            optimizer.zero_grad()
            parallel(given(rank, (16, 8), torch.float32, step)).square().mean().backward()
            optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    def mean(gradient: torch.Tensor) -> Any:
        work = commdsl.all_reduce(gradient, op="avg", async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    hook = lambda _, bucket: mean(bucket.buffer())  # noqa: E731 - torch reads annotations, and only as classes
    for found, wanted in zip(trained(hook), trained(None), strict=True):
        torch.testing.assert_close(found, wanted)


def late_work() -> None:
    """A wait may end before the call does, which goes on; an error waits for who asks, or is logged."""
    rank, group = dist.get_rank(), impatient()
    op, x = commdsl.load("alltoall_direct"), given(dist.get_rank(), (4,), torch.float32)
    dist.barrier()
    if rank == 1 and home() == "cpu":
        dist.barrier()  # the others have looked
    elif rank == 1:
        time.sleep(1)
    work = op(x, group=group, async_op=True)
    if rank != 1 and home() == "cpu":
        assert (work.is_completed(), work.exception()) == (False, None)
        with pytest.raises(commdsl.WorkTimeoutError, match=r"C967.*not over after 0\.1 s; it goes on"):
            work.wait(0.1)
        dist.barrier()
    work.wait()
    dist.barrier()
    if rank != 1:
        works = [op(x, group=group, async_op=True) for _ in range(2)]
        with pytest.raises((commdsl.CommTimeout, commdsl.PeerError)) as caught:
            works[0].wait()
        if home() == "cpu":
            with pytest.raises(type(caught.value)):
                works[0].get_future().wait()
            assert isinstance(works[0].exception(), type(caught.value))
            assert not works[0].is_success()
            heard: list[str] = []
            logger, handler = logging.getLogger("commdsl"), logging.Handler()
            handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]  # a listener
            logger.addHandler(handler)
            del works
            logger.removeHandler(handler)
            assert len(heard) == 1
            assert "nobody waited for a call that failed" in heard[0]
    commdsl.reset(group)


def subgroup() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    op = commdsl.load("allreduce_ring")
    for _ in range(2):
        tensors = everyone((9,), torch.int64)
        same(op(tensors[rank], group=pairs[rank // 2]), tensors[rank] + tensors[rank ^ 1])
    with pytest.raises(GroupError, match="no process group named"):
        op(tensors[rank], group="nobody")
    short = dist.new_group()
    same(op(given(rank, (9,), torch.int64), group=short), combined(everyone((9,), torch.int64), "sum"))
    dist.destroy_process_group(short)
    with pytest.raises(GroupError):
        op(given(rank, (9,), torch.int64), group=short)


def gradients() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (size * 2, 3)
    weights = everyone(shape, torch.float32, seed=5)

    def gradient(called: Any, weight: torch.Tensor, x: torch.Tensor, **settings: str) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (called(x, **settings) * weight).sum().backward()
        assert x.grad is not None
        return x.grad

    x = given(rank, shape, torch.float32)
    ring = commdsl.load("allreduce_ring")
    same(gradient(ring, weights[rank], x), combined(weights, "sum"))
    same(gradient(ring, weights[rank], x, op="avg"), combined(weights, "avg"))
    with pytest.raises(GradientError, match="sum and avg"):
        gradient(ring, weights[rank], x, op="max")
    many = everyone((size * size * 2, 3), torch.float32, seed=6)
    mine = slice(rank * size * 2, (rank + 1) * size * 2)
    same(gradient(commdsl.load("allgather_ring"), many[rank], x), combined(many, "sum")[mine])
    few = everyone((2, 3), torch.float32, seed=7)
    same(gradient(commdsl.load("reducescatter_ring"), few[rank], x), torch.cat(few))
    same(gradient(commdsl.load("reducescatter_ring"), few[rank], x, op="avg"), torch.cat(few) / size)
    parts = torch.cat([weight[2 * rank : 2 * rank + 2] for weight in weights])
    same(gradient(commdsl.load("alltoall_direct"), weights[rank], x), parts)
    zero = torch.zeros(shape, device=home())
    broadcast = commdsl.load("broadcast_chain")
    same(gradient(broadcast, weights[rank], x), combined(weights, "sum") if rank == 0 else zero)
    same(gradient(commdsl.load("reduce_tree"), weights[rank], x), weights[0])
    same(gradient(commdsl.load("gather_direct"), many[rank], x), many[0][mine])
    same(gradient(commdsl.load("scatter_direct"), few[rank], x), torch.cat(few) if rank == 0 else zero)
    same(gradient(commdsl.load("permutation_shift"), weights[rank], x), weights[(rank + 1) % size])
    with pytest.raises(GradientError, match="no shipped inverse"):
        gradient(lambda kv: commdsl.load("rotation_ring")(kv)[-1], torch.ones((), device=home()), x)


def opcheck() -> None:
    x = given(dist.get_rank(), (8, 3), torch.float32)
    commdsl.load("allreduce_ring")
    torch.library.opcheck(torch.ops.commdsl.allreduce_ring.default, (x.clone().requires_grad_(), world(), "avg"))
    commdsl.load("allgather_ring")
    torch.library.opcheck(torch.ops.commdsl.allgather_ring.default, (x.clone().requires_grad_(), world()))
    torch.library.opcheck(torch.ops.commdsl.allreduce_ring_.default, (x.clone(), world(), "sum"))


def compiled() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    reduce_op, gather_op = commdsl.load("allreduce_ring"), commdsl.load("allgather_ring")
    group = world()

    def model(x: torch.Tensor) -> torch.Tensor:
        return gather_op(reduce_op(x * 2, group=group) + 1, group=group).sin()

    traced = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (4, 6):
        tensors = everyone((length,), torch.float32)
        x = tensors[rank].clone().requires_grad_()
        same(traced(x).detach(), ((combined(tensors, "sum") * 2 + 1).sin()).repeat(size))
        traced(x).sum().backward()
        eager = tensors[rank].clone().requires_grad_()
        model(eager).sum().backward()
        assert x.grad is not None
        assert eager.grad is not None
        torch.testing.assert_close(x.grad, eager.grad)


def refusals() -> None:
    rank = dist.get_rank()
    op, scatter = commdsl.load("allreduce_ring"), commdsl.load("reducescatter_ring")
    x = given(rank, (8, 4), torch.float32)
    op(given(rank, (4, 8), torch.float32))
    with pytest.raises(TensorError, match="not contiguous"):
        op(x.t())  # also where a call of this shape was made before
    with pytest.raises(TensorError, match="reduces float32"):
        op(x.to(torch.float8_e5m2))
    with pytest.raises(ReductionError, match="no reduction `median`"):
        op(x, op="median")
    with pytest.raises(ReductionError, match="has no `avg`"):
        op(x.int(), op="avg")
    with pytest.raises(ReductionError, match="reduces nothing"):
        commdsl.load("allgather_ring")(x, op="max")
    with pytest.raises(TensorError, match="equal blocks"):
        scatter(x[:7])
    with pytest.raises(TensorError, match="scalar"):
        scatter(x.sum())
    with pytest.raises(GroupError, match="process group"):
        op(x, group=3)
    with pytest.raises(FileNotFoundError, match="no shipped schedule"):
        commdsl.load("nothing_of_the_kind")
    with pytest.raises(commdsl.CommError):
        commdsl.load("alltoall_two_level", params={"G": 3})


def impatient() -> Any:
    """A group of its own with a short time-out; the others keep theirs, as a busy machine is no fault."""
    kept = os.environ["COMMDSL_TIMEOUT"]
    os.environ["COMMDSL_TIMEOUT"] = "2"
    group = dist.new_group(timeout=timedelta(seconds=2))
    commdsl.load("alltoall_direct")(torch.zeros(4), group=group)
    os.environ["COMMDSL_TIMEOUT"] = kept
    return group


def patience() -> None:
    """A wait for other ranks takes as long as the process group's own would, unless COMMDSL_TIMEOUT says."""
    op, kept = commdsl.load("alltoall_direct"), os.environ.pop("COMMDSL_TIMEOUT")
    group = dist.new_group(timeout=timedelta(seconds=77))
    op(torch.zeros(4), group=group)
    os.environ["COMMDSL_TIMEOUT"] = kept
    other = dist.new_group(timeout=timedelta(seconds=77))
    op(torch.zeros(4), group=other)
    found = [groups.every(str(one.group_name))[0].timeout for one in (group, other)]
    assert found == [77.0, float(kept)]


def timeouts() -> None:
    """A call may be given less time than its group: in a kernel, in a set-up, and where torch looks on."""
    rank, group = dist.get_rank(), dist.new_group()
    op, x = commdsl.load("allreduce_ring"), everyone((100,), torch.float32)
    for given_time in (7, 7.5, timedelta(seconds=7)):
        same(op(x[rank], group=group, timeout=given_time), combined(x, "sum"))
    mine = x[rank].clone().requires_grad_()
    op(mine, group=group, timeout=7).sum().backward()
    commdsl.all_reduce(mine, group=group, timeout=7).sum().backward()
    same(commdsl.all_reduce_(x[rank].clone(), group=group, timeout=7, async_op=True).wait(), combined(x, "sum"))
    for wrong in (0, -1, "soon", True):
        with pytest.raises(commdsl.ArgumentError, match="positive number of seconds, or a timedelta"):
            op(x[rank], group=group, timeout=wrong)
    for name, error in (("allreduce_ring", commdsl.CommTimeout), ("allreduce_halving_doubling", RendezvousError)):
        late = commdsl.load(name)

        def call(late: Any = late) -> None:
            late(x[rank], group=group, timeout=1.5)
            late.synchronize(group)

        dist.barrier()
        if rank != 1:
            with pytest.raises((error, commdsl.PeerError), match=r"rank 1|waited 1\.5 s|too long") as caught:
                call()
            if isinstance(caught.value, commdsl.CommTimeout):
                assert caught.value.seconds == pytest.approx(1.5)
        commdsl.reset(group)
        same(op(x[rank], group=group), combined(x, "sum"))


def compared() -> None:
    """With COMMDSL_DEBUG=1 ranks compare their calls through the group's store, too."""
    kept = dict(os.environ)
    os.environ["COMMDSL_DEBUG"] = "1"
    group, op = dist.new_group(), commdsl.load("alltoall_direct")
    for _ in range(3):
        op(torch.zeros(4, device=home()), group=group)
    with pytest.raises(AgreementError, match=r"call 3 of .*float32\[8\].*runtime_cases\.py"):
        op(torch.zeros(8 if dist.get_rank() == 2 else 4, device=home()), group=group)
    op(torch.zeros(4, device=home()), group=group)
    os.environ.clear()
    os.environ.update(kept)


def absent_rank() -> None:
    """Rank 1 stays away from one call; the others learn its name, and after a reset all go on."""
    rank, group = dist.get_rank(), impatient()
    op = commdsl.load("allreduce_ring")
    x = everyone((100,), torch.float32)
    same(op(x[rank], group=group), combined(x, "sum"))
    dist.barrier()
    if rank != 1:
        with pytest.raises(commdsl.CommTimeout) as caught:
            op(x[rank], group=group)
        assert caught.value.seconds == pytest.approx(2)
        assert caught.value.missing == (1,)
        assert "rank 1 never entered the call" in str(caught.value)
        with pytest.raises(BrokenGroupError, match="commdsl\\.reset"):
            op(x[rank], group=group)
    commdsl.reset(group)
    for seed in range(3):
        x = everyone((100,), torch.float32, seed)
        same(op(x[rank], group=group), combined(x, "sum"))


def absent_at_setup() -> None:
    """Rank 2 never makes the first call of an op: there is no kernel to time out, yet the others learn its name."""
    rank, group = dist.get_rank(), impatient()
    op = commdsl.load("allreduce_twoshot")
    x = everyone((10,), torch.float32)
    if rank != 2:
        # The first whose time is up says so, and the others do not wait for theirs.
        with pytest.raises((RendezvousError, commdsl.PeerError), match="rank 2"):
            op(x[rank], group=group)
    commdsl.reset(group)
    same(op(x[rank], group=group), combined(x, "sum"))


def fake_tensors() -> None:
    """Shapes need neither data nor a call on other ranks."""
    size = dist.get_world_size()
    with FakeTensorMode():
        x = torch.empty(size * 6, 5)
        assert commdsl.load("allgather_ring")(x).shape == (size * size * 6, 5)
        assert commdsl.load("reducescatter_ring")(x).shape == (6, 5)
        assert commdsl.load("rotation_ring")(x)[-1].shape == (size, size * 6, 5)
        assert torch.ops.commdsl.allgather_ring(torch.empty(()), "unknown here").shape == (size,)


def released() -> None:
    op = commdsl.load("alltoall_direct")
    x = everyone((8,), torch.int32)
    first = op(x[dist.get_rank()])
    op.release()
    same(op(x[dist.get_rank()]), first)
    op.synchronize()
    commdsl.check()


CASES = (
    every_dtype_and_size,
    every_moved_dtype,
    collectives,
    in_place,
    asynchronous,
    subgroup,
    gradients,
    opcheck,
    compiled,
    refusals,
    fake_tensors,
    released,
    patience,
    work_of_torch,
    work_as_torch_has_it,
    data_parallel,
    late_work,
    timeouts,
    compared,
    absent_rank,
    absent_at_setup,
)
