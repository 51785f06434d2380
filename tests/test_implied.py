"""Waits that a list of the driver's calls can do without: on lists that are drawn, everything comes behind the same as
before.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from commdsl.runtime.driver import Asked, Driver
from commdsl.runtime.implied import needed

DRIVER = Driver("launch", "copy", "clear", "record", "wait")  # type: ignore[arg-type] # their names are enough
STREAMS = range(4)


def run(stream: int, number: int) -> Asked:
    """What runs on a stream; its number is where an address is."""
    return (
        ("launch", number, *range(7), stream, None, 0),
        ("copy", number, 0, 8, 3, stream),
        ("clear", number, 0, 8, stream),
    )[number % 3]


def drawn(dice: random.Random, length: int, events: int) -> list[Asked]:
    """`events`: so many, of which each may be recorded again."""
    calls, recorded = list[Asked](), list[int]()
    for number in range(length):
        stream, event = dice.choice(STREAMS), number % events
        kind = dice.randrange(4)
        if kind == 0:
            calls.append(run(stream, number))
        elif kind == 1 or not recorded:
            calls.append(("record", event, stream))
            recorded.append(event)
        else:
            calls.append(("wait", stream, dice.choice(recorded), 0))
    return calls


def order(calls: Sequence[Asked]) -> dict[object, frozenset[object]]:
    """By what runs, and by stream at the end, all that has come before, by following every call; also what was on each
    stream before the list.
    """
    before: dict[int, set[object]] = {stream: {f"before {stream}"} for stream in STREAMS}
    events: dict[int, set[object]] = {}
    found: dict[object, frozenset[object]] = {}
    for what, *given in calls:
        match what:
            case "record":
                events[given[0]] = {*before[given[1]]}
            case "wait":
                before[given[0]] |= events[given[1]]
            case _:
                stream = given[{"launch": 8, "copy": 4, "clear": 3}[what]]
                found[given[0]] = frozenset(before[stream])
                before[stream].add(given[0])
    return found | {f"end {stream}": frozenset(before[stream]) for stream in STREAMS}


@pytest.mark.parametrize("seed", range(300))
def test_drawn_lists(seed: int) -> None:
    """Nothing that runs moves past another that does, either."""
    dice = random.Random(seed)
    calls = drawn(dice, dice.randrange(40), events=dice.choice((3, 40)))
    found = needed(DRIVER, calls)
    assert order(found) == order(calls)
    assert [one for one in found if is_run(one)] == [one for one in calls if is_run(one)]
    for at, (what, *_) in enumerate(found):
        if what == "record":
            assert is_awaited(found, at)


def is_run(asked: Asked) -> bool:
    return asked[0] not in ("record", "wait")


def is_awaited(calls: Sequence[Asked], at: int) -> bool:
    """Before the event is recorded again."""
    event = calls[at][1]
    for what, *given in calls[at + 1 :]:
        if what == "record" and given[0] == event:
            return False
        if what == "wait" and given[1] == event:
            return True
    return False


def test_what_stays() -> None:
    """Fork and join stay, and of two joins behind the same one."""
    fork = [("record", 1, 0), ("wait", 1, 1, 0)]
    join = [("record", 2, 1), ("wait", 0, 2, 0)]
    again = [("record", 3, 1), ("wait", 0, 3, 0)]
    assert needed(DRIVER, [*fork, run(1, 0), *join]) == [*fork, run(1, 0), *join]
    assert len(needed(DRIVER, [*fork, run(1, 0), *join, *again])) == 5
    assert len(needed(DRIVER, [*fork, run(1, 0), *join, run(1, 1), *again])) == 6
    assert len(needed(DRIVER, [*fork, run(1, 0), *join, run(0, 1), run(1, 2), *again])) == 9
