"""Turns one schedule into its IR: first what is declared, then the contracts and the steps.

Assumes that `names` found nothing wrong. Does not read files, machines or roles; the package's front does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import TypeAlias, assert_never

import numpy as np

from commdsl.ir.contracts import Contract
from commdsl.ir.functions import ROWWISE
from commdsl.ir.lengths import Lengths
from commdsl.ir.resolve import tasks
from commdsl.ir.resolve.budget import STATEMENT, TURN, VISITED_TURN, Budget, copies_of, handed
from commdsl.ir.resolve.call_rules import Schedules
from commdsl.ir.resolve.calls import Call, groups
from commdsl.ir.resolve.contracts import contracts
from commdsl.ir.resolve.cycle_sets import cycle_set
from commdsl.ir.resolve.evaluate import Cycle, Cycles, Evaluator, Functions, Group, Value
from commdsl.ir.resolve.faults import Faults, Poisoned
from commdsl.ir.resolve.parameters import admits, known_counts, parameters
from commdsl.ir.resolve.rows import Binding
from commdsl.ir.resolve.steps import StepBuilder
from commdsl.ir.resolve.tuning import Machine, tuning
from commdsl.ir.resolve.waves import at_once
from commdsl.ir.schedules import AnyStep, Buffer, Called, RoleSet, Schedule, Step, Task, Tuning, Yield
from commdsl.language import syntax as syn
from commdsl.language.kinds import Axis, BufferKind
from commdsl.language.syntax import ScheduleDecl
from commdsl.machine.topology import Topology, switch

Callee: TypeAlias = tuple[str, int, tuple[tuple[str, int], ...]]
"""What is called: a schedule by name, the ranks of a group, and values of parameters."""


@dataclass
class Resolver:
    """One schedule on its way to IR: first what is declared, then the steps."""

    decl: ScheduleDecl
    ranks: int
    topology: Topology
    functions: Functions
    schedules: Schedules
    role_sets: tuple[RoleSet, ...]
    faults: Faults
    budget: Budget | None = None  # None: one of its own
    scope: dict[str, Value] = field(default_factory=dict)
    params: list[tuple[str, int]] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)  # buffers whose condition does not hold
    contracts: list[Contract] = field(default_factory=list)
    cycles: list[Cycles] = field(default_factory=list)
    called: dict[Callee, Called] = field(default_factory=dict)
    steps: list[AnyStep] = field(default_factory=list)
    tuning: Tuning = field(default_factory=Tuning)
    role: str | None = None
    has_empty_loops: bool = False

    def __post_init__(self) -> None:
        self.evaluator = Evaluator(self.faults)
        made, computed = tasks.made_in(self.decl.body), tasks.computed_in(self.decl.body)
        self.binding = Binding(self.evaluator, self.faults, self.buffers, self.ranks, made, self.budget, computed)
        if tasks.has_visits(self.decl.body):
            self.binding.budget.turn = VISITED_TURN
        self.builders: dict[int, StepBuilder] = {}
        self.scratch: dict[tuple[int, Callee], dict[str, str]] = {}

    # --- declarations -------------------------------------------------------------------------------------------------

    def declarations(self, given: Mapping[str, int], overriding: tuple[syn.TuneEntry, ...] | None) -> None:
        """Resolve what is declared, and what is tuned unless `overriding` is None: of a schedule that is called."""
        decl, topology = self.decl, self.topology
        if self.ranks < 1 or self.ranks > topology.num_ranks:
            what = f"expected 1 to {topology.num_ranks} ranks, got {self.ranks}"
            label = f"`{topology.name}` has {topology.num_ranks}"
            help = "ask for fewer ranks or name a larger topology"
            self.faults.report("C502", what, decl.ranks.span, label, help=help)
            return
        self.binding.budget.ranks(self.ranks, decl.ranks.span)
        self.params = parameters(decl, given, self._first_scope(), self.evaluator, self.faults)
        self.scope = self._first_scope()
        if not self._admits_ranks(given):
            return  # what else is wrong may be so only for ranks that the schedule is not for
        for statement in decl.body:
            try:
                self._declare(statement)
            except Poisoned:
                continue
        if not any(isinstance(statement, syn.Ensure) for statement in decl.body):
            what = f"`{decl.name.text}` does not say what it ensures"
            help = "write for example `ensure allreduce(x)`: without it there is nothing to prove"
            self.faults.report("C507", what, decl.name.span, "no `ensure`", help=help)
        if overriding is None:
            self.role = None
            return
        tunes = [statement for statement in decl.body if isinstance(statement, syn.Tune)]
        entries = tuple(entry for tune in tunes for entry in tune.entries)
        machine = Machine(self.topology, self.ranks, self.role, self._role_sms())
        self.tuning = tuning(entries, overriding, machine, self.evaluator, self.scope, self.faults)

    def _role_sms(self) -> int | None:
        roles = (role for roles in self.role_sets for role in roles.roles)
        return next((last - first for name, first, last in roles if name == self.role and last > first), None)

    def _first_scope(self) -> dict[str, Value]:
        known = known_counts(self.decl.ranks, self.ranks, self.topology)
        return {**self.functions, **known, **dict(self.params)}

    def _admits_ranks(self, given: Mapping[str, int]) -> bool:
        where = self.decl.where
        try:
            if where is None or self.evaluator.number(where, self.scope):
                return True
        except Poisoned:
            return False
        values = ", ".join(f"{name} = {value}" for name, value in [(self.decl.ranks.text, self.ranks), *self.params])
        self.faults.report("C501", f"`{self.decl.name.text}` is not for {self.ranks} ranks", where.span,
                           f"false for {values}", help=self._nearest_ranks(given))  # fmt: skip
        return False

    def _nearest_ranks(self, given: Mapping[str, int]) -> str:
        """Of a machine that is as large as the ranks, its GPUs are others, too."""
        flat, machine = self.topology.idealised, self.topology
        most = max(64, 2 * self.ranks) if flat else machine.num_ranks
        sizes = ((ranks, switch(ranks) if flat else machine) for ranks in range(1, most + 1))
        fitting = [ranks for ranks, on in sizes if admits(self.decl, self.functions, ranks, on, given)]
        below = [ranks for ranks in fitting if ranks < self.ranks][-1:]
        above = [ranks for ranks in fitting if ranks > self.ranks][:1]
        numbers = " and ".join(str(ranks) for ranks in below + above)
        if not numbers:
            elsewhere = ", or say with `--on` for which machine" if flat else ""
            return f"no rank count nearby fits; change the parameters{elsewhere}"
        return f"the nearest rank counts that fit are {numbers}" if below and above else f"{numbers} ranks would fit"

    def _declare(self, statement: syn.Stmt) -> None:
        match statement:
            case syn.BufferDecl():
                self._buffer(statement)
            case syn.CyclesDecl():
                cycles = Cycles(cycle_set(statement, self.binding, self.scope))
                self.cycles.append(cycles)
                self.scope.setdefault(statement.name.text, cycles)
            case syn.GroupDecl(name):
                table = groups(statement, self.evaluator, self.scope, self.ranks, self.topology, self.faults)
                self.scope.setdefault(name.text, Group(table))
            case syn.Let(name, value):
                self.scope.setdefault(name.text, self.evaluator.value(value, self.scope))
            case syn.On(role):
                if self.role is not None:
                    self.faults.fail("C506", "a schedule runs on one role", statement.span, f"already on `{self.role}`")
                self.role = role.text
            case _:
                pass

    def _buffer(self, decl: syn.BufferDecl) -> None:
        if decl.where is not None and not self.evaluator.number(decl.where, self.scope):
            self.absent.add(decl.name.text)
            return
        extents, blocks, cut = list[int](), 1, 1
        for dim in decl.dims:
            extent = self.evaluator.constant(dim.size, self.scope)
            if not 1 <= extent <= 2**20:
                self.faults.fail("C509", "an extent is 1 to 2 ** 20", dim.size.span, f"this is {extent}")
            extents.append(extent)
            blocks, cut = (blocks * extent, cut) if dim.blocks else (blocks, cut * extent)
        what = f"chunks on each of {self.ranks} ranks"
        self.binding.budget.spend(blocks * cut, self.ranks, what, decl.span)
        element, like = (None if name is None else name.text for name in (decl.element, decl.like))
        lengths = self._lengths(decl, blocks)
        made = Buffer(decl.name.text, decl.kind, tuple(extents), blocks, cut, decl.span, element, like, lengths)
        self.buffers.setdefault(decl.name.text, made)

    def _lengths(self, decl: syn.BufferDecl, blocks: int) -> Lengths | None:
        """C128: a table that fits its buffer, the only one of the schedule."""
        if decl.lengths is None:
            return None
        said, what, help = Lengths(decl.lengths.table.text, decl.lengths.axes), "", ""
        others = [one.lengths for one in self.buffers.values() if one.lengths is not None]
        if decl.kind is BufferKind.SCRATCH:
            what, help = "a slot of a scratch buffer is as long as what is put there", "leave the lengths out"
        elif len(set(said.axes)) < len(said.axes):
            what, help = f"by {said.axes[0].value} twice", f"write `{said.table}[rank, block]`, or the other way round"
        elif Axis.BLOCK in said.axes and blocks != self.ranks:
            what, help = (
                f"{blocks} blocks, and a length for each of {self.ranks} ranks",
                "declare as many blocks as ranks",
            )
        elif {(one.table, len(one.axes)) for one in others} - {(said.table, len(said.axes))}:
            what, help = f"another table is `{others[0]}`", "look all lengths up in one table, by as many"
        if what:
            self.faults.fail(
                "C128", f"`{said}` cannot be the lengths of `{decl.name.text}`", decl.lengths.span, what, help=help
            )
        return said

    # --- steps --------------------------------------------------------------------------------------------------------

    def body(self) -> None:
        for statement in self.decl.body:
            if isinstance(statement, syn.Ensure):
                try:
                    self.contracts += contracts(statement, self.binding, self.scope)
                except Poisoned:
                    continue
        self._statements(self.decl.body, self.scope, ())
        tasks.check_yields(self.steps, self.buffers_list, self.faults)
        if not self.faults.found:  # it may be a task at fault that is missing
            tasks.check_sources(self.contracts, self.steps, self.buffers_list, self.faults)

    def _statements(
        self, body: tuple[syn.Stmt, ...], scope: dict[str, Value], bindings: tuple[tuple[str, int], ...]
    ) -> None:
        for statement in body:
            self.evaluator.bindings = bindings
            self.binding.budget.spend(1, STATEMENT, "statements", statement.span)
            try:
                self._statement(statement, scope, bindings)
            except Poisoned:
                continue

    def _statement(self, statement: syn.Stmt, scope: dict[str, Value], bindings: tuple[tuple[str, int], ...]) -> None:
        match statement:
            case syn.Let(name, value):
                scope[name.text] = self.evaluator.value(value, scope)
            case syn.For():
                for _ in self._turns(statement, scope, bindings):
                    pass
            case syn.Pipeline():
                self._pipeline(statement, scope, bindings)
            case syn.If(arms, otherwise):
                bodies = (arm.body for arm in arms if self.evaluator.number(arm.condition, scope))
                self._statements(next(bodies, otherwise), dict(scope), bindings)
            case syn.Each():
                # The tree outlives the resolver, so a node's identity names it.
                builder = self.builders.get(id(statement))
                if builder is None:
                    builder = self.builders[id(statement)] = StepBuilder(statement, self.binding)
                self.steps.append(builder.step(scope, bindings))
            case syn.Do():
                self._check_there(statement)
                self._call(statement, scope, bindings)
            case syn.Yield() | syn.Visit() | syn.Compute():
                self._check_there(statement)
                self._computed(statement, bindings)
            case _:
                pass

    def _computed(self, statement: syn.Yield | syn.Visit | syn.Compute, bindings: tuple[tuple[str, int], ...]) -> None:
        match statement:
            case syn.Yield(buffer):
                self._task(Yield((list(self.buffers).index(buffer.text),), bindings, statement.span))
            case syn.Visit():
                self._task(tasks.visit(statement, list(self.buffers), bindings))
            case syn.Compute(function) if function.text in ROWWISE:
                self.steps.append(tasks.rowwise(statement, self.buffers, self.ranks, bindings, self.faults))
            case syn.Compute():
                self._task(tasks.task(statement, self.buffers, bindings, self.faults))
            case _:
                assert_never(statement)

    def _check_there(self, node: syn.Node) -> None:
        """C130 where it names a buffer that is not there."""
        for one in syn.nodes(node) if self.absent else ():
            if isinstance(one, syn.Name) and one.text in self.absent:
                self.binding.check_there(one)

    def _turns(
        self, loop: syn.For | syn.Pipeline, scope: dict[str, Value], bindings: tuple[tuple[str, int], ...]
    ) -> Iterator[int]:
        """The turns of a loop, from 0, each when its steps are there."""
        first, last, cycles = self.binding.domain(loop.domain, scope)
        self.binding.budget.loop(loop, int(last) - int(first), scope)
        self.has_empty_loops |= int(last) <= int(first)
        for turn, index in enumerate(range(int(first), int(last))):
            bound = index if cycles is None else Cycle(cycles, index)
            self.binding.budget.spend(1, STATEMENT, "rounds", loop.domain.span)
            self._statements(loop.body, {**scope, loop.name.text: bound}, (*bindings, (loop.name.text, index)))
            yield turn

    def _pipeline(self, pipeline: syn.Pipeline, scope: dict[str, Value], bindings: tuple[tuple[str, int], ...]) -> None:
        begin, waves = len(self.steps), dict[int, list[Step]]()
        for turn in self._turns(pipeline, scope, bindings):
            steps, self.steps[begin:] = self.steps[begin:], ()
            for number, step in enumerate(steps, turn):
                assert isinstance(step, Step), "nothing in a pipeline yields or computes"
                waves.setdefault(number, []).append(step)
        for number, wave in sorted(waves.items()):
            self.steps.append(at_once(wave, (*bindings, ("wave", number)), pipeline.span))

    def _call(self, do: syn.Do, scope: dict[str, Value], bindings: tuple[tuple[str, int], ...]) -> None:
        everyone = Group(np.arange(self.ranks, dtype=np.int32).reshape(1, -1))
        over = everyone if do.group is None else scope.get(do.group.text)
        if not isinstance(over, Group):
            raise Poisoned  # which has been reported
        self.binding.budget.spend(1, TURN, "calls", do.span)
        group = over.ranks
        params = tuple((one.name.text, self.evaluator.constant(one.value, scope)) for one in do.settings)
        callee = (do.schedule.text, group.shape[1], params)
        if callee not in self.called:
            with self.faults.called(do.span):
                self.called[callee] = Called(self._callee(callee), do.span)
        schedule = self.called[callee].schedule
        with self.faults.called(do.span):
            call = Call(do, schedule, group, scope, self.binding)
            self.steps += call.steps(self._scratch((id(do), callee), call), bindings)

    def _callee(self, callee: Callee) -> Schedule:
        """A schedule of the files for the ranks of a group, from the same budget; Poisoned where it has a fault."""
        name, ranks, params = callee
        before, decl = self.faults.reports, self.schedules[name]
        inner = Resolver(decl, ranks, self.topology, self.functions, self.schedules, (), self.faults,
                         self.binding.budget)  # fmt: skip
        inner.declarations(dict(params), None)
        if self.faults.reports == before:
            inner.body()
        if self.faults.reports > before:
            raise Poisoned
        return inner.schedule()

    def _scratch(self, site: tuple[int, Callee], call: Call) -> dict[str, str]:
        """The buffers made for those that the schedule has for itself: the same at each turn of a loop."""
        if site not in self.scratch:
            self.scratch[site] = {}
            for buffer in call.schedule.buffers:
                if buffer.kind is BufferKind.SCRATCH:
                    names = (f"{call.schedule.name}_{buffer.name}{number or ''}" for number in count())
                    name = next(name for name in names if name not in self.buffers)
                    self.buffers[name] = call.scratch(buffer, name)
                    self.scratch[site][buffer.name] = name
        return self.scratch[site]

    def _task(self, task: Yield | Task) -> None:
        chunks = sum(self.buffers_list[buffer].num_chunks for buffer in (*task.reads, *task.writes))
        budget = self.binding.budget
        budget.spend(chunks, handed(self.ranks), f"chunks on each of {self.ranks} ranks", task.span)
        budget.spend(max(copies_of(task, self.buffers_list), 1), TURN, "chunks to copy out", task.span)
        self.steps.append(task)

    @property
    def buffers_list(self) -> tuple[Buffer, ...]:
        return tuple(self.buffers.values())

    def schedule(self) -> Schedule:
        return Schedule(
            name=self.decl.name.text, num_ranks=self.ranks, topology=self.topology, params=tuple(self.params),
            buffers=self.buffers_list, contracts=tuple(self.contracts),
            cycles=tuple(cycles.declared for cycles in self.cycles), steps=tuple(self.steps), tuning=self.tuning,
            role=self.role, roles=self.role_sets, span=self.decl.span, called=tuple(self.called.values()),
            has_empty_loops=self.has_empty_loops,
        )  # fmt: skip
