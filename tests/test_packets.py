"""Data that carries its flag: what the proof accepts and refuses, and that it runs whatever ran before."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brute_force import broken_packet_laws, without_wait
from collectives import main_case, shipped
from faulty_plans import with_tables
from plans import CELL, PUSHING, Op, Programs, build, changed, with_flags_in_data
from proved import HOST_PROTOCOLS, given, proved
from test_host_build import BYTES, Options, element, random_bytes, small

from commdsl.build import host_run
from commdsl.build.emit import emit
from commdsl.ir import interpret
from commdsl.language.diagnostics import InternalError
from commdsl.machine.carriers import CARRIERS, PACKET, Carrier
from commdsl.machine.dtypes import INT32
from commdsl.program.moves import OpKind
from commdsl.program.plan import Plan
from commdsl.program.proof.rounds import Round
from commdsl.program.proof.synchronization import prove
from commdsl.program.timeouts import CommTimeout
from commdsl.program.verify import verify

CARRYING = [protocol for protocol in CARRIERS if protocol.has_flags_in_data]
COLLECTIVES = Path(__file__).parent.parent / "schedules" / "collectives"


def made(family: str, num_ranks: int, rotation: int = 2, credits: bool = False) -> Plan:
    programs, tensors, num_cells = PUSHING[family](num_ranks, rotation, credits)
    return packets(with_flags_in_data(programs), tensors, num_cells, rotation)


def packets(programs: Programs, tensors: tuple, num_cells: int, rotation: int) -> Plan:
    plan = build(programs, tensors, num_cells, rotation)
    return changed(plan, carrier=PACKET, has_reduction=False)


def codes(plan: Plan) -> list[str]:
    verify(plan)
    return [diagnostic.code for diagnostic in prove(Round(plan.moves))]


def shipped_plan(name: str, ranks: int, protocol: Carrier = PACKET) -> Plan:
    case = main_case(COLLECTIVES / f"{name}.comm", ranks)
    assert case is not None
    return proved(case, protocol).plan


# --- the law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
@pytest.mark.parametrize("family", PUSHING)
def test_credits(family: str, num_ranks: int) -> None:
    """Who hears of its readers in every round needs no credit, and one is idle; who only sends needs one."""
    one_way = family == "chain_broadcast"

    assert codes(made(family, num_ranks)) == (["C205"] if one_way else [])
    assert codes(made(family, num_ranks, credits=True)) == ([] if one_way else ["C204"])


@pytest.mark.parametrize("family", PUSHING)
def test_one_copy_of_the_cells_is_too_few(family: str) -> None:
    """What a rank hears in a round says that the round before is over for its peer, so cells rest for a round."""
    assert codes(made(family, 3, rotation=1)) in (["C205"], ["C209"])


def test_rounds_that_look_alike() -> None:
    """The first word of a cell has 16 bits for an odd number: a cell that rests for as many rounds is refused."""
    plan = shipped_plan("allgather_ring", 3)

    assert codes(changed(plan, rotation=(1 << 15) - 1)) == []
    (found,) = prove(Round(changed(plan, rotation=1 << 15).moves))
    assert found.code == "C209"
    assert "look alike" in found.headline


@pytest.mark.parametrize("name", ["broadcast_chain", "reduce_tree", "gather_direct", "scatter_direct"])
def test_every_credit_is_needed(name: str) -> None:
    """A Plan of the compiler without one of its credits is refused."""
    plan = shipped_plan(name, 4)

    assert len(plan.moves.ops.wait_peer)
    for wait in range(len(plan.moves.ops.wait_peer)):
        assert codes(without_wait(plan, wait)) in (["C205"], ["C209"])


@pytest.mark.parametrize("name", ["allreduce_ring", "allreduce_twoshot", "alltoall_direct", "allgather_direct"])
def test_what_comes_back_is_credit_enough(name: str) -> None:
    """Where every rank hears of its readers there is no flag at all, in any number of ranks."""
    for ranks in (2, 3, 8):
        plan = shipped_plan(name, ranks)
        assert (len(plan.moves.ops.wait_peer), len(plan.moves.ops.signal_peer), plan.moves.rotation) == (0, 0, 2)


def test_two_writes_to_a_cell() -> None:
    """A flag tells rounds apart, not writers, so a second write to a cell is refused and both are shown."""
    plan = shipped_plan("allgather_ring", 3)
    cells = np.flatnonzero((plan.moves.ops.dest_space == CELL) & (plan.moves.ops.dest_rank == 1))
    index = plan.moves.ops.dest_index.copy()
    index[cells[1]] = index[cells[0]]
    (found,) = prove(Round(with_tables(plan, dest_index=index).moves))

    assert found.code == "C209"
    assert "is written twice in a round" in found.headline
    assert len(found.secondary) == 1


def test_a_cell_that_nobody_writes() -> None:
    """A read that no data ever answers is refused."""
    plan = shipped_plan("allgather_ring", 3)
    index = plan.moves.ops.source_index.copy()
    index[np.flatnonzero(plan.moves.ops.source_space == CELL)[-1]] = plan.moves.num_cells

    assert codes(changed(with_tables(plan, source_index=index), num_cells=plan.moves.num_cells + 1)) == ["C207"]


def test_ranks_that_wait_for_each_others_data() -> None:
    """Two ranks that each send only what they have received never start."""
    programs: Programs = [
        [
            Op(OpKind.COPY, (1, rank, 0), ((CELL, rank, 0),)),
            Op(OpKind.COPY, (CELL, 1 - rank, 0), ((0, rank, 0),)),
        ]
        for rank in range(2)
    ]
    _, tensors, _ = PUSHING["chain_broadcast"](2, 2, False)

    assert codes(packets(programs, tensors, 1, 2)) == ["C201"]


def _mutants(seed: int, count: int) -> Iterator[Plan]:
    """Legal Plans of the families with up to two changes, most of them wrong."""
    pick = random.Random(seed)
    for number in range(count):
        num_ranks, rotation = pick.choice([2, 3, 3, 4]), pick.choice([1, 2, 2, 3])
        family = PUSHING[pick.choice(list(PUSHING))]
        programs, tensors, num_cells = family(num_ranks, rotation, pick.random() < 0.5)
        programs = with_flags_in_data(programs)
        for change in range(pick.choice([0, 1, 1, 2])):
            _change(pick, programs, num_cells, (number, change))
        plan = packets(programs, tensors, num_cells, rotation)
        try:
            verify(plan)
        except InternalError:
            continue
        yield plan


def _change(pick: random.Random, programs: Programs, num_cells: int, tag: object) -> None:
    rank = pick.randrange(len(programs))
    place = pick.randrange(len(programs[rank]))
    op, cell = programs[rank][place], pick.randrange(num_cells)
    match pick.choice(["wait", "source", "dest", "swap", "flag", "flag"]):
        case "wait":
            programs[rank][place] = replace(op, waits=op.waits[1:])
        case "source":
            programs[rank][place] = replace(op, sources=((CELL, rank, cell), *op.sources[1:]))
        case "dest":
            programs[rank][place] = replace(op, dest=(CELL, pick.randrange(len(programs)), cell))
        case "swap":
            other = pick.randrange(len(programs[rank]))
            programs[rank][place], programs[rank][other] = programs[rank][other], op
        case _:
            peer = pick.choice([other for other in range(len(programs)) if other != rank])
            last = pick.randrange(len(programs[peer]))
            raiser = programs[peer][last]
            programs[peer][last] = replace(raiser, signals=(*raiser.signals, (rank, tag)))
            back = pick.choice([0, 1, 2, 2])
            programs[rank][place] = replace(programs[rank][place], waits=(*op.waits, (peer, tag, back)))


def test_random_plans_agree_with_brute_force() -> None:
    """What is accepted runs right with any threads idle in any round; what is refused is wrong, or idle, or C209."""
    seen: Counter[tuple[str, bool]] = Counter()
    for plan in _mutants(1, 150):
        found, broken = codes(plan), broken_packet_laws(plan)
        assert len(found) <= 1
        code = found[0] if found else ""
        assert not broken or found, broken
        assert not found or broken or code in ("C204", "C208", "C209"), code
        seen[code, bool(broken)] += 1
    print(seen)
    assert {code for code, _ in seen} >= {"", "C201", "C204", "C205", "C207", "C209"}


@pytest.mark.parametrize("path", shipped(), ids=lambda path: path.stem)
def test_shipped_schedules_agree_with_brute_force(path: Path) -> None:
    """The compiler's Plans keep the laws with any threads idle in any round."""
    case = main_case(path, 3)
    if case is not None:
        assert broken_packet_laws(proved(case, PACKET).plan) == set()


