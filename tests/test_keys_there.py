"""The way there by keys in every form, on host ranks, bit for bit against the simulation; and what is refused of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from host_keys import going, kernel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sweeps import examples
from test_keys import KINDS, drawn, equal, instead, is_refused, moved, rank_of, without

from commdsl.build.host_keys import Array, Arrived, CallAgain, KeysCall, again, there
from commdsl.build.host_ranks import DataRaceError, RowsError, Running
from commdsl.checks import check_carried, check_routed
from commdsl.compiler import CheckedDispatch
from commdsl.ep import simulate
from commdsl.ep.simulate import PADDING, Received
from commdsl.ir.dispatches import Often
from commdsl.language.diagnostics import InternalError
from commdsl.program.memory import Transport
from commdsl.program.plan import Plan
from commdsl.program.timeouts import BAD_KEY, NO_ROOM
from commdsl.program.verify import verify

FORMS = ("", "once per rank", "once per rank by index")


def call_of(
    kind: str, ranks: int, num_keys: int, a_row: int, seed: int, aligned: int = 1, widths: Sequence[int] = (10, 16)
) -> KeysCall:
    """Rows of random bytes, so many bytes wide, with random values; room for whatever the keys say, and no more."""
    dice = np.random.default_rng(seed)
    call = drawn(kind, ranks, num_keys, dice)
    keys = [dice.integers(0, num_keys + 1, (len(one), a_row)).astype(np.int32) for one in call.keys]
    if kind == "twice":
        keys = [np.repeat(one[:, :1], a_row, axis=1) for one in keys]
    if kind == "all to one key":
        keys = [np.full_like(one, num_keys // 2) for one in keys]
    if kind == "all to one rank":
        share = num_keys // ranks
        keys = [(one % share + (ranks - 1) * share).astype(np.int32) for one in keys]
    if kind == "most are dropped":
        keys = [np.where(dice.random(one.shape) < 0.9, num_keys, one).astype(np.int32) for one in keys]
    tensors = tuple([dice.integers(0, 256, (len(one), width), dtype=np.uint8) for one in keys] for width in widths)
    values = [dice.standard_normal(one.shape).astype(np.float32) for one in keys]
    room = sum(one.size for one in keys) + (num_keys // ranks) * (aligned - 1)
    return replace(call, keys=keys, tensors=tensors, values=values, room=max(room, 1))


def wanted(of: CheckedDispatch, call: KeysCall, aligned: int) -> list[Received]:
    node = of.plan.push_by_key.node or None
    return simulate.dispatch(call.keys, call.tensors, rank_of(of), call.values, aligned, node)


def differs(mine: Arrived, theirs: Received, often: str, call: KeysCall) -> str:
    """What is not as it must be: rows that an index stands for are nobody's."""
    has_row = (theirs.index == np.arange(len(theirs.index))) | (theirs.origins == PADDING) | (often != FORMS[2])
    parts = {
        "counts": (mine.counts, theirs.counts),
        "offsets": (mine.offsets, theirs.offsets),
        "origins": (mine.origins, theirs.origins),
        "places": (mine.places, theirs.places),
        **{
            f"tensor {at}": (one[has_row], other[has_row])
            for at, (one, other) in enumerate(zip(mine.rows, theirs.rows, strict=True))
        },
    }
    if mine.values is not None and theirs.values is not None:
        parts["values"] = mine.values, theirs.values
    if often:
        assert mine.mates is not None
        has_row = np.arange(theirs.mates.shape[1]) < np.array([*map(len, call.keys)])[:, None]
        parts["mates"] = mine.mates[has_row], theirs.mates[has_row]
    if often == FORMS[2]:
        assert mine.index is not None
        parts["index"] = mine.index, theirs.index
    return ", ".join(name for name, (one, other) in parts.items() if not equal(one, other))


def judge(of: CheckedDispatch, calls: Sequence[KeysCall], often: str, aligned: int, running: Running) -> None:
    kept = calls if of.plan.push_by_key.value is not None else [replace(call, values=None) for call in calls]
    for number, (found, call) in enumerate(zip(there(kernel(of.plan), kept, running), kept, strict=True)):
        for rank, (mine, theirs) in enumerate(zip(found, wanted(of, call, aligned), strict=True)):
            assert not differs(mine, theirs, often, call), (number, rank, call.keys)


CASES = [
    (3, 9, "once per rank", 16, 8, 1, (32, 6, 2)),
    (4, 4, "once per rank by index", 16, 8, 1, (48, 30)),
    (8, 24, "once per rank", 3, 32, 1, (64,)),
    (2, 64, "once per rank by index", 128, 1, 1, (2, 16)),
    (3, 96, "", 16, 8, 1, (6, 128)),
]
"""Ranks, keys, form, alignment, keys a row, seeds, widths."""


