"""Turns collectives and sizes into a table of the fastest candidates on this machine, under torchrun.

Assumes one process a rank, started together; all search alike, and rank 0 alone writes and prints. Does not measure
itself; `runtime.measure` does.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid

from commdsl.commands import output
from commdsl.commands.arguments import UsageError, parse_bytes
from commdsl.commands.candidates import Families
from commdsl.commands.output import Exit
from commdsl.machine import carriers, devices
from commdsl.machine.dtypes import BY_NAME
from commdsl.overlap import auto
from commdsl.planner.tuning import selection
from commdsl.planner.tuning.search import Search
from commdsl.planner.tuning.search_space import Family
from commdsl.planner.tuning.selection import Row, Table, TableError, size_text
from commdsl.runtime.errors import GroupError

MEASURED = tuple(name for name, one in BY_NAME.items() if "sum" in one.ops and name not in ("uint8", "bool"))
"""Element types that hold what is measured with, whole numbers of both signs."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to measure, and where the table goes (None: named after the machine)."""

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    path: Path | None
    seconds: float
    most_symmetric: int
    dtype: str
    own: Families = ()  # measured beside the shipped schedules
    products: tuple[Product, ...] = ()  # measured after the collectives

    def own_of(self, collective: str) -> tuple[Family, ...]:
        return tuple(family for name, family in self.own if name == collective)


@dataclass(frozen=True, slots=True)
class Product:
    """One of `PRODUCTS` with the shape of its weights."""

    operator: str
    depth: int
    columns: int

    def __str__(self) -> str:
        """As tables have it."""
        return f"{self.operator} {self.depth}x{self.columns}"


@dataclass(frozen=True, slots=True)
class Found:
    """What came of one collective."""

    collective: str
    rows: tuple[Row, ...]
    num_measured: int
    failures: tuple[str, ...]  # a reason each
    num_skipped: int


MOST_SECONDS = 1e9


def parse(
    collectives: str,
    sizes: str,
    factor: int,
    path: Path | None,
    seconds: float,
    most_symmetric: int,
    dtype: str,
    own: Families = (),
    shapes: str = "",
) -> Wanted:
    """The words of the command line; UsageError says what is expected. With schedules of one's own, their collectives
    are measured unless others are named; with shapes of products all of these, and no collective."""
    names = names_of(collectives, own, shapes)
    products = [Product(name, *shape) for name in names if name in selection.PRODUCTS for shape in pairs_of(shapes)]
    names = tuple(name for name in names if name in selection.COLLECTIVES)
    first, dots, last = sizes.partition("..")
    smallest, largest = (parse_bytes(end, "--sizes") for end in (first, last if dots else first))
    if not 0 < seconds < MOST_SECONDS:
        raise UsageError(f"--time-budget is a number of seconds above 0 and below {MOST_SECONDS:g}, got {seconds:g}")
    if most_symmetric < 1:
        raise UsageError("--memory is a size of 1 byte or more")
    if dtype not in MEASURED:
        raise UsageError(f"--dtype expects one of {', '.join(MEASURED)}, got `{dtype}`")
    idle = [family.schedule for name, family in own if name not in names]
    if idle:
        raise UsageError(f"--collectives leaves {', '.join(idle)} out: name its collective, or none")
    return Wanted(names, powers(smallest, largest, factor), path, seconds, most_symmetric, dtype, own, tuple(products))


def names_of(collectives: str, own: Families, shapes: str) -> tuple[str, ...]:
    """What `all` is, or those named."""
    known = (*selection.COLLECTIVES, *selection.PRODUCTS)
    if collectives == "all":
        every = selection.PRODUCTS if shapes and not own else selection.COLLECTIVES
        return tuple(name for name in every if not own or name in dict(own))
    names = tuple(collectives.split(","))
    for name in names:
        if name not in known:
            raise UsageError(f"--collectives expects {', '.join(known)} or all, got `{name}`")
    if bool(shapes) != any(name in selection.PRODUCTS for name in names):
        raise UsageError(f"--shapes goes with {', '.join(selection.PRODUCTS)}, and these with --shapes")
    return names


def pairs_of(shapes: str) -> list[tuple[int, int]]:
    """`8192x3584,8192x1280`: depth and columns."""
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", one) for one in shapes.split(",")]
    if not all(found):
        raise UsageError(f"--shapes is depth and columns as in 8192x3584,8192x1280, not `{shapes}`")
    return [(int(one[1]), int(one[2])) for one in found if one]


def powers(first: int, last: int, factor: int) -> tuple[int, ...]:
    """Sizes from `first` to `last`, each `factor` times the one before."""
    if first < 1 or last < first or factor < 2:
        raise UsageError("--sizes goes up from 1 byte or more, by a --factor of 2 or more")
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return tuple(found)


