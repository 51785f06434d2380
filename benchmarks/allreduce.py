"""All-reduce schedules beside NCCL, in one run on the same GPUs:

    torchrun --nproc-per-node 4 benchmarks/allreduce.py [--time-budget 120] [--schedules allreduce_ring]

bfloat16, sum, 1 KB to 64 MB; below 4 MB inside CUDA graphs, from there launch by launch. Every result is compared with
the exact sum first. A time is the median over many batches, timed by events, on the slowest rank. The table comes last.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")

import torch
import torch.distributed as dist

import commdsl

GRAPH_BELOW = 4 << 20
SIZES = (1 << 10, 8 << 10, 64 << 10, 512 << 10, 4 << 20, 16 << 20, 64 << 20)


def whole_numbers(rank: int, numel: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(rank)
    return torch.randint(-8, 9, (numel,), device="cuda", generator=generator, dtype=torch.int32).to(torch.bfloat16)


def captured(call: Callable[[], object], times: int) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph


def microseconds(call: Callable[[], object], nbytes: int, batches: int) -> float:
    """The median time of one call, over batches, on the slowest rank."""
    per_batch = 20 if nbytes < GRAPH_BELOW else 5
    if nbytes < GRAPH_BELOW:
        graph = captured(call, per_batch)
        batch: Callable[[], object] = graph.replay
    else:

        def batch() -> None:
            for _ in range(per_batch):
                call()

    for _ in range(3):
        batch()
    torch.cuda.synchronize()
    found = []
    for _ in range(batches):
        dist.barrier()  # starts ranks together; NCCL's, so it ends on the GPU
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        batch()  # absorbs the skew of the barrier
        start.record()
        batch()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end) / per_batch)
    slowest = torch.tensor(statistics.median(found), device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def measure(
    rows: dict[int, dict[str, str]], schedules: list[str], sizes: list[int], deadline: float, batches: int
) -> None:
    """Fills in the rows one by one, so that those measured are there whatever happens next."""
    rank, size = dist.get_rank(), dist.get_world_size()
    ops = {name: commdsl.load(name) for name in schedules}
    for nbytes in sorted(sizes, key=lambda value: -value):  # the question is 64 MB: first
        numel = nbytes // 2
        tensors = [whole_numbers(other, numel) for other in range(size)]
        want = torch.stack([tensor.float() for tensor in tensors]).sum(0).bfloat16()
        x = tensors[rank]
        row: dict[str, str] = {}
        rows[nbytes] = row
        buffer = x.clone()
        nccl = microseconds(lambda buffer=buffer: dist.all_reduce(buffer), nbytes, batches)
        row["nccl us"] = f"{nccl:.1f}"
        for name, op in ops.items():
            late = torch.tensor(float(time.monotonic() > deadline), device="cuda")
            dist.broadcast(late, 0)
            if late.item():
                row[name] = "no time"
                continue
            wrong = (op(x) != want).any().float()
            dist.all_reduce(wrong)
            if wrong.item():
                row[name] = "WRONG"
                continue
            took = microseconds(lambda op=op, x=x: op(x), nbytes, batches)
            bus = 2 * (size - 1) / size * nbytes / took / 1000
            row[name] = f"{took:.1f} us, {bus:.0f} GB/s, NCCL/this {nccl / took:.2f}"
        if rank == 0:
            print(f"{nbytes >> 10} KB: {row}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", default="allreduce_ring,allreduce_twoshot,allreduce_oneshot")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes")
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--time-budget", type=float, default=150.0)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(options.time_budget + 60, exit=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    rows: dict[int, dict[str, str]] = {}
    try:
        sizes = [int(value) for value in options.sizes.split(",")]
        deadline = time.monotonic() + options.time_budget
        measure(rows, options.schedules.split(","), sizes, deadline, options.batches)
    finally:
        if dist.get_rank() == 0 and rows:
            columns = list(dict.fromkeys(column for row in rows.values() for column in row))
            print(f"\nall-reduce, bfloat16 sum, {dist.get_world_size()} x {torch.cuda.get_device_name()}")
            print(" | ".join(["bytes", *columns]))
            for nbytes, row in sorted(rows.items()):
                print(" | ".join([str(nbytes), *(row.get(column, "") for column in columns)]))
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
