"""Turns `ensure` into what each chunk must hold at the end, as arrays.

Assumes `names` found nothing wrong. Chunk indices are flat: block * cut + piece. Does not look at the steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.contracts import Contract, Ints
from commdsl.ir.resolve.casts import rounding_of
from commdsl.ir.resolve.clauses import NamedRows, check_rows, check_side, check_sums
from commdsl.ir.resolve.evaluate import Scope, Value
from commdsl.ir.resolve.faults import Poisoned
from commdsl.ir.resolve.rotations import rotating_names, rotation
from commdsl.ir.resolve.rows import Binding, spread
from commdsl.ir.resolve.steps import read_list
from commdsl.ir.resolve.terms import as_lists, check_given, leading, operations_of, results_of, term_of
from commdsl.ir.schedules import Buffer
from commdsl.language import syntax as syn
from commdsl.language.kinds import RETURNED
from commdsl.language.records import dataclass
from commdsl.language.source import Span

COMBINING = ("allreduce", "reduce_scatter", "reduce")
"""Collectives whose results are combinations."""
SPLIT_SOURCE = ("reduce_scatter", "alltoall", "scatter")
"""Collectives whose source holds one part for each rank."""
SPLIT_DEST = ("allgather", "alltoall", "gather")
"""Collectives whose destination holds one part from each rank."""


@dataclass(frozen=True)
class _Sides:
    """The two buffers of a collective, and how many chunks a rank's part has."""

    source: Buffer
    dest: Buffer
    part: int
    num_ranks: int

    @property
    def in_place(self) -> bool:
        return self.source is self.dest


@dataclass(frozen=True)
class _Rows:
    """The arrays of a contract, as in ir.Contract."""

    dest_rank: Ints
    dest_chunk: Ints
    value: Ints
    source_rank: Ints
    source_chunk: Ints
    source_valid: NDArray[np.bool_] | None = None


def contracts(ensure: syn.Ensure, binding: Binding, scope: Scope) -> tuple[Contract, ...]:
    """One contract for a named collective, one for each clause of the general form."""
    made: tuple[Contract, ...]
    match ensure.contract:
        case syn.NamedContract(rounding=rounding):
            made = (_named(ensure.contract, binding, scope),)
        case syn.RotationContract():
            for one in rotating_names(ensure.contract):
                binding.check_there(one)
            return (rotation(ensure.contract, binding, scope),)
        case syn.GeneralContract(rounding=rounding):
            clauses = (_clause(ensure.contract, clause, binding, scope) for clause in ensure.contract.clauses)
            made = tuple(one for found in clauses for one in found)
    said = rounding_of(rounding, binding.evaluator, scope, binding.faults)
    return tuple(replace(one, rounding=said) for one in made)


def _contract(
    name: str,
    binding: Binding,
    source: str,
    dest: str,
    operation: str | None,
    root: int | None,
    span: Span,
    rows: _Rows,
) -> Contract:
    names = list(binding.buffers)
    binding.budget.spend(rows.dest_rank.size + rows.source_rank.size, 1, "chunks and contributions", span)
    return Contract(
        name=name, source_buffer=names.index(source), dest_buffer=names.index(dest), operation=operation,
        dest_rank=rows.dest_rank, dest_chunk=rows.dest_chunk, value=rows.value,
        source_rank=rows.source_rank, source_chunk=rows.source_chunk, root=root, span=span,
        source_valid=rows.source_valid,
    )  # fmt: skip


# --- the general form -------------------------------------------------------------------------------------------------


def _clause(contract: syn.GeneralContract, clause: syn.Clause, binding: Binding, outer: Scope) -> Iterator[Contract]:
    """Yield a contract for each chunk on the left."""
    source = _plain(clause.term)
    for ref in (*clause.dests, *(() if source is None else (source.ref,))):
        binding.check_there(ref.buffer)
    for dest in clause.dests:
        binding.check_kind(dest.buffer, RETURNED, "the result of a contract goes to the caller")
    rows = binding.rows(contract.binders, contract.where, outer)
    actor = binding.column(syn.Name(contract.binders[0].name.text, span=clause.span), rows.scope(outer), (rows.count,))
    named = NamedRows(contract, rows, actor)
    if source is not None:
        yield _copied(clause, source, named, binding, outer)
        return
    check_rows(named, binding)
    extents = binding.missing(clause.dests[0])
    binding.budget.allow(rows.count, prod(extents), "chunks", clause.span)
    term = term_of(clause, named, binding, outer, extents)
    operation = next(iter(operations_of(term)), None)
    for dest, of in zip(clause.dests, results_of(term, len(clause.dests)), strict=True):
        if binding.missing(dest) != extents:
            binding.faults.fail("C116", "the results are of different shapes", dest.span, "not as the first one is",
                                help="index all of them down to the same extents")  # fmt: skip
        dest_rank, dest_chunk = _dest(dest, named, binding, outer)
        found = leading(of)
        source_rank, source_chunk, valid = as_lists(found, len(dest_rank))
        value = np.arange(len(dest_rank), dtype=np.int32)
        arrays = _Rows(dest_rank, dest_chunk, value, source_rank, source_chunk, valid)
        name = list(binding.buffers)[found[0]]
        made = _contract("general", binding, name, dest.buffer.text, operation, None, clause.span, arrays)
        yield replace(made, term=of)


