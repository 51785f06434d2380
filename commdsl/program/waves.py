"""Turns the phases of a way back into the order in which lanes run them, wave after wave.

Assumes phases that are those of one wave, side by side. Does not say which rows are of a wave: the kernel's bodies do,
on all ranks alike.

What comes home in waves is sent in stretches of rows, each with counters of its own: so one is finished while the next
is on its way. A call of few rows has fewer waves than there may be. Counters of those that it does not have are told
with its last: so all of them grow in every call, and none of these waves touches anything.
"""

from __future__ import annotations

from collections.abc import Iterable

from commdsl.program.phases import Routed


def num_waves(phases: Iterable[Routed]) -> int:
    """The most that a call has."""
    return max((phase.waves for phase in phases), default=1)


def in_order(phases: tuple[Routed, ...]) -> tuple[Routed, ...]:
    """As lanes run them in a call that has all waves: each is finished behind what sends the next. One of two launches
    has only what sends them, or what finishes them.
    """
    waves = num_waves(phases)
    if waves == 1:
        return phases
    sends = [phase for phase in phases if phase.sends_wave]
    ends = [phase for phase in phases if phase.ends_wave]
    begin = phases.index((sends + ends)[0])
    found: list[Routed] = []
    for wave in range(waves + 1):
        found += [phase.of_wave(wave) for phase in sends if wave < waves]
        found += [phase.of_wave(wave - 1) for phase in ends if wave > 0]
    return (*phases[:begin], *found, *phases[begin + len(sends) + len(ends) :])
