"""Turns a product and what travels for it into what runs it, and why: a schedule in so many pieces, its products made
by our kernel or by the library, or the collective and the product one after the other.

Assumes tables that `commdsl tune` wrote, the same on all ranks: nothing else goes into a choice but the product, the
device and the number of ranks, so ranks agree. Where no table has a shape, a model of two clocks decides: products take
their FLOPs, what travels its bytes, and each waits for the other as in the schedule (`cost.visits`). Does not load or
run anything, and needs no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product as pairs
from typing import SupportsIndex, TypeAlias

from commdsl import compiler
from commdsl.attention.machines import Machine, of_device, on_topology
from commdsl.cost.visits import Carrier, Carriers, Launched, Timed, UnlinkedError, Visited, beside, phases, spans
from commdsl.ir.products import stopping
from commdsl.ir.resolve import resolve
from commdsl.ir.schedules import Schedule
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine import devices, resources
from commdsl.machine.config import from_environment
from commdsl.machine.errors import ArgumentError
from commdsl.planner.tuning import selection
from commdsl.planner.tuning.selection import PRODUCTS, SEQUENCE, Candidate, Choice, Tune

PIECES = (1, 2, 4)
"""In which the rows of a rank travel."""


@dataclass(frozen=True)
class Maker:
    """What makes products: how that is tuned, and seconds beside FLOPs and bytes: of a call, of each product, and of
    each piece on its way, as it waits for a product or a product for it.
    """

    tune: Tune
    of_call: float
    of_product: float
    of_piece: float


KERNEL = Maker((), 10e-6, 5e-6, 9e-6)
LIBRARY = Maker((("matmul", "library"),), 10e-6, 10e-6, 30e-6)
PROCESSOR = Maker((), 0.0, 0.0, 0.0)
"""The kernel's as fits 36 products of 1024 to 16384 rows on two H200s (test_product_choice.py): estimates are off by a
fifteenth in the mean and by two fifths at worst, of the shortest products, but what they choose is in all but three
rows within 5 % of the fastest that was measured, and in those within 8 %, 10 % and 11 %. All-reduces in four pieces are
others since: of six that were measured anew, of 4096 and 8192 rows, the choice is within 5 % at five, and 14 % behind
four pieces at 4096 x 3456 x 5120. The library's are stated: its products are a launch each. What a product costs on a
processor is lost in what else that does.
"""

NEAR_TIE = 0.02
"""What is less simple has to be faster by more than this share."""

HOPPER = ("h100", "h200", "gh200")
"""Words of the names of GPUs for which there is a kernel of ours."""


@dataclass(frozen=True)
class Operator:
    """The schedule of an operator of `PRODUCTS`, and whether what travels are the rows that are multiplied, not what is
    made of them. A rank is called with its own rows, or with `all_rows`, and with the weights of its own columns, or of
    `all_columns`, and of the depth that its rows have, or of that of `all_depths`.
    """

    schedule: str
    gathers: bool
    all_rows: bool = True
    all_columns: bool = False
    all_depths: bool = False


_OPERATORS = (
    Operator("allgather_matmul", True, all_rows=False),
    Operator("matmul_reducescatter", False),
    Operator("matmul_allreduce", False),
    Operator("matmul_alltoall", False, all_rows=False, all_columns=True),
    Operator("alltoall_matmul", True, all_depths=True),
)

OPERATORS = dict(zip(PRODUCTS, _OPERATORS, strict=True))


ANY_ROWS = ("matmul_all_reduce",)
"""Where all ranks have all rows, before and after."""

LINE_BYTES = 16
"""A GPU's kernels take rows of a multiple of it, as `programs` looks at of tensors."""


@dataclass(frozen=True)
class Product:
    """`rows` of all ranks, of `depth`, times as many weights as `columns` times `depth` for every rank."""

    operator: str
    rows: int
    depth: int
    columns: int
    ranks: int
    itemsize: int = 2  # bytes of an element that travels
    is_float8: bool = False  # what is multiplied: in half the time

    @property
    def name(self) -> str:
        """In tables."""
        return f"{self.operator} {self.depth}x{self.columns}{' float8' if self.is_float8 else ''}"

    @property
    def nbytes(self) -> int:
        """Of the larger side of what travels: the gathered rows, or the results of all rows."""
        return self.rows * (self.depth if OPERATORS[self.operator].gathers else self.columns) * self.itemsize

    @property
    def flops(self) -> float:
        """Of a rank, as many as take so long in 16 bits."""
        return (1.0 if self.is_float8 else 2.0) * self.rows * self.depth * self.columns

    def admits(self, pieces: int) -> bool:
        return self.rows // self.ranks % pieces == 0


@dataclass(frozen=True)
class Estimate:
    """A candidate, and how long it would take."""

    candidate: Candidate
    time: Timed


