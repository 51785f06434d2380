"""Turns one case and its contenders into a Row: each set up, checked, then timed in turns with all the others.

Assumes that a contender that fails does so on all ranks, or that all ranks may drop it. Does not choose contenders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

import commdsl
from benchmarks.cases import Case, Collective
from benchmarks.link import Link
from benchmarks.measure import (
    Batched,
    Bench,
    Contender,
    Ready,
    check,
    check_graph,
    float_bits,
    measure,
    ready,
    rounds_for,
)
from benchmarks.peers import Arena
from benchmarks.report import Kind, Result, Row, Timing

MIN_LIMIT_ROUNDS = 5
REFUSALS = ("CommError", "DeviceError", "FileNotFoundError")
BREAKING = ("CommTimeout", "BrokenGroupError", "RendezvousError", "PeerError", "AgreementError")


@dataclass(frozen=True)
class Entry:
    """A contender to be: `make` is called with the input, on all ranks. `problem`: why there cannot be one."""

    name: str
    kind: Kind
    make: Callable[[torch.Tensor], Contender]
    problem: str = ""


@dataclass
class Limits:
    """The link's limit, measured once for each number of bytes to be sent."""

    bench: Bench
    link: Link
    known: dict[tuple[int, int], list[Result]] = field(default_factory=dict)

    def of(self, case: Batched) -> list[Result]:
        key = (case.sent_bytes, case.calls)
        if key not in self.known:
            contenders = self.link.contenders(case.sent_bytes)
            for contender in contenders:
                contender.call(0)  # loaded before it is captured
            batches = [ready(contender, case) for contender in contenders]
            rounds = max(MIN_LIMIT_ROUNDS, rounds_for(case, self.bench.batches) // 3)
            timings = measure(self.bench, case, batches, rounds)
            self.known[key] = [_result(batch, timing) for batch, timing in zip(batches, timings, strict=True)]
            for batch in batches:
                batch.release()
        return self.known[key]


def limits_of(bench: Bench, cases: Sequence[Batched]) -> Limits | None:
    """Those of cases of rows; None, and rank 0 says why, where the link cannot be measured."""
    most = max(case.sent_bytes for case in cases) + 16 * bench.ranks
    found, problem = bench.attempt(lambda: Limits(bench, Link(bench, Arena(bench, most))))
    if found is None and bench.rank == 0:
        print(f"without the limit: {problem}", flush=True)
    return found


def _result(batch: Ready, timing: Timing) -> Result:
    return Result(batch.contender.name, batch.contender.kind, timing, detail=batch.contender.detail)


def measured(bench: Bench, case: Case, entries: Sequence[Entry], limits: Limits | None, dtype: torch.dtype) -> Row:
    """The row of a case. A wrong result is timed all the same, and shown as wrong."""
    row = Row(case)
    x = torch.empty(case.num_in, dtype=dtype, device=bench.device)
    batches: list[Ready] = []
    status: list[str] = []
    for entry in entries:
        batch, problem = set_up(bench, case, entry, x)
        if batch is None:
            row.results.append(Result(entry.name, entry.kind, None, problem))
            continue
        batches.append(batch)
        status.append(problem or "ok")
    if limits is not None:
        row.results += limits.of(case)
    timings = measure(bench, case, batches, rounds_for(case, bench.batches)) if batches else []
    for batch, timing, verdict in zip(batches, timings, status, strict=True):
        made = batch.contender
        row.results.append(Result(made.name, made.kind, timing, verdict, made.detail))
        batch.release()
    return row


def set_up(bench: Bench, case: Case, entry: Entry, x: torch.Tensor) -> tuple[Ready | None, str]:
    """A contender ready to be timed, with what is wrong about its results; None with why it cannot run."""
    if entry.problem:
        return None, entry.problem
    contender, problem = bench.attempt(lambda: entry.make(x))
    if contender is None:
        return None, _after(bench, problem)
    batch, said = _checked(bench, case, contender, x)
    if batch is None:
        bench.attempt(contender.release)
        return None, _after(bench, said)
    return batch, said


def _checked(bench: Bench, case: Case, contender: Contender, x: torch.Tensor) -> tuple[Ready | None, str]:
    wrong, problem = bench.attempt(lambda: check(bench, case, contender, x))
    if problem:
        return None, problem
    verdict = _verdict(bench, wrong or 0, "in eager calls")
    if contender.kind is Kind.OURS and case.collective is Collective.ALL_REDUCE:
        bits, problem = bench.attempt(lambda: float_bits(bench, contender, x))
        if problem:
            return None, problem
        different = len({tuple(found or ()) for found in bench.everyone(bits)})
        verdict = verdict or (f"wrong: random floats give {different} different results" if different > 1 else "")
    batch, problem = bench.attempt(lambda: ready(contender, case))
    if batch is None:
        return None, problem
    if contender.kind is Kind.OURS:
        bench.barrier()
        wrong, problem = bench.attempt(lambda: check_graph(bench, case, batch, x))
        if problem:
            return None, problem
        verdict = verdict or _verdict(bench, wrong or 0, "in a graph")
    return batch, verdict


def _verdict(bench: Bench, wrong: int, where: str) -> str:
    counts = bench.everyone(wrong)
    bad = [f"{count} on rank {rank}" for rank, count in enumerate(counts) if count]
    return f"wrong {where}: {', '.join(bad)}" if bad else ""


def _after(bench: Bench, problem: str) -> str:
    """The status of what failed; a group that a time-out broke is brought back, so that the others still run."""
    if any(name in problem for name in BREAKING):
        _, failed = bench.attempt(lambda: commdsl.reset(bench.group))
        problem += f"; the reset failed, too: {failed}" if failed else ""
    return status_of(problem)


def status_of(problem: str) -> str:
    """One line; "refused" is what commdsl says of a candidate that cannot be, before anything runs."""
    if not problem:
        return ""
    kind = "refused" if any(f" {name}: " in problem for name in REFUSALS) else "failed"
    return f"{kind}: {' '.join(problem.split())}"
