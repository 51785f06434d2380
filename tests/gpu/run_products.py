"""Products beside what travels, on real GPUs, whole numbers bit for bit. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_products.py [--calls 300 --replays 30 --only storm --operators NAME]

stamps    time stamps of a call, which rank 0 prints: the time that they say is within 5 % of that of events around it
beside    while NCCL sums up on another stream, begun before the product on every other rank and behind it on the rest
groups    of two groups at once, on two streams, begun by all ranks in one order
compiled  by torch.compile(mode="reduce-overhead"), which makes the first call in the pool of its graphs, and then those
order     a schedule whose products depend on each other: one kernel, whose tasks wait for each other
storm     calls of random shapes in random order, eagerly and replayed, GPU and host delays, no barrier in between; some
          eager ones on tensors where others were before, some not
gradients those of rows, of weights, of a bias and of a residual
graphs    graphs of two calls, replayed with other numbers
exact     all operators as they choose, and their schedules in one piece and in four, also where products push; with a
          bias, a residual, and activations, which are within 2^-7; matrices by columns, float8, tails of tiles, tiles
          cut along K, and what no schedule multiplies: eagerly

What a rank must hold says `products.py`. Exit code 1: a wrong result, an exception, or a part that did not end in time.
`--device cpu` runs all but graphs on host ranks.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product as pairs
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")

import repeated
import runner
import torch
from products import BACK, DTYPE, PIECES, WANTED, Shape, brought_back
from repeated import Repeated, replayed
from runner import Part, Parts

import commdsl
from commdsl.machine.config import from_environment
from commdsl.overlap import (
    all_gather_matmul,
    all_to_all_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from commdsl.overlap.auto import OPERATORS
from commdsl.runtime import again, given, groups

SIZES = (
    (128, 64, 128),
    (520, 72, 136),
    (1000, 520, 264),
    (2048, 1024, 1280),
    (192, 8192, 512),  # few tiles, each cut along K
    (515, 128, 64),  # rows that cannot be halved
    (96, 60, 33),  # no schedule makes these products on GPUs
)
"""Rows of a rank, K and N."""

EARLIER = Path(__file__).resolve().parents[1] / "earlier_product.comm"
ORDERED = 32
CALLS = 3
BESIDE = 20
COMPILED = 6  # one that is made, one that is captured, and replays
MORE = 1 << 24  # elements that NCCL sums up
GRACE = 15.0


SHAPES = tuple(Shape(call, *size) for size in SIZES for call in WANTED)
CROWDED = tuple(Shape(call, 2048, 4096, 2048) for call in WANTED)
WAYS = tuple(way for shape in SHAPES for way in shape.ways())


def by_columns(matrix: Any) -> Any:
    return matrix.t().contiguous().t()


LARGE = {
    all_gather_matmul: (8192, 8192, 3584),
    matmul_reduce_scatter: (8192, 3584, 8192),
    matmul_all_reduce: (8192, 3584, 8192),
}
"""Rows of all ranks, K and N: a call takes so long that its launch is less than what stamps may be off by."""

WITHIN = 0.05
STAMPED = 5
AHEAD = 12_000_000  # cycles: longer than a call is launched
HOST = 16  # by so much everything is less on the processor


class Products(Repeated):
    """Calls of one shape."""

    def __init__(self, run: Parts, shape: Shape) -> None:
        super().__init__(run)
        self.shape, self.function = shape, shape.function(run)
        drawn = shape.drawn(run, 0)
        self.x, self.w = (one[run.rank].clone() for one in (drawn.x, drawn.w))
        if shape.by_columns:
            self.w = by_columns(self.w)
            self.x = self.x if OPERATORS[shape.call.__name__].gathers else by_columns(self.x)
        self.ends = [one.clone() for one in shape.ends(drawn, run.rank)]
        self.scales = shape.scales(run)

    def made(self) -> Any:
        return self.function(self.x, self.w, *self.ends, *self.scales)

    def is_wrong(self, seed: int, found: Any) -> Any:
        return ~self.shape.same(self.run, found, self.shape.drawn(self.run, seed))

    def fill(self, seed: int) -> None:
        drawn = self.shape.drawn(self.run, seed)
        self.x.copy_(drawn.x[self.run.rank])
        self.w.copy_(drawn.w[self.run.rank])
        for own, one in zip(self.ends, self.shape.ends(drawn, self.run.rank), strict=True):
            own.copy_(one)


def each(name: str, calls: int, work: Callable[[Parts, Shape, int], int], shapes: Sequence[Shape], run: Parts) -> None:
    for shape in shapes:
        if shape.call.__name__ in run.options.operators:
            run.attempt_in_time(Part(name, str(shape), calls), partial(work, run, shape, calls))


def called(run: Parts, shape: Shape, calls: int) -> int:
    made = Products(run, shape)
    for seed in range(calls):
        made.call(seed)
    return int(made.wrong)


def differentiated(run: Parts, shape: Shape, calls: int) -> int:
    wrong = torch.zeros((), dtype=torch.int64, device=run.device)
    for seed in range(calls):
        given, rank = shape.drawn(run, seed), run.rank
        is_of_all = shape.call in (all_gather_matmul, matmul_all_to_all)
        call = matmul_reduce_scatter if is_of_all else all_gather_matmul
        rows = shape.rows * run.ranks if shape.call is matmul_all_reduce else shape.rows
        way_back = Shape(call, rows, shape.columns, shape.depth)
        back = way_back.drawn(run, seed + 1).x
        added = [given.bias, *([given.residual] if shape.has_residual else [])]
        own = [one[rank].clone().requires_grad_() for one in (given.x, given.w, *added)]
        found = torch.autograd.grad(shape.function(run)(*own), own, back[rank])
        wide = [one.double() for one in back]
        due = BACK[shape.call](run, given.way_back(wide), way_back.is_scheduled(run))
        left = brought_back(run, wide) if shape.call is matmul_all_to_all else wide[rank]
        of_bias = left.sum(0)
        left = torch.cat(wide) if shape.call is matmul_reduce_scatter else left
        right = torch.cat(given.x) if shape.call is all_gather_matmul else given.x[rank]
        right = brought_back(run, given.x) if shape.call is all_to_all_matmul else right
        wanted_of = {"rows": due, "weights": left.t() @ right.double(), "bias": of_bias}
        wanted_of |= {"residual": wide[rank]} if shape.has_residual else {}
        for one, (name, wanted) in zip(found, wanted_of.items(), strict=True):
            wrong += ~run.same(f"{name} of {shape}", one, wanted.to(DTYPE))
    return int(wrong)


def stamps(run: Parts) -> None:
    shapes = []
    for call, size in LARGE.items():
        rows, depth, columns = size if run.on_gpu else (one // HOST for one in size)
        shape = Shape(call, rows // run.ranks, depth, columns)
        shapes += [one for pieces in PIECES for one in shape.cut(pieces)]
    each("stamps", STAMPED, agreeing, shapes, run)


def agreeing(run: Parts, shape: Shape, calls: int) -> int:
    """How many calls took another time by their stamps than by events around them; on the processor, a longer one.
    Ranks begin together, when all is launched, so that neither holds what the host takes.
    """
    made = Products(run, shape)
    op, tensors, wrong = shape.function(run), (made.x, made.w), 0
    call = op.stamped.bound(tensors, groups.name_of(None), given.asked("sum", None, None))
    ways, ratios = {"plain": lambda: op(*tensors), "stamped": lambda: call(tensors)[0]}, []
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(1 + calls):
        found = {}
        for way, work in ways.items():
            run.everyone(None)
            with Outside(run) as outside:
                found[way] = work()
            seconds[way] += [outside.seconds] * (turn > 0)  # the first loads kernels
        profile = call.profile()
        wrong += bool(~run.same(f"stamped {shape}", found["stamped"], found["plain"]))
        ratios += [profile.total / outside.seconds] * (turn > 0)
    wrong += sum(not (1 - WITHIN < one < 1 + WITHIN if run.on_gpu else 0 < one < 1) for one in ratios)
    everyone = [one for there in run.everyone(ratios) for one in there]
    if run.rank == 0:
        times = ", ".join(f"{way} {1e6 * median(seconds[way]):.1f} us" for way in ways)
        said = f"{times} by events; of that by stamps {min(everyone):.3f} to {max(everyone):.3f} on all ranks"
        print(f"{shape}: {said}, in steps of {profile.resolution} ns\n{profile}", flush=True)
    return wrong


class Outside:
    """The seconds that the GPU takes for what is launched in it; on the processor, of a clock."""

    seconds = 0.0

    def __init__(self, run: Parts) -> None:
        self.run = run

    def __enter__(self) -> Outside:
        if self.run.on_gpu:
            self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            torch.cuda._sleep(AHEAD)
            commdsl.all_reduce(torch.zeros(8, device=self.run.device))
            self.marks[0].record()
        self.begin = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self.begin
        if self.run.on_gpu:
            self.marks[1].record()
            self.run.wait()
            self.seconds = self.marks[0].elapsed_time(self.marks[1]) / 1e3


def beside(run: Parts) -> None:
    """A kernel of NCCL's has SMs, and waits for other ranks; there it waits until a product leaves it some."""
    if not run.on_gpu or from_environment().share_gpus:  # NCCL has no two ranks on a GPU
        return
    others, stream = torch.distributed.new_group(backend="nccl"), torch.cuda.Stream()
    summed_up = torch.zeros(MORE, device=run.device)
    torch.distributed.all_reduce(summed_up, group=others)  # all ranks set up the one before the other

    def work(run: Parts, shape: Shape, calls: int) -> int:
        made, wrong = Products(run, shape), 0
        made.call(0)
        for seed in range(calls):
            summed_up.fill_(seed)
            torch.cuda.synchronize()
            for is_product in (False, True) if (seed + run.rank) % 2 else (True, False):
                if is_product:
                    made.call(seed)
                else:
                    with torch.cuda.stream(stream):
                        torch.distributed.all_reduce(summed_up, group=others)
            torch.cuda.synchronize()
            wrong += int((summed_up != seed * run.ranks).any())
        return int(made.wrong) + wrong

    each("beside", BESIDE, work, [one for shape in CROWDED for pieces in PIECES for one in shape.cut(pieces)], run)


