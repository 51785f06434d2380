"""The torch ops on real GPUs: the cases of test_runtime.py on CUDA, then large random floats. One process per GPU:

    torchrun --nproc-per-node 4 tests/gpu/run_ops.py

The cases: dtypes and operations, moved dtypes, in place, async_op, gradients, opcheck, torch.compile, refusals. The
floats: every all-reduce on 37 MB gives the same bits on all ranks, and what float64 gives within a rounding per rank.
The copy engine: moves of several rounds, in a graph that is replayed between other calls.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")

import runtime_cases as cases
import torch
import torch.distributed as dist

import commdsl

CASES = (
    cases.every_dtype_and_size,
    cases.every_moved_dtype,
    cases.collectives,
    cases.in_place,
    cases.asynchronous,
    cases.work_of_torch,
    cases.data_parallel,
    cases.gradients,
    cases.opcheck,
    cases.compiled,
    cases.refusals,
    cases.fake_tensors,
    cases.released,
)
ALLREDUCES = ("ring", "twoshot", "oneshot", "halving_doubling", "hamilton")


def large_floats() -> None:
    size = dist.get_world_size()
    for name in ALLREDUCES:
        try:
            op = commdsl.load(f"allreduce_{name}")
        except commdsl.CommError:
            continue  # not for this number of ranks
        for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 4e-3), (torch.float16, 5e-4)):
            x = torch.randn(37 * 2**20 // dtype.itemsize + 5, device="cuda").to(dtype)
            found = op(x)
            exact = x.double()
            dist.all_reduce(exact)
            most = x.double().abs()
            dist.all_reduce(most)
            assert ((found.double() - exact).abs() <= size * tolerance * most).all(), f"{name} {dtype}"
            others = [torch.empty_like(found) for _ in range(size)]
            dist.all_gather(others, found)
            assert all(torch.equal(other, found) for other in others), f"{name} {dtype}: ranks differ"
        op.synchronize()
        op.release()


def copy_engine() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    length = 3_000_001
    parts = [torch.arange(size * length, device="cuda", dtype=torch.int32) * (peer + 1) for peer in range(size)]
    wanted = {
        "allgather_direct": torch.cat(parts),
        "allgather_ring": torch.cat(parts),
        "alltoall_direct": torch.cat([part[rank * length : (rank + 1) * length] for part in parts]),
        "permutation_shift": parts[rank - 1],
        "broadcast_tree": parts[0],
    }
    for tile in ({"tile": 1 << 20}, {}):
        for name, want in wanted.items():
            op = commdsl.load(name, tune={"protocol": "engine", **tile})
            x = parts[rank].clone()
            for _ in range(3):
                assert torch.equal(op(x), want), f"{name}, called"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                found = op(x)
            for turn in range(1, 6):
                x.add_(1)
                graph.replay()
                assert torch.equal(found, want + turn), f"{name}, replay {turn}"
                assert torch.equal(op(parts[rank]), want), f"{name}, after replay {turn}"
            op.synchronize()
            op.release()


def attempt(case: Callable[[], None]) -> bool:
    """Runs one case on all ranks; says how it went on rank 0."""
    started = time.monotonic()
    problem = ""
    try:
        case()
        torch.cuda.synchronize()
    except BaseException:
        problem = traceback.format_exc(limit=-4)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if dist.get_rank() == 0:
        print(f"{case.__name__}: {'FAILED on ' + str(sorted(failed)) if failed else 'ok'}, ", end="")
        print(f"{time.monotonic() - started:.1f} s", *failed.values(), flush=True)
    return not failed


def main() -> None:
    faulthandler.dump_traceback_later(240, exit=True)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    verdicts = [attempt(case) for case in (*CASES, large_floats, copy_engine)]
    if dist.get_rank() == 0:
        failed = verdicts.count(False)
        print(f"{len(verdicts) - failed} passed, {failed} failed on {dist.get_world_size()} GPUs", flush=True)
    sys.stdout.flush()
    os._exit(int(not all(verdicts)))  # NVSHMEM's own end is collective: it must not wait for a rank that failed


if __name__ == "__main__":
    main()
