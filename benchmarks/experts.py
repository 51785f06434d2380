"""Tokens to the ranks of their experts and back, beside all_to_all_single on sorted rows, DeepEP where it is installed,
and the links' limit, on the same GPUs:

    torchrun --nproc-per-node 4 benchmarks/experts.py [--save NAME --markdown]
    torchrun --nproc-per-node 2 benchmarks/experts.py --tokens 128 --forms fp8 --only commdsl

4096 and 128 tokens a rank, hidden 7168, each to 8 of 32 experts a rank; there in bfloat16 and in float8 with a scale
for each 128, back in bfloat16, weighed. From tokens to rows sorted by expert, and the reverse. Ours counts tokens and
exchanges the counts in every call, of few tokens also in two launches, and where `nodes` stands once per node, between
two halves of the ranks; all_to_all_single is given what it needs to know. All in CUDA graphs of as many calls but
DeepEP's full call, which reads on the host. Every result is checked before it is timed. Exit code 1: a wrong result, or
a call of ours that failed. The table comes last, whatever happened; `*` marks a figure that is missed.

`--dry-run` does all but time, on processors, without what needs a GPU:

    torchrun --nproc-per-node 2 benchmarks/experts.py --dry-run --tokens 16 --hidden 64
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

from benchmarks import record
from benchmarks.cases import parse_sizes
from benchmarks.ending import Ending
from benchmarks.experts_report import (
    DEEPEP,
    EXPERTS_A_RANK,
    FEW_TOKENS,
    HALVES,
    HIDDEN,
    LEAST_OF_LIMIT,
    MOST_OF_DEEPEP,
    NCCL,
    NODES,
    PEERS,
    TOKENS,
    TOPK,
    Case,
    Form,
    Row,
    Way,
    overview,
    text_of,
)
from benchmarks.report import NO_TIME, Kind, Result, grid, markdown

OURS = ("commdsl", "16 SMs", "once", "once, 16 SMs", "index", "index, 16 SMs", HALVES, NODES)
GRACE = 45.0
"""Seconds after the time budget at which a run that hangs prints what it has and ends."""


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tokens", type=parse_sizes, default=TOKENS, help="of a rank, such as 4K,128")
    add("--hidden", type=int, default=HIDDEN)
    add("--topk", type=int, default=TOPK)
    add("--experts", type=int, default=EXPERTS_A_RANK, help="of a rank")
    add("--forms", nargs="+", type=Form, choices=list(Form), default=list(Form), help="of tokens on their way there")
    add("--only", nargs="+", choices=OURS, default=OURS, help="of ours")
    add("--no-peers", action="store_true", help="without all_to_all_single and DeepEP")
    add("--batches", type=int, default=30, help="timed batches a contender")
    add("--time-budget", type=float, default=300.0, help="seconds; what does not fit is said")
    add("--dry-run", action="store_true", help="on processors: checks, and times nothing")
    record.add_options(parser)
    add("--markdown", action="store_true", help="print the table as for benchmarks/README.md")
    found = parser.parse_args(arguments)
    record.check_options(parser, found)
    return found


class Output(Ending):
    def say(self) -> None:
        table = overview(self.rows, self.options.only)
        print(f"\n{self.title}\n{(markdown if self.options.markdown else grid)(*table)}")
        for row in self.rows:
            for result in row.results:
                if result.status != "ok":
                    print(f"{row.case.way}, {row.case.tokens} tokens, {row.case.form}: {result.name}: {result.status}")
        print("\n".join([*self.notes, self.verdict()]), flush=True)
        if self.options.save and self.is_whole and not self.options.dry_run:
            record.save(self.options, text_of(self.rows))

    def verdict(self) -> str:
        if self.options.dry_run:
            checked = sum(result.status == "ok" for row in self.rows for result in row.results)
            return f"a dry run: {checked} contenders right, nothing timed"
        missed = sum(bool(row.misses()) for row in self.rows)
        return (
            f"{missed} of {len(self.rows)} rows miss a figure: at least {LEAST_OF_LIMIT} of the limit's rate, at most "
            f"{MOST_OF_DEEPEP} of DeepEP's full call, faster than all the others, 128 tokens in their microseconds"
        )

    @property
    def failed(self) -> bool:
        """A wrong result of anyone's, or no result of ours."""
        results = [result for row in self.rows for result in row.results if result.status != NO_TIME]
        is_dry = self.options.dry_run
        return any(
            result.is_wrong or (result.kind is Kind.OURS and (result.timing is None and not is_dry))
            for result in results
        ) or any(is_dry and result.kind is Kind.OURS and result.status != "ok" for result in results)


# --- the run ----------------------------------------------------------------------------------------------------------


def run(options: argparse.Namespace, output: Output) -> int:
    """The exit code."""
    import torch

    from benchmarks.measure import started
    from benchmarks.rows import limits_of

    bench = started(options.time_budget, options.batches, on_gpus=not options.dry_run)
    what = "processors" if options.dry_run else torch.cuda.get_device_name()
    output.title = f"{bench.ranks} x {what}, torch {torch.__version__}; microseconds"
    limits = None if options.dry_run else limits_of(bench, cases_of(options, bench.ranks))
    for case in cases_of(options, bench.ranks):
        _measured(bench, options, case, limits, output)
    output.is_whole = True
    return int(any(bench.everyone(output.failed)))


def cases_of(options: argparse.Namespace, ranks: int) -> list[Case]:
    """There in every form, and back once."""
    return [
        Case(tokens, ranks, form, options.hidden, options.topk, options.experts, way)
        for tokens in options.tokens
        for way, forms in ((Way.THERE, options.forms), (Way.BACK, [Form.BF16]))
        for form in forms
    ]


def _measured(bench: Any, options: argparse.Namespace, case: Case, limits: Any, output: Output) -> None:
    from benchmarks import experts_calls as calls
    from benchmarks.turns import timed

    row = Row(case)
    output.rows.append(row)
    ours = [name for name in options.only if name != HALVES or case.tokens <= FEW_TOKENS]
    ours = [name for name in ours if name != NODES or bench.ranks % 2 == 0]
    if bench.time_is_up():
        row.results = [Result(name, Kind.OURS, None, NO_TIME) for name in ours]
        return
    stage = calls.Stage(bench, case)
    entries: list[tuple[str, Kind, Callable[[], Any]]] = [
        (name, Kind.OURS, lambda name=name: calls.ours(stage, name)) for name in ours
    ]
    if not options.no_peers:
        wanted = (NCCL,) if options.dry_run else PEERS
        entries += [(name, Kind.PEER, lambda name=name: calls.peer(stage, name)) for name in wanted]
    row.results += timed(bench, case, entries, eager=(DEEPEP,))
    if limits is not None:
        row.results += limits.of(case)
    if bench.rank == 0:
        best = row.best(Kind.OURS)
        what = f"{best.name} {best.timing}" if best else "nothing of ours timed"
        left = bench.deadline - time.monotonic()
        print(f"{case.way}, {case.tokens} tokens, {case.form}: {what} ({left:.0f} s left)", flush=True)


def main() -> None:
    os.environ.setdefault("COMMDSL_TIMEOUT", "20")
    os.environ.setdefault("NVSHMEM_SYMMETRIC_SIZE", "16G")
    options = options_of(sys.argv[1:])
    output = Output(options)
    output.end(lambda: run(options, output), GRACE)


if __name__ == "__main__":
    main()
