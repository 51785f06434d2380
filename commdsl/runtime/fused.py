"""Turns the products of a Plan into one launch of our kernel, beside which everything moves.

Assumes a Hopper GPU, and matrices that TMA reads (`fits`). Does not order anything: where the Plan has a visit wait for
a launch beside, the kernel waits for a word that the end of that launch raises; where a launch waits for a visit, the
stream beside waits until the kernel has counted all of its tiles. What products push they store where peers have it,
when a word says that these are ready. So a tile waits for what it reads alone, and no
product ends before the next one begins. The kernel leaves SMs to what moves: a launch beside may need one to go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from commdsl.build.matmul import Product, stores
from commdsl.build.tilings import chosen
from commdsl.build.turns import ELSEWHERE, Push, Turn
from commdsl.ir.functions import GATED
from commdsl.ir.products import MATMUL
from commdsl.machine.config import from_environment
from commdsl.program.memory import Kept
from commdsl.program.plan import Plan
from commdsl.program.pushed import Pushes
from commdsl.program.stamps import Layout, task
from commdsl.program.visited import launches
from commdsl.runtime import matmul
from commdsl.runtime.errors import CaptureError
from commdsl.runtime.functions import Function
from commdsl.runtime.kept import keep
from commdsl.runtime.matmul import NOWHERE, Addresses, Matmul, Matrices
from commdsl.runtime.stamps import Stamps
from commdsl.runtime.streams import Around, Streams
from commdsl.runtime.tensors import ALIGNMENT, FLOAT8, element_name, is_deep
from commdsl.runtime.turns import (
    Places,
    activations,
    are_copies_left,
    end_in_one_way,
    given_to,
    groups_of,
    have_turns,
    place_of,
    products_of,
    summed,
    turns_of,
    unordered,
)
from commdsl.runtime.workspace import ALONE, Meanwhile, Start

_LOGGER = logging.getLogger("commdsl")

LEFT = 2
"""SMs that the products leave: one for what runs beside, one as clusters have two."""

LINK = 390e3
"""Bytes a microsecond that a GPU gets: who waits for the last rows is not to make large tiles of them."""

MAX_KEPT = 1024
"""Calls on other addresses, two kilobytes each: the driver's maps of matrices take it a while. As many as lists."""

HOPPER = (9, 0)

_ADDED = (torch.bfloat16, torch.float16)
_MADE = (*_ADDED, torch.float32)
"""What the kernel makes, and what of that it may be given to add."""


def fits(plan: Plan, places: Places, rows: torch.Tensor, factor: torch.Tensor, result: torch.dtype) -> bool:
    """Whether our kernel makes these products. It waits for what moves beside: that needs no SMs, does not stand behind
    it in the one queue to the GPU. Kernels of ranks that share a GPU take turns, also where they wait.
    """
    if not rows.is_cuda or torch.cuda.get_device_capability(rows.device) != HOPPER:
        return False
    if from_environment().one_queue or any(one.moves.carrier.runs_on_sms for one in launches(plan)):
        return False
    if rows.dtype not in (torch.bfloat16, torch.float16, FLOAT8) or (rows.dtype != FLOAT8 and rows.dtype != result):
        return False
    if not have_turns(plan):
        return False
    sources, sums, results, copies = groups_of(products_of(plan), places)
    if len(sources) > 2 or len(sums) > 1 or len(results) > 2 or result not in (_ADDED if sums else _MADE):
        return False
    if copies and (len(copies) > 1 or sums or not is_deep(rows) or not are_copies_left(plan)):
        return False
    if not end_in_one_way(plan, places) or (any(map(any, map(given_to, products_of(plan)))) and result not in _ADDED):
        return False
    sides = (rows.shape[1] * rows.itemsize, _columns(plan, factor) * result.itemsize)
    if rows.numel() == 0 or factor.numel() == 0 or any(side % ALIGNMENT for side in sides):
        return False
    return is_ordered(plan, places)


def is_ordered(plan: Plan, places: Places) -> bool:
    """Return whether the kernel's waits order all products of a Plan that `fits`; log a warning if they do not."""
    first = unordered(plan, places)
    if first is not None:
        _LOGGER.warning(
            "`%s`: torch multiplies, as the fused kernel has no wait for the product that `%s` depends on; "
            "`tune { matmul library }` chooses torch and silences this warning",
            plan.name,
            first.writes[0].name,
        )
    return first is None


