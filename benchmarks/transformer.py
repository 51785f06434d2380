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
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import transformer_report
from benchmarks.contests import Contests, parsed, parser_of
from benchmarks.report import number
from benchmarks.transformer_report import CAPTURED, CONTENDERS, PLAIN, Case, Row

GRACE = 30.0
"""Seconds after the time budget at which a run that hangs prints what it has and ends."""

LAYERS = 2


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__, batches=9, seconds=60.0)
    add = parser.add_argument
    add("--tokens", nargs="+", type=int, default=(8192,), help="of all ranks")
    add("--scale", type=int, default=1, help="by what the sizes of a layer are divided")
    add("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), help="beside plain")
    found = parsed(parser, arguments)
    found.only = [name for name in CONTENDERS if name in (PLAIN, *found.only)]
    return found


class Output(Contests):
    def label(self, row: Row) -> str:
        return f"{row.case.tokens} tokens"

    def line_of(self, row: Row) -> str:
        return f"{self.label(row)}: {number(row.gain(), 2)} times faster"

    def verdict(self) -> str:
        if self.options.dry_run:
            return f"a dry run: {super().verdict()}, nothing timed"
        return f"{sum(row.is_missed for row in self.rows)} of {len(self.rows)} rows miss the figure"


def run(options: argparse.Namespace, output: Output) -> int:
    """The exit code."""
    from benchmarks.transformer_model import Sizes, Stage

    bench = output.begin()
    output.title += f" of {LAYERS} layers there and back"
    sizes = Sizes(options.scale, LAYERS)
    kinds = {name: CONTENDERS[name] for name in options.only}
    for tokens in options.tokens:
        case = Case(tokens, LAYERS, bench.ranks, sizes.hidden)
        stage = Stage(bench, case, sizes, output.notes)
        output.contest(bench, Row(case), kinds, stage.made, eager=[name for name in kinds if name not in CAPTURED])
    return output.exit_code(bench)


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "20")
    options = options_of(sys.argv[1:])
    output = Output(options, transformer_report)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
