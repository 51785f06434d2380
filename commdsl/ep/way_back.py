"""Turns a Plan of a way back from keys into calls: its symmetric memory, its kernels, and what a call passes to them.

Assumes tensors that were judged (`limits`), and a handle of the same routing. Does not know what comes back, nor where
from: `experts` does.
"""

from __future__ import annotations

import torch

from commdsl.build.emit import Emitted
from commdsl.ep.pending import Run
from commdsl.ep.way_there import Known, addresses
from commdsl.program.phases import Each, FinishBack
from commdsl.program.plan import Plan
from commdsl.runtime.errors import TensorError
from commdsl.runtime.launches import Arguments
from commdsl.runtime.pool import aligned, row_bytes
from commdsl.runtime.workspace import Start

SUMMED = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class WayBack:
    """One rank's end of a way back."""

    def __init__(self, known: Known, way: tuple[Plan, Emitted]) -> None:
        """Collective, as for Launches: symmetric memory for what waits on a rank until it is added up."""
        self.plan, limits = way[0], known.limits
        self.push = self.plan.push_back
        (finish,) = (phase for phase in self.plan.phases if isinstance(phase, FinishBack))
        self.weighs_here = finish.weights is not None
        waiting = aligned(self.plan.symmetric_bytes)
        crossing = limits.crossing(self.push, known.comm.size)
        begin = aligned(waiting + limits.waiting_bytes(self.plan))
        staging = aligned(begin + crossing.size)
        room = staging + limits.staging_bytes(self.plan) - self.plan.symmetric_bytes
        self.launches = known.launches(way, room)
        self._most_rows = () if self.push.mates is None else (limits.rows,)
        self._rank, self._macros = known.comm.rank, known.macros
        self._always: Arguments = {
            "waiting": waiting,
            "waiting_rows": limits.places(self.plan),
            **crossing.arguments(begin),
        }
        if self.plan.push_back.is_staged(self.plan.transport):
            self._always = {**self._always, "staging": staging}
        self._starts: dict[torch.dtype, Start] = {}

    def is_built(self, dtype: torch.dtype) -> bool:
        """Whether the kernel for an element type is there."""
        return self._kind(dtype) in self._starts

    def _kind(self, dtype: torch.dtype) -> torch.dtype:
        """What the kernel for an element type adds up; one that adds nothing is the same for all."""
        if not isinstance(dtype, torch.dtype) or dtype not in SUMMED:
            raise TensorError(f"rows are summed in one of {', '.join(SUMMED.values())}, not in {dtype!r}")
        return torch.float32 if self.push.each is Each.WORD else dtype

    def start(self, dtype: torch.dtype) -> Start:
        """The kernel for an element type."""
        kind = self._kind(dtype)
        found = self._starts.get(kind)
        if found is None:
            summed = () if self.push.each is Each.WORD else (f"COMMDSL_DTYPE={SUMMED[kind]}",)
            names = ["given", "given_rows", "row_bytes", "origins", "offsets"]
            names += [] if self.push.mates is None else ["most_rows", "mates"]
            names += ["weights"] if self.push.weights is not None or self.weighs_here else []
            names += ["output", "keys", "num_rows", "keys_a_row", "digest", "rank", "half", "active_lanes"]
            made = self.launches.start((*summed, *self._macros), self._always, dict.fromkeys(names, 0))
            found = self._starts[kind] = made
        return found

    def __call__(
        self, rows: torch.Tensor, keys: torch.Tensor, known: tuple[torch.Tensor, ...], found: torch.Tensor, digest: int
    ) -> Run:
        """What starts it. `known`: origins, offsets, and mates and weights where the Plan has them. What comes back is
        in `found`.
        """
        width = row_bytes(rows)
        words = (
            rows.data_ptr(),
            len(rows),
            width,
            *addresses(known[:2]),
            *self._most_rows,
            *addresses(known[2:]),
            found.data_ptr(),
            keys.data_ptr(),
            *keys.shape,
            digest,
            self._rank,
        )
        start, lanes = self.start(rows.dtype), self.launches.lanes(max(keys.numel(), len(rows)) * width)
        return lambda half: start((*words, half, lanes))
