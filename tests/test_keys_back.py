"""The way back from keys in every form, on host ranks, bit for bit against the simulation and against float64.

Every place has a row of its own: were one of them added up twice in place of another, no sum would be right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import brute_force_dispatch as brute
import numpy as np
import pytest
from host_keys import FORMS, back_of, declared, kernel
from test_keys import KINDS, drawn, equal, instead, without

from commdsl.build.host_keys import Array, CallBack, KeysCall, back
from commdsl.build.host_ranks import RowsError, Running
from commdsl.checks import check_carried, check_routed
from commdsl.ep import simulate
from commdsl.ep.simulate import PADDING, Received
from commdsl.language.diagnostics import InternalError
from commdsl.program.moves import BLOCK_SHARED_BYTES
from commdsl.program.phases import Each, FinishBack, PushBack
from commdsl.program.plan import Plan
from commdsl.program.proof.events import steps
from commdsl.program.stages import shared_bytes
from commdsl.program.timeouts import BAD_MATE, BAD_ORIGIN
from commdsl.program.verify import verify

COLUMNS = 5

Floats = np.ndarray


def bfloat16_of(row: Floats) -> Floats:
    """Float32 to the nearest of those that bfloat16 has, of two the even one."""
    bits = np.ascontiguousarray(row, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


@dataclass(frozen=True)
class Element:
    """How numbers of an element type are held in memory, and how float32 is rounded to them."""

    name: str
    rounded: Callable[[Floats], Floats]  # float32 to float32
    stored: Callable[[Floats], Array]
    unit: float  # of a rounding, as part of what is rounded


ELEMENTS = {
    "float32": Element("float32", lambda row: row, lambda row: row, 2.0**-24),
    "float16": Element(
        "float16", lambda row: row.astype(np.float16).astype(np.float32), lambda row: row.astype(np.float16), 2.0**-11
    ),
    "bfloat16": Element("bfloat16", bfloat16_of, lambda row: (row.view(np.uint32) >> 16).astype(np.uint16), 2.0**-8),
}


@dataclass(frozen=True, eq=False)
class Case:
    """A call that came, what its rows became, and weights of all its keys."""

    call: KeysCall
    received: list[Received]
    rows: list[Floats]  # by rank (R, COLUMNS), numbers that the element type has
    weights: list[Floats]  # by rank (T, K)


def case_of(
    call: KeysCall, rank_of: Sequence[int], element: Element, seed: int, aligned: int = 1, node: int | None = None
) -> Case:
    dice = np.random.default_rng(seed)
    weights = [dice.standard_normal(keys.shape).astype(np.float32) for keys in call.keys]
    received = simulate.dispatch(call.keys, call.tensors, rank_of, weights, aligned, node)
    rows = [element.rounded(dice.standard_normal((len(one.origins), COLUMNS)).astype(np.float32)) for one in received]
    for held, own in zip(received, rows, strict=True):
        own[held.origins == PADDING] = np.nan
    return Case(replace(call, room=max(max(map(len, rows)), 1)), received, rows, weights)


def calls_of(form: str, cases: Sequence[Case], element: Element) -> list[CallBack]:
    is_weighed_here = form == "keys weighed"
    return [
        CallBack(
            one.call,
            one.received,
            [element.stored(row) for row in one.rows],
            one.weights if is_weighed_here else None,
        )
        for one in cases
    ]


def wanted(form: str, case: Case, element: Element) -> list[Array]:
    weights = case.weights if "weighed" in form else None
    found = simulate.combine(
        case.rows, case.received, case.call.keys, weights, once="ranks" in form, rounded=element.rounded
    )
    return [element.stored(element.rounded(one)) for one in found]


def with_keys_a_row(call: KeysCall, a_row: int, num_keys: int, seed: int) -> KeysCall:
    """Another number of keys, drawn as those were: any, some of them twice, one in six none."""
    dice = np.random.default_rng(seed)
    keys = [dice.integers(0, num_keys * 6 // 5 + 1, (len(one), a_row)).clip(max=num_keys) for one in call.keys]
    return replace(call, keys=[one.astype(np.int32) for one in keys])


def cases(
    ranks: int, num_keys: int, element: Element, seed: int, a_row: int | None = None, node: int | None = None
) -> list[Case]:
    dice, found = np.random.default_rng(seed), []
    for number, kind in enumerate(KINDS):
        call = drawn(kind, ranks, num_keys, dice)
        if a_row is not None and kind in ("random", "some have none"):
            call = with_keys_a_row(call, a_row, num_keys, seed + number)
        rank_of = [key * ranks // num_keys for key in range(num_keys)]
        found.append(case_of(call, rank_of, element, 100 * seed + number, (1, 4, 3)[number % 3], node))
    return found


@dataclass(frozen=True, eq=False)
class Stated:
    """What a rank's sums are, (T, COLUMNS) each."""

    sums: Floats  # each step made in float64, and rounded as the contract states
    exact: Floats  # no step rounded
    size: Floats  # the sum of what is added up, without signs


