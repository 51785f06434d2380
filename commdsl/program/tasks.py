"""The phase `Tasks`: matrix products of one kernel, with the counters that each of them waits for.

Assumes nothing of the schedule. Does not derive waits (`lower.task_waits`), prove them (`proof.hosted`) or launch them.

Workers take tiles of tasks in the order of `rows`, and no task waits for the one before it: whatever a task depends on
is a counter among its waits. A task is over when all tiles of its result are stored, here and on peers.
"""

from __future__ import annotations

from typing import TypeAlias

from commdsl.ir.schedules import Yield
from commdsl.language.records import dataclass
from commdsl.program.memory import Kept


@dataclass(frozen=True, slots=True)
class Over:
    """The counter that a launch raises when it ends: all that it brings is there."""

    launch: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The counter that a launch raises when it opens: all peers have signalled that its destinations may be written."""

    launch: int


@dataclass(frozen=True, slots=True)
class Stored:
    """The counter that a task adds its stored tiles to; its level is their number."""

    task: int


Counter: TypeAlias = Over | Ready | Stored


@dataclass(frozen=True, slots=True)
class Product:
    """One term of a task: rows times a factor transposed. `waits`: counters awaited before either is read.

    `reads`: rows, factor, matrices to add, bias and residual, in the order of the step; `writes`: the result, then the
    copy of the rows if there is one.
    """

    reads: tuple[Kept, ...]
    writes: tuple[Kept, ...]
    turn: int  # where the schedule has it
    step: Yield
    waits: tuple[Counter, ...]

    @property
    def rows(self) -> Kept:
        return self.reads[0]

    @property
    def factor(self) -> Kept:
        return self.reads[1]

    @property
    def sums(self) -> tuple[Kept, ...]:
        """Matrices that are added to the product."""
        return self.reads[self.step.sums]

    @property
    def result(self) -> Kept:
        return self.writes[0]

    def operand(self, buffer: int | None) -> Kept | None:
        """Return the operand that is a buffer of its step, by number; None for None."""
        return None if buffer is None else self.reads[self.step.reads.index(buffer)]


@dataclass(frozen=True, slots=True)
class Task:
    """A sum of products, rounded once. `waits`: counters awaited before anything is added to them. `push`: the launch
    whose copies of the result the task makes itself, tile by tile.
    """

    products: tuple[Product, ...]
    waits: tuple[Counter, ...] = ()
    push: int | None = None

    @property
    def turn(self) -> int:
        return self.products[0].turn

    @property
    def name(self) -> str | None:
        """The name of the function."""
        return self.products[0].step.name

    @property
    def result(self) -> Kept:
        return self.products[0].result

    @property
    def copy(self) -> Kept | None:
        """The copy of the rows of the first product, if there is one."""
        return next(iter(self.products[0].writes[1:]), None)

    @property
    def added(self) -> tuple[Kept, ...]:
        """Matrices that are added to the sum of products, in order; the result itself: as it is before the task."""
        first, *others = self.products
        return (*first.sums, *(kept for one in others for kept in one.sums if kept != self.result))

    @property
    def bias(self) -> Kept | None:
        """A row that is added to each row of the sum of products."""
        return next(filter(None, (one.operand(one.step.epilogue.bias) for one in self.products)), None)

    @property
    def residual(self) -> Kept | None:
        """A matrix that is added last."""
        return next(filter(None, (one.operand(one.step.epilogue.residual) for one in self.products)), None)

    @property
    def activation(self) -> str | None:
        return self.products[-1].step.epilogue.activation

    @property
    def operands(self) -> tuple[Kept, ...]:
        """The operands in memory, in order: rows and factor of each product, matrices to add, bias, residual."""
        factors = (kept for one in self.products for kept in one.reads[:2])
        return (*factors, *self.added, *(one for one in (self.bias, self.residual) if one is not None))

    @property
    def reads(self) -> tuple[Kept, ...]:
        """The operands of its products, one product after another."""
        return tuple(kept for one in self.products for kept in one.reads)

    @property
    def writes(self) -> tuple[Kept, ...]:
        return self.products[0].writes

    @property
    def counters(self) -> tuple[Counter, ...]:
        """Every counter that it waits for: of each product, before it adds, before it pushes."""
        ready = () if self.push is None else (Ready(self.push),)
        return (*(wait for one in self.products for wait in one.waits), *self.waits, *ready)

    @property
    def after(self) -> int:
        """The number of launches that have ended before the task is stored."""
        return max((one.launch + 1 for one in self.counters if isinstance(one, Over)), default=0)


def joins(task: Task, product: Product) -> bool:
    """Return whether a task can add one more product to its sum: nothing that must come after that product has been
    applied yet, and there is at most one bias and one residual.
    """
    ends = product.step.epilogue
    is_open = task.activation is None and not (ends.activation and task.residual)
    return is_open and not (ends.bias is not None and task.bias) and not (ends.residual is not None and task.residual)


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks of one kernel, in the order in which workers take their tiles."""

    rows: tuple[Task, ...]