def _plain(term: syn.Term) -> syn.Source_ | None:
    """The source of a copy, or of a combination of chunks; None where a clause says more."""
    match term:
        case syn.Ref():
            return syn.Source_(term, span=term.span)
        case syn.Combined(_, (syn.Ref() as ref,), None):
            return syn.Source_(ref, span=ref.span)
        case syn.Combined(_, (syn.Listed(syn.Ref() as ref, binder, condition) as listed,), None):
            return syn.Source_(ref, binder, condition, span=listed.span)
        case _:
            return None


def _dest(ref: syn.Ref, named: NamedRows, binding: Binding, outer: Scope) -> tuple[Ints, Ints]:
    """The rank and the number of every chunk on the left."""
    chunk = binding.chunk(ref, named.rows.scope(outer), (named.rows.count,))
    check_side(named, ref, named.actor, chunk, None, binding)
    extents = binding.missing(ref)
    return spread(named.actor, extents, chunks=False), spread(chunk, extents, chunks=True)


def _copied(clause: syn.Clause, source: syn.Source_, named: NamedRows, binding: Binding, outer: Scope) -> Contract:
    (dest,), rows = clause.dests, named.rows
    extents = binding.check_shapes(source.ref, dest, clause.span)
    binding.budget.allow(rows.count, prod(extents), "chunks", clause.span)
    check_given(binding, source.ref.buffer)
    check_rows(named, binding)
    dest_rank, dest_chunk = _dest(dest, named, binding, outer)
    source_rank, source_chunk, valid = _sources(source, named, rows.scope(outer), binding)
    check_side(named, source.ref, source_rank, source_chunk, valid, binding)
    binding.budget.allow(source_chunk.size, prod(extents), "contributions", clause.span)
    arrays = _Rows(
        dest_rank,
        dest_chunk,
        value=np.arange(len(dest_chunk), dtype=np.int32),
        source_rank=spread(source_rank, extents, chunks=False),
        source_chunk=spread(source_chunk, extents, chunks=True),
        source_valid=None if valid is None else np.repeat(valid, len(dest_chunk) // rows.count, axis=0),
    )
    operation = clause.term.operation if isinstance(clause.term, syn.Combined) else None
    names = source.ref.buffer.text, dest.buffer.text
    return _contract("general", binding, *names, operation, None, clause.span, arrays)


def _sources(
    source: syn.Source_, named: NamedRows, scope: Scope, binding: Binding
) -> tuple[Ints, Ints, NDArray[np.bool_] | None]:
    """Rank and first chunk, (count, k), and which are meant (None: all); at least one in each row."""
    shape, place = (named.rows.count,), source.ref.place
    if source.binder is None and not isinstance(place, syn.All):
        rank = named.actor if place is None else binding.column(place, scope, shape)
        return rank[:, None], binding.chunk(source.ref, scope, shape)[:, None], None
    rank, chunk, valid = read_list(binding, source, scope, named.rows.count, named.actor)
    is_there = np.full(shape, chunk.shape[1] > 0) if valid is None else np.asarray(valid.any(axis=1))
    check_sums(named, source.span, is_there, binding)
    return rank, chunk, valid


# --- the collectives --------------------------------------------------------------------------------------------------


def _named(contract: syn.NamedContract, binding: Binding, scope: Scope) -> Contract:
    name = contract.name.text
    dest_name = contract.dest or contract.source
    for one in (contract.source, dest_name):
        binding.check_there(one)
    check_given(binding, contract.source)
    binding.check_kind(dest_name, RETURNED, "the result of a contract goes to the caller")
    sides = _sides(contract, binding)
    root = None if contract.root is None else _root(contract.root, binding, scope)
    target = _targets(contract, binding, scope) if contract.mapping else None
    rows = _rows(name, sides, root, target)
    operation = None
    if name in COMBINING:
        operation = "sum" if contract.operation is None else contract.operation.text
    return _contract(name, binding, contract.source.text, dest_name.text, operation, root, contract.span, rows)


def _sides(contract: syn.NamedContract, binding: Binding) -> _Sides:
    name, num_ranks = contract.name.text, binding.num_ranks
    source = binding.buffers[contract.source.text]
    dest = binding.buffers[(contract.dest or contract.source).text]
    parts_in = num_ranks if name in SPLIT_SOURCE else 1
    parts_out = num_ranks if name in SPLIT_DEST else 1
    if source is dest:
        _check_in_place(name, source, max(parts_in, parts_out), contract.source.span, binding)
        return _Sides(source, dest, source.num_chunks // max(parts_in, parts_out), num_ranks)
    fits = (source.blocks * parts_out, source.cut) == (dest.blocks * parts_in, dest.cut)
    if not fits or source.blocks % parts_in or dest.blocks % parts_out:
        label = f"{_shape(source)}, {_shape(dest)}"
        binding.faults.fail("C105", f"the buffers do not fit `{name}`", contract.span, label,
                            help=f"blocks and cut must fit, as in `{_example(name)}`")  # fmt: skip
    return _Sides(source, dest, source.num_chunks // parts_in, num_ranks)


def _check_in_place(name: str, buffer: Buffer, parts: int, span: Span, binding: Binding) -> None:
    """A buffer that is both sides holds one part for each rank; those of an all-to-all must be equally long."""
    fits = parts == 1 or (len(buffer.dims) > 0 and buffer.dims[0] == parts)
    if not fits or (name == "alltoall" and buffer.blocks % parts):
        help = f"declare `{buffer.name}[{parts} blocks]`, or give source and result apart"
        binding.faults.fail("C105", f"`{name}` needs one part for each rank", span, _shape(buffer), help=help)


def _shape(buffer: Buffer) -> str:
    return f"`{buffer.name}` is {buffer.blocks} block{'s' if buffer.blocks != 1 else ''} cut into {buffer.cut}"


def _example(name: str) -> str:
    source = "x[P blocks]" if name in SPLIT_SOURCE else "x"
    return f"input {source}  output {'y[P blocks]' if name in SPLIT_DEST else 'y'}"


def _root(expr: syn.Expr, binding: Binding, scope: Scope) -> int:
    root = binding.evaluator.constant(expr, scope)
    if not 0 <= root < binding.num_ranks:
        binding.faults.fail("C105", "the root is not a rank", expr.span, f"rank {root} of {binding.num_ranks}")
    return root


def _targets(contract: syn.NamedContract, binding: Binding, scope: Scope) -> Ints:
    """Where each rank's chunks go; a permutation of the ranks."""
    assert contract.mapping is not None
    name, expr = contract.mapping
    ranks = np.arange(binding.num_ranks)
    extended: Mapping[str, Value] = {**scope, name.text: ranks}
    target = binding.column(expr, extended, (binding.num_ranks,))
    if not np.array_equal(np.sort(target), ranks):
        hit, times = np.unique(target, return_counts=True)
        outside = hit[(hit < 0) | (hit >= binding.num_ranks)]
        label = (
            f"rank {outside[0]} of {binding.num_ranks}"
            if len(outside)
            else f"rank {hit[times > 1][0]} is reached twice"
        )
        binding.faults.fail("C105", "the mapping is not a permutation of the ranks", expr.span, label)
    return target


def _rows(name: str, sides: _Sides, root: int | None, target: Ints | None) -> _Rows:
    ranks, part = np.arange(sides.num_ranks, dtype=np.int32), np.arange(sides.part, dtype=np.int32)
    every = np.arange(sides.source.num_chunks, dtype=np.int32)
    shifted = ranks[:, None] * np.int32(sides.part) + part  # chunk of (rank's part, chunk in it)
    at_root = ranks[:0] if root is None else ranks[root : root + 1]
    match name:
        case "allreduce":
            return _sums(ranks[:, None], every, every, sides)
        case "reduce":
            return _sums(at_root[:, None], every, every, sides)
        case "reduce_scatter":
            return _sums(ranks[:, None], shifted if sides.in_place else part, shifted, sides)
        case "allgather" | "gather":
            to = ranks if name == "allgather" else at_root
            return _copies(to[:, None, None], shifted, ranks[:, None], shifted if sides.in_place else part)
        case "alltoall":
            return _copies(ranks[:, None, None], shifted, ranks[:, None], shifted[:, None, :])
        case "broadcast":
            return _copies(ranks[:, None], every, at_root, every)
        case "scatter":
            return _copies(ranks[:, None], shifted if sides.in_place else part, at_root, shifted)
        case "permutation" if target is not None:
            return _copies(target[:, None], every, ranks[:, None], every)
        case _:
            raise Poisoned


def _sums(dest_rank: Ints, dest_chunk: Ints, source_chunk: Ints, sides: _Sides) -> _Rows:
    """Chunk `source_chunk` of every rank, summed: value v is the sum of chunk v."""
    rank, chunk, value = np.broadcast_arrays(dest_rank, dest_chunk, source_chunk)
    shape = (sides.source.num_chunks, sides.num_ranks)
    return _Rows(
        rank.ravel(), chunk.ravel(), value.ravel(),
        source_rank=np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        source_chunk=np.broadcast_to(np.arange(shape[0], dtype=np.int32)[:, None], shape),
    )  # fmt: skip


def _copies(dest_rank: Ints, dest_chunk: Ints, source_rank: Ints, source_chunk: Ints) -> _Rows:
    """One source for each row."""
    arrays = (array.ravel() for array in np.broadcast_arrays(dest_rank, dest_chunk, source_rank, source_chunk))
    to_rank, to_chunk, from_rank, from_chunk = arrays
    value = np.arange(len(to_rank), dtype=np.int32)
    return _Rows(to_rank, to_chunk, value, from_rank[:, None], from_chunk[:, None])
