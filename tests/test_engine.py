"""The copy engine's calls over a fake GPU: what is started, in which order, and what any legal order of it computes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from plans import changed

torch = pytest.importorskip("torch")

from collectives import Case, main_case, shipped  # noqa: E402 - after the check for torch
from engine_order import Order  # noqa: E402
from fake_gpu import Command, FakeGpu  # noqa: E402
from proved import given, proved, result_name  # noqa: E402
from test_schedules import defined_outputs, random_values, runs_as_it_means  # noqa: E402
from thread_ranks import in_group  # noqa: E402

import commdsl  # noqa: E402
from commdsl import compiler  # noqa: E402
from commdsl.build import nvrtc  # noqa: E402
from commdsl.compiler import Compiled  # noqa: E402
from commdsl.ir import interpret  # noqa: E402
from commdsl.language.diagnostics import InternalError  # noqa: E402
from commdsl.machine import dtypes  # noqa: E402
from commdsl.machine.config import from_environment  # noqa: E402
from commdsl.program.plan import Plan  # noqa: E402
from commdsl.program.sizes import device_launch  # noqa: E402
from commdsl.program.verify import verify  # noqa: E402
from commdsl.runtime import engine, groups  # noqa: E402
from commdsl.runtime.workspace import Meanwhile, Start  # noqa: E402

RANKS = 4
TILE = 4096
MOVING = [
    path for path in shipped() if main_case(path, RANKS) and not proved(main_case(path, RANKS)).plan.moves.has_reduction
]
SIZES = (1, 3 * 4096 + 7, 70_001)
"""Bytes of a block: less than a tile, ragged, many rounds."""

THERE, IN_VAIN = 1, 2
"""What a word is raised to."""

Arrays = list[np.ndarray]


def case_of(name: str) -> Case:
    (path,) = (path for path in MOVING if path.stem == name)
    found = main_case(path, RANKS)
    assert found is not None
    return found


def compiled(case: Case, tile: int = TILE) -> Compiled:
    tune: dict[str, int | str] = {"protocol": "engine", "tile": tile}
    return compiler.compile(case.path, ranks=RANKS, params=dict(case.params), tune=tune)


class Rank:
    """A thread with a GPU, and calls of one op there."""

    def __init__(self, gpu: FakeGpu, rank: int, name: str, case: Case, tile: int) -> None:
        self.gpu = gpu
        self.rank = rank
        self.name = name
        tune: dict[str, int | str] = {"protocol": "engine", "tile": tile}
        self.op = commdsl.load(case.path, ranks=RANKS, params=dict(case.params), tune=tune)

    def call(self, given: np.ndarray) -> torch.Tensor:
        return last_of(self.op(torch.from_numpy(given.copy()), group=self.name))

    def start(self, block: int) -> Start:
        """What starts calls on such blocks, by halves."""
        comm = groups.of(self.name, torch.device("cpu"))
        return comm.prepare(self.op.program(RANKS), block, "uint8", "sum", None, "", 0)

    def captured(self, body: Callable[[], Any]) -> list[Command]:
        """What a capture of `body` on a stream of its own takes in."""
        number = self.rank + 1
        with self.gpu.on(self.gpu.stream()), self.gpu.capturing(number):
            body()
        return [command for command in self.gpu.commands if command.capture == number]

    def replay(self, commands: Sequence[Command], seed: int) -> None:
        """One replay of a graph: any order that its edges allow, now and then with a pause."""
        dice, done = random.Random(1000 * seed + self.rank), set[int]()
        numbers = {command.number for command in commands}
        waiting = list(commands)
        while waiting:
            ready = [command for command in waiting if command.before & numbers <= done]
            chosen = dice.choice(ready)
            if dice.random() < 0.1:
                time.sleep(0.0005)
            chosen.run()
            done.add(chosen.number)
            waiting.remove(chosen)

    def check(self) -> None:
        found = groups.of(self.name, torch.device("cpu"))
        found.check()


def run(gpu: FakeGpu, case: Case, body: Callable[[Rank], None], tile: int = TILE) -> None:
    """`body` on every rank at once; raises the first failure."""

    def on_gpu(rank: int, name: str) -> None:
        gpu.here.rank = rank
        body(Rank(gpu, rank, name, case, tile))

    in_group(RANKS, on_gpu)


def inputs_of(case: Case, block: int, seed: int) -> Arrays:
    return random_values(dtypes.UINT8, RANKS, given(proved(case).schedule).blocks * block, seed)


def oracle(case: Case, inputs: Arrays) -> list[np.ndarray | None]:
    """What each rank gets, None where the contract leaves it open; all yields of a rank stacked."""
    schedule = proved(case).schedule
    want = interpret.run(schedule, {given(schedule).name: inputs}, dtypes.UINT8, "sum")
    if want.yields:
        return [np.concatenate([step[rank] for step in want.yields]) for rank in range(RANKS)]
    outputs = want.outputs[result_name(schedule)]
    kept = {id(array) for arrays in defined_outputs(case, want.outputs) for array in arrays}
    return [array if id(array) in kept else None for array in outputs]


def last_of(result: Any) -> torch.Tensor:
    """The yields where there are any."""
    return result[-1] if isinstance(result, tuple) else result


def same(got: torch.Tensor, want: np.ndarray | None) -> None:
    assert want is None or np.array_equal(got.reshape(-1).numpy(), want)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu(RANKS)
    made.install(monkeypatch)
    return made


@pytest.mark.sweep
@pytest.mark.parametrize("path", MOVING, ids=lambda path: path.stem)
def test_calls(gpu: FakeGpu, path: Any) -> None:
    """Calls of several sizes, one after another, give the oracle's bytes; so do calls in place."""
    case = case_of(path.stem)
    calls = [inputs_of(case, block, seed) for seed, block in enumerate((*SIZES, *SIZES))]
    wanted = [oracle(case, inputs) for inputs in calls]

    def body(rank: Rank) -> None:
        for inputs, want in zip(calls, wanted, strict=True):
            same(rank.call(inputs[rank.rank]), want[rank.rank])
            if rank.op.works_in_place:
                tensor = torch.from_numpy(inputs[rank.rank].copy())
                rank.op.in_place(tensor, group=rank.name)
                same(tensor, want[rank.rank])
        rank.check()

    run(gpu, case, body)
    assert not gpu.launches


