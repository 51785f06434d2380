"""No mutant of a Plan slips through: it is refused, or it is proved, and its kernel leaves what the right one does.

`pytest tests/test_plan_mutants.py --sweep=all` judges every mutant. Of those that are proved each text is built and run
once, one text in RUN_ONE_IN by its hash, as building takes longer than all the rest. A kind of Plan is a line of KINDS.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from random import Random

import flag_mutants
import host_keys
import numpy as np
import phase_mutants
import pytest
import test_keys as keyed
import test_keys_there as went
from collectives import SCHEDULES
from host_dispatch import chained
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from strategies import Program, all_programs, rounding_programs, tried
from test_dispatch_kernel import WIDTHS, reused, same, storm
from test_phases import Machine, orderly

from commdsl import compiler
from commdsl.build import host_run
from commdsl.build.emit import emit
from commdsl.build.host_keys import CallAgain, again
from commdsl.build.host_ranks import DataRaceError, RowsError, Running
from commdsl.build.host_rows import RowsCall, checking, run_calls
from commdsl.checks import check_plan, check_routed
from commdsl.ep import simulate
from commdsl.ir.lengths import block_lengths, num_entries
from commdsl.ir.schedules import Schedule
from commdsl.language.diagnostics import InternalError
from commdsl.language.kinds import GIVEN
from commdsl.machine.carriers import ENGINE
from commdsl.machine.dtypes import FLOAT32, INT32
from commdsl.program.memory import Rights
from commdsl.program.phases import PushAgain, PushBack, PushByKey
from commdsl.program.plan import Plan
from commdsl.program.timeouts import CommTimeout
from commdsl.program.verify import verify

RUN_ONE_IN = 12
SEEN_ONE_IN = 2
SHARDS = 20
Tally = Callable[[str, Counter[str]], None]
Chosen = Callable[[str, int], bool]


@dataclass(frozen=True)
class Right:
    """A Plan that is right, the mutants of it, and what there is to compare."""

    plan: Plan
    schedule: Schedule | None
    mutants: Iterator[tuple[str, Plan]]
    without_waits: Iterator[tuple[str, Plan]]
    is_right: Callable[[Plan], bool]  # whether its kernel leaves what it must
    watch: Callable[[Plan, int], None]  # calls that share memory, under ThreadSanitizer
    moves_right: Callable[[Plan], bool] = lambda _: True  # what costs no build, so that none is left out

    def verdict(self, plan: Plan) -> str:
        """The code that refuses a Plan, or nothing."""
        try:
            verify(plan)
        except InternalError:
            return "illegal"
        found = check_routed(plan) if self.schedule is None else check_plan(self.schedule, plan)
        return next((one.code for one in found), "")


# --- chunks -----------------------------------------------------------------------------------------------------------


def _call(schedule: Schedule, elements: int, seed: int, dtype: type) -> dict[str, list[np.ndarray]]:
    """Blocks of so many elements, or of up to as many, where they have lengths of their own."""
    random, ranks, lengths = np.random.default_rng(seed), schedule.num_ranks, schedule.lengths
    table: list[int] | int = elements
    if lengths is not None:
        more = num_entries(ranks, len(lengths.axes)) - 2
        table = random.permutation([0, elements, *random.integers(0, elements, more)]).tolist()
    call = {} if lengths is None else {lengths.table: [np.array(table)]}
    for buffer in (one for one in schedule.buffers if one.kind in GIVEN):
        blocks = block_lengths(buffer.lengths, ranks, buffer.blocks, table)
        call[buffer.name] = [(100 * random.normal(size=sum(own))).astype(dtype) for own in blocks]
    return call


def _chunks(schedule: Schedule, plan: Plan) -> list[bytes]:
    """To the bit: an `avg` of numbers that are rounded, twice, apart and in place."""
    op = "avg" if plan.moves.asks else "sum"
    calls = [_call(schedule, 240, seed, np.float32) for seed in range(2)]
    found = []
    for in_place in sorted({False, bool(plan.moves.alias_safe)}):
        options = host_run.Options(in_place=in_place, max_delay=0.001)
        for ran in host_run.run_calls(plan, emit(plan), calls, FLOAT32, op, options):
            found.append([array.tobytes() for arrays in (*ran.outputs.values(), ran.yields) for array in arrays])
    return [one for call in found[-2:] for one in call] if found[:2] == found[-2:] else []


def _watch_chunks(schedule: Schedule, plan: Plan, seed: int) -> None:
    calls = [_call(schedule, 3000, seed, np.int32)] * 3
    host_run.run_calls(plan, emit(plan), calls, INT32, "sum", host_run.Options(sanitize=True, timeout=5))


def chunks(name: str, ranks: int, way: str) -> Right:
    """A schedule of chunks, with so small tiles that a few hundred bytes take rounds."""
    tune = {"protocol": way, "lanes": 2, "threads": 32, "tile": 512 if name in CAST else 256}
    checked = compiler.check(SCHEDULES / f"{name}.comm", ranks=ranks, tune=tune)
    return _right(checked, Random(f"{name} {ranks} {way}"), times=3)


def _copies(plan: Plan, in_place: bool) -> dict[tuple[str, int, int], bytes]:
    """What the copy engines of all GPUs leave of two calls, by tensor, call and rank; AssertionError where copies race
    or a rank waits in vain.
    """
    machine = Machine(plan, 300, calls=2, in_place=in_place)

    def memory(access: Rights) -> dict[tuple[str, int, int], np.ndarray]:
        return {
            (tensor.name, call, rank): machine.memory[machine.region(call, rank, place)]
            for place, tensor in enumerate(plan.moves.tensors)
            if tensor.access is access
            for call in range(2)
            for rank in range(plan.num_ranks)
        }

    for (name, call, rank), values in memory(Rights.READ).items():
        values[:] = np.frombuffer(Random(f"{name} {call} {rank}").randbytes(len(values)), np.uint8)
    machine.run(orderly(machine))
    return {key: left.tobytes() for key, left in memory(Rights.WRITE).items()}


def copies(name: str, ranks: int, way: str) -> Right:
    """A schedule that only moves: what each mutant that is proved asks of the copy engine is looked at, too."""
    checked = compiler.check(SCHEDULES / f"{name}.comm", ranks=ranks, tune={"protocol": way, "tile": 256})
    right = _right(checked, Random(f"{name} {ranks} {way}"), times=3)
    wanted = {in_place: _copies(right.plan, in_place) for in_place in (False, True)}

    def moves_right(mutant: Plan) -> bool:
        ways = {False, bool(mutant.moves.alias_safe)} if mutant.moves.carrier == ENGINE else ()
        return all(_copies(mutant, in_place) == wanted[in_place] for in_place in ways)

    return replace(right, moves_right=moves_right)


def drawn(program: Program, way: str, random: Random, times: int) -> Right:
    """One that nobody wrote, of whatever the language has."""
    files = compiler.read_text(program.text, "drawn.comm", Path())
    tune = {"protocol": way, "lanes": 2, "threads": 32, "tile": 256}
    return _right(compiler.check(files, ranks=program.ranks, on=program.machine.name, tune=tune), random, times)


def _right(checked: compiler.Checked, random: Random, times: int) -> Right:
    schedule, plan = checked.schedule, checked.plan
    return Right(
        plan,
        schedule,
        flag_mutants.mutants(plan, random, times),
        flag_mutants.without_waits(plan),
        lambda mutant: _chunks(schedule, mutant) == _chunks(schedule, plan),
        lambda mutant, seed: _watch_chunks(schedule, mutant, seed),
    )


# --- rows by table ----------------------------------------------------------------------------------------------------


def _of(plan: Plan, calls: Iterable[RowsCall]) -> list[RowsCall]:
    """Calls with as many tensors and lanes as the Plan has, and a put that it allows."""
    tensors, most = len(plan.push.given), plan.comm.lanes
    return [
        replace(
            call,
            flows=call.flows[:tensors],
            inputs=None if call.inputs is None else call.inputs[:tensors],
            packed=plan.push.packed or call.packed,
            lanes=tuple(min(lanes, most) for lanes in call.lanes),
        )
        for call in calls
    ]


def _rows(plan: Plan) -> bool:
    calls = _of(plan, storm(plan.num_ranks, "float32", 3))
    ran = run_calls(checking(plan, "float32"), calls, Running(max_delay=0.001))
    return same(ran, chained(calls, "float32"))


def _watch_rows(plan: Plan, seed: int) -> None:
    calls = _of(plan, [replace(call, packed=True) for call in reused(plan.num_ranks, seed)])
    run_calls(checking(plan, "float32", sanitize=True), calls, Running(timeout=0.5, max_delay=0.002, seed=seed))


def rows(name: str, ranks: int, way: str) -> Right:
    """A dispatch, which sends what its table says."""
    tune = {"put": way, "sms": 3, "threads": 32, "tile": 256}
    plan = compiler.check(SCHEDULES / "dispatch" / f"{name}.comm", name, ranks, tune=tune).plan
    assert len(plan.push.given) in (1, len(WIDTHS))
    mutants = phase_mutants.mutants(plan, Random(f"{name} {ranks} {way}"), pairs=200)
    return Right(plan, None, mutants, phase_mutants.without_waits(plan), _rows, _watch_rows)


# --- rows by key ------------------------------------------------------------------------------------------------------


def _rank_of(plan: Plan) -> tuple[int, ...]:
    """Which key is whose: what the Plan itself says, as other positions are another routing, and none the worse."""
    share = len(plan.key_positions) // plan.num_ranks
    return tuple(position // share for position in plan.key_positions)


def _node(plan: Plan) -> int | None:
    """Ranks of its nodes, where it says that there are some: other nodes are another routing, too."""
    pushes = [phase for phase in plan.phases if isinstance(phase, PushByKey | PushAgain | PushBack)]
    return next((phase.node for phase in pushes if phase.node), None)


def _keys(plan: Plan) -> bool:
    rank_of = _rank_of(plan)
    calls = list(islice(keyed.storm(plan.num_ranks, len(rank_of), 3), len(keyed.KINDS)))
    calls = [replace(call, lanes=tuple(min(one, plan.comm.lanes) for one in call.lanes)) for call in calls]
    there = next((phase for phase in plan.phases if isinstance(phase, PushByKey | PushAgain)), None)
    aligned = 1 if there is None else there.aligned
    calls = [replace(call, room=call.room + len(rank_of) // plan.num_ranks * (aligned - 1)) for call in calls]
    node = _node(plan)
    wanted = [simulate.dispatch(call.keys, call.tensors, rank_of, keyed.numbers(call), aligned, node) for call in calls]
    if isinstance(there, PushByKey):
        found = keyed.there(host_keys.kernel(plan), calls)
        return all(keyed.same(*pair) for pair in zip(found, wanted, strict=True))
    if there is not None:
        more = [CallAgain(call, left, call.tensors[1]) for call, left in zip(calls, wanted, strict=True)]
        pairs = zip(again(host_keys.kernel(plan), more), wanted, strict=True)
        return all(keyed.equal(one, left.rows[1]) for rows, held in pairs for one, left in zip(rows, held, strict=True))
    dice = np.random.default_rng(4)
    returns = [keyed.returning(call, received, dice, plan) for call, received in zip(calls, wanted, strict=True)]
    sums = keyed.back(host_keys.kernel(plan, "float32"), returns)
    return all(
        keyed.equal(one, other)
        for call, ran in zip(returns, sums, strict=True)
        for one, other in zip(ran, keyed.summed(call, plan), strict=True)
    )


def _watch_keys(plan: Plan, seed: int) -> None:
    if any(isinstance(phase, PushAgain) for phase in plan.phases):
        of = host_keys.going(plan.num_ranks, 2 * plan.num_ranks, aligned=2)
        ways = went.agains(of, went.reused(plan.num_ranks, seed), 2, columns=300)
        again(
            host_keys.kernel(plan, sanitize=True, checks=False),
            ways,
            Running(timeout=0.5, max_delay=0.002, seed=seed),
        )
        return
    is_back = not any(isinstance(phase, PushByKey) for phase in plan.phases)
    made = host_keys.kernel(plan, "float32" if is_back else "", sanitize=True, checks=False)
    keyed.forced(made, Running(timeout=0.5, max_delay=0.002, seed=seed))


def keys(_name: str, ranks: int, way: str) -> Right:
    """A dispatch by keys, there or back in one of the forms."""
    declared = host_keys.declared(ranks, 2 * ranks)
    plans = {"there": declared.plan, "values": declared.values}
    if "once" in way:
        going = host_keys.going(ranks, 2 * ranks, aligned=2, value=False)
        plans[way] = going.plan if way == "there once" else going.again
    if "nodes" in way:
        home = "back y by sum once per node"
        node = 2 if ranks == 4 else 1
        going = host_keys.going(ranks, 2 * ranks, "once per node", 2, value=False, node=node, back=home)
        plans |= {"there nodes": going.plan, "again nodes": going.again, "back nodes": going.back}
    plan = plans.get(way) or host_keys.back_of(declared, way)
    mutants = phase_mutants.mutants(plan, Random(f"keys {ranks} {way}"), pairs=400 if way == "there" else 200)
    return Right(plan, None, mutants, phase_mutants.without_waits(plan), _keys, _watch_keys)


# --- kinds ------------------------------------------------------------------------------------------------------------


STATIC = (
    "collectives/allreduce_ring",
    "collectives/allreduce_oneshot",
    "collectives/alltoall_direct",
    "collectives/allgather_ring",
    "collectives/reduce_tree",
    "attention/rotation_ring",
)

MOVING = (
    "collectives/allgather_direct",
    "collectives/allgather_ring",
    "collectives/alltoall_direct",
    "collectives/broadcast_scatter",
    "collectives/permutation_shift",
    "attention/rotation_ring",
)

UNEVEN = ("uneven/allgather_uneven", "uneven/reducescatter_uneven", "uneven/alltoall_uneven")

CAST = ("compressed/allreduce_float8", "compressed/allgather_float8")

NAMED = ("statistics/allreduce_statistics",)

KEY_WAYS = (
    *("there", "there once", "there nodes", "again once", "again nodes"),
    *("keys weighed", "ranks weighed", "back nodes", "values"),
)

KINDS: tuple[
    tuple[Callable[[str, int, str], Right], tuple[str, ...], tuple[str, ...], tuple[tuple[str, int], ...]], ...
]
KINDS = (
    (chunks, STATIC, ("bulk", "packet", "line", "tma"), (("bulk", 2), ("bulk", 3), ("bulk", 4))),
    (chunks, UNEVEN, ("bulk", "tma"), (("bulk", 3),)),
    (chunks, CAST, ("bulk",), (("bulk", 3),)),
    (copies, MOVING, ("engine",), ()),
    (chunks, NAMED, ("bulk", "packet", "line", "tma"), (("bulk", 3),)),
    (rows, ("qkv", "rows"), ("rows", "packed"), (("rows", 2), ("rows", 3), ("packed", 3))),
    (keys, ("experts",), KEY_WAYS, tuple((way, 2) for way in KEY_WAYS)),
)
"""What makes a Plan, of which files, in which ways, each on 2 to 5 ranks; and in which ways and on how many ranks its
waits are left out to be seen.
"""

CASES = [
    (make, name, way, ranks)
    for make, names, ways, _ in KINDS
    for name in names
    for way in ways
    for ranks in (2, 3, 4, 5)
]
NAMES = [f"{make.__name__}-{name.split('/')[-1]}-{way}-{ranks}" for make, name, way, ranks in CASES]


@pytest.fixture
def is_chosen(request: pytest.FixtureRequest) -> Callable[[str, int], bool]:
    """`is_chosen(text, 8)`: one of so many, the same everywhere; of a sweep's sample half of them, as each is built."""
    half = 1 if request.config.getoption("--sweep") == "all" else 2

    def of(text: str, one_in: int) -> bool:
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little") % (half * one_in) == 0

    return of