def choice(
    operator: str,
    rows: int,
    depth: int,
    columns: int,
    *,
    ranks: int,
    device: str = "cpu",
    itemsize: int = 2,
    is_float8: bool = False,
    on: str | None = None,
) -> Choice:
    """What `commdsl.overlap.OPERATOR` runs, and why: the same on every rank that asks for the same.

    `rows`: of all `ranks`; `depth`, `columns`: of this rank's weights, as in torch.nn.Linear(depth, columns), and of
    the results of `matmul_all_to_all`, whose weights have as many columns for each rank, and the rows of
    `all_to_all_matmul`, whose weights are as deep for each. `itemsize`: bytes of an element; `is_float8`: of one byte,
    with scales, and of bfloat16 what is made; `device`: the GPU's name, by the rule of `commdsl.machine.devices`, or
    "cpu". `on`: a topology, shipped or in a file, in place of a device: the model alone decides, with its links and the
    GPU that its name has. The reason says where figures of the model come from: measured on the GPU, or an estimate.
    Raises ArgumentError, CommError.
    """
    device = devices.named(device)
    if operator not in PRODUCTS:
        raise ArgumentError(f"expected one of {', '.join(PRODUCTS)}, got `{operator}`")
    for number in (rows, depth, columns, ranks, itemsize):
        if not isinstance(number, SupportsIndex):
            raise ArgumentError(f"a product on ranks is of whole numbers, not {number!r}")
    if min(rows, depth, columns, ranks, itemsize) < 1:
        raise ArgumentError(f"{rows} x {depth} x {columns} of {itemsize} bytes on {ranks} ranks is no product")
    if rows % ranks and operator not in ANY_ROWS:
        raise ArgumentError(f"`{operator}`: {rows} rows of {ranks} ranks are not equally many of each")
    if is_float8:
        itemsize = 1 if OPERATORS[operator].gathers else 2  # of what travels
    product = Product(operator, rows, depth, columns, ranks, itemsize, is_float8)
    if on is not None:
        device = one_node(product, on_topology(on)).device
    if why := _unscheduled(product, device):
        return Choice(product.name, product.nbytes, ranks, device, SEQUENCE, (), (), why)
    return choose(product, device, on)


def _unscheduled(product: Product, device: str) -> str:
    """Why no schedule multiplies this, if none does."""
    if product.ranks == 1:
        return "one rank, to which nothing travels"
    if product.rows % product.ranks:
        return f"{product.ranks} ranks do not divide {product.rows} rows, which a schedule would"
    if device == devices.CPU:
        return ""
    if product.itemsize > 2:
        return f"no kernel on GPUs multiplies elements of {product.itemsize} bytes beside what travels"
    if product.depth * (1 if product.is_float8 else product.itemsize) % LINE_BYTES or product.columns * 2 % LINE_BYTES:
        sides = f"{product.depth} deep and {product.columns} wide"
        return f"kernels on GPUs read and write rows of a multiple of {LINE_BYTES} bytes, not {sides}"
    return ""


@lru_cache(maxsize=1024)
def choose(product: Product, device: str, on: str | None = None) -> Choice:
    """Return the choice for a product. Tables are read once a process and say nothing of a topology."""
    tables = selection.known_tables(from_environment().tables) if on is None else ()
    rows = selection.measured(tables, product.name, product.ranks, device)
    if rows is not None:
        found = selection.chosen(rows, product.name, product.nbytes, product.ranks, device)
        if product.admits(dict(found.params).get("C", 1)):
            return found
    first, second = two_best(list(estimates(product, device, on)))
    where = f"no table for {product.name} on {on or device} x{product.ranks}"
    if rows is not None:
        where = f"{product.rows} rows are not to be had in the pieces that the table has"
    figures = machine_of(product, device, on).kind.source
    said = f"{where}: {_words(first)} by the model; next {second.candidate} {_us(second.time.seconds)}; {figures}"
    one = first.candidate
    return Choice(product.name, product.nbytes, product.ranks, device, one.schedule, one.params, one.tune, said)


@dataclass(frozen=True)
class Event:
    """A product, or what travels in one launch: of and to which parts of buffers, and seconds from the call's begin."""

    is_product: bool
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    begin: float
    end: float


_Work: TypeAlias = tuple[tuple[Launched | Visited, ...], list[float], Carriers]
"""What there is to do, the seconds of each product, and what carries the rest."""


def two_best(found: Sequence[Estimate]) -> tuple[Estimate, Estimate]:
    """The fastest, of near ties the one that stands first; and the fastest of the others."""
    first = found[0]
    for one in found[1:]:
        if one.time.seconds < first.time.seconds * (1 - NEAR_TIE):
            first = one
    return first, min((one for one in found if one is not first), key=lambda one: one.time.seconds)


