"""Dispatches of queries, keys and values beside NCCL on sorted rows and the links' limit, on the same GPUs:

    torchrun --nproc-per-node 4 benchmarks/dispatch.py [--save NAME --markdown]
    torchrun --nproc-per-node 4 benchmarks/dispatch.py --rows 8K,64K --shards 128 --documents 4 --only "rows kv"

bfloat16, hidden 4096 for queries and 1024 for keys and values; there (dispatch) and back (its reverse). All in CUDA
graphs of as many calls. Every result is checked before it is timed. Exit code 1: a wrong result, or a call of ours that
failed. The table comes last, whatever happened; `*` marks a figure that is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.cases import parse_sizes
from benchmarks.dispatch_plans import ROWS, SHARDS, Case
from benchmarks.dispatch_report import (
    APART,
    LEAST_OF_LIMIT,
    MOST_OF_NCCL,
    OURS,
    SMALL_US,
    TOGETHER,
    Row,
    Way,
    overview,
    text_of,
)
from benchmarks.ending import Ending
from benchmarks.report import NO_TIME, Kind, Result, grid, markdown, number

GRACE = 45.0
"""Seconds after the time budget at which a run that hangs prints what it has and ends."""

HOST_COLUMNS = ("call", "slowest_rank_us")
HOST_ROWS, HOST_CALLS, HOST_ROUNDS = 64, 100, 30


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=parse_sizes, default=ROWS, help="of a rank, such as 1K,64K; default: 1K to 64K")
    add("--shards", type=parse_sizes, default=tuple(sorted(SHARDS)), help="rows of a shard; default: 1,128")
    add("--documents", type=int, default=1, help="shards of a document: so often its first keys travel")
    add("--only", nargs="+", choices=OURS, default=OURS, help="of ours")
    add("--no-peers", action="store_true", help="without NCCL")
    add("--batches", type=int, default=30, help="timed batches a contender")
    add("--time-budget", type=float, default=360.0, help="seconds; what does not fit is said")
    record.add_options(parser)
    add("--markdown", action="store_true", help="print the table as for benchmarks/README.md")
    found = parser.parse_args(arguments)
    record.check_options(parser, found)
    return found


class Output(Ending):
    """With what the host spends on a call."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.host: list[list[object]] = []

    def say(self) -> None:
        table = overview(self.rows, self.options.only, () if self.options.no_peers else (APART, TOGETHER))
        print(f"\n{self.title}\n{(markdown if self.options.markdown else grid)(*table)}")
        for row in self.rows:
            for result in row.results:
                if result.status != "ok":
                    print(
                        f"{row.way}, {row.case.rows} rows in shards of {row.case.shard}: {result.name}: {result.status}"
                    )
        print("\n".join([*self.notes, self.verdict()]), flush=True)
        if self.options.save and self.is_whole:
            record.save(self.options, text_of(self.rows))
            if self.host:
                record.save_lines(self.options, HOST_COLUMNS, self.host, "_host")

    def verdict(self) -> str:
        missed = sum(bool(row.misses()) for row in self.rows)
        return (
            f"{missed} of {len(self.rows)} rows miss a figure: at most {MOST_OF_NCCL} of NCCL's time, at least "
            f"{LEAST_OF_LIMIT} of the limit's rate from 8K rows, 1K rows in under {SMALL_US:.0f} us"
        )

    @property
    def failed(self) -> bool:
        """A wrong result of anyone's, or no result of ours."""
        results = [result for row in self.rows for result in row.results if result.status != NO_TIME]
        return any(result.is_wrong or (result.kind is Kind.OURS and result.timing is None) for result in results)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, output: Output) -> int:
    """The exit code."""
    import torch

    from benchmarks.measure import started
    from benchmarks.rows import limits_of

    bench = started(options.time_budget, options.batches)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    gpu = torch.cuda.get_device_name()
    output.title = f"bfloat16, {bench.ranks} x {gpu}, torch {torch.__version__}, NCCL {nccl}; microseconds"
    cases = [Case(rows, shard, bench.ranks, options.documents) for shard in options.shards for rows in options.rows]
    limits = limits_of(bench, cases)
    for case in cases:
        _measured(bench, options, case, limits, output)
    if options.documents == 1:  # what the host does is the same for longer documents
        _host(bench, options, output)
    output.is_whole = True
    return int(any(bench.everyone(output.failed)))


