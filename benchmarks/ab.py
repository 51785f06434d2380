"""A collective of this checkout beside the same of another, on the same GPUs in the same run, batch by batch in turn:

    python benchmarks/ab.py OTHER_CHECKOUT --ranks 2 [--sizes 1K,4K,16K,64K] [--collective all_reduce] [--rounds 60]

Each checkout has a process a rank, all of them up at once, and one graph of calls a size (on the processor, and with
`--eager`, a loop of them, until the last is over). In each round both run one batch at every size, in an order that
changes; a batch's time is its slowest rank's. The table, last: median microseconds a call of both, this over the other,
and the 10th and 90th percentile of that ratio by round. Exit code 1: a wrong result, or with `--most 1.02` a ratio
above it. Needs no torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any

HERE = Path(__file__).resolve().parents[1]
CALLS = {"cuda": 100, "cpu": 20}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
WARM = 3
PATIENCE = 300.0
"""Seconds in which a checkout has to be ready: it builds first."""


# --- a rank of a checkout ---------------------------------------------------------------------------------------------


def serve(told: dict[str, Any]) -> None:
    """Makes a batch for every size, then runs the one that a line of the input names, and says what it took."""
    sys.path.insert(0, told["checkout"])
    import torch
    import torch.distributed as dist

    import commdsl

    if not str(commdsl.__file__).startswith(told["checkout"]):
        raise RuntimeError(f"asked for the package of {told['checkout']}, got {commdsl.__file__}")
    rank, device = int(told["rank"]), torch.device(told["device"])
    if device.type == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())  # ranks may share one
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", told["port"], told["ranks"], rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=told["ranks"])
    call = getattr(commdsl, told["collective"])
    batches = {
        str(nbytes): _batch(call, nbytes, device, told["ranks"], is_eager=told["eager"]) for nbytes in told["sizes"]
    }
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        dist.barrier()
        print(json.dumps(batches[line.strip()]()), flush=True)
    commdsl.check()
    os._exit(0)  # an end that is collective must not wait for a rank that is gone


def _batch(call: Callable[[Any], Any], nbytes: int, device: Any, ranks: int, *, is_eager: bool) -> Callable[[], float]:
    """Returns microseconds a call; the first result is checked."""
    import torch

    dtype = torch.bfloat16
    x = torch.ones(nbytes // 2 // ranks * ranks, dtype=dtype, device=device)
    found = call(x)
    if call.__name__ in ("all_reduce", "reduce_scatter") and not bool((found == ranks).all()):
        raise RuntimeError(f"{call.__name__} of {nbytes} bytes is wrong")
    calls = CALLS[device.type]
    for _ in range(WARM):
        call(x)
    if is_eager or device.type == "cpu":

        def loop() -> float:
            begin = time.perf_counter()
            for _ in range(calls):
                call(x)
            if device.type == "cuda":
                torch.cuda.synchronize()
            return 1e6 * (time.perf_counter() - begin) / calls

        return loop
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(torch.cuda.Stream()):
        graph.capture_begin(capture_error_mode="thread_local")
        for _ in range(calls):
            call(x)
        graph.capture_end()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def replay() -> float:
        graph.replay()  # absorbs what skew the barrier left
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return 1000 * float(start.elapsed_time(end)) / calls

    return replay


# --- both checkouts ---------------------------------------------------------------------------------------------------


@dataclass
class Side:
    """A checkout with its ranks."""

    checkout: Path
    processes: list[subprocess.Popen[str]]
    times: dict[int, list[float]] = field(default_factory=dict)

    @staticmethod
    def started(checkout: Path, options: argparse.Namespace, folder: Path) -> Side:
        path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
        own = {"PYTHONPATH": path, "COMMDSL_CACHE_DIR": str(folder), "OMP_NUM_THREADS": "1"}
        told = {name: getattr(options, name) for name in ("ranks", "device", "collective", "sizes", "eager")}
        told |= {"checkout": str(checkout), "port": _free_port()}
        return Side(
            checkout,
            [
                subprocess.Popen(
                    [sys.executable, __file__, "--rank-of", json.dumps({**told, "rank": rank})],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **own},
                    cwd=folder,
                )
                for rank in range(options.ranks)
            ],
        )

    def wait(self) -> None:
        for process in self.processes:
            self._answer(process)

    def batch(self, nbytes: int) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{nbytes}\n")
            process.stdin.flush()
        self.times.setdefault(nbytes, []).append(max(float(self._answer(process)) for process in self.processes))

    def _answer(self, process: subprocess.Popen[str]) -> Any:
        """The next line that is an answer: libraries print lines of their own."""
        out: IO[str] | None = process.stdout
        assert out is not None
        for line in out:
            try:
                return json.loads(line)
            except ValueError:
                print(line, end="", file=sys.stderr)
        raise RuntimeError(f"a rank of {self.checkout} ended with exit code {process.wait(20)}; what it said is above")

    def end(self) -> None:
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@dataclass(frozen=True)
class Line:
    """One size: medians in microseconds, and the ratios of all rounds."""

    nbytes: int
    ours: float
    theirs: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def quantile(self, share: float) -> float:
        ordered = sorted(self.ratios)
        return ordered[round(share * (len(ordered) - 1))]


def lines(ours: Side, theirs: Side) -> list[Line]:
    return [
        Line(
            nbytes,
            median(times),
            median(theirs.times[nbytes]),
            tuple(one / other for one, other in zip(times, theirs.times[nbytes], strict=True)),
        )
        for nbytes, times in ours.times.items()
    ]


def run(options: argparse.Namespace) -> list[Line]:
    with tempfile.TemporaryDirectory(prefix="commdsl-ab-") as name:
        sides = []
        try:
            for at, checkout in enumerate((HERE, options.other)):
                folder = Path(name) / str(at)
                folder.mkdir()
                sides.append(Side.started(checkout, options, folder))
                sides[-1].wait()
            order = random.Random(1)
            for _ in range(options.rounds):
                for nbytes in options.sizes:
                    for side in order.sample(sides, 2):
                        side.batch(nbytes)
            return lines(sides[0], sides[1])
        finally:
            for side in sides:
                side.end()


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    sys.path.insert(0, str(HERE))
    from benchmarks.cases import parse_sizes

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=lambda text: Path(text).resolve(), help="the root of another checkout")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--sizes", type=parse_sizes, default=parse_sizes("1K,4K,16K,64K"))
    parser.add_argument("--collective", default="all_reduce", choices=COLLECTIVES)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--eager", action="store_true", help="no graphs")
    parser.add_argument("--most", type=float, help="the largest ratio that is well")
    options = parser.parse_args(arguments)
    if not (options.other / "commdsl" / "__init__.py").is_file():
        parser.error(f"{options.other} is no checkout of commdsl")
    return options


def main() -> int:
    if sys.argv[1:2] == ["--rank-of"]:
        serve(json.loads(sys.argv[2]))
    options = options_of(sys.argv[1:])
    from benchmarks.cases import size_name
    from benchmarks.report import grid

    found = run(options)
    cells = [
        [
            size_name(line.nbytes),
            f"{line.ours:.2f}",
            f"{line.theirs:.2f}",
            f"{line.ratio:.3f}",
            f"{line.quantile(0.1):.3f}-{line.quantile(0.9):.3f}",
        ]
        for line in found
    ]
    how = f"{options.rounds} {'eager ' * options.eager}batches of {CALLS[options.device]} calls"
    print(f"{options.collective}, bfloat16, {options.ranks} ranks, {how}; this is {HERE}, the other {options.other}")
    print(grid(("size", "this us", "other us", "this/other", "p10-p90"), cells))
    return int(options.most is not None and any(line.ratio > options.most for line in found))


if __name__ == "__main__":
    sys.exit(main())
