"""Compute between steps: a Plan that stops at each yield is proved, in order and data, and its calls hand all over."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commdsl import compiler
from commdsl.build import host_run
from commdsl.checks import check_plan
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import InternalError, render_full
from commdsl.machine.carriers import BULK, ENGINE
from commdsl.machine.dtypes import BY_NAME
from commdsl.machine.resources import data_dir
from commdsl.program.launches import Launch, Return, Visit, described
from commdsl.program.memory import Kept
from commdsl.program.plan import Plan
from commdsl.program.tasks import Tasks
from commdsl.program.verify import verify
from commdsl.program.visited import launches, plan_of, segments, started, visits

FOLDER = data_dir("schedules") / "attention"
CARRY = FOLDER / "rotation_carry.comm"

BEHIND = """schedule behind for P ranks where P >= 2 {
  inout kv
  inout acc
  scratch part
  ensure rotation(kv)
  yield grad(kv -> part)
  for s in 1 ..< P {
    each r {
      put kv -> kv @ (r + 1) % P
      reduce part -> acc
    }
    each r { put acc -> acc @ (r + 1) % P }
    yield grad(kv -> part)
  }
  each r { reduce part -> acc }
  each r { put acc -> acc @ (r + 1) % P }
  yield finish(acc -> acc)
}
"""
"""What is summed up travels one step behind: it is sent while the next visit computes."""


def checked(name: str, ranks: int) -> tuple[Schedule, Plan]:
    path: Any = FOLDER / f"{name}.comm" if name != "behind" else compiler.read_text(BEHIND, "behind.comm", Path())
    found = compiler.check(path, ranks=ranks)
    assert found.visits is not None
    return found.schedule, found.visits


NAMES = ("rotation_ring", "rotation_direct", "rotation_hamilton", "rotation_carry", "behind")


def with_phases(plan: Plan, change: Callable[[Any], Any]) -> Plan:
    """The Plan with other phases; those that become None are gone."""
    roles = []
    for role in plan.roles:
        phases = tuple(new for new in map(change, role.phases) if new is not None)
        roles.append(replace(role, phases=phases))
    return replace(plan, roles=tuple(roles))


def behind(phase: Any, after: int) -> Any:
    """A phase that comes after so many; a launch opens no later."""
    if not isinstance(phase, Launch):
        return replace(phase, after=after)
    return replace(phase, after=after, opens=min(phase.opens, after) if phase.is_split else after)


def codes(schedule: Schedule, plan: Plan) -> list[str]:
    """What is wrong with a Plan: the codes of the laws it breaks, or that it is not legal."""
    try:
        verify(plan)
    except InternalError:
        return ["not legal"]
    return [diagnostic.code for diagnostic in check_plan(schedule, plan)]


# --- the Plan ---------------------------------------------------------------------------------------------------------


def test_order_of_a_ring() -> None:
    """One segment, launched again on copies in turn; a launch waits for the visit whose copy it writes, no other."""
    _, plan = checked("rotation_ring", 5)
    assert [described(phase, number) for number, phase in started(plan)] == [
        "launch 0 of rotation_ring_segment1: kv 0 -> kv 1",
        "launch 1 of rotation_ring_segment1: kv 1 -> kv 2",
        "visit 0: kv 0",
        "visit 1: kv 1  after launch 0",
        "launch 2 of rotation_ring_segment1: kv 2 -> kv 1  after visit 1",
        "visit 2: kv 2  after launch 1",
        "launch 3 of rotation_ring_segment1: kv 1 -> kv 2  after visit 2",
        "visit 3: kv 1  after launch 2",
        "visit 4: kv 2  after launch 3",
        "return: kv 2",
    ]


def test_what_is_computed_travels() -> None:
    """Only what the visit writes waits for it: kv goes ahead."""
    _, plan = checked("rotation_carry", 3)
    assert [described(phase, number) for number, phase in started(plan)] == [
        "launch 0 of rotation_carry_segment1: kv 0 -> kv 1",
        "visit 0 attend: kv 0, acc 0 -> acc 1",
        "launch 1 of rotation_carry_segment1: acc 1 -> acc 2  after visit 0",
        "launch 2 of rotation_carry_segment1: kv 1 -> kv 2",
        "visit 1 attend: kv 1, acc 2 -> acc 2  after launch 1",
        "launch 3 of rotation_carry_segment1: acc 2 -> acc 1  after visit 1",
        "visit 2 attend: kv 2, acc 1 -> acc 1  after launch 3",
        "launch 4 of rotation_carry_segment1: acc 1 -> acc 2  after visit 2",
        "return: kv 2, acc 2  after launch 4",
    ]


def test_a_gradient_one_step_behind() -> None:
    """A visit waits for no sum that the visit before it made: both it and the next kv travel while it computes."""
    _, plan = checked("behind", 4)
    assert [visit.after for visit in visits(plan)][:3] == [0, 1, 3]
    waits = [(phase.moves.name, phase.after) for phase in launches(plan)]
    assert waits[:4] == [
        ("behind_segment1", 0),
        ("behind_segment2", 1),
        ("behind_segment1", 0),
        ("behind_segment2", 2),
    ]


def test_what_lands_is_opened_first() -> None:
    """A launch of the copy engine tells peers what is free behind who touched that, and before what it sends is made.
    Told too early a Plan is refused, and so is one that waits for more.
    """

    def found(name: str) -> tuple[Schedule, Plan]:
        made = compiler.check(FOLDER / f"{name}.comm", ranks=5, tune={"protocol": "engine", "landing": "place"})
        assert made.visits is not None
        return made.schedule, made.visits

    carry, ring = found("rotation_carry"), found("rotation_ring")
    assert [described(phase, number) for number, phase in started(carry[1])][2:6] == [
        "launch 1 of rotation_carry_segment1: acc 1 -> acc 2  after visit 0, opens at once",
        "launch 2 of rotation_carry_segment1: kv 1 -> kv 2",
        "visit 1 attend: kv 1, acc 2 -> acc 2  after launch 1",
        "launch 3 of rotation_carry_segment1: acc 2 -> acc 1  after visit 1, opens at once",
    ]
    assert [(one.opens, one.after) for one in launches(ring[1])] == [(0, 0), (0, 0), (2, 2), (3, 3)]
    for (schedule, plan), number, opens, code in ((ring, 2, 0, "C640"), (carry, 5, 1, "C642"), (carry, 5, 2, "C642")):
        old = launches(plan)[number]
        mutant = with_phases(plan, lambda one, old=old, opens=opens: replace(one, opens=opens) if one is old else one)
        assert codes(schedule, mutant) == [code]


@pytest.mark.parametrize("name", ["direct", "ring", "double_ring", "window"])
def test_the_copy_engine_has_what_only_moves(name: str) -> None:
    """Where a schedule of visits asks for the engine, launches that combine take few SMs, and all of them only where
    they add to sums and no visit computes beside; all others are its own.
    """
    tune = {"protocol": "engine"}
    plan = compiler.check(FOLDER / f"attention_{name}_backward.comm", ranks=4, tune=tune).visits
    assert plan is not None
    found = {(moves.has_reduction, moves.carrier, moves.sms) for moves in segments(plan)}
    last = {(True, BULK, 132)} if name == "direct" else set()

    assert found == {(False, ENGINE, 1), (True, BULK, 16)} | last


@pytest.mark.parametrize("name", ["rotation_ring", "rotation_carry"])
def test_memory_does_not_grow_with_steps(name: str) -> None:
    """A ring's segments are one, for any number of ranks: what grows is a line of flags a lane and rank."""
    few, many = (checked(name, ranks)[1] for ranks in (3, 16))
    assert len(segments(few)) == len(segments(many))
    flags = sum(moves.lanes * 64 * 13 for moves in segments(many))
    assert many.symmetric_bytes - few.symmetric_bytes <= flags + 4096 * len(segments(many))


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name in NAMES for ranks in (2, 3, 5, 8)])
def test_proved(name: str, ranks: int) -> None:
    """Every shipped schedule with yields has a Plan that stops at them, and the Plan is proved."""
    schedule, plan = checked(name, ranks)
    assert not codes(schedule, plan)
    assert len(visits(plan)) == 1 + sum(type(step).__name__ == "Yield" for step in schedule.steps)


