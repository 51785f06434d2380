"""Turns what is asked for into calls of commdsl: the choice of its tables, or candidates with a tuning of their own.

Assumes every rank loads the same candidates in the same order. A candidate is proved and built by one rank and found in
the cache by the others, so that a sweep costs a P-th. Does not measure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

import torch

import commdsl
from benchmarks.cases import TUNE_KEYS, Candidate, Case, Collective, Tune
from benchmarks.measure import Bench, Contender, root_of
from benchmarks.report import CHOSEN, Kind
from commdsl.planner.tuning import selection
from commdsl.runtime.ahead import Ahead


def chosen(bench: Bench, case: Case, x: torch.Tensor) -> Contender:
    """commdsl.all_reduce and friends: whatever the table says."""
    group = bench.group

    def call(index: int) -> torch.Tensor:
        found: torch.Tensor
        match case.collective:
            case Collective.ALL_REDUCE:
                found = commdsl.all_reduce(x, group=group)
            case Collective.ALL_GATHER:
                found = commdsl.all_gather(x, group=group)
            case Collective.REDUCE_SCATTER:
                found = commdsl.reduce_scatter(x, group=group)
            case Collective.ALL_TO_ALL:
                found = commdsl.all_to_all(x, group=group)
            case Collective.BROADCAST:
                found = commdsl.broadcast(x, root=root_of(index, case.ranks), group=group)
            case _:
                assert_never(case.collective)
        return found

    choice = commdsl.choice(case.collective.value, case.nbytes, case.ranks)
    return Contender(CHOSEN, Kind.OURS, call, finish=lambda: commdsl.check(group), detail=str(candidate_of(choice)))


def build_ahead(bench: Bench, cases: Sequence[Case]) -> Ahead:
    """Starts to build what the tables choose for these cases, in their order, on idle cores."""
    wanted: dict[selection.Candidate, None] = {}
    for case in cases:
        chosen = commdsl.choice(case.collective.value, case.nbytes, case.ranks)
        roots = range(case.ranks) if case.collective is Collective.BROADCAST else (None,)
        for root in roots:
            params = dict(chosen.params) if root is None else {**dict(chosen.params), "root": root}
            wanted[selection.Candidate(chosen.schedule, tuple(sorted(params.items())), chosen.tune)] = None
    found = Ahead(bench.rank, bench.ranks)
    found.build(tuple(wanted), bench.device, "bfloat16")
    return found


def candidate_of(choice: Any) -> Candidate:
    """A Choice in the words of this benchmark's command line, so that it can be measured again."""
    tune = dict(choice.tune)
    known: Tune = tuple((key, tune[key]) for key in TUNE_KEYS if key in tune)
    return Candidate(str(choice.schedule), tuple(dict(choice.params).items()), known)


@dataclass
class Loaded:
    """A candidate's ops: one, or one per root. `problem` says why there is none."""

    candidate: Candidate
    ops: tuple[Any, ...] = ()
    problem: str = ""
    group: Any = field(default=None, repr=False)

    def contender(self, x: torch.Tensor) -> Contender:
        def call(index: int) -> torch.Tensor:
            found: torch.Tensor = self.ops[root_of(index, len(self.ops))](x, group=self.group)
            return found

        return Contender(str(self.candidate), Kind.OURS, call, finish=lambda: commdsl.check(self.group))

    def lanes(self) -> int:
        """What the schedule runs with where the candidate says nothing; 1 where it could not be loaded."""
        return int(self.ops[0].program(self.ops[0].ranks).plan.moves.lanes) if self.ops else 1

    def release(self) -> None:
        """Collective: the symmetric memory goes back, for the next candidates."""
        for op in self.ops:
            op.release(self.group)


def load(bench: Bench, candidates: Sequence[Candidate]) -> list[Loaded]:
    """Every candidate as ops; those that are refused, with the reason."""
    for index, candidate in enumerate(candidates):
        if index % bench.ranks == bench.rank:
            try:
                for op in _ops(bench, candidate):
                    _build(bench, op)
            except Exception:  # met again below, by all ranks
                continue
    bench.everyone(None)
    found = []
    for candidate in candidates:
        ops, problem = bench.attempt(partial(_ops, bench, candidate))
        found.append(Loaded(candidate, ops or (), problem, bench.group))
    return found


def _ops(bench: Bench, candidate: Candidate) -> tuple[Any, ...]:
    """A broadcast's root is a parameter of the schedule, so each root is an op of its own."""
    roots: list[dict[str, int]] = [{}]
    if candidate.collective is Collective.BROADCAST:
        roots = [{"root": root} for root in range(bench.ranks)]
    given, tune = dict(candidate.params), dict(candidate.tune) or None
    return tuple(
        commdsl.load(candidate.schedule, params={**given, **root}, group=bench.group, tune=tune) for root in roots
    )


def _build(bench: Bench, op: Any) -> None:
    """Fills the cache with the cubin that a bfloat16 sum will ask for."""
    from commdsl.build import nvrtc
    from commdsl.build.emit import defines
    from commdsl.machine.config import from_environment
    from commdsl.program.memory import Transport

    config = from_environment()
    transport = Transport.NVSHMEM if config.has_far else Transport.PEER
    known = op.program(bench.ranks, transport)
    major, minor = torch.cuda.get_device_capability(bench.device)
    macros = defines(known.plan, "bfloat16", "sum")
    nvrtc.build(known.emitted, macros, config, f"sm_{major}{minor}")