@pytest.mark.parametrize(
    ("ranks", "keys", "often", "aligned", "a_row", "seeds", "widths"),
    CASES,
    ids=[f"{case[0]}-{case[1]}-{case[2][-8:] or 'each'}-{case[3]}-{case[4]}" for case in CASES],
)
def test_against_simulation(
    ranks: int, keys: int, often: str, aligned: int, a_row: int, seeds: int, widths: tuple[int, ...]
) -> None:
    """Bit for bit, whatever the keys are, call after call without a join in between."""
    of = going(ranks, keys, often, aligned, tensors=len(widths))
    for seed in range(seeds):
        kinds = KINDS if ranks < 8 else KINDS[:3]
        calls = [call_of(kind, ranks, keys, a_row, 7 * seed + at, aligned, widths) for at, kind in enumerate(kinds)]
        judge(of, calls, often, aligned, Running(timeout=20.0, max_delay=0.0005 * seed, seed=seed))


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("share", [1, 3, 32])
@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
def test_many(ranks: int, share: int, often: str) -> None:
    """As above, of every form, with few and many keys on a rank and in a row."""
    aligned = (1, 16, 128)[(ranks + share + FORMS.index(often)) % 3]
    of = going(ranks, ranks * share, often, aligned)
    kinds = KINDS if ranks < 8 else KINDS[:4]
    for seed, a_row in enumerate((1, 2, 8, 32)):
        calls = [call_of(kind, ranks, ranks * share, a_row, 50 * seed + at, aligned) for at, kind in enumerate(kinds)]
        judge(of, calls, often, aligned, Running(timeout=60.0, max_delay=0.0003 * seed, seed=seed))


@st.composite
def dispatches(draw: st.DrawFn) -> tuple[CheckedDispatch, str, int]:
    """Any form of the way there, with what its texts say of it."""
    ranks, often, aligned = (
        draw(st.integers(1, 5)),
        draw(st.sampled_from(FORMS)),
        draw(st.sampled_from((1, 2, 16, 128))),
    )
    rank = draw(st.sampled_from(("expert / (E / P)", "expert % P", "(expert + 1) % P", "P - 1 - expert % P")))
    value = draw(st.booleans())
    backs = ["", "back y by sum", "back y by sum(gate[T, K])"]
    backs += ["back y by sum(gate[T, K]) once per rank"] * (value and bool(often))
    of = going(
        ranks,
        ranks * draw(st.integers(1, 6)),
        often,
        aligned,
        value=value,
        tensors=draw(st.integers(1, 3)),
        rank=rank,
        lanes=draw(st.integers(3, 5)),  # calls have as many as three
        back=draw(st.sampled_from(backs)),
    )
    return of, often, aligned


@settings(max_examples=examples(1), suppress_health_check=list(HealthCheck))
@given(dispatches(), st.integers(1, 8), st.integers(0, 999))
def test_drawn(drawn: tuple[CheckedDispatch, str, int], a_row: int, seed: int) -> None:
    """As above, of any form, any rule of which rank has which keys, and any number of tensors."""
    of, often, aligned = drawn
    ranks, num_keys = of.plan.num_ranks, len(rank_of(of))
    widths = (10, 16, 2)[: len(of.plan.push_by_key.given)]
    calls = [call_of(kind, ranks, num_keys, a_row, seed + at, aligned, widths) for at, kind in enumerate(KINDS)]
    judge(of, calls, often, aligned, Running(timeout=60.0, max_delay=0.0003))


@pytest.mark.parametrize("often", FORMS[1:], ids=["filled", "by index"])
def test_keys_of_a_rank_need_not_be_neighbours(often: str) -> None:
    """Which rank has a key is the file's to say, and without a value none arrives."""
    of = going(3, 12, often, 4, rank="(expert + 1) % P", value=False, tensors=1)
    calls = [call_of(kind, 3, 12, 5, at, 4, (24,)) for at, kind in enumerate(KINDS)]
    judge(of, calls, often, 4, Running(timeout=20.0))


@pytest.mark.parametrize(
    ("ranks", "nodes", "often"), [(2, (0, 1), FORMS[2]), (3, (0, 1, 1), FORMS[1])], ids=["by index", "filled"]
)
def test_far(ranks: int, nodes: tuple[int, ...], often: str) -> None:
    """The same to ranks that are far, whose puts are as early and as late as they may be."""
    of = going(ranks, 2 * ranks, often, 4, transport=Transport.NVSHMEM)
    calls = [call_of(kind, ranks, 2 * ranks, 5, at, 4) for at, kind in enumerate(KINDS)]
    judge(of, calls, often, 4, Running(timeout=20.0, nodes=nodes))


