"""Ranks that are far, on host ranks: puts as early and as late as NVSHMEM's may be, for all peers and for some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from collectives import main_case, shipped
from host_dispatch import chained, launched, program
from host_keys import back_of, declared, kernel
from plans import changed
from proved import given
from test_dispatch_kernel import GOES_STRAIGHT, MISTAKES, reused, same, storm, with_phases
from test_keys import equal, numbers, rank_of, returning, summed
from test_keys import same as same_received
from test_keys import storm as keyed
from test_schedules import SMALL_TILE, random_values, same_bits

from commdsl import compiler
from commdsl.build.emit import Emitted, emit
from commdsl.build.host_keys import back, there
from commdsl.build.host_ranks import DataRaceError, Kernel, RowsError, Running, built
from commdsl.build.host_rows import RowsCall, run_calls
from commdsl.build.host_run import Options
from commdsl.build.host_run import run_calls as run_chunks
from commdsl.ep import simulate
from commdsl.language.diagnostics import InternalError
from commdsl.machine.carriers import PACKET
from commdsl.machine.config import from_environment
from commdsl.machine.dtypes import BFLOAT16, INT32
from commdsl.machine.resources import data_dir
from commdsl.program.arguments import FAR, heaps
from commdsl.program.memory import Transport
from commdsl.program.plan import Plan
from commdsl.program.timeouts import BAD_COUNT, CommTimeout
from commdsl.program.verify import verify

FAR_PLANS = {
    "all far": (0, 1, 2, 3),
    "two nodes": (0, 0, 1, 1),
    "one apart": (0, 1, 0, 0),
    "all near": (0, 0, 0, 0),
}
"""By rank the node it counts as on."""

SOME = ("allreduce_ring", "allreduce_twoshot", "alltoall_direct", "broadcast_tree")


def schedule(path: Path, transport: Transport) -> tuple[compiler.CheckedSchedule, Plan]:
    case = main_case(path, 4)
    assert case is not None
    checked = compiler.check(path, ranks=4, params=dict(case.params), transport=transport)
    return checked, changed(checked.plan, tile_bytes=SMALL_TILE, lanes=2, sms=2)


def chunks(path: Path, options: Sequence[Options]) -> None:
    """A schedule's far Plan leaves the bits of the Plan for peers, two calls in a row."""
    _, near = schedule(path, Transport.PEER)
    checked, far = schedule(path, Transport.NVSHMEM)
    buffer, dtype = given(checked.schedule), BFLOAT16
    numel = buffer.blocks * (buffer.cut * 700 + 3)
    calls = [{buffer.name: random_values(dtype, 4, numel, seed)} for seed in (1, 2)]
    ops = ("sum", "avg") if far.moves.has_reduction else ("sum",)
    for op, one in product(ops, options):
        wanted = run_chunks(near, emit(near), calls, dtype, op)
        for got, want in zip(run_chunks(far, emit(far), calls, dtype, op, one), wanted, strict=True):
            assert got.outputs.keys() == want.outputs.keys()
            assert all(same_bits(got.outputs[name], want.outputs[name]) for name in want.outputs), (path.stem, one)
            assert same_bits(got.yields, want.yields)


@pytest.mark.sweep
@pytest.mark.parametrize("path", [path for path in shipped() if main_case(path, 4)], ids=lambda path: path.stem)
def test_chunks(path: Path) -> None:
    """Every schedule, whoever is far; ranks start late."""
    chunks(path, [Options(nodes=nodes, max_delay=0.001, seed=at) for at, nodes in enumerate(FAR_PLANS.values())])


@pytest.mark.parametrize("name", SOME)
def test_chunks_are_silent(name: str) -> None:
    """ThreadSanitizer sees no race, though some of what is put is there only when it is waited for."""
    (path,) = (path for path in shipped() if path.stem == name)
    chunks(path, [Options(nodes=FAR_PLANS[split], sanitize=True) for split in ("all far", "two nodes")])


@pytest.mark.parametrize("name", SOME[:2])
def test_chunks_of_processes(name: str) -> None:
    """Ranks that are processes see marks on addresses of their own."""
    (path,) = (path for path in shipped() if path.stem == name)
    chunks(path, [Options(nodes=FAR_PLANS[split], mode="processes") for split in ("all far", "two nodes")])


def far(num_ranks: int) -> Plan:
    return launched(num_ranks, transport=Transport.NVSHMEM)


def splits(num_ranks: int) -> list[tuple[int, ...]]:
    """All far; the last one apart; all near by a kernel that reaches far."""
    return [tuple(range(num_ranks)), (*(0,) * (num_ranks - 1), 1), (0,) * num_ranks]


