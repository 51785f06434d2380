"""Calls on tensors where others were before, over a fake GPU: what is asked of the driver is what those asked."""

from __future__ import annotations

import ctypes
import gc
import math
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fake_gpu import CONTEXT, FakeGpu, Stream  # noqa: E402 - after the check for torch
from test_products import EXCHANGE, GATHER, REDUCE, RETURN, SCATTER, WITH_ROWS, given, wanted  # noqa: E402
from thread_ranks import in_group  # noqa: E402

import commdsl  # noqa: E402
from commdsl import overlap  # noqa: E402
from commdsl.overlap import programs  # noqa: E402
from commdsl.overlap.auto import OPERATORS, Product  # noqa: E402
from commdsl.planner.tuning.selection import Choice  # noqa: E402
from commdsl.program.visited import landing  # noqa: E402
from commdsl.runtime import again, fused, groups  # noqa: E402
from commdsl.runtime.again import Again  # noqa: E402
from commdsl.runtime.communicator import Communicator  # noqa: E402
from commdsl.runtime.driver import play  # noqa: E402
from commdsl.runtime.errors import BrokenGroupError  # noqa: E402
from commdsl.runtime.products import ByLibrary, Multiplying  # noqa: E402
from commdsl.runtime.stamps import mark_now  # noqa: E402
from commdsl.runtime.stream_order import MARKED_CALLS  # noqa: E402

RANKS, PIECES = 2, 2
SIZE = (2 * PIECES, 8, 16)
ANOTHER = 0xBAD
"""The context of another GPU."""


class Room(threading.local):
    """New tensors of a rank lie where those of its last call did, as torch's allocator has it on a GPU."""

    def __init__(self) -> None:
        self.number = 0  # another one: another place
        self.taken = 0  # by this call
        self._places: dict[tuple[object, ...], Any] = {}

    def new_empty(self, like: Any, *shape: Any, dtype: Any = None, **_: object) -> Any:
        size = shape if shape and isinstance(shape[0], int) else tuple(shape[0])
        key = (self.number, self.taken, size, dtype)
        self.taken += 1
        if key not in self._places:
            self._places[key] = torch.empty(size, dtype=dtype or like.dtype)
        return self._places[key].detach()


class Products(fused.Fused):
    """All products are one kernel, which waits for words and counts in them, and is none of a GPU's."""

    def __init__(self, gpu: FakeGpu, *given: Any) -> None:
        self._gpu = gpu
        super().__init__(*given)

    def _kernel(self, rows: Any, factor: Any) -> Any:
        one = Kernel(self._gpu)
        return SimpleNamespace(
            kernel=one,
            awaiting=one,
            waiting=self._waiting,
            stores=lambda task: 1,
            intervals=np.arange(len(self._tasks)),
            mark=mark_now,
        )

    def mark(self, address: int) -> None:
        mark_now(address)

    def _prepared(self, kernel: Any, held: Mapping[Any, Any], beside: Any, landing: tuple[int, ...]) -> Any:
        words = (ctypes.c_uint64 * self._words).from_address(beside.words)
        mapped = [matrices for matrices, _ in self._mapped(held, landing)]
        left: list[int] = []

        def start() -> None:
            assert not left
            left.extend(range(len(self._rows)))
            self._gpu.here.product = go_on
            go_on()

        def go_on() -> bool:
            """As many tasks as what they wait for is there for; whether those were the last."""
            for number in tuple(left):
                row = self._rows[number]
                waits = [wait.word for some in (row.waits, *(one.waits for one in row.sources)) for wait in some]
                if all(words[one] for one in (*waits, *(() if row.ready is None else (row.ready,)))):
                    self._run(number, held, mapped)
                    left.remove(number)
                    if row.stored is not None:
                        words[row.stored] = 1
            return not left

        return SimpleNamespace(blocks=1, threads=1, cluster=1, pointers=start)

    def _run(self, number: int, held: Mapping[Any, Any], mapped: list[Any]) -> None:
        row, task = self._rows[number], self._tasks[number]
        out = [held[kept] for kept in task.writes]
        if row.result is None:
            out[0] = torch.empty_like(out[0])
        given = (held[kept] for kept in task.operands)
        ByLibrary(self._tasks)(number, *given, out=tuple(out) if len(out) > 1 else out[0])
        for place in row.pushes:
            to = mapped[place.map]
            ctypes.memmove(to.address + place.at * to.step, out[0].data_ptr(), out[0].nbytes)

    def _waiting(self, word: int, least: int) -> Any:
        def wait() -> None:
            self._gpu.here.product()
            assert ctypes.c_uint64.from_address(word).value >= least, "nothing goes on"

        return SimpleNamespace(blocks=1, threads=1, cluster=1, pointers=wait)


