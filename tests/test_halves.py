"""Calls by keys that are two launches: what each does follows from the phases, the proof knows the stream between them,
and on host ranks they leave what one launch leaves, whichever ranks make two of it.
"""

from __future__ import annotations

from dataclasses import replace

import brute_force_dispatch as brute
import pytest
from host_keys import FORMS as BACKS
from host_keys import back_of, declared, going, kernel
from test_keys import KINDS, equal
from test_keys_back import ELEMENTS, calls_of, cases
from test_keys_back import wanted as sums_of
from test_keys_there import FORMS, agains, call_of, check_again, differs, reused, wanted

from commdsl import compiler
from commdsl.build.emit import emit
from commdsl.build.host_keys import again, back, there
from commdsl.build.host_ranks import Running
from commdsl.commands.dump_plans import plan_text
from commdsl.compiler import CheckedDispatch
from commdsl.language.diagnostics import Diagnostic, InternalError
from commdsl.machine.resources import data_dir
from commdsl.program.halves import Halves, cut_of
from commdsl.program.memory import Home, Rows
from commdsl.program.phases import Actor, AddUp, Forward, Meet, PushByKey, Ranks, Read, Tell
from commdsl.program.plan import Plan
from commdsl.program.proof.events import BETWEEN, Step, events, steps
from commdsl.program.proof.regions import order_of_regions, prove
from commdsl.program.timeouts import CommTimeout
from commdsl.program.touches import Touch
from commdsl.program.verify import verify

WHO = {"all": {0, 1, 2}, "one": {1}, "all but one": {0, 2}}
"""Ranks whose calls are two launches."""

who = pytest.mark.parametrize("halved", WHO.values(), ids=list(WHO))
each_form = pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")


def ways(of: CheckedDispatch) -> dict[str, Plan]:
    assert of.back is not None
    return {"there": of.plan, "back": of.back}


# --- derived ----------------------------------------------------------------------------------------------------------


def test_cut_at_what_is_awaited() -> None:
    """The first launch ends behind rows and the counters that tell of them, the other begins where they are awaited."""
    plan = going(3, 6).plan
    assert plan.halves is not None
    first, second = ([phase.name for phase in half] for half in plan.halves)
    told = ["tell addresses", "meet addresses", "push", "tell sent", "tell done"]
    assert first == ["read calls", "count", *told, "tell kept"]
    assert second[:2] == ["read kept", "meet done"]
    assert (*plan.halves[0][:-1], *plan.halves[1][1:]) == plan.comm.phases
    for other in declared(3, 6).back, going(3, 6).again:
        assert other is not None
        assert other.halves is not None


def test_shown_as_two_launches() -> None:
    """`commdsl show` says what each does; the kernel's text has both."""
    plan = going(2, 4).plan
    shown = plan_text(plan)
    assert "as a launch of its own, send: read calls, count, tell addresses" in shown
    assert "as a launch of its own, receive: read kept, meet done" in shown
    text = emit(plan).text
    assert (
        text.index("tell_done<")
        < text.index("commdsl::tell_kept(")
        < text.index("read_kept(")
        < text.index("meet_done<")
    )


def test_what_is_sent_on_goes_first() -> None:
    """What a rank sends on for others it does in its first launch: no rank waits for another's second."""
    of = going(4, 8, "once per node", node=2, back="back y by sum once per node")
    for plan in (of.plan, of.again, of.back):
        assert plan is not None
        assert plan.halves is not None
        first, second = plan.halves
        assert sum(isinstance(phase, Forward | AddUp) for phase in first) == 1
        assert not any(isinstance(phase, Tell) and phase.to is not Ranks.OWN for phase in second)


def test_no_cut() -> None:
    """Rows that nobody waits for have no second launch, and are no legal Plan; rows by tables have one launch."""
    plan = going(2, 4, "").plan
    caller, comm = plan.roles
    left = tuple(phase for phase in comm.phases if not (isinstance(phase, Meet) and phase.by is Actor.FIRST))
    assert cut_of(left) is None
    with pytest.raises(InternalError, match="nothing behind the push"):
        verify(replace(plan, roles=(caller, replace(comm, phases=left))))


@pytest.mark.parametrize(("ranks", "most"), [(4, 64), (8, 128)])
def test_memory(ranks: int, most: int) -> None:
    """What all kernels of tokens tell each other, and keep between launches, is as little as the README says, in KB."""
    path = data_dir("schedules") / "ep" / "tokens.comm"
    tokens = compiler.check(path, name="tokens", ranks=ranks, params={"E": 32 * ranks}, tune={"sms": 20})
    sizes = [one.symmetric_bytes for one in (tokens.plan, tokens.again, tokens.back, tokens.values) if one is not None]
    assert len(sizes) == 4
    assert sum(sizes) < most << 10


# --- proved -----------------------------------------------------------------------------------------------------------


def broken(plan: Plan, halves: Halves, between: tuple[Touch, ...] = ()) -> str:
    """The code of the first broken law of two launches; `between`: what the caller touches meanwhile."""
    found = steps(plan, halves)
    changed = tuple(replace(one, touches=between) if one.name == BETWEEN else one for one in found)
    first: Diagnostic | None = next(prove(events(changed, 3), plan.span, and_idle=False), None)
    return "" if first is None else first.code


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_proved(ranks: int) -> None:
    """As one launch and as two; a second model of both agrees."""
    for plan in ways(declared(ranks, 2 * ranks)).values():
        assert plan.halves is not None
        assert not [*order_of_regions(plan)]
        settings = brute.settings(ranks, 3, 6, seed=ranks)
        assert not any(brute.is_broken(steps(plan, plan.halves), setting) for setting in settings)


