"""The proof on the Plan: accepts what is ordered, refuses every way to break it, at 3 ranks and at 1,024."""

from __future__ import annotations

import ast
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import ir_builder
import numpy as np
import pytest
from brute_force import broken_laws, has_idle_flag, without_wait
from collectives import SCHEDULES, shipped
from plans import FAMILIES, Op, Programs, big_ring_allreduce, build, changed, gathered

from commdsl import compiler
from commdsl.language.diagnostics import InternalError
from commdsl.machine import resources
from commdsl.program.memory import Rights, Tensor
from commdsl.program.moves import CELL, OpKind
from commdsl.program.plan import Plan
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.synchronization import prove
from commdsl.program.verify import verify

PROOF, ROUNDS, CLOCKS, HAZARDS, ORDER, FLAGS, TIMELINE = (
    import_module(f"commdsl.program.proof.{name}")
    for name in ("synchronization", "rounds", "clocks", "hazards", "order", "flags", "timeline")
)
RACES = {"C202", "C205"}


def made(family: str, num_ranks: int, rotation: int, credits: bool) -> Plan:
    programs, tensors, num_cells = FAMILIES[family](num_ranks, rotation, credits)
    plan = build(programs, tensors, num_cells, rotation)
    verify(plan)
    return plan


def codes(plan: Plan) -> list[str]:
    return [diagnostic.code for diagnostic in prove(Round(plan.moves))]


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("family", FAMILIES)
def test_depth(family: str, num_ranks: int) -> None:
    """One copy of the cells needs credits, two copies need none, and with two copies a credit is idle."""
    assert codes(made(family, num_ranks, 1, credits=True)) == []
    assert codes(made(family, num_ranks, 1, credits=False)) == ["C205"]
    assert codes(made(family, num_ranks, 2, credits=False)) == []
    assert codes(made(family, num_ranks, 2, credits=True)) == ["C204"]


