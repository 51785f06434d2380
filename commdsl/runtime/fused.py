"""Turns the tasks of a Plan into one launch of our kernel, concurrent with the Plan's launches of moves.

Assumes a Hopper GPU, and matrices that TMA reads (`fits`). Does not order anything: each task of the Plan says what it
waits for, and each launch beside it which tasks it waits for. A counter of the Plan is a word of the call: the end of a
launch raises one, its opening another, and a task counts its stored tiles in a third. Whatever the kernel waits for is
such a word. It leaves SMs free, as a launch beside may need one to go on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias, assert_never

import torch

from commdsl.build.matmul import Product, form_of
from commdsl.build.task_table import Place, SourceRow, TaskRow, WordWait
from commdsl.build.tilings import chosen_for
from commdsl.ir.functions import GATED
from commdsl.ir.products import MATMUL
from commdsl.machine.config import from_environment
from commdsl.program.memory import Kept
from commdsl.program.plan import Plan
from commdsl.program.pushed import destinations, is_kept
from commdsl.program.stamps import Layout, task_of
from commdsl.program.tasks import Counter, Over, Ready, Stored, Task
from commdsl.program.tasks import Product as TaskProduct
from commdsl.program.visited import launches, tasks
from commdsl.runtime import matmul
from commdsl.runtime.errors import CaptureError
from commdsl.runtime.functions import Function
from commdsl.runtime.kept import keep
from commdsl.runtime.matmul import Addresses, Matmul, Matrices, Side
from commdsl.runtime.stamps import Stamps
from commdsl.runtime.streams import Around, Streams
from commdsl.runtime.tensors import ALIGNMENT, FLOAT8, element_name, is_deep
from commdsl.runtime.workspace import ALONE, Meanwhile, Start

LEFT = 2
"""SMs that the tasks leave free: one for kernels beside, one because clusters have two blocks."""

LINK = 390e3
"""Bytes a microsecond that a GPU receives: the last rows to arrive should not wait for large tiles."""

MAX_KEPT = 1024
"""Prepared launches that are kept, two kilobytes each: encoding the maps of matrices takes the driver a while."""

HOPPER = (9, 0)

_ADDED = (torch.bfloat16, torch.float16)
_MADE = (*_ADDED, torch.float32)
"""Types of results, and those of them that can be added to."""

PlaceOf: TypeAlias = Mapping[str, tuple[str, int]]
"""The name of the buffer of a part, and its number among the matrices of that."""

Held: TypeAlias = Callable[[Kept], torch.Tensor]
"""Returns a tensor of the shape, type and layout that a call has for a buffer."""

MapKey: TypeAlias = tuple[Side, str, int, int, int]
"""The key of a map: the side of its matrices in tasks, their buffer and copy, the peer (-1: here), and the number of
the one matrix (-1: all of the buffer, which lie side by side).
"""


def fits(plan: Plan, held: Held, device: torch.device) -> bool:
    """Return whether our kernel runs the tasks of a Plan. It waits for launches beside it, so these must need no SMs,
    and must not stand behind it in one queue to the GPU.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != HOPPER:
        return False
    if from_environment().one_queue or any(one.moves.carrier.runs_on_sms for one in launches(plan)):
        return False
    every = tasks(plan)
    first = every[0].products[0]
    rows, factor, result = (held(kept) for kept in (first.rows, first.factor, first.result))
    if rows.dtype not in (*_ADDED, FLOAT8) or (rows.dtype != FLOAT8 and rows.dtype != result.dtype):
        return False
    if result.dtype not in (_ADDED if any(one.added or one.bias or one.residual for one in every) else _MADE):
        return False
    if rows.dtype == FLOAT8 and len({one.factor.name.partition(".")[0] for one in _products(every)}) > 1:
        return False  # a launch has one scale of its factors
    like = [(held(one.rows), held(one.factor), held(one.result)) for one in _products(every)]
    kinds = {(a.dtype, b.dtype, c.dtype, is_deep(a), is_deep(b)) for a, b, c in like}
    if len(kinds) > 1 or rows.dtype != factor.dtype or not all(_is_read(one) for some in like for one in some):
        return False
    if any(len({held(one.rows).shape[1] for one in task.products}) > 1 for task in every):
        return False
    return not any(task.copy is not None and (task.added or task.residual or not is_deep(rows)) for task in every)