@pytest.mark.parametrize("way", ["there", "back"])
def test_caller_keeps_off(way: str) -> None:
    """What was passed may not change between two launches, and results may not be read there."""
    plan = ways(declared(3, 6))[way]
    assert plan.halves is not None
    given, made = Rows("x", Home.GIVEN), Rows("x", Home.RESULT)
    assert not broken(plan, plan.halves)
    assert broken(plan, plan.halves, (Touch(given, Ranks.OWN, True, 0),)) == "C640"
    assert broken(plan, plan.halves, (Touch(made, Ranks.OWN, False, 3),)) == "C640"


@pytest.mark.parametrize("way", ["there", "back"])
def test_number_of_the_call_is_kept(way: str) -> None:
    """To read the number of the call anew is a race in the second launch: its first lane may have advanced it."""
    plan = ways(declared(3, 6))[way]
    assert plan.halves is not None
    first, second = plan.halves
    assert broken(plan, (first, (plan.comm.phases[0], *second[1:]))) == "C640"


def test_orders_are_told_in_the_first_launch() -> None:
    """Rows of the second launch, and counters that tell nobody of them, are not what peers wait for."""
    plan = declared(3, 6).plan
    assert plan.halves is not None
    first, second = plan.halves
    (push,) = (phase for phase in first if isinstance(phase, PushByKey))
    done = [phase for phase in first if isinstance(phase, Tell) and phase.what.name == "done"]
    late = tuple(phase for phase in first if phase is not push), (second[0], push, *second[1:])
    assert broken(plan, late) == "C640"
    silent = tuple(replace(phase, to=Ranks.OWN) if phase in done else phase for phase in first), second
    assert broken(plan, silent) == "C641"
    unmet = first, tuple(phase for phase in second if not isinstance(phase, Meet))
    assert broken(plan, unmet) == "C640"
    assert isinstance(second[0], Read)


def test_begins_behind_the_stream() -> None:
    """Without the stream between them the two launches race for what a lane keeps."""
    plan = declared(2, 4).plan
    assert plan.halves is not None
    found = steps(plan, plan.halves)
    cut = [one.name for one in found].index(BETWEEN)
    rest: tuple[Step, ...] = (*found[: cut - 1], *found[cut + 2 :])
    first = next(prove(events(rest, 2), plan.span, and_idle=False), None)
    assert first is not None
    assert first.code == "C640"


# --- run --------------------------------------------------------------------------------------------------------------


@who
@each_form
@pytest.mark.parametrize("sanitize", [False, True], ids=["threads", "sanitized"])
def test_there(halved: set[int], often: str, sanitize: bool) -> None:
    """Bit for bit what one launch leaves, call after call without a join, results in few places; and no race."""
    of = going(3, 12, often, 4)
    calls = [call_of(kind, 3, 12, 1 + at % 6, at, 4) for at, kind in enumerate(KINDS)]
    running = Running(timeout=20.0, max_delay=0.002, seed=len(halved), halved=frozenset(halved))
    for found, call in zip(there(kernel(of.plan, sanitize=sanitize), calls, running), calls, strict=True):
        for mine, theirs in zip(found, wanted(of, call, 4), strict=True):
            assert not differs(mine, theirs, often, call)
    again_and_again = reused(3, 5)
    small = going(3, 6, often, 4)
    last = there(kernel(small.plan, sanitize=sanitize), again_and_again, running)[-1]
    for mine, theirs in zip(last, wanted(small, again_and_again[-1], 4), strict=True):
        assert not differs(mine, theirs, often, again_and_again[-1])


@who
@each_form
def test_again(halved: set[int], often: str) -> None:
    of, calls = going(3, 6, often, 4), reused(3, 5)
    made = agains(of, calls, 4)
    running = Running(timeout=20.0, max_delay=0.002, halved=frozenset(halved))
    check_again(again(kernel(of.again, sanitize=True), made, running)[-1:], of, made[-1:], 4)


@who
@pytest.mark.parametrize("form", BACKS)
def test_back(halved: set[int], form: str) -> None:
    """Sums in every form, bit for bit; and no race."""
    element = ELEMENTS["float32"]
    plan, held = back_of(declared(3, 6), form), cases(3, 6, element, 1)
    running = Running(timeout=20.0, max_delay=0.002, halved=frozenset(halved))
    found = back(kernel(plan, "float32", sanitize=True), calls_of(form, held, element), running)
    for ran, one in zip(found, held, strict=True):
        for mine, theirs in zip(ran, sums_of(form, one, element), strict=True):
            assert equal(mine, theirs)


def test_a_rank_that_never_sends() -> None:
    """Is named by the others, whichever half they are in."""
    of = going(3, 6)
    calls = [call_of("random", 3, 6, 2, 1, 1)]
    running = Running(timeout=0.3, absent=frozenset({1}), halved=frozenset({0, 1, 2}))
    with pytest.raises(CommTimeout, match="rank 1 never entered the call") as raised:
        there(kernel(of.plan), calls, running)
    assert raised.value.missing == (1,)
