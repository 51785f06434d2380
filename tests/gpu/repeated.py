"""Turns calls that are made again and again with other numbers into how many were wrong: eagerly, in graphs, in storms.

Assumes that whoever makes a call can fill what it is given, and knows what it must give. Does not choose calls.
"""

from __future__ import annotations

import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from runner import Part, Parts

from benchmarks.measure import captured

CYCLES = 400_000
"""A GPU of a storm is held up for at most so many."""

HELD = 8
"""Results that are kept for a while: calls after them have theirs elsewhere."""

AT_ONCE = 50
"""Calls of a part of a storm."""


class Repeated(ABC):
    """Calls of one shape: how many were wrong."""

    def __init__(self, run: Parts) -> None:
        self.run = run
        self.wrong = torch.zeros((), dtype=torch.int64, device=run.device)

    @abstractmethod
    def fill(self, seed: int) -> None:
        """Other numbers into what calls are given."""

    @abstractmethod
    def made(self) -> Any:
        """What a call gives."""

    @abstractmethod
    def is_wrong(self, seed: int, found: Any) -> Any:
        """On the device: whether that is wrong, of those numbers."""

    def call(self, seed: int) -> Any:
        self.fill(seed)
        found = self.made()
        self.wrong += self.is_wrong(seed, found)
        return found

    def capture(self) -> tuple[Any, list[Any]]:
        """A graph of two calls, and where their results are."""
        found: list[Any] = []
        graph = captured(lambda: found.append(self.made()), 2, before=1)
        return graph, found[1:]

    def replay(self, graph: Any, found: list[Any], seed: int) -> None:
        self.fill(seed)
        graph.replay()
        for one in found:
            self.wrong += self.is_wrong(seed, one)


def replayed(made: Repeated, replays: int) -> int:
    """A graph of it, replayed so often."""
    graph, found = made.capture()
    for seed in range(replays):
        made.replay(graph, found, seed)
    made.run.wait()
    graph.reset()
    return int(made.wrong)


def storm(run: Parts, dice: random.Random, makers: Sequence[Callable[[], Repeated]]) -> None:
    """Calls of all in the order of the dice, eagerly and replayed, GPU and host delays, no barrier in between."""
    delays = random.Random(f"{run.options.seed} {run.rank}")
    kinds: list[Repeated] = []
    graphs: list[tuple[Any, list[Any]]] = []
    held = dict[int, Any]()

    def hold_up() -> None:
        if run.on_gpu and delays.random() < 0.4:
            torch.cuda._sleep(delays.randrange(CYCLES))
        if delays.random() < 0.1:
            time.sleep(0.003 * delays.random())

    def work(calls: int) -> int:
        for seed in range(calls):
            which, again = dice.randrange(len(kinds)), dice.random() < 0.5
            hold_up()
            if again and run.on_gpu:
                kinds[which].replay(*graphs[which], seed)
            else:
                found = kinds[which].call(seed)
                if delays.random() < 0.2:
                    held[delays.randrange(HELD)] = found
        return sum(int(one.wrong) for one in kinds)

    def set_up() -> int:
        kinds.extend(made() for made in makers)
        graphs.extend(one.capture() for one in kinds if run.on_gpu)
        return 0

    run.attempt_in_time(Part("storm", f"{len(makers)} shapes are set up"), set_up)
    for _ in range(run.options.calls // AT_ONCE):
        run.attempt_in_time(Part("storm", "calls of all shapes", AT_ONCE), partial(work, AT_ONCE))
