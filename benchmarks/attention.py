"""Attention over a sequence that lies on many GPUs, beside what others have. One process per GPU:

    torchrun --nproc-per-node 4 benchmarks/attention.py [--tokens 2K,8K --heads 32:8 --time-budget 150 --save NAME]

Causal, one sequence, zigzag, bfloat16, heads of 128. A row is heads of queries and keys, tokens a GPU, and a pass:
forward, or forward and backward. Its contenders: `commdsl.attention.attention` as it chooses; its loop by every
schedule and way to move that is asked for (the copy engine, which leaves sums of gradients to 16 SMs, or so many SMs
for all; through cells, or put in place: `--landing cells,place`); the calls of the kernel and nothing else (`alone`);
the loop with nothing that moves (`still`, up to 8K tokens); the bytes of keys and values, and of their gradients, as
plain copies to the next GPU (`link`); a zigzag ring over NCCL's sends and receives with the same kernel and merge;
torch's `context_parallel`, all-gather and all-to-all, on cuDNN and on flash.
What computes attention is checked, eagerly and as it is timed, on inputs that differ by rank, place and call, against
attention of the gathered sequence on one GPU.

Times are medians of the slowest rank, contenders taking turns; calls are in CUDA graphs where they can be captured, and
`e` marks what cannot (then the host's part is in it). From 32K tokens on only the two fastest of commdsl and of
`context_parallel` at the size before are measured. `*` marks a figure that is missed. The table comes last, also when
time is up; what had no time is said. Exit code 1: something is wrong, or nothing was measured. `--device cpu` goes
through it all on processors with a few tokens: the times say nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "20")

import torch
import torch.distributed as dist

import commdsl
from benchmarks import record
from benchmarks.attention_calls import Ours, Public, Still, Way
from benchmarks.attention_peers import METHODS, ContextParallel, Inputs, Tensors, ZigzagRing, of_one_gpu
from benchmarks.attention_report import COLUMNS, Case, Kind, Pass, Result, best, long, short
from benchmarks.cases import parse_size
from benchmarks.ending import end_of
from benchmarks.measure import captured
from benchmarks.report import Timing, grid
from commdsl.attention import kernels
from commdsl.attention.kernel import Kernel

DIM = 128
HEADS = ((32, 32), (32, 8))
TOKENS = (2 << 10, 8 << 10, 32 << 10, 64 << 10)
FEWER_FROM = 32 << 10
"""Tokens from which on only the fastest of each kind go on."""

WRONG = 2e-2
"""Relative: roundings of bfloat16 come to some thousandths."""

PUBLIC = "attention()"
GRACE = 15.0
SEEDS = (1, 2)  # of the inputs of an eager call, and of those that a graph is replayed with
LONG_MS = 20.0  # a batch that takes so long does not care for the skew of a barrier
FEW_ROUNDS = 3
SETTING_UP, RUNS = 4.0, 5
"""What a row takes: seconds, and batches of each contender."""

TURN_SECONDS = 1.5  # that a row's contenders are measured for


@dataclass
class Contender:
    """Something to be timed: `call` makes one call, `rows` what it gave as (tokens, heads, dim).

    `prepare` brings inputs to where the contender has them; calls are made inside of `inside`.
    """

    name: str
    kind: Kind
    kernel: str
    call: Callable[[], Tensors]
    rows: Callable[[Tensors], Tensors] = lambda made: made
    prepare: Callable[[], None] = lambda: None
    inside: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
    is_checked: bool = True

    def result(self, case: Case, **told: Any) -> Result:
        return Result(case, self.name, self.kind, self.kernel, calls_of(case), **told)


@dataclass
class Ready:
    """A contender with its batch."""

    contender: Contender
    result: Result
    graph: torch.cuda.CUDAGraph | None = None
    times: list[float] = field(default_factory=list)

    def run(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for _ in range(self.result.calls):
            self.contender.call()


class Bench:
    """This rank's end of the run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.on_gpu = options.device == "cuda"
        self.device = torch.device("cpu")
        if self.on_gpu:
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        backend = "cpu:gloo,cuda:nccl" if self.on_gpu else "gloo"
        dist.init_process_group(backend, device_id=self.device if self.on_gpu else None)
        self.control = dist.new_group(backend="gloo")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.results: list[Result] = []
        self.eager: set[str] = set()  # what could not be captured
        self.copies: torch.Tensor | None = None
        self._token = torch.zeros(1, device=self.device)

    @property
    def where(self) -> str:
        what = torch.cuda.get_device_name() if self.on_gpu else "processors"
        return f"{self.ranks} x {what}, torch {torch.__version__}"

    def everyone(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self.control)
        return found

    def time_is_up(self, seconds: float = 0.0) -> bool:
        """For something that takes so long; rank 0's clock decides for all."""
        return bool(self.everyone(time.monotonic() + seconds > self.options.deadline)[0])

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def barrier(self) -> None:
        self.wait()
        dist.all_reduce(self._token)
        self.wait()

    def attempt(self, what: Callable[[], Any]) -> tuple[Any, str]:
        """Does something on all ranks: what it gave here, or why it failed on the first rank where it did."""
        found, problem = None, ""
        try:
            found = what()
            self.wait()
        except Exception as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:90]}"
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(self.everyone(problem)) if text]
        return (None, failed[0]) if failed else (found, "")

    # --- one row ------------------------------------------------------------------------------------------------------

    def row(self, case: Case) -> None:
        inputs = Inputs.empty(
            self.rank,
            self.ranks,
            case.tokens,
            case.heads,
            self.options.dim,
            torch.empty(0, device=self.device).bfloat16(),
        )
        head = case.heads[1] // 2  # the same on all ranks: they gather it
        wanted = [self.wanted(case, inputs, head, seed) for seed in SEEDS]
        found = []
        for contender in self.contenders(case, inputs):
            if self.time_is_up():
                found.append(Ready(contender, contender.result(case, status="no time left")))
            else:
                found.append(self.ready(case, contender, inputs, head, wanted))
        right = [one for one in found if one.result.status == "ok"]
        for batch, timing in zip(right, self.measure(right), strict=True):
            batch.result = replace(batch.result, timing=timing)
            if batch.graph is not None:
                batch.graph.reset()
        self.results += [one.result for one in found]
        commdsl.check()

    def wanted(self, case: Case, inputs: Inputs, head: int, seed: int) -> Tensors:
        inputs.refill(seed)
        backward = case.direction is Pass.BOTH
        return of_one_gpu(inputs, self.kernel(self.options.kernels[0], backward), head, None, backward=backward)

    def kernel(self, name: str, backward: bool) -> Kernel:
        shape = kernels.Shape(torch.bfloat16, self.options.dim)
        calls = [kernels.Call((0, 2), (0, 2), None, right) for right in (0, None)]
        return kernels.chosen(name, kernels.here(self.device), shape, calls, backward)

    def contenders(self, case: Case, inputs: Inputs) -> Iterator[Contender]:
        """The floor first, and last what may fail."""
        backward = case.direction is Pass.BOTH
        if self.on_gpu:
            yield self.link(case, inputs)
        names = self.options.kernels if backward else self.options.kernels[:1]
        rings = {name: ZigzagRing(inputs, self.kernel(name, False), self.kernel(name, backward)) for name in names}
        for name, ring in rings.items():
            yield Contender("alone", Kind.ALONE, name, ring.kernels_alone(backward), is_checked=False)
        if case.tokens < FEWER_FROM:
            first = self.options.ways[0]
            yield self.ours(
                "loop", Kind.STILL, inputs, lambda back: Still(first.op(self.ranks, back), back), names[0], backward
            )
        if self.goes_on(case, Kind.OURS, PUBLIC, names[0]):
            public = Public(inputs, names[0])
            yield Contender(PUBLIC, Kind.OURS, names[0], public.both if backward else public.forward, Public.rows)
        ways = [(name, way) for way in self.options.ways for name in names[:1]]
        ways += [(name, way) for name in names[1:] for way in self.options.ways[:1]]
        for name, way in ways:
            if self.goes_on(case, Kind.OURS, str(way), name):
                yield self.ours(str(way), Kind.OURS, inputs, partial(way.op, self.ranks), name, backward)
        ring = rings[names[0]]
        yield Contender("zigzag", Kind.RING, names[0], ring.both if backward else lambda: ring.forward()[:1])
        if self.on_gpu:
            yield from self.context_parallels(case, inputs, backward)

    def ours(
        self, name: str, kind: Kind, inputs: Inputs, op: Callable[[bool], Any], kernel: str, backward: bool
    ) -> Contender:
        made = Ours(inputs, op, kernel)
        call = made.both if backward else made.forward
        return Contender(name, kind, kernel, call, rows=Ours.rows, is_checked=kind is Kind.OURS)

    def context_parallels(self, case: Case, inputs: Inputs, backward: bool) -> Iterator[Contender]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.nn.attention import SDPBackend

        mesh = init_device_mesh(self.device.type, (self.ranks,))
        for kernel, backend in (("cudnn", SDPBackend.CUDNN_ATTENTION), ("flash", SDPBackend.FLASH_ATTENTION)):
            for method in METHODS:
                if self.goes_on(case, Kind.TORCH, method, kernel):
                    made = ContextParallel(inputs, mesh, method, backend)
                    call = made.both if backward else made.forward
                    yield Contender(method, Kind.TORCH, kernel, call, made.rows, made.prepare, made.inside)

    def goes_on(self, case: Case, kind: Kind, name: str, kernel: str) -> bool:
        """Whether it is among the two fastest of its kind at the size before."""
        if case.tokens < FEWER_FROM:
            return True
        sizes = {one.case.tokens for one in self.results if one.case.tokens < case.tokens}
        before = Case(case.heads, max(sizes, default=0), case.ranks, case.direction)
        known = sorted(
            (one for one in self.results if one.case == before and one.kind is kind and one.is_good), key=_us
        )
        return not known or (name, kernel) in [(one.name, one.kernel) for one in known[:2]]

    def link(self, case: Case, inputs: Inputs) -> Contender:
        """As many bytes as have to leave the busiest port, in copies to the next GPU."""
        import torch.distributed._symmetric_memory as symm_mem

        share = int(case.traffic / (self.ranks - 1) * inputs.kv_bytes)
        if self.copies is None or self.copies.numel() < share:
            self.copies = symm_mem.empty(share, dtype=torch.uint8, device=self.device)
        handle = symm_mem.rendezvous(self.copies, dist.group.WORLD.group_name)
        target = handle.get_buffer((self.rank + 1) % self.ranks, (share,), torch.uint8)
        source = torch.ones(share, dtype=torch.uint8, device=self.device)

        def call() -> Tensors:
            for _ in range(self.ranks - 1):
                target.copy_(source)
            return ()

        return Contender("copies", Kind.LINK, "", call, is_checked=False)

    # --- one contender ------------------------------------------------------------------------------------------------

    def ready(self, case: Case, contender: Contender, inputs: Inputs, head: int, wanted: Sequence[Tensors]) -> Ready:
        """Called, checked, captured, and checked as it is replayed."""
        label = f"{contender.kind} {contender.name} {contender.kernel}"
        inputs.refill(SEEDS[0])
        contender.prepare()
        with contender.inside():
            made, problem = self.attempt(contender.call)
            if problem:
                return Ready(contender, contender.result(case, status=f"failed: {problem}"))
            error = self.error(case, contender, made, head, wanted[0])
            del made
            batch = Ready(contender, contender.result(case, how="eager", error=error))
            if self.on_gpu and label not in self.eager and contender.kind not in self.options.eager:
                problem = self.as_graph(case, batch, inputs, head, wanted[1])
        error = batch.result.error
        if not contender.is_checked:
            batch.result = replace(batch.result, error=None)
        elif error is not None and not error < WRONG:
            problem = f"wrong: {error:.1e} from one GPU's"
        if problem:
            batch.result = replace(batch.result, status=problem)
        return batch

    def as_graph(self, case: Case, batch: Ready, inputs: Inputs, head: int, wanted: Tensors) -> str:
        """Captures a batch, and checks its last call with other inputs; what cannot be captured stays as it is. What
        went wrong in a replay.
        """
        contender, last = batch.contender, list[Tensors]()

        def call() -> None:
            last[:] = [contender.call()]

        graph, problem = self.attempt(lambda: captured(call, batch.result.calls, before=0))
        if problem:
            self.eager.add(f"{contender.kind} {contender.name} {contender.kernel}")
            return ""
        inputs.refill(SEEDS[1])
        contender.prepare()
        _, problem = self.attempt(graph.replay)
        if problem:
            return f"failed: {problem}"
        error = max(batch.result.error or 0.0, self.error(case, contender, last[0], head, wanted))
        batch.graph, batch.result = graph, replace(batch.result, how="graph", error=error)
        return ""

    def error(self, case: Case, contender: Contender, made: Tensors, head: int, wanted: Tensors) -> float:
        """The largest relative distance of all ranks: of out, and of each gradient."""
        if not contender.is_checked:
            return 0.0
        served = case.heads[0] // case.heads[1]
        queries, keys = slice(head * served, (head + 1) * served), slice(head, head + 1)
        found = [0.0]
        for one, want, heads in zip(contender.rows(made), wanted, (queries, queries, keys, keys), strict=False):
            difference = one[:, heads].float() - want.float()
            found.append(float(difference.norm() / want.float().norm()))
        if len(contender.rows(made)) != len(wanted):
            found.append(float("nan"))
        return max(self.everyone(max(found) if all(value == value for value in found) else float("inf")))

    def measure(self, batches: Sequence[Ready]) -> list[Timing]:
        """They take turns, in an order that shifts, so drift hits all alike."""
        if not batches:
            return []
        began = time.monotonic()
        lengths = [max(self.everyone(self.once(batch, absorbs=False))) for batch in batches]  # all absorb, or none
        spent = self.everyone(time.monotonic() - began)[0]
        left = self.everyone(self.options.deadline - time.monotonic())[0]
        rounds = max(2, min(15, int(min(TURN_SECONDS / 2, left) / max(spent, 1e-3))))
        if rounds < FEW_ROUNDS:  # long calls: then the first pass counts
            for batch, length in zip(batches, lengths, strict=True):
                batch.times.append(1000 * length / batch.result.calls)
        for turn in range(rounds):
            for place in range(len(batches)):
                batch = batches[(place + turn) % len(batches)]
                length = lengths[(place + turn) % len(batches)]
                batch.times.append(1000 * self.once(batch, absorbs=length < LONG_MS) / batch.result.calls)
        slowest = torch.tensor([batch.times for batch in batches], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=self.control)
        return [Timing.of(times) for times in slowest.tolist()]

    def once(self, batch: Ready, absorbs: bool) -> float:
        """Milliseconds of a batch; one before it absorbs the skew that a barrier leaves."""
        inside = contextlib.nullcontext if batch.graph is not None else batch.contender.inside
        with inside():
            self.barrier()
            if absorbs:
                batch.run()
            if not self.on_gpu:
                began = time.perf_counter()
                batch.run()
                return 1000 * (time.perf_counter() - began)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            batch.run()
            end.record()
            end.synchronize()
            return start.elapsed_time(end)