# --- mutants ----------------------------------------------------------------------------------------------------------


def mutants(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Each edge gone, one earlier or one later; each phase gone; each copy another; neighbours in the other order."""
    between = [phase for phase in plan.phases if isinstance(phase, Launch | Visit | Return)]
    for phase in between:
        words = type(phase).__name__ + f" {phase.turn}"

        def put(new: Any, old: Any = phase) -> Plan:
            return with_phases(plan, lambda one: new if one is old else one)

        yield f"{words} is gone", put(None)
        for after in {0, phase.after - 1, phase.after + 1} - {phase.after, -1}:
            yield f"{words} after {after}", put(behind(phase, after))
        opens = getattr(phase, "opens", 0)
        for other in {0, opens - 1, opens + 1} - {opens, -1} if isinstance(phase, Launch) and phase.is_split else ():
            yield f"{words} opens after {other}", put(replace(phase, opens=other))
        for column in ("reads", "writes", "frees"):
            for at, kept in enumerate(getattr(phase, column, ())):
                for copy in {0, 1, 2} - {kept.copy}:
                    other = replace(kept, copy=copy)
                    columns = (*getattr(phase, column)[:at], other, *getattr(phase, column)[at + 1 :])
                    yield f"{words} {column} {other}", put(replace(phase, **{column: columns}))
    ordered = sorted(between, key=lambda phase: phase.turn)
    for one, other in pairwise(ordered):
        turns = {one.turn: other.turn, other.turn: one.turn}
        yield (
            f"turns {one.turn} and {other.turn}",
            with_phases(plan, lambda phase, turns=turns: _turned(phase, turns)),
        )


def _turned(phase: Any, turns: Mapping[int, int]) -> Any:
    """The phase elsewhere in the order of the schedule; tasks stay."""
    return phase if isinstance(phase, Tasks) else replace(phase, turn=turns.get(phase.turn, phase.turn))


def is_equal_in_effect(plan: Plan, mutant: Plan) -> bool:
    """Whether every phase still comes after whatever touches the same copies before it, by the streams and edges alone:
    a second model, of which phases are over for sure when one begins.
    """
    before: dict[tuple[bool, int], set[tuple[bool, int]]] = {}
    done: dict[tuple[bool, int], Any] = {}
    for number, phase in started(mutant):
        mine = isinstance(phase, Launch)
        over = set(before.get((mine, number - 1), ())) | ({(mine, number - 1)} if number else set())
        if isinstance(phase, Launch):
            last = (False, phase.opens - 1)
            opened = over | (before[last] | {last} if phase.opens else set())
            earlier = {key for key, one in done.items() if one.turn < phase.turn and _touches(one, phase.lands)}
            if not earlier <= opened:
                return False
        if phase.after:
            over |= before[not mine, phase.after - 1] | {(not mine, phase.after - 1)}
        before[mine, number], done[mine, number] = over, phase
    for key, phase in done.items():
        for other, earlier in done.items():
            if earlier.turn < phase.turn and other not in before[key] and _meet(earlier, phase):
                return False
    return True


def _meet(one: Any, other: Any) -> bool:
    return _touches(one, _written(other)) or bool(_written(one) & {*other.reads})


def _touches(phase: Any, written: Collection[Kept]) -> bool:
    return bool({*phase.reads, *_written(phase)} & {*written})


def _written(phase: Any) -> set[Kept]:
    return {*(phase.frees if isinstance(phase, Return) else phase.writes)}


@pytest.mark.sweep
@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", NAMES)
def test_mutants(name: str, ranks: int) -> None:
    """Every change of an edge, a copy, a phase or the order is refused, or the Plan is as right as it was."""
    schedule, plan = checked(name, ranks)
    kept = 0
    for words, mutant in mutants(plan):
        if codes(schedule, mutant):
            continue
        kept += 1
        assert is_equal_in_effect(plan, mutant), words
        handed = [[one.name for one in phase.reads] for phase in visits(mutant)]
        assert handed == [[one.name for one in phase.reads] for phase in visits(plan)], words
    assert kept <= 3 * len(plan.phases)


@pytest.mark.parametrize(("name", "ranks", "params", "landing"), [
    ("attention_ring_backward", 3, {}, "cells"), ("attention_double_ring", 6, {"m": 3}, "cells"),
    ("attention_double_ring", 6, {"m": 3}, "place"),
])  # fmt: skip
def test_mutants_of_attention(name: str, ranks: int, params: dict[str, int], landing: str) -> None:
    """The same of sums that travel behind what they are about, and of what is written piece by piece where it is."""
    found = compiler.check(FOLDER / f"{name}.comm", ranks=ranks, params=params, tune={"landing": landing})
    assert found.visits is not None
    refused = [words for words, mutant in mutants(found.visits) if codes(found.schedule, mutant)]
    assert len(refused) >= 100
    for words, mutant in mutants(found.visits):
        assert words in refused or is_equal_in_effect(found.visits, mutant), words


@pytest.mark.parametrize("name", NAMES)
def test_every_edge_is_needed(name: str) -> None:
    """Without an edge between a launch and a visit the Plan is refused: two accesses of a copy come in no order."""
    schedule, plan = checked(name, 5)
    dropped = 0
    for phase in plan.phases:
        if phase.after:  # type: ignore[union-attr] # all of them have it
            mutant = with_phases(plan, lambda one, old=phase: behind(one, 0) if one is old else one)
            assert codes(schedule, mutant) == ["C640"]
            dropped += 1
    assert dropped >= 4


def test_an_edge_too_many_is_idle() -> None:
    """A launch that waits for a visit it need not wait for is refused as any idle wait."""
    schedule, plan = checked("rotation_ring", 5)
    mutant = with_phases(plan, lambda one: behind(one, 1) if one is launches(plan)[1] else one)
    assert codes(schedule, mutant) == ["C642"]


def test_a_circle_waits_for_ever() -> None:
    """A launch and a visit that wait for each other are refused."""
    schedule, plan = checked("rotation_ring", 5)
    mutant = with_phases(plan, lambda one: behind(one, 2) if one is launches(plan)[0] else one)
    assert codes(schedule, mutant) == ["C641"]


def test_message_names_the_copy() -> None:
    """A race says which copy of which buffer, and which launch and visit."""
    schedule, plan = checked("rotation_ring", 5)
    mutant = with_phases(plan, lambda one: behind(one, 0) if one is launches(plan)[2] else one)
    (found,) = check_plan(schedule, mutant)
    text = render_full(found)
    assert "`kv` (copy 1)" in text
    assert "`launch 2`" in text
    assert "`visit 1`" in text


@pytest.mark.parametrize("name", ["rotation_ring", "rotation_carry"])
def test_launches_follow_each_other(name: str) -> None:
    """A launch is a Plan of its own: many on one heap, ranks held up at random, no race seen by TSan."""
    made = compiler.compile(FOLDER / f"{name}.comm", ranks=2, tune={"lanes": 2, "tile": 256})
    assert isinstance(made, compiler.CompiledSchedule)
    assert made.visits is not None
    random = np.random.default_rng(5)
    for moves, text in zip(segments(made.visits), made.launched, strict=True):
        given = [[random.integers(0, 99, 700).astype(np.int32) for _ in range(2)] for _ in range(4)]
        (buffer,) = {tensor.name for tensor in moves.tensors}
        options = host_run.Options(sanitize=True, max_delay=0.002)
        calls = [{buffer: one} for one in given]
        results = host_run.run_calls(plan_of(made.visits, moves), text, calls, BY_NAME["int32"], options=options)
        for one, result in zip(given, results, strict=True):
            assert [np.array_equal(result.outputs[buffer][rank], one[1 - rank]) for rank in range(2)] == [True, True]


# --- calls on host ranks ----------------------------------------------------------------------------------------------

torch = pytest.importorskip("torch")

from thread_ranks import in_group  # noqa: E402 - after the check for torch

import commdsl  # noqa: E402 - as above


def of_rank(rank: int, size: int, dtype: Any) -> Any:
    return (torch.arange(size) % 97 + 100 * rank).to(dtype)


@pytest.mark.parametrize("tune", [None, {"protocol": "engine"}, {"lanes": 2, "tile": 1024}, {"protocol": "packet"}])
@pytest.mark.parametrize("name", ["rotation_ring", "rotation_direct", "rotation_hamilton"])
def test_every_rank_is_visited(name: str, tune: dict[str, Any] | None) -> None:
    """Each visit is handed the whole block of another rank, call after call, in any size and dtype, and in no order
    between ranks but what data needs."""
    ranks = 3
    op = commdsl.load(name, ranks=ranks, tune=tune)

    def body(rank: int, group: str) -> None:
        for size, dtype in ((1000, torch.float32), (0, torch.float32), (7, torch.int64), (1000, torch.float32)):
            seen: list[Any] = []
            numbers: list[int] = []
            given = of_rank(rank, size, dtype)

            def look(number: int, kv: Any, seen: list[Any] = seen, numbers: list[int] = numbers) -> None:
                numbers.append(number)
                seen.append(kv.clone())

            op.visit(given, look, group=group)
            assert numbers == list(range(ranks))
            assert torch.equal(given, of_rank(rank, size, dtype))
            wanted = torch.stack([of_rank(one, size, dtype) for one in range(ranks)])
            assert torch.equal(torch.stack(seen).sort(0).values, wanted)
            if name == "rotation_ring":
                assert all(torch.equal(one, of_rank((rank - n) % ranks, size, dtype)) for n, one in enumerate(seen))

    in_group(ranks, body)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tune", [None, {"protocol": "engine"}])
def test_what_a_function_writes_travels_on(tune: dict[str, Any] | None, in_place: bool) -> None:
    """A gradient that is carried along comes home with what every rank has added, be it made anew or in place."""
    ranks = 3
    op = commdsl.load("rotation_carry", ranks=ranks, tune=tune)

    def body(rank: int, group: str) -> None:
        for call in range(3):
            kv = of_rank(rank, 500 + call, torch.float64)

            def attend(number: int, kv: Any, acc: Any) -> Any:
                made = kv * (rank + 1) + number
                return acc.add_(made) if in_place else acc + made

            _, acc = op.visit(kv, torch.zeros_like(kv), attend=attend, group=group)
            wanted = sum(kv * (one + 1) + (one - rank) % ranks for one in range(ranks))
            assert torch.equal(acc, wanted)

    in_group(ranks, body)


def test_a_sum_one_step_behind(tmp_path: Path) -> None:
    """Sums that follow their block a step later are the same sums."""
    ranks, path = 3, tmp_path / "behind.comm"
    path.write_text(BEHIND)
    op = commdsl.load(path, ranks=ranks)

    def body(rank: int, group: str) -> None:
        kv = of_rank(rank, 300, torch.float32)
        of = {"grad": lambda number, kv: kv * (rank + 1), "finish": lambda number, acc: acc * 2}
        _, acc = op.visit(kv, torch.zeros_like(kv), group=group, **of)
        assert torch.equal(acc, kv * 12)

    in_group(ranks, body)


def test_buffers_that_move_alike_share_a_kernel(tmp_path: Path) -> None:
    """Keys and values of one ring, of other lengths and types, are launches of one kernel, each on its own."""
    path = tmp_path / "pair.comm"
    path.write_text("""schedule pair for P ranks where P >= 2 {
  inout k
  inout v
  ensure rotation(k, v)
  yield attend(k, v)
  for s in 1 ..< P {
    each r {
      put k -> k @ (r + 1) % P
      put v -> v @ (r + 1) % P
    }
    yield attend(k, v)
  }
}
""")
    plan = compiler.check(path, ranks=3).visits
    assert plan is not None
    assert len(segments(plan)) == 1
    assert len(launches(plan)) == 4
    op = commdsl.load(path, ranks=3)

    def body(rank: int, group: str) -> None:
        seen: list[Any] = []
        given = of_rank(rank, 3000, torch.float32), of_rank(rank, 70, torch.bfloat16)
        op.visit(*given, lambda number, k, v: seen.append((k.clone(), v.clone())), group=group)
        for distance, (k, v) in enumerate(seen):
            owner = (rank - distance) % 3
            assert torch.equal(k, of_rank(owner, 3000, torch.float32))
            assert torch.equal(v, of_rank(owner, 70, torch.bfloat16))

    in_group(3, body)


def test_what_is_made_of_the_same_travels_together() -> None:
    """Keys, and values declared to be like them, are one launch; what a function has made goes in another, behind it.
    Values of another length or type are refused before anything is sent.
    """
    plan = compiler.check(FOLDER / "attention_ring_backward.comm", ranks=4).visits
    assert plan is not None
    assert [described(phase, number) for number, phase in enumerate(launches(plan))] == [
        "launch 0 of attention_ring_backward_segment1: k 0, v 0 -> k 1, v 1",
        "launch 1 of attention_ring_backward_segment1: k 1, v 1 -> k 2, v 2",
        "launch 2 of attention_ring_backward_segment1: ak 1, av 1 -> ak 2, av 2  after visit 1",
        "launch 3 of attention_ring_backward_segment1: k 2, v 2 -> k 1, v 1",
        "launch 4 of attention_ring_backward_segment2: ak 2, av 2, pk 1, pv 1 -> ak 1, av 1  after visit 2",
        "launch 5 of attention_ring_backward_segment3: dk 1, dv 1, ak 1, av 1, pk 2, pv 2 -> dk 2, dv 2, ak 2, av 2  "
        "after visit 3",
    ]
    op = commdsl.load("attention_ring", ranks=2)
    (group, _) = commdsl.threads(2)
    for other in (torch.ones(8, dtype=torch.float64), torch.ones(10)):
        with pytest.raises(commdsl.Error, match=r"`v` is torch.float64, `k` torch.float32|equally long, got"):
            op.visit(torch.ones(8), other, lambda number, k, v: None, group=group)


def test_what_comes_piece_by_piece_stays_where_it_is() -> None:
    """Keys of the next node arrive a piece a launch: each writes its own, none copies what has come before. What a
    visit reads is never written so: it would have to wait for it.
    """
    plan = compiler.check(FOLDER / "attention_double_ring.comm", ranks=12, params={"m": 4}).visits
    assert plan is not None
    words = [described(phase, number).split(": ")[1] for number, phase in enumerate(launches(plan))]
    assert words[:4] == [
        "k 0, v 0 -> kc 1, vc 1, kn 1, vn 1",
        "k 0, v 0 -> kc 2, vc 2, kn 1, vn 1",
        "k 0, v 0 -> kc 1, vc 1, kn 1, vn 1  after visit 1",
        "kn 1, vn 1 -> k 1, v 1",
    ]
    for launch in launches(plan):
        assert not {*launch.reads} & {*launch.writes}
        assert {kept.name for kept in launch.reads} <= {"k", "v"} or {kept.name for kept in launch.reads} == {
            "kn",
            "vn",
        }


def test_a_visit_waits_for_what_it_is_handed(tmp_path: Path) -> None:
    """What other yields wait for is a launch of its own, though it is made of the same and moves alike."""
    path = tmp_path / "two.comm"
    path.write_text("""schedule two for P ranks where P >= 2 {
  input k
  input v like k
  scratch kc
  scratch vc
  ensure rotation(k -> kc)
  ensure rotation(v -> vc)
  yield first(k)
  yield second(v)
  each r {
    put k -> kc @ (r + 1) % P
    put v -> vc @ (r + 1) % P
  }
  yield first(kc)
  yield second(vc)
}
""")
    plan = compiler.check(path, ranks=2).visits
    assert plan is not None
    assert [described(phase, number) for number, phase in enumerate(launches(plan))] == [
        "launch 0 of two_segment1: k 0 -> kc 1",
        "launch 1 of two_segment1: v 0 -> vc 1",
    ]
    assert [phase.after for phase in visits(plan)] == [0, 0, 1, 2, 0]


def test_stacked_and_visited() -> None:
    """The op without a function returns its yields stacked, as ever, beside calls with one."""
    op = commdsl.load("rotation_ring", ranks=2)

    def body(rank: int, group: str) -> None:
        kv = of_rank(rank, 64, torch.float32)
        seen: list[Any] = []
        last = op.visit(kv, lambda number, kv: seen.append(kv.clone()), group=group)
        final, stacked = op(kv, group=group)
        assert torch.equal(stacked, torch.stack(seen))
        assert torch.equal(final, last)
        op.release(group)
        op.visit(kv, lambda number, kv: None, group=group)

    in_group(2, body)


def test_a_function_that_raises() -> None:
    """Where nothing depends on it, the others get theirs and the group goes on; the exception is the function's own."""
    op = commdsl.load("rotation_ring", ranks=2)

    def body(rank: int, group: str) -> None:
        kv = of_rank(rank, 64, torch.float32)

        def fails(number: int, kv: Any) -> None:
            if rank == 0:
                raise KeyError("mine")

        if rank == 0:
            with pytest.raises(KeyError, match="mine"):
                op.visit(kv, fails, group=group)
        else:
            op.visit(kv, fails, group=group)
        seen: list[Any] = []
        op.visit(kv, lambda number, kv: seen.append(kv.clone()), group=group)
        assert torch.equal(seen[1], of_rank(1 - rank, 64, torch.float32))

    in_group(2, body)


def test_a_function_that_raises_before_it_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its result was to travel on, the exception says that the group is broken, and a reset mends it."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", "60")
    op = commdsl.load("rotation_carry", ranks=2)

    def body(rank: int, group: str) -> None:
        kv = of_rank(rank, 64, torch.float32)

        def fails(number: int, kv: Any, acc: Any) -> Any:
            if rank == 0:
                raise KeyError("mine")
            return acc + kv

        if rank == 0:
            with pytest.raises(KeyError) as caught:
                op.visit(kv, kv, fails, group=group)
            assert any("commdsl.reset()" in note for note in caught.value.__notes__)
            with pytest.raises(RuntimeError, match="C957"):
                op.visit(kv, kv, fails, group=group)
        else:
            with pytest.raises(commdsl.PeerError, match="rank 0 gave up: KeyError: 'mine'"):
                op.visit(kv, kv, fails, group=group)
        commdsl.reset(group)
        _, acc = op.visit(kv, torch.zeros_like(kv), lambda number, kv, acc: acc + kv, group=group)
        assert torch.equal(acc, 2 * kv)

    in_group(2, body)