class Kernel:
    """What it does stands in place of its arguments."""

    function, shared_bytes = 0, 0

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu

    def launch(self, prepared: Any, stream: int) -> None:
        assert getattr(self.gpu.here, "context", CONTEXT) != ANOTHER, "a launch in the context of another GPU"
        self.gpu._command(stream, prepared.pointers, turn=(prepared.pointers.__name__,))


def launch(gpu: FakeGpu, real: Callable[..., object], function: int, *rest: Any) -> None:
    """As the driver's."""
    if function == Kernel.function:
        *_, stream, pointers, _ = rest
        Kernel(gpu).launch(SimpleNamespace(pointers=pointers), stream)
    else:
        real(function, *rest)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu(RANKS)
    made.install(monkeypatch)
    return made


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    made = Room()
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda like, *shape, **kind: made.new_empty(like, *shape, **kind))
    return made


@pytest.fixture
def made(gpu: FakeGpu, room: Room, monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    """Of ranks in any order what makes their calls again: those of an op, of which each has one."""
    found: list[Again] = []

    def multiplying(one: Multiplying, *given: Any) -> None:
        plain(one, *given)
        _, communicator, program, _, inputs = given
        plan = one._pushing(program.visits)
        held = partial(one._cut.operand, given=one._cut.given(inputs))
        lying = landing(plan, program.visits.parts)
        one._fused = Products(gpu, plan, lying, one._cut.places, communicator.rank, held, torch.device("cuda", 0))
        one._alone = communicator.gate.alone
        if plan.stamped:
            return
        one._again = Again(communicator)
        driver = one._again._driver
        one._again._driver = replace(driver, launch=partial(launch, gpu, driver.launch))
        found.append(one._again)

    plain = Multiplying.__init__
    monkeypatch.setattr(Multiplying, "__init__", multiplying)
    return found


def run(gpu: FakeGpu, body: Callable[[int, str], None]) -> None:
    def on_gpu(rank: int, group: str) -> None:
        gpu.here.rank = rank
        body(rank, group)

    in_group(RANKS, on_gpu)


class Caller:
    """Calls of an op on one rank, each held against what it must give."""

    def __init__(
        self, gpu: FakeGpu, room: Room, name: str, rank: int, group: str, matmul: str = "kernel", is_ended: bool = False
    ) -> None:
        """`is_ended`: with a bias and a residual, which all ranks have alike."""
        self.gpu, self.room, self.group, self.rank = gpu, room, group, rank
        self.name = name
        params = {"C": PIECES} | ({"B": 1, "R": 1} if is_ended else {})
        self.op = commdsl.load(name, params=params, ranks=RANKS, tune={"matmul": matmul})
        self.x, self.w = given(name, RANKS, *SIZE)
        self.want = torch.tensor(wanted(name, self.x, self.w)[rank])
        self.rows, self.factor = torch.tensor(self.x[rank]), torch.tensor(self.w[rank])
        ends = (self.want.shape[1:], self.want.shape) if is_ended else ()
        self.ends = [torch.arange(math.prod(shape), dtype=self.rows.dtype).view(shape) % 7 for shape in ends]
        self.want += sum(self.ends)
        self.beside = [one.clone() for one in self.ends]

    def call(self, factor: int = 1, room: int = 0) -> None:
        self.room.number, self.room.taken = room, 0
        self.rows.copy_(torch.tensor(self.x[self.rank]) * factor)
        for own, one in zip(self.beside, self.ends, strict=True):
            own.copy_(one * factor)
        self.gpu.here.product = lambda: True
        found = self.op(self.rows, self.factor, *self.beside, group=self.group)
        assert self.gpu.here.product()
        if self.name == WITH_ROWS:
            found, rows = found
            assert torch.equal(rows, torch.tensor(np.concatenate(self.x)) * factor)
            rows.fill_(-1)
        assert torch.equal(found.double(), self.want * factor)
        found.fill_(-1)
        self.results = range(found.data_ptr(), found.data_ptr() + found.nbytes)  # torch copies to them, the first time

    def asked(self, factor: int) -> list[tuple[Any, ...]]:
        """The copies between ranks and the kernels of a call, each with those that it comes after."""
        before = len(self.gpu.commands)
        self.call(factor)
        found = [one for one in self.gpu.commands[before:] if one.rank == self.rank and (one.copy or one.turn)]
        found = [one for one in found if not one.copy or one.copy[0] not in self.results]
        at = {one.number: place for place, one in enumerate(found)}
        return [(one.copy, one.turn, {at[number] for number in one.before if number in at}) for one in found]


@pytest.mark.parametrize(
    ("name", "matmul", "is_ended"),
    [(name, "kernel", False) for name in (GATHER, WITH_ROWS, SCATTER, REDUCE, EXCHANGE, RETURN)]
    + [(name, "push", False) for name in (SCATTER, REDUCE, EXCHANGE)]
    + [(name, "kernel", True) for name in (SCATTER, REDUCE, RETURN)]
    + [(name, "push", True) for name in (SCATTER, REDUCE)],
)
def test_a_list_is_the_call(
    gpu: FakeGpu, room: Room, made: list[Again], name: str, matmul: str, is_ended: bool
) -> None:
    """The same numbers come of it, and the driver is asked for the same copies and kernels, of which the same come
    behind the same others; calls on other tensors come between those on the same ones.
    """

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, name, rank, group, matmul, is_ended)
        first = caller.asked(1)
        for number in range(2, 8):
            assert caller.asked(number) == first
            caller.call(number, room=10 + number)

    run(gpu, body)
    assert [len(one._known) for one in made] == [1] * RANKS


