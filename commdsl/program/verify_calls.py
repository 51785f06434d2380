"""What legal phases of a call are: those that are proved by region, and what their caller does around them.

Assumes nothing. Raises InternalError at the first law broken. Does not judge in which order phases come: that is proved
(`proof.regions`). What stands here is what that proof, and the bodies of the kernel, take for granted: who writes a
slot, that a rank counts its calls, that what lanes touch of their caller's memory is known to be the caller's.
"""

from __future__ import annotations

from commdsl.program.legal import law as _law
from commdsl.program.memory import Counters, Home, Rows, Words
from commdsl.program.phases import (
    Actor,
    AddUp,
    Finish,
    Forward,
    Host,
    Meet,
    Push,
    PushStraight,
    Ranks,
    Read,
    Routed,
    Tell,
)
from commdsl.program.plan import Plan


def verify_calls(plan: Plan) -> None:
    """Raises InternalError unless the phases are ones that the kernel's text can be printed from, and proved."""
    routed = [phase for role in plan.roles if not role.is_caller for phase in role.routed]
    for phase in routed:
        _law(not isinstance(phase, Host), f"lanes do `{getattr(phase, 'name', '')}`, which is their caller's")
    if not routed:
        return
    by_table = any(isinstance(phase, Push) for phase in routed)
    told: list[Words | Counters] = []
    for phase in routed:
        match phase:
            case Tell():
                _law(phase.what not in told, f"`{phase.what.name}` is told twice")
                _told(phase)
                told.append(phase.what)
            case Meet():
                _law(phase.what in told, f"`{phase.what.name}` is met, and nobody told it before")
                _met(phase, by_table)
            case Read(what=Words() as words):
                _law(words in told, f"`{words.name}` is read, and nobody told it before")
                _law(phase.by is not Actor.CALLER, f"the caller reads `{words.name}`, which lanes do")
                _law(words.a_lane, f"`{words.name}` says of which call it is, and is met")
            case _:
                pass
    _counted(routed)
    heard = [phase.what for phase in routed if isinstance(phase, Meet | Read)]
    for what in told:
        _law(what in heard, f"`{what.name}` is told in vain")
    _caller(plan, routed)
    if by_table:
        _by_table(routed)
    _moved(routed)


def _is_own(what: Words | Counters) -> bool:
    return isinstance(what, Counters) and not what.is_shared


def _told(phase: Tell) -> None:
    """A slot has one writer; what is a rank's own nobody else is told."""
    name = phase.what.name
    _law(phase.by is not Actor.CALLER, f"the caller tells `{name}`, which lanes do")
    a_lane = phase.what.a_lane if isinstance(phase.what, Words) else phase.what.is_shared
    if phase.by is Actor.LANES:
        _law(a_lane, f"every lane tells `{name}`, which has one slot a rank")
    else:
        _law(not a_lane, f"the first lane tells `{name}`, which has a slot for every lane")
    if _is_own(phase.what):
        _law(phase.to is Ranks.OWN, f"`{name}` is a rank's own, and told to {phase.to.value}")
    elif isinstance(phase.what, Words) and a_lane:  # they are read as they are, those of all ranks
        _law(phase.to is Ranks.ALL, f"`{name}` of all ranks is read, and told to {phase.to.value}")
    else:
        _law(phase.to is not Ranks.OWN, f"`{name}` is for others, and told to none")


def _met(phase: Meet, by_table: bool) -> None:
    """With a table, that a rank may finish is told if there are rows to finish, and met by lanes that have some; that
    they came, by the first where rows wait.
    """
    name, own = phase.what.name, _is_own(phase.what)
    _law(not isinstance(phase.what, Words) or not phase.what.a_lane, f"`{name}` says of no call, and is met")
    _law(phase.by is not Actor.CALLER, f"the caller meets `{name}`, which lanes do")
    _law(phase.calls_back >= 0, f"`{name}` of {-phase.calls_back} calls later is met")
    _law(phase.of is Ranks.OWN or not own, f"`{name}` is a rank's own, and met of {phase.of.value}")
    _law(
        phase.is_spare == (by_table and (own or name == "came")),
        f"`{name}` is met by lanes that {'are needed' if phase.is_spare else 'finish nothing'}",
    )
    _law(not (own and by_table) or phase.by is Actor.LANES, f"the first lane meets `{name}`, which is for the others")


def _counted(phases: list[Routed]) -> None:
    """The number of the call is known before all else, and advanced once."""
    read = [place for place, one in enumerate(phases) if isinstance(one, Read) and isinstance(one.what, Counters)]
    _law(read == [0], "the first phase, and no other, reads the number of the call")
    first = phases[0]
    assert isinstance(first, Read)
    _law(first.by is Actor.LANES, "every lane reads the number of the call")
    _law(_is_own(first.what), f"`{first.what.name}` is no number of the rank's own")
    told = [one for one in phases if isinstance(one, Tell) and one.what == first.what]
    _law(len(told) == 1, f"`{first.what.name}` is never advanced")
    met = [one for one in phases if isinstance(one, Meet) and one.what == first.what]
    _law(not met, f"`{first.what.name}` is met, which counts the calls that began")


