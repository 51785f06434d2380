"""Turns the Plans of a way there by keys into calls: symmetric memory for what arrives, kernels, what a call passes to
them.

Assumes tensors that were judged (`limits`), and that ranks make the same calls. Does not know what rows are for, nor
what a call leaves to the next: `experts` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from commdsl.build.emit import Emitted
from commdsl.ep import float8
from commdsl.ep.float8 import staged_bytes
from commdsl.ep.limits import Limits
from commdsl.ep.pending import Run
from commdsl.program.phases import FillByKey
from commdsl.program.plan import Plan
from commdsl.runtime import given
from commdsl.runtime.communicator import Communicator
from commdsl.runtime.launches import Arguments, Launches
from commdsl.runtime.pool import Pool, aligned, results_of, row_bytes
from commdsl.runtime.workspace import Explain, Start

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class Came:
    """What a call there left on a rank: its own memory, but for the rows and what is beside them, in symmetric one."""

    rows: Tensors  # and behind all of them the scales of those in float8
    beside: Mapping[str, torch.Tensor]  # origins, and what else the Plan has
    counts: torch.Tensor
    offsets: torch.Tensor
    places: torch.Tensor


@dataclass(frozen=True, eq=False)
class Known:
    """What is the same for all Plans of a dispatch on a rank."""

    comm: Communicator
    limits: Limits
    results: int
    macros: tuple[str, ...]
    explain: Explain
    terms: Mapping[str, object]
    seconds: float | None

    def launches(self, way: tuple[Plan, Emitted], room: int) -> Launches:
        """Collective: symmetric memory for a Plan, and so many bytes behind its own."""
        return Launches(self.comm, *way, room, self.explain, self.terms, self.seconds)

    def set_up(self, way: tuple[Plan, Emitted], nbytes: int, before: int) -> tuple[Launches, Pool]:
        """Collective: symmetric memory for `results` calls that leave so many bytes each, and for what lies before."""
        plan = way[0]
        begin = aligned(plan.symmetric_bytes) + before
        launches = self.launches(way, begin - plan.symmetric_bytes + self.results * nbytes)
        return launches, launches.pool(begin, (nbytes, 0), self.results)


def words_of(arguments: Arguments) -> list[int]:
    """As a call passes them."""
    return [word for value in arguments.values() for word in ([value] if isinstance(value, int) else value)]


class WayThere:
    """One rank's end of the way there."""

    def __init__(self, known: Known, way: tuple[Plan, Emitted]) -> None:
        """Collective."""
        self.push, self._known, limits = way[0].push_by_key, known, known.limits
        staging, begin = limits.cast_bytes(way[0]), aligned(way[0].symmetric_bytes)
        staged = aligned(staging) if staging else 0
        crossing = limits.crossing(self.push, known.comm.size)
        left = limits.result_bytes(self.push, known.comm.size)
        self.launches, self.pool = known.set_up(way, left, staged + crossing.size)
        self._fixed = crossing.arguments(begin + staged)
        if self.push.often.is_once:
            self._fixed = {**self._fixed, "most_rows": limits.rows}
        self._staging: tuple[int, ...] = ()
        if staging:
            self._staging = begin, staged_bytes(limits.widths, self.push.stretches)
        self._built: Start | None = None

    @property
    def is_built(self) -> bool:
        return self._built is not None

    def start(self) -> Start:
        """The kernel, built once."""
        if self._built is None:
            tensors = len(self.push.given)
            changing: Arguments = {
                **dict.fromkeys(("keys", "num_rows", "keys_a_row"), 0),
                "inputs": (0,) * tensors,
                **({} if self.push.value is None else {"values": 0}),
                "row_bytes": (0,) * len(self.push.rows),
                **({"elements": (0,) * 3} if any(self.push.stretches) else {}),
                **dict(zip(("staging", "staged_bytes"), self._staging, strict=False)),
                "outputs": (0,) * len(self.push.to),
                **dict.fromkeys(("room", "counts", "offsets", "places"), 0),
                **self._fixed,
                **dict.fromkeys(("digest", "rank", "half", "active_lanes"), 0),
            }
            self._built = self.launches.start(self._known.macros, {}, changing)
        return self._built

    def __call__(
        self, tensors: Tensors, keys: torch.Tensor, values: torch.Tensor | None, digest: int, keep: bool
    ) -> tuple[Run, Came]:
        """What starts it, and what it leaves. `values` where the Plan has some. With `keep` what arrives is never given
        back: a graph writes it anew.
        """
        start, known, room = self.start(), self._known, self._known.limits.received
        like, many = self._arriving(tensors), len(self.push.rows)
        arriving = (*like, *(self._like(rows.name, keys) for rows in self.push.to[many:]))
        received = self.pool.empty(self._counts(arriving), arriving, goes=True, keep=keep)
        share = len(self.launches.plan.key_positions) // known.comm.size
        counts = keys.new_empty((share, known.comm.size))
        offsets, places = keys.new_empty((share,)), torch.empty_like(keys)
        widths, cast = [*map(row_bytes, like)], self._elements(tensors)
        words = (
            keys.data_ptr(),
            *keys.shape,
            *addresses(tensors if values is None else (*tensors, values)),
            *widths,
            *cast,
            *self._staging,
            *addresses(received),
            room,
            *addresses((counts, offsets, places)),
            *words_of(self._fixed),
            digest,
            known.comm.rank,
        )
        lanes = self.launches.lanes(max(keys.numel(), room) * sum(widths))
        names = [rows.name for rows in self.push.to[many:]]
        beside = dict(zip(names, received[many:], strict=True))
        if "mates" in beside:
            beside["mates"] = beside["mates"].view(known.comm.size, known.limits.rows, keys.shape[1])
        came = Came(tuple(received[:many]), beside, counts, offsets, places)
        return (lambda half: start((*words, half, lanes))), came

    def coming(self, like: Tensors) -> dict[str, torch.Tensor]:
        """Where the rows of the next call come to lie, by number, and what arrives beside them, by name."""
        for one in like:
            given.argument("like", one)
        keys = torch.empty((0, self._known.limits.keys), dtype=torch.int32, device=like[0].device)
        names, like = [rows.name for rows in self.push.to[len(self.push.rows) :]], self._arriving(like)
        arriving = (*like, *(self._like(name, keys) for name in names))
        found = self.pool.lend(results_of(self._counts(arriving), arriving), arriving, goes=True)
        return dict(zip((*map(str, range(len(like))), *names), found, strict=True))

    def _counts(self, arriving: Tensors) -> list[int]:
        """Rows of what arrives: one for each place, of mates one for each row of all ranks."""
        names, known = [rows.name for rows in self.push.to], self._known
        mates = known.limits.mates(known.comm.size)
        return [mates if name == "mates" else known.limits.received for name, _ in zip(names, arriving, strict=True)]

    def _arriving(self, tensors: Tensors) -> Tensors:
        """Those like the rows that arrive, scales behind all of them."""
        return float8.arriving(tensors, self.push.stretches) if any(self.push.stretches) else tensors

    def _elements(self, tensors: Tensors) -> list[int]:
        """What the kernel is told of tensors that travel in float8."""
        stretches = self.push.stretches
        if not any(stretches):
            return []
        found = [float8.ELEMENTS[of.dtype] if by else 0 for of, by in zip(tensors, stretches, strict=True)]
        return [*found, 0, 0][:3]

    def _like(self, name: str, keys: torch.Tensor) -> torch.Tensor:
        """One with the shape and type of a row of what arrives under this name."""
        match name:
            case "mates":
                return keys
            case "origins":
                return keys.new_empty((0,), dtype=torch.int64)
            case "index":
                return keys.new_empty((0,))
            case _:
                return keys.new_empty((0,), dtype=torch.float32)