@pytest.mark.parametrize("name", [SCATTER, REDUCE, EXCHANGE])
def test_what_is_pushed_is_not_copied(gpu: FakeGpu, room: Room, made: list[Again], name: str) -> None:
    """Between ranks nothing but flags goes beside the product, and it is told when peers are ready, before it ends."""

    def body(rank: int, group: str) -> None:
        asked = Caller(gpu, room, name, rank, group, "push").asked(1)
        assert not [copy for copy, *_ in asked if copy]
        plain = [turn for copy, turn, _ in Caller(gpu, room, name, rank, group).asked(1) if not copy]
        assert len(asked) == len(plain)

    run(gpu, body)


@pytest.mark.parametrize("matmul", ["kernel", "push"])
@pytest.mark.parametrize("name", [SCATTER, REDUCE, EXCHANGE])
def test_profiled_calls(gpu: FakeGpu, room: Room, made: list[Again], name: str, matmul: str) -> None:
    """They give the same, and say when each launch begins, is ready and ends, also where products push what it would
    copy.
    """

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, name, rank, group, matmul)
        op, profiles = caller.op, []

        def profiled(*given: Any, group: str) -> Any:
            found, profile = op.profiled(*given, group=group)
            profiles.append(profile)
            return found

        caller.op = profiled
        caller.call()
        (profile,) = profiles
        times = profile.intervals
        assert (times["begin"] <= times["ready"]).all()
        assert (times["ready"] <= times["end"]).all()
        said = {profile.tasks[one].what for one in profile.task}
        launched = {task.what for task in profile.tasks if " -> " in task.what and not task.computes}
        assert len(launched) >= PIECES
        assert launched <= said

    run(gpu, body)