def _words(one: Estimate) -> str:
    products, transfers = _us(one.time.visits), _us(one.time.launches)
    return f"{_us(one.time.seconds)}, of which products {products} and what travels {transfers}"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.4g} us"


# --- the model --------------------------------------------------------------------------------------------------------


def makers(device: str) -> tuple[Maker, ...]:
    """The first is what runs where nothing is tuned."""
    if device == devices.CPU:
        return (PROCESSOR,)
    return (KERNEL, LIBRARY) if set(HOPPER) & set(devices.words(device)) else (replace(LIBRARY, tune=()),)


def candidates(operator: str, device: str) -> Iterator[Candidate]:
    """Everything there is to choose from, what is simpler first."""
    schedule = OPERATORS[operator].schedule
    for maker, pieces in pairs(makers(device), PIECES):
        yield Candidate(schedule, (("C", pieces),), maker.tune)
    yield Candidate(SEQUENCE)


def machine_of(product: Product, device: str, on: str | None) -> Machine:
    """Return the machine that a product is modelled on: a topology, or as many of a device on one node."""
    return of_device(device, (0,) * product.ranks) if on is None else one_node(product, on_topology(on))


def one_node(product: Product, machine: Machine) -> Machine:
    """Return the machine. Raises ArgumentError where its nodes have fewer GPUs than the product has ranks."""
    if product.ranks > machine.topology.gpus_per_node:
        has = f"`{machine.topology.name}` has {machine.topology.gpus_per_node} GPUs on a node"
        raise ArgumentError(f"products overlap with transfers within one node, and {has}, not {product.ranks}")
    return machine


def estimates(product: Product, device: str, on: str | None = None) -> Iterator[Estimate]:
    """Yield the estimates of the candidates that the product admits. Raises ArgumentError where a link is missing."""
    machine = machine_of(product, device, on)
    of = {maker.tune: maker for maker in makers(machine.device)}
    for one in candidates(product.operator, machine.device):
        if one.schedule == SEQUENCE:
            yield Estimate(one, _sequence(product, machine))
        elif product.admits(pieces := dict(one.params)["C"]):
            yield Estimate(one, _beside(product, machine, of[one.tune], pieces))


def _sequence(product: Product, machine: Machine) -> Timed:
    carrier, products = _carrier(machine), product.flops / machine.kind.product
    whole = (phase for phase in _phases(product, machine, 1) if isinstance(phase, Launched))
    travels = sum(phase.time((carrier, carrier)) for phase in whole)
    return Timed(products + travels, travels, products)


def _beside(product: Product, machine: Machine, maker: Maker, pieces: int) -> Timed:
    time = beside(*_work(product, machine, maker, pieces))
    return replace(time, seconds=time.seconds + maker.of_call)


def timeline(product: Product, where: str | Machine, pieces: int) -> Iterator[Event]:
    """Yield the schedule's events in so many pieces, its products computed by the kernel that runs untuned.

    `where`: a device's name, or a machine. Raises ArgumentError where its nodes are too small, or a link is missing.
    """
    machine = one_node(product, where) if isinstance(where, Machine) else machine_of(product, where, None)
    maker = makers(machine.device)[0]
    work = _work(product, machine, maker, pieces)
    for phase, (begin, end) in zip(work[0], spans(*work), strict=True):
        yield Event(isinstance(phase, Visited), phase.reads, phase.writes, begin + maker.of_call, end + maker.of_call)


def _work(product: Product, machine: Machine, maker: Maker, pieces: int) -> _Work:
    """Its products take equally long: each has the rows of one rank's piece."""
    found = _phases(product, machine, pieces)
    count = sum(isinstance(phase, Visited) for phase in found)
    carrier = _carrier(machine)
    carrier = replace(carrier, latency=carrier.latency + maker.of_piece)
    each = maker.of_product + product.flops / count / machine.kind.product
    return found, [each] * count, (carrier, carrier)


def _carrier(machine: Machine) -> Carrier:
    return replace(machine.carrier(machine.ways[0]), memory=machine.kind.memory)


def _phases(product: Product, machine: Machine, pieces: int) -> tuple[Launched | Visited, ...]:
    schedule = _stopping(OPERATORS[product.operator].schedule, pieces, product.ranks, machine)
    chunk = product.nbytes / product.ranks / pieces
    try:
        return phases(schedule, {buffer.name: chunk for buffer in schedule.buffers})
    except UnlinkedError as error:
        raise ArgumentError(f"`{schedule.name}`: {error}") from error


@lru_cache(maxsize=64)
def _stopping(name: str, pieces: int, ranks: int, machine: Machine) -> Schedule:
    """The schedule, with a visit at every product."""
    path = resources.shipped_file(name)
    assert path is not None, name
    files = compiler.read(path)
    decl = compiler.choose_kind(files, None, ScheduleDecl)
    return stopping(resolve(files, decl, ranks, machine.topology, {"C": pieces})).schedule