def _senders(bench: Any, options: argparse.Namespace, case: Case) -> dict[str, Any]:
    """One a way of putting and a form of the rows."""
    from benchmarks import dispatch_calls as calls

    made: dict[str, Any] = {}
    for name in options.only:
        made[name], problem = bench.attempt(lambda name=name: calls.sender(bench, case, name))
        if problem:
            raise RuntimeError(f"no dispatcher `{name}` for {case.rows} rows: {problem}")
    return made


def _release(senders: dict[str, Any]) -> None:
    import torch

    for sender in senders.values():
        sender.release()
    torch.cuda.empty_cache()


def _measured(bench: Any, options: argparse.Namespace, case: Case, limits: Any, output: Output) -> None:
    from benchmarks import dispatch_calls as calls
    from benchmarks.turns import timed

    is_late = bench.time_is_up()
    stage, problem = (None, "") if is_late else bench.attempt(lambda: calls.prepared(bench, case))
    senders = _senders(bench, options, case) if stage else {}
    for way in Way:
        row = Row(case, way)
        output.rows.append(row)
        if stage is None:
            row.results = [Result(name, Kind.OURS, None, problem or NO_TIME) for name in options.only]
            continue
        row.results += timed(bench, case, _entries(options, stage, senders, way))
        if limits is not None:
            row.results += limits.of(case)
        if bench.rank == 0:
            left = bench.deadline - time.monotonic()
            best = row.best(Kind.OURS)
            what = f"{best.name} {best.timing}" if best else "nothing of ours"
            print(f"{way}, {case.rows} rows in shards of {case.shard}: {what} ({left:.0f} s left)", flush=True)
    _release(senders)


def _entries(
    options: argparse.Namespace, stage: Any, senders: dict[str, Any], way: Way
) -> list[tuple[str, Kind, Callable[[], Any]]]:
    from benchmarks import dispatch_calls as calls

    found: list[tuple[str, Kind, Callable[[], Any]]] = [
        (name, Kind.OURS, lambda name=name: calls.ours(stage, senders[name], name, way)) for name in options.only
    ]
    if not options.no_peers:
        found.append((APART, Kind.PEER, lambda: calls.nccl_apart(stage, way)))
        found.append((TOGETHER, Kind.PEER, lambda: calls.nccl_together(stage, way)))
    return found


def _host(bench: Any, options: argparse.Namespace, output: Output) -> None:
    """How long the host is held by an eager call of few rows, the GPU not waited for."""
    from benchmarks import dispatch_calls as calls

    case = Case(HOST_ROWS, 1, bench.ranks)
    stage, senders = calls.prepared(bench, case), _senders(bench, options, case)
    made = {name: calls.ours(stage, sender, name, Way.THERE)[0] for name, sender in senders.items()}
    apart, together = calls.nccl_apart(stage, Way.THERE)[0], calls.nccl_together(stage, Way.THERE)[0]
    contenders = [*made.values(), apart, together]
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(HOST_ROUNDS):
        for contender in contenders:
            bench.barrier()
            begin = time.perf_counter()
            for index in range(HOST_CALLS):
                contender.call(index)
            times[contender.name].append(1e6 * (time.perf_counter() - begin) / HOST_CALLS)
    slowest = {name: max(bench.everyone(median(found))) for name, found in times.items()}
    output.host = [[name, f"{value:.4g}"] for name, value in slowest.items()]
    parts = ", ".join(f"{name} {number(value)}" for name, value in slowest.items())
    output.notes.append(f"CPU microseconds of an eager call, {HOST_ROWS} rows, median on the slowest rank: {parts}")


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "20")
    options = options_of(sys.argv[1:])
    output = Output(options)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