def reused(ranks: int, seed: int, calls: int = 6) -> list[KeysCall]:
    """Results in one place or another, by turns."""
    found = [call_of("random", ranks, 2 * ranks, 4, seed + number, 4) for number in range(calls)]
    room = max(call.room for call in found)
    most = max(len(keys) for call in found for keys in call.keys)
    whole = [
        replace(
            call,
            keys=[np.resize(one, (most, 4)) for one in call.keys],
            tensors=tuple([np.resize(one, (most, one.shape[1])) for one in tensor] for tensor in call.tensors),
            values=[np.resize(one, (most, 4)) for one in call.values or ()],
        )
        for call in found
    ]
    return [replace(call, room=max(room, ranks * most * 4 + 16), slot=at % 2) for at, call in enumerate(whole)]


@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
def test_silent(often: str) -> None:
    """ThreadSanitizer sees no race, though results of many calls lie in one place; and the last are right."""
    of, calls = going(3, 6, often, 4), reused(3, 5)
    made = kernel(of.plan, sanitize=True)
    found = there(made, calls, Running(timeout=20.0, max_delay=0.003))
    for mine, theirs in zip(found[-1], wanted(of, calls[-1], 4), strict=True):
        assert not differs(mine, theirs, often, calls[-1])


# --- again ------------------------------------------------------------------------------------------------------------


def agains(of: CheckedDispatch, calls: Sequence[KeysCall], aligned: int, columns: int = 7) -> list[CallAgain]:
    """Other rows of the same routings, of random bytes in pairs."""
    dice = np.random.default_rng(9)
    return [
        CallAgain(
            call,
            wanted(of, call, aligned),
            [dice.integers(0, 2**16, (len(keys), columns), dtype=np.uint16) for keys in call.keys],
        )
        for call in calls
    ]


def check_again(found: Sequence[Sequence[Array]], of: CheckedDispatch, ways: Sequence[CallAgain], aligned: int) -> None:
    for ran, one in zip(found, ways, strict=True):
        other = replace(one.call, tensors=(one.rows,))
        for mine, theirs in zip(ran, wanted(of, other, aligned), strict=True):
            own = np.ones(len(theirs.index), np.bool_)
            if of.plan.push_by_key.often is Often.INDEX:
                own = (theirs.index == np.arange(len(own))) | (theirs.index < 0)
            assert equal(mine[own], theirs.rows[0][own])


@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
def test_again(often: str) -> None:
    """Other rows go to the same places, bit for bit, with rows of zeros in between; far ranks as well."""
    for transport in Transport:
        of = going(3, 9, often, 4, transport=transport)
        assert check_routed(of.again) == check_carried(of.dispatch, of.again) == ()
        calls = [call_of(kind, 3, 9, 5, at, 4) for at, kind in enumerate(KINDS)]
        ways = agains(of, calls, 4)
        running = Running(timeout=20.0, max_delay=0.0003, nodes=(0, 1, 1) if transport is Transport.NVSHMEM else ())
        check_again(again(kernel(of.again), ways, running), of, ways, 4)


@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
def test_again_is_silent(often: str) -> None:
    """ThreadSanitizer sees no race, though what comes of many calls lies in one place."""
    of, calls = going(3, 6, often, 4), reused(3, 5)
    ways = agains(of, calls, 4)
    found = again(kernel(of.again, sanitize=True), ways, Running(timeout=20.0, max_delay=0.003))
    check_again(found[-1:], of, ways[-1:], 4)


# --- reported ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
@pytest.mark.parametrize("room", [0, 7, -1])
def test_no_room(often: str, room: int) -> None:
    """Where places, those of padding and mates too, are more than there is room for, nothing is written behind it."""
    of = going(2, 4, often, 4)
    call = call_of("random", 2, 4, 6, 3, 4)
    comes = [len(one.origins) for one in wanted(of, call, 4)]
    given = room if room >= 0 else max(comes) + room
    assert given < max(comes)
    with pytest.raises(RowsError, match=rf"rows go to rank \d, which has room for {given}") as raised:
        there(kernel(of.plan), [replace(call, room=given)])

    assert raised.value.record.code == NO_ROOM


@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
@pytest.mark.parametrize("key", [-1, 7, -(2**31)])
def test_no_such_key(often: str, key: int) -> None:
    """A key that there is not is reported with its row, and goes nowhere."""
    of, call = going(2, 6, often, 1), call_of("random", 2, 6, 3, 2)
    call.keys[1][3, 2] = key
    with pytest.raises(RowsError, match=rf"key 2 of row 3 of rank 1 is {key}, .* 0 \.\.< 6") as raised:
        there(kernel(of.plan), [call])

    assert raised.value.record.code == BAD_KEY


