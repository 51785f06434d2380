"""Turns what one rank does into what every rank of a group gives, or raises: threads of this process, all at once.

Assumes that every rank comes to its end by itself, within a time-out if it must. Does not know what a rank calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import commdsl

SECONDS = 120.0
"""More than any rank takes, on a busy machine too."""


def at_once(count: int, work: Callable[[int], Any], seconds: float = SECONDS) -> list[Any]:
    """What `work` returns in each of so many threads, given its number; raises what is raised first, and where a thread
    is not done in so many seconds.
    """
    found: list[Any] = [None] * count
    failures: list[BaseException] = []

    def run(number: int) -> None:
        try:
            found[number] = work(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    end = time.monotonic() + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if failures:
        raise failures[0]
    assert not any(thread.is_alive() for thread in threads)
    return found


def outcomes(count: int, work: Callable[[int], Any], seconds: float = SECONDS) -> list[Any]:
    """As `at_once`, with what `work` raises in place of what it returns."""

    def run(number: int) -> Any:
        try:
            return work(number)
        except Exception as error:
            return error

    return at_once(count, run, seconds)


def in_group(num_ranks: int, work: Callable[[int, str], Any]) -> list[Any]:
    """`at_once` on each rank of a new group, given its own name of that group."""
    names = commdsl.threads(num_ranks)
    return at_once(num_ranks, lambda rank: work(rank, names[rank]))