def packed(calls: Sequence[RowsCall]) -> list[RowsCall]:
    return [replace(call, packed=True) for call in calls]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows(num_ranks: int, dtype: str) -> None:
    """Rows there and back, plans, lanes and tiles changing, as numpy has them."""
    made = program(far(num_ranks), dtype)
    for seed, nodes in enumerate(splits(num_ranks)):
        calls = packed(list(storm(num_ranks, dtype, 20 + seed)))
        found = run_calls(made, calls, Running(max_delay=0.0005, seed=seed, nodes=nodes))
        assert same(found, chained(calls, dtype))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_rows_are_silent(num_ranks: int) -> None:
    """ThreadSanitizer sees no race, results becoming inputs and their memory results again."""
    made = program(far(num_ranks), sanitize=True)
    for seed, nodes in enumerate(splits(num_ranks)[:2]):
        calls = packed(reused(num_ranks, seed))
        found = run_calls(made, calls, Running(max_delay=0.002, seed=seed, nodes=nodes))
        assert same(found[-1:], chained(calls, "float32")[-1:])


@pytest.mark.sweep
@pytest.mark.parametrize("what", [what for what in MISTAKES if what not in GOES_STRAIGHT])
def test_a_mistake_is_seen(what: str) -> None:
    """A far kernel of a Plan that is refused races, or a rank waits in vain, as one for peers. All its rows wait."""
    mistaken = replace(with_phases(MISTAKES[what]), transport=Transport.NVSHMEM)
    made = program(mistaken, sanitize=True)
    for seed in range(2):
        with pytest.raises((CommTimeout, DataRaceError)):
            run_calls(made, packed(reused(2, seed)), Running(timeout=0.5, max_delay=0.002, seed=seed))


# --- rows by keys -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "sanitize"), [(2, False), (4, False), (2, True), (3, True)])
def test_rows_by_keys(ranks: int, sanitize: bool) -> None:
    """There and back by keys of every kind as the simulation has it; ThreadSanitizer sees no race."""
    of = declared(ranks, 4 * ranks, transport=Transport.NVSHMEM)
    assert of.back is not None
    out, home = kernel(of.plan, sanitize=sanitize), kernel(of.back, "float32", sanitize=sanitize)
    for seed, nodes in enumerate(splits(ranks)):
        calls, dice = list(keyed(ranks, 4 * ranks, 50 + seed)), np.random.default_rng(seed)
        running = Running(timeout=20.0, max_delay=0.0005, seed=seed, nodes=nodes)
        wanted = [simulate.dispatch(call.keys, call.tensors, rank_of(of)) for call in calls]
        assert all(map(same_received, there(out, calls, running), wanted))
        ways = [returning(call, one, dice) for call, one in zip(calls, wanted, strict=True)]
        for found, one in zip(back(home, ways, running), ways, strict=True):
            assert all(map(equal, found, summed(one)))


@pytest.mark.parametrize(("form", "ranks", "sanitize"), [("ranks weighed", 3, True), ("values", 4, False)])
def test_sums_and_values(form: str, ranks: int, sanitize: bool) -> None:
    """What goes far is added up in the own heap first, and a number for each key goes as a word."""
    of = declared(ranks, 2 * ranks, transport=Transport.NVSHMEM)
    plan = of.values if form == "values" else back_of(of, form, Transport.NVSHMEM)
    made = kernel(plan, "float32", sanitize=sanitize)
    for seed, nodes in enumerate(splits(ranks)):
        calls, dice = list(keyed(ranks, 2 * ranks, 60 + seed)), np.random.default_rng(seed)
        running = Running(timeout=20.0, max_delay=0.0005, seed=seed, nodes=nodes)
        came = [simulate.dispatch(call.keys, call.tensors, rank_of(of), numbers(call)) for call in calls]
        ways = [returning(call, one, dice, plan) for call, one in zip(calls, came, strict=True)]
        for found, one in zip(back(made, ways, running), ways, strict=True):
            assert all(map(equal, found, summed(one, plan)))


# --- what is told before it is there ----------------------------------------------------------------------------------

BEFORE = {
    "complete": ("types.cuh", "host.hpp", "elements.cuh", "transport.cuh", "waiting.cuh"),
    "far_fence": ("types.cuh", "host.hpp", "host_nvshmem.hpp"),
}
"""What waits, and the headers that say what it is."""


def hasty(plan: Plan, what: str = "complete") -> Emitted:
    """The text of a kernel that tells without waiting for what it put."""
    emitted, lines = emit(plan), "\n".join(f'#include "commdsl/{name}"' for name in BEFORE[what])
    first = '#include "commdsl/'
    text = emitted.text.replace(first, f"{lines}\n#define {what}(...) static_cast<void>(0)\n{first}", 1)
    return replace(emitted, text=text)


