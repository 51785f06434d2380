"""Turns `do` into steps: those of the schedule that is called, on the ranks of each group and the chunks it is given.

Assumes that `call_rules` found nothing wrong, and a schedule that was resolved for as many ranks as a group has. What
comes out is what would stand there written out: it is held to the laws of the schedule that calls. Does not prove.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NoReturn

import numpy as np

from commdsl.ir.bounds import outside
from commdsl.ir.resolve.call_rules import READ, WRITTEN, report_given
from commdsl.ir.resolve.evaluate import Evaluator, Scope
from commdsl.ir.resolve.faults import Faults, Poisoned, nearest
from commdsl.ir.resolve.machines import AXES
from commdsl.ir.resolve.rows import Binding
from commdsl.ir.schedules import Buffer, Ints, Schedule, Statement, Step
from commdsl.ir.words import bindings_text
from commdsl.language import syntax as syn
from commdsl.language.diagnostics import Label
from commdsl.language.kinds import BufferKind, MoveKind
from commdsl.machine.topology import Axis, Topology

MANY = "give as many chunks as are declared there, or as many for each"
SINGLY = "give one chunk for each: what multiplies takes whole blocks"


def groups(
    decl: syn.GroupDecl, evaluator: Evaluator, scope: Scope, ranks: int, topology: Topology, faults: Faults
) -> Ints:
    """The ranks of each group, (num_groups, size): those of a run that are a stride apart, in rank order."""
    if decl.axis is not None:
        axis = _axis(decl.axis, ranks, topology, faults)
        return _spread(ranks, axis.length * axis.stride, axis.stride)
    run = ranks if decl.runs is None else evaluator.constant(decl.runs, scope)
    stride = 1 if decl.stride is None else evaluator.constant(decl.stride, scope)
    for part, whole, expr, what in ((run, ranks, decl.runs, "run"), (stride, run, decl.stride, "stride")):
        if expr is not None and (part < 1 or whole % part):
            of = f"{whole} ranks" if whole == ranks else f"runs of {whole}"
            faults.fail("C127", "the ranks do not fall into equal groups", expr.span, f"{of}, a {what} of {part}",
                        help="say with `where` for how many ranks the schedule is")  # fmt: skip
    return _spread(ranks, run, stride)


def _axis(name: syn.Name, ranks: int, topology: Topology, faults: Faults) -> Axis:
    """One of the machine, of all of which these ranks are."""
    axis = next((axis for axis in topology.axes if axis.name == name.text), None)
    if axis is None:
        faults.fail("C127", "the ranks do not fall into equal groups", name.span,
                    f"`{topology.name}` has no axis `{name.text}`",
                    help=nearest(name.text, [axis.name for axis in topology.axes]) or AXES)  # fmt: skip
    if ranks != topology.num_ranks:
        faults.fail("C127", "the ranks do not fall into equal groups", name.span,
                    f"an axis of all {topology.num_ranks} ranks of `{topology.name}`, here are {ranks}",
                    help="ask for all of them, or say `in runs of` and `by stride`")  # fmt: skip
    return axis


def _spread(ranks: int, run: int, stride: int) -> Ints:
    table = np.arange(ranks, dtype=np.int32).reshape(-1, run // stride, stride)
    return table.transpose(0, 2, 1).reshape(-1, run // stride)


@dataclass(frozen=True)
class Given:
    """Where the chunks of a buffer of the schedule that is called are."""

    buffer: int
    chunks: Ints  # (ranks, chunks of the buffer, chunks given for each)


class Call:
    """One `do`, with what it gives to the schedule that it calls."""

    def __init__(self, do: syn.Do, schedule: Schedule, group: Ints, scope: Scope, binding: Binding) -> None:
        self.do, self.schedule, self.group, self.binding = do, schedule, group, binding
        self.parts = self._parts()
        shapes = {name: self._extents(part, scope) for name, part in self.parts.items()}
        self.rest = self._rest(shapes)
        self.scope = scope

    def steps(self, scratch: Mapping[str, str], bindings: tuple[tuple[str, int], ...]) -> Iterator[Step]:
        """`scratch`: the buffers that were made for those of the schedule."""
        given = [self._given(buffer, scratch) for buffer in self.schedule.buffers]
        for step in self.schedule.steps:
            assert isinstance(step, Step), "a schedule that is called yields nothing and has no tasks"
            moved = (self._moved(one, step, given) for one in step.moves)
            made = Step(tuple(one for one in moved if len(one.actor)), (*bindings, *step.bindings), step.span)
            self.binding.budget.step(made)
            yield made

    def scratch(self, buffer: Buffer, name: str) -> Buffer:
        """A buffer for one of the schedule's own: as many slots for each as chunks are given for one."""
        slots = prod(self.rest)
        self.binding.budget.spend(buffer.num_chunks * slots, self.binding.num_ranks, "chunks", self.do.span)
        dims = (*buffer.dims, *self.rest)
        return replace(buffer, name=name, dims=dims, cut=buffer.cut * slots)

    # --- what is given ------------------------------------------------------------------------------------------------

    def _parts(self) -> dict[str, syn.Part]:
        """Return what is given for each buffer that exists. Raises Poisoned after C107: more or fewer are given."""
        do, buffers = self.do, self.schedule.buffers
        reads, writes = ([one.name for one in buffers if one.kind in kinds] for kinds in (READ, WRITTEN))
        if (len(reads), len(writes)) != (len(do.reads), len(do.writes)):
            ranks = self.schedule.num_ranks
            values = "".join(f", {name} = {value}" for name, value in self.schedule.params)
            report_given(self.binding.faults, do, reads, writes, f"; {ranks} ranks{values}")
            raise Poisoned
        return dict(zip((*reads, *writes), (*do.reads, *do.writes), strict=True))

    def _extents(self, part: syn.Part, scope: Scope) -> tuple[int, ...]:
        domains = (self.binding.domain(binder.domain, scope) for binder in part.binders)
        counts = tuple(max(int(last) - int(first), 0) for first, last, _ in domains)
        return (*counts, *self.binding.missing(part.ref))

    def _rest(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """The extents behind those that a buffer of the schedule has; they are the same for all."""
        rests = dict[str, tuple[int, ...]]()
        for buffer in self.schedule.buffers:
            extents = shapes.get(buffer.name)
            if extents is None:
                continue
            behind = _behind(extents, buffer.dims)
            if behind is None:
                self._unlike(buffer, f"{_shape(extents)} for `{buffer.declared}`")
            rests[buffer.name] = behind
            first = next(iter(rests.values()))
            if rests[buffer.name] != first:
                one = next(iter(rests))
                self._unlike(buffer, f"{_shape(rests[buffer.name])} for a chunk of `{buffer.name}`, "
                                     f"{_shape(first)} for one of `{one}`")  # fmt: skip
            if prod(behind) > 1 and self.schedule.has_products:
                self._unlike(buffer, f"{_shape(behind)} for a chunk of `{buffer.name}`", SINGLY)
        return next(iter(rests.values()), ())

    def _unlike(self, buffer: Buffer, label: str, help: str = MANY) -> NoReturn:
        declared = (Label(buffer.span, "declared here"),)
        what = f"what is given to `{self.schedule.name}` is of another shape"
        self.binding.faults.report("C116", what, self.parts[buffer.name].span, label, secondary=declared,
                                   help=help)  # fmt: skip
        raise Poisoned

    def _given(self, buffer: Buffer, scratch: Mapping[str, str]) -> Given:
        names, ranks = list(self.binding.buffers), self.binding.num_ranks
        shape = (ranks, buffer.num_chunks, prod(self.rest))
        if buffer.kind is BufferKind.SCRATCH:
            every = np.arange(shape[1] * shape[2], dtype=np.int32).reshape(1, *shape[1:])
            return Given(names.index(scratch[buffer.name]), np.broadcast_to(every, shape))
        part = self.parts[buffer.name]
        acting = self.do.rank or syn.Name(" rank", span=self.do.span)  # no name that a file could have
        rows = self.binding.rows((syn.Binder(acting, None, span=part.span), *part.binders), None, self.scope)
        first = self.binding.chunk(part.ref, rows.scope(self.scope), (rows.count,))
        owner = np.asarray(rows.columns[acting.text])
        found = outside(self.binding.buffers[part.ref.buffer.text], ranks, owner, first)
        if found is not None:
            self.binding.faults.add(found.diagnostic(part.span, f"rank {int(owner[found.row])}"))
            raise Poisoned
        behind = np.arange(prod(self.binding.missing(part.ref)), dtype=np.int32)
        return Given(names.index(part.ref.buffer.text), (first[:, None] + behind).reshape(shape))

    # --- moves --------------------------------------------------------------------------------------------------------

    def _moved(self, one: Statement, step: Step, given: Sequence[Given]) -> Statement:
        """The rows of every group, by acting rank; where a chunk would be copied onto itself there is none."""
        self._check_bounds(one, step)
        rest, count = prod(self.rest), len(self.group) * len(one.actor)
        sources = one.source_rank.shape[1]
        self.binding.budget.allow(count * sources, rest, "moves", self.do.span)
        actor = self.group[:, one.actor].ravel()
        order = np.argsort(actor, kind="stable")
        again = order % len(one.actor) if len(one.actor) else order
        source_rank = self.group[:, one.source_rank].reshape(count, sources)[order]
        dest_rank = self.group[:, one.dest_rank].ravel()[order]
        source, dest = given[one.source_buffer], given[one.dest_buffer]
        source_chunk = source.chunks[source_rank, one.source_chunk[again]].transpose(0, 2, 1).reshape(-1, sources)
        dest_chunk = dest.chunks[dest_rank, one.dest_chunk[again]].ravel()
        valid = None if one.source_valid is None else one.source_valid[again].repeat(rest, axis=0)
        moved = replace(
            one, actor=actor[order].repeat(rest), source_buffer=source.buffer, dest_buffer=dest.buffer,
            source_rank=source_rank.repeat(rest, axis=0), source_chunk=source_chunk, source_valid=valid,
            dest_rank=dest_rank.repeat(rest), dest_chunk=dest_chunk, operation=self._operation(one),
        )  # fmt: skip
        if one.factor is not None and one.factor_chunk is not None:
            return self._multiplied(one, moved, one.factor_chunk[again], one.dest_chunk[again], given)
        return _without_idle(moved) if one.copies and one.cast is None else moved

    def _multiplied(
        self, one: Statement, moved: Statement, factor_chunk: Ints, dest_chunk: Ints, given: Sequence[Given]
    ) -> Statement:
        """The product `moved` by the factor that is given, with the bias and the residual given: chunks of `one`'s
        buffers, a row of `moved` each. Raises Poisoned after C596.
        """
        assert one.factor is not None
        factor = given[one.factor]
        chunks = factor.chunks[moved.actor, factor_chunk, 0]
        bias, residual = one.epilogue.bias, one.epilogue.residual
        if bias is not None:
            of_all = self.schedule.buffers[bias].num_chunks == 1
            bias = self._ending(bias, given, moved.actor, factor_chunk * (not of_all), chunks, one_for_all=True)
        if residual is not None:
            residual = self._ending(residual, given, moved.actor, dest_chunk, moved.dest_chunk, one_for_all=False)
        ends = replace(one.epilogue, bias=bias, residual=residual)
        return replace(moved, factor=factor.buffer, factor_chunk=chunks, epilogue=ends)

    def _ending(
        self, buffer: int, given: Sequence[Given], actor: Ints, chunk: Ints, beside: Ints, *, one_for_all: bool
    ) -> int:
        """Return the number of the buffer given for one that a product adds: an input, of which it reads the chunks
        `beside` those of the factor or the result, or the only one. Raises Poisoned after C596.
        """
        to, name = given[buffer], self.schedule.buffers[buffer].name
        found = list(self.binding.buffers.values())[to.buffer]
        what = help = ""
        if found.kind is not BufferKind.INPUT:
            what, help = f"`{found.name}` is not an input", f"declare `input {found.name}`"
        elif not ((one_for_all and found.num_chunks == 1) or np.array_equal(to.chunks[actor, chunk, 0], beside)):
            beside_of = "factor" if one_for_all else "result"
            what, help = f"another block than that of the {beside_of}", "give both the same indices"
            help += ", or one row for all" if one_for_all else ""
        if what:
            self.binding.faults.fail("C596", "no kernel adds this to a product", self.parts[name].span, what, help=help)
        return to.buffer

    def _operation(self, one: Statement) -> str | None:
        """How it combines: as it says, or as the call does."""
        said = self.do.operation
        return said.text if one.kind is MoveKind.REDUCE and one.operation is None and said else one.operation

    def _check_bounds(self, one: Statement, step: Step) -> None:
        sides = (
            (one.source_buffer, one.source_rank, one.source_chunk, one.source_valid),
            (one.dest_buffer, one.dest_rank, one.dest_chunk, None),
            (one.factor, one.actor, one.factor_chunk, None),
        )
        for buffer, rank, chunk, valid in sides:
            if buffer is None or chunk is None:
                continue
            found = outside(self.schedule.buffers[buffer], self.schedule.num_ranks, rank, chunk, valid)
            if found is not None:
                where = f"rank {int(one.actor[found.row])}{bindings_text(step.bindings)}"
                self.binding.faults.add(found.diagnostic(one.span, where))
                raise Poisoned


def _without_idle(one: Statement) -> Statement:
    """Of moves that overwrite: an input may be given as a part of an output, and what lies there already stays."""
    if one.source_buffer != one.dest_buffer:
        return one
    keep = (one.source_rank[:, 0] != one.dest_rank) | (one.source_chunk[:, 0] != one.dest_chunk)
    return replace(
        one, actor=one.actor[keep], source_rank=one.source_rank[keep], source_chunk=one.source_chunk[keep],
        dest_rank=one.dest_rank[keep], dest_chunk=one.dest_chunk[keep],
    )  # fmt: skip


def _behind(extents: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...] | None:
    """The extents behind those that are declared, of which a 1 may be left out; None where they differ."""
    for dim in dims:
        if extents[:1] == (dim,):
            extents = extents[1:]
        elif dim != 1:
            return None
    return extents


def _shape(extents: tuple[int, ...]) -> str:
    return " x ".join(map(str, extents)) + " chunks" if extents else "one chunk"
