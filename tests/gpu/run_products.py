"""Products beside what travels, on real GPUs, whole numbers bit for bit. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_products.py [--calls 300 --replays 30 --only storm --operators NAME]

exact     all operators as they choose, and their schedules in one piece and in four, also where products push; matrices
          by columns, float8, tails of tiles, tiles cut along K, and what no schedule multiplies: eagerly
graphs    graphs of two calls, replayed with other numbers
gradients those of rows and of weights
stamps    time stamps of a call, which rank 0 prints: the time that they say is within 5 % of that of events around it
beside    while NCCL sums up on another stream, begun before the product on every other rank and behind it on the rest
groups    of two groups at once, on two streams, begun by all ranks in one order
compiled  by torch.compile(mode="reduce-overhead"), which makes the first call in the pool of its graphs, and then those
storm     calls of random shapes in random order, eagerly and replayed, GPU and host delays, no barrier in between; some
          eager ones on tensors where others were before, some not

Each rank computes by itself what it must hold: sums in float64, of which those of other ranks are rounded before they
are added, as they travel; its own, too, where the operator's choice is to multiply first and then to send. Exit code 1:
a wrong result, an exception, or a part that did not end in time. `--device cpu` runs all but graphs on host ranks.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from repeated import Repeated, replayed
from runner import Part, Parts

import commdsl
from commdsl.machine.config import from_environment
from commdsl.overlap import (
    all_gather_matmul,
    all_to_all_matmul,
    choice,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from commdsl.overlap.auto import OPERATORS
from commdsl.overlap.programs import operands
from commdsl.planner.tuning.selection import SEQUENCE
from commdsl.runtime import again, given, groups
from commdsl.runtime.menu import name_of_device

DTYPE, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
SCALES = (4.0, 0.125)
"""Of float8."""
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

PIECES = (1, 4)
PUSHING = (matmul_reduce_scatter, matmul_all_reduce, matmul_all_to_all)
"""What is made for others can be put to them by products."""
CALLS = 3
BESIDE = 20
COMPILED = 6  # one that is made, one that is captured, and replays
MORE = 1 << 24  # elements that NCCL sums up
GRACE = 15.0


@dataclass(frozen=True)
class Shape:
    """One product of every rank, and what travels for it."""

    call: Callable[[Any, Any], Any]  # an operator of `commdsl.overlap`
    rows: int  # of a rank's own
    depth: int
    columns: int  # of a rank's results
    pieces: int = 0  # in which its schedule has rows; 0: as the operator chooses
    matmul: str = "kernel"  # which makes its products; "push": and puts them to peers
    by_columns: bool = False  # as weights lie, and rows that do not travel
    dtype: torch.dtype = DTYPE

    def __str__(self) -> str:
        pieces = f" in {self.pieces}" if self.pieces else ""
        pieces += " pushed" if self.matmul == "push" else ""
        pieces += " by columns" if self.by_columns else " of float8" if self.dtype == FLOAT8 else ""
        return f"{self.call.__name__} {self.rows}x{self.depth}x{self.columns}{pieces}"

    def ways(self) -> Iterator[Shape]:
        """Itself, and what its schedule makes of it whatever the operator chooses."""
        yield self
        if self.depth % 8 == 0 and self.columns % 8 == 0:
            for pieces in PIECES:
                if self.rows % pieces == 0:
                    yield from self.cut(pieces)
            if self.rows % 8 == 0:  # else columns do not begin where TMA reads them
                yield replace(self, pieces=PIECES[0], by_columns=True)
            yield replace(self, pieces=PIECES[0], dtype=FLOAT8)

    def cut(self, pieces: int) -> Iterator[Shape]:
        """In so many pieces, whoever puts them to peers."""
        for matmul in ("kernel", "push") if self.call in PUSHING else ("kernel",):
            yield replace(self, pieces=pieces, matmul=matmul)

    def function(self, run: Parts) -> Callable[[Any, Any], Any]:
        if not self.pieces:
            return self.call
        name = self.call.__name__
        tune = {"matmul": self.matmul}
        at_once = {"D": 1} if self.matmul == "push" and self.call is not matmul_all_to_all else {}
        params = {"C": self.pieces, **at_once}
        op = commdsl.load(OPERATORS[name].schedule, params=params, ranks=run.ranks, tune=tune)
        if not OPERATORS[name].all_depths:
            return op
        return lambda x, w, *scales: op(*operands(name, x, w, groups.name_of(None)), *scales)

    def drawn(self, run: Parts, seed: int) -> tuple[list[Any], list[Any]]:
        """Of all ranks, the same wherever they are drawn: -1, 0 or 1."""
        called = OPERATORS[self.call.__name__]
        rows = self.rows * run.ranks if called.all_rows else self.rows
        columns = self.columns * run.ranks if called.all_columns else self.columns
        depth = self.depth * run.ranks if called.all_depths else self.depth
        dice = torch.Generator(run.device).manual_seed(seed)
        draw = partial(torch.randint, -1, 2, generator=dice, device=run.device)
        x = [draw((rows, self.depth)).to(self.dtype) for _ in range(run.ranks)]
        return x, [draw((columns, depth)).to(self.dtype) for _ in range(run.ranks)]

    def scales(self, run: Parts) -> list[Any]:
        return [torch.tensor(one, device=run.device) for one in SCALES] if self.dtype == FLOAT8 else []

    def wanted(self, run: Parts, x: list[Any], w: list[Any]) -> Any:
        """Scales are powers of two: whenever it is rounded, it is the same."""
        scale = SCALES[0] * SCALES[1] if self.dtype == FLOAT8 else 1.0
        return WANTED[self.call](run, x, w, by_schedule=self.pieces > 0) * scale


def gathered(run: Parts, x: list[Any], w: list[Any], by_schedule: bool = False) -> Any:
    return (torch.cat(x).double() @ w[run.rank].double().t()).to(DTYPE)


def scattered(run: Parts, x: list[Any], w: list[Any], by_schedule: bool = False) -> Any:
    return summed(run, x, w, run.rank, is_wide(run, matmul_reduce_scatter, x, w, by_schedule))


def reduced(run: Parts, x: list[Any], w: list[Any], by_schedule: bool = False) -> Any:
    wide = is_wide(run, matmul_all_reduce, x, w, by_schedule)
    return torch.cat([summed(run, x, w, rank, wide) for rank in range(run.ranks)])


def exchanged(run: Parts, x: list[Any], w: list[Any], by_schedule: bool = False) -> Any:
    blocks = (one.chunk(run.ranks)[run.rank] for one in w)
    return torch.cat([one.double() @ block.double().t() for one, block in zip(x, blocks, strict=True)]).to(DTYPE)


def brought_back(run: Parts, made: list[Any]) -> Any:
    """All columns of this rank's rows, of what `exchanged` gives all ranks."""
    return torch.cat([one.chunk(run.ranks)[run.rank] for one in made], 1)