@pytest.mark.sweep
@pytest.mark.parametrize(("make", "name", "way", "ranks"), CASES, ids=NAMES)
def test_mutants(
    make: Callable[[str, int, str], Right], name: str, way: str, ranks: int, tally: Tally, is_chosen: Chosen
) -> None:
    """Every mutant is refused, or proved and right."""
    counts = judged(make(name, ranks, way), is_chosen)
    tally(f"mutants of Plans of {make.__name__}", counts)
    assert counts["proved"] < counts.total() / 2


@pytest.mark.sweep
@pytest.mark.parametrize("shard", range(SHARDS))
def test_mutants_of_drawn_schedules(shard: int, tally: Tally, is_chosen: Chosen, turns: Callable[[int], int]) -> None:
    """So it is with any schedule."""

    @seed(shard)
    @settings(
        max_examples=turns(15),
        database=None,
        phases=[Phase.generate],  # a smaller one takes minutes to find
        suppress_health_check=list(HealthCheck),
    )
    @given(st.one_of(all_programs(), tried(rounding_programs())))
    def judge(program: tuple[Program, str]) -> None:
        tally("mutants of drawn Plans", judged(drawn(*program, Random(shard), times=turns(3)), is_chosen))

    judge()


def judged(right: Right, is_chosen: Chosen) -> Counter[str]:
    """How many mutants there are by what becomes of them; AssertionError for one that is proved and not right."""
    assert right.verdict(right.plan) == ""
    counts: Counter[str] = Counter()
    texts = {emit(right.plan).text: "the right one"}
    for what, mutant in right.mutants:
        code = right.verdict(mutant)
        counts[code or "proved"] += 1
        if code:
            continue
        assert right.moves_right(mutant), f"slipped through: {what}"
        text = emit(mutant).text
        if text in texts:
            counts["proved, and of a text that was there before"] += 1
            continue
        texts[text] = what
        if is_chosen(text, RUN_ONE_IN):
            counts["proved, run and right"] += 1
            print(f"proved: {what}")
            assert right.is_right(mutant), f"slipped through: {what}"
    return counts


