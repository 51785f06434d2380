"""10,000 collectives as a program makes them, every result checked. One process per GPU:

    torchrun --nproc-per-node 4 tests/gpu/run_mixed.py [--calls 10000 --time-budget 170 --seed 1]

Random collectives, sizes (0 B to 64 MB, odd ones too), dtypes, roots, alignments; on two streams, in place, with
async_op, eagerly and in replayed graphs; each rank held up at random, on the GPU and on the host. All ranks make the
same decisions by the seed, and each computes by itself what it must hold, so nothing but the calls under test
communicates. Results land in memory full of 0xFF and are compared on the GPU, bit for bit; the host looks every
few hundred calls. Exit code 1: a wrong result, an exception, or fewer calls than asked for within the time.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "8G")  # many schedules keep their workspaces side by side

import runner
import torch
import torch.distributed as dist

import commdsl
from benchmarks.cases import Candidate, Case, Collective, parse_candidates
from benchmarks.report import grid
from benchmarks.values import differs, given, poison, wanted

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int32)
MAX_BYTES = 64 << 20
MAX_GRAPH_BYTES = 4 << 20
LOOK_EVERY = 250
GRAPHS_AT_A_TIME = 4
GRACE = 45.0
CYCLES_PER_MICROSECOND = 1500
COLUMNS = (
    "calls",
    "eager",
    "replayed",
    "stream 2",
    "async",
    "in place",
    "unaligned",
    "odd",
    "empty",
    "MB",
    "wrong",
)


@dataclass(frozen=True)
class Call:
    """One call as all ranks draw it."""

    number: int
    case: Case
    dtype: torch.dtype
    root: int
    shift: int  # elements before the tensor's first, so that it starts off a 16-byte boundary
    stream: int
    is_in_place: bool
    is_async: bool
    op: Any  # a loaded schedule; None: the table's choice


@dataclass
class Run(runner.Run):
    """What every part needs to know."""

    group: Any
    dice: random.Random  # the same on all ranks
    delays: random.Random  # this rank's own
    ops: dict[Collective, list[Any]]
    streams: list[torch.cuda.Stream]
    wrong: torch.Tensor  # by call; each call adds to its own, so the two streams never meet
    made: list[tuple[Call, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


# --- what is called ---------------------------------------------------------------------------------------------------


def draw(run: Run, number: int, most: int, *, in_graph: bool) -> Call:
    dice = run.dice
    collective = dice.choice(list(Collective))
    dtype = dice.choice(DTYPES)
    nbytes = 0 if dice.random() < 0.02 else int(2 ** dice.uniform(0, math.log2(most)))
    case = Case(collective, nbytes, run.ranks, dtype.itemsize)
    op = dice.choice(run.ops[collective])
    return Call(
        number=number,
        case=case,
        dtype=dtype,
        root=dice.choice((0, run.ranks - 1)) if op is None else 0,
        shift=dice.randrange(1, 16 // dtype.itemsize) if dice.random() < run.options.unaligned else 0,
        stream=dice.randrange(2),
        is_in_place=dice.random() < 0.25 and collective is Collective.ALL_REDUCE,
        is_async=dice.random() < 0.15 and not in_graph,
        op=op,
    )


def placed(values: torch.Tensor, shift: int) -> torch.Tensor:
    """The same values, starting so many elements after a boundary."""
    if not shift:
        return values
    room = torch.empty(values.numel() + shift, dtype=values.dtype, device=values.device)
    return room[shift:].copy_(values)


def result_of(run: Run, call: Call, x: torch.Tensor) -> torch.Tensor:
    """Makes the call on the current stream; what it gave is usable there."""
    if call.op is not None:
        if call.is_in_place and call.op.works_in_place:
            call.op.in_place(x, group=run.group)
            return x
        found = call.op(x, group=run.group, async_op=call.is_async)
    else:
        found = _chosen(call, x, {"group": run.group, "async_op": call.is_async})
    result: torch.Tensor = found.wait() if call.is_async else found
    return result


def _chosen(call: Call, x: torch.Tensor, settings: dict[str, Any]) -> Any:
    match call.case.collective:
        case Collective.ALL_REDUCE:
            return (commdsl.all_reduce_ if call.is_in_place else commdsl.all_reduce)(x, **settings)
        case Collective.ALL_GATHER:
            return commdsl.all_gather(x, **settings)
        case Collective.REDUCE_SCATTER:
            return commdsl.reduce_scatter(x, **settings)
        case Collective.ALL_TO_ALL:
            return commdsl.all_to_all(x, **settings)
        case Collective.BROADCAST:
            return commdsl.broadcast(x, root=call.root, **settings)


def inputs(run: Run, call: Call, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank puts in, and what it must get."""
    x = given(call.case, run.rank, number, call.dtype, run.device)
    want = wanted(call.case, run.rank, number, call.root, call.dtype, run.device)
    return placed(x, call.shift), want