@pytest.mark.sweep
@pytest.mark.parametrize("path", MOVING, ids=lambda path: path.stem)
def test_any_order_of_a_graph(gpu: FakeGpu, path: Any) -> None:
    """A captured call, replayed between other calls in any order that its edges allow, reads its input anew."""
    case = case_of(path.stem)
    block = SIZES[-1]
    calls = [inputs_of(case, block, seed) for seed in range(4)]
    wanted = [oracle(case, inputs) for inputs in calls]

    def body(rank: Rank) -> None:
        rank.call(calls[0][rank.rank])
        given, kept = torch.from_numpy(calls[0][rank.rank].copy()), list[Any]()
        graph = rank.captured(lambda: kept.append(rank.op(given, group=rank.name)))
        for seed, (inputs, want) in enumerate(zip(calls, wanted, strict=True)):
            given.copy_(torch.from_numpy(inputs[rank.rank]))
            rank.replay(graph, seed)
            same(last_of(kept[0]), want[rank.rank])
            same(rank.call(calls[-1][rank.rank][: len(calls[-1][rank.rank]) // block]), oracle_of_ones[rank.rank])
        rank.check()

    oracle_of_ones = oracle(case, [array[: len(array) // block] for array in calls[-1]])
    run(gpu, case, body)


def started(gpu: FakeGpu, case: Case, block: int, calls: int, tile: int = TILE) -> list[Command]:
    """The commands of the first calls of all ranks, in one tensor each."""

    def body(rank: Rank) -> None:
        shape = (given(proved(case).schedule).blocks * block,)
        tensor = torch.zeros(shape, dtype=torch.uint8)
        kept = [rank.op(tensor, group=rank.name) for _ in range(calls)]
        if rank.op.works_in_place:
            rank.op.in_place(tensor, group=rank.name)
        alive.append((tensor, kept))

    alive: list[Any] = []  # so that no two tensors have the same address in turn
    run(gpu, case, body, tile)
    return gpu.commands


@pytest.mark.parametrize("path", MOVING, ids=lambda path: path.stem)
def test_no_races(gpu: FakeGpu, path: Any) -> None:
    """Copies of all ranks that touch the same bytes are ordered by streams, events and what the flags promise."""
    case = case_of(path.stem)
    order = Order(compiled(case).plan, started(gpu, case, 20_000, calls=3))

    assert not order.stuck
    assert not list(order.races())


@pytest.mark.parametrize("name", ["allgather_direct", "allgather_ring", "alltoall_direct", "permutation_shift"])
def test_every_wait_counts(gpu: FakeGpu, name: str) -> None:
    """Without any one wait of the Plan, what is started has a race."""
    case = case_of(name)
    plan, commands = compiled(case).plan, started(gpu, case, 20_000, calls=2)
    for wait in range(len(plan.moves.ops.wait_peer)):
        assert any(Order(plan, commands, {wait}).races()), wait


@pytest.mark.parametrize("most", [engine.MAX_KEPT, 1])
def test_what_a_call_asks_of_the_driver(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """On the same tensors it is the same, and worked out once; on others, and where little is kept, it is right."""
    case, tensors, calls = case_of("broadcast_scatter"), 2, 3
    given = [inputs_of(case, 4096, seed) for seed in range(tensors)]
    wanted = [oracle(case, inputs) for inputs in given]
    listed, found = list[object](), engine.EngineKernel._listed
    monkeypatch.setattr(engine, "MAX_KEPT", most)
    monkeypatch.setattr(engine.EngineKernel, "_listed", lambda *call: listed.append(call) or found(*call))

    def body(rank: Rank) -> None:
        mine = [torch.from_numpy(inputs[rank.rank].copy()) for inputs in given]
        asked = []
        for _ in range(calls):
            for tensor, inputs, want in zip(mine, given, wanted, strict=True):
                before = len(gpu.commands)
                tensor.copy_(torch.from_numpy(inputs[rank.rank]))
                rank.op.in_place(tensor, group=rank.name)
                same(tensor, want[rank.rank])
                asked.append([(one.copy, one.turn) for one in gpu.commands[before:] if one.rank == rank.rank])
        assert all(asked)
        assert asked == asked[:tensors] * calls
        assert asked[0] != asked[1]
        rank.check()

    run(gpu, case, body)
    assert len(listed) == RANKS * tensors * (calls if most == 1 else 1)


def test_an_all_gather(gpu: FakeGpu) -> None:
    """Two kernels a call; the copies to peers are in no order; the next round's go beside copies out."""
    case, block = case_of("allgather_direct"), 32768
    commands = [command for command in started(gpu, case, block, calls=1, tile=32768) if command.rank == 1]
    kernels = [place for place, command in enumerate(commands) if command.turn]
    first, between, last = commands[: kernels[0]], commands[kernels[0] + 1 : kernels[1]], commands[kernels[1] + 1 :]

    assert [len(part) for part in (first, between, last)] == [4, 7, 3]
    assert {command.copy[2] for command in commands if command.copy} == {block // 2}
    for part in (first, between):
        remote = [one for one in part if sum(meet_any(one, other) for other in gpu.commands if other.rank != 1)]
        assert len({one.copy[0] for one in remote if one.copy}) == 3
        assert not any(
            one.number in other.before or other.number in one.before for one, other in combinations(remote, 2)
        )
    for place in kernels:
        assert {command.number for command in commands[:place]} <= commands[place].before
        assert all(commands[place].number in command.before for command in commands[place + 1 :])
    assert [commands[place].turn[4:] for place in kernels] == [(2, 0, 1), (2, 1, 0)]


def meet_any(one: Command, other: Command) -> bool:
    """Whether another rank's copy reads what this one writes."""
    return bool(one.copy and other.copy and one.copy[0] == other.copy[1])


def test_rounds() -> None:
    """Every call takes whole turns of the cells' copies: the addresses of a graph hold for each of its replays."""
    plan = compiled(case_of("allgather_direct")).plan

    assert plan.moves.rotation == 2
    assert [device_launch(plan.moves, size).rounds for size in (0, 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 1)] == [
        0,
        2,
        2,
        2,
        2,
        4,
    ]


def test_defaults() -> None:
    """One lane, and a tile as large as the budget of symmetric memory allows."""
    case = case_of("allgather_direct")
    plan = compiler.check(case.path, ranks=8, tune={"protocol": "engine"}).plan

    assert (plan.moves.lanes, plan.moves.sms, plan.moves.threads, plan.moves.tile_bytes) == (1, 1, 32, 16 << 20)
    assert compiler.check(case.path, ranks=4, tune={"protocol": "engine"}).plan.moves.tile_bytes == 32 << 20


@pytest.mark.parametrize("name", ["allgather_direct", "permutation_shift"])
def test_the_end_of_a_call_is_told(gpu: FakeGpu, name: str) -> None:
    """Whoever starts a call by halves may have a word raised behind all of it, of that call alone: whether the last
    step is a kernel or a copy.
    """
    case, block = case_of(name), 9000
    inputs = inputs_of(case, block, 1)
    want = oracle(case, inputs)

    def body(rank: Rank) -> None:
        x = torch.from_numpy(inputs[rank.rank].copy())
        start, out = rank.start(block), torch.empty_like(rank.op(x, group=rank.name))
        word = torch.zeros(1, dtype=torch.int64)
        for told in (word.data_ptr(), 0):
            out.zero_()
            end = start.begin([x.data_ptr(), out.data_ptr()], Meanwhile(told=told))
            assert word.item() == 0
            end()
            assert word.item() == (THERE if told else 0)
            same(out, want[rank.rank])
            word.zero_()
        rank.check()

    run(gpu, case, body)


def test_time_out_and_reset(gpu: FakeGpu) -> None:
    """Whoever waits for a rank that stays away names it and signals no more, and says to who waits for the end of the
    call that it was in vain; a reset brings it back.
    """
    case = case_of("allgather_direct")
    inputs = inputs_of(case, 9000, 1)
    want = oracle(case, inputs)

    def body(rank: Rank) -> None:
        out = rank.call(inputs[rank.rank])
        if rank.rank != 3:
            x, word = torch.from_numpy(inputs[rank.rank].copy()), torch.zeros(1, dtype=torch.int64)
            rank.start(9000).begin([x.data_ptr(), out.data_ptr()], Meanwhile(told=word.data_ptr()))()
            assert word.item() == IN_VAIN
            # The first that gives up tells the others, who may hear of it before they give up themselves.
            with pytest.raises(
                (commdsl.CommTimeout, commdsl.PeerError),
                match=r"for rank 3 at .*allgather_direct.*rank 3 never entered",
            ):
                rank.check()
        groups.of(rank.name, torch.device("cpu")).reset()
        same(rank.call(inputs[rank.rank]), want[rank.rank])
        rank.check()

    run(gpu, case, body)


@pytest.mark.sweep
@pytest.mark.parametrize("path", MOVING, ids=lambda path: path.stem)
def test_host_build(path: Any) -> None:
    """The same Plan on host ranks gives the oracle's bits, and ThreadSanitizer has nothing to say."""
    case = case_of(path.stem)
    checked = compiled(case)
    runs_as_it_means(case, checked, dtypes.INT32)
    runs_as_it_means(case, checked, dtypes.INT32, sanitize=True)


@pytest.mark.parametrize("name", ["allgather_direct", "permutation_shift"])
def test_cubin(name: str) -> None:
    """NVRTC takes the text; there is the kernel for the flags and no other."""
    made = compiled(case_of(name))
    cubin = nvrtc.build(made.emitted, (), from_environment()).read_bytes()

    assert f".text.{made.emitted.name}_flags\0".encode() in cubin
    assert f".text.{made.emitted.name}\0".encode() not in cubin


def broken_plans() -> list[tuple[Plan, str]]:
    plan = compiled(case_of("allgather_direct")).plan
    return [
        (changed(plan, lanes=2), "the copy engine has one lane, not 2"),
        (changed(plan, has_reduction=True), "moves bytes only"),
    ]


@pytest.mark.parametrize(("plan", "law"), broken_plans(), ids=["lanes", "reduction"])
def test_laws(plan: Plan, law: str) -> None:
    """A Plan that the copy engine cannot carry out is not legal."""
    with pytest.raises(InternalError, match=law):
        verify(plan)
