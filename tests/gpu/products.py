"""Turns a product of every rank, and what travels for it, into tensors of whole numbers and what must come of them.

Assumes that each rank can draw what all have. What it must hold it computes by itself: sums in float64, of which those
of other ranks are rounded before they are added, as they travel; its own, too, where the operator's choice is to
multiply first and then to send, and then the sum once more, before a bias, and before a residual. Does not make calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from runner import Parts

import commdsl
from commdsl.overlap import (
    all_gather_matmul,
    all_to_all_matmul,
    choice,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_reduce_scatter,
)
from commdsl.overlap.auto import OPERATORS
from commdsl.overlap.epilogue import WITH_RESIDUAL
from commdsl.overlap.programs import operands
from commdsl.planner.tuning.selection import SEQUENCE
from commdsl.runtime import groups
from commdsl.runtime.menu import name_of_device

DTYPE, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
SCALES = (4.0, 0.125)
"""Of float8."""

PIECES = (1, 4)
PUSHING = (matmul_reduce_scatter, matmul_all_reduce, matmul_all_to_all)
"""What is made for others can be put to them by products."""

BIAS, RESIDUAL, GELU, SWIGLU = "bias", "bias and residual", "gelu", "swiglu"
ACTIVATIONS = {GELU: 1, SWIGLU: 2}
"""The parameter A of the schedule that takes one."""

NEAR = 2.0**-7
"""Of its size an activation may be off, and of one number."""


@dataclass(frozen=True)
class Drawn:
    """What all ranks are given: -1, 0 or 1."""

    x: list[Any]
    w: list[Any]
    bias: list[Any]
    residual: list[Any]  # zeros, of one number, where there is none

    def way_back(self, x: list[Any]) -> Drawn:
        """What comes back, by weights the other way; nothing is added to it."""
        w = [one.double().t() for one in self.w]
        return Drawn(x, w, [one.new_zeros(len(one)) for one in w], [one.new_zeros(1, 1) for one in w])


@dataclass(frozen=True)
class Shape:
    """One product of every rank, and what travels for it."""

    call: Callable[..., Any]  # an operator of `commdsl.overlap`
    rows: int  # of a rank's own
    depth: int
    columns: int  # of a rank's results, or of what an activation is applied to
    pieces: int = 0  # in which its schedule has rows; 0: as the operator chooses
    matmul: str = "kernel"  # which makes its products; "push": and puts them to peers
    by_columns: bool = False  # as weights lie, and rows that do not travel
    dtype: torch.dtype = DTYPE
    end: str = ""  # what stands behind its sums; an activation is of these and a bias

    def __str__(self) -> str:
        pieces = f" in {self.pieces}" if self.pieces else ""
        pieces += " pushed" if self.matmul == "push" else ""
        pieces += " by columns" if self.by_columns else " of float8" if self.dtype == FLOAT8 else ""
        pieces += f" with {self.end}" if self.end else ""
        return f"{self.call.__name__} {self.rows}x{self.depth}x{self.columns}{pieces}"

    def ways(self) -> Iterator[Shape]:
        """Itself, and what its schedule makes of it whatever the operator chooses."""
        yield from (self, *(replace(self, end=end) for end in self.added))
        if self.depth % 8 == 0 and self.columns % 8 == 0:
            for pieces in PIECES:
                if self.rows % pieces == 0:
                    yield from self.cut(pieces)
            if self.rows % 8 == 0:  # else columns do not begin where TMA reads them
                yield replace(self, pieces=PIECES[0], by_columns=True)
            yield from (replace(self, pieces=PIECES[0], dtype=FLOAT8, end=end) for end in ("", *self.added))
            yield from (replace(one, end=end) for end in self.added for one in self.cut(PIECES[0]))
        if self.call is all_gather_matmul:
            yield from (replace(self, end=end) for end in ACTIVATIONS if end == GELU or self.columns % 2 == 0)
            if self.depth % 8 == 0 and self.columns % 16 == 0:
                yield from (replace(self, pieces=PIECES[0], end=end) for end in ACTIVATIONS)

    @property
    def added(self) -> tuple[str, ...]:
        """What may be added to sums."""
        return (BIAS, RESIDUAL) if self.has_residual else (BIAS,)

    @property
    def has_residual(self) -> bool:
        """Whether one may be added."""
        return self.call.__name__ in WITH_RESIDUAL

    def cut(self, pieces: int) -> Iterator[Shape]:
        """In so many pieces, whoever puts them to peers."""
        for matmul in ("kernel", "push") if self.call in PUSHING else ("kernel",):
            yield replace(self, pieces=pieces, matmul=matmul)

    def function(self, run: Parts) -> Callable[..., Any]:
        """Of x, w, a bias and a residual if it has such, and scales of float8."""
        if not self.pieces:
            return self._operator
        name = self.call.__name__
        params = {"C": self.pieces}
        if self.matmul == "push" and self.call is not matmul_all_to_all:
            params["D"] = 1
        if self.end:
            params["B"] = 1
        if self.end == RESIDUAL:
            params["R"] = 1
        if self.end in ACTIVATIONS:
            params["A"] = ACTIVATIONS[self.end]
        op = commdsl.load(OPERATORS[name].schedule, params=params, ranks=run.ranks, tune={"matmul": self.matmul})
        if not OPERATORS[name].all_depths:
            return op
        return lambda x, w, *beside: op(*operands(name, x, w, groups.name_of(None)), *beside)

    def _operator(self, x: Any, w: Any, bias: Any = None, residual: Any = None) -> Any:
        ends = {"activation": self.end} if self.end in ACTIVATIONS else {}
        if residual is not None:
            ends["residual"] = residual
        return self.call(x, w, bias=bias, **ends)

    def drawn(self, run: Parts, seed: int) -> Drawn:
        """The same wherever it is drawn. All ranks have one bias and residual where they have all results."""
        called = OPERATORS[self.call.__name__]
        rows = self.rows * run.ranks if called.all_rows else self.rows
        columns = self.columns * run.ranks if called.all_columns else self.columns
        depth = self.depth * run.ranks if called.all_depths else self.depth
        dice = torch.Generator(run.device).manual_seed(seed)
        draw = partial(torch.randint, -1, 2, generator=dice, device=run.device)
        x = [draw((rows, self.depth)).to(self.dtype) for _ in range(run.ranks)]
        w = [draw((columns, depth)).to(self.dtype) for _ in range(run.ranks)]
        added = rows if self.call is matmul_all_reduce else self.rows
        bias, residual = (
            [draw(shape).to(DTYPE) for _ in range(run.ranks)]
            for shape in ((columns,), (added, columns) if self.has_residual else (1, 1))
        )
        if self.call is matmul_all_reduce:
            bias, residual = bias[:1] * run.ranks, residual[:1] * run.ranks
        return Drawn(x, w, bias, residual)

    def ends(self, drawn: Drawn, rank: int) -> list[Any]:
        """What is added."""
        given = [drawn.bias[rank], drawn.residual[rank]]
        return given[: 2 if self.end == RESIDUAL else 1 if self.end else 0]

    def scales(self, run: Parts) -> list[Any]:
        return [torch.tensor(one, device=run.device) for one in SCALES] if self.dtype == FLOAT8 else []

    def same(self, run: Parts, found: Any, drawn: Drawn) -> Any:
        """Whether a call gave what must come, as a bool on the device."""
        scale = SCALES[0] * SCALES[1] if self.dtype == FLOAT8 else 1.0
        bias = [one.double() * bool(self.end) for one in drawn.bias]
        residual = [one.double() * (self.end == RESIDUAL) for one in drawn.residual]
        given = Drawn([one.double() * scale for one in drawn.x], [one.double() for one in drawn.w], bias, residual)
        wanted = WANTED[self.call](run, given, is_wide=self.pieces > 0 or self.is_scheduled(run))
        if self.end not in ACTIVATIONS:
            return run.same(str(self), found, wanted.to(DTYPE))
        wanted = gelu(wanted) if self.end == GELU else swiglu(wanted)
        return run.same(str(self), found, wanted, near=NEAR * wanted.abs().clamp(min=NEAR))

    def is_scheduled(self, run: Parts) -> bool:
        """Whether the operator chooses a schedule: a rank adds what it makes itself before that is rounded."""
        name = self.call.__name__
        rows = self.rows * run.ranks
        found = choice(name, rows, self.depth, self.columns, ranks=run.ranks, device=name_of_device(run.device))
        return found.schedule != SEQUENCE


# --- what must come, in float64 ---------------------------------------------------------------------------------------


def gathered(run: Parts, of: Drawn, is_wide: bool) -> Any:
    return torch.cat(of.x) @ of.w[run.rank].t() + of.bias[run.rank]


def scattered(run: Parts, of: Drawn, is_wide: bool) -> Any:
    return summed(of, run.ranks, run.rank, is_wide)


def reduced(run: Parts, of: Drawn, is_wide: bool) -> Any:
    return torch.cat([summed(of, run.ranks, rank, is_wide) for rank in range(run.ranks)])


def exchanged(run: Parts, of: Drawn, is_wide: bool) -> Any:
    blocks = ((x, w.chunk(run.ranks)[run.rank], b.chunk(run.ranks)[run.rank]) for x, w, b in each_of(of))
    return torch.cat([x @ w.t() + b for x, w, b in blocks])


def returned(run: Parts, of: Drawn, is_wide: bool) -> Any:
    return brought_back(run, of.x) @ of.w[run.rank].t() + of.bias[run.rank] + of.residual[run.rank]


def multiplied(run: Parts, of: Drawn, is_wide: bool) -> Any:
    return of.x[run.rank] @ of.w[run.rank].t()


def brought_back(run: Parts, made: list[Any]) -> Any:
    """All columns of this rank's rows, of what `exchanged` gives all ranks."""
    return torch.cat([one.chunk(run.ranks)[run.rank] for one in made], 1)