def two_groups(run: Parts) -> None:
    """Each call fills the GPU, and would not leave the other the SMs that it waits for."""
    if not run.on_gpu:
        return
    members = None, torch.distributed.new_group()
    streams = [torch.cuda.Stream() for _ in members]

    def work(run: Parts, shape: Shape, calls: int) -> int:
        kinds, delays = [Products(run, shape) for _ in members], random.Random(f"{shape} {run.rank}")
        run.wait()  # for what they are given
        for seed in range(calls):
            for made, group, stream in zip(kinds, members, streams, strict=True):
                made.function = partial(shape.call, group=group)
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(delays.randrange(repeated.CYCLES))
                    made.call(seed)
        run.wait()
        return sum(int(made.wrong) for made in kinds)

    each("groups", BESIDE, work, CROWDED, run)


def compiled(run: Parts) -> None:
    if not run.on_gpu:
        return

    def work(run: Parts, shape: Shape, calls: int) -> int:
        made = Products(run, shape)
        made.function = torch.compile(shape.call, mode="reduce-overhead", fullgraph=True)
        for seed in range(calls):
            torch.compiler.cudagraph_mark_step_begin()
            made.call(seed)
        return int(made.wrong)

    each("compiled", COMPILED, work, CROWDED, run)


class Ordered(Repeated):
    """Calls of a schedule in which a product adds what an earlier one makes."""

    ROWS, DEPTH, COLUMNS = 4096, 96, 1280

    def __init__(self, run: Parts) -> None:
        super().__init__(run)
        self.op = commdsl.load(EARLIER, ranks=run.ranks)
        self.x, self.w = self.drawn(0, run.rank)

    def drawn(self, seed: int, rank: int) -> tuple[Any, Any]:
        dice = torch.Generator(self.run.device).manual_seed(seed)
        rows = self.ROWS if self.run.on_gpu else HOST
        draw = partial(torch.randint, -1, 2, generator=dice, device=self.run.device)
        x = draw((self.run.ranks, 2 * rows, self.DEPTH)).to(DTYPE)
        return x[rank], draw((self.run.ranks, self.COLUMNS, self.DEPTH)).to(DTYPE)[rank]

    def fill(self, seed: int) -> None:
        for to, values in zip((self.x, self.w), self.drawn(seed, self.run.rank), strict=True):
            to.copy_(values)

    def made(self) -> Any:
        return self.op(self.x, self.w)

    def is_wrong(self, seed: int, found: Any) -> Any:
        (x, w), (before, _) = (self.drawn(seed, at % self.run.ranks) for at in (self.run.rank, self.run.rank - 1))
        here, came = x.double().chunk(2), before.double().chunk(2)[0]
        wanted = torch.cat([here[0] + here[1], came]) @ w.double().t()
        return ~self.run.same("an earlier product", found, wanted.to(DTYPE))


