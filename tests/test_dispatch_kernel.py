"""The kernel of a dispatch on host ranks, alone and under ThreadSanitizer, against rows that numpy moves by Routes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dispatch_plans import Draw, random_plan, varied
from host_dispatch import Bytes, Call, Options, Program, Reported, chained, kernel, patched, program, run
from numpy.typing import NDArray

from commdsl.build import host_run
from commdsl.build.emit import include_dir
from commdsl.ir.plans import DispatchPlan, routing
from commdsl.ir.routes import Mask, Sharing
from commdsl.program.tiles import COPY, FINISH_WORDS, SUM, ZERO, Flow, Table, table

WIDTHS = (6, 8, 20)
"""Of queries, which are bytes; of keys and values, which are summed."""


def there(plan: DispatchPlan, widths: Sequence[int] = WIDTHS) -> tuple[Flow, ...]:
    found = routing(plan)
    keys = [] if found.keys is None else [found.keys] * (len(widths) - 1)
    routes = [found.queries, *keys]
    return tuple(Flow(one, one.counts.sum(axis=1), width) for one, width in zip(routes, widths, strict=False))


def back(plan: DispatchPlan, widths: Sequence[int] = WIDTHS) -> tuple[Flow, ...]:
    found = routing(plan)
    keys = [] if found.keys_back is None else [found.keys_back] * (len(widths) - 1)
    flows = [Flow(found.queries_back, plan.shards.rows, widths[0])]
    return tuple(flows + [Flow(one, plan.shards.rows, w, True) for one, w in zip(keys, widths[1:], strict=False)])


def drawn(
    flows: Sequence[Flow], rows: Sequence[Sequence[int]], dtype: str, dice: np.random.Generator
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


def storm(num_ranks: int, dtype: str, seed: int) -> Iterator[Call]:
    """There and back with one changing plan after the other, by both puts, any lanes and tiles."""
    dice = np.random.default_rng(seed)
    for number, draw in enumerate(varied(num_ranks, 24, 8)):
        plan = random_plan(draw, 100 * seed + number)
        goes, returns = there(plan), back(plan)
        for flows, rows in ((goes, [plan.shards.rows] * len(goes)), (returns, [flow.rows for flow in goes])):
            lanes = tuple(dice.integers(1, 4, num_ranks).tolist())
            inputs = drawn(flows, rows, dtype, dice)
            yield Call(flows, inputs, bool(dice.random() < 0.5), lanes, int(dice.choice((16, 64, 300))))


def reused(num_ranks: int, seed: int, calls: int = 8) -> list[Call]:
    """Each call sends what the one before it left, and leaves its results where that one's inputs were."""
    dice = np.random.default_rng(seed)
    found: list[Call] = []
    for number in range(calls // 2):
        sharing = (Sharing.RANK, Sharing.QUERY)[number % 2]
        draw = Draw(num_ranks, 20, mask=Mask.CAUSAL, sharing=sharing, stays=0.0, empty=0.0, is_full=True)
        plan = random_plan(draw, 100 * seed + number)
        for flows in (there(plan), back(plan)):
            first = drawn(flows, [plan.shards.rows] * 3, "float32", dice) if not found else None
            lanes = tuple(dice.integers(1, 4, num_ranks).tolist())
            found.append(Call(flows, first, bool((number + seed) % 2), lanes, 64, slot=len(found) % 2))
    return found


def same(found: list[list[list[Bytes]]], wanted: list[list[list[Bytes]]]) -> bool:
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
    made = program(kernel(num_ranks), dtype)
    for seed in range(4):
        calls = list(storm(num_ranks, dtype, seed))
        assert same(run(made, calls, Options(max_delay=0.0005 * seed, seed=seed)), chained(calls, dtype))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_silent(num_ranks: int) -> None:
    """ThreadSanitizer sees no race, and the rows are right all the same."""
    made = program(kernel(num_ranks), sanitize=True)
    calls = list(storm(num_ranks, "float32", 10 + num_ranks))
    assert same(run(made, calls, Options(max_delay=0.003)), chained(calls, "float32"))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("sanitize", [False, True])
def test_results_are_reused(num_ranks: int, sanitize: bool) -> None:
    """The memory of a result is the next call's input and takes the results of the one after that."""
    made = program(kernel(num_ranks), sanitize=sanitize)
    for seed in range(2 if sanitize else 8):
        calls = reused(num_ranks, seed)
        found = run(made, calls, Options(max_delay=0.002, seed=seed))
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


def finishes(made: Table) -> NDArray[np.uint32]:
    begin = int(made.words[2]) // 4
    return made.words[begin : begin + FINISH_WORDS * made.num_finishes].reshape(-1, FINISH_WORDS)


def test_one_tensor() -> None:
    """A call may have fewer tensors than its kernel, and no rows at all."""
    made = program(kernel(3))
    plans = [random_plan(Draw(3, most, mask=None), most) for most in (0, 30)]
    dice = np.random.default_rng(5)
    calls = []
    for plan in plans:
        flows = there(plan)[:1]
        calls.append(Call(flows, drawn(flows, [plan.shards.rows], "float32", dice), True, (3, 1, 2)))
        calls.append(Call(back(plan)[:1], None, False, (1, 2, 3)))
    assert same(run(made, calls), chained(calls, "float32"))


# --- headers with a mistake -------------------------------------------------------------------------------------------

ANNOUNCE = "if (lane == 0) announce(here);"
MEET = "if (!meet(here, peers)) return;"
GREETED = "return load_marked(from, value); }, here.call,"
PUSH = "push(here, peers);"
TELL = "  tell(here, peers);\n  const"
AWAIT = "if (lane == 0 && !await_all_lanes(here, peers)) return;"
LEAVE = "if (lane == 0) leave(here, peers);"
LEARN = "if (lane != 0 && finishes && !await_first_lane(here)) return;"
LEFT = "&here.board->complete, here.call,"
TOLD = "here.board->done_by(peer, from), here.call,"

MISTAKES = {
    "nobody announces": (ANNOUNCE, ""),
    "rows go before the peer has entered": (MEET, f"{PUSH}\n  {MEET}"),
    "entering the call before will do": (GREETED, GREETED.replace("here.call", "here.call - 1")),
    "a lane tells before it pushes": (f"{PUSH}\n  tell(here, peers);", f"tell(here, peers);\n  {PUSH}"),
    "only the first lane tells": (TELL, TELL.replace("tell", "if (lane == 0) tell")),
    "the first lane does not await the others": (AWAIT, ""),
    "the first lane leaves before it awaits": (f"{AWAIT}\n  {LEAVE}", f"{LEAVE}\n  {AWAIT}"),
    "the others do not await the first lane": (LEARN, ""),
    "the first lane's leaving the call before will do": (LEFT, LEFT.replace("here.call", "here.call - 1")),
    "being through with the call before will do": (TOLD, TOLD.replace("here.call", "here.call - 1")),
    "rows are finished before the others are awaited": (AWAIT, f"if (finishes) finish(here);\n  {AWAIT}"),
}
"""What is wrong; what stands in the header; what stands there instead."""

HANGS = {"nobody announces", "only the first lane tells"}


def with_mistake(what: str | None, folder: Path) -> Program:
    """The kernel on two ranks, built from headers of which one has a mistake."""
    shutil.copytree(include_dir(), folder / "include")
    header = folder / "include" / "commdsl" / "dispatch.cuh"
    text = header.read_text(encoding="utf-8")
    if what is not None:
        right, wrong = MISTAKES[what]
        assert text.count(right) == 1
        header.write_text(text.replace(right, wrong), encoding="utf-8")
    return patched(kernel(2), folder / "include", folder)


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_seen(what: str, tmp_path: Path) -> None:
    """Every run shows the mistake: ThreadSanitizer sees a race, or a rank waits in vain."""
    made = with_mistake(what, tmp_path)
    for seed in range(2):
        calls = [replace(call, packed=True) for call in reused(2, seed)]
        with pytest.raises(Reported if what in HANGS else host_run.DataRaceError):
            run(made, calls, Options(timeout=0.5, max_delay=0.002, seed=seed))


def test_no_mistake(tmp_path: Path) -> None:
    """What sees mistakes sees none in the header as it is."""
    made = with_mistake(None, tmp_path)
    for seed in range(4):
        calls = [replace(call, packed=True) for call in reused(2, seed)]
        assert same(run(made, calls, Options(max_delay=0.002, seed=seed))[-1:], chained(calls, "float32")[-1:])
