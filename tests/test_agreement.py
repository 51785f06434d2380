"""Ranks that do not make the same calls hear so: each raises an error with both sides, whatever differs."""

from __future__ import annotations

import gc
import random
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dispatch_plans import Case
from test_dispatch_torch import Rank, on_ranks

import commdsl
from commdsl import compiler
from commdsl.build.emit import emit
from commdsl.commands.dump_plans import static_lines
from commdsl.machine.resources import data_dir
from commdsl.planner.chance import Draw, random_plan
from commdsl.program.agree import BEHIND
from commdsl.program.desk import SLOTS
from commdsl.program.phases import Ranks
from commdsl.program.plan import Plan
from commdsl.program.proof.agreement import agreement
from commdsl.program.proof.packets import heard_in_a_round
from commdsl.program.proof.rounds import Round
from commdsl.program.sizes import device_launch
from commdsl.runtime.errors import AgreementError, BrokenGroupError, PeerError
from commdsl.runtime.kernel import grid_of

SECONDS = 1000.0
"""The time-out: far more than a test may take, so a disagreement that is heard of is heard of before."""

Call = Callable[[str], object]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMDSL_TIMEOUT", str(SECONDS))


class Group:
    """Threads of this process as ranks, each doing what it is given, at once."""

    def __init__(self, ranks: int) -> None:
        self.names = commdsl.threads(ranks)
        self.pool = ThreadPoolExecutor(ranks)

    def run(self, *calls: Call) -> list[Any]:
        """What each rank's call returns, or raises."""
        futures = [self.pool.submit(call, name) for call, name in zip(calls, self.names, strict=True)]
        return [future.exception() or future.result() for future in futures]

    def all(self, call: Call) -> list[Any]:
        return self.run(*[call] * len(self.names))


def of(schedule: Any, elements: int = 16, dtype: torch.dtype = torch.float32, **options: Any) -> Call:
    return lambda name: schedule(torch.ones(elements, dtype=dtype), group=name, **options)


def tuned(name: str, ranks: int, protocol: str) -> Any:
    return commdsl.load(name, ranks=ranks, tune={"protocol": protocol})


def then(*calls: Call) -> Call:
    def run(name: str) -> None:
        for call in calls:
            call(name)

    return run


RING, TWOSHOT = "allreduce_ring", "allreduce_twoshot"
PROTOCOLS = ("bulk", "packet", "line")
CASES: dict[str, tuple[Callable[[Any, Any], tuple[Call, Call]], tuple[str, str]]] = {
    "size": (lambda ring, _: (of(ring, 16), of(ring, 8)), ("on 64 bytes of float32", "on 32 bytes of float32")),
    "dtype": (lambda ring, _: (of(ring, 16), of(ring, 32, torch.bfloat16)), ("float32, sum", "bfloat16, sum")),
    "reduction": (lambda ring, _: (of(ring, op="max"), of(ring, op="sum")), ("float32, max", "float32, sum")),
    "schedule": (lambda ring, two: (of(ring), of(two)), (RING, TWOSHOT)),
    "nothing": (lambda ring, _: (then(of(ring, 0), of(ring)), of(ring)), ("on 0 bytes", "on 64 bytes")),
    "order": (
        lambda ring, _: (then(of(ring), of(ring, 8)), then(of(ring, 8), of(ring))),
        ("on 64 bytes", "on 32 bytes"),
    ),
    "one more": (lambda ring, _: (then(of(ring), of(ring, 8)), of(ring, 8)), ("on 64 bytes", "on 32 bytes")),
}
"""What rank 0 and rank 1 call, and what each is told of them."""