class Fused:
    """The products of calls of one shape on one GPU: a kernel for each way in which what is multiplied lies."""

    def __init__(
        self,
        plan: Plan,
        places: Places,
        rows: torch.Tensor,
        factor: torch.Tensor,
        result: torch.dtype,
        pushes: Pushes,
    ) -> None:
        """`rows`, `factor`: what a product is given; `result`: of what it makes."""
        self._products, self._places = products_of(plan), places
        self._touched = tuple({kept: None for one in self._products for kept in (*one.reads, *one.writes)})
        self._groups = groups_of(self._products, places)
        self._launches = len(launches(plan))
        self._pushes = pushes
        plain = tuple(turns_of(plan, places))
        # Words: launches are over; tiles of a turn are stored; peers are ready.
        self._opened = {one.launch: self._launches + len(plain) + one.launch for one in pushes.of.values()}
        self._words = self._launches * (2 if pushes.of else 1) + len(plain)
        turns = tuple(map(self._turn, plain, (first.writes[0] for first, *_ in summed(self._products))))
        types, self._device = (element_name(rows.dtype), element_name(result)), rows.device.index
        sources, adds = [len(turn.sources) for turn in turns], any(turn.count for turn in turns)
        size = rows.shape[0], _columns(plan, factor), rows.shape[1] * sources[0]
        self._turns = turns
        self._turn_of = tuple(number for number, count in enumerate(sources) for _ in range(count))
        copies = bool(self._groups[-1])
        product = Product(*size, *types, adds=adds, copies=copies, turns=len(turns), sources=sources[0])
        (activation,) = activations(plan)
        biases, residuals = zip(*map(given_to, self._products), strict=True)
        self._bias, self._residual = (next(filter(None, kept), None) for kept in (biases, residuals))
        product = replace(product, bias=self._bias is not None, residual=self._residual is not None)
        product = replace(product, gelu=activation == "gelu", gated=activation == GATED)
        self._product = replace(product, pushed=len(pushes.places))
        self._arriving = sum(source.there >= 0 for turn in turns for source in turn.sources) * rows.nbytes
        self._is_stamped = plan.stamped
        self._kernels: dict[tuple[bool, bool], Matmul] = {}
        self._known: dict[tuple[object, ...], matmul.Launch] = {}
        self._kernel(rows, factor)

    def over(
        self,
        scales: Sequence[torch.Tensor],
        streams: Streams,
        held: Mapping[Kept, torch.Tensor],
        landing: Sequence[int],
        stamps: Stamps | None = None,
    ) -> tuple[Streams, Mapping[str | None, Function]]:
        """The streams of one call, and what makes its products: all of them with the first. `landing`: by rank, where
        lies what lands. `stamps`: of a stamped Plan, where it writes when each was made.
        """
        rows, factor = (held[kept] for kept in self._products[0].reads[:2])
        kernel = self._kernel(rows, factor)
        words = streams.zeroed(self._words, factor)
        written = 0 if stamps is None else stamps.take(self._layout(kernel))[0].data_ptr()
        beside = Addresses(0, words, written, tuple(one.data_ptr() for one in scales) or NOWHERE.scales)
        launch = self._prepared(kernel, held, beside, tuple(landing) if self._opened else ())

        def multiply(number: int, *_: torch.Tensor, out: object) -> None:
            if number == 0:
                streams.launch(kernel.kernel, launch, beside=False)

        numbers = Numbers(self._launches, self._turn_of, self._opened)
        return _Words(streams, kernel, words, numbers), {MATMUL: multiply}

    def mark(self, address: int) -> None:
        """As `Matmul.mark`."""
        next(iter(self._kernels.values())).mark(address)

    def _layout(self, kernel: Matmul) -> Layout:
        """Of what a stamped kernel writes."""
        return Layout(tuple(task(first) for first, *_ in summed(self._products)), kernel.intervals)

    def _kernel(self, rows: torch.Tensor, factor: torch.Tensor) -> Matmul:
        """The one that reads matrices that lie as these do."""
        a_deep, b_deep = is_deep(rows), is_deep(factor)
        found = self._kernels.get((a_deep, b_deep))
        if found is None:
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("no product has had matrices that lie so: call it once before the capture")
            sms = torch.cuda.get_device_properties(self._device).multi_processor_count - LEFT
            product = replace(self._product, a_deep=a_deep, b_deep=b_deep)
            tiling = chosen(product, sms, self._arriving / LINK)
            found = Matmul(product, tiling, sms, self._device, self._turns, is_stamped=self._is_stamped)
            self._kernels[a_deep, b_deep] = found
        return found

    def _turn(self, turn: Turn, made: Kept) -> Turn:
        """What it pushes, too."""
        found = self._pushes.of.get(made)
        if found is None:
            return turn
        push = Push(found.first, found.count, found.at, self._opened[found.launch])
        return replace(turn, push=push, result=turn.result if found.is_kept else ELSEWHERE)

    def _pushed(self, held: Mapping[Kept, torch.Tensor], landing: Sequence[int]) -> Iterator[Matrices]:
        """What peers have as far behind where all of theirs begins as this rank has it."""
        for peer, written in self._pushes.places:
            found = matrices({number: held[kept] for number, kept in enumerate(written)})
            yield replace(found, address=found.address - landing[self._pushes.rank] + landing[peer])

    def _prepared(
        self, kernel: Matmul, held: Mapping[Kept, torch.Tensor], beside: Addresses, landing: tuple[int, ...]
    ) -> matmul.Launch:
        """`landing`: where anything is pushed."""
        given = [held[kept] for kept in self._touched]
        lie = [(one.data_ptr(), one.stride()) for one in given]
        key = (*lie, beside, *landing)
        launch = self._known.get(key)
        if launch is None:
            found: dict[str, dict[int, torch.Tensor]] = {}
            for kept, one in zip(self._touched, given, strict=True):
                group, at = place_of(self._places, kept)
                found.setdefault(group, {})[at] = one
            sources, sums, results, copies = ([matrices(found[name]) for name in names] for names in self._groups)
            factor = matrices(found[place_of(self._places, self._products[0].reads[1])[0]])
            added, copied = (next(iter(one), None) for one in (sums, copies))
            if self._bias is not None:
                row = held[self._bias]
                beside = replace(beside, bias=row.data_ptr() - place_of(self._places, self._bias)[1] * row.nbytes)
            residual = None if self._residual is None else matrices(found[place_of(self._places, self._residual)[0]])
            pushed = [*self._pushed(held, landing)]
            launch = kernel.prepare(sources, factor, results, added, beside, copied, pushed, residual)
            keep(self._known, key, launch, MAX_KEPT)
        return launch