def summed(of: Drawn, ranks: int, adder: int, is_wide: bool) -> Any:
    """The rows that one rank adds up."""
    made = [x.chunk(ranks)[adder] @ w.t() for x, w, _ in each_of(of)]
    total = sum(one if rank == adder and is_wide else rounded(one) for rank, one in enumerate(made))
    residual = of.residual[adder]
    if len(residual) == ranks * len(total):  # of all rows, of which it adds its own
        residual = residual.chunk(ranks)[adder]
    return total + of.bias[adder] + residual if is_wide else rounded(rounded(total) + of.bias[adder]) + residual


def each_of(of: Drawn) -> Iterator[tuple[Any, Any, Any]]:
    return zip(of.x, of.w, of.bias, strict=True)


def rounded(one: Any) -> Any:
    return one.to(DTYPE).double()


def gelu(x: Any) -> Any:
    return x * (1 + torch.erf(x / 2**0.5)) / 2


def swiglu(x: Any) -> Any:
    gate, up = x.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


WANTED = {
    all_gather_matmul: gathered,
    matmul_reduce_scatter: scattered,
    matmul_all_reduce: reduced,
    matmul_all_to_all: exchanged,
    all_to_all_matmul: returned,
}
BACK = {
    all_gather_matmul: scattered,
    matmul_reduce_scatter: gathered,
    matmul_all_reduce: multiplied,
    matmul_all_to_all: returned,
    all_to_all_matmul: exchanged,
}
"""What the gradient of rows is of those of results, and weights transposed."""
