"""Visits between launches on real GPUs, every visit checked. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_visits.py [--calls 40 --time-budget 70 --seed 1 --ways "bulk in place"]

Rings, direct and Hamilton rotations and a ring that carries what its visits write, also in float32 beside keys of any
type, of another length and written in place; by SMs (`bulk`), by few of them, by the copy engine, through cells and put
in place; random sizes (0 B to 16 MB, odd ones too) and dtypes; eagerly, on a stream of one's own, and captured
once and replayed with inputs that change. Each rank is held up at random, on the GPU inside and outside of visits and
on the host. What each visit is handed is compared on the GPU with what the other ranks' seeds say, bit for bit; nothing
but the calls under test communicates. On CPU tensors (`--cpu`, with `torchrun --nproc-per-node 3`) the eager part runs.
The table and the verdict come last in any case. Exit code 1: something wrong, an exception, or fewer calls than asked
for.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "6G")  # every op keeps its workspaces

import runner
import torch

import commdsl
from benchmarks.measure import captured
from benchmarks.report import grid
from commdsl.machine.resources import data_dir

DTYPES = (torch.bfloat16, torch.float32, torch.int32, torch.int64)
SIZES = (0, 2, 1000, 65_537, 1 << 20, 4 << 20)  # elements
TUNES: dict[str, dict[str, Any] | None] = {
    "bulk": None,
    "8 SMs": {"sms": 8},
    "engine": {"protocol": "engine"},
    "bulk in place": {"landing": "place"},
    "tma in place": {"protocol": "tma", "sms": 8, "landing": "place"},
    "engine in place": {"protocol": "engine", "landing": "place"},
}
NAMES = ("rotation_ring", "rotation_direct", "rotation_hamilton", "rotation_carry", "carry_float32")
REPLAYS = 3
GRACE = 15.0
CYCLES_PER_MICROSECOND = 1500


@dataclass
class Row:
    """One op, and what came of its calls."""

    calls: int = 0
    visits: int = 0
    captured: int = 0
    wrong: int = 0
    problem: str = ""


@dataclass
class Run(runner.Run):
    """This rank's part, and the decisions that all ranks make alike."""

    dice: random.Random  # the same on all ranks
    delays: random.Random  # of this rank
    wrong: torch.Tensor
    rows: dict[tuple[str, str], Row] = field(default_factory=dict)

    def delay(self) -> None:
        """On the GPU; now and then on the host as well."""
        if self.on_gpu:
            torch.cuda._sleep(CYCLES_PER_MICROSECOND * self.delays.choice((0, 0, 0, 5, 50, 400)))
        if self.delays.random() < 0.05 and not (self.on_gpu and torch.cuda.is_current_stream_capturing()):
            time.sleep(0.002 * self.delays.random())