# --- runs -------------------------------------------------------------------------------------------------------------

LONG_AND_SHORT = (5000, 1, 700, 0, 9000, 16, 8200, 300, 5000)
"""Elements of calls in a row: many rounds of both lanes, one word of one lane, a last round that is not full."""


def runs(plan: Plan, sizes: tuple[int, ...], ranks: int, options: Options) -> None:
    """Calls of these sizes in a row give what each gives alone."""
    calls = [random_bytes(ranks, size, seed) for seed, size in enumerate(sizes)]
    results = host_run.run_calls(plan, emit(plan), [{"x": arrays} for arrays in calls], BYTES, "sum", options)
    for arrays, result in zip(calls, results, strict=True):
        assert all(np.array_equal(output, np.concatenate(arrays)) for output in result.outputs["y"])


@pytest.mark.sweep
@pytest.mark.parametrize("protocol", CARRYING)
@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("size", [0, 1, 15, 119, 121, 2999])
def test_any_size_and_alignment(size: int, mode: str, protocol: Carrier) -> None:
    """Every rank gets every block, call after call on one heap, whoever starts late, wherever a tensor begins."""
    plan = changed(small(made("forwarding_allgather", 3), tile_bytes=240), carrier=protocol)
    runs(plan, (size,) * 3, 3, Options(mode=mode, max_delay=0.002, seed=size, shift=size % 7))


