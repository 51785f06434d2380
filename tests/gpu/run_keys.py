"""Dispatches by keys on real GPUs beside the simulation, bit for bit. One process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_keys.py [--calls 300 --replays 60 --seed 1 --only storm]
        [--transport nvshmem]

exact     keys of every kind (any, no rows, all to one rank, all to one key, most dropped) x rows of 2 bytes to 14 KB x
          float16, bfloat16, float32: there, and back by weight
forms     rows that go once per rank, filled there or by index, aligned, with values; there again; back once per rank
sizes     thousands of rows of a model's width, 1 to 8 keys each, 64 to 1,024 keys in all
storm     calls of all kinds, GPU and host delays, no barrier in between, kernels that check
graphs    both calls in a CUDA graph, whose keys, rows and weights are overwritten between replays
faults    more rows than there is room for, and a key that there is not: reported, and the group is whole after a reset
times     both calls in a graph, in microseconds; no part of the verdict

Calls of exact, sizes and storm are one launch, or two with a pause between, as each rank draws; in graphs those there
are two, and on even ranks those back; on odd ranks those there again. Each rank computes by itself what it must hold,
so nothing but the calls under test communicates. Results land in memory full of 0xFF. Exit code 1: a wrong result, an
exception, or a part that did not end in time. `--device cpu` runs all but graphs and times on host ranks.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")
os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "6G")

import runner
import torch
from collectives import KEY_FORMS
from runner import Part

import commdsl
from commdsl import ep

KINDS = ("any", "no rows", "some ranks have none", "all to one rank", "all to one key", "most are dropped")
WIDTHS = ((2, 2), (10, 6), (64, 16), (250, 38), (4096, 128), (14336, 448))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
GRACE = 15.0


# --- what must be there -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Case:
    """What all ranks have in a call: made from a seed, the same on every rank."""

    keys: list[Any]
    x: list[Any]
    scale: list[Any]
    weights: list[Any]


@dataclass(frozen=True)
class Shape:
    """Of a call: numbers of x in a row, bytes of scale, the most rows of a rank and keys of a row, keys in all."""

    dtype: torch.dtype
    columns: int
    scale: int
    rows: int
    keys: int
    num_keys: int

    def limits(self, ranks: int) -> ep.Limits:
        width = self.columns * self.dtype.itemsize
        return ep.Limits(self.rows, self.keys, ranks * self.rows * self.keys, (width, self.scale), width)


def drawn(kind: str, shape: Shape, ranks: int, seed: int, device: torch.device, rows: list[int] | None = None) -> Case:
    dice = torch.Generator().manual_seed(seed)

    def below(most: int) -> int:
        return int(torch.randint(0, most, (), generator=dice))

    counts = rows or [0 if kind == "no rows" else below(shape.rows + 1) for _ in range(ranks)]
    if kind == "some ranks have none":
        counts[below(ranks)] = 0
    a_row, share, made = shape.keys, shape.num_keys // ranks, []
    for count in counts:
        keys = torch.randint(0, shape.num_keys + 1, (count, a_row), generator=dice)
        if kind == "all to one rank":
            keys = (ranks - 1) * share + keys % share
        elif kind == "all to one key":
            keys = torch.full_like(keys, shape.num_keys // 2)
        elif kind == "most are dropped":
            keys = torch.where(torch.rand(keys.shape, generator=dice) < 0.9, shape.num_keys, keys)
        made.append(keys.int())
    x = [torch.randn(count, shape.columns, generator=dice).to(shape.dtype) for count in counts]
    scale = [torch.randint(0, 256, (count, shape.scale), generator=dice, dtype=torch.uint8) for count in counts]
    weights = [torch.randn(keys.shape, generator=dice) for keys in made]
    return Case(*([one.to(device) for one in part] for part in (made, x, scale, weights)))


def arriving(case: Case, rank: int, num_keys: int) -> tuple[Any, Any, Any]:
    """Source rank and entry of each row that `rank` receives, sorted by (key, source rank, entry); and the counts."""
    ranks, device = len(case.keys), case.keys[0].device
    share = num_keys // ranks
    key = torch.cat([keys.flatten() for keys in case.keys]).long()
    sizes = [keys.numel() for keys in case.keys]
    source = torch.cat([torch.full((size,), at, device=device) for at, size in enumerate(sizes)])
    entry = torch.cat([torch.arange(size, device=device) for size in sizes])
    mine = (key >= rank * share) & (key < (rank + 1) * share)
    order = torch.argsort(key[mine], stable=True)  # of one key they stand by source, then by entry
    found = (key[mine][order] - rank * share) * ranks + source[mine][order]
    counts = torch.bincount(found, minlength=share * ranks).reshape(share, ranks)
    return source[mine][order], entry[mine][order], counts


def held(parts: Sequence[Any], source: Any, entry: Any, keys: int) -> Any:
    """Rows of all ranks, as they are received."""
    sizes = [len(part) for part in parts]
    begins = torch.tensor([sum(sizes[:at]) for at in range(len(sizes))], device=source.device)
    return torch.cat(list(parts))[begins[source] + entry // keys]


def computed(rows: Any, source: Any, entry: Any) -> Any:
    """What an expert makes of rows: exact, and other for every row and key."""
    factor = (1 + (entry + source) % 3).to(torch.float32)[:, None]
    return (rows.float() * factor).to(rows.dtype)


def summed(case: Case, rank: int, num_keys: int) -> Any:
    """What comes back to a rank: in the order of keys, in float32, rounded once."""
    keys, x, weights = case.keys[rank], case.x[rank], case.weights[rank]
    rows, a_row = keys.shape
    total = torch.zeros(x.shape, device=x.device)
    begun = torch.zeros(rows, 1, dtype=torch.bool, device=x.device)
    entries = torch.arange(rows * a_row, device=x.device).reshape(rows, a_row)
    for which in range(a_row):
        made = computed(x, torch.full((rows,), rank, device=x.device), entries[:, which])
        term = made.float() * weights[:, which, None]
        kept = (keys[:, which, None] >= 0) & (keys[:, which, None] < num_keys)
        total = torch.where(kept, torch.where(begun, total + term, term), total)
        begun |= kept
    return total.to(x.dtype)


def summed_once(case: Case, rank: int, num_keys: int) -> Any:
    """As `summed`, but first over the keys of each rank, rounded there; then over the ranks."""
    keys, x, weights, ranks = case.keys[rank], case.x[rank], case.weights[rank], len(case.keys)
    share, (rows, a_row) = num_keys // ranks, keys.shape
    total, begun = torch.zeros(x.shape, device=x.device), torch.zeros(rows, 1, dtype=torch.bool, device=x.device)
    entries = torch.arange(rows * a_row, device=x.device).reshape(rows, a_row)
    for at in range(ranks):
        part, there = torch.zeros_like(total), torch.zeros_like(begun)
        for which in range(a_row):
            made = computed(x, torch.full((rows,), rank, device=x.device), entries[:, which])
            term, here = made.float() * weights[:, which, None], keys[:, which, None] // share == at
            here &= keys[:, which, None] < num_keys
            part = torch.where(here, torch.where(there, part + term, term), part)
            there |= here
        part = part.to(x.dtype).float()
        total = torch.where(there, torch.where(begun, total + part, part), total)
        begun |= there
    return total.to(x.dtype)


@dataclass(frozen=True, eq=False)
class Placed:
    """Where rows that arrive lie, if those of each key begin at a multiple of something."""

    source: Any
    entry: Any
    counts: Any
    place: Any  # of each row
    first: Any  # of each row the place of its first key here
    offsets: Any

    @staticmethod
    def of(case: Case, rank: int, num_keys: int, aligned: int) -> Placed:
        source, entry, counts = arriving(case, rank, num_keys)
        lengths = counts.sum(1)
        offsets = ((lengths + aligned - 1) // aligned * aligned).cumsum(0)
        number, key = torch.arange(len(source), device=source.device), torch.arange(len(lengths), device=source.device)
        key = torch.repeat_interleave(key, lengths)
        before = torch.cat((offsets.new_zeros(1), offsets[:-1]))
        place = before[key] + number - (lengths.cumsum(0) - lengths)[key]
        rows = source * 2**32 + entry // case.keys[rank].shape[1]
        group = torch.unique(rows, return_inverse=True)[1]
        least = torch.full_like(group, 2**62).scatter_reduce(0, group, entry, "amin")
        is_first = least[group] == entry
        first = torch.zeros_like(group).scatter(0, group[is_first], place[is_first])[group]
        return Placed(source, entry, counts, place, first, offsets)


# --- the run ----------------------------------------------------------------------------------------------------------


class Run(runner.Parts):
    def experts(self, shape: Shape, *, check: bool = False, **options: Any) -> Any:
        limits = options.pop("limits", None) or shape.limits(self.ranks)
        params = options.pop("params", {"E": shape.num_keys})
        return ep.Experts(limits, device=self.device, check=check, params=params, **options)

    def hold_up(self, dice: random.Random) -> None:
        """Sometimes this rank is late, on the host or on the GPU."""
        if dice.random() < 0.2:
            time.sleep(dice.random() * 0.002)
        if self.on_gpu and dice.random() < 0.2:
            torch.cuda._sleep(int(dice.random() * 2_000_000))


class Judge:
    """Counts calls that are not as they must be, on the device: the host waits for none of them."""

    def __init__(self, run: Run, shape: Shape) -> None:
        self.run, self.shape = run, shape
        self.wrong = torch.zeros((), dtype=torch.int64, device=run.device)
        self.dice = random.Random(f"{run.options.seed} {run.rank} halves")

    def made(self, whole: Callable[..., Any], half: Callable[..., Any], *given: Any) -> Any:
        """A call in one launch, or in two with a pause between, whatever it is on other ranks."""
        if self.dice.random() < 0.5:
            return whole(*given)
        pending = half(*given)
        self.run.hold_up(self.dice)
        return pending.receive()

    def call(self, experts: Any, case: Case) -> None:
        """There and back."""
        rank = self.run.rank
        given = (case.x[rank], case.scale[rank]), case.keys[rank]
        there = self.made(experts.dispatch, experts.dispatch_send, *given)
        (x, scale), counts, handle = there.rows, there.counts, there.handle
        source, entry, wanted = arriving(case, rank, self.shape.num_keys)
        total, a_row = len(source), case.keys[rank].shape[1]
        same = self.run.same
        right = same("counts", counts, wanted)
        right &= same("rows", x[:total], held(case.x, source, entry, a_row))
        right &= same("scale", scale[:total], held(case.scale, source, entry, a_row))
        made = torch.full_like(x, float("nan"))
        made[:total] = computed(x[:total], source, entry)
        home = self.made(experts.combine, experts.combine_send, made, handle, case.weights[rank])
        right &= same("sums", home, summed(case, rank, self.shape.num_keys))
        self.wrong += ~right

    @property
    def count(self) -> int:
        return int(self.wrong.item())


def exact(run: Run) -> None:
    for width, scale in WIDTHS if run.on_gpu else WIDTHS[:4]:
        shapes = [
            Shape(dtype, width // dtype.itemsize, scale, 200, 4, 8 * run.ranks)
            for dtype in DTYPES
            if width % dtype.itemsize == 0
        ]
        part = Part("exact", f"rows of {width} and {scale} B", len(shapes) * len(KINDS))

        def work(shapes: list[Shape] = shapes) -> int:
            wrong = 0
            for at, shape in enumerate(shapes):
                experts, judge = run.experts(shape), Judge(run, shape)
                for number, kind in enumerate(KINDS):
                    seed = 1000 * run.options.seed + 100 * at + number
                    judge.call(experts, drawn(kind, shape, run.ranks, seed, run.device))
                wrong += judge.count
                experts.release()
            return wrong

        run.attempt(part, work)


def judged(run: Run, experts: Any, case: Case, shape: Shape, aligned: int) -> Any:
    """Whether a call that goes once per rank, there, there again and back, is as it must be."""
    rank, a_row = run.rank, shape.keys
    there = experts.dispatch((case.x[rank], case.scale[rank]), case.keys[rank], case.weights[rank])
    at, handle = Placed.of(case, rank, shape.num_keys, aligned), there.handle
    total = int(at.offsets[-1])
    rows = at.place if there.index is None else at.first
    padding = torch.ones(total, dtype=torch.bool, device=run.device).index_fill(0, at.place, False)
    x = held(case.x, at.source, at.entry, a_row)
    same = run.same
    right = same("counts", there.counts, at.counts) & same("offsets", there.offsets, at.offsets.int())
    right &= same("rows", there.rows[0][rows], x) & same("padding", there.rows[0][:total][padding], 0)
    right &= same("scale", there.rows[1][rows], held(case.scale, at.source, at.entry, a_row))
    numbers = [weights.flatten() for weights in case.weights]
    right &= same("values", there.values[at.place], held(numbers, at.source, at.entry, 1))
    origins = handle.origins[at.place]
    right &= same("entries", origins & 0xFFFFFFFF, at.entry) & same("sources", origins >> 32 & 0xFFFF, at.source)
    right &= same("which are first", origins < 0, at.place == at.first)
    right &= same("origins of padding", handle.origins[:total][padding], -1)
    if there.index is not None:
        right &= same("index", there.index[at.place], at.first)
        right &= same("index of padding", there.index[:total][padding], -1)
    other = -case.x[rank]
    again = experts.dispatch_again_send(other, handle).receive() if rank % 2 else experts.dispatch_again(other, handle)
    right &= same("rows again", again[rows], -x) & same("padding again", again[:total][padding], 0)
    made = torch.full_like(there.rows[0], float("nan"))
    made[at.place] = computed(x, at.source, at.entry)
    return right & same("sums", experts.combine(made, handle), summed_once(case, rank, shape.num_keys))


def forms(run: Run) -> None:
    big = run.on_gpu
    for source, (keys, a_rank, aligned) in product(("experts_once", "experts_index"), KEY_FORMS):
        shape = Shape(torch.bfloat16, 3584 if big else 40, 112, 300 if big else 40, keys, a_rank * run.ranks)
        received = run.ranks * shape.rows * keys + a_rank * (aligned - 1)
        width = 2 * shape.columns
        limits = ep.Limits(shape.rows, keys, received, (width, shape.scale), width, width)

        def work(source: str = source, shape: Shape = shape, aligned: int = aligned, limits: Any = limits) -> int:
            options = {"limits": limits, "source": source, "params": {"E": shape.num_keys, "A": aligned}}
            experts, wrong = run.experts(shape, check=True, **options), 0
            for number, kind in enumerate(KINDS):
                case = drawn(kind, shape, run.ranks, 31 * run.options.seed + number, run.device)
                wrong += int(not judged(run, experts, case, shape, aligned))
            experts.synchronize()
            experts.release()
            return wrong

        run.attempt(Part("forms", f"{source}, {keys} of {a_rank} keys a rank, aligned {aligned}", len(KINDS)), work)


def sizes(run: Run) -> None:
    big = run.on_gpu
    for keys, num_keys in ((1, 64), (4, 256), (8, 1024)):
        shape = Shape(torch.bfloat16, 2048 if big else 64, 32, 2048 if big else 100, keys, num_keys)

        def work(shape: Shape = shape) -> int:
            experts, judge = run.experts(shape), Judge(run, shape)
            for number in range(3):
                rows = [shape.rows - (at + number) % 3 for at in range(run.ranks)]
                judge.call(experts, drawn("any", shape, run.ranks, number, run.device, rows))
            wrong = judge.count
            experts.release()
            return wrong

        run.attempt(Part("sizes", f"{shape.rows} rows, {keys} of {num_keys} keys", 3), work)


def storm(run: Run) -> None:
    shape = Shape(torch.bfloat16, 512, 16, 300, 4, 16 * run.ranks)
    stormed(run, shape, lambda: (run.experts(shape, check=True), Judge(run, shape)))


def stormed(run: Run, shape: Shape, made: Callable[[], tuple[Any, Judge]]) -> None:
    """Calls of Experts and their judge, in any order, with delays."""

    def work() -> int:
        experts, judge = made()
        dice, delays = random.Random(run.options.seed), random.Random(f"{run.options.seed} {run.rank}")
        pool = [drawn(KINDS[at % len(KINDS)], shape, run.ranks, 77 + at, run.device) for at in range(30)]
        for number in range(run.options.calls):
            run.place = f"storm, call {number} begun on rank {run.rank}"
            run.hold_up(delays)
            judge.call(experts, dice.choice(pool))
        experts.synchronize()
        wrong = judge.count
        experts.release()
        return wrong

    run.attempt(Part("storm", "random delays, no barrier, checked", run.options.calls), work)


# --- graphs -----------------------------------------------------------------------------------------------------------


def captured(run: Run, shape: Shape, rows: int) -> tuple[Any, Any, Case, tuple[Any, ...]]:
    """Both calls in a graph, some of two launches: the Experts, the graph, what it reads, what it leaves."""
    experts = run.experts(shape)
    static = drawn("any", shape, run.ranks, 1, run.device, [rows] * run.ranks)
    rank = run.rank

    def there_and_back() -> tuple[Any, ...]:
        there = experts.dispatch_send((static.x[rank], static.scale[rank]), static.keys[rank]).receive()
        (x, scale), counts, handle = there.rows, there.counts, there.handle
        source, entry = handle.origins >> 32 & 0xFFFF, handle.origins & 0xFFFFFFFF
        made, weights = computed(x, source, entry), static.weights[rank]
        if rank % 2:
            return x, scale, counts, experts.combine(made, handle, weights)
        return x, scale, counts, experts.combine_send(made, handle, weights).receive()

    there_and_back()
    run.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        left = there_and_back()
    return experts, graph, static, left


def graphs(run: Run) -> None:
    if not run.on_gpu:
        return
    shape, rows, rank = Shape(torch.bfloat16, 256, 16, 200, 4, 16 * run.ranks), 150, run.rank

    def work() -> int:
        experts, graph, static, (x, scale, counts, home) = captured(run, shape, rows)
        wrong = torch.zeros((), dtype=torch.int64, device=run.device)
        judge, delays = Judge(run, shape), random.Random(f"{run.options.seed} {rank}")
        kinds = [kind for kind in KINDS if "rows" not in kind and "none" not in kind]
        for replay in range(run.options.replays):
            case = drawn(kinds[replay % len(kinds)], shape, run.ranks, 500 + replay, run.device, [rows] * run.ranks)
            for part in ("keys", "x", "scale", "weights"):
                getattr(static, part)[rank].copy_(getattr(case, part)[rank])
            for left in (x, scale, counts, home):
                left.view(torch.uint8).fill_(255)
            run.hold_up(delays)
            graph.replay()
            source, entry, wanted = arriving(case, rank, shape.num_keys)
            total = len(source)
            right = run.same("counts", counts, wanted) & run.same("sums", home, summed(case, rank, shape.num_keys))
            right &= run.same("rows", x[:total], held(case.x, source, entry, shape.keys))
            right &= run.same("scale", scale[:total], held(case.scale, source, entry, shape.keys))
            wrong += ~right
            if replay % 5 == 0:  # a call outside the graph, of the same Experts
                judge.call(experts, case)
        found = int(wrong.item()) + judge.count
        graph.reset()
        experts.release()
        return found

    run.attempt(Part("graphs", "keys change between replays", run.options.replays), work)


# --- faults -----------------------------------------------------------------------------------------------------------


def faults(run: Run) -> None:
    shape = Shape(torch.float32, 16, 8, 50, 2, 8 * run.ranks)

    def reported(experts: Any, case: Case) -> str:
        try:
            experts.dispatch((case.x[run.rank], case.scale[run.rank]), case.keys[run.rank])
            experts.synchronize()
        except ep.KeysError as error:
            return str(error)
        return ""

    def work() -> int:
        rows = [shape.rows] * run.ranks
        case = drawn("all to one key", shape, run.ranks, 5, run.device, rows)
        tight = ep.Limits(shape.rows, shape.keys, shape.rows, (64, 8), 64)
        said = reported(run.experts(shape, limits=tight), case)
        wrong = int(f"has room for {shape.rows}" not in said)
        commdsl.reset()
        experts, judge = run.experts(shape), Judge(run, shape)
        bad = drawn("any", shape, run.ranks, 6, run.device, rows)
        if run.rank == run.ranks - 1:
            bad.keys[run.rank][7, 1] = 10_000
        said = reported(experts, bad)
        wrong += int(("key 1 of row 7" in said) != (run.rank == run.ranks - 1))
        commdsl.reset()
        judge.call(experts, case)
        wrong += judge.count
        commdsl.reset()
        return wrong

    run.attempt(Part("faults", "no room, no such key, reset", 3), work)


# --- times ------------------------------------------------------------------------------------------------------------


def times(run: Run) -> None:
    if not run.on_gpu:
        return
    for rows, columns in ((128, 2048), (4096, 2048)):
        shape = Shape(torch.bfloat16, columns, 16, rows, 8, 32 * run.ranks)

        part = Part("times", f"{rows} rows of {2 * columns} B, 8 keys", 30)

        def work(part: Part = part, shape: Shape = shape, rows: int = rows) -> int:
            experts, graph, _, _ = captured(run, shape, rows)
            part.what += f": {replay_time(graph):.0f} us there, computed and back"
            graph.reset()
            experts.release()
            return 0

        run.attempt(part, work)


def replay_time(graph: Any) -> float:
    """The median of 30 replays, in microseconds."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(30):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * begin.elapsed_time(end))
    return sorted(found)[len(found) // 2]


# --- the end ----------------------------------------------------------------------------------------------------------

PARTS = {
    "exact": exact,
    "forms": forms,
    "sizes": sizes,
    "storm": storm,
    "graphs": graphs,
    "faults": faults,
    "times": times,
}


if __name__ == "__main__":
    runner.run_parts(Run, PARTS, __doc__, calls=300, seconds=85.0, grace=GRACE)
