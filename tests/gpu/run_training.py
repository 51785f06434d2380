"""A transformer that is trained through commdsl beside NCCL, on meshes of four GPUs. One process per GPU:

    torchrun --nproc-per-node 4 tests/gpu/run_training.py [--steps 100]

The model of examples/tensor_parallel_ddp.py, data x tensor ranks: 2x2 in float32 and bfloat16, bit for bit; 1x4 and
4x1, within what roundings make. Each mesh has groups of its own, all of them in one process. On two GPUs 1x2 and 2x1.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")

import torch
import torch.distributed as dist
from tensor_parallel_ddp import Size, compare, set_up


def sizes(ranks: int, steps: int) -> list[Size]:
    """The meshes of so many GPUs; the most even one in both types."""
    shapes = [(data, ranks // data) for data in range(1, ranks + 1) if ranks % data == 0 and ranks // data <= 8]
    even = min(shapes, key=lambda shape: abs(shape[0] - shape[1]))
    found = [Size(shape, steps) for shape in sorted(shapes, key=lambda shape: shape != even)]
    return [*found[:1], Size(even, steps, dtype=torch.bfloat16), *found[1:]]


def attempt(size: Size, device: torch.device) -> bool:
    """One comparison on all ranks; rank 0 says how it went."""
    begin, said, problem = time.monotonic(), "", ""
    try:
        found = compare(size, device)
        said, problem = found.text(), found.fault
    except BaseException:
        problem = traceback.format_exc(limit=-4)
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    failed = {rank: text for rank, text in enumerate(problems) if text}
    if dist.get_rank() == 0:
        dtype = str(size.dtype).removeprefix("torch.")
        print(f"\n{size.mesh[0]}x{size.mesh[1]} {dtype}, {time.monotonic() - begin:.1f} s", said, sep="\n")
        print(*failed.values() if failed else ["ok"], sep="\n", flush=True)
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(240, exit=True)
    device = set_up()
    wanted = sizes(dist.get_world_size(), options.steps)
    passed = 0
    for size in wanted:
        if not attempt(size, device):
            break  # the ranks may not be at the same place any more
        passed += 1
    if dist.get_rank() == 0:
        print(
            f"\n{passed} of {len(wanted)} trainings as they must be, on {dist.get_world_size()} x {device.type}",
            flush=True,
        )
    sys.stdout.flush()
    os._exit(int(passed < len(wanted)))


if __name__ == "__main__":
    main()