@pytest.mark.parametrize("num_ranks", [2, 3, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_dropped_wait_is_a_race(family: str, num_ranks: int) -> None:
    """No flag of a proved Plan can go."""
    for rotation in (1, 2):
        plan = made(family, num_ranks, rotation, credits=rotation == 1)
        for wait in range(len(plan.moves.ops.wait_peer)):
            assert set(codes(without_wait(plan, wait))) <= RACES
            assert codes(without_wait(plan, wait))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_dropped_signal_leaves_a_wait_alone(family: str) -> None:
    """A wait whose signal is gone can never be satisfied, or is satisfied too early."""
    programs, tensors, num_cells = FAMILIES[family](3, 1, credits=True)
    for rank, place, op in ((r, i, op) for r, program in enumerate(programs) for i, op in enumerate(program)):
        for gone in range(len(op.signals)):
            fewer = replace(op, signals=op.signals[:gone] + op.signals[gone + 1 :])
            assert codes(build(_with(programs, rank, place, fewer), tensors, num_cells, 1)) == ["C203"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_early_wait_is_a_race(family: str) -> None:
    """A wait for the signal before, or for the round before, lets an access through too early."""
    plan = made(family, 3, 1, credits=True)
    for column, change in (("wait_ordinal", -1), ("wait_rounds_back", 1)):
        for wait in range(len(plan.moves.ops.wait_peer)):
            table = getattr(plan.moves.ops, column).copy()
            table[wait] += change
            if table[wait] >= 1:
                mutant = changed(plan, ops=replace(plan.moves.ops, **{column: table}))
                assert set(codes(mutant)) & RACES, (column, wait)


def test_dropped_barriers() -> None:
    """What one rank's threads hand to each other needs a block barrier, also from one round to the next."""
    tensors = Tensor("x", Rights.READ, 1, 1), Tensor("y", Rights.WRITE, 1, 1)
    stage = Op(OpKind.COPY, (CELL, 0, 0), ((0, 0, 0),), barrier=1)
    fetch = Op(OpKind.COPY, (1, 0, 0), ((CELL, 0, 0),), barrier=1)

    assert codes(build([[stage, fetch]], tensors, 1, 1)) == []
    assert codes(build([[stage, replace(fetch, barrier=0)]], tensors, 1, 1)) == ["C206"]
    bare = [[replace(stage, barrier=0), fetch]]
    assert codes(build(bare, tensors, 1, 1)) == ["C206"]  # against the reading of the round before
    assert codes(build(bare, tensors, 1, 2)) == []  # with two copies there is a barrier in the round between


def test_size_classes() -> None:
    """A cell is read as the piece that was written there."""
    tensors = Tensor("x", Rights.READ, 1, 3), Tensor("y", Rights.WRITE, 1, 3)
    stage = Op(OpKind.COPY, (CELL, 0, 0), ((0, 0, 1),), barrier=1, size_class=(3, 1))
    fetch = Op(OpKind.COPY, (1, 0, 1), ((CELL, 0, 0),), barrier=1, size_class=(3, 1))

    assert codes(build([[stage, fetch]], tensors, 1, 1)) == []
    other = replace(fetch, dest=(1, 0, 2), size_class=(3, 2))
    assert codes(build([[stage, other]], tensors, 1, 1)) == ["C207"]
    assert codes(build([[fetch, stage]], tensors, 1, 1)) == ["C207"]


def test_in_place() -> None:
    """A buffer may be one memory only if no chunk is read as it came in after it was written."""
    tensors = Tensor("x", Rights.READ, 1, 1), Tensor("x", Rights.WRITE, 1, 1)
    stage = Op(OpKind.COPY, (CELL, 0, 0), ((0, 0, 0),), barrier=1)
    fetch = Op(OpKind.COPY, (1, 0, 0), ((CELL, 0, 0),), barrier=1)
    late = Op(OpKind.COPY, (CELL, 0, 1), ((0, 0, 0),), barrier=1)

    assert codes(build([[stage, fetch]], tensors, 1, 1, alias_safe=("x",))) == []
    assert codes(build([[stage, fetch, late]], tensors, 2, 1)) == []
    assert codes(build([[stage, fetch, late]], tensors, 2, 1, alias_safe=("x",))) == ["C208"]


def test_deadlock_shows_the_circle() -> None:
    """Ranks that all wait first: the message names each once, in the order in which they wait."""
    programs: Programs = []
    for rank in range(3):
        after = (rank + 1) % 3
        put = Op(
            OpKind.COPY,
            (CELL, after, 0),
            ((0, rank, 0),),
            waits=((after, "ready", 0),),
            signals=(((rank - 1) % 3, "ready"),),
        )
        programs.append([put])
    (found,) = prove(Round(build(programs, gathered(3), 1, 1).moves))

    assert found.code == "C201"
    assert found.headline == "3 ranks wait for each other"
    assert found.notes[0] == "the circle: 0 -> 1 -> 2 -> 0"


def test_deadlock_without_symmetry() -> None:
    """A circle of two among four ranks, one of which waits at its end."""
    programs: Programs = [[], [], [], []]
    for rank, peer in ((1, 3), (3, 1), (0, 1)):
        programs[rank].append(
            Op(OpKind.COPY, (1, rank, 0), ((0, rank, 0),), waits=((peer, rank, 0),), signals=((peer, peer),))
        )
    programs[1][0] = replace(programs[1][0], signals=((3, 3), (0, 0)))
    (found,) = prove(Round(build(programs, gathered(4), 0, 1).moves))

    assert found.code == "C201"
    assert found.notes[0] == "the circle: 1 -> 3 -> 1"


def test_the_counterexample() -> None:
    """A race names the place, both accesses, the rounds, and how much one rank knows of the other."""
    plan = made("ring_allgather", 3, 1, credits=True)
    (found,) = prove(Round(without_wait(plan, 1).moves))

    assert found.code == "C202"
    assert found.headline == "two ranks touch cell 0 of rank 0 in no order"
    assert found.primary.text == "operation 2 of rank 0 (s = 3) reads it in round 0"
    assert [label.text for label in found.secondary] == ["operation 1 of rank 2 (s = 3) writes it in round 0"]
    assert found.notes[0] == (
        "no chain of flags leads from operation 1 of rank 2 to operation 2 of rank 0: "
        "rank 0 then knows nothing done of rank 2"
    )


def test_an_unheard_signal() -> None:
    """A signal that no wait is for is named with its ordinal."""
    programs, tensors, num_cells = FAMILIES["direct_alltoall"](3, 2, credits=False)
    last = programs[1][-1]
    programs[1][-1] = replace(last, signals=((0, "extra"),))
    (found,) = prove(Round(build(programs, tensors, num_cells, 2).moves))

    assert found.code == "C204"
    assert "operation 4 of rank 1 (s = 3) raises signal 2 to rank 0" in found.primary.text


# --- a second opinion -------------------------------------------------------------------------------------------------


def _with(programs: Programs, rank: int, place: int, op: Op) -> Programs:
    changed = [list(program) for program in programs]
    changed[rank][place] = op
    return changed


def _agree(plan: Plan) -> tuple[str, ...]:
    """What the proof says, which must be one of the laws that are broken, or an idle flag if none is."""
    found = codes(plan)
    broken = broken_laws(plan)
    if not broken and has_idle_flag(plan):
        broken = {"C204"}
    assert len(found) == (1 if broken else 0), (found, broken)
    assert set(found) <= broken
    return tuple(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_operations(family: str) -> None:
    """Swapping neighbouring groups is refused, or the second opinion finds nothing wrong either."""
    seen: Counter[tuple[str, ...]] = Counter()
    programs, tensors, num_cells = FAMILIES[family](3, 1, credits=True)
    for rank, program in enumerate(programs):
        begins = [place for place, op in enumerate(program) if not op.joined] + [len(program)]
        for first, second, end in zip(begins, begins[1:], begins[2:], strict=False):
            swapped = list(programs)
            swapped[rank] = program[:first] + program[second:end] + program[first:second] + program[end:]
            seen[_agree(build(swapped, tensors, num_cells, 1))] += 1
    assert set(seen) - {()}, "no swap was refused"


def _mutants(seed: int, count: int) -> Iterator[Plan]:
    """Plans of the families with up to three changes, most of them wrong."""
    pick = random.Random(seed)
    for number in range(count):
        num_ranks, rotation = pick.choice([2, 3, 3, 4]), pick.choice([1, 1, 2, 3])
        programs, tensors, num_cells = FAMILIES[pick.choice(list(FAMILIES))](num_ranks, rotation, pick.random() < 0.6)
        for change in range(pick.choice([0, 1, 1, 2, 3])):
            rank = pick.randrange(num_ranks)
            place = pick.randrange(len(programs[rank]))
            programs[rank][place] = _changed(pick, programs, programs[rank][place], rank, num_cells, (number, change))
        plan = build(programs, tensors, num_cells, rotation)
        if _is_legal(plan):
            yield plan


def _is_legal(plan: Plan) -> bool:
    """Whether the tables are those of a Plan: the proof may assume it."""
    try:
        verify(plan)
    except InternalError:
        return False
    return True


def _changed(pick: random.Random, programs: Programs, op: Op, rank: int, num_cells: int, tag: object) -> Op:
    cell = CELL, pick.randrange(len(programs)), pick.randrange(num_cells)
    back = pick.choice([0, 0, 1, 2])
    match pick.choice(["wait", "signal", "back", "source", "dest", "barrier", "flag"]):
        case "wait":
            return replace(op, waits=op.waits[1:])
        case "signal":
            return replace(op, signals=op.signals[1:])
        case "back" if op.waits:
            peer, awaited, _ = op.waits[-1]
            return replace(op, waits=(*op.waits[:-1], (peer, awaited, back)))
        case "source":
            return replace(op, sources=(cell, *op.sources[1:]))
        case "dest":
            return replace(op, dest=cell)
        case "barrier":
            return replace(op, barrier=1 - op.barrier)
        case _:
            peer = pick.choice([other for other in range(len(programs)) if other != rank])
            place = pick.randrange(len(programs[peer]))
            raiser = programs[peer][place]
            programs[peer][place] = replace(raiser, signals=(*raiser.signals, (rank, tag)))
            return replace(op, waits=(*op.waits, (peer, tag, back)))


def test_random_plans_agree_with_brute_force() -> None:
    """The proof and the exhaustive search say the same of right and wrong Plans, and all laws are met."""
    seen = Counter(_agree(plan) for plan in _mutants(1, 250))

    assert set(seen) >= {(), ("C201",), ("C202",), ("C203",), ("C204",), ("C205",), ("C207",)}


def test_forms_of_clocks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turned clocks, clocks of all ranks, and these in narrow blocks of columns give one verdict."""
    for plan in _mutants(2, 150):
        one = list(prove(Round(plan.moves)))
        with monkeypatch.context() as patched:
            patched.setattr(ROUNDS, "pattern", lambda _: None)
            every = list(prove(Round(plan.moves)))
            patched.setattr(CLOCKS, "BLOCK_ENTRIES", 1)
            narrow = list(prove(Round(plan.moves)))
        assert [d.code for d in one] == [d.code for d in every]
        assert every == narrow


def test_slices_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking at few accesses at a time changes nothing."""
    for plan in _mutants(3, 100):
        whole = list(prove(Round(plan.moves)))
        with monkeypatch.context() as patched:
            patched.setattr(ORDER, "SLICE", 2)
            patched.setattr(HAZARDS, "SLICE", 2)
            assert [d.code for d in prove(Round(plan.moves))] == [d.code for d in whole]


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_small_rings(num_ranks: int) -> None:
    """The ring made as arrays is a right Plan: the second opinion agrees where it can."""
    plan = big_ring_allreduce(num_ranks, 1)
    verify(plan)

    assert codes(plan) == []
    assert num_ranks > 3 or broken_laws(plan) == set()


def test_a_thousand_ranks() -> None:
    """A ring all-reduce of 4.2 million operations is proved in bounded memory, and a fault in it is found."""
    plan = big_ring_allreduce(1024, 1)
    tracemalloc.start()
    try:
        verify(plan)
        assert codes(plan) == []
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 500e6

    early = plan.moves.ops.wait_ordinal.copy()
    early[early == 1500] = 1499
    assert codes(changed(plan, ops=replace(plan.moves.ops, wait_ordinal=early))) == ["C202"]


# --- what the compiler makes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 5, 8])
def test_lowered_plans(num_ranks: int) -> None:
    """The compiler's Plans are proved; without a wait, or with one copy of the cells for two, they are not."""
    from commdsl.program.lower import lower

    for schedule in (ir_builder.ring_allreduce(num_ranks), ir_builder.ring_rotation(num_ranks)):
        plan = lower(schedule)
        verify(plan)
        assert codes(plan) == []
        for wait in range(0, len(plan.moves.ops.wait_peer), 3):
            assert set(codes(without_wait(plan, wait))) & RACES
        if plan.moves.rotation > 1:
            assert codes(changed(plan, rotation=1)) == ["C205"]
        bare = changed(plan, ops=replace(plan.moves.ops, barrier=np.zeros_like(plan.moves.ops.barrier)))
        assert set(codes(bare)) <= {"C206", "C208"}


def test_one_rank() -> None:
    """A schedule of one rank has nothing to order, and nothing to average over."""
    from commdsl.program.lower import lower

    plan = lower(ir_builder.ring_allreduce(1))
    verify(plan)

    assert codes(plan) == []


SHIPPED = [str(path.relative_to(SCHEDULES)) for path in shipped()]


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_schedules(name: str) -> None:
    """The Plan of a shipped schedule on 3 or 4 ranks is proved, by brute force too.

    It is refused without any one of its waits, with one a signal early, and with one copy of its cells if it has two.
    """
    ranks = 3 if "hamilton" in name else 4  # 4 ranks have no decomposition into cycles
    plan = compiler.check(resources.data_dir("schedules") / name, ranks=ranks).plan

    assert broken_laws(plan, extra_rounds=0) == set()
    for wait in range(len(plan.moves.ops.wait_peer)):
        assert set(codes(without_wait(plan, wait))) & RACES
        early = plan.moves.ops.wait_ordinal.copy()
        early[wait] -= 1
        if early[wait]:
            assert set(codes(changed(plan, ops=replace(plan.moves.ops, wait_ordinal=early)))) & RACES
    assert plan.moves.rotation == 1 or codes(changed(plan, rotation=1)) == ["C205"]


@pytest.mark.parametrize("name", ["allreduce_ring", "allreduce_oneshot", "reduce_tree", "allgather_recursive_doubling"])
def test_shipped_barriers(name: str) -> None:
    """A block barrier dropped from a shipped schedule is refused exactly where the second opinion misses it."""
    plan = compiler.check(resources.data_dir("schedules") / "collectives" / f"{name}.comm", ranks=4).plan
    plan = changed(plan, alias_safe=())
    for op in np.flatnonzero(plan.moves.ops.barrier).tolist():
        barrier = plan.moves.ops.barrier.copy()
        barrier[op] = 0
        bare = changed(plan, ops=replace(plan.moves.ops, barrier=barrier))
        assert set(codes(bare)) == broken_laws(bare, extra_rounds=0)


SHARED = ("messages", "computes", "meaning", "values", "carries")


def test_the_proof_shares_nothing_with_the_derivation() -> None:
    """Flags and data are judged without the code that derived them, else both could be wrong together."""
    others = (import_module(f"commdsl.program.proof.{name}") for name in SHARED)
    for module in (PROOF, ROUNDS, CLOCKS, HAZARDS, ORDER, FLAGS, TIMELINE, *others):
        imported = {
            node.module
            for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8")))
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("commdsl")
        }
        assert {name for name in imported if not name.startswith(("commdsl.checks", "commdsl.program.proof"))} <= {
            "commdsl.language.diagnostics",
            "commdsl.language.source",
            "commdsl.ir.dispatches",
            "commdsl.ir.marks",  # random numbers of a process, of which nothing is derived
            "commdsl.ir.functions",  # what statements mean
            "commdsl.ir.schedules",
            "commdsl.language.kinds",
            "commdsl.program.memory",
            "commdsl.program.moves",
            "commdsl.program.actors",
            "commdsl.program.tasks",
            "commdsl.program.tile_tasks",
            "commdsl.program.launches",
            "commdsl.program.phases",
            "commdsl.program.plan",
            "commdsl.program.torus",
        }
