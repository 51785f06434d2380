"""Attention of a batch of documents, forward and backward, where a balanced plan computes it, beside where it lies:

    torchrun --nproc-per-node 4 benchmarks/documents.py [--tokens 64K --seeds 7,2,1 --time-budget 80 --save NAME]

Documents of log-normal lengths are laid end to end over the ranks, as trainers pack them; bfloat16, causal, 32 heads of
queries and 8 of keys, of 128. Three plans of the same batch, by `Dispatcher.attend` all of them: `balanced` (as
`dispatch.plan` balances), `unbalanced` (queries stay, keys of documents on several ranks travel) and `own rank` (each
document whole on the rank that has most of it). Results and gradients of all three must agree.

A step is attention forward and backward. Its time is the median of the slowest rank, plans taking turns; `alone` is the
same without what travels, the slowest rank's, and `exposed` the difference. `route ms` is what the host takes from a
plan to tables that are ready, proof and all. `*` marks a figure that is missed: where the unbalanced plan's imbalance
is 1.6 or more, balanced is 1.3 times as fast. Exit code 1: results differ, or nothing was measured. `--device cpu` goes
through it all on processors with a few tokens: the times say nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.cases import parse_size
from benchmarks.ending import end_of
from benchmarks.report import grid
from commdsl import compiler, dispatch
from commdsl.ir.plans import DispatchPlan
from commdsl.ir.routes import Longs
from commdsl.machine.topology import switch
from commdsl.planner import documents, packing
from commdsl.planner.balance import Balance, Widths, balance, imbalance

HEADS, KEY_HEADS, DIM = 32, 8, 128
MEDIAN, SIGMA = 4096, 1.5
"""Of the lengths: most documents are short, most tokens are in long ones."""

SHORTEST = 128
PLANS = ("balanced", "unbalanced", "own rank")
STEPS, TURNS = 2, 5
WRONG = 2e-2
"""Relative: roundings of bfloat16 come to some thousandths."""

FASTER, UNEVEN = 1.3, 1.6
COLUMNS = (
    "batch",
    "longest",
    "plan",
    "imbalance",
    "moved MB",
    "route ms",
    "alone ms",
    "exposed ms",
    "step ms",
    "faster",
)
GRACE = 15.0

Tensors = tuple[torch.Tensor, ...]


# --- the batch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """As many tokens on each rank, but for where documents are cut."""

    seed: int
    ranks: int
    tokens: int

    @cached_property
    def lengths(self) -> Longs:
        dice, left, found = np.random.default_rng(self.seed), self.ranks * self.tokens, []
        while left:
            length = int(np.clip(dice.lognormal(np.log(MEDIAN), SIGMA), SHORTEST, 2 * self.tokens))
            found.append(min(length, left))
            left -= found[-1]
        return np.array(found, np.int64)

    @cached_property
    def home(self) -> packing.Packing:
        return packing.pack(self.lengths, switch(self.ranks), SHORTEST)

    def plan(self, name: str) -> DispatchPlan:
        if name == "balanced":
            topology, goal = switch(self.ranks), documents.Goal(shortest=SHORTEST)
            return documents.balanced(self.home, topology, goal, packing.Terms(name))
        cuts = packing.whole(self.home)
        if name == "own rank":
            cuts = packing.Cuts(cuts.part, cuts.low, cuts.high, self.owners[self.home.document])
        return packing.to_plan(self.home, cuts, packing.Terms(name))

    @cached_property
    def owners(self) -> Longs:
        """By document the rank that has most of it."""
        longest = np.lexsort((-self.home.length, self.home.document))
        _, first = np.unique(self.home.document[longest], return_index=True)
        found: Longs = self.home.rank[longest[first]]
        return found


def load_of(plan: DispatchPlan) -> Balance:
    widths = Widths(2 * HEADS * DIM, 2 * KEY_HEADS * DIM, 2 * KEY_HEADS * DIM)
    return balance(plan, switch(plan.num_ranks), widths)


@dataclass
class Row:
    """One plan of one batch."""

    batch: Batch
    plan: str
    load: Balance
    route_ms: float
    step_ms: float = 0.0
    alone_ms: float = 0.0

    @property
    def imbalance(self) -> float:
        """The most attention of a rank, as a multiple of the mean."""
        return 1 + imbalance(self.load.attention)

    def cells(self, unbalanced: Row) -> list[str]:
        faster = unbalanced.step_ms / self.step_ms
        missed = self.plan == "balanced" and unbalanced.imbalance >= UNEVEN and faster < FASTER
        numbers = (self.imbalance, int(self.load.bytes.sum()) / 1e6, self.route_ms, self.alone_ms)
        times = (self.step_ms - self.alone_ms, self.step_ms)
        return [
            str(self.batch.seed),
            str(self.batch.lengths.max()),
            self.plan,
            *(f"{number:.2f}" for number in (*numbers, *times)),
            f"{faster:.2f}{'*' if missed else ''}",
        ]


# --- the run ----------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    """What rank 0 has to say at the end, also where the run hangs."""

    options: argparse.Namespace
    title: str = "nothing was measured"
    rows: list[Row] = field(default_factory=list)
    is_whole: bool = False

    def say(self, why: str) -> None:
        lines = [row.cells(self._unbalanced(row)) for row in self.rows]
        print(f"\n{self.title}\n{grid(COLUMNS, lines)}" if lines else self.title)
        print(why, flush=True)
        if self.options.save and self.is_whole:
            record.save_lines(self.options, COLUMNS, lines)

    def _unbalanced(self, row: Row) -> Row:
        return next(one for one in self.rows if one.batch == row.batch and one.plan == "unbalanced")


class Bench:
    """This rank's end of the run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.on_gpu = options.device == "cuda"
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if self.on_gpu else torch.device("cpu")
        if self.on_gpu:
            torch.cuda.set_device(self.device)
        dist.init_process_group("cpu:gloo,cuda:nccl" if self.on_gpu else "gloo")
        self.control = dist.new_group(backend="gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.deadline = time.monotonic() + options.time_budget

    def everyone(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def finish(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(self.control)

    def milliseconds(self, step: Callable[[], Any]) -> float:
        """Of one of several steps in a row, on this rank."""
        self.finish()
        if not self.on_gpu:
            begin = time.perf_counter()
            step()
            return 1e3 * (time.perf_counter() - begin)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        for _ in range(STEPS):
            step()
        events[1].record()
        self.finish()
        return events[0].elapsed_time(events[1]) / STEPS


def measured(bench: Bench, batch: Batch) -> list[Row]:
    """All plans of a batch. Raises AssertionError where their results differ."""
    plans = {name: batch.plan(name) for name in PLANS}
    proved = {name: compiler.prove_plan(plan) for name, plan in plans.items()}
    rows = int(plans["balanced"].shards.rows[bench.rank])
    generator = torch.Generator(bench.device).manual_seed(100 * batch.seed + bench.rank)
    q, k, v, dout = (
        torch.randn(rows, heads, DIM, dtype=torch.bfloat16, device=bench.device, generator=generator)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)
    )
    tensors = tuple(one.requires_grad_() for one in (q, k, v))
    made = {name: route_of(bench, one.plan, one.routing) for name, one in proved.items()}
    widths = [2 * heads * DIM for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    sender = dispatch.Dispatcher(dispatch.Limits.of(made.values(), widths), group=dist.group.WORLD, device=bench.device)
    sender.prepare(made["balanced"], q, k, v)  # kernels are built once; what follows is the host's part of a new plan
    found, steps = [], {}
    for name, plan in plans.items():
        begin = time.perf_counter()
        route = route_of(bench, plan, compiler.prove_plan(plan).routing)
        sender.prepare(route, q, k, v)
        found.append(Row(batch, name, load_of(plan), 1e3 * (time.perf_counter() - begin)))
        steps[name] = stepped(sender, route, tensors, dout), alone(sender, route, tensors)
    agree(bench, {name: step() for name, (step, _) in steps.items()})
    times: dict[str, list[list[float]]] = {name: [[], []] for name in steps}
    for _ in range(TURNS if bench.on_gpu else 1):
        for name, both in steps.items():
            for kept, step in zip(times[name], both, strict=True):
                kept.append(bench.milliseconds(step))
    for row in found:
        slowest = [max(bench.everyone(median(kept))) for kept in times[row.plan]]
        row.step_ms, row.alone_ms, row.route_ms = *slowest, max(bench.everyone(row.route_ms))
    sender.synchronize()
    sender.release()
    return found


def route_of(bench: Bench, plan: DispatchPlan, routing: Any) -> dispatch.Route:
    return dispatch.Route.of_plan(plan, routing, rank=bench.rank, device=bench.device)


def stepped(sender: dispatch.Dispatcher, route: dispatch.Route, tensors: Tensors, dout: torch.Tensor) -> Any:
    """Attention of this rank's documents, wherever it is computed, and its gradients."""

    def step() -> Tensors:
        out = sender.attend(*tensors, route)
        return out.detach(), *torch.autograd.grad(out, tensors, dout)

    return step


def alone(sender: dispatch.Dispatcher, route: dispatch.Route, tensors: Tensors) -> Any:
    """What this rank computes of it, on rows that have come already."""
    here = [one.detach().clone().requires_grad_() for one in sender.dispatch_qkv(*tensors, route)]
    spans, weight = route.attention.handle, torch.randn_like(here[0])

    def step() -> Tensors:
        out, _ = torch.ops.commdsl.attend_spans(*here, spans, DIM**-0.5, "auto")
        return torch.autograd.grad(out, here, weight)

    step.route = route  # type: ignore[attr-defined]  # the spans are known as long as it lives
    return step


def agree(bench: Bench, made: dict[str, Tensors]) -> None:
    """Raises AssertionError unless results and gradients of all plans are the same, to roundings."""
    wanted = made["unbalanced"]
    for name, found in made.items():
        for what, one, other in zip(("out", "dq", "dk", "dv"), found, wanted, strict=True):
            apart = float((one.float() - other.float()).norm() / other.float().norm())
            assert all(far < WRONG for far in bench.everyone(apart)), f"{name}: {what} is {apart:.2g} apart"


def run(options: argparse.Namespace, output: Output) -> tuple[int, str]:
    bench = Bench(options)
    what = torch.cuda.get_device_name() if bench.on_gpu else "processors"
    sizes = f"{options.tokens} tokens a rank, {HEADS}:{KEY_HEADS} heads of {DIM}"
    output.title = f"{bench.ranks} x {what}, torch {torch.__version__}; bfloat16, {sizes}"
    for seed in options.seeds:
        if max(bench.everyone(time.monotonic() > bench.deadline)):
            return int(not output.rows), f"no time was left from batch {seed} on"
        output.rows += measured(bench, Batch(seed, bench.ranks, options.tokens))
    output.is_whole = True
    return 0, "results and gradients of all plans agree"


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=parse_size, default=64 << 10, help="of a rank, such as 64K")
    add("--seeds", type=lambda text: [*map(int, text.split(","))], default=[7, 2, 1], help="of the batches")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--time-budget", type=float, default=80.0, help="seconds; what does not fit is said")
    record.add_options(parser)
    found = parser.parse_args(arguments)
    record.check_options(parser, found)
    return found


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "20")
    options = options_of(sys.argv[1:])
    output = Output(options)
    end_of(lambda: run(options, output), output.say, options.time_budget, GRACE)


if __name__ == "__main__":
    main()
