"""The collectives beside NCCL, PyTorch symmetric memory and the link's limit, in one run on the same GPUs:

    torchrun --nproc-per-node 4 benchmarks/collectives.py [--save NAME --plot t.png --markdown]
    torchrun --nproc-per-node 4 benchmarks/collectives.py --collectives all_reduce --sizes 64K,1M --no-peers \
        --candidates allreduce_oneshot:packet:4,8,16:512 allreduce_twoshot:bulk:128:256:65536,131072
    torchrun --nproc-per-node 4 benchmarks/collectives.py --sms 4,8,16,32,64
    torchrun --nproc-per-node 4 benchmarks/collectives.py --collectives all_reduce --sizes 1K --calls 6,12,24,48,96
    torchrun --nproc-per-node 4 benchmarks/collectives.py --host

bfloat16, in CUDA graphs of as many calls for every contender and size; sizes are bytes of the larger side on one rank.
Every result is checked before it is timed. Exit code 1: a wrong result, or a call of ours that failed. The tables come
last, whatever happened.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record
from benchmarks.cases import (
    CALLS,
    SIZES,
    Collective,
    parse_candidates,
    parse_collectives,
    parse_counts,
    parse_size,
    parse_sizes,
)
from benchmarks.ending import Ending
from benchmarks.report import (
    Kind,
    by_collective,
    faults,
    grid,
    markdown,
    matrix,
    overview,
    plot,
    text_of,
)

HOST_COLUMNS = ("call", "median_us", "p10_us", "p90_us", "slowest_rank_us")

GRACE = 45.0
"""Seconds after the time budget at which a run that hangs prints what it has and ends."""


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--collectives", type=parse_collectives, default=tuple(Collective), help="names by commas; default: all five")
    add("--sizes", type=parse_sizes, default=SIZES, help="such as 1K,64K,4M; default: 1K to 1G in powers of four")
    add(
        "--candidates",
        nargs="+",
        default=[],
        metavar="SCHEDULE[@PARAM=N]:protocol:lanes:threads:tile:sms",
        help="measured in place of the tables' choice; commas in a field: one candidate each; an empty field: its own",
    )
    add("--chosen", action="store_true", help="with --candidates: measure the tables' choice, too")
    add("--no-peers", action="store_true", help="neither NCCL nor symmetric memory")
    add("--no-windows", action="store_true", help="without NCCL on registered windows")
    add("--no-limit", action="store_true", help="without the link's limit")
    add("--calls", type=parse_counts, default=(CALLS,), help=f"of a graph; several: a row each; default: {CALLS}")
    add("--batches", type=int, default=30, help="timed batches a contender, fewer of what takes many milliseconds")
    add("--time-budget", type=float, default=330.0, help="seconds; what does not fit is said")
    add(
        "--sms",
        type=parse_counts,
        default=(),
        help="bandwidth of all_reduce and all_gather on so many SMs, such as 4,8,16,32,64",
    )
    add("--sms-size", type=parse_size, default=256 << 20)
    add("--host", action="store_true", help="CPU time of an eager call")
    record.add_options(parser)
    add("--plot", type=Path, help="a .png or .svg")
    add("--markdown", action="store_true", help="print the table as for benchmarks/README.md")
    found = parser.parse_args(arguments)
    try:
        found.candidates = parse_candidates(found.candidates)
    except ValueError as error:
        parser.error(str(error))
    record.check_options(parser, found)
    if found.sms and found.collectives == tuple(Collective):
        found.collectives = (Collective.ALL_REDUCE, Collective.ALL_GATHER)
    return found


# --- output -----------------------------------------------------------------------------------------------------------


class Output(Ending):
    """With what the host spends on a call."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        self.host: list[list[object]] = []

    def say(self) -> None:
        rows = [row for row in self.rows if row.results]
        if self.options.plot and rows:
            plot(self.options.plot, rows, self.title)
        print(f"\n{self.title}")
        print("\n".join(self.notes))
        if self.options.candidates or self.options.sms:
            for collective, found in by_collective(rows).items():
                print(f"\n{collective}\n{grid(*matrix(found))}")
        if rows:
            print(f"\n{(markdown if self.options.markdown else grid)(*overview(rows))}")
        print("\n".join(["", *faults(rows)]), flush=True)
        if self.options.save and self.is_whole:
            if self.host:
                record.save_lines(self.options, HOST_COLUMNS, self.host)
            else:
                record.save(self.options, text_of(rows))

    @property
    def failed(self) -> bool:
        """A wrong result of anyone's, or no result of ours; a candidate that is refused is no failure."""
        results = [result for row in self.rows for result in row.results]
        return any(result.is_wrong or (result.kind is Kind.OURS and result.is_failure) for result in results)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, output: Output) -> int:
    """The exit code."""
    import torch

    from benchmarks import modes
    from benchmarks.measure import started

    bench = started(options.time_budget, options.batches)
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    gpu = torch.cuda.get_device_name()
    calls = " or ".join(map(str, options.calls))
    output.title = f"bfloat16, {bench.ranks} x {gpu}, torch {torch.__version__}, NCCL {nccl}, {calls} calls a graph"
    if options.host:
        output.host, found = modes.host(bench)
        output.notes += found
    elif options.sms:
        modes.sms(bench, options, output.rows, output.notes)
    else:
        modes.collectives(bench, options, output.rows)
    output.is_whole = True
    return int(any(bench.everyone(output.failed)))


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "20")
    options = options_of(sys.argv[1:])
    output = Output(options)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
