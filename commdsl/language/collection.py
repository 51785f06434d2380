"""Turns off Python's cyclic garbage collector around work that only builds, and on again behind it.

Assumes that the work leaves no garbage in cycles to speak of: a tree of a million nodes is walked by every collection,
so that they take as long as the work. Does not touch a collector that is off already.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