# --- proved -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("often", FORMS, ids=lambda often: often[-8:] or "each")
def test_proved(ranks: int, often: str) -> None:
    """Every form is proved, and carries what the dispatch says."""
    of = going(ranks, 3 * ranks, often, 8)

    assert check_routed(of.plan) == check_carried(of.dispatch, of.plan) == ()


ONCE = going(2, 4, aligned=2).plan
(*_, O_ALL_DONE, _, _, O_COMPLETE, O_LEARNED, O_FILL) = ONCE.comm.phases
O_PUSH = ONCE.push_by_key

MISTAKES = {
    "the others do not await the first lane": without(ONCE, O_LEARNED),
    "its leaving the call before will do": instead(ONCE, O_LEARNED, calls_back=1),
    "the first lane leaves before it awaits": moved(ONCE, O_COMPLETE, before=O_ALL_DONE),
    "rows are copied before they have come": moved(ONCE, O_FILL, before=O_ALL_DONE),
    "being through with the call before will do": instead(ONCE, O_ALL_DONE, calls_back=1),
}
"""What is wrong, and the Plan with it: a kernel is printed from it."""


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_refused_and_seen(what: str) -> None:
    """The proof refuses it; and where it is run all the same ThreadSanitizer sees a race."""
    plan = MISTAKES[what]
    assert is_refused(plan)
    made = kernel(plan, sanitize=True, checks=False)
    with pytest.raises(DataRaceError):
        there(made, reused(2, 1), Running(timeout=2.0, max_delay=0.002))


@pytest.mark.parametrize(
    ("plan", "law"),
    [
        (without(ONCE, O_FILL), "filled by 0 phases, expected 1"),
        (instead(ONCE, O_PUSH, often=Often.INDEX), "arrives beside rows"),
        (instead(ONCE, O_PUSH, often=Often.EACH), "arrives beside rows"),
        (instead(ONCE, O_PUSH, value=None), "arrives beside rows"),
        (instead(ONCE, O_PUSH, aligned=0), "aligned to 0"),
        (instead(ONCE, O_PUSH, places=O_PUSH.keys), "there when they come"),
        (instead(ONCE, O_FILL, to=O_FILL.to[:1]), "what came once is what is filled"),
        (instead(ONCE, O_FILL, mates=O_FILL.origins), "their own origins and mates"),
    ],
)
def test_not_legal(plan: Plan, law: str) -> None:
    """What a Plan that goes once per rank has to be is refused where it is not."""
    with pytest.raises(InternalError, match=law):
        verify(plan)


AGAIN = going(2, 4, aligned=2).again
(_, A_ADDRESSES, A_ENTERED, A_PUSH, _, A_DONE, A_ALL_DONE, _, _, A_COMPLETE, A_LEARNED, A_FILL) = AGAIN.comm.phases

MISTAKES_AGAIN = {
    "entering the call before will do": instead(AGAIN, A_ENTERED, calls_back=1),
    "rows go before the peer has entered": moved(AGAIN, A_PUSH, before=A_ENTERED),
    "a lane tells before it pushes": moved(AGAIN, A_DONE, before=A_PUSH),
    "the others do not await the first lane": without(AGAIN, A_LEARNED),
    "rows are copied before they have come": moved(AGAIN, A_FILL, before=A_ALL_DONE),
}


@pytest.mark.parametrize("what", MISTAKES_AGAIN)
def test_a_mistake_of_again_is_refused_and_seen(what: str) -> None:
    """As above, for rows whose places are known."""
    plan, of = MISTAKES_AGAIN[what], going(2, 4, aligned=2)
    assert is_refused(plan)
    ways = agains(of, reused(2, 1), 2, columns=300)
    with pytest.raises(DataRaceError):
        again(kernel(plan, sanitize=True, checks=False), ways, Running(timeout=2.0, max_delay=0.002))


@pytest.mark.parametrize(
    ("plan", "law"),
    [
        (without(AGAIN, A_FILL), "filled by 0 phases, expected 1"),
        (instead(AGAIN, A_PUSH, often=Often.EACH), "filled by 1 phases, expected 0"),
        (instead(AGAIN, A_PUSH, aligned=1025), "aligned to 1025"),
        (instead(AGAIN, A_PUSH, positions=(0, 1, 2, 2)), "two keys have one position"),
        (instead(AGAIN, A_PUSH, places=A_PUSH.offsets), "are one"),
        (instead(AGAIN, A_PUSH, to=A_PUSH.given), "there when they come"),
        (instead(AGAIN, A_FILL, mates=A_PUSH.origins), "their own origins and mates"),
    ],
)
def test_again_is_not_legal(plan: Plan, law: str) -> None:
    """What a Plan of rows that go again has to be is refused where it is not."""
    with pytest.raises(InternalError, match=law):
        verify(plan)
