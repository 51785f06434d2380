"""Groups made and destroyed on real GPUs, with calls on all of them interleaved; every result checked, bit for bit.

    torchrun --nproc-per-node 4 tests/gpu/run_groups.py [--rounds 50 --time-budget 300] [--transport mixed]
    COMMDSL_SHARE_GPUS=1 torchrun --nproc-per-node 8 tests/gpu/run_groups.py --rounds 12

Every round makes a mesh of 2 x (ranks / 2), calls all five collectives on both axes and on the world in one random
order, the same on all ranks, and destroys the mesh's groups. Numbers are whole, so that every order of summation has
the same bits, and what a rank must hold is computed on the host. After the tenth round the memory of the GPU, the
descriptors and the threads of a rank stay as they are. Exit code 1: a wrong result, an exception, a level that grows.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "60")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transports import TRANSPORT_HELP, TRANSPORTS, choose_transport

import commdsl

SETTLED = 10
"""Rounds after which nothing may grow."""

SLACK_BYTES = 8 << 20
"""Of the GPU's memory: what other programs of the driver take meanwhile."""

BYTES = (1 << 10, 40_000, 1 << 20, 4 << 20)  # of the larger side, about
GRACE = 60.0


@dataclass(frozen=True)
class Axis:
    """A group of the mesh, or the world."""

    name: str
    group: Any
    ranks: tuple[int, ...]  # of the world
    me: int


@dataclass(frozen=True)
class Level:
    """What a rank holds between two rounds."""

    free_bytes: int
    descriptors: int
    threads: int


def given(axis: Axis, seed: int, numel: int) -> list[torch.Tensor]:
    """What each rank of the group puts in, on the host."""
    found = []
    for rank in axis.ranks:
        generator = torch.Generator().manual_seed(seed * 997 + rank)
        found.append(torch.randint(-8, 9, (numel,), generator=generator, dtype=torch.int32).to(torch.float32))
    return found


def called(collective: str, axis: Axis, x: torch.Tensor, root: int) -> torch.Tensor:
    match collective:
        case "all_reduce":
            return commdsl.all_reduce(x, group=axis.group)
        case "all_gather":
            return commdsl.all_gather(x, group=axis.group)
        case "reduce_scatter":
            return commdsl.reduce_scatter(x, group=axis.group)
        case "all_to_all":
            return commdsl.all_to_all(x, group=axis.group)
        case _:
            return commdsl.broadcast(x, root=root, group=axis.group)


def wanted(collective: str, axis: Axis, x: list[torch.Tensor], root: int) -> torch.Tensor:
    block = x[0].numel() // len(x)
    mine = slice(axis.me * block, (axis.me + 1) * block)
    match collective:
        case "all_reduce":
            return torch.stack(x).sum(0)
        case "all_gather":
            return torch.cat(x)
        case "reduce_scatter":
            return torch.stack(x).sum(0)[mine]
        case "all_to_all":
            return torch.cat([value[mine] for value in x])
        case _:
            return x[root]


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")


def axes_of(ranks: int) -> list[Axis]:
    """A new mesh of groups, and the world."""
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("dp", "tp"))
    found = [Axis(name, mesh[name], *members(mesh.get_group(name))) for name in ("dp", "tp")]
    return [*found, Axis("world", None, *members(dist.group.WORLD))]


def members(group: Any) -> tuple[tuple[int, ...], int]:
    return tuple(dist.get_process_group_ranks(group)), dist.get_rank(group)


def round_of_calls(number: int, axes: list[Axis]) -> list[str]:
    """What was wrong. All calls are under way before the host looks."""
    dice = random.Random(number)
    # Every group gets calls of every collective; a rank's groups are as many and in the same order on all ranks.
    plan = [(index, collective, dice.choice(BYTES)) for index in range(len(axes)) for collective in COLLECTIVES] * 2
    dice.shuffle(plan)
    made = []
    for turn, (index, collective, nbytes) in enumerate(plan):
        axis = axes[index]
        numel = numel_of(collective, axis, nbytes)
        root = dice.randrange(2)
        x = given(axis, 1000 * number + turn, numel)
        result = called(collective, axis, x[axis.me].cuda(), root)
        made.append((f"{collective} of {numel} on {axis.name}", result, wanted(collective, axis, x, root)))
    torch.cuda.synchronize()
    commdsl.check()
    return [what for what, result, want in made if not torch.equal(result.cpu(), want)]


