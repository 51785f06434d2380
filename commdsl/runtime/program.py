"""Turns a `.comm` file, parameters and a number of ranks into a Program: the Plan, its text, and the shape of the op.

Assumes the compiler's errors are the caller's to show. Does not touch torch. Keeps Programs in the user's own cache
(`Config.cache_dir`), under a key over the texts, the parameters and commdsl's own sources.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache as memoize
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from commdsl.build.built import Built
from commdsl.build.emit import Emitted
from commdsl.ir.backward import Backward, backward
from commdsl.ir.classes import Unit, units
from commdsl.ir.dispatches import Dispatch
from commdsl.ir.held import Held, held
from commdsl.ir.lengths import Lengths
from commdsl.ir.products import Part, stopping
from commdsl.ir.schedules import Schedule
from commdsl.language.kinds import GIVEN, RETURNED
from commdsl.language.source import Texts
from commdsl.language.text import text_of
from commdsl.machine import cache
from commdsl.machine.config import Config
from commdsl.machine.resources import data_dir, split_place
from commdsl.program.launches import Return
from commdsl.program.memory import Rights, Transport
from commdsl.program.plan import Plan
from commdsl.program.stamps import stamped
from commdsl.program.visited import only_multiplied, plan_of, segments

if TYPE_CHECKING:
    from commdsl.compiler import CompiledSchedule


@dataclass(frozen=True, slots=True)
class Port:
    """A tensor of the op. `stack` is the number of yields in a leading dimension of its own, 0 for other tensors.
    `unit`: what its blocks are; None: as those of the first input. `any_lines`: products alone read it, so it may lie
    by columns as well as by rows.
    """

    name: str
    blocks: int
    stack: int = 0
    unit: Unit | None = None
    any_lines: bool = False
    lengths: Lengths | None = None  # of its blocks, known with a call; None: all are as long


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs as the caller sees them; `tensors` says for each tensor of the Plan (is_input, position): what
    only the kernel uses stands behind the outputs.
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    own: tuple[Port, ...]  # made for a call, and gone after it
    tensors: tuple[tuple[bool, int], ...]
    has_reduction: bool  # which calls say how to do
    in_place: tuple[int, ...] | None  # for each output the input it may overwrite; None: there is no in-place variant
    row: int | None = None  # which input is one row of the others
    numbers: tuple[int, ...] = ()  # which inputs are one number each
    cast: str | None = None  # what values are rounded to on their way
    combines: bool = False  # whether there is a reduction, of calls or of the text
    scales: tuple[str, ...] = ()  # what follows the inputs where float8 is multiplied: a number of each factor
    products: tuple[tuple[Unit, Unit, Unit], ...] = ()  # what is multiplied: rows, the factor, and what is made

    @property
    def lengths(self) -> Lengths | None:
        """By what blocks are of lengths of their own, if they are: then those of all tensors are."""
        return next((port.lengths for port in (*self.inputs, *self.outputs)), None)


@dataclass(frozen=True, eq=False)
class Program:
    """One schedule, proved and emitted for one number of ranks and one transport."""

    plan: Plan
    emitted: Emitted
    signature: Signature
    fills_outputs: bool  # False: on some rank part of an output is never written
    backward: Backward | None
    visits: Visits | None = None  # how it stops at its yields, where it has any

    @property
    def visited(self) -> Visits | None:
        """The visits of the caller: where every visit is a product there are none."""
        return None if self.visits is None or self.visits.parts else self.visits

    @property
    def called(self) -> Signature:
        """What a call is given and returns, with visits where the caller has any."""
        return self.signature if self.visited is None else self.visited.signature


@dataclass(frozen=True, eq=False)
class Visits:
    """The same schedule with a visit of the caller at each yield: a Program for everything that is launched.

    The outputs of `signature` are the tensors that the caller gets back.
    """

    plan: Plan
    signature: Signature
    launched: tuple[Program, ...]  # as `segments`
    held: tuple[Held, ...]  # what each visit is handed
    parts: tuple[Part, ...]  # of the tensors of a call, where every visit is a product
    by_library: bool = False  # that the products are torch's, whatever our kernel could make
    pushing: Plan | None = None  # in which tasks of our kernel put what peers get there themselves


@dataclass(frozen=True, slots=True)
class Definition:
    """What `load` was asked for: enough to compile it for any number of ranks."""

    path: Path | Texts
    schedule: str | None
    params: tuple[tuple[str, int], ...]
    on: str | None
    tune: tuple[tuple[str, int | str], ...] = ()  # in place of what the text tunes
    kernels: tuple[Built, ...] = ()  # built ahead of time, for any number of ranks
    stamped: bool = False


@dataclass(frozen=True, eq=False)
class RoutedProgram:
    """One dispatch, proved and emitted for one number of ranks and one transport."""

    dispatch: Dispatch
    plan: Plan
    emitted: Emitted
    back: tuple[Plan, Emitted] | None  # of rows that go by keys, the way back
    values: tuple[Plan, Emitted] | None  # and that of a number for each key
    again: tuple[Plan, Emitted] | None  # of rows that go by keys, the way there to places that are known


def program(definition: Definition, ranks: int, transport: Transport, config: Config) -> Program:
    """From the cache where nothing it depends on has changed, else compiled. Raises CommError as the compiler does."""
    parts = ["program", *_parts(definition, ranks, transport)]
    found = cache.kept(config.cache_dir, cache.key(parts), Program, lambda: _compile(definition, ranks, transport))
    return _with_kernels(found, definition.kernels) if definition.kernels else found


def _with_kernels(made: Program, kernels: tuple[Built, ...]) -> Program:
    visits = made.visits
    if visits is not None:
        visits = replace(visits, launched=tuple(_with_kernels(one, kernels) for one in visits.launched))
    return replace(made, emitted=replace(made.emitted, kernels=kernels), visits=visits)


def routed_program(definition: Definition, ranks: int, transport: Transport, config: Config) -> RoutedProgram:
    """As `program`, for a dispatch."""
    parts = ["dispatch", *_parts(definition, ranks, transport)]
    made = partial(_compile_dispatch, definition, ranks, transport)
    found = cache.kept(config.cache_dir, cache.key(parts), RoutedProgram, made)
    if not definition.kernels:
        return found
    back, values, again = (
        way and (way[0], replace(way[1], kernels=definition.kernels)) for way in (found.back, found.values, found.again)
    )
    emitted = replace(found.emitted, kernels=definition.kernels)
    return replace(found, emitted=emitted, back=back, values=values, again=again)


def _compile_dispatch(definition: Definition, ranks: int, transport: Transport) -> RoutedProgram:
    from commdsl import compiler  # as in `_compile`
    from commdsl.language.syntax import DispatchDecl

    files = compiler.read(definition.path)
    given = compiler.Given(ranks, definition.on, dict(definition.params), transport, dict(definition.tune))
    decl = compiler.choose_kind(files, definition.schedule, DispatchDecl)
    made = compiler.printed(compiler.check_dispatch(files, decl, given))
    by_plan = dict(made.ways)
    back, values, again = (None if one is None else (one, by_plan[one]) for one in (made.back, made.values, made.again))
    return RoutedProgram(made.dispatch, made.plan, made.emitted, back, values, again)


def _compile(definition: Definition, ranks: int, transport: Transport) -> Program:
    from commdsl import compiler  # the parser and the checks are not needed for what is in the cache
    from commdsl.language.syntax import ScheduleDecl

    files = compiler.read(definition.path)
    given = compiler.Given(ranks, definition.on, dict(definition.params), transport, dict(definition.tune))
    decl = compiler.choose_kind(files, definition.schedule, ScheduleDecl)
    checked = compiler.check_schedule(files, decl, given)
    if definition.stamped:
        between, pushing = (None if one is None else stamped(one) for one in (checked.visits, checked.pushing))
        plan = between if between is not None and checked.plan is checked.visits else stamped(checked.plan)
        checked = replace(checked, plan=plan, visits=between, pushing=pushing)
    made = compiler.printed(checked)
    visits = _visits(made)
    if made.plan.is_visited:
        assert visits is not None
        signature = _whole(made.schedule, visits) if visits.parts else visits.signature
        return Program(made.plan, made.emitted, signature, True, None, visits)
    return Program(
        made.plan,
        made.emitted,
        _signature(made.schedule, made.plan),
        _fills_outputs(made.plan),
        backward(made.schedule),
        visits,
    )


def _visits(made: CompiledSchedule) -> Visits | None:
    plan = made.visits
    if plan is None:
        return None
    stopped = stopping(made.schedule)
    schedule = stopped.schedule
    launched = [
        Program(one, emitted, _signature(schedule, one), True, None)
        for one, emitted in zip((plan_of(plan, moves) for moves in segments(plan)), made.launched, strict=True)
    ]
    known = units(schedule)
    back = {kept.name for phase in plan.phases if isinstance(phase, Return) for kept in phase.reads}
    ports = [(buffer, Port(buffer.name, buffer.blocks, 0, known[buffer.name])) for buffer in schedule.buffers]
    signature = Signature(
        tuple(port for buffer, port in ports if buffer.kind in GIVEN),
        tuple(port for buffer, port in ports if buffer.name in back),
        (),
        (),
        any(one.plan.moves.asks for one in launched),
        None,
        combines=any(one.plan.moves.has_reduction for one in launched),
    )
    by_library = schedule.tuning.matmul == "library"
    return Visits(plan, signature, tuple(launched), held(schedule), stopped.parts, by_library, made.pushing)


def _whole(schedule: Schedule, visits: Visits) -> Signature:
    """Of an op that multiplies: its tensors as the text has them."""
    known, free = units(schedule), only_multiplied(visits.plan, visits.parts)
    ports = [(one.kind, Port(one.name, one.blocks, 0, known[one.name], one.name in free)) for one in schedule.buffers]
    given, returned = (tuple(port for kind, port in ports if kind in kinds) for kinds in (GIVEN, RETURNED))
    names = [buffer.name for buffer in schedule.buffers]
    every = [tuple(known[names[one]] for one in product) for product in schedule.products]
    products = tuple((rows, by, made) for rows, by, made in every if rows and by and made)
    given_to = {(rows.size, by.size) for rows, by, _ in products}
    is_one = len(given_to) == 1 and not any(rows.is_made or by.is_made for rows, by, _ in products)
    scales = tuple(f"scale_{name}" for name in given_to.pop()) if is_one else ()
    return Signature(given, returned, (), (), False, None, scales=scales, products=products)


def _parts(definition: Definition, ranks: int, transport: Transport) -> list[str]:
    """What a kept Program depends on: what it is, what it shows of its files, and what its pickle is made of."""
    shown = [str(path) for path, _ in _sources(definition)]
    return [*_identity(definition, ranks, transport), *shown, f"{sys.version_info[:2]} {np.__version__}"]


def _identity(definition: Definition, ranks: int, transport: Transport) -> list[str]:
    """Everything that a Program is made of, as texts; wherever its files lie, and whatever they are called."""
    values = [f"{name}={value}" for name, value in sorted(definition.params)]
    values += [f"tune {key}={value!r}" for key, value in sorted(definition.tune)]
    machine = _machine(definition)[1] if definition.on else ""
    parts = [sources_digest(), definition.schedule or "", str(ranks), transport.value, machine]
    parts += ["stamped"] if definition.stamped else []
    return [*parts, *values, *(text for _, text in _sources(definition))]


def _machine(definition: Definition) -> tuple[Path | None, str]:
    """The file of the topology where it is named, and what is asked for in it."""
    on = definition.on or ""
    file, name = split_place(on)
    return (Path(file), name or "") if Path(file).is_file() else (None, on)


def _sources(definition: Definition) -> Iterator[tuple[Path, str]]:
    """The files that may have a say, each with its text."""
    if isinstance(definition.path, tuple):
        yield from ((Path(one.name), one.text) for one in definition.path)
    else:
        yield from _texts(definition.path, set())
    if definition.on is not None:
        file, _ = _machine(definition)
        yield from () if file is None else _texts(file, set())
        for path in sorted((data_dir("schedules") / "topologies").glob("*.comm")):
            yield path, text_of(path)


def digest_of(definition: Definition) -> str:
    """Stands for a Definition for any number of ranks; the same text has the same under any path."""
    return cache.key(_identity(definition, 0, Transport.PEER))


def _texts(path: Path, seen: set[Path]) -> Iterator[tuple[Path, str]]:
    """A file and its text and, by name, those it may use. More than it does use is harmless: a key needs no parser."""
    resolved = path.resolve()
    if resolved in seen:
        return
    seen.add(resolved)
    text = text_of(path)
    yield path, text
    for name in re.findall(r'\buse\s+"([^"\n]*)"', text):
        for base in (path.parent, data_dir("schedules")):
            if (base / name).is_file():
                yield from _texts(base / name, seen)


@memoize
def sources_digest() -> str:
    """One SHA-256 over the files that decide what a text compiles to."""
    digest = hashlib.sha256()
    package = Path(__file__).resolve().parents[1]
    folders = ((package, "**/*.py"), (data_dir("grammar"), "*.lark"), (data_dir("templates"), "**/*"))
    users = (package / "commands", package / "runtime")  # of what is compiled; of them only this module has a say
    for root, pattern in folders:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and (path.parent not in users or path == Path(__file__).resolve()):
                digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _signature(schedule: Schedule, plan: Plan) -> Signature:
    inputs: list[Port] = []
    outputs: list[Port] = []
    own: list[Port] = []
    tensors: list[tuple[bool, int]] = []
    rights = _rights(plan)
    known = units(schedule) if plan.by_row is not None else {}
    for tensor, access in zip(plan.moves.tensors, rights, strict=True):
        ports = {Rights.READ: inputs, Rights.WRITE: outputs, Rights.OWN: own}[access]
        stack = schedule.num_yields if tensor.is_yield else 0
        behind = rights.count(Rights.WRITE) if ports is own else 0
        tensors.append((access is Rights.READ, len(ports) + behind))
        unit = known.get(tensor.name)
        ports.append(Port(tensor.name, tensor.blocks // max(stack, 1), stack, unit, lengths=tensor.lengths))
    names = [port.name for port in inputs]
    safe = all(port.name in plan.moves.alias_safe and port.name in names for port in outputs)
    return Signature(
        tuple(inputs),
        tuple(outputs),
        tuple(own),
        tuple(tensors),
        plan.moves.asks,
        tuple(names.index(port.name) for port in outputs) if outputs and safe else None,
        None if plan.by_row is None else tensors[plan.by_row.row][1],
        () if plan.by_row is None else tuple(tensors[number][1] for number in plan.by_row.numbers),
        None if schedule.cast is None else schedule.cast.words,
        plan.moves.has_reduction,
    )


def _rights(plan: Plan) -> list[Rights]:
    """Of each tensor, as the caller sees them: what its lanes make rows from they have for themselves."""
    rows = None if plan.by_row is None else plan.by_row.rows
    return [Rights.OWN if number == rows else tensor.access for number, tensor in enumerate(plan.moves.tensors)]


def _fills_outputs(plan: Plan) -> bool:
    """Whether every rank's operations write every chunk of every output."""
    for index, tensor in enumerate(plan.moves.tensors):
        if tensor.access is not Rights.WRITE or (plan.by_row is not None and index in plan.by_row.results):
            continue
        here = plan.moves.ops.dest_space == index
        written = np.unique(plan.moves.ops.dest_rank[here].astype(np.int64) * 2**32 + plan.moves.ops.dest_index[here])
        if len(written) < plan.num_ranks * tensor.blocks * tensor.cut:
            return False
    return True