def _us(result: Result) -> float:
    return result.us


def run(bench: Bench) -> None:
    """Rows from the shortest on; one that would take longer than there is time is not begun."""
    options = bench.options
    for tokens in options.tokens:
        for direction in options.passes:
            for heads in options.heads:
                case = Case(heads, tokens, bench.ranks, direction)
                if bench.time_is_up(expected(bench.results, case)):
                    bench.results.append(Result(case, "all", Kind.OURS, status="no time left"))
                    continue
                began = time.monotonic()
                bench.row(case)
                gc.collect()
                if bench.rank == 0:
                    mine = best([one for one in bench.results if one.case == case], Kind.OURS)
                    said = "nothing right" if mine is None else f"{mine.us / 1000:.3f} ms by {mine.name}"
                    print(f"{case.name}: {said}, {time.monotonic() - began:.1f} s", flush=True)


def expected(results: Sequence[Result], case: Case) -> float:
    """Seconds that a row takes, by what its contenders took at the size before; the first row of all is let begin."""
    known = [one for one in results if (one.case.heads, one.case.direction) == (case.heads, case.direction)]
    before = max((one.case.tokens for one in known), default=0)
    calls = calls_of(case)
    work = sum(one.us * (case.tokens / before) ** 2 for one in known if one.case.tokens == before and one.is_good)
    return SETTING_UP + RUNS * calls * work / 1e6 if work else 0.0