def warm(world: Axis) -> None:
    """All that the world, which stays, will ever hold."""
    for collective in COLLECTIVES:
        for nbytes in BYTES:
            for root in range(2):
                called(collective, world, torch.zeros(numel_of(collective, world, nbytes), device="cuda"), root)
    torch.cuda.synchronize()


def numel_of(collective: str, axis: Axis, nbytes: int) -> int:
    """Of what a rank puts in; the larger side has about so many bytes."""
    size = len(axis.ranks)
    return max(nbytes // 4 // (size if collective == "all_gather" else 1) // size, 1) * size


def level() -> Level:
    commdsl.memory_summary()  # what belongs to destroyed groups is given back, as with the next set-up
    torch.cuda.empty_cache()
    dist.barrier()  # nobody is in the middle of giving back
    free, _ = torch.cuda.mem_get_info()
    found = Level(free, len(os.listdir("/proc/self/fd")), threading.active_count())
    dist.barrier()
    return found


def grown(first: Level, last: Level) -> list[str]:
    found = []
    if last.free_bytes < first.free_bytes - SLACK_BYTES:
        found.append(f"{(first.free_bytes - last.free_bytes) >> 20} MB less of the GPU are free")
    if last.descriptors > first.descriptors:
        found.append(f"{last.descriptors - first.descriptors} more descriptors are open")
    if last.threads > first.threads:
        found.append(f"{last.threads - first.threads} more threads run")
    return found


def everyone(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def rounds(options: argparse.Namespace) -> list[str]:
    """What went wrong, on whatever rank."""
    rank, ranks, settled = dist.get_rank(), dist.get_world_size(), None
    for number in range(options.rounds):
        started = time.monotonic()
        axes = axes_of(ranks)
        if number == 0:
            warm(axes[2])
        wrong = round_of_calls(number, axes)
        summary = commdsl.memory_summary()
        for axis in axes[:2]:
            dist.destroy_process_group(axis.group.get_group())
        del axes
        now = level()
        if number + 1 == SETTLED:
            settled = now
        if settled is not None:
            wrong += grown(settled, now)
        found = [f"round {number}, rank {peer}: {text}" for peer, texts in enumerate(everyone(wrong)) for text in texts]
        if rank == 0:
            took = time.monotonic() - started
            print(
                f"round {number}: {took:.2f} s, {summary.total_bytes >> 20} MB symmetric in use, "
                f"{now.free_bytes >> 20} MB of the GPU free, {now.descriptors} descriptors, {now.threads} threads",
                flush=True,
            )
        if found:
            return found
        if any(everyone(time.monotonic() > options.deadline)):
            return [f"{number + 1} of {options.rounds} rounds in the time there was"]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--time-budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--transport", choices=list(TRANSPORTS), default="peer", help=TRANSPORT_HELP)
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.time_budget
    faulthandler.dump_traceback_later(options.time_budget + GRACE, exit=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    choose_transport(options.transport, dist.get_world_size())
    try:
        problems = rounds(options)
    except Exception:
        problems = [f"rank {dist.get_rank()}: {traceback.format_exc()}"]
    if problems and (dist.get_rank() == 0 or "Traceback" in problems[0]):
        print("\n".join(problems), flush=True)
    if dist.get_rank() == 0 and not problems:
        ranks, gpus = dist.get_world_size(), torch.cuda.device_count()
        print(f"{options.rounds} rounds of {ranks} ranks on {gpus} GPUs, {options.transport}: right")
    sys.stdout.flush()
    if not problems:
        commdsl.shutdown()
    os._exit(int(bool(problems)))  # NVSHMEM's own end is collective: it must not wait for a rank that failed


if __name__ == "__main__":
    main()
