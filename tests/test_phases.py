"""Phases of any schedule that moves: nothing races and nobody is stuck, and what is copied is what the oracle moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import plans
import pytest
from engine_order import Command, Order
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from plans import CELL, Op, changed
from strategies import Program, programs
from test_properties import inputs_of

from commdsl import checks, compiler
from commdsl.ir import interpret
from commdsl.machine import dtypes
from commdsl.machine.carriers import ENGINE
from commdsl.machine.resources import data_dir
from commdsl.program.memory import Rights, Tensor
from commdsl.program.moves import OpKind
from commdsl.program.plan import Plan
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.synchronization import prove
from commdsl.program.sizes import device_launch, tensor_bytes
from commdsl.program.visited import plan_of, segments
from commdsl.runtime.phases import Copy, Flags, phases

ATTENTION = data_dir("schedules") / "attention"

REGION = 1 << 40
"""Bytes between the addresses of two stretches of memory."""

relaxed = settings(
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)


class Machine:
    """Memory of all ranks for some calls in a row, and what each rank starts."""

    def __init__(self, plan: Plan, block_bytes: int, calls: int, *, in_place: bool = False) -> None:
        self.plan = plan
        self.commands: list[Command] = []
        self.memory: dict[int, np.ndarray] = {}
        self._launch = device_launch(plan.moves, block_bytes)
        self._number = 0
        names = [tensor.name for tensor in plan.moves.tensors]
        shared = plan.moves.alias_safe if in_place else ()
        self.same = [names.index(name) if name in shared else place for place, name in enumerate(names)]
        for rank in range(plan.num_ranks):
            self.memory[rank] = np.zeros(plan.symmetric_bytes, np.uint8)
        for call in range(calls):
            for rank in range(plan.num_ranks):
                for place, tensor in enumerate(plan.moves.tensors):
                    self.memory[self.region(call, rank, place)] = np.zeros(tensor_bytes(tensor, block_bytes), np.uint8)
        for rank in range(plan.num_ranks):
            self._start(rank, calls)

    def region(self, call: int, rank: int, tensor: int) -> int:
        plan = self.plan
        return plan.num_ranks + (call * plan.num_ranks + rank) * len(plan.moves.tensors) + self.same[tensor]

    def run(self, order: Order) -> None:
        """Makes the copies in one legal order."""
        for place in order.before:
            copy = order.commands[place].copy
            if copy is not None:
                (to, at), (source, start) = divmod(copy[0], REGION), divmod(copy[1], REGION)
                self.memory[to][at : at + copy[2]] = self.memory[source][start : start + copy[2]]

    def _start(self, rank: int, calls: int) -> None:
        done: frozenset[int] = frozenset()
        for call in range(calls):
            for step in phases(self.plan.moves, rank, self._launch, self.same):
                parts = [step] if isinstance(step, Flags) else step
                made = [self._command(rank, call, part, done) for part in parts]
                self.commands += made
                done |= {command.number for command in made}

    def _command(self, rank: int, call: int, part: Flags | Copy, done: frozenset[int]) -> Command:
        self._number += 1
        if isinstance(part, Flags):
            turn = (*part.signals, *part.waits, part.entered, int(part.advances))
            return Command(rank, self._number, None, done, int, turn=turn)
        moved = self._address(call, rank, *part.dest), self._address(call, rank, *part.source), part.num_bytes
        return Command(rank, self._number, None, done, int, copy=moved)

    def _address(self, call: int, rank: int, base: int, offset: int) -> int:
        """Nothing reaches beyond its memory."""
        ranks, tensors = self.plan.num_ranks, self.plan.moves.tensors
        region = base if base < ranks else self.region(call, rank, base - ranks) if base < ranks + len(tensors) else -1
        if region < 0:
            number, there = divmod(base - ranks - len(tensors), ranks)
            region = self.region(call, there, [at for at, one in enumerate(tensors) if one.lands][number])
        assert offset < len(self.memory[region])
        return region * REGION + offset


def for_engine(plan: Plan, tile_bytes: int = 64) -> Plan:
    return changed(plan, carrier=ENGINE, lanes=1, sms=1, threads=32, tile_bytes=tile_bytes, has_reduction=False)


def orderly(machine: Machine) -> Order:
    """The order of a machine's commands, in which nobody is stuck and nothing races."""
    order = Order(machine.plan, machine.commands)
    assert not order.stuck
    assert not list(order.races())
    return order