def calls_of(case: Case) -> int:
    """Of a batch."""
    return max(1, min(8, (16 << 10) // case.tokens))


def tables(bench: Bench) -> str:
    return f"{grid(*long(bench.results))}\n\n{bench.where}, milliseconds\n{grid(*short(bench.results))}"


def heads_of(text: str) -> tuple[int, int]:
    query, _, key = text.partition(":")
    return int(query), int(key or query)


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=lambda text: [parse_size(part) for part in text.split(",")], default=TOKENS)
    parser.add_argument("--heads", type=lambda text: [heads_of(part) for part in text.split(",")], default=HEADS)
    parser.add_argument("--dim", type=int, default=DIM)
    parser.add_argument("--passes", type=lambda text: [Pass[part.upper()] for part in text.split(",")], default=[*Pass])
    parser.add_argument("--schedules", type=lambda text: text.split(","), default=["direct@causal=1", "ring@causal=1"])
    parser.add_argument("--moves", type=lambda text: text.split(","), default=["engine", "8"], help="engine, or SMs")
    parser.add_argument("--landing", type=lambda text: text.split(","), default=["cells"], help="cells, place, or both")
    parser.add_argument(
        "--kernels",
        type=lambda text: text.split(","),
        help="of commdsl and the ring; the second has a way alone and goes on only backward; cudnn,auto",
    )
    parser.add_argument(
        "--eager",
        type=lambda text: [Kind(part) for part in text.split(",")],
        default=[],
        help=f"contenders that are not captured: some of {', '.join((Kind.RING, Kind.TORCH))}",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--time-budget", type=float, default=150.0, help="seconds")
    record.add_options(parser)
    options = parser.parse_args(arguments)
    record.check_options(parser, options)
    options.kernels = options.kernels or (["cudnn", "auto"] if options.device == "cuda" else ["auto"])
    options.ways = [Way(*way) for way in product(options.schedules, options.moves, options.landing)]
    options.deadline = time.monotonic() + options.time_budget - 15.0
    return options


def main() -> None:
    options = options_of(sys.argv[1:])
    benches: list[Bench] = []

    def work() -> tuple[int, str]:
        bench = Bench(options)
        benches.append(bench)
        run(bench)
        if options.save and bench.rank == 0:
            record.save_lines(options, COLUMNS, [one.line() for one in bench.results])
        bad = [one for one in bench.results if one.kind is Kind.OURS and one.status.startswith(("wrong", "failed"))]
        right = best(bench.results, Kind.OURS)
        return int(bool(bad) or right is None), "WRONG" if bad else "right" if right else "nothing was measured"

    def tell(why: str) -> None:
        for bench in benches:
            print(f"\n{tables(bench)}\n{why}", flush=True)

    end_of(work, tell, options.time_budget, GRACE)


if __name__ == "__main__":
    main()