def compared(run: Run, call: Call, x: torch.Tensor, want: torch.Tensor) -> None:
    if not call.is_in_place:
        poison(want.numel(), want.dtype, want.device)
    run.wrong[call.number] += differs(result_of(run, call, x), want)


# --- eager calls, and replays -----------------------------------------------------------------------------------------


def hold_up(run: Run) -> None:
    """Most calls not at all; some for a while on the GPU, a few on the host."""
    microseconds = run.delays.choice((0, 0, 0, 0, 0, 5, 50, 300))
    if microseconds:
        torch.cuda._sleep(CYCLES_PER_MICROSECOND * microseconds)
    if run.delays.random() < 0.02:
        time.sleep(0.002 * run.delays.random())


def eager(run: Run, call: Call) -> None:
    stream = run.streams[call.stream]
    if run.options.ordered:
        stream.wait_stream(run.streams[1 - call.stream])
    with torch.cuda.stream(stream):
        x, want = inputs(run, call, call.number)
        hold_up(run)
        compared(run, call, x, want)
    run.made.append((call, "eager"))


@dataclass
class Recorded:
    """A graph of a few calls, with the memory it reads: new numbers go in before every replay."""

    calls: tuple[Call, ...]
    tensors: list[tuple[torch.Tensor, torch.Tensor]]
    graph: torch.cuda.CUDAGraph

    def replay(self, run: Run, number: int, stream: int) -> None:
        here, other = run.streams[stream], run.streams[1 - stream]
        # A replay and other calls of the same op are ordered by the caller's streams.
        here.wait_stream(other)
        with torch.cuda.stream(here):
            for offset, (call, (x, want)) in enumerate(zip(self.calls, self.tensors, strict=True)):
                fresh, fresh_want = inputs(run, call, number + offset)
                x.copy_(fresh)
                want.copy_(fresh_want)
            hold_up(run)
            self.graph.replay()
        other.wait_stream(here)
        run.made.extend((call, "replayed") for call in self.calls)


def recorded(run: Run, number: int) -> Recorded:
    """Captures one to four calls, after each was made once eagerly: a capture cannot load or allocate."""
    calls = [draw(run, number + index, MAX_GRAPH_BYTES, in_graph=True) for index in range(run.dice.randint(1, 4))]
    for call in calls:
        eager(run, call)
    torch.cuda.synchronize()
    tensors = [inputs(run, call, call.number) for call in calls]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        for call, (x, want) in zip(calls, tensors, strict=True):
            if run.delays.random() < 0.2:
                torch.cuda._sleep(CYCLES_PER_MICROSECOND * 20)
            compared(run, call, x, want)
        graph.capture_end()
    torch.cuda.synchronize()
    return Recorded(tuple(calls), tensors, graph)


def steps(run: Run) -> Iterator[None]:
    """All calls, a stop after every LOOK_EVERY; graphs are recorded anew there."""
    total = run.options.calls
    while len(run.made) < total:
        graphs: list[Recorded] = []
        for _ in range(GRAPHS_AT_A_TIME):
            if len(run.made) < total:
                graphs.append(recorded(run, len(run.made)))
        until = min(len(run.made) + LOOK_EVERY, total)
        while len(run.made) < until:
            number = len(run.made)
            if run.dice.random() < 0.2:
                run.dice.choice(graphs).replay(run, number, run.dice.randrange(2))
            else:
                eager(run, draw(run, number, MAX_BYTES, in_graph=False))
        yield
        for one in graphs:
            one.graph.reset()