def summed(run: Parts, x: list[Any], w: list[Any], adder: int, wide: bool) -> Any:
    """The rows that one rank adds up, its own not rounded where they are `wide`."""
    made = [one.chunk(run.ranks)[adder].double() @ other.double().t() for one, other in zip(x, w, strict=True)]
    return sum(one if rank == adder and wide else one.to(DTYPE).double() for rank, one in enumerate(made)).to(DTYPE)


def is_wide(run: Parts, call: Callable[..., Any], x: list[Any], w: list[Any], by_schedule: bool) -> bool:
    """Whether a rank adds what it makes itself before that is rounded."""
    (rows, depth), columns = x[0].shape, w[0].shape[0]
    device = name_of_device(run.device)
    return (
        by_schedule or choice(call.__name__, rows, depth, columns, ranks=run.ranks, device=device).schedule != SEQUENCE
    )


def multiplied(run: Parts, x: list[Any], w: list[Any]) -> Any:
    return (x[run.rank].double() @ w[run.rank].double().t()).to(DTYPE)


def returned(run: Parts, x: list[Any], w: list[Any], by_schedule: bool = False) -> Any:
    return (brought_back(run, x).double() @ w[run.rank].double().t()).to(DTYPE)


WANTED = {
    all_gather_matmul: gathered,
    matmul_reduce_scatter: scattered,
    matmul_all_reduce: reduced,
    matmul_all_to_all: exchanged,
    all_to_all_matmul: returned,
}
BACK = {
    all_gather_matmul: scattered,
    matmul_reduce_scatter: gathered,
    matmul_all_reduce: multiplied,
    matmul_all_to_all: returned,
    all_to_all_matmul: exchanged,
}
"""What the gradient of rows is of those of results, and weights transposed."""

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
        x, w = shape.drawn(run, 0)
        self.x, self.w = x[run.rank].clone(), w[run.rank].clone()
        if shape.by_columns:
            self.w = by_columns(self.w)
            self.x = self.x if OPERATORS[shape.call.__name__].gathers else by_columns(self.x)
        self.scales = shape.scales(run)

    def made(self) -> Any:
        return self.function(self.x, self.w, *self.scales)

    def is_wrong(self, seed: int, found: Any) -> Any:
        return ~self.run.same(str(self.shape), found, self.shape.wanted(self.run, *self.shape.drawn(self.run, seed)))

    def fill(self, seed: int) -> None:
        x, w = self.shape.drawn(self.run, seed)
        self.x.copy_(x[self.run.rank])
        self.w.copy_(w[self.run.rank])


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
        (x, w), rank = shape.drawn(run, seed), run.rank
        is_of_all = shape.call in (all_gather_matmul, matmul_all_to_all)
        given = matmul_reduce_scatter if is_of_all else all_gather_matmul
        rows = shape.rows * run.ranks if shape.call is matmul_all_reduce else shape.rows
        back, _ = Shape(given, rows, shape.columns, shape.columns).drawn(run, seed + 1)
        own = [one[rank].clone().requires_grad_() for one in (x, w)]
        of_x, of_w = torch.autograd.grad(shape.call(*own), own, back[rank])
        due = BACK[shape.call](run, back, [one.t() for one in w])
        left = torch.cat(back) if shape.call is matmul_reduce_scatter else back[rank]
        left = brought_back(run, back) if shape.call is matmul_all_to_all else left
        right = torch.cat(x) if shape.call is all_gather_matmul else x[rank]
        right = brought_back(run, x) if shape.call is all_to_all_matmul else right
        wrong += ~run.same(f"rows of {shape}", of_x, due)
        wrong += ~run.same(f"weights of {shape}", of_w, (left.double().t() @ right.double()).to(DTYPE))
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


def storm(run: Parts) -> None:
    dice = random.Random(run.options.seed)

    def shape(call: Callable[..., Any], pieces: int) -> Shape:
        depth, columns = 8 * dice.randrange(1, 100), 8 * dice.randrange(1, 100)
        return Shape(call, max(pieces, 1) * dice.randrange(1, 375), depth, columns, pieces)

    called = [call for call in WANTED if call.__name__ in run.options.operators]
    shapes = [shape(call, 0) for call in called]
    shapes += [one for call, pieces in pairs(called, PIECES) for one in shape(call, pieces).cut(pieces)]
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
    "exact": partial(each, "exact", CALLS, called, WAYS),
    "graphs": graphs,
    "gradients": partial(each, "gradients", 1, differentiated, SHAPES),
    "stamps": stamps,
    "beside": beside,
    "groups": two_groups,
    "compiled": compiled,
    "storm": storm,
}


def main() -> None:
    parser = runner.part_parser_of(__doc__, 300, 85.0, list(PARTS))
    names = [call.__name__ for call in WANTED]
    parser.add_argument("--operators", nargs="+", choices=names, default=names)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    runner.end_of_parts(Parts, options, PARTS, GRACE, on_gpu=options.device == "cuda")


if __name__ == "__main__":
    main()
