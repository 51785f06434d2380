"""Turns the phases of a way back into the order in which lanes run them, wave after wave.

Assumes phases that are those of one wave, side by side. Does not say which rows are of a wave: the kernel's bodies do,
on all ranks alike.

What comes home in waves is sent in stretches of rows, each with counters of its own: so one is finished while the next
is on its way. A call of few rows has fewer waves than there may be. Counters of those that it does not have are told
with its last: so all of them grow in every call, and none of these waves touches anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from commdsl.program.memory import Counters, Words
from commdsl.program.phases import FinishBack, Meet, PushBack, Routed, Tell


def num_waves(phases: Iterable[Routed]) -> int:
    """The most that a call has."""
    what = (phase.what for phase in phases if isinstance(phase, Tell | Meet))
    return max((one.waves for one in what if isinstance(one, Counters)), default=1)


def sends_wave(phase: Routed) -> bool:
    """Whether it is of what a wave is sent by, in a Plan that has waves."""
    match phase:
        case PushBack() | Tell(what=Words(name="sent")):
            return True
        case Tell(what=Counters(waves=waves)):
            return waves > 1
        case _:
            return False


def ends_wave(phase: Routed) -> bool:
    """Whether it waits for a wave, or finishes it."""
    match phase:
        case FinishBack():
            return True
        case Meet(what=Counters(waves=waves)):
            return waves > 1
        case _:
            return False


def in_order(phases: tuple[Routed, ...]) -> tuple[Routed, ...]:
    """As lanes run them in a call that has all waves: each is finished behind what sends the next. One of two launches
    has only what sends them, or what finishes them.
    """
    waves = num_waves(phases)
    if waves == 1:
        return phases
    sends = [phase for phase in phases if sends_wave(phase)]
    ends = [phase for phase in phases if ends_wave(phase)]
    begin = phases.index((sends + ends)[0])
    found: list[Routed] = []
    for wave in range(waves + 1):
        found += [_of_wave(phase, wave) for phase in sends if wave < waves]
        found += [_of_wave(phase, wave - 1) for phase in ends if wave > 0]
    return (*phases[:begin], *found, *phases[begin + len(sends) + len(ends) :])


def _of_wave(phase: Routed, wave: int) -> Routed:
    """With the counters and the memory of one wave for those of all."""
    match phase:
        case PushBack(to=to):
            return replace(phase, to=replace(to, wave=wave))
        case FinishBack(waiting=waiting):
            return replace(phase, waiting=replace(waiting, wave=wave))
        case Tell(what=Counters() as what) | Meet(what=Counters() as what):
            return replace(phase, what=replace(what, name=f"{what.name} {wave}", waves=1))
        case _:
            return phase
