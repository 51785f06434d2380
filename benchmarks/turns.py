"""Turns contenders that know whether their results are wrong into Results: each made, checked, captured, checked again,
and timed in turns with all the others.

Assumes that a contender that fails does so on all ranks, or that all ranks may drop it. Does not choose contenders, and
on processors does not time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from benchmarks.measure import CHECKED_CALLS, Batched, Bench, Contender, Ready, measure, ready, rounds_for
from benchmarks.report import Kind, Result
from benchmarks.values import bytes_of

Made = tuple[Contender, Callable[[], torch.Tensor]]
"""A contender, and whether its last result is wrong, on the device."""

Entry = tuple[str, Kind, Callable[[], Made]]


@dataclass
class Eager:
    """A contender whose calls are made one by one: what a graph cannot capture."""

    contender: Contender
    calls: int
    times: list[float] = field(default_factory=list)
    last: Any = None

    def run(self) -> None:
        for index in range(self.calls):
            self.contender.call(index)

    def release(self) -> None:
        self.contender.release()


Batch = Ready | Eager


def kept(
    name: str, kind: Kind, call: Callable[[], Any], is_wrong: Callable[..., torch.Tensor], **given: Callable[[], None]
) -> Made:
    """A contender that keeps its last result, one tensor or several, of which `is_wrong` is asked, and lets it go
    before the next call, as training does with gradients: each has its memory where the last one did. `given`: to it.
    """
    last: list[torch.Tensor] = []

    def called(_: int) -> torch.Tensor:
        last.clear()
        found = call()
        last[:] = [found] if isinstance(found, torch.Tensor) else found
        return last[0]

    return Contender(name, kind, called, release=last.clear, **given), lambda: is_wrong(*last)


def timed(bench: Bench, case: Batched, entries: Sequence[Entry], eager: Collection[str] = ()) -> list[Result]:
    """One for each entry, in their order. `eager`: those that no graph can capture."""
    results: list[Result] = []
    batches: list[Batch] = []
    for name, kind, make in entries:
        batch, problem = _set_up(bench, case, make, is_eager=name in eager or bench.device.type == "cpu")
        if batch is not None:
            batches.append(batch)
        status = problem if batch is None or problem.startswith("wrong") else "ok"
        results.append(Result(name, kind, None, status))
    is_timed = bench.device.type == "cuda"
    timings = measure(bench, case, batches, rounds_for(case, bench.batches)) if batches and is_timed else []
    by_name = {batch.contender.name: timing for batch, timing in zip(batches, timings, strict=False)}
    for batch in batches:
        batch.release()
    return [replace(result, timing=by_name.get(result.name)) for result in results]


def _set_up(bench: Bench, case: Batched, make: Callable[[], Made], *, is_eager: bool) -> tuple[Batch | None, str]:
    """A contender ready to be timed, with what is wrong about its results; None with why it cannot run."""
    made, problem = bench.attempt(make)
    if made is None:
        return None, _failed(problem)
    contender, is_wrong = made

    def called() -> bool:
        for index in range(CHECKED_CALLS):
            contender.call(index)
        return bool(is_wrong().item())

    found, problem = bench.attempt(called)
    if problem:
        return None, _failed(problem)
    verdict = _verdict(bench, found, "eagerly")
    if is_eager:
        return Eager(contender, case.calls), verdict
    batch, problem = bench.attempt(lambda: ready(contender, case))
    if batch is None:
        return None, _failed(problem)
    if batch.last is not None and not verdict:
        bytes_of(batch.last).fill_(255)
        batch.run()
        found, problem = bench.attempt(lambda: bool(is_wrong().item()))
        if problem:
            return None, _failed(problem)
        verdict = _verdict(bench, found, "in a graph")
    return batch, verdict


def _failed(problem: str) -> str:
    return f"failed: {' '.join(problem.split())}"


def _verdict(bench: Bench, found: bool | None, where: str) -> str:
    bad = [str(rank) for rank, one in enumerate(bench.everyone(found)) if one]
    return f"wrong {where} on ranks {', '.join(bad)}" if bad else ""