def stated(form: str, case: Case, element: Element, source: int, num_keys: int) -> Stated:
    """As the contract states it, made in float64, where a product of two float32 is exact and their sum is near enough
    that rounding it to float32 is rounding it once.
    """
    keys, ranks = case.call.keys[source], len(case.call.keys)
    made = Stated(*(np.zeros((len(keys), COLUMNS)) for _ in range(3)))
    for row in range(len(keys)):
        parts: dict[int, Floats] = {}
        for which, key in enumerate(keys[row].tolist()):
            if key == num_keys:
                continue
            rank = key * ranks // num_keys
            came = case.rows[rank][case.received[source].places[row, which]].astype(np.float64)
            term = came * float(case.weights[source][row, which]) if "weighed" in form else came
            made.exact[row] += term
            made.size[row] += abs(term)
            at = rank if "ranks" in form else 0
            parts[at] = to_float32(parts[at] + to_float32(term)) if at in parts else to_float32(term)
        total: Floats | None = None
        for rank in sorted(parts):
            part = parts[rank]
            if "ranks" in form:
                part = element.rounded(part.astype(np.float32)).astype(np.float64)
            total = part if total is None else to_float32(total + part)
        if total is not None:
            made.sums[row] = element.rounded(total.astype(np.float32))
    return made


def to_float32(row: Floats) -> Floats:
    return row.astype(np.float32).astype(np.float64)


# --- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize(("form", "ranks", "dtype"), list(product(FORMS, (2, 3, 4, 8), ELEMENTS)))
def test_against_simulation(form: str, ranks: int, dtype: str) -> None:
    """Bit for bit, for keys of every kind, 1 to 32 a row, aligned or not, and by the steps that the contract states; a
    second run, of other lanes and delays, leaves the same bits.
    """
    num_keys, element = 2 * ranks, ELEMENTS[dtype]
    made = kernel(back_of(declared(ranks, num_keys), form), dtype)
    for a_row in (1, 2, 8, 32):
        held = cases(ranks, num_keys, element, ranks + a_row, a_row)
        found = back(made, calls_of(form, held, element), Running(timeout=20.0))
        for ran, one in zip(found, held, strict=True):
            assert all(map(equal, ran, wanted(form, one, element)))
        if a_row == 8:
            for ran, one in zip(found, held, strict=True):
                is_stated(form, one, element, num_keys, ran)
        again = [replace(one, call=replace(one.call, lanes=(2,) * ranks)) for one in held]
        other = back(made, calls_of(form, again, element), Running(timeout=20.0, max_delay=0.0005, seed=1))
        assert all(equal(*pair) for ran in zip(found, other, strict=True) for pair in zip(*ran, strict=True))


def is_stated(form: str, case: Case, element: Element, num_keys: int, found: Sequence[Array]) -> None:
    """The stated order to the bit; and no further from the exact sum than its roundings: one to float32 a step, one to
    the element type of what a rank adds up, and the last.
    """
    for source, own in enumerate(found):
        law = stated(form, case, element, source, num_keys)
        assert equal(own, element.stored(law.sums.astype(np.float32)))
        steps = 2.0**-24 * (2 * case.call.keys[source].shape[1] + len(case.call.keys))
        of_element = element.unit * (2 if "ranks" in form else 1)
        # Halves below 2 ** -14 are as far apart as those.
        least = 2.0**-24 * (len(case.call.keys) + 1) if element.name == "float16" else 0.0
        assert (abs(law.sums - law.exact) <= 1.01 * (steps + of_element) * law.size + least).all()


