"""Every shipped schedule on real GPUs against what it must give, bit for bit. One process per GPU:

    torchrun --nproc-per-node 4 tests/gpu/run_schedules.py --time-budget 400 [--quick] [--transport nvshmem mixed]
    COMMDSL_SHARE_GPUS=1 torchrun --nproc-per-node 8 tests/gpu/run_schedules.py --quick --stages oracle --transport peer

More ranks than GPUs share them, where COMMDSL_SHARE_GPUS allows it: right, and slow, as their kernels take turns.

Stages: `oracle` (random floats of three sizes against the interpreter), `sizes` (five dtypes, 0 B to 64 MB, eager, in
a CUDA graph, on two streams), `calls` (1,000 calls in each of the three ways, ranks delayed at random), and last a rank
that never calls. Whole numbers are used where sizes are large: every order of summation gives the same bits. A stage
that fails on one rank fails on all, the group is reset, and the run goes on. The table comes last in any case.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import random
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")

import numpy as np
import torch
import torch.distributed as dist
from collectives import Case, main_case, shipped
from transports import TRANSPORT_HELP, TRANSPORTS, choose_transport

import commdsl

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64)
OTHERS = (torch.float64, torch.int16, torch.int8, torch.uint8, torch.bool)
SIZES = (0, 8, 1000, 65544, 1 << 20, 16 << 20, 64 << 20)  # bytes of the op's largest tensor, about
POOL = 8


@dataclass
class Row:
    """One line of the table."""

    name: str
    results: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """What every stage needs to know."""

    rank: int
    size: int
    quick: bool
    deadline: float
    agree: Any  # a gloo group for verdicts
    rows: dict[str, Row] = field(default_factory=dict)

    def note(self, name: str, stage: str, text: str) -> None:
        self.rows.setdefault(name, Row(name)).results[stage] = text

    def everyone(self, value: object) -> list[Any]:
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.agree)
        return found

    def time_is_up(self) -> bool:
        """Rank 0's clock decides for all."""
        return bool(self.everyone(time.monotonic() > self.deadline)[0])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def whole_numbers(rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same on every GPU of one kind; sums of 16 ranks are exact in bfloat16."""
    generator = torch.Generator(device="cuda").manual_seed(seed * 1009 + rank)
    return torch.randint(-8, 9, (numel,), device="cuda", generator=generator, dtype=torch.int32).to(dtype)


def poison(like: torch.Tensor) -> None:
    """The next tensor of this size comes from memory full of 0xFF: what the op leaves unwritten shows."""
    torch.full((max(bytes_of(like).numel(), 1),), 255, dtype=torch.uint8, device="cuda")


@dataclass
class Subject:
    """A shipped schedule as an op on one group, and what its result must be."""

    case: Case
    op: Any
    group: Any
    run: Run

    @property
    def blocks(self) -> int:
        signature = self.op.program(self.run.size).signature
        return max(port.blocks for port in (*signature.inputs, *signature.outputs))

    def numel(self, nbytes: int, dtype: torch.dtype) -> int:
        """Elements of the input, so that the largest tensor has about `nbytes`."""
        per_block = nbytes // dtype.itemsize // self.blocks
        return per_block * self.op.program(self.run.size).signature.inputs[0].blocks

    def inputs(self, numel: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
        return [whole_numbers(rank, numel, dtype, seed) for rank in range(self.run.size)]

    def call(self, x: torch.Tensor) -> torch.Tensor:
        result = self.op(x, group=self.group)
        return result[-1] if isinstance(result, tuple) else result

    def verdict(self, got: torch.Tensor, want: torch.Tensor | None) -> torch.Tensor:
        """A flag on the GPU: no host synchronization here."""
        if want is None:
            return torch.zeros((), dtype=torch.bool, device="cuda")
        if self.case.collective == "rotation":
            got = got.sort(dim=0).values
        return (bytes_of(got) != bytes_of(want)).any()

    def want(self, x: list[torch.Tensor]) -> torch.Tensor | None:
        """What this rank must hold, None: anything."""
        rank, size = self.run.rank, self.run.size
        params = dict(self.case.params)
        root = params.get("root", 0)
        block = x[0].numel() // size
        match self.case.collective:
            case "allreduce":
                return total(x)
            case "reducescatter":
                return total([value[rank * block : (rank + 1) * block] for value in x])
            case "allgather":
                return torch.cat(x)
            case "alltoall":
                return torch.cat([value[rank * block : (rank + 1) * block] for value in x])
            case "broadcast":
                return x[root]
            case "reduce":
                return total(x) if rank == root else None
            case "gather":
                return torch.cat(x) if rank == root else None
            case "scatter":
                return x[root][rank * block : (rank + 1) * block]
            case "permutation":
                return x[(rank - params.get("K", 1)) % size]
            case "rotation":
                return torch.stack(x).sort(dim=0).values
            case other:
                raise ValueError(f"no such collective: {other}")


def total(x: list[torch.Tensor]) -> torch.Tensor:
    result = x[0].clone()
    for value in x[1:]:
        result += value
    return result


# --- the three ways to call ------------------------------------------------------------------------------------------


def delay(microseconds: int) -> None:
    if microseconds:
        torch.cuda._sleep(1500 * microseconds)


def eager(subject: Subject, pool: list[tuple[torch.Tensor, Any]], calls: int, dice: random.Random) -> torch.Tensor:
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for index in range(calls):
        x, want = pool[index % len(pool)]
        delay(dice.choice((0, 0, 5, 50)))
        if dice.random() < 0.01:
            time.sleep(0.001 * dice.random())
        if want is not None:
            poison(want)
        wrong += subject.verdict(subject.call(x), want)
    return wrong


def graph(subject: Subject, pool: list[tuple[torch.Tensor, Any]], calls: int, dice: random.Random) -> torch.Tensor:
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    subject.call(pool[0][0])  # warmed up before the capture
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: it collects garbage first, which would be most of the time of these hundreds of captures.
    with torch.cuda.stream(torch.cuda.Stream()):
        captured.capture_begin()
        for x, want in pool:
            delay(dice.choice((0, 5, 30)))
            wrong += subject.verdict(subject.call(x), want)
        captured.capture_end()
    for _ in range(max(1, calls // len(pool))):
        if dice.random() < 0.05:
            time.sleep(0.001 * dice.random())
        captured.replay()
    torch.cuda.synchronize()
    captured.reset()
    return wrong


def two_streams(
    subject: Subject, pool: list[tuple[torch.Tensor, Any]], calls: int, dice: random.Random
) -> torch.Tensor:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    wrong = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in streams]
    torch.cuda.synchronize()
    order = random.Random(calls)  # the same on all ranks: calls of one op have one order
    for index in range(calls):
        which = order.randrange(2)
        x, want = pool[index % len(pool)]
        with torch.cuda.stream(streams[which]):
            delay(dice.choice((0, 0, 5, 50)))
            wrong[which] += subject.verdict(subject.call(x), want)
    torch.cuda.synchronize()
    return wrong[0] + wrong[1]


WAYS: dict[str, Callable[..., torch.Tensor]] = {"eager": eager, "graph": graph, "streams": two_streams}


# --- stages: each yields (what, number of wrong calls) ---------------------------------------------------------------


def sizes(subject: Subject) -> Iterator[tuple[str, int]]:
    dtypes = DTYPES[:2] if subject.run.quick else DTYPES
    steps = (0, 8, 65544, 4 << 20) if subject.run.quick else SIZES
    for number, dtype in enumerate(dtypes):
        for nbytes in steps:
            seed = random.Random(f"{subject.case} {number} {nbytes}").randrange(1 << 30)
            numel = subject.numel(nbytes, dtype)
            pool = []
            for turn in range(2):
                x = subject.inputs(numel, dtype, seed + turn)
                pool.append((x[subject.run.rank], subject.want(x)))
            dice = random.Random(seed + subject.run.rank)
            for name, way in WAYS.items():
                calls = 2 if name == "graph" else 3
                yield f"{dtype} {nbytes} B {name}", int(way(subject, pool, calls, dice).item())
            del pool


def calls(subject: Subject) -> Iterator[tuple[str, int]]:
    number = 200 if subject.run.quick else 1000
    for dtype, nbytes in ((torch.bfloat16, 24568), (torch.float32, 520)):
        pool = []
        for seed in range(POOL):
            x = subject.inputs(subject.numel(nbytes, dtype), dtype, seed + 77)
            pool.append((x[subject.run.rank], subject.want(x)))
        dice = random.Random(subject.run.rank + nbytes)
        for name, way in WAYS.items():
            yield f"{number} calls {dtype} {nbytes} B {name}", int(way(subject, pool, number, dice).item())


def oracle(subject: Subject) -> Iterator[tuple[str, int]]:
    """Random floats: the kernel's order of summation and its rounding are the interpreter's."""
    from commdsl import compiler
    from commdsl.ir import interpret
    from commdsl.machine import dtypes

    schedule = compiler.check(subject.case.path, ranks=subject.run.size, params=dict(subject.case.params)).schedule
    reduces = subject.op.has_reduction
    for dtype in DTYPES[:2] if subject.run.quick else (*DTYPES, *OTHERS):
        kind = dtypes.BY_NAME[str(dtype).removeprefix("torch.")]
        for elements in (1, 37, 4099) if dtype in DTYPES else (37,):
            numel = elements * subject.op.program(subject.run.size).signature.inputs[0].blocks
            generator = torch.Generator().manual_seed(elements)
            x = [(torch.randn(numel, generator=generator) * 50).to(dtype) for _ in range(subject.run.size)]
            given = [numpy_of(value, kind.storage) for value in x]
            name = subject.op.program(subject.run.size).signature.inputs[0].name
            ops = [op for op in ("sum", "avg", "max") if op in kind.ops] if reduces else ["sum"]
            ops = ops if dtype in DTYPES else ops[:2]
            for op in ops if elements == 37 else ops[:1]:
                result = interpret.run(schedule, {name: given}, kind, op)
                found = subject.op(x[subject.run.rank].cuda(), group=subject.group, op=op)
                wrong = 0
                for tensor, want in zip(as_tuple(found), expected_arrays(subject, result), strict=True):
                    wrong += want is not None and not np.array_equal(numpy_of(tensor.cpu(), kind.storage), want)
                yield f"oracle {dtype} {elements} {op}", int(wrong)


def expected_arrays(subject: Subject, result: Any) -> Iterator[Any]:
    rank = subject.run.rank
    only_root = subject.case.collective in ("reduce", "gather")
    free = (only_root and rank != dict(subject.case.params).get("root", 0)) or subject.case.collective == "rotation"
    for arrays in result.outputs.values():
        yield None if free else arrays[rank]
    if result.yields:
        yield np.concatenate([arrays[rank] for arrays in result.yields])


def as_tuple(found: Any) -> tuple[torch.Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def numpy_of(tensor: torch.Tensor, storage: Any) -> Any:
    return bytes_of(tensor).numpy().view(storage)


STAGES: dict[str, Callable[[Subject], Iterator[tuple[str, int]]]] = {"calls": calls, "oracle": oracle, "sizes": sizes}


def absent(run: Run) -> str:
    """Rank 1 stays away from one call; the others raise and name it; after a reset all go on."""
    kept = os.environ["COMMDSL_TIMEOUT"]
    os.environ["COMMDSL_TIMEOUT"] = "3"
    group = dist.new_group()
    op = commdsl.load("allreduce_ring", group=group)
    x = torch.full((1000,), float(run.rank), device="cuda")
    op(x, group=group)
    op.synchronize(group)
    os.environ["COMMDSL_TIMEOUT"] = kept
    verdict = "ok"
    started = time.monotonic()
    if run.rank != 1:
        try:
            op(x, group=group)
            op.synchronize(group)
            verdict = "no error was raised"
        except commdsl.CommTimeout as error:
            took = time.monotonic() - started
            verdict = f"ok after {took:.1f} s" if error.missing == (1,) else f"named {error.missing}: {error}"
            if run.rank == 0:
                print(f"  {error}", flush=True)
        except commdsl.PeerError as error:  # another rank's wait was over first
            verdict = "ok" if "its wait for rank 1 took too long" in str(error) else str(error)
        try:
            op(x, group=group)
            verdict = "a broken group was used"
        except RuntimeError:
            pass
    commdsl.reset(group)
    wrong = not torch.equal(op(x, group=group), torch.full_like(x, sum(range(run.size))))
    op.release(group)
    return "wrong after the reset" if wrong else verdict


# --- the run ---------------------------------------------------------------------------------------------------------


def guarded(run: Run, subject: Subject, stage: str, label: str) -> bool:
    """One stage of one schedule on all ranks; False when the group could not be brought back."""
    started = time.monotonic()
    problem, checked = "", 0
    try:
        for what, wrong in STAGES[stage](subject):
            checked += 1
            if wrong:
                problem = f"{what}: {wrong} wrong"
                break
        subject.op.synchronize(subject.group)
    except Exception:
        problem = traceback.format_exc(limit=-3).strip()
    found = {rank: text for rank, text in enumerate(run.everyone(problem)) if text}
    took = time.monotonic() - started
    name = str(subject.case)
    if not found:
        run.note(name, label, f"{checked} in {took:.1f}s")
        return True
    if run.rank == 0:
        print(f"FAILED {name} {label}: ranks {sorted(found)}\n{next(iter(found.values()))}", flush=True)
    run.note(name, label, f"FAILED on {sorted(found)}")
    try:
        commdsl.reset(subject.group)
        healed = ""
    except Exception as error:
        healed = str(error)
    return not any(run.everyone(healed))


def prepare(run: Run, case: Case, group: Any, label: str) -> Subject | None:
    """Loads a schedule and makes its first call; notes how long both took."""
    problem, subject, loaded, called = "", None, 0.0, 0.0
    try:
        started = time.monotonic()
        op = commdsl.load(case.path, params=dict(case.params), group=group)
        loaded = time.monotonic() - started
        subject = Subject(case, op, group, run)
        x = torch.ones(subject.numel(4096, torch.float32), device="cuda")
        op(x, group=group)
        op.synchronize(group)
        called = time.monotonic() - started - loaded
    except Exception:
        problem = traceback.format_exc(limit=-3).strip()
    found = [text for text in run.everyone(problem) if text]
    if found:
        if run.rank == 0:
            print(f"FAILED to set up {case} ({label}): {found[0]}", flush=True)
        run.note(str(case), label, "FAILED to set up")
        try:
            commdsl.reset(group)
        except Exception as error:
            print(f"rank {run.rank}: {error}", flush=True)
        return None
    run.note(str(case), f"load {label}", f"{1000 * loaded:.0f}+{1000 * called:.0f} ms")
    return subject


def pass_over(run: Run, transport: str, stages: list[str], cases: list[Case]) -> None:
    choose_transport(transport, run.size)
    group = dist.new_group()  # its communicator is made on the first call, with this transport
    for case in cases:
        if run.time_is_up():
            run.note(str(case), transport, "no time")
            continue
        subject = prepare(run, case, group, transport)
        if subject is None:
            continue
        for stage in stages:
            if run.time_is_up():
                run.note(str(case), f"{transport} {stage}", "no time")
            elif not guarded(run, subject, stage, f"{transport} {stage}"):
                if run.rank == 0:
                    print(f"the group did not come back after {case}: a new one", flush=True)
                group = dist.new_group()
                break
        else:
            subject.op.release(group)
        if run.rank == 0:
            row = run.rows[str(case)].results
            print(f"{case} {transport}: " + "; ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        torch.cuda.empty_cache()


def table(run: Run) -> bool:
    """Printed on rank 0; whether all that ran was right."""
    if run.rank != 0:
        return True
    columns = list(dict.fromkeys(column for row in run.rows.values() for column in row.results))
    print(f"\n{run.size} GPUs, {torch.cuda.get_device_name()}")
    print(" | ".join(["schedule", *columns]))
    for row in run.rows.values():
        print(" | ".join([row.name, *(row.results.get(column, "") for column in columns)]))
    failed = [row.name for row in run.rows.values() if any("FAILED" in text for text in row.results.values())]
    late = [row.name for row in run.rows.values() if any(text == "no time" for text in row.results.values())]
    print(f"{len(run.rows)} rows, {len(failed)} failed {failed}, {len(late)} cut short {late}", flush=True)
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two dtypes, fewer sizes, 200 calls")
    parser.add_argument(
        "--time-budget", type=float, default=480.0, help="seconds; what does not fit is said in the table"
    )
    parser.add_argument(
        "--transport", nargs="+", choices=list(TRANSPORTS), default=["peer", "nvshmem"], help=TRANSPORT_HELP
    )
    parser.add_argument("--stages", default="calls,oracle,sizes")
    parser.add_argument("--only", default="", help="part of a schedule's name")
    options = parser.parse_args()
    # The last resort against a hang: every rank says where it stands, and ends.
    faulthandler.dump_traceback_later(options.time_budget + 60, exit=True)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group("gloo")
    deadline = time.monotonic() + options.time_budget
    run = Run(dist.get_rank(), dist.get_world_size(), options.quick, deadline, dist.new_group())
    found = (main_case(path, run.size) for path in shipped())
    cases = [case for case in found if case is not None and options.only in case.name]
    try:
        for transport in options.transport:
            pass_over(run, transport, options.stages.split(","), cases)
        choose_transport("peer", run.size)
        if not run.time_is_up():
            verdicts = set(run.everyone(absent(run)))
            timed_out = any(verdict.startswith("ok after") for verdict in verdicts)
            right = timed_out and all(verdict.startswith("ok") for verdict in verdicts)
            run.note("a rank that never calls", "absent", f"{'' if right else 'FAILED: '}{'; '.join(sorted(verdicts))}")
        ended = True
    except Exception:
        print(f"rank {run.rank}: {traceback.format_exc()}", flush=True)
        ended = False
    is_right = table(run)
    sys.stdout.flush()
    os._exit(int(not (ended and is_right)))  # NVSHMEM's own end is collective: it must not wait for a rank that failed


if __name__ == "__main__":
    main()
