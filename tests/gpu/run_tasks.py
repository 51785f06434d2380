"""Programs of tasks that depend on one another, on GPUs that ranks may share, against float64:

    COMMDSL_SHARE_GPUS=1 torchrun --nproc-per-node 2 tests/gpu/run_tasks.py [--calls 300 --seed 1 --device cpu]

written   an MLP block, a chain of three products by three factors, and a product both of whose operands are sent: sizes
          of layers, call after call with other numbers, and a CUDA graph of two calls that is replayed
drawn     as many random programs as `--calls` says (tests/task_programs.py), each called twice with other numbers

Whole numbers whose sums no rounding changes are compared to the bit, others within 2^-5 of the largest. The line behind
the table says how many calls ran as one kernel. Exit code 1: a wrong result, an exception, or a part without end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("COMMDSL_TIMEOUT", "15")

import runner
import torch
from runner import Part, Parts
from task_programs import Leaf, Made, Node, Program, drawn

import commdsl
from commdsl.machine.resources import data_dir

DTYPE = torch.bfloat16
GRACE = 15.0
CALLS = 4
REPLAYS = 20
EXACT = 256
"""Whole numbers up to this one are bfloat16's."""

TESTS = Path(__file__).resolve().parents[1]
OVERLAP = data_dir("schedules") / "overlap"


def matmul(rows: Node, factor: Node, activation: str = "") -> Made:
    return Made(((rows, factor),), activation=activation)


def mlp(ranks: int) -> list[Node]:
    """Return the result of an MLP block: the tokens of a rank through the hidden columns of all ranks."""
    hidden = [matmul(Leaf("x"), Leaf("up", -q), "swiglu") for q in range(ranks)]
    return [Made(tuple((one, Leaf("down", -q)) for q, one in enumerate(hidden)))]


def chain(ranks: int) -> list[Node]:
    first = matmul(Leaf("x", -1), Leaf("u"), "gelu")
    return [matmul(matmul(first, Leaf("v")), Leaf("w"))]


WRITTEN: dict[str, tuple[Path, Callable[[int], list[Node]], dict[str, tuple[int, ...]]]] = {
    "mlp": (OVERLAP / "mlp.comm", mlp, {"x": (512, 1024), "up": (2816, 1024), "down": (1024, 1408)}),
    "chain": (
        TESTS / "chained_products.comm",
        chain,
        {"x": (520, 512), "u": (1408, 512), "v": (264, 1408), "w": (776, 264)},
    ),
}


class Calls:
    """An op on one rank: its inputs, which calls fill with other numbers, and what must come of them."""

    def __init__(self, run: Parts, op: Any, shapes: Mapping[str, tuple[int, ...]], results: Sequence[Node]) -> None:
        self.run, self.op, self.shapes, self.results = run, op, shapes, results
        self.given = self.drawn(0)[run.rank]

    def drawn(self, seed: int) -> list[dict[str, Any]]:
        """Return inputs of all ranks: -1, 0 and 1, different on every rank and position."""
        found = []
        for rank in range(self.run.ranks):
            dice = torch.Generator(self.run.device).manual_seed(1000 * seed + rank)
            draw = {
                name: torch.randint(-1, 2, shape, generator=dice, device=self.run.device).to(DTYPE)
                for name, shape in self.shapes.items()
            }
            found.append(draw)
        return found

    def fill(self, seed: int) -> None:
        for name, one in self.drawn(seed)[self.run.rank].items():
            self.given[name].copy_(one)

    def made(self) -> tuple[Any, ...]:
        found = self.op(*self.given.values())
        return found if isinstance(found, tuple) else (found,)

    def wrong(self, found: Sequence[Any], seed: int) -> Any:
        """Return on the device whether any result is wrong."""
        given, wrong = self.drawn(seed), torch.zeros((), dtype=torch.bool, device=self.run.device)
        for number, (one, node) in enumerate(zip(found, self.results, strict=True)):
            due, largest = rounded(node, self.run.rank, given)
            near = 2.0**-5 * due.abs().max() * torch.ones_like(due)
            near = torch.where(largest <= EXACT, torch.zeros_like(due), near) if is_whole(node) else near
            wrong |= ~self.run.same(f"result {number}", one, due, near)
            one.fill_(torch.nan)
        return wrong