@pytest.mark.parametrize("lanes", [(1, 1), (2, 1), (5, 8)])
def test_lanes_that_only_finish(lanes: tuple[int, ...]) -> None:
    """Of several waves some lanes of a rank only finish, its last ones: the sums are those of a rank of one lane."""
    element = ELEMENTS["float32"]
    made = kernel(back_of(declared(2, 8, lanes=8), "ranks weighed"), "float32")
    held = [replace(one, call=replace(one.call, lanes=lanes)) for one in cases(2, 8, element, 3, 8)]

    for ran, one in zip(back(made, calls_of("ranks weighed", held, element), Running(timeout=20.0)), held, strict=True):
        assert all(map(equal, ran, wanted("ranks weighed", one, element)))


def test_of_one_expert_again_and_again() -> None:
    """The mistake to be kept out: the row of a rank's first expert, as often as the rank has experts of a token."""
    element = ELEMENTS["float32"]
    case = cases(2, 8, element, 3, 8)[0]
    first = [rows[held.index.clip(min=0)] for rows, held in zip(case.rows, case.received, strict=True)]
    right, wrong = (wanted("ranks", one, element) for one in (case, replace(case, rows=first)))

    assert not np.allclose(right[0], wrong[0], atol=0.1)


# --- numbers, one for each key ----------------------------------------------------------------------------------------


def values_of(case: Case) -> CallBack:
    dice = np.random.default_rng(1)
    made = [dice.standard_normal(len(one.origins)).astype(np.float32) for one in case.received]
    return CallBack(case.call, case.received, made)


def came_back(way: CallBack, case: Case) -> list[Array]:
    return simulate.combine_values(way.rows, case.received, way.call.keys)


@pytest.mark.parametrize("ranks", [1, 3])
def test_values(ranks: int) -> None:
    """A number of every place comes to its key; a key that is none has zero."""
    held = cases(ranks, 2 * ranks, ELEMENTS["float32"], ranks, 32)
    ways = [values_of(one) for one in held]
    found = back(kernel(declared(ranks, 2 * ranks).values), ways)
    for ran, way, one in zip(found, ways, held, strict=True):
        assert all(map(equal, ran, came_back(way, one)))


# --- under ThreadSanitizer --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["keys", "ranks", "ranks weighed", "values"])
def test_silent(form: str) -> None:
    """No race is seen in calls that follow each other without a join; and they are right."""
    ranks, element = 3, ELEMENTS["float32"]
    held, of = cases(ranks, 6, element, 1, 8), declared(ranks, 6)
    running = Running(timeout=20.0, max_delay=0.003)
    if form == "values":
        ways = [values_of(one) for one in held]
        right = list(map(came_back, ways, held))
        plan, dtype = of.values, ""
    else:
        ways, right = calls_of(form, held, element), [wanted(form, one, element) for one in held]
        plan, dtype = back_of(of, form), "float32"
    for found, law in zip(back(kernel(plan, dtype, sanitize=True), ways, running), right, strict=True):
        assert all(map(equal, found, law))


# --- reported ---------------------------------------------------------------------------------------------------------


def spoiled(origin: int | None, mate: int | None) -> tuple[Case, int]:
    """A case in which the first place of a row on rank 0 comes from elsewhere, or its row has another place."""
    case = cases(2, 4, ELEMENTS["float32"], 1, 4)[0]
    held = case.received[0]
    row = int(np.flatnonzero(held.mates[1].max(axis=1) >= 0)[1])
    which = int(np.flatnonzero(held.mates[1, row] >= 0)[0])
    at = int(held.mates[1, row, which])
    if origin is not None:
        held.origins[at] = origin
    if mate is not None:
        held.mates[1, row, which] = mate
    return case, at if mate is None else row


FIRST = 1 << 63

BAD_ORIGINS = {
    "of no rank": (FIRST | 2 << 32, "row place 0 of rank 2"),
    "of the last rank there can be": (FIRST | 0xFFFF << 32, "row place 0 of rank 65535"),
    "of no row": (FIRST | 0xFFFFFFFF, "of rank 0"),
    "of a slot that a row does not have": (FIRST | 2 << 48, "of rank 0"),
    "with bits that have no meaning": (FIRST | 1 << 60, "of rank 0"),
}