@pytest.mark.parametrize("protocols", [("bulk", "bulk"), ("packet", "line"), ("packet", "bulk")], ids="-".join)
@pytest.mark.parametrize("case", CASES)
def test_different_calls_are_named(case: str, protocols: tuple[str, str]) -> None:
    """Both ranks raise AgreementError, no time-out, both messages name both sides; after a reset the group is right."""
    group = Group(2)
    ring, two = (tuned(name, 2, protocol) for name, protocol in zip((RING, TWOSHOT), protocols, strict=True))
    group.all(then(of(ring), of(two)))
    make, words = CASES[case]
    errors = group.run(*make(ring, two))

    for error in errors:
        assert isinstance(error, AgreementError), error
        assert all(word in str(error) for word in words), error
        assert "rank 0 calls" in str(error)
        assert "rank 1 calls" in str(error) or "where rank 1" in str(error)
    group.all(commdsl.reset)
    assert all(torch.equal(found, torch.full((16,), 2.0)) for found in group.all(of(ring)))


def test_same_calls_agree() -> None:
    """Many calls of many sizes, dtypes and operations, on ranks that take their time, agree."""
    group, dice = Group(3), random.Random(5)
    ring = commdsl.load(RING, ranks=3)
    calls = [of(ring, dice.choice((0, 5, 300)), op=dice.choice(("sum", "max"))) for _ in range(40)]

    assert group.all(then(*calls)) == [None] * 3


