"""Turns what a call asks of CUDA's driver into a list, which can be asked again: the same calls in the same order.

Assumes that what the calls point at is there as long as the list is. Does not decide what a call asks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from itertools import starmap
from operator import call
from typing import Any, TypeAlias

DEVICE_TO_DEVICE = 3  # cudaMemcpyKind

Asked: TypeAlias = tuple[Any, ...]
"""A call of the driver's, and then the numbers that it is given."""


@dataclass(frozen=True, slots=True)
class Driver:
    """The driver's calls that calls of ops are made of, with CuPy's arguments: streams and events are numbers."""

    launch: Callable[..., object]
    copy: Callable[..., object]
    clear: Callable[..., object]
    record: Callable[..., object]
    wait: Callable[..., object]


def of_cupy() -> Driver:
    import cupy  # where there is a GPU

    runtime = cupy.cuda.runtime
    return Driver(
        cupy.cuda.driver.launchKernel,
        runtime.memcpyAsync,
        runtime.memsetAsync,
        runtime.eventRecord,
        runtime.streamWaitEvent,
    )


class Listing:
    """A driver whose calls are put down, and not made. `kept`: what they point at."""

    def __init__(self, driver: Driver) -> None:
        self.calls: list[Asked] = []
        self.kept: list[object] = []
        # Of the calls, not of this: what is kept has this driver, and is to go as soon as the listing does.
        self.driver = Driver(*(partial(_put_down, self.calls, getattr(driver, one.name)) for one in fields(driver)))

    def event(self) -> Any:
        import cupy  # where there is a GPU

        made = cupy.cuda.Event(disable_timing=True)
        self.kept.append(made)
        return made


def _put_down(calls: list[Asked], *asked: Any) -> None:
    calls.append(asked)


def play(calls: Iterable[Asked]) -> None:
    """Without a bytecode between them: Ctrl-C comes when all are made, as the other ranks wait for all."""
    deque(starmap(call, calls), maxlen=0)