def test_refusals() -> None:
    """What cannot be called says why, before anything is sent."""
    ring, carry = commdsl.load("rotation_ring", ranks=1 + 1), commdsl.load("rotation_carry", ranks=2)
    plain = commdsl.load("allreduce_ring", ranks=2)
    (group, _) = commdsl.threads(2)
    x = torch.ones(4)

    def refused(words: str, call: Callable[[], object]) -> None:
        with pytest.raises(RuntimeError, match=words):
            call()

    def nothing(*_: object) -> None:
        pass

    refused("has no `yield`", lambda: plain.visit(x, nothing, group=group))
    refused("was given none", lambda: ring.visit(x, group=group))
    refused("has no gradient", lambda: ring.visit(x.clone().requires_grad_(), nothing, group=group))
    refused("takes 1 tensor, got 2", lambda: ring.visit(x, x, nothing, group=group))
    refused("call `visit`", lambda: carry(x, x, group=group))


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda acc: None, "NoneType"),
        (lambda acc: (acc, acc), "returned 2 tensors"),
        (lambda acc: acc[:3], r"\(3,\)"),
        (lambda acc: acc.double(), "float64"),
    ],
)
def test_what_a_function_may_return(monkeypatch: pytest.MonkeyPatch, made: Callable[[Any], Any], words: str) -> None:
    """A result of another shape, dtype or number is refused by name."""
    monkeypatch.setenv("COMMDSL_TIMEOUT", "3")
    op = commdsl.load("rotation_carry", ranks=2)

    def body(rank: int, group: str) -> None:
        x = torch.ones(4)
        with pytest.raises(RuntimeError, match=words):
            op.visit(x, x, lambda number, kv, acc: made(acc), group=group)

    in_group(2, body)