@pytest.mark.parametrize("what", BAD_ORIGINS)
def test_bad_origin(what: str) -> None:
    """A sum that comes from nowhere goes nowhere, and is reported; what else is written stays within its bounds."""
    word, said = BAD_ORIGINS[what]
    case, at = spoiled(word, None)
    made = kernel(back_of(declared(2, 4), "ranks weighed"), "float32", checks=False)
    with pytest.raises(RowsError, match=f"row {at} of rank 0 came from.*{said}") as raised:
        back(made, calls_of("ranks weighed", [case], ELEMENTS["float32"]))

    assert raised.value.record.code == BAD_ORIGIN


@pytest.mark.parametrize("mate", [-2, 2**31 - 1])
def test_bad_mate(mate: int) -> None:
    """A row that is to be added up with one that did not come is reported, and nothing of it is read."""
    case, row = spoiled(None, mate)
    made = kernel(back_of(declared(2, 4), "ranks weighed"), "float32", checks=False)
    total = case.received[0].offsets[-1]
    said = f"rank 0 received of row {row} of rank 1 .* not among the {total} that came"
    with pytest.raises(RowsError, match=said) as raised:
        back(made, calls_of("ranks weighed", [case], ELEMENTS["float32"]))

    assert raised.value.record.code == BAD_MATE


def test_bad_origin_of_a_value() -> None:
    """As of a row."""
    case, at = spoiled(3 << 32, None)
    with pytest.raises(RowsError, match=f"row {at} of rank 0 came from row place 0 of rank 3"):
        back(kernel(declared(2, 4).values, checks=False), [values_of(case)])


# --- proved -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [32, 512, 1024])
def test_shared_memory_of_sums(threads: int) -> None:
    """Sums alone take shared memory for bulk copies, and leave 48 KB of a block to what a lane knows."""
    of = declared(4, 8)

    def taken(plan: Plan | None) -> int:
        assert plan is not None
        return shared_bytes(replace(plan, roles=tuple(replace(role, threads=threads) for role in plan.roles)))

    for form in FORMS:
        assert 0 < taken(back_of(of, form)) <= BLOCK_SHARED_BYTES - 48 * 1024
    assert {taken(of.plan), taken(of.again), taken(of.values)} == {0}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("ranks", [1, 2, 8, 16])
def test_proved(form: str, ranks: int) -> None:
    """Every form is legal, keeps its order and carries what the dispatch says, on any number of ranks; a second model
    of what threads do agrees.
    """
    of = declared(ranks, 2 * ranks)
    plan = back_of(of, form)
    verify(plan)
    assert of.dispatch.back is not None
    way = replace(of.dispatch.back, once="ranks" in form, weight="weight" if "weighed" in form else None)
    assert check_routed(plan) == ()
    assert check_carried(replace(of.dispatch, back=way), plan) == ()
    if ranks == 2:
        settings = brute.settings(ranks, 3, 6, seed=ranks)
        assert not any(brute.is_broken(steps(plan), setting) for setting in settings)


BACK = back_of(declared(2, 4), "ranks weighed")
(PUSH,) = (phase for phase in BACK.comm.phases if isinstance(phase, PushBack))
(FINISH,) = (phase for phase in BACK.comm.phases if isinstance(phase, FinishBack))


@pytest.mark.parametrize(
    ("plan", "law"),
    [
        (instead(BACK, PUSH, each=Each.ENTRY), "is of each key, and finished of each rank"),
        (instead(BACK, FINISH, each=Each.WORD), "is of each rank, and finished of each word"),
        (instead(BACK, PUSH, mates=None), "knows which they are"),
        (instead(BACK, PUSH, mates=PUSH.offsets), "are one"),
        (instead(BACK, PUSH, mates=FINISH.to), "is the caller's to give"),
        (instead(BACK, FINISH, weights=PUSH.weights), "are one"),
        (instead(BACK, FINISH, weights=replace(FINISH.keys, name="other")), "are weighed where they come back"),
        (without(BACK, FINISH), "summed by another behind it"),
    ],
)
def test_not_legal(plan: Plan, law: str) -> None:
    """What is added up where it is knows what is one row's, and is finished as what it is."""
    with pytest.raises(InternalError, match=law):
        verify(plan)
