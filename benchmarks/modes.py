"""Turns options into what is run: the collectives beside their peers, bandwidth over SMs, the CPU time of a call.

Assumes an initialised process group. Rows are handed over as they come, so that a run that is cut short shows what it
has. Does not print tables.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist

import commdsl
from benchmarks import host as host_time
from benchmarks import ours, peers
from benchmarks.cases import Candidate, Case, Collective, on_sms, size_name
from benchmarks.link import Link, arena_bytes
from benchmarks.measure import Bench, captured
from benchmarks.peers import Arena
from benchmarks.report import CHOSEN, NCCL, NCCL_WINDOW, NO_TIME, ONE_SHOT, TWO_SHOT, Kind, Result, Row, number
from benchmarks.rows import Entry, Limits, measured, status_of

DTYPE = torch.bfloat16
HOST_NUMEL = 512
HOST_CALLS = 100


class Peers:
    """What is measured beside ours; symmetric memory is made once, for the largest case."""

    def __init__(self, bench: Bench, options: argparse.Namespace, cases: Sequence[Case]) -> None:
        self._bench = bench
        self._options = options
        self.arena: Arena | None = None
        self.problem = ""
        needs_arena = not options.no_limit or (not options.no_peers and Collective.ALL_REDUCE in options.collectives)
        if needs_arena:
            self.arena, self.problem = bench.attempt(lambda: Arena(bench, arena_bytes(cases)))
        self.limits: Limits | None = None
        if self.arena is not None and not options.no_limit:
            arena = self.arena
            link, problem = bench.attempt(lambda: Link(bench, arena))
            self.limits = Limits(bench, link) if link else None
            self.problem = self.problem or problem

    def entries(self, case: Case) -> list[Entry]:
        if self._options.no_peers:
            return []
        bench, arena = self._bench, self.arena
        found = [Entry(NCCL, Kind.PEER, lambda x: peers.nccl(bench, case, x))]
        if not self._options.no_windows:
            found.append(Entry(NCCL_WINDOW, Kind.PEER, lambda x: peers.nccl_window(bench, case, x)))
        if case.collective is Collective.ALL_REDUCE:
            if arena is None:
                return [
                    *found,
                    Entry(ONE_SHOT, Kind.PEER, lambda x: peers.nccl(bench, case, x), f"failed: {self.problem}"),
                ]
            if case.nbytes <= peers.ONE_SHOT_UP_TO:
                found.append(Entry(ONE_SHOT, Kind.PEER, lambda x: peers.one_shot(bench, case, x, arena)))
            found.append(Entry(TWO_SHOT, Kind.PEER, lambda x: peers.two_shot(bench, case, x, arena)))
        return found


def collectives(bench: Bench, options: argparse.Namespace, rows: list[Row]) -> None:
    """Every collective at every size: our choice or the candidates, the peers, the limit."""
    cases = [
        Case(name, nbytes, bench.ranks, calls=calls)
        for name in options.collectives
        for nbytes in options.sizes
        for calls in options.calls
    ]
    ahead = ours.build_ahead(bench, cases if options.chosen or not options.candidates else ())
    beside = Peers(bench, options, cases)
    if bench.rank == 0 and beside.problem:
        print(f"without symmetric memory of torch's or without the limit: {beside.problem}", flush=True)
    for collective in options.collectives:
        candidates = [candidate for candidate in options.candidates if candidate.collective is collective]
        if options.candidates and not candidates and not options.chosen:
            continue
        loaded = ours.load(bench, candidates)
        _sizes(bench, options, rows, beside, [case for case in cases if case.collective is collective], loaded)
        _release(bench, loaded)
    ahead.close()


def _sizes(
    bench: Bench,
    options: argparse.Namespace,
    rows: list[Row],
    beside: Peers,
    cases: Iterable[Case],
    loaded: Sequence[ours.Loaded],
) -> None:
    for case in cases:
        if bench.time_is_up():
            rows.append(Row(case, [Result(CHOSEN, Kind.OURS, None, NO_TIME)]))
            continue
        entries = [Entry(str(one.candidate), Kind.OURS, one.contender, status_of(one.problem)) for one in loaded]
        if options.chosen or not loaded:
            entries.insert(0, Entry(CHOSEN, Kind.OURS, partial(ours.chosen, bench, case)))
        rows.append(measured(bench, case, [*beside.entries(case), *entries], beside.limits, DTYPE))
        _progress(bench, rows[-1])


def _progress(bench: Bench, row: Row) -> None:
    if bench.rank:
        return
    left = bench.deadline - time.monotonic()
    best = {kind: row.best(kind) for kind in Kind}
    parts = [f"{found.name} {found.timing}" for found in best.values() if found is not None]
    print(f"{row.case.collective} {size_name(row.case.nbytes)}: {'; '.join(parts)} ({left:.0f} s left)", flush=True)


def _release(bench: Bench, loaded: Sequence[ours.Loaded]) -> None:
    for one in loaded:
        bench.attempt(one.release)
    torch.cuda.empty_cache()


# --- bandwidth over SMs -----------------------------------------------------------------------------------------------


def sms(bench: Bench, options: argparse.Namespace, rows: list[Row], notes: list[str]) -> None:
    """The same schedule on k SMs for every k, beside the same schedule on as many as it likes."""
    cases = [Case(name, options.sms_size, bench.ranks) for name in options.collectives]
    beside = Peers(bench, options, cases)
    for case in cases:
        given = [candidate for candidate in options.candidates if candidate.collective is case.collective]
        found = given or [ours.candidate_of(commdsl.choice(case.collective.value, case.nbytes, case.ranks))]
        for base in found:
            tune = tuple((key, value) for key, value in base.tune if key != "sms")
            free = Candidate(base.schedule, base.params, tune)
            loaded = ours.load(bench, [free])
            bounded = [on_sms(free, loaded[0].lanes(), count) for count in options.sms]
            loaded += ours.load(bench, bounded)
            _sizes(bench, options, rows, beside, [case], loaded)
            _release(bench, loaded)
            notes += _over_sms(rows[-1], free, bounded)


def _over_sms(row: Row, free: Candidate, bounded: Sequence[Candidate]) -> list[str]:
    """Bandwidth on k SMs, and as a fraction of that without a bound."""
    found = [f"\n{row.case.collective} {size_name(row.case.nbytes)}: GB/s on k SMs, and the fraction of all"]
    whole = row.of(str(free))
    full = row.bus(whole) if whole else None
    for candidate in (free, *bounded):
        result = row.of(str(candidate))
        bus = row.bus(result) if result else None
        share = number(bus / full if bus and full else None, 2)
        name = dict(candidate.tune).get("sms", "all")
        status = result.status if result and result.status != "ok" else ""
        found.append(f"{name!s:>5}  {number(bus, 0):>5}  {share:>5}  {candidate}  {status}".rstrip())
    return found


# --- the CPU time of a call -------------------------------------------------------------------------------------------


def host(bench: Bench) -> tuple[list[list[object]], list[str]]:
    """How long the host is held by a call of 1 KB: ours beside torch.distributed's. As `host.held` returns it."""
    x = torch.ones(HOST_NUMEL, dtype=DTYPE, device=bench.device)
    buffer = x.clone()
    calls: dict[str, tuple[Callable[[], object], int]] = {
        "commdsl.all_reduce": (lambda: commdsl.all_reduce(x, group=bench.group), HOST_CALLS),
        "torch.distributed.all_reduce": (lambda: dist.all_reduce(buffer, group=bench.group), HOST_CALLS),
    }
    for name, (call, _) in tuple(calls.items()):
        calls[f"a graph of {HOST_CALLS} x {name}, replayed"] = captured(call, HOST_CALLS).replay, 1
    return host_time.held(bench, calls, f"{2 * HOST_NUMEL} bytes")