def test_a_rank_that_is_late_raises_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others have given up when it comes: its call raises, and does not return a result of half a call."""
    group, late = Group(2), threading.Event()
    ring = commdsl.load(RING, ranks=2)
    group.all(of(ring))
    monkeypatch.setenv("COMMDSL_TIMEOUT", "0.3")
    short = Group(2)
    short.all(of(ring))

    def sleeping(name: str) -> object:
        assert late.wait(SECONDS)
        return of(ring)(name)

    def giving_up(name: str) -> object:
        try:
            return of(ring)(name)
        finally:
            late.set()

    first, second = short.run(sleeping, giving_up)
    assert isinstance(first, PeerError)
    assert first.rank == 1
    assert re.fullmatch(r"gave up: rank 1 waited 0.3 s for rank 0 at .*; rank 0 never entered the call", first.reason)
    assert isinstance(second, commdsl.CommTimeout)


def test_who_hears_nobody_is_told_some_calls_later() -> None:
    """The root of a broadcast waits for nobody, so it learns a few calls later that the others call something else."""
    group = Group(2)
    sends = commdsl.load("broadcast_direct", ranks=2)
    group.all(of(sends))
    root, other = group.run(then(*[of(sends)] * (BEHIND + 3)), of(sends, 8))

    assert isinstance(other, AgreementError)
    assert isinstance(root, AgreementError | BrokenGroupError)


def test_what_is_raised_is_let_go_of() -> None:
    """An error of a call, or of the look after the last call, is nobody's once the group is reset: no cycle keeps it,
    and with it what the caller's frames hold.
    """
    group, told = Group(2), threading.Event()
    sends = commdsl.load("broadcast_direct", ranks=2)
    group.all(of(sends))

    def root(name: str) -> None:
        of(sends)(name)
        assert told.wait(SECONDS)
        sends.synchronize(group=name)

    def other(name: str) -> None:
        try:
            of(sends, 8)(name)
        finally:
            told.set()

    gc.disable()
    try:
        errors = [(type(error), weakref.ref(error)) for error in group.run(root, other)]
        group.all(commdsl.reset)
        assert [(kind, kept()) for kind, kept in errors] == [(AgreementError, None)] * 2
    finally:
        gc.enable()


@pytest.mark.parametrize("protocol", ["packet", "line"])
def test_data_that_carries_flags_carries_the_call(protocol: str) -> None:
    """No block is launched for it, whatever the size, and a call with nothing to move is told as well: by one word."""
    plan = compiler.compile(
        data_dir("schedules") / "collectives" / f"{RING}.comm", ranks=3, tune={"protocol": protocol}
    ).plan
    none, some = device_launch(plan.moves, 0), device_launch(plan.moves, 1 << 16)

    assert grid_of(plan, some)[0] == some.blocks(plan.moves)
    assert (none.active_lanes, none.rounds, grid_of(plan, none)[0]) == (1, 1, 1)
    assert "the first word of every operation carries the call" in "\n".join(static_lines(plan))


def test_the_same_text_elsewhere_is_the_same_schedule(tmp_path: Any) -> None:
    """Two ranks read one text under two names: their calls agree."""
    text = (data_dir("schedules") / "collectives" / f"{RING}.comm").read_text()
    for name in "ab":
        (tmp_path / f"{name}.comm").write_text(text)
    ops = [commdsl.load(tmp_path / f"{name}.comm", ranks=2) for name in "ab"]
    found = Group(2).run(*map(of, ops))

    assert all(torch.equal(one, torch.full((16,), 2.0)) for one in found)


def test_whom_a_rank_hears_is_whom_it_waits_for() -> None:
    """Ring: all, through the one before; a broadcast's root: nobody. The kernel's text says so."""
    folder = data_dir("schedules") / "collectives"
    wanted = {
        RING: lambda rank, peer: peer != rank,
        "alltoall_direct": lambda rank, peer: peer != rank,
        "broadcast_direct": lambda rank, peer: rank != 0 and peer == 0,
    }
    for name, is_heard in wanted.items():
        plan = compiler.compile(folder / f"{name}.comm", ranks=4).plan
        matrix = np.array([[is_heard(rank, peer) for peer in range(4)] for rank in range(4)])

        assert (plan.agree.heard == matrix).all(), name
        bits = [sum(1 << peer for peer in range(4) if matrix[rank, peer]) for rank in range(4)]
        assert all(f"0x{word:x}u" in emit(plan).text for word in bits)


@pytest.mark.parametrize("protocol", ["bulk", "packet", "line"])
def test_whom_a_rank_hears_is_all_that_the_proofs_find(protocol: str) -> None:
    """Of every collective that ships, by what the clocks of its lanes say at the end of a round."""
    for path in sorted((data_dir("schedules") / "collectives").glob("*.comm")):
        plan = compiler.check(path, ranks=8, tune={"protocol": protocol}).plan
        found = heard_in_a_round(Round(plan.moves))

        assert (plan.agree.heard == (found & ~np.eye(8, dtype=np.bool_))).all(), path.name


# --- at random --------------------------------------------------------------------------------------------------------


DTYPES = (torch.float32, torch.int32, torch.bfloat16)


def sequence(
    dice: random.Random, ops: Sequence[Any], dtypes: Sequence[torch.dtype], length: int = 5
) -> list[tuple[int, int, torch.dtype, str]]:
    return [
        (dice.randrange(len(ops)), dice.choice((0, 12, 24, 480)), dice.choice(dtypes), dice.choice(("sum", "max")))
        for _ in range(length)
    ]


def disturbed(dice: random.Random, calls: list[tuple[int, int, torch.dtype, str]], ops: Sequence[Any]) -> list[Any]:
    """The sequence with one thing changed: a size, a dtype, an operation, the order, a call more or less."""
    found, at = list(calls), dice.randrange(len(calls) - 1)
    op, size, dtype, name = found[at]
    match dice.randrange(5):
        case 0:
            found[at] = (op, dice.choice([one for one in (0, 12, 24, 480) if one != size]), dtype, name)
        case 1:
            found[at] = (op, size, torch.int32 if dtype != torch.int32 else torch.float32, name)
        case 2:
            found[at] = (op, size, dtype, "max" if name == "sum" else "sum")
        case 3:
            found[at : at + 2] = found[at + 1], found[at]
        case _:
            found[at] = (dice.choice([one for one in range(len(ops)) if one != op]), size, dtype, name)
    return found


def disagree(seed: int, every: bool) -> None:
    """Whatever one of 2 to 4 ranks does otherwise, every rank raises a named error, and none hangs."""
    dice = random.Random(seed)
    group = Group(dice.choice((2, 3, 4)))
    ranks = len(group.names)
    protocols = [dice.choice(PROTOCOLS) if every else PROTOCOLS[(ranks + at) % 3] for at in range(2)]
    ops = [tuned(name, ranks, protocol) for name, protocol in zip((RING, TWOSHOT), protocols, strict=True)]
    group.all(then(*map(of, ops)))
    calls = sequence(dice, ops, DTYPES if every else DTYPES[:2])
    other = disturbed(dice, calls, ops)
    odd = dice.randrange(ranks)
    runs = [other if rank == odd else calls for rank in range(ranks)]
    made = [then(*(of(ops[op], size, dtype, op=name) for op, size, dtype, name in run)) for run in runs]
    found = group.run(*made)

    if other == calls:
        assert found == [None] * ranks
    else:
        assert all(isinstance(one, AgreementError | PeerError) for one in found), (seed, found)
        assert any(isinstance(one, AgreementError) for one in found), (seed, found)


@pytest.mark.sweep
@pytest.mark.parametrize("block", range(40))
def test_a_thousand_random_disagreements(block: int, request: pytest.FixtureRequest) -> None:
    """Sizes, dtypes, operations, schedules and order that differ, 25 a case: named errors every time. Each number of
    ranks has a protocol of its own for each schedule and two dtypes, and any in a run of all sweeps: each is a kernel
    to build.
    """
    for seed in range(25 * block, 25 * block + 25):
        disagree(seed, request.config.getoption("--sweep") == "all")


# --- plans of a dispatch ----------------------------------------------------------------------------------------------


def test_other_dispatch_plans_are_named() -> None:
    """Each rank follows a right plan, but not the same: both raise, and say which plan each follows."""
    cases = [Case(random_plan(Draw(2, 40, empty=0.0), seed)) for seed in (1, 2)]

    def work(rank: Rank) -> Any:
        sender, route = rank.sender(cases, "rows"), rank.route(cases[rank.number])
        tensors = rank.tensors((route.rows, route.rows))
        with pytest.raises(AgreementError, match=r"by plan [0-9a-f]{8}.* by plan [0-9a-f]{8}") as caught:
            sender.dispatch_qkv(*tensors, route)
        return str(caught.value)

    assert all("rank 0" in text and "rank 1" in text for text in on_ranks(2, work))


# --- the law ----------------------------------------------------------------------------------------------------------


def agreeing(name: str = RING) -> Plan:
    return compiler.compile(data_dir("schedules") / "collectives" / f"{name}.comm", ranks=3).plan


@pytest.mark.parametrize("tells", [Ranks.OWN, Ranks.OTHERS])
def test_who_tells_too_few_is_refused(tells: Ranks) -> None:
    """A rank that leaves out others, or itself, breaks C211."""
    plan = agreeing()

    assert [
        found.code for found in agreement(replace(plan, agree=replace(plan.agree, tells=tells)), Round(plan.moves))
    ] == ["C211"]


@pytest.mark.parametrize("behind", [-1, SLOTS - 1, SLOTS])
def test_words_that_are_lost_are_refused(behind: int) -> None:
    """A word that is written again before it is read breaks C211."""
    plan = agreeing()

    assert [
        found.code for found in agreement(replace(plan, agree=replace(plan.agree, behind=behind)), Round(plan.moves))
    ] == ["C211"]


@pytest.mark.parametrize("name", [RING, TWOSHOT, "alltoall_direct", "broadcast_direct"])
def test_every_wait_in_vain_is_refused(name: str) -> None:
    """Of every pair of ranks: to hear one that the Plan does not wait for breaks C211, to hear fewer does not."""
    plan = agreeing(name)
    assert not list(agreement(plan, Round(plan.moves)))
    for rank, peer in np.argwhere(~np.eye(3, dtype=bool)).tolist():
        heard = plan.agree.heard.copy()
        heard[rank, peer] ^= True
        codes = [
            found.code for found in agreement(replace(plan, agree=replace(plan.agree, heard=heard)), Round(plan.moves))
        ]

        assert codes == ([] if plan.agree.heard[rank, peer] else ["C211"])
