"""Dispatches by keys whose rows travel once per rank, and come back added up there, on real GPUs, bit for bit. One
process per GPU:

    torchrun --nproc-per-node 2 tests/gpu/run_keys_once.py [--calls 300 --replays 60 --seed 1 --only storm]
        [--transport nvshmem]

exact     keys of every kind x rows of 2 bytes to 14 KB x float16, bfloat16, float32 x aligned or not: rows, values and
          origins there; sums of the rows of each rank, by weights, and a number for each key back
by index  the same where places name the one that has their row
storm     calls of all kinds, GPU and host delays, no barrier in between, kernels that check
waves     the same of so many rows that their sums come home in several waves
graphs    the calls in a CUDA graph, whose keys, rows and weights are overwritten between replays
times     both calls in a graph, in microseconds; no part of the verdict

Each rank computes by itself what it must hold, so nothing but the calls under test communicates. Every place's row is
another one. Calls back of odd ranks are two launches, in graphs too. Exit code 1: a wrong result, an exception, or a
part that did not end in time. `--device cpu` runs all but graphs and times on host ranks.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import run_keys
import runner
import torch
from run_keys import DTYPES, KINDS, WIDTHS, Case, Shape, arriving, computed, drawn, held
from runner import Part

from commdsl import ep

NONE = -1
"""The origin of a place that has no row."""


def added(case: Case, rank: int, shape: Shape, ranks: int, node: int) -> Any:
    """What comes back to a rank: of each rank what its keys have, in their order, in float32, rounded; of each node of
    so many ranks that, in their order, in float32, rounded; in the order of the nodes, in float32, rounded.
    """
    keys, x, weights = case.keys[rank], case.x[rank], case.weights[rank]
    rows, a_row = keys.shape
    entries = torch.arange(rows * a_row, device=x.device).reshape(rows, a_row)
    of = torch.where(keys < shape.num_keys, keys // (shape.num_keys // ranks), ranks)
    none = torch.zeros(x.shape, device=x.device), torch.zeros(rows, 1, dtype=torch.bool, device=x.device)
    (total, begun), (of_node, in_node) = none, none
    for there in range(ranks):
        part, has = none
        for which in range(a_row):
            made = computed(x, torch.full((rows,), rank, device=x.device), entries[:, which])
            term = made.float() * weights[:, which, None]
            here = (of[:, which] == there)[:, None]
            part = torch.where(here, torch.where(has, part + term, term), part)
            has = has | here
        came = part.to(x.dtype).float()
        of_node = torch.where(has, torch.where(in_node, of_node + came, came), of_node)
        in_node = in_node | has
        if (there + 1) % node == 0:
            came = of_node.to(x.dtype).float()
            total = torch.where(in_node, torch.where(begun, total + came, came), total)
            begun, (of_node, in_node) = begun | in_node, none
    return total.to(x.dtype)


class Judge(run_keys.Judge):
    """As there, for what travels once to segments that are aligned."""

    def __init__(self, run: run_keys.Run, shape: Shape, aligned: int, node: int | None = None) -> None:
        super().__init__(run, shape)
        self.aligned, self.node = aligned, node or run.ranks

    def call(self, experts: Any, case: Case) -> None:
        rank = self.run.rank
        there = experts.dispatch((case.x[rank], case.scale[rank]), case.keys[rank], case.weights[rank])
        self.wrong += ~self.is_right(case, there, back(experts, there))

    def is_right(self, case: Case, there: Any, came: tuple[Any, Any]) -> Any:
        rank, shape, aligned = self.run.rank, self.shape, self.aligned
        source, entry, counts = arriving(case, rank, shape.num_keys)
        ends = (counts.sum(1) + aligned - 1).div(aligned, rounding_mode="floor").cumsum(0) * aligned
        same = self.run.same
        right = same("counts", there.counts, counts) & same("offsets", there.offsets, ends.int())
        origins = there.handle.origins[: int(ends[-1])]
        at = origins != NONE
        a_row = case.keys[rank].shape[1]
        right &= same("sources", (origins[at] >> 32) & 0xFFFF, source)
        right &= same("entries", origins[at] & 0xFFFFFFFF, entry)
        place = (
            torch.arange(len(origins), device=origins.device) if there.index is None else there.index[: len(origins)]
        )
        for name, rows, parts in zip(("rows", "scale"), there.rows, (case.x, case.scale), strict=True):
            right &= same(name, rows[place[at].long()], held(parts, source, entry, a_row))
            right &= same(f"padding of {name}", rows[: len(origins)][~at], 0)
        weights = [weight.flatten() for weight in case.weights]
        right &= same("values", there.values[: len(origins)][at], held(weights, source, entry, 1))
        home, values = came
        right &= same("sums", home, added(case, rank, shape, self.run.ranks, self.node))
        kept = case.keys[rank] < shape.num_keys
        return right & same("values back", values, torch.where(kept, case.weights[rank], 0))


def back(experts: Any, there: Any) -> tuple[Any, Any]:
    """What the experts of this rank made of every place, and the values that came there."""
    origins, x = there.handle.origins, there.rows[0]
    rows = x if there.index is None else x[there.index.clamp(min=0).long()]
    made = computed(rows, (origins >> 32) & 0xFFFF, origins & 0xFFFFFFFF)
    made = torch.where((origins == NONE)[:, None], float("nan"), made)
    if experts.rank % 2:  # the same calls, by two launches each, one within the other
        sums, numbers = (
            experts.combine_send(made, there.handle),
            experts.combine_values_send(there.values, there.handle),
        )
        return sums.receive(), numbers.receive()
    return experts.combine(made, there.handle), experts.combine_values(there.values, there.handle)


def made_of(run: run_keys.Run, shape: Shape, aligned: int, source: Any = "experts_once", **options: Any) -> Any:
    width = shape.columns * shape.dtype.itemsize
    received = run.ranks * shape.rows * shape.keys + shape.num_keys // run.ranks * (aligned - 1)
    limits = ep.Limits(shape.rows, shape.keys, received, (width, shape.scale), width)
    params = {"E": shape.num_keys, "A": aligned}
    return ep.Experts(limits, device=run.device, source=source, params=params, **options)


def _exact(run: run_keys.Run, source: str, name: str) -> None:
    for width, scale in WIDTHS if run.on_gpu else WIDTHS[1:3]:
        dtypes = [dtype for dtype in DTYPES if width % dtype.itemsize == 0]
        part = Part(name, f"rows of {width} and {scale} B", len(dtypes) * len(KINDS))

        def work(width: int = width, scale: int = scale, dtypes: list[Any] = dtypes) -> int:
            wrong = 0
            for at, dtype in enumerate(dtypes):
                shape = Shape(dtype, width // dtype.itemsize, scale, 200, (1, 8, 32)[at], 8 * run.ranks)
                aligned = (1, 128, 16)[at]
                experts, judge = made_of(run, shape, aligned, source), Judge(run, shape, aligned)
                for number, kind in enumerate(KINDS):
                    judge.call(experts, drawn(kind, shape, run.ranks, 1000 * at + number, run.device))
                wrong += judge.count
                experts.release()
            return wrong

        run.attempt(part, work)


def exact(run: run_keys.Run) -> None:
    _exact(run, "experts_once", "exact")


def by_index(run: run_keys.Run) -> None:
    _exact(run, "experts_index", "by index")


def storm(run: run_keys.Run, rows: int = 300) -> None:
    shape = Shape(torch.bfloat16, 512, 16, rows, 4, 16 * run.ranks)
    run_keys.stormed(run, shape, lambda: (made_of(run, shape, 8, check=True), Judge(run, shape, 8)))


def waves(run: run_keys.Run) -> None:
    storm(run, 2100)


# --- graphs -----------------------------------------------------------------------------------------------------------


def captured(run: run_keys.Run, shape: Shape, rows: int, aligned: int) -> tuple[Any, Any, Case, Any]:
    """All calls in a graph: the Experts, the graph, what it reads, what it leaves."""
    experts, rank = made_of(run, shape, aligned), run.rank
    static = drawn("any", shape, run.ranks, 1, run.device, [rows] * run.ranks)

    def there_and_back() -> Any:
        there = experts.dispatch((static.x[rank], static.scale[rank]), static.keys[rank], static.weights[rank])
        return there, back(experts, there)

    there_and_back()
    run.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        left = there_and_back()
    return experts, graph, static, left


def graphs(run: run_keys.Run) -> None:
    if not run.on_gpu:
        return
    shape, rows, rank = Shape(torch.bfloat16, 256, 16, 200, 8, 16 * run.ranks), 150, run.rank

    def work() -> int:
        experts, graph, static, (there, came) = captured(run, shape, rows, 16)
        judge, delays = Judge(run, shape, 16), random.Random(f"{run.options.seed} {rank}")
        kinds = [kind for kind in KINDS if "rows" not in kind and "none" not in kind]
        for replay in range(run.options.replays):
            case = drawn(kinds[replay % len(kinds)], shape, run.ranks, 500 + replay, run.device, [rows] * run.ranks)
            for part in ("keys", "x", "scale", "weights"):
                getattr(static, part)[rank].copy_(getattr(case, part)[rank])
            run.hold_up(delays)
            graph.replay()
            judge.wrong += ~judge.is_right(case, there, came)
            if replay % 5 == 0:  # a call outside the graph, of the same Experts
                judge.call(experts, case)
        wrong = judge.count
        graph.reset()
        experts.release()
        return wrong

    run.attempt(Part("graphs", "keys change between replays", run.options.replays), work)


def times(run: run_keys.Run) -> None:
    if not run.on_gpu:
        return
    for rows, columns in ((128, 7168), (4096, 7168)):
        shape = Shape(torch.bfloat16, columns, 16, rows, 8, 32 * run.ranks)
        part = Part("times", f"{rows} rows of {2 * columns} B, 8 keys", 30)

        def work(part: Part = part, shape: Shape = shape, rows: int = rows) -> int:
            experts, rank = made_of(run, shape, 128), run.rank
            case = drawn("any", shape, run.ranks, 1, run.device, [rows] * run.ranks)
            there = experts.dispatch((case.x[rank], case.scale[rank]), case.keys[rank], case.weights[rank])
            for what, call in (
                (
                    "there",
                    lambda: experts.dispatch((case.x[rank], case.scale[rank]), case.keys[rank], case.weights[rank]),
                ),
                ("back", lambda: experts.combine(there.rows[0], there.handle)),
                ("values", lambda: experts.combine_values(there.values, there.handle)),
            ):
                part.what += f"; {what} {run_time(run, call):.0f} us"
            experts.release()
            return 0

        run.attempt(part, work)


def run_time(run: run_keys.Run, call: Any) -> float:
    """The median of a call in a graph, in microseconds."""
    call()
    run.wait()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()
    found = run_keys.replay_time(graph)
    graph.reset()
    del kept
    return found


PARTS = {"exact": exact, "by index": by_index, "storm": storm, "waves": waves, "graphs": graphs, "times": times}


if __name__ == "__main__":
    runner.run_parts(run_keys.Run, PARTS, __doc__, calls=300, seconds=85.0, grace=run_keys.GRACE)