@settings(relaxed, max_examples=80)
@given(programs(), st.sampled_from([64, 160]), st.booleans())
def test_any_schedule(program: Program, tile: int, in_place: bool) -> None:
    """Three calls in a row of a schedule that only moves leave what the oracle leaves, in place or not."""
    assume("reduce" not in program.text)
    checked = compiler.check(compiler.read_text(program.text, "drawn.comm", Path()), ranks=program.ranks)
    plan = for_engine(checked.plan, tile)
    calls = [inputs_of(checked, seed) for seed in range(3)]
    reads = [place for place, tensor in enumerate(plan.moves.tensors) if tensor.access is Rights.READ]
    first = plan.moves.tensors[reads[0]]
    machine = Machine(plan, calls[0][first.name][0].nbytes // first.blocks, len(calls), in_place=in_place)
    for call, inputs in enumerate(calls):
        for place in reads:
            for rank, array in enumerate(inputs[plan.moves.tensors[place].name]):
                machine.memory[machine.region(call, rank, place)][:] = array.view(np.uint8)
    machine.run(orderly(machine))
    for call, inputs in enumerate(calls):
        want = interpret.run(checked.schedule, inputs, dtypes.INT32, "sum")
        for place, tensor in enumerate(plan.moves.tensors):
            if tensor.access is Rights.WRITE and not tensor.is_yield:
                written = np.bincount(
                    plan.moves.ops.dest_rank[plan.moves.ops.dest_space == place], minlength=plan.num_ranks
                )
                for rank in np.flatnonzero(written >= tensor.blocks * tensor.cut).tolist():
                    got = machine.memory[machine.region(call, rank, place)].view(np.int32)
                    assert np.array_equal(got, want.outputs[tensor.name][rank])


def staged(num_ranks: int, rotation: int, credits: bool) -> tuple[list[list[Op]], tuple[Tensor, ...], int]:
    """Every rank lays its tensor into a cell of its own, copies it out from there, and pulls from those of others."""
    made = []
    for rank in range(num_ranks):
        peers = [peer for peer in range(num_ranks) if peer != rank]
        free = tuple((peer, ("read", rank), rotation) for peer in peers if credits)
        program = [
            Op(
                OpKind.COPY,
                (CELL, rank, 0),
                ((0, rank, 0),),
                free,
                tuple((peer, "staged") for peer in peers),
                barrier=1,
            ),
            Op(OpKind.COPY, (1, rank, rank), ((CELL, rank, 0),), barrier=1),
        ]
        for peer in peers:
            signals = ((peer, ("read", peer)),) if credits else ()
            waits = ((peer, "staged", 0),)
            program.append(Op(OpKind.COPY, (1, rank, peer), ((CELL, peer, 0),), waits=waits, signals=signals))
        made.append(program)
    return made, plans.gathered(num_ranks), 1


def by_hand() -> Sequence[tuple[str, Plan]]:
    families = {"ring": plans.ring_allgather, "direct": plans.direct_alltoall, "staged": staged}
    return [
        (f"{name}-{rotation}", plans.build(*family(3, rotation, rotation == 1), rotation=rotation))
        for name, family in families.items()
        for rotation in (1, 2)
    ]


@pytest.mark.parametrize(("name", "plan"), by_hand(), ids=[name for name, _ in by_hand()])
def test_by_hand(name: str, plan: Plan) -> None:
    """Plans that push, pull or stage, with one copy of the cells and credits or with two: in order, by every wait."""
    legal = for_engine(plan)
    assert not [found.headline for found in prove(Round(legal.moves))]
    machine = Machine(legal, 300, calls=3)
    orderly(machine)
    for wait in range(len(legal.moves.ops.wait_peer)):
        assert any(Order(legal, machine.commands, {wait}).races()), wait


def hops(name: str, ranks: int) -> list[Plan]:
    """What a shipped schedule of attention launches on the copy engine, in tiles of 4 KB."""
    tune: dict[str, int | str] = {"protocol": "engine", "tile": 4096}
    found = compiler.check(ATTENTION / f"{name}.comm", ranks=ranks, tune=tune).visits
    assert found is not None
    every = (plan_of(found, moves) for moves in segments(found))
    return [plan for plan in every if plan.moves.carrier == ENGINE and plan.moves.num_cells]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "name", ["attention_direct", "attention_ring_backward", "attention_window", "attention_ulysses"]
)
def test_one_hop(name: str, ranks: int) -> None:
    """Of a hop all pieces go at once, beside those of the round before on their way to the tensors: a kernel for the
    flags before each round, and two at the end, however many pieces. Nothing races, nobody is stuck; what a rank awaits
    of a peer counts.
    """
    for plan in hops(name, ranks):
        launch = device_launch(plan.moves, 3 * 4096 + 7)
        for rank in range(ranks):
            steps = phases(plan.moves, rank, launch, range(len(plan.moves.tensors)))
            kernels = [step for step in steps if isinstance(step, Flags)]
            puts = plan.moves.ops.dest_rank[plan.moves.ops.rank_begin[rank] : plan.moves.ops.rank_begin[rank + 1]]
            assert len(kernels) <= launch.rounds + 2
            assert max(map(far(rank), steps)) >= np.count_nonzero(puts != rank)
        machine = Machine(plan, 3 * 4096 + 7, calls=2)
        orderly(machine)
        for alike in awaited(plan):
            assert any(Order(plan, machine.commands, alike).races()), alike


