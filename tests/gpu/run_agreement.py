"""Calls that differ from rank to rank, on real GPUs: each a named error in time. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_agreement.py [--random 40 --seed 1 --protocols packet,line]

Rank 0 calls with another size, dtype, operation, schedule or order than the others, makes one call more, calls with
nothing, or comes when the others have given up; then calls at random with one of these. After each the group is reset
and a call has to be right. With `--cpu` the same runs on host ranks. The table comes last. Exit code 1: a call that
returned where an error was due, an error of another kind or without both sides, one that took too long, or a wrong
result after the reset.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("COMMDSL_TIMEOUT", "8")

import torch
import torch.distributed as dist

import commdsl
from benchmarks.report import grid

RING, TWOSHOT = "allreduce_ring", "allreduce_twoshot"
SECONDS = float(os.environ["COMMDSL_TIMEOUT"])
SLACK = 6.0  # of a rank that asks its peer what it called, and of a machine under load
NAMED = (commdsl.AgreementError, commdsl.PeerError)
LATE = (*NAMED, commdsl.CommTimeout)


@dataclass(frozen=True)
class Call:
    schedule: str = RING
    elements: int = 4096
    dtype: torch.dtype = torch.float32
    op: str = "sum"


Case = tuple[list[Call], list[Call]]
"""What rank 0 calls, and what the others call."""

CASES: dict[str, Case] = {
    "size": ([Call(elements=2048)], [Call()]),
    "dtype": ([Call(dtype=torch.bfloat16, elements=8192)], [Call()]),
    "operation": ([Call(op="max")], [Call()]),
    "schedule": ([Call(TWOSHOT)], [Call()]),
    "nothing": ([Call(elements=0), Call()], [Call()]),
    "order": ([Call(), Call(elements=64)], [Call(elements=64), Call()]),
    "one call more": ([Call(), Call(elements=64)], [Call(elements=64)]),
}


class Bench:
    """This rank's part."""

    def __init__(self, device: torch.device, protocols: list[str]) -> None:
        self.rank, self.ranks, self.device = dist.get_rank(), dist.get_world_size(), device
        tunes = ({"protocol": name} for name in protocols)
        self.ops = {
            name: commdsl.load(name, ranks=self.ranks, tune=tune)
            for name, tune in zip((RING, TWOSHOT), tunes, strict=True)
        }
        self.rows: list[tuple[str, str, str, str]] = []
        self.failed = False

    def make(self, call: Call) -> torch.Tensor:
        x = torch.full((call.elements,), self.rank + 1, dtype=call.dtype, device=self.device)
        return self.ops[call.schedule](x, op=call.op)

    def finish(self) -> None:
        for op in self.ops.values():
            op.synchronize()

    def case(self, name: str, work: Callable[[], None], due: tuple[type[BaseException], ...]) -> None:
        began, problem, said = time.monotonic(), "", "no error"
        try:
            work()
            self.finish()
            problem = "it returned"
        except due as error:
            said = str(error)
            if isinstance(error, commdsl.AgreementError) and said.count(" calls ") < 2:
                problem = "not both sides"
        except Exception as error:
            said, problem = str(error), type(error).__name__
        seconds = time.monotonic() - began
        if seconds > 2 * SECONDS + SLACK:
            problem = problem or "too late"
        commdsl.reset()
        wrong = self.wrong()  # by all ranks, whatever came before
        problem = problem or wrong
        self.rows.append((name, f"{seconds:.2f} s", problem or "ok", said[:100]))
        self.failed |= bool(problem)

    def wrong(self) -> str:
        """After the reset: what is wrong with one call of each op, if anything."""
        for name in self.ops:
            total = self.ranks * (self.ranks + 1) // 2
            if not bool((self.make(Call(name)) == total).all()):
                return f"a wrong {name} after the reset"
        self.finish()
        return ""

    def run(self, case: Case) -> Callable[[], None]:
        def work() -> None:
            for call in case[0] if self.rank == 0 else case[1]:
                self.make(call)

        return work

    def late(self) -> None:
        if self.rank == 0:
            time.sleep(1.5 * SECONDS)
        self.make(Call())


def at_random(dice: random.Random) -> Case:
    """Calls of which those of rank 0 differ in one thing, followed by one that all make."""
    calls = [Call(dice.choice((RING, TWOSHOT)), dice.choice((0, 48, 4096, 1 << 20))) for _ in range(4)]
    at = dice.randrange(3)
    one = calls[at]
    other = dice.choice(
        (
            Call(one.schedule, one.elements + 24, one.dtype, one.op),
            Call(one.schedule, one.elements, torch.int32, one.op),
            Call(one.schedule, one.elements, one.dtype, "max"),
            Call(TWOSHOT if one.schedule == RING else RING, one.elements, one.dtype, one.op),
        )
    )
    return [*calls[:at], other, *calls[at + 1 :]], calls


def main() -> int:
    parser = argparse.ArgumentParser(description="Calls that differ from rank to rank.")
    parser.add_argument("--random", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--protocols", default="bulk,bulk", help="of the ring and of the two shots")
    given = parser.parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu") if given.cpu else torch.device("cuda", local % max(torch.cuda.device_count(), 1))
    if not given.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo")
    bench = Bench(device, given.protocols.split(","))
    for name in (RING, TWOSHOT):
        for dtype in (torch.float32, torch.bfloat16, torch.int32):
            for op in ("sum", "max"):  # loaded on all ranks before one of them calls it alone
                bench.make(Call(name, 64, dtype, op))
    bench.finish()
    for name, case in CASES.items():
        bench.case(name, bench.run(case), NAMED)
    bench.case("late rank", bench.late, LATE)
    dice = random.Random(given.seed)
    for number in range(given.random):
        bench.case(f"random {number}", bench.run(at_random(dice)), NAMED)
    report(bench)
    commdsl.shutdown()
    dist.destroy_process_group()
    return int(bench.failed)


def report(bench: Bench) -> None:
    """Rank after rank: every case by name, those at random where something is wrong."""
    for rank in range(bench.ranks):
        dist.barrier()
        if rank == bench.rank:
            shown: list[Any] = [row for row in bench.rows if not row[0].startswith("random") or row[2] != "ok"]
            right = sum(row[2] == "ok" for row in bench.rows)
            print(f"rank {rank}: {right} of {len(bench.rows)} right", flush=True)
            print(grid(("case", "time", "verdict", "said"), shown), flush=True)


if __name__ == "__main__":
    sys.exit(main())
