"""The kernel of a dispatch on host ranks, alone and under ThreadSanitizer, against rows that numpy moves by Routes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from host_dispatch import chained, launched, program
from numpy.typing import NDArray
from phase_mutants import is_refused

from commdsl.build.arena import Bytes
from commdsl.build.headers import include_dir
from commdsl.build.host_ranks import DataRaceError, RowsError, Running
from commdsl.build.host_rows import Results, RowsCall, run_calls
from commdsl.ir.plans import DispatchPlan, routing
from commdsl.ir.routes import Mask, Sharing
from commdsl.planner.chance import Draw, random_plan, varied
from commdsl.program.phases import Actor, Ranks
from commdsl.program.plan import Phase, Plan
from commdsl.program.runs import COPY, FINISH_WORDS, SUM, ZERO, Shipment, Tiling
from commdsl.program.tiles import RowTable, Tables, table
from commdsl.program.timeouts import CommTimeout

WIDTHS = (6, 8, 20)
"""Of queries, which are bytes; of keys and values, which are summed."""


def there(plan: DispatchPlan, widths: Sequence[int] = WIDTHS) -> tuple[Shipment, ...]:
    found = routing(plan)
    keys = [] if found.keys is None else [found.keys] * (len(widths) - 1)
    routes = [found.queries, *keys]
    return tuple(Shipment(one, one.counts.sum(axis=1), width) for one, width in zip(routes, widths, strict=False))


def back(plan: DispatchPlan, widths: Sequence[int] = WIDTHS) -> tuple[Shipment, ...]:
    found = routing(plan)
    keys = [] if found.keys_back is None else [found.keys_back] * (len(widths) - 1)
    flows = [Shipment(found.queries_back, plan.shards.rows, widths[0])]
    return tuple(flows + [Shipment(one, plan.shards.rows, w, True) for one, w in zip(keys, widths[1:], strict=False)])


def drawn(
    flows: Sequence[Shipment], rows: Sequence[Sequence[int]], dtype: str, dice: np.random.Generator
) -> list[list[Bytes]]:
    """By tensor and rank: any bytes for queries; for the others numbers whose sums depend on the order."""
    found = []
    for tensor, (flow, counts) in enumerate(zip(flows, rows, strict=True)):
        if tensor == 0:
            found.append([dice.integers(0, 256, (int(n), flow.width), dtype=np.uint8) for n in counts])
        else:
            numbers = [dice.standard_normal((int(n), flow.width // np.dtype(dtype).itemsize)) for n in counts]
            found.append([one.astype(dtype).view(np.uint8).reshape(len(one), flow.width) for one in numbers])
    return found


def storm(num_ranks: int, dtype: str, seed: int) -> Iterator[RowsCall]:
    """There and back with one changing plan after the other, by both puts, any lanes and tiles."""
    dice = np.random.default_rng(seed)
    for number, draw in enumerate(varied(num_ranks, 24, 8)):
        plan = random_plan(draw, 100 * seed + number)
        goes, returns = there(plan), back(plan)
        for flows, rows in ((goes, [plan.shards.rows] * len(goes)), (returns, [flow.rows for flow in goes])):
            lanes = tuple(dice.integers(1, 4, num_ranks).tolist())
            inputs = drawn(flows, rows, dtype, dice)
            yield RowsCall(flows, inputs, bool(dice.random() < 0.5), lanes, int(dice.choice((16, 64, 300))))


def reused(num_ranks: int, seed: int, calls: int = 8) -> list[RowsCall]:
    """Each call sends what the one before it left, and leaves its results where that one's inputs were."""
    dice = np.random.default_rng(seed)
    found: list[RowsCall] = []
    for number in range(calls // 2):
        sharing = (Sharing.RANK, Sharing.QUERY)[number % 2]
        draw = Draw(num_ranks, 20, mask=Mask.CAUSAL, sharing=sharing, stays=0.0, empty=0.0, is_full=True)
        plan = random_plan(draw, 100 * seed + number)
        for flows in (there(plan), back(plan)):
            first = drawn(flows, [plan.shards.rows] * 3, "float32", dice) if not found else None
            lanes = tuple(dice.integers(1, 4, num_ranks).tolist())
            found.append(RowsCall(flows, first, bool((number + seed) % 2), lanes, 64, slot=len(found) % 2))
    return found


def same(found: Results, wanted: Results) -> bool:
    return all(
        np.array_equal(mine, theirs)
        for call, want in zip(found, wanted, strict=True)
        for row, others in zip(call, want, strict=True)
        for mine, theirs in zip(row, others, strict=True)
    )


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_against_numpy(num_ranks: int, dtype: str) -> None:
    """Bit for bit, for changing plans, puts, lanes and tiles, without a join in between; nothing beside is touched."""
    made = program(launched(num_ranks), dtype)
    for seed in range(4):
        calls = list(storm(num_ranks, dtype, seed))
        assert same(run_calls(made, calls, Running(max_delay=0.0005 * seed, seed=seed)), chained(calls, dtype))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_silent(num_ranks: int) -> None:
    """ThreadSanitizer sees no race, and the rows are right all the same."""
    made = program(launched(num_ranks), sanitize=True)
    calls = list(storm(num_ranks, "float32", 10 + num_ranks))
    assert same(run_calls(made, calls, Running(max_delay=0.003)), chained(calls, "float32"))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("sanitize", [False, True])
def test_results_are_reused(num_ranks: int, sanitize: bool) -> None:
    """The memory of a result is the next call's input and takes the results of the one after that."""
    made = program(launched(num_ranks), sanitize=sanitize)
    for seed in range(2 if sanitize else 8):
        calls = reused(num_ranks, seed)
        found = run_calls(made, calls, Running(max_delay=0.002, seed=seed))
        assert same(found[-1:], chained(calls, "float32")[-1:])


def test_storms_are_of_every_kind() -> None:
    """Both puts, sums of several copies, rows that nothing leads to, ranks of different numbers of lanes."""
    calls = list(storm(3, "float32", 0))
    tables = [
        table(call.flows, rank, packed=call.packed, tile_bytes=call.tile_bytes) for call in calls for rank in range(3)
    ]
    kinds = {int(kind) for made in tables for kind in finishes(made)[:, 0]}

    assert {call.packed for call in calls} == {False, True}
    assert kinds == {COPY, SUM, ZERO}
    assert max(int(count) for made in tables for count in finishes(made)[:, 6]) > 2
    assert any(len(set(call.lanes)) == 3 for call in calls)


def finishes(made: RowTable) -> NDArray[np.uint32]:
    begin = int(made.words[2]) // 4
    return made.words[begin : begin + FINISH_WORDS * made.num_finishes].reshape(-1, FINISH_WORDS)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("sharing", Sharing)
def test_tables_made_together(sharing: Sharing, packed: bool) -> None:
    """Tables of a call, its way back and of queries alone are, word for word, those that are made one by one."""
    plan = random_plan(Draw(5, 300, sharing=sharing), 3)
    calls = there(plan), back(plan), there(plan)[:1], back(plan)[:1]

    for rank in range(5):
        made = Tables(rank, 5).tables(calls, Tiling(packed, 64))
        alone = [table(flows, rank, packed=packed, tile_bytes=64) for flows in calls]

        assert [one.words.tolist() for one in made] == [one.words.tolist() for one in alone]
        assert [one.route.tolist() for one in made] == [one.route.tolist() for one in alone]
        assert [one[1:6] for one in made] == [one[1:6] for one in alone]


def test_one_tensor() -> None:
    """A call may have fewer tensors than its kernel, and no rows at all."""
    made = program(launched(3))
    plans = [random_plan(Draw(3, most, mask=None), most) for most in (0, 30)]
    dice = np.random.default_rng(5)
    calls = []
    for plan in plans:
        flows = there(plan)[:1]
        calls.append(RowsCall(flows, drawn(flows, [plan.shards.rows], "float32", dice), True, (3, 1, 2)))
        calls.append(RowsCall(back(plan)[:1], None, False, (1, 2, 3)))
    assert same(run_calls(made, calls), chained(calls, "float32"))


@pytest.mark.parametrize(("width", "threads"), [(2, 1), (16, 1), (18, 2), (40, 4), (256, 16), (258, 32), (8192, 32)])
def test_short_rows_share_a_warp(width: int, threads: int) -> None:
    """A row that goes by itself is moved by as many threads as it has words of 16 bytes; a word more, and all do."""
    plan = random_plan(Draw(2, 40, is_full=True, empty=0.0, stays=0.0), 1)
    made = table(there(plan, (width,) * 3), 0, packed=False, tile_bytes=width)

    assert made.num_sends
    assert int(made.words[6]) == threads


# --- Plans with a mistake ---------------------------------------------------------------------------------------------

RIGHT = launched(2).comm.phases
READ, ADDRESSES, PUSH, CAME, ENTERED, STRAIGHT, ALL_CAME, COMPLETE, LEARNED, FINISH, *OVER = RIGHT
SENT, DONE, ALL_DONE, COUNTED, CALLS = OVER

Phases = tuple[Phase, ...]


def without(phase: Phase) -> Phases:
    return tuple(one for one in RIGHT if one is not phase)


def moved(phase: Phase, *, before: Phase) -> Phases:
    return tuple(two for one in without(phase) for two in ((phase, one) if one is before else (one,)))


def swapped(first: Phase, second: Phase) -> Phases:
    return tuple(second if one is first else first if one is second else one for one in RIGHT)


def instead(phase: Phase, **columns: object) -> Phases:
    return tuple(replace(one, **columns) if one is phase else one for one in RIGHT)


MISTAKES = {
    "nobody says where its results are": instead(ADDRESSES, to=Ranks.OWN),
    "entering the call before will do": instead(ENTERED, calls_back=1),
    "a lane tells before it pushes": swapped(PUSH, CAME),
    "only the first lane tells": instead(CAME, by=Actor.FIRST),
    "the first lane does not await the others": without(ALL_CAME),
    "the first lane leaves before it awaits": moved(COMPLETE, before=ALL_CAME),
    "the others do not await the first lane": without(LEARNED),
    "the first lane's leaving the call before will do": instead(LEARNED, calls_back=1),
    "what came in the call before will do": instead(ALL_CAME, calls_back=1),
    "rows are finished before the others are awaited": moved(FINISH, before=ALL_CAME),
    "nobody awaits what goes straight": without(ALL_DONE),
    "a lane is through before it pushes straight": moved(DONE, before=STRAIGHT),
    "being through with the call before will do": instead(ALL_DONE, calls_back=1),
}
"""What is wrong, and the phases that say so: a kernel is printed from them."""

GOES_STRAIGHT = {what for what in MISTAKES if "straight" in what or "through" in what}
"""What is wrong with rows that do not wait; the others are run with rows that all wait."""

HANGS = {"nobody says where its results are", "only the first lane tells"}


def with_phases(phases: tuple[Phase, ...]) -> Plan:
    right = launched(2)
    caller, comm = right.roles
    return replace(right, roles=(caller, replace(comm, phases=phases)))


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_refused_and_seen(what: str) -> None:
    """The proof refuses it; and where it is run all the same ThreadSanitizer sees a race, rows are missed, or a rank
    waits in vain.
    """
    mistaken = with_phases(MISTAKES[what])
    assert is_refused(mistaken)
    made = program(mistaken, sanitize=True)
    for seed in range(2):
        calls = [replace(call, packed=what not in GOES_STRAIGHT) for call in reused(2, seed)]
        seen = (CommTimeout,) if what in HANGS else (DataRaceError, RowsError)
        patience = 0.5 if what in HANGS else 5.0
        with pytest.raises(seen):
            run_calls(made, calls, Running(timeout=patience, max_delay=0.002, seed=seed))


def test_no_mistake() -> None:
    """What sees mistakes sees none in the Plan as it is."""
    made = program(with_phases(RIGHT), sanitize=True)
    assert not is_refused(with_phases(RIGHT))
    for seed in range(4):
        calls = [replace(call, packed=True) for call in reused(2, seed)]
        assert same(run_calls(made, calls, Running(max_delay=0.002, seed=seed))[-1:], chained(calls, "float32")[-1:])


def test_bodies_neither_wait_nor_tell() -> None:
    """What orders ranks and lanes is printed from the Plan: no header of bodies calls it, and nothing else waits."""
    folder = include_dir() / "commdsl"
    orders = re.compile(
        r"\b(watch|poll|store_release|store_marked|raise_flag|send_value|send_marked|see_marked|complete|(?:tell|meet|read)_(?:addresses|done|complete|calls|sent))\("
    )
    runs = ("runs.cuh", "host_runs.hpp", "carrier.cuh")
    for name in ("rows.cuh", "keyed.cuh", "keys.cuh", "returning.cuh", "back.cuh", "again.cuh", "entries.cuh", *runs):
        assert not orders.search((folder / name).read_text(encoding="utf-8")), name
