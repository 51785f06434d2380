"""Turns a term of `ensure` with functions, `sum(matmul(x[q, i], w) @ all) with bias b`, into a `Term` over rows.

`check_clause` finds the mistakes that need no numbers. Assumes, where there are numbers, that it found none. Rows are
the combinations of the binders around a term; each list adds rows of its own. Does not look at the steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from commdsl.ir.contracts import AppliedTerm, ChunkTerm, FinishedTerm, Ints, SumTerm, Term, parts_of
from commdsl.ir.functions import FUNCTIONS
from commdsl.ir.resolve.clauses import NamedRows, check_side, check_sums
from commdsl.ir.resolve.epilogues import check_epilogue, endings_that_hold
from commdsl.ir.resolve.evaluate import Scope
from commdsl.ir.resolve.expressions import ExpressionRules, Kind
from commdsl.ir.resolve.faults import Poisoned, nearest
from commdsl.ir.resolve.rows import Binding, Rows
from commdsl.language import syntax as syn
from commdsl.language.kinds import GIVEN, BufferKind
from commdsl.language.records import dataclass
from commdsl.language.source import Span

ACTOR, PLACE, PIECE, PARENT = "@actor", "@place", "@piece", "@parent"
"""Columns beside the names of a text: the rank of the first binder; the rank of chunks that do not say theirs; the
chunk among those that indices leave out; the row around a list."""

Leading: TypeAlias = tuple[int, Ints, Ints, Ints]
"""A buffer; rows with a rank and a chunk each."""


# --- without numbers --------------------------------------------------------------------------------------------------


def check_clause(rules: ExpressionRules, clause: syn.Clause) -> None:
    """Report unknown names, C115 for lists without an operation, C122 for functions and C596 for endings."""
    for dest in clause.dests:
        rules.ref(dest)
        if dest.place is not None:
            help = "let the first binder be the rank that holds it"
            rules.faults.report("C112", "an ensured chunk is the acting rank's", dest.span, "another rank's", help=help)
    term = clause.term
    if isinstance(term, syn.Application) and term.result is None and len(clause.dests) > 1:
        function = FUNCTIONS.get(term.function.text)
        if function is not None and function.num_results != len(clause.dests):
            label = f"{len(clause.dests)} chunks for {_results(function.num_results)}"
            rules.faults.report("C122", f"`{function.name}` has {_results(function.num_results)}", clause.span, label)
        _applied(rules, term)
    elif len(clause.dests) > 1:
        help = "write a clause for each chunk"
        rules.faults.report("C122", "only functions have several results", term.span, "one value", help=help)
    else:
        _check(rules, term)


def _check(rules: ExpressionRules, term: syn.Term, *, listed: bool = False) -> None:
    """`listed`: right below a sum, where `all` may stand."""
    place = term.place
    if isinstance(place, syn.All) and not listed:
        help = f"write `sum({term.span.text})`, or name the rank"
        rules.faults.report("C115", "a copy has one source", term.span, "a list", help=help)
    elif place is not None and not isinstance(place, syn.All) and not isinstance(term, syn.Ref):
        rules.expect(place, Kind.NUMBER)
    match term:
        case syn.Ref():
            rules.ref(term)
        case syn.Application():
            function = FUNCTIONS.get(term.function.text)
            if function is not None and term.result is None and function.num_results > 1:
                help = f"write `{term.span.text}[0]`, or name a chunk for each: `y, z == {term.span.text}`"
                rules.faults.report("C122", f"`{function.name}` has {_results(function.num_results)}", term.span,
                                    "which of them?", help=help)  # fmt: skip
            _applied(rules, term)
        case syn.Combined(_, parts):
            for part in parts:
                _check(rules, part, listed=True)
        case syn.Listed():
            _listed(rules, term, listed=listed)
        case syn.Finished(of, endings):
            _check(rules, of)
            check_epilogue(rules, endings, afar=True)
        case _:
            assert_never(term)


def _applied(rules: ExpressionRules, term: syn.Application) -> None:
    name = term.function
    function = FUNCTIONS.get(name.text)
    if function is None:
        rules.faults.report("C122", f"no function of the name `{name.text}` is known yet", name.span, "not built in",
                            help=nearest(name.text, FUNCTIONS))  # fmt: skip
    elif len(term.operands) != function.num_operands:
        what = f"`{function.name}` has {function.num_operands} operands"
        rules.faults.report("C122", what, term.span, f"{len(term.operands)} here", help=f"it is {function.meaning}")
    elif term.result is not None and not (function.num_results > 1 and term.result.value < function.num_results):
        label = f"`[{term.result.value}]` is none of them"
        rules.faults.report("C122", f"`{function.name}` has {_results(function.num_results)}", term.result.span, label)
    for operand in term.operands:
        _check(rules, operand)


def _listed(rules: ExpressionRules, term: syn.Listed, *, listed: bool) -> None:
    with rules.block():
        rules.bind(term.binder.name, term.binder.domain)
        if term.condition is not None:
            rules.expect(term.condition, Kind.CONDITION)
        _check(rules, term.of, listed=True)
    if not listed:
        rules.faults.report("C115", "a copy has one source", term.span, "a list",
                            help=f"write `== sum({term.span.text})`")  # fmt: skip
    elif isinstance(term.of.place, syn.All):
        rules.faults.report("C115", "two lists in one sum", term.span, "`@ all` and `for`",
                            help="name the rank: `sum(x @ q for q in 0 ..< P)`")  # fmt: skip


def _results(count: int) -> str:
    return "one result" if count == 1 else f"{count} results"


# --- with numbers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Builder:
    """The clause that a term belongs to."""

    contract: syn.GeneralContract
    binding: Binding
    outer: Scope
    extents: tuple[int, ...]  # that the chunk on the left leaves out

    def at(self, rows: Rows, place: syn.Expr | syn.All | None) -> Rows:
        """The rows, with chunks on the rank of a term; `all` is the list around it, whose rows have their ranks."""
        if place is None or isinstance(place, syn.All):
            return rows
        return _with(rows, PLACE, self.binding.column(place, rows.scope(self.outer), (rows.count,)))

    def term(self, node: syn.Term, rows: Rows) -> Term:
        match node:
            case syn.Ref():
                return self.chunk(node, rows)
            case syn.Application(function, operands, result, place):
                here = self.at(rows, place)
                made = tuple(self.term(operand, here) for operand in operands)
                return AppliedTerm(function.text, made, 0 if result is None else result.value)
            case syn.Combined(operation, parts, place):
                here = _with(self.at(rows, place), PARENT, np.arange(rows.count))
                inner = [self.listed(part, here) for part in parts]
                is_there = np.zeros(rows.count, np.bool_)
                for one in inner:
                    is_there[one.values(PARENT)] = True
                check_sums(self.named(rows), inner_span(node), is_there, self.binding)
                terms = tuple(self.term(part, one) for part, one in zip(parts, inner, strict=True))
                parents = tuple(one.values(PARENT).astype(np.int32) for one in inner)
                return SumTerm(operation, terms, parents, rows.count)
            case syn.Listed(of):
                return self.term(of, rows)
            case syn.Finished(of, endings, place):
                here = self.at(rows, place)
                activation, refs = endings_that_hold(endings, node.span, self.binding, self.outer)
                chunks = {name: self.chunk(ref, here) for name, ref in refs.items()}
                made_of = self.term(of, here)
                if activation is None and not chunks:
                    return made_of
                return FinishedTerm(made_of, chunks.get("bias"), activation, chunks.get("residual"))
            case _:
                assert_never(node)

    def chunk(self, ref: syn.Ref, rows: Rows) -> ChunkTerm:
        binding, scope, shape = self.binding, rows.scope(self.outer), (rows.count,)
        binding.check_there(ref.buffer)
        check_given(binding, ref.buffer)
        rank = self.at(rows, ref.place).values(PLACE).astype(np.int32)
        chunk = binding.chunk(ref, scope, shape)
        if left := binding.missing(ref):
            if left != self.extents:
                said, wanted = (" x ".join(map(str, one)) or "one" for one in (left, self.extents))
                binding.faults.fail("C116", "the two sides are of different shapes", ref.span,
                                    f"`{ref.buffer.text}` gives {said} chunks, the left side has {wanted}",
                                    help="index both sides down to the same extents")  # fmt: skip
            chunk = chunk + rows.values(PIECE).astype(np.int32)
        check_side(self.named(rows), ref, rank, chunk, None, binding)
        return ChunkTerm(list(binding.buffers).index(ref.buffer.text), rank, chunk)

    def named(self, rows: Rows) -> NamedRows:
        return NamedRows(self.contract, rows, rows.values(ACTOR))

    def listed(self, part: syn.Term, rows: Rows) -> Rows:
        """The rows of a part of a sum: one for each value of its binder, or for each rank."""
        if isinstance(part, syn.Listed):
            inner = self.binding.bound(rows, part.binder, self.outer)
            if part.condition is not None:
                inner = inner.filtered(self.binding.condition(part.condition, inner, self.outer))
            return inner
        if isinstance(part.place, syn.All):
            every = syn.Binder(syn.Name(PLACE, span=part.span), None, span=part.span)
            return self.binding.bound(rows, every, self.outer)
        return rows


def term_of(clause: syn.Clause, named: NamedRows, binding: Binding, outer: Scope, extents: tuple[int, ...]) -> Term:
    """Return the term of a clause, with a row for each chunk on its left."""
    count = int(np.prod(extents, dtype=np.int64))
    rows = named.rows.taken(np.repeat(np.arange(named.rows.count), count))
    actor = np.repeat(named.actor, count)
    for name, values in ((ACTOR, actor), (PLACE, actor), (PIECE, np.tile(np.arange(count), named.rows.count))):
        rows = _with(rows, name, values)
    made = _Builder(named.contract, binding, outer, extents).term(clause.term, rows)
    operations = operations_of(made)
    if len(operations) > 1:
        label = " and ".join(f"`{one}`" for one in operations)
        binding.faults.fail("C326", "two operations combine one chunk", clause.term.span, label,
                            help="combine by one operation all that a chunk is made of")  # fmt: skip
    return made


def _with(rows: Rows, name: str, values: NDArray[np.integer]) -> Rows:
    return Rows(rows.count, {**rows.columns, name: values})


def check_given(binding: Binding, name: syn.Name) -> None:
    """C105 for a source that is not an input: of a scratch buffer only functions of the caller say what it holds."""
    if binding.buffers[name.text].kind is BufferKind.SCRATCH and name.text in binding.made:
        return
    computed = binding.computed.get(name.text, "")
    help = f"`{computed}` makes `{name.text}`: write that in its place" if computed else ""
    binding.check_kind(name, GIVEN, "the source of a contract is given by the caller, or computed", help)


def operations_of(term: Term) -> tuple[str, ...]:
    """Return the operations that combine anything in a term, each once."""
    own = (term.operation,) if isinstance(term, SumTerm) else ()
    return tuple(dict.fromkeys((*own, *(one for part in parts_of(term) for one in operations_of(part)))))


# --- the chunks that moves would bring --------------------------------------------------------------------------------


def leading(term: Term) -> Leading:
    """Return the chunks that are combined in each row but for functions, of a function those of its first operand."""
    match term:
        case ChunkTerm(buffer, rank, chunk):
            return buffer, np.arange(len(rank), dtype=np.int32), rank, chunk
        case SumTerm(_, parts, row):
            buffer = leading(parts[0])[0]
            each = zip(row, map(leading, parts), strict=True)
            found = [(at[rows], rank, chunk) for at, (of, rows, rank, chunk) in each if of == buffer]
            rows, rank, chunk = (np.concatenate(one) for one in zip(*found, strict=True))
            order = np.argsort(rows, kind="stable")
            return buffer, rows[order], rank[order], chunk[order]
        case AppliedTerm(_, operands):
            return leading(operands[0])
        case FinishedTerm(of):
            return leading(of)
        case _:
            assert_never(term)


def as_lists(found: Leading, count: int) -> tuple[Ints, Ints, NDArray[np.bool_] | None]:
    """Return ranks and chunks as (count, k), and which of them are meant (None: all)."""
    _, row, rank, chunk = found
    sizes = np.bincount(row, minlength=count)
    width = int(sizes.max(initial=0))
    column = np.arange(len(row)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    ranks, chunks = np.zeros((count, width), np.int32), np.zeros((count, width), np.int32)
    ranks[row, column], chunks[row, column] = rank, chunk
    valid = np.arange(width) < sizes[:, None]
    return ranks, chunks, None if valid.all() else valid


def results_of(term: Term, count: int) -> tuple[Term, ...]:
    """Return a term for each of so many results of the function that a clause applies."""
    if count == 1:
        return (term,)
    if not isinstance(term, AppliedTerm):
        raise Poisoned
    return tuple(replace(term, result=number) for number in range(count))


def inner_span(node: syn.Combined) -> Span:
    """Return the place of what is combined, without the operation around it."""
    return Span(node.span.source, node.parts[0].span.start, node.parts[-1].span.end)
