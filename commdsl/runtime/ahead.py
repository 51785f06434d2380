"""Turns candidates into entries of the cache before they are measured: proofs and builds on cores that are idle.

Assumes the ranks share one cache: each builds its part, and whoever comes to an entry first waits for it. Does not say
what fails; the measurement meets the same fault and does.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from commdsl.build import host, nvrtc
from commdsl.build.emit import defines
from commdsl.machine.config import Config, from_environment
from commdsl.planner.tuning.selection import Candidate
from commdsl.program.memory import Transport
from commdsl.runtime.program import Definition, program

CORES_A_WORKER = 2
MOST_WORKERS = 8


@dataclass(frozen=True, slots=True)
class _Job:
    definition: Definition
    ranks: int
    config: Config
    dtype: str
    arch: str  # empty: the host build


class Ahead:
    """The workers of one rank; none where there are too few cores."""

    def __init__(self, rank: int, ranks: int, workers: int | None = None) -> None:
        self._rank = rank
        self._ranks = ranks
        idle = min((os.cpu_count() or 1) // ranks // CORES_A_WORKER, MOST_WORKERS)
        self._workers = idle if workers is None else workers
        self.started: list[Future[None]] = []
        self._pool: ProcessPoolExecutor | None = None

    def build(self, candidates: tuple[Candidate, ...], device: Any, element: str) -> None:
        """Starts on this rank's share, in the order in which they are measured."""
        if self._workers < 1 or not candidates:
            return
        from commdsl.runtime.load import definition  # torch: the workers import this module and need none

        if self._pool is None:
            self._pool = ProcessPoolExecutor(self._workers, multiprocessing.get_context("spawn"))
        arch = arch_of(device)
        for candidate in candidates[self._rank :: self._ranks]:
            wanted = definition(candidate.schedule, None, dict(candidate.params), None, dict(candidate.tune))
            job = _Job(wanted, self._ranks, from_environment(), element, arch)
            self.started.append(self._pool.submit(_build, job))

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)


def arch_of(device: Any) -> str:
    if device.type == "cpu":
        return ""
    import torch  # as above

    properties = torch.cuda.get_device_properties(device)
    return f"sm_{properties.major}{properties.minor}"


def _build(job: _Job) -> None:
    """In a process of its own, without torch."""
    transport = Transport.NVSHMEM if job.config.has_far else Transport.PEER
    for one in dict.fromkeys((Transport.PEER, transport)):  # shapes come from the first, the kernel from the second
        made = program(job.definition, job.ranks, one, job.config)
    macros = defines(made.plan, job.dtype, "sum")
    if job.arch:
        nvrtc.build(made.emitted, macros, job.config, job.arch)
    else:
        host.build(made.emitted, macros, job.config)