@pytest.mark.sweep
@pytest.mark.parametrize("protocol", HOST_PROTOCOLS)
@pytest.mark.parametrize("name", ["allreduce_twoshot", "allgather_ring", "broadcast_chain", "alltoall_direct"])
def test_long_and_short_calls(name: str, protocol: Carrier) -> None:
    """A short call uses fewer lanes and fewer words than the one before, and no race lies between: no report."""
    case = main_case(COLLECTIVES / f"{name}.comm", 3)
    assert case is not None
    checked = proved(case, protocol)
    plan = small(checked.plan, tile_bytes=1040)
    buffer = given(checked.schedule)
    rng = np.random.default_rng(4)
    calls = [
        {buffer.name: [rng.integers(-99, 99, buffer.blocks * size, np.int32) for _ in range(3)]}
        for size in LONG_AND_SHORT
    ]
    options = Options(sanitize=True, max_delay=0.002, seed=5, in_place=True)
    results = host_run.run_calls(plan, emit(plan), calls, INT32, "sum", options)
    for inputs, result in zip(calls, results, strict=True):
        want = interpret.run(checked.schedule, inputs, INT32, "sum")
        for buffer_name, arrays in want.outputs.items():
            assert all(map(np.array_equal, arrays, result.outputs[buffer_name]))


@pytest.mark.parametrize("protocol", CARRYING)
@pytest.mark.parametrize("before", [2**31 - 2, 2**32 - 3, 2**63 - 2, 2**64 - 3])
def test_rounds_pass_the_largest_number(before: int, protocol: Carrier) -> None:
    """Marks of rounds and credits run over 31, 32 and 64 bits between two rounds, and nobody notices."""
    for family, credits in (("forwarding_allgather", False), ("direct_alltoall", False), ("chain_broadcast", True)):
        plan = changed(small(made(family, 3, credits=credits), tile_bytes=240), carrier=protocol)
        blocks = plan.moves.tensors[0].blocks
        calls = [random_bytes(3, 600 * blocks, seed) for seed in range(2)]
        options = Options(first_round=before, timeout=10)
        results = host_run.run_calls(plan, emit(plan), [{"x": arrays} for arrays in calls], BYTES, "sum", options)
        fresh = host_run.run_calls(plan, emit(plan), [{"x": arrays} for arrays in calls], BYTES, "sum", Options())
        for one, two in zip(results, fresh, strict=True):
            assert all(map(np.array_equal, one.outputs["y"], two.outputs["y"]))


@pytest.mark.parametrize("protocol", CARRYING)
def test_a_rank_that_never_enters(protocol: Carrier) -> None:
    """Who waits for data names the rank that sends it, though the data would lie on the waiting rank itself."""
    plan = changed(small(made("forwarding_allgather", 4), tile_bytes=240), carrier=protocol)
    options = Options(timeout=0.3, absent=frozenset({2}))
    with pytest.raises(CommTimeout) as caught:
        runs(plan, (100,), 4, options)
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.missing == (2,)
    waits = {(3, 2), (0, 3)}  # rank 0 waits for what rank 3 would send on, and may have begun earlier on a busy machine
    assert (error.record.rank, error.record.peer) in waits
    assert f"rank {error.record.rank} waited 0.3 s for rank {error.record.peer} at by_hand.comm:1" in str(error)
    assert "rank 2 never entered the call" in str(error)


def test_a_credit_that_never_comes() -> None:
    """Who waits for a credit names the rank that would give it."""
    plan = small(made("chain_broadcast", 3, credits=True), tile_bytes=240)
    calls = [{"x": random_bytes(3, 900, 0)}]
    options = Options(timeout=0.3, absent=frozenset({2}))
    with pytest.raises(CommTimeout) as caught:
        host_run.run_calls(plan, emit(plan), calls, BYTES, "sum", options)
    assert (caught.value.record.rank, caught.value.record.peer) == (1, 2)
    assert caught.value.missing == (2,)


def test_without_a_credit_it_fails() -> None:
    """A chain that waits for no credit overwrites what was not read: a race, or a wait for data that is gone."""
    plan = small(made("chain_broadcast", 2), tile_bytes=64)
    calls = [{"x": [array.view(np.int32) for array in random_bytes(2, 4000, seed)]} for seed in range(2)]
    options = Options(sanitize=True, max_delay=0.005, timeout=1)
    with pytest.raises((host_run.DataRaceError, CommTimeout)):
        host_run.run_calls(plan, emit(plan), calls, element("int32"), "sum", options)