@pytest.mark.parametrize(("name", "asked"), [(GATHER, 20), (SCATTER, 22), (REDUCE, 42), (EXCHANGE, 31), (RETURN, 20)])
def test_what_the_driver_is_asked(gpu: FakeGpu, room: Room, made: list[Again], name: str, asked: int) -> None:
    """So many calls of it make one of an op, in two pieces on two ranks."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, name, rank, group)
        for number in range(3):
            caller.call(number + 1)

    run(gpu, body)
    for one in made:
        (listing,) = one._known.values()
        assert len(listing.calls) == asked


def test_what_the_host_does(gpu: FakeGpu, room: Room, made: list[Again], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers with gradients, in a step like those before: each of their four calls is a list, and takes no more than so
    many functions of ours, of which a call costs a third of a microsecond, and questions to CUDA.
    """
    monkeypatch.setattr(programs, "choose", in_pieces)
    multiplying = Multiplying.__call__

    def finished() -> None:
        assert gpu.here.product()

    def whole(one: Multiplying, inputs: Sequence[Any]) -> list[Any]:
        gpu.here.product = lambda: True
        found = multiplying(one, inputs)
        finished()
        return found

    monkeypatch.setattr(Multiplying, "__call__", whole)

    def body(rank: int, group: str) -> None:
        first = overlap.ColumnParallelLinear(16, 16, bias=False, group=group, keep_rows=True)
        second = overlap.RowParallelLinear(16, 16, bias=False, group=group)
        x, back = torch.ones(8, 16, requires_grad=True), torch.ones(8, 16)

        def step() -> None:
            room.taken = 0
            torch.autograd.grad(second(first(x)), (x, first.weight, second.weight), back)

        for _ in range(6):
            step()
        functions, questions = counted(step, but=(play, finished))
        assert functions <= 4 * 60
        assert questions <= 4 * 4

    run(gpu, body)


def in_pieces(product: Product, device: str) -> Choice:
    """In place of what a table or the model chooses."""
    of = product.name, product.nbytes, product.ranks, device
    return Choice(*of, OPERATORS[product.operator].schedule, (("C", PIECES),), (), "")


def counted(step: Callable[[], None], but: Sequence[Any]) -> tuple[int, int]:
    """Calls of functions of ours, but for what stands in place of the GPU; questions whether a stream is captured."""
    ours, question = str(Path(commdsl.__file__).parent), torch.cuda.is_current_stream_capturing.__code__
    functions = questions = playing = 0
    apart = [one.__code__ for one in but]

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal functions, questions, playing
        code = frame.f_code
        if code in apart:
            playing = event == "call"
        elif event == "call" and not playing:
            functions += code.co_filename.startswith(ours)
            questions += code is question

    sys.setprofile(look)
    try:
        step()
    finally:
        sys.setprofile(None)
    return functions, questions