def tune(wanted: Wanted) -> Exit:
    """Measures, writes and prints. The table keeps what it has of other collectives, if it is of this machine."""
    try:
        from commdsl.runtime import measure  # torch: seconds that a wrong option need not wait for
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UsageError("tune needs torch: pip install 'commdsl[cuda]', or 'commdsl[torch]' without GPUs") from error
    try:
        measure.start()
    except GroupError as error:
        raise UsageError(str(error)) from error
    device, ranks = measure.where()
    if device == devices.CPU and measure.is_first():
        output.tell("no GPU that torch can use: this measures the processor")
    path = wanted.path or Path(f"{name_of(device)}_x{ranks}.json")
    before = earlier(path, device, ranks)
    rows, found = dict(before.rows if before else ()), list[Found]()
    table = Table(device, ranks, measure.about(wanted.dtype), (), path)
    for one in search_all(wanted, device, ranks):
        found.append(one)
        rows |= {one.collective: one.rows} if one.rows else {}
        table = replace(table, rows=tuple(sorted(rows.items())))
        if rows and measure.is_first():  # after each, as the next may be cut short
            path.write_text(selection.table_text(table), encoding="utf-8")
    if measure.is_first():
        show(found, table)
    measure.stop()
    wrong = any("WrongResult" in reason for one in found for reason in one.failures)
    return Exit.WRONG_RESULT if wrong or not all(one.rows for one in found) else Exit.FINE


def earlier(path: Path, device: str, ranks: int) -> Table | None:
    """The table that is there already, to be added to."""
    if not path.exists():
        return None
    try:
        table = selection.read_table(path)
    except TableError as error:
        raise UsageError(f"{error}; name another file") from error
    if (table.device, table.ranks) != (device, ranks):
        raise UsageError(f"{path} is of {table.device} x{table.ranks}, this is {device} x{ranks}: name another file")
    return table


def name_of(device: str) -> str:
    """`NVIDIA H200` -> `h200`."""
    words = "".join(char if char.isalnum() else " " for char in device.lower()).split()
    return "_".join(word for word in words if word != "nvidia")


def search_all(wanted: Wanted, device: str, ranks: int) -> Iterator[Found]:
    """One collective after another; what one leaves of its time, the others have."""
    from commdsl.overlap.measure import Products  # torch, as below
    from commdsl.runtime import measure  # torch: seconds that a wrong option need not wait for

    of_device = (carriers.DEFAULT,) if device == devices.CPU else carriers.measured()  # the CPU runs all as fast
    clock = measure.Clock(wanted.seconds)
    everything: tuple[str | Product, ...] = (*wanted.collectives, *wanted.products)
    with progress(shown=measure.is_first()) as shown, measure.builders() as ahead:
        for index, one in enumerate(everything):
            clock_here = measure.Clock(clock.left() / (len(everything) - index))
            given, watch = (wanted.dtype, wanted.most_symmetric, clock_here, ahead), watcher(shown, str(one))
            if isinstance(one, Product):
                bench: measure.Machine = Products(one.operator, *given, depth=one.depth, columns=one.columns)
                only = tuple(auto.candidates(one.operator, device))
                search = Search(one.operator, ranks, wanted.sizes, of_device, bench, watch, only=only)
            else:
                bench = measure.Machine(one, *given)
                search = Search(one, ranks, wanted.sizes, of_device, bench, watch, wanted.own_of(one))
            rows = search.run()
            reasons = tuple(failure.reason for failure in search.failures.values())
            yield Found(str(one), rows, len(search.times), reasons, search.skipped)


@contextmanager
def progress(*, shown: bool) -> Iterator[Progress | None]:
    """A bar on rank 0's standard error; where that is no terminal, a line a stage."""
    if not shown or not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        yield bar


def watcher(shown: Progress | None, collective: str) -> Any:
    """What the search tells where it is."""
    from commdsl.runtime import measure  # torch: seconds that a wrong option need not wait for

    tasks: dict[str, Any] = {}

    def watch(stage: str, done: int, total: int) -> None:
        if total == 0:
            return
        if shown is None:
            if done == 0 and measure.is_first():
                output.tell(f"{collective}: {stage}, {output.count(total, 'candidate')}")
            return
        if done == 0:
            tasks["now"] = shown.add_task(f"{collective}: {stage}", total=total)
        shown.update(tasks["now"], completed=done)

    return watch


# --- the report -------------------------------------------------------------------------------------------------------


def show(found: list[Found], table: Table) -> None:
    """What failed, what was left out, and the rows last."""
    console = Console(width=None if sys.stdout.isatty() else 160)
    grid = Grid(title=f"{table.device} x{table.ranks}: {table.path}")
    for title in ("collective", "size", "us", "GB/s", "chosen", "next", "us"):
        grid.add_column(title, justify="right" if title in ("size", "us", "GB/s") else "left", overflow="fold")
    for one in found:
        for row in one.rows:
            measured = row.measured
            assert measured is not None
            rate = f"{measured.nbytes / measured.us / 1e3:.1f}"
            second = (str(measured.second), f"{measured.second_us:.2f}") if measured.second else ("", "")
            size, us = size_text(measured.nbytes), f"{measured.us:.2f}"
            grid.add_row(one.collective, size, us, rate, str(row.candidate), *second)
        grid.add_section()
    for one in found:
        skipped = f", {one.num_skipped} not measured for want of time" if one.num_skipped else ""
        failed = f", {len(one.failures)} failed" if one.failures else ""
        output.tell(f"{one.collective}: {output.count(one.num_measured, 'candidate')} measured{failed}{skipped}")
        for reason, number in Counter(one.failures).most_common():
            output.tell(f"  {number} x {reason}")
    console.print(grid)
