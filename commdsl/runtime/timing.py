"""Turns one call with visits into its times: what travelled, what was computed, what the one waited for the other.

Assumes a call that is not captured in a CUDA graph. On a GPU times are of events on the call's two streams, on the
processor of its clock; there a launch is over when it returns, so that nothing is hidden. Does not synchronize anything
until it is asked.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from commdsl.runtime.streams import Around, Streams
from commdsl.runtime.workspace import ALONE, Meanwhile, Start, nothing

Span: TypeAlias = tuple[Any, Any]
"""Two marks of a clock."""


MILLISECONDS = MappingProxyType(
    {"total_time": "total", "comm_total_time": "communication", "comp_total_time": "computation"}
)
"""The attribute behind each key of a profile."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One visit, in seconds: `communication` of what it computes on, how long it waited for that, `exposed`, and its
    `computation`.
    """

    communication: float
    exposed: float
    computation: float


@dataclass(frozen=True, slots=True)
class CallTimes(Mapping[str, float]):
    """The times of a call and of its steps, in seconds: `total` is `exposed`, `computation` and the rest of the call.

    As a mapping it has the keys of Hamilton Attention's profiles, in milliseconds: total_time, comm_total_time and
    comp_total_time.
    """

    total: float
    steps: tuple[StepTimes, ...]

    def __getitem__(self, key: str) -> float:
        return 1e3 * getattr(self, MILLISECONDS[key])  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return iter(MILLISECONDS)

    def __len__(self) -> int:
        return len(MILLISECONDS)

    @property
    def communication(self) -> float:
        return sum(step.communication for step in self.steps)

    @property
    def exposed(self) -> float:
        return sum(step.exposed for step in self.steps)

    @property
    def computation(self) -> float:
        return sum(step.computation for step in self.steps)


class Timing:
    """Of one call: `op.visit(..., timing=Timing(device))`, then `times()`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._launches: list[Span] = []
        self._visits: list[Span] = []
        self._waits: tuple[int, ...] = ()
        self._begin = self._mark()

    def over(
        self, streams: Streams, functions: Mapping[str | None, Callable[..., Any]], waits: Sequence[int]
    ) -> tuple[Streams, dict[str | None, Callable[..., Any]]]:
        """The same, and both are timed. `waits`: of each visit how many launches are over by then, 0 where as many as
        for the one before.
        """
        self._waits = tuple(waits)
        return _Timed(streams, self), {name: self._around(function) for name, function in functions.items()}

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """Around what one launch puts on its stream."""
        begin = self._mark()
        yield
        self._launches.append((begin, self._mark()))

    def times(self) -> CallTimes:
        """Of the call, which is over with this; waits for the GPU."""
        end = self._mark()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        steps, over, free = list[StepTimes](), 0, self._begin
        for span, wait in zip(self._visits, self._waits, strict=True):
            brought = self._launches[over : max(over, wait)]
            over = max(over, wait)
            steps.append(
                StepTimes(sum(map(self._seconds, brought)), self._seconds((free, span[0])), self._seconds(span))
            )
            free = span[1]
        return CallTimes(self._seconds((self._begin, end)), tuple(steps))

    def _around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = self._mark()
            made = function(*arguments, **named)
            self._visits.append((begin, self._mark()))
            return made

        return timed

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, span: Span) -> float:
        begin, end = span
        return float(begin.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - begin)


class _Timed(Around):
    """Streams whose launches are timed."""

    def __init__(self, streams: Streams, timing: Timing) -> None:
        super().__init__(streams)
        self._timing = timing

    @contextlib.contextmanager
    def _beside(self) -> Iterator[None]:
        with self._streams.beside(), self._timing.launch():
            yield

    def beside(self) -> AbstractContextManager[Any]:
        return self._beside()

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        """Whole, so that what it takes is one span."""
        assert not meanwhile.has_words, "it is beside a function of the caller's"
        meanwhile.between()
        with self.beside():
            start(changing)
        return nothing
