"""What holds on each of four ranks of a gloo group; run by name in processes of their own."""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import commdsl
from commdsl.runtime import groups
from commdsl.runtime.errors import GroupError

SETTLED = 10


def whole(rank: int, numel: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randint(-8, 9, (numel,), generator=generator).float()


def check_calls(group: Any, process_group: Any, seed: int) -> None:
    """All five collectives on a group, beside what gloo gives, from tensors of whole numbers."""
    members = dist.get_process_group_ranks(process_group)
    size, me = len(members), members.index(dist.get_rank())
    x = [whole(rank, 12 * size, seed) for rank in members]
    block = slice(12 * me, 12 * me + 12)
    total = sum(x)
    assert torch.equal(commdsl.all_reduce(x[me], group=group), total)
    assert torch.equal(commdsl.all_gather(x[me], group=group), torch.cat(x))
    assert torch.equal(commdsl.reduce_scatter(x[me], group=group), total[block])
    assert torch.equal(commdsl.all_to_all(x[me], group=group), torch.cat([value[block] for value in x]))
    assert torch.equal(commdsl.broadcast(x[me], root=size - 1, group=group), x[-1])
    theirs = x[me].clone()
    dist.all_reduce(theirs, group=process_group)
    assert torch.equal(theirs, total)


def mesh() -> None:
    """A mesh of 2 x 2: calls on both axes and on the world, in one random order, give what they give alone."""
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dice = random.Random(5)
    places = [(both["dp"], both.get_group("dp")), (both["tp"], both.get_group("tp")), (None, dist.group.WORLD)]
    for seed in range(12):
        group, process_group = dice.choice(places)
        check_calls(group, process_group, seed)
    names = commdsl.memory_summary().by_group()
    assert len(names) == 3
    commdsl.shutdown()


def wrong_groups() -> None:
    """What is no group, or not of this rank, is refused in a line that says what would be one."""
    x = torch.ones(8)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(
        GroupError, match=r"a mesh of 2 dimensions is no group: pass one of them, mesh\['dp'\] or mesh\['tp'\]$"
    ):
        commdsl.all_reduce(x, group=both)
    few = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        assert torch.equal(commdsl.all_reduce(x, group=few), 2 * x)
    else:
        with pytest.raises(GroupError, match="this process is no rank of that group") as caught:
            commdsl.all_reduce(x, group=few)
        assert "\n" not in str(caught.value)
    with pytest.raises(GroupError, match="no process group named `nobody`"):
        commdsl.all_reduce(x, group="nobody")
    with pytest.raises(GroupError, match="or a mesh of one dimension, got list"):
        commdsl.all_reduce(x, group=[0, 1])
    dist.barrier()
    commdsl.shutdown()


def released() -> None:
    """A group that is released holds nothing, whenever each rank does it, and serves again."""
    x = torch.ones(1000)
    for _ in range(3):
        assert torch.equal(commdsl.all_reduce(x), 4 * x)
        work = commdsl.all_reduce(x, async_op=True)
        assert torch.equal(work.wait(), 4 * x)
        summary = commdsl.memory_summary()
        assert {one.op for one in summary.held} == {"desk", "allreduce_oneshot"}
        assert summary.total_bytes == sum(summary.by_group().values()) > 0
        assert "in all" in str(summary)
        commdsl.release()
        assert commdsl.memory_summary().held == ()
    commdsl.shutdown()


def forked() -> None:
    """A forked child that calls is told so at once, on a group that was used and on another; the parent goes on."""
    x = torch.ones(1000)
    other = dist.new_group()
    commdsl.all_reduce(x)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        said = []
        for group in (None, other):
            try:
                commdsl.all_reduce(x, group=group)
            except GroupError as error:
                said.append(str(error))
        os.write(write, "\n".join(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(said) == 2
    assert "was forked from a rank of group" in said[0]
    assert "of the process that this one was forked from" in said[1]
    assert torch.equal(commdsl.all_reduce(x), 4 * x)
    assert torch.equal(commdsl.all_reduce(x, group=other), 4 * x)
    commdsl.shutdown()


def level(most: tuple[int, int]) -> tuple[int, int, int]:
    """Pages that this process has, descriptors and threads. Some other thread may be about to close a descriptor, or to
    end: where there are more than `most` it gets a moment.
    """
    gc.collect()
    dist.barrier()
    end = time.monotonic() + 2.0
    while True:
        held = len(os.listdir("/proc/self/fd")), threading.active_count()
        if (held[0] <= most[0] and held[1] <= most[1]) or time.monotonic() > end:
            break
        time.sleep(0.02)
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    dist.barrier()
    return resident, *held


def _many(count: int) -> None:
    """Groups that are made and destroyed, with calls on each and on the world between: nothing grows after the tenth.

    Memory of what torch itself keeps of a group is let off: 20 KB each.
    """
    settled, x = (0, 1 << 20, 1 << 20), torch.ones(1000)
    rank = dist.get_rank()
    for number in range(count):
        pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        mine = pairs[rank // 2]
        assert torch.equal(commdsl.all_reduce(x, group=mine), 2 * x)
        work = commdsl.all_reduce(x, group=mine, async_op=True)
        assert torch.equal(commdsl.all_reduce(x), 4 * x)
        assert torch.equal(work.wait(), 2 * x)
        if number % 3 == 0:
            commdsl.release(mine)
        dist.destroy_process_group(mine)
        del mine, pairs, work
        groups.sweep()
        now = level(settled[1:])
        if number + 1 == SETTLED:
            settled = now
        elif number + 1 > SETTLED:
            assert now[1] <= settled[1], (number, settled, now)
            assert now[2] <= settled[2], (number, settled, now)
            assert now[0] < settled[0] + (8 << 20) + 20_000 * (number - SETTLED), (number, settled, now)
    print(f"rank {rank}: {count} groups, from {settled} to {now}", file=sys.stderr)
    commdsl.shutdown()


def thirty_groups() -> None:
    _many(30)


def two_hundred_groups() -> None:
    _many(200)
