"""A dispatch by keys, there and back: its kernels on host ranks, under ThreadSanitizer too, against the simulation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import brute_force_dispatch as brute
import numpy as np
import pytest
from host_keys import declared, kernel
from phase_mutants import is_refused

from commdsl import compiler
from commdsl.build.host_keys import Array, CallBack, KeysCall, back, there
from commdsl.build.host_ranks import DataRaceError, Kernel, RowsError, Running
from commdsl.checks import check_routed
from commdsl.ep import simulate
from commdsl.ep.simulate import Received
from commdsl.ir.dispatches import ByKey
from commdsl.language.diagnostics import InternalError
from commdsl.machine.resources import data_dir
from commdsl.program.phases import Actor, Count, Each, FinishBack, PushBack
from commdsl.program.plan import Phase, Plan
from commdsl.program.proof.events import steps
from commdsl.program.timeouts import BAD_KEY, BAD_ORIGIN, NO_ROOM, CommTimeout
from commdsl.program.verify import verify

DTYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16)}

KINDS = (
    "random",
    "nobody has rows",
    "some have none",
    "all to one rank",
    "all to one key",
    "most are dropped",
    "twice",
)


def drawn(kind: str, ranks: int, num_keys: int, dice: np.random.Generator, dtype: str = "float32") -> KeysCall:
    """Numbers of any bits as the first tensor, which is summed on its way back, and bytes as the second."""
    a_row = int(dice.integers(1, 9))
    rows = [0 if kind == "nobody has rows" else int(dice.integers(0, 40)) for _ in range(ranks)]
    if kind == "some have none":
        rows[int(dice.integers(ranks))] = 0
    share = num_keys // ranks
    keys = [dice.integers(0, num_keys + 1, (count, a_row)) for count in rows]
    if kind == "all to one rank":
        keys = [(ranks - 1) * share + one % share for one in keys]
    if kind == "all to one key":
        keys = [np.full_like(one, num_keys // 2) for one in keys]
    if kind == "most are dropped":
        keys = [np.where(dice.random(one.shape) < 0.9, num_keys, one) for one in keys]
    if kind == "twice":
        keys = [np.repeat(one[:, :1], a_row, axis=1) for one in keys]
    x = [dice.standard_normal((count, 5)).astype(DTYPES[dtype]) for count in rows]
    scale = [dice.integers(0, 256, (count, 2, 8), dtype=np.uint8) for count in rows]
    lanes = tuple(dice.integers(1, 4, ranks).tolist())
    return KeysCall([one.astype(np.int32) for one in keys], (x, scale), lanes, max(sum(rows) * a_row, 1))


def storm(ranks: int, num_keys: int, seed: int, dtype: str = "float32") -> Iterator[KeysCall]:
    dice = np.random.default_rng(seed)
    for number in range(2 * len(KINDS)):
        yield drawn(KINDS[number % len(KINDS)], ranks, num_keys, dice, dtype)


def same(found: Sequence[Received], wanted: Sequence[Received]) -> bool:
    return all(
        np.array_equal(mine.counts, theirs.counts)
        and np.array_equal(mine.offsets, theirs.offsets)
        and np.array_equal(mine.origins, theirs.origins)
        and np.array_equal(mine.places, theirs.places)
        and all(equal(one, other) for one, other in zip(mine.rows, theirs.rows, strict=True))
        for mine, theirs in zip(found, wanted, strict=True)
    )


def equal(one: Array, other: Array) -> bool:
    """Bit for bit."""
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def returning(
    call: KeysCall, received: Sequence[Received], dice: np.random.Generator, plan: Plan | None = None
) -> CallBack:
    """Rows that have changed meanwhile, or a number of each, and weights where a Plan applies them to rows of keys."""
    words = plan is not None and plan.push_back.each is Each.WORD
    shapes = [one.rows[0].shape[: 1 if words else None] for one in received]
    rows = [dice.standard_normal(shape).astype(call.tensors[0][0].dtype) for shape in shapes]
    weights = [dice.standard_normal(keys.shape).astype(np.float32) for keys in call.keys]
    return CallBack(call, received, rows, weights if plan is None or weighs_here(plan) else None)


def weighs_here(plan: Plan) -> bool:
    return any(isinstance(phase, FinishBack) and phase.weights is not None for phase in plan.phases)


def summed(one: CallBack, plan: Plan | None = None) -> list[Array]:
    """What a Plan brings back."""
    if plan is None or plan.push_back.each is Each.ENTRY:
        return simulate.combine(one.rows, one.received, one.call.keys, one.weights)
    if plan.push_back.each is Each.WORD:
        return simulate.combine_values(one.rows, one.received, one.call.keys)
    beside = [held.values for held in one.received]
    weights = simulate.combine_values(beside, one.received, one.call.keys) if plan.push_back.weights else None
    node = plan.push_back.node or None
    return simulate.combine(one.rows, one.received, one.call.keys, weights, once=True, node=node)


def rank_of(dispatch: compiler.CheckedDispatch) -> tuple[int, ...]:
    (route,) = dispatch.dispatch.routes
    assert isinstance(route, ByKey)
    return route.rank_of


# --- right ------------------------------------------------------------------------------------------------------------


def test_simulation() -> None:
    """A case small enough to be written out: two ranks, two keys each, one row dropped, one twice at one key."""
    keys = [np.array([[3, 0], [4, 4]], np.int32), np.array([[0, 0]], np.int32)]
    x = [np.array([[1.0], [2.0]], np.float32), np.array([[4.0]], np.float32)]
    here, there = simulate.dispatch(keys, [x], (0, 0, 1, 1))

    assert here.rows[0].tolist() == [[1.0], [4.0], [4.0]]
    assert here.counts.tolist() == [[1, 2], [0, 0]]
    assert here.entries.tolist() == [[0, 0, 0, 1], [1, 1, 0, 0], [2, 1, 0, 1]]
    assert there.rows[0].tolist() == [[1.0]]
    assert there.counts.tolist() == [[0, 0], [1, 0]]
    weights = [np.array([[0.5, 2.0], [1.0, 1.0]], np.float32), np.array([[1.0, 10.0]], np.float32)]
    first, second = simulate.combine([here.rows[0], there.rows[0]], (here, there), keys, weights)
    assert first.tolist() == [[2.5], [0.0]]
    assert second.tolist() == [[44.0]]


def test_simulation_of_what_is_beside() -> None:
    """Written out: two ranks, two keys each, segments that begin at even places; rows with two keys of one rank."""
    keys = [np.array([[1, 3, 0], [4, 2, 3]], np.int32), np.array([[0, 0, 4]], np.int32)]
    x = [np.array([[1.0], [2.0]], np.float32), np.array([[4.0]], np.float32)]
    values = [np.array([[1, 2, 3], [4, 5, 6]], np.float32), np.array([[7, 8, 9]], np.float32)]
    here, there = simulate.dispatch(keys, [x], (0, 0, 1, 1), values, aligned=2)

    assert here.rows[0].ravel().tolist() == [1.0, 4.0, 4.0, 0.0, 1.0, 0.0]
    assert here.counts.tolist() == [[1, 2], [1, 0]]
    assert here.offsets.tolist() == [4, 6]
    first, other, none = 1 << 63, 1 << 32, simulate.PADDING
    assert here.origins.tolist() == [2, first | other | 0, other | 1, none, first | 0, none]
    assert here.mates.tolist() == [[[4, -1, 0], [-1] * 3], [[1, 2, -1], [-1] * 3]]
    assert here.index.tolist() == [4, 1, 1, -1, 4, -1]
    assert here.values is not None
    assert here.values.tolist() == [3.0, 7.0, 8.0, 0.0, 1.0, 0.0]
    assert here.places.tolist() == [[4, 2, 0], [-1, 0, 3]]
    assert there.rows[0].ravel().tolist() == [2.0, 0.0, 1.0, 2.0]
    slot = 1 << 48
    assert there.origins.tolist() == [first | 4, none, first | slot | 1, 5]
    assert there.mates.tolist() == [[[-1, 2, -1], [-1, 0, 3]], [[-1] * 3, [-1] * 3]]
    assert there.places.tolist() == [[1, 2, -1]]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_simulation(ranks: int, dtype: str) -> None:
    """Bit for bit, for keys of every kind, any number of rows, keys and lanes, without a join in between."""
    of = declared(ranks, 4 * ranks)
    out, home = kernel(of.plan), kernel(of.back, dtype)
    for seed in range(2):
        calls, dice = list(storm(ranks, 4 * ranks, seed, dtype)), np.random.default_rng(seed)
        running = Running(timeout=20.0, max_delay=0.0005 * seed, seed=seed)
        wanted = [simulate.dispatch(call.keys, call.tensors, rank_of(of)) for call in calls]
        assert all(map(same, there(out, calls, running), wanted))
        ways = [returning(call, one, dice) for call, one in zip(calls, wanted, strict=True)]
        for found, one in zip(back(home, ways, running), ways, strict=True):
            assert all(map(equal, found, summed(one)))


@pytest.mark.parametrize(("ranks", "keys", "rank"), [(3, 6, "(expert + 1) % P"), (2, 1024, "expert % P")])
def test_any_order_of_keys(ranks: int, keys: int, rank: str) -> None:
    """Keys of a rank need not be neighbours, and there may be very many; three tensors go as one does."""
    of = declared(ranks, keys, tensors=3, rank=rank)
    dice = np.random.default_rng(1)
    calls = [drawn(kind, ranks, keys, dice) for kind in KINDS]
    calls = [replace(call, tensors=(*call.tensors, call.tensors[0])) for call in calls]
    wanted = [simulate.dispatch(call.keys, call.tensors, rank_of(of)) for call in calls]

    assert all(map(same, there(kernel(of.plan), calls), wanted))
    ways = [returning(call, one, dice) for call, one in zip(calls, wanted, strict=True)]
    for found, one in zip(back(kernel(of.back, "float32"), ways), ways, strict=True):
        assert all(map(equal, found, summed(one)))


@pytest.mark.parametrize("ranks", [2, 3])
def test_silent(ranks: int) -> None:
    """ThreadSanitizer sees no race, though results of many calls lie in one place; and the last are right."""
    of = declared(ranks, 2 * ranks)
    calls = reused(ranks, 10 + ranks)
    running = Running(timeout=20.0, max_delay=0.003)
    wanted = [simulate.dispatch(call.keys, call.tensors, rank_of(of)) for call in calls]
    ways = [returning(call, one, np.random.default_rng(3)) for call, one in zip(calls, wanted, strict=True)]

    assert same(there(kernel(of.plan, sanitize=True), calls, running)[-1], wanted[-1])
    for found, one in zip(back(kernel(of.back, "float32", sanitize=True), ways, running), ways, strict=True):
        assert all(map(equal, found, summed(one)))


def reused(ranks: int, seed: int, calls: int = 8) -> list[KeysCall]:
    """Results in one place or another, by turns, from many rows of every rank."""
    dice = np.random.default_rng(seed)
    found = []
    for number in range(calls):
        keys = [dice.integers(0, 2 * ranks, (12, 2)).astype(np.int32) for _ in range(ranks)]
        x = [dice.standard_normal((12, 5)).astype(np.float32) for _ in range(ranks)]
        scale = [dice.integers(0, 256, (12, 2), dtype=np.uint8) for _ in range(ranks)]
        lanes = tuple(dice.integers(1, 4, ranks).tolist())
        found.append(KeysCall(keys, (x, scale), lanes, 24 * ranks, slot=number % 2))
    return found


def chained(ranks: int, seed: int) -> list[KeysCall]:
    """As `reused`, but the keys of a call are rows that the call before has brought."""
    found = []
    for number, call in enumerate(reused(ranks, seed)):
        dice = np.random.default_rng(seed + number)
        travels = [dice.integers(0, 2 * ranks, (12, 2)).astype(np.int32) for _ in range(ranks)]
        even = np.arange(24).reshape(12, 2).astype(np.int32) % (2 * ranks)  # so that all have rows enough
        keys = [even] * ranks
        found.append(replace(call, tensors=(call.tensors[0], travels), keys=keys, is_chained=number % 2 == 1))
    return found


# --- reported ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checks", [False, True])
def test_no_room(checks: bool) -> None:
    """More rows than a rank has room for are reported with both numbers; what does not fit is not written."""
    of = declared(2, 4)
    call = drawn("all to one rank", 2, 4, np.random.default_rng(3))
    total = sum(keys.size for keys in call.keys)
    with pytest.raises(RowsError, match=f"{total} rows go to rank 1, which has room for {total - 1}") as raised:
        there(kernel(of.plan, checks=checks), [replace(call, room=total - 1)])

    assert raised.value.record.code == NO_ROOM


@pytest.mark.parametrize("key", [-1, 5, 2**31 - 1])
def test_no_such_key(key: int) -> None:
    """A key that is neither one nor that for none is reported with its row."""
    of = declared(2, 4)
    call = reused(2, 5)[0]
    call.keys[1][2, 0] = key
    with pytest.raises(RowsError, match=rf"key 0 of row 2 of rank 1 is {key}, .* 0 \.\.< 4") as raised:
        there(kernel(of.plan, checks=False), [call])

    assert raised.value.record.code == BAD_KEY


def test_origin_that_is_none() -> None:
    """A row whose origin was overwritten goes nowhere, and is reported."""
    of = declared(2, 4)
    call = reused(2, 5)[0]
    one = returning(call, simulate.dispatch(call.keys, call.tensors, rank_of(of)), np.random.default_rng(0))
    one.received[0].origins[1] = 2 << 32
    with pytest.raises(RowsError, match="row 1 of rank 0 came from row place 0 of rank 2") as raised:
        back(kernel(of.back, "float32", checks=False), [one])

    assert raised.value.record.code == BAD_ORIGIN


# --- proved -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 16])
def test_shipped(ranks: int) -> None:
    """Both ways of the shipped dispatch are proved, on any number of ranks; a second model of both agrees."""
    checked = compiler.check(data_dir("schedules") / "ep" / "experts.comm", ranks=ranks)
    for plan in (checked.plan, checked.back):
        assert check_routed(plan) == ()
        if ranks <= 3:
            settings = brute.settings(ranks, 3, 6, seed=ranks)
            assert not any(brute.is_broken(steps(plan), setting) for setting in settings)


THERE, BACK = declared(2, 4).plan, declared(2, 4).back
READ, COUNT, ADDRESSES, ENTERED, PUSH, SENT, DONE, ALL_DONE, COUNTED, CALLS = THERE.comm.phases
_, B_ADDRESSES, B_ENTERED, B_PUSH, _, B_DONE, B_ALL_DONE, FINISH, _, _ = BACK.comm.phases

Phases = tuple[Phase, ...]


def without(plan: Plan, phase: Phase) -> Plan:
    return with_phases(plan, tuple(one for one in plan.comm.phases if one is not phase))


def moved(plan: Plan, phase: Phase, *, before: Phase) -> Plan:
    rest = without(plan, phase).comm.phases
    return with_phases(plan, tuple(two for one in rest for two in ((phase, one) if one is before else (one,))))


def instead(plan: Plan, phase: Phase, **columns: object) -> Plan:
    return with_phases(plan, tuple(replace(one, **columns) if one is phase else one for one in plan.comm.phases))


def with_phases(plan: Plan, phases: Phases) -> Plan:
    caller, comm = plan.roles
    return replace(plan, roles=(caller, replace(comm, phases=phases)))


MISTAKES = {
    "nobody says where its results are": without(THERE, ADDRESSES),
    "entering the call before will do": instead(THERE, ENTERED, calls_back=1),
    "a lane tells before it pushes": moved(THERE, DONE, before=PUSH),
    "only the first lane tells": instead(THERE, DONE, by=Actor.FIRST),
    "the first lane does not await the others": without(THERE, ALL_DONE),
    "being through with the call before will do": instead(THERE, ALL_DONE, calls_back=1),
    "back: nobody says that it has entered": without(BACK, B_ADDRESSES),
    "back: nobody awaits that": without(BACK, B_ENTERED),
    "back: entering the call before will do": instead(BACK, B_ENTERED, calls_back=1),
    "back: rows go before the peer has entered": moved(BACK, B_PUSH, before=B_ENTERED),
    "back: a lane tells before it pushes": moved(BACK, B_DONE, before=B_PUSH),
    "back: only the first lane tells": instead(BACK, B_DONE, by=Actor.FIRST),
    "back: no lane awaits the others": without(BACK, B_ALL_DONE),
    "back: the first lane alone awaits the others": instead(BACK, B_ALL_DONE, by=Actor.FIRST),
    "back: being through with the call before will do": instead(BACK, B_ALL_DONE, calls_back=1),
    "back: rows are summed before they have come": moved(BACK, FINISH, before=B_ALL_DONE),
}
"""What is wrong, and the Plan with it: a kernel is printed from it."""

HANGS = {what for what in MISTAKES if "nobody says" in what or "only the first lane tells" in what}
MAY_HANG = {"back: nobody awaits that"}
"""Rows go where the call before told, or to what was never told: which of them, and so what comes of it, is chance."""


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_refused_and_seen(what: str) -> None:
    """The proof refuses it; and where it is run all the same ThreadSanitizer sees a race, or the kernel a key that
    there is not, or a rank waits in vain.
    """
    plan = MISTAKES[what]
    assert is_refused(plan)
    made = kernel(plan, "float32" if plan.name == BACK.name else "", sanitize=True, checks=False)
    seen, patience = ((CommTimeout,), 0.5) if what in HANGS else ((DataRaceError, RowsError), 5.0)
    with pytest.raises((*seen, CommTimeout) if what in MAY_HANG else seen):
        forced(made, Running(timeout=patience, max_delay=0.002))


def forced(made: Kernel, running: Running) -> None:
    """Calls of a Plan that meet the results of those before."""
    if made.plan.name == THERE.name:
        there(made, chained(2, 1), running)
    else:
        calls, dice = reused(2, 1), np.random.default_rng(2)
        node = next((phase.node for phase in made.plan.phases if isinstance(phase, PushBack) and phase.node), None)
        wanted = [simulate.dispatch(call.keys, call.tensors, (0, 0, 1, 1), numbers(call), node=node) for call in calls]
        ways = [returning(*pair, dice, made.plan) for pair in zip(calls, wanted, strict=True)]
        back(made, ways, running)


def numbers(call: KeysCall) -> list[Array]:
    """One for each key."""
    dice = np.random.default_rng(6)
    return [dice.standard_normal(keys.shape).astype(np.float32) for keys in call.keys]


def test_no_mistake() -> None:
    """What sees mistakes sees none in the Plans as they are."""
    for plan in (THERE, BACK):
        assert not is_refused(plan)
        made = kernel(plan, "float32" if plan.name == BACK.name else "", sanitize=True, checks=False)
        forced(made, Running(timeout=20.0, max_delay=0.002))


@pytest.mark.parametrize(
    ("plan", "law"),
    [
        (without(THERE, COUNT), "not counted, told and met"),
        (without(THERE, ENTERED), "not counted, told and met"),
        (moved(THERE, COUNT, before=PUSH), "not counted, told and met"),
        (instead(THERE, COUNT, positions=(0, 1, 2, 2)), "two keys have one position"),
        (instead(THERE, COUNT, positions=(0, 1, 2)), "not equally many"),
        (instead(THERE, COUNT, positions=()), "0 keys"),
        (instead(BACK, FINISH, positions=(0, 1, 2, 4)), "two keys have one position"),
        (instead(THERE, PUSH, to=PUSH.to[:-1]), "nothing arrives beside rows, expected origins"),
    ],
)
def test_not_legal(plan: Plan, law: str) -> None:
    """What a Plan by keys has to be is refused where it is not."""
    assert any(isinstance(phase, Count | FinishBack) for phase in (COUNT, FINISH))
    with pytest.raises(InternalError, match=law):
        verify(plan)
