"""Turns a case into the calls that are timed: ours, cuBLAS beside NCCL in three ways, and torch's async-TP.

Assumes one process a rank. Does not time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory as symmetric_memory

import commdsl
from benchmarks.measure import Bench
from benchmarks.products_report import (
    ALONE,
    ASYNC,
    CHOSEN,
    CONTENDERS,
    IN_TURN,
    LIBRARY,
    OURS,
    PUSHED,
    STREAMS,
    Case,
    Element,
    Way,
)
from benchmarks.turns import Made, kept
from commdsl.overlap import auto, programs, sequence
from commdsl.overlap.epilogue import Epilogue
from commdsl.runtime import groups

Tensor = torch.Tensor
Call = Callable[[], Tensor]

BYTES = torch.uint8
"""As which rows travel: NCCL and gloo move them as they are."""

NEAR = 2.0**-7
"""Of whole numbers sums of products are exact, and rounded once; NCCL's more often, where they are large."""

PEER = "in sequence"
"""Of `STREAMS`, whose host's time stands beside ours."""

HOST_CALLS = 8
"""In a row, of which the GPU takes a few milliseconds."""

SCALES = (0.5, 4.0)
"""Of float8: of rows, and of weights."""

OPERATORS = {
    Way.GATHER: "all_gather_matmul",
    Way.SCATTER: "matmul_reduce_scatter",
    Way.REDUCE: "matmul_all_reduce",
    Way.EXCHANGE: "matmul_all_to_all",
    Way.RETURN: "all_to_all_matmul",
}