def _products(every: Sequence[Task]) -> Iterator[TaskProduct]:
    return (product for task in every for product in task.products)


def _is_read(matrix: torch.Tensor) -> bool:
    """Return whether TMA reads a matrix: it is not empty, and its rows are multiples of 16 bytes."""
    return matrix.numel() > 0 and matrix.shape[1] * matrix.itemsize % ALIGNMENT == 0


class Fused:
    """The tasks of calls of one shape on one GPU: a kernel for each layout of operands."""

    def __init__(
        self, plan: Plan, lying: Sequence[Kept], place_of: PlaceOf, rank: int, held: Held, device: torch.device
    ) -> None:
        """Build the rows and the first kernel. `lying`: the buffers that peers put to, in the order of their memory."""
        self._tasks, self._place_of, self._rank = tasks(plan), place_of, rank
        self._plan, self._launches = plan, launches(plan)
        self._touched = tuple({kept: None for one in self._tasks for kept in (*one.operands, *one.writes)})
        self._lying = frozenset(lying)
        self._apart = self._lying_apart(lying)
        self._maps = dict[MapKey, int]()
        self._biases = dict[tuple[str, int], int]()
        # Words: launches are over; tiles of a task are stored; peers are ready.
        self._words = 2 * len(self._launches) + len(self._tasks)
        self._opened = {one.push: self._word(Ready(one.push)) for one in self._tasks if one.push is not None}
        awaited = {counter for one in self._tasks for counter in one.counters}
        told = max((launch.after for launch in self._launches), default=0)
        self._rows = tuple(
            self._row(task, is_awaited=number < told or Stored(number) in awaited)
            for number, task in enumerate(self._tasks)
        )
        self._device = device.index
        self._products = tuple(self._product(task, held) for task in self._tasks)
        brought = (
            held(one.rows) for one in _products(self._tasks) if any(isinstance(wait, Over) for wait in one.waits)
        )
        self._arriving = sum(one.nbytes for one in brought)
        self._is_stamped = plan.stamped
        self._kernels: dict[tuple[bool, bool], Matmul] = {}
        self._known: dict[tuple[object, ...], matmul.Launch] = {}
        first = self._tasks[0].products[0]
        self._kernel(held(first.rows), held(first.factor))

    def _product(self, task: Task, held: Held) -> Product:
        rows, result = held(task.products[0].rows), held(task.result)
        high, wide = result.shape
        return Product(
            high,
            wide,
            rows.shape[1] * len(task.products),
            element_name(rows.dtype),
            element_name(result.dtype),
            bias=task.bias is not None,
            gelu=task.activation == "gelu",
            gated=task.activation == GATED,
            adds=bool(task.added or task.residual),
            copies=task.copy is not None,
            pushes=task.push is not None,
            sources=len(task.products),
        )

    def _row(self, task: Task, *, is_awaited: bool) -> TaskRow:
        sources = tuple(
            SourceRow(self._place(Side.ROWS, one.rows), self._place(Side.FACTOR, one.factor), self._waits(one.waits))
            for one in task.products
        )
        added = (*task.added, *((task.residual,) if task.residual else ()))
        bias = None
        if task.bias is not None:
            name, at = self._part(task.bias)
            bias = self._biases.setdefault((name, task.bias.copy), len(self._biases)), at
        pushed = () if task.push is None else destinations(self._launches[task.push], self._rank)
        return TaskRow(
            sources,
            self._place(Side.RESULT, task.result) if is_kept(self._plan, task) else None,
            tuple(self._place(Side.RESULT, kept) for kept in added),
            self._waits(task.waits),
            self._word(Stored(self._tasks.index(task))) if is_awaited else None,
            tuple(self._place(Side.RESULT, kept, peer) for peer, kept in pushed),
            None if task.push is None else self._word(Ready(task.push)),
            None if task.copy is None else self._place(Side.COPY, task.copy),
            bias,
            task.activation,
        )

    def _word(self, counter: Counter) -> int:
        match counter:
            case Over(launch):
                return launch
            case Stored(task):
                return len(self._launches) + task
            case Ready(launch):
                return len(self._launches) + len(self._tasks) + launch
            case _:
                assert_never(counter)

    def _waits(self, counters: Sequence[Counter]) -> tuple[WordWait, ...]:
        return tuple(WordWait(self._word(one), one.task if isinstance(one, Stored) else None) for one in counters)

    def _part(self, kept: Kept) -> tuple[str, int]:
        """Return the buffer of a matrix and its number there; 0 for a buffer without parts. Landing buffers have names
        of their own.
        """
        name, at = self._place_of.get(kept.name, (kept.name, 0))
        return (f"{name}, landed" if kept in self._lying else name), at

    def _lying_apart(self, lying: Sequence[Kept]) -> frozenset[tuple[str, int]]:
        """Return copies of buffers whose matrices are not equally far apart: each matrix has a map of its own."""
        first: dict[tuple[str, int], set[int]] = {}
        for number, kept in enumerate(lying):
            name, at = self._part(kept)
            first.setdefault((name, kept.copy), set()).add(number - at)
        return frozenset(of for of, found in first.items() if len(found) > 1)

    def _place(self, side: Side, kept: Kept, peer: int = -1) -> Place:
        name, at = self._part(kept)
        alone = at if (name, kept.copy) in self._apart else -1
        return Place(
            self._maps.setdefault((side, name, kept.copy, peer, alone), len(self._maps)), at if alone < 0 else 0
        )

    def over(
        self,
        scales: Sequence[torch.Tensor],
        streams: Streams,
        held: Mapping[Kept, torch.Tensor],
        landing: Sequence[int],
        stamps: Stamps | None = None,
    ) -> tuple[Streams, Mapping[str | None, Function]]:
        """Return the streams of one call, and the function that runs its tasks: all of them with the first. `landing`:
        by rank, the address of its landing buffers. `stamps`: for a stamped Plan, records when each task ran.
        """
        first = self._tasks[0].products[0]
        kernel = self._kernel(held[first.rows], held[first.factor])
        words = streams.zeroed(self._words, held[first.factor])
        written = 0 if stamps is None else stamps.take(self._layout(kernel))[0].data_ptr()
        beside = Addresses((), words, written, tuple(one.data_ptr() for one in scales) or (0, 0))
        launch = self._prepared(kernel, held, beside, tuple(landing) if self._opened else ())

        def run(number: int, *_: torch.Tensor, out: object) -> None:
            if number == 0:
                streams.launch(kernel.kernel, launch, beside=False)

        numbers = Numbers(len(self._launches), self._opened)
        return _Words(streams, kernel, words, numbers), {MATMUL: run}

    def mark(self, address: int) -> None:
        """Record the time, like `Matmul.mark`."""
        next(iter(self._kernels.values())).mark(address)

    def _layout(self, kernel: Matmul) -> Layout:
        """Return the layout of the stamps that the kernel writes."""
        return Layout(tuple(map(task_of, self._tasks)), kernel.intervals)

    def _kernel(self, rows: torch.Tensor, factor: torch.Tensor) -> Matmul:
        """Return the kernel for matrices of this layout."""
        a_deep, b_deep = is_deep(rows), is_deep(factor)
        found = self._kernels.get((a_deep, b_deep))
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("no product has had matrices that lie so: call it once before the capture")
            sms = torch.cuda.get_device_properties(self._device).multi_processor_count - LEFT
            products = [replace(one, a_deep=a_deep, b_deep=b_deep) for one in self._products]
            form = form_of(products, self._rows)
            tiling = chosen_for(products, form, sms, self._arriving / LINK)
            found = Matmul(products, tiling, sms, self._device, self._rows, is_stamped=self._is_stamped)
            self._kernels[a_deep, b_deep] = found
        return found

    def _prepared(
        self, kernel: Matmul, held: Mapping[Kept, torch.Tensor], beside: Addresses, landing: tuple[int, ...]
    ) -> matmul.Launch:
        """Return the launch on these tensors. `landing`: by rank, where any task pushes; else empty."""
        given = [held[kept] for kept in self._touched]
        lie = [(one.data_ptr(), one.stride()) for one in given]
        key = (*lie, beside, *landing)
        launch = self._known.get(key)
        if launch is None:
            biases = tuple(self._bias(name, copy, held) for name, copy in self._biases)
            launch = kernel.prepare([*self._mapped(held, landing)], replace(beside, biases=biases))
            keep(self._known, key, launch, MAX_KEPT)
        return launch

    def _bias(self, name: str, copy: int, held: Mapping[Kept, torch.Tensor]) -> int:
        """Return the address of the first row of a bias."""
        kept = next(
            one.bias for one in self._tasks if one.bias and (self._part(one.bias)[0], one.bias.copy) == (name, copy)
        )
        assert kept is not None
        return held[kept].data_ptr() - self._part(kept)[1] * held[kept].nbytes

    def _mapped(self, held: Mapping[Kept, torch.Tensor], landing: Sequence[int]) -> Iterator[tuple[Matrices, Side]]:
        """Yield the matrices of each map. On a peer they are as far behind the begin of its landing buffers as on this
        rank.
        """
        members: dict[tuple[str, int], dict[int, torch.Tensor]] = {}
        pushed = (kept for task in self._tasks if task.push is not None for kept in self._launches[task.push].writes)
        for kept in (*self._touched, *pushed):
            name, at = self._part(kept)
            members.setdefault((name, kept.copy), {})[at] = held[kept]
        for side, name, copy, peer, alone in self._maps:
            every = members[name, copy]
            found = matrices(every if alone < 0 else {0: every[alone]})
            away = 0 if peer < 0 else landing[peer] - landing[self._rank]
            yield replace(found, address=found.address + away), side


