"""Calls with visits over a fake GPU: what is started on which stream, and what it comes after, is as the Plan says."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fake_gpu import Command, FakeGpu, Launch, Stream  # noqa: E402 - after the check for torch
from thread_ranks import in_group  # noqa: E402

import commdsl  # noqa: E402
from commdsl.machine.resources import data_dir  # noqa: E402
from commdsl.program import launches as phases  # noqa: E402
from commdsl.program.visited import started  # noqa: E402
from commdsl.runtime import products  # noqa: E402
from commdsl.runtime.errors import BrokenGroupError, CaptureError  # noqa: E402
from commdsl.runtime.stamps import mark_now  # noqa: E402

RANKS = 3
NAMES = ("rotation_ring", "rotation_direct", "rotation_carry")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu(RANKS)
    made.install(monkeypatch)
    return made


def run(gpu: FakeGpu, body: Callable[[int, str], None]) -> None:
    """`body` on every rank at once, each with a GPU; raises the first failure."""

    def on_gpu(rank: int, group: str) -> None:
        gpu.here.rank = rank
        body(rank, group)

    in_group(RANKS, on_gpu)


class Rank:
    """Calls of one op on one rank, whose visits leave a mark on the stream they are on, as a kernel would."""

    def __init__(self, gpu: FakeGpu, op: Any, rank: int, group: str) -> None:
        self.gpu, self.op, self.rank, self.group = gpu, op, rank, group
        self.kv = torch.full((96,), float(rank))
        self.marks: list[Launch] = []
        self.seen: list[float] = []

    def look(self, number: int, kv: Any, *acc: Any) -> Any:
        self.marks.append(self.gpu.note(self.gpu.current.cuda_stream))
        self.seen += kv.tolist()
        return [one + kv for one in acc]

    def call(self) -> tuple[list[Launch], list[Launch]]:
        """The kernels of the call's launches, and its visits."""
        self.marks, self.seen, first = [], [], len(self.gpu.launches)
        accs = [torch.zeros(96) for _ in self.op.program(RANKS).visits.signature.inputs[1:]]
        self.op.visit(self.kv, *accs, self.look, group=self.group)
        made = [one for one in self.gpu.launches[first:] if one.rank == self.rank and one not in self.marks]
        return made, self.marks


def follows(gpu: FakeGpu, later: Launch, earlier: Launch) -> bool:
    return earlier.number in later.before


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("landing", ["cells", "place"])
@pytest.mark.parametrize("name", NAMES)
def test_order_is_the_plans(gpu: FakeGpu, name: str, landing: str, captured: bool) -> None:
    """What touches one copy is in the Plan's order on every rank; what the Plan leaves free is in no order."""
    op = commdsl.load(name, ranks=RANKS, tune={"landing": landing})
    plan = op.program(RANKS).visits.plan

    def body(rank: int, group: str) -> None:
        here = Rank(gpu, op, rank, group)
        here.call()
        if captured:
            with gpu.capturing(2 + rank):
                kernels, marks = here.call()
        else:
            kernels, marks = here.call()
        assert sorted(here.seen) == [float(one) for one in range(RANKS) for _ in range(96)]
        given = {True: iter(kernels), False: iter(marks)}
        order = [(one, next(given[isinstance(one, phases.Launch)])) for _, one in started(plan) if _is_kernel(one)]
        free = 0
        for phase, launch in order:
            for earlier, before in order:
                if earlier.turn < phase.turn and _meet(earlier, phase):
                    assert follows(gpu, launch, before)
                if isinstance(phase, phases.Launch) and isinstance(earlier, phases.Visit):
                    free += earlier.turn < phase.turn and not follows(gpu, launch, before)
        assert free >= (1 if name == "rotation_carry" else RANKS - 1)  # a launch beside the visit before it
        assert {launch.stream for phase, launch in order if isinstance(phase, phases.Visit)} == {gpu.current}
        assert gpu.current not in {launch.stream for phase, launch in order if isinstance(phase, phases.Launch)}
        after = gpu.note(gpu.current.cuda_stream)
        if not captured:
            assert all(follows(gpu, after, launch) for _, launch in order)

    run(gpu, body)


def _is_kernel(phase: Any) -> bool:
    return not isinstance(phase, phases.Return)


def _meet(one: Any, other: Any) -> bool:
    return bool({*one.writes} & {*other.reads, *other.writes} or {*other.writes} & {*one.reads})