def _caller(plan: Plan, phases: list[Routed]) -> None:
    """The caller changes its tensors before the launch and uses them behind it: whatever lanes touch of them."""
    host = [phase for role in plan.roles if role.is_caller for phase in role.phases]
    for is_after, verb in ((False, "prepares"), (True, "uses")):
        done = [phase for phase in host if isinstance(phase, Host) and phase.is_after == is_after]
        _law(len(done) == 1, f"the caller has {len(done)} phases in which it {verb} its tensors, expected one")
        touched = [touch for phase in phases for touch in phase.touches]
        for memory in dict.fromkeys(touch.memory for touch in touched):
            if isinstance(memory, Rows) and not memory.home.is_heap:
                _law(memory in done[0].rows, f"no caller {verb} `{memory.name}` ({memory.home.value})")
        written = {touch.memory for touch in touched if touch.writes}
        for rows in done[0].rows:
            made = rows.home is Home.GIVEN or rows in written
            _law(made, f"the caller {verb} `{rows.name}` ({rows.home.value}), which nobody makes")


def _moved(phases: list[Routed]) -> None:
    """Rows are pushed once; what waits is finished behind; what the caller uses is made."""
    pushes = [place for place, phase in enumerate(phases) if phase.pushes]
    _law(len(pushes) == 1, f"rows are pushed {len(pushes)} times")
    done = [(place, touch) for place, phase in enumerate(phases) for touch in phase.touches]
    sent = [place for place, phase in enumerate(phases) if _sends(phase)]
    for place, phase in enumerate(phases):
        if isinstance(phase, Tell) and isinstance(phase.what, Words) and phase.what.a_lane:
            _law(max(sent) < place, f"`{phase.what.name}` says what a lane sent, before it did")
    for memory in dict.fromkeys(touch.memory for _, touch in done):
        if isinstance(memory, Rows) and memory.home.is_heap:
            written = [place for place, touch in done if touch.memory == memory and touch.writes]
            read = [place for place, touch in done if touch.memory == memory and not touch.writes]
            _law(bool(written and read) and max(written) < min(read), f"`{memory.name}` waits, and is finished behind")


def _sends(phase: Routed) -> bool:
    """Whether rows of other ranks change, but for those that are handed on, of which their source has told."""
    if isinstance(phase, Forward | AddUp):
        return False
    return any(isinstance(one.memory, Rows) and one.writes and one.on is not Ranks.OWN for one in phase.touches)


def _by_table(phases: list[Routed]) -> None:
    """Rows go where the table of a call may say, and every tensor's are finished."""
    finishes = [phase for phase in phases if isinstance(phase, Finish)]
    _law(len(finishes) == 1, f"rows are finished {len(finishes)} times")
    pushes = [phase for phase in phases if isinstance(phase, Push)]
    straight = [phase for phase in phases if isinstance(phase, PushStraight)]
    _law(len(pushes) == 1, f"rows are pushed {len(pushes)} times")
    push, finish = pushes[0], finishes[0]
    _law(len(straight) == int(not push.packed), f"rows go straight {len(straight)} times, packed {int(push.packed)}")
    names = [rows.name for rows in push.given]
    given, results, waiting = (
        tuple(Rows(name, home) for name in names) for home in (Home.GIVEN, Home.RESULT, Home.WAITING)
    )
    _law(len(set(names)) == len(names) > 0, "the rows that are pushed have a name each")
    _law(push.given == given, "what is pushed is given")
    _law(len(push.copied) == len(names), f"{len(names)} tensors are pushed, and {len(push.copied)} may be copied")
    _law(push.to == waiting, "each tensor's rows go where its table may say")
    for one in straight:
        _law(one == PushStraight(given, results), "what goes straight goes to its result")
    _law(straight == [one for one in (finish.left,) if one], "what is left is of the rows that go straight")
    _law(finish.waiting == waiting and finish.to == results, "each tensor's rows that wait are finished to its result")
    _values(phases, names)


def _values(phases: list[Routed], names: list[str]) -> None:
    """Words have the values that the tensors ask for: as many as their bodies write and read."""
    wanted = {
        "addresses": ("lanes", *names, *(f"{name} rows" for name in names)),
        "sent": ("rows",) * len(names),
    }
    for phase in phases:
        if isinstance(phase, Tell) and isinstance(phase.what, Words) and phase.what.name in wanted:
            words = phase.what
            _law(words.values == wanted[words.name], f"`{words.name}` says {', '.join(words.values) or 'nothing'}")
