"""Two transformer layers, tensor and sequence parallel, forward and backward: their products beside what travels, and
the same with plain collectives. One process per GPU:

    torchrun --nproc-per-node 2 benchmarks/transformer.py [--tokens 8192 2048 --save NAME]

Layers of Llama-70B's shapes of an 8-way split in bfloat16, whatever the number of ranks: between products each rank has
some tokens, within them all tokens and an eighth of heads and features. Contenders: torch's functional collectives and
products (`plain`), that under torch.compile, that with the pass of `overlap.MicroPipelineTP`, and commdsl's operators,
also under torch.compile; each of them with both passes in a CUDA graph, too. A compiler has the loss, too.
Microseconds of a forward and a backward pass, medians of the slowest rank, all contenders taking turns. Loss and
gradients are held against those of `plain` first. Exit code 1: they differ, or a contender of ours failed. The table
comes last, whatever happened; `*` marks a figure that is missed.

`--dry-run` does all but time, on processors, with all sizes divided by `--scale`:

    torchrun --nproc-per-node 2 benchmarks/transformer.py --dry-run --tokens 16 --scale 64 --only plain commdsl
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import record, transformer_report
from benchmarks.contests import Contests
from benchmarks.report import NO_TIME, Kind, Result, number
from benchmarks.transformer_report import CAPTURED, CONTENDERS, PLAIN, Case, Row

GRACE = 30.0
"""Seconds after the time budget at which a run that hangs prints what it has and ends."""

LAYERS = 2


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, default=(8192,), help="of all ranks")
    add("--scale", type=int, default=1, help="by what the sizes of a layer are divided")
    add("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), help="beside plain")
    add("--batches", type=int, default=9, help="timed batches a contender")
    add("--time-budget", type=float, default=60.0, help="seconds after which no row is begun")
    add("--dry-run", action="store_true", help="on processors: checks, and times nothing")
    record.add_options(parser)
    found = parser.parse_args(arguments)
    record.check_options(parser, found)
    found.only = [name for name in CONTENDERS if name in (PLAIN, *found.only)]
    return found


class Output(Contests):
    def label(self, row: Row) -> str:
        return f"{row.case.tokens} tokens"

    def verdict(self) -> str:
        if self.options.dry_run:
            return f"a dry run: {super().verdict()}, nothing timed"
        return f"{sum(row.is_missed for row in self.rows)} of {len(self.rows)} rows miss the figure"


def run(options: argparse.Namespace, output: Output) -> int:
    """The exit code."""
    import torch

    from benchmarks.measure import started
    from benchmarks.transformer_model import Sizes

    bench = started(options.time_budget, options.batches, on_gpus=not options.dry_run)
    what = "processors" if options.dry_run else torch.cuda.get_device_name()
    output.title = f"{bench.ranks} x {what}, torch {torch.__version__}; microseconds of {LAYERS} layers there and back"
    sizes = Sizes(options.scale, LAYERS)
    for tokens in options.tokens:
        _measured(bench, options.only, Case(tokens, LAYERS, bench.ranks, sizes.hidden), sizes, output)
    output.is_whole = True
    return int(any(bench.everyone(output.failed)))


def _measured(bench: Any, names: Sequence[str], case: Case, sizes: Any, output: Output) -> None:
    from benchmarks.transformer_model import Stage
    from benchmarks.turns import timed

    row = Row(case)
    output.rows.append(row)
    if bench.time_is_up():
        row.results = [Result(name, CONTENDERS[name], None, NO_TIME) for name in names]
        return
    stage = Stage(bench, case, sizes)
    makers: list[tuple[str, Kind, Callable[[], Any]]] = [
        (name, CONTENDERS[name], lambda name=name: stage.made(name)) for name in names
    ]
    row.results += timed(bench, case, makers, eager=[name for name in names if name not in CAPTURED])
    output.notes += stage.notes
    if bench.rank == 0:
        left = f"{bench.deadline - time.monotonic():.0f} s left"
        print(f"{case.tokens} tokens: {number(row.gain(), 2)} times faster ({left})", flush=True)


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "20")
    options = options_of(sys.argv[1:])
    output = Output(options, transformer_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
