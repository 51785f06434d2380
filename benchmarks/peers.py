"""Turns a case into the calls of the peers: NCCL through torch.distributed, and PyTorch symmetric memory.

Assumes torch 2.9 or newer for symmetric memory. Every peer gets its best case: buffers made beforehand, and input that
lies in symmetric memory already. Does not use commdsl.
"""

from __future__ import annotations

from typing import assert_never

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from benchmarks.cases import Case, Collective
from benchmarks.measure import Bench, Contender, root_of
from benchmarks.report import NCCL, NCCL_WINDOW, ONE_SHOT, TWO_SHOT, Kind

ONE_SHOT_UP_TO = 64 << 20  # every rank reads every other's whole tensor: far behind where bandwidth counts


class Arena:
    """One piece of PyTorch's symmetric memory, shared by the symmetric peers and by the link's limit in turn."""

    def __init__(self, bench: Bench, nbytes: int) -> None:
        self.memory = symm_mem.empty(nbytes, dtype=torch.uint8, device=bench.device)
        self.handle = symm_mem.rendezvous(self.memory, bench.group.group_name)

    def tensor(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self.memory[: numel * dtype.itemsize].view(dtype)

    def addresses(self) -> list[int]:
        """Where this rank sees each rank's part."""
        return [int(address) for address in self.handle.buffer_ptrs]


def nccl(bench: Bench, case: Case, x: torch.Tensor) -> Contender:
    return _through_torch(bench, case, x, torch.empty(case.num_out, dtype=x.dtype, device=bench.device), NCCL)


def nccl_window(bench: Bench, case: Case, x: torch.Tensor) -> Contender:
    """NCCL on buffers registered as symmetric windows, which lets it choose its kernels of NVLink loads and stores."""
    backend = bench.group._get_backend(bench.device)
    pool = torch.cuda.MemPool(backend.mem_allocator)
    with torch.cuda.use_mem_pool(pool):
        source, result = torch.empty_like(x), torch.empty(case.num_out, dtype=x.dtype, device=bench.device)
    backend.register_mem_pool(pool, symm=True)
    inner = _through_torch(bench, case, source, result, NCCL_WINDOW)

    def prepare() -> None:
        source.copy_(x)
        inner.prepare()

    def release() -> None:
        backend.deregister_mem_pool(pool)

    return Contender(inner.name, inner.kind, inner.call, prepare, release=release)


def _through_torch(bench: Bench, case: Case, x: torch.Tensor, result: torch.Tensor, name: str) -> Contender:
    group = bench.group

    def prepare() -> None:
        if case.collective in (Collective.ALL_REDUCE, Collective.BROADCAST):  # torch has them in place only
            result.copy_(x)

    def call(index: int) -> torch.Tensor:
        match case.collective:
            case Collective.ALL_REDUCE:
                dist.all_reduce(result, group=group)
            case Collective.ALL_GATHER:
                dist.all_gather_into_tensor(result, x, group=group)
            case Collective.REDUCE_SCATTER:
                dist.reduce_scatter_tensor(result, x, group=group)
            case Collective.ALL_TO_ALL:
                dist.all_to_all_single(result, x, group=group)
            case Collective.BROADCAST:
                dist.broadcast(result, group_src=root_of(index, case.ranks), group=group)
            case _:
                assert_never(case.collective)
        return result

    return Contender(name, Kind.PEER, call, prepare)


def one_shot(bench: Bench, case: Case, x: torch.Tensor, arena: Arena) -> Contender:
    shared, name = arena.tensor(case.numel, x.dtype), bench.group.group_name

    def call(_: int) -> torch.Tensor:
        found: torch.Tensor = torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", name)
        return found

    return Contender(ONE_SHOT, Kind.PEER, call, lambda: _fill(bench, shared, x))


def two_shot(bench: Bench, case: Case, x: torch.Tensor, arena: Arena) -> Contender:
    shared, name = arena.tensor(case.numel, x.dtype), bench.group.group_name

    def call(_: int) -> torch.Tensor:
        torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", name)
        return shared

    return Contender(TWO_SHOT, Kind.PEER, call, lambda: _fill(bench, shared, x))


def _fill(bench: Bench, shared: torch.Tensor, x: torch.Tensor) -> None:
    bench.barrier()  # nobody still reads this rank's part, or pushes to it
    shared.copy_(x)