@pytest.mark.parametrize("landing", ["cells", "place"])
@pytest.mark.parametrize("name", ["rotation_ring", "rotation_carry"])
def test_copy_engine(gpu: FakeGpu, name: str, landing: str) -> None:
    """With the copy engine, too, visits get what travels, eagerly and captured, on a stream of the caller's choice."""
    op = commdsl.load(name, ranks=RANKS, tune={"protocol": "engine", "landing": landing})

    def body(rank: int, group: str) -> None:
        here = Rank(gpu, op, rank, group)
        here.call()
        assert sorted(here.seen) == [float(one) for one in range(RANKS) for _ in range(96)]
        mine: Stream = gpu.stream()
        with gpu.on(mine), gpu.capturing(2 + rank):
            here.call()
        here.call()
        assert {mark.stream for mark in here.marks} == {gpu.current}

    run(gpu, body)


@pytest.mark.parametrize("landing", ["cells", "place"])
def test_copy_engine_beside_sums(gpu: FakeGpu, landing: str) -> None:
    """Copies by the engine and sums by SMs are launches of one call: each owner has what all found about its own."""
    op = commdsl.load("attention_direct_backward", ranks=RANKS, tune={"protocol": "engine", "landing": landing})

    def body(rank: int, group: str) -> None:
        k, v = (torch.arange(96.0).add(100 * rank + more) for more in (0, 7))
        for _ in range(2):
            dk, dv = op.visit(
                k, v, attend=lambda number, *handed: tuple(one.clone() for one in handed[:2]), group=group
            )
            assert torch.equal(dk, RANKS * k)
            assert torch.equal(dv, RANKS * v)

    run(gpu, body)


@pytest.mark.parametrize(("name", "shape"), [("allgather_matmul", (6, 8)), ("matmul_reducescatter", (6 * RANKS, 8))])
def test_launches_that_are_under_way_at_once(gpu: FakeGpu, name: str, shape: tuple[int, int]) -> None:
    """Of products the next launch begins before the one before has ended, and its copies come behind that one's; in any
    order that the edges of a graph allow all of them are made, and nobody waits for ever.
    """
    op = commdsl.load(name, ranks=RANKS, params={"C": 3})
    w = torch.eye(8)

    def body(rank: int, group: str) -> None:
        x = torch.full(shape, float(rank))
        op(x, w, group=group)
        with gpu.on(gpu.stream()), gpu.capturing(2 + rank):
            op(x, w, group=group)
        made = [one for one in gpu.commands if one.capture == 2 + rank]
        copies = [one for one in made if one.copy]
        begins, ends = ([one for one in made if one.turn and one.turn[which]] for which in (6, 5))
        assert len(copies) == len(begins) == len(ends) == 3 * (RANKS - 1)
        for (copy, other), end, begin in zip(pairwise(copies), ends, begins[1:], strict=False):
            assert copy.number in other.before
            assert end.number not in begin.before
        for seed in range(4):
            for dest, _, size in (one.copy for one in copies if one.copy):
                ctypes.memset(dest, 255, size)
            replayed(made, random.Random(10 * seed + rank))
            for dest, source, size in (one.copy for one in copies if one.copy):
                assert ctypes.string_at(dest, size) == ctypes.string_at(source, size)

    run(gpu, body)