WAITING = [(make, name, way, ranks) for make, names, _, watched in KINDS for name in names for way, ranks in watched]


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("make", "name", "way", "ranks"),
    WAITING,
    ids=[f"{name.split('/')[-1]}-{way}-{ranks}" for _, name, way, ranks in WAITING],
)
def test_a_missing_wait_is_seen(
    make: Callable[[str, int, str], Right], name: str, way: str, ranks: int, tally: Tally, is_chosen: Chosen
) -> None:
    """A Plan without one of its waits is refused, and where it runs all the same every run races, ends in vain, or
    stores to an address that its peer has not said.
    """
    right = make(name, ranks, way)
    count = 0
    for what, mutant in right.without_waits:
        assert right.verdict(mutant), what
        if mutant.halves is None and any(isinstance(one, PushBack) and one.each.is_sum for one in mutant.phases):
            continue  # nobody waits for what is sent, so there are no two launches, which the text of sums has
        if right.schedule is None or not count or is_chosen(f"{name} {ranks} {what}", SEEN_ONE_IN):
            count += 1
            print(what)
            with pytest.raises(RuntimeError) as caught:
                right.watch(mutant, count)
            assert isinstance(caught.value, DataRaceError | CommTimeout | RowsError) or "SEGV" in str(caught.value)
    tally("Plans without a wait", Counter(seen=count))
    assert count