def test_what_takes_rounds_is_copied(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """Peers are told of each by itself: a tile is shorter than a block here."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, SCATTER, rank, group)
        caller.op = commdsl.load(SCATTER, params={"C": 1}, ranks=RANKS, tune={"matmul": "push", "tile": 128})
        assert len([copy for copy, *_ in caller.asked(1) if copy]) > 1

    run(gpu, body)


def test_streams(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """A call made again on another stream comes behind the last one; what the caller's stream has next, behind it."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        streams = [gpu.current, gpu.stream()]
        for stream in 3 * streams:
            with gpu.on(stream):
                before = [one.number for one in gpu.commands if one.rank == rank]
                caller.call()
                assert {one.number for one in gpu.commands if one.rank == rank} <= stream.before
            first = next(one for one in gpu.commands if one.rank == rank and one.number not in before)
            assert {*before} <= first.before

    run(gpu, body)
    assert [len(one._known) for one in made] == [2] * RANKS


def test_products_of_two_groups(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """Each fills the GPU: on streams of their own they follow one another all the same, plain, from lists and in a
    capture, where what goes beside them may not have an SM otherwise.
    """
    others = commdsl.threads(RANKS)

    def body(rank: int, group: str) -> None:
        callers = [Caller(gpu, room, name, rank, of) for name, of in ((GATHER, group), (SCATTER, others[rank]))]
        streams = [gpu.stream(), gpu.stream()]

        def one_behind_another(call: Callable[[Caller], object], times: int) -> None:
            before = set[int]()
            for caller, stream in times * [*zip(callers, streams, strict=True)]:
                with gpu.on(stream):
                    begin = len(gpu.commands)
                    call(caller)
                    mine = [one for one in gpu.commands[begin:] if one.rank == rank]
                    assert all(before <= one.before for one in mine)
                    before |= {one.number for one in mine}

        one_behind_another(lambda caller: caller.call(room=callers.index(caller)), 3)
        with gpu.on(streams[0]), gpu.capturing(2 + rank):
            streams[1].wait_stream(streams[0])
            one_behind_another(lambda caller: caller.op(caller.rows, caller.factor, group=caller.group), 1)
            streams[0].wait_stream(streams[1])

    run(gpu, body)
    assert [len(one._known) for one in made] == [1] * 2 * RANKS


@pytest.mark.parametrize("times", [1, 2])
def test_nothing_waits_for_the_product(gpu: FakeGpu, room: Room, made: list[Again], times: int) -> None:
    """Also where many calls before were on the caller's stream alone, and left no mark: what goes beside comes behind
    those, and not behind the product that is there when it begins, and waits for it.
    """

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, SCATTER, rank, group)
        for _ in range(times):
            for _ in range(2 * MARKED_CALLS):
                commdsl.all_reduce(torch.ones(8), group=group)
            begin = gpu.note(gpu.current.cuda_stream).number
            found = caller.asked(1)
        product = next(at for at, (_, turn, _) in enumerate(found) if turn == ("start",))
        assert not any(product in after for _, _, after in found)
        assert begin in next(one for one in reversed(gpu.commands) if one.rank == rank).before

    run(gpu, body)


def test_the_callers_capture(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """What the caller captures is the plain call, also where there is a list of it."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        with gpu.on(gpu.stream()):
            for number in range(3):
                caller.call(number + 1)
            with gpu.capturing(2 + rank):
                caller.op(caller.rows, caller.factor, group=group)
            assert not gpu.current.capture
        found = [one for one in gpu.commands if one.capture == 2 + rank]
        assert [one.turn for one in found if one.turn]
        caller.call(4)

    run(gpu, body)


def test_what_an_op_had_goes_with_it(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """A list is of the memory of its group: where that was given back it is asked no more."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        for number in range(3):
            caller.call(number + 1)
        caller.op.release(group)
        for number in range(3):
            caller.call(number + 1)

    run(gpu, body)
    assert [len(one._known) for one in made] == [1] * 2 * RANKS


def test_a_broken_group(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """No call is made again there before all ranks have reset it, and then as before."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, SCATTER, rank, group)
        for number in range(3):
            caller.call(number + 1)
        groups.of(group, caller.rows.device).fail(RuntimeError("a time-out"))
        with pytest.raises(BrokenGroupError, match="a time-out"):
            caller.call(4)
        commdsl.reset(group)
        for number in range(3):
            caller.call(number + 1)

    run(gpu, body)


def test_a_group_is_asked_once(gpu: FakeGpu, room: Room, made: list[Again], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is broken: by a plain call, by the one that makes a list, and by one of a list."""
    asked, ready = [0] * RANKS, Communicator.ready

    def counted(comm: Communicator) -> None:
        asked[comm.rank] += 1
        ready(comm)

    monkeypatch.setattr(Communicator, "ready", counted)

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        for number in range(4):
            before = asked[rank]
            caller.call(number + 1)
            assert asked[rank] == before + (2 if number == 0 else 1)  # and by what prepares the first

    run(gpu, body)


def test_more_than_are_kept(gpu: FakeGpu, room: Room, made: list[Again], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that are elsewhere in each call push nothing out for good, and take no more than a bound."""
    monkeypatch.setattr(again, "MOST", 4)

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        for number in range(30):
            caller.call(number + 1, room=number // 2)
        for number in range(3):
            caller.call(number + 1)

    run(gpu, body)
    assert all(0 < len(one._known) <= 4 for one in made)
    assert all(0 < len(one._met) <= 4 for one in made)


@pytest.mark.parametrize("context", [0, ANOTHER])
def test_context(gpu: FakeGpu, room: Room, made: list[Again], context: int) -> None:
    """A thread new to CUDA, or one whose current device is another, makes its calls on the tensors' GPU, and lists."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        caller.call(1)
        gpu.here.context = context
        for number in range(3):
            caller.call(number + 2)
            caller.call(number + 2, room=10 + number)
        assert gpu.here.context == (context or CONTEXT)

    run(gpu, body)
    assert [len(one._known) for one in made] == [1] * RANKS


def test_after_a_capture(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """What is captured runs later: the next call on another stream comes behind the one before the capture."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        streams = [gpu.stream(), gpu.stream(), gpu.stream()]
        for stream in streams[:2]:
            with gpu.on(stream):
                caller.call()
                caller.call()
        with gpu.on(streams[2]), gpu.capturing(2 + rank):
            caller.op(caller.rows, caller.factor, group=group)
        before = {one.number for one in gpu.commands if one.rank == rank and not one.capture}
        with gpu.on(streams[0]):
            caller.call()
            assert before <= streams[0].before

    run(gpu, body)


def test_a_stream_with_the_number_of_another(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """Streams that torch has not made go, and new ones get their numbers: calls on those come behind the last one."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        stream = gpu.stream(external=True)
        for number in range(4):
            with gpu.on(stream):
                before = {one.number for one in gpu.commands if one.rank == rank}
                caller.call(number + 1)
                assert before <= stream.before
            stream.is_gone = True
            stream = gpu._streams[stream.ptr] = Stream(stream.ptr, stream.ptr)

    run(gpu, body)


def test_a_call_that_ends_half_way(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """The other ranks wait for what it did not send: nothing is called in the group before all have reset it."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, GATHER, rank, group)
        for number in range(2):
            caller.call(number + 1)
        (listing,) = next(one for one in made if one._communicator.rank == rank)._known.values()
        where = len(listing.calls) // 2
        asked, listing.calls[where] = listing.calls[where], (refuse,)
        with pytest.raises(RuntimeError, match="of the driver"):
            caller.call(3)
        with pytest.raises(BrokenGroupError, match="of the driver"):
            caller.call(4)
        listing.calls[where] = asked
        commdsl.reset(group)
        for number in range(3):
            caller.call(number + 5)

    def refuse() -> None:
        raise RuntimeError("an error of the driver's")

    run(gpu, body)


def test_interrupted() -> None:
    """Ctrl-C waits for the end of a list: half a call is none."""
    made = list[int]()
    interrupt = ctypes.CDLL(None)["raise"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs in the background may have none
    try:
        with pytest.raises(KeyboardInterrupt):
            play([(made.append, 0), (interrupt, signal.SIGINT.value), (made.append, 1), (made.append, 2)])
    finally:
        signal.signal(signal.SIGINT, before)
    assert made == [0, 1, 2]


def test_what_a_list_had_goes_with_it(gpu: FakeGpu, room: Room, made: list[Again]) -> None:
    """At once, also where nobody collects cycles, as training has it."""

    def body(rank: int, group: str) -> None:
        caller = Caller(gpu, room, SCATTER, rank, group)
        for number in range(3):
            caller.call(number + 1)

    run(gpu, body)
    gc.disable()
    try:
        for one in made:
            (listing,) = map(weakref.ref, one._known.values())
            one._known.clear()
            assert listing() is None
    finally:
        gc.enable()