def awaited(plan: Plan) -> list[set[int]]:
    """The waits of a rank for the same peer's signals of as many rounds back: a phase waits for the last of them."""
    ops, found = plan.moves.ops, dict[tuple[int, int, int], set[int]]()
    for row in range(ops.num_ops):
        rank = int(np.searchsorted(ops.rank_begin, row, side="right"))
        for wait in range(ops.wait_begin[row], ops.wait_begin[row + 1]):
            found.setdefault((rank, int(ops.wait_peer[wait]), int(ops.wait_rounds_back[wait])), set()).add(wait)
    return [*found.values()]


def far(rank: int) -> Callable[[Flags | tuple[Copy, ...]], int]:
    """Of a step the number of copies to other ranks."""
    return lambda step: 0 if isinstance(step, Flags) else sum(copy.peer != rank for copy in step)


def test_waves() -> None:
    """What is laid into a cell is there before it is copied out, though no flag stands between."""
    plan = for_engine(plans.build(*staged(3, 2, False), rotation=2))
    steps = phases(plan.moves, 0, device_launch(plan.moves, 64), (0, 1))
    writes, reads = ([n for n, step in enumerate(steps) if is_wave_with(step, dest=d)] for d in (True, False))

    assert min(reads) > min(writes)
    assert not set(writes[:1]) & set(reads)


def is_wave_with(step: Flags | tuple[Copy, ...], *, dest: bool) -> bool:
    """Whether rank 0's own cell is written, or read, by one of the copies."""
    return not isinstance(step, Flags) and any((copy.dest if dest else copy.source)[0] == 0 for copy in step)


def test_nothing_to_do() -> None:
    """A rank whose call moves nothing at all counts its rounds, so that all ranks agree on them."""
    plan = for_engine(plans.build(*plans.direct_alltoall(3, 2, True), rotation=2))
    begin = np.array([0, 0, 0, plan.moves.ops.num_ops], np.int32)
    empty = changed(plan, ops=replace(plan.moves.ops, rank_begin=begin))
    (flags,) = phases(empty.moves, 0, device_launch(plan.moves, 64), (0, 1))

    assert isinstance(flags, Flags)
    assert (flags.signals, flags.waits, flags.entered, flags.advances) == ((0, 0), (0, 0), 2, True)


def test_checks_are_the_bulk_ones() -> None:
    """The flags of such a Plan are proved as those of `bulk` are."""
    made = compiler.check(
        next(Path(__file__).parent.parent.glob("schedules/collectives/allgather_direct.comm")),
        ranks=4,
        tune={"protocol": "engine"},
    )
    broken = changed(
        made.plan, ops=replace(made.plan.moves.ops, wait_rounds_back=made.plan.moves.ops.wait_rounds_back + 1)
    )

    assert not checks.check_plan(made.schedule, made.plan)
    assert checks.check_plan(made.schedule, broken)