def look(run: Run) -> bool:
    """Waits for all calls so far; whether to go on. Rank 0's clock decides for all."""
    torch.cuda.synchronize()
    commdsl.check(run.group)
    bad = run.wrong.nonzero().flatten().tolist()
    found = run.everyone((len(bad), bad[:5], time.monotonic() > run.options.deadline))
    for rank, (count, first, _) in enumerate(found):
        if count:
            run.problems = [f"rank {rank}: {count} wrong, the first in {[described(run, number) for number in first]}"]
            return False
    if run.rank == 0:
        print(f"{len(run.made)} calls, no fault, {run.options.deadline - time.monotonic():.0f} s left", flush=True)
    return not found[0][2]


def described(run: Run, number: int) -> str:
    call, how = next((call, how) for call, how in run.made if call.number == number)
    return (
        f"call {number}: {call.case.collective} of {call.case.num_in} {call.dtype} ({how}, stream {call.stream}, "
        f"shift {call.shift}, root {call.root}, in place {call.is_in_place}, async {call.is_async}, op {call.op})"
    )


# --- the end ----------------------------------------------------------------------------------------------------------


def table(run: Run) -> str:
    if run.is_hung:
        return f"{len(run.made)} calls were begun"  # what else there is to say lies on the GPU
    bad = {call.number for call, _ in run.made} & set(run.wrong.nonzero().flatten().tolist())
    lines = []
    for collective in Collective:
        mine = [(call, how) for call, how in run.made if call.case.collective is collective]
        tests: dict[str, Callable[[Call, str], bool]] = {
            "calls": lambda call, how: True,
            "eager": lambda call, how: how == "eager",
            "replayed": lambda call, how: how == "replayed",
            "stream 2": lambda call, how: call.stream == 1,
            "async": lambda call, how: call.is_async,
            "in place": lambda call, how: call.is_in_place,
            "unaligned": lambda call, how: call.shift > 0,
            "odd": lambda call, how: call.case.num_in * call.dtype.itemsize % 16 != 0,
            "empty": lambda call, how: call.case.numel == 0,
            "wrong": lambda call, how: call.number in bad,
        }
        counts = {name: str(sum(test(call, how) for call, how in mine)) for name, test in tests.items()}
        counts["MB"] = str(sum(call.case.numel * call.dtype.itemsize for call, _ in mine) >> 20)
        lines.append([collective.value, *(counts[name] for name in COLUMNS)])
    return grid(["", *COLUMNS], lines)


def set_up(options: argparse.Namespace) -> Run:
    joined, group = runner.joined(options), dist.group.WORLD
    ops: dict[Collective, list[Any]] = {collective: [] for collective in Collective}
    for candidate in options.candidates:
        ops[candidate.collective].append(_loaded(candidate, group))
    for found in ops.values():
        if not options.only_candidates or not found:
            found.append(None)
    return Run(
        *joined,
        group=group,
        dice=random.Random(options.seed),
        delays=random.Random(f"{options.seed} {joined[0]}"),
        ops=ops,
        streams=[torch.cuda.Stream(), torch.cuda.Stream()],
        wrong=torch.zeros(options.calls + 8, dtype=torch.int64, device=joined[2]),
    )


def _loaded(candidate: Candidate, group: Any) -> Any:
    tune = dict(candidate.tune) or None
    return commdsl.load(candidate.schedule, params=dict(candidate.params), group=group, tune=tune)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = runner.parser_of(__doc__, 10_000, "of all", seconds=170.0)
    parser.add_argument("--unaligned", type=float, default=0.1, help="share of tensors off a 16-byte boundary")
    parser.add_argument("--ordered", action="store_true", help="no call overlaps one of the other stream")
    parser.add_argument("--candidates", nargs="+", default=[], help="as benchmarks/collectives.py takes them; root 0")
    parser.add_argument("--only-candidates", action="store_true", help="not the tables' choice where there is one")
    options = parser.parse_args(arguments)
    options.candidates = parse_candidates(options.candidates)
    options.deadline = time.monotonic() + options.time_budget
    return options


def work(run: Run) -> tuple[bool, str]:
    run.place = "calls"
    for _ in steps(run):
        if not look(run):
            break
    short = len(run.made) < run.options.calls
    why = f"{len(run.made)} calls on {run.where}{': fewer than asked for' if short else ''}"
    return not (short or run.problems), "\n".join([why, *run.problems])


def main() -> None:
    options = options_of(sys.argv[1:])
    runner.end_of(lambda: set_up(options), work, table, options.time_budget + GRACE, GRACE)


if __name__ == "__main__":
    main()