class Numbers(NamedTuple):
    """Numbers of the words of a call: launches that are over come first, then tasks. `opened`: by launch, the word that
    says that peers are ready, where tasks push in place of its copies.
    """

    launches: int
    opened: Mapping[int, int]


class _Words(Around):
    """The streams of a call whose tasks are one launch: waits and signals between the streams are words."""

    def __init__(self, streams: Streams, kernel: Matmul, words: int, numbers: Numbers) -> None:
        """Wrap the streams. `words`: the address of the first word."""
        super().__init__(streams)
        self._kernel, self._words, self._numbers = kernel, words, numbers
        self._started = 0  # launches
        self._awaited = 0  # tasks whose tiles what goes beside has waited for

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        """Start a launch, which signals its end to the kernel, and that peers are ready where the kernel pushes."""
        assert not meanwhile.has_words, "one word is told of it"
        number = self._started
        self._started += 1
        opened = self._word(self._numbers.opened[number]) if number in self._numbers.opened else 0
        return self._streams.start(start, changing, replace(meanwhile, told=self._word(number), opened=opened))

    def mark(self, what: Hashable, *, beside: bool) -> None:
        """Mark a launch; tasks are counted by their tiles."""
        if beside:
            self._streams.mark(what, beside=True)

    def wait(self, what: Hashable, *, beside: bool) -> None:
        """Let the stream beside wait for tasks. The kernel itself waits for launches, and the end of a call for all."""
        if not beside:
            return
        assert isinstance(what, tuple)
        for task in range(self._awaited, what[1] + 1):
            waiting = self._kernel.waiting(self._word(self._numbers.launches + task), self._kernel.stores(task))
            self.launch(self._kernel.awaiting, waiting, beside=True)
        self._awaited = max(self._awaited, what[1] + 1)

    def _word(self, number: int) -> int:
        return self._words + 8 * number


def matrices(members: Mapping[int, torch.Tensor]) -> Matrices:
    """Return the description of matrices of one shape, equally far from one another."""
    (first, one), *others = sorted(members.items())
    alone = Matrices.of(one)
    step = (others[0][1].data_ptr() - one.data_ptr()) // (others[0][0] - first) if others else alone.step
    base = one.data_ptr() - first * step
    assert all(tensor.data_ptr() == base + at * step for at, tensor in members.items())
    return replace(alone, address=base, count=max(members) + 1, step=step)