def is_whole(node: Node) -> bool:
    """Return whether only whole numbers are computed."""
    if isinstance(node, Leaf):
        return True
    inside = [one for pair in node.terms for one in pair]
    return not node.activation and all(map(is_whole, (*inside, *node.added)))


def rounded(node: Node, rank: int, given: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """Return the value on a rank, in float64 and rounded once, and the largest number on the way."""
    if isinstance(node, Leaf):
        found = given[(rank + node.shift) % len(given)][node.name].double()
        return found, found.abs().max()
    total, largest = 0, torch.zeros((), dtype=torch.float64, device=given[0][next(iter(given[0]))].device)
    for rows, factor in node.terms:
        (one, left), (other, right) = rounded(rows, rank, given), rounded(factor, rank, given)
        total, largest = total + one @ other.t(), torch.maximum(largest, torch.maximum(left, right))
    if node.bias:
        total = total + rounded(node.bias, rank, given)[0]
    if node.activation == "gelu":
        total = total * torch.special.ndtr(total)
    if node.activation == "swiglu":
        gate, up = total.chunk(2, 1)
        total = gate * torch.sigmoid(gate) * up
    for one in (*node.added, *filter(None, (node.residual,))):
        more, most = rounded(one, rank, given)
        total, largest = total + more, torch.maximum(largest, most)
    return total.to(DTYPE).double(), torch.maximum(largest, total.abs().max())


@contextlib.contextmanager
def counted(found: Counter[str]) -> Iterator[None]:
    """Count the calls whose tasks are one kernel."""
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


def written(run: Parts) -> None:
    for name, (path, meaning, shapes) in WRITTEN.items():
        sizes = shapes if run.on_gpu else {key: tuple(side // 8 for side in shape) for key, shape in shapes.items()}

        def work(path: Path = path, meaning: Any = meaning, sizes: Any = sizes) -> int:
            found = Counter[str]()
            with counted(found):
                calls = Calls(run, commdsl.load(path, ranks=run.ranks), sizes, meaning(run.ranks))
                wrong = 0
                for seed in range(CALLS):
                    calls.fill(seed)
                    wrong += int(calls.wrong(calls.made(), seed))
                wrong += replayed(run, calls) if run.on_gpu else 0
            return wrong + (run.on_gpu and not found["kernels"])

        run.attempt_in_time(Part("written", name, CALLS + REPLAYS * run.on_gpu), work)


def replayed(run: Parts, calls: Calls) -> int:
    """Replay a graph of two calls, with other numbers each time; return the number of wrong results."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        found = [calls.made(), calls.made()]
        graph.capture_end()
    wrong = torch.zeros((), dtype=torch.int64, device=run.device)
    for seed in range(REPLAYS):
        calls.fill(100 + seed)
        graph.replay()
        for one in found:
            wrong += calls.wrong(one, 100 + seed)
    return int(wrong)


def random_programs(run: Parts) -> None:
    found, folder = Counter[str](), Path(tempfile.mkdtemp(prefix="commdsl-tasks-"))
    step = 10
    for first in range(0, run.options.calls, step):

        def work(first: int = first) -> int:
            wrong = 0
            with counted(found):
                for number in range(first, first + step):
                    wrong += program(run, drawn(1000 * run.options.seed + number), folder / f"drawn_{number}.comm")
            return wrong

        run.attempt_in_time(Part("drawn", f"programs {first} to {first + step - 1}", 2 * step), work)
    if run.on_gpu:
        made = Part("drawn", f"{found['kernels']} of {2 * run.options.calls} calls were one kernel", 0)
        run.attempt_in_time(made, lambda: int(not found["kernels"]))


def program(run: Parts, one: Program, path: Path) -> int:
    path.write_text(one.text, "utf-8")
    calls, wrong = Calls(run, commdsl.load(path, ranks=run.ranks), one.shapes, [*one.results.values()]), 0
    for seed in range(2):
        calls.fill(seed)
        wrong += int(calls.wrong(calls.made(), seed))
    return wrong


if __name__ == "__main__":
    runner.run_parts(
        Parts, {"written": written, "drawn": random_programs}, __doc__, calls=300, seconds=300, grace=GRACE
    )
