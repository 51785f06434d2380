"""What the ranks of test_collectives.py do: each function runs in every process of a group at once.

Assumes torch.distributed is initialised: with nccl the tensors are on GPUs. Inputs are those of runtime_cases.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_cases import combined, everyone, given, home, same, world
from torch._subclasses.fake_tensor import FakeTensorMode

import commdsl
from commdsl.attention import attention
from commdsl.runtime import collective_ops
from commdsl.runtime.errors import GradientError, GroupError, ReductionError, TensorError

SIZES = (0, 1, 7, 1003, 40_000)
"""Rows of five float32 per rank; the last is on another side of the default's first bound than the others."""


def blocks(tensors: list[torch.Tensor], rank: int) -> list[torch.Tensor]:
    return [tensor.chunk(len(tensors))[rank] for tensor in tensors]


def values() -> None:
    """Every collective gives what its name says, on both sides of a bound between schedules."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for rows in SIZES:
        parts = everyone((size * rows, 5), torch.float32, seed=rows)
        before = parts[rank].clone()
        for op in ("sum", "max", "avg"):
            same(commdsl.all_reduce(parts[rank], op), combined(parts, op))
        same(commdsl.all_gather(parts[rank]), torch.cat(parts))
        mine = slice(rank * rows, (rank + 1) * rows)
        same(commdsl.reduce_scatter(parts[rank]), combined(parts, "sum")[mine])
        same(commdsl.all_to_all(parts[rank]), torch.cat([part[mine] for part in parts]))
        for root in (0, size - 1):
            same(commdsl.broadcast(parts[rank], root), parts[root])
        same(parts[rank], before)


def in_place() -> None:
    """all_reduce_ overwrites its tensor and returns it, where the schedule works in place and where it does not."""
    rank = dist.get_rank()
    worked = set()
    for rows in (9, 20_000):
        parts = everyone((rows,), torch.float32, seed=rows)
        mine = parts[rank].clone()
        assert commdsl.all_reduce_(mine, "max") is mine
        same(mine, combined(parts, "max"))
        mine = parts[rank].clone()
        work = commdsl.all_reduce_(mine, async_op=True)
        assert work.wait() is mine
        assert work.is_completed()
        same(mine, combined(parts, "sum"))
        chosen = commdsl.choice("all_reduce", mine.nbytes, dist.get_world_size(), "cpu")
        worked.add(commdsl.load(chosen.schedule).works_in_place)
    assert worked == {True, False}
    with pytest.raises(GradientError, match="C958"):
        commdsl.all_reduce_(mine.requires_grad_())


def asynchronous() -> None:
    rank = dist.get_rank()
    parts = everyone((dist.get_world_size() * 3,), torch.float32)
    works = [commdsl.all_reduce(parts[rank], async_op=True), commdsl.broadcast(parts[rank], 1, async_op=True)]
    works += [commdsl.all_gather(parts[rank], async_op=True), commdsl.all_to_all(parts[rank], async_op=True)]
    works.append(commdsl.reduce_scatter(parts[rank], "min", async_op=True))
    wanted = [combined(parts, "sum"), parts[1], torch.cat(parts), torch.cat(blocks(parts, rank))]
    for work, result in zip(works, [*wanted, blocks([combined(parts, "min")] * len(parts), rank)[0]], strict=True):
        same(work.wait(), result)


def groups() -> None:
    """A group, its name, a subgroup with a table of its own, and a group of one; what is no group is refused."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    alone = [dist.new_group([one]) for one in range(size)][rank]
    x = everyone((6,), torch.int64)
    same(commdsl.all_reduce(x[rank], group=world()), combined(x, "sum"))
    same(commdsl.all_reduce(x[rank], group=pairs[rank // 2]), x[rank] + x[rank ^ 1])
    for one in (commdsl.all_reduce, commdsl.all_gather, commdsl.all_to_all, commdsl.reduce_scatter, commdsl.broadcast):
        copied: Any = one(x[rank], group=alone)
        same(copied, x[rank])
        assert copied.data_ptr() != x[rank].data_ptr()
        same(one(x[rank], group=alone, async_op=True).wait(), x[rank])
    same(commdsl.all_reduce_(x[rank].clone(), group=alone), x[rank])
    with pytest.raises(GroupError, match="no process group named"):
        commdsl.all_reduce(x[rank], group="nobody")
    with pytest.raises(GroupError, match="expected a process group"):
        commdsl.all_reduce(x[rank], group=3)
    with pytest.raises(GroupError, match="0 to 3, not 4"):
        commdsl.broadcast(x[rank], root=4)


def refusals() -> None:
    x = given(dist.get_rank(), (8, 4), torch.float32)
    with pytest.raises(TensorError, match="not contiguous"):
        commdsl.all_reduce(x.t())
    with pytest.raises(TensorError, match="equal blocks"):
        commdsl.reduce_scatter(x[:7])
    with pytest.raises(ReductionError, match="no reduction `median`"):
        commdsl.all_reduce(x, "median")
    with pytest.raises(ValueError, match="expected one of all_reduce"):
        commdsl.choice("reduce", 1024, 4, "cpu")


def gradients() -> None:
    """The gradient of a collective is the inverse collective, of the gradients of all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shape = (size * 2, 3)
    weights, many = everyone(shape, torch.float32, seed=5), everyone((size * size * 2, 3), torch.float32, seed=6)
    few = everyone((2, 3), torch.float32, seed=7)
    mine = slice(rank * size * 2, (rank + 1) * size * 2)

    def gradient(called: Any, weight: torch.Tensor, *settings: Any) -> torch.Tensor:
        x = given(rank, shape, torch.float32).requires_grad_()
        (called(x, *settings) * weight).sum().backward()
        assert x.grad is not None
        return x.grad

    same(gradient(commdsl.all_reduce, weights[rank]), combined(weights, "sum"))
    same(gradient(commdsl.all_reduce, weights[rank], "avg"), combined(weights, "avg"))
    same(gradient(commdsl.all_gather, many[rank]), combined(many, "sum")[mine])
    same(gradient(commdsl.reduce_scatter, few[rank]), torch.cat(few))
    same(gradient(commdsl.reduce_scatter, few[rank], "avg"), torch.cat(few) / size)
    same(gradient(commdsl.all_to_all, weights[rank]), torch.cat(blocks(weights, rank)))
    zero = torch.zeros(shape, device=home())
    same(gradient(commdsl.broadcast, weights[rank], 1), combined(weights, "sum") if rank == 1 else zero)
    with pytest.raises(GradientError, match="sum and avg"):
        gradient(commdsl.all_reduce, weights[rank], "max")

    x = given(rank, shape, torch.float32).requires_grad_()
    (first,) = torch.autograd.grad(commdsl.all_gather(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    same(second, torch.full_like(x, 2.0 * size))


def opcheck() -> None:
    x = given(dist.get_rank(), (8, 3), torch.float32)
    collective_ops.library()
    ops = torch.ops.commdsl_collectives
    torch.library.opcheck(ops.all_reduce.default, (x.clone().requires_grad_(), world(), "avg"))
    torch.library.opcheck(ops.all_gather.default, (x.clone().requires_grad_(), world()))
    torch.library.opcheck(ops.reduce_scatter.default, (x.clone().requires_grad_(), world()))
    torch.library.opcheck(ops.broadcast.default, (x.clone().requires_grad_(), world(), 2))
    torch.library.opcheck(ops.all_reduce_.default, (x.clone(), world(), "sum"))


def compiled() -> None:
    """torch.compile takes every collective without a break, for the default group too, and serves every size."""
    rank, size = dist.get_rank(), dist.get_world_size()

    def model(x: torch.Tensor) -> torch.Tensor:
        y = commdsl.all_gather(commdsl.all_reduce(x * 2) + 1).sin()
        y = commdsl.all_to_all(commdsl.broadcast(y, 1))
        return commdsl.reduce_scatter(y)

    def written(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        commdsl.all_reduce_(y, "max")
        return y * 2

    traced = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (4, 6, 4000):
        tensors = everyone((length,), torch.float32)
        x, eager = (tensors[rank].clone().requires_grad_() for _ in range(2))
        got, wanted = traced(x), model(eager)
        same(got.detach(), wanted.detach())
        got.sum().backward()
        wanted.sum().backward()
        assert x.grad is not None
        assert eager.grad is not None
        torch.testing.assert_close(x.grad, eager.grad)
        assert got.shape == (length,)
        in_place_traced = torch.compile(written, fullgraph=True, backend="aot_eager", dynamic=True)
        same(in_place_traced(tensors[rank]), (combined(tensors, "max") + 1) * 2)
    assert size == 4


def fake_tensors() -> None:
    size = dist.get_world_size()
    commdsl.all_reduce(torch.zeros(4, requires_grad=True))
    with FakeTensorMode():
        x = torch.empty(size * 6, 5, requires_grad=True)
        assert commdsl.all_gather(x).shape == (size * size * 6, 5)
        assert commdsl.reduce_scatter(x).shape == (6, 5)
        assert commdsl.all_gather(torch.empty(())).shape == (size,)


def attention_compiled() -> None:
    """Attention under torch.compile, of the default group: its schedule is chosen when it runs."""
    rows = [everyone((1, 8, 2, 16), torch.float32, seed)[dist.get_rank()].requires_grad_() for seed in range(3)]

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q * 2, k, v, causal=True) + 1

    got, wanted = torch.compile(model, fullgraph=True, backend="aot_eager")(*rows), model(*rows)
    torch.testing.assert_close(got, wanted)
    for one, other in zip(*(torch.autograd.grad(made.sum(), rows) for made in (got, wanted)), strict=True):
        torch.testing.assert_close(one, other)


def prepared() -> None:
    """What a table may choose up to a size is set up by one call, and its names are said."""
    names = commdsl.prepare(["all_reduce", "broadcast"], 100 << 10, dtypes=[torch.float32], ops=["max"], root=1)
    assert [name.split("_")[1] for name in names] == ["oneshot", "twoshot", "direct", "scatter"]
    assert len(commdsl.prepare(["all_reduce"], dtypes=[torch.float32])) == 3


CASES = (
    values,
    in_place,
    asynchronous,
    groups,
    refusals,
    gradients,
    opcheck,
    compiled,
    fake_tensors,
    attention_compiled,
    prepared,
)