class WayAgain:
    """One rank's end of the way there of rows that others went before."""

    def __init__(self, known: Known, way: tuple[Plan, Emitted]) -> None:
        """Collective."""
        self._known, self._has_mates = known, any(isinstance(one, FillByKey) for one in way[0].comm.phases)
        limits, begin = known.limits, aligned(way[0].symmetric_bytes)
        crossing = limits.crossing(way[0].push_again, known.comm.size)
        self.launches, self.pool = known.set_up(way, aligned(limits.received * limits.width_again), crossing.size)
        self._crossing = crossing.arguments(begin)
        self._built: Start | None = None

    @property
    def is_built(self) -> bool:
        return self._built is not None

    def start(self) -> Start:
        """The kernel, built once."""
        if self._built is None:
            names = ("counts", "offsets", "places", "origins")
            of_keys = ("keys", "num_rows", "keys_a_row", *(("most_rows", "mates") if self._has_mates else ()))
            changing: Arguments = {
                "inputs": (0,),
                "row_bytes": (0,),
                "outputs": (0,),
                **dict.fromkeys(("room", *names), 0),
                **self._crossing,
                **dict.fromkeys((*of_keys, "digest", "rank", "half", "active_lanes"), 0),
            }
            self._built = self.launches.start(self._known.macros, {}, changing)
        return self._built

    def __call__(
        self, rows: torch.Tensor, keys: torch.Tensor, left: Tensors, digest: int, keep: bool
    ) -> tuple[Run, torch.Tensor]:
        """`left`: counts, offsets, places, origins, and mates, of which the Plan may need none."""
        known, width = self._known, row_bytes(rows)
        room = known.limits.received
        (found,) = self.pool.empty([room], (rows,), goes=True, keep=keep)
        counts, offsets, places, origins, *mates = left
        words = (
            rows.data_ptr(),
            width,
            found.data_ptr(),
            room,
            *addresses((counts, offsets, places, origins)),
            *words_of(self._crossing),
            keys.data_ptr(),
            *keys.shape,
            *((known.limits.rows, *addresses(mates)) if self._has_mates else ()),
            digest,
            known.comm.rank,
        )
        start, lanes = self.start(), self.launches.lanes(max(keys.numel(), room) * width)
        return (lambda half: start((*words, half, lanes))), found


def addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)