@dataclass
class Stage:
    """One case on this rank."""

    bench: Bench
    case: Case
    _floats: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.case.element is Element.BFLOAT16 else torch.float8_e4m3fn

    @cached_property
    def scales(self) -> tuple[Tensor, ...]:
        """Of rows and weights, where they have them."""
        if self.case.element is Element.BFLOAT16:
            return ()
        return tuple(torch.tensor(one, device=self.bench.device) for one in SCALES)

    def drawn(self, rows: int, columns: int, seed: int) -> Tensor:
        """-1, 0 or 1."""
        device = self.bench.device
        dice = torch.Generator(device).manual_seed(seed)
        return torch.randint(-1, 2, (rows, columns), generator=dice, device=device).to(self.dtype)

    @property
    def operator(self) -> auto.Operator:
        return auto.OPERATORS[OPERATORS[self.case.way]]

    @cached_property
    def x(self) -> Tensor:
        """This rank's rows, or its part of all of them."""
        return self.x_of(self.bench.rank)

    def x_of(self, rank: int) -> Tensor:
        case = self.case
        rows = case.rows if self.operator.all_rows else case.rows // case.ranks
        return self.drawn(rows, case.depth, rank)

    @cached_property
    def w(self) -> Tensor:
        return self.w_of(self.bench.rank)

    def w_of(self, rank: int) -> Tensor:
        case = self.case
        columns = case.columns * case.ranks if self.operator.all_columns else case.columns
        depth = case.depth * case.ranks if self.operator.all_depths else case.depth
        return self.drawn(columns, depth, 100 + rank)

    @cached_property
    def whole(self) -> Tensor:
        """As many rows as a rank multiplies, whatever is in them."""
        case = self.case
        if case.way is Way.GATHER:
            return self.drawn(case.rows, case.depth, 7)
        return self.x.clone() if case.way is not Way.RETURN else sequence.side_by_side(self.x, case.ranks)

    @cached_property
    def wanted(self) -> Tensor:
        """In float32 by one product after another, so that no library's way to travel is in it."""
        return self.exact * prod(SCALES) if self.scales else self.exact

    @property
    def exact(self) -> Tensor:
        case, ranks = self.case, range(self.case.ranks)
        if case.way is Way.GATHER:
            rows = torch.cat([self.x_of(rank) for rank in ranks])
            return torch.mm(rows.float(), self.w.float().t())
        if case.way is Way.EXCHANGE:
            blocks = [self.w_of(rank).chunk(case.ranks)[self.bench.rank] for rank in ranks]
            made = [torch.mm(self.x_of(rank).float(), block.float().t()) for rank, block in enumerate(blocks)]
            return torch.cat(made)
        if case.way is Way.RETURN:
            blocks = [self.x_of(rank).chunk(case.ranks)[self.bench.rank] for rank in ranks]
            return torch.mm(torch.cat(blocks, 1).float(), self.w.float().t())
        mine = slice(self.bench.rank * case.rows // case.ranks, (self.bench.rank + 1) * case.rows // case.ranks)
        mine = slice(None) if case.way is Way.REDUCE else mine
        parts = [torch.mm(self.x_of(rank)[mine].float(), self.w_of(rank).float().t()) for rank in ranks]
        return torch.stack(parts).sum(0)

    def draw_floats(self) -> None:
        """What is timed: a GPU that multiplies -1, 0 and 1 needs less power, and is faster."""
        if not self._floats:
            self._floats = True
            for tensor in (self.x, self.w, self.whole):
                dice = torch.Generator(self.bench.device).manual_seed(self.bench.rank)
                tensor.copy_(torch.randn(tensor.shape, generator=dice, device=self.bench.device))

    def is_wrong(self, found: Tensor) -> Tensor:
        return ((found.float() - self.wanted).abs() > NEAR * self.wanted.abs() + 2).any()

    def made(self, name: str) -> Made:
        """The contender of that name."""
        is_wrong = (lambda _: torch.zeros((), dtype=torch.bool)) if name == ALONE else self.is_wrong
        return kept(name, CONTENDERS[name], self._call(name), is_wrong, prepare=self.draw_floats)

    def _call(self, name: str) -> Call:
        x, w = self.x, self.w
        if name == ALONE:
            whole = self.whole
            return lambda: self.product(whole, w)
        if name in STREAMS:
            ways = {
                Way.GATHER: self.gathered,
                Way.SCATTER: self.scattered,
                Way.REDUCE: self.reduced,
                Way.EXCHANGE: self.exchanged,
                Way.RETURN: self.returned,
            }
            return partial(ways[self.case.way], STREAMS[name])
        if name == ASYNC:
            return self._asynchronous()
        if name == IN_TURN:
            rows, factor = self.operands()
            return lambda: sequence.WAYS[OPERATORS[self.case.way]](rows, factor, None, Epilogue(scales=(*self.scales,)))
        if name == CHOSEN:
            named = dict(zip(("scale_x", "scale_w"), self.scales, strict=False))
            return partial(getattr(commdsl.overlap, OPERATORS[self.case.way]), x, w, **named)
        pieces = (OURS | PUSHED).get(name, 2)
        tune = {"matmul": "library"} if name == LIBRARY else {"matmul": "push"} if name in PUSHED else {}
        later = {"D": 2} if name in PUSHED and self.case.way is Way.SCATTER else {}
        op = commdsl.load(self.operator.schedule, params={"C": pieces, **later}, ranks=self.case.ranks, tune=tune)
        rows, factor = self.operands()
        return lambda: op(rows, factor, *self.scales)  # type: ignore[return-value]  # one result

    def eager(self) -> dict[str, tuple[Callable[[], object], int]]:
        """Calls of which the host's time is asked, each so often in a row: of the peer, and of ours, also where there
        are gradients, which are made, too, where it goes there and back.
        """
        named, called = f"{CHOSEN}, with gradients", getattr(commdsl.overlap, OPERATORS[self.case.way])
        x, w = (one.clone().requires_grad_() for one in (self.x, self.w))
        back = torch.ones_like(called(self.x, self.w))
        calls: dict[str, Callable[[], object]] = {name: self._call(name) for name in (PEER, CHOSEN)}
        calls[named] = lambda: called(x, w)
        calls[f"{named}, there and back"] = lambda: torch.autograd.grad(called(x, w), (x, w), back)
        return {name: (call, HOST_CALLS) for name, call in calls.items()}

    def operands(self) -> tuple[Tensor, Tensor]:
        """As schedules have them."""
        return programs.operands(OPERATORS[self.case.way], self.x, self.w, groups.name_of(None))

    def product(self, rows: Tensor, weights: Tensor, out: Tensor | None = None) -> Tensor:
        """By cuBLAS."""
        if not self.scales:
            return torch.mm(rows, weights.t(), out=out)
        out = rows.new_empty(len(rows), len(weights), dtype=torch.bfloat16) if out is None else out
        return torch._scaled_mm(rows, weights.t(), *self.scales, out_dtype=torch.bfloat16, out=out)

    def results(self, *shape: int) -> Tensor:
        return self.x.new_empty(shape, dtype=torch.bfloat16)

    # --- the peers ----------------------------------------------------------------------------------------------------

    def gathered(self, pieces: int) -> Tensor:
        """By NCCL on its stream, then cuBLAS: of several pieces own rows first, then each piece as it is there."""
        x, w, ranks = self.x, self.w, self.case.ranks
        parts = x.chunk(pieces)
        rows = [x.new_empty(ranks, *part.shape) for part in parts]
        works = [
            dist.all_gather_into_tensor(into.flatten(0, 1).view(BYTES), part.view(BYTES), async_op=True)
            for into, part in zip(rows, parts, strict=True)
        ]
        if pieces == 1:
            works[0].wait()
            return self.product(rows[0].flatten(0, 1), w)
        out = self.results(ranks, pieces, len(parts[0]), self.case.columns)
        self.product(x, w, out[self.bench.rank].flatten(0, 1))
        for piece, (work, there) in enumerate(zip(works, rows, strict=True)):
            work.wait()
            for rank in (rank for rank in range(ranks) if rank != self.bench.rank):
                self.product(there[rank], w, out[rank, piece])
        return out.flatten(0, 2)

    def scattered(self, pieces: int) -> Tensor:
        """By cuBLAS, then NCCL on its stream: each of several pieces while the next is multiplied."""
        w, ranks, columns = self.w, self.case.ranks, self.case.columns
        x = self.x.view(ranks, pieces, -1, self.case.depth)
        out = self.results(pieces, x.shape[2], columns)
        works = []
        for piece in range(pieces):
            made = self.results(ranks, x.shape[2], columns)
            if pieces == 1:
                self.product(self.x, w, made.flatten(0, 1))
            else:
                for rank in range(ranks):
                    self.product(x[rank, piece], w, made[rank])
            works.append(dist.reduce_scatter_tensor(out[piece], made.flatten(0, 1), async_op=True))
        for work in works:
            work.wait()
        return out.flatten(0, 1)

    def reduced(self, pieces: int) -> Tensor:
        """By cuBLAS, then NCCL on its stream: each of several pieces while the next is multiplied."""
        out = self.results(self.case.rows, self.case.columns)
        works = []
        for rows, made in zip(self.x.chunk(pieces), out.chunk(pieces), strict=True):
            self.product(rows, self.w, made)
            works.append(dist.all_reduce(made, async_op=True))
        for work in works:
            work.wait()
        return out

    def exchanged(self, pieces: int) -> Tensor:
        """By cuBLAS, then NCCL on its stream: each of several pieces while the next is multiplied."""
        ranks = self.case.ranks
        factor = self.w.unflatten(0, (ranks, -1))
        out = self.results(ranks, pieces, len(self.x) // pieces, self.case.columns)
        works = []
        for piece, rows in enumerate(self.x.chunk(pieces)):
            if self.scales:
                made = torch.stack([self.product(rows, one) for one in factor])
            else:
                made = torch.bmm(rows.expand(ranks, -1, -1), factor.mT)
            works.append(dist.all_to_all(list(out[:, piece]), list(made), async_op=True))
        for work in works:
            work.wait()
        return out.flatten(0, 2)

    def returned(self, pieces: int) -> Tensor:
        """By NCCL on its stream, then cuBLAS: of several pieces each when it is there, and lies side by side."""
        ranks, depth = self.case.ranks, self.case.depth
        rows = self.x.view(ranks, pieces, -1, depth)
        came = rows.new_empty(pieces, ranks, rows.shape[2], depth)
        works = [
            dist.all_to_all(list(came[piece].view(BYTES)), list(rows[:, piece].view(BYTES)), async_op=True)
            for piece in range(pieces)
        ]
        out = self.results(pieces, rows.shape[2], self.case.columns)
        for work, there, made in zip(works, came, out, strict=True):
            work.wait()
            self.product(sequence.side_by_side(there.flatten(0, 1), ranks), self.w, made)
        return out.flatten(0, 1)

    def _asynchronous(self) -> Call:
        """By torch's async-TP, whose all-reduce is a reduce-scatter and an all-gather behind it."""
        name = dist.group.WORLD.group_name
        symmetric_memory.enable_symm_mem_for_group(name)
        if self.case.way is Way.GATHER:
            return partial(self._gathered_asynchronously, name)
        if self.case.way is Way.SCATTER:
            return partial(self._scattered_asynchronously, name)
        whole = self.results(self.case.rows, self.case.columns)

        def both() -> Tensor:
            dist.all_gather_into_tensor(whole, self._scattered_asynchronously(name))
            return whole

        return both

    def _gathered_asynchronously(self, name: str) -> Tensor:
        x, factor = self.x, self.w.t()
        if not self.scales:
            _, (made,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [factor], 0, name)
            return made
        scale_x, scale_w = self.scales
        fused = torch.ops.symm_mem.fused_all_gather_scaled_matmul
        _, (made,) = fused(x, [factor], scale_x, [scale_w], 0, name, [None], [None], [torch.bfloat16], [False])
        return made

    def _scattered_asynchronously(self, name: str) -> Tensor:
        x, factor = self.x, self.w.t()
        if not self.scales:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, factor, "sum", 0, name)
        fused = torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter
        shape = [self.case.rows, self.case.columns]
        return fused(x, factor, *self.scales, "sum", 0, 0, name, shape, out_dtype=torch.bfloat16)