def test_where_a_stamped_call_says_the_time(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything else on the caller's stream, and behind all of the call; beside it where a launch comes to wait
    for what it sends, and where that is there; and around each copy of what landed, which begins when the caller's
    stream comes to wait for it.
    """
    op, marks = commdsl.load("matmul_allreduce", ranks=RANKS), [list[Launch]() for _ in range(RANKS)]

    def mark(address: int) -> None:
        marks[gpu.here.rank].append(gpu.note(gpu.current.cuda_stream))
        mark_now(address)

    monkeypatch.setattr(products, "mark_now", mark)

    def body(rank: int, group: str) -> None:
        x, w = torch.full((6 * RANKS, 8), float(rank)), torch.eye(8)
        found, profile = op.profiled(x, w, group=group)
        assert torch.equal(found, torch.full_like(x, sum(range(RANKS))))
        first, *between, last = marks[rank][-13:]
        own = {one.number for one in gpu.commands if one.rank == rank}
        of_call = {number for number in own if first.number < number}
        assert len(marks[rank]) % 13 == 0
        assert first.stream == last.stream == gpu.current
        assert own - of_call <= first.before
        assert of_call | {one.number for one in between} <= last.before
        waits, copies = between[:6], between[6:]
        assert all(one.stream != gpu.current and first.number in one.before for one in waits)
        assert {one.stream for one in copies} == {gpu.current}
        assert not of_call <= copies[0].before
        assert of_call <= copies[1].before
        assert [task.what for task in profile.tasks[3:5]] == ["y.1 [copy out]", "y.2 [copy out]"]

    run(gpu, body)


def test_peers_are_told_what_is_free_while_it_is_made(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch opens before the product is over that it sends; its copies wait for that."""
    op, made = commdsl.load("matmul_reducescatter", ranks=RANKS, params={"C": 2}), dict[int, list[Launch]]()

    run_task = products.ByLibrary.__call__

    def noted(*given: Any, out: Any) -> None:
        made[gpu.here.rank].append(gpu.note(gpu.current.cuda_stream))
        run_task(*given, out=out)

    monkeypatch.setattr(products.ByLibrary, "__call__", noted)

    def body(rank: int, group: str) -> None:
        made[rank] = []
        op(torch.ones(6 * RANKS, 8), torch.eye(8), group=group)
        found = [one for one in gpu.commands if one.rank == rank]
        begins, copies = [one for one in found if one.turn and one.turn[6]], [one for one in found if one.copy]
        assert len(made[rank]) == 2 * RANKS
        assert len(begins) == len(copies) == 2 * (RANKS - 1)
        for product, begin, copy in zip(made[rank], begins, copies, strict=False):
            assert product.number in copy.before
            assert product.number not in begin.before

    run(gpu, body)


@pytest.mark.parametrize("name", ["allgather_matmul", "rotation_ring"])
def test_streams_of_its_own(gpu: FakeGpu, name: str) -> None:
    """What goes beside a caller's products is on none of torch's streams: the caller could have been given the same."""
    op = commdsl.load(name, ranks=RANKS)

    def body(rank: int, group: str) -> None:
        if name == "allgather_matmul":
            op(torch.ones(6, 8), torch.eye(8), group=group)
        else:
            Rank(gpu, op, rank, group).call()

    run(gpu, body)
    assert gpu.launches or gpu.commands
    assert gpu.of_torch
    assert not any(one.before for one in gpu.of_torch)


def replayed(commands: Sequence[Command], dice: random.Random) -> None:
    """A replay of a graph, in an order that its edges allow."""
    numbers, done = {one.number for one in commands}, set[int]()
    while len(done) < len(commands):
        ready = [one for one in commands if one.number not in done and one.before & numbers <= done]
        chosen = dice.choice(ready)
        chosen.run()
        done.add(chosen.number)


def test_capture_needs_a_first_call(gpu: FakeGpu) -> None:
    """As for any call: neither memory nor a kernel is set up inside a capture."""
    op = commdsl.load("rotation_ring", ranks=RANKS)

    def body(rank: int, group: str) -> None:
        here = Rank(gpu, op, rank, group)
        commdsl.load("allreduce_ring", ranks=RANKS)(torch.ones(9), group=group)
        with gpu.capturing(2 + rank), pytest.raises(CaptureError, match="no workspace yet"):
            here.call()
        here.call()

    run(gpu, body)


def test_a_graph_keeps_where_it_lands(gpu: FakeGpu) -> None:
    """A larger call cannot make room inside a capture; outside it does, and what a graph puts to stays where it is."""
    op = commdsl.load("rotation_ring", ranks=RANKS, tune={"landing": "place"})

    def landed(group: str) -> list[int]:
        return [one.nbytes for one in commdsl.memory_summary().held if (one.group, one.op) == (group, "landing")]

    def body(rank: int, group: str) -> None:
        here = Rank(gpu, op, rank, group)
        here.call()
        op.visit(torch.zeros(100), lambda number, kv: None, group=group)
        assert len(landed(group)) == 1
        with gpu.capturing(2 + rank), pytest.raises(CaptureError, match="no workspace yet"):
            op.visit(torch.zeros(1 << 20), lambda number, kv: None, group=group)
        with gpu.capturing(2 + rank):
            here.call()
        op.visit(torch.zeros(1 << 20), lambda number, kv: None, group=group)
        assert len(landed(group)) == 2
        op.visit(torch.zeros(1 << 21), lambda number, kv: None, group=group)
        assert len(landed(group)) == 2
        here.call()
        op.release(group)
        assert landed(group) == []

    run(gpu, body)


def refusing(after: int, most: int = 1 << 30) -> Callable[[], None]:
    """What the driver does that makes so many launches and copies, and then refuses so many."""
    refused = range(after, after + most)
    asked = itertools.count()

    def refuse() -> None:
        if next(asked) in refused:
            raise RuntimeError("an error of the driver's")

    return refuse


@pytest.mark.parametrize("name", ["allgather_matmul", "rotation_carry"])
def test_what_the_driver_refuses_half_way(gpu: FakeGpu, name: str) -> None:
    """No call is made in the group before all ranks have reset it: others wait for the rest of this one."""
    op = commdsl.load(name, ranks=RANKS)

    def body(rank: int, group: str) -> None:
        here = Rank(gpu, op, rank, group)

        def call() -> None:
            if name == "rotation_carry":
                here.call()
            else:
                op(torch.ones(6, 8), torch.eye(8), group=group)

        call()
        for after in (0, 1):
            gpu.here.refuse = refusing(after)
            with pytest.raises(RuntimeError, match="of the driver") as caught:
                call()
            assert "until every rank has called commdsl.reset()" in caught.value.__notes__[-1]
            del gpu.here.refuse
            with pytest.raises(BrokenGroupError, match="of the driver"):
                call()
            commdsl.reset(group)
            call()
        with gpu.on(gpu.stream()), gpu.capturing(2 + rank):
            gpu.here.refuse = refusing(1, most=1)
            with pytest.raises(RuntimeError, match="of the driver"):
                call()
        call()  # what is captured is not under way

    run(gpu, body)


def test_all_of_an_op_is_given_back(gpu: FakeGpu) -> None:
    """Also the flags of launches that begin before others end, and what calls have that say the time."""
    op = commdsl.load("allgather_matmul", ranks=RANKS, params={"C": 3})

    def held(group: str) -> set[str]:
        return {one.op for one in commdsl.memory_summary().held if one.group == group}

    def body(rank: int, group: str) -> None:
        x, w = torch.ones(6, 8), torch.eye(8)
        op(x, w, group=group)
        op.profiled(x, w, group=group)
        assert held(group) > {"desk"}
        op.release(group)
        assert held(group) == {"desk"}
        op(x, w, group=group)

    run(gpu, body)


@pytest.mark.parametrize("nodes", [(0, 0, 1), (0, 1, 2)])
@pytest.mark.parametrize("landing", ["cells", "place"])
def test_ranks_that_are_far(gpu: FakeGpu, landing: str, nodes: tuple[int, ...]) -> None:
    """What visits comes from GPUs of other nodes, too: NVSHMEM puts it where it belongs."""
    gpu.nodes = nodes
    op = commdsl.load("rotation_ring", ranks=RANKS, tune={"landing": landing})

    def body(rank: int, group: str) -> None:
        here = Rank(gpu, op, rank, group)
        for _ in range(2):
            here.call()
            assert here.seen == [float((rank - n) % RANKS) for n in range(RANKS) for _ in range(96)]

    run(gpu, body)


def test_raising_in_a_capture_joins_the_streams(gpu: FakeGpu) -> None:
    """What the function raises comes through, and the stream beside the caller's is joined before."""
    op = commdsl.load("rotation_ring", ranks=RANKS)

    def body(rank: int, group: str) -> None:
        here = Rank(gpu, op, rank, group)
        here.call()

        def fails(number: int, kv: Any) -> None:
            raise ValueError(f"visit {number}")

        with gpu.capturing(2 + rank), pytest.raises(ValueError, match="visit 0"):
            op.visit(here.kv, fails, group=group)
        here.call()

    run(gpu, body)


def test_two_tunings_are_two_ops(gpu: FakeGpu, tmp_path: Path) -> None:
    """Launches of another number of SMs are launched with it."""
    ops = [commdsl.load("rotation_ring", ranks=RANKS, tune={"sms": sms}) for sms in (8, 16)]
    assert [op.program(RANKS).visits.launched[0].plan.comm.sms for op in ops] == [8, 16]

    def body(rank: int, group: str) -> None:
        for op in ops:
            here = Rank(gpu, op, rank, group)
            here.call()
            assert sorted(here.seen) == [float(one) for one in range(RANKS) for _ in range(96)]

    run(gpu, body)


@pytest.mark.parametrize("tune", [{"lanes": 2}, {"protocol": "packet"}, {"protocol": "engine"}])
def test_types_of_their_own(gpu: FakeGpu, tune: dict[str, Any]) -> None:
    """Sums travel in float32 and in a length of their own beside keys in bfloat16, written where they belong, eagerly
    and captured."""
    text = (data_dir("schedules") / "attention" / "rotation_carry.comm").read_text(encoding="utf-8")
    op = commdsl.load({"carry.comm": text.replace("inout acc ", "inout acc float32 ")}, ranks=RANKS, tune=tune)

    def body(rank: int, group: str) -> None:
        kv = torch.full((96,), rank + 1.0, dtype=torch.bfloat16)

        def attend(number: int, kv: Any, acc: Any, *, out: Any) -> None:
            torch.add(acc, kv.float().sum() * 1001.0, out=out)

        def call() -> Any:
            return op.visit(kv, torch.zeros(700), attend=attend, group=group)[1]

        assert torch.equal(call(), torch.full((700,), RANKS * 96 * (rank + 1) * 1001.0))
        with gpu.capturing(2 + rank):
            call()
        assert torch.equal(call(), torch.full((700,), RANKS * 96 * (rank + 1) * 1001.0))

    run(gpu, body)
