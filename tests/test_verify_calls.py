"""What legal phases of a call are: each law refuses the Plan that breaks it, in words that say which."""

from __future__ import annotations

from dataclasses import replace

import pytest
from host_dispatch import launched

from commdsl.language.diagnostics import InternalError
from commdsl.program.memory import Home, Rows, Words
from commdsl.program.phases import Actor, Host, Ranks
from commdsl.program.plan import Phase, Plan
from commdsl.program.verify import verify

RIGHT = launched(2, tensors=("x",))
CALLER, COMM = RIGHT.roles
PREPARE, USE = CALLER.phases
READ, ADDRESSES, PUSH, CAME, ENTERED, STRAIGHT, ALL_CAME, COMPLETE, LEARNED, FINISH, *OVER = COMM.phases
SENT, DONE, ALL_DONE, COUNTED, CALLS = OVER


def with_phases(phases: tuple[Phase, ...]) -> Plan:
    return replace(RIGHT, roles=(CALLER, replace(COMM, phases=phases)))


def with_caller(*phases: Phase) -> Plan:
    return replace(RIGHT, roles=(replace(CALLER, phases=phases), COMM))


def instead(phase: Phase, *others: Phase) -> Plan:
    return with_phases(tuple(two for one in COMM.phases for two in (others if one is phase else (one,))))


def everywhere(what: object, other: object) -> Plan:
    return with_phases(
        tuple(replace(one, what=other) if getattr(one, "what", None) == what else one for one in COMM.phases)
    )


LAWS: dict[str, Plan] = {
    "nobody moves data": replace(RIGHT, roles=(CALLER,)),
    "lanes do `prepare`, which is their caller's": instead(PUSH, PREPARE, PUSH),
    "`done` is told twice": instead(DONE, DONE, DONE),
    "`done` is met, and nobody told it before": instead(DONE),
    "`sent` is read, and nobody told it before": instead(SENT),
    "`sent` is told in vain": instead(COUNTED),
    "`done` is told in vain": instead(ALL_DONE),
    "`addresses` says of which call it is, and is met": instead(ENTERED, replace(READ, what=ADDRESSES.what)),
    "`sent` says of no call, and is met": instead(COUNTED, replace(ENTERED, what=SENT.what)),
    "the caller tells `done`, which lanes do": instead(DONE, replace(DONE, by=Actor.CALLER)),
    "the caller meets `done`, which lanes do": instead(ALL_DONE, replace(ALL_DONE, by=Actor.CALLER)),
    "every lane tells `addresses`, which has one slot a rank": instead(ADDRESSES, replace(ADDRESSES, by=Actor.LANES)),
    "the first lane tells `done`, which has a slot for every lane": instead(DONE, replace(DONE, by=Actor.FIRST)),
    "`complete` is a rank's own, and told to all ranks": instead(COMPLETE, replace(COMPLETE, to=Ranks.ALL)),
    "`sent` of all ranks is read, and told to its own rank": instead(SENT, replace(SENT, to=Ranks.OWN)),
    "`addresses` is for others, and told to none": instead(ADDRESSES, replace(ADDRESSES, to=Ranks.OWN)),
    "`done` of 1 calls later is met": instead(ALL_DONE, replace(ALL_DONE, calls_back=-1)),
    "`complete` is a rank's own, and met of all ranks": instead(LEARNED, replace(LEARNED, of=Ranks.ALL)),
    "`done` is met by lanes that are needed": instead(ALL_DONE, replace(ALL_DONE, is_spare=True)),
    "`came` is met by lanes that finish nothing": instead(ALL_CAME, replace(ALL_CAME, is_spare=False)),
    "`complete` is met by lanes that finish nothing": instead(LEARNED, replace(LEARNED, is_spare=False)),
    "the first lane meets `complete`, which is for the others": instead(LEARNED, replace(LEARNED, by=Actor.FIRST)),
    "the first phase, and no other, reads the number of the call": instead(READ),
    "every lane reads the number of the call": instead(READ, replace(READ, by=Actor.FIRST)),
    "`done` is no number of the rank's own": instead(READ, replace(READ, what=DONE.what)),
    "`calls` is never advanced": instead(CALLS),
    "`calls` is met, which counts the calls that began": instead(CALLS, CALLS, replace(LEARNED, what=CALLS.what)),
    "the caller has 0 phases in which it uses its tensors": with_caller(PREPARE),
    "no caller prepares `x` (given)": with_caller(Host("prepare", PREPARE.rows[1:], False), USE),
    "no caller uses `x` (result)": with_caller(PREPARE, Host("use", USE.rows[:1], True)),
    "the caller prepares `y` (result), which nobody makes": with_caller(
        Host("prepare", (*PREPARE.rows, Rows("y", Home.RESULT)), False), USE
    ),
    "rows are pushed 2 times": instead(PUSH, PUSH, PUSH),
    "rows are finished 2 times": instead(FINISH, FINISH, FINISH),
    "the rows that are pushed have a name each": instead(PUSH, replace(PUSH, given=PUSH.given * 2)),
    "what is pushed is given": instead(PUSH, replace(PUSH, given=PUSH.to)),
    "1 tensors are pushed, and 2 may be copied": instead(PUSH, replace(PUSH, copied=(True, True))),
    "each tensor's rows go where its table may say": instead(PUSH, replace(PUSH, to=STRAIGHT.to)),
    "what goes straight goes to its result": instead(STRAIGHT, replace(STRAIGHT, to=PUSH.to)),
    "rows go straight 0 times, packed 0": instead(STRAIGHT),
    "each tensor's rows that wait are finished to its result": instead(FINISH, replace(FINISH, to=FINISH.waiting)),
    "`x` waits, and is finished behind": with_phases(
        (READ, FINISH, *(one for one in COMM.phases[1:] if one is not FINISH))
    ),
    "what is left is of the rows that go straight": instead(FINISH, replace(FINISH, left=None)),
    "`sent` says what a lane sent, before it did": with_phases((*COMM.phases[:9], SENT, FINISH, *COMM.phases[11:])),
    "`addresses` says lanes": everywhere(ADDRESSES.what, Words("addresses", ("lanes",))),
}
"""What is said, and the Plan of which it is."""


@pytest.mark.parametrize("law", LAWS)
def test_every_law(law: str) -> None:
    """A Plan that breaks one law is refused by it."""
    with pytest.raises(InternalError) as raised:
        verify(LAWS[law])
    assert law in str(raised.value)


def test_legal_phases() -> None:
    """What the compiler makes is legal, whatever is sent, however, by how many."""
    for tensors in (("x",), ("q", "k", "v")):
        for ranks in (1, 2, 5):
            verify(launched(ranks, tensors=tensors))
