"""The torch ops on real GPUs: the cases of test_runtime.py on CUDA, then large random floats. One process per GPU:

    torchrun --nproc-per-node 4 tests/gpu/run_ops.py

The cases: dtypes and operations, moved dtypes, in place, async_op, gradients, opcheck, torch.compile, refusals. The
floats: every all-reduce on 37 MB gives the same bits on all ranks, and what float64 gives within a rounding per rank.
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
    passed = sum(attempt(case) for case in (*CASES, large_floats))
    if dist.get_rank() == 0:
        print(f"{passed} passed, {len(CASES) + 1 - passed} failed on {dist.get_world_size()} GPUs", flush=True)
    sys.stdout.flush()
    os._exit(0)  # NVSHMEM's own end is collective: it must not wait for a rank that failed


if __name__ == "__main__":
    main()