@dataclass(frozen=True, slots=True)
class Numbers:
    """Of the words of a call: first those of `launches`, which are over, then those of turns, of which each product is
    one or part of one; and by launch that of peers that are ready, where products push what it would copy.
    """

    launches: int
    turn_of: Sequence[int]
    opened: Mapping[int, int]


class _Words(Around):
    """The streams of a call whose products are one launch: what waits and tells, by words."""

    def __init__(self, streams: Streams, kernel: Matmul, words: int, numbers: Numbers) -> None:
        """`words`: the address of the first."""
        super().__init__(streams)
        self._kernel, self._words, self._numbers = kernel, words, numbers
        self._stores = stores(kernel.product, kernel.tiling)
        self._started = 0  # launches
        self._awaited = 0  # turns whose tiles what goes beside has waited for

    def start(self, start: Start, changing: Sequence[int], meanwhile: Meanwhile = ALONE) -> Callable[[], None]:
        """Its end is told to the kernel, and that peers are ready, where that pushes."""
        assert not meanwhile.has_words, "one word is told of it"
        number = self._started
        self._started += 1
        opened = self._word(self._numbers.opened[number]) if number in self._numbers.opened else 0
        return self._streams.start(start, changing, replace(meanwhile, told=self._word(number), opened=opened))

    def mark(self, what: Hashable, *, beside: bool) -> None:
        """Launches; the tiles of a product are counted."""
        if beside:
            self._streams.mark(what, beside=True)

    def wait(self, what: Hashable, *, beside: bool) -> None:
        """For products. The kernel waits for launches, and so does what the caller's stream has behind it."""
        if not beside:
            self._streams.wait(what, beside=False)
            return
        assert isinstance(what, tuple)
        turns = self._numbers.turn_of[what[1]] + 1
        for turn in range(self._awaited, turns):
            waiting = self._kernel.waiting(self._word(self._numbers.launches + turn), self._stores)
            self.launch(self._kernel.awaiting, waiting, beside=True)
        self._awaited = max(self._awaited, turns)

    def _word(self, number: int) -> int:
        return self._words + 8 * number


def _columns(plan: Plan, factor: torch.Tensor) -> int:
    """Of what products make."""
    return factor.shape[0] // 2 if GATED in activations(plan) else factor.shape[0]


def matrices(members: Mapping[int, torch.Tensor]) -> Matrices:
    """What these are: matrices of one shape, equally far from one another."""
    (first, one), *others = sorted(members.items())
    alone = Matrices.of(one)
    step = (others[0][1].data_ptr() - one.data_ptr()) // (others[0][0] - first) if others else alone.step
    base = one.data_ptr() - first * step
    assert all(tensor.data_ptr() == base + at * step for at, tensor in members.items())
    return replace(alone, address=base, count=max(members) + 1, step=step)