def order(run: Parts) -> None:
    def work() -> int:
        found = Counter[str]()
        with counted_kernels(found):
            made = Ordered(run)
            for seed in range(ORDERED):
                made.call(seed)
        return int(made.wrong) + (run.on_gpu and not found["kernels"])

    run.attempt_in_time(Part("order", "products that depend on each other", ORDERED), work)


@contextlib.contextmanager
def counted_kernels(found: Counter[str]) -> Iterator[None]:
    """Counts calls whose tasks are one kernel, on a GPU."""
    if not torch.cuda.is_available():
        yield
        return
    from commdsl.runtime import fused

    over = fused.Fused.over

    def counting(*given: Any) -> Any:
        found["kernels"] += 1
        return over(*given)

    with mock.patch.object(fused.Fused, "over", counting):
        yield


def storm(run: Parts) -> None:
    dice = random.Random(run.options.seed)

    def shape(call: Callable[..., Any], pieces: int) -> Shape:
        depth, columns = 8 * dice.randrange(1, 100), 8 * dice.randrange(1, 100)
        return Shape(call, max(pieces, 1) * dice.randrange(1, 375), depth, columns, pieces)

    called = [call for call in WANTED if call.__name__ in run.options.operators]
    shapes = [shape(call, 0) for call in called]
    shapes += [one for call, pieces in pairs(called, PIECES) for one in shape(call, pieces).cut(pieces)]
    shapes += [replace(one, end=dice.choice(one.added)) for one in shapes]
    found = Counter[bool]()
    with mock.patch.object(again.Again, "__call__", counted(again.Again.__call__, found)):
        repeated.storm(run, dice, [partial(Products, run, shape) for shape in shapes])
    if run.on_gpu:
        made = Part("storm", f"{found[True]} of {found.total()} calls as others were made before", found.total())
        run.attempt_in_time(made, lambda: int(not (found[True] and found[False])))


def counted(call: Callable[..., bool], found: Counter[bool]) -> Callable[..., bool]:
    """As `call`, and counts what it says."""

    def calls(*given: Any) -> bool:
        made = call(*given)
        found[made] += 1
        return made

    return calls


def graphs(run: Parts) -> None:
    if run.on_gpu:
        each("graphs", run.options.replays, lambda run, shape, times: replayed(Products(run, shape), times), WAYS, run)


PARTS = {
    "stamps": stamps,
    "beside": beside,
    "groups": two_groups,
    "compiled": compiled,
    "order": order,
    "storm": storm,
    "gradients": partial(each, "gradients", 1, differentiated, SHAPES),
    "graphs": graphs,
    "exact": partial(each, "exact", CALLS, called, WAYS),
}
"""The longest last: they have the time that the others leave."""


def main() -> None:
    parser = runner.part_parser_of(__doc__, 300, 85.0, list(PARTS))
    names = [call.__name__ for call in WANTED]
    parser.add_argument("--operators", nargs="+", choices=names, default=names)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    runner.end_of_parts(Parts, options, PARTS, GRACE, on_gpu=options.device == "cuda")


if __name__ == "__main__":
    main()