def test_hasty_chunks_are_seen() -> None:
    """Without the wait a result lacks what was put; the same kernel is right where all are near."""
    (path,) = (path for path in shipped() if path.stem == "alltoall_direct")
    checked, plan = schedule(path, Transport.NVSHMEM)
    buffer = given(checked.schedule)
    calls = [{buffer.name: random_values(INT32, 4, buffer.blocks * 50, 1)}]
    (want,) = run_chunks(plan, emit(plan), calls, INT32)
    for split, nodes in FAR_PLANS.items():
        (got,) = run_chunks(plan, hasty(plan), calls, INT32, options=Options(nodes=nodes))
        right = all(same_bits(got.outputs[name], want.outputs[name]) for name in want.outputs)
        assert right == (split == "all near")


@pytest.mark.parametrize("what", BEFORE)
def test_hasty_rows_are_seen(what: str) -> None:
    """Without the wait before a flag, or the fence between a value and its number, rows are missed before long; the
    same kernel is right where all are near.
    """
    plan = far(3)
    made = built(plan, hasty(plan, what), ("COMMDSL_DTYPE=float32", "COMMDSL_CHECK=1"))
    calls = packed(list(storm(3, "float32", 40)))
    assert any(is_missed(made, calls, Running(1.0, max_delay=0.002, seed=seed)) for seed in range(10))
    assert not is_missed(made, calls, Running(nodes=(0, 0, 0)))


def is_missed(made: Kernel, calls: Sequence[RowsCall], running: Running) -> bool:
    try:
        return not same(run_calls(made, calls, running), chained(calls, "float32"))
    except (RowsError, CommTimeout):
        return True


# --- Plans ------------------------------------------------------------------------------------------------------------


def test_rows_are_packed() -> None:
    """Rows wait, whatever the file says, the kernel's text says why, and the phases are those of a packed Plan."""
    path = data_dir("schedules") / "dispatch" / "qkv.comm"
    found = {
        (put, transport): compiler.compile(path, None, 4, tune={"put": put}, transport=transport)
        for put in ("rows", "packed")
        for transport in Transport
    }
    plans = {key: [phase.description for phase in one.plan.comm.phases] for key, one in found.items()}
    reason = " (packed: to a far rank every run is a message)"

    assert found["rows", Transport.NVSHMEM].plan.push.packed
    assert not found["rows", Transport.PEER].plan.push.packed
    assert plans["packed", Transport.NVSHMEM] == plans["packed", Transport.PEER]
    assert [line.replace(reason, "") for line in plans["rows", Transport.NVSHMEM]] == plans["packed", Transport.PEER]
    assert reason in found["rows", Transport.NVSHMEM].emitted.text
    assert "COMMDSL_NVSHMEM" not in found["rows", Transport.PEER].emitted.text


def test_rows_that_do_not_wait_are_refused() -> None:
    """Rows that a table sends straight to a far rank do not go, and a kernel that checks misses them."""
    calls = [replace(call, packed=False) for call in reused(2, 1, calls=2)]
    with pytest.raises(RowsError) as caught:
        run_calls(program(far(2)), calls)
    assert caught.value.record.code == BAD_COUNT


def test_plans_that_are_not_put_whole() -> None:
    """Words, lanes that share a block, and rows that do not wait are no far Plan's."""
    _, plan = schedule(shipped()[0], Transport.NVSHMEM)
    verify(plan)
    with pytest.raises(InternalError, match="moves no words of `packet`"):
        verify(replace(changed(plan, carrier=PACKET), transport=Transport.NVSHMEM))
    with pytest.raises(InternalError, match="a block has 2 lanes"):
        verify(replace(changed(plan, sms=1), transport=Transport.NVSHMEM))
    with pytest.raises(InternalError, match="rows of tables go to far ranks"):
        verify(replace(launched(2), transport=Transport.NVSHMEM))


# --- who is far -------------------------------------------------------------------------------------------------------


def test_marks() -> None:
    """A rank sees marks on the heaps of other nodes, and none on its own node's."""
    assert heaps((16, 32, 48), (0, 0, 1), 1) == (16, 32, 48 | FAR)
    assert heaps((16, 32, 48), (0, 0, 1), 2) == (16 | FAR, 32 | FAR, 48)


def test_configs() -> None:
    """Nodes are named by rank; what is none is refused. More than one node, or NVSHMEM for all, takes far kernels."""
    assert from_environment({"COMMDSL_NODES": "0, 0,1,1"}).nodes == (0, 0, 1, 1)
    assert from_environment({"COMMDSL_NODES": "0,1"}).has_far
    assert from_environment({"COMMDSL_TRANSPORT": "nvshmem", "COMMDSL_NODES": "0,0"}).has_far
    assert not from_environment({"COMMDSL_NODES": "3,3"}).has_far
    assert not from_environment({}).has_far
    for text in ("0,,1", "a", "0;1", "-1,0"):
        with pytest.raises(ValueError, match="COMMDSL_NODES is a number for each rank"):
            from_environment({"COMMDSL_NODES": text})
