"""Turns a call that `torch.compile` must not trace into one that it does not: it stops there and says why.

Assumes that torch._dynamo is loaded, as it is while it traces: it takes a second to import, so only what is traced
imports this. Does not know what is made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import torch

from commdsl.dispatch.route import Pair, Route, Way

UNPREPARED = "the tables of this Route are not made yet; call `prepare` with it before, outside of what is compiled"


class Maker(Protocol):
    """What makes the tables of a Route: `launcher.Launcher`, which imports this."""

    def make(self, route: Route, way: Way, widths: tuple[int, ...]) -> Pair: ...


Make: TypeAlias = Callable[[Maker, Route, Way, tuple[int, ...]], Pair]


def _make(launcher: Maker, route: Route, way: Way, widths: tuple[int, ...]) -> Pair:
    return launcher.make(route, way, widths)


make: Make = torch.compiler.disable(_make, reason=UNPREPARED)
"""`Launcher.make`."""