def block(run: Run, rank: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """What a rank brings: whole numbers that every rank can make, exact in every dtype when 64 of them are added up."""
    index = torch.arange(numel, device=run.device, dtype=torch.int64)
    return ((index * 7 + seed * 13 + rank * 5) % 16 - 8).to(dtype)


def differs(run: Run, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """1 where a bit differs; nothing waits for it."""
    if got.shape != want.shape or got.dtype != want.dtype:
        return torch.ones((), dtype=torch.int64, device=run.device)
    if not got.numel():
        return torch.zeros((), dtype=torch.int64, device=run.device)
    return (got.view(torch.uint8) != want.view(torch.uint8)).any().to(torch.int64)


@dataclass
class Subject:
    """An op, and calls of it on one size: `kv` may change between calls, and with it what is wanted."""

    run: Run
    name: str
    op: Any
    row: Row
    kv: torch.Tensor
    others: list[torch.Tensor]  # every rank's, in its order; changed beside `kv`
    seen: list[torch.Tensor] = field(default_factory=list)

    def look(self, number: int, kv: torch.Tensor, *acc: torch.Tensor) -> Any:
        self.run.delay()
        self.row.visits += 1
        if self.name not in ("rotation_direct", "rotation_hamilton"):
            self.run.wrong += differs(self.run, kv, self.others[(self.run.rank - number) % self.run.ranks])
        else:
            self.seen.append(kv.clone())
        self.run.delay()
        return [one + kv for one in acc]

    def call(self) -> None:
        self.seen = []
        if self.name == "carry_float32":
            self.call_in_float32()
            return
        zero = [torch.zeros_like(self.kv)] if self.name == "rotation_carry" else []
        made = self.op.visit(self.kv, *zero, self.look)
        if zero:
            self.run.wrong += differs(self.run, made[1], (self.kv * self.run.ranks).to(self.kv.dtype))
        elif self.seen:
            got = torch.stack(self.seen).sort(dim=0).values
            self.run.wrong += differs(self.run, got, torch.stack(self.others).sort(dim=0).values)

    def call_in_float32(self) -> None:
        """What is summed is of a type and a length of its own, and written where it belongs."""
        few = (self.kv.numel() + 1) // 2

        def attend(number: int, kv: torch.Tensor, acc: torch.Tensor, *, out: torch.Tensor) -> None:
            self.look(number, kv)
            torch.add(acc, kv[:few].float(), out=out)

        zero = torch.zeros(few, device=self.kv.device)
        _, made = self.op.visit(self.kv, zero, attend=attend)
        self.run.wrong += differs(self.run, made, self.kv[:few].float() * self.run.ranks)
        self.run.wrong += differs(self.run, zero, torch.zeros_like(zero))

    def refill(self, seed: int) -> None:
        """Other inputs in the same memory."""
        for rank, one in enumerate(self.others):
            one.copy_(block(self.run, rank, one.numel(), one.dtype, seed))
        self.kv.copy_(self.others[self.run.rank])


def subject(run: Run, name: str, op: Any, row: Row, seed: int) -> Subject:
    numel, dtype = run.dice.choice(SIZES), run.dice.choice(DTYPES)
    others = [block(run, rank, numel, dtype, seed) for rank in range(run.ranks)]
    return Subject(run, name, op, row, others[run.rank].clone(), others)


def one_call(run: Run, name: str, op: Any, row: Row, seed: int) -> None:
    """Eagerly, on a stream of one's own, or captured and replayed."""
    how = run.dice.choice(("eager", "stream", "graph")) if run.on_gpu else "eager"
    made = subject(run, name, op, row, seed)
    row.calls += 1
    if how != "graph":
        stream = torch.cuda.Stream() if how == "stream" else None
        if stream is None:
            made.call()
        else:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                made.call()
            torch.cuda.current_stream().wait_stream(stream)
        run.wait()
        return
    graph = captured(made.call, 1, before=1)  # which sets up
    for turn in range(REPLAYS):
        made.refill(seed + 1 + turn)
        run.delay()
        graph.replay()
        row.captured += 1
    run.wait()
    graph.reset()


def source(name: str) -> str | dict[str, str]:
    """A shipped schedule, or its text with sums in float32."""
    if name != "carry_float32":
        return name
    text = (data_dir("schedules") / "attention" / "rotation_carry.comm").read_text(encoding="utf-8")
    return {"carry.comm": text.replace("rotation_carry", name).replace("inout acc ", "inout acc float32 ")}


def calls(run: Run, name: str, tune: str, count: int) -> None:
    """All calls of one op; what goes wrong on any rank ends it on all."""
    run.place, row = f"{name}, {tune}", run.rows.setdefault((name, tune), Row())
    op = commdsl.load(source(name), tune=TUNES[tune], ranks=run.ranks)
    for number in range(count):
        if any(run.everyone(time.monotonic() > run.options.deadline)):
            row.problem = row.problem or "no time left"
            return
        problem, before = "", int(run.wrong.item())
        try:
            one_call(run, name, op, row, seed=number * 31 + len(run.rows))
            op.synchronize()
        except Exception:
            problem = traceback.format_exc(limit=-4)
        row.wrong += int(run.wrong.item()) - before
        found = [text for text in run.everyone(problem) if text]
        if found:
            row.problem = found[0].strip().splitlines()[-1]
            if run.rank == 0:
                print(found[0], flush=True)
            commdsl.reset()
            return
    op.release()


def raising(run: Run) -> str:
    """A function that raises on one rank: the others get theirs, and the next call is right."""
    op = commdsl.load("rotation_ring", ranks=run.ranks)
    mine = torch.full((4096,), float(run.rank), device=run.device)
    seen: list[torch.Tensor] = []

    def fails(number: int, kv: torch.Tensor) -> None:
        seen.append(kv.clone())
        if run.rank == 0 and number == 0:
            raise KeyError("mine")

    try:
        op.visit(mine, fails)
        raised = False
    except KeyError:
        raised = True
    run.wait()
    whole = run.rank == 0 or [int(one[0]) for one in seen] == [(run.rank - n) % run.ranks for n in range(run.ranks)]
    seen.clear()
    op.visit(mine, lambda number, kv: seen.append(kv.clone()))
    again = [int(one[0]) for one in seen] == [(run.rank - n) % run.ranks for n in range(run.ranks)]
    return "" if raised == (run.rank == 0) and whole and again else f"raised {raised}, whole {whole}, again {again}"


def table(run: Run) -> str:
    lines = []
    for (name, tune), row in run.rows.items():
        numbers = (row.calls, row.captured, row.visits, row.wrong)
        lines.append([name, tune, *map(str, numbers), row.problem or "ok"])
    return grid(["schedule", "by", "calls", "replays", "visits", "wrong", ""], lines)


def set_up(options: argparse.Namespace) -> Run:
    joined = runner.joined(options, on_gpu=not options.cpu)
    return Run(
        *joined,
        dice=random.Random(options.seed),
        delays=random.Random(f"{options.seed} {joined[0]}"),
        wrong=torch.zeros((), dtype=torch.int64, device=joined[2]),
    )


def work(run: Run) -> tuple[bool, str]:
    names = [name for name in NAMES if name != "rotation_hamilton" or run.ranks not in (4, 6)]
    for tune in run.options.ways:
        for name in names:
            calls(run, name, tune, run.options.calls)
    run.rows["a function that raises", ""] = Row(calls=1, problem=raising(run))
    failed = any(run.everyone(any(row.wrong or row.problem for row in run.rows.values())))
    return not failed, f"{'WRONG' if failed else 'right'} on {run.where}"


def main() -> None:
    parser = runner.parser_of(__doc__, 10, "of each schedule in each way", seconds=70.0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=[*TUNES], help=", ".join(TUNES))
    options = parser.parse_args()
    options.deadline = time.monotonic() + options.time_budget
    runner.end_of(lambda: set_up(options), work, table, options.time_budget + GRACE, GRACE)


if __name__ == "__main__":
    main()
